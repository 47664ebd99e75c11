"""Datasets of rbtool as shards: ranges of whole episodes, and the bytes of each file that hold their rows."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from ...errors import FormatError
from ...format.documents import decode, parse_json
from ...format.manifest import SHARDS_DOCUMENT, VIDEOS, Manifest
from ...format.packed.reader import PackedReader
from ...format.packed.schema import EXPLICIT, RECORDS, SCHEMA, PackedField, PackedSchema
from ...format.returns import return_field_of, sum_rewards
from ...format.ted.reader import TedReader
from ...format.ted.tree import leaf_path
from ...format.videos import reference_keys
from ...opening import open_dataset
from ...storages.base import Storage
from ...storages.packed import PackedStorage
from ...storages.stream import OpenShard, StreamShards
from ...ted.schema import EPISODE, NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, key_name, row_bytes
from ..storage import DatasetStorage
from ..videos import with_frames

Numbers: TypeAlias = NDArray[np.int64]
Range: TypeAlias = tuple[int, int]
Decode: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

SHARD_BYTES = 64 << 20
"""Bytes of rows and videos that a shard has, unless one episode, or one video of each camera, has more."""
_LARGEST_BYTES = 8 * SHARD_BYTES


@dataclass(frozen=True)
class EpisodeShards:
    """Where the shards of a dataset begin and end: `bounds`, int64 `[shards + 1]`, count episodes.

    They depend on the fields, the lengths of the episodes and the sizes of kept videos, not on the layout or the place
    of the dataset: a stream and a download have the same ones.
    """

    lengths: Numbers
    bounds: Numbers

    @classmethod
    def of(cls, reader: TedReader | PackedReader) -> EpisodeShards:
        """Cut a dataset into the shards of the stream that it was made from, else into `SHARD_BYTES`.

        The latter have the episode that reaches beyond. Those of a source are taken unless they are much larger. Videos
        count with what they take on average, and a shard with as much as the largest has of each camera: fewer shards
        share a video.
        """
        lengths = reader.episodes.length.astype(np.int64)
        videos = [file.size for file in reader.manifest.files if file.path.startswith(VIDEOS)]
        taken = row_bytes(reader.fields) + sum(videos) // max(1, int(lengths.sum()))
        cameras = sum(key[0] != NEXT for key in reference_keys(reader.fields))
        most = max(SHARD_BYTES, cameras * max(videos, default=0))
        ends = np.cumsum(lengths) * max(1, taken)
        bounds, begin = [0], 0
        while bounds[-1] < len(lengths):
            stop = int(np.searchsorted(ends, begin + most, side="left")) + 1
            bounds.append(min(max(stop, bounds[-1] + 1), len(lengths)))
            begin = int(ends[bounds[-1] - 1])
        found = cls(lengths, np.array(bounds, np.int64))
        stated = _stated_bounds(reader)
        own = found if stated is None else cls(lengths, stated)
        return own if max(own.rows, default=0) * row_bytes(reader.fields) <= _LARGEST_BYTES else found

    @functools.cached_property
    def starts(self) -> Numbers:
        """The first steps of the shards and, at the end, the number of steps: int64 `[shards + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])[self.bounds]

    @property
    def rows(self) -> list[int]:
        """How many steps each shard has."""
        return list(map(int, np.diff(self.starts)))

    def open(self, storage: Storage, number: int, fields: Sequence[Field], decode: Decode | None = None) -> OpenShard:
        """Return a shard whose rows, of these fields, are in a storage of the whole dataset."""
        first, stop = self.bounds[number : number + 2]
        lengths = self.lengths[first:stop]
        return OpenShard(storage, int(self.starts[number]), lengths, decode=decode, fields=fields)


def _stated_bounds(reader: TedReader | PackedReader) -> Numbers | None:
    """Return the bounds of the shards of the source, which are stated by numbers of episodes; None without."""
    numbers = reader.episodes.episode
    if not reader.manifest.request.source or (np.diff(numbers) <= 0).any():
        return None
    document = reader.documents().get(SHARDS_DOCUMENT)
    if document is None:
        return None
    starts = np.array(decode(tuple[int, ...], parse_json(document, SHARDS_DOCUMENT), SHARDS_DOCUMENT), np.int64)
    return np.concatenate([[0], np.searchsorted(numbers, starts[1:]), [len(numbers)]]).astype(np.int64)


def storage_of(reader: TedReader | PackedReader) -> Storage:
    """Map the rows of a dataset that is open."""
    return DatasetStorage(reader) if isinstance(reader, TedReader) else PackedStorage(reader)


class LocalShards(StreamShards):
    """The shards of a dataset on this disk, which are read where they are."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.address = str(self.path)
        with open_dataset(self.path) as reader:
            self._shards = EpisodeShards.of(reader)
            self._storage = storage_of(reader)
            self._decode = with_frames(reader, None)
            self._fields, self.identity = reader.fields, reader.manifest.content_digest
        self.rows, self.episodes = self._shards.rows, len(self._shards.lengths)

    def __len__(self) -> int:
        return len(self._shards.rows)

    def take(self, number: int) -> OpenShard:
        """Return a shard."""
        return self._shards.open(self._storage, number, self._fields, self._decode)


# Files ----------------------------------------------------------------------------------------------


def row_files(manifest: Manifest, schema: Callable[[], bytes]) -> set[str]:
    """Return the names of the files that hold rows; `schema` gives the bytes of `schema.json` in layout packed."""
    if manifest.layout == "ted":
        return {leaf_path(field.key) for field in manifest.fields if field.row_bytes}
    if manifest.layout != "packed":
        raise FormatError(f"a dataset in layout {manifest.layout} is in no shards, expected ted or packed")
    found = PackedSchema.parse(schema(), manifest.fields, SCHEMA)
    own = {one.file(explicit=explicit) for one in found.own_files for explicit in (False, True)}
    return {file.path for file in manifest.files} & {RECORDS, EXPLICIT, *own}


def row_ranges(reader: TedReader | PackedReader, first: int, stop: int) -> dict[str, Range]:
    """Return the bytes of each file that hold the rows of the episodes `[first, stop)` of the table."""
    table = reader.episodes
    if first == stop:
        return {}
    steps = int(table.start[first]), int(table.start[stop - 1] + table.length[stop - 1])
    if isinstance(reader, TedReader):
        sized = (field for field in reader.fields if field.row_bytes)
        return {leaf_path(field.key): _bytes(steps, field.row_bytes) for field in sized}
    numbers, schema = reader.numbers, reader.schema
    records = steps[0] + first, steps[1] + stop
    starts = numbers.explicit_starts[first:stop]
    apart = np.flatnonzero(starts >= 0)
    explicit = None
    if len(apart):
        explicit = int(starts[apart[0]]), int(starts[apart[-1]] + table.length[first + apart[-1]])
    found = {RECORDS: _bytes(records, schema.record_bytes)}
    if explicit is not None:
        found[EXPLICIT] = _bytes(explicit, schema.record_bytes)
    for one in schema.own_files:
        found[one.file()] = _own_bytes(reader, one, records if one.state else steps, explicit=False)
        if one.state and explicit is not None:
            found[one.file(explicit=True)] = _own_bytes(reader, one, explicit, explicit=True)
    return found


def _bytes(rows: Range, width: int) -> Range:
    return rows[0] * width, rows[1] * width


def _own_bytes(reader: PackedReader, one: PackedField, rows: Range, *, explicit: bool) -> Range:
    """Return the bytes of these rows of a field in a file of its own, or of the compressed chunks that hold them."""
    if one.codec is None:
        return _bytes(rows, one.field.row_bytes)
    offsets = reader.offsets(one, explicit)
    return int(offsets[rows[0] // one.chunk_rows]), int(offsets[-(-rows[1] // one.chunk_rows)])


# Rows -----------------------------------------------------------------------------------------------


def disagreement(reader: TedReader | PackedReader, first: int, stop: int) -> str:
    """Return how rows of the episodes `[first, stop)` differ from the episode table, in one sentence; "" if they agree.

    Compared are the numbers of episodes, how they end, and their returns, to the last bit.
    """
    table, there = reader.episodes, {field.key for field in reader.fields}
    if first == stop:
        return ""
    starts, lengths = table.start[first:stop], table.length[first:stop]
    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
    if EPISODE in there and (reader.read(EPISODE, begin, end) != np.repeat(table.episode[first:stop], lengths)).any():
        return "a step has the number of another episode than the table states"
    for key, stated in ((NEXT_TERMINATED, table.terminated), (NEXT_TRUNCATED, table.truncated)):
        if key in there:
            flags = reader.read(key, begin, end).reshape(end - begin, -1)[starts + lengths - 1 - begin]
            if (flags.any(1) != stated[first:stop]).any():
                return f"{key_name(key)} of a last step differs from the table"
    reward = return_field_of(reader.manifest)
    if reward is not None and reward.key == NEXT_REWARD:  # tables of n-step data may hold other sums
        returns = sum_rewards(reader, starts, lengths)
        if not np.array_equal(returns, table.total_reward[first:stop], equal_nan=True):
            return "the return of an episode differs from the table"
    return ""
