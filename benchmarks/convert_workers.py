"""Compare `rbtool.convert` with worker processes and without, for a compressed D4RL file and for a folder of shards.

    python benchmarks/convert_workers.py [--workers 2] [--rounds 3] [--steps 1000000] [--layout ted] [--folder DIR]
                                         [--limit 1.6]

The file has observations float32 [17] and actions float32 [6] in episodes of 1,000 steps, compressed with gzip as gym's
datasets of D4RL are. The folder has the same steps in compressed HDF5 files of robomimic's layout: a group an episode,
of which readers open one after the other. Sides are interleaved; the figures are medians in seconds, elapsed and of CPU
time over all processes, and how many times as fast workers are. Exits with 1 if that is below the limit in elapsed time.
On a machine with no free core for each worker nothing can be faster: `load` is how many processes wanted one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import d4rl
import h5py
import numpy as np

import rbtool

STEPS_AN_EPISODE = 1000


def build_groups(path: Path, steps: int) -> None:
    """Write a file of robomimic's layout: the group `data`, and in it one for each episode."""
    draw = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number in range(steps // STEPS_AN_EPISODE):
            group = data.create_group(f"demo_{number}")
            observations = draw.normal(size=(STEPS_AN_EPISODE + 1, 17)).astype(np.float32)
            done = np.zeros(STEPS_AN_EPISODE, np.int64)
            done[-1] = 1
            columns = {
                "actions": draw.normal(size=(STEPS_AN_EPISODE, 6)).astype(np.float32),
                "rewards": draw.normal(size=STEPS_AN_EPISODE), "dones": done,
                "obs/state": observations[:-1], "next_obs/state": observations[1:],
            }  # fmt: skip
            for name, values in columns.items():
                group.create_dataset(name, data=values, compression="gzip")
            group.attrs["num_samples"] = STEPS_AN_EPISODE
        data.attrs["total"] = steps // STEPS_AN_EPISODE * STEPS_AN_EPISODE
        data.attrs["env_args"] = "{}"


def measured(source: Path, target: Path, layout: str, workers: int) -> tuple[float, float]:
    """Convert once; return seconds elapsed and of CPU time."""
    started, cpu = time.perf_counter(), d4rl.cpu_seconds()
    rbtool.convert(source, target, layout=layout, num_workers=workers)
    found = time.perf_counter() - started, d4rl.cpu_seconds() - cpu
    shutil.rmtree(target)
    return found


def compare(name: str, source: Path, target: Path, chosen: argparse.Namespace) -> float:
    """Print the figures of one source; return how many times as fast workers are."""
    counts = (0, chosen.workers)
    measured(source, target, chosen.layout, 0)  # imports
    rounds = [[measured(source, target, chosen.layout, count) for count in counts] for _ in range(chosen.rounds)]
    medians = [[statistics.median(one[side][part] for one in rounds) for part in (0, 1)] for side in (0, 1)]
    (one, one_cpu), (many, many_cpu) = medians
    print(f"{name}: load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"  this process                {one:7.2f} s   CPU {one_cpu:7.2f} s")
    print(
        f"  {chosen.workers} worker processes          {many:7.2f} s   CPU {many_cpu:7.2f} s   {one / many:.2f} x as fast"
    )
    return one / many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layout", choices=["ted", "packed"], default="ted")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=1.6)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        table, groups, target = Path(scratch) / "gzip.hdf5", Path(scratch) / "groups.hdf5", Path(scratch) / "target"
        packing = {"compression": "gzip"}
        d4rl.build(table, chosen.steps // STEPS_AN_EPISODE, STEPS_AN_EPISODE, following=False, packing=packing)
        build_groups(groups, chosen.steps)
        found = [
            compare("one table, gzip", table, target, chosen),
            compare("a group an episode", groups, target, chosen),
        ]
    return int(min(found) < chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
