"""Parquet files as tables; columns of lists are vectors, fields of structs are columns in a group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.files import FETCH_AGAIN, open_regular
from ...core.ted.schema import inexact_as_float
from .columns import TEXT, TableColumn, TableFile, array_column, require_rows

_MARK = b"PAR1"
_BATCH_BYTES = 8 << 20
_CHECKED_ROWS = 1 << 16
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


@dataclass
class _Cursor:
    """The state of a sequential read: the next row is `position`.

    `left` holds blocks that were read but not returned yet; `batches` yields those after them.
    """

    names: tuple[str, ...]
    batches: Iterator[Any]
    position: int
    left: list[dict[str, Array]]


class ParquetFile(TableFile):
    """A Parquet file. Missing values, and lists of other lengths than in the first row, are errors."""

    kind = "Parquet file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        try:
            self._rows = self._file.metadata.num_rows
            groups = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
            self._groups = np.cumsum([0, *groups])
            leaves = list(_leaves(self._file.schema_arrow))
            self._paths = dict(leaves)
            self._shared = {name for name, count in Counter(name for name, _ in leaves).items() if count > 1}
            self._cursor: _Cursor | None = None
            first = self._first_row()
            self.columns = {name: self._column(name, path, first) for name, path in self._paths.items()}
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._opened = os.fdopen(open_regular(self.path), "rb")
        try:
            _require_whole(self._opened, self.path)
            self._file = pq.ParquetFile(
                self._opened, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
            )
        except BaseException:
            self._opened.close()
            raise

    def rest(self) -> None:
        """Close the file until it is read again."""
        self._opened.close()
        self._cursor = None

    def first_inexact(self, name: str) -> int | None:
        """Return the first row of a column with a whole number that float64 cannot hold, None if there is none."""
        column = self.columns[name]
        for start in range(0, column.rows, _CHECKED_ROWS) if column.dtype in ("int64", "uint64") else ():
            values = self.read([name], start, min(start + _CHECKED_ROWS, column.rows))[name]
            odd = inexact_as_float(values).reshape(len(values), -1).any(1)
            if odd.any():
                return start + int(odd.argmax())
        return None

    def first_zeros(self, name: str) -> None:
        """Return None: numbers are stored in binary, without leading zeros."""

    def has_negative(self, name: str) -> bool:
        """Return True, as negative numbers are possible and not searched for."""
        return True

    def _first_row(self) -> Any:
        """Return the first row, from which the lengths of lists are taken."""
        batches = self._file.iter_batches(batch_size=1) if self._rows else iter(())
        return next(batches, None)

    def _column(self, name: str, path: tuple[str, ...], first: Any) -> TableColumn:
        if name in self._shared:  # a column `a.b`, and a field `b` of a struct `a`
            return TableColumn(name, "unknown", (), self._rows, "another column has that name")
        kind = _type_at(self._file.schema_arrow, path)
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_string(value) or pa.types.is_large_string(value):
            return TableColumn(name, TEXT, (), self._rows)
        sizes: list[int] = []
        values = None if first is None else _inside(first, path)
        while _is_list(kind):
            if values is not None and (values.null_count or not len(values)):
                return TableColumn(name, str(kind), (), self._rows, "its first row has no value, or an empty list")
            if values is not None:
                sizes.append(len(values[0].values))
                values = values.flatten()
            kind = kind.value_type
        if not any(test(kind) for test in _NUMBERS):
            return TableColumn(
                name, str(kind), tuple(sizes), self._rows, f"its elements are {kind}, which are not numbers"
            )
        return array_column(name, np.dtype(kind.to_pandas_dtype()), (self._rows, *sizes))

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        wanted = tuple(names)
        cursor = self._cursor
        if cursor is None or cursor.names != wanted or cursor.position != start:
            cursor = self._cursor = self._started(wanted, start)
        parts, needed = [], stop - start
        while needed > 0:
            block = cursor.left.pop() if cursor.left else self._next(cursor)
            if block is None:
                break
            rows = len(block[wanted[0]])
            if rows > needed:
                cursor.left.append({name: values[needed:] for name, values in block.items()})
                block = {name: values[:needed] for name, values in block.items()}
            parts.append(block)
            needed -= min(rows, needed)
        cursor.position = stop
        found = {name: self._joined(name, [part[name] for part in parts]) for name in wanted}
        for name in wanted:
            require_rows(self.path, name, found[name], start, stop)
        return found

    def _joined(self, name: str, parts: Sequence[Array]) -> Array:
        column = self.columns[name]
        empty = np.zeros((0, *column.shape), object if column.is_text else column.dtype)
        return np.concatenate(parts) if parts else empty

    def _started(self, names: tuple[str, ...], start: int) -> _Cursor:
        """Start reading at a row; the rows before it in its row group are skipped."""
        if self._opened.closed:
            self._open()
            if self._file.metadata.num_rows != self._rows:
                raise CorruptDataError(f"{self.path} changed while it was read")
        group = max(0, int(np.searchsorted(self._groups, start, side="right")) - 1)
        bytes_a_row = sum(max(8, int(np.prod(self.columns[name].shape, initial=8))) for name in names)
        batches = self._file.iter_batches(
            batch_size=max(1, min(1 << 16, _BATCH_BYTES // bytes_a_row)),
            row_groups=list(range(group, self._file.num_row_groups)),
            columns=[".".join(self._paths[name]) for name in names],
            use_threads=False,
        )
        cursor = _Cursor(names, iter(batches), int(self._groups[group]), [])
        while cursor.position < start and (block := self._next(cursor)) is not None:
            rows, over = len(block[names[0]]), start - cursor.position
            cursor.position = min(start, cursor.position + rows)
            if rows > over:
                cursor.left.append({name: values[over:] for name, values in block.items()})
        return cursor

    def _next(self, cursor: _Cursor) -> dict[str, Array] | None:
        batch = next(cursor.batches, None)
        if batch is None:
            return None
        return {name: self._values(name, _inside(batch, self._paths[name])) for name in cursor.names}

    def _values(self, name: str, values: Any) -> Array:
        column = self.columns[name]
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        rows = len(values)
        for size in column.shape:
            self._require_no_nulls(name, values)
            lengths = np.asarray(values.value_lengths()) if not pa.types.is_fixed_size_list(values.type) else [size]
            if (np.asarray(lengths) != size).any():
                other = int(np.asarray(lengths)[np.asarray(lengths) != size][0])
                raise FormatError(
                    f"{self.path}: column {name!r} has lists of {size} and of {other} elements, but all rows of a "
                    "field must have the same shape"
                )
            values = values.flatten()
        self._require_no_nulls(name, values)
        array: Array = values.to_numpy(zero_copy_only=False)
        return array if column.is_text else array.astype(column.dtype, copy=False).reshape(rows, *column.shape)

    def _require_no_nulls(self, name: str, values: Any) -> None:
        if values.null_count:
            raise FormatError(
                f"{self.path}: column {name!r} has missing values (null)",
                hint="fill them, or leave out those rows, and write the table again",
            )

    def close(self) -> None:
        self._opened.close()


def _require_whole(file: BinaryIO, path: Path) -> None:
    """Raise CorruptDataError for a file that does not end like a Parquet file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_MARK)))
    if file.read() != _MARK or size < 3 * len(_MARK):
        raise CorruptDataError(
            f"{path} was cut: it has {size:,} bytes, and does not end with the footer of a Parquet file",
            hint=FETCH_AGAIN,
        )
    file.seek(0)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _leaves(schema: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the columns, also those inside structs: the dotted name, and its parts."""
    pending: list[tuple[tuple[str, ...], Any]] = [((field.name,), field.type) for field in reversed(list(schema))]
    while pending:
        path, kind = pending.pop()
        if pa.types.is_struct(kind):
            pending += [((*path, kind.field(at).name), kind.field(at).type) for at in reversed(range(kind.num_fields))]
        else:
            yield ".".join(path), path


def _type_at(schema: Any, path: tuple[str, ...]) -> Any:
    kind = schema.field(path[0]).type
    for part in path[1:]:
        kind = kind.field(part).type
    return kind


def _inside(batch: Any, path: tuple[str, ...]) -> Any:
    values = batch.column(path[0])
    for part in path[1:]:
        if values.null_count:
            raise FormatError(f"column {path[0]!r} has missing values (null), and its fields are mapped")
        values = values.field(part)
    return values
