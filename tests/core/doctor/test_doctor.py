"""The rules about behaviour: planted defects are found, clean sets raise no alarm, and what is proposed mends."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import robot_sets
from robot_sets import CLEAN, DEFECTS, Kind, edit_json, make, statistics, write, write_defect

import rbtool
from rbtool import CorruptDataError, UsageError
from rbtool.core.doctor.pictures import Eye, Frames
from rbtool.core.doctor.rows import _MOST_HELD, RowRules, _Batch
from rbtool.core.doctor.rules import BY_ID, DROPS, ENTRIES, Report, Thresholds
from rbtool.core.format.packed.reader import PackedReader
from rbtool.core.preprocess import run
from rbtool.core.results import to_document
from rbtool.core.ted.rules import Rows
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.options import CleanOptions

QUICK = ("stuck joint", "frozen camera", "lagging actions", "reversed states", "wrong statistics", "near duplicate")
"""Defects of which each takes another way through the rules."""


def _rules(result: Any) -> set[str]:
    return {one.rule for one in result.findings}


def _of_rule(result: Any, rule: str) -> list[Any]:
    return [one for one in result.findings if one.rule == rule]


def _quick_or_slow(names: Collection[str], quick: Collection[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _quick_or_slow(DEFECTS, QUICK))
def test_planted_defects_are_found(name: str, tmp_path: Path) -> None:
    found = rbtool.check(write_defect(name, tmp_path / "set"))
    assert _rules(found) & set(DEFECTS[name].rules), found.findings
    assert all(one.severity == "warning" for one in found.findings if one.rule in BY_ID)


def test_rewards_that_come_too_early_belong_to_the_step_after_theirs(tmp_path: Path) -> None:
    (found,) = _of_rule(rbtool.check(write_defect("early rewards", tmp_path / "set")), "REW002")
    assert found.message.startswith("rewards fit the step after theirs")


@pytest.mark.parametrize("name", _quick_or_slow(CLEAN, {"arm"}))
def test_clean_sets_raise_no_alarm(name: str, tmp_path: Path) -> None:
    assert rbtool.check(write(make(CLEAN[name]), tmp_path / "set"), full=name != "arm").findings == ()


KEYS = ("observation",), ("action",)


def _rows_of(episodes: Sequence[Sequence[Any]]) -> Iterator[Rows]:
    """Yield the rows of episodes, one after the other, each of an array of observations and one of actions."""
    start = 0
    for number, columns in enumerate(episodes):
        at = np.arange(len(columns[0]))
        yield Rows(
            start, dict(zip(KEYS, columns, strict=True)), at == 0, at == at[-1], np.full(len(at), number), at < 0
        )
        start += len(at)


def _reported(blocks: Iterable[Rows], *, rate: float | None = None) -> tuple[RowRules, Report]:
    """Show blocks of rows to the rules, and have them report; a rate makes the rows robot data."""
    first, *more = blocks
    fields = [Field(key, str(one.dtype), one.shape[1:], key[0]) for key, one in first.columns.items()]
    rules, report = RowRules(fields, Thresholds(), rate=rate, names={}), Report(Path("set"), is_raw=False)
    for rows in (first, *more):
        rules.see(rows)
    rules.finish()
    rules.report(report, robot=rate is not None)
    return rules, report


def _following(action: Any, by: float) -> Any:
    """Move the state towards the action by a share of the distance in each step."""
    state = action.copy()
    for at in range(1, len(action)):
        state[at] = state[at - 1] + by * (action[at - 1] - state[at - 1])
    return state


def _levels(draw: np.random.Generator) -> tuple[Any, Any]:
    """Drive with one of a few speeds, the largest of them often."""
    levels = np.column_stack([draw.permutation([-0.6, 0, 0, 0.6, 0.6, 1, 1, 1]) for _ in range(2)])
    action = np.repeat(levels, draw.integers(15, 60, 8), axis=0)
    return _following(action, 0.35) + draw.normal(0, 0.004, action.shape), action


def _reaching(draw: np.random.Generator) -> tuple[Any, Any]:
    """Reach for a goal within a few steps, at full power while it is far."""
    goal, place, speed, states, actions = draw.uniform(-1, 1, 2), draw.uniform(-1, 1, 2), np.zeros(2), [], []
    for _ in range(draw.integers(15, 31)):
        action = np.clip(3 * (goal - place) - speed + draw.normal(0, 0.2, 2), -1, 1)
        states.append([*place, *speed])
        actions.append(action)
        speed = 0.8 * speed + 0.2 * action
        place = place + 0.2 * speed
    return np.array(states), np.array(actions)


def _walking(draw: np.random.Generator) -> tuple[Any, Any]:
    """Walk with still fingers: joints swing, so that a position tells the velocity a quarter of a period later."""
    phase, time = np.random.default_rng(5).uniform(0, 6.28, 12), np.arange(draw.integers(250, 450)) / 50
    ramp = np.clip(2 * time, 0, 1)[:, None]
    action = ramp * np.sin(2 * np.pi * draw.uniform(0.9, 1.3) * time[:, None] + phase + draw.normal(0, 0.1, 12))
    action = np.concatenate((action, np.zeros((len(time), 8))), axis=1)
    return _following(action, 0.4) + draw.normal(0, 5e-4, action.shape), action


def _waving(draw: np.random.Generator) -> tuple[Any, Any]:
    """Walk, and close the fingers smoothly in one episode of five."""
    state, action = _walking(draw)
    if draw.random() < 0.2:
        for one in (state, action):
            one[80:, -8:] += 0.4 * (1 - np.exp(-np.arange(len(one) - 80) / 30))[:, None]
    return state, action


def _opening(draw: np.random.Generator) -> tuple[Any, Any]:
    """Hold something with a gripper that nothing calls so: it rests open, and closes slowly."""
    state, action = _walking(draw)
    width = np.full((len(state), 1), 0.04)
    at = int(draw.integers(80, 120))
    width[at:] -= 0.02 * (1 - np.exp(-0.05 * np.arange(len(state) - at)))[:, None]
    return np.concatenate((state, width), axis=1), action


def _turning(draw: np.random.Generator) -> tuple[Any, Any]:
    """Drive, or only turn on the spot: what hardly changes then has no other unit."""
    state, action = _walking(draw)
    if draw.random() < 0.2:
        state[:, :4] = draw.normal(0, 5e-4, (len(state), 4))
        action[:, :4] = 0
    return state, action


def _ending_early(draw: np.random.Generator) -> tuple[Any, Any]:
    """Fall in two episodes of five, before the time limit."""
    state = np.cumsum(draw.normal(0, 0.1, (400, 3)), axis=0)
    steps = 400 if draw.random() < 0.6 else int(draw.integers(60, 300))
    return state[:steps], np.tanh(draw.normal(0, 1, (steps, 3)))


def _with_two_steps(draw: np.random.Generator) -> tuple[Any, Any]:
    """Walk, and once for two steps only."""
    state, action = _walking(draw)
    return (state, action) if draw.random() < 0.9 else (state[60:62], action[60:62])


@pytest.mark.parametrize(
    ("motion", "accepted"),
    [(one, ()) for one in (_levels, _reaching, _walking, _waving, _opening, _turning, _ending_early)]
    + [(_with_two_steps, ("EPI004",))],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_robots_of_other_kinds_raise_no_alarm(motion: Any, accepted: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    episodes = [[one.astype(np.float32) for one in motion(draw)] for _ in range(60)]
    _, report = _reported(_rows_of(episodes), rate=50)
    assert [one.message for one in report.findings if one.rule not in accepted] == []


def test_a_joint_may_move_little_in_one_episode(tmp_path: Path) -> None:
    made = make(Kind(cameras=0, episodes=12, noise=1e-3))
    for name in robot_sets.FEATURES:
        values = made.episodes[4].columns[name]
        noise = made.draw.normal(0, 1e-3, len(values))
        smooth = np.convolve(np.pad(values[:, 1], 8, mode="edge"), np.ones(17) / 17, "valid")
        values[:, 1] = smooth[0] + (smooth - smooth[0]) / 55 + noise
    assert rbtool.check(write(made, tmp_path / "set")).findings == ()


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set without cameras in which a joint is stuck in episode 3."""
    made = make(Kind(cameras=0))
    DEFECTS["stuck joint"].change(made)
    return write(made, tmp_path_factory.mktemp("stuck") / "set")


