"""Where the trajectories of a storage lie, kept up to date as rows are written.

`trajectory_table(storage, signal)` gives the one table that all samplers on that storage share. Steps have absolute
numbers, which grow with time: the row of step `n` is `n % capacity`. At a write nothing happens but counting; the table
catches up with `refresh`, and reads the signal of just the new rows.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import SchemaError
from ..storages import Storage
from ..storages.write_log import Change, Written
from .lane_runs import LaneRuns, Window
from .signals import Ends, Signal

__all__ = ["Eligible", "TrajectoryTable", "trajectory_table"]

Numbers: TypeAlias = NDArray[np.int64]

_KEPT = 4
"""For so many minimum lengths the trajectories that are long enough are kept up to date."""

_REMEMBERED = 1000
"""Of so many versions it is known what they changed."""

_FEW = 64
"""Up to so many rows that were edited are looked at one by one."""

_TABLES: weakref.WeakKeyDictionary[Storage, dict[Signal, TrajectoryTable]] = weakref.WeakKeyDictionary()


def trajectory_table(storage: Storage, signal: Signal) -> TrajectoryTable:
    """Return the table of this storage's trajectories as this signal tells them; there is one for all who ask."""
    tables = _TABLES.setdefault(storage, {})
    table = tables.get(signal)
    if table is None:
        table = tables[signal] = TrajectoryTable(storage, signal)
    return table


