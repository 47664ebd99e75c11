"""Compare the worker pool of preprocess with `concurrent.futures`, `pebble` and `loky` on the same tasks.

    python benchmarks/worker_pools.py [--chunks 200] [--rounds 5] [--workers 2] [--only PART] [--methods NAME ...]

Every pool calls `TaskRunner.measure` for the chunks of one dataset; pebble and loky are left out if they are not
installed. loky starts its workers in its own way, whatever `--methods` says. Pools take turns in every round; figures
are medians. The parts are:

    start       seconds until all workers have answered once
    throughput  rows per second of a chunk function in workers that are ready
    killed      a worker gets SIGKILL in one chunk
    limit       one chunk hangs, with a time limit of 1 s if the pool has one
    parent      the process that owns the pool gets SIGKILL
    script      spawn from a script without `if __name__ == "__main__"`
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rbtool.core.engine.pool import WorkerPool
from rbtool.core.engine.tasks import Limits, Task
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.processor import Block, Context, LoadedProcessor, Processor
from rbtool.core.preprocess.run import Job, TaskRunner
from rbtool.core.testing.datasets import write_walks

try:
    import pebble
except ImportError:
    pebble = None
try:
    import loky
except ImportError:
    loky = None

METHODS = ("fork", "forkserver", "spawn")
PARTS = ("start", "throughput", "killed", "limit", "parent", "script")
ROWS = 5000  # of a chunk
LIMIT = 1.0
PRELOAD = ["torch", "tensordict", "rbtool.core.preprocess.run", "rbtool.core.preprocess.units"]


@dataclass(frozen=True)
class ChunkWork(Processor):
    """A chunk function that kills or hangs its process in the chunk `at`: `fault` is `kill` or `hang`."""

    fault: str = ""
    at: int = -1
    flag: Path = Path()

    @property
    def label(self) -> str:
        """The name in messages."""
        return "chunk work"

    def load(self, context: Context) -> LoadedProcessor:
        """Return the work in this process."""
        return _Loaded(self)

    def arguments(self) -> dict[str, Any]:
        """Return no parameters: the digest of the result does not depend on any."""
        return {}


class _Loaded(LoadedProcessor):
    def __init__(self, work: ChunkWork) -> None:
        self._work = work

    def apply(self, block: Block) -> Block:
        """Return the block."""
        return block

    def measure(self, block: Block) -> tuple[int, float]:
        """Normalize the observations of a chunk; return the process id and a sum."""
        work = self._work
        if block.first // ROWS == work.at and not work.flag.exists():
            work.flag.touch()
            if work.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        values = torch.from_numpy(block.columns["observation",].values).double()
        for _ in range(20):
            values = torch.tanh((values - values.mean(0)) / (values.std(0) + 1e-6))
        return os.getpid(), float(values.sum())


Answers = Iterator[tuple[Task, Any]]
Run = Callable[[list[Task]], Answers]
_runner: list[TaskRunner] = []


def begin(job: Job) -> None:
    """Prepare a worker of another library in the same way as a worker of rbtool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _runner[:] = [TaskRunner(job)]


def measure(task: Task) -> Any:
    """Run a task in a worker of a library."""
    return _runner[0].measure(task)


