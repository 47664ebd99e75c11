"""Atomic publishing: a result is built in a hidden, locked folder next to its destination and swapped in.

    data/walks                         the destination: missing, the old result or the new one at every instant
    data/.walks.rbtool-new-1f0c…       the staging folder; locked while its process lives
    data/.walks.rbtool-old-92ab…       the old result, moved aside where two folders cannot be exchanged at once

The lock of a killed process is gone, so that the next publication at the same place finds its folder unlocked and
removes it.

Files of a new dataset that equal files of its source can share their disk blocks. On file systems that share blocks
(Btrfs, XFS), the kernel compares the two files and lets them share what is equal; either can be written later without
changing the other. Elsewhere a file becomes a hard link, if nobody writes to the source's file: it has no write
permission for anybody, and belongs to the user of this process. A file that may be written is never linked, since both
datasets would change. If neither is possible, the file stays a copy.

`Publication` has the steps that verbs perform around their work, so that nothing is made twice:

    existing    finish a swap that was interrupted; return an equal result that is at the destination
    refuse      raise an error if anything else is there, unless it may be replaced
    space       raise an error if the result does not fit on the disk
    dry run     return a plan
    build       in a staging folder; after an error it is removed, or kept to resume from
    publish     in one step; if another process was faster, return its result if that is equal
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ..errors import RbtoolError, UsageError
from . import fs
from .contracts import StepReader
from .documents import dump_json
from .files import FileRecord, digest_file, open_folder, open_regular, reading_from
from .manifest import ENV_METADATA, HIDDEN, MANIFEST, SOURCE_DOCUMENTS, TRANSFERS, VIDEOS, Manifest, has_manifest
from .memmap.tree import tree_files
from .open_files import OpenFiles
from .syncing import Durable, Unsynced, require_durable, unsynced_around

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def lock_folder(folder: Path, *, wait: bool = False, within: int | None = None) -> int:
    """Lock a folder for this process and return the descriptor whose closing unlocks it.

    Returns -1 if the folder does not exist, or was removed or replaced meanwhile; without `wait` also if another
    process holds the lock. `within` is the descriptor of the parent folder; then OSError for a link.
    """
    name: str | Path = folder if within is None else folder.name
    try:
        descriptor = os.open(name, _FLAGS | (0 if within is None else _NOFOLLOW), dir_fd=within)
    except FileNotFoundError:
        return -1
    try:
        fs.lock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), folder)
        if os.stat(name, dir_fd=within).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


_MARK = "rbtool-new"
_ASIDE = "rbtool-old"
PARTS_FILE = "split.json"
"""The file in a folder of datasets that one run of `split` wrote; it lists them."""
_LEFTOVER = re.compile(rf"\.(?P<name>.+)\.(?P<mark>{_MARK}|{_ASIDE})-[0-9a-f]{{8}}")


class Staging:
    """A context manager with a fresh, locked folder `path`, which `publish` moves to `destination`.

    Leaving the context without `publish` removes the folder.

    Args:
        destination: where the result goes. A symbolic link stands for its target, except below a storage root.
        replace: whether an rbtool dataset or checkpoint at the destination may be replaced. Anything else but an empty
            folder is refused, and so is a dataset that contains other files.
        takes: decides whether the staging folder of an earlier run is resumed instead of a fresh one.
        below: a storage root; then UsageError for a link on the way from it to the destination.
        durable: what `publish` waits for. Inside the folder of another `Staging`, which syncs everything, nothing.

    Attributes:
        kept: set it to leave the folder behind, unlocked, for a later run to resume.
        taken_up: whether the folder of an earlier run is resumed.
        unusable: a folder of an earlier run that `takes` rejected.
    """

    def __init__(
        self,
        destination: Path,
        *,
        replace: bool = False,
        takes: Callable[[Path], bool] | None = None,
        below: Path | None = None,
        durable: Durable = "full",
    ) -> None:
        self.destination = destination if below is not None else Path(os.path.realpath(destination))
        self._root = below
        self.replace = replace
        self.kept = False
        self.taken_up = False
        self.unusable: Path | None = None
        self._takes = takes
        self.path = self.destination
        self._lock = -1  # the descriptor of `path`
        self._around = contextlib.ExitStack()
        self._parent = -1  # the descriptor of the folder around destination and `path`
        self._durable = require_durable(durable)
        self._unsynced: Unsynced | None = None

    def __enter__(self) -> Self:
        self._require_folders_above()
        mend(self.destination)
        self.refuse_if_taken()
        above = self.destination.parent
        self._parent = self._around.enter_context(fs.folder_below(self._root or above, above, make=True))
        try:
            self._take_up()
            sweep(self.destination, below=self._root)
            while self._lock < 0:
                self.path = _sibling(self.destination, _MARK)
                fs.make_new_folder(self.path, within=self._parent)
                self._lock = lock_folder(self.path, within=self._parent)
            if unsynced_around(self.path) is None:
                self._unsynced = self._around.enter_context(Unsynced(self.path, self.destination, self._durable))
        except BaseException:
            self._unlock()
            raise
        return self

    def _take_up(self) -> None:
        """Lock a folder of an earlier run that is accepted, if there is one."""
        if self._takes is None:
            return
        for leftover in sorted(self.destination.parent.glob(_pattern(self.destination, _MARK))):
            self._lock = -1 if leftover.is_symlink() else lock_folder(leftover, within=self._parent)
            if self._lock < 0:
                continue
            self.unusable = leftover
            try:
                self.taken_up = self._takes(leftover)
            finally:
                if not self.taken_up:
                    os.close(self._lock)
                    self._lock = -1
            if self.taken_up:
                self.path, self.unusable = leftover, None
                return

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._around.close()

    def __exit__(self, *raised: object) -> None:
        try:
            if not self.kept:
                with contextlib.suppress(OSError):  # a leftover, which the next run sweeps
                    fs.remove(self.path, within=self._parent)
        finally:
            self._unlock()

    def _require_place(self) -> None:
        """Raise UsageError for a destination below a file, and for one inside a dataset."""
        self._require_folders_above()
        around = next((folder for folder in self.destination.parents if has_manifest(folder)), None)
        if around is not None:
            raise UsageError(f"{self.destination} is inside the dataset {around}", hint="choose another destination")

    def _require_folders_above(self) -> None:
        file = next((path for path in self.destination.parents if path.exists() and not path.is_dir()), None)
        if file is not None:
            raise UsageError(
                f"{file} is a file, and the destination {self.destination} is below it",
                hint="choose another destination",
            )

    def refuse_if_taken(self) -> None:
        """Raise UsageError if what is at the destination may not be replaced; changes nothing."""
        if self._root is not None:
            fs.refuse_links(self._root, self.destination)
        self._require_place()
        if not self.destination.exists() or (self.destination.is_dir() and not any(self.destination.iterdir())):
            return
        if not is_ours(self.destination) and not (self.destination / PARTS_FILE).is_file():
            raise UsageError(
                f"{self.destination} already exists and is not an rbtool dataset or checkpoint; left unchanged",
                hint="choose another destination",
            )
        if not self.replace:
            raise UsageError(f"{self.destination} already exists", hint="add --force to replace it")
        _refuse_foreign_files(self.destination, "replaced")

    def publish(self, name: str | None = None) -> bool:
        """Move the folder, or the file or folder `name` inside it, to the destination; an old result is removed.

        Before that everything is synced to the disk, to the degree of `durable`. Returns False, and publishes nothing,
        if another process put something there in the meantime and `replace` is off.
        """
        built = self.path / name if name else self.path
        if self._unsynced is not None:
            self._unsynced.sync(built)
        if self.replace:
            self.refuse_if_taken()  # hours may have passed since the last look
        published = self._place_folder(built) if built.is_dir() else self._place_file(built)
        if published and self._unsynced is not None:
            self._unsynced.sync_name(self._parent, self.destination)
        with contextlib.suppress(OSError):  # the result is in place; the next run sweeps
            sweep(self.destination, below=self._root)  # also folders whose lock was held by workers of a killed process
        return published

    def _folder_of(self, built: Path) -> int:
        return self._parent if built == self.path else self._lock

    def _place_file(self, built: Path) -> bool:
        if not self.replace:
            try:
                fs.rename_new(built, self.destination, within=self._folder_of(built), into=self._parent)
            except FileExistsError:
                return False
        elif self.destination.is_dir():
            self._swap(built)
        else:
            fs.rename(built, self.destination, within=self._folder_of(built), into=self._parent)
        return True

    def _place_folder(self, built: Path) -> bool:
        try:
            # A rename succeeds if the destination is missing or an empty folder.
            fs.rename(built, self.destination, within=self._folder_of(built), into=self._parent)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            if not self.replace:
                return False
            self._swap(built)
        return True

    def _swap(self, built: Path) -> None:
        within, into = self._folder_of(built), self._parent
        if fs.exchange(built, self.destination, within=within, into=into):
            return
        aside, lock = _sibling(self.destination, _ASIDE), lock_folder(self.destination, within=into)
        try:
            fs.rename(self.destination, aside, within=into)
            fs.rename(built, self.destination, within=within, into=into)
        finally:
            if lock >= 0:
                os.close(lock)


def new_sibling(destination: Path, *, aside: bool = False) -> Path:
    """Return a new hidden path next to a destination, for a new result or, with `aside`, for the old one."""
    return _sibling(destination, _ASIDE if aside else _MARK)


def is_ours(path: Path) -> bool:
    """Return whether rbtool wrote `path`: a folder with a manifest, or a checkpoint in an HDF5 file."""
    if path.is_dir():
        return has_manifest(path)
    if not path.is_file():
        return False
    with os.fdopen(open_regular(path), "rb") as file, reading_from(path):
        return file.read(len(FILE_MAGIC)) == FILE_MAGIC


def _refuse_foreign_files(path: Path, deed: str) -> None:
    """Raise UsageError if the folder of a dataset contains a file of the user, which would be lost with the rest."""
    if not path.is_dir():
        return
    if not has_manifest(path) and (path / PARTS_FILE).is_file():
        for part in sorted(path.iterdir()):
            if has_manifest(part):
                _refuse_foreign_files(part, deed)
            elif part.name != PARTS_FILE:
                raise _foreign(part, path, deed)
        return
    hint = ""
    try:
        listed = {path / file.path for file in Manifest.load(path).files} | {path / MANIFEST, path / TRANSFERS}
    except (RbtoolError, OSError):
        listed = named_files(path) | _hidden_files(path)
        hint = f"{path / MANIFEST} is damaged: move your own files away, and remove the rest yourself"
    if (strange := next((file for file in files_below(path) if file not in listed), None)) is not None:
        raise _foreign(strange, path, deed, hint)


def _foreign(file: Path, path: Path, deed: str, hint: str = "") -> UsageError:
    return UsageError(f"{file} is not part of the dataset around it; nothing is {deed}", hint=hint or "move it away")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, and all links, also those to folders."""
    return (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())


