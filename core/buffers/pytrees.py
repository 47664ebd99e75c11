"""Functions for nests of tensors: stack elements to a batch, look up entries, exchange dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..storages.base import Storage
from ..storages.list_storage import CompressedListStorage, LazyStackStorage
from ..storages.pytree import shallow_copy, stacked


def map_tensors(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to every tensor, tensordict and tensorclass of a nest; everything else stays as it is."""
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
    """Exchange dimension `dim`, along which the user's data grows, with dimension 0, along which a storage grows."""

    def swapped(value: Any) -> Any:
        if value.ndim <= dim:
            raise SchemaError(
                f"the buffer grows along dimension {dim}, found a batch of {value.ndim} dimensions {list(value.shape)}"
            )
        return _transposed(value, dim) if _is_plain(value) else value.transpose(0, dim)

    return map_tensors(swapped, data)


def _transposed(data: TensorDict, dim: int) -> TensorDict:
    """Exchange dimensions 0 and `dim` of a plain tensordict, in half the time of its `transpose`."""
    size = list(data.batch_size)
    size[0], size[dim] = size[dim], size[0]
    entries = {
        key: _transposed(value, dim) if _is_plain(value) else value.transpose(0, dim)
        for key, value in data._tensordict.items()
    }
    return TensorDict._new_unsafe(entries, batch_size=torch.Size(size), nested=False)


def _is_plain(data: Any) -> TypeGuard[TensorDict]:
    """Return whether data is a `TensorDict` without a device and without names of dimensions."""
    return type(data) is TensorDict and data.device is None and not data._has_names()


def without_arrays(index: Any) -> Any:
    """Convert an index that is a NumPy array to a tensor; an array with one number might be taken for an int."""
    if not isinstance(index, np.ndarray):
        return index
    return torch.from_numpy(index.copy() if min(index.strides, default=0) < 0 else index)


def is_key(index: Any) -> TypeGuard[str | tuple[str, ...]]:
    """Return whether an index of a buffer is the key of an entry."""
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def is_single(index: Any) -> bool:
    """Return whether an index selects one element rather than a batch."""
    if isinstance(index, tuple):
        index = index[0]
    return isinstance(index, int | np.integer) or getattr(index, "ndim", None) == 0


def entry(data: Any, key: str | tuple[str, ...]) -> Any:
    """Return an entry of a tensordict or a nest of dicts; MissingKeyError, with the existing keys, if it is missing."""
    for part in (key,) if isinstance(key, str) else key:
        if not (isinstance(data, TensorDictBase | Mapping) or is_tensor_collection(data)):
            raise MissingKeyError(f"{key!r} not found: a {type(data).__name__} has no entry {part!r}")
        names = list(data.keys())
        if part not in names:
            raise MissingKeyError(f"{key!r} not found, expected one of {', '.join(map(repr, names)) or 'no entries'}")
        data = data[part] if isinstance(data, Mapping) else data.get(part)
    return data


def checked_batch_size(size: Any) -> int | None:
    """Return a batch size or None; UsageError (a ValueError) unless it is an int of at least 1."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int):
        raise UsageError(f"batch_size is {size!r}, expected a whole number")
    if size < 1:
        raise UsageError(f"batch_size is {size}, expected a number from 1")
    return size


def default_collate(storage: Storage) -> Callable[[Any], Any] | None:
    """Return the function that makes batches of a storage's rows; None if the storage returns batches itself."""
    if isinstance(storage, LazyStackStorage):
        return None
    if isinstance(storage, CompressedListStorage):
        return lazy_stack_elements
    return stack_elements if storage.returns_objects else None


def stack_elements(items: Any) -> Any:
    """Stack a list of elements along a new first dimension.

    Tensors and tensordicts of one shape are stacked densely, tensordicts of different shapes lazily, and nests leaf by
    leaf. A list that cannot be stacked, and anything that is not a list, is returned unchanged.
    """
    if not isinstance(items, list) or not items:
        return items
    first = items[0]
    if is_tensor_collection(first):
        return _stack_collections(items)
    if isinstance(first, torch.Tensor):
        alike = all(isinstance(item, torch.Tensor) and item.shape == first.shape for item in items)
        return torch.stack(items) if alike else items
    return _stack_nests(items)


def lazy_stack_elements(items: Any) -> Any:
    """Stack a list of tensordicts lazily, and a list of anything else as `stack_elements` does."""
    if isinstance(items, list) and items and all(is_tensor_collection(item) for item in items):
        return LazyStackedTensorDict.lazy_stack(items)
    return stack_elements(items)


def ragged_elements(batch: Any) -> list[Any] | None:
    """Return the elements of a lazily stacked batch of different shapes; None for any other batch."""
    if isinstance(batch, LazyStackedTensorDict) and batch.stack_dim == 0 and -1 in batch.batch_size:
        return list(batch.tensordicts)
    return None


def _stack_collections(items: list[Any]) -> Any:
    if (batch := stacked(items)) is not None:
        return batch
    if not all(is_tensor_collection(item) for item in items):
        return items
    if all(_alike(item, items[0]) for item in items):
        return torch.stack(items)
    # Stack shallow copies, so that entries that are added to the batch do not reach the elements.
    return LazyStackedTensorDict.lazy_stack(list(map(shallow_copy, items)))


def _alike(one: Any, other: Any) -> bool:
    """Return whether two tensordicts have the same entries with the same shapes."""
    if isinstance(one, LazyStackedTensorDict) and not all(_alike(one.tensordicts[0], part) for part in one.tensordicts):
        return False  # the entries of a lazy stack of different shapes cannot be read
    if one is other:
        return True
    if isinstance(other, LazyStackedTensorDict) and not isinstance(one, LazyStackedTensorDict):
        return _alike(other, one)
    if one.batch_size != other.batch_size or set(one.keys()) != set(other.keys()):
        return False
    for key, value in one.items():
        match = other.get(key)
        if is_tensor_collection(value) != is_tensor_collection(match):
            return False
        if is_tensor_collection(value) and not _alike(value, match):
            return False
        if value.shape != match.shape:
            return False
    return True


def _stack_nests(items: list[Any]) -> Any:
    first = items[0]
    if not all(type(item) is type(first) for item in items):
        return items
    if isinstance(first, Mapping) and all(item.keys() == first.keys() for item in items):
        return {key: stack_elements([item[key] for item in items]) for key in first}
    if isinstance(first, list | tuple) and len({len(item) for item in items}) == 1:
        children = [stack_elements([item[place] for item in items]) for place in range(len(first))]
        return type(first)(*children) if hasattr(first, "_fields") else type(first)(children)
    return items
