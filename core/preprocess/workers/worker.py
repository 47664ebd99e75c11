"""What a worker process does: answer the calls that come through its pipe, one after the other."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeAlias

from ...errors import RbtoolError
from ..failures import FunctionFailed, ResultRefused, WorkerFailed, error_text
from ..processor import Job
from ..units.modules import FreshModules

__all__ = ["START", "Answer", "CallServer", "import_runner", "main", "pickled", "serve", "settle_after_fork"]

Answer: TypeAlias = tuple[bool, Any]
"""Whether the call came to its end, and then what it returned, else the exception it raised."""

START = "start"
"""The first call: its argument is the job."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt

_kept: list[Any] = []
"""Objects of the process we were forked from that must not be finalised here: it will do that itself."""


def main(descriptor: int) -> NoReturn:
    """Serve the parent at the other end of `descriptor`, in an interpreter started for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and decides
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))


def serve(connection: Connection, job: Job | None = None) -> NoReturn:
    """Answer calls until the parent hangs up; a job at hand is as good as one that was sent.

    A call is a method of `TaskRunner` and its arguments. Whatever the user's function does, this never returns.
    """
    calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    if job is not None:
        calls.put((START, (job,)))
    os.register_at_fork(after_in_child=connection.close)  # what the function forks must not keep the pipe open
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    process, spare, serving = os.getpid(), _spare_stderr(), CallServer()
    try:
        while True:
            answer = serving.answer(*calls.get())
            if os.getpid() != process:
                break  # a child that the function forked came back from it: the answer is its parent's to give
            _reopen_streams(spare)
            connection.send_bytes(pickled(answer))
    except OSError:
        pass  # the parent is gone, or the function closed the pipe: the parent misses us
    finally:
        os._exit(0 if os.getpid() != process else 1)


def _listen(connection: Connection, calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Hear calls, and the end of the parent even while the user's function runs."""
    try:
        while True:
            calls.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what the function started has nobody to work for either
    except BaseException:
        traceback.print_exc()  # a call that cannot be unpickled
    os._exit(1)


def pickled(answer: Answer) -> bytes:
    """Put an answer into bytes; one that cannot be pickled becomes WorkerFailed that says so."""
    # Not `connection.send`: torch teaches it to pass tensors as descriptors, which nobody here waits for.
    try:
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps((False, _trouble(error)))


def _trouble(error: BaseException) -> WorkerFailed:
    return WorkerFailed(error_text(error), "".join(traceback.format_exception(error)))


class CallServer:
    """The runner behind the calls."""

    def __init__(self) -> None:
        self._runner: Any = None
        self._modules: FreshModules | None = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Do what is asked; also KeyboardInterrupt and SystemExit, which only user code raises here, are answers."""
        try:
            if method == START:
                self._start(*arguments)
                return True, None
            return True, getattr(self._runner, method)(*arguments)
        except (RbtoolError, OSError, FunctionFailed, ResultRefused) as error:
            return False, error
        except BaseException as error:
            return False, _trouble(error)

    def _start(self, job: Job) -> None:
        import torch

        from .task_runner import TaskRunner

        _keep_freed_memory()
        torch.set_num_threads(1)
        self._modules = FreshModules(job.processor.user_modules())  # a fork has the parent's, which may be out of date
        self._runner = TaskRunner(job)


def _keep_freed_memory() -> None:
    """Let glibc, where it is, keep what a task frees for the next one, up to 64 MB at the end of the heap.

    It gives blocks as large as a chunk's leaves back to the system at once, and a quarter of a task's time goes into
    page faults when they are asked for again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20)):
            libc.mallopt(option, size)


def import_runner() -> None:
    """Import all that a worker needs, so that those forked from here have it."""
    import torch  # noqa: F401

    from ..units import batch, row  # noqa: F401
    from . import task_runner  # noqa: F401


def settle_after_fork() -> None:
    """Make a process of its own of one just forked, whose signals are all blocked and stay so until this is done.

    Nothing that the parent owns is finalised here: no garbage of its is collected, no stream of its flushed.
    """
    gc.freeze()
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the parent, which stops its workers
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ["OMP_NUM_THREADS"] = "1"
    _renew_streams()


def _renew_streams() -> None:
    """Read nothing and print to the standard error alone: the standard output is for the parent's result."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:
        os.dup2(null, 2)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if null > 2:
        os.close(null)
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = _printer(), _printer()


def _printer() -> io.TextIOWrapper:
    raw = io.FileIO(2, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


def _spare_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


def _reopen_streams(spare: int) -> None:
    """Open what the function has closed: else the next file opened takes the number, and the next print goes there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(spare, descriptor)
