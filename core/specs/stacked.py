"""Specs that are stacked as they are: the members of a stack may differ in bounds, sizes and categories."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack, is_non_tensor

from ..errors import SchemaError, UsageError
from .base import TensorSpec, batch_of, checks_encoding, expect_stackable
from .shaping import ShapeChange, changed_stack, normal_dim
from .values import Box, BoxList, DeviceLike, SpecTypeError, combinations

_Spec = TypeVar("_Spec", bound="LazyStack")


class LazyStack(TensorSpec):
    """What stacks of specs have in common. Sizes that differ between the members are -1 in the shape of the stack."""

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        if not specs:
            raise UsageError("there are no specs to stack, expected at least one")
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise SpecTypeError(f"specs can be stacked, found a {type(spec).__name__} among them")
            if spec.ndim != specs[0].ndim:
                raise SchemaError(f"specs of one ndim can be stacked, found {spec.ndim} and {specs[0].ndim}")
        self._members = specs
        self._dim = normal_dim(dim, specs[0].ndim + 1)
        for spec in specs:
            spec._expect_place(self._dim)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The members."""
        return self._members

    @property
    def stack_dim(self) -> int:
        """The dimension along which the members are."""
        return self._dim

    @property
    def shape(self) -> torch.Size:
        """Sizes of one value: those that the members have in common, and their number; -1 where they differ."""
        columns = zip(*(spec.shape for spec in self._members), strict=True)
        sizes = [found[0] if len({*found}) == 1 else -1 for found in columns]
        return torch.Size([*sizes[: self._dim], len(self._members), *sizes[self._dim :]])

    @property
    def device(self) -> torch.device | None:
        found: torch.device | None = self._common([spec.device for spec in self._members])
        return found

    @property
    def dtype(self) -> torch.dtype | None:
        found: torch.dtype | None = self._common([spec.dtype for spec in self._members])
        return found

    @property
    def space(self) -> Box | None:
        """The sets of values of the members; None where one has none."""
        spaces = [space for spec in self._members if (space := spec.space) is not None]
        return BoxList(tuple(spaces)) if len(spaces) == len(self._members) else None

    @staticmethod
    def _common(values: Sequence[Any]) -> Any:
        return values[0] if all(value == values[0] for value in values) else None

    # Values ----------------------------------------------------------------------------------------

    @abstractmethod
    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        """Stack values of the members along a dimension."""

    def _parts(self, value: Any) -> Sequence[Any] | None:
        """Take a value apart into those of the members; None if it does not have their number or the shape."""
        if isinstance(value, list | tuple):
            return value if len(value) == len(self._members) else None
        if isinstance(value, torch.Tensor) and value.is_nested:
            fits = not self._dim and value.size(0) == len(self._members)
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
            raise SchemaError(f"a value of shape {found} does not end with the {list(self.shape)} of a stack of specs")
        return parts

    def _place_in(self, value: Any) -> int:
        """Return the dimension of a value along which its parts are."""
        if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.is_nested):
            return self._dim
        return len(self._batch_of(value) or ()) + self._dim

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._joined([spec._draw(shape, generator) for spec in self._members], len(shape) + self._dim)

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._joined([spec._fill(shape, value) for spec in self._members], len(shape) + self._dim)

    def is_in(self, value: Any) -> bool:
        """Return whether each part of a value, a stack or a sequence of such, is a member of its spec."""
        parts = self._parts(value)
        return parts is not None and all(spec.is_in(part) for spec, part in zip(self._members, parts, strict=True))

    def project(self, value: Any) -> Any:
        """Return the value if it is a member, else one of the nearest member of each spec; SchemaError as `is_in`."""
        parts = self._expected_parts(value)
        found = [spec.project(part) for spec, part in zip(self._members, parts, strict=True)]
        if all(one is other for one, other in zip(found, parts, strict=True)):
            return value
        return found if isinstance(value, list | tuple) else self._joined(found, self._place_in(value))

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            return value
        pieces = [self._piece(value, number) for number in range(len(self._members))]
        encoded = [spec._encode(piece, ignore_device) for spec, piece in zip(self._members, pieces, strict=True)]
        return self._joined(encoded, self._dim)

    def _piece(self, value: Any, number: int) -> Any:
        """Return the part of numbers, lists or arrays that is for one member."""
        if not self._dim and isinstance(value, list | tuple) and len(value) == len(self._members):
            return value[number]
        array = np.asarray(value)
        if array.ndim <= self._dim or array.shape[self._dim] != len(self._members):
            count, shape = len(self._members), list(array.shape)
            raise SchemaError(f"a value of shape {shape} has not one part for each of {count} specs in {self._dim}")
        return array.take(number, axis=self._dim)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return one array, or a list of the parts' where they differ in shape."""
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(value)
        parts = self._expected_parts(value)
        arrays = [spec.to_numpy(part, safe=False) for spec, part in zip(self._members, parts, strict=True)]
        alike = all(isinstance(array, np.ndarray) and array.shape == arrays[0].shape for array in arrays)
        return np.stack(arrays, self._place_in(value)) if alike else arrays

    def type_check(self, value: Any, key: Any = None) -> None:
        if isinstance(value, torch.Tensor):
            self._members[0].type_check(value, key)
            return
        for spec, part in zip(self._members, self._expected_parts(value), strict=True):
            spec.type_check(part, key)

    def cardinality(self) -> float:
        """Count the members of one event: the product over the specs of the stack."""
        return math.prod(spec.cardinality() for spec in self._members)

    def enumerate(self, use_mask: bool = False) -> Any:
        """List all members of one event along dimension 0: every combination of the specs' members."""
        listed = [spec.enumerate(use_mask) for spec in self._members]
        rows = combinations([len(values) for values in listed])
        return self._joined([values[rows[:, column]] for column, values in enumerate(listed)], self._dim + 1)

    def _within(self) -> Sequence[TensorSpec]:
        return self._members

    # Shape -----------------------------------------------------------------------------------------

    def _changed(self, change: ShapeChange) -> Any:
        return changed_stack(self._members, self.shape, self._dim, change, self._restacked)

    @classmethod
    def _restacked(cls, specs: Sequence[Any], dim: int) -> Any:
        return cls(*specs, dim=dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the members, or stacks of what each has along another dimension."""
        return self._members if normal_dim(dim, self.ndim) == self._dim else super().unbind(dim)

    def _stack(self, specs: Sequence[Any], dim: int) -> TensorSpec:
        if any(spec != self for spec in specs):
            raise SchemaError("stacks of specs that differ have no one spec")
        return self.unsqueeze(dim).expand(*self.shape[:dim], len(specs), *self.shape[dim:])

    def make_neg_dim(self, dim: int) -> None:
        """Let one dimension have any size, in place and in all members; UsageError for that of the stack."""
        place = normal_dim(dim, self.ndim)
        if place == self._dim:
            raise UsageError(f"dimension {dim} is that of the stack, which has {len(self._members)} members")
        inner = place - (place > self._dim)
        for attempt in (True, False):  # on copies first: either all members change or none
            for spec in self._members:
                (spec.clone() if attempt else spec).make_neg_dim(inner)

    def _expect_place(self, dim: int) -> None:
        for spec in self._members:
            spec._expect_place(dim - (dim > self._dim))

    # Device, copies --------------------------------------------------------------------------------

    def to(self: _Spec, dest: DeviceLike | torch.dtype) -> _Spec:
        """Return this stack with all members for another device or element type."""
        return type(self)(*(spec.to(dest) for spec in self._members), dim=self._dim)

    def clear_device_(self: _Spec) -> _Spec:
        for spec in self._members:
            spec.clear_device_()
        return self

    def clone(self: _Spec) -> _Spec:
        return type(self)(*(spec.clone() for spec in self._members), dim=self._dim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyStack) or type(self) is not type(other):
            return False
        return self._dim == other.stack_dim and self._members == other.specs

    def __hash__(self) -> int:
        return hash((type(self), self._dim, self._members))

    def __repr__(self) -> str:
        lines = [f"{spec!r}".replace("\n", "\n    ") for spec in self._members]
        lines += [f"shape={self.shape}", f"stack_dim={self._dim}", f"device={self.device}", f"dtype={self.dtype}"]
        return f"{type(self).__name__}(\n    " + ",\n    ".join(lines) + ")"


class Stacked(LazyStack):
    """Specs of tensors, or of other data, stacked along `dim` as they are: torch.stack makes it of unequal ones.

    The members are of one class, element type, device and number of dimensions (SchemaError, a RuntimeError); their
    bounds, masks, categories and sizes may differ. Where their sizes are equal, values are tensors; where they are not,
    nested tensors, which torch has for dimension 0 only (SchemaError), or sequences of the members' values, which
    `is_in`, `project` and `encode` take, too.

    >>> import torch
    >>> from rbtool import Unbounded
    >>> torch.stack([Unbounded((3,)), Unbounded((4,))]).shape
    torch.Size([2, -1])
    """

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        expect_stackable(specs)
        super().__init__(*specs, dim=dim)

    @classmethod
    def mixed(cls, specs: Sequence[TensorSpec], dim: int) -> Stacked:
        """Stack specs that may differ in class, element type and device, as entries of a StackedComposite do."""
        stack = object.__new__(cls)
        LazyStack.__init__(stack, *specs, dim=dim)
        return stack

    @property
    def domain(self) -> str | None:  # type: ignore[override]  # which is that of the members
        found: str | None = self._common([spec.domain for spec in self._members])
        return found

    def _kind(self) -> type[TensorSpec]:
        return self._members[0]._kind()

    @classmethod
    def _restacked(cls, specs: Sequence[Any], dim: int) -> Any:
        return cls.mixed(specs, dim)

    def to(self, dest: DeviceLike | torch.dtype) -> Stacked:
        return self.mixed([spec.to(dest) for spec in self._members], self._dim)

    def clone(self) -> Stacked:
        return self.mixed([spec.clone() for spec in self._members], self._dim)

    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        if not isinstance(values[0], torch.Tensor):
            return NonTensorStack(*values, stack_dim=dim)
        if any(value.is_nested for value in values):
            raise SchemaError("values of specs whose sizes differ in two dimensions of stacks form no tensor")
        if all(value.shape == values[0].shape for value in values):
            return torch.stack(tuple(values), dim)
        if dim:
            shapes = ", ".join(str(list(value.shape)) for value in values)
            raise SchemaError(f"values of the shapes {shapes} form a nested tensor along dimension 0 only, not {dim}")
        with warnings.catch_warnings():  # that nested tensors are a prototype
            warnings.simplefilter("ignore", UserWarning)
            return torch.nested.as_nested_tensor(list(values))
