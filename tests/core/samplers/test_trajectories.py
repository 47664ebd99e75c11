"""The table of trajectories: through any history it is what a table that is made from scratch would be.

The queue of trajectories that a lane is, is held against lists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.kernels.slices import SliceRule
from rbtool.core.samplers.trajectories import (
    BoundarySource,
    EpisodeBoundaries,
    FlagBoundaries,
    IdBoundaries,
    LaneRuns,
    TrajectoryTable,
    trajectory_table,
)
from rbtool.core.storages.dataset import StepStorage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage

EPISODES = [(4, "terminated"), (1, "truncated"), (6, "open"), (2, "both")]
DONE = FlagBoundaries((("next", "done"),))
SIGNALS = (DONE, FlagBoundaries((("cut",), ("nowhere",), ("next", "done"))), IdBoundaries(("id",)))
RULES = (SliceRule(1), SliceRule(2, 2), SliceRule(3, 1, 2, 1), SliceRule(2, 2, 0, 1))


def steps(codes: list[int], ndim: int = 1) -> TensorDict:
    """Rows of one or two lanes, made of numbers that say what is set in each."""
    code = torch.tensor(codes) if ndim == 1 else torch.tensor([[each, each // 3] for each in codes])
    flags = {"done": (code % 4 == 0).unsqueeze(-1)}
    return TensorDict({"id": code // 6, "cut": code % 5 == 0, "next": flags}, code.shape)


def listed(table: TrajectoryTable) -> list[tuple[int, int, int]]:
    """All trajectories as lane, first row and length."""
    lane, start, length = table.runs()
    return sorted(zip(lane.tolist(), (start % table.capacity).tolist(), length.tolist(), strict=True))


def check(storage: Any) -> None:
    """Compare tables that were kept up to date with fresh ones, and with all that they say of themselves."""
    for signal in SIGNALS:
        kept, fresh = trajectory_table(storage, signal), TrajectoryTable(storage, signal)
        kept.refresh()
        fresh.refresh()
        assert listed(kept) == listed(fresh)
        lane, start, length = kept.runs()
        assert (np.lexsort((start, lane)) == np.arange(kept.count)).all()
        assert length.sum() == len(storage)
        of = np.repeat(np.arange(kept.count), length)
        place = np.arange(len(of)) - np.repeat(np.cumsum(length) - length, length)
        assert (kept.reach(start[of] + place, lane[of]) == length[of] - place).all()
        assert (np.minimum(kept.reach(start[of] + place, lane[of], 2), 2) == np.minimum(length[of] - place, 2)).all()
        for rule in RULES:
            check_eligible(kept, rule)


def check_eligible(table: TrajectoryTable, rule: SliceRule) -> None:
    runs = np.stack(table.runs(), 1)
    long = runs[runs[:, 2] >= rule.minimum]
    eligible = table.eligible(rule)
    assert eligible.count == len(long)
    if not len(long):
        return
    found = np.stack(eligible.by_number(np.arange(eligible.count)), 1)
    assert sorted(map(tuple, found)) == sorted(map(tuple, long))
    places = rule.starts(long[:, 2])
    assert eligible.start_count == places.sum()
    drawn = np.stack(eligible.by_start(np.arange(eligible.start_count)), 1)
    expected = [(*run, place) for run, count in zip(long.tolist(), places, strict=True) for place in range(count)]
    assert sorted(map(tuple, drawn)) == sorted(expected)


codes = st.integers(0, 19)
deeds = st.one_of(
    st.tuples(st.just("extend"), st.lists(codes, min_size=1, max_size=12)),
    st.tuples(st.just("add"), codes),
    st.tuples(st.just("edit"), st.tuples(st.integers(0, 99), codes)),
    st.tuples(st.just("write_at"), st.lists(st.tuples(st.integers(0, 99), codes), min_size=1, max_size=3)),
    st.tuples(st.just("set_"), st.sampled_from(["id", "cut"])),
    st.tuples(st.just("empty"), st.none()),
    st.tuples(st.just("load"), st.integers(0, 2)),
    st.tuples(st.just("check"), st.none()),
    st.tuples(st.just("check"), st.none()),
)


def done(buffer: ReplayBuffer, what: str, how: Any, ndim: int) -> ReplayBuffer:
    """Do one thing; return the buffer to go on with."""
    storage = buffer.storage
    if what == "extend":
        buffer.extend(steps(how, ndim))
    elif what == "add":
        buffer.add(steps([how], ndim)[0])
    elif not len(buffer):
        return buffer
    elif what == "edit":
        storage[how[0] % storage.shape[0]] = steps([how[1]], ndim)[0]
    elif what == "write_at":
        places = torch.tensor([place % storage.shape[0] for place, _ in how])
        buffer.writer.write_at(places, steps([code for _, code in how], ndim))
    elif what == "set_":
        buffer.set_(how, buffer[:][how].flip(0))
    elif what == "empty":
        buffer.empty()
    elif what == "load":
        other = made(storage.max_size // ndim + how, ndim)
        other.load_state_dict(buffer.state_dict())
        return other
    elif what == "check":
        check(storage)
    return buffer


def made(capacity: int, ndim: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity * ndim, ndim=ndim), dim_extend=0)


@settings(max_examples=120)
@given(capacity=st.integers(1, 9), ndim=st.integers(1, 2), history=st.lists(deeds, max_size=25))
def test_a_table_kept_up_to_date_equals_one_made_from_scratch(
    capacity: int, ndim: int, history: list[tuple[str, Any]]
) -> None:
    buffer = made(capacity, ndim)
    for what, how in history:
        buffer = done(buffer, what, how, ndim)
    if len(buffer):
        check(buffer.storage)


def test_a_table_stays_small_and_right_in_a_long_run() -> None:
    buffer, numbers = made(50, 1), np.random.default_rng(0)
    for _ in range(150):
        buffer.extend(steps(numbers.integers(0, 20, numbers.integers(1, 9)).tolist()))
        check(buffer.storage)
    assert trajectory_table(buffer.storage, DONE)._runs._start.shape[1] <= 256


class Counting(FlagBoundaries):
    """A signal that knows how many rows were asked of it."""

    asked = 0

    def ends(self, storage: Any, rows: Any) -> Any:
        found = super().ends(storage, rows)
        Counting.asked += len(found)
        return found


def test_only_new_rows_are_read() -> None:
    buffer = made(1000, 1)
    buffer.extend(steps([1] * 1500))
    table = trajectory_table(buffer.storage, Counting((("next", "done"),)))
    for deed, most in [
        (lambda: None, 1000),
        (lambda: None, 0),
        (lambda: buffer.extend(steps([1] * 3)), 4),
        (lambda: buffer.set_("id", torch.zeros(1000, dtype=torch.int64)), 0),
        (lambda: buffer.storage.__setitem__(5, steps([2])[0]), 3),
    ]:
        Counting.asked = 0
        deed()
        table.refresh()
        assert Counting.asked <= most
    assert table.count == 1


def test_an_edit_that_moves_no_end_leaves_the_version() -> None:
    buffer = made(10, 1)
    buffer.extend(steps([1] * 10))
    table = trajectory_table(buffer.storage, DONE)
    table.refresh()
    version = table.version
    buffer.storage[4] = steps([2])[0]
    table.refresh()
    assert table.version == version
    buffer.storage[4] = steps([4])[0]
    table.refresh()
    assert table.version > version
    assert table.changes(version) is None
    assert listed(table) == [(0, 0, 5), (0, 5, 5)]


def test_after_a_write_the_changes_are_the_new_rows() -> None:
    buffer = made(10, 1)
    buffer.extend(steps([1] * 8))
    table = trajectory_table(buffer.storage, DONE)
    table.refresh()
    version = table.version
    buffer.extend(steps([1] * 5))
    table.refresh()
    assert table.changes(version) == (8, 12)
    assert (table.oldest, table.newest) == (3, 12)


def test_there_is_one_table_for_a_storage_and_a_signal() -> None:
    buffer = made(10, 1)
    buffer.extend(steps([1] * 8))
    table = trajectory_table(buffer.storage, DONE)
    assert table is trajectory_table(buffer.storage, FlagBoundaries((("next", "done"),)))
    assert table is not trajectory_table(buffer.storage, SIGNALS[1])


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("capacity", [9, 10**12, None])
def test_lists_of_any_capacity_have_trajectories(make: Callable[[Any], Any], capacity: int | None) -> None:
    storage = make(capacity)
    buffer = ReplayBuffer(storage=storage)
    for _ in range(3):
        buffer.extend([steps([code])[0] for code in (1, 4, 1)])
    table = trajectory_table(storage, DONE)
    table.refresh()
    assert listed(table) == [(0, 0, 2), (0, 2, 3), (0, 5, 3), (0, 8, 1)]
    buffer.add(steps([4])[0])
    table.refresh()
    assert table.count == 4
    other = ReplayBuffer(storage=make(None))
    other.load_state_dict(buffer.state_dict())
    again = trajectory_table(other.storage, DONE)
    again.refresh()
    assert sum(length for _, _, length in listed(again)) == len(other)


def test_the_newest_row_is_an_end_after_a_load_into_a_larger_ring() -> None:
    buffer = made(6, 1)
    buffer.extend(steps([1] * 8))
    other = made(9, 1)
    other.load_state_dict(buffer.state_dict())
    table = trajectory_table(other.storage, DONE)
    table.refresh()
    assert listed(table) == [(0, 0, 6)]
    other.extend(steps([1] * 5))  # into the free rows, and on over the oldest
    table.refresh()
    assert listed(table) == [(0, 2, 9)]


@pytest.mark.parametrize("make", [DatasetStorage, lambda path: StepStorage(TedReader(path))])
def test_datasets_know_their_episodes(walks: Path, make: Callable[[Path], Any]) -> None:
    storage = make(walks)
    signals: list[BoundarySource] = [EpisodeBoundaries(), IdBoundaries(("episode",)), DONE]
    for signal in signals:
        table = trajectory_table(storage, signal)
        table.refresh()
        assert listed(table) == [(0, 0, 4), (0, 4, 1), (0, 5, 6), (0, 11, 2)]
    assert not trajectory_table(storage, EpisodeBoundaries()).source.keys


def test_an_empty_storage_and_a_signal_that_is_not_there_are_refused() -> None:
    buffer = made(4, 1)
    table = trajectory_table(buffer.storage, DONE)
    with pytest.raises(RuntimeError, match="empty"):
        table.refresh()
    buffer.extend(steps([1, 2]))
    table.refresh()
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        table.refresh()
    buffer.extend(steps([1]))
    table.refresh()
    assert table.count == 1
    with pytest.raises(KeyError, match=r"'nope' or 'next\.nope'"):
        trajectory_table(buffer.storage, FlagBoundaries((("nope",), ("next", "nope")))).refresh()
    with pytest.raises(KeyError, match="'nope'"):
        trajectory_table(buffer.storage, IdBoundaries(("nope",))).refresh()


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
@pytest.mark.parametrize(
    "rule", [SliceRule(1), SliceRule(3, 3), SliceRule(4, 1, 1, 2), SliceRule(2, 2, anchor="start")]
)
@pytest.mark.parametrize("chance", [0.02, 0.9])
def test_runs_are_those_of_lists(lanes: int, rule: SliceRule, chance: float) -> None:
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


def test_memory_does_not_grow_with_trajectories_that_are_gone() -> None:
    runs = LaneRuns(2, SliceRule())
    for step in range(5000):
        runs.append(np.arange(2), np.full(2, step), np.full(2, step))
        runs.follow(np.full(2, step + 1), step, max(0, step - 9))
    assert runs.count == 20
    assert runs._start.shape[1] < 64
