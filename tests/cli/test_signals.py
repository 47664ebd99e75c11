"""Ctrl-C, SIGTERM and SIGHUP in the middle of somebody's function: one word, the right code, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from waiting import HANG

WAITING = """
def wait(rows):
    with open("started", "w") as file:
        file.write("!")
    open("never").read()
"""


SLOW = pytest.mark.slow
SAID = {
    signal.SIGINT: (130, "error: interrupted\n"),
    signal.SIGTERM: (143, "error: terminated\n"),
    signal.SIGHUP: (129, "error: the terminal was closed\n"),
}


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 2),
        pytest.param(signal.SIGTERM, 0, marks=SLOW),
        pytest.param(signal.SIGINT, 0, marks=SLOW),
        pytest.param(signal.SIGTERM, 2, marks=SLOW),
        pytest.param(signal.SIGHUP, 0, marks=SLOW),
        pytest.param(signal.SIGHUP, 2, marks=SLOW),
    ],
)
def test_a_signal_ends_it_cleanly(number, workers, folder, environment):
    code, said = SAID[number]
    (folder / "waiting.py").write_text(WAITING)
    for name in ("started", "never"):
        os.mkfifo(folder / name)
    before = sorted(path.name for path in folder.iterdir())
    words = ["preprocess", "cartpole", "--fn", "waiting.py:wait", "--dest", "there", "--num-workers", str(workers)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["rbtool", *words], cwd=folder, env=environment, text=True, **pipes) as process:
        assert (folder / "started").read_text().startswith("!")
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=HANG)
        finally:
            process.kill()  # without effect but where it failed to end
    assert (process.returncode, out, err) == (code, "", said)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


def test_signals_that_the_caller_ignores_stay_ignored(folder, environment):
    command = "trap '' TERM; rbtool convert minari/tuple/trunc-v0 there & kill -TERM $!; wait $!"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "there\n")
