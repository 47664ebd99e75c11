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
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FormatError, UsageError
from ...format import fs
from ...format.contracts import Closing
from ...format.digest import read_regular
from ...progress import readable_size
from ...storages.stream import OpenShard, ShardedData, StreamShards

_LOCK = ".lock"
_PART = ".part"
_BAD = "bad.txt"
_BLOCK = 512
_LOOK_SECONDS = 0.02


class ShardFiles(ShardedData, Closing):
    """A dataset somewhere else, whose shards can be fetched one by one; used from several threads at once."""

    @abstractmethod
    def size(self, number: int) -> int:
        """Return how many bytes a shard takes on the disk, 0 where that is not known."""

    @abstractmethod
    def fetch(self, number: int, folder: Path) -> None:
        """Put a shard into an empty folder. Raises NetworkError and the like; what is there then is removed."""

    @abstractmethod
    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder; that may be removed afterwards."""


class _Fetchers:
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


class _HeldShard(NamedTuple):
    """A shard that is open, and the lock that keeps other processes from removing it."""

    shard: OpenShard
    lock: int


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
        self._coming: dict[int, Future[None]] = {}
        self._reserved: dict[int, int] = {}
        self._wanted: list[int] = []
        self._pool: _Fetchers | None = None
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
            os.close(self._held.pop(number).lock)
        with self._guard:
            for number in self._coming.keys() - set(numbers):
                if self._coming[number].cancel() or self._coming[number].done():
                    del self._coming[number]
            for number in numbers:
                if number not in self._held and number not in self._coming:
                    self._coming[number] = self._fetchers().submit(functools.partial(self._fetch_ahead, number))

    def _fetchers(self) -> _Fetchers:
        if self._pool is None:
            self._pool = _Fetchers(self.threads)
        return self._pool

    def _after_fork(self) -> None:
        """Start again in a process that was forked: it has neither the threads nor, of its own, the locks."""
        if self._process != os.getpid():
            for held in self._held.values():
                os.close(held.lock)
            self._unmark_use()
            self._begin()
        self._mark_use()

    def _opened(self, number: int) -> _HeldShard:
        """Open a shard, once it is there whole, under a lock that other readers share."""
        while True:
            self._fetch(number, needed=True)
            lock = self._locked(number, fcntl.LOCK_SH)
            try:
                if (place := self._place(number)).is_dir():
                    with contextlib.suppress(OSError):  # when it was used last
                        fs.touch(place)
                    return _HeldShard(self._open(number, place), lock)
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # another process removed it in between

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
        try:
            if place.is_dir() or not self._has_room(number, needed):
                return
            part = self._part(number)
            fs.remove(part)  # of a process that was killed
            fs.make_folder(part)
            try:
                self._fetch_into(number, part)
                fs.sync_folder(part)
                fs.rename(part, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    fs.remove(part)
                raise
        finally:
            self._reserved.pop(number, None)
            os.close(lock)

    def _fetch_into(self, number: int, part: Path) -> None:
        try:
            self.files.fetch(number, part)
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

    def _has_room(self, number: int, needed: bool) -> bool:
        """Remove shards that nobody uses until another one fits; UsageError if one that is needed does not.

        One that is not needed yet leaves room for one that is.
        """
        with self._making_room:
            size = self.files.size(number)
            room = size if needed else 2 * size
            for part in self.folder.glob(f"*{_PART}"):
                self._removed(part)
            there = {place: _bytes_in(place) for place in self._places()}
            used = sum(there.values()) + sum(self._reserved.values())
            for place in sorted(there, key=_last_use):
                if used + room <= self.limit:
                    break
                if (needed or int(place.name) not in self._wanted) and self._removed(place):
                    used -= there[place]
            if used + room <= self.limit:
                self._reserved[number] = size
                return True
        if needed:
            raise UsageError(
                f"the shards of {self.address} that are used at the same time take {readable_size(used + size)}, and "
                f"the cache may take {readable_size(self.limit)}",
                hint="give it a larger cache_size, or a smaller window",
            )
        return False

    def _removed(self, place: Path) -> bool:
        """Remove a shard, or a part of one that a killed process left, unless a process has it open."""
        number = int(place.name.removesuffix(_PART))
        try:
            lock = self._locked(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            part = self._part(number)
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
            for held in self._held.values():
                os.close(held.lock)
            self._unmark_use()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("files", "folder", "limit", "threads", "skip_bad")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _bytes_in(folder: Path) -> int:
    """Count the bytes that the files of a folder take on the disk: some have holes."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.lstat().st_blocks * _BLOCK
    return found


def _last_use(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except FileNotFoundError:
        return 0.0
