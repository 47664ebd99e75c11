"""What pyproject.toml and constraints.txt say is what the checkout holds and needs."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import check_sizes
import pictures
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


def test_the_badges_say_what_the_project_says() -> None:
    assert (pictures.IMAGES / "badges.svg").read_text(encoding="utf-8") == pictures.badges()


def test_constraints_are_exact_and_name_no_place() -> None:
    assert len(PINS) > 100
    assert [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", pin)] == []


def test_all_that_an_install_brings_is_pinned() -> None:
    pinned = {canonicalize_name(pin.split("==")[0]) for pin in PINS}
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    assert _closure([*PROJECT["project"]["dependencies"], *dev]) - pinned == set()


def test_the_size_check_points_at_long_files_and_functions() -> None:
    file = source_tree.ROOT / "example.py"
    long_function = "def long() -> None:\n" + "    pass\n" * check_sizes.FUNCTION_LINES
    assert list(check_sizes.long_parts(file, "def short() -> None: ...\n")) == []
    assert [found.split(": ")[2] for found in check_sizes.long_parts(file, long_function)] == ["long has 101 lines"]
    assert len(list(check_sizes.long_parts(file, "pass\n" * (check_sizes.FILE_LINES + 1)))) == 1


@pytest.mark.slow
def test_type_checkers_see_the_types_in_the_environment_that_make_makes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import rbtool\n"
        "buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(8))\n"
        "reveal_type(buffer.sample(4))\n"
        "reveal_type(buffer.sample(4, return_info=True))\n"
        "reveal_type(rbtool.inspect('walks', episode=0))\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert re.findall('type is "(.*)"', done.stdout) == [
        "tensordict.base.TensorDictBase",
        "tuple[tensordict.base.TensorDictBase, dict[Any, Any]]",
        "rbtool.core.verbs.inspect.InspectResult",
    ]
    assert done.returncode == 0, done.stdout


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
