"""The result of a run: finished tasks, in files and in the journal, its episodes, and how everything is assembled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ..engine.tasks import Task
from ..engine.workspace import (
    PartFile,
    array_of,
    array_text,
    journal_path,
    part_path,
    parts_folder,
    placed_folder,
    read_journal,
    result_folder,
    revert_publication,
    rows_digest,
)
from ..errors import RbtoolError
from ..format import fs
from ..format.contracts import Array, Closing
from ..format.documents import Count, FieldEntry, decode
from ..format.episodes import EpisodeTable
from ..format.files import FileRecord
from ..format.memmap.builder import PositionedTree
from ..format.memmap.tree import FieldRange, TreeWriter, merge_ranges
from ..format.returns import return_field, running_return
from ..ted.episodes import end_reason, rows_equal
from ..ted.schema import EPISODE, NEXT, NEXT_DONE, NEXT_TRUNCATED, Field, Key, as_numbers, state_keys
from .processor import EpisodeTexts, Pieces, Processor
from .selection import StepSelection


class Finished(NamedTuple):
    """A task whose rows are written.

    Attributes:
        placed: whether the rows are at the task's own place in the result's files, which is possible if there are as
            many as steps; otherwise they are in a separate file.
        digest: over the bytes of all leaves in order.
        ids, returns: for each run of `pieces`, the episode number and the sum of rewards.
        terminated, truncated: for each run, the flags of its last row.
        broken: for each run, whether a step's next observation differs from the observation of the step after it.
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


class RowAccess(Protocol):
    """The rows of one task's result, counted from its first."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""


class Changes(NamedTuple):
    """Rows that change once the preceding tasks are known.

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


def result_return_field(selection: StepSelection, processor: Processor, fields: Iterable[Field]) -> Field | None:
    """The leaf of a result whose sum is the return of an episode, as `return_field` finds it."""
    before = (step.arguments for step in selection.reader.manifest.provenance)
    return return_field(fields, (*before, processor.arguments()))


class ResultEpisodes:
    """The episode table of the result, built from the finished tasks in order.

    `reward` is the leaf whose sum is the return of an episode; None if there is none. `renumbered` counts episodes
    whose number was taken, `emptied` episodes without rows.
    """

    def __init__(
        self, selection: StepSelection, fields: Sequence[Field], reward: Field | None, *, keeps_ends: bool = False
    ) -> None:
        self._selection = selection
        self._reward = reward
        self._keeps_ends = keeps_ends
        self._states = state_keys(fields)
        self._columns: dict[str, list[Array]] = {}
        self._used: set[int] = set()
        self._highest = int(selection.table.episode.max(initial=-1))
        self._open: _OpenEpisode | None = None
        self.renumbered = 0
        self.emptied = 0

    def take(self, finished: Finished, rows: RowAccess) -> Changes:
        """Add the next task; return the changes of rows that follow from the preceding tasks."""
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
        """Whether the source's episode has an end flag, but none of its rows in the result does."""
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
        cut = changed if self._keeps_ends else changed | (length != table.length[source])
        first = np.ones(len(source), bool)
        first[1:] = source[1:] != source[:-1]  # the seed belongs to the first run of an episode
        columns: dict[str, Any] = {
            "episode": self._whole("episode"), "start": np.cumsum(length) - length, "length": length,
            "return": self._whole("total"), "terminated": terminated, "truncated": truncated, "end_reason": reasons,
            "explicit_next": self._whole("broken"), "explicit_start": np.full(len(source), -1),
            "seed": table.seed[source], "has_seed": table.has_seed[source] & first,
            "final": np.where(cut, 0, table.final[source]),
        }  # fmt: skip
        whole = length == table.length[source]  # scores are of the whole episode
        columns |= {name: np.where(whole, score[source], np.nan) for name, score in table.scores.items()}
        return EpisodeTable.from_columns(columns)

    def text(self) -> EpisodeTexts:
        """The text of the episodes."""
        texts = self._selection.texts
        return [texts[source] for source in self.sources.tolist()] if texts else []


_OF_PIECES = ("episode", "rows", "begins", "ends")


