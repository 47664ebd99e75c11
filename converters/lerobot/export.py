"""Exports to LeRobot v3.0; `LeRobotDataset("OWNER/NAME", root=DEST)` opens the result.

    meta/info.json, stats.json, tasks.parquet, episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet     one row per step, of whole episodes
    videos/KEY/chunk-000/file-000.mp4   the kept videos of the dataset, unchanged

Images are stored in the rows without loss, as PNG, and depth maps as TIFF. The observation after the last step of an
episode has no row. Names, types and metadata of a dataset that was converted from LeRobot are restored.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa

from ...core.encodings.video import CHANNELS, VideoIndex, open_video, require_pyav
from ...core.errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Chosen, Sink
from ...core.format.documents import dump_json, json_file, parse_json
from ...core.format.files import read_regular
from ...core.format.language import TASK, TASKS, Said, parse_said, said_in_rows, tasks_of
from ...core.format.manifest import Dropped
from ...core.format.syncing import NewFile
from ...core.format.videos import VIDEO_SUFFIX, image_key, index_name, reference_keys, video_name
from ...core.open_steps import open_steps, whole_episodes
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SINGLETONS,
    Field,
    Key,
    is_floating,
    key_name,
    state_keys,
)
from ..files.arrow import nested, parquet_writer
from ..files.exports import FORMAT, ExportColumn, columns_of, decoded
from .metadata import (
    EPISODE_INDEX,
    FRAME_INDEX,
    IMAGE,
    INDEX,
    INFO,
    SPOKEN,
    SUBTASK_INDEX,
    SUBTASKS,
    TASK_INDEX,
    TIMESTAMP,
    VIDEO,
    stated_tasks,
)
from .reader import TOLERANCE, LerobotReader
from .statistics import NAMES, PictureCounts, Statistics, listed, of_all, of_episodes, sampled_frames

Kind: TypeAlias = Literal["numbers", "text", "image", "video"]
_OWN = (
    (TIMESTAMP, "float32"),
    (FRAME_INDEX, "int64"),
    (EPISODE_INDEX, "int64"),
    (INDEX, "int64"),
    (TASK_INDEX, "int64"),
)
"""Columns of every dataset, which the export makes anew, except time stamps that came from LeRobot."""
_FRAME, _STAMP = ("frame",), (TIMESTAMP,)
MADE: frozenset[Key] = frozenset({_FRAME, _STAMP, (TASK_INDEX,), ("info", INDEX)})
_OBSERVATION, _IMAGES = "observation", ("observation", "image")
_CHANNELS = frozenset({1, 3, 4})
_DEPTHS = ("uint16", "float32")
"""The element types of depth maps."""
_FLAGS: dict[Key, str] = {
    NEXT_DONE: "next.done", NEXT_TERMINATED: "next.terminated", NEXT_TRUNCATED: "next.truncated",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExportFeature:
    """A feature and the leaf that it is made of.

    `shape` is the shape of a row as it is written, an image always with channels last; `channels_first` states that the
    leaf has channels first.
    """

    name: str
    kind: Kind
    column: ExportColumn
    shape: tuple[int, ...]
    channels_first: bool = False

    @property
    def key(self) -> Key:
        """The key of the leaf."""
        return self.column.field.key

    def document(self) -> dict[str, Any]:
        """The entry in `info.json`."""
        if self.kind == "text":
            return {"dtype": "string", "shape": [1], "names": None}
        if self.kind == "numbers":
            return {"dtype": self.column.field.dtype, "shape": list(self.shape or (1,)), "names": None}
        found = {"dtype": self.kind, "shape": list(self.shape), "names": ["height", "width", "channels"]}
        return found | ({"info": {"is_depth_map": True}} if self.column.field.dtype in _DEPTHS else {})

    @property
    def is_stated_as(self) -> tuple[str, list[int]]:
        """Element type and shape that LeRobot's metadata state for such a leaf."""
        image = (*self.shape[2:], *self.shape[:2]) if self.channels_first else self.shape
        dtype = {"text": "string", "numbers": self.column.field.dtype}.get(self.kind, self.kind)
        return dtype, list(image or (1,))


def _features_of(fields: tuple[Field, ...], names: Mapping[str, str]) -> tuple[list[ExportFeature], list[Dropped]]:
    """Return the features for the fields of a dataset, and the leaves that are left out.

    `names` are the original names of features, by the names of keys. Raises SchemaError if two would have one name.
    """
    states, references = set(state_keys(fields)), set(reference_keys(fields))
    found: list[ExportFeature] = []
    dropped: list[Dropped] = []
    for column in columns_of(fields):
        key = column.field.key
        if key in MADE or key == EPISODE or (key[0] == NEXT and key[1:] in states):
            continue
        if key in SINGLETONS:
            dropped.append(Dropped(column.field.name, "flags and rewards at the root belong to the step before"))
            continue
        if column.field.dtype in ("bfloat16", "complex64", "complex128"):
            raise SchemaError(f"{column.field.name} is {column.field.dtype}, which LeRobot does not have")
        one = _feature(column, key, references, states)
        known = names.get(key_name(image_key(key) if one.kind == "video" else key))
        found.append(one if known is None else replace(one, name=known))
    _require_names(found)
    return found, dropped


