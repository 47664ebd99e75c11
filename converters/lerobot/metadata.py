"""Reads the folder `meta` of a LeRobot dataset, and maps its features to fields of TED.

`info.json` states the version, the templates of file names, and the features. Episodes and tasks are JSON lines in
v2.0 and v2.1, and Parquet files in v3.0.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.encodings.video import DepthCode
from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, SourceMetadata
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import FETCH_AGAIN, open_regular, read_regular, refuse_pointer
from ...core.format.language import TASK, TASKS
from ...core.format.manifest import Dropped, is_inside
from ...core.format.videos import reference_field
from ...core.ted.schema import DTYPES, FLAGS, NEXT, REWARD, Field, Key, Role, Timing, key_name, role_of, safe_part
from ..files.arrow import require_bounded_parquet
from ..files.images import Images

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
FRAMES_TABLE, VIDEOS_TABLE, META_TABLE = "frames.lance", "videos.lance", "meta.lance"
"""Lance tables that replace the files of rows, the videos, and the metadata."""
_IN_LANCE = re.compile(rb'"storage_format"\s*:\s*"lance"')
IMAGE, VIDEO, SPOKEN = "image", "video", "language"
_POINTER = b"version https://git-lfs"
_LARGEST_POINTER = 1024
_MOST_DIMENSIONS = 8
_LARGEST = 1 << 28
_DEEPEST = 1e9
_MOST_METRES = 65.535
"""The largest depth that uint16 can hold in millimetres."""
_FIELDS = frozenset({"episode_chunk", "episode_index", "chunk_index", "file_index", "video_key"})
_FOLDERS = ("videos", "video")
"""The folder of videos, and the name that some recorders use instead."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature in `info.json`; `names` are the dimensions of an image, outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    is_depth: bool = False
    depth: DepthCode | None = None
    """How the values of frames encode depths, in a video of depths."""

    @property
    def is_visual(self) -> bool:
        """Whether rows are images, in columns or in videos."""
        return self.dtype in (IMAGE, VIDEO)


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of `info.json`. `episodes` and `frames` are its totals, None if not stated."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Feature]
    data_path: str
    video_path: str | None
    chunk_size: int
    episodes: int | None
    frames: int | None
    videos: Callable[[str], Path] | None = None
    """Returns the file of a video by its path in the dataset, for videos that are stored elsewhere (in Lance)."""

    def video(self, path: str) -> Path:
        """Return the file of a video, given its path in the dataset."""
        return self.root / path if self.videos is None else self.videos(path)

    @property
    def shares_files(self) -> bool:
        """Whether a file holds many episodes, as in v3."""
        return self.version.startswith("v3")

    def visual(self, dtype: str) -> list[Feature]:
        """Return the features of images in columns (`image`) or of videos (`video`)."""
        return [feature for feature in self.features.values() if feature.dtype == dtype]

    def data_file(self, **numbers: int) -> str:
        """Return the path of a file of rows, relative to the dataset, for numbers such as `episode_index`."""
        return _filled(self.data_path, "data_path", numbers)

    def video_file(self, **values: Any) -> str:
        """Return the path of a video, relative to the dataset; in `video/` if that folder exists and `videos/` not."""
        if self.video_path is None:
            raise FormatError(f"{self.root / INFO} has features in videos, and no video_path")
        name = _filled(self.video_path, "video_path", values)
        usual, other = _FOLDERS
        return (
            f"{other}/{name.removeprefix(f'{usual}/')}" if self._is_renamed and name.startswith(f"{usual}/") else name
        )

    @cached_property
    def _is_renamed(self) -> bool:
        usual, other = _FOLDERS
        return not (self.root / usual).is_dir() and (self.root / other).is_dir()


