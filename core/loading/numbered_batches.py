"""Batches by number: each depends on the seed, the epoch and its number alone.

So workers need no word of each other, and a stream continues from any batch at once. The random order of an epoch is
one of which any part is computed by itself; a rank gets a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..buffers.replay_buffer import ReplayBuffer
from ..errors import SchemaError, UsageError
from ..samplers.base import Sampler
from ..samplers.ensemble import SamplerEnsemble
from ..samplers.uniform import EpochSampler, permutation, seed_of
from ..storages.base import Storage
from ..storages.ensemble import StorageEnsemble
from ..storages.write_log import Written
from ..writers.base import Writer
from ..writers.ensemble import WriterEnsemble
from .passes import Start

Numbers: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

_LISTED = 1 << 20
"""Up to so many numbers the order is a list, which is faster, and all orders of few numbers are equally likely."""

_ROUNDS = 6  # an even number
_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


class KeyedOrder:
    """A random order of the numbers below `size`; equal keys give equal orders.

    Beyond 2^20 numbers it is a permutation that is computed for the places that are asked for: a Feistel network on
    pairs of numbers below `a` and `b`, where `a * b` is little more than `size`, repeated for results that are too
    large (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). No process makes a list.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._list: Numbers | None = None
        if size <= _LISTED:
            self._list = permutation(size, torch.Generator().manual_seed(key))
            return
        self._high = int(np.sqrt(size)) + 1
        self._low = -(-size // self._high)
        self._keys = [np.uint64(seed_of(key, number)) for number in range(_ROUNDS)]

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at these places, int64 `[n]`."""
        if self._list is not None:
            return self._list[places]
        found = self._permuted(places.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._permuted(found[outside])
        return found.astype(np.int64)

    def _permuted(self, words: _Words) -> _Words:
        sizes = np.uint64(self._high), np.uint64(self._low)
        one, other = np.divmod(words, sizes[1])
        for number, key in enumerate(self._keys):
            mixed = (other ^ key) * _ODD[0]
            mixed ^= mixed >> _SHIFT
            mixed *= _ODD[1]
            one, other = other, ((mixed >> _SHIFT) + one) % sizes[number % 2]
        found: _Words = one * sizes[1] + other
        return found


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each epoch that is of one of several ranks.

    An epoch is divided into rounds of one batch a rank. All ranks get the same number of batches, and no element twice:
    the elements of the last round are divided among the ranks, so that their last batches are smaller. Where a round of
    its own would leave a rank without any, they are added to the last batches instead, one element to each at most.
    """

    rank: int = 0
    ranks: int = 1

    def batches(self, size: int, each: int, *, drop_last: bool) -> int:
        """Return how many batches of `each` elements this rank gets of `size`; incomplete rounds count or not."""
        own = size // self.ranks
        return own // each if drop_last else -(-own // each)

    def places(self, size: int, each: int, number: int, *, drop_last: bool) -> Numbers:
        """Return the places of a batch in the order of the epoch, int64 `[each]`; in the last round maybe others."""
        start = (number * self.ranks + self.rank) * each
        if drop_last or number < self.batches(size, each, drop_last=False) - 1:
            return np.arange(start, start + each)
        first = number * self.ranks * each
        own, more = divmod(size - first, self.ranks)
        start = first + self.rank * own + min(self.rank, more)
        return np.arange(start, start + own + (self.rank < more))


_VERSION = 1
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_AT_ONCE = 4
"""How many passes over one data set can take turns in a process without being measured again."""


class _Epoch(NamedTuple):
    """What was there when an epoch started: writes until then, and how many elements, and how many of them a batch."""

    written: Written
    measured: tuple[int, int] | None


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry, and drop the oldest of more than a few."""
    kept[key] = value
    while len(kept) > _AT_ONCE:
        del kept[next(iter(kept))]


class NumberedBatches:
    """The batches of a buffer, by epoch and number.

    A sampler with epochs is given the elements of its epoch in a `KeyedOrder`, of which each rank of `shard` has its
    part. Any other draws each batch with a generator of its own; an epoch then has `batches` batches, or no end.

    UsageError (a ValueError) for a sampler whose batches depend on those before, or on priorities; what a first draw
    raises for a batch size that the sampler cannot draw, and for elements that are too few and stay so.
    """

    def __init__(
        self, buffer: ReplayBuffer, batch_size: int, *, seed: int, shard: Shard, batches: int | None, drop_last: bool
    ) -> None:
        self.buffer = buffer
        self.batch_size = batch_size
        self.seed = seed
        self.shard = shard
        self._epoch_sampler = epoch_sampler_of(buffer.sampler)
        if self._epoch_sampler is None and drop_last:
            raise UsageError(f"drop_last is True, expected False for a {type(buffer.sampler).__name__}")
        if self._epoch_sampler is not None and batches is not None:
            raise UsageError(
                f"batches is {batches}, expected None: a {type(buffer.sampler).__name__} has epochs of its own",
                hint="leave batches out, or take a sampler with replacement",
            )
        self._batches = batches
        self._drop_last = drop_last or (self._epoch_sampler is not None and self._epoch_sampler.drop_last)
        self._forget()
        self._check()

    def _check(self) -> None:
        """Raise what batches of any elements would, and if no more elements can come, what those of these would.

        Workers would raise it with their first batch.
        """
        buffer = self.buffer
        buffer.sampler.check_batch_size(self.batch_size)
        if _writes(buffer.writer):
            return
        if self._epoch_sampler is None:
            buffer.check_draws(self.batch_size)
        else:
            self._measured(self._epoch_sampler)

    def _forget(self) -> None:
        self._generator: torch.Generator | None = None
        self._orders: dict[tuple[int, int, int], KeyedOrder] = {}
        self._epochs: dict[int, _Epoch] = {}

    # What an epoch has -------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Start a pass: the epoch is of the elements that there are now."""
        written = self.buffer.storage.log.now
        measured = None if self._epoch_sampler is None else self._measured(self._epoch_sampler)
        self._epochs.pop(epoch, None)
        _keep(self._epochs, epoch, _Epoch(written, measured))

    def _measured(self, sampler: EpochSampler) -> tuple[int, int]:
        """Return how many elements an epoch has now, and how many a batch; SchemaError for too few."""
        size, each = sampler.epoch_size(self.buffer.storage, self.batch_size)
        least = self.shard.ranks * (each if self._drop_last else 1)
        if size < least:
            kind = "elements" if each == self.batch_size else "trajectories of the length of a slice"
            raise SchemaError(f"there are {size} {kind}, at least {least} are needed for a batch on each rank")
        return size, each

    def count(self) -> int | None:
        """Return how many batches an epoch of this rank has; None for one without end."""
        if self._epoch_sampler is None:
            return self._batches
        return self.shard.batches(*self._measured(self._epoch_sampler), drop_last=self._drop_last)

    @property
    def copied(self) -> bool:
        """Whether workers have a copy of rows that this process can write."""
        return _copied(self.buffer.writer, self.buffer.storage)

    # Batches -----------------------------------------------------------------------------------------

    def make(self, place: Start) -> Any:
        """Return a batch of this rank."""
        if self._generator is None:
            self._generator = torch.Generator()
        generator, (seed, epoch, number) = self._generator, place
        generator.manual_seed(seed_of(seed, epoch, number * self.shard.ranks + self.shard.rank, 1))
        if epoch not in self._epochs:
            self.begin(epoch)
        sampler, epoch_start = self._epoch_sampler, self._epochs[epoch]
        if sampler is None or epoch_start.measured is None:
            return self.buffer.sample_with(generator, self.batch_size)
        if self.buffer.storage.log.now != epoch_start.written:
            raise SchemaError("rows were written to the buffer during an epoch, whose elements are chosen at its start")
        size, each = epoch_start.measured
        places = self.shard.places(size, each, number, drop_last=self._drop_last)
        numbers = self._order_of(seed, epoch, size).at(places) if getattr(sampler, "shuffle", True) else places
        return self.buffer.sample_with(
            generator, choose=lambda storage: sampler.draw_numbered(storage, numbers, self.batch_size)
        )

    def _order_of(self, seed: int, epoch: int, size: int) -> KeyedOrder:
        key = seed, epoch, size
        if key not in self._orders:
            _keep(self._orders, key, KeyedOrder(size, seed_of(seed, epoch, 0)))
        return self._orders[key]

    # State -------------------------------------------------------------------------------------------

    def state(self, place: Start) -> dict[str, Any]:
        """Return the state of a stream whose next batch is this one: numbers and texts."""
        return {"version": _VERSION, **place._asdict(), **self._described()}

    def _described(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "rank": self.shard.rank,
            "world_size": self.shard.ranks,
            "sampler": type(self.buffer.sampler).__name__,
            "size": None if self._epoch_sampler is None else self._measured(self._epoch_sampler)[0],
            "batches": self.count(),
            "content": getattr(self.buffer.storage, "content_digest", None),
        }

    def place_in(self, state: Mapping[str, Any]) -> Start:
        """Return the next batch of a state; SchemaError (a RuntimeError) for a state of other batches."""
        missing = {"version", "seed", "epoch", "batch"} - set(state)
        if missing or state["version"] != _VERSION:
            raise SchemaError(f"expected the state of a torch dataset, found {', '.join(map(str, state)) or 'none'}")
        for name, value in self._described().items():
            if name in state and state[name] != value:
                raise SchemaError(f"the state has {name}={state[name]!r}, this dataset {name}={value!r}")
        return Start(int(state["seed"]), int(state["epoch"]), int(state["batch"]))

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_generator", "_orders", "_epochs"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def epoch_sampler_of(sampler: Sampler) -> EpochSampler | None:
    """Return the sampler if it draws in epochs whose elements can be numbered, None if it has no epochs.

    UsageError (a ValueError) for one whose batches depend on those before, or on priorities.
    """
    name = type(sampler).__name__
    if isinstance(sampler, SamplerEnsemble):
        for number, member in enumerate(sampler.members):
            if epoch_sampler_of(member) is not None:
                raise UsageError(
                    f"member {number} has a {type(member).__name__}, whose batches in an ensemble depend on those "
                    "before",
                    hint="give it a sampler with replacement",
                )
        return None
    if sampler.takes_priorities:
        raise UsageError(
            f"a {name} draws by priorities of the training process, which loader workers do not see",
            hint="sample the buffer in the training process: for batch in buffer",
        )
    if isinstance(sampler, EpochSampler) and _defines(sampler, "draw_numbered", "draw"):
        return sampler
    kind = type(sampler)
    if sampler.has_epochs or kind.save_state is not Sampler.save_state or kind.state_dict is not Sampler.state_dict:
        raise UsageError(
            f"the batches of a {name} depend on those before, so that workers cannot divide them",
            hint="take a SamplerWithoutReplacement, a SliceSamplerWithoutReplacement or a sampler with replacement",
        )
    return None


def _writes(writer: Writer) -> bool:
    return any(map(_writes, writer.members)) if isinstance(writer, WriterEnsemble) else writer.writes


def _copied(writer: Writer, storage: Storage) -> bool:
    if isinstance(writer, WriterEnsemble) and isinstance(storage, StorageEnsemble):
        return any(map(_copied, writer.members, storage.members))
    return writer.writes and not storage.shared


def _defines(sampler: Sampler, method: str, other: str) -> bool:
    """Whether a class defines a method together with, or after, another one that a subclass may have replaced."""
    classes = type(sampler).__mro__
    return (
        next(cls for cls in classes if method in vars(cls))
        in classes[: 1 + classes.index(next(cls for cls in classes if other in vars(cls)))]
    )
