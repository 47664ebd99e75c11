"""Slices in epochs, of every trajectory one before any comes again, while a ring overwrites and adds trajectories."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.utils import NestedKey

from ..errors import SchemaError, UsageError, require_flags
from ..storages.base import Storage
from ..storages.write_log import Written
from .base import Index
from .slices import Anchor, SliceSampler
from .trajectories import Runs, TrajectoryTable
from .uniform import EpochSampler, Numbers, inserted_at_random, permutation

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """An epoch in the numbers of `Runs.by_place`: the rest in order, those not part of it yet, and their count."""

    left: Numbers
    waiting: Numbers
    count: int
    turned: tuple[int, int] = (0, 0)


class _Seen(NamedTuple):
    """The state of a table, and of the write log, at an update."""

    version: int
    newest: int
    capacity: int
    written: Written
    minimum: int

    def moved_by(self, now: _Seen) -> int | None:
        """Return by how much step numbers have changed, as after a rebuild of the table; None for another ring."""
        added = now.written.rows - self.written.rows
        continues = (self.written.next_row + added) % self.capacity == now.written.next_row % self.capacity
        return now.newest - self.newest - added if now.capacity == self.capacity and continues else None


class TrajectoryEpoch:
    """The order of the trajectories that remain in an epoch.

    One that is being written is drawn once, however long it grows; one that starts, or grows long enough, during an
    epoch is drawn in it; one without any row of the last update is removed. Every trajectory remains, is drawn, or
    waits until it is long enough.
    """

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.forget()

    def forget(self) -> None:
        """Return to the state before the first epoch."""
        self.started = False
        self._runs = Runs(_NOTHING, _NOTHING, _NOTHING)
        self._left: Numbers = _NOTHING  # never edited in place
        self._waiting = np.empty(0, np.bool_)
        self._eligible = np.empty(0, np.bool_)
        self._seen: _Seen | None = None
        self._loaded: SavedEpoch | None = None

    def __len__(self) -> int:
        """Return the number of remaining trajectories."""
        return len(self._left) if self._loaded is None else len(self._loaded.left)

    def begin(self, generator: torch.Generator | None) -> None:
        """Start an epoch with all trajectories that are long enough."""
        eligible = np.flatnonzero(self._eligible)
        self._left = eligible[permutation(len(eligible), generator)] if self.shuffle else eligible
        self._waiting = ~self._eligible
        self.started = True

    def catch_up(
        self, table: TrajectoryTable, written: Written, minimum: int, generator: torch.Generator | None
    ) -> None:
        """Update to an up-to-date table; `minimum` is the least length of a trajectory that is drawn."""
        now = _Seen(table.version, table.newest, table.capacity, written, minimum)
        if now == self._seen:
            return
        if self._loaded is not None:
            self._resume(table, self._loaded)
        elif self._only_ends_moved(table, now):
            self._seen = now
            return
        else:
            self._follow(table, now)
        self._seen = now
        self._eligible = self._runs.length >= minimum
        if not self.started:
            return
        short = ~self._eligible[self._left]
        if short.any():  # overwritten in part
            self._waiting[self._left[short]] = True
            self._left = self._left[~short]
        late = np.flatnonzero(self._waiting & self._eligible)
        if len(late):
            self._waiting[late] = False
            if self.shuffle:
                self._left = inserted_at_random(self._left, late, generator)
            else:
                self._left = np.concatenate([self._left, late])

    def _only_ends_moved(self, table: TrajectoryTable, now: _Seen) -> bool:
        """Update starts and ends, if the trajectories and the eligible ones among them are the same; else return False.

        With this the cost of most writes does not depend on the number of trajectories.
        """
        seen, runs, lanes = self._seen, self._runs, np.arange(table.lanes)
        if seen is None or seen.minimum != now.minimum or not len(runs) or table.changes(seen.version) is None:
            return False
        first = np.searchsorted(runs.lane, lanes)
        last = np.append(first[1:], len(runs)) - 1
        if seen.newest < table.oldest or (runs.last[first] < table.oldest).any():
            return False
        if (table.reach(np.full_like(lanes, seen.newest), lanes) <= now.newest - seen.newest).any():
            return False
        runs.last[last] = now.newest
        runs.first[first] = np.maximum(runs.first[first], table.oldest)
        ends = np.concatenate([first, last])
        long = runs.last[ends] - runs.first[ends] + 1 >= now.minimum
        return bool((self._eligible[ends] == long).all())

    def _follow(self, table: TrajectoryTable, now: _Seen) -> None:
        """Find the remaining and the drawn trajectories among the present ones."""
        runs, steps = Runs.of(table), self._seen.moved_by(now) if self._seen is not None else 0
        if steps is None:  # not the ring of the last update
            self.started, self._runs = False, runs
            self._left, self._waiting = _NOTHING, np.ones(len(runs), np.bool_)
            return
        found = self._runs.moved(steps).found_in(runs)
        drawn = np.ones(len(self._runs), np.bool_)
        drawn[self._left] = False
        drawn &= ~self._waiting
        waiting = np.ones(len(runs), np.bool_)
        waiting[found[drawn & (found >= 0)]] = False
        left = found[self._left]
        left = left[left >= 0]
        left = left[waiting[left]]  # of merged trajectories, one was drawn
        left = left[np.sort(np.unique(left, return_index=True)[1])]
        waiting[left] = False
        self._runs, self._left, self._waiting = runs, left, waiting

    def _resume(self, table: TrajectoryTable, saved: SavedEpoch) -> None:
        """Continue a saved epoch, if the number of trajectories is the same."""
        self._loaded, self._runs = None, Runs.of(table)
        self._left, self._waiting = _NOTHING, np.ones(len(self._runs), np.bool_)
        self.started = len(self._runs) == saved.count
        if self.started:
            order = self._runs.by_place(table.capacity, saved.turned)
            self._left, waiting = order[saved.left], order[saved.waiting]
            self._waiting[:] = False
            self._waiting[waiting] = True

    def take(self, count: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of the next trajectories, and remove them from the epoch."""
        chosen, self._left = self._left[:count], self._left[count:]
        runs = self._runs
        return runs.lane[chosen], runs.first[chosen], runs.last[chosen] - runs.first[chosen] + 1

    @contextlib.contextmanager
    def whole_or_again(self) -> Iterator[None]:
        """Return to the state of now if the block fails: what it took is taken again."""
        before = self._left, self._waiting  # `begin` and `take` replace them
        try:
            yield
        except BaseException:
            self._left, self._waiting = before
            raise

    @property
    def eligible(self) -> int:
        """The number of trajectories of a whole epoch."""
        return int(self._eligible.sum())

    # State -----------------------------------------------------------------------------------------

    def saved(self, table: TrajectoryTable | None, written: Written | None) -> SavedEpoch | None:
        """Return the epoch in numbers of the present rows; None before the first one."""
        if self._loaded is not None or not self.started or table is None or written is None:
            return self._loaded
        return copy.copy(self).followed(table, written)  # saving does not change the next draw

    def followed(self, table: TrajectoryTable, written: Written) -> SavedEpoch | None:
        """Update to a table, and return the epoch in its numbers."""
        self._follow(table, _Seen(table.version, table.newest, table.capacity, written, 1))
        if not self.started:
            return None
        place = np.empty(len(self._runs), np.int64)
        place[self._runs.by_place(table.capacity)] = np.arange(len(place))
        return SavedEpoch(place[self._left], np.sort(place[self._waiting]), len(place))

    def turn(self, row: int, rows: int) -> None:
        """Rotate a loaded epoch of a ring of `rows` rows, of which `row` became row 0."""
        if self._loaded is not None:
            self._loaded = replace(self._loaded, turned=(row, rows))

    def load(self, saved: SavedEpoch | None) -> None:
        """Continue a saved epoch with the next draw."""
        self.forget()
        self._loaded = saved


