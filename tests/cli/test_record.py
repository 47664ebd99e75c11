"""`rbtool record`: the episodes that it writes, and how it ends after failures and signals."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scripted_envs import Recorded
from waiting import HANG, wait_until

import rbtool

ENV = """
import time
import gymnasium, numpy as np
from gymnasium import spaces

class Counter(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(3)

    def __init__(self, render_mode=None, fails=False):
        self.render_mode, self.fails, self.count = render_mode, fails, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.step_number = seed or 0, 0
        if self.fails and seed == 12:
            if self.fails == "waits":
                open("started", "w").close()
                time.sleep(3600)
            raise ZeroDivisionError("the simulator failed")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.step_number += 1
        ended = self.step_number == 3 + self.seed % 2
        info = {"even": 0.5 if self.seed % 2 else 2}
        return np.full(1, self.step_number, np.float32), float(action), ended, False, info

    def render(self):
        return np.full((4, 5, 3), self.step_number, np.uint8)

gymnasium.register("Counter-v0", Counter)
gymnasium.register("Failing-v0", Counter, kwargs={"fails": True})
gymnasium.register("Waiting-v0", Counter, kwargs={"fails": "waits"})
"""
POLICY = """
def ones(observation):
    return 1

def fails(observation):
    return 1 // int(observation[0] < 2)

def floats(observation):
    return 0.5

def second_fails(observation, asked=[]):
    asked.append(observation)
    return 1 // int(len(asked) % 2)
"""


@pytest.fixture
def place(tmp_path, environment):
    (tmp_path / "counters.py").write_text(ENV)
    (tmp_path / "policy.py").write_text(POLICY)

    def run(line, check=True):
        found = environment | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            f"rbtool {line}", shell=True, cwd=tmp_path, env=found, capture_output=True, text=True, check=check
        )

    run.path = tmp_path
    return run


def contents(path: Path) -> dict[int, dict[str, bytes]]:
    """The bytes of the columns of each episode, by its number."""
    recorded = Recorded(path)
    return {
        number: {name: rows.tobytes() for name, rows in recorded.episode(row).items()}
        for row, number in enumerate(recorded.table.episode.tolist())
    }


def test_episodes_do_not_depend_on_the_number_of_environments(place):
    done = place("record counters:Counter-v0 one --episodes 5 --seed 7 --max-steps 9 --json")
    document = json.loads(done.stdout)
    assert (document["episodes"], document["steps"]) == (5, 18)
    place("record counters:Counter-v0 three --episodes 5 --seed 7 --max-steps 9 --num-envs 3")
    one, three = contents(place.path / "one"), contents(place.path / "three")
    assert one == three
    assert np.frombuffer(one[0]["next.info.even"]).tolist() == [0.5] * 4
    spec = [Recorded(place.path / name).manifest.provenance[0].arguments["env_spec"] for name in ("one", "three")]
    assert spec[0] == spec[1]
    assert spec[0]["max_episode_steps"] == 9
    recorded = Recorded(place.path / "one")
    assert recorded.table.seed.tolist() == [7, 8, 9, 10, 11]
    assert recorded.manifest.provenance[0].arguments["policy"] == "random"
    assert len({tuple(recorded.episode(row)["action"]) for row in range(5)}) > 2
    assert rbtool.check(place.path / "one").errors == 0


def test_a_policy_from_a_file_and_rendered_frames_are_recorded(place):
    line = "record counters:Counter-v0 there --episodes 2 --seed 0 --policy policy.py:ones --render --max-steps 2"
    done = place(line)
    assert done.stdout == "there\n"
    assert "ends: 2 truncated" in done.stderr
    recorded = Recorded(place.path / "there")
    assert recorded.columns["action"].tolist() == [1] * 4
    assert recorded.columns["pixels"][:, 0, 0, 0].tolist() == [0, 1, 0, 1]
    assert recorded.columns["next.pixels"][:, 3, 4, 2].tolist() == [1, 2, 1, 2]
    assert recorded.manifest.provenance[0].arguments["policy"] == "policy.py:ones"
    assert "policy.py" in recorded.manifest.provenance[0].arguments["policy_files"]


def test_a_resumed_recording_has_the_same_episodes(place):
    done = place("record counters:Failing-v0 there --episodes 5 --seed 10", check=False)
    assert done.returncode == 1
    kept = "2 episodes are kept: add --resume to continue, or make a dataset of them"
    assert done.stderr.splitlines()[-2:] == [
        "error: episode 2: the environment counters:Failing-v0 failed: ZeroDivisionError: the simulator failed",
        f"hint: {kept}: rbtool repair there",
    ]
    (place.path / "counters.py").write_text(ENV.replace('kwargs={"fails": True}', "kwargs={}"))
    place("record counters:Failing-v0 there --episodes 5 --resume")
    place("record counters:Failing-v0 whole --episodes 5 --seed 10")
    assert contents(place.path / "there") == contents(place.path / "whole")


def test_resume_keeps_more_episodes_than_asked_for(place):
    place("record counters:Failing-v0 there --episodes 5 --seed 10", check=False)
    done = place("record counters:Failing-v0 there --episodes 1 --resume")
    said = done.stderr.splitlines()
    assert said[:2] == ["1 episode beyond the first 1 is kept", "recording 100 % (1 of 1 episode)"]
    assert "7 steps in 2 episodes" in said[2]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("Countr-v0 there --episodes 1", 2, "error: environment 'Countr-v0' not found: "),
        ("absent:Env-v0 there --episodes 1", 1, "error: the environment absent:Env-v0 cannot be made: ModuleNotFound"),
        ("counters:Counter-v0 policy.py --episodes 1", 2, "error: policy.py exists already"),
        ("counters:Counter-v0 there --episodes 0", 2, "error: episodes is 0, expected a number from 1"),
        ("counters:Counter-v0 there --episodes 1 --num-envs 0", 2, "error: num_envs is 0, expected a number from 1"),
        ("counters:Counter-v0 there --episodes 1 --policy none.py:f", 2, "error: there is no file none.py"),
        ("counters:Counter-v0 there --episodes 1 --policy policy.py:f", 2, "error: policy.py has no function"),
        (
            "counters:Counter-v0 there --episodes 1 --policy policy.py:fails", 1,
            "error: episode 0: the policy policy.py:fails failed: ZeroDivisionError",
        ),
        (
            "counters:Counter-v0 there --episodes 1 --policy policy.py:floats", 1,
            "error: episode 0: action is a float, expected whole numbers (int64)",
        ),
        (
            "counters:Failing-v0 there --episodes 2 --seed 11 --num-envs 2", 1,
            "error: one of the episodes 0, 1: the environment counters:Failing-v0 failed: ZeroDivisionError: the sim",
        ),
        (
            "counters:Counter-v0 there --episodes 2 --num-envs 2 --policy policy.py:second_fails", 1,
            "error: episode 1: the policy policy.py:second_fails failed: ZeroDivisionError",
        ),
        (
            "counters:Counter-v0 there --episodes 2 --num-envs 2 --policy policy.py:floats", 1,
            "error: episode 0: action is a float, expected whole numbers (int64)",
        ),
    ],
)  # fmt: skip
def test_impossible_recordings_are_refused(place, line, code, message):
    done = place(f"record {line}", check=False)
    [said, *_] = [one for one in done.stderr.splitlines() if one.startswith("error")]
    assert said.startswith(message)
    assert (done.returncode, done.stdout) == (code, "")
    assert not (place.path / "there").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_episodes_before_it(place, variables, number):
    words = ["rbtool", "record", "counters:Waiting-v0", "there", "--episodes", "5", "--seed", "10"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    places = variables | {"PYTHONPATH": str(place.path)}
    with subprocess.Popen(words, cwd=place.path, env=places, text=True, **pipes) as process:
        wait_until(lambda: process.poll() is not None or (place.path / "started").exists(), "the start of episode 2")
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=HANG)
        finally:
            process.kill()  # in case it did not end
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "hint: 2 episodes are kept: add --resume to continue" in err
    assert "restored 7 steps in 2 episodes\n" in place(f"repair {place.path}/there").stderr
    assert Recorded(place.path / "there").table.seed.tolist() == [10, 11]


@pytest.mark.parametrize(("environment", "least"), [("CartPole-v1", 500), ("Pendulum-v1", -400)])
def test_the_expert_solves_its_environment(environment: str, least: float, tmp_path: Path) -> None:
    rbtool.record(environment, tmp_path / "played", policy="expert", episodes=20, seed=0)
    found = rbtool.inspect(tmp_path / "played")
    assert found.returns.min >= least
    assert Recorded(tmp_path / "played").manifest.provenance[0].arguments["policy"] == "expert"


def test_an_environment_without_an_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rbtool.UsageError, match="no expert for Acrobot-v1, only for CartPole-v1 and Pendulum-v1"):
        rbtool.record("Acrobot-v1", tmp_path / "played", policy="expert", episodes=1)
    assert list(tmp_path.iterdir()) == []
