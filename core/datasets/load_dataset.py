"""`load_dataset` opens stored datasets, or streams them; `register_dataset` adds further names for it."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack, cast, get_args

import torch

from ..buffers.ensemble import ReplayBufferEnsemble
from ..buffers.processes import generator_of
from ..declarations import ReaderOptions, declared, from_leaf
from ..encodings.compact import BUFFER
from ..errors import DatasetNotFoundError, MissingKeyError, UsageError, WrongKindError, require_flags, suggests_keywords
from ..format.contracts import StepReader
from ..format.locate import KnownNames, find_dataset, is_hub_address, source_names, storage_root
from ..format.mixture import is_mixture
from ..format.packed.reader import PackedReader
from ..open_steps import open_episodes
from ..options import PathLike
from ..results import given_options
from ..samplers.base import Sampler
from ..samplers.ensemble import SamplerEnsemble
from ..samplers.prioritized import PrioritizedSampler
from ..samplers.sample_units import SampleUnit
from ..samplers.stream import StreamSampler
from ..saved_steps import own_steps, require_verified
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..transforms.base import Compose, divided
from ..transforms.keyed import DecodeText, EpisodeTexts
from ..transforms.video import with_frames
from ..transforms.windows import Windows
from .buffer import DatasetReplayBuffer
from .mixtures import open_mixture
from .storage import MASK, DatasetStorage, Mode

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")
_registered: dict[str, Callable[..., Any] | str] = {}


class UnknownNameError(DatasetNotFoundError, ValueError):
    """A name is neither a path nor belongs to a source; also a ValueError, which TorchRL raises."""


class TakenPrefixError(UsageError, KeyError):
    """A prefix is registered already, or is the name of a source."""


@suggests_keywords()
def register_dataset(prefix: str, dataset: Callable[..., Any] | str, *, replace: bool = False) -> None:
    """Make `load_dataset("prefix:ID", …)` return `dataset("ID", …)`, called with the same further arguments.

    `dataset` is a function or class, or text like `"module:name"`, which is imported on first use. Prefixes are
    compared without case and surrounding blanks. The name is registered in this process only; a source or a reader for
    the command line is registered by its package, see the guide to extensions.

    WrongKindError (a TypeError) for a prefix or a `dataset` of another type, UsageError (a ValueError) for a
    prefix that is empty or has a colon, and TakenPrefixError (a KeyError) without `replace` for one that is taken, also
    by a source of rbtool.

    >>> register_dataset("numbers", lambda name, **options: list(range(int(name))))
    >>> from rbtool import load_dataset
    >>> load_dataset("numbers:3")
    [0, 1, 2]
    """
    name = prefix.strip().lower()
    if not name or ":" in name:
        raise UsageError(f"the prefix is {prefix!r}, expected a name without a colon")
    if not callable(dataset) and not isinstance(dataset, str):
        raise WrongKindError(f"the dataset is {dataset!r}, expected a function or 'module:name'")
    if isinstance(dataset, str) and not re.fullmatch(r"[\w.]+:[\w.]+", dataset):
        raise UsageError(f"the dataset is {dataset!r}, expected a function or 'module:name'")
    if not replace and (name in _registered or name in {one.name for one in declared()} or name == "hf"):
        raise TakenPrefixError(f"the prefix {name!r} is taken", hint="replace=True puts another in its place")
    _registered[name] = dataset


def _or_registered(load: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Call the function that is registered for the prefix of the first argument, `dataset`, or else `load`.

    The argument may also be passed as `dataset_id`, its name in TorchRL.
    """

    @functools.wraps(load)
    def either(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Returned:
        if "dataset_id" in options and "dataset" not in options:
            options["dataset"] = options.pop("dataset_id")
        asked = args[0] if args else options.get("dataset")
        if not isinstance(asked, str) or is_hub_address(asked):
            return load(*args, **options)
        prefix, colon, name = asked.partition(":")
        found = _registered.get(prefix.strip().lower()) if colon else None
        if found is None:
            return load(*args, **options)
        rest = {key: value for key, value in options.items() if key != "dataset"}
        return cast("_Returned", _resolved(found)(name, *args[1:], **rest))

    return either


def _resolved(dataset: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(dataset, str):
        return dataset
    module, _, name = dataset.partition(":")
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise MissingKeyError(f"the registered dataset {dataset!r} cannot be imported: {error}") from error
    if not callable(found):
        raise WrongKindError(f"the registered dataset {dataset!r} is a {type(found).__name__}, expected a function")
    return cast("Callable[..., Any]", found)


# Opening ---------------------------------------------------------------------------------------------


@_or_registered
@suggests_keywords(*ReaderOptions.__annotations__)
def load_dataset(
    dataset: PathLike,
    batch_size: int | None = None,
    *,
    sampler: Any = None,
    weights: str | None = None,
    sample_unit: SampleUnit | None = None,
    transform: Any = None,
    windows: Mapping[Any, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    pin_memory: bool = False,
    prefetch: int | None = None,
    split_trajs: bool = False,
    seed: int | None = None,
    mode: Mode = "c",
    verify: bool = False,
    decode_video: bool = True,
    texts: bool = False,
    root: PathLike | None = None,
    streaming: bool = False,
    cache_size: int | str | None = None,
    skip_bad: bool = False,
    **options: Unpack[ReaderOptions],
) -> DatasetReplayBuffer | ReplayBufferEnsemble:
    """Open a stored dataset as a `TensorDictReplayBuffer`, or a mixture of datasets as a `ReplayBufferEnsemble`.

    A mixture is a file that `rbtool mix` wrote. Its ensemble has `batch="exact"`: a batch has `batch_size` elements in
    total. Each dataset gets a copy of the sampler, its own `windows`, and a copy of the leading transforms that read
    earlier steps, like `StoredFrameStack`; the other transforms belong to the ensemble.

    Args:
        dataset: a path, `source:id`, or a name that `register_dataset` knows; TorchRL's name `dataset_id` is accepted.
            Checkpoints of steps and exports to `h5`, `npz` or `parquet` are opened too: their rows are read into
            memory, while a dataset may be larger than memory.
        batch_size: the number of elements that `sample()` and iteration return.
        sampler: a `Sampler` or a callable that makes one; default `RandomSampler()`, for a stream `StreamSampler()`.
        weights: the name of a score that `rbtool.score` added, like `"score.quality"`: elements are drawn in proportion
            to the score of their episode, by default with `PrioritizedSampler(steps, alpha=1, beta=0)`, or with a given
            sampler that takes priorities.
        sample_unit: a `SampleUnit` that expands each drawn element; `Sequence(8)` expands it to 8 steps of its episode.
        transform: a `Transform` of rbtool or TorchRL, a module or any callable, which is applied to batches.
        windows: the entries that contain steps around each sampled step, and which steps, like `{"action": (0, 16)}`;
            see `Windows`. Windows in seconds need a dataset that states its frame rate, as LeRobot's do; a stream
            fetches a shard to find it.
        collate_fn: makes a batch of the rows that the storage returns.
        pin_memory: whether batches are put in page-locked memory, for fast copies to an accelerator.
        prefetch: the number of batches that are prepared ahead, in as many threads; needs `batch_size`.
        split_trajs: whether elements are whole trajectories, padded to one length, with a `"mask"`.
        seed: the same seed draws the same batches, with any `prefetch`; each worker of a `DataLoader` derives its own
            random numbers from it. By default a fresh seed is drawn, also in every process that receives a copy. The
            buffer always has a generator, so that its checkpoint continues with exactly the same batches.
        mode: with `"c"` (copy-on-write) edits of rows stay in this process, with `"r+"` they are written to the
            dataset. Edits of batches never reach the disk. Nothing can be added.
        verify: whether all files are compared with their digests first.
        decode_video: whether the frames of kept videos are decoded in each batch.
        texts: whether batches contain the texts of each step as strings: its episode's, such as the task,
            `language_instruction`, and its own. LeRobot's `language_persistent` and `language_events` are lists of
            dicts. A stream has texts only if it reads a dataset that rbtool wrote.
        root: the folder of stored datasets; default `RBTOOL_HOME`, or else the cache folder of the platform. Nothing
            is downloaded.
        streaming: whether the dataset is read shard by shard, a few shards ahead. It may be on a hub,
            `hf://OWNER/NAME[@REVISION]`, in a bucket, `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`, on a web server,
            `https://HOST/FOLDER`, or belong to a source without being stored. The sampler is a `StreamSampler` or a
            `StreamSliceSampler`.
        cache_size: the disk space for the shards of a stream below the storage root: bytes, or text such as `"2GB"`.
        skip_bad: whether unreadable episodes and shards of a stream are left out; warnings and
            `buffer.storage.left_out` name them.
        **options: for a stream, the options of the source's reader, as for `download`.

    Returns:
        The buffer. Its elements are steps, or trajectories with `split_trajs`; `sample()` returns a tensordict
        `[batch_size]`, or `[batch_size, steps]`.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) the dataset is missing; the hint says how to fetch it. It is also a
            ValueError if the name does not belong to a source.
        UsageError: (a ValueError) the path holds saved buffers, raw data of another library or a dataset without steps;
            `verify` without digests; rows of a checkpoint or an export that do not fit into memory; arguments that
            contradict each other.
        MissingKeyError: (a KeyError) there is no such entry for a window.
        FormatError, CorruptDataError: files cannot be read, or were changed after the mixture was written.
        SchemaError: (a RuntimeError) the datasets of a mixture have different fields, or the batch size is not a
            multiple of the slice length.

    >>> from pathlib import Path
    >>> from rbtool import SliceSampler
    >>> from rbtool.core.testing.datasets import write_walks
    >>> written = write_walks(Path("walks"), [(50, "terminated"), (40, "truncated")])
    >>> buffer = load_dataset("walks", batch_size=32, sampler=SliceSampler(slice_len=8), seed=0)
    >>> batch = buffer.sample()
    >>> batch.shape, batch["next", "reward"].shape, len(buffer)
    (torch.Size([32]), torch.Size([32, 1]), 90)
    """
    generator = generator_of(secrets.randbits(63) if seed is None else seed)
    storage_of = functools.partial(_storage, mode=mode, split_trajs=split_trajs, verify=verify)
    if windows is not None and split_trajs:
        raise UsageError("windows and split_trajs are both set, expected one: windows are of single steps")
    require_flags(texts=texts)
    if texts and split_trajs:
        raise UsageError("texts and split_trajs are both set, expected one: texts are of single steps")
    arguments: dict[str, Any] = {
        "batch_size": batch_size, "transform": transform, "pin_memory": pin_memory, "prefetch": prefetch,
        "generator": generator,
    }  # fmt: skip
    parts: dict[str, Any] = {"sampler": sampler, "sample_unit": sample_unit, "collate_fn": collate_fn}
    buffer: DatasetReplayBuffer | ReplayBufferEnsemble
    if streaming:
        parts["sampler"] = _stream_sampler(
            sampler, mode=mode, split_trajs=split_trajs, verify=verify, decode_video=not decode_video,
            weights=weights or False,
        )  # fmt: skip
        open_stream = from_leaf("open_stream")
        storage = open_stream(dataset, root, cache_size, given_options(options), skip_bad=skip_bad)
        if windows is not None:
            transform = _with_windows(Windows.of_dataset(windows, storage), transform)
        arguments["transform"] = _with_texts(storage.shards.texts(), transform, {}) if texts else transform
        buffer = DatasetReplayBuffer(storage=storage, **parts, **arguments)
    elif given := [*options, *["cache_size"] * (cache_size is not None), *["skip_bad"] * skip_bad]:
        raise UsageError(f"{given[0]} is set, expected with streaming=True only")
    elif is_mixture(path := _found(dataset, root)):
        _refuse_for_mixtures(path, sampler, split_trajs)
        more = {"decode_video": decode_video, "texts": texts, "windows": windows, "weights": weights}
        buffer = _mixture(path, root, storage_of, parts | more, arguments)
    else:
        place = None if (path / BUFFER).is_file() else own_steps(path)
        # The storage maps the files that were verified, even if the dataset is replaced meanwhile.
        with open_episodes(place or path) as reader:
            if windows is not None:
                transform = _with_windows(Windows.of_dataset(windows, reader), transform)
            transform = _with_texts(texts_of(reader), transform, {}) if texts else transform
            arguments["transform"] = with_frames(reader, transform) if decode_video else transform
            buffer = _buffer(reader, storage_of(reader), weights=weights, **parts, **arguments)
    if batch_size is not None:
        buffer.sampler.check_batch_size(batch_size)  # now, and not in the workers of a loader
    buffer.unseeded = seed is None
    return buffer


def _mixture(
    path: Path,
    root: PathLike | None,
    storage_of: Callable[[StepReader], Storage],
    parts: dict[str, Any],
    arguments: dict[str, Any],
) -> ReplayBufferEnsemble:
    """Open a mixture; its datasets get copies of the sampler, windows, and the transforms that look back."""
    sampler, transform = parts["sampler"], arguments["transform"]
    decode_video, texts, windows = (parts.pop(name) for name in ("decode_video", "texts", "windows"))
    looking_back, others = divided(transform)
    names: dict[str, None] = {}

    def opened(reader: StepReader) -> DatasetReplayBuffer:
        own = copy.deepcopy(sampler) if isinstance(sampler, Sampler) else sampler  # one each
        first = looking_back if windows is None else _with_windows(Windows.of_dataset(windows, reader), looking_back)
        first = _with_texts(texts_of(reader), first, names) if texts else first
        first = with_frames(reader, first) if decode_video else first
        return _buffer(reader, storage_of(reader), **parts | {"sampler": own}, transform=first)

    shared = arguments | {"transform": others if len(looking_back) else transform}
    return open_mixture(path, opened, root).ensemble(lambda member: member, **shared)


def _buffer(
    reader: StepReader, storage: Storage, *, weights: str | None, sampler: Any, **arguments: Any
) -> DatasetReplayBuffer:
    """Make a buffer whose elements are drawn by a score, if `weights` names one."""
    if weights is None:
        return DatasetReplayBuffer(storage=storage, sampler=sampler, **arguments)
    table = reader.episodes
    found = torch.from_numpy(table.score(weights))
    if getattr(storage, "split_trajs", False):  # an episode with a flag inside is several trajectories
        ends = storage[:].get(MASK).sum(1).cumsum(0)
        found = found[torch.from_numpy(table.index_of_step(ends.numpy() - 1))]
    else:
        found = found.repeat_interleave(torch.from_numpy(table.length))
    sampler = PrioritizedSampler(len(found), alpha=1.0, beta=0.0) if sampler is None else sampler
    buffer = DatasetReplayBuffer(storage=storage, sampler=sampler, **arguments)
    if not isinstance(buffer.sampler, PrioritizedSampler):
        kind = type(buffer.sampler).__name__
        raise UsageError(
            f"the sampler is a {kind}, expected a PrioritizedSampler with weights={weights!r}",
            hint="leave sampler out, or take a PrioritizedSliceSampler",
        )
    if not found.sum() > 0:
        raise UsageError(f"{weights} is 0 in all episodes of {reader.path}, expected one above 0")
    buffer.update_priority(torch.arange(len(found)), found)
    return buffer


def _with_windows(windows: Windows, transform: Any) -> Compose:
    return Compose(windows, *([] if transform is None else [transform]))


def texts_of(reader: StepReader) -> dict[int, dict[str, str]]:
    """Return the texts of each episode, by its number."""
    numbers = reader.episodes.episode.tolist()
    return dict(zip(numbers, reader.episode_text or [{}] * len(numbers), strict=True))


def _with_texts(texts: Mapping[int, Mapping[str, str]], transform: Any, names: dict[str, None]) -> Compose:
    looking_back, others = divided(transform)
    return Compose(*looking_back, EpisodeTexts(texts, names), DecodeText(), *others)


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
    """Return the sampler of a stream; UsageError for other samplers, and for options of datasets on this disk."""
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
    """Make the storage for the layout of a dataset; with `verify`, compare its files with their digests first."""
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


def _found(dataset: PathLike, root: PathLike | None) -> Path:
    """Find the dataset, also by search words that led a download to it."""
    try:
        return find_dataset(dataset, root)
    except DatasetNotFoundError as error:
        source, colon, asked = os.fspath(dataset).partition(":")
        if not colon or source not in ("hf", *source_names()):
            raise UnknownNameError(error.message, hint=error.hint) from None
        known = KnownNames(storage_root(root), source).get(asked)
        if known is None:
            raise
        return find_dataset(f"{source}:{known.id}", root)
