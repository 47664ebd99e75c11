"""Exports to a folder of two Parquet files, or to a single file if the name of the destination ends in `.parquet`.

    steps.parquet      one row for each step: `episode_index` (the row of its episode in episodes.parquet) and `step`
                       (from 0 in its episode), then a column for each field, named by its key with dots; vectors are
                       lists, arrays of more dimensions are lists of lists, text is strings; reward and flags are single
                       values
    episodes.parquet   one row for each episode: episode, start, length, return, terminated, truncated, end_reason,
                       explicit_next, seed, has_seed, scores such as `score.quality`, and `text`, a JSON object, if any
                       episode has text
    README.md          declares both for `datasets.load_dataset(folder)`, as the configurations `steps` and `episodes`

The metadata of the schema has `rbtool`, a JSON document with fields, shapes and spaces. A single file holds the steps;
its metadata also has `rbtool.episodes`, the bytes of episodes.parquet in base64.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Sink
from ...core.format.documents import dump_json
from ...core.format.files import require_regular
from ...core.format.memmap.builder import created_by
from ...core.ted.schema import SINGLETONS, Field
from ..files.arrow import nested, parquet_writer, text_columns
from ..files.exports import FORMAT, ExportColumn, columns_of, decoded
from ..files.readers import reading
from ..table.parquet import ParquetFile
from .columns import ExportFile, about, episode_columns, is_column, require_names

_STEPS, _EPISODES = "steps.parquet", "episodes.parquet"
_ABOUT, _TABLE = b"rbtool", b"rbtool.episodes"
_CARD, _FILE = "README.md", ".parquet"
_GROUP_BYTES = 8 << 20
_MOST_TABLE = 16 << 20
"""The largest episode table in metadata, in bytes: Arrow stores it twice, and readers refuse a footer of 100 MB."""


class ParquetExporter(Sink):
    """Writes Parquet files in row groups of about 8 MB."""

    keeps_scores = True

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the folder has these files and no others, or the path is one of them, with our metadata."""
        try:
            names = {entry.name for entry in path.iterdir()} if path.is_dir() else {_STEPS, _EPISODES}
            steps = path / _STEPS if path.is_dir() else path
            require_regular(steps)
            metadata = pq.read_schema(steps).metadata or {}
            return names - {_CARD} == {_STEPS, _EPISODES} and FORMAT.encode() in metadata.get(_ABOUT, b"")
        except (OSError, ValueError, pa.ArrowException):
            return False

    def prepare(self) -> None:
        """Raise SchemaError for bfloat16 and complex numbers, which Parquet does not have, and for equal names."""
        self.refuse({"bfloat16", "complex64", "complex128"}, "Parquet")
        require_names(["episode_index", "step", *(column.field.name for column in self._columns)], "Parquet")
        self._metadata = {_ABOUT: about(self.chosen).encode()}
        if not self._is_file:
            return
        buffer, table = io.BytesIO(), self._episodes()
        pq.write_table(
            table, buffer, compression="zstd", use_dictionary=text_columns(table.schema), write_page_checksum=True
        )
        packed = base64.b64encode(buffer.getbuffer())
        if len(packed) <= _MOST_TABLE:
            self._metadata[_TABLE] = packed
            where = "its table of episodes is in its metadata, for rbtool"
        else:
            where = "it has the steps alone, because its table of episodes is too large for the metadata"
        self.notes.append(f"{self.name}: {where}; a folder (--to parquet) has it as a file")

    @property
    def _is_file(self) -> bool:
        return self.name.lower().endswith(_FILE)

    @property
    def _columns(self) -> list[ExportColumn]:
        return columns_of(self.chosen.fields)

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the steps, then the episodes and the card."""
        if not self._is_file:
            fs.make_folder(target)
        schema = pa.schema(
            [("episode_index", pa.int64()), ("step", pa.int64())]
            + [(column.field.name, _type(column)) for column in self._columns],
            self._metadata,
        )
        with parquet_writer(target if self._is_file else target / _STEPS, schema) as (writer, file):
            for batch, size in self._batches(schema):
                writer.write_batch(batch)
                file.check()
                progress(size)
        if not self._is_file:
            self._write_episodes(target)
            fs.write_file(target / _CARD, self._card().encode())
            fs.sync_folder(target)

    def _episodes(self) -> pa.Table:
        columns: dict[str, Any] = dict(episode_columns(self.chosen))
        if self.chosen.text is not None:
            columns["text"] = pa.array([dump_json(row) for row in self.chosen.text], pa.string())
        return pa.table({name: pa.array(column) for name, column in columns.items()})

    def _write_episodes(self, target: Path) -> None:
        table = self._episodes()
        with parquet_writer(target / _EPISODES, table.schema) as (writer, _):
            writer.write_table(table)

    def _card(self) -> str:
        """Return the card, which declares both tables as configurations for `datasets`."""
        manifest = self.chosen.reader.manifest
        return (
            "---\nconfigs:\n"
            f"- config_name: steps\n  data_files: {_STEPS}\n  default: true\n"
            f"- config_name: episodes\n  data_files: {_EPISODES}\n"
            "tags:\n- reinforcement-learning\n---\n\n"
            f"{self.chosen.steps:,} steps in {len(self.chosen.rows):,} episodes, exported by {created_by()}"
            f" from {manifest.request.source}:{manifest.request.id}.\n\n"
            "```python\nfrom datasets import load_dataset\n\n"
            'steps = load_dataset(FOLDER)["train"]  # a row a step; episode_index is the row of its episode\n'
            'episodes = load_dataset(FOLDER, "episodes")["train"]\n```\n'
        )

    def _batches(self, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield batches of rows of about 8 MB, and the size of each in bytes."""
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


