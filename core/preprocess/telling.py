"""Turns what went wrong in a task into a sentence that names the work, the steps and the episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..errors import RbtoolError, SchemaError
from ..ted import Key, key_name
from .failures import FunctionFailed, ResultRefused, TaskFailed, TookTooLong, WorkerTrace, WorkerTrouble
from .job import Task
from .taking import Taking

__all__ = ["Telling"]

_TRACEBACK = "--debug shows the traceback"
_LISTED = 5


class Telling:
    """Knows which steps were taken, to name them as the dataset does."""

    def __init__(self, taking: Taking, label: str) -> None:
        self._taking = taking
        self._label = label

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Raise what people understand instead of what the engine's parts tell each other."""
        try:
            yield
        except TaskFailed as failed:
            raise self.error([failed], 1) from origin_of(failed.cause)
        except WorkerTrouble as error:
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
            raise found  # a defect of ours: nothing to put into a sentence
        listed = "; ".join(self.sentence(one) for one in failed[:_LISTED])
        more = f"; and {len(failed) - _LISTED:,} more" if len(failed) > _LISTED else ""
        return RbtoolError(f"{len(failed):,} of {tasks:,} chunks failed: {listed}{more}", hint=_TRACEBACK)

    def sentence(self, failed: TaskFailed) -> str:
        """What happened to one task, on one line."""
        return str(self._one(failed.cause, failed.task))

    def _one(self, cause: BaseException, task: Task | None) -> BaseException:
        label = self._label
        place = self._place(cause, task)
        if isinstance(cause, WorkerTrouble):
            if cause.trace:
                return RbtoolError(f"a worker process failed{_on(place)}: {cause.text}", hint=_TRACEBACK)
            hint = "--num-workers 0 runs it in this process"
            if "SIGKILL" in cause.text:  # so the system ends what takes too much memory
                hint = f"for want of memory, try a smaller --chunk-size; {hint}"
            if isinstance(cause, TookTooLong):
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
        """Name what there was where a key is missing; groups of the dataset, such as `next`, by their whole name."""
        keys = [field.key for field in self._taking.reader.fields]
        if not cause.there:
            return dict.fromkeys(key[0] for key in keys)
        groups: dict[Key, set[str]] = {}
        for key in keys:
            for depth, part in enumerate(key):
                groups.setdefault(key[:depth], set()).add(part)
        there = set(cause.there)  # the function may have edited what it was given, so it need not be all of a group
        group = max(sorted(groups, key=len), key=lambda key: len(groups[key] & there) / len(groups[key] | there))
        return [key_name((*group, name)) for name in cause.there]

    def _place(self, cause: BaseException, task: Task | None) -> str:
        """Name steps by their number in the dataset, and their episodes."""
        narrow = getattr(cause, "steps", None)
        if narrow is None and task is None:
            return ""
        start, stop = narrow if narrow is not None else (task.start, task.stop)  # type: ignore[union-attr]
        taking = self._taking
        rows = np.searchsorted(taking.table.start, [start, stop - 1], "right") - 1
        source = taking.reader.episodes
        here = taking.rows[rows]
        shift = source.start[here] - taking.table.start[rows]
        low, high = int(start + shift[0]), int(stop - 1 + shift[1])
        first, last = source.episode[here].tolist()
        steps = f"steps {low:,} to {high:,}" if stop - start > 1 else f"step {low:,}"
        return f"{steps} (episodes {first} to {last})" if first != last else f"{steps} (episode {first})"


def _on(place: str) -> str:
    return f" on {place}" if place else ""


def origin_of(error: BaseException | None) -> BaseException | None:
    """What to show below an error under --debug: the exception itself, or the traceback a worker sent."""
    if error is None or error.__cause__ is not None or not isinstance(error, FunctionFailed):
        return error.__cause__ if error is not None else None
    return WorkerTrace(error.trace) if error.trace else None
