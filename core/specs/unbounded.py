"""Any number of an element type."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from .base import batched, concrete
from .bounded import BoxSpec, Domain, type_limits
from .values import DeviceLike, ShapeLike, SpecTypeError, as_dtype, as_int64, random_values, uniform_integers, whole


class Unbounded(BoxSpec):
    """Any tensor of a shape and an element type; an instance is an UnboundedContinuous or an UnboundedDiscrete.

    All values are members, NaN and infinity too. Draws are normal, or even over the whole range of an integer type.
    `domain="discrete"` makes a float type hold whole numbers only, as Bounded does; their draws are even as far out as
    the type has all of them.

    >>> import torch
    >>> from rbtool import Unbounded
    >>> Unbounded((3,), dtype=torch.uint8).is_in(torch.zeros(5, 3, dtype=torch.uint8))
    True
    """

    _DEFAULT_DTYPE: torch.dtype | None = None

    def __new__(
        cls,
        shape: ShapeLike = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        domain: Domain | None = None,
    ) -> Unbounded:
        if cls is not Unbounded:
            return object.__new__(cls)
        return object.__new__(_unbounded_class(as_dtype(dtype, torch.get_default_dtype()), domain))

    def __init__(
        self,
        shape: ShapeLike = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        domain: Domain | None = None,
    ) -> None:
        super().__init__(shape, device, dtype, self._DEFAULT_DTYPE or torch.get_default_dtype())
        own: Any = "discrete" if isinstance(self, UnboundedDiscrete) else None
        if not isinstance(self, _unbounded_class(self._dtype, domain or own)):
            hint = "Unbounded takes any type"
            raise UsageError(f"{type(self).__name__} is for other types than {self._dtype}, domain {domain}", hint=hint)
        self._is_real = self.domain == "continuous"
        self._is_whole = self._dtype.is_floating_point and not self._is_real

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
        size = batched(shape, self._shape)
        if self._is_real:  # the numbers of torch.randn, which takes twice the time for small tensors
            return torch.normal(0.0, 1.0, size, generator=generator, dtype=self._dtype, device=self._device)
        if self._is_whole:
            most = torch.tensor(int(2 / torch.finfo(self._dtype).eps), device=self._device)
            return uniform_integers(-most, most, size, generator).to(self._dtype)
        return random_values(size, self._dtype, self._device, generator)

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        return whole(value) if self._is_whole else _ALL

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        if self._is_whole:
            real = value.real if value.is_complex() else value
            return real.to(self._dtype).nan_to_num(0.0).round()
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
        return Unbounded(self._shape, self._device, dtype, domain="discrete" if self._stays_whole(dtype) else None)

    def _stays_whole(self, dtype: torch.dtype) -> bool:
        return self._is_whole and dtype.is_floating_point


_ALL = torch.ones((), dtype=torch.bool, device="cpu")


class UnboundedContinuous(Unbounded):
    """An Unbounded of real or complex numbers."""

    domain = "continuous"


class UnboundedDiscrete(Unbounded):
    """An Unbounded of integers, bools, or whole numbers of a float type; int64 by default."""

    domain = "discrete"
    _DEFAULT_DTYPE = torch.int64


def _unbounded_class(dtype: torch.dtype, domain: Domain | None) -> type[Unbounded]:
    if domain not in (None, "continuous", "discrete"):
        raise UsageError(f"domain is {domain!r}, expected 'continuous' or 'discrete'")
    real = dtype.is_floating_point or dtype.is_complex
    if domain == "continuous" and not real:
        raise UsageError(f"domain is 'continuous', but {dtype} holds whole numbers")
    if domain == "discrete" and dtype.is_complex:
        raise SpecTypeError(f"domain is 'discrete', but {dtype} is complex")
    return UnboundedContinuous if real and domain != "discrete" else UnboundedDiscrete