def named_files(folder: Path) -> set[Path]:
    """Return the files that belong to a memory-map directory according to its `meta.json` files.

    Also files that always have the same name. Files named by an unreadable `meta.json` are missing.
    """
    found = {folder / ENV_METADATA, folder / "storage_metadata.json"}
    with contextlib.suppress(RbtoolError, OSError), OpenFiles(folder) as files:
        found |= {folder / name for name in tree_files(files)}
    return found


_WRITTEN_HERE = (
    *("manifest.json", "transfers.jsonl", "episodes_text.jsonl", "shard-digests.json", "digests.json"),
    *("commits.bin", "commits_copy.bin", "recording.json"),
)
"""The files that may be in the hidden folder of any dataset."""


def _hidden_files(folder: Path) -> set[Path]:
    """Return the files in the hidden folder of a dataset with a damaged manifest that are certainly rbtool's.

    Kept videos and files with variable names count if the remains of the manifest contain their paths.
    """
    found = {folder / HIDDEN / name for name in _WRITTEN_HERE} | named_files(folder / HIDDEN / "episodes")
    found |= {*(folder / SOURCE_DOCUMENTS).glob("*.json"), *(folder / SOURCE_DOCUMENTS).glob("*.jsonl")}
    left = b""
    with contextlib.suppress(RbtoolError, OSError), os.fdopen(open_regular(folder / MANIFEST), "rb") as file:
        left = file.read()
    named = {file: dump_json(file.relative_to(folder).as_posix()).encode() for file in files_below(folder / HIDDEN)}
    return found | {file for file, name in named.items() if name in left}


