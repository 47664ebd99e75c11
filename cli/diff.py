"""`rbtool diff`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckFailed
from ..core.progress import counted
from .help import Example
from .options import Root, verb
from .output import Output
from .text import Cell, Styled, Table, number

if TYPE_CHECKING:
    from ..core.verbs.diff import DiffResult

EXAMPLES = (
    Example(
        "rbtool convert ./cartpole ./small --layout packed && rbtool diff ./cartpole ./small",
        "the same data in two layouts is equal",
    ),
    Example(
        "rbtool preprocess ./cartpole --episodes 1: --dest ./tail && (rbtool diff ./cartpole ./tail; test $? = 3)",
        "an episode that only one of them has; exit code 3",
    ),
    Example("rbtool diff ./cartpole ./cartpole --rtol 1e-6 --json", "with a tolerance, as JSON"),
)
_MANY = 10


@verb("diff", EXAMPLES)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A path, or a stored dataset.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The dataset to compare it with.")],
    *,
    out: Output,
    rtol: Annotated[float, typer.Option("--rtol", metavar="X", help="Relative tolerance. Default: equal bits.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", metavar="X", help="Absolute tolerance. Default: equal bits.")] = 0.0,
    ignore_order: Annotated[
        bool, typer.Option("--ignore-order", help="Ignore the order and the numbers of episodes.")
    ] = False,
    root: Root = None,
) -> int | None:
    """Compare two datasets: their fields, episodes and values.

    Episodes with equal rows are matched wherever they are, and the others by their number. The exit code is 3 if the
    datasets differ.
    """
    from ..core.verbs.diff import diff as run

    result = out.run(run, a, b, rtol=rtol, atol=atol, ignore_order=ignore_order, root=root)
    rows = list(_differences(result, a, b))
    head = _verdict(result, a, b)
    out.show(result, (f"{kind} {text}".strip() for kind, text in rows), lambda _, width: _diff_lines(head, rows, width))
    return None if result.equal else CheckFailed.exit_code


def _verdict(result: DiffResult, a: str, b: str) -> list[Cell]:
    if result.equal:
        close = f", {counted(result.close, 'episode')} within the tolerances" if result.close else ""
        kind = "equal" if result.close or result.reordered or result.renumbered else "equal, bit for bit"
        return [
            Styled(kind, "green"),
            f": {counted(result.steps[0], 'step')} in {counted(result.episodes[0], 'episode')}{close}",
        ]
    found = [f"{counted(result.same, 'episode')} the same"]
    found += [f"{result.close:,} close"] if result.close else []
    found += [f"{len(result.changed):,} changed"] if result.changed else []
    found += [f"{len(alone):,} only in {name}" for alone, name in ((result.only_a, a), (result.only_b, b)) if alone]
    return [Styled("different", "red"), ": ", " · ".join(found)]


def _differences(result: DiffResult, a: str, b: str) -> Iterator[tuple[str, str]]:
    if len(set(result.steps)) > 1:
        yield "steps", f"{result.steps[0]:,} against {result.steps[1]:,}"
    if len(set(result.episodes)) > 1:
        yield "episodes", f"{result.episodes[0]:,} against {result.episodes[1]:,}"
    for field in result.fields:
        yield "field", field.sentence((a, b))
    for value in result.values:
        largest = "" if value.largest is None else f", by up to {number(value.largest)}"
        yield "values", f"{value.key}: {counted(value.steps, 'step')} in {counted(value.episodes, 'episode')}{largest}"
    for one in result.changed[:_MANY]:
        name = f"{one.a}" if one.a == one.b else f"{one.a} ({one.b} in {b})"
        lengths = f" {one.lengths[0]:,} against {one.lengths[1]:,}" if one.lengths[0] != one.lengths[1] else ""
        yield "changed", f"episode {name}: {', '.join(one.what)}{lengths}"
    if len(result.changed) > _MANY:
        yield "changed", f"and {len(result.changed) - _MANY:,} more episodes"
    for alone, name in ((result.only_a, a), (result.only_b, b)):
        if alone:
            yield "only in", f"{name}: {'episode' if len(alone) == 1 else 'episodes'} {_few(alone)}"
    if result.reordered:
        yield "order", "the episodes that both have come in another order"
    if result.renumbered:
        yield "numbers", f"{counted(result.renumbered, 'episode')} with another number"
    yield from (("table", entry) for entry in result.entries)


def _few(numbers: Iterable[int]) -> str:
    listed = list(map(str, numbers))
    return ", ".join(listed[:_MANY]) + (f" and {len(listed) - _MANY:,} more" if len(listed) > _MANY else "")


def _diff_lines(head: list[Cell], rows: list[tuple[str, str]], width: int | None) -> list[list[Cell]]:
    from .text import folded

    table = Table([[Styled(kind, "dim"), text] for kind, text in rows]).lines(width) if rows else []
    return [*folded(head, width, 2), *table]
