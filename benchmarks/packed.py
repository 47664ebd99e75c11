"""Time the layout `packed` next to `ted` and TorchRL's memory maps of the same rows, warm and cold.

    python benchmarks/packed.py [--rows 1000000] [--frames 10000] [--rounds 30] [--only PART]

TorchRL has to be installed in the same environment; without it only rbtool's times are shown. Rows are those of a robot
arm, 755 bytes in `ted`. All sides take turns in one process with one torch thread; figures are medians. In the cold
part, the files are dropped from the page cache before every batch, and both rbtool storages assume that the data exceed
memory; megabytes count what the process reads from the disk. Frames are those of gymnasium's CartPole, scaled to 84 x
84.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Manifest, Request
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.packed.builder import row_builder
from rbtool.core.format.packed.schema import RowCodec
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import NEXT, Field

try:
    logging.disable(logging.INFO)
    import torchrl.data as peer
except ImportError:
    peer = None

LIBC = ctypes.CDLL(None)
LAYOUTS = ("ted", "packed")
LENGTH = 200
STATES = (
    Field(("action",), "float32", (28,), "action"),
    Field(("episode",), "int64", (), "id"),
    Field(("observation",), "float64", (39,), "observation"),
    Field((NEXT, "observation"), "float64", (39,), "observation"),
    Field((NEXT, "reward"), "float64", (1,), "reward"),
    *(Field((NEXT, name), "bool", (1,), "done") for name in ("done", "terminated", "truncated")),
)
FRAMES = (
    Field(("action",), "int64", (), "action"),
    Field(("episode",), "int64", (), "id"),
    Field(("pixels",), "uint8", (84, 84, 3), "observation"),
    Field((NEXT, "pixels"), "uint8", (84, 84, 3), "observation"),
    Field((NEXT, "reward"), "float64", (1,), "reward"),
    *(Field((NEXT, name), "bool", (1,), "done") for name in ("done", "terminated", "truncated")),
)


def end_columns(length: int) -> dict[tuple[str, ...], Any]:
    """Flags of an episode that is truncated at its end."""
    last = np.arange(length)[:, None] == length - 1
    return {(NEXT, "done"): last, (NEXT, "truncated"): last, (NEXT, "terminated"): np.zeros_like(last)}


def state_episodes(rows: int) -> Iterator[dict[tuple[str, ...], Any]]:
    draw = np.random.default_rng(0)
    for number in range(rows // LENGTH):
        states = draw.normal(size=(LENGTH + 1, 39))
        yield {
            ("action",): draw.random((LENGTH, 28), np.float32),
            ("episode",): np.full(LENGTH, number),
            ("observation",): states[:-1],
            (NEXT, "observation"): states[1:],
            (NEXT, "reward"): draw.random((LENGTH, 1)),
        } | end_columns(LENGTH)


def rendered(count: int) -> Iterator[dict[tuple[str, ...], Any]]:
    """Episodes of frames, drawn by the environment."""
    import gymnasium
    from PIL import Image

    environment = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    number = made = 0
    while made < count:
        environment.reset(seed=number)
        frames, actions, over = [environment.render()], [], False
        while not over:
            actions.append(int(environment.np_random.integers(2)))
            _, _, terminated, truncated, _ = environment.step(actions[-1])
            frames.append(environment.render())
            over = terminated or truncated
        pixels = np.stack([np.asarray(Image.fromarray(frame).resize((84, 84))) for frame in frames])
        steps = len(actions)
        yield {
            ("action",): np.array(actions), ("episode",): np.full(steps, number), ("pixels",): pixels[:-1],
            (NEXT, "pixels"): pixels[1:], (NEXT, "reward"): np.ones((steps, 1)),
        } | end_columns(steps)  # fmt: skip
        number, made = number + 1, made + steps


def write(folder: Path, layout: Any, fields: tuple[Field, ...], episodes: Any, codecs: Any = None) -> Manifest:
    """Write a dataset."""
    rows = []
    with row_builder(folder, fields, layout, codecs) as builder:
        for number, columns in enumerate(episodes):
            length = len(columns["episode",])
            builder.append(columns, np.arange(length) == length - 1)
            rows.append(EpisodeRow(number, length, 0.0, False, True, EndReason.TRUNCATED))
        return builder.finish(rows, Origin(Request("benchmark", "benchmark", folder.name)))


def data_bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files if not file.path.startswith(".rbtool/"))


# Taking turns ----------------------------------------------------------------------------------------


def buffers_of(folder: Path, *, large: bool | None = None) -> dict[str, Any]:
    """Make a buffer on each layout, and TorchRL's on the memory maps of layout `ted`."""
    storages = {
        "packed": PackedStorage(folder / "packed", larger_than_memory=large),
        "packed, views": PackedStorage(folder / "packed", views=True, larger_than_memory=large),
        "ted": DatasetStorage(folder / "ted", larger_than_memory=large),
    }
    made: dict[str, Any] = {name: DatasetReplayBuffer(storage=storage) for name, storage in storages.items()}
    if peer is not None:
        rows = TensorDict.load_memmap(folder / "ted")
        made["TorchRL"] = peer.TensorDictReplayBuffer(storage=peer.TensorStorage(rows))
    return made


