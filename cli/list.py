"""`rbtool list`: what is stored, what can be fetched, and which formats are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.declarations import declared_sources, source_example
from ..core.errors import UsageError
from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import SOURCE, Example
from .options import Root, verb
from .output import Output
from .text import Cell, Line, Styled, Table, ago, folded

if TYPE_CHECKING:
    from ..core.verbs.list import ListedFormat, RemoteEntry, StoredDataset

EXAMPLES = (
    Example("rbtool list", "every stored dataset"),
    Example(f"rbtool list '{SOURCE}:cartpole/*'", "those whose name matches a pattern"),
    Example("rbtool list -q | head -1", "the name of the first one"),
    Example(f"rbtool list --remote {SOURCE} door", "datasets that can be fetched, by part of their name"),
    Example("rbtool list --formats", "formats that can be read or written, and how episodes end in each"),
)

_LIST_RIGHT = frozenset({1, 2, 3})


# Listing datasets ------------------------------------------------------------------------------------


@verb("list", EXAMPLES)
def list_datasets(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Part of a name, or a pattern with *, ? or [...].")
    ] = None,
    *,
    out: Output,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="SOURCE", help=f"List what a source offers: {declared_sources()}."),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Fetch the listing of a source again, even if it is recent.")
    ] = False,
    formats: Annotated[bool, typer.Option("--formats", help="List the formats that can be read or written.")] = False,
    root: Root = None,
) -> None:
    """List the stored datasets, those that can be fetched, or the formats that are read and written."""
    if formats:
        if remote is not None or pattern is not None:
            raise UsageError("--formats takes no pattern and no --remote", hint="leave them out")
        return _list_formats(out)
    if remote is not None:
        return _list_remote(remote, pattern, out, root, refresh)
    if refresh:
        raise UsageError("--refresh needs --remote", hint=f"add --remote {source_example()}")
    return _list_stored(pattern, out, root)


def _list_stored(pattern: str | None, out: Output, root: str | None) -> None:
    from ..core.verbs.list import list_datasets as run

    result = run(pattern, root=root)
    sound = [entry for entry in result.datasets if not entry.problem]
    for entry in result.datasets:
        if entry.problem and (out.quiet or out.as_json):
            out.warn(f"{entry.name} cannot be read: {entry.problem}")
    out.show(result, [entry.name for entry in sound], lambda _, width: _stored_lines(result.datasets, width))
    if result.datasets or (pattern is not None and result.root.exists()):
        like = f" with a name like {pattern}" if pattern else ""
        out.summary(Styled(f"{counted(len(result.datasets), 'dataset')} below {result.root}{like}", "dim"))
    else:
        none = "none below" if result.root.exists() else "no folder"
        out.say(f"no datasets in the store: {none} {result.root}")
    if not result.datasets:
        out.summary(
            "the store holds what rbtool download fetches; datasets that convert, record or preprocess wrote to other "
            "folders are named by their path, as in rbtool inspect ./FOLDER"
        )
    if sound:
        out.suggest(f"rbtool inspect {sound[0].name}")
    elif pattern in declared_sources().split(", "):
        out.suggest(f"rbtool list --remote {pattern}")
    else:
        out.suggest(f"rbtool list --remote {source_example()}, or: rbtool demo")


def _list_remote(source: str, pattern: str | None, out: Output, root: str | None, refresh: bool) -> None:
    from ..core.verbs.list import list_remote as run

    result = out.run(run, source, pattern, root=root, refresh=refresh)
    for problem in result.problems:
        out.warn(f"skipped: {problem}")
    entries = result.datasets
    out.show(result, [entry.name for entry in entries], lambda _, width: _remote_lines(entries, width))
    like = f" with a name like {pattern}" if pattern else ""
    age = f", as of {ago(result.age)} (--refresh asks again)" if result.cached else ""
    out.summary(Styled(f"{counted(len(entries), 'dataset')} of {result.remote}{like}{age}", "dim"))
    if entries:
        out.suggest(f"rbtool download {next((e.name for e in entries if not e.stored), entries[0].name)}")


def _list_formats(out: Output) -> None:
    from ..core.verbs.list import list_formats as run

    result = run()
    out.show(result, [one.name for one in result.formats], lambda _, width: _format_lines(result.formats, width))
    out.suggest(f"rbtool list --remote {source_example()}, or: rbtool convert PATH DEST")


def _format_lines(formats: Sequence[ListedFormat], width: int | None) -> list[list[Cell]]:
    """Return a line for each format, followed by a line for each of its properties."""
    lines: list[list[Cell]] = []
    for one in formats:
        facts = {
            "found by": one.found,
            "episodes end": one.ends,
            "last observation": one.final,
            "needs": f"pip install 'rbtool[{one.extra}]'" if one.extra else "",
            "remote": f"rbtool download {one.name} ID" if one.remote else "",
            "stream": f"rbtool sample {one.name}:ID --streaming" if one.streams else "",
            "video": "kept as it is, or decoded" if one.keeps_video else "",
            "export": f"rbtool export DATASET DEST --to {one.name}" if one.exported else "",
        }
        lines.append([Styled(one.name, "bold"), f"  {one.title}" if one.title else ""])
        for label, text in facts.items():
            if text:
                lines += folded([Styled(f"  {label:<18}", "dim"), text], width, 20)
    return lines


def _remote_lines(entries: Sequence[RemoteEntry], width: int | None) -> list[list[Cell]]:
    rows: list[Line] = [
        [
            Styled(entry.name, "bold"),
            "" if entry.steps is None else f"{entry.steps:,}",
            "" if entry.episodes is None else f"{entry.episodes:,}",
            "" if entry.bytes is None else size(entry.bytes),
            "stored" if entry.stored else "",
        ]
        for entry in entries
    ]
    return _headed(("dataset", "steps", "episodes", "size"), rows, width)


def _stored_lines(datasets: Sequence[StoredDataset], width: int | None) -> list[list[Cell]]:
    rows: list[Line] = [
        [
            Styled(entry.name, "bold"),
            f"{entry.steps:,}",
            f"{entry.episodes:,}",
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
    return _headed(("dataset", "steps", "episodes", "size", "layout", "created"), rows, width) + below


def _headed(names: Sequence[str], rows: Sequence[Line], width: int | None) -> list[list[Cell]]:
    """Return a table with the names of its columns above; nothing without rows."""
    header: Line = [Styled(name, "dim") for name in names]
    return Table([header, *rows], right=_LIST_RIGHT).lines(width) if rows else []
