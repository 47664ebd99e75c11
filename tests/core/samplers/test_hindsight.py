"""Goals in hindsight: the compiled loops choose the steps, and read the rows, that numpy does; rings wrap."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, assert_close

from rbtool import HindsightStrategy, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from rbtool.core.samplers import hindsight
from rbtool.core.samplers.hindsight import AchievedRows, HindsightReader
from rbtool.core.samplers.trajectories import StrictBoundaries, TableFinder, TrajectoryTable, trajectory_table

CAPACITY = 16


def table_of(lengths: list[int], written: int, storage: LazyTensorStorage) -> TrajectoryTable:
    """Trajectories of these lengths, again and again, of which so many steps are written to a ring."""
    ends = np.isin(np.arange(1, written + 1), np.cumsum(lengths * written))
    buffer = TensorDictReplayBuffer(storage=storage)
    for first in range(0, written, 5):
        done = torch.from_numpy(ends[first : first + 5]).unsqueeze(-1)
        buffer.extend(TensorDict({"next": TensorDict({"done": done}, [len(done)])}, [len(done)]))
    table = trajectory_table(storage, StrictBoundaries(("next", "done"), any_flag=True).source(storage))
    table.refresh()
    return table


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3 * CAPACITY), st.integers(0, 99))
@pytest.mark.parametrize("strategy", [strategy for strategy in HindsightStrategy if strategy != "random"])
def test_the_compiled_loop_chooses_the_same_rows(strategy: Any, lengths: list[int], written: int, seed: int) -> None:
    storage = LazyTensorStorage(CAPACITY)
    table, achieved = table_of(lengths, written, storage), AchievedRows(strategy)
    rows = np.tile(np.arange(len(storage)), 3)
    chances = np.random.default_rng(seed).random(len(rows))
    chances[::7], chances[3::7] = 0, 1 - 2**-53
    first = achieved.along(table, rows, None, chances)
    for _ in range(60):  # the loops are imported on the way
        found = achieved.along(table, rows, None, chances)
    assert found.tolist() == first.tolist()
    lane = np.zeros_like(rows)
    step, goal = table.steps_at(rows), table.steps_at(found)
    assert (table.reach(goal, lane) + goal == table.reach(step, lane) + step).all()


GOAL, ACHIEVED = (("goal",), ("next", "goal")), ("achieved",)
TABLES = TableFinder(StrictBoundaries(("next", "done"), any_flag=True).source)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindsight, "_PATIENCE", 0)


def steps(ends: np.ndarray[Any, Any], first: int) -> TensorDict:
    """Steps from number `first` on, in columns of 1, 4, 8 and 12 bytes a row."""
    number = torch.arange(first, first + len(ends))
    data = TensorDict({"achieved": number.float().unsqueeze(-1) + torch.tensor([0.0, 0.25, 0.5])}, [len(ends)])
    data["goal"], data["number"] = -data["achieved"], number
    data["next"] = TensorDict({"goal": 2 * data["goal"], "reward": number.half()}, [len(ends)])
    data["next", "done"] = torch.from_numpy(ends).unsqueeze(-1)
    return data


def written(storage: Any, ends: np.ndarray[Any, Any], change: Any = lambda data: data) -> Any:
    buffer = TensorDictReplayBuffer(storage=storage)
    for first in range(0, len(ends), 5):
        buffer.extend(change(steps(ends[first : first + 5], first)))
    return storage


def reader(strategy: str = "future", keys: Any = GOAL, achieved: Any = ACHIEVED) -> HindsightReader:
    return HindsightReader(HindsightStrategy(strategy), keys, achieved)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3 * CAPACITY), st.integers(0, 99),
    st.floats(0.01, 1), st.sampled_from(list(HindsightStrategy)),
)  # fmt: skip
def test_rows_and_goals_are_those_read_apart(
    lengths: list[int], count: int, seed: int, share: float, strategy: Any
) -> None:
    storage = written(LazyTensorStorage(CAPACITY), np.isin(np.arange(1, count + 1), np.cumsum(lengths * count)))
    random = np.random.default_rng(seed)
    index, chances = random.integers(0, len(storage), 40), random.random(max(1, int(40 * share)))
    found = reader(strategy).read(storage, torch.from_numpy(index), chances, TABLES)
    assert found is not None
    achieved, first = AchievedRows(strategy), index[: len(chances)]
    rows = (
        achieved.anywhere(storage, chances)[0] if strategy == "random"
        else achieved.along(TABLES.table(storage), first, None, chances)
    )  # fmt: skip
    expected, goals = storage.get(torch.from_numpy(index)), storage.get(torch.from_numpy(rows))["achieved"]
    expected["goal"][: len(rows)] = expected["next", "goal"][: len(rows)] = goals
    assert_close(found.batch, expected, atol=0, rtol=0)
    assert_close(found.first, expected[: len(rows)], atol=0, rtol=0)
    found.first["number"].zero_()
    assert not found.batch["number"][: len(rows)].any()


def test_goals_under_next_need_not_be_stored() -> None:
    ends = np.ones(9, bool)
    storage = written(LazyTensorStorage(9), ends, lambda data: data.exclude(("next", "goal")))
    found = reader().read(storage, torch.arange(9), np.zeros(4), TABLES)
    assert found is not None
    assert found.batch["goal"].equal(storage[:]["achieved"].where(torch.arange(9).view(9, 1) < 4, storage[:]["goal"]))


@pytest.mark.parametrize(
    ("keys", "achieved", "change"),
    [
        ((("other",),), ACHIEVED, None),
        (GOAL, ("other",), None),
        ((("number",),), ACHIEVED, None),
        (GOAL, ACHIEVED, lambda data: data.set("goal", data["goal"].double())),
        (GOAL, ACHIEVED, lambda data: data.set(("next", "goal"), data["number"])),
        (GOAL, ACHIEVED, lambda data: data.set("image", data["goal"].bfloat16())),
    ],
)
def test_rows_that_the_compiled_reader_cannot_read_are_not_read(keys: Any, achieved: Any, change: Any) -> None:
    storage = written(LazyTensorStorage(CAPACITY), np.ones(9, bool), change or (lambda data: data))
    assert reader("future", keys, achieved).read(storage, torch.arange(9), np.zeros(4), TABLES) is None


@pytest.mark.parametrize("index", [[0, -1], [0, 9], [9, 0], [[0, 1]]])
def test_missing_rows_are_not_read_by_the_compiled_reader(index: Any) -> None:
    storage = written(LazyTensorStorage(CAPACITY), np.ones(9, bool))
    assert reader().read(storage, torch.tensor(index), np.zeros(1), TABLES) is None
    assert reader().read(storage, torch.tensor([0]), np.zeros(2), TABLES) is None
    assert reader().read(written(ListStorage(9), np.ones(9, bool)), torch.tensor([0]), np.zeros(1), TABLES) is None


def test_batches_that_are_held_stay_as_they_are() -> None:
    storage, read = written(LazyTensorStorage(CAPACITY), np.zeros(CAPACITY, bool)), reader()
    held: list[Any] = []
    for number in range(12):
        index = torch.randint(CAPACITY, (8,))
        found = read.read(storage, index, np.zeros(5), TABLES)
        assert found is not None
        kept = [found.batch["number"], found.first["number"], found.first["number"].numpy()][number % 3]
        held.append((kept, index[: len(kept)]))
        del found
    assert all(np.array_equal(np.asarray(kept), index) for kept, index in held)


def test_exchanged_and_moved_columns_are_followed() -> None:
    read, index = reader("final"), torch.tensor([3, 1])
    storage = written(LazyTensorStorage(CAPACITY), np.zeros(9, bool))
    for other in (storage, written(LazyTensorStorage(CAPACITY), np.arange(7) > 2), storage):
        found = read.read(other, index, np.zeros(2), TABLES)
        assert found is not None
        assert found.batch["number"].equal(index)
        assert found.batch is found.first
    storage.share()
    storage[0:9]["achieved"].fill_(7)
    found = pickle.loads(pickle.dumps(read)).read(storage, index, np.zeros(2), TABLES)
    assert (found.batch["goal"] == 7).all()
    found = read.read(storage, index, np.zeros(2), TABLES)
    assert found is not None
    assert (found.batch["goal"] == 7).all()
