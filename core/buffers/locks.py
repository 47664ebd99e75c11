"""One writer at a time, and readers that need no lock.

A write makes a shared number odd and, when it is done, even again. Who reads compares the number before and after:
if it changed, rows may be half old and half new, and are read again. So readers run beside each other and beside a
writer, and wait only while they keep losing against it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any

__all__ = ["Guard", "Hold", "SharedGuard", "reset_after_fork"]

# After that many reads in vain a reader makes the writers wait: there is always an end to it.
_ATTEMPTS = 2
# A lock that is released and taken again at once never goes to who waits for it: a writer steps back this long first.
_COURTESY_SECONDS = 1e-4
_SEQUENCE, _WAITING = 0, 1


class Guard:
    """Guards the rows of a buffer among the threads of one process.

    `with guard:` is a write, `with guard.hold():` keeps writers out without being one, and `guard.read(get, index)`
    returns `get(index)` as it is between two writes. Writes may nest, and may read what they write.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._writing = 0
        self._cells: Any = [0, 0]

    def acquire(self) -> None:
        """Keep writers out; may nest."""
        self._lock.acquire()
        self._depth += 1

    def release(self) -> None:
        """Let writers in again."""
        self._depth -= 1
        self._lock.release()

    def __enter__(self) -> None:
        cells = self._cells
        if cells[_WAITING] and not self._writing:
            cells[_WAITING] = 0
            time.sleep(_COURTESY_SECONDS)
        self.acquire()
        self._writing += 1
        if self._writing == 1:
            cells[_SEQUENCE] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing -= 1
        if not self._writing:
            self._cells[_SEQUENCE] += 1
        self.release()

    def hold(self) -> Hold:
        """Return a context that keeps writers out, and readers in."""
        return Hold(self)

    @property
    def sequence(self) -> int:
        """A number that differs before, during and after a write."""
        return int(self._cells[_SEQUENCE])

    def read(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Return `get(index)`, called again where a write came in between."""
        cells = self._cells
        for _ in range(_ATTEMPTS):
            before = cells[_SEQUENCE]
            if before & 1:
                cells[_WAITING] = 1
                with self.hold():  # wait for the write, and let the next one in
                    continue
            try:
                found = get(index)
            except Exception:
                if cells[_SEQUENCE] == before:
                    raise
                continue
            if cells[_SEQUENCE] == before:
                return found
        cells[_WAITING] = 1
        with self.hold():
            return get(index)

    def after_fork(self) -> None:
        """Forget, in a forked child, what other threads of the parent were doing."""
        self._lock = threading.RLock()
        self._depth = self._writing = 0
        self._mend()

    def _mend(self) -> None:
        """End the write of a thread or process that is no more."""
        if self._cells[_SEQUENCE] & 1 and not self._writing:
            self._cells[_SEQUENCE] += 1

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


class Hold:
    """Keeps the writers of a guard out while it lasts."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.acquire()

    def __exit__(self, *raised: object) -> None:
        self._guard.release()


class SharedGuard(Guard):
    """Guards the rows of a buffer among the threads of all processes, forked or spawned, that it was passed to.

    The number lies in an anonymous file that all of them map, and the lock is a lock on that file: the system takes
    it back from a process that is killed in the middle of a write. A plain pickle or a copy is a guard of its own.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__()
        self._descriptor = _anonymous_file() if descriptor is None else descriptor
        self._cells = memoryview(mmap.mmap(self._descriptor, mmap.PAGESIZE)).cast("q")
        weakref.finalize(self, os.close, self._descriptor)

    def acquire(self) -> None:
        super().acquire()
        if self._depth == 1:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            except BaseException:
                super().release()
                raise
            self._mend()

    def release(self) -> None:
        if self._depth == 1:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        super().release()

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._writing = 0  # the parent may be writing: its lock says when it is done

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": DupFd(self._descriptor)} if get_spawning_popen() is not None else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["descriptor"].detach() if state else None)  # type: ignore[misc]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rbtool-guard", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def reset_after_fork(owner: Any) -> None:
    """Have `owner._before_fork()` called before every fork, and `owner._after_fork()` in the child.

    Locks and threads do not outlive a fork.
    """
    _ALIVE.add(owner)


def _before_fork() -> None:
    for owner in list(_ALIVE):
        owner._before_fork()


def _after_fork() -> None:
    for owner in list(_ALIVE):
        owner._after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
