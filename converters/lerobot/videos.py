"""The videos of a dataset: whether they have the frames of the rows, and which frame belongs to which row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.encodings.video import VideoFile, VideoIndex
from ...core.errors import FormatError
from ...core.format.contracts import Array, Closing
from ...core.format.files import LEAVES_OUT, digest_file
from ...core.format.videos import index_name, video_id, video_name
from .fields import FeatureColumn, as_stated
from .metadata import DatasetInfo, FrameEpisode, require_content

WITHOUT_IMAGES = f"--images skip takes the steps without images{LEAVES_OUT}"


@dataclass(frozen=True, slots=True)
class FoundVideo:
    """A file of a video: the number of frames that its header states, and, if it is kept, its id and its index."""

    frames: int
    number: int = 0
    index: VideoIndex | None = None


class VideoSurvey:
    """Looks at the videos of the features `columns`; of those that are kept, reads the packets and takes digests."""

    def __init__(self, info: DatasetInfo, columns: Iterable[FeatureColumn]) -> None:
        self._info = info
        self._columns = list(columns)
        self._looked: dict[str, FoundVideo | FormatError] = {}
        self._longer: Counter[str] = Counter()
        # The frames of each video that rows need, and the episode of the rows.
        self._spans: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
        self._short = 0

    def require(self, episode: FrameEpisode) -> None:
        """Raise FormatError where a video is missing, is damaged, or has not the frames of the rows of an episode."""
        longer, spans, fps, short = [], [], self._info.fps, False
        for column in self._columns:
            place = episode.videos[column.name]
            path = self._info.root / place.path
            found = self._look_at(place.path, column)
            if isinstance(found, FormatError):
                raise type(found)(f"{found.message}; episode {episode.number} needs it", hint=found.hint)
            first = round(place.start * fps) + episode.frame
            needed = first + len(episode)
            spans.append(((column.name, place.path), (first, needed, episode.number)))
            short |= place.stop is not None and (place.stop - place.start) * fps < len(episode) - 0.5
            if found.frames and found.frames < needed:
                raise FormatError(
                    f"{path} has {found.frames:,} frames, and the rows of episode {episode.number} need {needed:,}",
                    hint=WITHOUT_IMAGES,
                )
            if found.index is not None:
                frames_of(episode, column.name, found.index, self._info)
            longer += [column.name] if not self._info.shares_files and found.frames > needed else []
        self._longer.update(longer)
        self._short += short
        for file, span in spans:
            self._spans[file].append(span)

    def shared(self) -> dict[int, FormatError]:
        """Return the episodes that have a frame in common with another one: of one of them it is another's."""
        found: dict[int, FormatError] = {}
        for (_, path), spans in self._spans.items():
            _, furthest, one = min(spans)
            for first, stop, other in sorted(spans)[1:]:
                if first < furthest:
                    error = FormatError(
                        f"{self._info.root / path}: frame {first:,} would be of a row of episode {one} and of one of "
                        f"episode {other}, by the times in the metadata",
                        hint=WITHOUT_IMAGES,
                    )
                    found.setdefault(one, error)
                    found.setdefault(other, error)
                furthest, one = max((furthest, one), (stop, other))
        return found

    def _look_at(self, path: str, column: FeatureColumn) -> FoundVideo | FormatError:
        if path not in self._looked:
            try:
                self._looked[path] = self._found(self._info.root / path, column)
            except FormatError as error:
                self._looked[path] = error
        return self._looked[path]

    def _found(self, path: Path, column: FeatureColumn) -> FoundVideo:
        require_content(path, f"it has frames of {column.name}", hint=WITHOUT_IMAGES)
        with VideoFile(path) as video:
            if not column.is_kept:
                return FoundVideo(video.stated_frames)
            as_stated(np.empty((0, *video.shape), np.uint8), column, str(path))
            return FoundVideo(len(video), video_id(digest_file(path)), video.index)

    def found(self) -> dict[str, FoundVideo]:
        """Return the videos that can be read, by path."""
        return {path: one for path, one in self._looked.items() if isinstance(one, FoundVideo)}

    def notes(self) -> Iterator[str]:
        """State what is kept, and count the videos that have frames beyond the rows."""
        if kept := [column.name for column in self._columns if column.is_kept]:
            yield f"videos are kept, and frames decoded when batches are read ({', '.join(kept)})"
        if self._short:
            yield (
                f"to_timestamp of {self._short:,} episode{'s' * (self._short > 1)} leaves fewer frames than there are "
                "rows: the frames of the rows are found from from_timestamp on"
            )
        for name, count in self._longer.items():
            yield (
                f"{count:,} video{'s' if count > 1 else ''} of {name} have more frames than there are rows: the frames "
                "of the rows are found by their times, the others are left out"
            )


def frames_of(episode: FrameEpisode, name: str, index: VideoIndex, info: DatasetInfo) -> Array:
    """Return the frames of the rows of an episode in its video: int64 `[rows]`; FormatError where there are none."""
    place = episode.videos[name]
    times = place.start + (episode.frame + np.arange(len(episode))) / info.fps
    return index.frames_at(times, info.fps, info.root / place.path)


def kept_contents(info: DatasetInfo, videos: Mapping[str, FoundVideo]) -> dict[str, Path | bytes]:
    """Return the files of kept videos under the names that they have in a dataset, with their indexes."""
    found: dict[str, Path | bytes] = {}
    for path, video in videos.items():
        if video.index is not None:
            found[video_name(video.number)] = info.root / path
            found[index_name(video.number)] = video.index.to_bytes()
    return found


class EpisodeVideos(Closing):
    """The videos of one episode at a time, one of each feature; `known` are those that were looked at."""

    def __init__(self, info: DatasetInfo, known: Mapping[str, FoundVideo]) -> None:
        self._info = info
        self._known = known
        self._open: dict[str, VideoFile] = {}
        self._frames: dict[str, tuple[int, Array]] = {}

    def read(self, episode: FrameEpisode, column: FeatureColumn, start: int, stop: int) -> Array:
        """Decode the frames of rows `[start, stop)` into uint8 `[rows, *shape]`; of a kept video, refer to them.

        References are int64 `[rows, 2]`: the id of the file, and the frame.
        """
        path = episode.videos[column.name].path
        found = self._known[path]
        if found.index is not None:
            frames = self._frames_of(episode, column.name, found.index)[start:stop]
            return np.stack((np.full(len(frames), found.number), frames), axis=1)
        video = self._open.get(column.name)
        if video is None or video.path != self._info.root / path:
            if video is not None:
                video.close()
            video = self._open[column.name] = VideoFile(self._info.root / path)
            self._frames.pop(column.name, None)
        as_stated(np.empty((0, *video.shape), np.uint8), column, str(video.path))
        frames = self._frames_of(episode, column.name, video.index)
        return as_stated(video.read(frames[start:stop]), column, str(video.path))

    def _frames_of(self, episode: FrameEpisode, name: str, index: VideoIndex) -> Array:
        known = self._frames.get(name)
        if known is None or known[0] != episode.number:
            known = self._frames[name] = episode.number, frames_of(episode, name, index, self._info)
        return known[1]

    def close(self) -> None:
        """Close all videos."""
        while self._open:
            self._open.popitem()[1].close()
        self._frames.clear()
