"""Values of specs: arguments as shapes, devices, element types and tensors; sets of values; draws of integers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..errors import SchemaError, UsageError


class LockedSpecError(UsageError, RuntimeError):
    """A change of a locked Composite."""


class NotInSpecError(SchemaError, AssertionError):
    """A value is not a member of the spec it is checked against."""


class SpecTypeError(SchemaError, TypeError):
    """A value, or an argument, is of another type than the spec can take."""


class UndefinedForSpecError(UsageError, NotImplementedError):
    """An operation that this kind of spec does not define, such as counting real numbers."""


ShapeLike: TypeAlias = int | Iterable[int]
DeviceLike: TypeAlias = torch.device | str | int
DEVICE_TYPING = DeviceLike
"""TorchRL's name of what a device may be given as."""


_SCALAR = torch.Size()


def as_shape(shape: ShapeLike) -> torch.Size:
    """Read a shape, in which -1 is a size not known; one dimension may be given as an int.

    SpecTypeError (a TypeError) for sizes that are no whole numbers, UsageError (a ValueError) for those below -1.
    """
    if isinstance(shape, tuple) and not shape:
        return _SCALAR
    try:
        sizes = torch.Size([shape] if isinstance(shape, int) else shape)
    except TypeError:
        sizes = torch.Size([as_count(size, "a size") for size in (shape if isinstance(shape, Iterable) else [shape])])
    if min(sizes, default=0) < -1:
        raise UsageError(f"a shape has the sizes {list(sizes)}, expected sizes from 0, or -1 for any")
    return sizes


def as_count(number: Any, name: str) -> int:
    """Read a whole number, of numpy and torch too; SpecTypeError (a TypeError) for floats, bools and text."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise SpecTypeError(f"{name} is {number!r}, expected a whole number")
    try:
        return operator.index(number)
    except TypeError:  # tensors of floats, and arrays of several numbers
        raise SpecTypeError(f"{name} is {number!r}, expected a whole number") from None


def as_device(device: DeviceLike | None) -> torch.device:
    """Read a device; None is torch's default, and "cuda" the current one of them."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def as_dtype(dtype: torch.dtype | str | None, default: torch.dtype) -> torch.dtype:
    """Read an element type, also from its name with or without `torch.`."""
    if dtype is None:
        return default
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise SpecTypeError(f"the element type is {dtype!r}, expected a torch.dtype or its name")
    return found


def encoded(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of numbers, lists and arrays; SchemaError if `dtype` cannot hold them."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
        tensor = torch.stack(tuple(value))
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise SpecTypeError(f"cannot encode a {type(value).__name__} of {array.dtype}, expected numbers")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        tensor = torch.as_tensor(np.ascontiguousarray(array) if array.ndim else array.copy())
    cast = tensor.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex) and not _kept(cast, tensor):
        raise SchemaError(f"{value!r} does not fit {dtype}")
    return cast.to(device)


