from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.kernels.trees import TorchTree
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import Priorities, PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.samplers import SamplerTests

ALPHA, BETA, EPS = 0.7, 0.9, 1e-6


class TestPrioritizedSampler(SamplerTests):
    def make(self) -> Sampler:
        return PrioritizedSampler(100, ALPHA, BETA)


class TestWithGivenPriorities(SamplerTests):
    def make(self) -> Sampler:
        sampler = PrioritizedSampler(100, ALPHA, BETA, dtype=torch.float64, normalize="batch")
        sampler.update_priority(torch.arange(100), torch.arange(100) + 1.0)
        return sampler


class TestWithoutNumba(SamplerTests):
    def make(self) -> Sampler:
        sampler = PrioritizedSampler(100, ALPHA, BETA)
        sampler._priorities = Priorities(100, ALPHA, EPS, make_tree=TorchTree)
        return sampler


def storage(count: int = 10, capacity: int | None = None) -> LazyTensorStorage:
    made = LazyTensorStorage(capacity or count)
    made.set(range(count), torch.arange(count))
    return made


def filled(priorities: Any, capacity: int | None = None, **options: Any) -> PrioritizedSampler:
    arguments = {"alpha": ALPHA, "beta": BETA, "eps": EPS} | options
    sampler = PrioritizedSampler(capacity or len(priorities), **arguments)
    sampler.update_priority(torch.arange(len(priorities)), torch.as_tensor(priorities, dtype=torch.float64))
    sampler._rng = torch.Generator().manual_seed(7)
    return sampler


def weights(sampler: PrioritizedSampler) -> torch.Tensor:
    found: torch.Tensor = sampler.state_dict()["_sum_tree"]
    return found


def formula(priorities: Any, alpha: float = ALPHA, eps: float = EPS) -> np.ndarray[Any, Any]:
    return (np.asarray(priorities, np.float64) + eps) ** alpha


# Draws and their weights ----------------------------------------------------------------------------

MANY = 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0, 0.4, 1, 2.5])
def test_elements_are_drawn_as_often_as_the_formula_says(alpha: float, dtype: torch.dtype) -> None:
    priorities = np.random.default_rng(1).random(30) * 3 + 0.2
    sampler = filled(priorities, alpha=alpha, dtype=dtype)
    index, _ = sampler.sample(storage(30), MANY)
    expected = formula(priorities, alpha) / formula(priorities, alpha).sum() * MANY
    observed = np.bincount(index, minlength=30)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert abs(statistic - 29) <= 4 * math.sqrt(2 * 29)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_weights_are_those_of_the_formula(beta: float, dtype: torch.dtype) -> None:
    priorities = np.random.default_rng(1).random(30) * 3 + 0.2
    index, info = filled(priorities, beta=beta, dtype=dtype).sample(storage(30), 1000)
    expected = (formula(priorities) / formula(priorities).min()) ** -beta
    found = info["priority_weight"]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, expected[index], rtol=1e-5)
    assert found.max() == 1


def test_elements_of_priority_zero_are_drawn_only_with_an_eps() -> None:
    priorities = [0, 1, 0, 2, 0, 0, 0, 3, 0, 0]
    index, info = filled(priorities, eps=0).sample(storage(), 1000)
    assert set(index.tolist()) == {1, 3, 7}
    assert info["priority_weight"].max() == 1
    index, _ = filled(priorities, eps=0.5).sample(storage(), 1000)
    assert set(index.tolist()) == set(range(10))


@pytest.mark.parametrize("count", [4, 16])
def test_only_what_is_in_the_storage_is_drawn(count: int) -> None:
    sampler = filled(range(1, 17))
    index, _ = sampler.sample(storage(count, 16), 1000)
    assert set(index.tolist()) == set(range(count))
    assert (weights(sampler) > 0).sum() == count


def test_elements_nobody_told_of_get_the_default_priority() -> None:
    sampler = filled([1, 5, 2], capacity=16)
    sampler.sample(storage(12, 16), 1)
    expected = formula([1, 5, 2] + [5] * 9)
    np.testing.assert_allclose(weights(sampler), [*expected, 0, 0, 0, 0], rtol=1e-6)


def test_a_storage_of_several_dimensions_is_numbered_through() -> None:
    sampler = PrioritizedSampler(24, 1, 1, 0)
    lanes = TensorStorage(torch.arange(24).reshape(4, 3, 2), ndim=3)
    sampler.update_priority(torch.arange(24), 0.0)
    sampler.update_priority(torch.tensor([[3, 0, 1], [1, 2, 0]]), torch.tensor([1.0, 2.0]), storage=lanes)
    index, info = sampler.sample(lanes, 100)
    assert {tuple(row) for row in torch.stack(index, -1).tolist()} == {(3, 0, 1), (1, 2, 0)}
    twice = lanes.get(index) == 1 * 6 + 2 * 2
    np.testing.assert_allclose(info["priority_weight"], np.where(twice, 0.5, 1))


