"""What an environment returns is what is stored, for all kinds of spaces and ends of episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_envs import Logged, Plan, Recorded, ScriptedEnv, run, same, value_at

import rbtool

BOX = spaces.Box(-1, 1, (2,), np.float32)
PLAN: Plan = ((3, "terminated"), (1, "truncated"), (5, "both"), (1, "terminated"))
ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


def rows_of(recorded: Recorded, episode: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The root and the next of every row of an episode."""
    columns = recorded.episode(episode)
    length = int(recorded.table.length[episode])
    return [
        (
            {name: rows[row] for name, rows in columns.items() if not name.startswith("next.")},
            {name[5:]: rows[row] for name, rows in columns.items() if name.startswith("next.")},
        )
        for row in range(length)
    ]


def require_logged(recorded: Recorded, log: list[Logged], env: ScriptedEnv, *, cut_off: int | None = None) -> None:
    log = [episode for episode in log if episode.actions]
    assert recorded.table.length.tolist() == [len(episode.actions) for episode in log]
    for number, episode in enumerate(log):
        for step, (root, after) in enumerate(rows_of(recorded, number)):
            assert same(value_at(env.observation_space, "observation", root), episode.observations[step])
            assert same(value_at(env.observation_space, "observation", after), episode.observations[step + 1])
            assert same(value_at(env.action_space, "action", root), episode.actions[step])
            terminated, truncated = episode.flags[step]
            truncated |= number == cut_off and step == len(episode.actions) - 1
            flags = [bool(after[name][0]) for name in ("terminated", "truncated", "done")]
            assert flags == [terminated, truncated, terminated or truncated]
            assert float(after["reward"][0]) == episode.rewards[step]


SPACES: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "scalar": spaces.Box(0, 1, (), np.float64),
    "bytes": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "empty": spaces.Box(0, 1, (0,), np.float32),
    "discrete": spaces.Discrete(5, start=-2),
    "small discrete": spaces.Discrete(5, dtype=np.int32),
    "multi discrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(12),
    "long text": spaces.Text(4000, min_length=0, charset="aé中😀"),
    "dict": spaces.Dict({"a": BOX, "b": spaces.Dict({"c": spaces.Discrete(3), "shape": spaces.Text(3)})}),
    "tuple": spaces.Tuple([spaces.Discrete(4), spaces.Tuple([BOX, spaces.MultiBinary(2)])]),
    "sequence": spaces.Sequence(BOX),
    "stacked": spaces.Sequence(spaces.Dict({"x": BOX, "n": spaces.Discrete(3)}), stack=True),
    "sequence of texts": spaces.Sequence(spaces.Text(300)),
    "sequence of sequences": spaces.Sequence(spaces.Sequence(spaces.Tuple([BOX, spaces.Discrete(2)]))),
    "graph": spaces.Graph(BOX, spaces.Discrete(4)),
    "graph without edges": spaces.Graph(spaces.Discrete(7), None),
    "one of": spaces.OneOf([BOX, spaces.Text(5), spaces.Sequence(spaces.Discrete(3))]),
}


@pytest.mark.parametrize("name", SPACES)
def test_every_space_comes_back_to_the_bit(tmp_path: Path, name: str) -> None:
    env = ScriptedEnv(SPACES[name], spaces.Discrete(2), PLAN)
    env.observation_space.seed(1)
    with rbtool.RecordEpisodes(env, tmp_path / "d") as recording:
        run(recording, 6)
    require_logged(Recorded(tmp_path / "d"), env.log, env)
    assert not rbtool.check(tmp_path / "d").errors  # that padding is zero is a warning


@pytest.mark.parametrize("name", ["tuple", "text", "one of", "bytes"])
def test_every_action_comes_back(tmp_path: Path, name: str) -> None:
    env = ScriptedEnv(BOX, SPACES[name], PLAN)
    with rbtool.RecordEpisodes(env, tmp_path / "d") as recording:
        run(recording, 3)
    require_logged(Recorded(tmp_path / "d"), env.log, env)


LEAVES = st.sampled_from([BOX, *(SPACES[name] for name in ("discrete", "multi binary", "text", "scalar", "empty"))])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
        inner.map(spaces.Sequence),
        st.lists(inner, min_size=1, max_size=2).map(spaces.OneOf),
    ),
    max_leaves=4,
)
PLANS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(sorted(ENDS))), min_size=1, max_size=4)


