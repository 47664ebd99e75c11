"""Which starts of a slice are legal in a trajectory, and draws of slices from the trajectories of rings.

A slice of three steps in a trajectory of seven (`x` lies outside of the trajectory and is cut off):

    steps                      0 1 2 3 4 5 6
    first start               [. . .]
    last start                        [. . .]
    first start, left=1     [x . .]
    last start, right=2                   [. x x]

A trajectory of n steps thus has `n - length + 1` starts for whole slices. It is described by the absolute numbers of
its first and last step, which never wrap; only the rows do. In a ring of 8 rows, a trajectory with steps 6 to 10 and
the slice of three steps that starts at step 7:

    step        8   9   10  …           6   7           trajectory: first 6, last 10; starts 6, 7, 8
    row         0   1   2   3   4   5   6   7           row = step % 8
    slice      [.   .]                     [.           rows 7, 0, 1

`SliceRule` defines legal starts in NumPy, for trajectories of any length and all kinds of slices. `draw_slices` repeats
the rule for numba, only for whole slices of one lane, the most frequent kind; it needs no array of all legal starts,
which every write would invalidate. All code that draws slices uses one of these two, and tests compare them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ..ted.schema import Numbers
from . import rows as row_kernels

Chances: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
Anchor: TypeAlias = Literal["any", "start", "end"]
ANCHORS: tuple[Anchor, ...] = get_args(Anchor)


class SliceRule(NamedTuple):
    """Where in a trajectory a slice may start.

    Attributes:
        length: the steps of a slice.
        minimum: the fewest steps of a trajectory from which slices are drawn. A slice of a trajectory with fewer than
            `length` steps is the whole trajectory; with `left` or `right`, it may also be a part that is no shorter
            than the shortest slice of a longer trajectory.
        left, right: by how many steps a slice may extend beyond the start and the end of the trajectory; the steps
            beyond are cut off. Less than `length`.
        anchor: whether all of these starts are legal (`"any"`), or only the first (`"start"`) or last (`"end"`) one.
    """

    length: int = 1
    minimum: int = 1
    left: int = 0
    right: int = 0
    anchor: Anchor = "any"

    @property
    def is_plain(self) -> bool:
        """Whether every slice is whole."""
        return self.minimum >= self.length and not self.left and not self.right

    @property
    def looks_ahead_only(self) -> bool:
        """Whether only the number of steps to the end of the trajectory matters, not the number of steps before."""
        return self.is_plain and self.anchor == "any"

    def ends(self, size: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first and last legal start in trajectories of `size` steps, counted from their first steps.

        Here and below, `size` is int64 `[n]`, at least `minimum`.
        """
        inside = np.minimum(size, self.length)
        early = -np.maximum(inside - self.length + self.left, 0)
        late = size - inside + np.maximum(inside - self.length + self.right, 0)
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
        """Return whether slices may start at step `place`, counted from 0, of trajectories of any `size`."""
        early, late = self.ends(size)
        legal: NDArray[np.bool_] = (early <= place) & (place <= late) & (size >= self.minimum)
        return legal

    def slices(self, first: Numbers, size: Numbers, number: Numbers) -> tuple[Numbers, Numbers | None]:
        """Return first steps and lengths of the slices at the `number`-th legal starts, counted from 0.

        The trajectories have `size` steps, beginning with `first`. The lengths are None if all slices are whole.
        """
        if self.is_plain:
            return first + (size - self.length if self.anchor == "end" else number), None
        start = first + self.ends(size)[0] + number
        stop = np.minimum(start + np.minimum(size, self.length), first + size)
        start = np.maximum(start, first)
        return start, stop - start


def scaled(chances: Chances | Singles, sizes: Numbers | int) -> Numbers:
    """Scale fractions in [0, 1) to integers from 0 to `sizes - 1`, in the precision of the fractions."""
    # The largest fraction is 1 - 2^-53, so the product with a size of up to 2^53 is never rounded up to the size; for
    # the fractions that torch draws in float32, at most 1 - 2^-24, the same holds for sizes below 2^24.
    numbers: Numbers = (chances * np.asarray(sizes, chances.dtype)).astype(np.int64)
    return numbers


