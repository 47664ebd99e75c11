"""Replay buffers on datasets of LeRobot, columns of LeRobot as tensordicts, and references to video frames."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, TensorDictBase

from ...core.datasets.buffer import DatasetReplayBuffer
from ...core.encodings.video import open_video
from ...core.errors import SchemaError, UsageError, require_flags, suggests_keywords, warn_caller
from ...core.experience_replay import SourceExperienceReplay, SourceFolder
from ...core.format.contracts import StepReader
from ...core.format.manifest import HIDDEN
from ...core.options import PathLike
from ...core.samplers.slices import SliceSampler
from ...core.storages.tensor import TensorStorage
from ...core.ted.schema import as_key
from ...core.transforms.base import Compose, Transform, divided
from ...core.transforms.keyed import Path as KeyPath
from ...core.transforms.keyed import RenameTransform, require_tensordict
from ...core.transforms.video import with_frames
from .metadata import SUBTASK_INDEX, DatasetInfo, read_info, read_subtasks, read_tasks

_OPTIONS = ("stream", "auto_decode", "device", "dtype")


class VideoClipRef(TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]
    """References to frames of video files, with any batch shape.

    Indexing, stacking and pickling only move frame numbers; `decode` or `frames` decodes the pixels.
    `VideoClipRef("a.mp4")` refers to all frames of a file, and `VideoClipRef("a.mp4", frame_index)` to some, in the
    shape of `frame_index`. The constructors `from_file`, `from_files` and `from_timestamps` accept the options
    `stream`, `auto_decode`, `device` and `dtype`. Names and behaviour match TorchRL.

    Args:
        sources: the path of a file, or the paths of several; stored as a tuple of strings.
        frame_index: the number of each frame in its file, int64 `[*batch]`; all frames of one file by default.
        file_id: the index of each frame's file in `sources`, int64 `[*batch]` or one number; 0 by default.
        stream: None or 0, since only the first video stream of a file is read.
        auto_decode: whether a buffer decodes the frames in its batches.
        out_device, out_dtype: device and type of `frames`, the CPU and uint8 by default.

    Raises:
        UsageError: (a ValueError) `stream` is not 0, `file_id` has another shape than `frame_index`, or there are
            several files and no `frame_index`.

    >>> clip = VideoClipRef("a.mp4", torch.arange(8))
    >>> clip.batch_size, clip.file_id.unique(), clip.rebin(2).frame_index, clip.rebin(2, 2).frame_index.tolist()
    (torch.Size([8]), tensor([0]), tensor([2, 6]), [[0, 3], [4, 7]])
    """

    sources: Any
    frame_index: Any = None
    file_id: Any = None
    stream: Any = None
    auto_decode: Any = False
    out_device: Any = None
    out_dtype: Any = None

    def __post_init__(self) -> None:  # also called for results of indexing, stacking and comparing
        given, frames = self.sources, self.frame_index
        one = isinstance(given, str | os.PathLike)
        if isinstance(given, torch.Tensor):  # the result of a comparison
            return
        if not one and (
            any(not isinstance(path, str | os.PathLike) for path in given)
            or (isinstance(given, tuple) and self.file_id is not None and self.batch_size == frames.shape)
        ):
            return
        require_flags(auto_decode=self.auto_decode)
        if self.stream not in (None, 0):
            raise UsageError(f"stream is {self.stream!r}, expected 0: only the first video of a file is read")
        paths = tuple(os.fspath(path) for path in ([given] if one else given))
        if frames is None and len(paths) != 1:
            raise UsageError(f"frame_index is None, expected numbers of frames of {len(paths)} files")
        frames = torch.as_tensor(torch.arange(_frames_in(paths[0])) if frames is None else frames).to(torch.int64)
        files = torch.as_tensor(0 if self.file_id is None else self.file_id).to(frames)
        if files.ndim and files.shape != frames.shape:
            raise UsageError(f"file_id is {list(files.shape)}, expected the shape of frame_index {list(frames.shape)}")
        device = None if self.out_device is None else torch.device(self.out_device)
        plain = {
            "sources": paths, "stream": self.stream, "auto_decode": self.auto_decode, "out_device": device,
            "out_dtype": self.out_dtype,
        }  # fmt: skip
        self.sources, self.frame_index, self.file_id = paths, frames, files.expand(frames.shape).clone()
        self.batch_size = frames.shape
        for name, value in plain.items():
            if value is not None:  # as non-tensor data, which follows changes of the batch shape
                setattr(self, name, NonTensorData(value, batch_size=frames.shape))

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_file(
        cls,
        path: PathLike,
        num_frames: int | None = None,
        frame_index: torch.Tensor | None = None,
        num_bins: int | None = None,
        frames_per_bin: int | None = None,
        **options: Any,
    ) -> VideoClipRef:
        """Refer to frames of a file: `frame_index`, or the first `num_frames`, or all.

        With `num_bins` and `frames_per_bin`, these frames are reduced by `rebin`.
        """
        frames = torch.arange(num_frames) if frame_index is None and num_frames is not None else frame_index
        return _rebinned(cls(path, frames, **_named(options)), num_bins, frames_per_bin)

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_files(
        cls,
        paths: Sequence[PathLike],
        num_frames_per_file: int | Sequence[int] | None = None,
        num_bins: int | None = None,
        frames_per_bin: int | None = None,
        **options: Any,
    ) -> VideoClipRef:
        """Refer to the first frames of several files, one file after the other, `[total number of frames]`.

        `num_frames_per_file` is one number for all files, or one for each; all frames by default. With `num_bins` and
        `frames_per_bin`, these frames are reduced by `rebin`.
        """
        given = [_frames_in(path) for path in paths] if num_frames_per_file is None else num_frames_per_file
        counts = [int(count) for count in ([given] * len(paths) if isinstance(given, numbers.Integral) else given)]  # type: ignore[union-attr]
        if len(counts) != len(paths) or any(count < 0 for count in counts):
            raise UsageError(f"num_frames_per_file is {counts}, expected a number for each of {len(paths)} files")
        frames = torch.cat([torch.arange(count) for count in counts]) if counts else torch.arange(0)
        places = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
        return _rebinned(cls(tuple(paths), frames, places, **_named(options)), num_bins, frames_per_bin)

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_timestamps(cls, path: PathLike, timestamps: Any, fps: float | None = None, **options: Any) -> VideoClipRef:
        """Refer to the frames nearest to times in seconds: `frame = round(time * fps)`.

        Without `fps`, the times of frames are read from the file. Raises UsageError (a ValueError) for times that are
        negative or not finite, and unless `fps` is above 0.
        """
        if fps is not None and (
            isinstance(fps, bool) or not isinstance(fps, numbers.Real) or not 0 < fps < float("inf")
        ):
            raise UsageError(f"fps is {fps!r}, expected a number above 0")
        times = torch.as_tensor(timestamps, dtype=torch.float64)
        if not bool(((times >= 0) & times.isfinite()).all()):
            raise UsageError("timestamps has negative or non-finite times, expected seconds from 0")
        if fps is None:
            with open_video(Path(path)) as video:
                known = torch.from_numpy(video.index.times)
            frames = torch.bucketize(times, (known[1:] + known[:-1]) / 2)
        else:
            frames = times.mul(fps).round()
        return cls(path, frames, **_named(options))

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files, also of stacked references; UsageError if those refer to different files."""
        found = self.sources
        if isinstance(found, tuple):
            return found
        each: set[Any] = set()
        pending = [found]
        while pending:
            one = pending.pop()
            each |= {one} if isinstance(one, tuple) else set()
            pending += [] if isinstance(one, tuple) else list(one)
        if len(each) != 1:
            raise UsageError("references to different files were stacked", hint="make them of one list of files")
        return tuple(each.pop())

    @property
    def source(self) -> str:
        """The path of the only file; UsageError if there are several."""
        if len(self.paths) != 1:
            raise UsageError(f"there are {len(self.paths)} files, expected one", hint="sources names all of them")
        return self.paths[0]

    @property
    def frames(self) -> torch.Tensor:
        """The decoded frames, on `out_device` and of type `out_dtype`."""
        return self.decode(self.out_device, self.out_dtype)

    def rebin(self, num_bins: int, frames_per_bin: int | None = None) -> VideoClipRef:
        """Divide frames `[n]` into bins of about equal length, and return the middle frame of each, `[num_bins]`.

        With `frames_per_bin`, return that many frames of each bin, evenly spaced from its first to its last:
        `[num_bins, frames_per_bin]`. Raises UsageError (a ValueError) for more bins than frames.
        """
        count = self.frame_index.shape[0] if self.frame_index.ndim == 1 else 0
        if not 0 < num_bins <= count or (frames_per_bin is not None and frames_per_bin < 1):
            raise UsageError(
                f"the frames are {list(self.frame_index.shape)}, expected enough for {num_bins} parts of "
                f"{1 if frames_per_bin is None else frames_per_bin}"
            )
        bounds = np.round(np.linspace(0, count, num_bins + 1))
        first, last = bounds[:-1], bounds[1:] - 1
        places = (first + last) / 2 if frames_per_bin is None else np.linspace(first, last, frames_per_bin, axis=1)
        chosen: VideoClipRef = self[torch.from_numpy(np.round(places).astype(np.int64))]
        return chosen

    def decode(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Decode the frames as uint8 `[*batch, 3, height, width]`; with `dtype`, the same values in that type.

        Raises CorruptDataError for a damaged video, UsageError for frames that a video does not have, and for files
        with frames of different sizes.
        """
        paths, files = self.paths, self.file_id.reshape(-1).numpy(force=True)
        numbers = self.frame_index.reshape(-1).numpy(force=True)
        images: NDArray[np.uint8] | None = None
        for place in np.unique(files).tolist():
            chosen = np.flatnonzero(files == place)
            with open_video(Path(paths[place])) as video:
                found = video.read(numbers[chosen])
            if images is None:
                images = np.empty((len(files), *found.shape[1:]), np.uint8)
            if found.shape[1:] != images.shape[1:]:
                raise UsageError(f"{paths[place]} has frames of another size than {paths[int(files[0])]}")
            images[chosen] = found
        if images is None:
            images = np.zeros((0, 0, 0, 3), np.uint8)
        pixels = torch.from_numpy(images).movedim(-1, -3).contiguous()
        return pixels.reshape(*self.frame_index.shape, *pixels.shape[1:]).to(device=device, dtype=dtype)


def _frames_in(path: PathLike) -> int:
    with open_video(Path(path)) as video:
        return len(video)


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a constructor under the names of the fields."""
    return {f"out_{name}" if name in ("device", "dtype") else name: value for name, value in options.items()}


def _rebinned(clip: VideoClipRef, num_bins: int | None, frames_per_bin: int | None) -> VideoClipRef:
    if num_bins is not None:
        return clip.rebin(num_bins, frames_per_bin)
    if frames_per_bin is not None:
        raise UsageError(f"frames_per_bin is {frames_per_bin}, expected num_bins with it")
    return clip


LANGUAGE: KeyPath = ("language_instruction",)
_NAMED: dict[str, KeyPath] = {"episode_index": ("episode",), "frame_index": ("frame",), "task": LANGUAGE}
_IMAGES = ("observation", "images")


def key_of_column(name: str, key_map: Mapping[str, Any] | None = None) -> KeyPath:
    """Return the key of a column, from `key_map` if it has one, else the key that TorchRL uses."""
    if key_map is not None and name in key_map:
        return as_key(key_map[name])
    if name in _NAMED:
        return _NAMED[name]
    parts = tuple(name.split("."))
    return ("observation", "image", *parts[2:]) if parts[:2] == _IMAGES and len(parts) > 2 else parts


@suggests_keywords()
def lerobot_columns_to_tensordict(
    columns: Mapping[str, Any], *, key_map: Mapping[str, Any] | None = None
) -> TensorDict:
    """Return columns of frames with LeRobot's names as a tensordict of batch size `[N]`.

    `observation.state` becomes `("observation", "state")`, `observation.images.top` becomes `("observation", "image",
    "top")`, `episode_index` `"episode"`, `frame_index` `"frame"`, and `task` `"language_instruction"`; other names are
    nested at their dots. Vectors under `next` get a trailing dimension of one. Names and behaviour match TorchRL.

    Args:
        columns: by name, a tensor or an array `[N, …]`, a `VideoClipRef` `[N]`, or a list of N strings, which becomes
            non-tensor data.
        key_map: keys for some columns, by name, in place of those above.

    Raises:
        UsageError: (a ValueError) there are no columns, or a list has anything but strings.
        SchemaError: (a RuntimeError) columns have different lengths.

    >>> columns = {"action": torch.zeros(2, 3), "next.reward": torch.ones(2), "task": ["open", "open"]}
    >>> rows = lerobot_columns_to_tensordict(columns)
    >>> rows["next", "reward"].shape, list(rows["language_instruction"])
    (torch.Size([2, 1]), ['open', 'open'])
    """
    found: dict[KeyPath, Any] = {}
    for name, column in columns.items():
        key, value = key_of_column(name, key_map), _value_of(name, column)
        if key[0] == "next" and isinstance(value, torch.Tensor) and value.ndim == 1:
            value = value.unsqueeze(-1)
        if key in found:
            raise UsageError(f"two columns have the key {'.'.join(key)}: {name} and another one")
        found[key] = value
    if not found:
        raise UsageError("no columns, expected at least one")
    lengths = {name: len(column) for name, column in columns.items()}
    count = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != count:
            raise SchemaError(f"{name} has {length} rows, and {next(iter(lengths))} has {count}")
    built = TensorDict({}, batch_size=[count])
    for key, value in found.items():
        built.set(key, NonTensorStack(*value) if isinstance(value, list) else value)
    return built


def _value_of(name: str, column: Any) -> Any:
    if isinstance(column, torch.Tensor | VideoClipRef):
        if not column.ndim:
            raise SchemaError(f"{name} is a single value, expected a row for each frame")
        return column
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
        return torch.from_numpy(column)
    values = list(column) if isinstance(column, Sequence | np.ndarray) and not isinstance(column, str) else None
    if not values or not all(isinstance(one, str) for one in values):
        raise UsageError(f"{name} is {type(column).__name__}, expected a tensor, a VideoClipRef or a list of texts")
    return values


class RestoredColumns(Transform):
    """Replaces numbers in a batch by the texts and the video frames that they stand for.

    Args:
        texts: the texts of an entry by number, under the pair of the entry's key and the key for its texts, which may
            be the same.
        clips: the video files of an entry by its key; its rows are int64 `[2]`, the index of a file and a frame.
        decode: whether frames are decoded to uint8 `[3, height, width]`; else batches have a `VideoClipRef`.
    """

    def __init__(
        self,
        texts: Mapping[tuple[KeyPath, KeyPath], Mapping[int, str]],
        clips: Mapping[KeyPath, tuple[str, ...]],
        *,
        decode: bool = True,
    ) -> None:
        super().__init__()
        self.texts, self.clips, self.decode = dict(texts), dict(clips), decode

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self).copy()
        for (key, out), texts in self.texts.items():
            if (numbers := batch.get(key, None)) is not None:
                batch.set(out, _stacked([texts.get(int(one), "") for one in numbers.reshape(-1)], batch))
        for key, sources in self.clips.items():
            if (rows := batch.get(key, None)) is not None:
                clip: Any = VideoClipRef(sources, rows[..., 1], rows[..., 0])
                batch.set(key, clip.decode() if self.decode else clip)
        return batch


