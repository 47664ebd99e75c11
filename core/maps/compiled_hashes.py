"""Compiled loops: SipHash-2-4 of rows, and a hash table of rows of bytes. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ..kernels.addresses import ask_for, byte_at, copy_bytes, prefetch, word_at

Numbers = NDArray[np.int64]

_AHEAD = 16
"""How many rows ahead slots are prefetched; the key that a slot refers to is prefetched half as far ahead."""
_REACH = 128
"""How many bytes of a key are prefetched at most."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: multiplying by it spreads similar hashes (Fibonacci hashing)."""


@numba.njit(inline="always")
def _turned(word: Any, bits: int) -> Any:
    """Rotate a word to the left."""
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@numba.njit(inline="always")
def _rounds(v0: Any, v1: Any, v2: Any, v3: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Mix the four words of the state."""
    for _ in range(count):
        v0 += v1
        v1 = _turned(v1, 13) ^ v0
        v0 = _turned(v0, 32)
        v2 += v3
        v3 = _turned(v3, 16) ^ v2
        v0 += v3
        v3 = _turned(v3, 21) ^ v0
        v2 += v1
        v1 = _turned(v1, 17) ^ v2
        v2 = _turned(v2, 32)
    return v0, v1, v2, v3


@numba.njit("void(int64, int64, uint64[::1], uint64[::1])", nogil=True, cache=True)
def siphash_rows(place: int, width: int, key: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> None:
    """Hash rows of `width` bytes that lie one after another from the address `place` on."""
    whole = width & -8
    for number in range(hashes.size):
        address = place + number * width
        v0, v1 = key[0] ^ np.uint64(0x736F6D6570736575), key[1] ^ np.uint64(0x646F72616E646F6D)
        v2, v3 = key[0] ^ np.uint64(0x6C7967656E657261), key[1] ^ np.uint64(0x7465646279746573)
        for offset in range(0, whole, 8):
            word = word_at(address + offset)
            v0, v1, v2, v3 = _rounds(v0, v1, v2, v3 ^ word, 2)
            v0 ^= word
        word = np.uint64(width & 0xFF) << np.uint64(56)
        for offset in range(whole, width):
            word |= np.uint64(byte_at(address + offset)) << np.uint64(8 * (offset - whole))
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3 ^ word, 2)
        v0, v1, v2, v3 = _rounds(v0 ^ word, v1, v2 ^ np.uint64(0xFF), v3, 4)
        hashes[number] = v0 ^ v1 ^ v2 ^ v3


@numba.njit("void(float64[:, ::1], float64[:, ::1], float64[:, ::1])", nogil=True, cache=True)
def project_rows(rows: NDArray[np.float64], matrix: NDArray[np.float64], projected: NDArray[np.float64]) -> None:
    """Multiply rows by a matrix, adding in the order of the features so that results are the same on every machine."""
    features, components = matrix.shape
    for number in range(rows.shape[0]):
        sums = projected[number]
        sums[:] = 0.0
        for feature in range(features):
            value = rows[number, feature]
            for component in range(components):
                sums[component] += value * matrix[feature, component]


# The table -----------------------------------------------------------------------------------------

# The table uses open addressing. A slot holds a hash, and the number of an entry plus 1, or 0 if the slot is free. The
# search for a hash begins at a slot that depends on the hash, and ends at the first free slot. Entries are numbered in
# the order in which they are added.
#
#     slot     0       1       2       3         two entries whose searches begin at slot 1: the second one is in slot
# 2,     hash     ·       h0      h1      ·         and the search for a third hash that begins there ends at slot 3
# entry    free    0       1       free


@numba.njit(inline="always")
def _first_slot(value: int, mask: int) -> Any:
    """Return the slot at which the search for a hash begins; small or similar hashes are spread over the table."""
    mixed = np.uint64(value) * _SPREAD
    return np.int64(mixed >> np.uint64(32)) & mask


@numba.njit(inline="always")
def _are_one(one: int, other: int, width: int) -> bool:
    """Return whether `width` bytes at two addresses are equal."""
    whole = width & -8
    for offset in range(0, whole, 8):
        if word_at(one + offset) != word_at(other + offset):
            return False
    for offset in range(whole, width):  # noqa: SIM110  # numba has no `all` of a generator
        if byte_at(one + offset) != byte_at(other + offset):
            return False
    return True


@numba.njit("int64(int64[::1], int64, int64, int64[:, ::1], int64, int64, boolean, int64[::1])", nogil=True, cache=True)
def find_keys(
    hashes: Numbers, keys: int, width: int, slots: Numbers, known: int, count: int, extend: bool, found: Numbers
) -> int:
    """Find the entries of keys, and store their numbers in `found`; return the number of entries in the table.

    A missing key gives -1, or is added with `extend`. Keys of `width` bytes are at the address `keys`, the keys of
    entries at the address `known`, where there is room for all keys that may be added. The table has more slots than
    that.
    """
    mask, place, lines = slots.shape[0] - 1, slots.ctypes.data, 16
    for number in range(hashes.size):
        if number + _AHEAD < hashes.size:
            prefetch(place + lines * _first_slot(hashes[number + _AHEAD], mask))
        near = number + _AHEAD // 2
        if width and near < hashes.size:
            entry = slots[_first_slot(hashes[near], mask), 1]
            if entry:
                ask_for(known + (entry - 1) * width, width, _REACH)
        value, key = hashes[number], keys + number * width
        slot = _first_slot(value, mask)
        found[number] = -1
        while slots[slot, 1]:
            entry = slots[slot, 1] - 1
            if slots[slot, 0] == value and _are_one(key, known + entry * width, width):
                found[number] = entry
                break
            slot = (slot + 1) & mask
        if extend and found[number] < 0:
            copy_bytes(known + count * width, key, width)
            found[number] = count
            count += 1
            slots[slot, 0], slots[slot, 1] = value, count
    return count


@numba.njit("void(int64[::1], int64[:, ::1])", nogil=True, cache=True)
def fill_slots(hashes: Numbers, slots: Numbers) -> None:
    """Put the hashes of all entries into free slots."""
    mask = slots.shape[0] - 1
    for number in range(hashes.size):
        slot = _first_slot(hashes[number], mask)
        while slots[slot, 1]:
            slot = (slot + 1) & mask
        slots[slot, 0], slots[slot, 1] = hashes[number], number + 1
