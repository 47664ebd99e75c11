"""Time `rbtool.convert` on a Minari dataset of 1,000,000 state steps next to reading and writing the same arrays.

    python benchmarks/convert_minari.py [--episodes 1000] [--steps 1000] [--rounds 5] [--folder DIR] [--limit 2.0]

The reference reads every array with plain h5py (`ds[()]`), writes the bytes to one file and syncs it. Rounds are
interleaved; the figures are medians in seconds and their ratio. Exits with 1 if the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

import rbtool
from rbtool.core.format import fs

COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")


def box(size: int, dtype: str) -> str:
    bounds = {"low": [float("-inf")] * size, "high": [float("inf")] * size}
    return json.dumps({"type": "Box", "dtype": dtype, "shape": [size], **bounds})


def build(folder: Path, episodes: int, steps: int) -> None:
    """Write a dataset in Minari's layout: observations float64 [17], actions float32 [6]."""
    fs.make_folder(folder / "data")
    draw = np.random.default_rng(0)
    with h5py.File(folder / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for number in range(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, seed=number, total_steps=steps)
            rows = (
                draw.normal(size=(steps + 1, 17)), draw.normal(size=(steps, 6)).astype(np.float32),
                draw.normal(size=steps), np.zeros(steps, bool), np.arange(steps) == steps - 1,
            )  # fmt: skip
            for name, data in zip(COLUMNS, rows, strict=True):
                group.create_dataset(name, data=data, chunks=True, maxshape=(None, *data.shape[1:]))
            group.create_group("infos")
    metadata = {
        "total_episodes": episodes, "total_steps": episodes * steps, "data_format": "hdf5",
        "observation_space": box(17, "float64"), "action_space": box(6, "float32"),
        "dataset_id": "bench/state-v0", "minari_version": "0.5.4",
    }  # fmt: skip
    fs.write_file(folder / "data" / "metadata.json", json.dumps(metadata).encode())


def copy_plainly(source: Path, target: Path) -> float:
    """Read every array whole, and write all bytes to one file; return the seconds."""
    started = time.perf_counter()
    descriptor = fs.create(target)
    with h5py.File(source / "data" / "main_data.hdf5") as file:
        for episode in file.values():
            for name in COLUMNS:
                fs.write(descriptor, memoryview(episode[name][()].reshape(-1).view(np.uint8)), target)
    fs.fsync(descriptor, target)
    os.close(descriptor)
    return time.perf_counter() - started


def convert(source: Path, target: Path) -> float:
    started = time.perf_counter()
    rbtool.convert(source, target)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=2.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        root = Path(scratch)
        build(root / "source", chosen.episodes, chosen.steps)
        plain, converted = [], []
        for _ in range(chosen.rounds):
            plain.append(copy_plainly(root / "source", root / "plain"))
            converted.append(convert(root / "source", root / "ted"))
            (root / "plain").unlink()
            shutil.rmtree(root / "ted")
    ratio = statistics.median(converted) / statistics.median(plain)
    print(f"{chosen.episodes:,} episodes of {chosen.steps:,} steps, median of {chosen.rounds} rounds")
    print(f"  read with h5py, write, fsync   {statistics.median(plain):6.2f} s")
    print(f"  rbtool.convert                 {statistics.median(converted):6.2f} s   {ratio:.2f} times as long")
    return int(ratio > chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
