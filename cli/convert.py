"""`rbtool convert`."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import Example
from .options import (
    Compress,
    DryRun,
    Episodes,
    FinalStep,
    FinalStepName,
    Force,
    Layout,
    LayoutName,
    Root,
    SkipBad,
    verb,
)
from .output import Output, show_published

EXAMPLES = (
    Example(
        "rbtool convert ./minari/cartpole/scripted-v0 ./cartpole", "a Minari dataset, wherever it is stored, to TED"
    ),
    Example("rbtool convert ./minari/pendulum/random-v0 ./few --episodes 0:2,4", "only some of its episodes"),
    Example("rbtool convert ./cartpole ./small --layout packed", "the same in less room, and faster to draw from"),
    Example("rbtool convert ./minari/tuple/trunc-v0 ./tuple --dry-run --json", "what would be written, as JSON"),
)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "convert", EXAMPLES)(convert)


def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The dataset to read; its format is detected.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    episodes: Episodes = None,
    layout: Layout = LayoutName.TED,
    compress: Compress = None,
    final_step: FinalStep = FinalStepName.AUTO,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Turn a dataset on this machine into TED.

    Reads Minari datasets: HDF5, arrow and parquet; and datasets in TED and checkpoints, to put them into another
    layout. DEST appears when it is complete, or not at all.
    """
    from ..core.verbs.convert import convert as run

    with out.progress() as progress:
        result = run(
            path, dest, episodes=episodes, layout=layout.value, compress=compress or (), skip_bad=skip_bad, root=root,
            force=force, dry_run=dry_run, final_step=final_step.value, progress=progress,
        )  # fmt: skip
    show_published(out, result, dest)
