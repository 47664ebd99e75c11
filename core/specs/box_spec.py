"""What Bounded and Unbounded share: a lower and an upper bound for every element."""

from __future__ import annotations

from abc import abstractmethod

import torch

from .boxes import ContinuousBox
from .leaf import LeafSpec

__all__ = ["BoxSpec", "type_limits"]


def type_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the largest finite number of an element type."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return info.min, info.max


class BoxSpec(LeafSpec):
    """Numbers of which each has a lower and an upper bound.

    Two of them are equal if their bounds are, so an Unbounded equals a Bounded over all finite numbers of its type.
    """

    @property
    @abstractmethod
    def low(self) -> torch.Tensor:
        """Least legal value of each element."""

    @property
    @abstractmethod
    def high(self) -> torch.Tensor:
        """Largest legal value of each element."""

    @property
    def space(self) -> ContinuousBox:
        return ContinuousBox(self.low, self.high)

    def _family(self) -> type[LeafSpec]:
        return BoxSpec

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoxSpec) or self.domain != other.domain:
            return False
        if (self._shape, self._device, self._dtype) != (other._shape, other._device, other._dtype):
            return False
        return self.space == other.space

    __hash__ = LeafSpec.__hash__
