"""`PrioritizedSampler`: its formula, updates and new elements, what it refuses, and the sharp edges of TorchRL's."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.kernels.compiled_trees import CompiledTree
from rbtool.core.kernels.trees import TorchTree
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import Priorities, PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.storages.cursors import NoNumbersError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
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


def lanes() -> TensorStorage:
    return TensorStorage(torch.zeros(2, 3), ndim=2)


def filled(priorities: Any, capacity: int | None = None, **options: Any) -> PrioritizedSampler:
    arguments = {"alpha": ALPHA, "beta": BETA, "eps": EPS} | options
    sampler = PrioritizedSampler(capacity or len(priorities), **arguments)
    sampler.update_priority(torch.arange(len(priorities)), torch.as_tensor(priorities, dtype=torch.float64))
    sampler._rng = torch.Generator().manual_seed(7)
    return sampler


def weights(sampler: PrioritizedSampler) -> torch.Tensor:
    return sampler.state_dict()["_sum_tree"]  # type: ignore[no-any-return]


def require(sampler: PrioritizedSampler, priorities: Any, rtol: float = 1e-6) -> None:
    """Elements have these priorities, and those after them none."""
    found = weights(sampler)
    np.testing.assert_allclose(found[: len(priorities)], formula(priorities), rtol=rtol)
    assert not found[len(priorities) :].any()


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
def test_only_stored_elements_are_drawn(count: int) -> None:
    sampler = filled(range(1, 17))
    index, _ = sampler.sample(storage(count, 16), 1000)
    assert set(index.tolist()) == set(range(count))
    assert (weights(sampler) > 0).sum() == count


def test_elements_that_only_the_storage_knows_get_the_default_priority() -> None:
    sampler = filled([1, 5, 2], capacity=16)
    sampler.sample(storage(12, 16), 1)
    require(sampler, [1, 5, 2] + [5] * 9)


def test_a_storage_of_several_dimensions_is_numbered_through() -> None:
    sampler = PrioritizedSampler(24, 1, 1, 0)
    lanes = TensorStorage(torch.arange(24).reshape(4, 3, 2), ndim=3)
    sampler.update_priority(torch.arange(24), 0.0)
    sampler.update_priority(torch.tensor([[3, 0, 1], [1, 2, 0]]), torch.tensor([1.0, 2.0]), storage=lanes)
    index, info = sampler.sample(lanes, 100)
    assert {tuple(row) for row in torch.stack(index, -1).tolist()} == {(3, 0, 1), (1, 2, 0)}
    twice = lanes.get(index) == 1 * 6 + 2 * 2
    np.testing.assert_allclose(info["priority_weight"], np.where(twice, 0.5, 1))


def test_elements_of_a_list_are_drawn() -> None:
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
    require(sampler, [expected.get(number, 1) for number in range(10)])


@pytest.mark.parametrize(
    "index", [torch.tensor([[1, 2], [0, 0]]), (torch.tensor([1, 0]), torch.tensor([2, 0])), ([1, 0], [2, 0])]
)
def test_elements_are_named_by_rows_or_by_a_tuple(index: Any) -> None:
    sampler = filled([1] * 6)
    sampler.update_priority(index, [4.0, 6.0], storage=lanes())
    require(sampler, [6, 1, 1, 1, 1, 4])


def test_negative_coordinates_are_skipped() -> None:
    sampler = filled([1] * 6)
    sampler.update_priority(torch.tensor([[-1, -1], [1, -1], [0, 1]]), torch.tensor([8.0, 9.0, 3.0]), storage=lanes())
    require(sampler, [1, 3, 1, 1, 1, 1])


def test_an_update_of_an_element_gives_those_before_it_the_default_priority() -> None:
    sampler = filled([2, 2], capacity=8)
    sampler.update_priority(5, 7.0)
    require(sampler, [2, 2, 2, 2, 2, 7])


@pytest.mark.parametrize("mark", [3, slice(3, 4), [3], torch.tensor([3]), torch.arange(10) == 3, -7, range(3, 4)])
def test_changed_elements_get_the_default_priority(mark: Any) -> None:
    sampler = filled([1, 9] + [2] * 8)
    sampler.mark_update(mark, storage=storage())
    require(sampler, [1, 9, 2, 9, 2, 2, 2, 2, 2, 2])


@pytest.mark.parametrize("mark", [(1, 2), (slice(1, 2), 2), (torch.tensor([1]), torch.tensor([2])), (1, slice(2, 3))])
def test_changed_elements_of_two_dimensions_get_the_default_priority(mark: Any) -> None:
    sampler = filled([9, 2, 2, 2, 2, 2])
    sampler.mark_update(mark, storage=lanes())
    require(sampler, [9, 2, 2, 2, 2, 9])


def test_changed_elements_can_be_marked_without_a_storage() -> None:
    sampler = filled([9, 2, 2])
    sampler.mark_update(torch.tensor([2, -1]))
    require(sampler, [9, 2, 9])


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
    require(sampler, [1, 5, 3, 1, 5, 5, 5, 5, 5])
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
    require(sampler, [2, 9, 2, 2])
    sampler.sample(TensorStorage(torch.zeros(4, 3), ndim=2), 1)
    require(sampler, [9, 9, 2, 9] + [9] * 8)
    sampler.update_priority(torch.arange(12), 1.0)
    sampler.extend(torch.tensor([[1, 1], [3, 2]]))
    require(sampler, [1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 9])


def test_an_emptied_sampler_is_as_new() -> None:
    sampler = filled([3, 4, 5])
    sampler._empty()
    assert sampler.default_priority == 1
    assert not weights(sampler).any()


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda sampler: sampler.extend(torch.tensor([1])),
        lambda sampler: sampler.add(1),
        lambda sampler: sampler.extend_run(1, 2),
        lambda sampler: sampler.update_priority(1, 0.1),
    ],
)
def test_the_maximum_leaves_the_buffer_with_its_element(overwrite: Any) -> None:
    sampler = filled([1, 8, 3, 2], max_priority_within_buffer=True)
    assert sampler.default_priority == 8
    overwrite(sampler)
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
    require(sampler, [0.1, 0.2, 0.3, 0.05, 0.04, 1, 1])


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", [PrioritizedSampler, sliced])
def test_elements_without_a_priority_count_for_the_maximum_within_the_buffer(
    kind: Any, saved: bool, tmp_path: Path
) -> None:
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
    require(sampler, [0.1, 0.2, 0.15, 0.2], rtol=1e-5)


def test_a_buffer_that_is_written_anew_has_no_maximum() -> None:
    sampler = filled([5, 8], max_priority_within_buffer=True)
    sampler.extend(torch.tensor([0, 1]))
    assert sampler.default_priority == 1
    require(sampler, [1, 1])


def test_without_alpha_the_maximum_stays() -> None:
    sampler = filled([5, 8], alpha=0, max_priority_within_buffer=True)
    sampler.extend(torch.tensor([0, 1]))
    assert sampler.default_priority == 8


def in_a_forked_process(act: Callable[[], object]) -> None:
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(HANG)
    assert process.exitcode == 0


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("kind", [PrioritizedSampler, sliced])
def test_rows_that_another_process_writes_get_the_default_priority(kind: Any, storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(8), sampler=kind(8, 1, 1, 0), batch_size=4, shared=True)
    rows = TensorDict({"episode": torch.arange(8) // 4}, [8])
    buffer.extend(rows[:6])
    buffer.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    in_a_forked_process(lambda: buffer.extend(rows[:4]))
    assert weights(buffer.sampler).tolist() == [6, 6, 3, 4, 5, 6, 6, 6]
    buffer.update_priority(torch.tensor([7, 0]), torch.tensor([0.5, 0.25]))
    buffer.extend(rows[:1])
    buffer.update_priority(2, 0.125)
    buffer.sample()  # priorities of new rows that were set are not taken back
    assert weights(buffer.sampler).tolist() == [0.25, 6, 0.125, 4, 5, 6, 6, 0.5]
    in_a_forked_process(lambda: [buffer.extend(rows) for _ in range(3)])
    buffer.sample()
    assert weights(buffer.sampler).tolist() == [6] * 8


def test_rows_of_lanes_that_another_process_writes_get_the_default_priority() -> None:
    storage = LazyTensorStorage(12, ndim=2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(12, 1, 1, 0), dim_extend=0).share()
    rows = TensorDict({"a": torch.zeros(6, 2)}, [6, 2])
    buffer.extend(rows)
    buffer.update_priority(torch.cartesian_prod(torch.arange(6), torch.arange(2)), torch.arange(1.0, 13.0))
    in_a_forked_process(lambda: buffer.extend(rows[:2]))
    assert weights(buffer.sampler).tolist() == [12] * 4 + list(range(5, 13))


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


def test_weights_stay_with_a_warning_when_alpha_was_zero() -> None:
    sampler = filled([1, 2, 3], alpha=0)
    with pytest.warns(UserWarning, match="alpha was 0") as caught:
        sampler.alpha = 1
    assert caught[0].filename == __file__
    assert weights(sampler).tolist() == [1, 1, 1]
    sampler.update_priority(1, 3.0)
    np.testing.assert_allclose(weights(sampler), [1, 3, 1], rtol=1e-5)


def test_an_empty_sampler_changes_alpha_without_a_warning() -> None:
    sampler = PrioritizedSampler(3, 0, 0)
    sampler.alpha = 1  # a warning is an error in these tests
    assert sampler.alpha == 1


# Copies ---------------------------------------------------------------------------------------------


def test_a_pickled_copy_is_independent() -> None:
    sampler = filled([1, 2, 3])
    other = pickle.loads(pickle.dumps(sampler))
    sampler.update_priority(0, 9.0)
    require(other, [1, 2, 3])
    other.update_priority(0, 7.0)
    assert (sampler.default_priority, other.default_priority) == (9, 7)


def test_a_spawned_process_cannot_have_the_sampler() -> None:
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=(filled([1, 2]),))
    with pytest.raises(RuntimeError, match="cannot go to another process") as caught:
        process.start()
    assert "sync=False" in caught.value.hint  # type: ignore[attr-defined]


def test_arguments_are_shown_and_can_be_read() -> None:
    sampler = filled([1, 2], dtype=torch.float64, reduction="mean")
    assert repr(sampler) == "PrioritizedSampler(max_capacity=2, alpha=0.7, beta=0.9, eps=1e-06)"
    assert (sampler.dtype, sampler.reduction, sampler.eps) == (torch.float64, "mean", EPS)
    assert (sampler.max_capacity, sampler.device, sampler.reads_rows) == (2, torch.device("cpu"), False)


# Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, "much", None])
def test_exponents_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*finite number of at least 0"):
        PrioritizedSampler(10, **({"alpha": 1, "beta": 1} | {name: value}))


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "x"])
def test_alpha_out_of_range_cannot_be_set(value: Any) -> None:
    sampler = filled([1, 2])
    with pytest.raises(ValueError, match="alpha is"):
        sampler.alpha = value
    assert sampler.alpha == ALPHA


@pytest.mark.parametrize(
    ("alpha", "overwritten", "message"),
    [
        (0.7, False, "its weight is beyond"),
        (0, True, r"a priority is 1e\+09: with alpha=5"),  # the priority of new elements is still 1e9
        (0.7, True, r"a priority is 1e\+09: with alpha=5"),
    ],
)
def test_an_alpha_that_makes_too_large_weights_cannot_be_set(alpha: float, overwritten: bool, message: str) -> None:
    sampler = filled([1, 1e9], alpha=alpha)
    if overwritten:
        sampler.update_priority(1, 1.0)
    before = weights(sampler)
    with pytest.raises(ValueError, match=message):
        sampler.alpha = 5
    assert torch.equal(weights(sampler), before)
    assert (sampler.alpha, sampler.default_priority) == (alpha, 1e9)


@pytest.mark.parametrize("capacity", [0, -1, 2.5, "10", None])
def test_a_capacity_below_one_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match=f"{capacity} leaves"):
        PrioritizedSampler(capacity, 1, 1)


@pytest.mark.parametrize("options", [{"alpha": 1000, "eps": 1}, {"alpha": 1, "eps": 1e39}])
def test_arguments_that_make_every_weight_too_large_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a priority is 1: with alpha="):
        PrioritizedSampler(10, beta=1, **options)


def test_a_state_with_too_large_a_maximum_is_refused() -> None:
    sampler = filled([1, 2])
    state = sampler.state_dict() | {"_max_priority": torch.tensor([1e30, 1]), "_alpha": 2.0}
    with pytest.raises(RuntimeError, match=r"a priority is 1e\+30: with alpha=2"):
        sampler.load_state_dict(state)
    assert (sampler.alpha, sampler.default_priority) == (0.7, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": torch.float16}, NotImplementedError, "expected"),
        ({"dtype": torch.int64}, NotImplementedError, "expected"),
        ({"reduction": "mode"}, NotImplementedError, "expected"),
        ({"reduction": None}, NotImplementedError, "expected"),
        ({"normalize": "none"}, ValueError, "expected one of batch, buffer"),
    ],
)
def test_unknown_options_and_replacement_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        PrioritizedSampler(10, 1, 1, **options)
    assert isinstance(caught.value, RbtoolError)
    with pytest.raises(TypeError, match="replacement=False"):
        PrioritizedSampler(10, 1, 1, replacement=False)


@pytest.mark.parametrize(
    ("index", "priority", "kind", "message"),
    [
        ([0, 1, 2], [1.0, 2.0], RuntimeError, "there are 2 priorities, expected 3"),
        ([0, 1], [[1.0, 2.0], [3.0, 4.0]], RuntimeError, "there are 4 priorities, expected 2"),
        ([0, 1], [], RuntimeError, "0 priorities"),
        ([0, 10], 1.0, IndexError, "element 10: the sampler's max_capacity is 10"),
        ([[0, 1]], 1.0, RuntimeError, "2 coordinates"),
        ([0.5], 1.0, IndexError, "whole numbers"),
        ([True, False], 1.0, IndexError, "whole numbers"),
        (0, "a", NoNumbersError, "priorities are numbers, found 'a'"),
        (0, None, NoNumbersError, "priorities are numbers, found None"),
        (0, 1j, NoNumbersError, "priorities are numbers, found 1j"),
        (0, torch.tensor(1j), NoNumbersError, "priorities must be real numbers, found torch.complex64"),
        ([0, 1], [[1.0], [2.0, 3.0]], NoNumbersError, r"priorities are numbers, found \[\[1.0\], \[2.0, 3.0\]\]"),
        ("a", 1.0, NoNumbersError, "elements are selected by whole numbers, found 'a'"),
        (None, 1.0, NoNumbersError, "elements are selected by whole numbers, found None"),
        ((torch.tensor([0]), "a"), 1.0, NoNumbersError, "elements are selected by whole numbers, found 'a'"),
        ([0], 1e39, ValueError, "inf"),
        ([0], 1e38, ValueError, "beyond"),
    ],
)
def test_refused_updates_change_nothing(index: Any, priority: Any, kind: Any, message: str) -> None:
    sampler = filled(range(1, 11), alpha=2)
    before = weights(sampler)
    with pytest.raises(kind, match=message):
        sampler.update_priority(index, priority)
    assert torch.equal(weights(sampler), before)
    assert sampler.default_priority == 10


@pytest.mark.parametrize(
    ("index", "kind", "message"),
    [([[0, 3]], IndexError, "coordinate is 3"), ([[0, 0, 0]], RuntimeError, "3 coordinates, .* 2 dimensions")],
)
def test_coordinates_outside_of_the_storage_are_refused(index: Any, kind: Any, message: str) -> None:
    sampler = filled([1] * 6)
    with pytest.raises(kind, match=message):
        sampler.update_priority(index, 1.0, storage=lanes())


def test_elements_beyond_the_capacity_are_refused_without_a_storage() -> None:
    sampler = PrioritizedSampler(5, 1, 1)
    for tell in (lambda: sampler.extend(torch.arange(10)), lambda: sampler.add(9)):
        with pytest.raises(RuntimeError, match="element 9 was written, but the sampler's max_capacity is 5"):
            tell()
    assert not weights(sampler).any()


def test_priorities_of_zero_without_eps_cannot_be_drawn() -> None:
    with pytest.raises(RuntimeError, match="non-positive p_sum"):
        filled([0] * 10, eps=0).sample(storage(), 1)


# Sharp edges, by their number in the specification --------------------------------------------------


def require_state(sampler: PrioritizedSampler, before: dict[str, Any]) -> None:
    after = sampler.state_dict()
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)


@each("bad", [-1.0, -1e-30, math.nan, math.inf, -math.inf])
@each("dtype", [torch.float32, torch.float64])
@each("several", [True, False])
def test_edge_03_1_negative_nan_and_infinite_priorities_raise_and_change_nothing(
    bad: float, dtype: torch.dtype, several: bool
) -> None:
    sampler = PrioritizedSampler(10, 0.5, 0.5, dtype=dtype)
    sampler.update_priority(torch.arange(10), torch.arange(10) + 1.0)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        sampler.update_priority([3, 4, 5] if several else 4, [1.0, bad, 2.0] if several else bad)
    require_state(sampler, before)
    index, info = sampler.sample(storage(), 100)
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
    elsewhere = storage()
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
    assert sampler._priorities.tree is not tree
    require_state(sampler, before)


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
    assert (sampler.sample(storage(), 20)[1]["priority_weight"] == 1).all()


def test_edge_03_19_priorities_may_be_float64() -> None:
    sampler = PrioritizedSampler(10, 1, 1, 0, dtype=torch.double)
    sampler.extend(torch.arange(10))
    third = 1 / 3
    sampler.update_priority(torch.tensor([3, 4]), torch.tensor([third, third / 2], dtype=torch.double))
    assert sampler.state_dict()["_sum_tree"][[3, 4]].tolist() == [third, third / 2]
    sampler.update_priority(torch.tensor([5]), torch.tensor([0.5]))
    index, info = sampler.sample(storage(), 500)
    assert info["priority_weight"][index == 3].tolist() == pytest.approx([0.5] * int((index == 3).sum()))


# Updates that are checked and set in one compiled call do the same as those checked one by one ---------

CAPACITY = 70
FAULTS = ["none", "negative", "infinite", "not a number", "no leaf", "skipped", "unknown", "too heavy", "too many"]


class PlainTree(CompiledTree):
    """A tree that leaves all checks to its caller."""

    def update(self, *arguments: Any) -> None:
        return None


def pair_of(dtype: torch.dtype, alpha: float, *, within: bool) -> tuple[Priorities, Priorities]:
    def made(kind: type[CompiledTree]) -> Priorities:
        return Priorities(CAPACITY, alpha, 0.0, dtype, within, None, kind)

    return made(CompiledTree), made(PlainTree)


def drawn_update(random: np.random.Generator, fault: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw elements, with repetitions, and their priorities, one of which has a fault."""
    count = int(random.integers(1, 40))
    numbers = torch.from_numpy(random.integers(0, 50, count))
    values = torch.from_numpy(random.integers(0, 9, count if random.random() < 0.8 else 1)).to(dtype)
    where, which = int(random.integers(len(values))), int(random.integers(count))
    bad = {"negative": -1e-3, "infinite": torch.inf, "not a number": torch.nan, "too heavy": 3e38}
    if fault in bad:
        values[where] = bad[fault]
    wrong = {"no leaf": CAPACITY, "skipped": -1, "unknown": 60}
    if fault in wrong:
        numbers[which] = wrong[fault]
    return numbers, torch.cat([values, values[:1]]).repeat(2) if fault == "too many" else values


