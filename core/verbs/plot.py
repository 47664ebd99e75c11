"""`plot`: charts of the episodes of a dataset or a mixture, or of the values of fields over the steps of episodes."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ..datasets.mixtures import open_mixture
from ..errors import UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset
from ..format.mixture import is_mixture
from ..format.returns import returns_are_known, table_with_returns
from ..format.staging import FileStaging, require_suffix
from ..open_steps import open_steps
from ..options import PathLike
from ..progress import Progress, Silent
from ..report.charts import (
    SUFFIXES,
    Array,
    Bars,
    ChartLabels,
    Histogram,
    Lines,
    Series,
    file_bytes,
    histogram_of,
    reduced,
)
from ..report.pictures import looks_like_picture
from ..results import Result
from ..saved_steps import has_steps, rows_of_episodes
from ..ted.schema import NEXT, NEXT_REWARD, Field, Key, as_numbers, key_called, unknown_field

_MOST_COLUMNS = 16
_MOST_EPISODES = 24
_MOST_DATASETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedDataset:
    """A dataset of a mixture: its `share` of the drawn steps, from 0 to 1, and the numbers of the episodes shown."""

    name: str
    path: Path
    share: float
    steps: int
    episodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotResult(Result):
    """The data of the charts, in their order; `output` is the file that they were drawn in, if any.

    `episodes` are the numbers of the episodes shown; for a mixture, each of its `datasets` has its own. Long lines have
    only the first, last, lowest and highest value of each thousandth of an episode.
    """

    kind: ClassVar[str] = "plot"
    path: Path
    output: Path | None
    fields: tuple[str, ...]
    episodes: tuple[int, ...]
    charts: tuple[Lines | Histogram | Bars, ...]
    notes: tuple[str, ...] = ()
    datasets: tuple[PlottedDataset, ...] = ()


@suggests_keywords()
def plot(
    dataset: PathLike,
    *,
    fields: Sequence[str] | None = None,
    episodes: str | None = None,
    output: PathLike | None = None,
    root: PathLike | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> PlotResult:
    """Collect return and length of every episode of a dataset, or the values of fields over steps, and draw them.

    For a mixture, the share and the steps of each dataset are plotted, then the episodes or fields of the first 8, each
    with the name of its dataset. Memory is bounded however long an episode is.

    Args:
        dataset: a path or `source:id` of a dataset or a checkpoint of steps, or a mixture file.
        fields: names of leaves as `inspect` shows them; `next.` may be left out if that is unambiguous.
            `observation[3]` and `observation[0:4]` choose columns, in row-major order; default: the first 16.
        episodes: episodes by number, like `0:100,250`; default: all, and with `fields` the first one. With `fields` at
            most 24. In a mixture they are chosen in each dataset.
        output: the file to write (.svg, .png, .pdf); default: nothing is written.
        root: where stored datasets are.
        force: replace the file.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The data of the charts.

    Raises:
        DatasetNotFoundError, FormatError, CorruptDataError: the dataset does not exist, cannot be read, or is damaged.
        UsageError: a field is unknown or has no numbers, `episodes` or `output` make no sense, the dataset is one of
            another library, or matplotlib is missing.
    """
    staging = None
    if output is not None:
        destination = fs.expanded(output)
        suffix = require_suffix(destination, SUFFIXES)
        staging = FileStaging(destination, replace=force)
        staging.refuse_if_taken()
    path = find_dataset(dataset, root)
    sources = list(_sources(path, dataset, root))
    if fields:
        result = _traces(path, sources, fields, episodes, progress or Silent())
    else:
        result = _episodes(path, sources, episodes)
    if staging is None:
        return result
    drawn = file_bytes(result.charts, suffix, title=os.fspath(dataset))
    with staging:
        fs.write_file(staging.path / f"plot{suffix}", drawn)
        staging.publish_file(f"plot{suffix}")
    return replace(result, output=staging.destination)


class _Source(NamedTuple):
    """A dataset to plot: `asked` is its name in messages, `label` the name of its lines, "" if it is the only one."""

    path: Path
    asked: str
    label: str = ""
    share: float = 1.0
    steps: int = 0
    fields: tuple[Field, ...] = ()

    def titled(self, title: str) -> str:
        return f"{title}, {self.label}" if self.label else title

    def noted(self, note: str) -> str:
        return f"{self.label}: {note}" if self.label else note


def _sources(path: Path, dataset: PathLike, root: PathLike | None) -> Iterator[_Source]:
    """Yield the dataset at `path`, or the datasets of the mixture there, with distinct labels."""
    if not is_mixture(path):
        has_steps(path)
        yield _Source(path, os.fspath(dataset))
        return
    mixture = open_mixture(path, lambda reader: reader.fields, root)
    seen: dict[str, int] = {}
    for one, share in zip(mixture.datasets, mixture.dataset_shares, strict=True):
        name = one.member.name
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        yield _Source(one.path, str(one.path), label, share, one.steps, one.made)


def _result(
    path: Path, sources: Sequence[_Source], shown: Sequence[tuple[int, ...]],
    charts: Sequence[Lines | Histogram | Bars], notes: Sequence[str], fields: Sequence[str] = (),
) -> PlotResult:  # fmt: skip
    """Make the result; `shown` has the episodes of the sources that are plotted, which are the first ones."""
    if not sources[0].label:
        return PlotResult(
            path=path, output=None, fields=tuple(fields), episodes=shown[0], charts=tuple(charts), notes=tuple(notes)
        )
    datasets = tuple(
        PlottedDataset(
            name=one.label, path=one.path, share=one.share, steps=one.steps,
            episodes=shown[place] if place < len(shown) else (),
        )
        for place, one in enumerate(sources)
    )  # fmt: skip
    names = [one.label for one in sources]
    shares = ChartLabels(title="Share of the drawn steps, in percent", x="percent")
    steps = ChartLabels(title="Steps of each dataset", x="steps")
    weights = (
        Bars(names, np.array([one.share * 100 for one in sources]), shares),
        Bars(names, np.array([one.steps for one in sources]), steps),
    )
    more = (f"the first {_MOST_DATASETS} of {len(sources):,} datasets",) if len(sources) > _MOST_DATASETS else ()
    return PlotResult(
        path=path, output=None, fields=tuple(fields), episodes=(), charts=(*weights, *charts), notes=(*more, *notes),
        datasets=datasets,
    )  # fmt: skip


# Episodes --------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """The returns (None if unknown) and lengths of chosen episodes of a dataset, ordered by `places` on the axis."""

    source: _Source
    places: Array
    axis: str
    returns: Array | None
    lengths: Array
    episodes: tuple[int, ...]


def _episodes(path: Path, sources: Sequence[_Source], episodes: str | None) -> PlotResult:
    """Plot the return and the length of each episode, over episodes and as histograms."""
    found = [_measured(one, episodes) for one in sources[:_MOST_DATASETS]]
    axis = next((one.axis for one in found if one.axis != "episode"), "episode")
    columns = []  # one for each quantity: the lines, then a histogram of each dataset
    for name, unit in (("return", ""), ("length", "steps")):
        values = [
            (one, values) for one in found if (values := one.returns if name == "return" else one.lengths) is not None
        ]
        if not values:
            continue
        lines = tuple(Series(one.source.label or name, one.places, each) for one, each in values)
        charts: list[Lines | Histogram] = [
            Lines(lines, ChartLabels(title=f"{name.capitalize()} of each episode", x=axis, y=unit or name))
        ]
        for one, each in values:
            title = one.source.titled(f"Distribution of {name}s")
            charts.append(histogram_of(each, ChartLabels(title=title, x=unit or name, y="episodes")))
        columns.append(charts)
    notes = [
        one.source.noted("no return: no field holds the reward of each step") for one in found if one.returns is None
    ]
    of_one = not sources[0].label
    ordered = columns if of_one or len({*map(len, columns)}) > 1 else zip(*columns, strict=True)
    charts = [chart for group in ordered for chart in group]
    return _result(path, sources, [one.episodes for one in found], charts, notes)


def _measured(source: _Source, episodes: str | None) -> _Measured:
    with open_steps(source.path) as reader:
        rows = _rows(reader, source, episodes)
        table = table_with_returns(reader)
        known = returns_are_known(reader.manifest) and any(field.key == NEXT_REWARD for field in reader.fields)
        numbers, axis = _places(table, rows)
        order = np.argsort(numbers, kind="stable")
        returns = table.total_reward[rows][order] if known else None
        lengths = table.length[rows][order]
        return _Measured(source, numbers[order], axis, returns, lengths, _numbers(table, rows))


def _rows(reader: StepReader, source: _Source, episodes: str | None) -> Array:
    try:
        return rows_of_episodes(reader, episodes)
    except UsageError as error:
        raise UsageError(source.noted(error.message), hint=error.hint) from error


def _places(table: EpisodeTable, rows: Array) -> tuple[Array, str]:
    """Return the positions of episodes on an axis: their numbers, or their table rows if numbers occur twice."""
    numbers = table.episode[rows]
    return (numbers, "episode") if len(np.unique(numbers)) == len(numbers) else (rows, "episode, in storage order")


def _numbers(table: EpisodeTable, rows: Array) -> tuple[int, ...]:
    return tuple(table.episode[rows].tolist())


# Fields over steps -----------------------------------------------------------------------------------


def _traces(
    path: Path, sources: Sequence[_Source], fields: Sequence[str], episodes: str | None, progress: Progress
) -> PlotResult:
    """Plot columns over the steps of episodes: a chart for each column, a line for each episode."""
    traces = _Traces(progress, all_of=episodes is not None)
    shown = sources[:_MOST_DATASETS]
    for source in shown:
        with open_steps(source.path) as reader:
            asked = _asked(reader, fields, source, shown, traces.notes)
            traces.add(reader, source, asked, _rows(reader, source, episodes))
    charts = [
        Lines(tuple(series), ChartLabels(title=traces.title(name, series), x="step", y=name))
        for name, series in traces.lines.items()
    ]
    return _result(path, sources, traces.episodes, charts, traces.notes, [*traces.fields])


def _asked(
    reader: StepReader, names: Sequence[str], source: _Source, sources: Sequence[_Source], notes: list[str]
) -> list[PlotColumns]:
    """Find the columns in one dataset; in a mixture, a note names the fields that this dataset lacks."""
    if not source.label:
        return [columns_of(reader.fields, name, source.asked) for name in names]
    every = [field for one in sources for field in one.fields]
    for name in names:
        if find_field(every, name)[0] is None:
            columns_of(every, name, source.asked)  # raises an error that names all fields
    lacking = [name for name in names if find_field(reader.fields, name)[0] is None]
    notes += [f"{source.label} has no field {name}" for name in lacking]
    return [columns_of(reader.fields, name, source.asked) for name in names if name not in lacking]


class _Traces:
    """Collects the lines of all datasets and episodes, by the name of their column."""

    def __init__(self, progress: Progress, *, all_of: bool) -> None:
        self.notes = list[str]()
        self.lines: dict[str, list[Series]] = {}
        self.fields: dict[str, None] = {}
        self.episodes = list[tuple[int, ...]]()
        self._progress, self._all_of = progress, all_of

    def title(self, name: str, series: Sequence[Series]) -> str:
        return name if len(series) > 1 else f"{name}, {series[0].name}"

    def add(self, reader: StepReader, source: _Source, columns: Sequence[PlotColumns], rows: Array) -> None:
        """Read columns of the first episode or, if episodes were chosen, of the first 24 of them."""
        table = reader.episodes
        if not len(rows):
            raise UsageError(f"{source.asked} has no steps to plot")
        if not self._all_of and len(rows) > 1:
            note = f"episode {table.episode[rows[0]]} of {len(rows):,}; --episodes chooses others"
            self.notes.append(source.noted(note))
        elif len(rows) > _MOST_EPISODES:
            note = f"the first {_MOST_EPISODES} of {len(rows):,} episodes; --episodes chooses others"
            self.notes.append(source.noted(note))
        rows = rows[: _MOST_EPISODES if self._all_of else 1]
        self.episodes.append(_numbers(table, rows) if columns else ())
        self._progress.start("reading", int(table.length[rows].sum()) * len(columns), "steps")
        done = set[str]()  # a column that is named twice is plotted once
        for one in columns:
            shown = [column for column in self._shown(one) if one.name(column) not in done]
            done.update(map(one.name, shown))
            for row in rows.tolist():
                found = trace(reader, one.field, shown, int(table.start[row]), int(table.length[row]))
                for column, (x, y) in found.items():
                    title = f"{source.label}, episode {table.episode[row]}".removeprefix(", ")
                    self.lines.setdefault(one.name(column), []).append(Series(title, x, y))
                self._progress.advance(int(table.length[row]))
        self._progress.done()

    def _shown(self, one: PlotColumns) -> range:
        self.fields[one.field.name] = None
        shown = one.chosen[:_MOST_COLUMNS]
        if len(shown) < len(one.chosen):
            note = (
                f"{one.field.name} has {one.every} columns; the first {len(shown)} are plotted, "
                f"--field '{one.field.name}[{shown.stop}:{min(shown.stop + _MOST_COLUMNS, one.every)}]' plots more"
            )
            self.notes += [note] if note not in self.notes else []
        return shown


_PARTS = 1000
"""The number of parts of a long episode whose extremes are kept; enough for the pixels of a chart."""
_BLOCK_BYTES = 8 << 20
_WHICH = re.compile(r"(?P<name>.+)\[(?P<first>\d+)(?P<range>:(?P<stop>\d*))?\]")


class PlotColumns(NamedTuple):
    """The columns of a leaf that are plotted, in row-major order, and the number of all its columns."""

    field: Field
    chosen: range
    every: int

    def name(self, column: int) -> str:
        return f"{self.field.name}[{column}]" if self.every > 1 else self.field.name


def columns_of(fields: Sequence[Field], asked: str, dataset: str) -> PlotColumns:
    """Find the leaf and the columns that a name like `observation[0:4]` means."""
    field, which = find_field(fields, asked)
    if field is None:
        known = {field.name.removeprefix("video.") for field in fields}
        raise unknown_field(which["name"] if which else asked, known)
    _refuse_other_than_numbers(field, dataset)
    every = math.prod(field.shape)
    if which is None:
        return PlotColumns(field, range(every), every)
    first = int(which["first"])
    stop = (int(which["stop"]) if which["stop"] else every) if which["range"] else first + 1
    if not first < stop <= every:
        raise UsageError(f"{asked} not found: {field.name} has {every} columns, from 0 to {every - 1}")
    return PlotColumns(field, range(first, stop), every)


def find_field(fields: Sequence[Field], asked: str) -> tuple[Field | None, re.Match[str] | None]:
    """Return the leaf that a name means, None if there is none, and the match of its columns in brackets."""
    by_key = {field.key: field for field in fields}
    found, which = _leaf(by_key, asked), None
    if found is None and (which := _WHICH.fullmatch(asked)) is not None:
        found = _leaf(by_key, which["name"])
    return found, which


def _leaf(by_key: dict[Key, Field], name: str) -> Field | None:
    """Return the leaf that a name means, with or without `next.` or the `video.` of references to frames."""
    for whole in (name, f"{NEXT}.{name}", f"video.{name}"):
        key = key_called(whole, by_key)
        if key is not None:
            return by_key[key]
    return None


def _refuse_other_than_numbers(field: Field, dataset: str) -> None:
    name = field.name.removeprefix("video.")
    if name != field.name or looks_like_picture(field):
        options = f"--episode K --field {shlex.quote(name)} -o frames.png"
        hint = f"see its frames: rbtool frames {shlex.quote(dataset)} {options}"
        raise UsageError(f"{name} holds images, which have no line to plot", hint=hint)
    if field.role == "text" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else "complex numbers" if "complex" in field.dtype else "no numbers"
        raise UsageError(f"{field.name} holds {what}, expected real numbers to plot")


def trace(
    reader: StepReader, field: Field, columns: Sequence[int], start: int, length: int
) -> dict[int, tuple[Array, Array]]:
    """Read columns of one episode in bounded memory; return for each its steps and values.

    A long episode is reduced to the first, last, lowest and highest value of each of its `_PARTS` parts.
    """
    part = math.ceil(length / _PARTS)  # steps per part
    parts = max(1, _BLOCK_BYTES // max(1, field.row_bytes) // part)
    found: dict[int, list[Series]] = {column: [] for column in columns}
    for first in range(0, length, parts * part):
        stop = min(first + parts * part, length)
        block = as_numbers(reader.read(field.key, start + first, start + stop), field.dtype).reshape(stop - first, -1)
        x = np.arange(first, stop)
        for column, series in found.items():
            line = Series("", x, block[:, column])
            series.append(reduced(line, math.ceil((stop - first) / part)) if length > 4 * _PARTS else line)
    return {
        column: (np.concatenate([one.x for one in series]), np.concatenate([one.y for one in series]))
        for column, series in found.items()
    }
