"""Time storages behind a ReplayBuffer next to TorchRL's.

    python benchmarks/storages.py [--rows 1000000] [--rounds 15] [--only PART] [--cpu]

TorchRL, and Stable-Baselines3 for `steps`, have to be installed in the same environment; without them, only rbtool's
times are shown. Rows are 11 leaves of 758 bytes, images 28 kB. All sides take turns in one process with one torch
thread; the figures are medians of the time of one call in microseconds, and the time of others divided by rbtool's.
`--only` runs the parts whose names contain PART.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from shared.rows import filled, image_rows, state_rows

import rbtool

ring: Any
try:
    from stable_baselines3.common.buffers import ReplayBuffer as ring
except ImportError:
    ring = None


def floors(rows: int, batch: int) -> dict[str, Job]:
    """The lower bounds of a batch: as many bytes, gathered by NumPy from one array, and copied in one piece.

    The draws are of as many rows as there are: rows that were read a moment ago would come from the processor's caches.
    """
    width = sum(leaf[0].nbytes for leaf in state_rows(1).values(True, True))
    one, out = np.zeros((rows, width), np.uint8), np.empty((batch, width), np.uint8)
    one[:] = 1  # so that each row has memory of its own
    draws = itertools.cycle(np.random.default_rng(0).integers(0, rows, (rows // batch, batch)))
    return {"take": lambda: one.take(next(draws), 0), "memcpy": lambda: np.copyto(out, one[:batch])}


def random(rows: int, watch: Watch) -> Claims:
    """Random batches, from memory maps and from memory, drawn with and without replacement."""
    for kind in ("LazyMemmapStorage", "LazyTensorStorage"):
        for draw in ("RandomSampler", "SamplerWithoutReplacement"):
            made = peers.sides(
                lambda library, draws, kind=kind, draw=draw: filled(
                    library.ReplayBuffer(storage=getattr(library, kind)(rows), sampler=getattr(draws, draw)()), rows
                )
            )
            for batch, floor in ((32, 4), (256, 4), (4096, 4.5)):
                least = floor if draw == "RandomSampler" else None
                what = f"{draw} {kind} {batch}"
                jobs: dict[str, Job] = {name: (lambda rb=rb, n=batch: rb.sample(n)) for name, rb in made.items()}
                found = watch.medians(what, jobs | floors(rows, batch))
                yield from Claim.of(what, found, least)
                yield Claim(f"{what}, ours : take", found["ours"] / found["take"], most=1.5 if batch > 32 else None)
                yield Claim(f"{what}, ours : memcpy", found["ours"] / found["memcpy"])
            del made


def images(rows: int, watch: Watch) -> Claims:
    """Random batches of images."""
    count = max(1, rows // 100)
    made = peers.sides(
        lambda library, draws: filled(
            library.ReplayBuffer(storage=library.LazyMemmapStorage(count), sampler=draws.RandomSampler()),
            count,
            image_rows,
        )
    )
    for batch in (32, 256):
        jobs: dict[str, Job] = {name: (lambda rb=rb, n=batch: rb.sample(n)) for name, rb in made.items()}
        yield from Claim.of(f"images {batch}", watch.medians(f"images {batch}", jobs), 7)


class Filling:
    """A buffer on a memory map that never gets full, because `renew` replaces it in time."""

    def __init__(self, library: Any, rows: int) -> None:
        self._library, self._rows, self._left = library, rows, 0
        self.renew(rows)

    def renew(self, coming: int) -> None:
        """Make sure that so many rows will fit."""
        if self._left < coming:
            self._buffer = self._library.ReplayBuffer(storage=self._library.LazyMemmapStorage(self._rows))
            self._buffer.extend(state_rows(1))
            self._left = self._rows - 1

    def write(self, name: str, data: Any, count: int) -> None:
        """Call a method of the buffer with data of so many rows."""
        getattr(self._buffer, name)(data)
        self._left -= count


def writes(rows: int, watch: Watch) -> Claims:
    """Rows written to a full memory map, and to one that is not full yet."""
    row = state_rows(1)[0]
    made = peers.sides(
        lambda library, draws: filled(
            library.ReplayBuffer(storage=library.LazyMemmapStorage(rows), sampler=draws.RandomSampler()), rows
        )
    )
    # After the full ones, which load compiled loops, as a buffer that fills does at 32 MiB
    filling = peers.sides(lambda library, draws: Filling(library, rows))
    for name, count, least in (("extend", 1, 9), ("extend", 32, 8), ("extend", 1000, 5), ("add", 1, 9)):
        data = row if name == "add" else state_rows(count)
        what = f"{name} {count}" if name == "extend" else name
        jobs: dict[str, Job] = {side: partial(getattr(rb, name), data) for side, rb in made.items()}
        yield from Claim.of(what, watch.medians(what, jobs), least)
        fills: dict[str, Job] = {side: partial(rb.write, name, data, count) for side, rb in filling.items()}

        def renewed() -> None:
            for rb in filling.values():
                rb.renew(rows // 2)

        found = watch.medians(f"{what}, filling", fills, before=renewed)
        yield from Claim.of(f"{what}, filling", found, {1: 7, 32: 6, 1000: 4}[count])


def steps(rows: int, watch: Watch) -> Claims:
    """Arrays of one step of an environment, or of a vector of them, next to the NumPy ring of Stable-Baselines3."""
    if ring is None:
        print("stable-baselines3 is not installed here: no comparison with its ring (pip install stable-baselines3)")
    draw = np.random.default_rng(0)
    for lanes, most in ((1, 3), (8, 2), (64, 2)):
        now, then = draw.normal(size=(2, lanes, 17)).astype(np.float32)
        action, reward, end = now[:, :6].copy(), np.zeros((lanes, 1), np.float32), np.zeros((lanes, 1), bool)
        step = {"observation": now, "action": action, "reward": reward, "terminated": end, "next_observation": then}
        rb = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(rows // lanes * lanes))
        one = {key: value[0] for key, value in step.items()}
        jobs: dict[str, Job] = {"ours": partial(rb.add, one) if lanes == 1 else partial(rb.extend, step)}
        if ring is not None:
            spaces = gymnasium.spaces.Box(-1, 1, (17,)), gymnasium.spaces.Box(-1, 1, (6,))
            there, infos = ring(rows, *spaces, n_envs=lanes), [dict[str, Any]()] * lanes
            jobs["NumPy"] = partial(there.add, now, then, action, reward[:, 0], end[:, 0], infos)
        found = watch.medians(f"step of {lanes}", jobs)
        if ring is not None:
            yield Claim(f"step of {lanes}, ours : NumPy", found["ours"] / found["NumPy"], most=most)


def threads(rows: int, watch: Watch) -> Claims:
    """Two threads that read batches next to one that reads as many."""
    buffer = filled(rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(rows)), rows)
    batches = [torch.randint(0, rows, (4096,)) for _ in range(100)]

    def read(part: list[torch.Tensor]) -> None:
        for index in part:
            buffer.storage.get(index)

    def two() -> None:
        workers = [threading.Thread(target=read, args=(batches[half::2],)) for half in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    found = watch.medians("threads, batches of 4096", {"one": lambda: read(batches), "two": two})
    yield Claim("two reading threads, one : two", found["one"] / found["two"])


PARTS = (random, images, writes, steps, threads)

if __name__ == "__main__":
    main(__doc__, PARTS)
