"""Counts, means, deviations and extremes that can be taken part by part and merged."""

from __future__ import annotations

import math
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .whole_numbers import WholeSums

__all__ = ["Moments", "mean_of"]

Array: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]

_LEAST = -1074
"""The exponent of zero: below that of every other number."""


class Moments:
    """Count, mean, deviation, minimum and maximum of the finite values of each of `width` dimensions.

    Whole numbers of any type are added up exactly; the mean and the deviation are rounded once. Floats are computed
    with in float64, scaled so that neither a sum nor a square leaves its range, and merged by the method of Chan, Golub
    and LeVeque (1979), which loses no precision to a large mean; their result depends on the parts and their order only
    in the last bits. NaN and infinite values are counted and left out of all else.
    """

    def __init__(self, width: int) -> None:
        self.nan: Counts = np.zeros(width, np.int64)
        self.infinite: Counts = np.zeros(width, np.int64)
        self._floats = _FloatSums(width)
        self._whole = WholeSums(width)

    @classmethod
    def of(cls, block: Array) -> Self:
        """Take the moments of a block of rows, `[n, width]` of any real type."""
        found = cls(block.shape[1])
        if not len(block):
            return found
        if block.dtype.kind != "f":
            found._whole = WholeSums.of(block)
            return found
        values = np.asarray(block, np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            found.nan = np.isnan(values).sum(0)
            found.infinite = np.isinf(values).sum(0)
        found._floats = _FloatSums.of(values, finite)
        return found

    def merge(self, other: Moments) -> None:
        """Take in the moments of other rows."""
        self.nan = self.nan + other.nan
        self.infinite = self.infinite + other.infinite
        self._floats.merge(other._floats)
        self._whole.merge(other._whole)

    @property
    def count(self) -> Counts:
        """How many finite values there are."""
        return self._floats.count + self._whole.count

    @property
    def mean(self) -> Floats:
        """The mean; 0 without values."""
        if not self._whole.count:
            return np.ldexp(self._floats.mean, self._floats.exponent)
        found = self._joined()
        return self._whole.mean if found is None else np.ldexp(found.mean, found.exponent)

    @property
    def std(self) -> Floats:
        """The deviation of the values there are (divided by their count, not by one less); 0 where they are equal."""
        found = self._joined() if self._whole.count else self._floats
        deviation = self._whole.std if found is None else found.std
        return np.where(self.constant, 0.0, deviation)

    @property
    def min(self) -> Floats:
        """The least value in float64; infinity without values."""
        return np.array([math.inf if value is None else value for value in self.lowest], np.float64)

    @property
    def max(self) -> Floats:
        """The greatest value in float64; minus infinity without values."""
        return np.array([-math.inf if value is None else value for value in self.highest], np.float64)

    @property
    def lowest(self) -> list[int | float | None]:
        """The least value as it is: an int where there are whole numbers only; None without values."""
        return self._extremes(self._floats.min, self._whole.min, least=True)

    @property
    def highest(self) -> list[int | float | None]:
        """The greatest value, as `lowest` is the least."""
        return self._extremes(self._floats.max, self._whole.max, least=False)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Which dimensions have one value only, or none."""
        pairs = zip(self.lowest, self.highest, strict=True)
        return np.array([low is None or high is None or not high > low for low, high in pairs])

    def _extremes(self, floats: Floats, whole: list[int], *, least: bool) -> list[int | float | None]:
        numbers: list[int | float | None] = [
            value if there else None for value, there in zip(floats.tolist(), self._floats.count.tolist(), strict=True)
        ]
        if not self._whole.count:
            return numbers
        choose = min if least else max
        return [one if other is None else choose(one, other) for one, other in zip(whole, numbers, strict=True)]

    def _joined(self) -> _FloatSums | None:
        """All values as floats; None where there are whole numbers only, which need no rounding."""
        if not self._floats.count.any():
            return None
        found, whole = _FloatSums(len(self.nan)), self._whole
        found.merge(self._floats)
        found.merge(_FloatSums.known(whole.count, whole.mean, whole.std, whole.min, whole.max))
        return found


def mean_of(numbers: Array) -> float:
    """The mean of real numbers of any type and shape, at least one; that of infinite ones is infinite or NaN."""
    flat = numbers.reshape(-1, 1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        with np.errstate(over="ignore", invalid="ignore"):
            return float(flat.mean(dtype=np.float64))
    return Moments.of(flat).mean.item()


class _FloatSums:
    """Mean and sum of squared distances from it, in units of 2^exponent and its square; the exponent is that of the
    greatest value, so that squares neither overflow nor vanish."""

    def __init__(self, width: int) -> None:
        self.count: Counts = np.zeros(width, np.int64)
        self.exponent: NDArray[np.int32] = np.full(width, _LEAST, np.int32)
        self.mean: Floats = np.zeros(width)
        self.squares: Floats = np.zeros(width)
        self.min: Floats = np.full(width, np.inf)
        self.max: Floats = np.full(width, -np.inf)

    @classmethod
    def of(cls, values: Floats, finite: NDArray[np.bool_]) -> Self:
        found, whole = cls(values.shape[1]), bool(finite.all())
        found.count = finite.sum(0)
        found.min = values.min(0) if whole else np.where(finite, values, np.inf).min(0)
        found.max = values.max(0) if whole else np.where(finite, values, -np.inf).max(0)
        found.exponent = _exponent(np.where(found.count > 0, np.maximum(np.abs(found.min), np.abs(found.max)), 0.0))
        scaled = np.ldexp(values if whole else np.where(finite, values, 0.0), -found.exponent)
        found.mean = scaled.sum(0) / np.maximum(found.count, 1)
        apart = scaled - found.mean
        found.squares = np.square(apart if whole else np.where(finite, apart, 0.0)).sum(0)
        return found

    @classmethod
    def known(cls, count: int, mean: Floats, std: Floats, low: list[int], high: list[int]) -> Self:
        """Take up moments that were computed elsewhere."""
        found = cls(len(mean))
        found.count = np.full(len(mean), count)
        found.min, found.max = np.array(low, np.float64), np.array(high, np.float64)
        found.exponent = _exponent(np.maximum(np.abs(found.min), np.abs(found.max)))
        found.mean = np.ldexp(mean, -found.exponent)
        found.squares = np.square(np.ldexp(std, -found.exponent)) * count
        return found

    def merge(self, other: _FloatSums) -> None:
        total = self.count + other.count
        some = np.maximum(total, 1)
        exponent = np.maximum(self.exponent, other.exponent)
        down, other_down = self.exponent - exponent, other.exponent - exponent
        mean, squares = np.ldexp(self.mean, down), np.ldexp(self.squares, 2 * down)
        apart = np.ldexp(other.mean, other_down) - mean
        squares = squares + np.ldexp(other.squares, 2 * other_down)
        self.squares = squares + np.square(apart) * (self.count * (other.count / some))
        self.mean = mean + apart * (other.count / some)
        self.exponent, self.count = exponent, total
        self.min = np.minimum(self.min, other.min)
        self.max = np.maximum(self.max, other.max)

    @property
    def std(self) -> Floats:
        return np.ldexp(np.sqrt(self.squares / np.maximum(self.count, 1)), self.exponent)


def _exponent(size: Floats) -> NDArray[np.int32]:
    """The power of two just above each number."""
    return np.where(size > 0, np.frexp(size)[1], _LEAST).astype(np.int32)
