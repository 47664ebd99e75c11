"""Samplers of a `StreamStorage`: epochs that need only a few shards at a time.

An epoch is a sequence of rounds. With a window of three shards, the elements of each shard, in random order, are spread
over three rounds, and the elements of a round are shuffled together:

    round       0     1     2     3     4    …
    shard A   [A0]  [A1]  [A2]
    shard B         [B0]  [B1]  [B2]
    shard C               [C0]  [C1]  [C2]         round 2 is a shuffle of A2, B1 and C0

Batches are taken from one round after another. All orders are functions of (seed, epoch, number of the round or shard),
so that the state is the position of the next element: epoch, round, and how many elements of the round were taken. A
round mixes shards but keeps the order within each shard. The elements drawn of a shard are therefore always the first
ones of its order: one count for each shard says what is left of an epoch, and the rest can be divided among another
number of parts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase

from ..errors import (
    EmptyPartError,
    SchemaError,
    UsageError,
    keywords_of,
    require_flags,
    require_keywords,
    require_number,
)
from ..kernels.slices import SliceRule, scaled
from ..storages.base import Storage
from ..storages.dataset import StreamStorage
from ..ted.schema import Numbers, as_key
from .base import Index, Sampler
from .slices import SliceEnds, SliceMarks, SliceMeasure
from .uniform import permutation, seed_of

_SHARDS, _ELEMENTS, _ROUND, _STARTS = range(4)
"""What the random numbers are for: part of the key of their seed, so that all orders are independent."""


class Part(NamedTuple):
    """Part `number` of `of` equal parts of all shards, for a rank or one of its workers."""

    number: int = 0
    of: int = 1


class StreamSampler(Sampler):
    """Draws every element of a stream once in an epoch, in an order that needs at most `window + 1` shards at a time.

    Shards come in random order, and the elements of `window` shards at a time are shuffled together; the docstring of
    the module has a picture. `ran_out` is True from the last batch of an epoch until the next batch. The state is a few
    numbers: a sampler that loads it continues with the very next element, as soon as the shards of its window are
    there.

    Args:
        shuffle: False keeps the order of the dataset.
        drop_last: whether to drop an incomplete batch at the end of an epoch.
        window: how many shards are shuffled together.
        ahead: how many more shards are fetched in the background.
        seed: the order depends on it and the epoch alone; by default it is drawn with the first batch.
        part: `(number, of)` takes every `of`-th shard of the epoch's order, beginning with shard `number`. `of`
            samplers with the same seed together draw every element exactly once.

    Raises:
        UsageError: (a ValueError) an argument is invalid.
        SchemaError: (a RuntimeError) from `sample`: the storage is not a stream, or this part has no shard.
    """

    has_epochs: ClassVar[bool] = True
    replacement: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    draws_trajectories: ClassVar[bool] = False
    """Whether each element of an epoch is a whole trajectory; the counts in a state are of these elements."""

    def __init__(
        self,
        *,
        shuffle: bool = True,
        window: int = 4,
        drop_last: bool = False,
        ahead: int = 2,
        seed: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        for name, value, least in (("window", window, 1), ("ahead", ahead, 0), ("seed", seed or 0, 0)):
            require_number(name, value, least)
        require_flags(shuffle=shuffle, drop_last=drop_last)
        if not 0 <= part[0] < part[1]:
            raise UsageError(f"part is {part[0]} of {part[1]}, expected a number from 0")
        self.shuffle = shuffle
        self.window = window if shuffle else 1
        self.drop_last = drop_last
        self.ahead = ahead
        self.seed = seed
        self.part = Part(*part)
        self._given_seed = seed
        self._left: Numbers | None = None
        self.reset()

    def reset(self) -> None:
        """Return to the beginning of the first epoch."""
        self.seed = self._given_seed
        self._shards: int | None = None
        self._ran_out = False
        self._start(0)

    def go_to(self, seed: int, epoch: int, part: Part) -> None:
        """Go to the beginning of an epoch, of another seed or part."""
        self.seed, self.part = seed, part
        self._ran_out = False
        self._start(epoch)

    def _start(
        self, epoch: int, round_: int = 0, taken: int = 0, drawn: Mapping[int, int] = MappingProxyType({}),
        left: Numbers | None = None,
    ) -> None:  # fmt: skip
        """Go to a position in an epoch.

        Args:
            epoch: the epoch.
            round_: the number of the round.
            taken: how many elements of the round were drawn.
            drawn: how many elements of each shard of the round were drawn, by the shard's position in the order.
            left: the rest of an epoch that the parts divide, see `places_left`; default the whole epoch.
        """
        self.epoch, self._round, self._taken, self._left = epoch, round_, taken, left
        self._drawn = dict(drawn)
        self._pools: deque[_Pool] = deque()  # the rounds from `_round` on; of the first, `_taken` elements are drawn
        self._order: _Order | None = None
        self._shard_elements: dict[int, Numbers] = {}
        self._started = bool(round_ or taken)

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw the next `batch_size` elements of the epoch, or what is left of it."""
        return torch.from_numpy(self._next(self._stream(storage), batch_size)), {}

    def _stream(self, storage: Storage) -> StreamStorage:
        """Return the storage if it is a stream with a shard in this part; otherwise raise SchemaError."""
        if not isinstance(storage, StreamStorage):
            raise SchemaError(f"a {type(self).__name__} draws from a stream, found a {type(storage).__name__}")
        count = len(storage.shards)
        if count <= self.part.number:
            raise SchemaError(
                f"{storage.shards.address} has {count} shard{'s' * (count != 1)}, and part {self.part.number} of "
                f"{self.part.of} has none"
            )
        if self._shards is not None and self._shards != count:
            raise SchemaError(f"the state belongs to a stream with {self._shards} shards, this one has {count}")
        self._shards = count
        if self.seed is None:
            device = None if self.generator is None else self.generator.device
            self.seed = int(torch.randint(2**63 - 1, (), generator=self.generator, device=device))
        return storage

    def _next(self, stream: StreamStorage, count: int) -> Numbers:
        """Take the next `count` elements of the epoch, `[n, ...]`, fewer at its end; sets `ran_out`."""
        least = count if self.drop_last else 1
        # Also prepare the elements after this batch, which decide whether it is the last one: if a shard cannot be
        # read, this fails before anything is taken.
        there = self._fill(stream, count + least)
        if there < least and self._started:  # too few are left for this batch size
            self._start(self.epoch + 1)
            there = self._fill(stream, count + least)
        if there < least:
            self._refuse(stream, there, count)
        self._started = True
        found, missing = [], min(count, there)
        while missing:
            chosen = slice(self._taken, self._taken + missing)
            found.append(self._pools[0].elements[chosen])
            for place, drawn in zip(*np.unique(self._pools[0].places[chosen], return_counts=True), strict=True):
                self._drawn[int(place)] = self._drawn.get(int(place), 0) + int(drawn)
            missing -= len(found[-1])
            self._taken += len(found[-1])
            self._skip_empty()
        self._ran_out = there - sum(map(len, found)) < least
        if self._ran_out:
            self._start(self.epoch + 1)
        return np.concatenate(found)

    @contextlib.contextmanager
    def _whole_or_again(self) -> Iterator[None]:
        """If the block fails, return to the present position, so that the elements it took are drawn again."""
        before = self.epoch, self._round, self._taken, dict(self._drawn), self._left
        ran_out = self._ran_out
        try:
            yield
        except BaseException:
            self._start(*before)
            self._ran_out = ran_out
            raise

    def _refuse(self, stream: StreamStorage, there: int, count: int) -> NoReturn:
        if there and self.part.of == 1 and self._left is None:
            raise UsageError(
                f"a batch has {count} elements, expected at most the {there} of an epoch with drop_last=True",
                hint="use a smaller batch size, or drop_last=False",
            )
        raise EmptyPartError(f"there is nothing to draw in part {self.part.number} of {stream.shards.address}")

    def _fill(self, stream: StreamStorage, count: int) -> int:
        """Prepare rounds until `count` elements are left or the epoch ends; return how many are left."""
        order = self._shard_order(stream)
        while (left := sum(len(pool.elements) for pool in self._pools) - self._taken) < count:
            number = self._round + len(self._pools)
            if not len(order.shards) or number >= len(order.shards) + self.window - 1:
                return left
            self._pools.append(self._round_of(stream, order, number))
            self._skip_empty()
        return left

    def _skip_empty(self) -> None:
        """Drop rounds whose elements have all been drawn."""
        while self._pools and self._taken >= len(self._pools[0].elements):
            self._taken -= len(self._pools.popleft().elements)
            self._round += 1
            self._drawn.pop(self._round - self.window, None)

    # Order -------------------------------------------------------------------------------------------

    def _shard_order(self, stream: StreamStorage) -> _Order:
        if self._order is None:
            shards = self._shuffled(np.arange(len(stream.shards)), _SHARDS, 0)
            places, drawn = places_left(self._left, len(shards))
            own = slice(self.part.number, None, self.part.of)
            self._order = _Order(shards[places[own]], drawn[own])
        return self._order

    def _round_of(self, stream: StreamStorage, order: _Order, number: int) -> _Pool:
        """Return the elements of a round: one part of each shard in its window, mixed at random."""
        shards = order.shards
        first, stop = max(0, number - self.window + 1), min(number + 1, len(shards))
        # Keep the shard that leaves the window: a batch may still contain its last elements.
        stream.shards.expect(shards[max(0, first - 1) : number + 1 + self.ahead].tolist())
        self._shard_elements = {place: elements for place, elements in self._shard_elements.items() if place >= first}
        parts = []
        for place in range(first, stop):
            if place not in self._shard_elements:
                shard = int(shards[place])
                elements = self._shuffled(self._elements(stream, shard), _ELEMENTS, shard)
                self._shard_elements[place] = self._chosen(elements, shard)[order.drawn[place] :]
            elements, turn = self._shard_elements[place], number - place
            parts.append(elements[len(elements) * turn // self.window : len(elements) * (turn + 1) // self.window])
        places = self._shuffled(np.repeat(np.arange(first, stop), list(map(len, parts))), _ROUND, number)
        elements = np.concatenate(parts)
        mixed = np.empty_like(elements)
        mixed[np.argsort(places, kind="stable")] = elements
        return _Pool(places, mixed)

    def _shuffled(self, elements: Numbers, kind: int, number: int) -> Numbers:
        return elements[permutation(len(elements), self._generator(kind, number))] if self.shuffle else elements

    def _generator(self, kind: int, number: int) -> torch.Generator:
        """Return the generator for one order of this epoch."""
        assert self.seed is not None
        return torch.Generator().manual_seed(seed_of(self.seed, self.epoch, kind, number))

    def _elements(self, stream: StreamStorage, shard: int) -> Numbers:
        """Return the elements of a shard, `[n, ...]`; by default their numbers, int64 `[n]`."""
        return stream.numbers(shard, np.arange(stream.take(shard).rows))

    def _chosen(self, elements: Numbers, shard: int) -> Numbers:
        """Return these elements of a shard as they are drawn, such as a slice of each; by default unchanged."""
        return elements

    # State -------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the position of the next element: a few numbers.

        `drawn`, int64 `[window]`, is how many elements of each shard of the present round are drawn, in the order of
        the shards. `left` is the rest of an epoch that the parts divide, see `places_left`; None for a whole epoch.
        """
        drawn = [self._drawn.get(self._round - self.window + 1 + turn, 0) for turn in range(self.window)]
        return {
            "seed": self.seed, "epoch": self.epoch, "round": self._round, "taken": self._taken,
            "part": self.part.number, "parts": self.part.of, "shards": self._shards, "window": self.window,
            "shuffle": self.shuffle, "trajectories": self.draws_trajectories, "drawn": torch.tensor(drawn),
            "_ran_out": self._ran_out, "left": None if self._left is None else torch.from_numpy(self._left),
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; SchemaError, with nothing changed, for another part or window."""
        here = self.save_state()
        if missing := here.keys() - state.keys():
            raise SchemaError(f"{', '.join(sorted(missing))} is missing in the state of a {type(self).__name__}")
        for name in ("part", "parts", "window", "shuffle", "trajectories", "strict_length"):
            if state.get(name) != here.get(name):
                raise SchemaError(f"the state has {name}={state.get(name)!r}, this sampler {name}={here.get(name)!r}")
        self.seed, self._shards, self._ran_out = state["seed"], state["shards"], bool(state["_ran_out"])
        round_, left = int(state["round"]), state["left"]
        first = round_ - self.window + 1
        drawn = {first + turn: count for turn, count in enumerate(map(int, state["drawn"])) if count}
        left = None if left is None else np.array(left, np.int64).reshape(-1, 3)
        self._start(int(state["epoch"]), round_, int(state["taken"]), drawn, left)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, and the orders, which can be recomputed."""
        return super().__getstate__() | {"_pools": deque(), "_order": None, "_shard_elements": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shuffle={self.shuffle}, window={self.window}, part={tuple(self.part)})"


class _Order(NamedTuple):
    """The shards of a part, in order, and how many elements of each were drawn before they were divided into parts."""

    shards: Numbers
    drawn: Numbers


class _Pool(NamedTuple):
    """The elements of a round, in order, and the positions of their shards in the order of the part."""

    places: Numbers
    elements: Numbers


def places_left(left: Numbers | None, shards: int) -> tuple[Numbers, Numbers]:
    """Return which shards are left in an epoch, by position in its order, and how many elements of each are drawn.

    Args:
        left: runs of shards that are left, int64 `[n, 3]`: the first position, the one behind the last, and how many
            elements of each shard are drawn. None if all shards are left.
        shards: how many shards there are.
    """
    if left is None:
        return np.arange(shards), np.zeros(shards, np.int64)
    first, stop, drawn = left.T
    count = stop - first
    return np.repeat(first - count.cumsum() + count, count) + np.arange(count.sum()), np.repeat(drawn, count)


class StreamSliceSampler(StreamSampler):
    """Draws one slice, consecutive steps, of every trajectory of a stream in each epoch.

    Trajectories come in the order in which `StreamSampler` draws elements. The start of a slice is uniformly random,
    and depends on seed and epoch alone. Index, info and errors are as in `SliceSampler`.

    Args:
        num_slices, slice_len, truncated_key, strict_length, pad_output: see `SliceSampler`. All slices of an epoch have
            the same length.
        pad_value: the value of padding, instead of the values of the last step; padded texts are empty.
        refuse_short: whether a trajectory shorter than a slice is an error, instead of being left out.
        batched: whether index and batch have the shape `[num_slices, slice_len]`, always with the mask, as `FrameStack`
            needs it.
        **options: the arguments of `StreamSampler`.

    Raises:
        SchemaError: (a RuntimeError) from `sample`: a batch needs slices of another length than before in the epoch, or
            `refuse_short` meets a short trajectory.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        truncated_key: Any = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        pad_value: float | None = None,
        refuse_short: bool = False,
        batched: bool = False,
        **options: Any,
    ) -> None:
        require_keywords(type(self).__name__, options, keywords_of(type(self)))
        require_flags(strict_length=strict_length, pad_output=pad_output, refuse_short=refuse_short, batched=batched)
        self.pad_value, self.refuse_short, self.batched = pad_value, refuse_short, batched
        self.measure = SliceMeasure(num_slices, slice_len, strict_length, pad_output)
        self._marks = SliceMarks(None if truncated_key is None else as_key(truncated_key))
        self._slice_len: int | None = None
        super().__init__(**options)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise SchemaError if the batch size is not divisible."""
        self.measure.of(batch_size)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices with `batch_size` steps in total, or those that are left."""
        count, slice_len = self.measure.of(batch_size)
        begun = self._started or (self._left is not None and self._slice_len is not None)
        if begun and self._slice_len != slice_len:
            raise SchemaError(f"slices have {slice_len} steps, expected {self._slice_len} as before in this epoch")
        if self._slice_len != slice_len:
            # Discard slices of another length that were prepared for a batch that was refused.
            self._start(self.epoch, left=self._left)
        self._slice_len = slice_len
        with self._whole_or_again():
            return self._slices_of(storage, self._next(self._stream(storage), count), slice_len)

    def _slices_of(self, storage: Storage, slices: Numbers, slice_len: int) -> tuple[Index, dict[str, Any]]:
        """Return index and info of slices, given by first step and number of steps."""
        start, taken = slices[:, 0], slices[:, 1]
        ends = SliceEnds.of(taken, slice_len, flat=not self.batched)
        rows = np.minimum(start[:, None] + ends.place, (start + taken - 1)[:, None])
        padded = self.batched or self.measure.pad_output
        if not self.batched:
            rows = rows.reshape(-1)
        if not padded:
            rows, ends = rows[ends.real.numpy()], ends.kept()
        index = (torch.from_numpy(rows),)
        info = self._marks.of(storage, index, ends)
        if padded:
            info["collector", "mask"] = ends.real.clone()
        return index, info

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw slices and read their rows, which also provide the flags of the info."""
        with self._marks.reading() as marks:
            index, info = self.draw(storage, batch_size)
            if self.pad_value is not None and (self.batched or self.measure.pad_output):
                flags: dict[Any, Any] = info
                _fill(marks.rows, ~flags["collector", "mask"], self.pad_value)
            return index, info, marks.rows

    def _elements(self, stream: StreamStorage, shard: int) -> Numbers:
        """Return the trajectories of a shard that are long enough: their first steps and lengths."""
        lengths = stream.take(shard).lengths
        first = stream.numbers(shard, np.cumsum(lengths) - lengths)
        found = np.stack([first, lengths], 1)
        long_enough = lengths >= self._rule().minimum
        if self.refuse_short and not long_enough.all():
            raise SchemaError(
                f"an episode in shard {shard} of {stream.shards.address} has {lengths[~long_enough][0]} steps, but "
                f"slices have {self._slice_len}",
                hint="strict_length=False takes it whole",
            )
        return found[long_enough]

    def _chosen(self, elements: Numbers, shard: int) -> Numbers:
        """Choose a slice in each of these trajectories: its first step and number of steps."""
        rule, first, lengths = self._rule(), elements[:, 0], elements[:, 1]
        place = np.zeros_like(first)
        if self.shuffle:
            chances = torch.rand(len(elements), generator=self._generator(_STARTS, shard), dtype=torch.float64).numpy()
            place = scaled(chances, rule.starts(lengths))
        start, taken = rule.slices(first, lengths, place)
        return np.stack([start, np.full_like(start, rule.length) if taken is None else taken], 1)

    def _rule(self) -> SliceRule:
        assert self._slice_len is not None  # it is set by the first batch
        return SliceRule(self._slice_len, self._slice_len if self.measure.strict_length else 1)

    def save_state(self) -> dict[str, Any]:
        """Return the position of the next slice, and the slice length of this epoch."""
        return super().save_state() | {"slice_len": self._slice_len, "strict_length": self.measure.strict_length}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; SchemaError, with nothing changed, for another part or window."""
        super().load_state(state)
        self._slice_len = state["slice_len"]


def _fill(rows: TensorDictBase, padding: torch.Tensor, value: float) -> None:
    """Set the value of padded steps; the bytes and lengths of texts become 0."""
    keys = {(key,) if isinstance(key, str) else key for key in rows.keys(True, True)}
    for key in keys:
        column = rows.get(key)
        siblings = {(*key[:-1], f"{key[-1]}_length"), (*key[:-1], key[-1].removesuffix("_length"))} - {key}
        number = value if column.is_floating_point() else int(value)
        column[padding] = torch.tensor(0 if siblings & keys else number).to(column.dtype)


class StreamEpisodeSampler(StreamSampler):
    """Draws every trajectory of a stream once in an epoch, whole: a batch of size `n` has the steps of `n`
    trajectories.

    They come in the order in which `StreamSampler` draws elements, whose arguments it takes.
    """

    draws_trajectories: ClassVar[bool] = True

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw the steps of the next `batch_size` trajectories, or of those that are left."""
        episodes = self._next(self._stream(storage), batch_size)
        return torch.from_numpy(np.concatenate([np.arange(first, first + length) for first, length in episodes])), {}

    def _elements(self, stream: StreamStorage, shard: int) -> Numbers:
        """Return the trajectories of a shard: their first steps and lengths."""
        lengths = stream.take(shard).lengths
        return np.stack([stream.numbers(shard, np.cumsum(lengths) - lengths), lengths], 1)
