"""How much is done, in which pieces, and by how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..ted import row_bytes
from .job import Task
from .taking import Taking

__all__ = ["Plan", "in_turn"]

_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 1 << 16
_CHUNKS, _LEAST_ROWS = 16, 256
"""So many chunks there are at least, unless they would be of fewer rows than this: enough for all cores to share, for
a run to be resumed, and for the time left to be told."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks that begin at the steps `starts`, up to `steps`, by `workers` processes; 0 means in this one."""

    steps: int
    chunk_size: int
    starts: Any
    workers: int

    @classmethod
    def of(
        cls,
        taking: Taking,
        chunk_size: int | None,
        num_workers: int | None,
        *,
        whole_episodes: bool,
        apart: str = "",
    ) -> Plan:
        """Fill in what was not said; UsageError for what cannot be. `apart` names what needs workers.

        The default chunk size depends on the number of steps and the size of a row, never on the number of workers: a
        function may see the chunk it is given. Tasks of whole episodes have as many as fit, but one at least.
        """
        if chunk_size is not None and chunk_size < 1:
            raise UsageError(f"chunks of {chunk_size} steps asked for (chunk_size), at least 1 is needed")
        if num_workers is not None and num_workers < 0:
            raise UsageError(f"{num_workers} workers asked for (num_workers), 0 or more are expected")
        size = chunk_size or _default_size(taking)
        starts = taking.task_starts(size) if whole_episodes else np.arange(0, taking.steps, size)
        if num_workers is None:
            usable = min(_usable_cores(), len(starts))
            num_workers = usable if usable > 1 or apart else 0  # one worker alone would only cost its start
        if apart and not num_workers:
            raise UsageError(f"{apart} needs worker processes, 0 workers are asked for (num_workers)")
        return cls(taking.steps, size, starts, min(num_workers, len(starts)))

    def tasks(self) -> list[Task]:
        """All tasks in order."""
        starts = self.starts.tolist()
        ends = [*starts[1:], self.steps]
        return [Task(index, start, stop) for index, (start, stop) in enumerate(zip(starts, ends, strict=True))]


def in_turn(tasks: list[Task]) -> list[Task]:
    """The order to begin tasks in: the first, the last and the middle one early, so that they soon agree on the result.

    A function that returns something else further on is found out before hours have passed.
    """
    if len(tasks) < 4:
        return tasks
    early = [0, len(tasks) - 1, len(tasks) // 2]
    return [*(tasks[index] for index in early), *(task for place, task in enumerate(tasks) if place not in early)]


def _default_size(taking: Taking) -> int:
    most = min(max(1, _CHUNK_BYTES // max(1, row_bytes(taking.reader.fields))), _CHUNK_ROWS)
    return min(most, max(_LEAST_ROWS, -(-taking.steps // _CHUNKS)))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
