"""Reads an H5 checkpoint: its manifest without HDF5, the rest when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format import (
    COLUMNS,
    FINAL,
    Array,
    EpisodeTable,
    FileRecord,
    OpenFiles,
    StepReader,
    changed,
    digest_bytes,
    mend,
    parse_episode_text,
    parse_json,
)
from ..format.mapped import Window, digest_mapped
from ..ted import DTYPES, Field, Key, key_from_stem
from .expansion import Expansion, require_ascending
from .filled import FilledStorage
from .h5_names import DATA, EPISODES, SOURCE, STORAGE, TEXT, h5_path
from .h5_source import H5Source
from .layout import EXPLICIT_EPISODES, CompactLayout
from .nested import row_counts
from .rows import Boundaries
from .user_block import read_block, verify_block

__all__ = ["H5Reader"]


class H5Reader(StepReader):
    """TED rows of a checkpoint in layout `h5`.

    `files` has the file open, which this closes: what is put at `path` later is never read.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        mend(path)
        self.path = path
        self._file = files or OpenFiles(path.parent)
        place = self._file.place(path.name)
        self.manifest, self._block = read_block(path, place)
        if self.manifest.layout != "h5" or [file.path for file in self.manifest.files] != [DATA]:
            raise FormatError(f"{path} has layout {self.manifest.layout}, h5 is expected here")
        self._check_size()
        self._layout = CompactLayout.of(self.fields, "h5")
        self._source = H5Source(path, place)
        self._window = Window()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self._file)

    def again(self) -> H5Reader:
        """Return a reader of the very same file, for another thread or process."""
        return type(self)(self.path, self._file.again())

    def files_state(self) -> str:
        """Tell one state of the file from another without reading it."""
        return self._file.state()

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table, read at first use."""
        count = self.manifest.episodes
        columns = {}
        stored = self._names(EPISODES)
        for name, dtype in (COLUMNS | {FINAL: "uint8"}).items():
            if name == FINAL and name not in stored:
                continue
            place = f"{EPISODES}/{name}"
            columns[name] = self._source.rows(place, DTYPES[dtype], (count,), 0, count)
            self._check_part(place, columns[name].tobytes())
        return EpisodeTable.from_columns(columns)

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to episodes, read at first use."""
        if TEXT not in self._names(""):
            return None
        return parse_episode_text(self._read_part(TEXT), f"{self.path}/{TEXT}")

    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name."""
        return {key_from_stem(stem): self._read_part(f"{SOURCE}/{stem}") for stem in self._names(SOURCE)}

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one TED leaf."""
        return self._expansion.read(self._leaf(key, start, stop), start, stop)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield rows of one TED leaf piece by piece; arrays that cannot be written show the file where they can."""
        return self._expansion.pieces(self._leaf(key, start, stop), start, stop, self._view)

    def verify_files(self) -> None:
        """Compare all data with their digest, and the manifest with the form it is written in."""
        self._check_size()
        verify_block(self.path, self._file.place(self.path.name))
        descriptor = self._file.descriptor(self.path.name)
        if digest_mapped(descriptor, self.path, self._block) != self.manifest.files[0].digest:
            raise changed(self.path)

    def close(self) -> None:
        """Close the file."""
        self._window.close()
        self._source.close()
        self._file.close()

    @cached_property
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""
        if STORAGE not in self._names(""):
            return FilledStorage.of_dataset(self.manifest.steps)
        origin = f"{self.path}/{STORAGE}"
        return FilledStorage.from_document(parse_json(self._read_part(STORAGE), origin), self.manifest.steps, origin)

    @cached_property
    def _expansion(self) -> Expansion:
        stored = {leaf.key for leaf in self._layout.at_root.values() if self._source.has(h5_path(leaf.key))}
        trivial = frozenset(key for key, leaf in self._layout.at_root.items() if leaf.key not in stored)
        return Expansion(self._layout, self._bounds, self._explicit, trivial, self._fetch)

    @cached_property
    def _bounds(self) -> Boundaries:
        return Boundaries(self.episodes, self.manifest.steps, str(self.path))

    @cached_property
    def _explicit(self) -> Array:
        name = h5_path(EXPLICIT_EPISODES.key)
        if name not in self._source.names(""):
            return np.empty(0, np.int64)
        explicit = self._source.column(name, EXPLICIT_EPISODES.numpy)
        return require_ascending(explicit, self.manifest.episodes, f"{self.path}/{name}")

    @cached_property
    def _rows(self) -> dict[Key, int]:
        counts = row_counts(self._layout, self._bounds.lengths, self._explicit)
        return {place: int(count.sum()) for place, count in counts.items()}

    def _fetch(self, leaf: Field, start: int, stop: int) -> Array:
        if not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        return self._source.rows(h5_path(leaf.key), leaf.numpy, (self._rows[leaf.key], *leaf.shape), start, stop)

    def _view(self, leaf: Field, start: int, stop: int) -> Array:
        shape = (self._rows[leaf.key], *leaf.shape)
        place = self._source.place(h5_path(leaf.key), leaf.numpy, shape) if leaf.row_bytes else None
        if place is None:
            return self._fetch(leaf, start, stop)
        return self._window.rows(place, self.path, leaf, start, stop)

    @cached_property
    def _parts(self) -> dict[str, FileRecord]:
        return {part.path: part for part in self.manifest.parts}

    def _names(self, group: str) -> list[str]:
        """List the small parts in a group: as the manifest does, or, where an older one does not, as HDF5 does."""
        if not self._parts:
            return self._source.names(group)
        prefix = f"{group}/" if group else ""
        inside = (name.removeprefix(prefix) for name in self._parts if name.startswith(prefix))
        return [name for name in inside if "/" not in name]

    def _read_part(self, name: str) -> bytes:
        data = self._source.read_bytes(name)
        self._check_part(name, data)
        return data

    def _check_part(self, name: str, data: bytes) -> None:
        """Raise CorruptDataError unless what was read of a small part has the digest in the manifest."""
        part = self._parts.get(name)
        if part is None and self._parts:
            raise CorruptDataError(f"{self.path}/{name} is not listed in the manifest, which has to list it")
        if part is not None and digest_bytes(data) != part.digest:
            raise changed(self.path / name)

    def _check_size(self) -> None:
        expected, found = self._block + self.manifest.files[0].size, self._file.size(self.path.name) or 0
        if found != expected:
            raise CorruptDataError(f"{self.path} has {found:,} bytes, the manifest says {expected:,}: it was cut")
