"""Time storages behind a ReplayBuffer next to TorchRL's, and their checkpoints next to a plain copy of the same bytes.

    python benchmarks/storages.py [--rows 1000000] [--images 10000] [--rounds 15] [--only PART] [--folder DIR]

TorchRL has to be installed in the same environment; without it only our own times are shown. Rows are 11 leaves of
758 bytes, images 28 kB. Both sides take turns in one process with one torch thread; the figures are medians of the
time of one call in microseconds, and TorchRL's time over ours. `--only` keeps the jobs whose names hold PART.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.format import fs

try:
    logging.disable(logging.INFO)
    import torchrl.data as peer
    from torchrl.data.replay_buffers import samplers as peer_samplers
except ImportError:
    peer = None

Job = Callable[[], object]
CHUNK = 50_000


def state_rows(rows: int) -> TensorDict:
    """Rows of a robot's states: 11 leaves, 758 bytes."""

    def flag() -> torch.Tensor:
        return torch.rand(rows, 1) < 0.01

    after = {
        "observation": torch.rand(rows, 39, dtype=torch.float64),
        "reward": torch.rand(rows, 1, dtype=torch.float64),
        "done": flag(),
        "terminated": flag(),
        "truncated": flag(),
    }
    now = {"observation": torch.rand(rows, 39, dtype=torch.float64), "action": torch.rand(rows, 28)}
    flags = {"done": flag(), "terminated": flag(), "truncated": flag(), "episode": torch.arange(rows)}
    return TensorDict({**now, **flags, "next": TensorDict(after, [rows])}, [rows])


def image_rows(rows: int) -> TensorDict:
    """Rows of four stacked frames, 28 kB."""
    pixels = torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)
    return TensorDict({"pixels": pixels, "action": torch.rand(rows, 6)}, [rows])


def filled(library: Any, storage: Any, sampler: Any, make: Callable[[int], TensorDict], rows: int) -> Any:
    """Make a buffer with `rows` rows."""
    buffer = library.ReplayBuffer(storage=storage, sampler=sampler)
    chunk = make(min(rows, CHUNK))
    for start in range(0, rows, len(chunk)):
        buffer.extend(chunk[: rows - start])
    return buffer


def both(ours: Callable[[Any, Any, Any], Any]) -> Iterator[Any]:
    """Make the same thing of our classes and of TorchRL's."""
    yield ours(rbtool, rbtool, rbtool)
    if peer is not None:
        yield ours(peer, peer, peer_samplers)


def sampling_jobs(rows: int, images: int) -> Iterator[tuple[str, list[Job]]]:
    for kind in ("LazyMemmapStorage", "LazyTensorStorage"):
        for draw in ("RandomSampler", "SamplerWithoutReplacement"):
            made = list(
                both(
                    lambda library, stores, draws, kind=kind, draw=draw: filled(
                        library, getattr(stores, kind)(rows), getattr(draws, draw)(), state_rows, rows
                    )
                )
            )
            for batch in (32, 256, 4096):
                yield f"{draw} {kind} {batch}", [lambda rb=rb, n=batch: rb.sample(n) for rb in made]
            del made
    made = list(
        both(
            lambda library, stores, draws: filled(
                library, stores.LazyMemmapStorage(images), draws.RandomSampler(), image_rows, images
            )
        )
    )
    for batch in (32, 256):
        yield f"images {batch}", [lambda rb=rb, n=batch: rb.sample(n) for rb in made]


def writing_jobs(rows: int) -> Iterator[tuple[str, list[Job]]]:
    made = list(
        both(
            lambda library, stores, draws: filled(
                library, stores.LazyMemmapStorage(rows), draws.RandomSampler(), state_rows, rows
            )
        )
    )
    for count in (1, 32, 1000):
        data = state_rows(count)
        yield f"extend {count}", [lambda rb=rb, data=data: rb.extend(data) for rb in made]
    row = state_rows(1)[0]
    yield "add", [lambda rb=rb: rb.add(row) for rb in made]


def time_of(job: Job, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        job()
    return (time.perf_counter() - started) / calls * 1e6


def compare(name: str, jobs: list[Job], rounds: int) -> None:
    """Let the jobs take turns; print their medians."""
    for job in jobs:
        job()
    calls = max(1, int(10_000 / max(time_of(jobs[-1], 3), 1.0)))
    taken = [[time_of(job, calls) for job in jobs] for _ in range(rounds)]
    medians = [statistics.median(times) for times in zip(*taken, strict=True)]
    theirs = f"   TorchRL {medians[1]:9.1f} µs   {medians[1] / medians[0]:5.1f} ×" if len(medians) > 1 else ""
    print(f"{name:48} {medians[0]:9.1f} µs{theirs}", flush=True)


def threads(rows: int, rounds: int) -> None:
    """Compare two threads that read batches with one that reads as many."""
    storage = rbtool.LazyTensorStorage(rows)
    chunk = state_rows(min(rows, CHUNK))
    for start in range(0, rows, len(chunk)):
        storage.set(range(start, min(rows, start + len(chunk))), chunk[: rows - start])
    batches = [torch.randint(0, rows, (4096,)) for _ in range(100)]

    def read(part: list[torch.Tensor]) -> None:
        for index in part:
            storage.get(index)

    def two() -> None:
        workers = [threading.Thread(target=read, args=(batches[half::2],)) for half in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    pairs = [(time_of(lambda: read(batches), 1), time_of(two, 1)) for _ in range(rounds)]
    one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{'two reading threads against one, batches of 4096':48} {one / other:5.2f} ×", flush=True)


def copy(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint; every file and folder is synced."""
    fs.make_folder(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy(path, target / path.name)
            continue
        with open(path, "rb", buffering=0) as file, open(target / path.name, "xb", buffering=0) as copied:
            while chunk := file.read(1 << 20):
                copied.write(chunk)
            os.fsync(copied.fileno())
    fs.sync_folder(target)


def checkpoint(rows: int, folder: Path, rounds: int) -> None:
    """Compare dumps and loads with a copy."""
    storage = rbtool.LazyTensorStorage(rows)
    storage.set(range(rows), state_rows(rows))
    storage.checkpointer = rbtool.TensorStorageCheckpointer()
    other = rbtool.LazyTensorStorage(rows)
    other.set(0, state_rows(1)[0])
    storage.dumps(folder / "saved")
    times = []
    for _ in range(rounds):
        fs.remove(folder / "copied")
        fs.remove(folder / "again")
        jobs: list[Job] = [
            lambda: copy(folder / "saved", folder / "copied"),
            lambda: storage.dumps(folder / "again"),
            lambda: other.loads(folder / "saved"),
        ]
        times.append([time_of(job, 1) for job in jobs])
    copied, dumped, loaded = (statistics.median(column) for column in zip(*times, strict=True))
    for name, taken in (("dumps", dumped), ("loads", loaded)):
        what = f"{name} of {rows:,} rows"
        print(f"{what:48} {taken:9.0f} µs   copy {copied:9.0f} µs   {taken / copied:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if peer is None:
        print("TorchRL is not installed here: these are our times alone (pip install torchrl to compare)")
    work = Path(tempfile.mkdtemp(dir=options.folder))
    tempfile.tempdir = str(work)
    try:
        for name, jobs in sampling_jobs(options.rows, options.images):
            if options.only in name:
                compare(name, jobs, options.rounds)
        for name, jobs in writing_jobs(options.rows):
            if options.only in name:
                compare(name, jobs, options.rounds)
        if options.only in "threads":
            threads(options.rows, options.rounds)
        if options.only in "checkpoint":
            checkpoint(min(options.rows, 200_000), work, options.rounds)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
