"""Rows of achieved goals: the compiled loop against numpy, in rings that wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import HindsightStrategy, LazyTensorStorage, TensorDictReplayBuffer
from rbtool.core.samplers.boundaries import StrictBoundaries
from rbtool.core.samplers.hindsight import AchievedRows
from rbtool.core.samplers.trajectories import TrajectoryTable, trajectory_table

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


@settings(max_examples=25, deadline=None)
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
