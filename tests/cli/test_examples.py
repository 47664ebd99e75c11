"""Every example of every help page and of the documentation does what it says."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hub import WRITER, UploadHub
from processes import Interpreter
from source_tree import ROOT

import rbtool
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


def test_examples_are_found_in_the_modules():
    assert len(TABLES) >= 11
    assert all(isinstance(example, Example) for example in EXAMPLES)


@pytest.fixture
def uploads(tmp_path, template, request):
    """The variables of a hub that may be written to, and has the dataset that examples download and stream."""
    place = template / "cartpole"
    files = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with UploadHub(tmp_path / "hub") as server:
        if "upload " not in request.node.name:
            server.create("me/cartpole")
            server.push("me/cartpole", files)
        yield {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITER}


COMMANDS = [one.command for one in EXAMPLES if "demo" not in one.command]
# These start and time several libraries, which takes longer than a hundred other examples.
SLOW = {command for command in COMMANDS if command.startswith("rbtool bench") and "--folder" not in command}
# These write nothing, and need no copy of the template.
READING = re.compile(
    r"rbtool (check|env|inspect|list|plot|sample|schema|stats)\b((?! -o | --write|>|&|hf:|download).)*"
)


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in COMMANDS]
)
def test_an_example_of_a_help_page_runs(command, template, shell, request):
    folder = template if READING.fullmatch(command) else request.getfixturevalue("folder")
    places = request.getfixturevalue("uploads") if "hf://" in command else {}
    done = shell(f"{_room(command)}{command}", folder, PYTHONPATH=str(folder), **places)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def _room(command: str) -> str:
    """An example that makes ./cartpole needs a folder without one."""
    return "rm -r ./cartpole; " if " convert " in command and command.endswith(" ./cartpole") else ""


# The shell lines and the Python examples of the documentation run, page by page.

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if re.search(r"^```(sh|python)$", page.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def demo_folder(demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder in which `rbtool demo` was run."""
    return Path(shutil.copytree(demo[0], tmp_path_factory.mktemp("docs") / "demo"))


@pytest.fixture(scope="module")
def programs(environment: Mapping[str, str], demo_folder: Path) -> Iterator[Interpreter]:
    """Runs Python examples in processes that have imported torch and tensordict alone."""
    running = Interpreter("torch", "tensordict", environment={**environment, **places(demo_folder)})
    yield running
    running.close()


def places(demo_folder: Path) -> dict[str, str]:
    """The variables of somebody whose home is the folder."""
    demo = demo_folder / "rbtool-demo"
    return {"HOME": str(demo_folder), "MINARI_DATASETS_PATH": str(demo / "minari"), "RBTOOL_HOME": str(demo / "store")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, demo_folder, environment: Mapping[str, str], programs: Interpreter) -> None:
    script, examples = ["set -e -o pipefail"], []
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (script if language == "sh" else examples).append(block)
    command, variables = ["bash", "-c", "\n".join(script)], {**environment, **places(demo_folder)}
    done = subprocess.run(command, cwd=demo_folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for example in examples:
        done = programs.run(example, cwd=demo_folder)
        assert done.returncode == 0, f"{example}\n{done.stderr}"
