"""Time the loader of torch datasets against HuggingFace `datasets` and a plain `Dataset`, and how soon it resumes.

    python benchmarks/loaders.py [--rows 300000] [--resume-rows 10000000] [--rounds 9] [--only PART] [--cpu]

All sides have two workers, take turns in one run, and read the same rows: as in packed.py, 755 bytes, at random, 256
per batch. The HuggingFace dataset is memory-mapped, too, in torch format; it is read by single rows that torch
collates, and by whole batches, which is faster. If `datasets` is not installed, that part is left out. Two readers are
two processes that each read their rank's half, compared with one process that reads everything. `--cpu` measures the
CPU time of the process and its workers, which varies less on a busy machine (Linux only).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from packed import STATES, state_episodes, write
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import rbtool
from rbtool.core.ted.schema import Field

try:
    logging.disable(logging.INFO)
    import datasets as hub
except ImportError:
    hub = None

BATCH, WORKERS, READ = 256, 2, 4000
Clock: TypeAlias = Callable[[], float]
NARROW = (
    Field(("action",), "float32", (2,), "action"),
    Field(("episode",), "int64", (), "id"),
    Field(("observation",), "float32", (4,), "observation"),
)


class Plain(Dataset[dict[str, torch.Tensor]]):
    """A hand-written dataset: a row is a dict of rows of memory maps."""

    def __init__(self, path: Path) -> None:
        rows = rbtool.load_dataset(path)[:]
        self.leaves = {str(key): rows[key] for key in rows.keys(True, True)}

    def __len__(self) -> int:
        return len(next(iter(self.leaves.values())))

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {key: leaf[number] for key, leaf in self.leaves.items()}


def hub_dataset(path: Path, folder: Path) -> Any:
    """The same rows as a dataset of HuggingFace in torch format, mapped from its own files."""
    rows = rbtool.load_dataset(path)[:]
    columns = {".".join(k) if isinstance(k, tuple) else k: rows[k].numpy() for k in rows.keys(True, True)}
    features = {}
    for name, values in columns.items():
        kind = hub.Value(str(values.dtype))
        features[name] = hub.Sequence(kind, length=values.shape[1]) if values.ndim > 1 else kind
    made = hub.Dataset.from_dict(columns, features=hub.Features(features))
    made.save_to_disk(str(folder))
    return hub.load_from_disk(str(folder)).with_format("torch")


def on_processor() -> float:
    """Return the CPU time of this process and its children in seconds."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def throughput(path: Path, folder: Path, rounds: int, clock: Clock) -> None:
    """Print the rows per second of each loader, which take turns."""
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
    loaders: dict[str, Any] = {
        "torch_dataset": DataLoader(rbtool.torch_dataset(path, BATCH, seed=0), batch_size=None, **options),
        "plain Dataset": DataLoader(Plain(path), batch_size=BATCH, shuffle=True, **options),
    }
    if hub is not None:
        theirs = hub_dataset(path, folder / "hub")
        loaders["HuggingFace, rows"] = DataLoader(theirs, batch_size=BATCH, shuffle=True, **options)
        batches = BatchSampler(RandomSampler(theirs), BATCH, drop_last=False)
        loaders["HuggingFace, batches"] = DataLoader(theirs, sampler=batches, batch_size=None, **options)
    streams = {name: endless(loader) for name, loader in loaders.items()}
    taken: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, stream in streams.items():
            calls = 400 if name == "torch_dataset" else 50
            started = clock()
            for _ in range(calls):
                next(stream)
            if number:
                taken[name].append((clock() - started) / calls)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        print(f"{name:24} {median * 1e6:9.0f} µs a batch  {median / medians['torch_dataset']:6.1f} ×", flush=True)


def narrow_episodes(rows: int) -> Iterator[dict[tuple[str, ...], Any]]:
    for number in range(rows // 1000):
        yield {
            ("action",): np.full((1000, 2), number, np.float32),
            ("episode",): np.full(1000, number),
            ("observation",): np.zeros((1000, 4), np.float32),
        }


def resume(folder: Path, rows: int) -> None:
    """Print how long it takes from a state in mid-epoch to the next batch."""
    write(folder / "narrow", "ted", NARROW, narrow_episodes(rows))
    for workers in (0, WORKERS):
        for name, sampler in (
            ("steps", rbtool.SamplerWithoutReplacement()),
            ("slices", rbtool.SliceSamplerWithoutReplacement(slice_len=32)),
        ):
            dataset = rbtool.torch_dataset(folder / "narrow", BATCH, sampler=sampler, seed=0)
            state = rbtool.TorchLoader(dataset).state_dict() | {"batch": len(dataset) // 2}
            started = time.perf_counter()
            again = rbtool.torch_dataset(folder / "narrow", BATCH, sampler=sampler, seed=0)
            loader = rbtool.TorchLoader(again, num_workers=workers)
            loader.load_state_dict(state)
            next(iter(loader))
            print(
                f"resume at {rows:,} steps, {name}, {workers} workers  {time.perf_counter() - started:6.2f} s",
                flush=True,
            )


def read(path: Path, rank: int, ranks: int, start: Any, taken: Any, clock: Clock) -> None:
    """Read batches of a rank in this process; report the seconds it took."""
    torch.set_num_threads(1)
    stream = endless(rbtool.torch_dataset(path, BATCH, seed=0, rank=rank, world_size=ranks))
    for _ in range(20):
        next(stream)
    start.wait()
    started = clock()
    for _ in range(READ):
        next(stream)
    taken.put(clock() - started)


def readers(path: Path, rounds: int, clock: Clock) -> None:
    """Print how much faster two processes read than one."""
    context = multiprocessing.get_context("fork")
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for ranks in rates:
            start, taken = context.Barrier(ranks), context.SimpleQueue()
            processes = [
                context.Process(target=read, args=(path, rank, ranks, start, taken, clock)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            rates[ranks].append(ranks * READ / max(taken.get() for _ in processes))
            for process in processes:
                process.join()
    one, two = (statistics.median(found) for found in rates.values())
    print(f"one reader {one * BATCH:12,.0f} rows/s, two {two * BATCH:12,.0f} rows/s  {two / one:5.2f} ×", flush=True)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--resume-rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    clock = on_processor if asked.cpu else time.perf_counter
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.only in "throughput readers":
            write(folder / "states", "ted", STATES, state_episodes(asked.rows))
        if asked.only in "throughput":
            throughput(folder / "states", folder, asked.rounds, clock)
        if asked.only in "readers":
            readers(folder / "states", asked.rounds, clock)
        if asked.only in "resume":
            resume(folder, asked.resume_rows)


if __name__ == "__main__":
    main()
