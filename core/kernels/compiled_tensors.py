"""Finds the memory of tensors in one call, without entering Python for each; importing this imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from ..ted.schema import Numbers
from .addresses import copy_row, fence, intrinsic, ints_at
from .compiled import copy_runs

_BYTES = ir.IntType(8).as_pointer()
_INT = ir.IntType(32)
# DLPack's description of a tensor, in words of 8 bytes: data, device, dimensions and type, shape, strides, offset.
WORDS = 6
_DIMENSIONS = (1 << 32) - 1
WHOLE, APART, ODD = 0, 1, 2


@intrinsic
def _describe(typing_context: Any, function: Any, tensor: Any, found: Any) -> Any:
    """Call the C function `int function(PyObject *tensor, DLTensor *found)`, which returns 0 on success."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT, [_BYTES, _BYTES]).as_pointer()
        places = [builder.inttoptr(address, _BYTES) for address in arguments[1:]]
        return builder.call(builder.inttoptr(arguments[0], kind), places)

    return types.int32(types.int64, types.int64, types.int64), code


@intrinsic
def _call(typing_context: Any, function: Any) -> Any:
    """Call the C function `void function(void)`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), code


@numba.njit("boolean(int64[::1], int64, int64[::1])", cache=True)
def describe(head: Numbers, tensor: int, found: Numbers) -> bool:
    """Describe a tensor in `WORDS` words as DLPack does; False if that is impossible.

    `head` begins with the addresses of the function that does it, and of the one that clears Python's error.
    """
    if _describe(head[0], tensor, found.ctypes.data) != 0:
        _call(head[1])
        return False
    return True


@numba.njit(inline="always")
def _lie_of(found: Numbers, leaf: Numbers, others: Numbers, count: int, steps: Numbers) -> int:
    """Return how a tensor of `count` rows is laid out in memory (-1: one row without its dimension).

    `WHOLE`: without gaps; `APART`: elements have no gaps within, but between them; `ODD`: anything else, and another
    shape. `steps` gets the distance in bytes along each dimension that counts elements, 0 for missing ones.
    """
    dimensions, lead = found[2] & _DIMENSIONS, others.size + (count >= 0)
    if dimensions != lead + leaf[3]:
        return ODD
    shape, strides = ints_at(found[3], dimensions), ints_at(found[4], dimensions)
    step, whole = leaf[4], True
    steps[0] = 0
    for place in range(dimensions - 1, -1, -1):
        counts = place - lead + others.size  # the number of the dimension, among those of a row that count elements
        size = leaf[5 + place - lead] if place >= lead else others[counts] if counts >= 0 else count
        if shape[place] != size:
            return ODD
        apart = size != 1 and strides[place] * leaf[4] != step
        if apart and place >= lead:
            return ODD
        whole = whole and not apart
        if place < lead:
            steps[counts + 1] = strides[place] * leaf[4]
        step *= size
    return WHOLE if whole else APART


@numba.njit("int64(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64)", cache=True)
def find_sources(
    tensors: Numbers,
    head: Numbers,
    leaves: Numbers,
    memory: Numbers,
    steps: Numbers,
    count: int,
) -> int:
    """Replace addresses of Python tensors by the addresses of their bytes; return the worst layout of all, see
    `_lie_of`.

    Needs the interpreter lock.

    Args:
        tensors: the addresses.
        head: as for `describe`, followed by the dimensions of a row that count elements.
        leaves: for each tensor the word of its device and of its type, the bytes of a row, the number of other
            dimensions, the bytes of a number, and the sizes of these dimensions.
        memory: ranges of addresses, in ascending order, in which no tensor may be.
        steps: gets the distances between elements.
        count: the number of rows; -1 for one row without its dimension.
    """
    found, others, rows, lie = np.empty(WORDS, np.int64), head[2:], max(count, 1), WHOLE
    for number in range(tensors.size):
        leaf = leaves[number]
        if not describe(head, tensors[number], found):
            return ODD
        if found[1] != leaf[0] or found[2] >> 32 != leaf[1] or not found[0] or not found[4]:
            return ODD
        lie = max(lie, _lie_of(found, leaf, others, count, steps[number]) if leaf[2] else ODD)
        if lie == ODD:
            return ODD
        start = found[0] + found[5]
        width, last = leaf[2], (rows - 1) * steps[number, 0]
        for place in range(others.size):
            width //= others[place]
            last += (others[place] - 1) * steps[number, 1 + place]
        stop = start + last + width
        if start < memory[-1, 1] and stop > memory[0, 0]:
            for place in range(memory.shape[0]):
                if start < memory[place, 1] and stop > memory[place, 0]:
                    return ODD
        tensors[number] = start
    return lie


@numba.njit("int64(int64, int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64, int64)", cache=True)
def copy_tensors(
    items: int,
    head: Numbers,
    leaves: Numbers,
    memory: Numbers,
    places: Numbers,
    widths: Numbers,
    start: int,
    count: int,
) -> int:
    """Copy a few rows, the tensors whose addresses are at `items`, as `copy_runs` does, if they are `WHOLE`; return
    what `find_sources` does.
    """
    sources, steps = ints_at(items, places.size).copy(), np.empty((places.size, head.size - 1), np.int64)
    lie = find_sources(sources, head, leaves, memory, steps, count)
    if lie == WHOLE:
        copy_runs(places, widths, sources, start, max(count, 1))
    return lie


@numba.njit("void(int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[::1], int64, int64)", nogil=True, cache=True)
def copy_apart(
    places: Numbers,
    widths: Numbers,
    sources: Numbers,
    steps: Numbers,
    others: Numbers,
    start: int,
    count: int,
) -> None:
    """Copy `count` rows of every column, whose elements are `steps` apart, to the rows from `start` on.

    `others` are the dimensions of a row that count elements. Everything else is as for `copy_runs`.
    """
    lanes = 1
    for size in others:
        lanes *= size
    for column in range(places.size):
        width, target = widths[column] // lanes, places[column] + widths[column] * start
        for row in range(count):
            for lane in range(lanes):
                source, rest = sources[column] + row * steps[column, 0], lane
                for dimension in range(others.size - 1, -1, -1):
                    source += rest % others[dimension] * steps[column, 1 + dimension]
                    rest //= others[dimension]
                copy_row(target, source, width)
                target += width
    fence()
