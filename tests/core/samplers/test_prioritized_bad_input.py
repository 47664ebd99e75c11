"""What the prioritized sampler refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.cursors import NoNumbersError
from rbtool.core.storages.tensor import TensorStorage


def filled(priorities: Any, **options: Any) -> PrioritizedSampler:
    sampler = PrioritizedSampler(len(priorities), **({"alpha": 0.7, "beta": 0.9} | options))
    sampler.update_priority(torch.arange(len(priorities)), torch.as_tensor(priorities, dtype=torch.float64))
    return sampler


def storage() -> TensorStorage:
    return TensorStorage(torch.arange(10))


def weights(sampler: PrioritizedSampler) -> torch.Tensor:
    found: torch.Tensor = sampler.state_dict()["_sum_tree"]
    return found


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, "much", None])
def test_numbers_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*finite number of at least 0"):
        PrioritizedSampler(10, **({"alpha": 1, "beta": 1} | {name: value}))


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "x"])
def test_alpha_out_of_range_cannot_be_set(value: Any) -> None:
    sampler = filled([1, 2])
    with pytest.raises(ValueError, match="alpha is"):
        sampler.alpha = value
    assert sampler.alpha == 0.7


def test_an_alpha_that_makes_too_large_weights_cannot_be_set() -> None:
    sampler = filled([1, 1e9])
    before = weights(sampler)
    with pytest.raises(ValueError, match="its weight is beyond"):
        sampler.alpha = 5
    assert torch.equal(weights(sampler), before)
    assert sampler.alpha == 0.7


@pytest.mark.parametrize("capacity", [0, -1, 2.5, "10", None])
def test_a_sampler_of_nothing_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match=f"{capacity} leaves"):
        PrioritizedSampler(capacity, 1, 1)


@pytest.mark.parametrize("alpha", [0, 0.7])
def test_an_alpha_that_makes_too_large_weights_of_what_is_new_cannot_be_set(alpha: float) -> None:
    sampler = filled([1, 1e9], alpha=alpha)
    sampler.update_priority(1, 1.0)
    before = weights(sampler)
    with pytest.raises(ValueError, match=r"a priority is 1e\+09: with alpha=5"):
        sampler.alpha = 5
    assert torch.equal(weights(sampler), before)
    assert (sampler.alpha, sampler.default_priority) == (alpha, 1e9)


@pytest.mark.parametrize("options", [{"alpha": 1000, "eps": 1}, {"alpha": 1, "eps": 1e39}])
def test_numbers_that_no_element_could_have_a_weight_with_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a priority is 1: with alpha="):
        PrioritizedSampler(10, beta=1, **options)


def test_a_state_with_too_large_a_maximum_is_refused() -> None:
    sampler = filled([1, 2])
    state = sampler.state_dict() | {"_max_priority": torch.tensor([1e30, 1]), "_alpha": 2.0}
    with pytest.raises(RuntimeError, match=r"a priority is 1e\+30: with alpha=2"):
        sampler.load_state_dict(state)
    assert (sampler.alpha, sampler.default_priority) == (0.7, 2)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"dtype": torch.int64}, {"reduction": "mode"}, {"reduction": None}]
)
def test_unknown_options_are_not_implemented(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="expected") as caught:
        PrioritizedSampler(10, 1, 1, **options)
    assert isinstance(caught.value, RbtoolError)


def test_an_unknown_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of batch, buffer"):
        PrioritizedSampler(10, 1, 1, normalize="none")


def test_there_is_no_sibling_without_replacement() -> None:
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
def test_updates_that_cannot_be_change_nothing(index: Any, priority: Any, kind: Any, message: str) -> None:
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
def test_coordinates_that_are_not_there_are_refused(index: Any, kind: Any, message: str) -> None:
    sampler = filled([1] * 6)
    with pytest.raises(kind, match=message):
        sampler.update_priority(index, 1.0, storage=TensorStorage(torch.zeros(2, 3), ndim=2))


def test_elements_beyond_the_capacity_are_refused_without_a_storage() -> None:
    sampler = PrioritizedSampler(5, 1, 1)
    for tell in (lambda: sampler.extend(torch.arange(10)), lambda: sampler.add(9)):
        with pytest.raises(RuntimeError, match="element 9 was written, but the sampler's max_capacity is 5"):
            tell()
    assert not weights(sampler).any()


def test_priorities_of_zero_without_eps_cannot_be_drawn() -> None:
    with pytest.raises(RuntimeError, match="non-positive p_sum"):
        filled([0] * 10, eps=0).sample(storage(), 1)
