"""Tasks, the contract of executors that run them, and their failures, which can be pickled.

An executor has workers, and each worker has a runner: an object whose methods are called by name. `InProcessExecutor`
is its own worker; the workers of `pool` are processes, and of `ray_cluster` Ray actors.
"""

from __future__ import annotations

import ast
import contextlib
import re
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from ..format.contracts import Closing


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Steps `[start, stop)` of the job, counted from its first; `index` numbers the tasks."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a task: seconds until its worker is killed (None: no limit), and retries after a failure."""

    timeout: float | None = None
    retries: int = 1


class Job(Protocol):
    """The work of an executor: creates the runner of each worker."""

    imports: ClassVar[tuple[str, ...]]
    """Modules that runners need; they are imported before processes are forked, so that forks inherit them."""

    def portable(self) -> Self:
        """Return an equal job that can be pickled."""

    def runner(self) -> Any:
        """Create the runner, in the worker. Only a runner in the caller's process is closed, with `close()`."""


class Executor(Closing, ABC):
    """Calls methods of the workers' runners by name. A context manager."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method on one worker, which also gets the first task of the next `run`; return its answer.

        The limits of a task apply. Raises the error of the last try: FunctionFailed, ResultRefused, WorkerFailed or an
        RbtoolError.
        """

    @abstractmethod
    def broadcast(self, method: str, *arguments: Any) -> None:
        """Call a method on every worker, also on later replacements of lost ones; raise the error of one of them."""

    def begin(self, tasks: Sequence[Task]) -> None:
        """Start these tasks, in order, on all workers but the first; each gets its own task in the next `run`."""

    @abstractmethod
    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Call `method(task)` for all tasks, started in the given order; yield answers in the order of arrival.

        For a task that failed in all its tries a TaskFailed is yielded, and not raised, so that the other tasks
        continue. Closing the iterator stops the run.
        """

    def dismiss(self) -> None:
        """End all workers without waiting for them; only `close` may follow."""

    def close(self) -> None:
        """Stop at once, and wait until no worker writes files any more; may be called twice."""


class InProcessExecutor(Executor):
    """Runs tasks in this process, in order."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self._limits = limits
        self._runner = job.runner()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method in this process."""
        for left in reversed(range(self._limits.retries + 1)):
            try:
                return getattr(self._runner, method)(*arguments)
            except Exception as error:
                if not left or not TaskFailed.may_pass(error):
                    raise
        raise AssertionError("there is at least one try")

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Call the method in this process."""
        getattr(self._runner, method)(*arguments)

    def run(self, method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Run the tasks one after another."""
        for task in tasks:
            try:
                answer = self.call(method, task)
            except Exception as error:
                answer = TaskFailed(task, error)
            yield task, answer

    def close(self) -> None:
        """Close the runner, which restores what it changed in this process."""
        self._runner.close()


_LONGEST = 300


class FunctionFailed(Exception):
    """The user function raised an error: `text` is the error in one line, `trace` the traceback.

    `steps` is the half-open range of steps of the call, if it was not for the whole chunk. If a key is missing in a
    tensordict, `there` has the keys that it has.
    """

    def __init__(
        self, text: str, trace: str, steps: tuple[int, int] | None = None, there: tuple[str, ...] = ()
    ) -> None:
        super().__init__(text, trace)
        self.text = text
        self.trace = trace
        self.steps = steps
        self.there = there

    @classmethod
    def of(cls, error: BaseException, steps: tuple[int, int] | None = None) -> FunctionFailed:
        """Describe an exception of the function."""
        trace = "".join(traceback.format_exception(error))
        return cls(error_text(error), trace, steps, _keys_there(error))


class WorkerFailed(FunctionFailed):
    """A worker failed outside the user function, or ended during a task."""


class TaskTimeout(WorkerFailed):
    """A worker was killed because a task exceeded its time limit."""


class ResultRefused(Exception):
    """The result of the user function cannot be stored, for the reason in the message.

    `steps` is the half-open range of steps of the call, if it was not for the whole chunk.
    """

    def __init__(self, message: str, steps: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.steps = steps

    @staticmethod
    @contextlib.contextmanager
    def on(steps: tuple[int, int]) -> Iterator[None]:
        """Add the steps to a ResultRefused raised inside without any."""
        try:
            yield
        except ResultRefused as error:
            error.steps = error.steps or steps
            raise


class TaskFailed(Exception):
    """A task failed in all its tries; `cause` is the last failure."""

    def __init__(self, task: Task, cause: BaseException) -> None:
        super().__init__(task, cause)
        self.task = task
        self.cause = cause

    @staticmethod
    def may_pass(error: BaseException) -> bool:
        """Return whether a retry may succeed; not if the disk is full or the source is damaged."""
        return isinstance(error, FunctionFailed)

    @staticmethod
    def others_may_pass(error: BaseException) -> bool:
        """Return whether other tasks may succeed."""
        return isinstance(error, FunctionFailed | ResultRefused)


class WorkerTrace(Exception):
    """The traceback of another process as text, as the cause of an error in this one."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


_MISSED = (
    re.compile(r"key \"(.+?)\" not found in \w+ with keys (\[.*\])", re.DOTALL),
    re.compile(r"You are trying to pop key `(.+?)` which is not in dict .* Keys=\w+\((\[.*\]),\n.*", re.DOTALL),
)
"""Patterns of tensordict's messages for a missing key; the list of existing keys may have several lines."""


def error_text(error: BaseException) -> str:
    """Describe an error in one line: its type and the first line of its message."""
    kind = type(error).__name__
    message = str(error)
    if isinstance(error, KeyError) and len(error.args) == 1:
        content = error.args[0]
        if missed := _missed(error):
            key = re.sub(r"^\('([^']*)',\)$", r"\1", missed[1])
            return f"{kind} {key if key.startswith('(') else repr(key)}"
        if not (isinstance(content, str) and " " in content):
            return f"{kind} {content!r}"
        message = content  # a sentence, which str(KeyError) would quote and escape
    lines = message.strip().splitlines()
    if not lines:
        return kind
    return f"{kind}: {lines[0] if len(lines[0]) <= _LONGEST else f'{lines[0][:_LONGEST]}…'}"


def _missed(error: BaseException) -> re.Match[str] | None:
    content = error.args[0] if isinstance(error, KeyError) and error.args else None
    found = (form.fullmatch(content) for form in _MISSED) if isinstance(content, str) else ()
    return next(filter(None, found), None)


def _keys_there(error: BaseException) -> tuple[str, ...]:
    """Return the existing keys in tensordict's message for a missing one; () for other errors."""
    missed = _missed(error)
    if missed is None:
        return ()
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return tuple(key if isinstance(key, str) else ".".join(key) for key in ast.literal_eval(missed[2]))
    return ()


def origin_of(error: BaseException | None) -> BaseException | None:
    """Return the cause to show with --debug: the exception's own, or the traceback of a worker."""
    if error is None or error.__cause__ is not None or not isinstance(error, FunctionFailed):
        return error.__cause__ if error is not None else None
    return WorkerTrace(error.trace) if error.trace else None


_Result = TypeVar("_Result")


class BackgroundCall(Generic[_Result]):
    """A call in a daemon thread, which does not delay the exit of the process, unlike a thread of an executor."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        self._future: Future[_Result] = Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], _Result]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def failed(self) -> bool:
        """Whether it has raised by now."""
        return self._future.done() and self._future.exception() is not None

    def result(self) -> _Result:
        """Wait for the call; return its result or raise its exception."""
        return self._future.result()


class SerialExecutor:
    """Runs calls in order in one thread. On exit, waits for the running call and drops those that have not started."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._calls: deque[Future[Any]] = deque()

    def do(self, call: Callable[..., object], *arguments: Any) -> None:
        """Append a call; raise the error of an earlier one."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        self._calls.append(self._executor.submit(call, *arguments))

    def finish(self) -> None:
        """Wait for all calls; raise the error of one of them."""
        while self._calls:
            self._calls.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(cancel_futures=True)