_ARRAYS = {
    "episode": np.int64, "rows": np.int64, "begins": np.bool_, "ends": np.bool_, "ids": np.int64,
    "returns": np.float64, "terminated": np.bool_, "truncated": np.bool_, "broken": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _About:
    """What the journal states about all tasks: the fields of the result."""

    fields: tuple[FieldEntry, ...]


@dataclass(frozen=True, slots=True)
class _JournalEntry:
    """A line of the journal: a finished task. The arrays of `runs` are in base64."""

    task: Count
    rows: Count
    placed: bool
    digest: str
    ranges: tuple[FieldRange, ...]
    runs: Mapping[str, str]


def journal_entry(index: int, finished: Finished) -> dict[str, Any]:
    """Return the entry of the journal for a finished task."""
    columns = {name: getattr(finished.pieces if name in _OF_PIECES else finished, name) for name in _ARRAYS}
    return {
        "task": index,
        "rows": finished.rows,
        "placed": finished.placed,
        "digest": finished.digest,
        "ranges": list(finished.ranges.values()),
        "runs": {name: array_text(columns[name], dtype) for name, dtype in _ARRAYS.items()},
    }


class UnfinishedRun(NamedTuple):
    """What a journal holds: the identity of the run, the fields of its result and the finished tasks."""

    run: Mapping[str, Any]
    fields: tuple[Field, ...]
    finished: Mapping[int, Finished]

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read the journal in the folder of a run; None without one."""
        fields: list[Field] = []
        tasks: dict[int, Finished] = {}

        def take_about(about: Any) -> None:
            fields.extend(decode(_About, about, str(folder)).fields)

        def take_entry(document: Any) -> None:
            entry = decode(_JournalEntry, document, str(folder))
            tasks[entry.task] = _finished_of(entry, fields)

        run = read_journal(journal_path(folder), take_about, take_entry)
        return None if run is None else cls(run, tuple(fields), tasks)


def _finished_of(entry: _JournalEntry, fields: Sequence[Field]) -> Finished:
    arrays: dict[str, Any] = {name: array_of(entry.runs.get(name, ""), dtype) for name, dtype in _ARRAYS.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("the arrays of a task differ in length")
    ranges = {field.key: found for field, found in zip(fields, entry.ranges, strict=True)}
    pieces = Pieces.of(*(arrays.pop(name) for name in _OF_PIECES))
    return Finished(rows=entry.rows, placed=entry.placed, digest=entry.digest, ranges=ranges, pieces=pieces, **arrays)


class ResumeState(NamedTuple):
    """The fields of the result and the finished tasks of an interrupted run."""

    fields: tuple[Field, ...]
    finished: Mapping[int, Finished]

    @classmethod
    def at(cls, folder: Path, steps: int) -> Self | None:
        """Read the journal of a run of `steps` steps and prepare its folder to resume; None without a journal."""
        found = UnfinishedRun.of(folder)
        if found is None:
            return None
        revert_publication(folder, found.fields, steps)
        return cls(found.fields, found.finished)

    def sound(self, folder: Path, tasks: list[Task], steps: int) -> dict[int, Finished]:
        """Return the finished tasks whose rows on the disk still match their digests."""
        found = {}
        with PositionedTree(placed_folder(folder), self.fields, steps, reuse=True) as tree:
            for index, finished in self.finished.items():
                try:
                    task = tasks[index]
                    part = PartFile(part_path(folder, index), self.fields, finished.rows)
                    rows: Any = tree if finished.placed else part
                    start = task.start if finished.placed else 0
                    stop = start + finished.rows
                    if rows_digest(rows.read(field.key, start, stop) for field in self.fields) == finished.digest:
                        found[index] = finished
                except (OSError, IndexError, ValueError, RbtoolError):
                    continue
        return found


class Assembled(NamedTuple):
    """The files of a result and what its manifest needs."""

    data: Sequence[FileRecord]
    ranges: Mapping[Key, FieldRange]
    table: EpisodeTable
    text: EpisodeTexts
    renumbered: int
    emptied: int


class _PlacedRows:
    """The rows of a task in its own place of the result's files."""

    def __init__(self, tree: PositionedTree, start: int) -> None:
        self._tree = tree
        self._start = start

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""
        return self._tree.read(key, self._start + start, self._start + stop)


class Assembly(Closing):
    """Takes finished tasks in any order and processes them from the front.

    As long as every task returned as many rows as it took, the result's files are digested up to the first gap. After a
    task with another number of rows, all rows are copied to new files at the end.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[Field],
        selection: StepSelection,
        processor: Processor,
        tasks: int,
        *,
        resumed: bool = False,
    ) -> None:
        self._folder = folder
        self._fields = tuple(fields)
        self._keys = {field.key for field in fields}
        self._selection = selection
        self._waiting: dict[int, tuple[Task, Finished]] = {}
        self._done: list[tuple[Task, Finished]] = []
        self._in_place = True
        self._ranges: dict[Key, FieldRange] = {}
        reward = result_return_field(selection, processor, fields)
        self._episodes = ResultEpisodes(selection, fields, reward, keeps_ends=processor.keeps_ends)
        placed = placed_folder(folder)
        if not resumed:
            fs.make_folder(placed)
            fs.make_folder(parts_folder(folder))
        self._tree = PositionedTree(placed, fields, selection.steps, reuse=resumed)
        self._tasks = tasks

    def take(self, task: Task, finished: Finished) -> None:
        """Add a finished task, and process all that have no gap before them."""
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
        """Set `truncated` in the last row so far: the rest of its episode has no rows."""
        task, finished = next(found for found in reversed(self._done) if found[1].rows)
        for field in self._fields:
            if field.key in (NEXT_TRUNCATED, NEXT_DONE):
                self._write(task, finished, field.key, finished.rows - 1, np.ones((1, *field.shape), field.numpy))
        self._in_place = False  # the file may be digested already

    def _write(self, task: Task, finished: Finished, key: Key, start: int, array: Array) -> None:
        """Change rows of a task if the result has the leaf."""
        if key not in self._keys:
            return
        if finished.placed:
            self._tree.write(key, task.start + start, array)
        else:
            PartFile(part_path(self._folder, task.index), self._fields, finished.rows).write(key, start, array)

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return sum(finished.rows for _, finished in self._done)

    def finish(self) -> Assembled:
        """Complete the files of the result after all tasks."""
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
        """Close the files; may be called twice."""
        self._tree.close()
