"""Compare `rbtool.convert` of a D4RL file of 1,000,000 steps with copying its arrays, and with a loop over rows.

    python benchmarks/d4rl.py [--episodes 1000] [--steps 1000] [--rounds 5] [--loop-rounds 1] [--following] [--gzip]
                              [--layout ted] [--folder DIR] [--limit 3.0] [--faster 5.0]

The file has observations float32 [17] and actions float32 [6]. There are three references. The copy reads every array
whole with h5py, writes the bytes to one file and syncs it. The floor reads the same arrays, but writes and syncs as
many bytes as the dataset has, which also holds next observations, episode numbers and flags (1.8 times the bytes
without `--following`). The loop makes transitions from single rows, as `d4rl.qlearning_dataset` does, and then writes
and syncs them. Rounds are interleaved; the figures are medians in seconds, of wall time and of CPU time (system and
user), and their ratios. On a busy machine, CPU time varies less. Exits with 1 if the ratio to the copy is above the
limit in both wall time and CPU time, or if the loop is not at least `--faster` times as slow as the conversion.

The target for the ratio to the copy is 2. On two free cores it is 1.5 to 1.8 in wall time, as much as the floor, and
2.3 in CPU time, because the source is read a second time for its digest, and the result is digested, too. On busy
cores, the ratio in wall time approaches the one in CPU time; the limit leaves room for that. `--episodes 45000 --steps
22` has many short episodes.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import rbtool
from rbtool.core.format import fs

Array = np.ndarray[Any, Any]


def build(path: Path, episodes: int, steps: int, *, following: bool, packing: dict[str, Any]) -> None:
    """Write a file in D4RL's layout: every fourth episode is terminated, all others end at the time limit."""
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


def copy_as_dataset(source: Path, target: Path) -> None:
    """Read every array whole and write as many bytes as the dataset has."""
    with h5py.File(source) as file:
        data = {name: file[name][()] for name in file}
    after = data.pop("next_observations", data["observations"])
    done, rows = data["terminals"] | data["timeouts"], len(data["rewards"])
    write_synced([*data.values(), after, done, np.zeros(rows, np.int64)], target)


def loop_over_rows(source: Path, target: Path) -> None:
    """Make transitions row by row: the next row is the next observation, and last rows at time limits are skipped."""
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


@dataclass
class Side:
    """One side of the comparison, with its wall time and CPU time in each round."""

    label: str
    call: Callable[[Path, Path], object]
    elapsed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, source: Path, target: Path) -> None:
        """Call it once and remove what it wrote."""
        started, cpu = time.perf_counter(), cpu_seconds()
        self.call(source, target)
        self.elapsed.append(time.perf_counter() - started)
        self.cpu.append(cpu_seconds() - cpu)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    def over(self, other: Side) -> tuple[float, float]:
        """Return how many times as long as another side it takes, in wall time and in CPU time."""
        medians = [
            (statistics.median(one), statistics.median(two))
            for one, two in ((self.elapsed, other.elapsed), (self.cpu, other.cpu))
        ]
        return medians[0][0] / medians[0][1], medians[1][0] / max(medians[1][1], 1e-9)

    def line(self, other: Side) -> str:
        """Return a line of the table, with ratios to another side."""
        elapsed, cpu = self.over(other)
        return (
            f"  {self.label:<38}{statistics.median(self.elapsed):7.2f} s {elapsed:6.2f} x"
            f"   CPU {statistics.median(self.cpu):7.2f} s {cpu:6.2f} x"
        )


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop-rounds", type=int, default=1)
    parser.add_argument("--following", action="store_true", help="with next_observations, as in gym v1 and v2")
    parser.add_argument("--gzip", action="store_true", help="compressed, as in gym v1 and v2")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--layout", choices=["ted", "packed"], default="ted")
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--faster", type=float, default=5.0)
    chosen = parser.parse_args()
    packing = {"compression": "gzip"} if chosen.gzip else {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "source.hdf5", Path(scratch) / "target"
        build(source, chosen.episodes, chosen.steps, following=chosen.following, packing=packing)
        plain = Side("read with h5py, write, fsync", copy_plainly)
        floor = Side("the same with a dataset's bytes", copy_as_dataset)
        ours = Side("rbtool.convert", lambda source, target: rbtool.convert(source, target, layout=chosen.layout))
        loop = Side("a loop over rows, then write", loop_over_rows)
        ours.run(source, target)  # imports
        ours = Side(ours.label, ours.call)
        for number in range(chosen.rounds):
            for side in (plain, floor, ours):
                side.run(source, target)
            if number < chosen.loop_rounds:
                loop.run(source, target)
    print(f"{chosen.episodes:,} episodes of {chosen.steps:,} steps, median of {chosen.rounds} rounds")
    for side in (plain, floor, ours, *([loop] if loop.elapsed else [])):
        print(side.line(plain))
    within = min(ours.over(plain)) <= chosen.limit
    faster = not loop.elapsed or loop.over(ours)[0] >= chosen.faster
    print(f"  rbtool.convert takes {ours.over(floor)[0]:.2f} times as long as the floor", end="")
    print(f", the loop {loop.over(ours)[0]:.1f} times as long as rbtool.convert" if loop.elapsed else "")
    return int(not (within and faster))


if __name__ == "__main__":
    sys.exit(main())
