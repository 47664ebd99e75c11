from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import UsageError
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.testing.slice_samplers import Slicing, Twin, episodes, rows_of

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"


def sampler_of(capacity: int = 12, alpha: float = 1.0, beta: float = 0.5, **options: Any) -> PrioritizedSliceSampler:
    given = {"slice_len": 2, "end_key": ("next", "done"), "eps": 0.0, "dtype": torch.float64}
    return PrioritizedSliceSampler(capacity, alpha, beta, **given | options)


def twin_of(sampler: PrioritizedSliceSampler, lengths: list[int], lanes: int = 1) -> Twin:
    twin = Twin(sampler.max_capacity // lanes, sampler, lanes, min(lanes, 2))
    write(twin, lengths)
    return twin


def write(twin: Twin, lengths: list[int], ending: Any = "terminated") -> None:
    twin.extend(rows_of([episodes(lengths, [ending])] * twin.model.lanes, sum(lengths)))


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
    twin = twin_of(sampler_of(), [3, 2], lanes=1)
    twin.buffer.update_priority(torch.arange(5), torch.full((5,), 2.0))
    assert starts(twin) == pytest.approx({0: 1 / 3, 1: 1 / 3, 3: 1 / 3})
    twin.buffer.update_priority(torch.tensor([1, 2, 3]), torch.tensor([4.0, 9.0, 0.0]))
    assert starts(twin) == pytest.approx({0: 2 / 6, 1: 4 / 6})
    write(twin, [1], "nothing")  # begins a trajectory; new steps have the largest priority, 9
    assert starts(twin) == pytest.approx({0: 2 / 6, 1: 4 / 6})
    write(twin, [1])
    assert starts(twin) == pytest.approx({0: 2 / 15, 1: 4 / 15, 5: 9 / 15})


def test_edge_03_13_trajectories_across_the_end_of_the_ring() -> None:
    twin = twin_of(sampler_of(8), [5, 6])
    assert twin.model.runs("done") == [((3,), (4,)), ((5,), (6,), (7,), (0,), (1,), (2,))]
    twin.buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    weights = {3: 4.0, 5: 6.0, 6: 7.0, 7: 8.0, 0: 1.0, 1: 2.0}
    assert starts(twin) == pytest.approx({place: weight / 28 for place, weight in weights.items()})
    drawn, _ = twin.draw(400)
    assert set(drawn) == set(twin.legal("done", Slicing(2)))


def test_edge_03_13_lanes_of_storages_that_are_not_full() -> None:
    twin = twin_of(sampler_of(24), [2, 1], lanes=2)
    places = torch.cartesian_prod(torch.arange(3), torch.arange(2))
    twin.buffer.update_priority(places, torch.tensor([1.0, 3, 8, 8, 8, 8]))
    assert starts(twin) == pytest.approx({0: 1 / 4, 1: 3 / 4})


def test_nothing_is_changed_and_restored() -> None:
    twin = twin_of(sampler_of(), [3, 2, 1])
    twin.buffer.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    before = twin.buffer.sampler.state_dict()["_sum_tree"]
    starts(twin)
    assert torch.equal(twin.buffer.sampler.state_dict()["_sum_tree"], before)
    assert before.tolist() == [1, 2, 3, 4, 5, 6] + [0] * 6


# What is said ----------------------------------------------------------------------------------------


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


def test_what_torchrl_wrote_is_read() -> None:
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
def test_the_next_draws_are_the_same(tmp_path: Path, way: str) -> None:
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


def test_emptied_it_forgets() -> None:
    twin = twin_of(sampler_of(), [3, 2])
    starts(twin)
    twin.buffer.empty()
    twin.model = Twin(12).model
    with pytest.raises(RuntimeError, match="empty storage"):
        twin.draw(2)
    write(twin, [1, 2])
    assert starts(twin) == {1: 1.0}


# What cannot be --------------------------------------------------------------------------------------


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
def test_priorities_that_cannot_be_change_nothing(priority: float) -> None:
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


def test_it_is_both_kinds() -> None:
    sampler = sampler_of()
    assert isinstance(sampler, SliceSampler)
    assert isinstance(sampler, PrioritizedSampler)
    assert sampler.reads_rows is True
    assert "max_capacity=12" in repr(sampler)
    assert "slice_len=2" in repr(sampler)
