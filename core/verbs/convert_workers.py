"""Conversion of a source by several processes, on this machine or on a Ray cluster with a shared folder.

A task is a range of episodes; the number of steps of each episode is known in advance. Workers read the episodes of
their tasks and write them in one of two ways:

- Without compression, the bytes of every row have a known place in the files of the result, and the worker writes them
  there (`PlacedTarget`).
- With compression, the size of a row is known only once it is compressed. The worker writes plain rows to part files,
  and the parent compresses and appends them in order (`PackedTarget`).

A journal records each finished task with digests of its rows, so that an interrupted run can continue. The result is
byte for byte the same as from one process.
"""

from __future__ import annotations

import base64
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..engine.pool import WorkerPool, default_start_method
from ..engine.tasks import Executor, Limits, Task, TaskFailed, WorkerFailed, origin_of
from ..engine.workspace import (
    Journal,
    PartFile,
    array_of,
    array_text,
    field_entries,
    journal_path,
    keeping,
    part_path,
    parts_folder,
    placed_folder,
    read_journal,
    require_same_run,
    result_folder,
    revert_publication,
    rows_digest,
    write_part,
)
from ..errors import CorruptDataError, FormatError, RbtoolError, UsageError
from ..format import fs
from ..format.contracts import Array, Closing, SourceFacts
from ..format.converter import Reader, ReaderRecipe
from ..format.documents import Count, decode
from ..format.episodes import ALL_COLUMNS, EpisodeTable
from ..format.files import FileRecord, Hasher, bytes_of, digest_bytes
from ..format.manifest import Layout, Manifest
from ..format.memmap.builder import Origin, PositionedFiles, created_by, write_manifest
from ..format.memmap.tree import (
    FieldRange,
    leaf_path,
    leaf_sizes,
    merge_ranges,
    plain_leaves,
    range_of,
    write_tree_meta,
)
from ..format.packed.builder import (
    PackedBuilder,
    PackedFiles,
    PackedRowBuilder,
    PackedState,
    write_packed_manifest,
)
from ..format.packed.schema import AppendedFile, PackedSchema, RowCodec, RowStore, StoreState, pread_bytes
from ..format.returns import Ingest
from ..format.staging import Staging
from ..progress import Progress
from ..ted.schema import Field, Key, row_bytes, ted_fields

_READ_BYTES = 4 << 20


class Converted(NamedTuple):
    """A task whose rows are written: its episode table, text and ranges of values, and the rows of each part file.

    `digests` has a digest for each file of the result (rows written in place) or for each part file. `explicit` has the
    states of the files with next rows that are stored in full.
    """

    table: EpisodeTable
    text: list[dict[str, str]]
    ranges: dict[Key, FieldRange]
    parts: list[int]
    digests: list[str]
    explicit: tuple[StoreState, ...] = ()


@dataclass(frozen=True, slots=True)
class _AboutConversion:
    """The entry of the journal about all tasks: the number of steps at which a task ends, in whole episodes."""

    task_steps: Count


class _StoreEntry(NamedTuple):
    rows: Count
    files: tuple[FileRecord, ...]
    held: str


@dataclass(frozen=True, slots=True)
class _ConversionEntry:
    """A line of the journal about a finished task. The columns of its episode table are in base64."""

    task: Count
    table: Mapping[str, str]
    text: tuple[Mapping[str, str], ...]
    ranges: tuple[FieldRange, ...]
    parts: tuple[Count, ...]
    digests: tuple[str, ...]
    explicit: tuple[_StoreEntry, ...]


@dataclass(frozen=True, slots=True)
class _AppendedEntry:
    """A line of the journal: how many tasks are appended to the files of a packed result, and the files' state."""

    appended: Count
    explicit_starts: str
    files: tuple[_StoreEntry, ...]
    explicit: tuple[_StoreEntry, ...]


@dataclass
class Unfinished:
    """The contents of the journal of a conversion. The first `appended` tasks are in the files of a packed result."""

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
        """Read the journal in the folder of a conversion to these fields; None if there is none."""
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
        ranges = dict(zip((one.key for one in self.fields), entry.ranges, strict=False))  # another run may have fewer
        text = [dict(row) for row in entry.text]
        self.tasks[entry.task] = Converted(
            table, text, ranges, list(entry.parts), list(entry.digests), _states(entry.explicit)
        )

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
        "explicit": _entries(converted.explicit),
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
        hint="all machines must share the folder, and each must see what the others write there",
    )


