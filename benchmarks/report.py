"""Measure the time and memory that a report takes, and the size of its page.

    python benchmarks/report.py [STEPS]

The datasets are one of a million steps (17 observations, 6 actions, float32), one of images, and one of 500 fields;
each report runs in a new process. The limits are 10 s and 500 MB for the first dataset, and 3 MB for every page.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rbtool.core.format.contracts import Array
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.returns import running_return
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key

LENGTH = 1000
FLAGS = [Field(key, "bool", (1,), "done") for key in (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)]


CODE = """
import sys
from pathlib import Path
import rbtool

rbtool.report(*sys.argv[1:])
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


def write(path: Path, states: Mapping[str, tuple[str, tuple[int, ...]]], episodes: int) -> None:
    """Write random episodes of `LENGTH` steps; each next observation is the following observation."""
    draw = np.random.default_rng(0)
    fields = [Field(("action",), "float32", (6,), "action"), Field(NEXT_REWARD, "float32", (1,), "reward"), *FLAGS]
    fields += [Field((*lead, "observation", name), dtype, shape, "observation")
               for lead in ((), ("next",)) for name, (dtype, shape) in states.items()]  # fmt: skip
    rows = []
    with DatasetBuilder(path, fields) as builder:
        for number in range(episodes):
            columns: dict[Key, Array] = {
                ("action",): draw.uniform(-1, 1, (LENGTH, 6)).astype(np.float32),
                NEXT_REWARD: draw.normal(size=(LENGTH, 1)).astype(np.float32),
            }
            for name, (dtype, shape) in states.items():
                size = (LENGTH + 1, *shape)
                drawn = draw.integers(0, 256, size) if dtype == "uint8" else draw.normal(size=size)
                values = drawn.astype(dtype)
                columns["observation", name], columns["next", "observation", name] = values[:-1], values[1:]
            ends = np.arange(LENGTH)[:, None] == LENGTH - 1
            columns |= {NEXT_TERMINATED: ends, NEXT_TRUNCATED: np.zeros_like(ends), NEXT_DONE: ends}
            builder.append(columns)
            total = running_return(0.0, columns[NEXT_REWARD])
            rows.append(EpisodeRow(number, LENGTH, total, True, False, EndReason.TERMINATED))
        builder.finish(rows, Origin(Request("benchmark", "benchmark", "random")))


def main() -> None:
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000_000
    wide = {f"field_{number:03}": ("float32", (4,)) for number in range(500)}
    kinds = {
        f"{steps:,} steps of states": ({"state": ("float32", (17,))}, steps // LENGTH),
        "20,000 steps of 84 x 84 x 3 images": ({"pixels": ("uint8", (84, 84, 3))}, 20),
        "5,000 steps of 500 fields": (wide, 5),
    }
    for name, (states, episodes) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            data, page = Path(folder) / "data", Path(folder) / "page.html"
            write(data, states, episodes)
            started = time.perf_counter()
            found = subprocess.run(
                [sys.executable, "-c", CODE, str(data), str(page)], check=True, capture_output=True, text=True
            )
            took = time.perf_counter() - started
            peak = int(found.stdout) / 1024
            print(f"{name:36} {took:6.1f} s   peak {peak:5.0f} MB   page {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
