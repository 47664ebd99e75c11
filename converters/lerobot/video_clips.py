"""References to frames of video files, as a tensorclass: nothing is decoded until `decode`."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorClass

from ...core.encodings.video import open_video
from ...core.errors import UsageError, suggests_keywords

_OPTIONS = ("stream", "auto_decode", "device", "dtype")


class VideoClipRef(TensorClass):
    """Frames of video files, of any batch shape; indexing, stacking and pickling move numbers alone.

    - `sources`: the paths of the files, each once, a tuple of text.
    - `frame_index`: the number of each frame in its file, int64 `[*batch]`.
    - `file_id`: the place of its file in `sources`, int64 `[*batch]`.
    - `stream`: None; files have one video stream that is read.
    - `auto_decode`: whether a buffer decodes the frames in the batches that it gives.
    - `out_device`, `out_dtype`: what `frames` has, by default the CPU and uint8.

    Made by `from_file`, `from_files` or `from_timestamps`, which take `stream`, `auto_decode`, and, for `frames`,
    `device` and `dtype`. Names and form match TorchRL.
    """

    sources: Any
    frame_index: Any
    file_id: Any
    stream: Any = None
    auto_decode: Any = None
    out_device: Any = None
    out_dtype: Any = None

    @classmethod
    def from_frames(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        frame_index: torch.Tensor,
        file_id: torch.Tensor,
        *,
        stream: int | None = None,
        auto_decode: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> VideoClipRef:
        """Refer to these frames of these files; UsageError (a ValueError) for a `stream` but the first video."""
        if stream not in (None, 0):
            raise UsageError(f"stream is {stream!r}, and the first video of a file is what is read")
        plain = {
            "sources": tuple(os.fspath(path) for path in paths), "stream": stream, "auto_decode": auto_decode,
            "out_device": None if device is None else torch.device(device), "out_dtype": dtype,
        }  # fmt: skip
        given: dict[str, Any] = {
            name: NonTensorData(value, batch_size=frame_index.shape)
            for name, value in plain.items()
            if value is not None
        }
        return cls(
            frame_index=frame_index.to(torch.int64), file_id=file_id.to(torch.int64), batch_size=frame_index.shape,
            **given,
        )  # fmt: skip

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_file(cls, path: str | os.PathLike[str], num_frames: int | None = None, **options: Any) -> VideoClipRef:
        """Refer to the first `num_frames` frames of a file, by default to all: `[num_frames]`."""
        return cls.from_files([path], [_frames_in(path) if num_frames is None else num_frames], **options)

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_files(
        cls, paths: Sequence[str | os.PathLike[str]], num_frames_per_file: Sequence[int], **options: Any
    ) -> VideoClipRef:
        """Refer to the first frames of several files, one file after the other: `[sum of the numbers]`."""
        counts = [int(count) for count in num_frames_per_file]
        if len(counts) != len(paths) or any(count < 0 for count in counts):
            raise UsageError(f"num_frames_per_file is {counts}, expected a number for each of {len(paths)} files")
        frames = torch.cat([torch.arange(count) for count in counts]) if counts else torch.arange(0)
        places = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
        return cls.from_frames(paths, frames, places, **options)

    @classmethod
    @suggests_keywords(*_OPTIONS)
    def from_timestamps(cls, path: str | os.PathLike[str], timestamps: Any, fps: float, **options: Any) -> VideoClipRef:
        """Refer to the frames nearest to these times, in seconds: `frame = round(time * fps)`.

        UsageError (a ValueError) for times that are not from 0, and for an `fps` that is not above 0.
        """
        if isinstance(fps, bool) or not isinstance(fps, numbers.Real) or not 0 < fps < float("inf"):
            raise UsageError(f"fps is {fps!r}, expected a number above 0")
        times = torch.as_tensor(timestamps, dtype=torch.float64)
        if not bool(((times >= 0) & times.isfinite()).all()):
            raise UsageError("the timestamps are not all numbers from 0")
        frames = times.mul(fps).round().to(torch.int64)
        return cls.from_frames([path], frames, torch.zeros_like(frames), **options)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, whether references were stacked or not; UsageError where others were stacked with them."""
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
        """The file, where there is one; UsageError where there are several."""
        if len(self.paths) != 1:
            raise UsageError(f"there are {len(self.paths)} files, expected one", hint="sources names all of them")
        return self.paths[0]

    @property
    def frames(self) -> torch.Tensor:
        """The decoded frames, as `out_device` and `out_dtype` state."""
        return self.decode(self.out_device, self.out_dtype)

    def rebin(self, bins: int, k: int | None = None) -> VideoClipRef:
        """Cut the frames, `[n]`, into `bins` parts of about equal length: the middle of each, `[bins]`, or `k` of each.

        Those are spread evenly, `[bins, k]`. UsageError (a ValueError) for more parts than frames.
        """
        count = self.frame_index.shape[0] if self.frame_index.ndim == 1 else 0
        if not 0 < bins <= count or (k is not None and k < 1):
            raise UsageError(
                f"the frames are {list(self.frame_index.shape)}, expected enough for {bins} parts of {k or 1}"
            )
        bounds = np.linspace(0, count, bins + 1)
        shares = (np.arange(k or 1) + 0.5) / (k or 1)
        places = np.floor(bounds[:-1, None] + np.diff(bounds)[:, None] * shares).astype(np.int64)
        chosen: VideoClipRef = self[torch.from_numpy(places if k is not None else places[:, 0])]
        return chosen

    def decode(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Decode the frames: uint8 `[*batch, 3, height, width]`, or of another type, with the same values.

        CorruptDataError for a video that is damaged, UsageError for frames that it does not have, and for files whose
        frames have different sizes.
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


def _frames_in(path: str | os.PathLike[str]) -> int:
    with open_video(Path(path)) as video:
        return len(video)
