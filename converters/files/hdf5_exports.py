"""What exports to HDF5 files share: the mark in a file, and columns of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import h5py

from ...core.encodings.hdf5_files import HeapValues, open_h5
from ...core.encodings.output_files import LatchedFile
from ...core.errors import RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.ted.schema import Key, field_named
from .exports import RowSink
from .hdf5 import MARK
from .readers import DAMAGED

_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)


class H5Sink(RowSink):
    """An export to one HDF5 file, whose attribute `mark` is `format`: the name of the library whose layout it has.

    A subclass implements `prepare()`, which calls `place`, and `fill(h5)`.
    """

    mark: ClassVar[str] = MARK
    format: ClassVar[str]

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the file has our mark with the name of this format."""
        try:
            with h5py.File(open_h5(path)) as file, closing(HeapValues(file.id)) as values:
                return cls.mark in file.attrs and str(values.attribute(file["/"].id, cls.mark)) == cls.format
        except _UNREADABLE:
            return False

    @abstractmethod
    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write all to the open file, and yield the bytes of rows as they are written: `size()` altogether."""

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        with LatchedFile(target) as file:
            with h5py.File(file, "w", libver=("v108", "v108")) as h5:
                h5.attrs[self.mark] = self.format
                for amount in self.fill(h5):
                    file.check()
                    progress(amount)
            file.check()
            fs.fsync(file.descriptor, target)

    def column(self, h5: Any, name: str, key: Key, *, single: bool = False) -> Iterator[int]:
        """Write all rows of a leaf to a new dataset; with `single`, a number a row has no dimension of its own."""
        field = field_named(self.chosen.fields, key)
        shape = () if single else field.shape
        dataset, done = h5.create_dataset(name, (self.chosen.steps, *shape), field.numpy), 0
        for rows in self.chosen.chunks(key, field.row_bytes):
            if dataset.size:
                dataset[done : done + len(rows)] = rows.reshape(len(rows), *shape)
            done += len(rows)
            yield len(rows) * field.row_bytes

    def read(self, key: Key, position: int) -> Array:
        """Read the rows of an episode."""
        return self.chosen.reader.read(key, *self.chosen.episode(position))
