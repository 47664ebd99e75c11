"""The base class of the specs of single tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ..errors import SchemaError, UsageError
from .base import TensorSpec, batch_of, batched, checks_encoding, concrete
from .shaping import ShapeChange, changed_parameter, changed_shape, normal_dim
from .values import (
    DeviceLike,
    ShapeLike,
    SpecTypeError,
    as_device,
    as_dtype,
    as_shape,
    encoded,
    fresh,
    same_value,
    to_array,
)

_Leaf = TypeVar("_Leaf", bound="LeafSpec")

_NUMPY = {
    getattr(torch, name): np.dtype("bool" if name == "bool" else name)
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""The numpy types whose arrays torch takes as they are."""

_CPU = torch.device("cpu")  # compared with in an eighth of the time of reading a device's type


class LeafSpec(TensorSpec):
    """The spec of one tensor.

    A subclass keeps parameters of single elements, such as bounds, in tensors whose leading dimensions are those of the
    spec (1 where the size is unknown) and names them in `_PARAMETERS`: they then follow each change of shape. Other
    attributes that distinguish two specs of one class are named in `_FACTS`.
    """

    _PARAMETERS: ClassVar[tuple[str, ...]] = ()
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

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    # Values ----------------------------------------------------------------------------------------

    def _fill(self, shape: torch.Size, value: int) -> torch.Tensor:
        return torch.full(batched(shape, self._shape), value, dtype=self._dtype, device=self._device)

    @abstractmethod
    def _members(self, value: torch.Tensor) -> torch.Tensor:
        """Return for each element of a tensor of the right shape and type whether it is in the domain."""

    @abstractmethod
    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the member next to a tensor of the right trailing shape and any type."""

    def is_in(self, value: Any) -> bool:
        """Return whether a value is a tensor of this spec's element type and trailing shape, with all values legal.

        The device does not matter.
        """
        if not isinstance(value, torch.Tensor) or value.dtype != self._dtype:
            return False
        if batch_of(value.shape, self._shape) is None:
            return False
        return self._are_members(value)

    def _are_members(self, value: torch.Tensor) -> bool:
        """Return whether all elements of a tensor of the right type and trailing shape are in the domain."""
        return bool(self._members(value).all())

    def members_among(self, value: torch.Tensor, batch: torch.Size) -> torch.Tensor:
        """Return which values of a batch `[*batch, *spec.shape]` of this element type are members; bool `batch`."""
        found = self._members(value)
        return found.reshape([*batch, -1]).all(-1) if found.dim() else found.expand(batch)

    def project(self, value: Any) -> torch.Tensor:
        """Return the value itself if it is a member, else a new tensor with each element at the nearest legal one.

        NaN goes to the legal value next to zero. SpecTypeError for what is not a tensor or has complex elements where
        the spec has real ones, SchemaError for another trailing shape.
        """
        if not isinstance(value, torch.Tensor):
            raise SpecTypeError(f"cannot project a {type(value).__name__}, expected a tensor")
        if self.is_in(value):
            return value
        if batch_of(value.shape, self._shape) is None:
            raise SchemaError(f"a tensor of shape {list(value.shape)} does not end with the spec's {list(self._shape)}")
        if value.is_complex() and not self._dtype.is_complex:
            raise SpecTypeError(f"the tensor is {value.dtype}, which has no nearest {self._dtype}")
        return self._nearest(value)

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
        """Forget what `encode` remembered."""
        if self._memo is not None:
            self._memo = {}

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(value)
        return to_array(torch.as_tensor(value))

    def type_check(self, value: Any, key: Any = None) -> None:
        found = value.dtype if isinstance(value, torch.Tensor) else None
        if found != self._dtype:
            what = f"of type {found}" if found else f"a {type(value).__name__}"
            place = f"{key!r}" if key is not None else "the value"
            raise SpecTypeError(f"{place} is {what}, expected a tensor of {self._dtype}")

    # Shape, device, copies -------------------------------------------------------------------------

    def _twin(self: _Leaf, **changes: Any) -> _Leaf:
        """Return a copy that shares tensors, with some attributes changed."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _memo=None if self._memo is None else {}, **changes)
        return twin

    def _parameters(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in self._PARAMETERS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _changed(self: _Leaf, change: ShapeChange) -> _Leaf:
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
                raise SchemaError(f"no one spec holds both {found} and {other}, stacked")
        stacked = {
            name: torch.stack([getattr(spec, name) for spec in specs], dim)  # dense: each row can be edited by itself
            for name in self._parameters()
        }
        return self._twin(_shape=torch.Size([*self._shape[:dim], len(specs), *self._shape[dim:]]), **stacked)

    def make_neg_dim(self, dim: int) -> None:
        """Let one dimension have any size, in place; UsageError if what is known of its elements differs."""
        place = normal_dim(dim, self.ndim)
        narrow = {name: tensor.narrow(place, 0, 1) for name, tensor in self._parameters().items()}
        for name, tensor in narrow.items():
            if not same_value(tensor.expand_as(getattr(self, name)), getattr(self, name)):
                raise UsageError(f"dimension {dim} cannot have any size: what is legal differs along it")
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])
        self.__dict__.update(narrow)

    def to(self: _Leaf, dest: DeviceLike | torch.dtype) -> _Leaf:
        """Return this spec for another device or element type, or itself if it is that already."""
        if isinstance(dest, torch.dtype):
            return self if dest == self._dtype else self._to_dtype(dest)
        device = as_device(dest)
        if device == self._device:
            return self
        moved = {name: fresh(tensor, device) for name, tensor in self._parameters().items()}
        return self._twin(_device=device, **moved)

    def _to_dtype(self: _Leaf, dtype: torch.dtype) -> _Leaf:
        return self._twin(_dtype=dtype)

    def clone(self: _Leaf) -> _Leaf:
        return self._twin(**{name: fresh(tensor) for name, tensor in self._parameters().items()})

    # Equality --------------------------------------------------------------------------------------

    def _family(self) -> type[LeafSpec]:
        """The class within which specs may be equal."""
        return type(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafSpec) or self._family() is not other._family():
            return False
        named = (*self._FACTS, *self._PARAMETERS)
        if (self._shape, self._device, self._dtype) != (other._shape, other._device, other._dtype):
            return False
        return all(same_value(getattr(self, name), getattr(other, name)) for name in named)

    def __hash__(self) -> int:
        # Only what no method changes in place, so that a spec in a set stays findable.
        return hash((self._family(), self._dtype, self.ndim))

    def _details(self) -> dict[str, Any]:
        """What `repr` shows."""
        return {
            "shape": self.shape, "space": self.space, "device": self.device, "dtype": self.dtype, "domain": self.domain,
        }  # fmt: skip

    def __repr__(self) -> str:
        lines = ",\n".join(f"    {name}={value}" for name, value in self._details().items())
        return f"{type(self).__name__}(\n{lines})"
