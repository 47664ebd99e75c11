"""`rbtool list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .help import Example
from .options import Root, verb
from .output import Output
from .text import Cell, Line, Styled, Table, counted, size

if TYPE_CHECKING:
    from ..core.verbs.listing import StoredDataset

__all__ = ["EXAMPLES", "add"]

EXAMPLES = (
    Example("rbtool list", "every stored dataset"),
    Example("rbtool list 'minari:cartpole/*'", "those whose name fits a pattern"),
    Example("rbtool list -q | head -1", "the name of the first one"),
)

_RIGHT = frozenset({1, 2, 3})


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "list", EXAMPLES)(list_datasets)


def list_datasets(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Part of a name, or a pattern with *, ? or [...].")
    ] = None,
    *,
    out: Output,
    root: Root = None,
) -> None:
    """List the stored datasets."""
    from ..core.verbs.listing import list_datasets as run

    result = run(pattern, root=root)
    sound = [entry for entry in result.datasets if not entry.problem]
    for entry in result.datasets:
        if entry.problem and (out.quiet or out.as_json):
            out.warn(f"{entry.name} cannot be read: {entry.problem}")
    out.show(result, [entry.name for entry in sound], lambda width: _lines(result.datasets, width))
    where = f"below {result.root}" + (f" with a name like {pattern}" if pattern else "")
    if result.root.exists():
        out.summary(Styled(f"{counted(len(result.datasets), 'dataset')} {where}", "dim"))
    else:
        out.say(f"there is no folder {result.root}, so no datasets are stored in it")
    out.next(f"rbtool inspect {sound[0].name}" if sound else "rbtool download minari ID --local, or: rbtool demo")


def _lines(datasets: Sequence[StoredDataset], width: int | None) -> list[list[Cell]]:
    rows: list[Line] = [
        [
            Styled(entry.name, "bold"),
            counted(entry.steps, "step"),
            counted(entry.episodes, "episode"),
            size(entry.bytes),
            entry.layout,
            (entry.created or "")[:10],
        ]
        for entry in datasets
        if not entry.problem
    ]
    broken: list[Line] = [
        [Styled(entry.name, "bold"), Styled(f"cannot be read: {entry.problem}", "red")]
        for entry in datasets
        if entry.problem
    ]
    table = Table(rows, right=_RIGHT)
    while width is not None and table.width > width and len(table.rows[0]) > 2:
        table = Table([row[:-1] for row in table.rows], right=_RIGHT)  # narrow: the last columns go
    return table.lines() + Table(broken).lines()
