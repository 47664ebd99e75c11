"""What `spec.space` returns: the set of values of a spec, without its shape, device and element type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .values import same_value

__all__ = ["BinaryBox", "Box", "BoxList", "CategoricalBox", "ContinuousBox"]


class Box:
    """A set of values."""


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousBox(Box):
    """Numbers between two bounds, both included. The bounds are the spec's own tensors: an edit in place is seen."""

    low: torch.Tensor
    high: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.low, self.high))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContinuousBox):
            return NotImplemented
        return same_value(self.low, other.low) and same_value(self.high, other.high)

    def __hash__(self) -> int:
        return hash((ContinuousBox, self.low.dtype, self.low.dim()))

    def __repr__(self) -> str:
        return f"ContinuousBox(low={_brief(self.low)}, high={_brief(self.high)})"


@dataclass(frozen=True, slots=True)
class CategoricalBox(Box):
    """The numbers 0 to `n - 1`; -1 while their count is open."""

    n: int


@dataclass(frozen=True, slots=True)
class BinaryBox(Box):
    """Rows of `n` bits."""

    n: int


@dataclass(frozen=True, slots=True)
class BoxList(Box):
    """One set of values for each column."""

    boxes: tuple[Box, ...]

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Box]:
        return iter(self.boxes)


def _brief(bound: torch.Tensor) -> str:
    """Format a bound as one number if it is uniform, else by its shape."""
    if bound.numel() and bound.device.type != "meta" and bool((bound == bound.flatten()[0]).all()):
        return f"{bound.flatten()[0].item():g}" if bound.is_floating_point() else str(bound.flatten()[0].item())
    return f"Tensor(shape={bound.shape}, dtype={bound.dtype})"
