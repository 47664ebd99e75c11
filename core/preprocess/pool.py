"""Worker processes on this machine, each at the other end of a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from .crew import Limits
from .dealing import Dealer, DealtWorker
from .failures import WorkerTrouble, error_text
from .job import Job
from .processes import STOP_SECONDS, Member
from .start_methods import starter_of

__all__ = ["WorkerPool"]

_LOOK_SECONDS = 0.1


class _Worker(DealtWorker):
    def __init__(self, process: Member) -> None:
        super().__init__()
        self.process = process
        self.heard = False  # whether its answer is known to be there

    def send(self, call: bytes) -> None:
        with contextlib.suppress(OSError):
            self.process.connection.send_bytes(call)

    def received(self) -> bytes | None:
        ending = self.process.ending()  # before the look: what it sent last counts
        connection = self.process.connection
        try:
            if self.heard or connection.poll():
                self.heard = False
                return connection.recv_bytes()
        except (EOFError, OSError):
            ending = self.process.wait(STOP_SECONDS) or "closed its pipe"
        if ending is not None:
            raise WorkerTrouble(f"a worker process {ending}", "")
        return None

    def is_lost(self) -> bool:
        return self.process.ending() is not None

    def stop(self) -> None:
        self.process.stop()


class WorkerPool(Dealer):
    """Runs tasks in processes of their own, started in one of the ways of `start_methods`.

    Raises UsageError for another way, WorkerTrouble where the system allows no more processes.
    """

    def __init__(self, job: Job, workers: int, limits: Limits, start_method: str | None = None) -> None:
        self._starter = starter_of(start_method, job)
        super().__init__(workers, limits, self._starter.greeting)
        try:
            self._fill(workers)
        except BaseException:
            self.close()
            raise

    def _start(self) -> DealtWorker:
        try:
            return _Worker(self._starter.start())
        except OSError as error:
            raise WorkerTrouble(f"a worker process cannot be started: {error_text(error)}", "") from error

    def _await(self, workers: Sequence[DealtWorker], seconds: float) -> Sequence[DealtWorker]:
        sources: dict[Any, _Worker] = {}
        for worker in workers:
            assert isinstance(worker, _Worker)
            process = worker.process
            sources[process.connection] = worker
            if process.sentinel is not None:
                sources[process.sentinel] = worker
            else:
                seconds = min(seconds, _LOOK_SECONDS)  # a pipe tells of the end too, but not while another has it open
        ready = wait(list(sources), seconds)
        for source in ready:
            sources[source].heard |= source is sources[source].process.connection
        return [sources[source] for source in ready] if ready else workers

    def dismiss(self) -> None:
        """Kill all workers: to end takes each a while."""
        for worker in self._present():
            assert isinstance(worker, _Worker)
            worker.process.kill()

    def close(self) -> None:
        """Kill all workers and wait for them."""
        self.dismiss()
        super().close()
        self._starter.close()
