"""Datasets, samplers, streams and shards in memory, for the tests of loaders and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.storages.dataset import OpenShard, StreamShards, StreamStorage
from rbtool.core.testing.datasets import Ending

EPISODES: dict[str, list[tuple[int, Ending]]] = {
    "one step": [(1, "terminated")] * 7,
    "ragged": [(13, "terminated"), (1, "truncated"), (9, "terminated"), (4, "both"), (6, "truncated")],
    "truncated": [(10, "truncated"), (10, "truncated"), (11, "truncated")],
    "unterminated tail": [(8, "terminated"), (3, "truncated"), (15, "open")],
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": rbtool.RandomSampler,
    "without replacement": rbtool.SamplerWithoutReplacement,
    "in order": lambda: rbtool.SamplerWithoutReplacement(shuffle=False),
    "slices": lambda: rbtool.SliceSampler(num_slices=2, strict_length=False, batched=True),
    "slices by steps": lambda: rbtool.SliceSampler(num_slices=2, strict_length=False, weight="step"),
    "slices without replacement": lambda: rbtool.SliceSamplerWithoutReplacement(num_slices=2, strict_length=False),
}
WITH_EPOCHS = [name for name in SAMPLERS if "without" in name or name == "in order"]
BATCH = 4


def opened(path: Any, sampler: str = "without replacement", seed: int = 3, **options: Any) -> Any:
    """Open a torch dataset; without an end of its own an epoch has 6 batches."""
    made = SAMPLERS[sampler]()
    batches = None if sampler in WITH_EPOCHS else 6
    return rbtool.torch_dataset(path, BATCH, sampler=made, seed=seed, batches=batches, **options)


def contents(batches: Any) -> list[dict[Any, Any]]:
    """All entries of batches, to be compared."""
    return [
        {key: (tuple(batch.shape), value.dtype, value.tolist()) for key, value in batch.items(True, True)}
        for batch in batches
    ]


def rows(batches: Any) -> list[list[int]]:
    """The numbers of the rows of batches."""
    return [batch["index"].flatten().tolist() for batch in batches]


def epochs(path: Any, count: int, *arguments: Any, **options: Any) -> list[list[dict[Any, Any]]]:
    """The batches of the first epochs of a torch dataset, to be compared."""
    dataset = opened(path, *arguments, **options)
    return [contents(dataset) for _ in range(count)]


class Fails:
    """Changes the rows, and fails with the second batch that a process makes, and every third one, or so, after it."""

    def __init__(self, every: int = 3) -> None:
        self.calls, self.every = 0, every

    def __call__(self, batch: Any) -> Any:
        batch["action"] = batch["action"] + 1
        self.calls += 1
        if self.calls % self.every == 2:
            raise OSError("the storage does not answer")
        return batch


class Works(Fails):
    def __call__(self, batch: Any) -> Any:
        batch["action"] = batch["action"] + 1
        return batch


def taken(batches: Iterator[Any]) -> tuple[list[Any], int]:
    """The batches of an iterator that is asked again after each failure, and how many failures there were."""
    found, failures = [], 0
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, failures
        except OSError:
            failures += 1


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
