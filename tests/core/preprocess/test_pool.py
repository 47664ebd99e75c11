"""What befalls worker processes: the ways to start them, and code that kills, leaves, hangs, floods or forks one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from processes import Forked
from waiting import HANG
from works import (
    SURROUNDINGS,
    TASKS,
    Acting,
    count_set_up,
    counted_set_ups,
    die,
    job_of,
    once,
    server_and_self,
    surroundings,
)

from rbtool.core.engine import pool as pool_module
from rbtool.core.engine.pool import WorkerHandle, WorkerPool, default_start_method
from rbtool.core.engine.tasks import FunctionFailed, Limits, Task, TaskFailed, WorkerFailed
from rbtool.core.engine.worker import NUMBER
from rbtool.core.errors import UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks

SLOW = pytest.mark.slow
each_method = pytest.mark.parametrize(
    "method", ["fork", pytest.param("forkserver", marks=SLOW), pytest.param("spawn", marks=SLOW)]
)
Start = Callable[..., WorkerPool]
ALL = {task.index: task.start for task in TASKS}
LOST = {
    "kill": "a worker process was killed by SIGKILL",
    "exit": "a worker process ended with exit status 3",
    "crash": "a worker process was killed by SIGSEGV",
    "hang": "a worker process took longer than 0.3 s",
}


def limits(how: str, retries: int = 1) -> Limits:
    """A time limit for a worker that hangs only."""
    return Limits(timeout=0.3 if how == "hang" else None, retries=retries)


@pytest.fixture(autouse=True)
def patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no worker exceed a time limit before it hangs: on a busy machine the others take longer than that, too."""
    own = WorkerHandle.left

    def left(worker: Any, timeout: float | None) -> float:
        seconds = own(worker, timeout)
        return seconds if mark_of(tmp_path, worker.process._pid).exists() else max(seconds, 0.02)

    monkeypatch.setattr(WorkerHandle, "left", left)


