"""`rbtool export`: datasets out of TED."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from ..core.declarations import declared
from ..core.verbs.options import ExportOptions
from .help import EXAMPLE_SOURCE, SOURCE, STORED, Example
from .options import Dataset, OptionGroup, show_published, verb
from .output import Output

EXAMPLES = (
    Example(
        f"rbtool export ./cartpole ./cartpole-{SOURCE} --to {SOURCE}",
        f"a folder that {EXAMPLE_SOURCE.title} opens",
    ),
    Example("rbtool export ./cartpole ./cartpole.npz --episodes 0:10", "some episodes for NumPy"),
    Example(f"rbtool export {STORED} ./steps.parquet", "a table of the steps, for pandas or Polars"),
    Example("rbtool export ./cartpole ./table --to parquet", "steps and episodes, for datasets.load_dataset"),
    Example("rbtool export ./cartpole ./lerobot --to lerobot --fps 50", "for LeRobot, at 50 steps a second"),
    Example(
        "rbtool export ./cartpole ./named --to lerobot --fps 50 --robot-type cart --names action=push",
        "with names for the components of an action",
    ),
    Example("rbtool export ./cartpole ./plain.h5 --dry-run --json", "what would be written, as JSON"),
)

_FORMATS = {one.name: one for one in declared() if one.sink is not None}


@verb("export", EXAMPLES)
def export(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The file (h5, npz, parquet) or folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(ExportOptions)],
) -> None:
    """Write a dataset in the format of another tool.

    Values and dtypes are kept; fields that a format cannot store are listed. DEST appears when it is complete, or not
    at all.
    """
    from ..core.verbs.export import export as run

    result = out.run(run, dataset, dest, **options)
    form = _FORMATS[result.layout]
    inside, code = form.opened
    opened = dest if dest.lower().endswith(form.suffixes) else dest + inside
    show_published(out, result, dest, f"python -c {shlex.quote(code.format(repr(opened)))}")
