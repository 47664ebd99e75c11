"""What recorders refuse, and what they keep when an environment, the disk or the process fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.recording.recorder import EpisodeBuffer, InfoRows
from rbtool.core.recording.spaces import space_encoder
from rbtool.core.verbs.record import record

BOX = spaces.Box(-1, 1, (2,), np.float32)
PLAN: Plan = ((3, "terminated"),)


def scripted(*info: Callable[[int, int], dict[str, Any]]) -> ScriptedEnv:
    return ScriptedEnv(BOX, spaces.Discrete(2), PLAN, *info)


def late(episode: int, step: int) -> dict[str, Any]:
    """An info that only episodes after the first have."""
    return {"late": step} if episode else {}


def one_episode(dest: Path, *, close: bool = True, env: Any = None) -> rbtool.RecordEpisodes:
    """Record one episode, and leave the recording unfinished."""
    recording = rbtool.RecordEpisodes(env or scripted(), dest)
    run(recording, 1)
    if close:
        recording.close()
    return recording


def begun(**options: Any) -> EpisodeBuffer:
    """Make the buffer of an episode in which the first action was chosen."""
    action = space_encoder("action", spaces.Discrete(2), "action")
    buffer = EpisodeBuffer(space_encoder("observation", BOX, "observation"), action, **options)
    buffer.begin(BOX.sample(), {})
    buffer.act(0)
    return buffer


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Faulty(ScriptedEnv):
    """Has another value among the results of the second step of the third episode, or raises it."""

    def __init__(self, place: int, value: Any) -> None:
        super().__init__(BOX, spaces.Discrete(2), PLAN)
        self._place, self._value = place, value

    def step(self, action: Any) -> Any:
        result = list(super().step(action))
        if len(self.log) == 3 and len(self.log[-1].actions) == 2:
            if isinstance(self._value, Exception):
                raise self._value
            result[self._place] = self._value
        return tuple(result)


FAULTS: dict[str, tuple[int, Any, str]] = {
    "raises": (0, ZeroDivisionError("the simulator failed"), "the simulator failed"),
    "shape": (0, np.zeros(3, np.float32), r"observation is float32 \[3\], expected float32 \[2\]"),
    "type": (0, np.zeros(2), r"observation is float64 \[2\], expected float32 \[2\]"),
    "none": (0, None, "observation is object"),
    "ragged": (0, [[1], [1, 2]], "observation is a list"),
    "reward": (1, np.zeros(2), r"the reward is a ndarray \[2\], expected one number"),
    "no reward": (1, None, "the reward is a NoneType"),
}
"""What the results of a step have at a place, or an error that it raises, and what is said of it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_keeps_the_steps_before_it(tmp_path: Path, name: str) -> None:
    *fault, message = FAULTS[name]
    with (
        pytest.raises((ZeroDivisionError, rbtool.SchemaError), match=message) as caught,
        rbtool.RecordEpisodes(Faulty(*fault), tmp_path / "d") as recording,
    ):
        run(recording, 5)
    assert any("rbtool repair" in note for note in caught.value.__notes__)
    assert rbtool.repair(tmp_path / "d").episodes == 3
    recorded = Recorded(tmp_path / "d")
    assert recorded.table.length.tolist() == [3, 3, 1]
    assert recorded.table.end_reason.tolist() == [0, 0, 3]
    assert recorded.manifest.provenance[0].arguments["num_envs"] == 1


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_recorded_across_a_fault(tmp_path: Path, name: str) -> None:
    with rbtool.RecordEpisodes(Faulty(*FAULTS[name][:2]), tmp_path / "d") as recording:
        with pytest.raises((ZeroDivisionError, rbtool.SchemaError)):
            run(recording, 5)
        with pytest.raises(rbtool.UsageError, match="call reset"):
            recording.step(0)
        run(recording, 1)
    assert Recorded(tmp_path / "d").table.length.tolist() == [3, 3, 1, 3]


