"""Takes the dataset behind a buffer through a function, as `BaseDatasetExperienceReplay.preprocess` is documented."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..checkpointers.episodes import FlatStorageCheckpointer
from ..errors import SchemaError, UsageError
from ..format import fs
from ..format.staging import Staging
from ..preprocess.processor import Unit
from ..preprocess.workers.processes import START_METHODS
from ..progress import Silent, clean
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..storages.tensor import TensorStorage
from ..verbs.preprocess import preprocess
from .storage import DatasetStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class MapArguments:
    """What `TensorDictBase.map` takes; UsageError (a ValueError) for what makes no sense, SchemaError for `dim`."""

    dim: int = 0
    num_workers: int | None = None
    chunksize: int | None = None
    num_chunks: int | None = None
    pool: Any = None
    generator: torch.Generator | None = None
    max_tasks_per_child: int | None = None
    worker_threads: int = 1
    index_with_generator: bool = False
    pbar: bool = False
    mp_start_method: str | None = None

    def __post_init__(self) -> None:
        if self.dim != 0:
            raise SchemaError(f"dim is {self.dim!r}, but a dataset has one dimension, so 0 is expected")
        if self.pool is not None:
            raise UsageError(
                "a pool was given, but rbtool starts its own workers, and shares their queue with no others",
                hint="leave pool out and say num_workers=N",
            )
        if self.chunksize is not None and self.num_chunks is not None:
            raise UsageError("chunksize and num_chunks were both given, one of them is expected")
        if self.mp_start_method not in (None, *START_METHODS):
            raise UsageError(f"mp_start_method is {self.mp_start_method!r}; known are {', '.join(START_METHODS)}")
        for name, least in (("chunksize", 0), ("num_chunks", 1), ("max_tasks_per_child", 1), ("worker_threads", 1)):
            _require_number(name, getattr(self, name), least)

    def unit(self) -> Unit:
        """What one call of the function sees: a chunk if chunks were asked for, else a single step."""
        return "step" if self.chunksize or self.num_chunks else "row"

    def chunk_size(self, steps: int) -> int | None:
        """How many of `steps` steps a chunk has."""
        return -(-steps // self.num_chunks) if self.num_chunks else self.chunksize or None

    def seed(self) -> int:
        """Draw a seed from the generator; 0 without one."""
        if self.generator is None:
            return 0
        device = self.generator.device
        return int(torch.randint(2**63 - 1, (), generator=self.generator, device=device))


def preprocess_storage(
    storage: Storage,
    fn: Callable[[Any], Any],
    dest: str | os.PathLike[str],
    num_frames: int | None,
    arguments: MapArguments,
) -> DatasetStorage:
    """Take the rows of a storage through `fn` into a dataset at `dest`, and open that."""
    _require_number("num_frames", num_frames, 1)
    steps = min(len(storage), num_frames or len(storage))
    progress = ProgressBar() if arguments.pbar else Silent()
    with _on_disk(storage, Path(dest)) as path, contextlib.ExitStack() as stack:
        stack.callback(progress.done)
        preprocess(
            path,
            fn,
            dest,
            unit=arguments.unit(),
            num_workers=arguments.num_workers,
            chunk_size=arguments.chunk_size(steps),
            num_frames=None if num_frames is None else steps,
            seed=arguments.seed(),
            start_method=arguments.mp_start_method,
            progress=progress,
        )
    return DatasetStorage(dest)


def _require_number(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UsageError(f"{name} is {value!r}, a number from {least} is expected")


@contextlib.contextmanager
def _on_disk(storage: Storage, destination: Path) -> Iterator[Path]:
    """Name the folder that holds the rows; those that are in no dataset lie next to the destination meanwhile."""
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
        aside = f"{destination.name}-rows-{secrets.token_hex(4)}"
        with Staging(fs.expanded(destination).absolute().with_name(aside)) as staging:
            FlatStorageCheckpointer().dumps(storage, staging.path / "rows")
            yield staging.path / "rows"
    else:
        raise SchemaError(f"the buffer holds a {type(storage).__name__}, a TensorStorage is expected")


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # it would start a thread, and then this process could not be forked in safety


class ProgressBar:
    """A `Progress` that draws a tqdm bar on stderr."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage."""
        self.done()
        self._bar = _Bar(desc=clean(label), total=total, unit=f" {unit}", unit_scale=False)

    def advance(self, amount: int) -> None:
        """Report so many more units done."""
        if self._bar is not None:
            self._bar.update(amount)

    def done(self, remark: str = "") -> None:
        """End the stage, with the bar left where it is."""
        if self._bar is not None:
            self._bar.set_postfix_str(clean(remark))
            self._bar.close()
            self._bar = None

    def note(self, text: str) -> None:
        """Write a message on a line of its own."""
        _Bar.write(clean(text), file=sys.stderr)
