"""The contract of a spec: shape, element type, device and set of values."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..errors import SchemaError, UsageError
from .shaping import (
    ShapeChange,
    expansion,
    flattening,
    indexing,
    normal_dim,
    reshaping,
    squeezing,
    unflattening,
    unsqueezing,
)
from .values import Box, DeviceLike, NotInSpecError, ShapeLike, SpecTypeError, UndefinedForSpecError, as_shape


def _stack(specs: Sequence[TensorSpec], dim: int = 0, *, out: Any = None) -> TensorSpec:
    """Stack specs into one with a dimension more; where no one spec can hold them, the stack is lazy.

    SchemaError for specs that differ in class, element type, device or number of dimensions.
    """
    _expect_no_out(out)
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
            raise SchemaError(f"specs of one class can be stacked, found {kinds}")
        for what in ("dtype", "device", "ndim"):
            found, expected = getattr(spec, what), getattr(first, what)
            if found != expected:
                raise SchemaError(f"specs of one {what} can be stacked, found {found} and {expected}")


def stack_densely(specs: Sequence[TensorSpec], dim: int) -> TensorSpec:
    """Stack specs that differ in bounds, masks or categories at most into one of their class; else SchemaError."""
    expect_stackable(specs)
    first = specs[0]
    for spec in specs:
        if type(spec) is not type(first) or spec.shape != first.shape:
            raise SchemaError(f"specs of one shape form one spec, found {list(first.shape)} and {list(spec.shape)}")
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
    picked: TensorSpec = spec[(*[slice(None)] * place, index)]
    return picked


def _expect_no_out(out: Any) -> None:
    if out is not None:
        raise UndefinedForSpecError("out is set, expected None: a spec is not written into another")


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.squeeze: _squeeze,
    torch.unsqueeze: _unsqueeze,
    torch.index_select: _index_select,
}
"""Maps torch functions to their implementation for specs."""


CHECK_SPEC_ENCODE = "CHECK_SPEC_ENCODE"
"""Environment variable: 1 makes `encode` and `to_numpy` check every value against the spec."""

_Spec = TypeVar("_Spec", bound="TensorSpec")


def checks_encoding() -> bool:
    """Return whether the environment requests a check of every encoded value."""
    return os.environ.get(CHECK_SPEC_ENCODE, "0").lower() in {"1", "true", "yes", "on"}


def sizes_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Read sizes given one by one or as one sequence."""
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
    """Return what precedes `trailing` in a shape, or None if it ends otherwise; -1 matches any size."""
    if shape == trailing:
        return _NO_BATCH
    count = len(shape) - len(trailing)
    if count < 0 or any(own not in (-1, size) for size, own in zip(shape[count:], trailing, strict=True)):
        return None
    return torch.Size(shape[:count])


