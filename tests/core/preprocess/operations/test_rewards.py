"""N-step transitions and returns, against plain Python, on episodes that are ragged, short, and end in every way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import MultiStep
from rbtool.core.errors import UsageError

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)
ENDS = st.lists(st.sampled_from(["terminated", "truncated", "open"]), min_size=1, max_size=4)
GAMMAS = st.sampled_from([1.0, 0.9, 0.5, 0.0])


def trajectories(found, lengths):
    """Rows of each trajectory: of an episode, up to a flag."""
    runs, start = [], 0
    for length in lengths:
        run = []
        for row in range(start, start + length):
            run.append(row)
            if found["next.done"][row] or row == start + length - 1:
                runs.append(run)
                run = []
        start += length
    return runs


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ends=ENDS, gamma=GAMMAS, n=st.integers(1, 9), seed=st.integers(0, 9))
def test_n_step_against_plain_python(rows, do, lengths, ends, gamma, n, seed):
    made = rows(lengths, ends, seed)
    before, after = do(made, select="observation,action"), do(made, n_step=n, gamma=gamma)
    for run in trajectories(before, lengths):
        for place, row in enumerate(run):
            window = run[place : place + n]
            expected = sum(gamma**i * before["next.reward"][r, 0] for i, r in enumerate(window))
            assert after["next.reward"][row, 0] == pytest.approx(expected, abs=1e-12)
            assert after["steps_to_next_obs"][row] == len(window)
            assert after["gamma"][row] == np.float32(gamma ** len(window))
            assert after["nonterminal"][row] == (len(window) > 1)
            assert after["multi_step.cut"][row] == (len(window) < n and not before["next.done"][window[-1], 0])
            for name in ("next.observation.position", "next.observation.count"):
                assert np.array_equal(after[name][row], before[name][window[-1]])
            for flag in ("done", "terminated", "truncated"):
                assert after[f"multi_step.{flag}"][row] == before[f"next.{flag}"][window[-1]]
    for name in ("next.done", "next.terminated", "next.truncated", "action", "observation.position", "episode"):
        assert np.array_equal(after[name], before[name])
    assert np.array_equal(after["next.original_reward"], before["next.reward"])


def test_n_step_equals_the_transform(rows, do):
    made = rows([5, 3, 1, 6])
    after = do(made, n_step=3, gamma=0.9)
    batch = TensorDict({}, [15])
    for key, column in made[1].columns.items():
        batch.set(key, torch.from_numpy(column.values))
    expected = MultiStep(0.9, 3)(batch)
    names = {".".join((key,) if isinstance(key, str) else key) for key in expected.keys(True, True)}
    assert names == after.keys()
    for name in names:
        value = expected.get(tuple(name.split("."))).numpy()
        assert (value.dtype, value.shape) == (after[name].dtype, after[name].shape)
        np.testing.assert_allclose(after[name], value, rtol=1e-12 if value.dtype == np.float64 else 1e-6)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ends=ENDS, gamma=GAMMAS, seed=st.integers(0, 9))
def test_returns_against_plain_python(rows, do, lengths, ends, gamma, seed):
    made = rows(lengths, ends, seed)
    before = do(made, select="action")
    found = do(made, return_to_go=True, mc_return=True, gamma=gamma)
    for run in trajectories(before, lengths):
        to_go = 0.0
        for row in reversed(run):
            to_go = before["next.reward"][row, 0] + gamma * to_go
            assert found["return_to_go"][row, 0] == to_go
            assert found["mc_return"][row, 0] == to_go


def test_every_reward_is_summed_once(rows, do):
    made = rows([6, 2])
    plain, after = do(made, return_to_go=True), do(made, return_to_go=True, n_step=3, gamma=1.0)
    assert np.array_equal(plain["return_to_go"], after["return_to_go"])
    made = rows([3], **{"next.agent.reward": np.array([1.0, 2, 4])})
    found = do(made, n_step=2, gamma=1.0)
    assert found["next.agent.reward"].tolist() == [3, 6, 4]
    assert found["next.agent.original_reward"].tolist() == [1, 2, 4]


def test_a_flag_in_mid_episode_ends_the_window(rows, do):
    flag = np.array([False, True, False, False])[:, None]
    made = rows([4], **{"next.done": flag, "next.truncated": flag, "next.reward": np.ones((4, 1))})
    found = do(made, n_step=4, gamma=1.0, return_to_go=True)
    assert found["steps_to_next_obs"].tolist() == [2, 1, 2, 1]
    assert found["return_to_go"].tolist() == [[2], [1], [2], [1]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
def test_sums_of_whole_rewards_are_float32(rows, do, dtype):
    made = rows([3], **{"next.reward": np.array([[1], [0], [1]]).astype(dtype)})
    found = do(made, n_step=2, gamma=0.5, return_to_go=True)
    expected = dtype if "float" in dtype else "float32"
    assert {found[name].dtype.name for name in ("next.reward", "return_to_go")} == {expected}
    assert found["next.original_reward"].dtype.name == dtype
    assert found["next.reward"].tolist() == [[1], [0.5], [1]]


def test_values_that_are_not_finite_stay_in_their_window(rows, do):
    made = rows([3, 3], **{"next.reward": np.array([[1.0], [2], [np.nan], [4], [5], [np.inf]])})
    found = do(made, n_step=2, gamma=0.5, return_to_go=True)
    np.testing.assert_array_equal(found["next.reward"][:, 0], [2, np.nan, np.nan, 6.5, np.inf, np.inf])
    np.testing.assert_array_equal(found["return_to_go"][3:, 0], [np.inf, np.inf, np.inf])
    made = rows([3], **{"next.reward": np.array([[1.0], [np.inf], [np.nan]])})
    found = do(made, n_step=3, gamma=0, mc_return=True)
    for name in ("next.reward", "mc_return"):
        np.testing.assert_array_equal(found[name][:, 0], [1, np.inf, np.nan])
    rewards = np.zeros((1200, 1))
    rewards[-1] = np.inf
    found = do(rows([1200], **{"next.reward": rewards}), n_step=1200, gamma=0.5)
    assert (found["next.reward"] == np.inf).all()


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"n_step": 3}, "n-step needs a discount"),
        ({"mc_return": True}, "mc-return needs a discount"),
        ({"n_step": 0, "gamma": 0.9}, "n-step is 0"),
        ({"n_step": 2.5, "gamma": 0.9}, "expected a whole number"),
        ({"n_step": 2, "gamma": 1.5}, "the discount of n-step is 1.5"),
        ({"return_to_go": True, "gamma": -0.1}, "the discount of return-to-go is -0.1"),
        ({"return_to_go": True, "gamma": "x"}, "gamma is 'x'"),
        ({"select": "action", "gamma": 0.9}, "with an operation that discounts"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(rows, do, operations, words):
    with pytest.raises(UsageError, match=words):
        do(rows([2]), **operations)


@pytest.mark.parametrize("operations", [{"n_step": 2, "gamma": 1.0}, {"return_to_go": True}, {"clip_reward": "0:1"}])
def test_operations_on_rewards_need_a_reward(rows, do, operations):
    fields, block = rows([2])
    bare = tuple(field for field in fields if field.key != ("next", "reward"))
    with pytest.raises(UsageError, match=r"needs next\.reward, which does not exist"):
        do((bare, block), **operations)


@pytest.mark.parametrize(
    ("name", "operations"), [("gamma", {"n_step": 2, "gamma": 1.0}), ("return_to_go", {"return_to_go": 1})]
)
def test_existing_fields_are_not_overwritten(rows, do, name, operations):
    with pytest.raises(UsageError, match=f"would write '{name}', which already exists"):
        do(rows([2], **{name: np.zeros(2)}), **operations)
