"""Schedules requests on workers of any kind, and retries those that fail or lose their worker."""

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

__all__ = ["Scheduler", "WorkerHandle"]

_QUEUED = 2
"""Requests a worker has before it: the one it works on, and one it can begin before it is heard."""

_START_TRIES = 3
"""So many workers in a row may end before they could do anything."""

_LONG_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Request:
    """A call that one worker is to answer, maybe for a task of a run; `tries` counts those that failed."""

    method: str
    arguments: tuple[Any, ...]
    task: Task | None = None
    tries: int = 0


class WorkerHandle(ABC):
    """A worker, and what it has to answer: first to calls that set it up, then to requests, in order.

    `begun` is the task of which it has something already, `beginning` whether it was told to compute that before
    anybody asks for it, and has not answered yet.
    """

    def __init__(self) -> None:
        self.setups = 0
        self.requests: deque[_Request] = deque()
        self.started_task: Task | None = None
        self.starting = False
        self._started_at = 0.0

    @abstractmethod
    def send(self, call: bytes) -> None:
        """Let it do something; where it has ended already, `received` is to say so."""

    @abstractmethod
    def received(self) -> bytes | None:
        """Return the next answer if there is one; WorkerFailed where it has ended and none will come."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether it is known to have ended, though nothing is asked of it."""

    @abstractmethod
    def stop(self) -> None:
        """End it, and wait for that."""

    def set_up(self, call: bytes | None) -> None:
        """Let it do what makes it ready; None is what it does by itself."""
        self.setups += 1
        if call is not None:
            self.send(call)

    def submit(self, request: _Request) -> None:
        """Let it answer a request."""
        if not self.requests:
            self._started_at = time.monotonic()
        self.requests.append(request)
        self.send(pickle.dumps((request.method, request.arguments)))

    def answer(self, timeout: float | None) -> Answer | None:
        """Return the next answer if there is one.

        WorkerFailed where it has ended, or has worked on its first request for longer than `timeout`.
        """
        data = self.received()
        if data is not None:
            self._started_at = time.monotonic()
            return _decoded(data)
        if self.left(timeout) <= 0:
            raise TaskTimeout(f"a worker process took longer than {timeout:g} s", "")
        return None

    def left(self, timeout: float | None) -> float:
        """Seconds until its time is up."""
        if timeout is None or self.setups or not self.requests:
            return _LONG_SECONDS
        return self._started_at + timeout - time.monotonic()


class Scheduler(Executor):
    """Deals requests out to workers in order, two ahead to each.

    A worker that is lost is replaced by one that is told the same. What it was working on counts as tried; what was
    queued behind that does not.
    """

    def __init__(self, workers: int, limits: Limits, greeting: bytes | None) -> None:
        self._limits = limits
        self._setup_calls: list[bytes | None] = [greeting]
        self._workers: list[WorkerHandle | None] = [None] * workers
        self._lost_starts = 0
        self._ahead: deque[Task] = deque()
        self._ended: dict[Task, WorkerFailed] = {}  # tasks in which a worker ended that had begun them

    @abstractmethod
    def _start(self) -> WorkerHandle:
        """Start a worker without waiting until it can work."""

    @abstractmethod
    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        """Wait so long, at most, for some that answered or ended, or may have."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Let the first worker do it."""
        for _, (good, value) in self._answers(deque([_Request(method, arguments)]), 1):
            if not good:
                raise value
            for worker in self._present(1):
                worker.started_task = next((one for one in arguments if isinstance(one, Task)), None)
            return value
        raise AssertionError("each request is answered")

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Let all workers do it, and wait until one has; if another cannot, whatever is asked next raises that."""
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
        """Let workers but the first each compute a task, as soon as they are ready and until all are told something.

        Not where there is a limit on the time, for nobody looks at it.
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
        """Keep all workers busy until every task is done. What a worker has begun is dealt to it first."""
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
        """Let the workers of the first places answer all requests; whoever still works when this is closed is lost."""
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
        """Queue requests at those that are ready, first at those with the fewest."""
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
        """The request to deal to a worker: what it has begun, else the first one that no other has."""
        own, worker.started_task = worker.started_task, None
        if own is not None:
            for request in left:
                if request.task == own:
                    return request
        others = {one.started_task for one in self._present() if one.started_task is not None}
        return next((request for request in left if request.task not in others), None)

    def _failed_ahead(self, left: deque[_Request]) -> Iterator[tuple[_Request, Answer]]:
        """Count the end of a worker in a task that it had begun as a try of that task."""
        for task in list(self._ended):
            for request in [request for request in left if request.task == task]:
                left.remove(request)
                answer = (False, self._ended.pop(task))
                if self._settled(request, answer, left):
                    yield request, answer

    def _receive(
        self, worker: WorkerHandle, left: deque[_Request], places: int = 0
    ) -> Iterator[tuple[_Request, Answer]]:
        """Take one answer from a worker, or notice that it is lost; yield what a request came to in the end."""
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
        self._submit(left, places)  # before whoever awaits the answer takes its time
        if settled:
            yield request, answer

    def _settled(self, request: _Request, answer: Answer, left: deque[_Request]) -> bool:
        """Put a request that is worth another try back in front of the others; tell whether it is done with."""
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
        """Deal what a lost worker had before it to others."""
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
        """Start whom the first places lack."""
        for worker in self._present(places):
            if not worker.requests and not worker.setups and worker.is_lost():
                self._drop(worker)
        empty = [place for place in range(places) if self._workers[place] is None]
        for place in empty:
            self._workers[place] = self._start()
        for place in empty:  # when all are on their way: some need a while until they listen
            started = self._workers[place]
            assert started is not None
            for call in self._setup_calls:
                started.set_up(call)

    def _drop(self, worker: WorkerHandle) -> None:
        self._workers[self._workers.index(worker)] = None
        worker.stop()

    def _ready_workers(self, workers: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Wait for workers that answer, end or take too long."""
        limit = self._limits.timeout
        found = self._await(workers, max(0.0, min(worker.left(limit) for worker in workers)))
        return [worker for worker in workers if worker in found or worker.left(limit) <= 0]


def _decoded(data: bytes) -> Answer:
    try:
        answer: Answer = pickle.loads(data)
    except Exception as error:
        return False, WorkerFailed(f"the answer of a worker process cannot be read: {error_text(error)}", "")
    return answer
