"""`rbtool inspect`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from .help import Example
from .options import Dataset, Root, verb
from .output import Output
from .text import Line

if TYPE_CHECKING:
    from ..core.verbs.inspect import InspectResult

__all__ = ["EXAMPLES", "add", "inspect_lines"]

EXAMPLES = (
    Example("rbtool inspect minari:cartpole/scripted-v0", "what is in a stored dataset"),
    Example("rbtool inspect ./cartpole --episode 3 --head 5", "the first steps of an episode, row by row"),
    Example("rbtool inspect ./minari/tuple/trunc-v0", "a raw Minari dataset, before it is converted"),
    Example("rbtool inspect ./cartpole.h5 --json", "a checkpoint, as JSON"),
)


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "inspect", EXAMPLES)(inspect)


def inspect(
    dataset: Dataset,
    *,
    out: Output,
    episode: Annotated[
        int | None, typer.Option("--episode", metavar="K", help="Show this episode as s → a → (r, s′).")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", help="Only its first N steps, and the last.")
    ] = None,
    root: Root = None,
) -> None:
    """Show what is in a dataset, a checkpoint or a raw dataset.

    Reads what is recorded of it, not the data: a dataset of any size takes the same time.
    """
    from ..core.verbs.inspect import inspect as run

    result = run(dataset, episode=episode, head=head, root=root)
    out.show(result, [str(result.path)], lambda width: inspect_lines(result, width))
    if result.episode is None and result.type == "source":
        out.suggest(f"rbtool convert {shlex.quote(dataset)} DEST")
    elif result.problems:
        out.suggest(f"rbtool check {shlex.quote(dataset)}")
    elif result.episode is None and result.first_episode is not None:
        out.suggest(f"rbtool inspect {shlex.quote(dataset)} --episode {result.first_episode} --head 5")


def inspect_lines(result: InspectResult, width: int | None = None) -> Iterable[Line]:
    """Set the summary, or the episode that was asked for."""
    from .inspect_episode import episode_lines
    from .inspect_summary import summary_lines

    return (
        summary_lines(result, width) if result.episode is None else episode_lines(result.episode, result.fields, width)
    )
