"""Datasets of rbtool on this disk as shards, and what rows of a shard have to agree with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tensordict import TensorDictBase

from ..datasets.storage import DatasetStorage
from ..format.memmap.reader import TedReader
from ..format.packed.reader import PackedReader
from ..format.returns import return_field_of, sum_rewards
from ..format.shards import EpisodeShards
from ..open_steps import open_dataset
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..storages.stream import OpenShard, StreamShards
from ..ted.schema import EPISODE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, key_name
from ..transforms.video import with_frames

Decode: TypeAlias = Callable[[TensorDictBase], TensorDictBase]


def open_shard(
    shards: EpisodeShards, storage: Storage, number: int, fields: Sequence[Field], decode: Decode | None = None
) -> OpenShard:
    """Return a shard whose rows, of these fields, are in a storage of the whole dataset."""
    first, stop = shards.bounds[number : number + 2]
    lengths = shards.lengths[first:stop]
    return OpenShard(storage, int(shards.starts[number]), lengths, decode=decode, fields=fields)


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
        return open_shard(self._shards, self._storage, number, self._fields, self._decode)


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
