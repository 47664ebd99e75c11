"""OneHot, MultiOneHot, and their forms as numbers of categories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.specs.base import BoxList
from rbtool.core.specs.categorical import Categorical, CategoricalBox, MultiCategorical, MultiOneHot, OneHot

MASK = torch.tensor([True, False, True, False])
COLUMNS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32])


def test_a_row_has_one_element_that_is_set() -> None:
    spec = OneHot(3)
    rows = [[False, True, False], [False] * 3, [True, True, False]]
    assert [spec.is_in(torch.tensor(row)) for row in rows] == [True, False, False]
    assert (spec.n, spec.dtype, spec.shape, spec.space) == (3, torch.bool, (3,), CategoricalBox(3))
    numbers = OneHot(3, dtype=torch.int64)
    assert [numbers.is_in(torch.tensor(row)) for row in ([0, 1, 0], [2, -1, 0], [0, 2, 0])] == [True, False, False]


def test_each_column_has_one_element_that_is_set() -> None:
    spec = MultiOneHot([2, 3])
    rows = [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert [spec.is_in(torch.tensor(row).bool()) for row in rows] == [True, False, False, False]
    assert spec.space == BoxList((CategoricalBox(2), CategoricalBox(3)))
    assert spec.nvec.tolist() == [2, 3]
    assert not spec.is_in(torch.tensor([2, -1, 1, 0, 0], dtype=torch.bool).int())


@settings(max_examples=60, deadline=None)
@given(COLUMNS, DTYPES, st.data())
def test_numbers_encode_to_rows_and_back(counts: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    spec = MultiOneHot(counts, dtype=dtype)
    numbers = [data.draw(st.integers(0, count - 1)) for count in counts]
    row = spec.encode(numbers)
    assert spec.is_in(row)
    assert spec.to_numpy(row).tolist() == numbers
    assert spec.to_categorical_spec().is_in(spec.to_categorical(row))
    assert torch.equal(MultiCategorical(counts, remove_singleton=False).to_one_hot(torch.tensor(numbers)), row.bool())


@settings(max_examples=60, deadline=None)
@given(COLUMNS, st.data())
def test_projection_sets_the_largest_legal_element(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    columns = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any)) for n in counts]
    mask = [legal for column in columns for legal in column]
    scores = st.floats(-5, 5) | st.sampled_from([float("inf"), float("-inf"), float("nan")])
    values = data.draw(st.lists(scores, min_size=total, max_size=total))
    spec = MultiOneHot(counts, dtype=torch.float64, mask=torch.tensor(mask))
    value = torch.tensor(values, dtype=torch.float64)
    found = spec.project(value)
    assert spec.is_in(found)
    if found is not value:
        start, expected = 0, []
        for count in counts:
            lowest = [-1e308 if v != v else max(min(v, 1e308), -1e308) for v in values[start : start + count]]
            legal = [k for k in range(count) if mask[start + k]]
            expected.append(max(legal, key=lambda k: (lowest[k], -k)))
            start += count
        assert spec.to_numpy(found).tolist() == expected


def test_draws_are_even_and_legal() -> None:
    torch.manual_seed(0)
    counts = OneHot(4).rand((8000,)).sum(0)
    assert (counts - 2000).abs().max() < 200
    masked = OneHot(4, (2, 4), mask=MASK).rand((8000,)).sum(0)
    assert masked[:, [1, 3]].sum() == 0
    assert (masked[:, [0, 2]] - 4000).abs().max() < 300
    both = MultiOneHot([2, 2], mask=torch.tensor([True, False, True, True])).rand((400,)).sum(0).tolist()
    assert (both[:2], both[2] + both[3]) == ([400, 0], 400)
    assert min(both[2:]) > 150


@pytest.mark.parametrize(
    ("value", "row"),
    [(2, [0, 0, 1, 0]), ([1], [0, 1, 0, 0]), (np.array(3), [0, 0, 0, 1]), (torch.tensor(0), [1, 0, 0, 0])],
)  # fmt: skip
def test_values_of_many_kinds_are_encoded(value: Any, row: list[int]) -> None:
    found = OneHot(4).encode(value)
    assert (found.shape, found.int().tolist()) == ((4,), row)


def test_rows_pass_and_a_batch_of_numbers_becomes_a_batch_of_rows() -> None:
    row = torch.tensor([False, True, False])
    assert OneHot(3).encode(row) is row
    assert OneHot(3).encode([False, True, False]).tolist() == row.tolist()
    assert OneHot(3, (2, 3)).encode(torch.zeros(5, 2, dtype=torch.int64)).shape == (5, 2, 3)
    assert OneHot(3, (-1, 3)).encode([0, 1, 2, 0]).shape == (4, 3)


@pytest.mark.parametrize("value", [4, -1, [9], np.array(-3), torch.tensor(4)])
def test_a_number_of_no_category_is_refused(value: Any) -> None:
    for error in (AssertionError, RuntimeError):
        with pytest.raises(error, match="from 0 to below 4"):
            OneHot(4).encode(value)


@pytest.mark.parametrize("value", [[1, 2], 1.5, torch.tensor(1.0), "a", torch.zeros(4).bool()[:2]])
def test_what_is_no_number_of_a_category_is_refused(value: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        OneHot(4).encode(value)


def test_a_register_numbers_values_in_the_order_of_their_appearance() -> None:
    spec = OneHot(3, use_register=True)
    assert [spec.encode(value).int().argmax().item() for value in (17, -4, 17, 99)] == [0, 1, 0, 2]
    assert spec.to_numpy(spec.encode(-4)).tolist() == -4
    with pytest.raises(ValueError, match="5 is one value more than the 3"):
        spec.encode(5)
    fresh = OneHot(3, use_register=True)
    assert fresh == spec
    assert OneHot(3) != spec
    with pytest.raises(RuntimeError, match="the register has no value"):
        fresh.to_numpy(fresh.rand())
    columns = MultiOneHot([2, 2], use_register=True)
    assert columns.to_numpy(columns.encode([7, 8])).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OneHot(0), "1 or more"),
        (lambda: MultiOneHot([]), "1 or more"),
        (lambda: OneHot(3, (2, 4)), "last size should be 3"),
        (lambda: MultiOneHot([2, 3], ()), "last size should be 5"),
        (lambda: OneHot(3, mask=torch.zeros(3)), "without a legal"),
        (lambda: MultiOneHot([2, 3], mask=torch.tensor([True, True, False, False, False])), "without a legal"),
        (lambda: OneHot(3, mask=torch.ones(4)), r"\[4\]"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


CHANGES = [
    lambda spec: spec[..., 0], lambda spec: spec[..., [1, 0, 2, 3]], lambda spec: spec.unsqueeze(-1),
    lambda spec: spec.unbind(-1), lambda spec: spec.flatten(), lambda spec: spec.reshape(-1), lambda spec: spec[0, 0],
    lambda spec: spec.unflatten(-1, (2, 2)), lambda spec: torch.stack([spec, spec], -1), lambda spec: spec[..., ::2],
    lambda spec: spec.make_neg_dim(-1),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_last_dimension_stays(change: Any) -> None:
    with pytest.raises(ValueError, match="categories"):
        change(OneHot(4, (4, 4)))


def test_shape_and_mask_change_together() -> None:
    mask = torch.eye(4, dtype=torch.bool)
    spec = OneHot(4, (4, 4), mask=mask)
    assert spec[2].rand().tolist() == mask[2].tolist()
    assert torch.equal(spec[[3, 1]].rand(), mask[[3, 1]])
    assert torch.equal(spec.reshape(2, 2, 4).rand(), mask.reshape(2, 2, 4))
    assert torch.stack(spec.unbind(0)) == spec
    spec.update_mask(None)
    assert spec == OneHot(4, (4, 4))
    assert spec.mask is None


def test_rows_are_counted_and_listed() -> None:
    assert (OneHot(4, mask=MASK).cardinality(), MultiOneHot([2, 3]).cardinality()) == (4, 6)
    assert OneHot(4, mask=MASK).enumerate(use_mask=True).int().argmax(-1).tolist() == [0, 2]
    assert OneHot(3, (2, 3)).enumerate().shape == (3, 2, 3)
    listed = MultiOneHot([2, 3]).enumerate()
    assert MultiOneHot([2, 3]).to_numpy(listed).tolist() == [[a, b] for a in range(2) for b in range(3)]


def test_numbers_and_rows_have_specs_of_each_other() -> None:
    for spec in (Categorical(4, (2,), mask=MASK), MultiCategorical([1, 3], (5, 2), mask=MASK, remove_singleton=False)):
        hot: Any = spec.to_one_hot_spec()
        assert hot.to_categorical_spec() == spec
        assert hot.is_in(spec.to_one_hot(spec.rand((3,))))
        assert hot.to_one_hot_spec() is hot
        row = hot.rand()
        assert hot.to_one_hot(row, safe=True) is row


def test_what_is_no_row_has_no_number() -> None:
    for ask in (OneHot(3).to_numpy, OneHot(3).to_categorical, lambda row: OneHot(3).to_one_hot(row, safe=True)):
        with pytest.raises(AssertionError, match="is not in OneHot"):
            ask(torch.zeros(3, dtype=torch.bool))


def test_an_index_picks_along_the_categories() -> None:
    table = torch.arange(8).reshape(2, 4)
    assert OneHot(4).index(OneHot(4).encode(1), table).tolist() == [[1], [5]]
    assert OneHot(4, (2, 4)).index(OneHot(4, (2, 4)).encode([0, 3]), table).tolist() == [[0], [7]]
    columns = MultiOneHot([2, 3])
    assert columns.index(columns.encode([1, 2]), torch.arange(5)).tolist() == [1, 4]


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, -1]), min_size=4, max_size=4), max_size=4), DTYPES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_rows_are_in_if_one_legal_element_of_each_is_set(
    rows: list[list[int]], dtype: torch.dtype, masked: bool
) -> None:
    value = torch.tensor(rows).reshape(-1, 4).to(dtype)
    found = [[float(item) for item in row] for row in value.tolist()]
    legal = MASK.tolist() if masked else [True] * 4
    expected = all(sorted(row) == [0, 0, 0, 1] and legal[row.index(1)] for row in found)
    assert OneHot(4, dtype=dtype, mask=MASK if masked else None).is_in(value) == expected
