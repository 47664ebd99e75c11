"""What goes wrong while a function works on a chunk, in a form that crosses process borders."""

from __future__ import annotations

import ast
import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Task

__all__ = [
    "FunctionFailed",
    "ResultRefused",
    "TaskFailed",
    "TookTooLong",
    "WorkerTrace",
    "WorkerTrouble",
    "counted",
    "error_text",
]

_LONGEST = 300


class FunctionFailed(Exception):
    """The user's function raised: what in one line, and its traceback.

    `steps` is the half-open range of the job's steps that it was called with, where that is less than the block.
    `there` are the keys of the tensordict in which it missed one.
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
        """Describe what the function raised."""
        trace = "".join(traceback.format_exception(error))
        return cls(error_text(error), trace, steps, _keys_there(error))


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


_MISSED = re.compile(r"key \"(.+?)\" not found in \w+ with keys (\[.*\])", re.DOTALL)
"""What tensordict says of a key that is not there; the list of all that are need not fit in a line."""


def error_text(error: BaseException) -> str:
    """Name an error in one line: its type and the first line of its message."""
    kind = type(error).__name__
    message = str(error)
    if isinstance(error, KeyError) and len(error.args) == 1:
        said = error.args[0]
        if missed := _missed(error):
            key = missed[1]
            return f"{kind} {key if key.startswith('(') else repr(key)}"
        if not (isinstance(said, str) and " " in said):
            return f"{kind} {said!r}"
        message = said  # a sentence, of which KeyError would show the quotes and what is escaped in them
    lines = message.strip().splitlines()
    if not lines:
        return kind
    return f"{kind}: {lines[0] if len(lines[0]) <= _LONGEST else f'{lines[0][:_LONGEST]}…'}"


def counted(count: int, noun: str) -> str:
    """Write a number of things, as in `1 row` and `2,000 rows`."""
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def _missed(error: BaseException) -> re.Match[str] | None:
    said = error.args[0] if isinstance(error, KeyError) and error.args else None
    return _MISSED.fullmatch(said) if isinstance(said, str) else None


def _keys_there(error: BaseException) -> tuple[str, ...]:
    """The keys that tensordict lists where one is missing; none for other errors."""
    missed = _missed(error)
    if missed is None:
        return ()
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return tuple(key if isinstance(key, str) else ".".join(key) for key in ast.literal_eval(missed[2]))
    return ()
