"""The files of one set of packed records while they are written: the records, and the fields that lie beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..ted import NEXT, Key
from .contracts import Array
from .digest import FileRecord
from .packed_schema import EXPLICIT, RECORDS, PackedField, PackedSchema
from .row_stores import AppendedFile, ChunkedRows, RowStore, WholeRows

__all__ = ["PackedFiles"]


class PackedFiles:
    """Appends records to a folder; with `explicit` to the set that holds next rows, which has no values of steps."""

    def __init__(self, folder: Path, schema: PackedSchema, *, explicit: bool = False) -> None:
        self.schema = schema
        self._explicit = explicit
        self._own: dict[Key, RowStore] = {}
        self._records = WholeRows(folder, EXPLICIT if explicit else RECORDS, schema.record_bytes)
        try:
            for one in schema.own_files:
                if one.state or not explicit:
                    self._own[one.field.key] = _store(folder, one, explicit)
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> int:
        """Records written."""
        return self._records.rows

    @property
    def files(self) -> Iterator[AppendedFile]:
        """All files."""
        for store in (self._records, *self._own.values()):
            yield from store.files

    def append(self, columns: Mapping[Key, Array], last: Array) -> None:
        """Append TED rows, root and next; `last` marks those that end an episode, each of which adds a record."""
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

    def append_states(self, columns: Mapping[Key, Array], count: int) -> None:
        """Append records that hold these states, by root key, and nothing else."""
        records = np.zeros((count, self.schema.record_bytes), np.uint8)
        for one in self.schema.fields:
            if one.state and one.offset is not None:
                self.schema.column(records, one)[:] = columns[one.field.key]
            elif one.state and one.stem is not None:
                self._own[one.field.key].append(columns[one.field.key])
        self._records.append(records)

    def read(self, one: PackedField, start: int, stop: int) -> Array:
        """Read a field of records that were written; of steps, for a field of steps in a file of its own."""
        if one.offset is not None:
            return np.array(self.schema.column(self._records.read(start, stop), one), order="C")
        rows = self._own[one.field.key].read(start, stop)
        return rows.reshape(-1).view(one.field.numpy).reshape(len(rows), *one.field.shape)

    def read_states(self, start: int, stop: int) -> dict[Key, Array]:
        """Read the states of records that were written, by root key."""
        records = self._records.read(start, stop)
        found: dict[Key, Array] = {}
        for one in self.schema.fields:
            if one.state and one.offset is not None:
                found[one.field.key] = self.schema.column(records, one)
            elif one.state and one.stem is not None:
                found[one.field.key] = self.read(one, start, stop)
        return found

    def flush(self) -> None:
        """Write out what is held back."""
        for store in (self._records, *self._own.values()):
            store.flush()

    def finish(self) -> list[FileRecord]:
        """Sync and close; return the files as a manifest lists them."""
        return [record for store in (self._records, *self._own.values()) for record in store.finish()]

    def close(self) -> None:
        """Close all descriptors; harmless when closed already."""
        for store in (self._records, *self._own.values()):
            store.close()


def _store(folder: Path, one: PackedField, explicit: bool) -> RowStore:
    file, width = one.file(explicit=explicit), one.field.row_bytes
    if one.codec is None:
        return WholeRows(folder, file, width)
    return ChunkedRows(folder, file, one.index(explicit=explicit), width, one.codec, one.chunk_rows)
