"""The sharp edges of TorchRL's prioritized sampler, by the numbers that the specification gives them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.tensor import TensorStorage


def storage(count: int) -> TensorStorage:
    return TensorStorage(torch.arange(count))


@pytest.mark.parametrize("bad", [-1.0, -1e-30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("several", [True, False])
def test_edge_03_1_negative_nan_and_infinite_priorities_raise_and_change_nothing(
    bad: float, dtype: torch.dtype, several: bool
) -> None:
    sampler = PrioritizedSampler(10, 0.5, 0.5, dtype=dtype)
    sampler.update_priority(torch.arange(10), torch.arange(10) + 1.0)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        sampler.update_priority([3, 4, 5] if several else 4, [1.0, bad, 2.0] if several else bad)
    after = sampler.state_dict()
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)
    index, info = sampler.sample(storage(10), 100)
    assert info["priority_weight"].isfinite().all()
    assert (index >= 0).all()


def test_edge_03_2_the_seed_of_torch_decides() -> None:
    sampler = PrioritizedSampler(1000, 0.5, 0.5)
    drawn = []
    for numpy_seed in (0, 1):
        np.random.seed(numpy_seed)  # noqa: NPY002
        torch.manual_seed(5)
        drawn.append(sampler.sample(storage(1000), 50)[0])
    assert torch.equal(*drawn)


@pytest.mark.parametrize(("normalize", "least", "largest"), [("buffer", 5e-31, 1e-30), ("batch", 0.5, 1)])
def test_edge_03_3_one_tiny_priority_drives_all_weights_to_zero_only_on_request(
    normalize: str, least: float, largest: float
) -> None:
    sampler = PrioritizedSampler(101, 1, 1, 0, normalize=normalize)
    sampler.update_priority(torch.arange(101), torch.tensor([1e-30] + [1.0, 2.0] * 50))
    _, info = sampler.sample(storage(101), 200)
    assert float(info["priority_weight"].min()) == pytest.approx(least)
    assert float(info["priority_weight"].max()) == pytest.approx(largest)


def test_edge_03_3_quotients_beyond_float32_have_a_weight_too() -> None:
    sampler = PrioritizedSampler(2, 1, 0.25, 0)
    sampler.update_priority([0, 1], [1e-30, 1e30])
    _, info = sampler.sample(storage(2), 20)
    assert info["priority_weight"].tolist() == pytest.approx([1e-15] * 20)


def test_edge_03_4_sums_of_many_elements_keep_their_precision() -> None:
    count = 20_000_000  # of these, 1 cannot be added to the sum in float32
    sampler = PrioritizedSampler(count, 1, 1, 0)
    sampler.extend_run(0, count)
    tree = sampler._priorities.tree
    assert tree.total == count
    fractions = torch.tensor([0.25, 0.5, 1 - 1 / count], dtype=torch.float64)
    assert tree.draw(fractions)[0].tolist() == [count // 4, count // 2, count - 1]


def test_edge_03_4_states_are_saved_as_a_whole(tmp_path: Path) -> None:
    count = 4_000_000
    sampler, other = (PrioritizedSampler(count, 1, 1) for _ in range(2))
    sampler.update_priority(torch.arange(count), torch.rand(count))
    started = time.process_time()
    torch.rand(count).tolist()
    one_by_one, started = time.process_time() - started, time.process_time()
    sampler.dumps(tmp_path)
    other.loads(tmp_path)
    # One call for each element takes twenty times as long as a list of them, and as a whole they take less than that.
    assert time.process_time() - started < 10 * one_by_one
    assert torch.equal(other.state_dict()["_sum_tree"], sampler.state_dict()["_sum_tree"])


@pytest.mark.parametrize(
    ("given", "place", "asked"),
    [
        (None, torch.device("cuda:0"), ["cuda:0"]),
        (None, torch.device("cpu"), []),
        (None, "auto", []),
        (None, torch.device("mps"), []),
        ("cpu", torch.device("cuda:0"), []),
    ],
)
def test_edge_03_5_priorities_follow_the_storage_unless_a_device_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, place: Any, asked: list[str]
) -> None:
    sampler, moves = PrioritizedSampler(10, 1, 1, device=given), []
    monkeypatch.setattr(sampler._priorities, "move", lambda device: moves.append(str(device)))
    elsewhere = storage(10)
    elsewhere.device = place
    sampler.update_priority(0, 1.0, storage=elsewhere)
    assert moves == asked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_edge_03_5_priorities_move_with_the_storage_and_none_is_lost(device: str | None) -> None:
    sampler = PrioritizedSampler(10, 1, 1, 0, device=device)
    sampler.update_priority(torch.arange(10), torch.arange(10.0))
    place = torch.device("cuda", torch.cuda.current_device())
    index, info = sampler.sample(TensorStorage(torch.arange(10, device=place), device=place), 1000)
    assert sampler.device.type == (device or "cuda")
    assert sampler.state_dict()["_sum_tree"].tolist() == list(range(10))
    assert set(index.tolist()) == set(range(1, 10))
    sampler.update_priority(index, torch.ones(1000, device=place))
    assert info["priority_weight"].min() > 0


def test_edge_03_5_moving_to_another_tree_loses_nothing() -> None:
    sampler = PrioritizedSampler(10, 0.5, 1)
    sampler.update_priority(torch.arange(6), torch.arange(6.0))
    before, tree = sampler.state_dict(), sampler._priorities.tree
    sampler._priorities.move(torch.device("cpu"))
    after = sampler.state_dict()
    assert sampler._priorities.tree is not tree
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)


def test_edge_03_6_a_sampler_without_priorities_is_saved(tmp_path: Path) -> None:
    PrioritizedSampler(10, 0.5, 0.5).dumps(tmp_path)
    other = PrioritizedSampler(10, 0.7, 0.7)
    other.loads(tmp_path)
    assert (other.alpha, other.default_priority) == (0.5, 1)
    other.update_priority(0, 2.5)
    assert other.default_priority == 2.5
    assert json.loads((tmp_path / "sampler_metadata.json").read_text())["_max_priority"] == [1.0, -1.0]


def test_edge_03_14_long_runs_of_zeros_cost_nothing_and_give_no_wrong_element() -> None:
    count = 1_000_000
    sampler = PrioritizedSampler(count, 1, 1, 0)
    sampler.update_priority(torch.arange(count), 0.0)
    sampler.update_priority([5, count - 3], 1.0)
    index, _ = sampler.sample(storage(count), 10_000)
    found, times = index.unique(return_counts=True)
    assert found.tolist() == [5, count - 3]
    assert abs(int(times[0]) - 5000) < 4 * 50


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, None, "1.0.0"])
def test_edge_03_16_beta_is_checked_when_it_is_set(value: Any) -> None:
    sampler = PrioritizedSampler(10, 0.5, 0.5)
    with pytest.raises(ValueError, match="beta is"):
        sampler.beta = value
    assert sampler.beta == 0.5
    sampler.beta = 0
    assert (sampler.sample(storage(10), 20)[1]["priority_weight"] == 1).all()


def test_edge_03_19_priorities_may_be_float64() -> None:
    sampler = PrioritizedSampler(10, 1, 1, 0, dtype=torch.double)
    sampler.extend(torch.arange(10))
    third = 1 / 3
    sampler.update_priority(torch.tensor([3, 4]), torch.tensor([third, third / 2], dtype=torch.double))
    assert sampler.state_dict()["_sum_tree"][[3, 4]].tolist() == [third, third / 2]
    sampler.update_priority(torch.tensor([5]), torch.tensor([0.5]))
    index, info = sampler.sample(storage(10), 500)
    assert info["priority_weight"][index == 3].tolist() == pytest.approx([0.5] * int((index == 3).sum()))
