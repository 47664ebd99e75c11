"""Data sets of `torch.utils.data` over datasets and buffers: iterable, or with batches by number."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..buffers.data_loader import SharedSlots, fetcher_asking, serve
from ..buffers.replay_buffer import ReplayBuffer
from ..datasets.load_dataset import load_dataset
from ..errors import NoLengthError, SchemaError, UsageError, suggests_keywords
from ..samplers.uniform import SamplerWithoutReplacement
from ..storages.ensemble import StorageEnsemble
from .numbered_batches import NumberedBatches, Shard
from .passes import Passes, Start

Style: TypeAlias = Literal["iterable", "map"]

_LINE = "DataLoader(dataset, batch_size=None)"


class Place(NamedTuple):
    """The next batch of a process: of a worker, every `workers`-th from its own on."""

    next: Start
    worker: int = 0
    workers: int = 1


class Retried(Iterator[Any]):
    """Yields what `make` returns for each of the numbers that `start` returns; one that fails is made again next."""

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


class _Shared:
    """What both kinds of data sets do."""

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
                f"a {type(self.buffer.sampler).__name__} has no epochs: there is no len()",
                hint="batches=N makes epochs of N batches",
            )
        return count

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`, also in workers that exist already."""
        check_number("the epoch", epoch, 0)
        self.passes.start_at(Start(self.passes.next.seed, epoch, 0))

    def _serve_loader(self) -> None:
        """Prepare the loader that asks, if one does; SchemaError (a RuntimeError) for one that batches batches."""
        if (fetcher := fetcher_asking(self)) is None:
            return
        if fetcher.auto_collation:
            refuse_batching()
        serve(fetcher, self.slots)


class TorchDataset(_Shared, IterableDataset[Any]):
    """An `IterableDataset` of batches; `torch_dataset` documents them.

    Every pass is another epoch, in order, with any number of workers, new or persistent.

    `state_dict()` is the state after the last batch that was taken, and `load_state_dict` continues there with the next
    pass: after the last batch of an epoch, that pass has no batch, and the next one is the next epoch. In a process
    whose loader has workers it raises SchemaError (a RuntimeError), because they are ahead of the training loop:
    `TorchLoader` has the state, and so has torchdata's `StatefulDataLoader`.
    """

    def __init__(self, batches: NumberedBatches) -> None:
        super().__init__(batches)
        self._place: Place | None = None
        self._loaded: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: yield the batches of an epoch, in a worker its part of them.

        A batch that cannot be made, as when a read fails, is the next one again: the iterator continues with it.
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
        return Retried(partial(self._numbers, place, again), partial(self._made, place))

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
        """Return the state: numbers and texts, few of them."""
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
        """Continue from a state with the next pass, with any number of workers.

        SchemaError (a RuntimeError), with nothing changed, for a state of other batches: of another dataset, batch
        size, sampler or rank; and for the state of one of several workers in any other worker.
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

    As with torch's `DistributedSampler`, call `set_epoch` before every epoch: a loader asks for numbers alone. A pair
    of an epoch and a number is taken too, and a `Start`, with the seed. A `DataLoader` that catches the error of one
    batch continues with the number after it; `TorchLoader` asks for it again.
    """

    def __getitem__(self, index: int | tuple[int, int] | Start) -> Any:
        """Return a batch; IndexError for one that an epoch does not have."""
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
        """Return the epoch; which of its batches were taken is known to the loader."""
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
    dataset: str | os.PathLike[str] | ReplayBuffer, batch_size: int | None = None, *,
    style: Literal["iterable"] = "iterable", sampler: Any = None, seed: int | None = None, drop_last: bool = False,
    batches: int | None = None, rank: int | None = None, world_size: int | None = None, transform: Any = None,
    collate_fn: Callable[[Any], Any] | None = None, split_trajs: bool = False, verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> TorchDataset: ...  # fmt: skip
