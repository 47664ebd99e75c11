"""Describes a robot log for `rbtool inspect`: topics, rates, gaps and clocks, and proposes a map."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import RbtoolError
from ...core.format.contracts import Array
from ...core.format.locate import ColumnView, Overview
from ..table.mapping import quoted_name
from .containers import MARKER, Index, Log, Topic, has_recordings, require_recordings, schema_names
from .messages import Codec, numbers_of, parse_path, picture_kind, stamp_paths

if TYPE_CHECKING:
    from ...core.verbs.inspect import TopicView

_NS = 10**9
_SAMPLES = 16
_MOST_FIELDS = 64
_COMMANDS = re.compile(r"command|cmd|action|goal|target|desired|leader|control|setpoint|commande", re.IGNORECASE)
_COMMAND_TYPES = re.compile(r"Twist|JointTrajectory$|AckermannDrive")
_STATES = re.compile(r"joint_?state|state|observation|pose|odom|proprio", re.IGNORECASE)
_REWARD = re.compile(r"reward", re.IGNORECASE)
_CAMERA_NOISE = frozenset({"image", "raw", "compressed", "color", "rgb", "rect", "compresseddepth", "video", "h264"})


@dataclass(frozen=True, slots=True)
class LogOverview(Overview):
    """The overview of a log, with its topics."""

    topics: tuple[TopicView, ...] = ()


def overview(path: Path, files: str | None = None) -> LogOverview | None:
    """Return the topics of a robot log with a proposal for a map; None if there is no log at `path`.

    Of several recordings, only the first is described.
    """
    if files is not None or not has_recordings(path):
        return None
    found = require_recordings(path)
    with found[0].open() as log:
        seen = _Seen(log)
        notes = list(log.notes)
        if len(found) > 1:
            notes.insert(0, f"{len(found):,} recordings; this is the first, {found[0].name}")
        proposal = _Proposal(seen)
        size = sum(one.stat().st_size for recording in found for one in recording.files)
        return LogOverview(
            log.kind, "logs", tuple(seen.columns(proposal.keys)), proposal.options,
            (*notes, *seen.doubts, *proposal.doubts), size, tuple(seen.views()),
        )  # fmt: skip


class _Seen:
    """The topics of a log with their indexes, the first message of each, and its fields.

    `why` holds the errors of topics that cannot be read.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.indexes = log.index(list(log.topics))
        self.codecs: dict[str, Codec] = {}
        self.samples: dict[str, bytes] = {}
        self.fields: dict[str, dict[str, str]] = {}
        self.why: dict[str, str] = {}
        self.doubts: list[str] = []
        self.kinds = schema_names(log.topics.values())
        for topic in log.topics.values():
            try:
                self._look(topic, self.indexes[topic.name])
            except RbtoolError as error:
                self.why[topic.name] = str(error)
                self.doubts.append(str(error))
        if clocks := [name for name, kind in self.kinds.items() if kind.endswith("/Clock")]:
            self.doubts.append(f"{clocks[0]} was recorded: nodes may have used simulated time, which stamps then count")

    def _look(self, topic: Topic, index: Index) -> None:
        codec = topic.codec(self.log.name)
        if len(index):
            self.samples[topic.name] = bytes(self.log.message(index.places[0].tolist())[1])
            codec.require_whole(self.samples[topic.name])
            self.fields[topic.name] = codec.fields(self.samples[topic.name])
        self.codecs[topic.name] = codec

    def delays(self, name: str) -> Array | None:
        """Return the delay from stamp to log time of some messages, in nanoseconds; None if they have no stamps."""
        paths = stamp_paths(self.fields.get(name, {}))
        if paths is None:
            return None
        decode, index = self.codecs[name].chosen(list(paths)), self.indexes[name]
        numbers = np.unique(np.linspace(0, len(index) - 1, _SAMPLES).astype(np.int64))
        stamps = [decode(self.log.message(index.places[at].tolist())[1]) for at in numbers.tolist()]
        return np.array(
            [int(log) - int(s) * _NS - int(n) for log, (s, n) in zip(index.log[numbers], stamps, strict=True)]
        )

    def rate(self, name: str) -> float:
        """Return the rate of a topic, by the median time between messages, in Hz; 0 for fewer than two messages."""
        log = self.indexes[name].log
        period = float(np.median(np.diff(log))) if len(log) > 1 else 0.0
        return _NS / period if period else 0.0

    def views(self) -> Iterator[TopicView]:
        """Yield the row of each topic in the output of `inspect`."""
        from ...core.verbs.inspect import TopicView

        begins = [int(index.log[0]) for index in self.indexes.values() if len(index)]
        begin = min(begins, default=0)
        for name, topic in self.log.topics.items():
            log = self.indexes[name].log
            delays = self.delays(name) if len(log) else None
            yield TopicView(
                name=name,
                type=self.kinds[name],
                encoding=topic.schemas[0].message,
                messages=len(log),
                rate=self.rate(name),
                gap=int(np.diff(log).max()) / _NS if len(log) > 1 else 0.0,
                begin=(int(log[0]) - begin) / _NS if len(log) else 0.0,
                end=(int(log[-1]) - begin) / _NS if len(log) else 0.0,
                delay=None if delays is None else int(delays.min()) / _NS,
                jitter=None if delays is None else int(delays.max() - delays.min()) / _NS,
            )

    def value(self, name: str, field: str) -> Array | None:
        """Return the numbers in a field of the first message; None for text and lists of structs."""
        path = parse_path(field)
        try:
            return numbers_of(self.codecs[name].chosen([path])(self.samples[name])[0], field)
        except RbtoolError:
            return None

    def picture(self, name: str) -> bool:
        """Return whether the messages of a topic are pictures."""
        return picture_kind(self.fields.get(name, {}), ()) is not None

    def columns(self, keys: Mapping[str, str]) -> Iterator[ColumnView]:
        """Yield the fields of all topics."""
        for name in self.log.topics:
            rows = len(self.indexes[name])
            if name in self.why or name not in self.fields:
                why = self.why.get(name, "no message")
                yield ColumnView(name=name, dtype="", shape=(), rows=rows, key="", why=why)
                continue
            if self.picture(name):
                yield ColumnView(name=name, dtype="image", shape=(), rows=rows, key=keys.get(name, ""), why="")
                continue
            own = {
                field: kind for field, kind in self.fields[name].items() if not field.startswith(("header.", "layout."))
            }
            for field, kind in list(own.items())[:_MOST_FIELDS]:
                value = None if kind.startswith("string") else self.value(name, field)
                full = f"{name}.{field}"
                why = "text" if kind.startswith("string") else "empty" if value is not None and not value.size else ""
                yield ColumnView(
                    name=full, dtype=kind.removesuffix("[]") if value is None else value.dtype.name,
                    shape=() if value is None else value.shape, rows=rows, key=keys.get(full, ""), why=why,
                )  # fmt: skip


