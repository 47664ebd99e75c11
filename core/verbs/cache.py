"""`cache ls`, `rm`, `prune` and `verify`: list, remove and verify what is stored below the root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar

from ..errors import DatasetNotFoundError, RbtoolError, UsageError, suggests_keywords
from ..format import fs
from ..format.open_files import ListedFiles
from ..format.staging import remove_at_once, remove_dataset, remove_leftover, require_removable
from ..progress import Progress, Silent
from ..remote.originals import stored_originals
from ..results import Result, seconds_since
from .cache_entries import CacheEntry, cache_entries, chosen_entries
from .listing import existing_root

PathLike: TypeAlias = str | os.PathLike[str]
_DATASETS = frozenset({"dataset", "checkpoint"})
_ORIGINALS = frozenset({"original", "partial"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLsResult(Result):
    """Everything below the root, sorted by name.

    `bytes` is the total of each kind, `prunable_bytes` what `prune` would free, and `free_bytes` the space left on
    the disk.
    """

    kind: ClassVar[str] = "cache ls"
    root: Path
    entries: tuple[CacheEntry, ...]
    bytes: Mapping[str, int]
    prunable_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRemoval(Result):
    """The removed entries and the bytes freed; with `dry_run`, what would be removed."""

    kind: ClassVar[str] = "cache removal"
    root: Path
    removed: tuple[CacheEntry, ...]
    bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRmResult(CacheRemoval):
    """Datasets, checkpoints and originals that were removed."""

    kind: ClassVar[str] = "cache rm"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePruneResult(CacheRemoval):
    """Leftovers, partial downloads and old listings that were removed."""

    kind: ClassVar[str] = "cache prune"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheProblem:
    """A file that differs from what was written, or an unreadable dataset; `message` is one sentence."""

    name: str
    path: Path
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheVerifyResult(Result):
    """How much was read and compared, and the differences."""

    kind: ClassVar[str] = "cache verify"
    root: Path
    datasets: int
    originals: int
    bytes: int
    problems: tuple[CacheProblem, ...]
    seconds: float


_Removal = TypeVar("_Removal", bound=CacheRemoval)


@suggests_keywords()
def ls(*, root: PathLike | None = None) -> CacheLsResult:
    """List everything below the root: datasets, originals, partial downloads, leftovers, listings of remotes.

    Links are not followed. A missing root is empty. Raises UsageError if the root is not a folder.
    """
    folder = existing_root(root)
    entries = cache_entries(folder)
    kinds = dict.fromkeys(sorted(entry.what for entry in entries))
    return CacheLsResult(
        root=folder,
        entries=tuple(entries),
        bytes={what: _bytes(entry for entry in entries if entry.what == what) for what in kinds},
        prunable_bytes=_bytes(entry for entry in entries if entry.prunable),
        free_bytes=fs.free_space(folder),
    )


@suggests_keywords()
def rm(
    *names: PathLike,
    root: PathLike | None = None,
    dry_run: bool = False,
    confirm: Callable[[CacheRmResult], bool] | None = None,
) -> CacheRmResult:
    """Remove datasets and checkpoints below the root, and the originals they were made from.

    Each name is `source:id`, a path below the root, or a shell pattern of names (`source:group/*`). An original
    is removed with the dataset of its name, and with the last dataset made from it. `confirm` is called with the
    planned removal; if it returns False, nothing is removed. After an interruption each dataset is either complete
    or a leftover for `prune`.

    Raises, before anything is removed, DatasetNotFoundError for a name without a match, and UsageError for a path
    outside the root or not written by rbtool, for a dataset that contains foreign files, and for one in use.
    """
    folder = existing_root(root)
    if not names:
        raise UsageError("no dataset named", hint="name one: rbtool cache ls lists what is stored")
    entries = [entry for entry in cache_entries(folder) if entry.what in _DATASETS | _ORIGINALS]
    chosen = _with_originals(entries, chosen_entries(entries, names, folder))
    for entry in chosen:
        if entry.in_use:
            raise _in_use_error(entry)
        if entry.what in _DATASETS:
            require_removable(entry.path)
    result = CacheRmResult(root=folder, removed=tuple(chosen), bytes=_bytes(chosen), dry_run=dry_run)
    if dry_run or (confirm is not None and not confirm(result)):
        return replace(result, dry_run=True)
    for entry in chosen:
        if entry.what in _DATASETS:
            remove_dataset(entry.path, below=folder)
        elif not _remove_original(entry, folder):
            raise _in_use_error(entry)
        _remove_empty_parents(entry.path, folder)
    return result


@suggests_keywords()
def prune(
    *,
    root: PathLike | None = None,
    dry_run: bool = False,
    confirm: Callable[[CachePruneResult], bool] | None = None,
) -> CachePruneResult:
    """Remove leftovers of dead processes, partial downloads, shards of streams, and listings older than 30 days.

    Datasets, checkpoints, kept originals and anything in use stay. `confirm` is called with the planned removal; if
    it returns False, nothing is removed. Raises UsageError if the root is not a folder.
    """
    folder = existing_root(root)
    chosen = [entry for entry in cache_entries(folder) if entry.prunable]
    result = _pruned(folder, chosen, dry_run=dry_run)
    if dry_run or not chosen:
        return result
    if confirm is not None and not confirm(result):
        return replace(result, dry_run=True)
    still = {
        entry.path for entry in cache_entries(folder) if entry.prunable
    }  # `confirm` may have waited long for an answer
    removed = [entry for entry in chosen if entry.path in still and _remove_prunable(entry, folder)]
    for entry in removed:
        _remove_empty_parents(entry.path, folder)
    return _pruned(folder, removed, dry_run=False)


@suggests_keywords()
def verify(*names: PathLike, root: PathLike | None = None, progress: Progress | None = None) -> CacheVerifyResult:
    """Compare the files of datasets with the digests in their manifests, and kept originals with the remote's.

    Verifies everything below the root, or the entries named as for `rm`. Problems are returned, not raised. Raises
    DatasetNotFoundError for a name without a match and for a missing root, UsageError for a path that is not a
    stored entry.
    """
    started, folder, progress = time.perf_counter(), existing_root(root), progress or Silent()
    if not folder.exists():
        raise DatasetNotFoundError(f"there is no folder {folder}, so nothing in it can be verified")
    entries = [entry for entry in cache_entries(folder) if entry.what in _DATASETS or entry.what == "original"]
    chosen = chosen_entries(entries, names, folder) if names else entries
    originals = {original.folder: original for original in stored_originals(folder)}
    problems: list[CacheProblem] = []
    progress.start("verifying", _bytes(chosen), "bytes")
    for entry in chosen:
        found = (
            _dataset_problems(entry, progress)
            if entry.what in _DATASETS
            else _original_problems(originals[entry.path].problems(), entry, progress)
        )
        problems += [CacheProblem(name=entry.name, path=entry.path, message=message) for message in found]
    progress.done()
    return CacheVerifyResult(
        root=folder,
        datasets=sum(entry.what in _DATASETS for entry in chosen),
        originals=sum(entry.what == "original" for entry in chosen),
        bytes=_bytes(chosen),
        problems=tuple(problems),
        seconds=seconds_since(started),
    )


# Removing --------------------------------------------------------------------------------------------


def _with_originals(entries: Sequence[CacheEntry], chosen: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Add the originals of which no dataset remains."""
    paths = {entry.path for entry in chosen}
    left = {entry.original for entry in entries if entry.original and entry.path not in paths}
    orphans = {entry.original for entry in chosen if entry.original} - left
    return [entry for entry in entries if entry.path in paths or (entry.what in _ORIGINALS and entry.name in orphans)]


