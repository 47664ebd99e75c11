"""Counts, means, deviations, extremes and quantiles, taken part by part and merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

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
        self._whole = _WholeSums(width)

    @classmethod
    def of(cls, block: Array) -> Self:
        """Take the moments of a block of rows, `[n, width]` of any real type."""
        made = cls(block.shape[1])
        if not len(block):
            return made
        if block.dtype.kind != "f":
            made._whole = _WholeSums.of(block)
            return made
        values = np.asarray(block, np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            made.nan = np.isnan(values).sum(0)
            made.infinite = np.isinf(values).sum(0)
        made._floats = _FloatSums.of(values, finite)
        return made

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
        made, whole = cls(values.shape[1]), bool(finite.all())
        made.count = finite.sum(0)
        made.min = values.min(0) if whole else np.where(finite, values, np.inf).min(0)
        made.max = values.max(0) if whole else np.where(finite, values, -np.inf).max(0)
        made.exponent = _exponent(np.where(made.count > 0, np.maximum(np.abs(made.min), np.abs(made.max)), 0.0))
        scaled = np.ldexp(values if whole else np.where(finite, values, 0.0), -made.exponent)
        made.mean = scaled.sum(0) / np.maximum(made.count, 1)
        apart = scaled - made.mean
        made.squares = np.square(apart if whole else np.where(finite, apart, 0.0)).sum(0)
        return made

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


_LIMB = 22
"""Bits of the parts that numbers are cut into: the products of two parts can be added up in uint64 `_ROWS` times."""

_ROWS = 1 << (63 - 2 * _LIMB)


class _WholeSums:
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
        made = cls(rows.shape[1])
        made.count = len(rows)
        low, high = rows.min(0), rows.max(0)
        made.min, made.max = low.tolist(), high.tolist()
        spread = max((b - a for a, b in zip(made.min, made.max, strict=True)), default=0)
        lowest = _words(low)
        for start in range(0, len(rows), _ROWS):
            # the distance from the least number fits into uint64 whatever the type, and wraps to what it is
            made._add(_words(rows[start : start + _ROWS]) - lowest, max(1, math.ceil(spread.bit_length() / _LIMB)))
        for place, least in enumerate(made.min):
            apart = made._sums[place]
            made._sums[place] = made.count * least + apart
            made._squares[place] += made.count * least**2 + 2 * least * apart
        return made

    def _add(self, distance: Words, limbs: int) -> None:
        mask = np.uint64((1 << _LIMB) - 1)
        parts = [distance] if limbs == 1 else [(distance >> np.uint64(_LIMB * k)) & mask for k in range(limbs)]
        for i, one in enumerate(parts):
            self._sums = _plus(self._sums, one.sum(0), _LIMB * i)
            for j in range(i, limbs):
                products = np.einsum("nw,nw->w", one, parts[j])
                self._squares = _plus(self._squares, products, _LIMB * (i + j) + (j > i))

    def merge(self, other: _WholeSums) -> None:
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
