"""The shell lines and the Python examples of the documentation run, page by page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, folder: Path, forked: Mapping[str, str]) -> None:
    places = {
        "HOME": str(folder),
        "MINARI_DATASETS_PATH": str(folder / "rbtool-demo/minari"),
        "RBTOOL_HOME": str(folder / "rbtool-demo/store"),
    }
    text = page.read_text(encoding="utf-8")
    script, programs = ["set -e -o pipefail"], []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "sh":
            script.append(block)
        else:
            programs.append(block)
    commands = [["bash", "-c", "\n".join(script)], *([sys.executable, "-c", block] for block in programs)]
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, env={**forked, **places}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stderr}"
