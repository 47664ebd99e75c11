"""Moves rows between several columns and fresh memory, all columns in one go.

Measured with 11 columns of a million rows (758 bytes a row): the compiled loop takes two thirds to three quarters of
numpy's time for 256 rows and more, because it asks for rows ahead, and releases the GIL throughout. For a few rows
both take the same time; writing them in one call instead of one a column saves a half.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which takes half of the time of the first use of numba.

    It finds nothing there: numba makes many long-lived objects, and each collection visits them and those of torch.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Array = NDArray[Any]
Memory = Callable[[], Array]
"""Makes arrays of one shape and type, with anything in them."""

# Bytes of one column of a batch. Less comes from memory that the process holds anyway; more is not held on to.
_LARGE, _TOO_LARGE = 1 << 18, 1 << 26

# As ctypes.memmove, without the result, which costs as much as the copy of a small row.
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


class PlainRows:
    """The rows of arrays that are contiguous and equally long, moved by numpy."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = list(arrays)
        self._places = [array.__array_interface__["data"][0] for array in arrays]
        self._widths = [math.prod(array.shape[1:]) * array.itemsize for array in arrays]
        self._takers: tuple[int, list[Callable[..., Array]]] = (-1, [])

    def gather(self, numbers: NDArray[np.int64], rows: int) -> list[torch.Tensor]:
        """Return the rows `numbers`, int64 `[n]`, of each array, `[n, …]`, in fresh memory.

        Negative numbers count from the end of the first `rows` rows; IndexError for rows beyond them.
        """
        known, takers = self._takers
        if known != rows:
            takers = [array[:rows].take for array in self._arrays]
            self._takers = (rows, takers)
        return [torch.from_numpy(take(numbers, 0)) for take in takers]

    def write(self, start: int, count: int, sources: Sequence[int]) -> None:
        """Copy `count` rows into each array from row `start` on; they lie at the addresses `sources`, outside of all.

        Nothing is checked: neither the addresses, nor that there are so many rows.
        """
        for place, source, width in zip(self._places, sources, self._widths, strict=True):
            _memmove(place + start * width, source, count * width)


class CompiledRows(PlainRows):
    """The same, moved by the loops that `compiled` holds."""

    def __init__(self, arrays: Sequence[Array], compiled: ModuleType) -> None:
        super().__init__(arrays)
        self._gather = compiled.gather_rows
        self._copy = compiled.copy_runs
        self._table = np.array(self._places, np.int64), np.array(self._widths, np.int64)
        self._batch: tuple[int, list[Memory]] = (-1, [])

    def gather(self, numbers: NDArray[np.int64], rows: int) -> list[torch.Tensor]:
        count, memory = self._batch
        if count != len(numbers):
            count = len(numbers)
            memory = [memory_of((count, *array.shape[1:]), array.dtype) for array in self._arrays]
            self._batch = (count, memory)
        found = [torch.from_numpy(make()) for make in memory]
        targets = np.array([tensor.data_ptr() for tensor in found], np.int64)
        if self._gather(*self._table, targets, np.ascontiguousarray(numbers), rows) >= 0:
            return super().gather(numbers, rows)  # numpy raises the error for the missing row
        return found

    def write(self, start: int, count: int, sources: Sequence[int]) -> None:
        self._copy(*self._table, np.array(sources, np.int64), start, count)


def fastest_rows(arrays: Sequence[Array]) -> PlainRows:
    """Make the compiled kind where numba can be imported, which takes half a second the first time, else the plain."""
    compiled = _compiled()
    return PlainRows(arrays) if compiled is None else CompiledRows(arrays, compiled)


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        with collector_paused():
            from . import compiled
    except ImportError:
        return None
    return compiled


def memory_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
    """Return a function that makes uninitialised arrays of one shape and type, reusing the memory of large ones."""
    size = math.prod(shape) * dtype.itemsize
    return ArrayPool(shape, dtype) if _LARGE <= size <= _TOO_LARGE else functools.partial(np.empty, shape, dtype)


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