class SliceTable:
    """The trajectories of a ring from which whole slices are drawn.

    Without `sums`, each trajectory is drawn equally often; with `sums`, each legal start is. The table keeps a
    reference to the arrays, which must be contiguous: the compiled loop reads them by address.

    Args:
        first, last: absolute numbers of the first and last steps of the trajectories, int64 `[trajectories]`; each has
            at least as many steps as a slice.
        rows: rows of the ring; the row of a step is its number modulo `rows`.
        sums: for each trajectory, `before` plus the number of legal starts in it and in all trajectories before it.
        starts: the number of legal starts in all trajectories.
        before: the number from which `sums` counts.
    """

    __slots__ = ("before", "first", "last", "place", "rows", "starts", "sums")

    def __init__(
        self, first: Numbers, last: Numbers, rows: int, sums: Numbers | None = None, starts: int = 0, before: int = 0
    ) -> None:
        self.first, self.last, self.rows = first, last, rows
        self.sums, self.starts, self.before = sums, starts, before
        addresses = [0 if array is None else array.ctypes.data for array in (first, last, sums)]
        self.place: Numbers = np.array([[len(first), rows, *addresses[:2], starts, addresses[2], before]], np.int64)
        """The argument of the compiled loop, `[1, 7]`."""

    def draw(self, chances: Chances, rule: SliceRule, *, single: bool = False) -> Numbers:
        """Draw slices by a rule that `is_plain`, and return the rows of all slices, int64 `[slices * length]`.

        Each slice takes two of the chances, as described in `SliceTables.draw`.
        """
        if not row_kernels.warm(importing=False):
            return self.draw_plainly(chances, rule, single=single).reshape(-1)
        return _drawn(chances, _ALONE, np.array([len(chances) // 2], np.int64), self.place, rule, single)

    def draw_plainly(self, chances: Chances, rule: SliceRule, *, single: bool = False) -> Numbers:
        """Draw slices like `draw`, in NumPy, int64 `[slices, length]`."""
        chances, places = np.split(chances, 2)
        if self.sums is not None:
            mass = scaled(chances, self.starts) + self.before
            chosen = np.searchsorted(self.sums, mass, side="right")
            number = mass - np.where(chosen > 0, self.sums[chosen - 1], self.before)
        else:
            chosen = scaled(chances, len(self.first))
            starts = rule.starts(self.last[chosen] - self.first[chosen] + 1)
            number = scaled(places.astype(np.float32) if single else places, starts)
        start, _ = rule.slices(self.first[chosen], self.last[chosen] - self.first[chosen] + 1, number)
        found: Numbers = (start[:, None] + np.arange(rule.length)) % self.rows
        return found


_PLACE = 7
_ALONE: Numbers = np.zeros(1, np.int64)


class SliceTables:
    """The trajectories of `count` rings, from all of which one call draws slices."""

    def __init__(self, count: int) -> None:
        self._tables: list[SliceTable | None] = [None] * count
        self._places = np.zeros((count, _PLACE), np.int64)

    def put(self, number: int, table: SliceTable) -> None:
        """Replace the trajectories of a ring."""
        if self._tables[number] is not table:
            self._places[number], self._tables[number] = table.place, table

    def draw(
        self, chances: Chances, members: Numbers, stops: Numbers, rule: SliceRule, *, single: bool = False
    ) -> Numbers:
        """Draw whole slices from several rings, and return the rows of all slices, int64 `[stops[-1] * length]`.

        The first chance of a slice chooses a trajectory and the second a legal start in it; or, if the table has
        `sums`, the first chance chooses one of all legal starts.

        Args:
            chances: random numbers in [0, 1), float64 `[2 * stops[-1]]`: for each part, those for the trajectories,
                then those for the starts.
            members: the rings, by number.
            stops: the ends of the parts: slices before `stops[0]` come from the ring `members[0]`, and so on.
            rule: a rule that `is_plain`.
            single: whether the chances for the starts were drawn in float32, and are scaled in it.
        """
        if row_kernels.is_warm():
            return _drawn(chances, members, stops, self._places, rule, single)
        found = []
        for member, part in zip(members.tolist(), np.split(chances, 2 * stops[:-1]), strict=True):
            table = self._tables[member]
            assert table is not None  # `put` comes before a draw
            found.append(table.draw_plainly(part, rule, single=single))
        return np.concatenate(found).reshape(-1)


# With numba ----------------------------------------------------------------------------------------

ints_at: Any = None
"""`addresses.ints_at`, once numba is imported; a global, because numba looks up the functions that `draw_slices` calls
in this module."""
_compiled: Any = None


def draw_slices(
    chances: Chances,
    members: Numbers,
    stops: Numbers,
    tables: Numbers,
    length: int,
    anchor: int,
    single: bool,
    numbers: Numbers,
) -> None:
    """Draw slices of `length` rows from several rings: slices before `stops[0]` from `tables[members[0]]`, and so on.

    This function is compiled by numba; see `SliceTables.draw` for the meaning of chances and of `single`. Each of the
    `tables` is `SliceTable.place`: the number of trajectories, the rows of the ring, the addresses of `first` and
    `last`, `starts` (0 without `sums`), the address of `sums`, and `before`. `anchor` is 0 for any start, 1 for the
    first, 2 for the last. `numbers` gets the rows.
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
            late = lasts[chosen] - firsts[chosen] + 1 - length  # the last start, as in `SliceRule.ends`
            if anchor:
                number = 0 if anchor == 1 else late
            elif number < 0 and single:
                number = int(np.float32(chances[draw + count]) * np.float32(late + 1))
            elif number < 0:
                number = int(chances[draw + count] * (late + 1))
            row = (firsts[chosen] + number) % rows
            for step in range(target, target + length):
                numbers[step] = row
                row = row + 1 if row + 1 < rows else 0
            target += length
        begin = stops[part]


def compiled_draw() -> Any:
    """Import numba and return `draw_slices` compiled by it; the machine code is cached as described in `compiled`."""
    global ints_at, _compiled
    if _compiled is None:
        import numba

        from . import addresses

        ints_at = addresses.ints_at
        kinds = "void(float64[::1], int64[::1], int64[::1], int64[:, ::1], int64, int64, boolean, int64[::1])"
        _compiled = numba.njit(kinds, nogil=True, cache=True)(draw_slices)
    return _compiled


def _drawn(
    chances: Chances, members: Numbers, stops: Numbers, places: Numbers, rule: SliceRule, single: bool
) -> Numbers:
    """Draw slices with the compiled loop."""
    numbers = np.empty(stops[-1] * rule.length, np.int64)
    compiled_draw()(chances, members, stops, places, rule.length, ANCHORS.index(rule.anchor), single, numbers)
    return numbers
