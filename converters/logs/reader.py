"""Reads robot logs: aligns the topics that are mapped to keys on a grid of times, one time for each step.

A log has no steps. `LogReader` makes them: it finds the messages of the mapped topics in order of time, cuts the log
into episodes, lays a grid of times over each, and takes for every key its value at each time of the grid.

    /camera      x    x    x    x    x    x       grid of times  |    |    |    |    |
    /joints    x x x x x x x x x x x x x x x      step t holds the newest value at or before its time
    /reward             x         x               rewards after time t, up to time t + 1, are added up for step t
"""

from __future__ import annotations

import functools
import json
import math
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.locate import OptionNeededError, Overview, overview_of
from ...core.format.manifest import Dropped
from ...core.format.videos import VIDEOS_KEPT, reference_field
from ...core.progress import counted
from ...core.ted.episodes import ranges_of
from ...core.ted.schema import ACTION, NEXT, REWARD, Field, Key, Timing, key_name, role_of, safe_part
from ..files.images import ImageForm, image_form, is_image, require_images
from ..files.readers import SurveyedReader
from ..table.mapping import STATES, parse_map, require_ted_key
from .containers import MARKER, Index, Log, has_recordings, left_out, require_recordings, schema_names
from .messages import (
    Buffer,
    Codec,
    PictureKind,
    changed_size,
    file_pixels,
    keys_of,
    names_path,
    numbers_of,
    parse_path,
    path_text,
    picture_bytes,
    picture_kind,
    raw_form,
    raw_pixels,
    stamp_paths,
    value_path,
)
from .messages import Path as FieldPath
from .video import VIDEO_FORMATS, KeptVideo, Packets, VideoDecoder, require_no_b_frames

_NS = 10**9
_HOUR = 3600 * _NS
_STEADY, _NEAR = _NS, _NS // 5
_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": _NS, "min": 60 * _NS}
_CLOCKS = ("log", "header", "publish")
_STARTS = frozenset({"start", "started", "begin", "record", "recording", "episode_start"})
_STATED = frozenset({"recording"})
"""Words for a state, which markers may repeat while it lasts; other words stand for a change of state."""
_STOPS = frozenset({"stop", "stopped", "end", "ended", "finish", "finished", "done", "save", "episode_end"})
_SUCCESSES = {"success": True, "succeeded": True, "failure": False, "failed": False, "fail": False, "abort": False}
_EVENTS = ("event", "type", "action", "command", "cmd", "status", "state")
_TRUE = frozenset({"true", "1", "1.0", "yes", "success", "succeeded"})
_FALSE = frozenset({"false", "0", "0.0", "no", "failure", "failed", "fail"})
TIME, AGE, LATE = "time", "age", "late"
"""First parts of keys about the values of other keys: when the value was measured in ns, how long before the step in s,
and whether that is longer than the tolerance."""
_OPTIONS = frozenset(
    {"map", "fps", "episodes_by", "clock", "align", "tolerance", "drop_late", "action", "images"}
)  # fmt: skip
_MOST_NOTED = 8


class MapNeededError(OptionNeededError):
    """A log was opened without the options that a map of its topics needs."""

    def overview(self) -> Overview | None:
        """Return the topics of the log, and a proposed map."""
        return overview_of(self._file)


# Options ------------------------------------------------------------------------------------------------


def duration(text: str, option: str) -> int:
    """Parse a duration such as `50ms` or `2s`, in nanoseconds; UsageError for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(ns|us|ms|s|min)", str(text).strip())
    if found is None:
        raise UsageError(f"{option} is {text!r}, expected a time like 50ms or 2s")
    return round(Fraction(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True)
class Rules:
    """The options that define how steps are made of messages.

    Attributes:
        rate: steps per second; None with `reference`.
        reference: a topic whose messages define the times of steps, instead of a rate.
        align: how values are taken at a time: `hold` the newest one before, `nearest` or `linear`.
        clock: which times of messages are used: `log`, `header` or `publish`.
        gap: a silence in nanoseconds that separates episodes.
        marker: a topic, perhaps with a field, that marks episodes; without `gap` and `marker`, a recording is one.
        tolerance: the age in nanoseconds from which a value is late.
        drop_late: whether episodes are cut at steps with late values.
        next_of: the observation whose next value becomes the action.
    """

    rate: Fraction | None
    reference: str | None
    align: str
    clock: str
    gap: int | None
    marker: str | None
    tolerance: int | None
    drop_late: bool
    next_of: Key | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Rules:
        """Parse the options of the reader; UsageError for invalid or contradictory ones."""
        align = str(options.get("align") or "hold")
        kind, _, topic = align.partition(":")
        if kind not in {"hold", "nearest", "linear", "reference"} or (kind == "reference") != bool(topic):
            raise UsageError(f"--align is {align!r}, expected hold, nearest, linear or reference:/TOPIC")
        clock = str(options.get("clock") or "log")
        if clock not in _CLOCKS:
            raise UsageError(f"--clock is {clock!r}, expected {', '.join(_CLOCKS)}")
        by, _, rest = str(options.get("episodes_by") or "file").partition(":")
        if by not in {"file", "gap", "topic"} or (by == "file") == bool(rest):
            raise UsageError(f"--episodes-by is {options.get('episodes_by')!r}, expected file, gap:2s or topic:/TOPIC")
        fps, tolerance = options.get("fps"), options.get("tolerance")
        if fps is not None and not (math.isfinite(fps) and 0 < fps <= 10**6):
            raise UsageError(f"--fps is {fps}, expected steps a second")
        if fps is not None and kind == "reference":
            raise UsageError(f"--fps {fps:g} contradicts --align {align}: each message of {topic} is a step")
        if options.get("drop_late") and tolerance is None:
            raise UsageError("--drop-late needs --tolerance", hint="like --tolerance 50ms")
        return cls(
            rate=None if fps is None else Fraction(repr(float(fps))),
            reference=topic or None,
            align="hold" if kind == "reference" else kind,
            clock=clock,
            gap=duration(rest, "--episodes-by gap") if by == "gap" else None,
            marker=rest if by == "topic" else None,
            tolerance=None if tolerance is None else duration(tolerance, "--tolerance"),
            drop_late=bool(options.get("drop_late")),
            next_of=_next_of(options.get("action")),
        )

    def late(self, ages: Array) -> Array:
        """Return which values are older than the tolerance or, with `hold`, were measured only after their step."""
        found: Array = np.abs(ages) > (self.tolerance or 0)
        return found | (ages < 0) if self.align == "hold" else found


def _next_of(given: Any) -> Key | None:
    if given is None:
        return None
    how, _, name = str(given).partition(":")
    if how != "next" or not all(name.split(".")):
        raise UsageError(f"--action is {given!r}, expected next:KEY, like next:observation.state")
    return tuple(name.split("."))


# Columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a topic's messages that goes into a key.

    Attributes:
        topic: the topic.
        path: the field in its messages.
        take: elements of the field, None for all.
        names: the field with the names of the elements, if there is one.
        order: the names in the order in which the elements are stored.
        picture: how messages contain pictures, None for numbers.
        codec: the codec of a video.
        shape: the shape of a row.
        dtype: the element type of a row.
        keyed: whether the value is a JSON object, whose keys name the elements.
        is_kept: whether a video is kept as a file, so that rows refer to its frames.
    """

    topic: str
    path: FieldPath
    take: int | slice | None
    names: FieldPath | None
    order: tuple[str, ...] | None
    picture: PictureKind | None
    codec: str | None
    shape: tuple[int, ...]
    dtype: str
    keyed: bool = False
    is_kept: bool = False

    @property
    def form(self) -> ImageForm:
        """The form of the pictures."""
        height, width, channels = self.shape
        return ImageForm(self.dtype, (height, width, channels))

    @property
    def paths(self) -> list[FieldPath]:
        """The fields of a message that have to be decoded."""
        if self.picture is not None:
            return list(self.picture.paths)
        return [self.path] if self.names is None else [self.path, self.names]

    @property
    def is_numbers(self) -> bool:
        """Whether values can be interpolated, unlike pictures, integers and bools."""
        return self.picture is None and self.dtype.startswith("float")

    def row(self, values: Sequence[Any], what: str) -> Array:
        """Make the row of a message from its decoded fields; FormatError if its form differs from the first message."""
        if self.picture is not None:
            if self.picture.kind == "raw":
                return raw_pixels(values, self.form, what)
            return file_pixels(picture_bytes(values, what)[1], self.form, what)
        what = f"{what}.{path_text(self.path)}" if self.path else what
        numbers = numbers_of(values[0], what)
        if self.order is not None:
            names = list(keys_of(values[0]) if self.keyed else map(str, values[1]))
            numbers = _in_order(numbers, names, self.order, what)
        if self.take is not None:
            numbers = _element(numbers, self.take, what)
        if numbers.shape != self.shape:
            raise FormatError(
                f"{what} changes its size: a message has {list(numbers.shape)} values, the first one "
                f"{list(self.shape)}",
                hint="map a part of it, like [0:3], or convert the parts of the log to separate datasets",
            )
        if numbers.dtype != self.dtype:
            raise FormatError(f"{what} is {numbers.dtype.name} in a message, and {self.dtype} in the first one")
        return numbers


