"""Numbers without bounds."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from .base import concrete
from .box_spec import BoxSpec, type_limits
from .integers import as_int64
from .values import DeviceLike, ShapeLike, as_dtype

__all__ = ["Unbounded", "UnboundedContinuous", "UnboundedDiscrete"]


class Unbounded(BoxSpec):
    """Any tensor of a shape and an element type; an instance is an UnboundedContinuous or an UnboundedDiscrete.

    All values are members, NaN and infinity too. Draws are normal, or even over the whole range of an integer type.

    >>> import torch
    >>> from rbtool.core.specs import Unbounded
    >>> Unbounded((3,), dtype=torch.uint8).is_in(torch.zeros(5, 3, dtype=torch.uint8))
    True
    """

    _DEFAULT_DTYPE: torch.dtype | None = None

    def __new__(
        cls,
        shape: ShapeLike = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> Unbounded:
        return object.__new__(_kind(as_dtype(dtype, torch.get_default_dtype())) if cls is Unbounded else cls)

    def __init__(
        self,
        shape: ShapeLike = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(shape, device, dtype, self._DEFAULT_DTYPE or torch.get_default_dtype())
        if not isinstance(self, _kind(self._dtype)):
            raise UsageError(f"{type(self).__name__} was asked for with {self._dtype}", hint="Unbounded takes any type")

    @property
    def low(self) -> torch.Tensor:
        return self._limit(0)

    @property
    def high(self) -> torch.Tensor:
        return self._limit(1)

    def _limit(self, which: int) -> torch.Tensor:
        limit = type_limits(self._dtype)[which]
        return torch.tensor(limit, dtype=self._dtype, device=self._device).expand(concrete(self._shape))

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = torch.Size([*shape, *concrete(self._shape)])
        if self._dtype.is_floating_point or self._dtype.is_complex:
            return torch.randn(size, dtype=self._dtype, device=self._device, generator=generator)
        bits = torch.empty(size, dtype=torch.int64, device=self._device).random_(-(2**63), None, generator=generator)
        return bits.bitwise_and(1).to(torch.bool) if self._dtype is torch.bool else _low_bits(bits, self._dtype)

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        return torch.ones((), dtype=torch.bool)

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and not (self._dtype.is_floating_point or self._dtype.is_complex):
            least, largest = type_limits(self._dtype)
            wide = value.double().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf).round()
            inside = (wide > least) & (wide < largest)
            limits = torch.where(wide >= largest, self._scalar(largest), self._scalar(least))
            return torch.where(inside, torch.where(inside, wide, 0.0).to(self._dtype), limits)
        if not value.is_floating_point() and not self._dtype.is_floating_point and self._dtype is not torch.bool:
            least, largest = (max(-(2**63), int(limit)) for limit in type_limits(self._dtype))
            return as_int64(value).clamp(least, min(largest, 2**63 - 1)).to(self._dtype)
        return value.to(self._dtype)

    def _scalar(self, limit: float) -> torch.Tensor:
        return torch.tensor(limit, dtype=self._dtype)

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        return Unbounded(self._shape, self._device, dtype)


class UnboundedContinuous(Unbounded):
    """An Unbounded of real or complex numbers."""

    domain = "continuous"


class UnboundedDiscrete(Unbounded):
    """An Unbounded of integers or bools; int64 by default."""

    domain = "discrete"
    _DEFAULT_DTYPE = torch.int64


def _kind(dtype: torch.dtype) -> type[Unbounded]:
    return UnboundedContinuous if dtype.is_floating_point or dtype.is_complex else UnboundedDiscrete


def _low_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Take as many random bits as the type has; casting to fewer keeps the lowest."""
    return bits.view(dtype) if dtype is torch.uint64 else bits.to(dtype)
