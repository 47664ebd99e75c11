"""What would be stored wrong is refused, or left out by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from scripted_envs import CountingEnv, Plan, Recorded, ScriptedEnv, run

import rbtool
from rbtool.core.format import fs
from rbtool.core.recording.layout import InfoRows
from rbtool.core.recording.recorder import EpisodeBuffer
from rbtool.core.recording.spaces import space_encoder
from rbtool.core.verbs.record import record

BOX = spaces.Box(-1, 1, (2,), np.float32)
PLAN: Plan = ((3, "terminated"),)


def scripted() -> ScriptedEnv:
    return ScriptedEnv(BOX, spaces.Discrete(2), PLAN)


def test_a_step_that_was_interrupted_leaves_no_info() -> None:
    infos = InfoRows()
    for row in (1, 2, 3):
        infos.put(row, {"x": row})
    infos.put(3, {"late": 1})
    columns = infos.take(2)
    assert [key[-1] for key in columns] == ["x"]
    assert columns["info", "x"].values.tolist() == [0, 1, 2]
    assert columns["info", "x"].present.tolist() == [False, True, True]


def test_an_info_that_cannot_be_read_shifts_no_row() -> None:
    class Bad:
        def __array__(self, *given: Any, **named: Any) -> Any:
            raise RuntimeError("no array")

    buffer = EpisodeBuffer(space_encoder("o", BOX, "observation"), space_encoder("a", spaces.Discrete(2), "action"))
    buffer.begin(BOX.sample(), {})
    buffer.act(0)
    buffer.observe(BOX.sample(), 1.0, False, False, {"x": 1})
    buffer.act(1)
    with pytest.raises(RuntimeError, match="no array"):
        buffer.observe(BOX.sample(), 2.0, False, False, {"x": 2, "bad": [Bad()]})
    raw = buffer.take()
    assert raw.length == 1
    assert raw.infos["info", "x"].values.tolist() == [0, 1]
    assert raw.infos["info", "x"].present.tolist() == [False, True]


class Blind(CountingEnv):
    """Has no frame for the steps in `blind`."""

    render_mode = "rgb_array"

    def __init__(self, blind: set[int]) -> None:
        super().__init__(0, (4,))
        self._blind, self._frames = blind, -1

    def render(self) -> Any:
        self._frames += 1
        return None if self._frames in self._blind else np.full((2, 2, 3), self._frames, np.uint8)


@pytest.mark.parametrize("blind", [{0}, {2}, {0, 1, 2, 3, 4}])
def test_a_step_without_a_frame_is_refused(tmp_path: Path, blind: set[int]) -> None:
    with (
        pytest.raises(rbtool.SchemaError, match="expected one for each step"),
        rbtool.RecordEpisodes(Blind(blind), tmp_path / "d", render=True) as recording,
    ):
        run(recording, 1)
    if blind == {2}:
        assert rbtool.repair(tmp_path / "d").steps == 1


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1 << 64, 1.5])
def test_a_seed_that_cannot_be_stored_is_refused_first(tmp_path: Path, seed: Any) -> None:
    with rbtool.RecordEpisodes(scripted(), tmp_path / "d") as recording:
        with pytest.raises(rbtool.UsageError, match="the seed is"):
            recording.reset(seed=seed)
        run(recording, 1)
    assert Recorded(tmp_path / "d").table.seed.tolist() == [0]


def test_numbers_follow_the_highest_one(tmp_path: Path) -> None:
    first = rbtool.RecordEpisodes(scripted(), tmp_path / "d")
    run(first, 1)
    writer = first.recorder.writer
    buffer = EpisodeBuffer(
        space_encoder("observation", BOX, "observation"), space_encoder("action", spaces.Discrete(2), "action"),
        infos=False,
    )  # fmt: skip
    buffer.begin(BOX.sample(), {})
    buffer.act(0)
    buffer.observe(BOX.sample(), 1.0, True, False, {})
    writer.add(buffer.take(), 4)
    first.close()
    with rbtool.RecordEpisodes(scripted(), tmp_path / "d", resume=True) as recording:
        run(recording, 2)
    assert sorted(Recorded(tmp_path / "d").table.episode.tolist()) == [0, 4, 5, 6]


def test_another_environment_of_the_same_spaces_cannot_continue(tmp_path: Path) -> None:
    one = rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d")
    run(one, 1)
    one.close()
    for other in ("MountainCar-v0", "Acrobot-v1"):
        with pytest.raises(rbtool.UsageError, match="was recorded from CartPole-v1, expected the same"):
            rbtool.RecordEpisodes(gymnasium.make(other), tmp_path / "d", resume=True)
    rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d", resume=True).finish()


def zero(observation: Any) -> int:
    return 0


def interrupted(dest: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Leave a recording of CartPole with the arguments of the verb, and two of four episodes."""

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rbtool.RecordEpisodes, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            record("CartPole-v1", dest, episodes=2, seed=3, max_steps=5, **options)


