"""Loops over packed records; importing this imports numba, so do it where there is much to do."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .addresses import BLOCK, ask_for, copy_bytes, copy_row

# As for rows of columns: records are asked for this many ahead.
_AHEAD = 12
_REACH = 16 * BLOCK


@numba.njit(inline="always")
def _locate(
    numbers: NDArray[np.int64], table: NDArray[np.int64], head: NDArray[np.int64], found: NDArray[np.int64]
) -> int:
    """Find the addresses of the records of some steps, and of what came after them, in turns.

    `table` holds the first step of each episode and the number of steps; where the explicit next rows of each
    episode begin, or -1; and the episode of every `1 << shift`-th step. `head` holds the number of episodes, the
    shift, the addresses of the records and of the explicit next rows, and the bytes of a record. Negative numbers
    count from the end. Returns -1, or where in `numbers` there is a step beyond them.
    """
    episodes, shift, base, explicit, size = head[0], head[1], head[2], head[3], head[4]
    coarse = 2 * episodes + 1
    steps = table[episodes]
    for position in range(numbers.size):
        step = numbers[position]
        if step < 0:
            step += steps
        if step < 0 or step >= steps:
            return position
        low, high = table[coarse + (step >> shift)], table[coarse + (step >> shift) + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if table[middle] <= step:
                low = middle
            else:
                high = middle - 1
        address = base + (step + low) * size
        found[2 * position] = address
        start = table[episodes + 1 + low]
        found[2 * position + 1] = address + size if start < 0 else explicit + (start + step - table[low]) * size
    return -1


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[:, ::1], uint8[::1])", nogil=True, cache=True)
def gather_fields(
    numbers: NDArray[np.int64],
    table: NDArray[np.int64],
    head: NDArray[np.int64],
    fields: NDArray[np.int64],
    memory: NDArray[np.uint8],
) -> int:
    """Copy fields of the records of some steps into `memory`, one row below the other.

    Each of `fields` is an offset in the record, a width, and where in `memory` its rows begin; the first `head[6]` are
    taken from the step's record, the others from the one after. `head[5]` bytes of each are asked for ahead. The rest
    is as for `_locate`.
    """
    found = np.empty(2 * numbers.size, np.int64)
    beyond = _locate(numbers, table, head, found)
    if beyond >= 0:
        return beyond
    span, first_after, count = head[5], head[6], fields.shape[0]
    ends = fields[:, 2] + memory.ctypes.data
    for position in range(numbers.size):
        coming = position + _AHEAD
        if coming < numbers.size:
            ask_for(found[2 * coming], span, _REACH)
        source = found[2 * position]
        for field in range(count):
            if field == first_after:
                source = found[2 * position + 1]
            width = fields[field, 1]
            copy_row(ends[field], source + fields[field, 0], width)
            ends[field] += width
    return -1


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64)", nogil=True, cache=True)
def gather_spans(numbers: NDArray[np.int64], table: NDArray[np.int64], head: NDArray[np.int64], target: int) -> int:
    """Copy the record of each step, and behind it the beginning of the record after, to `target`; else as above."""
    found = np.empty(2 * numbers.size, np.int64)
    beyond = _locate(numbers, table, head, found)
    if beyond >= 0:
        return beyond
    size, span = head[4], head[5]
    for position in range(numbers.size):
        coming = position + _AHEAD
        if coming < numbers.size:
            ask_for(found[2 * coming], span, _REACH)
        here, after = found[2 * position], found[2 * position + 1]
        if after == here + size:
            copy_bytes(target, here, span)
        else:
            copy_bytes(target, here, size)
            copy_bytes(target + size, after, span - size)
        target += span
    return -1
