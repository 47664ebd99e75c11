"""`rbtool plot`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .help import Example
from .options import Dataset, Episodes, Root, verb
from .output import Output
from .text import Cell, counted

if TYPE_CHECKING:
    from ..core.verbs.plot import PlotResult

EXAMPLES = (
    Example("rbtool plot ./cartpole", "return and length of every episode, in the terminal"),
    Example("rbtool plot ./cartpole --field action --field 'observation[0:2]' --episodes 0,3", "values over steps"),
    Example("rbtool plot ./cartpole -o cartpole.svg", "the same as a picture (rbtool[plot])"),
)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "plot", EXAMPLES)(plot)


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
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write a picture: .svg, .png or .pdf.")
    ] = None,
    root: Root = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the picture that is there.")] = False,
) -> None:
    """Plot return and length of every episode, or fields over steps.

    In the terminal, or with -o as a picture. With --field, of the first episode unless --episodes chooses others.
    Lines are thinned out without losing a spike: the lowest and highest value of each part stays.
    """
    from ..core.verbs.plot import plot as run

    with out.progress() as progress:
        result = run(dataset, fields=field, episodes=episodes, output=output, root=root, force=force, progress=progress)
    for note in result.notes:
        out.summary(f"note: {note}")
    if output is not None:
        out.summary(f"{counted(len(result.charts), 'chart')} of {counted(len(result.episodes), 'episode')}")
        out.show(result, [output], lambda width: [[output]])
        return
    out.show(result, [chart.labels.title for chart in result.charts], lambda width: plot_lines(result, width))
    if not field:
        out.suggest(f"rbtool plot {shlex.quote(dataset)} --field reward")


def plot_lines(result: PlotResult, width: int | None = None) -> Iterator[list[Cell]]:
    """Return the charts as lines of at most `width` columns, 80 if that is None."""
    from .charts import chart_lines, pair_lines

    lines = [*(chart_lines if result.fields else pair_lines)(result.charts, width)]
    while lines and not lines[-1]:
        lines.pop()
    yield from lines
