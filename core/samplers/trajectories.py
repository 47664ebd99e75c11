"""Trajectory bounds of a storage, kept up to date as rows are written.

`trajectory_table(storage, source)` returns the one table that all samplers of a storage share. Steps have absolute
numbers, which grow with time and never wrap; the row of step `n` is `n % capacity`:

    capacity 6, steps 4 to 9 are stored, 9 is the newest

    row         0    1    2    3    4    5
    step        6    7    8    9    4    5
    episode     B    B    C    C    A    B        B continues across the wrap: steps 5, 6, 7
                               ↑ newest: C ends here, whatever row 4 holds

A write only moves counters; `refresh` reads the boundary source for the rows written since the last call. `LaneRuns`
holds the trajectories that are long enough for a slice by some `SliceRule`, ready to be drawn.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import SchemaError
from ..kernels.slices import SliceRule, SliceTable
from ..storages.base import Storage
from ..storages.write_log import Change, Written
from .boundaries import BoundarySource, Ends

Numbers: TypeAlias = NDArray[np.int64]

_KEPT = 4
"""For how many rules the eligible trajectories are kept up to date."""

_REMEMBERED = 1000
"""For how many past versions the changes are recorded."""

_FEW = 64
"""Up to this many edited rows are compared one by one."""

_ENDLESS = 1 << 40
"""A ring with a larger capacity than this never becomes full."""

_TABLES: weakref.WeakKeyDictionary[Storage, dict[BoundarySource, TrajectoryTable]] = weakref.WeakKeyDictionary()


_LOCK = threading.RLock()
"""Held while a table is changed: several buffers may sample from one storage."""


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # a forked child lacks the thread that may hold the old one


os.register_at_fork(after_in_child=_renew_lock)


def trajectory_table(storage: Storage, source: BoundarySource) -> TrajectoryTable:
    """Return the shared table of a storage's trajectories, as separated by this boundary source."""
    with _LOCK:
        tables = _TABLES.setdefault(storage, {})
        table = tables.get(source)
        if table is None:
            table = tables[source] = TrajectoryTable(storage, source)
        return table


class TableFinder:
    """Finds the trajectory table of storages; `choose` returns the boundary source for a storage."""

    def __init__(self, choose: Callable[[Storage], BoundarySource]) -> None:
        self._choose = choose
        self._found: tuple[weakref.ref[Storage], TrajectoryTable] | None = None

    def table(self, storage: Storage) -> TrajectoryTable:
        """Return the table of a storage, up to date. Errors are those of `choose` and `TrajectoryTable.refresh`."""
        found = self._found
        if found is None or found[0]() is not storage or _is_outdated(found[1].source, storage):
            found = self._found = weakref.ref(storage), trajectory_table(storage, self._choose(storage))
        table = found[1]
        table.refresh()
        return table

    def forget(self) -> None:
        """Choose the boundary source again at the next call."""
        self._found = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}


def _is_outdated(source: BoundarySource, storage: Storage) -> bool:
    """Whether rows of a dataset were overwritten, so that its episode table no longer describes them."""
    return source.uses_table and storage.log.now.rows > 0