def _remove_original(entry: CacheEntry, root: Path) -> bool:
    source = entry.path.parent.parent
    return remove_at_once(entry.path, near=source / entry.path.name, below=root) or not entry.path.exists()


def _remove_prunable(entry: CacheEntry, root: Path) -> bool:
    if entry.what == "leftover":
        return remove_leftover(entry.path, below=root)
    if entry.what == "partial":
        return _remove_original(entry, root)
    fs.remove_below(root, entry.path)
    return True


def _remove_empty_parents(path: Path, root: Path) -> None:
    """Remove the parent folders that are empty now, except the root and the folders of sources."""
    with contextlib.suppress(OSError, UsageError):  # stop at a folder that is not empty, or at a link
        for folder in path.relative_to(root).parents:
            if len(folder.parts) > 1:
                with fs.folder_below(root, (root / folder).parent) as within:
                    fs.remove_empty_folder(root / folder, within=within)


def _pruned(root: Path, entries: Sequence[CacheEntry], *, dry_run: bool) -> CachePruneResult:
    return CachePruneResult(root=root, removed=tuple(entries), bytes=_bytes(entries), dry_run=dry_run)


def _in_use_error(entry: CacheEntry) -> UsageError:
    return UsageError(f"another process is fetching {entry.name}; nothing is removed", hint="try again when it is done")


def _bytes(entries: Sequence[CacheEntry] | Iterator[CacheEntry]) -> int:
    return sum(entry.bytes for entry in entries)


# Verifying -------------------------------------------------------------------------------------------


def _dataset_problems(entry: CacheEntry, progress: Progress) -> Iterator[str]:
    """Yield a message for each file that is missing, cut or changed."""
    seen = 0
    try:
        with ListedFiles.at(entry.path) as files:
            if problem := files.manifest_problem():
                yield problem
            for file in files.manifest.files:
                if problem := files.problem(file):
                    yield problem
                progress.advance(file.size)
                seen += file.size
    except (RbtoolError, OSError, ValueError) as error:
        yield str(error)
    progress.advance(max(0, entry.bytes - seen))  # the manifest, and what it does not list


def _original_problems(problems: Iterator[str], entry: CacheEntry, progress: Progress) -> Iterator[str]:
    try:
        yield from problems
    except (RbtoolError, OSError) as error:
        yield str(error)
    progress.advance(entry.bytes)
