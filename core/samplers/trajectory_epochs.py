"""Epochs of trajectories, while a ring overwrites some of them and others are added."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..storages.write_log import Written
from .trajectories import TrajectoryTable
from .uniform import Numbers, inserted_at_random, permutation

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Runs:
    """Trajectories, lane by lane and the oldest first, with the absolute numbers of their first and last steps."""

    lane: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def of(cls, table: TrajectoryTable) -> Runs:
        """Return all trajectories of a table."""
        lane, start, length = table.runs()
        return cls(lane, start.copy(), start + length - 1)  # first and last steps are edited in place

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def length(self) -> Numbers:
        """The number of steps of each."""
        return self.last - self.first + 1

    def moved(self, steps: int) -> Runs:
        """Return the trajectories with other step numbers."""
        return Runs(self.lane, self.first + steps, self.last + steps)

    def by_place(self, rows: int, turned: tuple[int, int] = (0, 0)) -> Numbers:
        """Return TorchRL's order: lane by lane, by the row of the last step.

        `turned` is a row and a number of rows: the order is that in a ring of so many rows before it was rotated, so
        that the row became row 0.
        """
        row, before = turned
        place = self.last % rows
        return np.lexsort(((place + row) % before if before else place, self.lane))

    def found_in(self, other: Runs) -> Numbers:
        """Return the trajectory of `other`, a later state, that each continues as; -1 if its last row is gone."""
        if not len(other):
            return np.full(len(self), -1)
        begin = min(int(self.last.min(initial=0)), int(other.first.min()))
        span = max(int(self.last.max(initial=0)), int(other.last.max())) - begin + 1
        places = np.searchsorted(
            other.lane * span + (other.first - begin), self.lane * span + (self.last - begin), "right"
        )
        places = np.maximum(places - 1, 0)
        there = (
            (other.lane[places] == self.lane) & (other.first[places] <= self.last) & (self.last <= other.last[places])
        )
        return np.where(there, places, -1)


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
