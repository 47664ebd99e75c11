"""Exports to one `.npz` file of NumPy: `numpy.load(path)` reads it, without pickle.

observation.position   one array a leaf, [steps, *shape]; parts of nested keys are joined by dots
instruction            text is uint8 [steps, L], UTF-8 padded with zeros; instruction_length are the bytes of each
episodes.start         the columns of the episode table, [episodes]: episode, start, length, return, terminated,
                       truncated, end_reason, explicit_next, seed, has_seed
episodes.text          where there is any: the text of each episode, a JSON object
about                  a JSON document with fields, shapes and spaces, as text
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.output_files import LatchedFile
from ...core.errors import RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Sink
from ...core.format.documents import dump_json
from ...core.format.episodes import ALL_COLUMNS
from ...core.format.files import no_match
from ...core.ted.schema import Field, file_stem
from ..files.exports import FORMAT, ExportColumn
from ..files.numpy_files import NpzFile
from .columns import ExportFile, about, episode_columns, require_names

_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal data, equal bytes
_MOST_ABOUT, _MOST_TEXT = 64 << 20, 4 << 30
"""The most bytes of the description, and of a column of the episode table, that are read."""


class NpzExporter(Sink):
    """Writes a `.npz` file of any size, member by member."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the member `about` describes an export."""
        try:
            with NpzFile(path) as file:
                return "about" in file.names and FORMAT in str(file.whole("about", _MOST_ABOUT))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def prepare(self) -> None:
        """Refuse bfloat16, which NumPy does not have."""
        self.refuse({"bfloat16"}, "NumPy")
        require_names([*map(_name, self.chosen.fields), *self._others()], "the npz file")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write leaf after leaf."""
        with LatchedFile(target) as file:
            # A LatchedFile has every method that ZipFile calls, and fewer than typing.IO declares
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
                for name, array in self._others().items():
                    _member(archive, name, array.dtype, array.shape, iter([array]))
                for field in self.chosen.fields:
                    shape = (self.chosen.steps, *field.shape)
                    _member(archive, _name(field), field.numpy, shape, self._rows(field, file, progress))
            file.check()
            fs.fsync(file.descriptor, target)

    def _others(self) -> dict[str, Array]:
        found = {f"episodes.{name}": column for name, column in episode_columns(self.chosen).items()}
        if self.chosen.text is not None:
            found["episodes.text"] = np.array([dump_json(row) for row in self.chosen.text], str)
        return found | {"about": np.array(about(self.chosen))}

    def _rows(self, field: Field, file: LatchedFile, progress: Callable[[int], None]) -> Iterator[Array]:
        for rows in self.chosen.chunks(field.key, field.row_bytes):
            yield rows
            file.check()
            progress(rows.nbytes)


def _member(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], chunks: Iterator[Array]
) -> None:
    """Write one array in NumPy's form, chunk by chunk."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    with archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True) as member:
        member.write(header.getvalue())
        for rows in chunks:
            member.write(np.ascontiguousarray(rows).tobytes())


def _name(field: Field) -> str:
    return ".".join(file_stem(part) for part in field.key)


class NpzExport(ExportFile):
    """Reads what `NpzExporter` writes."""

    has_strings = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = NpzFile(path)

    def about(self) -> str:
        return str(self._file.whole("about", _MOST_ABOUT))

    def require(self, column: ExportColumn, steps: int) -> None:
        name = _name(column.field)
        if name not in self._file.names:
            raise self.lacks(column, "nothing")
        dtype, shape = self._file.form(name)
        if dtype != column.field.numpy or shape != (steps, *column.field.shape):
            raise self.lacks(column, f"{dtype} {list(shape)}")

    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        return self._file.read(_name(column.field), start, stop)

    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        raise self.lacks(column, "no strings")

    def episodes(self) -> dict[str, Array]:
        known = [name for name in ALL_COLUMNS if f"episodes.{name}" in self._file.names]
        return {name: self._file.whole(f"episodes.{name}", _MOST_TEXT) for name in known}

    def texts(self) -> list[str] | None:
        if "episodes.text" not in self._file.names:
            return None
        return [str(text) for text in np.atleast_1d(self._file.whole("episodes.text", _MOST_TEXT)).tolist()]

    def verify(self) -> None:
        self._file.verify()

    def close(self) -> None:
        self._file.close()
