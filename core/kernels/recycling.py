"""Large arrays whose memory is used again once nobody else has it.

Memory that comes fresh from the system is handed over page by page, as it is first written: for a batch of images that
takes as long as the copy itself. What the batch before occupied is there already.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Recycler"]

_KEPT = 2

Thing = TypeVar("Thing")


class Recycler:
    """Makes arrays of one shape and type, whose contents are left over from before; up to two are held on to.

    Tensors and arrays that are views of an array hold it: it is made use of again when the last of them is gone.
    Threads may call this at once: an array that was taken off the list is in the hands of one of them.
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
                kept.insert(0, array)  # the next to be asked for, as it is still in the caches
                return array
            kept.append(array)
        array = np.empty(self._shape, self._dtype)
        kept.append(array)
        del kept[:-_KEPT]
        return array


def _first_of(kept: list[Thing]) -> tuple[Thing, int]:
    """Take the first thing off the list; return it and how many hold it, as this function counts."""
    first = kept.pop(0)
    return first, sys.getrefcount(first)


# What is counted of a thing that nobody else has depends on the version of Python.
_UNUSED = _first_of([object()])[1]
