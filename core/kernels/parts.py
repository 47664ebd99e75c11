"""Rows of several tables with the same columns, in one go: which are drawn, and their gathering.

The compiled loops are used once `warm` has imported numba, which takes half a second; results are the same without.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from .rows import Numbers, compiled_loops

_loops: ModuleType | None = None


def warm() -> bool:
    """Import the compiled loops; return whether there are any."""
    global _loops
    _loops = compiled_loops()
    return _loops is not None


def scaled_parts(chances: NDArray[np.float64], stops: Numbers, sizes: Numbers) -> Numbers:
    """Scale fractions in [0, 1) to integers below `sizes[0]`, those before `stops[0]`, and so on; int64 `[n]`."""
    if _loops is None:
        return (chances * repeated_parts(sizes, stops)).astype(np.int64)
    numbers = np.empty(len(chances), np.int64)
    _loops.scale_parts(chances, stops, sizes, numbers)
    return numbers


def repeated_parts(values: Numbers, stops: Numbers) -> Numbers:
    """Repeat `values[0]` before `stops[0]`, and so on: int64 `[stops[-1]]`."""
    if _loops is None:
        return np.repeat(values, np.diff(stops, prepend=0))
    found = np.empty(stops[-1], np.int64)
    _loops.repeat_parts(values, stops, found)
    return found


def gather_parts(
    places: Numbers,
    widths: Numbers,
    targets: Sequence[int],
    numbers: Numbers,
    members: Numbers,
    stops: Numbers,
    rows: Numbers,
) -> bool:
    """Copy rows of several tables to the addresses `targets`, one column each; False where that cannot be done.

    The numbers before `stops[0]` are of the table `members[0]`, with `rows[0]` rows of `widths` bytes at the addresses
    `places[members[0]]`, and so on. False without compiled loops, and if a row is missing.
    """
    if _loops is None:
        return False
    ends = np.array(targets, np.int64)
    beyond: int = _loops.gather_parts(places, widths, ends, np.ascontiguousarray(numbers), members, stops, rows)
    return beyond < 0
