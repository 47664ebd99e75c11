"""Compare `rbtool.convert` of a D4RL file of 1,000,000 steps with copying its arrays, and with a loop over rows.

    python benchmarks/d4rl.py [--episodes 1000] [--steps 1000] [--rounds 5] [--loop-rounds 1] [--following] [--gzip]
                              [--folder DIR] [--limit 6.0] [--faster 5.0]

The file has observations float32 [17] and actions float32 [6]. One other side reads every array whole with h5py, writes
their bytes to one file and syncs it. The other is a loop over single rows, as `d4rl.qlearning_dataset` makes
transitions, which then writes and syncs them. Rounds are interleaved; the figures are medians in seconds and their
ratios. Exits with 1 if the first ratio is above the limit, or the loop is not `--faster` times as slow.

The target of the first ratio is 2. Compressed files are within it; others are not yet, so the limit is higher. What is
written also has the next observations, which the file does not have: 1.8 times its bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import rbtool
from rbtool.core.format import fs

Array = np.ndarray[Any, Any]


def build(path: Path, episodes: int, steps: int, *, following: bool, packing: dict[str, Any]) -> None:
    """Write a file in D4RL's layout: every episode ends by time limit, but each fourth, which is terminated."""
    draw, rows = np.random.default_rng(0), episodes * steps
    last = np.arange(rows) % steps == steps - 1
    terminal = last & (np.arange(rows) // steps % 4 == 0)
    observations = draw.normal(size=(rows + 1, 17)).astype(np.float32)
    columns = {
        "observations": observations[:-1], "actions": draw.normal(size=(rows, 6)).astype(np.float32),
        "rewards": draw.normal(size=rows).astype(np.float32), "terminals": terminal, "timeouts": last & ~terminal,
    }  # fmt: skip
    if following:
        columns["next_observations"] = observations[1:]
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, **packing)


def write_synced(arrays: list[Array], target: Path) -> None:
    descriptor = fs.create(target)
    for array in arrays:
        fs.write(descriptor, memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), target)
    fs.fsync(descriptor, target)
    os.close(descriptor)


def copy_plainly(source: Path, target: Path) -> None:
    """Read every array whole and write its bytes to one file."""
    with h5py.File(source) as file:
        write_synced([file[name][()] for name in file], target)


def loop_over_rows(source: Path, target: Path) -> None:
    """Make transitions row by row: the row after it is the next observation, last rows by time limit are skipped."""
    with h5py.File(source) as file:
        data = {name: file[name][()] for name in file}
    before, after, actions, rewards, done = [], [], [], [], []
    for row in range(len(data["rewards"]) - 1):
        if data["timeouts"][row]:
            continue
        before.append(data["observations"][row].astype(np.float32))
        after.append(data["observations"][row + 1].astype(np.float32))
        actions.append(data["actions"][row].astype(np.float32))
        rewards.append(data["rewards"][row].astype(np.float32))
        done.append(bool(data["terminals"][row]))
    write_synced([np.array(column) for column in (before, after, actions, rewards, done)], target)


def convert(source: Path, target: Path) -> None:
    rbtool.convert(source, target)


def seconds(call: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    started = time.perf_counter()
    call(source, target)
    took = time.perf_counter() - started
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop-rounds", type=int, default=1)
    parser.add_argument("--following", action="store_true", help="with next_observations, as in gym v1 and v2")
    parser.add_argument("--gzip", action="store_true", help="compressed, as in gym v1 and v2")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=6.0)
    parser.add_argument("--faster", type=float, default=5.0)
    chosen = parser.parse_args()
    packing = {"compression": "gzip"} if chosen.gzip else {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "source.hdf5", Path(scratch) / "target"
        build(source, chosen.episodes, chosen.steps, following=chosen.following, packing=packing)
        plain, converted, looped = [], [], []
        for number in range(chosen.rounds):
            plain.append(seconds(copy_plainly, source, target))
            converted.append(seconds(convert, source, target))
            if number < chosen.loop_rounds:
                looped.append(seconds(loop_over_rows, source, target))
    one, ours = statistics.median(plain), statistics.median(converted)
    print(f"{chosen.episodes:,} episodes of {chosen.steps:,} steps, median of {chosen.rounds} rounds")
    print(f"  read with h5py, write, fsync   {one:6.2f} s")
    print(f"  rbtool.convert                 {ours:6.2f} s   {ours / one:.2f} times as long")
    slow = True
    if looped:
        other = statistics.median(looped)
        slow = other >= chosen.faster * ours
        print(f"  a loop over rows, then write   {other:6.2f} s   {other / ours:.1f} times as long as rbtool")
    return int(ours > chosen.limit * one or not slow)


if __name__ == "__main__":
    sys.exit(main())
