"""Memory does not grow with the data: datasets three times the cap on it go through every verb that writes."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari
from rlds_files import FLAGS, Spec, encoded, example, masked, write_dataset
from shard_files import ATARI_NAMES, add_episode, atari_name, save_gzip

from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.reader import PackedReader
from rbtool.core.open_steps import open_steps
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
from rbtool.cli.start import main
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


CAP_OF_BOUNDED_D4RL = 300 << 20
"""Bytes of RLIMIT_DATA: numpy and h5py alone take about 95 MB of it."""


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
    command = [sys.executable, "-c", CAPPED, str(CAP_OF_BOUNDED_D4RL), *map(str, words)]
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
    rows = 2 * CAP_OF_BOUNDED_D4RL // (WIDTH * 4) // (4 if episode < 100 else 1)
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


CAP_OF_BOUNDED_GROUPS = 300 << 20
"""Bytes of RLIMIT_DATA: numpy and h5py alone take about 95 MB of it."""


def generate_of_bounded_groups(path: Path, episodes: int, steps: int, width: int, *, packed: bool) -> None:
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


def convert_of_bounded_groups(path: Path, folder: Path) -> None:
    words = ["convert", path, folder / "out", "--final-step", "repeat", "-q"]
    command = [sys.executable, "-c", CAPPED, str(CAP_OF_BOUNDED_GROUPS), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_one_long_episode(packed: bool, tmp_path: Path) -> None:
    steps, width = 10_000, 64 * 64 * 3 * 4
    generate_of_bounded_groups(tmp_path / "a.hdf5", 1, steps, width, packed=packed)
    convert_of_bounded_groups(tmp_path / "a.hdf5", tmp_path)
    with TedReader(tmp_path / "out") as reader, h5py.File(tmp_path / "a.hdf5") as file:
        for start in (0, steps // 2, steps - 9):
            plain = file["data/demo_0/obs/image"][start : start + 9]
            assert reader.read(("observation", "image"), start, start + 9).tobytes() == plain.tobytes()
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
def test_very_many_short_episodes(tmp_path: Path) -> None:
    generate_of_bounded_groups(tmp_path / "a.hdf5", 4_000, 3, 16, packed=False)
    convert_of_bounded_groups(tmp_path / "a.hdf5", tmp_path)
    with TedReader(tmp_path / "out") as reader:
        assert reader.manifest.steps == 12_000


CAP_OF_BOUNDED_MINARI = {"hdf5": 180 << 20, "arrow": 220 << 20, "parquet": 300 << 20}
"""Bytes of RLIMIT_DATA: numpy with h5py or pyarrow takes 95 to 120 MB of it, the pages of a Parquet file some more."""
IMAGES_CAP = 280 << 20
"""The same with Pillow and the stacks of eight threads, which take up to 64 MB."""
BOX = spaces.Box(-1, 1, (2,), np.float32)
LONG = 40_000


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
    steps = 5 * CAP_OF_BOUNDED_MINARI[data_format] // (4 * LONG)
    folder = write(tmp_path, data_format, BOX, steps, infos={"task": ["é" * (LONG // 2)] * (steps + 1)})
    with convert_capped(CAP_OF_BOUNDED_MINARI[data_format], folder, tmp_path / "ted") as reader:
        assert reader.episode_text == [{"info.task": "é" * (LONG // 2)}]


@pytest.mark.slow
@pytest.mark.parametrize(("data_format", "length"), [("hdf5", LONG), ("arrow", LONG), ("parquet", LONG // 10)])
def test_long_texts_that_differ(data_format: str, length: int, tmp_path: Path) -> None:
    """A page of a Parquet file has 1,024 rows or more, and has to be read whole."""
    steps = 5 * CAP_OF_BOUNDED_MINARI[data_format] // (4 * length)
    said = [f"{row:06}" * (length // 6) for row in range(steps + 1)]
    folder = write(tmp_path, data_format, BOX, steps, infos={"said": said})
    with convert_capped(CAP_OF_BOUNDED_MINARI[data_format], folder, tmp_path / "ted") as reader:
        assert reader.read(("next", "info", "said"), steps - 1, steps).tobytes() == said[-1].encode()
        assert reader.manifest.bytes > 2 * CAP_OF_BOUNDED_MINARI[data_format]
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


@pytest.mark.slow
@pytest.mark.parametrize("data_format", CAP_OF_BOUNDED_MINARI)
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


SPEC: Spec = {
    **FLAGS, "observation": {"image": ("image", (128, 128, 3), "jpeg"), "state": ("tensor", "float32", (7,))},
    "action": ("tensor", "float32", (7,)), "reward": ("tensor", "float32", ()),
}  # fmt: skip
CAP_OF_BOUNDED_RLDS = 400 << 20
"""Bytes of RLIMIT_DATA."""
GIGABYTES = float(os.environ.get("RLDS_GIGABYTES", "1"))
STEPS = 300


def large_record(number: int, frames: list[bytes], padding: int) -> bytes:
    """An episode of `STEPS` frames, each with bytes behind its image, as some cameras write them."""
    draw = np.random.default_rng(number)
    flags = {f"steps/{name}": np.zeros(STEPS, int) for name in FLAGS}
    flags["steps/is_first"][0] = flags["steps/is_last"][-1] = 1
    state = np.repeat(np.arange(STEPS, dtype="f4") + number, 7)
    return example({
        **flags, "steps/action": draw.normal(size=7 * STEPS).astype("f4"), "steps/reward": np.ones(STEPS, "f4"),
        "steps/observation/state": state,
        "steps/observation/image": [frames[(number + step) % len(frames)] + bytes(padding) for step in range(STEPS)],
    })  # fmt: skip


@pytest.mark.slow
def test_a_dataset_of_several_gigabytes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frames = [encoded(draw.integers(0, 256, (128, 128, 3), np.uint8), "jpeg") for _ in range(8)]
    padding = 100_000
    one = large_record(0, frames, padding)
    count = max(4, int(GIGABYTES * 1e9 / len(one)))
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[one], [one]]}, SPEC)
    shards = sorted(folder.glob("*.tfrecord-*"))
    for index, shard in enumerate(shards):
        with shard.open("wb") as file:
            for number in range(index, count, 2):
                data = large_record(number, frames, padding)
                file.write(struct.pack("<Q", len(data)) + masked(struct.pack("<Q", len(data))) + data + masked(data))
    (folder / "dataset_info.json").unlink()
    command = [
        sys.executable, "-c", CAPPED, str(CAP_OF_BOUNDED_RLDS), "convert", str(folder), str(tmp_path / "out"), "-q",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    order = [*range(0, count, 2), *range(1, count, 2)]
    with open_steps(tmp_path / "out") as reader:
        assert reader.manifest.steps == count * (STEPS - 1)  # the truncated last step has no next observation
        for place in (0, count // 2, count - 1):
            start = place * (STEPS - 1)
            states = reader.read(("observation", "state"), start, start + 5)[:, 0]
            assert states.tolist() == [order[place] + step for step in range(5)]
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large


CAP_OF_BOUNDED_STREAMS = 400 << 20
"""Bytes of RLIMIT_DATA."""
ROWS = 280_000
"""Rows of a checkpoint."""


def convert_of_bounded_streams(*words: str | Path) -> None:
    command = [sys.executable, "-c", CAPPED, str(CAP_OF_BOUNDED_STREAMS), "convert", *map(str, words), "-q"]
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
    convert_of_bounded_streams(run, tmp_path / "out")
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
    convert_of_bounded_streams(tmp_path / "a.tar.xz", tmp_path / "out", "--trust-pickle")
    with TedReader(tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == lengths
        for number, start in ((0, 0), (399, 399 * 400), (400, 160_000), (400, 167_990)):
            assert (reader.read(("observation",), start, start + 9) == number % 251).all()
    subprocess.run(["rm", "-rf", tmp_path], check=True)


CAP_OF_BOUNDED_TABLES = 400 << 20
"""Bytes of RLIMIT_DATA: numpy, h5py and pyarrow alone take about 130 MB of it."""
WIDTH_OF_BOUNDED_TABLES = 32
BLOCK = 1 << 15
EPISODE = 1000


def block(start: int, stop: int) -> dict[str, Any]:
    """Rows `[start, stop)`: every number differs, and flags end an episode after each thousand."""
    numbers = np.arange(start * WIDTH_OF_BOUNDED_TABLES, stop * WIDTH_OF_BOUNDED_TABLES, dtype=np.int64).reshape(
        -1, WIDTH_OF_BOUNDED_TABLES
    ) % (1 << 22)
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
    names = [*(f"obs_{at}" for at in range(WIDTH_OF_BOUNDED_TABLES)), "act_0", "act_1", "end"]
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
        CAP_OF_BOUNDED_TABLES * 5 // 4 // (WIDTH_OF_BOUNDED_TABLES * (16 if kind == "csv" else 4))
    )  # whose numbers are float64 in memory, and slow to write
    path = KINDS[kind](tmp_path, rows)
    numbered = "_*" if kind == "csv" else ""
    words = [
        "convert", path, tmp_path / "out", "--from", "table", "--map", f"observation=obs{numbered}",
        "--map", f"action=act{numbered}", "--ends", "end", "--layout", "packed",
        "--final-step", "repeat", "-q",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, str(CAP_OF_BOUNDED_TABLES), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with open_steps(tmp_path / "out") as reader:
        assert reader.manifest.steps == rows
        assert set(reader.episodes.length.tolist()) == {EPISODE, rows % EPISODE or EPISODE}
        for start in (0, rows // 2, rows - 20):
            expected = block(start, start + 10)["obs"]
            assert np.array_equal(reader.read(("observation",), start, start + 10), expected)
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large
