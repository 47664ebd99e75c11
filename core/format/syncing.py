"""New files, and syncs that wait: all files of a staged folder come to the disk together, before it is published.

A file system with a journal writes that once for all of them, where a sync after each file has it written each time.
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
"""Descriptors that are held, as far as a quarter of the process's limit allows; files beyond are synced at once."""
_AT_ONCE = 16
"""Syncs that wait at a time: each has the disk empty its cache, and the system joins those that come together."""
_CHUNK = 1 << 20
_LUMP = 4 << 20
"""After so many bytes of a file the disk is asked to begin."""
_RESERVED_FROM = 1 << 19
"""Bytes from which on the system finds room for a file at once: for small ones the call costs more than it saves."""
_staged: list[Unsynced] = []

Durable: TypeAlias = Literal["none", "data", "full"]
"""What is on the disk when a result is in place, in case the machine itself stops.

`none`: nothing is waited for; `data`: the bytes of all files; `full`: also the folders and the name. A process that is
killed, at any of the three, leaves the old result or the new one, whole.
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
    """The innermost `Unsynced` whose folder a path is below; None if there is none."""
    around = (one for one in tuple(_staged) if one.contains(path))
    return max(around, key=lambda one: len(one.prefix), default=None)


def sync_file(descriptor: int, path: Path) -> None:
    """Bring a file to the disk: at once, or, below the folder of an `Unsynced`, when that is synced."""
    around = unsynced_around(path)
    if around is None or not around.hold(descriptor):
        fs.fsync(descriptor, path)


def replace_file(path: Path, data: bytes) -> None:
    """Put these bytes at `path` at once; below the folder of an `Unsynced`, which nobody reads yet, without syncs."""
    if unsynced_around(path) is None:
        fs.replace_file(path, data)
    else:
        fs.remove(path)
        write_file(path, data)


def skip_sync(path: Path, found: os.stat_result) -> None:
    """Record that the bytes of a file at `path` are on the disk, as of a hard link to one that was published."""
    if (around := unsynced_around(path)) is not None:
        around.skip(found)


def published_place(path: Path) -> Path:
    """Return where a path below folders that are being staged will be once these are published."""
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
    """A new file, in folders that are created if necessary, written from its beginning; `size` is what was written.

    Args:
        mode: its permissions.
        expected: the number of bytes, if known, for which the system allocates space at once.
        resumed: the record of the existing beginning of the file, after which writing continues; CorruptDataError if
            the file's first bytes do not match it.
    """

    def __init__(self, path: Path, resumed: FileRecord | None = None, *, expected: int = 0, mode: int = 0o666) -> None:
        fs.make_folder(path.parent)
        self.path = path
        self.size = 0
        self._started = 0  # up to which byte the disk was asked to begin
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
        while data := os.read(self.descriptor, _CHUNK):  # the position is at the end then
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
        """Let the disk begin with what was written, if that is `lump` bytes or more and anybody is to wait for them."""
        if self.size - self._started < lump:
            return
        around = unsynced_around(self.path)
        if around is None or around.durable != "none":
            fs.start_syncing(self.descriptor, self._started, self.size - self._started)
        self._started = self.size

    def sync(self) -> None:
        """Bring all of it to the disk, as `sync_file` does; a file closed by `complete` already is there."""
        if self.descriptor >= 0:
            sync_file(self.descriptor, self.path)

    def complete(self) -> None:
        """Give back room that was not needed, sync the file and close it; harmless when done twice."""
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
    """The files in a folder whose syncs wait until `sync`. A context manager: after it, nothing waits any more.

    A file stays open from the first write to the sync, since a failure to write it to the disk is only reported to
    those that have it open. `destination` is where the folder will be published, `durable` states what `sync` waits
    for.
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
        """Leave out a file that is on the disk already."""
        self._done.add((found.st_dev, found.st_ino))

    def hold(self, descriptor: int) -> bool:
        """Let the system begin with a file; False where too many wait already."""
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
        """Wait until all that is at `built`, a file or a folder below this one, is on the disk, with its folders."""
        if self.durable == "none":
            return
        if built.is_dir():
            folders, found = _all_below(built)
        else:
            place = built.lstat()
            folders, found = [], {str(built): (place.st_dev, place.st_ino)}
        # Descriptors kept open are closed to make room for the other files'.
        waiting = sorted(
            (path for path in found if found[path] not in self._done), key=lambda path: found[path] not in self._held
        )
        files, together = [Path(path) for path in waiting], _most_held()
        for start in range(0, len(files), together):
            self._sync_together(files[start : start + together])
        if self.durable == "full":
            run_together([partial(fs.sync_folder, Path(folder)) for folder in folders], _AT_ONCE)

    def sync_name(self, parent: int, path: Path) -> None:
        """Wait until the name at which the folder was put is on the disk; `parent` is the descriptor around it."""
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
    """Return a folder and those in it, and the device and inode of each file."""
    folders, files = [str(folder)], dict[str, tuple[int, int]]()
    for around in folders:  # which grows meanwhile
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
