"""Time preprocess next to TorchRL's, and next to a plain copy of the bytes of the result.

    python benchmarks/preprocess.py [--steps 200000] [--peer-rows 2000] [--rounds 5] [--only PART] [--folder DIR]

TorchRL has to be installed in the same environment; without it only our own times are shown. Rows are 11 leaves of
758 bytes, in episodes of 1,000 steps. Start-up and the publishing of the result are part of every time; what was made
before is removed between the times. A function of a single row is run over `--peer-rows` rows by TorchRL, whose rows a
second are compared. All take turns in one process; the figures are medians, and TorchRL's time over ours.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.ted.builder import DatasetBuilder, Origin
from rbtool.core.format.ted.reader import TedReader
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import ACTION, NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, ted_fields

try:
    logging.disable(logging.INFO)
    from torchrl.data import TensorStorage
    from torchrl.data.datasets.common import BaseDatasetExperienceReplay
except ImportError:
    BaseDatasetExperienceReplay = None

LENGTH = 1000
PARTS = ("chunk", "row", "operations", "workers")


def normalise(rows: Any) -> Any:
    """Scale the observations; works on rows and on a single one."""
    for part in (rows, rows["next"]):
        part["observation"] = (part["observation"] - 0.5) / 0.29
    return rows


def compute(rows: Any) -> Any:
    """Burn processor time that grows with the rows: 100 small matrix products."""
    found = rows["observation"].float()
    weights = torch.eye(39) * 0.99
    for _ in range(100):
        found = torch.tanh(found @ weights)
    return rows.set("found", found)


def make(folder: Path, rows: int) -> None:
    """Write a dataset of random rows."""
    draw = np.random.default_rng(0)
    source = [
        (Field(("observation",), "float64", (39,), "observation"), "state"),
        (Field(("info", "qpos"), "float32", (5,), "info"), "state"),
        (Field(ACTION, "float32", (20,), "action"), "step"),
        (Field(("reward",), "float64", (), "reward"), "result"),
    ]
    fields = ted_fields(source)
    episodes = [EpisodeRow(n, LENGTH, 0.0, False, True, EndReason.TRUNCATED) for n in range(rows // LENGTH)]
    flags = np.zeros((LENGTH, 1), bool)
    ends = flags.copy()
    ends[-1] = True
    with DatasetBuilder(folder, fields) as builder:
        for number in range(rows // LENGTH):
            columns = {field.key: draw.random((LENGTH, *field.shape)).astype(field.numpy) for field in fields}
            for key in (("observation",), ("info", "qpos")):
                columns["next", *key][:-1] = columns[key][1:]
            columns |= {NEXT_TERMINATED: flags, NEXT_TRUNCATED: ends, NEXT_DONE: ends}
            columns["episode",] = np.full(LENGTH, number)
            columns[NEXT_REWARD] = np.ones((LENGTH, 1))
            builder.append(columns)
        builder.finish(episodes, Origin(Request("benchmark", "benchmark", "benchmark")))


class Bench:
    """The dataset, and the place of what is made of it, which is cleared before each job."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.source, self.made, self.steps = folder / "source", folder / "made", steps
        make(self.source, steps)
        self._peer = _peer_dataset(self.source) if BaseDatasetExperienceReplay else None

    def ours(self, fn: Any = None, **options: Any) -> Callable[[], object]:
        """Run rbtool's preprocess."""

        def job() -> None:
            rbtool.preprocess(self.source, fn, self.made, **options)

        return job

    def clear(self) -> None:
        """Remove what a job made."""
        shutil.rmtree(self.made, ignore_errors=True)

    def take_turns(self, rounds: int, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds of each job; every round runs all of them, the first of which does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds + 1):
            for name, job in jobs.items():
                self.clear()
                started = time.perf_counter()
                job()
                seconds[name].append(time.perf_counter() - started)
        return {name: statistics.median(times[1:]) for name, times in seconds.items()}

    def theirs(self, fn: Any, rows: int | None = None, **options: Any) -> Callable[[], object]:
        """Run TorchRL's preprocess, on the first rows."""

        def job() -> None:
            self._peer.preprocess(fn, dest=self.made, num_frames=rows, **options)

        return job

    def copied(self) -> Callable[[], object]:
        """Read the bytes of the last result and write them to other files, synced as ours are."""
        kept = self.made.with_name("kept")
        shutil.rmtree(kept, ignore_errors=True)
        self.made.rename(kept)
        with TedReader(kept) as reader:
            paths = [kept / file.path for file in reader.manifest.files if file.path.endswith(".memmap")]

        def job() -> None:
            self.made.mkdir()
            for number, path in enumerate(paths):
                with open(path, "rb", buffering=0) as source, open(self.made / str(number), "wb", buffering=0) as file:
                    while data := source.read(1 << 22):
                        file.write(data)
                    os.fsync(file.fileno())

        return job

    @property
    def has_peer(self) -> bool:
        """Whether TorchRL is there."""
        return self._peer is not None


