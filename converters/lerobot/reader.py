"""Reads and downloads datasets of LeRobot: rows of Parquet files, with the frames of videos.

A Parquet file has a row for each frame, with columns of numbers, text and encoded images. A first pass over the small
columns of all files finds the rows of each episode, and the problems of episodes that cannot be read; it also checks
that videos have the frames of the rows. Neither lerobot nor torch is imported.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.encodings.video import VideoFile, VideoIndex
from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array, Closing, EpisodeBlock, Piece, SourceFacts, SourceMetadata
from ...core.format.converter import PartsReader, RemoteDataset, RemoteFile, RemoteShard, refuse_damaged, safe_id
from ...core.format.documents import dump_json, parse_json
from ...core.format.episodes import EpisodeRanges, select_episodes
from ...core.format.files import FETCH_AGAIN, LEAVES_OUT, digest_file, no_match, open_regular, read_regular
from ...core.format.language import TASK, TASKS
from ...core.format.manifest import Dropped
from ...core.format.videos import VIDEOS_KEPT, index_name, video_id, video_name
from ...core.progress import counted
from ...core.remote.hub import HubRepositorySource
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD
from ..files.arrow import require_bounded_parquet
from ..files.images import ImageForm, Images, decode_image, image_form, require_images
from ..files.readers import EndMeaning, SurveyedReader, meaning_of_ends, refuse_ends
from .metadata import (
    EPISODE_INDEX,
    FRAME_INDEX,
    IMAGE,
    INFO,
    NEXT_DONE,
    NEXT_FLAGS,
    NEXT_SUCCESS,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SPOKEN,
    TASK_INDEX,
    TIMESTAMP,
    VIDEO,
    DatasetInfo,
    EndFlags,
    EpisodeEntry,
    FeatureColumn,
    FeatureColumns,
    FrameEpisode,
    as_stated,
    columns_of,
    looks_like_lerobot,
    paths_of,
    read_episodes,
    read_info,
    read_tasks,
    require_content,
    runs_of,
    source_metadata,
)
from .statistics import PictureCounts, listed, of_all, sampled_frames

_BATCH_BYTES = 4 << 20
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_TEXT = (pa.types.is_string, pa.types.is_large_string)


@dataclass
class _RowCursor:
    """The state of a sequential read: the next row is `position`.

    `left` holds batches that were read but not returned yet; `batches` yields those after them.
    """

    names: tuple[str, ...]
    position: int
    batches: Iterator[Any]
    left: list[Any]


class RowsFile(Closing):
    """A Parquet file from which ranges of rows are read; ascending ranges are read in one pass."""

    def __init__(self, path: Path) -> None:
        require_content(path, "it has the rows of episodes")
        self.path = path
        self._opened = os.fdopen(open_regular(path), "rb")
        try:
            with damage_of(path):
                require_bounded_parquet(path)
                self._file = pq.ParquetFile(
                    self._opened, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
                )
                self.schema = self._file.schema_arrow
                self.rows = int(self._file.metadata.num_rows)
                groups = [self._file.metadata.row_group(place).num_rows for place in range(self._file.num_row_groups)]
            names = self.schema.names
            if len(set(names)) < len(names):
                raise FormatError(f"{path} has several columns of one name")
            self._groups = np.cumsum([0, *groups])
            self._cursor: _RowCursor | None = None
        except BaseException:
            self.close()
            raise

    def read(self, names: Sequence[str], start: int, stop: int) -> Any:
        """Read rows `[start, stop)` of these columns as an Arrow table."""
        wanted = tuple(names)
        cursor = self._cursor
        with damage_of(self.path):
            if cursor is None or cursor.names != wanted or cursor.position > start:
                cursor = self._cursor = self._started(wanted, start)
            try:
                self._pass_over(cursor, start - cursor.position)
                parts = list(self._take(cursor, stop - start))
                if not parts:
                    return self.schema.empty_table().select(list(wanted))
                return pa.Table.from_batches(parts).combine_chunks()
            except BaseException:
                self._cursor = None
                raise

    def _started(self, names: tuple[str, ...], start: int) -> _RowCursor:
        group = max(0, int(np.searchsorted(self._groups, start, side="right")) - 1)
        groups = list(range(group, self._file.num_row_groups))
        size = self._file.metadata.row_group(group).total_byte_size if groups else 0
        rows = max(1, int(self._groups[group + 1] - self._groups[group])) if groups else 1
        batches = self._file.iter_batches(
            batch_size=max(1, min(4096, _BATCH_BYTES // max(1, size // rows))),
            row_groups=groups, columns=list(names), use_threads=False,
        )  # fmt: skip
        return _RowCursor(names, int(self._groups[group]), iter(batches), [])

    def _pass_over(self, cursor: _RowCursor, count: int) -> None:
        for _ in self._take(cursor, count):
            pass

    def _take(self, cursor: _RowCursor, count: int) -> Iterator[Any]:
        """Yield the next `count` rows, in batches."""
        while count > 0:
            batch = cursor.left.pop() if cursor.left else next(cursor.batches, None)
            if batch is None:
                raise CorruptDataError(f"{self.path} ends before its row {cursor.position + count:,}")
            if batch.num_rows > count:
                cursor.left.append(batch.slice(count))
                batch = batch.slice(0, count)
            cursor.position += batch.num_rows
            count -= batch.num_rows
            if batch.num_rows:
                yield batch

    def close(self) -> None:
        self._opened.close()


class damage_of:  # reads as a function where it is used
    """Turns exceptions that pyarrow raises for damaged files into CorruptDataError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError | ValueError | LookupError | pa.ArrowException):
            return
        if isinstance(error, FormatError) or getattr(error, "errno", None) is not None:
            return
        reason = " ".join(str(error).split())[:200]
        raise CorruptDataError(f"{self._path} cannot be read, it is damaged or was cut: {reason}") from error


def stored_form(kind: Any) -> str:
    """Return the element type of a column, inside lists: NumPy's name for numbers, `string`, or Arrow's name."""
    while any(test(kind) for test in _LISTS):
        kind = kind.value_type
    if any(test(kind) for test in _NUMBERS):
        return str(np.dtype(kind.to_pandas_dtype()))
    return "string" if any(test(kind) for test in _TEXT) else str(kind)


