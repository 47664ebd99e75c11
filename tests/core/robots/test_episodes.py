"""Operations on whole episodes: tasks set and renamed, idle ends cut off, other rates of steps."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_datasets import write_fields

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.contracts import Piece
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.operations.built_in import Rename
from rbtool.core.preprocess.operations.program import Program, ProgramProcessor, pipeline_text, program_of
from rbtool.core.preprocess.processor import Block, BlockColumn, Context
from rbtool.core.robots.action_space import ChangeActionSpace, between, rotation
from rbtool.core.robots.episodes import RenameTask, Resample, Retime, SetTask, TrimIdle
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.schema import Field, encode_text, role_of, text_fields
from rbtool.core.testing.datasets import write_pieces, write_walks
from rbtool.core.testing.operations import OperationTests, sample_block

LEROBOT = Path(__file__).parents[2] / "data" / "lerobot" / "recent"
TEXTS = [
    {"language_instruction": "pick", "scene": "kitchen"}, {}, {"language_instructions": '{"3": "pick", "1": "place"}'},
    {"language_instruction": "place"},
]  # fmt: skip


class TestSetTask(OperationTests):
    def operation(self):
        return SetTask("0:2", "pick the cube")


class TestRenameTask(OperationTests):
    def operation(self):
        return RenameTask("pick", "pick the cube")


def preprocessed(source, name="made", *, pipeline=(), **operations):
    """Preprocess a dataset into the folder `name` beside it, with options or the operations of a pipeline in order."""
    how = {"operations": operations}
    if pipeline:
        how = {"pipeline": source.with_name("pipeline.toml")}
        how["pipeline"].write_text(pipeline_text(Program(tuple(pipeline))))
    return rbtool.preprocess(source, None, source.with_name(name), num_workers=0, force=True, **how).path


def told(texts=TEXTS, **operations):
    for operation in program_of(operations).on_rows:
        texts = operation.texts(range(len(texts)), texts)
    return texts


def test_a_task_is_set_for_named_episodes():
    found = told(task=["0:2=lift = high", "3=fold"])
    assert found[:2] == [
        {"language_instruction": "lift = high", "scene": "kitchen"},
        {"language_instruction": "lift = high"},
    ]
    assert found[2:] == [TEXTS[2], {"language_instruction": "fold"}]


def test_a_task_is_renamed_wherever_it_is():
    found = told(rename_task="pick=place")
    assert found[0] == {"language_instruction": "place", "scene": "kitchen"}
    assert found[1] == {}
    assert json.loads(found[2]["language_instructions"]) == {"3": "place", "1": "place"}
    assert found[3] == TEXTS[3]
    found = told(rename_task=["pick=place", "place=put down"])
    assert [found[0]["language_instruction"], found[3]["language_instruction"]] == ["place", "put down"]


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"task": "0:2"}, "--task '0:2' is not understood"),
        ({"task": "2:1=pick"}, "--task '2:1' holds no episode"),
        ({"task": ["0=pick", "0:1=place"]}, "--task gives episodes 0:1 two texts, 'pick' and 'place'"),
        ({"task": "9=pick"}, "--task asks for episode 9, which is not there"),
        ({"rename_task": ["pick=place", "place=pick"]}, "swaps 'pick' and 'place'"),
        ({"rename_task": ["pick=place", "pick=lift"]}, "gives 'pick' two texts, 'place' and 'lift'"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(operations, words):
    with pytest.raises(UsageError, match=words):
        told(**operations)


def test_a_dataset_gets_tasks_and_keeps_them_when_rows_are_dropped(tmp_path):
    def tasks(path):
        lines = (path / ".rbtool/episodes_text.jsonl").read_text().splitlines()
        return [json.loads(line)["language_instruction"] for line in lines]

    write_walks(tmp_path / "a", [(length, "terminated") for length in (3, 4, 2)])
    named = preprocessed(tmp_path / "a", "b", task=["0:2=pick", "2=place"])
    part = preprocessed(named, "c", episodes="1:", where="observation[0] > -9", rename_task="place=put down")
    assert tasks(part) == ["pick", "put down"]
    assert tasks(preprocessed(named, "d", task="0=lift", rename_task="lift=raise")) == ["raise", "pick", "place"]
    with pytest.raises(UsageError, match="no episode has the task 'pik'; did you mean 'pick'"):
        preprocessed(named, "e", rename_task="pik=x")
    assert not (tmp_path / "e").exists()


def test_rows_with_tasks_of_their_own_change_with_their_episodes(tmp_path):
    rows = [[b"pick", b"place", b"place"], [b"pick"] * 2]
    fields = [(field, "step") for field in text_fields(("language_instruction",), 5)]
    fields += [(Field(("observation",), "float32", (1,), "observation"), "state")]
    pieces = []
    for number, texts in enumerate(rows):
        characters, lengths = encode_text(texts, 5)
        columns = {
            ("language_instruction",): characters, ("language_instruction_length",): lengths,
            ("observation",): np.zeros((len(texts) + 1, 1), np.float32),
        }  # fmt: skip
        ends = np.arange(len(texts)) == len(texts) - 1
        pieces.append(Piece(number, columns, ends, ends & False, first=True, last=True))
    write_pieces(tmp_path / "a", fields, pieces)

    def told(**operations):
        found = rbtool.load_dataset(preprocessed(tmp_path / "a", **operations))[:]
        pairs = zip(found["language_instruction"].numpy(), found["language_instruction_length"].tolist(), strict=True)
        return [row[:size].tobytes().decode() for row, size in pairs]

    assert told(rename_task="place=put it down") == ["pick", "put it down", "put it down", "pick", "pick"]
    assert told(task="1=lift") == ["pick", "place", "place", "lift", "lift"]
    assert told(rename_task="pick=a", task="0=pick") == ["a", "a", "a", "a", "a"]
    with pytest.raises(UsageError, match="no episode has the task 'pik'; did you mean 'pick'"):
        told(rename_task="pik=x")


# Idle ends and rates, on episodes of an arm.


class TestTrimIdle(OperationTests):
    def operation(self):
        return TrimIdle(1.0, 1, ("observation", "action"), (0.5,) * 5)


class TestResample(OperationTests):
    def operation(self):
        return Resample(5.0, 10.0, ("action=linear",))


class TestResampleByTimes(OperationTests):
    def operation(self):
        return Resample(4.0)

    def rows(self):
        fields, block = sample_block()
        times = np.concatenate([np.cumsum(np.full(length, 0.1)) for length in block.pieces.rows.tolist()])
        columns = {("timestamp",): times.astype(np.float32), ("next", "success"): times > 0.3}
        held = {key: BlockColumn(values.dtype.name, values) for key, values in columns.items()}
        more = tuple(Field(key, v.dtype.name, v.shape[1:], role_of(key)) for key, v in columns.items())
        return (*fields, *more), Block(block.columns | held, block.pieces, 0)


FIELDS = (
    (Field(("observation", "state"), "float32", (2,), "observation"), "state"),
    (Field(("observation", "image"), "uint8", (2, 2, 3), "observation"), "state"),
    (Field(("count",), "int64", (), "info"), "state"),
    (Field(("timestamp",), "float32", (), "info"), "step"),
    (Field(("frame",), "int64", (), "info"), "step"),
    (Field(("action",), "float32", (2,), "action"), "step"),
    (Field(("reward",), "float64", (), "reward"), "result"),
    (Field(("success",), "bool", (), "info"), "result"),
)


def arm(folder, episodes, fps=10.0, text=None):
    """Write episodes: the states of each `[T + 1, 2]`, and its rewards; all with the same texts."""
    pieces = []
    for number, (states, rewards) in enumerate(episodes):
        states, length = np.asarray(states, np.float32), len(states) - 1
        columns = {
            ("observation", "state"): states, ("count",): np.arange(length + 1) * 10, ("frame",): np.arange(length),
            ("observation", "image"): np.tile(np.arange(length + 1, dtype=np.uint8)[:, None, None, None], (1, 2, 2, 3)),
            ("timestamp",): (np.arange(length) / fps).astype(np.float32), ("action",): states[1:],
            ("reward",): np.asarray(rewards, float),
        }  # fmt: skip
        ends = np.arange(length) == length - 1
        columns |= {("success",): ends & (number == 0)}
        flags = (ends, ends & False) if number % 2 == 0 else (ends & False, ends)
        ends = {"first": True, "last": True, "final": Final.REPEATED, "text": text or {}}
        pieces.append(Piece(number, columns, *flags, **ends))
    write_pieces(folder, FIELDS, pieces)
    return folder


def done(source, **operations):
    dest = source.with_name("done")
    made = rbtool.preprocess(source, None, dest, operations=operations, num_workers=0, force=True)
    assert made.boundary["final_repeated"] == made.episodes  # as the source says it of each
    assert rbtool.check(dest).errors == 0
    return rbtool.load_dataset(dest)[:]


def walk(*stretches):
    """States that rest and move: numbers of steps, in turn of rest and of motion."""
    steps = [np.full((count, 2), 0.1 * (place % 2)) for place, count in enumerate(stretches)]
    return np.concatenate([[[0.0, 0.0]], np.cumsum(np.concatenate(steps), 0)])


def test_idle_ends_are_cut_off_and_ends_and_returns_stay(tmp_path):
    rests = [walk(4, 9, 3, 8, 5), walk(0, 12, 6), walk(7), walk(2, 10)]
    source = arm(tmp_path / "arm", [(states, np.arange(len(states) - 1) + 1.0) for states in rests])
    rows = done(source, trim_idle="0.1:1")
    number = rows["episode"]
    assert [(number == one).sum().item() for one in range(4)] == [1 + 9 + 3 + 8 + 1, 12 + 1, 0, 1 + 10]
    for one, (first, length) in {0: (3, 29), 1: (0, 18), 3: (1, 12)}.items():
        mine = rows[number == one]
        assert mine["frame"].tolist() == list(range(first, first + len(mine)))
        assert mine["next", "reward"].sum().item() == length * (length + 1) / 2
        for flag in ("terminated", "success"):
            assert mine["next", flag].squeeze(-1).tolist() == [False] * (len(mine) - 1) + [one == 0]
        assert mine["next", "truncated"].squeeze(-1).tolist() == [False] * (len(mine) - 1) + [one != 0]
    inside = number[:-1] == number[1:]
    assert torch.equal(rows["next", "observation", "state"][:-1][inside], rows["observation", "state"][1:][inside])


def test_rows_can_be_cut_off_by_number(tmp_path):
    source = arm(tmp_path / "arm", [(walk(0, 9), np.arange(9) + 1.0) for _ in range(3)])
    rows = done(source, trim_idle={0: (2, 3), 2: (9, 0)})
    assert rows["episode"].tolist() == [0] * 4 + [1] * 9
    first = rows[rows["episode"] == 0]
    assert first["frame"].tolist() == [2, 3, 4, 5]
    assert first["next", "reward"].squeeze(-1).tolist() == [1 + 2 + 3, 4, 5, 6 + 7 + 8 + 9]
    assert first["next", "terminated"].squeeze(-1).tolist() == [False] * 3 + [True]
    again = rbtool.preprocess(source, None, tmp_path / "again", replay=tmp_path / "done", num_workers=0)
    assert (again.steps, again.episodes) == (13, 2)
    for wrong in ({0: (1,)}, {0: (-1, 0)}):
        with pytest.raises(UsageError, match="expects cuts of three numbers"):
            rbtool.preprocess(source, None, tmp_path / "wrong", operations={"trim_idle": wrong})


def test_units_are_measured_once_and_noise_is_no_motion(tmp_path):
    rng = np.random.default_rng(0)
    states = [walk(20, 60, 20) + rng.normal(size=(101, 2)) * 1e-4 for _ in range(4)]
    source = arm(tmp_path / "arm", [(one, np.zeros(100)) for one in states])
    rows = done(source, trim_idle="0.1:0")
    assert [(rows["episode"] == one).sum().item() for one in range(4)] == [60] * 4
    made = json.loads((tmp_path / "done/.rbtool/manifest.json").read_text())["provenance"][-1]["arguments"]
    [operation] = made["operations"]
    assert operation["keys"] == ["action", "observation.state"]
    np.testing.assert_allclose(operation["units"], [0.1 * 1.4826] * 4, rtol=0.02)
    part = rbtool.preprocess(source, None, tmp_path / "again", replay=tmp_path / "done", num_workers=0)
    assert part.steps == len(rows)


@pytest.mark.parametrize("fps", [2.0, 3.0, 5.0, 10.0, 20.0, 25.0])
def test_a_rate_keeps_returns_ends_and_the_path(tmp_path, fps):
    lengths = (20, 7, 1)
    line = [np.stack([np.arange(n + 1) * 0.1, np.arange(n + 1) * -0.2], 1) for n in lengths]
    source = arm(tmp_path / "arm", [(one, np.arange(len(one) - 1) + 1.0) for one in line])
    rows = done(source, resample=f"{fps},action=linear")
    for one, length in enumerate(lengths):
        mine, count = rows[rows["episode"] == one], int(np.ceil(length / 10 * fps - 1e-9)) or 1
        assert len(mine) == count
        times = np.arange(count + 1) / fps
        np.testing.assert_allclose(mine["timestamp"], times[:-1], atol=1e-6)
        assert mine["frame"].tolist() == list(range(count))
        now, after = np.minimum(times[:-1], length / 10), np.minimum(times[1:], length / 10)
        np.testing.assert_allclose(mine["observation", "state"][:, 0], now, atol=1e-5)
        np.testing.assert_allclose(mine["next", "observation", "state"][:, 0], after, atol=1e-5)
        assert mine["next", "reward"].sum().item() == length * (length + 1) / 2
        assert mine["next", "done"].squeeze(-1).tolist() == [False] * (count - 1) + [True]
        key = "terminated" if one % 2 == 0 else "truncated"
        assert mine["next", key].squeeze(-1).tolist() == mine["next", "done"].squeeze(-1).tolist()
        assert set(mine["count"].tolist()) <= set(range(0, 10 * length + 1, 10))  # never between two
        assert (np.abs(mine["count"].numpy() / 100 - now) <= 0.05 + 1e-6).all()
        assert (mine["observation", "image"][:, 0, 0, 0] * 10 == mine["count"]).all()


def test_actions_are_held_and_deltas_summed(tmp_path):
    states = np.arange(9)[:, None] * [1.0, 10.0]
    source = arm(tmp_path / "arm", [(states, np.zeros(8))])
    assert done(source, resample="5")["action"][:, 0].tolist() == [1, 3, 5, 7]
    assert done(source, resample="20")["action"][:, 0].tolist() == [n for n in range(1, 9) for _ in range(2)]
    assert done(source, resample="5,action=sum")["action"][:, 0].tolist() == [3, 7, 11, 15]
    np.testing.assert_allclose(done(source, resample="20,action=sum")["action"][:, 0].sum(), 36, atol=1e-5)
    assert done(source, resample="5,observation.state=hold")["observation", "state"][:, 0].tolist() == [0, 2, 4, 6]
    later = arm(tmp_path / "later", [(np.zeros((31, 2)), np.zeros(30))])  # whose time stamps are rounded
    assert done(later, resample="20")["count"].tolist() == [10 * n for n in range(30) for _ in range(2)]
    same = done(source, resample="10")
    np.testing.assert_allclose(same["observation", "state"], states[:-1], atol=1e-5)


def test_the_rate_in_the_metadata_is_changed():
    documents = Resample(5.0).documents({"meta/info.json": b'{"fps": 10, "a": 1}', "other.json": b"{}"})
    assert json.loads(documents["meta/info.json"]) == {"fps": 5.0, "a": 1}
    assert documents["other.json"] == b"{}"
    documents = {"meta/info.json": b'{"fps": 30}', "meta/stats.json": b"{}"}
    assert Retime(30).documents(documents) == documents
    assert json.loads(Retime(20).documents(documents)["meta/info.json"]) == {"fps": 20}


def test_the_first_steps_are_taken_in_a_run_of_their_own(tmp_path):
    here = arm(tmp_path / "0", [(np.zeros((13, 2)), np.zeros(12))], text=EVENTS)
    with pytest.raises(UsageError, match="num_frames would cut an episode that resample makes rows of"):
        rbtool.preprocess(here, None, tmp_path / "1", operations={"resample": "5"}, num_frames=7)
    cut = rbtool.preprocess(here, None, tmp_path / "1", operations={"retime": 10}, num_frames=7, num_workers=0)
    with open_steps(preprocessed(cut.path, resample="5")) as reader:
        assert "late" not in reader.episode_text[0]["language_events"]


def test_persistent_language_that_differs_by_frame_is_not_resampled():
    texts = [{"language_persistent": "[]"}]
    assert Resample(5.0, 10.0).texts([0], texts) == texts
    with pytest.raises(UsageError, match="language_persistent differs between the rows"):
        Resample(5.0, 10.0).texts([0], [{"language_persistent": '{"3": [{"role": "user"}]}'}])


EVENTS = {"language_events": '{"2": ["early"], "7": ["late"]}'}
TIMED = {"language_events": '{"0.623450s:0.723450s": ["late"]}'}
"""The same in a dataset that was resampled to 10 steps a second."""


def since(timestamp):
    return {"language_persistent": json.dumps([{"timestamp": timestamp, "content": "reach"}])}


@pytest.mark.parametrize(
    ("text", "runs", "heard"),
    [
        (EVENTS, [{"resample": "5"}], {0.2: ["early"], 0.6: ["late"]}),
        (EVENTS, [{"retime": 20, "resample": "5"}], {0.0: ["early"], 0.2: ["late"]}),
        (EVENTS, [{"retime": 20}, {"resample": "5"}], {0.0: ["early"], 0.2: ["late"]}),
        (EVENTS, [{"retime": 20, "resample": "5,from=10"}], "do not tell when these frames are at 10 frames"),
        (EVENTS, [{"resample": "5"}, {"retime": 5}], {0.2: ["early"], 0.6: ["late"]}),
        (EVENTS, [{"resample": "5"}, {"retime": 10}], "--retime 10 would move the language of episode 0"),
        (EVENTS, [[("resample", 5.0), ("retime", 10.0)]], "--retime 10 would move the language of episode 0"),
        (EVENTS, [[("resample", 5.0), ("resample", 2.5)]], {0.0: ["early"], 0.4: ["late"]}),
        (EVENTS, [{"where": ["frame < 7"]}, {"resample": "5"}], {0.2: ["early"]}),
        (EVENTS, [{"where": ["frame != 7"]}, {"resample": "5"}], {0.2: ["early"]}),
        (EVENTS, [{"trim_idle": {0: (0, 5)}}, {"resample": "5"}], {0.2: ["early"]}),
        (EVENTS, [{"resample": "10"}, {"where": ["frame < 7"]}, {"resample": "5"}], {0.2: ["early"]}),
        (EVENTS, [{"where": ["frame < 7"], "resample": "5"}], "where and resample in one run would assign"),
        (EVENTS, [{"trim_idle": {0: (0, 5)}, "resample": "5"}], "trim-idle and resample in one run would assign"),
        ({}, [{"where": ["frame < 7"], "retime": 20, "resample": "5"}], {}),
        (TIMED, [{"retime": 10}], {0.7: ["late"]}),
        (TIMED, [{"retime": 20}], "would move the language of episode 0 to other rows: its language_events"),
        (since(0.5), [{"retime": 10, "resample": "5"}], {}),
        (since(0.5), [{"retime": 20}], "its language_persistent are stated by time"),
        (since(0.5), [[("resample", 5.0), ("retime", 5.0)]], "its language_persistent are stated by time"),
        (since(None), [{"retime": 20, "resample": "5"}], {}),
    ],
)  # fmt: skip
def test_language_stays_in_its_rows(tmp_path, text, runs, heard):
    here = arm(tmp_path / "0", [(np.zeros((13, 2)), np.zeros(12))], text=text)  # at 10 steps a second
    kinds = {"resample": Resample, "retime": Retime}
    with contextlib.nullcontext() if isinstance(heard, dict) else pytest.raises(UsageError, match=heard):
        for number, run in enumerate(runs, start=1):
            asked = {"pipeline": [kinds[name](fps) for name, fps in run]} if isinstance(run, list) else run
            here = preprocessed(here, f"{number}", **asked)
        rows = rbtool.load_dataset(here, texts=True)[:]
        said = rows["language_events"] if "language_events" in rows.keys() else [[]] * len(rows)  # noqa: SIM118
        pairs = zip(rows["timestamp"].tolist(), said, strict=True)
        assert {round(time, 4): list(one) for time, one in pairs if list(one)} == heard


def test_bfloat16_is_converted_once(tmp_path):
    turns = np.array([[0, 0, 0, 0.5], [1, 0.25, 0, 0.5], [2, 0.5, 0, 0.5], [3, 0.75, 0, 0.5]], np.float32)
    ends = np.arange(3) == 2
    found = {}
    for kind, values in {"float32": turns, "bfloat16": (turns.view(np.uint32) >> 16).astype(np.uint16)}.items():
        fields = (
            (Field(("observation", "state"), kind, (4,), "observation"), "state"),
            (Field(("action",), kind, (4,), "action"), "step"),
        )
        columns = {("observation", "state"): values, ("action",): values[:3]}
        write_pieces(tmp_path / kind, fields, [Piece(0, columns, ends, ends & False, first=True, last=True)])
        ways = "20,from=10,observation.state[1:4]=axis-angle,action[1:4]=axis-angle"
        found[kind] = rbtool.load_dataset(preprocessed(tmp_path / kind, resample=ways))[:]
    for key in (("observation", "state"), "action"):
        expected = found["float32"][key].float()
        torch.testing.assert_close(found["bfloat16"][key].float(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        ("axis-angle", [3.1, 0, 0], [3.2, 0, 0]),
        ("euler-xyz", [3.1, 0, 0], [3.2, 0, 0]),
        ("euler-ZYX-deg", [-179.0, 0, 0], [-183.0, 0, 0]),
        ("euler-xyz", [0, 1.5, 0], [0, 1.7, 0]),
        ("euler-ZYX", [3.0, 1.5, -3.0], [3.0, 1.7, -3.0]),
        ("axis-angle", [0, 0, 6.2], [0, 0, 6.5]),
    ],
)
def test_rotations_do_not_jump_near_half_a_turn(how, before, after):
    one, other = np.array([before]), np.array([after])
    np.testing.assert_allclose(between(how, one, other, np.array([0.75])), one + 0.75 * (other - one), atol=1e-9)


QUATERNIONS = [[1.0, 0, 0, 0], [np.cos(0.3), np.sin(0.3), 0, 0], [-np.cos(0.4), 0, -np.sin(0.4), 0], [0, 0, 0, 1.0]]


def slerp(one, other, share):
    """The formula of Shoemake."""
    other = other if one @ other > 0 else -other
    angle = np.arccos(one @ other)
    return (np.sin((1 - share) * angle) * one + np.sin(share * angle) * other) / np.sin(angle)


@pytest.mark.parametrize("how", ["quat-wxyz", "quat-xyzw", "axis-angle", "6d-rows", "euler-ZYX-deg", "matrix"])
def test_rotations_are_turned_and_not_interpolated_number_by_number(tmp_path, how):
    turns = np.array(QUATERNIONS)
    numbers = rotation(how).numbers(rotation("quat-wxyz").matrix(turns))
    if how.startswith("quat"):
        numbers = numbers * np.array([1, -1, -1, 1])[:, None]  # as recorders write them
    states = np.concatenate([np.arange(4.0)[:, None], numbers], 1)
    columns = {"reward": np.zeros(3), "observation.state": states, "action": numbers[:3].astype(np.float32)}
    ways = f"40,from=10,observation.state[1:]={how},action[:]={how}"
    rows = rbtool.load_dataset(preprocessed(write_fields(tmp_path / "a", columns), resample=ways))[:]
    between = [slerp(turns[place], turns[place + 1], step / 4) for place in range(3) for step in range(4)]
    expected = rotation("quat-wxyz").matrix(np.array([*between, turns[3]]))
    state = np.concatenate([rows["observation", "state"], rows["next", "observation", "state"][-1:]])
    np.testing.assert_allclose(state[:, 0], np.arange(13) / 4)
    np.testing.assert_allclose(rotation(how).matrix(state[:, 1:]), expected, atol=1e-9)
    np.testing.assert_array_equal(state[::4], states)
    np.testing.assert_array_equal(rows["next", "observation", "state"][:-1], rows["observation", "state"][1:])
    np.testing.assert_allclose(rotation(how).matrix(rows["action"].double().numpy())[:9], expected[:9], atol=1e-5)


def test_known_rotations_are_not_interpolated_as_numbers(tmp_path):
    columns = {"reward": np.zeros(3), "action": np.zeros((3, 7), np.float32), "observation": np.zeros((4, 1))}
    source = write_fields(tmp_path / "poses", columns)
    six = preprocessed(source, "six", action_space="0:6=pose,from=axis-angle,to=6d-rows")
    gripper = preprocessed(six, "gripper", action_space="9=gripper,from=0:1,to=1:0")
    for poses in (six, gripper):
        with pytest.raises(UsageError, match=r"action has rotations.*action\[3:9\]=6d-rows"):
            preprocessed(poses, resample="5,from=10,action=linear")
    made = preprocessed(six, resample="5,from=10,action=linear,action[3:9]=6d-rows")
    assert rbtool.load_dataset(made)[:]["action"].shape == (2, 10)


TURN_ARM = ChangeActionSpace(("0:6=pose,from=axis-angle,to=6d-rows",), "arm")


def with_arm(folder):
    """A dataset with the rows 0 to 6 under `arm`, of which the first six are a pose."""
    rows = np.tile(np.arange(7, dtype=np.float32), (3, 1))
    return write_fields(folder, {"reward": np.zeros(3), "action": np.zeros((3, 1)), "arm": rows})


def test_rotations_of_observations_are_not_interpolated_by_default(tmp_path):
    turned = preprocessed(with_arm(tmp_path / "a"), "turned", pipeline=[TURN_ARM])
    with pytest.raises(UsageError, match=r"arm has rotations.*arm\[3:9\]=6d-rows"):
        preprocessed(turned, resample="5,from=10")
    for ways in ("5,from=10,arm[3:9]=6d-rows", "5,from=10,arm=nearest"):
        preprocessed(turned, resample=ways)
    renamed = preprocessed(turned, "renamed", rename="arm=robot.pose")
    with pytest.raises(UsageError, match=r"robot.pose has rotations.*robot.pose\[3:9\]=6d-rows"):
        preprocessed(renamed, resample="5,from=10")


def test_operations_of_one_run_know_what_those_before_them_make(tmp_path):
    source = with_arm(tmp_path / "a")

    def made(*operations):
        return preprocessed(source, pipeline=[TURN_ARM, *operations])

    with pytest.raises(UsageError, match=r"arm has rotations.*arm\[3:9\]=6d-rows"):
        made(Resample(5.0, 10.0))
    with pytest.raises(UsageError, match=r"pose has rotations.*pose\[3:9\]=6d-rows"):
        made(Rename("arm", "pose"), Resample(5.0, 10.0, ("arm=nearest",)))
    made(Resample(5.0, 10.0, ("arm[3:9]=6d-rows",)))
    scaled = made(ChangeActionSpace(("9:=gripper,from=0:10,to=0:1",), "arm"))
    np.testing.assert_allclose(rbtool.load_dataset(scaled)[:]["arm"][:, 9], 0.6, atol=1e-6)
    with pytest.raises(UsageError, match=r"goes beyond the 10 numbers of arm"):
        made(ChangeActionSpace(("10=gripper,from=0:10,to=0:1",), "arm"))


@given(st.integers(1, 40), st.floats(1, 60), st.floats(1, 60))
def test_rewards_add_up_at_every_rate(length, fps, source):
    fields, block = sample_block([length])
    work = ProgramProcessor(Program((Resample(fps, source),)), fields)
    made = work.load(Context(fields, None, 0)).apply(block)
    assert abs(made.rows - length * fps / source) <= 1
    rewards = block.columns["next", "reward"].values.sum(dtype=np.float64)
    np.testing.assert_allclose(made.columns["next", "reward"].values.sum(dtype=np.float64), rewards, atol=1e-4)
    assert made.columns["next", "done"].values[:, 0].tolist() == [False] * (made.rows - 1) + [True]
    np.testing.assert_array_equal(made.columns["observation",].values[0], block.columns["observation",].values[0])
    np.testing.assert_array_equal(
        made.columns["next", "observation"].values[:-1], made.columns["observation",].values[1:]
    )


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"trim_idle": "much"}, "trim-idle is 'much', expected a number"),
        ({"trim_idle": "-1"}, "trim-idle has the threshold -1, expected a number from 0"),
        ({"trim_idle": "1:x"}, "'x' is not a number of rows to keep"),
        ({"trim_idle": "1:1:stat"}, "stat"),
        ({"trim_idle": "1:1:observation.image,count"}, "trim-idle leaves no rows"),
        ({"resample": "0"}, "resample is 0 steps per second"),
        ({"resample": "1e12,from=50"}, "resample is 1e\\+12 steps per second, expected 1e-06 to"),
        ({"resample": "1e6,from=50"}, "resample makes 20,000 steps of each one, from 50 to 1e\\+06 per second"),
        ({"resample": "5,action=cubic"}, "HOW is nearest, linear, hold, sum"),
        ({"resample": "5,count=linear"}, "count is int64, which cannot be linear"),
        ({"resample": "5,reward=hold"}, "cannot be hold"),
        ({"resample": "5,action[0:4]=quat-wxyz"}, "goes beyond the 2 numbers of action"),
        ({"resample": "5,action[0:2]=quat-wxyz"}, "has 2 numbers, but quat-wxyz has 4"),
        ({"resample": "5,action[0:2]=slerp"}, "a rotation cannot be 'slerp'"),
        ({"resample": "5,count[0:2]=axis-angle"}, "'count' has no rotations"),
        ({"resample": "5"}, "needs the rate of the steps"),
    ],
)
def test_operations_that_make_no_sense_for_an_arm_are_refused(tmp_path, operations, words):
    source = arm(tmp_path / "arm", [(np.zeros((4, 2)), np.zeros(3))])
    if operations == {"resample": "5"}:
        source = preprocessed(source, "plain", exclude="timestamp")
    with pytest.raises(UsageError, match=words):
        done(source, **operations)


class TestRetime(OperationTests):
    def operation(self):
        return Retime(30)

    def rows(self):
        fields, block = sample_block()
        frames = np.concatenate([np.arange(length) for length in block.pieces.rows])
        block = replace(block, columns={**block.columns, ("frame",): BlockColumn("int64", frames)})
        return (*fields, Field(("frame",), "int64", (), "id")), block


def test_time_stamps_count_frames(tmp_path):
    made = rbtool.convert(LEROBOT / "jitter_4ms", tmp_path / "made")
    assert any("LeRobot needs tolerance_s ≥ 0.0041, its default, 0.0001" in note for note in made.notes)
    result = rbtool.preprocess(made.path, dest=tmp_path / "out", operations={"retime": 30})
    with open_steps(result.path) as reader:
        frames, stamps = (reader.read((name,), 0, 34) for name in ("frame", "timestamp"))
        assert any("videos are kept" in note for note in reader.manifest.notes)
    pixels = rbtool.preprocess(made.path, dest=tmp_path / "pixels", operations={"crop": "observation.image.top=8x8"})
    with open_steps(pixels.path) as reader:
        assert not any("videos are kept" in note for note in reader.manifest.notes)
    assert stamps.dtype == np.float32
    assert np.array_equal(stamps, (frames / 30).astype(np.float32))
    out = rbtool.export(result.path, tmp_path / "lerobot", to="lerobot").path
    assert not any("tolerance_s" in note for note in rbtool.convert(out, tmp_path / "again").notes)


@pytest.mark.parametrize(("fps", "message"), [
    (0, "--retime is 0"),
    (1e-300, "--retime is 1e-300, expected frames per second from 1e-06 to"),
    (30, "the number of each row in its episode"),
])  # fmt: skip
def test_rates_that_make_no_sense_are_refused(fps, message, tmp_path):
    write_walks(tmp_path / "walks", [(3, "terminated")])
    with pytest.raises(UsageError, match=message):
        rbtool.preprocess(tmp_path / "walks", dest=tmp_path / "out", operations={"retime": fps})
