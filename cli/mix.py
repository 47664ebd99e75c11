"""`rbtool mix`."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from .help import Example
from .options import DryRun, Force, Root, verb
from .output import Output
from .text import TITLE, Line, Styled, Table, folded, number, titled

if TYPE_CHECKING:
    from ..core.verbs.mix import MixResult


EXAMPLES = (
    Example(
        "rbtool convert ./minari/cartpole/scripted-v0 ./more && rbtool mix ./cartpole:0.7 ./more:0.3 mix.toml"
        " && rbtool sample mix.toml --seed 0",
        "70 % of the steps are drawn from one dataset, 30 % from the other",
    ),
    Example(
        "rbtool preprocess ./cartpole --select observation,action,next.reward --dest ./few"
        " && rbtool mix ./cartpole ./few some.toml --by-size --schema union",
        "weighted by number of steps; fields that one dataset lacks are zero, with a mask",
    ),
    Example(
        "rbtool preprocess ./cartpole --episodes :2 --dest ./small"
        " && rbtool mix ./cartpole ./small flat.toml --by-size --temperature 5 --dry-run",
        "draw small datasets more often than by their size; show what would be written",
    ),
)

SchemaName = enum.StrEnum("SchemaName", {"ERROR": "error", "INTERSECT": "intersect", "UNION": "union"})


@verb("mix", EXAMPLES)
def mix(
    datasets: Annotated[
        list[str],
        typer.Argument(metavar="DATASET[:WEIGHT]...", help="Paths, stored datasets or mixtures, two or more."),
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST.toml", help="The file to write.")],
    *,
    out: Output,
    by_size: Annotated[
        bool, typer.Option("--by-size", help="Weight each dataset by its number of steps, instead of WEIGHT.")
    ] = False,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="SCORE", help="Weight each dataset by the sum of a score over its steps."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Raise weights to 1/T: a high T makes them equal.")
    ] = 1.0,
    schema: Annotated[
        SchemaName,
        typer.Option(
            "--schema",
            help="Fields that only some datasets have. error: refuse them; intersect: leave them out; union: fill them "
            "with zeros and add a mask.",
        ),
    ] = SchemaName.ERROR,
    root: Root = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Mix datasets for training, without copying them: write a small file that load_dataset opens like a dataset.

    WEIGHT is the share of the steps that are drawn from a dataset; weights need not add up to 1, and are equal if none
    is given. Paths in the file are relative to its folder. Opening the file fails if a dataset has changed since.
    """
    from ..core.errors import UsageError
    from ..core.verbs.mix import mix as run
    from ..core.verbs.mix import mixture_file, weighted_names

    mixture_file(dest, datasets)  # first, for the better error where the destination is not the last argument
    names, weights = weighted_names(datasets, root)
    given = [name for name, value in (("--by-size", by_size), ("--by", by), ("explicit weights", weights)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="leave one out")
    result = run(
        names, dest, p="size" if by_size else by or weights, temperature=temperature, schema=schema.value, root=root,
        force=force, dry_run=dry_run,
    )  # fmt: skip
    state = "nothing was written; this would be " if dry_run else ""
    state = "already there: " if result.already_there else state
    out.summary(Styled(state, "yellow"), mixture_counts(result))
    out.show(result, [dest], member_lines)
    if not dry_run:
        out.suggest(f"rbtool sample {shlex.quote(dest)}")


def mixture_counts(result: MixResult) -> str:
    """Return how many datasets, steps and episodes a mixture has, as text."""
    found = [counted(len(result.members), "dataset"), counted(result.steps, "step")]
    return " · ".join([*found, counted(result.episodes, "episode")])


def member_lines(result: MixResult, width: int | None) -> Iterator[Line]:
    """Return the datasets with the share of each, and how fields that differ are treated."""
    rows: list[Line] = [
        [
            f"  {one.name}",
            Styled(f"{one.share:.1%}", "cyan"),
            f"weight {number(one.weight)}" if one.weight is not None else "",
            counted(one.steps, "step"),
            counted(one.episodes, "episode"),
            f"mixture of {one.datasets}" if one.name.endswith(".toml") else "",
        ]
        for one in result.members
    ]
    yield from Table(rows, frozenset({1, 2, 3, 4})).lines(width)
    if result.weights is not None or result.temperature != 1:
        how = [f"by {'number of steps' if result.weights == 'size' else result.weights}"] if result.weights else []
        how += [f"temperature {number(result.temperature)}"] if result.temperature != 1 else []
        yield from titled("weights", " · ".join(how), width)
    names = [one.name for one in result.members]
    for one in result.differences:
        yield from folded([Styled(f"{result.policy:<{TITLE}} ", "yellow"), one.sentence(names)], width, TITLE)
    for note in result.notes:
        yield from titled("note", note, width, "yellow")
