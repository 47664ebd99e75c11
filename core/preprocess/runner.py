"""The job of a run, and the `TaskRunner` of each worker: read, call, check, write."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..engine.tasks import ResultRefused, Task
from ..engine.workspace import part_path, placed_folder, rows_digest, write_part
from ..errors import CorruptDataError
from ..format.contracts import Array, StepReader
from ..format.memmap.builder import RowFiles
from ..format.memmap.tree import range_of
from ..format.returns import running_return
from ..ted.episodes import rows_equal
from ..ted.schema import (
    EPISODE,
    NEXT,
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
from .processor import Block, Context, Processor
from .result import Finished, result_return_field
from .selection import StepSelection


@dataclass(frozen=True, slots=True)
class Job:
    """A dataset, its selected steps, and their processor.

    Each worker opens the dataset with `reader.again()` and compares the `content_digest`. `chosen` are the rows of the
    episode table that take part, int64 ascending; None means all. Of their steps, the first `steps` are used; `cut`
    says whether the last one is not the last of its episode in the dataset.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", f"{__package__}.runner", f"{__package__}.units")
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
        import torch  # a process whose tasks run in workers needs no torch

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
        """Use the answer of `probe`."""
        self.use_processor(self._processor.with_probe(answer))

    def probe(self, task: Task) -> Any:
        """Return what the processor finds in the first rows."""
        return self._loaded.probe(self._read(task))

    def measure(self, task: Task) -> Any:
        """Return what the processor measures in these rows."""
        return self._loaded.measure(self._read(task))

    def schema(self, task: Task) -> tuple[tuple[Field, ...], int]:
        """Compute a task and return the fields and the number of its rows, which are kept for a `run` right after."""
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
        """Compute a task for a `run` right after, which writes its rows or raises its error."""
        try:
            self._held = task.index, self._compute(task)
        except BaseException as error:
            self._held = task.index, error

    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Prepare to write rows of these fields for the result that is built in `folder`."""
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
        return self._finished(block, arrays, placed)

    def _kept_block(self, task: Task) -> Block | None:
        """Return the block kept for a task, only once: the next call of the function may reuse its memory."""
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
        """The leaves in the order of the fields; without rows the columns are not checked."""
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
        """The episode number in the first row of each run; the source's number where the result has none."""
        ids = self._selection.table.episode[block.pieces.episode]
        column = block.columns.get(EPISODE)
        if block.rows and column is not None and column.values.ndim == 1 and column.dtype == "int64":
            some = block.pieces.rows > 0
            ids[some] = column.values[block.pieces.starts[some]]
        return ids

    def _flags(self, block: Block, key: Key) -> Array:
        """Return the flag of the last row of each run; the source's if the result has no such field."""
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
        inner = pieces.episode[:-1] == pieces.episode[1:]  # of the runs of an episode only the last has its end
        flags[:-1][inner] = key == NEXT_TRUNCATED
        return flags

    def _returns(self, block: Block) -> Array:
        """The sum of each run's rewards, added in order; NaN where the result has none."""
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
        """Whether in each run the next observation of some step differs from the observation of the step after it."""
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
