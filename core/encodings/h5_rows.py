"""Reads rows of datasets in HDF5 files that `open_h5` opened."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5fd, h5t

from ..format.contracts import Array
from ..format.open_files import pread_into


class H5Rows:
    """The rows of a dataset of numbers, read as fresh arrays in the byte order of this machine.

    Rows that lie in the file in one piece, as they do in memory, are read from there: libhdf5 takes longer for a few
    rows, and holds Python's lock meanwhile. `path` names the file in messages.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self.dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[np.generic] = dataset.dtype.newbyteorder("=")
        self._path = path
        self._what = f"the rows of {dataset.name!r}"
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        self._descriptor, self._begin = _place(dataset) or (-1, 0)

    def read(self, start: int, stop: int) -> Array:
        """Read rows `[start, stop)`; CorruptDataError, or an error of h5py, where the file does not have them."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if not rows.size:
            return rows
        if self._descriptor < 0:
            self.dataset.read_direct(rows, np.s_[start:stop])
        else:
            begin = self._begin + start * self._row_bytes
            pread_into(rows, self._descriptor, self._path, begin, self._what)
        return rows


def _place(dataset: h5py.Dataset) -> tuple[int, int] | None:
    """Return libhdf5's descriptor of the file, and at which byte the rows begin; None where only libhdf5 finds them."""
    made, file = dataset.id.get_create_plist(), dataset.file.id
    if made.get_layout() != h5d.CONTIGUOUS or file.get_access_plist().get_driver() != h5fd.SEC2:
        return None
    size = dataset.dtype.itemsize * math.prod(dataset.shape)
    begin = dataset.id.get_offset()  # None where nothing was ever written
    if begin is None or dataset.id.get_storage_size() != size or not dataset.dtype.isnative:
        return None
    if not dataset.id.get_type().equal(h5t.py_create(dataset.dtype, logical=True)):
        return None
    return int(file.get_vfd_handle()), int(begin)
