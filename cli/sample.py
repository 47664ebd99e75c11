"""`rbtool sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .help import Example
from .options import Dataset, Root, verb
from .output import Output
from .text import Cell, Line, Styled, Table, counted, number, size

if TYPE_CHECKING:
    from ..core.verbs.sample import SampledField, SampleResult

__all__ = ["EXAMPLES", "add", "sample_lines"]

EXAMPLES = (
    Example("rbtool sample ./cartpole -n 256 --seed 0", "a batch of 256 steps, the same one every time"),
    Example("rbtool sample minari:cartpole/scripted-v0 -n 4 --json", "which steps, and what they are like, as JSON"),
)

_SHOWN = 6


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "sample", EXAMPLES)(sample)


def sample(
    dataset: Dataset,
    n: Annotated[int, typer.Option("--number", "-n", metavar="N", help="How many steps.")] = 256,
    *,
    out: Output,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="The same seed, the same batch.")] = None,
    root: Root = None,
) -> None:
    """Draw steps at random, as training would."""
    from ..core.verbs.sample import sample as run

    result = run(dataset, n, seed=seed, root=root)
    out.show(result, map(str, result.indices), lambda width: sample_lines(result))


def sample_lines(result: SampleResult) -> list[list[Cell]]:
    """Set what was drawn: the first few steps, and what the values of each leaf are like."""
    drawn = [f"{episode}:{step}" for episode, step in zip(result.episodes, result.steps, strict=True)]
    rows: list[Line] = [
        [
            f"  {field.key}",
            Styled(field.dtype, "cyan"),
            f"[{', '.join(map(str, field.shape))}]",
            size(field.bytes),
            about,
        ]
        for field in result.fields
        for about in [_about(field)]
    ]
    return [
        [Styled(f"{counted(result.n, 'step')} of {result.path}", "bold"), f"   seed {result.seed}"],
        [Styled("drawn    ", "dim"), f"episode:step {' '.join(drawn[:_SHOWN])}{' …' if result.n > _SHOWN else ''}"],
        [Styled("batch", "dim")],
        *Table(rows, right=frozenset({3})).lines(),
    ]


def _about(field: SampledField) -> str:
    if field.true_fraction is not None:
        return f"{field.true_fraction:.1%} true"
    if field.min is None or field.mean is None or field.max is None:
        return ""
    return f"mean {number(field.mean)}, {number(field.min)} … {number(field.max)}"
