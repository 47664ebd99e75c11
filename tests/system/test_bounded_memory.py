"""Memory does not grow with the data: datasets three times the cap on it go through every verb that writes."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, write_plan

CAP = 180 << 20
"""Bytes of RLIMIT_DATA for verbs without torch: numpy and h5py alone take about 95 MB of it."""
TORCH_CAP = 450 << 20
"""The same with torch and tensordict, which take about 305 MB."""
WIDTH = 128

CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""

DOUBLE = """
def double(rows):
    rows["observation"] = rows["observation"] * 2
    return rows
"""


def _write_minari(folder: Path, steps: int, episodes: int = 3) -> None:
    """Write a Minari dataset of a few long episodes, a block at a time."""
    (folder / "data").mkdir(parents=True)
    draw = np.random.default_rng(0)
    block = draw.normal(size=(steps + 1, WIDTH))
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number in range(episodes):
            group = file.create_group(f"episode_{number}")
            group["observations"] = block + number
            group["actions"] = block[:steps, :2].astype(np.float32)
            group["rewards"] = block[:steps, 0]
            group["terminations"] = np.zeros(steps, bool)
            group["truncations"] = np.arange(steps) == steps - 1
            group.create_group("infos")
    box = {"type": "Box", "dtype": "float64", "shape": [WIDTH], "low": [-np.inf] * WIDTH, "high": [np.inf] * WIDTH}
    action = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-np.inf] * 2, "high": [np.inf] * 2}
    metadata = {
        "total_episodes": episodes, "total_steps": steps * episodes, "data_format": "hdf5", "dataset_id": "big/walk-v0",
        "observation_space": json.dumps(box), "action_space": json.dumps(action), "minari_version": "0.5.4",
    }  # fmt: skip
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))


def _run(cap: int, *words: object) -> None:
    command = [sys.executable, "-c", CAPPED, str(cap), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _bytes(folder: Path) -> int:
    return TedReader(folder).manifest.bytes


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three times the cap, converted under it."""
    folder = tmp_path_factory.mktemp("big")
    _write_minari(folder / "source", 3 * CAP // (3 * WIDTH * 16))
    _run(CAP, "convert", folder / "source", folder / "data", "-q")
    return folder / "data"


def test_converting(big: Path) -> None:
    assert _bytes(big) >= 3 * CAP
    with TedReader(big) as reader:
        reader.verify_files()


@pytest.mark.slow
def test_checking(big: Path) -> None:
    _run(CAP, "check", big, "-q")


@pytest.mark.slow
def test_statistics_of_bytes(tmp_path: Path) -> None:
    """Each byte takes several words while it is described: a block of as many bytes as of floats would not fit."""
    leaf = PlannedLeaf(("image",), "uint8", (96, 96, 3), "root")
    write_plan(DatasetPlan((400, 300), ("terminated", "truncated"), (False, False), (leaf,)), tmp_path / "images")
    _run(CAP, "stats", tmp_path / "images", "--root", tmp_path / "root", "-q")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["ted", "h5", *(pytest.param(form, marks=pytest.mark.slow) for form in ("flat", "nested"))]
)
def test_saving_verifying_and_loading_a_checkpoint(big: Path, tmp_path: Path, form: str) -> None:
    saved, loaded = tmp_path / "saved.h5", tmp_path / "loaded"
    _run(CAP, "checkpoint", "save", big, saved, "--as", form, "-q")
    _run(CAP, "checkpoint", "verify", saved, big, "-q")
    _run(CAP, "checkpoint", "load", saved, loaded, "-q")
    assert TedReader(loaded).manifest.content_digest == TedReader(big).manifest.content_digest
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("ted",), ("packed", "--compress", "observation=zstd:1")])
def test_splitting_and_merging(big: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """A thread writes each part: what waits for them is bounded, too."""
    parts, merged = tmp_path / "parts", tmp_path / "merged"
    shares = ("--train", "0.4", "--val", "0.3", "--test", "0.3", "--in-order", "--layout", *layout)
    _run(CAP, "split", big, "--dest", parts, *shares, "-q")
    _run(CAP, "merge", *(parts / name for name in ("train", "val", "test")), merged, "--layout", "ted", "-q")
    assert TedReader(merged).manifest.content_digest == TedReader(big).manifest.content_digest
    subprocess.run(["rm", "-rf", tmp_path], check=True)


@pytest.fixture(scope="module")
def bigger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dataset of three times the cap with torch."""
    folder = tmp_path_factory.mktemp("bigger")
    _write_minari(folder / "source", 3 * TORCH_CAP // (3 * WIDTH * 16))
    _run(CAP, "convert", folder / "source", folder / "data", "-q")
    shutil.rmtree(folder / "source")
    yield folder / "data"
    shutil.rmtree(folder)  # pytest keeps the last folders, this one is large


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_preprocessing(bigger: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "prep.py").write_text(DOUBLE)
    _run(
        TORCH_CAP, "preprocess", bigger, "--fn", f"{tmp_path}/prep.py:double",
        "--dest", tmp_path / "out", "--num-workers", workers, "-q",
    )  # fmt: skip
    assert _bytes(tmp_path / "out") >= 3 * TORCH_CAP
    with TedReader(tmp_path / "out") as reader:
        reader.verify_files()
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def test_the_cap_is_one(tmp_path: Path) -> None:
    """Half of the data at once does not fit: the cap above means something."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({CAP},) * 2); b = bytearray({CAP})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode != 0
    assert resource.RLIMIT_DATA
