"""How episodes are found, and their rewards added up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.checkpointers.storage_rows import Order, StorageRows, keys_of
from rbtool.core.errors import UsageError
from rbtool.core.format.returns import episode_returns, running_return
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.ted.episodes import EndReason


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 99))
def test_returns_are_those_of_adding_one_by_one(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    rewards = draw.normal(size=sum(lengths)) * 10.0 ** draw.integers(-9, 9, sum(lengths))
    starts = np.cumsum(lengths) - lengths
    expected = [running_return(0.0, rewards[a : a + n]) for a, n in zip(starts, lengths, strict=True)]
    assert episode_returns(rewards, starts, np.array(lengths)).tolist() == expected


@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_returns_are_added_in_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("rbtool.core.format.returns._MOST_STEPS", most)
    done = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0]).bool().unsqueeze(-1)
    data = TensorDict({"next": {"done": done, "reward": torch.arange(9.0).unsqueeze(-1)}}, [9])
    table = StorageRows(TensorStorage(data)).episodes
    assert table.total_reward.tolist() == [3.0, 3.0, 22.0, 8.0]
    assert table.length.tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize(
    ("terminated", "truncated", "done", "reason"),
    [
        (True, False, True, EndReason.TERMINATED),
        (False, True, True, EndReason.TRUNCATED),
        (True, True, True, EndReason.BOTH),
        (False, False, True, EndReason.INFERRED),
        (False, False, False, EndReason.END_OF_FILE),
        (True, False, False, EndReason.TERMINATED),
    ],
)
def test_why_an_episode_ends(terminated: bool, truncated: bool, done: bool, reason: EndReason) -> None:
    flags = {"terminated": terminated, "truncated": truncated, "done": done}
    data = TensorDict({"next": {name: torch.tensor([[False], [value]]) for name, value in flags.items()}}, [2])
    table = StorageRows(TensorStorage(data)).episodes
    assert table.end_reason.tolist() == [reason]
    assert (table.terminated.tolist(), table.truncated.tolist()) == ([terminated], [truncated])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_flags_may_be_numbers(dtype: torch.dtype) -> None:
    data = TensorDict({"next": {"done": torch.tensor([0, 1, 0, 1, 0]).to(dtype)}}, [5])
    assert StorageRows(TensorStorage(data)).episodes.length.tolist() == [2, 2, 1]


def test_flags_deeper_down_are_found_where_there_are_no_others() -> None:
    done = torch.tensor([0, 1, 0]).bool().unsqueeze(-1)
    data = TensorDict({"next": {"team": {"done": done, "speed": torch.ones(3)}}}, [3])
    assert StorageRows(TensorStorage(data)).episodes.length.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("given_keys", "found"),
    [
        (None, []),
        ("done", [("done",)]),
        (("done", "over"), [("done",), ("over",)]),
        ([("next", "a", "done"), "next"], [("a", "done"), ("next",)]),
    ],
)
def test_keys_are_read_with_and_without_next(given_keys: object, found: list[tuple[str, ...]]) -> None:
    assert keys_of(given_keys, "done_keys") == found  # type: ignore[arg-type]


def test_a_key_is_of_text() -> None:
    with pytest.raises(UsageError, match="reward_keys holds 3"):
        keys_of([3], "reward_keys")  # type: ignore[list-item]


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_runs_are_every_step_in_order(rows: int, lanes: int, data: st.DataObject) -> None:
    oldest = data.draw(st.integers(0, rows - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows * lanes), st.integers(0, rows * lanes))))
    found = []
    for run in Order(rows, lanes, oldest).runs(start, stop):
        places = [(lane, row) for lane in range(10)[run.lanes] for row in range(10)[run.rows]]
        assert run.stop - run.start == len(places)
        assert run.start == start + len(found)
        found += places
    assert found == [(step // rows, (oldest + step) % rows) for step in range(start, stop)]
