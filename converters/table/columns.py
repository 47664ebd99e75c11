"""Base class of table files: named columns with one row per step."""

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
    """A column of a table.

    Attributes:
        name: its name with the groups around it.
        dtype: the element type, `text` for strings.
        shape: the shape of a row.
        rows: the number of rows.
        why: why it cannot be mapped, "" if it can.
        pickled: whether it is a pickle that was not read, because the user did not trust it.
        note: a note for users who map the column.
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
    """An open file or folder of files with columns. Raises FormatError and CorruptDataError for damaged files."""

    kind: ClassVar[str]
    """The word for such a file in messages."""
    refuses_nan: bool = False
    """Whether a column with NaN cannot be mapped."""
    path: Path
    columns: Mapping[str, TableColumn]
    notes: tuple[str, ...] = ()
    """Notes on the file for the user."""
    starts: Sequence[int] = ()
    """For a table in several files, the first row of each file; else empty."""
    file_names: Sequence[str] = ()
    """The names of these files."""

    @abstractmethod
    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        """Read rows `[start, stop)` of columns as fresh arrays `[n, *shape]`; text columns are arrays of strings.

        Consecutive ranges in ascending order are fast in every format.
        """

    def files(self) -> list[Path]:
        """Return the files that contain the columns."""
        return [self.path]

    def verify_read(self) -> None:
        """Raise CorruptDataError if a checksum of what was read does not match, in formats with checksums."""

    def require_numbers(self, column: TableColumn) -> None:
        """Raise FormatError for a column that cannot be mapped as numbers, UsageError for a pickle without trust."""
        self._require_trust(column)
        if column.why or column.is_text:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be mapped: {column.why or 'it is text'}")

    def require_text(self, column: TableColumn) -> None:
        """Raise FormatError for a column that cannot be mapped as text, UsageError for a pickle without trust."""
        self._require_trust(column)
        why = column.why or (f"its rows are {list(column.shape)} texts, expected one" if column.shape else "")
        if why:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be mapped: {why}")

    def keep_text(self, name: str) -> None:
        """Treat a column as text whatever its cells look like, in a file without types; else do nothing."""

    def require_key(self, column: TableColumn) -> None:
        """Raise FormatError for a column that cannot be the episode key, UsageError for a pickle without trust."""
        self._require_trust(column)
        if column.why:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be the episode key: {column.why}")

    def _require_trust(self, column: TableColumn) -> None:
        if column.pickled:
            require_trust(
                self.path, False, f"column {column.name!r} is a pickle of Python objects, which can run anything"
            )

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        """Read rows of the episode key, as text if numbers would not be exact."""
        return self.read([column.name], start, stop)[column.name]

    def encoded(self, column: TableColumn, values: Array, start: int) -> list[bytes]:
        """Return strings of `read` as UTF-8; `start` is the row of the first one, for messages.

        Raises FormatError for a string that is not UTF-8 or too long.
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
                    f"expected at most {LONGEST_ROW:,}, since every row takes the space of the longest"
                )
            found.append(text)
        return found

    def longest_text(self, column: TableColumn) -> int:
        """Read a column of strings; return the length of the longest in bytes, at least 1. Raises as `encoded`."""
        longest = 1
        for start in range(0, column.rows, _TEXT_ROWS):
            stop = min(start + _TEXT_ROWS, column.rows)
            values = self.read([column.name], start, stop)[column.name]
            longest = max(longest, *map(len, self.encoded(column, values, start)))
        return longest

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return f"row {row:,}"


def array_column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> TableColumn:
    """Describe an array whose first axis is the rows; `shape` is None for one without data."""
    if shape is None:
        return TableColumn(name, str(dtype), (), 0, "it has no data")
    if not shape:
        return TableColumn(name, str(dtype), (), 0, "it is a single value")
    try:
        return TableColumn(name, dtype_name(dtype), shape[1:], shape[0])
    except (SchemaError, TypeError, ValueError):
        why = "its elements are Python objects, which would have to be unpickled" if dtype.hasobject else ""
        return TableColumn(
            name, str(dtype), shape[1:], shape[0], why or f"its elements are {dtype}, which are not numbers"
        )


def inexact_note(name: str, place: str) -> str:
    """Return a note that a column is float64, with the place of the first whole number that is not exact."""
    return (
        f"{name} is float64, since not every value is a whole number of 64 bits; the first whole number that float64 "
        f"cannot hold is in {place}"
    )


def leading_zeros_note(name: str, dtype: str, place: str) -> str:
    """Return a note that a column of numbers loses leading zeros, with the place of the first one."""
    return (
        f"{name} is {dtype} and loses the leading zeros of its numbers, the first in {place}; "
        "mapped to language_instruction it stays text"
    )


def native(rows: Array) -> Array:
    """Return rows in the byte order of this machine."""
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def require_rows(path: Path, name: str, rows: Array, start: int, stop: int) -> None:
    """Raise CorruptDataError unless `rows` has as many rows as requested."""
    if len(rows) != stop - start:
        raise CorruptDataError(
            f"{path}: {len(rows):,} of rows {start:,} to {stop:,} of {name!r} can be read; the file changed or was cut"
        )
