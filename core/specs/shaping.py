"""Changes of shape, computed once and applied alike to a spec's shape, its bounds, its masks and its children.

A change acts on the leading dimensions of a tensor and leaves the trailing ones unchanged. Because the shape of an
entry of a Composite begins with the shape of the Composite, the same change fits both.

A dimension of unknown size is written as -1. To change such a shape, the unknown size is replaced by a very large
number (in an expanded view, which takes no memory), and dimensions of that size in the result are unknown again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from ..errors import UsageError

Names: TypeAlias = list[str | None]

_UNKNOWN = 1_048_583  # a prime that no dimension has as its size
_UNKNOWN_OF_MANY = 1_009  # a smaller one for shapes with several unknown sizes, whose product must not overflow


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A change of shape: `apply` changes a tensor, `names` the names of its dimensions (None: unknown)."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    names: Callable[[Names], Names | None]
    unknown: bool = False
    """Whether the change adds dimensions of unknown size."""


def changed_shape(shape: torch.Size, change: ShapeChange) -> torch.Size:
    """Return the shape that results from applying a change to a shape."""
    probe = torch.zeros((), dtype=torch.bool, device="cpu").expand(_sized(shape))
    unknown = change.unknown or -1 in shape
    return torch.Size([-1 if unknown and size > _UNKNOWN // 2 else size for size in change.apply(probe).shape])


def changed_parameter(parameter: torch.Tensor, shape: torch.Size, change: ShapeChange, new: torch.Size) -> torch.Tensor:
    """Apply a change to a parameter of a spec, a tensor with size 1 where the spec's size is unknown."""
    changed = change.apply(parameter.expand([*_sized(shape), *parameter.shape[len(shape) :]]))
    for dim, size in enumerate(new):
        if size == -1:
            changed = changed.narrow(dim, 0, 1)
    return changed


def expansion(shape: torch.Size, sizes: Sequence[int]) -> ShapeChange:
    """Repeat along new leading dimensions and along dimensions of size 1.

    -1 keeps the size of an existing dimension; as a new dimension it is one of unknown size.
    """
    added = len(sizes) - len(shape)
    target = [*sizes[: max(added, 0)]]
    for size, own in zip(sizes[max(added, 0) :], shape, strict=False):
        target.append(own if size == -1 else size)
    fits = all(size == own or own == 1 for size, own in zip(target[max(added, 0) :], shape, strict=False))
    if added < 0 or not fits or any(size < -1 for size in target):
        raise UsageError(f"a spec of shape {list(shape)} cannot be expanded to {list(sizes)}")
    kept = [-1 if size == own else size for size, own in zip(target[max(added, 0) :], shape, strict=False)]
    wide, count = [*_sized(target[:added]), *kept], len(shape)
    return ShapeChange(
        lambda tensor: tensor.expand([*wide, *[-1] * (tensor.dim() - count)]),
        lambda names: [None] * added + names,
        unknown=-1 in target,
    )


def squeezing(shape: torch.Size, dim: int | None = None) -> ShapeChange:
    """Remove one dimension if its size is 1, or all dimensions of size 1."""
    dims = range(len(shape)) if dim is None else [normal_dim(dim, len(shape))]
    gone = tuple(number for number in dims if shape[number] == 1)
    return ShapeChange(
        lambda tensor: tensor.squeeze(gone) if gone else tensor,
        lambda names: [name for number, name in enumerate(names) if number not in gone],
    )


def unsqueezing(shape: torch.Size, dim: int) -> ShapeChange:
    """Insert a dimension of size 1."""
    place = normal_dim(dim, len(shape) + 1)
    return ShapeChange(lambda tensor: tensor.unsqueeze(place), lambda names: [*names[:place], None, *names[place:]])


def reshaping(shape: torch.Size, sizes: Sequence[int]) -> ShapeChange:
    """Arrange the same elements in another shape, in which one size may be -1."""
    _expect_known(shape, f"reshaped to {list(sizes)}")
    new, count = _solved(sizes, math.prod(shape), f"a spec of shape {list(shape)}"), len(shape)
    return ShapeChange(lambda tensor: tensor.reshape([*new, *tensor.shape[count:]]), lambda _: None)


def flattening(shape: torch.Size, start: int, end: int) -> ShapeChange:
    """Merge the dimensions from `start` to `end`, both included, into one."""
    if not shape:
        return unsqueezing(shape, 0)
    first, last = normal_dim(start, len(shape)), normal_dim(end, len(shape))
    if last < first:
        raise UsageError(f"dimensions {start} to {end} of a shape {list(shape)} are in the wrong order")
    if last > first:
        _expect_known(shape[first : last + 1], "flattened")
    return ShapeChange(
        lambda tensor: tensor.flatten(first, last),
        lambda names: [*names[:first], names[first] if last == first else None, *names[last + 1 :]],
    )


def unflattening(shape: torch.Size, dim: int, sizes: Sequence[int]) -> ShapeChange:
    """Split a dimension into several, of which one size may be -1."""
    place = normal_dim(dim, len(shape))
    _expect_known(shape[place : place + 1], f"unflattened to {list(sizes)}")
    new = _solved(sizes, shape[place], f"dimension {dim} of a spec of shape {list(shape)}")
    return ShapeChange(
        lambda tensor: tensor.reshape([*tensor.shape[:place], *new, *tensor.shape[place + 1 :]]),
        lambda names: [*names[:place], *([None] * len(new)), *names[place + 1 :]],
    )


