"""Executors whose workers are other processes: a scheduler, and starting and ending processes on this machine.

The scheduler assigns requests to workers of any kind, and retries requests that fail or whose worker is lost. Processes
are started by spawn, fork or a fork server.
"""

from __future__ import annotations

import contextlib
import importlib
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal, TypeAlias, get_args

from ..errors import UsageError
from .tasks import Executor, Job, Limits, Task, TaskFailed, TaskTimeout, WorkerFailed, error_text
from .worker import NEW_WORKER, NUMBER, START, Answer, fork, kill_group, reaped, serve

_QUEUED = 2
"""The most requests of a worker: the one that it runs, and one that it can start before its answer is read."""

_START_TRIES = 3
"""After so many workers in a row that end during their set-up, the error is raised."""

_LONG_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Request:
    """A call for one worker, which belongs to a `run` if it has a task; `tries` counts failed attempts."""

    method: str
    arguments: tuple[Any, ...]
    task: Task | None = None
    tries: int = 0


class WorkerHandle(ABC):
    """The parent's side of a worker, which answers first its set-up calls and then its requests, in order.

    `setups` is the number of unanswered set-up calls. `started_task` is the task that the worker has started ahead of
    the next `run`; `starting` is true until it has answered that call.
    """

    def __init__(self) -> None:
        self.setups = 0
        self.requests: deque[_Request] = deque()
        self.started_task: Task | None = None
        self.starting = False
        self._started_at = 0.0

    @abstractmethod
    def send(self, call: bytes) -> None:
        """Send a call. Does not raise an error if the worker has ended, which `received` reports."""

    @abstractmethod
    def received(self) -> bytes | None:
        """Return the next answer, None if there is none yet; WorkerFailed if the worker has ended."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the worker is known to have ended while it was idle."""

    @abstractmethod
    def stop(self) -> None:
        """End the worker and wait for its end."""

    def set_up(self, call: bytes | None) -> None:
        """Send a set-up call; None stands for one that the worker runs by itself."""
        self.setups += 1
        if call is not None:
            self.send(call)

    def submit(self, request: _Request) -> None:
        """Assign a request."""
        if not self.requests:
            self._started_at = time.monotonic()
        self.requests.append(request)
        self.send(pickle.dumps((request.method, request.arguments)))

    def answer(self, timeout: float | None) -> Answer | None:
        """Return the next answer, None if there is none yet.

        WorkerFailed if the worker has ended; TaskTimeout if its first request runs for longer than `timeout`.
        """
        data = self.received()
        if data is not None:
            self._started_at = time.monotonic()
            return _unpickled(data)
        if self.left(timeout) <= 0:
            raise TaskTimeout(f"a worker process took longer than {timeout:g} s", "")
        return None

    def left(self, timeout: float | None) -> float:
        """Return the seconds until the first request exceeds the timeout."""
        if timeout is None or self.setups or not self.requests:
            return _LONG_SECONDS
        return self._started_at + timeout - time.monotonic()


