"""Images of rows: columns of encoded images, decoded by Pillow, and frames of videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.images import ImageForm, decode_image
from ...core.encodings.video import VideoFile
from ...core.errors import FormatError
from ...core.format.contracts import Array, Closing
from .fields import FeatureColumn
from .info import DatasetInfo
from .rows import column_of
from .survey import FrameEpisode


def as_stated(image: Array, column: FeatureColumn, what: str) -> Array:
    """Bring images `[..., height, width, channels]` to the stated form; FormatError where they have another one."""
    found = np.moveaxis(image, -1, -3) if column.channels_first else image
    if found.shape[-3:] != column.field.shape:
        raise FormatError(
            f"{what}: images have the shape {list(found.shape[-3:])}, info.json states {list(column.field.shape)}"
        )
    return found


def column_images(table: Any, column: FeatureColumn, path: Path, start: int) -> Array:
    """Decode a column of structs with the bytes of images into uint8 `[rows, *shape]`; `start` is the first row."""
    shape = column.field.shape
    height, width, channels = (*shape[1:], shape[0]) if column.channels_first else shape
    form = ImageForm("uint8", (height, width, channels))
    images = np.empty((table.num_rows, *shape), np.uint8)
    for row, value in enumerate(column_of(table, column.name).to_pylist()):
        what = f"{path}: {column.name!r}, row {start + row:,}"
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes) or not data:
            raise FormatError(f"{what} has no bytes of an image")
        images[row] = as_stated(decode_image(data, form, what), column, what)
    return images


class EpisodeVideos(Closing):
    """The videos of one episode at a time, one of each feature."""

    def __init__(self, info: DatasetInfo) -> None:
        self._info = info
        self._open: dict[str, VideoFile] = {}
        self._frames: dict[str, tuple[int, Array]] = {}

    def read(self, episode: FrameEpisode, column: FeatureColumn, start: int, stop: int) -> Array:
        """Decode the frames of rows `[start, stop)` of an episode into uint8 `[rows, *shape]`."""
        video, frames = self.frames(episode, column.name)
        return as_stated(video.read(frames[start:stop]), column, str(video.path))

    def frames(self, episode: FrameEpisode, name: str) -> tuple[VideoFile, Array]:
        """Return the video of an episode, and the numbers of its frames there, int64 `[rows]`."""
        place, path = episode.videos[name], self._info.root / episode.videos[name].path
        video = self._open.get(name)
        if video is None or video.path != path:
            if video is not None:
                video.close()
            self._open.pop(name, None)
            self._frames.pop(name, None)
            video = self._open[name] = VideoFile(path)
        known = self._frames.get(name)
        if known is None or known[0] != episode.number:
            times = place.start + (episode.frame + np.arange(len(episode))) / self._info.fps
            known = self._frames[name] = episode.number, video.frames_at(times, self._info.fps)
        return video, known[1]

    def close(self) -> None:
        """Close all videos."""
        while self._open:
            self._open.popitem()[1].close()
        self._frames.clear()
