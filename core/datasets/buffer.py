"""Datasets as buffers: `load_dataset` opens one that is stored; `preprocess` maps one into another.

The preprocessing engine is imported by the functions that need it: few callers do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch
from tqdm import tqdm

from ..buffers.ensemble import ReplayBufferEnsemble
from ..buffers.processes import generator_of
from ..buffers.tensordict import TensorDictReplayBuffer
from ..declarations import ReaderOptions, from_leaf
from ..encodings.compact import BUFFER
from ..errors import DatasetNotFoundError, SchemaError, UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import StepReader
from ..format.locate import KnownNames, find_dataset, storage_root
from ..format.mixture import is_mixture
from ..format.packed.reader import PackedReader
from ..format.staging import Staging
from ..open_steps import open_episodes, open_steps
from ..progress import Silent, clean
from ..results import given_options
from ..samplers.base import Sampler
from ..samplers.ensemble import SamplerEnsemble
from ..samplers.sample_units import SampleUnit
from ..samplers.stream import StreamSampler
from ..saved_steps import own_steps, require_verified
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..storages.tensor import TensorStorage
from ..transforms.base import divided
from ..writers.base import ImmutableDatasetWriter, Writer
from .mixtures import open_mixture
from .registered import or_registered
from .storage import DatasetStorage, Mode
from .videos import with_frames

if TYPE_CHECKING:
    from ..preprocess.processor import Unit


class DatasetReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose default writer refuses to add anything.

    UsageError (a ValueError) for a `batch_size` that is no number from 1.
    """

    def __init__(self, *, batch_size: int | None = None, **arguments: Any) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise UsageError(f"batch_size is {batch_size!r}, expected a number of elements")
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

    @cached_property
    def specs(self) -> Any:
        """The spec of one row, a `Composite` with the values of the spaces that the source records.

        Transforms of the buffer are not looked at. SchemaError as `__fspath__` raises it.
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
        arguments = _MapArguments(
            dim=dim, num_workers=num_workers, chunksize=chunksize, num_chunks=num_chunks, pool=pool,
            generator=generator, max_tasks_per_child=max_tasks_per_child, worker_threads=worker_threads,
            index_with_generator=index_with_generator, pbar=pbar, mp_start_method=mp_start_method,
        )  # fmt: skip
        return _preprocess_storage(self.storage, fn, dest, num_frames, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MapArguments:
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
        from ..engine.pool import START_METHODS

        if self.dim != 0:
            raise SchemaError(f"dim is {self.dim!r}, expected 0: a dataset has one dimension")
        if self.pool is not None:
            raise UsageError(
                "pool is set, expected None: rbtool starts its own workers, and shares their queue with no others",
                hint="leave pool out and use num_workers=N",
            )
        if self.chunksize is not None and self.num_chunks is not None:
            raise UsageError("chunksize and num_chunks are both set, expected one of them")
        if self.mp_start_method not in (None, *START_METHODS):
            raise UsageError(f"mp_start_method is {self.mp_start_method!r}; known: {', '.join(START_METHODS)}")
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


def _preprocess_storage(
    storage: Storage,
    fn: Callable[[Any], Any],
    dest: str | os.PathLike[str],
    num_frames: int | None,
    arguments: _MapArguments,
) -> DatasetStorage:
    """Take the rows of a storage through `fn` into a dataset at `dest`, and open that."""
    from ..preprocess.preprocess import preprocess

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
        raise UsageError(f"{name} is {value!r}, expected a number from {least}")


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
        from ..checkpointers.episodes import FlatStorageCheckpointer

        aside = f"{destination.name}-rows-{secrets.token_hex(4)}"
        with Staging(fs.expanded(destination).absolute().with_name(aside)) as staging:
            FlatStorageCheckpointer().dumps(storage, staging.path / "rows")
            yield staging.path / "rows"
    else:
        raise SchemaError(f"the buffer holds a {type(storage).__name__}, expected a TensorStorage")


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


@or_registered
@suggests_keywords(*ReaderOptions.__annotations__)
def load_dataset(
    dataset: str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    sampler: Any = None,
    sample_unit: SampleUnit | None = None,
    transform: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    pin_memory: bool = False,
    prefetch: int | None = None,
    split_trajs: bool = False,
    seed: int | None = None,
    mode: Mode = "c",
    verify: bool = False,
    decode_video: bool = True,
    root: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    cache_size: int | str | None = None,
    skip_bad: bool = False,
    **options: Unpack[ReaderOptions],
) -> DatasetReplayBuffer | ReplayBufferEnsemble:
    """Open a stored dataset (a path or `source:id`) as a `TensorDictReplayBuffer`, or a mixture as an ensemble.

    The path may also be that of a checkpoint of steps, or of an export in the format `h5`, `npz` or `parquet`. Their
    rows are read into memory, which they have to fit into; those of a dataset need not.

    The same `seed` gives the same batches, with any number of prefetched ones, and of a seed every worker of a
    `DataLoader` has a stream of its own; without one a fresh seed is drawn, in every process that gets a copy. The
    buffer always has a generator, so what it saves continues with the very same batches. Edits of batches and of rows
    stay in this process; with `mode="r+"` those of rows are written to the dataset. Nothing can be added. `verify`
    first compares all files with their digests. `split_trajs` makes elements of whole trajectories, padded to one
    length, with a `"mask"`. Frames of kept videos are decoded in each batch, unless `decode_video` is False. `root` is
    the storage root; the other arguments are those of `ReplayBuffer`. Nothing is downloaded.

    With `streaming` the dataset may be on a hub, `hf://OWNER/NAME[@REVISION]`, or be one of a source that is not
    stored; it is read shard by shard, a few ahead of their use, in at most `cache_size` (like `2GB`) below the storage
    root. The sampler is a `StreamSampler`, or a `StreamSliceSampler`. With `skip_bad` episodes and shards that cannot
    be read are left out; warnings and `buffer.storage.left_out` name them. `options` are those of `download`.

    A mixture, the path of a file that `rbtool mix` wrote, is opened as a `ReplayBufferEnsemble` of its datasets with
    `batch="exact"`: batches have as many elements as those of a dataset. Each dataset gets a copy of the sampler, and
    transforms at the front that look back, like `StoredFrameStack`; the ensemble has the others.

    DatasetNotFoundError (a FileNotFoundError) explains how to fetch what is not there. UsageError (a ValueError) for
    saved buffers, raw datasets of other libraries, datasets without steps, `verify` without digests, rows of a
    checkpoint or an export that do not fit into memory, and arguments that make no sense; FormatError and
    CorruptDataError for what cannot be read or was changed since it was mixed; SchemaError (a RuntimeError) for a
    mixture of datasets with different fields, and for a batch size that slices do not divide.
    """
    generator = generator_of(secrets.randbits(63) if seed is None else seed)
    storage_of = functools.partial(_storage, mode=mode, split_trajs=split_trajs, verify=verify)
    arguments: dict[str, Any] = {
        "batch_size": batch_size, "transform": transform, "pin_memory": pin_memory, "prefetch": prefetch,
        "generator": generator,
    }  # fmt: skip
    parts: dict[str, Any] = {"sampler": sampler, "sample_unit": sample_unit, "collate_fn": collate_fn}
    buffer: DatasetReplayBuffer | ReplayBufferEnsemble
    if streaming:
        parts["sampler"] = _stream_sampler(
            sampler, mode=mode, split_trajs=split_trajs, verify=verify, decode_video=not decode_video
        )
        open_stream = from_leaf("open_stream")
        storage = open_stream(dataset, root, cache_size, given_options(options), skip_bad=skip_bad)
        buffer = DatasetReplayBuffer(storage=storage, **parts, **arguments)
    elif given := [*options, *["cache_size"] * (cache_size is not None), *["skip_bad"] * skip_bad]:
        raise UsageError(f"{given[0]} is set, expected with streaming=True only")
    elif is_mixture(path := _found(dataset, root)):
        _refuse_for_mixtures(path, sampler, split_trajs)
        buffer = _mixture(path, root, storage_of, parts | {"decode_video": decode_video}, arguments)
    else:
        place = None if (path / BUFFER).is_file() else own_steps(path)
        # What is verified is mapped, even if the dataset is replaced meanwhile.
        with open_episodes(place or path) as reader:
            arguments["transform"] = with_frames(reader, transform) if decode_video else transform
            buffer = DatasetReplayBuffer(storage=storage_of(reader), **parts, **arguments)
    if batch_size is not None:
        buffer.sampler.check_batch_size(batch_size)  # before workers of a loader find it out
    buffer.unseeded = seed is None
    return buffer


def _mixture(
    path: Path,
    root: str | os.PathLike[str] | None,
    storage_of: Callable[[StepReader], Storage],
    parts: dict[str, Any],
    arguments: dict[str, Any],
) -> ReplayBufferEnsemble:
    """Open a mixture; its datasets get copies of the sampler, and the transforms that look back."""
    sampler, transform, decode_video = parts["sampler"], arguments["transform"], parts.pop("decode_video")
    looking_back, others = divided(transform)

    def opened(reader: StepReader) -> DatasetReplayBuffer:
        own = copy.deepcopy(sampler) if isinstance(sampler, Sampler) else sampler  # one each
        first = with_frames(reader, looking_back) if decode_video else looking_back
        return DatasetReplayBuffer(storage=storage_of(reader), **parts | {"sampler": own}, transform=first)

    shared = arguments | {"transform": others if len(looking_back) else transform}
    return open_mixture(path, opened, root).ensemble(lambda member: member, **shared)


def _refuse_for_mixtures(path: Path, sampler: Any, split_trajs: bool) -> None:
    """Raise UsageError for arguments of `load_dataset` that a mixture does not take."""
    if split_trajs:
        raise UsageError(f"split_trajs pads all trajectories to one length, and {path} is a mixture of datasets")
    if isinstance(sampler, SamplerEnsemble):
        raise UsageError(
            f"the sampler is a SamplerEnsemble, expected another: {path} has weights of its own",
            hint="give a sampler, of which each dataset gets a copy, and assign weights: buffer.p = [1, 3]",
        )


def _stream_sampler(sampler: Any, **others: Any) -> StreamSampler:
    """Return the sampler of a stream; UsageError for another kind, and for what only a dataset on this disk has."""
    if refused := [name for name, value in others.items() if value not in (False, "c")]:
        raise UsageError(f"{refused[0]} is set, expected only without streaming=True: a stream is not on this disk")
    if sampler is not None and not isinstance(sampler, StreamSampler):
        kind = (sampler if isinstance(sampler, type) else type(sampler)).__name__
        raise UsageError(
            f"the sampler is a {kind}, expected a StreamSampler with streaming=True: it follows the order of shards",
            hint="take a StreamSampler or a StreamSliceSampler",
        )
    return sampler or StreamSampler()


def _storage(reader: StepReader, mode: Mode, split_trajs: bool, verify: bool) -> Storage:
    """Make the storage that the layout asks for; of files that were compared with their digests, if `verify`."""
    if verify:
        require_verified(reader)
    if not isinstance(reader, PackedReader) or split_trajs:
        return DatasetStorage(reader, mode=mode, split_trajs=split_trajs)
    if mode not in get_args(Mode):
        raise UsageError(f"the mode is {mode!r}, expected 'c' (edits stay here) or 'r+' (edits are kept)")
    if mode == "r+":
        raise UsageError(
            f"{reader.path} has the layout packed, which cannot be edited in place",
            hint=f"make a copy that can be: rbtool convert {shlex.quote(str(reader.path))} DEST --layout ted",
        )
    return PackedStorage(reader)


def _found(dataset: str | os.PathLike[str], root: str | os.PathLike[str] | None) -> Path:
    """Find the dataset, also by words that a download has found to mean it."""
    try:
        return find_dataset(dataset, root)
    except DatasetNotFoundError:
        source, colon, asked = os.fspath(dataset).partition(":")
        known = KnownNames(storage_root(root), source).get(asked) if colon else None
        if known is None:
            raise
        return find_dataset(f"{source}:{known.id}", root)
