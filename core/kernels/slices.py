"""The rule which starts of a slice are legal, and drawing slices from the trajectories of rings by it.

A slice of three steps in a trajectory of seven (`x` lies outside of the trajectory, and is cut off):

    steps                      0 1 2 3 4 5 6
    first start               [. . .]
    last start                        [. . .]
    first start, left=1     [x . .]
    last start, right=2                   [. x x]

`SliceRule` states the rule in numpy, for trajectories of any length and slices of all kinds. `draw_slices` states it
once more for numba, for whole slices of one lane, which are the most frequent ones: it reads no array of starts, which
would have to be made anew with each write. What draws slices asks one of these two.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from . import rows as row_kernels
from .rows import Numbers

Chances: TypeAlias = NDArray[np.float64]
Anchor: TypeAlias = Literal["any", "start", "end"]
ANCHORS: tuple[Anchor, ...] = get_args(Anchor)


class SliceRule(NamedTuple):
    """Where in a trajectory a slice of `length` steps may start.

    It may extend beyond the start of the trajectory by `left` steps and beyond the end by `right`, and is cut there;
    at least one step is inside. With `strict` the trajectory has at least the length of the slice; else a shorter one
    is taken whole. With an `anchor` only the first or the last of these starts is legal.
    """

    length: int = 1
    strict: bool = True
    left: int = 0
    right: int = 0
    anchor: Anchor = "any"

    @property
    def minimum(self) -> int:
        """The fewest steps of a trajectory."""
        return self.length if self.strict else 1

    @property
    def is_plain(self) -> bool:
        """Whether every slice has its whole length."""
        return self.strict and not self.left and not self.right

    @property
    def looks_ahead_only(self) -> bool:
        """Whether only the number of steps to the end of the trajectory matters, not the number before."""
        return self.is_plain and self.anchor == "any"

    def ends(self, size: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first and the last start in trajectories of `size` steps, counted from their first steps.

        `size` is int64 `[n]`, at least `minimum`, here and below.
        """
        inside = np.minimum(size, self.length)
        early = -np.minimum(inside - 1, self.left)
        late = size - inside + np.minimum(inside - 1, self.right)
        return late if self.anchor == "end" else early, early if self.anchor == "start" else late

    def starts(self, size: Numbers) -> Numbers:
        """Return the number of legal starts in trajectories of `size` steps."""
        if self.anchor != "any":
            return np.ones_like(size)
        if self.is_plain:
            return size - (self.length - 1)
        early, late = self.ends(size)
        return late - early + 1

    def allows(self, size: Numbers, place: Numbers) -> NDArray[np.bool_]:
        """Return whether slices may start at the `place`-th step, from 0, of trajectories of any `size`."""
        early, late = self.ends(size)
        legal: NDArray[np.bool_] = (early <= place) & (place <= late) & (size >= self.minimum)
        return legal

    def slices(self, first: Numbers, size: Numbers, number: Numbers) -> tuple[Numbers, Numbers | None]:
        """Return the first steps, and the numbers of steps, of the slices at the `number`-th legal starts, from 0.

        The trajectories have `size` steps, from `first` on. None, for the numbers of steps, if all slices are whole.
        """
        if self.is_plain:
            return first + (size - self.length if self.anchor == "end" else number), None
        start = first + self.ends(size)[0] + number
        stop = np.minimum(start + np.minimum(size, self.length), first + size)
        start = np.maximum(start, first)
        return start, stop - start


def scaled(chances: Chances, sizes: Numbers | int) -> Numbers:
    """Scale fractions in [0, 1) to integers from 0 to `sizes - 1`."""
    # The largest fraction below 1 is 1 - 2^-53: the product with a size of up to 2^53 is never rounded up to that.
    return (chances * sizes).astype(np.int64)


