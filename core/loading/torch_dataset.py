"""Data sets of `torch.utils.data` over datasets and buffers: iterable, or map-style with numbered batches.

Batch k of an epoch depends only on the seed, the epoch and k. Workers therefore need not communicate, and a run resumes
at any batch at once. Any part of the random order of an epoch can be computed by itself (`KeyedOrder`); a rank gets a
share of it (`Shard`). The workers of a loader agree on the epoch of each pass (`Passes`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..buffers.data_loader import SharedSlots, fetcher_asking, serve
from ..buffers.processes import SharedGuard
from ..buffers.replay_buffer import ReplayBuffer
from ..datasets.load_dataset import load_dataset
from ..errors import (
    NoLengthError,
    SchemaError,
    UsageError,
    require_number,
    require_seed,
    suggests_keywords,
)
from ..options import PathLike
from ..samplers.base import Sampler
from ..samplers.ensemble import SamplerEnsemble
from ..samplers.uniform import EpochSampler, SamplerWithoutReplacement, permutation, seed_of
from ..storages.base import Storage
from ..storages.ensemble import StorageEnsemble
from ..storages.write_log import Written
from ..ted.schema import Numbers
from ..writers.base import Writer, WriterEnsemble

_SEED, _EPOCH, _BATCH, _BY_WORKERS, _NEWEST, _TABLE = range(6)
_KEPT, _WIDTH = 48, 7
"""The number of passes that are remembered, and of the integers for each: see `Passes`."""


class Start(NamedTuple):
    """The place where a pass starts: a seed, an epoch and the number of a batch."""

    seed: int
    epoch: int
    batch: int


class Passes:
    """Gives every pass over a data set its own epoch, and all workers of a pass the same one.

    The counters are in memory that forked and spawned workers share with the parent process, so that epochs advance
    even if every pass has new workers. The first worker that enters a pass takes the next epoch and stores it in a
    table, where the other workers find it. A pass is identified by the base seed of its workers, which `DataLoader`
    draws for new workers, and by its turn: the n-th pass of a persistent worker is the n-th pass of the others, even if
    one of them is a pass ahead, as after a loop that was left early. If torch is seeded before every epoch, all passes
    have one base seed. The process number of the first worker, counted by its parent, then tells them apart: `first`
    of two passes differs by the number of workers at least. A plain copy has its own counters.

        cells   | seed | epoch | batch | by workers | newest | row 0 | row 1 | …
        row     | key | workers | turn | first | epoch | batch | seed |
    """

    def __init__(self, seed: int) -> None:
        self._guard = SharedGuard()
        self._turns: dict[int, int] = {}
        self.start_at(Start(seed, 0, 0))

    @property
    def _cells(self) -> memoryview:
        return self._guard.numbers

    # Before a pass ----------------------------------------------------------------------------------

    @property
    def next(self) -> Start:
        """The place where the next pass starts."""
        with self._guard.hold():
            cells = self._cells
            return Start(_unsigned(cells[_SEED]), cells[_EPOCH], cells[_BATCH])

    def start_at(self, start: Start, *, by_workers: bool = False) -> None:
        """Set where the next pass starts; `by_workers` if a worker sets it."""
        with self._guard.hold():
            cells = self._cells
            cells[_SEED], cells[_EPOCH], cells[_BATCH] = _signed(start.seed), start.epoch, start.batch
            cells[_BY_WORKERS] = by_workers

    @property
    def by_workers(self) -> bool:
        """Whether the newest pass was started by workers of a loader."""
        return bool(self._cells[_BY_WORKERS])

    # Passes -----------------------------------------------------------------------------------------

    def enter(self) -> Start:
        """Start a pass, or join a pass that another worker has started; return where it starts."""
        worker = get_worker_info()
        with self._guard.hold():
            if worker is None:
                return self._advance(by_workers=False)
            key, cells = worker.seed - worker.id, self._cells
            turn = self._turns[worker.seed] = self._turns.get(worker.seed, -1) + 1
            passed, first = (key, worker.num_workers, turn), _process_number() - worker.id
            for number in range(_KEPT):
                row = _TABLE + _WIDTH * number
                same = cells[row + 1] and tuple(cells[row : row + 3]) == passed
                if same and abs(first - cells[row + 3]) < worker.num_workers:  # others may have started in between
                    return Start(_unsigned(cells[row + 6]), cells[row + 4], cells[row + 5])
            start = self._advance(by_workers=True)
            cells[_NEWEST] = (cells[_NEWEST] + 1) % _KEPT
            row = _TABLE + _WIDTH * cells[_NEWEST]
            cells[row], cells[row + 1], cells[row + 2], cells[row + 3] = *passed, first
            cells[row + 4], cells[row + 5], cells[row + 6] = start.epoch, start.batch, _signed(start.seed)
            return start

    def _advance(self, *, by_workers: bool) -> Start:
        cells = self._cells
        start = Start(_unsigned(cells[_SEED]), cells[_EPOCH], cells[_BATCH])
        cells[_EPOCH], cells[_BATCH], cells[_BY_WORKERS] = start.epoch + 1, 0, by_workers
        return start

    def __getstate__(self) -> dict[str, Any]:
        copied = None if get_spawning_popen() is not None else self.next
        return {"_guard": self._guard, "copied": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._guard, self._turns = state["_guard"], {}
        if state["copied"] is not None:
            self.start_at(state["copied"])


def _process_number() -> int:
    """Return which child of its parent this process is, counted from 1; 0 for a process that is none."""
    numbers: tuple[int, ...] = getattr(current_process(), "_identity", ())
    return numbers[-1] if numbers else 0


def _signed(seed: int) -> int:
    return int(struct.unpack("<q", struct.pack("<Q", seed))[0])


def _unsigned(seed: int) -> int:
    return int(struct.unpack("<Q", struct.pack("<q", seed))[0])


_Words: TypeAlias = NDArray[np.uint64]

_LISTED = 1 << 20
"""Up to this size the order is a shuffled list, which is faster, and makes all orders of few numbers equally likely."""

_ROUNDS = 6  # even, so that the two halves end in their original places
_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


class KeyedOrder:
    """A random order of the numbers below `size`; equal keys give equal orders.

    Beyond 2^20 numbers no list is made; the numbers at given places are computed by a Feistel network, a permutation
    that works like a block cipher (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). A place is written
    as a pair (one, other) with one < a and other < b, where a·b is slightly larger than `size`. Each round replaces
    the pair by (other, (one + hash(other, key)) mod a or b), which is invertible. A result of `size` or more is
    permuted again until it is in range.
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
    """The part of each epoch that belongs to one of several ranks.

    An epoch is divided into rounds of one batch for each rank. All ranks get the same number of batches, and no element
    is drawn twice. The elements of the last, incomplete round are divided evenly among the ranks, so that their last
    batches are smaller. If they are fewer than the ranks, they are added to the batches of the round before, at most
    one to each.

        10 elements, 2 ranks, batches of 2      rank 0   0 1 | 4 5 | 8
                                                rank 1   2 3 | 6 7 | 9
    """

    rank: int = 0
    ranks: int = 1

    def batches(self, size: int, each: int, *, drop_last: bool) -> int:
        """Return the number of batches of a rank for `size` elements, `each` in a batch, with or without the last."""
        own = size // self.ranks
        return own // each if drop_last else -(-own // each)

    def places(self, size: int, each: int, number: int, *, drop_last: bool) -> Numbers:
        """Return the places of a batch in the order of the epoch, int64 `[each]`; another number in the last round."""
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
"""How many epochs, and orders, a process remembers, for passes over one data set that alternate."""


