from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rbtool.core.stats import QUANTILE_ERROR, Moments, QuantileSketch

FRACTIONS = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
NUMBERS = st.floats(width=32, allow_subnormal=False)
VALUES = st.sampled_from([np.float32, np.float64]).flatmap(
    lambda dtype: npst.arrays(dtype, st.tuples(st.integers(1, 60), st.integers(1, 3)), elements=NUMBERS)
)


def split(block: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return np.split(block, sorted(cut % (len(block) + 1) for cut in cuts))


def finite(block: np.ndarray, dimension: int) -> np.ndarray:
    column = block[:, dimension].astype(np.float64)
    return column[np.isfinite(column)]


@settings(max_examples=150, deadline=None)
@given(VALUES, st.lists(st.integers(0, 1000), max_size=4))
def test_moments_of_parts_are_those_of_the_whole(block: np.ndarray, cuts: list[int]) -> None:
    found = Moments(block.shape[1])
    for part in split(block, cuts):
        found.merge(Moments.of(part))
    for dimension in range(block.shape[1]):
        values = finite(block, dimension)
        assert found.count[dimension] == len(values)
        assert found.nan[dimension] == np.isnan(block[:, dimension]).sum()
        assert found.infinite[dimension] == np.isinf(block[:, dimension]).sum()
        if len(values):
            size = np.abs(values).max()
            assert found.mean[dimension] == pytest.approx(values.mean(), rel=1e-9, abs=1e-12 * size)
            assert found.std[dimension] == pytest.approx(values.std(), rel=1e-6, abs=1e-7 * size)
            assert (found.min[dimension], found.max[dimension]) == (values.min(), values.max())


def test_a_large_mean_takes_no_precision_from_the_deviation() -> None:
    values = 1e9 + np.arange(10_000.0).reshape(-1, 1) % 7
    found = Moments(1)
    for part in np.split(values, 100):
        found.merge(Moments.of(part))
    assert found.std[0] == pytest.approx(values.std(), rel=1e-9)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, 1e300, 255])
def test_what_never_varies_is_constant_and_has_no_deviation(value: float) -> None:
    found = Moments.of(np.full((1000, 1), value))
    found.merge(Moments.of(np.full((7, 1), value)))
    assert found.constant.tolist() == [True]
    assert found.std.tolist() == [0.0]


@settings(max_examples=150, deadline=None)
@given(VALUES, st.lists(st.integers(0, 1000), max_size=4))
def test_quantiles_keep_their_promise_and_parts_make_no_difference(block: np.ndarray, cuts: list[int]) -> None:
    whole, parts = QuantileSketch(block.shape[1]), QuantileSketch(block.shape[1])
    whole.update(block)
    for part in split(block, cuts):
        other = QuantileSketch(block.shape[1])
        other.update(part)
        parts.merge(other)
    moments = Moments.of(block)
    found = whole.quantiles(FRACTIONS, moments.min, moments.max)
    assert np.array_equal(found, parts.quantiles(FRACTIONS, moments.min, moments.max), equal_nan=True)
    for dimension in range(block.shape[1]):
        values = np.sort(finite(block, dimension))
        for fraction, value in zip(FRACTIONS, found[:, dimension], strict=True):
            if not len(values):
                assert np.isnan(value)
                continue
            exact = values[int(fraction * (len(values) - 1))]
            error = 0.0 if fraction in (0.0, 1.0) else QUANTILE_ERROR
            assert abs(value - exact) <= error * abs(exact)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float16])
def test_any_real_type_is_counted(dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2, (501, 1)).astype(dtype)
    sketch = QuantileSketch(1)
    sketch.update(values)
    assert sketch.quantiles([0.0, 1.0], np.zeros(1), np.ones(1)).tolist() == [[0.0], [1.0]]
    assert Moments.of(values).mean[0] == pytest.approx(values.astype(float).mean())


def test_memory_grows_with_the_range_of_values_and_not_their_number() -> None:
    sketch, generator = QuantileSketch(1), np.random.default_rng(0)
    for _ in range(20):
        sketch.update(generator.normal(size=(50_000, 1)))
    assert len(sketch._buckets[0]) < 12_000
