"""Whole runs with real worker processes, and that no worker waits for the first chunk of another."""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import Forked, run_forked
from waiting import HANG, wait_until

import rbtool
from rbtool.core.engine.pool import Scheduler, WorkerHandle
from rbtool.core.engine.tasks import BackgroundCall, Limits, SerialExecutor, Task, WorkerTrace
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


def test_an_error_or_the_end_of_a_worker_names_the_rows(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(FAILING)
    with pytest.raises(rbtool.RbtoolError) as caught:
        rbtool.preprocess(walks, f"{tmp_path}/prep.py:raises", tmp_path / "made", num_workers=1, chunk_size=10)
    expected = "prep.py:raises failed on steps 40 to 49 (episodes 8 to 10): ValueError: no such episode"
    assert str(caught.value) == expected
    assert isinstance(caught.value.__cause__, WorkerTrace)
    assert 'prep.py", line 6, in raises' in str(caught.value.__cause__)
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
def test_limits_exceeded_in_a_worker_are_errors_of_the_parent(walks, tmp_path, limit, message, method) -> None:
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


# Workers do not wait for each other's first chunk, and nothing is computed twice for it.


CHUNKS = 12  # of 9 of the 100 steps


@pytest.mark.parametrize("workers", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 7)), 2])
@pytest.mark.parametrize("unit", ["step", "episode"])
def test_every_chunk_is_computed_once(walks: Path, tmp_path: Path, workers: int, unit: str) -> None:
    calls = tmp_path / "calls"

    def function(td):
        with calls.open("a") as file:
            file.write(f"{td['observation'][0, 0].item()!r}\n")
        return td

    rbtool.preprocess(walks, function, tmp_path / "made", unit=unit, num_workers=workers, chunk_size=9)
    found = calls.read_text().split()
    assert len(found) == len(set(found)) == (CHUNKS if unit == "step" else len(EPISODES))


