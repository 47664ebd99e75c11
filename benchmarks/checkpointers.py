"""Time the checkpointers of whole episodes next to TorchRL's, and next to a plain copy of the same bytes.

    python benchmarks/checkpointers.py [--steps 200000] [--episode-length 300] [--rounds 7] [--only PART] [--folder DIR]

TorchRL has to be installed in the same environment; without it only our own times are shown. Rows are 11 leaves of
758 bytes. `write` saves a buffer over an older checkpoint, as a training run does; `read` loads it into a buffer that
holds rows already, `read fresh` into an empty one. The copy next to a write takes the files it made to another folder,
with the same syncs; the copy next to a read brings the bytes of all rows from plain files into memory of the same
kind. All take turns in one process with one torch thread; the figures are medians in milliseconds, TorchRL's time over
ours, and ours over that of the copy.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from checkpoint_forms import copy
from storages import state_rows
from tensordict import TensorDict

import rbtool
from rbtool.core.format import fs

try:
    logging.disable(logging.INFO)
    import torchrl.data as peer
    from torchrl.data.replay_buffers import checkpointers as peer_checkpointers
except ImportError:
    peer = None

FORMS = ("Flat", "Nested", "H5")
KINDS = ("LazyTensorStorage", "LazyMemmapStorage")
FLAGS = ("done", "terminated", "truncated")


class Job(NamedTuple):
    """The same work done by us, by TorchRL (None where it is not there) and by a copy."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object] | None
    copied: Callable[[], object]


def episodes(steps: int, length: int) -> TensorDict:
    """Rows of a robot's states in episodes of one length: each next observation is the observation that follows."""
    rows = state_rows(steps)
    rows["next", "observation"][:-1] = rows["observation"][1:]
    last = torch.arange(steps) % length == length - 1
    for flag in FLAGS:
        rows[flag].zero_()
        rows["next", flag] = (last & (flag != "terminated")).unsqueeze(-1)
    rows["next", "observation"][last] += 1
    rows["episode"] = torch.arange(steps) // length
    return rows


def buffer_of(library: Any, stores: Any, savers: Any, kind: str, form: str, rows: TensorDict | None, steps: int) -> Any:
    """Make a buffer with a checkpointer of a form, empty or so full of rows that it began anew with the first ones."""
    storage = getattr(stores, kind)(steps)
    buffer = library.ReplayBuffer(storage=storage, batch_size=32)
    storage.checkpointer = getattr(savers, f"{form}StorageCheckpointer")()  # a buffer of TorchRL's takes its own, else
    if rows is not None:
        buffer.extend(rows)
        buffer.extend(rows[: steps // 100])
    return buffer


def plain_files(rows: TensorDict, folder: Path) -> list[tuple[Path, torch.Tensor]]:
    """Write every leaf to a file; return each with memory of its size that was written to before."""
    fs.make_folder(folder)
    found = []
    for number, leaf in enumerate(rows.values(True, True)):
        path = folder / str(number)
        leaf.contiguous().numpy().tofile(path)
        found.append((path, leaf.clone()))
    return found


def read_files(files: list[tuple[Path, torch.Tensor]], *, fresh: bool) -> None:
    """Read the files into memory, all of it new or all of it used."""
    for path, used in files:
        memory = np.empty(used.numel() * used.element_size(), np.uint8) if fresh else used.view(-1).view(torch.uint8)
        with open(path, "rb", buffering=0) as file:
            file.readinto(memoryview(np.asarray(memory)))


def jobs(work: Path, steps: int, length: int) -> Iterator[Job]:
    rows = episodes(steps, length)
    files = plain_files(rows, work / "plain")
    for kind in KINDS:
        for form in FORMS:
            make = partial(buffer_of, kind=kind, form=form, steps=steps)
            here, there = work / f"{form}-ours", work / f"{form}-theirs"
            ours = partial(make, rbtool, rbtool, rbtool)
            theirs = None if peer is None else partial(make, peer, peer, peer_checkpointers)
            sources = [None if side is None else side(rows=rows) for side in (ours, theirs)]
            filled = [None if side is None else side(rows=rows) for side in (ours, theirs)]
            for source, place in zip(sources, (here, there), strict=True):
                if source is not None:
                    source.dumps(place)
            yield Job(
                f"{form} write {kind}", partial(sources[0].dumps, here),
                None if sources[1] is None else partial(sources[1].dumps, there),
                partial(copy_anew, here, work / "copy"),
            )  # fmt: skip
            yield Job(
                f"{form} read {kind}", partial(filled[0].loads, here),
                None if filled[1] is None else partial(filled[1].loads, there), partial(read_files, files, fresh=False),
            )  # fmt: skip
            yield Job(
                f"{form} read fresh {kind}", lambda ours=ours, here=here: ours(rows=None).loads(here),
                None if theirs is None else lambda theirs=theirs, there=there: theirs(rows=None).loads(there),
                partial(read_files, files, fresh=True),
            )  # fmt: skip
            del sources, filled


def copy_anew(source: Path, target: Path) -> None:
    copy(source, target.with_name("copy-new"))
    fs.remove(target)
    fs.rename(target.with_name("copy-new"), target)


def timed(work: Callable[[], object] | None) -> float:
    if work is None:
        return float("nan")
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--episode-length", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="only jobs whose names hold this")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(dir=options.folder))
    print(f"{options.steps:,} steps in episodes of {options.episode_length}; median of {options.rounds} rounds, ms")
    print(f"{'':36}{'ours':>8}{'TorchRL':>9}{'ratio':>7}{'copy':>8}{'ratio':>7}")
    try:
        for job in jobs(work, options.steps, options.episode_length):
            if options.only in job.name:
                show(job, options.rounds)
    finally:
        shutil.rmtree(work)


def show(job: Job, rounds: int) -> None:
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for work, taken in zip(job[1:], times, strict=True):
            taken.append(timed(work))
    ours, theirs, copied = map(statistics.median, times)
    print(f"{job.name:36}{ours:8.1f}{theirs:9.1f}{theirs / ours:7.2f}{copied:8.1f}{ours / copied:7.2f}", flush=True)


if __name__ == "__main__":
    main()
