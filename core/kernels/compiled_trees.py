"""The sum tree of `trees` in loops compiled by numba; importing this module imports numba.

The machine code is cached in files, as described in `compiled`.

A node has 16 children, which are adjacent and fill two cache lines: the tree is half as deep as with four children, and
both lines of a level are loaded at the same time. A batch goes up and down level by level, not leaf by leaf: the reads
of one level do not depend on each other, so the processor overlaps them.

All levels are in one array, leaves first, each level aligned to a multiple of 16; the children of node n are
`level_below[16 n : 16 n + 16]`.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError
from ..ted.schema import Numbers
from .addresses import float_at, floats_at, greatest_of_16, ints_at, least_above_0_of_16, least_of_16, prefetch
from .trees import PriorityTree, level_sizes

Values = NDArray[np.float64]

_BITS = 4
_WIDTH = 1 << _BITS
_LINE = 8  # values in a cache line
_BYTES, _QUARTER = 8 * _WIDTH, 2 * _WIDTH  # bytes of a node's children, and of a quarter of them
_AHEAD, _SOON = 16, 8  # how far ahead to prefetch, in cheap and in expensive iterations
_FOUND = -1.0  # marks nodes to be recomputed, as no sum is negative
_NODES = "float64[::1], float64[::1], float64[::1], int64[::1]"  # sums, lows, highs, and where each level starts


@numba.njit(inline="always")
def _four(place: int) -> float:
    """Add four weights from an address on, always in the same order, so that every caller gets the same rounding."""
    total: float = ((float_at(place) + float_at(place + 8)) + float_at(place + 16)) + float_at(place + 24)
    return total


@numba.njit(inline="always")
def _sum_of(place: int) -> float:
    """Add the weights of the 16 children at an address, in the same order as `_chosen` adds them.

    The sum of a node is thus rounded like the last running sum of a draw, so that the two are equal.
    """
    total = 0.0
    for quarter in range(place, place + _BYTES, _QUARTER):
        total += _four(quarter)
    return total


@numba.njit(inline="always")
def _ask_for_children(place: int) -> None:
    """Prefetch the children at an address."""
    prefetch(place)
    prefetch(place + 8 * _LINE)


@numba.njit(f"void(int64[::1], {_NODES})", nogil=True, cache=True)
def renew(nodes: Numbers, sums: Values, lows: Values, highs: Values, starts: Numbers) -> None:
    """Recompute nodes of the level above the leaves from their children, then their ancestors, level by level.

    `nodes` must not contain a node twice. It is overwritten: while one level is recomputed, the nodes of the next one
    are collected at its beginning. `_FOUND` in place of a node's sum marks it as collected.
    """
    leaves, found = starts[1], nodes.size
    at_sums, at_lows, at_highs = sums.ctypes.data, lows.ctypes.data, highs.ctypes.data
    for level in range(1, starts.size - 1):
        begin, below, above = starts[level], starts[level - 1], starts[level + 1]
        count, found = found, 0
        for number in range(count):
            if number + _SOON < count:
                coming = below + (nodes[number + _SOON] << _BITS)
                _ask_for_children(at_sums + 8 * coming)
                if level > 1:
                    _ask_for_children(at_lows + 8 * (coming - leaves))
                    _ask_for_children(at_highs + 8 * (coming - leaves))
            node = nodes[number]
            child = below + (node << _BITS)
            total = _sum_of(at_sums + 8 * child)
            if level == 1:
                high, low = greatest_of_16(at_sums + 8 * child), least_above_0_of_16(at_sums + 8 * child)
            else:
                child -= leaves
                high, low = greatest_of_16(at_highs + 8 * child), least_of_16(at_lows + 8 * child)
            sums[begin + node] = total
            lows[begin + node - leaves] = low
            highs[begin + node - leaves] = high
            parent = node >> _BITS
            if level < starts.size - 2 and sums[above + parent] >= 0:
                sums[above + parent] = _FOUND
                nodes[found] = parent
                found += 1


@numba.njit(f"int64(int64[::1], float64[::1], {_NODES}, int64)", nogil=True, cache=True)
def set_leaves(
    index: Numbers, weights: Values, sums: Values, lows: Values, highs: Values, starts: Numbers, capacity: int
) -> int:
    """Set the weights of leaves, or a single weight for all of them.

    Returns -1; or, with nothing changed, the position in `index` of a leaf that does not exist.
    """
    count = index.size
    for number in range(count):
        if index[number] < 0 or index[number] >= capacity:
            return number
    leaves, step = starts[1], 0 if weights.size == 1 else 1
    place = sums.ctypes.data
    nodes = np.empty(min(count, starts[2] - leaves), np.int64)
    found = 0
    for number in range(count):
        if number + _AHEAD < count:
            coming = index[number + _AHEAD] >> _BITS
            _ask_for_children(place + 8 * (coming << _BITS))
            prefetch(place + 8 * (leaves + coming))
        leaf = index[number]
        sums[leaf] = weights[number * step]
        node = leaf >> _BITS
        if sums[leaves + node] >= 0:
            sums[leaves + node] = _FOUND
            nodes[found] = node
            found += 1
    renew(nodes[:found], sums, lows, highs, starts)
    return -1


@numba.njit(
    f"int64(int64[::1], float64[::1], float64[::1], float64, {_NODES}, int64, float64[::1])", nogil=True, cache=True
)
def update_leaves(
    index: Numbers,
    priorities: Values,
    weights: Values,
    heaviest: float,
    sums: Values,
    lows: Values,
    highs: Values,
    starts: Numbers,
    known: int,
    found: Values,
) -> int:
    """Check priorities and weights, and set the weights: the loop of `PriorityTree.update`.

    Leaves must be below `known`, priorities finite and at least 0, weights from 0 to `heaviest`. `found` gets the
    largest priority, and the position of its first occurrence. Returns -1; or, with nothing changed, the position of a
    leaf, priority or weight that is not allowed.
    """
    largest, place = -1.0, 0
    for number in range(priorities.size):
        priority = priorities[number]
        if not (0 <= priority < math.inf and 0 <= weights[number] <= heaviest):
            return number
        if priority > largest:
            largest, place = priority, number
    beyond = set_leaves(index, weights, sums, lows, highs, starts, known)
    found[0], found[1] = largest, place
    return beyond


@numba.njit(inline="always")
def _chosen(place: int, mass: float) -> tuple[int, float]:
    """Find the child that contains `mass`; return its number, and what is left of the mass within it.

    The 16 children are at an address, and their sum must be positive. Find first the four children that contain the
    mass, then the one among these. There are no branches: the processor could not predict them, and consecutive draws
    would not overlap.
    """
    first = _four(place)
    second = first + _four(place + _QUARTER)
    third = second + _four(place + 2 * _QUARTER)
    chosen = int(first <= mass) + int(second <= mass) + int(third <= mass)
    begin = first if first <= mass else 0.0
    begin = second if second <= mass else begin
    begin = third if third <= mass else begin
    quarter = place + _QUARTER * chosen
    inside = float_at(quarter)
    first = begin + inside
    inside += float_at(quarter + 8)
    second = begin + inside
    inside += float_at(quarter + 16)
    third = begin + inside
    last = begin + (inside + float_at(quarter + 24))
    count = 4 * chosen + int(first <= mass) + int(second <= mass) + int(third <= mass) + int(last <= mass)
    begin = first if first <= mass else begin
    begin = second if second <= mass else begin
    begin = third if third <= mass else begin
    if count < _WIDTH:
        return count, mass - begin
    # Because of rounding, the mass is beyond all children: take the end of the last child with a positive weight.
    count = _WIDTH - 1
    while float_at(place + 8 * count) <= 0:
        count -= 1
    return count, float_at(place + 8 * count)


@numba.njit("void(float64[::1], float64[::1], int64[::1], int64[::1], float64[::1])", nogil=True, cache=True)
def draw_leaves(fractions: Values, sums: Values, starts: Numbers, index: Numbers, weights: Values) -> None:
    """Find the leaves at fractions of the total, and their weights: the loop of `PriorityTree.draw`."""
    count, place, root = fractions.size, sums.ctypes.data, starts.size - 2
    masses = weights  # not written until the end, so that its memory can hold the masses
    for number in range(count):
        index[number] = 0
        masses[number] = fractions[number] * sums[starts[root]]
    for level in range(root - 1, -1, -1):
        begin = starts[level]
        below = starts[level - 1] if level else 0
        for number in range(count):
            first = begin + (index[number] << _BITS)
            child, masses[number] = _chosen(place + 8 * first, masses[number])
            node = (index[number] << _BITS) + child
            index[number] = node
            if level:
                _ask_for_children(place + 8 * (below + (node << _BITS)))
    for number in range(count):
        weights[number] = sums[index[number]]


PLACE = 5


@numba.njit(
    "boolean(float64[::1], int64[::1], int64[::1], int64[:, ::1], boolean, int64[::1], float64[::1])",
    nogil=True,
    cache=True,
)
def draw_parts(
    fractions: Values,
    numbers: Numbers,
    stops: Numbers,
    places: Numbers,
    by_batch: bool,
    index: Numbers,
    weights: Values,
) -> bool:
    """Draw from several trees: fractions before `stops[0]` from the tree at `places[numbers[0]]`, and so on.

    `places` has `CompiledTree.place` of each tree. Weights are divided by the least positive weight of their tree, or
    with `by_batch` by the least weight of their part. Returns False if the total of a tree is 0 or not finite.
    """
    begin = 0
    for part in range(stops.size):
        stop, place = stops[part], places[numbers[part]]
        sums = floats_at(place[0], place[1])
        starts = ints_at(place[2], place[3])
        if not 0 < sums[starts[starts.size - 2]] < math.inf:
            return False
        draw_leaves(fractions[begin:stop], sums, starts, index[begin:stop], weights[begin:stop])
        least = weights[begin:stop].min() if by_batch else floats_at(place[4], 1)[0]
        for number in range(begin, stop):
            weights[number] /= least
        begin = stop
    return True


class CompiledTree(PriorityTree):
    """A `PriorityTree` on the CPU in compiled loops, which release the interpreter lock."""

    def __init__(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__(capacity, dtype, device)
        # All levels in one array, leaves first, each aligned to 16; `starts` ends with the end of the last level.
        sizes = [-(-size // _WIDTH) * _WIDTH for size in level_sizes(self.capacity, _WIDTH)]
        self._starts = np.cumsum([0, *sizes])
        self._type = np.float32 if dtype == torch.float32 else np.float64
        nodes = sum(sizes[1:])
        self._levels = torch.zeros(sum(sizes), dtype=torch.float64)  # torch aligns memory to cache lines
        self._leaves = self._levels[: self.capacity]
        self._sums = self._levels.numpy()
        self._lows = torch.full((nodes,), math.inf, dtype=torch.float64).numpy()
        self._highs = torch.zeros(nodes, dtype=torch.float64).numpy()
        self._root = int(self._starts[-2])
        self._top = self._root - sizes[0]
        self._nodes = self._sums, self._lows, self._highs, self._starts
        least = self._lows[self._top :].ctypes.data
        place = [self._sums.ctypes.data, self._sums.size, self._starts.ctypes.data, self._starts.size, least]
        self.place: Numbers = np.array(place)
        """The argument of `draw_parts`, int64 `[PLACE]`: address and size of the sums, and of the starts of levels; and
        the address of the least positive weight."""

    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        numbers = np.ascontiguousarray(index.numpy(force=True), np.int64)
        given = weights.numpy(force=True) if isinstance(weights, torch.Tensor) else np.array([weights])
        values = np.ascontiguousarray(given.astype(self._type, copy=False), np.float64)
        if values.size not in (1, numbers.size):
            raise SchemaError(f"found {values.size} weights, expected {numbers.size}: one for each leaf")
        if set_leaves(numbers, values, *self._nodes, self.capacity) >= 0:
            self._check_index(index)

    def update(
        self, index: torch.Tensor, priorities: torch.Tensor, weights: torch.Tensor, heaviest: float, known: int
    ) -> tuple[float, int] | None:
        numbers = np.ascontiguousarray(index.numpy(force=True), np.int64)
        given = np.ascontiguousarray(priorities.numpy(force=True), np.float64)
        values = np.ascontiguousarray(weights.numpy(force=True), np.float64)
        if values.size != given.size or values.size not in (1, numbers.size):
            return None
        found = np.empty(2)
        if update_leaves(numbers, given, values, heaviest, *self._nodes, min(known, self.capacity), found) >= 0:
            return None
        return float(found[0]), int(found[1])

    def fill(self, start: int, stop: int, weight: float) -> None:
        self._check_run(start, stop)
        self._sums[start:stop] = self._rounded(weight)
        self._renew_run(start, stop)

    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_total()
        given = np.ascontiguousarray(fractions.numpy(force=True), np.float64)
        index, weights = np.empty(given.size, np.int64), np.empty(given.size)
        draw_leaves(given, self._sums, self._starts, index, weights)
        return torch.from_numpy(index), torch.from_numpy(weights.astype(self._type, copy=False))

    def get(self, index: torch.Tensor) -> torch.Tensor:
        return self._leaves[index].to(self.dtype)

    def weights(self) -> torch.Tensor:
        return self._leaves.to(self.dtype, copy=True)

    def load(self, weights: torch.Tensor) -> None:
        self._check_size(weights)
        self._leaves[: len(weights)] = weights.to(self.dtype)
        self._leaves[len(weights) :] = 0
        self._renew_run(0, self.capacity)

    def _renew_run(self, start: int, stop: int) -> None:
        renew(np.arange(start >> _BITS, -(-stop // _WIDTH)), *self._nodes)

    @property
    def total(self) -> float:
        return float(self._sums[self._root])

    @property
    def minimum(self) -> float:
        return float(self._lows[self._top])

    @property
    def maximum(self) -> float:
        return float(self._highs[self._top])
