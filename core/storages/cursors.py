"""Indices of storages: the rows that an index selects or that a write replaces, and the numbers of elements."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError

Index: TypeAlias = int | slice | torch.Tensor | tuple[Any, ...]

_FAR = 1 << 63


def as_index(item: Any, ndim: int) -> Index:
    """Convert any form of index to one that torch can use: an int, a slice, int64, a mask, or a tuple of these.

    Ints, slices, ranges, lists, arrays, masks and tensors are accepted, and tuples of them.

    Raises:
        IndexError: there are more coordinates than `ndim`, the dimensions that count elements; or the index cannot
            select rows: fractions, texts, None, a single truth value.
    """
    if isinstance(item, tuple) and len(item) == 1:
        item = item[0]
    if isinstance(item, tuple):
        if len(item) > ndim:
            raise IndexError(f"{len(item)} coordinates given, the storage has {ndim} dimension{'s' * (ndim > 1)}")
        return tuple(as_index(part, 1) for part in item)
    if isinstance(item, slice):
        return item
    if item is Ellipsis:
        return slice(None)
    if hasattr(item, "__index__") and not isinstance(item, bool | torch.Tensor | np.ndarray):
        return _in_range(operator.index(item))
    index = item if isinstance(item, torch.Tensor) else _tensor(item)
    if index.dtype == torch.bool:
        if not 0 < index.dim() <= ndim:
            raise IndexError(f"a mask of {index.dim()} dimensions given, the storage has {ndim}")
        return index
    if index.is_floating_point() or index.is_complex():
        raise IndexError(f"rows are selected by whole numbers, slices or masks, found {index.dtype}")
    return index if index.dtype == torch.int64 else index.long()


def _tensor(item: Any) -> torch.Tensor:
    """Make a tensor of numbers or truth values in a list, a range or an array."""
    try:
        if isinstance(item, np.ndarray) and item.dtype.kind in "iu":  # of any width, byte order and strides
            return torch.from_numpy(item.astype(np.int64))
        plain = item.copy() if isinstance(item, np.ndarray) else list(item) if isinstance(item, range) else item
        found = torch.as_tensor(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = "None" if item is None else f"the type {type(item).__name__}"
        raise IndexError(f"rows are selected by whole numbers, slices or masks, found {kind}") from None
    return found if found.numel() else found.long()


def _in_range(row: int) -> int:
    if not -_FAR <= row < _FAR:
        raise IndexError(f"row {row} is beyond what any storage can hold")
    return row


def row_numbers(index: Index, length: int) -> NDArray[np.int64]:
    """Return the numbers, from 0 on, of the rows selected by an index of `as_index`, in its shape (`[]` for an int).

    Raises:
        IndexError: a row does not exist.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(length), dtype=np.int64)
    numbers = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
    if numbers.dtype == bool:
        if numbers.shape != (length,):
            raise IndexError(
                f"the mask has the shape {list(numbers.shape)}, expected [{length}]: one value for each row"
            )
        return np.flatnonzero(numbers)
    outside = (numbers < -length) | (numbers >= length)
    if outside.any():
        raise IndexError(f"row is {numbers[outside].flat[0]}, expected one of {length} rows")
    return np.where(numbers < 0, numbers + length, numbers).astype(np.int64)


