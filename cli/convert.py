"""`rbtool convert`: datasets into TED."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from .failures import stdout_to_stderr
from .help import EXAMPLE_SOURCE, SOURCE, Example
from .options import (
    Compress,
    DryRun,
    EngineName,
    Episodes,
    FinalStep,
    FinalStepName,
    Force,
    FormatLayout,
    FromFormat,
    NumWorkers,
    RawOptions,
    Root,
    SkipBad,
    show_published,
    verb,
)
from .output import Output

if TYPE_CHECKING:
    pass


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "convert", EXAMPLES)(convert)


EXAMPLES = (
    Example(
        f"rbtool convert ./{SOURCE}/cartpole/scripted-v0 ./cartpole",
        f"a {EXAMPLE_SOURCE.title} dataset, wherever it is stored, to TED",
    ),
    Example(f"rbtool convert ./{SOURCE}/pendulum/random-v0 ./few --episodes 0:2,4", "only some of its episodes"),
    Example("rbtool convert ./kitchen.hdf5 ./kitchen --horizon 280", "a D4RL file that does not mark time limits"),
    Example(
        "rbtool convert ./log.csv ./log --from table --map 'observation=obs_*' --map action=force,reward=r --ends done",
        "a table (CSV, HDF5, npz, npy, Parquet): rbtool inspect ./log.csv proposes the options",
    ),
    Example(
        f"rbtool convert ./{SOURCE}/pendulum/random-v0 ./swing --num-workers 2 --resume",
        "in two processes; after a crash, only what is not finished yet",
    ),
    Example("rbtool convert ./cartpole ./small --layout packed", "the same in less room, and faster to draw from"),
    Example(
        f"rbtool convert ./{SOURCE}/tuple/trunc-v0 ./tuple --dry-run --json",
        "what would be written, as JSON",
    ),
)


def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The dataset to read; its format is detected.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    episodes: Episodes = None,
    layout: FormatLayout = None,
    compress: Compress = None,
    final_step: FinalStep = FinalStepName.AUTO,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
    num_workers: NumWorkers = 0,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="Where those processes are: here, or on a Ray cluster that shares the folders."),
    ] = EngineName.LOCAL,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what those processes left when they were interrupted.")
    ] = False,
    source_format: FromFormat = None,
    raw: RawOptions,
) -> None:
    """Turn a dataset on this machine into TED.

    Reads datasets of other libraries, which rbtool list --formats names; and datasets in TED and checkpoints, to put
    them into another layout. DEST appears when it is complete, or not at all.
    """
    from ..core.verbs.convert import convert as run

    apart = stdout_to_stderr() if engine is EngineName.RAY else contextlib.nullcontext()  # Ray prints about its workers
    with apart, out.progress() as progress:
        result = run(
            path, dest, episodes=episodes, layout=layout and layout.value, compress=compress or (), skip_bad=skip_bad,
            root=root, force=force, dry_run=dry_run, final_step=final_step.value, format=source_format,
            num_workers=num_workers, engine=engine.value, resume=resume, progress=progress, **raw,
        )  # fmt: skip
    show_published(out, result, dest)
