"""NonTensor, the spec of text and other objects, and Choice, the spec of values of one of several specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection

from ..errors import SchemaError, UsageError, require_flags, suggests_keywords
from .base import (
    BoxList,
    DeviceLike,
    LeafSpec,
    ShapeChange,
    ShapeLike,
    SpecTypeError,
    TensorSpec,
    as_device,
    as_dtype,
    as_shape,
    batch_of,
    batched,
    changed_shape,
    concrete,
    make_neg_dim_of_all,
    normal_dim,
    same_value,
)
from .bridge import as_own


class NonTensor(TensorSpec):
    """Any data except tensors, such as text, with a batch shape; draws, zeros and ones all return the example.

    Values are tensordict's NonTensorData, or a NonTensorStack of them if data differ between elements or some
    dimensions do not belong to the datum itself.

    Args:
        shape: the batch shape.
        device: the device that values report.
        example_data: one datum for every element; None by default.
        batched: whether `example_data` has a datum for each element of `shape`, as nested sequences. A single datum
            then stands for all elements.
        feature_dims: how many of the last dimensions belong to the datum itself. By default all of them, or none if the
            spec is `batched`. UsageError (a ValueError) together with `batched`.

    >>> from rbtool import NonTensor
    >>> NonTensor((), example_data="pick up the cup").rand().data
    'pick up the cup'
    """

    def __init__(
        self,
        shape: ShapeLike = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
    ) -> None:
        if batched is not None:
            require_flags(batched=batched)
            if feature_dims is not None:
                raise UsageError("batched and feature_dims are both set, expected at most one of them")
        self._shape = as_shape(shape)
        self._device = None if device is None else as_device(device)
        self._dtype = None if dtype is None else as_dtype(dtype, torch.float32)
        if feature_dims is not None and not 0 <= feature_dims <= len(self._shape):
            raise UsageError(f"feature_dims is {feature_dims}, but the shape has {len(self._shape)} dimensions")
        self._example = example_data
        self._batched = bool(batched)
        self._feature_dims = (0 if batched else len(self._shape)) if feature_dims is None else feature_dims
        nested = (
            batched and isinstance(example_data, Sequence | np.ndarray) and not isinstance(example_data, str | bytes)
        )
        self._places = _data_of(example_data, self._shape) if nested else None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        size = as_shape(shape)
        if self._places is not None:
            self._places = _data_of(self.example_data, size)
        self._shape = size

    @property
    def device(self) -> torch.device | None:
        return self._device

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        self._device = None if device is None else as_device(device)

    @property
    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    @property
    def batched(self) -> bool:
        """Whether the spec was created with `batched=True`, so that no dimension belongs to the datum."""
        return self._batched

    @property
    def feature_dims(self) -> int:
        """The number of last dimensions that belong to the datum."""
        return self._feature_dims

    @property
    def example_data(self) -> Any:
        """The example; nested lists of the spec's shape if it is batched."""
        return self._example if self._places is None else self._places.tolist()

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._wrapped(shape)

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._wrapped(shape)

    def _wrapped(self, shape: torch.Size) -> Any:
        size = batched(shape, self._shape)
        lead = size[: len(size) - self._feature_dims]
        if not size.numel() or (self._places is None and not (self._feature_dims and lead)):
            return NonTensorData(self._example, batch_size=size, device=self._device)
        places = _repeated(self._example, torch.Size()) if self._places is None else self._places
        return _stacked(np.broadcast_to(places, lead), size[len(lead) :], self._device)

    def is_in(self, val: Any) -> bool:
        """Return whether a value is anything but a tensor or a nest of tensors."""
        if isinstance(val, torch.Tensor):
            return False
        return bool(is_non_tensor(val)) or not is_tensor_collection(val)

    def project(self, val: Any) -> Any:
        """Return the value if it is a member, else the example."""
        return val if self.is_in(val) else self._wrapped(torch.Size())

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Wrap a value as NonTensorData of this shape; wrapped values are returned unchanged."""
        if is_non_tensor(value):
            return value
        device = None if ignore_device else self._device
        return NonTensorData(value, batch_size=concrete(self._shape), device=device)

    def _to_numpy(self, value: Any) -> Any:
        """Return the datum itself, or nested lists if data differ between elements."""
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if is_non_tensor(value) else value

    def type_check(self, value: Any, key: Any = None) -> None:
        if not self.is_in(value):
            place = f"{key!r}" if key is not None else "the value"
            raise SpecTypeError(f"{place} is a {type(value).__name__}, expected anything but a tensor")

    # Shape, device, copies -------------------------------------------------------------------------

    def _twin(self, **changes: Any) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, **changes)
        return twin

    def _changed(self, change: ShapeChange) -> Self:
        shape = changed_shape(self._shape, change)
        if self._places is None:
            return self._twin(_shape=shape, _feature_dims=min(self._feature_dims, len(shape)))
        if -1 in shape:
            raise UsageError("a batched NonTensor has one datum for each element, so all sizes are fixed")
        numbers = change.apply(torch.arange(self._places.size).reshape(self._places.shape))
        places = np.empty(shape, dtype=object)
        places.reshape(-1)[:] = self._places.reshape(-1)[numbers.reshape(-1).numpy()]
        return self._twin(_shape=shape, _places=places)

    def _stack(self, specs: Sequence[Any], dim: int) -> NonTensor:
        """Stack specs; examples that differ make a batched one."""
        shape = torch.Size([*self._shape[:dim], len(specs), *self._shape[dim:]])
        if all(spec._places is None and same_value(spec.example_data, self.example_data) for spec in specs):
            return self._twin(_shape=shape, _feature_dims=min(spec.feature_dims for spec in specs))
        if -1 in self._shape:
            raise SchemaError("NonTensor specs of unknown size cannot be stacked while their examples differ")
        places = [_repeated(spec.example_data, self._shape) if spec._places is None else spec._places for spec in specs]
        return self._twin(_shape=shape, _places=np.stack(places, dim), _example=None, _batched=True, _feature_dims=0)

    def make_neg_dim(self, dim: int) -> None:
        if self._places is not None:
            raise UsageError("a batched NonTensor has one datum for each element, so all sizes are fixed")
        place = normal_dim(dim, self.ndim)
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this spec with another device; element types are ignored."""
        return self if isinstance(dest, torch.dtype) else self._twin(_device=as_device(dest))

    def clear_device_(self) -> Self:
        """Remove the device, in place."""
        self._device = None
        return self

    def clone(self) -> Self:
        return self._twin(_places=None if self._places is None else self._places.copy())

    def _equals(self, other: object) -> bool:
        if not isinstance(other, NonTensor):
            return False
        if (self._shape, self._device, self._dtype) != (other._shape, other._device, other._dtype):
            return False
        nested = self._places is not None, other._places is not None
        return nested[0] is nested[1] and same_value(self.example_data, other.example_data)

    def __hash__(self) -> int:
        return hash((NonTensor, self.ndim))

    def __repr__(self) -> str:
        names = ("shape", "space", "device", "dtype", "domain")
        lines = [f"{name}={getattr(self, name)}" for name in names]
        return "NonTensor(\n    " + ",\n    ".join([*lines, f"example_data={self.example_data!r}"]) + ")"


