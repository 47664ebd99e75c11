"""Exports to a folder of two Parquet files.

    steps.parquet      one row a step: `episode_index` (which row of episodes.parquet) and `step` (from 0 in its
                       episode), then a column a leaf, parts of nested keys joined by dots; vectors are lists, arrays
                       of more dimensions lists of lists, text is strings; reward and flags are single values
    episodes.parquet   one row an episode: episode, start, length, return, terminated, truncated, end_reason, seed,
                       has_seed, and `text`, a JSON object, where episodes have any text

The schema's metadata has `rbtool`, a JSON document with fields, shapes and spaces.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.encodings.streams import LatchedFile
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.digest import require_regular
from ...core.format.documents import dump_json
from ...core.format.sinks import Sink
from ...core.ted.schema import SINGLETONS, Field
from .columns import FORMAT, ExportColumn, about, columns_of, decoded, episode_columns, require_names

_STEPS, _EPISODES, _ABOUT = "steps.parquet", "episodes.parquet", b"rbtool"
_GROUP_BYTES = 8 << 20


class _ParquetFile(LatchedFile):
    """A LatchedFile with the further methods that pyarrow calls."""

    closed = False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the code that opened the file closes the descriptor."""


class ParquetExporter(Sink):
    """Writes Parquet files in row groups of about 8 MB."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the folder has the two files, and the metadata of the steps those of an export."""
        try:
            names = {entry.name for entry in path.iterdir()}
            require_regular(path / _STEPS)
            metadata = pq.read_schema(path / _STEPS).metadata or {}
            return names == {_STEPS, _EPISODES} and FORMAT.encode() in metadata.get(_ABOUT, b"")
        except (OSError, ValueError):
            return False

    def prepare(self) -> None:
        """Refuse bfloat16 and complex numbers, which Parquet does not have."""
        self.refuse({"bfloat16", "complex64", "complex128"}, "Parquet")
        require_names(["episode_index", "step", *(column.field.name for column in self._columns)], "Parquet")

    @property
    def _columns(self) -> list[ExportColumn]:
        return columns_of(self.chosen.fields)

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write steps, then episodes."""
        fs.make_folder(target)
        schema = pa.schema(
            [("episode_index", pa.int64()), ("step", pa.int64())]
            + [(column.field.name, _type(column)) for column in self._columns],
            {_ABOUT: about(self.chosen).encode()},
        )
        with parquet_writer(target / _STEPS, schema) as (writer, file):
            for batch, size in self._batches(schema):
                writer.write_batch(batch)
                file.check()
                progress(size)
        columns: dict[str, Any] = dict(episode_columns(self.chosen))
        if self.chosen.text is not None:
            columns["text"] = pa.array([dump_json(row) for row in self.chosen.text], pa.string())
        table = pa.table({name: pa.array(column) for name, column in columns.items()})
        with parquet_writer(target / _EPISODES, table.schema) as (writer, _):
            writer.write_table(table)

    def _batches(self, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the rows of about 8 MB and how many bytes they are."""
        row_bytes, table = sum(column.bytes for column in self._columns), self.chosen.table
        size, done, starts = max(1, _GROUP_BYTES // max(1, row_bytes)), 0, table.start
        for first, last in self.chosen.spans():
            for start in range(first, last, size):
                stop = min(start + size, last)
                number = np.arange(done, done + stop - start)
                index = table.index_of_step(number)
                arrays = [pa.array(index, pa.int64()), pa.array(number - starts[index], pa.int64())]
                arrays += [self._array(column, start, stop) for column in self._columns]
                done += stop - start
                yield pa.record_batch(arrays, schema=schema), row_bytes * (stop - start)

    def _array(self, column: ExportColumn, start: int, stop: int) -> pa.Array:
        rows = self.chosen.reader.read(column.field.key, start, stop)
        if column.length is not None:
            lengths = self.chosen.reader.read(column.length.key, start, stop)
            return pa.array(decoded(rows, lengths, column.field.name), pa.string())
        return nested(rows.reshape(len(rows), *_shape(column.field)))


@contextlib.contextmanager
def parquet_writer(path: Path, schema: pa.Schema) -> Iterator[tuple[pq.ParquetWriter, LatchedFile]]:
    """Open a new Parquet file, which is synced at the end, with the file below it: its `check` raises what failed."""
    file = _ParquetFile(path)
    with file:
        words = [column.name for column in schema if pa.types.is_string(column.type)]
        # A dictionary of numbers that all differ takes more space and time than the numbers
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=words) as writer:
            yield writer, file
        file.check()
        fs.fsync(file.descriptor, path)


def _shape(field: Field) -> tuple[int, ...]:
    """The shape of a row without the trailing one of reward and flags."""
    inner = field.key[1:] if field.key[0] == "next" else field.key
    return () if inner in SINGLETONS and field.shape == (1,) else field.shape


def _type(column: ExportColumn) -> pa.DataType:
    if column.length is not None:
        return pa.string()
    kind = pa.from_numpy_dtype(column.field.numpy)
    for _ in _shape(column.field):
        kind = pa.list_(kind)
    return kind


def nested(rows: Array) -> pa.Array:
    """Return rows as an Arrow array: lists of lists, one level for each dimension after the first."""
    array = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for depth in range(rows.ndim - 1, 0, -1):
        count, size = math.prod(rows.shape[:depth]), rows.shape[depth]
        array = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(size)), array)
    return array
