"""The workspace of a conversion by several processes: finished tasks, their rows in the result, and the journal.

In layout `ted` workers write rows at their place in the files of the result. In layout `packed` the place of a row
depends on those before it: workers leave TED rows in part files, and the parent appends them in order.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ..engine.tasks import Task
from ..engine.workspace import (
    Journal,
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
from ..errors import CorruptDataError, RbtoolError
from ..format import fs
from ..format.contracts import Closing
from ..format.digest import FileRecord
from ..format.documents import Count, decode
from ..format.episodes import ALL_COLUMNS, EpisodeTable
from ..format.manifest import Manifest
from ..format.memmap.builder import Origin, PositionedTree, write_manifest
from ..format.memmap.tree import FieldRange, merge_ranges
from ..format.packed.builder import PackedBuilder, PackedState
from ..format.packed.row_files import RowCodec, StoreState
from ..ted.schema import Field, Key

_READ_BYTES = 4 << 20


class Converted(NamedTuple):
    """A task whose rows are written: its episodes, the ranges of its values, and the rows of each of its part files.

    `digests` has that of each field's rows in layout `ted`, that of each part file in layout `packed`.
    """

    table: EpisodeTable
    text: list[dict[str, str]]
    ranges: dict[Key, FieldRange]
    parts: list[int]
    digests: list[str]


@dataclass(frozen=True, slots=True)
class _AboutConversion:
    """What the journal states about all tasks: at how many steps of whole episodes a task ends."""

    task_steps: Count


@dataclass(frozen=True, slots=True)
class _ConversionEntry:
    """A line of the journal: a finished task. The columns of its episode table are in base64."""

    task: Count
    table: Mapping[str, str]
    text: tuple[Mapping[str, str], ...]
    ranges: tuple[FieldRange, ...]
    parts: tuple[Count, ...]
    digests: tuple[str, ...]


class _StoreEntry(NamedTuple):
    rows: Count
    files: tuple[FileRecord, ...]
    held: str


@dataclass(frozen=True, slots=True)
class _AppendedEntry:
    """A line of the journal: the rows of tasks that are in the files of a packed result, and those files."""

    appended: Count
    explicit_starts: str
    files: tuple[_StoreEntry, ...]
    explicit: tuple[_StoreEntry, ...]


@dataclass
class Unfinished:
    """What the journal of a conversion holds; `appended` tasks, from the first on, are in the files of the result."""

    fields: tuple[Field, ...]
    run: Mapping[str, Any] = field(default_factory=dict)
    task_steps: int = 0
    tasks: dict[int, Converted] = field(default_factory=dict)
    appended: int = 0
    explicit_starts: dict[int, list[int]] = field(default_factory=dict)
    files: tuple[StoreState, ...] = ()
    explicit: tuple[StoreState, ...] = ()

    @classmethod
    def of(cls, folder: Path, fields: tuple[Field, ...]) -> Self | None:
        """Read the journal in the folder of a conversion to these fields; None without one."""
        found = cls(fields)
        run = read_journal(journal_path(folder), found._take_about, found._take)
        if run is None:
            return None
        found.run = run
        return found

    def _take_about(self, about: Any) -> None:
        self.task_steps = decode(_AboutConversion, about, "the journal").task_steps

    def _take(self, document: Any) -> None:
        if "appended" in document:
            taken = decode(_AppendedEntry, document, "the journal")
            files, explicit = _states(taken.files), _states(taken.explicit)
            self.explicit_starts[taken.appended - 1] = array_of(taken.explicit_starts, np.int64).tolist()
            self.appended, self.files, self.explicit = taken.appended, files, explicit
            return
        entry = decode(_ConversionEntry, document, "the journal")
        table = EpisodeTable.from_columns(
            {name: array_of(text, ALL_COLUMNS[name]) for name, text in entry.table.items()}
        )
        ranges = dict(zip((one.key for one in self.fields), entry.ranges, strict=False))  # as many where runs are alike
        text = [dict(row) for row in entry.text]
        self.tasks[entry.task] = Converted(table, text, ranges, list(entry.parts), list(entry.digests))

    @property
    def packed_state(self) -> PackedState:
        """The state of a packed result that holds the first `appended` tasks."""
        ranges: dict[Key, FieldRange] = {}
        lengths: list[int] = []
        starts: list[int] = []
        for index in range(self.appended):
            converted = self.tasks[index]
            starts += self.explicit_starts[index]
            ranges = {key: merge_ranges(ranges.get(key), found) for key, found in converted.ranges.items()}
            lengths += converted.table.length.tolist()
        return PackedState(self.files, self.explicit, ranges, lengths, starts)


def entry_of(task: Task, converted: Converted) -> dict[str, Any]:
    """Return the entry of the journal for a finished task."""
    return {
        "task": task.index,
        "table": {name: array_text(column, ALL_COLUMNS[name]) for name, column in converted.table.columns().items()},
        "text": converted.text,
        "ranges": list(converted.ranges.values()),
        "parts": converted.parts,
        "digests": converted.digests,
    }


def _states(entries: Sequence[_StoreEntry]) -> tuple[StoreState, ...]:
    return tuple(StoreState(rows, files, base64.b64decode(held, validate=True)) for rows, files, held in entries)


def _entries(states: Sequence[StoreState]) -> list[dict[str, Any]]:
    return [
        {
            "rows": one.rows,
            "files": [file._asdict() for file in one.files],
            "held": base64.b64encode(one.held).decode(),
        }
        for one in states
    ]


def _covers(task: Task, converted: Converted) -> bool:
    return converted.table.covers(task.stop - task.start)


def _other_rows(folder: Path, task: Task) -> CorruptDataError:
    return CorruptDataError(
        f"steps {task.start:,} to {task.stop - 1:,} in {folder} are not those that a worker wrote there",
        hint="all machines need the same folder, and what one writes there the others have to read",
    )


def _leave_only(folder: Path, names: set[str]) -> None:
    """Remove all files of a folder but these, and all links."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and path.relative_to(folder).as_posix() not in names):
            fs.remove(path)


