"""`plot`: the episodes of a dataset, or the values of its fields over the steps of some, as charts."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ..charts.figure import SUFFIXES, file_bytes
from ..charts.marks import Array, ChartLabels, Histogram, Lines, Series, histogram_of
from ..charts.traces import reduced
from ..encodings.pictures import looks_like_picture
from ..errors import UsageError
from ..format import fs
from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset
from ..format.returns import returns_are_known, table_with_returns
from ..opening import open_steps
from ..progress import Progress, Silent
from ..ted.schema import NEXT, NEXT_REWARD, Field, as_numbers, unknown_field
from .results import Result
from .saved_steps import has_steps, rows_of_episodes
from .written_file import FileStaging, require_suffix

_COLUMNS = 1000
"""Parts of an episode whose extremes are kept: more than a picture has pixels."""
_BLOCK_BYTES = 8 << 20
_MOST_COLUMNS = 16
_MOST_EPISODES = 24
_WHICH = re.compile(r"(?P<name>.+)\[(?P<first>\d+)(?P<range>:(?P<stop>\d*))?\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotResult(Result):
    """The numbers of the charts, in their order; `output` is the file they are drawn in, None for none.

    `episodes` are those whose steps or sums are shown. Long lines have the first, last, lowest and highest value of
    each thousandth of an episode.
    """

    kind: ClassVar[str] = "plot"
    path: Path
    output: Path | None
    fields: tuple[str, ...]
    episodes: tuple[int, ...]
    charts: tuple[Lines | Histogram, ...]
    notes: tuple[str, ...] = ()


def plot(
    dataset: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    episodes: str | None = None,
    output: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> PlotResult:
    """Collect return and length of every episode of a dataset, or the values of fields over steps, and draw them.

    `dataset` is a path or `source:id` of a dataset or a checkpoint of steps. `fields` names leaves as `inspect` does,
    or without `next.` if that is unambiguous; `observation[3]` and `observation[0:4]` choose columns (row-major), else
    the first 16 are taken. `episodes` selects episodes by number, like `0:100,250`: all by default, with `fields` the
    first one, and at most 24 then. Without `output` (.svg, .png, .pdf) nothing is written; a file there is replaced
    only with `force`. Memory is bounded however long an episode is.

    Raises DatasetNotFoundError, FormatError or CorruptDataError for the dataset; UsageError for an unknown field and
    one without numbers to plot, for `episodes`, for `output`, for a raw dataset, and where matplotlib is missing.
    """
    staging = None
    if output is not None:
        destination = fs.expanded(output)
        suffix = require_suffix(destination, SUFFIXES)
        staging = FileStaging(destination, replace=force)
        staging.refuse_if_taken()
    path = find_dataset(dataset, root)
    has_steps(path)
    with open_steps(path) as reader:
        columns = [_columns_of(reader.fields, name, dataset) for name in fields or ()]
        rows = rows_of_episodes(reader, episodes)
        if columns:
            result = _traces(reader, columns, rows, all_of=episodes is not None, progress=progress or Silent())
        else:
            result = _episodes(reader, rows)
    if staging is None:
        return result
    drawn = file_bytes(result.charts, suffix, title=os.fspath(dataset))
    with staging:
        fs.write_file(staging.path / f"plot{suffix}", drawn)
        staging.publish_file(f"plot{suffix}")
    return replace(result, output=staging.destination)


# Episodes --------------------------------------------------------------------------------------------


def _episodes(reader: StepReader, rows: Array) -> PlotResult:
    """Return and length of each episode, over episodes and as histograms."""
    table = table_with_returns(reader)
    numbers, where = _places(table, rows)
    known = returns_are_known(reader.manifest) and any(field.key == NEXT_REWARD for field in reader.fields)
    wanted = [("return", "", table.total_reward)] if known else []
    charts: list[Lines | Histogram] = []
    for name, unit, values in [*wanted, ("length", "steps", table.length)]:
        values, title = values[rows][np.argsort(numbers, kind="stable")], name.capitalize()
        line = Series(name, np.sort(numbers), values)
        charts.append(Lines((line,), ChartLabels(title=f"{title} of each episode", x=where, y=unit or name)))
        labels = ChartLabels(title=f"Distribution of {name}s", x=unit or name, y="episodes")
        charts.append(histogram_of(values, labels))
    notes = () if known else ("there is no return: no field holds the reward of each step",)
    return PlotResult(
        path=reader.path, output=None, fields=(), episodes=_numbers(table, rows), charts=tuple(charts), notes=notes
    )


def _places(table: EpisodeTable, rows: Array) -> tuple[Array, str]:
    """Where episodes are on an axis: at their numbers, or at their places if several have the same number."""
    numbers = table.episode[rows]
    return (numbers, "episode") if len(np.unique(numbers)) == len(numbers) else (rows, "episode, in storage order")


def _numbers(table: EpisodeTable, rows: Array) -> tuple[int, ...]:
    return tuple(table.episode[rows].tolist())


# Fields over steps -----------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """The columns of a leaf that are plotted, row-major, and how many there are."""

    field: Field
    chosen: range
    every: int

    def name(self, column: int) -> str:
        return f"{self.field.name}[{column}]" if self.every > 1 else self.field.name


def _columns_of(fields: Sequence[Field], asked: str, dataset: str | os.PathLike[str]) -> _Columns:
    """Find the leaf and the columns that a name like `observation[0:4]` means."""
    by_name = {field.name: field for field in fields}
    field, which = _leaf(by_name, asked), None
    if field is None and (which := _WHICH.fullmatch(asked)) is not None:
        field = _leaf(by_name, which["name"])
    if field is None:
        raise unknown_field(which["name"] if which else asked, {name.removeprefix("video.") for name in by_name})
    _refuse_other_than_numbers(field, dataset)
    every = math.prod(field.shape)
    if which is None:
        return _Columns(field, range(every), every)
    first = int(which["first"])
    stop = (int(which["stop"]) if which["stop"] else every) if which["range"] else first + 1
    if not first < stop <= every:
        raise UsageError(f"{asked} is not there: {field.name} has {every} columns, from 0 to {every - 1}")
    return _Columns(field, range(first, stop), every)


def _leaf(by_name: dict[str, Field], name: str) -> Field | None:
    """Find the leaf of a name, which may lack `next.`, or that of the video whose frames it is."""
    return by_name.get(name) or by_name.get(f"{NEXT}.{name}") or by_name.get(f"video.{name}")


def _refuse_other_than_numbers(field: Field, dataset: str | os.PathLike[str]) -> None:
    name = field.name.removeprefix("video.")
    if name != field.name or looks_like_picture(field):
        options = f"--episode K --field {shlex.quote(name)} -o frames.png"
        hint = f"see its frames: rbtool frames {shlex.quote(os.fspath(dataset))} {options}"
        raise UsageError(f"{name} holds images, which have no line to plot", hint=hint)
    if field.role == "text" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else "complex numbers" if "complex" in field.dtype else "no numbers"
        raise UsageError(f"{field.name} holds {what}, and numbers are plotted")


def _traces(
    reader: StepReader, columns: Sequence[_Columns], rows: Array, *, all_of: bool, progress: Progress
) -> PlotResult:
    """The values of columns over the steps of episodes: a chart for each column, a line for each episode."""
    table, notes = reader.episodes, list[str]()
    if not len(rows):
        raise UsageError(f"{reader.path} has no steps: there is nothing to plot")
    if not all_of and len(rows) > 1:
        notes.append(f"episode {table.episode[rows[0]]} of {len(rows):,}; --episodes chooses others")
    elif len(rows) > _MOST_EPISODES:
        notes.append(f"the first {_MOST_EPISODES} of {len(rows):,} episodes; --episodes chooses others")
    rows = rows[: _MOST_EPISODES if all_of else 1]
    progress.start("reading", int(table.length[rows].sum()) * len(columns), "steps")
    charts: list[Lines | Histogram] = []
    for one in columns:
        shown = one.chosen[:_MOST_COLUMNS]
        if len(shown) < len(one.chosen):
            notes.append(
                f"{one.field.name} has {one.every} columns; the first {len(shown)} are plotted, "
                f"--field '{one.field.name}[{shown.stop}:{min(shown.stop + _MOST_COLUMNS, one.every)}]' is more"
            )
        lines: dict[int, list[Series]] = {column: [] for column in shown}
        for row in rows.tolist():
            title = f"episode {table.episode[row]}"
            found = _trace(reader, one.field, shown, int(table.start[row]), int(table.length[row]))
            for column, (x, y) in found.items():
                lines[column].append(Series(title, x, y))
            progress.advance(int(table.length[row]))
        for column, series in lines.items():
            title = one.name(column) if len(rows) > 1 else f"{one.name(column)}, {series[0].name}"
            charts.append(Lines(tuple(series), ChartLabels(title=title, x="step", y=one.name(column))))
    progress.done()
    return PlotResult(
        path=reader.path, output=None, fields=tuple(dict.fromkeys(one.field.name for one in columns)),
        episodes=_numbers(table, rows), charts=tuple(charts), notes=tuple(notes),
    )  # fmt: skip


def _trace(reader: StepReader, field: Field, columns: range, start: int, length: int) -> dict[int, tuple[Array, Array]]:
    """Read columns of one episode in bounded memory: steps and values, of a long episode those that shape the line."""
    part = math.ceil(length / _COLUMNS)  # steps of a part whose extremes are kept
    parts = max(1, _BLOCK_BYTES // max(1, field.row_bytes) // part)
    found: dict[int, list[Series]] = {column: [] for column in columns}
    for first in range(0, length, parts * part):
        stop = min(first + parts * part, length)
        block = as_numbers(reader.read(field.key, start + first, start + stop), field.dtype).reshape(stop - first, -1)
        x = np.arange(first, stop)
        for column, series in found.items():
            line = Series("", x, block[:, column])
            series.append(reduced(line, math.ceil((stop - first) / part)) if length > 4 * _COLUMNS else line)
    return {
        column: (np.concatenate([one.x for one in series]), np.concatenate([one.y for one in series]))
        for column, series in found.items()
    }
