"""Assembles the result from the rows of finished tasks, and the table of its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...format import (
    Array,
    EpisodeTable,
    FieldRange,
    FileRecord,
    PositionedTree,
    TreeWriter,
    fs,
    merge_ranges,
    running_return,
)
from ...ted import EPISODE, NEXT, NEXT_DONE, NEXT_TRUNCATED, Field, Key, as_numbers, end_reason, rows_equal, state_keys
from ..processor import Finished, Processor, Task
from ..step_selection import StepSelection, result_return_field
from ..workspace import PartFile, part_path, placed_folder, result_folder

__all__ = ["Assembled", "Assembly", "Changes", "ResultEpisodes", "RowAccess"]


class RowAccess(Protocol):
    """Reads rows of one task's result, counted from its first."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""


class Changes(NamedTuple):
    """`numbers`: ranges of rows, start and count, whose episodes need the number that follows.

    `unmarked`: the last row before this task ends an episode now, and has to bear `truncated`.
    """

    numbers: list[tuple[int, int, int]]
    unmarked: bool


@dataclass(slots=True)
class _OpenEpisode:
    """The episode that the last task left unfinished, as far as its rows go."""

    source: int
    id: int
    rows: int
    total: float
    broken: bool
    terminated: bool
    truncated: bool
    following: dict[Key, Array]
    """What the row after the last one has to begin with."""


class ResultEpisodes:
    """Follows the finished tasks from the front and keeps the books on the episodes of the result.

    `reward` is the leaf that adds up to the return of an episode, None where there is none.
    `renumbered` counts the episodes whose number another one had already, `emptied` those that came to nothing.
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
        """Take the next task; return what has to change in the rows now that it is known what came before."""
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
        """Whether the row that bore the mark of the episode's end is gone, and no other bears one."""
        table = self._selection.table
        marked = bool(table.terminated[was.source] or table.truncated[was.source])
        return marked and not (was.terminated or was.truncated)

    def _continue(self, was: _OpenEpisode, count: int, columns: dict[str, Array], rows: RowAccess) -> None:
        """Add what the episode had before to the first run, which belongs to it too."""
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
        """Without rewards, an episode that has all its steps has the return it had."""
        source, table = columns["source"], self._selection.table
        whole = columns["length"] == table.length[source]
        columns["total"][whole] = self._selection.returns[source[whole]]

    def _number(self, ids: Array, fresh: Array) -> None:
        """Give episodes whose number is taken another one, above all of the source."""
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
        """The row of the table of what was taken that each episode comes from."""
        return self._whole("source").astype(np.int64)

    def table(self) -> EpisodeTable:
        """The table, once all tasks were taken. What the source said of an end stays where the flags do."""
        source, table = self.sources, self._selection.table
        length = self._whole("length")
        terminated, truncated = self._whole("terminated"), self._whole("truncated")
        reasons = table.end_reason[source].copy()
        changed = (terminated != table.terminated[source]) | (truncated != table.truncated[source])
        changed[:-1] |= source[:-1] == source[1:]  # of an episode in pieces only the last one ends where it did
        for row in np.flatnonzero(changed).tolist():
            reasons[row] = end_reason(bool(terminated[row]), bool(truncated[row]))
        first = np.ones(len(source), bool)
        first[1:] = source[1:] != source[:-1]  # what begins later was not begun by the seed
        columns: dict[str, Any] = {
            "episode": self._whole("episode"), "start": np.cumsum(length) - length, "length": length,
            "return": self._whole("total"), "terminated": terminated, "truncated": truncated, "end_reason": reasons,
            "explicit_next": self._whole("broken"), "explicit_start": np.full(len(source), -1),
            "seed": table.seed[source], "has_seed": table.has_seed[source] & first,
            "final": np.where(changed | (length != table.length[source]), 0, table.final[source]),
        }  # fmt: skip
        return EpisodeTable.from_columns(columns)

    def text(self) -> list[dict[str, str]]:
        """Text that belongs to the episodes."""
        texts = self._selection.reader.episode_text
        return [] if texts is None else [texts[row] for row in self._selection.rows[self.sources].tolist()]


class Assembled(NamedTuple):
    """What a result consists of."""

    data: Sequence[FileRecord]
    ranges: Mapping[Key, FieldRange]
    table: EpisodeTable
    text: Sequence[dict[str, str]]
    renumbered: int
    emptied: int


