"""A recorder that is killed anywhere loses the episode that is under way, and no other."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan

RUNNER = Path(__file__).with_name("recorder.py")
PLAN = DatasetPlan((4, 1, 6), ("terminated", "both", "truncated"), (False, True, False), ODD_LEAVES[:6])


def strike_environment(*words: str) -> dict[str, int]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        command = [sys.executable, RUNNER.with_name("environment_recorder.py"), place, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        restored: dict[str, int] = json.loads(done.stdout)["restored"]
        return restored


def strike(*words: str) -> dict[str, int]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        write_plan(PLAN, Path(place) / "ted")
        done = subprocess.run([sys.executable, RUNNER, place, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        restored: dict[str, int] = json.loads(done.stdout)["restored"]
        return restored


def test_killed_here_and_there() -> None:
    assert strike("--every", "3").keys() == {"0", "1", "2", "3"}


def test_a_repair_that_is_killed_is_started_again() -> None:
    assert strike("--damaged", "--every", "6").keys() == {"3"}


@pytest.mark.slow
def test_a_repair_that_is_killed_at_every_change_of_files() -> None:
    assert strike("--damaged").keys() == {"3"}


@pytest.mark.slow
def test_killed_at_every_change_of_files() -> None:
    assert strike().keys() == {"0", "1", "2", "3"}


def test_an_environment_s_recording_killed_here_and_there() -> None:
    assert strike_environment("--every", "6").keys() >= {"0", "1", "4"}


@pytest.mark.slow
def test_an_environment_s_recording_killed_at_every_change_of_files() -> None:
    assert strike_environment().keys() == {"0", "1", "2", "3", "4"}
