"""Categorical, MultiCategorical and Binary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.specs.base import BoxList, Stacked
from rbtool.core.specs.categorical import (
    Binary,
    BinaryBox,
    Categorical,
    CategoricalBox,
    MultiCategorical,
    MultiOneHot,
    OneHot,
)

EVEN = torch.tensor([True, False, True, False, True])


def test_categories_start_at_zero() -> None:
    spec = Categorical(3)
    assert [spec.is_in(torch.tensor(value)) for value in (-1, 0, 2, 3)] == [False, True, True, False]
    assert spec.space == CategoricalBox(3)


def test_draws_are_even() -> None:
    torch.manual_seed(0)
    counts = Categorical(5).rand((50_000,)).bincount()
    assert len(counts) == 5
    assert (counts - 10_000).abs().max() < 500


@pytest.mark.parametrize("n", [0, -2])
def test_a_number_of_categories_below_one_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=str(n)):
        Categorical(n)


@pytest.mark.parametrize("n", [2.5, True, "3", torch.tensor(2.0)])
@pytest.mark.parametrize("spec", [Categorical, OneHot, lambda n: MultiOneHot([n, 3]), lambda n: Binary(n, (2,))])
def test_a_number_of_categories_is_a_whole_number(spec: Any, n: Any) -> None:
    with pytest.raises(TypeError, match="expected a whole number"):
        spec(n)


def test_numbers_of_categories_may_be_of_numpy_and_torch() -> None:
    assert Categorical(np.int32(3)).n == OneHot(torch.tensor(3)).n == 3  # type: ignore[arg-type]


def test_a_negative_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="n is -1"):
        Binary(-1)


@pytest.mark.parametrize("shape", [(2.5,), ("x",), 2.5, [None]])
def test_a_shape_consists_of_whole_numbers(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"a size is .*, expected a whole number"):
        Categorical(3, shape)


def test_more_categories_than_the_type_can_number_are_refused() -> None:
    with pytest.raises(ValueError, match="300"):
        Categorical(300, dtype=torch.uint8)
    with pytest.raises(ValueError, match="300"):
        Categorical(300).to(torch.int8)
    assert Categorical(256, dtype=torch.uint8).n == 256


def test_an_open_number_of_categories() -> None:
    spec = Categorical(-1, (2,))
    assert spec.is_in(torch.tensor([0, 10**12]))
    assert not spec.is_in(torch.tensor([0, -1]))
    assert spec.project(torch.tensor([-4, 7])).tolist() == [0, 7]
    for ask in (lambda: spec.n, spec.rand, spec.cardinality):
        with pytest.raises(RuntimeError, match="open"):
            ask()
    spec.set_provisional_n(4)
    assert spec == Categorical(4, (2,))
    assert spec.is_in(spec.rand((9,)))


def test_a_mask_rules_categories_out() -> None:
    torch.manual_seed(0)
    spec = Categorical(5, (2,), mask=EVEN)
    assert spec.rand((400,)).unique().tolist() == [0, 2, 4]
    assert spec.enumerate(use_mask=True).tolist() == [[0, 0], [2, 2], [4, 4]]
    assert spec.enumerate().shape == (5, 2)
    assert spec.cardinality() == 5
    spec.update_mask(None)
    assert spec.is_in(torch.tensor([1, 3]))


def test_a_mask_for_each_element_follows_the_shape() -> None:
    mask = torch.tensor([[True, False, False], [False, True, True]])
    spec = Categorical(3, (2,), mask=mask)
    assert spec.rand((30,))[:, 0].unique().tolist() == [0]
    assert spec[1] == Categorical(3, mask=mask[1])
    assert spec.unsqueeze(-1).mask is not None
    assert spec.unsqueeze(-1).is_in(torch.tensor([[0], [2]]))
    assert torch.stack([spec[0], spec[1]]) == spec
    with pytest.raises(ValueError, match="differs"):
        spec.enumerate(use_mask=True)
    assert torch.stack([Categorical(3), spec[0]]).unbind() == (Categorical(3), spec[0])


@pytest.mark.parametrize(
    ("mask", "says"), [(torch.ones(4), r"\[4\]"), (torch.tensor([[True, False, True], [False] * 3]), "without a legal")]
)
def test_a_mask_that_does_not_fit_is_refused(mask: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Categorical(3, (2,), mask=mask)


@given(
    st.lists(st.booleans(), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(-3, 8), max_size=5),
    st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32]),
)
@settings(max_examples=200, deadline=None)
def test_a_batch_is_in_if_each_of_its_categories_is_legal(
    legal: list[bool], numbers: list[int], dtype: torch.dtype
) -> None:
    value = torch.tensor(numbers).to(dtype)
    expected = all(0 <= number < len(legal) and legal[int(number)] for number in value.tolist())
    spec = Categorical(len(legal), dtype=dtype, mask=torch.tensor(legal))
    assert spec.is_in(value) == expected
    assert spec.is_in(value.unsqueeze(-1)) == expected
    assert all(spec.is_in(one) == (0 <= one < len(legal) and legal[int(one)]) for one in value)
    assert Categorical(len(legal), (1,), dtype=dtype).is_in(value.unsqueeze(-1)) == all(
        0 <= number < len(legal) for number in value.tolist()
    )


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf, -math.inf])
def test_what_is_no_whole_number_is_no_category(value: float) -> None:
    spec = Categorical(3, dtype=torch.float32)
    assert not spec.is_in(torch.tensor(value))
    assert not spec.is_in(torch.tensor([1.0, value]))
    assert spec.project(torch.tensor([2.0, value])).tolist() == [2.0, 2.0 if value == math.inf else 0.0]


def test_sharp_edge_4_masked_membership_outside_the_range_is_false() -> None:
    spec = Categorical(5, mask=EVEN)
    assert [spec.is_in(torch.tensor(value)) for value in (-1, 5, 99, 2, 3)] == [False, False, False, True, False]
    wide = MultiCategorical([2, 3], mask=torch.tensor([True, True, False, True, True]))
    assert [wide.is_in(torch.tensor(row)) for row in ([0, 7], [-1, 1], [0, 0], [1, 2])] == [False, False, False, True]


def test_sharp_edge_8_projecting_leaves_the_input_alone() -> None:
    for spec in (Categorical(3, (2,)), MultiCategorical([3, 3]), Binary(2, dtype=torch.int64)):
        value = torch.tensor([-4, 9])
        spec.project(value)
        assert value.tolist() == [-4, 9]


def test_sharp_edge_8_negatives_are_projected_too() -> None:
    assert MultiCategorical([3, 3]).project(torch.tensor([-4, 9])).tolist() == [0, 2]
    assert Categorical(5, mask=EVEN).project(torch.tensor([-4, 9, 3, 1])).tolist() == [0, 4, 2, 0]


def test_sharp_edge_8_binary_counts_and_lists_all_rows() -> None:
    assert Binary(3).cardinality() == 8
    assert Binary(10).cardinality() == 1024
    assert Binary(3).enumerate().tolist() == [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    assert Binary(2, (4, 2)).enumerate().shape == (4, 4, 2)
    assert Binary(shape=()).enumerate().tolist() == [0, 1]
    assert Binary(3).space == BinaryBox(3)


def test_binary_takes_a_number_or_a_shape() -> None:
    assert Binary(3) == Binary(shape=(3,)) == Binary(3, (3,))
    assert Binary(3).n == 2
    assert Binary(3).dtype == torch.int8
    assert Binary(3) == Categorical(2, (3,), dtype=torch.int8)
    with pytest.raises(TypeError, match="without n"):
        Binary()
    with pytest.raises(ValueError, match="last size"):
        Binary(3, (3, 2))


def test_binary_with_a_mask_lists_legal_rows() -> None:
    spec = Binary(2)
    spec.update_mask(torch.tensor([[True, False], [True, True]]))
    assert spec.enumerate(use_mask=True).tolist() == [[0, 0], [0, 1]]


def test_columns_have_their_own_ranges() -> None:
    spec = MultiCategorical([2, 4], (3, 2))
    assert spec.nvec.tolist() == [[2, 4]] * 3
    assert spec.cardinality() == 8
    assert spec.enumerate().shape == (8, 3, 2)
    assert MultiCategorical([2, 3]).enumerate().tolist() == [[a, b] for a in range(2) for b in range(3)]
    assert MultiCategorical([[2, 3], [4, 5]]).cardinality() == 120
    assert MultiCategorical([2, 3]).space == BoxList((CategoricalBox(2), CategoricalBox(3)))


def test_column_ranges_follow_the_index() -> None:
    spec = MultiCategorical([2, 4], (3, 2))
    assert spec[..., 1].nvec.tolist() == [4, 4, 4]
    assert spec[0, 1].is_in(torch.tensor(3))
    assert spec.flatten().nvec.tolist() == [2, 4, 2, 4, 2, 4]
    assert torch.stack([MultiCategorical([2, 3]), MultiCategorical([4, 5])]).nvec.tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("nvec", [[0, 2], [-1], [1.5], []])
def test_an_nvec_that_makes_no_sense_is_refused(nvec: Any) -> None:
    with pytest.raises(ValueError):
        MultiCategorical(nvec)


def test_an_nvec_beside_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\]"):
        MultiCategorical([2, 3], (2, 3))


def test_a_single_column_is_drawn_without_its_dimension() -> None:
    spec = MultiCategorical([3])
    assert spec.rand((4,)).shape == (4,)
    assert spec.is_in(spec.rand((4,)))
    assert spec.is_in(torch.tensor([[0], [2]]))
    assert not spec.is_in(torch.tensor([0, 3]))
    assert spec.project(torch.tensor([5, 1])).tolist() == [2, 1]
    assert MultiCategorical([3], remove_singleton=False).rand((4,)).shape == (4, 1)


def test_the_mask_of_columns_is_concatenated() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([True, False, True, True, False])
    spec = MultiCategorical([2, 3], mask=mask)
    assert spec.mask is not None
    assert spec.mask.tolist() == mask.tolist()
    assert {tuple(row) for row in spec.rand((200,)).tolist()} == {(0, 0), (0, 1)}
    assert spec.enumerate(use_mask=True).tolist() == [[0, 0], [0, 1]]
    assert spec.expand(4, 2)[2] == spec
    with pytest.raises(ValueError, match=r"\[4\]"):
        spec.update_mask(torch.ones(4))
    with pytest.raises(ValueError, match="without a legal"):
        spec.update_mask(torch.tensor([False, False, True, True, True]))


def test_one_hot_rows() -> None:
    assert Categorical(3).to_one_hot(torch.tensor([2, 0])).tolist() == [[False, False, True], [True, False, False]]
    assert MultiCategorical([2, 3]).to_one_hot(torch.tensor([1, 2])).tolist() == [False, True, False, False, True]
    assert Binary(2).to_one_hot(torch.tensor([0, 1], dtype=torch.int8)).tolist() == [[True, False], [False, True]]
    with pytest.raises(AssertionError):
        Categorical(3).to_one_hot(torch.tensor(3))


def test_numbers_of_categories_are_categorical_already() -> None:
    for spec, value in ((Categorical(3), torch.tensor(2)), (MultiCategorical([2, 3]), torch.tensor([1, 2]))):
        assert spec.to_categorical(value, safe=True) is value
        assert spec.to_categorical_spec() is spec
        with pytest.raises(AssertionError):
            spec.to_categorical(value + 5, safe=True)


def test_an_index_gathers_along_the_domain() -> None:
    table = torch.arange(8).reshape(2, 4)
    assert Categorical(4).index(torch.tensor(2), table).tolist() == [2, 6]
    assert Categorical(4, (2,)).index(torch.tensor([0, 1]), table).tolist() == [[0, 1], [4, 5]]
    assert MultiCategorical([4, 4]).index(torch.tensor([[0, 3], [1, 1]]), table).tolist() == [[0, 3], [5, 5]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_projection_goes_to_the_nearest_legal_category(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    allowed = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    value = data.draw(st.floats(-20, 20))
    found = Categorical(n, mask=torch.tensor(allowed)).project(torch.tensor(value, dtype=torch.float64)).item()
    number = min(max(round(value), 0), n - 1)
    assert found == min((k for k in range(n) if allowed[k]), key=lambda k: abs(k - number))


def test_types_too_small_for_the_categories_are_refused() -> None:
    with pytest.raises(ValueError, match="300"):
        MultiCategorical([2, 300]).to(torch.int8)
    with pytest.raises(ValueError, match="do not go with a mask of 5"):
        Categorical(5, mask=EVEN).set_provisional_n(4)


def test_columns_whose_masks_have_other_widths_are_stacked_lazily() -> None:
    masked = [MultiCategorical([n, 2], mask=torch.ones(n + 2)) for n in (3, 4)]
    assert type(torch.stack(masked)) is Stacked
    with pytest.raises(ValueError, match="differ from row to row"):
        _ = torch.stack([MultiCategorical([2, 3]), MultiCategorical([3, 2])]).update_mask(torch.ones(5))


@pytest.mark.parametrize("n", [2**16 + 1, 10**6, 2**33])
def test_many_categories_are_drawn_evenly(n: int) -> None:
    drawn = Categorical(n).rand((40_000,), generator=torch.Generator().manual_seed(0))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < n
    counts = (drawn * 16 // n).bincount(minlength=16)
    assert (counts - 2_500).abs().max() < 300
    assert drawn.unique().numel() > 15_000
