"""The contract of specs (TensorSpec), the base of specs of one tensor (LeafSpec), and lazy stacks of specs (Stacked).

To add a kind of spec for tensors, derive from LeafSpec and implement `_draw`, `_members` and `_nearest`. Shape changes,
stacking, casts, copies, equality and encoding follow from the parameters that the class names.

Changes of shape are computed once and applied alike to a spec's shape, its bounds, its masks and its children. A change
acts on the leading dimensions of a tensor and leaves the trailing ones unchanged. Because the shape of an entry of a
Composite begins with the shape of the Composite, the same change fits both.

A dimension of unknown size is written as -1. To change such a shape, the unknown size is replaced by a very large
number (in an expanded view, which takes no memory), and dimensions of that size in the result are unknown again.
"""

from __future__ import annotations

import copy
import math
import operator
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import torch

from ..errors import SchemaError, UsageError, require_flags, suggests_keywords
from .bridge import Counterpart, as_own, to_torchrl

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
    """Apply a change to a parameter of a spec: a tensor that has size 1 in the dimensions of unknown size."""
    changed = change.apply(parameter.expand([*_sized(shape), *parameter.shape[len(shape) :]]))
    for dim, size in enumerate(new):
        if size == -1:
            changed = changed.narrow(dim, 0, 1)
    return changed


def expansion(shape: torch.Size, sizes: Sequence[int]) -> ShapeChange:
    """Repeat along new leading dimensions and along dimensions of size 1.

    A size of -1 gives a new dimension, or one of size 1, an unknown size. Any other dimension keeps its size.
    """
    added = len(sizes) - len(shape)
    target = [*sizes[: max(added, 0)]]
    for size, own in zip(sizes[max(added, 0) :], shape, strict=False):
        target.append(own if size == -1 and own != 1 else size)
    fits = all(size == own or own == 1 for size, own in zip(target[max(added, 0) :], shape, strict=False))
    if added < 0 or not fits or any(size < -1 for size in target):
        raise UsageError(f"a spec of shape {list(shape)} cannot be expanded to {list(sizes)}")
    kept = [-1 if size == own else _sized([size])[0] for size, own in zip(target[added:], shape, strict=True)]
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


def index_parts(shape: torch.Size, index: Any) -> tuple[Any, ...]:
    """Return an index with a part for each dimension, without an Ellipsis.

    IndexError if there are more indices than dimensions, and for objects that are not an index.
    """
    parts = [_index_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    used = sum(_dims_used(part) for part in parts)
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    if used > len(shape) or len(dots) > 1:
        raise IndexError(f"index {index!r} does not fit a spec of shape {list(shape)}")
    place = dots[0] if dots else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - used)
    return tuple(parts)


def indexing(whole: tuple[Any, ...]) -> ShapeChange:
    """Index like a tensor, by ints, slices, None, lists, masks and tensors; steps of slices may be negative."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        parts, mirrored, place = [], [], 0
        for part in whole:
            if isinstance(part, slice) and part.step is not None and part.step < 0:
                last = tensor.shape[place] - 1
                rows = range(*part.indices(last + 1))
                part = slice(last - rows.start, last - rows.stop, -rows.step)
                mirrored.append(place)
            parts.append(part)
            place += _dims_used(part)
        if mirrored:  # dimensions that are only expanded look the same backwards
            tensor = _core(tensor).flip(mirrored).expand(tensor.shape)
        return tensor[tuple(parts)]

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

    return ShapeChange(apply, names_of)


_Part = TypeVar("_Part", bound="Changeable")


class Changeable(Protocol):
    """An object with a shape to which a change can be applied."""

    def _changed(self: _Part, change: ShapeChange) -> _Part: ...


def changed_stack(
    parts: Sequence[_Part], shape: torch.Size, dim: int, change: ShapeChange, stack: Callable[[list[_Part], int], _Part]
) -> _Part:
    """Apply a change to a lazy stack of parts along `dim`; `shape` is the shape of the stack, -1 where parts differ.

    Returns a single part if everything that remains comes from it, otherwise `stack` of the remaining parts.

    The change is applied to a tensor of the stack's shape in which each element is the number of its part. The result
    shows which parts remain and along which dimension they now lie: the one along which the numbers differ.

        two parts along dim 0:  [[0, 0, 0], [1, 1, 1]]
        change [:, 0]       ->  [0, 1]                     stack([part 0 at 0, part 1 at 0], dim 0)
        change [1]          ->  [1, 1, 1]                  part 1 alone
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
    """Return `numbers`, extended to at least one element, to find the remaining parts even if no elements are left."""
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
    """Return a dimension as a number from 0; DimensionError (an IndexError) if it does not exist."""
    if not -count <= dim < count:
        raise DimensionError(f"dimension is {dim}, expected one of {count}")
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
        raise SpecValueError(f"{what} has {total} elements, which do not fill {list(sizes)}")
    return new


def _index_part(part: Any) -> Any:
    if part is None or part is Ellipsis:
        return part
    if isinstance(part, slice):
        return slice(None) if not part.start and part.stop is None and part.step in (None, 1) else part
    if isinstance(part, bool | np.bool_):
        raise IndexError("a spec is not indexed by True or False; a mask is a list or a tensor of them")
    if isinstance(part, list | range | np.ndarray | torch.Tensor):
        tensor = torch.as_tensor(list(part) if isinstance(part, range) else part, device="cpu")
        if not tensor.numel() and tensor.is_floating_point():  # an empty list
            return tensor.long()
        if not tensor.dim() and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            return int(tensor)
        return tensor.long() if tensor.dtype is torch.uint8 else tensor
    try:
        return operator.index(part)
    except TypeError:
        raise IndexError(f"a spec is not indexed by a {type(part).__name__}") from None


