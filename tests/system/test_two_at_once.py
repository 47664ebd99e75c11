"""Two processes that write to one place at the same time both end right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rbtool
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import write_walks

SOURCE = Path(__file__).parents[1] / "data" / "minari" / "cartpole" / "scripted-v0"

MEETING = """
import os, sys
met, ready = False, int(sys.argv[1])
def hook(event, arguments):
    global met
    if event == "rbtool.fs" and not met and "rbtool-new" in arguments[1]:
        met = True
        os.write(ready, b"!")  # I have begun
        os.read(0, 1)                     # go on when the other one has, too
sys.addaudithook(hook)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.start import main
main()
"""


def _both(words: list[str]) -> list[subprocess.CompletedProcess[bytes]]:
    """Run a command twice, both held in the middle until the other one has got there."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", MEETING, str(writing), *words]
    pair = [
        subprocess.Popen(command, pass_fds=[writing], stdin=-1, stdout=-1, stderr=-1)  # -1 is subprocess.PIPE
        for _ in range(2)
    ]
    os.close(writing)
    met = os.read(reading, 1) + os.read(reading, 1)
    os.close(reading)
    ended = [(process, *process.communicate(b"!!")) for process in pair]
    assert met == b"!!", [error for _, _, error in ended]
    return [subprocess.CompletedProcess(command, process.returncode, out, error) for process, out, error in ended]


@pytest.mark.parametrize("older", [False, True])
def test_converting(tmp_path: Path, older: bool) -> None:
    dest = tmp_path / "out"
    if older:
        write_walks(dest, [(3, "open")])
    for done in _both(["convert", str(SOURCE), str(dest), "-q", *(["--force"] if older else [])]):
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().strip() == str(dest)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert rbtool.convert(SOURCE, tmp_path / "alone").content_digest == rbtool.inspect(dest).content_digest
    assert rbtool.check(dest).errors == 0


@pytest.mark.parametrize("form", ["flat", "h5"])
def test_saving_a_checkpoint(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated"), (9, "open")])
    dest = tmp_path / "saved"
    for done in _both(["checkpoint", "save", str(tmp_path / "walks"), str(dest), "--as", form, "-q"]):
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "walks"]
    with open_steps(dest) as reader:
        reader.verify_files()
