"""The executor whose workers are processes of this machine: their start by spawn, fork or a fork server, their end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal, TypeAlias, get_args

from ...errors import UsageError
from ..failures import WorkerFailed, error_text
from .executor import Limits
from .scheduler import Scheduler, WorkerHandle
from .worker import NEW_WORKER, NUMBER, START, WorkerJob, fork, kill_group, reaped, serve

STOP_SECONDS = 5.0
"""Time limit for what should happen at once."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    f"from {__package__}.worker import {{}} as run; run(int(sys.argv[1]))"
)

_our_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.Lock()


def _forget_our_ends() -> None:
    """Close the inherited ends of pipes in a fork: left open, workers would not notice the end of their parent."""
    _forking.release()
    for connection in list(_our_ends):
        connection.close()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget_our_ends)


def _pipe() -> tuple[Connection, Connection]:
    """Return both ends of a new pipe: ours, which forks of this process close, and the worker's."""
    with _forking:
        ours, theirs = Pipe()
        _our_ends.add(ours)
    return ours, theirs


class WorkerProcess(ABC):
    """A worker process, its pipe and its end."""

    sentinel: int | None = None
    """A descriptor that is readable once the process has ended, and sometimes before."""

    def __init__(self) -> None:
        self.connection, self._theirs = _pipe()

    @abstractmethod
    def ending(self) -> str | None:
        """How the process ended, as the predicate of a sentence; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and the processes it started."""

    def wait(self, seconds: float) -> str | None:
        """Wait at most so long for the end; return `ending()`."""
        deadline = time.monotonic() + seconds
        while (found := self.ending()) is None and (left := deadline - time.monotonic()) > 0:
            if self.sentinel is not None:
                wait([self.sentinel], left)
            else:
                time.sleep(min(left, 0.01))
        return found

    def stop(self) -> None:
        """Kill the process, wait for its end and close the pipe; may be called twice."""
        self.kill()
        self.wait(STOP_SECONDS)
        self.connection.close()
        self._theirs.close()


class ProcessStarter(ABC):
    """Starts workers for one job."""

    greeting: bytes | None = None
    """The first call to send to each worker; None where workers have the job from the start."""

    @abstractmethod
    def start(self) -> WorkerProcess:
        """Start a worker without waiting until it is ready; OSError where the system allows no more processes."""

    def close(self) -> None:
        """End helper processes, after the workers."""


class ChildProcess(WorkerProcess):
    """A child of this process; `make` starts it with the worker's end of the pipe and returns its process id."""

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
            except ChildProcessError:  # other code in this process reaps all children
                self._ending = "ended"
            if self._ending is not None and self.sentinel is not None:
                os.close(self.sentinel)
                self.sentinel = None
        return self._ending

    def kill(self) -> None:
        if self._ending is None:
            kill_group(self._pid)


class SpawnStarter(ProcessStarter):
    """Starts a new interpreter for each worker; multiprocessing's spawn would run the caller's script again."""

    def __init__(self, job: WorkerJob) -> None:
        self.greeting = pickle.dumps((START, (job,)))

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: launch("main", theirs.fileno()))


class ForkStarter(ProcessStarter):
    """Forks this process after it has imported what workers need; they inherit the job in memory."""

    def __init__(self, job: WorkerJob) -> None:
        job.before_fork()
        self._job = job

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: fork(lambda: serve(theirs, self._job)))


class ForkServerStarter(ProcessStarter):
    """Forks workers from a server process that has only their imports; replaces a lost server."""

    def __init__(self, job: WorkerJob) -> None:
        self.greeting = pickle.dumps((START, (job,)))
        self._server = _server()

    def start(self) -> WorkerProcess:
        if self._server.ending() is not None:
            self._server.stop()
            self._server = _server()
        return _ServerChild(self._server)

    def close(self) -> None:
        self._server.stop()


def _server() -> ChildProcess:
    return ChildProcess(lambda theirs: launch("serve_forks", theirs.fileno()))


class _ServerChild(WorkerProcess):
    """A child of the fork server, see `serve_forks`."""

    def __init__(self, server: ChildProcess) -> None:
        super().__init__()
        self._server = server
        self._pid: int | None = None
        self._ending: str | None = None
        self.sentinel, news = os.pipe()
        os.set_blocking(self.sentinel, False)
        with contextlib.suppress(OSError):  # `_news` notices a server that has ended
            self._ask(NEW_WORKER, (self._theirs.fileno(), news))
        self._theirs.close()
        os.close(news)

    def _ask(self, number: int, descriptors: Sequence[int] = ()) -> None:
        control = socket.socket(fileno=self._server.connection.fileno())
        try:
            socket.send_fds(control, [NUMBER.pack(number)], descriptors)
        finally:
            control.detach()

    def ending(self) -> str | None:
        while self._ending is None and (number := self._news()) is not None:
            if self._pid is None:
                self._pid = number
            else:
                self._set_ending(ending_of(number))
        return self._ending

    def _news(self) -> int | None:
        assert self.sentinel is not None, "open until the ending is known"
        try:
            data = os.read(self.sentinel, NUMBER.size)
        except BlockingIOError:
            return None
        if data:
            number: int = NUMBER.unpack(data)[0]
            return number
        if self._pid is None:
            self._set_ending("could not be forked")
        else:
            kill_group(self._pid)
            _wait_for(self._pid)
            self._set_ending("was lost with the process that it was forked from")
        return None

    def _set_ending(self, ending: str) -> None:
        assert self.sentinel is not None, "only once"
        os.close(self.sentinel)
        self._ending, self.sentinel = ending, None

    def kill(self) -> None:
        if self.ending() is None and self._pid is not None:
            try:
                self._ask(self._pid)
            except OSError:
                kill_group(self._pid)

    def stop(self) -> None:
        self.connection.close()  # ends a worker that is forked later or has lost its server
        self.kill()
        if self._pid is not None:
            super().stop()


