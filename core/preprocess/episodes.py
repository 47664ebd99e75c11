"""The episodes and steps of a dataset that a job takes, their division into tasks, and the episodes of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.returns import return_field, running_return, sum_rewards, table_with_returns
from ..format.threads import usable_cores
from ..ted.episodes import EndReason, end_reason, rows_equal
from ..ted.schema import (
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    as_numbers,
    row_bytes,
    state_keys,
)
from .processor import Block, BlockColumn, Finished, Pieces, Processor, Task


class StepSelection:
    """The first `steps` steps of some episodes of a dataset, in order.

    `rows` are their rows in the dataset's episode table; None means all. An episode that is cut at the last step is
    truncated, like a recording that stops.
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
        """The episode table of the selection; `start` counts from its first step. The returns are in `returns`."""
        columns = {name: column[self.rows] for name, column in self.reader.episodes.columns().items()}
        columns["start"] = self._before
        columns["explicit_start"] = np.full(len(self.rows), -1, np.int64)
        if self.cut:
            self._cut_last(columns)
        return EpisodeTable.from_columns(columns)

    def _cut_last(self, columns: dict[str, Array]) -> None:
        reader, length = self.reader, self.steps - int(columns["start"][-1])
        start = int(self._source_start[-1])
        columns["length"][-1] = length
        columns["truncated"][-1], columns["end_reason"][-1] = True, EndReason.END_OF_FILE
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
        """Read the steps `[start, stop)` of these leaves, as new arrays if `fresh`, else maybe as views of files."""
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
        """Yield the ranges of these steps in the dataset, as few as possible and at least one."""
        if self._all or start == stop:
            yield start, stop
            return
        first, last = np.searchsorted(self._before, [start, stop - 1], "right").tolist()
        shift = (self._source_start - self._before)[first - 1 : last]  # from selected steps to steps of the dataset
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
        """The first steps of tasks of whole episodes: as many as fit into `size` steps, at least one."""
        starts, ends = self._before.tolist(), [*self._before[1:].tolist(), self.steps]
        found, begin = [0], 0
        for start, end in zip(starts, ends, strict=True):
            if end - begin > size and start > begin:
                begin = start
                found.append(start)
        return np.array(found, np.int64)


def result_return_field(selection: StepSelection, processor: Processor, fields: Iterable[Field]) -> Field | None:
    """The leaf of a result whose sum is the return of an episode, as `return_field` finds it."""
    before = (step.arguments for step in selection.reader.manifest.provenance)
    return return_field(fields, (*before, processor.arguments()))


_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 1 << 16
_CHUNKS, _LEAST_ROWS = 16, 256
"""The least number of chunks, unless they would have fewer rows than this: enough to use all cores, to resume a run
and to estimate the time left."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks from the steps `starts`, up to `steps`, for `workers` processes; 0 means this one."""

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
        """Fill in defaults; UsageError for invalid numbers. `apart` names the setting that needs workers, if any.

        The default chunk size depends on the number of steps and the size of a row, never on the number of workers:
        the result may depend on it. Tasks of whole episodes have as many as fit, at least one.
        """
        if chunk_size is not None and chunk_size < 1:
            raise UsageError(f"chunk_size is {chunk_size}, expected a number from 1")
        if num_workers is not None and num_workers < 0:
            raise UsageError(f"num_workers is {num_workers}, expected 0 or more")
        size = chunk_size or _default_size(selection)
        starts = selection.task_starts(size) if whole_episodes else np.arange(0, selection.steps, size)
        if num_workers is None:
            usable = min(usable_cores(), len(starts))
            num_workers = usable if usable > 1 or apart else 0  # one worker alone would only cost its start
        if apart and not num_workers:
            raise UsageError(f"{apart} needs worker processes, num_workers is 0")
        return cls(selection.steps, size, starts, min(num_workers, len(starts)))

    def tasks(self) -> list[Task]:
        """All tasks in order."""
        starts = self.starts.tolist()
        ends = [*starts[1:], self.steps]
        return [Task(index, start, stop) for index, (start, stop) in enumerate(zip(starts, ends, strict=True))]