def test_a_finding_says_where_how_much_why_and_what_mends_it(stuck: Path, tmp_path: Path) -> None:
    (found,) = rbtool.check(stuck).findings
    assert (found.rule, found.severity, found.episodes) == ("MOT002", "warning", [3])
    assert found.figure is not None
    assert found.threshold == Thresholds().stuck < found.figure
    assert found.why == BY_ID["MOT002"].why
    ((start, stop),) = found.steps
    lengths = [len(one) for one in make(Kind(cameras=0)).episodes]
    assert (start, stop) == (sum(lengths[:3]), sum(lengths[:4]))
    assert shlex.split(found.mend) == ["rbtool", "clean", str(stuck), "DEST", "--drop", "stuck"]


def test_a_converted_set_is_checked_like_its_source(stuck: Path, tmp_path: Path) -> None:
    rbtool.convert(stuck, tmp_path / "set")
    (found,) = rbtool.check(tmp_path / "set").findings
    assert (found.rule, found.episodes) == ("MOT002", [3])
    assert found.mend == f"rbtool clean {tmp_path}/set DEST --drop stuck"


@pytest.mark.parametrize(("profile", "found"), [("form", 0), ("data", 0), ("robot", 1), ("all", 1), (None, 1)])
def test_profiles_choose_the_rules(stuck: Path, profile: Any, found: int) -> None:
    result = rbtool.check(stuck, profile=profile)
    assert len(result.findings) == found
    about = {"form": (), "data": ("data",), "robot": ("robot",)}.get(profile, ("data", "robot"))
    form = rbtool.check(stuck, profile="form").rules
    assert result.rules - form == sum(one.profile in about for one in ENTRIES)