@dataclass(frozen=True, slots=True)
class _Column:
    """A key, and the parts of messages that are concatenated to its values.

    `field` is what is stored; for a kept video, its key differs from `key`, as rows are references to frames.
    """

    key: Key
    timing: Timing
    parts: tuple[_Part, ...]
    field: Field


def split_topic(text: str, topics: Iterable[str]) -> tuple[str, str]:
    """Split `/joint_states.position` into topic and field; the longest known topic that fits is taken."""
    for name in sorted(topics, key=len, reverse=True):
        rest = text[len(name) :]
        if text.startswith(name) and (not rest or rest[0] in ".["):
            return name, rest.removeprefix(".")
    slash = text.rfind("/") + 1
    name, dot, rest = text[slash:].partition(".")
    return text[:slash] + name, rest if dot else ""


class LogMapping:
    """Makes the columns of a map from the first message of each topic in the first recording."""

    def __init__(self, log: Log, given: Mapping[Key, Sequence[str]], images: str) -> None:
        self._log, self._images = log, images
        self._first: dict[str, Buffer] = {}
        self._codecs: dict[str, Codec] = {}
        self._order: tuple[str, ...] = ()
        self.notes: list[str] = []
        found = []
        for key, texts in given.items():
            require_ted_key(key, tuple(texts))
            if key[0] in {NEXT, TIME, AGE, LATE}:
                raise UsageError(f"--map has the key {key_name(key)!r}, which rbtool makes itself")
            found.append((key, [split_topic(text, log.names) for text in texts]))
        for _, parts in found:
            for topic, _ in parts:
                log.topic(topic)
        if not any(key[0] in STATES for key, _ in found):
            raise UsageError("--map has no observation", hint="add observation.NAME=/TOPIC.FIELD")
        self._load_first(dict.fromkeys(topic for _, parts in found for topic, _ in parts))
        self.columns = [self._column(key, parts) for key, parts in found if not self._is_skipped(parts)]
        if not any(one.timing == "state" for one in self.columns):
            raise UsageError("--images skip leaves no observation", hint="leave it out")

    def _load_first(self, topics: Iterable[str]) -> None:
        self._indexes = indexes = self._log.index(list(topics))
        for name, index in indexes.items():
            if not len(index):
                raise FormatError(f"{self._log.name} has no message on {name}, which is mapped")
        asked = [(index, np.zeros(1, np.int64)) for index in indexes.values()]
        names = list(indexes)
        for at, _, _, data in self._log.read(asked):
            self._first[names[at]] = bytes(data)
        for name in names:
            codec = self._log.topic(name).codec(self._log.name)
            codec.require_whole(self._first[name])
            self._codecs[name] = codec
            if codec.is_assumed:
                self.notes.append(
                    f"the log does not define {codec.schema.name}, the type of {name}: the definition common to all "
                    "distributions of ROS 2 is used"
                )

    def _is_skipped(self, parts: Sequence[tuple[str, str]]) -> bool:
        if self._images != "skip":
            return False
        return any(self._picture(topic, parse_path(field) if field else ()) is not None for topic, field in parts)

    def _picture(self, topic: str, path: FieldPath) -> PictureKind | None:
        return picture_kind(self._codecs[topic].fields(self._first[topic]), path)

    def _column(self, key: Key, given: Sequence[tuple[str, str]]) -> _Column:
        parts = tuple(self._part(topic, parse_path(field) if field else ()) for topic, field in given)
        timing: Timing = "state" if key[0] in STATES else "result" if key == REWARD else "step"
        made = tuple(map(safe_part, key))
        if len(parts) == 1:
            dtype, shape = parts[0].dtype, parts[0].shape
        else:
            if odd := next((one for one in parts if len(one.shape) > 1), None):
                raise FormatError(f"{odd.topic} has pictures, which cannot be part of the vector {key_name(key)}")
            if len({one.dtype == "bool" for one in parts}) > 1:
                raise FormatError(f"{key_name(key)} would mix truth values and numbers", hint="use two keys")
            dtype = np.result_type(*(one.dtype for one in parts)).name
            shape = (sum(math.prod(one.shape) for one in parts),)
        if key == REWARD:
            if math.prod(shape) != 1:
                raise FormatError(f"the reward has to be one number, and {given[0][0]} has {list(shape)}")
            dtype, shape = "float64" if dtype == "float64" else "float32", ()
        field = Field(made, dtype, shape, "reward" if key == REWARD else role_of(made))
        return _Column(made, timing, parts, reference_field(field) if parts[0].is_kept else field)

    def _part(self, topic: str, path: FieldPath) -> _Part:
        codec, sample = self._codecs[topic], self._first[topic]
        fields = codec.fields(sample)
        picture = picture_kind(fields, path)
        if picture is not None:
            return self._picture_part(topic, path, picture, codec, sample)
        path = value_path(fields, path, codec.what)
        take = path[-1] if path and not isinstance(path[-1], str) else None
        if fields.get(path_text(path[:-1]) if take is not None else path_text(path)) == "string":
            raise FormatError(f"{codec.what}: {path_text(path)} is text, expected numbers or pictures")
        bare = path[:-1] if take is not None else path
        names = names_path(fields, bare)
        order: tuple[str, ...] | None = None
        values = codec.chosen([bare] if names is None else [bare, names])(sample)
        what = f"{codec.what}.{path_text(bare)}" if bare else codec.what
        numbers = numbers_of(values[0], what)
        keyed = isinstance(values[0], Mapping) and not codec.is_defined
        if keyed:
            names, order = None, self._ordered(list(keys_of(values[0])), what)
        elif names is not None and numbers.size and len(values[1]) in {0, len(numbers)}:
            order = self._ordered(list(map(str, values[1])), what)
        if order:
            numbers = _in_order(numbers, list(keys_of(values[0]) if keyed else map(str, values[1])), order, what)
        if not numbers.size:
            raise FormatError(f"{what} is empty: it was not measured", hint="map another field, or leave it out")
        if take is not None:
            numbers = _element(numbers, take, what)
        return _Part(
            topic, bare, take, names if order is not None else None, order, None, None, numbers.shape,
            numbers.dtype.name, keyed,
        )  # fmt: skip

    def _ordered(self, names: list[str], what: str) -> tuple[str, ...]:
        """Return the order in which named elements are stored, the same for all topics: the first one seen."""
        if len(set(names)) != len(names):
            raise FormatError(f"{what}: a message names {_twice(names)} twice")
        self._order += tuple(name for name in names if name not in self._order)
        order = tuple(name for name in self._order if name in names)
        if order != tuple(names):
            self.notes.append(f"{what}: its elements are stored in the order of other topics: {', '.join(order)}")
        return order

    def fields_in(self, part: _Part) -> list[str]:
        """Return the names of the fields that a part covers."""
        text = path_text(tuple(0 if isinstance(one, int) else one for one in part.path))
        fields = self._codecs[part.topic].fields(self._first[part.topic])
        return [one for one in fields if not text or one == text or one.startswith((f"{text}.", f"{text}["))]

    def _picture_part(self, topic: str, path: FieldPath, picture: PictureKind, codec: Codec, sample: Buffer) -> _Part:
        values = codec.chosen(list(picture.paths))(sample)
        if picture.kind == "raw":
            form = raw_form(values, codec.what)
            return _Part(topic, path, None, None, None, picture, None, form.shape, form.dtype)
        stated, data = picture_bytes(values, codec.what)
        video = VIDEO_FORMATS.get(stated.strip().lower())
        if video is not None:
            packets = packets_of(self._log, codec, self._indexes[topic], picture.paths, video)
            first = packets.first_key_frame()
            if first == packets.count:
                raise FormatError(
                    f"{codec.what}: its video ({stated}) cannot be decoded: no message has a key frame and its "
                    "parameter sets"
                )
            frame = VideoDecoder(packets).frame(first)
            return _Part(
                topic, path, None, None, None, PictureKind("video", picture.paths), video, frame.shape, "uint8",
                is_kept=self._images == "keep",
            )  # fmt: skip
        if not is_image(data):
            raise FormatError(
                f"{codec.what}: its pictures are {stated!r}, which is not read", hint="JPEG, PNG and H.264 are"
            )
        form = image_form(data, codec.what)
        return _Part(topic, path, None, None, None, picture, None, form.shape, form.dtype)


