"""Loops over the rows of several columns at once; importing this imports numba, so do it where there is much to do.

The machine code is kept in files, and loaded from there by the next process: in the folder of this module if it can be
written, else in the user's cache folder; `NUMBA_CACHE_DIR` in the environment overrides both.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .addresses import BLOCK, ask_for, copy_bytes, copy_row, fence, stream_block

# What is known to come is asked for this many rows ahead: enough to have as many reads under way as the processor can,
# few enough to be still there when their turn comes. The processor follows wide rows by itself after the first lines.
_AHEAD = 16
_REACH = 8 * BLOCK
# Where so many rows on the average follow one another, as in slices of trajectories, they are copied together.
_SHORT = 4
# Runs of this many bytes and more go past the caches: nobody reads them soon, and their places need not be read first.
_STREAMED = 8192


@numba.njit(inline="always")
def _find_runs(numbers: NDArray[np.int64], rows: int, stops: NDArray[np.int64]) -> int:
    """Note where stretches of rows that follow one another stop; return how many there are, or -1 if there is none."""
    found = 0
    for number in range(1, numbers.size + 1):
        if number == numbers.size or numbers[number] != numbers[number - 1] + 1:
            if found == stops.size:
                return -1
            first = numbers[stops[found - 1] if found else 0]
            if first < 0 or numbers[number - 1] >= rows:
                return -1
            stops[found] = number
            found += 1
    return found


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64)", nogil=True, cache=True)
def gather_rows(
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
    targets: NDArray[np.int64],
    numbers: NDArray[np.int64],
    rows: int,
) -> int:
    """Copy the rows `numbers` of every column, one below the other, to the addresses `targets`.

    Columns lie at the addresses `places` and have `widths` bytes a row. Negative numbers count from the end of the
    first `rows` rows. Returns -1, or where in `numbers` there is one of a row beyond them: then not all is copied.
    """
    count = numbers.size
    stops = np.empty(count // _SHORT, np.int64)
    runs = _find_runs(numbers, rows, stops) if stops.size else -1
    for column in range(places.size if runs > 0 else 0):
        place, width, target = places[column], widths[column], targets[column]
        begin = 0
        for run in range(runs):
            size = (stops[run] - begin) * width
            if run + 1 < runs:
                ask_for(place + numbers[stops[run]] * width, width, _REACH)
            copy_bytes(target, place + numbers[begin] * width, size)
            target += size
            begin = stops[run]
    if runs > 0:
        return -1
    for column in range(places.size):
        place, width, target = places[column], widths[column], targets[column]
        for number in range(count):
            coming = number + _AHEAD
            if coming < count:
                ask_for(place + numbers[coming] * width, width, _REACH)
            elif column + 1 < places.size and coming - count < count:
                following = widths[column + 1]
                ask_for(places[column + 1] + numbers[coming - count] * following, following, _REACH)
            row = numbers[number]
            if row < 0:
                row += rows
            if row < 0 or row >= rows:
                return number
            source = place + row * width
            copy_row(target, source, width)
            target += width
    return -1


@numba.njit("void(int64[::1], int64[::1], int64[::1], int64, int64)", nogil=True, cache=True)
def copy_runs(
    places: NDArray[np.int64], widths: NDArray[np.int64], sources: NDArray[np.int64], start: int, count: int
) -> None:
    """Copy `count` rows of every column, which lie together at the addresses `sources`, to the rows from `start` on."""
    for column in range(places.size):
        size = widths[column] * count
        target, source = places[column] + widths[column] * start, sources[column]
        if size >= _STREAMED:
            head = -target & (BLOCK - 1)
            copy_bytes(target, source, head)
            stop = target + size
            target += head
            source += head
            while target + BLOCK <= stop:
                stream_block(target, source)
                target += BLOCK
                source += BLOCK
            size = stop - target
        copy_bytes(target, source, size)
    fence()  # streamed or not: later writes announce the rows to other threads
