"""Time a dump of a buffer with one per cent of new rows, and a load, next to TorchRL's.

    python benchmarks/incremental.py [--rows 1000000] [--rounds 7] [--only PART] [--cpu] [--json FILE]

Both buffers get the new rows, and are saved over their earlier checkpoint. `plain` writes the bytes of the new rows to
one file for each leaf, and waits for the disk as a dump does. `lent` is a buffer that has handed out rows by reference,
so that the digests of all rows are compared. TorchRL never waits for the disk. A load fills an empty buffer from a
synced dump.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from shared.rows import CHUNK, state_rows
from tensordict import TensorDict

import rbtool
from rbtool.core.format import fs

MANY = 16


def filled(library: Any, rows: int) -> Any:
    """Make a buffer that is full."""
    buffer = library.ReplayBuffer(storage=library.LazyTensorStorage(rows), batch_size=32)
    chunk = state_rows(min(rows, CHUNK))
    for start in range(0, rows, len(chunk)):
        buffer.extend(chunk[: rows - start])
    return buffer


def saved(buffer: Any, new: TensorDict, place: Path, **options: Any) -> None:
    """Write the new rows, and save the buffer."""
    buffer.extend(new)
    buffer.dumps(place, **options)


def plain(new: TensorDict, place: Path) -> None:
    """Write the bytes of rows, one file per leaf, over the earlier files."""
    fs.remove(place)
    fs.make_folder(place)
    for number, leaf in enumerate(new.values(True, True)):
        fs.write_file(place / str(number), leaf.contiguous().numpy().tobytes())
    fs.sync_folder(place)


def repeated(job: Job) -> None:
    """Call a function often enough that segments are merged twice."""
    for _ in range(MANY):
        job()


def loaded(make: Callable[[], Any], place: Path) -> Any:
    buffer = make()
    buffer.loads(place)
    return buffer


def incremental(rows: int, watch: Watch) -> Claims:
    """Measure dumps and loads."""
    libraries = {"ours": rbtool} | ({} if peers.buffers is None else {"TorchRL": peers.buffers})
    new = state_rows(rows // 100)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        buffers = {side: filled(library, rows) for side, library in libraries.items()}
        for side, buffer in buffers.items():
            buffer.dumps(work / side)
        jobs: dict[str, Job] = {side: partial(saved, one, new, work / side) for side, one in buffers.items()}
        found = watch.medians("dump, 1% new", jobs | {"plain": partial(plain, new, work / "plain")})
        yield from Claim.of("dump, 1% new, TorchRL", found, 20)
        yield Claim("dump, 1% new, ours : writing these rows", found["ours"] / found["plain"], most=3)
        many: dict[str, Job] = {
            "ours": partial(repeated, partial(saved, buffers["ours"], new, work / "ours")),
            "plain": partial(repeated, partial(plain, new, work / "plain")),
        }
        found = watch.medians(f"{MANY} dumps, 1% new each", many)
        ratio = found["ours"] / found["plain"]
        yield Claim(f"{MANY} dumps, 1% new each, ours : writing these rows", ratio, most=3)
        makes = {
            side: partial(lambda library: library.ReplayBuffer(storage=library.LazyTensorStorage(rows)), library)
            for side, library in libraries.items()
        }
        found = watch.medians("load", {side: partial(loaded, make, work / side) for side, make in makes.items()})
        yield from Claim.of("load, TorchRL", found, 20)
        hasty = {"ours": partial(saved, buffers["ours"], new, work / "ours", durable="none")}
        found = watch.medians("dump, 1% new, no wait for the disk", jobs | hasty)
        yield from Claim.of("dump, 1% new, no wait for the disk, TorchRL", found)
        assert len(buffers["ours"].storage[0:1])  # handed out by reference
        found = watch.medians("dump, 1% new, lent", jobs)
        yield from Claim.of("dump, 1% new, rows handed out, TorchRL", found)


PARTS = [incremental]

if __name__ == "__main__":
    main(__doc__, PARTS, rounds=7)
