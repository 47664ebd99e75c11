"""How many rows a second go through a chunk function, in this process and in one and two workers.

    python benchmarks/preprocess.py [ROWS]

Rows of 758 bytes in 11 leaves, as state datasets have them. Starting workers (a Python with torch each) is timed
apart: it costs the same for any dataset. Beside them: the time to read the same bytes and write them to one file
with fsync.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import rbtool
from rbtool.core.dataset import DatasetBuilder, EpisodeRow, Origin, Request, TedReader
from rbtool.core.progress import Silent
from rbtool.core.ted import (
    ACTION,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    EndReason,
    Field,
    ted_fields,
)

ROUNDS = 3
LENGTH = 1000
FUNCTION = """
def normalise(steps):
    for part in (steps, steps["next"]):
        part["observation"] = (part["observation"] - 0.5) / 0.29
    return steps
"""


class Clock(Silent):
    """Notes when the first chunk was finished and when all were."""

    first = last = 0.0
    rows = before = 0

    def advance(self, amount: int) -> None:
        self.last = time.perf_counter()
        if not self.first:
            self.first, self.before = self.last, amount
        self.rows += amount

    def rate(self) -> float:
        return (self.rows - self.before) / (self.last - self.first)


def make(folder: Path, rows: int) -> None:
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


def copy(source: Path, target: Path) -> float:
    begun = time.perf_counter()
    with TedReader(source) as reader, open(target, "wb") as file:
        for start, stop in reader.chunks():
            for field in reader.fields:
                file.write(reader.read(field.key, start, stop).data)
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def median(measure: Callable[[int], float], rounds: Sequence[int]) -> float:
    return statistics.median(measure(number) for number in rounds)


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "source", rows)
        size = TedReader(folder / "source").manifest.bytes
        (folder / "prep.py").write_text(FUNCTION)
        print(f"{rows:,} rows, {size / 1e6:,.0f} MB")
        seconds = median(lambda number: copy(folder / "source", folder / "copy"), range(ROUNDS))
        print(f"read and write to one file  {seconds:6.2f} s   {rows / seconds:12,.0f} rows/s")
        for workers in (0, 1, 2):
            rates, totals = [], []
            for _ in range(ROUNDS):
                clock, begun = Clock(), time.perf_counter()
                function = f"{folder}/prep.py:normalise"
                rbtool.preprocess(
                    folder / "source", function, folder / "made", num_workers=workers, force=True, progress=clock
                )
                totals.append(time.perf_counter() - begun)
                rates.append(clock.rate())
            who = "in this process" if not workers else f"{workers} worker{'s' * (workers > 1)}"
            print(
                f"{who:27} {statistics.median(totals):6.2f} s   {statistics.median(rates):12,.0f} rows/s once started"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300_000)