def _peer_dataset(source: Path) -> Any:
    class Rows(BaseDatasetExperienceReplay):
        """The rows as a dataset of TorchRL."""

        data_path = data_path_root = source

        def _is_downloaded(self) -> bool:
            return True

    data = TensorDict.load_memmap(source)
    return Rows(storage=TensorStorage(data), batch_size=32)


def chunk(bench: Bench, options: argparse.Namespace) -> None:
    """A function of many rows at once."""
    size = 10_000
    jobs = {"ours, fork": bench.ours(normalise, num_workers=2, chunk_size=size, start_method="fork")}
    jobs["ours, in process"] = bench.ours(normalise, num_workers=0, chunk_size=size)
    if bench.has_peer:
        jobs["TorchRL, fork"] = bench.theirs(normalise, num_workers=2, chunksize=size, mp_start_method="fork")
        jobs["TorchRL, spawn"] = bench.theirs(normalise, num_workers=2, chunksize=size)
    show(bench, "chunk function", jobs, options.rounds, dict.fromkeys(jobs, bench.steps))


def row(bench: Bench, options: argparse.Namespace) -> None:
    """A function of a single row."""
    jobs = {"ours": bench.ours(normalise, unit="row", num_workers=2)}
    jobs["ours, without vmap"] = bench.ours(normalise, unit="row", vmap=False, num_workers=2)
    rows = dict.fromkeys(jobs, bench.steps)
    if bench.has_peer:
        jobs["TorchRL, fork"] = bench.theirs(
            normalise, options.peer_rows, num_workers=2, chunksize=0, mp_start_method="fork"
        )
        rows["TorchRL, fork"] = options.peer_rows
    show(bench, "function of a row", jobs, min(options.rounds, 3), rows)


def operations(bench: Bench, options: argparse.Namespace) -> None:
    """Select, cat and cast without Python, next to a copy of the bytes of the result."""
    program = {
        "cast": {"observation": "float32"}, "cat": {"obs": ["observation", "info.qpos"]},
        "select": ["obs", "action", "reward"],
    }  # fmt: skip
    for name, workers in (("in process", 0), ("two workers", 2)):
        job = bench.ours(operations=program, num_workers=workers)
        bench.clear()
        job()
        jobs = {f"ours, {name}": job, "copy": bench.copied()}
        show(
            bench, f"select, cat, cast, {name}", jobs, options.rounds, dict.fromkeys(jobs, bench.steps), against="copy"
        )


def workers(bench: Bench, options: argparse.Namespace) -> None:
    """What a second worker is worth where the function computes."""
    jobs = {f"{count} workers": bench.ours(compute, num_workers=count, chunk_size=5000) for count in (2, 1)}
    show(bench, "a function that computes", jobs, options.rounds, dict.fromkeys(jobs, bench.steps))


def show(
    bench: Bench,
    title: str,
    jobs: dict[str, Callable[[], object]],
    rounds: int,
    rows: dict[str, int],
    against: str = "",
) -> None:
    """Run the jobs in turns and print rows a second, and how many times as fast the first one is as each."""
    seconds = bench.take_turns(rounds, jobs)
    rates = {name: rows[name] / found for name, found in seconds.items()}
    first = rates[next(iter(rates))]
    print(f"\n{title}")
    for name, rate in rates.items():
        print(f"  {name:24} {seconds[name]:8.3f} s {rate:14,.0f} rows/s   first : this {first / rate:8.2f}")
    if against:
        print(f"  time of the first over that of the {against}: {rates[against] / first:.2f}")


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--peer-rows", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        bench = Bench(Path(place), math.ceil(options.steps / LENGTH) * LENGTH)
        for part in (chunk, row, operations, workers):
            if options.only in (None, part.__name__):
                part(bench, options)


if __name__ == "__main__":
    main()
