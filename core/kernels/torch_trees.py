"""The priority tree in torch's own functions: for accelerators, and for the CPU where numba is absent."""

from __future__ import annotations

import math

import torch

from ..errors import SchemaError
from .trees import PriorityTree, level_sizes

__all__ = ["TorchTree"]

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

    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        index = index.to(self.device)
        self._check_index(index)
        if isinstance(weights, torch.Tensor):
            if weights.numel() not in (1, len(index)):
                raise SchemaError(f"{weights.numel()} weights were given for {len(index)} leaves")
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
            stops = children.cumsum(-1).masked_fill_(children <= 0, -math.inf)
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
        return float(self._sums[-1][0, 0])

    @property
    def minimum(self) -> float:
        return float(self._lows[-1][0, 0])

    @property
    def maximum(self) -> float:
        return float(self._highs[-1][0, 0])

    def _renew(self, level: int, nodes: torch.Tensor | slice) -> None:
        """Recompute these nodes of a level from their children."""
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