def test_a_list_can_be_drawn_from() -> None:
    items = ListStorage(10)
    items.set(range(3), ["a", "b", "c"])
    index, _ = PrioritizedSampler(10, 1, 1).sample(items, 50)
    assert set(index.tolist()) == {0, 1, 2}


# Updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        (3, 2.0, {3: 2}),
        (torch.tensor(3), torch.tensor(2.0), {3: 2}),
        ([3, 4], [2.0, 5.0], {3: 2, 4: 5}),
        (range(3, 5), 2, {3: 2, 4: 2}),
        (np.array([3, 4], np.int32), np.array([2.0, 5.0]), {3: 2, 4: 5}),
        (torch.tensor([3, 4, 3]), torch.tensor([2.0, 5.0, 7.0]), {3: 7, 4: 5}),
        (torch.tensor([3, 4]), torch.tensor(2.0), {3: 2, 4: 2}),
        (torch.tensor([3, 4]), torch.tensor([2.0]), {3: 2, 4: 2}),
        (torch.tensor([3, 4]), torch.tensor([[2.0], [5.0]]), {3: 2, 4: 5}),
        (torch.tensor([[3], [4]]), torch.tensor([[2.0], [5.0]]), {3: 2, 4: 5}),
        (torch.tensor([3, 4]), torch.tensor([2, 5]), {3: 2, 4: 5}),
        (torch.tensor([3, 4]), torch.tensor([2.0, 5.0], dtype=torch.bfloat16), {3: 2, 4: 5}),
        (torch.tensor([3, 4]), torch.tensor([2.0, 5.0], requires_grad=True), {3: 2, 4: 5}),
        ((torch.tensor([3, 4]),), torch.tensor([2.0, 5.0]), {3: 2, 4: 5}),
        (torch.tensor([-1, 3, -1, 4]), torch.tensor([9.0, 2.0, math.nan, 5.0]), {3: 2, 4: 5}),
        (torch.tensor([-1, 3]), 2.0, {3: 2}),
        (torch.tensor([-1, -1]), torch.tensor([9.0, 9.0]), {}),
        (-1, 9.0, {}),
        ([], [], {}),
        (torch.empty(0, dtype=torch.int64), 3.0, {}),
    ],
)
def test_priorities_come_in_many_shapes(index: Any, priority: Any, expected: dict[int, float]) -> None:
    sampler = filled([1] * 10)
    sampler.update_priority(index, priority, storage=storage())
    wanted = [expected.get(number, 1) for number in range(10)]
    np.testing.assert_allclose(weights(sampler), formula(wanted), rtol=1e-6)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([[1, 2], [0, 0]]), (torch.tensor([1, 0]), torch.tensor([2, 0])), ([1, 0], [2, 0])],
)
def test_elements_are_named_by_rows_or_by_a_tuple(index: Any) -> None:
    sampler, lanes = filled([1] * 6), TensorStorage(torch.zeros(2, 3), ndim=2)
    sampler.update_priority(index, [4.0, 6.0], storage=lanes)
    np.testing.assert_allclose(weights(sampler), formula([6, 1, 1, 1, 1, 4]), rtol=1e-6)


def test_coordinates_below_zero_are_passed_over() -> None:
    sampler, lanes = filled([1] * 6), TensorStorage(torch.zeros(2, 3), ndim=2)
    sampler.update_priority(torch.tensor([[-1, -1], [1, -1], [0, 1]]), torch.tensor([8.0, 9.0, 3.0]), storage=lanes)
    np.testing.assert_allclose(weights(sampler), formula([1, 3, 1, 1, 1, 1]), rtol=1e-6)


def test_who_names_an_element_says_that_those_before_are_there() -> None:
    sampler = filled([2, 2], capacity=8)
    sampler.update_priority(5, 7.0)
    np.testing.assert_allclose(weights(sampler)[:6], formula([2, 2, 2, 2, 2, 7]), rtol=1e-6)


@pytest.mark.parametrize("mark", [3, slice(3, 4), [3], torch.tensor([3]), torch.arange(10) == 3, -7, range(3, 4)])
def test_changed_elements_get_the_default_priority(mark: Any) -> None:
    sampler = filled([1, 9] + [2] * 8)
    sampler.mark_update(mark, storage=storage())
    np.testing.assert_allclose(weights(sampler), formula([1, 9, 2, 9, 2, 2, 2, 2, 2, 2]), rtol=1e-6)


