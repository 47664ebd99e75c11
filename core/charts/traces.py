"""Lines of fewer points that look the same: none of a line's spikes and gaps is lost."""

from __future__ import annotations

import numpy as np

from .marks import Array, Series


def reduced(series: Series, columns: int) -> Series:
    """Keep of each of `columns` equal parts of the x axis the first, the last, the lowest and the highest point.

    Where a part is one pixel wide, the line is drawn as with all points (M4, Jugel et al., 2014, "M4: A
    Visualization-Oriented Time Series Data Aggregation"). The first point that is not finite is kept, too: the line
    has its gap there. A line of no more than four points a part is returned as it is.
    """
    known = np.isfinite(series.x)
    x, y = series.x[known], series.y[known]
    if len(x) <= 4 * columns:
        return series if known.all() else Series(series.name, x, y)
    span = x[-1] / 2 - x[0] / 2  # halves: the range of float64 is twice what float64 holds
    part = np.zeros(len(x), np.int64) if span <= 0 else ((x / 2 - x[0] / 2) / span * columns).astype(np.int64)
    part = np.minimum(part, columns - 1)
    starts = np.flatnonzero(np.r_[True, part[1:] != part[:-1]])
    kept = np.unique(np.concatenate([starts, np.r_[starts[1:], len(x)] - 1, *_extremes(y, starts)]))
    return Series(series.name, x[kept], y[kept])


def _extremes(y: Array, starts: Array) -> list[Array]:
    """Return the places of the first lowest, highest and not finite value of each part, where it has one."""
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