def _leave_only(folder: Path, names: set[str]) -> None:
    """Remove all files of a folder except `names`, and all links."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and path.relative_to(folder).as_posix() not in names):
            fs.remove(path)


class Target(Closing, ABC):
    """Takes finished tasks in order, and completes the dataset in the result folder below `folder`."""

    @abstractmethod
    def kept(self, tasks: Sequence[Task]) -> dict[int, Converted]:
        """Return the tasks that an earlier run has finished and whose rows match their digests; the rest run again."""

    @abstractmethod
    def take(self, task: Task, converted: Converted) -> None:
        """Take a task whose rows a worker has written; rows from another machine are verified first."""

    @abstractmethod
    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        """Complete the dataset."""


class PlacedTarget(Target):
    """Takes tasks whose rows are at their place in the files of the result: layout `ted`, or `packed` uncompressed."""

    def __init__(
        self, folder: Path, job: ConversionJob, places: Places, lengths: Array, resumed: Unfinished | None
    ) -> None:
        sizes = places.sizes(int(lengths.sum()), len(lengths))
        self._folder, self._job, self._places = folder, job, places
        self._resumed = resumed
        self._ranges: dict[Key, FieldRange] = {}
        self._taken: list[tuple[Task, Converted]] = []
        if resumed is not None:
            revert_publication(folder, sizes)
        else:
            fs.make_folder(parts_folder(folder))
        self._files = PositionedFiles(placed_folder(folder), sizes, reuse=resumed is not None, reserve=True)

    def kept(self, tasks: Sequence[Task]) -> dict[int, Converted]:
        found = self._resumed.tasks if self._resumed is not None else {}
        return {index: one for index, one in found.items() if index < len(tasks) and self._is_sound(tasks[index], one)}

    def _is_sound(self, task: Task, converted: Converted) -> bool:
        try:
            if _covers(task, converted) and self._digests(task) == converted.digests:
                with self._explicit(task, converted):
                    return True
        except (OSError, RbtoolError):
            pass
        return False

    def _digests(self, task: Task) -> list[str]:
        return [self._files.digest(*place) for place in self._places.of(task)]

    @contextlib.contextmanager
    def _explicit(self, task: Task, converted: Converted) -> Iterator[PackedFiles | None]:
        """Open the next rows that a task has stored in full, None without any; CorruptDataError if they changed."""
        if not converted.explicit:
            yield None
            return
        folder, schema = part_path(self._folder, task.index), self._places.schema
        with contextlib.closing(PackedFiles(folder, schema, explicit=True, resumed=converted.explicit)) as found:
            yield found

    def take(self, task: Task, converted: Converted) -> None:
        """Add the ranges and digests of a task; on a shared folder, compare its rows with the worker's digests first.

        If they differ, the cached pages of the rows are dropped and the rows are read once more.
        """
        if self._job.shared and self._digests(task) != converted.digests:
            for place in self._places.of(task):
                self._files.forget(*place)
            if self._digests(task) != converted.digests:
                raise _other_rows(self._folder, task)
        found = converted.ranges
        self._ranges = {key: merge_ranges(self._ranges.get(key), one) for key, one in found.items()}
        for name, _, stop in self._places.of(task):
            self._files.settle(name, stop)
        self._taken.append((task, converted))

    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        files, result = self._files, result_folder(self._folder)
        data = files.finish()
        fs.rename(files.folder, result)
        fields, schema = self._job.fields, self._places.schema
        if self._job.layout == "ted":
            data += write_tree_meta(result, plain_leaves(fields, table.steps), (table.steps,))
            return write_manifest(result, fields, data, self._ranges, table, origin, text)
        starts, more = self._join_explicit(result)
        table = replace(table, explicit_start=starts)
        return write_packed_manifest(result, fields, schema, [*data, *more], self._ranges, table, origin, text)

    def _join_explicit(self, result: Path) -> tuple[Array, list[FileRecord]]:
        """Concatenate the next rows that the tasks have stored in full; return the first of each episode, -1 for none.

        Each task counts its rows from 0, so that the rows of all tasks before it are added to its numbers.
        """
        schema = self._places.schema
        given = np.concatenate([one.table.explicit_start for _, one in self._taken])
        if not any(one.explicit for _, one in self._taken):
            return given, []
        before = [0, *np.cumsum([one.explicit[0].rows if one.explicit else 0 for _, one in self._taken]).tolist()]
        first = np.repeat(before[:-1], [len(one.table) for _, one in self._taken])
        with contextlib.closing(PackedFiles(result, schema, explicit=True)) as whole:
            for task, converted in self._taken:
                with self._explicit(task, converted) as part:
                    step = max(1, _READ_BYTES // schema.size(1, 0))
                    for start in range(0, part.rows if part else 0, step):
                        assert part is not None
                        stop = min(start + step, part.rows)
                        whole.append_states(part.read_states(start, stop), stop - start)
            return np.where(given < 0, -1, given + first), whole.finish()

    def close(self) -> None:
        self._files.close()


class PackedTarget(Target):
    """Takes tasks whose rows are in part files, and appends these to the files of a packed result.

    The journal records the state of the files after each task. A resumed run cuts them back to that state, and goes on
    with the next task.
    """

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
        """Append the rows of a task, and remove its part files."""
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


_TASK_BYTES = 64 << 20
_TASKS_A_WORKER = 4
"""The least number of tasks per worker, if there are enough episodes: more than one, because they differ in length."""
_IN_THIS_PROCESS = "--num-workers 0 converts in this process"


@dataclass(frozen=True)
class ConversionJob:
    """The work of the workers of a conversion; with `shared`, they run on machines that share the result's folder."""

    imports: ClassVar[tuple[str, ...]] = ()
    recipe: ReaderRecipe
    facts: SourceFacts
    layout: Layout
    shared: bool

    @property
    def fields(self) -> tuple[Field, ...]:
        """The leaves of the result."""
        return ted_fields(self.facts.fields)

    def portable(self) -> ConversionJob:
        """Return the job, which can be pickled as it is."""
        return self

    def runner(self) -> ConversionRunner:
        """Open the source again in the worker: open HDF5 files do not survive a fork."""
        return ConversionRunner(self)


