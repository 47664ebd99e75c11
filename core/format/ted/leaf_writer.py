"""One tensor file, written from front to back while its digest and its range are taken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SchemaError
from ...ted import Field, Key, as_numbers
from .. import fs
from ..digest import FileRecord, Hasher, read_regular
from ..manifest import FieldRange
from .tree import MappedLeaf, leaf_path, require_own_files, write_tree_meta

__all__ = [
    "LeafWriter",
    "TreeWriter",
    "merge_ranges",
    "range_of",
]

_BUFFER = 1 << 20
_LUMP = 4 << 20  # bytes after which the disk is asked to begin


def range_of(array: np.ndarray[Any, Any], field: Field) -> FieldRange:
    """Smallest and largest value, NaN left out; None for flags, text, complex and empty or all-NaN data."""
    if field.dtype == "bool" or "complex" in field.dtype or field.role == "text" or not array.size:
        return None
    numbers = as_numbers(array, field.dtype)
    low, high = numbers.min(), numbers.max()
    if numbers.dtype.kind == "f" and (np.isnan(low) or np.isnan(high)):
        low, high = np.fmin.reduce(numbers, axis=None), np.fmax.reduce(numbers, axis=None)
        if np.isnan(low):
            return None
    return low.item(), high.item()


def merge_ranges(one: FieldRange, other: FieldRange) -> FieldRange:
    """Range of the values of both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


class LeafWriter:
    """Appends rows of one field to a headerless file.

    Small appends are gathered, so that an episode of a few steps costs a copy and not a system call. `ranged=False`
    leaves `range` alone: a copy has the range of its source.
    """

    def __init__(self, path: Path, field: Field, *, ranged: bool = True) -> None:
        self.path = path
        self.field = field
        self._ranged = ranged
        self.rows = 0
        self.range: FieldRange = None
        self._dtype = field.numpy
        self._hasher = Hasher()
        self._size = 0
        self._syncing = 0  # up to which byte the disk was asked to begin
        self._descriptor = fs.create(path)
        self._buffer = np.empty(max(_BUFFER // max(self._dtype.itemsize, 1), 1), self._dtype)
        self._used = 0

    def append(self, array: np.ndarray[Any, Any]) -> None:
        """Append rows: an array of `[n, *field.shape]` of the field's own element type."""
        if array.shape[1:] != self.field.shape or array.dtype != self._dtype:
            found = f"{array.dtype} {list(array.shape[1:])}"
            raise SchemaError(
                f"rows of {self.field.name!r} are {found}, expected {self._dtype} {list(self.field.shape)}"
            )
        self.rows += len(array)
        flat = np.ascontiguousarray(array).reshape(-1)
        if flat.size > self._buffer.size - self._used:
            self._flush()
        if flat.size >= self._buffer.size:
            self._put(flat)
        else:
            self._buffer[self._used : self._used + flat.size] = flat
            self._used += flat.size

    def _flush(self) -> None:
        if self._used:
            self._put(self._buffer[: self._used])
            self._used = 0

    def _put(self, flat: np.ndarray[Any, Any]) -> None:
        if self._ranged:
            self.range = merge_ranges(self.range, range_of(flat, self.field))
        data = memoryview(flat.view(np.uint8).data) if flat.size else memoryview(b"")
        self._hasher.update(data)
        fs.write(self._descriptor, data, self.path)
        self._size += len(data)
        if self._size - self._syncing >= _LUMP:
            fs.start_syncing(self._descriptor, self._syncing, self._size - self._syncing)
            self._syncing = self._size

    def finish(self) -> tuple[int, str]:
        """Write what is gathered, sync, close; return the file's size and digest."""
        self._flush()
        fs.fsync(self._descriptor, self.path)
        self.close()
        return self._size, self._hasher.digest

    def close(self) -> None:
        """Close the descriptor; harmless when closed already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TreeWriter:
    """Appends rows to every leaf of a memory-map directory; has the digests when it is finished.

    Leaves may grow by different numbers of rows (compact checkpoints need that), and more may be added with `create`.
    """

    def __init__(self, folder: Path, fields: Iterable[Field] = (), prefix: str = "", *, ranged: bool = True) -> None:
        self.folder = folder
        self.prefix = prefix
        self.leaves: dict[Key, LeafWriter] = {}
        self._ranged = ranged
        listed = list(fields)
        require_own_files(field.key for field in listed)
        fs.make_folder(folder)
        for field in listed:
            self.create(field)

    def create(self, field: Field) -> None:
        """Create the file of one more leaf."""
        path = self.folder / leaf_path(field.key)
        fs.make_folder(path.parent)
        self.leaves[field.key] = LeafWriter(path, field, ranged=self._ranged)

    def append(self, columns: Mapping[Key, np.ndarray[Any, Any]]) -> None:
        """Append rows to the leaves named."""
        for key, array in columns.items():
            self.leaves[key].append(array)

    def finish_leaves(self) -> tuple[list[FileRecord], dict[Key, MappedLeaf]]:
        """Sync and close all leaves; return what was written and how it looks."""
        records, leaves = [], {}
        for key, leaf in self.leaves.items():
            size, digest = leaf.finish()
            leaves[key] = MappedLeaf(leaf.field.dtype, (leaf.rows, *leaf.field.shape))
            if size:
                records.append(FileRecord(self.prefix + leaf_path(key), size, digest))
            else:  # tensordict keeps no file for a tensor without elements
                fs.remove(leaf.path)
        return records, leaves

    def write_meta(self, leaves: Mapping[Key, MappedLeaf], batch: tuple[int, ...]) -> list[FileRecord]:
        """Describe the leaves in `meta.json` files; return those."""
        paths = write_tree_meta(self.folder, leaves, batch)
        return [record_file(self.folder / path, self.prefix + path) for path in paths]

    def finish(self, batch: tuple[int, ...]) -> list[FileRecord]:
        """Complete the directory of a tensordict of this batch; return what was written."""
        records, leaves = self.finish_leaves()
        return [*records, *self.write_meta(leaves, batch)]

    @property
    def ranges(self) -> dict[Key, FieldRange]:
        """Range of each leaf."""
        return {key: leaf.range for key, leaf in self.leaves.items()}

    def close(self) -> None:
        """Close every descriptor, finished or not."""
        for leaf in self.leaves.values():
            leaf.close()


def record_file(path: Path, name: str) -> FileRecord:
    """Digest a small file that was just written."""
    hasher = Hasher()
    data = read_regular(path)
    hasher.update(data)
    return FileRecord(name, len(data), hasher.digest)
