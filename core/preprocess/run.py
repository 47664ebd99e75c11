"""Apply a processor to a dataset, task by task, and publish the new dataset completely or not at all.

A run goes through these passes:

    probe     first rows        decide whether the function can run under vmap
    measure   all rows          compute constants of operations (normalisation), on tasks of a fixed size
    schema    first tasks       find the fields of the result, from the first task that returns rows
    run       all tasks         workers write rows; each finished task becomes a line of the journal
    assemble  in task order     episode numbers, table, digests; files are copied only if row numbers changed

The journal (see `core/engine/workspace.py`) makes a run resumable. Its first line is the run's `identity`: everything
that decides the result, such as the content digest of the source, the selected steps, the processor with its measured
constants, and the boundaries of tasks. An interrupted run leaves its folder next to the destination. `resume` continues
it if the identities are equal: finished tasks whose rows still match their digests are kept, all others run again.
Because random numbers are seeded by the position in the dataset, the result is the same for any number of workers and
any interruption.

In each worker, a `TaskRunner` reads the rows of a task, applies the processor, checks its result and writes it.

A result with as many rows as the task has steps is written to the place of the task in the final files, at once. Any
other result is written to a file of its own, a part, and all rows are copied at the end:

    tasks            0..99      100..199    200..299
    rows returned      100           40         100
    written to    final files   part file   final files     then all are copied to new files: 240 rows
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np

from ..engine.tasks import (
    BackgroundCall,
    Executor,
    FunctionFailed,
    InProcessExecutor,
    Limits,
    ResultRefused,
    SerialExecutor,
    Task,
    TaskFailed,
    TaskTimeout,
    WorkerFailed,
    origin_of,
)
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
from ..errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.checks import SoundSteps
from ..format.contracts import Array, Closing, StepReader
from ..format.documents import Count, FieldEntry, decode
from ..format.episodes import EpisodeTable
from ..format.files import FileRecord, digest_bytes
from ..format.manifest import ENV_METADATA, Dropped, Manifest, Provenance, Request
from ..format.memmap.builder import Origin, PositionedTree, RowFiles, write_manifest
from ..format.memmap.tree import FieldRange, TreeWriter, leaf_sizes, merge_ranges, range_of
from ..format.returns import return_field, return_field_of, running_return
from ..format.staging import Outcome, Publication, Staging, share_files
from ..format.videos import VIDEOS_KEPT, VideoContents, is_video, reference_keys, videos_of_leaves
from ..open_steps import finished_manifest
from ..progress import Progress, Silent, counted
from ..ted.episodes import end_reason, rows_equal
from ..ted.schema import (
    ACTION,
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    as_numbers,
    key_name,
    role_of,
    state_keys,
)
from .functions import FreshModules
from .processor import Block, Context, EpisodeTexts, Pieces, Processor, is_numbering, numbers_episodes
from .selection import Plan, StepSelection, task_order


@dataclass(frozen=True, slots=True)
class Job:
    """A dataset, its selected steps, and their processor.

    Each worker opens the dataset with `reader.again()` and compares its digest with `content_digest`. `chosen` are the
    rows of the episode table that are selected, int64 ascending; None means all. The first `steps` steps of these
    episodes are used. `cut` says whether that leaves out the end of the last episode.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", __name__, f"{__package__}.units")
    reader: StepReader
    content_digest: str
    processor: Processor
    chosen: Any
    steps: int
    cut: bool
    seed: int

    def portable(self) -> Job:
        """Return an equal job that can be pickled."""
        return replace(self, processor=self.processor.portable())

    def runner(self) -> TaskRunner:
        """Make the runner of a worker."""
        return TaskRunner(self)