class ConversionRunner:
    """Converts ranges of episodes in a worker."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._reader = job.recipe.open()
        self._folder = Path()
        self._places = Places((), "ted", ())
        self._placed = False

    def open(self, folder: Path, spans: Sequence[tuple[int, int]], placed: bool) -> None:
        """Prepare to write rows of the result that is built in `folder`, at their place or to parts.

        `spans` are the episodes of each task.
        """
        self._folder, self._placed = folder, placed
        self._places = Places(self._job.fields, self._job.layout, spans)

    def run(self, task: Task) -> Converted:
        """Write the rows of a task; FormatError if their number differs from the facts of the source."""
        first, stop = self._places.spans[task.index]
        numbers = self._job.facts.episode_numbers[first:stop]
        rows = (
            _PlacedRows(self._folder, self._places, task)
            if self._placed
            else _PartRows(self._folder, self._job.fields, task)
        )
        with rows:
            ingest = Ingest(rows, self._job.facts.fields)
            ingest.run(self._reader.blocks(numbers))
            if rows.count != task.stop - task.start or len(ingest.table) != len(numbers):
                raise FormatError(
                    f"{self._reader.path}: episodes {numbers[0]} to {numbers[-1]} have {rows.count:,} steps, expected "
                    f"{task.stop - task.start:,}, in {len(ingest.table):,} episodes, expected {len(numbers):,}"
                )
            return rows.converted(ingest, synced=self._job.shared)


@dataclass(frozen=True)
class Places:
    """Where the rows of each task are in the files of the result.

    `spans` has for each task the positions, among the converted episodes, of its first one and of the one after its
    last.
    """

    fields: tuple[Field, ...]
    layout: Layout
    spans: Sequence[tuple[int, int]]

    @cached_property
    def schema(self) -> PackedSchema:
        """The fields of a packed result."""
        return PackedSchema.of(self.fields)

    def sizes(self, steps: int, episodes: int) -> dict[str, int]:
        """Return the bytes that so many steps of so many episodes take in each file, by its path."""
        return leaf_sizes(self.fields, steps) if self.layout == "ted" else self.schema.sizes(steps, episodes)

    def of(self, task: Task) -> list[tuple[str, int, int]]:
        """Return the path of each file, the first byte of a task in it, and the byte after its last."""
        first, after = self.spans[task.index]
        stops = self.sizes(task.stop, after)
        return [(name, start, stops[name]) for name, start in self.sizes(task.start, first).items()]


class _PlacedStore(RowStore):
    """Rows that are written into an existing file, from the byte `start` on."""

    def __init__(self, path: Path, start: int, width: int) -> None:
        super().__init__(width)
        self._path, self._start = path, start
        self._hasher = Hasher()
        self._descriptor = fs.open_to_change(path)

    @property
    def digest(self) -> str:
        """The digest of the rows."""
        return self._hasher.digest

    @property
    def files(self) -> list[AppendedFile]:
        return []

    def append(self, rows: Array) -> None:
        if rows.size:
            data = bytes_of(rows)
            self._hasher.update(data)
            fs.pwrite(self._descriptor, data, self._start + self.rows * self.width, self._path)
        self.rows += len(rows)

    def read(self, start: int, stop: int) -> Array:
        size = (stop - start) * self.width
        return pread_bytes(self._descriptor, self._path, self._start + start * self.width, size).reshape(-1, self.width)

    def flush(self) -> None:
        """Nothing is held back."""

    def sync(self) -> None:
        """Flush the rows, so that other machines can read them."""
        fs.fsync(self._descriptor, self._path)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            fs.close(descriptor, self._path)


class _PlacedRows(Closing):
    """Writes the rows of a task at their place in the files of the result, and never beyond it.

    Next rows that differ from the following row are stored in full, in files of the task's own.
    """

    def __init__(self, folder: Path, places: Places, task: Task) -> None:
        self.count = 0
        self._room = task.stop - task.start
        self._fields = places.fields
        self._stores: list[_PlacedStore] = []
        self._leaves: dict[Key, FieldRange] = {}
        self._builder: PackedRowBuilder | None = None
        starts = {name: start for name, start, _ in places.of(task)}

        def make(name: str, width: int) -> RowStore:
            self._stores.append(_PlacedStore(placed_folder(folder) / name, starts[name], width))
            return self._stores[-1]

        try:
            if places.layout == "packed":
                own = part_path(folder, task.index)
                fs.remove(own)  # of an interrupted run
                files = PackedFiles(own, places.schema, make=make)
                self._builder = PackedRowBuilder(own, places.fields, places.schema, files=files)
            else:
                for one in places.fields:
                    make(leaf_path(one.key), one.row_bytes)
        except BaseException:
            self.close()
            raise

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows after those before them."""
        self.count += len(next(iter(columns.values())))
        if self.count > self._room:  # more rows than announced would overwrite another task; `run` raises
            return
        if self._builder is not None:
            self._builder.append(columns, last)
            return
        for one, store in zip(self._fields, self._stores, strict=True):
            store.append(columns[one.key])
            self._leaves[one.key] = range_of(columns[one.key], one, self._leaves.get(one.key))

    def converted(self, ingest: Ingest, *, synced: bool) -> Converted:
        """Write buffered rows and describe the task; with `synced`, flush them for other machines to read."""
        table, ranges = ingest.table, self._leaves
        explicit: tuple[StoreState, ...] = ()
        if self._builder is not None:
            self._builder.write()
            table = replace(table, explicit_start=np.array(self._builder.explicit_starts, np.int64))
            ranges = self._builder.ranges
            if self._builder.explicit is not None:
                self._builder.explicit.finish()
                explicit = self._builder.explicit.states
        if synced:
            for store in self._stores:
                store.sync()
        return Converted(table, ingest.text, ranges, [], [store.digest for store in self._stores], explicit)

    def close(self) -> None:
        if self._builder is not None and self._builder.explicit is not None:
            self._builder.explicit.close()
        for store in self._stores:
            store.close()


