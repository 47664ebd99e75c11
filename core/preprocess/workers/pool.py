"""Executors whose workers are processes: of this machine, connected by pipes, or actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Literal, TypeAlias, get_args

from ...errors import UsageError
from ..failures import WorkerFailed, error_text
from ..processor import Job
from .executor import Limits
from .processes import STOP_SECONDS, ForkServerStarter, ForkStarter, ProcessStarter, SpawnStarter, WorkerProcess
from .scheduler import Scheduler, WorkerHandle
from .worker import START, CallServer, pickled

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


def starter_of(method: str | None, job: Job) -> ProcessStarter:
    """Return the starter of a start method, None for the default; UsageError for an unknown one."""
    method = method or default_start_method()
    if method not in START_METHODS:
        ways = ", ".join(START_METHODS)
        raise UsageError(f"{method!r} is no way to start worker processes: {ways} are")
    if method == "fork":
        if job.processor.needs_measuring:
            job.processor.portable()  # the measured one is sent to the workers
        return ForkStarter(job)
    job = replace(job, processor=job.processor.portable())
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


_STORE_BYTES = 100 * 2**20  # messages are small: paths, row numbers, digests
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class _Actor:
    """The worker's side: Ray runs it in a process on a node."""

    def __init__(self, path: Sequence[str]) -> None:
        os.dup2(2, 1)  # prints of the function must not mix with the driver's output
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._serving = CallServer()

    def answer(self, call: bytes) -> bytes:
        """Answer a pickled call."""
        return pickled(self._serving.answer(*pickle.loads(call)))  # safe: from the driver, whose code runs here anyway


class _ActorWorker(WorkerHandle):
    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray
        actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor)
        self._actor = actor.remote([str(entry) for entry in sys.path])
        self.answers: deque[Any] = deque()

    def send(self, call: bytes) -> None:
        self.answers.append(self._actor.answer.remote(call))

    def received(self) -> bytes | None:
        if not self.answers or not self._ray.wait([self.answers[0]], timeout=0)[0]:
            return None
        try:
            data: bytes = self._ray.get(self.answers.popleft())
        except self._ray.exceptions.RayError as error:
            raise WorkerFailed(f"a worker process on the cluster was lost: {error_text(error)}", "") from None
        return data

    def is_lost(self) -> bool:
        return False  # only a pending answer shows the end of an actor

    def stop(self) -> None:
        self._ray.kill(self._actor)
        if self.answers:  # each fails when the process has ended
            self._ray.wait(list(self.answers), num_returns=len(self.answers), timeout=STOP_SECONDS)


class RayExecutor(Scheduler):
    """Runs tasks in Ray actors of one core each.

    All nodes need rbtool, and the source and the destination under the same paths, in a shared folder. Uses the Ray
    that this process is connected to; else connects to the cluster of the environment variable RAY_ADDRESS, or starts
    one on this machine with `workers` cores, until `close`. UsageError where Ray is not installed or the cluster
    cannot be reached.
    """

    def __init__(self, job: Job, workers: int, limits: Limits) -> None:
        workers = max(workers, 1)
        job = replace(job, processor=job.processor.portable())
        super().__init__(workers, limits, pickle.dumps((START, (job,))))
        self._ray = _imported()
        self._started = not self._ray.is_initialized()
        try:
            if self._started:
                _connect(self._ray, workers)
            self._fill(workers)
        except BaseException:
            self.close()
            raise

    def _start(self) -> WorkerHandle:
        return _ActorWorker(self._ray)

    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        first = {worker.answers[0]: worker for worker in workers if isinstance(worker, _ActorWorker) and worker.answers}
        ready, _ = self._ray.wait(list(first), timeout=seconds)
        return [first[answer] for answer in ready]

    def close(self) -> None:
        """End all actors, and the connection if this executor made it."""
        if self._ray.is_initialized():
            super().close()
            if self._started:
                self._ray.shutdown()


def _imported() -> Any:
    try:
        with _environment(_QUIET):
            import ray
            import ray.exceptions
            import ray.job_config
    except ImportError as error:
        raise UsageError(
            f"engine ray needs Ray, which is not installed here ({error})", hint="pip install 'rbtool[ray]'"
        ) from error
    return ray


def _connect(ray: Any, workers: int) -> None:
    quiet = {"include_dashboard": False, "num_cpus": workers, "object_store_memory": _STORE_BYTES}
    address = os.environ.get("RAY_ADDRESS")
    where = {"address": address} if address else {"address": "local", **quiet}
    try:
        with _environment(_QUIET):
            ray.init(**where, logging_level=logging.ERROR, **_without_current_folder(ray, address))
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        place = f"the Ray cluster {address}" if address else "a Ray of our own"
        raise UsageError(f"{place} cannot be reached: {error_text(error)}") from error


def _without_current_folder(ray: Any, address: str | None) -> dict[str, Any]:
    """Keep the current folder, whose `json.py` would shadow the standard one, off the workers' import path.

    Ray puts it first there unless the job has a working folder of its own; a Ray client does not.
    """
    if address is not None and address.startswith("ray://"):
        return {}
    config = ray.job_config.JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return {"job_config": config}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, inside the context."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
