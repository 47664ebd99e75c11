"""`rbtool preprocess`."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import Example
from .options import Dataset, DryRun, Force, Root, verb
from .output import Output
from .published import show_published

__all__ = ["EXAMPLES", "add"]

EXAMPLES = (
    Example(
        "rbtool preprocess ./cartpole --fn prep.py:normalise --dest ./normalised --num-workers 2",
        "a function in a file, run by two processes",
    ),
    Example(
        "rbtool preprocess minari:cartpole/scripted-v0 --fn prep:normalise --dest ./first --num-frames 100",
        "a function of an importable module, on the first 100 steps",
    ),
)


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "preprocess", EXAMPLES)(preprocess)


def preprocess(
    dataset: Dataset,
    fn: Annotated[
        str,
        typer.Option("--fn", metavar="FILE.py:NAME|MODULE:NAME", help="The function to run."),
    ],
    dest: Annotated[str, typer.Option("--dest", metavar="DIR", help="The folder to write.")],
    *,
    out: Output,
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", metavar="N", help="Processes; 0: this one only. Default: one a core.")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option("--chunk-size", metavar="K", help="Rows a call. Default: about 16 MB.")
    ] = None,
    num_frames: Annotated[int | None, typer.Option("--num-frames", metavar="N", help="Only the first N steps.")] = None,
    root: Root = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run a function over all rows of a dataset, in parallel.

    The function takes a TensorDict of K rows and returns one. The first chunk decides which keys, dtypes and
    shapes the result has; every other is held to it.
    """
    from ..core.verbs.preprocess import preprocess as run

    with out.progress() as progress:
        result = run(
            dataset, fn, dest, num_workers=num_workers, chunk_size=chunk_size, num_frames=num_frames,
            root=root, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    show_published(out, result, dest)