class TaskRunner:
    """Runs tasks of one dataset in this process, on one torch thread.

    The first task defines the result's fields; all others must fit them.
    """

    def __init__(self, job: Job) -> None:
        import torch  # only needed where tasks run, not in the parent of workers

        self._job = job
        self._fields: tuple[Field, ...] = ()
        self._states: list[Key] = []
        self._reward: Field | None = None
        self._held: tuple[int, Block | BaseException] | None = None
        self._folder = Path()
        self._files: RowFiles | None = None
        self._restores = contextlib.ExitStack()
        self._restores.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        try:
            self._restores.callback(FreshModules(job.processor.user_modules()).restore)
            self._reader = self._restores.enter_context(contextlib.closing(job.reader.again()))
            if self._reader.manifest.content_digest != job.content_digest:
                raise CorruptDataError(f"{self._reader.path} was replaced while it was read", hint="run it again")
            self._selection = StepSelection(self._reader, job.chosen, job.steps)
            self.use_processor(job.processor)
        except BaseException:
            self.close()
            raise

    def use_processor(self, processor: Processor) -> None:
        """Replace the processor."""
        self._processor = processor
        needed = processor.reads(self._reader.fields)
        self._source = {field.key: field for field in self._reader.fields if field.key in needed}
        self._loaded = processor.load(Context(self._reader.fields, self._selection.table, self._job.seed))

    def settle(self, answer: Any) -> None:
        """Replace the processor by one that uses the answer of `probe`."""
        self.use_processor(self._processor.with_probe(answer))

    def probe(self, task: Task) -> Any:
        """Return the processor's answer for the first rows."""
        return self._loaded.probe(self._read(task))

    def measure(self, task: Task) -> Any:
        """Return the processor's measurement of these rows."""
        return self._loaded.measure(self._read(task))

    def schema(self, task: Task) -> tuple[tuple[Field, ...], int]:
        """Compute a task; return the fields and the number of its rows. The next `run` of this task uses the rows."""
        block = self._compute(task)
        known = {field.key: field.role for field in (*self._reader.fields, *self._processor.fields)}
        found = (
            Field(key, column.dtype, column.values.shape[1:], known.get(key) or role_of(key))
            for key, column in block.columns.items()
        )
        self._fields = tuple(sorted(found, key=lambda field: field.key[0] == NEXT))
        self._held = task.index, block
        return self._fields, block.rows

    def begin(self, task: Task) -> None:
        """Compute a task in advance. The next `run` of this task writes its rows, or raises its error."""
        try:
            self._held = task.index, self._compute(task)
        except BaseException as error:
            self._held = task.index, error

    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Prepare to write rows of these fields into `folder`, where the result is built."""
        self._folder, self._fields = folder, tuple(fields)
        self._states = state_keys(fields)
        self._reward = result_return_field(self._selection, self._processor, fields)
        self._files = RowFiles(placed_folder(folder), fields)

    def run(self, task: Task) -> Finished:
        """Apply the processor to the steps of a task and write the rows of the result."""
        assert self._files is not None, "open comes first"
        block = self._kept_block(task) or self._compute(task)
        arrays = self._arrays(block)
        placed = block.rows == task.stop - task.start
        if placed:
            self._files.write({field.key: array for field, array in zip(self._fields, arrays, strict=True)}, task.start)
        elif block.rows:
            write_part(part_path(self._folder, task.index), arrays)
        for name, data in block.videos.items():
            write_part(parts_folder(self._folder) / f"{task.index}-{name}", [np.frombuffer(data, np.uint8)])
        return self._finished(block, arrays, placed)

    def _kept_block(self, task: Task) -> Block | None:
        """Return the block that was computed in advance, if it is of this task, and forget it.

        The next call of the function may reuse the memory of the block.
        """
        held, self._held = self._held, None
        if held is None or held[0] != task.index:
            return None
        if isinstance(held[1], BaseException):
            raise held[1]
        return held[1]

    def _read(self, task: Task) -> Block:
        return self._selection.block(self._source, task.start, task.stop, fresh=self._processor.edits_rows)

    def _compute(self, task: Task) -> Block:
        found = self._loaded.apply(self._read(task))
        if not found.columns and found.rows:
            raise ResultRefused("it returned no tensors")
        return found

    def _arrays(self, block: Block) -> list[Array]:
        """Return the leaves in the order of the fields, checked; without rows, empty arrays."""
        if not block.rows:
            return [np.empty((0, *field.shape), field.numpy) for field in self._fields]
        self._check(block)
        return [block.columns[field.key].values for field in self._fields]

    def _check(self, block: Block) -> None:
        expected = {field.key: field for field in self._fields}
        found = block.columns.keys()
        for text, keys in (("lacks", expected.keys() - found), ("has besides", found - expected.keys())):
            if keys:
                names = ", ".join(sorted(map(key_name, keys)))
                raise ResultRefused(f"the result {text} {names}; every chunk must have the keys of the first")
        for key, (dtype, values) in block.columns.items():
            field = expected[key]
            if (dtype, values.shape[1:]) != (field.dtype, field.shape):
                raise ResultRefused(
                    f"{field.name!r} came out as {dtype} {list(values.shape[1:])}, "
                    f"the first chunk had {field.dtype} {list(field.shape)}"
                )

    def _finished(self, block: Block, arrays: Sequence[Array], placed: bool) -> Finished:
        ranges = {field.key: range_of(array, field) for field, array in zip(self._fields, arrays, strict=True)}
        pieces = block.pieces
        terminated, truncated = (self._flags(block, key) for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
        return Finished(
            block.rows, placed, rows_digest(arrays), ranges, pieces, self._ids(block), self._returns(block),
            terminated, truncated, self._broken(block),
        )  # fmt: skip

    def _ids(self, block: Block) -> Array:
        """Return the episode number in the first row of each run; the source's number if the result has no numbers."""
        ids = self._selection.table.episode[block.pieces.episode]
        if block.rows and numbers_episodes(block.columns):
            some = block.pieces.rows > 0
            ids[some] = block.columns[EPISODE].values.reshape(block.rows)[block.pieces.starts[some]]
        return ids

    def _flags(self, block: Block, key: Key) -> Array:
        """Return the flag of the last row of each run; the flag of the source if the result has no such field."""
        pieces, table = block.pieces, self._selection.table
        if any(field.key == key for field in self._fields):
            flags = np.zeros(len(pieces), bool)
            if not block.rows:
                return flags
            column = block.columns[key]
            some = pieces.rows > 0
            ends = (pieces.starts + pieces.rows - 1)[some]
            last = as_numbers(column.values[ends], column.dtype)
            flags[some] = last.any(tuple(range(1, last.ndim)))
            return flags
        source = table.terminated if key == NEXT_TERMINATED else table.truncated
        flags = source[pieces.episode]
        inner = pieces.episode[:-1] == pieces.episode[1:]  # only the last run of an episode has its end
        flags[:-1][inner] = key == NEXT_TRUNCATED
        return flags

    def _returns(self, block: Block) -> Array:
        """Return the sum of the rewards of each run, added in the order of rows; NaN if the result has no rewards."""
        pieces = block.pieces
        reward = self._reward
        if reward is None:
            return np.full(len(pieces), np.nan)
        if not block.rows:
            return np.zeros(len(pieces))
        rewards = as_numbers(block.columns[reward.key].values, reward.dtype).reshape(-1)
        returns = np.zeros(len(pieces))
        single = pieces.rows == 1
        returns[single] += rewards[pieces.starts[single]]
        for place in np.flatnonzero(pieces.rows > 1).tolist():
            start = int(pieces.starts[place])
            returns[place] = running_return(0.0, rewards[start : start + int(pieces.rows[place])])
        return returns

    def _broken(self, block: Block) -> Array:
        """Return for each run whether some next observation differs from the observation of the row after it.

        `breaks[r]` counts the rows before row r that do not continue in the row after them. A run is broken if the
        count grows between its first and its last row.
        """
        pieces = block.pieces
        if not self._states or not block.rows:
            return np.zeros(len(pieces), bool)
        follows = np.ones(block.rows - 1, bool)
        for key in self._states:
            follows &= rows_equal(block.columns[NEXT, *key].values[:-1], block.columns[key].values[1:])
        breaks = np.concatenate(([0], np.cumsum(~follows)))
        first = np.minimum(pieces.starts, block.rows - 1)
        last = np.maximum(pieces.starts + pieces.rows - 1, first)
        broken: Array = breaks[np.minimum(last, block.rows - 1)] > breaks[first]
        return broken

    def close(self) -> None:
        """Close all files; restore torch's thread count, the import path and the modules. May be called twice."""
        self._restores.close()
        if self._files is not None:
            self._files.close()


