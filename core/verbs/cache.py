"""`cache ls`, `rm`, `prune` and `verify`: list, remove and verify what is stored below the storage root."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypeVar

from ..errors import DatasetNotFoundError, RbtoolError, UsageError, nearest, suggests_keywords
from ..format import fs
from ..format.documents import written_time
from ..format.locate import HUB, fits, last_use, stored_datasets, stored_name, streams_folder
from ..format.manifest import Manifest
from ..format.open_files import ListedFiles
from ..format.staging import leftovers, lock_folder, remove_at_once, remove_dataset, remove_leftover, require_removable
from ..options import PathLike
from ..progress import Progress, Silent
from ..remote.originals import Originals, stored_originals
from ..results import Result, seconds_since
from .list import existing_root

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
    """The number of datasets, originals and bytes that were compared, and the problems."""

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

    Links are not followed. A missing root counts as empty.

    Args:
        root: where datasets are stored.

    Returns:
        The entries.

    Raises:
        UsageError: the root is not a folder.
    """
    folder = existing_root(root)
    entries = _cache_entries(folder)
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

    An original is removed with the dataset of its name, and with the last dataset made from it. After an interruption
    each dataset is either complete or a leftover for `prune`.

    Args:
        names: each is `source:id`, a path below the root, or a shell pattern of names (`source:group/*`).
        root: where datasets are stored.
        dry_run: remove nothing.
        confirm: is called with the planned removal; if it returns False, nothing is removed.

    Returns:
        What was removed.

    Raises:
        DatasetNotFoundError: a name has no match; as after any error, nothing is removed.
        UsageError: a path outside the root or not written by rbtool, a dataset that contains foreign files, or one in
            use.
    """
    folder = existing_root(root)
    if not names:
        raise UsageError("no dataset named", hint="name one: rbtool cache ls lists what is stored")
    entries = [entry for entry in _cache_entries(folder) if entry.what in _DATASETS | _ORIGINALS]
    chosen = _with_originals(entries, _chosen_entries(entries, names, folder))
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

    Datasets, checkpoints, kept originals and anything in use stay.

    Args:
        root: where datasets are stored.
        dry_run: remove nothing.
        confirm: is called with the planned removal; if it returns False, nothing is removed.

    Returns:
        What was removed.

    Raises:
        UsageError: the root is not a folder.
    """
    folder = existing_root(root)
    chosen = [entry for entry in _cache_entries(folder) if entry.prunable]
    result = CachePruneResult(root=folder, removed=tuple(chosen), bytes=_bytes(chosen), dry_run=dry_run)
    if dry_run or not chosen:
        return result
    if confirm is not None and not confirm(result):
        return replace(result, dry_run=True)
    still = {
        entry.path for entry in _cache_entries(folder) if entry.prunable
    }  # `confirm` may have waited long for an answer
    removed = [entry for entry in chosen if entry.path in still and _remove_prunable(entry, folder)]
    for entry in removed:
        _remove_empty_parents(entry.path, folder)
    return replace(result, removed=tuple(removed), bytes=_bytes(removed))


@suggests_keywords()
def verify(*names: PathLike, root: PathLike | None = None, progress: Progress | None = None) -> CacheVerifyResult:
    """Compare the files of datasets with the digests in their manifests, and kept originals with the remote's.

    Args:
        names: as for `rm`; default: everything below the root.
        root: where datasets are stored.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The problems found.

    Raises:
        DatasetNotFoundError: a name has no match, or the root does not exist.
        UsageError: a path is not a stored entry.
    """
    started, folder, progress = time.perf_counter(), existing_root(root), progress or Silent()
    if not folder.exists():
        raise DatasetNotFoundError(f"{folder} not found: it cannot be verified")
    entries = [entry for entry in _cache_entries(folder) if entry.what in _DATASETS or entry.what == "original"]
    chosen = _chosen_entries(entries, names, folder) if names else entries
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
    """Add the originals from which no remaining dataset was made."""
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


What: TypeAlias = Literal["dataset", "checkpoint", "original", "partial", "leftover", "listing", "stream"]