def context_of(method: str) -> Any:
    """Return the start method's context, with the imports of a worker preloaded for `forkserver`."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


@contextmanager
def ours(job: Job, workers: int, method: str) -> Iterator[Run]:
    """The pool of rbtool."""
    with WorkerPool(job, workers, Limits(LIMIT if "hang" in str(job.processor) else None), method) as pool:
        yield lambda tasks: pool.run("measure", tasks)


@contextmanager
def futures(job: Job, workers: int, method: str) -> Iterator[Run]:
    """`concurrent.futures`, which has no time limit for a running task: only waiting for it ends."""
    with executor(concurrent.futures.ProcessPoolExecutor(workers, context_of(method), begin, (job,)), job) as run:
        yield run


@contextmanager
def lokies(job: Job, workers: int, method: str) -> Iterator[Run]:
    """`loky`, whose workers are fresh processes; it has no time limit for a task either."""
    with executor(loky.ProcessPoolExecutor(workers, initializer=begin, initargs=(job,)), job) as run:
        yield run


@contextmanager
def executor(pool: Any, job: Job) -> Iterator[Run]:
    """Run tasks in a pool with the interface of `concurrent.futures`, whose workers are ended with it."""

    def run(tasks: list[Task]) -> Answers:
        left = {pool.submit(measure, task): task for task in tasks}
        try:
            for future in concurrent.futures.as_completed(left, 20 * LIMIT if "hang" in str(job.processor) else None):
                yield left.pop(future), future.exception() or future.result()
        except TimeoutError as error:
            yield from ((task, error) for task in left.values())

    try:
        yield run
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False)
        for process in processes:
            process.terminate()


@contextmanager
def pebbles(job: Job, workers: int, method: str) -> Iterator[Run]:
    """`pebble`, whose tasks have a limit and whose lost workers are replaced."""
    pool = pebble.ProcessPool(workers, context=context_of(method), initializer=begin, initargs=(job,))
    limit = LIMIT if "hang" in str(job.processor) else None

    def run(tasks: list[Task]) -> Answers:
        left = {pool.schedule(measure, args=(task,), timeout=limit): task for task in tasks}
        for future in concurrent.futures.as_completed(left):
            yield left[future], future.exception() or future.result()

    try:
        yield run
    finally:
        pool.stop()
        pool.join()


POOLS: dict[str, Any] = {"ours": ours, "concurrent.futures": futures} | ({"pebble": pebbles} if pebble else {})
POOLS |= {"loky": lokies} if loky else {}


class Bench:
    """A dataset of equal chunks, and the options."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.workers, self.rounds = folder, options.workers, options.rounds
        self.methods: list[str] = options.methods
        steps = ROWS * options.chunks
        write_walks(folder / "walks", [(ROWS, "truncated")] * options.chunks)
        self.reader = open_steps(folder / "walks")
        self.tasks = [Task(index, start, start + ROWS) for index, start in enumerate(range(0, steps, ROWS))]

    def job(self, fault: str = "", at: int = -1) -> Job:
        """Return a job that runs the chunk function, with a fault, over all steps."""
        flag = self.folder / "flag"
        flag.unlink(missing_ok=True)
        digest = self.reader.manifest.content_digest
        return Job(self.reader, digest, ChunkWork(fault, at, flag), None, len(self.tasks) * ROWS, False, 0)

    def ready(self, run: Run) -> None:
        """Run tasks until every worker has answered; a library may give ten rounds of them to fewer workers."""
        seen: set[int] = set()
        for _ in range(10):
            seen |= {answer[0] for _, answer in run(self.tasks[: 4 * self.workers])}
            if len(seen) == self.workers:
                break

    def turns(self, job: Callable[[Any, str], float]) -> dict[tuple[str, str], float]:
        """Return the medians of the results of `job` for each pool and start method, after a warm-up round."""
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(self.rounds + 1):
            for method in self.methods:
                for name, pool in POOLS.items():
                    found.setdefault((name, method), []).append(job(pool, method))
        return {place: statistics.median(values[1:]) for place, values in found.items()}


def start(bench: Bench) -> None:
    """Time the start of all workers."""

    def once(pool: Any, method: str) -> float:
        started = time.perf_counter()
        with pool(bench.job(), bench.workers, method) as run:
            bench.ready(run)
            return time.perf_counter() - started

    show("start-up, seconds until all workers have answered", bench.turns(once), "{:.2f}")


def throughput(bench: Bench) -> None:
    """Count rows per second of workers that are ready."""

    def once(pool: Any, method: str) -> float:
        with pool(bench.job(), bench.workers, method) as run:
            bench.ready(run)
            started = time.perf_counter()
            assert sum(not isinstance(answer, BaseException) for _, answer in run(bench.tasks)) == len(bench.tasks)
            return len(bench.tasks) * ROWS / (time.perf_counter() - started)

    show("throughput, rows per second", bench.turns(once), "{:,.0f}")


