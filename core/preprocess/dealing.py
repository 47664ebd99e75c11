"""Deals calls out to workers, wherever these are, and sees to it that calls survive them."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .crew import Crew, Limits
from .failures import TaskFailed, TookTooLong, WorkerTrouble, error_text
from .job import Task
from .worker import Answer

__all__ = ["Dealer", "DealtWorker"]

_QUEUED = 2
"""Requests a worker has before it: the one it works on, and one it can begin before it is heard."""

_START_TRIES = 3
"""So many workers in a row may end before they could do anything."""

_LONG_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Request:
    """A call that one worker is to answer; `tries` counts those that failed."""

    method: str
    arguments: tuple[Any, ...]
    tries: int = 0


class DealtWorker(ABC):
    """A worker, and what it has to answer: first to calls that set it up, then to requests, in order.

    `begun` is the task that it was told to compute before anybody asks for it.
    """

    def __init__(self) -> None:
        self.setups = 0
        self.requests: deque[_Request] = deque()
        self.begun: Task | None = None
        self._begun_at = 0.0

    @abstractmethod
    def send(self, call: bytes) -> None:
        """Let it do something; where it has ended already, `received` is to say so."""

    @abstractmethod
    def received(self) -> bytes | None:
        """Return the next answer if there is one; WorkerTrouble where it has ended and none will come."""

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

    def deal(self, request: _Request) -> None:
        """Let it answer a request."""
        if not self.requests:
            self._begun_at = time.monotonic()
        self.requests.append(request)
        self.send(pickle.dumps((request.method, request.arguments)))

    def answer(self, timeout: float | None) -> Answer | None:
        """Return the next answer if there is one.

        WorkerTrouble where it has ended, or has worked on its first request for longer than `timeout`.
        """
        data = self.received()
        if data is not None:
            self._begun_at = time.monotonic()
            return _understood(data)
        if self.left(timeout) <= 0:
            raise TookTooLong(f"a worker process took longer than {timeout:g} s", "")
        return None

    def left(self, timeout: float | None) -> float:
        """Seconds until its time is up."""
        if timeout is None or self.setups or not self.requests:
            return _LONG_SECONDS
        return self._begun_at + timeout - time.monotonic()


class Dealer(Crew):
    """Deals requests out to workers in order, two ahead to each.

    A worker that is lost is replaced by one that is told the same. What it was working on counts as tried; what was
    queued behind that does not.
    """

    def __init__(self, workers: int, limits: Limits, greeting: bytes | None) -> None:
        self._limits = limits
        self._told: list[bytes | None] = [greeting]
        self._workers: list[DealtWorker | None] = [None] * workers
        self._lost_starts = 0

    @abstractmethod
    def _start(self) -> DealtWorker:
        """Start a worker without waiting until it can work."""

    @abstractmethod
    def _await(self, workers: Sequence[DealtWorker], seconds: float) -> Sequence[DealtWorker]:
        """Wait so long, at most, for some that answered or ended, or may have."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Let the first worker do it."""
        for _, (good, value) in self._answers(deque([_Request(method, arguments)]), 1):
            if not good:
                raise value
            return value
        raise AssertionError("each request is answered")

    def tell(self, method: str, *arguments: Any) -> None:
        """Let all workers do it, and wait until one has; if another cannot, whatever is asked next raises that."""
        self._fill(len(self._workers))
        call = pickle.dumps((method, arguments))
        self._told.append(call)
        for worker in self._present():
            worker.set_up(call)
        while all(worker.setups for worker in self._present()):
            for worker in self._stirring(self._present()):
                list(self._hear(worker, deque()))
            self._fill(len(self._workers))

    def begin(self, tasks: Sequence[Task]) -> None:
        """Let workers but the first each compute a task; not where it could hang, for nobody looks at the time."""
        if self._limits.timeout is not None:
            return
        self._fill(len(self._workers))
        for worker, task in zip(self._present()[1:], tasks, strict=False):
            worker.set_up(pickle.dumps(("begin", (task,))))
            worker.begun = task

    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Keep all workers busy until every task is done.

        The first task goes to the first worker, ready or not, which may have done it to answer a `call`; those that
        others have begun go to these.
        """
        left = deque(_Request(method, (task,)) for task in tasks)
        if left:
            self._fill(len(self._workers))
            first, *others = self._present()
            begun = {worker.begun: worker for worker in others} | {tasks[0]: first}
            for request in list(left):
                worker = begun.get(request.arguments[0])
                if worker is not None:
                    left.remove(request)
                    worker.deal(request)
        for request, (good, value) in self._answers(left, len(self._workers)):
            task: Task = request.arguments[0]
            yield task, value if good else TaskFailed(task, value)

    def close(self) -> None:
        """End all workers."""
        for worker in self._present():
            self._drop(worker)

    def _answers(self, left: deque[_Request], places: int) -> Iterator[tuple[_Request, Answer]]:
        """Let the workers of the first places answer all requests; whoever still works when this is closed is lost."""
        try:
            while True:
                if left:
                    self._fill(places)
                    self._deal(left, places)
                workers = self._present(places)
                awaited = [worker for worker in workers if worker.requests or (left and worker.setups)]
                if not awaited and not left:
                    return
                for worker in self._stirring(awaited):
                    yield from self._hear(worker, left, places)
        finally:
            for worker in self._present(places):
                if worker.requests:
                    self._drop(worker)

    def _deal(self, left: deque[_Request], places: int) -> None:
        """Queue requests at those that are ready, first at those with the fewest."""
        ready = [worker for worker in self._present(places) if not worker.setups]
        while left and ready:
            worker = min(ready, key=lambda one: len(one.requests))
            if len(worker.requests) >= _QUEUED:
                return
            worker.deal(left.popleft())

    def _hear(self, worker: DealtWorker, left: deque[_Request], places: int = 0) -> Iterator[tuple[_Request, Answer]]:
        """Take one answer from a worker, or notice that it is lost; yield what a request came to in the end."""
        try:
            answer = worker.answer(self._limits.timeout)
        except WorkerTrouble as trouble:
            yield from self._lose(worker, trouble, left)
            return
        if answer is None:
            return
        if worker.setups:
            self._is_set_up(worker, answer)
            return
        request = worker.requests.popleft()
        settled = self._settled(request, answer, left)
        self._deal(left, places)  # before whoever awaits the answer takes its time
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

    def _is_set_up(self, worker: DealtWorker, answer: Answer) -> None:
        good, value = answer
        if not good:  # the job cannot be done, not only one task
            self._drop(worker)
            raise value
        worker.setups -= 1
        if not worker.setups:
            self._lost_starts = 0

    def _lose(
        self, worker: DealtWorker, trouble: WorkerTrouble, left: deque[_Request]
    ) -> Iterator[tuple[_Request, Answer]]:
        """Deal what a lost worker had before it to others."""
        self._drop(worker)
        if worker.setups:
            self._lost_starts += worker.begun is None  # with one begun it may be the user's function that ended it
            if self._lost_starts >= _START_TRIES:
                raise trouble
            left.extendleft(reversed(worker.requests))
            return
        first, *others = worker.requests
        left.extendleft(reversed(others))
        answer = (False, trouble)
        if self._settled(first, answer, left):
            yield first, answer

    def _present(self, places: int | None = None) -> list[DealtWorker]:
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
            for call in self._told:
                started.set_up(call)

    def _drop(self, worker: DealtWorker) -> None:
        self._workers[self._workers.index(worker)] = None
        worker.stop()

    def _stirring(self, workers: Sequence[DealtWorker]) -> list[DealtWorker]:
        """Wait for workers that answer, end or take too long."""
        limit = self._limits.timeout
        found = self._await(workers, max(0.0, min(worker.left(limit) for worker in workers)))
        return [worker for worker in workers if worker in found or worker.left(limit) <= 0]


def _understood(data: bytes) -> Answer:
    try:
        answer: Answer = pickle.loads(data)
    except Exception as error:
        return False, WorkerTrouble(f"the answer of a worker process cannot be read: {error_text(error)}", "")
    return answer
