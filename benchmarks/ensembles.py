"""Time an ensemble of three buffers next to one buffer with the same rows in all, and next to TorchRL's ensemble.

    python benchmarks/ensembles.py [--rows 300000] [--rounds 25] [--only PART] [--batch 256] [--cpu]

Everything runs in one process with one torch thread, and what is compared takes turns. Figures are medians of the time
of one `sample` in microseconds, and the ratio of one buffer to the ensemble: at least 0.8 is wanted, and against
TorchRL's ensemble of the same kind at least 3. Kinds: `rings` of 11 leaves and 758 bytes, `datasets` on disk, `images`
of 28 kB (a hundredth of the rows), `slices` of 16 steps, `priorities`. TorchRL is measured where it is installed.
`--cpu` counts the time of the processor, which others who work on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import samplers
import torch
from storages import image_rows, peer, state_rows

import rbtool
from rbtool.core.testing.datasets import write_walks

PATIENCE = 0.02  # seconds of one turn
CHUNK = 50_000
STEPS = 16
Make = Callable[[Any, Any, int], Any]


def ring(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled uniformly."""
    return filled(library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(rows)), rows, state_rows)


def images(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with stacked frames."""
    rows //= 100
    return filled(library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(rows)), rows, image_rows)


def slices(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled in slices of episodes."""
    sampler = parts.SliceSampler(slice_len=STEPS, traj_key="episode", cache_values=True)
    storage = library.LazyTensorStorage(rows)
    return samplers.filled(library.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows)


def priorities(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled by priority."""
    sampler = parts.PrioritizedSampler(rows, alpha=0.7, beta=0.5)
    storage = library.LazyTensorStorage(rows)
    return filled(library.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows, state_rows)


def dataset(library: Any, parts: Any, rows: int) -> Any:
    """A dataset on disk of episodes of 200 steps; rbtool's alone."""
    folder = Path(tempfile.mkdtemp(prefix="ensembles-", dir=FOLDERS[-1].name)) / "walks"
    write_walks(folder, [(200, "terminated")] * (rows // 200))
    return rbtool.load_dataset(folder, seed=0)


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
KINDS: dict[str, Make] = {
    "rings": ring, "datasets": dataset, "images": images, "slices": slices, "priorities": priorities
}  # fmt: skip


def filled(buffer: Any, rows: int, make: Callable[[int], Any]) -> Any:
    """Write so many rows to a buffer."""
    chunk = make(min(rows, CHUNK))
    for start in range(0, rows, CHUNK):
        buffer.extend(chunk[: rows - start].clone())
    return buffer


def measured(jobs: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Let the jobs take turns; return the median time of a call of each, in microseconds."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    calls = {}
    for name, job in jobs.items():
        for _ in range(100):
            job()
        started = clock()
        job()
        calls[name] = max(1, int(PATIENCE / max(clock() - started, 1e-6)))
    for _ in range(rounds):
        for name, job in jobs.items():
            started = clock()
            for _ in range(calls[name]):
                job()
            taken[name].append((clock() - started) / calls[name] * 1e6)
    return {name: statistics.median(times) for name, times in taken.items()}


def compared(kind: str, rows: int, batch: int, rounds: int, clock: Callable[[], float]) -> None:
    """Print a table of one kind of member."""
    make = KINDS[kind]
    members = [make(rbtool, rbtool, rows // 3) for _ in range(3)]
    buffers = {
        "one buffer": make(rbtool, rbtool, rows),
        "ensemble, exact": rbtool.ReplayBufferEnsemble(*members, batch="exact"),
        "ensemble, stack": rbtool.ReplayBufferEnsemble(*members),
    }
    if peer is not None and kind != "datasets":
        try:
            theirs = [make(peer, peer.replay_buffers, rows // 3) for _ in range(3)]
            buffers["TorchRL's ensemble"] = peer.ReplayBufferEnsemble(*theirs)
        except RuntimeError as error:  # its trees of priorities need a compiled extension
            print(f"{kind:12} TorchRL: {error}")
    size = batch // (3 * STEPS) * 3 * STEPS
    jobs = {name: (lambda buffer=buffer: buffer.sample(size)) for name, buffer in buffers.items()}
    found = measured(jobs, rounds, clock)
    for name, median in found.items():
        ratio = found["one buffer"] / median
        print(f"{kind:12} {size:6} rows  {name:20} {median:10.1f} µs  {ratio:6.2f} ×", flush=True)


def main() -> None:
    """Print a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    clock = time.process_time if asked.cpu else time.perf_counter
    FOLDERS.append(tempfile.TemporaryDirectory())
    for kind in KINDS:
        if asked.only in kind:
            for size in asked.batch:
                compared(kind, asked.rows, size, asked.rounds, clock)


if __name__ == "__main__":
    main()