ACTIONS = {
    "a number": (spaces.Discrete(2), 1.5, "action is a float, expected whole numbers"),
    "shape": (BOX, np.zeros(3, np.float32), r"action is float32 \[3\], expected float32 \[2\]"),
    "type": (BOX, np.zeros(2), r"action is float64 \[2\], expected float32 \[2\]"),
    "entry": (spaces.Dict({"a": BOX}), {"b": 1}, "action is a dict with other entries"),
    "tuple": (spaces.Tuple([BOX]), (), "action is a tuple of 0, expected a tuple of 1"),
    "text": (spaces.Text(3), 3, "action is a int, expected text"),
    "choice": (spaces.OneOf([BOX]), (1, 0), "action is choice 1"),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_wrong_action_is_refused_before_the_step(tmp_path: Path, name: str) -> None:
    space, wrong, message = ACTIONS[name]
    env = ScriptedEnv(BOX, space, PLAN)
    with rbtool.RecordEpisodes(env, tmp_path / "d") as recording:
        recording.reset()
        with pytest.raises(rbtool.SchemaError, match=message):
            recording.step(wrong)
        for _ in range(3):
            recording.step(space.sample())
    assert Recorded(tmp_path / "d").table.length.tolist() == [3]


def test_spaces_that_change_are_refused(tmp_path: Path) -> None:
    env = scripted()
    recording = rbtool.RecordEpisodes(env, tmp_path / "d")
    run(recording, 2)
    env.observation_space = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(rbtool.SchemaError, match="the observation space changed"):
        run(recording, 1)
    recording.close()
    assert rbtool.repair(tmp_path / "d").episodes == 2


class Odd(spaces.Space[Any]):
    """A space of another library."""


def test_unknown_spaces_are_refused(tmp_path: Path) -> None:
    for space, message in (
        (Odd(), "observation has a space of type Odd"),
        (spaces.Dict({}), "has no values"),
    ):
        with pytest.raises(rbtool.SchemaError, match=message):
            rbtool.RecordEpisodes(ScriptedEnv(space, BOX, PLAN), tmp_path / "d")
    clash = spaces.Dict({"a": spaces.Text(3), "a_length": BOX})
    with pytest.raises(rbtool.SchemaError, match=r"need the key 'observation.a_length'"):
        rbtool.RecordEpisodes(ScriptedEnv(clash, BOX, PLAN), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_destination_that_is_taken(tmp_path: Path) -> None:
    env = scripted()
    (tmp_path / "file").write_text("here")
    with pytest.raises(rbtool.UsageError, match="exists already"):
        rbtool.RecordEpisodes(env, tmp_path / "file")
    recording = one_episode(tmp_path / "d", close=False)
    with pytest.raises(rbtool.UsageError, match="being recorded to by another process"):
        rbtool.RecordEpisodes(env, tmp_path / "d", resume=True)
    recording.close()
    with pytest.raises(rbtool.UsageError, match="was not finished") as caught:
        rbtool.RecordEpisodes(env, tmp_path / "d")
    assert "rbtool repair" in caught.value.hint
    rbtool.repair(tmp_path / "d")
    for resume in (False, True):
        with pytest.raises(rbtool.UsageError, match=r"exists already|finished dataset"):
            rbtool.RecordEpisodes(env, tmp_path / "d", resume=resume)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_destination_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        rbtool.RecordEpisodes(ScriptedEnv(BOX, BOX, PLAN), tmp_path / "d")


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(rbtool.SchemaError, match="no episode has a step"),
        rbtool.RecordEpisodes(scripted(), tmp_path / "d") as recording,
    ):
        recording.reset()
    rbtool.RecordEpisodes(scripted(), tmp_path / "e").close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_finished_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = scripted()
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(env.log) == 3 and Path(f"/proc/self/fd/{descriptor}").readlink().name == "records.bin":
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(rbtool.OutOfSpaceError) as caught, rbtool.RecordEpisodes(env, tmp_path / "d") as recording:
        run(recording, 4)
    monkeypatch.undo()
    assert any("2 episodes are kept" in note for note in caught.value.__notes__)
    with rbtool.RecordEpisodes(scripted(), tmp_path / "d", resume=True) as recording:
        run(recording, 1)
    assert Recorded(tmp_path / "d").table.length.tolist() == [3, 3, 3]


class Strike:
    """Has the changes of the file system fail from number `first` on, or just that one; `error` is raised in them."""

    def __init__(self, first: int, error: BaseException, lasting: bool) -> None:
        self.count = 0
        self._first, self._error, self._lasting = first, error, lasting
        self._announced = fs.announced

    @contextlib.contextmanager
    def announced(self, operation: str, path: str | Path) -> Iterator[None]:
        self.count += 1
        with self._announced(operation, path):
            if self.count == self._first or (self._lasting and self.count > self._first):
                raise self._error
            yield


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), rbtool.OutOfSpaceError),
        (OSError(errno.EIO, "Input/output error"), OSError),
    ],
)
def test_the_first_error_while_a_recording_is_finished_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, shown: type[BaseException], lasting: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody pulls the plug
    for first in itertools.count(1, 5):
        dest, raised = tmp_path / str(first), None
        strike = Strike(first, error, lasting)
        with monkeypatch.context() as patch:
            try:
                with rbtool.RecordEpisodes(scripted(), dest) as recording:
                    run(recording, 2)
                    patch.setattr(fs, "announced", strike.announced)
            except BaseException as found:
                raised = found
        assert rbtool.repair(dest).episodes == 2
        if strike.count < first:
            break
        assert type(raised) is shown, first
        assert any("2 episodes are kept" in note for note in raised.__notes__)
    assert (raised, first > 30) == (None, True)


