"""Trees of priorities, compiled and of torch functions, compared with sums over all weights."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import each

from rbtool.core.errors import RbtoolError
from rbtool.core.kernels.compiled_trees import CompiledTree
from rbtool.core.kernels.rows import compiled_module
from rbtool.core.kernels.trees import Forest, PriorityTree, TorchTree, priority_tree

Make = Callable[..., PriorityTree]

CAPACITIES = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1000, 1024, 1025, 5000, 32_769, 70_000]
GREATEST = 1 - 2.0**-53  # below 1

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KINDS = [(CompiledTree, "cpu"), *((TorchTree, device) for device in DEVICES)]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def make(request: pytest.FixtureRequest) -> Make:
    kind, device = request.param

    def made(capacity: int, dtype: torch.dtype = torch.float32) -> PriorityTree:
        tree: PriorityTree = kind(capacity, dtype, torch.device(device))
        return tree

    return made


class Oracle:
    """The same in the plainest way: float64 weights, and sums over all of them."""

    def __init__(self, weights: np.ndarray[Any, Any]) -> None:
        self.weights = weights.astype(np.float64)

    def compare(self, tree: PriorityTree) -> None:
        np.testing.assert_array_equal(tree.weights().double().cpu(), self.weights)
        assert tree.total == pytest.approx(math.fsum(self.weights), rel=1e-12)
        positive = self.weights[self.weights > 0]
        assert tree.minimum == (positive.min() if positive.size else math.inf)
        assert tree.maximum == (self.weights.max() if positive.size else 0)

    def draw(self, fractions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Exact for weights whose sums need no rounding."""
        stops = np.cumsum(self.weights)
        return np.searchsorted(stops, fractions * stops[-1], side="right")


def whole_numbers(count: int, seed: int, zeros: float) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    weights = random.integers(1, 1000, count).astype(np.float64)
    weights[random.random(count) < zeros] = 0
    return weights


def loaded(make: Make, weights: Any, dtype: torch.dtype = torch.float32) -> PriorityTree:
    tree = make(len(weights), dtype)
    tree.load(torch.as_tensor(weights))
    return tree


# What is kept ---------------------------------------------------------------------------------------


@each("capacity", CAPACITIES)
def test_a_fresh_tree_is_all_zeros(make: Make, capacity: int) -> None:
    Oracle(np.zeros(capacity)).compare(make(capacity))


@each("zeros", [0, 0.5, 0.999])
@each("capacity", CAPACITIES)
def test_loaded_weights_add_up(make: Make, capacity: int, zeros: float) -> None:
    weights = whole_numbers(capacity, capacity, zeros)
    Oracle(weights).compare(loaded(make, weights))


@each("dtype", [torch.float32, torch.float64])
@each("capacity", CAPACITIES)
def test_updates_with_repeats_are_as_in_the_oracle(make: Make, capacity: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(capacity)
    tree, oracle = make(capacity, dtype), Oracle(np.zeros(capacity))
    for round_, count in enumerate([1, 5, capacity, 3 * capacity + 2, 7]):
        index = random.integers(0, capacity, count)
        weights = random.random(count) * (random.random(count) < 0.7) * 10.0**round_
        weights = weights.astype(np.float32 if dtype == torch.float32 else np.float64)
        tree.set(torch.from_numpy(index), torch.from_numpy(weights))
        for leaf, weight in zip(index, weights, strict=True):
            oracle.weights[leaf] = weight
        oracle.compare(tree)


def test_the_last_of_several_weights_for_a_leaf_counts(make: Make) -> None:
    tree = make(100)
    tree.set(torch.tensor([7, 99, 7, 8, 7]), torch.tensor([1.0, 2, 3, 4, 5]))
    assert tree.get(torch.tensor([7, 8, 99, 0])).tolist() == [5, 4, 2, 0]
    assert (tree.total, tree.minimum, tree.maximum) == (11, 2, 5)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 16), (16, 32), (5, 900), (990, 1000), (0, 1000)])
def test_a_run_is_filled(make: Make, start: int, stop: int) -> None:
    weights = whole_numbers(1000, 3, 0.3)
    tree, oracle = loaded(make, weights), Oracle(weights)
    for weight in (2.5, 0.0):
        tree.fill(start, stop, weight)
        oracle.weights[start:stop] = weight
        oracle.compare(tree)


def test_many_leaves_can_get_one_weight(make: Make) -> None:
    weights = whole_numbers(1000, 4, 0.3)
    tree, oracle = loaded(make, weights), Oracle(weights)
    tree.set(torch.arange(3, 1000, 7), 0.5)
    oracle.weights[3:1000:7] = 0.5
    oracle.compare(tree)


