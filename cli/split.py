"""`rbtool split`."""

from __future__ import annotations

import enum
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import Example
from .options import Compress, Dataset, DryRun, Force, KeptLayout, Root, verb
from .output import Output
from .text import Cell, Styled, Table, number

if TYPE_CHECKING:
    from ..core.verbs.split import SplitPart, SplitResult

EXAMPLES = (
    Example("rbtool split ./cartpole --train 0.8 --val 0.1 --test 0.1 --seed 0", "into ./cartpole-split/train, …"),
    Example(
        "rbtool split ./cartpole --train 0.7 --test 0.3 --stratify return --dest ./parts",
        "with similar returns in both parts",
    ),
    Example("rbtool split ./cartpole --train 0.5 --val 0.5 --by seed --dest ./by-seed", "keep groups together"),
    Example(
        "rbtool split ./cartpole --train 0.9 --val 0.1 --in-order --dest ./tail --dry-run",
        "the last episodes for validation; what would be written",
    ),
)
StratifyName = enum.StrEnum("StratifyName", {"RETURN": "return"})


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "split", EXAMPLES)(split)


def split(
    dataset: Dataset,
    *,
    out: Output,
    train: Annotated[float | None, typer.Option("--train", metavar="F", help="Fraction of the episodes.")] = None,
    val: Annotated[float | None, typer.Option("--val", metavar="F", help="Fraction for validation.")] = None,
    test: Annotated[float | None, typer.Option("--test", metavar="F", help="Fraction for tests.")] = None,
    dest: Annotated[
        str | None,
        typer.Option("--dest", metavar="DIR", help="Parts are DIR/train, DIR/val, DIR/test. Default: ./NAME-split."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Draws the episodes. Default: 0.")] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="episode|content|KEY",
            help="What stays together: an episode, identical episodes, or those with one value of a field, a text or "
            "seed.",
        ),
    ] = "episode",
    stratify: Annotated[
        StratifyName | None, typer.Option("--stratify", help="Spread low and high returns over all parts.")
    ] = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Not at random: the first episodes to train.")] = False,
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Allow identical episodes in two parts.")
    ] = False,
    layout: KeptLayout = None,
    compress: Compress = None,
    root: Root = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Divide the episodes of a dataset into parts, at random.

    The fractions add up to 1. The parts are datasets, DIR/train, DIR/val and DIR/test; they appear all at once, and
    keep the numbers and the order of their episodes. The same seed gives the same parts.
    """
    from ..core.verbs.split import split as run

    with out.progress() as progress:
        result = run(
            dataset, dest, train=train, val=val, test=test, seed=seed, by=by, stratify=stratify and stratify.value,
            in_order=in_order, allow_duplicates=allow_duplicates, layout=layout and layout.value, compress=compress,
            root=root, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    _show_split(out, result, dest)


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
        result, names.values(), lambda width: Table(_part_rows(result, names), frozenset({1, 2, 3, 4})).lines(width)
    )
    if not result.dry_run:
        out.suggest(f"rbtool inspect {shlex.quote(names['train' if 'train' in names else result.parts[0].name])}")


def _part_rows(result: SplitResult, names: dict[str, str]) -> list[list[Cell]]:
    def row(part: SplitPart) -> list[Cell]:
        mean = "" if part.mean_return is None else f"mean return {number(part.mean_return)}"
        share = f"{part.episodes / result.episodes:.1%}"
        return [names[part.name], counted(part.steps, "step"), counted(part.episodes, "episode"), share, mean]

    return [row(part) for part in result.parts]
