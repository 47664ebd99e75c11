"""The figures of a report over all steps, in bounded memory: distributions, episodes, correlation with the return.

How a field's columns are described depends on its type and size (`describe_columns`):

    bytes and booleans       one pass: count each of the 256 values; every figure follows from the counts
    at most `_HELD_BYTES`    one pass: keep the rows; exact quantiles
    larger                   two passes: moments and estimated quantiles, then histograms between the extremes found
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.memmap.reader import FolderReader
from ..format.returns import returns_are_known, table_with_returns
from ..progress import Progress
from ..stats import Moments, QuantileSketch, described_fields
from ..ted.episodes import BoundaryCounts, Continuity
from ..ted.rules import bounded_fields
from ..ted.schema import NEXT, NEXT_REWARD, Field, Key, as_numbers, state_keys
from .pictures import looks_like_picture

FRACTIONS = (0.01, 0.25, 0.5, 0.75, 0.99)
"""The quantiles in a report."""
BINS = 40
MOST_VALUES = 64
"""A column of whole numbers with at most this many different values has a count of each value."""
_HELD_BYTES = 160 << 20
"""A field of at most this many bytes is kept in memory, which gives exact quantiles."""
_SMALL, _LARGE = 1e-300, 1e300

Blocks: TypeAlias = Callable[[], Iterator[Array]]
"""Reads all rows of a field as blocks `[n, …]` of numbers, at least one row each; called once for each pass."""
Limit: TypeAlias = tuple[float, float] | None
"""The bounds of a column in the recorded space; None if it is unbounded or not recorded."""


@dataclass(frozen=True, slots=True)
class ColumnHistogram:
    """Counts of finite values in equal bins from `low` to `high`, both included, equal to `numpy.histogram`.

    `below` and `above` count the finite values outside that range.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution of one dimension of a field, or of all its numbers together.

    All figures but `nan` and `infinite` describe the `count` finite values; without any they are None or empty.

    Args:
        std: the population standard deviation (divides by `count`).
        quantiles: at `FRACTIONS`. If `exact`, equal to `numpy.quantile` in float64; otherwise estimates of the values
            at these ranks (rounded down) with a relative error of at most `QUANTILE_ERROR`.
        values: how often each value occurs, for whole numbers with at most `MOST_VALUES` different values; else empty.
        bounded: the histogram between the bounds of the recorded space; None without bounds. `at_low` and `at_high`
            count the values exactly on the bounds.
    """

    count: int
    nan: int
    infinite: int
    mean: float | None
    std: float | None
    min: int | float | None
    max: int | float | None
    quantiles: tuple[float | None, ...]
    exact: bool
    histogram: ColumnHistogram | None
    values: tuple[tuple[int, int], ...]
    bounded: ColumnHistogram | None
    at_low: int
    at_high: int

    @property
    def constant(self) -> bool:
        """Whether all finite values are equal."""
        return self.count > 0 and self.min == self.max


def describe_columns(
    blocks: Blocks, rows: int, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]
) -> list[Distribution]:
    """Describe the columns of a field with `rows` rows.

    Args:
        blocks: reads the rows; each block is reshaped to `[…, width]`.
        limits: the bounds of each column.
        seen: called once with every block, in order.
    """
    first = next(blocks(), None)
    if first is None:
        return [_columns_of(Moments(width), column, _Column(Moments(width), column, limits[column]), (), True)
                for column in range(width)]  # fmt: skip
    if first.dtype.itemsize == 1:
        return _by_bytes(blocks, width, limits, seen)
    values = rows * (first[:1].size // width)
    if values * width * first.itemsize <= _HELD_BYTES:
        return _held(blocks, values, width, limits, seen)
    return _streamed(blocks, width, limits, seen)


def _by_bytes(blocks: Blocks, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]) -> list[Distribution]:
    """Describe bytes and booleans from counts of each of the 256 possible values."""
    totals, signed = np.zeros((width, 256), np.int64), False
    for block in blocks():
        seen(block)
        signed = block.dtype == np.int8
        table = block.reshape(-1, width).view(np.uint8)
        for column in range(width):
            totals[column] += np.bincount(table[:, column], minlength=256)
    numbers = np.arange(256)
    if signed:
        totals, numbers = np.roll(totals, 128, axis=1), numbers - 128  # int8 were counted by bits: -128 as 128
    return [_of_counts(numbers[row > 0], row[row > 0], limit) for row, limit in zip(totals, limits, strict=True)]


def _of_counts(values: Array, counts: Array, limit: Limit) -> Distribution:
    """Describe a column from its values, ascending whole numbers, and how often each occurs."""
    moments = Moments.of(values[:, None])
    column = _Column(moments, 0, limit)
    column.update(values, counts)
    total = int(counts.sum())
    whole = list(zip(values.tolist(), counts.tolist(), strict=True))
    added, squares = (sum(count * value**power for value, count in whole) for power in (1, 2))
    return Distribution(
        count=total, nan=0, infinite=0, mean=added / total, std=math.sqrt(total * squares - added**2) / total,
        min=whole[0][0], max=whole[-1][0], quantiles=_quantiles_of_counts(values, counts), exact=True,
        **column.entries(),
    )  # fmt: skip


def _quantiles_of_counts(values: Array, counts: Array) -> tuple[float, ...]:
    reached, last = np.cumsum(counts), int(counts.sum()) - 1
    found = []
    for fraction in FRACTIONS:
        rank = fraction * last
        below = math.floor(rank)
        low, high = values[np.searchsorted(reached, (below, min(below + 1, last)), side="right")].tolist()
        found.append(float(low + (high - low) * (rank - below)))
    return tuple(found)


def _held(
    blocks: Blocks, rows: int, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]
) -> list[Distribution]:
    """Describe a field by keeping all its values in memory."""
    moments, held, start = Moments(width), np.empty((width, 0)), 0
    for block in blocks():
        seen(block)
        table = block.reshape(-1, width)
        if not start:
            held = np.empty((width, rows), block.dtype)
        held[:, start : start + len(table)] = table.T
        start += len(table)
        moments.merge(Moments.of(table))
    found = []
    for place, limit in enumerate(limits):
        values, column = held[place], _Column(moments, place, limit)
        if moments.nan[place] or moments.infinite[place]:
            values = values[np.isfinite(values)]
        column.update(values)
        quantiles = np.quantile(values.astype(np.float64), FRACTIONS).tolist() if len(values) else ()
        found.append(_columns_of(moments, place, column, quantiles, exact=True))
    return found


def _streamed(blocks: Blocks, width: int, limits: Sequence[Limit], seen: Callable[[Array], None]) -> list[Distribution]:
    """Describe a field in two passes: moments and estimates of quantiles, then histograms."""
    moments, sketch = Moments(width), QuantileSketch(width)
    for block in blocks():
        seen(block)
        table = block.reshape(-1, width)
        moments.merge(Moments.of(table))
        sketch.update(table)
    columns = [_Column(moments, place, limit) for place, limit in enumerate(limits)]
    for block in blocks():
        table = block.reshape(-1, width)
        for place, column in enumerate(columns):
            values = table[:, place]
            column.update(values[np.isfinite(values)])
    quantiles = sketch.quantiles(FRACTIONS, moments.min, moments.max)
    return [
        _columns_of(moments, place, column, quantiles[:, place].tolist(), exact=False)
        for place, column in enumerate(columns)
    ]


def _columns_of(moments: Moments, place: int, column: _Column, quantiles: Sequence[float], exact: bool) -> Distribution:
    count = int(moments.count[place])
    return Distribution(
        count=count, nan=int(moments.nan[place]), infinite=int(moments.infinite[place]),
        mean=float(moments.mean[place]) if count else None, std=float(moments.std[place]) if count else None,
        min=moments.lowest[place], max=moments.highest[place],
        quantiles=tuple(quantiles) if count else (None,) * len(FRACTIONS), exact=exact, **column.entries(),
    )  # fmt: skip


class _Column:
    """Histograms and counts of one column whose moments are known."""

    def __init__(self, moments: Moments, place: int, limit: Limit) -> None:
        low, high = moments.lowest[place], moments.highest[place]
        self._inner = None if low is None or high is None else _Bins(float(low), float(high))
        self._bounded = None if limit is None or not np.isfinite(limit).all() else _Bins(*limit)
        self._limit = limit
        self._at = [0, 0]
        self._values: dict[int, int] | None = {}

    def update(self, values: Array, counts: Array | None = None) -> None:
        """Add finite values `[n]`, which occur once each or `counts` times."""
        if not len(values):
            return
        if values.dtype.kind == "f":
            self._values = None
        numbers = values.astype(np.float64)
        for bins in (self._inner, self._bounded):
            if bins is not None:
                bins.update(numbers, counts)
        for side, bound in enumerate(self._limit or ()):
            equal = numbers == bound
            self._at[side] += int(np.count_nonzero(equal) if counts is None else counts[equal].sum())
        self._count(values, counts)

    def _count(self, values: Array, counts: Array | None) -> None:
        if self._values is None:
            return
        if counts is None:
            values, counts = np.unique(values, return_counts=True)
        if len(values) <= MOST_VALUES:
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                self._values[int(value)] = self._values.get(int(value), 0) + count
        if len(values) > MOST_VALUES or len(self._values) > MOST_VALUES:
            self._values = None

    def entries(self) -> dict[str, Any]:
        """Return the fields of `Distribution` that were counted here."""
        return {
            "histogram": None if self._inner is None else self._inner.histogram(),
            "bounded": None if self._bounded is None else self._bounded.histogram(),
            "values": tuple(sorted((self._values or {}).items())),
            "at_low": self._at[0],
            "at_high": self._at[1],
        }


class _Bins:
    """Counts values in equal bins."""

    def __init__(self, low: float, high: float) -> None:
        self._ends = low, high
        # Values are scaled by a power of two, which is exact, so that no bin width overflows or underflows.
        size = max(abs(low), abs(high))
        self._down = -int(np.frexp(size)[1]) if not _SMALL < size < _LARGE else 0
        self._scaled = np.ldexp(low, self._down), np.ldexp(high, self._down)
        edges = np.linspace(*self._scaled, BINS + 1)
        self._apart = bool((edges[1:] > edges[:-1]).all())
        self._counts = np.zeros(BINS, np.int64)
        self._outside = [0, 0]

    def update(self, values: Array, counts: Array | None) -> None:
        """Count float64 values `[n]`, which occur once each or `counts` times."""
        low, high = self._ends
        for side, outside in enumerate((values < low, values > high)):
            self._outside[side] += int(np.count_nonzero(outside) if counts is None else counts[outside].sum())
        scaled, (low, high) = np.ldexp(values, self._down), self._scaled
        if self._apart:
            self._counts += np.histogram(scaled, BINS, (low, high), weights=counts)[0].astype(np.int64)
            return
        inside = (scaled >= low) & (scaled <= high)  # so few floats lie between the ends that edges coincide
        share = (scaled[inside] - low) / (high - low) if high > low else np.full(int(inside.sum()), 0.5)
        place = np.minimum(share * BINS, BINS - 1).astype(np.int64)
        self._counts += np.bincount(place, None if counts is None else counts[inside], BINS).astype(np.int64)

    def histogram(self) -> ColumnHistogram:
        """Return the counts as a histogram."""
        return ColumnHistogram(*self._ends, tuple(self._counts.tolist()), *self._outside)


class ReturnCorrelation:
    """Pearson's correlation, over episodes, between the mean of each of `width` columns and the return.

    An episode counts for a column if the column's mean and the return are finite. Partial sums of products are merged
    by the method of Chan, Golub and LeVeque (1979), so that memory does not grow with the number of episodes.
    """

    def __init__(self, table: EpisodeTable, returns: Array, width: int) -> None:
        self._ends = table.start + table.length
        self._lengths = table.length
        self._returns = returns
        self._episode = 0
        self._row = 0
        self._open = np.zeros(width)
        self._count = np.zeros(width)
        self._means = np.zeros((2, width))
        self._sums = np.zeros((3, width))  # squares of the column, squares of the return, products
        self._range = np.stack([np.full((2, width), np.inf), np.full((2, width), -np.inf)])

    def see(self, rows: Array) -> None:
        """Add the next rows, float64 `[n, width]`."""
        stop = self._row + len(rows)
        last = int(np.searchsorted(self._ends, stop, side="right"))
        cuts = np.concatenate(([0], self._ends[self._episode : last] - self._row)).astype(np.int64)
        with np.errstate(invalid="ignore", over="ignore"):  # a value that is not finite leaves its episode out
            if last > self._episode:
                sums = np.add.reduceat(rows[: cuts[-1]], cuts[:-1], axis=0)
                sums[0] += self._open
                chosen = slice(self._episode, last)
                self._merge(sums / self._lengths[chosen, None], self._returns[chosen])
                self._open = np.zeros_like(self._open)
            self._open = self._open + rows[cuts[-1] :].sum(0)
        self._episode, self._row = last, stop

    def _merge(self, means: Array, returns: Array) -> None:
        both = np.stack([means, np.broadcast_to(returns[:, None], means.shape)])
        there = np.isfinite(both).all(0)
        count = there.sum(0)
        some = np.maximum(count, 1)
        known = np.where(there, both, 0.0)
        centre = known.sum(1) / some
        x, y = np.where(there, both - centre[:, None], 0.0)
        added = np.stack([(x * x).sum(0), (y * y).sum(0), (x * y).sum(0)])
        total = self._count + count
        apart = centre - self._means
        weight = self._count * count / np.maximum(total, 1)
        self._sums += added + weight * np.stack([apart[0] ** 2, apart[1] ** 2, apart[0] * apart[1]])
        self._means = self._means + apart * (count / np.maximum(total, 1))
        self._count = total
        self._range[0] = np.minimum(self._range[0], np.where(there, both, np.inf).min(1))
        self._range[1] = np.maximum(self._range[1], np.where(there, both, -np.inf).max(1))

    def results(self) -> list[float | None]:
        """Return the correlation of each column; None if the column or the return is the same in all episodes."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            found = self._sums[2] / np.sqrt(self._sums[0]) / np.sqrt(self._sums[1])
            varies = (self._range[0] < self._range[1]).all(0) & np.isfinite(found)
        return [value if there else None for value, there in zip(np.clip(found, -1, 1).tolist(), varies, strict=True)]


