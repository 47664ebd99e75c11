"""`rbtool cache ls`, `rm`, `prune` and `verify`."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ..core.errors import UsageError
from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import SOURCE, STORED, Example
from .options import Root, Yes, verb
from .output import Output
from .text import Cell, Line, Styled, Table, ago, folded

if TYPE_CHECKING:
    from ..core.verbs.cache import CacheEntry, CacheLsResult, CacheRemoval, CacheVerifyResult

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
    Example("rbtool cache verify", "every byte of all datasets; exit code 3 if one is damaged"),
    Example(f"rbtool cache verify '{SOURCE}:cartpole/*' --json", "some of them, as JSON"),
)

_LABELS = {"partial": "partial download"}
_SHOWN = 10
_RIGHT = frozenset({2})

_DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]
_KINDS = f"Datasets by {SOURCE}:ID, a path below the root, or a pattern with *, ? or [...]."


@verb("cache ls", LS_EXAMPLES)
def ls(*, out: Output, root: Root = None) -> None:
    """List what is stored, with sizes and times of last use.

    Lists datasets, kept originals, partial downloads, leftovers of interrupted work, listings of remotes and streams.
    """
    from ..core.verbs import cache

    result = cache.ls(root=root)
    for entry in result.entries:
        if entry.problem and (out.quiet or out.as_json):
            out.warn(f"{entry.name} cannot be read: {entry.problem}")
    names = [entry.name for entry in result.entries if entry.what == "dataset"]
    out.show(result, names, lambda _, width: _table(result.entries, width, hints=True))
    for line in _totals(result):
        out.summary(Styled(line, "dim"))
    if any(entry.prunable for entry in result.entries):
        out.suggest(f"rbtool cache prune{_root_option(root)}")


@verb("cache rm", RM_EXAMPLES)
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


@verb("cache prune", PRUNE_EXAMPLES)
def prune(*, out: Output, root: Root = None, yes: Yes = False, dry_run: _DryRun = False) -> int:
    """Remove leftovers, partial downloads, shards of streams and old listings.

    Datasets, kept originals and anything in use stay. Listings of remotes are old after 30 days.
    """
    from ..core.verbs import cache

    answer = _Confirmation(out, yes=yes)
    return answer.show(cache.prune(root=root, dry_run=dry_run, confirm=answer))


@verb("cache verify", VERIFY_EXAMPLES)
def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help=f"{_KINDS} Default: all.")] = None,
    *,
    out: Output,
    root: Root = None,
) -> int:
    """Compare every stored byte with its digest.

    Datasets are compared with their manifests, and kept originals with the checksums of the remote. Problems are listed
    on stdout, one per line.
    """
    from ..core.verbs import cache

    result = out.run(cache.verify, *(names or ()), root=root)
    out.show(result, dict.fromkeys(problem.name for problem in result.problems), _verdict)
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
        if self.yes:
            return True
        what = f"{_counted_kinds(planned.removed)} ({size(planned.bytes)}) below {planned.root}"
        if not self.out.can_ask:
            message = f"removing {what} needs a confirmation, and there is no terminal to ask for it"
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
        self.out.show(result, names, lambda _, width: _table(removed, width) or none)
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
    """Return a header and a row per entry, followed by its problem, if any; [] without entries."""
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
    freed = f"prune would free {size(result.prunable_bytes)}"
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
