"""`rbtool demo`: it tells every command it stands for, and those commands do the same."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import rbtool


@pytest.fixture(scope="module")
def environment(forked):
    """Commands are forked: there are many of them."""
    return forked


@pytest.fixture(scope="module")
def demo(tmp_path_factory, environment):
    """A demo that was run in a shell: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(["rbtool", "demo"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


def told(stderr: str) -> list[str]:
    return re.findall(r"^\$ (.*)$", stderr, re.MULTILINE)


def test_the_demo_goes_through_every_verb(demo):
    verbs = re.findall(r"^\$ rbtool (checkpoint \w+|\w+)", demo[1].stderr, re.MULTILINE)
    checkpoints = {f"checkpoint {verb}" for verb in ("save", "verify", "load")}
    assert set(verbs) == {"download", "preprocess", "check", "inspect", "sample"} | checkpoints


def test_the_demo_says_where_everything_is(demo):
    folder, done = demo
    assert re.fullmatch(r"done in \d+ s; everything is in rbtool-demo", done.stdout.splitlines()[0])
    paths = re.findall(r"^  (?:recorded|converted|normalised|checkpoint|loaded) +(\S+)$", done.stdout, re.MULTILINE)
    assert len(paths) == 16
    assert all((folder / path).exists() for path in paths)


def test_the_commands_to_go_on_with_work(demo, shell):
    folder, done = demo
    for command in done.stdout.partition("go on with\n")[2].splitlines():
        assert shell(command, folder).returncode == 0, command


def test_the_demo_lets_no_other_library_speak(demo):
    assert "arning" not in demo[1].stderr.replace("0 warnings", "")


def test_the_commands_told_do_what_the_demo_did(demo, shell, tmp_path):
    folder, done = demo
    shutil.copytree(folder / "rbtool-demo" / "minari", tmp_path / "rbtool-demo" / "minari")
    shutil.copy(folder / "rbtool-demo" / "prep.py", tmp_path / "rbtool-demo")
    lines = [line for line in told(done.stderr) if "pendulum" not in line]
    again = shell(" && ".join(lines), tmp_path)
    assert again.returncode == 0, again.stderr
    for made in ("store/minari/cartpole/demo-v0", "normalised/cartpole", "loaded/cartpole", "checkpoints/cartpole.h5"):
        first, second = (rbtool.inspect(place / "rbtool-demo" / made) for place in (folder, tmp_path))
        assert first.content_digest == second.content_digest
