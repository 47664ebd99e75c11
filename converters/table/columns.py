"""What a table is to the reader, whatever file it is in: named columns with a row a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.converter import require_trust
from ...core.ted.schema import LONGEST_ROW, dtype_name

TEXT = "text"
_TEXT_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: `name` with the groups that it is in, the element type, the shape of a row, the number of rows.

    The element type of strings is `text`. `why` states why the column cannot be mapped; empty where it can. `pickled`
    states that it is a pickle, which only a user who trusts it can have read. `note` is a sentence that a user who maps
    the column should read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    why: str = ""
    pickled: bool = False
    note: str = ""

    @property
    def is_text(self) -> bool:
        """Whether its values are strings."""
        return self.dtype == TEXT

    @property
    def is_scalar(self) -> bool:
        """Whether a row is one value."""
        return math.prod(self.shape) == 1


class TableFile(Closing, ABC):
    """An open file, or a folder of files, with columns. Raises FormatError and CorruptDataError for damaged ones."""

    kind: ClassVar[str]
    """What such a file is called in sentences."""
    refuses_nan: bool = False
    """Whether a column with NaN cannot be mapped."""
    path: Path
    columns: Mapping[str, TableColumn]
    notes: tuple[str, ...] = ()
    """Sentences on the file that a user should read."""
    starts: Sequence[int] = ()
    """The first row of each file, of a table in several; else nothing."""
    file_names: Sequence[str] = ()
    """The names of those files."""

    @abstractmethod
    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        """Read rows `[start, stop)` of columns as fresh arrays `[n, *shape]`, of strings where a column is text.

        Reading forward in ranges that follow each other is fast in every format.
        """

    def files(self) -> list[Path]:
        """The files that the columns are in."""
        return [self.path]

    def verify_read(self) -> None:
        """Raise CorruptDataError if what was read has another checksum than is stated of it, where there is one."""

    def require_numbers(self, column: TableColumn) -> None:
        """Raise FormatError, which names the row, for a column that cannot be mapped as numbers.

        UsageError for a pickle that is not trusted, as `require_key` raises it.
        """
        self._require_trust(column)
        if column.why or column.is_text:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be mapped: {column.why or 'it is text'}")

    def require_text(self, column: TableColumn) -> None:
        """Raise FormatError for a column of strings that cannot be mapped as text, as `require_numbers` raises it."""
        self._require_trust(column)
        why = column.why or (f"its rows are {list(column.shape)} texts, expected one" if column.shape else "")
        if why:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be mapped: {why}")

    def keep_text(self, name: str) -> None:
        """Read a column as the text that it is written in, if the file states no types; else do nothing."""

    def require_key(self, column: TableColumn) -> None:
        """Raise FormatError for a column that cannot be the episode key."""
        self._require_trust(column)
        if column.why:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be the episode key: {column.why}")

    def _require_trust(self, column: TableColumn) -> None:
        if column.pickled:
            require_trust(
                self.path, False, f"column {column.name!r} is a pickle of Python objects, which can run anything"
            )

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        """Read rows of a column to compare them: text where numbers would not be exact."""
        return self.read([column.name], start, stop)[column.name]

    def encoded(self, column: TableColumn, values: Array, start: int) -> list[bytes]:
        """Return strings that `read` returned, the first of which is in row `start`, in UTF-8.

        FormatError for one that is not UTF-8, and for one that is too long.
        """
        found: list[bytes] = []
        for row, value in enumerate(values.reshape(len(values)).tolist(), start):
            try:
                text = value if isinstance(value, bytes) else str(value).encode()
                text.decode()
            except UnicodeError as error:
                raise FormatError(
                    f"{self.path}: column {column.name!r} is not UTF-8 text in {self.place(row)}"
                ) from error
            if len(text) > LONGEST_ROW:
                raise FormatError(
                    f"{self.path}: column {column.name!r} has a text of {len(text):,} bytes in {self.place(row)}, "
                    f"expected at most {LONGEST_ROW:,}: every row takes the space of the longest"
                )
            found.append(text)
        return found

    def longest_text(self, column: TableColumn) -> int:
        """Read a column of strings; return the bytes of the longest, at least 1. Raises what `encoded` raises."""
        longest = 1
        for start in range(0, column.rows, _TEXT_ROWS):
            stop = min(start + _TEXT_ROWS, column.rows)
            values = self.read([column.name], start, stop)[column.name]
            longest = max(longest, *map(len, self.encoded(column, values, start)))
        return longest

    def place(self, row: int) -> str:
        """Where a row is, in words for a message."""
        return f"row {row:,}"


def array_column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> TableColumn:
    """Describe an array of a file whose first axis counts the rows; `shape` is None for one without data."""
    if shape is None:
        return TableColumn(name, str(dtype), (), 0, "it has no data")
    if not shape:
        return TableColumn(name, str(dtype), (), 0, "it is a single value")
    try:
        return TableColumn(name, dtype_name(dtype), shape[1:], shape[0])
    except (SchemaError, TypeError, ValueError):
        why = "its elements are Python objects, which only unpickling would read" if dtype.hasobject else ""
        return TableColumn(
            name, str(dtype), shape[1:], shape[0], why or f"its elements are {dtype}, which are not numbers"
        )


def inexact_note(name: str, place: str) -> str:
    """State that a column of whole numbers and others is float64, and where the first is that it does not hold."""
    return (
        f"{name} is float64, since not every value is a whole number of 64 bits; the first whole number that float64 "
        f"does not hold is in {place}"
    )


def leading_zeros_note(name: str, dtype: str, place: str) -> str:
    """State that a column of numbers is written with zeros in front, and where the first such number is."""
    return (
        f"{name} is {dtype} and loses the zeros in front of its numbers, of which the first is in {place}; "
        "mapped to language_instruction it stays text"
    )


def native(rows: Array) -> Array:
    """Return rows in the byte order of this machine."""
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def require_rows(path: Path, name: str, rows: Array, start: int, stop: int) -> None:
    """Raise CorruptDataError unless as many rows of a column came as were asked for."""
    if len(rows) != stop - start:
        raise CorruptDataError(
            f"{path}: {len(rows):,} of rows {start:,} to {stop:,} of {name!r} can be read; the file changed or was cut"
        )
