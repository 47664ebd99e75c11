"""Keeps leaves as datasets of one HDF5 file."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from ..dataset import Array, fs
from ..ted import Field, Key
from .compact import Sink
from .compression import Compression
from .h5_file import LatchedFile
from .h5_names import h5_path

__all__ = ["H5Sink"]

_BUFFER_BYTES = 1 << 20


class H5Sink(Sink):
    """Writes through a file that never fails towards libhdf5; each method raises what failed behind it."""

    def __init__(self, h5: h5py.File, file: LatchedFile, compression: Compression) -> None:
        self._h5 = h5
        self._file = file
        self._compression = compression
        self._leaves: dict[Key, _Leaf] = {}

    def create(self, leaf: Field, rows: int) -> None:
        """Create the dataset of a leaf."""
        options = self._compression.options(leaf, rows)
        dataset = self._create(h5_path(leaf.key), shape=(rows, *leaf.shape), dtype=leaf.numpy, **options)
        batch = self._compression.chunk_rows(leaf) if options else max(1, _BUFFER_BYTES // max(1, leaf.row_bytes))
        self._leaves[leaf.key] = _Leaf(dataset, batch, leaf)

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to a leaf."""
        if leaf.row_bytes:
            self._leaves[leaf.key].append(rows)
            self._file.check()

    def put_array(self, name: str, array: Array) -> None:
        """Write a whole array at once."""
        self._create(name, data=array)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write bytes as a UTF-8 string if they are one, else as they are."""
        try:
            text = bool(data.decode()) and b"\0" not in data
        except UnicodeDecodeError:
            text = False
        if text:
            self._create(name, data=data, dtype=h5py.string_dtype("utf-8", len(data)))
        else:
            self._create(name, data=np.frombuffer(data, np.uint8))

    def finish(self) -> None:
        """Write what is gathered."""
        for leaf in self._leaves.values():
            leaf.flush()
            self._file.check()

    def _create(self, name: str, **options: Any) -> h5py.Dataset:
        with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
            dataset = self._h5.create_dataset(name, **options)
            self._file.check()
        return dataset


class _Leaf:
    """Gathers rows, so that whole chunks are written and every one once."""

    def __init__(self, dataset: h5py.Dataset, batch: int, leaf: Field) -> None:
        self._dataset = dataset
        self._batch = batch
        self._gathered = np.empty((batch, *leaf.shape), leaf.numpy)
        self._count = 0
        self._written = 0

    def append(self, rows: Array) -> None:
        while len(rows):
            if self._count == 0 and len(rows) >= self._batch:
                whole = len(rows) // self._batch * self._batch
                self._put(rows[:whole])
            else:
                whole = min(self._batch - self._count, len(rows))
                self._gathered[self._count : self._count + whole] = rows[:whole]
                self._count += whole
                if self._count == self._batch:
                    self.flush()
            rows = rows[whole:]

    def flush(self) -> None:
        if self._count:
            self._put(self._gathered[: self._count])
            self._count = 0

    def _put(self, rows: Array) -> None:
        self._dataset[self._written : self._written + len(rows)] = rows
        self._written += len(rows)
