"""What goes wrong while a function works on a chunk, in a form that crosses process borders."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Task

__all__ = ["FunctionFailed", "ResultRefused", "TaskFailed", "TookTooLong", "WorkerTrace", "WorkerTrouble", "error_text"]


class FunctionFailed(Exception):
    """The user's function raised: what in one line, and its traceback.

    `steps` is the half-open range of the job's steps that it was called with, where that is less than the block.
    """

    def __init__(self, text: str, trace: str, steps: tuple[int, int] | None = None) -> None:
        super().__init__(text, trace)
        self.text = text
        self.trace = trace
        self.steps = steps

    @classmethod
    def of(cls, error: BaseException, steps: tuple[int, int] | None = None) -> FunctionFailed:
        """Describe what the function raised."""
        return cls(error_text(error), "".join(traceback.format_exception(error)), steps)


class WorkerTrouble(FunctionFailed):
    """A worker failed elsewhere than in the user's function, or ended before it was done."""


class TookTooLong(WorkerTrouble):
    """A worker was ended because a task took longer than allowed."""


class ResultRefused(Exception):
    """What the user's function returned cannot be stored; the message says why.

    `steps` is the half-open range of the job's steps that it came of, where that is less than the block.
    """

    def __init__(self, message: str, steps: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.steps = steps

    @staticmethod
    @contextlib.contextmanager
    def on(steps: tuple[int, int]) -> Iterator[None]:
        """Add the steps to what is refused inside and does not say where."""
        try:
            yield
        except ResultRefused as error:
            error.steps = error.steps or steps
            raise


class TaskFailed(Exception):
    """A task that failed for good; `cause` says how."""

    def __init__(self, task: Task, cause: BaseException) -> None:
        super().__init__(task, cause)
        self.task = task
        self.cause = cause

    @staticmethod
    def may_pass(error: BaseException) -> bool:
        """Tell whether trying once more may help: not where the disk is full or the source is damaged."""
        return isinstance(error, FunctionFailed)

    @staticmethod
    def others_may_pass(error: BaseException) -> bool:
        """Tell whether other tasks can be expected to do better."""
        return isinstance(error, FunctionFailed | ResultRefused)


class WorkerTrace(Exception):
    """Carries the traceback of another process as text, to be the cause of an error in this one."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


def error_text(error: BaseException) -> str:
    """Name an error in one line: its type and the first line of its message."""
    kind = type(error).__name__
    if isinstance(error, KeyError) and isinstance(error.__context__, KeyError):
        error = error.__context__  # tensordict adds a list of its keys, which need not fit in a line
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    first = lines[0] if len(lines[0]) <= 300 else f"{lines[0][:300]}…"
    return f"{kind} {first}" if isinstance(error, KeyError) else f"{kind}: {first}"
