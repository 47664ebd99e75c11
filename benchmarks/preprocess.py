"""Time preprocess next to TorchRL's, and next to a plain copy of the bytes of the result.

    python benchmarks/preprocess.py [--rows 1000000] [--rounds 5] [--only PART] [--cpu]

TorchRL has to be installed in the same environment; without it only rbtool's times are shown. Rows are 11 leaves of 758
bytes, a fifth of `--rows`, in episodes of 1,000 steps. Every time includes the start-up and the publishing of the
result; earlier results are removed between the runs. All sides take turns in one process; the figures are medians in
microseconds, and TorchRL's time divided by rbtool's.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from tensordict import TensorDict

import rbtool
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import ACTION, NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, ted_fields

try:
    from torchrl.data.datasets.common import BaseDatasetExperienceReplay
except ImportError:
    BaseDatasetExperienceReplay = None

LENGTH = 1000
PEER_ROWS = 2_000


def normalise(rows: Any) -> Any:
    """Scale the observations; works on rows and on a single one."""
    for part in (rows, rows["next"]):
        part["observation"] = (part["observation"] - 0.5) / 0.29
    return rows


def compute(rows: Any) -> Any:
    """Use CPU time in proportion to the number of rows: 100 small matrix products."""
    found = rows["observation"].float()
    weights = torch.eye(39) * 0.99
    for _ in range(100):
        found = torch.tanh(found @ weights)
    return rows.set("found", found)


def make(folder: Path, rows: int) -> None:
    """Write a dataset of random rows."""
    draw = np.random.default_rng(0)
    source = [
        (Field(("observation",), "float64", (39,), "observation"), "state"),
        (Field(("info", "qpos"), "float32", (5,), "info"), "state"),
        (Field(ACTION, "float32", (20,), "action"), "step"),
        (Field(("reward",), "float64", (), "reward"), "result"),
    ]
    fields = ted_fields(source)
    episodes = [EpisodeRow(n, LENGTH, 0.0, False, True, EndReason.TRUNCATED) for n in range(rows // LENGTH)]
    flags = np.zeros((LENGTH, 1), bool)
    ends = flags.copy()
    ends[-1] = True
    with DatasetBuilder(folder, fields) as builder:
        for number in range(rows // LENGTH):
            columns = {field.key: draw.random((LENGTH, *field.shape)).astype(field.numpy) for field in fields}
            for key in (("observation",), ("info", "qpos")):
                columns["next", *key][:-1] = columns[key][1:]
            columns |= {NEXT_TERMINATED: flags, NEXT_TRUNCATED: ends, NEXT_DONE: ends}
            columns["episode",] = np.full(LENGTH, number)
            columns[NEXT_REWARD] = np.ones((LENGTH, 1))
            builder.append(columns)
        builder.finish(episodes, Origin(Request("benchmark", "benchmark", "benchmark")))


class Bench:
    """The dataset, and the destination of the results, which is removed before each job."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.steps = math.ceil(steps / LENGTH) * LENGTH
        self.source, self.made = folder / "source", folder / "made"
        make(self.source, self.steps)
        self._peer = _peer_dataset(self.source) if BaseDatasetExperienceReplay else None

    @classmethod
    @contextlib.contextmanager
    def of(cls, rows: int) -> Iterator[Bench]:
        """Make it in a temporary folder, with a fifth of so many steps."""
        with tempfile.TemporaryDirectory() as place:
            yield cls(Path(place), rows // 5)

    def ours(self, fn: Any = None, **options: Any) -> Job:
        """Run rbtool's preprocess."""

        def job() -> None:
            rbtool.preprocess(self.source, fn, self.made, **options)

        return job

    def clear(self) -> None:
        """Remove the result of a job."""
        shutil.rmtree(self.made, ignore_errors=True)

    def theirs(self, fn: Any, rows: int | None = None, **options: Any) -> Job:
        """Run TorchRL's preprocess, on the first rows."""

        def job() -> None:
            self._peer.preprocess(fn, dest=self.made, num_frames=rows, **options)

        return job

    def copied(self) -> Job:
        """Read the bytes of the last result and write them to other files, synced as ours are."""
        kept = self.made.with_name("kept")
        shutil.rmtree(kept, ignore_errors=True)
        self.made.rename(kept)
        with TedReader(kept) as reader:
            paths = [kept / file.path for file in reader.manifest.files if file.path.endswith(".memmap")]

        def job() -> None:
            self.made.mkdir()
            for number, path in enumerate(paths):
                with open(path, "rb", buffering=0) as source, open(self.made / str(number), "wb", buffering=0) as file:
                    while data := source.read(1 << 22):
                        file.write(data)
                    os.fsync(file.fileno())

        return job

    @property
    def has_peer(self) -> bool:
        """Return whether TorchRL is installed."""
        return self._peer is not None


def _peer_dataset(source: Path) -> Any:
    class Rows(BaseDatasetExperienceReplay):
        """The rows as a dataset of TorchRL."""

        data_path = data_path_root = source

        def _is_downloaded(self) -> bool:
            return True

    data = TensorDict.load_memmap(source)
    return Rows(storage=peers.buffers.TensorStorage(data), batch_size=32)


def chunk(rows: int, watch: Watch) -> Claims:
    """A function of many rows at once."""
    size = 10_000
    with Bench.of(rows) as bench:
        jobs = {"ours": bench.ours(normalise, num_workers=2, chunk_size=size, start_method="fork")}
        jobs["ours, in process"] = bench.ours(normalise, num_workers=0, chunk_size=size)
        if bench.has_peer:
            jobs["TorchRL"] = bench.theirs(normalise, num_workers=2, chunksize=size, mp_start_method="fork")
            jobs["TorchRL, spawn"] = bench.theirs(normalise, num_workers=2, chunksize=size)
        found = watch.medians("preprocess, chunk function", jobs, before=bench.clear)
    yield from Claim.of("preprocess by fork, chunk function", found, 1.5)


def row(rows: int, watch: Watch) -> Claims:
    """A function of a single row; TorchRL runs it on 2,000 rows, and the times of a row are compared."""
    few = Watch(min(watch.rounds, 3), watch.clock)
    with Bench.of(rows) as bench:
        jobs = {"ours": bench.ours(normalise, unit="row", num_workers=2)}
        jobs["ours, without vmap"] = bench.ours(normalise, unit="row", vmap=False, num_workers=2)
        if bench.has_peer:
            jobs["TorchRL"] = bench.theirs(normalise, PEER_ROWS, num_workers=2, chunksize=0, mp_start_method="fork")
        found = few.medians("preprocess, function of a row", jobs, before=bench.clear)
    if "TorchRL" in found:
        found["TorchRL"] *= bench.steps / PEER_ROWS
    yield from Claim.of("preprocess by fork, function of a row", found)


def operations(rows: int, watch: Watch) -> Claims:
    """Select, cat and cast without Python, next to a copy of the bytes of the result."""
    program = {
        "cast": {"observation": "float32"}, "cat": {"obs": ["observation", "info.qpos"]},
        "select": ["obs", "action", "reward"],
    }  # fmt: skip
    for name, count in (("in process", 0), ("two workers", 2)):
        with Bench.of(rows) as bench:
            job = bench.ours(operations=program, num_workers=count)
            job()
            jobs = {"ours": job, "copy": bench.copied()}
            found = watch.medians(f"select, cat, cast, {name}", jobs, before=bench.clear)
        yield Claim(f"select, cat, cast, {name}, ours : copy", found["ours"] / found["copy"])


def workers(rows: int, watch: Watch) -> Claims:
    """Compare one and two workers with a function that needs much CPU time."""
    with Bench.of(rows) as bench:
        jobs = {f"{count} workers": bench.ours(compute, num_workers=count, chunk_size=5000) for count in (2, 1)}
        found = watch.medians("a function that computes", jobs, before=bench.clear)
    yield Claim("a function that computes, one worker : two", found["1 workers"] / found["2 workers"])


PARTS = (chunk, row, operations, workers)

if __name__ == "__main__":
    main(__doc__, PARTS, rounds=5)