class SliceTable:
    """The trajectories of a ring that whole slices are drawn from, each long enough for one.

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

    def draw(self, chances: Chances, rule: SliceRule) -> Numbers:
        """Draw slices by a rule that `is_plain`, int64 `[n]`, with two of the chances for each: see `SliceTables`."""
        if not row_kernels.warm(importing=False):
            return self.draw_plainly(chances, rule).reshape(-1)
        return _drawn(chances, _ALONE, np.array([len(chances) // 2], np.int64), self.place, rule)

    def draw_plainly(self, chances: Chances, rule: SliceRule) -> Numbers:
        """Draw slices with numpy, int64 `[slices, length]`."""
        chances, places = np.split(chances, 2)
        if self.sums is not None:
            mass = scaled(chances, self.starts) + self.before
            chosen = np.searchsorted(self.sums, mass, side="right")
            number = mass - np.where(chosen > 0, self.sums[chosen - 1], self.before)
        else:
            chosen = scaled(chances, len(self.first))
            number = scaled(places, rule.starts(self.last[chosen] - self.first[chosen] + 1))
        start, _ = rule.slices(self.first[chosen], self.last[chosen] - self.first[chosen] + 1, number)
        found: Numbers = (start[:, None] + np.arange(rule.length)) % self.rows
        return found


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

    def draw(self, chances: Chances, members: Numbers, stops: Numbers, rule: SliceRule) -> Numbers:
        """Draw whole slices, those before `stops[0]` of the ring `members[0]`, and so on: int64 `[n]`.

        A trajectory, or a start in all of them, is chosen uniformly, then a legal start in the trajectory. `rule` is
        one that `is_plain`. `chances`, float64 `[2 * stops[-1]]` in [0, 1), are those for the trajectories, then those
        for the starts, part by part.
        """
        if row_kernels.is_warm():
            return _drawn(chances, members, stops, self._places, rule)
        found = []
        for member, part in zip(members.tolist(), np.split(chances, 2 * stops[:-1]), strict=True):
            table = self._tables[member]
            assert table is not None  # it is drawn from
            found.append(table.draw_plainly(part, rule))
        return np.concatenate(found).reshape(-1)


# With numba ----------------------------------------------------------------------------------------

ints_at: Any = None
"""`addresses.ints_at`, once numba is imported: numba looks here for what `draw_slices` calls."""
_compiled: Any = None


def draw_slices(
    chances: Chances, members: Numbers, stops: Numbers, tables: Numbers, length: int, anchor: int, numbers: Numbers
) -> None:
    """Draw slices of `length` rows of several rings, those before `stops[0]` of `tables[members[0]]`, and so on.

    Numba compiles it. A table has the number of trajectories, the rows of the ring, the addresses of the first and last
    steps of the trajectories, and for slices that are drawn by their starts the number of these, the address of the
    sums of starts up to each trajectory, and what these begin with. `anchor` is 0 for any start, 1 for the first, 2 for
    the last. There are two chances for each slice: those for the trajectories of a part come before those for the
    starts.
    """
    begin, target = 0, 0
    for part in range(stops.size):
        count, table = stops[part] - begin, tables[members[part]]
        trajectories, rows, starts, sums_before = table[0], table[1], table[4], table[6]
        firsts, lasts = ints_at(table[2], trajectories), ints_at(table[3], trajectories)
        sums = ints_at(table[5], trajectories if starts else 0)
        for draw in range(2 * begin, 2 * begin + count):
            if starts:
                mass = int(chances[draw] * starts) + sums_before
                chosen = np.searchsorted(sums, mass, side="right")
                number = mass - (sums[chosen - 1] if chosen else sums_before)
            else:
                chosen = int(chances[draw] * trajectories)
                number = -1
            late = lasts[chosen] - firsts[chosen] + 1 - length  # the last start, as `SliceRule.ends` has it
            if anchor:
                number = 0 if anchor == 1 else late
            elif number < 0:
                number = int(chances[draw + count] * (late + 1))
            row = (firsts[chosen] + number) % rows
            for step in range(target, target + length):
                numbers[step] = row
                row = row + 1 if row + 1 < rows else 0
            target += length
        begin = stops[part]


def compiled_draw() -> Any:
    """Return `draw_slices` as compiled by numba, which this imports; the machine code is kept as for `compiled`."""
    global ints_at, _compiled
    if _compiled is None:
        import numba

        from . import addresses

        ints_at = addresses.ints_at
        kinds = "void(float64[::1], int64[::1], int64[::1], int64[:, ::1], int64, int64, int64[::1])"
        _compiled = numba.njit(kinds, nogil=True, cache=True)(draw_slices)
    return _compiled


def _drawn(chances: Chances, members: Numbers, stops: Numbers, places: Numbers, rule: SliceRule) -> Numbers:
    """Draw slices with the compiled loop."""
    numbers = np.empty(stops[-1] * rule.length, np.int64)
    compiled_draw()(chances, members, stops, places, rule.length, ANCHORS.index(rule.anchor), numbers)
    return numbers
