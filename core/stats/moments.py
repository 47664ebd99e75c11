"""Counts, means, deviations and extremes that can be taken part by part and merged."""

from __future__ import annotations

from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments"]

Array: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]


class Moments:
    """Count, mean, deviation, minimum and maximum of the finite values of each of `width` dimensions, in float64.

    NaN and infinite values are counted and left out of all else. Parts are merged by the method of Chan, Golub and
    LeVeque (1979), which loses no precision to a large mean; the result depends on the parts and their order only in
    the last bits.
    """

    def __init__(self, width: int) -> None:
        self.count: Counts = np.zeros(width, np.int64)
        self.nan: Counts = np.zeros(width, np.int64)
        self.infinite: Counts = np.zeros(width, np.int64)
        self.mean: Floats = np.zeros(width)
        self.min: Floats = np.full(width, np.inf)
        self.max: Floats = np.full(width, -np.inf)
        self._squares: Floats = np.zeros(width)
        """Sums of squared distances from the mean."""

    @classmethod
    def of(cls, block: Array) -> Self:
        """Take the moments of a block of rows, `[n, width]` of any real type."""
        found = cls(block.shape[1])
        if not len(block):
            return found
        values = np.asarray(block, np.float64)
        if block.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                found.nan = np.isnan(values).sum(0)
                found.infinite = np.isinf(values).sum(0)
                return found._masked(values, finite)
        found.count[:] = len(values)
        found.mean = values.mean(0)
        found._squares = _squared(values - found.mean).sum(0)
        found.min, found.max = values.min(0), values.max(0)
        return found

    def _masked(self, values: Floats, finite: NDArray[np.bool_]) -> Self:
        self.count = finite.sum(0)
        some = np.maximum(self.count, 1)
        self.mean = np.where(finite, values, 0.0).sum(0) / some
        self._squares = _squared(np.where(finite, values - self.mean, 0.0)).sum(0)
        self.min = np.where(finite, values, np.inf).min(0)
        self.max = np.where(finite, values, -np.inf).max(0)
        return self

    def merge(self, other: Moments) -> None:
        """Take in the moments of other rows."""
        total = self.count + other.count
        some = np.maximum(total, 1)
        apart = other.mean - self.mean
        self._squares = self._squares + other._squares + _squared(apart) * (self.count * (other.count / some))
        self.mean = self.mean + apart * (other.count / some)
        self.count = total
        self.nan = self.nan + other.nan
        self.infinite = self.infinite + other.infinite
        self.min = np.minimum(self.min, other.min)
        self.max = np.maximum(self.max, other.max)

    @property
    def std(self) -> Floats:
        """The deviation of the values there are (divided by their count, not by one less); 0 where they are equal."""
        deviation: Floats = np.sqrt(self._squares / np.maximum(self.count, 1))
        return np.where(self.constant, 0.0, deviation)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Which dimensions have one value only, or none."""
        return ~(self.max > self.min)


def _squared(distance: Floats) -> Floats:
    with np.errstate(over="ignore", under="ignore"):  # beyond the square root of the largest number: infinite
        return np.square(distance)
