"""Exports to one plain HDF5 file.

    /steps/<key>/<key>     one dataset for each field, [steps, *shape]; text is UTF-8 strings of any length
    /episodes/<column>     episode, start, length, return, terminated, truncated, end_reason, explicit_next,
                           seed, has_seed, and scores such as score.quality: [episodes]
    /episodes/text         the text of each episode, a JSON object, if any episode has text
    /source/<file>         the source's own metadata files, byte for byte

The file has the attributes `format` ("rbtool export") and `about`, a JSON document with fields, shapes and spaces. Rows
`start` to `start + length` of every field are an episode. Flags are HDF5 enumerations of FALSE and TRUE, as h5py writes
bool; complex numbers are compounds of `r` and `i`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from ...core.encodings.hdf5_files import H5Rows, HeapValues, absurd_size, datasets_in, open_h5
from ...core.errors import CorruptDataError
from ...core.format.contracts import Array
from ...core.format.documents import dump_json
from ...core.format.manifest import is_inside
from ...core.ted.schema import file_stem
from ..files.exports import FORMAT, ExportColumn, columns_of
from ..files.hdf5 import H5Sink
from ..files.readers import reading
from .columns import ExportFile, about, episode_columns, is_column, require_names


class H5Exporter(H5Sink):
    """Writes an HDF5 file that any HDF5 library reads."""

    keeps_scores = True
    mark = "format"
    format = FORMAT

    def prepare(self) -> None:
        """Raise SchemaError for bfloat16, which HDF5 does not have, and for equal names."""
        self.refuse({"bfloat16"}, "HDF5")
        require_names([_name(column) for column in columns_of(self.chosen.fields)], "HDF5")
        self.place(field.key for field in self.chosen.fields)

    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write one field after the other."""
        h5.attrs["about"] = about(self.chosen)
        self._write_episodes(h5)
        for column in columns_of(self.chosen.fields):
            text = column.length is not None
            shape = (self.chosen.steps, *(() if text else column.field.shape))
            dtype = h5py.string_dtype() if text else column.field.numpy
            dataset, done = h5.create_dataset(_name(column), shape, dtype), 0
            for rows in column.chunks(self.chosen):
                if dataset.size:
                    dataset[done : done + len(rows)] = rows
                done += len(rows)
                yield len(rows) * column.bytes

    def _write_episodes(self, h5: h5py.File) -> None:
        for name, values in episode_columns(self.chosen).items():
            h5.create_dataset(f"episodes/{name}", data=values)
        if self.chosen.text is not None:
            texts = [dump_json(row) for row in self.chosen.text]
            h5.create_dataset("episodes/text", data=texts, dtype=h5py.string_dtype())
        for name, data in self.chosen.reader.documents().items():
            h5.create_dataset(f"source/{name}", data=np.frombuffer(data, np.uint8))


def _name(column: ExportColumn) -> str:
    return "/".join(("steps", *(file_stem(part) for part in column.field.key)))


class H5Export(ExportFile):
    """Reads what `H5Exporter` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading("the file", path):
            self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        self._rows: dict[str, H5Rows] = {}

    def about(self) -> str:
        with reading("the description", self.path):
            return str(self._values.attribute(self._file["/"].id, "about"))

    def require(self, column: ExportColumn, steps: int) -> None:
        dataset = self._dataset(name := _name(column))
        if dataset is None:
            raise self.lacks(column, "nothing")
        shape, text = (steps, *column.field.shape), column.length is not None
        with reading(name, self.path):
            fits = bool(h5py.check_string_dtype(dataset.dtype)) if text else dataset.dtype == column.field.numpy
            if not fits or dataset.shape != (shape[:1] if text else shape):
                raise self.lacks(column, f"{dataset.dtype} {list(dataset.shape)}")

    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        name = _name(column)
        with reading(name, self.path):
            if name not in self._rows:
                self._rows[name] = H5Rows(self._file[name], self.path)
            return self._rows[name].read(start, stop)

    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        with reading(_name(column), self.path):
            return list(self._values.dataset(_name(column), start, stop).asstr()[start:stop])

    def episodes(self) -> dict[str, Array]:
        with reading("the episode table", self.path):
            known = [name for name in self._file["episodes"] if is_column(name)]
            found = {name: self._dataset(f"episodes/{name}") for name in known}
            return {name: one[()] for name, one in found.items() if one is not None}

    def texts(self) -> list[str] | None:
        if self._dataset("episodes/text") is None:
            return None
        with reading("the text of episodes", self.path):
            return list(self._values.dataset("episodes/text").asstr()[()])

    def documents(self) -> dict[str, bytes]:
        with reading("the metadata of the source", self.path):
            names = [name for name, _ in datasets_in(self._file) if name.startswith("source/")]
            found = {name.removeprefix("source/"): self._dataset(name) for name in names}
            return {name: bytes(one[()]) for name, one in found.items() if one is not None and is_inside(name)}

    def _dataset(self, name: str) -> h5py.Dataset | None:
        """Return a dataset, or None; raise CorruptDataError for one that states more data than the file can hold."""
        with reading(name, self.path):
            found = self._file.get(name)
            if not isinstance(found, h5py.Dataset):
                return None
            if why := absurd_size(found.id):
                raise CorruptDataError(f"{self.path}: {name} {why}")
            return found

    def close(self) -> None:
        self._values.close()
        self._file.close()
