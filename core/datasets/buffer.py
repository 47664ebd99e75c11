"""The buffer that datasets are read through."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..buffers.tensordict import TensorDictReplayBuffer
from ..errors import SchemaError, UsageError
from ..writers.base import ImmutableDatasetWriter, Writer

if TYPE_CHECKING:
    import torch

    from .storage import DatasetStorage


class DatasetReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose default writer refuses to add anything.

    UsageError (a ValueError) for a `batch_size` that is no number from 1.
    """

    def __init__(self, *, batch_size: int | None = None, **arguments: Any) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise UsageError(f"batch_size is {batch_size!r}, a number of elements is expected")
        super().__init__(batch_size=batch_size, **arguments)

    def _default_writer(self) -> Writer:
        return ImmutableDatasetWriter()

    def __fspath__(self) -> str:
        """Return the folder of the dataset, so that functions like `rbtool.preprocess` take the buffer for it.

        SchemaError (a RuntimeError) where there is none: for rows in memory.
        """
        path = getattr(self.storage, "path", None)
        if path is None:
            raise SchemaError(f"the rows of a {type(self.storage).__name__} are in no dataset on disk")
        folder: str = os.fspath(path)
        return folder

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
        """Take the dataset through `fn`, step by step, into a new dataset at `dest`, and return that as a storage.

        - `fn`: takes a tensordict of one step, batch size `[]`, and returns one; its keys and shapes may be others.
          It runs under `torch.vmap` where that gives the same, and may be a closure.
        - `num_workers`: how many processes work, one a core by default; 0 stays in this one.
        - `chunksize`, `num_chunks`: one of them asks for chunks: `fn` then takes a tensordict of batch size `[K]`,
          with K steps or as many as make that number of chunks. A `chunksize` of 0 means single steps.
        - `generator`: what the seed of random numbers is drawn from; 0 is the seed without it. Every step, or every
          chunk, is seeded by its number, so the result does not depend on the workers.
        - `pbar`: whether stderr shows how far it is.
        - `mp_start_method`: `fork`, `spawn` or `forkserver`.
        - `num_frames`: how many of the first steps to take.
        - `dest`: a path at which there is nothing, or an empty folder. What is written there is a dataset with all
          that belongs to one: `load_dataset(dest)` opens it too.

        Nothing changes in this dataset; it is read from the disk, so edits that this process keeps to itself are not
        seen. Kept for callers of TorchRL, whose names and meaning all arguments have: `max_tasks_per_child` and
        `index_with_generator` change nothing, as workers keep nothing and are sent row numbers alone, and nor does
        `worker_threads`, as each computes on one thread so that results are the same everywhere.

        SchemaError (a RuntimeError) for a `dim` but 0, for a storage that holds no tensors, and where `fn` returns
        something else than for the first step; RbtoolError where `fn` raises; UsageError (a ValueError) for a `pool`
        and arguments that make no sense. In each case nothing changes at `dest`.
        """
        from .preprocessing import MapArguments, preprocess_storage  # the engine is wanted by few

        arguments = MapArguments(
            dim=dim, num_workers=num_workers, chunksize=chunksize, num_chunks=num_chunks, pool=pool,
            generator=generator, max_tasks_per_child=max_tasks_per_child, worker_threads=worker_threads,
            index_with_generator=index_with_generator, pbar=pbar, mp_start_method=mp_start_method,
        )  # fmt: skip
        return preprocess_storage(self.storage, fn, dest, num_frames, arguments)
