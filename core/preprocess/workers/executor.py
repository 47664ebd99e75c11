"""Executors run tasks: in this process, in worker processes, or on a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..failures import TaskFailed
from ..processor import Job, Task
from ..units.modules import FreshModules

if TYPE_CHECKING:
    from .task_runner import TaskRunner

__all__ = ["Executor", "InProcessExecutor", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a task may cost: seconds until its process is ended, and how often it is tried anew."""

    timeout: float | None = None
    retries: int = 1


class Executor(ABC):
    """A context manager whose members each hold a `TaskRunner`; what they are told are its methods by name."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Any:
        """Let one member, the one that is dealt the first task of the next `run`, do something, and return its answer.

        The limits of a task hold: a failure that may pass is tried anew. Raises what the last try raised:
        FunctionFailed, ResultRefused, WorkerFailed or an RbtoolError.
        """

    @abstractmethod
    def broadcast(self, method: str, *arguments: Any) -> None:
        """Let every member do something, also those that take the place of a lost one later.

        Raises what one of them raised.
        """

    def begin(self, tasks: Sequence[Task]) -> None:
        """Let members but the first each compute one of these tasks, in order: theirs in the next `run`."""

    @abstractmethod
    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Call `method(task)` for all tasks, begun in the order given; yield each answer as it comes, in any order.

        A task that failed, however often it was tried, is answered by a TaskFailed (which is not raised), and the
        others go on. Closing the iterator stops.
        """

    def dismiss(self) -> None:
        """Let all members go: only `close` comes after this. Does not wait for them."""

    @abstractmethod
    def close(self) -> None:
        """Stop at once and wait until nobody writes any more; harmless when done twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class InProcessExecutor(Executor):
    """Runs tasks here, on one torch thread, in order."""

    def __init__(self, job: Job, limits: Limits) -> None:
        import torch  # workers need it; the process that only leads them does not

        from .task_runner import TaskRunner

        self._limits = limits
        self._threads = torch.get_num_threads()
        self._modules = FreshModules(job.processor.user_modules())
        self._runner: TaskRunner | None = None
        torch.set_num_threads(1)
        try:
            self._runner = TaskRunner(job)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Do it here."""
        for left in reversed(range(self._limits.retries + 1)):
            try:
                return self._done(method, *arguments)
            except Exception as error:
                if not left or not TaskFailed.may_pass(error):
                    raise
        raise AssertionError("everything is tried once at least")

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Do it here."""
        self._done(method, *arguments)

    def _done(self, method: str, *arguments: Any) -> Any:
        return getattr(self._runner, method)(*arguments)

    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Run the tasks one after the other."""
        for task in tasks:
            yield task, self._answer(method, task)

    def _answer(self, method: str, task: Task) -> Any:
        try:
            return self.call(method, task)
        except Exception as error:
            return TaskFailed(task, error)

    def close(self) -> None:
        """Close the files and put torch's thread count, the import path and the modules back."""
        import torch

        if self._runner is not None:
            self._runner.close()
        torch.set_num_threads(self._threads)
        self._modules.restore()
