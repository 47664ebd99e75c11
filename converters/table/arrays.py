"""Columns that are NumPy arrays: in a npz file, or as `.npy` files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ..files.npy import NpyFile
from ..files.npz import NpzFile
from .columns import TEXT, TableColumn, TableFile, array_column

_DEEPEST = 8
_MOST_FILES = 1000


class NpzTable(TableFile):
    """A npz file, of which each array is a column. Rows that are read forward are unpacked once.

    `trusted` allows arrays of Python objects to be read, which are pickles.
    """

    kind = "npz file"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                self.columns = {name: self._column(name, trusted) for name in self._file.names}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, trusted: bool) -> TableColumn:
        why = ""
        if trusted and self._file.is_pickled(name) and self._file.form(name)[1]:
            why = _why_not(partial(self._file.unpickle, name), f"{self.path}: {name!r}")
        return _column(name, *self._file.form(name), pickled=self._file.is_pickled(name), why=why)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._file.read(name, start, stop) for name in names}

    def verify_read(self) -> None:
        self._file.verify_read()

    def close(self) -> None:
        self._file.close()


class NpyFolder(TableFile):
    """A folder of `.npy` files, each a column; those in folders inside it are in groups.

    `trusted` allows arrays of Python objects to be read, which are pickles.
    """

    kind = "folder of npy files"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._arrays: dict[str, NpyFile] = {}
        self._files = [file for _, file in npy_files(path)]
        try:
            for name, file in npy_files(path):
                self._arrays[name] = NpyFile(file)
            self.columns = {name: _npy_column(name, array, trusted) for name, array in self._arrays.items()}
        except BaseException:
            self.close()
            raise

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._arrays[name].read(start, stop) for name in names}

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        for array in self._arrays.values():
            array.close()


def _npy_column(name: str, array: NpyFile, trusted: bool) -> TableColumn:
    why = ""
    if trusted and array.is_pickled and array.header.shape:
        why = _why_not(array.unpickle, str(array.path))
    return _column(name, array.header.dtype, array.header.shape, pickled=array.is_pickled, why=why)


def _why_not(unpickle: Callable[[], None], what: str) -> str:
    """Read a pickle; return why it has no rows of one type, empty where it has."""
    try:
        unpickle()
    except FormatError as error:
        return f"it{error.message.removeprefix(what)}"
    return ""


def _column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, pickled: bool, why: str) -> TableColumn:
    if pickled and shape:
        untrusted = "its elements are Python objects, a pickle, which --trust-pickle reads"
        return TableColumn(name, str(dtype), shape[1:], shape[0], why or untrusted, pickled=not why)
    if dtype.kind in "USO" and shape:
        return TableColumn(name, TEXT, shape[1:], shape[0])
    return array_column(name, dtype, shape)


def npy_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the `.npy` files below a folder, by their path in it without the suffix; links to folders are passed over.

    FormatError for folders that are nested too deep, and for more files than can be columns.
    """
    pending = [("", folder, 0)]
    found = []
    while pending:
        prefix, here, depth = pending.pop()
        if depth > _DEEPEST:
            raise FormatError(f"{here} is nested more than {_DEEPEST} folders deep")
        for entry in here.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                pending.append((f"{prefix}{entry.name}/", entry, depth + 1))
            elif entry.suffix == ".npy" and entry.is_file():
                found.append((f"{prefix}{entry.stem}", entry))
        if len(found) > _MOST_FILES:
            raise FormatError(f"{folder} has more than {_MOST_FILES:,} npy files: they are no columns of one table")
    yield from sorted(found)