def show(name: str, taken: Mapping[str, list[float]], unit: str = "µs") -> None:
    """Print medians, and how many times faster than TorchRL, or than the last, each is."""
    medians = {side: statistics.median(times) for side, times in taken.items()}
    base = medians[list(medians)[-1]]
    parts = [f"{side} {value:9.1f} {unit} ({base / value:4.1f} ×)" for side, value in medians.items()]
    print(f"{name:24} {'   '.join(parts)}", flush=True)


def turns(jobs: Mapping[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Let the jobs take turns; return the microseconds of a call in each round."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            started = time.perf_counter()
            for _ in range(calls):
                job()
            taken[name].append((time.perf_counter() - started) / calls * 1e6)
    return taken


def warm(folder: Path, rounds: int) -> None:
    buffers = buffers_of(folder)
    rows = len(buffers["ted"])
    for start in range(0, rows, 10_000):
        for buffer in buffers.values():
            buffer[start : start + 10_000].clone()
    for count, calls in ((256, 20), (4096, 4)):
        jobs = {name: lambda buffer=buffer, n=count: buffer.sample(n) for name, buffer in buffers.items()}
        show(f"random {count}", turns(jobs, rounds, calls))
    ours = {name: buffer._storage for name, buffer in buffers.items() if name != "TorchRL"}

    def slices(storage: Any) -> Any:
        begins = torch.randint(0, rows // LENGTH, (8,)) * LENGTH + torch.randint(0, LENGTH - 32, (8,))
        return storage.get((begins[:, None] + torch.arange(32)).reshape(-1))

    show("slices 8 × 32", turns({name: lambda s=s: slices(s) for name, s in ours.items()}, rounds, 20))


def cold(folder: Path, rounds: int) -> None:
    """Read each batch after the files were dropped from the page cache."""
    buffers = buffers_of(folder, large=True)
    taken: dict[str, list[float]] = {name: [] for name in buffers}
    read: dict[str, list[float]] = {name: [] for name in buffers}
    for _ in range(rounds):
        for name, buffer in buffers.items():
            forget(folder)
            before, started = disk_bytes(), time.perf_counter()
            buffer.sample(256)
            taken[name].append((time.perf_counter() - started) * 1e3)
            read[name].append((disk_bytes() - before) / 1e6)
    show("cold, random 256", taken, "ms")
    print(f"{'':24} {'   '.join(f'{name} {statistics.median(mb):.1f} MB read' for name, mb in read.items())}")


def forget(folder: Path) -> None:
    """Drop the files from the page cache, after the maps have released their pages."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            if str(folder) in line:
                start, stop = (int(part, 16) for part in line.split()[0].split("-"))
                LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def frames(folder: Path, count: int, rounds: int) -> None:
    """Compare compressed frames with plain ones."""
    made = list(rendered(count))
    whole = write(folder / "plain", "packed", FRAMES, made)
    small = write(folder / "zstd", "packed", FRAMES, made, {("pixels",): RowCodec.parse("zstd:3")})
    print(f"frames: {data_bytes(whole) / 1e6:.1f} MB, zstd {data_bytes(small) / 1e6:.1f} MB")
    jobs = {}
    for name in ("zstd", "plain"):
        buffer = DatasetReplayBuffer(storage=PackedStorage(folder / name))
        jobs[name] = lambda buffer=buffer: buffer.sample(256)
    show("frames, random 256", turns(jobs, rounds, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if peer is None:
        print("TorchRL is not installed here: these are our times alone (pip install torchrl to compare)")
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if options.only in "warm" or options.only in "cold":
            sizes = [data_bytes(write(work / name, name, STATES, state_episodes(options.rows))) for name in LAYOUTS]
            print(f"state rows: ted {sizes[0] / 1e6:.1f} MB, packed {sizes[1] / 1e6:.1f} MB")
        if options.only in "warm":
            warm(work, options.rounds)
        if options.only in "cold":
            os.sync()
            cold(work, max(5, options.rounds // 3))
        if options.only in "frames":
            frames(work, options.frames, options.rounds)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
