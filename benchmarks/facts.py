"""Measure what the table of the README states, next to TorchRL, and write it to docs/facts.json.

    python benchmarks/facts.py [--rows 1000000] [--rounds 15] [--only PART] [--write]

TorchRL has to be installed in the same environment. Speed: both sides take turns in one process with one torch thread;
figures are medians of the time of one call, rows are those of storages.py, 11 leaves of 758 bytes, in episodes of 200
steps. Boundaries: a ring that is full and wrapped in mid-episode is saved, loaded into a new buffer, and slices are
drawn from it; one is wrong if its steps do not follow each other. Kills: SIGKILL at every change of the file system
by a verb; `tests/crash/runner.py` looks at what is left. `--only` keeps the facts whose names hold PART; `--write`
renews docs/facts.json and the table of the README.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from storages import state_rows
from tensordict import TensorDict

import rbtool

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / place) for place in ("docs/tools", "tests/standins")]

import facts_table  # noqa: E402
import struck_work  # noqa: E402

LENGTH = 200
CALLS_SECONDS = 0.02
SLICES, OF = 1000, 32
KILLED = ("convert", "preprocess", "save-h5", "dump-flat")


def libraries() -> list[tuple[Any, Any]]:
    """Our names and TorchRL's: buffers and storages, and samplers."""
    logging.disable(logging.INFO)
    import torchrl.data as peer
    from torchrl.data.replay_buffers import samplers

    return [(rbtool, rbtool), (peer, samplers)]


def episodes(rows: int) -> TensorDict:
    data = state_rows(rows)
    steps = torch.arange(rows)
    data["episode"] = steps // LENGTH
    done = (steps % LENGTH == LENGTH - 1)[:, None]
    data["next", "done"] = data["next", "truncated"] = done
    data["next", "terminated"] = torch.zeros_like(done)
    return data


def filled(library: Any, sampler: Any, rows: int, folder: Path) -> Any:
    storage = library.LazyMemmapStorage(rows, scratch_dir=folder)
    buffer = library.ReplayBuffer(storage=storage, sampler=sampler)
    for _ in range(0, rows, 50_000):
        buffer.extend(episodes(min(rows, 50_000)))
    return buffer


Job = Callable[[], object]


def speeds(rows: int, folder: Path) -> Iterator[tuple[str, str, list[Job]]]:
    """Names, and the call to time, ours and theirs."""

    def both(name: str, make: Callable[[Any], Any]) -> list[Any]:
        return [
            filled(library, make(draws), rows, folder / f"{name}-{number}")
            for number, (library, draws) in enumerate(libraries())
        ]

    made = both("random", lambda draws: draws.RandomSampler())
    yield "random", "256 random steps of 1M in a memory map", [lambda rb=rb: rb.sample(256) for rb in made]
    data = state_rows(1000)
    yield "extend", "write 1,000 steps", [lambda rb=rb: rb.extend(data) for rb in made]
    del made
    made = both("slices", lambda draws: draws.SliceSampler(num_slices=8, traj_key="episode"))
    yield "slices", "8 slices of 32 steps, within episodes", [lambda rb=rb: rb.sample(256) for rb in made]
    del made


def time_of(job: Job, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        job()
    return (time.perf_counter() - started) / calls


def medians(jobs: list[Job], rounds: int) -> list[float]:
    """Seconds of a call of each; they take turns."""
    calls = [max(1, int(CALLS_SECONDS / max(time_of(job, 3), 1e-6))) for job in jobs]
    taken = [[time_of(job, count) for job, count in zip(jobs, calls, strict=True)] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*taken, strict=True)]


def wrong_slices(library: Any, draws: Any, folder: Path) -> int:
    """How many of 1,000 slices join steps that do not follow each other, after a checkpoint of a wrapped ring."""
    size, longest = 1_000, 70

    def made() -> Any:
        sampler = draws.SliceSampler(slice_len=OF, end_key=("next", "done"))
        return library.ReplayBuffer(storage=library.LazyTensorStorage(size), sampler=sampler)

    written = made()
    numbers = torch.arange(size + size // 2 + 11)
    done = (numbers % longest == longest - 1)[:, None]
    steps = TensorDict({"step": numbers, "next": {"done": done}}, [len(numbers)])
    for start in range(0, len(numbers), 37):
        written.extend(steps[start : start + 37])
    written.dumps(folder)
    loaded = made()
    loaded.loads(folder)
    batch = loaded.sample(SLICES * OF)["step"].view(SLICES, OF)
    return int((batch.diff(dim=1) != 1).any(1).sum())


def kills(job: str, folder: Path) -> dict[str, int]:
    """Strike a job at every operation, over an older result; the runner fails if anything else than both is left."""
    folder.mkdir()
    struck_work.prepare(folder)
    words = [sys.executable, ROOT / "tests/crash/runner.py", folder, job, "--over"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def measured(options: argparse.Namespace, folder: Path) -> Iterator[facts_table.Fact]:
    command = "python benchmarks/facts.py --only {}"
    for name, what, jobs in speeds(options.rows, folder):
        if options.only in name:
            ours, theirs = (value * 1e6 for value in medians(jobs, options.rounds))
            ratio = f"{theirs:.0f} µs ({theirs / ours:.1f} ×)"
            yield facts_table.Fact(what, f"{ours:.0f} µs", ratio, command.format(name))
    if options.only in "boundaries":
        ours, theirs = (
            wrong_slices(library, draws, folder / f"ring-{number}")
            for number, (library, draws) in enumerate(libraries())
        )
        what = f"slices across a boundary, of {SLICES:,}: ring wrapped in mid-episode, saved, loaded"
        yield facts_table.Fact(what, f"{ours:,}", f"{theirs:,}", command.format("boundaries"))
    if options.only in "kills":
        struck = [kills(job, folder / job) for job in KILLED]
        total, old = (sum(counts[name] for counts in struck) for name in ("operations", "old"))
        what = f"`kill -9` at each of {total:,} changes of the disk: convert, preprocess, save, dump"
        ours = f"older result {old:,} times, new one {total - old:,}, neither 0"
        yield facts_table.Fact(what, ours, "not tested", command.format("kills"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = []
    with tempfile.TemporaryDirectory() as place:
        for fact in measured(options, Path(place)):
            facts.append(fact)
            print(*dataclasses.astuple(fact), sep="   ", flush=True)
    if options.write:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        facts_table.write(facts_table.Facts(date, version("torch"), version("torchrl"), tuple(facts)))


if __name__ == "__main__":
    main()
