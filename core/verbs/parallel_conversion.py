"""Conversion of a source by several processes: each reads ranges of episodes.

The workers are processes of this machine, or of a Ray cluster with a shared folder.

What is finished stays in the workspace of the conversion when it is interrupted, and another run continues from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..engine.pool import WorkerPool, default_start_method
from ..engine.tasks import Executor, Limits, Task, TaskFailed, WorkerFailed, origin_of
from ..engine.workspace import (
    Journal,
    field_entries,
    journal_path,
    note_kept,
    note_unusable,
    part_path,
    placed_folder,
    require_same_run,
    result_folder,
    rows_digest,
    write_part,
)
from ..errors import FormatError, RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array, Closing, SourceFacts
from ..format.digest import Hasher, bytes_of, digest_bytes
from ..format.episodes import EpisodeTable
from ..format.manifest import Layout, Manifest
from ..format.memmap.builder import Origin, RowFiles, created_by
from ..format.memmap.tree import FieldRange, merge_ranges, range_of
from ..format.packed.row_files import RowCodec
from ..format.reader import Reader, ReaderRecipe
from ..format.returns import Ingest
from ..format.staging import Staging
from ..progress import Progress
from ..ted.schema import Field, Key, row_bytes, ted_fields
from .conversion_workspace import Converted, PackedTarget, Target, TedTarget, Unfinished, entry_of

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


_NOT_RESUMABLE = (SchemaError, FormatError, UsageError)
"""Errors that another run of the same tasks would raise again."""


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

    @staticmethod
    def publish(staging: Staging) -> bool:
        """Publish what was built; see `Staging.publish`."""
        return staging.publish(result_folder(staging.path).name)

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
        """Keep finished tasks in `staging` after an error, unless it would come again; `how` to continue is its hint.

        Failures of workers become errors for users.
        """
        staging.kept = staging.taken_up
        note_unusable(staging, progress)
        try:
            with self._explained():
                yield
            staging.kept = False
        except BaseException as error:
            staging.kept = (self._finished > 0 or staging.taken_up) and not isinstance(error, _NOT_RESUMABLE)
            if staging.kept and self._finished:
                note_kept(error, self._finished, len(self._tasks), progress, how)
            raise

    def build(self, staging: Staging, codecs: Mapping[Key, RowCodec], origin: Origin, progress: Progress) -> Manifest:
        """Build the dataset that one process would build, byte for byte, in the result folder of `staging`.

        Continues from what `staging` has taken up. Raises what reading and writing raise; TaskFailed, inside `keeping`,
        for a worker that ends.
        """
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
        from ..engine.cluster import RayExecutor

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