@dataclass
class _PartRows(Closing):
    """Writes the rows of a task to part files, which the parent compresses and appends to the result."""

    folder: Path
    fields: tuple[Field, ...]
    task: Task
    count: int = 0
    ranges: dict[Key, FieldRange] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows to a new part file."""
        arrays = [columns[one.key] for one in self.fields]
        write_part(part_path(self.folder, self.task.index, len(self.parts)), arrays)
        self.digests.append(rows_digest(arrays))
        self.parts.append(len(arrays[0]))
        self.count += self.parts[-1]
        for one, array in zip(self.fields, arrays, strict=True):
            self.ranges[one.key] = range_of(array, one, self.ranges.get(one.key))

    def converted(self, ingest: Ingest, *, synced: bool) -> Converted:
        """Describe the task; the files are closed, so that other machines can read them."""
        return Converted(ingest.table, ingest.text, self.ranges, self.parts, self.digests)


class ConversionWorkers(Closing):
    """The worker processes of a conversion, as a context manager that ends them.

    They must be started before the folder of the result is locked, because forks inherit locks. `reader` is closed
    first, because open HDF5 files do not survive a fork. With the engine `ray`, workers are actors of a cluster, and a
    task whose worker is lost runs again. `identity` returns, as JSON, everything that determines the result besides the
    episodes of `facts`; it may take long, and is called while the workers convert.

    Raises RbtoolError if no process can be started, UsageError without Ray or its cluster.
    """

    def __init__(
        self, reader: Reader, facts: SourceFacts, layout: Layout, workers: int, engine: str,
        identity: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        known = facts.lengths
        self._lengths = np.asarray(reader.episode_table(facts.episode_numbers).length if known is None else known)
        self._fields = ted_fields(facts.fields)
        self._others_identity = identity
        self._task_steps = _task_steps(int(self._lengths.sum()), row_bytes(self._fields), workers)
        self._spans, self._tasks = _tasks(self._lengths, self._task_steps)
        self._finished = 0
        recipe = reader.recipe()
        reader.close()
        self._job = ConversionJob(recipe, facts, layout, engine == "ray")
        with self._explained():
            self._pool = _executor(self._job, min(workers, len(self._spans)), engine)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        found = self._others_identity()
        self._job.recipe.require_unchanged()  # the source is still the one that the workers have opened
        return {
            **found,
            "layout": self._job.layout,
            "fields": field_entries(self._fields),
            "episodes": digest_bytes(np.asarray(self._job.facts.episode_numbers, np.int64).tobytes()),
            "lengths of episodes": digest_bytes(self._lengths.astype(np.int64).tobytes()),
            "version of rbtool": created_by(),
        }

    def require_same_run(self, folder: Path) -> bool:
        """Return whether a folder has an unfinished conversion; UsageError if it is not this one."""
        found = Unfinished.of(folder, self._fields)
        if found is not None:
            require_same_run(found.run, self._identity, folder)
        return found is not None

    def is_same_run(self, folder: Path) -> bool:
        """Return whether a folder has an unfinished run of this conversion."""
        with contextlib.suppress(UsageError):
            return self.require_same_run(folder)
        return False

    @contextlib.contextmanager
    def keeping(self, staging: Staging, progress: Progress, how: str) -> Iterator[None]:
        """Keep finished tasks in `staging` after an error; end the workers before their folder is removed."""
        with keeping(staging, progress, lambda: (self._finished, len(self._tasks)), how), contextlib.closing(self):
            yield

    def build(
        self, staging: Staging, codecs: Mapping[Key, RowCodec], origin: Callable[[], Origin], progress: Progress
    ) -> Manifest:
        """Build the dataset in the result folder of `staging`, byte for byte as one process would.

        Continues the run that `staging` has taken over, if any. Raises the errors of reading and writing.
        """
        with self._explained():
            return self._built(staging, codecs, origin, progress)

    def _built(
        self, staging: Staging, codecs: Mapping[Key, RowCodec], origin: Callable[[], Origin], progress: Progress
    ) -> Manifest:
        folder = staging.path
        resumed = Unfinished.of(folder, self._fields) if staging.taken_up else None
        if resumed is not None:
            self._task_steps, self._finished = resumed.task_steps, len(resumed.tasks)
            self._spans, self._tasks = _tasks(self._lengths, self._task_steps)
        else:
            fs.make_folder(journal_path(folder).parent)
        with Journal(journal_path(folder)) as journal, self._target(folder, codecs, journal, resumed) as target:
            kept = target.kept(self._tasks)
            self._pool.broadcast("open", folder, self._spans, isinstance(target, PlacedTarget))
            progress.start("converting", int(self._lengths.sum()), "steps")
            if kept:
                progress.note(f"{len(kept):,} of {len(self._tasks):,} chunks are finished already")
            found: list[Converted] = []
            for task, converted in _in_order(self._answers(kept, journal, begun=resumed is not None)):
                target.take(task, converted)
                found.append(converted)
                progress.advance(task.stop - task.start)
            self._pool.dismiss()
            table = EpisodeTable.joined([one.table for one in found])
            made = target.finish(table, origin(), [text for one in found for text in one.text])
            progress.done()
            return made

    def _target(
        self, folder: Path, codecs: Mapping[Key, RowCodec], journal: Journal, resumed: Unfinished | None
    ) -> Target:
        if codecs:
            return PackedTarget(folder, self._fields, codecs, journal, resumed)
        places = Places(self._fields, self._job.layout, self._spans)
        return PlacedTarget(folder, self._job, places, self._lengths, resumed)

    def _answers(
        self, kept: Mapping[int, Converted], journal: Journal, *, begun: bool
    ) -> Iterator[tuple[Task, Converted]]:
        """Yield the kept tasks, then the others in the order in which they finish; raise the first failure.

        The identity of the run, which takes long to compute, is written to the journal when the first task is finished;
        the workers continue meanwhile.
        """
        self._finished = len(kept)
        for index in sorted(kept):
            yield self._tasks[index], kept[index]
        for task, answer in self._pool.run("run", [task for task in self._tasks if task.index not in kept]):
            if isinstance(answer, TaskFailed):
                raise answer
            if not begun:
                journal.begin(self._identity, {"task_steps": self._task_steps})
                begun = True
            journal.append(entry_of(task, answer))
            self._finished += 1
            yield task, answer

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn failures of workers into errors for users."""
        try:
            yield
        except TaskFailed as failed:
            first, stop = self._spans[failed.task.index]
            numbers = self._job.facts.episode_numbers
            several = stop > first + 1
            what = f"episodes {numbers[first]} to {numbers[stop - 1]}" if several else f"episode {numbers[first]}"
            raise _error(failed.cause, f" while it converted {what}") from origin_of(failed.cause)
        except WorkerFailed as failed:
            raise _error(failed, " before it started to convert") from origin_of(failed)

    def close(self) -> None:
        """End the workers and wait for them; may be called twice."""
        self._pool.close()


