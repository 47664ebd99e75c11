"""Exports to a dataset of LeRobot, v3.0: `LeRobotDataset("OWNER/NAME", root=DEST)` opens it.

    meta/info.json, stats.json, tasks.parquet, episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet     one row a step, of whole episodes
    videos/KEY/chunk-000/file-000.mp4   videos that the dataset keeps, as they are

Images are stored in the rows as PNG, without loss. There is no row for the observation after the last step of an
episode.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...core.encodings.video import CHANNELS, VideoFile, VideoIndex
from ...core.errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Chosen, Sink
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import read_regular
from ...core.format.manifest import Dropped
from ...core.format.syncing import NewFile
from ...core.format.videos import VIDEO_SUFFIX, image_key, index_name, reference_keys, video_name
from ...core.ted.schema import EPISODE, NEXT, NEXT_REWARD, SINGLETONS, Field, Key, key_name, state_keys
from ..files.arrow import nested, parquet_writer
from ..files.exports import FORMAT, ExportColumn, columns_of, decoded
from .metadata import EPISODE_INDEX, FRAME_INDEX, INDEX, INFO, LANGUAGE, TASK_INDEX, TIMESTAMP, VIDEO

Kind: TypeAlias = Literal["numbers", "text", "image", "video"]
_OWN = (
    (TIMESTAMP, "float32"),
    (FRAME_INDEX, "int64"),
    (EPISODE_INDEX, "int64"),
    (INDEX, "int64"),
    (TASK_INDEX, "int64"),
)
"""The columns of every dataset, which are made again."""
MADE: frozenset[Key] = frozenset({("frame",), (TIMESTAMP,), (TASK_INDEX,), ("info", INDEX)})
_OBSERVATION, _IMAGES = "observation", ("observation", "image")
_CHANNELS = frozenset({1, 3, 4})


@dataclass(frozen=True, slots=True)
class ExportFeature:
    """A feature with the leaf that it is made of. `channels_first` is about images; those are written otherwise."""

    name: str
    kind: Kind
    column: ExportColumn
    shape: tuple[int, ...]
    channels_first: bool = False

    @property
    def key(self) -> Key:
        """The key of the leaf."""
        return self.column.field.key

    def document(self, fps: float, names: object = None) -> dict[str, Any]:
        """The entry in `info.json`; `names` name the numbers of a row; None where they have no names."""
        if self.kind == "text":
            return {"dtype": "string", "shape": [1], "names": None}
        if self.kind == "numbers":
            return {"dtype": self.column.field.dtype, "shape": list(self.shape or (1,)), "names": names}
        axes = ["height", "width", "channels"]
        found: dict[str, Any] = {"dtype": self.kind, "shape": list(self.shape), "names": axes}
        if self.kind == VIDEO:
            found["info"] = {"video.fps": fps, "video.is_depth_map": False, "has_audio": False}
        return found


def own_features() -> dict[str, dict[str, Any]]:
    """The entries of the columns that every dataset has."""
    return {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _OWN}


def features_of(fields: tuple[Field, ...]) -> tuple[list[ExportFeature], list[Dropped]]:
    """Lay out fields as features; return also what is left out. SchemaError where two would have one name."""
    states, references = set(state_keys(fields)), set(reference_keys(fields))
    found: list[ExportFeature] = []
    dropped: list[Dropped] = []
    for column in columns_of(fields):
        key = column.field.key
        if key in MADE or key == EPISODE or (key[0] == NEXT and key[1:] in states):
            continue
        if key in SINGLETONS:
            dropped.append(Dropped(column.field.name, "flags and rewards at the root do not belong to the step"))
            continue
        if column.field.dtype in ("bfloat16", "complex64", "complex128"):
            raise SchemaError(f"{column.field.name} is {column.field.dtype}, which LeRobot does not have")
        found.append(_feature(column, key, references, states))
    _require_names(found)
    return found, dropped


def _feature(column: ExportColumn, key: Key, references: set[Key], states: set[Key]) -> ExportFeature:
    field = column.field
    if key in references:
        return ExportFeature(_name(image_key(key), is_image=True, is_state=True), "video", column, ())
    if column.length is not None:
        return ExportFeature(_name(key, is_image=False, is_state=key in states), "text", column, ())
    if key in states and field.dtype == "uint8" and len(field.shape) == 3:
        first = field.shape[2] not in _CHANNELS and field.shape[0] in _CHANNELS
        image = (*field.shape[1:], field.shape[0]) if first else field.shape
        if image[2] in _CHANNELS and all(image):
            return ExportFeature(_name(key, is_image=True, is_state=True), "image", column, image, first)
    shape = () if key == NEXT_REWARD or (key[0] == NEXT and field.shape == (1,)) else field.shape
    return ExportFeature(_name(key, is_image=False, is_state=key in states), "numbers", column, shape)


def _name(key: Key, *, is_image: bool, is_state: bool) -> str:
    if key == (_OBSERVATION,):
        return "observation.images.image" if is_image else "observation.state"
    if key[:2] == _IMAGES and is_image:
        return key_name(("observation", "images", *(key[2:] or ("image",))))
    inner = key[1:] if key[0] == _OBSERVATION else key
    if is_image:
        return key_name(("observation", "images", *inner))
    return key_name((_OBSERVATION, *inner)) if is_state else key_name(key)


def _require_names(found: Iterable[ExportFeature]) -> None:
    names: set[str] = {name for name, _ in _OWN}
    for feature in found:
        if feature.name in names or "/" in feature.name:
            raise SchemaError(f"{feature.column.field.name} would be the feature {feature.name!r}, which is taken")
        names.add(feature.name)


_DATA_MB, _VIDEO_MB, _CHUNK = 100, 200, 1000
_DATA, _VIDEOS, _EPISODES = "data", "videos", "meta/episodes/chunk-000/file-000.parquet"
_ROW_BYTES, _GROUP_BYTES = 40, 8 << 20
_SAMPLED_IMAGES, _SAMPLED_VIDEOS = 64, 4
_LARGEST = (1 << 63) - 1
_MOST_FPS = 1e6
_PART = re.compile(r"(?P<key>.+)\[(?P<first>[0-9]+)(?::(?P<stop>[0-9]+))?\]")
"""Where a column is in a vector, as `renamed_keys` state it: `observation[0]`, or `observation[0:3]`."""


class LerobotExporter(Sink):
    """Writes LeRobot v3.0: rows in Parquet files of about 100 MB, and kept videos as they are."""

    keeps_videos = True
    option_names = frozenset({"fps"})

    def __init__(self, chosen: Chosen, name: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(chosen, name, options)
        self._language: ExportColumn | None = None
        self._features: list[ExportFeature] = []
        self._fps = 0.0
        self._videos: dict[str, VideoIndex] = {}

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the folder has `meta/info.json` as an export writes it, and nothing of others next to it."""
        try:
            names = {entry.name for entry in path.iterdir()}
            document = json.loads(read_regular(path / INFO))
            return names <= {"meta", _DATA, _VIDEOS} and document.get("exported_by") == FORMAT
        except (OSError, ValueError, AttributeError):
            return False

    def prepare(self) -> None:
        """Lay out the features, and refuse what LeRobot does not have."""
        features, dropped = features_of(self.chosen.fields)
        self.dropped += dropped
        language = [one for one in features if one.key == (LANGUAGE,) and one.kind == "text"]
        self._language = language[0].column if language else None
        self._features = [one for one in features if one not in language]
        self._refuse_large_numbers()
        stated = self.options.get("fps", self._source_info.get("fps"))
        known = isinstance(stated, int | float) and not isinstance(stated, bool) and 0 < stated <= _MOST_FPS
        if not known and "fps" in self.options:
            raise UsageError(f"--fps is {stated!r}, expected a number of steps a second")
        self._fps = float(stated) if known and stated is not None else 1.0
        if not known:
            self.notes.append("the rate of steps is not known: fps is 1, and timestamps count steps (--fps states it)")
        if not self._source_info:
            made = [key_name(one.key) for one in self.chosen.fields if one.key in MADE]
            self.dropped += [Dropped(one, "LeRobot's column of that name is made again") for one in made]
        count = len(self.chosen.table)
        self.notes.append(
            f"the observation after the last step of {count:,} episode{'s' if count != 1 else ''} is left out: LeRobot "
            "has no row for it"
        )
        if self._language is None and not all(self._tasks_of(position) for position in range(count)):
            self.notes.append(f"episodes without the text {LANGUAGE} have the task {self.name!r}")

    def _refuse_large_numbers(self) -> None:
        """Raise SchemaError for a number that LeRobot cannot read: it makes int64 of uint64."""
        for one in self._features:
            if one.kind != "numbers" or one.column.field.dtype != "uint64":
                continue
            for rows in self.chosen.chunks(one.key, one.column.bytes):
                if rows.size and (largest := int(rows.max())) > _LARGEST:
                    name = one.column.field.name
                    raise SchemaError(
                        f"{name} is uint64 and has {largest}, and LeRobot reads whole numbers up to 2**63 - 1",
                        hint=f"leave it out first: rbtool preprocess DATASET --exclude {name} --dest DEST",
                    )

    @cached_property
    def _source_info(self) -> Mapping[str, Any]:
        data = self.chosen.reader.documents().get(INFO, b"{}")
        found = parse_json(data, INFO)
        return found if isinstance(found, dict) else {}

    def size(self) -> int:
        """Bytes of the rows and of the videos."""
        videos = [one for name, one in self.chosen.reader.videos().items() if name.endswith(VIDEO_SUFFIX)]
        return super().size() + sum(one.stat().st_size for one in videos if isinstance(one, Path))

    def _tasks_of(self, position: int) -> list[str]:
        """The tasks of an episode, in the order of their first steps."""
        if self._language is not None:
            return list(dict.fromkeys(self._instructions(*self.chosen.episode(position))))
        text = {} if self.chosen.text is None else self.chosen.text[position]
        if LANGUAGE in text:
            return [text[LANGUAGE]]
        several = parse_json(text.get(f"{LANGUAGE}s", "[]"), LANGUAGE)
        return [str(one) for one in several] if isinstance(several, list) else []

    def _instructions(self, start: int, stop: int) -> list[str]:
        """The tasks of rows of the dataset, where each row states its own."""
        assert self._language is not None
        assert self._language.length is not None
        rows, lengths = (
            self.chosen.reader.read(field.key, start, stop) for field in (self._language.field, self._language.length)
        )
        return decoded(rows, lengths, self._language.field.name)

    def _names_of(self, one: ExportFeature) -> object:
        """The names of the numbers of a row: as LeRobot's metadata state them, or of the columns that were joined."""
        features = self._source_info.get("features")
        stated = features.get(one.name) if isinstance(features, dict) else None
        if isinstance(stated, dict) and stated.get("shape") == list(one.shape or (1,)):
            return stated.get("names")
        if len(one.shape) != 1:
            return None
        found: dict[int, str] = {}
        for column, places in self.chosen.reader.manifest.renamed_keys.items():
            for place in places.split(", "):
                match = _PART.fullmatch(place)
                if match is None or match["key"] != key_name(one.key):
                    continue
                first, stop = int(match["first"]), int(match["stop"] or -1)
                found |= {at: f"{column}_{at - first}" for at in range(first, stop)} or {first: column}
        return [found[at] for at in range(one.shape[0])] if found.keys() == set(range(one.shape[0])) else None

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write rows, videos and, last, the metadata."""
        fs.make_folder(target / "meta" / "episodes" / "chunk-000")
        tasks: dict[str, int] = {}
        statistics = {one.name: _Statistics(one) for one in self._features if one.kind != "text"}
        videos = _Videos(self.chosen, [one for one in self._features if one.kind == "video"], self._fps)
        episodes: list[dict[str, Any]] = []
        start = 0
        for number, positions in enumerate(self._files()):
            place = {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}
            path = target / _DATA / _numbered(place, "parquet")
            fs.make_folder(path.parent)
            with parquet_writer(path, self._schema) as (writer, file):
                waiting: list[Any] = []
                held = 0
                for position in positions:
                    first, stop = self.chosen.episode(position)
                    found = self._tasks_of(position) or [self.name]
                    numbers = [tasks.setdefault(task, len(tasks)) for task in found]
                    episodes.append(
                        {"episode_index": position, "tasks": found, "length": stop - first}
                        | {f"data/{name}": value for name, value in place.items()}
                        | {"dataset_from_index": start, "dataset_to_index": start + stop - first}
                        | videos.of(position, first, stop)
                        | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
                    )
                    for batch, size in self._batches(position, first, stop, start, found, numbers, statistics):
                        waiting.append(batch)
                        held += batch.nbytes
                        if held >= _GROUP_BYTES:
                            writer.write_table(pa.Table.from_batches(waiting))
                            waiting, held = [], 0
                        file.check()
                        progress(size)
                    start += stop - first
                if waiting:
                    writer.write_table(pa.Table.from_batches(waiting))
        videos.write(target, statistics, progress)
        self._write_metadata(target, tasks, episodes, statistics, videos.shapes)

    def _files(self) -> Iterator[list[int]]:
        """Yield the episodes of each file of rows."""
        row = _ROW_BYTES + sum(one.column.bytes for one in self._features)
        found: list[int] = []
        size = 0
        for position, length in enumerate(self.chosen.table.length.tolist()):
            if found and size + length * row > _DATA_MB << 20:
                yield found
                found, size = [], 0
            found.append(position)
            size += length * row
        if found:
            yield found

    @cached_property
    def _schema(self) -> Any:
        columns = [(one.name, _arrow_type(one)) for one in self._features if one.kind != "video"]
        own = [(name, pa.from_numpy_dtype(entry["dtype"])) for name, entry in own_features().items()]
        return pa.schema([*columns, *own])

    def _batches(
        self,
        position: int,
        first: int,
        stop: int,
        start: int,
        names: list[str],
        tasks: list[int],
        statistics: Mapping[str, _Statistics],
    ) -> Iterator[tuple[Any, int]]:
        """Yield the rows of an episode and how many bytes they are; `start` is the row of its first step."""
        reader, schema = self.chosen.reader, self._schema
        size = sum(field.row_bytes for field in self.chosen.fields)
        rows = max(1, _GROUP_BYTES // max(1, size))
        seen: dict[int, int] = {}
        for low in range(first, stop, rows):
            high = min(low + rows, stop)
            arrays = []
            for one in self._features:
                if one.kind == "video":
                    continue
                values = reader.read(one.key, low, high)
                if one.kind == "text" and one.column.length is not None:
                    lengths = reader.read(one.column.length.key, low, high)
                    arrays.append(pa.array(decoded(values, lengths, one.name), pa.string()))
                    continue
                values = np.moveaxis(values, 1, -1) if one.channels_first else values
                statistics[one.name].add(values)
                arrays.append(
                    _png(values)
                    if one.kind == "image"
                    else _numbers(values.reshape(len(values), *one.shape), one.shape)
                )
            frame = np.arange(low - first, high - first)
            task = self._task_numbers(low, high, names, tasks, seen)
            own = (
                (frame / self._fps).astype(np.float32), frame, np.full(high - low, position), start + frame, task,
            )  # fmt: skip
            arrays += [pa.array(one) for one in own]
            yield pa.record_batch(arrays, schema=schema), size * (high - low)

    def _task_numbers(self, low: int, high: int, names: list[str], tasks: list[int], seen: dict[int, int]) -> Array:
        """The number of the task of each row: of several, they are in the order in which `task_index` has them."""
        if len(tasks) == 1:
            return np.full(high - low, tasks[0])
        if self._language is not None:
            numbers = dict(zip(names, tasks, strict=True))
            return np.array([numbers[one] for one in self._instructions(low, high)], np.int64)
        if all(field.key != ("task_index",) for field in self.chosen.fields):
            raise SchemaError("episodes have several tasks, and no task_index states which of them a row has")
        stored = self.chosen.reader.read(("task_index",), low, high).tolist()
        for one in stored:
            seen.setdefault(one, len(seen))
        if len(seen) > len(tasks):
            raise SchemaError("an episode has more values of task_index than tasks")
        return np.array([tasks[seen[one]] for one in stored], np.int64)

    def _write_metadata(
        self,
        target: Path,
        tasks: Mapping[str, int],
        episodes: list[dict[str, Any]],
        statistics: Mapping[str, _Statistics],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        _write_table(target / _EPISODES, pa.Table.from_pylist(episodes))
        _write_table(target / "meta" / "tasks.parquet", _task_table(tasks))
        features = {one.name: one.document(self._fps, self._names_of(one)) for one in self._features}
        for name, shape in shapes.items():
            features[name]["shape"] = list(shape)
        document = {
            "codebase_version": "v3.0", "robot_type": self._source_info.get("robot_type"),
            "total_episodes": len(episodes), "total_frames": self.chosen.steps, "total_tasks": len(tasks),
            "chunks_size": _CHUNK, "data_files_size_in_mb": _DATA_MB, "video_files_size_in_mb": _VIDEO_MB,
            "fps": int(self._fps) if self._fps == int(self._fps) else self._fps,
            "splits": {"train": f"0:{len(episodes)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4" if shapes else None,
            "features": features | own_features(), "exported_by": FORMAT,
        }  # fmt: skip
        found = {name: one.document() for name, one in statistics.items() if one.count}
        fs.write_file(target / "meta" / "stats.json", (dump_json(found, indent=1) + "\n").encode())
        fs.write_file(target / INFO, (dump_json(document, indent=4) + "\n").encode())


class _Videos:
    """The kept videos that episodes refer to, numbered in the order of their first use, by feature."""

    def __init__(self, chosen: Chosen, features: list[ExportFeature], fps: float) -> None:
        self._chosen, self._features, self._fps = chosen, features, fps
        self._contents = chosen.reader.videos()
        self._numbers: dict[str, dict[int, int]] = {one.name: {} for one in features}
        self._indexes: dict[int, VideoIndex] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def of(self, position: int, first: int, stop: int) -> dict[str, Any]:
        """Return what the metadata state about the videos of an episode."""
        found: dict[str, Any] = {}
        for one in self._features:
            rows = self._chosen.reader.read(one.key, first, stop)
            ids, frames = np.unique(rows[:, 0]).tolist(), rows[:, 1]
            if len(ids) != 1:
                raise SchemaError(f"episode {position} refers to {len(ids)} videos of {one.name}, LeRobot has one")
            times = self._index(ids[0]).times
            if not (frames.min() >= 0 and frames.max() < len(times)):
                raise CorruptDataError(f"episode {position} refers to frames that a video of {one.name} does not have")
            start = float(times[frames[0]])
            drift = np.abs(times[frames] - start - np.arange(len(frames)) / self._fps)
            if (drift >= 0.5 / self._fps).any():
                raise SchemaError(f"episode {position} has frames of {one.name} that are not {self._fps:g} a second")
            number = self._numbers[one.name].setdefault(ids[0], len(self._numbers[one.name]))
            values = {
                "chunk_index": number // _CHUNK, "file_index": number % _CHUNK, "from_timestamp": start,
                "to_timestamp": start + len(frames) / self._fps,
            }  # fmt: skip
            found |= {f"videos/{one.name}/{name}": value for name, value in values.items()}
        return found

    def _index(self, number: int) -> VideoIndex:
        if number not in self._indexes:
            content = self._contents.get(index_name(number))
            if content is None:
                raise CorruptDataError(f"{self._chosen.reader.path} has no video {video_name(number)}")
            data = content if isinstance(content, bytes) else read_regular(content)
            self._indexes[number] = VideoIndex.from_bytes(data, index_name(number))
        return self._indexes[number]

    def write(self, target: Path, statistics: Mapping[str, _Statistics], progress: Callable[[int], None]) -> None:
        """Copy the files, note the shapes of their frames, and take some of them into account."""
        for name, numbers in self._numbers.items():
            for identity, number in numbers.items():
                content = self._contents[video_name(identity)]
                if isinstance(content, bytes):
                    raise RbtoolError(f"{video_name(identity)} is not a file")
                if number < _SAMPLED_VIDEOS:
                    with VideoFile(content, self._index(identity)) as video:
                        self.shapes.setdefault(name, video.shape)
                        some = np.linspace(0, len(video) - 1, _SAMPLED_IMAGES // _SAMPLED_VIDEOS).astype(np.int64)
                        statistics[name].add(video.read(np.unique(some)))
                place = {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}
                file = NewFile(target / _VIDEOS / name / _numbered(place, "mp4"))
                try:
                    with content.open("rb") as opened:
                        while data := opened.read(1 << 20):
                            file.append(memoryview(data))
                            progress(len(data))
                    file.sync()
                finally:
                    file.close()


class _Statistics:
    """The least, the largest, the mean and the deviation of a feature; of images, by channel and of a sample."""

    def __init__(self, feature: ExportFeature) -> None:
        self._is_image = feature.kind in ("image", "video")
        channels = feature.shape[2] if len(feature.shape) == 3 else CHANNELS
        self._shape = (channels, 1, 1) if self._is_image else (feature.shape or (1,))
        self.count = 0
        self._seen = 0
        self._sums = [np.zeros(self._shape, np.float64) for _ in range(2)]
        self._bounds: tuple[Array, Array] | None = None

    def add(self, rows: Array) -> None:
        """Take rows into account."""
        values = rows.astype(np.float64)
        if self._is_image:
            if self._seen >= _SAMPLED_IMAGES:
                return
            values = values[: _SAMPLED_IMAGES - self._seen] / 255
            self._seen += len(values)
            values = values.reshape(-1, values.shape[-1])
        values = values.reshape(len(values), *self._shape)
        low, high = values.min(axis=0), values.max(axis=0)
        if self._bounds is not None:
            low, high = np.minimum(low, self._bounds[0]), np.maximum(high, self._bounds[1])
        self._bounds = low, high
        self._sums = [self._sums[0] + values.sum(axis=0), self._sums[1] + (values**2).sum(axis=0)]
        self.count += len(values)

    def document(self) -> dict[str, Any]:
        """The entry in `stats.json`."""
        assert self._bounds is not None
        mean = self._sums[0] / self.count
        deviation = np.sqrt(np.maximum(self._sums[1] / self.count - mean**2, 0))
        count = self._seen if self._is_image else self.count
        found = {"min": self._bounds[0], "max": self._bounds[1], "mean": mean, "std": deviation}
        return {name: value.tolist() for name, value in found.items()} | {"count": [count]}


def _numbered(place: Mapping[str, int], suffix: str) -> str:
    return f"chunk-{place['chunk_index']:03d}/file-{place['file_index']:03d}.{suffix}"


def _arrow_type(feature: ExportFeature) -> Any:
    if feature.kind == "text":
        return pa.string()
    if feature.kind == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.from_numpy_dtype(feature.column.field.numpy)
    if len(feature.shape) == 1:
        return kind if feature.shape == (1,) else pa.list_(kind, feature.shape[0])
    for _ in feature.shape:
        kind = pa.list_(kind)
    return kind


def _numbers(values: Array, shape: tuple[int, ...]) -> Any:
    """Lay rows out as LeRobot does: a vector of one number is a plain column."""
    if len(shape) > 1:
        return nested(values.reshape(len(values), *shape))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if shape in ((), (1,)) else pa.FixedSizeListArray.from_arrays(flat, shape[0])


def _png(images: Array) -> Any:
    from PIL import Image  # needed only where there are images

    found = []
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(out, "PNG", compress_level=1)
        found.append({"bytes": out.getvalue(), "path": None})
    return pa.array(found, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def _task_table(tasks: Mapping[str, int]) -> Any:
    """The tasks by number; their texts are the index for pandas, as lerobot looks them up."""
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    entries = [
        {"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy, "metadata": None}
        for name, (pandas, numpy) in kinds.items()
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": entries, "pandas_version": "2.0.0"}
    table = pa.table({"task_index": pa.array(list(tasks.values()), pa.int64()), "task": pa.array(list(tasks))})
    return table.replace_schema_metadata({"pandas": dump_json(about)})


def _write_table(path: Path, table: Any) -> None:
    with parquet_writer(path, table.schema) as (writer, _):
        writer.write_table(table)