def _in_order(numbers: Array, names: Sequence[str], order: tuple[str, ...], what: str) -> Array:
    """Put named elements into an order; FormatError if a message has other names."""
    if tuple(names) == order and len(numbers) == len(order):
        return numbers
    if not order:
        if len(names) == len(numbers):
            raise FormatError(
                f"{what}: the first message does not name its elements, but a later one names {', '.join(names)}",
                hint="begin the log after the messages without names, or map another topic",
            )
        return numbers
    if len(numbers) != len(names):
        raise FormatError(f"{what}: a message has {len(names)} names and {len(numbers)} values")
    if sorted(names) != sorted(order):
        raise FormatError(
            f"{what}: messages name different elements, {', '.join(order)} and {', '.join(names)}, as if several nodes "
            "publish on one topic",
            hint="record each node on a topic of its own, or map other topics",
        )
    return numbers[[names.index(name) for name in order]]


def _twice(names: Sequence[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _element(numbers: Array, take: int | slice, what: str) -> Array:
    """Take an element, or a range of elements; FormatError if the list is too short."""
    if isinstance(take, slice):
        if take.stop is not None and take.stop > len(numbers):
            raise FormatError(f"{what} has {len(numbers)} elements, and {take.stop} are mapped")
        return numbers[take]
    if take >= len(numbers):
        raise FormatError(f"{what} has {len(numbers)} elements, and element {take} is mapped")
    return np.asarray(numbers[take])


# Time lines ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """The messages of a topic in order of the chosen clock.

    `times` are ascending, int64 `[n]` in nanoseconds; `numbers` are the numbers of these messages in the index.
    """

    index: Index
    times: Array
    numbers: Array

    def holding(self, times: Array, low: int, high: int) -> Array:
        """Return the position of the newest message at or before each time, among positions `[low, high)`."""
        found: Array = np.clip(np.searchsorted(self.times, times, "right") - 1, low, high - 1)
        return found

    def nearest(self, times: Array, low: int, high: int) -> Array:
        """Return the position of the message nearest to each time, the earlier one of two, among `[low, high)`."""
        before = self.holding(times, low, high)
        after = np.minimum(before + 1, high - 1)
        later = np.abs(self.times[after] - times) < np.abs(times - self.times[before])
        return np.where(later, after, before)

    def between(self, since: int | None, until: int | None) -> tuple[int, int]:
        """Return the range of positions of the messages with times in `[since, until)`; None stands for no bound."""
        low = 0 if since is None else int(np.searchsorted(self.times, since, "left"))
        high = len(self.times) if until is None else int(np.searchsorted(self.times, until, "left"))
        return low, high


class OpenLog:
    """An open recording, with the time lines of its topics on the chosen clock."""

    def __init__(self, log: Log, topics: Sequence[str], clock: str, is_alone: bool = True) -> None:
        self.log = log
        self.notes = list(self.log.notes)
        self.decoders: dict[str, VideoDecoder] = {}
        self.kept: Mapping[str, KeptVideo] = {}
        self._begins: dict[str, int] = {}
        self.codecs = {name: self.log.topic(name, is_alone).codec(self.log.name) for name in topics}
        indexes = self.log.index(topics)
        self.lines = {name: Line(one, one.log, np.arange(len(one))) for name, one in indexes.items()}
        if clock != "log":
            self._take_clock(clock)

    def _take_clock(self, clock: str) -> None:
        """Replace log times by the times in messages.

        Topics without stamps get their log times less the smallest delay of the topics with stamps.
        """
        stamps = self._published() if clock == "publish" else self._headers()
        stated = {name: np.flatnonzero(found) for name, found in stamps.items() if len(found)}
        offsets = {}
        for name, numbers in stated.items():
            if not len(numbers):
                raise FormatError(f"{self.log.name}: the stamps of {name} are all 0", hint="use --clock log")
            if without := len(stamps[name]) - len(numbers):
                self.notes.append(f"{counted(without, 'message')} of {name} {_are(without)} left out: the stamp is 0")
            self._require_steady(name, stamps[name][numbers])
            delays = self.lines[name].index.log[numbers] - stamps[name][numbers]
            offsets[name] = int(delays.min())
            if int(delays.max()) - offsets[name] > _STEADY:
                self.notes.append(
                    f"{name}: the delay between stamp and log goes from {offsets[name] / _NS:.3f} to "
                    f"{int(delays.max()) / _NS:.3f} s: messages waited, or a clock was set or drifts"
                )
        if not offsets:
            raise UsageError(f"{self.log.name}: no mapped topic has times in its messages", hint="use --clock log")
        low, high = (choose(offsets, key=offsets.__getitem__) for choose in (min, max))
        if offsets[high] - offsets[low] > _HOUR:
            hours = (offsets[high] - offsets[low]) / _HOUR
            raise FormatError(
                f"{self.log.name}: the clocks of {low} and {high} differ by {hours:,.1f} hours: they cannot be aligned",
                hint="use --clock log",
            )
        least = offsets[low]
        if offsets[high] - least > _NEAR:
            self.notes.append(
                f"the least delay between stamp and log is {least / _NS:.3f} s for {low}, and "
                f"{offsets[high] / _NS:.3f} s for {high}: unless transport takes that long, their clocks differ"
            )
        for name, line in self.lines.items():
            times = stamps.get(name)
            if times is None and len(line.times):
                if abs(least) > _HOUR:
                    raise FormatError(
                        f"{self.log.name}: {name} has no stamps of its own, and the clock of the log is "
                        f"{abs(least) / _HOUR:,.1f} hours from the stamps of {low}: they cannot be aligned",
                        hint="use --clock log",
                    )
                times = line.index.log - least
                self.notes.append(
                    f"{name} has no stamps: its log times less {least / _NS:.6f} s are used, the least delay between "
                    "stamp and log of the other topics"
                )
            if times is not None:
                numbers = stated.get(name, line.numbers)
                if back := int((np.diff(times[numbers]) < 0).sum()):
                    self.notes.append(f"the stamps of {name} step back {counted(back, 'time')}: they are sorted")
                order = numbers[np.argsort(times[numbers], kind="stable")]
                self.lines[name] = Line(line.index, times[order], order)

    def _require_steady(self, name: str, stamps: Array) -> None:
        """Raise FormatError for stamps that jump back: sorting would mix the messages before and after the jump."""
        if (back := -int(np.diff(stamps).min(initial=0))) > _STEADY:
            raise FormatError(
                f"{self.log.name}: the stamps of {name} step back by {back / _NS:.3f} s, as if the device restarted or "
                "its clock was set",
                hint="use --clock log",
            )

    def _published(self) -> dict[str, Array]:
        found = {name: np.zeros(len(line.times), np.int64) for name, line in self.lines.items()}
        names = list(self.lines)
        asked = [(self.lines[name].index, np.arange(len(self.lines[name].times))) for name in names]
        for at, number, published, _ in self.log.read(asked):
            if published is None:
                raise UsageError(
                    f"{self.log.name} is a {self.log.kind}, which does not store times of publishing",
                    hint="use --clock log or --clock header",
                )
            found[names[at]][number] = min(published, (1 << 63) - 1)
        return found

    def _headers(self) -> dict[str, Array]:
        names, decoders, found = [], [], {}
        for name, line in self.lines.items():
            if not len(line.times):
                continue
            sample = bytes(self.log.message(line.index.places[0].tolist())[1])
            paths = stamp_paths(self.codecs[name].fields(sample))
            if paths is not None:
                names.append(name)
                decoders.append(self.codecs[name].chosen(list(paths)))
                found[name] = np.zeros(len(line.times), np.int64)
        asked = [(self.lines[name].index, np.arange(len(self.lines[name].times))) for name in names]
        for at, number, _, data in self.log.read(asked):
            seconds, nanos = decoders[at](data)
            if int(seconds) != seconds or int(nanos) != nanos:
                raise FormatError(
                    f"{self.log.name}: a stamp of {names[at]} is {seconds} s and {nanos} ns, expected whole numbers",
                    hint="use --clock log",
                )
            found[names[at]][number] = int(seconds) * _NS + int(nanos)
        return found

    def packets(self, part: _Part) -> Packets:
        """Return the packets of a topic with video."""
        assert part.codec is not None
        index = self.lines[part.topic].index
        return packets_of(self.log, self.codecs[part.topic], index, part.paths, part.codec)

    def decoder(self, part: _Part) -> VideoDecoder:
        """Return the decoder of a video, which continues after the last frame."""
        if part.topic not in self.decoders:
            self.decoders[part.topic] = VideoDecoder(self.packets(part))
        return self.decoders[part.topic]

    def begin_at_key_frame(self, part: _Part) -> None:
        """Leave out the packets of a video before its first key frame, which cannot be decoded."""
        line, packets = self.lines[part.topic], self.packets(part)
        first = packets.first_key_frame()
        if first:
            kept = line.numbers >= first
            self.lines[part.topic] = Line(line.index, line.times[kept], line.numbers[kept])
            self.notes.append(f"{part.topic}: {counted(first, 'packet')} before the first key frame cannot be decoded")
        packets.require_in_order(first)
        self._begins[part.topic] = first

    def keep(self, parts: Iterable[_Part], folder: Path) -> None:
        """Write the videos that are kept to files in a folder."""
        self.kept = {
            part.topic: self.packets(part).keep(
                self._begins[part.topic], self.lines[part.topic].index.log, part.form, folder
            )
            for part in parts
            if self._begins[part.topic] < len(self.lines[part.topic].index)
        }


def packets_of(log: Log, codec: Codec, index: Index, paths: Sequence[FieldPath], video: str) -> Packets:
    """Return the packets of a topic with the codec `video`; a message of another format raises FormatError."""
    decode = codec.chosen(list(paths))

    def packet(number: int) -> bytes:
        stated, data = picture_bytes(decode(log.message(index.places[number].tolist())[1]), codec.what)
        if VIDEO_FORMATS.get(stated.strip().lower()) != video:
            raise FormatError(f"{codec.what}: message {number:,} is {stated!r}, and the first ones are {video}")
        require_no_b_frames(data, video, codec.what)
        return data

    return Packets(video, packet, len(index), codec.what)


# Episodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a recording that becomes an episode, with times in nanoseconds.

    Attributes:
        since: earliest time of messages that are used, None for no bound.
        until: time before which messages are used, None for no bound.
        start: the beginning of the grid, None for the time from which all observations and actions have values.
        stop: time before which steps begin, None for the last message of the first observation.
        texts: texts of the episode.
        success: whether the episode is stated to have succeeded, None if not stated.
    """

    since: int | None = None
    until: int | None = None
    start: int | None = None
    stop: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    success: bool | None = None


@dataclass(frozen=True, slots=True)
class _Episode:
    """An episode: `rows` consecutive times of a grid, one more than steps.

    With a rate, the first is time `first` of the grid that begins at `origin`; with a reference topic, it is the time
    of message `first`.
    """

    recording: int
    origin: int
    first: int
    rows: int
    segment: _Segment
    terminated: bool
    texts: Mapping[str, str]


def _markers(opened: OpenLog, topic: str, field: str) -> Iterator[tuple[int, Any]]:
    """Yield the time and the value of each message that marks episodes."""
    line, codec = opened.lines[topic], opened.codecs[topic]
    if not len(line.times):
        return
    sample = bytes(opened.log.message(line.index.places[0].tolist())[1])
    fields = codec.fields(sample)
    path = parse_path(field) if field else ()
    if not path and codec.is_defined:
        tops = {name.partition(".")[0] for name in fields} - {"header", "stamp", "timestamp"}
        path = (tops.pop(),) if len(tops) == 1 else ()
    decode = codec.chosen([path])
    for time, number in zip(line.times.tolist(), line.numbers.tolist(), strict=True):
        (value,) = decode(opened.log.message(line.index.places[number].tolist(), int(line.index.log[number]))[1])
        value = _plain(value)
        if not path and not codec.is_defined and isinstance(value, Mapping):  # each message may have other keys
            inner = [one for one in value if one not in {"header", "stamp", "timestamp"}]
            if len(inner) == 1 and (inner[0] not in _EVENTS or _word(value[inner[0]]) is None):
                value = _plain(value[inner[0]])
        yield time, value


def _plain(value: Any) -> Any:
    descriptor = getattr(value, "DESCRIPTOR", None)
    if descriptor is not None:
        return {one.name: getattr(value, one.name) for one in descriptor.fields}
    if isinstance(value, Mapping):
        return {name: inner.item() if isinstance(inner, np.generic) else inner for name, inner in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return found if isinstance(found, dict) else value
    return value


@dataclass(frozen=True, slots=True)
class _Mark:
    """The meaning of a marker: an episode starts, or it ends.

    Markers with the same `number` (of an episode, or a flag or word for a state) repeat each other.
    """

    starts: bool
    number: Any = None
    texts: Mapping[str, str] = field(default_factory=dict)
    success: bool | None = None


def _mark(value: Any, what: str) -> _Mark:
    """Interpret the value of a marker; FormatError unless it means that an episode starts or ends."""
    if isinstance(value, bool):
        return _Mark(value, number=value)
    if isinstance(value, int | float):
        return _Mark(value >= 0, number=value)
    texts: dict[str, str] = {}
    success: bool | None = None
    word: Any = value
    if isinstance(value, Mapping):
        name = next((one for one in _EVENTS if _word(value.get(one)) is not None), None)
        word = None if name is None else value[name]
        texts = {
            str(one): str(inner).lower() if isinstance(inner, bool) else str(inner)
            for one, inner in value.items()
            if one != name and isinstance(inner, str | int | float)
        }
        success = _succeeded(value.get("success"))
    said = _word(word)
    if said is None:
        shown = str(value)
        raise FormatError(
            f"{what}: the marker {shown[:60]!r} does not mean that an episode starts or ends",
            hint="known are start and stop, true and false, numbers of episodes, and an event in JSON; or use "
            "--episodes-by gap:2s",
        )
    text = str(word).strip().lower()
    state = word if isinstance(word, bool) else text if text in _STATED else None
    return _Mark(said, state, texts, _SUCCESSES.get(text, success))


def _succeeded(value: Any) -> bool | None:
    """Interpret a value as success or failure; None for any other value."""
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _word(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str) else ""
    return True if text in _STARTS else False if text in _STOPS or text in _SUCCESSES else None


def _marked(marks: Iterable[tuple[int, _Mark]]) -> tuple[list[_Segment], int, int]:
    """Return the segments between starts and stops, the number of stops without start, and of starts without stop."""
    found: list[_Segment] = []
    opened: tuple[int, _Mark] | None = None
    idle = endless = 0
    for time, mark in marks:
        if mark.number is not None and opened is not None and opened[1].number == mark.number:
            continue
        if opened is not None:
            texts = {**opened[1].texts, **({} if mark.starts else mark.texts)}
            success = mark.success if not mark.starts else None
            endless += mark.starts and mark.number is None
            found.append(_Segment(start=opened[0], stop=time, texts=texts, success=success))
        elif not mark.starts:
            idle += mark.number is None
        opened = (time, mark) if mark.starts else None
    if opened is not None:
        found.append(_Segment(start=opened[0], texts=opened[1].texts))
        endless += 1
    return found, idle, endless


def _silences(lines: Iterable[Line], gap: int) -> list[_Segment]:
    """Return the segments that are separated by silences of at least `gap` on all topics."""
    times = _sorted(*(line.times for line in lines))
    cuts = np.flatnonzero(np.diff(times) >= gap)
    begins, ends = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(times) - 1]
    return [_Segment(since=int(times[low]), until=int(times[high]) + 1) for low, high in zip(begins, ends, strict=True)]


def _sorted(*arrays: Array) -> Array:
    """Return the sorted distinct numbers; faster than `numpy.unique` for numbers that are mostly sorted."""
    found = np.sort(np.concatenate(arrays), kind="stable")
    once: Array = found[np.diff(found, prepend=found[:1] - 1) != 0]
    return once


_MOST_ROWS = 10_000_000


class _Grid:
    """The times of steps: time `k` is `floor(k / rate)` ns after the origin, or the time of message `k` of a topic."""

    def __init__(self, rate: Fraction | None, reference: Line | None) -> None:
        self._rate, self._reference = rate, reference

    def before(self, origin: int, stop: int) -> int:
        """Return the number of times before `stop`, counted from `origin`, or from the first message of the topic."""
        if self._reference is not None:
            return int(np.searchsorted(self._reference.times, stop, "left"))
        assert self._rate is not None
        return max(0, math.ceil(Fraction(stop - origin) * self._rate / _NS))

    def times(self, origin: int, first: int, rows: int) -> Array:
        """Return `rows` times from the time `first` on, int64 in nanoseconds."""
        if self._reference is not None:
            found: Array = self._reference.times[first : first + rows]
            return found
        assert self._rate is not None
        over, under = _NS * self._rate.denominator, self._rate.numerator
        if (first + rows) * over < 1 << 62:
            return origin + np.arange(first, first + rows, dtype=np.int64) * over // under
        return origin + np.array([k * over // under for k in range(first, first + rows)], np.int64)

    def count(self) -> int | None:
        """Return the number of times, None if it is unlimited."""
        return None if self._reference is None else len(self._reference.times)


@dataclass(slots=True)
class _Tally:
    """Counts of how the messages of a topic are used.

    Attributes:
        rows: rows with values of the topic.
        repeated: rows that use the same message as the row before.
        unused: messages inside episodes that no row uses.
        outside: messages before, between and after episodes.
        late: rows whose value is late.
        oldest: the greatest age of a value in nanoseconds.
    """

    rows: int = 0
    repeated: int = 0
    unused: int = 0
    outside: int = 0
    late: int = 0
    oldest: int = 0

    def add(self, positions: Array, ages: Array, late: Array | None) -> None:
        """Add the rows of an episode."""
        used = int((np.diff(positions) != 0).sum()) + 1
        self.rows += len(positions)
        self.repeated += len(positions) - used
        self.unused += int(positions[-1] - positions[0]) + 1 - used
        self.oldest = max(self.oldest, int(np.abs(ages).max()))
        self.late += 0 if late is None else int(late.sum())

    def note(self, topic: str, tolerance: int | None) -> str:
        """Return a note with these counts; rewards have no rows, because they are added up."""
        outside = counted(self.outside, "message")
        if not self.rows:
            return f"{topic}: {outside} {_are(self.outside)} outside all steps, and not added up"
        late = "" if tolerance is None else f", {self.late:,} are late by more than {tolerance / 10**6:g} ms"
        return (
            f"{topic}: of {counted(self.rows, 'row')} {self.repeated:,} repeat the value before{late}; "
            f"{counted(self.unused, 'message')} between steps and {self.outside:,} outside episodes are in no row; "
            f"values are up to {self.oldest / _NS:.3f} s old"
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


# The reader ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of the survey of all recordings."""

    columns: tuple[_Column, ...]
    fields: tuple[tuple[Field, Timing], ...]
    episodes: tuple[_Episode, ...]
    notes: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    documents: Mapping[str, bytes]
    kept: Sequence[Mapping[str, KeptVideo]]
    """The videos of each recording by topic."""


class LogReader(SurveyedReader[_Found]):
    """Reads an MCAP file, a ROS 2 bag, a ROS 1 bag, or a folder of them; options define keys, steps and episodes.

    docs/reference/logs.md describes the rules in full.

    Options:
        map: keys and the topics and fields of their values.
        fps: steps per second.
        align: how values are taken at the time of a step: `hold`, `nearest`, `linear` or `reference:/TOPIC`.
        clock: the clock of messages: `log`, `header` or `publish`.
        episodes_by: where episodes are cut: `file`, `gap:2s` or `topic:/TOPIC`.
        tolerance: the age from which a value is late, like `50ms`.
        drop_late: whether episodes are cut at steps with late values.
        action: `next:KEY` makes actions of the next observation.
        images: `keep` videos as files, `decode` them, or `skip` all pictures.

    Raises:
        UsageError: a log does not have a topic or field of the map.
        FormatError: clocks cannot be aligned, or values change their size.
        CorruptDataError: a file is damaged.
    """

    option_names = _OPTIONS

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a robot log, or a folder with one, by the first bytes of its files."""
        return has_recordings(path)

    def on_open(self) -> None:
        """Find the recordings, and parse the options."""
        self._recordings = require_recordings(self.path)
        self._open: tuple[int, OpenLog] | None = None
        self._images = require_images(self.options.get("images"), known=("keep", "decode", "skip"))
        given = self.options.get("map")
        self._rules = Rules.of(self.options)
        if not given or (self._rules.rate is None and self._rules.reference is None):
            what = "what its topics are" if not given else "how many steps a second it has"
            example = "--map observation.state=/TOPIC.FIELD --fps 30" if not given else "--fps 30"
            raise MapNeededError(
                self.path, f"does not state {what}", hint=f"add {example}; rbtool inspect {self.path} proposes it",
                format="logs", options={},
            )  # fmt: skip
        self._given = parse_map(given)

    def _opened(self, number: int, columns: Sequence[_Column]) -> OpenLog:
        if self._open is None or self._open[0] != number:
            self._close()
            with ExitStack() as stack:
                self._take_up(number, stack.enter_context(self._recordings[number].open()), columns)
                stack.pop_all()
        assert self._open is not None
        return self._open[1]

    def _take_up(self, number: int, log: Log, columns: Sequence[_Column]) -> None:
        """Make the time lines of a recording, and keep it open."""
        opened = OpenLog(log, self._topics(columns), self._rules.clock, is_alone=len(self._recordings) == 1)
        for part in _videos(columns):
            opened.begin_at_key_frame(part)
        if self._found is not None:
            opened.kept = self._found.kept[number]
        self._open = (number, opened)

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].log.close()
            self._open = None

    def on_close(self) -> None:
        """Close the log that is open, if any."""
        self._close()

    def files(self) -> list[Path]:
        """The files of all recordings."""
        return [
            path for one in self._recordings for path in (*one.files, *([one.about] if one.about is not None else []))
        ]

    def look(self, progress: Callable[[int], None]) -> _Found:
        """Find the episodes of all recordings; only the first message of each topic and markers are decoded."""
        columns, notes, dropped = self._columns()
        notes += [f"{one} is left out: it has the name of a log, but is not one" for one in left_out(self.path)]
        episodes: list[_Episode] = []
        tallies: dict[str, _Tally] = {}
        documents: dict[str, bytes] = {}
        videos = [part for part in _videos(columns) if part.is_kept]
        folder = self._folder_of_videos() if videos else None
        kept: list[Mapping[str, KeptVideo]] = []
        for number, recording in enumerate(self._recordings):
            opened = self._opened(number, columns)
            if folder is not None:
                opened.keep(videos, folder)
            kept.append(opened.kept)
            found = list(self._episodes(number, opened, columns, tallies, notes))
            episodes += found
            notes += opened.notes
            dropped += self._unmapped(opened.log, columns, dropped)
            for name, data in opened.log.attachments.items():
                documents[f"attachments/{safe_part(recording.name)}/{safe_part(name)}"] = data
            progress(len(found))
        if not episodes:
            why = next(iter(notes), "there are no two times at which all topics have values")
            raise FormatError(f"{self.path} has no steps: {why}", hint=f"rbtool inspect {self.path} shows its topics")
        notes += [tally.note(name, self._rules.tolerance) for name, tally in tallies.items()
                  if tally.rows or tally.outside]  # fmt: skip
        if names := [key_name(one.key) for one in columns if one.parts[0].is_kept]:
            notes.append(f"{VIDEOS_KEPT} ({', '.join(names)})")
        if self._rules.rate is not None:
            documents["alignment_info.json"] = json.dumps(self._described()).encode()
        return _Found(
            tuple(columns), tuple(self._fields(columns)), tuple(episodes), tuple(_few(notes)), tuple(dropped),
            documents, kept,
        )  # fmt: skip

    def _folder_of_videos(self) -> Path:
        """Make a temporary folder that lives as long as this object: videos are copied after the reader was closed."""
        folder = tempfile.TemporaryDirectory(prefix="rbtool-log-")
        weakref.finalize(self, folder.cleanup)
        return Path(folder.name)

    def videos_of(self, numbers: Sequence[int]) -> dict[str, Path | bytes]:
        """The kept videos of the recordings that these episodes come from."""
        found = self.found
        recordings = dict.fromkeys(found.episodes[number].recording for number in numbers)
        return {
            name: content
            for recording in recordings
            for video in found.kept[recording].values()
            for name, content in video.contents.items()
        }

    def _described(self) -> dict[str, Any]:
        rules = self._rules
        assert rules.rate is not None
        return {
            "fps": float(rules.rate), "clock": rules.clock, "align": rules.align,
            "episodes_by": str(self.options.get("episodes_by") or "file"),
        }  # fmt: skip

    def _columns(self) -> tuple[list[_Column], list[str], list[Dropped]]:
        self._close()  # the log of a survey that failed
        with ExitStack() as stack:
            log = stack.enter_context(self._recordings[0].open())
            mapping = LogMapping(log, self._given, self._images)
            kinds = schema_names(log.topics.values())
            dropped = self._unmapped(log, mapping.columns, ())
            if clocks := [name for name, kind in kinds.items() if kind.endswith("/Clock")]:
                mapping.notes.append(
                    f"{clocks[0]} was recorded: nodes may have used simulated time, also in header stamps"
                )
            self._require_alignable(mapping)
            self._refuse_next(mapping.columns)
            self._take_up(0, log, mapping.columns)
            stack.pop_all()
        marks = next((one.key for one in dropped if MARKER.search(one.key)), None)
        if self._rules.gap is None and self._rules.marker is None and marks is not None:
            mapping.notes.append(f"{marks} may mark episodes: --episodes-by topic:{marks} cuts them there")
        if not any(column.key[0] == ACTION[0] for column in mapping.columns) and self._rules.next_of is None:
            mapping.notes.append(
                "no action is mapped: the dataset has none (--action next:KEY makes it of observations)"
            )
        return mapping.columns, mapping.notes, dropped

    def _unmapped(self, log: Log, columns: Sequence[_Column], known: Iterable[Dropped]) -> list[Dropped]:
        mapped = {part.topic for column in columns for part in column.parts}
        used = mapped | {name.partition("@")[0] for name in mapped} | {one.key for one in known}
        return [
            Dropped(name, f"it is not mapped ({kind})" if kind else "it is not mapped")
            for name, kind in schema_names(log.topics.values()).items()
            if name not in used and name != self._marker[0]
        ]

    def _require_alignable(self, mapping: LogMapping) -> None:
        if self._rules.align != "linear":
            return
        for part in (part for column in mapping.columns for part in column.parts if part.is_numbers):
            for text in (f"{part.topic}.{name}" for name in (path_text(part.path), *mapping.fields_in(part))):
                if any(word in text.lower() for word in ("orientation", "rotation", "quat")):
                    raise UsageError(
                        f"--align linear: {text} is a rotation, which cannot be interpolated number by number",
                        hint="use --align hold or nearest",
                    )

    def _refuse_next(self, columns: Sequence[_Column]) -> None:
        wanted = self._rules.next_of
        if wanted is None:
            return
        if any(column.key[0] == ACTION[0] for column in columns):
            raise UsageError("--action next makes actions, but --map has some already", hint="leave out one of them")
        states = [column for column in columns if column.timing == "state" and not column.parts[0].is_kept]
        if all(column.key != wanted for column in states):
            names = ", ".join(key_name(column.key) for column in states)
            raise UsageError(
                f"--action is next:{key_name(wanted)}, which is not an observation in --map",
                hint=f"observations that can be actions are {names or 'none'}",
            )

    @functools.cached_property
    def _marker(self) -> tuple[str | None, str]:
        """The topic that marks episodes, and its field; names may contain dots, so the topics of the log are needed."""
        if self._rules.marker is None:
            return None, ""
        with self._recordings[0].open() as log:
            return split_topic(self._rules.marker, log.names)

    def _topics(self, columns: Sequence[_Column]) -> list[str]:
        names = dict.fromkeys(part.topic for column in columns for part in column.parts)
        if self._rules.reference is not None:
            names[self._rules.reference] = None
        if self._marker[0] is not None:
            names[self._marker[0]] = None
        return list(names)

    def _fields(self, columns: Sequence[_Column]) -> Iterator[tuple[Field, Timing]]:
        for column in columns:
            yield column.field, column.timing
        for column in columns:
            if self._rules.next_of == column.key:
                yield replace(column.field, key=ACTION, role="action"), "step"
        marks: list[tuple[str, str]] = [(TIME, "int64"), (AGE, "float64")]
        marks += [(LATE, "bool")] if self._rules.tolerance is not None else []
        for column in (one for one in columns if one.timing != "result"):
            for name, dtype in marks:
                yield Field((name, *column.key), dtype, (), "info"), column.timing

    def _segments(self, opened: OpenLog, columns: Sequence[_Column], notes: list[str]) -> list[_Segment]:
        texts = dict(opened.log.texts)
        if self._rules.gap is not None:
            mapped = {part.topic for column in columns for part in column.parts}
            texts.pop("success", None)
            found = _silences((opened.lines[name] for name in mapped), self._rules.gap)
            return [replace(one, texts=texts) for one in found]
        if self._rules.marker is None:
            return [_Segment(texts=texts, success=_succeeded(texts.get("success")))]
        topic, field = self._marker
        assert topic is not None
        what = f"{opened.log.name}: {topic}"
        found, idle, endless = _marked((time, _mark(value, what)) for time, value in _markers(opened, topic, field))
        if not found:
            notes.append(f"{what} never marks a start: the recording has no episode")
        if idle:
            notes.append(f"{what} has {counted(idle, 'stop')} without a start")
        if endless:
            notes.append(
                f"{what} has {counted(endless, 'start')} without a stop: the episode goes on to the next start, or to "
                "the end of the log"
            )
        texts.pop("success", None)
        return [
            replace(
                one, texts={**texts, **one.texts}
                | ({} if one.success is None else {"success": str(one.success).lower()}),
            )
            for one in found
        ]  # fmt: skip

    def _episodes(
        self, number: int, opened: OpenLog, columns: Sequence[_Column], tallies: dict[str, _Tally], notes: list[str]
    ) -> Iterator[_Episode]:
        """Yield the episodes of a recording, and count how its messages are used."""
        several = len(self._recordings) > 1
        inside = {
            part.topic: np.zeros(len(opened.lines[part.topic].times), bool) for one in columns for part in one.parts
        }
        for at, segment in enumerate(self._segments(opened, columns, notes)):
            name = f"{self._recordings[number].name}, part {at}"
            spread = self._spread(opened, columns, segment, name, notes)
            if spread is None:
                continue
            origin, first, rows = spread
            texts = {**({"recording": self._recordings[number].name} if several else {}), **segment.texts}
            late = self._tallied(opened, columns, spread, segment, tallies, inside)
            for low, high in ranges_of(~late) if self._rules.drop_late else [(0, rows - 1)]:
                yield _Episode(
                    number, origin, first + low, high - low + 1, segment,
                    segment.success is True and high == rows - 1, texts,
                )  # fmt: skip
        for topic, used in inside.items():
            tallies.setdefault(topic, _Tally()).outside += int((~used).sum())

    def _spread(
        self, opened: OpenLog, columns: Sequence[_Column], segment: _Segment, name: str, notes: list[str]
    ) -> tuple[int, int, int] | None:
        """Return the origin of a segment's grid, its first row with values, and its number of rows.

        Returns None, and adds a note, for a segment without steps. The segment begins when all observations and actions
        have a value. If that is less than one step after a time of the grid, the row of that time is kept: it has a
        value that comes later, with a negative age.
        """
        aligned = list(dict.fromkeys(part.topic for one in columns if one.timing != "result" for part in one.parts))
        lead = next(part.topic for one in columns if one.timing == "state" for part in one.parts)
        actions = [part.topic for one in columns if one.key[0] == ACTION[0] for part in one.parts]
        bounds = {topic: opened.lines[topic].between(segment.since, segment.until) for topic in aligned}
        for topic, (low, high) in bounds.items():
            if low >= high:
                notes.append(f"{name} is left out: it has no message on {topic}")
                return None
        begins = {topic: int(opened.lines[topic].times[low]) for topic, (low, _) in bounds.items()}
        last = int(opened.lines[lead].times[bounds[lead][1] - 1])
        origin = max(begins[topic] for topic in (lead, *actions)) if segment.start is None else segment.start
        grid = self._grid(opened)
        stop = last + 1 if segment.stop is None else segment.stop
        first = max(grid.before(origin, origin), grid.before(origin, max(begins.values())))
        skipped = first - grid.before(origin, origin)
        if skipped == 1:  # the last value comes within the first step: keep its row, with a negative age
            first -= 1
        steps = grid.before(origin, stop) - first
        if (count := grid.count()) is not None:
            count = count if segment.until is None else grid.before(origin, segment.until)
            steps = min(steps, count - first - 1)
        if steps < 1:
            notes.append(f"{name} is left out: it has no step with a value of every topic")
            return None
        if steps > _MOST_ROWS:
            raise FormatError(
                f"{opened.log.name} would have {steps:,} steps, from {origin} to {stop} ns: a time in it is far from "
                "the others",
                hint="cut it with --episodes-by gap:10s",
            )
        latest = max(begins, key=begins.__getitem__)
        if skipped == 1:
            early = (begins[latest] - int(grid.times(origin, first, 1)[0])) / 10**6
            notes.append(f"{name}: the first row has the first value of {latest}, measured {early:.3f} ms after it")
        elif skipped:
            notes.append(f"{name}: the first {counted(skipped, 'step')} have no value of {latest}, and are left out")
        return origin, first, steps + 1

    def _grid(self, opened: OpenLog) -> _Grid:
        reference = self._rules.reference
        return _Grid(self._rules.rate, None if reference is None else opened.lines[reference])

    def _positions(self, line: Line, times: Array, segment: _Segment) -> Array:
        low, high = line.between(segment.since, segment.until)
        if self._rules.align == "nearest":
            return line.nearest(times, low, high)
        return line.holding(times, low, high)

    def _tallied(
        self, opened: OpenLog, columns: Sequence[_Column], spread: tuple[int, int, int], segment: _Segment,
        tallies: dict[str, _Tally], inside: Mapping[str, Array],
    ) -> Array:  # fmt: skip
        """Count how messages are used, and mark those `inside` episodes; return which steps have a late value."""
        times = self._grid(opened).times(*spread)
        late = np.zeros(len(times) - 1, bool)
        seen = set()
        for part in (part for one in columns if one.timing == "result" for part in one.parts):
            bounds = self._read_rewards(opened.lines[part.topic], times, segment)
            inside[part.topic][bounds[0] : bounds[-1]] = True
        for column in (one for one in columns if one.timing != "result"):
            rows = times if column.timing == "state" else times[:-1]
            for part in column.parts:
                line = opened.lines[part.topic]
                positions = self._positions(line, rows, segment)
                inside[part.topic][positions[0] : positions[-1] + 1] = True
                ages = rows - line.times[positions]
                bad = None if self._rules.tolerance is None else self._rules.late(ages)
                if part.topic not in seen:
                    tallies.setdefault(part.topic, _Tally()).add(positions, ages, bad)
                    seen.add(part.topic)
                if bad is not None:
                    late |= bad[:-1] | bad[1:] if column.timing == "state" else bad
        return late

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of all episodes."""
        found = self.looked_over(progress)
        lengths = [one.rows - 1 for one in found.episodes]
        return SourceFacts(
            source="logs",
            id=self.path.name if self.path.is_dir() else self.path.stem,
            fields=found.fields,
            episode_numbers=range(len(lengths)),
            steps=sum(lengths),
            dropped_keys=found.dropped,
            renamed_keys={
                ",".join(_source_text(part) for part in column.parts): key_name(column.field.key)
                for column in found.columns
            },
            notes=found.notes,
            documents=found.documents,
            lengths=lengths,
        )

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        found = self.found
        episode = found.episodes[number]
        opened = self._opened(episode.recording, found.columns)
        grid = self._grid(opened)
        steps, size = episode.rows - 1, self.piece_rows(found.fields)
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            times = grid.times(episode.origin, episode.first + start, stop - start + 1)
            columns = self._values(opened, found.columns, times, episode.segment)
            if stop == steps:
                opened.log.require_indexed(*self._span(opened, episode.segment))
            yield _piece(number, episode, columns, start, stop)

    def _span(self, opened: OpenLog, segment: _Segment) -> tuple[int, int]:
        """Return the range of log times of an episode's messages, for the comparison with the index."""
        since, until = (0, 1 << 63) if self._rules.clock != "log" else (segment.since, segment.until or segment.stop)
        if since is None and segment.start is not None:  # the first row holds values from before the start
            begin = np.array([segment.start])
            lines = [one for one in opened.lines.values() if len(one.times)]
            since = min(int(one.times[one.holding(begin, 0, len(one.times))][0]) for one in lines)
        return since or 0, until or 1 << 63

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        found = self.found
        episode = found.episodes[number]
        rewards = [column for column in found.columns if column.timing == "result"]
        columns: dict[Key, Array] = {}
        if rewards:
            opened = self._opened(episode.recording, found.columns)
            times = self._grid(opened).times(episode.origin, episode.first, episode.rows)
            columns = self._values(opened, rewards, times, episode.segment)
        yield _piece(number, episode, columns, 0, episode.rows - 1)

    def _values(self, opened: OpenLog, columns: Sequence[_Column], times: Array, segment: _Segment) -> dict[Key, Array]:
        """Return the columns at some times of the grid; the last time is only for observations."""
        reads = [self._read_of(opened, column, part, times, segment) for column in columns for part in column.parts]
        wanted: dict[str, Array] = {}
        for one in reads:
            wanted[one.part.topic] = _sorted(wanted.get(one.part.topic, one.numbers[:0]), one.numbers)
        decoded = self._decoded(opened, reads, wanted)
        found: dict[Key, Array] = {}
        ages: dict[Key, Array] = {}
        given = zip(reads, decoded, strict=True)
        for column in columns:
            rows, stamps, late = [], [], []
            at = times if column.timing == "state" else times[:-1]
            for _ in column.parts:
                one, values = next(given)
                rows.append(one.aligned(values, wanted[one.part.topic], at))
                if column.timing != "result":
                    stamps.append(one.line.times[one.positions])
                    late.append(self._rules.late(at - stamps[-1]))
            made = rows[0] if len(rows) == 1 else np.concatenate([one.reshape(len(one), -1) for one in rows], 1)
            found[column.field.key] = made.astype(column.field.dtype, copy=False)
            if stamps:
                oldest = np.min(stamps, axis=0)
                ages[TIME, *column.key], ages[AGE, *column.key] = oldest, (at - oldest) / _NS
                if self._rules.tolerance is not None:
                    ages[LATE, *column.key] = np.logical_or.reduce(late)
        if self._rules.next_of is not None and self._rules.next_of in found:
            found[ACTION] = found[self._rules.next_of][1:]
        return found | ages

    def _read_rewards(self, line: Line, times: Array, segment: _Segment) -> Array:
        """Return the position of the first reward after each time.

        Rewards of step t are those in `(time t, time t + 1]`.
        """
        found: Array = np.clip(np.searchsorted(line.times, times, "right"), *line.between(segment.since, segment.until))
        return found

    def _read_of(self, opened: OpenLog, column: _Column, part: _Part, times: Array, segment: _Segment) -> _Read:
        line = opened.lines[part.topic]
        if column.timing == "result":
            bounds = self._read_rewards(line, times, segment)
            return _Read(part, line, np.arange(bounds[0], bounds[-1]), None, bounds)
        positions = self._positions(line, times if column.timing == "state" else times[:-1], segment)
        if self._rules.align != "linear" or not part.is_numbers:
            return _Read(part, line, positions, None, None)
        return _Read(part, line, positions, np.minimum(positions + 1, line.between(None, segment.until)[1] - 1), None)

    def _decoded(self, opened: OpenLog, reads: Sequence[_Read], wanted: Mapping[str, Array]) -> list[Array]:
        """Decode the wanted messages of each topic once; return the rows for each of the reads."""
        found = [
            np.empty((len(wanted[one.part.topic]), 2), np.int64) if one.part.is_kept
            else np.empty((len(wanted[one.part.topic]), *one.part.shape), one.part.dtype)
            for one in reads
        ]  # fmt: skip
        by_topic: dict[str, list[int]] = {}
        for at, one in enumerate(reads):
            numbers = wanted[one.part.topic]
            if one.part.codec is None:
                by_topic.setdefault(one.part.topic, []).append(at)
            elif one.part.is_kept:
                video = opened.kept[one.part.topic]
                found[at][:, 0], found[at][:, 1] = video.number, numbers - video.first
            else:
                decoder = opened.decoder(one.part)
                for row, number in enumerate(numbers.tolist()):
                    pixels = decoder.frame(number)
                    if pixels.shape != one.part.shape:
                        raise changed_size(decoder.packets.what, ImageForm("uint8", pixels.shape), one.part.form)
                    found[at][row] = pixels
        topics = list(by_topic)
        decoders = [
            opened.codecs[topic].chosen([path for at in by_topic[topic] for path in reads[at].part.paths])
            for topic in topics
        ]
        asked = [(opened.lines[topic].index, wanted[topic]) for topic in topics]
        for owner, row, _, data in opened.log.read(asked):
            topic = topics[owner]
            values, first = decoders[owner](data), 0
            for at in by_topic[topic]:
                part = reads[at].part
                count = len(part.paths)
                found[at][row] = part.row(values[first : first + count], opened.codecs[topic].what)
                first += count
        return found


@dataclass(frozen=True, slots=True)
class _Read:
    """The messages that a part of a column uses.

    Attributes:
        part: the part.
        line: the time line of its topic.
        positions: positions of the messages on the time line, one for each row, or all that are added up.
        after: with linear interpolation, the positions of the following messages.
        bounds: of rewards, the position at which the messages of each step begin.
    """

    part: _Part
    line: Line
    positions: Array
    after: Array | None
    bounds: Array | None

    @property
    def numbers(self) -> Array:
        """The numbers of all messages that have to be decoded."""
        found: Array = self.line.numbers[self.positions]
        return found if self.after is None else np.concatenate((found, self.line.numbers[self.after]))

    def aligned(self, decoded: Array, numbers: Array, times: Array) -> Array:
        """Return a row for each time, given the decoded rows of the messages `numbers`, which are ascending."""
        rows = np.searchsorted(numbers, self.line.numbers[self.positions])
        values: Array = decoded if np.array_equal(rows, np.arange(len(decoded))) else decoded[rows]
        if self.bounds is not None:
            sums = np.zeros(len(times))
            np.add.at(sums, np.repeat(np.arange(len(times)), np.diff(self.bounds)), values.reshape(-1))
            return sums
        if self.after is None:
            return values
        before, then = self.line.times[self.positions], self.line.times[self.after]
        share = np.clip((times - before) / np.maximum(then - before, 1), 0.0, 1.0)
        share = share.reshape(-1, *[1] * (values.ndim - 1))
        following = decoded[np.searchsorted(numbers, self.line.numbers[self.after])]
        between: Array = (values + (following - values) * share).astype(values.dtype)
        return between


def _piece(number: int, episode: _Episode, columns: Mapping[Key, Array], start: int, stop: int) -> Piece:
    flags = np.zeros((2, stop - start), bool)
    last = stop == episode.rows - 1
    if last:
        flags[0 if episode.terminated else 1, -1] = True
    return Piece(
        number, columns, flags[0], flags[1], first=start == 0, last=last, text={} if start else dict(episode.texts)
    )


def _videos(columns: Iterable[_Column]) -> list[_Part]:
    """Return the parts with video, one for each topic."""
    return list({part.topic: part for one in columns for part in one.parts if part.codec is not None}.values())


def _few(notes: Sequence[str]) -> Iterator[str]:
    """Yield distinct notes; of notes that differ only in numbers, only the first few and a count of the others."""
    kinds: Counter[str] = Counter()
    for note in dict.fromkeys(notes):
        kind = re.sub(r"[0-9]+", "", note.rpartition(": ")[2])
        kinds[kind] += 1
        if kinds[kind] <= _MOST_NOTED:
            yield note
    if more := sum(max(0, count - _MOST_NOTED) for count in kinds.values()):
        yield f"{counted(more, 'more note')} of these kinds"


def _source_text(part: _Part) -> str:
    take = () if part.take is None else (part.take,)
    text = path_text((*part.path, *take))
    return f"{part.topic}.{text}" if text else part.topic