FILE_MAGIC = b'{\n "format_version": '
"""The first bytes of a checkpoint in one file: the manifest precedes the data."""


def mend(destination: Path) -> None:
    """Undo a swap that was interrupted between its two renames: move the old result back to its destination.

    Only systems that cannot exchange two folders at once need it.
    """
    destination = Path(os.path.realpath(destination))
    if destination.exists() or not destination.parent.is_dir():
        return
    for aside in sorted(destination.parent.glob(_pattern(destination, _ASIDE))):
        with _folder_around(aside) as within:
            lock = -1 if aside.is_symlink() else lock_folder(aside, within=within)
            if lock < 0:
                continue
            try:
                fs.rename(aside, destination, within=within)
                return
            except FileExistsError:
                return  # another process did it, or published something newer
            finally:
                os.close(lock)


def sweep(destination: Path, *, below: Path | None = None) -> None:
    """Remove the unlocked leftovers of processes that died while publishing at this destination.

    Here and below, UsageError for a link on the way from the storage root `below` to the removed path.
    """
    for mark in (_MARK, _ASIDE):
        for leftover in destination.parent.glob(_pattern(destination, mark)):
            remove_leftover(leftover, below=below)


def _folder_around(path: Path, below: Path | None = None) -> contextlib.AbstractContextManager[int]:
    """Open the folder that contains a path; UsageError for a link on the way from the storage root `below`."""
    return fs.folder_below(path.parent if below is None else below, path.parent)