class _Proposal:
    """A guess of what the topics of a log are: `keys` by field, `options` of the reader, and `doubts` as notes."""

    def __init__(self, seen: _Seen) -> None:
        self._seen = seen
        self.keys: dict[str, str] = {}
        self.doubts: list[str] = []
        self.options: dict[str, Any] = {}
        topics = [name for name in seen.log.topics if name in seen.fields]
        reward = next((one for one in topics if _REWARD.search(one) and self._vector(one)), None)
        markers = [one for one in topics if MARKER.search(one) and self._is_marker(one)]
        vectors = [one for one in topics if one != reward and one not in markers and self._vector(one) is not None]
        actions = [one for one in vectors if _COMMANDS.search(one) or _COMMAND_TYPES.search(seen.kinds[one])]
        rest = [one for one in vectors if one not in actions]
        state = next((one for one in rest if _STATES.search(one)), next(iter(rest), None))
        pictures = self._pictures(topics)
        if state is None and not pictures:
            self.doubts.append("no topic looks like an observation: name one")
        self._take("observation.state", state)
        for name, topic in pictures.items():
            self.keys[topic] = f"observation.image{name}"
        self._take("action", actions[0] if actions else None)
        self._take("reward", reward)
        if not actions:
            self.doubts.append(
                "no topic looks like commands: map one as action, or add --action next:observation.state"
            )
        elif len(actions) > 1:
            self.doubts.append(f"{' and '.join(actions[:4])} look like commands: the first one is proposed")
        self.options["map"] = [f"{key}={quoted_name(topic)}" for topic, key in self.keys.items()]
        used = [topic for topic in (*pictures.values(), *([state] if state else [])) if seen.rate(topic)]
        if used:
            self.options["fps"] = _round(min(seen.rate(topic) for topic in used))
        if markers:
            self.options["episodes_by"] = f"topic:{markers[0]}"
            self.doubts.append(f"{markers[0]} is taken for the topic that marks episodes")

    def _take(self, key: str, topic: str | None) -> None:
        if topic is not None:
            self.keys[f"{topic}.{self._vector(topic)}"] = key

    def _is_marker(self, topic: str) -> bool:
        values = [kind for name, kind in self._seen.fields[topic].items() if not name.startswith("header.")]
        return len(values) == 1 and values[0] in {"string", "bool", "int32", "int64", "uint32", "int8", "uint8"}

    def _vector(self, topic: str) -> str | None:
        """Return the field of a topic that is most likely its value; None for topics of text and pictures."""
        fields = self._seen.fields[topic]
        if self._seen.picture(topic):
            return None
        plain = [one for one in fields if not one.startswith(("header.", "layout.", "stamp", "timestamp"))]
        lists = [
            one for one in plain if fields[one].endswith("]") and not fields[one].startswith(("string", "uint8[]"))
        ]
        for one in lists:
            value = self._seen.value(topic, one)
            if value is not None and value.size:
                return one
        numbers = [one for one in plain if fields[one] not in {"string", "any"} and not fields[one].endswith("]")]
        if not numbers:
            return None
        tops = list(dict.fromkeys(one.partition(".")[0] for one in numbers))
        return numbers[0] if "." not in numbers[0] or len(tops) > 1 else tops[0]

    def _pictures(self, topics: Sequence[str]) -> dict[str, str]:
        """Name the topics of pictures: `.front` for `/cam/front/image_raw/compressed`, "" for a single nameless one."""
        found = [one for one in topics if self._seen.picture(one)]
        found = [one for one in found if not any(other.startswith(f"{one}/") for other in found)]
        named: dict[str, str] = {}
        for topic in found:
            words = [word for word in re.split(r"[/_]", topic) if word and word.lower() not in _CAMERA_NOISE]
            name = f".{'_'.join(words)}" if words and re.fullmatch(r"[A-Za-z0-9_]+", "_".join(words)) else ""
            while name in named or (not name and len(found) > 1):
                name = f"{name or '.camera'}_{len(named)}"
            named[name] = topic
        return named


def _round(rate: float) -> float:
    """Round a measured rate to a whole number if that is near, else to three digits."""
    whole = round(rate)
    if whole and abs(rate - whole) < 0.03 * rate:
        return float(whole)
    digits = 2 - math.floor(math.log10(rate))
    return round(rate, digits)
