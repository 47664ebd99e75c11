"""The scheduler: assigns requests to workers of any kind, and retries those that fail or lose their worker."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import TaskFailed, TaskTimeout, WorkerFailed, error_text
from ..processor import Task
from .executor import Executor, Limits
from .worker import Answer

_QUEUED = 2
"""Requests assigned to a worker: the one that it runs, and one that it can start before its answer is read."""

_START_TRIES = 3
"""Workers in a row that may end during their set-up."""

_LONG_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Request:
    """A call for one worker, of a `run` if it has a task; `tries` counts the failed ones."""

    method: str
    arguments: tuple[Any, ...]
    task: Task | None = None
    tries: int = 0


class WorkerHandle(ABC):
    """The parent's side of a worker: the set-up calls and then the requests that it has to answer, in order.

    `started_task` is the task whose rows the worker computes or keeps ahead of the `run`; `starting` is true until
    it has answered that.
    """

    def __init__(self) -> None:
        self.setups = 0
        self.requests: deque[_Request] = deque()
        self.started_task: Task | None = None
        self.starting = False
        self._started_at = 0.0

    @abstractmethod
    def send(self, call: bytes) -> None:
        """Send a call. Does not raise where the worker has ended: `received` does."""

    @abstractmethod
    def received(self) -> bytes | None:
        """Return the next answer, None if there is none yet; WorkerFailed where the worker has ended."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the worker is known to have ended while it was idle."""

    @abstractmethod
    def stop(self) -> None:
        """End the worker and wait for its end."""

    def set_up(self, call: bytes | None) -> None:
        """Send a set-up call; None is one that the worker runs by itself."""
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

        WorkerFailed where the worker has ended; TaskTimeout where its first request runs for longer than `timeout`.
        """
        data = self.received()
        if data is not None:
            self._started_at = time.monotonic()
            return _unpickled(data)
        if self.left(timeout) <= 0:
            raise TaskTimeout(f"a worker process took longer than {timeout:g} s", "")
        return None

    def left(self, timeout: float | None) -> float:
        """Seconds until the timeout of the first request."""
        if timeout is None or self.setups or not self.requests:
            return _LONG_SECONDS
        return self._started_at + timeout - time.monotonic()


class Scheduler(Executor):
    """Assigns requests to workers in order, at most two to each.

    A lost worker is replaced by one with the same set-up calls. The request that it ran counts as tried; the one
    queued behind that does not.
    """

    def __init__(self, workers: int, limits: Limits, greeting: bytes | None) -> None:
        self._limits = limits
        self._setup_calls: list[bytes | None] = [greeting]
        self._workers: list[WorkerHandle | None] = [None] * workers
        self._lost_starts = 0
        self._ahead: deque[Task] = deque()
        self._ended: dict[Task, WorkerFailed] = {}  # tasks in whose early start a worker ended

    @abstractmethod
    def _start(self) -> WorkerHandle:
        """Start a worker without waiting until it can work."""

    @abstractmethod
    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        """Wait, at most for `seconds`, for workers that have answered or ended; return those that may have."""

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

        Does nothing where tasks have a time limit, which is not checked for set-up calls.
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
        """Run all tasks on all workers; a task that a worker has started is assigned to it first."""
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
        """Yield the answers to all requests by the workers of the first `places`.

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
        """The next request for a worker: that of the task it has started, else the first that no other has started."""
        own, worker.started_task = worker.started_task, None
        if own is not None:
            for request in left:
                if request.task == own:
                    return request
        others = {one.started_task for one in self._present() if one.started_task is not None}
        return next((request for request in left if request.task not in others), None)

    def _failed_ahead(self, left: deque[_Request]) -> Iterator[tuple[_Request, Answer]]:
        """Count the end of a worker during the early start of a task as a try of that task."""
        for task in list(self._ended):
            for request in [request for request in left if request.task == task]:
                left.remove(request)
                answer = (False, self._ended.pop(task))
                if self._settled(request, answer, left):
                    yield request, answer

    def _receive(
        self, worker: WorkerHandle, left: deque[_Request], places: int = 0
    ) -> Iterator[tuple[_Request, Answer]]:
        """Take one answer of a worker, or replace it if it is lost; yield a request that is settled."""
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
        self._submit(left, places)  # first: the consumer of the answer may take long
        if settled:
            yield request, answer

    def _settled(self, request: _Request, answer: Answer, left: deque[_Request]) -> bool:
        """Whether an answer is final; a request that is retried goes to the front of `left`."""
        good, value = answer
        if good or request.tries >= self._limits.retries or not TaskFailed.may_pass(value):
            return True
        request.tries += 1
        left.appendleft(request)
        return False

    def _is_set_up(self, worker: WorkerHandle, answer: Answer) -> None:
        good, value = answer
        if not good:  # the job cannot be done, not only one task
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
        """Return the requests of a lost worker to the queue."""
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
        for place in empty:  # after all are started: a spawned worker needs seconds until it reads
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