class Leftover(NamedTuple):
    """A folder or file that a process built, or moved aside, for `destination`; the process may still use it."""

    path: Path
    destination: Path


def leftovers(root: Path) -> Iterator[Leftover]:
    """Yield all staging folders and files below the root, also those in use; follow no links.

    An interrupted swap is undone first, since the folder that it moved aside is a dataset and not a leftover.
    """
    for folder, names, files in os.walk(root):
        here = Path(folder)
        if has_manifest(here):
            names.clear()
            files.clear()
        for found in filter(None, map(_LEFTOVER.fullmatch, sorted((*names, *files)))):
            path, destination = here / found[0], here / found["name"]
            if found["mark"] == _ASIDE and not destination.exists():
                with contextlib.suppress(OSError):  # a disk that cannot be written to
                    mend(destination)
            ours = (path.is_dir() or path.is_file()) and not path.is_symlink()
            if ours and (found["mark"] == _MARK or destination.exists()):
                yield Leftover(path, destination)
        names[:] = [name for name in names if not name.startswith(".")]


def remove_leftover(path: Path, *, below: Path | None = None) -> bool:
    """Remove a staging folder or file unless a process uses it; return whether it is gone."""
    with _folder_around(path, below) as within, contextlib.suppress(FileNotFoundError):  # others may remove it, too
        lock = -1 if path.is_symlink() else lock_folder(path, within=within)
        if lock < 0 and not path.is_symlink():
            return not path.exists()
        try:
            fs.remove(path, within=within)
        finally:
            if lock >= 0:
                os.close(lock)
    return True