def looks_like_lerobot(folder: Path, *, in_lance: bool = False) -> bool:
    """Return whether a folder has LeRobot's `meta/info.json`, or an empty one beside other files of LeRobot.

    With `in_lance`, return whether it is a dataset whose rows are in a Lance table; without, one whose rows are not.
    """
    info = folder / INFO
    if not info.is_file():
        return in_lance and all((folder / name).is_dir() for name in (FRAMES_TABLE, META_TABLE))
    with os.fdopen(open_regular(info), "rb") as file:
        head = file.read(1 << 20)
    states_lance = _IN_LANCE.search(head) is not None or (
        (folder / FRAMES_TABLE).is_dir() and not (folder / "data").is_dir()
    )
    if states_lance != in_lance:
        return False
    if b'"codebase_version"' in head:
        return True
    # An interrupted recorder leaves an empty file, and git without git-lfs a pointer.
    damaged = not head.strip() or head.startswith(_POINTER)
    return damaged and any(
        (folder / "meta" / name).exists() for name in ("episodes.jsonl", "tasks.parquet", "episodes")
    )


def require_content(path: Path, what: str, *, hint: str = FETCH_AGAIN) -> None:
    """Raise CorruptDataError for a file that is missing, empty, or a git-lfs pointer; `what` states its purpose."""
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing: {what}", hint=hint)
    if not path.stat().st_size:
        raise CorruptDataError(f"{path} is an empty file: {what}", hint=hint)
    refuse_pointer(path)


def read_info(root: Path, data: bytes | None = None) -> DatasetInfo:
    """Parse `info.json`, or its content `data` if given; FormatError for an unknown version or invalid entries."""
    path = root / INFO
    if data is None:
        require_content(path, "it states what the dataset has")
        data = read_regular(path)
    content = parse_json(data, str(path))
    if not isinstance(content, dict):
        raise FormatError(f"{path} is {type(content).__name__}, expected an object")
    version = content.get("codebase_version")
    if version not in VERSIONS:
        raise FormatError(
            f"{path} has the version {version!r}, expected one of {', '.join(VERSIONS)}",
            hint="convert it with the lerobot package first" if str(version).startswith("v1") else "",
        )
    features = content.get("features")
    if not isinstance(features, dict) or not features:
        raise FormatError(f"{path} has no features")
    fps = content.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1e6:
        raise FormatError(f"{path}: fps is {fps!r}, expected a number of frames a second")
    return DatasetInfo(
        root=root,
        version=version,
        fps=float(fps),
        features={name: _feature(path, name, entry) for name, entry in features.items()},
        data_path=_template(path, "data_path", content.get("data_path")),
        video_path=None if content.get("video_path") is None else _template(path, "video_path", content["video_path"]),
        chunk_size=_count(path, "chunks_size", content.get("chunks_size")) or 1000,
        episodes=_count(path, "total_episodes", content.get("total_episodes")),
        frames=_count(path, "total_frames", content.get("total_frames")),
    )


def _count(path: Path, name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise FormatError(f"{path}: {name} is {value!r}, expected a number from 0")
    return value


def _feature(path: Path, name: str, entry: Any) -> Feature:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise FormatError(f"{path}: the feature {name!r} has no dtype")
    shape = entry.get("shape", [])
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _LARGEST for size in sizes):
        raise FormatError(f"{path}: the feature {name!r} has the shape {shape!r}, expected a list of sizes")
    if len(sizes) > _MOST_DIMENSIONS:
        raise FormatError(f"{path}: the feature {name!r} has {len(sizes)} dimensions, expected at most 8")
    names = entry.get("names")
    named = tuple(names) if isinstance(names, list) and all(isinstance(one, str) for one in names) else ()
    about = entry.get("info") if isinstance(entry.get("info"), dict) else entry.get("video_info")
    is_depth = isinstance(about, dict) and bool(about.get("is_depth_map") or about.get("video.is_depth_map"))
    depth = _depth_code(path, name, about or {}) if is_depth and entry["dtype"] == VIDEO else None
    return Feature(name, entry["dtype"], tuple(sizes), named, is_depth, depth)


