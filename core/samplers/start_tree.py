"""A priority tree of all elements that draws only those at which a slice may begin."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.trees import PriorityTree, priority_tree

__all__ = ["StartTree"]


class StartTree(PriorityTree):
    """Two trees that change together: `whole` has the weights of all elements, `starts` those of legal starts alone.

    Weights, minimum and maximum are those of all elements, as if there were no second tree. What is drawn, and the
    total, are of legal starts. Which ones are legal is told with `allow`; at first none is. Both are on the CPU.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(capacity, dtype, torch.device("cpu"))
        self.whole = priority_tree(capacity, dtype)
        self.starts = priority_tree(capacity, dtype)
        self._legal = torch.zeros(self.capacity, dtype=torch.bool)
        self._flags = self._legal.numpy()  # the same memory: numpy looks up few numbers in a third of the time

    def allow(self, index: torch.Tensor, legal: torch.Tensor) -> None:
        """Say of the leaves `index`, int64 `[n]`, whether a slice may begin there, bool `[n]`; none is named twice."""
        self._legal[index] = legal
        self.starts.set(index, self.whole.get(index).where(legal, 0))

    def allow_only(self, legal: torch.Tensor) -> None:
        """Say of all leaves, bool `[capacity]`, whether a slice may begin there."""
        self._legal.copy_(legal)
        self.starts.load(self.whole.weights().where(self._legal, 0))

    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        self.whole.set(index, weights)
        legal = self._flags[index.numpy(force=True)]
        values = weights.numpy(force=True) if isinstance(weights, torch.Tensor) else weights
        self.starts.set(index, torch.from_numpy(np.where(legal, values, 0.0)))

    def fill(self, start: int, stop: int, weight: float) -> None:
        self.whole.fill(start, stop, weight)
        if stop - start == 1:
            self.starts.fill(start, stop, weight if self._legal[start] else 0.0)
        else:
            self.starts.set(self._legal[start:stop].nonzero()[:, 0] + start, weight)

    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.starts.draw(fractions)

    def get(self, index: torch.Tensor) -> torch.Tensor:
        return self.whole.get(index)

    def weights(self) -> torch.Tensor:
        return self.whole.weights()

    def load(self, weights: torch.Tensor) -> None:
        self.whole.load(weights)
        kept = self._legal[: len(weights)]
        self.starts.load(weights.cpu().where(kept, 0))

    def grown(self, capacity: int) -> StartTree:
        larger = StartTree(capacity, self.dtype, self.device)
        more = torch.zeros(larger.capacity - len(self._legal), dtype=torch.bool)
        larger.allow_only(torch.cat([self._legal, more]))
        larger.load(self.weights())
        return larger

    @property
    def any_legal(self) -> bool:
        """Whether a slice may begin anywhere, be its weight 0; looks at all leaves."""
        return bool(self._legal.any())

    @property
    def total(self) -> float:
        """The sum of the weights of legal starts."""
        return self.starts.total

    @property
    def minimum(self) -> float:
        """The smallest weight above 0 of any element."""
        return self.whole.minimum

    @property
    def maximum(self) -> float:
        """The largest weight of any element."""
        return self.whole.maximum
