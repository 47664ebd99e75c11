"""Whole runs with real worker processes; `test_pool_faults` has what can befall these."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import Forked, run_forked
from waiting import HANG

import rbtool
from rbtool.core.engine.tasks import WorkerTrace
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")] * 5


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def entries_next_to(dest: Path) -> list[str]:
    """What is published there; the hidden folder of a run that ended early waits for one that resumes."""
    entries = (entry for entry in dest.parent.iterdir() if entry.suffix not in (".py", ".fifo"))
    return sorted(entry.name for entry in entries if not entry.name.startswith(".made.rbtool-new-"))


def test_any_number_of_workers_gives_one_digest(walks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    factor = 3.0

    def function(td):
        import os

        import torch

        print(f"process {os.getpid()} threads {torch.get_num_threads()}")
        td["next", "reward"] = td["next", "reward"] * factor
        td["noise"] = torch.rand(len(td), 2)
        return td

    results = [
        rbtool.preprocess(walks, function, tmp_path / f"{workers}", num_workers=workers, chunk_size=9)
        for workers in (0, 1, 2)
    ]
    assert len({result.content_digest for result in results}) == 1
    assert [result.num_workers for result in results] == [0, 1, 2]
    for workers in (1, 2):
        with TedReader(tmp_path / f"{workers}") as reader:
            reader.verify_files()
    out, err = capfd.readouterr()
    seen = re.findall(r"process (\d+) threads (\d+)", err)
    assert out == ""
    assert {threads for _, threads in seen} == {"1"}
    assert len(seen) == 3 * 12
    assert len({process for process, _ in seen}) in (3, 4)  # a quick worker may do all the work of two


FAILING = """
import os

def raises(td):
    if int(td["episode"][0]) == 8:
        raise ValueError("no such episode")
    return td

def leaves(td):
    if int(td["episode"][0]) == 8:
        os._exit(7)
    return td
"""


def test_an_error_in_a_worker_names_rows_and_shows_its_traceback(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(FAILING)
    with pytest.raises(rbtool.RbtoolError) as caught:
        rbtool.preprocess(walks, f"{tmp_path}/prep.py:raises", tmp_path / "made", num_workers=1, chunk_size=10)
    assert (
        str(caught.value) == "prep.py:raises failed on steps 40 to 49 (episodes 8 to 10): ValueError: no such episode"
    )
    assert isinstance(caught.value.__cause__, WorkerTrace)
    assert 'prep.py", line 6, in raises' in str(caught.value.__cause__)
    assert entries_next_to(walks) == ["walks"]


def test_a_worker_that_ends_by_itself_is_missed(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(FAILING)
    with pytest.raises(rbtool.RbtoolError) as caught:
        rbtool.preprocess(walks, f"{tmp_path}/prep.py:leaves", tmp_path / "made", num_workers=2, chunk_size=10)
    assert str(caught.value) == (
        "a worker process ended with exit status 7 while prep.py:leaves worked on steps 40 to 49 (episodes 8 to 10)"
    )
    assert entries_next_to(walks) == ["walks"]


def test_a_file_that_loads_in_no_worker_is_an_error_in_one_sentence(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(f"import os\nif os.getpid() != {os.getpid()}: 1 / 0\ndef f(td): return td\n")
    with pytest.raises(rbtool.UsageError) as caught:
        rbtool.preprocess(walks, f"{tmp_path}/prep.py:f", tmp_path / "made", num_workers=2, chunk_size=10)
    assert str(caught.value) == f"{tmp_path}/prep.py cannot be imported: ZeroDivisionError: division by zero"
    assert entries_next_to(walks) == ["walks"]


@pytest.mark.parametrize(
    ("limit", "message", "method"),
    [
        ("RLIMIT_FSIZE", "the limit on file size is reached", "fork"),
        ("RLIMIT_NOFILE", "Too many open files", "fork"),
        pytest.param("RLIMIT_FSIZE", "the limit on file size is reached", "spawn", marks=pytest.mark.slow),
    ],
)
def test_limits_exceeded_in_a_worker_are_errors_of_the_parent(
    walks: Path, tmp_path: Path, limit: str, message: str, method: str
) -> None:
    script = f"""
import resource, sys
import rbtool
sys.dont_write_bytecode = True  # under the limit, Python would cut a compiled module, and read it ever after
imported = "torch" in sys.modules
def function(td):
    resource.setrlimit(resource.{limit}, (8, resource.getrlimit(resource.{limit})[1]))
    return td
try:
    rbtool.preprocess(*sys.argv[1:2], function, *sys.argv[2:], num_workers=1, chunk_size=50, start_method="{method}")
except OSError as error:
    print(type(error).__name__, getattr(error, "exit_code", 1), error)
assert ("torch" in sys.modules) == (imported or "{method}" == "fork"), "who only leads needs no torch"
"""
    if method == "fork":
        done = run_forked(script, walks, tmp_path / "made")
    else:
        command = [sys.executable, "-c", script, str(walks), str(tmp_path / "made")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout
    assert ("OutOfSpaceError 6" in done.stdout) == (limit == "RLIMIT_FSIZE")
    assert entries_next_to(walks) == ["walks"]


WAITING = """
import os, signal, sys
import rbtool
def function(td):
    fifo = os.open(sys.argv[3] if len(sys.argv) > 3 else FIFO, os.O_WRONLY)
    os.write(fifo, b"here")
    while True:
        signal.pause()
source, dest, FIFO = sys.argv[1:]
rbtool.preprocess(source, function, dest, num_workers=1, chunk_size=50)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL], ids=lambda number: number.name
)
def test_workers_end_with_their_parent(walks: Path, tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "wait.fifo"
    os.mkfifo(fifo)
    process = Forked(WAITING, walks, tmp_path / "made", fifo)
    try:
        with open(fifo, "rb", buffering=0) as waiting:  # opens when the worker calls the function
            assert waiting.read(4) == b"here"
            process.send_signal(number)
            process.wait()
            ended, _, _ = select.select([waiting], [], [], HANG)
            assert ended
            assert waiting.read(1) == b"", "the worker still holds its end"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.read()
    assert process.returncode == -number
    assert entries_next_to(walks) == ["walks"]
