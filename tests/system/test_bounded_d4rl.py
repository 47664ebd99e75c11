"""A D4RL file is converted in bounded memory, however long it is and however short or long its episodes are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool.core.format.memmap.reader import TedReader

CAP = 300 << 20
"""Bytes of RLIMIT_DATA: numpy and h5py alone take about 95 MB of it."""
WIDTH = 128
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""


def generate(
    path: Path, rows: int, episode: int, *, following: bool = False, packing: dict[str, Any] | None = None
) -> None:
    """Write a file of observations float32 [128] and actions float32 [4], a block at a time."""
    block = np.random.default_rng(0).normal(size=(1 << 16, WIDTH)).astype(np.float32)
    widths = {"observations": (WIDTH,), "actions": (4,), "rewards": ()}
    if following:
        widths["next_observations"] = (WIDTH,)
    with h5py.File(path, "w") as file:
        columns = {
            name: file.create_dataset(name, (rows, *row), "f4", **(packing or {})) for name, row in widths.items()
        }
        for start in range(0, rows, len(block)):
            stop = min(start + len(block), rows)
            values = block[: stop - start] + start
            columns["observations"][start:stop] = values
            columns["actions"][start:stop] = values[:, :4]
            columns["rewards"][start:stop] = values[:, 0]
            if following:
                columns["next_observations"][start:stop] = values + 1
        last = np.arange(rows) % episode == episode - 1
        file["terminals"], file["timeouts"] = np.zeros(rows, bool), last


def run(*words: object) -> None:
    command = [sys.executable, "-c", CAPPED, str(CAP), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def convert(path: Path, folder: Path, rows: int) -> None:
    run("convert", path, folder / "out", "--final-step", "repeat", "-q")
    with TedReader(folder / "out") as reader:
        assert reader.manifest.steps == rows
        for start in (0, rows // 2, rows - 10):
            with h5py.File(path) as file:
                plain = file["observations"][start : start + 10]
            assert reader.read(("observation",), start, start + 10).tobytes() == plain.tobytes()
    subprocess.run(["rm", "-rf", folder], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
@pytest.mark.parametrize(("episode", "following"), [(1 << 30, False), (1 << 30, True), (37, False)])
def test_one_long_episode_and_many_short_ones(episode: int, following: bool, tmp_path: Path) -> None:
    rows = 2 * CAP // (WIDTH * 4) // (4 if episode < 100 else 1)
    generate(tmp_path / "a.hdf5", rows, episode, following=following)
    convert(tmp_path / "a.hdf5", tmp_path, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "packing"), [(5 << 30, {}), (1 << 30, {"compression": "gzip", "compression_opts": 1, "chunks": True})]
)
def test_gigabytes(size: int, packing: dict[str, Any], tmp_path: Path) -> None:
    rows = size // (WIDTH * 4)
    generate(tmp_path / "a.hdf5", rows, 1000, packing=packing)
    run("inspect", tmp_path / "a.hdf5", "-q")
    convert(tmp_path / "a.hdf5", tmp_path, rows)
