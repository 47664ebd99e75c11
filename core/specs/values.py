"""Conversion of arguments to shapes, devices, element types and tensors."""

from __future__ import annotations

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


def as_shape(shape: ShapeLike) -> torch.Size:
    """Read a shape, in which -1 is a size not known; one dimension may be given as an int."""
    sizes = torch.Size([shape] if isinstance(shape, int) else [int(size) for size in shape])
    if any(size < -1 for size in sizes):
        raise UsageError(f"a shape has the sizes {list(sizes)}, expected are sizes from 0, or -1 for any")
    return sizes


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
        raise SpecTypeError(f"the element type is {dtype!r}, a torch.dtype or its name is expected")
    return found


def encoded(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of numbers, lists and arrays; SchemaError if `dtype` cannot hold them."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
        tensor = torch.stack(tuple(value))
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise SpecTypeError(f"a {type(value).__name__} of {array.dtype} was to be encoded, expected are numbers")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        tensor = torch.as_tensor(np.ascontiguousarray(array) if array.ndim else array.copy())
    cast = tensor.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex) and not _kept(cast, tensor):
        raise SchemaError(f"{value!r} was to be encoded as {dtype}, which cannot hold it")
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
