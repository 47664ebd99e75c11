"""Time readers in one and in two processes: of a dataset, of a shared ring, and of one that a third process writes to.

    python benchmarks/sharing.py [--rows 200000] [--seconds 2] [--rounds 5]

One and two readers take turns. The figures are medians of the batches of 256 rows (or 8 slices of 32) per second of all
readers together, and the ratio of two readers to one, which should be at least 1.7 without a writer on two processors.
Rows are as in storages.py, 11 leaves of 758 bytes. On a busy machine readers get less CPU time: the last column has the
ratio of batches per second of CPU time, which is 1 if readers do not wait for each other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from shared.rows import CHUNK, state_rows

import rbtool

FORK = multiprocessing.get_context("fork")


def ring(rows: int, sampler: Any = None) -> Any:
    """A full shared ring."""
    buffer = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyMemmapStorage(rows), sampler=sampler, batch_size=256, shared=True
    )
    for start in range(0, rows, CHUNK):
        episode = torch.arange(start, min(start + CHUNK, rows)) // 100
        buffer.extend(state_rows(len(episode)).set("episode", episode))
    return buffer


def read(buffer: Any, start: Any, seconds: float, found: Any) -> None:
    """Sample for some seconds; report the batches per second, and per second of CPU time."""
    torch.set_num_threads(1)
    buffer.sample()
    start.wait()
    started, used, batches = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < seconds:
        buffer.sample()
        batches += 1
    found.put((batches / (time.perf_counter() - started), batches / (time.process_time() - used)))


def write(buffer: Any, stop: Any) -> None:
    """Write 32 rows a hundred times per second."""
    torch.set_num_threads(1)
    rows = buffer[:32].exclude("index").clone()
    while not stop.wait(0.01):
        buffer.extend(rows)


def batches_of(buffer: Any, readers: int, seconds: float) -> tuple[float, float]:
    """Return the batches per second of all readers together, and those per second of CPU time of one reader."""
    start, found = FORK.Barrier(readers), FORK.SimpleQueue()
    processes = [FORK.Process(target=read, args=(buffer, start, seconds, found)) for _ in range(readers)]
    for process in processes:
        process.start()
    rates = [found.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(rate for rate, _ in rates), statistics.mean(rate for _, rate in rates)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    slices = rbtool.SliceSampler(slice_len=32, traj_key="episode")
    buffers: dict[str, Callable[[], Any]] = {
        "ring, uniform": lambda: ring(asked.rows),
        "ring, slices": lambda: ring(asked.rows, slices),
    }
    for name, make in buffers.items():
        for writing in (False, True):
            buffer, stop = make(), FORK.Event()
            writer = FORK.Process(target=write, args=(buffer, stop))
            if writing:
                writer.start()
            rates: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
            for _ in range(asked.rounds):
                for readers, taken in rates.items():
                    taken.append(batches_of(buffer, readers, asked.seconds))
            stop.set()
            if writing:
                writer.join()
            one, two = ([statistics.median(part) for part in zip(*rates[count], strict=True)] for count in (1, 2))
            label = f"{name}{', written' if writing else ''}"
            print(
                f"{label:24} {one[0]:9.0f} {two[0]:9.0f}  {two[0] / one[0]:5.2f} ×  {two[1] / one[1]:5.2f} ×",
                flush=True,
            )


if __name__ == "__main__":
    main()