def known_rows(index: Index, length: int) -> int | slice | torch.Tensor:
    """Return the valid rows selected by an index of `as_index`: an int, a slice with step 1, or int64 of any shape.

    All are from 0 to `length - 1`; IndexError for rows that do not exist.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(length)
        if step == 1:
            return slice(start, max(start, stop))
    numbers = row_numbers(index, length)
    return torch.from_numpy(numbers) if numbers.ndim else int(numbers)


def rows_of(index: int | slice | torch.Tensor, valid: int, capacity: int) -> slice | torch.Tensor:
    """Return the rows that a write at `index` replaces: a slice with step 1 if possible, otherwise int64 `[n]`.

    Negative numbers count from the end of the valid rows, and the open end of a slice is there. SchemaError for rows
    beyond the capacity.
    """
    if isinstance(index, slice):
        start, stop, step = _bounds(index, valid, capacity)
        if step == 1:
            return slice(start, max(start, stop))
        rows = torch.from_numpy(np.arange(start, stop, step, dtype=np.int64))
        return rows if len(rows) else slice(0, 0)
    if isinstance(index, int):
        row = index + valid if index < 0 else index
        _refuse_outside(row, row, valid, capacity)
        return slice(row, row + 1)
    rows = (index.nonzero() if index.dtype == torch.bool else index).reshape(-1).cpu().long()
    numbers = rows.numpy()
    if not len(numbers):
        return slice(0, 0)
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0:
        _refuse_outside(low + valid, low + valid, valid, capacity)
        rows = torch.where(rows < 0, rows + valid, rows)
        return rows_of(rows, valid, capacity)
    _refuse_outside(low, high, valid, capacity)
    follows = high - low == len(numbers) - 1 and bool((numbers[1:] - numbers[:-1] == 1).all())
    return slice(low, high + 1) if follows else rows


def are_numbers(index: Any) -> bool:
    """Whether an index is a tuple of tensors with dimensions, which selects elements by their coordinates."""
    return type(index) is tuple and bool(index) and all(type(part) is torch.Tensor and part.dim() for part in index)


def rows_named(index: Any, valid: int) -> slice | torch.Tensor:
    """Return the rows that an index of several dimensions may select, from its first part; all rows for a mask."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, int | slice) or (isinstance(first, torch.Tensor) and first.dim() == 1):
        return rows_of(first if isinstance(first, slice) else as_index(first, 1), valid, valid)  # type: ignore[arg-type]
    return slice(0, valid)


def _bounds(index: slice, valid: int, capacity: int) -> tuple[int, int, int]:
    """Return the bounds of a slice of rows to be written.

    Explicit ends may be beyond the valid rows, up to the capacity. Open and negative ends count from the valid rows, as
    do all ends of a slice with a negative step.
    """
    bounds = index.indices(valid)  # refuses a step of 0, and bounds that are not whole numbers
    if (step := bounds[2]) < 0:
        return bounds
    ends = (0 if index.start is None else index.start, valid if index.stop is None else index.stop)
    start, stop = (min(max(end + valid if end < 0 else end, 0), capacity) for end in ends)
    return start, stop, step


def _refuse_outside(low: int, high: int, valid: int, capacity: int) -> None:
    if low < 0:
        raise IndexError(f"row is {low - valid}, expected one of {valid} rows")
    if high >= capacity:
        raise SchemaError(f"row {high} cannot be written: the capacity is {capacity} rows")


def grown_rows(rows: slice | torch.Tensor, valid: int) -> int:
    """Return the number of valid rows after a write; SchemaError if it would leave a gap of unwritten rows."""
    if isinstance(rows, slice):
        top: int = rows.stop
        if top <= valid or top == rows.start:
            return valid
        fresh = top - max(rows.start, valid)
    else:
        top, fresh = int(rows.max()) + 1, len(rows[rows >= valid].unique())
    if fresh <= 0:
        return valid
    if fresh < top - valid:
        raise SchemaError(f"row {top - 1} cannot be written yet: only {valid} rows are written below it")
    return top


