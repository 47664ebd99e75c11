"""Layouts `flat` and `nested`: compact leaves in the files of a memory-mapped tensordict.

The leaves have the same bytes as in TorchRL's flat checkpoint of whole episodes. In layout `nested`, each leaf also has
a table with the shapes of its episodes, so that tensordict opens it as a ragged tensor `[episodes, rows, …]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.documents import parse_json
from ..format.files import FileRecord
from ..format.memmap.reader import FolderReader
from ..format.memmap.tree import MappedLeaf, leaf_path, read_tree, write_listed, write_tree_meta
from ..format.open_files import ListedFiles, MappedWindow
from ..progress import Progress
from ..ted.schema import Field, Key, key_name
from .compact import (
    EXPLICIT_EPISODES,
    CompactLayout,
    CompactReader,
    FilledStorage,
    LeafSink,
    require_ascending,
    row_counts,
    states_in_place,
    write_compact,
)
from .output_files import Blocks, LeafFile

_TABLE_SUFFIX = ".shape.memmap"


def nested_leaves(leaves: Mapping[Key, MappedLeaf], episodes: int) -> dict[Key, MappedLeaf]:
    """Describe flat leaves as ragged ones, with the shapes of their tables."""
    return {key: MappedLeaf(leaf.dtype, (episodes, len(leaf.shape)), nested=True) for key, leaf in leaves.items()}


def write_tables(folder: Path, leaves: Mapping[Key, MappedLeaf], counts: Mapping[Key, Array]) -> list[FileRecord]:
    """Write the table of each flat leaf, int64 `[episodes, 1 + dimensions of a row]`; none if there are no episodes."""
    records = []
    for key, leaf in leaves.items():
        table = np.empty((len(counts[key]), len(leaf.shape)), np.int64)
        if not table.size:
            continue
        table[:, 0], table[:, 1:] = counts[key], leaf.shape[1:]
        path = leaf_path(key, _TABLE_SUFFIX)
        records.append(write_listed(folder, path, table.tobytes()))
    return records


class LeafFolderSink(LeafSink):
    """Appends rows to files in `folder`, one leaf after another; leaving the context closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Key, LeafFile] = {}
        self._leaves: dict[Key, MappedLeaf] = {}
        self._blocks = Blocks()
        fs.make_folder(folder)

    def create(self, leaf: Field, rows: int) -> None:
        """Create the file of a leaf, to which rows are appended from now on."""
        self._leaves[leaf.key] = MappedLeaf(leaf.dtype, (rows, *leaf.shape))
        file = self._files[leaf.key] = LeafFile(self.folder / leaf_path(leaf.key), rows * leaf.row_bytes)
        self._blocks.begin(file)

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the leaf created last."""
        self._blocks.append(rows)

    def append_states(self, leaf: Field, root: Array, after: Array, ends: Array) -> None:
        """Append the rows of `with_ends` to the leaf created last."""
        states_in_place(self._blocks, root, after, ends)

    def finish_leaves(self) -> tuple[list[FileRecord], dict[Key, MappedLeaf]]:
        """Sync and close the files; return their records and their leaves."""
        self._blocks.finish()
        records = []
        for key, file in self._files.items():
            if file.size:
                records.append(FileRecord(leaf_path(key), file.size, file.digest))
            else:  # tensordict writes no file for a tensor without elements
                fs.remove(file.path)
        return records, self._leaves

    def __enter__(self) -> LeafFolderSink:
        return self

    def __exit__(self, *raised: object) -> None:
        self._blocks.__exit__(None, None, None)
        for file in self._files.values():
            file.close()


STORAGE_METADATA = "storage_metadata.json"


def write_flat(
    source: StepReader, folder: Path, form: Literal["flat", "nested"], filled: FilledStorage, progress: Progress
) -> tuple[list[FileRecord], int]:
    """Write the rows of a dataset, a checkpoint or a storage to a folder, in compact form.

    Args:
        source: the rows.
        folder: the folder.
        form: the layout.
        filled: the storage that the rows fill.
        progress: reports progress.

    Returns:
        The data files, and the number of episodes whose next rows are stored explicitly.
    """
    layout = CompactLayout.of(source.fields, form)
    lengths = source.episodes.length
    with LeafFolderSink(folder) as sink:
        explicit = write_compact(source, layout, sink, progress)
        records, leaves = sink.finish_leaves()
        if form == "nested":
            counts = row_counts(layout, lengths, explicit)
            records += write_tables(folder, leaves, counts)
            leaves = nested_leaves(leaves, len(lengths))
        records += write_tree_meta(folder, leaves, (len(lengths),) if form == "nested" else ())
    return [*records, write_listed(folder, STORAGE_METADATA, filled.to_bytes())], len(explicit)


class FlatReader(CompactReader, FolderReader):
    """Reads the TED rows of a checkpoint in layout `flat` or `nested`."""

    serves_threads = True

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        super().__init__(path, listed)
        if self.manifest.layout not in {"flat", "nested"}:
            raise FormatError(f"{path} has layout {self.manifest.layout}, expected flat or nested")
        if self._whole:
            self.listed.check_sizes()
        self._stored = read_tree(self.listed, exact=self._whole)
        self._layout = CompactLayout.of(self.fields, "nested" if self.manifest.layout == "nested" else "flat")
        self._window = MappedWindow()
        self._check_leaves()

    @cached_property
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""
        path = self.path / STORAGE_METADATA
        document = parse_json(self.listed.read(STORAGE_METADATA), str(path))
        return FilledStorage.from_document(document, self.manifest.steps, str(path))

    def _is_stored(self, leaf: Field) -> bool:
        return leaf.key in self._stored

    def _fetch(self, leaf: Field, start: int, stop: int) -> Array:
        return self.read_leaf(leaf.key, leaf, start, stop)

    def close(self) -> None:
        self._window.close()
        super().close()

    def _view(self, leaf: Field, start: int, stop: int) -> Array:
        name = leaf_path(leaf.key)
        file = (self.listed.descriptor(name), 0) if leaf.row_bytes else (-1, 0)
        return self._window.rows(file, self.path / name, leaf, start, stop)

    @cached_property
    def _explicit(self) -> Array:
        if EXPLICIT_EPISODES.key not in self._stored:
            return np.empty(0, np.int64)
        name = leaf_path(EXPLICIT_EPISODES.key)
        explicit = np.frombuffer(self.listed.read(name) if name in self.listed else b"", np.int64)
        return require_ascending(explicit, self.manifest.episodes, self.path / name)

    def _check_leaves(self) -> None:
        """Compare `meta.json` and the files with the fields and the episode table."""
        rows, fields = self._rows, self._layout.stored(with_explicit=bool(len(self._explicit)))
        expected = {field.key: MappedLeaf(field.dtype, (rows[field.key], *field.shape)) for field in fields}
        for leaf in self._layout.at_root.values():
            if leaf.key not in self._stored:
                del expected[leaf.key]
        if self.manifest.layout == "nested":
            expected = nested_leaves(expected, self.manifest.episodes)
        if self._stored != expected:
            odd = {key for key, _ in self._stored.items() ^ expected.items()}
            names = ", ".join(sorted(key_name(key) for key in odd))
            raise CorruptDataError(f"{self.path}: meta.json and the manifest disagree on {names}")
        for field in fields:
            if field.key in expected and self._whole:
                self._check_file(field, rows[field.key])

    def _check_file(self, field: Field, rows: int) -> None:
        name = leaf_path(field.key)
        expected, found = rows * field.row_bytes, self.listed.size(name) or 0
        if found != expected:
            raise CorruptDataError(f"{self.path / name} has {found:,} bytes, expected {expected:,} for {rows:,} rows")


class CutFlatReader(FlatReader):
    """A `FlatReader` for a damaged checkpoint: files may be truncated or missing.

    CorruptDataError is only raised for rows that are lost, when they are read.
    """

    _whole = False
