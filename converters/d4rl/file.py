"""One D4RL file, open for reading: its columns, which are checked, and the metadata in it.

All columns have as many rows as there are steps. What is below `metadata/` describes the file: it becomes documents.
A file without columns at its root may have them in chunks of rows, in groups `virtual/0`, `virtual/1`, …
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np

from ...core.encodings.h5 import begins_as_h5, stated_bytes
from ...core.encodings.hdf5_files import H5Rows, HeapValues, absurd_size, datasets_in, open_h5, root_members
from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array
from ...core.format.documents import dump_json
from ...core.format.manifest import Dropped, is_inside
from ...core.ted.schema import Key, dtype_name, safe_part
from ..files.columns import DAMAGED, reading
from ..files.hdf5 import plain_value, require_whole_h5
from .datasets import dataset_of_file

REQUIRED = ("observations", "actions", "rewards", "terminals")
NEXT_OBSERVATIONS = "next_observations"
TIMEOUTS = "timeouts"
EPISODE_TERMINALS = "episode_terminals"
"""The ends of episodes in files of d3rlpy 1: what takes the place of `timeouts`."""
FLAGS = ("terminals", TIMEOUTS, EPISODE_TERMINALS)
_KNOWN = (*REQUIRED, TIMEOUTS, NEXT_OBSERVATIONS)
_INFOS = "infos/"
_METADATA = "metadata/"
_DOCUMENT = "metadata.json"
_FEW_NUMBERS = 16
_MOST_METADATA = 64 << 20
_DEEPEST_PARTS = 32
_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)
_FETCH_AGAIN = "copy or fetch the file again, whole"

_CHUNKS = "virtual"
_VALIDS = "valids"
"""A column that D4RL does not have: there, `terminals` mark rows that are no steps."""


class ChunkedColumn:
    """A column whose rows are in several datasets, one after the other; `stops` has the row after each.

    FormatError for datasets whose rows differ in shape or element type.
    """

    def __init__(self, parts: Sequence[h5py.Dataset]) -> None:
        self._parts = parts
        forms = {(part.shape[1:], part.dtype) for part in parts}
        if len(forms) > 1:
            shapes = ", ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype in forms))
            raise FormatError(f"{parts[0].file.filename}: chunks of {parts[0].name!r} differ in their rows: {shapes}")
        self.dtype = parts[0].dtype
        self.stops: list[int] = np.cumsum([len(part) for part in parts]).tolist()
        self.shape = (self.stops[-1], *parts[0].shape[1:])

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, start: int, stop: int) -> Array:
        """Read rows as a fresh array in the byte order of this machine."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype.newbyteorder("="))
        for part, end in zip(self._parts, self.stops, strict=True):
            begin = end - len(part)
            low, high = max(start, begin), min(stop, end)
            if low < high and rows.size:
                part.read_direct(rows[low - start : high - start], np.s_[low - begin : high - begin])
        return rows


Column: TypeAlias = h5py.Dataset | ChunkedColumn


def looks_like_d4rl(file: Path) -> bool:
    """Return whether a file is HDF5 with D4RL's columns, whatever their lengths, or was cut.

    What is no HDF5 counts where D4RL publishes a file of its name: opening it explains how to fetch it again.
    """
    try:
        stated = stated_bytes(file)
        if stated is None:
            return not begins_as_h5(file) and dataset_of_file(file.name) is not None
        if file.stat().st_size < stated:
            return True
        names = set(root_members(file))
        if _VALIDS in names:
            return False
        return set(REQUIRED) <= names or (_CHUNKS in names and _has_chunks(file))
    except _UNREADABLE:
        return False


def _has_chunks(file: Path) -> bool:
    with h5py.File(open_h5(file)) as opened:
        chunks = _chunks_in(opened)
        return bool(chunks) and set(REQUIRED) <= set(chunks[0])


def _chunks_in(file: h5py.File) -> list[h5py.Group]:
    """Return the groups with chunks of rows, in the order of their numbers; none where columns are at the root."""
    group = file.get(_CHUNKS)
    if not isinstance(group, h5py.Group) or REQUIRED[0] in file:
        return []
    numbers = sorted(int(name) for name in group if name.isascii() and name.isdecimal() and name == str(int(name)))
    return [part for number in numbers if isinstance(part := group[str(number)], h5py.Group)]


def again(file: Path) -> str:
    """Return the hint on how to get a damaged file again: the command, where its name is one of D4RL's."""
    known = dataset_of_file(file.name)
    return f"fetch it again: {known.fetch_command}" if known else _FETCH_AGAIN


@dataclass(frozen=True, slots=True)
class FileContents:
    """What a file holds apart from the columns of `D4rlFile`.

    `documents` is its metadata; `dropped` names what is neither a row a step nor metadata.
    """

    documents: dict[str, bytes]
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """A column of information on each step: `path` in the file, `key` in TED, a row of `shape` and type `dtype`."""

    path: str
    key: Key
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Gathered:
    infos: list[InfoColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, bytes] = field(default_factory=dict)
    taken: int = 0


