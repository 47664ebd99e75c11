"""Statistics: parts merged in any order, and moments where float64 does not hold the values, their sums or squares."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rbtool.core import stats
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.progress import Silent
from rbtool.core.stats import QUANTILE_ERROR, Moments, QuantileSketch, collect_stats, described_fields

EPISODES = [(30, "terminated"), (9, "open")]  # of `walks`
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
def test_merged_moments_equal_those_of_the_whole(block: np.ndarray, cuts: list[int]) -> None:
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


def test_deviations_keep_their_precision_beside_large_means() -> None:
    values = 1e9 + np.arange(10_000.0).reshape(-1, 1) % 7
    found = Moments(1)
    for part in np.split(values, 100):
        found.merge(Moments.of(part))
    assert found.std[0] == pytest.approx(values.std(), rel=1e-9)
    values = 2**62 + np.arange(600_000, dtype=np.int64).reshape(-1, 1) % 3
    assert Moments.of(values).std[0] == pytest.approx(math.sqrt(2 / 3), rel=1e-15)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, 1e300, 255])
def test_constant_values_have_no_deviation(value: float) -> None:
    found = Moments.of(np.full((1000, 1), value))
    found.merge(Moments.of(np.full((7, 1), value)))
    assert found.constant.tolist() == [True]
    assert found.std.tolist() == [0.0]


@settings(max_examples=150, deadline=None)
@given(VALUES, st.lists(st.integers(0, 1000), max_size=4))
def test_quantiles_are_within_their_error_and_merge_exactly(block: np.ndarray, cuts: list[int]) -> None:
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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_linear_quantiles_lie_between_two_values(values: list[float]) -> None:
    block = np.array(values)[:, None]
    sketch = QuantileSketch(1)
    sketch.update(block)
    found = sketch.quantiles(FRACTIONS, block.min(0), block.max(0), method="linear")
    error = 2 * QUANTILE_ERROR * np.abs(block).max()
    np.testing.assert_allclose(found, np.quantile(block, FRACTIONS, axis=0), rtol=0, atol=error)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float16])
def test_every_real_dtype_is_counted(dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2, (501, 1)).astype(dtype)
    sketch = QuantileSketch(1)
    sketch.update(values)
    assert sketch.quantiles([0.0, 1.0], np.zeros(1), np.ones(1)).tolist() == [[0.0], [1.0]]
    assert Moments.of(values).mean[0] == pytest.approx(values.astype(float).mean())


def test_memory_grows_only_with_the_range_of_values() -> None:
    sketch, generator = QuantileSketch(1), np.random.default_rng(0)
    for _ in range(20):
        sketch.update(generator.normal(size=(50_000, 1)))
    assert len(sketch._buckets[0]) < 12_000


# Moments where float64 does not hold the values, their sums or their squares, against exact arithmetic.

INTEGERS = [np.bool_, np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]


def merged(block: np.ndarray, cut: int) -> Moments:
    found = Moments(block.shape[1])
    for part in np.split(block, [cut % (len(block) + 1)]):
        found.merge(Moments.of(part))
    return found


def exact(column: np.ndarray) -> tuple[float, float]:
    """Mean and deviation, rounded at the very end."""
    values = [Fraction(value) for value in column.tolist()]
    mean = sum(values, Fraction()) / len(values)
    variance = sum(((value - mean) ** 2 for value in values), Fraction()) / len(values)
    scale = 2 ** (2 * 1100)
    return float(mean), float(Fraction(math.isqrt(int(variance * scale)), 2**1100))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(INTEGERS).flatmap(lambda t: npst.arrays(t, st.tuples(st.integers(1, 9), st.integers(1, 2)))),
    st.integers(0, 9),
)
def test_moments_of_integers_are_exact(block: np.ndarray, cut: int) -> None:
    found = merged(block, cut)
    for dimension in range(block.shape[1]):
        column = block[:, dimension]
        mean, deviation = exact(column)
        assert found.mean[dimension] == mean
        assert found.std[dimension] == pytest.approx(deviation, rel=1e-15, abs=0)
        low, high = found.lowest[dimension], found.highest[dimension]
        assert (type(low), low, high) == (int, int(column.min()), int(column.max()))
        assert found.constant[dimension] == (column.min() == column.max())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FLOATS).flatmap(
        lambda t: npst.arrays(t, (6, 1), elements=st.floats(
            width=np.dtype(t).itemsize * 8, allow_nan=False, allow_infinity=False, allow_subnormal=False
        ))
    ),
    st.integers(-1000, 900),
    st.integers(0, 6),
)  # fmt: skip
def test_floats_of_any_size_keep_mean_and_deviation(block: np.ndarray, power: int, cut: int) -> None:
    values = np.ldexp(block.astype(np.float64) / max(1.0, float(np.abs(block).max())), power)
    found, (mean, deviation), size = merged(values, cut), exact(values[:, 0]), float(np.abs(values).max())
    assert found.mean[0] == pytest.approx(mean, rel=0, abs=1e-14 * size)
    assert found.std[0] == pytest.approx(deviation, rel=1e-6, abs=1e-13 * size)
    assert (found.lowest, found.highest) == ([values.min()], [values.max()])


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [1e300, 3e300, 2e300], [1e-300, 3e-300], [0.0, 1e-300]])
@pytest.mark.parametrize("cut", [0, 1])
def test_extreme_floats_neither_overflow_nor_vanish(values: list[float], cut: int) -> None:
    found, (mean, deviation) = merged(np.array(values).reshape(-1, 1), cut), exact(np.array(values))
    assert found.mean[0] == pytest.approx(mean, rel=1e-14, abs=0)
    assert found.std[0] == pytest.approx(deviation, rel=1e-14, abs=0)


def test_moments_of_integers_and_floats_are_merged() -> None:
    found = merged(np.array([[2.0], [np.nan], [4.0]]), 1)
    found.merge(Moments.of(np.array([[1], [9]])))
    assert (found.count.tolist(), found.nan.tolist(), found.mean[0]) == ([4], [1], 4.0)
    assert found.std[0] == pytest.approx(np.std([2, 4, 1, 9]))
    assert (found.lowest, found.highest) == ([1], [9])


def test_the_leaves_of_a_dataset_are_read_once_and_described(walks: Path, heard: Any) -> None:
    with TedReader(walks) as reader:
        fields = described_fields(reader.fields)
        found = collect_stats(reader, fields, (0.5,), heard)
        rows = [reader.read(field.key, 0, 39).reshape(39, -1) for field in fields]
    names = {".".join(field.key) for field in fields}
    assert names == {"action", "info.success", "observation", "next.reward"} | {
        f"next.{flag}" for flag in ("done", "terminated", "truncated")
    }
    for field, values in zip(found, rows, strict=True):
        assert (field.count, field.pooled) == ((39,) * values.shape[1], False)
        assert field.mean == pytest.approx(values.mean(0))
        assert (field.min, field.max) == (tuple(values.min(0)), tuple(values.max(0)))
    size = sum(values.nbytes for values in rows)
    assert [(total, unit) for _, total, unit in heard.started] == [(size, "bytes")]
    assert sum(heard.advances) == size


@pytest.mark.parametrize(("widest", "count"), [(3, (39, 39, 39)), (2, (117,))])
def test_wide_rows_are_pooled(walks: Path, monkeypatch: pytest.MonkeyPatch, widest: int, count: tuple) -> None:
    monkeypatch.setattr(stats, "_WIDEST", widest)
    with TedReader(walks) as reader:
        fields = [field for field in reader.fields if field.key == ("observation",)]
        (field,) = collect_stats(reader, fields, (0.5,), Silent())
    assert (field.pooled, field.count) == (len(count) == 1, count)