def mark_of(folder: Path, pid: int) -> Path:
    return folder / f"hung-{pid}"


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(folder, [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")] * 5)
    return folder


@pytest.fixture
def pool(walks: Path) -> Iterator[Start]:
    """Forked workers that act."""
    made: list[WorkerPool] = []

    def start(act: Callable[[int], Any], workers: int = 2, limits: Limits | None = None, **more: Any) -> WorkerPool:
        made.append(WorkerPool(job_of(reader, Acting(act, **more)), workers, limits or Limits(), "fork"))
        return made[-1]

    with TedReader(walks) as reader:
        yield start
        for one in made:
            one.close()


def answers(pool: WorkerPool, tasks: list[Task] = TASKS) -> dict[int, Any]:
    found = {task.index: answer for task, answer in pool.run("measure", tasks)}
    assert len(found) == len(tasks)
    return found


def open_descriptors() -> set[int]:
    found = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    return {descriptor for descriptor in found if Path(f"/proc/self/fd/{descriptor}").is_symlink()}


def all_but(lost: int) -> dict[int, int]:
    return {index: first for index, first in ALL.items() if index != lost}


def append(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(text)


def pid_runs(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", LOST)
def test_a_task_that_costs_its_worker_is_tried_by_another(pool: Start, tmp_path: Path, how: str) -> None:
    def act(first: int) -> int:
        if first == 30 and once(tmp_path / "died"):
            die(how, mark_of(tmp_path, os.getpid()))
        return first

    assert answers(pool(act, limits=limits(how))) == ALL


@pytest.mark.parametrize("how", LOST)
def test_a_task_that_costs_each_worker_fails_alone(pool: Start, tmp_path: Path, how: str) -> None:
    tries = tmp_path / "tries"

    def act(first: int) -> int:
        append(tries, f"{first}\n")
        if first == 30:
            die(how, mark_of(tmp_path, os.getpid()))
        return first

    found = answers(pool(act, limits=limits(how, retries=2)))
    failed = found.pop(3)
    assert found == all_but(3)
    assert isinstance(failed, TaskFailed)
    assert isinstance(failed.cause, WorkerFailed)
    assert (failed.task, failed.cause.text) == (TASKS[3], LOST[how])
    assert Counter(tries.read_text().split()) == {str(task.start): 1 for task in TASKS} | {"30": 3}


@pytest.mark.parametrize(("error", "tries"), [(FunctionFailed("it", "trace"), 3), (UsageError("never"), 1)])
def test_errors_that_may_pass_are_tried_again(pool: Start, tmp_path: Path, error: Exception, tries: int) -> None:
    def act(first: int) -> int:
        if first == 0:
            append(tmp_path / "tries", "x")
            raise error
        return first

    found = answers(pool(act, limits=Limits(retries=2)))
    assert str(found.pop(0).cause) == str(error)
    assert found == all_but(0)
    assert (tmp_path / "tries").read_text() == tries * "x"


@pytest.mark.parametrize("lose", [lambda: die("exit"), lambda: os.closerange(3, 256)], ids=["exit", "closes all"])
def test_no_retries_mean_one_try(pool: Start, tmp_path: Path, lose: Callable[[], None]) -> None:
    def act(first: int) -> int:
        if first == 90:
            append(tmp_path / "tries", "x")
            lose()
        return first

    found = answers(pool(act, limits=Limits(retries=0)))
    assert isinstance(found.pop(9), TaskFailed)
    assert found == all_but(9)
    assert (tmp_path / "tries").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), ZeroDivisionError("zero")])
def test_an_exception_is_an_answer_and_the_worker_continues(pool: Start, error: BaseException) -> None:
    def act(first: int) -> int:
        if first == 50:
            raise error
        return os.getpid()

    found = answers(pool(act, workers=1))
    failed = found.pop(5).cause
    assert type(error).__name__ in failed.text
    assert "in act" in failed.trace
    assert len(set(found.values())) == 1


def test_an_answer_that_cannot_be_sent_is_a_failure(pool: Start) -> None:
    found = answers(pool(lambda first: threading.Lock() if first == 20 else first))
    assert "cannot pickle" in found.pop(2).cause.text
    assert found == all_but(2)


def test_tasks_are_assigned_in_order_two_ahead(pool: Start) -> None:
    tasks = TASKS[::-1]
    assert [task for task, _ in pool(lambda first: first, workers=1).run("measure", tasks)] == tasks


def test_the_worker_that_is_called_gets_the_first_task(pool: Start) -> None:
    executor = pool(lambda first: os.getpid(), workers=3)
    called = executor.call("measure", TASKS[0])
    assert answers(executor)[0] == called


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_call_is_tried_like_a_task(pool: Start, tmp_path: Path, how: str) -> None:
    def act(first: int) -> int:
        if once(tmp_path / f"{first}-1") or (first == 10 and once(tmp_path / f"{first}-2")):
            die(how, mark_of(tmp_path, os.getpid()))
        return first

    executor = pool(act, limits=limits(how))
    assert executor.call("measure", TASKS[0]) == 0
    with pytest.raises(WorkerFailed) as caught:
        executor.call("measure", TASKS[1])
    assert caught.value.text == LOST[how]
    assert executor.call("measure", TASKS[1]) == 10


@pytest.mark.parametrize("at_work", [True, False])
def test_replacements_of_lost_workers_get_the_same_set_up(pool: Start, at_work: bool) -> None:
    executor = pool(lambda first: None, limits=Limits(retries=2))
    executor.broadcast("use_processor", Acting(counted_set_ups, count_set_up))
    executor.broadcast("use_processor", Acting(counted_set_ups, count_set_up))
    seen = set()
    for _, (pid, times) in executor.run("measure", TASKS):
        assert times == 2
        if at_work and len(seen) < 2 and pid not in seen:
            os.kill(pid, signal.SIGKILL)
        seen.add(pid)
    if not at_work:
        for pid in seen:
            os.kill(pid, signal.SIGKILL)
    again = list(answers(executor).values())
    assert {times for _, times in again} == {2}
    assert at_work or seen.isdisjoint(pid for pid, _ in again)


def test_a_broadcast_that_fails_is_raised(pool: Start) -> None:
    with pytest.raises(WorkerFailed, match="AttributeError") as caught:
        pool(lambda first: first).broadcast("no such method")
    assert "Traceback" in caught.value.trace


def test_a_processor_that_does_not_load_fails_at_once(pool: Start) -> None:
    def refuse() -> None:
        raise UsageError("not like this")

    with pytest.raises(UsageError, match="not like this"):
        pool(lambda first: first, begin=refuse).call("measure", TASKS[0])


@pytest.mark.parametrize("begin", [lambda: os._exit(5), lambda: die("kill")], ids=["exit", "kill"])
def test_workers_that_die_at_once_are_not_replaced_forever(pool: Start, begin: Callable[[], None]) -> None:
    with pytest.raises(WorkerFailed, match=r"a worker process (ended with exit status 5|was killed by SIGKILL)"):
        answers(pool(lambda first: first, begin=begin))


def test_a_child_that_returns_from_the_function_answers_nothing(pool: Start) -> None:
    def act(first: int) -> int:
        os.fork()
        return os.getpid()

    assert len(set(answers(pool(act, workers=1)).values())) == 1


@pytest.mark.parametrize("left_behind", ["forked", "spawned", "multiprocessing"])
def test_processes_of_a_lost_worker_hide_nothing_and_end(pool: Start, tmp_path: Path, left_behind: str) -> None:
    fifo = tmp_path / "held.fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def act(first: int) -> int:
        if first == 20:
            hold(fifo, left_behind)
            os.kill(os.getpid(), signal.SIGKILL)
        return first

    started = time.monotonic()
    assert answers(pool(act, limits=Limits(retries=0))).pop(2).cause.text == LOST["kill"]
    assert time.monotonic() - started < HANG
    os.set_blocking(held, True)
    with open(held, "rb") as file:
        assert file.read() == b"here", "at the end of the file nobody has it open"


def linger(tell: int) -> None:
    os.write(tell, b"x")
    time.sleep(HANG)
    os._exit(0)


def hold(fifo: Path, how: str) -> None:
    """Let another process keep a file and all else open for longer than the test may take."""
    write = os.open(fifo, os.O_WRONLY)
    ready, tell = os.pipe()
    if how == "forked" and os.fork() == 0:
        linger(tell)
    if how == "multiprocessing":
        multiprocessing.get_context("fork").Process(target=linger, args=(tell,)).start()
    if how == "spawned":
        for descriptor in open_descriptors():
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, True)
        subprocess.Popen(["sh", "-c", f"echo x >/proc/self/fd/{tell}; sleep {HANG:g}"], close_fds=False)
    os.read(ready, 1)
    os.write(write, b"here")