class Target(Closing, ABC):
    """Takes finished tasks in order, and completes the dataset in the result folder of `folder`."""

    @abstractmethod
    def kept(self, tasks: Sequence[Task]) -> dict[int, Converted]:
        """Return the tasks that an earlier run has finished and whose rows are sound; the others are done again."""

    @abstractmethod
    def take(self, task: Task, converted: Converted) -> None:
        """Take a task whose rows a worker has written, verified where it wrote them on another machine."""

    @abstractmethod
    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        """Complete the dataset."""


class TedTarget(Target):
    """Takes tasks whose rows are at their place in the files of the result."""

    def __init__(
        self, folder: Path, fields: tuple[Field, ...], rows: int, resumed: Unfinished | None, *, verify: bool
    ) -> None:
        self._folder = folder
        self._resumed = resumed
        self._verify = verify
        if resumed is not None:
            revert_publication(folder, fields, rows)
        self._tree = PositionedTree(placed_folder(folder), fields, rows, reuse=resumed is not None, reserve=True)

    def kept(self, tasks: Sequence[Task]) -> dict[int, Converted]:
        found = self._resumed.tasks if self._resumed is not None else {}
        return {index: one for index, one in found.items() if index < len(tasks) and self._is_sound(tasks[index], one)}

    def _is_sound(self, task: Task, converted: Converted) -> bool:
        try:
            return _covers(task, converted) and self._digests(task) == converted.digests
        except (OSError, RbtoolError):
            return False

    def _digests(self, task: Task) -> list[str]:
        return [rows_digest(self._rows(one, task)) for one in self._tree.fields]

    def _rows(self, one: Field, task: Task) -> Iterator[Any]:
        step = max(1, _READ_BYTES // max(1, one.row_bytes))
        for start in range(task.start, task.stop, step):
            yield self._tree.read(one.key, start, min(start + step, task.stop))

    def take(self, task: Task, converted: Converted) -> None:
        """Digest the rows of a task."""
        if self._verify and self._digests(task) != converted.digests:
            self._tree.forget(task.start, task.stop)
            if self._digests(task) != converted.digests:
                raise _other_rows(self._folder, task)
        self._tree.merge_ranges(converted.ranges)
        self._tree.settle(task.stop)

    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        tree, result = self._tree, result_folder(self._folder)
        data = tree.finish()
        fs.rename(tree.folder, result)
        return write_manifest(result, tree.fields, data, tree.ranges, table, origin, text)

    def close(self) -> None:
        self._tree.close()


class PackedTarget(Target):
    """Takes tasks whose rows are in part files, and appends them."""

    def __init__(
        self,
        folder: Path,
        fields: tuple[Field, ...],
        codecs: Mapping[Key, RowCodec],
        journal: Journal,
        resumed: Unfinished | None,
    ) -> None:
        self._folder, self._fields, self._journal = folder, fields, journal
        self._resumed = resumed
        self._appended = 0
        result = result_folder(folder)
        state = resumed.packed_state if resumed is not None and resumed.appended else None
        if state is not None and resumed is not None:
            _leave_only(result, {file.path for store in (*state.files, *state.explicit) for file in store.files})
            try:
                self._builder = PackedBuilder(result, fields, codecs, state)
                self._appended = resumed.appended
            except (OSError, RbtoolError):
                state = None
        if state is None:
            fs.remove(result)
            self._builder = PackedBuilder(result, fields, codecs)
        fs.make_folder(parts_folder(folder))

    def kept(self, tasks: Sequence[Task]) -> dict[int, Converted]:
        if self._resumed is None:
            return {}
        found = {
            index: converted
            for index, converted in self._resumed.tasks.items()
            if index < self._appended or (index < len(tasks) and self._is_sound(tasks[index], converted))
        }
        needed = {
            part_path(self._folder, index, part)
            for index, converted in found.items()
            for part in range(len(converted.parts))
            if index >= self._appended
        }
        for path in parts_folder(self._folder).iterdir():
            if path not in needed:
                fs.remove(path)
        return found

    def _is_sound(self, task: Task, converted: Converted) -> bool:
        try:
            rows = [sum(converted.parts), len(converted.digests)] == [task.stop - task.start, len(converted.parts)]
            if not (rows and _covers(task, converted)):
                return False
            for number in range(len(converted.parts)):
                self._part(task, converted, number)
        except (OSError, ValueError):  # also the CorruptDataError of other bytes
            return False
        return True

    def _part(self, task: Task, converted: Converted, number: int) -> dict[Key, Any]:
        rows = converted.parts[number]
        part = PartFile(part_path(self._folder, task.index, number), self._fields, rows)
        columns = {one.key: part.read(one.key, 0, rows) for one in self._fields}
        if rows_digest(columns.values()) != converted.digests[number]:
            raise _other_rows(self._folder, task)
        return columns

    def take(self, task: Task, converted: Converted) -> None:
        """Append the rows of a task, and remove its files."""
        if task.index < self._appended:
            return
        last = np.zeros(task.stop - task.start, bool)
        last[np.cumsum(converted.table.length) - 1] = True
        before = len(self._builder.rows.explicit_starts)
        start = 0
        for number, rows in enumerate(converted.parts):
            self._builder.append(self._part(task, converted, number), last[start : start + rows])
            start += rows
        files, explicit = self._builder.rows.states()
        self._journal.append(
            {
                "appended": task.index + 1,
                "explicit_starts": array_text(self._builder.rows.explicit_starts[before:], np.int64),
                "files": _entries(files),
                "explicit": _entries(explicit),
            }
        )
        for number in range(len(converted.parts)):
            fs.remove(part_path(self._folder, task.index, number))

    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        return self._builder.finish(table, origin, text)

    def close(self) -> None:
        self._builder.close()
