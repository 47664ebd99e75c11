"""What numpy says of the rows of a dataset: every figure of a report, computed in the plainest way."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from rbtool.core.format.contracts import StepReader
from rbtool.core.report.figures import BINS, FRACTIONS, MOST_VALUES, Distribution, FieldFigures, Figures
from rbtool.core.stats import QUANTILE_ERROR
from rbtool.core.ted.schema import as_numbers

Array = np.ndarray[Any, Any]


def columns_of(reader: StepReader, figures: FieldFigures) -> Array:
    """The columns that are described: `[rows, width]`, or all numbers in one."""
    field = figures.field
    rows = as_numbers(reader.read(field.key, 0, reader.manifest.steps), field.dtype)
    return rows.reshape(-1, 1) if figures.pooled else rows.reshape(len(rows), math.prod(field.shape))


def require_numpys(found: Distribution, values: Array) -> None:
    """Compare a distribution with what numpy computes of all values at once."""
    finite = values[np.isfinite(values)]
    numbers = finite.astype(np.float64)
    assert (found.count, found.nan, found.infinite) == (len(finite), np.isnan(values).sum(), np.isinf(values).sum())
    if not len(finite):
        assert (found.mean, found.std, found.min, found.max, found.histogram) == (None,) * 5
        return
    assert (found.min, found.max) == (finite.min().item(), finite.max().item())
    assert found.constant == (len(np.unique(finite)) == 1)
    np.testing.assert_allclose([found.mean, found.std], [numbers.mean(), numbers.std()], rtol=1e-9, atol=1e-12)
    expected = np.quantile(numbers, FRACTIONS, method="linear" if found.exact else "lower")
    np.testing.assert_allclose(found.quantiles, expected, rtol=1e-15 if found.exact else QUANTILE_ERROR)
    assert found.histogram is not None
    ends = float(finite.min()), float(finite.max())
    assert (found.histogram.low, found.histogram.high, sum(found.histogram.counts)) == (*ends, len(finite))
    if ends[1] - ends[0] > 1e-10 * max(map(abs, ends)):  # numpy makes no 40 bins of less
        assert found.histogram.counts == tuple(np.histogram(numbers, BINS, ends)[0].tolist())
    unique, counts = np.unique(finite, return_counts=True)
    few = finite.dtype.kind in "biu" and len(unique) <= MOST_VALUES
    assert found.values == (tuple(zip(unique.tolist(), counts.tolist(), strict=True)) if few else ())


def correlation_of(values: Array, starts: Array, lengths: Array, returns: Array) -> float | None:
    """Numpy's correlation of the mean of each episode with its return; None where it is not defined."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        parts = [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        means = np.array([part.mean(dtype=np.float64) for part in parts])
        there = np.isfinite(means) & np.isfinite(returns)
        means, returns = means[there], returns[there]
        if any(len(one) < 2 or not np.ptp(one) > 1e-9 * np.abs(one).max() for one in (means, returns)):
            return None
        found = float(np.corrcoef(means, returns)[0, 1])
        return found if np.isfinite(found) else None


def following_of(reader: StepReader, key: tuple[str, ...]) -> tuple[int, int]:
    """How many steps are before the last of their episode, and how many of them lead to the row after them."""
    table, steps = reader.episodes, reader.manifest.steps
    root, after = (reader.read(one, 0, steps) for one in (key, ("next", *key)))
    inside = np.ones(steps, bool)
    inside[table.start + table.length - 1] = False
    rows = np.flatnonzero(inside)
    return len(rows), sum(after[row].tobytes() == root[row + 1].tobytes() for row in rows.tolist())


def require_all(reader: StepReader, figures: Figures) -> None:
    """Compare all figures of a dataset."""
    assert figures.episodes is not None
    table = figures.episodes.table
    for field in figures.fields:
        columns = columns_of(reader, field)
        assert len(field.columns) == columns.shape[1]
        for place, found in enumerate(field.columns):
            require_numpys(found, columns[:, place])
        rows = columns.reshape(reader.manifest.steps, -1) if field.pooled else columns
        for place, known in enumerate(field.correlations):
            values = rows if field.pooled else rows[:, place]
            require_close(known, correlation_of(values, table.start, table.length, table.total_reward))
    for followed in figures.followed:
        assert (followed.steps, followed.following) == following_of(reader, followed.key)
    require_numpys(figures.episodes.length, table.length)


def require_close(found: float | None, expected: float | None) -> None:
    """Compare two correlations; where all but rounding is the same in all episodes, numpy's means nothing."""
    if expected is not None:
        assert found is not None
        assert abs(found - expected) < 1e-6