class Scheduler(Executor):
    """Assigns requests to workers in order, at most two to each.

    A lost worker is replaced by one that gets the same set-up calls. Its current request counts as a failed try; the
    one queued behind it does not.
    """

    def __init__(self, workers: int, limits: Limits, greeting: bytes | None) -> None:
        self._limits = limits
        self._setup_calls: list[bytes | None] = [greeting]
        self._workers: list[WorkerHandle | None] = [None] * workers
        self._lost_starts = 0
        self._ahead: deque[Task] = deque()
        self._ended: dict[Task, WorkerFailed] = {}  # tasks whose worker ended while it started them ahead

    @abstractmethod
    def _start(self) -> WorkerHandle:
        """Start a worker without waiting until it can work."""

    @abstractmethod
    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        """Wait at most `seconds` until a worker has answered or ended; return the workers that may have."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method on the first worker."""
        for _, (good, value) in self._answers(deque([_Request(method, arguments)]), 1):
            if not good:
                raise value
            for worker in self._present(1):
                worker.started_task = next((one for one in arguments if isinstance(one, Task)), None)
            return value
        raise AssertionError("each request is answered")

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Call the method on all workers and wait for the first answer; a later failure is raised by the next call."""
        self._ahead.clear()
        self._fill(len(self._workers))
        call = pickle.dumps((method, arguments))
        self._setup_calls.append(call)
        for worker in self._present():
            worker.set_up(call)
        while all(worker.setups for worker in self._present()):
            for worker in self._ready_workers(self._present()):
                list(self._receive(worker, deque()))
            self._fill(len(self._workers))

    def begin(self, tasks: Sequence[Task]) -> None:
        """Start a task on each worker but the first as soon as it is ready, until the next `broadcast` or `run`.

        Does nothing if tasks have a time limit, which is not checked for set-up calls.
        """
        if self._limits.timeout is None:
            self._ahead = deque(tasks[: len(self._workers) - 1])
            self._start_ahead()

    def _start_ahead(self) -> None:
        for worker in self._workers[1:]:
            if self._ahead and worker is not None and not (worker.setups or worker.requests or worker.started_task):
                worker.started_task, worker.starting = self._ahead.popleft(), True
                worker.set_up(pickle.dumps(("begin", (worker.started_task,))))

    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Run all tasks on all workers; a task that was started ahead goes to the worker that started it."""
        self._ahead.clear()
        left = deque(_Request(method, (task,), task) for task in tasks)
        for request, (good, value) in self._answers(left, len(self._workers)):
            assert request.task is not None
            yield request.task, value if good else TaskFailed(request.task, value)

    def close(self) -> None:
        """End all workers."""
        for worker in self._present():
            self._drop(worker)

    def _answers(self, left: deque[_Request], places: int) -> Iterator[tuple[_Request, Answer]]:
        """Let the first `places` workers answer all requests in `left`; yield the answers.

        Closing the iterator ends workers that still run a request.
        """
        try:
            while True:
                yield from self._failed_ahead(left)
                if left:
                    self._fill(places)
                    self._submit(left, places)
                workers = self._present(places)
                awaited = [worker for worker in workers if worker.requests or (left and worker.setups)]
                if self._ahead:
                    awaited += [worker for worker in self._present()[len(workers) :] if worker.setups]
                if not awaited and not left:
                    return
                for worker in self._ready_workers(awaited):
                    yield from self._receive(worker, left, places)
        finally:
            for worker in self._present(places):
                if worker.requests:
                    self._drop(worker)

    def _submit(self, left: deque[_Request], places: int) -> None:
        """Assign requests to ready workers, first to those with the fewest."""
        ready = [worker for worker in self._present(places) if not worker.setups]
        while left and ready:
            worker = min(ready, key=lambda one: len(one.requests))
            if len(worker.requests) >= _QUEUED:
                return
            request = self._next(worker, left)
            if request is None:
                ready.remove(worker)
            else:
                left.remove(request)
                worker.submit(request)

    def _next(self, worker: WorkerHandle, left: deque[_Request]) -> _Request | None:
        """Return the next request for a worker: the task that it has started, or the first that nobody has started."""
        own, worker.started_task = worker.started_task, None
        if own is not None:
            for request in left:
                if request.task == own:
                    return request
        others = {one.started_task for one in self._present() if one.started_task is not None}
        return next((request for request in left if request.task not in others), None)

    def _failed_ahead(self, left: deque[_Request]) -> Iterator[tuple[_Request, Answer]]:
        """Count tasks whose worker ended while it started them ahead as tried; yield those without tries left."""
        for task in list(self._ended):
            for request in [request for request in left if request.task == task]:
                left.remove(request)
                answer = (False, self._ended.pop(task))
                if self._settled(request, answer, left):
                    yield request, answer

    def _receive(
        self, worker: WorkerHandle, left: deque[_Request], places: int = 0
    ) -> Iterator[tuple[_Request, Answer]]:
        """Take one answer of a worker, or drop it if it is lost; yield a request whose answer is final."""
        try:
            answer = worker.answer(self._limits.timeout)
        except WorkerFailed as trouble:
            yield from self._on_worker_lost(worker, trouble, left)
            return
        if answer is None:
            return
        if worker.setups:
            self._is_set_up(worker, answer)
            return
        request = worker.requests.popleft()
        settled = self._settled(request, answer, left)
        self._submit(left, places)  # before the yield, as the consumer of the answer may take long
        if settled:
            yield request, answer

    def _settled(self, request: _Request, answer: Answer, left: deque[_Request]) -> bool:
        """Return whether an answer is final; otherwise put the request at the front of `left`, to be retried."""
        good, value = answer
        if good or request.tries >= self._limits.retries or not TaskFailed.may_pass(value):
            return True
        request.tries += 1
        left.appendleft(request)
        return False

    def _is_set_up(self, worker: WorkerHandle, answer: Answer) -> None:
        good, value = answer
        if not good:  # no task of the job can succeed
            self._drop(worker)
            raise value
        worker.setups -= 1
        worker.starting = False
        if not worker.setups:
            self._lost_starts = 0
            self._start_ahead()

    def _on_worker_lost(
        self, worker: WorkerHandle, trouble: WorkerFailed, left: deque[_Request]
    ) -> Iterator[tuple[_Request, Answer]]:
        """Drop a lost worker and put its requests back into the queue; yield one without tries left."""
        self._drop(worker)
        if worker.starting and worker.started_task is not None:
            self._ended[worker.started_task] = trouble
            return
        if worker.setups:
            self._lost_starts += 1
            if self._lost_starts >= _START_TRIES:
                raise trouble
            return
        first, *others = worker.requests
        left.extendleft(reversed(others))
        answer = (False, trouble)
        if self._settled(first, answer, left):
            yield first, answer

    def _present(self, places: int | None = None) -> list[WorkerHandle]:
        return [worker for worker in self._workers[:places] if worker is not None]

    def _fill(self, places: int) -> None:
        """Start workers for empty places among the first `places`."""
        for worker in self._present(places):
            if not worker.requests and not worker.setups and worker.is_lost():
                self._drop(worker)
        empty = [place for place in range(places) if self._workers[place] is None]
        for place in empty:
            self._workers[place] = self._start()
        for place in empty:  # after starting all, since a spawned worker takes seconds until it reads calls
            started = self._workers[place]
            assert started is not None
            for call in self._setup_calls:
                started.set_up(call)

    def _drop(self, worker: WorkerHandle) -> None:
        self._workers[self._workers.index(worker)] = None
        worker.stop()

    def _ready_workers(self, workers: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Wait for workers that answer, end or exceed the timeout."""
        limit = self._limits.timeout
        found = self._await(workers, max(0.0, min(worker.left(limit) for worker in workers)))
        return [worker for worker in workers if worker in found or worker.left(limit) <= 0]


def _unpickled(data: bytes) -> Answer:
    try:
        answer: Answer = pickle.loads(data)  # safe: from a process that this one has started, through its own pipe
    except Exception as error:
        return False, WorkerFailed(f"the answer of a worker process cannot be read: {error_text(error)}", "")
    return answer


STOP_SECONDS = 5.0
"""Time limit for what should happen at once."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    f"from {__package__}.worker import {{}} as run; run(int(sys.argv[1]), *sys.argv[3:])"
)

