"""Read-only buffers on datasets; their method `preprocess` makes another dataset.

The preprocessing engine is only imported by the functions that need it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..buffers.tensordict import TensorDictReplayBuffer
from ..declarations import from_leaf
from ..errors import SchemaError, UsageError, require_flags, require_number
from ..format import fs
from ..format.staging import Staging
from ..open_steps import open_steps
from ..progress import Silent, clean
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..storages.tensor import TensorStorage
from ..writers.base import ImmutableDatasetWriter, Writer
from .storage import DatasetStorage


class DatasetReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` on a dataset; its default writer refuses to add anything.

    UsageError (a ValueError) unless `batch_size` is None or an int from 1 on.
    """

    def __init__(self, *, batch_size: int | None = None, **arguments: Any) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise UsageError(f"batch_size is {batch_size!r}, expected a number of elements")
        super().__init__(batch_size=batch_size, **arguments)

    def _default_writer(self) -> Writer:
        return ImmutableDatasetWriter()

    def __fspath__(self) -> str:
        """Return the folder of the dataset, so that functions like `rbtool.preprocess` accept the buffer as a path.

        SchemaError (a RuntimeError) if the rows are in memory.
        """
        path = getattr(self.storage, "path", None)
        if path is None:
            raise SchemaError(f"the rows of a {type(self.storage).__name__} are in no dataset on disk")
        folder: str = os.fspath(path)
        return folder

    @cached_property
    def specs(self) -> Any:
        """The spec of one row: a `Composite` with the bounds of the spaces that the source records.

        Transforms of the buffer are ignored. SchemaError as raised by `__fspath__`.
        """
        with open_steps(os.fspath(self)) as reader:
            return from_leaf("dataset_specs")(reader)

    def preprocess(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Any = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
        num_frames: int | None = None,
        dest: str | os.PathLike[str],
    ) -> DatasetStorage:
        """Apply `fn` to each step, write the results as a new dataset at `dest`, and return its storage.

        - `fn`: takes a tensordict of one step, batch size `[]`, and returns one, whose keys and shapes may differ. It
          runs under `torch.vmap` if the results are the same, and may be a closure.
        - `num_workers`: the number of worker processes, by default one for each core; 0 uses only this process.
        - `chunksize`, `num_chunks`: with one of them, `fn` takes a tensordict of batch size `[K]`: K is `chunksize`, or
          such that there are `num_chunks` chunks. A `chunksize` of 0 means single steps.
        - `generator`: draws the seed of random numbers, which is 0 without it. Every step, or every chunk, is seeded by
          its number, so that the result does not depend on the workers.
        - `pbar`: whether to show the progress on stderr.
        - `mp_start_method`: `fork`, `spawn` or `forkserver`.
        - `num_frames`: how many of the first steps to process.
        - `dest`: a free path, or an empty folder. The result is a complete dataset, which `load_dataset(dest)` opens.

        This dataset is not changed. It is read from the disk, so that edits which only this process sees are ignored.
        The arguments match TorchRL; three of them have no effect: `max_tasks_per_child` (workers keep nothing between
        tasks), `index_with_generator` (workers only receive row numbers) and `worker_threads` (each worker computes on
        one thread, so that results are the same everywhere).

        SchemaError (a RuntimeError) for a `dim` other than 0, for a storage without tensors, and if results of `fn`
        have other keys, types or shapes than the first one; RbtoolError if `fn` raises; UsageError (a ValueError) for a
        `pool` and for invalid arguments. In each case nothing changes at `dest`.
        """
        from ..engine.pool import START_METHODS
        from ..preprocess.preprocess import preprocess

        require_flags(index_with_generator=index_with_generator, pbar=pbar)
        if dim != 0:
            raise SchemaError(f"dim is {dim!r}, expected 0: a dataset has one dimension")
        if pool is not None:
            raise UsageError(
                "pool is set, expected None: rbtool starts its own workers, and shares their queue with no others",
                hint="leave pool out and use num_workers=N",
            )
        if chunksize is not None and num_chunks is not None:
            raise UsageError("chunksize and num_chunks are both set, expected one of them")
        if mp_start_method not in (None, *START_METHODS):
            raise UsageError(f"mp_start_method is {mp_start_method!r}; known: {', '.join(START_METHODS)}")
        for name, value, least in (
            ("chunksize", chunksize, 0), ("num_chunks", num_chunks, 1),
            ("max_tasks_per_child", max_tasks_per_child, 1), ("worker_threads", worker_threads, 1),
            ("num_frames", num_frames, 1),
        ):  # fmt: skip
            if value is not None:
                require_number(name, value, least)
        steps = min(len(self.storage), num_frames or len(self.storage))
        progress = ProgressBar() if pbar else Silent()
        with _on_disk(self.storage, Path(dest)) as path, contextlib.ExitStack() as stack:
            stack.callback(progress.done)
            seed = 0
            if generator is not None:
                seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
            preprocess(
                path,
                fn,
                dest,
                unit="step" if chunksize or num_chunks else "row",
                num_workers=num_workers,
                chunk_size=-(-steps // num_chunks) if num_chunks else chunksize or None,
                num_frames=None if num_frames is None else steps,
                seed=seed,
                start_method=mp_start_method,
                progress=progress,
            )
        return DatasetStorage(dest)


@contextlib.contextmanager
def _on_disk(storage: Storage, destination: Path) -> Iterator[Path]:
    """Yield a folder with the rows; rows in memory are written to a temporary one next to the destination."""
    if getattr(storage, "split_trajs", False):
        raise UsageError(
            "the buffer holds whole trajectories (split_trajs=True), and preprocess takes steps",
            hint="open it without split_trajs, or see rbtool.preprocess(dataset, fn, dest, unit='episode')",
        )
    if isinstance(storage, DatasetStorage | PackedStorage):
        if storage.log.now.rows or (storage.log.now.irregular and getattr(storage, "mode", "") == "c"):
            raise SchemaError(
                f"rows of {storage.path} were written over in this process, and preprocess reads the files",
                hint="mode='r+' writes to the files",
            )
        yield storage.path
    elif isinstance(storage, TensorStorage):
        from ..checkpointers.episodes import FlatStorageCheckpointer

        aside = f"{destination.name}-rows-{secrets.token_hex(4)}"
        with Staging(fs.expanded(destination).absolute().with_name(aside)) as staging:
            FlatStorageCheckpointer().dumps(storage, staging.path / "rows")
            yield staging.path / "rows"
    else:
        raise SchemaError(f"the buffer holds a {type(storage).__name__}, expected a TensorStorage")


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no monitor thread, with which this process could not be forked safely


class ProgressBar:
    """A `Progress` that draws a tqdm bar on stderr."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage."""
        self.done()
        self._bar = _Bar(desc=clean(label), total=total, unit=f" {unit}", unit_scale=False)

    def advance(self, amount: int) -> None:
        """Report `amount` more units done."""
        if self._bar is not None:
            self._bar.update(amount)

    def done(self, remark: str = "") -> None:
        """End the stage; the bar stays visible."""
        if self._bar is not None:
            self._bar.set_postfix_str(clean(remark))
            self._bar.close()
            self._bar = None

    def note(self, text: str) -> None:
        """Write a message on a line of its own."""
        _Bar.write(clean(text), file=sys.stderr)
