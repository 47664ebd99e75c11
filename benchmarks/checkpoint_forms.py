"""Time each checkpoint form next to a plain copy of the same bytes with the same syncs.

    python benchmarks/checkpoint_forms.py [--steps 200000] [--episode-length 300] [--rounds 7] [--folder DIR]

`save` and `load` are the library functions of the verbs, and include reading, verifying, digests, writing, syncing and
publishing. The reference for each is a copy of the files that it made to another folder, with a sync of each file.
Rounds are interleaved; the figures are medians in milliseconds and their ratio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rbtool.core.format import fs
from rbtool.core.format.contracts import Piece
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import Field, Timing, ted_fields
from rbtool.core.verbs import checkpoint

FIELDS: tuple[tuple[Field, Timing], ...] = (
    (Field(("observation",), "float64", (17,), "observation"), "state"),
    (Field(("info", "position"), "float32", (17,), "info"), "state"),
    (Field(("action",), "float32", (6,), "action"), "step"),
    (Field(("reward",), "float64", (), "reward"), "result"),
)
FORMS = ("ted", "flat", "nested", "h5")


def build(folder: Path, steps: int, length: int) -> int:
    """Write a dataset of episodes of one length; return its bytes."""
    draw = np.random.default_rng(0)
    with DatasetBuilder(folder, ted_fields(FIELDS)) as builder:
        ingest = Ingest(builder, FIELDS)
        for number in range(max(1, steps // length)):
            columns = {
                field.key: draw.normal(size=(length + (timing == "state"), *field.shape)).astype(field.numpy)
                for field, timing in FIELDS
            }
            ended = np.arange(length) == length - 1
            ingest.add(Piece(number, columns, np.zeros(length, bool), ended, first=True, last=True))
        return builder.finish(ingest.table, Origin(Request("bench", "bench", "bench/v0"))).bytes


def copy_and_sync(source: Path, target: Path) -> None:
    """Copy a file's bytes and sync it."""
    with open(source, "rb", buffering=0) as file, open(target, "xb", buffering=0) as copied:
        while chunk := file.read(8 << 20):
            copied.write(chunk)
        os.fsync(copied.fileno())


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder; every file and folder is synced."""
    if source.is_file():
        copy_and_sync(source, target)
    else:
        fs.make_folder(target)
        for path in sorted(source.iterdir()):
            copy(path, target / path.name)
    fs.sync_folder(target.parent)


def timed(work: Callable[[Path], object], target: Path) -> float:
    fs.remove(target)
    started = time.perf_counter()
    work(target)
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--episode-length", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        run(work, options.steps, options.episode_length, options.rounds)
    finally:
        shutil.rmtree(work)


def run(work: Path, steps: int, length: int, rounds: int) -> None:
    size = build(work / "dataset", steps, length)
    print(f"{steps:,} steps in episodes of {length}, {size / 1e6:.0f} MB; median of {rounds} rounds")
    jobs: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {}
    for form in FORMS:
        saved = work / f"saved-{form}"
        jobs[f"save {form}"] = (
            lambda dest, form=form: checkpoint.save(work / "dataset", dest, form=form),
            lambda dest, saved=saved: copy(saved, dest),
        )
        jobs[f"load {form}"] = (
            lambda dest, saved=saved: checkpoint.load(saved, dest),
            lambda dest: copy(work / "dataset", dest),
        )
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in jobs}
    for form in FORMS:
        checkpoint.save(work / "dataset", work / f"saved-{form}", form=form)
    for _ in range(rounds):
        for name, pair in jobs.items():
            for job, taken in zip(pair, times[name], strict=True):
                taken.append(timed(job, work / "target"))
    for name, (ours, copies) in times.items():
        one, other = statistics.median(ours), statistics.median(copies)
        print(f"{name:12} {one:8.1f} ms   copy {other:8.1f} ms   ratio {one / other:5.2f}")


if __name__ == "__main__":
    main()
