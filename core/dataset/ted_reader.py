"""Reads a dataset in layout `ted` by position, so that memory stays bounded and forks share nothing."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..ted import Field, Key, key_name
from .contracts import Array, StepReader
from .digest import FileRecord, digest_file
from .episodes import EPISODES_TEXT, EpisodeTable, parse_episode_text
from .listed import ListedFiles, changed, size_problem
from .manifest import ENV_METADATA, HIDDEN, MANIFEST, SOURCE_DOCUMENTS, Manifest, is_canonical, is_source_document
from .mapped import digest_mapped, view_rows
from .regular import open_regular, read_regular
from .staging import mend
from .tree import leaf_path, read_tree

__all__ = [
    "FolderReader",
    "TedReader",
    "check_sizes",
    "pread_file_rows",
    "pread_rows",
    "verify_records",
]


_MAPPED = 8 << 20
"""Files of more bytes are looked at through maps; for fewer, setting those up takes longer than a copy."""


class FolderReader(StepReader):
    """What all layouts that are folders share: manifest, episode table, text, documents, digests."""

    def __init__(self, path: Path) -> None:
        mend(path)
        self.path = path
        self.manifest = Manifest.load(path)
        self.listed = ListedFiles(path, self.manifest.files)
        self._table = EpisodeTable.load(self.listed.read, str(path))
        for file in self.manifest.files:
            if _describes_rows(file):
                self.listed.read(file.path)
        self._descriptors: dict[tuple[int, Key], int] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)  # another process opens its own files

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table, compared with its digests when the folder was opened."""
        return self._read_episodes()

    def _read_episodes(self) -> EpisodeTable:
        table = self._table
        if len(table) != self.manifest.episodes or table.steps != self.manifest.steps:
            raise CorruptDataError(
                f"{self.path}: the episode table holds {len(table)} episodes and {table.steps} steps, the manifest "
                f"says {self.manifest.episodes} and {self.manifest.steps}"
            )
        return table

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to episodes, read at first use."""
        if EPISODES_TEXT not in self.listed:
            return None
        return parse_episode_text(self.listed.read(EPISODES_TEXT), str(self.path / EPISODES_TEXT))

    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name."""
        names = [file.path for file in self.manifest.files if is_source_document(file.path)]
        return {name.removeprefix(SOURCE_DOCUMENTS): self.listed.read(name) for name in names}

    def verify_files(self) -> None:
        """Compare every file with its digest in the manifest, and the manifest with the form it is written in."""
        if not is_canonical(read_regular(self.path / MANIFEST)):
            raise changed(self.path / MANIFEST)
        verify_records(self.path, self.manifest.files)

    def read_leaf(self, key: Key, leaf: Field, start: int, stop: int) -> Array:
        """Read rows of the file of `key`, whose rows look like `leaf`."""
        path = self.path / leaf_path(key)
        if not leaf.row_bytes or start == stop:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        return pread_rows(self._descriptor(key, path), path, leaf, start, stop)

    def _descriptor(self, key: Key, path: Path) -> int:
        # A descriptor that a fork inherited is as good as a new one: pread keeps no position. It is keyed by
        # process all the same, so that closing in a child leaves the parent's alone.
        held = self._descriptors.get((os.getpid(), key))
        if held is None:
            try:
                held = open_regular(path)
            except FileNotFoundError:
                raise CorruptDataError(f"{path} is missing; the manifest lists it") from None
            self._descriptors[os.getpid(), key] = held
        return held

    def close(self) -> None:
        """Close the files this process opened."""
        for process, key in list(self._descriptors):
            if process == os.getpid():
                os.close(self._descriptors.pop((process, key)))


class TedReader(FolderReader):
    """Rows of a dataset (or a checkpoint) in layout `ted`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.manifest.layout != "ted":
            raise FormatError(f"{path} has layout {self.manifest.layout}, ted is expected here")
        self._require_listed_leaves()

    def _require_listed_leaves(self) -> None:
        """Compare the sizes of the leaves as the manifest lists them with the fields it describes."""
        for field in self.fields:
            name, expected = leaf_path(field.key), self.manifest.steps * field.row_bytes
            found = self.listed.size(name) or 0
            if found != expected:
                raise CorruptDataError(
                    f"{self.path / MANIFEST} lists {found:,} bytes of {name}, {expected:,} are expected for "
                    f"{self.manifest.steps:,} rows of {field.name!r}"
                )

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf by position."""
        return self.read_leaf(key, self._leaf(key, start, stop), start, stop)

    def view(self, key: Key, start: int, stop: int) -> Array:
        """View rows of one leaf where they lie in the file."""
        path, leaf = self.path / leaf_path(key), self._leaf(key, start, stop)
        return view_rows(self._descriptor(key, path) if leaf.row_bytes else -1, path, leaf, start, stop)

    def check_tree(self) -> None:
        """Compare the `meta.json` files and file sizes with the manifest; raise CorruptDataError if they differ."""
        leaves = read_tree(self.path)
        expected = {field.key: (field.dtype, (self.manifest.steps, *field.shape)) for field in self.fields}
        found = {key: (leaf.dtype, leaf.shape) for key, leaf in leaves.items()}
        if found != expected:
            odd = sorted({key_name(key) for key, _ in set(found.items()) ^ set(expected.items())})
            raise CorruptDataError(f"{self.path}: meta.json and the manifest disagree on {', '.join(odd)}")


def pread_rows(descriptor: int, path: Path, leaf: Field, start: int, stop: int) -> Array:
    """Read rows `[start, stop)` of a headerless file into a fresh array."""
    array = np.empty((stop - start, *leaf.shape), leaf.numpy)
    view, offset = memoryview(array.reshape(-1).view(np.uint8).data), start * leaf.row_bytes
    while view:
        got = os.preadv(descriptor, [view], offset)
        if not got:
            raise CorruptDataError(f"{path} ends {len(view):,} bytes before row {stop}: it was cut")
        view, offset = view[got:], offset + got
    return array


def pread_file_rows(path: Path, leaf: Field, start: int, stop: int) -> Array:
    """Open a headerless file for one read of rows `[start, stop)`."""
    if not leaf.row_bytes or start == stop:
        return np.empty((stop - start, *leaf.shape), leaf.numpy)
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return pread_rows(file.fileno(), path, leaf, start, stop)


def _describes_rows(file: FileRecord) -> bool:
    """Whether a file says how rows lie in others; the hidden ones of the episode table are read apart."""
    return file.path.endswith(".json") and not file.path.startswith(f"{HIDDEN}/") and file.path != ENV_METADATA


def check_sizes(root: Path, files: tuple[FileRecord, ...]) -> None:
    """Raise CorruptDataError for the first listed file that is missing or has another size."""
    for file in files:
        problem = size_problem(root / file.path, file)
        if problem:
            raise CorruptDataError(problem)


def verify_records(root: Path, files: tuple[FileRecord, ...]) -> None:
    """Raise CorruptDataError for the first listed file that is missing, cut or changed."""
    check_sizes(root, files)
    for file in files:
        path = root / file.path
        if (digest_mapped(path) if file.size > _MAPPED else digest_file(path)) != file.digest:
            raise changed(path)
