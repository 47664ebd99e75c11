"""Memory access by address, prefetching and fences for functions compiled by numba, which offers none of these."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # it is documented
from numba.core import cgutils
from numba.extending import intrinsic as typed_intrinsic

BLOCK = 64
"""Size of a cache line in bytes."""

utilities: Any = cgutils  # only partly annotated

_BYTES = ir.IntType(8).as_pointer()
_INT = ir.IntType(32)
_READ, _KEEP, _DATA = (ir.Constant(_INT, value) for value in (0, 3, 1))


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's `intrinsic`, with types: annotations describe the Python function, not the compiled one."""
    return typed_intrinsic(function)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask the processor to load the cache line at `address`; an invalid address has no effect."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
        function = utilities.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(arguments[0], _BYTES), _READ, _KEEP, _DATA])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes from one address to another; the ranges must not overlap."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = (builder.inttoptr(address, _BYTES) for address in arguments[:2])
        utilities.raw_memcpy(builder, *places, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def pointer_to(typing_context: Any, address: Any) -> Any:
    """Return an address as the pointer that `numba.carray` takes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(types.int64), code


_array_at: Any = carray


@numba.njit(inline="always")
def ints_at(address: int, count: int) -> Any:
    """Return the int64 `[count]` at an address."""
    return _array_at(pointer_to(address), (count,), np.int64)


@numba.njit(inline="always")
def floats_at(address: int, count: int) -> Any:
    """Return the float64 `[count]` at an address."""
    return _array_at(pointer_to(address), (count,), np.float64)


@intrinsic
def float_at(typing_context: Any, address: Any) -> Any:
    """Return the float64 at an address that is a multiple of 8.

    Faster than an index into an array, for which numba adds a branch that handles negative numbers.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()), align=8)

    return types.float64(types.int64), code


def _extreme_of_16(comparison: str, *, positive: bool = False) -> Any:
    """Make a function that finds the extreme of 16 float64 at an address, four at a time.

    Without this, the compiler makes 15 comparisons of single numbers.
    """
    lanes, count = ir.VectorType(ir.DoubleType(), 4), 16

    def more_extreme(builder: Any, one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(comparison, one, other), one, other)

    @intrinsic
    def extreme(typing_context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            starts = (builder.add(arguments[0], ir.Constant(ir.IntType(64), 8 * n)) for n in range(0, count, 4))
            found = [builder.load(builder.inttoptr(start, lanes.as_pointer()), align=8) for start in starts]
            if positive:
                zeros, none = (ir.Constant(lanes, [value] * 4) for value in (0.0, math.inf))
                found = [builder.select(builder.fcmp_ordered(">", part, zeros), part, none) for part in found]
            four = functools.reduce(functools.partial(more_extreme, builder), found)
            values = [builder.extract_element(four, ir.Constant(_INT, lane)) for lane in range(4)]
            return functools.reduce(functools.partial(more_extreme, builder), values)

        return types.float64(types.int64), code

    return extreme


greatest_of_16, least_of_16 = _extreme_of_16(">"), _extreme_of_16("<")
least_above_0_of_16 = _extreme_of_16("<", positive=True)
"""Return the least positive one of 16 float64, or infinity if none is positive.

As for `greatest_of_16` and `least_of_16`, their address is a multiple of 8, and none of them is NaN."""


@intrinsic
def word_at(typing_context: Any, address: Any) -> Any:
    """Return the 8 bytes at any address as uint64, in the machine's byte order."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), code


@intrinsic
def byte_at(typing_context: Any, address: Any) -> Any:
    """Return the byte at an address as uint8."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _BYTES))

    return types.uint8(types.int64), code


def _copy_of(count: int) -> Any:
    """Make a function that copies `count` bytes from one address to another, in one instruction."""

    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = ir.IntType(8 * count).as_pointer()
            value = builder.load(builder.inttoptr(arguments[1], pointer), align=1)
            builder.store(value, builder.inttoptr(arguments[0], pointer), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    return copy


copy_1, copy_4, copy_8 = map(_copy_of, (1, 4, 8))
"""Copy this many bytes between two addresses of any alignment."""


@numba.njit(inline="always")
def copy_row(target: int, source: int, width: int) -> None:
    """Copy `width` bytes, usually a small number."""
    if width == 8:
        copy_8(target, source)
    elif width == 1:
        copy_1(target, source)
    elif width == 4:
        copy_4(target, source)
    else:
        copy_bytes(target, source, width)


@numba.njit(inline="always")
def ask_for(address: int, width: int, reach: int) -> None:
    """Prefetch the cache lines of `width` bytes from an address on, or only of the first `reach` bytes."""
    stop = address + min(width, reach)
    prefetch(address)
    line = (address & -BLOCK) + BLOCK
    while line < stop:
        prefetch(line)
        line += BLOCK


@intrinsic
def stream_block(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy `BLOCK` bytes to an aligned address, bypassing the caches if the processor can.

    The processor then does not load the target before it writes it. Other threads may see these bytes later than
    bytes that are written afterwards, unless a `fence` comes in between.
    """
    lanes = 4

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.VectorType(ir.IntType(64), lanes).as_pointer()
        for start in range(0, BLOCK, 8 * lanes):
            offset = ir.Constant(ir.IntType(64), start)
            place, origin = (builder.inttoptr(builder.add(address, offset), pointer) for address in arguments)
            stored = builder.store(builder.load(origin, align=1), place, align=8 * lanes)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def fence(typing_context: Any) -> Any:
    """Make all earlier writes visible before any later one."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code
