"""Statistics of features in the form of LeRobot, for each episode and for all rows.

    min, max, mean, std   the deviation divides by the number of values
    q01 … q99             exact quantiles, interpolated like numpy.quantile
    count                 number of rows; of pictures, the number of sampled frames

Values that are not finite are left out. Pictures are sampled as in LeRobot: about n^(3/4) of n frames, and not every
pixel of large frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, TypeAlias

import numpy as np

from ...core.format.contracts import Array
from ...core.stats import Moments

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
Statistics: TypeAlias = dict[str, Array]
"""Arrays by the names in `NAMES`: `[width]` for all rows, `[episodes, width]` for episodes; `count` has width 1."""
_HELD_BYTES = 64 << 20
_FEWEST, _MOST, _POWER = 100, 10_000, 0.75
_LARGE, _SMALL = 300, 150
_CODES = 1 << 16


def of_episodes(rows: Array, lengths: Array) -> Statistics:
    """Return the statistics of each of several consecutive episodes, from their rows `[n, width]`."""
    values = np.where(np.isfinite(rows), rows, np.nan) if rows.dtype.kind == "f" else rows
    starts = np.cumsum(lengths) - lengths
    found = {name: np.empty((len(lengths), rows.shape[1])) for name in NAMES if name != "count"}
    for length in np.unique(lengths).tolist():
        which = np.flatnonzero(lengths == length)
        # Sorted along the rows, NaN last: [episodes, rows, width].
        part = np.sort(values[starts[which][:, None] + np.arange(length)].astype(np.float64), axis=1)
        known = np.isfinite(part)
        count = known.sum(1)
        part = np.where(known, part, 0.0)
        with np.errstate(invalid="ignore"):
            mean = part.sum(1) / np.where(count, count, np.nan)
            apart = np.where(known, part - mean[:, None], 0.0)
            found["mean"][which] = mean
            found["std"][which] = np.sqrt((apart**2).sum(1) / np.where(count, count, np.nan))
        ends = {"min": 0.0, "max": 1.0}
        for name, fraction in (ends | QUANTILES).items():
            found[name][which] = np.where(count, _at(part, fraction * (count - 1)), np.nan)
    return found | {"count": lengths[:, None]}


def _at(ordered: Array, ranks: Array) -> Array:
    """Return the values at fractional ranks `[k, width]` of sorted rows `[k, rows, width]`, interpolated."""
    low = np.clip(np.floor(ranks), 0, None).astype(np.int64)
    high = np.minimum(low + 1, ordered.shape[1] - 1)
    before, after = (np.take_along_axis(ordered, place[:, None], axis=1)[:, 0] for place in (low, high))
    found: Array = before + (after - before) * np.clip(ranks - low, 0, 1)
    return found


def of_all(chunks: Callable[[], Iterator[Array]], rows: int) -> Statistics:
    """Return the statistics of all rows; NaN for a column without a finite value.

    Args:
        chunks: yields all rows in chunks `[n, width]`; it is called several times, since quantiles need all values of a
            column at once, and only 64 MiB of columns (or one column) are held at a time.
        rows: the number of rows.
    """
    total: Moments | None = None
    kind = np.dtype(np.float64)
    for part in chunks():
        kind, found = part.dtype, Moments.of(part)
        if total is None:
            total = found
        else:
            total.merge(found)
    assert total is not None
    width = len(total.nan)
    quantiles = np.full((len(QUANTILES), width), np.nan)
    group = max(1, _HELD_BYTES // (rows * kind.itemsize))
    for low in range(0, width, group):
        held = np.empty((min(group, width - low), rows), kind)
        at = 0
        for part in chunks():
            held[:, at : at + len(part)] = part[:, low : low + group].T
            at += len(part)
        for place, column in enumerate(held, low):
            if (finite := np.isfinite(column)).any():
                quantiles[:, place] = _quantiles(column if finite.all() else column[finite])
    there = np.isfinite(quantiles[0])
    moments: Statistics = {name: np.where(there, getattr(total, name), np.nan) for name in NAMES[:4]}
    return moments | dict(zip(QUANTILES, quantiles, strict=True)) | {"count": np.array([rows])}


def _quantiles(column: Array) -> Array:
    """Return the quantiles of finite numbers; `column` is reordered in place."""
    ranks = np.array(list(QUANTILES.values())) * (len(column) - 1)
    low = np.floor(ranks).astype(np.int64)
    high = np.minimum(low + 1, len(column) - 1)
    column.partition(np.unique([low, high]))
    before, after = column[low].astype(np.float64), column[high].astype(np.float64)
    found: Array = before + (after - before) * (ranks - low)
    return found


def listed(found: Statistics, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Return statistics in the form of `stats.json`; None if one of the numbers is never finite."""
    if not all(np.isfinite(values).all() for values in found.values()):
        return None
    return {name: values.reshape((1,) if name == "count" else shape).tolist() for name, values in found.items()}


