"""CSV or Parquet files with the same columns, one after the other, as one table."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.contracts import Array
from ...core.format.files import open_regular
from ..files.episode_files import natural_order
from .columns import TEXT, TableColumn, TableFile, inexact_note, leading_zeros_note
from .parquet import ParquetFile
from .text import CsvFile

SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".pq"})
_MOST_NOTES = 3


class TableFiles(TableFile):
    """CSV files, or Parquet files, below a folder, in the order of their names as people count.

    `pattern` chooses them, like `*.csv` or `**/*.parquet`; without it they are all of them. A column has one type in
    the whole table: that which holds the values of all files. One file is open at a time.

    UsageError for a pattern that matches none; FormatError for files of both kinds and for other ones.
    """

    kind = "folder of CSV or Parquet files"

    def __init__(self, folder: Path, pattern: str | None = None) -> None:
        self.path = folder
        self._paths = list(table_files(folder, pattern))
        self._kind = self._common_kind()
        self._parts: list[CsvFile | ParquetFile] = []
        self._open: CsvFile | ParquetFile | None = None
        starts = [0]
        for path in self._paths:
            part = self._kind(path)
            rows = next(iter(part.columns.values())).rows if part.columns else 0
            if not rows:
                raise FormatError(f"{path} has no steps: it has no rows")
            self._parts.append(part)
            starts.append(starts[-1] + rows)
            part.rest()
        self.starts, self._rows = starts[:-1], starts[-1]
        self.file_names = [path.relative_to(folder).as_posix() for path in self._paths]
        self.refuses_nan = self._kind.refuses_nan
        self.notes = tuple(self._notes())
        self.columns = {
            name: self._column(name) for name in dict.fromkeys(n for part in self._parts for n in part.columns)
        }

    def _common_kind(self) -> type[CsvFile | ParquetFile]:
        kinds: dict[type[CsvFile | ParquetFile], Path] = {}
        for path in self._paths:
            with os.fdopen(open_regular(path), "rb") as file:
                kinds.setdefault(ParquetFile if file.read(4) == b"PAR1" else CsvFile, path)
        if len(kinds) > 1:
            raise FormatError(
                f"{self.path} has CSV files and Parquet files: {kinds[CsvFile].name}, {kinds[ParquetFile].name}",
                hint="name those of one table, as in --files '*.csv'",
            )
        return next(iter(kinds))

    def _notes(self) -> Iterator[str]:
        found = [note for part in self._parts for note in part.notes]
        yield from found[:_MOST_NOTES]
        if len(found) > _MOST_NOTES:
            yield f"{len(found) - _MOST_NOTES:,} more files have such a note"

    def _column(self, name: str) -> TableColumn:
        """What a column is in all files: the type that holds all values, and why it cannot be mapped."""
        there = [part.columns.get(name) for part in self._parts]
        known = [one for one in there if one is not None]
        first, dtypes = known[0], dict.fromkeys(one.dtype for one in known)
        places = {one.dtype: file for one, file in zip(there, self.file_names, strict=True) if one is not None}
        listed = " and ".join(f"{dtype} in {places[dtype]}" for dtype in dtypes)
        dtype, why, note = first.dtype, "", ""
        if len(known) < len(there):
            why = f"{self.file_names[there.index(None)]} has no such column"
        elif odd := next((one for one in known if one.why), None):
            why = f"{odd.why} ({self.file_names[known.index(odd)]})"
        elif len({one.shape for one in known}) > 1:
            other = next(at for at, one in enumerate(known) if one.shape != first.shape)
            shapes = f"{list(first.shape)}, and {list(known[other].shape)} in {self.file_names[other]}"
            why = f"its rows have the shape {shapes}"
        elif TEXT in dtypes:
            dtype = TEXT
            why = f"it is {listed}" if len(dtypes) > 1 and self._kind is ParquetFile else ""
        elif "bool" in dtypes and len(dtypes) > 1:
            why = f"it is {listed}"
        else:
            dtype = np.result_type(*dtypes).name
            if dtypes.keys() == {"int64", "uint64"} and not any(part.has_negative(name) for part in self._parts):
                dtype = "uint64"
            note = "; ".join(self._column_notes(name, dtype))
        return TableColumn(name, dtype, first.shape, self._rows, why, note=note)

    def _column_notes(self, name: str, dtype: str) -> Iterator[str]:
        if np.dtype(dtype).kind == "f":
            inexact = ((number, part.first_inexact(name)) for number, part in enumerate(self._parts))
            yield from [inexact_note(name, self._place(at, row)) for at, row in inexact if row is not None][:1]
        zeros = ((number, part.first_zeros(name)) for number, part in enumerate(self._parts))
        yield from [leading_zeros_note(name, dtype, self._place(at, row)) for at, row in zeros if row is not None][:1]

    def keep_text(self, name: str) -> None:
        for part in self._parts:
            if name in part.columns:
                part.keep_text(name)
        self.columns = {**self.columns, name: self._column(name)}

    def _part(self, number: int) -> CsvFile | ParquetFile:
        part = self._parts[number]
        if self._open is not None and self._open is not part:
            self._open.rest()
        self._open = part
        return part

    def _spans(self, start: int, stop: int) -> Iterator[tuple[CsvFile | ParquetFile, int, int]]:
        """Yield the files with rows in `[start, stop)`, and which of their rows these are."""
        number = max(0, bisect.bisect_right(self.starts, start) - 1)
        while start < stop:
            begin = self.starts[number]
            end = self.starts[number + 1] if number + 1 < len(self.starts) else self._rows
            yield self._part(number), start - begin, min(stop, end) - begin
            start, number = min(stop, end), number + 1

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {name: [] for name in names}
        for part, first, last in self._spans(start, stop):
            for name, rows in part.read(names, first, last).items():
                parts[name].append(rows)
        return {name: self._joined(self.columns[name], found) for name, found in parts.items()}

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        found = [part.read_key(column, first, last) for part, first, last in self._spans(start, stop)]
        return np.concatenate(found)

    def _joined(self, column: TableColumn, parts: Sequence[Array]) -> Array:
        if not parts:
            return np.zeros((0, *column.shape), object if column.is_text else column.dtype)
        return np.concatenate(parts if column.is_text else [rows.astype(column.dtype, copy=False) for rows in parts])

    def require_numbers(self, column: TableColumn) -> None:
        if column.is_text or not column.why:
            for number, part in enumerate(self._parts):
                if column.name in part.columns:
                    self._part(number).require_numbers(part.columns[column.name])
        super().require_numbers(column)

    def require_text(self, column: TableColumn) -> None:
        super().require_text(column)
        dtypes = {part.columns[column.name].dtype for part in self._parts}
        for number, part in enumerate(self._parts):
            found = part.columns[column.name]
            if len(dtypes) == 1:
                self._part(number).require_text(found)
            elif found.is_text:  # next to a file in which the column has numbers
                self._part(number).require_numbers(found)

    def require_key(self, column: TableColumn) -> None:
        super().require_key(column)
        if column.note and self._kind is ParquetFile:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be the episode key: {column.note}")
        for number, part in enumerate(self._parts):
            self._part(number).require_key(part.columns[column.name])

    def files(self) -> list[Path]:
        return self._paths

    def place(self, row: int) -> str:
        """The file of a row, and where it is there."""
        number = max(0, bisect.bisect_right(self.starts, row) - 1)
        return self._place(number, row - self.starts[number])

    def _place(self, number: int, row: int) -> str:
        return f"{self.file_names[number]}, {self._part(number).place(row)}"

    def close(self) -> None:
        for part in self._parts:
            part.close()


def table_files(folder: Path, pattern: str | None = None) -> Iterator[Path]:
    """Yield the files below a folder that may be one table; UsageError for a pattern that matches none."""
    if pattern is None:
        found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    else:
        parts = PurePath(pattern).parts
        if PurePath(pattern).is_absolute() or ".." in parts or not parts:
            raise UsageError(f"--files is {pattern!r}, expected a pattern of files in {folder}", hint="like '*.csv'")
        found = [path for path in folder.glob(pattern) if path.is_file()]
        if not found:
            raise UsageError(f"--files {pattern!r} matches no file in {folder}")
    yield from sorted(found, key=lambda path: natural_order(path.relative_to(folder).as_posix()))
