"""Reads a dataset in layout `packed` by position, with the same rows as in layout `ted`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ...errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError
from ...ted.schema import Key
from ..contracts import Array, StepReader
from ..episodes import EPISODES, EPISODES_TEXT, EpisodeTable, column_fields, episode_text_bytes
from ..files import FileRecord, Hasher, bytes_of, digest_bytes
from ..manifest import MANIFEST, content_digest
from ..memmap.reader import FolderReader
from ..memmap.tree import MappedLeaf, leaf_path, tree_documents
from ..open_files import ListedFiles
from ..staging import is_ours
from .recording import COMMITS, COMMITS_COPY, commits_in, is_as_recorded, unfinished_recording
from .schema import EXPLICIT, RECORDS, SCHEMA, PackedField, PackedSchema, RecordNumbers, pread_bytes, read_chunks


def ted_digest(reader: StepReader) -> str:
    """Return the content digest of the dataset in layout `ted` that has these rows, episodes and text.

    Reads every row once; memory is bounded by a chunk.
    """
    steps, table = reader.manifest.steps, reader.episodes
    hashers = {field.key: Hasher() for field in reader.fields}
    for start, stop in reader.chunks(4 << 20):
        for field in reader.fields:
            rows = reader.read(field.key, start, stop)
            if rows.size:
                hashers[field.key].update(bytes_of(rows))
    records = [
        FileRecord(leaf_path(field.key), steps * field.row_bytes, hashers[field.key].digest)
        for field in reader.fields
        if steps * field.row_bytes
    ]
    leaves = {field.key: MappedLeaf(field.dtype, (steps, *field.shape)) for field in reader.fields}
    records += [_document(path, data) for path, data in tree_documents(leaves, (steps,)).items()]
    stored, columns = column_fields(table), table.columns()
    for field in stored if len(table) else ():
        records.append(_document(f"{EPISODES}/{leaf_path(field.key)}", bytes(bytes_of(columns[field.key[0]]))))
    leaves = {field.key: MappedLeaf(field.dtype, (len(table),)) for field in stored}
    records += [_document(f"{EPISODES}/{path}", data) for path, data in tree_documents(leaves, (len(table),)).items()]
    text = episode_text_bytes(reader.episode_text or ())
    records += [_document(EPISODES_TEXT, text)] if text else []
    return content_digest(tuple(records))


def _document(path: str, data: bytes) -> FileRecord:
    return FileRecord(path, len(data), digest_bytes(data))


def _no_dataset(path: Path) -> RbtoolError:
    """Return the error for a path without a manifest."""
    if not path.exists():
        return DatasetNotFoundError(f"{path} not found")
    if is_ours(path):
        said = f"{path} is a checkpoint in one file, expected the folder of a dataset in layout packed here"
        return FormatError(said, hint=_hint(path, "checkpoint load"))
    if path.is_file():
        return FormatError(f"{path} is a file, expected the folder of a dataset in layout packed here")
    return unfinished_recording(path) or FormatError(f"{path} is not a dataset: it has no {MANIFEST}")


def _hint(path: Path, verb: str = "convert") -> str:
    return f"make one of it: rbtool {verb} {shlex.quote(str(path))} DEST --layout packed"


class PackedReader(FolderReader):
    """Reads the TED rows of a dataset in layout `packed`.

    `episodes` is the table as in layout `ted`; `numbers` maps steps to records. Opening compares `schema.json` with its
    digest, and the sizes of all files with those that follow from schema and table.

    Raises:
        DatasetNotFoundError: the path does not exist.
        FormatError: it has another layout, is not a dataset, or uses unknown codecs.
        CorruptDataError: a digest or a size differs.
    """

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        try:
            super().__init__(path, listed)
        except DatasetNotFoundError:
            raise _no_dataset(path) from None
        if self.manifest.layout != "packed":
            raise FormatError(f"{path} has layout {self.manifest.layout}, expected packed here", hint=_hint(path))
        self.schema = self._read_schema()
        if self._whole:
            self.listed.check_sizes()
        self.numbers = RecordNumbers(self._stored_episodes, self.manifest.steps, str(path))
        self._check_files()
        self._block: tuple[str, int, int, Array] | None = None
        self._places = {leaf.key: self.schema.place(leaf) for leaf in self.fields}

    @cached_property
    def _stored_episodes(self) -> EpisodeTable:
        return self._read_episodes()

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table as in layout `ted`: `explicit_start` is -1 everywhere."""
        return replace(self._stored_episodes, explicit_start=np.full(self.manifest.episodes, -1))

    @cached_property
    def ted_digest(self) -> str:
        """The content digest of the same dataset in layout `ted`; computing it reads every row."""
        return ted_digest(self)

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf = self._leaf(key, start, stop)
        if start == stop or not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        one, after = self._places[key]
        if not one.state and one.stem is not None:
            return self.read_own(one, start, stop)
        return self.numbers.rows(start, stop, after, lambda low, high, explicit: self._rows(one, low, high, explicit))

    def _rows(self, one: PackedField, start: int, stop: int, explicit: bool) -> Array:
        """Read a field of consecutive records into a fresh array."""
        if one.stem is not None:
            return self.read_own(one, start, stop, explicit=explicit)
        return np.array(
            self.schema.column(self._records(EXPLICIT if explicit else RECORDS, start, stop), one), order="C"
        )

    def _records(self, name: str, start: int, stop: int) -> Array:
        """Read whole records; cache the last ones, as other leaves of the same rows are usually read next."""
        held = self._block
        if held is not None and held[0] == name and held[1] <= start and stop <= held[2]:
            return held[3][start - held[1] : stop - held[1]]
        size, path = self.schema.record_bytes, self.path / name
        found = pread_bytes(self.listed.descriptor(name), path, start * size, (stop - start) * size)
        found = found.reshape(stop - start, size)
        self._block = (name, start, stop, found)
        return found

    def read_own(self, one: PackedField, start: int, stop: int, *, explicit: bool = False) -> Array:
        """Read rows of a field in a file of its own; rows are records for a state, and steps for other fields."""
        name, width = one.file(explicit=explicit), one.field.row_bytes
        path = self.path / name
        descriptor = self.listed.descriptor(name)
        if one.codec is None:
            found = pread_bytes(descriptor, path, start * width, (stop - start) * width)
        else:
            layout = (one.chunk_rows, width, self._own_rows(one, explicit))
            found = read_chunks(descriptor, path, one.codec, self.offsets(one, explicit), (start, stop), layout)
        return found.reshape(-1).view(one.field.numpy).reshape(stop - start, *one.field.shape)

    def offsets(self, one: PackedField, explicit: bool = False) -> Array:
        """Return the offsets of the chunks of a compressed field, and the end of the last one, int64."""
        key = one.field.key, explicit
        if key not in self._offsets:
            path = self.path / one.index(explicit=explicit)
            found = np.frombuffer(self.listed.read(one.index(explicit=explicit)), "<u8").astype(np.int64)
            chunks = -(-self._own_rows(one, explicit) // one.chunk_rows)
            size = self.listed.listed_size(one.file(explicit=explicit)) or 0
            if len(found) != chunks + 1 or found[0] or found[-1] != size or (np.diff(found) < 0).any():
                raise CorruptDataError(f"{path} does not say where {chunks:,} chunks are")
            self._offsets[key] = found
        return self._offsets[key]

    @cached_property
    def _offsets(self) -> dict[tuple[Key, bool], Array]:
        return {}

    def _own_rows(self, one: PackedField, explicit: bool) -> int:
        if explicit:
            return self.numbers.explicit_records
        return self.numbers.records if one.state else self.numbers.steps

    @property
    def kept_steps(self) -> int:
        numbers, width = self.numbers, self.schema.record_bytes
        kept = [numbers.steps]
        for explicit in (False, True) if numbers.explicit_records else (False,):
            if width:
                records = (self.listed.size(EXPLICIT if explicit else RECORDS) or 0) // width
                kept.append(numbers.steps_within(records, explicit=explicit))
            states = (one for one in self.schema.own_files if one.state)
            kept += [numbers.steps_within(self._kept_rows(one, explicit), explicit=explicit) for one in states]
        return min(*kept, *(self._kept_rows(one) for one in self.schema.own_files if not one.state), numbers.steps)

    def _kept_rows(self, one: PackedField, explicit: bool = False) -> int:
        size, width = self.listed.size(one.file(explicit=explicit)) or 0, one.field.row_bytes
        if one.codec is not None:
            return int((self.offsets(one, explicit)[1:] <= size).sum()) * one.chunk_rows
        return size // width if width else self._own_rows(one, explicit)

    def _read_schema(self) -> PackedSchema:
        if SCHEMA not in self.listed:
            raise CorruptDataError(f"{self.path / MANIFEST} does not list {SCHEMA}; layout packed needs it")
        return PackedSchema.parse(self.listed.read(SCHEMA), self.fields, str(self.path / SCHEMA))

    def _check_files(self) -> None:
        """Compare the listed sizes of all files with those that follow from the schema and the episode table."""
        numbers, size = self.numbers, self.schema.record_bytes
        expected = {RECORDS: numbers.records * size}
        if numbers.explicit_records:
            expected[EXPLICIT] = numbers.explicit_records * size
        for one in self.schema.own_files:
            for explicit in (False, True) if one.state and numbers.explicit_records else (False,):
                if one.codec is None:
                    expected[one.file(explicit=explicit)] = self._own_rows(one, explicit) * one.field.row_bytes
                else:
                    self.offsets(one, explicit)
        for name, rows in expected.items():
            found = self.listed.listed_size(name)
            if found != rows:
                what = "is missing" if found is None else f"has {found:,} bytes"
                raise CorruptDataError(f"{self.path / name} {what}, expected {rows:,} bytes")

    def proven_episodes(self) -> Array | None:
        """Return for each episode of a recording whether its bytes match the digest in the log; None for others."""
        for name in (COMMITS, COMMITS_COPY):
            try:
                commits = commits_in(self.listed.read(name), self.schema)
            except CorruptDataError:  # not listed, or damaged itself
                continue
            if len(commits) == self.manifest.episodes:
                found = (is_as_recorded(self.listed, self.schema, commits, number) for number in range(len(commits)))
                return np.fromiter(found, bool, len(commits))
        return None

    def close(self) -> None:
        self._block = None
        super().close()


class CutPackedReader(PackedReader):
    """Reads a packed dataset whose files may be cut or missing; reading lost rows raises CorruptDataError."""

    _whole = False