def _feature(column: ExportColumn, key: Key, references: set[Key], states: set[Key]) -> ExportFeature:
    field = column.field
    if key in references:
        return ExportFeature(_name(image_key(key), is_image=True, is_state=True), "video", column, ())
    if column.length is not None:
        return ExportFeature(_name(key, is_image=False, is_state=key in states), "text", column, ())
    if key in states and len(field.shape) == 3 and all(field.shape):
        first = field.shape[2] not in _CHANNELS and field.shape[0] in _CHANNELS
        image = (*field.shape[1:], field.shape[0]) if first else field.shape
        is_depth = field.dtype in _DEPTHS and image[2] == 1 and key[:2] == _IMAGES
        if is_depth or (field.dtype == "uint8" and image[2] in _CHANNELS):
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
_MODALITY = "meta/modality.json"
_ROW_BYTES, _GROUP_BYTES = 40, 8 << 20
_LARGEST = (1 << 63) - 1
_MOST_FPS = 1e6
_PART = re.compile(r"(?P<key>.+)\[(?P<first>[0-9]+)(?::(?P<stop>[0-9]+))?\]")
"""The place of a column in a joined vector, in `renamed_keys`: `observation[0]` or `observation[0:3]`."""
_OLD_TOTALS = ("total_videos", "total_chunks")
"""Entries of `info.json` that v3 does not have."""
_LASTING = frozenset({"subtask", "plan", "memory", "motion"})
"""Styles of annotations that hold until the next one of the same style."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive episodes that are written together.

    The first has the number `position` in the export, and its first row the index `start`.
    """

    position: int
    start: int
    bounds: tuple[tuple[int, int], ...]
    """The rows `[start, stop)` of each episode in the dataset that is exported."""

    @property
    def lengths(self) -> Array:
        return np.array([stop - first for first, stop in self.bounds], np.int64)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """All rows in as few ranges as possible."""
        found: list[tuple[int, int]] = []
        for first, stop in self.bounds:
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], stop
            else:
                found.append((first, stop))
        return found


