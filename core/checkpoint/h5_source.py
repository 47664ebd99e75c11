"""An HDF5 file to read from, of which only datasets of known filters are believed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptDataError, RbtoolError
from ..format import Array, open_regular

if TYPE_CHECKING:
    import h5py

__all__ = ["H5Source"]

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
        """Tell whether there is a group or a dataset of this name."""
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
            offset = found.id.get_offset() if found.chunks is None else None
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