def last_of_repeats(rows: torch.Tensor) -> torch.Tensor | None:
    """Return the positions of the last occurrence of each row; None if no row is repeated."""
    order = rows.argsort(stable=True)
    ordered = rows[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return None if bool(last.all()) else order[last]


def last_row(cursor: Any) -> int | None:
    """Return the row that a write at `cursor` wrote last; None if it wrote none, or if the row is unknown.

    It is unknown for negative numbers and for slices with open ends.
    """
    index = cursor[0] if isinstance(cursor, tuple) and cursor else cursor
    if index is None or isinstance(index, bool | str):
        return None
    if isinstance(index, range):
        return index[-1] if index and index[-1] >= 0 else None
    if isinstance(index, slice):
        known = isinstance(index.stop, int) and index.stop > max(index.start or 0, 0) and index.step in (None, 1)
        return index.stop - 1 if known else None
    if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
        row = operator.index(index)
    else:
        rows = torch.as_tensor(index)
        rows = rows.nonzero() if rows.dtype == torch.bool else rows
        if not rows.numel():
            return None
        row = int(rows.reshape(-1)[-1])
    return row if row >= 0 else None


def newest_row(storage: Any) -> int | None:
    """Return the row of a storage that was written last; None if unknown.

    If the last write is unknown, as after a load, the newest row of a full ring is the one before the row at which its
    writer continues, which the write log has.
    """
    newest = last_row(storage.last_cursor)
    oldest = oldest_row(storage) if newest is None else 0
    return oldest - 1 if oldest else newest


def oldest_row(storage: Any) -> int:
    """Return the row of a full ring that is overwritten next; 0 for a storage that is not full."""
    row: int = storage.log.now.next_row if 0 < storage.shape[0] == storage.capacity_rows else 0
    return row


# Element numbers -----------------------------------------------------------------------------------

_WHOLE = "elements are selected by whole numbers"


class NoNumbersError(UsageError, TypeError):
    """An index or priorities are not numbers."""


def as_numbers(expected: str, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return numbers as a tensor; NoNumbersError, with the text `expected`, for anything else."""
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NoNumbersError(f"{expected}, found {reprlib.repr(values)}") from error


def element_numbers(index: Any, lanes: tuple[int, ...] | None) -> torch.Tensor:
    """Return element numbers, int64 `[n]`, which count through all dimensions in row-major order.

    Args:
        index: an int, `[n]`, `[n, ndim]`, or a tuple with one tensor for each dimension. Negative coordinates give -1.
        lanes: the dimensions of the storage after the first; None if unknown.

    Raises:
        IndexError: a coordinate is beyond the lanes, or not a whole number.
        NoNumbersError: (a TypeError) the index has another type.
        SchemaError: (a RuntimeError) the number of coordinates is wrong, or there are several and `lanes` is unknown.
    """
    if isinstance(index, torch.Tensor) and index.dtype == torch.int64 and index.dim() == 1:
        return index
    if isinstance(index, tuple):
        parts = [as_numbers(_WHOLE, part) for part in index]
        found = parts[0].reshape(-1, 1) if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts), -1)
    else:
        found = as_numbers(_WHOLE, list(index) if isinstance(index, range) else index)
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
            f"elements have {count} coordinates, but the dimensions of the storage are not known yet",
            hint="pass the storage: update_priority(index, priority, storage=…)",
        )
    if count != 1 + len(lanes):
        raise SchemaError(f"elements have {count} coordinates, the storage has {1 + len(lanes)} dimensions")
    numbers = coordinates[:, 0]
    for dimension, size in enumerate(lanes, start=1):
        part = coordinates[:, dimension]
        if bool((part >= size).any()):
            raise IndexError(f"coordinate is {int(part.max())}, expected below {size}, the size of its dimension")
        numbers = numbers * size + part
    return torch.where((coordinates < 0).any(-1), -1, numbers)


def marked_numbers(index: Any, shape: torch.Size, ndim: int) -> torch.Tensor:
    """Return the numbers of the elements that `storage[index] = …` writes, int64 `[n]`, for a storage of `shape`."""
    if ndim > 1:
        if isinstance(index, tuple) and all(isinstance(part, torch.Tensor) for part in index):
            with contextlib.suppress(TypeError, ValueError):  # masks and negative numbers are handled below
                coordinates = tuple(part.numpy(force=True) for part in index)
                return torch.from_numpy(np.ravel_multi_index(coordinates, tuple(shape))).reshape(-1)
        numbers = torch.arange(shape.numel()).reshape(shape)
        found: torch.Tensor = numbers[as_index(index, ndim)]
        return found.reshape(-1)
    length, index = shape[0], as_index(index, 1)
    if isinstance(index, slice):
        return torch.arange(*index.indices(length))
    if not isinstance(index, torch.Tensor):
        index = torch.tensor([operator.index(index)])
    numbers = (index.nonzero() if index.dtype == torch.bool else index).reshape(-1).long()
    return torch.where(numbers < 0, numbers + length, numbers)


def own_cursor(cursor: Any) -> Any:
    """Return a cursor, or a copy of it if the caller could change its contents later."""
    if isinstance(cursor, tuple):
        return tuple(map(own_cursor, cursor))
    if isinstance(cursor, torch.Tensor):
        return cursor.clone()
    return cursor.copy() if isinstance(cursor, list | np.ndarray) else cursor