def _repeated(datum: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
    """Return an object array of this shape with the same datum everywhere."""
    places = np.empty(shape, dtype=object)
    for number in range(places.size):
        places.reshape(-1)[number] = datum
    return places


def _data_of(nested: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
    """Return the data in nested sequences as an object array; UsageError if their shape differs."""
    if -1 in shape:
        raise UsageError(f"a batched NonTensor has one datum for each element, but its shape is {list(shape)}")
    places = np.empty(shape, dtype=object)
    for number, place in enumerate(np.ndindex(*shape)):
        datum = nested
        for size, row in zip(shape, place, strict=True):
            if isinstance(datum, str) or not hasattr(datum, "__len__") or len(datum) != size:
                raise UsageError(f"the example is not nested sequences of the shape {list(shape)}: {nested!r}")
            datum = datum[row]
        places.reshape(-1)[number] = datum
    return places


def _stacked(places: np.ndarray[Any, Any], features: torch.Size, device: torch.device | None) -> Any:
    """Stack data, each of shape `features`."""
    if not places.ndim:
        return NonTensorData(places.item(), batch_size=features, device=device)
    return NonTensorStack(*(_stacked(places[row, ...], features, device) for row in range(len(places))), stack_dim=0)


def _of_all(name: str) -> Any:
    """Return a property that is equal in all alternatives; assigning it changes all of them."""

    def assign(spec: Choice, value: Any) -> None:
        for choice in spec.choices:
            setattr(choice, name, value)

    return property(lambda spec: getattr(spec.choices[0], name), assign)


class Choice(TensorSpec):
    """One of several specs: a value is a member of at least one of them.

    A draw chooses one of them with equal probabilities, separately for each value of a batch.

    Args:
        choices: specs of the same class, shape, element type and device, or NonTensorData. An alternative that is given
            as NonTensorData has this datum as its only member.

    Raises:
        SpecTypeError (a TypeError): `choices` is not such a list, or the choices differ in class.
        UsageError (a ValueError): the choices differ in shape, element type or device.

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
        """The number of alternatives."""
        return len(self._choices)

    shape, device, dtype, domain = map(_of_all, ("shape", "device", "dtype", "domain"))

    def _box(self) -> BoxList | None:
        """Return the set of values of each alternative; None if they have none."""
        spaces = [choice.space for choice in self._choices]
        return None if None in spaces else BoxList(spaces)

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

    def is_in(self, val: Any) -> bool:
        """Return whether a value, or each one of a batch, is a member of one of the alternatives."""
        batch, leaves = self._batch(val), [choice for choice in self._choices if isinstance(choice, LeafSpec)]
        if batch and leaves and isinstance(val, torch.Tensor) and val.dtype == self.dtype and val.numel():
            return _hold_all(leaves, val, batch)
        if any(_holds(choice, val) for choice in self._choices):
            return True
        return bool(batch) and all(self.is_in(part) for part in val.unbind(0))

    def _batch(self, value: Any) -> torch.Size | None:
        shape = getattr(value, "shape", None)
        return batch_of(shape, self.shape) if isinstance(shape, torch.Size) else None

    def project(self, val: Any) -> Any:
        """Return the value if it is a member, else the nearest member of the alternatives (of the first on a tie).

        Values that are not tensors are projected to the first alternative.
        """
        if self.is_in(val):
            return val
        if not isinstance(val, torch.Tensor):
            return (
                self._choices[0].zero() if self.dtype is None and is_non_tensor(val) else self._choices[0].project(val)
            )
        batch = self._batch(val)
        if batch is None:
            raise SchemaError(f"a tensor of shape {list(val.shape)} does not end with the spec's {list(self.shape)}")
        found = [choice.project(val) for choice in self._choices]
        gaps = [(one.double() - val.double().nan_to_num()).square().reshape([*batch, -1]).sum(-1) for one in found]
        which = torch.stack(gaps).argmin(0)
        return _selected(found, which.reshape([*batch, *[1] * self.ndim]))

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        return self._choices[0]._encode(value, ignore_device)  # all alternatives encode alike

    def _within(self) -> Sequence[TensorSpec]:
        return self._choices

    def _to_numpy(self, value: Any) -> Any:
        return self._choices[0]._to_numpy(value)

    def type_check(self, value: Any, key: Any = None) -> None:
        self._choices[0].type_check(value, key)

    def cardinality(self) -> float:
        """Return the number of different values of all alternatives; infinity if one has infinitely many."""
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

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return the different values of all alternatives along dimension 0."""
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

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        return self._choices[0].index(index, tensor_to_index)

    # Shape, device, copies -------------------------------------------------------------------------

    def _mapped(self, change: Callable[[Any], Any]) -> Self:
        twin = object.__new__(type(self))
        twin._choices = tuple(change(choice) for choice in self._choices)
        return twin

    def _changed(self, change: ShapeChange) -> Self:
        return self._mapped(lambda choice: choice._changed(change))

    def make_neg_dim(self, dim: int) -> None:
        make_neg_dim_of_all(self._choices, dim)

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        return self._mapped(lambda choice: choice.to(dest))

    def clone(self) -> Self:
        return self._mapped(lambda choice: choice.clone())

    def _equals(self, other: object) -> bool:
        return isinstance(other, Choice) and self._choices == other.choices

    def __hash__(self) -> int:
        return hash((Choice, self.dtype, self.ndim))

    def __repr__(self) -> str:
        lines = ",\n".join(f"{choice!r}".replace("\n", "\n    ") for choice in self._choices)
        return f"Choice(\n    {lines},\n    shape={self.shape})".replace(",\n", ",\n    ")


def _as_spec(choice: Any) -> TensorSpec:
    if isinstance(choice, TensorSpec):
        return as_own(choice)  # type: ignore[no-any-return]
    if isinstance(choice, NonTensorData):
        return NonTensor(choice.batch_size, choice.device, example_data=choice.data)
    if isinstance(choice, NonTensorStack):
        return NonTensor(choice.batch_size, choice.device, example_data=choice.tolist(), batched=True)
    kind = type(choice).__name__
    raise SpecTypeError(f"a choice is a {kind}, expected a spec, a NonTensorData or a NonTensorStack")


def _holds(choice: TensorSpec, value: Any) -> bool:
    """Return whether a value is a member of an alternative; non-tensor data must equal the example."""
    if not isinstance(choice, NonTensor):
        return value in choice  # False for a nest that lacks entries of this alternative
    return choice.is_in(value) and same_value(choice.to_numpy(value), choice.example_data)


def _hold_all(choices: Sequence[LeafSpec], value: torch.Tensor, batch: torch.Size) -> bool:
    """Return whether each value of a batch is a member of some alternative."""
    found = torch.zeros(batch, dtype=torch.bool, device=value.device)
    for choice in choices:
        found |= choice.members_among(value, batch)
        if bool(found.all()):
            return True
    return False


def _selected(values: Sequence[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
    """Select each element from the tensor with the number in `which`, which broadcasts to the tensors."""
    found = values[0]
    for number, value in enumerate(values[1:], 1):
        found = torch.where(which == number, value, found)
    return found


def _picked(drawn: Sequence[Any], which: torch.Tensor) -> Any:
    """Select each value of a batch from the batch with the number in `which`, and stack the values lazily."""
    if not which.dim():
        return drawn[int(which)]
    rows = [_picked([value[row] for value in drawn], which[row]) for row in range(len(which))]
    if not rows:
        return drawn[0]
    if not is_non_tensor(rows[0]):
        return LazyStackedTensorDict.lazy_stack(rows, 0)
    return NonTensorStack(*rows, stack_dim=0)
