"""New files, and delayed syncs: all files of a staged folder are synced together, before the folder is published.

A file system with a journal then writes the journal once for all files, and not once for each.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypeAlias, get_args

from ..errors import CorruptDataError, UsageError
from . import fs
from .files import FileRecord, Hasher, open_regular
from .threads import run_together

_MOST_HELD = 128
"""The most descriptors that stay open for a later sync, also at most a quarter of the process's limit; further files
are synced at once."""
_AT_ONCE = 16
"""Threads that sync: each sync flushes the disk's cache, and the system combines simultaneous flushes."""
_CHUNK = 1 << 20
_LUMP = 4 << 20
"""The number of bytes after which writing to the disk is started."""
_RESERVED_FROM = 1 << 19
"""The size in bytes from which on disk space is reserved: for smaller files the call costs more than it saves."""
_staged: list[Unsynced] = []

Durable: TypeAlias = Literal["none", "data", "full"]
"""What publishing waits for, which matters only if the machine itself stops.

`none`: nothing; `data`: the bytes of all files are on the disk; `full`: also the folders and the name. If only the
process is killed, the old or the new result is complete at each level.
"""


def require_durable(durable: Durable) -> Durable:
    """Return the level; UsageError for anything but the three."""
    if durable not in get_args(Durable):
        raise UsageError(f"durable is {durable!r}; it can be 'none', 'data' or 'full'")
    return durable


