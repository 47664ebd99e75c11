"""`rbtool split`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import SplitOptions
from .help import Example
from .options import Dataset, OptionGroup, optional, verb
from .output import Output
from .text import Cell, Styled, Table, number

if TYPE_CHECKING:
    from ..core.verbs.split import SplitPart, SplitResult

EXAMPLES = (
    Example("rbtool split ./cartpole --train 0.8 --val 0.1 --test 0.1 --seed 0", "into ./cartpole-split/train, …"),
    Example(
        "rbtool split ./cartpole --train 0.7 --test 0.3 --stratify return --dest ./parts",
        "parts with similar returns",
    ),
    Example("rbtool split ./cartpole --train 0.5 --val 0.5 --by seed --dest ./by-seed", "keep equal seeds together"),
    Example(
        "rbtool split ./cartpole --train 0.9 --val 0.1 --in-order --dest ./tail --dry-run",
        "the last episodes for validation; show what would be written",
    ),
)
_DEST = optional(
    "dest",
    str | None,
    typer.Option("--dest", metavar="DIR", help="Parts are DIR/train, DIR/val, DIR/test. Default: ./NAME-split."),
)


@verb("split", EXAMPLES)
def split(
    dataset: Dataset,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(SplitOptions, test=(_DEST,))],
) -> None:
    """Divide the episodes of a dataset into parts, at random.

    The fractions add up to 1. The parts are the datasets DIR/train, DIR/val and DIR/test. They appear all at once, and
    their episodes keep their numbers and order. The same seed gives the same parts.
    """
    from ..core.verbs.split import split as run

    result = out.run(run, dataset, **options)
    _show_split(out, result, options.get("dest"))


def _show_split(out: Output, result: SplitResult, dest: str | None) -> None:
    state = "nothing was written; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    grouped = "" if result.by == "episode" else f" in {counted(result.groups, 'group')} by {result.by}"
    drawn = "in order" if result.seed is None else f"seed {result.seed}"
    facts = [f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}{grouped}", drawn]
    out.summary(Styled(state, "yellow"), " · ".join([*facts, size(result.bytes)]))
    if result.duplicates:
        out.summary(Styled("identical: ", "yellow"), f"{counted(result.duplicates, 'episode')} also in another part")
    for note in result.notes:
        out.summary(f"note: {note}")
    folder = dest or result.path.name
    names = {part.name: f"{folder.rstrip('/') or '/'}/{part.name}" for part in result.parts}
    out.show(
        result, names.values(), lambda _, width: Table(_part_rows(result, names), frozenset({1, 2, 3, 4})).lines(width)
    )
    if not result.dry_run:
        out.suggest(f"rbtool inspect {shlex.quote(names['train' if 'train' in names else result.parts[0].name])}")


def _part_rows(result: SplitResult, names: dict[str, str]) -> list[list[Cell]]:
    def row(part: SplitPart) -> list[Cell]:
        mean = "" if part.mean_return is None else f"mean return {number(part.mean_return)}"
        share = f"{part.episodes / result.episodes:.1%}"
        return [names[part.name], counted(part.steps, "step"), counted(part.episodes, "episode"), share, mean]

    return [row(part) for part in result.parts]