def fault(bench: Bench, kind: str) -> None:
    """Count the chunks that are lost with one, and whether the pool can be used afterwards."""
    print(f"\n{kind} in one of {len(bench.tasks)} chunks")
    for name, pool in POOLS.items():
        started = time.perf_counter()
        with pool(bench.job(kind, len(bench.tasks) // 2), bench.workers, "fork") as run:
            bench.ready(run)
            failed = [answer for _, answer in run(bench.tasks) if isinstance(answer, BaseException)]
            seconds = time.perf_counter() - started
            try:
                usable = not any(isinstance(answer, BaseException) for _, answer in run(bench.tasks[:2]))
            except Exception:
                usable = False
        kinds = sorted({type(error).__name__ for error in failed})
        print(f"  {name:20} {len(failed):4} lost {kinds}, {seconds:5.1f} s, usable afterwards: {usable}", flush=True)


def killed(bench: Bench) -> None:
    """Kill a worker."""
    fault(bench, "kill")


def limit(bench: Bench) -> None:
    """Let a chunk hang."""
    fault(bench, "hang")


def parent(bench: Bench) -> None:
    """Kill the owner of a pool while all its workers are in a task, and time the end of the workers."""
    print("\nseconds until all processes have ended after SIGKILL of their parent, and how many have not after 5 s")
    for method in bench.methods:
        for name in POOLS:
            flag = bench.folder / "flag"
            flag.unlink(missing_ok=True)
            command = [sys.executable, __file__, "--own", name, method, str(bench.folder / "walks")]
            owner = subprocess.Popen(command, start_new_session=True)
            while not flag.exists():
                time.sleep(0.05)
            workers = psutil.Process(owner.pid).children(recursive=True)
            owner.kill()
            owner.wait()
            started = time.perf_counter()
            _, left = psutil.wait_procs(workers, 5)
            alive = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
            print(f"  {name:20} {method:12} {time.perf_counter() - started:5.2f} s, {len(alive)} alive", flush=True)
            for one in alive:
                one.kill()


def own(name: str, method: str, walks: Path) -> None:
    """Own a pool with a worker that hangs."""
    reader = open_steps(walks)
    work = ChunkWork("sleep", 0, walks.with_name("flag"))
    job = Job(reader, reader.manifest.content_digest, work, None, 2 * ROWS, False, 0)
    with POOLS[name](job, 2, method) as run:
        for _ in run([Task(0, 0, ROWS), Task(1, ROWS, 2 * ROWS)]):
            pass


SCRIPT = """
import benchmarks_worker_pools as bench
from pathlib import Path
print("script runs", flush=True)
reader = bench.open_steps(Path({walks!r}))
job = bench.Job(reader, reader.manifest.content_digest, bench.ChunkWork(), None, bench.ROWS, False, 0)
with bench.POOLS[{name!r}](job, 1, "spawn") as run:
    answers = [answer for _, answer in run([bench.Task(0, 0, bench.ROWS)])]
print("answered" if type(answers[0]) is tuple else type(answers[0]).__name__, flush=True)
"""


def script(bench: Bench) -> None:
    """Spawn workers from a script that does not protect its code."""
    print("\nspawn from a script without `if __name__`")
    (bench.folder / "benchmarks_worker_pools.py").write_text(Path(__file__).read_text())
    for name in POOLS:
        file = bench.folder / "unprotected.py"
        file.write_text(SCRIPT.format(name=name, walks=str(bench.folder / "walks")))
        try:
            done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)
            lines, code = done.stdout.split("\n"), done.returncode
        except subprocess.TimeoutExpired as error:
            lines, code = (error.stdout or b"").decode().split("\n"), "still running after 60 s"
        print(
            f"  {name:20} script run {lines.count('script runs')} times, {lines[-2:-1]}, exit status {code}", flush=True
        )


def show(title: str, found: dict[tuple[str, str], float], form: str) -> None:
    """Print a table of pools and start methods."""
    methods = list(dict.fromkeys(method for _, method in found))
    print(f"\n{title}\n  {'':20}" + "".join(f"{method:>14}" for method in methods))
    for name in POOLS:
        print(f"  {name:20}" + "".join(f"{form.format(found[name, method]):>14}" for method in methods), flush=True)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--own", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        own(options.own[0], options.own[1], Path(options.own[2]))
        return
    torch.set_num_threads(1)
    parts = (start, throughput, killed, limit, parent, script)
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options)
        for part in parts:
            if options.only in (None, part.__name__):
                part(bench)


if __name__ == "__main__":
    import worker_pools  # by its name, so that workers can unpickle what it defines

    worker_pools.main()
