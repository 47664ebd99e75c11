"""What `meta` states about episodes and tasks: JSON lines in v2.0 and v2.1, Parquet files in v3.0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError
from ...core.format.digest import open_regular, read_regular
from ...core.format.documents import parse_json
from ...core.format.read_errors import FETCH_AGAIN
from ..files.arrow import require_bounded_parquet
from .info import VIDEO, DatasetInfo, require_content

_TASKS_LINES, _TASKS = "meta/tasks.jsonl", "meta/tasks.parquet"
_EPISODES_LINES, _EPISODES = "meta/episodes.jsonl", "meta/episodes"
_TEXT_COLUMNS = ("task", "__index_level_0__")
"""Names of the column with the texts of tasks: pandas' index has the second one where it has no name."""


@dataclass(frozen=True, slots=True)
class VideoPlace:
    """Where the video of an episode is: `path`, relative to the dataset, from the time `start` on, in seconds.

    `stop` is the time that the metadata state for its end, which is not relied on.
    """

    path: str
    start: float = 0.0
    stop: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """What the metadata state about an episode: its length, its tasks, the file of its rows, and its videos by feature.

    `length` is None where it is not stated.
    """

    number: int
    length: int | None
    tasks: tuple[str, ...]
    data: str
    videos: Mapping[str, VideoPlace] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrameEpisode:
    """Rows `[start, stop)` of the file `path` are an episode, whose first frame has the number `frame`."""

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
    """Return the tasks by number; none where there is no file of them."""
    found: dict[int, str] = {}
    for place, row in _task_rows(info):
        number, text = row.get("task_index"), next((row[name] for name in _TEXT_COLUMNS if name in row), None)
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(text, str):
            raise FormatError(f"{place} has no task_index and task")
        if found.setdefault(number, text) != text:
            raise FormatError(f"{place}: task {number} is there twice, with other texts")
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
    """Return what is stated about each episode, by number; FormatError for metadata of another version than stated."""
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
            raise FormatError(f"{place}: episode {entry.number} is there twice")
    if not found:
        raise FormatError(f"{info.root} has no episodes: its metadata name none")
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
    return EpisodeEntry(number, length, tasks, info.data_file(**numbers), places)


def _shared_video(info: DatasetInfo, place: str, row: Mapping[str, Any], name: str) -> VideoPlace:
    numbers = {f"{what}_index": _number(place, row, f"videos/{name}/{what}_index") for what in ("chunk", "file")}
    start = row.get(f"videos/{name}/from_timestamp")
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start < 1e9:
        raise FormatError(f"{place}: videos/{name}/from_timestamp is {start!r}, expected a time in seconds")
    stated = row.get(f"videos/{name}/to_timestamp")
    stop = float(stated) if isinstance(stated, int | float) and not isinstance(stated, bool) else None
    return VideoPlace(info.video_file(video_key=name, **numbers), float(start), stop)


def _number(place: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 48:
        raise FormatError(f"{place}: {name} is {value!r}, expected a number from 0")
    return value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their places."""
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        if line.strip():
            place = f"{path}, line {number}"
            row = parse_json(line, place)
            if not isinstance(row, dict):
                raise FormatError(f"{place} is {type(row).__name__}, expected an object")
            yield place, row


def _parquet_rows(path: Path, *, with_statistics: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a small Parquet file with their places."""
    require_content(path, "it is part of the metadata")
    try:
        require_bounded_parquet(path)
        with os.fdopen(open_regular(path), "rb") as file:
            opened = pq.ParquetFile(file)
            names = [name for name in opened.schema_arrow.names if with_statistics or not name.startswith("stats/")]
            for batch in opened.iter_batches(batch_size=1024, columns=names, use_threads=False):
                batch.validate(full=True)
                for row in batch.to_pylist():
                    yield str(path), row
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, FormatError) or getattr(error, "errno", None) is not None:
            raise
        raise CorruptDataError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