def test_data_without_times_or_cameras_are_no_robots(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated")] * 8)
    data = sum(one.profile == "data" for one in ENTRIES)
    form = rbtool.check(tmp_path / "walks", profile="form").rules
    assert rbtool.check(tmp_path / "walks").rules == form + data


def _without(folder: Path, name: str) -> None:
    next(folder.rglob(name)).unlink()


def _emptied(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and "episodes" in str(path.relative_to(folder)):
            path.write_bytes(b"")


def _with_rows(folder: Path, count: int) -> None:
    path = sorted((folder / "data").rglob("*.parquet"))[0]
    pq.write_table(pq.read_table(path).slice(0, count), path)


def _with_splits(**splits: str) -> Any:
    return edit_json("meta/info.json", lambda info: info.update(splits=splits))


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        (lambda folder: None, "", ""),
        (lambda folder: _without(folder, "*.mp4"), "TED014", "is missing"),
        (lambda folder: _without(folder / "data", "*.parquet"), "TED014", "is missing"),
        (lambda folder: _with_rows(folder, 17), "TED014", "has 17 rows"),
        (lambda folder: (folder / "data/chunk-000/odd.parquet").write_bytes(b"x"), "MET004", "odd.parquet"),
        (edit_json("meta/stats.json", lambda found: found.pop("action")), "MET001", "no statistics of action"),
        (edit_json("meta/info.json", lambda info: info.update(total_tasks=5)), "MET002", "total_tasks 5"),
        (_with_splits(train="0:2"), "MET002", "episode 2: in no split"),
        (_with_splits(train="0:3", val="1:2"), "MET002", "episode 1: in more than one split"),
        (_with_splits(a="0:3", b="4:6", c="5:8"), "MET002", "episodes 4, 5, 6, 7: in a split"),
        (_with_splits(train=f"0:{10**30}"), "MET002", f"episodes 3, 4, 5, 6, 7, 8 and {10**30 - 9:,} more: in a split"),
        (lambda folder: _emptied(folder / "meta"), "TED014", "empty file"),
    ],
)
def test_metadata_are_checked_without_data(tmp_path: Path, version: str, change: Any, rule: str, said: str) -> None:
    folder = write(make(Kind(cameras=1, episodes=3, length=30, version=version)), tmp_path / "set")
    change(folder)
    result = rbtool.check(folder, format="lerobot", data=False)
    assert [(one.rule, said in one.message) for one in result.findings] == [(rule, True)] * bool(rule)
    assert "--no-data" in result.notes[0]


def test_runs_and_means_of_rows_end_with_the_episode() -> None:
    batch = _Batch(np.array([1, 0, 0, 1, 0, 1], bool))
    length, first = batch.longest_run(np.array([0, 1, 1, 1, 1, 0], bool))
    assert (length.tolist(), first.tolist()) == ([2, 2, 0], [1, 3, 5])
    assert batch.smooth(np.array([0.0, 3, 6, 10, 20, 7]), 3).tolist() == [1.5, 3, 4.5, 15, 15, 7]
    assert batch.smooth(np.array([0.0, 3, 6, 10, 20, 7]), 5).tolist() == [3, 3, 3, 15, 15, 7]


