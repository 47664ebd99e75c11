"""Every example of every help page does what it says."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from hub_uploads import WRITER, UploadHub

import rbtool.cli
from rbtool.cli.help import Example

MODULES = [importlib.import_module(f"rbtool.cli.{module.name}") for module in pkgutil.iter_modules(rbtool.cli.__path__)]
TABLES = {
    f"{module.__name__}.{name}": table
    for module in MODULES
    for name, table in vars(module).items()
    if name.endswith("EXAMPLES")
}
EXAMPLES = [example for table in TABLES.values() for example in table]


@pytest.fixture(scope="module")
def environment(forked):
    """Commands are forked: there are many of them."""
    return forked


def test_the_tables_are_found():
    assert len(TABLES) >= 11
    assert all(isinstance(example, Example) for example in EXAMPLES)


@pytest.fixture
def uploads(tmp_path, template, request):
    """The variables of a hub that may be written to, and has the dataset that examples download and stream."""
    files = (path for path in (template / "cartpole").rglob("*") if path.is_file())
    with UploadHub(tmp_path / "hub") as server:
        if "upload " not in request.node.name:
            server.create("me/cartpole")
            server.push(
                "me/cartpole", {str(file.relative_to(template / "cartpole")): file.read_bytes() for file in files}
            )
        yield {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITER}


@pytest.mark.parametrize("command", [one.command for one in EXAMPLES if "demo" not in one.command])
def test_an_example_runs(command, folder, shell, uploads):
    places = uploads if "hf://" in command else {}
    done = shell(f"{_room(command)}{command}", folder, PYTHONPATH=str(folder), **places)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def _room(command: str) -> str:
    """An example that makes ./cartpole needs a folder without one."""
    return "rm -r ./cartpole; " if " convert " in command and command.endswith(" ./cartpole") else ""