@pytest.mark.parametrize("other", [{"policy": zero}, {"max_steps": 6}, {"seed": 4}, {"render": True}])
def test_other_arguments_cannot_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    interrupted(tmp_path / "d", monkeypatch)
    with pytest.raises(rbtool.UsageError, match="expected the same"):
        record("CartPole-v1", tmp_path / "d", resume=True, **{"episodes": 4, "max_steps": 5, **other})
    assert rbtool.repair(tmp_path / "d").episodes == 2


def test_more_episodes_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "d", monkeypatch)
    record("CartPole-v1", tmp_path / "d", episodes=4, max_steps=5, resume=True)
    recorded = Recorded(tmp_path / "d")
    assert recorded.table.seed.tolist() == [3, 4, 5, 6]
    assert recorded.manifest.provenance[0].arguments["episodes"] == 4


def test_episodes_that_are_there_already(tmp_path: Path) -> None:
    made = record("CartPole-v1", tmp_path / "d", episodes=3, seed=3, max_steps=5)
    for episodes in (3, 2):
        again = record("CartPole-v1", tmp_path / "d", episodes=episodes, seed=3, max_steps=5, resume=True)
        assert (again.already_there, again.episodes, again.content_digest) == (True, 3, made.content_digest)
    others = {"episodes": (4, "finished dataset"), "seed": (4, "the same"), "max_steps": (6, "the same")}
    for name, (other, said) in others.items():
        with pytest.raises(rbtool.UsageError, match=said):
            record(
                "CartPole-v1", tmp_path / "d", resume=True, **{"episodes": 3, "max_steps": 5, "seed": 3, name: other}
            )
    with pytest.raises(rbtool.UsageError, match="exists already"):
        record("CartPole-v1", tmp_path / "d", episodes=3, seed=3, max_steps=5)
    rbtool.convert(tmp_path / "d", tmp_path / "copy", layout="packed")  # which is no recording
    with pytest.raises(rbtool.UsageError, match="finished dataset"):
        record("CartPole-v1", tmp_path / "copy", episodes=3, seed=3, max_steps=5, resume=True)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1, 1 << 63, (1 << 64) - 1], [1, 1 << 63, (1 << 64) - 1]),
        ([-1, 5, 1 << 63], [-1, 5, 0]),
        ([1 << 63, 1 << 63, -1], [1 << 63, 1 << 63, 0]),
    ],
)
def test_large_integers_are_kept_or_named(values: list[int], kept: list[int]) -> None:
    infos = InfoRows()
    for row, value in enumerate(values):
        infos.put(row, {"x": value})
    column = infos.take(2)["info", "x"]
    assert column.values.tolist() == kept
    assert column.values.dtype.kind in "iu"
    assert ("info.x" in infos.dropped) == (kept != values)


@pytest.mark.parametrize(
    ("value", "kept"), [([1, 1 << 63], True), ([(1 << 53) + 1, 0.5], False), ([-1, 1 << 63], False), ([1e300, 2], True)]
)
def test_lists_of_large_integers_are_kept_or_named(value: list[Any], kept: bool) -> None:
    infos = InfoRows()
    infos.put(0, {"x": value})
    columns = infos.take(0)
    assert [column.values[0].tolist() for column in columns.values()] == ([value] if kept else [])
    assert ("info.x" in infos.dropped) != kept


@pytest.mark.parametrize("reward", [(1 << 53) + 1, np.uint64((1 << 64) - 1), np.array([(1 << 60) + 1])])
def test_a_reward_that_would_be_rounded_is_refused(reward: Any) -> None:
    buffer = EpisodeBuffer(space_encoder("o", BOX, "observation"), space_encoder("a", spaces.Discrete(2), "action"))
    buffer.begin(BOX.sample(), {})
    buffer.act(0)
    with pytest.raises(rbtool.SchemaError, match="is not exact as float64"):
        buffer.observe(BOX.sample(), reward, False, False, {})
    assert buffer.length == 0


