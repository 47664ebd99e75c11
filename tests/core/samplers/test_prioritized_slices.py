"""`PrioritizedSliceSampler`: the probability of each first step, weights, states, and the tree behind them."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import UsageError
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler, StartTree
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.testing.slice_samplers import Twin, episodes, rows_of

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"


def sampler_of(capacity: int = 12, alpha: float = 1.0, beta: float = 0.5, **options: Any) -> PrioritizedSliceSampler:
    options = {"slice_len": 2, "end_key": ("next", "done"), "eps": 0.0, "dtype": torch.float64, **options}
    return PrioritizedSliceSampler(capacity, alpha, beta, **options)


def twin_of(sampler: PrioritizedSliceSampler, lengths: list[int]) -> Twin:
    twin = Twin(sampler.max_capacity, sampler)
    write(twin, lengths)
    return twin


def write(twin: Twin, lengths: list[int], ending: Any = "terminated") -> None:
    twin.extend(rows_of([episodes(lengths, [ending])], sum(lengths)))


def starts(twin: Twin) -> dict[int, float]:
    """The probability of each first step."""
    twin.draw(2)
    weights = twin.buffer.sampler._priorities.tree.starts.weights()
    return {place: float(weights[place] / weights.sum()) for place in weights.nonzero()[:, 0].tolist()}


# Probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: 1 / 6, 1: 2 / 6, 3: 3 / 6}),
        ({"strict_length": False}, {0: 1 / 7, 1: 2 / 7, 3: 3 / 7, 5: 1 / 7}),
        ({"anchor": "start"}, {0: 1 / 4, 3: 3 / 4}),
        ({"anchor": "end", "strict_length": False}, {1: 2 / 6, 3: 3 / 6, 5: 1 / 6}),
        ({"span": (0, 1)}, {0: 1 / 12, 1: 2 / 12, 2: 4 / 12, 3: 3 / 12, 4: 1 / 12, 5: 1 / 12}),
        ({"alpha": 0.0}, {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}),
    ],
)
def test_starts_have_the_probability_of_their_weight(options: dict[str, Any], expected: dict[int, float]) -> None:
    twin = twin_of(sampler_of(**options), [3, 2, 1])
    twin.buffer.update_priority(torch.arange(6), torch.tensor([1.0, 2, 4, 3, 1, 1]))
    assert starts(twin) == pytest.approx(expected)


ALL_BUT_THE_LAST_STEP = {(1, 2), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3), (9, 2)}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("span", "expected", "shorter"),
    [
        (False, {(6, 4), (7, 4)}, {(0, 1), (1, 2), (3, 3)}),
        (1, {(3, 3), (6, 4), (7, 4), (8, 3)}, {(0, 1), (1, 2)}),
        (2, ALL_BUT_THE_LAST_STEP, {(0, 1)}),
        (True, ALL_BUT_THE_LAST_STEP, {(0, 1)}),
        (3, ALL_BUT_THE_LAST_STEP | {(0, 1), (2, 1), (5, 1), (10, 1)}, set()),
    ],
)
def test_a_span_leaves_out_steps_at_the_end_of_trajectories(
    strict: bool, span: Any, expected: set[tuple[int, int]], shorter: set[tuple[int, int]]
) -> None:
    twin = twin_of(sampler_of(slice_len=4, span=(False, span), strict_length=strict), [1, 2, 3, 5])
    drawn, _ = twin.draw(800)
    assert {(part[0][0], len(part)) for part in drawn} == expected | (set() if strict else shorter)


def test_updates_and_writes_between_samples() -> None:
    twin = twin_of(sampler_of(), [3, 2])
    twin.buffer.update_priority(torch.arange(5), torch.full((5,), 2.0))
    assert starts(twin) == pytest.approx({0: 1 / 3, 1: 1 / 3, 3: 1 / 3})
    twin.buffer.update_priority(torch.tensor([1, 2, 3]), torch.tensor([4.0, 9.0, 0.0]))
    assert starts(twin) == pytest.approx({0: 2 / 6, 1: 4 / 6})
    write(twin, [1], "nothing")  # begins a trajectory; new steps have the largest priority, 9
    assert starts(twin) == pytest.approx({0: 2 / 6, 1: 4 / 6})
    write(twin, [1])
    assert starts(twin) == pytest.approx({0: 2 / 15, 1: 4 / 15, 5: 9 / 15})


def test_a_draw_does_not_change_the_state() -> None:
    twin = twin_of(sampler_of(), [3, 2, 1])
    twin.buffer.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    before = twin.buffer.sampler.state_dict()["_sum_tree"]
    starts(twin)
    assert torch.equal(twin.buffer.sampler.state_dict()["_sum_tree"], before)
    assert before.tolist() == [1, 2, 3, 4, 5, 6] + [0] * 6


# Weights ---------------------------------------------------------------------------------------------


def test_each_step_has_the_priority_weight_of_its_slice() -> None:
    twin = twin_of(sampler_of(beta=0.5), [3, 2, 1])
    twin.buffer.update_priority(torch.arange(6), torch.tensor([4.0, 9, 1, 16, 5, 5]))
    for _ in range(5):
        index, info = twin.sample(8)
        first = index[0].view(4, 2)[:, 0]
        expected = torch.tensor([4.0, 9, 1, 16, 5, 5])[first] ** -0.5  # the least weight of all is 1
        assert torch.allclose(info["priority_weight"], expected.repeat_interleave(2))


@pytest.mark.parametrize(("options", "shape"), [({}, None), ({"pad_output": True}, (12,)), ({"batched": True}, (4, 3))])
def test_short_slices_and_their_weights(options: dict[str, bool], shape: tuple[int, ...] | None) -> None:
    twin = twin_of(sampler_of(beta=1.0, slice_len=3, strict_length=False, normalize="batch", **options), [1, 4, 2])
    twin.buffer.update_priority(torch.arange(7), torch.arange(1.0, 8.0))
    for _ in range(8):
        index, info = twin.sample(12)
        weight, real = info["priority_weight"], info.get(("collector", "mask"), torch.ones(index[0].shape).bool())
        assert weight.shape == index[0].shape == (shape or weight.shape)
        first = {0: 0, **dict.fromkeys((5, 6), 5)}
        steps = index[0][real].tolist()
        ends = info["next", "truncated"][..., 0][real].tolist()
        begins = [step for step, end in zip(steps, [True, *ends], strict=False) if end]
        owners = [begins[number] for number in np.cumsum([False, *ends[:-1]])]
        assert all(first.get(step, owner) == owner for step, owner in zip(steps, owners, strict=True))
        least = min(begins) + 1.0
        assert torch.allclose(weight[real], least / (torch.tensor(owners) + 1.0))


def test_a_batch_carries_its_weights() -> None:
    twin = twin_of(sampler_of(), [3, 2, 1])
    batch = twin.buffer.sample(8)
    assert batch["priority_weight"].shape == (8,)
    batch["td_error"] = torch.rand(8) + 1
    twin.buffer.update_tensordict_priority(batch)
    weights = twin.buffer.sampler.state_dict()["_sum_tree"]
    assert torch.allclose(weights[batch["index"][-1]].float(), batch["td_error"][-1])


# State -----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_torchrl_is_read() -> None:
    case = CASES / "sampler_prioritized_slice"
    facts, expected = json.loads((case / "case.json").read_text()), np.load(case / "expected_sampler.npz")
    sampler = PrioritizedSliceSampler(16, 0.5, 0.5, slice_len=2, end_key=("next", "done"), strict_length=False)
    storage = LazyMemmapStorage(facts["capacity"])
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    buffer.loads(case / "checkpoint")
    assert (sampler.alpha, sampler.beta, sampler.default_priority) == (0.6, 0.4, 8.0)
    assert sampler.state_dict()["_sum_tree"].tolist() == pytest.approx(expected["weights"].tolist())
    buffer.sample()
    weights = sampler._priorities.tree.starts.weights()
    legal = [0, 1, 3, 4, 5, 6, 7, 9, 10, 11, 13]
    assert weights.nonzero()[:, 0].tolist() == legal
    assert weights[legal].tolist() == pytest.approx(expected["weights"][legal].tolist())


@pytest.mark.parametrize("way", ["folder", "state", "pickle"])
def test_a_restored_sampler_draws_the_same_next(tmp_path: Path, way: str) -> None:
    twin = twin_of(sampler_of(eps=1e-3), [3, 2, 6, 4])
    twin.buffer.update_priority(torch.arange(12), torch.rand(12))
    twin.draw(4)
    other = twin.loaded(12, sampler_of())
    if way == "folder":
        twin.buffer.sampler.dumps(tmp_path)
        other.buffer.sampler.loads(tmp_path)
    elif way == "state":
        other.buffer.sampler.load_state_dict(twin.buffer.sampler.state_dict())
    else:
        other.buffer.set_sampler(pickle.loads(pickle.dumps(twin.buffer.sampler)))
    for each in (twin, other):
        each.buffer.set_rng(torch.Generator().manual_seed(9))
    for number in range(20):
        assert other.draw(4)[0] == twin.draw(4)[0]
        for each in (twin, other):
            each.buffer.update_priority(torch.tensor([number % 12]), torch.tensor([number / 7]))
            write(each, [1 + number % 3])


def test_an_emptied_sampler_forgets_what_was_legal() -> None:
    twin = twin_of(sampler_of(), [3, 2])
    starts(twin)
    twin.buffer.empty()
    twin.model = Twin(12).model
    with pytest.raises(RuntimeError, match="empty storage"):
        twin.draw(2)
    write(twin, [1, 2])
    assert starts(twin) == {1: 1.0}


# Bad input -------------------------------------------------------------------------------------------


def test_a_left_span_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"span=True is used as \(False, True\)"):
        sampler = sampler_of(span=True)
    assert sampler.span == (False, True)
    assert sampler_of(span=(False, 1)).span == (False, 1)


def test_starts_of_weight_0_are_not_drawn() -> None:
    twin = twin_of(sampler_of(), [3, 2, 1])
    twin.buffer.update_priority(torch.arange(6), torch.tensor([0.0, 0, 5, 0, 5, 5]))
    with pytest.raises(RuntimeError, match="non-positive p_sum"):
        twin.draw(4)
    with pytest.raises(RuntimeError, match="no trajectory is long enough for slices of 5 steps"):
        twin_of(sampler_of(slice_len=5), [3, 2]).draw(5)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_refused_priorities_change_nothing(priority: float) -> None:
    twin = twin_of(sampler_of(), [3, 2])
    before = starts(twin)
    with pytest.raises(ValueError, match="finite numbers of at least 0"):
        twin.buffer.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, priority]))
    assert starts(twin) == before


def test_bad_arguments() -> None:
    for wrong in ({"alpha": -1.0}, {"anchor": "middle"}, {"span": (0, 2)}, {"span": (0, 1, 0)}, {"normalize": "all"}):
        with pytest.raises(UsageError):
            twin_of(sampler_of(**wrong), [3]).draw(2)
    with pytest.raises(NotImplementedError):
        sampler_of(dtype=torch.float16)
    with pytest.warns(UserWarning, match="max_capacity is 4"):
        twin_of(sampler_of(4), [3]).loaded(8, sampler_of(4))


def test_the_sampler_is_of_both_kinds() -> None:
    sampler = sampler_of()
    assert isinstance(sampler, SliceSampler)
    assert isinstance(sampler, PrioritizedSampler)
    assert sampler.reads_rows is True
    assert "max_capacity=12" in repr(sampler)
    assert "slice_len=2" in repr(sampler)


# The tree -------------------------------------------------------------------------------------------

SIZE = 37

leaves = st.lists(st.integers(0, SIZE - 1), max_size=12)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("set"), leaves),
        st.tuples(st.just("same"), leaves),
        st.tuples(st.just("fill"), st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)),
        st.tuples(st.just("allow"), leaves.map(lambda some: sorted(set(some)))),
        st.tuples(st.just("only"), leaves),
        st.tuples(st.just("load"), st.integers(0, SIZE)),
    ),
    max_size=12,
)


@given(deeds, st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]))
def test_both_trees_follow_a_plain_list(found: list[tuple[str, list[int]]], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree, weights, legal = StartTree(SIZE, dtype), torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=torch.bool)
    for what, where in found:
        if what == "load":
            given_weights = torch.rand(where, generator=generator, dtype=dtype)  # type: ignore[call-overload]
            tree.load(given_weights)
            weights = torch.cat([given_weights, torch.zeros(SIZE - where, dtype=dtype)])  # type: ignore[operator]
        elif what == "fill":
            tree.fill(*where, 0.5)
            weights[slice(*where)] = 0.5
        else:
            index = torch.tensor(where, dtype=torch.int64)
            values, flags = torch.rand(len(where), generator=generator, dtype=dtype), torch.rand(SIZE) < 0.5
            if what == "set":
                tree.set(index, values)
                for leaf, value in zip(where, values, strict=True):
                    weights[leaf] = value
            elif what == "same":
                tree.set(index, 0.25)
                weights[index] = 0.25
            elif what == "allow":
                tree.allow(index, flags[: len(where)])
                legal[index] = flags[: len(where)]
            else:
                tree.allow_only(flags)
                legal = flags
    assert torch.equal(tree.weights(), weights)
    assert torch.equal(tree.starts.weights(), weights.where(legal, 0))
    assert tree.total == pytest.approx(float(weights.where(legal, 0).double().sum()))
    assert tree.maximum == pytest.approx(float(weights.max()))
    assert tree.minimum == pytest.approx(float(weights[weights > 0].min()) if weights.any() else math.inf)


def test_a_tree_draws_only_legal_starts() -> None:
    tree = StartTree(10, torch.float32)
    tree.fill(0, 10, 2.0)
    tree.allow(torch.tensor([3, 7]), torch.tensor([True, True]))
    index, weights = tree.draw(torch.rand(50, dtype=torch.float64))
    assert (set(index.tolist()), set(weights.tolist())) == ({3, 7}, {2.0})


def test_a_tree_that_grows_remembers_what_is_legal() -> None:
    tree = StartTree(4, torch.float64)
    tree.fill(0, 4, 2.0)
    tree.allow(torch.tensor([1, 3]), torch.tensor([True, True]))
    larger = tree.grown(30)
    assert (larger.capacity, larger.total, larger.dtype) == (30, 4, torch.float64)
    assert larger.weights().tolist() == [2.0] * 4 + [0.0] * 26
    assert set(larger.draw(torch.rand(50, dtype=torch.float64))[0].tolist()) == {1, 3}


def test_a_pickled_tree_forgets_what_is_legal() -> None:
    tree = StartTree(10, torch.float64)
    tree.fill(0, 4, 2.0)
    tree.allow_only(torch.ones(10, dtype=torch.bool))
    again = pickle.loads(pickle.dumps(tree))
    assert (again.weights().tolist(), again.total) == ([2.0] * 4 + [0.0] * 6, 0)
