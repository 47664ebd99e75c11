"""The workspace of a run: the folder of the result, the rows of tasks, their assembly, and what is finished of it."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ..errors import RbtoolError
from ..format import fs
from ..format.contracts import Array, Closing
from ..format.digest import FileRecord, Hasher, bytes_of
from ..format.documents import Count, FieldEntry, decode
from ..format.episodes import EpisodeTable
from ..format.memmap.builder import PositionedTree
from ..format.memmap.tree import FieldRange, TreeWriter, leaf_path, merge_ranges
from ..format.staging import may_be_shared
from ..ted.schema import EPISODE, NEXT_DONE, NEXT_TRUNCATED, Field, Key
from .episodes import ResultEpisodes, StepSelection, result_return_field
from .journal import array_of, array_text, read_journal
from .processor import Finished, Pieces, Processor, Task


def result_folder(folder: Path) -> Path:
    """Return the folder of the result, the only part that is published."""
    return folder / "dataset"


def work_folder(folder: Path) -> Path:
    """Return the folder of all that is not part of the result."""
    return folder / "work"


def placed_folder(folder: Path) -> Path:
    """Return the folder of the leaf files in which tasks with as many rows as steps have their own place."""
    return work_folder(folder) / "placed"


def part_path(folder: Path, index: int) -> Path:
    """Return the file of the rows of a task with more or fewer rows than steps."""
    return work_folder(folder) / "parts" / f"{index}.rows"


def journal_path(folder: Path) -> Path:
    """Return the file of the journal."""
    return work_folder(folder) / "journal.jsonl"


def revert_publication(folder: Path, fields: Sequence[Field], steps: int) -> None:
    """Revert the completion or publication of a result: leave only files into which tasks have written.

    Publishing over an existing result moves that one into this folder; its files are removed, and so are files that
    other datasets may have, too: tasks would write into those.
    """
    placed, result = placed_folder(folder), result_folder(folder)
    if placed.is_dir() or not result.is_dir():
        fs.remove(result)
    else:
        fs.rename(result, placed)
    sizes = {placed / leaf_path(field.key): steps * field.row_bytes for field in fields}
    for path in sorted(placed.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > sizes.get(path, -1) or may_be_shared(found):
            fs.remove(path)
    fs.make_folder(placed)
    fs.make_folder(part_path(folder, 0).parent)


def write_part(path: Path, arrays: Sequence[Array]) -> None:
    """Write the rows of all leaves, one leaf after the other; a file of an interrupted run is replaced."""
    fs.remove(path)
    descriptor = fs.create(path)
    try:
        parts = [bytes_of(array) for array in arrays if array.size]
        for first in range(0, len(parts), 1000):
            fs.write_parts(descriptor, parts[first : first + 1000], path)
    finally:
        fs.close(descriptor, path)


def rows_digest(arrays: Iterable[Array]) -> str:
    """Digest the bytes of all leaves in order, for the journal."""
    hasher = Hasher()
    for array in arrays:
        if array.size:
            hasher.update(bytes_of(array))
    return hasher.digest


class PartFile:
    """A file of `write_part` with `rows` rows of each field."""

    def __init__(self, path: Path, fields: Sequence[Field], rows: int) -> None:
        self._path = path
        self._fields = {field.key: field for field in fields}
        sizes = np.array([rows * field.row_bytes for field in fields], np.int64)
        self._start = dict(zip(self._fields, (np.cumsum(sizes) - sizes).tolist(), strict=True))

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""
        field = self._fields[key]
        shape = (stop - start, *field.shape)
        if not field.row_bytes or start == stop:
            return np.empty(shape, field.numpy)
        count = (stop - start) * (field.row_bytes // field.numpy.itemsize)
        offset = self._start[key] + start * field.row_bytes
        return np.fromfile(self._path, field.numpy, count, offset=offset).reshape(shape)

    def write(self, key: Key, start: int, array: Array) -> None:
        """Overwrite rows of one leaf from row `start`."""
        descriptor = fs.open_to_change(self._path)
        try:
            offset = self._start[key] + start * self._fields[key].row_bytes
            fs.pwrite(descriptor, bytes_of(array), offset, self._path)
        finally:
            fs.close(descriptor, self._path)


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


def field_entries(fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Return fields as JSON."""
    return [{"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape), "role": f.role} for f in fields]


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
    text: Sequence[dict[str, str]]
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

    While every task has returned as many rows as it took, the result's files are digested as far as they are complete
    from the front. After a task with another number of rows, all rows are copied into new files at the end.
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
        self._episodes = ResultEpisodes(selection, fields, result_return_field(selection, processor, fields))
        placed = placed_folder(folder)
        if not resumed:
            fs.make_folder(placed)
            fs.make_folder(part_path(folder, 0).parent)
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