def require_removable(path: Path) -> None:
    """Raise UsageError unless `path` is a dataset or checkpoint without other files that no process is replacing."""
    if path.is_symlink() or not is_ours(path):
        raise UsageError(f"{path} is not an rbtool dataset or checkpoint; left unchanged")
    _refuse_foreign_files(path, "removed")
    lock = lock_folder(path)
    if lock < 0:
        raise _busy(path)
    os.close(lock)


def remove_dataset(path: Path, *, below: Path | None = None) -> None:
    """Remove a dataset that `require_removable` allows; if interrupted, the whole dataset or a leftover remains."""
    require_removable(path)
    sweep(path, below=below)  # otherwise a folder left by a swap would be mistaken for the dataset and restored
    if any(path.parent.glob(_pattern(path, _ASIDE))) or not remove_at_once(path, below=below):
        raise _busy(path)


def remove_at_once(folder: Path, *, near: Path | None = None, below: Path | None = None) -> bool:
    """Remove a folder so that nobody sees half of it: first rename it to a leftover, next to `near` or to itself.

    Returns:
        False, with nothing changed, if it does not exist or another process has it locked.
    """
    try:
        with _folder_around(folder, below) as within:
            lock = lock_folder(folder, within=within)
            if lock < 0:
                return False
            try:
                remove_aside(folder, near or folder, below=below)
            finally:
                os.close(lock)
    except FileNotFoundError:
        return False
    return True


def remove_aside(folder: Path, near: Path, *, below: Path | None = None) -> None:
    """Remove a folder that this process has locked, as `remove_at_once` does."""
    aside = _sibling(near, _MARK)  # `mend` never moves a folder with this mark back
    with _folder_around(folder, below) as within, _folder_around(aside, below) as into:
        fs.rename(folder, aside, within=within, into=into)
        fs.fsync(into, aside.parent)
        with contextlib.suppress(FileNotFoundError):
            fs.remove(aside, within=into)


def _busy(path: Path) -> UsageError:
    return UsageError(f"{path} is in use by another process; nothing is removed", hint="try again when it is done")


def _sibling(destination: Path, mark: str) -> Path:
    return destination.with_name(f".{destination.name}.{mark}-{secrets.token_hex(4)}")


def _pattern(destination: Path, mark: str) -> str:
    name = "".join(f"[{char}]" if char in "*?[" else char for char in destination.name)
    return f".{name}.{mark}-" + "[0-9a-f]" * 8


_LEAST = 4096
"""The size of a block in bytes. A smaller file takes one block in any case."""
_AT_ONCE = 16 << 20  # the most bytes that file systems share in one call
_FIDEDUPERANGE = 0xC0189436
_RANGE = struct.Struct("=QQHHIqQQiI")  # struct file_dedupe_range, with one struct file_dedupe_range_info


def share_files(folder: Path, made: Manifest, sources: Iterable[StepReader], *, links: bool = False) -> int:
    """Let the files of a complete, unpublished dataset share disk blocks with equal files of its sources.

    Files are equal if their sizes and digests are; the kernel compares their bytes again. A file without an equal may
    share its first blocks with the file of the same name in the first source, as after a merge. `links` allows hard
    links, for kept videos and between datasets in layout `ted`; files of other layouts may be appended to later. Files
    that cannot be shared stay copies, without an error.

    Returns:
        The number of bytes shared.
    """
    known: dict[tuple[int, str], list[tuple[Path, bool]]] = {}
    named: dict[str, list[tuple[Path, bool]]] = {}
    for source in sources:
        manifest = source.manifest
        stays = links and manifest.kind == "dataset" and manifest.layout == made.layout == "ted"
        for file in manifest.files if source.path.is_dir() else ():
            if file.size >= _LEAST:
                may_link = stays or (links and file.path.startswith(VIDEOS))
                known.setdefault((file.size, file.digest), []).append((source.path / file.path, may_link))
                named.setdefault(file.path, [(source.path / file.path, False)])
    shared = 0
    for file in made.files:
        for place, stays in known.get((file.size, file.digest), []) or named.get(file.path, []):
            found = file.size if _is_same(place, folder / file.path) else share_blocks(place, folder / file.path)
            if not found and stays and _link(place, folder / file.path, file):
                found = file.size
            shared += found
            if found:
                break
    return shared


