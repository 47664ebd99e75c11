"""Specs of numbers, Bounded (between two bounds) and Unbounded (all of an element type), and random integers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ..errors import SchemaError, UsageError, suggests_keywords
from .base import (
    Box,
    DeviceLike,
    LeafSpec,
    ShapeLike,
    SpecTypeError,
    SpecValueError,
    as_dtype,
    batched,
    combinations,
    concrete,
    same_value,
)


class ContinuousBox(Box):
    """Numbers between two bounds, both included.

    The box of a Bounded shares the bounds of the spec: editing them in place or assigning them changes the spec.

    Args:
        low, high: the bounds.
        device: moves the bounds; by default they stay on their device.
    """

    __slots__ = ("_spec", "high", "low")  # slots hide the attributes of TorchRL's class, which may become a base

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, low: torch.Tensor, high: torch.Tensor, device: DeviceLike | None = None) -> None:
        self._spec: Bounded | None = None
        self.low, self.high = (bound if device is None else bound.to(device) for bound in (low, high))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("low", "high") and self._spec is not None:
            setattr(self._spec, f"_{name}", value)

    @property
    def device(self) -> torch.device:
        """The device of the bounds."""
        return self.low.device

    def to(self, dest: DeviceLike | torch.dtype) -> ContinuousBox:
        return ContinuousBox(self.low.to(dest), self.high.to(dest))

    def clone(self) -> ContinuousBox:
        return ContinuousBox(self.low.clone(), self.high.clone())

    def unbind(self, dim: int = 0) -> tuple[ContinuousBox, ...]:
        """Return the boxes along one dimension of the bounds."""
        return tuple(map(ContinuousBox, self.low.unbind(dim), self.high.unbind(dim)))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.low, self.high))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContinuousBox):
            return NotImplemented
        return _close(self.low, other.low) and _close(self.high, other.high)

    def __hash__(self) -> int:
        return hash((ContinuousBox, self.low.dtype, self.low.dim()))

    def __repr__(self) -> str:
        return f"ContinuousBox(low={_brief(self.low)}, high={_brief(self.high)})"


def _close(bound: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two bounds are equal, apart from rounding if they are floats."""
    rounds = bound.is_floating_point() and bound.device.type != "meta"
    if rounds and (bound.dtype, bound.device, bound.shape) == (other.dtype, other.device, other.shape):
        return torch.allclose(bound, other)
    return same_value(bound, other)


def _brief(bound: torch.Tensor) -> str:
    """Format a bound as one number if it is uniform, else by its shape."""
    if bound.numel() and bound.device.type != "meta" and bool((bound == bound.flatten()[0]).all()):
        return f"{bound.flatten()[0].item():g}" if bound.is_floating_point() else str(bound.flatten()[0].item())
    return f"Tensor(shape={bound.shape}, dtype={bound.dtype})"


def type_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest finite number of an element type."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return info.min, info.max


class BoxSpec(LeafSpec):
    """The base of specs of numbers, each with a lower and an upper bound.

    Two specs are equal if their bounds are, so an Unbounded equals a Bounded over all finite numbers of its type.
    """

    @property
    @abstractmethod
    def low(self) -> torch.Tensor:
        """The smallest legal value of each element."""

    @property
    @abstractmethod
    def high(self) -> torch.Tensor:
        """The largest legal value of each element."""

    def _box(self) -> ContinuousBox:
        return ContinuousBox(self.low, self.high)

    def _family(self) -> type[LeafSpec]:
        return BoxSpec

    def _equals(self, other: object) -> bool:
        if not isinstance(other, BoxSpec) or self.domain != other.domain:
            return False
        if (self._shape, self._device, self._dtype) != (other._shape, other._device, other._dtype):
            return False
        return _close(self.low, other.low) and _close(self.high, other.high)


Bound: TypeAlias = float | list[Any] | np.ndarray[Any, Any] | torch.Tensor
Domain: TypeAlias = Literal["continuous", "discrete"]


