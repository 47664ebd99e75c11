"""The queue of trajectories that a lane is, held against lists."""

from __future__ import annotations

import numpy as np
import pytest

from rbtool.core.kernels.slices import SliceRule
from rbtool.core.samplers.trajectories import LaneRuns


class Lists:
    """What `LaneRuns` is to hold, lane by lane: first and last steps."""

    def __init__(self, lanes: int) -> None:
        self.over: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
        self.growing = [0] * lanes
        self.newest = -1

    def grow(self, numbers: np.random.Generator, count: int, chance: float) -> list[tuple[int, int, int]]:
        """Write steps, and return the trajectories that have come to an end: lane, first and last step."""
        ended = []
        for lane in range(len(self.over)):
            for step in range(self.newest + 1, self.newest + 1 + count):
                if numbers.random() < chance:
                    ended.append((lane, self.growing[lane], step))
                    self.over[lane].append((self.growing[lane], step))
                    self.growing[lane] = step + 1
        self.newest += count
        return ended

    def listed(self, rule: SliceRule, oldest: int) -> list[tuple[int, int, int]]:
        """List lanes, first steps and lengths of those that are long enough."""
        found = []
        for lane, over in enumerate(self.over):
            for start, stop in (*over, (self.growing[lane], self.newest)):
                length = stop - max(start, oldest) + 1
                if length >= rule.minimum:
                    found.append((lane, max(start, oldest), length))
        return found


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("rule", [SliceRule(1), SliceRule(3), SliceRule(4, False, 1, 2), SliceRule(2, anchor="start")])
@pytest.mark.parametrize("chance", [0.02, 0.9])
def test_it_holds_what_lists_hold(lanes: int, rule: SliceRule, chance: float) -> None:
    numbers, lists, runs, oldest = np.random.default_rng(5), Lists(lanes), LaneRuns(lanes, rule), 0
    for count in (3, 400, 1, 60, 200, 1, 1, 300):  # many at once, few at once
        ended = lists.grow(numbers, count, chance)
        lane, start, stop = np.array(ended, dtype=np.int64).reshape(-1, 3).T
        runs.append(lane, np.maximum(start, oldest), stop)
        oldest = max(0, lists.newest - 250)
        runs.follow(np.maximum(np.array(lists.growing), oldest), lists.newest, oldest)
        expected = lists.listed(rule, oldest)
        assert list(zip(*(part.tolist() for part in runs.all()), strict=True)) == expected
        assert runs.count == len(expected)
        by_number = runs.by_number(np.arange(runs.count))
        assert list(zip(*(part.tolist() for part in by_number), strict=True)) == expected
        places = rule.starts(np.array([length for _, _, length in expected], dtype=np.int64)).tolist()
        assert runs.start_count == sum(places)
        by_start = runs.by_start(np.arange(runs.start_count))
        every = [(*run, place) for run, count in zip(expected, places, strict=True) for place in range(count)]
        assert list(zip(*(part.tolist() for part in by_start), strict=True)) == every


def test_room_is_made_for_what_lasts_not_for_all_that_ever_was() -> None:
    runs = LaneRuns(2, SliceRule())
    for step in range(5000):
        runs.append(np.arange(2), np.full(2, step), np.full(2, step))
        runs.follow(np.full(2, step + 1), step, max(0, step - 9))
    assert runs.count == 20
    assert runs._start.shape[1] < 64