def sampled_frames(count: int) -> Array:
    """Return the numbers of the frames that LeRobot samples from an episode of `count` frames."""
    wanted = max(min(_FEWEST, count), min(int(count**_POWER), _MOST))
    return np.round(np.linspace(0, count - 1, wanted)).astype(np.int64)


class PictureCounts:
    """Histograms of the channels of pictures `[n, height, width, channels]`, for exact statistics in little memory.

    `values` has the number that each code in the pictures stands for, such as `arange(256) / 255`. With None, pictures
    are floats and counted by their leading 16 bits: their quantiles are exact to 0.4 %, all other statistics fully.
    """

    @classmethod
    def of(cls, dtype: str, channels: int) -> Self:
        """Return empty counts for images of this element type; uint16 and floats are depths."""
        known = {"uint8": np.arange(256) / 255, "uint16": np.arange(_CODES, dtype=np.float64)}
        return cls(known.get(dtype), channels)

    def __init__(self, values: Array | None, channels: int) -> None:
        self._values = values
        self._counts = np.zeros((channels, _CODES if values is None else len(values)), np.int64)
        self._moments = Moments(channels)
        self.frames = 0

    def add(self, pictures: Array) -> None:
        """Add sampled pictures; large ones are subsampled."""
        longest = max(pictures.shape[1:3])
        step = 1 if longest < _LARGE else longest // _SMALL
        pixels = pictures[:, ::step, ::step].reshape(-1, pictures.shape[-1])
        self.frames += len(pictures)
        codes = pixels
        if self._values is None:
            self._moments.merge(Moments.of(pixels))
            bits = pixels.astype("<f4").view("<u4")
            ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> 16
            codes = np.where(np.isfinite(pixels), ordered, _CODES)
        for channel, counts in enumerate(self._counts):
            counts += np.bincount(codes[:, channel], minlength=len(counts))[: len(counts)]

    def empty(self) -> PictureCounts:
        """Return empty counts for the same values."""
        return PictureCounts(self._values, len(self._counts))

    def merge(self, other: PictureCounts) -> None:
        """Add the counts of other pictures."""
        self._counts += other._counts
        self._moments.merge(other._moments)
        self.frames += other.frames

    def statistics(self) -> Statistics:
        """Return the statistics, `[channels]`; NaN for a channel without a finite value."""
        values = _float_codes() if self._values is None else self._values
        found: dict[str, Array] = {name: np.full(len(self._counts), np.nan) for name in NAMES}
        for channel, counts in enumerate(self._counts):
            there = np.flatnonzero(counts)
            numbers, weights = values[there], counts[there]
            if not len(there):
                continue
            total = int(weights.sum())
            mean = (numbers * weights).sum() / total
            deviation = np.sqrt(((numbers - mean) ** 2 * weights).sum() / total)
            exact = [numbers[0], numbers[-1], mean, deviation]
            if self._values is None:
                exact = [getattr(self._moments, name)[channel] for name in NAMES[:4]]
            reached = np.cumsum(weights)
            ranks = np.array(list(QUANTILES.values())) * (total - 1)
            low = np.floor(ranks)
            before, after = (
                numbers[np.searchsorted(reached, place, side="right")]
                for place in (low, np.minimum(low + 1, total - 1))
            )
            for name, number in zip(NAMES, [*exact, 0.0, *(before + (after - before) * (ranks - low))], strict=True):
                found[name][channel] = number
        return found | {"count": np.array([self.frames])}


def _float_codes() -> Array:
    """Return the number that each 16-bit code stands for: the middle of the floats with these leading bits.

    Codes ascend with the numbers: positive floats have their sign bit set, the bits of negative ones are inverted.
    """
    codes = np.arange(_CODES, dtype=np.uint32)
    bits = (codes << 16) | np.uint32(1 << 15)
    with np.errstate(invalid="ignore"):
        numbers = np.where(codes >> 15, bits & np.uint32((1 << 31) - 1), ~bits).astype("<u4")
        return numbers.view("<f4").astype(np.float64)