class LerobotExporter(Sink):
    """Writes a dataset in the format LeRobot v3.0: rows in Parquet files of about 100 MB, and unchanged kept videos."""

    keeps_videos = True
    option_names = frozenset({"fps", "names", "robot_type", "modality"})

    def __init__(self, chosen: Chosen, name: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(chosen, name, options)
        self._language: ExportColumn | None = None
        self._features: list[ExportFeature] = []
        self._flag_keys: dict[str, Key] = {}
        self._spoken: dict[str, Any] = {}
        self._texts: list[str] = []
        self._fps = 0.0
        self._groups: bytes | None = None
        self._keeps_stamps = False
        self._tasks: dict[str, int] = {}

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether rbtool wrote the folder, by `meta/info.json`, and nothing else is in it."""
        try:
            names = {entry.name for entry in path.iterdir()}
            document = json.loads(read_regular(path / INFO))
            return names <= {"meta", _DATA, _VIDEOS} and document.get("exported_by") == FORMAT
        except (OSError, ValueError, AttributeError):
            return False

    def prepare(self) -> None:
        """Choose the features, and refuse data that LeRobot cannot store."""
        named = self.chosen.reader.manifest.renamed_keys
        names = {key: name for name, key in named.items()} if self._stated else {}
        features, dropped = _features_of(self.chosen.fields, names)
        self.dropped += dropped
        language = [one for one in features if one.key == (TASK,) and one.kind == "text"]
        self._language = language[0].column if language else None
        order = {name: place for place, name in enumerate(self._stated)}
        features.sort(key=lambda one: order.get(one.name, len(order)))
        unstated = self._unstated_flags()
        self._features = [one for one in features if one not in language and one.name not in unstated]
        self._refuse_large_numbers()
        self._state_rate()
        count = len(self.chosen.table)
        known = int((self.chosen.table.final != Final.REPEATED).sum())
        if known:
            self.notes.append(
                f"the observation after the last step of {counted(known, 'episode')} is left out: LeRobot does not "
                "store it"
            )
        self._state_texts()
        if self._language is None and not all(self._tasks_of(position) for position in range(count)):
            self.notes.append(f"episodes without the text {TASK} have the task {self.name!r}")
        self._number_tasks()
        if SUBTASK_INDEX in self._entries() and SUBTASKS not in self._documents:
            self.notes.append(f"the texts of {SUBTASK_INDEX} are not known, or differ between merged datasets")
        self._groups = self._modality()

    def _state_rate(self) -> None:
        """Find the frame rate, and decide whether time stamps are kept: LeRobot's are, at an unchanged rate."""
        source = self._source_info.get("fps")
        stated = self.options.get("fps", source)
        known = isinstance(stated, int | float) and not isinstance(stated, bool) and 0 < stated <= _MOST_FPS
        if not known and "fps" in self.options:
            raise UsageError(f"--fps is {stated!r}, expected a number of steps per second")
        self._fps = float(stated) if known and stated is not None else 1.0
        if not known:
            self.notes.append("the rate of steps is not known: fps is 1, and timestamps count steps (--fps states it)")
        fields = {one.key: one for one in self.chosen.fields if not one.shape}
        stamps = fields.get(_STAMP)
        self._keeps_stamps = stamps is not None and is_floating(stamps.dtype) and _FRAME in fields and stated == source
        if not self._source_info:
            made = [key_name(one.key) for one in self.chosen.fields if one.key in MADE]
            self.dropped += [Dropped(one, "the export makes LeRobot's column of that name anew") for one in made]
        elif stamps is not None:
            changed = sum(int((~self._unbroken(one)).sum()) for one in self._blocks()) if self._keeps_stamps else -1
            if changed:
                which = f"of {counted(changed, 'episode')}, which lack rows," if changed > 0 else "of the other rate"
                self.notes.append(f"time stamps {which} are made anew: they count steps")

    def _unbroken(self, block: _Block) -> Array:
        """Return for each episode whether its frames are consecutive, as they were recorded."""
        frames, lengths = self._read(_FRAME, block.spans), block.lengths
        starts = np.cumsum(lengths) - lengths
        expected = np.repeat(frames[starts], lengths) + np.arange(len(frames)) - np.repeat(starts, lengths)
        found: Array = np.logical_and.reduceat(frames == expected, starts)
        return found

    def _unstated_flags(self) -> set[str]:
        """Return the flags that the source did not have, if the export does not need them.

        A reader takes `next.done` (or success at the end) as a termination, and episodes without flags as truncated. If
        that gives the flags of this dataset, it is written with the flags of its source alone.
        """
        self._flag_keys = {name: key for key, name in _FLAGS.items()}
        there = self._stated.keys() & self._flag_keys.keys()
        if not self._stated or there - {"next.done"}:
            return set()
        wins = any(one.key == (NEXT, "success") for one in self.chosen.fields)
        for block in self._blocks():
            terminated, truncated = (
                np.flatnonzero(self._read(key, block.spans).reshape(-1)) for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
            )
            stops = np.cumsum(block.lengths) - 1
            if not np.array_equal(truncated, np.setdiff1d(stops, terminated)):
                return set()
            won = self._read((NEXT, "success"), block.spans).reshape(-1)[stops].astype(bool) if wins else stops < 0
            if not there and not np.array_equal(terminated, stops[won]):
                return set()
        self._flag_keys["next.done"] = NEXT_TERMINATED
        return self._flag_keys.keys() - there

    def _state_texts(self) -> None:
        """Find the texts of episodes that were columns in LeRobot: texts and annotations."""
        texts = self.chosen.text or []
        for name, entry in self._stated.items():
            if entry.get("dtype") == "string" and name != TASK and texts and all(name in one for one in texts):
                self._texts.append(name)
            elif entry.get("dtype") == SPOKEN and any(name in one for one in texts):
                values = [said for position in range(len(texts)) for said in self._said(name, position).values()]
                self._spoken[name] = pa.array(values or [[]]).type

    def _said(self, name: str, position: int) -> Said:
        """Return the annotations of an episode."""
        return parse_said((self.chosen.text or [])[position].get(name, "[]"), name)

    def _refuse_large_numbers(self) -> None:
        """Raise SchemaError for numbers that LeRobot cannot read, since it turns uint64 into int64."""
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
    def _documents(self) -> Mapping[str, bytes]:
        return self.chosen.reader.documents()

    @cached_property
    def _source_info(self) -> Mapping[str, Any]:
        """The `info.json` of the source; of merged datasets, the entries that all sources have in common."""
        names = [name for name in sorted(self._documents) if name == INFO or name.endswith(f"/{INFO}")]
        known = [one for name in names if isinstance(one := parse_json(self._documents[name], name), dict)]
        if not known or len(known) < len(names):
            return {}
        found = {name: value for name, value in known[0].items() if all(one.get(name) == value for one in known)}
        features = [one["features"] for one in known if isinstance(one.get("features"), dict)]
        if len(features) == len(known):
            shared = {name for name, entry in features[0].items() if all(one.get(name) == entry for one in features)}
            found["features"] = {name: entry for name, entry in features[0].items() if name in shared}
        return found

    @cached_property
    def _stated(self) -> Mapping[str, Mapping[str, Any]]:
        """The features in the `info.json` of the source."""
        found = self._source_info.get("features")
        known = found.items() if isinstance(found, dict) else ()
        return {name: entry for name, entry in known if isinstance(entry, dict)}

    def size(self) -> int:
        """Return the bytes of rows and videos."""
        videos = [one for name, one in self.chosen.reader.videos().items() if name.endswith(VIDEO_SUFFIX)]
        return super().size() + sum(one.stat().st_size for one in videos if isinstance(one, Path))

    def _tasks_of(self, position: int) -> list[str]:
        """Return the distinct tasks of an episode in the order in which they begin; empty if no text states them."""
        first, stop = self.chosen.episode(position)
        if self._language is not None:
            return list(dict.fromkeys(self._instructions(first, stop)))
        text = {} if self.chosen.text is None else self.chosen.text[position]
        tasks = dict.fromkeys(tasks_of(text))
        if TASKS not in text or len(tasks) == 1:
            return [*tasks]
        known, numbers = self._several_tasks(position)
        return list(dict.fromkeys(known[number] for number in numbers.tolist()))

    def _several_tasks(self, position: int) -> tuple[dict[int, str], Array]:
        """Return the tasks of an episode with several ones, by `task_index`, and the `task_index` of each row.

        If the text is a list, its tasks are in the order in which they began in the source. They can be matched to
        numbers only while the episode has all its rows; SchemaError if rows were removed.
        """
        first, stop = self.chosen.episode(position)
        stated = parse_json((self.chosen.text or [])[position][TASKS], TASKS)
        there = {field.key for field in self.chosen.fields}
        if (TASK_INDEX,) not in there:
            raise SchemaError("episodes have several tasks, and there is no task_index to tell which one a row has")
        numbers = self.chosen.reader.read((TASK_INDEX,), first, stop)
        seen = list(dict.fromkeys(numbers.tolist()))
        if isinstance(stated, list):
            frames = self.chosen.reader.read(_FRAME, first, stop) if _FRAME in there else np.full(1, -1)
            whole = len(seen) == len(stated) and np.array_equal(frames, np.arange(len(frames)))
            stated = dict(zip(seen, stated, strict=True)) if whole else {}
        known = {int(number): str(task) for number, task in stated.items()}
        if missing := [number for number in seen if number not in known]:
            tasks = (self.chosen.text or [])[position][TASKS]
            raise SchemaError(
                f"the tasks of the rows of episode {position} are not known: task_index has {missing[0]}, and the "
                f"tasks are {tasks}",
                hint=f"give it one task: rbtool preprocess DATASET --task {position}=TEXT --dest DEST",
            )
        return known, numbers

    def _number_tasks(self) -> None:
        """Number the tasks in the order of the source, without unused ones, unless annotations refer to the numbers."""
        stated = stated_tasks(self._documents)
        used = dict.fromkeys(
            task for position in range(len(self.chosen.table)) for task in self._tasks_of(position) or [self.name]
        )
        known = [stated[number] for number in sorted(stated)] if sorted(stated) == [*range(len(stated))] else []
        if not any(one.name.startswith("annotation.") for one in self._features):
            known = [task for task in known if task in used]
        self._tasks = {task: number for number, task in enumerate(dict.fromkeys([*known, *used]))}

    def _instructions(self, start: int, stop: int) -> list[str]:
        """Return the task of each row, for a dataset in which each row states its own."""
        assert self._language is not None
        assert self._language.length is not None
        rows, lengths = (
            self.chosen.reader.read(field.key, start, stop) for field in (self._language.field, self._language.length)
        )
        return decoded(rows, lengths, self._language.field.name)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return the features for `info.json`; entries of the source are kept if element type and shape still agree."""
        given = _names_given(self.options.get("names") or ())
        found: dict[str, dict[str, Any]] = {}
        for one in self._features:
            known = self._stated.get(one.name, {})
            kind, shape = one.is_stated_as
            same = known.get("dtype") == kind and (one.kind == VIDEO or known.get("shape") == shape)
            found[one.name] = deepcopy(dict(known)) if same else one.document() | {"names": self._names_of(one)}
        found |= {name: {"dtype": "string", "shape": [1], "names": None, **self._stated[name]} for name in self._texts}
        found |= {name: dict(self._stated[name]) for name in self._spoken}
        for name, dtype in _OWN:
            entry = self._stated.get(name, {})
            kept = self._stamp_type if name == TIMESTAMP else dtype
            found[name] = dict(entry) if entry.get("dtype") == kept else {"dtype": kept, "shape": [1], "names": None}
        for name, names in given.items():
            stated = found.get(name, {}).get("shape")
            if stated != [len(names)]:
                vectors = [one for one, entry in found.items() if len(entry["shape"]) == 1 and one not in dict(_OWN)]
                what = "is not a feature" if stated is None else f"has the shape {stated}"
                raise UsageError(
                    f"--names has {len(names)} names for {name}, which {what}", hint=f"there are {', '.join(vectors)}"
                )
            found[name]["names"] = names
        for entry in found.values():
            for about, rate in ((entry, "fps"), (entry.get("info"), "video.fps")):
                if isinstance(about, dict) and about.get(rate, self._fps) != self._fps:
                    about[rate] = self._rate
        return found

    @property
    def _rate(self) -> int | float:
        return int(self._fps) if self._fps == int(self._fps) else self._fps

    @property
    def _stamp_type(self) -> str:
        return next(one.dtype for one in self.chosen.fields if one.key == _STAMP) if self._keeps_stamps else "float32"

    def _names_of(self, one: ExportFeature) -> object:
        """Return the names of the axes of an image, or of the elements of a vector that was joined from columns."""
        if one.kind != "numbers" or len(one.shape) != 1:
            return one.document()["names"]
        found: dict[int, str] = {}
        for column, places in self.chosen.reader.manifest.renamed_keys.items():
            for place in places.split(", "):
                match = _PART.fullmatch(place)
                if match is None or match["key"] != key_name(one.key):
                    continue
                first, stop = int(match["first"]), int(match["stop"] or -1)
                found |= {at: f"{column}_{at - first}" for at in range(first, stop)} or {first: column}
        return [found[at] for at in range(one.shape[0])] if found.keys() == set(range(one.shape[0])) else None

    def _modality(self) -> bytes | None:
        """Return `meta/modality.json` for GR00T, from the option or the source; it must fit the features."""
        chosen = self.options.get("modality")
        if chosen is None:
            data = self._documents.get(_MODALITY)
        else:
            path = fs.expanded(chosen)
            if not path.is_file():
                raise UsageError(f"--modality is {chosen}, which is not a file")
            data = read_regular(path)
        if data is None:
            return None
        problem = _misfit(parse_json(data, _MODALITY), self._entries())
        if problem is None:
            return data
        if chosen is not None:
            raise UsageError(f"--modality {chosen}: {problem}")
        self.dropped.append(Dropped(_MODALITY, problem))
        return None

    @classmethod
    def statistics_of(cls, path: Path) -> tuple[int, int, dict[str, Any]]:
        """Return the steps, the episodes, and the contents of `stats.json` of a dataset of rbtool or of LeRobot."""
        if LerobotReader.recognises(path):
            with LerobotReader(path, options={"images": "decode"}, final_step="repeat") as reader:
                facts = reader.facts()
                return facts.steps, len(facts.episode_numbers), reader.statistics()
        with whole_episodes(open_steps(path)) as steps:
            steps.verify_files()
            sink = cls(Chosen(steps, np.arange(len(steps.episodes))), path.name)
            return sink.chosen.steps, len(sink.chosen.table), sink._statistics()

    def _statistics(self) -> dict[str, dict[str, Any]]:
        self.check()
        videos, pictures = self._open_videos(), self._no_pictures()
        for block in self._blocks():
            found = {name: _BlockPictures(one, block) for name, one in pictures.items()}
            for at, piece in self._pieces(block):
                for one in self._features:
                    if one.kind == IMAGE:
                        found[one.name].add(self._images(one, piece), at)
            for position, bounds in enumerate(block.bounds, block.position):
                videos.of(position, *bounds)
        return self._totals(pictures | videos.totals)

    def _totals(self, pictures: Mapping[str, PictureCounts]) -> dict[str, dict[str, Any]]:
        """Return the contents of `stats.json`; a feature with a number that is never finite is left out."""
        found: dict[str, Any] = {}
        for one in self._features:
            if one.name in pictures:
                found[one.name] = listed(pictures[one.name].statistics(), (-1, 1, 1))
            elif one.kind == "numbers":
                found[one.name] = listed(of_all(partial(self._values, one), self.chosen.steps), one.shape or (1,))
        for name, _ in _OWN:
            found[name] = listed(of_all(partial(self._own_rows, name), self.chosen.steps), (1,))
        return {name: one for name, one in found.items() if one is not None}

    def _own_rows(self, name: str) -> Iterator[Array]:
        for block in self._blocks():
            yield self._own_column(block, name)[:, None]

    def _values(self, one: ExportFeature) -> Iterator[Array]:
        """Yield all rows of a feature of numbers in chunks `[n, width]`."""
        for rows in self.chosen.chunks(self._flag_keys.get(one.name, one.key), one.column.bytes):
            yield rows.reshape(len(rows), -1)

    def _images(self, one: ExportFeature, piece: Iterable[tuple[int, int]]) -> Array:
        """Read images `[n, height, width, channels]`."""
        values = self._read(one.key, piece)
        return np.moveaxis(values, 1, -1) if one.channels_first else values

    def _no_pictures(self) -> dict[str, PictureCounts]:
        """Return empty counts of the pixels of each feature with images in rows."""
        images = [one for one in self._features if one.kind == IMAGE]
        return {one.name: PictureCounts.of(one.column.field.dtype, one.shape[2]) for one in images}

    def _open_videos(self) -> _Videos:
        return _Videos(self.chosen, [one for one in self._features if one.kind == VIDEO], self._fps)

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write rows, then videos, and the metadata last."""
        fs.make_folder((target / _EPISODES).parent)
        videos, pictures = self._open_videos(), self._no_pictures()
        with ExitStack() as opened:
            entries: _RowGroups | None = None
            for number, blocks in enumerate(self._files()):
                place = {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}
                path = target / _DATA / _numbered(place, "parquet")
                fs.make_folder(path.parent)
                with parquet_writer(path, self._schema) as (writer, file), _RowGroups(writer) as rows:
                    for block in blocks:
                        statistics = {name: _BlockPictures(one, block) for name, one in pictures.items()}
                        for table, size in self._tables(block, statistics):
                            rows.add(table)
                            file.check()
                            progress(size)
                        table = self._episodes_of(block, place, videos, statistics)
                        if entries is None:
                            episodes, _ = opened.enter_context(parquet_writer(target / _EPISODES, table.schema))
                            entries = opened.enter_context(_RowGroups(episodes))
                        entries.add(table)
        videos.write(target, progress)
        self._write_metadata(target, self._totals(pictures | videos.totals), videos)

    def _blocks(self) -> Iterator[_Block]:
        """Yield all episodes in blocks of about 8 MB of rows, or of one longer episode."""
        size = max(1, sum(field.row_bytes for field in self.chosen.fields))
        bounds: list[tuple[int, int]] = []
        rows = start = 0
        for position in range(len(self.chosen.table)):
            first, stop = self.chosen.episode(position)
            if bounds and (rows + stop - first) * size > _GROUP_BYTES:
                yield _Block(position - len(bounds), start, tuple(bounds))
                bounds, rows, start = [], 0, start + rows
            bounds.append((first, stop))
            rows += stop - first
        if bounds:
            yield _Block(len(self.chosen.table) - len(bounds), start, tuple(bounds))

    def _files(self) -> Iterator[list[_Block]]:
        """Yield the blocks of episodes of each file of rows."""
        row = _ROW_BYTES + sum(one.column.bytes for one in self._features)
        found: list[_Block] = []
        size = 0
        for block in self._blocks():
            more = int(block.lengths.sum()) * row
            if found and size + more > _DATA_MB << 20:
                yield found
                found, size = [], 0
            found.append(block)
            size += more
        if found:
            yield found

    @cached_property
    def _schema(self) -> Any:
        columns = [(one.name, _arrow_type(one)) for one in self._features if one.kind != VIDEO]
        columns += [(name, pa.string()) for name in self._texts] + list(self._spoken.items())
        entries = self._entries()
        return pa.schema([*columns, *((name, pa.from_numpy_dtype(entries[name]["dtype"])) for name, _ in _OWN)])

    @property
    def columns(self) -> list[str]:
        """The names of the columns of rows."""
        return list(self._schema.names)

    def _read(self, key: Key, spans: Iterable[tuple[int, int]]) -> Array:
        parts = [self.chosen.reader.read(key, first, stop) for first, stop in spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pieces(self, block: _Block) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield the rows of a block, all at once or, of one long episode, in parts of about 8 MB.

        Each part is its first row in the block, and ranges of rows in the dataset.
        """
        size = max(1, sum(field.row_bytes for field in self.chosen.fields))
        rows = max(1, _GROUP_BYTES // size)
        if len(block.bounds) > 1:
            yield 0, block.spans
            return
        ((first, stop),) = block.bounds
        for low in range(first, stop, rows):
            yield low - first, [(low, min(low + rows, stop))]

    def _tables(self, block: _Block, pictures: Mapping[str, _BlockPictures]) -> Iterator[tuple[Any, int]]:
        """Yield the rows of a block as Arrow tables, each with its number of bytes in the dataset."""
        size = sum(field.row_bytes for field in self.chosen.fields)
        own, said = self._own(block), self._words_of(block)
        for at, piece in self._pieces(block):
            count = sum(stop - first for first, stop in piece)
            arrays = []
            for one in self._features:
                if one.kind == IMAGE:
                    values = self._images(one, piece)
                    pictures[one.name].add(values, at)
                    arrays.append(_encoded(values))
                elif one.kind == "text" and one.column.length is not None:
                    texts = self._read(one.key, piece), self._read(one.column.length.key, piece)
                    arrays.append(pa.array(decoded(*texts, one.name), pa.string()))
                elif one.kind == "numbers":
                    arrays.append(_numbers(self._flat(one, piece).reshape(count, *one.shape), one.shape))
            arrays += [one[at : at + count] for one in said]
            arrays += [pa.array(own[name][at : at + count]) for name, _ in _OWN]
            yield pa.Table.from_arrays(arrays, schema=self._schema), size * count

    def _flat(self, one: ExportFeature, spans: Iterable[tuple[int, int]]) -> Array:
        """Read rows of a feature of numbers, `[n, width]`."""
        values = self._read(self._flag_keys.get(one.name, one.key), spans)
        return values.reshape(len(values), -1)

    def _flats(self, one: ExportFeature, pieces: Iterable[Iterable[tuple[int, int]]]) -> Iterator[Array]:
        for piece in pieces:
            yield self._flat(one, piece)

    def _statistics_of(self, block: _Block) -> dict[str, Statistics]:
        """Return the statistics of all features of numbers, for each episode."""
        found, own = {}, self._own(block)
        pieces = [piece for _, piece in self._pieces(block)]
        for one in self._features:
            if one.kind == "numbers" and len(pieces) == 1:
                found[one.name] = of_episodes(self._flat(one, pieces[0]), block.lengths)
            elif one.kind == "numbers":
                long = of_all(partial(self._flats, one, pieces), int(block.lengths[0]))
                found[one.name] = {name: values[None] for name, values in long.items()}
        return found | {name: of_episodes(own[name][:, None], block.lengths) for name, _ in _OWN}

    def _own(self, block: _Block) -> dict[str, Array]:
        """Return the columns that every dataset of LeRobot has."""
        return {name: self._own_column(block, name) for name, _ in _OWN}

    def _own_column(self, block: _Block, name: str) -> Array:
        lengths = block.lengths
        starts, count = np.cumsum(lengths) - lengths, int(lengths.sum())
        if name == EPISODE_INDEX:
            return np.repeat(np.arange(len(lengths)) + block.position, lengths)
        if name == INDEX:
            return block.start + np.arange(count)
        if name == TASK_INDEX:
            bounds = enumerate(block.bounds, block.position)
            return np.concatenate([self._task_numbers(position, *one) for position, one in bounds])
        frames: Array = np.arange(count) - np.repeat(starts, lengths)
        if name == FRAME_INDEX:
            return frames
        made: Array = (frames / self._fps).astype(self._stamp_type)
        if not self._keeps_stamps:
            return made
        # The time stamps of an episode that lost its first rows are moved, so that it begins at 0.
        stored, first = self._read(_STAMP, block.spans), np.repeat(self._read(_FRAME, block.spans)[starts], lengths)
        moved = np.where(first == 0, stored, stored - first / self._fps)
        # After a change of rate, frame numbers may no longer agree with time stamps: these are then made anew.
        fits = self._unbroken(block) & (np.abs(moved[starts] - stored[starts] * (first[starts] == 0)) < 0.5 / self._fps)
        found: Array = np.where(np.repeat(fits, lengths), moved, made).astype(self._stamp_type)
        return found

    def _words_of(self, block: _Block) -> list[Any]:
        """Return the columns of texts and annotations, one value for each row."""
        texts = self.chosen.text or []
        found = []
        for name in self._texts:
            words = [texts[block.position + at][name] for at in range(len(block.bounds))]
            found.append(pa.array(np.repeat(np.array(words, object), block.lengths), pa.string()))
        if self._spoken:
            frames, times, shifts = self._read(_FRAME, block.spans), self._times(block), self._shifts(block)
            starts = np.cumsum(block.lengths) - block.lengths
        for name, kind in self._spoken.items():
            rows: list[Any] = []
            for at, (low, count) in enumerate(zip(starts.tolist(), block.lengths.tolist(), strict=True)):
                said, high = self._said(name, block.position + at), low + count
                parts = said_in_rows(said, frames[low:high], times[low:high])
                rows += (
                    [_moved(parts[0], shifts[at])] * count
                    if None in said
                    else [_moved(part, shifts[at]) for part in parts]
                )
            found.append(pa.array(rows, kind))
        return found

    def _times(self, block: _Block) -> Array:
        """Return the times of rows in the dataset, in seconds."""
        if any(one.key == _STAMP for one in self.chosen.fields):
            return self._read(_STAMP, block.spans).reshape(-1).astype(np.float64)
        return self._read(_FRAME, block.spans) / self._fps

    def _shifts(self, block: _Block) -> list[float]:
        """Return by how many seconds the times of each episode are moved towards 0."""
        starts = np.cumsum(block.lengths) - block.lengths
        found: list[float] = (self._times(block) - self._own_column(block, TIMESTAMP))[starts].tolist()
        return found

    def _task_numbers(self, position: int, first: int, stop: int) -> Array:
        """Return the number of the task of each row."""
        if self._language is not None:
            return np.array([self._tasks[one] for one in self._instructions(first, stop)], np.int64)
        tasks = self._tasks_of(position) or [self.name]
        if len(tasks) == 1:
            return np.full(stop - first, self._tasks[tasks[0]])
        known, numbers = self._several_tasks(position)
        return np.array([self._tasks[known[number]] for number in numbers.tolist()], np.int64)

    def _episodes_of(
        self, block: _Block, place: Mapping[str, int], videos: _Videos, pictures: Mapping[str, _BlockPictures]
    ) -> Any:
        """Return the metadata of episodes as a table with one row for each."""
        lengths, count = block.lengths, len(block.bounds)
        starts = block.start + np.cumsum(lengths) - lengths
        positions = range(block.position, block.position + count)
        columns: dict[str, Any] = {
            "episode_index": np.array(positions), "tasks": [self._tasks_of(one) or [self.name] for one in positions],
            "length": lengths,
        }  # fmt: skip
        columns |= {f"data/{name}": np.full(count, value) for name, value in place.items()}
        columns |= {"dataset_from_index": starts, "dataset_to_index": starts + lengths}
        of_each = [videos.of(position, *bounds) for position, bounds in zip(positions, block.bounds, strict=True)]
        for name in videos.names:
            for what in _PLACE:
                columns[f"videos/{name}/{what}"] = [places[name][what] for places, _ in of_each]
        found = self._statistics_of(block) | {name: one.statistics() for name, one in pictures.items()}
        for name in videos.names:
            found[name] = {one: np.stack([known[name][one] for _, known in of_each]) for one in NAMES}
        shapes = {one.name: (-1, 1, 1) if one.kind in (IMAGE, VIDEO) else one.shape or (1,) for one in self._features}
        for name, known in found.items():
            for one in NAMES:
                shape = (1,) if one == "count" else shapes.get(name, (1,))
                columns[f"stats/{name}/{one}"] = nested(known[one].reshape(count, *shape))
        columns |= {"meta/episodes/chunk_index": np.zeros(count, np.int64)}
        columns |= {"meta/episodes/file_index": np.zeros(count, np.int64)}
        return pa.table(columns)

    def _write_metadata(self, target: Path, statistics: Mapping[str, Any], videos: _Videos) -> None:
        if videos.apart > TOLERANCE:
            self.notes.append(
                f"frames are up to {1000 * videos.apart:.2g} ms from the times of their rows, and LeRobot refuses more "
                f"than tolerance_s, {TOLERANCE} by default (rbtool preprocess --encode av1 makes new videos)"
            )
        _write_table(target / "meta" / "tasks.parquet", _task_table(self._tasks))
        features = self._entries()
        unknown = {name for name in videos.names if features[name].get("info") is None}
        for name, about in videos.described(self._rate).items() if unknown else ():
            features[name] |= about if name in unknown else {}
        subtasks = self._documents.get(SUBTASKS)
        for name, data in (
            (SUBTASKS, subtasks if SUBTASK_INDEX in features else None),
            (_MODALITY, self._groups),
        ):
            if data is not None:
                fs.write_file(target / name, data)
        kept = {name: value for name, value in self._source_info.items() if name not in _OLD_TOTALS}
        count = len(self.chosen.table)
        document = kept | {
            "codebase_version": "v3.0", "robot_type": self.options.get("robot_type", kept.get("robot_type")),
            "total_episodes": count, "total_frames": self.chosen.steps, "total_tasks": len(self._tasks),
            "chunks_size": _CHUNK, "data_files_size_in_mb": _DATA_MB, "video_files_size_in_mb": _VIDEO_MB,
            "fps": self._rate, "splits": {"train": f"0:{count}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": (
                "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4" if videos.names else None
            ),
            "features": features, "exported_by": FORMAT,
        }  # fmt: skip
        fs.write_file(target / "meta" / "stats.json", json_file(statistics))
        fs.write_file(target / INFO, (dump_json(document, indent=4) + "\n").encode())


_PLACE = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


class _RowGroups:
    """Collects tables, and writes them in row groups of about 8 MB."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._waiting: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def add(self, table: Any) -> None:
        """Add a table; it is written once enough rows are waiting."""
        self._waiting.append(table)
        if sum(one.nbytes for one in self._waiting) >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting).combine_chunks())
            self._waiting = []

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._write()


