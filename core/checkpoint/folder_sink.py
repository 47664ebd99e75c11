"""Keeps leaves as the files of a tensordict memory-map directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..dataset import Array, FileRecord, Leaf, LeafWriter, fs, leaf_path, record_file, write_tree_meta
from ..ted import Field, Key
from .compact import Sink

__all__ = ["FolderSink"]


class FolderSink(Sink):
    """Appends rows to files in `folder`; a context manager: leaving closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[Key, LeafWriter] = {}

    def create(self, leaf: Field, rows: int) -> None:
        """Create the file of a leaf."""
        path = self.folder / leaf_path(leaf.key)
        fs.make_folder(path.parent)
        self._writers[leaf.key] = LeafWriter(path, leaf, ranged=False)

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the file of a leaf."""
        self._writers[leaf.key].append(rows)

    def finish_leaves(self) -> tuple[list[FileRecord], dict[Key, Leaf]]:
        """Sync and close the files; return what was written and how it looks."""
        records, leaves = [], {}
        for key, writer in self._writers.items():
            size, digest = writer.finish()
            leaves[key] = Leaf(writer.field.dtype, (writer.rows, *writer.field.shape))
            if size:
                records.append(FileRecord(leaf_path(key), size, digest))
            else:  # tensordict keeps no file for a tensor without elements
                fs.remove(writer.path)
        return records, leaves

    def write_meta(self, leaves: Mapping[Key, Leaf], batch: tuple[int, ...]) -> list[FileRecord]:
        """Describe the leaves in `meta.json` files; return those."""
        return [record_file(self.folder / path, path) for path in write_tree_meta(self.folder, leaves, batch)]

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(self, *raised: object) -> None:
        for writer in self._writers.values():
            writer.close()