def test_a_recording_is_finished_again_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (1, 8, 16, 24):
        recording = rbtool.RecordEpisodes(scripted(), tmp_path / str(first))
        run(recording, 2)
        with monkeypatch.context() as patch:
            patch.setattr(fs, "announced", Strike(first, OSError(errno.ENOSPC, "full"), True).announced)
            with pytest.raises(rbtool.OutOfSpaceError):
                recording.finish()
        assert recording.finish().episodes == 2
        assert not rbtool.check(tmp_path / str(first)).errors


@pytest.mark.parametrize("first", [3, 6, 10, 15])
def test_an_error_before_the_first_episode_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    recording = rbtool.RecordEpisodes(scripted(), tmp_path / "d")
    with monkeypatch.context() as patch:
        patch.setattr(fs, "announced", Strike(first, OSError(errno.ENOSPC, "full"), False).announced)
        with pytest.raises(rbtool.OutOfSpaceError):
            run(recording, 1)
    recording.close()
    assert [path.name for path in tmp_path.iterdir()] == (["d"] if first == 15 else [])
    with rbtool.RecordEpisodes(scripted(), tmp_path / "d", resume=True) as recording:
        run(recording, 1)
    manifest = Recorded(tmp_path / "d").manifest  # which states the origin, though at 15 it was not written any more
    assert (manifest.spaces.keys(), manifest.provenance[0].arguments["num_envs"]) == ({"observation", "action"}, 1)


@pytest.mark.parametrize("several", [False, True])
def test_a_finished_recording_with_all_episodes_is_left_as_it_is(tmp_path: Path, several: bool) -> None:
    def recording(number: int | None) -> Any:
        if several:
            env = gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": "Disabled"})
            return rbtool.RecordVectorEpisodes(env, tmp_path / "d", resume=True, max_episodes=number)
        return rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d", resume=True, max_episodes=number)

    rbtool.record("CartPole-v1", tmp_path / "d", episodes=3, seed=3, max_steps=5)
    before = bytes_of(tmp_path / "d")
    for number in (3, 2):
        with recording(number) as env:
            assert env.recorder.is_complete
            assert (env.episodes, env.recorder.writer.steps) == (3, 15)
            env.reset(seed=3)
            env.step(env.action_space.sample())
            assert env.finish().episodes == 3
        with recording(number):
            pass  # which finishes it
        recording(number).close()
    for number in (4, None):
        with pytest.raises(rbtool.UsageError, match="finished dataset"):
            recording(number)
    assert bytes_of(tmp_path / "d") == before


def test_a_recording_is_continued(tmp_path: Path) -> None:
    space = spaces.Dict({"box": BOX, "image": spaces.Box(0, 255, (40, 40, 3), np.uint8), "text": spaces.Text(900)})
    logs = []
    for episodes in (2, 3, 1):
        env = ScriptedEnv(space, spaces.Discrete(2), [(3, "both"), (1, "truncated")], infos)
        recording = rbtool.RecordEpisodes(env, tmp_path / "d", resume=True)
        run(recording, episodes)
        recording.close()
        logs += env.log
    manifest = rbtool.RecordEpisodes(env, tmp_path / "d", resume=True).finish()
    assert manifest.episodes == 6
    recorded = Recorded(tmp_path / "d")
    boxes = np.concatenate([episode.observations[:-1] for episode in logs])
    for name in ("box", "image"):
        expected = np.stack([one[name] for one in boxes])
        assert recorded.columns[f"observation.{name}"].tobytes() == expected.tobytes()
    ranges = {field.name: manifest.ranges[field.key] for field in manifest.fields}
    low, high = ranges["observation.box"] or (0, 0)
    assert (low, high) == (recorded.columns["observation.box"].min(), recorded.columns["observation.box"].max())
    assert not rbtool.check(tmp_path / "d").errors


