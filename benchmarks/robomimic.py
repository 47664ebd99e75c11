"""Compare `rbtool.convert` of a robomimic file of low-dimensional episodes with copying its arrays.

    python benchmarks/robomimic.py [--episodes 1000] [--steps 150] [--rounds 5] [--without-next] [--folder DIR]
                                   [--limit 2.0]

Episodes have actions float64 [7], states float64 [32], rewards, dones and four observations float64 [10], [3], [4] and
[2], also after each step unless `--without-next` is given. For comparison: low_dim files of lift have about 200
episodes of 50 steps, those of MimicGen 1,000 of 100 to 300. The reference reads every array of every episode with h5py,
writes the bytes to one file and syncs it. Rounds are interleaved; the figures are medians in seconds and their ratio.
`survey` and `pieces` are the times of the reader alone: the survey of all episodes, and reading all rows. Exits with 1
if the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from shared.conversions import medians

from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.core.format import fs

WIDTHS = {"object": 10, "robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}


def build(path: Path, episodes: int, steps: int, *, following: bool) -> None:
    """Write a file in robomimic's layout: episodes end with dones and a reward of 1."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number in range(episodes):
            group = data.create_group(f"demo_{number}")
            group.attrs["num_samples"] = steps
            group["actions"], group["states"] = draw.normal(size=(steps, 7)), draw.normal(size=(steps, 32))
            last = np.arange(steps) == steps - 1
            group["rewards"], group["dones"] = last.astype("f8"), last.astype("i8")
            for name, width in WIDTHS.items():
                rows = draw.normal(size=(steps + 1, width))
                group[f"obs/{name}"] = rows[:-1]
                if following:
                    group[f"next_obs/{name}"] = rows[1:]
        data.attrs["total"] = episodes * steps


def copy_plainly(source: Path, target: Path) -> None:
    """Read every array, write its bytes to one file, and sync that."""
    descriptor = fs.create(target)

    def write(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            fs.write(descriptor, memoryview(np.ascontiguousarray(item[()]).reshape(-1).view(np.uint8)), target)

    with h5py.File(source) as file:
        file.visititems(write)
    fs.fsync(descriptor, target)
    os.close(descriptor)


def read_alone(source: Path) -> tuple[float, float]:
    """Seconds for the survey of all episodes, and for reading all their rows."""
    started = time.perf_counter()
    with RobomimicReader(source) as reader:
        reader.facts()
        surveyed = time.perf_counter()
        for _ in reader.pieces():
            pass
    return surveyed - started, time.perf_counter() - surveyed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-next", action="store_true", help="without next_obs, as robomimic writes by default")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=2.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "source.hdf5", Path(scratch) / "target"
        build(source, chosen.episodes, chosen.steps, following=not chosen.without_next)
        one, ours = medians(copy_plainly, source, target, chosen.rounds)
        read = [read_alone(source) for _ in range(chosen.rounds)]
    survey, pieces = (statistics.median(part) for part in zip(*read, strict=True))
    print(f"{chosen.episodes:,} episodes of {chosen.steps:,} steps, median of {chosen.rounds} rounds")
    print(f"  read with h5py, write, fsync   {one:6.2f} s")
    print(f"  rbtool.convert                 {ours:6.2f} s   {ours / one:.2f} times as long")
    print(f"  of it the reader: survey {survey:.2f} s, pieces {pieces:.2f} s")
    return int(ours > chosen.limit * one)


if __name__ == "__main__":
    sys.exit(main())