class _BlockPictures:
    """Counts the pixels of sampled images for each episode of a block, and adds them to `total`."""

    def __init__(self, total: PictureCounts, block: _Block) -> None:
        self._total = total
        self._parts = [total.empty() for _ in block.bounds]
        starts = np.cumsum(block.lengths) - block.lengths
        frames = [at + sampled_frames(length) for at, length in zip(starts, block.lengths.tolist(), strict=True)]
        self._frames, sizes = np.concatenate(frames), [len(one) for one in frames]
        self._owners = np.repeat(np.arange(len(frames)), sizes)

    def add(self, images: Array, at: int) -> None:
        """Add images, of which the first is row `at` of the block; only sampled ones are counted."""
        there = (self._frames >= at) & (self._frames < at + len(images))
        for owner in np.unique(self._owners[there]).tolist():
            part = self._total.empty()
            part.add(images[self._frames[there & (self._owners == owner)] - at])
            self._parts[owner].merge(part)
            self._total.merge(part)

    def statistics(self) -> Statistics:
        """Return the statistics of each episode."""
        found = [one.statistics() for one in self._parts]
        return {name: np.stack([one[name] for one in found]) for name in NAMES}


class _Videos:
    """The kept videos that episodes refer to; the videos of a feature are numbered in the order of their first use."""

    def __init__(self, chosen: Chosen, features: list[ExportFeature], fps: float) -> None:
        self._chosen, self._features, self._fps = chosen, features, fps
        self.names = [one.name for one in features]
        self._contents = chosen.reader.videos()
        self._numbers: dict[str, dict[int, int]] = {one.name: {} for one in features}
        self._indexes: dict[int, VideoIndex] = {}
        self.totals: dict[str, PictureCounts] = {}
        self.apart = 0.0
        """The largest distance in seconds between a frame and the time of its row."""

    def of(self, position: int, first: int, stop: int) -> tuple[dict[str, dict[str, Any]], dict[str, Statistics]]:
        """Return the places of an episode in its videos, and the statistics of its frames, by feature.

        LeRobot finds frames by time alone. Raises SchemaError if it would find another frame for a row.
        """
        found: dict[str, dict[str, Any]] = {}
        statistics: dict[str, Statistics] = {}
        for one in self._features:
            rows = self._chosen.reader.read(one.key, first, stop)
            ids, frames = np.unique(rows[:, 0]).tolist(), rows[:, 1]
            if len(ids) != 1:
                raise SchemaError(f"episode {position} refers to {len(ids)} videos of {one.name}, LeRobot allows one")
            index = self._index(ids[0])
            times = index.times
            if not (frames.min() >= 0 and frames.max() < len(times)):
                raise CorruptDataError(f"episode {position} refers to frames that a video of {one.name} does not have")
            start = float(times[frames[0]])
            due = start + np.arange(len(frames)) / self._fps
            drift, least = (np.abs(times[one] - due) for one in (frames, index.nearest(due)))
            self.apart = max(self.apart, float(drift.max()))
            if ((drift >= 0.5 / self._fps) | (drift > least + 1e-6)).any():
                raise SchemaError(
                    f"episode {position} has frames of {one.name} that are not 1 / {self._fps:g} s apart; LeRobot "
                    "finds frames by time, and would read the frame of another row",
                    hint="rbtool preprocess DATASET --encode av1 --dest DEST makes videos of the rows' frames",
                )
            number = self._numbers[one.name].setdefault(ids[0], len(self._numbers[one.name]))
            found[one.name] = {
                "chunk_index": number // _CHUNK, "file_index": number % _CHUNK, "from_timestamp": start,
                "to_timestamp": start + len(frames) / self._fps,
            }  # fmt: skip
            with open_video(self._file(ids[0]), partial(self._index, ids[0])) as video:
                images = video.read(frames[sampled_frames(len(frames))])
            if one.name not in self.totals:
                values = np.arange(256) / 255 if index.depth is None else index.depth.table.astype(np.float64)
                self.totals[one.name] = PictureCounts(values, images.shape[-1])
            counts = self.totals[one.name].empty()
            counts.add(images)
            self.totals[one.name].merge(counts)
            statistics[one.name] = counts.statistics()
        return found, statistics

    def _file(self, number: int) -> Path:
        content = self._contents.get(video_name(number))
        if isinstance(content, bytes) or content is None:
            raise RbtoolError(f"{video_name(number)} is not a file")
        return content

    def _index(self, number: int) -> VideoIndex:
        if number not in self._indexes:
            content = self._contents.get(index_name(number))
            if content is None:
                raise CorruptDataError(f"{self._chosen.reader.path} has no video {video_name(number)}")
            data = content if isinstance(content, bytes) else read_regular(content)
            self._indexes[number] = VideoIndex.from_bytes(data, index_name(number))
        return self._indexes[number]

    def described(self, rate: float) -> dict[str, dict[str, Any]]:
        """Return the shape of each feature, and the description of its first video for `info.json`."""
        found = {}
        for name, numbers in self._numbers.items():
            with require_pyav().open(str(self._file(next(iter(numbers))))) as container:
                context = container.streams.video[0].codec_context
                about = {
                    "video.height": context.height, "video.width": context.width, "video.fps": rate,
                    "video.codec": context.codec.canonical_name, "video.pix_fmt": context.pix_fmt,
                    "has_audio": bool(container.streams.audio), "is_depth_map": False,
                }  # fmt: skip
                depth = self._index(next(iter(numbers))).depth
                about["video.channels"] = channels = CHANNELS if depth is None else 1
                found[name] = {"shape": [context.height, context.width, channels], "info": about}
                if depth is not None:
                    about |= {
                        "is_depth_map": True, "depth_unit": "mm" if depth.is_in_millimetres else "m",
                        "video.depth_min": depth.low, "video.depth_max": depth.high, "video.shift": depth.shift,
                        "video.use_log": depth.is_logarithmic,
                    }  # fmt: skip
        return found

    def write(self, target: Path, progress: Callable[[int], None]) -> None:
        """Copy the videos to the export."""
        for name, numbers in self._numbers.items():
            for identity, number in numbers.items():
                place = {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}
                file = NewFile(target / _VIDEOS / name / _numbered(place, "mp4"))
                try:
                    with self._file(identity).open("rb") as opened:
                        while data := opened.read(1 << 20):
                            file.append(memoryview(data))
                            progress(len(data))
                    file.sync()
                finally:
                    file.close()


