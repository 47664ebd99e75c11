"""Rows of several tables with the same columns, in one go: which are drawn, and their gathering.

The compiled loops are used once something has imported numba, which takes half a second; results are the same without.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from .rows import Numbers, compiled_loops

_loops: ModuleType | None = None


def warm(*, importing: bool = True) -> bool:
    """Import the compiled loops, or use only those that are already imported; return whether there are any."""
    global _loops
    if _loops is None and (importing or f"{__package__}.compiled" in sys.modules):
        _loops = compiled_loops()
    return _loops is not None


def scaled_parts(chances: NDArray[np.float64], stops: Numbers, sizes: Numbers) -> Numbers:
    """Scale fractions in [0, 1) to integers below `sizes[0]`, those before `stops[0]`, and so on; int64 `[n]`."""
    if _loops is None:
        return (chances * np.repeat(sizes, np.diff(stops, prepend=0))).astype(np.int64)
    numbers = np.empty(len(chances), np.int64)
    _loops.scale_parts(chances, stops, sizes, numbers)
    return numbers


class SliceTable:
    """The trajectories of a ring that slices are drawn from, each long enough for one.

    `first` and `last` are the absolute numbers of their steps, int64 `[trajectories]`; the row of a step is its
    number modulo `rows`. Where slices are drawn by their starts, of which there are `starts`, `sums` are the starts up
    to and with each trajectory, plus `before`. All arrays are contiguous, and kept.
    """

    __slots__ = ("before", "first", "last", "place", "rows", "starts", "sums")

    def __init__(
        self, first: Numbers, last: Numbers, rows: int, sums: Numbers | None = None, starts: int = 0, before: int = 0
    ) -> None:
        self.first, self.last, self.rows = first, last, rows
        self.sums, self.starts, self.before = sums, starts, before
        addresses = [0 if array is None else array.ctypes.data for array in (first, last, sums)]
        self.place: Numbers = np.array([[len(first), rows, *addresses[:2], starts, addresses[2], before]], np.int64)
        """What the compiled loop gets, `[1, 7]`."""

    def draw(self, chances: NDArray[np.float64], length: int, anchor: str) -> Numbers:
        """Draw slices of `length` rows, int64 `[n]`, with two of the `chances` for each: see `SliceTables.draw`."""
        if not warm(importing=False):
            return _slices_of(self, chances, length, anchor).reshape(-1)
        count = np.array([len(chances) // 2], np.int64)
        return _drawn(chances, _ALONE, count, self.place, length, anchor)


ANCHORS = ("any", "start", "end")
_PLACE = 7
_ALONE: Numbers = np.zeros(1, np.int64)


class SliceTables:
    """The trajectories of `count` rings, which slices are drawn from in one go."""

    def __init__(self, count: int) -> None:
        self._tables: list[SliceTable | None] = [None] * count
        self._places = np.zeros((count, _PLACE), np.int64)

    def put(self, number: int, table: SliceTable) -> None:
        """Take the trajectories of a ring as they are now."""
        if self._tables[number] is not table:
            self._places[number], self._tables[number] = table.place, table

    def draw(self, chances: NDArray[np.float64], members: Numbers, stops: Numbers, length: int, anchor: str) -> Numbers:
        """Draw slices of `length` rows, those before `stops[0]` of the ring `members[0]`, and so on: int64 `[n]`.

        A trajectory, or a start in all of them, is chosen uniformly, then a start in the trajectory; `anchor` is one
        of `ANCHORS`. `chances`, float64 `[2 * stops[-1]]` in [0, 1), are those for the trajectories, then those for
        the starts, part by part.
        """
        if _loops is not None:
            return _drawn(chances, members, stops, self._places, length, anchor)
        found = []
        for member, part in zip(members.tolist(), np.split(chances, 2 * stops[:-1]), strict=True):
            table = self._tables[member]
            assert table is not None  # it is drawn from
            found.append(_slices_of(table, part, length, anchor))
        return np.concatenate(found).reshape(-1)


def _drawn(
    chances: NDArray[np.float64], members: Numbers, stops: Numbers, places: Numbers, length: int, anchor: str
) -> Numbers:
    """Draw slices with the compiled loop."""
    assert _loops is not None  # the caller has asked
    numbers = np.empty(stops[-1] * length, np.int64)
    _loops.draw_slices(chances, members, stops, places, length, ANCHORS.index(anchor), numbers)
    return numbers


def _slices_of(table: SliceTable, chances: NDArray[np.float64], length: int, anchor: str) -> Numbers:
    """Draw slices of one table, int64 `[slices, length]`."""
    chances, places = np.split(chances, 2)
    if table.sums is not None:
        mass = (chances * table.starts).astype(np.int64) + table.before
        chosen = np.searchsorted(table.sums, mass, side="right")
        place = mass - np.where(chosen > 0, table.sums[chosen - 1], table.before)
    else:
        chosen = (chances * len(table.first)).astype(np.int64)
        place = (places * (table.last[chosen] - table.first[chosen] + 2 - length)).astype(np.int64)
    if anchor != "any":
        place = np.zeros_like(chosen) if anchor == "start" else table.last[chosen] - table.first[chosen] + 1 - length
    found: Numbers = ((table.first[chosen] + place)[:, None] + np.arange(length)) % table.rows
    return found


def gather_parts(
    places: Numbers,
    widths: Numbers,
    targets: Numbers,
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
    beyond: int = _loops.gather_parts(places, widths, targets, np.ascontiguousarray(numbers), members, stops, rows)
    return beyond < 0