def _kept(cast: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a cast to integers keeps all values."""
    return bool((cast.to(tensor.dtype) == tensor).all())


def to_array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy to numpy where the memory cannot be shared; bfloat16, which numpy lacks, becomes float32."""
    found = value.detach().cpu()
    array: np.ndarray[Any, Any] = (found.float() if found.dtype is torch.bfloat16 else found).numpy()
    return array


def fresh(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy a tensor, once where it repeats itself along a dimension."""
    core = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            core = core.narrow(dim, 0, 1)
    return core.to(device or tensor.device, copy=True).expand(tensor.shape)


def same_value(one: Any, other: Any) -> bool:
    """Compare the data of specs: arrays and tensors by type, shape and contents, sequences by element."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
            return False
        if one.dtype in (torch.uint16, torch.uint32):  # which torch cannot compare
            one, other = one.to(torch.int64), other.to(torch.int64)
        return one.device.type == "meta" or torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(same_value, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # such as an object full of arrays: the same only if it is the same
        return False


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


_MOST = 2**26  # numbers in one listing; more is asked for by mistake


def combinations(counts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """List the rows of numbers below `counts`, the last column changing fastest; int64 of shape `[rows, columns]`.

    UsageError if that would be more than 2**26 numbers.
    """
    rows = math.prod(counts)
    if rows * max(len(counts), 1) > _MOST:
        raise UsageError(f"{rows} values of {len(counts)} numbers each are too many to list")
    columns, repeats = [], rows
    for count in counts:
        repeats //= max(count, 1)
        columns.append(torch.arange(rows, device=device).div(max(repeats, 1), rounding_mode="floor") % max(count, 1))
    return torch.stack(columns, -1) if columns else torch.zeros(rows, 0, dtype=torch.int64, device=device)


_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
MANY = 2**40
"""The modulus of up to as many and 63 random bits is off from even by less than 2**-23."""
FEW = 2**16
"""Up to as many categories are drawn by torch's own modulus of 32 bits, which is off from even by less than 2**-16."""
FEWER_THAN_FLOATS = 2**30
"""Up to as many categories are drawn by a float64."""
_SMALL = 2**14  # numbers that are drawn at once to choose among legal categories


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return which elements are integers; bool."""
    if not value.is_floating_point():
        return torch.ones_like(value, dtype=torch.bool)
    return value == value.floor()


def uniform_integers(
    low: torch.Tensor, high: torch.Tensor, shape: torch.Size, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw from `low` to `high`, both included and int64, element by element; they broadcast to `shape`.

    Ranges may be as wide as int64 itself: wide ones are drawn again until they fall inside.
    """
    low, high = low.expand(shape), high.expand(shape)
    span = high - low + 1  # wraps around where the range is wider than 2**63
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


WHOLE_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""The integer types that torch compares and clamps."""

_TRUNCATED = (torch.int64, torch.int32, torch.int16)


def random_values(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw evenly from the whole range of an integer type, or bools."""
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


_FEW_ELEMENTS = 256  # for more, one draw for several elements is faster than one call less
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
    """Draw below `counts` element by element, which broadcast to `shape` and are at most `FEWER_THAN_FLOATS`.

    The product with 53 random bits is below the count: it is rounded to a number that exists below it.
    """
    part = torch.rand(shape, dtype=torch.float64, device=counts.device, generator=generator)
    drawn = part.mul_(counts)
    return drawn.to(dtype) if dtype in _TRUNCATED else drawn.floor_().to(dtype)


def _random_bits(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device).random_(_LOWEST, None, generator=generator)


def _scaled(bits: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Cut 64 random bits down to as many as a span needs, or one more; the span is unsigned, and 0 is 2**64."""
    needed = span.clamp(min=1).double().log2().floor().add(1).clamp(max=63).long()
    return bits & torch.where(span > 0, (1 << needed) - 1, -1)


def as_int64(value: torch.Tensor) -> torch.Tensor:
    """Return whole numbers as int64; those of a uint64 that are too large become the largest."""
    if value.dtype is torch.uint64:
        found = value.view(torch.int64)
        return torch.where(found < 0, _HIGHEST, found)
    return value.to(torch.int64)


def nearest_integers(value: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the int64 between `low` and `high` next to each element; NaN counts as zero."""
    if not value.is_floating_point():
        return torch.maximum(torch.minimum(as_int64(value), high), low)
    wide = value.double().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
    below, above = wide <= low.double(), wide >= high.double()
    middle = torch.where(below | above, 0.0, wide).round().to(torch.int64)
    found = torch.where(below, low, torch.where(above, high, middle))
    return torch.maximum(torch.minimum(found, high), low)


def draw_categories(
    counts: torch.Tensor, allowed: torch.Tensor | None, shape: torch.Size, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw evenly among the allowed categories of each element; int64 of `shape`."""
    if allowed is None:
        return uniform_integers(torch.zeros_like(counts), counts - 1, shape, generator)
    size = (*shape, allowed.shape[-1])
    if math.prod(size) <= _SMALL:  # the largest of even draws: fewer calls, but a draw for every category
        draws = torch.rand(size, device=allowed.device, generator=generator)
        return draws.masked_fill_(~allowed, -1.0).argmax(-1)
    in_front = allowed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    numbers = allowed.sum(-1)
    return looked_up(in_front, uniform_integers(torch.zeros_like(numbers), numbers - 1, shape, generator))


def mask_over(
    mask: torch.Tensor, shape: Sequence[int], counts: Sequence[int], device: torch.device | None
) -> torch.Tensor:
    """Return a mask of legal categories as a bool tensor of its own, of this shape.

    `counts` are the categories of each column; those of all columns are along the last dimension. UsageError for a
    mask that does not broadcast to the shape, and for one without a legal category in a column.
    """
    found = torch.as_tensor(mask, dtype=torch.bool, device=device)
    try:
        wide = found.expand(*shape)
    except RuntimeError:
        raise UsageError(f"the mask has the shape {list(found.shape)}, expected {list(shape)}") from None
    if not all(bool(column.any(-1).all()) for column in wide.split(list(counts), -1)):
        raise UsageError("the mask leaves an element without a legal category")
    return wide.clone(memory_format=torch.contiguous_format)


def are_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return which elements are the number of an existing, allowed category; bool."""
    counts, allowed = counts.to(value.device), None if allowed is None else allowed.to(value.device)
    safe = value.nan_to_num(-1.0, posinf=-1.0, neginf=-1.0) if value.is_floating_point() else value
    number = as_int64(safe)
    found = whole(safe) & (number >= 0) & (number < counts)
    if allowed is None:
        return found
    return found & looked_up(allowed, number.clamp(0, allowed.shape[-1] - 1))


def nearest_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return the nearest category of each element, the lower of two as near; int64."""
    counts, allowed = counts.to(value.device), None if allowed is None else allowed.to(value.device)
    number = nearest_integers(value, torch.zeros_like(counts), counts - 1)
    if allowed is None:
        return number
    places = torch.arange(allowed.shape[-1], device=allowed.device)
    distance = (places[:, None] - places).abs()
    nearest = distance.where(allowed.unsqueeze(-2), allowed.shape[-1]).argmin(-1)
    return looked_up(nearest, number)


def looked_up(table: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return `table[..., number]` for each element."""
    return table.expand(*number.shape, table.shape[-1]).gather(-1, number.unsqueeze(-1)).squeeze(-1)