_ORDER = ("dataset", "checkpoint", "original", "partial", "leftover", "listing", "stream")
_LISTING_DAYS = 30
_BLOCK = 512
_WRITING_SECONDS = 60.0  # writing a small file takes less
_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An item below the root.

    `what` is one of

    - `dataset`, `checkpoint`;
    - `original`: source files that were kept after the conversion;
    - `partial`: source files that are incomplete or not converted yet;
    - `leftover`: temporary files of a process that has died or is still running;
    - `listing`: the cached listing of a remote;
    - `stream`: cached shards of a stream, which can be fetched again.

    `bytes` is the size of all its files. `last_used` is a UTC time: the last opening of a dataset by name or path, or
    the last change of another item. `original` is the name of the original that a dataset was made from. `in_use` is
    True while a process has the item locked, `prunable` if `prune` removes it; `problem` is set if it cannot be read.
    """

    name: str
    what: What
    path: Path
    bytes: int
    last_used: str | None
    original: str | None = None
    in_use: bool = False
    prunable: bool = False
    problem: str | None = None


def _cache_entries(root: Path) -> list[CacheEntry]:
    """List everything below the root, sorted by name. Links are not followed.

    Does not change `last_used`. Items that disappear during the scan are left out.
    """
    left = list(_leftovers(root))  # first: it completes an interrupted swap, whose dataset is then listed
    found = [*left, *_half_written(root), *_datasets(root), *_originals(root), *_listings(root), *_streams(root)]
    return sorted(found, key=lambda entry: (entry.name, _ORDER.index(entry.what), str(entry.path)))


def _chosen_entries(
    entries: Sequence[CacheEntry], names: Sequence[str | os.PathLike[str]], root: Path
) -> list[CacheEntry]:
    """Select entries by `source:id`, shell pattern, or path below the root; sorted by name.

    Raises DatasetNotFoundError for a name without a match, UsageError for a path that is not an entry.
    """
    chosen: set[Path] = set()
    for given in names:
        name = os.fspath(given)
        fitting = [entry.path for entry in entries if entry.name == name]
        if not fitting and _PATTERN & set(name):
            fitting = [entry.path for entry in entries if fits(entry.name, name)]
        if not fitting:
            path = _entry_path(name, root)
            fitting = [entry.path for entry in entries if entry.path == path]
        if not fitting:
            raise _not_stored(name, root, [entry.name for entry in entries])
        chosen.update(fitting)
    return [entry for entry in entries if entry.path in chosen]


def _entry_path(name: str, root: Path) -> Path | None:
    """Return the path in the form of `CacheEntry.path`; None if it is not below the root. Links are not followed."""
    path = Path(os.path.abspath(fs.expanded(name)))
    real, base = Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(root))
    return root / real.relative_to(base) if name and base in real.parents else None


def _not_stored(name: str, root: Path, known: Sequence[str]) -> RbtoolError:
    if not name:
        return UsageError("a name is empty", hint="is a variable not set?")
    same = [entry for entry in known if entry.endswith((f":{name}", f"/{name}"))]
    near = same[0] if same else nearest(name, known)
    hint = f"did you mean {near}?" if near else "list what is stored: rbtool cache ls"
    if not os.path.lexists(fs.expanded(name)):
        message = f"nothing in {root} has a name like {name}" if _PATTERN & set(name) else f"{name} is not in {root}"
        return DatasetNotFoundError(message, hint=hint)
    where = "not below the root {}, so it is not stored there"
    if _entry_path(name, root) is not None:
        where = "below the root {}, but is not a dataset or an original"
    return UsageError(f"{name} is {where.format(root)}", hint=hint)


# Finding ---------------------------------------------------------------------------------------------


def _leftovers(root: Path) -> Iterator[CacheEntry]:
    for path, destination in leftovers(root):
        count, changed = _measure(path)
        in_use = _in_use(path)
        yield CacheEntry(
            stored_name(destination, root), "leftover", path, count, _time(changed), in_use=in_use, prunable=not in_use
        )


def _half_written(root: Path) -> Iterator[CacheEntry]:
    """Yield unfinished files of cached statistics, which a killed process has left."""
    folder = root / ".stats"
    for path in sorted(folder.glob(".*.new")) if not folder.is_symlink() else ():
        if path.is_file() and not path.is_symlink():
            facts = path.lstat()
            yield CacheEntry(
                ".stats:",
                "leftover",
                path,
                facts.st_size,
                _time(facts.st_mtime),
                prunable=facts.st_mtime < time.time() - _WRITING_SECONDS,
            )


def _datasets(root: Path) -> Iterator[CacheEntry]:
    for path, manifest in stored_datasets(root):
        if path == root or not path.is_dir():
            continue
        name = stored_name(path, root)
        entry = CacheEntry(
            name, "dataset", path, _measure(path)[0], _time(last_use(path)), original=re.sub(r"@[0-9a-f]{8}$", "", name)
        )
        if isinstance(manifest, Manifest):
            of_hub = path.is_relative_to(root / HUB)  # its manifest comes from the author
            original = entry.original if of_hub else f"{manifest.request.source}:{manifest.request.id}"
            yield replace(entry, what=manifest.kind, original=original)
        else:
            yield replace(entry, problem=str(manifest))


def _originals(root: Path) -> Iterator[CacheEntry]:
    for original in stored_originals(root):
        if any(folder.is_symlink() for folder in (original.folder, *list(original.folder.parents)[:2])):
            continue
        count, changed = _measure(original.folder)
        what, problem = _state(original)
        in_use = _in_use(original.folder)
        yield CacheEntry(
            f"{original.source}:{original.id}",
            what,
            original.folder,
            count,
            _time(changed),
            in_use=in_use,
            prunable=what == "partial" and not in_use,
            problem=problem,
        )


def _state(original: Originals) -> tuple[Literal["original", "partial"], str | None]:
    """Return the kind of an original, and its problem if any; if its record cannot be read, it counts as kept."""
    try:
        record = original.record()
    except (RbtoolError, OSError) as error:
        return "original", str(error)
    return ("original" if record is not None and record.kept else "partial"), None


def _listings(root: Path) -> Iterator[CacheEntry]:
    oldest = time.time() - _LISTING_DAYS * 24 * 3600
    for path in sorted((*root.glob("*/.catalogue/*"), *root.glob("*/.names.json"), *root.glob("*/..names.json.*"))):
        folders = path.relative_to(root).parts[:-1]
        if path.is_file() and not any((root / Path(*folders[: n + 1])).is_symlink() for n in range(len(folders))):
            facts = path.lstat()
            half_written = path.suffix == ".new" and facts.st_mtime < time.time() - _WRITING_SECONDS
            yield CacheEntry(
                f"{folders[0]}:",
                "listing",
                path,
                facts.st_size,
                _time(facts.st_mtime),
                prunable=half_written or facts.st_mtime < oldest,
            )


def _streams(root: Path) -> Iterator[CacheEntry]:
    folder = streams_folder(root)
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if path.is_dir() and not path.is_symlink():
            in_use = _in_use(path)
            files = [one.lstat() for one in path.rglob("*") if one.is_file()]
            size = sum(one.st_blocks for one in files) * _BLOCK  # the files are sparse: parts of shards are fetched
            used = _time(max((one.st_mtime for one in files), default=None))
            yield CacheEntry(f".streams:{path.name}", "stream", path, size, used, in_use=in_use, prunable=not in_use)


def _measure(folder: Path) -> tuple[int, float | None]:
    """Return the bytes of a file or folder and the time of its last change; links are not followed."""
    if not folder.is_dir():
        facts = folder.lstat()
        return facts.st_size, facts.st_mtime
    count, newest, folders = 0, 0.0, [os.fspath(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for item in found:
                if item.is_dir(follow_symlinks=False):
                    folders.append(item.path)
                else:
                    facts = item.stat(follow_symlinks=False)
                    count, newest = count + facts.st_size, max(newest, facts.st_mtime)
    return count, newest or None


def _in_use(folder: Path) -> bool:
    """Return whether another process has a folder locked; True if that cannot be determined."""
    try:
        descriptor = lock_folder(folder)
    except OSError:
        return True
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor < 0 and folder.exists()


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else written_time(seconds)
