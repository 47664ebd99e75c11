"""Builds dataset folders in layout `packed`, row by row: in one pass, with one buffer in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import SchemaError
from ...ted.episodes import rows_equal
from ...ted.schema import NEXT, Field, Key, row_bytes
from .. import fs
from ..contracts import Array, StepReader
from ..episodes import EpisodeTable
from ..files import FileRecord
from ..manifest import Layout, Manifest
from ..memmap.builder import DatasetBuilder, Origin, OverlappedBuilder, RowBuilder, write_manifest
from ..memmap.tree import FieldRange, range_of, write_listed
from ..returns import table_with_returns
from .schema import (
    EXPLICIT,
    RECORDS,
    SCHEMA,
    AppendedFile,
    ChunkedRows,
    PackedField,
    PackedSchema,
    RecordNumbers,
    RowCodec,
    RowStore,
    StoreState,
    WholeRows,
)


class PackedFiles:
    """Appends records to the files of a folder.

    Args:
        folder: where the files are.
        schema: the places of the fields.
        explicit: whether these are the records of explicit next rows, which only have states.
        resumed: the states of another builder's stores, the records first; CorruptDataError if a file differs.
        make: creates other stores, given the path of a file and the bytes of a row.
    """

    def __init__(
        self, folder: Path, schema: PackedSchema, *, explicit: bool = False, resumed: Sequence[StoreState] = (),
        make: Callable[[str, int], RowStore] | None = None,
    ) -> None:  # fmt: skip
        self.schema = schema
        self._explicit = explicit
        self._own: dict[Key, RowStore] = {}
        states = iter(resumed)
        name = EXPLICIT if explicit else RECORDS
        width = schema.record_bytes
        self._records = make(name, width) if make else WholeRows(folder, name, width, next(states, None))
        try:
            for one in schema.own_files:
                if make:
                    self._own[one.field.key] = make(one.file(), one.field.row_bytes)
                elif one.state or not explicit:
                    self._own[one.field.key] = _store(folder, one, explicit, next(states, None))
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> int:
        """Records written."""
        return self._records.rows

    @property
    def states(self) -> tuple[StoreState, ...]:
        """The states of the stores, from which others can continue."""
        return tuple(store.state for store in (self._records, *self._own.values()))

    @property
    def files(self) -> Iterator[AppendedFile]:
        """All files."""
        for store in (self._records, *self._own.values()):
            yield from store.files

    def append(self, columns: Mapping[Key, Array], last: Array) -> None:
        """Append TED rows, root and next; `last` marks rows that end an episode, after which comes one more record.

        For example, with two episodes:

            rows       s0→s1, s1→s2 (last), t0→t1 (last)
            records    0: s0, 1: s1, 2: s2, 3: t0, 4: t1
            places     [0, 1, 3], the records of the rows
            extra      [2, 4], the records of the final states
        """
        ends = np.flatnonzero(last)
        places: Array | slice = slice(None)
        if len(ends):
            places = np.arange(len(last)) + np.cumsum(last) - last
        extra = ends + np.arange(1, len(ends) + 1)
        records = np.zeros((len(last) + len(ends), self.schema.record_bytes), np.uint8)
        for one in self.schema.fields:
            key = one.field.key
            if one.offset is not None:
                rows = self.schema.column(records, one)
                rows[places] = columns[key]
                if one.state and len(ends):
                    rows[extra] = columns[NEXT, *key][ends]
            elif one.stem is not None and not (one.state and len(ends)):
                self._own[key].append(columns[key])
            elif one.stem is not None:
                rows = np.empty((len(records), *one.field.shape), one.field.numpy)
                rows[places], rows[extra] = columns[key], columns[NEXT, *key][ends]
                self._own[key].append(rows)
        self._records.append(records)

    def append_episode(self, states: Mapping[Key, Array], steps: Mapping[Key, Array], length: int) -> None:
        """Append an episode, each state `[length + 1, *shape]` once, by root key."""
        records = np.zeros((length + 1, self.schema.record_bytes), np.uint8)
        for one in self.schema.fields:
            rows = (states if one.state else steps)[one.field.key]
            if one.offset is not None:
                self.schema.column(records, one)[: length + one.state] = rows
            elif one.stem is not None:
                self._own[one.field.key].append(rows)
        self._records.append(records)

    def append_states(self, columns: Mapping[Key, Array], count: int) -> None:
        """Append records with these states, by root key; all other fields are zero."""
        records = np.zeros((count, self.schema.record_bytes), np.uint8)
        for one in self.schema.fields:
            if one.state and one.offset is not None:
                self.schema.column(records, one)[:] = columns[one.field.key]
            elif one.state and one.stem is not None:
                self._own[one.field.key].append(columns[one.field.key])
        self._records.append(records)

    def read(self, one: PackedField, start: int, stop: int) -> Array:
        """Read a field of written records, or of steps if it has a file of its own and is not a state."""
        if one.offset is not None:
            return np.array(self.schema.column(self._records.read(start, stop), one), order="C")
        rows = self._own[one.field.key].read(start, stop)
        return rows.reshape(-1).view(one.field.numpy).reshape(len(rows), *one.field.shape)

    def read_states(self, start: int, stop: int) -> dict[Key, Array]:
        """Read the states of written records, by root key."""
        records = self._records.read(start, stop)
        found: dict[Key, Array] = {}
        for one in self.schema.fields:
            if one.state and one.offset is not None:
                found[one.field.key] = self.schema.column(records, one)
            elif one.state and one.stem is not None:
                found[one.field.key] = self.read(one, start, stop)
        return found

    def finish(self) -> list[FileRecord]:
        """Sync and close; return the files as a manifest lists them."""
        return [record for store in (self._records, *self._own.values()) for record in store.finish()]

    def close(self) -> None:
        """Close all descriptors; harmless when closed already."""
        for store in (self._records, *self._own.values()):
            store.close()


def _store(folder: Path, one: PackedField, explicit: bool, resumed: StoreState | None) -> RowStore:
    file, width = one.file(explicit=explicit), one.field.row_bytes
    if one.codec is None:
        return WholeRows(folder, file, width, resumed)
    return ChunkedRows(folder, file, one.index(explicit=explicit), width, one.codec, one.chunk_rows, resumed)


_BUFFER_BYTES = 4 << 20


class PackedState(NamedTuple):
    """The state of a builder between two episodes, from which another one can continue.

    `files` and `explicit` are the states of the stores, `ranges` the ranges of values; `lengths` and `explicit_starts`
    have one entry for each episode.
    """

    files: tuple[StoreState, ...]
    explicit: tuple[StoreState, ...]
    ranges: Mapping[Key, FieldRange]
    lengths: Sequence[int]
    explicit_starts: Sequence[int]


class PackedBuilder(RowBuilder):
    """Writes a dataset in layout `packed` to a new folder. A context manager.

    Next rows are compared with the rows after them, bit for bit; where they differ, the next rows of the whole episode
    are stored as well. `codecs` has the leaves to compress, a state under its root key. With `resumed` the builder
    continues in the folder of another one: CorruptDataError, or OSError, if the files are not as that one left them.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[Field],
        codecs: Mapping[Key, RowCodec] | None = None,
        resumed: PackedState | None = None,
    ) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields, codecs)
        fs.make_folder(folder)
        self.rows = PackedRowBuilder(folder, self.fields, self.schema, resumed)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        self.rows.append(columns, last)

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        data = self.rows.finish()
        if not np.array_equal(table.length, self.rows.lengths):
            raise SchemaError(
                f"the table names {len(table)} episodes, not the {len(self.rows.lengths)} that were written"
            )
        table = replace(table, explicit_start=np.array(self.rows.explicit_starts, np.int64))
        return write_packed_manifest(self.folder, self.fields, self.schema, data, self.rows.ranges, table, origin, text)

    def close(self) -> None:
        self.rows.close()


