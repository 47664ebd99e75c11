"""Memory for batches, used again once nobody has it: to ask the system for it takes longer than to fill it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import from_numpy

Array = NDArray[Any]
Addresses = NDArray[np.int64]
Memory = Callable[[], Array]
"""Makes arrays of one shape and type, with anything in them."""

# Bytes of one column of a batch. Less comes from memory that the process holds anyway; more is not held on to.
_LARGE, _TOO_LARGE = 1 << 18, 1 << 26
_KEPT = 2

Thing = TypeVar("Thing")


def memory_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
    """Return a function that makes uninitialised arrays of one shape and type, reusing the memory of large ones."""
    size = math.prod(shape) * dtype.itemsize
    return ArrayPool(shape, dtype) if _LARGE <= size <= _TOO_LARGE else functools.partial(np.empty, shape, dtype)


class ArrayPool:
    """Makes uninitialised arrays of one shape and type; keeps up to two for reuse.

    Tensors and arrays that are views of an array keep a reference to it: it is reused once the last of them is freed.
    Thread-safe: an array taken off the list belongs to one thread.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape = shape
        self._dtype = dtype
        self._kept: list[Array] = []

    def __call__(self) -> Array:
        kept = self._kept
        for _ in range(len(kept)):
            try:
                array, references = _first_of(kept)
            except IndexError:  # another thread took it
                break
            if references == _UNUSED:
                kept.insert(0, array)  # first in line, as it is still in the CPU's caches
                return array
            kept.append(array)
        array = np.empty(self._shape, self._dtype)
        kept.append(array)
        del kept[:-_KEPT]
        return array


def _first_of(kept: list[Thing]) -> tuple[Thing, int]:
    """Take the first item off the list; return it and its reference count as seen here."""
    first = kept.pop(0)
    return first, sys.getrefcount(first)


# The reference count of an otherwise unreferenced object depends on the version of Python.
_UNUSED = _first_of([object()])[1]


class BatchPool:
    """Makes uninitialised tensors for the columns of a batch, in one go; keeps the arrays of up to two for reuse.

    With `first`, there are also tensors of so many first rows of each column, behind the others: from Python a view of
    an array is made a tensor in a third of the time of a view of a tensor.

    An array is reused once no tensor and no array is a view of it, as those of an `ArrayPool`, and whether or not
    others of its batch are. Thread-safe: a batch taken off the list belongs to one thread.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], first: int | None = None
    ) -> None:
        self._makers = [functools.partial(np.empty, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._first = first
        self._unused = [_UNUSED_IN_LIST] * len(self._makers)
        if first is not None:  # their arrays are views of the others
            self._unused = [_UNUSED_IN_LIST + 1] * len(self._makers) + self._unused
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._keeps = max(sizes, default=0) <= _TOO_LARGE
        self._kept: list[tuple[list[Array], Addresses]] = []

    def __call__(self) -> tuple[list[torch.Tensor], Addresses]:
        """Return a tensor for each column, and their addresses, which nobody may change."""
        kept = self._kept
        for _ in range(len(kept)):
            try:
                batch = kept.pop(0)
            except IndexError:  # another thread took it
                break
            if list(map(sys.getrefcount, batch[0])) == self._unused:
                # Back on the list only once there are tensors, whose references other threads see.
                found = list(map(from_numpy, batch[0]))
                kept.insert(0, batch)
                return found, batch[1]
            kept.append(batch)
        arrays = self._some_again() if len(kept) >= _KEPT else [make() for make in self._makers]
        if self._first is not None:
            arrays += [array[: self._first] for array in arrays]
        found = list(map(from_numpy, arrays))
        addresses = np.array(list(map(torch.Tensor.data_ptr, found[: len(self._makers)])), np.int64)
        if self._keeps:
            kept.append((arrays, addresses))
            del kept[:-_KEPT]
        return found, addresses

    def _some_again(self) -> list[Array]:
        """Return the arrays of the oldest batch that are unused, and new ones in place of the others."""
        try:
            arrays, _ = self._kept.pop(0)
        except IndexError:
            return [make() for make in self._makers]
        counts, columns = list(map(sys.getrefcount, arrays)), len(self._makers)
        unused = [counts[number::columns] == self._unused[number::columns] for number in range(columns)]
        # `zip` stops at the shorter one: behind the columns there may be views of them.
        return [make() if not free else array for make, free, array in zip(self._makers, unused, arrays, strict=False)]


_UNUSED_IN_LIST = next(map(sys.getrefcount, [object()]))
