"""A table is converted in bounded memory, however long it is, whatever kind of file it is in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rbtool.core.open_steps import open_steps

CAP = 400 << 20
"""Bytes of RLIMIT_DATA: numpy, h5py and pyarrow alone take about 130 MB of it."""
WIDTH = 32
BLOCK = 1 << 15
EPISODE = 1000
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""


def block(start: int, stop: int) -> dict[str, Any]:
    """Rows `[start, stop)`: every number differs, and flags end an episode after each thousand."""
    numbers = np.arange(start * WIDTH, stop * WIDTH, dtype=np.int64).reshape(-1, WIDTH) % (1 << 22)
    return {
        "obs": numbers.astype(np.float32), "act": numbers[:, :2].astype(np.float32),
        "end": (np.arange(start, stop) % EPISODE == EPISODE - 1).astype(np.uint8),
    }  # fmt: skip


def blocks(rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)]


def as_h5(path: Path, rows: int) -> Path:
    with h5py.File(path / "a.h5", "w") as file:
        for name, values in block(0, 1).items():
            file.create_dataset(name, (rows, *values.shape[1:]), values.dtype, compression="lzf", chunks=True)
        for start, stop in blocks(rows):
            for name, values in block(start, stop).items():
                file[name][start:stop] = values
    return path / "a.h5"


def as_npy(path: Path, rows: int) -> Path:
    (path / "a").mkdir()
    for name, values in block(0, 1).items():
        file = np.lib.format.open_memmap(
            path / "a" / f"{name}.npy", mode="w+", dtype=values.dtype, shape=(rows, *values.shape[1:])
        )
        for start, stop in blocks(rows):
            file[start:stop] = block(start, stop)[name]
    return path / "a"


def as_npz(path: Path, rows: int) -> Path:
    folder = as_npy(path, rows)
    np.savez_compressed(path / "a.npz", **{file.stem: np.load(file, mmap_mode="r") for file in folder.iterdir()})
    return path / "a.npz"


def as_parquet(path: Path, rows: int) -> Path:
    writer = None
    for start, stop in blocks(rows):
        made = block(start, stop)
        table = pa.table({
            name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            if values.ndim == 2
            else values
            for name, values in made.items()
        })  # fmt: skip
        writer = writer or pq.ParquetWriter(path / "a.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path / "a.parquet"


def as_csv(path: Path, rows: int) -> Path:
    names = [*(f"obs_{at}" for at in range(WIDTH)), "act_0", "act_1", "end"]
    with (path / "a.csv").open("w") as file:
        file.write(",".join(names) + "\n")
        for start, stop in blocks(rows):
            made = block(start, stop)
            table = np.concatenate([made["obs"], made["act"], made["end"][:, None]], 1).astype(int).tolist()
            file.writelines(",".join(map(str, row)) + "\n" for row in table)
    return path / "a.csv"


KINDS: dict[str, Callable[[Path, int], Path]] = {
    "hdf5": as_h5, "npy": as_npy, "npz": as_npz, "parquet": as_parquet, "csv": as_csv,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_larger_than_the_memory(kind: str, tmp_path: Path) -> None:
    rows = (
        CAP * 5 // 4 // (WIDTH * (16 if kind == "csv" else 4))
    )  # whose numbers are float64 in memory, and slow to write
    path = KINDS[kind](tmp_path, rows)
    numbered = "_*" if kind == "csv" else ""
    words = [
        "convert", path, tmp_path / "out", "--from", "table", "--map", f"observation=obs{numbered}",
        "--map", f"action=act{numbered}", "--ends", "end", "--layout", "packed",
        "--final-step", "repeat", "-q",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, str(CAP), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with open_steps(tmp_path / "out") as reader:
        assert reader.manifest.steps == rows
        assert set(reader.episodes.length.tolist()) == {EPISODE, rows % EPISODE or EPISODE}
        for start in (0, rows // 2, rows - 20):
            expected = block(start, start + 10)["obs"]
            assert np.array_equal(reader.read(("observation",), start, start + 10), expected)
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large
