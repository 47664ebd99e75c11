"""Replay buffers on datasets of Open X-Embodiment, stored on the disk or streamed from the hub."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.buffers.processes import generator_of
from ...core.datasets.buffer import DatasetReplayBuffer
from ...core.errors import RbtoolError, SchemaError, UsageError, require_flags
from ...core.experience_replay import SourceExperienceReplay
from ...core.format import fs
from ...core.format.locate import streams_folder
from ...core.options import PathLike
from ...core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from ...core.samplers.stream import StreamEpisodeSampler, StreamSampler, StreamSliceSampler
from ...core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from ...core.storages.dataset import StreamStorage
from ...core.streams.shards import SourceShards, cached
from ...core.transforms.base import Compose
from ...core.transforms.keyed import DecodeText, channels_first
from ..files.rlds_steps import require_rlds_last
from .shards import OpenXFolder, shards_at


class SplitTrajectoriesError(RbtoolError, NotImplementedError):
    """`split_trajs` is not supported for Open X-Embodiment; slices replace padded trajectories."""


class OpenXExperienceReplay(SourceExperienceReplay):
    """A replay buffer of TED steps on a dataset of Open X-Embodiment, stored first (`download`) or streamed.

    - `dataset_id`: one of `available_datasets`, like `bridge`.
    - `batch_size`: the number of elements that `sample()` and iteration return. A stream without one returns one
      episode at a time.
    - `shuffle`: whether batches are random. A stream then reads its shards (about 64 MiB of an archive each) in a
      random order, and shuffles the steps or slices of a few shards, as `StreamSampler` describes. Otherwise they come
      in the order of the dataset.
    - `num_slices` or `slice_len`: batches consist of slices of consecutive steps of one episode; the last step of a
      slice is marked as truncated. A stream takes one slice of each episode per pass.
    - `pad`: in a stream, the value that fills up episodes shorter than a slice; `("collector", "mask")` marks real
      steps. `strict_length=False` takes such episodes whole. Otherwise a stream raises an error for them, and a stored
      dataset leaves them out.
    - `replacement`: in a stored dataset, whether elements are drawn with replacement; by default the same as `shuffle`.
    - `streaming`, `download`: at most one of them; streaming by default. `download="force"` replaces a stored dataset.
    - `root`: the folder that holds the dataset at `<root>/<dataset_id>`; `openx` below the storage root by default.
      A stream reads archives from there if it finds them, as `<root>/<dataset_id>/NAME_00000.tar`.
    - `seed`: makes batches the same in every run.
    - `rlds_last`: what the last step of an episode is, `observation`, `step` or `auto`. With `auto`, a stream decides
      by as many of the first shards as it needs, a stored dataset by all.
    - `cache_size`: in a stream, the space for decoded shards below the storage root, like `2GB`; 8 GiB by default.
    - `skip_bad`: in a stream, whether episodes and shards that cannot be read are left out, with a warning for each;
      `storage.left_out` lists them.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything. `split_trajs` is not supported; use slices.

    Elements have `observation`, whose images are uint8 `[channels, height, width]`, `action`, `is_init`,
    `("next", "reward")`, `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` and `episode`, and text
    as strings. `("next", "observation")` is never filled with zeros, and never comes from another episode. Pickles are
    only read by the restricted reader; the script in the repository is never run.

    A stream equals the result of `load_dataset("openx:ID", streaming=True)`, with the same batches for the same seed.
    `StreamDataset` divides it among ranks and the workers of a loader. `state_dict()` holds the position in the stream;
    after `load_state_dict`, the next batch follows. A stream has no `len()`. Names and behaviour follow TorchRL.

    Raises:
        UsageError: (a ValueError) arguments contradict each other.
        SchemaError: (a RuntimeError) `pad` without streaming, `replacement` in a stream or without `shuffle`, or a
            short episode in a stream.
        DatasetNotFoundError: (a FileNotFoundError) the dataset does not exist.
        RbtoolError: any error of `rbtool.download`.
    """

    source = "openx"
    trusted = True

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | None = None,
        replacement: bool | None = None,
        streaming: bool | None = None,
        root: PathLike | None = None,
        download: bool | str | None = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        seed: int | None = None,
        rlds_last: str | None = None,
        cache_size: int | str | None = None,
        skip_bad: bool = False,
    ) -> None:
        require_flags(shuffle=shuffle, replacement=replacement or False, streaming=streaming or False)
        require_flags(split_trajs=split_trajs, strict_length=strict_length, skip_bad=skip_bad)
        self.streaming = _is_streaming(streaming, download)
        sliced = num_slices is not None or slice_len is not None
        if split_trajs:
            raise SplitTrajectoriesError("split_trajs is not supported", hint="slice_len=N makes batches of slices")
        if num_slices is not None and slice_len is not None:
            raise UsageError("num_slices and slice_len are both set, expected one of them")
        if sliced and sampler is not None:
            raise UsageError("sampler is set, expected None with num_slices or slice_len, which make one")
        self._require_consistent(shuffle, pad, replacement, sampler)
        if not self.streaming and (skip_bad or cache_size is not None):
            raise UsageError(f"{'skip_bad' if skip_bad else 'cache_size'} is set, expected with streaming only")
        parts = [DecodeText(), channels_first, *([] if transform is None else [transform])]
        arguments: dict[str, Any] = {
            "batch_size": batch_size, "writer": writer, "collate_fn": collate_fn, "pin_memory": pin_memory,
            "prefetch": prefetch, "generator": None if seed is None else generator_of(seed),
        }  # fmt: skip
        if self.streaming:
            self.dataset_id, self.download, self.split_trajs = dataset_id, False, False
            if root is not None:
                self.root = fs.expanded(root)
            files = _shards(dataset_id, root, require_rlds_last(rlds_last), skip_bad)
            arguments["generator"] = generator_of(secrets.randbits(63) if seed is None else seed)
            if batch_size is None and not sliced:
                arguments["batch_size"] = 1
                stream: StreamSampler = StreamEpisodeSampler(shuffle=shuffle)
            else:
                stream = _stream_sampler(num_slices, slice_len, shuffle, pad, strict_length)
            DatasetReplayBuffer.__init__(
                self, storage=StreamStorage(cached(files, cache_size, skip_bad=skip_bad)), sampler=stream,
                transform=Compose(*parts), **arguments,
            )  # fmt: skip
            self.unseeded = seed is None
            return
        if sampler is None:
            sampler = _sampler(
                num_slices, slice_len, shuffle, shuffle if replacement is None else replacement, strict_length
            )
        super().__init__(
            dataset_id, root=root, download=download or False, split_trajs=False, local=False, sampler=sampler,
            transform=Compose(*parts), **arguments,
        )  # fmt: skip

    def _require_consistent(self, shuffle: bool, pad: float | None, replacement: bool | None, sampler: Any) -> None:
        if self.streaming:
            if replacement:
                raise SchemaError("a stream never repeats an element", hint="download=True stores the dataset")
            if sampler is not None:
                raise UsageError("sampler is set, expected None: a stream has its own sampler")
        elif pad is not None:
            raise SchemaError("pad is for streams", hint="strict_length=False takes short episodes whole")
        if replacement and not shuffle:
            raise SchemaError("replacement is True, expected False with shuffle=False, which never repeats an element")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if not self.streaming:
            return super().__repr__()
        size = None if isinstance(self.sampler, StreamEpisodeSampler) else self._batch_size
        return f"{type(self).__name__}({self.dataset_id!r}, batch_size={size}, streaming=True)"

    @property
    def data_path(self) -> Path:
        """The folder of the dataset; SchemaError (a RuntimeError) for a stream, which has none."""
        if self.streaming:
            raise SchemaError("a stream has no folder: the dataset is not stored")
        return super().data_path


def _is_streaming(streaming: bool | None, download: bool | str | None) -> bool:
    """Return whether to stream, as by default; UsageError if both arguments are set."""
    if streaming and download:
        raise UsageError("streaming and download are both set, expected one of them")
    return download is None if streaming is None else bool(streaming)


def _shards(dataset_id: str, root: PathLike | None, rlds_last: str, skip_bad: bool) -> SourceShards:
    """Return the shards in the folder of the dataset if it has archives, else those on the hub."""
    folder = None if root is None else fs.expanded(root).absolute()
    local = folder is not None and (folder / dataset_id).is_dir() and bool(shards_at(folder / dataset_id))
    options = {"trust_pickle": True} | ({} if rlds_last == "auto" else {"rlds_last": rlds_last})
    return SourceShards(
        "openx", dataset_id, None, options, streams_folder(), skip_bad=skip_bad,
        make=functools.partial(OpenXFolder, folder) if folder is not None and local else None,
    )  # fmt: skip


def _stream_sampler(
    num_slices: int | None, slice_len: int | None, shuffle: bool, pad: float | None, strict_length: bool
) -> StreamSampler:
    if num_slices is None and slice_len is None:
        return StreamSampler(shuffle=shuffle)
    strict = strict_length and pad is None
    return StreamSliceSampler(
        num_slices=num_slices, slice_len=slice_len, shuffle=shuffle, strict_length=strict, refuse_short=strict,
        pad_output=pad is not None, pad_value=pad,
    )  # fmt: skip


def _sampler(
    num_slices: int | None, slice_len: int | None, shuffle: bool, replacement: bool, strict_length: bool
) -> Any:
    if num_slices is None and slice_len is None:
        return RandomSampler() if replacement else SamplerWithoutReplacement(shuffle=shuffle)
    options: dict[str, Any] = {"num_slices": num_slices, "slice_len": slice_len, "strict_length": strict_length}
    return SliceSampler(**options) if replacement else SliceSamplerWithoutReplacement(shuffle=shuffle, **options)
