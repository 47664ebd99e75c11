"""`rbtool list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.declarations import declared_sources, source_example
from ..core.errors import UsageError
from ..core.progress import readable_size as size
from .help import Example
from .options import Root, verb
from .output import Output
from .text import Cell, Line, Styled, Table, ago, counted, folded

if TYPE_CHECKING:
    from ..core.verbs.listing import RemoteEntry, StoredDataset

EXAMPLES = (
    Example("rbtool list", "every stored dataset"),
    Example("rbtool list 'minari:cartpole/*'", "those whose name fits a pattern"),
    Example("rbtool list -q | head -1", "the name of the first one"),
    Example("rbtool list --remote minari door", "what can be fetched, by part of a name"),
)

_RIGHT = frozenset({1, 2, 3})


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "list", EXAMPLES)(list_datasets)


def list_datasets(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Part of a name, or a pattern with *, ? or [...].")
    ] = None,
    *,
    out: Output,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="SOURCE", help=f"Those that a source offers: {declared_sources()}."),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the remote again, however new the listing.")] = False,
    root: Root = None,
) -> None:
    """List the stored datasets, or those that can be fetched."""
    if remote is not None:
        return _list_remote(remote, pattern, out=out, root=root, refresh=refresh)
    if refresh:
        raise UsageError("--refresh asks a remote again, and none is named", hint=f"add --remote {source_example()}")
    return _list_stored(pattern, out=out, root=root)


def _list_stored(pattern: str | None, *, out: Output, root: str | None) -> None:
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
    out.suggest(
        f"rbtool inspect {sound[0].name}" if sound else f"rbtool list --remote {source_example()}, or: rbtool demo"
    )


def _list_remote(source: str, pattern: str | None, *, out: Output, root: str | None, refresh: bool) -> None:
    from ..core.verbs.listing import list_remote as run

    with out.progress() as progress:
        result = run(source, pattern, root=root, refresh=refresh, progress=progress)
    for problem in result.problems:
        out.warn(f"passed over: {problem}")
    entries = result.datasets
    out.show(result, [entry.name for entry in entries], lambda width: _remote_lines(entries, width))
    like = f" with a name like {pattern}" if pattern else ""
    age = f", as of {ago(result.age)} (--refresh asks again)" if result.cached else ""
    out.summary(Styled(f"{counted(len(entries), 'dataset')} of {result.remote}{like}{age}", "dim"))
    if entries:
        out.suggest(f"rbtool download {next((e.name for e in entries if not e.stored), entries[0].name)}")


def _remote_lines(entries: Sequence[RemoteEntry], width: int | None) -> list[list[Cell]]:
    rows: list[Line] = [
        [
            Styled(entry.name, "bold"),
            "" if entry.steps is None else counted(entry.steps, "step"),
            "" if entry.episodes is None else counted(entry.episodes, "episode"),
            "" if entry.bytes is None else size(entry.bytes),
            "stored" if entry.stored else "",
        ]
        for entry in entries
    ]
    return Table(rows, right=_RIGHT).lines(width)


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
    below = [part for line in Table(broken).lines() for part in folded(line, width, 4)]
    return Table(rows, right=_RIGHT).lines(width) + below
