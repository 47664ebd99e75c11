"""`rbtool merge`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.verbs.options import MergeOptions
from .help import Example
from .options import OptionGroup, show_published, verb
from .output import Output

EXAMPLES = (
    Example(
        "rbtool convert ./minari/cartpole/scripted-v0 ./more && rbtool merge ./cartpole ./more ./both",
        "the episodes of two datasets, one after the other",
    ),
    Example(
        "rbtool preprocess ./cartpole --select observation,action,next.reward --dest ./few"
        " && rbtool merge ./cartpole ./few ./common --schema intersect",
        "only the fields that both have; the others are listed",
    ),
    Example(
        "rbtool split ./cartpole --train 0.8 --test 0.2 --dest ./parts"
        " && rbtool merge ./parts/train ./parts/test ./whole",
        "the parts of a split: the same dataset again, with the same digest",
    ),
)


@verb("merge", EXAMPLES)
def merge(
    datasets: Annotated[list[str], typer.Argument(metavar="DATASET...", help="Paths or stored datasets, two or more.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(MergeOptions)],
) -> None:
    """Join datasets into one: the episodes of each, in their order.

    Episode numbers are kept; if a number occurs twice, all episodes are numbered from 0, and the manifest lists where
    each comes from. Merging all parts of a split restores the dataset that was split.
    """
    from ..core.verbs.merge import merge as run

    result = out.run(run, datasets, dest, **options)
    if result.renumbered:
        for name, source in zip(datasets, result.sources, strict=True):
            shown = f"episodes {_short(source.episodes)} are episodes {_short(source.numbers)} of {name}"
            out.summary(f"renumbered: {shown}")
    if result.restored:
        out.summary("restored: the dataset that was split, with its content digest")
    show_published(out, result, dest)


def _short(runs: str) -> str:
    return runs if len(runs) <= 40 else f"{runs[:40].rpartition(',')[0]},…"
