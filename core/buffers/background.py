"""Dumps that finish in the background, and one dump at a time for each destination."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from ..errors import UsageError

_freed = threading.Condition()
_busy: set[str] = set()
_unseen: dict[Future[None], Path] = {}
"""Dumps whose result nobody has asked for, and where they go."""


class BackgroundDump:
    """A checkpoint that is written, brought to the disk and put in place in the background.

    It holds the rows as of the call that returned this. A failure is raised by `result`; where nobody asks for it, a
    RuntimeWarning reports it when this object goes, or at the end of the program, which waits for the dump.
    """

    def __init__(self, path: Path, done: Future[None]) -> None:
        self.path = path
        self._done, self._process = done, os.getpid()
        _unseen[done] = path
        weakref.finalize(self, done.add_done_callback, _report).atexit = False  # now, or when it fails

    def done(self) -> bool:
        """Return whether it is in place, or failed."""
        return self._done.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is in place, for at most `timeout` seconds; raise what went wrong.

        TimeoutError if it is not in place by then: it continues. UsageError in a forked process, which has no part in
        it.
        """
        if self._process != os.getpid():
            raise UsageError(
                f"the dump to {self.path} runs in the process {self._process}", hint="ask for its result there"
            )
        try:
            self._done.result(timeout)
        finally:
            if self._done.done():
                _unseen.pop(self._done, None)

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._done.exception() else "in place"
        return f"BackgroundDump({os.fspath(self.path)!r}, {state})"


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Have a destination alone in this process: waits for a dump to it that is in progress."""
    key = os.path.realpath(path)
    with _freed:
        while key in _busy:
            _freed.wait()
        _busy.add(key)
    try:
        yield
    finally:
        with _freed:
            _busy.discard(key)
            _freed.notify_all()


def in_background(path: Path, finish: Callable[[], object]) -> BackgroundDump:
    """Call `finish` in a thread, which the end of the program waits for; at once where none can be started."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            finish()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    handle = BackgroundDump(path, done)
    try:
        threading.Thread(target=work, name="rbtool-dump").start()
    except (RuntimeError, MemoryError):  # a limit on threads, or the interpreter is about to end
        work()
    return handle


def _report(done: Future[None]) -> None:
    """Report a failure that nobody asked for."""
    path = _unseen.pop(done, None)
    if path is not None and (error := done.exception()) is not None:
        warnings.warn(f"the background dump to {path} failed: {error!r}", RuntimeWarning, stacklevel=2)


def _report_all() -> None:
    for done in tuple(_unseen):
        _report(done)


def _forget() -> None:
    """In a forked process: its parent's dumps are none of its own."""
    global _freed
    _freed = threading.Condition()
    _busy.clear()
    _unseen.clear()


atexit.register(_report_all)
os.register_at_fork(after_in_child=_forget)