class TrajectoryTable:
    """Trajectories by lane: a lane is one element of a storage's dimensions after the first.

    Steps of a lane belong together only if they were written one after the other: the newest row is followed by
    nothing, also where the ring has come round and an older row with the same id lies behind it. A storage that was
    filled in another way does not go round.
    """

    def __init__(self, storage: Storage, signal: Signal) -> None:
        self._storage = weakref.ref(storage)
        self.signal = signal
        self.version = 0
        self.oldest, self.newest = 0, -1
        self.capacity = self.lanes = 0
        self._seen: Written | None = None
        self._ends: Ends = np.zeros((0, 0), bool)
        self._open: Numbers = np.zeros(0, np.int64)
        self._runs = LaneRuns(0, Window())
        self._eligible: dict[Window, Eligible] = {}
        self._rows = 0
        self._changed: tuple[int, list[int]] | None = None

    # Catching up -------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what was written since the last time, in a time that grows with that.

        SchemaError (a RuntimeError) for an empty storage and for a signal that does not fit it, MissingKeyError (a
        KeyError) for one that is not there.
        """
        storage = self._storage()
        assert storage is not None, "whoever asks holds the storage"
        now, seen = storage.log.now, self._seen
        if now == seen:
            return
        if not len(storage):
            self._seen = None
            raise SchemaError("Cannot sample from an empty storage: it has no elements yet")
        fresh = now.rows - seen.rows if seen is not None else 0
        regular = seen is not None and 0 < fresh < self.capacity and self._still_holds(storage, seen)
        self._seen = None  # until all went well
        if regular:
            self._advance(storage, fresh)
        elif seen is None or fresh or not self._still_holds(storage, seen):
            self._build(storage, now)
        self._seen = now

    def _still_holds(self, storage: Storage, seen: Written) -> bool:
        """Tell whether all that was changed otherwise than by going on in the ring leaves the ends where they are."""
        changes = storage.log.since(seen.irregular)
        return changes is not None and all(self._is_beside(storage, change) for change in changes)

    def _is_beside(self, storage: Storage, change: Change) -> bool:
        """Tell whether a change left the ends of all trajectories where they are."""
        if change.keys is not None:
            pairs = [(changed, key) for changed in change.keys for key in self.signal.keys]
            if not any(changed[: len(key)] == key[: len(changed)] for changed, key in pairs):
                return True
        if change.rows is None or storage.shape[0] != self._rows:
            return False
        numbers = (
            np.arange(self._rows)[change.rows] if isinstance(change.rows, slice) else change.rows.numpy(force=True)
        )
        if len(numbers) > _FEW:
            return False
        return all(self._is_as_before(storage, int(number)) for number in numbers)

    def _is_as_before(self, storage: Storage, row: int) -> bool:
        """Tell whether the row ends a trajectory where it did, and so the one before it."""
        step = self.oldest + (row - self.oldest) % self.capacity
        first, last = max(step - 1, self.oldest), min(step + 1, self.newest)
        rows = np.arange(first, last + 1) % self.capacity
        if (rows >= self._rows).any():
            return False  # beside rows that were never written
        found = self.signal.ends(storage, rows)
        if self.signal.looks_ahead and last < self.newest:
            found, rows = found[:-1], rows[:-1]
        return bool((found == self._ends[rows]).all())

    def _advance(self, storage: Storage, fresh: int) -> None:
        """Append `fresh` rows to all lanes."""
        again = self.signal.looks_ahead and self.newest % self.capacity < self._rows
        first = self.newest + (0 if again else 1)
        last = self.newest + fresh
        steps = np.arange(first, last + 1)
        ends = self.signal.ends(storage, steps % self.capacity)
        self._ends[steps % self.capacity] = ends
        self.newest = last
        self.oldest = max(self.oldest, last - self.capacity + 1)
        lane, step = np.nonzero(ends.T)
        if len(lane):
            self._close(lane, step + first)
        self._runs.evict(self.oldest)
        np.maximum(self._open, self.oldest, out=self._open)
        for eligible in self._eligible.values():
            eligible.follow()
        self._rows = storage.shape[0]
        self.version += 1
        self._note(first)

    def _note(self, first: int) -> None:
        """Remember which step was the first that this version has changed, and forget what is long gone."""
        since, firsts = self._changed or (self.version - 1, [])
        firsts.append(first)
        if len(firsts) > _REMEMBERED:
            since, firsts = since + len(firsts) // 2, firsts[len(firsts) // 2 :]
        self._changed = (since, firsts)

    def _close(self, lane: Numbers, stop: Numbers) -> None:
        """End trajectories, given in order of lanes and then of time."""
        start = np.empty_like(stop)
        start[1:] = stop[:-1] + 1
        begins = np.ones(len(lane), bool)
        begins[1:] = lane[1:] != lane[:-1]
        start[begins] = self._open[lane[begins]]
        last = np.ones(len(lane), bool)
        last[:-1] = begins[1:]
        self._open[lane[last]] = stop[last] + 1
        self._runs.append(lane, start, stop)
        for eligible in self._eligible.values():
            eligible.runs.append(lane, start, stop)

    def _build(self, storage: Storage, now: Written) -> None:
        """Read the signal of all rows."""
        rows = storage.shape[0]
        self.lanes = int(np.prod(storage.shape[1:], dtype=np.int64))
        self.capacity = max(rows, storage.max_size // self.lanes)
        following = now.next_row % self.capacity
        early = rows - following if following < rows else 0  # rows that come before row 0 in time
        order = np.concatenate([np.arange(rows - early, rows), np.arange(rows - early)])
        steps = order + np.where(np.arange(rows) < early, 0, self.capacity if early else 0)
        ends = np.array(self.signal.ends(storage, order if early not in (0, rows) else slice(0, rows)))
        gap = early if rows < self.capacity else 0  # behind these lie rows that were never written
        if gap:
            ends[gap - 1] = True
        self._rows = rows
        self.oldest = int(steps[0])
        self.newest = following + self.capacity - 1 if early else rows - 1
        self._ends = np.zeros((self.capacity, self.lanes), bool)
        self._ends[order] = ends
        self._runs, self._eligible = LaneRuns(self.lanes, Window()), {}
        self._open = np.full(self.lanes, self.newest + 1)
        for begin, stop in ((0, gap), (gap, rows)):
            if begin < stop:
                self._open[:] = steps[begin]
                lane, place = np.nonzero(ends[begin:stop].T)
                if len(lane):
                    self._close(lane, steps[begin:stop][place])
        if gap == rows:
            self._open[:] = self.newest + 1
        self._runs.evict(self.oldest)
        self.version += 1
        self._changed = None

    # Looking up --------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many trajectories there are in all lanes."""
        return int(self._runs.counts.sum()) + int((self._open <= self.newest).sum())

    def runs(self) -> tuple[Numbers, Numbers, Numbers]:
        """List lanes, first steps and lengths of all trajectories, lane by lane, the oldest first."""
        lane, start, stop = self._runs.all()
        unfinished = np.flatnonzero(self._open <= self.newest)
        lane = np.concatenate([lane, unfinished])
        start = np.concatenate([start, self._open[unfinished]])
        stop = np.concatenate([stop, np.full(len(unfinished), self.newest)])
        order = np.argsort(lane, kind="stable")
        return lane[order], start[order], (stop - start + 1)[order]

    def eligible(self, window: Window) -> Eligible:
        """Return the trajectories that a slice of this window can be cut of; kept up to date from now on."""
        found = self._eligible.get(window)
        if found is None:
            while len(self._eligible) >= _KEPT:
                del self._eligible[next(iter(self._eligible))]
            found = self._eligible[window] = Eligible(self, window)
        return found

    def reach(self, step: Numbers, lane: Numbers, limit: int | None = None) -> Numbers:
        """Count the steps from each of these to the end of its trajectory, itself included; int64 `[n]`.

        Steps are absolute, those of valid rows. With a `limit` no more than that many are looked at.
        """
        if limit is None or self.lanes == 1:
            return self._runs.stop_of(step, lane, self.newest) - step + 1
        ahead = step[:, None] + np.arange(limit)
        over = self._ends[ahead % self.capacity, lane[:, None]]
        over |= ahead >= self.newest
        return np.where(over.any(1), over.argmax(1) + 1, limit)

    def changes(self, since: int) -> tuple[int, int] | None:
        """Return the first and the last of the steps that were added after a version; None where others changed, too.

        Of the steps before them those have changed that are near enough for a slice to reach the first.
        """
        if since == self.version:
            return self.newest + 1, self.newest
        if self._changed is None or self._changed[0] > since:
            return None
        place = since - self._changed[0]
        return self._changed[1][place], self.newest


