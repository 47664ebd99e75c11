"""Uniform sampling: with replacement, in epochs without replacement, and a limited number of times.

An epoch is a permutation of the elements; each batch takes the next part of it. The state is the part that is left:

    order     7 2 9 0 │ 4 1 8 5 │ 3 6         ten elements, batches of 4
              batch 1 │ batch 2 │ left

A checkpoint holds the elements that are left, in order, and the buffer saves the generator, so that all further batches
are the same after a resume. Elements written during an epoch are inserted at random positions of the part that is left:
every order of the rest is equally likely, and each element is still drawn exactly once.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError, require_flags
from ..format import fs
from ..format.syncing import replace_file
from ..state_folder import load_module_state, module_state_bytes, read_values
from ..storages.base import Storage
from ..storages.cursors import rows_named
from ..storages.list_storage import ListStorage
from ..storages.tensor import TensorStorage
from ..ted.schema import Numbers
from ..torchrl_classes import counterpart
from .base import Index, Sampler

_NEEDED = ("len_storage", "_sample_list", "drop_last", "_ran_out")


class EpochSampler(Sampler):
    """A sampler that draws in epochs. Its state is the rest of the epoch, in the form that TorchRL saves."""

    has_epochs: ClassVar[bool] = True
    replacement: ClassVar[bool] = False
    drop_last: bool
    """Whether an incomplete batch at the end of an epoch is dropped."""

    @abstractmethod
    def epoch_size(self, storage: Storage, batch_size: int) -> tuple[int, int]:
        """Return how many elements (or trajectories) an epoch has, and how many of these a batch has."""

    @abstractmethod
    def draw_numbered(self, storage: Storage, numbers: Numbers, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Return index, info and rows (or None) of the elements, or slices of the trajectories, with these numbers.

        Numbers, int64 `[n]`, count from 0 in the order of the storage, up to the size of an epoch. The state of the
        epoch is neither used nor changed.
        """

    def epoch_batches(self, storage: Storage, batch_size: int) -> int:
        """Return how many batches an epoch of the present elements has."""
        size, each = self.epoch_size(storage, batch_size)
        return size // each if self.drop_last else -(-size // each)

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Raise SchemaError if a state lacks entries that all samplers of this kind save."""
        missing = [name for name in _NEEDED if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")


def fractions(count: int, generator: torch.Generator | None) -> NDArray[np.float64]:
    """Draw uniform random numbers in [0, 1), float64 `[count]`."""
    if generator is None:
        return torch.rand(count, dtype=torch.float64).numpy()
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).numpy(force=True)


def singles(count: int, generator: torch.Generator | None) -> NDArray[np.float32]:
    """Draw uniform random numbers in [0, 1), float32 `[count]`, as TorchRL does to choose the starts of slices."""
    if generator is None:
        return torch.rand(count).numpy()
    return torch.rand(count, generator=generator, device=generator.device).numpy(force=True)


def permutation(length: int, generator: torch.Generator | None) -> Numbers:
    """Return the numbers below `length` in a random order."""
    device = generator.device if generator is not None else None
    return torch.randperm(length, generator=generator, device=device).numpy(force=True)


def distinct(count: int, below: int, generator: torch.Generator | None) -> Numbers:
    """Draw `count` different numbers from 0 to `below - 1`, in random order; int64 `[count]`, in O(count)."""
    if 2 * count >= below:
        return permutation(below, generator)[:count]
    found: Numbers = np.zeros(0, np.int64)
    while len(found) < count:
        more = (fractions(count, generator) * below).astype(np.int64)
        found = first_of_each(np.concatenate([found, more]))[:count]
    return found


def first_of_each(numbers: Numbers) -> Numbers:
    """Return the distinct numbers in the order of their first occurrence."""
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


def inserted_at_random(left: Numbers, late: Numbers, generator: torch.Generator | None) -> Numbers:
    """Insert the numbers `late` into a shuffled sequence, so that all orders of the result are equally likely.

    Each number is appended and swapped with a random position up to its own: the inside-out form of Durstenfeld's
    shuffle.
    """
    order = np.concatenate([left, late])
    for place, chance in enumerate(fractions(len(late), generator).tolist(), start=len(left)):
        other = int(chance * (place + 1))
        order[place], order[other] = order[other], order[place]
    return order


def seed_of(*key: int) -> int:
    """Hash a key, numbers of up to 64 bits, to a 63-bit seed."""
    words = struct.pack(f"<{len(key)}Q", *(number % (1 << 64) for number in key))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


_FEW = 1000


@counterpart
class SamplerWithoutReplacement(EpochSampler):
    """Draws every element once in each epoch.

    `ran_out` is True from the last batch of an epoch until the next batch. Elements added during an epoch are drawn in
    it; if elements are removed, a new epoch starts. Checkpoints hold the order of the elements that are left. Since the
    buffer also saves the state of the generator, all further draws are the same after a resume.

    Indices are int64 `[batch_size]`, shorter at the end of an epoch; for a storage of several dimensions a tuple with
    one such tensor for each.

    Args:
        drop_last: whether to drop an incomplete batch at the end of an epoch, which is otherwise smaller.
        shuffle: whether the order is random; otherwise it is the storage's.

    Raises:
        SchemaError: (a RuntimeError) from `sample`, if the storage is empty.
        UsageError: (a ValueError) from `sample`, if the batch size is below 1, or with `drop_last` above the number of
            elements.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> sampler, storage = SamplerWithoutReplacement(shuffle=False), TensorStorage(torch.arange(5))
    >>> [sampler.sample(storage, 2)[0].tolist() for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    reads_rows: ClassVar[bool] = False

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        require_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.reset()

    def reset(self) -> None:
        """Forget the epoch."""
        self.len_storage = 0
        self._order: Numbers | None = None  # never edited in place: saved states refer to it
        self._drawn = 0
        self._batch_size = 0
        self._ran_out = False

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw the next `batch_size` elements of the epoch, or what is left of it."""
        length = len(storage)
        if self.drop_last and batch_size > length:
            raise UsageError(
                f"batch_size is {batch_size}, expected at most {length}, the storage's length, with drop_last=True",
                hint="use a smaller batch size, or drop_last=False",
            )
        order = self._order_of(length)
        if self.drop_last and len(order) - self._drawn < batch_size:
            order = self._begin(length)
        numbers = order[self._drawn : self._drawn + batch_size].copy()
        self._drawn += len(numbers)
        self._batch_size = batch_size
        self._ran_out = len(order) - self._drawn < (batch_size if self.drop_last else 1)
        if self._ran_out:
            self._begin(length)
        index, info, _ = self.draw_numbered(storage, numbers, batch_size)
        return index, info

    def _order_of(self, length: int) -> Numbers:
        """Return the order of the epoch, including elements added since the last draw; start a new one if needed."""
        if self._order is None or length < self.len_storage or self._drawn >= len(self._order):
            return self._begin(length)
        if length > self.len_storage:
            self._order = self._with_late_ones(self._order[self._drawn :], np.arange(self.len_storage, length))
            self._drawn, self.len_storage = 0, length
        return self._order

    def _begin(self, length: int) -> Numbers:
        self._order = permutation(length, self.generator) if self.shuffle else np.arange(length)
        self._drawn, self.len_storage = 0, length
        return self._order

    def _with_late_ones(self, left: Numbers, late: Numbers) -> Numbers:
        """Insert new elements into the rest of the epoch; if it is shuffled, so that all orders are equally likely."""
        if not self.shuffle:
            return np.concatenate([left, late])
        if len(late) > _FEW:
            order = np.concatenate([left, late])
            return order[permutation(len(order), self.generator)]
        return inserted_at_random(left, late, self.generator)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Renumber the elements that are left in the epoch."""
        if self._order is not None:
            self._order = (self._order - row * (len(storage) // storage.shape[0])) % len(storage)

    @property
    def _sample_list(self) -> torch.Tensor | None:
        """The elements left in the epoch, in order; None before the first draw."""
        return None if self._order is None else torch.from_numpy(self._order[self._drawn :])

    @property
    def remaining_batches(self) -> int:
        """How many batches of the last batch size are left in the epoch."""
        left = self._sample_list
        if left is None or not self._batch_size:
            return sys.maxsize
        return len(left) // self._batch_size if self.drop_last else -(-len(left) // self._batch_size)

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return the number of elements; 0 if they are too few for a batch, with `drop_last`."""
        found = super().sampleable(storage)
        return 0 if self.drop_last and found < (batch_size or 1) else found

    def epoch_size(self, storage: Storage, batch_size: int) -> tuple[int, int]:
        """Return the number of elements, and the batch size."""
        return len(storage), batch_size

    def draw_numbered(self, storage: Storage, numbers: Numbers, batch_size: int) -> tuple[Index, dict[str, Any], None]:
        """Return the index of elements by number; there is no info, and rows are not read."""
        index = torch.from_numpy(numbers)
        return (index if storage.ndim == 1 else torch.unravel_index(index, storage.shape)), {}, None

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the elements left, `_sample_list` (int64, or None before the first draw), and the arguments.

        `_sample_list` is not a copy, but later draws do not change it.
        """
        return {
            "len_storage": self.len_storage,
            "_sample_list": self._sample_list,
            "drop_last": self.drop_last,
            "_ran_out": self._ran_out,
            "shuffle": self.shuffle,
            "_batch_size": self._batch_size,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or TorchRL's (which has no `shuffle`); SchemaError for another sampler's state."""
        self.require_state(state)
        length, left = int(state["len_storage"]), state["_sample_list"]
        order = None if left is None else _checked(left, length).numpy(force=True)
        self.reset()
        self.len_storage, self._order = length, order
        self.drop_last, self._ran_out = bool(state["drop_last"]), bool(state["_ran_out"])
        self.shuffle = bool(state.get("shuffle", self.shuffle))
        self._batch_size = int(state.get("_batch_size", 0))

    def __getstate__(self) -> dict[str, Any]:
        left = self._sample_list
        return super().__getstate__() | {"_order": None if left is None else left.numpy().copy(), "_drawn": 0}

    def __repr__(self) -> str:
        left = self._sample_list
        return (
            f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle}, "
            f"left={'all' if left is None else len(left)})"
        )


@counterpart
class RandomSampler(Sampler):
    """Draws every element with the same probability, with replacement.

    Indices are int64 `[batch_size]`; for a storage of several dimensions a tuple with one such tensor for each.
    `RandomSampler(replacement=False)` makes a `SamplerWithoutReplacement` and takes its arguments.

    Raises:
        SchemaError: (a RuntimeError) from `sample`, if the storage is empty.
        UsageError: (a ValueError) from `sample`, if the batch size is below 1.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> index, info = RandomSampler().sample(TensorStorage(torch.arange(10)), 4)
    >>> index.shape, info
    (torch.Size([4]), {})
    """

    reads_rows: ClassVar[bool] = False
    without_replacement: ClassVar[type[Sampler]] = SamplerWithoutReplacement

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw `batch_size` elements."""
        generator, count = self.generator, (batch_size,)
        if generator is None and storage.ndim == 1:
            return torch.randint(len(storage), count), {}  # keyword arguments would make it 10 % slower
        device = None if generator is None else generator.device
        if storage.ndim == 1:
            return torch.randint(len(storage), count, generator=generator, device=device), {}
        return tuple(torch.randint(size, count, generator=generator, device=device) for size in storage.shape), {}


def _checked(left: Any, length: int) -> torch.Tensor:
    if not isinstance(left, torch.Tensor) or left.dtype != torch.int64 or left.dim() != 1:
        raise SchemaError("_sample_list is not an int64 vector in the state")
    if len(left) > length or (len(left) and not 0 <= int(left.min()) <= int(left.max()) < length):
        raise SchemaError(f"_sample_list has elements beyond len_storage={length} in the state")
    return left


_FILE = "consuming_sampler.pt"
_TENSORS = {"_sample_count": torch.int64, "_live_mask": torch.bool}
_NEEDED_TO_CONSUME = ("max_sample_count", "_sample_count", "_live_mask", "_free_indices")


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


@counterpart
class ConsumingSampler(Sampler):
    """Draws every element `max_sample_count` times, and then frees its slot, which the writer reuses first.

    A batch contains no element twice. All elements that can still be drawn are equally likely; if fewer are left than
    requested, the batch is smaller. `ran_out` is True after a batch that leaves none. New elements, and elements that
    are replaced in place or passed to `mark_update`, can be drawn `max_sample_count` times again. Buffers use this
    sampler for `consume_after_n_samples`.

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
        # The slots that can be drawn are the first `_left` numbers of `_slots`. `_place` is the inverse: the position
        # of each slot in `_slots`, or -1. To remove a slot, the last one is moved to its position.
        self._place: Numbers = np.zeros(0, np.int64)
        self._slots: Numbers = np.zeros(0, np.int64)
        self._left = 0
        self._free: dict[int, None] = {}  # consumed slots, in the order in which they were consumed
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
        """Remove slots from those that can be drawn; the last ones of `_slots` take their positions."""
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
        """Let replaced elements be drawn as often as new ones."""
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

        `_sample_count`, int64 `[slots]`, is how often each element was drawn; `_live_mask`, bool `[slots]`, which ones
        can still be drawn; `_live_order` and `_free_indices`, int64 `[n]`, are these slots and the free ones, in order.
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
        missing = [name for name in _NEEDED_TO_CONSUME if name not in state]
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