@pytest.mark.parametrize("mark", [(1, 2), (slice(1, 2), 2), (torch.tensor([1]), torch.tensor([2])), (1, slice(2, 3))])
def test_changed_elements_of_several_dimensions_too(mark: Any) -> None:
    sampler = filled([9, 2, 2, 2, 2, 2])
    sampler.mark_update(mark, storage=TensorStorage(torch.zeros(2, 3), ndim=2))
    np.testing.assert_allclose(weights(sampler), formula([9, 2, 2, 2, 2, 9]), rtol=1e-6)


def test_changes_are_told_without_a_storage() -> None:
    sampler = filled([9, 2, 2])
    sampler.mark_update(torch.tensor([2, -1]))
    np.testing.assert_allclose(weights(sampler), formula([9, 2, 9]), rtol=1e-6)


def sliced(*arguments: Any, **options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(*arguments, slice_len=2, **options)


# New elements ---------------------------------------------------------------------------------------


def test_new_elements_get_the_largest_weight() -> None:
    sampler = PrioritizedSampler(10, ALPHA, BETA, EPS)
    assert sampler.default_priority == 1
    sampler.extend(torch.arange(4))
    sampler.update_priority(torch.tensor([1, 2]), torch.tensor([5.0, 3.0]))
    assert sampler.default_priority == 5
    sampler.add(4)
    sampler.extend(torch.tensor([6, 5, -1]))
    sampler.extend_run(7, 9)
    np.testing.assert_allclose(weights(sampler), [*formula([1, 5, 3, 1, 5, 5, 5, 5, 5]), 0], rtol=1e-6)
    sampler.update_priority(1, 0.5)
    sampler.extend(torch.tensor([9, 0]))  # goes around
    np.testing.assert_allclose(weights(sampler)[[0, 1, 9]], formula([5, 0.5, 5]), rtol=1e-6)


def test_nothing_new_changes_nothing() -> None:
    sampler = filled([1, 2, 3])
    before = weights(sampler)
    sampler.extend(torch.tensor([-1, -1]))
    sampler.extend(torch.empty(0, dtype=torch.int64))
    sampler.add(torch.tensor([[-1]]))
    sampler.extend_run(2, 2)
    assert torch.equal(weights(sampler), before)


def test_rows_of_coordinates_wait_until_the_storage_is_known() -> None:
    sampler = filled([2, 9, 2, 2], capacity=12)
    sampler.extend(torch.tensor([[1, 0], [0, 0]]))
    np.testing.assert_allclose(weights(sampler)[:4], formula([2, 9, 2, 2]), rtol=1e-6)
    sampler.sample(TensorStorage(torch.zeros(4, 3), ndim=2), 1)
    np.testing.assert_allclose(weights(sampler), formula([9, 9, 2, 9] + [9] * 8), rtol=1e-6)
    sampler.update_priority(torch.arange(12), 1.0)
    sampler.extend(torch.tensor([[1, 1], [3, 2]]))
    np.testing.assert_allclose(weights(sampler), formula([1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 9]), rtol=1e-6)


def test_an_emptied_sampler_is_as_new() -> None:
    sampler = filled([3, 4, 5])
    sampler._empty()
    assert sampler.default_priority == 1
    assert not weights(sampler).any()


@pytest.mark.parametrize("way", ["extend", "add", "run", "update"])
def test_the_maximum_leaves_the_buffer_with_its_element(way: str) -> None:
    sampler = filled([1, 8, 3, 2], max_priority_within_buffer=True)
    assert sampler.default_priority == 8
    match way:
        case "extend":
            sampler.extend(torch.tensor([1]))
        case "add":
            sampler.add(1)
        case "run":
            sampler.extend_run(1, 2)
        case _:
            sampler.update_priority(1, 0.1)
    assert sampler.default_priority == pytest.approx(3, rel=1e-5)
    assert filled([1, 8, 3, 2]).default_priority == 8


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", [PrioritizedSampler, sliced])
def test_small_priorities_do_not_lower_that_of_new_elements(kind: Any, saved: bool, tmp_path: Path) -> None:
    sampler = kind(10, ALPHA, BETA, EPS)
    sampler.extend(torch.arange(5))
    sampler.update_priority(torch.arange(5), torch.tensor([0.1, 0.2, 0.3, 0.05, 0.04]))
    if saved:
        sampler.dumps(tmp_path)
        sampler = kind(10, ALPHA, BETA, EPS)
        sampler.loads(tmp_path)
    assert sampler.default_priority == 1
    sampler.extend(torch.tensor([5, 6]))
    np.testing.assert_allclose(weights(sampler)[:7], formula([0.1, 0.2, 0.3, 0.05, 0.04, 1, 1]), rtol=1e-6)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", [PrioritizedSampler, sliced])
def test_elements_without_a_priority_count_among_those_there(kind: Any, saved: bool, tmp_path: Path) -> None:
    sampler = kind(10, ALPHA, BETA, EPS, max_priority_within_buffer=True)
    sampler.extend(torch.arange(3))
    sampler.update_priority(torch.tensor([0, 1]), torch.tensor([0.1, 0.2]))
    if saved:
        sampler.dumps(tmp_path)
        sampler = kind(10, ALPHA, BETA, EPS, max_priority_within_buffer=True)
        sampler.loads(tmp_path)
    assert sampler.default_priority == 1
    sampler.update_priority(2, 0.15)
    assert sampler.default_priority == pytest.approx(0.2, rel=1e-5)
    sampler.extend(torch.tensor([3]))
    np.testing.assert_allclose(weights(sampler)[:4], formula([0.1, 0.2, 0.15, 0.2]), rtol=1e-5)


def test_a_buffer_that_is_written_anew_has_no_maximum() -> None:
    sampler = filled([5, 8], max_priority_within_buffer=True)
    sampler.extend(torch.tensor([0, 1]))
    assert sampler.default_priority == 1
    np.testing.assert_allclose(weights(sampler), formula([1, 1]), rtol=1e-6)


def test_without_alpha_the_maximum_stays() -> None:
    sampler = filled([5, 8], alpha=0, max_priority_within_buffer=True)
    sampler.extend(torch.tensor([0, 1]))
    assert sampler.default_priority == 8


# Alpha ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 0.1, 1, 2])
def test_another_alpha_transforms_the_weights(alpha: float) -> None:
    priorities = [0.1, 1, 0.5, 4]
    sampler = filled(priorities, capacity=6)
    sampler.alpha = alpha
    np.testing.assert_allclose(weights(sampler), [*formula(priorities, alpha), 0, 0], rtol=1e-5)
    sampler.extend(torch.tensor([4]))
    np.testing.assert_allclose(weights(sampler)[4], formula(4, alpha), rtol=1e-6)


def test_without_alpha_elements_of_priority_zero_are_drawn_like_all_others() -> None:
    sampler = filled([0, 1, 4], capacity=5, eps=0)
    sampler.alpha = 0
    assert weights(sampler).tolist() == [1, 1, 1, 0, 0]


def test_from_alpha_zero_there_is_no_way_back() -> None:
    sampler = filled([1, 2, 3], alpha=0)
    with pytest.warns(UserWarning, match="alpha was 0") as caught:
        sampler.alpha = 1
    assert caught[0].filename == __file__
    assert weights(sampler).tolist() == [1, 1, 1]
    sampler.update_priority(1, 3.0)
    np.testing.assert_allclose(weights(sampler), [1, 3, 1], rtol=1e-5)


def test_an_empty_sampler_changes_alpha_without_a_warning() -> None:
    sampler = PrioritizedSampler(3, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.alpha = 1
    assert sampler.alpha == 1


# Copies ---------------------------------------------------------------------------------------------


def test_a_pickle_goes_on_by_itself() -> None:
    sampler = filled([1, 2, 3])
    other = pickle.loads(pickle.dumps(sampler))
    sampler.update_priority(0, 9.0)
    np.testing.assert_allclose(weights(other), formula([1, 2, 3]), rtol=1e-6)
    other.update_priority(0, 7.0)
    assert (sampler.default_priority, other.default_priority) == (9, 7)


def test_a_spawned_process_cannot_have_it() -> None:
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=(filled([1, 2]),))
    with pytest.raises(RuntimeError, match="cannot go to another process") as caught:
        process.start()
    assert "sync=False" in caught.value.hint  # type: ignore[attr-defined]


def test_what_it_is_shows() -> None:
    sampler = filled([1, 2], dtype=torch.float64, reduction="mean")
    assert repr(sampler) == "PrioritizedSampler(max_capacity=2, alpha=0.7, beta=0.9, eps=1e-06)"
    assert (sampler.dtype, sampler.reduction, sampler.eps) == (torch.float64, "mean", EPS)
    assert (sampler.max_capacity, sampler.device, sampler.reads_rows) == (2, torch.device("cpu"), False)
