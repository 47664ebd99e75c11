"""A preprocess job that is killed again and again at random ends with the digest of one that was left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import rbtool
from rbtool.core.format.manifest import Manifest
from rbtool.core.testing.datasets import write_walks

FUNCTION = """
import time, torch
def noisy(td):
    time.sleep(0.02)
    td["noise"] = torch.rand(len(td))
    return td[: 1 + len(td) * 2 // 3]
"""
COMMAND = [sys.executable, "-c", "import sys; from rbtool.cli.start import main; sys.exit(main())", "preprocess"]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Go on with the job in two workers."""
    options = ["--fn", f"{folder}/prep.py:noisy", "--unit", "episode", "--chunk-size", "1", "--num-workers", "2"]
    options += ["--retries", "50"]  # a worker may be killed at the same task again and again
    with open(folder / "said", "ab") as said:
        return subprocess.Popen(
            [*COMMAND, folder / "walks", *options, "--dest", folder / "made", "--resume", "-q"],
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip


def victims(process: subprocess.Popen[bytes], who: str) -> list[int]:
    """The processes to kill: a worker, the command, or all of them."""
    with contextlib.suppress(psutil.Error):
        workers = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        if who == "worker":
            return workers[:1]
        return [process.pid, *(workers if who == "everything" else [])]
    return []


def journal_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(".made.*/work/journal.jsonl"))


@pytest.mark.slow
def test_killed_fifty_times_at_random(tmp_path: Path) -> None:
    draw = random.Random(0)
    write_walks(tmp_path / "walks", [(draw.randrange(1, 40), "terminated") for _ in range(400)])
    (tmp_path / "prep.py").write_text(FUNCTION)
    whole = rbtool.preprocess(
        tmp_path / "walks", f"{tmp_path}/prep.py:noisy", tmp_path / "whole", unit="episode", chunk_size=1, num_workers=0
    )
    kills = finished = 0
    process = start(tmp_path)
    while kills < 50 or process.poll() is None:
        before, deadline = journal_size(tmp_path), time.monotonic() + draw.uniform(0.05, 0.6)
        while process.poll() is None and (journal_size(tmp_path) <= before or time.monotonic() < deadline):
            time.sleep(0.01)
        if process.poll() == 0:
            assert Manifest.load(tmp_path / "made").content_digest == whole.content_digest
            finished += 1
            if kills < 50:
                subprocess.run(["rm", "-r", tmp_path / "made"], check=True)
                process = start(tmp_path)
            continue
        assert process.poll() in (None, -signal.SIGKILL), (tmp_path / "said").read_text()
        if process.poll() is None and kills < 50:
            who = draw.choice(["worker", "command", "everything"])
            for pid in victims(process, who):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills += 1
            if who != "worker":
                process.wait()
        if process.poll() is not None:
            process = start(tmp_path)
    assert finished
    assert Manifest.load(tmp_path / "made").content_digest == whole.content_digest
    assert not list(tmp_path.glob(".made*"))
