"""Sum trees: draw a leaf with a probability proportional to its weight, in time logarithmic in the number of leaves.

Every node holds the sum, the least positive value and the maximum of the weights below it. With 2 children a node (it
is 32 in `TorchTree` and 16 in the compiled tree), the sums for the weights 3 1 0 4 2 are:

    level 3                10                 the root: the total
    level 2          8           2
    level 1       4     4     2               each level is one array, the children of a node side by side
    level 0      3 1   0 4   2                the leaves

    the line    |---3---|-1-|----4----|--2--|          leaves side by side, each as long as its weight

Draw: a uniform fraction of the total is a place on this line. At each node from the root down, descend into the child
that contains the place, and subtract the sums of the children to the left of it. For the place 5.5: the root's left
child ends at 8, so descend to the left; there the left child ends at 4, so descend to the right with 5.5 - 4 = 1.5;
there leaf 2 has no length, so 1.5 falls into leaf 3.

Update: set the leaves, then recompute the parents of changed nodes, level by level. Nodes are always recomputed from
their children, never by adding a difference, so that rounding errors do not accumulate. A whole batch goes through each
level together.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError
from ..ted.schema import Numbers
from .rows import compiled_module

DTYPES = (torch.float32, torch.float64)


class PriorityTree(ABC):
    """The weights of leaves 0 to `capacity - 1`, with their sum, minimum and maximum always up to date.

    Weights must be finite and at least 0; this is not checked. They are rounded to `dtype` when they are set, and
    returned in it; nodes are float64. Methods raise IndexError, with nothing changed, for leaves that do not exist. A
    pickle contains only the leaves. A tree must not be used by several threads at once.

    Args:
        capacity: the number of leaves.
        dtype: float32 or float64.
        device: the device of all tensors.
    """

    def __init__(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        self.capacity = operator.index(capacity) if hasattr(capacity, "__index__") else 0
        self.dtype = dtype
        self.device = torch.device("cpu" if device is None else device)
        if self.capacity < 1:
            raise UsageError(f"the capacity is {capacity} leaves, expected a number from 1")
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype}, expected one of {', '.join(map(str, DTYPES))}")

    @abstractmethod
    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        """Set the weights of leaves. If a leaf occurs several times, its last weight counts.

        Args:
            index: the leaves, int64 `[n]`.
            weights: their weights, `[n]`, or one weight for all of them.
        """

    def update(
        self, index: torch.Tensor, priorities: torch.Tensor, weights: torch.Tensor, heaviest: float, known: int
    ) -> tuple[float, int] | None:
        """Check priorities and weights, and set the weights, in one call.

        Args:
            index: the leaves, int64 `[n]`.
            priorities: their priorities, `[n]` or `[1]`.
            weights: the weights computed from the priorities, in the same shape and type.
            heaviest: the largest weight allowed.
            known: only the first `known` leaves are allowed.

        Returns:
            The largest priority, and the position of its first occurrence. None, with nothing changed, if a leaf or
            weight is not allowed, a priority is negative or not finite, or this kind of tree does not implement the
            method.
        """
        return None

    @abstractmethod
    def fill(self, start: int, stop: int, weight: float) -> None:
        """Set one weight for the leaves from `start` up to but not including `stop`."""

    @abstractmethod
    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the leaves at fractions of the total, as the docstring of this module describes.

        Uniform fractions find each leaf with probability weight / total. A leaf of weight 0 is never found, not even
        because of rounding.

        Args:
            fractions: float64 `[n]` in [0, 1).

        Returns:
            The leaves and their weights, `[n]`.

        Raises:
            SchemaError: (a RuntimeError) all weights are 0.
        """

    @abstractmethod
    def get(self, index: torch.Tensor) -> torch.Tensor:
        """Return the weights of leaves."""

    @abstractmethod
    def weights(self) -> torch.Tensor:
        """Return a copy of all weights, `[capacity]`."""

    @abstractmethod
    def load(self, weights: torch.Tensor) -> None:
        """Replace all weights; leaves beyond the given ones, `[k]`, get 0. SchemaError for more than the capacity."""

    @property
    @abstractmethod
    def total(self) -> float:
        """The sum of all weights."""

    @property
    @abstractmethod
    def minimum(self) -> float:
        """The smallest positive weight; infinity if there is none."""

    @property
    @abstractmethod
    def maximum(self) -> float:
        """The largest weight."""

    def clear(self) -> None:
        """Set all weights to 0."""
        self.load(torch.empty(0, dtype=self.dtype))

    def grown(self, capacity: int) -> PriorityTree:
        """Make a tree with more leaves and the same weights; new leaves have weight 0."""
        larger = type(self)(capacity, self.dtype, self.device)
        larger.load(self.weights())
        return larger

    def _rounded(self, weight: float) -> float:
        """Return the nearest value to `weight` that `dtype` can represent."""
        return weight if self.dtype == torch.float64 else float(np.float32(weight))

    def _check_index(self, index: torch.Tensor) -> None:
        if not index.numel():
            return
        low, high = bounds(index)
        if not 0 <= low <= high < self.capacity:
            raise IndexError(f"leaves {low} to {high} do not all exist: there are {self.capacity}")

    def _check_run(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"leaves {start} to {stop} do not all exist: there are {self.capacity}")

    def _check_size(self, weights: torch.Tensor) -> None:
        if weights.dim() != 1 or len(weights) > self.capacity:
            raise SchemaError(f"weights are {list(weights.shape)}, expected a vector of up to {self.capacity}")

    def _check_total(self) -> None:
        if not self.total > 0:
            raise SchemaError("no leaf can be drawn: all weights are 0")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (type(self), self.capacity, self.dtype, self.device, self.weights())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, dtype={self.dtype}, device={str(self.device)!r})"