@pytest.mark.parametrize("count", [0, 1, 300, 1000])
def test_loading_replaces_all_weights(make: Make, count: int) -> None:
    before, weights = whole_numbers(1000, 5, 0), whole_numbers(count, 6, 0.2)
    tree = loaded(make, before)
    Oracle(before).compare(tree)  # sums that were read are not kept
    tree.load(torch.from_numpy(weights))
    Oracle(np.concatenate([weights, np.zeros(1000 - count)])).compare(tree)


def test_a_cleared_tree_is_as_new(make: Make) -> None:
    weights = whole_numbers(1000, 5, 0)
    tree = loaded(make, weights)
    Oracle(weights).compare(tree)
    tree.clear()
    Oracle(np.zeros(1000)).compare(tree)
    tree.set(torch.tensor([999]), torch.tensor([2.0]))
    assert tree.draw(torch.zeros(3, dtype=torch.float64))[0].tolist() == [999] * 3


def test_no_update_changes_nothing(make: Make) -> None:
    weights = whole_numbers(50, 5, 0)
    tree = loaded(make, weights)
    tree.set(torch.empty(0, dtype=torch.int64), torch.empty(0))
    tree.set(torch.empty(0, dtype=torch.int64), 3.0)
    Oracle(weights).compare(tree)