class D4rlFile:
    """An open file. Raises FormatError for columns that contradict each other, CorruptDataError for damaged files.

    `rows` is the number of steps, `infos` lists the columns below `infos/` and any other with a row a step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._again = again(path)
        self._rows: dict[str, H5Rows] = {}
        require_whole_h5(path, hint=again(path))
        with reading("the structure", path, hint=again(path)):
            self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        try:
            with reading("the structure", path, hint=again(path)):
                self._chunks = _chunks_in(self._file)
                top = self._chunks[0] if self._chunks else self._file
                self._columns = {name: self._core(name) for name in _KNOWN if name in top or name in REQUIRED}
                if TIMEOUTS not in top and EPISODE_TERMINALS in top:
                    self._columns[EPISODE_TERMINALS] = self._core(EPISODE_TERMINALS)
                self.rows = self._common_length()
                self._require_shapes()
                found = self._look_around()
        except BaseException:
            self.close()
            raise
        self.infos = tuple(found.infos)
        documents = dict(found.arrays)
        if found.metadata:
            documents[_DOCUMENT] = (dump_json(found.metadata, indent=1) + "\n").encode()
        self.contents = FileContents(documents, tuple(found.dropped))

    @property
    def has_timeouts(self) -> bool:
        """Whether a flag marks the ends by time limit."""
        return TIMEOUTS in self._columns

    @property
    def has_episode_terminals(self) -> bool:
        """Whether `episode_terminals` mark the ends of episodes, and nothing else marks those by time limit."""
        return EPISODE_TERMINALS in self._columns

    @property
    def has_next(self) -> bool:
        """Whether the observation after each step is stored."""
        return NEXT_OBSERVATIONS in self._columns

    @property
    def has_goals(self) -> bool:
        """Whether a goal is stored with each step, as in the mazes."""
        return any(info.path == "infos/goal" for info in self.infos)

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The element type of a column, and the shape of a row; rewards and flags have one number a row."""
        column = self._column(name)
        return dtype_name(column.dtype), () if name in (*FLAGS, "rewards") else column.shape[1:]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a column as a fresh array in the byte order of this machine."""
        column = self._column(name)
        with reading(repr(name), self.path, hint=self._again):
            if isinstance(column, ChunkedColumn):
                rows = column.read(start, stop)
            else:
                held = self._rows.get(name)
                held = self._rows[name] = H5Rows(column, self.path) if held is None else held
                rows = held.read(start, stop)
        return rows.reshape(stop - start) if name in (*FLAGS, "rewards") else rows

    def read_flag(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a flag as bool; FormatError for numbers that are neither 0 nor 1."""
        rows = self.read(name, start, stop)
        if rows.dtype == bool:
            return rows
        odd = (rows != 0) & (rows != 1)
        if odd.any():
            at = int(odd.argmax())
            raise FormatError(f"{self.path}: {name} is {rows[at]} in row {start + at:,}, expected 0 or 1")
        flags: Array = rows != 0
        return flags

    def read_truncated(self, start: int, stop: int) -> Array:
        """Read which rows end by a time limit as a flag states it, bool: none where the file has no such flag."""
        if self.has_timeouts:
            return self.read_flag(TIMEOUTS, start, stop)
        if self.has_episode_terminals:
            ends, terminated = (self.read_flag(name, start, stop) for name in (EPISODE_TERMINALS, "terminals"))
            return ends & ~terminated
        return np.zeros(stop - start, bool)

    def close(self) -> None:
        """Close the file."""
        self._values.close()
        self._file.close()

    def _column(self, name: str) -> Column:
        found = self._columns.get(name)
        if found is None:
            with reading(repr(name), self.path, hint=self._again):
                found = self._columns[name] = self._file[name]
        return found

    def _core(self, name: str) -> Column:
        found = []
        for group in self._chunks or [self._file]:
            column, path = group.get(name), f"{group.name}/{name}".lstrip("/")
            if column is None:
                raise FormatError(f"{self.path} has no {path!r}; D4RL's files have {', '.join(REQUIRED)}")
            if not isinstance(column, h5py.Dataset) or not column.shape:
                raise FormatError(f"{self.path}: {path!r} is no array with a row a step")
            self._require_numbers(path, column)
            found.append(column)
        return ChunkedColumn(found) if self._chunks else found[0]

    def _require_numbers(self, name: str, column: h5py.Dataset) -> None:
        if why := _not_numbers(column):
            raise FormatError(f"{self.path}: {name!r} cannot be read as rows: {why}")
        if why := absurd_size(column.id):
            raise CorruptDataError(f"{self.path}: {name!r} {why}", hint=self._again)

    def _common_length(self) -> int:
        lengths = {name: len(column) for name, column in self._columns.items()}
        stops = {tuple(column.stops) for column in self._columns.values() if isinstance(column, ChunkedColumn)}
        if len(set(lengths.values())) > 1 or len(stops) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(
                f"{self.path}: its columns have different numbers of rows ({listed}), and each has to have one a step",
                hint=self._again,
            )
        rows = lengths["observations"]
        if not rows:
            raise FormatError(f"{self.path} has no steps: its columns are empty")
        return rows

    def _require_shapes(self) -> None:
        for name in ("rewards", *FLAGS):
            column = self._columns.get(name)
            if column is not None and math.prod(column.shape[1:]) != 1:
                raise FormatError(
                    f"{self.path}: {name!r} has rows of shape {list(column.shape[1:])}, expected one number"
                )
        if not self.has_next:
            return
        one, other = (self._columns[name] for name in ("observations", NEXT_OBSERVATIONS))
        if (one.shape, dtype_name(one.dtype)) != (other.shape, dtype_name(other.dtype)):
            raise FormatError(
                f"{self.path}: observations are {one.dtype} {list(one.shape[1:])} and next_observations "
                f"{other.dtype} {list(other.shape[1:])}"
            )

    def _look_around(self) -> _Gathered:
        found = _Gathered()
        attributes = {str(name): self._values.attribute(self._file["/"].id, name) for name in self._file.attrs}
        if attributes:
            found.metadata["attributes"] = {name: plain_value(value) for name, value in sorted(attributes.items())}
        for path, item in datasets_in(self._file):
            if path in self._columns or self._is_chunk(path):
                continue
            if not isinstance(item, h5py.Dataset):
                found.dropped.append(Dropped(path, "it is a type without data"))
            elif path.startswith(_METADATA):
                self._keep(path, item, found)
            else:
                self._sort_in(path, item, found)
        return found

    def _is_chunk(self, path: str) -> bool:
        """Return whether a path names rows of a column."""
        parts = path.split("/")
        return bool(self._chunks) and len(parts) == 3 and parts[0] == _CHUNKS and parts[2] in self._columns

    def _sort_in(self, path: str, column: h5py.Dataset, found: _Gathered) -> None:
        """Take a column with a row a step, and name what is none."""
        why = "it has no data" if column.shape is None else _not_numbers(column) or absurd_size(column.id)
        if not why and not path.startswith(_INFOS) and (other := self._info_of_that_name(path)):
            why = f"{other} has its name"
        if not why and column.shape[:1] != (self.rows,):
            rows = f"{len(column):,} rows" if column.shape else "a single value"
            why = f"it has {rows}, and there are {self.rows:,} steps"
        parts = path.removeprefix(_INFOS).split("/")
        if why or len(parts) > _DEEPEST_PARTS:
            found.dropped.append(Dropped(path, why or "it is nested too deep"))
            return
        key = ("info", *map(safe_part, parts))
        found.infos.append(InfoColumn(path, key, dtype_name(column.dtype), column.shape[1:]))

    def _info_of_that_name(self, path: str) -> str:
        """Return what below `infos/` would have the same key as another column, or be inside it or around it."""
        name = _INFOS.rstrip("/")
        for part in path.split("/"):
            name = f"{name}/{part}"
            if not isinstance(self._file.get(name), h5py.Group):
                return name if name in self._file else ""
        return name

    def _keep(self, path: str, value: h5py.Dataset, found: _Gathered) -> None:
        """Keep a value of the metadata: single values and text in one document, arrays each in a file."""
        if value.shape is None:  # a null dataspace of HDF5
            _put(found.metadata, path.removeprefix(_METADATA).split("/"), None)
            return
        found.taken += max(0, math.prod(value.shape) * value.dtype.itemsize)
        if found.taken > _MOST_METADATA:
            found.dropped.append(Dropped(path, f"the metadata have more than {_MOST_METADATA >> 20} MiB"))
            return
        content = self._values.dataset(path)[()]
        small = not value.shape or (value.dtype.kind in "biuf" and math.prod(value.shape) <= _FEW_NUMBERS)
        if small or value.dtype.kind == "O":
            _put(found.metadata, path.removeprefix(_METADATA).split("/"), plain_value(content))
        elif value.dtype.hasobject or not is_inside(f"{path}.npy"):
            found.dropped.append(Dropped(path, "it is neither numbers nor text"))
        else:
            file = io.BytesIO()
            np.lib.format.write_array(file, np.ascontiguousarray(content), allow_pickle=False)
            found.arrays[f"{path}.npy"] = file.getvalue()


def _not_numbers(column: h5py.Dataset) -> str:
    """Return why a column cannot be rows of numbers; empty where it can."""
    try:
        dtype_name(column.dtype)
    except (SchemaError, TypeError, ValueError) as error:
        return f"its values are no numbers ({str(error) or type(error).__name__})"
    return ""


def _put(document: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = document.setdefault(part, {})
        document = inner if isinstance(inner, dict) else document.setdefault(f"{part}/", {})
    document[parts[-1]] = value
