"""Moments where float64 does not hold the values, their sums or their squares, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rbtool.core.stats import Moments

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
def test_whole_numbers_are_exact(block: np.ndarray, cut: int) -> None:
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


def test_a_small_deviation_of_huge_whole_numbers_over_many_rows() -> None:
    values = 2**62 + np.arange(600_000, dtype=np.int64).reshape(-1, 1) % 3
    assert Moments.of(values).std[0] == pytest.approx(math.sqrt(2 / 3), rel=1e-15)


def test_parts_of_whole_numbers_and_of_floats_are_joined() -> None:
    found = merged(np.array([[2.0], [np.nan], [4.0]]), 1)
    found.merge(Moments.of(np.array([[1], [9]])))
    assert (found.count.tolist(), found.nan.tolist(), found.mean[0]) == ([4], [1], 4.0)
    assert found.std[0] == pytest.approx(np.std([2, 4, 1, 9]))
    assert (found.lowest, found.highest) == ([1], [9])
