"""Datasets of Open X-Embodiment as buffers: stored ones, and streams of the shards on the hub."""

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
    """Padded trajectories of Open X-Embodiment are not made: slices are."""


class OpenXExperienceReplay(SourceExperienceReplay):
    """A dataset of Open X-Embodiment as a buffer of TED steps: stored first (`download`), or streamed from the hub.

    - `dataset_id`: one of `available_datasets`, like `bridge`.
    - `batch_size`: how many elements `sample()` and iteration give. A stream without one gives an episode at a time.
    - `shuffle`: whether batches are random. A stream then reads its shards, 64 MiB or so of an archive, in a random
      order, and shuffles the steps, or the slices, of a few shards, as `StreamSampler` states. Without it, they come
      in the order of the dataset.
    - `num_slices` or `slice_len`: batches are made of slices, each of consecutive steps of one episode; their last
      step is marked as truncated. A stream takes one slice of each episode a pass.
    - `pad`: of a stream, the value that fills up episodes shorter than a slice; `("collector", "mask")` marks real
      steps. `strict_length=False` takes such episodes whole. Else they are an error of a stream, and left out of a
      stored dataset.
    - `replacement`: of a stored dataset, whether elements are drawn with replacement, as by default with `shuffle`.
    - `streaming`, `download`: one of them; without any, streaming. `download="force"` replaces a stored dataset.
    - `root`: the folder in which the dataset is at `<root>/<dataset_id>`; `openx` below the storage root by default.
      A stream of shards that are there, as `<root>/<dataset_id>/NAME_00000.tar`, reads these.
    - `seed`: makes batches the same in every run.
    - `rlds_last`: what the last step of an episode is, `observation`, `step` or `auto`; a stream decides by as
      many of the first shards as it needs, a stored dataset by all.
    - `cache_size`: of a stream, how much the decoded shards may take below the storage root, like `2GB`; 8 GiB.
    - `skip_bad`: of a stream, whether episodes and shards that cannot be read are left out, with a warning each;
      `storage.left_out` has them.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything. `split_trajs` is refused: slices do that.

    Elements have `observation`, whose images are uint8 `[channels, height, width]`, `action`, `is_init`,
    `("next", "reward")`, `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` and `episode`, and text
    as strings. `("next", "observation")` is never made of zeros, and never from another episode. The pickles are
    read by the restricted reader alone; the script in the repository is never run.

    A stream is what `load_dataset("openx:ID", streaming=True)` returns, and the batches of a seed are the same.
    `StreamDataset` divides it among the workers of a loader, and among ranks. `state_dict()` is its place:
    `load_state_dict` continues with the very next batch. A stream has no `len()`.

    UsageError (a ValueError) for arguments that contradict each other, SchemaError (a RuntimeError) for `pad` without
    streaming, for replacement in a stream or without `shuffle`, and for short episodes in a stream;
    DatasetNotFoundError (a FileNotFoundError) and what `rbtool.download` raises. Names and form follow TorchRL.
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
                raise SchemaError("a stream draws no element twice", hint="download=True stores the dataset")
            if sampler is not None:
                raise UsageError("sampler is set, expected None: a stream has one of its own")
        elif pad is not None:
            raise SchemaError("pad is for streams", hint="strict_length=False takes short episodes whole")
        if replacement and not shuffle:
            raise SchemaError("replacement is True, expected False with shuffle=False, which repeats nothing")

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
            raise SchemaError("a stream has no folder: nothing is stored")
        return super().data_path


def _is_streaming(streaming: bool | None, download: bool | str | None) -> bool:
    """Return whether it is a stream: unless it is to be downloaded."""
    if streaming and download:
        raise UsageError("streaming and download are both set, expected one of them")
    return download is None if streaming is None else bool(streaming)


def _shards(dataset_id: str, root: PathLike | None, rlds_last: str, skip_bad: bool) -> SourceShards:
    """Return the shards of a folder that has some, else those on the hub."""
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
