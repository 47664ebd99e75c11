"""Element numbers, which count through all dimensions of a storage in row-major order, from indices."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from typing import Any

import numpy as np
import torch

from ..errors import SchemaError, UsageError
from ..storages.base import Storage
from ..storages.cursors import as_index

_WHOLE = "elements are named by whole numbers"


class NoNumbersError(UsageError, TypeError):
    """An index or priorities are not numbers."""


def priority_values(priority: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return priorities, a number or nested lists, as `[n]` without gradients; NoNumbersError for anything else."""
    if isinstance(priority, torch.Tensor) and priority.is_complex():
        raise NoNumbersError(f"priorities are real numbers, found {priority.dtype}")
    return _tensor("priorities are numbers", priority, dtype).detach().reshape(-1)


def _tensor(expected: str, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NoNumbersError(f"{expected}, found {reprlib.repr(values)}") from error


def element_numbers(index: Any, lanes: tuple[int, ...] | None) -> torch.Tensor:
    """Return element numbers, int64 `[n]`, of an int, `[n]`, `[n, ndim]`, or a tuple of one tensor a dimension.

    `lanes` are the dimensions of the storage after the first, None if unknown. A negative coordinate gives -1.
    IndexError for a coordinate beyond the lanes and for numbers that are not whole, NoNumbersError (a TypeError) for
    other types, SchemaError (a RuntimeError) for another number of coordinates, or for several without `lanes`.
    """
    if isinstance(index, torch.Tensor) and index.dtype == torch.int64 and index.dim() == 1:
        return index
    if isinstance(index, tuple):
        parts = [_tensor(_WHOLE, part) for part in index]
        found = parts[0].reshape(-1, 1) if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts), -1)
    else:
        found = _tensor(_WHOLE, list(index) if isinstance(index, range) else index)
    if found.numel() and (found.dtype == torch.bool or found.is_floating_point() or found.is_complex()):
        raise IndexError(f"{_WHOLE}, found {found.dtype}")
    found = found.long()
    if found.dim() < 2:
        return found.reshape(-1)
    coordinates = found.reshape(-1, found.shape[-1])
    return coordinates[:, 0] if coordinates.shape[1] == 1 else _raveled(coordinates, lanes)


def _raveled(coordinates: torch.Tensor, lanes: tuple[int, ...] | None) -> torch.Tensor:
    count = coordinates.shape[1]
    if lanes is None:
        raise SchemaError(
            f"elements are named by {count} coordinates, which dimensions the storage has is not known yet",
            hint="give the storage: update_priority(index, priority, storage=…)",
        )
    if count != 1 + len(lanes):
        raise SchemaError(f"elements are named by {count} coordinates, the storage has {1 + len(lanes)} dimensions")
    numbers = coordinates[:, 0]
    for dimension, size in enumerate(lanes, start=1):
        part = coordinates[:, dimension]
        if bool((part >= size).any()):
            raise IndexError(f"coordinate {int(part.max())} was given where the storage has a dimension of {size}")
        numbers = numbers * size + part
    return torch.where((coordinates < 0).any(-1), -1, numbers)


def marked_numbers(index: Any, storage: Storage) -> torch.Tensor:
    """Return the numbers, int64 `[n]`, of the elements that `storage[index] = …` writes."""
    if storage.ndim > 1:
        if isinstance(index, tuple) and all(isinstance(part, torch.Tensor) for part in index):
            with contextlib.suppress(TypeError, ValueError):  # masks and negative numbers: see below
                coordinates = tuple(part.numpy(force=True) for part in index)
                return torch.from_numpy(np.ravel_multi_index(coordinates, tuple(storage.shape))).reshape(-1)
        numbers = torch.arange(storage.shape.numel()).reshape(storage.shape)
        found: torch.Tensor = numbers[as_index(index, storage.ndim)]
        return found.reshape(-1)
    length, index = len(storage), as_index(index, 1)
    if isinstance(index, slice):
        return torch.arange(*index.indices(length))
    if not isinstance(index, torch.Tensor):
        index = torch.tensor([operator.index(index)])
    numbers = (index.nonzero() if index.dtype == torch.bool else index).reshape(-1).long()
    return torch.where(numbers < 0, numbers + length, numbers)