@overload
def torch_dataset(
    dataset: str | os.PathLike[str] | ReplayBuffer, batch_size: int | None = None, *,
    style: Literal["map"], sampler: Any = None, seed: int | None = None, drop_last: bool = False,
    batches: int | None = None, rank: int | None = None, world_size: int | None = None, transform: Any = None,
    collate_fn: Callable[[Any], Any] | None = None, split_trajs: bool = False, verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> TorchMapDataset: ...  # fmt: skip
@suggests_keywords()
def torch_dataset(
    dataset: str | os.PathLike[str] | ReplayBuffer,
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
    collate_fn: Callable[[Any], Any] | None = None,
    split_trajs: bool = False,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> TorchDataset | TorchMapDataset:
    """Return the batches of a dataset, or of a buffer, as a data set for `DataLoader(…, batch_size=None)`.

    Batch k of an epoch depends on the seed, the epoch and k alone: a `DataLoader` with 0, 1, 2 or more workers, of any
    start method, yields the same batches in the same order, and a stream continues from any batch at once. Workers map
    the files themselves; only the path is sent to them.

    - `dataset`: a path, `source:id`, or a buffer, whose sampler, batch size and transforms are taken.
    - `batch_size`: the number of elements; for slices, of steps.
    - `style`: `iterable`, where every pass is the next epoch, or `map`, where `dataset[k]` is batch k of an epoch.
    - `sampler`: by default `SamplerWithoutReplacement()`. With one that has epochs, no element (or trajectory) comes
      twice in an epoch. Any other draws without end, or in epochs of `batches` batches.
    - `drop_last`: whether the incomplete rounds at the end of an epoch are left out.
    - `rank`, `world_size`: which part of every epoch this process gets; by default as `torch.distributed` states if it
      is initialized, else as the variables `RANK` and `WORLD_SIZE` state, which torchrun sets. All ranks have the same
      number of batches and no element twice: see `Shard` for the last round. They need the same `seed`.
    - `seed`: without one a fresh seed is drawn. The state has it.
    - `transform`, `collate_fn`, `split_trajs`, `verify`, `root`: as for `load_dataset`.

    UsageError (a ValueError) for a sampler whose batches depend on those before or on priorities, for several ranks
    without a seed, and for arguments that make no sense; SchemaError (a RuntimeError) for a batch size that slices do
    not divide, and where nothing can be added and the elements do not make a batch; the errors of `load_dataset` for
    what cannot be opened.

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
            check_number(name, value, 1)
    shard = shard_of_process(rank, world_size)
    if seed is None and shard.ranks > 1:
        raise UsageError(f"{shard.ranks} ranks have no seed in common, and would draw the same elements", hint="seed=0")
    seed = secrets.randbits(63) if seed is None else seed
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed is {seed!r}, expected a number of 64 bits without sign")
    options = {"transform": transform, "collate_fn": collate_fn, "root": root}
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
    """Open a dataset, or return the buffer that was given; UsageError for options that a buffer has already."""
    if isinstance(dataset, ReplayBuffer):
        given = [name for name, value in ({"sampler": sampler} | options).items() if value not in (None, False)]
        if given:
            raise UsageError(f"{', '.join(given)} is set, expected in the buffer, which has its own")
        return dataset
    buffer = load_dataset(dataset, batch_size, sampler=sampler, seed=0, **options)
    if sampler is None and not isinstance(buffer.storage, StorageEnsemble):
        buffer.set_sampler(SamplerWithoutReplacement())
    return buffer


def check_number(name: str, value: Any, least: int) -> None:
    """Raise UsageError (a ValueError) for anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}, expected a number from {least}")


def shard_of_process(rank: int | None, world_size: int | None) -> Shard:
    """Return the part of this process, as given, of the process group, or of torchrun's variables."""
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size is {world_size}, expected both or none")
    if rank is None or world_size is None:
        rank, world_size = _own_rank()
    if world_size < 1 or not 0 <= rank < world_size:
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
