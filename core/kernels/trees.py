"""Draws leaves with a probability that is proportional to their weight."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError
from .rows import compiled_module

DTYPES = (torch.float32, torch.float64)


class PriorityTree(ABC):
    """Weights of leaves, 0 to `capacity - 1`, with their sum, their minimum and their maximum always at hand.

    Leaves and nodes are float64, and every node is recomputed from its children whenever one of them changes: errors do
    not accumulate. Weights are rounded to `dtype` on their way in, and that is
    the type they come out with. Tensors are on `device`. A tree is not safe to be used by several threads at once.

    Weights are finite and at least 0: that is for the caller to see to. IndexError, with nothing changed, for leaves
    that are not there. A pickle holds the leaves alone.
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
        """Give the leaves `index`, int64 `[n]`, their weights, `[n]`, or all of them one weight.

        Of several weights for one leaf the last one counts.
        """

    def update(
        self, index: torch.Tensor, priorities: torch.Tensor, weights: torch.Tensor, heaviest: float, known: int
    ) -> tuple[float, int] | None:
        """Set the weights of priorities, both `[n]` or `[1]` and of this type, and check all in the same call.

        Returns the largest priority, and where it is first. None, with nothing changed, where leaves are not all among
        the first `known`, priorities are negative or not finite, or weights are above `heaviest`; and for trees that
        do not do this.
        """
        return None

    @abstractmethod
    def fill(self, start: int, stop: int, weight: float) -> None:
        """Give the leaves from `start` up to but not including `stop` one weight."""

    @abstractmethod
    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find where these fractions of the total, float64 `[n]` in [0, 1), fall; return leaves and their weights.

        Leaves are laid out one after the other, each as long as its weight. So for fractions that are uniform each
        leaf is found with a probability of its weight by the total, and one of weight 0 never, in spite of rounding.
        SchemaError (a RuntimeError) if all weights are 0.
        """

    @abstractmethod
    def get(self, index: torch.Tensor) -> torch.Tensor:
        """Return the weights of leaves."""

    @abstractmethod
    def weights(self) -> torch.Tensor:
        """Return a copy of all weights, `[capacity]`."""

    @abstractmethod
    def load(self, weights: torch.Tensor) -> None:
        """Replace all weights; leaves beyond those given, `[k]`, get 0. SchemaError for more than the capacity."""

    @property
    @abstractmethod
    def total(self) -> float:
        """The sum of all weights."""

    @property
    @abstractmethod
    def minimum(self) -> float:
        """The smallest weight above 0; infinity if there is none."""

    @property
    @abstractmethod
    def maximum(self) -> float:
        """The largest weight."""

    def clear(self) -> None:
        """Set all weights to 0."""
        self.load(torch.empty(0, dtype=self.dtype))

    def grown(self, capacity: int) -> PriorityTree:
        """Make a tree of more leaves with these weights; those that are new have weight 0."""
        larger = type(self)(capacity, self.dtype, self.device)
        larger.load(self.weights())
        return larger

    def _rounded(self, weight: float) -> float:
        """Return the value next to `weight` that `dtype` can hold."""
        return weight if self.dtype == torch.float64 else float(np.float32(weight))

    def _check_index(self, index: torch.Tensor) -> None:
        if not index.numel():
            return
        low, high = bounds(index)
        if not 0 <= low <= high < self.capacity:
            raise IndexError(f"leaves {low} to {high} were named, there are {self.capacity}")

    def _check_run(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"leaves {start} to {stop} were named, there are {self.capacity}")

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
    """Return the least and the largest value as numbers, for which an accelerator is waited for once."""
    low, high = values.aminmax()
    return tuple(torch.stack((low, high)).tolist()) if values.is_cuda else (low.item(), high.item())


def level_sizes(capacity: int, width: int) -> list[int]:
    """Count the nodes of each level, the leaves first, the root last; every node has up to `width` children."""
    sizes = [capacity]
    while len(sizes) == 1 or sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // width))
    return sizes


def priority_tree(
    capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> PriorityTree:
    """Make the compiled kind on the CPU where numba can be imported, else the one made of torch's functions.

    UsageError (a ValueError) for a capacity below 1 and for a `dtype` other than float32 and float64.
    """
    place = torch.device("cpu" if device is None else device)
    compiled = compiled_module("compiled_trees") if place.type == "cpu" else None
    kind = TorchTree if compiled is None else compiled.CompiledTree
    tree: PriorityTree = kind(capacity, dtype, place)
    return tree


class Forest:
    """Up to `count` trees of the compiled kind that are drawn from in one go."""

    def __init__(self, count: int) -> None:
        self._trees: list[PriorityTree | None] = [None] * count
        self._loops = compiled_module("compiled_trees")
        self._places = np.zeros((count, 0 if self._loops is None else self._loops.PLACE), np.int64)

    def plant(self, number: int, tree: PriorityTree) -> bool:
        """Take a tree under a number; False if it is of another kind."""
        if self._trees[number] is not tree:
            if self._loops is None or not isinstance(tree, self._loops.CompiledTree):
                return False
            self._places[number], self._trees[number] = tree.place, tree
        return True

    def draw(
        self, fractions: NDArray[np.float64], numbers: NDArray[np.int64], stops: NDArray[np.int64], *, by_batch: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Draw with the fractions before `stops[0]` from the tree `numbers[0]`, and so on; see `PriorityTree.draw`.

        Returns the leaves, int64 `[n]`, and their weights, float64 `[n]`, as multiples of the least one above 0 of
        their tree, or with `by_batch` of those that were drawn together. No part is empty. None for a tree with a total
        that is 0 or not finite.
        """
        assert self._loops is not None  # no tree was taken without
        index, weights = np.empty(len(fractions), np.int64), np.empty(len(fractions))
        done = self._loops.draw_parts(fractions, numbers, stops, self._places, by_batch, index, weights)
        return (index, weights) if done else None


# Children of a node. Every level costs a fixed number of calls, on an accelerator as many launches: few and wide ones
# are better than many and narrow ones, until what is read per draw begins to count.
_WIDTH = 32


class TorchTree(PriorityTree):
    """A `PriorityTree` that handles a whole batch level by level; nothing but the checks waits for an accelerator."""

    def __init__(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__(capacity, dtype, device)
        # Level by level, leaves first, which are at once their own sum, minimum and maximum. A row holds the children
        # of one node.
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
                raise SchemaError(f"there are {weights.numel()} weights, expected {len(index)}: one for each leaf")
            weights = weights.to(self.device, self.dtype).expand(index.shape)
            # All mentions of a leaf get the weight that counts: then the order of the writes does not matter.
            ordered, order = index.sort(stable=True)
            last = torch.searchsorted(ordered, ordered, right=True) - 1
            index, values = ordered, weights[order[last]].double()
        else:
            values = torch.tensor(self._rounded(weights), dtype=torch.float64, device=self.device)
        self._leaves[index] = values
        for level in range(1, len(self._sums)):
            index = index // _WIDTH
            # Where most nodes are concerned, all of them together take less time than some by number.
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
            # Rounded sums may grow at a child of weight 0, or end before the mass: neither may lead to one.
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
        """Total, minimum and maximum, for which an accelerator is waited for once after each change."""
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
    """Sum up float64 `[n, k]` along the rows; torch has no deterministic sums of floats for CUDA."""
    if not torch.are_deterministic_algorithms_enabled():
        return children.cumsum(-1)
    sums, step = children.clone(), 1
    while step < sums.shape[-1]:
        sums[:, step:] = sums[:, step:] + sums[:, :-step]
        step *= 2
    return sums
