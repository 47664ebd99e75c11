"""The Parquet files of a LeRobot dataset: a row for each frame, with columns of numbers, text and encoded images."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Closing
from ...core.format.files import open_regular
from ..files.arrow import require_bounded_parquet
from ..files.images import ImageForm, decode_image
from .fields import FeatureColumn, as_stated
from .metadata import require_content

_BATCH_BYTES = 4 << 20
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_TEXT = (pa.types.is_string, pa.types.is_large_string)


@dataclass
class _RowCursor:
    """Reading continues at row `position`; `left` has rows from there on, `batches` gives those after them."""

    names: tuple[str, ...]
    position: int
    batches: Iterator[Any]
    left: list[Any]


class RowsFile(Closing):
    """A Parquet file, of which ranges of rows are read; ranges that follow one another are read once."""

    def __init__(self, path: Path) -> None:
        require_content(path, "it has the rows of episodes")
        self.path = path
        self._opened = os.fdopen(open_regular(path), "rb")
        try:
            with damage_of(path):
                require_bounded_parquet(path)
                self._file = pq.ParquetFile(self._opened, buffer_size=1 << 20, pre_buffer=False)
                self.schema = self._file.schema_arrow
                self.rows = int(self._file.metadata.num_rows)
                groups = [self._file.metadata.row_group(place).num_rows for place in range(self._file.num_row_groups)]
            names = self.schema.names
            if len(set(names)) < len(names):
                raise FormatError(f"{path} has several columns of one name")
            self._groups = np.cumsum([0, *groups])
            self._cursor: _RowCursor | None = None
        except BaseException:
            self.close()
            raise

    def read(self, names: Sequence[str], start: int, stop: int) -> Any:
        """Read rows `[start, stop)` of these columns as an Arrow table."""
        wanted = tuple(names)
        cursor = self._cursor
        with damage_of(self.path):
            if cursor is None or cursor.names != wanted or cursor.position > start:
                cursor = self._cursor = self._started(wanted, start)
            try:
                self._pass_over(cursor, start - cursor.position)
                parts = list(self._take(cursor, stop - start))
                if not parts:
                    return self.schema.empty_table().select(list(wanted))
                return pa.Table.from_batches(parts).combine_chunks()
            except BaseException:
                self._cursor = None
                raise

    def _started(self, names: tuple[str, ...], start: int) -> _RowCursor:
        group = max(0, int(np.searchsorted(self._groups, start, side="right")) - 1)
        groups = list(range(group, self._file.num_row_groups))
        size = self._file.metadata.row_group(group).total_byte_size if groups else 0
        rows = max(1, int(self._groups[group + 1] - self._groups[group])) if groups else 1
        batches = self._file.iter_batches(
            batch_size=max(1, min(4096, _BATCH_BYTES // max(1, size // rows))),
            row_groups=groups, columns=list(names), use_threads=False,
        )  # fmt: skip
        return _RowCursor(names, int(self._groups[group]), iter(batches), [])

    def _pass_over(self, cursor: _RowCursor, count: int) -> None:
        for _ in self._take(cursor, count):
            pass

    def _take(self, cursor: _RowCursor, count: int) -> Iterator[Any]:
        """Yield the next `count` rows, in batches."""
        while count > 0:
            batch = cursor.left.pop() if cursor.left else next(cursor.batches, None)
            if batch is None:
                raise CorruptDataError(f"{self.path} ends before its row {cursor.position + count:,}")
            if batch.num_rows > count:
                cursor.left.append(batch.slice(count))
                batch = batch.slice(0, count)
            cursor.position += batch.num_rows
            count -= batch.num_rows
            if batch.num_rows:
                yield batch

    def close(self) -> None:
        self._opened.close()


class damage_of:  # reads as a function where it is used
    """Turns what pyarrow raises for damaged files into CorruptDataError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError | ValueError | LookupError | pa.ArrowException):
            return
        if isinstance(error, FormatError) or getattr(error, "errno", None) is not None:
            return
        reason = " ".join(str(error).split())[:200]
        raise CorruptDataError(f"{self._path} cannot be read, it is damaged or was cut: {reason}") from error


def stored_form(kind: Any) -> str:
    """Return what the elements of a column are: the name of a type of numbers, `string`, or Arrow's name."""
    while any(test(kind) for test in _LISTS):
        kind = kind.value_type
    if any(test(kind) for test in _NUMBERS):
        return str(np.dtype(kind.to_pandas_dtype()))
    return "string" if any(test(kind) for test in _TEXT) else str(kind)


def numbers_of(table: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], path: Path) -> Array:
    """Return a column as `[rows, *shape]`; FormatError for missing values and lists of other lengths."""
    values = column_of(table, name)
    sizes: list[int] = []
    while any(test(values.type) for test in _LISTS):
        _require_values(values, name, path)
        if pa.types.is_fixed_size_list(values.type):
            lengths = [values.type.list_size]
        else:
            lengths = pc.unique(pc.list_value_length(values)).to_pylist() or [0]
        if len(lengths) > 1:
            raise FormatError(
                f"{path}: {name!r} has lists of {lengths[0]} and of {lengths[1]} elements, info.json states the shape "
                f"{list(shape)}"
            )
        sizes += lengths
        values = values.flatten()
    _require_values(values, name, path)
    array: Array = values.to_numpy(zero_copy_only=False)
    size = math.prod(shape)
    # A vector of one number may be a plain column, and an array one list.
    if table.num_rows and (math.prod(sizes) != size or (len(sizes) > 1 and tuple(sizes) != shape)):
        raise FormatError(f"{path}: {name!r} has rows of the shape {sizes}, info.json states {list(shape)}")
    return np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(table.num_rows, *shape)


def texts_of(table: Any, name: str, path: Path) -> list[str]:
    """Return a column of text; FormatError for missing values."""
    values = column_of(table, name)
    _require_values(values, name, path)
    return [str(one) for one in values.to_pylist()]


def column_of(table: Any, name: str) -> Any:
    """Return a column as one array, its structure checked."""
    values = pa.concat_arrays(table.column(name).chunks) if table.num_rows else table.column(name).combine_chunks()
    values.validate(full=True)
    return values


def _require_values(values: Any, name: str, path: Path) -> None:
    if values.null_count:
        raise FormatError(f"{path}: {name!r} has missing values (null)")


def column_images(table: Any, column: FeatureColumn, path: Path, start: int) -> Array:
    """Decode a column of structs with the bytes of images into uint8 `[rows, *shape]`; `start` is the first row."""
    shape = column.field.shape
    height, width, channels = (*shape[1:], shape[0]) if column.channels_first else shape
    form = ImageForm("uint8", (height, width, channels))
    images = np.empty((table.num_rows, *shape), np.uint8)
    for row, value in enumerate(column_of(table, column.name).to_pylist()):
        what = f"{path}: {column.name!r}, row {start + row:,}"
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes) or not data:
            raise FormatError(f"{what} has no bytes of an image")
        images[row] = as_stated(decode_image(data, form, what), column, what)
    return images
