"""Exact sums of whole numbers of any type and size."""

from __future__ import annotations

import math
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["WholeSums"]

Array: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint64]

_LIMB = 22
"""Bits of the parts that numbers are cut into: the products of two parts can be added up in uint64 `_ROWS` times."""

_ROWS = 1 << (63 - 2 * _LIMB)


class WholeSums:
    """Count, sum, sum of squares, minimum and maximum of each of `width` dimensions, as Python integers."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.min: list[int] = []
        self.max: list[int] = []
        self._sums = [0] * width
        self._squares = [0] * width

    @classmethod
    def of(cls, block: Array) -> Self:
        """Take the sums of a block of rows, `[n, width]` of integers or truth values, with one row at least."""
        rows = block.view(np.uint8) if block.dtype.kind == "b" else block
        found = cls(rows.shape[1])
        found.count = len(rows)
        low, high = rows.min(0), rows.max(0)
        found.min, found.max = low.tolist(), high.tolist()
        spread = max((b - a for a, b in zip(found.min, found.max, strict=True)), default=0)
        lowest = _words(low)
        for start in range(0, len(rows), _ROWS):
            # the distance from the least number fits into uint64 whatever the type, and wraps to what it is
            found._add(_words(rows[start : start + _ROWS]) - lowest, max(1, math.ceil(spread.bit_length() / _LIMB)))
        for place, least in enumerate(found.min):
            apart = found._sums[place]
            found._sums[place] = found.count * least + apart
            found._squares[place] += found.count * least**2 + 2 * least * apart
        return found

    def _add(self, distance: Words, limbs: int) -> None:
        mask = np.uint64((1 << _LIMB) - 1)
        parts = [distance] if limbs == 1 else [(distance >> np.uint64(_LIMB * k)) & mask for k in range(limbs)]
        for i, one in enumerate(parts):
            self._sums = _plus(self._sums, one.sum(0), _LIMB * i)
            for j in range(i, limbs):
                products = np.einsum("nw,nw->w", one, parts[j])
                self._squares = _plus(self._squares, products, _LIMB * (i + j) + (j > i))

    def merge(self, other: WholeSums) -> None:
        """Take in the sums of other rows."""
        if not other.count:
            return
        if self.count:
            self.min = [min(pair) for pair in zip(self.min, other.min, strict=True)]
            self.max = [max(pair) for pair in zip(self.max, other.max, strict=True)]
        else:
            self.min, self.max = list(other.min), list(other.max)
        self.count += other.count
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        self._squares = [a + b for a, b in zip(self._squares, other._squares, strict=True)]

    @property
    def mean(self) -> Floats:
        """The mean of each dimension, rounded once."""
        return np.array([total / self.count for total in self._sums])

    @property
    def std(self) -> Floats:
        """The deviation of each dimension, divided by the count."""
        pairs = zip(self._sums, self._squares, strict=True)
        return np.array([math.sqrt(self.count * squares - total**2) / self.count for total, squares in pairs])


def _words(rows: Array) -> Words:
    """The numbers as uint64; negative ones wrap."""
    return rows.astype(np.uint64 if rows.dtype.kind == "u" else np.int64).view(np.uint64)


def _plus(numbers: list[int], added: Words, shift: int) -> list[int]:
    return [number + (more << shift) for number, more in zip(numbers, added.tolist(), strict=True)]
