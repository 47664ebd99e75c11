"""The ways to start worker processes, and what each leaves alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from acting_work import SURROUNDINGS, TASKS, Acting, job_of, server_and_self, surroundings
from forked_scripts import Forked
from waiting import HANG

from rbtool.core.engine.pool import WorkerPool, default_start_method
from rbtool.core.engine.tasks import Limits, WorkerFailed
from rbtool.core.errors import UsageError
from rbtool.core.testing.datasets import write_walks

SLOW = pytest.mark.slow
METHODS = ["fork", pytest.param("forkserver", marks=SLOW), pytest.param("spawn", marks=SLOW)]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(folder, [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")] * 5)
    return folder


def runs(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", METHODS)
def test_workers_are_processes_of_their_own(walks: Path, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(job_of(walks, Acting(surroundings)), 2, Limits(), method) as pool:
        found = [answer for _, answer in pool.run("measure", TASKS)]
        first = found[0].pop("pid")
        os.kill(first, signal.SIGKILL)
        assert len(list(pool.run("measure", TASKS))) == len(TASKS)
    pids = {first} | {answer.pop("pid") for answer in found[1:]}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    assert found == len(TASKS) * [SURROUNDINGS]
    out, err = capfd.readouterr()
    assert (out, err.count("printed 90"), err.count("written")) == ("", 2, 20)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SCRIPT = """
import atexit, signal, sys, threading
sys.path.insert(0, STANDINS)
from acting_work import SURROUNDINGS, TASKS, Acting, job_of, surroundings
from pathlib import Path
from rbtool.core.engine.tasks import Limits
from rbtool.core.engine.pool import WorkerPool
from rbtool.core.engine.pool import default_start_method

class Kept:
    def __del__(self):
        print("finalised")

source, method = sys.argv[1:]
kept = Kept()
atexit.register(print, "at exit")
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
print("once")
with WorkerPool(job_of(Path(source), Acting(surroundings)), 2, Limits(), method) as pool:
    assert len(list(pool.run("measure", TASKS))) == len(TASKS)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=SLOW), pytest.param("spawn", marks=SLOW)])
def test_the_callers_script_runs_and_ends_once(walks: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("STANDINS", repr(str(Path(surroundings.__code__.co_filename).parent))))
    command = [sys.executable, str(script), str(walks), method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("once\nat exit\nfinalised\n", 0), done.stderr
    assert done.stderr.count("printed") == len(TASKS)


WAITING = """
import os, signal, sys
sys.path.insert(0, STANDINS)
from acting_work import SURROUNDINGS, TASKS, Acting, job_of, wait_for_ever
from pathlib import Path
from rbtool.core.engine.tasks import Limits
from rbtool.core.engine.pool import WorkerPool
source, method, os.environ["FIFO"] = sys.argv[1:]
with WorkerPool(job_of(Path(source), Acting(wait_for_ever)), 2, Limits(), method) as pool:
    list(pool.run("measure", TASKS))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=SLOW), pytest.param("spawn", marks=SLOW)])
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=SLOW, id="SIGINT"), pytest.param(signal.SIGKILL, id="SIGKILL")]
)
def test_workers_end_with_their_parent(walks: Path, tmp_path: Path, number: signal.Signals, method: str) -> None:
    fifo = tmp_path / "wait.fifo"
    os.mkfifo(fifo)
    script = WAITING.replace("STANDINS", repr(str(Path(surroundings.__code__.co_filename).parent)))
    process = Forked(script, walks, method, fifo)
    try:
        with open(fifo, "rb", buffering=0) as waiting:  # opens when the first worker calls the function
            assert waiting.read(1) + waiting.read(1) == b"xx"
            process.send_signal(number)
            process.wait()
            ended, _, _ = select.select([waiting], [], [], HANG)
            assert ended
            assert waiting.read(1) == b"", "a worker still holds its end"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.read()
    assert process.returncode == -number


@pytest.mark.parametrize("user_modules", [frozenset(), frozenset(("forked_value",))])
def test_forked_workers_import_the_users_modules_again(
    walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_modules: frozenset[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "forked_value.py").write_text("VALUE = 'old'\n")
    import forked_value

    (tmp_path / "forked_value.py").write_text("VALUE = 'new one'\n")

    def act(first: int) -> str:
        from forked_value import VALUE

        return VALUE

    with WorkerPool(job_of(walks, Acting(act, modules=user_modules)), 1, Limits(), "fork") as pool:
        assert pool.call("measure", TASKS[0]) == ("new one" if user_modules else "old")
    assert forked_value.VALUE == "old"
    monkeypatch.delitem(sys.modules, "forked_value")


def test_a_fork_computes_after_its_parent_has_on_all_cores(walks: Path) -> None:
    matrix = torch.arange(400 * 400.0).reshape(400, 400) / 1e5
    expected = float((matrix @ matrix).exp().clamp(max=2).sum())

    def act(first: int) -> float:
        return float((matrix @ matrix).exp().clamp(max=2).sum())

    with WorkerPool(job_of(walks, Acting(act)), 2, Limits(timeout=HANG), "fork") as pool:
        found = [answer for _, answer in pool.run("measure", TASKS)]
    assert found == pytest.approx(len(TASKS) * [expected])


@SLOW
def test_a_lost_server_is_started_again(walks: Path) -> None:
    with WorkerPool(job_of(walks, Acting(server_and_self)), 2, Limits(), "forkserver") as pool:
        server, member = pool.call("measure", TASKS[0])
        assert server != os.getpid()
        os.kill(server, signal.SIGKILL)
        found = [answer for _, answer in pool.run("measure", TASKS)]
    assert len(found) == len(TASKS)
    assert not runs(member)


def test_forking_is_the_default_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_start_method() == "fork"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert default_start_method() == "forkserver"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jaxlib", signal)
        assert default_start_method() == "forkserver"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_start_method() == "spawn"


def test_the_default_is_known_without_torch() -> None:
    script = (
        "import sys; from rbtool.core.engine.pool import default_start_method\n"
        "print(default_start_method(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "fork False\n"


def test_another_word_is_refused(walks: Path) -> None:
    with pytest.raises(
        UsageError, match="'threads' is not a way to start worker processes, expected fork, forkserver, spawn"
    ):
        WorkerPool(job_of(walks, Acting(surroundings)), 2, Limits(), "threads")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_too_many_processes_are_an_error(walks: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WorkerFailed, match=r"cannot be started: BlockingIOError.*temporarily unavailable"):
        WorkerPool(job_of(walks, Acting(surroundings)), 2, Limits(), method)
