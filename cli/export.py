"""`rbtool export`."""

from __future__ import annotations

import enum
import shlex
from typing import Annotated

import typer

from ..core.declarations import declared
from .help import Example
from .options import Dataset, DryRun, Episodes, Force, Root, SkipBad, verb
from .output import Output, show_published

EXAMPLES = (
    Example("rbtool export ./cartpole ./cartpole-minari --to minari", "a folder that Minari opens"),
    Example("rbtool export ./cartpole ./cartpole.npz --to npz --episodes 0:10", "some episodes for NumPy"),
    Example("rbtool export minari:cartpole/scripted-v0 ./table --to parquet", "tables for pandas and its like"),
    Example("rbtool export ./cartpole ./plain.h5 --to h5 --dry-run --json", "what would be written, as JSON"),
)

_FORMATS = {one.name: one for one in declared() if one.sink is not None}
_TO = "; ".join(f"{name}: {one.written}" if one.written else name for name, one in _FORMATS.items())

Format = enum.StrEnum("Format", {name.upper(): name for name in _FORMATS})  # type: ignore[misc]  # from declarations


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "export", EXAMPLES)(export)


def export(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The file (h5, npz) or folder to write.")],
    to: Annotated[Format, typer.Option("--to", help=f"{_TO}.")],
    *,
    out: Output,
    episodes: Episodes = None,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Write a dataset in a format of other tools.

    Values and element types are kept; what a format cannot store is listed. DEST appears when it is complete, or not
    at all.
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
    inside, code = _FORMATS[to.value].opened
    show_published(out, result, dest, f"python -c {shlex.quote(code.format(repr(dest + inside)))}")
