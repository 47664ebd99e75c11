"""Minari's HDF5 storage: `main_data.hdf5` with a group an episode.

Uses h5py's low-level API: a dataset of a thousand episodes has ten thousand HDF5 datasets, and each access through the
high-level API takes 60 to 100 microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t

from ...core.encodings.h5_open import absurd_size, members, open_h5
from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array
from ...core.ted.schema import dtype_name
from .metadata import HDF5_FILE
from .spaces import SpacePath
from .store import DERIVED, ColumnForm, ColumnPath, EpisodeStore, StoredColumn, StoredEpisode, reading

_EPISODE = re.compile(rb"episode_(0|[1-9]\d{0,17})")
_DEEPEST = 32
_KEPT_STRUCTURE = 1 << 20
_NO_DATA = ColumnForm("odd", why="it is a type without data")
_SINGLE = ColumnForm("odd", why="it is a single value, not one a step")


class Hdf5Store(EpisodeStore):
    """The episodes of `main_data.hdf5`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HDF5_FILE
        self.forms: dict[tuple[bytes, tuple[int, ...]], ColumnForm] = {}
        self._file: h5f.FileID | None = None
        self._other_names: list[str] = []
        self.numbers = []
        if not self.path.is_file():
            raise FormatError(f"{self.path} is missing", hint="copy or fetch the dataset again, whole")
        if self.path.stat().st_size:  # a Minari dataset without episodes is an empty file
            self._open()

    def _open(self) -> None:
        with reading("the structure", self.path):
            self._file = open_h5(self.path, _access())
            names = members(h5g.open(self._file, b"/"))
        found = {name: _EPISODE.fullmatch(name) for name in names}
        self.numbers = sorted(int(match[1]) for match in found.values() if match)
        self._other_names = [_text(name, str(self.path)) for name, match in found.items() if not match]

    def episode(self, number: int) -> StoredEpisode:
        """Open the group of one episode."""
        with reading(f"episode {number}", self.path):
            return _Hdf5Episode(self, number, h5g.open(self._file, b"episode_%d" % number))

    def location(self, path: SpacePath) -> ColumnPath:
        """Map a path: Tuple elements are named `_index_0`, …; a slash in the name of a Dict entry makes groups."""
        names = (f"_index_{part}" if isinstance(part, int) else part for part in path)
        return tuple(part for name in names for part in name.split("/") if part not in ("", "."))

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]

    def other_names(self) -> list[str]:
        """Groups and datasets that are not episodes."""
        return self._other_names

    def close(self) -> None:
        """Close the file and everything opened in it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _access() -> h5p.PropFAID:
    """Properties to open a file with.

    By default HDF5 caches up to 32 MB of metadata, which takes 400 MB of memory. Each episode is read once, and a
    cache of 1 MB is even faster.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(True, True)  # file systems without locks will do
    cache = access.get_mdc_config()
    cache.set_initial_size = True
    cache.initial_size = cache.min_size = cache.max_size = _KEPT_STRUCTURE
    cache.incr_mode = cache.flash_incr_mode = cache.decr_mode = 0
    access.set_mdc_config(cache)
    return access