def _is_same(one: Path, other: Path) -> bool:
    """Return whether both paths are hard links to the same file."""
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except OSError:
        return False


def share_blocks(source: Path, file: Path) -> int:
    """Let a file share its blocks with another one of the same bytes; return the number of bytes shared.

    The kernel compares both files while they cannot change, and does not share a range that differs anywhere.
    """
    shared = 0
    if sys.platform == "linux":
        with (
            contextlib.suppress(OSError, RbtoolError),  # another file system, or one that cannot
            contextlib.ExitStack() as stack,
            fs.announced("share", file),
        ):
            one = open_regular(source)
            stack.callback(os.close, one)
            other = fs.open_to_change(file)
            stack.callback(os.close, other)
            sizes = {os.fstat(one).st_size, os.fstat(other).st_size}
            size = min(sizes) if len(sizes) == 1 else min(sizes) // _LEAST * _LEAST  # of the shorter, whole blocks
            while shared < size and (found := _share_range(one, other, shared, min(_AT_ONCE, size - shared))):
                shared += found
    return shared


def _share_range(one: int, other: int, start: int, size: int) -> int:
    about = bytearray(_RANGE.pack(start, size, 1, 0, 0, other, start, 0, 0, 0))
    fcntl.ioctl(one, _FIDEDUPERANGE, about, True)
    found, status = _RANGE.unpack(about)[7:9]
    return int(found) if status == 0 else 0


def is_read_only(found: os.stat_result) -> bool:
    """Whether a file is one that nobody writes to, root aside: none has the permission, and this user gives it."""
    return stat.S_ISREG(found.st_mode) and not found.st_mode & 0o222 and found.st_uid == os.geteuid()


def may_be_shared(found: os.stat_result) -> bool:
    """Whether a file may also belong to another dataset, and must not be written to."""
    return found.st_nlink > 1 or not found.st_mode & 0o222


def link_to_read_only(source: Path, path: Path) -> bool:
    """Make a hard link at `path` to a file, if that is read-only; return whether there is one."""
    try:
        folder = open_folder(source.parent)
        try:
            if not is_read_only(os.stat(source.name, dir_fd=folder, follow_symlinks=False)):
                return False
            fs.link_to(Path(source.name), path, among=folder)
        finally:
            os.close(folder)
        if is_read_only(path.lstat()):  # check the linked file itself: the name may have led to another file before
            return True
        fs.remove(path)
    except (OSError, RbtoolError):  # another file system, too many links, none at all there
        pass
    return False


def _link(place: Path, file: Path, listed: FileRecord) -> bool:
    """Replace `file` by a hard link to `place`, if that is read-only and has the listed bytes."""
    aside = file.with_name(f".{file.name}.shared")
    try:
        equal = link_to_read_only(place, aside) and digest_file(aside) == listed.digest
        if equal:
            fs.rename(aside, file)
        return equal
    except (OSError, RbtoolError):
        return False
    finally:
        fs.remove(aside)


Content = TypeVar("Content")
_SMALL_FILES = 64 << 10  # roughly the size of metadata and of partly used blocks


class Outcome(NamedTuple, Generic[Content]):
    """The content at the destination, or of a plan, and further entries of a verb's result."""

    content: Content
    entries: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