def test_others_compute_their_chunks_while_the_first_shows_what_comes_out(walks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "started"
    folder.mkdir()
    first = TedReader(walks).read(("observation",), 0, 1)[0, 0]

    def function(td):
        if td["observation"][0, 0].item() != first:
            (folder / f"{id(td)}").touch()
            return td
        wait_until(lambda: any(folder.iterdir()), "the start of another chunk")
        return td

    rbtool.preprocess(walks, function, tmp_path / "made", num_workers=2, chunk_size=9, retries=0)
    assert TedReader(tmp_path / "made").manifest.content_digest == TedReader(walks).manifest.content_digest


@pytest.mark.parametrize("timeout", [None, pytest.param(HANG, marks=pytest.mark.slow)])
def test_the_error_names_the_chunk_in_which_a_process_ended_ahead(walks, tmp_path, timeout: float | None) -> None:
    first = TedReader(walks).read(("observation",), 0, 1)[0, 0]

    def function(td):
        import os

        if td["observation"][0, 0].item() != first:
            os._exit(7)
        return td

    with pytest.raises(rbtool.RbtoolError) as caught:
        rbtool.preprocess(walks, function, tmp_path / "made", num_workers=7, chunk_size=9, timeout=timeout)
    assert re.match(r"a worker process ended with exit status 7 while .* worked on steps? \d+", str(caught.value))
    assert not (tmp_path / "made").exists()


def test_chunks_that_fail_once_are_tried_again(walks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tried"
    folder.mkdir()

    def function(td):
        mark = folder / f"{td['observation'][0, 0].item()!r}"
        if not mark.exists():
            mark.touch()
            raise OSError("try again")
        return td

    rbtool.preprocess(walks, function, tmp_path / "made", num_workers=3, chunk_size=9, retries=1)
    assert TedReader(tmp_path / "made").manifest.content_digest == TedReader(walks).manifest.content_digest


def test_a_failure_does_not_wait_for_the_source_to_be_verified(walks, tmp_path, monkeypatch) -> None:
    done, verified = threading.Event(), list[bool]()
    monkeypatch.setattr(TedReader, "verify_files", lambda self: verified.append(done.wait(HANG)))

    def function(td):
        raise ValueError("no")

    try:
        with pytest.raises(rbtool.RbtoolError, match="ValueError: no"):
            rbtool.preprocess(walks, function, tmp_path / "made", num_workers=0)
        assert not verified
    finally:
        done.set()


def test_a_background_call_returns_or_raises() -> None:
    assert BackgroundCall(lambda: 3).result() == 3
    with pytest.raises(KeyError):
        BackgroundCall(lambda: {}["missing"]).result()


def test_calls_in_turn_are_done_in_order_and_raise_later() -> None:
    found: list[int] = []
    with SerialExecutor() as line:
        for number in range(1000):
            line.do(found.append, number)
        line.finish()
        assert found == list(range(1000))
        line.do(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            line.finish()


def test_leaving_drops_the_calls_that_have_not_started() -> None:
    started, go, found = threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        go.wait(HANG)
        found.append(0)

    with SerialExecutor() as line:
        line.do(first)
        line.do(found.append, 1)
        started.wait(HANG)
        line._calls[-1].add_done_callback(lambda call: go.set())  # which is done when it is dropped
    assert found == [0]


@pytest.mark.parametrize(
    "raises",
    [
        "ValueError('no')",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("KeyboardInterrupt('no')", "os._exit(7)")),
    ],
)
def test_without_retries_a_chunk_is_tried_once(walks: Path, tmp_path: Path, raises: str) -> None:
    (tmp_path / "prep.py").write_text(
        "import os\n"
        "def f(td):\n"
        f"    with open({str(tmp_path / 'calls')!r}, 'a') as file:\n"
        "        file.write(f\"{td['observation'][0, 0].item()}\\n\")\n"
        f"    if td['episode'][0] > 0: {raises if raises.startswith('os') else 'raise ' + raises}\n"
        "    return td\n"
    )
    with pytest.raises(rbtool.RbtoolError, match=r"11 of 12 chunks failed: .* on step"):
        rbtool.preprocess(
            walks, f"{tmp_path}/prep.py:f", tmp_path / "made", num_workers=3, chunk_size=9, retries=0, keep_going=True
        )
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == len(set(calls)) == CHUNKS


class Silent(WorkerHandle):
    """A worker that answers at once what it is asked, or is never started."""

    def __init__(self, started: bool) -> None:
        super().__init__()
        self.started = started
        self.calls: deque[tuple[str, tuple[Any, ...]]] = deque()

    def send(self, call: bytes) -> None:
        self.calls.append(pickle.loads(call))

    def received(self) -> bytes | None:
        return pickle.dumps((True, self.calls.popleft()[1])) if self.started and self.calls else None

    def is_lost(self) -> bool:
        return False

    def stop(self) -> None:
        pass


class PartlyStarted(Scheduler):
    """Workers of which only the first are ever started, as in a cluster with fewer cores."""

    def __init__(self, workers: int, started: int) -> None:
        super().__init__(workers, Limits(), pickle.dumps(("start", ())))
        self.left = started
        self._fill(workers)

    def _start(self) -> WorkerHandle:
        self.left -= 1
        return Silent(self.left >= 0)

    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        found = [worker for worker in workers if isinstance(worker, Silent) and worker.started and worker.calls]
        assert found, "everybody waits for a worker that never starts"
        return found


@pytest.mark.parametrize("started", [1, 2, 3])
@pytest.mark.parametrize("ahead", [True, False])
def test_no_worker_waits_for_one_that_never_starts(started: int, ahead: bool) -> None:
    tasks = [Task(index, index, index + 1) for index in range(9)]
    executor = PartlyStarted(3, started)
    if ahead:
        executor.begin(tasks[1:])
        assert executor.call("schema", tasks[0]) == (tasks[0],)
    executor.broadcast("open")
    assert sorted(task for task, _ in executor.run("run", tasks)) == tasks
