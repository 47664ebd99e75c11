"""The rules of who may import whom, held by reading the source, and of what an import loads, held by importing."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import source_tree
from cases import each

# Parts of core, top floor first. A part may import itself and the floors below its own, not its neighbours.
FLOORS = (
    {"streams"},
    {"experience_replay", "loading", "text"},
    {"verbs"},
    {"datasets", "report", "robots"},
    {"preprocess"},
    {"buffers", "saved_steps", "torchrl"},
    {"transforms", "checkpointers", "maps", "recording", "samplers", "vla", "writers"},
    {"storages", "specs", "trajectories"},
    {"kernels", "results"},
    {"open_steps", "state_folder"},
    {"encodings"},
    {"doctor", "engine", "remote", "stats"},
    {"format"},
    {"options", "ted"},
    {"declarations", "errors", "progress", "torchrl_classes"},
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
KERNEL_USERS = {"kernels", "maps", "samplers", "storages"}
VERSION = "rbtool.core.__version__"

# Finds the modules that declare formats by name: the one upward path.
REGISTRY = "rbtool.core.declarations"

NUMPY_ONLY = (
    "rbtool.converters", "rbtool.core.doctor", "rbtool.core.encodings", "rbtool.core.engine",
    "rbtool.core.format", "rbtool.core.open_steps",
    "rbtool.core.remote", "rbtool.core.report", "rbtool.core.stats", "rbtool.core.ted", "rbtool.core.torchrl.layout",
    "rbtool.core.torchrl.reader", "rbtool.core.torchrl.writer",
)  # fmt: skip
TORCH = {"tensordict", "torch", "torchrl"}
# What opens a dataset as a buffer, or as another library's, which the other modules of its converter do not import.
BUFFERS_OF_CONVERTERS = (
    "rbtool.converters.lerobot.replay", "rbtool.converters.adapters.d3rlpy", "rbtool.converters.adapters.sb3",
)  # fmt: skip
SCREEN = {"click", "rich", "typer"}


class Import(NamedTuple):
    """One imported name: by whom, what, on which line, and whether it was written as a relative import."""

    importer: str
    target: str
    line: int
    relative: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.target}"


MODULES = {source_tree.module_name(file): file for file in source_tree.package_files()}


def imports_in(nodes: Iterable[ast.AST], importer: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yield every import of a module, also those inside functions and under TYPE_CHECKING."""
    package = importer if is_package else importer.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                yield Import(importer, f"{module}.{alias.name}", node.lineno, relative=node.level > 0)


@functools.cache
def read() -> tuple[list[Import], list[tuple[str, int, str]]]:
    """Return every import of the package, and every string with its module and line."""
    imports, strings = list[Import](), list[tuple[str, int, str]]()
    for name, file in MODULES.items():
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        imports += imports_in(nodes, name, is_package=file.name == "__init__.py")
        constants = (node for node in nodes if isinstance(node, ast.Constant))
        strings += [(name, one.lineno, one.value) for one in constants if isinstance(one.value, str)]
    return imports, strings


def all_imports() -> list[Import]:
    """Return every import of the package."""
    return read()[0]


def within(name: str, package: str) -> bool:
    """Say whether a dotted name is a package or lies inside it."""
    return name == package or name.startswith(f"{package}.")


