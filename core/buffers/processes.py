"""Buffers in several threads and processes: guards of their rows, and random streams that differ between copies.

Reads are protected by a sequence lock (seqlock). A write makes a shared number odd, and even again when it is done:

    sequence    4        5 (odd)             6
    writer      ─────────[ write rows ]──────────────────
    reader A    [ read ]                                     4 before, 4 after: consistent
    reader B          [ read ]                               4 before, 5 after: read again
    reader C                           [ read ]              5 before, 6 after: read again

If the number was odd or has changed, the rows may be half old and half new, and the reader repeats the read. Readers
can thus run in parallel with each other and with a writer; only after repeated failures do they take the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils.data import get_worker_info

from ..errors import SchemaError, require_seed
from ..storages.base import Storage
from ..storages.write_log import Counter, WriteJournal

_ATTEMPTS = 2
"""After this many failed attempts a reader takes the lock, so that every read ends."""

_COURTESY_SECONDS = 1e-4
"""How long a writer pauses if a reader waits. A writer that took the lock again at once would starve the reader."""

_SEQUENCE, _WAITING, _JOURNAL = 0, 1, 2
"""The numbers of a guard: the sequence, whether a reader waits, and the first one of the journal."""

_FREE = 64
"""The first number that is free for the owner of a guard."""


class Guard:
    """Protects the rows of a buffer among the threads of one process.

    - `with guard:` encloses a write.
    - `with guard.hold():` excludes writers, but not readers.
    - `guard.read(get, index)` returns `get(index)` as of an instant between two writes.

    Writes may be nested, and may read the rows that they write.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._writing = 0
        self._cells: Any = [0, 0]
        self._journal: WriteJournal | None = None
        self._process: Counter | None = None

    def refuse_others(self, process: Counter) -> None:
        """From now on, raise SchemaError if a write overlaps with a write of another process to the same rows.

        Without a lock between processes, both writes would go to the same rows, and mix them. The check needs no lock,
        either: each process writes its number at the start of a write and reads it again at the end, so that of two
        writes that overlap, at least one finds the number of the other.

            process 7   [ 0? 7             7? 0 ]         undisturbed
            process 9           [ 7! ]                    refused before it writes
            process 9    [ 0? 9           ...  9? ]       started at the same instant: 7 finds 9 at its end

        Args:
            process: in shared memory, 0 while nobody writes.
        """
        self._process = process

    def acquire(self) -> None:
        """Exclude writers; calls may be nested."""
        self._lock.acquire()
        self._depth += 1

    def release(self) -> None:
        """Admit writers again."""
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
            if self._journal is not None:
                self._journal.begin()
            if self._process is not None:
                self._begin_alone(self._process)
            cells[_SEQUENCE] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing -= 1
        disturbed = False
        if not self._writing:
            self._cells[_SEQUENCE] += 1
            if self._process is not None:
                disturbed, self._process.value = self._process.value != os.getpid(), 0
        self.release()
        if disturbed and error is None:
            raise _overlap()

    def _begin_alone(self, process: Counter) -> None:
        """Enter the number of this process as the one that writes; SchemaError if another one is writing."""
        other, own = process.value, os.getpid()
        if other not in (0, own) and _is_alive(other):
            self._writing -= 1
            self.release()
            raise _overlap()
        process.value = own

    def hold(self) -> Hold:
        """Return a context that excludes writers, but not readers."""
        return Hold(self)

    @property
    def sequence(self) -> int:
        """A number that differs before, during and after a write; odd during one."""
        return int(self._cells[_SEQUENCE])

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key by which several guards are ordered when they are taken together."""
        return 0, id(self)

    def read(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Return `get(index)`; it is called again if a write interfered."""
        cells = self._cells
        for _ in range(_ATTEMPTS):
            before = cells[_SEQUENCE]
            if before & 1:
                cells[_WAITING] = 1
                with self.hold():  # wait until the write ends
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
        """Reset the state in a forked child, where the threads of the parent do not exist."""
        self._lock = threading.RLock()
        self._depth = self._writing = 0
        self._mend()

    def _mend(self) -> None:
        """Mark the write of a thread or process that no longer exists as finished."""
        if self._cells[_SEQUENCE] & 1 and not self._writing:
            self._cells[_SEQUENCE] += 1

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _overlap() -> SchemaError:
    return SchemaError(
        "another process writes to this buffer at the same time, which mixes rows",
        hint="make the buffer with shared=True before the processes start",
    )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:  # it was killed during a write
        return False
    except PermissionError:
        pass
    return True


