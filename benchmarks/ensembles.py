"""Time an ensemble of three buffers beside one of the same size.

    python benchmarks/ensembles.py [--rows 900000] [--rounds 15] [--cpu]

Everything runs in one process with one torch thread, and what is compared takes turns. Figures are medians of the time
of one `sample` in microseconds, and the ratio of one buffer to the ensemble: at least 0.8 is wanted. Rows are those of
storages.py, 11 leaves of 758 bytes. TorchRL's ensemble is measured where it is installed in the same environment.
`--cpu` counts the time of the processor, which others who work on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from storages import CHUNK, peer, state_rows

import rbtool

SIZES = (255, 1023, 4095)
PATIENCE = 0.02  # seconds of one turn


def filled(library: Any, rows: int) -> Any:
    """A buffer of `library` with so many rows."""
    buffer = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(rows))
    chunk = state_rows(min(rows, CHUNK))
    for start in range(0, rows, CHUNK):
        buffer.extend(chunk[: rows - start].clone())
    return buffer


def measured(jobs: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Let the jobs take turns; return the median time of a call of each, in microseconds."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    calls = {}
    for name, job in jobs.items():
        job()
        begun = clock()
        job()
        calls[name] = max(1, int(PATIENCE / max(clock() - begun, 1e-6)))
    for _ in range(rounds):
        for name, job in jobs.items():
            begun = clock()
            for _ in range(calls[name]):
                job()
            taken[name].append((clock() - begun) / calls[name] * 1e6)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=900_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu else time.perf_counter
    torch.set_num_threads(1)
    one, members = filled(rbtool, asked.rows), [filled(rbtool, asked.rows // 3) for _ in range(3)]
    buffers = {
        "one buffer": one,
        "ensemble, exact": rbtool.ReplayBufferEnsemble(*members, batch="exact"),
        "ensemble, stack": rbtool.ReplayBufferEnsemble(*members),
    }
    if peer is not None:
        theirs = [filled(peer, asked.rows // 3) for _ in range(3)]
        buffers["TorchRL's ensemble"] = peer.ReplayBufferEnsemble(*theirs)
    for size in SIZES:
        jobs = {name: (lambda buffer=buffer: buffer.sample(size)) for name, buffer in buffers.items()}  # noqa: B023
        found = measured(jobs, asked.rounds, clock)
        for name, median in found.items():
            print(f"{size:6} rows  {name:20} {median:10.1f} µs  {found['one buffer'] / median:6.2f} ×", flush=True)


if __name__ == "__main__":
    main()