def part_of_core(name: str) -> str | None:
    """Return `samplers` for `rbtool.core.samplers.slices`, and None for what is not inside core."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["rbtool", "core"] and len(parts) > 2 else None


def allowed(importer: str, target: str) -> bool:
    """Say whether one module of the package may import another."""
    if importer == "rbtool" or target == VERSION:
        return True
    if within(importer, "rbtool.cli"):
        return True
    if within(target, "rbtool.cli"):
        return importer == "rbtool.__main__"
    if within(importer, "rbtool.converters"):
        return within(target, "rbtool.converters") or (
            within(target, "rbtool.core") and part_of_core(target) != "testing"
        )
    return within(target, "rbtool.core") and allowed_in_core(importer, target)


def allowed_in_core(importer: str, target: str) -> bool:
    """Say whether one module of core may import another."""
    upper, lower = part_of_core(importer), part_of_core(target)
    if upper == "testing" or upper == lower:
        return True
    if upper not in FLOOR or lower not in FLOOR:
        return False
    if lower == "kernels" and upper not in KERNEL_USERS:
        return False
    return FLOOR[upper] < FLOOR[lower]


def test_every_part_of_core_has_its_floor() -> None:
    parts = {part for name in MODULES if (part := part_of_core(name))}
    assert parts <= FLOOR.keys() | {"testing"}


def test_imports_point_one_way() -> None:
    inside = [found for found in all_imports() if within(found.target, "rbtool")]
    assert [str(found) for found in inside if not allowed(found.importer, found.target)] == []


def test_imports_inside_the_package_are_relative() -> None:
    absolute = [found for found in all_imports() if within(found.target, "rbtool") and not found.relative]
    assert [str(found) for found in absolute] == []


def test_modules_are_named_in_strings_in_one_place_only() -> None:
    named = re.compile(r"rbtool\.(cli|converters|core)\b[\w.:]*")
    found = [
        f"{name}, line {line}: {text}"
        for name, line, text in read()[1]
        if named.fullmatch(text) and name != REGISTRY and not within(name, "rbtool.cli")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("packages", "barred"), [(NUMPY_ONLY, TORCH), (("rbtool.core",), SCREEN)], ids=["numpy only", "no screen"]
)
def test_barred_libraries_are_not_imported(packages: tuple[str, ...], barred: set[str]) -> None:
    found = [
        str(found)
        for found in all_imports()
        if found.target.split(".")[0] in barred and any(within(found.importer, package) for package in packages)
        if found.importer not in BUFFERS_OF_CONVERTERS
    ]
    assert found == []


def test_ted_and_errors_need_numpy_at_most() -> None:
    known = sys.stdlib_module_names | {"numpy", "rbtool"}
    found = [
        str(found)
        for found in all_imports()
        if part_of_core(found.importer) in {"ted", "errors"} and found.target.split(".")[0] not in known
    ]
    assert found == []


@each(
    ("importer", "line", "target"),
    [
        ("rbtool.core.samplers.slices", "from ..storages.base import Storage", "rbtool.core.storages.base.Storage"),
        ("rbtool.core.samplers.slices", "from .. import errors", "rbtool.core.errors"),
        ("rbtool.core.samplers.slices", "from .. import __version__", "rbtool.core.__version__"),
        ("rbtool.cli.app", "from ..core import verbs", "rbtool.core.verbs"),
        ("rbtool.converters.minari", "from .hdf5 import open_file", "rbtool.converters.hdf5.open_file"),
    ],
)
def test_the_rules_let_pass(importer: str, line: str, target: str) -> None:
    (found,) = imports_in(ast.walk(ast.parse(line)), importer)
    assert (found.target, allowed(importer, found.target)) == (target, True)


@each(
    ("importer", "line"),
    [
        ("rbtool.core.ted.schema", "from ..format.memmap.tree import MappedLeaf"),
        ("rbtool.core.samplers.slices", "from ..writers.base import Writer"),
        ("rbtool.core.storages.base", "from .. import load_dataset"),
        ("rbtool.core.storages.base", "from ..samplers.slices import SliceSampler"),
        ("rbtool.core.writers.base", "from ..kernels.gather import gather"),
        ("rbtool.core.format.converter", "from ...converters import minari"),
        ("rbtool.core.format.converter", "def late():\n    from ..verbs.convert import convert"),
        ("rbtool.core.verbs.convert", "from ..testing import readers"),
        ("rbtool.converters.minari", "from ..cli import output"),
    ],
)
def test_the_rules_hold_back(importer: str, line: str) -> None:
    (found,) = imports_in(ast.walk(ast.parse(line)), importer)
    assert not allowed(importer, found.target)


def test_the_source_was_found() -> None:
    assert Path(MODULES["rbtool"]).parent == source_tree.ROOT
