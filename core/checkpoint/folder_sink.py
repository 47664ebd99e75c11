"""Keeps leaves as the files of a tensordict memory-map directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..dataset import Array, FileRecord, Leaf, TreeWriter
from ..ted import Field, Key
from .compact import Sink

__all__ = ["FolderSink"]


class FolderSink(Sink):
    """Appends rows to files in `folder`; a context manager: leaving closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tree = TreeWriter(folder, ranged=False)  # whoever copies rows knows their range already

    def create(self, leaf: Field, rows: int) -> None:
        """Create the file of a leaf."""
        self._tree.create(leaf)

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the file of a leaf."""
        self._tree.append({leaf.key: rows})

    def finish_leaves(self) -> tuple[list[FileRecord], dict[Key, Leaf]]:
        """Sync and close the files; return what was written and how it looks."""
        return self._tree.finish_leaves()

    def write_meta(self, leaves: Mapping[Key, Leaf], batch: tuple[int, ...]) -> list[FileRecord]:
        """Describe the leaves in `meta.json` files; return those."""
        return self._tree.write_meta(leaves, batch)

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(self, *raised: object) -> None:
        self._tree.close()