_NEAR = 1e-6
"""Rounding error of times, in seconds."""


def _moved(said: list[Any], shift: float) -> list[Any]:
    """Return annotations with times moved `shift` seconds earlier.

    Of lasting annotations from before the first row, only the newest is kept, at time 0.
    """
    if not shift or not all(isinstance(one, dict) and "timestamp" in one for one in said):
        return said
    found: list[Any] = []
    newest: dict[Any, int] = {}
    for one in said:
        time = one["timestamp"] - shift
        moved = one | {"timestamp": time if time > _NEAR else 0.0}
        same = tuple(json.dumps(one.get(name)) for name in ("style", "role", "camera"))
        if not moved["timestamp"] and one.get("style") in _LASTING and same in newest:
            found[newest[same]] = moved
            continue
        newest[same] = len(found)
        found.append(moved)
    return found


def _names_given(pairs: Iterable[str]) -> dict[str, list[str]]:
    """Parse pairs like `action=x,y,z` into the names of the elements of each feature."""
    found = {}
    for pair in pairs:
        name, equals, names = pair.partition("=")
        if not equals or not all(one.strip() for one in names.split(",")):
            raise UsageError(f"--names is {pair!r}, expected a feature and its names, like action=x,y,gripper")
        found[name.strip()] = [one.strip() for one in names.split(",")]
    return found