class Finished(NamedTuple):
    """A task whose rows are written.

    Attributes:
        placed: whether the rows are at the place of the task in the result's files. This needs as many rows as the task
            has steps; otherwise the rows are in a separate file.
        digest: digest of the bytes of all leaves, in order.
        pieces: the runs of rows, each of one episode.
        ids, returns: for each run, the episode number and the sum of rewards.
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


ReadRows: TypeAlias = Callable[[Key, int, int], Array]
"""Reads rows `[start, stop)` of a leaf of a task's result."""


class Changes(NamedTuple):
    """Changes of rows that follow from the preceding tasks.

    `numbers`: ranges of rows whose episode gets another number, as (start, count, number). `unmarked`: the last row
    before this task now ends an episode and needs `truncated`.
    """

    numbers: list[tuple[int, int, int]]
    unmarked: bool


@dataclass(slots=True)
class _OpenEpisode:
    """The episode that continues in the next task, with the totals of its rows so far.

    `following` has the next observations of its last row; if the episode is continuous, the next row starts with them.
    """

    source: int
    id: int
    rows: int
    total: float
    broken: bool
    terminated: bool
    truncated: bool
    following: dict[Key, Array]


def result_return_field(selection: StepSelection, processor: Processor, fields: Iterable[Field]) -> Field | None:
    """Return the leaf of a result whose sum over an episode is its return (see `return_field`), or None."""
    before = (step.arguments for step in selection.reader.manifest.provenance)
    return return_field(fields, (*before, processor.arguments()))