_our_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.Lock()


def _forget_our_ends() -> None:
    """Close the inherited ends of pipes in a fork; otherwise workers would not notice the end of their parent."""
    _forking.release()
    for connection in list(_our_ends):
        connection.close()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget_our_ends)


def _pipe() -> tuple[Connection, Connection]:
    """Return both ends of a new pipe: this process's, which its forks close, and the worker's."""
    with _forking:
        ours, theirs = Pipe()
        _our_ends.add(ours)
    return ours, theirs


class WorkerProcess(ABC):
    """A worker process, with a pipe to it."""

    sentinel: int | None = None
    """A descriptor that is readable once the process has ended, and sometimes before."""

    def __init__(self) -> None:
        self.connection, self._theirs = _pipe()

    @abstractmethod
    def ending(self) -> str | None:
        """Return how the process ended, as the predicate of a sentence; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and the processes it started."""

    def wait(self, seconds: float) -> str | None:
        """Wait at most `seconds` for the end of the process; return `ending()`."""
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
    """The first call to send to each worker; None if workers have the job from the start."""

    @abstractmethod
    def start(self) -> WorkerProcess:
        """Start a worker without waiting until it is ready; OSError if the system allows no more processes."""

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
            except ChildProcessError:  # other code in this process has reaped the child
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

    def __init__(self, job: Job) -> None:
        self.greeting = pickle.dumps((START, (job,)))

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: launch("main", theirs.fileno()))