def _rebuilt(
    kind: type[PriorityTree], capacity: int, dtype: torch.dtype, device: torch.device, weights: torch.Tensor
) -> PriorityTree:
    tree = kind(capacity, dtype, device)
    tree.load(weights)
    return tree


def bounds(values: torch.Tensor) -> tuple[Any, Any]:
    """Return the least and the largest value as numbers, with one synchronisation if they are on an accelerator."""
    low, high = values.aminmax()
    return tuple(torch.stack((low, high)).tolist()) if values.is_cuda else (low.item(), high.item())


def level_sizes(capacity: int, width: int) -> list[int]:
    """Return the number of nodes of each level, from the leaves to the root; every node has up to `width` children.

    There are at least two levels, also for a single leaf.
    """
    sizes = [capacity]
    while len(sizes) == 1 or sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // width))
    return sizes


def priority_tree(
    capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> PriorityTree:
    """Make a compiled tree on the CPU if numba can be imported, otherwise one of torch functions.

    Raises:
        UsageError: (a ValueError) the capacity is below 1, or `dtype` is neither float32 nor float64.
    """
    place = torch.device("cpu" if device is None else device)
    compiled = compiled_module("compiled_trees") if place.type == "cpu" else None
    kind = TorchTree if compiled is None else compiled.CompiledTree
    tree: PriorityTree = kind(capacity, dtype, place)
    return tree


class Forest:
    """The compiled trees of up to `count` buffers, from all of which one call draws leaves."""

    def __init__(self, count: int) -> None:
        self._trees: list[PriorityTree | None] = [None] * count
        self._loops = compiled_module("compiled_trees")
        self._places = np.zeros((count, 0 if self._loops is None else self._loops.PLACE), np.int64)

    def plant(self, number: int, tree: PriorityTree) -> bool:
        """Add a tree under a number; False, with nothing changed, if it is not a compiled tree."""
        if self._trees[number] is not tree:
            if self._loops is None or not isinstance(tree, self._loops.CompiledTree):
                return False
            self._places[number], self._trees[number] = tree.place, tree
        return True

    def draw(
        self, fractions: NDArray[np.float64], numbers: Numbers, stops: Numbers, *, by_batch: bool
    ) -> tuple[Numbers, NDArray[np.float64]] | None:
        """Draw from several trees; see `PriorityTree.draw`.

        Args:
            fractions: the fractions; those before `stops[0]` are for the tree `numbers[0]`, and so on.
            numbers: the trees, by number.
            stops: the ends of the parts; no part is empty.
            by_batch: whether weights are relative to the least positive weight of the part, instead of the tree.

        Returns:
            The leaves, int64 `[n]`, and their relative weights, float64 `[n]`; None if the total of a tree is 0 or not
            finite.
        """
        assert self._loops is not None  # otherwise no tree could be planted
        index, weights = np.empty(len(fractions), np.int64), np.empty(len(fractions))
        done = self._loops.draw_parts(fractions, numbers, stops, self._places, by_batch, index, weights)
        return (index, weights) if done else None


# Children of a node. Every level costs a fixed number of calls, or kernel launches on an accelerator, so a few wide
# levels are faster than many narrow ones, up to the width at which reading the children takes longer than the calls.
_WIDTH = 32


class TorchTree(PriorityTree):
    """A `PriorityTree` of torch functions, which handle one level for a whole batch at a time, on any device.

    Only checks of arguments and totals wait for an accelerator.
    """

    def __init__(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__(capacity, dtype, device)
        # One array for each level, leaves first. The leaves are their own sum, minimum and maximum. A row holds the
        # children of one node.
        shapes = [(-(-size // _WIDTH), _WIDTH) for size in level_sizes(self.capacity, _WIDTH)]
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=self.device) for shape in shapes]
        self._lows = [torch.full_like(sums, math.inf) for sums in self._sums[1:]]
        self._highs = [torch.zeros_like(sums) for sums in self._sums[1:]]
        self._leaves = self._sums[0].view(-1)
        self._known: tuple[float, float, float] | None = None  # total, minimum and maximum

    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        index = index.to(self.device)
        self._check_index(index)
        if isinstance(weights, torch.Tensor):
            if weights.numel() not in (1, len(index)):
                raise SchemaError(f"found {weights.numel()} weights, expected {len(index)}: one for each leaf")
            weights = weights.to(self.device, self.dtype).expand(index.shape)
            # All occurrences of a leaf get its last weight, so that the order of the writes does not matter.
            ordered, order = index.sort(stable=True)
            last = torch.searchsorted(ordered, ordered, right=True) - 1
            index, values = ordered, weights[order[last]].double()
        else:
            values = torch.tensor(self._rounded(weights), dtype=torch.float64, device=self.device)
        self._leaves[index] = values
        for level in range(1, len(self._sums)):
            index = index // _WIDTH
            # If most nodes are affected, recomputing all of them is faster than selecting some by number.
            self._renew(level, index if len(index) < len(self._sums[level - 1]) else self._all(level))

    def fill(self, start: int, stop: int, weight: float) -> None:
        self._check_run(start, stop)
        weight = self._rounded(weight)
        self._leaves[start:stop] = weight
        for level in range(1, len(self._sums)):
            start, stop = start // _WIDTH, -(-stop // _WIDTH)
            self._renew(level, slice(start, stop))

    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_total()
        fractions = fractions.to(self.device)
        node = torch.zeros(fractions.shape, dtype=torch.int64, device=self.device)
        mass = fractions * self._sums[-1][0, 0]
        zero = mass.new_zeros(())
        for sums in reversed(self._sums[:-1]):
            children = sums[node]
            # Because of rounding, the running sum may increase at a child of weight 0, or its end may be below the
            # mass. A child of weight 0 must not be selected in either case: its stop is -inf, and the mass is limited
            # to just below the last stop.
            stops = _running_sums(children).masked_fill_(children <= 0, -math.inf)
            mass = torch.minimum(mass, torch.nextafter(stops.amax(-1), zero))
            child = (stops > mass[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
            begin = stops.gather(-1, child) - children.gather(-1, child)
            mass = (mass - begin[:, 0]).clamp_min_(0)
            node = node * _WIDTH + child[:, 0]
        return node, self.get(node)

    def get(self, index: torch.Tensor) -> torch.Tensor:
        return self._leaves[index.to(self.device)].to(self.dtype)

    def weights(self) -> torch.Tensor:
        return self._leaves[: self.capacity].to(self.dtype, copy=True)

    def load(self, weights: torch.Tensor) -> None:
        self._check_size(weights)
        count = len(weights)
        self._leaves[:count] = weights.to(self.device, self.dtype)
        self._leaves[count:] = 0
        for level in range(1, len(self._sums)):
            self._renew(level, self._all(level))

    @property
    def total(self) -> float:
        return self._root[0]

    @property
    def minimum(self) -> float:
        return self._root[1]

    @property
    def maximum(self) -> float:
        return self._root[2]

    @property
    def _root(self) -> tuple[float, float, float]:
        """Total, minimum and maximum; after each change, the first access waits for an accelerator."""
        if self._known is None:
            roots = [level[-1][0, 0] for level in (self._sums, self._lows, self._highs)]
            total, low, high = torch.stack(roots).tolist()
            self._known = total, low, high
        return self._known

    def _renew(self, level: int, nodes: torch.Tensor | slice) -> None:
        """Recompute these nodes of a level from their children."""
        self._known = None
        children = self._sums[level - 1][nodes]
        if level == 1:
            lows, highs = torch.where(children > 0, children, math.inf), children
        else:
            lows, highs = self._lows[level - 2][nodes], self._highs[level - 2][nodes]
        self._sums[level].view(-1)[nodes] = children.sum(-1)
        self._lows[level - 1].view(-1)[nodes] = lows.amin(-1)
        self._highs[level - 1].view(-1)[nodes] = highs.amax(-1)

    def _all(self, level: int) -> slice:
        return slice(0, len(self._sums[level - 1]))


def _running_sums(children: torch.Tensor) -> torch.Tensor:
    """Compute running sums of float64 `[n, k]` along the rows; torch's own are not deterministic for floats on CUDA."""
    if not torch.are_deterministic_algorithms_enabled():
        return children.cumsum(-1)
    sums, step = children.clone(), 1
    while step < sums.shape[-1]:
        sums[:, step:] = sums[:, step:] + sums[:, :-step]
        step *= 2
    return sums
