"""Compare `rbtool.convert` with worker processes and without, for a compressed D4RL file and for a folder of shards.

    python benchmarks/convert_workers.py [--workers 2] [--rounds 3] [--steps 1000000] [--episodes 100] [--layout ted]
                                         [--folder DIR] [--limit 1.6]

The file has observations float32 [17] and actions float32 [6] in episodes of 1,000 steps, compressed with gzip like
D4RL's gym datasets. The folder has V-D4RL's layout: one npz file per episode, with pixels. The two sides are
interleaved. The figures are medians in seconds, of wall time and of CPU time over all processes, and the speed-up by
workers. Exits with 1 if the speed-up is below the limit. Workers need a free core each to be faster; `load` shows how
many processes wanted to run.

On two cores the speed-up is 1.7 for the folder and 1.15 to 1.3 for the file. The conversion of the file already uses a
second core without workers: one thread unpacks chunks, 0.45 s in all, while another writes. Workers take 0.6 s of CPU
time on two cores, a single process 0.55 s. Cutting tasks at chunk borders gains nothing, because each chunk is unpacked
only once already: libhdf5 caches the chunks of the last rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import d4rl
import numpy as np

import rbtool

STEPS_AN_EPISODE = 1000


def build_files(folder: Path, episodes: int) -> None:
    """Write files of V-D4RL's layout: an episode of 501 rows of 64 x 64 pixels each, compressed."""
    draw, rows = np.random.default_rng(1), 501
    folder.mkdir()
    marks = np.arange(rows)
    for number in range(episodes):
        image = np.repeat(draw.integers(0, 256, (rows, 64, 8, 3), np.uint8), 8, axis=2)
        np.savez_compressed(
            folder / f"20220101T{number:06d}-{number:032x}-{rows}.npz", image=image,
            action=draw.normal(size=(rows, 6)).astype(np.float32), reward=draw.normal(size=rows).astype(np.float32),
            discount=np.ones(rows, np.float32), is_first=marks == 0, is_last=marks == rows - 1,
            is_terminal=np.zeros(rows, bool),
        )  # fmt: skip


def measured(source: Path, target: Path, layout: str, workers: int) -> tuple[float, float]:
    """Convert once; return the wall time and the CPU time in seconds."""
    started, cpu = time.perf_counter(), d4rl.cpu_seconds()
    rbtool.convert(source, target, layout=layout, num_workers=workers)
    found = time.perf_counter() - started, d4rl.cpu_seconds() - cpu
    shutil.rmtree(target)
    return found


def compare(name: str, source: Path, target: Path, chosen: argparse.Namespace) -> float:
    """Print the figures of one source; return the speed-up by workers."""
    counts = (0, chosen.workers)
    measured(source, target, chosen.layout, 0)  # imports
    rounds = [[measured(source, target, chosen.layout, count) for count in counts] for _ in range(chosen.rounds)]
    medians = [[statistics.median(one[side][part] for one in rounds) for part in (0, 1)] for side in (0, 1)]
    (one, one_cpu), (many, many_cpu) = medians
    print(f"{name}: load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"  this process                {one:7.2f} s   CPU {one_cpu:7.2f} s")
    faster = one / many
    print(
        f"  {chosen.workers} worker processes          {many:7.2f} s   CPU {many_cpu:7.2f} s   {faster:.2f} x as fast"
    )
    return faster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=100, help="of the folder")
    parser.add_argument("--layout", choices=["ted", "packed"], default="ted")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=1.6)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        table, folder, target = Path(scratch) / "gzip.hdf5", Path(scratch) / "walk", Path(scratch) / "target"
        packing = {"compression": "gzip"}
        d4rl.build(table, chosen.steps // STEPS_AN_EPISODE, STEPS_AN_EPISODE, following=False, packing=packing)
        build_files(folder, chosen.episodes)
        sources = {"one table, gzip": table, "a file an episode": folder}
        found = [compare(name, source, target, chosen) for name, source in sources.items()]
    return int(min(found) < chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
