"""Runs a few jobs in parallel, and ends all of them as soon as one fails or the caller is interrupted."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..errors import RbtoolError
from .transport import Transport

T = TypeVar("T")

_GRACE_SECONDS = 2.0
_WAIT_SECONDS = 0.5
"""The longest wait for a message: a signal that arrives just before the wait is only handled after it."""


class Cancelled(Exception):
    """Ends a job because another failed or the caller was interrupted."""


def ignore(*_: object) -> None:
    """Accept any arguments, and do nothing."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The functions that a job calls while it runs.

    `progress` and `note` call functions of the caller, in the caller's thread. `sleep` and `check` raise Cancelled if
    the job has to end. `abandoned` returns True once the caller no longer waits for the job, which must not change
    files from then on.
    """

    progress: Callable[[int], None] = ignore
    note: Callable[[str], None] = ignore
    sleep: Callable[[float], None] = time.sleep
    check: Callable[[], None] = ignore
    abandoned: Callable[[], bool] = bool


Job: TypeAlias = Callable[[Watch], None]


def run_together(jobs: Sequence[Job], watch: Watch, *, workers: int, interrupt: Callable[[], None]) -> None:
    """Run all jobs, in the calling thread if there is one worker or one job; raise the error of the first that fails.

    If one fails, or the caller is interrupted, the others are cancelled: `interrupt` is called repeatedly to make their
    blocking calls fail, and after two seconds they are abandoned.
    """
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            job(watch)
        return
    try:
        _Workers(jobs, watch, interrupt).run(min(workers, len(jobs)))
    except _NoThreads:
        run_together(jobs, watch, workers=1, interrupt=interrupt)


class _NoThreads(Exception):
    """The system does not allow more threads."""


def _started(thread: threading.Thread) -> bool:
    """Start a thread; return whether the system allows it."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class _Workers:
    """The threads of one call, the queue of jobs, and the queue of messages to the caller."""

    def __init__(self, jobs: Sequence[Job], watch: Watch, interrupt: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            self._jobs.put(job)
        self._left = len(jobs)
        self._interrupt = interrupt
        self._stopped = threading.Event()
        self._abandoned = threading.Event()
        # A function to call in the caller's thread, None for a finished job, or the error of a job.
        self._messages: queue.SimpleQueue[Callable[[], None] | BaseException | None] = queue.SimpleQueue()
        self._watch = Watch(
            progress=lambda amount: self._messages.put(functools.partial(watch.progress, amount)),
            note=lambda text: self._messages.put(functools.partial(watch.note, text)),
            sleep=self._sleep,
            check=lambda: self._sleep(0),
            abandoned=self._abandoned.is_set,
        )

    def run(self, workers: int) -> None:
        # Daemons: a thread that hangs in a network call must not keep the process alive.
        threads = [threading.Thread(target=self._work, name="rbtool-fetch", daemon=True) for _ in range(workers)]
        try:
            if not sum(map(_started, threads)):
                raise _NoThreads
            while self._left:
                try:
                    message = self._messages.get(timeout=_WAIT_SECONDS)
                except queue.Empty:
                    continue
                self._handle(message)
        finally:
            self._stopped.set()
            self._end(threads)

    def _handle(self, message: Callable[[], None] | BaseException | None) -> None:
        if isinstance(message, BaseException):
            raise message
        if message is None:
            self._left -= 1
        else:
            message()

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the workers, and interrupt their blocking calls."""
        deadline = time.monotonic() + _GRACE_SECONDS
        try:
            for thread in threads:
                while thread.is_alive() and time.monotonic() < deadline:
                    if self._left:
                        self._interrupt()
                    thread.join(0.05)
        finally:
            self._abandoned.set()

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            try:
                job(self._watch)
            except BaseException as error:
                self._messages.put(error)
                return
            self._messages.put(None)

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds) if seconds else self._stopped.is_set():
            raise Cancelled


def ask_all(
    calls: Sequence[Callable[[Watch], T]],
    transport: Transport,
    *,
    workers: int = 8,
    done: Callable[[int], None] | None = None,
) -> list[T | RbtoolError]:
    """Make all calls in a few threads; return their results, or the RbtoolError of each that failed, in order.

    A call that waits before a retry has to use `watch.sleep`, which ends once the caller no longer waits. `done` is
    called in this thread with the number of newly finished calls. Any other exception, and an interruption, ends all
    calls at once, also those that block in `transport`.
    """
    results: dict[int, T | RbtoolError] = {}

    def job(index: int, watch: Watch) -> None:
        watch.check()
        try:
            results[index] = calls[index](watch)
        except RbtoolError as error:
            results[index] = error
        watch.progress(1)

    jobs = [functools.partial(job, index) for index in range(len(calls))]
    watch = Watch() if done is None else Watch(progress=done)
    run_together(jobs, watch, workers=workers, interrupt=transport.interrupt)
    return [results[index] for index in range(len(calls))]
