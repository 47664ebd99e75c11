"""Files that checkpoints are written to: files of one leaf, writes in background threads, and libhdf5's output."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from ..format import fs
from ..format.contracts import Array
from ..format.files import bytes_of
from ..format.syncing import NewFile
from ..format.threads import started

_BLOCK = 1 << 20
"""Bytes written at once. More would leave the caches between digest and write, and Linux would look for large pages."""
_MOST_PARTS = 1000
"""How many parts one system call writes; Linux accepts 1,024."""
_MOST = 6
"""How many blocks may wait to be written."""
_LUMP = 16 << 20
"""After every so many bytes, the system is told to begin writing them to the disk."""


class Stream(ABC):
    """An output to which one thread writes bytes in order."""

    @abstractmethod
    def write(self, parts: list[memoryview]) -> None:
        """Write the next bytes."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the output after the last bytes."""


class LeafFile(NewFile, Stream):
    """A new file for the rows of one leaf.

    Args:
        path: the file.
        expected: its size in bytes, if it is known: disk blocks are then allocated at once.
        hashed: whether the digest of the bytes is computed while they are written.
        mode: the permissions of the file.
    """

    def __init__(self, path: Path, expected: int = 0, *, hashed: bool = True, mode: int = 0o666) -> None:
        super().__init__(path, expected=expected, mode=mode)
        self._hashed = hashed
        self._skipped = False

    def write(self, parts: list[memoryview]) -> None:
        start = self.size
        for part in parts:
            if self._hashed:
                self._hasher.update(part)
            self.size += len(part)
        fs.write_parts(self.descriptor, parts, self.path, start)
        self.start_syncing(_LUMP)

    def skip(self, count: int) -> None:
        """Leave a hole of `count` bytes, which are read as zeros, take no space, and are not part of the digest."""
        self.size += count
        self._skipped = self._skipped or count > 0

    def finish(self) -> None:
        """Give the file its size, sync it and close it."""
        if self._skipped:
            fs.truncate(self.descriptor, self.size, self.path)
        self.complete()


class _Worker:
    """A thread that makes calls one after another.

    Without `apart`, or if no thread can be started, `submit` makes the call itself. This is not a pool of
    `concurrent.futures`, because such a pool accepts no calls while the program ends, when a background dump may still
    be writing.
    """

    def __init__(self, *, apart: bool) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._stopped, self._tried = False, not apart
        self._thread: Thread | None = None

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Schedule a call after all earlier ones."""
        done: Future[None] = Future()
        if not self._tried:
            self._tried, self._thread = True, started(self._work, "rbtool-writes")
        if self._thread is None:
            self._make(done, call)
        else:
            self._calls.put((done, call))
        return done

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            self._make(*item)
            del item  # free its rows before waiting for the next call

    def _make(self, done: Future[None], call: Callable[[], None]) -> None:
        if self._stopped:
            done.cancel()
            return
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def stop(self) -> None:
        """Make no more calls, and wait for the current one."""
        self._stopped = True
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()


class Blocks:
    """Writes rows to one stream after another, in blocks of a megabyte, with two threads.

    The threads take turns: one syncs a stream while the other one writes the next stream. Rows are not copied, so they
    must not change until `finish`. A failure in a thread is raised by a later call. Leaving the context waits for the
    threads. With fewer than two `streams`, no thread is started.
    """

    def __init__(self, streams: int = 2) -> None:
        self._threads = [_Worker(apart=streams > 1) for _ in range(2)]
        self._pending: deque[Future[None]] = deque()
        self._ends: list[Future[None]] = []
        self._parts: list[memoryview] = []
        self._used = 0
        self._stream: Stream | None = None

    def begin(self, stream: Stream | None) -> None:
        """Finish the previous stream; everything appended from now on goes to this one."""
        if self._stream is not None:
            self._hand_over()
            self._ends.append(self._threads[0].submit(self._stream.finish))
        self._threads.reverse()
        self._stream = stream

    def append(self, rows: Array) -> None:
        """Append the bytes of rows."""
        if rows.size:
            self.append_bytes(bytes_of(rows))

    def append_joined(self, pieces: Iterable[tuple[int, int, int]], sources: Sequence[Array]) -> None:
        """Append pieces of several arrays with the same type and row shape.

        A piece (n, start, stop) is rows `[start, stop)` of `sources[n]`. This is faster than a call of `append` for
        each piece.
        """
        if not sources[0].size:
            return
        data, width = [bytes_of(rows) for rows in sources], sources[0][:1].nbytes
        for number, start, stop in pieces:
            part = data[number][start * width : stop * width]
            if self._used + len(part) < _BLOCK and len(self._parts) < _MOST_PARTS - 1:
                self._parts.append(part)
                self._used += len(part)
            else:
                self.append_bytes(part)

    def append_bytes(self, data: memoryview) -> None:
        """Append bytes."""
        while data:
            part = data[: _BLOCK - self._used]
            self._parts.append(part)
            self._used += len(part)
            data = data[len(part) :]
            if self._used == _BLOCK or len(self._parts) == _MOST_PARTS:
                self._hand_over()

    def finish(self) -> None:
        """Finish the last stream and wait for all streams."""
        self.begin(None)
        for done in (*self._pending, *self._ends):
            done.result()

    def _hand_over(self) -> None:
        if not self._parts or self._stream is None:
            return
        self._pending.append(self._threads[0].submit(partial(self._stream.write, self._parts)))
        self._parts, self._used = [], 0
        if len(self._pending) > _MOST:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for thread in self._threads:
            thread.stop()


class LatchedFile:
    """A new file with the methods that h5py's `fileobj` driver calls.

    After a failed write, libhdf5 could neither flush nor close the file. The first failure is therefore only
    remembered, further writes do nothing, and `check` raises the failure. Leaving the context closes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = fs.create(path)
        self._position = 0
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def write(self, data: memoryview) -> int:
        """Write at the current position; an interrupt counts as a failure."""
        view = memoryview(data).cast("B")
        if self._failure is None:
            try:
                fs.pwrite(self.descriptor, view, self._position, self.path)
            except BaseException as error:
                self._failure = error
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        size = self._position if size is None else size
        if self._failure is None:
            try:
                fs.truncate(self.descriptor, size, self.path)
            except BaseException as error:
                self._failure = error
        return size

    def readinto(self, buffer: memoryview) -> int:
        """Read at the current position; bytes that are not in the file, after a failed write, are zeros."""
        view = memoryview(buffer).cast("B")
        got = os.preadv(self.descriptor, [view], self._position)
        view[got:] = bytes(len(view) - got)
        self._position += len(view)
        return len(view)

    def read(self, size: int) -> bytes:
        """Read bytes; h5py recognises a file object by this method."""
        data = bytearray(size)
        self.readinto(memoryview(data))
        return bytes(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self.descriptor).st_size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def __enter__(self) -> LatchedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        fs.close(self.descriptor, self.path)
