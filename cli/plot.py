"""`rbtool plot` and `rbtool frames`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ..core.progress import counted
from .help import Example
from .options import Dataset, Episodes, Root, verb
from .output import Output
from .text import Cell

if TYPE_CHECKING:
    from ..core.verbs.plot import PlotResult

FRAMES_EXAMPLES = (
    Example("rbtool frames ./push --episode 0 -o episode.mp4", "an episode as a video (rbtool[video])"),
    Example("rbtool frames ./push --episode 0 --steps 0:5 --fps 10 --scale 4 -o start.gif", "some steps, enlarged"),
    Example("rbtool frames ./push --episode 0 --field pixels -o sheet.png", "frames of the episode side by side"),
)
EXAMPLES = (
    Example("rbtool plot ./cartpole", "return and length of every episode, in the terminal"),
    Example("rbtool plot ./cartpole --field action --field 'observation[0:2]' --episodes 0,3", "values over steps"),
    Example("rbtool plot ./cartpole -o cartpole.svg", "the same as a picture (rbtool[plot])"),
)

_Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace the file that is there.")]


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "plot", EXAMPLES)(plot)
    verb(app, "frames", FRAMES_EXAMPLES)(frames)


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
    force: _Force = False,
) -> None:
    """Plot return and length of every episode, or fields over steps.

    In the terminal, or with -o as a picture. With --field, of the first episode unless --episodes chooses others. Of a
    mixture (.toml), the share of each dataset, and its episodes or fields. Lines are thinned out without losing a
    spike: the lowest and highest value of each part stays.
    """
    from ..core.verbs.plot import plot as run

    with out.progress() as progress:
        result = run(dataset, fields=field, episodes=episodes, output=output, root=root, force=force, progress=progress)
    for note in result.notes:
        out.summary(f"note: {note}")
    if output is not None:
        shown = len(result.episodes) + sum(len(one.episodes) for one in result.datasets)
        out.summary(f"{counted(len(result.charts), 'chart')} of {counted(shown, 'episode')}")
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


def frames(
    dataset: Dataset,
    episode: Annotated[int, typer.Option("--episode", metavar="K", help="The number of the episode.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The file: .mp4, .gif or .png.")],
    *,
    out: Output,
    field: Annotated[
        str | None, typer.Option("--field", metavar="KEY", help="The images. Default: the first field of images.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only these steps, or a single one. Default: all.")
    ] = None,
    fps: Annotated[
        float | None, typer.Option("--fps", metavar="N", help="Frames a second. Default: as the data state, else 30.")
    ] = None,
    scale: Annotated[int, typer.Option("--scale", metavar="N", help="Repeat each pixel N times.")] = 1,
    root: Root = None,
    force: _Force = False,
) -> None:
    """Write the images of an episode as a video, or as a sheet.

    A .png shows up to 40 frames side by side, or a single step as it is. Grey and RGB, channels first or last; of
    stacked frames the newest. FILE appears when it is complete, or not at all.
    """
    from ..core.verbs.frames import frames as run

    with out.progress() as progress:
        result = run(
            dataset, output, episode=episode, field=field, steps=steps, fps=fps, scale=scale, root=root, force=force,
            progress=progress,
        )  # fmt: skip
    for note in result.notes:
        out.summary(f"note: {note}")
    rate = "" if result.fps is None else f", {result.fps:g} a second"
    what = f"{result.field} of episode {result.episode}"
    out.summary(f"{what}: {counted(len(result.steps), 'frame')} of {result.width} × {result.height}{rate}")
    out.show(result, [output], lambda width: [[output]])
