"""TorchRL's flat and nested layouts: one file per leaf, in nested with a table of the trajectories' shapes.

The bytes of the leaves are the same in both. A file may be longer than its shape: over an older, larger checkpoint
TorchRL leaves the rest of it, and after a trajectory that ends an unfinished lane a row that no table counts. Rows
that were never written are holes in the files.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from ..encodings.flat import nested_leaves, write_tables
from ..encodings.streams import LeafFile
from ..errors import CorruptDataError, FormatError
from ..format import fs
from ..format.contracts import Array
from ..format.digest import bytes_of, read_regular
from ..format.documents import parse_json
from ..format.open_files import OpenFiles
from ..format.ted.tree import MappedLeaf, leaf_path, read_tree, write_tree_meta
from ..ted.schema import Field, Key, file_stem, key_name, role_of
from .layout import STORAGE_SHAPE, Counts, StoredLeaves, TorchrlHeader, TorchrlKeys

LENGTH = "storage_metadata.json"
_TABLE = ".shape.memmap"


class FolderLeaves(StoredLeaves):
    """The leaves of a folder in layout flat or nested."""

    def __init__(self, path: Path, keys: TorchrlKeys, files: OpenFiles) -> None:
        super().__init__(path, keys, files)
        self.header = TorchrlHeader.checked(
            _constant(files, STORAGE_SHAPE), _constant(files, keys.is_full), _constant(files, keys.shift),
            _length(files), str(path),
        )  # fmt: skip
        _refuse_other_entries(files, "", keys.names)
        leaves = read_tree(files, exact=False)
        if len({leaf.nested for leaf in leaves.values()}) != 1:
            raise FormatError(f"{path} is neither flat nor nested: not all of its leaves are kept alike")
        self.nested = next(iter(leaves.values())).nested
        tables = {key: self._table(key, leaf) for key, leaf in leaves.items()} if self.nested else {}
        rows, self.fields = {}, {}
        for key, leaf in leaves.items():
            rows[key] = int(tables[key][:, 0].sum()) if self.nested else _rows(path, key, leaf)
            shape = tuple(map(int, tables[key][0, 1:])) if self.nested else leaf.shape[1:]
            self.fields[key] = Field(key, leaf.dtype, shape, role_of(key))
            self._require_bytes(key, rows[key])
        self._require_steps(rows)
        self.ends = self._find_ends()
        counts = Counts(self.header, self.ends)
        with_ends = int(counts.states.sum()) if self.nested else self.header.steps + len(self.ends)
        self.states = self._choose_states(rows, with_ends)
        for key, table in tables.items():
            if not np.array_equal(table[:, 0], counts.states if key in self.states else counts.steps):
                raise CorruptDataError(
                    f"{path / leaf_path(key, _TABLE)} gives the trajectories other lengths than the done flags"
                )

    def fetch(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of a file by position."""
        return self.files.rows(leaf_path(key), self.fields[key], start, stop)

    def _table(self, key: Key, leaf: MappedLeaf) -> Array:
        name = leaf_path(key, _TABLE)
        path, found = self.path / name, self.files.size(name)
        size = math.prod(leaf.shape)
        if len(leaf.shape) != 2 or not size:
            raise CorruptDataError(f"{self.path}: {key_name(key)!r} has a table of shapes of size {list(leaf.shape)}")
        if found is None:
            raise CorruptDataError(f"{path}, the table of the shapes of {key_name(key)!r}, is missing")
        if found < size * 8:
            raise CorruptDataError(f"{path} has {found:,} bytes, {size * 8:,} are expected: it was cut")
        table: Array = np.frombuffer(self.files.read(name), np.int64, size).reshape(leaf.shape)
        if (table < 0).any() or (table[:, 1:] != table[0, 1:]).any():
            raise CorruptDataError(f"{path} does not give all trajectories rows of one shape")
        return table

    def _require_bytes(self, key: Key, rows: int) -> None:
        path, needed = self.path / leaf_path(key), rows * self.fields[key].row_bytes
        found = self.files.size(leaf_path(key))
        if found is None and needed:
            raise CorruptDataError(f"{path} is missing; {needed:,} bytes are expected there")
        if (found or 0) < needed:
            raise CorruptDataError(f"{path} has {found:,} bytes, {needed:,} are expected: it was cut")

    def _require_steps(self, rows: dict[Key, int]) -> None:
        """Before any flag is read: the flags must cover the storage."""
        found = rows.get(self.keys.done, self.header.steps)
        if found != self.header.steps:
            raise CorruptDataError(
                f"{self.path}: {key_name(self.keys.done)!r} has {found:,} rows, a storage of "
                f"{list(self.header.shape)} has {self.header.steps:,}"
            )


def _rows(path: Path, key: Key, leaf: MappedLeaf) -> int:
    if not leaf.shape:
        raise FormatError(f"{path}: {key_name(key)!r} is a single number, rows are expected")
    return leaf.shape[0]


