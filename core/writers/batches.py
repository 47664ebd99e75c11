"""Batches: how many elements they have, which of them are chosen, and the row numbers stored with them.

A tensor, a tensordict and a tensorclass are batches along dimension 0; a list is a sequence of elements, and so is an
array, a range or a set; a tuple and a dict are nests whose leaves share dimension 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from ..errors import SchemaError
from ..storages.base import Storage
from ..storages.tensor import TensorStorage


class EmptyBatchError(SchemaError, IndexError):
    """A batch without elements was to be written."""


class NotABatchError(SchemaError, TypeError):
    """Data without a dimension of elements was to be written as a batch."""


def batch_length(data: Any) -> int:
    """Count the elements of a batch.

    NotABatchError (a TypeError) for data without a dimension of elements, EmptyBatchError (an IndexError) for 0
    elements, and SchemaError, their base, for leaves of different lengths.
    """
    if type(data) is TensorDict or isinstance(data, torch.Tensor) or is_tensor_collection(data):
        count = _leading(data, "the data")
    elif isinstance(data, tuple | Mapping):
        count = _common_length(data)
    elif hasattr(data, "__len__") and not isinstance(data, str | bytes):
        count = len(data)
    else:
        raise NotABatchError(f"expected a batch of elements, found a {type(data).__name__}")
    if not count:
        raise EmptyBatchError("expected a batch of at least one element, found none")
    return count


def _leading(data: Any, name: str) -> int:
    shape = data.shape if isinstance(data, torch.Tensor) else data.batch_size
    if not shape:
        raise NotABatchError(
            f"{name} has no dimension to count elements along, expected a batch", hint="write one element with add()"
        )
    return int(shape[0])


def _common_length(data: Any) -> int:
    lengths = {".".join(path): _length_of_leaf(leaf, path) for path, leaf in _leaves(data, ())}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise SchemaError(f"expected leaves of one length, {found}")
    return next(iter(lengths.values()), 0)


def _length_of_leaf(leaf: Any, path: tuple[str, ...]) -> int:
    name = f"the entry {'.'.join(path)!r}"
    if isinstance(leaf, torch.Tensor) or is_tensor_collection(leaf):
        return _leading(leaf, name)
    if hasattr(leaf, "__len__") and not isinstance(leaf, str | bytes):
        return len(leaf)
    raise NotABatchError(f"{name} is a {type(leaf).__name__}, expected something with elements to count")


def _leaves(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a nest with their paths; below the root a list is a node, like a tuple."""
    if is_tensor_collection(data) or not isinstance(data, tuple | list | Mapping):
        yield path, data
        return
    for key, child in data.items() if isinstance(data, Mapping) else enumerate(data):
        yield from _leaves(child, (*path, str(key)))


def capacity_rows(max_size: int, ndim: int, data: Any, *, batch: bool = False) -> int:
    """Return how many rows of the shape of `data` a storage of `max_size` elements has, rounded up.

    With `batch`, `data` is a batch of such rows. SchemaError if it has fewer than `ndim` dimensions of elements.
    """
    if ndim == 1:
        return max_size
    if batch and isinstance(data, list):
        data, batch = data[0], False
    leaf = next(_leaves(data, ()))[1]
    shape = tuple(getattr(leaf, "batch_size" if is_tensor_collection(leaf) else "shape", ()))
    others = shape[batch : batch + ndim - 1]
    if len(others) < ndim - 1:
        raise SchemaError(f"expected data with at least {ndim - 1 + batch} dimensions, found {list(shape)}")
    lanes: int = max(1, math.prod(others))
    return -(-max_size // lanes)


def as_batch(data: Any) -> Any:
    """Return a batch of one element."""
    return data[None] if isinstance(data, torch.Tensor) or is_tensor_collection(data) else [data]


def chosen_rows(data: Any, rows: torch.Tensor) -> Any:
    """Return the elements of a batch at `rows`, int64 `[n]`, as a batch of the same kind."""
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return data[rows.to(data.device) if data.device is not None else rows]
    if isinstance(data, Mapping):
        return {key: chosen_rows(child, rows) for key, child in data.items()}
    if isinstance(data, tuple):
        return tuple(chosen_rows(child, rows) for child in data)
    return [data[row] for row in rows.tolist()]


INDEX = "index"


class Labels:
    """Adds row numbers to the data of one storage, unless its rows were made without them."""

    def __init__(self) -> None:
        self._kept: bool | None = None

    def put(self, data: TensorDictBase, rows: int | range | torch.Tensor, storage: Storage) -> TensorDictBase:
        """Return a shallow copy of `data` with `"index"`, int64 of its batch size."""
        if self._kept is None:
            self._kept = _has_place(storage)
        if self._kept is False:
            return data
        numbers = row_numbers(rows)
        storage.numbered_by = INDEX
        if type(data) is TensorDict and data.device is None and isinstance(storage, TensorStorage):
            # Such a storage copies the leaves, so the nests may be those of the data: `copy()` takes ten times as long.
            entries = {**data._tensordict, INDEX: _spread(numbers, data.batch_size)}
            return TensorDict._new_unsafe(entries, batch_size=data.batch_size, nested=False)
        labelled = data.copy()
        if isinstance(labelled, LazyStackedTensorDict) and labelled.stack_dim == 0 and numbers.dim():
            for row, element in zip(numbers, labelled.tensordicts, strict=True):  # whose shapes may differ
                element.set(INDEX, row.expand(element.batch_size))
            return labelled
        return labelled.set(INDEX, _spread(numbers, data.batch_size))


def row_numbers(rows: int | range | torch.Tensor) -> torch.Tensor:
    """Return rows as int64 `[n]`, an int as `[]`."""
    if isinstance(rows, range):
        return torch.from_numpy(np.arange(rows.start, rows.stop))  # half of the time of torch.arange
    return torch.as_tensor(rows)


def _spread(numbers: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Repeat the numbers of rows, or of one, for all elements of the batch size `size`."""
    if numbers.shape == size:
        return numbers
    return (numbers.reshape(-1, *[1] * (len(size) - 1)) if size and numbers.dim() else numbers).expand(size)


def _has_place(storage: Storage) -> bool | None:
    """Whether the rows of a storage have an `"index"`; None before the first write."""
    try:
        rows = storage.read_at(slice(0, 0))
    except (RuntimeError, IndexError):  # nothing was ever written
        return None
    if not is_tensor_collection(rows):  # a list, whose rows need not be alike
        return True
    names = set(rows.keys())
    return INDEX in names if names else None
