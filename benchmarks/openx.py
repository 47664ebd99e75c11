"""Compare `rbtool.convert` of shards of Open X-Embodiment with two processes and with one.

    python benchmarks/openx.py [--workers 2] [--rounds 3] [--episodes 40] [--kind JPEG] [--side 256] [--layout packed]
                               [--folder DIR] [--limit 1.8]

Episodes of 50 steps are in shards of 20 episodes; each step has a moving image, a state, an embedding of 512 numbers as
a list of Python floats, and text. The two sides are interleaved. The figures are medians in seconds, their ratio, and
the share of the survey of all episodes in the time of one process; workers divide the survey. Exits with 1 if the ratio
is below the limit. Two processes need a free core each to be faster; `load` shows how many processes wanted to run.

The CPU time for 2,000 JPEG files shows what is possible on two cores. One process takes 1.8 s. In layout `ted`, two
workers and this process together take 1.65 s, 0.3 s of it in this process. In layout `packed` they take 2.5 s, 0.84 s
of it in this process, which copies the rows of all workers in order.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import rbtool
from rbtool.converters.openx.reader import OpenXReader

STEPS, A_SHARD = 50, 20


def episode(number: int, kind: str, side: int) -> dict[str, Any]:
    """Make an episode as the hub has them."""
    draw = np.random.default_rng(number)
    small = draw.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    picture = np.asarray(Image.fromarray(small).resize((2 * side, side), Image.Resampling.BICUBIC))
    embedding = draw.normal(size=512).astype("f4").tolist()

    def step(at: int) -> dict[str, Any]:
        held = io.BytesIO()
        Image.fromarray(picture[:, at : at + side]).save(held, kind)
        return {
            "observation": {
                "image": {"bytes": held.getvalue(), "path": None},
                "state": draw.normal(size=8).astype("f4").tolist(),
            },
            "action": draw.normal(size=7).astype("f4").tolist(),
            "reward": np.float32(at == STEPS - 1),
            "discount": np.float32(1),
            "is_first": at == 0, "is_last": at == STEPS - 1, "is_terminal": at == STEPS - 1,
            "language_instruction": "put the red block on the green one", "language_embedding": embedding,
        }  # fmt: skip

    return {"steps": [step(at) for at in range(STEPS)]}


def build(folder: Path, episodes: int, kind: str, side: int) -> int:
    """Write the shards; return their bytes."""
    folder.mkdir()
    for number in range(-(-episodes // A_SHARD)):
        with tarfile.open(folder / f"{folder.name}_{number:05}.tar", "w") as archive:
            for one in range(number * A_SHARD, min(episodes, (number + 1) * A_SHARD)):
                data = pickle.dumps(episode(one, kind, side))
                member = tarfile.TarInfo(f"{folder.name}_{one:05}.data.pickle")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return sum(path.stat().st_size for path in folder.iterdir())


def convert(source: Path, target: Path, layout: str, workers: int) -> float:
    started = time.perf_counter()
    rbtool.convert(source, target, layout=layout, num_workers=workers, trust_pickle=True)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def look_over(source: Path) -> float:
    started = time.perf_counter()
    with OpenXReader(source, options={"trust_pickle": True}) as reader:
        reader.facts()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--kind", choices=("JPEG", "PNG"), default="JPEG")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--layout", choices=("ted", "packed"), default="packed")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=1.8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "robots", Path(scratch) / "target"
        size = build(source, chosen.episodes, chosen.kind, chosen.side)
        alone, shared, looks = [], [], []
        for _ in range(chosen.rounds):
            alone.append(convert(source, target, chosen.layout, 0))
            shared.append(convert(source, target, chosen.layout, chosen.workers))
            looks.append(look_over(source))
    one, many, look = map(statistics.median, (alone, shared, looks))
    images, load = chosen.episodes * STEPS, os.getloadavg()[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{images:,} {chosen.kind} of {chosen.side} x {chosen.side}, {size / 1e6:,.0f} MB, load {load:.1f}")
    print(f"  one process        {one:6.2f} s   {images / one:7,.0f} images/s, peak memory {peak:,.0f} MiB")
    rate = f"{images / many:7,.0f} images/s   {one / many:.2f} times as fast"
    print(f"  {chosen.workers} processes        {many:6.2f} s   {rate}")
    print(f"  the first look     {look:6.2f} s   {look / one:.1%} of one process")
    return int(one / many < chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
