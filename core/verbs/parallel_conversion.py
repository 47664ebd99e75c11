"""Conversion of a source by several processes: each reads ranges of episodes.

The workers are processes of this machine, or of a Ray cluster with a shared folder.

In layout `ted` each writes its rows at their place in the files of the result. In layout `packed` the place of a row
depends on those before it: workers leave TED rows in files below the result, and this process writes them in order.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import FormatError, RbtoolError
from ..format import fs
from ..format.contracts import Array, Closing, SourceFacts
from ..format.episodes import EpisodeTable
from ..format.manifest import HIDDEN, Layout, Manifest
from ..format.packed.builder import PackedBuilder
from ..format.packed.row_files import RowCodec
from ..format.reader import Reader, ReaderRecipe
from ..format.returns import Ingest
from ..format.ted.builder import Origin, PositionedTree, RowFiles, write_manifest
from ..format.ted.tree import FieldRange, merge_ranges, range_of
from ..preprocess.failures import TaskFailed, WorkerFailed, origin_of
from ..preprocess.processor import Task
from ..preprocess.workers.executor import Executor, Limits
from ..preprocess.workers.processes import WorkerPool, default_start_method
from ..preprocess.workspace import PartFile, write_part
from ..ted.schema import Field, Key, row_bytes, ted_fields

_TASK_BYTES = 64 << 20
_TASKS_A_WORKER = 4
"""Tasks that each worker gets at least, where there are so many episodes: they do not take equally long."""
_PARTS = f"{HIDDEN}/parts"
_IN_THIS_PROCESS = "--num-workers 0 converts in this process"


class Converted(NamedTuple):
    """A task whose rows are written: its episodes, the ranges of its values, and the rows of each of its part files."""

    table: EpisodeTable
    text: list[dict[str, str]]
    ranges: dict[Key, FieldRange]
    parts: list[int]


@dataclass(frozen=True)
class ConversionJob:
    """What the workers of a conversion do; `spans` are the places in `numbers` where each task begins and ends."""

    recipe: ReaderRecipe
    facts: SourceFacts
    layout: Layout
    spans: Sequence[tuple[int, int]]

    @property
    def fields(self) -> tuple[Field, ...]:
        """The leaves of the result."""
        return ted_fields(self.facts.fields)

    def before_fork(self) -> None:
        """Nothing is imported that is not in use already."""

    def portable(self) -> ConversionJob:
        """The job itself can be pickled."""
        return self

    def user_modules(self) -> frozenset[str]:
        """No modules."""
        return frozenset()

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

    def open(self, folder: Path) -> None:
        """Prepare to write rows of the result that is built in `folder`."""
        self._folder = folder
        self._files = RowFiles(folder, self._job.fields) if self._job.layout == "ted" else None

    def run(self, task: Task) -> Converted:
        """Write the rows of a task; FormatError where they are not as many as the facts state."""
        first, stop = self._job.spans[task.index]
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
        return Converted(ingest.table, ingest.text, rows.ranges, rows.parts)


@dataclass
class _PositionedRows:
    """Writes rows at their place in the files of the result, and nowhere else."""

    files: RowFiles
    task: Task
    count: int = 0
    ranges: dict[Key, FieldRange] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows after those before them."""
        rows = len(next(iter(columns.values())))
        if self.count + rows <= self.task.stop - self.task.start:  # the others belong to another task
            self.files.write(columns, self.task.start + self.count)
        self.count += rows
        for one in self.files.fields:
            found = range_of(columns[one.key], one)
            self.ranges[one.key] = merge_ranges(self.ranges.get(one.key), found)


