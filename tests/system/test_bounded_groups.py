"""A file with a group an episode is converted in bounded memory: one long episode, and very many short ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from rbtool.core.format.memmap.reader import TedReader

CAP = 300 << 20
"""Bytes of RLIMIT_DATA: numpy and h5py alone take about 95 MB of it."""
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""


def generate(path: Path, episodes: int, steps: int, width: int, *, packed: bool) -> None:
    """Write episodes of images uint8 `[steps, width]`, each different, without next observations."""
    block = np.random.default_rng(0).integers(0, 256, (64, width), np.uint8)
    packing = {"chunks": (64, width), "compression": "gzip", "compression_opts": 1} if packed else {}
    with h5py.File(path, "w") as file:
        for number in range(episodes):
            group = file.create_group(f"data/demo_{number}")
            images = group.create_dataset("obs/image", (steps, width), "u1", **packing)
            for start in range(0, steps, len(block)):
                stop = min(start + len(block), steps)
                images[start:stop] = block[: stop - start] + np.uint8(start % 251)
            group["actions"], group["rewards"] = np.zeros((steps, 1), "f4"), np.zeros(steps, "f4")


def convert(path: Path, folder: Path) -> None:
    words = ["convert", path, folder / "out", "--final-step", "repeat", "-q"]
    command = [sys.executable, "-c", CAPPED, str(CAP), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_one_long_episode(packed: bool, tmp_path: Path) -> None:
    steps, width = 10_000, 64 * 64 * 3 * 4
    generate(tmp_path / "a.hdf5", 1, steps, width, packed=packed)
    convert(tmp_path / "a.hdf5", tmp_path)
    with TedReader(tmp_path / "out") as reader, h5py.File(tmp_path / "a.hdf5") as file:
        for start in (0, steps // 2, steps - 9):
            plain = file["data/demo_0/obs/image"][start : start + 9]
            assert reader.read(("observation", "image"), start, start + 9).tobytes() == plain.tobytes()
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
def test_very_many_short_episodes(tmp_path: Path) -> None:
    generate(tmp_path / "a.hdf5", 4_000, 3, 16, packed=False)
    convert(tmp_path / "a.hdf5", tmp_path)
    with TedReader(tmp_path / "out") as reader:
        assert reader.manifest.steps == 12_000