class SliceSamplerWithoutReplacement(EpochSampler, SliceSampler):
    """Draws one slice of each trajectory in epochs, from anywhere in it or at its `anchor`.

    With `strict_length=False` every trajectory is drawn once an epoch, a short one as a whole; with
    `strict_length=True` every one of at least the slice length. Only the last batch of an epoch has fewer slices (in
    TorchRL also those that meet short trajectories); `drop_last` leaves it out. `shuffle=False` draws in the order of
    time.

    A trajectory that starts during an epoch is drawn in it. One that is being written is drawn once, however long it
    grows; one that was overwritten is not. `ran_out` is True from the last batch of an epoch to the next batch. The
    other arguments and the output are those of `SliceSampler`.

    SchemaError (a RuntimeError) if no trajectory is long enough; UsageError (a ValueError) with `drop_last` for more
    slices than trajectories.

    Checkpoints hold the order of the remaining trajectories, numbered as in TorchRL: lane by lane, in the order of the
    rows of their last steps.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])}, [8]))
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, strict_length=False, shuffle=False, anchor="start")
    >>> [sampler.sample(storage, 4)[0][0].tolist() for _ in range(3)]
    [[0, 1, 4], [5, 6], [0, 1, 4]]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: bool | torch.device | str = False,
        pad_output: bool = False,
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            use_gpu=use_gpu,
            anchor=anchor,
            batched=batched,
        )
        require_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last = drop_last
        self._epoch = TrajectoryEpoch(shuffle)
        self.reset()

    draw_rows = SliceSampler.draw_rows

    def reset(self) -> None:
        """Forget the epoch and the trajectory table."""
        super().reset()
        self._epoch.forget()
        self._followed: weakref.ref[Storage] | None = None
        self._slices = 0
        self._ran_out = False

    @property
    def shuffle(self) -> bool:
        """Whether the order is random."""
        return self._epoch.shuffle

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices of the next trajectories of the epoch, or of the remaining ones."""
        count, slice_len = self._measure(batch_size)
        table, epoch = self.trajectories(storage), self._epoch
        if self._followed is not None and self._followed() is not storage:
            epoch.forget()  # the trajectories of another storage
        epoch.catch_up(table, storage.log.now, slice_len if self.strict_length else 1, self.generator)
        self._followed = weakref.ref(storage)
        fewest = count if self.drop_last else 1
        if epoch.eligible < fewest:
            self._refuse(table, slice_len, count)
        if not epoch.started or len(epoch) < fewest:
            epoch.begin(self.generator)
        with epoch.whole_or_again():
            lane, first, length = epoch.take(count)
            self._slices = count
            self._ran_out = len(epoch) < fewest
            if self._ran_out:
                epoch.begin(self.generator)
            start, taken = self._placed(first, length, slice_len)
            return self._assemble(storage, table, lane, start, taken, slice_len)

    def _refuse(self, table: TrajectoryTable, slice_len: int, count: int) -> None:
        found = self._epoch.eligible
        if not found:
            self._refuse_short(table, slice_len)
        raise UsageError(
            f"a batch is {count} slices, expected at most {found}, the number of trajectories, with drop_last=True",
            hint="ask for fewer, or take drop_last=False",
        )

    @property
    def remaining_batches(self) -> int:
        """How many batches of as many slices as in the last one are left of the epoch."""
        if not self._slices:
            return sys.maxsize
        left = len(self._epoch)
        return left // self._slices if self.drop_last else -(-left // self._slices)

    def epoch_size(self, storage: Storage, batch_size: int) -> tuple[int, int]:
        """Return how many trajectories are drawn, and how many slices a batch has."""
        count, slice_len = self._measure(batch_size)
        return self.trajectories(storage).eligible(self._window(slice_len)).count if len(storage) else 0, count

    def draw_numbered(self, storage: Storage, numbers: Numbers, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw a slice of each of these trajectories, numbered in the order of time, lane by lane."""
        _, slice_len = self._measure(batch_size)
        table = self.trajectories(storage)
        lane, first, length = table.eligible(self._window(slice_len)).by_number(numbers)
        with self._marks.reading() as marks:
            start, taken = self._placed(first, length, slice_len)
            return *self._assemble(storage, table, lane, start, taken, slice_len), marks.rows

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate a loaded epoch with the rows."""
        self._epoch.turn(row, storage.shape[0])

    # State -----------------------------------------------------------------------------------------

    def _saved(self) -> SavedEpoch | None:
        """Return the epoch for the present rows."""
        storage = None if self._followed is None else self._followed()
        if storage is None or not len(storage):
            return self._epoch.saved(None, None)
        return self._epoch.saved(self.trajectories(storage), storage.log.now)

    def save_state(self) -> dict[str, Any]:
        """Return the rest of the epoch and the arguments, under TorchRL's names and two of our own.

        `_sample_list` holds the remaining trajectories, int64, or None before the first draw, `_waiting` those that
        are not part of the epoch yet; `len_storage` is the number of all trajectories.
        """
        saved = self._saved()
        waiting = None if saved is None or not len(saved.waiting) else torch.from_numpy(saved.waiting)
        return {
            "len_storage": 0 if saved is None else saved.count,
            "_sample_list": None if saved is None else torch.from_numpy(saved.left),
            "drop_last": self.drop_last,
            "_ran_out": self._ran_out,
            "shuffle": self.shuffle,
            "_slices": self._slices,
            "_waiting": waiting,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state, also one of TorchRL; SchemaError for that of another sampler.

        If the next draw finds other trajectories, a new epoch starts.
        """
        self.require_state(state)
        count, left = int(state["len_storage"]), state["_sample_list"]
        saved = None
        if left is not None:
            waiting = state.get("_waiting")
            late = np.empty(0, np.int64) if waiting is None else _checked(waiting, count)
            saved = SavedEpoch(_checked(left, count), late, count)
            if len(np.unique([*saved.left, *late])) < len(saved.left) + len(late):
                raise SchemaError("_sample_list and _waiting name a trajectory twice")
        self.reset()
        self._epoch.load(saved)
        self._epoch.shuffle = bool(state.get("shuffle", self.shuffle))
        self.drop_last, self._ran_out = bool(state["drop_last"]), bool(state["_ran_out"])
        self._slices = int(state.get("_slices", 0))

    def __getstate__(self) -> dict[str, Any]:
        epoch = TrajectoryEpoch(self.shuffle)
        epoch.load(self._saved())
        return super().__getstate__() | {"_epoch": epoch, "_followed": None}


def _checked(numbers: Any, count: int) -> Numbers:
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise SchemaError("the trajectories that are left are not an int64 vector in the state")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise SchemaError(f"a trajectory outside of the {count} that the state counts is left")
    return numbers.numpy(force=True).copy()