def _executor(job: ConversionJob, workers: int, engine: str) -> Executor:
    if engine == "ray":
        from ..engine.ray_cluster import RayExecutor

        return RayExecutor(job, workers, Limits(retries=2))
    return WorkerPool(job, workers, Limits(retries=0), _start_method())


def _start_method() -> str:
    """Return `fork` if it is safe, else `spawn`, which is fast enough because workers import little."""
    return "fork" if default_start_method() == "fork" else "spawn"


def _task_steps(steps: int, row: int, workers: int) -> int:
    """Return the number of steps per task; tasks end at the ends of episodes."""
    return max(1, min(_TASK_BYTES // max(1, row), -(-steps // (workers * _TASKS_A_WORKER))))


def _tasks(lengths: Array, size: int) -> tuple[list[tuple[int, int]], list[Task]]:
    """Divide the episodes, in order, into tasks of at most `size` steps, or of a single longer episode."""
    stops = np.cumsum(lengths)
    spans: list[tuple[int, int]] = []
    tasks: list[Task] = []
    first = start = 0
    while first < len(stops):
        after = max(first + 1, int(np.searchsorted(stops, start + size, side="right")))
        stop = int(stops[after - 1])
        spans.append((first, after))
        tasks.append(Task(len(tasks), start, stop))
        first, start = after, stop
    return spans, tasks


def _error(cause: BaseException, when: str) -> BaseException:
    if not isinstance(cause, WorkerFailed):
        return cause
    if cause.trace:
        return RbtoolError(f"a worker process failed{when}: {cause.text}", hint="--debug shows the traceback")
    hint = _IN_THIS_PROCESS
    if "SIGKILL" in cause.text:  # which the system sends to processes that use too much memory
        hint = f"if memory ran out, try fewer processes; {hint}"
    return RbtoolError(f"{cause.text}{when}", hint=hint)


def _in_order(answers: Iterator[tuple[Task, Converted]]) -> Iterator[tuple[Task, Converted]]:
    """Reorder finished tasks: yield each as soon as all tasks before it have been yielded."""
    waiting: dict[int, tuple[Task, Converted]] = {}
    following = 0
    for task, converted in answers:
        waiting[task.index] = task, converted
        while following in waiting:
            yield waiting.pop(following)
            following += 1
