"""Worker processes on this machine, each connected by a pipe, and the choice of their start method."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Literal, TypeAlias, get_args

from ...errors import UsageError
from ..failures import WorkerFailed, error_text
from ..processor import Job
from .executor import Limits
from .forkserver import ForkServerStarter
from .processes import STOP_SECONDS, ForkStarter, ProcessStarter, SpawnStarter, WorkerProcess
from .scheduler import Scheduler, WorkerHandle

__all__ = ["START_METHODS", "StartMethod", "WorkerPool", "default_start_method", "starter_of"]

StartMethod: TypeAlias = Literal["fork", "forkserver", "spawn"]

START_METHODS: tuple[StartMethod, ...] = get_args(StartMethod)

_THREADED = ("jaxlib", "ray", "tensorflow")
"""Libraries whose own threads do not survive a fork, and who do not know of it."""


def default_start_method() -> StartMethod:
    """Choose `fork`, the quickest by far, where this process can be forked without harm.

    Not so where CUDA runs, nor beside libraries whose threads do not survive a fork: then a fresh process is forked on
    Linux, and a new one started for each worker elsewhere, where system libraries do not allow for forks. Threads of
    the caller's own are no hindrance, as for the workers of torch's DataLoader: a worker has imported what it needs
    before, has one torch thread, and its own standard streams.
    """
    if sys.platform != "linux":
        return "spawn"
    return "fork" if _can_be_forked() else "forkserver"


def _can_be_forked() -> bool:
    if any(name in sys.modules for name in _THREADED):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def starter_of(method: str | None, job: Job) -> ProcessStarter:
    """Return what starts workers in this way, by default the best one; UsageError for another word."""
    method = method or default_start_method()
    if method not in START_METHODS:
        ways = ", ".join(START_METHODS)
        raise UsageError(f"{method!r} is no way to start worker processes: {ways} are")
    if method == "fork":
        return ForkStarter(job)
    job = replace(job, processor=job.processor.portable())
    return ForkServerStarter(job) if method == "forkserver" else SpawnStarter(job)


_LOOK_SECONDS = 0.1


class _PipeWorker(WorkerHandle):
    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self.process = process
        self.readable = False  # whether its answer is known to be there

    def send(self, call: bytes) -> None:
        with contextlib.suppress(OSError):
            self.process.connection.send_bytes(call)

    def received(self) -> bytes | None:
        ending = self.process.ending()  # before the look: what it sent last counts
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
    """Runs tasks in processes of their own, started in one of the ways of `start_methods`.

    Raises UsageError for another way, WorkerFailed where the system allows no more processes.
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
                seconds = min(seconds, _LOOK_SECONDS)  # a pipe tells of the end too, but not while another has it open
        ready = wait(list(sources), seconds)
        for source in ready:
            sources[source].readable |= source is sources[source].process.connection
        return [sources[source] for source in ready] if ready else workers

    def dismiss(self) -> None:
        """Kill all workers: to end takes each a while."""
        for worker in self._present():
            assert isinstance(worker, _PipeWorker)
            worker.process.kill()

    def close(self) -> None:
        """Kill all workers and wait for them."""
        self.dismiss()
        super().close()
        self._starter.close()