class ForkStarter(ProcessStarter):
    """Forks this process after it has imported what workers need; they inherit the job in memory."""

    def __init__(self, job: Job) -> None:
        for name in job.imports:
            importlib.import_module(name)
        self._job = job

    def start(self) -> WorkerProcess:
        return ChildProcess(lambda theirs: fork(lambda: serve(theirs, self._job)))


class ForkServerStarter(ProcessStarter):
    """Forks workers from a server process that has only imported their modules; replaces a lost server."""

    def __init__(self, job: Job) -> None:
        self.greeting = pickle.dumps((START, (job,)))
        self._imports = job.imports
        self._server = _server(self._imports)

    def start(self) -> WorkerProcess:
        if self._server.ending() is not None:
            self._server.stop()
            self._server = _server(self._imports)
        return _ServerChild(self._server)

    def close(self) -> None:
        self._server.stop()


def _server(imports: Sequence[str]) -> ChildProcess:
    return ChildProcess(lambda theirs: launch("serve_forks", theirs.fileno(), *imports))


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


def launch(function: str, descriptor: int, *arguments: str) -> int:
    """Run a function of the module `worker` with these arguments in a new interpreter; return the process id.

    It gets the import path of this process. With `-P` the current folder cannot shadow the standard library.
    """
    path = json.dumps([str(entry) for entry in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(function), str(descriptor), path, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=_standard_error(),  # prints of the function must not mix with this process's output
        pass_fds=(descriptor,),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C in a terminal only reaches the parent, which stops its workers
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

_THREADED = ("jaxlib", "lance", "ray", "tensorflow")
"""Libraries with threads that do not survive a fork."""


def default_start_method() -> StartMethod:
    """Return `fork`, which is the fastest, if this process can be forked safely.

    On Linux `forkserver` if CUDA is initialized or a library is loaded whose threads do not survive a fork; on other
    systems `spawn`, because their libraries do not support forks. Other threads of the caller are safe, as for workers
    of torch's DataLoader: a worker is forked after its imports, and has one torch thread and its own standard streams.
    """
    if sys.platform != "linux":
        return "spawn"
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return "forkserver" if cuda or any(name in sys.modules for name in _THREADED) else "fork"


def starter_of(method: str | None, job: Job) -> ProcessStarter:
    """Return the starter of a start method, None for the default; UsageError for an unknown one."""
    method = method or default_start_method()
    if method not in START_METHODS:
        ways = ", ".join(START_METHODS)
        raise UsageError(f"{method!r} is not a way to start worker processes, expected {ways}")
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
        ending = self.process.ending()  # before `poll`, so that the last answer of an ended process is still read
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

    Raises UsageError for an unknown start method, WorkerFailed if the system allows no more processes.
    """

    def __init__(self, job: Job, workers: int, limits: Limits, start_method: str | None = None) -> None:
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
                seconds = min(seconds, _LOOK_SECONDS)  # the pipe may not show the end, if another process has it open
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