def numbers_of(table: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], path: Path) -> Array:
    """Return a column as an array `[rows, *shape]`; FormatError for missing values or lists that do not fit."""
    values = column_of(table, name)
    sizes: list[int] = []
    while any(test(values.type) for test in _LISTS):
        _require_values(values, name, path)
        if pa.types.is_fixed_size_list(values.type):
            lengths = [values.type.list_size]
        else:
            lengths = pc.unique(pc.list_value_length(values)).to_pylist() or [0]
        if len(lengths) > 1:
            raise FormatError(
                f"{path}: {name!r} has lists of {lengths[0]} and of {lengths[1]} elements, but the shape {list(shape)} "
                "in info.json"
            )
        sizes += lengths
        values = values.flatten()
    _require_values(values, name, path)
    array: Array = values.to_numpy(zero_copy_only=False)
    size = math.prod(shape)
    # A vector of one number may be stored as a plain column, and an array of several dimensions as one flat list.
    if table.num_rows and (math.prod(sizes) != size or (len(sizes) > 1 and tuple(sizes) != shape)):
        raise FormatError(f"{path}: {name!r} has rows of the shape {sizes}, info.json states {list(shape)}")
    return np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(table.num_rows, *shape)


def texts_of(table: Any, name: str, path: Path) -> list[str]:
    """Return a column as strings; FormatError for missing values."""
    values = column_of(table, name)
    _require_values(values, name, path)
    return [str(one) for one in values.to_pylist()]


def column_of(table: Any, name: str) -> Any:
    """Return a column as one Arrow array, after a check of its structure."""
    values = pa.concat_arrays(table.column(name).chunks) if table.num_rows else table.column(name).combine_chunks()
    values.validate(full=True)
    return values


def _require_values(values: Any, name: str, path: Path) -> None:
    if values.null_count:
        raise FormatError(f"{path}: {name!r} has missing values (null)")


def column_images(table: Any, column: FeatureColumn, path: Path, start: int) -> Array:
    """Decode a column of encoded images into `[rows, *shape]`; `start` is the first row's number for messages."""
    shape = column.field.shape
    height, width, channels = (*shape[1:], shape[0]) if column.channels_first else shape
    form = ImageForm(column.field.dtype, (height, width, channels))
    images = np.empty((table.num_rows, *shape), column.field.numpy)
    for row, value in enumerate(column_of(table, column.name).to_pylist()):
        what = f"{path}: {column.name!r}, row {start + row:,}"
        images[row] = as_stated(decode_image(_image_bytes(value, what), form, what), column, what)
    return images


def _image_bytes(value: Any, what: str) -> bytes:
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes) or not data:
        raise FormatError(f"{what} has no bytes of an image")
    return data


WITHOUT_IMAGES = f"--images skip takes the steps without images{LEAVES_OUT}"


@dataclass(frozen=True, slots=True)
class FoundVideo:
    """A video file: its number of frames and, if it is kept, its id and its frame index."""

    frames: int
    number: int = 0
    index: VideoIndex | None = None


class VideoSurvey:
    """Checks that videos have the frames of all rows; of videos that are kept, computes frame index and digest."""

    def __init__(self, info: DatasetInfo, columns: Iterable[FeatureColumn]) -> None:
        self._info = info
        self._columns = list(columns)
        self._looked: dict[str, FoundVideo | FormatError] = {}
        self._longer: Counter[str] = Counter()
        # By feature and file: the first frame of an episode, the frame after its last, and its number.
        self._spans: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
        self._short = 0
        self.apart = 0.0
        """The largest distance in seconds between a frame and the time of its row."""

    def require(self, episode: FrameEpisode) -> None:
        """Raise FormatError if a video is missing or damaged, or lacks frames of an episode's rows."""
        longer, spans, fps, short = [], [], self._info.fps, False
        for column in self._columns:
            place = episode.videos[column.name]
            path = self._info.video(place.path)
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
                frames = frames_of(episode, column.name, found.index, self._info)
                nominal = place.start + (episode.frame + np.arange(len(episode))) / fps
                self.apart = max(self.apart, float(np.abs(found.index.times[frames] - nominal).max()))
                # The video may have a higher frame rate than the rows.
                spans[-1] = ((column.name, place.path), (int(frames.min()), int(frames.max()) + 1, episode.number))
            longer += [column.name] if not self._info.shares_files and found.frames > needed else []
        self._longer.update(longer)
        self._short += short
        for file, span in spans:
            self._spans[file].append(span)

    def shared(self) -> dict[int, FormatError]:
        """Return an error for each episode that has a frame in common with another one: one of them must be wrong."""
        found: dict[int, FormatError] = {}
        for (_, path), spans in self._spans.items():
            _, furthest, one = min(spans)
            for first, stop, other in sorted(spans)[1:]:
                if first < furthest:
                    error = FormatError(
                        f"{self._info.video(path)}: frame {first:,} would belong to episode {one} and to episode "
                        f"{other}, by the times in the metadata",
                        hint=WITHOUT_IMAGES,
                    )
                    found.setdefault(one, error)
                    found.setdefault(other, error)
                furthest, one = max((furthest, one), (stop, other))
        return found

    def _look_at(self, path: str, column: FeatureColumn) -> FoundVideo | FormatError:
        if path not in self._looked:
            try:
                self._looked[path] = self._found(self._info.video(path), column)
            except FormatError as error:
                self._looked[path] = error
        return self._looked[path]

    def _found(self, path: Path, column: FeatureColumn) -> FoundVideo:
        require_content(path, f"it has frames of {column.name}", hint=WITHOUT_IMAGES)
        with VideoFile(path) as video:
            if not column.is_kept:
                return FoundVideo(video.stated_frames)
            as_stated(np.empty((0, *video.shape), np.uint8), column, str(path))
            index = replace(video.index, depth=column.feature.depth)
            return FoundVideo(len(video), video_id(digest_file(path)), index)

    def found(self) -> dict[str, FoundVideo]:
        """Return the readable videos by path."""
        return {path: one for path, one in self._looked.items() if isinstance(one, FoundVideo)}

    def notes(self) -> Iterator[str]:
        """Yield notes on kept videos, and on videos with more frames than rows."""
        if kept := [column.name for column in self._columns if column.is_kept]:
            yield f"{VIDEOS_KEPT} ({', '.join(kept)})"
        if self._short:
            yield (
                f"to_timestamp of {counted(self._short, 'episode')} leaves fewer frames than there are rows: frames "
                "are counted from from_timestamp on"
            )
        for name, count in self._longer.items():
            yield (
                f"{counted(count, 'video')} of {name} with more frames than rows: the frames of the rows are found by "
                "their times, the others are left out"
            )


