"""Compiled loops over the bytes of Examples, with numba, whose import takes 0.4 s, and more the first time.

They handle Examples in the encoding that TensorFlow writes. For any other valid encoding they return `OTHER`, and the
module `example` parses it.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

OTHER, UNKNOWN_NAME = -1, -2
"""Results of `find_lists` for an Example in another encoding, and for one with a name that is not in `names`."""
KIND, START, STOP, COUNT, MORE = range(5)
"""The columns of the table of lists that `find_lists` fills."""

_LENGTH, _LENGTH_BITS = 0x0A, 32
_NAME_OF_FEATURE = 0x12
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x1A
_RECORD = numba.types.Bytes(numba.uint8, 1, "C", readonly=True)
_READ_ONLY = numba.types.Array(numba.uint8, 1, "C", readonly=True)


@numba.njit(inline="always")
def _size_at(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Read a length at `at`; return it and the offset after it. The length is -1 if it leads beyond `stop`."""
    size = shift = 0
    while at < stop and shift < _LENGTH_BITS:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (size if size <= stop - at else -1), at
        shift += 7
    return -1, at


@numba.njit(inline="always")
def _number_of(data: bytes, start: int, size: int, names: bytes, ends: NDArray[np.int64], expected: int) -> int:
    """Return the index of a name in `names`, -1 if it is not there; the index `expected` is compared first."""
    for step in range(ends.size):
        number = expected + step
        number -= ends.size if number >= ends.size else 0
        first = ends[number - 1] if number else 0
        if ends[number] - first == size:
            same = True
            for at in range(size):
                if data[start + at] != names[first + at]:
                    same = False
                    break
            if same:
                return number
    return -1


@numba.njit(inline="always")
def _find_strings(data: bytes, at: int, stop: int, spans: NDArray[np.int64], number: int) -> int:
    """Store the spans of strings from row `number` on, as far as there is room.

    Return the number of strings, -1 for another encoding.
    """
    count = 0
    while at < stop:
        if data[at] != _LENGTH:
            return -1
        size, at = _size_at(data, at + 1, stop)
        if size < 0:
            return -1
        if number + count < spans.shape[0]:
            spans[number + count, 0] = at
            spans[number + count, 1] = at + size
        at += size
        count += 1
    return count


@numba.njit(inline="always")
def _count_varints(packed: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the number of varints, by their last bytes, and the bitwise or of all bytes; the loop is vectorised."""
    bits, inside = np.uint8(0), 0
    for at in range(packed.size):
        bits |= packed[at]
        inside += packed[at] >> np.uint8(7)
    return packed.size - inside, int(bits)


@numba.njit(
    numba.int64(_RECORD, _RECORD, numba.int64[::1], numba.int64[:, ::1], numba.int64[:, ::1]), nogil=True, cache=True
)
def find_lists(
    data: bytes, names: bytes, ends: NDArray[np.int64], lists: NDArray[np.int64], spans: NDArray[np.int64]
) -> int:
    """Find the lists of an Example by their known names.

    Args:
        data: the bytes of the Example.
        names: the names, concatenated.
        ends: the offset in `names` at which each name ends.
        lists: output, int64 `[names, 5]`: the kind of each list (1 strings, 2 floats, 3 integers, 0 if absent), the
            offsets at which its values begin and end, their number, and for integers the bitwise or of all bytes, for
            strings the row of the first one in `spans`.
        spans: output, int64 `[strings, 2]`: the offsets at which each string begins and ends.

    Returns:
        The number of strings, which may exceed the room in `spans`; `OTHER` or `UNKNOWN_NAME` if the lists were not
        found.
    """
    lists[:] = 0
    total, flat = len(data), np.frombuffer(data, np.uint8)
    if total < 2 or data[0] != _LENGTH:
        return OTHER
    size, at = _size_at(data, 1, total)
    if size != total - at:
        return OTHER
    strings = expected = 0
    while at < total:
        if data[at] != _LENGTH:
            return OTHER
        size, at = _size_at(data, at + 1, total)
        end = at + size
        if size < 2 or data[at] != _LENGTH:
            return OTHER
        size, at = _size_at(data, at + 1, end)
        if size < 0:
            return OTHER
        number = _number_of(data, at, size, names, ends, expected)
        if number < 0:
            return UNKNOWN_NAME
        expected = number + 1 if number + 1 < ends.size else 0
        at += size
        if at >= end or data[at] != _NAME_OF_FEATURE:
            return OTHER
        size, at = _size_at(data, at + 1, end)
        if size < 2 or size != end - at:
            return OTHER
        kind = data[at]
        size, at = _size_at(data, at + 1, end)
        if size != end - at or (kind != _BYTES_LIST and kind != _FLOAT_LIST and kind != _INT64_LIST):
            return OTHER
        lists[number, KIND] = kind >> 3
        count = more = 0
        if kind == _BYTES_LIST:
            count, more = _find_strings(data, at, end, spans, strings), strings
            if count < 0:
                return OTHER
            strings += count
        elif size:
            if data[at] != _LENGTH:
                return OTHER
            size, at = _size_at(data, at + 1, end)
            if size != end - at:
                return OTHER
            if kind == _FLOAT_LIST:
                if size & 3:
                    return OTHER
                count = size >> 2
            else:
                if size and data[end - 1] >= 0x80:
                    return OTHER
                count, more = _count_varints(flat[at:end])
        lists[number, START], lists[number, STOP] = at, end
        lists[number, COUNT], lists[number, MORE] = count, more
        at = end
    return strings


@numba.njit(numba.boolean(_READ_ONLY, numba.int64[::1]), nogil=True, cache=True)
def decode_varints(packed: NDArray[np.uint8], values: NDArray[np.int64]) -> bool:
    """Decode whole varints into `values`, one for each; return False if one has more than ten bytes."""
    value, shift, number, too_long = np.uint64(0), np.uint64(0), 0, False
    for at in range(packed.size):
        byte = np.uint64(packed[at])
        value |= (byte & np.uint64(0x7F)) << (shift & np.uint64(63))
        too_long |= bool(shift >= np.uint64(70))
        values[number] = np.int64(value)
        ends = byte < np.uint64(0x80)
        number += 1 if ends else 0
        value = np.uint64(0) if ends else value
        shift = np.uint64(0) if ends else shift + np.uint64(7)
    return not too_long
