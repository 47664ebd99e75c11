"""Exports to one plain HDF5 file.

    /steps/<key>/<key>     one dataset a leaf, [steps, *shape]; text is UTF-8 strings of any length
    /episodes/<column>     episode, start, length, return, terminated, truncated, end_reason, seed, has_seed: [episodes]
    /episodes/text         where there is any: the text of each episode, a JSON object
    /source/<file>         the source's own metadata files, byte for byte
    attributes of the file `format` ("rbtool export") and `about`, a JSON document with fields, shapes and spaces

Rows `start` to `start + length` of every leaf are those of an episode. Flags are HDF5 enumerations of FALSE and TRUE,
as h5py writes bool; complex numbers are compounds of `r` and `i`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np

from ...core.encodings.hdf5_files import HeapValues, open_h5
from ...core.encodings.streams import LatchedFile
from ...core.errors import RbtoolError
from ...core.format import fs
from ...core.format.sinks import Sink
from ...core.ted.schema import file_stem
from ..files.columns import DAMAGED
from .columns import FORMAT, ExportColumn, about, columns_of, episode_columns, require_names

_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)


class H5Exporter(Sink):
    """Writes an HDF5 file that any HDF5 library reads."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the attribute `format` is that of an export."""
        try:
            with h5py.File(open_h5(path)) as file, closing(HeapValues(file.id)) as values:
                return bool(values.attribute(file["/"].id, "format") == FORMAT)
        except _UNREADABLE:
            return False

    def prepare(self) -> None:
        """Refuse bfloat16, which HDF5 does not have."""
        self.refuse({"bfloat16"}, "HDF5")
        require_names([_name(column) for column in columns_of(self.chosen.fields)], "HDF5")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write leaf after leaf."""
        with LatchedFile(target) as file:
            with h5py.File(file, "w", libver=("v108", "v108")) as h5:
                h5.attrs["format"] = FORMAT
                h5.attrs["about"] = about(self.chosen)
                self._write_episodes(h5)
                for column in columns_of(self.chosen.fields):
                    file.check()
                    self._write_column(h5, column, file, progress)
            file.check()
            fs.fsync(file.descriptor, target)

    def _write_episodes(self, h5: h5py.File) -> None:
        for name, values in episode_columns(self.chosen).items():
            h5.create_dataset(f"episodes/{name}", data=values)
        if self.chosen.text is not None:
            from ...core.format.documents import dump_json

            texts = [dump_json(row) for row in self.chosen.text]
            h5.create_dataset("episodes/text", data=texts, dtype=h5py.string_dtype())
        for name, data in self.chosen.reader.documents().items():
            h5.create_dataset(f"source/{name}", data=np.frombuffer(data, np.uint8))

    def _write_column(
        self, h5: h5py.File, column: ExportColumn, file: LatchedFile, progress: Callable[[int], None]
    ) -> None:
        text = column.length is not None
        shape = (self.chosen.steps, *(() if text else column.field.shape))
        dtype = h5py.string_dtype() if text else column.field.numpy
        dataset, done = h5.create_dataset(_name(column), shape, dtype), 0
        for rows in column.chunks(self.chosen):
            if dataset.size:
                dataset[done : done + len(rows)] = rows
            done += len(rows)
            file.check()
            progress(len(rows) * column.bytes)


def _name(column: ExportColumn) -> str:
    return "/".join(("steps", *(file_stem(part) for part in column.field.key)))