class _Epoch(NamedTuple):
    """The state of the storage at the start of an epoch: the write log, and the numbers of elements and of a batch."""

    written: Written
    measured: tuple[int, int] | None


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry, and drop the oldest one if there are too many."""
    kept[key] = value
    while len(kept) > _AT_ONCE:
        del kept[next(iter(kept))]


class NumberedBatches:
    """The batches of a buffer, by epoch and number.

    A sampler with epochs gets the elements of an epoch in a `KeyedOrder`, of which each rank has its part. Any other
    sampler draws each batch with a generator that is seeded for this batch; an epoch then has `batches` batches, or no
    end.

    UsageError (a ValueError) for a sampler whose batches depend on earlier ones, or on priorities. Also raises the
    errors of a first draw: for a batch size that the sampler cannot draw, and for too few elements, if none can be
    added.
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
        """Raise errors now that workers would raise with their first batch.

        These are errors about the batch size and, if nothing can be added to the buffer, about its elements.
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

    # Epochs ------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Start an epoch of the elements that are in the buffer now."""
        written = self.buffer.storage.log.now
        measured = None if self._epoch_sampler is None else self._measured(self._epoch_sampler)
        self._epochs.pop(epoch, None)
        _keep(self._epochs, epoch, _Epoch(written, measured))

    def _measured(self, sampler: EpochSampler) -> tuple[int, int]:
        """Return the number of elements of an epoch now, and of a batch; SchemaError if there are too few."""
        size, each = sampler.epoch_size(self.buffer.storage, self.batch_size)
        least = self.shard.ranks * (each if self._drop_last else 1)
        if size < least:
            kind = "elements" if each == self.batch_size else "trajectories of the length of a slice"
            raise SchemaError(f"there are {size} {kind}, at least {least} are needed for a batch on each rank")
        return size, each

    def count(self) -> int | None:
        """Return the number of batches of an epoch of this rank; None if it has no end."""
        if self._epoch_sampler is None:
            return self._batches
        return self.shard.batches(*self._measured(self._epoch_sampler), drop_last=self._drop_last)

    @property
    def copied(self) -> bool:
        """Whether workers get a copy of rows that this process can write."""
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
        """Return the state before the batch at a place: numbers and texts."""
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
        """Return the place of the next batch in a state; SchemaError (a RuntimeError) for a state of other batches."""
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

    UsageError (a ValueError) for one whose batches depend on earlier ones, or on priorities.
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
    """Return whether the class that defines `method` is the one that defines `other`, or derives from it.

    Otherwise a subclass has overridden `other` and inherits a `method` that does not match it.
    """
    classes = type(sampler).__mro__
    return (
        next(cls for cls in classes if method in vars(cls))
        in classes[: 1 + classes.index(next(cls for cls in classes if other in vars(cls)))]
    )


