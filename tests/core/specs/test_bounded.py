"""Bounded and Unbounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rbtool.core.specs.base import SpecTypeError, UndefinedForSpecError
from rbtool.core.specs.bounded import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    ContinuousBox,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)

INF, NAN = float("inf"), float("nan")
HIGHEST = 2**63 - 1


@each(
    ("dtype", "domain", "kind"),
    [
        (None, None, BoundedContinuous),
        ("torch.float64", None, BoundedContinuous),
        ("float16", "discrete", BoundedDiscrete),
        (torch.int8, None, BoundedDiscrete),
        (torch.bool, None, BoundedDiscrete),
    ],
)
def test_the_type_decides_the_class(dtype: Any, domain: Any, kind: type[Bounded]) -> None:
    spec = Bounded(0, 1, (2,), dtype=dtype, domain=domain)
    assert type(spec) is kind
    assert kind(0, 1, (2,), dtype=dtype) == spec
    assert BoundedDiscrete(0, 3, (2,)).dtype == UnboundedDiscrete((2,)).dtype == torch.int64
    assert BoundedContinuous(0, 3, (2,)).dtype == torch.float32


def test_both_ends_are_members() -> None:
    spec = Bounded(-1, 2, (2,))
    assert spec.is_in(torch.tensor([-1.0, 2.0]))
    assert not spec.is_in(torch.tensor([-1.0001, 2.0]))
    assert not spec.is_in(torch.tensor([-1.0, 2.001]))


def test_the_shape_comes_from_copies_of_the_bounds() -> None:
    assert Bounded(np.zeros((2, 3)), [1, 2, 3]).shape == (2, 3)
    assert Bounded(0, torch.ones(4)).high.shape == (4,)
    assert Bounded(torch.zeros(3), 1, (2, 3)).low.shape == (2, 3)
    assert Bounded(0, 1, 3).shape == (3,)
    low = torch.zeros(3)
    spec = Bounded(low, 1)
    low += 5
    assert spec.low.tolist() == [0, 0, 0]


@each(
    ("arguments", "error", "says"),
    [
        ({"low": 0, "high": 1}, RuntimeError, "no shape"),
        ({"low": 2, "high": 1, "shape": (2,)}, ValueError, "above"),
        ({"low": [0, 2], "high": [1, 1]}, ValueError, "above"),
        ({"low": 0.2, "high": 0.8, "shape": (), "domain": "discrete"}, ValueError, "no number between"),
        ({"low": NAN, "high": 1, "shape": (2,)}, ValueError, "lower bound is nan"),
        ({"low": INF, "high": INF, "shape": (2,)}, ValueError, "lower bound is inf"),
        ({"low": 0, "high": 300, "shape": (2,), "dtype": torch.uint8}, ValueError, "uint8, 0 to 255"),
        ({"low": 0, "high": 300, "shape": (2,), "dtype": torch.int8}, RuntimeError, "beyond the range of torch"),
        ({"low": 0.0, "high": 1e30, "shape": (2,), "dtype": torch.int64}, ValueError, "beyond"),
        ({"low": -5, "high": 2**63, "shape": (2,), "dtype": torch.int64}, ValueError, "beyond"),
        ({"low": -5, "high": torch.tensor(2**64 - 1, dtype=torch.uint64), "shape": (2,), "dtype": torch.int64},
         ValueError, "beyond"),
        ({"low": 0, "high": 1, "shape": (2,), "dtype": torch.complex64}, TypeError, "complex64"),
        ({"low": 0, "high": 1, "shape": (2,), "dtype": "text"}, TypeError, "'text'"),
        ({"low": 0, "high": 1, "shape": (2,), "dtype": torch.int8, "domain": "continuous"}, ValueError, "continuous"),
        ({"low": 0, "high": 1, "shape": (2,), "domain": "odd"}, ValueError, "'odd'"),
        ({"low": "a", "high": 1, "shape": (2,)}, TypeError, "low is 'a'"),
        ({"low": [0, 0], "high": 1, "shape": (3,)}, RuntimeError, r"\[2\]"),
        ({"low": [0, 0], "high": [1, 1, 1]}, RuntimeError, "do not go together"),
        ({"low": 0, "high": 1, "shape": (-2,)}, ValueError, "-2"),
        ({"minimum": 0, "maximum": 1, "shape": (2,)}, TypeError, "minimum"),
    ],
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Bounded(**arguments)


@each(
    ("make", "error"),
    [
        (lambda: BoundedContinuous(0, 1, (2,), dtype=torch.int64), ValueError),
        (lambda: BoundedDiscrete(0, 1, (2,), dtype=torch.complex64), TypeError),
        (lambda: UnboundedContinuous((2,), dtype=torch.int64), ValueError),
        (lambda: UnboundedDiscrete((2,), dtype=torch.complex64), TypeError),
        (lambda: Unbounded((1,), domain="real"), ValueError),  # type: ignore[arg-type]
        (lambda: Unbounded((1,), domain="continuous", dtype=torch.int8), ValueError),
        (lambda: Unbounded((1,), domain="discrete", dtype=torch.complex64), TypeError),
    ],
)
def test_domains_that_the_type_does_not_have_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"does not support|domain is|dtype is"):
        make()


def test_discrete_draws_reach_both_ends_evenly() -> None:
    torch.manual_seed(0)
    drawn = Bounded(-3, 3, (), dtype=torch.int64).rand((70_000,))
    values, counts = drawn.unique(return_counts=True)
    assert values.tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert (counts - 10_000).abs().max() < 500


def test_infinite_bounds_draw_finite_members() -> None:
    torch.manual_seed(0)
    spec = Bounded([-INF, -INF, 5.0], [INF, -5.0, INF])
    drawn = spec.rand((2000,))
    assert drawn.isfinite().all()
    assert spec.is_in(drawn)
    assert drawn.std(0).min() > 0.5
    assert spec.project(torch.tensor([NAN, NAN, NAN])).tolist() == [0, -5, 5]


def test_nan_is_projected_into_the_domain() -> None:
    assert Bounded(-1, 1, (2,)).project(torch.tensor([NAN, 3.0])).tolist() == [0, 1]
    assert Bounded(2, 3, (), dtype=torch.int64).project(torch.tensor(NAN)).item() == 2


def test_discrete_ranges_are_counted_and_listed() -> None:
    spec = Bounded([0, -1], [2, 0], dtype=torch.int32)
    assert spec.cardinality() == 6
    listed = spec.enumerate()
    assert listed.dtype == torch.int32
    assert listed.tolist() == [[0, -1], [0, 0], [1, -1], [1, 0], [2, -1], [2, 0]]
    assert Bounded(0, 1, (2,)).cardinality() == math.inf
    with pytest.raises(ValueError, match="too many"):
        Bounded(0, 1000, (9,), dtype=torch.int64).enumerate()


def test_membership_is_a_plain_bool() -> None:
    for spec in (Bounded(0, 1, (2,)), Unbounded((2,)), Bounded(0, 1, (2,), dtype=torch.int64)):
        assert spec.is_in(spec.rand()) is True
        assert spec.is_in(torch.zeros(1)) is False


def test_an_edit_of_a_stacked_box_is_seen() -> None:
    parts = [Bounded(0, 1, (2,)), Bounded(0, 1, (2,))]
    stacked: Any = torch.stack(parts)
    stacked.space.high[0] = 9
    assert stacked[0].high.tolist() == [9, 9]
    assert stacked[1].high.tolist() == [1, 1]
    assert stacked.is_in(torch.tensor([[9.0, 0.0], [1.0, 0.0]]))
    assert parts[0].high.tolist() == [1, 1]
    stacked = torch.stack([Bounded(0, 1, (2,)), Bounded(-5, [7, 8])], 1)
    assert stacked.low.tolist() == [[0, -5], [0, -5]]
    assert stacked.high.tolist() == [[1, 7], [1, 8]]


@each("dtype", [torch.uint64, torch.int64, torch.int8])
def test_unbounded_draws_use_the_whole_range(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    drawn = Unbounded((4000,), dtype=dtype).rand()
    info = torch.iinfo(dtype)
    quarters = {int(4 * (value - info.min) // (info.max - info.min + 1)) for value in drawn.tolist()}
    assert quarters == {0, 1, 2, 3}


@each("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_unbounded_equals_a_bounded_over_its_type(dtype: torch.dtype) -> None:
    free = Unbounded((3,), dtype=dtype)
    bounded = Bounded(free.low, free.high, dtype=dtype)
    assert free == bounded
    assert bounded == free
    assert hash(free) == hash(bounded)
    assert free != Bounded(0, 0, (3,), dtype=dtype)


def test_unbounded_accepts_nan_and_infinity() -> None:
    assert Unbounded((2,)).is_in(torch.tensor([NAN, INF]))
    assert Unbounded((2,), dtype=torch.complex64).is_in(Unbounded((2,), dtype=torch.complex64).rand((3,)))


@each("spec", [Unbounded((2,)), Bounded(0, 1, (2,))])
def test_real_numbers_are_neither_counted_nor_listed(spec: Any) -> None:
    with pytest.raises(NotImplementedError):
        spec.enumerate()
    with pytest.raises(UndefinedForSpecError, match="index"):
        spec.index(torch.zeros(1), torch.zeros(2))
    with pytest.raises(NotImplementedError, match="counted"):
        Unbounded().cardinality()


def test_casting_keeps_what_the_new_type_can_hold() -> None:
    spec = Bounded(-1.5, 2.5, (2,)).to(torch.int64)
    assert (spec.low.tolist(), spec.high.tolist()) == ([-1, -1], [2, 2])
    assert type(spec) is BoundedDiscrete
    assert type(spec.to(torch.float32)) is BoundedContinuous
    assert Bounded(-INF, INF, ()).to(torch.int8) == Bounded(-128, 127, (), dtype=torch.int8)
    with pytest.raises(ValueError, match="beyond"):
        Bounded(-1, 1, (2,)).to(torch.uint8)


def test_projecting_complex_numbers_or_other_shapes_is_refused() -> None:
    spec = Bounded(0, 1, (2,))
    with pytest.raises(SpecTypeError, match="complex64"):
        spec.project(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        spec.project(torch.zeros(3))
    with pytest.raises(TypeError, match="ndarray"):
        spec.project(np.zeros(2))


@example([(HIGHEST - 65_535, HIGHEST)])
@example([(HIGHEST, HIGHEST)])
@example([(-(2**63), -(2**63) + 1)])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), HIGHEST), st.integers(-(2**63), HIGHEST)), min_size=1, max_size=6))
def test_any_range_of_int64_draws_members(ranges: list[tuple[int, int]]) -> None:
    low, high = torch.tensor([min(pair) for pair in ranges]), torch.tensor([max(pair) for pair in ranges])
    spec = Bounded(low, high, dtype=torch.int64)
    assert spec.is_in(spec.rand((50,)))
    assert spec.project(low - 1 if bool((low > -(2**63)).all()) else low).tolist() == low.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-(2.0**126), 2.0**126, width=32),
    st.floats(0, 2.0**126, width=32),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_any_range_of_floats_draws_members(low: float, width: float, dtype: torch.dtype) -> None:
    least = torch.tensor(low).to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    spec = Bounded(least, torch.maximum(least, torch.tensor(low + width).to(dtype)), (3,), dtype=dtype)
    assert spec.is_in(spec.rand((20,)))


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each(("low", "high"), [(2, 4), (-4, -2), (-INF, -2), (0, 1)])
def test_whole_numbers_of_a_float_type_reach_where_it_leaves_some_out(
    dtype: torch.dtype, low: float, high: float
) -> None:
    unit = 2 / torch.finfo(dtype).eps  # the last number up to which there are all
    spec = Bounded(low * unit, high * unit, (2,), dtype=dtype, domain="discrete")
    drawn = spec.rand((100,), generator=torch.Generator().manual_seed(0))
    assert spec.is_in(drawn)
    if low == 0:
        assert drawn.max() > unit * 0.75
    value = torch.tensor([low * unit, 0.5], dtype=dtype)
    found = spec.project(value)
    assert spec.is_in(found)
    assert found[0] == value[0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=3, max_size=3), st.booleans())
def test_projection_is_the_nearest_member(values: list[float], discrete: bool) -> None:
    spec = Bounded(-3, 7, (3,), dtype=torch.float64, domain="discrete" if discrete else "continuous")
    found = spec.project(torch.tensor(values, dtype=torch.float64)).tolist()
    for value, projected in zip(values, found, strict=True):
        wish = 0.0 if math.isnan(value) else min(max(value, -3), 7)
        assert projected == (round(wish) if discrete else wish)


@each("dtype", [torch.int64, torch.int8, torch.uint16, torch.float32])
def test_too_large_a_uint64_becomes_the_largest(dtype: torch.dtype) -> None:
    value = torch.tensor([3, 2**64 - 1], dtype=torch.uint64)
    found = Bounded(0, 100, (2,), dtype=dtype).project(value)
    assert found.tolist() == [3, 100]
    assert Unbounded((2,), dtype=torch.int8).project(value).tolist() == [3, 127]


def test_unbounded_projects_what_its_type_cannot_hold() -> None:
    spec = Unbounded((4,), dtype=torch.int8)
    assert spec.project(torch.tensor([-INF, 1.6, NAN, 1e9])).tolist() == [-128, 2, 0, 127]
    assert spec.project(torch.tensor([-1000, 1, 2, 1000])).tolist() == [-128, 1, 2, 127]


def test_an_unbounded_of_whole_floats() -> None:
    spec = Unbounded((4,), dtype=torch.float32, domain="discrete")
    assert type(spec) is UnboundedDiscrete
    assert spec == UnboundedDiscrete((4,), dtype=torch.float32)
    assert not spec.is_in(torch.tensor([0.5, 1, 2, 3]))
    assert spec.project(torch.tensor([0.7, NAN, -2, INF])).tolist()[:3] == [1, 0, -2]
    assert spec.is_in(spec.rand((50,)))
    assert spec.to(torch.float64) == Unbounded((4,), dtype=torch.float64, domain="discrete")
    assert type(Unbounded((1,), domain="continuous")) is UnboundedContinuous


def test_bounds_edited_in_place_are_seen_by_the_next_draw() -> None:
    spec = Bounded(0, 1, (2,))
    spec.rand()
    spec.space.low[0], spec.space.high[0] = -INF, INF
    assert spec.is_in(spec.rand((100,)))
    stacked: Any = torch.stack([Bounded(0, 1, ()), Bounded(0, INF, ())])
    assert stacked.is_in(stacked.rand((100,)))
    spec = Bounded(0, 3, (2,), dtype=torch.int64)
    assert spec.rand((50,)).max() <= 3
    spec.low.fill_(10)
    spec.high.fill_(11)
    assert set(spec.rand((50,)).unique().tolist()) == {10, 11}


@each("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
@each("size", [(), (1,), (17,), (8, 5)])
def test_unbounded_draws_what_randn_does(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    drawn = Unbounded(size, dtype=dtype).rand(generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(1)))


@given(
    st.sampled_from([torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32]),
    st.integers(0, 100),
    st.integers(0, 27),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_integers_are_drawn_evenly_between_their_bounds(dtype: torch.dtype, low: int, more: int, alike: bool) -> None:
    least = torch.tensor([low, low if alike else 3])
    spec = Bounded(least, least + more, dtype=dtype, domain="discrete")
    drawn = spec.rand((4_000,), generator=torch.Generator().manual_seed(low))
    assert drawn.dtype is dtype
    for column in (drawn.long() - least).T:
        counts = column.bincount(minlength=more + 1)
        assert len(counts) == more + 1
        assert (counts - 4_000 / (more + 1)).abs().max() < 6 * (4_000 / (more + 1)) ** 0.5


@each("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@each("shape", [(), (3,), (0,), (5, 7), (1000, 3)])
def test_unbounded_integers_have_all_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = Unbounded(shape, dtype=dtype).rand(generator=torch.Generator().manual_seed(0))
    assert (drawn.dtype, drawn.shape) == (dtype, shape)
    if drawn.numel() == 3000:
        bits = drawn.long().unsqueeze(-1) >> torch.arange(1 if dtype is torch.bool else 8 * dtype.itemsize) & 1
        assert (bits.double().mean((0, 1)) - 0.5).abs().max() < 0.05


@each("dtype", [torch.float16, torch.float32, torch.float64])
@each("side", [1, -1])
def test_one_open_side_draws_exponentially_from_the_other(dtype: torch.dtype, side: int) -> None:
    low, high = (3.0, INF) if side > 0 else (-INF, 3.0)
    spec = Bounded(low, high, (2,), dtype=dtype)
    drawn = spec.rand((20_000,), generator=torch.Generator().manual_seed(0))
    assert spec.is_in(drawn)
    distance = (drawn.double() - 3) * side
    assert (distance.mean(0) - 1).abs().max() < 0.05
    assert (distance.var(0) - 1).abs().max() < 0.1


def test_bounds_are_assigned_through_the_box() -> None:
    spec = Bounded(0, 1, (3,))
    box = spec.space
    box.high = torch.full((3,), 5.0)
    box.low += 2
    assert (spec.low.tolist(), spec.high.tolist(), spec.is_in(torch.full((3,), 4.0))) == ([2.0] * 3, [5.0] * 3, True)
    spec.space = ContinuousBox(torch.full((3,), 2.0), torch.full((3,), 3.0))
    assert (spec.low.tolist(), spec.project(torch.zeros(3)).tolist()) == ([2, 2, 2], [2, 2, 2])
    assert spec == Bounded(2, 3, (3,))
    spec.space.high += 1
    assert spec == Bounded(2, 4, (3,))


def test_bounds_and_shape_are_assigned_one_after_the_other() -> None:
    spec = Bounded(torch.tensor([0.0, 1.0]), 5, (2,))
    box = spec.space
    box.low, box.high = torch.cat([box.low] * 2), torch.cat([box.high] * 2)
    spec.shape = box.low.shape
    assert spec == Bounded(torch.tensor([0.0, 1.0, 0.0, 1.0]), 5, (4,))


def test_assigned_types_change_what_is_drawn() -> None:
    spec = Bounded(0, 255, (64,), dtype=torch.uint8)
    spec.dtype = torch.float32
    assert type(spec) is BoundedContinuous
    assert not bool((spec.rand() == spec.rand().round()).all())


@each(
    ("low", "high", "bounds"),
    [(-1, 1, [0, 1]), (0, 1, [0, 1]), (-1.0, 2.5, [0, 1]), (3, 9, [1, 1]), (-9, -2, [0, 0]), (-INF, INF, [0, 1])],
)
def test_bounds_of_bools_are_cut_to_false_and_true(low: float, high: float, bounds: list[int]) -> None:
    spec = Bounded(low, high, (4,), dtype=torch.bool)
    assert [spec.low.int().unique().tolist(), spec.high.int().unique().tolist()] == [[bound] for bound in bounds]
    assert (type(spec), spec.domain) == (BoundedDiscrete, "discrete")
    assert {*spec.rand((200,)).flatten().tolist()} == {*map(bool, bounds)}
    assert (bool(spec.zero().any()), bool(spec.one().all())) == (False, True)
    cast = Bounded(low, high, (4,)).to(torch.bool)
    for same in (spec.clone(), spec.expand(2, 4)[1], torch.stack([spec, spec]).unbind()[0], cast):
        assert same == spec


def test_boxes_are_moved_copied_and_unbound() -> None:
    box = ContinuousBox(torch.zeros(3), torch.ones(3))
    assert (box, box.device) == (ContinuousBox(torch.zeros(3), torch.ones(3), "cpu"), torch.device("cpu"))
    assert (box.to(torch.float64).low.dtype, box.to("meta").device.type) == (torch.float64, "meta")
    copy = box.clone()
    copy.low += 0.5
    assert (box.low.sum(), copy == box, [*map(float, box.unbind()[2])]) == (0, False, [0, 1])
    assert box == ContinuousBox(torch.zeros(3), torch.ones(3) + 1e-7)
    assert box != box.to(torch.float64)
    million = torch.tensor(10**6)
    assert ContinuousBox(million, million) != ContinuousBox(million, million + 1)


def test_a_box_does_not_bound_an_unbounded() -> None:
    spec = Unbounded((3,))
    spec.space = ContinuousBox(torch.zeros(3), torch.ones(3))
    assert spec.space.high.tolist() == [1, 1, 1]
    assert (spec == Unbounded((3,)), spec == Bounded(0, 1, (3,)), Bounded(0, 1, (3,)) == spec) == (True, False, False)
    assert spec.is_in(torch.full((3,), 5.0))
