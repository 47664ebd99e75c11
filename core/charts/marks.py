"""What a chart shows: numbers and labels, independent of how they are drawn.

NaN and infinite numbers appear as gaps in a line, missing bars and empty cells. Lines with many points are reduced to
fewer that look the same (`reduced`): spikes and gaps stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..errors import UsageError
from ..progress import clean, counted

Array: TypeAlias = np.ndarray[Any, Any]

_LONGEST = 60  # most characters of a name in a description
_HUGE = 1e307
_NAMED = 12  # most series or bars that a description names


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLabels:
    """The labels of a chart: title, axes `x` and `y`, and a text for screen readers, generated if it is empty."""

    title: str
    x: str = ""
    y: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line: `x` and `y`, float64 [N], `x` in ascending order."""

    name: str
    x: Array
    y: Array

    def __post_init__(self) -> None:
        x, y = (np.asarray(values, np.float64) for values in (self.x, self.y))
        if x.ndim != 1 or x.shape != y.shape:
            raise UsageError(f"x and y of a line have the shapes {x.shape} and {y.shape}, expected [N] for both")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)


@dataclass(frozen=True, slots=True)
class Lines:
    """One line for each of `series`."""

    series: Sequence[Series]
    labels: ChartLabels


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values are in each bin: `counts` [N] between the finite `edges` [N + 1]."""

    counts: Array
    edges: Array
    labels: ChartLabels

    def __post_init__(self) -> None:
        counts, edges = np.asarray(self.counts, np.float64), np.asarray(self.edges, np.float64)
        if counts.ndim != 1 or edges.ndim != 1 or len(edges) != (len(counts) + 1 if len(counts) else len(edges)):
            raise UsageError(f"found {edges.size} edges, expected {len(counts) + 1} for {len(counts)} bins")
        if not np.isfinite(edges).all() or (edges[1:] < edges[:-1]).any() or not np.isfinite(counts).all():
            raise UsageError("expected finite edges in ascending order, and finite counts")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "edges", edges)


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar from zero to `values[i]` for each of `names`."""

    names: Sequence[str]
    values: Array
    labels: ChartLabels

    def __post_init__(self) -> None:
        values = np.asarray(self.values, np.float64)
        if values.shape != (len(self.names),):
            raise UsageError(
                f"the values have the shape {values.shape}, expected one for each of {len(self.names)} names"
            )
        object.__setattr__(self, "values", values)


@dataclass(frozen=True, slots=True)
class Heatmap:
    """`matrix` [R, C] as coloured cells; one colour for numbers above zero, another for numbers below.

    `limit` is the magnitude that gets the full colour; by default the largest in the matrix.
    """

    matrix: Array
    row_names: Sequence[str]
    column_names: Sequence[str]
    labels: ChartLabels
    limit: float | None = None

    def __post_init__(self) -> None:
        matrix = np.asarray(self.matrix, np.float64)
        if matrix.shape != (len(self.row_names), len(self.column_names)):
            names = f"{len(self.row_names)} by {len(self.column_names)}"
            raise UsageError(f"the names are for {names} cells, but the matrix has the shape {matrix.shape}")
        object.__setattr__(self, "matrix", matrix)


Chart: TypeAlias = Lines | Histogram | Bars | Heatmap


def histogram_of(values: Array, labels: ChartLabels, bins: int = 20) -> Histogram:
    """Count the finite values of an array of any shape in equal bins, as `np.histogram` does.

    Whole numbers in a small range get one bin each, centred on the number. If all values are equal, there is one bin of
    width 1; without values there are no bins.
    """
    flat = np.asarray(values).reshape(-1)
    flat = flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
    finite = flat[np.isfinite(flat)]
    if not len(finite):
        return Histogram(np.zeros(0), np.zeros(0), labels)
    low, high = finite.min(), finite.max()
    if flat.dtype.kind in "iub" and int(high) - int(low) < bins:
        edges = np.arange(int(low), int(high) + 2) - 0.5
        return Histogram(np.bincount((finite - low).astype(np.int64)), edges, labels)
    if low == high:
        value = float(low)
        return Histogram(np.array([len(finite)]), np.array([value - 0.5, value + 0.5]), labels)
    # Values are scaled by a power of two, which is exact, because the range could overflow float64.
    finite = finite.astype(np.float64)
    power = 2 if max(abs(float(low)), abs(float(high))) > _HUGE else 0
    scaled = np.ldexp(finite, -power)
    try:
        counts, edges = np.histogram(scaled, bins=bins)
    except ValueError:  # fewer floats lie between the extremes than there are bins
        counts, edges = np.array([len(scaled)]), np.array([scaled.min(), scaled.max()])
    return Histogram(counts, np.ldexp(edges, power), labels)