def _depth_code(path: Path, name: str, about: Mapping[str, Any]) -> DepthCode | None:
    """Return how the values of a video encode depths; None for a video of colors."""
    if not str(about.get("video.pix_fmt")).startswith("gray12"):
        return None
    numbers = [about.get(f"video.{one}") for one in ("depth_min", "depth_max", "shift")]
    logarithmic, unit = about.get("video.use_log"), about.get("depth_unit")
    known = all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
    low, high, shift = [float(one or 0) for one in numbers] if known else [0.0] * 3
    if not 0 <= low < high < _DEEPEST or not 0 < low + shift < _DEEPEST or logarithmic not in (True, False):
        raise FormatError(f"{path}: the feature {name!r} is a video of depths with an impossible range: {numbers}")
    return DepthCode(low, high, shift, logarithmic, unit == "mm" and high < _MOST_METRES)


def _template(path: Path, name: str, value: Any) -> str:
    """Check the template of a file name: it may only contain known fields with a width, not attributes or indexes."""
    try:
        parts = list(string.Formatter().parse(value))
    except (TypeError, ValueError):
        raise FormatError(f"{path}: {name} is {value!r}, expected the template of a path") from None
    for _, entry, form, conversion in parts:
        if entry is not None and (entry not in _FIELDS or conversion or not _is_width(form)):
            raise FormatError(f"{path}: {name} has {{{entry}}}, which is unknown; known: {', '.join(sorted(_FIELDS))}")
    return str(value)


def _is_width(form: str | None) -> bool:
    digits = (form or "").removesuffix("d")
    return not digits or (digits.isascii() and digits.isdigit() and len(digits) <= 3)


def _filled(template: str, name: str, values: Mapping[str, Any]) -> str:
    try:
        found = template.format(**values)
    except (KeyError, ValueError) as error:
        raise FormatError(f"{INFO}: {name} {template!r} cannot be filled in: {error}") from error
    if not is_inside(found):
        raise FormatError(f"{INFO}: {name} gives {found!r}, which is outside the dataset")
    return found


_TASKS_LINES, _TASKS, SUBTASKS = "meta/tasks.jsonl", "meta/tasks.parquet", "meta/subtasks.parquet"
SUBTASK_INDEX = "subtask_index"
_EPISODES_LINES, _EPISODES = "meta/episodes.jsonl", "meta/episodes"
_TEXT_COLUMNS = ("task", "__index_level_0__")
"""Names of the column with the texts of tasks; the second is pandas' name for an index without a name."""


@dataclass(frozen=True, slots=True)
class VideoPlace:
    """The place of an episode in a video: the file `path`, relative to the dataset, from `start` on, in seconds.

    `stop` is the end in the metadata; it is only compared, as it is often wrong.
    """

    path: str
    start: float = 0.0
    stop: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """An episode in the metadata.

    Attributes:
        number: its `episode_index`.
        length: its number of rows, None if not stated.
        tasks: the texts of its tasks.
        data: the file with its rows.
        videos: its places in videos, by feature.
        rows: its first row in the whole dataset and the row after its last, stated in v3.
    """

    number: int
    length: int | None
    tasks: tuple[str, ...]
    data: str
    videos: Mapping[str, VideoPlace] = field(default_factory=dict)
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class FrameEpisode:
    """An episode found in the files: rows `[start, stop)` of `path`; `frame` is the `frame_index` of the first row."""

    number: int
    path: str
    start: int
    stop: int
    frame: int
    terminated: bool
    text: Mapping[str, str]
    videos: Mapping[str, VideoPlace]

    def __len__(self) -> int:
        return self.stop - self.start


def read_tasks(info: DatasetInfo) -> dict[int, str]:
    """Return the tasks by number; empty if there is no file of tasks."""
    return _tasks_in(_task_rows(info))


def read_subtasks(info: DatasetInfo) -> dict[int, str]:
    """Return the subtasks by number, the rows of a file that LeRobot 0.5 writes; empty if there is none."""
    path = info.root / SUBTASKS
    rows = enumerate(_parquet_rows(path)) if path.exists() else ()
    return {number: str(row["subtask"]) for number, (_, row) in rows if "subtask" in row}


