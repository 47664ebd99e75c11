"""The place of each TED leaf in the layout `packed`: at an offset in the records, or in a file of its own.

A state (the same key at the root and under `next`) is stored once: the state after a step is in the following record.
All other fields have one value a step. An episode of T steps therefore has T + 1 records; the last one holds only the
final state, and its step fields are zero:

    episode 0, 2 steps                         episode 1, 1 step
    record 0      record 1      record 2       record 3      record 4
    [s0 a0 r0 …]  [s1 a1 r1 …]  [s2 0 0 …]     [s3 a2 r2 …]  [s4 0 0 …]         s state, a action, r reward
       step 0        step 1                       step 2

    record of step n = n + number of episodes before it; its next state is in the record after that

States come first in a record, so that a step and its next state are one contiguous piece of memory. If the state after
some step differs from the state in the following record (an explicit next), the next rows of the whole episode are
stored in a second set of records, at `explicit_start` of the episode table.

Files of rows are appended to and read back, whole or in chunks compressed with zstd or LZ4 (`RowStore`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ...errors import CorruptDataError, FormatError, SchemaError, UsageError
from ...ted.schema import NEXT, Field, Key, key_called, key_name, numpy_dtype, state_keys, unknown_field
from ..contracts import Array
from ..documents import SOUND_FIELD, decode, json_file, newer_version, parse_json
from ..episodes import EpisodeTable
from ..files import FileRecord, Hasher, bytes_of
from ..memmap.tree import leaf_path, require_own_files
from ..open_files import pread_into
from ..syncing import NewFile

CODECS = ("zstd", "lz4")
_FORM = re.compile(r"(?P<name>[a-z0-9]+)(?::(?P<level>-?\d+))?")
_LEVELS = range(1, 23)
_DEFAULT_LEVEL = 3
_CHUNK_BYTES = 16 << 10
_MOST_PER_BYTE = 1 << 15
"""A compressed byte cannot stand for more bytes than this."""


@dataclass(frozen=True)
class RowCodec:
    """A compression method: `zstd` with a level from 1 to 22, or `lz4` (its block format) without a level."""

    name: str
    level: int | None = None

    @classmethod
    def parse(cls, text: str) -> RowCodec:
        """Read `zstd`, `zstd:1` to `zstd:22` or `lz4`; FormatError for anything else."""
        match = _FORM.fullmatch(text)
        if match is None or match["name"] not in CODECS or (match["name"] == "lz4" and match["level"]):
            raise FormatError(f"the codec {text!r} is unknown; known: zstd, zstd:1 to zstd:22 and lz4")
        if match["name"] == "lz4":
            return cls("lz4")
        level = int(match["level"] or _DEFAULT_LEVEL)
        if level not in _LEVELS:
            raise FormatError(f"the codec {text!r} has the level {level}; zstd has the levels 1 to {_LEVELS[-1]}")
        return cls("zstd", level)

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @staticmethod
    def chunk_rows(field: Field) -> int:
        """Return the number of rows of a chunk of about 16 KiB, which is small enough to read single rows at random."""
        return max(1, _CHUNK_BYTES // max(1, field.row_bytes))

    def compressor(self) -> Callable[[memoryview], bytes]:
        """Return a function that compresses a chunk; it is not thread-safe, so that each thread needs its own."""
        if self.name == "zstd":
            import zstandard

            engine = zstandard.ZstdCompressor(level=self.level or _DEFAULT_LEVEL)
            return lambda data: engine.compress(data)
        import pyarrow  # takes half a second, so only if this codec is chosen

        return lambda data: pyarrow.Codec("lz4_raw").compress(data, asbytes=True)

    def decompress(self, chunks: Sequence[memoryview], sizes: Sequence[int], origin: str) -> Array:
        """Decompress several chunks, whose original `sizes` in bytes are known, into one uint8 array.

        No more memory is used than these sizes, which are checked to be possible for the chunks.

        Raises:
            CorruptDataError: a chunk cannot be read, or has another size.
        """
        if not chunks:
            return np.empty(0, np.uint8)
        for chunk, size in zip(chunks, sizes, strict=True):
            if size > len(chunk) * _MOST_PER_BYTE:
                raise CorruptDataError(
                    f"{origin} holds a chunk of {len(chunk):,} bytes, which cannot hold the {size:,} expected"
                )
        lengths = np.asarray(sizes, np.uint64)
        whole, start = np.empty(int(lengths.sum()), np.uint8), 0
        try:
            parts = _zstd_chunks(chunks, lengths) if self.name == "zstd" else _lz4_chunks(chunks, lengths)
            for part, length in zip(parts, lengths.tolist(), strict=True):
                whole[start : start + length] = np.frombuffer(part, np.uint8, length)
                start += length
        except Exception as error:  # each library raises errors of its own
            if isinstance(error, MemoryError):
                raise
            raise CorruptDataError(f"{origin} holds a chunk that is not {self.name} data: {error}") from error
        return whole


def _zstd_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import zstandard

    engine = zstandard.ZstdDecompressor()
    for chunk, size in zip(chunks, lengths.tolist(), strict=True):
        # zstandard allocates the size that a frame states, even if that is more than the limit for the output.
        stated = zstandard.frame_content_size(chunk)
        if stated not in (-1, size):
            raise ValueError(f"a frame states {stated:,} bytes, expected {size:,}")
    if len(chunks) > 1 and "multi_decompress_to_buffer" in zstandard.backend_features:  # one call for all of them
        found = engine.multi_decompress_to_buffer(list(chunks), decompressed_sizes=lengths.tobytes(), threads=1)
        return (found[number] for number in range(len(found)))
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return [engine.decompress(chunk, max_output_size=max(size, 1), allow_extra_data=False) for chunk, size in pairs]


def _lz4_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import pyarrow

    codec = pyarrow.Codec("lz4_raw")
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return (codec.decompress(pyarrow.py_buffer(chunk), decompressed_size=size) for chunk, size in pairs)


def parse_codecs(asked: Sequence[str], fields: Sequence[Field]) -> Mapping[Key, RowCodec]:
    """Read options such as `observation.image=zstd:3`; UsageError for fields that do not exist and unknown methods."""
    codecs: dict[Key, RowCodec] = {}
    for name, codec in named_codecs(asked).items():
        key = key_called(name, [field.key for field in fields])
        if key is None:
            raise unknown_field(name, [field.name for field in fields])
        codecs[key] = codec
    return codecs


def named_codecs(asked: Sequence[str]) -> Mapping[str, RowCodec]:
    """Read options such as `observation.image=zstd:3` before the fields are known; UsageError for invalid ones."""
    found: dict[str, RowCodec] = {}
    for text in asked:
        name, sign, method = text.partition("=")
        if not sign:
            raise UsageError(f"--compress {text!r} names no method", hint="write it like observation.image=zstd:3")
        if name in found:
            raise UsageError(f"--compress names the field {name!r} twice")
        try:
            found[name] = RowCodec.parse(method)
        except FormatError as error:
            raise UsageError(f"--compress {text!r}: {error}") from error
    return found


def pread_bytes(descriptor: int, path: Path, offset: int, size: int) -> Array:
    """Read bytes into a fresh array; CorruptDataError if the file ends before."""
    found = np.empty(size, np.uint8)
    pread_into(found, descriptor, path, offset, "the rows to read")
    return found


def read_chunks(
    descriptor: int, path: Path, codec: RowCodec, offsets: Array, rows: tuple[int, int], layout: tuple[int, int, int]
) -> Array:
    """Read a range of rows from compressed chunks; uint8 `[n, row bytes]`.

    Args:
        descriptor, path: the open file, and its name for errors.
        codec: how chunks are compressed.
        offsets: where each chunk begins in the file, and where the last one ends.
        rows: the half-open range of rows.
        layout: the number of rows of a chunk, the bytes of a row, and the number of all rows.
    """
    (start, stop), (per, width, total) = rows, layout
    first, last = start // per, (stop - 1) // per
    origin, end = int(offsets[first]), int(offsets[last + 1])
    data = memoryview(pread_bytes(descriptor, path, origin, end - origin).data) if end > origin else memoryview(b"")
    bounds = (offsets[first : last + 2] - offsets[first]).tolist()
    chunks = [data[low:high] for low, high in pairwise(bounds)]
    sizes = [(min(total, (number + 1) * per) - number * per) * width for number in range(first, last + 1)]
    found = codec.decompress(chunks, sizes, str(path)).reshape(-1, width)
    return found[start - first * per : stop - first * per]


class AppendedFile(NewFile):
    """A file that is appended to, with a running digest of its contents."""

    def __init__(self, folder: Path, name: str, resumed: FileRecord | None = None) -> None:
        super().__init__(folder / name, resumed)
        self.name = name
        self._since = Hasher()
        self._cut = self.size

    def append(self, data: memoryview) -> None:
        self._since.update(data)
        super().append(data)

    def cut(self) -> str:
        """Return the digest of the bytes that were appended since the last call; "" if there are none."""
        digest = self._since.digest if self.size > self._cut else ""
        self._since, self._cut = Hasher(), self.size
        return digest

    @property
    def record(self) -> FileRecord:
        """The file as far as it is written, as a manifest lists it."""
        return FileRecord(self.name, self.size, self.digest)

    def finish(self) -> FileRecord:
        """Sync and close; return the file as a manifest lists it."""
        self.complete()
        return self.record


class StoreState(NamedTuple):
    """The state of a store: its number of rows, its files, and the bytes of rows that are not in the files yet."""

    rows: int
    files: tuple[FileRecord, ...]
    held: bytes = b""


class RowStore(ABC):
    """Appends rows of `width` bytes, after the rows of the state `resumed`, whose files are verified."""

    def __init__(self, width: int, resumed: StoreState | None = None) -> None:
        self.width = width
        self.rows = resumed.rows if resumed else 0

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows of any shape and type that have `width` bytes each."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Read rows that were appended; uint8 `[n, width]`."""

    @abstractmethod
    def flush(self) -> None:
        """Write rows that are still in memory, so that all rows can be read from the files."""

    @property
    @abstractmethod
    def files(self) -> list[AppendedFile]:
        """The files of the store."""

    @property
    def state(self) -> StoreState:
        """The state from which another store can continue."""
        return StoreState(self.rows, tuple(file.record for file in self.files))

    def finish(self) -> list[FileRecord]:
        """Sync and close; return the files as a manifest lists them."""
        self.flush()
        return [file.finish() for file in self.files]

    def close(self) -> None:
        """Close the descriptors; harmless when closed already."""
        for file in self.files:
            file.close()