def test_weights_are_rounded_to_the_type_of_the_tree(make: Make) -> None:
    third = 1 / 3
    for dtype, kept in ((torch.float32, float(np.float32(third))), (torch.float64, third)):
        tree = make(40, dtype)
        tree.set(torch.tensor([0]), torch.tensor([third], dtype=torch.float64))
        tree.set(torch.tensor([1]), third)
        tree.fill(2, 3, third)
        drawn, weights = tree.draw(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        assert drawn.tolist() == [0, 1, 2]
        assert weights.dtype == tree.weights().dtype == tree.get(drawn).dtype == dtype
        assert weights.double().tolist() == [kept] * 3


def test_returned_weights_are_copies(make: Make) -> None:
    tree = loaded(make, np.ones(20))
    tree.weights().zero_()
    tree.get(torch.arange(20)).zero_()
    tree.draw(torch.zeros(2, dtype=torch.float64))[1].zero_()
    assert tree.weights().sum() == tree.total == 20


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_copies_are_independent(make: Make, copied: Callable[[PriorityTree], PriorityTree]) -> None:
    weights = whole_numbers(1000, 5, 0.3)
    tree = loaded(make, weights, torch.float64)
    other = copied(tree)
    tree.set(torch.arange(1000), 1.0)
    assert (type(other), other.dtype, other.device) == (type(tree), tree.dtype, tree.device)
    Oracle(weights).compare(other)


# Draws ----------------------------------------------------------------------------------------------


@each("zeros", [0, 0.5, 0.99])
@each("capacity", CAPACITIES)
def test_fractions_fall_where_the_oracle_says(make: Make, capacity: int, zeros: float) -> None:
    weights = whole_numbers(capacity, capacity, zeros)
    weights[capacity // 2] = 7
    tree, random = loaded(make, weights), np.random.default_rng(1)
    stops = np.cumsum(weights)
    borders = stops[(stops > 0) & (stops < stops[-1])][:200] / stops[-1]
    exact = borders[np.isin(borders * stops[-1], stops)]  # the product is rounded
    fractions = np.concatenate([[0, GREATEST], random.random(1000), exact])
    index, drawn = tree.draw(torch.from_numpy(fractions))
    np.testing.assert_array_equal(index.cpu(), Oracle(weights).draw(fractions))
    np.testing.assert_array_equal(drawn.cpu(), weights[index.cpu()])


@pytest.mark.parametrize("only", [0, 1, 15, 16, 500, 8191, 9999])
def test_the_only_positive_leaf_is_found_among_long_runs_of_zeros(make: Make, only: int) -> None:
    tree = make(10_000)
    tree.set(torch.tensor([only]), torch.tensor([1e-30]))
    fractions = torch.tensor([0, 1e-300, 0.5, GREATEST], dtype=torch.float64)
    assert tree.draw(fractions)[0].tolist() == [only] * 4


@each("seed", range(5))
@each("dtype", [torch.float32, torch.float64])
def test_a_leaf_of_weight_zero_is_never_drawn(make: Make, dtype: torch.dtype, seed: int) -> None:
    """Weights of all magnitudes: sums are rounded everywhere, and fractions aim at all borders and next to them."""
    random = np.random.default_rng(seed)
    weights = 10 ** random.uniform(-30, 30, 3000) * (random.random(3000) < 0.3)
    tree = loaded(make, weights, dtype)
    borders = np.cumsum(weights) / weights.sum()
    near = np.concatenate([borders, np.nextafter(borders, 0), np.nextafter(borders, 1), [0, 5e-324, GREATEST]])
    near = near[(near >= 0) & (near < 1)]
    assert (tree.draw(torch.from_numpy(near))[1] > 0).all()


def test_the_smallest_numbers_can_be_drawn(make: Make) -> None:
    weights = np.array([0, 5e-324, 0, 0, 5e-324, 0] + [0] * 50 + [1e-323])
    tree = loaded(make, weights, torch.float64)
    drawn, found = tree.draw(torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert (found > 0).all()
    assert set(drawn.tolist()) == {1, 4, 56}


@pytest.mark.parametrize("capacity", [1, 20, 300])
def test_leaves_are_drawn_as_often_as_their_weight_says(make: Make, capacity: int) -> None:
    """Chi-square, whose mean is its degrees of freedom f and whose variance 2 f."""
    weights = whole_numbers(capacity, 11, 0.2)
    weights[0] = 3
    tree, count = loaded(make, weights), 200_000
    generator = torch.Generator().manual_seed(2)
    drawn, _ = tree.draw(torch.rand(count, dtype=torch.float64, generator=generator))
    observed = np.bincount(drawn.cpu(), minlength=capacity)
    assert not observed[weights == 0].any()
    expected = (weights / weights.sum() * count)[weights > 0]
    freedom = len(expected) - 1
    statistic = ((observed[weights > 0] - expected) ** 2 / expected).sum()
    assert abs(statistic - freedom) <= 4 * math.sqrt(2 * freedom)


def test_no_fraction_gives_no_leaf(make: Make) -> None:
    index, weights = loaded(make, np.ones(3)).draw(torch.empty(0, dtype=torch.float64))
    assert (len(index), len(weights), index.dtype) == (0, 0, torch.int64)


def test_both_kinds_draw_the_same() -> None:
    weights = np.random.default_rng(3).random(50_000)
    fractions = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = [loaded(lambda *a, k=k: k(*a, torch.device("cpu")), weights).draw(fractions)[0] for k, _ in KINDS[:2]]
    assert torch.equal(*drawn)


# Large trees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1_000_000, 10_000_000])
def test_totals_of_large_trees_do_not_drift(make: Make, capacity: int) -> None:
    tree, random = make(capacity), np.random.default_rng(5)
    weights = random.random(capacity, dtype=np.float32)
    tree.load(torch.from_numpy(weights))
    for _ in range(10):
        index = random.integers(0, capacity, 100_000)
        values = random.random(100_000, dtype=np.float32) ** 8 * 1000
        tree.set(torch.from_numpy(index), torch.from_numpy(values))
        weights[index] = values  # of repeats numpy keeps the last
    assert tree.total == pytest.approx(weights.sum(dtype=np.float64), rel=1e-9)
    assert (tree.minimum, tree.maximum) == (weights[weights > 0].min(), weights.max())
    stops = np.cumsum(weights, dtype=np.float64)
    fractions = random.random(1000)
    drawn = tree.draw(torch.from_numpy(fractions))[0].numpy(force=True)
    mass = fractions * stops[-1]
    assert (stops[drawn] >= mass * (1 - 1e-9)).all()
    assert (stops[drawn] - weights[drawn] <= mass * (1 + 1e-9)).all()


# Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [[3, 20], [-1], [0, 1 << 40], [-(1 << 40)]])
def test_missing_leaves_are_refused_and_nothing_changes(make: Make, index: list[int]) -> None:
    tree = loaded(make, np.ones(20))
    for weights in (torch.full((len(index),), 9.0), 9.0):
        with pytest.raises(IndexError, match="there are 20"):
            tree.set(torch.tensor(index), weights)
    assert tree.weights().tolist() == [1] * 20
    assert tree.total == 20


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 21)])
def test_missing_runs_are_refused(make: Make, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="there are 20"):
        make(20).fill(start, stop, 1.0)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_weights_is_refused(make: Make, count: int) -> None:
    tree = make(20)
    with pytest.raises(RuntimeError, match=f"found {count} weights, expected 3") as caught:
        tree.set(torch.arange(3), torch.ones(count))
    assert isinstance(caught.value, RbtoolError)
    assert tree.total == 0


