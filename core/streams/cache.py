"""Shards that are fetched into a folder of bounded size, in the background and in the order of need."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import queue
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from ..encodings.video import close_videos_below
from ..errors import FormatError, UsageError
from ..format import fs
from ..format.contracts import Closing
from ..format.files import read_regular
from ..progress import readable_size
from ..storages.dataset import OpenShard, ShardedData, StreamShards


class Fetchers:
    """Up to `limit` threads that run what is submitted. They are daemons: a process that ends does not wait for them.

    What a thread leaves half done then is what a killed process leaves.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((future, job))
        if len(self._threads) < self._limit:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="rbtool-stream", daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def end(self, *, wait: bool) -> None:
        """Cancel what did not start, and end the threads; `wait` for what they do."""
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._jobs.get_nowait()
                if left is not None:
                    left[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _work(jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (taken := jobs.get()) is not None:
        future, job = taken
        if future.set_running_or_notify_cancel():
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del future, job, taken  # the stream, which they belong to, can end meanwhile


_LOCK = ".lock"
_PART = ".part"
_BAD = "bad.txt"
_BLOCK = 512
_LOOK_SECONDS = 0.02
_READ_SECONDS = 10.0
"""How long room is waited for that a thread is still reading."""


class ShardFiles(ShardedData, Closing):
    """A dataset somewhere else, whose shards can be fetched one by one; used from several threads at once."""

    @abstractmethod
    def size(self, number: int) -> int:
        """Return how many bytes a shard takes on the disk, 0 where that is not known."""

    @abstractmethod
    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Put a shard into an empty folder. Raises NetworkError and the like; what is there then is removed.

        `more` is called with how many bytes it takes in addition to `size`, where that is known only now, before they
        are written. What it raises is passed on: there is no room for them.
        """

    @abstractmethod
    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder, which stays while the shard or its `decode` is in use."""


class _Lock:
    """A lock of a shard, which is unlocked once nobody refers to it: a thread may still read what was closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


class _HeldShard(NamedTuple):
    """A shard that is open, and the lock that keeps other processes from removing it."""

    shard: OpenShard
    lock: _Lock


class _NoRoomError(Exception):
    """A shard that is not needed yet turned out larger than the room that is left for it."""


class CachedShards(StreamShards):
    """Shards that are fetched when they are needed, into `folder`, of at most `limit` bytes.

    The folder above it is locked, shared, while the stream is open: `rbtool cache prune` leaves it then.

    `threads` of them are fetched at a time. What is not needed is removed when there is no room, the shard first that
    was not used for the longest time. Several processes can have one folder: a shard is fetched once, and stays while
    one of them has it open.

    With `skip_bad` a shard that cannot be read has no rows, and remains so while it is in the folder.

    UsageError where the shards that are open at the same time do not fit; what `ShardFiles` raises is raised when the
    shard is taken, and the next `take` tries again. A pickle opens the folder again.
    """

    def __init__(
        self, files: ShardFiles, folder: Path, limit: int, *, threads: int = 2, skip_bad: bool = False
    ) -> None:
        self.files = files
        self.folder = folder
        self.limit = limit
        self.threads = threads
        self.skip_bad = skip_bad
        self.address, self.identity, self.rows = files.address, files.identity, files.rows
        self.episodes, self.lacking = files.episodes, files.lacking
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._making_room = threading.Lock()
        self._taking = threading.Lock()
        self._held: dict[int, _HeldShard] = {}
        self._closed = weakref.WeakSet[_Lock]()  # of those that are still read
        self._coming: dict[int, Future[None]] = {}
        self._reserved: dict[int, int] = {}
        self._wanted: list[int] = []
        self._pool: Fetchers | None = None
        self._use: int | None = None

    def _mark_use(self) -> None:
        if self._use is None:
            fs.make_folder(self.folder)
            self._use = os.open(self.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            fs.lock(self._use, fcntl.LOCK_SH, self.folder)

    def _unmark_use(self) -> None:
        if self._use is not None:
            os.close(self._use)
            self._use = None

    def __len__(self) -> int:
        return len(self.files)

    # Taking shards -----------------------------------------------------------------------------------

    def take(self, number: int) -> OpenShard:
        """Return a shard; wait for it if it is not there yet."""
        self._after_fork()
        held = self._held.get(number)
        if held is None:
            with self._taking:  # a second thread finds it: a lock that is forgotten would keep the shard for ever
                held = self._held.get(number) or self._held.setdefault(number, self._awaited(number))
        return held.shard

    def _awaited(self, number: int) -> _HeldShard:
        """Open a shard once it is no longer on its way."""
        with self._guard:
            coming = self._coming.pop(number, None)
        if coming is not None:
            coming.exception()  # what it raised may have passed: it is fetched again below, in this thread
        return self._opened(number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Close the other shards, and begin to fetch those that are missing."""
        self._after_fork()
        self._wanted = list(numbers)
        for number in self._held.keys() - set(numbers):
            self._closed.add(self._held.pop(number).lock)
            close_videos_below(self._place(number))  # an open file takes room, also once it was removed
        with self._guard:
            for number in self._coming.keys() - set(numbers):
                if self._coming[number].cancel() or self._coming[number].done():
                    del self._coming[number]
            for number in numbers:
                if number not in self._held and number not in self._coming:
                    self._coming[number] = self._fetchers().submit(functools.partial(self._fetch_ahead, number))

    def _fetchers(self) -> Fetchers:
        if self._pool is None:
            self._pool = Fetchers(self.threads)
        return self._pool

    def _after_fork(self) -> None:
        """Start again in a process that was forked: it has neither the threads nor, of its own, the locks."""
        if self._process != os.getpid():
            self._unmark_use()
            self._begin()
        self._mark_use()

    def _opened(self, number: int) -> _HeldShard:
        """Open a shard, once it is there whole, under a lock that other readers share."""
        while True:
            self._fetch(number, needed=True)
            lock = _Lock(self._locked(number, fcntl.LOCK_SH))
            try:
                if (place := self._place(number)).is_dir():
                    with contextlib.suppress(OSError):  # when it was used last
                        fs.touch(place)
                    shard = self._open(number, place)
                    return _HeldShard(shard if shard.decode is None else shard._replace(kept=lock), lock)
            finally:
                del lock  # where another process removed it in between, or it cannot be opened

    def _open(self, number: int, place: Path) -> OpenShard:
        if self.skip_bad and (place / _BAD).is_file():
            return OpenShard.nothing((read_regular(place / _BAD).decode(),))
        return self.files.open(number, place)

    # Fetching ----------------------------------------------------------------------------------------

    def _fetch_ahead(self, number: int) -> None:
        self._fetch(number, needed=False)

    def _fetch(self, number: int, *, needed: bool) -> None:
        """Put a shard into its place unless it is there; one that is not needed yet is left out for want of room."""
        place, lock = self._place(number), self._locked_to_fetch(number)
        if lock is None:
            return
        make_room = functools.partial(self._make_room, number, needed=needed)
        try:
            if place.is_dir():
                return
            make_room(self.files.size(number))
            part = self._part(number)
            fs.remove(part)  # of a process that was killed
            fs.make_folder(part)
            try:
                self._fetch_into(number, part, make_room)
                fs.sync_folder(part)
                fs.rename(part, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    fs.remove(part)
                raise
        except _NoRoomError:
            pass
        finally:
            self._reserved.pop(number, None)
            os.close(lock)

    def _fetch_into(self, number: int, part: Path, more: Callable[[int], None]) -> None:
        try:
            self.files.fetch(number, part, more)
        except FormatError as error:
            if not self.skip_bad:
                raise
            fs.remove(part)
            fs.make_folder(part)
            fs.write_file(part / _BAD, error.message.encode())

    def _locked_to_fetch(self, number: int) -> int | None:
        """Lock a shard that is missing; None once it is there.

        The process that fetched it may have it open, and locked, for as long as it runs: nobody waits for that.
        """
        while not self._place(number).is_dir():
            with contextlib.suppress(BlockingIOError):
                return self._locked(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(_LOOK_SECONDS)
        return None

    def _make_room(self, number: int, size: int, *, needed: bool) -> None:
        """Reserve `size` more bytes for a shard; UsageError if one that is needed does not fit.

        One that is needed waits for those on their way, which it can remove then, and for those that are still read.
        """
        until = time.monotonic() + _READ_SECONDS
        while (used := self._reserved_unless_full(number, size, needed)) is not None:
            if not needed:
                raise _NoRoomError
            is_read = self._closed and time.monotonic() < until
            if not (is_read or self._reserved.keys() - {number}):
                raise UsageError(
                    f"the shards of {self.address} that are used at the same time take {readable_size(used + size)}, "
                    f"and the cache may take {readable_size(self.limit)}",
                    hint="give it a larger cache_size, or a smaller window",
                )
            time.sleep(_LOOK_SECONDS)

    def _reserved_unless_full(self, number: int, size: int, needed: bool) -> int | None:
        """Remove shards that nobody uses until `size` more bytes fit; if they do not, return how many are used.

        A shard that is not needed yet leaves room for one that is.
        """
        with self._making_room:
            whole = self._reserved.get(number, 0) + size
            room = size if needed else size + whole
            for part in self.folder.glob(f"*{_PART}"):
                self._removed(part)
            there = {place: _files_in(place) for place in self._places()}
            used = self._used(there)
            for place in sorted(there, key=_last_use):
                if used + room <= self.limit:
                    break
                if (needed or int(place.name) not in self._wanted) and self._removed(place):
                    del there[place]
                    used = self._used(there)
            if used + room > self.limit:
                return used
            self._reserved[number] = whole
            return None

    def _used(self, there: Mapping[Path, Mapping[int, int]]) -> int:
        """Count the bytes of files, those that several shards have once, and those that are reserved."""
        files = {file: size for files in there.values() for file, size in files.items()}
        return sum(files.values()) + sum(self._reserved.values())

    def _removed(self, place: Path) -> bool:
        """Remove a shard, or a part of one that a killed process left, unless a process has it open."""
        number = int(place.name.removesuffix(_PART))
        try:
            lock = self._locked(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            part = self._part(number)
            close_videos_below(place)
            if place != part and place.is_dir():
                fs.remove(part)
                fs.rename(place, part)  # a kill from here on does not leave half a shard in its place
            fs.remove(part)
            return True
        finally:
            os.close(lock)

    # Places ------------------------------------------------------------------------------------------

    def _place(self, number: int) -> Path:
        return self.folder / str(number)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number}{_PART}"

    def _places(self) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if path.name.isdecimal())

    def _locked(self, number: int, how: int) -> int:
        """Lock a shard, and return the descriptor whose closing unlocks it."""
        lock = fs.open_to_append(self.folder / f"{number}{_LOCK}")
        try:
            fs.lock(lock, how, self.folder)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        """Forget all shards, and wait for those that are on their way."""
        self._end(wait=True)
        self._begin()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if "_process" in self.__dict__ and not is_finalizing():
            self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        if self._process == os.getpid():
            if self._pool is not None:
                self._pool.end(wait=wait)
            self._unmark_use()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("files", "folder", "limit", "threads", "skip_bad")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _files_in(folder: Path) -> dict[int, int]:
    """Return the inodes of the files of a folder, and the bytes that each takes on the disk: some have holes.

    Another process may remove it meanwhile.
    """
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stated = Path(parent, name).lstat()
                found[stated.st_ino] = stated.st_blocks * _BLOCK
    return found


def _last_use(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except FileNotFoundError:
        return 0.0