@dataclass
class _PartRows:
    """Writes rows to files from which this process's parent takes them."""

    folder: Path
    fields: tuple[Field, ...]
    task: Task
    count: int = 0
    ranges: dict[Key, FieldRange] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write rows to a file of their own."""
        path = part_path(self.folder, self.task.index, len(self.parts))
        write_part(path, [columns[one.key] for one in self.fields])
        self.parts.append(len(next(iter(columns.values()))))
        self.count += self.parts[-1]


def part_path(folder: Path, task: int, part: int) -> Path:
    """Return the file of some rows of a task."""
    return folder / _PARTS / f"{task}-{part}.rows"


class ConversionWorkers(Closing):
    """The worker processes of a conversion. A context manager: leaving ends them.

    To be made before the folder of the result is locked, for forks inherit locks. `reader` is closed: what HDF5 has
    open must not be there in a fork. With `engine` `ray` they are actors of a cluster, and a task whose worker is lost
    is run again. Raises RbtoolError where no process can be started, UsageError without Ray or its cluster.
    """

    def __init__(self, reader: Reader, facts: SourceFacts, layout: Layout, workers: int, engine: str = "local") -> None:
        known = facts.lengths
        self._lengths = np.asarray(reader.episode_table(facts.episode_numbers).length if known is None else known)
        self._fields = ted_fields(facts.fields)
        spans, self._tasks = _tasks(self._lengths, row_bytes(self._fields), workers)
        recipe = reader.recipe()
        reader.close()
        self._job = ConversionJob(recipe, facts, layout, spans)
        with _explained(self._job):
            self._pool = _executor(self._job, min(workers, len(spans)), engine)

    def build(
        self, folder: Path, codecs: Mapping[Key, RowCodec], origin: Origin, progress: Callable[[int], None]
    ) -> Manifest:
        """Build the dataset that one process would build, byte for byte, in a new folder.

        Raises what reading and writing raise, and RbtoolError for a worker that ends.
        """
        with self._target(folder, codecs) as target, _explained(self._job):
            self._pool.broadcast("open", folder)
            found: list[Converted] = []
            for task, converted in _in_order(self._answers()):
                target.take(task, converted)
                found.append(converted)
                progress(task.stop - task.start)
            self._pool.dismiss()
            table = EpisodeTable.joined([one.table for one in found])
            return target.finish(table, origin, [text for one in found for text in one.text])

    def _target(self, folder: Path, codecs: Mapping[Key, RowCodec]) -> _Target:
        if self._job.layout == "ted":
            return _TedTarget(PositionedTree(folder, self._fields, int(self._lengths.sum()), reserve=True))
        return _PackedTarget(PackedBuilder(folder, self._fields, codecs), folder, self._fields)

    def _answers(self) -> Iterator[tuple[Task, Converted]]:
        """Yield finished tasks in the order in which they come; raise the first failure."""
        for task, answer in self._pool.run("run", self._tasks):
            if isinstance(answer, TaskFailed):
                raise answer
            yield task, answer

    def close(self) -> None:
        """End the workers and wait for them; may be called twice."""
        self._pool.close()


def _executor(job: ConversionJob, workers: int, engine: str) -> Executor:
    if engine == "ray":
        from ..preprocess.workers.cluster import RayExecutor

        return RayExecutor(job, workers, Limits(retries=2))
    return WorkerPool(job, workers, Limits(retries=0), _start_method())


def _start_method() -> str:
    """Workers import little: where a fork is not safe, a new interpreter is started."""
    return "fork" if default_start_method() == "fork" else "spawn"


def _tasks(lengths: Array, row: int, workers: int) -> tuple[list[tuple[int, int]], list[Task]]:
    """Cut the episodes, in order, into tasks of about equal size, each with one at least."""
    stops = np.cumsum(lengths)
    total = int(stops[-1])
    size = max(1, min(_TASK_BYTES // max(1, row), -(-total // (workers * _TASKS_A_WORKER))))
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


@contextlib.contextmanager
def _explained(job: ConversionJob) -> Iterator[None]:
    """Turn failures of workers into errors for users."""
    try:
        yield
    except TaskFailed as failed:
        first, stop = job.spans[failed.task.index]
        numbers = job.facts.episode_numbers
        what = f"episodes {numbers[first]} to {numbers[stop - 1]}" if stop > first + 1 else f"episode {numbers[first]}"
        raise _error(failed.cause, f" while it converted {what}") from origin_of(failed.cause)
    except WorkerFailed as failed:
        raise _error(failed, " before it began") from origin_of(failed)


def _error(cause: BaseException, when: str) -> BaseException:
    if not isinstance(cause, WorkerFailed):
        return cause
    if cause.trace:
        return RbtoolError(f"a worker process failed{when}: {cause.text}", hint="--debug shows the traceback")
    hint = _IN_THIS_PROCESS
    if "SIGKILL" in cause.text:  # by which the system ends processes that use too much memory
        hint = f"for want of memory, try fewer processes; {hint}"
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


class _Target(Closing, ABC):
    """Takes tasks in order, and completes the dataset."""

    @abstractmethod
    def take(self, task: Task, converted: Converted) -> None:
        """Take a task whose rows a worker has written."""

    @abstractmethod
    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        """Complete the dataset."""


class _TedTarget(_Target):
    """Takes tasks whose rows are in the files of the result."""

    def __init__(self, tree: PositionedTree) -> None:
        self._tree = tree

    def take(self, task: Task, converted: Converted) -> None:
        """Digest the rows of a task."""
        self._tree.merge_ranges(converted.ranges)
        self._tree.settle(task.stop)

    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        tree = self._tree
        return write_manifest(tree.folder, tree.fields, tree.finish(), tree.ranges, table, origin, text)

    def close(self) -> None:
        self._tree.close()


class _PackedTarget(_Target):
    """Takes tasks whose rows are in part files, and writes them."""

    def __init__(self, builder: PackedBuilder, folder: Path, fields: tuple[Field, ...]) -> None:
        self._builder, self._folder, self._fields = builder, folder, fields
        fs.make_folder(folder / _PARTS)

    def take(self, task: Task, converted: Converted) -> None:
        """Write the rows of a task and remove its files."""
        last = np.zeros(task.stop - task.start, bool)
        last[np.cumsum(converted.table.length) - 1] = True
        start = 0
        for number, rows in enumerate(converted.parts):
            path = part_path(self._folder, task.index, number)
            part = PartFile(path, self._fields, rows)
            columns = {one.key: part.read(one.key, 0, rows) for one in self._fields}
            self._builder.append(columns, last[start : start + rows])
            fs.remove(path)
            start += rows

    def finish(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        fs.remove(self._folder / _PARTS)
        return self._builder.finish(table, origin, text)

    def close(self) -> None:
        self._builder.close()