def write_packed_manifest(
    folder: Path, fields: Sequence[Field], schema: PackedSchema, data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange], table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]],
) -> Manifest:  # fmt: skip
    """Complete a folder whose records are written, as `write_manifest` does; the table has the `explicit_start`s."""
    boundary = replace(table.counts(), explicit_next=int((table.explicit_start >= 0).sum()))
    files = [*data, write_listed(folder, SCHEMA, schema.to_bytes())]
    return write_manifest(folder, fields, files, ranges, table, origin, text, layout="packed", boundary=boundary)


class PackedRowBuilder:
    """Buffers a few megabytes of rows, writes them as records, and detects explicit next rows.

    Rows are optimistically written with implied next rows. When a next row first differs from the row after it, the
    next rows of the episode so far are copied out of the records, and all further ones of the episode are appended:

        records         s0 s1 s2 s3 | s4'                   s4' is not what step 3 led to
        explicit rows   s1 s2 s3 s4 …                       copies of the records 1 to 3, then s4, the row held back

    `lengths` and `explicit_starts` have an entry for each finished episode.
    """

    def __init__(
        self, folder: Path, fields: Sequence[Field], schema: PackedSchema, resumed: PackedState | None = None,
        files: PackedFiles | None = None,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.ranges: dict[Key, FieldRange] = dict.fromkeys(field.key for field in fields)
        self.ranges |= resumed.ranges if resumed else {}
        self.lengths: list[int] = list(resumed.lengths) if resumed else []
        self.explicit_starts: list[int] = list(resumed.explicit_starts) if resumed else []
        self.files = files or PackedFiles(folder, schema, resumed=resumed.files if resumed else ())
        self.explicit: PackedFiles | None = None
        if resumed and resumed.explicit:
            try:
                self.explicit = PackedFiles(folder, schema, explicit=True, resumed=resumed.explicit)
            except BaseException:
                self.files.close()
                raise
        self._folder = folder
        self._fields = tuple(fields)
        self._states = [one.field.key for one in schema.fields if one.state and one.field.row_bytes]
        self._room = max(1, _BUFFER_BYTES // max(1, row_bytes(fields)))
        self._buffer = {field.key: np.empty((self._room, *field.shape), field.numpy) for field in fields}
        self._last = np.zeros(self._room, bool)
        self._used = 0
        self._open = 0  # written steps of the current, unfinished episode
        self._open_explicit = -1  # where its explicit next rows begin
        self._held: dict[Key, Array] = {}  # the next rows of the last written step

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append rows `[n, *shape]` of every leaf; `last` marks those that end an episode."""
        if columns.keys() != self._buffer.keys():
            odd = sorted(".".join(key) for key in columns.keys() ^ self._buffer.keys())
            raise SchemaError(f"rows have other leaves than the dataset: {', '.join(odd)}")
        counts = {len(array) for array in columns.values()}
        if len(counts) > 1:
            raise SchemaError(f"the leaves have {min(counts)} to {max(counts)} rows, expected one number")
        for field in self._fields:
            found = columns[field.key]
            if found.shape[1:] != field.shape or found.dtype != field.numpy:
                raise SchemaError(
                    f"rows of {field.name!r} are {found.dtype} {list(found.shape[1:])}, "
                    f"expected {field.numpy} {list(field.shape)}"
                )
        start, count = 0, counts.pop()
        marks = np.zeros(count, bool) if last is None else last
        whole = count >= self._room  # rows that fill the buffer are written without a copy
        if whole:
            self.write()
        while start < count:
            if self._used == self._room:
                self.write()
            taken = min(count - start, self._room - self._used)
            rows = slice(start, start + taken)
            start += taken
            if whole:
                self._put({key: array[rows] for key, array in columns.items()}, marks[rows])
                continue
            gathered = slice(self._used, self._used + taken)
            for key, array in columns.items():
                self._buffer[key][gathered] = array[rows]
            self._last[gathered] = marks[rows]
            self._used += taken

    def append_episode(self, states: Mapping[Key, Array], steps: Mapping[Key, Array], length: int) -> None:
        """Write a whole episode with implied next rows: states `[length + 1, *shape]` by root key, steps by key."""
        assert not self._used, "rows of another episode are gathered"
        for field in self._fields:
            key = field.key
            rows = steps.get(key)
            if rows is None:
                rows = states[key][:-1] if key in states else states[key[1:]][1:]
            self.ranges[key] = range_of(rows, field, self.ranges[key])
        self.files.append_episode(states, steps, length)
        self.lengths.append(length)
        self.explicit_starts.append(-1)

    def moved(self, folder: Path) -> None:
        """Create further files in another folder, after the folder was moved."""
        self._folder = folder

    def write(self) -> None:
        """Write the buffered rows."""
        if self._used:
            self._put({key: array[: self._used] for key, array in self._buffer.items()}, self._last[: self._used])
            self._used = 0

    def _put(self, columns: Mapping[Key, Array], last: Array) -> None:
        for field in self._fields:
            self.ranges[field.key] = range_of(columns[field.key], field, self.ranges.get(field.key))
        first_record = self.files.rows - self._open
        self._follow(columns, last, first_record)
        self.files.append(columns, last)

    def _follow(self, columns: Mapping[Key, Array], last: Array, first_record: int) -> None:
        """Record the episodes that end in these rows; store explicit next rows."""
        broken = self._broken(columns, last)
        stops = [*(np.flatnonzero(last) + 1).tolist()]
        if not stops or stops[-1] < len(last):
            stops.append(len(last))
        start = 0
        for stop in stops:
            if self._open_explicit < 0 and broken[start:stop].any():
                self._begin_explicit(first_record)
            if self._open_explicit >= 0 and self.explicit is not None:
                self.explicit.append_states(
                    {key: columns[NEXT, *key][start:stop] for key in self._states}, stop - start
                )
            self._open += stop - start
            if last[stop - 1]:
                self.lengths.append(self._open)
                self.explicit_starts.append(self._open_explicit)
                self._open, self._open_explicit = 0, -1
            start = stop
        self._held = {key: columns[NEXT, *key][-1:].copy() for key in self._states} if self._open else {}

    def _broken(self, columns: Mapping[Key, Array], last: Array) -> Array:
        """Mark rows whose state differs from the next row of the step before, in the same episode."""
        broken = np.zeros(len(last), bool)
        for key in self._states:
            root, after = columns[key], columns[NEXT, *key]
            broken[1:] |= ~rows_equal(root[1:], after[:-1])
            if self._held:
                broken[:1] |= ~rows_equal(root[:1], self._held[key])
        broken[1:] &= ~last[:-1]
        return broken

    def _begin_explicit(self, first_record: int) -> None:
        """Store the next rows of the steps of this episode that are written already."""
        if self.explicit is None:
            self.explicit = PackedFiles(self._folder, self.schema, explicit=True)
        self._open_explicit = self.explicit.rows
        if not self._open:
            return
        step = max(1, _BUFFER_BYTES // self.schema.record_bytes)
        for start in range(first_record + 1, first_record + self._open, step):
            stop = min(start + step, first_record + self._open)
            self.explicit.append_states(self.files.read_states(start, stop), stop - start)
        self.explicit.append_states(self._held, 1)

    def states(self) -> tuple[tuple[StoreState, ...], tuple[StoreState, ...]]:
        """Write the buffered rows; return the states of the stores, and of the stores of explicit next rows.

        Call it only between two episodes.
        """
        self.write()
        assert not self._open, "an episode is under way"
        return self.files.states, self.explicit.states if self.explicit is not None else ()

    def finish(self) -> list[FileRecord]:
        """Write the rest, sync and close; return the data files. SchemaError if the last episode has no end."""
        self.write()
        if self._open:
            raise SchemaError(f"the last episode has {self._open} steps and no end")
        records = self.files.finish()
        return records + self.explicit.finish() if self.explicit is not None else records

    def close(self) -> None:
        """Close all descriptors; harmless when closed already."""
        self.files.close()
        if self.explicit is not None:
            self.explicit.close()


_CHUNK_BYTES = 4 << 20


def row_builder(
    folder: Path,
    fields: tuple[Field, ...],
    layout: Layout,
    codecs: Mapping[Key, RowCodec] | None = None,
    rows: int = 0,
) -> RowBuilder:
    """Create the builder for a dataset of that layout in a new folder; SchemaError for the layouts of checkpoints.

    `rows` is the final number of steps, if known.
    """
    if layout == "packed":
        return PackedBuilder(folder, fields, codecs)
    if layout != "ted":
        raise SchemaError(f"datasets have the layout ted or packed, found {layout!r}")
    return DatasetBuilder(folder, fields, rows)


def write_dataset(
    source: StepReader,
    folder: Path,
    layout: Layout,
    origin: Origin,
    codecs: Mapping[Key, RowCodec] | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Manifest:
    """Write all rows of `source`, its episodes and their texts to a new folder; memory is bounded by a few chunks.

    `progress` is called with the number of additional steps. CorruptDataError if the episodes in the table of `source`
    do not cover its steps without gaps.
    """
    # The table of a checkpoint is kept unchanged, whatever it contains.
    table = source.episodes if source.manifest.kind == "checkpoint" else table_with_returns(source)
    steps = source.manifest.steps
    RecordNumbers(table, steps, str(source.path))
    ends = table.start + table.length - 1
    with OverlappedBuilder(row_builder(folder, source.fields, layout, codecs, steps)) as builder:
        for start, stop in source.chunks(_CHUNK_BYTES):
            last = np.zeros(stop - start, bool)
            low, high = np.searchsorted(ends, (start, stop))
            last[ends[low:high] - start] = True
            builder.append_fresh({field.key: source.read(field.key, start, stop) for field in source.fields}, last)
            progress(stop - start)
        return builder.finish(table, origin, source.episode_text)


def rows_bytes(fields: Sequence[Field], layout: Layout, steps: int, episodes: int) -> int:
    """Return the bytes of all rows in a layout, without compression and with every `next` row implied."""
    if layout == "packed":
        return PackedSchema.of(fields).size(steps, episodes)
    return row_bytes(fields) * steps
