"""The figures of a dataset, from one pass over the rows of each field: what a report shows, as plain data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.memmap.reader import FolderReader
from ..format.returns import returns_are_known, table_with_returns
from ..progress import Progress
from ..stats import described_fields
from ..ted.episodes import BoundaryCounts, Continuity
from ..ted.rules import bounded_fields
from ..ted.schema import NEXT, NEXT_REWARD, Field, Key, as_numbers, state_keys
from .columns import Distribution, Limit, describe_columns
from .correlation import ReturnCorrelation
from .images import is_image

_BLOCK_BYTES = 4 << 20
_WIDEST = 256
"""Fields of more numbers a row are described as a whole."""
MOST_COLUMNS = 3000
"""Of all fields together; those after it are described as a whole, too."""
_POINTS = 400
"""The most points of the curve of returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFigures:
    """One leaf: `columns` has one distribution for each dimension (row-major), or one for all if it is `pooled`.

    `correlations` are Pearson's, of the mean in each episode with its return: None where they are not defined, empty
    without returns. `rows` is how many rows were described, fewer than there are in a damaged dataset; `lost` states
    why none could be read.
    """

    field: Field
    pooled: bool
    columns: tuple[Distribution, ...]
    correlations: tuple[float | None, ...] = ()
    rows: int = 0
    lost: str = ""

    def label(self, column: int) -> str:
        """Name a column: `observation[3]`, `pose[1, 2]`."""
        if self.pooled or not self.field.shape or math.prod(self.field.shape) == 1:
            return self.field.name
        place = np.unravel_index(column, self.field.shape)
        return f"{self.field.name}[{', '.join(str(int(one)) for one in place)}]"


@dataclass(frozen=True, slots=True)
class Followed:
    """How many of the `steps` before the last of each episode have, as `next` of `key`, exactly the row after them."""

    key: Key
    steps: int
    following: int


@dataclass(frozen=True, slots=True)
class ReturnCurve:
    """The returns of consecutive episodes, from `first` on: their mean, least and greatest, float64 `[points]`."""

    first: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFigures:
    """The episodes: `returns` and `curve` are None where there is no return, and `no_returns` states why."""

    table: EpisodeTable
    ends: BoundaryCounts
    length: Distribution
    returns: Distribution | None
    curve: ReturnCurve | None
    no_returns: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a dataset or checkpoint. `episodes` is None where the episode table cannot be read: `lost`."""

    steps: int
    fields: tuple[FieldFigures, ...]
    episodes: EpisodeFigures | None
    followed: tuple[Followed, ...]
    lost: str = ""


def measure(reader: StepReader, progress: Progress) -> Figures:
    """Read every row and return the figures; bounded memory.

    Text, ids and complex numbers have no figures. States are described at the root only. Of damaged files, what can be
    read is described.
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
    """Describe one number for each episode."""
    blocks = [values] if len(values) else []
    return describe_columns(lambda: iter(blocks), len(values), 1, [None], lambda block: None)[0]


def _curve(returns: Array) -> ReturnCurve:
    """Join consecutive returns to a few points, so that no high or low one is lost; those that are not finite are."""
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
    """Reads the fields of a dataset one after the other; `followed` grows with each state."""

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
        """Describe a field; of damaged files, the rows before those that are lost."""
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
        """How many steps at the beginning are whole in all files of a damaged dataset."""
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
    """Compares a state's `next` rows with the rows after them, bit for bit."""

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
        inside = np.ones(len(block), bool)  # whether the row before is of the same episode
        low, high = np.searchsorted(self._starts, (self._row, stop))
        inside[self._starts[low:high] - self._row] = False
        follows = self._continuity.see(self._field.key, block, after)
        self._steps += int(inside.sum())
        self._following += int((follows & inside).sum())
        self._row = stop

    def result(self) -> Followed:
        return Followed(self._field.key, self._steps, self._following)
