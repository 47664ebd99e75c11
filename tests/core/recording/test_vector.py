"""Vector environments: the boundary is where each environment ended, for every autoreset mode."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from scripted_envs import CountingEnv, Recorded

import rbtool
from rbtool.core.recording.environments import WholeInfos

LENGTHS = ((3, 1, 4), (1, 1, 2), (7, 2, 1))
MAKERS = [functools.partial(CountingEnv, number, lengths) for number, lengths in enumerate(LENGTHS)]


def make(kind: str, mode: AutoresetMode, **options: Any) -> VectorEnv[Any, Any, Any]:
    vector: Any = SyncVectorEnv if kind == "sync" else AsyncVectorEnv
    found: VectorEnv[Any, Any, Any] = vector(MAKERS, autoreset_mode=mode, **options)
    return found


def drive(env: VectorEnv[Any, Any, Any], mode: AutoresetMode, steps: int) -> None:
    env.reset(seed=5)
    for step in range(steps):
        _, _, terminated, truncated, _ = env.step(np.full(env.num_envs, step))
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            env.reset(options={"reset_mask": ended})


def require_counted(recorded: Recorded) -> None:
    """Every row is the step that it counts, of the episode and the environment that it names."""
    seen = []
    for row in range(len(recorded.table)):
        columns, length = recorded.episode(row), int(recorded.table.length[row])
        number, episode = (int(one) for one in columns["observation"][0][:2])
        rows = [[number, episode, step] for step in range(length + 1)]
        assert columns["observation"].tolist() == rows[:-1]
        assert columns["next.observation"].tolist() == rows[1:]
        assert columns["next.reward"].ravel().tolist() == [1000 * episode + step for step in range(1, length + 1)]
        assert np.diff(columns["action"]).tolist() == [1] * (length - 1)
        assert columns["info.always"].tolist() == list(range(length))
        assert columns["next.info.always"].tolist() == list(range(1, length + 1))
        planned = LENGTHS[number][episode % 3]
        cut_off = recorded.table.end_reason[row] == 3
        assert length < planned if cut_off else length == planned
        if not cut_off:
            assert columns["next.info.step_present"].tolist() == [False] * (length - 1) + [True]
            assert columns["next.info.at_end.episode"][-1] == episode
            assert bool(columns["next.terminated"][-1, 0]) == (episode % 2 == 0)
        assert columns["next.done"].ravel().tolist() == [False] * (length - 1) + [True]
        seen.append((number, episode))
    assert len(set(seen)) == len(seen)
    for number in range(3):
        mine = [episode for lane, episode in seen if lane == number]
        assert mine == list(range(len(mine)))


MODES = list(AutoresetMode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_sync_environments(tmp_path: Path, mode: AutoresetMode) -> None:
    with rbtool.RecordVectorEpisodes(make("sync", mode), tmp_path / "d") as env:
        drive(env, mode, 30)
    recorded = Recorded(tmp_path / "d")
    require_counted(recorded)
    assert recorded.table.seed[recorded.table.has_seed].tolist() == [6, 5, 7]
    assert recorded.manifest.steps == (90 if mode is not AutoresetMode.NEXT_STEP else 90 - resets(recorded))
    assert not rbtool.check(tmp_path / "d").errors


def resets(recorded: Recorded) -> int:
    """Steps that reset an environment: one after each of its episodes, but for those that end with the recording."""
    ended = recorded.table.end_reason != 3
    return int(ended.sum()) - sum(recorded.episode(row)["action"][-1] == 29 for row in np.flatnonzero(ended))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared", [True, False])
def test_async_environments(tmp_path: Path, mode: AutoresetMode, shared: bool) -> None:
    vector = make("async", mode, shared_memory=shared, copy=not shared)
    with rbtool.RecordVectorEpisodes(vector, tmp_path / "d") as env:
        drive(env, mode, 20)
    require_counted(Recorded(tmp_path / "d"))


def test_arrays_that_the_environments_reuse(tmp_path: Path) -> None:
    mode = AutoresetMode.NEXT_STEP
    with rbtool.RecordVectorEpisodes(make("sync", mode, copy=False), tmp_path / "d") as env:
        drive(env, mode, 20)
    require_counted(Recorded(tmp_path / "d"))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("episodes", [1, 2, 7])
def test_so_many_episodes_of_each(tmp_path: Path, mode: AutoresetMode, episodes: int) -> None:
    with rbtool.RecordVectorEpisodes(make("sync", mode), tmp_path / "d", max_episodes=episodes) as env:
        drive(env, mode, 60)
        assert env.recorder.is_complete
    recorded = Recorded(tmp_path / "d")
    require_counted(recorded)
    first = {int(number): recorded.episode(row)["observation"][0] for row, number in enumerate(recorded.table.episode)}
    assert {number: one.tolist() for number, one in first.items()} == {
        number: [number % 3, number // 3, 0] for number in range(episodes)
    }


def test_nested_spaces(tmp_path: Path) -> None:
    class Named(CountingEnv):
        def __init__(self, number: int, lengths: Any) -> None:
            super().__init__(number, lengths)
            counts = self.observation_space
            self.observation_space = spaces.Dict(  # type: ignore[assignment]
                {"counts": counts, "name": spaces.Text(8), "path": spaces.Sequence(spaces.Discrete(9))}
            )

        def _observation(self) -> Any:
            counts, info = super()._observation()
            path = tuple(range(int(counts[2])))
            return {"counts": counts, "name": f"e{counts[1]}s{counts[2]}", "path": path}, info

    makers = [functools.partial(Named, number, lengths) for number, lengths in enumerate(LENGTHS)]
    env: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        drive(recording, AutoresetMode.SAME_STEP, 20)
    columns = Recorded(tmp_path / "d").columns
    for prefix in ("", "next."):
        counts, names = columns[f"{prefix}observation.counts"], columns[f"{prefix}observation.name"]
        for row, (_, episode, step) in enumerate(counts.tolist()):
            length = columns[f"{prefix}observation.name_length"][row]
            assert names[row, :length].tobytes().decode() == f"e{episode}s{step}"
            count = columns[f"{prefix}observation.path.count"][row]
            assert columns[f"{prefix}observation.path.items"][row, :count].tolist() == list(range(step))


def test_a_mode_that_is_not_stated_has_to_be_given(tmp_path: Path) -> None:
    vector = VectorWrapper(make("sync", AutoresetMode.NEXT_STEP))
    vector.metadata = {}
    with pytest.raises(rbtool.UsageError, match="declares no autoreset mode"):
        rbtool.RecordVectorEpisodes(vector, tmp_path / "d")
    mode = AutoresetMode.NEXT_STEP
    with rbtool.RecordVectorEpisodes(vector, tmp_path / "d", autoreset_mode=mode) as env:
        drive(env, mode, 20)
    require_counted(Recorded(tmp_path / "d"))


def test_the_mode_is_that_of_the_environment_where_several_share_metadata(tmp_path: Path) -> None:
    vector, other = make("sync", AutoresetMode.NEXT_STEP), make("sync", AutoresetMode.DISABLED)
    vector.metadata = other.metadata  # as in gymnasium 1.1
    with rbtool.RecordVectorEpisodes(vector, tmp_path / "d") as env:
        drive(env, AutoresetMode.NEXT_STEP, 20)
    require_counted(Recorded(tmp_path / "d"))


def test_a_reset_that_is_repeated_by_the_next_step_is_refused(tmp_path: Path) -> None:
    vector = make("async", AutoresetMode.NEXT_STEP, shared_memory=False)
    with rbtool.RecordVectorEpisodes(vector, tmp_path / "d") as env:
        env.reset(seed=5)
        env.step(np.zeros(3, int))
        with pytest.raises(rbtool.UsageError, match="environment 1 has ended its episode: without shared memory"):
            env.reset()
        for step in range(1, 9):
            env.step(np.full(3, step))
    require_counted(Recorded(tmp_path / "d"))


def test_whole_infos_keep_the_numbers_of_each_environment(tmp_path: Path) -> None:
    class Informed(CountingEnv):
        def _observation(self) -> Any:
            observation, _ = super()._observation()
            return observation, {"it": 1 if self._number == 0 else 0.5, "list": np.arange(self._number + 1)}

    makers = [lambda number=number: WholeInfos(Informed(number, (2,))) for number in range(2)]
    env: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        drive(recording, AutoresetMode.SAME_STEP, 4)
    recorded = Recorded(tmp_path / "d")
    for row in range(len(recorded.table)):
        columns = recorded.episode(row)
        number = columns["observation"][0, 0]
        assert set(columns["next.info.it"].tolist()) == {1.0 if number == 0 else 0.5}
    assert recorded.manifest.renamed_keys == {
        "info.list (shape 1)": "info.list_1", "info.list (shape 2)": "info.list_2"
    }  # fmt: skip
    assert not recorded.manifest.dropped_keys


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_whole_infos_of_an_environment_that_reuses_an_array(tmp_path: Path, kind: Any) -> None:
    class Reusing(CountingEnv):
        shared = np.zeros(2)

        def _observation(self) -> Any:
            observation, _ = super()._observation()
            self.shared[:] = observation[-1]
            return observation, {"it": self.shared, "nested": {"list": [self.shared]}, "seen": float(observation[-1])}

    env = kind([lambda: WholeInfos(Reusing(0, (2, 3)))], autoreset_mode=AutoresetMode.SAME_STEP)
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        drive(recording, AutoresetMode.SAME_STEP, 6)
    recorded = Recorded(tmp_path / "d")
    columns = recorded.columns
    assert np.array_equal(columns["next.info.it"][:, 0], columns["next.info.seen"])
    assert np.array_equal(columns["next.info.nested.list"][:, 0, 0], columns["next.info.seen"])


def test_stepping_an_environment_that_waits_for_its_reset(tmp_path: Path) -> None:
    env = rbtool.RecordVectorEpisodes(make("sync", AutoresetMode.DISABLED), tmp_path / "d")
    env.reset()
    env.step(np.zeros(3, int))
    with pytest.raises(rbtool.UsageError, match="environment 1 has ended its episode"):
        env.step(np.zeros(3, int))
    env.close()


def test_an_error_of_one_environment_leaves_no_gap_in_the_others(tmp_path: Path) -> None:
    class Failing(CountingEnv):
        def step(self, action: Any) -> Any:
            if self._number == 1 and action == 2:
                raise ZeroDivisionError("the simulator failed")
            return super().step(action)

    makers = [functools.partial(Failing, number, (9,)) for number in range(3)]
    env = rbtool.RecordVectorEpisodes(
        SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP),  # type: ignore[arg-type]
        tmp_path / "d",
    )
    env.reset()
    for step in (0, 1):
        env.step(np.full(3, step))
    with pytest.raises(ZeroDivisionError):
        env.step(np.full(3, 2))
    with pytest.raises(rbtool.UsageError, match="call reset"):
        env.step(np.full(3, 0))
    env.reset()
    env.step(np.full(3, 0))
    env.finish()
    recorded = Recorded(tmp_path / "d")
    assert recorded.table.length.tolist() == [2, 2, 2, 1, 1, 1]
    assert set(recorded.table.end_reason.tolist()) == {3}
    for row in range(6):
        assert np.diff(recorded.episode(row)["observation"][:, 2]).tolist() in ([1], [])


def test_a_process_that_dies_leaves_nothing_to_close(tmp_path: Path) -> None:
    class Dying(CountingEnv):
        def step(self, action: Any) -> Any:
            return os._exit(3) if action == 2 else super().step(action)

    makers = [functools.partial(Dying, number, (9,)) for number in range(2)]
    vector = AsyncVectorEnv(makers)  # type: ignore[arg-type]
    with pytest.raises(EOFError), rbtool.RecordVectorEpisodes(vector, tmp_path / "d") as env:
        drive(env, AutoresetMode.NEXT_STEP, 3)
    assert vector.closed
    assert not any(process.is_alive() for process in vector.processes)
    del vector, env  # what its __del__ raises is a warning
    assert rbtool.repair(tmp_path / "d").steps == 4


def test_single_environments_have_their_own_wrapper(tmp_path: Path) -> None:
    with pytest.raises(rbtool.UsageError, match="vector environment"):
        rbtool.RecordVectorEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d")  # type: ignore[arg-type]
    with pytest.raises(rbtool.UsageError, match="single environment"):
        rbtool.RecordEpisodes(make("sync", AutoresetMode.NEXT_STEP), tmp_path / "d")  # type: ignore[arg-type]