def _stacked(texts: list[str], batch: TensorDictBase) -> Any:
    if not batch.batch_size:
        return NonTensorData(texts[0])
    return NonTensorStack(*texts).reshape(batch.batch_size) if batch.ndim > 1 else NonTensorStack(*texts)


def stored_columns(rows: TensorDict, *, decode: bool) -> tuple[TensorDict, RestoredColumns]:
    """Return rows with texts and video frames replaced by numbers, and the transform that restores them."""
    texts: dict[tuple[KeyPath, KeyPath], dict[int, str]] = {}
    clips: dict[KeyPath, tuple[str, ...]] = {}
    built = TensorDict({}, batch_size=rows.batch_size)
    for key, value in _leaves(rows):
        if isinstance(value, VideoClipRef):
            clips[key] = value.paths
            value = torch.stack((value.file_id, value.frame_index), dim=-1)
        elif not isinstance(value, torch.Tensor):
            words = [str(one) for one in value.tolist()]
            codes = {word: number for number, word in enumerate(dict.fromkeys(words))}
            texts[key, key] = {number: word for word, number in codes.items()}
            value = torch.tensor([codes[word] for word in words])
        built.set(key, value)
    return built, RestoredColumns(texts, clips, decode=decode)


def with_next_observations(rows: TensorDict) -> TensorDict:
    """Return rows with `("next", "observation", …)`, the observation of the following row of the same episode.

    At the end of an episode, and where `("next", "done")` is set, it is NaN, or 0 in types without NaN. Video frames
    get no next ones, with a warning. Raises UsageError (a ValueError) for rows without `episode`.
    """
    if rows.get("episode", None) is None:
        raise UsageError("rehydrate=True needs the column episode_index, which separates episodes")
    episode, frame, done = (rows.get(key, None) for key in ("episode", "frame", ("next", "done")))
    follows = torch.zeros(len(rows), dtype=torch.bool)
    follows[:-1] = episode.reshape(-1)[1:] == episode.reshape(-1)[:-1]
    if frame is not None:
        follows[:-1] &= frame.reshape(-1)[1:] == frame.reshape(-1)[:-1] + 1
    if done is not None:
        follows &= ~done.reshape(-1).bool()
    built = rows.copy()
    for key, value in _leaves(rows):
        if key[0] != "observation":
            continue
        if not isinstance(value, torch.Tensor):
            warn_caller(f"{'.'.join(key)} has no next rows: they are not decoded")
            continue
        after = torch.full_like(value, float("nan") if value.is_floating_point() else 0)
        after[:-1][follows[:-1]] = value[1:][follows[:-1]]
        built.set(("next", *key), after)
    return built


