"""`rbtool frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from .help import Example
from .options import Dataset, ForceFile, Root, verb
from .output import Output

if TYPE_CHECKING:
    pass

EXAMPLES = (
    Example("rbtool frames ./push --episode 0 -o episode.mp4", "an episode as a video (rbtool[video])"),
    Example("rbtool frames ./push --episode 0 --steps 0:5 --fps 10 --scale 4 -o start.gif", "some steps, enlarged"),
    Example("rbtool frames ./push --episode 0 --field pixels -o sheet.png", "frames of the episode side by side"),
)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "frames", EXAMPLES)(frames)


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
    force: ForceFile = False,
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
