"""What belongs to this checkout: its root, packages and modules, found without importing any of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Folders of the root that are not part of the package; `make demo` leaves the last one.
ASIDE = frozenset({"benchmarks", "build", "dist", "docs", "examples", "tests", "rbtool-demo"})


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> list[Path]:
    """Return the Python files of the package, sorted."""
    return sorted(_python_files(ROOT, skip=ASIDE))


def other_files() -> list[Path]:
    """Return the Python files of the tests, the benchmarks, the examples and the documentation, sorted."""
    return sorted(file for name in ("benchmarks", "docs", "examples", "tests") for file in _python_files(ROOT / name))


def module_name(file: Path) -> str:
    """Return the name under which a file of the package is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("rbtool", *parts)).removesuffix(".__init__")


def _python_files(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith((".", "__pycache__")) or entry.name in skip:
            continue
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.suffix == ".py":
            yield entry