class WholeRows(RowStore):
    """Uncompressed rows, one after another."""

    def __init__(self, folder: Path, name: str, width: int, resumed: StoreState | None = None) -> None:
        super().__init__(width, resumed)
        self._file = AppendedFile(folder, name, resumed.files[0] if resumed else None)

    @property
    def files(self) -> list[AppendedFile]:
        return [self._file]

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        if rows.size:
            self._file.append(bytes_of(rows))

    def read(self, start: int, stop: int) -> Array:
        found = pread_bytes(self._file.descriptor, self._file.path, start * self.width, (stop - start) * self.width)
        return found.reshape(stop - start, self.width)

    def flush(self) -> None:
        """Do nothing: rows are written at once."""


class ChunkedRows(RowStore):
    """Rows in compressed chunks of `per` rows; a second file, `index`, has the offsets of the chunks and of their end.

    Rows of an incomplete chunk are held in memory.
    """

    def __init__(
        self, folder: Path, name: str, index: str, width: int, codec: RowCodec, per: int,
        resumed: StoreState | None = None,
    ) -> None:  # fmt: skip
        super().__init__(width, resumed)
        self._codec = codec
        self._compress = codec.compressor()
        self._per = per
        data, offsets = resumed.files if resumed else (None, None)
        self._data = AppendedFile(folder, name, data)
        self._index = AppendedFile(folder, index, offsets)
        self._offsets = [0]
        self._pending: list[Array] = []
        self._held = 0
        if resumed is None:
            self._index.append(_offset(0))
        else:
            self._offsets = (
                pread_bytes(self._index.descriptor, self._index.path, 0, self._index.size).view("<u8").tolist()
            )
            self._pending = [
                np.frombuffer(resumed.held, np.uint8).reshape(resumed.rows - (len(self._offsets) - 1) * per, width)
            ]
            self._held = len(self._pending[0])

    @property
    def files(self) -> list[AppendedFile]:
        return [self._data, self._index]

    @property
    def state(self) -> StoreState:
        """The state from which another store can continue, with the rows of the incomplete chunk."""
        return super().state._replace(held=b"".join(rows.tobytes() for rows in self._pending))

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        rows = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8).reshape(-1, self.width)
        self._pending.append(rows.copy())
        self._held += len(rows)
        if self._held >= self._per:
            held = np.concatenate(self._pending)
            whole = len(held) - len(held) % self._per
            for start in range(0, whole, self._per):
                self._put(held[start : start + self._per])
            self._pending, self._held = [held[whole:]], len(held) - whole

    def _put(self, rows: Array) -> None:
        data = self._compress(memoryview(rows.reshape(-1).data))
        self._data.append(memoryview(data))
        self._offsets.append(self._data.size)
        self._index.append(_offset(self._data.size))

    def read(self, start: int, stop: int) -> Array:
        written = self.rows - self._held
        parts = [np.concatenate(self._pending)[max(0, start - written) : stop - written]] if stop > written else []
        if start < written:
            span, layout = (start, min(stop, written)), (self._per, self.width, written)
            offsets = np.array(self._offsets, np.int64)
            data = read_chunks(self._data.descriptor, self._data.path, self._codec, offsets, span, layout)
            parts.insert(0, data)
        return np.concatenate(parts) if parts else np.empty((0, self.width), np.uint8)

    def flush(self) -> None:
        """Write the last chunk, which may have fewer rows."""
        if self._held:
            self._put(np.concatenate(self._pending))
            self._pending, self._held = [], 0


