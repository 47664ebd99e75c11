"""`LogReader`: the contract of readers, and every row of every kind of log against a plain reading with other code."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import yaml
import zstandard
from cases import each
from conversions import WrittenReaderTests, refused, written
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from mcap.reader import make_reader
from mcap.writer import CompressionType, Writer
from mcap_protobuf.decoder import DecoderFactory as ProtobufDecoders
from mcap_ros2.decoder import DecoderFactory as RosDecoders
from PIL import Image
from rosbags.highlevel import AnyReader
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

import rbtool
from rbtool.converters.logs.reader import LogReader
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.testing.datasets import ODD_LEAVES, WALK_FIELDS, DatasetPlan, walk_pieces, write_pieces, write_plan
from rbtool.core.testing.readers import joined

LOGS = Path(__file__).parents[1] / "data" / "logs"
NS = 10**9
BEGIN = 1_700_000_000 * NS
MARKED: dict[str, Any] = {
    "map": [
        "observation.state=/joint_states.position", "action=/leader/command.data", "reward=/task/reward.data",
        "observation.image.front=/camera/color/image_raw/compressed",
    ],
    "fps": 50.0, "episodes_by": "topic:/episode/marker",
}  # fmt: skip
SQLITE: dict[str, Any] = {
    "map": "observation.state=/joint_states.position action=/arm/goal.position observation.image=/camera/image_raw",
    "fps": 30.0,
}
BAGS: dict[str, Any] = {"map": "observation.state=/joint_states.position action=/arm/goal.position", "fps": 30.0}
BAG: dict[str, Any] = {
    "map": "observation.state=/joint_states.position action=/cmd_vel.twist observation.image=/camera/image_raw",
    "fps": 30.0,
}
JSON: dict[str, Any] = {
    "map": 'observation.state="/机械臂/状态.q" action="/commande/été.u" info.grip="/commande/été.grip"', "fps": 30.0
}  # fmt: skip
PROTOBUF: dict[str, Any] = {"map": "observation.state=state.q action=command.u", "fps": 10.0}
SAMPLES: dict[str, dict[str, Any]] = {
    "ros2_markers.mcap": MARKED, "json_unicode.mcap": JSON, "proto_unchunked.mcap": PROTOBUF, "rosbag2_sqlite": SQLITE,
    "rosbag2_mcap_episodes": BAGS, "ros1_sim_clock.bag": BAG,
}  # fmt: skip
MARKERS = LOGS / "ros2_markers.mcap"


def mapped(pairs: str, fps: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"map": pairs, "fps": fps, **more}


class TestReader(WrittenReaderTests):
    """Three episodes by markers, with pictures and rewards."""

    kind, options, piece_bytes = LogReader, MARKED, 20_000
    made = written({"markers": lambda _: MARKERS})

    def test_a_cut_file_raises_an_error(self, tmp_path: Path) -> None:
        """A log whose recorder was killed is read as far as it is whole, and a note says what is missing."""
        data = self.source().read_bytes()
        for part in (len(data) // 2, len(data) - 1, len(data) - 100):
            cut = tmp_path / f"{part}.mcap"
            cut.write_bytes(data[:part])
            with self.reader()(cut) as reader:
                facts = reader.facts()
                assert any("has no end" in note and "are not" in note for note in facts.notes)
                assert facts.steps <= 91


Plain = dict[str, list[tuple[int, Any]]]
"""The decoded messages of each topic in order of log time, with that time."""


def plain_mcap(path: Path) -> Plain:
    found: Plain = {}
    factories = (RosDecoders(), ProtobufDecoders())
    with path.open("rb") as file:
        for schema, channel, message in make_reader(file).iter_messages():
            if channel.message_encoding == "json":
                value = json.loads(message.data)
            else:
                decoders = (one.decoder_for(channel.message_encoding, schema) for one in factories)
                value = next(one for one in decoders if one is not None)(message.data)
            found.setdefault(channel.topic, []).append((message.log_time, value))
    return found


def plain_bag(path: Path) -> Plain:
    found: Plain = {}
    with AnyReader([path]) as reader:
        for connection, time, data in reader.messages():
            found.setdefault(connection.topic, []).append((time, reader.deserialize(data, connection.msgtype)))
    return {topic: sorted(messages, key=lambda one: one[0]) for topic, messages in found.items()}


def held(messages: Sequence[tuple[int, Any]], time: int) -> tuple[int, Any]:
    """The newest message at or before a time; the first one where there is none."""
    return next((one for one in reversed(messages) if one[0] <= time), messages[0])


def grid(begin: int, rate: float, lead: Sequence[tuple[int, Any]], stop: int | None) -> list[int]:
    """The times of the steps of an episode, and one more."""
    times = []
    while True:
        time = begin + math.floor(len(times) * 10**9 / rate)
        times.append(time)
        if time >= stop if stop is not None else time > lead[-1][0]:
            return times


def by_name(message: Any, order: Sequence[str]) -> list[float]:
    return [message.position[list(message.name).index(name)] for name in order]


def pixels(message: Any) -> np.ndarray[Any, Any]:
    if hasattr(message, "format"):
        return np.array(Image.open(io.BytesIO(bytes(message.data))))
    return np.frombuffer(bytes(message.data), np.uint8).reshape(message.height, message.width, 3)


def markers(messages: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, int | None]]:
    start = None
    for time, message in messages:
        if json.loads(message.data)["event"] == "start":
            start = time
        else:
            assert start is not None
            yield start, time
            start = None
    if start is not None:
        yield start, None


Take = Callable[[Any], Any]


def expected(name: str) -> Iterator[dict[str, list[Any]]]:
    """The rows of the episodes of a sample, as a reading without any code of rbtool has them."""
    path = LOGS / name
    if name == "rosbag2_mcap_episodes":
        for bag in ("episode_0", "episode_1"):
            yield from _of(plain_bag(path / bag), name)
    else:
        yield from _of(plain_mcap(path) if name.endswith(".mcap") else plain_bag(path), name)


def _of(plain: Plain, name: str) -> Iterator[dict[str, list[Any]]]:
    takes: dict[str, tuple[str, Take]]
    rate = SAMPLES[name]["fps"]
    ends: list[tuple[int | None, int | None]] = [(None, None)]
    if name == "ros2_markers.mcap":
        order = plain["/joint_states"][0][1].name
        takes = {
            "observation.state": ("/joint_states", lambda one: by_name(one, order)),
            "action": ("/leader/command", lambda one: one.data),
            "observation.image.front": ("/camera/color/image_raw/compressed", pixels),
        }
        ends = list(markers(plain["/episode/marker"]))
    elif name == "json_unicode.mcap":
        takes = {
            "observation.state": ("/机械臂/状态", lambda one: one["q"]),
            "action": ("/commande/été", lambda one: one["u"]),
            "info.grip": ("/commande/été", lambda one: one["grip"]),
        }
    elif name == "proto_unchunked.mcap":
        takes = {"observation.state": ("state", lambda one: one.q), "action": ("command", lambda one: one.u)}
    elif name == "ros1_sim_clock.bag":
        order = plain["/joint_states"][0][1].name
        takes = {
            "observation.state": ("/joint_states", lambda one: by_name(one, order)),
            "action": ("/cmd_vel", lambda one: [getattr(getattr(one.twist, part), axis)
                                                for part in ("linear", "angular") for axis in "xyz"]),
            "observation.image": ("/camera/image_raw", pixels),
        }  # fmt: skip
    else:
        order = plain["/joint_states"][0][1].name
        takes = {
            "observation.state": ("/joint_states", lambda one: by_name(one, order)),
            "action": ("/arm/goal", lambda one: by_name(one, order)),
        }
        if name == "rosbag2_sqlite":
            takes["observation.image"] = ("/camera/image_raw", pixels)
    lead = plain[takes["observation.state"][0]]
    for start, stop in ends:
        first = max(lead[0][0], plain[takes["action"][0]][0][0]) if start is None else start
        times = grid(first, rate, lead, stop)
        rows: dict[str, list[Any]] = {}
        for key, (topic, take) in takes.items():
            used = times if key.startswith("observation") else times[:-1]
            newest = [held(plain[topic], time) for time in used]
            rows[key] = [np.asarray(take(value)) for _, value in newest]
            rows[f"time.{key}"] = [time for time, _ in newest]
            rows[f"age.{key}"] = [(at - time) / 10**9 for at, (time, _) in zip(used, newest, strict=True)]
        if name == "ros2_markers.mcap":
            rows["reward"] = [
                sum(one.data for time, one in plain["/task/reward"] if low < time <= high)
                for low, high in pairwise(times)
            ]
        yield rows


def rows_of(path: Path, options: dict[str, Any]) -> tuple[list[dict[str, np.ndarray[Any, Any]]], Any]:
    with LogReader(path, options=options) as reader:
        facts = reader.facts()
        found = joined(reader.pieces(), facts)
    return [{".".join(key): rows for key, rows in columns.items()} for columns in found.values()], facts


def assert_same_rows(found: Sequence[dict[str, Any]], expected: Iterator[dict[str, list[Any]]]) -> None:
    for rows, right in zip(found, expected, strict=True):
        assert rows.keys() - {"terminations", "truncations"} == right.keys()
        for key, values in right.items():
            assert rows[key].tolist() == np.asarray(values).tolist(), key


@each("name", SAMPLES)
def test_every_row_equals_a_plain_reading(name: str) -> None:
    assert_same_rows(rows_of(LOGS / name, SAMPLES[name])[0], expected(name))


@each(
    ("name", "lengths", "terminated", "tasks"),
    [
        ("ros2_markers.mcap", [50, 1, 40], [True, False, False], ["reach", "press", "öffnen"]),
        ("json_unicode.mcap", [40], [True], ["ramasser le dé"]),
        ("proto_unchunked.mcap", [25], [False], [None]),
        ("rosbag2_sqlite", [40], [False], [None]),
        ("rosbag2_mcap_episodes", [25, 8], [True, False], ["stack", "stack"]),
        ("ros1_sim_clock.bag", [20], [False], [None]),
    ],
)
def test_ends_and_texts_are_those_that_were_recorded(
    name: str, lengths: list[int], terminated: list[bool], tasks: list[str | None]
) -> None:
    with LogReader(LOGS / name, options=SAMPLES[name]) as reader:
        assert list(reader.facts().lengths or ()) == lengths
        pieces = list(reader.pieces())
    assert [bool(one.terminated[-1]) for one in pieces] == terminated
    assert [bool(one.truncated[-1]) for one in pieces] == [not one for one in terminated]
    assert [one.text.get("task") for one in pieces] == tasks


def test_it_converts_with_workers_from_the_command_that_inspect_proposes(tmp_path: Path) -> None:
    seen = rbtool.inspect(MARKERS)
    assert isinstance(seen, rbtool.core.verbs.inspect.ColumnsResult)
    assert {one.name: (one.messages, round(one.rate)) for one in seen.topics} == {
        "/joint_states": (141, 50), "/leader/command": (141, 50), "/camera/color/image_raw/compressed": (27, 10),
        "/episode/marker": (5, 2), "/task/reward": (2, 2),
    }  # fmt: skip
    camera = next(one for one in seen.topics if one.name.startswith("/camera"))
    assert camera.gap == pytest.approx(0.3)
    assert camera.delay == pytest.approx(0.0622)
    assert (seen.format, seen.options["fps"], seen.options["episodes_by"]) == ("logs", 10.0, "topic:/episode/marker")
    (tmp_path / "map.toml").write_text(seen.map_document)
    made = {**seen.options, "map": str(tmp_path / "map.toml")}
    one = rbtool.convert(MARKERS, tmp_path / "one", **made)
    two = rbtool.convert(MARKERS, tmp_path / "two", num_workers=2, **made)
    assert one.content_digest == two.content_digest
    assert one.episodes == 3


def times_of(plain: Plain, topic: str) -> np.ndarray[Any, Any]:
    return np.array([time for time, _ in plain[topic]])


def test_nearest_takes_the_message_that_is_nearest() -> None:
    plain = plain_mcap(MARKERS)
    found, _ = rows_of(MARKERS, {**MARKED, "align": "nearest"})
    for rows, right in zip(found, expected("ros2_markers.mcap"), strict=True):
        for key, topic in (("observation.state", "/joint_states"), ("action", "/leader/command")):
            steps = [
                time + round(age * NS) for time, age in zip(right[f"time.{key}"], right[f"age.{key}"], strict=True)
            ]
            times = times_of(plain, topic)
            nearest = [int(np.abs(times - step).argmin()) for step in steps]
            assert rows[f"time.{key}"].tolist() == times[nearest].tolist()
    assert any((rows["age.observation.state"] < 0).any() for rows in found)


def test_linear_takes_a_value_between_two_of_numbers_and_holds_pictures() -> None:
    plain = plain_mcap(MARKERS)
    found, _ = rows_of(MARKERS, {**MARKED, "align": "linear"})
    times = times_of(plain, "/joint_states").astype(np.float64) - BEGIN
    order = plain["/joint_states"][0][1].name
    values = np.array([by_name(one, order) for _, one in plain["/joint_states"]])
    for rows, right in zip(found, expected("ros2_markers.mcap"), strict=True):
        steps = np.array(right["time.observation.state"]) - BEGIN + np.array(right["age.observation.state"]) * NS
        for joint in range(6):
            wanted = np.interp(steps, times, values[:, joint])
            assert np.allclose(rows["observation.state"][:, joint], wanted, rtol=0, atol=1e-6)
        assert rows["observation.image.front"].tolist() == np.asarray(right["observation.image.front"]).tolist()


def test_each_message_of_a_reference_is_a_step() -> None:
    plain = plain_mcap(MARKERS)
    topic = "/camera/color/image_raw/compressed"
    options = {**MARKED, "align": f"reference:{topic}", "episodes_by": "file"}
    del options["fps"]
    (rows,), _ = rows_of(MARKERS, options)
    assert rows["time.observation.image.front"].tolist() == times_of(plain, topic).tolist()
    assert not rows["age.observation.image.front"].any()
    held_joints = [held(plain["/joint_states"], time)[0] for time in times_of(plain, topic).tolist()]
    assert rows["time.observation.state"].tolist() == held_joints


def test_header_stamps_are_a_clock_and_the_others_are_moved_to_it() -> None:
    plain = plain_mcap(MARKERS)

    def stamp(message: Any) -> int:
        return int(message.header.stamp.sec) * NS + int(message.header.stamp.nanosec)

    stamped = ("/joint_states", "/camera/color/image_raw/compressed")
    delay = min(time - stamp(one) for topic in stamped for time, one in plain[topic])
    moved = {
        topic: [(stamp(one) if topic in stamped else time - delay, one) for time, one in messages]
        for topic, messages in plain.items()
    }
    found, facts = rows_of(MARKERS, {**MARKED, "clock": "header"})
    assert_same_rows(found, _of(moved, "ros2_markers.mcap"))
    assert any(f"/leader/command has no stamps: its log times less {delay / NS:.6f} s" in one for one in facts.notes)


def test_times_of_publishing_are_a_clock() -> None:
    (rows,), _ = rows_of(LOGS / "json_unicode.mcap", {**JSON, "clock": "publish"})
    with (LOGS / "json_unicode.mcap").open("rb") as file:
        times = [one.publish_time for _, channel, one in make_reader(file).iter_messages() if channel.topic[1] == "机"]
    assert set(rows["time.observation.state"].tolist()) <= set(times)
    refused(LOGS / "rosbag2_sqlite", "does not store times of publishing", UsageError, **SQLITE, clock="publish")


def test_late_values_are_marked_and_left_out_on_request() -> None:
    plain = list(expected("ros2_markers.mcap"))
    marked, facts = rows_of(MARKERS, {**MARKED, "tolerance": "100ms"})
    for rows, right in zip(marked, plain, strict=True):
        late = [age > 0.1 for age in right["age.observation.image.front"]]
        assert rows["late.observation.image.front"].tolist() == late
    assert any("late by more than 100 ms" in note for note in facts.notes)
    dropped, _ = rows_of(MARKERS, {**MARKED, "tolerance": "100ms", "drop_late": True})
    wanted = []
    for rows, right in zip(marked, plain, strict=True):
        late = rows["late.observation.image.front"]
        sound = [step for step in range(len(late) - 1) if not (late[step] or late[step + 1])]
        runs = np.split(sound, np.flatnonzero(np.diff(sound) > 1) + 1)
        wanted += [np.asarray(right["action"])[run].tolist() for run in runs if len(run)]
    assert [rows["action"].tolist() for rows in dropped] == wanted
    assert len(dropped) > len(marked)
    assert not any(rows["late.observation.image.front"].any() for rows in dropped)
    assert all(rows["truncations"][-1] ^ rows["terminations"][-1] for rows in dropped)


def test_actions_may_be_the_next_observation() -> None:
    options = mapped("observation.state=/joint_states.position", 30.0, action="next:observation.state")
    (rows,), facts = rows_of(LOGS / "rosbag2_sqlite", options)
    assert rows["action"].tolist() == rows["observation.state"][1:].tolist()
    (rows,), facts = rows_of(LOGS / "rosbag2_sqlite", {**options, "action": None})
    assert "action" not in rows
    assert any("no action is mapped" in note for note in facts.notes)


WITH_SILENCE = [at * NS // 20 for at in (*range(10), *range(60, 75))]


def test_silence_cuts_episodes(tmp_path: Path) -> None:
    log = json_log(tmp_path / "gap.mcap", {"/q": [(BEGIN + time, {"q": [float(time)]}) for time in WITH_SILENCE]})
    found, _ = rows_of(log, mapped("observation=/q.q", 20.0, episodes_by="gap:2s"))
    assert [rows["observation"][0].tolist() for rows in found] == [[0.0], [3e9]]
    assert [len(rows["truncations"]) for rows in found] == [10, 15]
    assert all(rows["age.observation"].max() <= 0.05 for rows in found)


@each(
    ("values", "wanted"),
    [
        (["start", "stop", "start", "success"], [False, True]),
        ([True, False, True, False], [False, False]),
        ([0, 0, 1, -1], [False, False]),
        ([{"event": "start"}, {"event": "stop", "success": True}, {"event": "begin"}, {"event": "end"}], [True, False]),
        (["stop", "start", "start", "stop"], [False, False]),
        ([True, True, False, True], [False, False]),
        (["recording", "recording", "success", "recording"], [True, False]),
        ([{"state": True}, {"state": True}, {"state": False}, {"state": False}], [False]),
    ],
)
def test_markers_are_words_flags_numbers_and_documents(values: list[Any], wanted: list[bool], tmp_path: Path) -> None:
    marks = timed(({"data": value} for value in values), NS // 2, 10_000_000)
    log = json_log(tmp_path / "marks.mcap", {"/q": counted(45, NS // 20), "/m": marks})
    found, _ = rows_of(log, mapped("observation=/q.x", 20.0, episodes_by="topic:/m"))
    assert [bool(rows["terminations"][-1]) for rows in found] == wanted


@each(
    ("stated", "ends", "text"),
    [
        (True, True, "true"), (1.0, True, "true"), ("yes", True, "true"), (0, False, "false"), (None, False, None),
        ("unknown", False, "unknown"), (0.7, False, "0.7"),
    ],
)  # fmt: skip
def test_success_is_what_a_stop_states(stated: Any, ends: bool, text: str | None, tmp_path: Path) -> None:
    """The first marker has fewer keys than the one that states success."""
    marks = timed([{"event": "start"}, {"event": "stop", "success": stated}])
    log = json_log(tmp_path / "s.mcap", {"/q": counted(45, NS // 20), "/m": marks})
    with LogReader(log, options=mapped("observation=/q.x", 20.0, episodes_by="topic:/m")) as reader:
        reader.facts()
        (piece,) = reader.pieces()
    assert (bool(piece.terminated[-1]), piece.text.get("success")) == (ends, text)


def test_the_order_of_keys_says_which_topic_leads(tmp_path: Path) -> None:
    topics = {"/slow": counted(5, NS // 10), "/fast": counted(100, NS // 100, 30_000_000)}
    log = json_log(tmp_path / "two.mcap", topics)
    lengths = []
    for pairs in (
        ["observation.z=/slow.x", "observation.a=/fast.x"], ["observation.a=/fast.x", "observation.z=/slow.x"],
    ):  # fmt: skip
        made = rbtool.convert(log, tmp_path / str(len(lengths)), map=pairs, fps=10.0)
        lengths.append(made.steps)
    assert lengths == [5, 10]


def test_steps_of_a_reference_do_not_go_beyond_a_silence(tmp_path: Path) -> None:
    topics = {name: [(BEGIN + time, {"x": float(time)}) for time in WITH_SILENCE] for name in ("/q", "/r")}
    log = json_log(tmp_path / "gap.mcap", topics)
    found, _ = rows_of(log, {"map": "observation=/q.x", "align": "reference:/r", "episodes_by": "gap:2s"})
    assert [rows["observation"].tolist() for rows in found] == [WITH_SILENCE[:10], WITH_SILENCE[10:]]
    assert not any(rows["age.observation"].any() for rows in found)


def test_an_episode_of_one_step_may_begin_with_the_value_that_comes_next(tmp_path: Path) -> None:
    topics = {"/q": [(BEGIN, {"x": 1.0}), (BEGIN + 50_000_000, {"x": 2.0})], "/c": [(BEGIN + 30_000_000, {"x": 3.0})]}
    (rows,), _ = rows_of(json_log(tmp_path / "o.mcap", topics), mapped("observation.q=/q.x info.c=/c.x", 10.0))
    assert (rows["observation.q"].tolist(), rows["info.c"].tolist()) == ([1.0, 2.0], [3.0])
    assert rows["age.info.c"].tolist() == [-0.03]


def test_messages_in_no_step_are_counted(tmp_path: Path) -> None:
    """Of 40 states five are before the first action; of four rewards one is then, and one after the last state."""
    rewards = [(BEGIN + at * NS // 10, {"x": 1.0}) for at in (5, 10, 20, 60)]
    topics = {"/q": counted(40, NS // 10), "/a": counted(50, NS // 10, NS // 2), "/r": rewards}
    pairs = "observation=/q.x action=/a.x reward=/r.x"
    (rows,), facts = rows_of(json_log(tmp_path / "r.mcap", topics), mapped(pairs, 10.0))
    assert rows["reward"].sum() == 2.0
    assert "/r: 2 messages are outside all steps, and not added up" in facts.notes
    assert any(note.startswith("/q: of 36 rows") and "and 5 outside episodes" in note for note in facts.notes)
    assert any(note.startswith("/a: of 35 rows") and "and 15 outside episodes" in note for note in facts.notes)


def stamped(*stamps: int, delay: int = 0) -> list[tuple[int, Any]]:
    """Messages ten a second, with these stamps in nanoseconds."""
    headers = [{"stamp": {"sec": one // NS, "nanosec": one % NS}} for one in stamps]
    return timed(({"header": one, "x": float(at)} for at, one in enumerate(headers)), NS // 10, delay)


STAMPS = [BEGIN + at * NS // 10 for at in range(6)]


def test_messages_without_a_stamp_are_left_out(tmp_path: Path) -> None:
    log = json_log(tmp_path / "z.mcap", {"/q": stamped(*STAMPS), "/s": stamped(STAMPS[0], 0, *STAMPS[2:])})
    (rows,), facts = rows_of(log, mapped("observation.a=/q.x observation.b=/s.x", 10.0, clock="header"))
    assert rows["observation.b"].tolist()[:6] == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
    assert "1 message of /s is left out: the stamp is 0" in facts.notes


def test_clocks_that_may_differ_are_noted(tmp_path: Path) -> None:
    other = [one - 600 * NS for one in STAMPS]
    log = json_log(tmp_path / "c.mcap", {"/q": stamped(*STAMPS, STAMPS[-1]), "/s": stamped(*other, *STAMPS[:2])})
    _, facts = rows_of(log, mapped("observation.a=/q.x", 10.0, clock="header"))
    assert not any("clock" in note for note in facts.notes)
    _, facts = rows_of(log, mapped("observation.b=/s.x", clock="header"))
    assert any("/s: the delay between stamp and log goes from 0.600 to 600.000 s" in note for note in facts.notes)
    log = json_log(tmp_path / "d.mcap", {"/q": stamped(*other), "/s": stamped(*other, delay=NS)})
    _, facts = rows_of(log, mapped("observation.a=/q.x observation.b=/s.x", clock="header"))
    assert any("is 600.000 s for /q, and 601.000 s for /s" in note for note in facts.notes)


def test_joints_have_one_order_on_all_topics(tmp_path: Path) -> None:
    """A gripper is named first: the arm and its commands, which name the joints in reverse, still have one order."""
    topics = {
        "/grip": [{"name": ["g"], "q": [9.0]}],
        "/arm": [{"name": ["a", "b"], "q": [1.0, 2.0]}, {"name": ["b", "a"], "q": [2.0, 1.0]}],
        "/goal": [{"name": ["b", "a"], "q": [2.0, 1.0]}, {"name": ["a", "b"], "q": [1.0, 2.0]}],
        "/objects": [{"arm": {"a": 1.0, "b": 2.0}}, {"arm": {"b": 2.0, "a": 1.0}}],
        "/plan": [
            {"joint_names": ["b", "a"], "points": [{"q": [2.0, 1.0]}]},
            {"joint_names": ["a", "b"], "points": [{"q": [1.0, 2.0]}]},
        ],
    }
    log = json_log(
        tmp_path / "j.mcap", {name: timed((3 * messages)[:6], NS // 10) for name, messages in topics.items()}
    )
    pairs = (
        "observation.grip=/grip.q observation.arm=/arm.q action.goal=/goal.q action.objects=/objects.arm "
        "action.plan=/plan.points[0].q action.last=/goal.q[1]"
    )
    (rows,), facts = rows_of(log, mapped(pairs, 10.0))
    for key in ("observation.arm", "action.goal", "action.objects", "action.plan"):
        assert np.unique(rows[key], axis=0).tolist() == [[1.0, 2.0]], key
    assert set(rows["action.last"].tolist()) == {2.0}
    assert any("/goal.q: its elements are stored in the order of other topics: a, b" in note for note in facts.notes)


@each(
    ("made", "field", "topics"),
    [
        (lambda folder: _published(folder), "x", ["/q@1", "/q@2"]),
        (lambda folder: _nodes(folder), "data", ["/q@/left", "/q@/right"]),
    ],
)
def test_publishers_that_send_at_once_are_topics_of_their_own(
    made: Callable[[Path], Path], field: str, topics: list[str], tmp_path: Path
) -> None:
    log = made(tmp_path)
    assert [one.name for one in rbtool.inspect(log).topics] == topics
    pairs = " ".join(f"observation.{name}={topic}.{field}" for name, topic in zip("ab", topics, strict=True))
    (rows,), _ = rows_of(log, mapped(pairs))
    assert rows["observation.a"].tolist()[:5] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rows["observation.b"].tolist()[:5] == [10.0, 11.0, 12.0, 13.0, 14.0]


PAIRS_OF_FILES = [("bag_0.mcap", "bag_1.mcap"), ("one.mcap", "two.mcap")]
"""Parts of a bag, and recordings of their own."""


@each("files", PAIRS_OF_FILES)
@each("senders", [("ab", "a"), ("a", "ba"), ("ba", "ab")])
def test_publishers_are_the_same_in_all_files(senders: tuple[str, str], files: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "bag"
    folder.mkdir()
    for number, (file, sent) in enumerate(zip(files, senders, strict=True)):
        _published(folder, senders=sent, file=file, begin=5 * number)
    episodes, facts = rows_of(folder, mapped("observation=/q@a.x"))
    assert len(episodes) == (1 if files[0] == "bag_0.mcap" else 2)
    found = [value for one in episodes for value in one["observation"].tolist()]
    assert [value for before, value in pairwise([None, *found]) if value != before] == [0.0, 1.0, 2.0, 3.0, 4.0] * 2
    assert not any("/q is" in note or "not mapped" in note for note in facts.notes)
    refused(folder, "2 publishers send on /q at the same time", UsageError, **mapped("observation=/q.x"))


@each("files", PAIRS_OF_FILES)
def test_the_number_of_a_publisher_holds_in_one_file(files: tuple[str, str], tmp_path: Path) -> None:
    """With the channels in another order, the second file went on with the other publisher."""
    folder = tmp_path / "bag"
    folder.mkdir()
    for number, file in enumerate(files):
        _published(folder, file=file, begin=5 * number)
    message = "its number, which may be another one in the next file"
    refused(folder, message, UsageError, **mapped("observation=/q@1.x"))


def test_a_publisher_that_takes_over_is_no_other(tmp_path: Path) -> None:
    """The topic, and the first publisher on it alone."""
    (rows,), _ = rows_of(_published(tmp_path, gap=5), mapped("observation.all=/q.x observation.one=/q@1.x"))
    assert rows["observation.all"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 11.0, 12.0, 13.0, 14.0, 14.0]
    assert rows["observation.one"].tolist()[:6] == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]


def test_names_in_an_array_are_names(tmp_path: Path) -> None:
    def message(*names: bytes) -> bytes:
        body = b"".join(struct.pack("<I2s2x", 2, name + b"\0") for name in names)
        return b"\0\1\0\0" + body + struct.pack("<2d", *(float(name[0]) for name in names))

    log = cdr_log(
        tmp_path / "n.mcap", "lab/msg/Arm", [message(b"a", b"b"), message(b"b", b"a"), message(b"a", b"b")],
        definition="string[2] name\nfloat64[2] position\n",
    )  # fmt: skip
    (rows,), _ = rows_of(log, mapped("observation=/t.position", 10.0))
    assert rows["observation"].tolist() == [[97.0, 98.0]] * 4


Messages = list[tuple[int, Any]]


def timed(values: Any, period: int = NS, begin: int = 0) -> Messages:
    """Messages with these values, one every `period` nanoseconds."""
    return [(BEGIN + begin + at * period, value) for at, value in enumerate(values)]


def counted(count: int, period: int = NS, begin: int = 0) -> Messages:
    return timed(({"x": float(at)} for at in range(count)), period, begin)


@contextmanager
def mcap(path: Path, profile: str = "", **how: Any) -> Iterator[Writer]:
    with path.open("wb") as file:
        writer = Writer(file, **how)
        writer.start(profile=profile, library="test")
        yield writer
        writer.finish()


def json_log(path: Path, topics: dict[str, Messages], published: int | None = None, **how: Any) -> Path:
    """Write messages of JSON in the order of topics, not of times."""
    with mcap(path, **how) as writer:
        for topic, messages in topics.items():
            channel = writer.register_channel(topic, "json", 0)
            for time, value in messages:
                writer.add_message(channel, time, json.dumps(value).encode(), time if published is None else published)
    return path


def cdr_log(path: Path, kind: str, messages: Sequence[Any], definition: str | None = None) -> Path:
    """Write messages of a type of ROS 2 on /t, ten a second."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    text = store.generate_msgdef(kind, ros_version=2)[0] if definition is None else definition
    with mcap(path, "ros2") as writer:
        schema = writer.register_schema(kind, "ros2msg", text.encode())
        channel = writer.register_channel("/t", "cdr", schema)
        for time, message in timed(messages, NS // 10):
            data = message if isinstance(message, bytes) else bytes(store.serialize_cdr(message, kind))
            writer.add_message(channel, time, data, time)
    return path


def again(source: Path, target: Path, **how: Any) -> Path:
    """Write the messages of an MCAP file again, with other chunks, compression and order."""
    with source.open("rb") as given, mcap(target, "ros2", **how) as writer:
        schemas: dict[int, int] = {}
        channels: dict[int, int] = {}
        for schema, channel, message in sorted(make_reader(given).iter_messages(), key=lambda one: one[1].topic):
            assert schema is not None
            if schema.id not in schemas:
                schemas[schema.id] = writer.register_schema(schema.name, schema.encoding, schema.data)
            if channel.id not in channels:
                place = schemas[schema.id]
                channels[channel.id] = writer.register_channel(channel.topic, channel.message_encoding, place)
            writer.add_message(channels[channel.id], message.log_time, message.data, message.publish_time)
    return target


@each(
    "how",
    [
        {"use_chunking": False},
        {"chunk_size": 1000},
        {"compression": CompressionType.NONE, "chunk_size": 3000},
        {"compression": CompressionType.LZ4, "use_summary_offsets": False},
        {"use_statistics": False},
        {"repeat_schemas": False, "repeat_channels": False},
        {"enable_crcs": False},
    ],
)
def test_how_a_file_is_laid_out_does_not_matter(how: dict[str, Any], tmp_path: Path) -> None:
    other = again(MARKERS, tmp_path / "ros2_markers.mcap", **how)
    assert_same_rows(rows_of(other, MARKED)[0], expected("ros2_markers.mcap"))


def _sqlite(folder: Path, change: Callable[[sqlite3.Connection], None]) -> Path:
    bag = folder / "bag"
    shutil.copytree(LOGS / "rosbag2_sqlite", bag)
    base = sqlite3.connect(bag / "rosbag2_sqlite.db3")
    change(base)
    base.commit()
    base.close()
    return bag


def _without_definitions(base: sqlite3.Connection) -> None:
    base.execute("DROP TABLE message_definitions")


def _compressed(base: sqlite3.Connection) -> None:
    for number, data in base.execute("SELECT id, data FROM messages").fetchall():
        base.execute("UPDATE messages SET data = ? WHERE id = ?", (zstandard.compress(data), number))


def _split(folder: Path) -> Path:
    """Move the second half of the messages to a file of their own."""
    bag = _sqlite(folder, lambda base: None)
    shutil.move(bag / "rosbag2_sqlite.db3", bag / "bag_0.db3")
    shutil.copy(bag / "bag_0.db3", bag / "bag_1.db3")
    for name, half in (("bag_0.db3", ">"), ("bag_1.db3", "<=")):
        base = sqlite3.connect(bag / name)
        base.execute(f"DELETE FROM messages WHERE timestamp {half} ?", (BEGIN + 600_000_000,))
        base.commit()
        base.close()
    (bag / "metadata.yaml").unlink()
    return bag


def _written_ahead(folder: Path) -> Path:
    """Leave the messages in the log of SQLite, as a recorder that is killed does."""
    bag = _sqlite(folder, lambda base: None)
    base = sqlite3.connect(bag / "rosbag2_sqlite.db3")
    base.execute("PRAGMA journal_mode = WAL")
    rows = base.execute("SELECT * FROM messages").fetchall()
    base.execute("DELETE FROM messages WHERE timestamp > ?", (BEGIN + 600_000_000,))
    base.commit()
    base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    base.executemany("INSERT OR IGNORE INTO messages VALUES (?, ?, ?, ?)", rows)
    base.commit()
    shutil.copytree(bag, folder / "killed")
    base.close()
    return folder / "killed"


def _packed(folder: Path, *, kept: bool = False) -> Path:
    """Compress the file, and leave it beside its copy or not."""
    bag = _sqlite(folder, lambda base: None)
    file = bag / "rosbag2_sqlite.db3"
    (bag / "rosbag2_sqlite.db3.zstd").write_bytes(zstandard.compress(file.read_bytes()))
    if not kept:
        file.unlink()
    return bag


@each(
    "made",
    [
        lambda folder: _sqlite(folder, _without_definitions), lambda folder: _sqlite(folder, _compressed),
        _split, _written_ahead, _packed, lambda folder: _packed(folder, kept=True),
    ],
)  # fmt: skip
def test_bags_of_all_kinds_have_the_same_rows(made: Callable[[Path], Path], tmp_path: Path) -> None:
    bag = made(tmp_path)
    before = {path: path.read_bytes() for path in bag.iterdir()}
    found, facts = rows_of(bag, SQLITE)
    assert_same_rows(found, expected("rosbag2_sqlite"))
    assert {path: path.read_bytes() for path in bag.iterdir()} == before
    assert any("and 0 outside" in note for note in facts.notes if note.startswith("/joint_states: of 41 rows"))
    assert any("are taken for parts of one recording" in note for note in facts.notes) == (made is _split)


def test_definitions_that_all_distributions_share_are_named(tmp_path: Path) -> None:
    _, facts = rows_of(_sqlite(tmp_path, _without_definitions), SQLITE)
    assert any("common to all distributions of ROS 2" in note for note in facts.notes)


def image(encoding: str, array: np.ndarray[Any, Any], padding: int = 0, *, big: bool = False) -> Any:
    store = get_typestore(Stores.ROS2_HUMBLE)
    kinds = store.types
    stamp = kinds["builtin_interfaces/msg/Time"](sec=1, nanosec=2)
    header = kinds["std_msgs/msg/Header"](stamp=stamp, frame_id="c")
    rows = array.astype(array.dtype.newbyteorder(">")) if big else array
    lines = [row.tobytes() + b"\xaa" * padding for row in rows]
    return kinds["sensor_msgs/msg/Image"](
        header=header, height=array.shape[0], width=array.shape[1], encoding=encoding, is_bigendian=int(big),
        step=len(lines[0]), data=np.frombuffer(b"".join(lines), np.uint8),
    )  # fmt: skip


PIXELS = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
DEPTH = (np.arange(20, dtype=np.uint16) * 3000).reshape(5, 4)


BOTH = np.concatenate([PIXELS, PIXELS[:, :, :1]], 2)


@each(
    ("message", "wanted"),
    [
        (image("rgb8", PIXELS), PIXELS),
        (image("rgb8", PIXELS, 7), PIXELS),
        (image("bgr8", PIXELS[:, :, ::-1], 3), PIXELS),
        (image("bgra8", BOTH), BOTH[:, :, [2, 1, 0, 3]]),
        (image("mono8", PIXELS[:, :, 0]), PIXELS[:, :, :1]),
        (image("16UC1", DEPTH, 2), DEPTH[:, :, None]),
        (image("mono16", DEPTH, big=True), DEPTH[:, :, None]),
        (image("32FC1", DEPTH.astype(np.float32) / 7), (DEPTH.astype(np.float32) / 7)[:, :, None]),
    ],
)
def test_pixels_are_those_of_the_message(message: Any, wanted: np.ndarray[Any, Any], tmp_path: Path) -> None:
    log = cdr_log(tmp_path / "i.mcap", "sensor_msgs/msg/Image", [message] * 3)
    (rows,), _ = rows_of(log, mapped("observation.image=/t", 10.0))
    assert rows["observation.image"].dtype == wanted.dtype
    assert all(np.array_equal(row, wanted) for row in rows["observation.image"])


def encoded(
    frames: int, gop: int = 5, codec: str = "h264", width: int = 64, b_frames: int = 0, plain: int = 0
) -> list[bytes]:
    """Frames with start codes, each a packet, as robots send them; frame k has the brightness 9 k.

    The first `plain` frames are no B-frames.
    """
    made, library = io.BytesIO(), {"h264": "libx264", "hevc": "libx265"}[codec]
    with av.open(made, "w", format=codec) as out:
        stream = out.add_stream(library, rate=10)
        stream.width, stream.height, stream.pix_fmt = width, 48, "yuv420p"
        stream.codec_context.max_b_frames = b_frames
        stream.options = {"g": str(gop), "crf": "1", "b-adapt": "0"} | ({} if b_frames else {"tune": "zerolatency"})
        if codec == "hevc":
            stream.options |= {"x265-params": f"keyint={gop}:scenecut=0:repeat-headers=1:log-level=none"}
        packets: list[bytes] = []
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, width, 3), 9 * number % 256, np.uint8), format="rgb24")
            if 0 < number < plain:
                frame.pict_type = av.video.frame.PictureType.P
            packets += [bytes(one) for one in stream.encode(frame)]
        packets += [bytes(one) for one in stream.encode(None)]
    return packets


