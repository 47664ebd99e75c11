"""`rbtool convert`: datasets into TED."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from ..core.verbs.options import ConvertOptions
from .failures import stdout_to_stderr
from .help import EXAMPLE_SOURCE, SOURCE, Example
from .options import OptionGroup, show_published, verb
from .output import Output

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
        "in two processes; after a crash, continue with what is not finished",
    ),
    Example("rbtool convert ./cartpole ./small --layout packed", "the same data, smaller and faster to sample from"),
    Example(
        f"rbtool convert ./{SOURCE}/tuple/trunc-v0 ./tuple --dry-run --json",
        "what would be written, as JSON",
    ),
)


@verb("convert", EXAMPLES)
def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The dataset to read; its format is detected.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(ConvertOptions)],
) -> None:
    """Turn a dataset on this machine into TED.

    Reads the formats of other libraries (rbtool list --formats) and, to change their layout, TED datasets and
    checkpoints. DEST appears when it is complete, or not at all.
    """
    from ..core.verbs.convert import convert as run

    # Ray prints about its workers to stdout, which is for the result only.
    apart = stdout_to_stderr() if options["engine"] == "ray" else contextlib.nullcontext()
    with apart:
        result = out.run(run, path, dest, **options)
    show_published(out, result, dest)