def _offset(offset: int) -> memoryview:
    return memoryview(np.array([offset], "<u8").tobytes())


Fetch: TypeAlias = Callable[[int, int, bool], Array]
"""Reads a field of consecutive records, or with the last argument of the records of explicit next rows."""


class RecordNumbers:
    """Maps the steps of a packed dataset to their records and to their explicit next rows.

    `starts` has the first step of each episode and, at its end, the number of steps. CorruptDataError if the episodes
    of the table do not cover `steps` steps without gaps, or its explicit next rows are not one after another.
    """

    def __init__(self, table: EpisodeTable, steps: int, origin: str) -> None:
        if not table.covers(steps):
            raise CorruptDataError(
                f"{origin}: start and length of the episode table do not place episodes one after another "
                f"over {steps:,} steps"
            )
        stored = np.where(table.explicit_start >= 0, table.length, 0)
        expected = np.where(table.explicit_start >= 0, np.cumsum(stored) - stored, -1)
        if not np.array_equal(expected, table.explicit_start):
            raise CorruptDataError(
                f"{origin}: explicit_start of the episode table does not place next rows one after another"
            )
        self.steps = steps
        self.records = steps + len(table)
        self.explicit_records = int(stored.sum())
        self.starts = np.append(table.start, steps).astype(np.int64)
        self.explicit_starts = table.explicit_start.astype(np.int64)

    def episode_of(self, steps: Array) -> Array:
        """Return the rows of the episode table to which these steps belong."""
        return np.searchsorted(self.starts[1:], steps, side="right")

    def of(self, steps: Array) -> Array:
        """Return the records of these steps."""
        return steps + self.episode_of(steps)

    def steps_within(self, count: int, *, explicit: bool = False) -> int:
        """Return how many steps at the beginning need only the first `count` records, or explicit next rows."""
        first, lengths = self.starts[:-1], np.diff(self.starts)
        needed = self.explicit_starts + lengths if explicit else first + lengths + np.arange(1, len(first) + 1)
        cut = np.flatnonzero((self.explicit_starts >= 0) & (needed > count) if explicit else needed > count)
        if not len(cut):
            return self.steps
        row = int(cut[0])
        return int(first[row] + max(0, lengths[row] - (needed[row] - max(count, 0))))

    def rows(self, start: int, stop: int, after: bool, fetch: Fetch) -> Array:
        """Read a field at the steps `[start, stop)`, or a state `after` each of these steps."""
        steps = np.arange(start, stop)
        records = self.of(steps) + after
        first, last = int(records[0]), int(records[-1])
        found = fetch(first, last + 1, False)
        if len(found) != len(records):
            found = found[records - first]
        if after:
            chosen, places = self.explicit(steps)
            if len(chosen):
                found[chosen] = fetch(int(places[0]), int(places[-1]) + 1, True)
        return found

    def explicit(self, steps: Array) -> tuple[Array, Array]:
        """Return the positions of those steps that have explicit next rows, and the records of these rows."""
        if not self.explicit_records:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        which = self.episode_of(steps)
        chosen = np.flatnonzero(self.explicit_starts[which] >= 0)
        which = which[chosen]
        return chosen, self.explicit_starts[which] + steps[chosen] - self.starts[which]


