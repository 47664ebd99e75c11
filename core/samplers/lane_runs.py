"""Finished trajectories of every lane in the order of time, kept up to date while a ring takes the oldest away."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["LaneRuns", "Window"]

Numbers: TypeAlias = NDArray[np.int64]

_FIRST_WIDTH = 16


class Window(NamedTuple):
    """Where in a trajectory a slice of `length` steps may begin.

    It may hang over the beginning by `left` steps and over the end by `right`, but a step is always left of it. With
    `strict` the trajectory has to be as long as the slice; else a shorter one is taken whole, if nothing hangs over.
    An `anchored` slice has one place to begin at.
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
        """Count the places to begin at in trajectories of these lengths."""
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
    """The trajectories of `lanes` lanes that are over and long enough for a window.

    Steps are numbered in time, without end. In each lane trajectories come and go like in a queue: `append` adds the
    newest, `evict` removes what the ring has overwritten; of the oldest one some steps may be gone. Next to each
    stands how many places there were for a slice to begin at in all before it and itself, which makes it possible to
    draw by place.
    """

    def __init__(self, lanes: int, window: Window) -> None:
        self.minimum = window.minimum
        self.window = window
        self.oldest = 0
        self.head: Numbers = np.zeros(lanes, np.int64)
        self.tail: Numbers = np.zeros(lanes, np.int64)
        self._start, self._stop, self._places = (np.zeros((lanes, _FIRST_WIDTH), np.int64) for _ in range(3))

    @property
    def counts(self) -> Numbers:
        """How many there are in each lane, int64 `[lanes]`."""
        return self.tail - self.head

    # Keeping up --------------------------------------------------------------------------------------

    def append(self, lane: Numbers, start: Numbers, stop: Numbers) -> None:
        """Add trajectories from `start` to `stop`, both included, in order of lanes and then of time."""
        long = stop - start + 1 >= self.minimum
        if not long.all():
            lane, start, stop = lane[long], start[long], stop[long]
        if not len(lane):
            return
        new = np.bincount(lane, minlength=len(self.head))
        self._make_room(new)
        begin = np.cumsum(new) - new
        place = self.tail[lane] + np.arange(len(lane)) - begin[lane]
        self._start[lane, place], self._stop[lane, place] = start, stop
        places = self.window.places(stop - start + 1)
        before = np.where(self.tail > 0, self._places[np.arange(len(new)), np.maximum(self.tail - 1, 0)], 0)
        within = np.cumsum(places)
        within -= (within - places)[begin[lane]]  # a running sum a lane
        self._places[lane, place] = before[lane] + within
        self.tail += new

    def _make_room(self, new: Numbers) -> None:
        width = self._start.shape[1]
        if int((self.tail + new).max()) <= width:
            return
        lasting = int((self.counts + new).max())
        wider = max(_FIRST_WIDTH, 2 * lasting)  # so that this happens once in as many appends as there are trajectories
        columns = np.arange(int(self.counts.max(initial=0)))
        source = np.minimum(self.head[:, None] + columns, width - 1)
        lanes = np.arange(len(self.head))[:, None]
        gone = np.where(self.head > 0, self._places[lanes[:, 0], np.maximum(self.head - 1, 0)], 0)
        for name in ("_start", "_stop", "_places"):
            moved = np.zeros((len(self.head), wider), np.int64)
            moved[:, : len(columns)] = getattr(self, name)[lanes, source]
            setattr(self, name, moved)
        self._places[:, : len(columns)] -= gone[:, None]
        self.tail -= self.head
        self.head[:] = 0

    def evict(self, oldest: int) -> None:
        """Take away what is too short when steps before `oldest` are gone."""
        self.oldest = oldest
        lanes = np.arange(len(self.head))
        while True:
            place = np.minimum(self.head, self._stop.shape[1] - 1)
            gone = (self.head < self.tail) & (self._stop[lanes, place] < oldest + self.minimum - 1)
            if not gone.any():
                return
            self.head += gone

    def clear(self) -> None:
        """Forget all trajectories."""
        self.head[:] = 0
        self.tail[:] = 0

    # Looking up --------------------------------------------------------------------------------------

    def at(self, lane: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
        """Return first and last step of the `number`-th trajectories of lanes, the oldest being 0."""
        if len(self.head) == 1:
            place = number + self.head[0]
            start = self._start[0][place]
            return (np.maximum(start, self.oldest) if self.oldest else start), self._stop[0][place]
        place = self.head[lane] + number
        return np.maximum(self._start[lane, place], self.oldest), self._stop[lane, place]

    def masses(self) -> Numbers:
        """Count the places for a slice to begin at in each lane, int64 `[lanes]`."""
        lanes = np.arange(len(self.head))
        some = self.tail > self.head
        first = np.where(some, self.head, 0)
        last = np.where(some, self.tail - 1, 0)
        rest = self._places[lanes, last] - self._places[lanes, first]
        return np.where(some, rest + self._first_places(), 0)

    def _first_places(self) -> Numbers:
        """Count the places in the oldest trajectory of each lane, of which some steps may be gone."""
        lanes = np.arange(len(self.head))
        place = np.minimum(self.head, self._start.shape[1] - 1)
        start = np.maximum(self._start[lanes, place], self.oldest)
        return self.window.places(self._stop[lanes, place] - start + 1)

    def by_place(self, lane: Numbers, place: Numbers) -> tuple[Numbers, Numbers]:
        """Find which trajectory of a lane holds a place, and which of its own places that is; both count from 0."""
        first = self._first_places()[lane]
        head = self.head[lane]
        target = place - first + self._places[lane, head]
        found = np.where(place < first, head, np.maximum(self._first_above(self._places, lane, target), head + 1))
        own = np.where(found == head, place, target - self._places[lane, np.maximum(found - 1, 0)])
        return found - head, own

    def stop_of(self, step: Numbers, lane: Numbers, beyond: int) -> Numbers:
        """Return the last steps of the trajectories that steps belong to; `beyond` where it is none of these."""
        found = self._first_above(self._stop, lane, step - 1)
        over = found >= self.tail[lane]
        return np.where(over, beyond, self._stop[lane, np.minimum(found, self._stop.shape[1] - 1)])

    def _first_above(self, values: Numbers, lane: Numbers, target: Numbers) -> Numbers:
        """Find the first trajectory of each lane whose value is above the target; the tail where there is none."""
        low, high = self.head[lane], self.tail[lane]
        if len(self.head) == 1:
            begin, end = int(self.head[0]), int(self.tail[0])
            return begin + np.searchsorted(values[0, begin:end], target, side="right")
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) // 2
            right = (middle < high) & (values[lane, np.minimum(middle, values.shape[1] - 1)] <= target)
            low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
        return low

    def all(self) -> tuple[Numbers, Numbers, Numbers]:
        """List lanes, first and last steps of all, lane by lane, the oldest first."""
        counts = self.counts
        lane = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)
        return (lane, *self.at(lane, number))
