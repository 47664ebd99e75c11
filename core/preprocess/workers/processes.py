"""Worker processes and how they are started: anew, or by fork from here. `forkserver` has the third way."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

from ..processor import Job
from .worker import START, import_runner, serve, settle_after_fork

__all__ = [
    "STOP_SECONDS",
    "ChildProcess",
    "ForkStarter",
    "ProcessStarter",
    "SpawnStarter",
    "WorkerProcess",
    "ending_of",
    "fork",
    "kill_group",
    "launch",
    "reaped",
]

STOP_SECONDS = 5.0
"""How long to wait for what should come at once."""

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {} import main; main(int(sys.argv[1]))"

_our_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.Lock()


def _forget_our_ends() -> None:
    """Close what this process inherited by fork: held open, it would keep workers from noticing their parent's end."""
    _forking.release()
    for connection in list(_our_ends):
        connection.close()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget_our_ends)


def _pipe() -> tuple[Connection, Connection]:
    """Return our end of a new pipe, which nobody forked from here keeps, and the worker's."""
    with _forking:
        ours, theirs = Pipe()
        _our_ends.add(ours)
    return ours, theirs


class WorkerProcess(ABC):
    """A worker process at the other end of a pipe."""

    sentinel: int | None = None
    """A descriptor to wait for: it becomes readable when the process ends, or sometimes sooner."""

    def __init__(self) -> None:
        self.connection, self._theirs = _pipe()

    @abstractmethod
    def ending(self) -> str | None:
        """How the process ended, as the predicate of a sentence; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and what it started: they have nothing to put in order."""

    def wait(self, seconds: float) -> str | None:
        """Wait so long for the ending."""
        deadline = time.monotonic() + seconds
        while (found := self.ending()) is None and (left := deadline - time.monotonic()) > 0:
            if self.sentinel is not None:
                wait([self.sentinel], left)
            else:
                time.sleep(min(left, 0.01))
        return found

    def stop(self) -> None:
        """Kill the process, wait for it and close the pipe; harmless when done twice."""
        self.kill()
        self.wait(STOP_SECONDS)
        self.connection.close()
        self._theirs.close()


class ProcessStarter(ABC):
    """Starts members for one job."""

    greeting: bytes | None = None
    """The call to send to each of them first, where they do not know the job from the start."""

    @abstractmethod
    def start(self) -> WorkerProcess:
        """Start one without waiting until it can work; OSError where the system allows no more processes."""

    def close(self) -> None:
        """End what helps to start members, after them."""


class ChildProcess(WorkerProcess):
    """A child of this process, made by a function that is given the worker's end of the pipe."""

    def __init__(self, make: Callable[[Connection], int]) -> None:
        super().__init__()
        try:
            self._pid = make(self._theirs)
        except BaseException:
            self.connection.close()
            raise
        finally:
            self._theirs.close()
        self._ending: str | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self.sentinel = os.pidfd_open(self._pid)

    def ending(self) -> str | None:
        if self._ending is None:
            try:
                code = reaped(self._pid)
                self._ending = ending_of(code) if code is not None else None
            except ChildProcessError:  # somebody else waits for any child there is
                self._ending = "ended"
            if self._ending is not None and self.sentinel is not None:
                os.close(self.sentinel)
                self.sentinel = None
        return self._ending

    def kill(self) -> None:
        if self._ending is None:
            kill_group(self._pid)


class SpawnStarter(ProcessStarter):
    """Runs Python anew for each: not multiprocessing's spawn, which would run the caller's script again."""

    def __init__(self, job: Job) -> None:
        self.greeting = pickle.dumps((START, (job,)))

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: launch(f"{__package__}.worker", theirs.fileno()))


class ForkStarter(ProcessStarter):
    """Forks this process, which imports first what a worker needs. The job goes along in memory."""

    def __init__(self, job: Job) -> None:
        import_runner()
        self._job = job

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: fork(lambda: serve(theirs, self._job)))


def launch(module: str, descriptor: int) -> int:
    """Start `module.main(descriptor)` in a new interpreter with our import path; return the process's number.

    Without `-P` the interpreter would take the modules that it imports first from the current folder.
    """
    path = json.dumps([str(entry) for entry in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(module), str(descriptor), path],
        stdin=subprocess.DEVNULL,
        stdout=_standard_error(),  # what the function prints must not mix with our own result
        pass_fds=(descriptor,),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C in a terminal is for the parent, which stops its workers
    )
    process.returncode = 0  # it is waited for by its number
    return process.pid


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def fork(run: Callable[[], NoReturn], unneeded: Sequence[int] = ()) -> int:
    """Run something in a process forked from this one, which never comes back here; return its number.

    It closes the descriptors that are `unneeded` there.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn where there are threads
            pid = os.fork()
        if not pid:
            _run_in_child(run, unneeded)
        with contextlib.suppress(OSError):  # done there as well: whichever comes first
            os.setpgid(pid, pid)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _run_in_child(run: Callable[[], NoReturn], unneeded: Sequence[int]) -> NoReturn:
    try:
        settle_after_fork()
        for descriptor in unneeded:
            os.close(descriptor)
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a worker and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reaped(pid: int) -> int | None:
    """Return the exit status of a child, or the negative number of the signal, if it has ended; then kill its group."""
    if hasattr(os, "waitid"):  # leaves the number taken until what the process started is dead as well
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(pid)
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def ending_of(code: int) -> str:
    """Say how a process ended, from its exit status or the negative number of the signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