class Eligible:
    """The trajectories that a slice of some window can be cut of, ready to be drawn."""

    def __init__(self, table: TrajectoryTable, window: Window) -> None:
        self._table = table
        self.window = window
        self.runs = LaneRuns(table.lanes, window)
        self.runs.append(*table._runs.all())
        self.follow()

    def follow(self) -> None:
        """Catch up with the table."""
        table, runs = self._table, self.runs
        runs.evict(table.oldest)
        unfinished = table.newest - table._open + 1
        self._unfinished = (unfinished >= self.window.minimum) & (unfinished > 0)
        self._some_unfinished = bool(self._unfinished.any())
        self._sums = np.cumsum(runs.counts + self._unfinished)
        self.count = int(self._sums[-1])
        self._place_sums: Numbers | None = None

    def _places(self) -> Numbers:
        """Sum the places to begin at over lanes."""
        if self._place_sums is None:
            table = self._table
            last = np.where(self._unfinished, self.window.places(np.maximum(table.newest - table._open + 1, 1)), 0)
            self._closed_places = self.runs.masses()
            self._place_sums = np.cumsum(self._closed_places + last)
        return self._place_sums

    @property
    def place_count(self) -> int:
        """How many places there are to begin a slice at."""
        return int(self._places()[-1])

    def by_number(self, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories by number, from 0 to `count - 1`."""
        lane, number = _split(self._sums, number)
        return (lane, *self._found(lane, number))

    def by_place(self, place: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of the trajectories that hold places, 0 to `place_count - 1`.

        Last come the places within the trajectories, from 0 on.
        """
        lane, place = _split(self._places(), place)
        closed = self._closed_places[lane]
        inside = place < closed
        number = self.runs.counts[lane]
        own = place - closed
        if inside.any():
            number[inside], own[inside] = self.runs.by_place(lane[inside], place[inside])
        return (lane, *self._found(lane, number), own)

    def _found(self, lane: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
        table = self._table
        if self._some_unfinished:
            unfinished = number >= self.runs.counts[lane]
            start, stop = self.runs.at(lane, np.where(unfinished, 0, number))
            start = np.where(unfinished, table._open[lane], start)
            stop = np.where(unfinished, table.newest, stop)
        else:
            start, stop = self.runs.at(lane, number)
        return start, stop - start + 1


def _split(sums: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Find in which lane numbers lie that count through all lanes, and which of its own they are."""
    if len(sums) == 1:
        return np.zeros_like(number), number
    lane = np.searchsorted(sums, number, side="right")
    return lane, number - (sums[lane] - np.diff(sums, prepend=0)[lane])
