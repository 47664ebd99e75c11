"""Compressed streams of several gigabytes are converted in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from shard_files import ATARI_NAMES, add_episode, atari_name, save_gzip

from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.reader import PackedReader

CAP = 400 << 20
"""Bytes of RLIMIT_DATA."""
ROWS = 280_000
"""Rows of a checkpoint."""
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""


def convert(*words: str | Path) -> None:
    command = [sys.executable, "-c", CAPPED, str(CAP), "convert", *map(str, words), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def frames(start: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Frames that differ by their number."""
    found = np.full((count, 84, 84), 7, np.uint8)
    found[:, 0, :4] = np.arange(start, start + count, dtype=">u4").view(np.uint8).reshape(count, 4)
    return found


def write_frames(path: Path, number: int) -> None:
    """Write the frames of a checkpoint in a stream, since they do not fit into memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (ROWS, 84, 84)})
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.getvalue())
        for start in range(0, ROWS, 1000):
            file.write(frames(number * ROWS + start, 1000).tobytes())


@pytest.fixture(scope="module")
def frame_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """4 GB of frames in two files, which runs with episodes of any length have."""
    folder = tmp_path_factory.mktemp("frames")
    files = [folder / atari_name("observation", number) for number in range(2)]
    for number, file in enumerate(files):
        write_frames(file, number)
    return files


def write_checkpoint(folder: Path, number: int, length: int) -> None:
    """Write what a checkpoint has next to its frames, in episodes of `length` steps."""
    at = np.arange(number * ROWS, (number + 1) * ROWS)
    columns = ((at % 18).astype("i4"), (at % 3 - 1).astype("f4"), (at % length == length - 1).astype("u1"))
    for name, column in zip(ATARI_NAMES[1:], columns, strict=True):
        save_gzip(folder / atari_name(name, number), column)
    save_gzip(folder / atari_name("add_count", number), np.array((number + 1) * ROWS))
    save_gzip(folder / atari_name("invalid_range", number), np.array([ROWS - 2, ROWS - 1, 0, 1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1_700, 400_000])
def test_a_run_of_many_frames(length: int, frame_files: list[Path], tmp_path: Path) -> None:
    """Short episodes, and a single long one."""
    run = tmp_path / "1"
    run.mkdir()
    for number, file in enumerate(frame_files):
        write_checkpoint(run, number, length)
        os.link(file, run / file.name)
    convert(run, tmp_path / "out")
    with PackedReader(tmp_path / "out") as reader:
        for start in (0, ROWS - 5, 2 * ROWS - 20):
            assert reader.read(("observation",), start, start + 9).tobytes() == frames(start, 9).tobytes()
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
def test_an_archive_of_many_episodes(tmp_path: Path) -> None:
    """2 GB of pixels in 400 episodes, and an episode of 100 MB."""
    lengths = [*[400] * 400, 8_000]
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz", preset=0) as archive:
        for number, length in enumerate(lengths):
            pixels = np.full((length + 1, 3, 64, 64), number % 251, np.uint8)
            add_episode(archive, number, pixels, np.zeros(length, "i8"), np.ones(length, "f4"))
    convert(tmp_path / "a.tar.xz", tmp_path / "out", "--trust-pickle")
    with TedReader(tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == lengths
        for number, start in ((0, 0), (399, 399 * 400), (400, 160_000), (400, 167_990)):
            assert (reader.read(("observation",), start, start + 9) == number % 251).all()
    subprocess.run(["rm", "-rf", tmp_path], check=True)
