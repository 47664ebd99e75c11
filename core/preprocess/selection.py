"""The selected episodes and steps of a dataset, and their division into tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..engine.tasks import Task
from ..errors import UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import FINAL, EpisodeTable
from ..format.returns import sum_rewards, table_with_returns
from ..format.threads import usable_cores
from ..ted.episodes import EndReason, Final
from ..ted.schema import NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, row_bytes
from .processor import Block, BlockColumn, EpisodeTexts, Pieces


class StepSelection:
    """The selected episodes of a dataset, in order, up to a number of steps.

    `rows` are the rows of the episodes in the dataset's episode table; None means all. `steps` limits the total number
    of steps. If this cuts the last episode, the episode is marked truncated, as in a recording that stops.
    """

    def __init__(self, reader: StepReader, rows: Any = None, steps: int | None = None) -> None:
        self.reader = reader
        self._all = rows is None
        chosen = np.arange(len(reader.episodes)) if rows is None else np.asarray(rows, np.int64)
        length = reader.episodes.length[chosen]
        before = np.cumsum(length) - length
        there = int(length.sum())
        self.steps = there if steps is None else min(steps, there)
        taken = before < self.steps
        self.rows = chosen[taken]
        self._before = before[taken]
        self._source_start = reader.episodes.start[self.rows]
        self.cut = self.steps < there and bool(len(self.rows)) and self.steps < int((before + length)[taken][-1])

    @cached_property
    def table(self) -> EpisodeTable:
        """The episode table of the selection; `start` counts the selected steps. For the returns, see `returns`."""
        columns = {name: column[self.rows] for name, column in self.reader.episodes.columns().items()}
        columns["start"] = self._before
        columns["explicit_start"] = np.full(len(self.rows), -1, np.int64)
        if self.cut:
            self._cut_last(columns)
        return EpisodeTable.from_columns(columns)

    @cached_property
    def texts(self) -> EpisodeTexts:
        """The texts of the episodes in the dataset; empty if there are none. `preprocess` replaces those it changes."""
        texts = self.reader.episode_text
        return [] if texts is None else [texts[row] for row in self.rows.tolist()]

    def _cut_last(self, columns: dict[str, Array]) -> None:
        reader, length = self.reader, self.steps - int(columns["start"][-1])
        start = int(self._source_start[-1])
        columns["length"][-1] = length
        for name in reader.episodes.scores:
            columns[name][-1] = np.nan
        columns["truncated"][-1], columns["end_reason"][-1] = True, EndReason.END_OF_FILE
        if FINAL in columns:  # it describes the step that is cut off
            columns[FINAL][-1] = Final.OBSERVED
        fields = {field.key: field for field in reader.fields}
        if NEXT_TERMINATED in fields:
            columns["terminated"][-1] = reader.read(NEXT_TERMINATED, start + length - 1, start + length).any()

    @cached_property
    def returns(self) -> Array:
        """The return of the selected steps of each episode; NaN where it is not known."""
        found: Array = table_with_returns(self.reader).total_reward[self.rows]
        if self.cut:
            found[-1:] = sum_rewards(self.reader, self._source_start[-1:], self.table.length[-1:])
        return found

    def block(self, fields: dict[Key, Field], start: int, stop: int, *, fresh: bool) -> Block:
        """Read the steps `[start, stop)` of these leaves. The arrays may be views of files unless `fresh`."""
        spans = list(self._spans(start, stop))
        columns = {key: BlockColumn(field.dtype, self._rows(key, spans, fresh)) for key, field in fields.items()}
        if self.cut and stop == self.steps:
            for key in (NEXT_TRUNCATED, NEXT_DONE):
                if key in columns:
                    flags = columns[key].values.copy()
                    flags[-1] = True
                    columns[key] = columns[key]._replace(values=flags)
        return Block(columns, self.pieces(start, stop), start)

    def _rows(self, key: Key, spans: Sequence[tuple[int, int]], fresh: bool) -> Array:
        read = self.reader.read if fresh else self.reader.view
        parts = [read(key, first, last) for first, last in spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the dataset that hold the selected steps `[start, stop)`: at least one, else few.

        Selected episodes that follow one another in the dataset are read together: for them, the `shift` between the
        number of a step in the selection and in the dataset is the same.

            dataset    [ A ][ B ][ C ][ D ][ E ]      episodes of 5 steps; A, C and D are selected
            selection  [ A ][ C ][ D ]                steps [3, 15) -> dataset [3, 5) and [10, 20)
        """
        if self._all or start == stop:
            yield start, stop
            return
        first, last = np.searchsorted(self._before, [start, stop - 1], "right").tolist()
        shift = (self._source_start - self._before)[first - 1 : last]
        edges = [0, *(np.flatnonzero(np.diff(shift)) + 1).tolist(), len(shift)]
        bounds = [start, *self._before[first - 1 : last][edges[1:-1]].tolist(), stop]
        for edge, begin, end in zip(edges, bounds, bounds[1:], strict=False):
            yield begin + int(shift[edge]), end + int(shift[edge])

    def pieces(self, start: int, stop: int) -> Pieces:
        """Return the runs of episodes, by row of `table`, in the steps `[start, stop)`."""
        starts = self._before
        first, last = np.searchsorted(starts, [start, max(start, stop - 1)], "right").tolist()
        which = np.arange(first - 1, last)
        ends = np.append(starts[1:], self.steps)[first - 1 : last]
        begin = np.maximum(starts[first - 1 : last], start)
        return Pieces.of(which, np.minimum(ends, stop) - begin, starts[first - 1 : last] >= start, ends <= stop)

    def task_starts(self, size: int) -> Array:
        """Return the first steps of tasks of whole episodes: each has at least one, and as many as fit into `size`."""
        starts, ends = self._before.tolist(), [*self._before[1:].tolist(), self.steps]
        found, begin = [0], 0
        for start, end in zip(starts, ends, strict=True):
            if end - begin > size and start > begin:
                begin = start
                found.append(start)
        return np.array(found, np.int64)


