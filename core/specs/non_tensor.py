"""Values that are not tensors: text, objects, whatever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection

from ..errors import SchemaError, UsageError
from .base import TensorSpec, batched, checks_encoding, concrete
from .shaping import ShapeChange, changed_shape, normal_dim
from .values import DeviceLike, ShapeLike, SpecTypeError, as_device, as_dtype, as_shape, same_value

_Spec = TypeVar("_Spec", bound="NonTensor")


class NonTensor(TensorSpec):
    """Anything but tensors, of a batch shape; draws, zeros and ones are all the example.

    `example_data` is one datum, which is at every place of `shape`. With `batched` it is nested sequences of as
    many data as `shape` has places, one for each; without an example, each is None. `feature_dims` is how many of the
    last dimensions belong to the datum itself; it and `batched` exclude each other (UsageError). Values are
    tensordict's NonTensorData, or a NonTensorStack where the data differ from place to place.

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
        if batched and feature_dims is not None:
            raise UsageError("batched and feature_dims are both set, expected at most one of them")
        self._shape = as_shape(shape)
        self._device = None if device is None else as_device(device)
        self._dtype = None if dtype is None else as_dtype(dtype, torch.float32)
        if feature_dims is not None and not 0 <= feature_dims <= len(self._shape):
            raise UsageError(f"feature_dims is {feature_dims}, of a shape of {len(self._shape)} dimensions")
        self._example = example_data
        self._feature_dims = feature_dims or 0
        self._places = _data_of(example_data, self._shape) if batched else None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def device(self) -> torch.device | None:
        return self._device

    @property
    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @property
    def batched(self) -> bool:
        """Whether the example holds one datum for each place of the shape."""
        return self._places is not None

    @property
    def feature_dims(self) -> int:
        """How many of the last dimensions belong to the datum."""
        return self._feature_dims

    @property
    def example_data(self) -> Any:
        """The example; nested lists of the spec's shape where it is batched."""
        return self._example if self._places is None else self._places.tolist()

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._wrapped(shape)

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._wrapped(shape)

    def _wrapped(self, shape: torch.Size) -> Any:
        size = batched(shape, self._shape)
        if self._places is None or not size.numel():
            return NonTensorData(self._example, batch_size=size, device=self._device)
        return _stacked(np.broadcast_to(self._places, size), self._device)

    def is_in(self, value: Any) -> bool:
        """Return whether a value is anything but a tensor or a nest of tensors."""
        if isinstance(value, torch.Tensor):
            return False
        return bool(is_non_tensor(value)) or not is_tensor_collection(value)

    def project(self, value: Any) -> Any:
        """Return the value if it is a member, else the example."""
        return value if self.is_in(value) else self._wrapped(torch.Size())

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Wrap a value as NonTensorData of this shape; what is wrapped passes as it is."""
        if is_non_tensor(value):
            return value
        device = None if ignore_device else self._device
        return NonTensorData(value, batch_size=concrete(self._shape), device=device)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return the datum itself, or nested lists where data differ from place to place."""
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(value)
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if is_non_tensor(value) else value

    def type_check(self, value: Any, key: Any = None) -> None:
        if not self.is_in(value):
            place = f"{key!r}" if key is not None else "the value"
            raise SpecTypeError(f"{place} is a {type(value).__name__}, expected anything but a tensor")

    # Shape, device, copies -------------------------------------------------------------------------

    def _twin(self: _Spec, **changes: Any) -> _Spec:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, **changes)
        return twin

    def _changed(self: _Spec, change: ShapeChange) -> _Spec:
        shape = changed_shape(self._shape, change)
        features = min(self._feature_dims, len(shape))
        if self._places is None:
            return self._twin(_shape=shape, _feature_dims=features)
        numbers = change.apply(torch.arange(self._places.size).reshape(self._places.shape))
        places = np.empty(shape, dtype=object)
        places.reshape(-1)[:] = self._places.reshape(-1)[numbers.reshape(-1).numpy()]
        return self._twin(_shape=shape, _places=places)

    def _stack(self, specs: Sequence[Any], dim: int) -> NonTensor:
        """Stack specs; examples that differ make a batched one."""
        shape = torch.Size([*self._shape[:dim], len(specs), *self._shape[dim:]])
        if any(spec.feature_dims != self._feature_dims for spec in specs):
            raise SchemaError("NonTensor specs that differ in feature_dims cannot be stacked")
        alike = all(same_value(spec.example_data, self.example_data) for spec in specs)
        if alike and not any(spec.batched for spec in specs):
            return self._twin(_shape=shape)
        if -1 in self._shape:
            raise SchemaError("NonTensor specs of unknown size cannot be stacked while their examples differ")
        places = [(_data_of if spec.batched else _repeated)(spec.example_data, self._shape) for spec in specs]
        return self._twin(_shape=shape, _places=np.stack(places, dim), _example=None)

    def make_neg_dim(self, dim: int) -> None:
        if self._places is not None:
            raise UsageError("a batched NonTensor has one datum for each place: no dimension can have any size")
        place = normal_dim(dim, self.ndim)
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])

    def to(self: _Spec, dest: DeviceLike | torch.dtype) -> _Spec:
        """Return this spec for another device; an element type leaves it as it is."""
        return self if isinstance(dest, torch.dtype) else self._twin(_device=as_device(dest))

    def clear_device_(self: _Spec) -> _Spec:
        """Forget the device, in place."""
        self._device = None
        return self

    def clone(self: _Spec) -> _Spec:
        return self._twin(_places=None if self._places is None else self._places.copy())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NonTensor):
            return False
        facts = ("_shape", "_device", "_dtype", "_feature_dims", "batched")
        return all(getattr(self, fact) == getattr(other, fact) for fact in facts) and same_value(
            self.example_data, other.example_data
        )

    def __hash__(self) -> int:
        return hash((NonTensor, self.ndim))

    def __repr__(self) -> str:
        names = ("shape", "space", "device", "dtype", "domain")
        lines = [f"{name}={getattr(self, name)}" for name in names]
        return "NonTensor(\n    " + ",\n    ".join([*lines, f"example_data={self.example_data!r}"]) + ")"


def _repeated(datum: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
    """Put one datum, whatever it is, at each place of an array."""
    places = np.empty(shape, dtype=object)
    for number in range(places.size):
        places.reshape(-1)[number] = datum
    return places


def _data_of(nested: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
    """Take nested sequences apart down to the depth of the shape; UsageError if they have another."""
    if -1 in shape:
        raise UsageError(f"a batched NonTensor has one datum for each place, its shape is {list(shape)}")
    if nested is None:
        return _repeated(None, shape)
    places = np.empty(shape, dtype=object)
    for number, place in enumerate(np.ndindex(*shape)):
        datum = nested
        for size, row in zip(shape, place, strict=True):
            if isinstance(datum, str) or not hasattr(datum, "__len__") or len(datum) != size:
                raise UsageError(f"the example is not nested sequences of the shape {list(shape)}: {nested!r}")
            datum = datum[row]
        places.reshape(-1)[number] = datum
    return places


def _stacked(places: np.ndarray[Any, Any], device: torch.device | None) -> Any:
    if not places.ndim:
        return NonTensorData(places.item(), batch_size=(), device=device)
    return NonTensorStack(*(_stacked(places[row, ...], device) for row in range(len(places))), stack_dim=0)
