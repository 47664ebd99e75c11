"""Every example in a docstring does what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import source_tree

import rbtool

MODULES = [
    source_tree.module_name(file) for file in source_tree.package_files() if ">>>" in file.read_text(encoding="utf-8")
]


def test_the_modules_are_those_of_the_installed_package() -> None:
    assert [Path(folder) for folder in rbtool.__path__] == [source_tree.ROOT]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    done = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.failed == 0
    assert done.attempted