def test_a_flood_of_output_blocks_no_worker(pool: Start, capfd: pytest.CaptureFixture[str]) -> None:
    def act(first: int) -> int:
        print("x" * 2_000_000)
        os.write(1, b"y" * 1_000)
        return first

    assert answers(pool(act)) == ALL
    out, err = capfd.readouterr()
    assert (out, err.count("x"), err.count("y")) == ("", 20_000_000, 10_000)


@pytest.mark.parametrize("descriptors", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_opened_again(pool: Start, descriptors, capfd) -> None:
    def act(first: int) -> int:
        if first == 0:
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            print("heard", file=sys.stderr)
        return first

    assert answers(pool(act, workers=1)) == ALL
    assert capfd.readouterr() == ("", 9 * "heard\n")


def test_closing_the_iterator_stops_workers_with_a_task(pool: Start, tmp_path: Path) -> None:
    def act(first: int) -> int:
        if first and not (tmp_path / "go").exists():
            signal.pause()
        return os.getpid()

    executor = pool(act)
    running = executor.run("measure", TASKS[:3])
    first = next(running)[1]
    running.close()
    (tmp_path / "go").touch()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert first not in answers(executor).values()


def children() -> set[int]:
    """The children of this process, dead ones too: those of earlier tests among them."""
    return {child.pid for child in psutil.Process().children()}


def test_no_process_and_no_descriptor_stays(pool: Start) -> None:
    before, others = open_descriptors(), children()
    executor = pool(lambda first: die("exit") if first == 10 else first, limits=Limits(retries=3))
    answers(executor)
    assert children() > others
    executor.close()
    executor.close()
    assert open_descriptors() == before
    assert children() <= others  # none of ours, not even one to be waited for


# The ways to start worker processes, and what each leaves alone.


@each_method
def test_workers_are_processes_of_their_own(
    walks: Path, method: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
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


HEAD = f"""
import atexit, os, signal, sys
sys.path.insert(0, {str(Path(surroundings.__code__.co_filename).parent)!r})
from works import TASKS, Acting, job_of, surroundings, wait_for_ever
from pathlib import Path
from rbtool.core.engine.tasks import Limits
from rbtool.core.engine.pool import WorkerPool
"""
SCRIPT = f"""{HEAD}
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


@each_method
def test_the_callers_script_runs_and_ends_once(walks: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(walks), method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("once\nat exit\nfinalised\n", 0), done.stderr
    assert done.stderr.count("printed") == len(TASKS)


WAITING = f"""{HEAD}
source, method, os.environ["FIFO"] = sys.argv[1:]
with WorkerPool(job_of(Path(source), Acting(wait_for_ever)), 2, Limits(), method) as pool:
    list(pool.run("measure", TASKS))
"""


@each_method
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=SLOW, id="SIGINT"), pytest.param(signal.SIGKILL, id="SIGKILL")]
)
def test_workers_end_with_their_parent(walks: Path, tmp_path: Path, number: signal.Signals, method: str) -> None:
    fifo = tmp_path / "wait.fifo"
    os.mkfifo(fifo)
    process = Forked(WAITING, walks, method, fifo)
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
    assert not pid_runs(member)


def test_the_number_of_a_worker_that_has_ended_may_belong_to_another_process() -> None:
    ours, theirs = socket.socketpair()
    worker = pool_module._ServerChild(SimpleNamespace(connection=ours))
    _, (pipe, news), _, _ = socket.recv_fds(theirs, NUMBER.size, 2)
    worker.kill()  # before it is forked
    with subprocess.Popen(["sleep", str(HANG)], start_new_session=True) as other:
        try:
            for number in (other.pid, 0):
                os.write(news, NUMBER.pack(number))
            for descriptor in (theirs.detach(), pipe, news):
                os.close(descriptor)
            assert worker.ending() is not None
            worker.stop()
            with pytest.raises(subprocess.TimeoutExpired):  # it goes on
                other.wait(0.2)
        finally:
            other.kill()
            ours.close()


@SLOW
def test_a_server_computes_nothing_while_it_waits(walks: Path) -> None:
    with WorkerPool(job_of(walks, Acting(server_and_self)), 2, Limits(), "forkserver") as pool:
        number, member = pool.call("measure", TASKS[0])
        os.kill(member, signal.SIGKILL)
        assert len(list(pool.run("measure", TASKS))) == len(TASKS)
        server = psutil.Process(number)
        before = sum(server.cpu_times()[:2])
        time.sleep(0.5)
        assert sum(server.cpu_times()[:2]) - before < 0.1


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


def test_another_method_is_refused(walks: Path) -> None:
    expected = "'threads' is not a way to start worker processes, expected fork, forkserver, spawn"
    with pytest.raises(UsageError, match=expected):
        WorkerPool(job_of(walks, Acting(surroundings)), 2, Limits(), "threads")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_too_many_processes_are_an_error(walks: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WorkerFailed, match=r"cannot be started: BlockingIOError.*temporarily unavailable"):
        WorkerPool(job_of(walks, Acting(surroundings)), 2, Limits(), method)