class TrajectoryTable:
    """Trajectories by lane; a lane is one element of the storage's dimensions after the first.

    Only steps that were written one after another can belong together: no trajectory continues behind the newest row,
    even if the next row of the ring, an older one, has the same id. A storage that was not written as a ring does not
    wrap.
    """

    def __init__(self, storage: Storage, source: BoundarySource) -> None:
        self._storage = weakref.ref(storage)
        self.source = source
        self.version = 0
        self.oldest, self.newest = 0, -1
        self.capacity = self.lanes = 0
        self._seen: Written | None = None
        self._ends: Ends = np.zeros((0, 0), bool)
        self._open: Numbers = np.zeros(0, np.int64)
        self._runs = LaneRuns(0, SliceRule())
        self._eligible: dict[SliceRule, LaneRuns] = {}
        self._rows = 0
        self._changed: tuple[int, list[int]] | None = None

    # Catching up -------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the rows written since the last call.

        Raises:
            SchemaError: (a RuntimeError) the storage is empty, or an entry does not fit it.
            MissingKeyError: (a KeyError) an entry does not exist.
        """
        storage = self._storage()
        assert storage is not None, "the caller keeps the storage alive"
        if storage.log.now != self._seen:
            with _LOCK:
                self._catch_up(storage)

    def _catch_up(self, storage: Storage) -> None:
        now, seen = storage.log.now, self._seen
        if now == seen:
            return
        if not len(storage):
            self._seen = None
            raise SchemaError("Cannot sample from an empty storage: it has no elements yet")
        fresh = now.rows - seen.rows if seen is not None else 0
        holds = seen is not None and self._still_holds(storage, seen)
        self._seen = None  # a failure leaves the table unusable until it is rebuilt
        if holds and 0 < fresh < self.capacity:
            self._advance(storage, fresh)
        elif fresh or not holds:
            self._build(storage, now)
        self._seen = now

    def _still_holds(self, storage: Storage, seen: Written) -> bool:
        """Whether all changes, apart from writes around the ring, left the ends as they are."""
        changes = storage.log.since(seen.irregular)
        return changes is not None and all(self._keeps_ends(storage, change) for change in changes)

    def _keeps_ends(self, storage: Storage, change: Change) -> bool:
        """Whether a change left the ends of all trajectories as they are."""
        if change.keys is not None:
            pairs = [(changed, key) for changed in change.keys for key in self.source.keys]
            if not any(changed[: len(key)] == key[: len(changed)] for changed, key in pairs):
                return True
        if change.rows is None or storage.shape[0] != self._rows:
            return False
        if not self.source.keys:
            return True  # the source does not read rows
        if isinstance(change.rows, slice):
            numbers = np.arange(change.rows.start, change.rows.stop)
        else:
            numbers = change.rows.numpy(force=True)
        return len(numbers) <= _FEW and all(self._is_as_before(storage, int(number)) for number in numbers)

    def _is_as_before(self, storage: Storage, row: int) -> bool:
        """Whether the row, and the row before it, end a trajectory exactly as before."""
        step = self.oldest + (row - self.oldest) % self.capacity
        first, last = max(step - 1, self.oldest), min(step + 1, self.newest)
        rows = np.arange(first, last + 1) % self.capacity
        if (rows >= self._rows).any():
            return False  # a neighbouring row was never written
        found = self.source.ends(storage, rows)
        if self.source.looks_ahead and last < self.newest:
            found, rows = found[:-1], rows[:-1]
        return bool((found == self._ends[rows]).all())

    def _advance(self, storage: Storage, fresh: int) -> None:
        """Append `fresh` rows to all lanes."""
        again = self.source.looks_ahead and self.newest % self.capacity < self._rows
        first = self.newest + (0 if again else 1)
        last = self.newest + fresh
        rows = np.arange(first, last + 1) % self.capacity
        ends = self.source.ends(storage, rows)
        self._make_room(int(rows.max()) + 1)
        self._ends[rows] = ends
        self.newest = last
        self.oldest = max(self.oldest, last - self.capacity + 1)
        lane, step = np.nonzero(ends.T)
        if len(lane):
            self._close(lane, step + first)
        self._settle(storage.shape[0])
        self._note(first)

    def _make_room(self, rows: int) -> None:
        """Make room for the ends of this many rows. It grows on demand, as a storage may never reach its capacity."""
        there = len(self._ends)
        if rows > there:
            more = min(self.capacity, max(rows, 2 * there)) - there
            self._ends = np.concatenate([self._ends, np.zeros((more, self.lanes), bool)])

    def _settle(self, rows: int) -> None:
        """Update the trajectories to the present rows, and start a new version."""
        np.maximum(self._open, self.oldest, out=self._open)
        for runs in (self._runs, *self._eligible.values()):
            runs.follow(self._open, self.newest, self.oldest)
        self._rows = rows
        self.version += 1

    def _note(self, first: int) -> None:
        """Record the first step that this version changed, and drop old records."""
        since, firsts = self._changed or (self.version - 1, [])
        firsts.append(first)
        if len(firsts) > _REMEMBERED:
            since, firsts = since + len(firsts) // 2, firsts[len(firsts) // 2 :]
        self._changed = (since, firsts)

    def _close(self, lane: Numbers, stop: Numbers) -> None:
        """End trajectories at the steps `stop`, which are ordered by lane and time."""
        start = np.empty_like(stop)
        start[1:] = stop[:-1] + 1
        begins = np.ones(len(lane), bool)
        begins[1:] = lane[1:] != lane[:-1]
        start[begins] = self._open[lane[begins]]
        last = np.ones(len(lane), bool)
        last[:-1] = begins[1:]
        self._open[lane[last]] = stop[last] + 1
        for runs in (self._runs, *self._eligible.values()):
            runs.append(lane, start, stop)

    def _build(self, storage: Storage, now: Written) -> None:
        """Read the boundaries of all rows."""
        rows = storage.shape[0]
        self.lanes = int(np.prod(storage.shape[1:], dtype=np.int64))
        self.capacity = max(rows, min(storage.max_size // self.lanes, _ENDLESS))
        following = now.next_row % self.capacity
        early = max(rows - following, 0)  # rows behind the cursor, which come before row 0 in time
        gap = early > 0 and rows < self.capacity  # rows between the last one and row 0 were never written
        late = rows - early
        offset = self.capacity if early else 0
        self.oldest = following if early else 0
        self.newest = offset + late - 1
        self._ends = np.zeros((rows, self.lanes), bool)
        self._runs, self._eligible = LaneRuns(self.lanes, SliceRule()), {}
        self._open = np.full(self.lanes, self.oldest)
        if early:
            self._ends[late:] = self.source.ends(storage, slice(late, rows))
            if gap:
                self._ends[-1] = True
            elif late and self.source.looks_ahead:
                self._ends[-1] = self.source.ends(storage, np.array([rows - 1, 0]))[0]
            self._close_all(late, rows, 0)
        if gap:
            self._open[:] = offset
        if late:
            self._ends[:late] = self.source.ends(storage, slice(0, late))
            self._close_all(0, late, offset)
        self._settle(rows)
        self._changed = None

    def _close_all(self, begin: int, stop: int, offset: int) -> None:
        """End trajectories at the known ends from row `begin` to `stop`; step numbers are rows plus `offset`."""
        lane, row = np.nonzero(self._ends[begin:stop].T)
        if len(lane):
            self._close(lane, row + (begin + offset))

    # Looking up --------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of trajectories in all lanes."""
        return self._runs.count

    def runs(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of all trajectories, lane by lane, oldest first."""
        return self._runs.all()

    def eligible(self, rule: SliceRule) -> LaneRuns:
        """Return the trajectories that have a slice by this rule, kept up to date from now on."""
        found = self._eligible.get(rule)
        return self._list_eligible(rule) if found is None else found

    def _list_eligible(self, rule: SliceRule) -> LaneRuns:
        with _LOCK:
            found = LaneRuns(self.lanes, rule)
            found.append(*self._runs.over())
            found.follow(self._open, self.newest, self.oldest)
            while len(self._eligible) >= _KEPT:
                del self._eligible[next(iter(self._eligible))]
            self._eligible[rule] = found
            return found

    def only_lane(self) -> tuple[Numbers, Numbers] | None:
        """Return first and last steps of all trajectories, oldest first; do not edit them. None if there are several
        lanes.
        """
        return self._runs.bounds() if self.lanes == 1 else None

    def steps_at(self, row: Numbers) -> Numbers:
        """Return the absolute step numbers of rows of the storage."""
        return self.oldest + (row - self.oldest) % self.capacity

    def age(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return how many stored steps of its trajectory come before each step; int64 `[n]`, arguments as for
        `reach`.
        """
        return step - self._runs.start_of(step, lane)

    def reach(self, step: Numbers, lane: Numbers, limit: int | None = None) -> Numbers:
        """Return how many steps there are from each step to the end of its trajectory, both inclusive; int64 `[n]`.

        Args:
            step: absolute numbers of stored steps.
            lane: their lanes.
            limit: the result is at most this, which makes it cheaper.
        """
        if limit is None or self.lanes == 1:
            return self._runs.stop_of(step, lane) - step + 1
        ahead = step[:, None] + np.arange(limit)
        rows = np.minimum(ahead % self.capacity, len(self._ends) - 1)  # an end comes before any row beyond
        over = self._ends[rows, lane[:, None]]
        over |= ahead >= self.newest
        return np.where(over.any(1), over.argmax(1) + 1, limit)

    def changes(self, since: int) -> tuple[int, int] | None:
        """Return the first and last step added since a version; None if other steps changed, too.

        Slices that start before the first of them may now extend into it.
        """
        if since == self.version:
            return self.newest + 1, self.newest
        if self._changed is None or self._changed[0] > since:
            return None
        place = since - self._changed[0]
        return self._changed[1][place], self.newest


@dataclass(frozen=True, slots=True)
class Runs:
    """Trajectories, lane by lane and oldest first, with the absolute numbers of their first and last steps."""

    lane: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def of(cls, table: TrajectoryTable) -> Runs:
        """Return all trajectories of a table."""
        lane, start, length = table.runs()
        return cls(lane, start.copy(), start + length - 1)  # copied, as first and last steps are edited in place

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def length(self) -> Numbers:
        """The number of steps of each trajectory."""
        return self.last - self.first + 1

    def moved(self, steps: int) -> Runs:
        """Return the trajectories with step numbers moved by `steps`."""
        return Runs(self.lane, self.first + steps, self.last + steps)

    def by_place(self, rows: int, turned: tuple[int, int] = (0, 0)) -> Numbers:
        """Return TorchRL's order: lane by lane, by the row of the last step.

        `turned` is a pair of a row and a number of rows: the order is then the one before a ring of that many rows was
        rotated so that the row became row 0.
        """
        row, before = turned
        place = self.last % rows
        return np.lexsort(((place + row) % before if before else place, self.lane))

    def found_in(self, other: Runs) -> Numbers:
        """Return, for each trajectory, its number in `other`, a later state; -1 if its last row is gone."""
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


_FIRST_WIDTH = 16

_MANY = 32
"""If more new trajectories than this are added per lane, `append` loops over lanes, which takes less memory."""


class LaneRuns:
    """The trajectories of `lanes` lanes that are long enough for a slice, ready to be drawn.

    Each lane is a queue in a row of an array, in absolute step numbers:

        removed │ head … ended trajectories … tail │ growing │ free
                                                   ↑ _tail   ↑ _end

    `append` adds trajectories that have ended; `follow` removes overwritten ones at the head, cuts the oldest one, and
    puts the growing one at the end. Each trajectory also has the cumulative number of possible starts in its lane, with
    which starts are drawn uniformly. All lanes have the same amount of room.
    """

    def __init__(self, lanes: int, rule: SliceRule) -> None:
        self.rule = rule
        self.minimum = rule.minimum
        self.count = 0
        """The number of trajectories in all lanes."""
        self._lanes = np.arange(lanes)
        self._head: Numbers = np.zeros(lanes, np.int64)
        self._tail: Numbers = np.zeros(lanes, np.int64)  # behind the ended ones
        self._end: Numbers = np.zeros(lanes, np.int64)  # behind the growing one
        self._start, self._stop, self._places = (np.zeros((lanes, _FIRST_WIDTH), np.int64) for _ in range(3))
        self._sums: Numbers = np.zeros(lanes, np.int64)
        self._kept = _Kept()

    # Keeping up --------------------------------------------------------------------------------------

    def append(self, lane: Numbers, start: Numbers, stop: Numbers) -> None:
        """Add trajectories from `start` to `stop`, both inclusive, ordered by lane and time."""
        long = stop - start + 1 >= self.minimum
        if not long.all():
            lane, start, stop = lane[long], start[long], stop[long]
        if not len(lane):
            return
        new = np.bincount(lane, minlength=len(self._lanes))
        self._make_room(new)
        places = self.rule.starts(stop - start + 1)
        before, end = self._places_before(self._tail), np.cumsum(new)
        if len(lane) < _MANY * len(new):
            place = self._tail[lane] + np.arange(len(lane)) - (end - new)[lane]
            within = np.cumsum(places)
            within -= (within - places)[(end - new)[lane]]  # a running sum for each lane
            self._start[lane, place], self._stop[lane, place] = start, stop
            self._places[lane, place] = before[lane] + within
        else:  # lane by lane, without additional memory
            for number in np.flatnonzero(new):
                there = slice(self._tail[number], self._tail[number] + new[number])
                own = slice(end[number] - new[number], end[number])
                self._start[number, there], self._stop[number, there] = start[own], stop[own]
                np.cumsum(places[own], out=self._places[number, there])
                self._places[number, there] += before[number]
        self._tail += new

    def _make_room(self, new: Numbers) -> None:
        """Make room for this many new trajectories per lane, and for the growing one."""
        width = self._start.shape[1]
        if int((self._tail + new).max()) < width:
            return
        there = self._tail - self._head
        lasting = int((there + new).max()) + 1
        wider = max(_FIRST_WIDTH, 2 * lasting)  # doubling makes the cost of appends amortized constant
        columns = np.arange(int(there.max()))
        source = np.minimum(self._head[:, None] + columns, width - 1)
        gone = self._places_before(self._head)
        for name in ("_start", "_stop", "_places"):
            moved = np.zeros((len(self._lanes), wider), np.int64)
            moved[:, : len(columns)] = getattr(self, name)[self._lanes[:, None], source]
            setattr(self, name, moved)
        self._places[:, : len(columns)] -= gone[:, None]
        self._tail = there
        self._head = np.zeros_like(there)

    def _places_before(self, number: Numbers) -> Numbers:
        """Return the number of starts before the `number`-th trajectory of each lane."""
        return np.where(number > 0, self._places[self._lanes, np.maximum(number - 1, 0)], 0)

    def follow(self, growing: Numbers, newest: int, oldest: int) -> None:
        """Update to the present steps `oldest` to `newest`; steps from `growing` on belong to the growing
        trajectory.
        """
        lanes = self._lanes
        shortest = oldest + self.minimum - 1  # an oldest trajectory that ends before this is too short
        if ((self._head < self._tail) & (self._stop[lanes, self._head] < shortest)).any():
            self._end = self._tail
            self._head = self._first_above(self._stop, lanes, np.full(len(lanes), shortest - 1))
        length = newest - growing + 1
        self._end = self._tail + (length >= self.minimum)
        self._start[lanes, self._tail], self._stop[lanes, self._tail] = growing, newest
        places = self.rule.starts(np.maximum(length, 1))
        self._places[lanes, self._tail] = self._places_before(self._tail) + places
        first = self._start[lanes, self._head]
        self._start[lanes, self._head] = np.maximum(first, oldest)
        self._sums = np.cumsum(self._end - self._head)
        self.count = int(self._sums[-1])
        self._kept = _Kept()

    # Drawing -----------------------------------------------------------------------------------------

    def by_number(self, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories given by number, from 0 to `count - 1`."""
        if len(self._lanes) == 1:
            place = number + self._head[0]
            start = self._start[0][place]
            return np.zeros(len(number), np.int64), start, self._stop[0][place] - start + 1
        lane, number = _split(self._sums, number)
        return (lane, *self._at(lane, self._head[lane] + number))

    def by_start(self, place: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories given by one of their starts, from 0 to `start_count -
        1`.

        The fourth array numbers these starts within their trajectories, from 0.
        """
        mass = self._masses()
        lane, place = _split(mass.sums, place)
        target = place + mass.lost[lane]
        found = self._first_above(self._places, lane, target)
        own = np.where(found == self._head[lane], place, target - self._places[lane, np.maximum(found - 1, 0)])
        return (lane, *self._at(lane, found), own)

    def bounds(self) -> tuple[Numbers, Numbers]:
        """Return first and last steps of the trajectories of the only lane, as views."""
        there = slice(int(self._head[0]), int(self._end[0]))
        return self._start[0, there], self._stop[0, there]

    def table(self, rows: int, *, by_start: bool) -> SliceTable:
        """Return the trajectories of the only lane, in a ring of this many rows, for draws of whole slices.

        It is cached, and valid until the next `append` or `follow`.
        """
        tables = self._kept.tables
        found = tables.get(by_start)
        if found is None:
            found = tables[by_start] = self._table(rows, by_start=by_start)
        return found

    def _table(self, rows: int, *, by_start: bool) -> SliceTable:
        there = slice(int(self._head[0]), int(self._end[0]))
        first, last = self.bounds()
        if not by_start:
            return SliceTable(first, last, rows)
        mass = self._masses()
        return SliceTable(first, last, rows, self._places[0, there], int(mass.sums[0]), int(mass.lost[0]))

    @property
    def start_count(self) -> int:
        """The number of possible starts in all lanes."""
        return int(self._masses().sums[-1])

    def _masses(self) -> _Mass:
        kept = self._kept
        if kept.mass is None:
            lanes, head = self._lanes, self._head
            first = self.rule.starts(self._stop[lanes, head] - self._start[lanes, head] + 1)
            lost = self._places[lanes, head] - first
            held = np.where(self._end > head, self._places[lanes, np.maximum(self._end - 1, 0)] - lost, 0)
            kept.mass = _Mass(lost, np.cumsum(held))
        return kept.mass

    # Looking up --------------------------------------------------------------------------------------

    def all(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of all trajectories, lane by lane, oldest first."""
        return self._listed(self._end)

    def over(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first and last steps of the trajectories that have ended, in the same order."""
        lane, start, length = self._listed(self._tail)
        return lane, start, start + length - 1

    def _listed(self, end: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        counts = end - self._head
        lane = np.repeat(self._lanes, counts)
        number = np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)
        return (lane, *self._at(lane, self._head[lane] + number))

    def start_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the first steps of the trajectories to which steps belong."""
        return self._start[lane, self._of(step, lane)]

    def stop_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the last steps of the trajectories to which steps belong."""
        found = self._of(step, lane)
        return self._stop[0].take(found) if len(self._lanes) == 1 else self._stop[lane, found]

    def _of(self, step: Numbers, lane: Numbers) -> Numbers:
        found = self._first_above(self._stop, lane, step - 1)
        return np.minimum(found, self._end[lane] - 1)

    def _at(self, lane: Numbers, place: Numbers) -> tuple[Numbers, Numbers]:
        start = self._start[lane, place]
        return start, self._stop[lane, place] - start + 1

    def _first_above(self, values: Numbers, lane: Numbers, target: Numbers) -> Numbers:
        """Return, for each lane, the first trajectory whose value is above the target, or the end of the lane."""
        if len(self._lanes) == 1:
            begin, end = int(self._head[0]), int(self._end[0])
            return begin + np.searchsorted(values[0, begin:end], target, side="right")
        low, high = self._head[lane], self._end[lane]
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) // 2
            right = (middle < high) & (values[lane, np.minimum(middle, values.shape[1] - 1)] <= target)
            low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
        return low


class _Mass(NamedTuple):
    """The starts removed from each lane so far, and the cumulative number of present starts over lanes."""

    lost: Numbers
    sums: Numbers


@dataclass(slots=True)
class _Kept:
    """Values derived from the present trajectories.

    When the trajectories change, a new object replaces it: a thread that is still computing then fills the old one.
    """

    mass: _Mass | None = None
    tables: dict[bool, SliceTable] = field(default_factory=dict)


def _split(sums: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Split numbers that count through all lanes into lanes and numbers within them."""
    if len(sums) == 1:
        return np.zeros(len(number), np.int64), number
    lane = np.searchsorted(sums, number, side="right")
    return lane, number - np.where(lane > 0, sums[np.maximum(lane - 1, 0)], 0)
