"""Writes TorchRL's H5 layout: a group a trajectory, and in it a dataset a leaf.

HDF5 makes no room for datasets to which nothing is written, as for rows that the storage never had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..dataset import Array, fs
from ..ted import Field
from .compression import Compression
from .h5_file import LatchedFile
from .torchrl_h5 import H5_LENGTH, TRAJECTORY
from .torchrl_header import STORAGE_SHAPE, TorchrlHeader, TorchrlKeys
from .torchrl_sinks import TorchrlSink

__all__ = ["GroupSink"]


class GroupSink(TorchrlSink):
    """Writes the H5 layout into a new file."""

    def __init__(self, path: Path, compression: Compression) -> None:
        self._file = LatchedFile(path)
        self._compression = compression
        try:
            self._h5 = h5py.File(self._file, "w", rdcc_nbytes=0)
        except BaseException:
            self._file.__exit__()
            raise

    def begin(self, leaf: Field, counts: Array) -> None:
        self._leaf, self._counts = leaf, counts
        self._number, self._row = 0, 0
        self._dataset = self._create()

    def append(self, rows: Array) -> None:
        while len(rows):
            self._next()
            count = min(len(rows), int(self._counts[self._number]) - self._row)
            self._dataset[self._row : self._row + count] = rows[:count]
            self._file.check()
            self._row, rows = self._row + count, rows[count:]

    def skip(self, rows: int) -> None:
        while rows:
            self._next()
            count = min(rows, int(self._counts[self._number]) - self._row)
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

    def _next(self) -> None:
        while self._row == self._counts[self._number]:
            self._number, self._row = self._number + 1, 0
            self._dataset = self._create()

    def _create(self) -> h5py.Dataset:
        digits = len(str(len(self._counts) - 1)) if len(self._counts) > 1 else 1
        name = "/".join((f"{TRAJECTORY}_{self._number:0{digits}d}", *self._leaf.key))
        rows = int(self._counts[self._number])
        with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
            dataset = self._h5.create_dataset(
                name, (rows, *self._leaf.shape), self._leaf.numpy, **self._compression.options(self._leaf, rows)
            )
            self._file.check()
        return dataset
