"""Reuse of the memory of large arrays that have no other reference.

The system maps new memory page by page on the first write: for a batch of images that takes as long as the copy
itself. The memory of the previous batch is mapped already.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayPool"]

_KEPT = 2

Thing = TypeVar("Thing")


class ArrayPool:
    """Makes uninitialised arrays of one shape and type; keeps up to two for reuse.

    Tensors and arrays that are views of an array keep a reference to it: it is reused once the last of them is freed.
    Thread-safe: an array taken off the list belongs to one thread.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape = shape
        self._dtype = dtype
        self._kept: list[NDArray[Any]] = []

    def __call__(self) -> NDArray[Any]:
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