def outcome(priorities: Priorities, *given: torch.Tensor, only_known: bool) -> str:
    try:
        priorities.update(*given, only_known=only_known)
    except Exception as error:  # whatever it is, it is the same
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("dtype", "alpha"), [(torch.float32, 0.6), (torch.float64, 1.0), (torch.float32, 0.0)])
def test_both_ways_do_the_same(dtype: torch.dtype, alpha: float, within: bool) -> None:
    random = np.random.default_rng(0)
    fast, plain = pair_of(dtype, alpha, within=within)
    for _ in range(300):
        numbers, values = drawn_update(random, str(random.choice(FAULTS)), dtype)
        known = bool(random.random() < 0.7)
        seen = copy.deepcopy((numbers, values))
        assert outcome(fast, numbers, values, only_known=known) == outcome(plain, numbers, values, only_known=known)
        assert torch.equal(numbers, seen[0])
        assert torch.equal(values.nan_to_num(), seen[1].nan_to_num())
        assert torch.equal(fast.tree.weights(), plain.tree.weights())
        assert fast.known == plain.known
        state = plain.state_dict()
        assert all(np.array_equal(value, state[key]) for key, value in fast.state_dict().items())
        sums = [(tree.total, tree.minimum, tree.maximum) for tree in (fast.tree, plain.tree)]
        assert sums[0] == sums[1]


def test_valid_updates_need_one_compiled_call() -> None:
    fast, _ = pair_of(torch.float32, 0.6, within=False)
    fast.set_known(50)
    weights = torch.rand(3)
    assert fast.tree.update(torch.tensor([3, 9, 3]), torch.tensor([1.0, 4, 4]), weights, 1e9, 50) == (4.0, 1)
    assert torch.equal(fast.tree.get(torch.tensor([9, 3])), weights[1:])
    for leaf, priority, weight in [(50, 1.0, 1.0), (-1, 1.0, 1.0), (3, -1.0, 1.0), (3, 1.0, 2e9)]:
        before = fast.tree.weights()
        given = torch.tensor([leaf]), torch.tensor([priority]), torch.tensor([weight])
        assert fast.tree.update(*given, 1e9, 50) is None
        assert torch.equal(fast.tree.weights(), before)
