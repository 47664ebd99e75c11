"""`rbtool demo`: it shows the commands that it runs, and these commands do the same."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.verbs.demo import RECORDINGS


def commands_shown(stderr: str) -> list[str]:
    return re.findall(r"^\$ (.*)$", stderr, re.MULTILINE)


def test_the_demo_goes_through_every_verb_and_fits_a_screen(demo):
    verbs = re.findall(r"\brbtool (checkpoint \w+|\w+) ", "\n".join(commands_shown(demo[1].stderr)))
    checkpoints = {f"checkpoint {verb}" for verb in ("save", "verify", "load")}
    assert set(verbs) == {"download", "preprocess", "check", "inspect", "sample", "report"} | checkpoints
    _, done = demo
    assert re.fullmatch(r"done in \d+ s; everything is in rbtool-demo", done.stdout.splitlines()[0])
    lines = (done.stderr + done.stdout).splitlines()
    assert len([line for line in lines if not re.match(r"recording \d+ % ", line)]) <= 32  # progress follows the clock
    assert "  4 of 4 forms equal the dataset bit for bit\n" in done.stderr
    line = r"  killed with kill -9 after (\d+) of (\d+) chunks, and resumed: the same digest\n"
    killed, chunks = map(int, re.search(line, done.stderr).groups())
    assert 0 < killed <= chunks
    first, last = map(int, re.search(r": mean return (\d+) [ ▁-█]+ (\d+)\n", done.stderr).groups())
    assert last > 3 * first
    assert (demo[0] / "rbtool-demo/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "\nthe same with minari:pendulum/demo-v0\n" in done.stderr
    first, second = re.findall(r"; digest (xxh3\S+)$", done.stderr, re.MULTILINE)[-2:]
    assert first == second  # what was saved, and what came back
    assert "arning" not in demo[1].stderr.replace("0 warnings", "")


def test_both_environments_go_through_every_step(demo):
    home = demo[0] / "rbtool-demo"
    for recording in RECORDINGS:
        places = (f"store/minari/{recording.id}", f"normalised/{recording.name}", f"loaded/{recording.name}")
        stored, normalised, loaded = (rbtool.inspect(home / place) for place in places)
        assert loaded.content_digest == normalised.content_digest != stored.content_digest
        assert loaded.steps == stored.steps
        forms = (home / "checkpoints").glob(f"{recording.name}.*")
        assert {rbtool.inspect(path).layout for path in forms} == {"ted", "flat", "nested", "h5"}


def test_episodes_agree_with_their_environments(demo):
    places = [demo[0] / "rbtool-demo/store/minari" / recording.id for recording in RECORDINGS]
    cart, pendulum = (TedReader(place).episodes for place in places)
    assert len(np.unique(cart.length)) > 10
    assert np.array_equal(cart.total_reward, cart.length)  # CartPole pays 1 a step
    assert (pendulum.length == 200).all()
    assert -500 < pendulum.total_reward.mean() < 0  # it does learn to stand: at random it is about -1200


@pytest.mark.slow
def test_a_second_run_shows_more_on_request(demo, shell):
    folder, done = demo
    again = shell("rbtool demo -v", folder)
    paths = re.findall(r"^  (?:recorded|converted|normalised|checkpoint|loaded) +(\S+)$", again.stdout, re.MULTILINE)
    assert len(paths) == 16
    assert all((folder / path).exists() for path in paths)
    once = len(commands_shown(done.stderr))  # one export, and three commands for the first environment alone
    assert len(commands_shown(again.stderr)) == 2 * once - 1 - 3
    assert "$ rbtool sample rbtool-demo/normalised/pendulum -n 256 --seed 0\n" in again.stderr
    assert "256 steps of rbtool-demo/normalised/pendulum" in again.stderr


def test_the_proposed_next_commands_work(demo, shell):
    folder, done = demo
    for command in done.stdout.partition("next\n")[2].splitlines():
        assert shell(command, folder).returncode == 0, command


def test_the_commands_shown_do_what_the_demo_did(demo, shell, tmp_path):
    folder, done = demo
    shutil.copytree(folder / "rbtool-demo" / "minari", tmp_path / "rbtool-demo" / "minari")
    for script in ("prep.py", "train.py"):
        shutil.copy(folder / "rbtool-demo" / script, tmp_path / "rbtool-demo")
    # The training was run by the very line that was shown, and makes nothing.
    lines = [line for line in commands_shown(done.stderr) if "pendulum" not in line and "train.py" not in line]
    again = shell(" && ".join(lines), tmp_path)
    assert again.returncode == 0, again.stderr
    for made in ("store/minari/cartpole/demo-v0", "resumed/cartpole", "loaded/cartpole", "checkpoints/cartpole.h5"):
        first, second = (rbtool.inspect(place / "rbtool-demo" / made) for place in (folder, tmp_path))
        assert first.content_digest == second.content_digest


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise ValueError('my mistake')", 1, "error: rbtool-demo/train.py failed: ValueError: my mistake\n"),
        pytest.param(
            "print('no figures')", 0, "  a clone of the policy that recorded it: it prints no returns\n",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_an_edited_training_script_is_run(script, code, said, demo, shell, tmp_path):
    shutil.copytree(demo[0] / "rbtool-demo", tmp_path / "rbtool-demo")
    (tmp_path / "rbtool-demo/train.py").write_text(script)
    recorded = {path: path.stat().st_mtime_ns for path in (tmp_path / "rbtool-demo/minari").rglob("*")}
    done = shell("rbtool demo", tmp_path)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rbtool-demo/minari").rglob("*")} == recorded
