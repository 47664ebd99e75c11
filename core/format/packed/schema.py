"""Where each TED leaf is stored in the layout `packed`: at an offset in the records, or in a file of its own.

A state (the same key at the root and under `next`) is stored once: the state after a step is in the record that follows
it. Everything else has one value a step. An episode of T steps therefore has T + 1 records; the last one holds only the
final state, and its step fields are zero:

    episode 0, 2 steps                         episode 1, 1 step
    record 0      record 1      record 2       record 3      record 4
    [s0 a0 r0 …]  [s1 a1 r1 …]  [s2 0 0 …]     [s3 a2 r2 …]  [s4 0 0 …]         s state, a action, r reward
       step 0        step 1                       step 2

    record of step n = n + number of episodes before it; its next state is in the record after that

States come first in a record, so that a step and its next state are one contiguous piece of memory. If next states do
not follow (the state after a step differs from the next record's), the next rows of the whole episode are stored in a
second set of records, at `explicit_start` of the episode table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ...errors import CorruptDataError, FormatError, SchemaError, UsageError
from ...ted.schema import NEXT, Field, Key, key_name, numpy_dtype, state_keys
from ..contracts import Array
from ..documents import SOUND_FIELD, decode, dump_json, newer_version, parse_json
from ..episodes import EpisodeTable
from ..memmap.tree import leaf_path, require_own_files
from .row_files import RowCodec

Fetch: TypeAlias = Callable[[int, int, bool], Array]
"""Reads a field of consecutive records, or with the last argument of the records of explicit next rows."""


class RecordNumbers:
    """Where the steps of a packed dataset are, in the records and among the explicit next rows.

    `starts` has one entry more than there are episodes, the number of steps. CorruptDataError for a table whose
    episodes do not follow one another over `steps` steps, or whose explicit next rows do not.
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
        """How many steps at the beginning need only the first `count` records, or explicit next rows."""
        first, lengths = self.starts[:-1], np.diff(self.starts)
        needed = self.explicit_starts + lengths if explicit else first + lengths + np.arange(1, len(first) + 1)
        cut = np.flatnonzero((self.explicit_starts >= 0) & (needed > count) if explicit else needed > count)
        if not len(cut):
            return self.steps
        row = int(cut[0])
        return int(first[row] + max(0, lengths[row] - (needed[row] - max(count, 0))))

    def rows(self, start: int, stop: int, after: bool, fetch: Fetch) -> Array:
        """Read a field at the steps `[start, stop)`, or, of a state, `after` them."""
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
        """Which of these steps, by position, have their next row stored in full, and at which record there."""
        if not self.explicit_records:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        which = self.episode_of(steps)
        chosen = np.flatnonzero(self.explicit_starts[which] >= 0)
        which = which[chosen]
        return chosen, self.explicit_starts[which] + steps[chosen] - self.starts[which]


SCHEMA = "schema.json"
RECORDS = "records.bin"
EXPLICIT = "explicit_next.bin"
"""Records that hold the next rows of the episodes whose next rows do not follow."""

_FORMAT = "rbtool packed"
_VERSION = 1
_ALIGNMENT = 8
_BIG = 4096
"""Bytes a row from which on a field has a file of its own: a page, which a random read brings in any case."""


@dataclass(frozen=True, slots=True)
class PackedField:
    """A stored field under the root key of its leaf.

    A `state` has a row a record, anything else a row a step. It is at `offset` in each record; or in the file whose
    name is `stem` and a suffix, where `codec` compresses `chunk_rows` rows together; or, without elements, nowhere.
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
    """What states that a document is `schema.json`, and of which version."""

    format: str
    byte_order: str
    version: int


@dataclass(frozen=True, slots=True)
class SchemaEntry(Field):
    """How a leaf is stored, in `schema.json`."""

    rows: Literal["record", "step"]
    codec: str | None


class SchemaDocument(NamedTuple):
    """What `schema.json` lists."""

    fields: tuple[Annotated[SchemaEntry, SOUND_FIELD], ...]


@dataclass(frozen=True)
class PackedSchema:
    """All stored fields, and the size of a record; `state_bytes` is how much of its beginning holds the states."""

    fields: tuple[PackedField, ...]
    record_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, leaves: Sequence[Field], codecs: Mapping[Key, RowCodec] | None = None) -> PackedSchema:
        """Lay leaves out. Those that `codecs` names, a state by its root key, are compressed.

        Raises UsageError for a codec of what is stored nowhere, SchemaError for keys that need the same file.
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
        """What is compressed, and how."""
        return {one.field.key: one.codec for one in self.fields if one.codec is not None}

    def column(self, records: Array, one: PackedField) -> Array:
        """View a field, `[n, *shape]`, in contiguous records of type uint8 `[n, record_bytes]`."""
        field = one.field
        dtype, inner = _in_memory(field.dtype, field.shape)
        strides, shape = (self.record_bytes, *inner), (len(records), *field.shape)
        return np.ndarray(shape, dtype, records.reshape(-1).data, one.offset or 0, strides)

    def place(self, leaf: Field) -> tuple[PackedField, bool]:
        """Find what a TED leaf is read from, and whether from the record after the step's."""
        by_key = {one.field.key: one for one in self.fields}
        if leaf.key in by_key:
            return by_key[leaf.key], False
        found = by_key.get(leaf.key[1:]) if leaf.key[0] == NEXT else None
        if found is None or not found.state:
            raise SchemaError(f"the field {leaf.name!r} is not stored")
        return found, True

    def size(self, steps: int, episodes: int) -> int:
        """Bytes of all rows without compression, as long as all next rows follow."""
        own = sum(one.field.row_bytes * (steps + episodes * one.state) for one in self.own_files)
        return self.record_bytes * (steps + episodes) + own

    def to_bytes(self) -> bytes:
        """The document `schema.json`."""
        document = {
            "format": _FORMAT, "version": _VERSION, "byte_order": "little", "record_bytes": self.record_bytes,
            "fields": [one.to_dict() for one in self.fields],
        }  # fmt: skip
        return (dump_json(document, indent=1) + "\n").encode()

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
    """The NumPy type of a value whose elements follow one another in memory, and its strides."""
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
    """Give fields their places, states first, wide elements before narrow ones; state where states and records end."""
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
