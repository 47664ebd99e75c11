"""Compiled loops that find the memory of Python tensors and copy them into rows; importing this module imports numba.

Reading `data_ptr()` and the strides of each tensor in Python takes longer than copying a small row. These loops call
torch's C functions for DLPack instead, once for each tensor, and enter Python only once for all of them.
"""

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
# How a tensor lies in memory: contiguous; with gaps only between elements; or in any way that these loops cannot copy,
# which includes another shape, device or type than expected.
CONTIGUOUS, STRIDED, OTHER = 0, 1, 2


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

    `head` begins with the addresses of two C functions: one that describes a tensor, and `PyErr_Clear`.
    """
    if _describe(head[0], tensor, found.ctypes.data) != 0:
        _call(head[1])
        return False
    return True


@numba.njit(inline="always")
def _layout_of(found: Numbers, leaf: Numbers, others: Numbers, count: int, steps: Numbers) -> int:
    """Return how a tensor of `count` rows lies in memory: `CONTIGUOUS`, `STRIDED` or `OTHER`.

    The tensor has the shape `[count, *others, *shape of the leaf]`; with a `count` of -1 it is a single row, without
    the first of these dimensions. `steps` gets the distance in bytes between neighbours along `count` and each of
    `others`, 0 if a dimension is missing.
    """
    dimensions, lead = found[2] & _DIMENSIONS, others.size + (count >= 0)
    if dimensions != lead + leaf[3]:
        return OTHER
    shape, strides = ints_at(found[3], dimensions), ints_at(found[4], dimensions)
    step, contiguous = leaf[4], True
    steps[0] = 0
    for place in range(dimensions - 1, -1, -1):
        other = place - lead + others.size  # which of `others` this dimension is; -1 for `count`
        size = leaf[5 + place - lead] if place >= lead else others[other] if other >= 0 else count
        if shape[place] != size:
            return OTHER
        gap = size != 1 and strides[place] * leaf[4] != step
        if gap and place >= lead:
            return OTHER
        contiguous = contiguous and not gap
        if place < lead:
            steps[other + 1] = strides[place] * leaf[4]
        step *= size
    return CONTIGUOUS if contiguous else STRIDED


@numba.njit("int64(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64)", cache=True)
def find_sources(
    tensors: Numbers,
    head: Numbers,
    leaves: Numbers,
    memory: Numbers,
    steps: Numbers,
    count: int,
) -> int:
    """Replace addresses of Python tensors by the addresses of their bytes.

    The caller must hold the interpreter lock.

    Args:
        tensors: the addresses of the tensor objects.
        head: as for `describe`, followed by the sizes of the dimensions of a row that count elements: lanes.
        leaves: for each tensor the expected words of its device and of its type, the bytes of a row, the number of
            dimensions of the leaf, the bytes of a number, and the sizes of these dimensions.
        memory: ranges of addresses, in ascending order: the target, with which no tensor may overlap.
        steps: gets the distances between elements, see `_layout_of`.
        count: the number of rows; -1 for one row without its dimension.

    Returns:
        The layout of all tensors: `OTHER` if one is `OTHER`, else `STRIDED` if one is `STRIDED`, else `CONTIGUOUS`.
    """
    found, others, rows, layout = np.empty(WORDS, np.int64), head[2:], max(count, 1), CONTIGUOUS
    for number in range(tensors.size):
        leaf = leaves[number]
        if not describe(head, tensors[number], found):
            return OTHER
        if found[1] != leaf[0] or found[2] >> 32 != leaf[1] or not found[0] or not found[4]:
            return OTHER
        layout = max(layout, _layout_of(found, leaf, others, count, steps[number]) if leaf[2] else OTHER)
        if layout == OTHER:
            return OTHER
        start = found[0] + found[5]
        width, last = leaf[2], (rows - 1) * steps[number, 0]
        for place in range(others.size):
            width //= others[place]
            last += (others[place] - 1) * steps[number, 1 + place]
        stop = start + last + width
        if start < memory[-1, 1] and stop > memory[0, 0]:
            for place in range(memory.shape[0]):
                if start < memory[place, 1] and stop > memory[place, 0]:
                    return OTHER
        tensors[number] = start
    return layout


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
    """Copy a few rows into every column, as `copy_runs` does, if all tensors are `CONTIGUOUS`.

    The addresses of the tensor objects are at the address `items`, as in a list. See `find_sources` and `copy_runs` for
    the other arguments and the result.
    """
    sources, steps = ints_at(items, places.size).copy(), np.empty((places.size, head.size - 1), np.int64)
    layout = find_sources(sources, head, leaves, memory, steps, count)
    if layout == CONTIGUOUS:
        copy_runs(places, widths, sources, start, max(count, 1))
    return layout


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
    """Copy `count` rows into every column as `copy_runs` does, from tensors with gaps between their elements.

    `steps` are the distances between elements in bytes, one row a column, and `others` the sizes of the dimensions of a
    row that count elements: see `find_sources`.
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