def _dims_used(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1


class NotInSpecError(SchemaError, AssertionError):
    """A value is not a member of the spec it is checked against."""


class SpecTypeError(SchemaError, TypeError):
    """A value or an argument has a type that the spec does not accept."""


class SpecValueError(SchemaError, UsageError):
    """A value or an argument contradicts the spec, such as a bound that its element type cannot hold."""


class DimensionError(UsageError, IndexError):
    """The spec does not have a dimension of this number."""


class UndefinedForSpecError(UsageError, NotImplementedError):
    """The operation is not defined for this kind of spec, such as counting real numbers."""


ShapeLike: TypeAlias = int | Iterable[int]
DeviceLike: TypeAlias = torch.device | str | int
DEVICE_TYPING = DeviceLike
"""Anything that names a device: a `torch.device`, a string or a number. The name is TorchRL's."""


def as_shape(shape: ShapeLike) -> torch.Size:
    """Convert a shape to `torch.Size`; -1 is an unknown size, and a single dimension may be given as an int.

    SpecTypeError (a TypeError) for sizes that are not whole numbers, UsageError (a ValueError) for sizes below -1.
    """
    if isinstance(shape, tuple) and not shape:
        return _NO_BATCH
    try:
        sizes = torch.Size([shape] if isinstance(shape, int) else shape)
    except TypeError:
        sizes = torch.Size([as_count(size, "a size") for size in (shape if isinstance(shape, Iterable) else [shape])])
    if min(sizes, default=0) < -1:
        raise UsageError(f"a shape has the sizes {list(sizes)}, expected sizes from 0, or -1 for any")
    return sizes


def as_count(number: Any, name: str) -> int:
    """Convert a whole number of Python, NumPy or torch to int; SpecTypeError (a TypeError) for anything else."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise SpecTypeError(f"{name} is {number!r}, expected a whole number")
    try:
        return operator.index(number)
    except TypeError:  # tensors of floats, and arrays of several numbers
        raise SpecTypeError(f"{name} is {number!r}, expected a whole number") from None


def as_device(device: DeviceLike | None) -> torch.device:
    """Convert to a device; None is torch's default device, and "cuda" the current CUDA device."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def as_dtype(dtype: torch.dtype | str | None, default: torch.dtype) -> torch.dtype:
    """Convert to an element type, also from a name with or without `torch.`."""
    if dtype is None:
        return default
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise SpecTypeError(f"the element type is {dtype!r}, expected a torch.dtype or its name")
    return found


def sizes_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes that were given one by one or as one sequence."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        return tuple(int(size) for size in shape[0])
    return tuple(int(size) for size in shape)


def concrete(shape: torch.Size) -> torch.Size:
    """Return a shape in which each unknown size is 1."""
    if -1 not in shape:
        return shape
    return torch.Size([1 if size == -1 else size for size in shape])


def batched(batch: torch.Size, shape: torch.Size) -> torch.Size:
    """Return the shape of a batch of values; unknown sizes are 1."""
    sizes = concrete(shape)
    return torch.Size((*batch, *sizes)) if batch else sizes


_NO_BATCH = torch.Size()


def batch_of(shape: Sequence[int], trailing: Sequence[int]) -> torch.Size | None:
    """Return the batch dimensions of a shape: those before `trailing`. None if it ends differently; -1 is any size."""
    if shape == trailing:
        return _NO_BATCH
    count = len(shape) - len(trailing)
    if count < 0 or any(own not in (-1, size) for size, own in zip(shape[count:], trailing, strict=True)):
        return None
    return torch.Size(shape[:count])


class Box(Counterpart):
    """A set of values."""

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this set with its tensors on another device, or of another element type."""
        return copy.copy(self)

    def clone(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)


@dataclass(frozen=True, slots=True)
class CategoricalBox(Box):
    """The numbers 0 to `n - 1`; `n` is -1 while the number of categories is not set."""

    n: int


@dataclass(frozen=True, slots=True)
class BoxList(Box):
    """One set of values for each column."""

    boxes: Sequence[Box]

    def __post_init__(self) -> None:
        object.__setattr__(self, "boxes", tuple(self.boxes))

    @classmethod
    def from_nvec(cls, nvec: torch.Tensor) -> BoxList:
        """Return the sets of numbers below the elements of a tensor, one for each entry of its last dimension."""
        columns = nvec.unbind(-1)
        return cls([cls.from_nvec(column) if column.dim() else CategoricalBox(int(column)) for column in columns])

    def to(self, dest: DeviceLike | torch.dtype) -> BoxList:
        return BoxList([box.to(dest) for box in self.boxes])

    def clone(self) -> BoxList:
        return BoxList([box.clone() for box in self.boxes])

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Box]:
        return iter(self.boxes)


CHECK_SPEC_ENCODE = "CHECK_SPEC_ENCODE"
"""Environment variable: 1 makes `encode` and `to_numpy` check every value against the spec."""


def checks_encoding() -> bool:
    """Return whether the environment requests a check of every encoded value."""
    return os.environ.get(CHECK_SPEC_ENCODE, "0").lower() in {"1", "true", "yes", "on"}


class TensorSpec(Counterpart):
    """Describes the shape, element type, device and legal values of a tensor or a nest of tensors.

    A spec can draw values, check them, project others to the nearest legal one, and encode Python data as tensors. A
    size of -1 in `shape` matches any size. Values may have batch dimensions in front of `shape`. Draws come from
    torch's global generator, or from the `generator` passed to the call. Names, arguments and behaviour match TorchRL's
    specs.
    """

    domain: str | None = None
    """`continuous`, `discrete` or `composite`; None for data that are not tensors."""
    _LAST_IS_EVENT: ClassVar[bool] = False
    """Whether the last dimension holds one event, such as a one-hot row, and is neither indexed nor unbound."""

    # Properties ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The sizes of one value; -1 for any size."""

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """The device of values; None for any device."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """The element type of values; None if there is no single one."""

    @property
    def space(self) -> Any:
        """The set of legal values, apart from shape, element type and device: a Box, or None if there is none.

        Assigning a ContinuousBox to a Bounded, or a CategoricalBox to a Categorical, changes the spec. Any other box is
        stored and returned, but has no effect.
        """
        return self.__dict__["_space"] if "_space" in self.__dict__ else self._box()

    @space.setter
    def space(self, box: Box | None) -> None:
        self.__dict__.pop("_space", None)
        if not self._takes(box):
            self.__dict__["_space"] = box

    @property
    def ndim(self) -> int:
        """The number of dimensions of one value."""
        return len(self.shape)

    def ndimension(self) -> int:
        return self.ndim

    # Values ----------------------------------------------------------------------------------------

    def rand(self, shape: ShapeLike | None = None, *, generator: torch.Generator | None = None) -> Any:
        """Draw a random member of shape `[*shape, *spec.shape]`; unknown sizes become 1."""
        return self._draw(_NO_BATCH if shape is None else as_shape(shape), generator)

    def sample(self, shape: ShapeLike | None = None, *, generator: torch.Generator | None = None) -> Any:
        """Draw a random member; the same as `rand`."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: ShapeLike | None = None) -> Any:
        """Return a value of zeros, which need not be a member."""
        return self._fill(_NO_BATCH if shape is None else as_shape(shape), 0)

    def zeros(self, shape: ShapeLike | None = None) -> Any:
        return self.zero(shape)

    def one(self, shape: ShapeLike | None = None) -> Any:
        """Return a value of ones, which need not be a member."""
        return self._fill(_NO_BATCH if shape is None else as_shape(shape), 1)

    def ones(self, shape: ShapeLike | None = None) -> Any:
        return self.one(shape)

    @abstractmethod
    def is_in(self, val: Any) -> bool:
        """Return whether a value has the element type and trailing shape of this spec, and only legal elements."""

    def contains(self, item: Any) -> bool:
        """Return whether a value is a member; the same as `is_in`."""
        return self.is_in(item)

    def __contains__(self, value: Any) -> bool:
        return self.is_in(value)

    def assert_is_in(self, value: Any) -> None:
        """Raise NotInSpecError (an AssertionError) unless the value is a member."""
        if not self.is_in(value):
            spec = " ".join(repr(self).split())
            raise NotInSpecError(f"{brief(value)} is not in {spec}", hint="project(value) returns the nearest member")

    @abstractmethod
    def project(self, val: Any) -> Any:
        """Return the value if it is a member, else a new value: the nearest member."""

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Convert numbers, lists or arrays to a tensor of this spec; tensors are returned unchanged.

        Args:
            val: the data; if the number of elements fits, it is reshaped to the spec's shape.
            ignore_device: leave the tensor on the CPU.

        Raises:
            SchemaError (a RuntimeError): the number of elements is wrong, or the element type cannot hold a number.
            NotInSpecError (an AssertionError): the value is not a member; only checked if the environment variable
                CHECK_SPEC_ENCODE is 1.
        """
        require_flags(ignore_device=ignore_device)
        found = self._encode(val, ignore_device)
        if checks_encoding():
            self._check_encoded(found)
        return found

    @suggests_keywords()
    def memoize_encode(self, mode: bool = True) -> None:
        """Cache the results of `encode` for ints and other hashable values; False stops that."""
        self._memoize(mode)

    def erase_memoize_cache(self) -> None:
        """Clear the cache of `memoize_encode`."""
        for spec in self._within():
            spec.erase_memoize_cache()

    @suggests_keywords()
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return the value as NumPy arrays.

        Args:
            val: a member of the spec.
            safe: check the value against the spec first; by default if the environment variable CHECK_SPEC_ENCODE is 1.
        """
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(val)
        return self._to_numpy(val)

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise SpecTypeError (a TypeError) unless the value has the element type of this spec."""

    def cardinality(self) -> float:
        """Return the number of members of one event; infinity for real numbers."""
        raise UndefinedForSpecError(f"the values of {type(self).__name__} cannot be counted")

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all members of one event, stacked along dimension 0."""
        raise UndefinedForSpecError(f"the values of {type(self).__name__} cannot be listed")

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Select from `tensor_to_index`, which has one entry for each value of the domain."""
        raise UndefinedForSpecError(f"{type(self).__name__} has no numbered values to index with")

    # Shape -----------------------------------------------------------------------------------------

    def expand(self, *shape: Any) -> Self:
        """Repeat along new leading dimensions and dimensions of size 1; UsageError if other sizes differ."""
        return self._changed(expansion(self.shape, sizes_of(shape)))

    def squeeze(self, dim: int | None = None) -> Self:
        """Remove a dimension of size 1, or all of them."""
        return self._changed(squeezing(self.shape, dim))

    def unsqueeze(self, dim: int) -> Self:
        """Insert a dimension of size 1."""
        return self._changed(unsqueezing(self.shape, dim))

    def reshape(self, *shape: Any) -> Self:
        """Arrange the elements in another shape; one size may be -1."""
        return self._changed(reshaping(self.shape, sizes_of(shape)))

    def view(self, *shape: Any) -> Self:
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge several dimensions into one."""
        return self._changed(flattening(self.shape, start_dim, end_dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split a dimension into several; one size may be -1."""
        return self._changed(unflattening(self.shape, dim, sizes))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the specs along one dimension."""
        place = normal_dim(dim, self.ndim)
        if self.shape[place] == -1:
            raise UndefinedForSpecError(f"dimension {dim} of {list(self.shape)} has no known size to unbind")
        self._expect_divisible(place)
        lead, rest = (slice(None),) * place, (slice(None),) * (self.ndim - place - 1)
        return tuple(self._changed(indexing((*lead, number, *rest))) for number in range(self.shape[place]))

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the part that the same index selects from a value.

        A dimension of unknown size has any element. IndexError for a slice of it, whose size is unknown too, and for
        elements of a last dimension that holds categories.
        """
        shape, place = self.shape, 0
        parts = index_parts(shape, index)
        for part in parts:
            is_slice, used = isinstance(part, slice), _dims_used(part)
            if is_slice and part != slice(None) and shape[place] == -1:
                raise IndexError(f"dimension {place} of {list(shape)} has an unknown size, and so has a slice of it")
            place += used
            if self._LAST_IS_EVENT and used and place == len(shape) and not (is_slice and part == slice(None)):
                raise IndexError(f"index {index!r} divides one event of a {type(self).__name__} of shape {list(shape)}")
        return self._changed(indexing(parts))

    def _expect_divisible(self, place: int) -> None:
        """Raise UsageError for a dimension that cannot be divided into its elements."""
        if self._LAST_IS_EVENT and place == self.ndim - 1:
            raise UsageError(f"the last dimension of a {type(self).__name__} holds the categories of one event")

    @abstractmethod
    def make_neg_dim(self, dim: int) -> None:
        """Allow any size for one dimension (-1), in place."""

    # Device, element type, copies ------------------------------------------------------------------

    @abstractmethod
    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this spec with another device or element type."""

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        return self.to("cuda" if device is None else f"cuda:{device}")

    @abstractmethod
    def clone(self) -> Self:
        """Copy the spec and its tensors."""

    def clear_device_(self) -> Self:
        """Remove the device, in place. Specs of one tensor keep their device."""
        for spec in self._within():
            spec.clear_device_()
        return self

    def to_torchrl(self) -> Any:
        """Convert to a spec of TorchRL; ImportError if the program has not imported torchrl.

        TorchRL accepts specs of rbtool directly. This is for code that requires instances of TorchRL's own classes.
        """
        return to_torchrl(self)

    def __eq__(self, other: object) -> bool:
        """Return whether another spec, of rbtool or TorchRL, describes the same values."""
        try:
            return self._equals(as_own(other))
        except (SchemaError, UsageError):  # a spec of TorchRL that ours cannot express, such as low above high
            return False

    __hash__: ClassVar[Callable[[Any], int]]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in FUNCTIONS:
            name = getattr(function, "__name__", function)
            known = ", ".join(sorted(known.__name__ for known in FUNCTIONS))
            raise SpecTypeError(f"torch.{name} does not accept specs; functions that do: {known}")
        return FUNCTIONS[function](*args, **(kwargs or {}))

    # Methods for subclasses ------------------------------------------------------------------------

    @abstractmethod
    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        """Draw a random member of shape `[*shape, *spec.shape]`."""

    @abstractmethod
    def _fill(self, shape: torch.Size, value: int) -> Any:
        """Return a value of zeros or ones of shape `[*shape, *spec.shape]`."""

    @abstractmethod
    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Encode a value without checking it."""

    def _check_encoded(self, value: Any) -> None:
        """Raise NotInSpecError unless an encoded value is a member."""
        self.assert_is_in(value)

    @abstractmethod
    def _to_numpy(self, value: Any) -> Any:
        """Return a value as NumPy arrays without checking it."""

    def _box(self) -> Box | None:
        """Return the set of legal values, unless another box was assigned to `space`."""
        return None

    def _takes(self, box: Any) -> bool:
        """Apply an assigned box to the spec; return False if this kind of spec does not support it."""
        return False

    def _memoize(self, mode: bool) -> None:
        """Turn the cache of encoded values on or off."""
        for spec in self._within():
            spec._memoize(mode)

    def _within(self) -> Sequence[TensorSpec]:
        """Return the specs inside this one: members, choices or entries."""
        return ()

    @abstractmethod
    def _changed(self, change: ShapeChange) -> Self:
        """Return this spec with another shape."""

    def _stack(self, specs: Sequence[Any], dim: int) -> TensorSpec:
        """Stack specs of this class, shape, device and element type into one; SchemaError if that is impossible.

        By default only equal specs can be stacked into one.
        """
        if any(spec != self for spec in specs):
            raise SchemaError(f"{type(self).__name__} specs that differ cannot be stacked into one")
        return self.unsqueeze(dim).expand(*self.shape[:dim], len(specs), *self.shape[dim:])

    def _stack_lazily(self, specs: Sequence[TensorSpec], dim: int) -> TensorSpec:
        """Return a lazy stack, which keeps its members unchanged."""
        return Stacked(*specs, dim=dim)

    def _kind(self) -> type[TensorSpec]:
        """Return the class that all specs in a stack must belong to."""
        return type(self)

    def _expect_place(self, dim: int) -> None:
        """Raise UsageError if no dimension can be inserted at this place."""

    @abstractmethod
    def _equals(self, other: object) -> bool:
        """Return whether another spec of rbtool is equal; False for anything else."""

    # Methods that TorchRL's Composite calls on its entries ------------------------------------------

    @property
    def _safe_shape(self) -> torch.Size:
        return concrete(self.shape)

    def _project(self, value: Any) -> Any:
        return self.project(value)

    def _register_batch_size(self, batch_size: Any) -> None:
        """Do nothing: the bounds of our specs already have the dimensions of the batch."""


def brief(value: Any) -> str:
    """Format a value in one line: small tensors with their numbers, large ones with their shape."""
    if isinstance(value, torch.Tensor):
        shown = f"{value.tolist()}" if value.numel() <= 8 and value.device.type != "meta" else f"{list(value.shape)}"
        return f"a tensor of {value.dtype} {shown}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:200] + "…"


_MOST = 2**26  # most numbers in one listing; a request for more is a mistake


def combinations(counts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Return all rows of numbers below `counts`, int64 `[rows, columns]`; the last column changes fastest.

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


_NUMPY = {
    getattr(torch, name): np.dtype("bool" if name == "bool" else name)
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""The element types with an equal NumPy type, whose arrays can share memory with tensors."""

_CPU = torch.device("cpu")  # comparing with it is eight times faster than reading a device's type


class LeafSpec(TensorSpec):
    """The base of specs of one tensor.

    A subclass stores parameters of each element, such as bounds, in tensors whose shape begins with the spec's shape
    (with 1 for unknown sizes). `_PARAMETERS` names these attributes, so that changes of shape also apply to them.
    `_INNER_DIMS` has the number of further dimensions of a parameter, if there are any. `_FACTS` names the other
    attributes in which two specs of the class can differ.
    """

    _PARAMETERS: ClassVar[tuple[str, ...]] = ()
    _INNER_DIMS: ClassVar[dict[str, int]] = {}
    _FACTS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, shape: ShapeLike, device: DeviceLike | None, dtype: torch.dtype | str | None, default: torch.dtype
    ) -> None:
        self._shape = as_shape(shape)
        self._device = as_device(device)
        self._dtype = as_dtype(dtype, default)
        self._memo: dict[Hashable, torch.Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        """Assign another shape. Parameters are expanded to it; those that do not fit stay, and must be assigned too."""
        self._shape = as_shape(shape)
        for name, tensor in self._parameters().items():
            lead = tensor.dim() - self._INNER_DIMS.get(name, 0)
            core, fitting = tensor, torch.Size((*concrete(self._shape), *tensor.shape[lead:]))
            for dim in range(lead):
                first = core[(slice(None),) * dim + (slice(1),)]
                if same_value(first.expand_as(core), core):  # alike along this dimension
                    core = first
            if core.dim() > len(fitting) and core.shape[: core.dim() - len(fitting)].numel() == 1:
                core = core.flatten(0, core.dim() - len(fitting))
            if batch_of(fitting, [-1 if size == 1 else size for size in core.shape]) is not None:
                setattr(self, name, core.expand(fitting).clone())

    @property
    def device(self) -> torch.device:
        return self._device

    @device.setter
    def device(self, device: DeviceLike) -> None:
        self.__dict__.update(self.to(device).__dict__)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        """Become a spec of another element type: a Bounded of integers becomes one of real numbers, say."""
        cast = self.to(dtype)
        self.__class__ = type(cast)
        self.__dict__.update(cast.__dict__)

    # Values ----------------------------------------------------------------------------------------

    def _fill(self, shape: torch.Size, value: int) -> torch.Tensor:
        return torch.full(batched(shape, self._shape), value, dtype=self._dtype, device=self._device)

    @abstractmethod
    def _members(self, value: torch.Tensor) -> torch.Tensor:
        """Return for each element of a tensor of the right shape and type whether it is legal."""

    @abstractmethod
    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the member nearest to a tensor of the right trailing shape and any type."""

    def is_in(self, val: Any) -> bool:
        """Return whether a value is a tensor with this spec's element type and trailing shape, and only legal elements.

        The device does not matter.
        """
        if not isinstance(val, torch.Tensor) or val.dtype != self._dtype:
            return False
        if batch_of(val.shape, self._shape) is None:
            return False
        return self._are_members(val)

    def _are_members(self, value: torch.Tensor) -> bool:
        """Return whether all elements of a tensor of the right type and trailing shape are legal."""
        return bool(self._members(value).all())

    def members_among(self, value: torch.Tensor, batch: torch.Size) -> torch.Tensor:
        """Return which values of a batch `[*batch, *spec.shape]` of this element type are members; bool `batch`."""
        found = self._members(value)
        return found.reshape([*batch, -1]).all(-1) if found.dim() else found.expand(batch)

    def project(self, val: Any) -> torch.Tensor:
        """Return the value itself if it is a member, else a new tensor of the nearest legal elements.

        NaN becomes the legal value nearest to zero. SpecTypeError if the value is not a tensor, or is complex while the
        spec is real; SchemaError if its trailing shape differs.
        """
        if not isinstance(val, torch.Tensor):
            raise SpecTypeError(f"cannot project a {type(val).__name__}, expected a tensor")
        if self.is_in(val):
            return val
        if batch_of(val.shape, self._shape) is None:
            raise SchemaError(f"a tensor of shape {list(val.shape)} does not end with the spec's {list(self._shape)}")
        if val.is_complex() and not self._dtype.is_complex:
            raise SpecTypeError(f"the tensor is {val.dtype}, which has no nearest {self._dtype}")
        return self._nearest(val)

    def _encode(self, value: Any, ignore_device: bool) -> torch.Tensor:
        if (
            type(value) is np.ndarray
            and value.dtype == _NUMPY.get(self._dtype)
            and value.flags.carray
            and (ignore_device or self._device == _CPU or self._device.type == "cpu")
        ):  # a tensor of this spec can share memory with it
            tensor = torch.from_numpy(value if value.ndim else value.copy())
            return tensor if value.shape == self._shape else self._in_shape(tensor)
        if isinstance(value, torch.Tensor):
            return value
        if self._memo is not None and isinstance(value, Hashable):
            if value not in self._memo:
                self._memo[value] = self._encoded(value, ignore_device)
            return self._memo[value].clone()
        return self._encoded(value, ignore_device)

    def _encoded(self, value: Any, ignore_device: bool) -> torch.Tensor:
        return self._in_shape(encoded(value, self._dtype, torch.device("cpu") if ignore_device else self._device))

    def _in_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor in this spec's shape; SchemaError for another number of them."""
        if batch_of(tensor.shape, self._shape) == ():
            return tensor
        expected = concrete(self._shape)
        if tensor.numel() != expected.numel():
            raise SchemaError(f"a value of shape {list(tensor.shape)} does not fill the spec's {list(self._shape)}")
        return tensor.reshape(expected)

    def _memoize(self, mode: bool) -> None:
        self._memo = {} if mode else None

    def erase_memoize_cache(self) -> None:
        """Clear the cache of `memoize_encode`."""
        if self._memo is not None:
            self._memo = {}

    def _to_numpy(self, value: Any) -> Any:
        return to_array(torch.as_tensor(value))

    def type_check(self, value: Any, key: Any = None) -> None:
        found = value.dtype if isinstance(value, torch.Tensor) else None
        if found != self._dtype:
            what = f"of type {found}" if found else f"a {type(value).__name__}"
            place = f"{key!r}" if key is not None else "the value"
            raise SpecTypeError(f"{place} is {what}, expected a tensor of {self._dtype}")

    # Shape, device, copies -------------------------------------------------------------------------

    def _twin(self, **changes: Any) -> Self:
        """Return a copy that shares tensors, with some attributes changed."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _memo=None if self._memo is None else {}, **changes)
        return twin

    def _parameters(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in self._PARAMETERS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _changed(self, change: ShapeChange) -> Self:
        shape = changed_shape(self._shape, change)
        changed = {
            name: changed_parameter(tensor, self._shape, change, shape) for name, tensor in self._parameters().items()
        }
        return self._twin(_shape=shape, **changed)

    def _stack(self, specs: Sequence[Any], dim: int) -> LeafSpec:
        for spec in specs:
            same = all(same_value(getattr(spec, fact), getattr(self, fact)) for fact in self._FACTS)
            absent = [[name for name in self._PARAMETERS if getattr(one, name) is None] for one in (self, spec)]
            if not same or absent[0] != absent[1]:
                found, other = (" ".join(repr(one).split()) for one in (self, spec))
                raise SchemaError(f"{found} and {other} cannot be stacked into one spec")
        stacked = {
            name: torch.stack([getattr(spec, name) for spec in specs], dim)  # dense: each row can be edited by itself
            for name in self._parameters()
        }
        return self._twin(_shape=torch.Size([*self._shape[:dim], len(specs), *self._shape[dim:]]), **stacked)

    def make_neg_dim(self, dim: int) -> None:
        """Allow any size for one dimension, in place; UsageError if legal values differ along it."""
        place = normal_dim(dim, self.ndim)
        narrow = {name: tensor.narrow(place, 0, 1) for name, tensor in self._parameters().items()}
        for name, tensor in narrow.items():
            if not same_value(tensor.expand_as(getattr(self, name)), getattr(self, name)):
                raise UsageError(f"dimension {dim} cannot have any size: its legal values differ along it")
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])
        self.__dict__.update(narrow)

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this spec with another device or element type, or the spec itself if nothing changes."""
        if isinstance(dest, torch.dtype):
            return self if dest == self._dtype else self._to_dtype(dest)
        device = as_device(dest)
        if device == self._device:
            return self
        moved = {name: fresh(tensor, device) for name, tensor in self._parameters().items()}
        return self._twin(_device=device, **moved)

    def _to_dtype(self, dtype: torch.dtype) -> Self:
        return self._twin(_dtype=dtype)

    def clone(self) -> Self:
        return self._twin(**{name: fresh(tensor) for name, tensor in self._parameters().items()})

    # Equality --------------------------------------------------------------------------------------

    def _family(self) -> type[LeafSpec]:
        """The class within which specs may be equal."""
        return type(self)

    def _equals(self, other: object) -> bool:
        if not isinstance(other, LeafSpec) or self._family() is not other._family():
            return False
        named = (*self._FACTS, *self._PARAMETERS)
        if (self._shape, self._device, self._dtype) != (other._shape, other._device, other._dtype):
            return False
        return all(same_value(getattr(self, name), getattr(other, name)) for name in named)

    def __hash__(self) -> int:
        # Hash only attributes that no method changes in place, so that a spec in a set can be found again.
        return hash((self._family(), self._dtype, self.ndim))

    def _details(self) -> dict[str, Any]:
        """Return the attributes that `repr` shows."""
        return {
            "shape": self.shape, "space": self.space, "device": self.device, "dtype": self.dtype, "domain": self.domain,
        }  # fmt: skip

    def __repr__(self) -> str:
        lines = ",\n".join(f"    {name}={value}" for name, value in self._details().items())
        return f"{type(self).__name__}(\n{lines})"


def encoded(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Convert numbers, lists or arrays to a tensor; SchemaError if `dtype` cannot hold them."""
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
    """Return a NumPy array that shares memory if possible; bfloat16, which NumPy lacks, becomes float32."""
    found = value.detach().cpu()
    array: np.ndarray[Any, Any] = (found.float() if found.dtype is torch.bfloat16 else found).numpy()
    return array


def fresh(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy a tensor; expanded dimensions stay expanded and are copied once."""
    return _core(tensor).to(device or tensor.device, copy=True).expand(tensor.shape)


def _core(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that exist in memory: expanded dimensions have size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def same_value(one: Any, other: Any) -> bool:
    """Compare the data of specs: arrays and tensors by type, shape and contents, sequences by element."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
            return False
        if one.dtype in (torch.uint16, torch.uint32):  # torch cannot compare these types
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
    except (TypeError, ValueError, RuntimeError):  # not comparable, such as an object full of arrays: use identity
        return False


def make_neg_dim_of_all(specs: Sequence[TensorSpec], dim: int) -> None:
    """Allow any size for one dimension of several specs, in place: all of them change, or none."""
    for spec in specs:
        spec.clone().make_neg_dim(dim)
    for spec in specs:
        spec.make_neg_dim(dim)


class LazyStack(TensorSpec):
    """The base of lazy stacks. Sizes in which the members differ are -1 in the shape of the stack."""

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        specs = tuple(map(as_own, specs))
        if not specs:
            raise UsageError("there are no specs to stack, expected at least one")
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise SpecTypeError(f"specs can be stacked, found a {type(spec).__name__} among them")
            if spec.ndim != specs[0].ndim:
                raise SchemaError(
                    f"only specs with the same ndim can be stacked, found {spec.ndim} and {specs[0].ndim}"
                )
        self._specs = list(specs)
        self._dim = normal_dim(dim, specs[0].ndim + 1)
        for spec in specs:
            spec._expect_place(self._dim)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The members."""
        return tuple(self._specs)

    @property
    def stack_dim(self) -> int:
        """The dimension along which the members are stacked."""
        return self._dim

    @property
    def dim(self) -> int:
        """The same as `stack_dim`."""
        return self._dim

    @property
    def shape(self) -> torch.Size:
        """The sizes of one value: the members' common sizes, -1 where they differ, and the number of members."""
        columns = zip(*(spec.shape for spec in self._specs), strict=True)
        sizes = [found[0] if len({*found}) == 1 else -1 for found in columns]
        return torch.Size([*sizes[: self._dim], len(self._specs), *sizes[self._dim :]])

    @property
    def device(self) -> torch.device | None:
        found: torch.device | None = self._common([spec.device for spec in self._specs])
        return found

    @property
    def dtype(self) -> torch.dtype | None:
        found: torch.dtype | None = self._common([spec.dtype for spec in self._specs])
        return found

    def _box(self) -> Box | None:
        """Return the sets of values of the members; None if a member has none."""
        spaces = [space for spec in self._specs if (space := spec.space) is not None]
        return BoxList(tuple(spaces)) if len(spaces) == len(self._specs) else None

    @staticmethod
    def _common(values: Sequence[Any]) -> Any:
        return values[0] if all(value == values[0] for value in values) else None

    # Values ----------------------------------------------------------------------------------------

    @abstractmethod
    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        """Stack values of the members along a dimension."""

    def _parts(self, value: Any) -> Sequence[Any] | None:
        """Split a value into one part for each member; None if number or shape do not fit."""
        if isinstance(value, list | tuple):
            return value if len(value) == len(self._specs) else None
        if isinstance(value, torch.Tensor) and value.is_nested:
            fits = not self._dim and value.size(0) == len(self._specs)
            return value.unbind() if fits else None
        batch = self._batch_of(value)
        parts: Sequence[Any] | None = None if batch is None else value.unbind(len(batch) + self._dim)
        return parts

    def _batch_of(self, value: Any) -> torch.Size | None:
        shape = getattr(value, "shape", None)
        return batch_of(shape, self.shape) if isinstance(shape, torch.Size) else None

    def _expected_parts(self, value: Any) -> Sequence[Any]:
        parts = self._parts(value)
        if parts is None:
            found = list(value.shape) if isinstance(getattr(value, "shape", None), torch.Size) else type(value).__name__
            raise SpecValueError(
                f"a value of shape {found} does not end with the {list(self.shape)} of a stack of specs"
            )
        return parts

    def _place_in(self, value: Any) -> int:
        """Return the dimension of a value along which its parts are stacked."""
        if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.is_nested):
            return self._dim
        return len(self._batch_of(value) or ()) + self._dim

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._joined([spec._draw(shape, generator) for spec in self._specs], len(shape) + self._dim)

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._joined([spec._fill(shape, value) for spec in self._specs], len(shape) + self._dim)

    def is_in(self, val: Any) -> bool:
        """Return whether each part of a value (a stack, or a sequence of parts) is a member of its spec."""
        parts = self._parts(val)
        return parts is not None and all(spec.is_in(part) for spec, part in zip(self._specs, parts, strict=True))

    def project(self, val: Any) -> Any:
        """Return the value if it is a member, else a value whose parts are the nearest members of their specs."""
        parts = self._expected_parts(val)
        found = [spec.project(part) for spec, part in zip(self._specs, parts, strict=True)]
        if all(one is other for one, other in zip(found, parts, strict=True)):
            return val
        return found if isinstance(val, list | tuple) else self._joined(found, self._place_in(val))

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        from tensordict import is_non_tensor  # imported late: it takes as long as torch, and tensors do not need it

        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            return value
        pieces = [self._piece(value, number) for number in range(len(self._specs))]
        encoded = [spec._encode(piece, ignore_device) for spec, piece in zip(self._specs, pieces, strict=True)]
        return self._joined(encoded, self._dim)

    def _piece(self, value: Any, number: int) -> Any:
        """Return the part of numbers, lists or arrays that belongs to one member."""
        if isinstance(value, list | tuple) and len(value) == len(self._specs):
            shapes = {np.shape(part) for part in value} if self._dim else set()
            if len(shapes) != 1 or len(shapes.pop()) < self._dim:  # the members' own values, as `to_numpy` returns them
                return value[number]
        array = np.asarray(value)
        if array.ndim <= self._dim or array.shape[self._dim] != len(self._specs):
            count, shape = len(self._specs), list(array.shape)
            raise SchemaError(f"a value of shape {shape} needs {count} parts in dimension {self._dim}, one per spec")
        return array.take(number, axis=self._dim)

    @suggests_keywords()
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return the parts of a value as one array, or as a list of arrays if they differ in shape; nests as dicts.

        The arguments are as for other specs. SpecValueError (a ValueError) if the number of parts differs.
        """
        self._expected_parts(val)
        return super().to_numpy(val, safe)

    def _to_numpy(self, value: Any) -> Any:
        parts = self._expected_parts(value)
        arrays = [spec._to_numpy(part) for spec, part in zip(self._specs, parts, strict=True)]
        return _joined_arrays(arrays, self._place_in(value))

    def type_check(self, value: Any, key: Any = None) -> None:
        if isinstance(value, torch.Tensor):
            self._specs[0].type_check(value, key)
            return
        for spec, part in zip(self._specs, self._expected_parts(value), strict=True):
            spec.type_check(part, key)

    def cardinality(self) -> float:
        """Return the number of members of one event: the product over the specs in the stack."""
        return math.prod(spec.cardinality() for spec in self._specs)

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all members of one event along dimension 0: every combination of the specs' members."""
        listed = [spec.enumerate(use_mask) for spec in self._specs]
        rows = combinations([len(values) for values in listed])
        return self._joined([values[rows[:, column]] for column, values in enumerate(listed)], self._dim + 1)

    def _within(self) -> Sequence[TensorSpec]:
        return self._specs

    # Shape -----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the part that the same index selects: a member itself if the index selects all of it."""
        parts = index_parts(self.shape, index)
        rest = {*map(str, parts[: self._dim]), *map(str, parts[self._dim + 1 :])}
        if len(parts) == self.ndim and isinstance(parts[self._dim], int) and rest <= {str(slice(None))}:
            return self._specs[parts[self._dim]]
        return self._changed(indexing(parts))

    def _changed(self, change: ShapeChange) -> Any:
        return changed_stack(self._specs, self.shape, self._dim, change, self._restacked)

    @classmethod
    def _restacked(cls, specs: Sequence[Any], dim: int) -> Any:
        return cls(*specs, dim=dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the members, or for another dimension the stacks of the members' parts along it."""
        return self.specs if normal_dim(dim, self.ndim) == self._dim else super().unbind(dim)

    def make_neg_dim(self, dim: int) -> None:
        """Allow any size for one dimension, in place and in all members; UsageError for the stacked dimension."""
        place = normal_dim(dim, self.ndim)
        if place == self._dim:
            raise UsageError(
                f"dimension {dim} is the one along which the members are stacked; it has size {len(self._specs)}"
            )
        make_neg_dim_of_all(self._specs, place - (place > self._dim))

    def _expect_place(self, dim: int) -> None:
        for spec in self._specs:
            spec._expect_place(dim - (dim > self._dim))

    # Device, copies --------------------------------------------------------------------------------

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this stack with another device or element type for all members."""
        return type(self)(*(spec.to(dest) for spec in self._specs), dim=self._dim)

    def clone(self) -> Self:
        return type(self)(*(spec.clone() for spec in self._specs), dim=self._dim)

    def _equals(self, other: object) -> bool:
        if not isinstance(other, LazyStack) or type(self) is not type(other):
            return False
        return self._dim == other.stack_dim and self.specs == other.specs

    def __hash__(self) -> int:
        return hash((type(self), self._dim, self.specs))

    def __repr__(self) -> str:
        lines = [f"{spec!r}".replace("\n", "\n    ") for spec in self._specs]
        lines += [f"shape={self.shape}", f"stack_dim={self._dim}", f"device={self.device}", f"dtype={self.dtype}"]
        return f"{type(self).__name__}(\n    " + ",\n    ".join(lines) + ")"


def _joined_arrays(parts: Sequence[Any], dim: int) -> Any:
    """Stack arrays, or those that dicts have in common; arrays that differ in shape stay a list."""
    if all(isinstance(part, dict) for part in parts):
        shared = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: _joined_arrays([part[name] for part in parts], dim) for name in shared}
    alike = all(isinstance(part, np.ndarray) and part.shape == parts[0].shape for part in parts)
    return np.stack(parts, dim) if alike else [*parts]


class Stacked(LazyStack):
    """A lazy stack of specs that differ: `torch.stack` returns one if its arguments cannot become a single spec.

    The members must have the same class, element type, device and number of dimensions; their bounds, masks, categories
    and sizes may differ. Values are tensors if the sizes are equal. Otherwise they are nested tensors, which torch only
    supports along dimension 0. `is_in`, `project` and `encode` also accept sequences of the members' values.

    Args:
        specs: the members.
        dim: the dimension along which they are stacked.

    Raises:
        SchemaError (a RuntimeError): the members cannot be stacked, or their values cannot form a tensor.

    >>> import torch
    >>> from rbtool import Unbounded
    >>> torch.stack([Unbounded((3,)), Unbounded((4,))]).shape
    torch.Size([2, -1])
    """

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        specs = tuple(map(as_own, specs))
        expect_stackable(specs)
        super().__init__(*specs, dim=dim)

    @classmethod
    def mixed(cls, specs: Sequence[TensorSpec], dim: int) -> Stacked:
        """Stack specs that may differ in class, element type and device, as entries of a StackedComposite do."""
        stack = object.__new__(cls)
        LazyStack.__init__(stack, *specs, dim=dim)
        return stack

    @property
    def domain(self) -> str | None:  # type: ignore[override]  # the members decide
        found: str | None = self._common([spec.domain for spec in self._specs])
        return found

    def _kind(self) -> type[TensorSpec]:
        return self._specs[0]._kind()

    @classmethod
    def _restacked(cls, specs: Sequence[Any], dim: int) -> Any:
        return cls.mixed(specs, dim)

    def to(self, dest: DeviceLike | torch.dtype) -> Stacked:
        return self.mixed([spec.to(dest) for spec in self._specs], self._dim)

    def clone(self) -> Stacked:
        return self.mixed([spec.clone() for spec in self._specs], self._dim)

    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        if not isinstance(values[0], torch.Tensor):
            from tensordict import NonTensorStack

            return NonTensorStack(*values, stack_dim=dim)
        if any(value.is_nested for value in values):
            raise SchemaError("values of specs whose sizes differ in two dimensions of stacks form no tensor")
        if all(value.shape == values[0].shape for value in values):
            return torch.stack(tuple(values), dim)
        if dim:
            shapes = ", ".join(str(list(value.shape)) for value in values)
            raise SchemaError(f"values of the shapes {shapes} form a nested tensor along dimension 0 only, not {dim}")
        with warnings.catch_warnings():  # torch warns that nested tensors are a prototype
            warnings.simplefilter("ignore", UserWarning)
            return torch.nested.as_nested_tensor(list(values))


def _stack(specs: Sequence[TensorSpec], dim: int = 0, *, out: Any = None) -> TensorSpec:
    """Stack specs into one with an additional dimension, or into a lazy stack if they differ.

    SchemaError for specs that differ in class, element type, device or number of dimensions.
    """
    _expect_no_out(out)
    specs = tuple(map(as_own, specs))
    expect_stackable(specs)
    try:
        return stack_densely(specs, dim)
    except SchemaError:
        return specs[0]._stack_lazily(specs, normal_dim(dim, specs[0].ndim + 1))


def expect_stackable(specs: Sequence[TensorSpec]) -> None:
    """Raise SchemaError for specs that differ in class, element type, device or number of dimensions."""
    if not specs:
        raise UsageError("there are no specs to stack, expected at least one")
    first = specs[0]
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise SpecTypeError(f"specs can be stacked, found a {type(spec).__name__} among them")
        if spec._kind() is not first._kind():
            kinds = ", ".join(sorted({spec._kind().__name__ for spec in specs}))
            raise SchemaError(f"only specs of one class can be stacked, found {kinds}")
        for what in ("dtype", "device", "ndim"):
            found, expected = getattr(spec, what), getattr(first, what)
            if found != expected:
                raise SchemaError(f"only specs with the same {what} can be stacked, found {found} and {expected}")


def stack_densely(specs: Sequence[TensorSpec], dim: int) -> TensorSpec:
    """Stack specs that differ only in bounds, masks or categories into one of their class; otherwise SchemaError."""
    expect_stackable(specs)
    first = specs[0]
    for spec in specs:
        if type(spec) is not type(first) or spec.shape != first.shape:
            raise SchemaError(f"expected specs of the same shape, found {list(first.shape)} and {list(spec.shape)}")
    return first._stack(specs, normal_dim(dim, first.ndim + 1))


def _squeeze(spec: TensorSpec, dim: int | None = None, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    return spec.squeeze(dim)


def _unsqueeze(spec: TensorSpec, dim: int, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    return spec.unsqueeze(dim)


def _index_select(spec: TensorSpec, dim: int, index: torch.Tensor, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    place = normal_dim(dim, spec.ndim)
    spec._expect_divisible(place)
    picked: TensorSpec = spec[(*[slice(None)] * place, index)]
    return picked


def _expect_no_out(out: Any) -> None:
    if out is not None:
        raise UndefinedForSpecError("out is set, expected None: specs cannot be written into another spec")


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.squeeze: _squeeze,
    torch.unsqueeze: _unsqueeze,
    torch.index_select: _index_select,
}
"""Maps torch functions to their implementations for specs."""
