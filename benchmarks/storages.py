"""Time storages behind a ReplayBuffer next to TorchRL's.

    python benchmarks/storages.py [--rows 1000000] [--rounds 15] [--only PART] [--cpu]

TorchRL has to be installed in the same environment; without it, only rbtool's times are shown. Rows are 11 leaves of
758 bytes, images 28 kB. Both sides take turns in one process with one torch thread; the figures are medians of the time
of one call in microseconds, and TorchRL's time divided by rbtool's. `--only` keeps the parts whose names hold PART.
"""

from __future__ import annotations

import threading

import torch
from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from shared.rows import filled, image_rows, state_rows

import rbtool


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
                yield from Claim.of(what, watch.medians(what, jobs), least)
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


def writes(rows: int, watch: Watch) -> Claims:
    """Rows written to a full memory map."""
    made = peers.sides(
        lambda library, draws: filled(
            library.ReplayBuffer(storage=library.LazyMemmapStorage(rows), sampler=draws.RandomSampler()), rows
        )
    )
    for count, least in ((1, 9), (32, 8), (1000, 5)):
        data = state_rows(count)
        jobs: dict[str, Job] = {name: (lambda rb=rb, data=data: rb.extend(data)) for name, rb in made.items()}
        yield from Claim.of(f"extend {count}", watch.medians(f"extend {count}", jobs), least)
    row = state_rows(1)[0]
    added: dict[str, Job] = {name: (lambda rb=rb: rb.add(row)) for name, rb in made.items()}
    yield from Claim.of("add", watch.medians("add", added), 9)


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


PARTS = (random, images, writes, threads)

if __name__ == "__main__":
    main(__doc__, PARTS)
