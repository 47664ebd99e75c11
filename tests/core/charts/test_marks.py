"""What charts show: bins equal to numpy's, descriptions, and numbers that cannot be drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rbtool.core.charts.figure import (
    Bars,
    ChartLabels,
    Heatmap,
    Histogram,
    Lines,
    Series,
    description,
    histogram_of,
    reduced,
)
from rbtool.core.errors import UsageError

LABELS = ChartLabels(title="Return", x="return", y="episodes")


def test_bins_are_those_of_numpy_or_one_for_each_number() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    chart = histogram_of(values, LABELS, bins=15)
    counts, edges = np.histogram(values, bins=15)
    assert np.array_equal(chart.counts, counts)
    assert np.array_equal(chart.edges, edges)
    chart = histogram_of(np.array([3, 5, 5, 4, 5], np.int32), LABELS)
    assert (chart.counts.tolist(), chart.edges.tolist()) == ([1, 1, 3], [2.5, 3.5, 4.5, 5.5])
    chart = histogram_of(np.full(7, 2.5), LABELS)
    assert (chart.counts.tolist(), chart.edges.tolist()) == ([7], [2, 3])
    assert histogram_of(np.array([0.3, 0.1 + 0.2, 0.3]), LABELS).counts.sum() == 3
    assert histogram_of(np.array([np.nan, 1, np.inf, 2, -np.inf]), LABELS).counts.sum() == 2
    assert len(histogram_of(np.array([np.nan, np.inf]), LABELS).counts) == 0


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64, np.uint64, np.float32])
def test_values_of_every_kind_are_all_counted(kind: type) -> None:
    assert histogram_of(np.array([[0, 1], [1, 1]], kind), LABELS).counts.sum() == 4


@given(arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_every_finite_value_is_counted_whatever_its_size(values: np.ndarray) -> None:
    chart = histogram_of(values, LABELS)
    assert chart.counts.sum() == len(values)
    assert np.isfinite(chart.edges).all()


def test_a_description_has_the_numbers() -> None:
    assert description(Histogram(np.array([1, 3]), np.array([0, 1, 2]), LABELS)) == (
        "4 values in 2 bins from 0 to 2; most, 3, are from 1 to 2"
    )
    line = Series("reward", np.arange(4), np.array([1, np.nan, -2.5, np.inf]))
    assert description(Lines([line], LABELS)) == "reward: 2 values from -2.5 to 1, 2 not finite"
    assert description(Bars(["a", "b"], np.array([1, np.nan]), LABELS)) == "a: 1; b: NaN"
    assert description(Heatmap(np.eye(2), "ab", "cd", LABELS)) == "2 rows by 2 columns; 4 values from 0 to 1"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Series("a", np.arange(3), np.arange(4)),
        lambda: Histogram(np.ones(2), np.arange(2), LABELS),
        lambda: Histogram(np.ones(2), np.array([0, np.nan, 1]), LABELS),
        lambda: Bars(["a"], np.ones(2), LABELS),
        lambda: Heatmap(np.ones((2, 2)), "ab", "c", LABELS),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(make) -> None:
    with pytest.raises(UsageError):
        make()


@settings(max_examples=60)
@given(arrays.arrays(np.float64, st.integers(0, 400), elements=st.floats(width=32)), st.integers(1, 20))
def test_a_reduced_line_keeps_the_extremes_and_gaps_of_each_column(values: np.ndarray, columns: int) -> None:
    whole = Series("a", np.arange(len(values)), values)
    part = reduced(whole, columns)
    assert len(part.x) <= max(5 * columns, 4 * columns)
    assert np.array_equal(part.y, values[part.x.astype(int)], equal_nan=True)
    if len(values) <= 4 * columns:
        assert len(part.x) == len(values)
        return
    column = np.minimum(np.arange(len(values)) / (len(values) - 1) * columns, columns - 1).astype(int)
    for number in range(columns):
        every, kept = values[column == number], part.y[column[part.x.astype(int)] == number]
        assert np.isfinite(every).all() == np.isfinite(kept).all()
        for extreme in (np.min, np.max):
            if (finite := every[np.isfinite(every)]).size:
                assert extreme(kept[np.isfinite(kept)]) == extreme(finite)


def test_spikes_are_kept_and_lines_at_one_place_reduced() -> None:
    values = np.zeros(1_000_000)
    values[123_456] = 7
    part = reduced(Series("a", np.arange(len(values)), values), 80)
    assert (part.y.max(), part.x[part.y.argmax()]) == (7, 123_456)
    part = reduced(Series("a", np.zeros(50), np.arange(50)), 3)
    assert (part.y.min(), part.y.max()) == (0, 49)
