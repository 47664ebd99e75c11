"""Builds a dataset folder in layout `packed`, row by row: one buffer in memory, one pass, nothing read twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import SchemaError
from ..ted import NEXT, Field, Key, row_bytes
from . import fs
from .builder import Origin, RowBuilder, write_manifest
from .codecs import Codec
from .contracts import Array
from .digest import FileRecord
from .episodes import EpisodeRow, EpisodeTable
from .leaf_writer import merge_ranges, range_of, record_file
from .manifest import FieldRange, Manifest
from .packed_files import PackedFiles
from .packed_schema import SCHEMA, PackedSchema

__all__ = ["PackedBuilder", "PackedRows"]

_BUFFER_BYTES = 4 << 20


class PackedBuilder(RowBuilder):
    """Appends TED rows, told where episodes end, to a new folder; then episodes and manifest. A context manager.

    What `codecs` names, a state by its root key, is compressed. Next rows are compared with the rows after them, bit
    for bit: where they differ, the next rows of the whole episode are stored in full.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], codecs: Mapping[Key, Codec] | None = None) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields, codecs)
        fs.make_folder(folder)
        self.rows = PackedRows(folder, self.fields, self.schema)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        self.rows.append(columns, last)

    def finish(
        self,
        episodes: EpisodeTable | Sequence[EpisodeRow],
        origin: Origin,
        text: Sequence[dict[str, str]] | None = None,
    ) -> Manifest:
        """Write the schema, the episode table, the text, the source's metadata and, last, the manifest.

        SchemaError for a table of other episodes than those that were appended.
        """
        table = episodes if isinstance(episodes, EpisodeTable) else EpisodeTable.from_rows(episodes)
        data = self.rows.finish()
        if not np.array_equal(table.length, self.rows.lengths):
            raise SchemaError(
                f"the table names {len(table)} episodes, not the {len(self.rows.lengths)} that were written"
            )
        fs.write_file(self.folder / SCHEMA, self.schema.to_bytes())
        data.append(record_file(self.folder / SCHEMA, SCHEMA))
        table = replace(table, explicit_start=np.array(self.rows.explicit_starts, np.int64))
        boundary = replace(table.counts(), explicit_next=int((table.explicit_start >= 0).sum()))
        return write_manifest(
            self.folder, self.fields, data, self.rows.ranges, table, origin, text, layout="packed", boundary=boundary
        )

    def close(self) -> None:
        self.rows.close()


class PackedRows:
    """Gathers rows to a few megabytes, then writes them as records and keeps the books on next rows.

    `lengths` and `explicit_starts` have an entry for each episode that has ended.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], schema: PackedSchema) -> None:
        self.schema = schema
        self.ranges: dict[Key, FieldRange] = dict.fromkeys(field.key for field in fields)
        self.lengths: list[int] = []
        self.explicit_starts: list[int] = []
        self.files = PackedFiles(folder, schema)
        self.explicit: PackedFiles | None = None
        self._folder = folder
        self._fields = tuple(fields)
        self._states = [one.field.key for one in schema.fields if one.state and one.field.row_bytes]
        self._room = max(1, _BUFFER_BYTES // max(1, row_bytes(fields)))
        self._buffer = {field.key: np.empty((self._room, *field.shape), field.numpy) for field in fields}
        self._last = np.zeros(self._room, bool)
        self._used = 0
        self._open = 0  # steps already written of the episode that is under way
        self._open_explicit = -1
        self._held: dict[Key, Array] = {}  # what came after the last of them

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append rows `[n, *shape]` of every leaf; `last` marks those that end an episode."""
        if columns.keys() != self._buffer.keys():
            odd = sorted(".".join(key) for key in columns.keys() ^ self._buffer.keys())
            raise SchemaError(f"rows have other leaves than the dataset: {', '.join(odd)}")
        counts = {len(array) for array in columns.values()}
        if len(counts) > 1:
            raise SchemaError(f"leaves of {min(counts)} to {max(counts)} rows were given together")
        for field in self._fields:
            found = columns[field.key]
            if found.shape[1:] != field.shape or found.dtype != field.numpy:
                raise SchemaError(
                    f"rows of {field.name!r} are {found.dtype} {list(found.shape[1:])}, "
                    f"expected {field.numpy} {list(field.shape)}"
                )
        start, count = 0, counts.pop()
        while start < count:
            if self._used == self._room:
                self.write()
            taken = min(count - start, self._room - self._used)
            for key, array in columns.items():
                self._buffer[key][self._used : self._used + taken] = array[start : start + taken]
            self._last[self._used : self._used + taken] = False if last is None else last[start : start + taken]
            self._used, start = self._used + taken, start + taken

    def write(self) -> None:
        """Write what is gathered."""
        if not self._used:
            return
        columns = {key: array[: self._used] for key, array in self._buffer.items()}
        last = self._last[: self._used]
        for field in self._fields:
            found = range_of(columns[field.key], field)
            self.ranges[field.key] = merge_ranges(self.ranges.get(field.key), found)
        first_record = self.files.rows - self._open
        self._follow(columns, last, first_record)
        self.files.append(columns, last)
        self._used = 0

    def _follow(self, columns: Mapping[Key, Array], last: Array, first_record: int) -> None:
        """Keep the books on the episodes of these rows; store next rows that do not follow."""
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
        """Mark the rows whose state is not what the step before it, in the same episode, led to."""
        broken = np.zeros(len(last), bool)
        for key in self._states:
            root, after = columns[key], columns[NEXT, *key]
            broken[1:] |= _differ(root[1:], after[:-1])
            if self._held:
                broken[0] |= bool(_differ(root[:1], self._held[key])[0])
        broken[1:] &= ~last[:-1]
        return broken

    def _begin_explicit(self, first_record: int) -> None:
        """Store in full what came after the steps of this episode that are written already."""
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

    def finish(self) -> list[FileRecord]:
        """Write the rest, sync and close; return the data files. SchemaError while an episode is under way."""
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


def _differ(one: Array, other: Array) -> Array:
    """Mark the rows whose bits differ: NaN equals NaN of the same bits, 0.0 does not equal -0.0."""
    if not one.size:
        return np.zeros(len(one), bool)
    ours, theirs = (np.ascontiguousarray(rows).reshape(len(one), -1).view(np.uint8) for rows in (one, other))
    width = next(size for size in (8, 4, 2, 1) if ours.shape[1] % size == 0)
    return np.asarray((ours.view(f"u{width}") != theirs.view(f"u{width}")).any(1))
