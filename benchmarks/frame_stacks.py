"""Time batches of stacked frames next to the same number of batches of single frames.

    python benchmarks/frame_stacks.py [--rows 30000] [--frames 4] [--batch-size 32] [--rounds 300] [--limit 1.5]

Rows are like Atari's: uint8 [84, 84], in episodes of 1,700 steps. One side draws a batch with `StoredFrameStack`; the
other draws as many batches of the same size as a stack has frames, without a transform. The storages are a dataset in
layout `packed`, with and without compression, a dataset in layout `ted`, and a ring in memory. Both sides take turns in
one process with one torch thread; figures are medians in microseconds and their ratio. Exits with 1 if a ratio is above
the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rbtool
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.packed.builder import row_builder
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import NEXT, Field

LENGTH = 1_700
FIELDS = (
    Field(("action",), "int32", (), "action"),
    Field(("episode",), "int64", (), "id"),
    Field(("observation",), "uint8", (84, 84), "observation"),
    Field((NEXT, "observation"), "uint8", (84, 84), "observation"),
    Field((NEXT, "reward"), "float32", (1,), "reward"),
    *(Field((NEXT, name), "bool", (1,), "done") for name in ("done", "terminated", "truncated")),
)


def episodes(rows: int) -> Iterator[dict[tuple[str, ...], Any]]:
    """Episodes of a picture with a part that changes."""
    draw = np.random.default_rng(0)
    picture = np.kron(draw.integers(0, 256, (12, 12), np.uint8), np.ones((7, 7), np.uint8))
    for number, start in enumerate(range(0, rows, LENGTH)):
        count = min(LENGTH, rows - start)
        frames = np.repeat(picture[None], count + 1, axis=0)
        frames[:, 30:50, 30:50] = draw.integers(0, 256, (count + 1, 20, 20), np.uint8)
        last = np.arange(count)[:, None] == count - 1
        yield {
            ("action",): draw.integers(0, 18, count).astype("i4"), ("episode",): np.full(count, number),
            ("observation",): frames[:-1], (NEXT, "observation"): frames[1:],
            (NEXT, "reward"): np.ones((count, 1), "f4"), (NEXT, "done"): last, (NEXT, "terminated"): last,
            (NEXT, "truncated"): np.zeros_like(last),
        }  # fmt: skip


def write(folder: Path, rows: int) -> Path:
    """Write a packed dataset."""
    table = []
    with row_builder(folder, FIELDS, "packed") as builder:
        for number, columns in enumerate(episodes(rows)):
            length = len(columns["episode",])
            builder.append(columns, np.arange(length) == length - 1)
            table.append(EpisodeRow(number, length, 0.0, True, False, EndReason.TERMINATED))
        builder.finish(table, Origin(Request("benchmark", "benchmark", folder.name)))
    return folder


def storages(folder: Path, rows: int) -> Iterator[tuple[str, Any]]:
    packed = write(folder / "packed", rows)
    yield "packed", rbtool.load_dataset(packed).storage
    rbtool.convert(packed, folder / "ted", layout="ted")
    ted = rbtool.load_dataset(folder / "ted").storage
    yield "ted", ted
    rbtool.convert(packed, folder / "small", layout="packed", compress=["observation=zstd:3"])
    yield "packed, zstd", rbtool.load_dataset(folder / "small").storage
    ring = rbtool.LazyTensorStorage(rows)
    buffer = rbtool.TensorDictReplayBuffer(storage=ring)
    for start in range(0, rows + rows // 3, 1000):  # wrapped
        buffer.extend(ted[torch.arange(start, start + 1000) % rows])
    yield "ring", ring


def in_turns(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the median microseconds of both."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, times in zip((one, other), found, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(found[0]) * 1e6, statistics.median(found[1]) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--frames", type=int, default=4, help="of a stack")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=1.5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    print(f"{chosen.rows:,} frames, batches of {chosen.batch_size}, stacks of {chosen.frames}")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        for name, storage in storages(Path(scratch), chosen.rows):
            arguments = {"storage": storage, "batch_size": chosen.batch_size, "writer": rbtool.ImmutableDatasetWriter()}
            stack = rbtool.StoredFrameStack(chosen.frames, "observation")
            single = rbtool.TensorDictReplayBuffer(**arguments)
            stacked = rbtool.TensorDictReplayBuffer(**arguments, transform=stack)
            in_turns(stacked.sample, single.sample, 50)
            ours, others = in_turns(
                stacked.sample, lambda one=single: [one.sample() for _ in range(chosen.frames)], chosen.rounds
            )
            worst = max(worst, ours / others)
            print(f"  {name:14}{ours:7.0f} µs, {chosen.frames} batches{others:7.0f} µs   {ours / others:.2f}")
    return int(worst > chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