@settings(max_examples=15)
@given(space=TREES, plan=PLANS, tail=st.integers(0, 3), seed=st.integers(0, 99))
def test_random_spaces_and_episodes(
    tmp_path_factory: pytest.TempPathFactory, space: Any, plan: Plan, tail: int, seed: int
) -> None:
    dest = tmp_path_factory.mktemp("random") / "d"
    env = ScriptedEnv(space, space, [*plan, (4, "terminated")])
    env.observation_space.seed(seed)
    with rbtool.RecordEpisodes(env, dest) as recording:
        run(recording, len(plan), tail=tail)
    recorded = Recorded(dest)
    require_logged(recorded, env.log, env, cut_off=len(plan) if tail else None)
    assert recorded.manifest.boundary.end_of_file == (tail > 0)


def test_seeds_spec_and_spaces_are_recorded(tmp_path: Path) -> None:
    with rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d") as env:
        run(env, 2)
        env.reset()
        for _ in range(3):
            env.step(0)
    recorded = Recorded(tmp_path / "d")
    table, manifest = recorded.table, recorded.manifest
    assert table.has_seed.tolist() == [True, True, False]
    assert table.seed.tolist()[:2] == [0, 1]
    [step] = manifest.provenance
    assert (step.verb, step.arguments["env"]) == ("record", "CartPole-v1")
    assert step.arguments["env_spec"]["max_episode_steps"] == 500
    assert manifest.spaces["action"] == {"type": "Discrete", "dtype": "int64", "n": 2, "start": 0}
    assert manifest.boundary.end_of_file == 1


def test_a_reset_in_the_middle_cuts_an_episode_off(tmp_path: Path) -> None:
    env = ScriptedEnv(BOX, spaces.Discrete(2), [(4, "terminated")])
    with rbtool.RecordEpisodes(env, tmp_path / "d") as recording:
        recording.reset()
        recording.reset()  # no step: no episode
        recording.step(0)
        recording.step(1)
        run(recording, 1)
    recorded = Recorded(tmp_path / "d")
    require_logged(recorded, env.log, env, cut_off=0)
    assert recorded.table.end_reason.tolist() == [3, 0]


def test_batches_of_a_recording(tmp_path: Path) -> None:
    with rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d") as env:
        run(env, 5)
        assert env.episodes == 5
    buffer = rbtool.load_dataset(tmp_path / "d", batch_size=8)
    assert buffer.sample()["next", "observation"].shape == (8, 4)


def test_an_environment_that_reuses_its_arrays(tmp_path: Path) -> None:
    class Reusing(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Box(0, 9, (1,), np.int64), BOX

        def __init__(self) -> None:
            self._array, self._info = np.zeros(1, np.int64), {"seen": np.zeros(2)}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._array[:], self._info["seen"][:] = 0, 0
            return self._array, self._info

        def step(self, action: Any) -> Any:
            self._array += 1
            self._info["seen"] += 1
            action[:] = 7
            return self._array, 0.0, bool(self._array[0] == 3), False, self._info

    with rbtool.RecordEpisodes(Reusing(), tmp_path / "d") as env:
        env.reset()
        for step in range(3):
            env.step(np.full(2, step, np.float32))
    columns = Recorded(tmp_path / "d").columns
    assert columns["observation"].ravel().tolist() == [0, 1, 2]
    assert columns["next.info.seen"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert columns["action"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_an_autoreset_wrapper_inside(tmp_path: Path) -> None:
    env = ScriptedEnv(BOX, spaces.Discrete(2), PLAN)
    with rbtool.RecordEpisodes(gymnasium.wrappers.Autoreset(env), tmp_path / "d") as recording:
        recording.reset()
        for _ in range(3 + 1 + 1 + 1 + 5):  # each boundary takes a step
            recording.step(0)
    require_logged(Recorded(tmp_path / "d"), env.log, env)


def test_frames_are_recorded(tmp_path: Path) -> None:
    class Drawn(ScriptedEnv):
        metadata, render_mode = {"render_modes": ["rgb_array"]}, "rgb_array"

        def render(self) -> Any:
            return np.full((6, 5, 3), 10 * len(self.log) + len(self.log[-1].actions), np.uint8)

    env = Drawn(BOX, spaces.Discrete(2), PLAN)
    with rbtool.RecordEpisodes(env, tmp_path / "d", render=True) as recording:
        run(recording, 2)
    recorded = Recorded(tmp_path / "d")
    assert recorded.columns["pixels"][:, 0, 0, 0].tolist() == [10, 11, 12, 20]
    assert recorded.columns["next.pixels"][:, 5, 4, 2].tolist() == [11, 12, 13, 21]