def _leaves(rows: TensorDictBase, lead: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the columns with their keys: tensors, references to frames, and texts."""
    for name in rows.keys():  # noqa: SIM118  # iterating over a tensordict yields rows, not keys
        value = rows.get(name)
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            yield from _leaves(value, (*lead, name))
        else:
            yield (*lead, name), value


class LeRobotExperienceReplay(SourceExperienceReplay):
    """A replay buffer of TED steps on a LeRobot dataset, which is downloaded first if it is not stored yet.

    - `repo_id`: the repository on the hub, `OWNER/NAME`.
    - `root`: the folder that holds the dataset at `<root>/<repo_id>`; `lerobot` below the storage root by default.
    - `download`: whether a dataset that is not stored is downloaded; `"force"` downloads it again and replaces it.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `num_slices` or `slice_len`: sample slices of episodes with a `SliceSampler`; `strict_length` is its argument.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as for `ReplayBuffer`; the default
      writer refuses to add anything.
    - `key_map`: other keys for columns, by LeRobot's names, like `{"observation.state": "state"}`.
    - `decode_video`: whether batches contain the frames of videos, uint8 `[*batch, 3, height, width]`; otherwise they
      contain references under `"video"`, and nothing is decoded.
    - `rehydrate`: accepted for compatibility, without effect: next observations are always present.

    Elements have `("observation", "state")`, `("observation", "image", NAME)`, `action`, `episode`, `frame`,
    `language_instruction` (text), `subtask` (text, if the dataset has subtasks), and `("next", …)` with the
    observations after the step, never from another episode. LeRobot stores no observation after the last frame of an
    episode. In a dataset with rewards, a last frame that does not terminate the episode is therefore no step of its
    own; in a dataset without rewards it is, and its observation is repeated. LeRobot's `index` is `("info", "index")`;
    `"index"` belongs to the sampler. A stored dataset is opened without network access.

    `from_columns` makes a buffer from columns in memory. Names and behaviour match TorchRL.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) the hub does not have the repository, or the dataset is not stored
            and may not be downloaded.
        CorruptDataError: the dataset is damaged.
        UsageError: (a ValueError) an argument is invalid.
        RbtoolError: any error of `rbtool.download`.
    """

    source = "lerobot"

    def __init__(
        self,
        repo_id: str,
        *,
        root: PathLike | None = None,
        download: bool | str = True,
        batch_size: int | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        key_map: Mapping[str, Any] | None = None,
        decode_video: bool = True,
        rehydrate: bool = False,
        strict_length: bool = True,
        pin_memory: bool = False,
        prefetch: int | None = None,
    ) -> None:
        require_flags(decode_video=decode_video, rehydrate=rehydrate, strict_length=strict_length)
        self.repo_id = repo_id
        self.decode_video = decode_video
        self.rehydrate = rehydrate
        self._key_map = dict(key_map or {})
        sampler = _sampler(sampler, num_slices, slice_len, strict_length=strict_length)
        super().__init__(
            repo_id,
            root=root,
            download=download,
            split_trajs=False,
            local=False,
            batch_size=batch_size,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )

    def transform_for(self, reader: StepReader, transform: Any) -> Any:
        """Return the transform that adds texts, decodes videos and renames keys, followed by the user's transform."""
        parts: list[Any] = [RestoredColumns(texts, {})] if (texts := _texts_of(reader.path)) else []
        if self._key_map:
            names = list(self._key_map)
            new = [key_of_column(name, self._key_map) for name in names]
            parts.append(RenameTransform([key_of_column(name) for name in names], new))
        looking_back, others = divided(transform)
        chain = Compose(*looking_back, *parts, *others)
        return with_frames(reader, chain, channels_first=True) if self.decode_video else chain

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        repo_id: str = "local",
        root: PathLike | None = None,
        key_map: Mapping[str, Any] | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_length: bool = True,
        decode_video: bool = True,
        rehydrate: bool = False,
        sampler: Any = None,
        transform: Any = None,
        **arguments: Any,
    ) -> Self:
        """Make a buffer from columns in memory, in the form that `lerobot_columns_to_tensordict` accepts.

        Batches contain texts as texts, and the frames of a `VideoClipRef` decoded, or references without
        `decode_video`. With `rehydrate`, rows have `("next", "observation", …)`: the following row of the episode; at
        its end NaN, or 0 in types without NaN. A column that is not a sequence is left out, with a warning. Nothing is
        written, and `root` is not created. The other arguments are as for the class.
        """
        require_flags(decode_video=decode_video, rehydrate=rehydrate, strict_length=strict_length)
        usable = {name: column for name, column in columns.items() if _is_usable(name, column)}
        named = lerobot_columns_to_tensordict(usable, key_map=key_map)
        named = with_next_observations(named) if rehydrate else named
        rows, restored = stored_columns(named, decode=decode_video)
        looking_back, others = divided(transform)
        buffer = cls.__new__(cls)
        buffer.root = SourceFolder.below(cls.source, root).folder
        buffer.repo_id = buffer.dataset_id = repo_id
        buffer.decode_video, buffer.rehydrate, buffer._key_map = decode_video, rehydrate, dict(key_map or {})
        chosen = _sampler(sampler, num_slices, slice_len, strict_length=strict_length)
        DatasetReplayBuffer.__init__(
            buffer,
            storage=TensorStorage(rows),
            sampler=chosen,
            transform=Compose(*looking_back, restored, *others),
            **arguments,
        )
        return buffer


