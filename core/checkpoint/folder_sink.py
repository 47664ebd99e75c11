"""Keeps leaves as the files of a tensordict memory-map directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..format import Array, FileRecord, Hasher, Leaf, fs, leaf_path, record_file, write_tree_meta
from ..ted import Field, Key
from .blocks import Blocks, Stream
from .compact import Sink

__all__ = ["FolderSink"]


class FolderSink(Sink):
    """Appends rows to files in `folder`, of one leaf after the other; a context manager: leaving closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Key, _LeafFile] = {}
        self._blocks = Blocks()
        fs.make_folder(folder)

    def create(self, leaf: Field, rows: int) -> None:
        """Create the file of a leaf; the rows appended from now on are its rows."""
        path = self.folder / leaf_path(leaf.key)
        fs.make_folder(path.parent)
        file = self._files[leaf.key] = _LeafFile(path, leaf, rows)
        self._blocks.begin(file)

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the leaf that was created last."""
        self._blocks.append(rows)

    def finish_leaves(self) -> tuple[list[FileRecord], dict[Key, Leaf]]:
        """Sync and close the files; return what was written and how it looks."""
        self._blocks.finish()
        leaves = {key: Leaf(file.field.dtype, (file.rows, *file.field.shape)) for key, file in self._files.items()}
        return [file.record() for file in self._files.values() if file.size], leaves

    def write_meta(self, leaves: Mapping[Key, Leaf], batch: tuple[int, ...]) -> list[FileRecord]:
        """Describe the leaves in `meta.json` files; return those."""
        return [record_file(self.folder / path, path) for path in write_tree_meta(self.folder, leaves, batch)]

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(self, *raised: object) -> None:
        self._blocks.__exit__(None, None, None)
        for file in self._files.values():
            file.close()


class _LeafFile(Stream):
    """The file of a leaf; its digest is taken while it is written."""

    def __init__(self, path: Path, field: Field, rows: int) -> None:
        self.field = field
        self.rows = rows
        self.size = 0
        self._path = path
        self._hasher = Hasher()
        self._descriptor = fs.create(path)

    def write(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._hasher.update(part)
            self.size += len(part)
        fs.write_parts(self._descriptor, parts, self._path)

    def finish(self) -> None:
        fs.fsync(self._descriptor, self._path)
        self.close()
        if not self.size:  # tensordict keeps no file for a tensor without elements
            fs.remove(self._path)

    def record(self) -> FileRecord:
        """The file as the manifest lists it."""
        return FileRecord(leaf_path(self.field.key), self.size, self._hasher.digest)

    def close(self) -> None:
        """Close the descriptor; harmless when closed already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
