"""What V-D4RL's files hold: rows of what came of an action, and the TED field of each array.

Row i has the observation, and the action and reward that led to it: the first row of an episode has neither. So step i
of an episode takes its observation from row i, and its action, reward and discount from row i + 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...core.encodings.hdf5_files import H5Rows, absurd_size, datasets_in, open_h5
from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.manifest import Dropped
from ...core.format.read_errors import FETCH_AGAIN
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, dtype_name, safe_part
from ..files.columns import reading
from ..files.hdf5 import require_whole_h5
from ..files.npz import NpzFile

PIXELS: Key = ("pixels",)
IS_INIT: Key = ("is_init",)
IS_FIRST, IS_LAST, IS_TERMINAL, STEP_TYPE = "is_first", "is_last", "is_terminal", "step_type"
DISCOUNT = "discount"
FLAGS = (IS_FIRST, IS_LAST, IS_TERMINAL)
NPZ_SUFFIX = ".npz"
HDF5_SUFFIXES = (".hdf5", ".h5")
_IMAGES = ("image", "observation")
_REQUIRED = ("action", "reward")
_DEEPEST_PARTS = 32


def looks_like_vd4rl(names: Iterable[str]) -> bool:
    """Return whether the arrays of a file are those of an episode or of a shard."""
    found = set(names)
    if not found & set(_IMAGES) or not found >= set(_REQUIRED):
        return False
    return bool(found & {IS_FIRST, IS_LAST, STEP_TYPE}) or ("image" in found and bool(found & {IS_TERMINAL, DISCOUNT}))


class ArrayFile(Closing):
    """An open file of arrays that have a row each for every observation; raises our errors for damaged files."""

    path: Path
    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    @abstractmethod
    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return element type and shape of an array."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` as a fresh array in the byte order of this machine."""

    def why_no_numbers(self, name: str) -> str:
        """Return why an array is not of numbers with a row each; empty where it is."""
        dtype, shape = self.form(name)
        if dtype.hasobject:
            return "it is no array of numbers"
        try:
            dtype_name(dtype)
        except SchemaError as error:
            return str(error)
        return "" if shape else "it is a single value"


class NpzRows(NpzFile, ArrayFile):
    """An npz file of one episode."""


class Hdf5Rows(ArrayFile):
    """An HDF5 file of many rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_whole_h5(path)
        with reading("the structure", path):
            self._file = h5py.File(open_h5(path))
        try:
            with reading("the structure", path):
                self._look_around()
        except BaseException:
            self.close()
            raise

    def _look_around(self) -> None:
        found = dict(datasets_in(self._file))
        arrays = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset) and item.shape}
        self.names = tuple(arrays)
        self.others = tuple(name for name in found if name not in arrays)
        for name, array in arrays.items():
            if why := absurd_size(array.id):
                raise CorruptDataError(f"{self.path}: {name!r} {why}", hint=FETCH_AGAIN)
        self._arrays = {name: H5Rows(array, self.path) for name, array in arrays.items()}

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        return self._arrays[name].dtype, self._arrays[name].shape

    def read(self, name: str, start: int, stop: int) -> Array:
        with reading(repr(name), self.path):
            return self._arrays[name].read(start, stop)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """An array as a field of TED; of `step` and `result` the values of a step are in the row after it."""

    name: str
    field: Field
    timing: Timing


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file, what of it is left out, and the number of its rows; `flag_rows` of its flags."""

    columns: tuple[ArrayColumn, ...]
    dropped: tuple[Dropped, ...]
    rows: int
    flag_rows: int


def layout_of(file: ArrayFile, flags: Iterable[str]) -> Layout:
    """Return the columns of a file, of which `flags` are no fields; FormatError for arrays that make no sense.

    All arrays have as many rows; only all of the flags may have one more.
    """
    pixels = next((name for name in _IMAGES if name in file.names), None)
    if pixels is None or not set(_REQUIRED) <= set(file.names):
        there = ", ".join(sorted(file.names)[:12]) or "no arrays"
        raise FormatError(f"{file.path} has {there}, expected image or observation, action and reward")
    core = [name for name in (pixels, *_REQUIRED, DISCOUNT, *flags) if name in file.names]
    for name in core:
        if why := file.why_no_numbers(name):
            raise FormatError(f"{file.path}: {name!r} cannot be read as rows: {why}")
    lengths = {name: file.form(name)[1][0] for name in core}
    rows, marked = lengths[pixels], {lengths[name] for name in flags if name in lengths}
    same = {rows} == {length for name, length in lengths.items() if name not in flags}
    if not same or len(marked) > 1 or not marked <= {rows, rows + 1}:
        listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
        raise FormatError(f"{file.path}: its arrays have different numbers of rows ({listed})")
    for name in ("reward", *(flag for flag in flags if flag in core)):
        if math.prod(file.form(name)[1][1:]) != 1:
            shape = list(file.form(name)[1][1:])
            raise FormatError(f"{file.path}: {name!r} has rows of shape {shape}, expected one number")
    columns = [_column(file, pixels, PIXELS, "state"), _column(file, "action", ACTION, "step")]
    columns.append(_column(file, "reward", REWARD, "result"))
    if DISCOUNT in core:
        columns.append(_column(file, DISCOUNT, (DISCOUNT,), "result"))
    dropped = [Dropped(name, "it is no array with a row for each observation") for name in file.others]
    taken: list[Key] = []
    for name in sorted(set(file.names) - set(core)):
        key = ("state", *map(safe_part, name.split("/")))
        if why := file.why_no_numbers(name) or _why_not(file, name, key, taken, rows):
            dropped.append(Dropped(name, why))
            continue
        taken.append(key)
        columns.append(_column(file, name, key, "state"))
    return Layout(tuple(columns), tuple(dropped), rows, max(marked, default=rows))


def _why_not(file: ArrayFile, name: str, key: Key, taken: list[Key], rows: int) -> str:
    if len(key) > _DEEPEST_PARTS:
        return "it is nested too deep"
    if any(key[: len(one)] == one or one[: len(key)] == key for one in taken):
        return "another array has its name"
    there = file.form(name)[1][0]
    return "" if there == rows else f"it has {there:,} rows, and there are {rows:,} observations"


def _column(file: ArrayFile, name: str, key: Key, timing: Timing) -> ArrayColumn:
    dtype, shape = file.form(name)
    role: Any = {"action": "action", "reward": "reward", "state": "state", DISCOUNT: "info"}.get(key[0], "observation")
    return ArrayColumn(name, Field(key, dtype_name(dtype), () if key == REWARD else shape[1:], role), timing)


def flag_rows(file: ArrayFile, name: str, start: int, stop: int) -> Array:
    """Read rows of a flag as bool; FormatError for numbers that are neither 0 nor 1."""
    rows = file.read(name, start, stop).reshape(-1)
    odd = (rows != 0) & (rows != 1)
    if odd.any():
        at = int(odd.argmax())
        raise FormatError(f"{file.path}: {name} is {rows[at]} in row {start + at:,}, expected 0 or 1")
    flags: Array = rows != 0
    return flags


def form_of(columns: Iterable[ArrayColumn]) -> str:
    """List the columns for people."""
    return ", ".join(f"{column.name} {column.field.dtype} {list(column.field.shape)}" for column in columns)