def _misfit(document: Any, features: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why a `modality.json` does not fit these features; None if it does."""
    if not isinstance(document, dict):
        return "it is not an object"
    defaults = {"state": "observation.state", "action": "action", "video": "", "annotation": ""}
    for kind, usual in defaults.items():
        groups = document.get(kind, {})
        if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
            return f"{kind} is not an object of objects"
        for name, group in groups.items():
            key = group.get("original_key", usual or f"{kind}.{name}")
            if key not in features:
                return f"{kind} {name} is of {key}, which is not a feature"
            if usual and not _is_range(group.get("start"), group.get("end"), features[key]["shape"]):
                span = f"{group.get('start')}:{group.get('end')}"
                return f"{kind} {name} has the range {span} of {key}, whose shape is {features[key]['shape']}"
    return None


def _is_range(start: Any, stop: Any, shape: Sequence[int]) -> bool:
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (start, stop))
    return whole and len(shape) == 1 and 0 <= start < stop <= shape[0]


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
    """Return rows in LeRobot's layout, where a vector of one number is a plain column."""
    if len(shape) > 1:
        return nested(values.reshape(len(values), *shape))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if shape in ((), (1,)) else pa.FixedSizeListArray.from_arrays(flat, shape[0])


def _encoded(images: Array) -> Any:
    """Encode images without loss, as PNG, and depth maps as TIFF."""
    from PIL import Image  # needed only where there are images

    found = []
    kind = ("PNG", {"compress_level": 1}) if images.dtype == np.uint8 else ("TIFF", {})
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(out, kind[0], **kind[1])
        found.append({"bytes": out.getvalue(), "path": None})
    return pa.array(found, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def _task_table(tasks: Mapping[str, int]) -> Any:
    """Return the table of tasks; its metadata make the texts the index in pandas, as lerobot expects."""
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
