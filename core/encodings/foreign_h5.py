"""HDF5 files of other libraries: which file is meant, whether it is whole, and what is in its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptDataError, RbtoolError
from .h5_layout import begins_as_h5, stated_bytes
from .h5_open import root_members
from .stored_columns import DAMAGED, FETCH_AGAIN

_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)
_SHOWN = 3
_SUFFIXES = frozenset({".hdf5", ".h5", ".hdf"})


def h5_files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that are HDF5 by their names, sorted."""
    yield from (file for file in sorted(folder.iterdir()) if file.suffix.lower() in _SUFFIXES and file.is_file())


def h5_file_at(path: Path) -> Path | None:
    """Return the file itself, or the only HDF5 file in a folder; None for anything else."""
    if path.is_file():
        return path
    if not path.is_dir():
        return None
    found = list(h5_files_in(path))
    return found[0] if len(found) == 1 else None


def other_files_note(path: Path, read: Path) -> Iterator[str]:
    """Yield a sentence on what else is in a folder of which one file is read; hidden files need none."""
    if path == read:
        return
    names = sorted(one.name for one in path.iterdir() if one.name != read.name and not one.name.startswith("."))
    if names:
        listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        which = (
            "another entry of the folder is" if len(names) == 1 else f"{len(names):,} other entries of the folder are"
        )
        yield f"{which} not read: {listed}"


def is_whole_h5(file: Path) -> bool:
    """Return whether a file begins with the header of HDF5 and has as many bytes as that states. Raises nothing."""
    try:
        stated = stated_bytes(file)
        return stated is not None and file.stat().st_size >= stated
    except (RbtoolError, OSError):
        return False


def require_whole_h5(file: Path, *, hint: str = FETCH_AGAIN) -> None:
    """Raise CorruptDataError for what is no HDF5 file, or has fewer bytes than its header states."""
    if not begins_as_h5(file):
        with file.open("rb") as opened:
            head = opened.read(16)
        raise CorruptDataError(f"{file} is no HDF5 file: it begins with {head!r}", hint=hint)
    stated, size = stated_bytes(file), file.stat().st_size
    if stated is not None and size < stated:
        raise CorruptDataError(
            f"{file} was cut: it has {size:,} bytes, and its header states {stated:,} (a truncated file)", hint=hint
        )


def names_in(file: Path, group: str = "") -> list[str]:
    """List the names at the root of a file or in a group there; none for a file that is damaged. Raises nothing."""
    try:
        return root_members(file, group) if is_whole_h5(file) else []
    except _UNREADABLE:
        return []


def plain_value(value: Any) -> Any:
    """Return a value of HDF5 as JSON: text decoded, numbers as they are, numbers that JSON lacks as text."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
