"""A sampler that draws each element a limited number of times and then frees its slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError
from ..format import fs
from ..format.syncing import replace_file
from ..state_folder import load_module_state, module_state_bytes, read_values
from ..storages.base import Storage
from ..storages.cursors import rows_named
from ..storages.list_storage import ListStorage
from ..storages.tensor import TensorStorage
from .base import Sampler
from .uniform import distinct

Numbers: TypeAlias = NDArray[np.int64]

_FILE = "consuming_sampler.pt"
_TENSORS = {"_sample_count": torch.int64, "_live_mask": torch.bool}
_NEEDED = ("max_sample_count", "_sample_count", "_live_mask", "_free_indices")


class ConsumedTypeError(UsageError, TypeError):
    """A sample count is not a whole number, or a part of a buffer cannot be used with elements that are consumed."""


def checked_sample_count(name: str, count: Any) -> int:
    """Return a valid sample count.

    Raises:
        ConsumedTypeError: (a TypeError) it is not a whole number.
        UsageError: (a ValueError) it is below 1.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConsumedTypeError(f"{name} is {count!r}, expected a whole number")
    if count < 1:
        raise UsageError(f"{name} is {count}, expected a number from 1")
    return count


class ConsumingSampler(Sampler):
    """Draws every element `max_sample_count` times; then its slot is free, and is written next.

    A batch has no element twice. All elements that can still be drawn are equally likely; if fewer are left than asked
    for, the batch is smaller. `ran_out` is True after a batch that leaves none. New elements, and elements that are
    replaced in place or passed to `mark_update`, can be drawn `max_sample_count` times again. Buffers use it for
    `consume_after_n_samples`.

    Args:
        max_sample_count: how often each element is drawn.

    Raises:
        ConsumedTypeError: (a TypeError) the count is not a whole number.
        UsageError: (a ValueError) the count is below 1.
        SchemaError: (a RuntimeError) from `sample`, if no element is left.

    The name is TorchRL's.

    >>> from rbtool import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(5), consume_after_n_samples=1, batch_size=2)
    >>> index = buffer.extend(torch.arange(5))
    >>> [len(batch) for batch in buffer], len(buffer)
    ([2, 2, 1], 0)
    """

    has_epochs: ClassVar[bool] = True

    def __init__(self, max_sample_count: int = 1) -> None:
        self.max_sample_count = checked_sample_count("max_sample_count", max_sample_count)
        self.reset()

    def reset(self) -> None:
        """Forget all elements."""
        self._counts: Numbers = np.zeros(0, np.int64)
        self._place: Numbers = np.zeros(0, np.int64)  # slot → its position in _slots, -1 if it cannot be drawn
        self._slots: Numbers = np.zeros(
            0, np.int64
        )  # a permutation of the slots; the ones that can be drawn come first
        self._left = 0
        self._free: dict[int, None] = {}  # in the order in which they were consumed
        self._ran_out = False

    def check_storage(self, storage: Storage) -> None:
        """Raise UsageError for a storage of several dimensions, ConsumedTypeError if it is not a list or tensor
        storage.
        """
        if not isinstance(storage, ListStorage | TensorStorage):
            raise ConsumedTypeError(f"elements of a {type(storage).__name__} cannot be consumed")
        if storage.ndim > 1:
            raise UsageError(f"only a storage of one dimension can be consumed, this one has {storage.ndim}")

    def elements(self, storage: Storage) -> int:
        """Return how many elements can be drawn."""
        return self._left

    @property
    def exhausted(self) -> bool:
        """Whether there are elements, but none can be drawn."""
        return len(self._counts) > 0 and not self._left

    def freed(self, count: int) -> Numbers:
        """Return up to `count` slots of consumed elements, in the order in which they were consumed."""
        return np.fromiter((slot for slot, _ in zip(self._free, range(count), strict=False)), np.int64)

    def begin_epoch(self) -> None:
        """Do nothing: elements stay consumed in another process."""

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw different elements, and free those that were drawn often enough."""
        if not self._left:
            raise SchemaError("Cannot sample from an empty storage: all of its elements were consumed")
        slots = self._slots[distinct(min(batch_size, self._left), self._left, self.generator)]
        self._counts[slots] += 1
        consumed = slots[self._counts[slots] >= self.max_sample_count]
        if len(consumed):
            self._remove(consumed)
            self._free.update(dict.fromkeys(consumed.tolist()))
        self._ran_out = not self._left
        return torch.from_numpy(slots), {}

    def _remove(self, slots: Numbers) -> None:
        """Remove slots from the ones that can be drawn; the last ones move to their positions."""
        left = self._left - len(slots)
        last = self._slots[left : self._left]
        staying = last[~np.isin(last, slots)]
        holes = self._place[slots]
        holes = holes[holes < left]
        self._slots[holes], self._place[staying] = staying, holes
        self._place[slots] = -1
        self._left = left

    # Elements ----------------------------------------------------------------------------------------

    def on_attach(self, storage: Storage) -> None:
        """Forget the elements of another storage."""
        self.reset()

    def on_write(self, index: Any) -> None:
        """Make new elements available."""
        self._renew(np.atleast_1d(torch.as_tensor(index).numpy(force=True)))

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Make replaced elements available for as many draws as new ones."""
        rows = max(len(self._counts), 0 if storage is None else len(storage))
        named = rows_named(index, rows)
        self._renew(np.arange(rows)[named] if isinstance(named, slice) else named.numpy(force=True).reshape(-1))

    def _renew(self, slots: Numbers) -> None:
        slots = np.unique(slots[slots >= 0])
        if not len(slots):
            return
        self._make_room(int(slots[-1]) + 1)
        self._counts[slots] = 0
        new = slots[self._place[slots] < 0]
        self._slots[self._left : self._left + len(new)] = new
        self._place[new] = np.arange(self._left, self._left + len(new))
        self._left += len(new)
        for slot in new.tolist() if self._free else ():
            self._free.pop(slot, None)

    def _make_room(self, rows: int) -> None:
        there = len(self._counts)
        if rows <= there:
            return
        more = rows - there
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._place = np.concatenate([self._place, np.full(more, -1)])
        if rows > len(self._slots):
            self._slots = np.concatenate([self._slots, np.zeros(max(rows, 2 * there) - len(self._slots), np.int64)])

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Renumber the slots."""
        rows = storage.shape[0]
        self._counts, self._place = np.roll(self._counts, -row), np.roll(self._place, -row)
        self._slots[: self._left] = (self._slots[: self._left] - row) % rows
        self._free = {(slot - row) % rows: None for slot in self._free}

    # State -------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the state.

        `_sample_count` is int64 `[slots]`, `_live_mask` bool `[slots]`; the orders of live and of free slots are saved,
        too.
        """
        return {
            "max_sample_count": self.max_sample_count,
            "_sample_count": torch.from_numpy(self._counts.copy()),
            "_live_mask": torch.from_numpy(self._place >= 0),
            "_known_storage_len": len(self._counts),
            "_free_indices": torch.tensor(list(self._free), dtype=torch.int64),
            "_free_head": 0,
            "_ran_out": self._ran_out,
            "_live_order": torch.from_numpy(self._slots[: self._left].copy()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or TorchRL's, with its sample count; SchemaError for another sampler's state."""
        missing = [name for name in _NEEDED if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")
        for name, dtype in _TENSORS.items():
            value = state[name]
            if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.dim() != 1:
                raise SchemaError(f"{name} is not a vector of {dtype} in the state of a {type(self).__name__}")
        rows = int(state.get("_known_storage_len", len(state["_live_mask"])))
        counts, live = (state[name].numpy(force=True)[:rows] for name in ("_sample_count", "_live_mask"))
        free = state["_free_indices"]
        slots = np.flatnonzero(~live) if free is None else free.numpy(force=True)[int(state.get("_free_head", 0)) :]
        order = state.get("_live_order")
        known = np.flatnonzero(live) if order is None else order.numpy(force=True)
        if len(counts) != len(live) or not np.array_equal(np.sort(known), np.flatnonzero(live)):
            raise SchemaError(f"the state of a {type(self).__name__} contradicts itself: the live slots differ")
        count = checked_sample_count("max_sample_count", int(state["max_sample_count"]))
        self.reset()
        self.max_sample_count = count
        self._make_room(rows)
        self._counts[:], self._left = counts, len(known)
        self._slots[: len(known)], self._place[known] = known, np.arange(len(known))
        self._free = {slot: None for slot in slots.tolist() if slot < rows and not live[slot]}
        self._ran_out = bool(state.get("_ran_out", False))

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a state as TorchRL does: `consuming_sampler.pt`, tensors and numbers only."""
        fs.make_folder(folder)
        replace_file(folder / _FILE, module_state_bytes(dict(state)))

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read `consuming_sampler.pt` of this class or TorchRL, or a state in a memory-mapped tensordict."""
        state = load_module_state(folder / _FILE)
        return read_values(folder) if state is None else state

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self.max_sample_count}, left={self._left})"