_BLOCK_BYTES = 4 << 20
_WIDEST = 256
"""A field with more numbers per row is described as a whole."""
MOST_COLUMNS = 3000
"""Most columns of all fields together; the fields after that are described as a whole, too."""
_POINTS = 400
"""Most points of the curve of returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFigures:
    """The figures of one field.

    Args:
        columns: a distribution for each dimension (row-major), or a single one for all numbers if `pooled`.
        correlations: see `ReturnCorrelation`; None where not defined, empty without returns.
        rows: the number of rows described, which is smaller than the number of steps if the dataset is damaged.
        lost: why no row could be read; empty otherwise.
    """

    field: Field
    pooled: bool
    columns: tuple[Distribution, ...]
    correlations: tuple[float | None, ...] = ()
    rows: int = 0
    lost: str = ""

    def label(self, column: int) -> str:
        """Return the name of a column, such as `observation[3]` or `pose[1, 2]`."""
        if self.pooled or not self.field.shape or math.prod(self.field.shape) == 1:
            return self.field.name
        place = np.unravel_index(column, self.field.shape)
        return f"{self.field.name}[{', '.join(str(int(one)) for one in place)}]"


@dataclass(frozen=True, slots=True)
class Followed:
    """The `steps` that are not the last of an episode, and in how many of them `next.<key>` is the next row's `key`."""

    key: Key
    steps: int
    following: int


