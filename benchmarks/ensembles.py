"""Time an ensemble of three buffers next to one buffer with the same rows in all, and next to TorchRL's ensemble.

    python benchmarks/ensembles.py [--rows 300000] [--rounds 25] [--only PART] [--cpu]

Everything runs in one process with one torch thread, and the sides take turns. The figures are medians of the time of
one `sample` in microseconds, and the time of one buffer divided by the ensemble's, which should be at least 0.8;
compared with TorchRL's ensemble of the same kind, the speed-up should be at least 3. The kinds are `rings` of 11 leaves
and 758 bytes, `datasets` on disk, `images` of 28 kB (a hundredth of the rows), `slices` of 16 steps, and `priorities`.
TorchRL is measured if it is installed. `--cpu` measures CPU time, which varies less on a busy machine.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import peers
from shared.claims import Claim, Claims, Job, Part, Watch, main
from shared.rows import filled, image_rows, in_episodes

import rbtool
from rbtool.core.testing.datasets import write_walks

BATCHES = (256, 1024, 4096)
STEPS = 16
Make = Callable[[Any, Any, int], Any]


def ring(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled uniformly."""
    return filled(library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(rows)), rows)


def images(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with stacked frames."""
    rows //= 100
    return filled(library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(rows)), rows, image_rows)


def slices(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled in slices of episodes."""
    sampler = parts.SliceSampler(slice_len=STEPS, traj_key="episode", cache_values=True)
    storage = library.LazyTensorStorage(rows)
    return in_episodes(library.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows)


def priorities(library: Any, parts: Any, rows: int) -> Any:
    """A buffer with rows of states, sampled by priority."""
    sampler = parts.PrioritizedSampler(rows, alpha=0.7, beta=0.5)
    storage = library.LazyTensorStorage(rows)
    return filled(library.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows)


def dataset(library: Any, parts: Any, rows: int) -> Any:
    """A dataset on disk of episodes of 200 steps; rbtool's alone."""
    folder = Path(tempfile.mkdtemp(prefix="ensembles-", dir=FOLDERS[-1].name)) / "walks"
    write_walks(folder, [(200, "terminated")] * (rows // 200))
    return rbtool.load_dataset(folder, seed=0)


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
KINDS: dict[str, Make] = {
    "rings": ring, "datasets": dataset, "images": images, "slices": slices, "priorities": priorities
}  # fmt: skip


def part(kind: str) -> Part:
    """Make the part that compares one kind of member."""

    def compared(rows: int, watch: Watch) -> Claims:
        make = KINDS[kind]
        members = [make(rbtool, rbtool, rows // 3) for _ in range(3)]
        buffers = {
            "one buffer": make(rbtool, rbtool, rows),
            "exact": rbtool.ReplayBufferEnsemble(*members, batch="exact"),
            "stack": rbtool.ReplayBufferEnsemble(*members),
        }
        if peers.buffers is not None and kind != "datasets":
            try:
                theirs = [make(peers.buffers, peers.samplers, rows // 3) for _ in range(3)]
                buffers["TorchRL"] = peers.buffers.ReplayBufferEnsemble(*theirs)
            except RuntimeError as error:  # its trees of priorities need a compiled extension
                print(f"{kind:12} TorchRL: {error}")
        for batch in BATCHES:
            size = batch // (3 * STEPS) * 3 * STEPS
            jobs: dict[str, Job] = {name: (lambda rb=rb, n=size: rb.sample(n)) for name, rb in buffers.items()}
            found = watch.medians(f"{kind}, {size} rows", jobs)
            for form in ("exact", "stack"):
                yield Claim(f"{kind}, {size} rows, one buffer : {form}", found["one buffer"] / found[form], least=0.8)
            if "TorchRL" in found:
                yield Claim(f"{kind}, {size} rows, TorchRL : stack", found["TorchRL"] / found["stack"], least=3)

    compared.__name__ = kind
    return compared


PARTS = [part(kind) for kind in KINDS]

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    FOLDERS.append(tempfile.TemporaryDirectory())
    main(__doc__, PARTS, rows=300_000, rounds=25)
