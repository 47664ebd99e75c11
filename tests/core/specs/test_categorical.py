"""Categories as numbers and as one-hot rows, and the words for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

import rbtool
from rbtool.core.specs.base import BoxList, CategoricalBox, Stacked
from rbtool.core.specs.categorical import (
    ACTION_SPACE_MAP,
    Binary,
    BinaryBox,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
)

EVEN = torch.tensor([True, False, True, False, True])
MASK = torch.tensor([True, False, True, False])
COLUMNS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32])


def test_categorical_draws_are_even() -> None:
    torch.manual_seed(0)
    counts = Categorical(5).rand((50_000,)).bincount()
    assert len(counts) == 5
    assert (counts - 10_000).abs().max() < 500


@each("n", [2.5, True, "3", torch.tensor(2.0)])
@each("spec", [Categorical, OneHot, lambda n: MultiOneHot([n, 3]), lambda n: Binary(n, (2,))])
def test_a_number_of_categories_is_a_whole_number(spec: Any, n: Any) -> None:
    with pytest.raises(TypeError, match="expected a whole number"):
        spec(n)


def test_whole_numbers_of_any_library_are_taken() -> None:
    assert Categorical(np.int32(3)).n == OneHot(torch.tensor(3)).n == 3  # type: ignore[arg-type]
    assert Categorical(256, dtype=torch.uint8).n == 256
    shapes: list[Any] = [(2.5,), ("x",), 2.5, [None]]
    for shape in shapes:
        with pytest.raises(TypeError, match=r"a size is .*, expected a whole number"):
            Categorical(3, shape)


@each(
    ("make", "says"),
    [
        (lambda: Categorical(-2), "-2"),
        (lambda: Categorical(300, dtype=torch.uint8), "300"),
        (lambda: Categorical(300).to(torch.int8), "300"),
        (lambda: Categorical(5, mask=EVEN).set_provisional_n(4), "do not fit the mask, which has 5"),
        (lambda: Categorical(3, (2,), mask=torch.ones(4)), r"\[4\]"),
        (lambda: Categorical(3, (2,), mask=torch.tensor([[True, False, True], [False] * 3])), "without a legal"),
        (lambda: Binary(-1), "n is -1"),
        (lambda: Binary(3, (3, 2)), "last size"),
        (lambda: MultiCategorical([-1]), "n is -1"),
        (lambda: MultiCategorical([1.5]), "nvec is"),
        (lambda: MultiCategorical([]), "nvec is"),
        (lambda: MultiCategorical([2, 3], (2, 3)), r"\[2\]"),
        (lambda: MultiCategorical([2, 300]).to(torch.int8), "300"),
        (lambda: MultiCategorical([2, 3]).update_mask(torch.ones(4)), r"\[4\]"),
        (lambda: MultiCategorical([2, 3]).update_mask(torch.arange(5) > 1), "without a legal"),
        (lambda: OneHot(-1), r"\[-1\]"),
        (lambda: MultiOneHot([]), r"are \[\]"),
        (lambda: OneHot(3, (2, 4)), "last size should be 3"),
        (lambda: MultiOneHot([2, 3], ()), "last size should be 5"),
        (lambda: OneHot(3, mask=torch.zeros(3)), "without a legal"),
        (lambda: MultiOneHot([2, 3], mask=torch.tensor([True, True, False, False, False])), "without a legal"),
        (lambda: OneHot(3, mask=torch.ones(4)), r"\[4\]"),
    ],
)
def test_categories_and_masks_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_an_open_number_of_categories() -> None:
    spec = Categorical(-1, (2,))
    assert spec.is_in(torch.tensor([0, 10**12]))
    assert not spec.is_in(torch.tensor([0, -1]))
    assert spec.project(torch.tensor([-4, 7])).tolist() == [0, 7]
    for ask in (lambda: spec.n, spec.rand, spec.cardinality):
        with pytest.raises(RuntimeError, match="is not set"):
            ask()
    spec.set_provisional_n(4)
    assert spec == Categorical(4, (2,))
    assert spec.is_in(spec.rand((9,)))


@each("spec", [Categorical(3), OneHot(3), MultiOneHot([1, 2]), MultiCategorical([1, 2])])
def test_a_mask_of_another_shape_is_refused(spec: Any) -> None:
    for error in (ValueError, RuntimeError):  # it is both
        with pytest.raises(error, match=r"the mask has the shape \[7\], expected \[3\]"):
            spec.update_mask(torch.ones(7, dtype=torch.bool))
    assert spec.mask is None


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


@given(
    st.lists(st.booleans(), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(-3, 8), max_size=5),
    st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32]),
)
@settings(max_examples=200, deadline=None)
def test_a_batch_is_in_if_each_of_its_categories_is_legal(
    legal: list[bool], numbers: list[int], dtype: torch.dtype
) -> None:
    value, n = torch.tensor(numbers).to(dtype), len(legal)
    within = [0 <= number < n for number in value.tolist()]
    expected = [inside and legal[int(number)] for inside, number in zip(within, value.tolist(), strict=True)]
    spec = Categorical(n, dtype=dtype, mask=torch.tensor(legal))
    assert [spec.is_in(one) for one in value] == expected
    assert spec.is_in(value) == spec.is_in(value.unsqueeze(-1)) == all(expected)
    assert Categorical(n, (1,), dtype=dtype).is_in(value.unsqueeze(-1)) == all(within)


@each("value", [0.5, math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_whole_are_no_categories(value: float) -> None:
    spec = Categorical(3, dtype=torch.float32)
    assert not spec.is_in(torch.tensor(value))
    assert not spec.is_in(torch.tensor([1.0, value]))
    assert spec.project(torch.tensor([2.0, value])).tolist() == [2.0, 2.0 if value == math.inf else 0.0]


def test_values_outside_the_range_of_a_mask_are_no_members() -> None:
    spec = Categorical(5, mask=EVEN)
    assert [spec.is_in(torch.tensor(value)) for value in (-1, 5, 99, 2, 3)] == [False, False, False, True, False]
    wide = MultiCategorical([2, 3], mask=torch.tensor([True, True, False, True, True]))
    assert [wide.is_in(torch.tensor(row)) for row in ([0, 7], [-1, 1], [0, 0], [1, 2])] == [False, False, False, True]


def test_values_outside_the_range_are_projected_into_a_copy() -> None:
    value = torch.tensor([-4, 9])
    assert MultiCategorical([3, 3]).project(value).tolist() == Categorical(3, (2,)).project(value).tolist() == [0, 2]
    assert Binary(2, dtype=torch.int64).project(value).tolist() == [0, 1]
    assert value.tolist() == [-4, 9]
    assert Categorical(5, mask=EVEN).project(torch.tensor([-4, 9, 3, 1])).tolist() == [0, 4, 2, 0]


def test_binary_counts_and_lists_all_rows() -> None:
    assert Binary(10).cardinality() == 1024
    assert Binary(3).cardinality() == 8
    assert Binary(3).enumerate().tolist() == [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    assert Binary(2, (4, 2)).enumerate().shape == (4, 4, 2)
    assert Binary(shape=()).enumerate().tolist() == [0, 1]
    assert (Binary(0)[None].shape, Binary(0).cardinality(), Binary(0).enumerate().shape) == ((1, 0), 1, (1, 0))
    masked = Binary(2)
    masked.update_mask(torch.tensor([[True, False], [True, True]]))
    assert masked.enumerate(use_mask=True).tolist() == [[0, 0], [0, 1]]


def test_binary_takes_a_number_or_a_shape() -> None:
    assert Binary(3) == Binary(shape=(3,)) == Binary(3, (3,))
    assert (Binary(3).n, Binary(3).dtype, Binary(3).space) == (2, torch.int8, BinaryBox(3))
    assert Binary(3) == Categorical(2, (3,), dtype=torch.int8)
    with pytest.raises(TypeError, match="without n"):
        Binary()


def test_columns_have_their_own_ranges() -> None:
    spec = MultiCategorical([2, 4], (3, 2))
    assert spec.nvec.tolist() == [[2, 4]] * 3
    assert spec.cardinality() == 8
    assert spec.enumerate().shape == (8, 3, 2)
    assert MultiCategorical([2, 3]).enumerate().tolist() == [[a, b] for a in range(2) for b in range(3)]
    assert MultiCategorical([[2, 3], [4, 5]]).cardinality() == 120
    assert MultiCategorical([2, 3]).space == BoxList((CategoricalBox(2), CategoricalBox(3)))
    assert spec[..., 1].nvec.tolist() == [4, 4, 4]
    assert spec[0, 1].is_in(torch.tensor(3))
    assert spec.flatten().nvec.tolist() == [2, 4, 2, 4, 2, 4]
    assert torch.stack([MultiCategorical([2, 3]), MultiCategorical([4, 5])]).nvec.tolist() == [[2, 3], [4, 5]]


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


def test_one_hot_rows_of_numbers() -> None:
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
    assert OneHot(4).index(OneHot(4).encode(1), table).tolist() == [[1], [5]]
    assert OneHot(4, (2, 4)).index(OneHot(4, (2, 4)).encode([0, 3]), table).tolist() == [[0], [7]]
    columns = MultiOneHot([2, 3])
    assert columns.index(columns.encode([1, 2]), torch.arange(5)).tolist() == [1, 4]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_projection_goes_to_the_nearest_legal_category(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    allowed = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    value = data.draw(st.floats(-20, 20))
    found = Categorical(n, mask=torch.tensor(allowed)).project(torch.tensor(value, dtype=torch.float64)).item()
    number = min(max(round(value), 0), n - 1)
    assert found == min((k for k in range(n) if allowed[k]), key=lambda k: abs(k - number))


def test_columns_whose_masks_have_other_widths_are_stacked_lazily() -> None:
    masked = [MultiCategorical([n, 2], mask=torch.ones(n + 2)) for n in (3, 4)]
    assert type(torch.stack(masked)) is Stacked
    with pytest.raises(ValueError, match="differ from row to row"):
        _ = torch.stack([MultiCategorical([2, 3]), MultiCategorical([3, 2])]).update_mask(torch.ones(5))


@each("n", [2**16 + 1, 10**6, 2**33])
def test_many_categories_are_drawn_evenly(n: int) -> None:
    drawn = Categorical(n).rand((40_000,), generator=torch.Generator().manual_seed(0))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < n
    counts = (drawn * 16 // n).bincount(minlength=16)
    assert (counts - 2_500).abs().max() < 300
    assert drawn.unique().numel() > 15_000


def test_a_row_has_one_element_that_is_set() -> None:
    spec = OneHot(3)
    rows = [[False, True, False], [False] * 3, [True, True, False]]
    assert [spec.is_in(torch.tensor(row)) for row in rows] == [True, False, False]
    assert (spec.n, spec.dtype, spec.shape) == (3, torch.bool, (3,))
    assert spec.space == Categorical(3).space == CategoricalBox(3)
    numbers = OneHot(3, dtype=torch.int64)
    assert [numbers.is_in(torch.tensor(row)) for row in ([0, 1, 0], [2, -1, 0], [0, 2, 0])] == [True, False, False]


def test_each_column_has_one_element_that_is_set() -> None:
    spec = MultiOneHot([2, 3])
    rows = [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert [spec.is_in(torch.tensor(row).bool()) for row in rows] == [True, False, False, False]
    assert spec.space == BoxList((CategoricalBox(2), CategoricalBox(3)))
    assert spec.nvec == [2, 3]
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


def test_one_hot_draws_are_even_and_legal() -> None:
    torch.manual_seed(0)
    counts = OneHot(4).rand((8000,)).sum(0)
    assert (counts - 2000).abs().max() < 200
    masked = OneHot(4, (2, 4), mask=MASK).rand((8000,)).sum(0)
    assert masked[:, [1, 3]].sum() == 0
    assert (masked[:, [0, 2]] - 4000).abs().max() < 300
    both = MultiOneHot([2, 2], mask=torch.tensor([True, False, True, True])).rand((400,)).sum(0).tolist()
    assert (both[:2], both[2] + both[3]) == ([400, 0], 400)
    assert min(both[2:]) > 150


@each(
    ("value", "row"),
    [(2, [0, 0, 1, 0]), ([1], [0, 1, 0, 0]), (np.array(3), [0, 0, 0, 1]), (torch.tensor(0), [1, 0, 0, 0])],
)  # fmt: skip
def test_one_hot_rows_are_encoded_from_values_of_many_kinds(value: Any, row: list[int]) -> None:
    found = OneHot(4).encode(value)
    assert (found.shape, found.int().tolist()) == ((4,), row)


def test_rows_are_kept_and_a_batch_of_numbers_becomes_a_batch_of_rows() -> None:
    row = torch.tensor([False, True, False])
    assert OneHot(3).encode(row) is row
    assert OneHot(3).encode([False, True, False]).tolist() == row.tolist()
    assert OneHot(3, (2, 3)).encode(torch.zeros(5, 2, dtype=torch.int64)).shape == (5, 2, 3)
    assert OneHot(3, (-1, 3)).encode([0, 1, 2, 0]).shape == (4, 3)


def test_other_values_than_numbers_of_categories_are_refused() -> None:
    for value in (4, -1, [9], np.array(-3), torch.tensor(4)):
        for error in (AssertionError, RuntimeError):  # it is both
            with pytest.raises(error, match="from 0 to below 4"):
                OneHot(4).encode(value)
    for value in ([1, 2], 1.5, torch.tensor(1.0), "a", torch.zeros(4).bool()[:2]):
        with pytest.raises((RuntimeError, TypeError)):
            OneHot(4).encode(value)


def test_a_register_numbers_values_in_the_order_of_their_appearance() -> None:
    spec = OneHot(3, use_register=True)
    assert [spec.encode(value).int().argmax().item() for value in (17, -4, 17, 99)] == [0, 1, 0, 2]
    assert spec.to_numpy(spec.encode(-4)).tolist() == -4
    with pytest.raises(ValueError, match="no category is left for 5: its column has 3"):
        spec.encode(5)
    fresh = OneHot(3, use_register=True)
    assert fresh == spec
    assert OneHot(3) != spec
    with pytest.raises(RuntimeError, match="no value is registered"):
        fresh.to_numpy(fresh.rand())
    columns = MultiOneHot([2, 2], use_register=True)
    assert columns.to_numpy(columns.encode([7, 8])).tolist() == [7, 8]


@each(
    "change",
    [
        lambda spec: spec.unsqueeze(-1), lambda spec: spec.unbind(-1), lambda spec: spec.flatten(),
        lambda spec: spec.reshape(-1), lambda spec: spec.unflatten(-1, (2, 2)), lambda spec: spec.make_neg_dim(-1),
        lambda spec: torch.stack([spec, spec], -1), lambda spec: torch.index_select(spec, -1, torch.tensor([0])),
    ],
)  # fmt: skip
def test_one_hot_specs_keep_their_last_dimension(change: Any) -> None:
    with pytest.raises(ValueError, match="categories"):
        change(OneHot(4, (4, 4)))


def test_one_hot_shape_and_mask_change_together() -> None:
    mask = torch.eye(4, dtype=torch.bool)
    spec = OneHot(4, (4, 4), mask=mask)
    assert spec[2].rand().tolist() == mask[2].tolist()
    assert torch.equal(spec[[3, 1]].rand(), mask[[3, 1]])
    assert torch.equal(spec.reshape(2, 2, 4).rand(), mask.reshape(2, 2, 4))
    assert torch.stack(spec.unbind(0)) == spec
    spec.update_mask(None)
    assert spec == OneHot(4, (4, 4))
    assert spec.mask is None


def test_one_hot_rows_are_counted_and_listed() -> None:
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
    for ask in (OneHot(3).to_numpy, OneHot(3).to_categorical, lambda row: OneHot(3).to_one_hot(row, safe=True)):
        with pytest.raises(AssertionError, match="is not in OneHot"):
            ask(torch.zeros(3, dtype=torch.bool))


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


def test_each_kind_and_each_spelling_has_one_word() -> None:
    spec = rbtool.MultiCategorical([2, 3])
    spellings = ("multi_categorical", "multi-categorical", "multi_discrete", "multi-discrete")
    assert {ACTION_SPACE_MAP[word] for word in (*spellings, type(spec))} == {"multi_categorical"}
    assert ACTION_SPACE_MAP["multi-one-hot"] == ACTION_SPACE_MAP[rbtool.MultiOneHot] == "mult_one_hot"


def test_boxes_are_public() -> None:
    assert isinstance(rbtool.Bounded(0, 1, (2,)).space, rbtool.ContinuousBox)
    assert rbtool.MultiCategorical([2, 3]).space == rbtool.BoxList((rbtool.CategoricalBox(2), rbtool.CategoricalBox(3)))
    assert isinstance(rbtool.Binary(2).space, rbtool.Box)
    assert rbtool.Binary(2).space == rbtool.BinaryBox(2)


@each(
    ("make", "shape"),
    [
        (lambda: OneHot(0), (0,)), (lambda: MultiOneHot([0]), (0,)), (lambda: MultiOneHot([0, 3]), (3,)),
        (lambda: Categorical(0), ()), (lambda: MultiCategorical([0]), (1,)), (lambda: MultiCategorical([0, 3]), (2,)),
        (lambda: Categorical(0, (2,)), (2,)), (lambda: OneHot(0, dtype=torch.int64), (0,)),
    ],
)  # fmt: skip
def test_without_categories_there_are_no_members(make: Any, shape: tuple[int, ...]) -> None:
    spec = make()
    assert (spec.shape, spec[None].shape, spec.clone() == make()) == (shape, (1, *shape), True)
    assert (spec.cardinality(), len(spec.enumerate())) == (0, 0)
    values = [spec.zero(), spec.one(), spec.one((2,)), torch.full_like(spec.zero(), -1)]
    assert [spec.is_in(value) for value in values] == [False] * 4
    for generator in (None, torch.Generator()):
        with pytest.raises(RuntimeError):
            spec.rand(generator=generator)


@each("spec", [OneHot(4, (3, 4)), MultiOneHot([2, 2], (3, 4)), Binary(4, (3, 4))])
def test_one_event_is_not_indexed(spec: Any) -> None:
    for index in ((0, 1), (..., 0), (..., slice(2)), torch.ones(3, 4, dtype=torch.bool), (slice(None), [0, 1])):
        with pytest.raises(IndexError, match="divides one event"):
            spec[index]
    assert [spec[index].shape for index in (0, (0, ...), (..., 0, slice(None)), (None, 1))] == [(4,)] * 3 + [(1, 4)]
    with pytest.raises(IndexError):
        torch.index_select(spec, 0, torch.tensor([7]))
    assert torch.index_select(spec, 0, torch.tensor([2, 2])).shape == (2, 4)


@each(
    "spec", [OneHot(4, (3, 4)), MultiOneHot([2, 2], (3, 4)), Binary(4, (3, 4)), MultiCategorical([2, 3, 4, 5], (3, 4))]
)
def test_one_event_is_not_unbound(spec: Any) -> None:
    with pytest.raises(ValueError, match="event"):
        spec.unbind(-1)
    assert [part.shape for part in spec.unbind()] == [(4,)] * 3
    if isinstance(spec, MultiCategorical):
        assert spec[..., 1].nvec.tolist() == [3, 3, 3]
    else:
        with pytest.raises(ValueError, match="event"):
            torch.index_select(spec, -1, torch.tensor([0]))


def test_boxes_are_made_of_counts_and_copied() -> None:
    counts: Any
    for counts in ([2, 3], [[2, 3], [4, 5]], [[[2], [3]]]):
        box = BoxList.from_nvec(torch.tensor(counts))
        assert box == MultiCategorical(counts).space == box.clone() == box.to("cpu")
        assert (len(box), [*box], hash(box)) == (torch.tensor(counts).shape[-1], [*box.boxes], hash(box.clone()))
    for one in (CategoricalBox(3), BinaryBox(3), BoxList([CategoricalBox(3)])):
        assert one == one.clone() == one.to(torch.float32) == one.to("meta")


def test_a_new_box_has_a_new_number_of_categories() -> None:
    spec = Categorical(3, (50,))
    spec.space = CategoricalBox(7)
    assert (spec, spec.n) == (Categorical(7, (50,)), 7)
    assert spec.is_in(spec.rand() * 0 + 6)


@each(
    ("spec", "box"),
    [
        (Categorical(4, dtype=torch.int8), CategoricalBox(300)),
        (Categorical(2, mask=torch.tensor([True, False])), CategoricalBox(3)),
        (Categorical(2, mask=torch.tensor([True, False])), CategoricalBox(-1)),
    ],
)
def test_a_box_that_does_not_fit_is_refused(spec: Categorical, box: CategoricalBox) -> None:
    before = spec.clone()
    with pytest.raises(ValueError, match=r"expected|do not fit"):
        spec.space = box
    assert spec == before


@each("counts", [[2, 3], [5], [2, 3, 4]])
def test_numbers_of_rows_have_the_spec_of_columns(counts: list[int]) -> None:
    rows = MultiOneHot(counts, (4, sum(counts)))
    numbers = rows.to_categorical_spec()
    assert numbers == MultiCategorical(counts, (4, len(counts)))
    assert numbers.is_in(rows.to_categorical(rows.rand()))
    assert numbers.to_one_hot_spec() == rows
    assert MultiCategorical(counts) == MultiCategorical(counts, remove_singleton=False)


def test_conversions_go_by_the_names_of_torchrl() -> None:
    bits, numbers = torch.tensor([False, True, False]), torch.tensor(1)
    assert OneHot(3).to_categorical(val=bits) == Categorical(3).to_categorical(val=numbers) == numbers
    assert torch.equal(Categorical(3).to_one_hot(val=numbers), OneHot(3).to_one_hot(val=bits))
    assert MultiCategorical([2, 1]).to_one_hot(val=torch.tensor([1, 0])).tolist() == [False, True, True]
    assert Categorical(3).index(index=numbers, tensor_to_index=torch.arange(3) * 2) == 2
    assert OneHot(3).index(index=bits, tensor_to_index=torch.arange(3) * 2) == 2
