"""Memory does not grow with long texts and images: Minari datasets larger than the cap on it are converted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari

from rbtool.core.format.memmap.reader import TedReader

CAP = {"hdf5": 180 << 20, "arrow": 220 << 20, "parquet": 300 << 20}
"""Bytes of RLIMIT_DATA: numpy with h5py or pyarrow takes 95 to 120 MB of it, the pages of a Parquet file some more."""
IMAGES_CAP = 280 << 20
"""The same with Pillow and the stacks of eight threads, which take up to 64 MB."""
BOX = spaces.Box(-1, 1, (2,), np.float32)
LONG = 40_000
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""


def write(root: Path, data_format: str, space: spaces.Space[Any], steps: int, **more: Any) -> Path:
    episode = make_episode(space, BOX, steps, np.random.default_rng(0), **more)
    return write_minari(root, "made/long-v0", space, BOX, [episode], data_format=data_format)


def convert_capped(cap: int, folder: Path, dest: Path) -> TedReader:
    command = [sys.executable, "-c", CAPPED, str(cap), "convert", str(folder), str(dest), "-q"]
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve a gigabyte of addresses
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return TedReader(dest)


@pytest.mark.slow
@pytest.mark.parametrize("data_format", ["hdf5", pytest.param("arrow", marks=pytest.mark.slow), "parquet"])
def test_a_long_text_that_stays_the_same(data_format: str, tmp_path: Path) -> None:
    steps = 5 * CAP[data_format] // (4 * LONG)
    folder = write(tmp_path, data_format, BOX, steps, infos={"task": ["é" * (LONG // 2)] * (steps + 1)})
    with convert_capped(CAP[data_format], folder, tmp_path / "ted") as reader:
        assert reader.episode_text == [{"info.task": "é" * (LONG // 2)}]


@pytest.mark.slow
@pytest.mark.parametrize(("data_format", "length"), [("hdf5", LONG), ("arrow", LONG), ("parquet", LONG // 10)])
def test_long_texts_that_differ(data_format: str, length: int, tmp_path: Path) -> None:
    """A page of a Parquet file has 1,024 rows or more, and has to be read whole."""
    steps = 5 * CAP[data_format] // (4 * length)
    said = [f"{row:06}" * (length // 6) for row in range(steps + 1)]
    folder = write(tmp_path, data_format, BOX, steps, infos={"said": said})
    with convert_capped(CAP[data_format], folder, tmp_path / "ted") as reader:
        assert reader.read(("next", "info", "said"), steps - 1, steps).tobytes() == said[-1].encode()
        assert reader.manifest.bytes > 2 * CAP[data_format]
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
@pytest.mark.parametrize("data_format", CAP)
def test_images(data_format: str, tmp_path: Path) -> None:
    space, size = spaces.Box(0, 255, (96, 96, 3), np.uint8), 96 * 96 * 3
    steps = 5 * IMAGES_CAP // (8 * size)
    some = np.random.default_rng(1).integers(0, 256, (20, 96, 96, 3), np.uint8)
    folder = write(tmp_path, data_format, space, steps, observations=[some[row % 20] for row in range(steps + 1)])
    with convert_capped(IMAGES_CAP, folder, tmp_path / "ted") as reader:
        first, again = reader.read(("observation",), 7, 8), reader.read(("next", "observation"), 26, 27)
        assert first.tobytes() == again.tobytes()
        assert reader.manifest.bytes > IMAGES_CAP
    subprocess.run(["rm", "-rf", tmp_path], check=True)
