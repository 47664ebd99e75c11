"""Writes files in the background, while what comes next is read, compared and gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ..format import Array, bytes_of

__all__ = ["Blocks", "Stream"]

_BLOCK = 2 << 20
"""Many file systems keep what is written in such parts in one piece of memory, which is faster to read again."""
_MOST_PARTS = 1000
"""Systems write no more than 1024 parts at once."""
_MOST = 3
"""How many blocks may wait."""


class Stream(ABC):
    """Something that takes bytes in order, in one thread of its own."""

    @abstractmethod
    def write(self, parts: list[memoryview]) -> None:
        """Take the bytes that come next."""

    @abstractmethod
    def finish(self) -> None:
        """Do what is left when all bytes were taken."""


class Blocks:
    """Has rows written by two threads, which take turns at streams, in blocks of some megabytes.

    So one stream is synced while the next one is written. Rows are not copied: they must stay as they are until
    `finish`. What fails in a thread is raised by the next call here. A context manager: leaving waits for the threads.
    """

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, "rbtool-writes") for _ in range(2)]
        self._pending: deque[Future[None]] = deque()
        self._ends: list[Future[None]] = []
        self._parts: list[memoryview] = []
        self._used = 0
        self._stream: Stream | None = None

    def begin(self, stream: Stream | None) -> None:
        """Finish the stream before; what is appended from now on goes to this one."""
        if self._stream is not None:
            self._hand_over()
            self._ends.append(self._threads[0].submit(self._stream.finish))
        self._threads.reverse()
        self._stream = stream

    def append(self, rows: Array) -> None:
        """Append the bytes of rows."""
        if not rows.size:
            return
        data = bytes_of(rows)
        while data:
            part = data[: _BLOCK - self._used]
            self._parts.append(part)
            self._used += len(part)
            data = data[len(part) :]
            if self._used == _BLOCK or len(self._parts) == _MOST_PARTS:
                self._hand_over()

    def finish(self) -> None:
        """Finish the last stream and wait for all of them."""
        self.begin(None)
        for done in (*self._pending, *self._ends):
            done.result()

    def _hand_over(self) -> None:
        if not self._parts or self._stream is None:
            return
        self._pending.append(self._threads[0].submit(self._stream.write, self._parts))
        self._parts, self._used = [], 0
        if len(self._pending) > _MOST:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
