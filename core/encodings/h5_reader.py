"""Reads an H5 checkpoint: its manifest without HDF5, the rest on first use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptDataError, FormatError, RbtoolError
from ..format.contracts import Array
from ..format.digest import FileRecord, digest_bytes, open_regular
from ..format.documents import parse_json
from ..format.episodes import COLUMNS, FINAL, EpisodeTable, parse_episode_text
from ..format.open_files import MappedWindow, OpenedReader, OpenFiles, changed, digest_mapped
from ..format.staging import mend
from ..ted.schema import DTYPES, Field, key_from_stem
from .compact import CompactReader, require_ascending
from .h5_layout import (
    DATA,
    EPISODES,
    SOURCE,
    STORAGE,
    TEXT,
    h5_path,
    read_block,
    verify_block,
)
from .layout import EXPLICIT_EPISODES, CompactLayout, FilledStorage

if TYPE_CHECKING:
    import h5py

_FILTERS = frozenset({None, "gzip", "lzf"})
"""What HDF5 itself or h5py can undo; any other would be loaded as a plug-in."""

_CHUNK_CACHE = 1 << 20


class H5Source:
    """Opens the file at first use, once in every process.

    What `open_h5` refuses, references and unknown filters raise CorruptDataError, and so does whatever HDF5 cannot
    read. `place` is where to open it, by default at its `path`.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        self.path = path
        self._place = place or path
        self._files: dict[int, h5py.File] = {}
        self._datasets: dict[tuple[int, str], h5py.Dataset] = {}
        self._descriptors: dict[int, int] = {}

    def names(self, group: str) -> list[str]:
        """List what is in a group; nothing if there is no such group."""
        with self._reading(group):
            found = self._walk(group)
            return [] if found is None else list(found)

    def has(self, name: str) -> bool:
        """Whether there is a group or a dataset of this name."""
        with self._reading(name):
            return self._walk(name) is not None

    def rows(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a dataset that must be of this type and shape."""
        with self._reading(name):
            found: Array = self._dataset(name, dtype, shape)[start:stop]
            return found

    def place(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return a descriptor of the file and the byte at which a dataset's rows begin; None if they lie in chunks."""
        with self._reading(name):
            found = self._dataset(name, dtype, shape)
            offset = found.id.get_offset() if found.chunks is None and found.id.get_storage_size() else None
            if offset is None:
                return None
            return self._descriptor, int(offset)

    def column(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Read all of a dataset with one number a row."""
        with self._reading(name):
            found: Array = self._dataset(name, dtype, (self._require(name).size,))[:]
            return found

    def read_bytes(self, name: str) -> bytes:
        """Read bytes that were written as a UTF-8 string or as numbers."""
        with self._reading(name):
            found = self._require(name)
            if found.shape == () and found.dtype.kind == "S":
                return bytes(found[()])
            return bytes(self._dataset(name, np.dtype(np.uint8), (found.size,))[:])

    def close(self) -> None:
        """Close the file if this process opened it."""
        here = os.getpid()
        self._datasets = {key: dataset for key, dataset in self._datasets.items() if key[0] != here}
        descriptor = self._descriptors.pop(here, None)
        if descriptor is not None:
            os.close(descriptor)
        file = self._files.pop(here, None)
        if file is not None:
            file.close()

    @property
    def _file(self) -> h5py.File:
        # Its own in every process: two that share one handle would share libhdf5's caches as they were at the fork.
        if os.getpid() not in self._files:
            import h5py  # naming a checkpoint and reading its manifest must not cost this import

            from .h5_open import open_h5

            access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
            access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
            access.set_file_locking(False, False)
            # Readers in order need the one chunk again at which they stopped, of every leaf.
            elements, slots, _, preemption = access.get_cache()
            access.set_cache(elements, slots, _CHUNK_CACHE, preemption)
            self._files[os.getpid()] = h5py.File(open_h5(self.path, access, self._place))
        return self._files[os.getpid()]

    @property
    def _descriptor(self) -> int:
        held = self._descriptors.get(os.getpid())
        if held is None:
            held = self._descriptors[os.getpid()] = open_regular(self._place)
        return held

    def _dataset(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> h5py.Dataset:
        held = self._datasets.get((os.getpid(), name))
        if held is None:
            held = self._datasets[os.getpid(), name] = self._require(name)
        if held.dtype != dtype or held.shape != shape:
            found, expected = f"{held.dtype} {list(held.shape)}", f"{dtype} {list(shape)}"
            raise CorruptDataError(f"{self.path}: the dataset {name} is {found}, expected {expected}")
        return held

    def _require(self, name: str) -> h5py.Dataset:
        import h5py

        found = self._walk(name)
        if not isinstance(found, h5py.Dataset):
            raise CorruptDataError(f"{self.path}: there is no dataset {name}")
        if found.compression not in _FILTERS or found.scaleoffset is not None:
            raise CorruptDataError(f"{self.path}: the dataset {name} keeps its data in a way rbtool does not write")
        return found

    def _walk(self, name: str) -> h5py.Group | h5py.Dataset | None:
        import h5py

        found: h5py.Group | h5py.Dataset = self._file
        for part in filter(None, name.split("/")):
            if not isinstance(found, h5py.Group) or part not in found:
                return None
            found = found[part]
        return found

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except RbtoolError:
            raise
        except (OSError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{self.path}: HDF5 cannot read {name or 'the file'}: {error}") from error


class H5Reader(CompactReader, OpenedReader):
    """TED rows of a checkpoint in layout `h5`."""

    serves_threads = True  # libhdf5 takes one after the other, and rows in one piece are read past it

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        mend(path)
        self.path = path
        self.files = files or OpenFiles(path.parent)
        place = self.files.place(path.name)
        self.manifest, self._block = read_block(path, place)
        if self.manifest.layout != "h5" or [file.path for file in self.manifest.files] != [DATA]:
            raise FormatError(f"{path} has layout {self.manifest.layout}, expected h5 here")
        self._check_size()
        self._layout = CompactLayout.of(self.fields, "h5")
        self._source = H5Source(path, place)
        self._window = MappedWindow()

    @cached_property
    def episodes(self) -> EpisodeTable:
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
        if TEXT not in self._names(""):
            return None
        return parse_episode_text(self._read_part(TEXT), f"{self.path}/{TEXT}")

    def documents(self) -> dict[str, bytes]:
        return {key_from_stem(stem): self._read_part(f"{SOURCE}/{stem}") for stem in self._names(SOURCE)}

    def verify_files(self) -> None:
        """Compare all data with their digest, and the manifest with the form it is written in."""
        self._check_size()
        verify_block(self.path, self.files.place(self.path.name))
        descriptor = self.files.descriptor(self.path.name)
        if digest_mapped(descriptor, self.path, self._block) != self.manifest.files[0].digest:
            raise changed(self.path)

    def close(self) -> None:
        self._window.close()
        self._source.close()
        self.files.close()

    @cached_property
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""
        if STORAGE not in self._names(""):
            return FilledStorage.of_dataset(self.manifest.steps)
        origin = f"{self.path}/{STORAGE}"
        return FilledStorage.from_document(parse_json(self._read_part(STORAGE), origin), self.manifest.steps, origin)

    def _is_stored(self, leaf: Field) -> bool:
        return self._source.has(h5_path(leaf.key))

    @cached_property
    def _explicit(self) -> Array:
        name = h5_path(EXPLICIT_EPISODES.key)
        if name not in self._source.names(""):
            return np.empty(0, np.int64)
        explicit = self._source.column(name, EXPLICIT_EPISODES.numpy)
        return require_ascending(explicit, self.manifest.episodes, f"{self.path}/{name}")

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
        expected, found = self._block + self.manifest.files[0].size, self.files.size(self.path.name) or 0
        if found != expected:
            raise CorruptDataError(f"{self.path} has {found:,} bytes, the manifest states {expected:,}: it was cut")
