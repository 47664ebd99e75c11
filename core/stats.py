"""Statistics of a dataset's values: counts, moments, extremes and quantiles, in one pass over the rows.

Statistics of blocks are merged, so that memory does not grow with the dataset. `StatsStore` caches them on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import RbtoolError
from .format import fs
from .format.contracts import Array, StepReader
from .format.documents import decode, dump_json, load_json, plain
from .format.files import digest_bytes
from .format.manifest import Manifest
from .progress import Progress
from .ted.schema import NEXT, Field, Key, as_numbers, is_floating, state_keys

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

_LEAST = -1074
"""The exponent used for zero, smaller than the exponent of any other number."""


class Moments:
    """Count, mean, standard deviation, minimum and maximum of the finite values of each of `width` dimensions.

    Integers of any type are summed exactly, and mean and deviation are rounded once at the end. Floats are summed in
    float64, scaled by a power of two so that neither sums nor squares overflow or underflow. Blocks are merged by the
    method of Chan, Golub and LeVeque (1979), which loses no precision to a large mean; how rows are divided into blocks
    only affects the last bits. NaN and infinite values are counted, and left out of everything else.
    """

    def __init__(self, width: int) -> None:
        self.nan: Counts = np.zeros(width, np.int64)
        self.infinite: Counts = np.zeros(width, np.int64)
        self._floats = _FloatSums(width)
        self._whole = _WholeSums(width)

    @classmethod
    def of(cls, block: Array) -> Self:
        """Compute the moments of a block of rows, `[n, width]` of any real type."""
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
        """Add the moments of other rows."""
        self.nan = self.nan + other.nan
        self.infinite = self.infinite + other.infinite
        self._floats.merge(other._floats)
        self._whole.merge(other._whole)

    @property
    def count(self) -> Counts:
        """The number of finite values."""
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
        """The population standard deviation (divides by the count); exactly 0 if all values are equal."""
        found = self._joined() if self._whole.count else self._floats
        deviation = self._whole.std if found is None else found.std
        return np.where(self.constant, 0.0, deviation)

    @property
    def min(self) -> Floats:
        """The smallest value as float64; infinity without values."""
        return np.array([math.inf if value is None else value for value in self.lowest], np.float64)

    @property
    def max(self) -> Floats:
        """The largest value as float64; minus infinity without values."""
        return np.array([-math.inf if value is None else value for value in self.highest], np.float64)

    @property
    def lowest(self) -> list[int | float | None]:
        """The smallest value, exact: an int if all values are integers; None without values."""
        return self._extremes(self._floats.min, self._whole.min, least=True)

    @property
    def highest(self) -> list[int | float | None]:
        """The largest value, exact: an int if all values are integers; None without values."""
        return self._extremes(self._floats.max, self._whole.max, least=False)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Which dimensions have at most one distinct value."""
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
        """Return the sums of all values as floats; None if all values are integers, whose sums are exact."""
        if not self._floats.count.any():
            return None
        found, whole = _FloatSums(len(self.nan)), self._whole
        found.merge(self._floats)
        found.merge(_FloatSums.known(whole.count, whole.mean, whole.std, whole.min, whole.max))
        return found