class TensorSpec(ABC):
    """Describes the shape, element type, device and values of a tensor or a nest of tensors.

    A size of -1 in `shape` matches any. Values may have further dimensions in front of `shape`: they are
    batches. Draws come from torch's global generator, or from the `generator` given.

    Names and behaviour are those of TorchRL's specs.
    """

    domain: str | None = None
    """`continuous`, `discrete` or `composite`; None for what is not a tensor."""

    # Properties ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Sizes of one value; -1 for any."""

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """The device of values; None for any."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """Element type of values; None where there is no single one."""

    @property
    def space(self) -> Box | None:
        """The set of values apart from shape, element type and device."""
        return None

    @property
    def ndim(self) -> int:
        """Number of dimensions of one value."""
        return len(self.shape)

    def ndimension(self) -> int:
        return self.ndim

    # Values ----------------------------------------------------------------------------------------

    @abstractmethod
    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        """Draw a random member of shape `[*shape, *spec.shape]`."""

    @abstractmethod
    def _fill(self, shape: torch.Size, value: int) -> Any:
        """Make a value of zeros or ones of shape `[*shape, *spec.shape]`."""

    def rand(self, shape: ShapeLike = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a random member of shape `[*shape, *spec.shape]`; unknown sizes become 1."""
        return self._draw(as_shape(shape) if shape != () else _NO_BATCH, generator)

    def sample(self, shape: ShapeLike = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a random member; the same as `rand`."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: ShapeLike = ()) -> Any:
        """Make a value of zeros, which need not be a member."""
        return self._fill(as_shape(shape), 0)

    def zeros(self, shape: ShapeLike = ()) -> Any:
        return self.zero(shape)

    def one(self, shape: ShapeLike = ()) -> Any:
        """Make a value of ones, which need not be a member."""
        return self._fill(as_shape(shape), 1)

    def ones(self, shape: ShapeLike = ()) -> Any:
        return self.one(shape)

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Return whether a value has the element type, the trailing shape and values of this spec."""

    def contains(self, value: Any) -> bool:
        """Return whether a value is a member; the same as `is_in` and `in`."""
        return self.is_in(value)

    def __contains__(self, value: Any) -> bool:
        return self.is_in(value)

    def assert_is_in(self, value: Any) -> None:
        """Raise NotInSpecError (an AssertionError) unless the value is a member."""
        if not self.is_in(value):
            spec = " ".join(repr(self).split())
            raise NotInSpecError(f"{_brief(value)} is not in {spec}", hint="project(value) returns the nearest member")

    @abstractmethod
    def project(self, value: Any) -> Any:
        """Return the value if it is a member, else a new one that is the nearest member."""

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Make a tensor as this spec has it of numbers, lists and arrays; what is a tensor passes as it is.

        A value of as many elements is given the spec's shape, else SchemaError (a RuntimeError) is raised, as it is
        for numbers the element type cannot hold. `ignore_device` leaves the tensor on the cpu. NotInSpecError (an
        AssertionError) for what is no member, where the environment asks for that check.
        """
        found = self._encode(value, ignore_device)
        if checks_encoding():
            self._check_encoded(found)
        return found

    @abstractmethod
    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Encode a value that is not checked."""

    def _check_encoded(self, value: Any) -> None:
        self.assert_is_in(value)

    def memoize_encode(self, mode: bool = True) -> None:
        """Remember what `encode` made of ints and other hashable values. Experimental, and warns so."""
        warnings.warn("memoize_encode is experimental and may change", stacklevel=2)
        self._memoize(mode)

    def _memoize(self, mode: bool) -> None:
        for spec in self._within():
            spec._memoize(mode)

    def erase_memoize_cache(self) -> None:
        """Forget what `encode` remembered."""
        for spec in self._within():
            spec.erase_memoize_cache()

    def _within(self) -> Iterable[TensorSpec]:
        """The specs that this one is made of."""
        return ()

    @abstractmethod
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return the value as numpy arrays.

        `safe` checks it against the spec first; by default the environment variable CHECK_SPEC_ENCODE decides.
        """

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise SpecTypeError (a TypeError) unless the value has the element type of this spec."""

    def cardinality(self) -> float:
        """Count the members of one event; infinity for real numbers."""
        raise UndefinedForSpecError(f"the values of {type(self).__name__} cannot be counted")

    def enumerate(self, use_mask: bool = False) -> Any:
        """List all members of one event along dimension 0."""
        raise UndefinedForSpecError(f"the values of {type(self).__name__} cannot be listed")

    def index(self, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Pick from `tensor`, which has one entry for each value of the domain."""
        raise UndefinedForSpecError(f"{type(self).__name__} has no numbered values to index with")

    # Shape -----------------------------------------------------------------------------------------

    @abstractmethod
    def _changed(self: _Spec, change: ShapeChange) -> _Spec:
        """Return this spec with another shape."""

    @abstractmethod
    def _stack(self, specs: Sequence[Any], dim: int) -> TensorSpec:
        """Combine specs of this class, shape, device and element type; SchemaError if they cannot combine."""

    def _stack_lazily(self, specs: Sequence[TensorSpec], dim: int) -> TensorSpec:
        """Return a stack that keeps its members as they are."""
        from .stacked import Stacked

        return Stacked(*specs, dim=dim)

    def _expect_place(self, dim: int) -> None:
        """Raise UsageError if there cannot be another dimension at this place."""

    def _kind(self) -> type[TensorSpec]:
        """The class of which specs can be stacked."""
        return type(self)

    def expand(self: _Spec, *shape: Any) -> _Spec:
        """Repeat along new leading dimensions and those of size 1; UsageError if the rest differs."""
        return self._changed(expansion(self.shape, sizes_of(shape)))

    def squeeze(self: _Spec, dim: int | None = None) -> _Spec:
        """Take out a dimension of size 1, or all such."""
        return self._changed(squeezing(self.shape, dim))

    def unsqueeze(self: _Spec, dim: int) -> _Spec:
        """Put in a dimension of size 1."""
        return self._changed(unsqueezing(self.shape, dim))

    def reshape(self: _Spec, *shape: Any) -> _Spec:
        """Lay the elements out in another shape; one size may be -1."""
        return self._changed(reshaping(self.shape, sizes_of(shape)))

    def view(self: _Spec, *shape: Any) -> _Spec:
        return self.reshape(*shape)

    def flatten(self: _Spec, start_dim: int = 0, end_dim: int = -1) -> _Spec:
        """Make one dimension of several."""
        return self._changed(flattening(self.shape, start_dim, end_dim))

    def unflatten(self: _Spec, dim: int, sizes: Sequence[int]) -> _Spec:
        """Make several dimensions of one; one size may be -1."""
        return self._changed(unflattening(self.shape, dim, sizes))

    def unbind(self: _Spec, dim: int = 0) -> tuple[_Spec, ...]:
        """Return the specs along one dimension."""
        place = normal_dim(dim, self.ndim)
        if self.shape[place] == -1:
            raise UndefinedForSpecError(f"dimension {dim} of {list(self.shape)} has no known size to unbind")
        lead = (slice(None),) * place
        return tuple(self._changed(indexing(self.shape, (*lead, number))) for number in range(self.shape[place]))

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of what the same index picks from a value."""
        return self._changed(indexing(self.shape, index))

    @abstractmethod
    def make_neg_dim(self, dim: int) -> None:
        """Let one dimension have any size, in place."""

    # Device, element type, copies ------------------------------------------------------------------

    @abstractmethod
    def to(self: _Spec, dest: DeviceLike | torch.dtype) -> _Spec:
        """Return this spec for another device or element type."""

    def cpu(self: _Spec) -> _Spec:
        return self.to("cpu")

    def cuda(self: _Spec, device: int | None = None) -> _Spec:
        return self.to("cuda" if device is None else f"cuda:{device}")

    @abstractmethod
    def clone(self: _Spec) -> _Spec:
        """Copy the spec and its tensors."""

    def clear_device_(self: _Spec) -> _Spec:
        """Forget the device where there is one to forget; the spec of a tensor keeps it."""
        return self

    @abstractmethod
    def __eq__(self, other: object) -> bool: ...

    __hash__: ClassVar[Callable[[Any], int]]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in FUNCTIONS:
            name = getattr(function, "__name__", function)
            known = ", ".join(sorted(known.__name__ for known in FUNCTIONS))
            raise SpecTypeError(f"torch.{name} does not take a spec; those that do are {known}")
        return FUNCTIONS[function](*args, **(kwargs or {}))


def _brief(value: Any) -> str:
    """Format a value in one line: small tensors by their numbers, large ones by their shape."""
    if isinstance(value, torch.Tensor):
        shown = f"{value.tolist()}" if value.numel() <= 8 and value.device.type != "meta" else f"{list(value.shape)}"
        return f"a tensor of {value.dtype} {shown}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:200] + "…"
