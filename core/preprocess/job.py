"""What whoever runs tasks is told, and what is told in return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..format import FieldRange, StepReader
from ..ted import Key
from .block import Pieces
from .work import Work

__all__ = ["Finished", "Job", "Task"]


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Steps `[start, stop)` of those that the job takes, counted from the first of them; `index` numbers the tasks."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Job:
    """Which dataset, which of its steps, and what is done to them.

    `reader` has the dataset open: `again` gives each member its own, and `content_digest` says whether it is the same.

    `chosen` are the rows of the episode table that take part, int64 ascending; None means all. Of their steps the
    first `steps` are taken; `cut` says that the last of these ends an episode that goes on in the dataset.
    """

    reader: StepReader
    content_digest: str
    work: Work
    chosen: Any
    steps: int
    cut: bool
    seed: int


class Finished(NamedTuple):
    """What is known of a task whose rows are written.

    `placed` says that they lie at their task's own place in the result, which only as many rows as the task has can;
    else they lie in a file of their own. `digest` is over the bytes of all leaves in order. Of each run of `pieces`:
    `ids` holds the number of its episode, `returns` the sum of its rewards, `terminated` and `truncated` the flags of
    its last row, `broken` whether the observation after some of its steps is not the one before the next.
    """

    rows: int
    placed: bool
    digest: str
    ranges: dict[Key, FieldRange]
    pieces: Pieces
    ids: Any
    returns: Any
    terminated: Any
    truncated: Any
    broken: Any