def _constant(files: OpenFiles, name: str) -> Any:
    """Read an entry that is no tensor. One that only a pickle holds is not opened: a pickle can run anything."""
    place = f"{file_stem(name)}/meta.json"
    file = files.root / place
    if files.size(place) is None:
        raise CorruptDataError(f"{file} is missing; it holds the entry {name!r} of TorchRL's layout")
    document = parse_json(files.read(place), str(file))
    if not isinstance(document, dict) or "data" not in document:
        raise CorruptDataError(f"{file} does not hold the entry {name!r}")
    return document["data"]


def _length(files: OpenFiles) -> int | None:
    """The number of valid elements; None where nobody wrote it down, as after a hook alone."""
    file = files.root / LENGTH
    document = parse_json(files.read(LENGTH), str(file)) if files.size(LENGTH) is not None else {}
    if not isinstance(document, dict):
        raise CorruptDataError(f"{file} does not say how many elements were saved")
    length = document.get("len")
    if length is not None and type(length) is not int:
        raise CorruptDataError(f"{file} counts {length!r} elements")
    return length


def _refuse_other_entries(files: OpenFiles, folder: str, known: frozenset[str] = frozenset()) -> None:
    """Raise FormatError for values that are no tensors, other than those `known`: to leave them out would lose them."""
    place = f"{folder}meta.json"
    file = files.root / place
    document = parse_json(files.read(place), str(file)) if files.size(place) is not None else {}
    for name, entry in document.items() if isinstance(document, dict) else ():
        if not isinstance(entry, dict) or "type" not in entry:
            continue
        if entry["type"] == "TensorDict":
            _refuse_other_entries(files, f"{folder}{file_stem(name)}/")
        elif name not in known:
            raise FormatError(f"{file} has the entry {name!r} that is no tensor; rows are expected")


_CONSTANT = {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_is_non_tensor": True, "_metadata": None}


class TorchrlSink(ABC):
    """Takes one leaf after the other, from its first row to its last; a context manager."""

    @abstractmethod
    def begin(self, leaf: Field, counts: Array) -> None:
        """Begin a leaf of which each trajectory has so many rows."""

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows to the leaf."""

    @abstractmethod
    def skip(self, rows: int) -> None:
        """Leave rows out that were never written; they read as zeros."""

    @abstractmethod
    def end(self) -> None:
        """End the leaf."""

    @abstractmethod
    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Describe what was written."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open, finished or not."""

    def __enter__(self) -> TorchrlSink:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class FolderSink(TorchrlSink):
    """Writes the flat or nested layout into an empty folder, and if `counted` how many elements are valid."""

    def __init__(self, folder: Path, *, nested: bool, counted: bool = True) -> None:
        self._folder = folder
        self._counted = counted
        self._nested = nested
        self._leaves: dict[Key, MappedLeaf] = {}
        self._counts: dict[Key, Array] = {}
        self._file: LeafFile | None = None

    def begin(self, leaf: Field, counts: Array) -> None:
        self._leaves[leaf.key] = MappedLeaf(leaf.dtype, (int(counts.sum()), *leaf.shape))
        self._counts[leaf.key] = counts
        self._row_bytes = leaf.row_bytes
        self._file = LeafFile(self._folder / leaf_path(leaf.key), hashed=False)

    def append(self, rows: Array) -> None:
        self._open_file.write([bytes_of(rows)])

    def skip(self, rows: int) -> None:
        self._open_file.skip(rows * self._row_bytes)

    def end(self) -> None:
        self._open_file.finish()

    @property
    def _open_file(self) -> LeafFile:
        assert self._file is not None, "begin comes first"
        return self._file

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the documents that describe the leaves, and the tables of the nested layout."""
        leaves, trajectories = self._leaves, len(next(iter(self._counts.values())))
        if self._nested:
            write_tables(self._folder, leaves, self._counts)
            leaves = nested_leaves(leaves, trajectories)
        write_tree_meta(self._folder, leaves, (trajectories,) if self._nested else ())
        meta = self._folder / "meta.json"
        entries = {keys.is_full: header.full, keys.shift: header.shift, STORAGE_SHAPE: list(header.shape)}
        document = {name: {"type": "NonTensorData"} for name in entries} | json.loads(read_regular(meta))
        fs.replace_file(meta, json.dumps(document, ensure_ascii=False).encode())
        for name, value in entries.items():
            path = self._folder / file_stem(name) / "meta.json"
            fs.make_folder(path.parent)
            fs.write_file(path, json.dumps(_CONSTANT | {"data": value}).encode())
        if self._counted:
            length = {"metadata": {}, "is_pytree": False, "len": header.length}
            fs.write_file(self._folder / LENGTH, json.dumps(length).encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
