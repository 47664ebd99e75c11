"""Time samplers in buffers: next to TorchRL's and cpprb's, next to each other, and on a GPU if there is one.

    python benchmarks/samplers.py [--rows 1000000] [--rounds 15] [--only PART] [--cpu]

TorchRL and cpprb have to be installed in the same environment; a missing one is reported and left out. Everything runs
in one process with one torch thread, and the sides take turns. Figures are medians of the time of one call in
microseconds. The table at the end shows each ratio that has a limit, with the limit. Rows are as in storages.py, 11
leaves of 758 bytes, in episodes of 100 to 400 steps; in the part with a varying number of steps they have 45 bytes.
`--only` runs the parts whose names contain PART. `--cpu` measures CPU time, which varies less on a busy machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from shared.rows import CHUNK, Make, in_episodes, narrow_rows, state_rows
from tensordict import TensorDict

import rbtool
from rbtool.core.kernels.trees import priority_tree
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler

try:
    import cpprb
except ImportError:
    cpprb = None

ALPHA, BETA = 0.6, 0.4

FIRST_USE = """
import sys
import time
import torch
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool import TensorStorage
torch.set_num_threads(1)
storage = TensorStorage(torch.arange(100_000))
now = getattr(time, sys.argv[1])
started = now()
sampler = PrioritizedSampler(100_000, 0.6, 0.4)
sampler.extend(torch.arange(100_000))
index, info = sampler.sample(storage, 256)
sampler.update_priority(index, torch.rand(256))
print(now() - started)
"""


def ours(sampler: Any, rows: int, make: Make = state_rows) -> Any:
    """Make a full buffer of rbtool."""
    storage = rbtool.LazyTensorStorage(rows)
    return in_episodes(rbtool.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows, make)


def trained(buffer: Any, batch: int) -> Job:
    """Sample a batch and update the priorities of its steps, as training does."""
    priorities = [torch.rand(batch) for _ in range(16)]
    turn = iter(range(1 << 62))

    def job() -> None:
        index = buffer.sample(batch)["index"]
        buffer.update_priority(index.reshape(-1), priorities[next(turn) % 16])

    return job


# The parts -------------------------------------------------------------------------------------------


def slices(rows: int, watch: Watch) -> Claims:
    """Slices next to TorchRL's, with its default and with cached boundaries."""
    options = {"slice_len": 32, "traj_key": "episode"}
    made = {"ours": ours(SliceSampler(**options), rows)}
    if peers.buffers is not None:
        for name, more in (("TorchRL", {}), ("TorchRL, cached", {"cache_values": True})):
            storage, sampler = peers.buffers.LazyTensorStorage(rows), peers.samplers.SliceSampler(**options, **more)
            made[name] = in_episodes(peers.buffers.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows)
    for count, least in ((8, (20, 5)), (128, (5, 3))):
        jobs = {name: (lambda rb=rb, n=count * 32: rb.sample(n)) for name, rb in made.items()}
        found = watch.medians(f"slices {count} of 32", jobs)
        for name, floor in zip(("TorchRL", "TorchRL, cached"), least, strict=True):
            yield from Claim.of(f"slices {count} of 32, {name}", found, floor, name)


def theirs(sampler: Any, rows: int) -> Any:
    """Make a full buffer of TorchRL."""
    storage = peers.buffers.LazyTensorStorage(rows)
    return in_episodes(peers.buffers.TensorDictReplayBuffer(storage=storage, sampler=sampler), rows)


def prioritized_slices_of_torchrl(rows: int, watch: Watch) -> Claims:
    """Prioritized slices, sampled and updated, next to TorchRL's, by default and with cached boundaries."""
    if not peers.trees:
        return
    options = {"slice_len": 32, "traj_key": "episode"}
    make = peers.samplers.PrioritizedSliceSampler
    made = {
        "ours": ours(PrioritizedSliceSampler(rows, ALPHA, BETA, **options), rows),
        "TorchRL": theirs(make(rows, ALPHA, BETA, **options), rows),
        "TorchRL, cached": theirs(make(rows, ALPHA, BETA, **options, cache_values=True), rows),
    }
    for count, least in ((8, (60, 12)), (128, (40, 5))):
        jobs = {name: trained(rb, count * 32) for name, rb in made.items()}
        found = watch.medians(f"prioritized slices {count} of 32", jobs)
        for name, floor in zip(("TorchRL", "TorchRL, cached"), least, strict=True):
            yield from Claim.of(f"prioritized slices {count} of 32, {name}", found, floor, name)


