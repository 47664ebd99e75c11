"""`rbtool list`, and `rbtool cache ls`, `rm`, `prune` and `verify`: what is stored."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ..core.declarations import declared_sources, source_example
from ..core.errors import UsageError
from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import SOURCE, STORED, Example
from .options import Root, Yes, verb, verb_group
from .output import Output
from .text import Cell, Line, Styled, Table, ago, folded

if TYPE_CHECKING:
    from ..core.verbs.cache import CacheLsResult, CacheRemoval, CacheVerifyResult
    from ..core.verbs.cache_entries import CacheEntry
    from ..core.verbs.listing import ReadableFormat, RemoteEntry, StoredDataset

LIST_EXAMPLES = (
    Example("rbtool list", "every stored dataset"),
    Example(f"rbtool list '{SOURCE}:cartpole/*'", "those whose name fits a pattern"),
    Example("rbtool list -q | head -1", "the name of the first one"),
    Example(f"rbtool list --remote {SOURCE} door", "what can be fetched, by part of a name"),
    Example("rbtool list --formats", "what can be read, and what ends an episode there"),
)
LS_EXAMPLES = (
    Example("rbtool cache ls", "sizes, and when each was last used"),
    Example("rbtool cache ls --json | jq .prunable_bytes", "what prune would free, in bytes"),
)
RM_EXAMPLES = (
    Example(f"rbtool cache rm {STORED} --yes", "a dataset, without a question"),
    Example(f"rbtool cache rm '{SOURCE}:cartpole/*' --dry-run", "see what would be removed by a pattern"),
)
PRUNE_EXAMPLES = (Example("rbtool cache prune --yes", "leftovers and partial downloads; never a dataset"),)
VERIFY_EXAMPLES = (
    Example("rbtool cache verify", "every byte of all datasets; 3 if one is damaged"),
    Example(f"rbtool cache verify '{SOURCE}:cartpole/*' --json", "some of them, as JSON"),
)

_LABELS = {"partial": "partial download"}
_SHOWN = 10
_RIGHT = frozenset({2})
_LIST_RIGHT = frozenset({1, 2, 3})

_DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]
_KINDS = f"Datasets by {SOURCE}:ID, a path below the root, or a pattern with *, ? or [...]."


def add(app: typer.Typer) -> None:
    """Add the verb and the group of verbs to the command line."""
    verb(app, "list", LIST_EXAMPLES)(list_datasets)
    group = verb_group(app, "cache", "See, verify and remove what is stored.", LS_EXAMPLES)
    verb(group, "ls", LS_EXAMPLES)(ls)
    verb(group, "rm", RM_EXAMPLES)(rm)
    verb(group, "prune", PRUNE_EXAMPLES)(prune)
    verb(group, "verify", VERIFY_EXAMPLES)(verify)


def ls(*, out: Output, root: Root = None) -> None:
    """List what is stored: bytes, last use, leftovers.

    Lists datasets, kept originals, partial downloads, leftovers of interrupted work, listings of remotes and streams.
    """
    from ..core.verbs import cache

    result = cache.ls(root=root)
    for entry in result.entries:
        if entry.problem and (out.quiet or out.as_json):
            out.warn(f"{entry.name} cannot be read: {entry.problem}")
    names = [entry.name for entry in result.entries if entry.what == "dataset"]
    out.show(result, names, lambda width: _table(result.entries, width, hints=True))
    for line in _totals(result):
        out.summary(Styled(line, "dim"))
    if any(entry.prunable for entry in result.entries):
        out.suggest(f"rbtool cache prune{_root_option(root)}")


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help=_KINDS)],
    *,
    out: Output,
    root: Root = None,
    yes: Yes = False,
    dry_run: _DryRun = False,
) -> int:
    """Remove datasets, and the originals they were made from.

    Datasets in use, datasets that contain other files, and paths outside the root are refused.
    """
    from ..core.verbs import cache

    answer = _Confirmation(out, yes=yes)
    return answer.show(cache.rm(*names, root=root, dry_run=dry_run, confirm=answer))


def prune(*, out: Output, root: Root = None, yes: Yes = False, dry_run: _DryRun = False) -> int:
    """Remove leftovers, partial downloads, shards of streams and old listings.

    Datasets, kept originals and anything in use stay. Listings of remotes are old after 30 days.
    """
    from ..core.verbs import cache

    answer = _Confirmation(out, yes=yes)
    return answer.show(cache.prune(root=root, dry_run=dry_run, confirm=answer))


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help=f"{_KINDS} Default: all.")] = None,
    *,
    out: Output,
    root: Root = None,
) -> int:
    """Compare every stored byte with its digest.

    Datasets are compared with their manifests, kept originals with the checksums of the remote. Problems are listed
    on stdout, one per line.
    """
    from ..core.verbs import cache

    with out.progress() as progress:
        result = cache.verify(*(names or ()), root=root, progress=progress)
    out.show(result, dict.fromkeys(problem.name for problem in result.problems), lambda width: _verdict(result, width))
    return 3 if result.problems else 0


# Removal ---------------------------------------------------------------------------------------------


class _Confirmation:
    """Asks before anything is removed, unless `--yes` is given, and shows the result."""

    def __init__(self, out: Output, *, yes: bool) -> None:
        self.out = out
        self.yes = yes
        self._declined = False

    def __call__(self, planned: CacheRemoval) -> bool:
        """Ask once, with the number and size of the entries. Raises UsageError without a terminal."""
        from ..core.errors import UsageError

        if self.yes:
            return True
        what = f"{_counted_kinds(planned.removed)} ({size(planned.bytes)}) below {planned.root}"
        if not self.out.can_ask:
            message = f"removing {what} needs a confirmation, and there is no terminal"
            raise UsageError(message, hint="add --yes; --dry-run shows what would be removed")
        for line in _table(planned.removed[:_SHOWN], self.out.stderr_width):
            self.out.say(*line)
        if len(planned.removed) > _SHOWN:
            self.out.say(f"… and {len(planned.removed) - _SHOWN:,} more")
        self._declined = not self.out.ask(f"remove {what}?")
        return not self._declined

    def show(self, result: CacheRemoval) -> int:
        """Write the removed entries to stdout and their total to stderr; return the exit code."""
        removed = () if self._declined else result.removed
        none: list[Line] = [] if self._declined else [[f"nothing to remove below {result.root}"]]
        names = dict.fromkeys(entry.name for entry in removed)
        self.out.show(result, names, lambda width: _table(removed, width) or none)
        total = f"{_counted_kinds(removed)}, {size(result.bytes)}"
        if self._declined:
            self.out.summary(Styled("nothing was removed", "yellow"))
        elif removed and result.dry_run:
            self.out.summary(Styled("nothing was removed; this would remove ", "yellow"), total)
        elif removed:
            self.out.summary(f"removed {total}")
        return 1 if self._declined else 0


def _root_option(root: str | None) -> str:
    return f" --root {shlex.quote(root)}" if root else ""


# Rendering -------------------------------------------------------------------------------------------


def _table(entries: Sequence[CacheEntry], width: int | None, *, hints: bool = False) -> list[list[Cell]]:
    """Return the names of the columns and a row per entry, followed by its problem, if any; nothing without entries."""
    if not entries:
        return []
    now = datetime.datetime.now(datetime.UTC)
    header: Line = [Styled(name, "dim") for name in ("name", "kind", "size", "last used")]
    first, *blocks = Table([header, *(_row(entry, now, hint=hints) for entry in entries)], right=_RIGHT).blocks(width)
    lines = list(first)
    for entry, block in zip(entries, blocks, strict=True):
        lines += block
        if entry.problem:
            lines += folded(["    ", Styled(f"cannot be read: {entry.problem}", "red")], width, 4)
    return lines


def _row(entry: CacheEntry, now: datetime.datetime, *, hint: bool) -> list[Cell]:
    row: list[Cell] = [Styled(entry.name, "bold"), _LABELS.get(entry.what, entry.what), size(entry.bytes)]
    row.append(last_use(entry.last_used, now) if entry.last_used else "")
    if entry.in_use:
        row.append(Styled("in use", "yellow"))
    elif entry.prunable and hint:
        row.append(Styled("prune removes it", "dim"))
    return row


def last_use(time: str, now: datetime.datetime) -> str:
    """Return the age of a time (ISO 8601), like `3 days ago`; its date if it is older than two months."""
    then = datetime.datetime.fromisoformat(time)
    old = now - then >= datetime.timedelta(days=61)
    return then.date().isoformat() if old else ago((now - then).total_seconds())


def _totals(result: CacheLsResult) -> tuple[str, str]:
    """Return the totals of each kind, and what could be freed."""
    counts = Counter(entry.what for entry in result.entries)
    kinds = [f"{counted(count, _LABELS.get(what, what))} {size(result.bytes[what])}" for what, count in counts.items()]
    everything = f"{size(sum(result.bytes.values()))} in all"
    freed = f"{size(result.prunable_bytes)} for prune to free"
    first = f"{' · '.join(kinds) or 'nothing'} below {result.root}"
    return first, f"{everything} · {freed} · {size(result.free_bytes)} free on the disk"


def _counted_kinds(entries: Iterable[CacheEntry]) -> str:
    counts = Counter(entry.what for entry in entries)
    return ", ".join(counted(count, _LABELS.get(what, what)) for what, count in counts.items())


def _verdict(result: CacheVerifyResult, width: int | None) -> list[list[Cell]]:
    """Return the problems and the verdict."""
    lines: list[Line] = [
        [Styled("damaged", "red"), Styled(problem.name, "bold"), problem.message] for problem in result.problems
    ]
    parts = [counted(result.datasets, "dataset")]
    parts += [counted(result.originals, "original")] if result.originals else []
    outcome = f"{counted(len(result.problems), 'problem')} in" if result.problems else "sound:"
    answer: Line = [f"{outcome} {' · '.join(parts)} · {size(result.bytes)} · {result.seconds:.1f} s"]
    return [part for line in [*Table(lines).lines(), answer] for part in folded(line, width, 4)]


# Listing datasets ------------------------------------------------------------------------------------


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
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the remote again, even if the listing is new.")
    ] = False,
    formats: Annotated[bool, typer.Option("--formats", help="List the formats that can be read.")] = False,
    root: Root = None,
) -> None:
    """List the stored datasets, those that can be fetched, or the formats that are read."""
    if formats:
        if remote is not None or pattern is not None:
            raise UsageError("--formats takes no pattern and no --remote", hint="leave them out")
        return _list_formats(out)
    if remote is not None:
        return _list_remote(remote, pattern, out=out, root=root, refresh=refresh)
    if refresh:
        raise UsageError("--refresh needs --remote", hint=f"add --remote {source_example()}")
    return _list_stored(pattern, out=out, root=root)


def _list_stored(pattern: str | None, *, out: Output, root: str | None) -> None:
    from ..core.verbs.listing import list_datasets as run

    result = run(pattern, root=root)
    sound = [entry for entry in result.datasets if not entry.problem]
    for entry in result.datasets:
        if entry.problem and (out.quiet or out.as_json):
            out.warn(f"{entry.name} cannot be read: {entry.problem}")
    out.show(result, [entry.name for entry in sound], lambda width: _stored_lines(result.datasets, width))
    if result.datasets or (pattern is not None and result.root.exists()):
        like = f" with a name like {pattern}" if pattern else ""
        out.summary(Styled(f"{counted(len(result.datasets), 'dataset')} below {result.root}{like}", "dim"))
    else:
        none = "there is none below" if result.root.exists() else "there is no folder"
        out.say(f"no datasets in the store: {none} {result.root}")
    if not result.datasets:
        out.summary(
            "the store holds what rbtool download fetches; a dataset in a folder of your own, where convert, record or "
            "preprocess wrote it, has no name there: give its path, as in rbtool inspect ./FOLDER"
        )
    out.suggest(
        f"rbtool inspect {sound[0].name}" if sound else f"rbtool list --remote {source_example()}, or: rbtool demo"
    )


def _list_remote(source: str, pattern: str | None, *, out: Output, root: str | None, refresh: bool) -> None:
    from ..core.verbs.listing import list_remote as run

    with out.progress() as progress:
        result = run(source, pattern, root=root, refresh=refresh, progress=progress)
    for problem in result.problems:
        out.warn(f"skipped: {problem}")
    entries = result.datasets
    out.show(result, [entry.name for entry in entries], lambda width: _remote_lines(entries, width))
    like = f" with a name like {pattern}" if pattern else ""
    age = f", as of {ago(result.age)} (--refresh asks again)" if result.cached else ""
    out.summary(Styled(f"{counted(len(entries), 'dataset')} of {result.remote}{like}{age}", "dim"))
    if entries:
        out.suggest(f"rbtool download {next((e.name for e in entries if not e.stored), entries[0].name)}")


def _list_formats(out: Output) -> None:
    from ..core.verbs.listing import list_formats as run

    result = run()
    out.show(result, [one.name for one in result.formats], lambda width: _format_lines(result.formats, width))
    out.suggest(f"rbtool list --remote {source_example()}, or: rbtool convert PATH DEST")


def _format_lines(formats: Sequence[ReadableFormat], width: int | None) -> list[list[Cell]]:
    """A format takes a line, and one below it for each thing about it."""
    lines: list[list[Cell]] = []
    for one in formats:
        facts = {
            "found by": one.found,
            "episodes end": one.ends,
            "last observation": one.final,
            "needs": f"pip install 'rbtool[{one.extra}]'" if one.extra else "",
            "remote": f"rbtool download {one.name} ID" if one.remote else "",
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
