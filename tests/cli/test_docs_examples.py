"""The shell lines and the Python examples of the documentation run, page by page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from forked_scripts import Interpreter
from source_tree import ROOT

import rbtool

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if re.search(r"^```(sh|python)$", page.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `rbtool demo` was run."""
    folder = tmp_path_factory.mktemp("docs")
    rbtool.demo(folder / "rbtool-demo")
    return folder


@pytest.fixture(scope="module")
def programs(forked: Mapping[str, str], folder: Path) -> Iterator[Interpreter]:
    """Runs Python examples in processes that have imported torch and tensordict alone."""
    running = Interpreter("torch", "tensordict", environment={**forked, **places(folder)})
    yield running
    running.close()


def places(folder: Path) -> dict[str, str]:
    """The variables of somebody whose home is the folder."""
    demo = folder / "rbtool-demo"
    return {"HOME": str(folder), "MINARI_DATASETS_PATH": str(demo / "minari"), "RBTOOL_HOME": str(demo / "store")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, folder: Path, forked: Mapping[str, str], programs: Interpreter) -> None:
    script, examples = ["set -e -o pipefail"], []
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (script if language == "sh" else examples).append(block)
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env={**forked, **places(folder)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for example in examples:
        done = programs.run(example, cwd=folder)
        assert done.returncode == 0, f"{example}\n{done.stderr}"
