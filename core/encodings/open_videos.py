"""Videos that stay open between reads of their frames: a few in each process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.contracts import Array
from ..format.digest import read_regular
from ..format.manifest import VIDEOS
from ..format.videos import index_name, video_name
from .video import CHANNELS, VideoFile, VideoIndex

_State: TypeAlias = tuple[str, int, int, int]
DEFAULT_SIZE = 8
_IDS = 1 << 60


class _OpenVideos:
    """Videos that nobody uses at the moment, the one used last at the end; each is used by one thread at a time."""

    def __init__(self) -> None:
        self.size = DEFAULT_SIZE
        self._lock = threading.Lock()
        self._idle: list[tuple[_State, VideoFile]] = []
        self._forked: list[VideoFile] = []

    def take(self, path: Path, index: Callable[[], VideoIndex | None]) -> tuple[_State, VideoFile]:
        state = _state_of(path)
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                if self._idle[place][0] == state:
                    return self._idle.pop(place)
        return state, VideoFile(path, index(), threads=1)

    def give_back(self, state: _State, video: VideoFile) -> None:
        with self._lock:
            self._idle.append((state, video))
        self.shrink(self.size)

    def shrink(self, size: int) -> None:
        """Close the videos that were used longest ago, until so many are open."""
        with self._lock:
            more = max(0, len(self._idle) - size)
            closed, self._idle = self._idle[:more], self._idle[more:]
        for _, video in closed:
            video.close()

    def close_below(self, folder: str) -> None:
        with self._lock:
            closed = [video for state, video in self._idle if state[0].startswith(folder)]
            self._idle = [one for one in self._idle if not one[0][0].startswith(folder)]
        for video in closed:
            video.close()

    def after_fork(self) -> None:
        """Leave the videos of the parent alone: the threads of their decoders are not in this process."""
        self._lock = threading.Lock()
        self._forked += [video for _, video in self._idle]
        self._idle = []


_videos = _OpenVideos()
os.register_at_fork(after_in_child=_videos.after_fork)


@contextlib.contextmanager
def open_video(path: Path, index: Callable[[], VideoIndex | None] = lambda: None) -> Iterator[VideoFile]:
    """Open a video for this thread, or take one that is open; it stays open. `index` gives its index where it has one.

    What raised inside closes the video.
    """
    state, video = _videos.take(path, index)
    try:
        yield video
    except BaseException:
        video.close()
        raise
    _videos.give_back(state, video)


def set_video_decoder_cache_size(size: Any) -> None:
    """Set how many videos stay open in this process, 8 by default. UsageError (a ValueError) for less than 0."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UsageError(f"the size is {size!r}, expected a number of videos from 0")
    _videos.size = size
    _videos.shrink(size)


def clear_video_decoder_cache() -> None:
    """Close all videos that stay open in this process."""
    _videos.shrink(0)


def close_videos_below(folder: Path) -> None:
    """Close the videos of a folder that stay open in this process and are not read now."""
    _videos.close_below(f"{folder}{os.sep}")


def _state_of(path: Path) -> _State:
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def referred_frames(folder: Path, references: Array) -> Array:
    """Decode the frames `[n, height, width, 3]` that rows `[n, 2]` of a video's id and a frame's number refer to.

    Raises as `kept_frames`.
    """
    if not len(references):
        return np.zeros((0, 1, 1, CHANNELS), np.uint8)
    changes = np.flatnonzero(np.diff(references[:, 0])) + 1
    runs = np.split(references, changes)
    return np.concatenate([kept_frames(folder, int(run[0, 0]), run[:, 1]) for run in runs])


def kept_frames(folder: Path, number: int, frames: Array) -> Array:
    """Decode these frames of the video with the id `number` that the dataset at `folder` keeps, as `VideoFile.read`.

    SchemaError for what is no id, CorruptDataError for a file that is missing, damaged, or too short for its rows.
    """
    if not 0 < number < _IDS:
        raise SchemaError(f"{number} is no id of a video")
    path = folder / f"{VIDEOS}{video_name(number)}"
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing: rows refer to its frames")
    index = folder / f"{VIDEOS}{index_name(number)}"
    with open_video(path, lambda: VideoIndex.from_bytes(read_regular(index), str(index))) as video:
        if len(frames) and not (frames.min() >= 0 and frames.max() < len(video)):
            raise CorruptDataError(f"{path} has {len(video):,} frames, rows refer to frame {int(frames.max()):,}")
        return video.read(frames)