def frames_of(episode: FrameEpisode, name: str, index: VideoIndex, info: DatasetInfo) -> Array:
    """Return the frame of each row of an episode in its video, int64 `[rows]`; FormatError if there is none."""
    place = episode.videos[name]
    times = place.start + (episode.frame + np.arange(len(episode))) / info.fps
    return index.frames_at(times, info.fps, info.video(place.path))


def kept_contents(info: DatasetInfo, videos: Mapping[str, FoundVideo]) -> dict[str, Path | bytes]:
    """Return the files of kept videos and their frame indexes, by their names in a dataset."""
    found: dict[str, Path | bytes] = {}
    for path, video in videos.items():
        if video.index is not None:
            found[video_name(video.number)] = info.video(path)
            found[index_name(video.number)] = video.index.to_bytes()
    return found


class EpisodeVideos(Closing):
    """Reads frames of videos, with one open video for each feature; `known` are the videos of the survey."""

    def __init__(self, info: DatasetInfo, known: Mapping[str, FoundVideo]) -> None:
        self._info = info
        self._known = known
        self._open: dict[str, tuple[str, VideoFile]] = {}
        self._frames: dict[str, tuple[int, Array]] = {}

    def read(self, episode: FrameEpisode, column: FeatureColumn, start: int, stop: int) -> Array:
        """Decode the frames of rows `[start, stop)` of an episode into `[rows, *shape]`.

        Of a kept video, return references instead, int64 `[rows, 2]`: the id of the file, and the frame.
        """
        path = episode.videos[column.name].path
        found = self._known[path]
        if found.index is not None:
            frames = self._frames_of(episode, column.name, found.index)[start:stop]
            return np.stack((np.full(len(frames), found.number), frames), axis=1)
        file = self._info.video(path)
        opened, video = self._open.pop(column.name, ("", None))
        if video is None or opened != path:
            if video is not None:
                video.close()
            video = VideoFile(file)
            self._frames.pop(column.name, None)
        self._open[column.name] = path, video
        as_stated(np.empty((0, *video.shape), np.uint8), column, str(video.path))
        frames = self._frames_of(episode, column.name, video.index)
        images, depth = video.read(frames[start:stop]), column.feature.depth
        return as_stated(images if depth is None else depth.depths(images), column, str(video.path))

    def _frames_of(self, episode: FrameEpisode, name: str, index: VideoIndex) -> Array:
        known = self._frames.get(name)
        if known is None or known[0] != episode.number:
            known = self._frames[name] = episode.number, frames_of(episode, name, index, self._info)
        return known[1]

    def close(self) -> None:
        """Close all videos."""
        while self._open:
            self._open.popitem()[1][1].close()
        self._frames.clear()


_ROWS = 1 << 16
TOLERANCE = 1e-4
"""LeRobot's default tolerance between a time stamp and its frame, in seconds."""
_OLDER, _NEWER = "episode_", "file-"
"""Prefixes of the names of files of rows in v2 and in v3."""