def test_what_a_killed_process_left_next_to_a_recording_is_swept(tmp_path: Path) -> None:
    one_episode(tmp_path / "d")
    (tmp_path / ".d.rbtool-new-0123abcd").mkdir()
    rbtool.RecordEpisodes(scripted(), tmp_path / "d", resume=True).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def infos(episode: int, step: int) -> dict[str, Any]:
    return {"step": step, "note": "x" * (10 * episode + step)} | ({"rare": 1.5} if step == 2 else {})


def test_another_environment_cannot_continue(tmp_path: Path) -> None:
    one_episode(tmp_path / "d")
    other = ScriptedEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), PLAN)
    with (
        pytest.raises(rbtool.SchemaError, match="with another observation space"),
        rbtool.RecordEpisodes(other, tmp_path / "d", resume=True) as recording,
    ):
        run(recording, 1)
    assert rbtool.repair(tmp_path / "d").episodes == 1


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import numpy as np
from gymnasium import spaces
from scripted_envs import ScriptedEnv
from rbtool.core.recording.environments import RecordEpisodes
def info(episode, step):
    return {{"note": "x" * 2 ** (episode % 9)}}
env = ScriptedEnv(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), [(5, "terminated"), (2, "truncated")], info)
recording = RecordEpisodes(env, {dest!r})
print("started", flush=True)
while True:
    env.observation_space.seed(len(env.log))
    recording.reset()
    done = False
    while not done:
        *_, terminated, truncated, _ = recording.step(1)
        done = terminated or truncated
    print(recording.episodes, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1])
def test_kill_loses_the_open_episode_only(tmp_path: Path, delay: float) -> None:
    """Real processes are killed; leaves widen meanwhile, so that the recording is also replaced as a whole."""
    dest = tmp_path / "d"
    script = SCRIPT.format(paths=[path for path in sys.path if "standins" in path], dest=str(dest))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        promised = max(
            [1, *(int(line) for line in process.stdout.read().splitlines(keepends=True) if line[-1:] == "\n")]
        )
    found = rbtool.repair(dest).episodes
    assert promised <= found <= promised + 1
    recorded = Recorded(dest)
    assert recorded.table.length.tolist() == [(5, 2)[number % 2] for number in range(found)]
    assert recorded.columns["info.note_length"].tolist() == [
        2 ** (number % 9) for number in range(found) for _ in range((5, 2)[number % 2])
    ]
    space = spaces.Box(-1, 1, (2,), np.float32)
    for number in range(found):
        space.seed(number)
        columns = recorded.episode(number)
        expected = np.stack([space.sample() for _ in range(len(columns["observation"]) + 1)])
        assert columns["observation"].tobytes() == expected[:-1].tobytes()
        assert columns["next.observation"].tobytes() == expected[1:].tobytes()


