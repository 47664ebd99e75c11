"""Leaves fall off: what remains of the tree without one imports nothing that is gone, and works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import leaves
import pytest
import source_tree
from processes import Interpreter

from rbtool.cli.words import VERBS

WORKS = """
import sys
sys.path.insert(0, sys.argv[1])
import rbtool
assert rbtool.__file__.startswith(sys.argv[1]), rbtool.__file__
for name in dir(rbtool):
    getattr(rbtool, name)
sys.argv = ["rbtool", "--help"]
from rbtool.cli.start import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
"""
EVERY_MODULE = """
import importlib
import pkgutil
for found in pkgutil.walk_packages(rbtool.__path__, "rbtool."):
    if found.name.split(".")[1] in ("core", "converters", "cli"):
        importlib.import_module(found.name)
"""


def test_no_import_dangles_without_a_leaf() -> None:
    assert [f"{edge.importer} imports {edge.imported} of {edge.leaf}" for edge in leaves.unknown_edges()] == []


def test_declared_modules_exist() -> None:
    assert leaves.missing_declarations() == []


def test_every_verb_and_every_converter_is_in_a_leaf_that_exists() -> None:
    paths = [path for leaf in leaves.leaves().values() for path in leaf.paths]
    assert [one for one in paths if not any((leaves.ROOT / f"{one}{end}").exists() for end in ("", ".py"))] == []
    commands = {f"cli/{verb}.py" for verb in VERBS}
    converters = {path.relative_to(leaves.ROOT).as_posix() for path in (leaves.ROOT / "converters").glob("*/*.py")}
    assert [one for one in sorted(commands | converters) if leaves.leaf_of(one) is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", leaves.leaves())
def test_public_names_and_help_work_without_a_leaf(name: str, tmp_path: Path, interpreter: Interpreter) -> None:
    leaves.copy(tmp_path, [name])
    done = interpreter.run(WORKS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_trunk_is_sound_without_any_leaf(tmp_path: Path, interpreter: Interpreter) -> None:
    leaves.copy(tmp_path, leaves.leaves())
    package = tmp_path / "rbtool"
    linted = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=package, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    done = interpreter.run(WORKS + EVERY_MODULE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for name in source_tree.ASIDE:  # mypy takes every folder below a package for a part of it
        shutil.rmtree(package / name, ignore_errors=True)
    words = ["--strict", "--config-file", "rbtool/pyproject.toml", "--cache-dir", "cache", "-p", "rbtool"]
    typed = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=tmp_path, capture_output=True, text=True)
    assert typed.returncode == 0, typed.stdout


@pytest.mark.slow
def test_the_fast_tests_of_the_trunk_pass_without_any_leaf(tmp_path: Path) -> None:
    leaves.copy(tmp_path, leaves.leaves())
    # Tests of Ray need a process of their own, see the Makefile.
    command = ["-m", "pytest", "-q", "--tb=short", "-m", "not slow and not peer", "--ignore-glob=*/test_ray*.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    tested = subprocess.run(
        [sys.executable, *command], cwd=tmp_path / "rbtool", env=environment, capture_output=True, text=True
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