def description(chart: Chart) -> str:
    """Describe a chart in words and numbers, for readers who cannot see it."""
    if chart.labels.description:
        return chart.labels.description
    if isinstance(chart, Histogram):
        return _of_histogram(chart)
    if isinstance(chart, Lines):
        return _listed(f"{shortened(one.name, _LONGEST)}: {_range(one.y)}" for one in chart.series)
    if isinstance(chart, Bars):
        return _listed(
            f"{shortened(name, _LONGEST)}: {shown(value)}"
            for name, value in zip(chart.names, chart.values, strict=True)
        )
    rows, columns = chart.matrix.shape
    return f"{rows} rows by {columns} columns; {_range(chart.matrix)}"


def _of_histogram(chart: Histogram) -> str:
    if not chart.counts.sum():
        return "no values"
    top = int(chart.counts.argmax())
    sums = f"{counted(int(chart.counts.sum()), 'value')} in {counted(len(chart.counts), 'bin')}"
    first, last, low, high = (shown(chart.edges[place]) for place in (0, -1, top, top + 1))
    return f"{sums} from {first} to {last}; most, {shown(chart.counts[top])}, are from {low} to {high}"


def _range(values: Array) -> str:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "no values"
    apart = values.size - finite.size
    note = f", {apart:,} not finite" if apart else ""
    return f"{counted(finite.size, 'value')} from {shown(finite.min())} to {shown(finite.max())}{note}"


def _listed(parts: Iterable[str]) -> str:
    every = list(parts)
    more = f"; and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return "; ".join(every[:_NAMED]) + more if every else "no values"


def shown(value: float) -> str:
    """Format a number to four significant digits; whole numbers in full."""
    if np.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) < 1e9 and value == round(value) else f"{value:.4g}"


def readable(text: str) -> str:
    """Escape control characters and lone surrogates, which SVG, PNG and PDF cannot hold."""
    kept = clean(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return kept.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def shortened(text: str, most: int) -> str:
    """Shorten a readable name to at most `most` characters by cutting out its middle."""
    text = readable(text)
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def reduced(series: Series, columns: int) -> Series:
    """Reduce a line to at most five points in each of `columns` equal parts of the x axis.

    Kept are the first, last, lowest and highest point of each part. If a part is one pixel wide, the line looks the
    same as with all points (Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014). The
    first point that is not finite is kept, too, so that the line keeps its gap. A line with at most four points per
    part is returned unchanged.
    """
    known = np.isfinite(series.x)
    x, y = series.x[known], series.y[known]
    if len(x) <= 4 * columns:
        return series if known.all() else Series(series.name, x, y)
    span = x[-1] / 2 - x[0] / 2  # halved, because x[-1] - x[0] could overflow
    part = np.zeros(len(x), np.int64) if span <= 0 else ((x / 2 - x[0] / 2) / span * columns).astype(np.int64)
    part = np.minimum(part, columns - 1)
    starts = np.flatnonzero(np.r_[True, part[1:] != part[:-1]])
    kept = np.unique(np.concatenate([starts, np.r_[starts[1:], len(x)] - 1, *_extremes(y, starts)]))
    return Series(series.name, x[kept], y[kept])


def _extremes(y: Array, starts: Array) -> list[Array]:
    """Return the indices of each part's first lowest, first highest and first non-finite value, if it has one."""
    finite = np.isfinite(y)
    lengths = np.diff(np.r_[starts, len(y)])
    found = []
    for reduce, other in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        best = np.repeat(reduce.reduceat(np.where(finite, y, other), starts), lengths)
        found.append(_first_of_parts(finite & (y == best), starts))
    return [*found, _first_of_parts(~finite, starts)]


def _first_of_parts(chosen: Array, starts: Array) -> Array:
    places = np.flatnonzero(chosen)
    parts = np.searchsorted(starts, places, side="right")
    first: Array = places[np.r_[True, parts[1:] != parts[:-1]]] if len(places) else places
    return first
