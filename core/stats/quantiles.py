"""Quantiles of any number of values in bounded memory, with a bound on their relative error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTILE_ERROR", "QuantileSketch"]

Array: TypeAlias = np.ndarray[Any, Any]

_KEPT_BITS = 8
"""Bits of the fraction of a float64 that select the bucket."""

_SHIFT = np.uint64(52 - _KEPT_BITS)
_SIGN = np.uint64(1 << 63)

QUANTILE_ERROR = 2.0 ** -(_KEPT_BITS + 1)
"""A quantile is off by no more than this part of its value: 0.2 %."""


class QuantileSketch:
    """Counts values in buckets that grow with them, so that each quantile is known up to a part of its value.

    A bucket holds the numbers whose sign, exponent and first bits of the fraction agree: the idea of DDSketch (Masson,
    Rim and Lee, 2019), on the buckets that floating point numbers come in anyhow. Ranks are exact, so the sketch is the
    same whatever the order of the values and the number of parts, which sketches that draw lots cannot promise.
    Memory grows with the number of buckets hit, some thousand a dimension, and not with the values.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._buckets: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64) for _ in range(width)]
        self._counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in range(width)]

    def update(self, block: Array) -> None:
        """Count a block of rows, `[n, width]` of any real type; what is not finite is left out."""
        values = np.ascontiguousarray(block.T, np.float64)
        buckets = _bucket_of(values)
        finite = np.isfinite(values)
        whole = bool(finite.all())
        for dimension in range(self._width):
            row = buckets[dimension] if whole else buckets[dimension][finite[dimension]]
            self._add(dimension, *np.unique(row, return_counts=True))

    def merge(self, other: QuantileSketch) -> None:
        """Add the counts of another sketch."""
        for dimension in range(self._width):
            self._add(dimension, other._buckets[dimension], other._counts[dimension])

    def _add(self, dimension: int, buckets: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        known, place = np.unique(np.concatenate([self._buckets[dimension], buckets]), return_inverse=True)
        totals = np.bincount(place, np.concatenate([self._counts[dimension], counts]), len(known))
        self._buckets[dimension], self._counts[dimension] = known, totals.astype(np.int64)

    def quantiles(self, fractions: Sequence[float], low: Array, high: Array) -> NDArray[np.float64]:
        """Return, for each dimension, the values below which these fractions of all lie; `[len(fractions), width]`.

        `low` and `high` are the exact extremes, `[width]`: the quantiles 0 and 1, beyond which none is placed. NaN
        without values.
        """
        found = np.full((len(fractions), self._width), np.nan)
        for dimension, (buckets, counts) in enumerate(zip(self._buckets, self._counts, strict=True)):
            if not len(buckets):
                continue
            reached = np.cumsum(counts)
            ranks = np.asarray(fractions) * (reached[-1] - 1)
            place = np.searchsorted(reached, ranks, side="right")
            inner = np.clip(_middle_of(buckets[place]), low[dimension], high[dimension])
            last = ranks >= reached[-1] - 1
            found[:, dimension] = np.where(ranks <= 0, low[dimension], np.where(last, high[dimension], inner))
        return found


def _bucket_of(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Number the buckets so that greater values lie in greater ones: the bits, with negative numbers turned round."""
    bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return ordered >> _SHIFT


def _middle_of(buckets: NDArray[np.uint64]) -> NDArray[np.float64]:
    ordered = buckets << _SHIFT
    edges = (ordered, ordered | ((np.uint64(1) << _SHIFT) - np.uint64(1)))
    low, high = (np.where(bits & _SIGN, bits & ~_SIGN, ~bits).view(np.float64) for bits in edges)
    return np.where(low == 0.0, 0.0, low + (high - low) / 2)