def prioritized_slices(rows: int, watch: Watch) -> Claims:
    """Prioritized slices, sampled and updated, next to plain ones, at several numbers of steps."""
    for steps in (rows // 10, rows, rows * 10):
        plain = ours(SliceSampler(slice_len=32), steps, narrow_rows)
        sampler = PrioritizedSliceSampler(steps, ALPHA, BETA, slice_len=32)
        prioritized = rbtool.TensorDictReplayBuffer(storage=plain.storage, sampler=sampler)
        jobs: dict[str, Job] = {
            "slices": lambda rb=plain: rb.sample(256),
            "prioritized slices, sample": lambda rb=prioritized: rb.sample(256),
            "prioritized slices, sample and update": trained(prioritized, 256),
        }
        found = watch.medians(f"8 of 32, {steps:,} steps", jobs)
        ratio = found["prioritized slices, sample and update"] / found["slices"]
        yield Claim(f"prioritized slices : slices, {steps:,} steps", ratio, most=4)


def growth(rows: int, watch: Watch) -> Claims:
    """Slices at ten times and at a tenth of the number of steps."""
    sizes = (rows // 10, rows * 10)
    for weight in ("episode", "step"):
        made = {n: ours(SliceSampler(slice_len=32, weight=weight), n, narrow_rows) for n in sizes}
        jobs = {f"{n:,} steps, by {weight}": (lambda rb=rb: rb.sample(256)) for n, rb in made.items()}
        few, many = watch.medians("slices 8 of 32", jobs).values()
        yield Claim(f"slices, {sizes[1]:,} : {sizes[0]:,} steps, by {weight}", many / few, most=1.5)


def writes(rows: int, watch: Watch) -> Claims:
    """Single-row writes into a full ring, with and without a slice sampler that follows the writes."""
    bare = in_episodes(rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(rows)), rows)
    sliced = ours(SliceSampler(slice_len=32), rows)
    row = state_rows(1)
    for buffer in (bare, sliced):
        buffer.sample(256)

    def both() -> None:
        sliced.extend(row)
        sliced.sample(256)

    jobs: dict[str, Job] = {
        "without a slice sampler": lambda: bare.extend(row),
        "with one": lambda: sliced.extend(row),
        "with one, and slices 8 of 32": both,
    }
    found = watch.medians("extend by 1 row", jobs)
    yield Claim("extend by 1 row, with : without slices", found["with one"] / found["without a slice sampler"], most=2)


def priorities(rows: int, watch: Watch) -> Claims:
    """Prioritized steps, sampled and updated, next to TorchRL's and cpprb, of wide and of narrow rows."""
    if cpprb is None:
        print("cpprb is not installed here: no comparison of priorities with it (pip install cpprb)")
    for kind, make in (("wide", state_rows), ("narrow", narrow_rows)):
        buffer = ours(PrioritizedSampler(rows, ALPHA, BETA), rows, make)
        buffer.update_priority(torch.arange(rows), torch.rand(rows))
        other = None if cpprb is None else cpprb_buffer(buffer[:], rows)
        peer = None
        if peers.trees and kind == "wide":
            peer = theirs(peers.samplers.PrioritizedSampler(rows, ALPHA, BETA), rows)
            peer.update_priority(torch.arange(rows), torch.rand(rows))
        for batch, least in ((256, 3.5), (4096, 4)):
            jobs: dict[str, Job] = {"ours": trained(buffer, batch)}
            if peer is not None:
                jobs["TorchRL"] = trained(peer, batch)
            if other is not None:
                given = np.random.default_rng(0).random(batch, np.float32)
                jobs["cpprb"] = lambda rb=other, n=batch, given=given: rb.update_priorities(
                    rb.sample(n, beta=BETA)["indexes"], given
                )
            found = watch.medians(f"prioritized {batch}, {kind} rows", jobs)
            yield from Claim.of(f"prioritized {batch}, {kind} rows, TorchRL", found, least)
            if other is not None:
                yield Claim(f"prioritized {batch}, {kind} rows, cpprb : ours", found["cpprb"] / found["ours"], least=2)


def cpprb_buffer(data: TensorDict, rows: int) -> Any:
    """Make a buffer of cpprb with the same leaves."""
    leaves = {name: leaf.numpy() for name, leaf in data.flatten_keys("_").items() if name != "index"}
    about = {name: {"dtype": leaf.dtype, "shape": leaf.shape[1:] or 1} for name, leaf in leaves.items()}
    made = cpprb.PrioritizedReplayBuffer(rows, about, alpha=ALPHA)
    given = np.random.default_rng(1).random(rows, np.float32)
    for start in range(0, rows, CHUNK):
        part = {name: leaf[start : start + CHUNK] for name, leaf in leaves.items()}
        made.add(**part, priorities=given[start : start + CHUNK])
    return made


def bare(rows: int, watch: Watch) -> Claims:
    """The parts of a prioritized sampler: the tree, the weights, the update."""
    storage = rbtool.TensorStorage(torch.arange(rows))
    sampler = PrioritizedSampler(rows, ALPHA, BETA)
    sampler.extend(torch.arange(rows))
    sampler.update_priority(torch.arange(rows), torch.rand(rows))
    tree = priority_tree(rows)
    tree.load((torch.rand(rows) + 1e-8) ** ALPHA)
    for batch in (256, 4096):
        fractions, index, given = torch.rand(batch).double(), torch.randint(rows, (batch,)), torch.rand(batch)
        jobs: dict[str, Job] = {
            "tree, draw": lambda fractions=fractions: tree.draw(fractions),
            "sampler, sample: draw and weights": lambda n=batch: sampler.sample(storage, n),
            "tree, set": lambda index=index, given=given: tree.set(index, given),
            "sampler, update": lambda index=index, given=given: sampler.update_priority(index, given),
        }
        watch.medians(f"bare sampler {batch}, {rows:,} steps", jobs)
    yield from ()


def first_use(_rows: int, watch: Watch) -> Claims:
    """The first batch of a process, where kernels have to be compiled and where they are kept."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-c", FIRST_USE, watch.clock]
        taken = []
        for _ in range(4):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            taken.append(float(done.stdout))
    yield Claim("first use, kernels compiled", taken[0], most=3, unit="s")
    yield Claim("first use of a later process", statistics.median(taken[1:]), most=0.5, unit="s")


def placements(rows: int, watch: Watch) -> Claims:
    """Storage and trees on a GPU and on the CPU, at batch sizes for which a GPU pays off."""
    if not torch.cuda.is_available():
        print("there is no GPU here: placements on one are left out")
        return
    from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer

    jobs: dict[str, Job] = {}
    for storage_device, tree_device in (("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cuda"), ("cuda", "cpu")):
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=rbtool.LazyTensorStorage(rows, device=storage_device),
            sampler_device=tree_device, batch_size=65_536,
        )  # fmt: skip
        in_episodes(buffer, rows)

        def job(buffer: Any = buffer, device: str = storage_device) -> None:
            batch = buffer.sample()
            batch["td_error"] = torch.ones(65_536, device=device)
            buffer.update_tensordict_priority(batch)
            torch.cuda.synchronize()

        jobs[f"rows on {storage_device}, trees on {tree_device}"] = job
    watch.medians("prioritized 65,536", jobs)
    yield from ()


PARTS = (
    slices,
    prioritized_slices_of_torchrl,
    prioritized_slices,
    growth,
    writes,
    priorities,
    bare,
    first_use,
    placements,
)


if __name__ == "__main__":
    main(__doc__, PARTS)
