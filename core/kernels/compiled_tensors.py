"""Finds the bytes of tensors in one call, without entering Python for each; importing this imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from .addresses import intrinsic, ints_at

_BYTES = ir.IntType(8).as_pointer()
_INT = ir.IntType(32)
# How DLPack describes a tensor, in words of 8 bytes: data, device, dimensions and type, shape, strides, offset.
WORDS = 6
_DIMENSIONS = (1 << 32) - 1


@intrinsic
def _describe(typing_context: Any, function: Any, tensor: Any, found: Any) -> Any:
    """Call the C function `int function(PyObject *tensor, DLTensor *found)`; returns 0 if it did what it should."""

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
def describe(head: NDArray[np.int64], tensor: int, found: NDArray[np.int64]) -> bool:
    """Describe a tensor in `WORDS` words as DLPack does; False for one that cannot be.

    `head` begins with the addresses of the function that does so, and of the one that clears Python's error.
    """
    if _describe(head[0], tensor, found.ctypes.data) != 0:
        _call(head[1])
        return False
    return True


@numba.njit(inline="always")
def _is_whole(found: NDArray[np.int64], leaf: NDArray[np.int64], others: NDArray[np.int64], count: int) -> bool:
    """Whether a tensor is `count` rows, -1 for one without their dimension, with no gaps between its numbers."""
    dimensions, last = found[2] & _DIMENSIONS, leaf[3]
    lead = others.size + (count >= 0)
    if dimensions != lead + last:
        return False
    shape, step = ints_at(found[3], dimensions), 1
    strides = ints_at(found[4], dimensions)
    for place in range(dimensions - 1, -1, -1):
        if place >= lead:
            size = leaf[4 + place - lead]
        elif place >= lead - others.size:
            size = others[place - lead + others.size]
        else:
            size = count
        if shape[place] != size or (size != 1 and strides[place] != step):
            return False
        step *= size
    return True


@numba.njit("boolean(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64)", cache=True)
def find_sources(
    tensors: NDArray[np.int64],
    head: NDArray[np.int64],
    leaves: NDArray[np.int64],
    memory: NDArray[np.int64],
    count: int,
) -> bool:
    """Replace the addresses of Python's tensors by those of their bytes; False unless all are rows as expected.

    `head` is as for `describe`, followed by the dimensions of a row that count elements. Each of `leaves` has the
    word of the device, that of the type, the bytes of a row, and the number and sizes of the other dimensions. Tensors
    hold `count` rows, or one without its dimension for -1. None of them may be in `memory`, pairs of the first address
    and the one behind the last in ascending order. Needs the lock of the interpreter.
    """
    found, others, rows = np.empty(WORDS, np.int64), head[2:], max(count, 1)
    for number in range(tensors.size):
        leaf = leaves[number]
        if not describe(head, tensors[number], found):
            return False
        if found[1] != leaf[0] or found[2] >> 32 != leaf[1] or not found[0] or not found[4]:
            return False
        if not leaf[2] or not _is_whole(found, leaf, others, count):
            return False
        start = found[0] + found[5]
        stop = start + leaf[2] * rows
        if start < memory[-1, 1] and stop > memory[0, 0]:
            for place in range(memory.shape[0]):
                if start < memory[place, 1] and stop > memory[place, 0]:
                    return False
        tensors[number] = start
    return True
