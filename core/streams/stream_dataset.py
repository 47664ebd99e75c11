"""Streams as data sets of `torch.utils.data`: every worker of every rank has its own shards."""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_convert, get_worker_info

from ..buffers.data_loader import SharedSlots, fetcher_asking, serve
from ..buffers.replay_buffer import ReplayBuffer
from ..errors import EmptyPartError, SchemaError, UsageError, require_number, require_seed
from ..loading.torch_dataset import (
    Feed,
    LoaderDataset,
    Passes,
    RetryingIterator,
    Start,
    refuse_batching,
    shard_of_process,
)
from ..samplers.stream import Part, StreamSampler, places_left
from ..storages.dataset import StreamStorage
from ..ted.schema import Numbers

_WORKERS, _TURN, _LEFT = "workers", "turn", "left"
_OF_PART = {"part", "parts", "round", "taken", "drawn", "epoch", _LEFT, "_ran_out"}
"""The entries of a state that differ between the parts of an epoch."""


class _Saved(NamedTuple):
    """A loaded state: those of the workers of a rank or, if `divided`, one of the rest of an epoch, to be divided."""

    states: Sequence[Mapping[str, Any]]
    divided: bool = False
    turn: int = 0

    def of(self, part: Part) -> Mapping[str, Any]:
        """Return the state of a part; any other state if there is none."""
        if self.divided:
            return {**self.states[0], "part": part.number, "parts": part.of}
        own = (one for one in self.states if (one.get("part"), one.get("parts")) == part)
        return next(own, self.states[0])


