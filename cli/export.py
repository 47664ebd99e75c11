"""`rbtool export`."""

from __future__ import annotations

import enum
import shlex
from typing import Annotated

import typer

from .help import Example
from .options import Dataset, DryRun, Episodes, Force, Root, SkipBad, verb
from .output import Output
from .published import show_published

__all__ = ["EXAMPLES", "add"]

EXAMPLES = (
    Example("rbtool export ./cartpole ./cartpole-minari --to minari", "a folder that Minari opens"),
    Example("rbtool export ./cartpole ./cartpole.npz --to npz --episodes 0:10", "some episodes for NumPy"),
    Example("rbtool export minari:cartpole/scripted-v0 ./table --to parquet", "tables for pandas and its like"),
    Example("rbtool export ./cartpole ./plain.h5 --to h5 --dry-run --json", "what would be written, as JSON"),
)

_OPENED = {
    "minari": ("/data", "import minari; print(minari.MinariDataset({}))"),
    "h5": ("", "import h5py; h5py.File({}).visititems(print)"),
    "npz": ("", "import numpy; print(numpy.load({}).files)"),
    "parquet": ("/steps.parquet", "import pyarrow.parquet as pq; print(pq.read_table({}))"),
}


class Format(enum.StrEnum):
    """What can be written."""

    MINARI = "minari"
    H5 = "h5"
    NPZ = "npz"
    PARQUET = "parquet"


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "export", EXAMPLES)(export)


def export(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The file (h5, npz) or folder to write.")],
    to: Annotated[
        Format, typer.Option("--to", help="minari; h5: one dataset a leaf; npz: NumPy; parquet: a row a step.")
    ],
    *,
    out: Output,
    episodes: Episodes = None,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Write a dataset in a format of other tools.

    Values and element types stay as they are; what a format has no place for is named. DEST appears when it is
    whole, or not at all.
    """
    from ..core.verbs.export import export as run

    with out.progress() as progress:
        result = run(
            dataset,
            dest,
            to=to.value,
            episodes=episodes,
            skip_bad=skip_bad,
            root=root,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    inside, code = _OPENED[to.value]
    show_published(out, result, dest, f"python -c {shlex.quote(code.format(repr(dest + inside)))}")
