"""Conversion of a source by several processes, of this machine or of a Ray cluster with a shared folder.

Each worker reads ranges of episodes. In layout `ted` workers write rows at their place in the files of the result. In
layout `packed` the place of a row depends on those before it: workers leave TED rows in part files, and the parent
appends them in order. A journal names finished tasks and their rows: after an interruption another run continues there.
"""

from __future__ import annotations

import base64
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from ..format.memmap.builder import Origin, PositionedTree, RowFiles, created_by, write_manifest
from ..format.memmap.tree import FieldRange, merge_ranges, range_of
from ..format.packed.builder import PackedBuilder, PackedState
from ..format.packed.schema import RowCodec, StoreState
from ..format.returns import Ingest
from ..format.staging import Staging
from ..progress import Progress
from ..ted.schema import Field, Key, row_bytes, ted_fields

_READ_BYTES = 4 << 20


class Converted(NamedTuple):
    """A task whose rows are written: its episodes, the ranges of its values, and the rows of each of its part files.

    `digests` has one for the rows of each field in layout `ted`, one for each part file in layout `packed`.
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


_TASK_BYTES = 64 << 20
_TASKS_A_WORKER = 4
"""Tasks that each worker gets at least, where there are so many episodes: they do not take equally long."""
_IN_THIS_PROCESS = "--num-workers 0 converts in this process"


@dataclass(frozen=True)
class ConversionJob:
    """What the workers of a conversion do; with `shared`, on machines that share the folder of the result."""

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
        """The job itself can be pickled."""
        return self

    def runner(self) -> ConversionRunner:
        """Open the source again: what HDF5 has open does not survive a fork."""
        return ConversionRunner(self)


class ConversionRunner:
    """Converts ranges of episodes in a worker."""

    def __init__(self, job: ConversionJob) -> None:
        self._job = job
        self._reader = job.recipe.open()
        self._folder = Path()
        self._files: RowFiles | None = None
        self._spans: Sequence[tuple[int, int]] = ()

    def open(self, folder: Path, spans: Sequence[tuple[int, int]]) -> None:
        """Prepare to write rows of the result that is built in `folder`; `spans` are the episodes of each task.

        Each has the places of the first one and of that after the last, among the episodes that are converted.
        """
        self._folder, self._spans = folder, spans
        self._files = RowFiles(placed_folder(folder), self._job.fields) if self._job.layout == "ted" else None

    def run(self, task: Task) -> Converted:
        """Write the rows of a task; FormatError where they are not as many as the facts state."""
        first, stop = self._spans[task.index]
        numbers = self._job.facts.episode_numbers[first:stop]
        rows: _PartRows | _PositionedRows
        rows = _PartRows(self._folder, self._job.fields, task)
        if self._files is not None:
            rows = _PositionedRows(self._files, task)
        ingest = Ingest(rows, self._job.facts.fields)
        ingest.run(self._reader.blocks(numbers))
        if rows.count != task.stop - task.start:
            raise FormatError(
                f"{self._reader.path}: episodes {numbers[0]} to {numbers[-1]} have {rows.count:,} steps, and "
                f"{task.stop - task.start:,} were announced"
            )
        if self._files is not None and self._job.shared:
            self._files.sync()
        return Converted(ingest.table, ingest.text, rows.ranges, rows.parts, rows.digests)


@dataclass
class _PositionedRows:
    """Writes rows at their place in the files of the result, and nowhere else."""

    files: RowFiles
    task: Task
    count: int = 0
    ranges: dict[Key, FieldRange] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._hashers = [Hasher() for _ in self.files.fields]

    @property
    def digests(self) -> list[str]:
        """The digest of each field's rows."""
        return [hasher.digest for hasher in self._hashers]

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows after those before them."""
        rows = len(next(iter(columns.values())))
        if self.count + rows <= self.task.stop - self.task.start:  # the others belong to another task
            self.files.write(columns, self.task.start + self.count)
        self.count += rows
        for one, hasher in zip(self.files.fields, self._hashers, strict=True):
            found = range_of(columns[one.key], one)
            self.ranges[one.key] = merge_ranges(self.ranges.get(one.key), found)
            if columns[one.key].size:
                hasher.update(bytes_of(columns[one.key]))


@dataclass
class _PartRows:
    """Writes rows to files from which this process's parent takes them."""

    folder: Path
    fields: tuple[Field, ...]
    task: Task
    count: int = 0
    ranges: dict[Key, FieldRange] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows to a file of their own."""
        arrays = [columns[one.key] for one in self.fields]
        write_part(part_path(self.folder, self.task.index, len(self.parts)), arrays)
        self.digests.append(rows_digest(arrays))
        self.parts.append(len(arrays[0]))
        self.count += self.parts[-1]
        for one, array in zip(self.fields, arrays, strict=True):
            self.ranges[one.key] = merge_ranges(self.ranges.get(one.key), range_of(array, one))


class ConversionWorkers(Closing):
    """The worker processes of a conversion. A context manager: leaving ends them.

    To be made before the folder of the result is locked, for forks inherit locks. `reader` is closed: what HDF5 has
    open must not be there in a fork. With `engine` `ray` they are actors of a cluster, and a task whose worker is lost
    is run again. `identity` is, as JSON, all that decides the result beyond the episodes of `facts`.
    Raises RbtoolError where no process can be started, UsageError without Ray or its cluster.
    """

    def __init__(
        self, reader: Reader, facts: SourceFacts, layout: Layout, workers: int, engine: str, identity: Mapping[str, Any]
    ) -> None:
        known = facts.lengths
        self._lengths = np.asarray(reader.episode_table(facts.episode_numbers).length if known is None else known)
        self._fields = ted_fields(facts.fields)
        self._identity = {**identity, **self._own_identity(facts, layout)}
        self._task_steps = _task_steps(int(self._lengths.sum()), row_bytes(self._fields), workers)
        self._spans, self._tasks = _tasks(self._lengths, self._task_steps)
        self._finished = 0
        recipe = reader.recipe()
        reader.close()
        self._job = ConversionJob(recipe, facts, layout, engine == "ray")
        with self._explained():
            self._pool = _executor(self._job, min(workers, len(self._spans)), engine)

    def _own_identity(self, facts: SourceFacts, layout: Layout) -> dict[str, Any]:
        return {
            "layout": layout,
            "fields": field_entries(self._fields),
            "episodes": digest_bytes(np.asarray(facts.episode_numbers, np.int64).tobytes()),
            "lengths of episodes": digest_bytes(self._lengths.astype(np.int64).tobytes()),
            "version of rbtool": created_by(),
        }

    def require_same_run(self, folder: Path) -> bool:
        """Whether a folder holds an unfinished conversion; UsageError if it is another one."""
        found = Unfinished.of(folder, self._fields)
        if found is not None:
            require_same_run(found.run, self._identity, folder)
        return found is not None

    def is_same_run(self, folder: Path) -> bool:
        """Whether a folder holds an unfinished conversion that is this one."""
        with contextlib.suppress(UsageError):
            return self.require_same_run(folder)
        return False

    @contextlib.contextmanager
    def keeping(self, staging: Staging, progress: Progress, how: str) -> Iterator[None]:
        """Keep finished tasks in `staging` after an error; the workers end before the folder that they write to."""
        with keeping(staging, progress, lambda: (self._finished, len(self._tasks)), how), contextlib.closing(self):
            yield

    def build(self, staging: Staging, codecs: Mapping[Key, RowCodec], origin: Origin, progress: Progress) -> Manifest:
        """Build the dataset that one process would build, byte for byte, in the result folder of `staging`.

        Continues from what `staging` has taken up. Raises what reading and writing raise.
        """
        with self._explained():
            return self._built(staging, codecs, origin, progress)

    def _built(self, staging: Staging, codecs: Mapping[Key, RowCodec], origin: Origin, progress: Progress) -> Manifest:
        folder = staging.path
        resumed = Unfinished.of(folder, self._fields) if staging.taken_up else None
        if resumed is not None:
            self._task_steps, self._finished = resumed.task_steps, len(resumed.tasks)
            self._spans, self._tasks = _tasks(self._lengths, self._task_steps)
        with self._journal(folder, resumed) as journal, self._target(folder, codecs, journal, resumed) as target:
            kept = target.kept(self._tasks)
            self._pool.broadcast("open", folder, self._spans)
            progress.start("converting", int(self._lengths.sum()), "steps")
            if kept:
                progress.note(f"{len(kept):,} of {len(self._tasks):,} chunks are finished already")
            found: list[Converted] = []
            for task, converted in _in_order(self._answers(kept, journal)):
                target.take(task, converted)
                found.append(converted)
                progress.advance(task.stop - task.start)
            self._pool.dismiss()
            table = EpisodeTable.joined([one.table for one in found])
            made = target.finish(table, origin, [text for one in found for text in one.text])
            progress.done()
            return made

    def _journal(self, folder: Path, resumed: Unfinished | None) -> Journal:
        path = journal_path(folder)
        if resumed is not None:
            return Journal(path)
        fs.make_folder(path.parent)
        return Journal.begin(path, self._identity, {"task_steps": self._task_steps})

    def _target(
        self, folder: Path, codecs: Mapping[Key, RowCodec], journal: Journal, resumed: Unfinished | None
    ) -> Target:
        if self._job.layout == "ted":
            return TedTarget(folder, self._fields, int(self._lengths.sum()), resumed, verify=self._job.shared)
        return PackedTarget(folder, self._fields, codecs, journal, resumed)

    def _answers(self, kept: Mapping[int, Converted], journal: Journal) -> Iterator[tuple[Task, Converted]]:
        """Yield the tasks that are kept, then the others in the order in which they come; raise the first failure."""
        self._finished = len(kept)
        for index in sorted(kept):
            yield self._tasks[index], kept[index]
        for task, answer in self._pool.run("run", [task for task in self._tasks if task.index not in kept]):
            if isinstance(answer, TaskFailed):
                raise answer
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
            raise _error(failed, " before it began") from origin_of(failed)

    def close(self) -> None:
        """End the workers and wait for them; may be called twice."""
        self._pool.close()


def _executor(job: ConversionJob, workers: int, engine: str) -> Executor:
    if engine == "ray":
        from ..engine.ray_cluster import RayExecutor

        return RayExecutor(job, workers, Limits(retries=2))
    return WorkerPool(job, workers, Limits(retries=0), _start_method())


def _start_method() -> str:
    """Workers import little: where a fork is not safe, a new interpreter is started."""
    return "fork" if default_start_method() == "fork" else "spawn"


def _task_steps(steps: int, row: int, workers: int) -> int:
    """Return the steps of a task, as far as episodes allow."""
    return max(1, min(_TASK_BYTES // max(1, row), -(-steps // (workers * _TASKS_A_WORKER))))


def _tasks(lengths: Array, size: int) -> tuple[list[tuple[int, int]], list[Task]]:
    """Cut the episodes, in order, into tasks of `size` steps at most, each with one episode at least."""
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
    if "SIGKILL" in cause.text:  # by which the system ends processes that use too much memory
        hint = f"if memory ran out, try fewer processes; {hint}"
    return RbtoolError(f"{cause.text}{when}", hint=hint)


def _in_order(answers: Iterator[tuple[Task, Converted]]) -> Iterator[tuple[Task, Converted]]:
    """Yield finished tasks in the order of their rows."""
    waiting: dict[int, tuple[Task, Converted]] = {}
    following = 0
    for task, converted in answers:
        waiting[task.index] = task, converted
        while following in waiting:
            yield waiting.pop(following)
            following += 1