Style: TypeAlias = Literal["iterable", "map"]

_LINE = "DataLoader(dataset, batch_size=None)"


class Place(NamedTuple):
    """The next batch of a process; a worker makes every `workers`-th batch from there on."""

    next: Start
    worker: int = 0
    workers: int = 1


class RetryingIterator(Iterator[Any]):
    """Yields `make(number)` for each number that `start` returns; after an error it continues with the same number."""

    def __init__(self, start: Callable[[], Iterable[int]], make: Callable[[int], Any]) -> None:
        self._start = start
        self._make = make
        self._left: Iterator[int] | None = None
        self._number: int | None = None

    def __next__(self) -> Any:
        if self._left is None:
            self._left = iter(self._start())
        if self._number is None:
            self._number = next(self._left)
        batch = self._make(self._number)
        self._number = None
        return batch


class Feed(ABC):
    """The interface between a `TorchLoader` and its data set. A place is a position in a pass, before some batch.

    Attributes:
        dataset: the data set that workers get.
        sampler: yields the indices to load, in order; None for an iterable data set.
    """

    dataset: Any
    sampler: torch.utils.data.Sampler[Any] | None = None

    @abstractmethod
    def next(self) -> Any:
        """Return the place where the next pass begins."""

    @abstractmethod
    def begin(self) -> Any:
        """Begin a pass; return its first place."""

    @abstractmethod
    def start(self, place: Any) -> None:
        """Make the workers that are about to start, or persistent ones, begin at a place of the pass."""

    def received(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches in the messages of workers."""
        return batches

    @abstractmethod
    def after(self, place: Any) -> Any:
        """Return the place after the batch at `place`, which the training loop has taken."""

    @abstractmethod
    def state(self, place: Any) -> dict[str, Any]:
        """Return a place as a state."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Make the next pass begin at a state; SchemaError, with nothing changed, for a state of other batches."""


class LoaderDataset(ABC):
    """A data set for `TorchLoader`."""

    @abstractmethod
    def feed(self, workers: int, *, persistent: bool) -> Feed:
        """Return the feed for a loader with this number of workers; UsageError if they cannot read the rows."""


class _Numbers(Feed, torch.utils.data.Sampler[Start]):
    """Feeds a loader with numbered batches: yields the places of an epoch from a place on."""

    dataset: TorchMapDataset

    def __init__(self, dataset: TorchMapDataset) -> None:
        self.dataset, self.sampler = dataset, self
        self._endless = dataset.batches.count() is None
        self._start = Start(0, 0, 0)

    def __iter__(self) -> Iterator[Start]:
        return self._from(self._start)

    def _from(self, place: Start) -> Iterator[Start]:
        while self._endless or place.batch < len(self.dataset):
            yield place
            place = self.after(place)

    def __len__(self) -> int:
        return len(self.dataset)

    def next(self) -> Start:
        return self.dataset.passes.next

    def begin(self) -> Start:
        start = self.dataset.passes.enter()
        self.dataset.batches.begin(start.epoch)
        return start

    def start(self, place: Start) -> None:
        self._start = place

    def after(self, place: Start) -> Start:
        return place._replace(batch=place.batch + 1)

    def state(self, place: Start) -> dict[str, Any]:
        return self.dataset.batches.state(place)

    def load(self, state: Any) -> None:
        self.dataset.passes.start_at(self.dataset.batches.place_in(state))


class _Shared(LoaderDataset):
    """Base of both styles of data sets."""

    def __init__(
        self, batches: NumberedBatches, passes: Passes | None = None, slots: SharedSlots | None = None
    ) -> None:
        self.batches = batches
        self.passes = Passes(batches.seed) if passes is None else passes
        self.slots = SharedSlots() if slots is None else slots

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer that draws the batches, with the storage of the dataset."""
        return self.batches.buffer

    @property
    def batch_size(self) -> int:
        """The number of elements of a batch."""
        return self.batches.batch_size

    def __len__(self) -> int:
        """Return the number of batches of an epoch, of this rank; NoLengthError (a TypeError) for endless ones."""
        count = self.batches.count()
        if count is None:
            raise NoLengthError(
                f"a {type(self.buffer.sampler).__name__} has no epochs, and so no len()",
                hint="batches=N makes epochs of N batches",
            )
        return count

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`, also in workers that exist already."""
        require_number("the epoch", epoch, 0)
        self.passes.start_at(Start(self.passes.next.seed, epoch, 0))

    def feed(self, workers: int, *, persistent: bool) -> Feed:
        """Return the feed for a `TorchLoader`; UsageError for workers that cannot read the rows."""
        if persistent and self.batches.copied:
            raise UsageError(
                "persistent workers would keep a copy of rows that this process can write",
                hint="share the rows first: buffer.share()",
            )
        rows = getattr(self.buffer.storage, "device", None)
        if workers and isinstance(rows, torch.device) and rows.type == "cuda":
            raise UsageError(
                f"the rows are on {rows}, where the workers of a loader cannot read them", hint="write num_workers=0"
            )
        return _Numbers(TorchMapDataset(self.batches, self.passes, self.slots))

    def _serve_loader(self) -> None:
        """Prepare the calling `DataLoader`, if there is one; SchemaError (a RuntimeError) if it would batch batches."""
        if (fetcher := fetcher_asking(self)) is None:
            return
        if fetcher.auto_collation:
            refuse_batching()
        serve(fetcher, self.slots)


class TorchDataset(_Shared, IterableDataset[Any]):
    """An `IterableDataset` of batches; `torch_dataset` documents them.

    Every pass is the next epoch, with any number of workers, new or persistent.

    `state_dict()` is the state after the last batch that was taken; `load_state_dict` makes the next pass continue
    there. If that is the end of an epoch, the next pass has no batches, and the one after it is the next epoch. In a
    process whose loader has workers, `state_dict` raises SchemaError (a RuntimeError), because the workers are ahead of
    the training loop; use the state of `TorchLoader`, or of torchdata's `StatefulDataLoader`.
    """

    def __init__(self, batches: NumberedBatches) -> None:
        super().__init__(batches)
        self._place: Place | None = None
        self._loaded: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: yield the batches of an epoch, in a worker its part of them.

        After an error, such as a failed read, the iterator continues with the batch that failed.
        """
        self._serve_loader()
        worker = get_worker_info()
        again = worker is not None and self._place is not None
        place, self._loaded = self._loaded, None
        if place is None:
            start = self.passes.enter()
            number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
            place = Place(start._replace(batch=start.batch + number), number, step)
        self._place = place
        return RetryingIterator(partial(self._numbers, place, again), partial(self._made, place))

    def _numbers(self, place: Place, again: bool) -> Iterable[int]:
        """Start a pass; return the numbers of its batches."""
        if again and self.batches.copied:
            raise SchemaError(
                "persistent workers keep the copy of rows that they started with", hint="share the rows: buffer.share()"
            )
        start, _, step = place
        self.batches.begin(start.epoch)
        count = self.batches.count()
        return itertools.count(start.batch, step) if count is None else range(start.batch, count, step)

    def _made(self, place: Place, number: int) -> Any:
        start, _, step = place
        batch = self.batches.make(start._replace(batch=number))
        self._place = place._replace(next=start._replace(batch=number + step))
        return batch

    # State -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a few numbers and texts."""
        worker = get_worker_info()
        if worker is None and self.passes.by_workers:
            raise SchemaError(
                "the workers of a loader are ahead of the training loop: how many batches it took is not known here",
                hint="take the state_dict() of rbtool.TorchLoader(dataset, num_workers=N), or of StatefulDataLoader",
            )
        place = self._place or Place(self.passes.next)
        state = self.batches.state(place.next)
        return state if worker is None else state | {"worker": place.worker, "workers": place.workers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass continue from a state, with any number of workers.

        SchemaError (a RuntimeError), with nothing changed, for a state of other batches: of another dataset, batch
        size, sampler or rank; and for the state of a worker in another worker.
        """
        worker, workers = state_dict.get("worker", 0), state_dict.get("workers", 1)
        here = get_worker_info()
        own = (0, 1) if here is None else (here.id, here.num_workers)
        if workers > 1 and (worker, workers) != own:
            raise SchemaError(
                f"the state of worker {worker} of {workers} was loaded by worker {own[0]} of {own[1]}",
                hint="load the state of a loader with the loader, and as many workers",
            )
        start = self.batches.place_in(state_dict)
        if here is None:
            self._place = None
            self.passes.start_at(start)
            return
        self._loaded = Place(start if workers > 1 else start._replace(batch=start.batch + here.id), *own)
        self.passes.start_at(Start(start.seed, start.epoch + 1, 0), by_workers=True)

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`, also in workers that exist already."""
        super().set_epoch(epoch)
        self._place = None


class TorchMapDataset(_Shared, Dataset[Any]):
    """A map-style `Dataset` of batches: `dataset[k]` is batch `k` of the epoch that `set_epoch` chose, 0 at first.

    As with torch's `DistributedSampler`, call `set_epoch` before every epoch, since a `DataLoader` only passes numbers.
    The index may also be a pair of an epoch and a number, or a `Start`, which includes the seed. After an error a
    `DataLoader` continues with the next number, whereas `TorchLoader` requests the same batch again.
    """

    def __getitem__(self, index: int | tuple[int, int] | Start) -> Any:
        """Return a batch; IndexError for a number that the epoch does not have."""
        self._serve_loader()
        if not isinstance(index, Start):
            start = self.passes.next
            epoch, number = index if isinstance(index, tuple) else (start.epoch, index)
            index = Start(start.seed, epoch, number)
        count, number = self.batches.count(), index.batch
        if count is not None and not -count <= number < count:
            raise IndexError(f"batch is {number}, expected one of the {count} of an epoch")
        return self.batches.make(index if count is None else index._replace(batch=number % count))

    def __getitems__(self, index: list[int]) -> NoReturn:
        """Refuse to be batched: SchemaError (a RuntimeError)."""
        refuse_batching()

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the start of the epoch; only the loader knows which of its batches were taken."""
        return self.batches.state(self.passes.next._replace(batch=0))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the epoch of a state; SchemaError (a RuntimeError) for a state of other batches."""
        self.passes.start_at(self.batches.place_in(state_dict)._replace(batch=0))


def refuse_batching() -> NoReturn:
    """Raise SchemaError (a RuntimeError) for a loader that would make batches of batches."""
    raise SchemaError(
        "a DataLoader was to make batches of the batches of a torch dataset, which come from its sampler",
        hint=f"write {_LINE}",
    )


# Opening --------------------------------------------------------------------------------------------


@overload
def torch_dataset(
    dataset: PathLike | ReplayBuffer, batch_size: int | None = None, *,
    style: Literal["iterable"] = "iterable", sampler: Any = None, seed: int | None = None, drop_last: bool = False,
    batches: int | None = None, rank: int | None = None, world_size: int | None = None, transform: Any = None,
    windows: Mapping[Any, Any] | None = None, collate_fn: Callable[[Any], Any] | None = None, texts: bool = False,
    split_trajs: bool = False, verify: bool = False, root: PathLike | None = None,
) -> TorchDataset: ...  # fmt: skip
@overload
def torch_dataset(
    dataset: PathLike | ReplayBuffer, batch_size: int | None = None, *,
    style: Literal["map"], sampler: Any = None, seed: int | None = None, drop_last: bool = False,
    batches: int | None = None, rank: int | None = None, world_size: int | None = None, transform: Any = None,
    windows: Mapping[Any, Any] | None = None, collate_fn: Callable[[Any], Any] | None = None, texts: bool = False,
    split_trajs: bool = False, verify: bool = False, root: PathLike | None = None,
) -> TorchMapDataset: ...  # fmt: skip
@suggests_keywords()
def torch_dataset(
    dataset: PathLike | ReplayBuffer,
    batch_size: int | None = None,
    *,
    style: Style = "iterable",
    sampler: Any = None,
    seed: int | None = None,
    drop_last: bool = False,
    batches: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    transform: Any = None,
    windows: Mapping[Any, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    texts: bool = False,
    split_trajs: bool = False,
    verify: bool = False,
    root: PathLike | None = None,
) -> TorchDataset | TorchMapDataset:
    """Return the batches of a dataset, or of a buffer, as a data set for `DataLoader(…, batch_size=None)`.

    Batch k of an epoch depends only on the seed, the epoch and k: a `DataLoader` with 0, 1, 2 or more workers, of any
    start method, yields the same batches in the same order, and a run resumes at any batch at once. Workers map the
    files themselves; only the path is sent to them.

    - `dataset`: a path, `source:id`, or a buffer, whose sampler, batch size and transforms are used.
    - `batch_size`: the number of elements; for slices, of steps.
    - `style`: `iterable`, where every pass is the next epoch, or `map`, where `dataset[k]` is batch k of an epoch.
    - `sampler`: by default `SamplerWithoutReplacement()`. With a sampler that has epochs, no element (or trajectory) is
      drawn twice in an epoch. Any other sampler draws without end, or in epochs of `batches` batches.
    - `drop_last`: whether the incomplete rounds at the end of an epoch are left out.
    - `rank`, `world_size`: which part of every epoch this process gets; by default those of `torch.distributed` if it
      is initialized, else those in the variables `RANK` and `WORLD_SIZE`, which torchrun sets. All ranks get the same
      number of batches, and no element is drawn twice: see `Shard` for the last round. They need the same `seed`.
    - `seed`: by default a fresh seed is drawn. The state includes it.
    - `transform`, `windows`, `collate_fn`, `texts`, `split_trajs`, `verify`, `root`: as for `load_dataset`.

    UsageError (a ValueError) for a sampler whose batches depend on earlier ones or on priorities, for several ranks
    without a seed, and for invalid arguments; SchemaError (a RuntimeError) for a batch size that is not a multiple of
    the slice length, and for a dataset with too few elements for a batch; the errors of `load_dataset`.

    >>> import rbtool
    >>> storage = rbtool.TensorStorage(torch.arange(10))
    >>> buffer = rbtool.ReplayBuffer(storage=storage, sampler=rbtool.SamplerWithoutReplacement())
    >>> batches = torch_dataset(buffer, 4, seed=0)
    >>> [len(batch) for batch in batches]
    [4, 4, 2]
    """
    if style not in ("iterable", "map"):
        raise UsageError(f"style is {style!r}, expected 'iterable' or 'map'")
    for name, value in (("batches", batches), ("batch_size", batch_size)):
        if value is not None:
            require_number(name, value, 1)
    shard = shard_of_process(rank, world_size)
    if seed is None and shard.ranks > 1:
        raise UsageError(f"{shard.ranks} ranks have no seed in common, and would draw the same elements", hint="seed=0")
    seed = secrets.randbits(63) if seed is None else require_seed(seed)
    options = {"transform": transform, "collate_fn": collate_fn, "root": root}
    options |= {} if windows is None else {"windows": windows}
    options |= {"texts": True} if texts else {}
    buffer = _opened(dataset, batch_size, sampler, options | {"split_trajs": split_trajs, "verify": verify})
    size = buffer.batch_size if batch_size is None else batch_size
    if size is None:
        raise UsageError("no batch size is known", hint="torch_dataset(…, batch_size=256)")
    numbered = NumberedBatches(buffer, size, seed=seed, shard=shard, batches=batches, drop_last=drop_last)
    if style == "iterable":
        return TorchDataset(numbered)
    if numbered.count() is None:
        raise UsageError(
            f"style='map' needs epochs, and a {type(buffer.sampler).__name__} has none",
            hint="batches=N makes epochs of N batches",
        )
    return TorchMapDataset(numbered)


def _opened(dataset: Any, batch_size: int | None, sampler: Any, options: dict[str, Any]) -> ReplayBuffer:
    """Open a dataset, or return a given buffer; UsageError for options that the buffer already has."""
    if isinstance(dataset, ReplayBuffer):
        given = [name for name, value in ({"sampler": sampler} | options).items() if value not in (None, False)]
        if given:
            raise UsageError(f"{', '.join(given)} is set, expected in the buffer, which has its own")
        return dataset
    buffer = load_dataset(dataset, batch_size, sampler=sampler, seed=0, **options)
    if sampler is None and not isinstance(buffer.storage, StorageEnsemble):
        buffer.set_sampler(SamplerWithoutReplacement())
    return buffer


def shard_of_process(rank: int | None, world_size: int | None) -> Shard:
    """Return the share of this process: by the arguments, or the process group, or torchrun's variables."""
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size is {world_size}, expected both or none")
    if rank is None or world_size is None:
        rank, world_size = _own_rank()
    rank, world_size = require_number("rank", rank, 0), require_number("world_size", world_size, 1)
    if rank >= world_size:
        raise UsageError(f"rank is {rank} of {world_size}, expected a number from 0 to world_size - 1")
    return Shard(rank, world_size)


def _own_rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
