"""Between the layout that users see and the one in which storages grow, and from keys to entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError

__all__ = ["checked_batch_size", "entry", "is_key", "map_tensors", "swap", "without_arrays"]


def map_tensors(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to every tensor, tensordict and tensorclass of a nest; leave anything else alone."""
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(function, value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        children = [map_tensors(function, value) for value in data]
        if hasattr(data, "_fields"):
            return type(data)(*children)
        return tuple(children) if isinstance(data, tuple) else children
    return data


def swap(data: Any, dim: int) -> Any:
    """Exchange dimension `dim`, along which a storage grows, with dimension 0, where the storage keeps it."""

    def swapped(value: Any) -> Any:
        if value.ndim <= dim:
            raise SchemaError(
                f"dimension {dim} is the one that grows, found a batch of {value.ndim} dimensions {list(value.shape)}"
            )
        return value.transpose(0, dim)

    return map_tensors(swapped, data)


def without_arrays(index: Any) -> Any:
    """Return an index with arrays made tensors: an array of one number would be taken for an int, others refused."""
    if not isinstance(index, np.ndarray):
        return index
    return torch.from_numpy(index.copy() if min(index.strides, default=0) < 0 else index)


def is_key(index: Any) -> TypeGuard[str | tuple[str, ...]]:
    """Tell whether what stands between the brackets of a buffer names an entry."""
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def entry(data: Any, key: str | tuple[str, ...]) -> Any:
    """Return one entry of a tensordict or a nest of dicts; MissingKeyError names what there is."""
    for part in (key,) if isinstance(key, str) else key:
        if not (isinstance(data, TensorDictBase | Mapping) or is_tensor_collection(data)):
            raise MissingKeyError(f"{key!r} was asked for, but {part!r} would be an entry of a {type(data).__name__}")
        names = list(data.keys())
        if part not in names:
            raise MissingKeyError(f"{key!r} was asked for, there are {', '.join(map(repr, names)) or 'no entries'}")
        data = data[part] if isinstance(data, Mapping) else data.get(part)
    return data


def checked_batch_size(size: Any) -> int | None:
    """Return a batch size, or None for none; UsageError (a ValueError) for what is not a number from 1."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int):
        raise UsageError(f"batch_size is a whole number, found {size!r}")
    if size < 1:
        raise UsageError(f"batch_size is {size}, at least 1 is needed")
    return size