class _Hdf5Episode(StoredEpisode):
    def __init__(self, store: Hdf5Store, number: int, group: h5g.GroupID) -> None:
        self._store = store
        self._group = group
        self._number = number
        self._open: dict[ColumnPath, h5d.DatasetID] = {}

    def columns(self) -> dict[ColumnPath, StoredColumn]:
        found: dict[ColumnPath, StoredColumn] = {}
        with reading(f"episode {self._number}", self._store.path):
            self._walk(self._group, (), found)
        return found

    def _walk(self, group: h5g.GroupID, prefix: ColumnPath, found: dict[ColumnPath, StoredColumn]) -> None:
        if len(prefix) > _DEEPEST:
            raise FormatError(f"episode {self._number} is nested more than {_DEEPEST} groups deep")
        for name in members(group):
            path = (*prefix, _text(name, f"episode {self._number}"))
            item = h5o.open(group, name)
            if isinstance(item, h5g.GroupID):
                self._walk(item, path, found)
            elif isinstance(item, h5d.DatasetID):
                self._open[path] = item
                found[path] = self._column(item)
            else:
                found[path] = StoredColumn(_NO_DATA, 0)

    def _column(self, dataset: h5d.DatasetID) -> StoredColumn:
        kind = dataset.get_type()
        space = dataset.get_space()
        if space.get_simple_extent_type() != h5s.SIMPLE:
            return StoredColumn(_SINGLE, 0)
        rows, *row = space.get_simple_extent_dims()
        if why := absurd_size(dataset):
            raise FormatError(
                f"a dataset of episode {self._number} {why}", hint="copy or fetch the dataset again, whole"
            )
        known = (kind.encode(), tuple(row))
        form = self._store.forms.get(known)
        if form is None:
            form = self._store.forms[known] = _form(kind, tuple(row))
        return StoredColumn(form, rows)

    def form(self, path: ColumnPath) -> ColumnForm:
        return self._column(self._dataset(path)).form

    def array(self, path: ColumnPath, start: int, stop: int, form: ColumnForm | None = None) -> Array:
        dataset = self._dataset(path)
        form = form or self._column(dataset).form
        rows = np.empty((stop - start, *form.shape), form.dtype)
        if rows.size:
            self._read(path, dataset, start, rows)
        return rows

    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        dataset = self._dataset(path)
        rows = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype)
        if rows.size:
            self._read(path, dataset, start, rows)
        return [row if isinstance(row, bytes) else row.tobytes() for row in rows]

    def attribute_paths(self) -> Collection[ColumnPath]:
        with reading(f"the attributes of episode {self._number}", self._store.path):
            return self._attribute_names().keys()

    def attributes(self) -> Mapping[ColumnPath, Any]:
        with reading(f"the attributes of episode {self._number}", self._store.path):
            return {path: self._attribute(name) for path, name in self._attribute_names().items()}

    def _attribute_names(self) -> dict[ColumnPath, bytes]:
        """Map paths to names; Minari writes nested options as `options/<name>/<name>`."""
        names: list[bytes] = []
        h5a.iterate(self._group, names.append)
        known = {_text(name, f"episode {self._number}"): name for name in names}
        return {tuple(name.split("/")): known[name] for name in sorted(known.keys() - DERIVED)}

    def _attribute(self, name: bytes) -> Any:
        return h5py.Group(self._group).attrs[name]

    def _dataset(self, path: ColumnPath) -> h5d.DatasetID:
        found = self._open.get(path)
        if found is None:
            with reading(f"{'/'.join(path)!r} of episode {self._number}", self._store.path):
                found = self._open[path] = h5d.open(self._group, "/".join(path).encode())
        return found

    def _read(self, path: ColumnPath, dataset: h5d.DatasetID, start: int, rows: Array) -> None:
        """Fill `rows` from row `start` of the column on."""
        with reading(f"{'/'.join(path)!r} of episode {self._number}", self._store.path):
            chosen = dataset.get_space()
            chosen.select_hyperslab((start, *(0 for _ in rows.shape[1:])), rows.shape)
            dataset.read(h5s.create_simple(rows.shape), chosen, rows)


def _text(name: bytes, where: str) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise CorruptDataError(f"the name {name!r} in {where} is not UTF-8") from None


def _form(kind: h5t.TypeID, row: tuple[int, ...]) -> ColumnForm:
    """The form of a column of this HDF5 type."""
    try:
        dtype = kind.dtype
    except (TypeError, ValueError):
        return ColumnForm("odd", why="its HDF5 type is unknown")
    if h5py.check_string_dtype(dtype) is not None:
        return ColumnForm("odd", why="it holds strings in more than one dimension") if row else ColumnForm("text")
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None:
        if inner == np.uint8 and not row:
            return ColumnForm("bytes")
        return ColumnForm("odd", why="its rows are arrays of different lengths")
    try:
        return ColumnForm("array", dtype_name(dtype), row)
    except SchemaError:
        return ColumnForm("odd", why=f"its element type {dtype} cannot be stored")
