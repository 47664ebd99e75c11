"""Compare the loops that numba compiles with those that run where numba is not installed.

    python benchmarks/kernels.py [--rows 1000000] [--rounds 15]

`gather` takes random rows of 11 leaves (758 bytes a row) from memory. `tree` sets and draws priorities of as many rows.
Both sides take turns in one process with one torch thread; figures are medians of CPU time, and the time without numba
over that with it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from storages import state_rows

from rbtool.core.kernels.compiled_trees import CompiledTree
from rbtool.core.kernels.rows import PlainRows, fastest_rows
from rbtool.core.kernels.trees import TorchTree


def compare(name: str, plain: Callable[[], object], compiled: Callable[[], object], rounds: int) -> None:
    """Print the medians of both sides and their ratio."""
    times: dict[str, list[float]] = {"plain": [], "compiled": []}
    for number in range(rounds + 1):
        for side, job in (("plain", plain), ("compiled", compiled)):
            started = time.process_time()
            for _ in range(20):
                job()
            if number:  # the first round warms both up
                times[side].append((time.process_time() - started) / 20)
    without, with_numba = (statistics.median(times[side]) * 1e6 for side in ("plain", "compiled"))
    print(f"{name:24s} without {without:9.1f} us   numba {with_numba:9.1f} us   ratio {without / with_numba:5.1f}")


def main() -> None:
    """Compare gathering and trees at three sizes of a batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arrays = [leaf.numpy() for leaf in state_rows(options.rows).values(True, True)]
    plain, compiled = PlainRows(arrays), fastest_rows(arrays)
    draw = np.random.default_rng(0)
    trees = TorchTree(options.rows, torch.float64), CompiledTree(options.rows, torch.float64, torch.device("cpu"))
    for tree in trees:
        tree.fill(0, options.rows, 1.0)
    rows = options.rows
    for batch in (32, 256, 4096):
        numbers = draw.integers(0, rows, batch)
        gathers = [partial(kind.gather, numbers, rows) for kind in (plain, compiled)]
        compare(f"gather {batch}", *gathers, options.rounds)
        index, weights = torch.from_numpy(numbers), torch.rand(batch, dtype=torch.float64) + 0.1
        compare(f"tree set {batch}", *[partial(tree.set, index, weights) for tree in trees], options.rounds)
        fractions = torch.rand(batch, dtype=torch.float64)
        compare(f"tree draw {batch}", *[partial(tree.draw, fractions) for tree in trees], options.rounds)


if __name__ == "__main__":
    main()