def _shape(field: Field) -> tuple[int, ...]:
    """Return the shape of a row, without the trailing dimension of rewards and flags."""
    inner = field.key[1:] if field.key[0] == "next" else field.key
    return () if inner in SINGLETONS and field.shape == (1,) else field.shape


def _type(column: ExportColumn) -> pa.DataType:
    if column.length is not None:
        return pa.string()
    kind = pa.from_numpy_dtype(column.field.numpy)
    for _ in _shape(column.field):
        kind = pa.list_(kind)
    return kind


_CHUNK_ROWS = 1 << 20


class ParquetExport(ExportFile):
    """Reads what `ParquetExporter` writes, and single files without an episode table, as older versions wrote them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        steps = path / _STEPS if path.is_dir() else path
        with self._reading():
            self._steps = ParquetFile(steps)
        self._table: ParquetFile | pa.Table | None = None
        try:
            with self._reading():
                metadata = pq.read_schema(steps).metadata or {}
                self._about: str = metadata[_ABOUT].decode()
                if path.is_dir():
                    self._table = ParquetFile(path / _EPISODES)
                elif _TABLE in metadata:
                    packed = base64.b64decode(metadata[_TABLE], validate=True)
                    self._table = pq.read_table(
                        pa.BufferReader(packed), use_threads=False, page_checksum_verification=True
                    )
        except BaseException:
            self.close()
            raise

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return reading("the data", self.path, pa.ArrowException, binascii.Error)

    def about(self) -> str:
        return self._about

    def require(self, column: ExportColumn, steps: int) -> None:
        found, field, text = self._steps.columns.get(column.field.name), column.field, column.length is not None
        if found is None:
            raise self.lacks(column, "nothing")
        shape = () if text else _shape(field)
        if not found.rows == steps or (steps and field.row_bytes and found.why):
            raise self.lacks(column, found.why or f"{found.rows:,} rows")
        fits = found.is_text if text else found.dtype == field.dtype and found.shape == shape
        if steps and field.row_bytes and not fits:
            raise self.lacks(column, f"{found.dtype} {list(found.shape)}")

    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        name = column.field.name
        with self._reading():
            return self._steps.read([name], start, stop)[name]

    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        return self.rows(column, start, stop).tolist()  # type: ignore[no-any-return]

    def episodes(self) -> dict[str, Array]:
        found = {name: self._column(name) for name in self._names() if is_column(name)}
        # Other programs may sort or remove the rows of the file, and keep its metadata.
        if isinstance(self._table, pa.Table) and not np.array_equal(found.get("start", ()), self.starts()):
            raise CorruptDataError(
                f"{self.path}: the episodes begin at other rows by episode_index than by the table of episodes"
            )
        return found

    def _names(self) -> Collection[str]:
        if self._table is None:
            return ()
        return self._table.column_names if isinstance(self._table, pa.Table) else self._table.columns

    def _column(self, name: str) -> Array:
        with self._reading():
            if isinstance(self._table, pa.Table):
                return np.asarray(self._table.column(name).to_numpy())
            assert self._table is not None
            return self._table.read([name], 0, self._table.columns[name].rows)[name]

    def starts(self) -> Array:
        """Return the steps at which `episode_index` changes."""
        index = self._steps.columns.get("episode_index")
        if index is None or index.dtype != "int64" or index.shape:
            raise CorruptDataError(f"{self.path} has no episode_index: its episodes cannot be told apart")
        found, before = [np.zeros(min(1, index.rows), np.int64)], None
        for start in range(0, index.rows, _CHUNK_ROWS):
            with self._reading():
                part = self._steps.read([index.name], start, min(start + _CHUNK_ROWS, index.rows))[index.name]
            changes = np.flatnonzero(np.diff(part)) + start + 1
            if before is not None and part[0] != before:
                changes = np.append(start, changes)
            found.append(changes)
            before = part[-1]
        return np.concatenate(found)

    def texts(self) -> list[str] | None:
        return self._column("text").tolist() if "text" in self._names() else None

    def close(self) -> None:
        self._steps.close()
        if isinstance(self._table, ParquetFile):
            self._table.close()