class StreamDataset(LoaderDataset, IterableDataset[Any]):
    """An `IterableDataset` of the batches of a stream, for `TorchLoader` or `DataLoader(…, batch_size=None)`.

    The shards of an epoch are divided among the ranks, and the shards of a rank among its workers: together they draw
    every element once. The batches of a worker depend only on the seed, the epoch, the number of workers and its own
    number. The number of batches of a rank depends on its shards, so that ranks can differ; a worker without a shard
    has no batches. Every pass is the next epoch.

    `Part(number, of)` describes the shards of a worker: in the order of the epoch, every `of`-th from `number` on. With
    2 ranks of 2 workers each, worker w of rank r has the part r + 2 w of 4:

        shards in the order of the epoch    5 2 7 0 | 3 6 1 4
        rank 0   worker 0 (part 0)          5         3
                 worker 1 (part 2)              7         1
        rank 1   worker 0 (part 1)            2         6
                 worker 1 (part 3)                0         4

    - `buffer`: what `load_dataset(…, streaming=True)` returns, without `prefetch`; its sampler, batch size and
      transforms are taken.
    - `seed`: without one a fresh seed is drawn; ranks need the same one.
    - `rank`, `world_size`: as for `torch_dataset`.

    `state_dict()` is the place after the last batch that this process took, a few numbers; the state of a `TorchLoader`
    has the places of its workers. `load_state_dict` makes the next pass continue there. A single state is for the same
    rank, with as many ranks and workers. A list with the states of all ranks is for any number of ranks and workers:
    the rest of the epoch is divided anew, so that every element is drawn once, in an order that depends on the states.
    If the state is the one after the last batch of an epoch, the next pass has no batches.

    UsageError (a ValueError) for another buffer, for one without a batch size, for ranks without a seed and for more
    ranks than there are shards; SchemaError (a RuntimeError) for a state of another part, or a list without all parts.
    """

    def __init__(
        self, buffer: ReplayBuffer, *, seed: int | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        sampler, storage = getattr(buffer, "sampler", None), getattr(buffer, "storage", None)
        if not isinstance(sampler, StreamSampler) or not isinstance(storage, StreamStorage):
            raise UsageError(
                f"expected a stream, found a {type(buffer).__name__}",
                hint="rbtool.load_dataset(…, streaming=True); rbtool.torch_dataset takes other buffers",
            )
        if buffer.batch_size is None:
            raise UsageError("no batch size is known", hint="load_dataset(…, batch_size=256, streaming=True)")
        sampler.check_batch_size(buffer.batch_size)
        if buffer.batches_ahead:
            raise UsageError("the stream has prefetch, expected none: workers make batches ahead", hint="leave it out")
        self.buffer = buffer
        self._sampler = sampler
        self._shards = storage.shards
        self._rank = shard_of_process(rank, world_size)
        if seed is None and self._rank.ranks > 1:
            raise UsageError(f"{self._rank.ranks} ranks have no seed in common", hint="seed=0")
        shards = len(storage.shards)
        if shards < self._rank.ranks:
            raise UsageError(f"there are {shards} shards for {self._rank.ranks} ranks, one each is needed")
        self.slots = SharedSlots()
        self.passes = Passes(secrets.randbits(63) if seed is None else require_seed(seed))
        self._loads, self._saved = 0, _Saved(())
        self._own: Mapping[str, Any] | None = None  # a state that was loaded in this worker itself
        self._before: Mapping[str, Any] | None = None  # the place of a batch that is being made, or that failed
        self._entered = False

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: yield the batches of an epoch, in a worker the batches of its shards."""
        return self.enter(fetcher_asking(self), self._next_of)

    def enter(self, fetcher: Any, make: Callable[[Iterator[Any]], Any]) -> Iterator[Any]:
        """Start a pass, for a fetcher of a `DataLoader` if there is one; `make` takes the next batch of an iterator."""
        if fetcher is not None:
            if fetcher.auto_collation:
                refuse_batching()
            serve(fetcher, self.slots)
        self._entered = True
        self.buffer.settle()  # a worker begins an epoch of its own
        own, self._own = self._own, None
        worker, workers = _worker()
        if own is None:
            start = self.passes.enter()
            self.go_to(start, (worker + self.turn_of(start)) % workers, workers)
        else:
            self._load(own, self._part(worker, workers))  # again: other passes may have moved the sampler
        if self._sampler.ran_out:
            return iter(())
        batches = iter(self.buffer if self._sampler.part.number < len(self._shards) else ())
        return RetryingIterator(itertools.count, lambda _: make(batches))

    def _part(self, worker: int, workers: int) -> Part:
        """Return the part of all shards that a worker reads; the shards of a rank do not depend on its workers."""
        return Part(self._rank.rank + self._rank.ranks * worker, self._rank.ranks * workers)

    def _next_of(self, batches: Iterator[Any]) -> Any:
        self._before = self._sampler.state_dict()
        try:
            batch = next(batches, self)
        except EmptyPartError:  # raised before the first batch if no shard of this part has a step
            if self._sampler.part.of == 1 and self._before["left"] is None:
                raise
            batch = self
        epoch, self._before = self._before["epoch"], None
        drawn_of = self._sampler.epoch - self._sampler.ran_out
        if batch is not self and drawn_of != epoch:
            # The state was saved with smaller batches: the rest of the epoch is too small for one of this size, so
            # that the sampler has moved on to the next epoch. Undo that: the batch belongs to the next pass.
            self._forget()
            self._sampler.go_to(self._sampler.seed or 0, drawn_of, self._sampler.part)
            batch = self
        if batch is self:
            raise StopIteration
        return batch

    def next_with_place(self, batches: Iterator[Any]) -> tuple[Any, torch.Tensor]:
        """Return the next batch, and the place after it as JSON in a tensor, uint8 `[n]`."""
        batch = self._next_of(batches)
        place = {name: value for name, value in self._here.items() if name != _LEFT}  # long, and the same for all
        return batch, torch.frombuffer(bytearray(json.dumps(place).encode()), dtype=torch.uint8)

    def go_to(self, start: Start, worker: int = 0, workers: int = 1) -> dict[str, Any]:
        """Go to the place where a worker starts a pass, in a new epoch or a loaded state; return the state there."""
        part = self._part(worker, workers)
        if not start.batch:
            self._forget()
            self._sampler.go_to(start.seed, start.epoch, part)
        elif start.batch == self._loads:
            self._load(self._saved.of(part), part)
        else:
            raise SchemaError("a state was loaded after the workers started, which do not have it")
        return self._here

    def turn_of(self, start: Start) -> int:
        """Return the number of the worker with the first batch of a pass."""
        return self._saved.turn if start.batch else 0

    def _forget(self) -> None:
        """Discard a batch that could not be made."""
        self._before = None
        self.buffer.forget_drawn()

    # State -------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`."""
        require_number("the epoch", epoch, 0)
        self.passes.start_at(Start(self.passes.next.seed, epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch of this process."""
        if get_worker_info() is None and self.passes.by_workers:
            raise SchemaError(
                "the workers of a loader are ahead of the training loop: which batches it took is not known here",
                hint="take the state_dict() of rbtool.TorchLoader(dataset, num_workers=N), or of StatefulDataLoader",
            )
        if not self._entered:
            self.go_to(self.passes.next)
        return self._here

    @property
    def _here(self) -> dict[str, Any]:
        state = self._before or self._sampler.state_dict()
        plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        return {"identity": self._shards.identity, **plain}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Make the next pass continue from a state of this rank, or from a list of the states of all ranks.

        SchemaError, with nothing changed, for states of other data or another part, and for lists without all parts.
        """
        if get_worker_info() is None:
            self.load_for(state_dict)
            return
        assert isinstance(state_dict, Mapping)  # from torchdata's loader, which stores a state for each worker
        self._load(state_dict, self._part(*_worker()))
        epoch = self._sampler.epoch + (not self._sampler.ran_out)
        self.passes.start_at(Start(int(state_dict["seed"]), epoch, 0), by_workers=True)
        self._own, self._entered = dict(state_dict), True

    def load_for(self, given: Mapping[str, Any] | Sequence[Mapping[str, Any]], workers: int = 1) -> None:
        """Load a state, or the states of all ranks, for the next pass of a loader with this number of workers."""
        divided = not isinstance(given, Mapping)
        ranks: list[Any] = [given] if isinstance(given, Mapping) else list(given)
        states = [state for rank in ranks if isinstance(rank, Mapping) for state in _states_of(rank)]
        if not states or not all(isinstance(one, Mapping) for one in (*ranks, *states)):
            raise SchemaError("there is no state to continue from", hint="one state of each rank, in a list")
        if any(state.get("identity") != self._shards.identity for state in states):
            raise SchemaError(f"the state belongs to other data than {self._shards.address}")
        if divided:
            states = [remainder_of(states, len(self._shards))]
        elif len(states) != workers:
            raise SchemaError(
                f"the state is of {len(states)} workers, this loader has {workers}",
                hint="the states of all ranks, in a list, are for any number of workers",
            )
        saved = _Saved(states, divided, int(ranks[0].get(_TURN, 0)) * (not divided))
        before, part = self._sampler.state_dict(), self._sampler.part
        try:
            for worker in reversed(range(workers)):
                self._load(saved.of(self._part(worker, workers)), self._part(worker, workers))
        except SchemaError:
            self._sampler.part = part
            self._sampler.load_state_dict(before)
            raise
        self._saved, self._loads, self._entered = saved, self._loads + 1, workers == 1
        epoch = min(int(state["epoch"]) - bool(state["_ran_out"]) for state in states)
        self.passes.start_at(Start(int(states[0]["seed"]), epoch, self._loads))

    def _load(self, state: Mapping[str, Any], part: Part) -> None:
        if state.get("identity") != self._shards.identity:
            raise SchemaError(f"the state belongs to other data than {self._shards.address}")
        before = self._sampler.part
        self._sampler.part = part
        try:
            self._sampler.load_state_dict({name: value for name, value in state.items() if name != "identity"})
        except SchemaError:
            self._sampler.part = before
            raise
        self._forget()

    def feed(self, workers: int, *, persistent: bool) -> Feed:
        """Return the feed for a `TorchLoader`."""
        return _Parts(self, max(1, workers))


def _states_of(rank: Mapping[str, Any]) -> list[Any]:
    """Return the states of the workers of a rank; the entry `left`, which is stored once for the rank, goes to each."""
    shared = {_LEFT: rank[_LEFT]} if _LEFT in rank else {}
    return [{**shared, **one} if isinstance(one, Mapping) else one for one in rank.get(_WORKERS, [rank])]


def _worker() -> tuple[int, int]:
    """Return the number of this worker, and the number of workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class _Place(NamedTuple):
    """The place of a loader in a pass: the epoch, the state of each worker, and the worker with the next batch."""

    epoch: int
    states: tuple[Mapping[str, Any], ...]
    turn: int


class _Placed(IterableDataset[Any]):
    """Yields the batches of a stream, each with the place of its worker after the batch."""

    def __init__(self, dataset: StreamDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        fetcher = fetcher_asking(self)
        if fetcher is not None and fetcher.collate_fn is not default_convert:
            fetcher.collate_fn = partial(_collated, fetcher.collate_fn)
        return self.dataset.enter(fetcher, self.dataset.next_with_place)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)


def _collated(collate: Callable[[Any], Any], found: tuple[Any, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    return collate(found[0]), found[1]


class _Parts(Feed):
    """Feeds a loader with a stream: keeps the states of all workers, which arrive with their batches."""

    def __init__(self, dataset: StreamDataset, workers: int) -> None:
        self._stream, self._workers = dataset, workers
        self.dataset = _Placed(dataset)
        self._arrived: deque[Mapping[str, Any]] = deque()
        self._begun: _Place | None = None

    def next(self) -> _Place:
        start = self._stream.passes.next
        states = [self._stream.go_to(start, worker, self._workers) for worker in range(self._workers)]
        return _Place(start.epoch, tuple(states), self._stream.turn_of(start))

    def begin(self) -> _Place:
        self._begun = self.next()
        return self._begun

    def start(self, place: _Place) -> None:
        begun, self._begun = self._begun, None
        if place is not begun:
            self.load(self.state(place))

    def received(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._arrived.clear()
        for batch, place in batches:
            self._arrived.append(json.loads(bytes(place.numpy())))
            yield batch

    def after(self, place: _Place) -> _Place:
        state = self._arrived.popleft()
        if state["epoch"] - state["_ran_out"] != place.epoch:
            raise SchemaError(f"a batch is of another epoch than {place.epoch}: two passes of the loader began at once")
        parts = [(one["part"], one["parts"]) for one in place.states]
        number = parts.index((state["part"], state["parts"]))
        known = {_LEFT: None if state["_ran_out"] else place.states[number][_LEFT]}
        states = (*place.states[:number], {**state, **known}, *place.states[number + 1 :])
        return _Place(place.epoch, states, (number + 1) % self._workers)

    def state(self, place: _Place) -> dict[str, Any]:
        left = next((one[_LEFT] for one in place.states if one[_LEFT] is not None), None)
        own = [{name: value for name, value in one.items() if name != _LEFT or value != left} for one in place.states]
        return {_WORKERS: own, _TURN: place.turn, _LEFT: left}  # `left` is long, so it is stored once

    def load(self, state: Any) -> None:
        self._stream.load_for(state, self._workers)


# What is left of an epoch


def remainder_of(states: Sequence[Mapping[str, Any]], shards: int) -> dict[str, Any]:
    """Return the state of a `StreamSampler` that draws the rest of an epoch.

    A part that has drawn the last batch of the epoch, also if it has not begun the next one, has nothing left.

    Args:
        states: the states of all parts of an epoch, in any order, with lists in place of tensors.
        shards: the number of shards of the stream.

    Raises:
        SchemaError: (a RuntimeError) parts are missing or occur twice, or the states are not of one epoch.
    """
    first = states[0]
    if missing := _OF_PART - set().union(*states) or {name for state in states for name in first.keys() - state.keys()}:
        raise SchemaError(f"{', '.join(sorted(missing))} is missing in the state of a stream")
    common = _common(states)
    _check_parts([Part(int(state["part"]), int(state["parts"])) for state in states])
    for state in states:
        _check_counts(state, shards)
    epochs = [int(state["epoch"]) - bool(state["_ran_out"]) for state in states]
    epoch = min(epochs)
    active = [state for state, number in zip(states, epochs, strict=True) if number == epoch and not state["_ran_out"]]
    for state, number in zip(states, epochs, strict=True):
        begun = state["_ran_out"] or state["round"] or state["taken"] or state["left"] is not None
        if number > epoch + 1 or (number > epoch and begun):
            raise SchemaError(f"the states are of the epochs {epoch} and {number}, expected one epoch")
    if any(state["left"] != active[0]["left"] for state in active):
        raise SchemaError("the states are of two divisions of an epoch, expected one")
    divided = active[0]["left"] if active else []
    places, drawn = places_left(None if divided is None else np.array(divided, np.int64).reshape(-1, 3), shards)
    found = [_left_of(state, places, drawn) for state in active]
    left = _runs(*np.concatenate([np.empty((2, 0), np.int64), *found], 1))
    return common | {"epoch": epoch, "round": 0, "taken": 0, "drawn": [], "left": left.tolist(), "_ran_out": False}


def _check_counts(state: Mapping[str, Any], shards: int) -> None:
    """Raise SchemaError for a state with impossible numbers."""
    first, stop, before = np.array(state[_LEFT] or [], np.int64).reshape(-1, 3).T
    drawn = np.array(state["drawn"], np.int64)
    sound = ((first >= 0) & (first < stop) & (stop <= shards) & (before >= 0)).all() and (drawn >= 0).all()
    if not sound or len(drawn) != state["window"] or int(state["round"]) < 0:
        raise SchemaError(f"the state of part {state['part']} of {state['parts']} contradicts itself")


def _common(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that all states share; None in a state means that an entry is not known there yet."""
    found: dict[str, Any] = {}
    for name in states[0].keys() - _OF_PART:
        values = {state[name] for state in states} - {None}
        if len(values) > 1:
            said = " and ".join(sorted(f"{name}={value!r}" for value in values))
            raise SchemaError(f"the states are of different streams: they have {said}")
        found[name] = values.pop() if values else None
    return found


def _check_parts(parts: Sequence[Part]) -> None:
    """Raise SchemaError unless every shard is in exactly one part."""
    for part in parts:
        if not 0 <= part.number < part.of:
            raise SchemaError(f"a state is of part {part.number} of {part.of}")
    seen = set[Part]()
    for part in parts:
        if part in seen:
            raise SchemaError(f"two states have the same shards: part {part.number} of {part.of}")
        seen.add(part)
    # Comparing all pairs takes 84 s for 4,096 ranks, so only if the states are of different divisions.
    for one, other in itertools.combinations(parts, 2) if len({part.of for part in parts}) > 1 else ():
        if (one.number - other.number) % math.gcd(one.of, other.of) == 0:
            raise SchemaError(
                f"two states have the same shards: part {one.number} of {one.of} and part {other.number} of {other.of}"
            )
    if sum(Fraction(1, part.of) for part in parts) != 1:
        given = ", ".join(f"{part.number} of {part.of}" for part in sorted(parts))
        raise SchemaError(
            f"there are states of part {given}, expected all parts", hint="one state of each rank, in a list"
        )


def _left_of(state: Mapping[str, Any], places: Numbers, drawn: Numbers) -> Numbers:
    """Return the unfinished places of a part, which are positions of shards, and the elements drawn; int64 `[2, n]`."""
    own = slice(int(state["part"]), None, int(state["parts"]))
    counts = np.array(state["drawn"], np.int64)
    found = np.stack([places[own], drawn[own]])
    first = int(state["round"]) - len(counts) + 1
    known = found[1, max(0, first) : first + len(counts)]
    known += counts[max(0, -first) :][: len(known)]
    return found[:, max(0, first) :]


def _runs(places: Numbers, drawn: Numbers) -> Numbers:
    """Return runs of consecutive places with the same number of drawn elements, in the form of `places_left`."""
    order = np.argsort(places)
    places, drawn = places[order], drawn[order]
    starts = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(drawn, prepend=-1) != 0))
    stops = np.append(starts, len(places))[1:]
    return np.stack([places[starts], places[stops - 1] + 1, drawn[starts]], 1)
