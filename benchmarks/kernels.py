"""Compare the loops that numba compiles with their equivalents for installations without numba.

    python benchmarks/kernels.py [--rows 1000000] [--rounds 15] --cpu

`gather` reads random rows of 11 leaves (758 bytes per row) from memory. `trees` sets priorities of as many rows, and
draws by them. Both sides take turns in one process with one torch thread; figures are medians, and the time without
numba divided by the time with it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from shared.claims import Claim, Claims, Watch, main
from shared.rows import state_rows

from rbtool.core.kernels.compiled_trees import CompiledTree
from rbtool.core.kernels.rows import PlainRows, fastest_rows
from rbtool.core.kernels.trees import TorchTree

BATCHES = (32, 256, 4096)


def gather(rows: int, watch: Watch) -> Claims:
    """Random rows of a batch."""
    arrays = [leaf.numpy() for leaf in state_rows(rows).values(True, True)]
    plain, compiled = PlainRows(arrays), fastest_rows(arrays)
    draw = np.random.default_rng(0)
    for batch in BATCHES:
        numbers = draw.integers(0, rows, batch)
        sides = {"plain": plain, "ours": compiled}
        jobs = {name: partial(side.gather, numbers, rows) for name, side in sides.items()}
        yield from Claim.of(f"gather {batch}", watch.medians(f"gather {batch}", jobs), peer="plain")


def trees(rows: int, watch: Watch) -> Claims:
    """Priorities of a batch that are set, and steps that are drawn by them."""
    sides = {
        "plain": TorchTree(rows, torch.float64),
        "ours": CompiledTree(rows, torch.float64, torch.device("cpu")),
    }  # fmt: skip
    for tree in sides.values():
        tree.fill(0, rows, 1.0)
    for batch in BATCHES:
        index, weights = torch.randint(rows, (batch,)), torch.rand(batch, dtype=torch.float64) + 0.1
        fractions = torch.rand(batch, dtype=torch.float64)
        for what, given in (("set", (index, weights)), ("draw", (fractions,))):
            jobs = {name: partial(getattr(tree, what), *given) for name, tree in sides.items()}
            yield from Claim.of(f"tree {what} {batch}", watch.medians(f"tree {what} {batch}", jobs), peer="plain")


if __name__ == "__main__":
    main(__doc__, (gather, trees))
