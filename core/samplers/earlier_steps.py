"""The steps before the steps of a batch, within their episodes, for transforms that look back."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.rows import Memory, memory_of
from ..storages.base import Storage
from ..storages.columns import renames
from ..storages.dataset import StreamStorage
from ..storages.tensor import TensorStorage
from .trajectories import Key, stored_entry

Numbers: TypeAlias = NDArray[np.int64]

_EPISODE: Key = ("episode",)
_FEW = 4096
"""Up to this many rows are read by numpy, in one thread."""
_ROOMS = 8
"""How many different buffers of memory are kept for reuse."""


class Rooms:
    """Reuses memory for entries of batches once a batch is freed: allocating is slower than filling."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Memory] = {}

    def tensor(self, use: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the CPU; tensors for different uses in a batch do not share memory."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        memory = self._known.get((use, size))
        if memory is None:
            for oldest in list(self._known)[: 1 - _ROOMS]:
                self._known.pop(oldest, None)  # another thread may have removed it
            memory = self._known[use, size] = memory_of((size,), np.dtype(np.uint8))
        return torch.from_numpy(memory()).view(dtype).view(*shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}


def gathered(
    storage: Storage, key: Key, rows: torch.Tensor, lanes: Sequence[torch.Tensor] = (), rooms: Rooms | None = None
) -> torch.Tensor | None:
    """Read an entry of existing elements, `rows` and possibly `lanes` int64 `[n]`; None if it is not stored.

    The tensor is fresh memory, taken from `rooms` if given.
    """
    index: Any = (rows, *lanes)
    if isinstance(storage, StreamStorage):
        return _of_shards(storage, key, rows)
    if not isinstance(storage, TensorStorage):
        return storage.entry(key, index if lanes else rows)
    leaf = stored_entry(storage, key)
    if leaf is None:
        return None
    numbers = rows.numpy()
    storage.expect(numbers)
    if lanes:
        return leaf[tuple(part.to(leaf.device) for part in index)]
    if rooms is None and len(numbers) <= _FEW and leaf.is_cpu and not (leaf.requires_grad or renames(leaf.dtype)):
        return torch.from_numpy(leaf.numpy().take(numbers, 0))  # torch has a larger overhead
    if rooms is None or not leaf.is_cpu:
        return leaf.index_select(0, rows.to(leaf.device))
    return torch.index_select(leaf, 0, rows, out=rooms.tensor(key, (len(rows), *leaf.shape[1:]), leaf.dtype))


def _of_shards(storage: StreamStorage, key: Key, rows: torch.Tensor) -> torch.Tensor | None:
    """Read an entry of elements of a stream; if it is derived from others, such as frames of a video, read
    whole rows.
    """
    found: torch.Tensor | None = None
    for places, shard, numbers in storage.parts(rows.numpy()):
        if shard.decode is None and key != _EPISODE:
            part = gathered(shard.storage, key, torch.from_numpy(numbers + shard.first))
        else:
            unique, place = np.unique(numbers, return_inverse=True)
            whole = shard.read(unique).get(key, None)
            part = None if whole is None else whole[torch.from_numpy(place)]
        if part is None:
            return None
        if len(places) == len(rows):
            return part
        found = part.new_empty((len(rows), *part.shape[1:])) if found is None else found
        found[torch.from_numpy(places)] = part
    return found


class Ages(Protocol):
    """Where steps lie in their trajectories; `TrajectoryTable` implements it."""

    capacity: int

    def steps_at(self, rows: Numbers) -> Numbers:
        """Return the absolute numbers of the steps in these rows."""

    def age(self, steps: Numbers, lanes: Numbers) -> Numbers:
        """Return how many steps of the same trajectory come before each step."""


class StreamAges:
    """Where steps lie in the episodes of a stream, which are stored one after another."""

    capacity = sys.maxsize

    def __init__(self, storage: StreamStorage) -> None:
        self._storage = storage

    def steps_at(self, rows: Numbers) -> Numbers:
        """Return the element numbers themselves."""
        return rows

    def age(self, steps: Numbers, lanes: Numbers) -> Numbers:
        """Return how many steps of its episode come before each element."""
        return self._storage.steps_before(steps)


class EarlierSteps:
    """The `count` steps before each step at an index, as far as they belong to its episode and are still stored.

    They are the steps as of the moment at which this object is made: the caller excludes writers, or notices them.

    Args:
        storage: the storage.
        table: where steps lie in their trajectories.
        index: existing elements, as an int64 array of any shape for each dimension of the storage.
        count: how many earlier steps.
        rooms: memory to reuse.
    """

    def __init__(self, storage: Storage, table: Ages, index: tuple[Numbers, ...], count: int, rooms: Rooms) -> None:
        rows, *lanes = index
        self._rooms = rooms
        self._storage = storage
        self._lead = rows.shape
        step = table.steps_at(rows.reshape(-1))
        lane = np.zeros_like(step)
        if lanes:
            lane = np.ravel_multi_index([part.reshape(-1) for part in lanes], tuple(storage.shape[1:]))
        age = np.minimum(table.age(step, lane), count)
        back = np.minimum(np.arange(count, -1, -1), age[:, None])
        self._rows = (step[:, None] - back) % table.capacity
        self._lanes = [torch.from_numpy(np.repeat(part.reshape(-1), count + 1)) for part in lanes]
        self.age = torch.from_numpy(age.reshape(self._lead))
        """How many earlier steps each step has, from 0 to `count`; int64 in the shape of the index."""

    def entry(self, key: Key) -> torch.Tensor | None:
        """Return an entry of the `count` earlier steps and of the step itself, `[*index.shape, count + 1,
        *entry.shape]`.

        Missing steps are replaced by the earliest existing one. The tensor is fresh memory; None if the entry is not
        stored.
        """
        found = self._gathered(key)
        return None if found is None else found.reshape(*self._lead, self._rows.shape[1], *found.shape[1:])

    def _gathered(self, key: Key) -> torch.Tensor | None:
        """Gather an entry of all steps into one tensor."""
        rows = torch.from_numpy(self._rows.reshape(-1))
        return gathered(self._storage, key, rows, self._lanes, self._rooms)

    def moved_on(self, stack: torch.Tensor, newest: torch.Tensor, use: Key) -> torch.Tensor:
        """Shift a stack by one step: drop the first step of what `entry` returned, and append `newest`.

        The tensor is fresh memory; results for the same batch must differ in `use`.
        """
        lead = self.age.dim()
        found = self._rooms.tensor(use, stack.shape, stack.dtype) if stack.is_cpu else torch.empty_like(stack)
        last = stack.shape[lead] - 1
        found.narrow(lead, 0, last).copy_(stack.narrow(lead, 1, last))
        found.select(lead, last).copy_(newest)
        return found
