"""Columns of HDF5 files: every dataset, by its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from ...core.encodings.h5 import begins_as_h5
from ...core.encodings.hdf5_files import HeapValues, absurd_size, datasets_in, open_h5
from ...core.errors import CorruptDataError
from ...core.format.contracts import Array
from ..files.hdf5 import require_whole_h5
from .columns import TEXT, TableColumn, TableFile, array_column, native


class Hdf5File(TableFile):
    """An HDF5 file. What leads out of it (external links, virtual datasets) is refused."""

    kind = "HDF5 file"

    def __init__(self, path: Path) -> None:
        self.path = path
        if begins_as_h5(path):  # what precedes HDF5 elsewhere is not in the size that the header states
            require_whole_h5(path)
        self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        try:
            self._datasets = {name: item for name, item in datasets_in(self._file) if isinstance(item, h5py.Dataset)}
            self.columns = {name: self._column(name, dataset) for name, dataset in self._datasets.items()}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, dataset: h5py.Dataset) -> TableColumn:
        if why := absurd_size(dataset.id) if dataset.shape is not None else "":
            raise CorruptDataError(f"{self.path}: {name!r} {why}", hint="copy or fetch the file again, whole")
        try:
            dtype = dataset.dtype
        except TypeError as error:  # h5py has none for some types of HDF5, and for damaged ones
            return TableColumn(
                name, "unknown", (), len(dataset) if dataset.shape else 0, f"its type cannot be read: {error}"
            )
        if h5py.check_string_dtype(dtype) and dataset.shape:
            return TableColumn(name, TEXT, dataset.shape[1:], dataset.shape[0])
        return array_column(name, dtype, dataset.shape)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        found = {}
        for name in names:
            dataset = self._datasets[name]
            if self.columns[name].is_text:
                text = self._values.dataset(name, start, stop).asstr(errors="surrogateescape")
                found[name] = np.asarray(text[start:stop], object)
                continue
            rows = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype)
            if rows.size:
                dataset.read_direct(rows, np.s_[start:stop])
            found[name] = native(rows)
        return found

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        rows = super().read_key(column, start, stop)
        if column.is_text:  # bytes that are not UTF-8 are shown as such
            texts = (one.encode(errors="surrogateescape").decode(errors="backslashreplace") for one in rows.flat)
            rows = np.array([*texts], object).reshape(rows.shape)
        return rows

    def close(self) -> None:
        self._values.close()
        self._file.close()