class ResultEpisodes:
    """The episode table of the result, built from the finished tasks in order.

    An episode may extend over several tasks. Each task has runs of rows; the first run of a task continues the episode
    that the last run of the task before left open:

        task 0  [AAAA][BB        task 1  BBBB][CC        B: one row of the table, written when task 1 is taken

    `reward` is the leaf whose sum over an episode is its return; None if there is none. `renumbered` counts the
    episodes whose number was in use already, `emptied` the episodes without rows.
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

    def take(self, finished: Finished, read: ReadRows) -> Changes:
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
            self._continue(was, int(pieces.rows[0]), columns, read)
            unmarked = bool(pieces.ends[0]) and not here[0] and self._end_is_missing(was)
            columns["truncated"][0] |= unmarked
        self._number(columns["episode"], fresh)
        self.emptied += int(((columns["length"] == 0) & pieces.ends).sum())
        if self._reward is None:
            self._take_returns_of_source(columns)
        closed = (columns["length"] > 0) & pieces.ends
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column[closed])
        self._open = None if pieces.ends[-1] else self._left_open(finished, columns, read)
        changed = np.flatnonzero(here & (columns["episode"] != finished.ids)).tolist()
        numbers = columns["episode"]
        renumbered = [(int(pieces.starts[row]), int(pieces.rows[row]), int(numbers[row])) for row in changed]
        return Changes(renumbered, unmarked)

    def _end_is_missing(self, was: _OpenEpisode) -> bool:
        """Whether the source's episode has an end flag, but none of its rows in the result does."""
        table = self._selection.table
        marked = bool(table.terminated[was.source] or table.truncated[was.source])
        return marked and not (was.terminated or was.truncated)

    def _continue(self, was: _OpenEpisode, count: int, columns: dict[str, Array], read: ReadRows) -> None:
        """Add the episode's earlier rows to the first run, which continues it."""
        columns["episode"][0] = was.id
        columns["length"][0] += was.rows
        if not count:
            columns["total"][0], columns["broken"][0] = was.total, was.broken
            columns["terminated"][0], columns["truncated"][0] = was.terminated, was.truncated
            return
        follows = (rows_equal(row, read(key, 0, 1)).all() for key, row in was.following.items())
        columns["broken"][0] |= was.broken or not all(follows)
        columns["total"][0] = was.total
        if self._reward is not None:
            rewards = as_numbers(read(self._reward.key, 0, count), self._reward.dtype)
            columns["total"][0] = running_return(was.total, rewards)

    def _take_returns_of_source(self, columns: dict[str, Array]) -> None:
        """Keep the return of the source for episodes that have all their steps, where the result has no rewards."""
        source, table = columns["source"], self._selection.table
        whole = columns["length"] == table.length[source]
        columns["total"][whole] = self._selection.returns[source[whole]]

    def _number(self, ids: Array, fresh: Array) -> None:
        """Replace episode numbers that are in use already by numbers above all of the source."""
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

    def _left_open(self, finished: Finished, columns: dict[str, Array], read: ReadRows) -> _OpenEpisode:
        following: dict[Key, Array] = {}
        if finished.pieces.rows[-1]:
            last = finished.rows
            following = {key: read((NEXT, *key), last - 1, last) for key in self._states}
        elif self._open is not None:
            following = self._open.following
        values = {name: column[-1].item() for name, column in columns.items()}
        return _OpenEpisode(
            values["source"], values["episode"], values["length"], values["total"], values["broken"],
            values["terminated"], values["truncated"], following,
        )  # fmt: skip

    def _column(self, name: str) -> Array:
        return np.concatenate(self._columns[name]) if self._columns else np.zeros(0, np.int64)

    @property
    def sources(self) -> Array:
        """The row of the selection's table that each episode comes from."""
        return self._column("source").astype(np.int64)

    def table(self) -> EpisodeTable:
        """Return the episode table of all tasks. End reasons of the source are kept where the flags are unchanged."""
        source, table = self.sources, self._selection.table
        length = self._column("length")
        terminated, truncated = self._column("terminated"), self._column("truncated")
        reasons = table.end_reason[source].copy()
        changed = (terminated != table.terminated[source]) | (truncated != table.truncated[source])
        changed[:-1] |= source[:-1] == source[1:]  # only the last part of a split episode has its end
        for row in np.flatnonzero(changed).tolist():
            reasons[row] = end_reason(bool(terminated[row]), bool(truncated[row]))
        cut = changed if self._keeps_ends else changed | (length != table.length[source])
        first = np.ones(len(source), bool)
        first[1:] = source[1:] != source[:-1]  # only the first part of a split episode starts with the seeded reset
        columns: dict[str, Any] = {
            "episode": self._column("episode"), "start": np.cumsum(length) - length, "length": length,
            "return": self._column("total"), "terminated": terminated, "truncated": truncated, "end_reason": reasons,
            "explicit_next": self._column("broken"), "explicit_start": np.full(len(source), -1),
            "seed": table.seed[source], "has_seed": table.has_seed[source] & first,
            "final": np.where(cut, 0, table.final[source]),
        }  # fmt: skip
        whole = length == table.length[source]  # a score describes the whole episode
        columns |= {name: np.where(whole, score[source], np.nan) for name, score in table.scores.items()}
        return EpisodeTable.from_columns(columns)

    def text(self) -> EpisodeTexts:
        """Return the texts of the episodes; `[]` if the source has none."""
        texts = self._selection.texts
        return [texts[source] for source in self.sources.tolist()] if texts else []


_OF_PIECES = ("episode", "rows", "begins", "ends")