def stated_tasks(documents: Mapping[str, bytes]) -> dict[int, str]:
    """Return the tasks by number from the documents that a dataset keeps of its source; empty if these have none."""
    lines = documents.get(_TASKS_LINES, b"").splitlines()
    rows = [parse_json(line, _TASKS_LINES) for line in lines if line.strip()]
    if _TASKS in documents:
        rows = pq.ParquetFile(pa.BufferReader(documents[_TASKS])).read().to_pylist()
    return _tasks_in((INFO, row) for row in rows)


def _tasks_in(rows: Iterable[tuple[str, dict[str, Any]]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for place, row in rows:
        number, text = row.get("task_index"), next((row[name] for name in _TEXT_COLUMNS if name in row), None)
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(text, str):
            raise FormatError(f"{place} has no task_index and task")
        if found.setdefault(number, text) != text:
            raise FormatError(f"{place}: task {number} occurs twice, with different texts")
    return found


def _task_rows(info: DatasetInfo) -> Iterator[tuple[str, dict[str, Any]]]:
    name = _TASKS if info.shares_files else _TASKS_LINES
    other = _TASKS_LINES if info.shares_files else _TASKS
    path = info.root / (name if (info.root / name).exists() or not (info.root / other).exists() else other)
    if not path.exists():
        return
    require_content(path, "it has the texts of the tasks")
    yield from _lines(path) if path.name.endswith(".jsonl") else _parquet_rows(path)


def read_episodes(info: DatasetInfo) -> dict[int, EpisodeEntry]:
    """Return the episodes in the metadata by number; FormatError for metadata of another version than stated."""
    lines, folder = info.root / _EPISODES_LINES, info.root / _EPISODES
    if info.shares_files:
        files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []
        _require_version(info, bool(files), folder, lines)
        rows: Iterator[tuple[str, dict[str, Any]]] = (
            row for path in files for row in _parquet_rows(path, with_statistics=False)
        )
    else:
        _require_version(info, lines.exists(), lines, folder)
        require_content(lines, "it has the lengths of the episodes")
        rows = _lines(lines)
    found: dict[int, EpisodeEntry] = {}
    for place, row in rows:
        entry = _entry(info, place, row)
        if found.setdefault(entry.number, entry) != entry:
            raise FormatError(f"{place}: episode {entry.number} occurs twice")
    if not found:
        raise FormatError(f"{info.root} has no episodes in its metadata")
    return found


def _require_version(info: DatasetInfo, is_there: bool, expected: Path, other: Path) -> None:
    if is_there:
        return
    if other.exists():
        raise FormatError(
            f"{info.root} states {info.version}, and has {other.relative_to(info.root)} of another version in place of "
            f"{expected.relative_to(info.root)}: versions are mixed",
            hint=FETCH_AGAIN,
        )
    raise CorruptDataError(f"{expected} is missing: it has the lengths of the episodes", hint=FETCH_AGAIN)


def _entry(info: DatasetInfo, place: str, row: Mapping[str, Any]) -> EpisodeEntry:
    number = _number(place, row, "episode_index")
    length = None if row.get("length") is None else _number(place, row, "length")
    stated = row.get("tasks")
    tasks = tuple(one for one in stated if isinstance(one, str)) if isinstance(stated, list) else ()
    videos = info.visual(VIDEO)
    if not info.shares_files:
        values = {"episode_chunk": number // info.chunk_size, "episode_index": number}
        places = {one.name: VideoPlace(info.video_file(video_key=one.name, **values)) for one in videos}
        return EpisodeEntry(number, length, tasks, info.data_file(**values), places)
    numbers = {f"{what}_index": _number(place, row, f"data/{what}_index") for what in ("chunk", "file")}
    places = {one.name: _shared_video(info, place, row, one.name) for one in videos}
    first, after = row.get("dataset_from_index"), row.get("dataset_to_index")
    rows = (first, after) if isinstance(first, int) and isinstance(after, int) else None
    return EpisodeEntry(number, length, tasks, info.data_file(**numbers), places, rows)


def _shared_video(info: DatasetInfo, place: str, row: Mapping[str, Any], name: str) -> VideoPlace:
    numbers = {f"{what}_index": _number(place, row, f"videos/{name}/{what}_index") for what in ("chunk", "file")}
    start = row.get(f"videos/{name}/from_timestamp")
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start < 1e9:
        raise FormatError(f"{place}: videos/{name}/from_timestamp is {start!r}, expected a time in seconds")
    stated = row.get(f"videos/{name}/to_timestamp")
    stop = float(stated) if isinstance(stated, int | float) and not isinstance(stated, bool) else None
    return VideoPlace(info.video_file(video_key=name, **numbers), float(start), stop)


_STATS_COLUMN = "stats/"
_EPISODE_STATS = "meta/episodes_stats.jsonl"
_CHECKED = (INFO, "meta/stats.json")
_FRAMES_APART = 1.5
"""Tolerance in frames between the duration of an episode in a video and its number of rows."""


def source_metadata(info: DatasetInfo, metadata: Iterable[Path], *, files: bool) -> SourceMetadata:
    """Return the contents of the files `metadata`, with contradictions; with `files`, check rows and videos, too."""
    entries, tasks = read_episodes(info), read_tasks(info)
    texts = {
        number: {TASK: one.tasks[0]} if len(one.tasks) == 1 else {TASKS: dump_json(one.tasks)}
        for number, one in entries.items() if one.tasks
    }  # fmt: skip
    paths = dict.fromkeys(path for one in entries.values() for path in (one.data, *_video_paths(one)))
    root = os.fspath(info.root)
    return SourceMetadata(
        lengths={number: one.length for number, one in entries.items()},
        texts={number: texts.get(number, {}) for number in entries},
        tasks=tasks,
        documents={name: read_regular(info.root / name) for name in _CHECKED if (info.root / name).is_file()},
        files=[*map(os.fspath, metadata), *(f"{root}/{path}" for path in paths)],
        contradictions=list(_contradictions(info, entries)),
        problems=list(_file_problems(info, entries)) if files else (),
        statistics=_episode_statistics(info),
    )


def _video_paths(entry: EpisodeEntry) -> Iterator[str]:
    return (place.path for place in entry.videos.values())


def _contradictions(info: DatasetInfo, entries: Mapping[int, EpisodeEntry]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield contradictions between the lengths of episodes and their places in rows and videos."""
    start: int | None = 0
    for number, one in sorted(entries.items()):
        if one.rows is not None and one.length is not None:
            first, after = one.rows
            if after - first != one.length or start not in (None, first):
                stated = f"the metadata place episode {number} at rows {first:,} to {after:,} of the dataset"
                yield f"{stated}, its length is {one.length:,} and it follows {start or 0:,} rows", [number]
            start = after
        for name, place in one.videos.items():
            frames = None if place.stop is None else (place.stop - place.start) * info.fps
            if frames is not None and one.length is not None and abs(frames - one.length) > _FRAMES_APART:
                yield (
                    f"{name} of episode {number} lasts {frames:.0f} frames by its times, for {one.length:,} rows",
                    [number],
                )


def _file_problems(info: DatasetInfo, entries: Mapping[int, EpisodeEntry]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield problems of files of rows and videos, from their sizes and the footers of Parquet files."""
    uses: dict[str, list[EpisodeEntry]] = {}
    for one in entries.values():
        for path in (one.data, *_video_paths(one)):
            uses.setdefault(path, []).append(one)
    sizes = {
        f"{folder}/{file.name}": file.stat().st_size
        for folder in {path.rpartition("/")[0] for path in uses} if (info.root / folder).is_dir()
        for file in os.scandir(info.root / folder) if file.is_file()
    }  # fmt: skip
    for path, users in uses.items():
        numbers = [one.number for one in users]
        try:
            if sizes.get(path, 0) < _LARGEST_POINTER:
                require_content(info.root / path, "episodes need it")
            if path != users[0].data:
                continue
            with os.fdopen(open_regular(info.root / path), "rb") as file:
                rows = pq.read_metadata(file).num_rows
        except CorruptDataError as error:
            yield str(error), numbers
            continue
        except (pa.ArrowException, OSError, ValueError) as error:
            yield f"{info.root / path} cannot be read: {' '.join(str(error).split())[:200]}", numbers
            continue
        lengths = [one.length for one in users]
        if None not in lengths and rows != (stated := sum(one or 0 for one in lengths)):
            yield f"{info.root / path} has {rows:,} rows, the metadata state {stated:,}", numbers


def _episode_statistics(info: DatasetInfo) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the stored statistics of each episode, from JSON lines in v2.1, from columns of the episodes in v3."""
    lines, folder = info.root / _EPISODE_STATS, info.root / _EPISODES
    if lines.is_file():
        for place, row in _lines(lines):
            yield _number(place, row, EPISODE_INDEX), row.get("stats") or {}
    for path in sorted(folder.rglob("*.parquet")) if folder.is_dir() else ():
        for place, row in _parquet_rows(path):
            found: dict[str, dict[str, Any]] = {}
            for name, value in row.items():
                if name.startswith(_STATS_COLUMN) and value is not None:
                    feature, _, measure = name.removeprefix(_STATS_COLUMN).rpartition("/")
                    found.setdefault(feature, {})[measure] = value
            yield _number(place, row, EPISODE_INDEX), found


def _number(place: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 48:
        raise FormatError(f"{place}: {name} is {value!r}, expected a number from 0")
    return value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file, each with its place for messages."""
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        if line.strip():
            place = f"{path}, line {number}"
            row = parse_json(line, place)
            if not isinstance(row, dict):
                raise FormatError(f"{place} is {type(row).__name__}, expected an object")
            yield place, row


def _parquet_rows(path: Path, *, with_statistics: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a small Parquet file, each with its place for messages."""
    require_content(path, "it is part of the metadata")
    try:
        require_bounded_parquet(path, unread=None if with_statistics else _STATS_COLUMN)
        with os.fdopen(open_regular(path), "rb") as file:
            opened = pq.ParquetFile(file)
            names = [
                name for name in opened.schema_arrow.names if with_statistics or not name.startswith(_STATS_COLUMN)
            ]
            for batch in opened.iter_batches(batch_size=1024, columns=names, use_threads=False):
                batch.validate(full=True)
                for row in batch.to_pylist():
                    yield str(path), row
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, FormatError) or getattr(error, "errno", None) is not None:
            raise
        raise CorruptDataError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


SHARD_BYTES = 64 << 20
"""Bytes of files from which a run is complete."""


def runs_of(entries: Sequence[EpisodeEntry], sizes: Mapping[str, int]) -> Iterator[list[EpisodeEntry]]:
    """Divide episodes into runs of about `SHARD_BYTES`, only between files of rows; `sizes` are bytes by path."""
    run: list[EpisodeEntry] = []
    files: set[str] = set()
    for entry in entries:
        if run and entry.data != run[-1].data and sum(sizes[path] for path in files) >= SHARD_BYTES:
            yield run
            run, files = [], set()
        run.append(entry)
        files.update(paths_of(entry, sizes))
    yield run


def paths_of(entry: EpisodeEntry, sizes: Mapping[str, int]) -> list[str]:
    """Return the existing files of an episode: those with a size in `sizes`."""
    return [path for path in (entry.data, *(place.path for place in entry.videos.values())) if path in sizes]


EPISODE_INDEX, FRAME_INDEX, TASK_INDEX, TIMESTAMP, INDEX = (
    "episode_index", "frame_index", "task_index", "timestamp", "index",
)  # fmt: skip
NEXT_DONE, NEXT_SUCCESS, NEXT_TERMINATED, NEXT_TRUNCATED = (
    "next.done", "next.success", "next.terminated", "next.truncated",
)  # fmt: skip
NEXT_FLAGS = (NEXT_DONE, NEXT_SUCCESS, NEXT_TERMINATED, NEXT_TRUNCATED)
_KEYS: dict[str, tuple[Key, Role]] = {
    FRAME_INDEX: (("frame",), "id"), TASK_INDEX: ((TASK_INDEX,), "id"), TIMESTAMP: ((TIMESTAMP,), "info"),
    INDEX: (("info", INDEX), "id"),
}  # fmt: skip
"""Keys and roles of columns that every dataset has. The key `index` at the root is reserved for samplers."""
_IMAGES = ("observation", "images")
_TAKEN = frozenset({NEXT, "episode", "reward", *(flag[0] for flag in FLAGS)})
"""Names that TED uses at the root; a feature with one of them becomes an info."""


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """A feature and the field that it becomes, under its root key.

    `channels_first` is the layout of images. With `is_kept`, rows are references to frames of a kept video.
    """

    feature: Feature
    field: Field
    timing: Timing
    channels_first: bool = False
    is_kept: bool = False

    @property
    def name(self) -> str:
        """The name of the feature."""
        return self.feature.name


@dataclass
class FeatureColumns:
    """The features of a dataset by what becomes of them.

    Attributes:
        columns: features that become fields.
        dropped: features that are left out, with the reason.
        renamed: keys that differ from the name of their feature.
        text: features whose rows are text; they become texts of episodes.
        language: features of annotations; they become texts of episodes.
        flags: features that state how episodes end.
    """

    columns: list[FeatureColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    language: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    @property
    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """The fields with their timings."""
        return tuple((one.field, one.timing) for one in self.columns)


class RowFlags(NamedTuple):
    """Flags of rows, bool `[rows]`; `ends` states for each row whether an episode that ends there is terminated."""

    terminated: Array
    truncated: Array
    ends: Array


@dataclass(frozen=True, slots=True)
class EndFlags:
    """Interprets the flags of a dataset.

    `next.terminated` and `next.truncated` are used if present, else `next.done`. With `done_terminates`, that is a
    termination, and so is `next.success` in the last row of an episode; without, it is a truncation.
    """

    done_terminates: bool

    def of(self, flags: Mapping[str, Array], rows: int) -> RowFlags:
        """Return the flags of rows from the columns of flags that are present."""
        none = np.zeros(rows, bool)
        if NEXT_TERMINATED in flags or NEXT_TRUNCATED in flags:
            terminated = flags.get(NEXT_TERMINATED, none)
            return RowFlags(terminated, flags.get(NEXT_TRUNCATED, none), terminated)
        done = flags.get(NEXT_DONE, none)
        if not self.done_terminates:
            return RowFlags(none, done, none)
        return RowFlags(done, none, done | flags.get(NEXT_SUCCESS, none))


def columns_of(info: DatasetInfo, stored: Mapping[str, str], images: Images) -> FeatureColumns:
    """Decide what becomes of each feature.

    Args:
        info: the contents of `info.json`.
        stored: the element types of the columns in the files, by name.
        images: the option for images and videos.

    Raises:
        FormatError: a feature has no column, or the key of one feature would contain the key of another.
    """
    found = FeatureColumns()
    for name, feature in sorted(info.features.items()):
        if name == EPISODE_INDEX:
            continue
        if feature.is_visual and images == "skip":
            found.dropped.append(Dropped(name, "images are left out (--images skip)"))
        elif name not in stored and (name in NEXT_FLAGS or not (feature.is_visual or feature.dtype == SPOKEN)):
            raise FormatError(f"{info.root}: {INFO} has the feature {name!r}, and the files of rows lack it")
        elif name in NEXT_FLAGS:
            found.flags.append(name)
            if name == NEXT_SUCCESS:
                found.columns.append(_column(feature, ("success",), "info", "result", "bool", ()))
        elif feature.is_visual:
            _add_image(found, feature, stored.get(name), keep=images == "keep" and feature.dtype == VIDEO)
        elif feature.dtype == SPOKEN and stored.get(name, SPOKEN) == SPOKEN:
            found.language += [name] * (name in stored)
        elif stored[name] == "string":
            found.text.append(name)
        else:
            _add_numbers(found, info, feature, stored[name])
    for name in sorted(stored.keys() - info.features.keys()):
        found.dropped.append(Dropped(name, f"{INFO} does not name it"))
    _require_apart(info, found.columns)
    return found


def _add_image(found: FeatureColumns, feature: Feature, stored: str | None, *, keep: bool) -> None:
    shape, dtype = feature.shape, "uint8"
    channels = (1,) if feature.depth else (3,) if feature.dtype == VIDEO else (1, 3, 4)
    if feature.is_depth:
        if feature.dtype == VIDEO and feature.depth is None:
            found.dropped.append(Dropped(feature.name, "it is a depth map that is stored as colors in a video"))
            return
        dtype = str(feature.depth.table.dtype) if feature.depth else stored or dtype
    if len(shape) != 3 or not all(shape) or not {shape[0], shape[2]} & set(channels):
        found.dropped.append(Dropped(feature.name, f"{list(shape)} is not the shape of an image with channels"))
        return
    first = feature.names[0] in ("channel", "channels", "c") if feature.names else shape[2] not in channels
    key = _key_of(feature.name)
    _note(found, feature.name, key)
    pixels = Field(key, dtype, shape, "observation")
    field = reference_field(pixels) if keep else pixels
    found.columns.append(FeatureColumn(feature, field, "state", first, keep))


def _add_numbers(found: FeatureColumns, info: DatasetInfo, feature: Feature, stored: str) -> None:
    name = feature.name
    dtype = feature.dtype if feature.dtype in DTYPES and np.can_cast(stored, feature.dtype) else stored
    if dtype not in DTYPES:
        found.dropped.append(Dropped(name, f"its values are {dtype}, which are not numbers"))
        return
    if name in _KEYS:
        key, role = _KEYS[name]
        _note(found, name, key)
        found.columns.append(_column(feature, key, role, "step", dtype, ()))
        return
    if name == "next.reward":
        if int(np.prod(feature.shape, dtype=np.int64)) != 1:
            raise FormatError(f"{info.root}: {name} has the shape {list(feature.shape)}, expected one number")
        found.columns.append(_column(feature, REWARD, "reward", "result", dtype, ()))
        return
    key = _key_of(name)
    if key[0] == NEXT and (len(key) == 1 or key[1] == "observation"):
        found.dropped.append(Dropped(name, "next observations are taken from the following row"))
        return
    timing: Timing = "result" if key[0] == NEXT else "state" if key[0] == "observation" else "step"
    key = key[1:] if key[0] == NEXT else key
    key = ("info", *key) if key[0] in _TAKEN else key
    _note(found, name, (NEXT, *key) if timing == "result" else key)
    found.columns.append(_column(feature, key, role_of(key), timing, dtype, feature.shape))


def _column(
    feature: Feature,
    key: Key,
    role: Role,
    timing: Timing,
    dtype: str,
    shape: tuple[int, ...],
) -> FeatureColumn:
    return FeatureColumn(feature, Field(key, dtype, shape, role), timing)


def as_stated(image: Array, column: FeatureColumn, what: str) -> Array:
    """Bring images `[..., height, width, channels]` into the stated layout; FormatError if their shape differs."""
    found = np.moveaxis(image, -1, -3) if column.channels_first else image
    if found.shape[-3:] != column.feature.shape:
        raise FormatError(
            f"{what}: images have the shape {list(found.shape[-3:])}, info.json states {list(column.feature.shape)}"
        )
    return found


def _key_of(name: str) -> Key:
    """Return the key of a feature: (observation, image, top) for `observation.images.top`; others are split at dots."""
    parts = tuple(safe_part(part or "_") for part in name.split("."))
    return ("observation", "image", *parts[2:]) if parts[:2] == _IMAGES and len(parts) > 2 else parts


def _note(found: FeatureColumns, name: str, key: Key) -> None:
    if key_name(key) != name:
        found.renamed[name] = key_name(key)


def _require_apart(info: DatasetInfo, columns: Iterable[FeatureColumn]) -> None:
    names: dict[Key, str] = {}
    for column in columns:
        key = column.field.key
        for other, name in names.items():
            if key[: len(other)] == other or other[: len(key)] == key:
                raise FormatError(
                    f"{info.root}: the features {name!r} and {column.name!r} would be {key_name(other)} and "
                    f"{key_name(key)}, one of which contains the other"
                )
        names[key] = column.name
