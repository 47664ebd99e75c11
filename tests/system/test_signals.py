"""Ctrl-C, SIGTERM and SIGHUP while modules are imported and in the middle of writing: the right code and no traceback.

What was written is cleaned up, and the older result untouched.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG

import rbtool
from rbtool.core.testing.datasets import write_walks

STOPPED = """
import os, sys
count, (stop_at, _, wanted), ready = 0, sys.argv[1].partition(" "), int(sys.argv[2])
stop_at = int(stop_at)
def hook(event, arguments):
    global count
    if event not in ("rbtool.fs", "import"):
        return
    found = f"{arguments[0]} {os.path.basename(arguments[1])}" if event == "rbtool.fs" else f"import {arguments[0]}"
    if found == wanted if wanted else event == "rbtool.fs":
        count += 1
        if count == stop_at:
            os.write(ready, b"!")
            os.read(0, 1)  # the signal comes while this waits
sys.addaudithook(hook)
sys.argv = ["rbtool", *sys.argv[3:]]
from rbtool.cli.start import main
main()
"""


def _interrupt(number: signal.Signals, stop_at: int | str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command up to its n-th operation, send the signal there, and wait for its end.

    `1 fsync NAME` is the first announcement of that operation on a file of that name, `1 import NAME` of that module.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-c", STOPPED, str(stop_at), str(writing), *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[writing], text=True, **pipes) as process:  # type: ignore[call-overload]
        os.close(writing)
        assert os.read(reading, 1) == b"!", process.communicate()[1]
        os.close(reading)
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=HANG)
        finally:
            process.kill()  # without effect but where it failed to end
    return subprocess.CompletedProcess(command, process.returncode, out, err)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("rbtool.cli.complete", signal.SIGINT, 130),  # the first one: nothing watches for signals yet
        *(("typer", *ending) for ending in (*SIGNALS, (signal.SIGHUP, 129))),
        ("rbtool.core.verbs.inspect", signal.SIGINT, 130),
    ],
)
def test_importing_modules(tmp_path: Path, number: signal.Signals, code: int, module: str) -> None:
    done = _interrupt(number, f"1 import {module}", "inspect", tmp_path)
    said = {130: "interrupted", 143: "terminated", 129: "the terminal was closed"}[code]
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("form", "stop_at", "number", "code"),
    [
        ("flat", 5, *SIGNALS[0]), ("h5", 5, *SIGNALS[1]), ("h5", 60, *SIGNALS[0]), ("flat", 60, *SIGNALS[1]),
        *(pytest.param(*others, marks=pytest.mark.slow) for others in (
            ("h5", 5, *SIGNALS[0]), ("flat", 5, *SIGNALS[1]), ("flat", 60, *SIGNALS[0]), ("h5", 60, *SIGNALS[1]),
        )),
        ("flat", 5, signal.SIGHUP, 129),
    ],
)  # fmt: skip
def test_saving_a_checkpoint(tmp_path: Path, number: signal.Signals, code: int, stop_at: int, form: str) -> None:
    write_walks(tmp_path / "walks", [(9, "terminated"), (4, "open")])
    write_walks(tmp_path / "older", [(3, "open")])
    rbtool.checkpoint.save(tmp_path / "older", tmp_path / "saved", form="ted")
    words = ["checkpoint", "save", tmp_path / "walks", tmp_path / "saved", "--as", form, "--force"]
    done = _interrupt(number, stop_at, *words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older", "saved", "walks"]
    assert rbtool.inspect(tmp_path / "saved").steps == 3


@pytest.mark.parametrize(
    ("stop_at", "number", "code"),
    [
        *(("1 fsync commits_copy.bin", *ending) for ending in SIGNALS),
        *(("2 rename manifest.json", *ending) for ending in SIGNALS),
        ("1 rename manifest.json", signal.SIGHUP, 129),
    ],
)
def test_finishing_a_recording(tmp_path: Path, number: signal.Signals, code: int, stop_at: str) -> None:
    words = ["record", "CartPole-v1", tmp_path / "made", "--episodes", "3", "--seed", "1", "--max-steps", "4"]
    done = _interrupt(number, stop_at, *words)
    assert done.returncode == code, done.stderr
    assert "hint: 3 episodes are kept: add --resume to continue" in done.stderr
    assert (done.stdout, "internal" in done.stderr) == ("", False)
    again = rbtool.record("CartPole-v1", tmp_path / "made", episodes=3, seed=1, max_steps=4, resume=True)
    assert (again.episodes, again.already_there) == (3, stop_at.startswith("2"))
    assert not rbtool.check(tmp_path / "made").errors
