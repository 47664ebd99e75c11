"""Time epochs over a dataset on one machine, through Ray Data and with rbtool's loader.

    python benchmarks/ray_data.py [MEGABYTES] [ROUNDS]

Both read all rows of all fields once: in order, and in shuffled batches of 256 rows. Then both double the actions and
write the result as a dataset. Ray is started, and its workers have read once, before its times are taken; the workers
of rbtool are started in every run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rbtool
from rbtool.core.format.contracts import Piece
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import Field, Timing, ted_fields

_LENGTH = 200
_ROW = 4 * (1024 + 8 + 1024 + 1)
_SOURCE: list[tuple[Field, Timing]] = [
    (Field(("action",), "float32", (8,), "action"), "step"),
    (Field(("observation",), "float32", (1024,), "observation"), "state"),
    (Field(("reward",), "float32", (), "reward"), "result"),
]


def write(folder: Path, megabytes: int) -> int:
    """Write episodes of 200 steps of random numbers; return the number of steps."""
    generator, count = np.random.default_rng(0), max(1, megabytes * 10**6 // _ROW // _LENGTH)
    builder = DatasetBuilder(folder, ted_fields(_SOURCE))
    ingest = Ingest(builder, _SOURCE)
    for number in range(count):
        ends = np.arange(_LENGTH) == _LENGTH - 1
        columns: dict[Any, Any] = {
            ("action",): generator.random((_LENGTH, 8), np.float32),
            ("observation",): generator.random((_LENGTH + 1, 1024), np.float32),
            ("reward",): generator.random(_LENGTH, np.float32),
        }
        ingest.add(Piece(number, columns, ends, np.zeros_like(ends), first=True, last=True))
    builder.finish(ingest.table, Origin(Request("benchmark", "random", "random")))
    builder.close()
    return count * _LENGTH


def double(steps: Any) -> Any:
    """Double the actions of steps."""
    steps["action"] = steps["action"] * 2
    return steps


def main(megabytes: int = 400, rounds: int = 3) -> None:
    """Print the median seconds and rows a second of each way, and how far the rounds are apart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = write(folder / "data", megabytes)
        rows = rbtool.to_ray_dataset(folder / "data")

        def in_order() -> int:
            buffer = rbtool.load_dataset(folder / "data", 4096, sampler=rbtool.SamplerWithoutReplacement(shuffle=False))
            return sum(map(len, buffer))

        def shuffled() -> int:
            return sum(map(len, rbtool.torch_dataset(folder / "data", 256, seed=0)))

        def ray_in_order() -> int:
            return sum(len(one["episode"]) for one in rows.iter_batches(batch_size=4096, batch_format="numpy"))

        def ray_shuffled() -> int:
            batches = rows.iter_batches(batch_size=256, batch_format="numpy", local_shuffle_buffer_size=4096)
            return sum(len(one["episode"]) for one in batches)

        def written(workers: int) -> int:
            made = rbtool.preprocess(folder / "data", double, folder / "made", num_workers=workers, force=True)
            return made.steps

        def ray_written() -> int:
            return rbtool.from_ray_dataset(rows.map_batches(double), folder / "made", force=True).steps

        ways: dict[str, Callable[[], int]] = {
            "in order, rbtool": in_order, "in order, Ray Data": ray_in_order,
            "shuffled, rbtool": shuffled, "shuffled (4,096 rows), Ray Data": ray_shuffled,
            "written, rbtool": partial(written, 0), "written, rbtool with 2 workers": partial(written, 2),
            "written, Ray Data": ray_written,
        }  # fmt: skip
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first one warms up
            for way, run in ways.items():
                started = time.perf_counter()
                if run() != steps:
                    raise SystemExit(f"{way} gave other rows")
                if number:
                    taken[way].append(time.perf_counter() - started)
        print(f"{steps:,} steps, {megabytes} MB")
        for way, times in taken.items():
            middle = statistics.median(times)
            print(f"{way:34} {middle:8.2f} s {steps / middle:12,.0f} rows/s  {min(times):.2f} to {max(times):.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
