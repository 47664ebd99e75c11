"""Shards in memory, for the tests of streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.storages.dataset import OpenShard, StreamShards, StreamStorage


class ListedShards(StreamShards):
    """Shards of episodes of these lengths; `x` numbers the steps, and `expected` lists what was announced."""

    def __init__(self, lengths: Sequence[Sequence[int]], *, known: bool = True) -> None:
        self.address, self.identity = "listed shards", repr(lengths)
        self.lengths = [np.array(part, np.int64) for part in lengths]
        rows = [int(part.sum()) for part in self.lengths]
        self.rows = rows if known else None
        self.starts = np.cumsum([0, *rows])
        steps = int(self.starts[-1])
        episode = np.repeat(np.arange(sum(map(len, lengths))), np.concatenate([*self.lengths, np.empty(0, np.int64)]))
        flags = torch.zeros(steps, 1, dtype=torch.bool)
        content = {"x": torch.arange(steps), "episode": torch.from_numpy(episode)}
        content["next"] = TensorDict({"done": flags, "terminated": flags.clone()}, [steps])
        self.storage = rbtool.TensorStorage(TensorDict(content, [steps])) if steps else None
        self.expected: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, number: int) -> OpenShard:
        """Return a shard."""
        assert self.storage is not None
        return OpenShard(self.storage, int(self.starts[number]), self.lengths[number])

    def expect(self, numbers: Sequence[int]) -> None:
        """Remember what was announced."""
        self.expected.append(list(numbers))


def stream_buffer(
    lengths: Sequence[Sequence[int]], sampler: rbtool.StreamSampler, batch_size: int, *, known: bool = True
) -> rbtool.TensorDictReplayBuffer:
    """Make a buffer on shards in memory."""
    storage = StreamStorage(ListedShards(lengths, known=known))
    return rbtool.TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=batch_size, writer=rbtool.ImmutableDatasetWriter()
    )