def _wait_for(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            wait([descriptor], STOP_SECONDS)
            os.close(descriptor)


def launch(function: str, descriptor: int) -> int:
    """Run a function of the module `worker` with a descriptor in a new interpreter; return the process id.

    The import path is that of this process. `-P` keeps the current folder from shadowing the standard library.
    """
    path = json.dumps([str(entry) for entry in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(function), str(descriptor), path],
        stdin=subprocess.DEVNULL,
        stdout=_standard_error(),  # prints of the function must not mix with this process's output
        pass_fds=(descriptor,),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C in a terminal goes to the parent, which stops its workers
    )
    process.returncode = 0  # `reaped` waits for it
    return process.pid


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def ending_of(code: int) -> str:
    """Describe the end of a process by its exit status or the negative signal number."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


StartMethod: TypeAlias = Literal["fork", "forkserver", "spawn"]

START_METHODS: tuple[StartMethod, ...] = get_args(StartMethod)

_THREADED = ("jaxlib", "ray", "tensorflow")
"""Libraries with threads that do not survive a fork."""


def default_start_method() -> StartMethod:
    """Return `fork`, the fastest, where this process can be forked safely.

    On Linux `forkserver` where CUDA is initialized or a library is loaded whose threads do not survive a fork;
    elsewhere `spawn`, because system libraries there do not support forks. Threads of the caller are safe, as for the
    workers of torch's DataLoader: a worker is forked after its imports, has one torch thread and its own streams.
    """
    if sys.platform != "linux":
        return "spawn"
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return "forkserver" if cuda or any(name in sys.modules for name in _THREADED) else "fork"


def starter_of(method: str | None, job: WorkerJob) -> ProcessStarter:
    """Return the starter of a start method, None for the default; UsageError for an unknown one."""
    method = method or default_start_method()
    if method not in START_METHODS:
        ways = ", ".join(START_METHODS)
        raise UsageError(f"{method!r} is no way to start worker processes: {ways} are")
    if method == "fork":
        return ForkStarter(job)
    job = job.portable()
    return ForkServerStarter(job) if method == "forkserver" else SpawnStarter(job)


_LOOK_SECONDS = 0.1


class _PipeWorker(WorkerHandle):
    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self.process = process
        self.readable = False  # whether the pipe is known to have data

    def send(self, call: bytes) -> None:
        with contextlib.suppress(OSError):
            self.process.connection.send_bytes(call)

    def received(self) -> bytes | None:
        ending = self.process.ending()  # before `poll`, so that its last answer is read
        connection = self.process.connection
        try:
            if self.readable or connection.poll():
                self.readable = False
                return connection.recv_bytes()
        except (EOFError, OSError):
            ending = self.process.wait(STOP_SECONDS) or "closed its pipe"
        if ending is not None:
            raise WorkerFailed(f"a worker process {ending}", "")
        return None

    def is_lost(self) -> bool:
        return self.process.ending() is not None

    def stop(self) -> None:
        self.process.stop()


class WorkerPool(Scheduler):
    """Runs tasks in processes of this machine.

    Raises UsageError for an unknown start method, WorkerFailed where the system allows no more processes.
    """

    def __init__(self, job: WorkerJob, workers: int, limits: Limits, start_method: str | None = None) -> None:
        self._starter = starter_of(start_method, job)
        super().__init__(workers, limits, self._starter.greeting)
        try:
            self._fill(workers)
        except BaseException:
            self.close()
            raise

    def _start(self) -> WorkerHandle:
        try:
            return _PipeWorker(self._starter.start())
        except OSError as error:
            raise WorkerFailed(f"a worker process cannot be started: {error_text(error)}", "") from error

    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        sources: dict[Any, _PipeWorker] = {}
        for worker in workers:
            assert isinstance(worker, _PipeWorker)
            process = worker.process
            sources[process.connection] = worker
            if process.sentinel is not None:
                sources[process.sentinel] = worker
            else:
                seconds = min(seconds, _LOOK_SECONDS)  # the pipe shows the end too, unless another process has it open
        ready = wait(list(sources), seconds)
        for source in ready:
            sources[source].readable |= source is sources[source].process.connection
        return [sources[source] for source in ready] if ready else workers

    def dismiss(self) -> None:
        """Kill all workers without waiting for them."""
        for worker in self._present():
            assert isinstance(worker, _PipeWorker)
            worker.process.kill()

    def close(self) -> None:
        """Kill all workers and wait for them."""
        self.dismiss()
        super().close()
        self._starter.close()
