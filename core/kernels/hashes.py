"""Hashes of rows of bytes, and tables that number such rows: compiled if numba can be imported, otherwise plain."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import compiled_module

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_LEAST = 1024


def siphash(rows: Bytes, key: bytes) -> Numbers:
    """Hash each row of uint8 `[n, width]` with SipHash-2-4 (Aumasson and Bernstein, 2012); int64 `[n]`.

    `key` is 16 bytes. The hash is the same in every process and on every machine. The paper's hash is unsigned; the
    int64 has the same bits.
    """
    words = np.frombuffer(key, "<u8").astype(np.uint64)
    rows = np.ascontiguousarray(rows)
    compiled = compiled_module("compiled_hashes")
    if compiled is None:
        return _plain_siphash(rows, words)
    hashes = np.empty(len(rows), np.uint64)
    compiled.siphash_rows(_address(rows), rows.shape[1], words, hashes)
    return hashes.view(np.int64)


def _plain_siphash(rows: Bytes, key: NDArray[np.uint64]) -> Numbers:
    """The same with NumPy, one word of all rows at a time."""
    count, width = rows.shape
    padded = np.zeros((count, (width // 8 + 1) * 8), np.uint8)
    padded[:, :width] = rows
    padded[:, -1] = width & 0xFF
    start = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    state = [np.full(count, value, np.uint64) ^ key[number % 2] for number, value in enumerate(start)]
    for word in padded.view("<u8").T:
        state[3] ^= word
        _mix(state, 2)
        state[0] ^= word
    state[2] ^= np.uint64(0xFF)
    _mix(state, 4)
    hashes: Numbers = (state[0] ^ state[1] ^ state[2] ^ state[3]).view(np.int64)
    return hashes


def _mix(state: list[NDArray[np.uint64]], rounds: int) -> None:
    def turned(word: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))

    v0, v1, v2, v3 = state
    for _ in range(rounds):
        v0 = v0 + v1
        v1 = turned(v1, 13) ^ v0
        v0 = turned(v0, 32)
        v2 = v2 + v3
        v3 = turned(v3, 16) ^ v2
        v0 = v0 + v3
        v3 = turned(v3, 21) ^ v0
        v2 = v2 + v1
        v1 = turned(v1, 17) ^ v2
        v2 = turned(v2, 32)
    state[:] = v0, v1, v2, v3


def project(rows: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply float64 `[n, features]` by `[features, components]`, adding in the order of the features.

    The order in a BLAS matrix product would depend on the machine and the number of rows.
    """
    projected = np.zeros((len(rows), matrix.shape[1]))
    compiled = compiled_module("compiled_hashes")
    if compiled is not None:
        compiled.project_rows(np.ascontiguousarray(rows), np.ascontiguousarray(matrix), projected)
        return projected
    for feature, weights in enumerate(matrix):
        projected += rows[:, feature, None] * weights
    return projected


class KeyTable:
    """Numbers keys, rows of `width` bytes, from 0 in the order of arrival.

    Keys are compared byte by byte, so that two keys with the same hash get different numbers. With width 0 the hash
    itself is the key. Memory grows by doubling.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._count = 0
        self._hashes = np.empty(0, np.int64)
        self._keys = np.empty((0, width), np.uint8)

    def __len__(self) -> int:
        return self._count

    @property
    def hashes(self) -> Numbers:
        """The hash of each entry, int64 `[len]`, as a view."""
        return self._hashes[: self._count]

    @property
    def keys(self) -> Bytes:
        """The key of each entry, uint8 `[len, width]`, as a view."""
        return self._keys[: self._count]

    def find(self, hashes: Numbers, keys: Bytes) -> Numbers:
        """Return the numbers of keys, int64 `[n]`, -1 if they are missing; `keys` is uint8 `[n, width]`."""
        return self._search(hashes, keys, extend=False)

    def add(self, hashes: Numbers, keys: Bytes) -> Numbers:
        """Return the numbers of keys, int64 `[n]`; missing keys are added."""
        self._make_room(self._count + len(hashes))
        before = self._count
        found = self._search(hashes, keys, extend=True)
        if self._count > before:
            new = found >= before
            self._hashes[found[new]] = hashes[new]
        return found

    def truncate(self, count: int) -> None:
        """Remove the entries from number `count` on."""
        if count < self._count:
            hashes, keys = self.hashes[:count].copy(), self.keys[:count].copy()
            self._count = 0
            self._forget()
            self.add(hashes, keys)

    def _make_room(self, count: int) -> None:
        capacity = len(self._hashes)
        if count <= capacity:
            return
        capacity = max(_LEAST, 2 * capacity, count)
        hashes, keys = np.empty(capacity, np.int64), np.empty((capacity, self.width), np.uint8)
        hashes[: self._count], keys[: self._count] = self.hashes, self.keys
        self._hashes, self._keys = hashes, keys
        self._spread()

    def _spread(self) -> None:
        """Called once there is room for more entries."""

    def _forget(self) -> None:
        raise NotImplementedError

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.width, self.hashes.copy(), self.keys.copy())


class PlainTable(KeyTable):
    """A `KeyTable` on a Python dict."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._numbers: dict[tuple[int, bytes], int] = {}

    def _forget(self) -> None:
        self._numbers.clear()

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        numbers = self._numbers
        found = np.empty(len(hashes), np.int64)
        for row, (value, key) in enumerate(zip(hashes.tolist(), keys, strict=True)):
            entry = (value, key.tobytes())
            if extend and entry not in numbers:
                self._keys[self._count] = key
                numbers[entry] = self._count
                self._count += 1
            found[row] = numbers.get(entry, -1)
        return found


class CompiledTable(KeyTable):
    """A `KeyTable` with open addressing; its functions release the interpreter lock."""

    def __init__(self, width: int, compiled: ModuleType) -> None:
        super().__init__(width)
        self._loops = compiled
        self._slots = np.zeros((2, 2), np.int64)

    def _spread(self) -> None:
        self._slots = np.zeros((1 << (2 * len(self._hashes) - 1).bit_length(), 2), np.int64)
        self._loops.fill_slots(self.hashes, self._slots)

    def _forget(self) -> None:
        self._slots.fill(0)

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        hashes, keys = np.ascontiguousarray(hashes), np.ascontiguousarray(keys)
        found = np.empty(len(hashes), np.int64)
        known = _address(self._keys)
        self._count = self._loops.find_keys(
            hashes, _address(keys), self.width, self._slots, known, self._count, extend, found
        )
        return found


def _address(array: NDArray[Any]) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def key_table(width: int) -> KeyTable:
    """Make a compiled table if numba can be imported, otherwise a plain one."""
    compiled = compiled_module("compiled_hashes")
    return PlainTable(width) if compiled is None else CompiledTable(width, compiled)


def _rebuilt(width: int, hashes: Numbers, keys: Bytes) -> KeyTable:
    table = key_table(width)
    table.add(hashes, keys)
    return table