def test_a_wider_recording_replaces_the_old_one_at_one_instant(tmp_path: Path) -> None:
    """At every change of the file system there is a recording with all episodes that were promised."""
    recording = one_episode(tmp_path / "d", close=False, env=scripted(late))
    seen = []

    def look(event: str, found: tuple[Any, ...]) -> None:
        if event == "rbtool.fs" and seen is not None and looking:
            seen.append((tmp_path / "d" / ".rbtool" / "commits.bin").stat().st_size > 0)

    looking = True
    sys.addaudithook(look)
    run(recording, 1)
    looking = False
    assert len(seen) > 10
    assert all(seen)
    recording.finish()
    columns = Recorded(tmp_path / "d").columns
    assert columns["info.late_present"].tolist() == [False] * 3 + [True] * 3
    assert columns["next.info.late"].tolist() == [0, 0, 0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_disk_that_is_full_for_a_wider_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = one_episode(tmp_path / "d", close=False, env=scripted(late))

    def full(*given: Any, **named: Any) -> None:
        raise rbtool.OutOfSpaceError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(PackedRecorder, "add_states", full)
        patch.setattr(fs, "exchange", full)
        with pytest.raises(rbtool.OutOfSpaceError):
            run(recording, 1)
    recording.close()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert rbtool.repair(tmp_path / "d").episodes == 1


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

    buffer = begun()
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
    first, buffer = one_episode(tmp_path / "d", close=False), begun(infos=False)
    buffer.observe(BOX.sample(), 1.0, True, False, {})
    first.recorder.writer.add(buffer.take(), 4)
    first.close()
    with rbtool.RecordEpisodes(scripted(), tmp_path / "d", resume=True) as recording:
        run(recording, 2)
    assert sorted(Recorded(tmp_path / "d").table.episode.tolist()) == [0, 4, 5, 6]


def test_another_environment_of_the_same_spaces_cannot_continue(tmp_path: Path) -> None:
    one_episode(tmp_path / "d", env=gymnasium.make("CartPole-v1"))
    for other in ("MountainCar-v0", "Acrobot-v1"):
        with pytest.raises(rbtool.UsageError, match="was recorded from CartPole-v1, expected the same"):
            rbtool.RecordEpisodes(gymnasium.make(other), tmp_path / "d", resume=True)
    rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "d", resume=True).finish()


def zero(observation: Any) -> int:
    return 0


CARTPOLE: dict[str, Any] = {"env_id": "CartPole-v1", "max_steps": 5}


def interrupted(dest: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Leave a recording of CartPole with the arguments of the verb, and two of four episodes."""

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rbtool.RecordEpisodes, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            record(**CARTPOLE, dest=dest, episodes=2, seed=3, **options)


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
    asked: dict[str, Any] = {**CARTPOLE, "dest": tmp_path / "d", "episodes": 3, "seed": 3}
    made = record(**asked)
    for episodes in (3, 2):
        again = record(**asked | {"episodes": episodes}, resume=True)
        assert (again.already_there, again.episodes, again.content_digest) == (True, 3, made.content_digest)
    rbtool.convert(tmp_path / "d", tmp_path / "copy", layout="packed")  # which is not a recording
    for other, resume, said in (
        ({"episodes": 4}, True, "finished dataset"),
        ({"seed": 4}, True, "the same"),
        ({"max_steps": 6}, True, "the same"),
        ({}, False, "exists already"),
        ({"dest": tmp_path / "copy"}, True, "finished dataset"),
    ):
        with pytest.raises(rbtool.UsageError, match=said):
            record(**asked | other, resume=resume)


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
    buffer = begun()
    with pytest.raises(rbtool.SchemaError, match="is not exact as float64"):
        buffer.observe(BOX.sample(), reward, False, False, {})
    assert buffer.length == 0


def test_a_disk_that_fails_after_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = one_episode(tmp_path / "d", close=False, env=scripted(late))

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
    with pytest.raises(rbtool.UsageError, match=r"^environment .* not found") as caught:
        record(name, tmp_path / "d", episodes=1)
    assert "CartPol" in f"{caught.value}{caught.value.hint}"
    assert not (tmp_path / "d").exists()


def test_statistics_are_those_of_the_episode_that_ended(tmp_path: Path) -> None:
    makers = [functools.partial(CountingEnv, lane, (3, 2)) for lane in range(2)]
    env = RecordEpisodeStatistics(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))
    with rbtool.RecordVectorEpisodes(env, tmp_path / "d") as recording:
        recording.reset(seed=0)
        infos = [recording.step(np.zeros(2, np.int64))[4] for _ in range(8)]
    # The sums of rewards; those of gymnasium before 1.4 lack the first step of each episode but the first.
    returns = [total for info in infos if "episode" in info for total in info["episode"]["r"]]
    recorded = Recorded(tmp_path / "d")
    for number in range(4):
        columns = recorded.episode(number)
        length = len(columns["next.reward"])
        assert columns["next.info.episode.l_present"].reshape(length).tolist() == [False] * (length - 1) + [True]
        assert columns["next.info.episode.r"].reshape(length)[-1] == returns[number]
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
    with pytest.raises(rbtool.UsageError, match="have changed since"):
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
