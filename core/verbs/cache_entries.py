"""Inventory of the storage root: datasets, originals, listings of remotes, and leftovers of interrupted work."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ..errors import DatasetNotFoundError, RbtoolError, UsageError, nearest
from ..format import fs
from ..format.documents import written_time
from ..format.hub_address import HUB
from ..format.locate import last_use, stored_datasets, streams_folder
from ..format.manifest import Manifest
from ..format.staging import leftovers, lock_folder
from ..remote.originals import Originals, stored_originals
from .listing import fits, stored_name

What: TypeAlias = Literal["dataset", "checkpoint", "original", "partial", "leftover", "listing", "stream"]

_ORDER = ("dataset", "checkpoint", "original", "partial", "leftover", "listing", "stream")
_LISTING_DAYS = 30
_BLOCK = 512
_WRITING_SECONDS = 60.0  # writing a small file takes less
_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """An item below the root.

    `what` is one of

    - `dataset`, `checkpoint`;
    - `original`: source files that were kept after the conversion;
    - `partial`: source files that are incomplete or not converted yet;
    - `leftover`: temporary files of a process that died, or that is still running;
    - `listing`: the cached listing of a remote;
    - `stream`: shards of a stream, which are fetched again where they are missing.

    `bytes` is the size of all its files. `last_used` is a UTC time: the last opening of a dataset by name or path, the
    last change of anything else. `original` is the name of what a dataset was made from. `in_use` is True while a
    process has it locked, `prunable` if `prune` removes it; `problem` is set if it cannot be read.
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


def cache_entries(root: Path) -> list[CacheEntry]:
    """List everything below the root, sorted by name. Links are not followed.

    Does not change `last_used`. Items that disappear during the scan are left out.
    """
    left = list(_leftovers(root))  # first: it completes an interrupted swap, whose dataset is then listed
    found = [*left, *_half_written(root), *_datasets(root), *_originals(root), *_listings(root), *_streams(root)]
    return sorted(found, key=lambda entry: (entry.name, _ORDER.index(entry.what), str(entry.path)))


def chosen_entries(
    entries: Sequence[CacheEntry], names: Sequence[str | os.PathLike[str]], root: Path
) -> list[CacheEntry]:
    """Select entries by `source:id`, shell pattern, or path below the root; sorted by name.

    Raises DatasetNotFoundError for a name without a match, UsageError for a path that is not that of an entry.
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
    if _entry_path(name, root) is None:
        return UsageError(f"{name} is not below the root {root}, so it is not stored there", hint=hint)
    return UsageError(f"{name} is below the root {root}, but is not a dataset or an original", hint=hint)


# Finding ---------------------------------------------------------------------------------------------


def _leftovers(root: Path) -> Iterator[CacheEntry]:
    for path, destination in leftovers(root):
        count, changed = _measure(path)
        in_use = _in_use(path)
        yield CacheEntry(
            name=stored_name(destination, root),
            what="leftover",
            path=path,
            bytes=count,
            last_used=_time(changed),
            in_use=in_use,
            prunable=not in_use,
        )


def _half_written(root: Path) -> Iterator[CacheEntry]:
    """Yield the cached statistics that a process was writing when it died."""
    folder = root / ".stats"
    for path in sorted(folder.glob(".*.new")) if not folder.is_symlink() else ():
        if path.is_file() and not path.is_symlink():
            facts = path.lstat()
            yield CacheEntry(
                name=".stats:",
                what="leftover",
                path=path,
                bytes=facts.st_size,
                last_used=_time(facts.st_mtime),
                prunable=facts.st_mtime < time.time() - _WRITING_SECONDS,
            )


def _datasets(root: Path) -> Iterator[CacheEntry]:
    for path, manifest in stored_datasets(root):
        if path == root or not path.is_dir():
            continue
        name = stored_name(path, root)
        entry = CacheEntry(
            name=name,
            what="dataset",
            path=path,
            bytes=_measure(path)[0],
            last_used=_time(last_use(path)),
            original=re.sub(r"@[0-9a-f]{8}$", "", name),
        )
        if isinstance(manifest, Manifest):
            of_hub = path.is_relative_to(root / HUB)  # its manifest is that of who made it
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
            name=f"{original.source}:{original.id}",
            what=what,
            path=original.folder,
            bytes=count,
            last_used=_time(changed),
            in_use=in_use,
            prunable=what == "partial" and not in_use,
            problem=problem,
        )


def _state(original: Originals) -> tuple[Literal["original", "partial"], str | None]:
    """Return `original` if the user asked to keep it, also where that cannot be read, and what is wrong with it."""
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
                name=f"{folders[0]}:",
                what="listing",
                path=path,
                bytes=facts.st_size,
                last_used=_time(facts.st_mtime),
                prunable=half_written or facts.st_mtime < oldest,
            )


def _streams(root: Path) -> Iterator[CacheEntry]:
    folder = streams_folder(root)
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if path.is_dir() and not path.is_symlink():
            in_use = _in_use(path)
            files = [one.lstat() for one in path.rglob("*") if one.is_file()]
            yield CacheEntry(
                name=f".streams:{path.name}",
                what="stream",
                path=path,
                bytes=sum(one.st_blocks for one in files) * _BLOCK,  # the files of shards have holes
                last_used=_time(max((one.st_mtime for one in files), default=None)),
                in_use=in_use,
                prunable=not in_use,
            )


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
