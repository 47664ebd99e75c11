"""`rbtool plot`; in a terminal, charts are drawn with braille characters, which have 2 × 4 dots each."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from .help import Example
from .options import Dataset, Episodes, ForceFile, Root, verb
from .output import Output
from .text import Cell, Styled, folded, number, width_of

if TYPE_CHECKING:
    from ..core.report.charts import Array, Bars, Histogram, Lines, Series
    from ..core.verbs.plot import PlotResult


EXAMPLES = (
    Example("rbtool plot ./cartpole", "return and length of every episode, in the terminal"),
    Example("rbtool plot ./cartpole --field action --field 'observation[0:2]' --episodes 0,3", "values over steps"),
    Example("rbtool plot ./cartpole -o cartpole.svg", "the same as an image file (rbtool[plot])"),
)


@verb("plot", EXAMPLES)
def plot(
    dataset: Dataset,
    *,
    out: Output,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="KEY", help="Values over steps; KEY[3], KEY[0:4]: columns. May be repeated."),
    ] = None,
    episodes: Episodes = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write an image file: .svg, .png or .pdf.")
    ] = None,
    root: Root = None,
    force: ForceFile = False,
) -> None:
    """Plot return and length of every episode, or fields over steps.

    Draws in the terminal, or with -o an image file. --field plots the first episode, unless --episodes chooses others.
    For a mixture (.toml), the share of each dataset is plotted as well. Long lines are thinned, but keep the lowest and
    the highest value of each part, so that no spike is lost.
    """
    from ..core.verbs.plot import plot as run

    result = out.run(run, dataset, fields=field, episodes=episodes, output=output, root=root, force=force)
    for note in result.notes:
        out.summary(f"note: {note}")
    if output is not None:
        shown = len(result.episodes) + sum(len(one.episodes) for one in result.datasets)
        out.summary(f"{counted(len(result.charts), 'chart')} of {counted(shown, 'episode')}")
        out.show(result, [output])
        return
    out.show(result, [chart.labels.title for chart in result.charts], plot_lines)
    if not field:
        out.suggest(f"rbtool plot {shlex.quote(dataset)} --field reward")


def plot_lines(result: PlotResult, width: int | None) -> Iterator[list[Cell]]:
    """Return the charts as lines of at most `width` columns, 80 if that is None."""
    lines = [*(chart_lines if result.fields else pair_lines)(result.charts, width)]
    while lines and not lines[-1]:
        lines.pop()
    yield from lines


_IN_PIPE = 80
_ACROSS, _DOWN = 2, 4  # dots of a character
_NARROWEST = 36  # columns of a chart next to another one
_GAP = "  "
_LEAST = 20  # columns: a narrower screen breaks the lines
_SIDE = 9  # the widest number at an axis, such as -1.23e-05
_BLANK = "\u2800"


def pair_lines(charts: Sequence[Lines | Histogram | Bars], width: int | None) -> Iterator[list[Cell]]:
    """Draw charts in pairs side by side, or below each other if `width` columns are too few for two."""
    room = (width or _IN_PIPE) // 2 - len(_GAP) // 2
    if room < _NARROWEST:
        yield from chart_lines(charts, width)
        return
    for place in range(0, len(charts), 2):
        left, *right = ([*_chart(chart, room, 7)] for chart in charts[place : place + 2])
        nothing: list[Cell] = []
        for one, other in zip_longest(left, right[0] if right else [], fillvalue=nothing):
            blank = room - sum(map(width_of, one))
            yield [*one, " " * blank, _GAP, *other] if other else one
        yield []


def chart_lines(charts: Sequence[Lines | Histogram | Bars], width: int | None) -> Iterator[list[Cell]]:
    """Draw charts below each other. Each line of a chart has its own area; all areas have the same scale."""
    count = sum(len(getattr(chart, "series", " ")) for chart in charts)
    height = 8 if count <= 4 else 4
    for chart in charts:
        yield from _chart(chart, width or _IN_PIPE, height)
        yield []


def _chart(chart: Lines | Histogram | Bars, width: int, height: int) -> Iterator[list[Cell]]:
    from ..core.report.charts import Bars, Histogram, readable

    width = max(width, _LEAST)
    yield from folded([Styled(readable(chart.labels.title), "bold")], width, 2)
    if isinstance(chart, Histogram):
        yield from _bars(chart, width, height)
        return
    if isinstance(chart, Bars):
        yield from _level_bars(chart, width)
        return
    shown = [one for one in chart.series if len(one.x)]
    low, high = _range([one.y for one in shown])
    first, last = _range([one.x for one in shown])
    for one in shown:
        if len(shown) > 1:
            yield [Styled(readable(one.name), "dim")]
        yield from _line(one, (first, last), (low, high), width, height)
    if not shown:
        yield [Styled("no values", "dim")]
        return
    yield from _below(first, last, chart.labels.x, width)


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """Return the lowest and the highest finite value; (0, 0) if there is none."""
    import numpy as np

    finite = np.concatenate([one[np.isfinite(one)] for one in values]) if values else np.zeros(0)
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)


def _line(
    series: Series, across: tuple[float, float], up: tuple[float, float], width: int, height: int
) -> Iterator[list[Cell]]:
    """Draw a series as a line, with gaps at values that are not finite."""
    import numpy as np
    from plotille import Canvas

    from ..core.report.charts import reduced

    columns, rows = (width - _SIDE - 2) * _ACROSS, height * _DOWN
    canvas = Canvas(columns // _ACROSS, height, xmin=0, ymin=0, xmax=columns, ymax=rows)
    part = reduced(series, columns)
    finite = np.isfinite(part.y)
    if not finite.any():
        yield [Styled("no finite values", "dim")]
        return
    x, y = _dots(part.x, across, columns), _dots(np.where(finite, part.y, up[0]), up, rows)
    before = None
    for place in range(len(x)):
        here = (x[place], y[place]) if finite[place] else None
        if here is not None:
            canvas.line(*(before or here), *here)
        before = here
    labels = [number(up[1]), *[""] * (height - 2), number(up[0])]
    if up[0] == up[1]:
        labels = [number(up[0]) if row == height - 1 - height // 2 else "" for row in range(height)]
    yield from _area(canvas.plot("\n"), labels)


def _dots(values: Array, ends: tuple[float, float], dots: int) -> list[int]:
    """Return the dot of each value of an axis; the middle one if both ends are equal."""
    import numpy as np

    low, high = ends
    if low == high:
        return [dots // 2] * len(values)
    share = (values / 2 - low / 2) / (high / 2 - low / 2)  # halved, because high - low may overflow float64
    found: list[int] = np.rint(share * (dots - 1)).astype(int).tolist()
    return found


def _bars(chart: Histogram, width: int, height: int) -> Iterator[list[Cell]]:
    """Draw a bar for each bin, at least one dot high if the bin is not empty."""
    from plotille import Canvas

    counts = chart.counts.tolist()
    top = max(counts, default=0)
    if not top:
        yield [Styled("no values", "dim")]
        return
    columns, rows = (width - _SIDE - 2) * _ACROSS, height * _DOWN
    canvas = Canvas(columns // _ACROSS, height, xmin=0, ymin=0, xmax=columns, ymax=rows)
    edges = [round(place * columns / len(counts)) for place in range(len(counts) + 1)]
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        for column in range(left, max(left + 1, right - 1)) if count else ():
            canvas.line(column, 0, column, math.ceil(count / top * rows) - 1)
    yield from _area(canvas.plot("\n"), [number(int(top)), *[""] * (height - 2), "0"])
    yield from _below(float(chart.edges[0]), float(chart.edges[-1]), chart.labels.x, width)


def _level_bars(chart: Bars, width: int) -> Iterator[list[Cell]]:
    """Draw a horizontal bar for each name, with its number, at least one dot long if that is not zero."""
    from plotille import Canvas

    from ..core.report.charts import shortened

    names = [shortened(name, max(6, width // 3)) for name in chart.names]
    values = [number(int(value) if value == round(value) else value) for value in chart.values.tolist()]
    left, right = (max(map(width_of, texts), default=0) for texts in (names, values))
    room = max(1, width - left - right - 2 * len(_GAP))
    top = max(chart.values.tolist(), default=0)
    for name, value, text in zip(names, chart.values.tolist(), values, strict=True):
        canvas = Canvas(room, 1, xmin=0, ymin=0, xmax=room * _ACROSS, ymax=_DOWN)
        dots = math.ceil(value / top * room * _ACROSS) if value > 0 else 0
        for row in (1, 2) if dots else ():
            canvas.line(0, row, dots - 1, row)
        drawn = canvas.plot().replace(_BLANK, " ").rstrip()
        yield [
            Styled(name + " " * (left - width_of(name) + len(_GAP)), "dim"), f"{text:>{right}}{_GAP}",
            Styled(drawn, "cyan"),
        ]  # fmt: skip


def _area(drawn: str, labels: Sequence[str]) -> Iterator[list[Cell]]:
    """Yield a drawing with the vertical axis and its labels on the left."""
    for label, row in zip(labels, drawn.split("\n"), strict=True):
        mark = "┤" if label else "│"
        yield [Styled(f"{label:>{_SIDE}} {mark}", "dim"), Styled(row.replace(_BLANK, " ").rstrip(), "cyan")]


def _below(first: float, last: float, name: str, width: int) -> Iterator[list[Cell]]:
    """Draw the horizontal axis, with its limits at the ends and its name between them."""
    room = width - _SIDE - 2
    low, high = _plain(first), _plain(last) if last != first else ""
    middle = name.center(max(0, room - len(low) - len(high)))
    yield [Styled(f"{'':>{_SIDE}} └{'─' * room}", "dim")]
    yield [Styled(f"{'':>{_SIDE + 2}}{low}{middle}{high}", "dim")]


def _plain(value: float) -> str:
    return number(int(value)) if value == round(value) and abs(value) < 1e9 else number(value)
