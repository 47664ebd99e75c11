"""A file of a dataset of text, Parquet or an Arrow stream: its columns, and its rows in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ...core.format.digest import open_regular, refuse_pointer
from ..files.arrow import require_bounded_parquet

_ROWS = 4096
_TEXT = (pa.types.is_string, pa.types.is_large_string)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of this type are text; it may be stored by dictionary."""
    return any(test(kind.value_type if pa.types.is_dictionary(kind) else kind) for test in _TEXT)


def is_number(kind: pa.DataType) -> bool:
    """Return whether values of this type are numbers or flags."""
    return any(test(kind) for test in _NUMBERS)


class TextPart:
    """One file, which is of `split`."""

    def __init__(self, split: str, path: Path) -> None:
        self.split, self.path = split, path
        with os.fdopen(open_regular(path), "rb") as file:
            self._is_parquet = file.read(4) == b"PAR1"
        refuse_pointer(path)
        if self._is_parquet:
            require_bounded_parquet(path)
            schema = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False).schema_arrow
        else:
            with pa.memory_map(str(path)) as mapped:
                schema = pa.ipc.open_stream(mapped).schema
        self.schema = schema.remove_metadata()
        self.names = set(self.schema.names)

    def has_text(self) -> bool:
        """Return whether a column has text."""
        return any(is_text(field.type) for field in self.schema)

    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these columns."""
        if self._is_parquet:
            file = pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
            yield from file.iter_batches(batch_size=_ROWS, columns=names, use_threads=False)
            return
        with pa.memory_map(str(self.path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            for batch in stream:
                batch.validate(full=True)
                yield batch.select(names)

    def text_of(self, batch: pa.RecordBatch, name: str) -> list[bytes]:
        """Return the UTF-8 bytes of a column of text."""
        values = self._present(batch, name)
        found: list[bytes] = values.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return found

    def numbers_of(self, batch: pa.RecordBatch, name: str) -> Array:
        """Return a column of numbers."""
        found: Array = self._present(batch, name).to_numpy(zero_copy_only=False)
        return found

    def _present(self, batch: pa.RecordBatch, name: str) -> Any:
        values = batch.column(name)
        if values.null_count:
            raise FormatError(f"{self.path} has {values.null_count:,} rows without a value in {name!r} (null)")
        return values
