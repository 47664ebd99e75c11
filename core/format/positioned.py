"""A tree of known length whose rows arrive in any order, from any process.

One process makes the files and, while others still write, takes the digests of what is finished from the front.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from ..ted import Field, Key, field_named
from . import fs
from .contracts import Array
from .digest import FileRecord, Hasher, bytes_of
from .leaf_writer import merge_ranges, record_file
from .manifest import FieldRange
from .mapped import Window
from .opened import pread_rows
from .tree import Leaf, leaf_path, require_own_files, write_tree_meta

__all__ = ["PositionedTree", "RowFiles"]

_CHUNK = 4 << 20


class RowFiles:
    """The leaf files of a `PositionedTree`, open in one process to be written at any row."""

    def __init__(self, folder: Path, fields: Sequence[Field]) -> None:
        self._open: list[tuple[Field, int, Path]] = []
        try:
            for field in fields:
                path = folder / leaf_path(field.key)
                self._open.append((field, fs.open_to_fill(path), path))
        except BaseException:
            self.close()
            raise

    def write(self, columns: Mapping[Key, Array], start: int) -> None:
        """Write rows from row `start` on: arrays of `[n, *shape]` of each field's own element type."""
        for field, descriptor, path in self._open:
            array = columns[field.key]
            if array.size:
                fs.pwrite(descriptor, bytes_of(array), start * field.row_bytes, path)

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        while self._open:
            os.close(self._open.pop()[1])


class PositionedTree:
    """Makes the files of `rows` rows in a folder, checks that there is room, and completes them at the end.

    `anew=False` takes up what files an earlier one made. A context manager: leaving closes the files, finished or not.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], rows: int, *, anew: bool = True) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self.rows = rows
        self._settled = dict.fromkeys((field.key for field in fields), 0)  # rows whose digest is taken
        self.ranges: dict[Key, FieldRange] = {}
        self._open: dict[Key, int] = {}
        self._window = Window()
        self._hashers = {field.key: Hasher() for field in fields}
        require_own_files(field.key for field in fields)
        if anew:
            fs.require_space(folder, rows * sum(field.row_bytes for field in fields))
        try:
            for field in fields:
                path = folder / leaf_path(field.key)
                make = anew or not path.exists()
                if make:
                    fs.make_folder(path.parent)
                self._open[field.key] = fs.create(path) if make else fs.open_to_change(path)
        except BaseException:
            self.close()
            raise

    def merge_ranges(self, ranges: Mapping[Key, FieldRange]) -> None:
        """Take the ranges of some written rows into account."""
        self.ranges = {key: merge_ranges(self.ranges.get(key), found) for key, found in ranges.items()}

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read written rows back."""
        field = field_named(self.fields, key)
        if not field.row_bytes or start == stop:
            return np.empty((stop - start, *field.shape), field.numpy)
        return pread_rows(self._open[key], self.folder / leaf_path(key), field, start, stop)

    def write(self, key: Key, start: int, array: Array) -> None:
        """Write rows of one leaf over what is there, before they are settled."""
        data = bytes_of(array)
        fs.pwrite(self._open[key], data, start * field_named(self.fields, key).row_bytes, self.folder / leaf_path(key))

    def settle(self, rows: int) -> None:
        """Say that everything before row `rows` is written for good: digests are taken, and the disk may begin.

        Both wait until there is enough of a leaf.
        """
        for field in self.fields:
            if (rows - self._settled[field.key]) * field.row_bytes >= _CHUNK:
                self._settle(field, rows)

    def _settle(self, field: Field, rows: int) -> None:
        descriptor, before, row_bytes = self._open[field.key], self._settled[field.key], field.row_bytes
        step, path = max(1, _CHUNK // max(1, row_bytes)), self.folder / leaf_path(field.key)
        for start in range(before, rows, step):
            array = self._window.rows((descriptor, 0), path, field, start, min(start + step, rows))
            if array.size:
                self._hashers[field.key].update(bytes_of(array))
        self._window.close()
        fs.start_syncing(descriptor, before * row_bytes, (rows - before) * row_bytes)
        self._settled[field.key] = rows

    def finish(self) -> list[FileRecord]:
        """Sync and close all leaves, write the `meta.json` files, return what was written."""
        records = []
        for field in self.fields:
            self._settle(field, self.rows)
        for field in self.fields:
            path, size = leaf_path(field.key), self.rows * field.row_bytes
            if size:
                fs.fsync(self._open[field.key], self.folder / path)
                records.append(FileRecord(path, size, self._hashers[field.key].digest))
            else:  # tensordict keeps no file for a tensor without elements
                fs.remove(self.folder / path)
        self.close()
        leaves = {field.key: Leaf(field.dtype, (self.rows, *field.shape)) for field in self.fields}
        metas = write_tree_meta(self.folder, leaves, (self.rows,))
        return [*records, *(record_file(self.folder / path, path) for path in metas)]

    def close(self) -> None:
        """Close every descriptor; harmless when done twice."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