@dataclass(frozen=True, kw_only=True)
class Publication(Generic[Content]):
    """The steps that build one result and publish it at the destination of `staging`.

    `find` returns an equal result at the destination and None for anything else, or raises UsageError if it can say
    what is there instead. `needed` returns the size of the result in bytes, None if it is not known. `name` is the file
    or folder inside the staging folder that is published, by default all of it.
    """

    staging: Staging
    find: Callable[[], Content | None] = lambda: None
    needed: Callable[[], int | None] = lambda: None
    dry_run: bool = False
    name: str | None = None

    def run(
        self, plan: Callable[[], Outcome[Content]], build: Callable[[Staging], Outcome[Content]]
    ) -> Outcome[Content]:
        """Return the existing result, the plan of a dry run, or what is built and published.

        Raises UsageError if something else is at the destination, OutOfSpaceError, and what the callables raise. The
        destination is unchanged after an error.
        """
        return self.prepare(plan) or self.publish(build)

    def prepare(self, plan: Callable[[], Outcome[Content]]) -> Outcome[Content] | None:
        """Perform all steps before building; return the result if nothing has to be built."""
        if (there := self.existing()) is not None:
            return there
        self.staging.refuse_if_taken()
        if (needed := self.needed()) is not None:
            fs.require_space(self.staging.destination.parent, needed + _SMALL_FILES)
        if not self.dry_run:
            return None
        planned = plan()
        return Outcome(planned.content, {**planned.entries, "dry_run": True})

    def existing(self) -> Outcome[Content] | None:
        """Return an equal result at the destination; None if there is none, or if it is to be replaced."""
        mend(self.staging.destination)
        there = None if self.staging.replace else self.find()
        return None if there is None else Outcome(there, {"already_there": True, "dry_run": self.dry_run})

    def publish(
        self,
        build: Callable[[Staging], Outcome[Content]],
        keeping: Callable[[Staging], AbstractContextManager[None]] | None = None,
    ) -> Outcome[Content]:
        """Build and publish; return the result of another process that was faster, if it is equal.

        `keeping` is a context around both, which decides whether the staging folder is kept after an error.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.staging)
            except UsageError:
                if (there := self.existing()) is None:
                    raise
                return there
            if keeping is not None:
                stack.enter_context(keeping(self.staging))
            made = build(self.staging)
            if self.staging.publish(self.name):
                return made
        there = self.existing()
        if there is None or _digest(there.content) != _digest(made.content):
            raise UsageError(
                f"{self.staging.destination} was just created by another process", hint="add --force to replace it"
            )
        return there


def _digest(content: Any) -> str | None:
    return content.content_digest if isinstance(content, Manifest) else None


_BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    ".html": (b"<!doctype html",),
    ".svg": (b"<?xml", b"<svg"),
    ".png": (b"\x89PNG\r\n",),
    ".pdf": (b"%PDF-",),
    ".gif": (b"GIF87a", b"GIF89a"),
    ".mp4": (b"ftyp",),
}
_LONGEST = 16
_SKIPPED = {".mp4": 4}  # the offset of the bytes that are compared


def require_suffix(path: Path, suffixes: tuple[str, ...]) -> str:
    """Return the suffix of a path in lower case; UsageError unless it is one of `suffixes`."""
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise UsageError(f"{path} ends in {suffix or 'no suffix'}, expected {' or '.join(suffixes)}")
    return suffix


class FileStaging(Staging):
    """A staging folder for a single file, which may only replace a file of the same kind, according to its suffix."""

    def refuse_if_taken(self) -> None:
        path = self.destination
        self._require_place()
        if path.is_dir():
            raise UsageError(f"{path} is a folder, and a file is to be written", hint="choose another destination")
        if not path.exists():
            return
        if not self.replace:
            raise UsageError(f"{path} already exists", hint="choose another destination, or add --force")
        if not _is_alike(path):
            raise UsageError(
                f"{path} already exists and its content is not {path.suffix.upper()[1:]}; left unchanged",
                hint="choose another destination",
            )

    def publish_file(self, name: str) -> None:
        """Move the file `name` to the destination; UsageError if another process put something there meanwhile."""
        if not self.publish(name):
            raise UsageError(f"another process put something at {self.destination}", hint="add --force to replace it")


def _is_alike(path: Path) -> bool:
    """Whether the content of a file matches its suffix; an empty file counts as well."""
    suffix = path.suffix.lower()
    with os.fdopen(open_regular(path), "rb") as file:
        begin = file.read(_LONGEST)
    return not begin or begin[_SKIPPED.get(suffix, 0) :].startswith(_BEGINNINGS.get(suffix, ()))