class _PlacedRows:
    """The rows of a task that lie at their place."""

    def __init__(self, tree: PositionedTree, start: int) -> None:
        self._tree = tree
        self._start = start

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""
        return self._tree.read(key, self._start + start, self._start + stop)


class Assembly:
    """Takes finished tasks in any order and keeps the books from the front.

    While every task returned as many rows as it took, digests are taken of the files it wrote to, as soon as what
    comes before is there too. Once one did not, the rows are copied into new files at the end. A context manager.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[Field],
        selection: StepSelection,
        processor: Processor,
        tasks: int,
        *,
        anew: bool = True,
    ) -> None:
        self._folder = folder
        self._fields = tuple(fields)
        self._keys = {field.key for field in fields}
        self._selection = selection
        self._waiting: dict[int, tuple[Task, Finished]] = {}
        self._done: list[tuple[Task, Finished]] = []
        self._in_place = True
        self._ranges: dict[Key, FieldRange] = {}
        self._episodes = ResultEpisodes(selection, fields, result_return_field(selection, processor, fields))
        placed = placed_folder(folder)
        if anew:
            fs.make_folder(placed)
            fs.make_folder(part_path(folder, 0).parent)
        self._tree = PositionedTree(placed, fields, selection.steps, anew=anew)
        self._tasks = tasks

    def take(self, task: Task, finished: Finished) -> None:
        """Take a finished task."""
        self._waiting[task.index] = task, finished
        while (found := self._waiting.pop(len(self._done), None)) is not None:
            self._front(*found)
            self._done.append(found)

    def _front(self, task: Task, finished: Finished) -> None:
        if self._ranges:
            self._ranges = {key: merge_ranges(self._ranges[key], found) for key, found in finished.ranges.items()}
        else:
            self._ranges = dict(finished.ranges)
        changes = self._episodes.take(finished, self._rows(task, finished))
        for start, count, number in changes.numbers:
            self._write(task, finished, EPISODE, start, np.full(count, number, np.int64))
        if changes.unmarked:
            self._mark_last_row()
        self._in_place = self._in_place and finished.placed
        if self._in_place:
            self._tree.settle(task.stop)

    def _rows(self, task: Task, finished: Finished) -> _PlacedRows | PartFile:
        if finished.placed:
            return _PlacedRows(self._tree, task.start)
        return PartFile(part_path(self._folder, task.index), self._fields, finished.rows)

    def _mark_last_row(self) -> None:
        """Let the last row so far bear `truncated`: the rest of its episode came to nothing."""
        task, finished = next(found for found in reversed(self._done) if found[1].rows)
        for field in self._fields:
            if field.key in (NEXT_TRUNCATED, NEXT_DONE):
                self._write(task, finished, field.key, finished.rows - 1, np.ones((1, *field.shape), field.numpy))
        self._in_place = False  # its digest may be taken already

    def _write(self, task: Task, finished: Finished, key: Key, start: int, array: Array) -> None:
        """Change rows of a task, where there is such a leaf."""
        if key not in self._keys:
            return
        if finished.placed:
            self._tree.write(key, task.start + start, array)
        else:
            PartFile(part_path(self._folder, task.index), self._fields, finished.rows).write(key, start, array)

    @property
    def rows(self) -> int:
        """Rows of the result so far."""
        return sum(finished.rows for _, finished in self._done)

    def finish(self) -> Assembled:
        """Complete the files of the result, once all tasks were taken."""
        assert len(self._done) == self._tasks, "a task is missing"
        if self._in_place:
            data = self._tree.finish()
            fs.rename(placed_folder(self._folder), result_folder(self._folder))
        else:
            data = self._copied()
        episodes = self._episodes
        return Assembled(data, self._ranges, episodes.table(), episodes.text(), episodes.renumbered, episodes.emptied)

    def _copied(self) -> list[FileRecord]:
        writer = TreeWriter(result_folder(self._folder), self._fields, ranged=False)
        try:
            for task, finished in self._done:
                rows = self._rows(task, finished)
                if finished.rows:
                    writer.append({field.key: rows.read(field.key, 0, finished.rows) for field in self._fields})
            return writer.finish((self.rows,))
        finally:
            writer.close()

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        self._tree.close()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