class Guards:
    """The guards of several buffers, addressed by number."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = guards
        self._cells = [guard._cells for guard in guards]

    def sequences(self, numbers: Sequence[int]) -> list[int]:
        """Return `Guard.sequence` of some guards. Every batch of an ensemble calls this twice, so it is short."""
        cells = self._cells
        return [cells[number][_SEQUENCE] for number in numbers]

    def read(self, number: int, get: Callable[[Any], Any], index: Any) -> Any:
        """Return `get(index)`, read under the guard with this number; see `Guard.read`."""
        return self._guards[number].read(get, index)


class Lock(Protocol):
    """Anything that can be acquired and released: a `Guard`, or a lock of `threading`."""

    def acquire(self) -> Any:
        """Wait for the lock and take it."""

    def release(self) -> Any:
        """Release the lock."""


class HoldAll:
    """A context that holds several locks, which are taken in the given order.

    Callers sort guards by rank, so that two threads that take some of the same guards cannot deadlock.
    """

    __slots__ = ("_locks",)

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = locks

    def acquire(self) -> None:
        """Take all locks, or none if one cannot be taken; calls may be nested."""
        held = []
        try:
            for lock in self._locks:
                lock.acquire()
                held.append(lock)
        except BaseException:
            for lock in reversed(held):
                lock.release()
            raise

    def release(self) -> None:
        """Release all locks."""
        for lock in reversed(self._locks):
            lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class Hold:
    """A context that excludes the writers of a guard."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.acquire()

    def __exit__(self, *raised: object) -> None:
        self._guard.release()


class SharedGuard(Guard):
    """Protects the rows of a buffer among the threads of all forked and spawned processes that have this guard.

    The sequence number is in an anonymous file that all processes map. The lock is a lock on that file, which the
    system releases if a process is killed during a write. The next process that takes the lock then undoes the
    unfinished write, with the journal that is stored behind the numbers. A plain pickle or a copy is a new guard.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__()
        self._descriptor = _anonymous_file() if descriptor is None else descriptor
        self._cells = memoryview(mmap.mmap(self._descriptor, mmap.PAGESIZE)).cast("q")
        self._storage: Storage | None = None
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def numbers(self) -> memoryview:
        """Further int64 numbers, shared by all processes and initially 0, for the owner of this guard."""
        numbers: memoryview = self._cells[_FREE:]
        return numbers

    def acquire(self) -> None:
        super().acquire()
        if self._depth == 1:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            except BaseException:
                super().release()
                raise
            self._mend()

    def protect(self, storage: Storage, counters: Sequence[Counter]) -> None:
        """Keep a journal of this storage and these counters, to undo the write of a process that is killed."""
        counters = [counter for counter in counters if counter.shared]
        cells = self._cells[_JOURNAL : _JOURNAL + 1 + len(counters)]
        self._journal = storage.journal = WriteJournal(self._descriptor, mmap.PAGESIZE, cells, counters)
        self._storage = storage

    def _mend(self) -> None:
        if self._storage is not None and self._cells[_SEQUENCE] & 1 and not self._writing:
            self._storage.undo()
        super()._mend()

    def release(self) -> None:
        if self._depth == 1:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        super().release()

    @property
    def rank(self) -> tuple[int, int]:
        return 1, os.fstat(self._descriptor).st_ino

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._writing = 0  # nothing to mend: if the parent is writing, it still holds the lock

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


_HOOKS: weakref.WeakKeyDictionary[Any, tuple[weakref.WeakMethod[Any], weakref.WeakMethod[Any]]] = (
    weakref.WeakKeyDictionary()
)


def call_at_fork(owner: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call the method `before` of `owner` before every fork, and `after` in the child, as long as the owner exists."""
    _HOOKS[owner] = weakref.WeakMethod(before), weakref.WeakMethod(after)


def _call_hooks(which: int) -> None:
    for hooks in list(_HOOKS.values()):
        if (hook := hooks[which]()) is not None:
            hook()


os.register_at_fork(before=lambda: _call_hooks(0), after_in_child=lambda: _call_hooks(1))


# Copies in other processes --------------------------------------------------------------------------

Place = tuple[bytes, int | None]
"""Identifies a process; the number is set for a worker of a `DataLoader`."""

_process = os.urandom(16)  # pids are not unique: every container has a process 1

_inherited: tuple[int, torch.Generator] | None = None
"""In a forked child, the seed of the generator that it inherited, and a generator to use instead."""


def place() -> Place:
    """Return the identity of the current process."""
    worker = get_worker_info()
    return _process, None if worker is None else worker.id


def reseed(generator: torch.Generator) -> None:
    """Seed a generator from the system's entropy."""
    generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)


def generator_of(seed: int) -> torch.Generator:
    """Return a generator with this seed; UsageError (a ValueError) if torch cannot use the seed."""
    return torch.Generator().manual_seed(require_seed(seed))


def branch(generator: torch.Generator, *key: int) -> None:
    """Seed a generator from its state and a key, so that every key gives another stream of random numbers."""
    state = generator.get_state().cpu().numpy().tobytes()
    digest = hashlib.blake2b(state + repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)


def stand_in() -> torch.Generator | None:
    """Return a generator to use instead of torch's global one; None if the global one can be used.

    A forked child inherits a copy of its parent's global generator. All children would draw the same numbers from it,
    unless they call `torch.manual_seed`, as workers of a `DataLoader` do.
    """
    if _inherited is None or torch.initial_seed() != _inherited[0]:
        return None
    return _inherited[1]


def _after_fork() -> None:
    global _process, _inherited
    _process = os.urandom(16)
    generator = torch.Generator()
    reseed(generator)
    _inherited = torch.initial_seed(), generator


os.register_at_fork(after_in_child=_after_fork)
