"""The child's side of worker processes: answering calls from a pipe, and the server that forks workers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeAlias

from ..errors import RbtoolError
from .tasks import FunctionFailed, Job, ResultRefused, WorkerFailed, error_text

Answer: TypeAlias = tuple[bool, Any]
"""Whether the call succeeded, and its result or else its exception."""

START = "start"
"""The name of the first call, whose argument is the job."""

NUMBER = struct.Struct("<q")
"""The form of messages to and from the fork server."""
NEW_WORKER = 0
"""The message that requests a new worker."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt


_kept: list[Any] = []
"""Objects inherited from the parent that must not be finalised in a fork."""


def main(descriptor: int) -> NoReturn:
    """Run a worker in a new interpreter, with a pipe to the parent at `descriptor`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also gets the signal, and stops its workers
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))


def serve(connection: Connection, job: Job | None = None) -> NoReturn:
    """Answer calls, each the name of a method of the runner and its arguments, until the parent closes the pipe.

    `job` is given in a fork and sent otherwise. Never returns, not even in a process that the user function forks.
    """
    calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    if job is not None:
        calls.put((START, (job,)))
    os.register_at_fork(after_in_child=connection.close)  # a fork made by the function must not keep the pipe open
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    process, spare, serving = os.getpid(), _spare_stderr(), CallServer()
    try:
        while True:
            answer = serving.answer(*calls.get())
            if os.getpid() != process:
                break  # this is a child that the user function forked; only its parent answers
            _reopen_streams(spare)
            connection.send_bytes(pickled(answer))
    except OSError:
        pass  # the parent has ended, or the user function closed the pipe, which the parent notices
    finally:
        os._exit(0 if os.getpid() != process else 1)


def _listen(connection: Connection, calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Receive calls, and end this process with its parent, even while the user function runs."""
    try:
        while True:
            calls.put(pickle.loads(connection.recv_bytes()))  # safe: only the parent has the other end of the pipe
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # also ends processes that the user function started
    except BaseException:
        traceback.print_exc()  # a call that cannot be unpickled
    os._exit(1)


def pickled(answer: Answer) -> bytes:
    """Pickle an answer; one that cannot be pickled becomes a WorkerFailed with the reason."""
    # Not `connection.send`: torch registers reducers there that pass tensors as descriptors of shared memory.
    try:
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps((False, _worker_failed(error)))


def _worker_failed(error: BaseException) -> WorkerFailed:
    return WorkerFailed(error_text(error), "".join(traceback.format_exception(error)))


class CallServer:
    """Answers calls with the runner of a job, which the first call creates."""

    def __init__(self) -> None:
        self._runner: Any = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Run a call and return its answer, also for KeyboardInterrupt and SystemExit, which only user code raises."""
        try:
            if method == START:
                self._start(*arguments)
                return True, None
            return True, getattr(self._runner, method)(*arguments)
        except (RbtoolError, OSError, FunctionFailed, ResultRefused) as error:
            return False, error
        except BaseException as error:
            return False, _worker_failed(error)

    def _start(self, job: Job) -> None:
        _keep_freed_memory()
        self._runner = job.runner()


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next task, up to 64 MB at the end of the heap.

    By default it returns large blocks, such as the leaves of a chunk, to the system at once; page faults for new blocks
    would then take a quarter of a task's time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20)):
            libc.mallopt(option, size)


def _settle_after_fork() -> None:
    """Separate a forked process from its parent; its signals are blocked until then.

    Objects of the parent are not finalised: its garbage is not collected, its streams are not flushed.
    """
    gc.freeze()
    os.setpgid(0, 0)  # Ctrl-C in a terminal only reaches the parent, which stops its workers
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ["OMP_NUM_THREADS"] = "1"
    _renew_streams()


def _renew_streams() -> None:
    """Replace the standard streams: input is empty, and output goes to stderr, as stdout is for the parent's result."""
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
    """Reopen standard descriptors that the user function closed; otherwise prints could go to another file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(spare, descriptor)


def fork(run: Callable[[], NoReturn], unneeded: Sequence[int] = ()) -> int:
    """Run a function in a fork of this process, without the `unneeded` descriptors; return the process id."""
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn about forks with threads
            pid = os.fork()
        if not pid:
            _run_in_child(run, unneeded)
        with contextlib.suppress(OSError):  # the child does the same; it does not matter which is first
            os.setpgid(pid, pid)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _run_in_child(run: Callable[[], NoReturn], unneeded: Sequence[int]) -> NoReturn:
    try:
        _settle_after_fork()
        for descriptor in unneeded:
            os.close(descriptor)
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a worker and the processes it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reaped(pid: int) -> int | None:
    """Return the exit status of a child, or the negative signal number, and kill its group; None while it runs."""
    if hasattr(os, "waitid"):  # WNOWAIT keeps the process id reserved until its group is killed
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(pid)
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve_forks(descriptor: int, *imports: str) -> NoReturn:
    """Run the fork server: fork a worker for each request of the parent, until it closes the socket at `descriptor`.

    `imports` are the modules that workers need. Messages are single numbers:

        parent → server      NEW_WORKER, with two descriptors: the worker's end of its pipe, and `news`
        parent → server      the process id of a worker to kill
        server → news        the process id of the worker and, after its end, the result of `reaped`
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also gets the signal, and stops its workers
    os.set_inheritable(descriptor, False)
    for name in imports:
        importlib.import_module(name)
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only interrupts the wait
    control = socket.socket(fileno=descriptor)
    forked: dict[int, int] = {}
    while True:
        ready = wait([control, awake])
        if awake in ready:
            os.read(awake, 4096)
            _report_exits(forked)
        if control in ready:
            _serve_request(control, forked, (awake, wake))


def _serve_request(control: socket.socket, forked: dict[int, int], ours: Sequence[int]) -> None:
    data, descriptors, _, _ = socket.recv_fds(control, NUMBER.size, 2)
    if not data:
        os._exit(0)
    number: int = NUMBER.unpack(data)[0]
    if number in forked:
        kill_group(number)
    if number != NEW_WORKER:
        return
    pipe, news = descriptors
    os.set_inheritable(pipe, False)
    os.set_inheritable(news, False)
    with contextlib.suppress(OSError):  # too many processes: `news` is closed without a process id
        pid = fork(lambda: serve(Connection(pipe)), (control.fileno(), news, *ours, *forked.values()))
        forked[pid] = news
        _write(news, pid)
    os.close(pipe)
    if news not in forked.values():
        os.close(news)


def _report_exits(forked: dict[int, int]) -> None:
    for pid, news in list(forked.items()):
        code = reaped(pid)
        if code is not None:
            _write(news, code)
            os.close(news)
            del forked[pid]


def _write(news: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has closed the worker
        os.write(news, NUMBER.pack(number))