SCHEMA = "schema.json"
RECORDS = "records.bin"
EXPLICIT = "explicit_next.bin"
"""Records with the next rows of episodes with explicit next rows."""

_FORMAT = "rbtool packed"
_VERSION = 1
_ALIGNMENT = 8
_BIG = 4096
"""From this size of a row in bytes on, a field has a file of its own: a page, the least that a random read loads."""


@dataclass(frozen=True, slots=True)
class PackedField:
    """A stored field under the root key of its leaf.

    A `state` has a row for each record, any other field a row for each step. The field is stored at `offset` in each
    record, or in the file whose name is `stem` and a suffix, where `codec` compresses `chunk_rows` rows together. A
    field without elements is stored nowhere.
    """

    field: Field
    state: bool
    offset: int | None = None
    stem: str | None = None
    codec: RowCodec | None = None
    chunk_rows: int = 1

    def file(self, *, explicit: bool = False) -> str:
        """Path of its own file inside the folder."""
        folder = "explicit_next" if explicit else "fields"
        return f"{folder}/{self.stem}.{'bin' if self.codec is None else self.codec.name}"

    def index(self, *, explicit: bool = False) -> str:
        """Path of the file that states where the chunks begin."""
        return f"{self.file(explicit=explicit)}.index"

    def to_dict(self) -> dict[str, Any]:
        """The entry in `schema.json`."""
        return {
            "key": self.field.key, "dtype": self.field.dtype, "shape": self.field.shape, "role": self.field.role,
            "rows": "record" if self.state else "step", "offset": self.offset,
            "file": None if self.stem is None else self.file(),
            "codec": None if self.codec is None else str(self.codec), "chunk_rows": self.chunk_rows,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _SchemaHeader:
    """The entries that identify a document as `schema.json`, and its version."""

    format: str
    byte_order: str
    version: int


@dataclass(frozen=True, slots=True)
class SchemaEntry(Field):
    """How a leaf is stored, in `schema.json`."""

    rows: Literal["record", "step"]
    codec: str | None


class SchemaDocument(NamedTuple):
    """The fields listed in `schema.json`."""

    fields: tuple[Annotated[SchemaEntry, SOUND_FIELD], ...]


@dataclass(frozen=True)
class PackedSchema:
    """All stored fields, and the size of a record, which begins with `state_bytes` bytes of states."""

    fields: tuple[PackedField, ...]
    record_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, leaves: Sequence[Field], codecs: Mapping[Key, RowCodec] | None = None) -> PackedSchema:
        """Choose a place for each leaf. `codecs` has the leaves to compress, a state under its root key.

        UsageError for a codec of a leaf that is not stored itself, SchemaError for keys that need the same file.
        """
        codecs = dict(codecs or {})
        states = set(state_keys(leaves))
        after = {(NEXT, *key) for key in states}
        stored = [leaf for leaf in leaves if leaf.key not in after]
        _refuse_codecs(codecs, stored, after)
        apart = {leaf.key for leaf in stored if leaf.row_bytes and (leaf.key in codecs or leaf.row_bytes >= _BIG)}
        require_own_files(apart)
        offsets, state_bytes, size = _offsets([leaf for leaf in stored if leaf.key not in apart], states)
        fields = [
            PackedField(
                leaf,
                leaf.key in states,
                offsets.get(leaf.key),
                leaf_path(leaf.key, "") if leaf.key in apart else None,
                codecs.get(leaf.key),
                RowCodec.chunk_rows(leaf) if leaf.key in codecs else 1,
            )
            for leaf in stored
        ]
        return cls(tuple(fields), size, state_bytes)

    @property
    def own_files(self) -> list[PackedField]:
        """Fields with files of their own."""
        return [one for one in self.fields if one.stem is not None]

    @property
    def in_records(self) -> list[PackedField]:
        """Fields in the records."""
        return [one for one in self.fields if one.offset is not None]

    @cached_property
    def codecs(self) -> dict[Key, RowCodec]:
        """The codecs of the compressed fields, by key."""
        return {one.field.key: one.codec for one in self.fields if one.codec is not None}

    def column(self, records: Array, one: PackedField) -> Array:
        """View a field, `[n, *shape]`, in contiguous records of type uint8 `[n, record_bytes]`."""
        field = one.field
        dtype, inner = _in_memory(field.dtype, field.shape)
        strides, shape = (self.record_bytes, *inner), (len(records), *field.shape)
        return np.ndarray(shape, dtype, records.reshape(-1).data, one.offset or 0, strides)

    def place(self, leaf: Field) -> tuple[PackedField, bool]:
        """Return the field from which a TED leaf is read, and whether its row is in the record after the step's."""
        by_key = {one.field.key: one for one in self.fields}
        if leaf.key in by_key:
            return by_key[leaf.key], False
        found = by_key.get(leaf.key[1:]) if leaf.key[0] == NEXT else None
        if found is None or not found.state:
            raise SchemaError(f"the field {leaf.name!r} is not stored")
        return found, True

    def size(self, steps: int, episodes: int) -> int:
        """Return the bytes of all rows without compression and without explicit next rows."""
        return sum(self.sizes(steps, episodes).values())

    def sizes(self, steps: int, episodes: int) -> dict[str, int]:
        """Return the sizes of the files without compression, by path: the records, and fields with files."""
        own = {one.file(): one.field.row_bytes * (steps + episodes * one.state) for one in self.own_files}
        return {RECORDS: self.record_bytes * (steps + episodes)} | own

    def to_bytes(self) -> bytes:
        """The document `schema.json`."""
        document = {
            "format": _FORMAT, "version": _VERSION, "byte_order": "little", "record_bytes": self.record_bytes,
            "fields": [one.to_dict() for one in self.fields],
        }  # fmt: skip
        return json_file(document)

    @classmethod
    def parse(cls, data: bytes, leaves: Sequence[Field], origin: str) -> PackedSchema:
        """Read the `schema.json` of a dataset with these leaves; `origin` is its name in errors.

        Raises:
            FormatError: it is another document, or written by a newer version, or uses unknown codecs.
            CorruptDataError: it does not describe where the leaves are.
        """
        document = parse_json(data, origin)
        header = decode(_SchemaHeader, document, origin)
        if header.format != _FORMAT or header.byte_order != "little":
            raise FormatError(f"{origin} describes no packed records: its format is {header.format!r}")
        if header.version > _VERSION:
            raise newer_version(origin, header.version, _VERSION)
        entries = decode(SchemaDocument, document, origin).fields
        codecs = {entry.key: _codec(entry.codec, origin) for entry in entries if entry.codec}
        try:
            expected = cls.of(leaves, codecs)
        except (UsageError, SchemaError) as error:
            raise CorruptDataError(f"{origin} does not fit the manifest: {error}") from error
        if expected.to_bytes() != data:
            raise CorruptDataError(f"{origin} does not match the fields of the manifest: it was changed or swapped")
        return expected