def task_order(tasks: list[Task]) -> list[Task]:
    """Order tasks with the first, the last and the middle one first.

    A function whose results differ between parts of the dataset then fails early.
    """
    if len(tasks) < 4:
        return tasks
    early = [0, len(tasks) - 1, len(tasks) // 2]
    return [*(tasks[index] for index in early), *(task for place, task in enumerate(tasks) if place not in early)]


def _default_size(selection: StepSelection) -> int:
    most = min(max(1, _CHUNK_BYTES // max(1, row_bytes(selection.reader.fields))), _CHUNK_ROWS)
    return min(most, max(_LEAST_ROWS, -(-selection.steps // _CHUNKS)))


class RowAccess(Protocol):
    """The rows of one task's result, counted from its first."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""


class Changes(NamedTuple):
    """Rows that change when a task is known in its place.

    `numbers`: start and count of ranges of rows, and the new number of their episode. `unmarked`: the last row before
    the task now ends an episode and needs `truncated`.
    """

    numbers: list[tuple[int, int, int]]
    unmarked: bool


@dataclass(slots=True)
class _OpenEpisode:
    """The episode that continues in the next task, with the totals of its rows so far."""

    source: int
    id: int
    rows: int
    total: float
    broken: bool
    terminated: bool
    truncated: bool
    following: dict[Key, Array]
    """The next observations of its last row, with which the following row has to begin."""


class ResultEpisodes:
    """The episode table of the result, built from the finished tasks in order.

    `reward` is the leaf whose sum is the return of an episode, None where there is none. `renumbered` counts the
    episodes whose number was taken, `emptied` those without rows.
    """

    def __init__(self, selection: StepSelection, fields: Sequence[Field], reward: Field | None) -> None:
        self._selection = selection
        self._reward = reward
        self._states = state_keys(fields)
        self._columns: dict[str, list[Array]] = {}
        self._used: set[int] = set()
        self._highest = int(selection.table.episode.max(initial=-1))
        self._open: _OpenEpisode | None = None
        self.renumbered = 0
        self.emptied = 0

    def take(self, finished: Finished, rows: RowAccess) -> Changes:
        """Add the next task; return the changes of rows that follow from the tasks before it."""
        pieces = finished.pieces
        if not len(pieces):
            return Changes([], False)
        here, was = pieces.rows > 0, self._open
        columns = {
            "source": pieces.episode, "episode": np.array(finished.ids), "length": pieces.rows.copy(),
            "total": np.array(finished.returns), "broken": np.array(finished.broken),
            "terminated": np.array(finished.terminated), "truncated": np.array(finished.truncated),
        }  # fmt: skip
        fresh, unmarked = here.copy(), False
        if was is not None and was.rows:
            fresh[0] = False
            self._continue(was, int(pieces.rows[0]), columns, rows)
            unmarked = bool(pieces.ends[0]) and not here[0] and self._end_is_missing(was)
            columns["truncated"][0] |= unmarked
        self._number(columns["episode"], fresh)
        self.emptied += int(((columns["length"] == 0) & pieces.ends).sum())
        if self._reward is None:
            self._take_returns_of_source(columns)
        closed = (columns["length"] > 0) & pieces.ends
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column[closed])
        self._open = None if pieces.ends[-1] else self._left_open(finished, columns, rows)
        changed = np.flatnonzero(here & (columns["episode"] != finished.ids)).tolist()
        numbers = columns["episode"]
        renumbered = [(int(pieces.starts[row]), int(pieces.rows[row]), int(numbers[row])) for row in changed]
        return Changes(renumbered, unmarked)

    def _end_is_missing(self, was: _OpenEpisode) -> bool:
        """Whether the source's episode has an end flag and none of its rows in the result has one."""
        table = self._selection.table
        marked = bool(table.terminated[was.source] or table.truncated[was.source])
        return marked and not (was.terminated or was.truncated)

    def _continue(self, was: _OpenEpisode, count: int, columns: dict[str, Array], rows: RowAccess) -> None:
        """Add the episode's earlier rows to the first run, which continues it."""
        columns["episode"][0] = was.id
        columns["length"][0] += was.rows
        if not count:
            columns["total"][0], columns["broken"][0] = was.total, was.broken
            columns["terminated"][0], columns["truncated"][0] = was.terminated, was.truncated
            return
        follows = (rows_equal(row, rows.read(key, 0, 1)).all() for key, row in was.following.items())
        columns["broken"][0] |= was.broken or not all(follows)
        columns["total"][0] = was.total
        if self._reward is not None:
            rewards = as_numbers(rows.read(self._reward.key, 0, count), self._reward.dtype)
            columns["total"][0] = running_return(was.total, rewards)

    def _take_returns_of_source(self, columns: dict[str, Array]) -> None:
        """Keep the return of the source for episodes that have all their steps, where the result has no rewards."""
        source, table = columns["source"], self._selection.table
        whole = columns["length"] == table.length[source]
        columns["total"][whole] = self._selection.returns[source[whole]]

    def _number(self, ids: Array, fresh: Array) -> None:
        """Replace episode numbers that are taken by numbers above all of the source."""
        wanted = ids[fresh].tolist()
        distinct = set(wanted)
        if len(distinct) == len(wanted) and self._used.isdisjoint(distinct):
            self._used |= distinct
            return
        for place in np.flatnonzero(fresh).tolist():
            if int(ids[place]) in self._used:
                self._highest += 1
                while self._highest in self._used:
                    self._highest += 1
                ids[place] = self._highest
                self.renumbered += 1
            self._used.add(int(ids[place]))

    def _left_open(self, finished: Finished, columns: dict[str, Array], rows: RowAccess) -> _OpenEpisode:
        following: dict[Key, Array] = {}
        if finished.pieces.rows[-1]:
            last = finished.rows
            following = {key: rows.read((NEXT, *key), last - 1, last) for key in self._states}
        elif self._open is not None:
            following = self._open.following
        values = {name: column[-1].item() for name, column in columns.items()}
        return _OpenEpisode(
            values["source"], values["episode"], values["length"], values["total"], values["broken"],
            values["terminated"], values["truncated"], following,
        )  # fmt: skip

    def _whole(self, name: str) -> Array:
        return np.concatenate(self._columns[name]) if self._columns else np.zeros(0, np.int64)

    @property
    def sources(self) -> Array:
        """The row of the selection's table that each episode comes from."""
        return self._whole("source").astype(np.int64)

    def table(self) -> EpisodeTable:
        """The episode table of all tasks. End reasons of the source are kept where the flags are unchanged."""
        source, table = self.sources, self._selection.table
        length = self._whole("length")
        terminated, truncated = self._whole("terminated"), self._whole("truncated")
        reasons = table.end_reason[source].copy()
        changed = (terminated != table.terminated[source]) | (truncated != table.truncated[source])
        changed[:-1] |= source[:-1] == source[1:]  # of an episode's runs only the last has its end
        for row in np.flatnonzero(changed).tolist():
            reasons[row] = end_reason(bool(terminated[row]), bool(truncated[row]))
        first = np.ones(len(source), bool)
        first[1:] = source[1:] != source[:-1]  # the seed belongs to the first run of an episode
        columns: dict[str, Any] = {
            "episode": self._whole("episode"), "start": np.cumsum(length) - length, "length": length,
            "return": self._whole("total"), "terminated": terminated, "truncated": truncated, "end_reason": reasons,
            "explicit_next": self._whole("broken"), "explicit_start": np.full(len(source), -1),
            "seed": table.seed[source], "has_seed": table.has_seed[source] & first,
            "final": np.where(changed | (length != table.length[source]), 0, table.final[source]),
        }  # fmt: skip
        return EpisodeTable.from_columns(columns)

    def text(self) -> list[dict[str, str]]:
        """The text of the episodes."""
        texts = self._selection.reader.episode_text
        return [] if texts is None else [texts[row] for row in self._selection.rows[self.sources].tolist()]
