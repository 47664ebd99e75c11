"""Minari's Arrow and Parquet storage: a folder an episode, all its columns of one length.

Actions, rewards and flags are padded by one row, so that they are as long as the observations; the last row of
those is none. Arrow files are mapped and cut without a copy, Parquet files are streamed batch by batch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import FormatError
from ...core.format import Array, load_json
from .arrow_bounds import require_bounded_ipc, require_bounded_parquet
from .arrow_forms import (
    as_array,
    as_strings,
    at,
    declared_forms,
    forms_with_holes,
    found_forms,
    of_free_length,
    row_width,
)
from .metadata import METADATA_FILE
from .spaces import SpacePath
from .store import Column, ColumnPath, EpisodeStore, Form, StoredEpisode, column_name, reading

__all__ = ["ArrowStore"]

_EPISODE = re.compile(r"0|[1-9]\d{0,17}")
_PART = re.compile(r"part-(\d+)\.(\w+)")
_PADDED = frozenset({"actions", "rewards", "terminations", "truncations"})
_REQUIRED = _PADDED | {"observations"}
_BATCH_BYTES = 4 << 20
_ROWS_OF_FREE_LENGTH = 64
"""Rows of text or lists at a time: where they are alike, Parquet stores them once and their length does not show."""


class ArrowStore(EpisodeStore):
    """The episodes in `data/<number>/part-*.arrow` or `.parquet`."""

    def __init__(self, folder: Path, data_format: str) -> None:
        self.folder = folder
        self.format = data_format
        self.numbers = sorted(
            int(path.name) for path in folder.iterdir() if _EPISODE.fullmatch(path.name) and path.is_dir()
        )

    def episode(self, number: int) -> StoredEpisode:
        """Open the files of one episode."""
        return _ArrowEpisode(self, number)

    def parts(self, number: int) -> list[Path]:
        """The files with an episode's rows, in order."""
        found = {}
        for path in (self.folder / str(number)).iterdir():
            match = _PART.fullmatch(path.name)
            if match and match[2] == self.format:
                found[int(match[1])] = path
        return [found[part] for part in sorted(found)]

    def location(self, path: SpacePath) -> ColumnPath:
        """Tuple elements are called by their number."""
        return tuple(str(part) for part in path)

    def files(self) -> list[Path]:
        """The files with rows and the metadata of every episode."""
        files = []
        for number in self.numbers:
            metadata = self.folder / str(number) / METADATA_FILE
            files += [*self.parts(number), *([metadata] if metadata.is_file() else [])]
        return files


class _ArrowEpisode(StoredEpisode):
    def __init__(self, store: ArrowStore, number: int) -> None:
        self._folder = store.folder / str(number)
        self._what = f"episode {number}"
        parts = store.parts(number)
        self._file = parts[0] if parts else self._folder / f"part-0.{store.format}"
        if not parts:
            raise FormatError(f"{self._file} is missing", hint="copy or fetch the dataset again, whole")
        opened = _IpcPart if store.format == "arrow" else _ParquetPart
        with reading(self._what, self._file, pa.ArrowException):
            self._parts = [opened(path) for path in parts]
        if any(part.schema != self._parts[0].schema for part in self._parts):
            raise FormatError(f"the files in {self._folder} differ in their columns")
        names = self._parts[0].schema.names
        if len(set(names)) < len(names):
            raise FormatError(f"the files in {self._folder} have a column twice: {', '.join(sorted(names))}")
        self._rows = sum(part.rows for part in self._parts)
        self._streams: dict[str, _Stream] = {}

    def columns(self) -> dict[ColumnPath, Column]:
        steps = self.attributes().get(("total_steps",), self._rows - 1)
        if steps != self._rows - 1:
            raise FormatError(
                f"{self._what} has {self._rows} observations for {steps} steps, one more than steps is expected"
            )
        found: dict[ColumnPath, Column] = {}
        with reading(self._what, self._file, pa.ArrowException):
            for field in self._parts[0].schema:
                forms = declared_forms(field)
                look = forms_with_holes if field.name in _REQUIRED else found_forms
                forms = look(forms, self._chunks(field.name))
                rows = self._rows - (field.name in _PADDED)
                found |= {path: Column(form, rows) for path, form in forms.items()}
        return found

    def form(self, path: ColumnPath) -> Form:
        return declared_forms(self._parts[0].schema.field(path[0]))[path]

    def array(self, path: ColumnPath, start: int, stop: int, form: Form | None = None) -> Array:
        form = form or self.form(path)
        with reading(self._what, self._file, pa.ArrowException):
            return as_array(self._leaf(path, start, stop), form, f"{column_name(path)!r} of {self._what}")

    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        with reading(self._what, self._file, pa.ArrowException):
            return as_strings(self._leaf(path, start, stop), f"{column_name(path)!r} of {self._what}")

    def attribute_paths(self) -> Collection[ColumnPath]:
        return self._attributes.keys()

    def attributes(self) -> Mapping[ColumnPath, Any]:
        return self._attributes

    @cached_property
    def _attributes(self) -> dict[ColumnPath, Any]:
        path = self._folder / METADATA_FILE
        document = load_json(path) if path.is_file() else {}
        if not isinstance(document, dict):
            raise FormatError(f"{path} holds a JSON {type(document).__name__}, an object is expected")
        return dict(_flat(document))

    def _leaf(self, path: ColumnPath, start: int, stop: int) -> pa.Array:
        stream = self._streams.get(path[0])
        if stream is None or start < stream.first:
            stream = self._streams[path[0]] = _Stream(self._chunks(path[0]))
        return at(stream.rows(start, stop), path[1:])

    def _chunks(self, name: str) -> Iterator[pa.Array]:
        """A top-level column, batch by batch."""
        for part in self._parts:
            yield from part.chunks(name)


