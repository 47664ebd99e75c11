"""Puts the rows that tasks wrote together: in their places already, or one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..format import Array, EpisodeTable, FieldRange, FileRecord, PositionedTree, TreeWriter, fs, merge_ranges
from ..ted import EPISODE, NEXT_DONE, NEXT_TRUNCATED, Field, Key
from .episodes import ResultEpisodes
from .job import Finished, Task
from .places import PartFile, part_path, placed_folder, result_folder
from .taking import Taking, result_return_field
from .work import Work

__all__ = ["Assembled", "Assembly"]


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
        self, folder: Path, fields: Sequence[Field], taking: Taking, work: Work, tasks: int, *, anew: bool = True
    ) -> None:
        self._folder = folder
        self._fields = tuple(fields)
        self._keys = {field.key for field in fields}
        self._taking = taking
        self._waiting: dict[int, tuple[Task, Finished]] = {}
        self._done: list[tuple[Task, Finished]] = []
        self._in_place = True
        self._ranges: dict[Key, FieldRange] = {}
        self._episodes = ResultEpisodes(taking, fields, result_return_field(taking, work, fields))
        placed = placed_folder(folder)
        if anew:
            fs.make_folder(placed)
            fs.make_folder(part_path(folder, 0).parent)
        self._tree = PositionedTree(placed, fields, taking.steps, anew=anew)
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