_ARRAYS = {
    "episode": np.int64, "rows": np.int64, "begins": np.bool_, "ends": np.bool_, "ids": np.int64,
    "returns": np.float64, "terminated": np.bool_, "truncated": np.bool_, "broken": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _About:
    """The entry of the journal that applies to all tasks: the fields of the result."""

    fields: tuple[FieldEntry, ...]


@dataclass(frozen=True, slots=True)
class _JournalEntry:
    """A line of the journal: a finished task. The arrays of `runs` are encoded in base64."""

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
    """The contents of a journal: the identity of the run, the fields of its result and the finished tasks."""

    run: Mapping[str, Any]
    fields: tuple[Field, ...]
    finished: Mapping[int, Finished]

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read the journal in the folder of a run; None if there is no journal."""
        fields: list[Field] = []
        tasks: dict[int, Finished] = {}

        def take_about(about: Any) -> None:
            fields.extend(decode(_About, about, str(folder)).fields)

        def take_entry(document: Any) -> None:
            entry = decode(_JournalEntry, document, str(folder))
            tasks[entry.task] = _finished_of(entry, fields)

        run = read_journal(journal_path(folder), take_about, take_entry)
        return None if run is None else cls(run, tuple(fields), tasks)

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


def _finished_of(entry: _JournalEntry, fields: Sequence[Field]) -> Finished:
    arrays: dict[str, Any] = {name: array_of(entry.runs.get(name, ""), dtype) for name, dtype in _ARRAYS.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("the arrays of a task differ in length")
    ranges = {field.key: found for field, found in zip(fields, entry.ranges, strict=True)}
    pieces = Pieces.of(*(arrays.pop(name) for name in _OF_PIECES))
    return Finished(rows=entry.rows, placed=entry.placed, digest=entry.digest, ranges=ranges, pieces=pieces, **arrays)


class Assembled(NamedTuple):
    """The files of a result, and the other contents of its manifest."""

    data: Sequence[FileRecord]
    ranges: Mapping[Key, FieldRange]
    table: EpisodeTable
    text: EpisodeTexts
    renumbered: int
    emptied: int


class Assembly(Closing):
    """Takes finished tasks in any order and processes them in the order of the dataset.

    As long as every task returns as many rows as it has steps, the result's files are digested while tasks finish, up
    to the first task that is missing. After a task with another number of rows, all rows are copied to new files at the
    end.
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
        self._numbers = next((field for field in fields if is_numbering(field)), None)
        self._selection = selection
        self._waiting: dict[int, tuple[Task, Finished]] = {}
        self._done: list[tuple[Task, Finished]] = []
        self._in_place = True  # no row had to move so far
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
        """Add a finished task, and process all tasks up to the first one that is missing."""
        self._waiting[task.index] = task, finished
        while (found := self._waiting.pop(len(self._done), None)) is not None:
            self._take_next(*found)
            self._done.append(found)

    def _take_next(self, task: Task, finished: Finished) -> None:
        if self._ranges:
            self._ranges = {key: merge_ranges(self._ranges[key], found) for key, found in finished.ranges.items()}
        else:
            self._ranges = dict(finished.ranges)
        changes = self._episodes.take(finished, self._reading(task, finished))
        if self._numbers is not None:
            for start, count, number in changes.numbers:
                self._renumber(self._numbers, task, finished, start, count, number)
        if changes.unmarked:
            self._mark_last_row()
        self._in_place = self._in_place and finished.placed
        if self._in_place:
            self._tree.settle_rows(task.stop)

    def _reading(self, task: Task, finished: Finished) -> ReadRows:
        if finished.placed:
            return lambda key, start, stop: self._tree.read(key, task.start + start, task.start + stop)
        return PartFile(part_path(self._folder, task.index), self._fields, finished.rows).read

    def _renumber(self, field: Field, task: Task, finished: Finished, start: int, count: int, number: int) -> None:
        if number > np.iinfo(field.numpy).max:
            raise SchemaError(
                f"episode {number:,} needs a number of its own, and {field.dtype} has no room for it in {field.name!r}",
                hint="return episode numbers as int64",
            )
        rows = np.full((count, *field.shape), number, field.numpy)
        self._write(task, finished, field.key, start, rows)
        self._ranges[field.key] = merge_ranges(self._ranges[field.key], range_of(rows, field))

    def _mark_last_row(self) -> None:
        """Set `truncated` in the last row so far: the rest of its episode has no rows."""
        task, finished = next(found for found in reversed(self._done) if found[1].rows)
        for flag in self._fields:
            if flag.key in (NEXT_TRUNCATED, NEXT_DONE):
                self._write(task, finished, flag.key, finished.rows - 1, np.ones((1, *flag.shape), flag.numpy))
        self._in_place = False  # the file may be digested already

    def _write(self, task: Task, finished: Finished, key: Key, start: int, array: Array) -> None:
        """Overwrite rows of a task, if the result has the leaf."""
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
                read = self._reading(task, finished)
                if finished.rows:
                    writer.append({field.key: read(field.key, 0, finished.rows) for field in self._fields})
            return writer.finish((self.rows,))
        finally:
            writer.close()

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._tree.close()


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is executed; nothing here changes the result.

    `engine` is `local` or `ray`. `resume` keeps the chunks finished by an earlier run of the same work; `keep_going`
    finishes all other tasks if one fails.
    """

    limits: Limits = field(default_factory=Limits)
    start_method: str | None = None
    engine: str = "local"
    resume: bool = False
    keep_going: bool = False

    @property
    def needs_workers(self) -> str:
        """Name the setting that requires worker processes; empty if none does."""
        if self.engine == "ray":
            return "engine ray"
        return "" if self.limits.timeout is None else "a timeout"


@dataclass(frozen=True)
class Preprocessing:
    """The selected steps of a dataset, a processor and a plan.

    Any worker may run any task, because random numbers are seeded by the position in the dataset. `source_files` is the
    state of the source's files at the start: a run fails if they change before it has read everything.
    """

    selection: StepSelection
    processor: Processor
    plan: Plan
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    source_files: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_files", self.selection.reader.files_state())

    def preview(self) -> tuple[Field, ...]:
        """Run the first task in this process and return the fields of the result; nothing is written."""
        with self.reporter.reported(), InProcessExecutor(self._job(), Limits(retries=0)) as executor:
            self.prepared(executor, Silent())
            return self.fields(executor)

    def publish(
        self, publication: Publication[Manifest], asked: str, step: Provenance, progress: Progress
    ) -> Outcome[Manifest]:
        """Run all tasks and publish the result.

        `asked` is the source as the user named it, `step` the provenance of this run. After an error nothing is
        published; finished tasks are kept next to the destination for a run that resumes.
        """
        with self.reporter.reported(), self._executor() as executor:
            run = _Run(self, executor, progress)
            made: list[Manifest] = []

            def find() -> Manifest | None:
                # After the build, any finished dataset counts: it is compared by its digest, as functions cannot be.
                return finished_manifest(publication.staging.destination) if made else publication.find()

            def build(staging: Staging) -> Outcome[Manifest]:
                with self.reporter.reported():
                    assembled, fields, processor = run.rows(staging)
                folder = result_folder(staging.path)
                manifest = self._complete(folder, assembled, fields, processor, asked, step)
                shared = share_files(folder, manifest, [self.selection.reader], links=True)
                made.append(manifest)
                return Outcome(manifest, {"shared_bytes": shared})

            @contextlib.contextmanager
            def kept(staging: Staging) -> Iterator[None]:
                with keeping(staging, progress, run.count), contextlib.closing(executor):
                    yield

            return replace(publication, find=find).publish(build, kept)

    @property
    def reporter(self) -> ErrorReporter:
        return ErrorReporter(self.selection, self.processor.label)

    def _job(self) -> Job:
        selection = self.selection
        chosen = None if len(selection.rows) == len(selection.reader.episodes) else selection.rows
        digest = selection.reader.manifest.content_digest
        return Job(selection.reader, digest, self.processor, chosen, selection.steps, selection.cut, self.seed)

    def _executor(self) -> Executor:
        settings, job = self.settings, self._job()
        if settings.engine == "ray":
            from ..engine.ray_cluster import RayExecutor

            return RayExecutor(job, self.plan.workers, settings.limits)
        if not self.plan.workers:
            return InProcessExecutor(job, settings.limits)
        from ..engine.pool import WorkerPool

        if self.processor.needs_measuring:
            self.processor.portable()  # fail now, not after the measurements, when it is sent to forked workers
        return WorkerPool(job, self.plan.workers, settings.limits, settings.start_method)

    def prepared(self, executor: Executor, progress: Progress) -> Processor:
        """Run the probe and the measurements that the processor needs; return the processor with their results."""
        processor = self.processor
        if processor.needs_probing:
            answer = _call(executor, "probe", self.plan.tasks()[0])
            processor = processor.with_probe(answer)
            executor.broadcast("settle", answer)
        if processor.needs_measuring:
            processor = processor.with_measurements(self._measured(executor, progress))
            executor.broadcast("use_processor", processor)
        return processor

    def fields(self, executor: Executor) -> tuple[Field, ...]:
        """The fields of the first task that returns any rows."""
        fields: tuple[Field, ...] = ()
        tasks = self.plan.tasks()
        executor.begin(task_order(tasks)[1:])
        for task in tasks:
            fields, rows = _call(executor, "schema", task)
            if rows:
                break
        return fields

    def _measured(self, executor: Executor, progress: Progress) -> list[Any]:
        # These tasks do not depend on the requested chunk size, which would change the last bits of sums.
        tasks = Plan.of(self.selection, None, 0, whole_episodes=True).tasks()
        found: dict[int, Any] = {}
        progress.start("measuring", self.selection.steps, "steps")
        for task, answer in executor.run("measure", tasks):
            if isinstance(answer, TaskFailed):
                raise answer
            found[task.index] = answer
            progress.advance(task.stop - task.start)
        progress.done()
        return [found[index] for index in sorted(found)]

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the result, as JSON; equal identities mean equal tasks."""
        reader = self.selection.reader
        sound = {"sound episodes": digest_bytes(reader.rows.tobytes())} if isinstance(reader, SoundSteps) else {}
        return {
            "source": reader.manifest.content_digest,
            "files of the source": self.source_files,
            "work": self.processor.arguments(),
            "inputs": self.processor.inputs(),
            "fingerprint": self.processor.fingerprint(),
            "episodes": digest_bytes(self.selection.rows.tobytes()),
            "steps": self.selection.steps,
            "chunk_size": self.plan.chunk_size,
            "seed": self.seed,
            **sound,
        }

    def keys_read(self, processor: Processor) -> frozenset[Key]:
        """Return the leaves of the source that a run may read: those in blocks, and ends and rewards for the table."""
        reader = self.selection.reader
        reward = return_field_of(reader.manifest)
        table = [NEXT_TERMINATED] if reward is None else [NEXT_TERMINATED, reward.key]
        return processor.reads(reader.fields).union(self.processor.reads(reader.fields), table)

    def same_run(self, folder: Path) -> bool:
        """Whether a folder holds an unfinished run of the same tasks; UsageError if it belongs to another run."""
        found = UnfinishedRun.of(folder)
        if found is not None:
            require_same_run(found.run, self.identity(), folder)
        return found is not None

    def _complete(
        self,
        folder: Path,
        found: Assembled,
        fields: Sequence[Field],
        processor: Processor,
        asked: str,
        step: Provenance,
    ) -> Manifest:
        if not found.table.steps:
            raise UsageError(f"{processor.label} leaves no rows: there is nothing to write")
        reader = self.selection.reader
        step = replace(step, arguments={**step.arguments, **processor.arguments()})
        dropped = [Dropped(name, why) for name, why in processor.left_out(reader.fields, fields).items()]
        notes = [*processor.notes(reader.fields, fields), *_notes(processor.label, found)]
        made = {one.name.partition("-")[2]: one for one in parts_folder(folder.parent).iterdir() if is_video(one.name)}
        videos = videos_of_leaves(folder, fields, {**reader.videos(), **made})
        origin = result_origin(reader, fields, asked, step, notes, dropped, processor, videos)
        return write_manifest(folder, fields, found.data, found.ranges, found.table, origin, found.text)

    def refuse_changed_source(self) -> None:
        """Raise CorruptDataError if files of the source have changed, even if they were verified before the change."""
        reader = self.selection.reader
        if reader.files_state() != self.source_files:
            raise CorruptDataError(f"{reader.path} was changed while it was read", hint="run it again")


class _Run:
    """One run of the tasks, from the start or continued."""

    def __init__(self, preprocessing: Preprocessing, executor: Executor, progress: Progress) -> None:
        self._preprocessing = preprocessing
        self._executor = executor
        self._folder = Path()
        self._progress = progress
        self._tasks = preprocessing.plan.tasks()
        self._unfinished: UnfinishedRun | None = None
        self._finished = 0

    def count(self) -> tuple[int, int]:
        """Return how many tasks are finished, including the continued run's, and their total number."""
        return self._finished, len(self._tasks)

    def rows(self, staging: Staging) -> tuple[Assembled, tuple[Field, ...], Processor]:
        """Run the tasks that are not finished yet, in the folder of `staging`, and assemble the result."""
        self._folder = staging.path
        preprocessing, executor = self._preprocessing, self._executor
        selection = preprocessing.selection
        found = self._unfinished = UnfinishedRun.of(staging.path) if staging.taken_up else None
        if found is not None:
            revert_publication(staging.path, leaf_sizes(found.fields, selection.steps))
            self._finished = len(found.finished)
        processor = preprocessing.prepared(executor, self._progress)
        verified = BackgroundCall(partial(selection.reader.verify_leaves, preprocessing.keys_read(processor)))
        fields = preprocessing.fields(executor) if found is None else found.fields
        kept = {} if found is None else found.sound(self._folder, self._tasks, selection.steps)
        with (
            Assembly(
                self._folder, fields, selection, processor, len(self._tasks), resumed=found is not None
            ) as assembly,
            SerialExecutor() as line,
        ):
            executor.broadcast("open", self._folder, fields)
            with self._journal(fields) as journal:
                self._progress.start("preprocessing", selection.steps, "steps")
                self._add_kept(assembly, kept)
                left = [task for task in task_order(self._tasks) if task.index not in kept]
                for task, finished in self._run(journal, left):
                    line.do(assembly.take, task, finished)
                    if verified.failed:
                        self._require_sound(verified)
                executor.dismiss()
                line.finish()
                self._progress.done()
            self._require_sound(verified)
            return assembly.finish(), fields, processor

    def _require_sound(self, verified: BackgroundCall[None]) -> None:
        """Raise CorruptDataError if the source is damaged or has changed, so that no result of it is published."""
        self._preprocessing.refuse_changed_source()
        verified.result()

    def _journal(self, fields: Sequence[Field]) -> Journal:
        journal = Journal(journal_path(self._folder))
        if self._unfinished is None:
            journal.begin(self._preprocessing.identity(), {"fields": field_entries(fields)})
        return journal

    def _add_kept(self, assembly: Assembly, kept: Mapping[int, Finished]) -> None:
        if kept:
            self._progress.note(f"{len(kept):,} of {len(self._tasks):,} chunks are finished already")
        self._finished = len(kept)
        for index, finished in kept.items():
            task = self._tasks[index]
            assembly.take(task, finished)
            self._progress.advance(task.stop - task.start)

    def _run(self, journal: Journal, tasks: list[Task]) -> Iterator[tuple[Task, Finished]]:
        """Run tasks and yield those that finish.

        The first failure is raised at once. With `keep_going`, failures are raised after all other tasks.
        """
        reporter, failed = self._preprocessing.reporter, list[TaskFailed]()
        for task, answer in self._executor.run("run", tasks):
            if isinstance(answer, TaskFailed):
                failed.append(answer)
                if not self._preprocessing.settings.keep_going or not TaskFailed.others_may_pass(answer.cause):
                    break
                self._progress.note(reporter.sentence(answer))
                continue
            journal.append(journal_entry(task.index, answer))
            self._finished += 1
            yield task, answer
            self._progress.advance(task.stop - task.start)
        if failed:
            raise reporter.error(failed, len(self._tasks)) if len(failed) > 1 else failed[0]


def _call(executor: Executor, method: str, task: Task) -> Any:
    """Call a method of the TaskRunner of one worker with a task; raise TaskFailed if the processor fails."""
    try:
        return executor.call(method, task)
    except (FunctionFailed, ResultRefused) as error:
        raise TaskFailed(task, error) from error


def _notes(label: str, found: Assembled) -> Iterator[str]:
    table = found.table
    bare = int((~table.terminated & ~table.truncated).sum())
    if bare:
        end = "ends" if bare == 1 else "end"
        yield f"after {label} {counted(bare, 'episode')} {end} with neither terminated nor truncated"
    if found.emptied:
        yield f"{label} leaves nothing of {counted(found.emptied, 'episode')}"
    if found.renumbered:
        own = "has a number of its own" if found.renumbered == 1 else "have numbers of their own"
        yield f"{counted(found.renumbered, 'episode')} {own}: another one had it already"


_SPACES = {"observation": "observation", "action": ACTION[0]}


def result_origin(
    reader: StepReader,
    fields: Sequence[Field],
    asked: str,
    step: Provenance,
    notes: Sequence[str],
    dropped_keys: Sequence[Dropped],
    processor: Processor,
    videos: VideoContents,
) -> Origin:
    """Return the origin of a result: the source's metadata that still apply to the new fields, and this run's own.

    A space is kept if its leaves keep their keys, element types, shapes and scale. `env_metadata.json`, which describes
    both spaces, is kept only if both are.
    """
    manifest = reader.manifest
    spaces, documents, dropped = dict(manifest.spaces), dict(processor.documents(reader.documents())), []
    for name, root in _SPACES.items():
        changed = _leaves_under(reader.fields, root) != _leaves_under(fields, root)
        if name in spaces and (changed or any(key[0] == root for key in processor.rescaled)):
            del spaces[name]
            dropped.append(name)
    if dropped:
        documents.pop(ENV_METADATA, None)
    videos_left = any(reference_keys(fields))
    kept = [note for note in manifest.notes if videos_left or not note.startswith(VIDEOS_KEPT)]
    notes = [*kept, *notes, *(f"the {name} space no longer fits the data: left out" for name in dropped)]
    request = Request(source="preprocess", asked=asked, id=manifest.request.id)
    return Origin(
        request=request,
        provenance=(*manifest.provenance, step),
        resolved_revision=manifest.resolved_revision,
        spaces=spaces,
        renamed_keys=manifest.renamed_keys,
        dropped_keys=(*manifest.dropped_keys, *dropped_keys),
        notes=tuple(notes),
        documents=documents,
        videos=videos,
    )


def _leaves_under(fields: Sequence[Field], root: str) -> dict[Any, Any]:
    return {field.key: (field.dtype, field.shape) for field in fields if field.key[0] == root}


_TRACEBACK = "--debug shows the traceback"
_LISTED = 5


class ErrorReporter:
    """Turns failures into errors that name steps and episodes by their numbers in the dataset."""

    def __init__(self, selection: StepSelection, label: str) -> None:
        self._selection = selection
        self._label = label

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Convert failures raised inside into errors for users."""
        try:
            yield
        except TaskFailed as failed:
            raise self.error([failed], 1) from origin_of(failed.cause)
        except WorkerFailed as error:
            text = f"a worker process failed: {error.text}" if error.trace else f"{error.text} before it began"
            raise RbtoolError(text) from origin_of(error)
        except FunctionFailed as error:
            raise self._one(error, None) from origin_of(error)
        except ResultRefused as error:
            raise self._one(error, None) from error

    def error(self, failed: Sequence[TaskFailed], tasks: int) -> RbtoolError:
        """Return the error of a run in which some tasks failed."""
        if len(failed) == 1:
            found = self._one(failed[0].cause, failed[0].task)
            if isinstance(found, RbtoolError):
                return found
            raise found  # a bug of rbtool: the user sees its traceback
        listed = "; ".join(self.sentence(one) for one in failed[:_LISTED])
        more = f"; and {len(failed) - _LISTED:,} more" if len(failed) > _LISTED else ""
        return RbtoolError(f"{len(failed):,} of {tasks:,} chunks failed: {listed}{more}", hint=_TRACEBACK)

    def sentence(self, failed: TaskFailed) -> str:
        """Describe the failure of one task in one line."""
        return str(self._one(failed.cause, failed.task))

    def _one(self, cause: BaseException, task: Task | None) -> BaseException:
        label = self._label
        place = self._place(cause, task)
        if isinstance(cause, WorkerFailed):
            if cause.trace:
                return RbtoolError(f"a worker process failed{_on(place)}: {cause.text}", hint=_TRACEBACK)
            hint = "--num-workers 0 runs it in this process"
            if "SIGKILL" in cause.text:  # the signal by which the system ends processes that use too much memory
                hint = f"if memory ran out, try a smaller --chunk-size; {hint}"
            if isinstance(cause, TaskTimeout):
                hint = "a longer --timeout or a smaller --chunk-size gives it more time"
            where = f" while {label} worked on {place}" if place else f" in {label}"
            return RbtoolError(f"{cause.text}{where}", hint=hint)
        if isinstance(cause, FunctionFailed):
            fields = f". Fields here: {', '.join(self._fields(cause))}" if cause.text.startswith("KeyError") else ""
            return RbtoolError(f"{label} failed{_on(place)}: {cause.text}{fields}", hint=_TRACEBACK)
        if isinstance(cause, ResultRefused):
            return SchemaError(f"{label}{_on(place)}: {cause}")
        return cause

    def _fields(self, cause: FunctionFailed) -> Iterable[str]:
        """Return the keys that were available when the function did not find one.

        The function may have looked into a group of the dataset, such as `next`: the group that shares the most keys
        with the available ones. Its keys are returned in full.
        """
        keys = [field.key for field in self._selection.reader.fields]
        if not cause.there:
            return dict.fromkeys(key[0] for key in keys)
        groups: dict[Key, set[str]] = {}
        for key in keys:
            for depth, part in enumerate(key):
                groups.setdefault(key[:depth], set()).add(part)
        there = set(cause.there)  # may differ from a group of the dataset: the function may edit its argument
        group = max(sorted(groups, key=len), key=lambda key: len(groups[key] & there) / len(groups[key] | there))
        return [key_name((*group, name)) for name in cause.there]

    def _place(self, cause: BaseException, task: Task | None) -> str:
        """Name steps and episodes by their numbers in the dataset."""
        narrow = getattr(cause, "steps", None)
        if narrow is None and task is None:
            return ""
        start, stop = narrow if narrow is not None else (task.start, task.stop)  # type: ignore[union-attr]
        selection = self._selection
        rows = np.searchsorted(selection.table.start, [start, stop - 1], "right") - 1
        source = selection.reader.episodes
        here = selection.rows[rows]
        shift = source.start[here] - selection.table.start[rows]
        low, high = int(start + shift[0]), int(stop - 1 + shift[1])
        first, last = source.episode[here].tolist()
        steps = f"steps {low:,} to {high:,}" if stop - start > 1 else f"step {low:,}"
        return f"{steps} (episodes {first} to {last})" if first != last else f"{steps} (episode {first})"


def _on(place: str) -> str:
    return f" on {place}" if place else ""