class Bounded(BoxSpec):
    """Numbers from `low` to `high`, both included; an instance is a BoundedContinuous or a BoundedDiscrete.

    Draws are uniform between finite bounds. If one bound is infinite they decrease exponentially from the other one; if
    both are, they are normal. NaN is not a member.

    Args:
        low, high: numbers, or arrays that broadcast to `shape`. They may be infinite. For the type bool they are
            clipped to 0 and 1.
        shape: by default the common shape of the bounds.
        device: by default torch's default device.
        dtype: by default torch's default float type. With an integer type, members are the whole numbers between the
            bounds.
        domain: `"discrete"` restricts a float type to whole numbers.

    Raises:
        UsageError (a ValueError): a bound is NaN, or `low` is above `high`.
        SpecValueError (a ValueError and a RuntimeError): the element type cannot hold a bound.

    >>> import torch
    >>> from rbtool import Bounded
    >>> Bounded(-1, 1, shape=(2,)).project(torch.tensor([3.0, 0.5]))
    tensor([1.0000, 0.5000])
    """

    _PARAMETERS = ("_low", "_high")
    _DEFAULT_DTYPE: torch.dtype | None = None
    _known: _Reach | None = None

    def __new__(
        cls,
        low: Bound | None = None,
        high: Bound | None = None,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        domain: Domain | None = None,
    ) -> Bounded:
        return object.__new__(
            _bounded_class(as_dtype(dtype, torch.get_default_dtype()), domain) if cls is Bounded else cls
        )

    def __init__(
        self,
        low: Bound,
        high: Bound,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        domain: Domain | None = None,
    ) -> None:
        least, largest = _as_tensor(low, "low"), _as_tensor(high, "high")
        if shape is None:
            if not least.dim() and not largest.dim():
                raise SchemaError(f"Bounded({low}, {high}) has no shape", hint="give shape=, or bounds that have one")
            shape = _broadcast(least, largest)
        super().__init__(shape, device, dtype, self._DEFAULT_DTYPE or torch.get_default_dtype())
        own: Any = "discrete" if isinstance(self, BoundedDiscrete) else None
        if not isinstance(self, _bounded_class(self._dtype, domain or own)):
            raise UsageError(f"{type(self).__name__} does not support {self._dtype} with domain {domain}")
        self._low, self._high = self._fitted(least, upper=False), self._fitted(largest, upper=True)
        low, high = self._low, self._high
        if not self._dtype.is_floating_point:
            low, high = low.to(torch.int64), high.to(torch.int64)  # torch cannot compare uint16
        if self._device.type != "meta" and not bool((low <= high).all()):
            raise UsageError(f"the lower bound {low} is above the upper bound {high}, or there is no number between")

    def _fitted(self, bound: torch.Tensor, *, upper: bool) -> torch.Tensor:
        """Copy a bound into this spec's element type and shape."""
        try:
            wide = bound.detach().expand(concrete(self._shape))
        except RuntimeError:
            raise SchemaError(
                f"a bound of shape {list(bound.shape)} does not broadcast to the spec's shape {list(self._shape)}"
            ) from None
        if wide.device.type == "meta":
            return torch.empty(wide.shape, dtype=self._dtype, device=self._device)
        if wide.is_floating_point() and bool(wide.isnan().any() | (wide == (-math.inf if upper else math.inf)).any()):
            raise UsageError(f"the {'upper' if upper else 'lower'} bound is {bound.tolist()}, expected numbers")
        if self.domain == "discrete" and wide.is_floating_point():
            wide = wide.floor() if upper else wide.ceil()
        if not self._dtype.is_floating_point:
            wide = _saturated(wide, self._dtype)
        return wide.to(self._device, self._dtype, copy=True, memory_format=torch.contiguous_format)

    @property
    def low(self) -> torch.Tensor:
        return self._low

    @property
    def high(self) -> torch.Tensor:
        return self._high

    def _box(self) -> ContinuousBox:
        box = super()._box()
        box._spec = self
        return box

    def _takes(self, box: Any) -> bool:
        if isinstance(box, ContinuousBox):
            self._low, self._high = box.low, box.high
        return isinstance(box, ContinuousBox)

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        reach = self._reach()
        if self.domain == "discrete":
            drawn = self._drawn_integers(reach, size, generator)
            if not self._dtype.is_floating_point or self._device.type == "meta":
                return drawn
            return drawn.clamp_(self._low, self._high)  # bounds may exceed the range of `_integer_bounds`
        if not reach.is_finite or self._device.type == "meta":
            return self._drawn_widely(reach, size, generator)
        if self._dtype in _DRAWN:
            return torch.lerp(self._low, self._high, _evenly(size, self._dtype, self._device, generator))
        part = _evenly(size, torch.float32, self._device, generator)  # rounding cannot exceed a bound
        return torch.lerp(self._low.float(), self._high.float(), part).to(self._dtype)

    def _drawn_integers(self, reach: _Reach, size: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        if reach.common is not None and self._dtype in _RANDINT:
            low, high = reach.common
            return torch.randint(low, high + 1, size, dtype=self._dtype, device=self._device, generator=generator)
        if reach.counts is not None and reach.first is not None and self._device.type != "mps":  # mps has no float64
            return small_integers(reach.counts, size, torch.int64, generator).add_(reach.first).to(self._dtype)
        return uniform_integers(*self._integer_bounds(), size, generator).to(self._dtype)

    def _reach(self) -> _Reach:
        """Return the properties of the bounds that draws depend on. They are cached until the bounds change."""
        known, low, high = self._known, self._low, self._high
        if (
            known is None
            or known.of[0] is not low
            or known.of[1] is not high
            or (known.of[2:] != (low._version, high._version))
        ):
            known = self._known = self._found_reach()
        return known

    def _found_reach(self) -> _Reach:
        low, high = self._low, self._high
        of = low, high, low._version, high._version
        if low.device.type == "meta":
            return _Reach(of)
        if self.domain == "continuous":
            wide = torch.promote_types(self._dtype, torch.float32)
            finite = bool((high.to(wide) - low.to(wide)).isfinite().all())
            sides = bool(low.isinf().all()), bool(high.isinf().all())
            closed = bool(low.isfinite().all()), bool(high.isfinite().all())
            one: Any = "high" if closed[0] and sides[1] else "low" if sides[0] and closed[1] else None
            return _Reach(of, is_finite=finite, open_side=one)
        first, last = self._integer_bounds()
        counts = last - first + 1  # wraps around for more than 2**63
        if not bool(((counts > 0) & (counts <= FEWER_THAN_FLOATS)).all()):
            return _Reach(of)
        common = None
        if first.numel() and bool((first == first.flatten()[0]).all() & (last == last.flatten()[0]).all()):
            common = int(first.flatten()[0]), int(last.flatten()[0])
        # torch.randint takes an exclusive upper bound, which int64 cannot represent for its largest number.
        few = common is not None and common[1] - common[0] < FEW and common[1] < _HIGHEST
        return _Reach(of, first=first, counts=counts, common=common if few else None)

    def _drawn_widely(self, reach: _Reach, size: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        """Draw real numbers if a bound is infinite, or if the difference of the bounds could overflow."""
        wide = torch.float64 if self._dtype is torch.float64 else torch.float32
        low, high = self._low.to(wide), self._high.to(wide)
        if reach.open_side:  # the same bound is infinite for all elements
            step = torch.empty(size, dtype=wide, device=self._device).exponential_(generator=generator)
            return (low + step if reach.open_side == "high" else high - step).to(self._dtype)
        part = _evenly(size, wide, self._device, generator)
        drawn = low * (1 - part) + high * part  # low + part * (high - low) could overflow
        open_low, open_high = low.isinf(), high.isinf()
        if bool((open_low | open_high).any()):
            step = torch.empty_like(part).exponential_(generator=generator)
            normal = torch.randn(size, dtype=wide, device=self._device, generator=generator)
            one_sided = torch.where(open_low, high - step, low + step)
            drawn = torch.where(open_low & open_high, normal, torch.where(open_low | open_high, one_sided, drawn))
        return drawn.to(self._dtype).clamp(self._low, self._high)  # rounding may exceed a bound

    def _integer_bounds(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bounds as int64; for a float type, limited to the range in which all whole numbers are exact."""
        low, high = (bound.to(device or self._device) for bound in (self._low, self._high))
        if self._dtype.is_floating_point:
            most = 2 / torch.finfo(self._dtype).eps
            low, high = (bound.double().clamp(-most, most) for bound in (low, high))
        return low.to(torch.int64), high.to(torch.int64)

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        if self._compares(value):
            inside = (value >= self._low) & (value <= self._high)
            return inside & whole(value) if self.domain == "discrete" and self._dtype.is_floating_point else inside
        if not self._dtype.is_floating_point:
            low, high = self._integer_bounds(value.device)
            return (value.to(torch.int64) >= low) & (value.to(torch.int64) <= high)
        inside = (value >= self._low.to(value.device)) & (value <= self._high.to(value.device))
        return inside & whole(value) if self.domain == "discrete" else inside

    def _compares(self, value: torch.Tensor) -> bool:
        """Return whether torch can compare the value with the bounds directly."""
        return value.dtype == self._dtype and value.device == self._device and self._dtype not in _NOT_COMPARED

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        if self._compares(value) and self._dtype is not torch.bool:
            if not self._dtype.is_floating_point:
                return value.clamp(self._low, self._high)
            if self.domain == "continuous":
                return value.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf).clamp_(self._low, self._high)
        if not self._dtype.is_floating_point:
            return nearest_integers(value, *self._integer_bounds(value.device)).to(self._dtype)
        low, high = self._low.to(value.device), self._high.to(value.device)
        wide = value.double().nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
        wide = wide.round() if self.domain == "discrete" else wide
        return wide.clamp(low.double(), high.double()).to(self._dtype).clamp(low, high)

    def cardinality(self) -> float:
        """Count the members: the product over all elements; infinity for real numbers."""
        return math.prod(self._counts()) if self.domain == "discrete" else math.inf

    def _counts(self) -> list[int]:
        low, high = self._integer_bounds()
        return [last - first + 1 for first, last in zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)]

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List all members of a discrete domain along dimension 0; UndefinedForSpecError for real numbers."""
        if self.domain != "discrete":
            return super().enumerate(use_mask)  # type: ignore[no-any-return]  # which raises
        low, _ = self._integer_bounds()
        rows = combinations(self._counts(), self._device)
        return (rows.reshape(-1, *low.shape) + low).to(self._dtype)

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        domain = self.domain if dtype.is_floating_point and self._dtype.is_floating_point else None
        return Bounded(self._low, self._high, self._shape, self._device, dtype, domain=domain)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_known": None}
        if self._dtype not in (torch.uint16, torch.uint32):
            return state
        # torch 2.13 cannot pickle tensors of these types.
        return {**state, "_low": self._low.to(torch.int64), "_high": self._high.to(torch.int64)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._low, self._high = self._low.to(self._dtype), self._high.to(self._dtype)


@dataclass(frozen=True, slots=True)
class _Reach:
    """Properties of two bounds that draws depend on.

    - `of`: the bounds that they were computed from, and the versions of these tensors, which change with edits.
    - `is_finite`: the difference of the bounds is finite for all elements.
    - `open_side`: the bound that is infinite for all elements, if the other one is finite for all.
    - `first`, `counts`: the smallest integer and the number of integers of each element, int64; None if there are more
      than `FEWER_THAN_FLOATS`.
    - `common`: the smallest and the largest integer, if they are the same for all elements and there are few.
    """

    of: tuple[torch.Tensor, torch.Tensor, int, int]
    is_finite: bool = False
    open_side: Literal["low", "high"] | None = None
    first: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    common: tuple[int, int] | None = None


class BoundedContinuous(Bounded):
    """A Bounded of real numbers."""

    domain = "continuous"


class BoundedDiscrete(Bounded):
    """A Bounded of integers; int64 by default."""

    domain = "discrete"
    _DEFAULT_DTYPE = torch.int64


WHOLE_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""The integer types that torch compares and clamps."""
_DRAWN = (torch.float32, torch.float64)
_RANDINT = (torch.bool, *WHOLE_TYPES)
_NOT_COMPARED = (torch.uint16, torch.uint32)


def _evenly(
    size: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    if generator is None:
        return torch.rand(size, dtype=dtype, device=device)
    return torch.rand(size, dtype=dtype, device=device, generator=generator)


def _is_real(dtype: torch.dtype, domain: Domain | None) -> bool:
    """Return whether the values of an element type and domain are real numbers; False if only whole ones are legal."""
    if domain not in (None, "continuous", "discrete"):
        raise UsageError(f"domain is {domain!r}, expected 'continuous' or 'discrete'")
    real = dtype.is_floating_point or dtype.is_complex
    if domain == "continuous" and not real:
        raise UsageError(f"domain is 'continuous', but {dtype} holds whole numbers")
    if domain == "discrete" and dtype.is_complex:
        raise SpecTypeError(f"domain is 'discrete', but {dtype} is complex")
    return real and domain != "discrete"


def _bounded_class(dtype: torch.dtype, domain: Domain | None) -> type[Bounded]:
    if dtype.is_complex or dtype is torch.uint64:
        raise SpecTypeError(f"dtype is {dtype}, expected one whose values can be compared with bounds")
    return BoundedContinuous if _is_real(dtype, domain) else BoundedDiscrete


def _as_tensor(bound: Any, name: str) -> torch.Tensor:
    if isinstance(bound, torch.Tensor):
        return bound
    array = np.asarray(bound)
    if array.dtype.kind not in "biuf":
        raise SpecTypeError(f"{name} is {bound!r}, expected a number or an array of numbers")
    return torch.as_tensor(array.astype(f"{array.dtype.kind}{array.dtype.itemsize}"))  # torch takes no ulonglong


def _broadcast(low: torch.Tensor, high: torch.Tensor) -> torch.Size:
    try:
        return torch.Size(torch.broadcast_shapes(low.shape, high.shape))
    except RuntimeError:
        shapes = f"{list(low.shape)} and {list(high.shape)}"
        raise SchemaError(f"the bounds have the shapes {shapes}, which do not go together") from None


def _saturated(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bound as int64, infinity as the type's limit; SpecValueError for finite numbers beyond the limits."""
    least, largest = (int(limit) for limit in type_limits(dtype))
    if bound.is_floating_point():
        wide = bound.double()
        finite = wide.isfinite()
        beyond = finite & ((wide < least) | (wide > largest))
        inner = torch.where(finite & (wide < largest), wide, 0.0).to(torch.int64)
        whole_bound = torch.where(wide >= largest, largest, torch.where(wide <= least, least, inner))
    else:
        whole_bound = as_int64(bound)
        beyond = (whole_bound < least) | (whole_bound > largest)
        if bound.dtype is torch.uint64:
            beyond |= bound.view(torch.int64) < 0  # torch cannot compare uint64
    if dtype is torch.bool:
        return whole_bound.clamp(least, largest)
    if bool(beyond.any()):
        raise SpecValueError(f"a bound is beyond the range of {dtype}, {least} to {largest}")
    return whole_bound


class Unbounded(BoxSpec):
    """Any tensor of a shape and an element type; an instance is an UnboundedContinuous or an UnboundedDiscrete.

    All values are members, including NaN and infinity. Draws are normally distributed; for an integer type, they are
    uniform over its whole range.

    Args:
        shape: the shape of a value.
        device: by default torch's default device.
        dtype: by default torch's default float type.
        domain: `"discrete"` restricts a float type to whole numbers; draws are then uniform over the range in which the
            type represents all whole numbers.

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
            raise UsageError(f"{type(self).__name__} does not support {self._dtype} with domain {domain}", hint=hint)
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
        if self._is_real:  # the same numbers as torch.randn, in half the time for small tensors
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
    return UnboundedContinuous if _is_real(dtype, domain) else UnboundedDiscrete


_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


MANY = 2**40
"""Up to this range, 63 random bits modulo the range differ from a uniform distribution by less than 2**-23."""
FEW = 2**16
"""Up to this many integers are drawn by torch's 32-bit modulus, which is uniform up to an error below 2**-16."""
FEWER_THAN_FLOATS = 2**30
"""Up to this many integers are drawn by scaling a float64."""


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return which elements are integers; bool."""
    if not value.is_floating_point():
        return torch.ones_like(value, dtype=torch.bool)
    return value == value.floor()


def uniform_integers(
    low: torch.Tensor, high: torch.Tensor, shape: torch.Size, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw integers from `low` to `high` (int64, included), which broadcast to `shape`.

    Ranges may be as wide as int64. Ranges of up to `MANY` integers use a modulus. Wider ranges use rejection: random
    bits are masked to the next power of two, and numbers outside of the range are drawn again.
    """
    low, high = low.expand(shape), high.expand(shape)
    span = high - low + 1  # wraps around if the range is wider than 2**63
    narrow = (span > 0) & (span <= MANY)
    bits = _random_bits(shape, low.device, generator)
    drawn = low + (bits & _HIGHEST) % torch.where(narrow, span, 1)
    if bool(narrow.all()):
        return drawn
    drawn = torch.where(narrow, drawn, _scaled(bits, span) + low)
    while bool((outside := (drawn < low) | (drawn > high)).any()):
        again = _scaled(_random_bits(shape, low.device, generator), span) + low
        drawn = torch.where(outside, again, drawn)
    return drawn


def _random_bits(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device).random_(_LOWEST, None, generator=generator)


def _scaled(bits: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Mask 64 random bits to a power of two that is at least `span`, so that less than 3 of 4 draws are rejected.

    A negative span is one above 2**63, and 0 stands for 2**64: all bits are kept.
    """
    needed = span.clamp(min=1).double().log2().floor().add(1).clamp(max=63).long()
    return bits & torch.where(span > 0, (1 << needed) - 1, -1)


def random_values(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw uniformly from the whole range of an integer type, or from the booleans."""
    if dtype is torch.int64:
        return torch.empty(shape, dtype=dtype, device=device).random_(_LOWEST, None, generator=generator)
    count = math.prod(shape)
    if count <= _FEW_ELEMENTS and dtype in _RANGES:
        low, high = _RANGES[dtype]
        return torch.randint(low, high, shape, dtype=dtype, device=device, generator=generator)
    words = torch.empty((count * dtype.itemsize + 7) // 8, dtype=torch.int64, device=device)
    values = words.random_(_LOWEST, None, generator=generator).view(torch.uint8 if dtype is torch.bool else dtype)
    values = values if len(values) == count else values[:count]
    return (values.bitwise_and_(1).view(torch.bool) if dtype is torch.bool else values).view(shape)


_TRUNCATED = (torch.int64, torch.int32, torch.int16)
_FEW_ELEMENTS = 256  # above this, drawing 64 bits for several elements at once is faster, despite an additional call
_RANGES = {
    torch.bool: (0, 2),
    torch.uint8: (0, 2**8),
    torch.int8: (-(2**7), 2**7),
    torch.int16: (-(2**15), 2**15),
    torch.int32: (-(2**31), 2**31),
}


def small_integers(
    counts: torch.Tensor, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw integers below `counts`, which broadcast to `shape` and are at most `FEWER_THAN_FLOATS`.

    A random fraction of 53 bits times a count is always below the count, even after rounding.
    """
    part = torch.rand(shape, dtype=torch.float64, device=counts.device, generator=generator)
    drawn = part.mul_(counts)
    return drawn.to(dtype) if dtype in _TRUNCATED else drawn.floor_().to(dtype)


def as_int64(value: torch.Tensor) -> torch.Tensor:
    """Return whole numbers as int64; uint64 values that are too large become the largest int64."""
    if value.dtype is torch.uint64:
        found = value.view(torch.int64)
        return torch.where(found < 0, _HIGHEST, found)
    return value.to(torch.int64)


def nearest_integers(value: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the nearest int64 between `low` and `high` for each element; NaN counts as zero."""
    if not value.is_floating_point():
        return torch.maximum(torch.minimum(as_int64(value), high), low)
    wide = value.double().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
    below, above = wide <= low.double(), wide >= high.double()
    middle = torch.where(below | above, 0.0, wide).round().to(torch.int64)
    found = torch.where(below, low, torch.where(above, high, middle))
    return torch.maximum(torch.minimum(found, high), low)
