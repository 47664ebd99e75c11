"""Writes TorchRL's H5 layout: a group a trajectory, and in it a dataset a leaf.

There may be very many small datasets, so they are made by the lowest of h5py's interfaces, and their rows written past
libhdf5 into their places. Datasets to which nothing is written, as for rows that the storage never had, get no place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from ..encodings.h5_layout import Compression
from ..encodings.h5_writer import allocated_at_once
from ..encodings.streams import LatchedFile
from ..format import Array, bytes_of, fs
from ..ted import Field
from .folder import TorchrlSink
from .h5 import H5_LENGTH, TRAJECTORY
from .layout import STORAGE_SHAPE, TorchrlHeader, TorchrlKeys

__all__ = ["GroupSink"]


class GroupSink(TorchrlSink):
    """Writes the H5 layout into a new file."""

    def __init__(self, path: Path, compression: Compression) -> None:
        self._file = LatchedFile(path)
        self._compression = compression
        self._made = _Properties()
        try:
            self._h5 = h5py.File(self._file, "w", rdcc_nbytes=0)
        except BaseException:
            self._file.__exit__()
            raise

    def begin(self, leaf: Field, counts: Array) -> None:
        self._leaf, self._counts = leaf, counts.tolist()
        self._type = h5t.py_create(leaf.numpy, logical=True)
        self._digits = len(str(len(counts) - 1)) if len(counts) > 1 else 1
        self._number, self._row = -1, 0
        self._rows = 0  # of the dataset that is being written
        self._begin: int | None = None
        self._dataset: h5py.Dataset | None = None

    def append(self, rows: Array) -> None:
        data = bytes_of(rows)
        width, done = self._leaf.row_bytes, 0
        while done < len(rows):
            self._next(written=True)
            count = min(len(rows) - done, self._rows - self._row)
            if self._dataset is not None:
                self._dataset[self._row : self._row + count] = rows[done : done + count]
                self._file.check()
            elif self._begin is not None:
                part = data[done * width : (done + count) * width]
                fs.pwrite(self._file.descriptor, part, self._begin + self._row * width, self._file.path)
            self._row, done = self._row + count, done + count

    def skip(self, rows: int) -> None:
        while rows:
            self._next(written=False)
            count = min(rows, self._rows - self._row)
            self._row, rows = self._row + count, rows - count

    def end(self) -> None:
        """Nothing is gathered."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the four small datasets, and sync."""
        entries: dict[str, Any] = {
            H5_LENGTH: np.int64(header.length), keys.is_full: np.bool_(header.full), keys.shift: np.int64(header.shift),
            STORAGE_SHAPE: np.array(header.shape, np.int64),
        }  # fmt: skip
        for name, value in entries.items():
            with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
                self._h5.create_dataset(name, data=value)
                self._file.check()
        self._h5.close()
        self._file.check()
        fs.fsync(self._file.descriptor, self._file.path)

    def close(self) -> None:
        self._h5.close()
        self._file.__exit__()

    def _next(self, *, written: bool) -> None:
        """Go on to the next dataset where this one is full; it gets a place if it is to be written to."""
        while self._row == self._rows:
            self._number, self._row = self._number + 1, 0
            self._rows = self._counts[self._number]
            name = "/".join((f"{TRAJECTORY}_{self._number:0{self._digits}d}", *self._leaf.key))
            with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
                self._create(name, self._compression.options(self._leaf, self._rows), written)
                self._file.check()

    def _create(self, name: str, options: dict[str, Any], written: bool) -> None:
        shape = (self._rows, *self._leaf.shape)
        if options:
            self._dataset = self._h5.create_dataset(name, shape, self._leaf.numpy, **options)
            return
        encoded, made = name.encode(), self._made
        links = made.links if name.isascii() else made.unicode_links
        stored = made.placed if written else made.unplaced
        dataset = h5d.create(self._h5.id, encoded, self._type, h5s.create_simple(shape), stored, links)
        self._begin = dataset.get_offset() if written else None


class _Properties:
    """How datasets and the groups around them are made."""

    def __init__(self) -> None:
        self.placed, self.unplaced = allocated_at_once(), h5p.create(h5p.DATASET_CREATE)
        for stored in (self.placed, self.unplaced):
            stored.set_obj_track_times(False)  # the same rows are the same bytes
        self.links, self.unicode_links = (h5p.create(h5p.LINK_CREATE) for _ in range(2))
        self.unicode_links.set_char_encoding(h5t.CSET_UTF8)
        for links in (self.links, self.unicode_links):
            links.set_create_intermediate_group(True)