def mean_of(numbers: Array) -> float:
    """Return the mean of a non-empty array of real numbers, without overflow; infinite or NaN if a number is."""
    flat = numbers.reshape(-1, 1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        with np.errstate(over="ignore", invalid="ignore"):
            return float(flat.mean(dtype=np.float64))
    return Moments.of(flat).mean.item()


class _FloatSums:
    """Mean and sum of squared deviations, in units of 2^exponent and its square.

    The exponent follows the largest value, so that squares neither overflow nor underflow.
    """

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
        """Create sums from moments that were computed elsewhere."""
        found = cls(len(mean))
        found.count = np.full(len(mean), count)
        found.min, found.max = np.array(low, np.float64), np.array(high, np.float64)
        found.exponent = _exponent(np.maximum(np.abs(found.min), np.abs(found.max)))
        found.mean = np.ldexp(mean, -found.exponent)
        found.squares = np.square(np.ldexp(std, -found.exponent)) * count
        return found

    def merge(self, other: _FloatSums) -> None:
        """Add the sums of other rows, by the formulas of Chan, Golub and LeVeque.

        With n = n1 + n2 and the distance d of the means: mean = mean1 + d·n2/n, squares = squares1 + squares2 +
        d²·n1·n2/n. Both are first scaled to the larger exponent.
        """
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
    """Return the exponent of the power of two just above each number."""
    return np.where(size > 0, np.frexp(size)[1], _LEAST).astype(np.int32)


_LIMB = 22
"""The number of bits of a limb, a digit of an integer, so that sums of products of limbs fit into uint64."""

_ROWS = 1 << (63 - 2 * _LIMB)
"""The number of products of two limbs whose sum fits into uint64."""


class _WholeSums:
    """Exact count, sum, sum of squares, minimum and maximum of each of `width` dimensions, as Python integers.

    Squares of 64-bit integers overflow, so the distance d of a number from the smallest one is cut into limbs of 22
    bits, whose sums and products NumPy adds up exactly in uint64:

        d  = l0 + l1·2²² + l2·2⁴⁴
        d² = l0² + 2·l0·l1·2²² + (l1² + 2·l0·l2)·2⁴⁴ + …

    Python integers then put the sums over many rows together.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.min: list[int] = []
        self.max: list[int] = []
        self._sums = [0] * width
        self._squares = [0] * width

    @classmethod
    def of(cls, block: Array) -> Self:
        """Compute the sums of a non-empty block of rows, `[n, width]` of integers or booleans."""
        rows = block.view(np.uint8) if block.dtype.kind == "b" else block
        made = cls(rows.shape[1])
        made.count = len(rows)
        low, high = rows.min(0), rows.max(0)
        made.min, made.max = low.tolist(), high.tolist()
        spread = max((b - a for a, b in zip(made.min, made.max, strict=True)), default=0)
        lowest = _words(low)
        for start in range(0, len(rows), _ROWS):
            # The distance from the smallest number fits into uint64 for every type; unsigned wrap-around is exact.
            made._add(_words(rows[start : start + _ROWS]) - lowest, max(1, math.ceil(spread.bit_length() / _LIMB)))
        for place, least in enumerate(made.min):
            apart = made._sums[place]
            made._sums[place] = made.count * least + apart
            made._squares[place] += made.count * least**2 + 2 * least * apart
        return made

    def _add(self, distance: Words, limbs: int) -> None:
        """Add numbers, `[n, width]`, with this number of limbs, to the sums and the sums of squares."""
        mask = np.uint64((1 << _LIMB) - 1)
        parts = [distance] if limbs == 1 else [(distance >> np.uint64(_LIMB * k)) & mask for k in range(limbs)]
        for i, one in enumerate(parts):
            self._sums = _plus(self._sums, one.sum(0), _LIMB * i)
            for j in range(i, limbs):
                products = np.einsum("nw,nw->w", one, parts[j])
                self._squares = _plus(self._squares, products, _LIMB * (i + j) + (j > i))

    def merge(self, other: _WholeSums) -> None:
        """Add the sums of other rows."""
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
        """The population standard deviation of each dimension."""
        pairs = zip(self._sums, self._squares, strict=True)
        return np.array([math.sqrt(self.count * squares - total**2) / self.count for total, squares in pairs])


def _words(rows: Array) -> Words:
    """Return integers as uint64; negative ones wrap around."""
    return rows.astype(np.uint64 if rows.dtype.kind == "u" else np.int64).view(np.uint64)


def _plus(numbers: list[int], added: Words, shift: int) -> list[int]:
    return [number + (more << shift) for number, more in zip(numbers, added.tolist(), strict=True)]


_KEPT_BITS = 8
"""How many leading bits of a float64's fraction select the bucket."""

_SHIFT = np.uint64(52 - _KEPT_BITS)
_SIGN = np.uint64(1 << 63)

QUANTILE_ERROR = 2.0 ** -(_KEPT_BITS + 1)
"""The largest relative error of a quantile: 0.2 %."""


class QuantileSketch:
    """Counts values in buckets of relative width, so that quantiles have a bounded relative error.

    This is the idea of DDSketch (Masson, Rim and Lee, 2019), with buckets that come for free from the float64 format:
    a bucket holds the numbers with the same sign, exponent and first `_KEPT_BITS` bits of the fraction.

        sign  exponent (11)   fraction (52)
        [ s | e e e … e e e | f f f f f f f f | ignored … ]
          └──────────── bucket ─────────────┘

    Ranks are exact counts, so the sketch does not depend on the order of the values or on how they were divided, unlike
    randomised sketches. Memory grows with the number of buckets that are hit, some thousand per dimension, and not with
    the number of values.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._buckets: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64) for _ in range(width)]
        self._counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in range(width)]

    def update(self, block: Array) -> None:
        """Count a block of rows, `[n, width]` of any real type; values that are not finite are left out."""
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

    def quantiles(
        self,
        fractions: Sequence[float],
        low: Array,
        high: Array,
        *,
        method: Literal["lower", "linear"] = "lower",
    ) -> NDArray[np.float64]:
        """Return quantiles of each dimension, `[len(fractions), width]`; NaN without values.

        Of n values, the quantile is the one at rank `fraction * (n - 1)`, within `QUANTILE_ERROR`.

        Args:
            fractions: which quantiles, from 0 to 1.
            low, high: the exact minimum and maximum, `[width]`: the quantiles 0 and 1, and limits for all others.
            method: as in `numpy.quantile`: ranks are rounded down, or lie between two values in proportion.
        """
        found = np.full((len(fractions), self._width), np.nan)
        for dimension, (buckets, counts) in enumerate(zip(self._buckets, self._counts, strict=True)):
            if not len(buckets):
                continue
            reached = np.cumsum(counts)
            ranks = np.asarray(fractions) * (reached[-1] - 1)
            values = []
            for rank in (ranks,) if method == "lower" else (np.floor(ranks), np.ceil(ranks)):
                place = np.searchsorted(reached, rank, side="right")
                inner = np.clip(_middle_of(buckets[place]), low[dimension], high[dimension])
                last = rank >= reached[-1] - 1
                values.append(np.where(rank <= 0, low[dimension], np.where(last, high[dimension], inner)))
            found[:, dimension] = values[0] + (ranks - np.floor(ranks)) * (values[-1] - values[0])
        return found


def _bucket_of(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return bucket numbers in the order of the values: the leading bits, inverted for negative numbers."""
    bits = (values + 0.0).view(np.uint64)  # + 0.0 turns -0.0 into 0.0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return ordered >> _SHIFT


def _middle_of(buckets: NDArray[np.uint64]) -> NDArray[np.float64]:
    ordered = buckets << _SHIFT
    edges = (ordered, ordered | ((np.uint64(1) << _SHIFT) - np.uint64(1)))
    low, high = (np.where(bits & _SIGN, bits & ~_SIGN, ~bits).view(np.float64) for bits in edges)
    return np.where(low == 0.0, 0.0, low + (high - low) / 2)


_BLOCK_BYTES = 8 << 20
_BLOCK_VALUES = 2 << 20
"""Values per block; each takes several words while moments and quantiles are computed, even if it is a byte."""
_WIDEST = 1024
"""Leaves with more numbers per row, such as images, are pooled, since a mean for each pixel is of little use."""

_NOT_DESCRIBED = frozenset({"id", "text"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStats:
    """Statistics of one leaf: a number for each dimension (row-major), or a single one if the leaf is `pooled`.

    - `count`: finite values; NaN and infinite values are counted separately.
    - `std`: the population standard deviation.
    - `constant`: the dimensions that never vary, whose deviation of 0 must not be a divisor.
    - `quantiles`: for each requested fraction, one number per dimension, see `QuantileSketch.quantiles`.

    Extremes and quantiles of integers are ints of any size, extremes exact. Numbers are None without a finite value.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: str
    pooled: bool
    count: tuple[int, ...]
    nan: tuple[int, ...]
    infinite: tuple[int, ...]
    mean: tuple[float | None, ...]
    std: tuple[float | None, ...]
    min: tuple[int | float | None, ...]
    max: tuple[int | float | None, ...]
    quantiles: tuple[tuple[int | float | None, ...], ...]
    constant: tuple[int, ...]


def described_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Return the leaves that have statistics, which excludes text, ids and complex numbers.

    An observation is described only at the root and not again under `next`, where most rows would count twice.
    """
    twins = {(NEXT, *key) for key in state_keys(fields)}
    return tuple(
        field
        for field in fields
        if field.role not in _NOT_DESCRIBED and "complex" not in field.dtype and field.key not in twins
        and 0 not in field.shape
    )  # fmt: skip


def collect_stats(
    reader: StepReader, fields: Sequence[Field], fractions: Sequence[float], progress: Progress
) -> tuple[FieldStats, ...]:
    """Read every row of these leaves once, and compute their statistics with quantiles at these fractions."""
    progress.start("reading", sum(field.row_bytes for field in fields) * reader.manifest.steps, "bytes")
    found = tuple(_described(reader, field, fractions, progress) for field in fields)
    progress.done()
    return found


def _described(reader: StepReader, field: Field, fractions: Sequence[float], progress: Progress) -> FieldStats:
    width = math.prod(field.shape)
    pooled = width > _WIDEST
    moments, sketch = Moments(1 if pooled else width), QuantileSketch(1 if pooled else width)
    for block in _blocks(reader, field):
        values = as_numbers(block, field.dtype).reshape(-1, 1 if pooled else width)
        moments.merge(Moments.of(values))
        sketch.update(values)
        progress.advance(block.nbytes)
    quantiles = [_numbers(row, moments.count) for row in sketch.quantiles(fractions, moments.min, moments.max)]
    if not is_floating(field.dtype):
        quantiles = [_whole_numbers(row, moments) for row in quantiles]
    return FieldStats(
        key=field.key,
        dtype=field.dtype,
        shape=field.shape,
        role=field.role,
        pooled=pooled,
        count=tuple(moments.count.tolist()),
        nan=tuple(moments.nan.tolist()),
        infinite=tuple(moments.infinite.tolist()),
        mean=_numbers(moments.mean, moments.count),
        std=_numbers(moments.std, moments.count),
        min=tuple(moments.lowest),
        max=tuple(moments.highest),
        quantiles=tuple(quantiles),
        constant=tuple(moments.constant.nonzero()[0].tolist()),
    )


def _blocks(reader: StepReader, field: Field) -> Iterator[Array]:
    """Read a leaf in blocks whose size depends only on its shape, so that the same rows give the same results."""
    rows = max(1, min(_BLOCK_BYTES // field.row_bytes, _BLOCK_VALUES // math.prod(field.shape)))
    steps = reader.manifest.steps
    for start in range(0, steps, rows):
        yield reader.read(field.key, start, min(start + rows, steps))


def _numbers(values: Array, counts: Array) -> tuple[float | None, ...]:
    return tuple(value if count else None for value, count in zip(values.tolist(), counts.tolist(), strict=True))


def _whole_numbers(values: Sequence[float | None], moments: Moments) -> tuple[int | float | None, ...]:
    """Round quantiles of integers, because the middle of a bucket need not be an integer; extremes stay exact."""
    found: list[int | float | None] = []
    for value, low, high in zip(values, moments.lowest, moments.highest, strict=True):
        if value is None or low is None or high is None:
            found.append(None)
        else:
            found.append(low if value == float(low) else high if value == float(high) else round(value))
    return tuple(found)


_VERSION = 5


class StatsStore:
    """Caches the statistics of datasets in `<storage root>/.stats`, one file for each content and way to read it.

    A file that is unreadable or has another version counts as missing, and nothing is stored in a read-only folder:
    both only cost another pass over the data. So does any change of the dataset's files, and copying them: statistics
    are cached with the state of the files from which they were computed (`StepReader.files_state`), because the digest
    in the manifest does not show that rows were changed later.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / ".stats"

    def load(self, manifest: Manifest, files: str, fractions: Sequence[float]) -> tuple[FieldStats, ...] | None:
        """Return the cached statistics of files in the state `files`, with quantiles at these fractions, or None."""
        try:
            document = load_json(self._path(manifest))
            digest = document.pop("digest")
            if digest != digest_bytes(dump_json(document).encode()):
                return None
            described = _VERSION, _contents(manifest), files, list(fractions)
            if tuple(document[name] for name in ("version", "of", "files", "fractions")) != described:
                return None
            return tuple(_field_stats(entry, str(self._folder)) for entry in document["fields"])
        except (OSError, ValueError, KeyError, TypeError, RbtoolError):
            return None

    def save(self, manifest: Manifest, files: str, fractions: Sequence[float], fields: Sequence[FieldStats]) -> None:
        """Cache the statistics of all leaves of a dataset, whose files had the state `files` before they were read."""
        entries = [dataclasses.asdict(field) for field in fields]
        document = plain({
            "version": _VERSION, "of": _contents(manifest), "files": files, "fractions": list(fractions),
            "fields": entries,
        })  # fmt: skip
        document["digest"] = digest_bytes(dump_json(document).encode())
        with contextlib.suppress(OSError, RbtoolError):
            fs.replace_file_below(self._root, self._path(manifest), dump_json(document).encode())

    def _path(self, manifest: Manifest) -> Path:
        name = digest_bytes(dump_json(_contents(manifest)).encode())
        return self._folder / f"{name.replace(':', '-')}.json"


def _contents(manifest: Manifest) -> dict[str, Any]:
    """Return what the statistics depend on: the content digest, and how the manifest interprets the bytes."""
    leaves = [[list(field.key), field.dtype, list(field.shape), field.role] for field in manifest.fields]
    return {
        "content_digest": manifest.content_digest,
        "layout": manifest.layout,
        "steps": manifest.steps,
        "episodes": manifest.episodes,
        "fields": leaves,
    }


def _field_stats(entry: Any, origin: str) -> FieldStats:
    """Decode the statistics of a leaf from a document; FormatError or ValueError if they are invalid."""
    found = decode(FieldStats, entry, origin)
    for name in ("nan", "infinite", "mean", "std", "min", "max"):
        if len(getattr(found, name)) != len(found.count):
            raise ValueError(f"{name} has {len(getattr(found, name))} numbers, count has {len(found.count)}")
    return found