_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 1 << 16
"""The largest default chunk, in bytes and in rows."""

_CHUNKS, _LEAST_ROWS = 16, 256
"""The least number of chunks, unless they would have fewer rows than `_LEAST_ROWS`. This is enough to use all cores, to
resume a run and to estimate the time left."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of `steps` steps into tasks, which begin at the steps `starts`, and the number of worker processes.

    0 workers: this process runs the tasks.
    """

    steps: int
    chunk_size: int
    starts: Any
    workers: int

    @classmethod
    def of(
        cls,
        selection: StepSelection,
        chunk_size: int | None,
        num_workers: int | None,
        *,
        whole_episodes: bool,
        apart: str = "",
    ) -> Plan:
        """Divide a selection into tasks, with defaults for numbers that are None; UsageError for invalid numbers.

        The default chunk size depends on the number of steps and the size of a row, never on the number of workers,
        because the result may depend on it. A task of whole episodes has at least one, and as many as fit into the
        chunk size. `apart` names the setting that requires worker processes, if any.
        """
        if chunk_size is not None and chunk_size < 1:
            raise UsageError(f"chunk_size is {chunk_size}, expected a number from 1")
        if num_workers is not None and num_workers < 0:
            raise UsageError(f"num_workers is {num_workers}, expected 0 or more")
        size = default_size(selection) if chunk_size is None else chunk_size
        starts = selection.task_starts(size) if whole_episodes else np.arange(0, selection.steps, size)
        if num_workers is None:
            usable = min(usable_cores(), len(starts))
            num_workers = usable if usable > 1 or apart else 0  # a single worker would be slower than this process
        if apart and not num_workers:
            raise UsageError(f"{apart} needs worker processes, num_workers is 0")
        return cls(selection.steps, size, starts, min(num_workers, len(starts)))

    def tasks(self) -> list[Task]:
        """All tasks in order."""
        starts = self.starts.tolist()
        ends = [*starts[1:], self.steps]
        return [Task(index, start, stop) for index, (start, stop) in enumerate(zip(starts, ends, strict=True))]


def task_order(tasks: list[Task]) -> list[Task]:
    """Move the last and the middle task to the front, after the first one.

    A function whose results differ between parts of the dataset then fails early.
    """
    if len(tasks) < 4:
        return tasks
    early = [0, len(tasks) - 1, len(tasks) // 2]
    return [*(tasks[index] for index in early), *(task for place, task in enumerate(tasks) if place not in early)]


def default_size(selection: StepSelection, largest_row: int = 0) -> int:
    """Return the default number of rows of a chunk.

    `largest_row` is the size of a row in bytes while it is processed, if that is larger than in the dataset.
    """
    most = min(max(1, _CHUNK_BYTES // max(1, largest_row, row_bytes(selection.reader.fields))), _CHUNK_ROWS)
    return min(most, max(_LEAST_ROWS, -(-selection.steps // _CHUNKS)))