def test_a_dataset_is_checked_without_its_rows(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated")] * 3)
    assert rbtool.check(tmp_path / "walks", data=False).findings == ()
    largest = max((tmp_path / "walks").rglob("*.memmap"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    largest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert rbtool.check(tmp_path / "walks", data=False).findings == ()
    largest.write_bytes(data[:-1])
    assert "TED012" in _rules(rbtool.check(tmp_path / "walks", data=False))


@pytest.mark.parametrize("options", [{"full": True}, {"profile": "robot"}])
def test_options_that_need_data_are_refused_without(stuck: Path, options: Any) -> None:
    with pytest.raises(UsageError, match="reads no rows"):
        rbtool.check(stuck, data=False, **options)


def test_thresholds_come_from_a_file(stuck: Path, tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("stuck = 2\n")
    assert "MOT002" not in _rules(rbtool.check(stuck, thresholds=path))
    path.write_text("stuck = 0.01\n")
    (found,) = _of_rule(rbtool.check(stuck, full=True, thresholds=path), "MOT002")
    assert found.mend == f"rbtool clean {stuck} DEST --drop stuck --full --thresholds {path}"
    for text, said in (("stucc = 1", "did you mean"), ("stuck = -1", "positive"), ("stuck =", "TOML")):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            rbtool.check(stuck, thresholds=path)


@pytest.mark.parametrize("length", [81, 92.5])
def test_the_least_length_can_be_given(stuck: Path, length: float) -> None:
    lengths = [len(one) for one in make(Kind(cameras=0)).episodes]
    found = _of_rule(rbtool.check(stuck, thresholds={"length": length}), "EPI004")
    assert [[*one.episodes] for one in found] == [[at for at, steps in enumerate(lengths) if steps < length]]


def test_findings_of_a_baseline_are_accepted(stuck: Path, tmp_path: Path) -> None:
    path = tmp_path / "reviewed.json"
    path.write_text(json.dumps(to_document(rbtool.check(stuck))))
    result = rbtool.check(stuck, baseline=path)
    assert (result.findings, result.warnings, result.notes[-1]) == ((), 0, f"1 finding of {path} left out")
    path.write_text(json.dumps({"kind": "check", "findings": [{"rule": "MOT002", "message": "another"}]}))
    assert len(rbtool.check(stuck, baseline=path).findings) == 1


@pytest.mark.parametrize(
    ("change", "left"),
    [({}, 0), ({"name": "x", "why": "x", "mend": "x", "threshold": 9}, 0), ({"rule": "MOT003"}, 1), ({"figure": 9}, 1),
     ({"episodes": [0]}, 1), ({"components": []}, 1), ({"steps": [], "episodes": [], "components": []}, 1)],
)  # fmt: skip
def test_a_finding_of_a_baseline_may_be_worded_differently(
    stuck: Path, tmp_path: Path, change: dict[str, Any], left: int
) -> None:
    path = tmp_path / "reviewed.json"
    document = to_document(rbtool.check(stuck))
    (found,) = document["findings"]
    assert found["components"]
    assert found["episodes"] != [0]
    path.write_text(json.dumps(document | {"findings": [found | {"message": "as another version said it"} | change]}))
    assert len(rbtool.check(stuck, baseline=path).findings) == left


def test_findings_without_places_are_accepted_by_their_messages(tmp_path: Path) -> None:
    place, path = write_defect("total frames", tmp_path / "set"), tmp_path / "reviewed.json"
    document = to_document(rbtool.check(place))
    bare = [one for one in document["findings"] if not (one["steps"] or one["episodes"] or one["components"])]
    assert bare
    path.write_text(json.dumps(document | {"findings": [one | {"message": "another"} for one in bare]}))
    assert len(rbtool.check(place, baseline=path).findings) == len(document["findings"])


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "check", "findings": [1]}', "no JSON", None])
def test_a_file_without_findings_is_no_baseline(stuck: Path, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "reviewed.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"^the baseline \S+reviewed.json [^']*$"):
        rbtool.check(stuck, baseline=path)


def test_findings_do_not_depend_on_how_rows_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(Kind(cameras=0, episodes=6))
    DEFECTS["action spike"].change(made)
    rbtool.convert(write(made, tmp_path / "raw"), tmp_path / "set")
    whole = rbtool.check(tmp_path / "set").findings
    see = mock.Mock(side_effect=RowRules.see)
    monkeypatch.setattr(RowRules, "see", lambda rules, rows: see(rules, rows))

    def chunks(reader: PackedReader) -> Iterator[tuple[int, int]]:
        steps = reader.manifest.steps
        return ((start, min(start + 37, steps)) for start in range(0, steps, 37))

    monkeypatch.setattr(PackedReader, "chunks", chunks)
    cut = rbtool.check(tmp_path / "set").findings
    assert max(len(call.args[1]) for call in see.call_args_list) <= 37
    assert [(one.rule, one.episodes, one.steps) for one in cut] == [
        (one.rule, one.episodes, one.steps) for one in whole
    ]
    assert {one.rule for one in whole} == {"MOT001"}


@pytest.mark.parametrize(("most", "noted"), [(60, True), (10_000, False)])
def test_pictures_of_so_many_frames_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, noted: bool
) -> None:
    monkeypatch.setattr("rbtool.core.doctor.doctor.MOST_PICTURES", most)
    take = mock.Mock(side_effect=Eye.take)
    monkeypatch.setattr(Eye, "take", lambda eye, first, images: take(eye, first, images))
    folder = write(make(Kind(cameras=1, episodes=4, length=40)), tmp_path / "set")
    notes = rbtool.check(folder, full=True).notes
    seen = sum(len(call.args[2]) for call in take.call_args_list)
    assert (0 < seen <= most, any("frames were compared" in one for one in notes)) == (True, noted)


def test_frames_of_rows_are_kept_in_few_bytes() -> None:
    for frames in (np.arange(7, 90), np.repeat(np.arange(5), 3), np.array([4]), np.array([9, 2, 2, 40])):
        kept = Frames.of(frames)
        assert kept.array().tolist() == frames.tolist()
    assert Frames.of(np.arange(100_000) * 2).others is None


def test_every_threshold_decides_a_rule() -> None:
    names = {one.name for one in fields(Thresholds)}
    assert {name for one in ENTRIES for name in one.thresholds} == names
    for source in ("rows", "pictures", "doctor"):
        text = Path(rbtool.__file__).with_name("core").joinpath(f"doctor/{source}.py").read_text()
        names -= {name for name in names if f"limits.{name}" in text}
    assert not names


def test_an_episode_may_have_two_tasks(tmp_path: Path) -> None:
    path = write(make(Kind(cameras=0, version="v2.1")), tmp_path / "set")
    meta = path / "meta"
    tasks, episodes = ((meta / f"{name}.jsonl").read_text().splitlines() for name in ("tasks", "episodes"))
    added, entry = {"task_index": len(tasks), "task": "wave to the camera"}, json.loads(episodes[2])
    entry["tasks"].append(added["task"])
    (meta / "tasks.jsonl").write_text("\n".join([*tasks, json.dumps(added)]))
    (meta / "episodes.jsonl").write_text("\n".join([*episodes[:2], json.dumps(entry), *episodes[3:]]))
    about = json.loads((meta / "info.json").read_text()) | {"total_tasks": len(tasks) + 1}
    (meta / "info.json").write_text(json.dumps(about))
    (file,) = path.glob("data/*/episode_000002.parquet")
    rows = pq.read_table(file)
    numbers = rows["task_index"].to_numpy().copy()
    for first, found in ((len(numbers) // 2, set()), (0, {"MET003"})):  # the second half has the other task, then all
        numbers[first:] = len(tasks)
        place = rows.column_names.index("task_index")
        pq.write_table(rows.set_column(place, "task_index", pa.array(numbers)), file)
        assert _rules(rbtool.check(path)) == found


def test_every_rule_has_a_name_of_its_own_and_says_why() -> None:
    assert len({one.name for one in ENTRIES}) == len(BY_ID) == len(ENTRIES)
    assert all(one.why and one.mend and one.checks.endswith(".") for one in ENTRIES)
    assert [one.rule for one in ENTRIES] == sorted(one.rule for one in ENTRIES)
    with pytest.raises(KeyError):
        Report(Path(), is_raw=True).add("XXX000", "nothing")


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_sets_are_made_alike_and_differ_by_their_defect_alone(every: int) -> None:
    for name in [*robot_sets.MORE][::every]:
        defect = DEFECTS[name]
        clean, other = make(replace(defect.kind)), make(defect.kind)
        for one, twin in zip(clean.episodes, other.episodes, strict=True):
            assert all(np.array_equal(one.columns[key], twin.columns[key]) for key in one.columns)


# What `clean` makes of findings -------------------------------------------------------------------------

LEFT = frozenset({
    "empty task", "similar tasks", "no task", "other names", "clipped actions", "same cameras", "dead camera",
    "wrong rate", "actions are states", "constant rewards", "early rewards", "early success", "summed rewards",
    "time limits", "near duplicate",
})  # fmt: skip
"""Defects that only their makers can mend, such as texts and rewards, and those that are left out only if asked for."""


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _arguments(cleaned: Path) -> dict[str, Any]:
    """Return the arguments of `clean` that the provenance of a dataset states."""
    (step,) = [one for one in rbtool.inspect(cleaned).provenance if one.verb == "clean"]
    return dict(step.arguments)


CLEANED = ("near duplicate", "equal times", "idle start", "short video", "summed rewards")


@pytest.mark.parametrize("name", _quick_or_slow(DEFECTS, CLEANED))
def test_clean_mends_a_defect_or_says_why_not(name: str, tmp_path: Path) -> None:
    source = write_defect(name, tmp_path / "set")
    before = _files(source)
    planned = rbtool.clean(source, tmp_path / "clean", dry_run=True)
    assert not (tmp_path / "clean").exists()
    done = rbtool.clean(source, tmp_path / "clean")
    assert _files(source) == before
    counts = (done.steps, done.episodes, done.changes, done.remaining, done.dropped)
    assert counts == (planned.steps, planned.episodes, planned.changes, planned.remaining, planned.dropped)
    found = _rules(rbtool.check(tmp_path / "clean"))
    assert found == {one.rule for one in done.remaining}
    assert all(one.why and one.mend for one in done.remaining)
    assert (name in LEFT) == bool(done.remaining) != bool(done.changes)
    assert _arguments(tmp_path / "clean").get("dropped", {}) == {
        rule: [*numbers] for rule, numbers in done.dropped.items()
    }
    assert {one.rule for one in done.changes if one.what == "drop"} == set(done.dropped)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set without cameras: joint 2 stuck in episode 3, 5 a copy of 1, jitter in 6, long rest at the end of 2."""
    return _several(tmp_path_factory.mktemp("several") / "set", Kind(cameras=0, episodes=12))


def _several(path: Path, kind: Kind) -> Path:
    made = make(kind)
    for name in ("stuck joint", "duplicate", "idle end"):
        DEFECTS[name].change(made)
    made.episodes[6].columns["timestamp"] += made.draw.uniform(-0.004, 0.004, len(made.episodes[6])).astype(np.float32)
    return write(made, path)


@pytest.mark.parametrize(
    ("asked", "dropped", "fixed", "left", "is_raw"),
    [
        ({}, {"EPI001": (5,), "MOT002": (3,)}, ["retime"], set(), True),
        ({}, {"EPI001": (5,), "MOT002": (3,)}, ["retime"], set(), False),
        ({"drop": "duplicate, mot002"}, {"EPI001": (5,), "MOT002": (3,)}, None, {"MOT006", "TIM002"}, False),
        ({"dedupe": "near"}, {"EPI001": (5,)}, None, {"MOT002", "MOT006", "TIM002"}, True),
        ({"trim_idle": True}, {}, None, {"EPI001", "MOT002", "TIM002"}, False),
        ({"fix": ["retime", "stats"]}, {}, ["retime"], {"EPI001", "MOT002", "MOT006"}, True),
        ({"min_length": 85, "drop": ["stuck"]}, {"EPI004": (3, 8, 9), "MOT002": (3,)}, None,
         {"EPI001", "MOT006", "TIM002"}, True),
    ],
)  # fmt: skip
def test_clean_does_what_is_asked_for_and_says_what_is_left(
    several: Path, tmp_path: Path, is_raw: bool, asked: Any, dropped: Any, fixed: Any, left: set[str]
) -> None:
    source = several
    if not is_raw:
        rbtool.convert(several, tmp_path / "source")
        source = tmp_path / "source"
    done = rbtool.clean(source, tmp_path / "clean", num_workers=0, **asked)
    assert done.dropped == dropped
    assert {one.rule for one in done.remaining} == left
    gone = {number for numbers in dropped.values() for number in numbers}
    rows = rbtool.load_dataset(tmp_path / "clean")[:]
    numbers, counts = rows["episode"].unique(return_counts=True)
    assert set(numbers.tolist()) == set(range(12)) - gone
    arguments = _arguments(tmp_path / "clean")
    assert arguments.get("fixed") == fixed
    if fixed:
        np.testing.assert_array_equal(rows["timestamp"], (rows["frame"].numpy() / 30).astype(np.float32))
    trimmed = "trim_idle" in asked or not asked
    assert arguments.get("trimmed") == ({"2": [0, 55]} if trimmed else None)
    assert counts[numbers == 2].item() == (38 if trimmed else 93)
    again = rbtool.clean(source, tmp_path / "clean", num_workers=0, **asked)
    assert (again.already_there, again.dropped) == (True, dropped)
    with pytest.raises(UsageError, match="already exists"):
        rbtool.clean(source, tmp_path / "clean", drop="nan")


def test_clean_leaves_no_statistics_and_totals_of_other_rows(tmp_path: Path) -> None:
    rbtool.convert(write_defect("total frames", tmp_path / "set"), tmp_path / "ted")
    for source in (tmp_path / "set", tmp_path / "ted"):
        rbtool.clean(source, tmp_path / "clean", min_length=90, force=True)
        kept = tmp_path / "clean/.rbtool/source/meta"
        about = json.loads((kept / "info.json").read_text())
        done = rbtool.inspect(tmp_path / "clean")
        assert (about["total_frames"], about["total_episodes"]) == (done.steps, done.episodes)
        assert not (kept / "stats.json").exists()
        assert rbtool.check(tmp_path / "clean").errors == 0
    assert (tmp_path / "ted/.rbtool/source/meta/stats.json").exists()
    assert rbtool.check(tmp_path / "ted", profile="form").errors == 0


def _with_copy(**kind: Any) -> robot_sets.RobotSet:
    """Make a set whose episode 5 is a copy of episode 1."""
    made = make(Kind(**kind))
    made.episodes[5] = copy.deepcopy(made.episodes[1])
    return made


@pytest.mark.parametrize("is_raw", [True, False])
def test_clean_states_the_episodes_that_are_left(tmp_path: Path, is_raw: bool) -> None:
    made = make(Kind(cameras=0, episodes=6, version="v2.1"))
    DEFECTS["idle end"].change(made)
    source = write(made, tmp_path / "set")
    if not is_raw:
        rbtool.convert(source, tmp_path / "ted")
        source = tmp_path / "ted"
    done = rbtool.clean(source, tmp_path / "clean", min_length=min(map(len, made.episodes)) + 1, trim_idle=True)
    assert done.dropped["EPI004"]
    text = (tmp_path / "clean/.rbtool/source/meta/episodes.jsonl").read_text()
    stated = {row["episode_index"]: (row["length"], row["tasks"]) for row in map(json.loads, text.splitlines())}
    numbers, lengths = rbtool.load_dataset(tmp_path / "clean")[:]["episode"].unique(return_counts=True)
    assert stated == {
        number: (length, [made.episodes[number].task])
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
    }
    assert rbtool.check(tmp_path / "clean").errors == 0


@pytest.mark.parametrize("wrong", [None, 2])
def test_statistics_of_long_episodes_are_compared_as_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    monkeypatch.setattr("rbtool.core.doctor.rows._MOST_HELD", 40)
    see = RowRules.see

    def cut(rules: RowRules, rows: Rows) -> None:
        for start in range(0, len(rows), 16):
            part = slice(start, start + 16)
            columns = {key: values[part] for key, values in rows.columns.items()}
            marks = (one[part] for one in (rows.first, rows.last, rows.episode, rows.explicit))
            see(rules, Rows(rows.start + start, columns, *marks))

    monkeypatch.setattr(RowRules, "see", cut)
    made = make(Kind(cameras=0, episodes=6, version="v2.1"))
    path = write(made, tmp_path / "set")
    (path / "meta/stats.json").unlink()
    found = [{name: statistics(one.columns[name]) for name in robot_sets.FEATURES} for one in made.episodes]
    lines = [{"episode_index": at, "stats": one} for at, one in enumerate(found)]
    if wrong is not None:
        found[wrong]["action"]["mean"][0] += 1
    (path / "meta/episodes_stats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = _of_rule(rbtool.check(path), "MET001")
    assert [[*one.episodes] for one in found] == [[wrong]] * (wrong is not None)


def test_clean_keeps_the_copy_about_which_nothing_is_found(tmp_path: Path) -> None:
    made = _with_copy(cameras=0)
    made.episodes[1].columns["timestamp"][40:] += 0.5
    done = rbtool.clean(write(made, tmp_path / "set"), tmp_path / "clean", dry_run=True)
    assert done.dropped == {"EPI001": (1,), "TIM001": (1,)}


@pytest.mark.parametrize(
    ("cameras", "change", "said", "is_raw"),
    [
        (1, lambda one: [array.__iadd__(np.uint8(9)) for array in one.pictures.values()], "with other pictures", True),
        (1, lambda one: setattr(one, "task", "wave to the camera"), "with another task", False),
        (0, lambda one: one.columns["next.reward"].__imul__(2), "with other rewards, flags or further values", True),
        (0, lambda one: one.columns["next.reward"].__imul__(2), "with other rewards, flags or further values", False),
        (1, lambda one: None, "", False),
    ],
)
def test_a_copy_is_the_same_in_all_that_is_stored(
    tmp_path: Path, cameras: int, change: Any, said: str, is_raw: bool
) -> None:
    made = _with_copy(cameras=cameras, rewards=not cameras)
    change(made.episodes[5])
    path = write(made, tmp_path / "set")
    if not is_raw:
        rbtool.convert(path, tmp_path / "ted")
        path = tmp_path / "ted"
    (found,) = rbtool.check(path).findings
    assert (found.rule, found.episodes) == ("EPI009" if said else "EPI001", [5])
    assert said in found.message
    assert rbtool.clean(path, tmp_path / "clean", dry_run=True).dropped == ({} if said else {"EPI001": (5,)})


@pytest.mark.parametrize("images", [True, False])
def test_copies_are_found_by_pictures_and_whole_numbers(tmp_path: Path, images: bool) -> None:
    shape = (20, 24, 3) if images else (2,)
    draws = [np.random.default_rng(number % 4) for number in range(6)]  # 4 and 5 are copies
    episodes = [(draw.integers(0, 255, (30, *shape), np.uint8), draw.integers(0, 4, 30)) for draw in draws]
    episodes[5][1][7] += 1  # but for an action
    rules, report = _reported(_rows_of(episodes))
    rules.report_copies({}, {}, lambda one, other: True)
    assert [(one.rule, *one.episodes) for one in report.findings] == [("EPI001", 4), ("EPI003", 1)] * images


@pytest.mark.parametrize("profile", ["all", "data"])
def test_frames_of_possible_copies_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Any) -> None:
    monkeypatch.setattr("rbtool.core.verbs.check._SAMPLED_FRAMES", 0)
    monkeypatch.setattr("rbtool.core.verbs.check._SAMPLED_PIXELS", 0)
    path = write(_with_copy(cameras=1), tmp_path / "set")
    found = [one for one in rbtool.check(path, profile=profile).findings if one.rule.startswith("EPI")]
    assert [one.rule for one in found] == ["EPI001" if profile == "all" else "EPI009"]
    assert ("pictures were not compared" in found[0].message) == (profile == "data")


@pytest.mark.parametrize(("lead", "tail"), [(30, 21), (21, 30), (28, 28)])
def test_both_ends_are_cut_off_at_once(tmp_path: Path, lead: int, tail: int) -> None:
    made = make(Kind(cameras=0, episodes=12))
    columns = made.episodes[2].columns
    for name in robot_sets.FEATURES:
        columns[name] = columns[name][:90]
        columns[name][:lead], columns[name][-tail:] = columns[name][lead], columns[name][-tail]
    columns["timestamp"] = columns["timestamp"][:90]
    done = rbtool.clean(write(made, tmp_path / "set"), tmp_path / "clean", trim_idle=True)
    trimmed = _arguments(tmp_path / "clean")["trimmed"]["2"]
    assert done.steps == sum(map(len, made.episodes)) - sum(trimmed)
    assert min(trimmed) > 15
    assert "MOT006" not in _rules(rbtool.check(tmp_path / "clean"))


@pytest.mark.parametrize(("every", "gap"), [(2.0, 0.0), (1.0, 0.05)])
def test_clean_sets_no_times_by_a_rate_that_may_be_wrong_nor_over_gaps(
    tmp_path: Path, every: float, gap: float
) -> None:
    made = make(Kind(cameras=0, episodes=12))
    for at, one in enumerate(made.episodes):
        time = one.columns["timestamp"] * every + made.draw.uniform(-0.004, 0.004, len(one))
        time[50:] += gap * (at < 8)
        one.columns["timestamp"] = time.astype(np.float32)
    source = write(made, tmp_path / "raw")
    done = rbtool.clean(source, tmp_path / "clean", dry_run=True)
    assert {one.rule for one in done.remaining} == {"TIM002", "TIM001" if gap else "TIM005"}
    assert not done.changes
    assert {one.rule for one in rbtool.clean(source, tmp_path / "clean", fix="retime", dry_run=True).changes} >= {
        "TIM002"
    }


def test_clean_looks_for_what_it_is_asked_to_leave_out_where_no_rate_is_stated(tmp_path: Path) -> None:
    made = make(Kind(cameras=0, episodes=12))
    DEFECTS["stuck joint"].change(made)
    parts = [np.concatenate([one.columns[name] for one in made.episodes]) for name in robot_sets.FEATURES]
    ends = np.isin(np.arange(len(parts[0])), np.cumsum([len(one) for one in made.episodes]) - 1)
    with h5py.File(tmp_path / "set.hdf5", "w") as file:
        for name, values in zip(("observations", "actions"), parts, strict=True):
            file[name] = values
        file["rewards"] = np.arange(len(ends), dtype=np.float32)
        file["terminals"], file["timeouts"] = ends & False, ends
    (found,) = _of_rule(rbtool.check(tmp_path / "set.hdf5", profile="robot"), "MOT002")
    assert found.mend.endswith("DEST --drop stuck")
    done = rbtool.clean(tmp_path / "set.hdf5", tmp_path / "clean", drop="stuck", dry_run=True)
    assert done.dropped == {"MOT002": (3,)}


def test_clean_does_not_take_a_result_of_other_options_of_the_reader_for_its_own(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "set.hdf5", "w") as file:
        for name in ("observations", "next_observations", "actions"):
            file[name] = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        file["rewards"], file["terminals"] = np.zeros(40, np.float32), np.zeros(40, bool)
    made = [
        rbtool.clean(tmp_path / "set.hdf5", tmp_path / "clean", drop="short", num_workers=0, horizon=10).already_there
        for _ in range(2)
    ]
    assert made == [False, True]
    with pytest.raises(UsageError, match="already exists"):
        rbtool.clean(tmp_path / "set.hdf5", tmp_path / "clean", drop="short", num_workers=0, horizon=20)


def test_the_parts_of_a_very_long_episode_are_no_episodes() -> None:
    draw = np.random.default_rng(0)
    lengths = [_MOST_HELD + 60, *[3000] * 11]
    ends = np.cumsum(lengths)

    def block(start: int, stop: int) -> Rows:
        at = np.arange(start, stop)
        columns = {key: draw.normal(size=(len(at), 3)).astype(np.float32) for key in KEYS}
        episode = np.searchsorted(ends, at, side="right")
        return Rows(start, columns, np.isin(at, [0, *ends]), np.isin(at, ends - 1), episode, at < 0)

    edges = sorted({0, 50, _MOST_HELD + 50, *ends.tolist()})
    _, report = _reported(block(start, stop) for start, stop in pairwise(edges))
    assert [(one.rule, *one.episodes, one.figure) for one in report.findings] == [("EPI006", 0, lengths[0])]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"drop": "stucc"}, "did you mean 'stuck'"), ({"drop": "MET001"}, "not about single episodes"),
        ({"fix": "total"}, "did you mean 'totals'"), ({"dedupe": "all"}, "expected exact or near"),
        ({"min_length": 10_000}, "no episode of .* would be left"), ({"horizon": 3}, "horizon"),
    ],
)  # fmt: skip
def test_clean_refuses_what_makes_no_sense(stuck: Path, tmp_path: Path, asked: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rbtool.clean(stuck, tmp_path / "clean", **asked)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_reported_with_a_path_that_is_there(
    several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rbtool.core.format.fs.free_space", lambda path: 1_000)
    with pytest.raises(rbtool.OutOfSpaceError, match=rf"^{tmp_path} has 1,000 bytes free"):
        rbtool.clean(several, tmp_path / "clean")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dry_run", [True, False])
def test_clean_refuses_damage_that_no_episode_is_named_for(tmp_path: Path, dry_run: bool) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated")] * 3)
    path = tmp_path / "walks/action.memmap"
    data = bytearray(path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (found,) = _of_rule(rbtool.check(tmp_path / "walks"), "TED013")
    assert found.mend.endswith(f"rbtool convert {tmp_path}/walks DEST --skip-bad")
    with pytest.raises(CorruptDataError, match="is damaged") as caught:
        rbtool.clean(tmp_path / "walks", tmp_path / "clean", dry_run=dry_run)
    assert "--skip-bad keeps" in caught.value.hint
    assert not (tmp_path / "clean").exists()


def test_damaged_episodes_can_be_left_out(tmp_path: Path) -> None:
    source = write(make(Kind(cameras=0, episodes=4, length=30, version="v2.1")), tmp_path / "set")
    (source / "data/chunk-000/episode_000002.parquet").write_bytes(b"no rows")
    (found,) = rbtool.check(source).findings
    assert (found.rule, found.mend) == ("TED014", f"rbtool clean {source} DEST --drop unreadable")
    assert rbtool.clean(source, tmp_path / "clean", drop="unreadable").episodes == 3


def test_clean_names_are_in_its_help() -> None:
    said = CleanOptions.described()["drop"].help
    assert re.findall(r"[a-z-]+", said.partition("name: ")[2]) == [*DROPS]


@pytest.mark.parametrize("older", [False, True])
def test_an_interrupted_clean_resumes(
    several: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    older: bool,
) -> None:
    if older:
        kind = Kind(cameras=1, episodes=12, version="v2.1")
        several = _several(tmp_path_factory.mktemp("older") / "set", kind)
    whole = rbtool.clean(several, tmp_path / "whole", num_workers=0)
    entry, seen = run.journal_entry, list[int]()

    def stopped(index: int, finished: Any) -> Any:
        if seen:
            raise KeyboardInterrupt
        seen.append(index)
        return entry(index, finished)

    monkeypatch.setattr(run, "journal_entry", stopped)
    with pytest.raises(KeyboardInterrupt) as caught:
        rbtool.clean(several, tmp_path / "clean", num_workers=0)
    assert "add --resume" in " ".join(caught.value.__notes__)
    assert not (tmp_path / "clean").exists()
    with pytest.raises(UsageError, match="another one: work differ"):
        rbtool.clean(several, tmp_path / "clean", num_workers=0, drop="stuck", resume=True)
    monkeypatch.setattr(run, "journal_entry", lambda index, finished: (seen.append(index), entry(index, finished))[1])
    done = rbtool.clean(several, tmp_path / "clean", num_workers=0, resume=True)
    assert done.content_digest == whole.content_digest
    assert _files(tmp_path / "clean/.rbtool/source") == _files(tmp_path / "whole/.rbtool/source")
    assert len(seen) == len(set(seen)) > 1
    assert {one.name for one in tmp_path.iterdir()} == {"whole", "clean"}