def _most_held() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_HELD if limit == resource.RLIM_INFINITY else min(_MOST_HELD, max(1, limit // 4))


def unsynced_around(path: Path) -> Unsynced | None:
    """Return the innermost `Unsynced` whose folder contains a path; None if there is none."""
    around = (one for one in tuple(_staged) if one.contains(path))
    return max(around, key=lambda one: len(one.prefix), default=None)


def sync_file(descriptor: int, path: Path) -> None:
    """Sync a file to the disk: at once, or, inside the folder of an `Unsynced`, together with that folder."""
    around = unsynced_around(path)
    if around is None or not around.hold(descriptor):
        fs.fsync(descriptor, path)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically; inside the folder of an `Unsynced`, which nobody reads yet, simply write it anew."""
    if unsynced_around(path) is None:
        fs.replace_file(path, data)
    else:
        fs.remove(path)
        write_file(path, data)


def skip_sync(path: Path, found: os.stat_result) -> None:
    """Record that a file at `path` is on the disk already, such as a hard link to a published file."""
    if (around := unsynced_around(path)) is not None:
        around.skip(found)


def published_place(path: Path) -> Path:
    """Return the path that a file in a staging folder will have after publication; other paths are unchanged."""
    for staged in sorted(_staged, key=lambda one: len(one.prefix), reverse=True):
        if staged.contains(path):
            path = staged.destination / os.path.relpath(path, staged.prefix)
    return path


def write_file(path: Path, data: bytes) -> None:
    """Create a small file with these bytes and sync it as `sync_file` does."""
    descriptor = fs.create(path)
    try:
        fs.write(descriptor, memoryview(data), path)
        sync_file(descriptor, path)
    finally:
        fs.close(descriptor, path)


class NewFile:
    """A new file that is written from its beginning; missing folders are created.

    `size` is the number of bytes written so far.

    Args:
        path: where the file is.
        resumed: the size and digest of an existing beginning of the file, after which writing continues;
            CorruptDataError if the file's first bytes do not match.
        expected: the final number of bytes, if known; disk space is reserved for it.
        mode: the permissions.
    """

    def __init__(self, path: Path, resumed: FileRecord | None = None, *, expected: int = 0, mode: int = 0o666) -> None:
        fs.make_folder(path.parent)
        self.path = path
        self.size = 0
        self._started = 0  # writing to the disk was started up to this byte
        self._hasher = Hasher()
        self._reserved = expected if expected > _RESERVED_FROM else 0
        self.descriptor = fs.create(path, mode=mode) if resumed is None else fs.open_to_change(path)
        try:
            if resumed is not None:
                self._continue(resumed)
            if self._reserved:
                fs.reserve(self.descriptor, self._reserved)
        except BaseException:
            self.close()
            raise

    def _continue(self, resumed: FileRecord) -> None:
        if os.fstat(self.descriptor).st_size < resumed.size:
            raise CorruptDataError(f"{self.path} is shorter than the {resumed.size:,} bytes that were written")
        fs.truncate(self.descriptor, resumed.size, self.path)
        while data := os.read(self.descriptor, _CHUNK):  # leaves the position at the end
            self._hasher.update(data)
            self.size += len(data)
        if (self.size, self.digest) != resumed[1:]:
            raise CorruptDataError(f"{self.path} does not hold the bytes that were written")

    @property
    def digest(self) -> str:
        """The digest of the bytes that were appended."""
        return self._hasher.digest

    def append(self, data: memoryview) -> None:
        """Write bytes at the end."""
        self._hasher.update(data)
        fs.write(self.descriptor, data, self.path)
        self.size += len(data)
        self.start_syncing(_LUMP)

    def start_syncing(self, lump: int = 1) -> None:
        """Start writing new bytes to the disk, if there are at least `lump` of them and a sync is to follow."""
        if self.size - self._started < lump:
            return
        around = unsynced_around(self.path)
        if around is None or around.durable != "none":
            fs.start_syncing(self.descriptor, self._started, self.size - self._started)
        self._started = self.size

    def sync(self) -> None:
        """Sync the file as `sync_file` does; `complete` has done so already."""
        if self.descriptor >= 0:
            sync_file(self.descriptor, self.path)

    def complete(self) -> None:
        """Free reserved space that was not needed, sync the file and close it; harmless when done twice."""
        if self._reserved > self.size and self.descriptor >= 0:
            fs.truncate(self.descriptor, self.size, self.path)
        self.sync()
        self.close()

    def close(self) -> None:
        """Close the descriptor; harmless when closed already."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1  # it is gone even where closing it fails
            fs.close(descriptor, self.path)


class Unsynced:
    """A folder whose files are synced together by `sync`, and not one by one. A context manager.

    A file stays open from the first write to the sync, because the system reports a failed write to the disk only to
    descriptors that were open at that time. `destination` is where the folder will be published, `durable` states what
    `sync` waits for.
    """

    def __init__(self, folder: Path, destination: Path | None = None, durable: Durable = "full") -> None:
        self.prefix = f"{folder}{os.sep}"
        self.destination = destination or folder
        self.durable = durable
        self._held: dict[tuple[int, int], int] = {}  # descriptors by device and inode: folders may be renamed
        self._done: set[tuple[int, int]] = set()

    def contains(self, path: Path) -> bool:
        """Whether a path is below the folder."""
        return str(path).startswith(self.prefix)

    def skip(self, found: os.stat_result) -> None:
        """Record that a file is on the disk already and needs no sync."""
        self._done.add((found.st_dev, found.st_ino))

    def hold(self, descriptor: int) -> bool:
        """Keep a file open until `sync` and start writing it to the disk; False if too many are open already."""
        self._done.discard(_identity(descriptor))
        if self.durable == "none":
            return True
        if len(self._held) >= _most_held():
            return False
        try:
            kept = os.dup(descriptor)
        except OSError:  # no more may be open
            return False
        fs.start_syncing(descriptor)
        before = self._held.setdefault(_identity(kept), kept)
        if before != kept:
            os.close(kept)
        return True

    def sync(self, built: Path) -> None:
        """Wait until the file or folder `built` inside this one is on the disk, with all its files and folders."""
        if self.durable == "none":
            return
        if built.is_dir():
            folders, found = _all_below(built)
        else:
            place = built.lstat()
            folders, found = [], {str(built): (place.st_dev, place.st_ino)}
        # First the files that are open, since their descriptors are then closed.
        waiting = sorted(
            (path for path in found if found[path] not in self._done), key=lambda path: found[path] not in self._held
        )
        files, together = [Path(path) for path in waiting], _most_held()
        for start in range(0, len(files), together):
            self._sync_together(files[start : start + together])
        if self.durable == "full":
            run_together([partial(fs.sync_folder, Path(folder)) for folder in folders], _AT_ONCE)

    def sync_name(self, parent: int, path: Path) -> None:
        """Wait until the name of the published folder is on the disk; `parent` is the descriptor of its parent."""
        if self.durable == "full":
            fs.fsync(parent, path.parent)

    def _sync_together(self, files: list[Path]) -> None:
        with contextlib.ExitStack() as stack:
            opened = [(stack.enter_context(self._descriptor(path)), path) for path in files if not path.is_symlink()]
            for descriptor, _ in opened:
                fs.start_syncing(descriptor)
            for descriptor, path in opened:
                fs.wait_for_writes(descriptor, path)
            run_together([partial(fs.fsync, descriptor, path) for descriptor, path in opened], _AT_ONCE)

    @contextlib.contextmanager
    def _descriptor(self, path: Path) -> Iterator[int]:
        descriptor = open_regular(path)
        held = self._held.pop(_identity(descriptor), None)
        if held is not None:
            os.close(descriptor)
            descriptor = held
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        _staged.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _staged.remove(self)
        while self._held:
            os.close(self._held.popitem()[1])


def _all_below(folder: Path) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Return a folder with all folders below it, and the device and inode of each file below it."""
    folders, files = [str(folder)], dict[str, tuple[int, int]]()
    for around in folders:  # the loop also visits folders that it appends
        with os.scandir(around) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    place = entry.stat(follow_symlinks=False)
                    files[entry.path] = place.st_dev, place.st_ino
    return folders, files


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