def _sampler(sampler: Any, num_slices: int | None, slice_len: int | None, *, strict_length: bool) -> Any:
    if num_slices is not None and slice_len is not None:
        raise UsageError(f"num_slices is {num_slices} and slice_len is {slice_len}, expected one of them")
    if num_slices is None and slice_len is None:
        return sampler
    if sampler is not None:
        raise UsageError("sampler is set, expected None with num_slices or slice_len", hint="leave one out")
    return SliceSampler(num_slices=num_slices, slice_len=slice_len, traj_key="episode", strict_length=strict_length)


def _texts_of(dataset: Path) -> dict[tuple[KeyPath, KeyPath], dict[int, str]]:
    """Return the texts of tasks and subtasks for `RestoredColumns`, from LeRobot's metadata in the dataset."""
    root = dataset / HIDDEN / "source"
    if not (root / "meta").is_dir():
        return {}
    info: DatasetInfo = read_info(root)
    found = {(("task_index",), LANGUAGE): read_tasks(info), ((SUBTASK_INDEX,), ("subtask",)): read_subtasks(info)}
    return {key: texts for key, texts in found.items() if texts}


def _is_usable(name: str, column: Any) -> bool:
    usable = column is not None and hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
    if not usable:
        warn_caller(f"the column {name!r} is left out: it is a {type(column).__name__}")
    return usable
