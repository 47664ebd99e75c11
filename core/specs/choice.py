"""A spec whose values are those of several alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_non_tensor

from ..errors import SchemaError, UsageError
from .base import TensorSpec, batch_of, checks_encoding
from .leaf import LeafSpec
from .non_tensor import NonTensor
from .shaping import ShapeChange
from .values import BoxList, DeviceLike, SpecTypeError, same_value

_Spec = TypeVar("_Spec", bound="Choice")


class Choice(TensorSpec):
    """One of several specs, of one class, shape, element type and device; each value is a member of one of them.

    `choices` is a list of specs, or of NonTensorData, each of which is then the only member of its alternative. A draw
    chooses evenly among them, for each value of a batch separately. SpecTypeError (a TypeError) for what is no such
    list or differs in class, UsageError (a ValueError) for choices that differ otherwise.

    >>> from rbtool import Bounded, Choice
    >>> Choice([Bounded(0, 1, (2,)), Bounded(5, 6, (2,))]).is_in(Bounded(5, 6, (2,)).rand())
    True
    """

    def __init__(self, choices: Sequence[Any]) -> None:
        if not isinstance(choices, list) or not choices:
            raise SpecTypeError(f"the choices are {choices!r}, expected a list of specs or of NonTensorData")
        self._choices = tuple(_as_spec(choice) for choice in choices)
        first = self._choices[0]
        for choice in self._choices:
            if type(choice) is not type(first):
                names = f"{type(first).__name__} and {type(choice).__name__}"
                raise SpecTypeError(f"the choices are a {names}, expected specs of one class")
            for what in ("shape", "dtype", "device"):
                found, expected = getattr(choice, what), getattr(first, what)
                if found != expected:
                    raise UsageError(f"the choices differ in their {what}: {expected} and {found}")

    @property
    def choices(self) -> tuple[TensorSpec, ...]:
        """The alternatives."""
        return self._choices

    @property
    def num_choices(self) -> int:
        """How many alternatives there are."""
        return len(self._choices)

    @property
    def shape(self) -> torch.Size:
        return self._choices[0].shape

    @property
    def device(self) -> torch.device | None:
        return self._choices[0].device

    @property
    def dtype(self) -> torch.dtype | None:
        return self._choices[0].dtype

    @property
    def domain(self) -> str | None:  # type: ignore[override]  # which of the alternatives it is
        return self._choices[0].domain

    @property
    def space(self) -> BoxList | None:
        """The set of values of each alternative; None where they have none."""
        spaces = [choice.space for choice in self._choices]
        return None if None in spaces else BoxList(tuple(space for space in spaces if space is not None))

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        count = len(self._choices)
        if not shape:
            return self._choices[int(torch.randint(count, (), generator=generator))]._draw(shape, generator)
        drawn = [choice._draw(shape, generator) for choice in self._choices]
        which = torch.randint(count, shape, generator=generator)
        if isinstance(drawn[0], torch.Tensor):
            chosen = which.to(drawn[0].device).reshape([*shape, *[1] * (drawn[0].dim() - len(shape))])
            return _selected(drawn, chosen)
        return _picked(drawn, which)

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._choices[0].one(shape) if value else self._choices[0].zero(shape)

    def is_in(self, value: Any) -> bool:
        """Return whether a value, or each one of a batch, is a member of one of the alternatives."""
        batch, leaves = self._batch(value), [choice for choice in self._choices if isinstance(choice, LeafSpec)]
        if batch and leaves and isinstance(value, torch.Tensor) and value.dtype == self.dtype and value.numel():
            return _hold_all(leaves, value, batch)
        if any(_holds(choice, value) for choice in self._choices):
            return True
        return bool(batch) and all(self.is_in(part) for part in value.unbind(0))

    def _batch(self, value: Any) -> torch.Size | None:
        shape = getattr(value, "shape", None)
        return batch_of(shape, self.shape) if isinstance(shape, torch.Size) else None

    def project(self, value: Any) -> Any:
        """Return the value if it is a member, else its nearest member of an alternative, the first as near.

        What are not tensors go to the first alternative.
        """
        if self.is_in(value):
            return value
        if not isinstance(value, torch.Tensor):
            return (
                self._choices[0].zero()
                if self.dtype is None and is_non_tensor(value)
                else self._choices[0].project(value)
            )
        batch = self._batch(value)
        if batch is None:
            raise SchemaError(f"a tensor of shape {list(value.shape)} does not end with the spec's {list(self.shape)}")
        found = [choice.project(value) for choice in self._choices]
        gaps = [(one.double() - value.double().nan_to_num()).square().reshape([*batch, -1]).sum(-1) for one in found]
        which = torch.stack(gaps).argmin(0)
        return _selected(found, which.reshape([*batch, *[1] * self.ndim]))

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        return self._choices[0]._encode(value, ignore_device)  # all have one form

    def _within(self) -> Sequence[TensorSpec]:
        return self._choices

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(value)
        return self._choices[0].to_numpy(value, safe=False)

    def type_check(self, value: Any, key: Any = None) -> None:
        self._choices[0].type_check(value, key)

    def cardinality(self) -> float:
        """Count the different values of the alternatives; infinity if one has infinitely many."""
        if isinstance(self._choices[0], NonTensor):
            return len(self._distinct())
        if any(math.isinf(choice.cardinality()) for choice in self._choices):
            return math.inf
        return len(self.enumerate())

    def _distinct(self) -> list[TensorSpec]:
        found: list[TensorSpec] = []
        for choice in self._choices:
            if choice not in found:
                found.append(choice)
        return found

    def enumerate(self, use_mask: bool = False) -> Any:
        """List the different values of all alternatives along dimension 0."""
        if isinstance(self._choices[0], NonTensor):
            return NonTensorStack(*(choice.zero() for choice in self._distinct()), stack_dim=0)
        listed = [choice.enumerate(use_mask) for choice in self._choices]
        if not all(isinstance(values, torch.Tensor) for values in listed):
            return super().enumerate(use_mask)
        rows = torch.cat(listed)
        _, inverse = torch.unique(rows.reshape(len(rows), -1), dim=0, return_inverse=True)
        places = torch.arange(len(rows), device=rows.device)
        first = places.clone().scatter_reduce_(0, inverse, places, "amin", include_self=False)
        return rows[first[: int(inverse.max()) + 1].sort().values]

    def index(self, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return self._choices[0].index(index, tensor)

    # Shape, device, copies -------------------------------------------------------------------------

    def _of(self: _Spec, change: Callable[[Any], Any]) -> _Spec:
        twin = object.__new__(type(self))
        twin._choices = tuple(change(choice) for choice in self._choices)
        return twin

    def _changed(self: _Spec, change: ShapeChange) -> _Spec:
        return self._of(lambda choice: choice._changed(change))

    def _stack(self, specs: Sequence[Any], dim: int) -> TensorSpec:
        if any(spec != self for spec in specs):
            raise SchemaError("Choice specs that differ cannot be stacked into one")
        return self.unsqueeze(dim).expand(*self.shape[:dim], len(specs), *self.shape[dim:])

    def make_neg_dim(self, dim: int) -> None:
        for choice in self._of(lambda choice: choice.clone()).choices:  # on copies first: either all change or none
            choice.make_neg_dim(dim)
        for choice in self._choices:
            choice.make_neg_dim(dim)

    def to(self: _Spec, dest: DeviceLike | torch.dtype) -> _Spec:
        return self._of(lambda choice: choice.to(dest))

    def clear_device_(self: _Spec) -> _Spec:
        for choice in self._choices:
            choice.clear_device_()
        return self

    def clone(self: _Spec) -> _Spec:
        return self._of(lambda choice: choice.clone())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and self._choices == other.choices

    def __hash__(self) -> int:
        return hash((Choice, self.dtype, self.ndim))

    def __repr__(self) -> str:
        lines = ",\n".join(f"{choice!r}".replace("\n", "\n    ") for choice in self._choices)
        return f"Choice(\n    {lines},\n    shape={self.shape})".replace(",\n", ",\n    ")


def _as_spec(choice: Any) -> TensorSpec:
    if isinstance(choice, TensorSpec):
        return choice
    if isinstance(choice, NonTensorData):
        return NonTensor(choice.batch_size, choice.device, example_data=choice.data)
    if isinstance(choice, NonTensorStack):
        return NonTensor(choice.batch_size, choice.device, example_data=choice.tolist(), batched=True)
    kind = type(choice).__name__
    raise SpecTypeError(f"a choice is a {kind}, expected a spec, a NonTensorData or a NonTensorStack")


def _holds(choice: TensorSpec, value: Any) -> bool:
    """Return whether a value is a member of an alternative; data that are no tensors have to be the example."""
    if not isinstance(choice, NonTensor):
        return choice.is_in(value)
    return choice.is_in(value) and same_value(choice.to_numpy(value), choice.example_data)


def _hold_all(choices: Sequence[LeafSpec], value: torch.Tensor, batch: torch.Size) -> bool:
    """Return whether each tensor of a batch is a member of an alternative."""
    found = torch.zeros(batch, dtype=torch.bool, device=value.device)
    for choice in choices:
        found |= choice.members_among(value, batch)
        if bool(found.all()):
            return True
    return False


def _selected(values: Sequence[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
    """Take each element from the tensor that `which`, which broadcasts to them, numbers."""
    found = values[0]
    for number, value in enumerate(values[1:], 1):
        found = torch.where(which == number, value, found)
    return found


def _picked(drawn: Sequence[Any], which: torch.Tensor) -> Any:
    """Take each value of a batch from the batch that `which` numbers; they are stacked lazily."""
    if not which.dim():
        return drawn[int(which)]
    rows = [_picked([value[row] for value in drawn], which[row]) for row in range(len(which))]
    if not rows:
        return drawn[0]
    if not is_non_tensor(rows[0]):
        return LazyStackedTensorDict.lazy_stack(rows, 0)
    return NonTensorStack(*rows, stack_dim=0)
