"""`rbtool frames`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.progress import counted
from ..core.verbs.options import FramesOptions
from .help import Example
from .options import Dataset, OptionGroup, optional, verb
from .output import Output

EXAMPLES = (
    Example("rbtool frames ./push --episode 0 -o episode.mp4", "an episode as a video (rbtool[video])"),
    Example("rbtool frames ./push --episode 0 --steps 0:5 --fps 10 --scale 4 -o start.gif", "some steps, enlarged"),
    Example("rbtool frames ./push --episode 0 --field pixels -o sheet.png", "frames of the episode side by side"),
)

_OUTPUT = optional(
    "output", str, typer.Option("--output", "-o", metavar="FILE", help="The file: .mp4, .gif or .png."), ...
)


@verb("frames", EXAMPLES)
def frames(
    dataset: Dataset,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(FramesOptions, episode=(_OUTPUT,))],
) -> None:
    """Write the images of an episode as a video, or as a sheet.

    A .png shows up to 40 frames side by side, or a single step in its own size. Images may be grey or RGB, with
    channels first or last; of stacked frames, the newest is shown. FILE appears when it is complete, or not at all.
    """
    from ..core.verbs.frames import frames as run

    result = out.run(run, dataset, **options)
    for note in result.notes:
        out.summary(f"note: {note}")
    rate = "" if result.fps is None else f", {result.fps:g} a second"
    what = f"{result.field} of episode {result.episode}"
    out.summary(f"{what}: {counted(len(result.steps), 'frame')} of {result.width} × {result.height}{rate}")
    out.show(result, [options["output"]])
