"""Distributions of the columns of a dataset: moments, quantiles and histograms, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..format.contracts import Array
from ..stats import Moments, QuantileSketch

FRACTIONS = (0.01, 0.25, 0.5, 0.75, 0.99)
"""The quantiles that are shown."""
BINS = 40
MOST_VALUES = 64
"""Whole numbers with no more different values than these are counted one by one."""
_HELD_BYTES = 160 << 20
"""A field of no more bytes is kept in memory, which gives exact quantiles."""
_SMALL, _LARGE = 1e-300, 1e300

Blocks: TypeAlias = Callable[[], Iterator[Array]]
"""Reads all rows of a field as blocks `[n, …]` of numbers, at least one row each; called once for each pass."""
Limit: TypeAlias = tuple[float, float] | None
"""The bounds of the recorded space, where it has any."""


@dataclass(frozen=True, slots=True)
class ColumnHistogram:
    """Counts of finite values in equal bins from `low` to `high`, as `numpy.histogram` gives them for that range.

    Both ends belong to it. `below` and `above` count the finite values outside.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One dimension of a field, or all of its numbers together.

    Figures are of the finite values, `count` of them; `nan` and `infinite` count the others. `std` divides by the
    count. `quantiles` are those of `numpy.quantile` at `FRACTIONS`, computed in float64; where `exact` is false,
    estimates of the values at those ranks (rounded down) whose relative error is at most `QUANTILE_ERROR`. `values`
    counts each value of whole numbers of which there are few, else it is empty. `bounded` is the histogram between the
    bounds of the recorded space, where that has any; `at_low` and `at_high` count the values on those bounds. None and
    empty where there is no finite value.
    """

    count: int
    nan: int
    infinite: int
    mean: float | None
    std: float | None
    min: int | float | None
    max: int | float | None
    quantiles: tuple[float | None, ...]
    exact: bool
    histogram: ColumnHistogram | None
    values: tuple[tuple[int, int], ...]
    bounded: ColumnHistogram | None
    at_low: int
    at_high: int

    @property
    def constant(self) -> bool:
        """Whether all finite values are one and the same."""
        return self.count > 0 and self.min == self.max


def describe_columns(
    blocks: Blocks, rows: int, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]
) -> list[Distribution]:
    """Describe the columns of `rows` rows: blocks are reshaped to `[…, width]`.

    `limits` has one entry for each column. `seen` gets every block once, in order.
    """
    first = next(blocks(), None)
    if first is None:
        return [_columns_of(Moments(width), column, _Column(Moments(width), column, limits[column]), (), True)
                for column in range(width)]  # fmt: skip
    if first.dtype.itemsize == 1:
        return _by_bytes(blocks, width, limits, seen)
    values = rows * (first[:1].size // width)
    if values * width * first.itemsize <= _HELD_BYTES:
        return _held(blocks, values, width, limits, seen)
    return _streamed(blocks, width, limits, seen)


def _by_bytes(blocks: Blocks, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]) -> list[Distribution]:
    """Count each of the 256 possible values, from which every figure of bytes and truth values follows."""
    totals, signed = np.zeros((width, 256), np.int64), False
    for block in blocks():
        seen(block)
        signed = block.dtype == np.int8
        table = block.reshape(-1, width).view(np.uint8)
        for column in range(width):
            totals[column] += np.bincount(table[:, column], minlength=256)
    numbers = np.arange(256)
    if signed:
        totals, numbers = np.roll(totals, 128, axis=1), numbers - 128  # -128 has the bits of 128
    return [_of_counts(numbers[row > 0], row[row > 0], limit) for row, limit in zip(totals, limits, strict=True)]


def _of_counts(values: Array, counts: Array, limit: Limit) -> Distribution:
    """Describe whole numbers, ascending, of which each comes so often."""
    moments = Moments.of(values[:, None])
    column = _Column(moments, 0, limit)
    column.update(values, counts)
    total = int(counts.sum())
    whole = list(zip(values.tolist(), counts.tolist(), strict=True))
    added, squares = (sum(count * value**power for value, count in whole) for power in (1, 2))
    return Distribution(
        count=total, nan=0, infinite=0, mean=added / total, std=math.sqrt(total * squares - added**2) / total,
        min=whole[0][0], max=whole[-1][0], quantiles=_quantiles_of_counts(values, counts), exact=True,
        **column.entries(),
    )  # fmt: skip


def _quantiles_of_counts(values: Array, counts: Array) -> tuple[float, ...]:
    reached, last = np.cumsum(counts), int(counts.sum()) - 1
    found = []
    for fraction in FRACTIONS:
        rank = fraction * last
        below = math.floor(rank)
        low, high = values[np.searchsorted(reached, (below, min(below + 1, last)), side="right")].tolist()
        found.append(float(low + (high - low) * (rank - below)))
    return tuple(found)


def _held(
    blocks: Blocks, rows: int, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]
) -> list[Distribution]:
    """Keep all values in memory, one column after the other."""
    moments, held, start = Moments(width), np.empty((width, 0)), 0
    for block in blocks():
        seen(block)
        table = block.reshape(-1, width)
        if not start:
            held = np.empty((width, rows), block.dtype)
        held[:, start : start + len(table)] = table.T
        start += len(table)
        moments.merge(Moments.of(table))
    found = []
    for place, limit in enumerate(limits):
        values, column = held[place], _Column(moments, place, limit)
        if moments.nan[place] or moments.infinite[place]:
            values = values[np.isfinite(values)]
        column.update(values)
        quantiles = np.quantile(values.astype(np.float64), FRACTIONS).tolist() if len(values) else ()
        found.append(_columns_of(moments, place, column, quantiles, exact=True))
    return found


def _streamed(blocks: Blocks, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]) -> list[Distribution]:
    """Read everything twice: for moments and estimates of quantiles, then for histograms."""
    moments, sketch = Moments(width), QuantileSketch(width)
    for block in blocks():
        seen(block)
        table = block.reshape(-1, width)
        moments.merge(Moments.of(table))
        sketch.update(table)
    columns = [_Column(moments, place, limit) for place, limit in enumerate(limits)]
    for block in blocks():
        table = block.reshape(-1, width)
        for place, column in enumerate(columns):
            values = table[:, place]
            column.update(values[np.isfinite(values)])
    quantiles = sketch.quantiles(FRACTIONS, moments.min, moments.max)
    return [
        _columns_of(moments, place, column, quantiles[:, place].tolist(), exact=False)
        for place, column in enumerate(columns)
    ]


def _columns_of(moments: Moments, place: int, column: _Column, quantiles: Sequence[float], exact: bool) -> Distribution:
    count = int(moments.count[place])
    return Distribution(
        count=count, nan=int(moments.nan[place]), infinite=int(moments.infinite[place]),
        mean=float(moments.mean[place]) if count else None, std=float(moments.std[place]) if count else None,
        min=moments.lowest[place], max=moments.highest[place],
        quantiles=tuple(quantiles) if count else (None,) * len(FRACTIONS), exact=exact, **column.entries(),
    )  # fmt: skip


class _Column:
    """Histograms and counts of one column, of which the moments are known."""

    def __init__(self, moments: Moments, place: int, limit: Limit) -> None:
        low, high = moments.lowest[place], moments.highest[place]
        self._inner = None if low is None or high is None else _Bins(float(low), float(high))
        self._bounded = None if limit is None or not np.isfinite(limit).all() else _Bins(*limit)
        self._limit = limit
        self._at = [0, 0]
        self._values: dict[int, int] | None = {}

    def update(self, values: Array, counts: Array | None = None) -> None:
        """Take the next finite values `[n]`, each of which comes once, or so often."""
        if not len(values):
            return
        if values.dtype.kind == "f":
            self._values = None
        numbers = values.astype(np.float64)
        for bins in (self._inner, self._bounded):
            if bins is not None:
                bins.update(numbers, counts)
        for side, bound in enumerate(self._limit or ()):
            equal = numbers == bound
            self._at[side] += int(np.count_nonzero(equal) if counts is None else counts[equal].sum())
        self._count(values, counts)

    def _count(self, values: Array, counts: Array | None) -> None:
        if self._values is None:
            return
        if counts is None:
            values, counts = np.unique(values, return_counts=True)
        if len(values) <= MOST_VALUES:
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                self._values[int(value)] = self._values.get(int(value), 0) + count
        if len(values) > MOST_VALUES or len(self._values) > MOST_VALUES:
            self._values = None

    def entries(self) -> dict[str, Any]:
        """The entries of a `Distribution` that this has counted."""
        return {
            "histogram": None if self._inner is None else self._inner.histogram(),
            "bounded": None if self._bounded is None else self._bounded.histogram(),
            "values": tuple(sorted((self._values or {}).items())),
            "at_low": self._at[0],
            "at_high": self._at[1],
        }


class _Bins:
    """Counts values in equal bins."""

    def __init__(self, low: float, high: float) -> None:
        self._ends = low, high
        # In units of a power of two, which changes no digit, no width of a bin overflows or vanishes.
        size = max(abs(low), abs(high))
        self._down = -int(np.frexp(size)[1]) if not _SMALL < size < _LARGE else 0
        self._scaled = np.ldexp(low, self._down), np.ldexp(high, self._down)
        edges = np.linspace(*self._scaled, BINS + 1)
        self._apart = bool((edges[1:] > edges[:-1]).all())
        self._counts = np.zeros(BINS, np.int64)
        self._outside = [0, 0]

    def update(self, values: Array, counts: Array | None) -> None:
        """Count float64 values `[n]`, each once or so often."""
        low, high = self._ends
        for side, outside in enumerate((values < low, values > high)):
            self._outside[side] += int(np.count_nonzero(outside) if counts is None else counts[outside].sum())
        scaled, (low, high) = np.ldexp(values, self._down), self._scaled
        if self._apart:
            self._counts += np.histogram(scaled, BINS, (low, high), weights=counts)[0].astype(np.int64)
            return
        inside = (scaled >= low) & (scaled <= high)  # so few numbers are between the ends that edges fall together
        share = (scaled[inside] - low) / (high - low) if high > low else np.full(int(inside.sum()), 0.5)
        place = np.minimum(share * BINS, BINS - 1).astype(np.int64)
        self._counts += np.bincount(place, None if counts is None else counts[inside], BINS).astype(np.int64)

    def histogram(self) -> ColumnHistogram:
        """What was counted."""
        return ColumnHistogram(*self._ends, tuple(self._counts.tolist()), *self._outside)