@dataclass(frozen=True, slots=True)
class ReturnCurve:
    """The returns of episodes, reduced to points: the mean, low and high of the group that begins at `first`."""

    first: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFigures:
    """The figures of episodes; without returns, `returns` and `curve` are None and `no_returns` says why."""

    table: EpisodeTable
    ends: BoundaryCounts
    length: Distribution
    returns: Distribution | None
    curve: ReturnCurve | None
    no_returns: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a dataset or checkpoint; if the episode table cannot be read, `lost` says why."""

    steps: int
    fields: tuple[FieldFigures, ...]
    episodes: EpisodeFigures | None
    followed: tuple[Followed, ...]
    lost: str = ""


def measure(reader: StepReader, progress: Progress) -> Figures:
    """Read every row, in bounded memory, and return the figures.

    Text, ids and complex numbers have no figures. Observations are described at the root only, not again under `next`.
    Of damaged files, the rows that can be read are described.
    """
    episodes, lost = _episodes(reader)
    whole = episodes is not None and episodes.table.covers(reader.manifest.steps)
    pass_over = _FiguresPass(reader, episodes if whole else None, progress)
    fields = described_fields(reader.fields)
    progress.start("reading", reader.manifest.steps * sum(field.row_bytes for field in fields), "bytes")
    found, columns = [], 0
    for field in fields:
        width = math.prod(field.shape)
        pooled = width > 1 and (width > _WIDEST or columns + width > MOST_COLUMNS or is_image(field))
        found.append(pass_over.describe(field, pooled))
        columns += len(found[-1].columns)
    progress.done()
    return Figures(
        steps=reader.manifest.steps, fields=tuple(found), episodes=episodes, followed=tuple(pass_over.followed),
        lost=lost,
    )  # fmt: skip


def _episodes(reader: StepReader) -> tuple[EpisodeFigures | None, str]:
    try:
        table = table_with_returns(reader)
    except (CorruptDataError, FormatError) as error:
        return None, str(error)
    missing = ""
    if not any(field.key == NEXT_REWARD for field in reader.fields):
        missing = "There is no field next.reward."
    elif not returns_are_known(reader.manifest):
        missing = "next.reward holds sums over n steps, and the reward of every step is not stored."
    curve = None if missing or not len(table) else _curve(table.total_reward)
    figures = EpisodeFigures(
        table=table, ends=table.counts(), length=_of_array(table.length),
        returns=None if missing else _of_array(table.total_reward), curve=curve, no_returns=missing,
    )  # fmt: skip
    return figures, ""


def _of_array(values: Array) -> Distribution:
    """Describe an array with one number per episode."""
    blocks = [values] if len(values) else []
    return describe_columns(lambda: iter(blocks), len(values), 1, [None], lambda block: None)[0]


def _curve(returns: Array) -> ReturnCurve:
    """Reduce the finite returns to at most `_POINTS` points, which keep the lowest and highest of each group."""
    count = len(returns)
    first = np.unique(np.linspace(0, count, min(count, _POINTS), endpoint=False).astype(np.int64))
    there = np.isfinite(returns)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(there, returns, 0.0), first) / np.add.reduceat(there, first, dtype=np.int64)
    low = np.minimum.reduceat(np.where(there, returns, np.inf), first)
    high = np.maximum.reduceat(np.where(there, returns, -np.inf), first)
    bare = ~np.isfinite(mean)
    return ReturnCurve(first, *(np.where(bare, np.nan, values) for values in (mean, low, high)))


class _FiguresPass:
    """Reads and describes the fields of a dataset one by one; `followed` gets an entry for each observation."""

    def __init__(self, reader: StepReader, episodes: EpisodeFigures | None, progress: Progress) -> None:
        self.followed: list[Followed] = []
        self._reader = reader
        self._table = None if episodes is None else episodes.table
        self._has_returns = episodes is not None and episodes.returns is not None
        self._progress = progress
        self._states = frozenset(state_keys(reader.fields))
        self._limits: Mapping[Key, tuple[Array, Array]] = {
            field.key: (low, high) for field, low, high in bounded_fields(reader.fields, reader.manifest.spaces)
        }

    def describe(self, field: Field, pooled: bool) -> FieldFigures:
        """Describe a field; in a damaged dataset, the rows before the damage."""
        try:
            return self._described(field, pooled, self._reader.manifest.steps)
        except (CorruptDataError, FormatError) as error:
            problem = str(error)
        if self._kept_steps:
            with contextlib.suppress(CorruptDataError, FormatError):
                return self._described(field, pooled, self._kept_steps)
        return FieldFigures(field=field, pooled=pooled, columns=(), lost=problem)

    @cached_property
    def _kept_steps(self) -> int:
        """The number of steps from the start that are intact in all files of a damaged dataset."""
        return self._reader.kept_steps if isinstance(self._reader, FolderReader) else 0

    def _described(self, field: Field, pooled: bool, rows: int) -> FieldFigures:
        width = 1 if pooled else math.prod(field.shape)
        whole = self._table is not None and rows == self._reader.manifest.steps
        correlation = following = None
        if whole and self._table is not None:
            if self._has_returns:
                correlation = ReturnCorrelation(self._table, self._table.total_reward, width)
            if field.key in self._states:
                following = _Following(self._reader, field, self._table)

        def seen(block: Array) -> None:
            if correlation is not None:
                table = block.reshape(len(block), -1)
                means = table.mean(1, dtype=np.float64)[:, None] if pooled else table.astype(np.float64)
                correlation.see(means)
            if following is not None:
                following.see(block)
            self._progress.advance(len(block) * field.row_bytes)

        found = describe_columns(lambda: self._blocks(field, rows), rows, width, self._limits_of(field, width), seen)
        if following is not None:
            self.followed.append(following.result())
        return FieldFigures(
            field=field, pooled=pooled, columns=tuple(found), rows=rows,
            correlations=tuple(correlation.results()) if correlation is not None else (),
        )  # fmt: skip

    def _blocks(self, field: Field, rows: int) -> Iterator[Array]:
        step = max(1, _BLOCK_BYTES // max(field.row_bytes, 8 * math.prod(field.shape) // 2))
        for start in range(0, rows, step):
            yield as_numbers(self._reader.read(field.key, start, min(start + step, rows)), field.dtype)

    def _limits_of(self, field: Field, width: int) -> Sequence[Limit]:
        bounds = self._limits.get(field.key)
        if bounds is None:
            return [None] * width
        low, high = (np.broadcast_to(bound, field.shape).reshape(-1).astype(np.float64).tolist() for bound in bounds)
        pairs = list(zip(low, high, strict=True))
        return pairs if len(pairs) == width else [pairs[0] if len(set(pairs)) == 1 else None] * width


class _Following:
    """Compares the `next` rows of an observation with the rows after them, bit for bit."""

    def __init__(self, reader: StepReader, field: Field, table: EpisodeTable) -> None:
        self._reader = reader
        self._field = field
        self._starts = table.start
        self._continuity = Continuity()
        self._row = self._steps = self._following = 0

    def see(self, block: Array) -> None:
        stop = self._row + len(block)
        key = (NEXT, *self._field.key)
        after = as_numbers(self._reader.view(key, self._row, stop), self._field.dtype)
        inside = np.ones(len(block), bool)  # whether the row before belongs to the same episode
        low, high = np.searchsorted(self._starts, (self._row, stop))
        inside[self._starts[low:high] - self._row] = False
        follows = self._continuity.see(self._field.key, block, after)
        self._steps += int(inside.sum())
        self._following += int((follows & inside).sum())
        self._row = stop

    def result(self) -> Followed:
        return Followed(self._field.key, self._steps, self._following)


def is_image(field: Field) -> bool:
    """Return whether a field at the root looks like images (those under `next` only repeat them)."""
    return field.key[0] != NEXT and looks_like_picture(field)
