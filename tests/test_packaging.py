"""What pyproject.toml and constraints.txt say is what the checkout holds and needs."""

from __future__ import annotations

import ast
import importlib.metadata
import re

import check_sizes
import house
import pytest
import source_tree
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rbtool

PROJECT = source_tree.project()
# What torch brings for a graphics card differs from machine to machine, and torch pins it itself.
ACCELERATOR = ("cuda-", "nvidia-", "triton")
PINS = [
    line
    for line in (source_tree.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_listed_packages_are_the_folders_with_an_init_file() -> None:
    folders = [source_tree.module_name(file) for file in source_tree.package_files() if file.name == "__init__.py"]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_every_module_lies_in_a_package() -> None:
    stray = [file for file in source_tree.package_files() if not (file.parent / "__init__.py").exists()]
    assert stray == []


def test_the_version_is_the_same_everywhere() -> None:
    assert rbtool.__version__ == PROJECT["project"]["version"]
    changelog = (source_tree.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{rbtool.__version__}]" in changelog


@pytest.mark.parametrize("pin", PINS)
def test_constraints_are_exact_and_name_no_place(pin: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", pin)


def test_all_that_an_install_brings_is_pinned() -> None:
    pinned = {canonicalize_name(pin.split("==")[0]) for pin in PINS}
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    assert _closure([*PROJECT["project"]["dependencies"], *dev]) - pinned == set()


def test_the_size_check_sees_what_it_is_for() -> None:
    long_function = "def long() -> None:\n" + "    pass\n" * check_sizes.FUNCTION_LINES
    source = f"# {'TO' + 'DO'}: later\ndef bare():\n    pass\n{long_function}"
    file = source_tree.ROOT / "example.py"
    found = list(check_sizes.problems(file, source, annotated=True))
    assert [problem.split(": ", 1)[1].split(" ")[0] for problem in found] == ["TO" + "DO:", "bare", "long"]


def test_the_word_check_reads_docstrings_comments_and_messages_but_no_names() -> None:
    source = '"""It tells."""\ntold = {"told": 1}  # lies\nraise ValueError(f"{told} stands here, as it says")\n'
    tree = ast.parse(source)
    assert list(house.words_of(source, tree)) == [(1, "tells"), (2, "lies")]
    assert list(house.messages_of(tree)) == [(3, "stands")]


def _closure(requirements: list[str]) -> set[str]:
    """Return the names of the installed distributions that the requirements lead to, through all of theirs."""
    seen: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if (
            name in seen
            or name.startswith(ACCELERATOR)
            or (requirement.marker and not requirement.marker.evaluate({"extra": ""}))
        ):
            continue
        seen.add(name)
        pending += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return seen