@dataclass
class FoundDataset:
    """The result of the survey of all files; `damaged` holds the errors of episodes that cannot be read."""

    columns: FeatureColumns
    episodes: dict[int, FrameEpisode] = field(default_factory=dict)
    damaged: dict[int, RbtoolError] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    videos: dict[str, FoundVideo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Spoken: TypeAlias = list[tuple[int, int, list[Any]]]
"""Annotations of consecutive rows, in runs of equal ones: the first frame, the number of frames, the annotation."""


@dataclass
class _FrameRun:
    """Consecutive rows of one episode in one file.

    `frame` is the `frame_index` of the first row, `done` whether the episode is terminated if it ends here. `tasks` and
    `text` hold the distinct values in the order of their first rows.
    """

    path: str
    start: int
    stop: int
    frame: int
    done: bool
    tasks: list[int]
    text: dict[str, list[str]]
    language: dict[str, Spoken]
    problem: RbtoolError | None = None


class DatasetSurvey:
    """Finds the episodes of a dataset by reading the small columns of all files.

    Args:
        info: the contents of `info.json`.
        images: the option for images and videos.
        ends_terminated: whether `next.done` is a termination.
    """

    def __init__(self, info: DatasetInfo, images: Images, *, ends_terminated: bool) -> None:
        self._info = info
        self._images = images
        self._flags = EndFlags(ends_terminated)
        self._entries, self._tasks = self.entries(), self.tasks()
        self._stored: dict[str, str] | None = None
        self._first = ""
        self._others: Counter[str] = Counter()  # columns that the first file lacks, and how many files have them
        self._runs: dict[int, list[_FrameRun]] = {}
        self._unreadable: dict[str, RbtoolError] = {}
        self._inside = 0
        self._apart = 0.0  # how far time stamps are from their frames, in seconds, at most

    def find(self, progress: Callable[[int], None]) -> FoundDataset:
        """Find the episodes; `progress` is called with 1 after each file. Raises an error if no file can be read."""
        info = self._info
        paths = self.paths()
        for path in paths:
            try:
                self._examine(path)
            except FormatError as error:
                self._unreadable[path] = error
            progress(1)
        if self._stored is None:
            raise next(iter(self._unreadable.values()))
        columns = columns_of(info, self._stored, self._images)
        found = FoundDataset(columns, files=paths)
        for number in sorted(self._entries.keys() | self._runs.keys()):
            try:
                found.episodes[number] = self._episode(number, columns)
            except FormatError as error:
                found.damaged[number] = error
        self._add_dropped(found)
        self._require_videos(found)
        found.notes += self._notes(found)
        return found

    def entries(self) -> dict[int, EpisodeEntry]:
        """Return the episodes in the metadata by number."""
        return read_episodes(self._info)

    def tasks(self) -> dict[int, str]:
        """Return the texts of tasks by number."""
        return read_tasks(self._info)

    def open_rows(self, path: str) -> RowsFile:
        """Open a file of rows."""
        return RowsFile(self._info.root / path)

    def paths(self) -> list[str]:
        """Return the existing files of rows, sorted."""
        info = self._info
        folder = info.root / "data"
        there = {path.relative_to(info.root).as_posix() for path in folder.rglob("*.parquet") if path.is_file()}
        if not there:
            raise CorruptDataError(
                f"{info.root} has the metadata of {len(self._entries):,} episodes, but no files of rows in data",
                hint=FETCH_AGAIN,
            )
        other = _OLDER if info.shares_files else _NEWER
        odd = sorted(path for path in there if path.rpartition("/")[2].startswith(other))
        if odd:
            raise FormatError(
                f"{info.root} states {info.version}, but has {odd[0]} of another version: versions are mixed",
                hint=FETCH_AGAIN,
            )
        return sorted(there)

    def _examine(self, path: str) -> None:
        info = self._info
        with self.open_rows(path) as file:
            known = info.features.keys()
            stored = {one.name: stored_form(one.type) for one in file.schema}
            stored |= self._special_forms(file)
            for name in (EPISODE_INDEX, FRAME_INDEX):
                if name not in stored:
                    raise FormatError(f"{file.path} has no column {name!r}")
            for name, dtype in () if self._stored is None else self._stored.items():
                if name in known and stored.get(name) != dtype:
                    has = f"{name!r} as {stored[name]}" if name in stored else f"no column {name!r}"
                    raise FormatError(f"{file.path} has {has}, and {self._first} has it as {dtype}")
            if self._stored is None:
                columns_of(info, stored, self._images)
                self._stored, self._first = stored, path
            self._others.update(stored.keys() - self._stored.keys() - known)
            small = [name for name in (TIMESTAMP, TASK_INDEX, *NEXT_FLAGS) if name in stored and name in known]
            texts = [name for name in known if stored.get(name) == "string"]
            spoken = [name for name in known if stored.get(name) == SPOKEN]
            names = [EPISODE_INDEX, FRAME_INDEX, *small, *texts, *spoken]
            for start in range(0, file.rows, _ROWS):
                stop = min(start + _ROWS, file.rows)
                self._take(_RowBlock(file, path, file.read(names, start, stop), start, texts, spoken))

    def _special_forms(self, file: RowsFile) -> dict[str, str]:
        """Return the element types of annotations and of images of depths, by name."""
        found = {}
        for name, feature in self._info.features.items():
            there = name in file.schema.names
            if there and feature.dtype == SPOKEN and any(test(file.schema.field(name).type) for test in _LISTS):
                found[name] = SPOKEN
            elif there and feature.dtype == IMAGE and feature.is_depth and file.rows and self._images != "skip":
                what = f"{file.path}: {name!r}, row 0"
                data = _image_bytes(column_of(file.read([name], 0, 1), name)[0].as_py(), what)
                found[name] = image_form(data, what).dtype
        return found

    def _take(self, block: _RowBlock) -> None:
        episodes, frames = block.integers(EPISODE_INDEX), block.integers(FRAME_INDEX)
        cuts = [0, *(np.flatnonzero(np.diff(episodes)) + 1).tolist(), len(episodes)]
        flags = self._flags.of(
            {name: block.floats(name) != 0 for name in NEXT_FLAGS if name in block.names}, len(frames)
        )
        for low, high in pairwise(cuts):
            run = _FrameRun(
                block.path, block.start + low, block.start + high, int(frames[low]), bool(flags.ends[high - 1]),
                block.distinct_tasks(low, high), block.distinct_texts(low, high),
                block.language(low, high, int(frames[low])),
            )  # fmt: skip
            jumps = np.flatnonzero(np.diff(frames[low:high]) != 1)
            if len(jumps):
                at = low + int(jumps[0])
                run.problem = FormatError(
                    f"{block.file.path}: frame_index goes from {frames[at]} to {frames[at + 1]} at row "
                    f"{block.start + at + 1:,}, inside episode {episodes[low]}"
                )
            run.problem = run.problem or self._drift(block, low, high, frames)
            self._compare_times(block, low, high, frames)
            self._inside += int((flags.terminated | flags.truncated)[low : high - 1].sum())
            self._add(int(episodes[low]), run)

    def _compare_times(self, block: _RowBlock, low: int, high: int, frames: Array) -> None:
        """Update the largest deviation of time stamps, as LeRobot measures it.

        LeRobot v3 compares time stamps with frames of videos; v2 compares the distance of consecutive rows.
        """
        if TIMESTAMP not in block.names or not (self._info.visual(VIDEO) or not self._info.shares_files):
            return
        apart = block.floats(TIMESTAMP)[low:high] - frames[low:high] / self._info.fps
        apart = apart if self._info.shares_files else np.diff(apart)
        self._apart = max(self._apart, float(np.abs(apart[np.isfinite(apart)]).max(initial=0.0)))

    def _drift(self, block: _RowBlock, low: int, high: int, frames: Array) -> RbtoolError | None:
        """Return an error if time stamps contradict frame numbers, since frames of videos are found by time."""
        if TIMESTAMP not in block.names or self._images == "skip" or not self._info.visual(VIDEO):
            return None
        stated, fps = block.floats(TIMESTAMP)[low:high], self._info.fps
        apart = np.abs(stated - frames[low:high] / fps)
        bad = ~(apart < 0.5 / fps)
        if not bad.any():
            return None
        at = low + int(bad.argmax())
        return FormatError(
            f"{block.file.path}: row {block.start + at:,} has the timestamp {stated[at - low]:.3f} s, its frame "
            f"{frames[at]} at {fps:g} frames a second is at {frames[at] / fps:.3f} s",
            hint=WITHOUT_IMAGES,
        )

    def _add(self, number: int, run: _FrameRun) -> None:
        """Add a run of rows; one that only continues where the block before ended is joined to the last run."""
        runs = self._runs.setdefault(number, [])
        before = runs[-1] if runs else None
        if before is not None and before.path == run.path and before.stop == run.start:
            if before.frame + run.start - before.start != run.frame and before.problem is None:
                before.problem = FormatError(
                    f"{self._info.root / run.path}: frame_index is not consecutive at row {run.start:,}, inside "
                    f"episode {number}"
                )
            before.problem = before.problem or run.problem
            before.stop, before.done = run.stop, run.done
            before.tasks = list(dict.fromkeys([*before.tasks, *run.tasks]))
            before.text = {name: list(dict.fromkeys([*before.text[name], *run.text[name]])) for name in run.text}
            before.language = {
                name: joined_language(before.language[name] + parts) for name, parts in run.language.items()
            }
            return
        runs.append(run)

    def _episode(self, number: int, columns: FeatureColumns) -> FrameEpisode:
        info, entry, runs = self._info, self._entries.get(number), self._runs.get(number, [])
        if entry is None:
            raise FormatError(f"{info.root / runs[0].path} has rows of episode {number}, which is not in the metadata")
        if not runs:
            raise self.why_absent(entry)
        run = runs[0]
        if len(runs) > 1:
            raise FormatError(
                f"{info.root / run.path}: rows of episode {number} are in {len(runs)} places: from row {run.start:,}, "
                f"and from row {runs[1].start:,} of {runs[1].path}"
            )
        if entry.length is not None and entry.length != run.stop - run.start:
            raise FormatError(
                f"{info.root / run.path} has {run.stop - run.start:,} rows of episode {number}, but the metadata state "
                f"{entry.length:,}"
            )
        if run.problem is not None:
            raise run.problem
        return FrameEpisode(
            number, run.path, run.start, run.stop, run.frame, run.done,
            self._text(entry, run), entry.videos,
        )  # fmt: skip

    def why_absent(self, entry: EpisodeEntry) -> RbtoolError:
        """Return the error for an episode without rows."""
        path = self._info.root / entry.data
        if entry.data in self._unreadable:
            return self._unreadable[entry.data]
        if not path.is_file():
            return CorruptDataError(f"{path} is missing: it has the rows of episode {entry.number}")
        return FormatError(f"{path} has no rows of episode {entry.number}, which is in the metadata")

    def _text(self, entry: EpisodeEntry, run: _FrameRun) -> dict[str, str]:
        unknown = [number for number in run.tasks if number not in self._tasks]
        if self._tasks and unknown:
            raise FormatError(f"{self._info.root / run.path}: episode {entry.number} has the task {unknown[0]}, which "
                              "is not in the metadata")  # fmt: skip
        tasks: Any = {str(number): self._tasks[number] for number in run.tasks} if self._tasks else list(entry.tasks)
        texts = list(tasks.values()) if self._tasks else tasks
        found = {TASK: texts[0]} if len(texts) == 1 else {TASKS: dump_json(tasks)} if tasks else {}
        found |= {name: values[0] for name, values in run.text.items() if len(values) == 1}
        return found | {name: language_text(parts) for name, parts in run.language.items()}

    def _add_dropped(self, found: FoundDataset) -> None:
        """Report columns that only some files have, and text that varies within an episode, which cannot be kept."""
        for name, count in self._others.items():
            files = f"{count:,} of {len(found.files):,} files {'has' if count == 1 else 'have'} it"
            found.columns.dropped.append(Dropped(name, f"{INFO} does not name it, and {files}"))
        for name in found.columns.text:
            varies = sum(len(run.text.get(name, ())) > 1 for runs in self._runs.values() for run in runs)
            if varies:
                found.columns.dropped.append(
                    Dropped(name, f"it is text that varies within {counted(varies, 'episode')}; the others keep it")
                )

    def _require_videos(self, found: FoundDataset) -> None:
        """Check the videos of all episodes, and move those with a problem to `damaged`."""
        videos = [column for column in found.columns.columns if column.feature.dtype == VIDEO]
        survey = VideoSurvey(self._info, videos)
        for number, episode in list(found.episodes.items()) if videos else ():
            try:
                survey.require(episode)
            except FormatError as error:
                found.damaged[number] = error
                del found.episodes[number]
        for number, problem in survey.shared().items():
            found.damaged[number] = problem
            del found.episodes[number]
        found.videos = survey.found()
        found.notes += survey.notes()
        # LeRobot refuses deviations of its tolerance, to which single precision adds some microseconds.
        apart = self._apart + survey.apart
        if apart > 0.99 * TOLERANCE:
            needed = (math.floor(apart * 1e4 + 0.01) + 1) / 1e4
            found.notes.append(
                f"time stamps are up to {1000 * apart:.2g} ms off: LeRobot needs tolerance_s ≥ {needed:g}, its "
                f"default, {TOLERANCE}, refuses them (rbtool preprocess --retime {self._info.fps:g} mends it)"
            )

    def _notes(self, found: FoundDataset) -> Iterator[str]:
        info = self._info
        if self._inside:
            yield f"flags are set in {counted(self._inside, 'row')} inside episodes, and are kept there"
        missing = [path for path in self._unreadable if all(path != one.data for one in self._entries.values())]
        if missing:
            yield f"{missing[0]} cannot be read, and has no episode of the metadata: {self._unreadable[missing[0]]}"
        rows = sum(map(len, found.episodes.values()))
        if not found.damaged and info.frames is not None and info.frames != rows:
            yield f"{INFO} states {info.frames:,} frames, there are {rows:,}"
        if info.episodes is not None and info.episodes != len(self._entries):
            yield f"{INFO} states {info.episodes:,} episodes, and the metadata of episodes have {len(self._entries):,}"


class _RowBlock:
    """Rows of the small columns of one file, from row `start` on."""

    def __init__(self, file: RowsFile, path: str, table: Any, start: int, texts: list[str], spoken: list[str]) -> None:
        self.file, self.path, self.start = file, path, start
        self._spoken = {name: column_of(table, name) for name in spoken}
        self._table = table
        self._texts = {name: texts_of(table, name, file.path) for name in texts}
        self.names = frozenset(table.column_names)
        self._tasks = self.integers(TASK_INDEX) if TASK_INDEX in self.names else np.zeros(0, np.int64)

    def integers(self, name: str) -> Array:
        return numbers_of(self._table, name, (), np.dtype(np.int64), self.file.path)

    def floats(self, name: str) -> Array:
        return numbers_of(self._table, name, (), np.dtype(np.float64), self.file.path)

    def distinct_tasks(self, low: int, high: int) -> list[int]:
        return list(dict.fromkeys(self._tasks[low:high].tolist()))

    def distinct_texts(self, low: int, high: int) -> dict[str, list[str]]:
        return {name: list(dict.fromkeys(texts[low:high])) for name, texts in self._texts.items()}

    def language(self, low: int, high: int, frame: int) -> dict[str, Spoken]:
        return {name: _language_of(column[low:high], frame) for name, column in self._spoken.items()}


def _language_of(rows: Any, frame: int) -> Spoken:
    """Return the annotations of consecutive rows as runs; usually most rows are equal, or empty."""
    count = len(rows)
    if count and rows[1:].equals(rows[:-1]):
        return [(frame, count, rows[0].as_py() or [])]
    filled = np.flatnonzero(pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False))
    found: Spoken = []
    at = 0
    for place, value in zip(filled.tolist(), rows.take(pa.array(filled)).to_pylist(), strict=True):
        found += [(frame + at, place - at, [])] if place > at else []
        found.append((frame + place, 1, value))
        at = place + 1
    return joined_language([*found, (frame + at, count - at, [])] if count > at else found)


