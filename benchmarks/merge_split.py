"""Time `merge` and `split` next to a synced copy of the same bytes: `cp -r` and an fsync of each file.

    python benchmarks/merge_split.py [--steps N] [--length N] [--width N] [--rounds N] [--folder DIR]

The dataset has episodes of `length` steps with a state of `width` numbers. Rounds are interleaved, and the figures are
medians. The target is at most twice the time of the copy; on two free cores the verbs take 0.85 to 1.05 times as long
as the copy. Datasets are in the page cache, as after a conversion.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rbtool
from rbtool.core.format.contracts import Piece
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import Field, Timing, ted_fields


def write(folder: Path, steps: int, length: int, width: int) -> None:
    """Write a dataset of random episodes."""
    fields: list[tuple[Field, Timing]] = [
        (Field(("observation",), "float32", (width,), "observation"), "state"),
        (Field(("action",), "float32", (6,), "action"), "step"),
        (Field(("reward",), "float32", (), "reward"), "result"),
    ]
    draw = np.random.default_rng(0)
    with DatasetBuilder(folder, ted_fields(fields)) as builder:
        ingest = Ingest(builder, fields)
        for number in range(steps // length):
            columns = {
                ("observation",): draw.random((length + 1, width), np.float32),
                ("action",): draw.random((length, 6), np.float32),
                ("reward",): draw.random(length, np.float32),
            }
            last = np.arange(length) == length - 1
            ingest.add(Piece(number, columns, last, last & False, first=True, last=True))
        builder.finish(ingest.table, Origin(Request("made", "made", "made")))


def copy(sources: list[Path], dest: Path) -> None:
    """Copy folders and sync every file."""
    for number, source in enumerate(sources):
        shutil.copytree(source, dest / str(number))
    for file in dest.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        work = Path(place)
        write(work / "data", options.steps, options.length, options.width)
        parts = rbtool.split(work / "data", work / "parts", train=0.8, val=0.1, test=0.1)
        halves = rbtool.split(work / "data", work / "halves", train=0.5, val=0.5, in_order=True)
        pieces, two = ([part.path for part in found.parts] for found in (parts, halves))
        jobs: dict[str, Callable[[Path], object]] = {
            "copy and fsync": lambda dest: copy([work / "data"], dest),
            "split 0.8 0.1 0.1": lambda dest: rbtool.split(work / "data", dest, train=0.8, val=0.1, test=0.1),
            "merge these parts": lambda dest: rbtool.merge(pieces, dest),
            "merge two halves": lambda dest: rbtool.merge(two, dest),
            "diff": lambda dest: rbtool.diff(work / "data", work / "data"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for name, job in jobs.items():
                started = time.perf_counter()
                job(work / "out")
                seconds[name].append(time.perf_counter() - started)
                shutil.rmtree(work / "out", ignore_errors=True)
        size = sum(file.stat().st_size for file in (work / "data").rglob("*") if file.is_file())
    print(f"{size / 1e6:,.0f} MB in episodes of {options.length} steps, {options.rounds} rounds")
    base = statistics.median(seconds["copy and fsync"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:20} median {median:.2f} s   {median / base:.2f} x the copy   {size / median / 1e6:,.0f} MB/s")


if __name__ == "__main__":
    main()