def indexing(shape: torch.Size, index: Any) -> ShapeChange:
    """Index like a tensor, by ints, slices, None, Ellipsis, lists, masks and tensors.

    IndexError if there are more indices than dimensions, and for objects that are not an index.
    """
    parts = [_index_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    used = sum(_dims_used(part) for part in parts)
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    if used > len(shape) or len(dots) > 1:
        raise IndexError(f"index {index!r} does not fit a spec of shape {list(shape)}")
    place = dots[0] if dots else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - used)
    whole = tuple(parts)

    def names_of(names: Names) -> Names | None:
        if any(isinstance(part, torch.Tensor) for part in whole):
            return None
        rest = iter(names)
        kept: Names = []
        for part in whole:
            name = None if part is None else next(rest)
            if not isinstance(part, int):
                kept.append(name)
        return kept

    return ShapeChange(lambda tensor: tensor[whole], names_of)


_Part = TypeVar("_Part", bound="Changeable")


class Changeable(Protocol):
    """An object with a shape to which a change can be applied."""

    def _changed(self: _Part, change: ShapeChange) -> _Part: ...


def changed_stack(
    parts: Sequence[_Part], shape: torch.Size, dim: int, change: ShapeChange, stack: Callable[[list[_Part], int], _Part]
) -> _Part:
    """Apply a change to a lazy stack of parts along `dim`; `shape` is the shape of the stack, -1 where parts differ.

    Returns a single part if everything that remains comes from it, otherwise `stack` of the remaining parts.
    """
    unknown = _UNKNOWN if list(shape).count(-1) == 1 else _UNKNOWN_OF_MANY
    places = torch.arange(len(parts), device="cpu")
    sizes = [unknown if size == -1 else size for size in shape]
    numbers = _filled(change.apply(places.as_strided(sizes, [int(own == dim) for own in range(len(sizes))])), places)
    for place, size in enumerate(numbers.shape):
        if size > unknown // 2:
            numbers = numbers.narrow(place, 0, 1)

    def left(numbers: torch.Tensor, picked: tuple[int | None, ...]) -> _Part:
        for place in range(numbers.dim()):
            if bool((numbers != numbers.narrow(place, 0, 1)).any()):
                free = [position for position, number in enumerate(picked) if number is None][place]
                return stack(
                    [
                        left(numbers.select(place, row), (*picked[:free], row, *picked[free + 1 :]))
                        for row in range(numbers.shape[place])
                    ],
                    place,
                )
        return parts[int(numbers.flatten()[0])]._changed(_change_of_part(change, dim, len(parts), picked))

    return left(numbers, (None,) * numbers.dim())


def _filled(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the remaining parts, at least one, even if the change leaves no elements."""
    if numbers.numel():
        return numbers
    sizes = [max(size, 1) for size in numbers.shape]
    none_left = any(size == 0 and step for size, step in zip(numbers.shape, numbers.stride(), strict=True))
    last = numbers.storage_offset() + sum((size - 1) * step for size, step in zip(sizes, numbers.stride(), strict=True))
    copied = numbers.untyped_storage().data_ptr() != places.untyped_storage().data_ptr()
    if copied or none_left or last >= places.numel():
        return torch.zeros((), dtype=places.dtype, device="cpu").expand(sizes)
    return numbers.as_strided(sizes, numbers.stride())


def _change_of_part(change: ShapeChange, dim: int, count: int, picked: tuple[int | None, ...]) -> ShapeChange:
    """Return the change of one part that corresponds to a change of the stack."""
    index = tuple(slice(None) if number is None else number for number in picked)

    def names_of(names: Names) -> Names | None:
        found = change.names([*names[:dim], None, *names[dim:]])
        return found and [name for name, number in zip(found, picked, strict=True) if number is None]

    return ShapeChange(
        lambda tensor: change.apply(tensor.unsqueeze(dim).expand([*[-1] * dim, count, *[-1] * (tensor.dim() - dim)]))[
            index
        ],
        names_of,
        change.unknown,
    )


def normal_dim(dim: int, count: int) -> int:
    """Return a dimension as a number from 0; IndexError if it does not exist."""
    if not -count <= dim < count:
        raise IndexError(f"dimension is {dim}, expected one of {count}")
    return dim % count


def _sized(shape: Sequence[int]) -> list[int]:
    return [_UNKNOWN if size == -1 else size for size in shape]


def _expect_known(shape: Sequence[int], what: str) -> None:
    if -1 in shape:
        raise UsageError(f"a spec of shape {list(shape)} cannot be {what} while a size is unknown (-1)")


def _solved(sizes: Sequence[int], total: int, what: str) -> list[int]:
    """Replace the -1 in sizes so that their product is `total`."""
    known = math.prod(size for size in sizes if size != -1)
    new = [total // known if size == -1 and known else size for size in sizes]
    if list(sizes).count(-1) > 1 or any(size < 0 for size in new) or math.prod(new) != total:
        raise UsageError(f"{what} has {total} elements, which do not fill {list(sizes)}")
    return new


def _index_part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    if isinstance(part, bool | np.bool_):
        raise IndexError("a spec is not indexed by True or False; a mask is a list or a tensor of them")
    if isinstance(part, list | range | np.ndarray | torch.Tensor):
        tensor = torch.as_tensor(list(part) if isinstance(part, range) else part, device="cpu")
        if not tensor.numel() and tensor.is_floating_point():  # an empty list
            return tensor.long()
        return tensor.long() if tensor.dtype is torch.uint8 else tensor
    try:
        return operator.index(part)
    except TypeError:
        raise IndexError(f"a spec is not indexed by a {type(part).__name__}") from None


def _dims_used(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1
