"""Failures of user functions and workers, which can be pickled, and the errors that report them."""

from __future__ import annotations

import ast
import contextlib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RbtoolError, SchemaError
from ..ted.schema import Key, key_name

if TYPE_CHECKING:
    from .episodes import StepSelection
    from .processor import Task

_LONGEST = 300


class FunctionFailed(Exception):
    """The user function raised: the error in one line, and the traceback.

    `steps` is the half-open range of the job's steps of the call, if that is less than the block. `there` are the
    keys of the tensordict in which it missed one.
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

    `steps` is the half-open range of the job's steps of the call, if that is less than the block.
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
        """Whether a retry may succeed: not where the disk is full or the source is damaged."""
        return isinstance(error, FunctionFailed)

    @staticmethod
    def others_may_pass(error: BaseException) -> bool:
        """Whether other tasks may succeed."""
        return isinstance(error, FunctionFailed | ResultRefused)


class WorkerTrace(Exception):
    """The traceback of another process as text, as the cause of an error in this one."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


_MISSED = (
    re.compile(r"key \"(.+?)\" not found in \w+ with keys (\[.*\])", re.DOTALL),
    re.compile(r"You are trying to pop key `(.+?)` which is not in dict .* Keys=\w+\((\[.*\]),\n.*", re.DOTALL),
)
"""tensordict's messages for a missing key, those of 0.14 too; the list of existing keys may have several lines."""


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
    """The keys in tensordict's message for a missing one; none for other errors."""
    missed = _missed(error)
    if missed is None:
        return ()
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return tuple(key if isinstance(key, str) else ".".join(key) for key in ast.literal_eval(missed[2]))
    return ()


_TRACEBACK = "--debug shows the traceback"
_LISTED = 5


class ErrorReporter:
    """Turns failures into errors that name steps and episodes by their numbers in the dataset."""

    def __init__(self, selection: StepSelection, label: str) -> None:
        self._selection = selection
        self._label = label

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Convert failures raised inside into errors for users."""
        try:
            yield
        except TaskFailed as failed:
            raise self.error([failed], 1) from origin_of(failed.cause)
        except WorkerFailed as error:
            text = f"a worker process failed: {error.text}" if error.trace else f"{error.text} before it began"
            raise RbtoolError(text) from origin_of(error)
        except FunctionFailed as error:
            raise self._one(error, None) from origin_of(error)
        except ResultRefused as error:
            raise self._one(error, None) from error

    def error(self, failed: Sequence[TaskFailed], tasks: int) -> RbtoolError:
        """The error of a run in which some tasks failed."""
        if len(failed) == 1:
            found = self._one(failed[0].cause, failed[0].task)
            if isinstance(found, RbtoolError):
                return found
            raise found  # a bug of rbtool: shown with its traceback
        listed = "; ".join(self.sentence(one) for one in failed[:_LISTED])
        more = f"; and {len(failed) - _LISTED:,} more" if len(failed) > _LISTED else ""
        return RbtoolError(f"{len(failed):,} of {tasks:,} chunks failed: {listed}{more}", hint=_TRACEBACK)

    def sentence(self, failed: TaskFailed) -> str:
        """Describe the failure of one task in one line."""
        return str(self._one(failed.cause, failed.task))

    def _one(self, cause: BaseException, task: Task | None) -> BaseException:
        label = self._label
        place = self._place(cause, task)
        if isinstance(cause, WorkerFailed):
            if cause.trace:
                return RbtoolError(f"a worker process failed{_on(place)}: {cause.text}", hint=_TRACEBACK)
            hint = "--num-workers 0 runs it in this process"
            if "SIGKILL" in cause.text:  # by which the system ends processes that use too much memory
                hint = f"if memory ran out, try a smaller --chunk-size; {hint}"
            if isinstance(cause, TaskTimeout):
                hint = "a longer --timeout or a smaller --chunk-size gives it more time"
            where = f" while {label} worked on {place}" if place else f" in {label}"
            return RbtoolError(f"{cause.text}{where}", hint=hint)
        if isinstance(cause, FunctionFailed):
            fields = f". Fields here: {', '.join(self._fields(cause))}" if cause.text.startswith("KeyError") else ""
            return RbtoolError(f"{label} failed{_on(place)}: {cause.text}{fields}", hint=_TRACEBACK)
        if isinstance(cause, ResultRefused):
            return SchemaError(f"{label}{_on(place)}: {cause}")
        return cause

    def _fields(self, cause: FunctionFailed) -> Iterable[str]:
        """Name the keys that existed where one is missing; groups of the dataset, such as `next`, by their full key."""
        keys = [field.key for field in self._selection.reader.fields]
        if not cause.there:
            return dict.fromkeys(key[0] for key in keys)
        groups: dict[Key, set[str]] = {}
        for key in keys:
            for depth, part in enumerate(key):
                groups.setdefault(key[:depth], set()).add(part)
        there = set(cause.there)  # maybe not a whole group: the function may have edited its argument
        group = max(sorted(groups, key=len), key=lambda key: len(groups[key] & there) / len(groups[key] | there))
        return [key_name((*group, name)) for name in cause.there]

    def _place(self, cause: BaseException, task: Task | None) -> str:
        """Name steps and episodes by their numbers in the dataset."""
        narrow = getattr(cause, "steps", None)
        if narrow is None and task is None:
            return ""
        start, stop = narrow if narrow is not None else (task.start, task.stop)  # type: ignore[union-attr]
        selection = self._selection
        rows = np.searchsorted(selection.table.start, [start, stop - 1], "right") - 1
        source = selection.reader.episodes
        here = selection.rows[rows]
        shift = source.start[here] - selection.table.start[rows]
        low, high = int(start + shift[0]), int(stop - 1 + shift[1])
        first, last = source.episode[here].tolist()
        steps = f"steps {low:,} to {high:,}" if stop - start > 1 else f"step {low:,}"
        return f"{steps} (episodes {first} to {last})" if first != last else f"{steps} (episode {first})"


def _on(place: str) -> str:
    return f" on {place}" if place else ""


def origin_of(error: BaseException | None) -> BaseException | None:
    """The cause to show under --debug: the exception's own, or the traceback of a worker."""
    if error is None or error.__cause__ is not None or not isinstance(error, FunctionFailed):
        return error.__cause__ if error is not None else None
    return WorkerTrace(error.trace) if error.trace else None