def test_a_disk_that_fails_after_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = ScriptedEnv(BOX, spaces.Discrete(2), PLAN, lambda episode, step: {"late": step} if episode else {})
    recording = rbtool.RecordEpisodes(env, tmp_path / "d")
    run(recording, 1)

    def fail(*given: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "sync_folder", fail)
        patch.setattr(fs, "remove", fail)
        with pytest.raises(OSError, match="Input/output"):
            run(recording, 1)
    run(recording, 2)
    recording.finish()
    assert Recorded(tmp_path / "d").table.length.tolist() == [3, 3, 3]
    assert not rbtool.check(tmp_path / "d").errors


@pytest.mark.parametrize("name", ["CartPole", "gymnasium:CartPole", "CartPole-v9", "CartPol"])
def test_an_environment_without_its_version(tmp_path: Path, name: str) -> None:
    with pytest.raises(rbtool.UsageError, match="there is no environment") as caught:
        record(name, tmp_path / "d", episodes=1)
    assert "CartPol" in f"{caught.value}{caught.value.hint}"
    assert not (tmp_path / "d").exists()


def test_statistics_are_those_of_the_episode_that_ended(tmp_path: Path) -> None:
    makers = [functools.partial(CountingEnv, lane, (3, 2)) for lane in range(2)]
    env = RecordEpisodeStatistics(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        recording.reset(seed=0)
        for _ in range(8):
            recording.step(np.zeros(2, np.int64))
    recorded = Recorded(tmp_path / "d")
    for number in range(4):
        columns = recorded.episode(number)
        length = len(columns["next.reward"])
        assert columns["next.info.episode.l_present"].reshape(length).tolist() == [False] * (length - 1) + [True]
        assert columns["next.info.episode.r"].reshape(length)[-1] == columns["next.reward"].sum()
        assert not columns["info.episode.l_present"].any()


class Reusing(CountingEnv):
    """Returns one array for all observations, alone or in a dict."""

    def __init__(self, nested: bool) -> None:
        super().__init__(0, (3, 2))
        self._array, self._nested = np.zeros(3, np.int64), nested
        if nested:
            self.observation_space = spaces.Dict({"a": self.observation_space})

    def _given(self, observation: Any) -> Any:
        self._array[:] = observation
        return {"a": self._array} if self._nested else self._array

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return self._given(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return self._given(observation), *rest


@pytest.mark.parametrize("nested", [False, True])
def test_a_last_observation_that_the_reset_overwrote_is_refused(tmp_path: Path, nested: bool) -> None:
    env = SyncVectorEnv([functools.partial(Reusing, nested)], autoreset_mode=AutoresetMode.SAME_STEP)
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        recording.reset(seed=0)
        for _ in range(2):
            recording.step(np.zeros(1, np.int64))
        with pytest.raises(rbtool.SchemaError, match="its reset overwrote the episode's last observation"):
            recording.step(np.zeros(1, np.int64))
    assert Recorded(tmp_path / "d").table.length.tolist() == [2]


def test_a_policy_that_was_edited_cannot_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.py").write_text("def act(observation):\n    return 0\n")
    interrupted(tmp_path / "d", monkeypatch, policy=f"{tmp_path}/p.py:act")
    (tmp_path / "p.py").write_text("def act(observation):\n    return 1\n")
    with pytest.raises(rbtool.UsageError, match="another content of the files"):
        record("CartPole-v1", tmp_path / "d", episodes=4, max_steps=5, resume=True, policy=f"{tmp_path}/p.py:act")


class BlindVector(SyncVectorEnv):
    """Has no frames when it is rendered for the fifth time, where the first environment was reset."""

    rendered = 0

    def render(self) -> Any:
        self.rendered += 1
        return None if self.rendered == 5 else (np.zeros((2, 2, 3), np.uint8),)


def test_no_episode_starts_in_the_middle_after_an_error(tmp_path: Path) -> None:
    env = BlindVector([functools.partial(CountingEnv, 0, (3, 3))], autoreset_mode=AutoresetMode.NEXT_STEP)
    env.render_mode = "rgb_array"
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d", render=True) as recording:
        recording.reset(seed=0)
        for _ in range(3):
            recording.step(np.zeros(1, np.int64))
        with pytest.raises(rbtool.SchemaError, match="expected one for each step"):
            recording.step(np.zeros(1, np.int64))
        with pytest.raises(rbtool.UsageError, match="call reset"):
            recording.step(np.zeros(1, np.int64))
    assert Recorded(tmp_path / "d").table.length.tolist() == [3]
