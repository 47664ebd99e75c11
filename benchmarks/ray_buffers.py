"""Time `sample` of a buffer in a Ray actor, next to TorchRL's in an actor of the same Ray cluster.

    python benchmarks/ray_buffers.py [--rows 100000] [--rounds 15]

Ray runs on this machine, on the loopback device, with two processors. Both buffers have the same rows, those of
storages.py (11 leaves of 758 bytes), and take turns. The figures are medians of the time of one call in milliseconds,
and TorchRL's time divided by rbtool's, which should be at least 2 for `sample`. TorchRL is measured if it is installed
in the same environment. `direct` is the same buffer in this process.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shared.peers import buffers as peer
from shared.rows import CHUNK, state_rows

import rbtool
from rbtool.core.engine.ray_cluster import connect, imported_ray

SIZES = (32, 256, 1024, 4096)
STORE_BYTES = 400 * 2**20


def buffers_of(rows: int) -> dict[str, Any]:
    """Make the buffers, each with so many rows."""
    made: dict[str, Any] = {
        "ours": rbtool.RayReplayBuffer(
            replay_buffer_cls=rbtool.TensorDictReplayBuffer, storage=partial(rbtool.LazyTensorStorage, rows)
        ),
        "direct": rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(rows)),
    }
    if peer is not None:
        made["TorchRL's"] = peer.RayReplayBuffer(
            replay_buffer_cls=peer.TensorDictReplayBuffer,
            storage=partial(peer.LazyTensorStorage, rows),
            remote_config={"num_cpus": 1},
        )
    for buffer in made.values():
        for start in range(0, rows, CHUNK):
            buffer.extend(state_rows(min(CHUNK, rows - start)))
    return made


def measured(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Let the jobs take turns of ten calls; return the median time of a call of each, in milliseconds."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            for _ in range(10):
                started = time.perf_counter()
                job()
                taken[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def report(name: str, found: dict[str, float]) -> None:
    """Print one line for each buffer."""
    for buffer, median in found.items():
        print(f"{name:14} {buffer:10} {median:9.3f} ms  {median / found['ours']:6.2f} ×", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ray = imported_ray("this benchmark")
    connect(ray, num_cpus=2, object_store_memory=STORE_BYTES, log_to_driver=False, logging_level=logging.ERROR)
    try:
        buffers = buffers_of(asked.rows)
        for size in SIZES:
            jobs = {name: partial(buffer.sample, size) for name, buffer in buffers.items()}
            report(f"sample({size})", measured(jobs, asked.rounds))
        for size in (1, 1000):
            rows = state_rows(size)
            jobs = {name: partial(buffer.extend, rows) for name, buffer in buffers.items()}
            report(f"extend({size})", measured(jobs, asked.rounds))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
