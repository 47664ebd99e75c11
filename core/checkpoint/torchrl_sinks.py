"""Where the leaves of TorchRL's layouts are written; of flat and nested, one file a leaf.

Rows that were never written take no room: they are holes in the files.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path

from ..format import Array, Leaf, bytes_of, fs, leaf_path, read_regular, write_tree_meta
from ..ted import Field, Key, file_stem
from .nested import nested_leaves, write_tables
from .torchrl_folder import LENGTH
from .torchrl_header import STORAGE_SHAPE, TorchrlHeader, TorchrlKeys

__all__ = ["FolderSink", "TorchrlSink"]

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
        self._leaves: dict[Key, Leaf] = {}
        self._counts: dict[Key, Array] = {}
        self._descriptor = -1

    def begin(self, leaf: Field, counts: Array) -> None:
        self._path = self._folder / leaf_path(leaf.key)
        self._leaves[leaf.key] = Leaf(leaf.dtype, (int(counts.sum()), *leaf.shape))
        self._counts[leaf.key] = counts
        self._row_bytes, self._offset = leaf.row_bytes, 0
        fs.make_folder(self._path.parent)
        self._descriptor = fs.create(self._path)

    def append(self, rows: Array) -> None:
        data = bytes_of(rows)
        fs.pwrite(self._descriptor, data, self._offset, self._path)
        self._offset += len(data)

    def skip(self, rows: int) -> None:
        self._offset += rows * self._row_bytes

    def end(self) -> None:
        fs.truncate(self._descriptor, self._offset, self._path)
        fs.fsync(self._descriptor, self._path)
        self.close()

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
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
