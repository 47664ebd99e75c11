"""Trajectories of every lane in the order of time, updated while a ring overwrites the oldest ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..kernels.parts import SliceTable

Numbers: TypeAlias = NDArray[np.int64]

_FIRST_WIDTH = 16

_MANY = 32
"""From so many new trajectories a lane on, `append` loops over lanes, which takes less memory."""


class Window(NamedTuple):
    """Where in a trajectory a slice of `length` steps may start.

    It may extend beyond the start by `left` steps and beyond the end by `right`, but at least one step is inside. With
    `strict` the trajectory has at least the length of the slice; else a shorter one is taken whole. An `anchored`
    slice has one possible start.
    """

    length: int = 1
    strict: bool = True
    left: int = 0
    right: int = 0
    anchored: bool = False

    @property
    def minimum(self) -> int:
        """The fewest steps of a trajectory."""
        return self.length if self.strict else 1

    @property
    def is_plain(self) -> bool:
        """Whether every slice has its whole length."""
        return self.strict and not self.left and not self.right

    def places(self, length: Numbers) -> Numbers:
        """Return the number of possible starts in trajectories of these lengths."""
        if self.anchored:
            return np.ones_like(length)
        if self.is_plain:
            return length - (self.length - 1)
        inside = np.minimum(length, self.length)
        places: Numbers = length - inside + 1
        if self.left:
            places = places + np.minimum(inside - 1, self.left)
        if self.right:
            places = places + np.minimum(inside - 1, self.right)
        return places


class LaneRuns:
    """The trajectories of `lanes` lanes that are long enough for a window, ready to be drawn.

    Steps have absolute numbers. Each lane is a queue: `append` adds trajectories that have ended; `follow` removes
    overwritten ones, cuts the oldest, and puts the growing one at the end. Each trajectory has the cumulative number of
    possible starts in its lane, by which starts are drawn uniformly. All lanes have the same room.
    """

    def __init__(self, lanes: int, window: Window) -> None:
        self.window = window
        self.minimum = window.minimum
        self.count = 0
        """The number of trajectories in all lanes."""
        self._lanes = np.arange(lanes)
        self._head: Numbers = np.zeros(lanes, np.int64)
        self._tail: Numbers = np.zeros(lanes, np.int64)  # behind those that have ended
        self._end: Numbers = np.zeros(lanes, np.int64)  # behind all
        self._start, self._stop, self._places = (np.zeros((lanes, _FIRST_WIDTH), np.int64) for _ in range(3))
        self._sums: Numbers = np.zeros(lanes, np.int64)
        self._kept = _Kept()

    # Keeping up --------------------------------------------------------------------------------------

    def append(self, lane: Numbers, start: Numbers, stop: Numbers) -> None:
        """Add trajectories from `start` to `stop`, both included, ordered by lane and time."""
        long = stop - start + 1 >= self.minimum
        if not long.all():
            lane, start, stop = lane[long], start[long], stop[long]
        if not len(lane):
            return
        new = np.bincount(lane, minlength=len(self._lanes))
        self._make_room(new)
        places = self.window.places(stop - start + 1)
        before, end = self._places_before(self._tail), np.cumsum(new)
        if len(lane) < _MANY * len(new):
            place = self._tail[lane] + np.arange(len(lane)) - (end - new)[lane]
            within = np.cumsum(places)
            within -= (within - places)[(end - new)[lane]]  # a running sum a lane
            self._start[lane, place], self._stop[lane, place] = start, stop
            self._places[lane, place] = before[lane] + within
        else:  # lane by lane, without further memory
            for number in np.flatnonzero(new):
                there = slice(self._tail[number], self._tail[number] + new[number])
                own = slice(end[number] - new[number], end[number])
                self._start[number, there], self._stop[number, there] = start[own], stop[own]
                np.cumsum(places[own], out=self._places[number, there])
                self._places[number, there] += before[number]
        self._tail += new

    def _make_room(self, new: Numbers) -> None:
        """Make room for so many new trajectories a lane, and for the growing one."""
        width = self._start.shape[1]
        if int((self._tail + new).max()) < width:
            return
        there = self._tail - self._head
        lasting = int((there + new).max()) + 1
        wider = max(_FIRST_WIDTH, 2 * lasting)  # amortized: once in as many appends as there are trajectories
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
        """Return the number of starts in all before the `number`-th of each lane."""
        return np.where(number > 0, self._places[self._lanes, np.maximum(number - 1, 0)], 0)

    def follow(self, growing: Numbers, newest: int, oldest: int) -> None:
        """Update to the present steps, from `oldest` to `newest`; those from `growing` on belong to the growing one."""
        lanes = self._lanes
        shortest = oldest + self.minimum - 1  # the last step of the shortest possible oldest one
        if ((self._head < self._tail) & (self._stop[lanes, self._head] < shortest)).any():
            self._end = self._tail
            self._head = self._first_above(self._stop, lanes, np.full(len(lanes), shortest - 1))
        length = newest - growing + 1
        self._end = self._tail + (length >= self.minimum)
        self._start[lanes, self._tail], self._stop[lanes, self._tail] = growing, newest
        places = self.window.places(np.maximum(length, 1))
        self._places[lanes, self._tail] = self._places_before(self._tail) + places
        first = self._start[lanes, self._head]
        self._start[lanes, self._head] = np.maximum(first, oldest)
        self._sums = np.cumsum(self._end - self._head)
        self.count = int(self._sums[-1])
        self._kept = _Kept()

    # Drawing -----------------------------------------------------------------------------------------

    def by_number(self, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories by number, from 0 to `count - 1`."""
        if len(self._lanes) == 1:
            place = number + self._head[0]
            start = self._start[0][place]
            return np.zeros(len(number), np.int64), start, self._stop[0][place] - start + 1
        lane, number = _split(self._sums, number)
        return (lane, *self._at(lane, self._head[lane] + number))

    def by_start(self, place: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories by start, from 0 to `start_count - 1`.

        The fourth array numbers the starts within their trajectories, from 0.
        """
        mass = self._masses()
        lane, place = _split(mass.sums, place)
        target = place + mass.lost[lane]
        found = self._first_above(self._places, lane, target)
        own = np.where(found == self._head[lane], place, target - self._places[lane, np.maximum(found - 1, 0)])
        return (lane, *self._at(lane, found), own)

    def bounds(self) -> tuple[Numbers, Numbers]:
        """Return the first and last steps of the trajectories of the only lane, as views."""
        there = slice(int(self._head[0]), int(self._end[0]))
        return self._start[0, there], self._stop[0, there]

    def table(self, rows: int, *, by_start: bool) -> SliceTable:
        """Return the trajectories of the only lane of a ring of so many rows, for draws of whole slices.

        It is valid, and kept, up to the next `append` or `follow`.
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
            first = self.window.places(self._stop[lanes, head] - self._start[lanes, head] + 1)
            lost = self._places[lanes, head] - first
            held = np.where(self._end > head, self._places[lanes, np.maximum(self._end - 1, 0)] - lost, 0)
            kept.mass = _Mass(lost, np.cumsum(held))
        return kept.mass

    # Looking up --------------------------------------------------------------------------------------

    def all(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of all, lane by lane, the oldest first."""
        return self._listed(self._end)

    def over(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first and last steps of those that have ended, in the same order."""
        lane, start, length = self._listed(self._tail)
        return lane, start, start + length - 1

    def _listed(self, end: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        counts = end - self._head
        lane = np.repeat(self._lanes, counts)
        number = np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)
        return (lane, *self._at(lane, self._head[lane] + number))

    def start_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the first steps of the trajectories of steps."""
        return self._start[lane, self._of(step, lane)]

    def stop_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the last steps of the trajectories of steps."""
        found = self._of(step, lane)
        return self._stop[0].take(found) if len(self._lanes) == 1 else self._stop[lane, found]

    def _of(self, step: Numbers, lane: Numbers) -> Numbers:
        found = self._first_above(self._stop, lane, step - 1)
        return np.minimum(found, self._end[lane] - 1)

    def _at(self, lane: Numbers, place: Numbers) -> tuple[Numbers, Numbers]:
        start = self._start[lane, place]
        return start, self._stop[lane, place] - start + 1

    def _first_above(self, values: Numbers, lane: Numbers, target: Numbers) -> Numbers:
        """Return the first trajectory of each lane whose value is above the target, or the end of the lane."""
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
    """The starts that were removed from each lane, and the cumulative number of present ones over lanes."""

    lost: Numbers
    sums: Numbers


@dataclass(slots=True)
class _Kept:
    """What follows from the present trajectories.

    Another one takes its place when they change: a thread that works it out meanwhile puts it into the old one.
    """

    mass: _Mass | None = None
    tables: dict[bool, SliceTable] = field(default_factory=dict)


def _split(sums: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Split numbers that count through all lanes into lanes and numbers within them."""
    if len(sums) == 1:
        return np.zeros(len(number), np.int64), number
    lane = np.searchsorted(sums, number, side="right")
    return lane, number - np.where(lane > 0, sums[np.maximum(lane - 1, 0)], 0)