@pytest.mark.parametrize("weights", [torch.ones(21), torch.ones(4, 5), torch.tensor(1.0)])
def test_more_weights_than_leaves_are_refused(make: Make, weights: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="up to 20"):
        make(20).load(weights)


def test_a_tree_of_zeros_cannot_be_drawn_from(make: Make) -> None:
    with pytest.raises(RuntimeError, match="all weights are 0"):
        make(20).draw(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(("capacity", "dtype"), [(0, torch.float32), (-3, torch.float32), (5, torch.float16)])
def test_trees_without_leaves_or_of_other_types_are_refused(capacity: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"the capacity is|dtype is torch.float16"):
        priority_tree(capacity, dtype)


@pytest.mark.parametrize("capacity", [21, 4000])
def test_a_tree_that_grows_keeps_its_weights(make: Make, capacity: int) -> None:
    tree = make(20)
    tree.set(torch.arange(20), torch.arange(20.0))
    larger = tree.grown(capacity)
    assert (type(larger), larger.capacity, larger.dtype) == (type(tree), capacity, tree.dtype)
    assert larger.weights().tolist() == [*range(20), *[0] * (capacity - 20)]
    larger.set(torch.tensor([capacity - 1]), 7.0)
    assert (larger.total, larger.minimum, larger.maximum, tree.total) == (197, 1, 19, 190)


# Which kind -----------------------------------------------------------------------------------------


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "rbtool.core.kernels.compiled_trees", raising=False)
    monkeypatch.delattr("rbtool.core.kernels.compiled_trees", raising=False)
    compiled_module.cache_clear()
    yield
    compiled_module.cache_clear()


def test_the_compiled_kind_is_taken_on_the_cpu() -> None:
    assert isinstance(priority_tree(5), CompiledTree)
    assert "capacity=5" in repr(priority_tree(5))


@pytest.mark.usefixtures("without_numba")
def test_the_torch_kind_is_taken_without_numba() -> None:
    tree = priority_tree(5, torch.float64, "cpu")
    assert (type(tree), tree.dtype) == (TorchTree, torch.float64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_torch_kind_is_taken_on_an_accelerator() -> None:
    tree = priority_tree(5, device="cuda")
    tree.set(torch.tensor([3]), torch.tensor([2.0]))
    index, weights = tree.draw(torch.zeros(2, dtype=torch.float64))
    assert (index.device.type, index.tolist(), weights.tolist()) == ("cuda", [3, 3], [2.0, 2.0])


# Several trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_forest_draws_what_its_trees_draw(by_batch: bool) -> None:
    forest, planted = Forest(5), [CompiledTree(capacity) for capacity in (3, 40, 5000)]
    for number, tree in zip((4, 0, 2), planted, strict=True):
        tree.load(torch.from_numpy(whole_numbers(tree.capacity, number, 0.3) + (number == 4)))
        assert forest.plant(number, tree)
    chances, stops = np.random.default_rng(1).random(90), np.array([20, 70, 90])
    drawn = forest.draw(chances, np.array([2, 4, 0]), stops, by_batch=by_batch)
    assert drawn is not None
    index, weights = drawn
    for tree, part in zip((planted[2], planted[0], planted[1]), np.split(np.arange(90), stops[:-1]), strict=True):
        leaves, expected = tree.draw(torch.from_numpy(chances[part]))
        np.testing.assert_array_equal(index[part], leaves.numpy())
        least = float(expected.min()) if by_batch else tree.minimum
        np.testing.assert_array_equal(weights[part], expected.double().numpy() / least)


def test_a_forest_refuses_empty_trees_and_other_kinds() -> None:
    forest, tree = Forest(1), CompiledTree(3)
    assert not forest.plant(0, TorchTree(3))
    assert forest.plant(0, tree)
    arguments = np.zeros(4), np.array([0]), np.array([4])
    assert forest.draw(*arguments, by_batch=False) is None
    tree.fill(1, 2, 1.0)
    drawn = forest.draw(*arguments, by_batch=False)
    assert drawn is not None
    assert drawn[0].tolist() == [1] * 4


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms_draw_the_same(device: str) -> None:
    def make(capacity: int, dtype: torch.dtype = torch.float32) -> PriorityTree:
        return TorchTree(capacity, dtype, torch.device(device))

    test_fractions_fall_where_the_oracle_says(make)  # type: ignore[call-arg]
    test_a_leaf_of_weight_zero_is_never_drawn(make)  # type: ignore[call-arg]