def joined_language(parts: Spoken) -> Spoken:
    """Join neighbouring runs of equal annotations."""
    found: Spoken = []
    for frame, count, value in parts:
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], found[-1][1] + count, value)
        else:
            found.append((frame, count, value))
    return found


def language_text(parts: Spoken) -> str:
    """Return annotations as a text of the episode: a JSON list if all rows are equal, else an object by frame."""
    if len(parts) == 1:
        return dump_json(parts[0][2])
    return dump_json({str(frame + at): value for frame, count, value in parts for at in range(count) if value})


_OUTCOME_ROWS = 1 << 18
_DOCUMENT_BYTES = 4 << 20
_METADATA = frozenset({".json", ".jsonl", ".parquet"})


class LerobotReader(SurveyedReader[FoundDataset], PartsReader):
    """Reads a dataset folder of LeRobot, v2.0, v2.1 or v3.0, by `codebase_version` in `meta/info.json`.

    Rows come from the Parquet files in `data`. The rows of one `episode_index` are an episode, and their `frame_index`
    must be consecutive. The feature `observation.images.top` becomes the key (observation, image, top); names of other
    features are split at dots. The texts of tasks become the text `language_instruction` of episodes.

    Images in columns are decoded by Pillow. Videos are kept by default, and rows refer to their frames
    (`format.videos`). The frame of a row is the one that is shown `frame_index / fps` seconds after the episode begins
    in the video; if the nearest frame is half a frame or more away, it is an error.

    Options:
        images: `keep` videos as files, `decode` them, or `skip` all images and videos.
        ends: whether `next.done` and `next.success` mean terminations (`terminated`, the default) or time limits
            (`truncated`).
        id: the repository on the hub.

    Raises:
        FormatError: the files contradict each other.
        CorruptDataError: a file is damaged.
    """

    option_names = frozenset({"id", "images", "ends"})
    _survey: type[DatasetSurvey] = DatasetSurvey

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` is a folder with metadata of LeRobot."""
        try:
            return looks_like_lerobot(path)
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Read `info.json`."""
        self._images = require_images(self.options.get("images"), known=("keep", "decode", "skip"))
        self._info = self._read_info()
        self._meaning = self._meaning_of_ends()
        self._end_flags = EndFlags(self._meaning.terminated)
        self._files: dict[str, RowsFile] = {}
        self._open_videos: EpisodeVideos | None = None

    def _read_info(self) -> DatasetInfo:
        return read_info(self.path)

    def _meaning_of_ends(self) -> EndMeaning:
        names = self._info.features.keys()
        if names & {NEXT_TERMINATED, NEXT_TRUNCATED}:
            refuse_ends(self.path, self.options, "has flags that state how episodes end")
            return EndMeaning(terminated=True)
        if not names & {NEXT_DONE, NEXT_SUCCESS}:
            refuse_ends(self.path, self.options, "has no flags: all episodes end truncated")
            return EndMeaning(terminated=True, note="there are no flags: all episodes end truncated")
        return meaning_of_ends(
            self.options, "terminated", "next.done is set at terminal states and at time limits alike"
        )  # fmt: skip

    def look(self, progress: Callable[[int], None]) -> FoundDataset:
        """Read the small columns of all files and find the episodes."""
        return self._survey(self._info, self._images, ends_terminated=self._meaning.terminated).find(progress)

    @property
    def _videos(self) -> EpisodeVideos:
        if self._open_videos is None:
            self._open_videos = EpisodeVideos(self._info, self.found.videos)
        return self._open_videos

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of the dataset."""
        found = self.looked_over(progress)
        numbers = sorted(found.episodes.keys() | found.damaged.keys())
        chosen = [found.episodes.get(number) for number in numbers]
        lengths = [0 if one is None else len(one) for one in chosen]
        return SourceFacts(
            source="lerobot",
            id=self.id_or(self.path.absolute().name),
            fields=found.columns.fields,
            episode_numbers=numbers,
            steps=sum(lengths),
            renamed_keys=found.columns.renamed,
            dropped_keys=tuple(sorted(found.columns.dropped, key=lambda one: one.key)),
            notes=tuple(filter(None, (self._meaning.note, *found.notes))),
            documents=self._documents(),
            lengths=lengths,
            final_missing=True,
            last_terminated=[one is not None and one.terminated for one in chosen],
            keeps_last=not self._has_rewards,
        )

    @property
    def _has_rewards(self) -> bool:
        return any(column.field.key == REWARD for column in self.found.columns.columns)

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return a note on the last rows that `--final-step auto` leaves out."""
        ends = [self.found.episodes[number] for number in numbers if number in self.found.episodes]
        count = sum(not one.terminated for one in ends)
        if self.final_step != "auto" or not count:
            return ()
        left = f"{counted(count, 'row')} of {counted(len(ends), 'episode')} left out"
        return [f"{left}: the last row of an episode has no next observation (--final-step repeat keeps it)"]

    def _documents(self) -> dict[str, bytes]:
        """Return the small metadata files, which the dataset keeps; FormatError for invalid JSON."""
        found = {}
        for path in self._metadata():
            if path.parent.name == "meta" and path.stat().st_size <= _DOCUMENT_BYTES:
                found[f"meta/{path.name}"] = data = read_regular(path)
                for line in data.splitlines() if path.suffix == ".jsonl" else [data] * (path.suffix == ".json"):
                    parse_json(line, str(path))
        return found

    def _metadata(self) -> list[Path]:
        known = (path for path in (self._info.root / "meta").rglob("*") if path.suffix in _METADATA and path.is_file())
        return sorted(known)

    def stated_metadata(self, *, files: bool = False) -> SourceMetadata:
        """Return the contents of the metadata; with `files`, also the problems of files of rows and videos."""
        return source_metadata(self._info, self._metadata(), files=files)

    def shard_starts(self) -> list[int]:
        """Return the first episode of each run of episodes that a stream reads at once."""
        entries = list(read_episodes(self._info).values())
        paths = {path for entry in entries for path in (entry.data, *(one.path for one in entry.videos.values()))}
        sizes = {path: (self.path / path).stat().st_size for path in paths if (self.path / path).is_file()}
        return [run[0].number for run in runs_of(entries, sizes) if run]

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read."""
        refuse_damaged(numbers, self.found.damaged)

    def videos_of(self, numbers: Sequence[int]) -> dict[str, Path | bytes]:
        """Return the kept videos of these episodes, and their frame indexes."""
        found = self.found
        names = [column.name for column in found.columns.columns if column.is_kept]
        chosen = [found.episodes[number] for number in numbers if number in found.episodes]
        paths = sorted({one.videos[name].path for one in chosen for name in names})
        return kept_contents(self._info, {path: found.videos[path] for path in paths})

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        """Yield consecutive episodes of a file together, in blocks of up to about `piece_bytes`."""
        episodes, at = self.found.episodes, 0
        most = self.piece_rows(self.found.columns.fields)
        while at < len(numbers):
            first = before = episodes[numbers[at]]
            stop = at + 1
            while stop < len(numbers):
                one = episodes[numbers[stop]]
                if (one.path, one.start) != (before.path, before.stop) or one.stop - first.start > most:
                    break
                before, stop = one, stop + 1
            if stop == at + 1:
                yield from self.read_episode(first.number)
            else:
                yield self._block([episodes[number] for number in numbers[at:stop]])
            at = stop

    def _block(self, episodes: Sequence[FrameEpisode]) -> EpisodeBlock:
        columns = self.found.columns
        stops = np.cumsum([len(one) for one in episodes])
        found = self._rows(episodes, columns.columns, 0, int(stops[-1]))
        flags = self._end_flags.of({name: found[name] for name in columns.flags}, int(stops[-1]))
        terminated, truncated = flags.terminated.copy(), flags.truncated.copy()
        terminated[stops - 1] = ends = np.array([one.terminated for one in episodes])
        truncated[stops - 1] |= ~ends
        return EpisodeBlock(
            np.array([one.number for one in episodes]), stops,
            {column.field.key: found[column.name] for column in columns.columns}, terminated, truncated,
            np.full(len(episodes), Final.MISSING, np.uint8), text=[one.text for one in episodes],
        )  # fmt: skip

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        columns = self.found.columns
        yield from self._pieces(number, columns.columns, self.piece_rows(columns.fields))

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        rewards = [column for column in self.found.columns.columns if column.field.key == REWARD]
        yield from self._pieces(number, rewards, _OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[FeatureColumn], rows: int) -> Iterator[Piece]:
        one = self.found.episodes[number]
        held: dict[str, Array] = {}
        for start in range(0, len(one), rows):
            stop = min(start + rows, len(one))
            last = stop == len(one)
            # Observations of a piece have one more row than steps, the first row of the next piece: read it only once.
            found = self._rows([one], columns, start + bool(held), min(stop + 1, len(one)))
            found = {name: np.concatenate((held[name], array)) if held else array for name, array in found.items()}
            held = {} if last else {name: array[-1:].copy() for name, array in found.items()}
            steps = stop - start
            flags = self._end_flags.of({name: found[name][:steps] for name in self.found.columns.flags}, steps)
            terminated, truncated = flags.terminated.copy(), flags.truncated.copy()
            if last:
                terminated[-1] = one.terminated
                truncated[-1] |= not one.terminated
            given = {
                column.field.key: found[column.name][: None if column.timing == "state" else steps]
                for column in columns
            }
            yield Piece(
                number, given, terminated, truncated, first=not start, last=last,
                text=dict(one.text) if not start else {}, final=Final.MISSING if last else Final.OBSERVED,
            )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Compute the contents of `meta/stats.json`, of all rows, and of pictures sampled as in LeRobot."""
        episodes = self.found.episodes.values()
        found: dict[str, dict[str, Any] | None] = {}
        for name, feature in self._info.features.items():
            if not feature.is_visual and feature.dtype not in ("string", SPOKEN):
                shape = feature.shape or (1,)
                found[name] = listed(of_all(partial(self._numbers, name, shape), sum(map(len, episodes))), shape)
        for column in self.found.columns.columns:
            if column.feature.is_visual:
                first = column.channels_first
                counts = PictureCounts.of(column.field.dtype, column.field.shape[0 if first else 2])
                for one in episodes:
                    for frame in sampled_frames(len(one)).tolist():
                        image = self._rows([one], [column], frame, frame + 1)[column.name]
                        counts.add(np.moveaxis(image, 1, -1) if first else image)
                found[column.name] = listed(counts.statistics(), (-1, 1, 1))
        return {name: one for name, one in found.items() if one is not None}

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Iterator[Array]:
        """Yield the rows of a column in chunks `[n, width]`."""
        for one in self.found.episodes.values():
            file = self._file(one.path)
            dtype = np.dtype(stored_form(file.schema.field(name).type))
            for start in range(one.start, one.stop, _OUTCOME_ROWS):
                table = file.read([name], start, min(start + _OUTCOME_ROWS, one.stop))
                yield numbers_of(table, name, shape, dtype, file.path).reshape(table.num_rows, -1)

    def _rows(
        self, episodes: Sequence[FrameEpisode], columns: Sequence[FeatureColumn], start: int, stop: int
    ) -> dict[str, Array]:
        """Read rows `[start, stop)` of an episode, or all rows of several consecutive ones, by feature.

        Flags are bool `[rows]`.
        """
        flags, place = self.found.columns.flags, episodes[0].start
        names = [column.name for column in columns if column.feature.dtype != VIDEO]
        file = self._file(episodes[0].path)
        table = file.read(list(dict.fromkeys([*names, *flags])), place + start, place + stop)
        found = {name: numbers_of(table, name, (), np.dtype(np.float64), file.path) != 0 for name in flags}
        for column in columns:
            form = column.field
            if column.feature.dtype == VIDEO:
                bounds = [(0, len(one)) for one in episodes] if len(episodes) > 1 else [(start, stop)]
                frames = [self._videos.read(one, column, *span) for one, span in zip(episodes, bounds, strict=True)]
                found[column.name] = np.concatenate(frames)
            elif column.feature.dtype == IMAGE:
                found[column.name] = column_images(table, column, file.path, place + start)
            elif column.name in flags:
                found[column.name] = found[column.name].reshape(-1)
            else:
                found[column.name] = numbers_of(table, column.name, form.shape, form.numpy, file.path)
        return found

    def _file(self, path: str) -> RowsFile:
        found = self._files.pop(path, None)
        if found is None:
            self._close_files()
            found = self._open_rows(path)
        self._files[path] = found
        return found

    def _open_rows(self, path: str) -> RowsFile:
        return RowsFile(self.path / path)

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def files(self) -> list[Path]:
        """The metadata, the files of rows, and the videos."""
        found = self.found
        names = [column.name for column in found.columns.columns if column.feature.dtype == VIDEO]
        videos = {one.videos[name].path for one in found.episodes.values() for name in names}
        return [*self._metadata(), *(self.path / name for name in (*found.files, *sorted(videos)))]

    def on_close(self) -> None:
        """Close the files."""
        self._close_files()
        if self._open_videos is not None:
            self._open_videos.close()


_META_FOLDER, _VIDEO = "meta/", ".mp4"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = re.compile(r"(meta|data|videos?|images)/.*\.(json|jsonl|parquet|mp4)", re.ASCII)
_EPISODE = re.compile(r".*/episode_(\d{1,9})\.(?:parquet|mp4)", re.ASCII)


class LerobotSource(HubRepositorySource):
    """Dataset repositories on the Hugging Face hub that hold a LeRobot dataset.

    An id is `OWNER/NAME`. Only the repositories of the owner `lerobot` are listed and searched. LeRobot tags the
    revisions of a dataset by version, like `v3.0`; the newest commit may have another version.
    """

    name = "lerobot"
    owner = "lerobot"

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset, with one request for the commit and one for about every 1,000 files."""
        if not _NAME.fullmatch(safe_id(dataset_id)):
            raise UsageError(f"{dataset_id!r} is not a repository", hint="write it like OWNER/NAME")
        commit = self.hub.commit(dataset_id, revision)
        found = [file for file in self.hub.tree(dataset_id, commit) if _FILES.fullmatch(file.path)]
        if all(file.path != INFO for file in found):
            raise DatasetNotFoundError(
                f"hf://{dataset_id} has no {INFO} at {revision or commit[:7]}: it is not a dataset of LeRobot",
                hint="--revision takes a branch, a tag like v3.0, or a commit",
            )
        return self.described(dataset_id, dataset_id, commit, found)

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Return the files of these episodes and all shared ones; in v3 every file is shared."""
        numbers = {file.path: _episode_of(file.path) for file in dataset.files}
        known = sorted({number for number in numbers.values() if number is not None})
        chosen = {None, *(select_episodes(episodes, known) if known else ())}
        return [file for file in dataset.files if numbers[file.path] in chosen]

    def files_read(self, files: Sequence[RemoteFile], options: Mapping[str, Any]) -> Sequence[RemoteFile]:
        """Return the files that are needed: without videos if images are skipped."""
        skips = options.get("images") == "skip"
        return [file for file in files if not (skips and file.path.endswith(_VIDEO))]

    def shards(self, dataset: RemoteDataset, folder: Path) -> list[RemoteShard]:
        """Divide the episodes into shards that can be read separately, of about 64 MiB of files or more.

        A file of rows belongs to one shard; a video with frames of two shards belongs to both. The metadata are fetched
        into `folder`.
        """
        metadata = [file for file in dataset.files if file.path.startswith(_META_FOLDER)]
        self.fetch(metadata, folder)
        entries = list(read_episodes(read_info(folder)).values())
        known = {file.path: file for file in dataset.files}
        sizes = {file.path: file.known_size for file in dataset.files}
        found: list[RemoteShard] = []
        for run in runs_of(entries, sizes):
            paths = dict.fromkeys(path for entry in run for path in paths_of(entry, sizes))
            files = (*metadata, *(known[path] for path in paths))
            found.append(RemoteShard(files, ",".join(str(entry.number) for entry in run)))
        return found

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """Return the numbers of the episodes from the names of files; None in v3, where files are shared."""
        rows = (_episode_of(path) for path in dataset.paths if path.endswith(".parquet"))
        return sorted({number for number in rows if number is not None}) or None


def _episode_of(path: str) -> int | None:
    found = _EPISODE.fullmatch(path)
    return None if found is None else int(found[1])