class _Stream:
    """Rows of a column from front to back; what lies behind is let go."""

    def __init__(self, chunks: Iterator[pa.Array]) -> None:
        self.first = 0
        self._stop = 0
        self._chunks = chunks
        self._held: list[pa.Array] = []

    def rows(self, start: int, stop: int) -> pa.Array:
        while self._stop < stop:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise ValueError(f"its rows end at {self._stop}, {stop} are announced")
            self._held.append(chunk)
            self._stop += len(chunk)
        while len(self._held) > 1 and self.first + len(self._held[0]) <= start:
            self.first += len(self._held.pop(0))
        wanted, first = [], self.first
        for chunk in self._held:  # cut before they are joined: a chunk of a mapped file may be larger than memory
            begin, end = max(start - first, 0), min(stop - first, len(chunk))
            if begin < end:
                wanted.append(chunk.slice(begin, end - begin))
            first += len(chunk)
        return pa.concat_arrays(wanted) if len(wanted) > 1 else wanted[0]


class _IpcPart:
    """One mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        require_bounded_ipc(path)
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        self.schema = self._file.schema
        self.rows: int = sum(self._batch(number).num_rows for number in range(self._file.num_record_batches))

    def _batch(self, number: int) -> pa.RecordBatch:
        batch = self._file.get_batch(number)
        batch.validate()
        return batch

    def chunks(self, name: str) -> Iterator[pa.Array]:
        for number in range(self._file.num_record_batches):
            yield self._batch(number).column(name)


class _ParquetPart:
    """One Parquet file, read in batches of a few megabytes."""

    def __init__(self, path: Path) -> None:
        require_bounded_parquet(path)
        self._file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        self.schema = self._file.schema_arrow
        self.rows: int = self._file.metadata.num_rows

    def chunks(self, name: str) -> Iterator[pa.Array]:
        size = max(_BATCH_BYTES // self._row_bytes(name), 1)
        if of_free_length(self.schema.field(name).type):
            size = min(size, _ROWS_OF_FREE_LENGTH)
        for batch in self._file.iter_batches(batch_size=size, columns=[name], use_threads=False):
            yield batch.column(name)

    def _row_bytes(self, name: str) -> int:
        """Bytes of a row of a column, as its type and, for text and images, the size of the groups of rows tell.

        What the file says of single columns is left alone: where that is damaged, pyarrow ends the process.
        """
        metadata = self._file.metadata
        groups = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return max(row_width(self.schema.field(name).type), int(groups) // max(self.rows, 1), 1)


def _flat(document: Mapping[str, Any], above: ColumnPath = ()) -> Iterator[tuple[ColumnPath, Any]]:
    """Attributes as HDF5 has them: nested options under one path each."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value