@lru_cache(maxsize=1024)
def _in_memory(dtype: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the NumPy type of a row whose elements are contiguous in memory, and its strides."""
    made = np.empty((1, *shape), numpy_dtype(dtype))
    return made.dtype, made.strides[1:]


def _codec(text: str, origin: str) -> RowCodec:
    try:
        return RowCodec.parse(text)
    except FormatError as error:
        raise FormatError(f"{origin} cannot be read: {error}", hint="a newer rbtool may know it") from error


def _refuse_codecs(codecs: Mapping[Key, RowCodec], stored: Sequence[Field], after: set[Key]) -> None:
    for key in codecs:
        if key in after:
            raise UsageError(
                f"{key_name(key)!r} is stored with {key_name(key[1:])!r}", hint=f"compress {key_name(key[1:])} instead"
            )
        leaf = next((leaf for leaf in stored if leaf.key == key), None)
        if leaf is None or not leaf.row_bytes:
            raise UsageError(f"{key_name(key)!r} holds nothing that could be compressed")


def _offsets(leaves: Sequence[Field], states: set[Key]) -> tuple[dict[Key, int], int, int]:
    """Return the offsets of fields in a record, and the sizes of the states and of a record.

    States come first, and wide elements before narrow ones, so that all elements are aligned with little padding.
    """
    widest = max((leaf.numpy.itemsize for leaf in leaves), default=1)
    alignment = max(_ALIGNMENT, widest)
    offsets: dict[Key, int] = {}
    end = state_end = 0
    for wanted in (True, False):
        chosen = [leaf for leaf in leaves if (leaf.key in states) is wanted and leaf.row_bytes]
        for leaf in sorted(chosen, key=lambda leaf: -leaf.numpy.itemsize):
            end = _aligned(end, leaf.numpy.itemsize)
            offsets[leaf.key] = end
            end += leaf.row_bytes
        if wanted:
            state_end = end
    return offsets, _aligned(state_end, alignment), max(_aligned(end, alignment), alignment)


def _aligned(offset: int, size: int) -> int:
    return -(-offset // size) * size
