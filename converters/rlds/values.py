"""The values of the lists of an Example: floats, integers and byte strings, decoded where they are asked for."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError
from ...core.format.contracts import Array

_BLOCK = 1 << 16
_AT_ONCE = 1 << 18
_LONGEST_VARINT = 10
_INT64 = np.dtype(np.int64)
_NOT_COUNTED: Array = np.zeros(0, np.int64)

_loops: ModuleType | None = None


def warm() -> ModuleType | None:
    """Import the compiled loops, and use them from now on; None without numba. It takes 0.4 s, the first time 2 s."""
    global _loops
    if _loops is None:
        with contextlib.suppress(ImportError):
            from . import compiled

            _loops = compiled
    return _loops


class Floats:
    """A list of floats: `values`, float32 `[n]`, a view of the bytes of the record."""

    __slots__ = ("values",)

    def __init__(self, values: Array) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError where that changes one."""
        found = self.values[start:stop]
        if dtype.kind == "f" and dtype.itemsize >= found.itemsize:
            return found.astype(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            made = found.astype(dtype)
        _require_same(made, found, dtype)
        return made


class Ints:
    """A list of integers: varints, of which the number in each block of bytes is found when it is needed."""

    __slots__ = ("_before", "_bits", "_count", "_packed")

    def __init__(self, packed: Array, count: int | None = None, bits: int | None = None) -> None:
        """`packed` are whole varints, uint8 `[bytes]`; how many, and the bits that any has, are found if None."""
        self._packed, self._before = packed, _NOT_COUNTED
        if count is not None and bits is not None:
            self._count, self._bits = count, bits
            return
        self._bits = int(np.bitwise_or.reduce(packed))
        if len(packed) and packed[-1] >= 0x80:
            raise damaged("a number in it has no end")
        self._count = len(packed) if self._bits < 0x80 else int(self._counts()[-1])

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> Array:
        """All values, int64 `[n]`."""
        if self._bits < 0x80:  # a byte each: flags, and other small numbers
            return self._packed.astype(_INT64)
        return self.read(0, self._count, _INT64)

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError for one that it cannot hold."""
        if self._bits < (2 if dtype.kind == "b" else 0x80):
            return self._packed[start:stop].astype(dtype)
        if dtype == np.int64 and stop - start == self._count:
            return _varints(self._packed, self._count)
        made = np.empty(stop - start, dtype)
        for first in range(start, stop, _AT_ONCE):
            last = min(first + _AT_ONCE, stop)
            values = self._decoded(first, last)
            part = values.view(np.uint64) if dtype == np.uint64 else values
            made[first - start : last - start] = part
            if dtype.itemsize < 8 or dtype.kind == "f":
                _require_same(made[first - start : last - start], part, dtype)
        return made

    def _decoded(self, start: int, stop: int) -> Array:
        if self._count == len(self._packed):
            return self._packed[start:stop].astype(np.int64)
        return _varints(self._packed[self._place(start) : self._place(stop)], stop - start)

    def _place(self, number: int) -> int:
        """The byte after the first `number` values."""
        if not number:
            return 0
        if number == self._count:
            return len(self._packed)
        before = self._counts()
        block = int(np.searchsorted(before, number, side="left")) - 1
        ends = np.flatnonzero(self._packed[block * _BLOCK : (block + 1) * _BLOCK] < 0x80)
        return block * _BLOCK + int(ends[number - int(before[block]) - 1]) + 1

    def _counts(self) -> Array:
        """How many values end before each block of bytes, and in all."""
        if self._before is _NOT_COUNTED:
            starts = range(0, len(self._packed), _BLOCK)
            counts = [np.count_nonzero(self._packed[start : start + _BLOCK] < 0x80) for start in starts]
            self._before = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
        return self._before


class Strings:
    """A list of byte strings in `data`; `spans`, int64 `[n, 2]`, are where each begins and ends."""

    __slots__ = ("data", "spans")

    def __init__(self, data: bytes, spans: Array) -> None:
        self.data, self.spans = data, spans

    def __len__(self) -> int:
        return len(self.spans)

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return some of the strings."""
        data = self.data
        return [data[first:last] for first, last in self.spans[start:stop].tolist()]

    @property
    def longest(self) -> int:
        """Bytes of the longest string."""
        return int((self.spans[:, 1] - self.spans[:, 0]).max(initial=0))


Values: TypeAlias = Floats | Ints | Strings


def _varints(packed: Array, count: int) -> Array:
    """Decode whole varints, `count` of them: compiled, or all at once, one pass for each byte of the longest."""
    if _loops is not None:
        decoded = np.empty(count, np.int64)
        if not _loops.decode_varints(packed, decoded):
            raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")
        return decoded
    ends = np.flatnonzero(packed < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST_VARINT:
        raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")
    values = (packed[starts] & 0x7F).astype(np.uint64)
    for byte in range(1, longest):
        which = np.flatnonzero(lengths > byte)
        values[which] |= (packed[starts[which] + byte] & 0x7F).astype(np.uint64) << np.uint64(7 * byte)
    return values.view(np.int64)


def _require_same(made: Array, found: Array, dtype: np.dtype[Any]) -> None:
    differs = made != found
    if found.dtype.kind == "f":
        differs &= ~(np.isnan(found) & np.isnan(made)) if made.dtype.kind == "f" else True
    if differs.any():
        value = found[int(differs.argmax())]
        raise CorruptDataError(f"the value {value} does not fit {dtype}, the type that features.json states")


def damaged(why: str) -> CorruptDataError:
    """Make the error for bytes that are no Example."""
    return CorruptDataError(f"no sound Example: {why}")