def _as_protobuf(path: Path, packets: Sequence[bytes], stated: str) -> Path:
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="video.proto", package="foxglove", syntax="proto3")
    message = file.message_type.add(name="CompressedVideo")
    for name, number, kind in (("frame_id", 2, 9), ("data", 3, 12), ("format", 4, 9)):
        message.field.add(name=name, number=number, label=1, type=kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("foxglove.CompressedVideo"))
    with mcap(path) as writer:
        schema = writer.register_schema("foxglove.CompressedVideo", "protobuf", files.SerializeToString())
        channel = writer.register_channel("/t", "protobuf", schema)
        for time, one in timed(packets, NS // 10):
            writer.add_message(channel, time, made(frame_id="c", data=one, format=stated).SerializeToString(), 0)
    return path


def _as_json(path: Path, packets: Sequence[bytes], stated: str) -> Path:
    values = ({"data": base64.b64encode(one).decode(), "format": stated} for one in packets)
    return json_log(path, {"/t": timed(values, NS // 10)})


def _as_ros(path: Path, packets: Sequence[bytes], stated: str) -> Path:
    kind, store = "foxglove_msgs/msg/CompressedVideo", get_typestore(Stores.ROS2_HUMBLE)
    text = "builtin_interfaces/Time timestamp\nstring frame_id\nuint8[] data\nstring format\n"
    store.register(get_types_from_msg(text, kind))
    stamp = store.types["builtin_interfaces/msg/Time"](sec=1, nanosec=0)
    messages = [
        store.types[kind](timestamp=stamp, frame_id="c", data=np.frombuffer(one, np.uint8), format=stated)
        for one in packets
    ]
    return cdr_log(path, kind, [bytes(store.serialize_cdr(one, kind)) for one in messages], definition=text)


@pytest.mark.parametrize("images", ["keep", "decode"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    ("written", "stated", "codec"),
    [(_as_ros, "h264", "h264"), (_as_protobuf, "h265", "hevc"), (_as_json, "h264", "h264")],
    ids=["CDR", "Protobuf", "JSON"],
)
def test_frames_of_video_are_those_of_plain_decoding(
    written: Callable[..., Path], stated: str, codec: str, first: int, images: str, tmp_path: Path
) -> None:
    """Rows hold the newest frame, so that some have the same one; without a key frame there is no frame."""
    packets = encoded(26, codec=codec)
    log = written(tmp_path / "v.mcap", packets[first:], stated)
    with av.open(io.BytesIO(b"".join(packets)), format=codec) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][5 if first else 0 :]
    options = {"map": "observation.image=/t", "fps": 25.0, "images": images}
    made = rbtool.convert(log, tmp_path / "made", num_workers=2, **options)
    batch = rbtool.load_dataset(made.path, verify=True)[:]
    numbers = [min(row * 4 // 10, len(plain) - 1) for row in range(len(batch) + 1)]
    assert len(batch) == (len(plain) - 1) * 5 // 2 + 1
    for rows, wanted in ((batch, numbers[:-1]), (batch["next"], numbers[1:])):
        assert np.array_equal(rows["observation", "image"].numpy(), [plain[number] for number in wanted])
    notes = rbtool.inspect(made.path).notes
    assert any("2 packets" not in note and "before the first key frame" in note for note in notes) == bool(first)
    assert any("videos are kept" in note for note in notes) == (images == "keep")
    videos = list((made.path / ".rbtool/videos").glob("*.mp4"))
    assert len(videos) == (images == "keep")
    for video in videos:  # the bytes of all frames, not encoded again
        data = video.read_bytes()
        assert all(one[one.rindex(b"\0\0\1") + 3 :] in data for one in packets[5 if first else 0 :])
    if images == "keep":
        assert not rbtool.check(made.path, full=True).errors
        assert rbtool.convert(log, tmp_path / "again", **options).content_digest == made.content_digest


def test_a_video_of_every_recording_is_kept(tmp_path: Path) -> None:
    """Only the videos of the episodes chosen are there, and the last of them begins at its second key frame."""
    folder, packets = tmp_path / "runs", encoded(20)
    folder.mkdir()
    for at, first in enumerate((0, 5, 7)):
        _as_ros(folder / f"{at}.mcap", packets[first : 16 + at], "h264")
    options = {"map": "observation.image=/t", "fps": 10.0}
    made = rbtool.convert(folder, tmp_path / "made", episodes="1:3", **options)
    assert len(list((made.path / ".rbtool/videos").glob("*.mp4"))) == 2
    found = rbtool.load_dataset(made.path)[:]
    brightness = found["observation", "image"].float().mean((1, 2, 3))
    wanted = [9 * number for number in (*range(5, 17), *range(10, 18))]
    assert np.abs(brightness.numpy() - wanted).max() < 3


def _joints(names: Sequence[Sequence[str]], sizes: Sequence[int] | None = None) -> list[Any]:
    kinds = get_typestore(Stores.ROS2_HUMBLE).types
    header = kinds["std_msgs/msg/Header"](stamp=kinds["builtin_interfaces/msg/Time"](sec=0, nanosec=0), frame_id="")
    none = np.zeros(0)
    return [
        kinds["sensor_msgs/msg/JointState"](
            header=header, name=list(one), position=np.arange(len(one) if sizes is None else sizes[at], dtype=float),
            velocity=none, effort=none,
        )
        for at, one in enumerate(names)
    ]  # fmt: skip


def _far_clocks(folder: Path) -> Path:
    stamps = [{"header": {"stamp": {"sec": 1 + at, "nanosec": 0}}, "x": 1.0} for at in range(3)]
    return json_log(folder / "far.mcap", {"/a": timed(stamps), "/b": counted(3)})


def _two_devices(folder: Path) -> Path:
    def at(hour: int, second: int) -> dict[str, Any]:
        return {"header": {"stamp": {"sec": hour * 3600 + second, "nanosec": 0}}, "x": 1.0}

    topics = {f"/{name}": timed(at(hour, one) for one in range(3)) for name, hour in (("a", 1), ("b", 5))}
    return json_log(folder / "two.mcap", topics)


def _sizes(folder: Path) -> Path:
    images = [image("rgb8", PIXELS), image("rgb8", PIXELS[:4]), image("rgb8", PIXELS)]
    return cdr_log(folder / "s.mcap", "sensor_msgs/msg/Image", images)


def _published(folder: Path, gap: int = 0, senders: str = "--", file: str = "two.mcap", begin: int = 0) -> Path:
    """A topic with a channel for each sender, `-` has no name; the second one sends from `gap` seconds on."""
    with mcap(folder / file) as writer:
        for number, sender in enumerate(senders):
            channel = writer.register_channel("/q", "json", 0, {} if sender == "-" else {"callerid": sender})
            first = 10 * (number if sender == "-" else "ab".index(sender))
            for time, value in timed(range(first, first + 5), begin=(begin + number * gap) * NS):
                writer.add_message(channel, time, json.dumps({"x": float(value)}).encode(), 0)
    return folder / file


def _nodes(folder: Path) -> Path:
    store = get_typestore(Stores.ROS1_NOETIC)
    with Ros1Writer(folder / "two.bag") as bag:
        for number, node in enumerate(("/left", "/right")):
            connection = bag.add_connection("/q", "std_msgs/msg/Float64", typestore=store, callerid=node)
            for at in range(5):
                message = store.types["std_msgs/msg/Float64"](data=float(10 * number + at))
                bag.write(connection, BEGIN + at * NS, store.serialize_ros1(message, "std_msgs/msg/Float64"))
    return folder / "two.bag"


def _swapped(folder: Path) -> Path:
    bag = _nodes(folder)
    data, at = bytearray(bag.read_bytes()), 0
    for number in (1, 0):
        at = data.index(b"conn=", data.index(b"op=\x04", at)) + 5
        data[at] = number
    bag.write_bytes(data)
    return bag


def _changed_message(folder: Path) -> Path:
    topics = {"/a": timed([{"x": 1.5}] * 3)}
    log = json_log(folder / "c.mcap", topics, use_chunking=False, enable_data_crcs=True)
    assert len(rows_of(log, TOPIC)[0]) == 1
    log.write_bytes(log.read_bytes().replace(b"1.5", b"1.7", 1))
    return log


def _indexed(log: Path) -> list[tuple[int, int]]:
    """The first time in each chunk of a log with one topic, and where the entries of its index are."""
    with log.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    chunks = summary.chunk_indexes
    return [(one.message_start_time, next(iter(one.message_index_offsets.values())) + 9 + 6) for one in chunks]


def _late_in_index(folder: Path) -> Path:
    """Ten messages a second, three in a chunk: in the index the first one of a chunk, at a whole second, is late."""
    log = json_log(folder / "late.mcap", {"/a": counted(35, NS // 10)}, chunk_size=100)
    ((time, at),) = (one for one in _indexed(log)[1:] if one[0] % NS == 0)
    data = bytearray(log.read_bytes())
    struct.pack_into("<Q", data, at, time + NS // 20)
    log.write_bytes(data)
    return log


def _twice_in_index(folder: Path) -> Path:
    """Two messages at each time: the index has the first of them twice, and not the second."""
    log = json_log(folder / "twice.mcap", {"/a": [(BEGIN + at // 2 * NS, {"x": float(at)}) for at in range(6)]})
    ((_, at),) = _indexed(log)
    data = log.read_bytes()
    log.write_bytes(data[: at + 16] + data[at : at + 16] + data[at + 32 :])
    return log


def _other_index(at: int, byte: int) -> Callable[[Path], Path]:
    """Return what copies the sample of ROS 1 with another byte in the index, which has no checksum."""

    def made(folder: Path) -> Path:
        data = bytearray(BAG_BYTES)
        data[at] = byte
        (folder / "moved.bag").write_bytes(data)
        return folder / "moved.bag"

    return made


def _png(*parts: tuple[bytes, bytes]) -> str:
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


DEEP_PNG = _png(
    (b"IHDR", struct.pack(">2I5B", 1, 1, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes([0, 1, 2, 3, 4, 5, 6]))),
    (b"IEND", b""),
)  # fmt: skip
BAG_BYTES = (LOGS / "ros1_sim_clock.bag").read_bytes()
TOPIC, IMAGE, JOINTS = mapped("observation=/a.x"), "sensor_msgs/msg/Image", "sensor_msgs/msg/JointState"
FRAMES, POSITIONS = mapped("observation=/t", 10.0), mapped("observation=/t.position", 10.0)
REFUSED_CHOICES: list[tuple[str, dict[str, Any], type[RbtoolError], str]] = [
    ("", mapped("observation=/a.x"), UsageError, "has no topic '/a'"),
    ("ros2_markers.mcap", {}, FormatError, "does not state what its topics are"),
    ("ros2_markers.mcap", {"map": "observation=/joint_states.position"}, FormatError, "how many"),
    ("ros2_markers.mcap", mapped("observation=/joint_state.position"), UsageError,
     "has no topic '/joint_state'; did you mean '/joint_states'?"),
    ("ros2_markers.mcap", mapped("observation=/joint_states.positions"), UsageError,
     "has no field 'positions'; did you mean 'position'?"),
    ("ros2_markers.mcap", mapped("observation=/joint_states"), UsageError, "several fields"),
    ("ros2_markers.mcap", mapped("observation=/joint_states.effort"), FormatError, "is empty"),
    ("ros2_markers.mcap", mapped("observation=/episode/marker"), FormatError, "is text"),
    ("ros2_markers.mcap", mapped("action=/leader/command.data"), UsageError, "no observation"),
    ("ros2_markers.mcap", mapped("observation=/task/reward.data time.x=/leader/command.data"), UsageError,
     "which rbtool makes"),
    ("json_unicode.mcap", mapped("observation=/机械臂/状态.p"), UsageError, "has no field 'p'"),
    ("proto_unchunked.mcap", mapped("observation=state.qq"), UsageError, "has no field 'qq'"),
    ("ros2_markers.mcap", {**MARKED, "align": "reference:/joint_states"}, UsageError, "contradicts"),
    ("ros2_markers.mcap", {**MARKED, "align": "next"}, UsageError, "expected hold"),
    ("ros2_markers.mcap", {**MARKED, "clock": "wall"}, UsageError, "expected log"),
    ("ros2_markers.mcap", {**MARKED, "episodes_by": "topic"}, UsageError, "expected file"),
    ("ros2_markers.mcap", {**MARKED, "tolerance": "50"}, UsageError, "a time like 50ms"),
    ("ros2_markers.mcap", {**MARKED, "drop_late": True}, UsageError, "needs --tolerance"),
    ("ros2_markers.mcap", {**MARKED, "action": "next:observation.state"}, UsageError, "--map has some"),
    ("rosbag2_sqlite", mapped("observation.q=/joint_states.position", 9.0, action="next:observation.x"), UsageError,
     "which is not an observation in --map"),
    ("ros2_markers.mcap", {**MARKED, "episodes_by": "topic:/joint_states.header.frame_id"}, FormatError,
     "the marker 'base' does not mean"),
    ("json_unicode.mcap", {**JSON, "clock": "header"}, UsageError, "no mapped topic has times"),
]  # fmt: skip


@each(("name", "options", "kind", "words"), REFUSED_CHOICES)
def test_choices_that_do_not_fit_a_log_are_refused(
    name: str, options: dict[str, Any], kind: type[RbtoolError], words: str
) -> None:
    refused(LOGS / name, re.escape(words), kind, format="logs", **options)


def in_json(messages: Any, **how: Any) -> Callable[[Path], Path]:
    """A log of messages on /a, one a second, and of none on /b."""
    return lambda folder: json_log(folder / "a.mcap", {"/a": timed(messages), "/b": []}, **how)


def in_cdr(kind: str, messages: Sequence[Any], definition: str | None = None) -> Callable[[Path], Path]:
    return lambda folder: cdr_log(folder / "t.mcap", kind, messages, definition)


def in_video(*how: Any, stated: str = "h264", first: int = 0, **more: Any) -> Callable[[Path], Path]:
    return lambda folder: _as_json(folder / "v.mcap", encoded(*how, **more)[first:], stated)


def _in_pairs(folder: Path) -> Path:
    packets = encoded(12)
    pairs = zip(packets[::2], packets[1::2], strict=True)
    return _as_json(folder / "v.mcap", [one + other for one, other in pairs], "h264")


def _other_size(folder: Path) -> Path:
    return _as_ros(folder / "v.mcap", [*encoded(6), *encoded(6, width=80)], "h264")


def _two_formats(folder: Path) -> Path:
    pairs = zip(("h264", "h264", "jpeg"), encoded(3), strict=True)
    return in_json([{"format": stated, "data": base64.b64encode(one).decode()} for stated, one in pairs])(folder)


REFUSED_LOGS: list[tuple[Callable[[Path], Path], dict[str, Any], type[RbtoolError], str]] = [
    # clocks and times
    (_far_clocks, mapped("observation=/a.x action=/b.x", clock="header"), FormatError, "hours from"),
    (_two_devices, mapped("observation=/a.x action=/b.x", clock="header"), FormatError, "differ by 4.0 hours"),
    (in_cdr(JOINTS, _joints([["a"]] * 3)), {**POSITIONS, "clock": "header"}, FormatError, "are all 0"),
    (in_json([{"x": 1.0}] * 3, published=0), {**TOPIC, "clock": "publish"}, FormatError, "are all 0"),
    (
        lambda folder: json_log(folder / "d.mcap", {"/a": stamped(*[BEGIN + at * NS for at in (0, 1, 2, 3)] * 2)}),
        {**TOPIC, "clock": "header"}, FormatError, "step back by 3.000 s",
    ),
    (
        lambda folder: json_log(folder / "far.mcap", {"/a": [(1, {"x": 1.0}), (BEGIN, {"x": 1.0})]}),
        mapped("observation=/a.x", 50.0), FormatError, "far from the others",
    ),
    (in_json([{"x": 1.0}]), mapped("observation=/a.x action=/a.x", align="reference:/a"), UsageError, "contradicts"),
    (in_json([{"x": 1.0}]), {"map": "observation=/a.x", "align": "reference:/a"}, FormatError, "has no steps"),
    (in_json([{"x": 1.0}]), mapped("observation=/b.x"), FormatError, "has no message on /b"),
    # pictures and video
    (_sizes, FRAMES, FormatError, "change from uint8"),
    (_other_size, FRAMES, FormatError, "change from uint8 [48, 64, 3] to uint8 [48, 80, 3]"),
    (_other_size, {**FRAMES, "images": "decode"}, FormatError, "change from uint8 [48, 64, 3] to"),
    (in_video(20, 10, b_frames=2), {**FRAMES, "images": "decode"}, FormatError, "its video has B-frames"),
    (in_video(20, 10, "hevc", b_frames=2, stated="h265"), FRAMES, FormatError, "its video has B-frames"),
    (in_video(80, 100, b_frames=2, plain=70), FRAMES, FormatError, "its video has B-frames"),
    (
        in_video(80, 100, "hevc", b_frames=2, plain=70, stated="h265"), {**FRAMES, "images": "decode"}, FormatError,
        "its video has B-frames",
    ),
    (in_video(9, 20, first=1), FRAMES, FormatError, "no message has a key frame"),
    (_in_pairs, FRAMES, CorruptDataError, "is not a whole frame of h264"),
    (_two_formats, mapped("observation=/a"), FormatError, "message 2 is 'jpeg', and the first ones are h264"),
    (
        in_video(9), mapped("observation.image=/t", 10.0, action="next:observation.image"), UsageError,
        "which is not an observation",
    ),
    (
        in_cdr(IMAGE, [image("bayer_rggb8", PIXELS[:, :, 0])] * 2), FRAMES, FormatError,
        "the encoding 'bayer_rggb8' is a sensor's mosaic",
    ),
    (in_cdr(IMAGE, [image("yuv422", PIXELS)] * 2), FRAMES, FormatError, "the encoding 'yuv422' is not supported"),
    (
        in_json([{"format": "png", "data": DEEP_PNG}] * 2), mapped("observation=/a"), FormatError,
        "are PNG with 16 bits per colour",
    ),
    # names and values
    (in_json([{"x": [0, 0]}, {"x": [0, 0, 0]}]), TOPIC, FormatError, "changes its size"),
    (in_cdr(JOINTS, _joints([["a", "b"], ["c", "d"]])), POSITIONS, FormatError, "messages name different elements"),
    (in_cdr(JOINTS, _joints([["a", "a"]] * 2)), POSITIONS, FormatError, "names a twice"),
    (
        in_cdr(JOINTS, _joints([[], ["b", "a"], ["a", "b"]], [2, 2, 2])), POSITIONS, FormatError,
        "the first message does not name its elements",
    ),
    (
        in_json([{"q": {"a": 1, "b": 2}}, {"q": {"a": 1, "c": 2}}]), mapped("observation=/a.q"), FormatError,
        "messages name different elements, a, b and a, c",
    ),
    (
        in_json([{"pose": {"x": 1.0, "orientation": {"w": 1.0}}}] * 3), mapped("observation=/a.pose", align="linear"),
        UsageError, "pose.orientation.w is a rotation",
    ),
    (
        in_json([{"orientation": [0.0, 0.0, 0.0, 1.0]}] * 3), mapped("observation=/a.orientation", align="linear"),
        UsageError, "is a rotation",
    ),
    (_published, mapped("observation=/q.x"), UsageError,
     "2 publishers send on /q at the same time, whose messages would be mixed"),
    (_nodes, mapped("observation=/q.data"), UsageError, "2 publishers send on /q at the same time"),
    (
        in_cdr("lab_msgs/msg/Grip", [b"\0\1\0\0"], ""), mapped("observation=/t.x"), FormatError,
        "has no definition of the type lab_msgs/msg/Grip",
    ),
    (
        in_cdr(JOINTS, _joints([["a"]] * 2), "float64 x"), mapped("observation=/t.x"), CorruptDataError,
        "the definition is wrong",
    ),
    # damage
    (_changed_message, TOPIC, CorruptDataError, "checksum of its messages"),
    (_late_in_index, mapped("observation=/a.x", 10.0), CorruptDataError, "does not match its messages"),
    (_late_in_index, TOPIC, CorruptDataError, "does not match its messages"),  # the message is in no row
    (_twice_in_index, TOPIC, CorruptDataError, "names a message on /a twice"),
    (_other_index(8165, BAG_BYTES[8165] ^ 4), BAG, CorruptDataError, "which was logged at another time"),
    (_swapped, mapped("observation=/q@/left.data"), CorruptDataError, "on another topic than"),
    (_other_index(BAG_BYTES.index(b"conn=\0") + 5, 3), BAG, CorruptDataError, "not agree with the message counts"),
    (_other_index(BAG_BYTES.index(b"chunk_count=") + 12, 0), BAG, CorruptDataError, "more connections or chunks"),
]  # fmt: skip


@each(("made", "options", "kind", "words"), REFUSED_LOGS)
def test_logs_that_cannot_be_read_are_refused(
    made: Callable[[Path], Path], options: dict[str, Any], kind: type[RbtoolError], words: str, tmp_path: Path
) -> None:
    refused(made(tmp_path), re.escape(words), kind, format="logs", **options)


def test_damage_of_a_chunk_is_found(tmp_path: Path) -> None:
    data = bytearray(MARKERS.read_bytes())
    data[20_000] ^= 0xFF
    (tmp_path / "d.mcap").write_bytes(data)
    refused(tmp_path / "d.mcap", "checksum of the chunk|cannot be decompressed", CorruptDataError, **MARKED)


def test_an_encoding_that_is_not_read_is_named(tmp_path: Path) -> None:
    with mcap(tmp_path / "x.mcap") as writer:
        writer.add_message(writer.register_channel("/a", "cbor", 0), BEGIN, b"\xa0", BEGIN)
    refused(tmp_path / "x.mcap", "messages in the encoding cbor", **mapped("observation=/a.x"))


def test_a_file_beside_its_compressed_copy_is_read_once(tmp_path: Path) -> None:
    bag = _packed(tmp_path, kept=True)
    (rows,), _ = rows_of(bag, SQLITE)
    (right,) = expected("rosbag2_sqlite")
    assert rows["action"].tolist() == np.asarray(right["action"]).tolist()
    assert [one.messages for one in rbtool.inspect(bag).topics] == [20, 7, 41]  # type: ignore[union-attr]


def test_a_bag_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    bag = tmp_path / "bag"
    shutil.copytree(LOGS / "rosbag2_mcap_episodes" / "episode_0", bag)
    about = yaml.safe_load((bag / "metadata.yaml").read_text())
    about["rosbag2_bagfile_information"]["relative_file_paths"].append("episode_1.mcap")
    (bag / "metadata.yaml").write_text(yaml.safe_dump(about))
    refused(bag, "has no robot log episode_1", CorruptDataError, **BAGS)


def test_messages_of_mcap_may_be_compressed_one_by_one(tmp_path: Path) -> None:
    store, kind = get_typestore(Stores.ROS2_HUMBLE), "sensor_msgs/msg/JointState"
    packed = [zstandard.compress(bytes(store.serialize_cdr(one, kind))) for one in _joints([["a", "b"]] * 3)]
    (rows,), _ = rows_of(cdr_log(tmp_path / "p.mcap", kind, packed), POSITIONS)
    assert rows["observation"].tolist() == [[0.0, 1.0]] * 4


def test_files_and_topics_that_are_not_read_are_named(tmp_path: Path) -> None:
    bag = tmp_path / "runs" / "bag"
    shutil.copytree(LOGS / "rosbag2_mcap_episodes" / "episode_0", bag)
    shutil.copy(LOGS / "rosbag2_mcap_episodes" / "episode_1" / "episode_1.mcap", bag / "more.mcap")
    (tmp_path / "runs" / "killed.mcap").touch()
    _, facts = rows_of(tmp_path / "runs", mapped("observation=/joint_states.position", 30.0))
    notes = " ".join(facts.notes)
    assert "killed.mcap is left out: it has the name of a log, but is not one" in notes
    assert "more.mcap is taken for a part of the bag, although its metadata.yaml does not list it" in notes
    assert "metadata.yaml states" in notes


def test_topics_of_all_recordings_and_large_attachments_are_named(tmp_path: Path) -> None:
    json_log(tmp_path / "a.mcap", {"/q": counted(3, NS // 10)})
    json_log(tmp_path / "b.mcap", {"/q": counted(3, NS // 10), "/new": counted(3, NS // 10)})
    with mcap(tmp_path / "c.mcap") as writer:
        channel = writer.register_channel("/q", "json", 0)
        for time, value in counted(3, NS // 10):
            writer.add_message(channel, time, json.dumps(value).encode(), time)
        for data in (b"one", b"two", bytes(1 << 21)):
            writer.add_attachment(BEGIN, BEGIN, "calibration", "text/plain", data)
    _, facts = rows_of(tmp_path, mapped("observation=/q.x", 10.0))
    assert [one.key for one in facts.dropped_keys] == ["/new"]
    assert sorted(data for name, data in facts.documents.items() if "attachments" in name) == [b"one", b"two"]
    assert any("an attachment of 2,097,2" in note for note in facts.notes)


def test_all_recordings_of_a_large_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.converters.logs.containers._LOOKED_AT", 2)
    for at in range(4):
        json_log(tmp_path / f"{at}.mcap", {"/q": counted(3)})
    assert len(rows_of(tmp_path, mapped("observation=/q.x"))[0]) == 4


def test_a_chunk_is_only_read_for_its_topics(tmp_path: Path) -> None:
    """A topic is read without the others: damage in chunks that lack it is not seen."""
    topics = {"/q": counted(50, NS // 100), "/noise": timed([{"n": "x" * 500}] * 50, NS // 100)}
    log = json_log(tmp_path / "two.mcap", topics, chunk_size=4000)
    data = bytearray(log.read_bytes())
    with log.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    topics = {one.id: one.topic for one in summary.channels.values()}
    for chunk in summary.chunk_indexes:
        if {topics[one] for one in chunk.message_index_offsets} == {"/noise"}:
            begin = chunk.chunk_start_offset + 60
            data[begin : begin + 20] = bytes(20)
    log.write_bytes(data)
    (rows,), _ = rows_of(log, mapped("observation=/q.x", 100.0))
    assert rows["observation"][:50].tolist() == list(range(50))


def test_alignment_of_fields_is_that_of_cdr(tmp_path: Path) -> None:
    """Fields of all sizes after an empty list, in both byte orders."""
    definition = "uint8 a\nfloat64[] none\nuint16 b\nstring s\nint64 c\nbool[3] flags\nfloat32 d\n"
    for order, mark in (("<", 1), (">", 0)):
        body = struct.pack(f"{order}B3xI", 7, 0) + struct.pack(f"{order}H2xI", 513, 4) + b"abc\0"
        body += bytes(-len(body) % 8) + struct.pack(f"{order}q3?xf", -5, True, False, True, 1.5)
        message = bytes([0, mark, 0, 0]) + body
        log = cdr_log(tmp_path / f"{mark}.mcap", "lab/msg/Odd", [message] * 2, definition=definition)
        pairs = "observation.a=/t.a observation.b=/t.b observation.c=/t.c observation.f=/t.flags observation.d=/t.d"
        (rows,), _ = rows_of(log, mapped(pairs, 10.0))
        assert {key[12:]: rows[key][0].tolist() for key in rows if key.startswith("observation.")} == {
            "a": 7, "b": 513, "c": -5, "f": [True, False, True], "d": 1.5
        }  # fmt: skip


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_an_export_opens_and_reads_back_as_the_same_steps(layout: str, tmp_path: Path) -> None:
    made = rbtool.convert(MARKERS, tmp_path / "made", layout=layout, **MARKED)
    log = rbtool.export(made.path, tmp_path / "out.mcap").path
    with log.open("rb") as file:
        reader = make_reader(file, decoder_factories=[ProtobufDecoders()])
        summary = reader.get_summary()
        assert summary is not None
        assert {one.topic for one in summary.channels.values()} == {
            "/observation/state", "/observation/image/front", "/action", "/reward", "/episode"
        }  # fmt: skip
        first = next(reader.iter_decoded_messages(topics=["/observation/image/front"]))
        assert first.schema is not None
        assert (first.schema.name, first.decoded_message.format) == ("foxglove.CompressedImage", "png")
    pairs = (
        "observation.state=/observation/state observation.image.front=/observation/image/front action=/action "
        "reward=/reward"
    )
    found, _ = rows_of(log, mapped(pairs, 50.0, episodes_by="topic:/episode"))
    assert_same_columns(found, "observation.state", "observation.image.front", "action", "reward")
    assert [bool(rows["terminations"][-1]) for rows in found] == [True, False, False]


@pytest.mark.parametrize("fps", [3.53e-05, 29.97002997])
def test_an_export_reads_back_as_its_note_says_at_any_rate(fps: float, tmp_path: Path) -> None:
    """Times are exact to the nanosecond: one that is too late would give a step the row before."""
    made = rbtool.convert(MARKERS, tmp_path / "made", **MARKED)
    result = rbtool.export(made.path, tmp_path / "out.mcap", fps=fps)
    note = next(note for note in result.notes if "--fps" in note)
    assert f"--fps {fps} " in note
    pairs = "observation.state=/observation/state action=/action reward=/reward"
    found, _ = rows_of(result.path, mapped(pairs, fps, episodes_by="topic:/episode"))
    assert_same_columns(found, "observation.state", "action", "reward")


def assert_same_columns(found: Sequence[dict[str, Any]], *names: str) -> None:
    for rows, right in zip(found, expected("ros2_markers.mcap"), strict=True):
        for name in names:
            assert rows[name].tolist() == np.asarray(right[name]).reshape(rows[name].shape).tolist(), name


def test_an_export_counts_the_ends_that_it_cannot_state(tmp_path: Path) -> None:
    write_plan(DatasetPlan((3, 2), ("truncated", "both"), (False, False), ODD_LEAVES[:1]), tmp_path / "made")
    notes = rbtool.export(tmp_path / "made", tmp_path / "out.mcap", fps=10).notes
    assert "1 episode that ended terminated and truncated: stored as terminated" in notes


def test_an_export_names_text_of_episodes_that_it_cannot_store(tmp_path: Path) -> None:
    pieces = [replace(piece, text={"event": "fall", "task": "walk"}) for piece in walk_pieces([(3, "terminated")])]
    write_pieces(tmp_path / "made", WALK_FIELDS, pieces)
    notes = rbtool.export(tmp_path / "made", tmp_path / "out.mcap", fps=10).notes
    assert "text of episodes named event is not stored" in notes


def test_an_export_refuses_what_it_does_not_know_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    made = rbtool.convert(LOGS / "json_unicode.mcap", tmp_path / "made", **JSON)
    result = rbtool.export(made.path, tmp_path / "out", to="mcap")
    assert {one["key"].split(".")[0] for one in result.dropped_keys} == {"time", "age"}
    assert any("--episodes-by topic:/episode" in note for note in result.notes)
    assert rbtool.converters.logs.export.McapExporter.made(result.path)
    assert not rbtool.converters.logs.export.McapExporter.made(LOGS / "json_unicode.mcap")


def test_a_topic_that_may_mark_episodes_is_named_where_files_are_episodes():
    for options, named in (({**MARKED, "episodes_by": "file"}, True), (MARKED, False)):
        with LogReader(MARKERS, options=options) as reader:
            said = "/episode/marker may mark episodes: --episodes-by topic:/episode/marker"
            assert any(said in note for note in reader.facts().notes) == named
