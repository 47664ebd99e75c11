"""Reads the steps around each step of a batch, within its episode, for transforms such as frame stacks and windows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from ..format.videos import image_key, reference_keys
from ..kernels.rows import Memory, memory_of
from ..storages.base import Storage
from ..storages.columns import renames
from ..storages.dataset import StreamStorage, merged, tensordict_of
from ..ted.schema import Key, Numbers
from .trajectories import clamped, has_columns, stored_entry

_EPISODE: Key = ("episode",)
_FEW = 4096
"""Up to this many rows are read by numpy, in one thread."""
_POOL_SIZE = 8
"""How many pieces of memory are kept for reuse."""


class MemoryPool:
    """Memory for entries of batches that is reused once a batch is freed, as allocating takes longer than filling."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Memory] = {}

    def tensor(self, use: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the CPU. In a batch, tensors with different `use` do not share memory."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        memory = self._known.get((use, size))
        if memory is None:
            for oldest in list(self._known)[: 1 - _POOL_SIZE]:
                self._known.pop(oldest, None)  # another thread may have removed it
            memory = self._known[use, size] = memory_of((size,), np.dtype(np.uint8))
        return torch.from_numpy(memory()).view(dtype).view(*shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}


def gathered(
    storage: Storage, key: Key, rows: torch.Tensor, lanes: Sequence[torch.Tensor] = (), pool: MemoryPool | None = None
) -> torch.Tensor | None:
    """Read an entry of existing elements, `rows` and possibly `lanes` int64 `[n]`; None if it is not stored.

    The tensor is fresh memory, taken from `pool` if given.
    """
    if isinstance(storage, StreamStorage):
        return _of_shards(storage, [key], rows)[0]
    if not has_columns(storage):
        return storage.entry(key, (rows, *lanes) if lanes else rows)
    leaf = stored_entry(storage, key)
    if leaf is None:
        return None
    numbers = rows.numpy()
    storage.expect(numbers, key)
    if lanes:
        return leaf[tuple(part.to(leaf.device) for part in (rows, *lanes))]
    if pool is None and len(numbers) <= _FEW and leaf.is_cpu and not (leaf.requires_grad or renames(leaf.dtype)):
        return torch.from_numpy(leaf.numpy().take(numbers, 0))  # torch has a larger overhead
    if pool is None or not leaf.is_cpu:
        return leaf.index_select(0, rows.to(leaf.device))
    return torch.index_select(leaf, 0, rows, out=pool.tensor(key, (len(rows), *leaf.shape[1:]), leaf.dtype))


def _of_shards(storage: StreamStorage, keys: Sequence[Key], rows: torch.Tensor) -> list[torch.Tensor | None]:
    """Read entries of elements of a stream; frames of videos are decoded if they are among `keys`."""
    parts = []
    for places, shard, numbers in storage.parts(rows.numpy()):
        frames = {image_key(one): one for one in reference_keys(shard.fields)}
        stored = [frames.get(key, key) for key in keys]
        read: TensorDictBase
        if shard.decode is not None and not set(stored) <= {one.key for one in shard.fields}:
            read = shard.read(numbers)
        else:
            found = _entries(shard.storage, stored, torch.from_numpy(numbers + shard.first))
            there = {key: value for key, value in zip(stored, found, strict=True) if value is not None}
            if shard.episode and _EPISODE in there:
                there[_EPISODE] = there[_EPISODE] + shard.episode
            read = tensordict_of(there, (len(numbers),))
            read = read if shard.decode is None else shard.decode(read)
        parts.append((places, read))
    if not parts:
        return [None] * len(keys)
    whole = parts[0][1] if len(parts) == 1 else merged(parts, len(rows))
    return [whole.get(key, None) for key in keys]


def _entries(storage: Storage, keys: Sequence[Key], rows: torch.Tensor) -> list[torch.Tensor | None]:
    if isinstance(storage, StreamStorage):
        return _of_shards(storage, keys, rows)
    return [gathered(storage, key, rows) for key in keys] if has_columns(storage) else storage.read_entries(keys, rows)


class Ages(Protocol):
    """Where steps lie in their trajectories; `TrajectoryTable` implements it."""

    capacity: int

    def steps_at(self, rows: Numbers) -> Numbers:
        """Return the absolute numbers of the steps in these rows."""

    def age(self, steps: Numbers, lanes: Numbers) -> Numbers:
        """Return how many steps of the same trajectory come before each step."""

    def reach(self, steps: Numbers, lanes: Numbers) -> Numbers:
        """Return how many steps there are from each step to the end of its trajectory, both inclusive."""


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
        return self._storage.places_in_episodes(steps)[0]

    def reach(self, steps: Numbers, lanes: Numbers) -> Numbers:
        """Return how many steps of its episode there are from each element on."""
        before, lengths = self._storage.places_in_episodes(steps)
        return lengths - before


class StepsAround:
    """The steps around each step at an index, as far as they belong to its episode and are stored.

    Where episodes begin and end is determined when this object is made. Until the last step is read, the caller
    excludes writers, or repeats the read if one interfered.

    Args:
        storage: the storage.
        table: where steps lie in their trajectories.
        index: existing elements, as an int64 array of any shape for each dimension of the storage.
        count: how many earlier steps `age` and `entry` are about.
        pool: memory to reuse.
    """

    def __init__(self, storage: Storage, table: Ages, index: tuple[Numbers, ...], count: int, pool: MemoryPool) -> None:
        rows, *self._lanes = index
        self._pool = pool
        self._storage = storage
        self._table = table
        self._lead = rows.shape
        self._step = table.steps_at(rows.reshape(-1))
        self._lane = np.zeros_like(self._step)
        if self._lanes:
            flat = [part.reshape(-1) for part in self._lanes]
            self._lane = np.ravel_multi_index(flat, tuple(storage.shape[1:])).astype(np.int64)
        age = table.age(self._step, self._lane)
        self._first = self._step - age
        self._back = np.arange(-count, 1)
        self.age = torch.from_numpy(np.minimum(age, count).reshape(self._lead))
        """How many earlier steps each step has, from 0 to `count`; int64 in the shape of the index."""

    @cached_property
    def _last(self) -> Numbers:
        return self._step + self._table.reach(self._step, self._lane) - 1

    @property
    def keys(self) -> Sequence[Key] | None:
        """The entries of the storage, if each can be read by itself."""
        return self._storage.entry_keys

    def rows(self, keys: Sequence[Key]) -> TensorDict:
        """Return stored entries of the steps themselves, in the shape of the index."""
        here = np.zeros((), np.int64)
        if self._lanes:
            found = [self.window(key, here)[0] for key in keys]
        else:
            found = _entries(self._storage, keys, torch.from_numpy(self._step % self._table.capacity))
        tensors = {key: cast("torch.Tensor", value) for key, value in zip(keys, found, strict=True)}
        if len(self._lead) != 1:
            tensors = {key: value.reshape((*self._lead, *value.shape[1:])) for key, value in tensors.items()}
        rows, structure = tensordict_of(tensors, self._lead), getattr(self._storage, "structure", None)
        device = getattr(structure, "device", None)
        return rows if device is None else rows.to(device)

    def entry(self, key: Key) -> torch.Tensor | None:
        """Return an entry of the `count` earlier steps and of the step itself, `[*index.shape, count + 1,
        *entry.shape]`.

        Missing steps are replaced by the earliest existing one. The tensor is fresh memory; None if the entry is not
        stored.
        """
        return self.window(key, self._back)[0]

    def window(self, key: Key, offsets: Numbers) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return an entry of the steps at these offsets from each step, and which of these steps are missing.

        Returns:
            The entry, `[*index.shape, *offsets.shape, *entry.shape]`, in fresh memory; None if it is not stored.
            Missing steps are replaced by the nearest existing one. And which steps are missing, bool `[*index.shape,
            *offsets.shape]`.
        """
        last = self._last if offsets.max(initial=0) > 0 else self._step
        steps, missing = clamped(self._step[:, None] + offsets.reshape(-1), self._first, last)
        rows = torch.from_numpy(steps.reshape(-1) % self._table.capacity)
        lanes = [torch.from_numpy(np.repeat(part.reshape(-1), steps.shape[1])) for part in self._lanes]
        found = gathered(self._storage, key, rows, lanes, self._pool)
        lead = (*self._lead, *offsets.shape)
        mask = torch.from_numpy(missing.reshape(lead))
        return (None if found is None else found.reshape((*lead, *found.shape[1:]))), mask

    def moved_on(self, stack: torch.Tensor, newest: torch.Tensor, use: Key) -> torch.Tensor:
        """Shift a stack by one step: drop the first step of what `entry` returned, and append `newest`.

        The tensor is fresh memory. Results for the same batch must have different values of `use`.
        """
        lead = self.age.dim()
        found = self._pool.tensor(use, stack.shape, stack.dtype) if stack.is_cpu else torch.empty_like(stack)
        last = stack.shape[lead] - 1
        found.narrow(lead, 0, last).copy_(stack.narrow(lead, 1, last))
        found.select(lead, last).copy_(newest)
        return found
