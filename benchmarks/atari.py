"""Compare `rbtool.convert` of a run of Atari frames with unpacking the same bytes by gunzip.

    python benchmarks/atari.py [--rows 60000] [--rounds 5] [--folder DIR] [--limit 2.0]

The run has two checkpoints of frames, uint8 [84, 84], that compress about as well as frames of games: a still picture
with a few moving patches. The reference is `gunzip -c` of every file into one file, which is then synced. Rounds are
interleaved; the figures are medians in seconds and their ratio. Exits with 1 if the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import gzip
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from shared.conversions import medians


def frames(count: int) -> np.ndarray[Any, Any]:
    """Make frames of a picture with patches that move at random."""
    draw = np.random.default_rng(0)
    picture = np.kron(draw.integers(0, 256, (12, 12), np.uint8), np.ones((7, 7), np.uint8))
    found = np.repeat(picture[None], count, axis=0)
    for places in draw.integers(0, 78, (6, count, 2)):
        for number, (row, column) in enumerate(places):
            found[number, row : row + 6, column : column + 6] = draw.integers(0, 256)
    return found


def save(path: Path, array: Any) -> None:
    held = io.BytesIO()
    np.save(held, np.asarray(array))
    path.write_bytes(gzip.compress(held.getvalue(), 6))


def build(folder: Path, rows: int) -> None:
    """Write both checkpoints."""
    folder.mkdir()
    for number in range(2):
        at = np.arange(number * rows, (number + 1) * rows)
        columns = {
            "$store$_observation": frames(rows), "$store$_action": (at % 18).astype("i4"),
            "$store$_reward": (at % 3 - 1).astype("f4"), "$store$_terminal": (at % 1700 == 1699).astype("u1"),
            "add_count": (number + 1) * rows, "invalid_range": np.array([rows - 2, rows - 1, 0, 1, 2]),
        }  # fmt: skip
        for name, column in columns.items():
            save(folder / f"{name}_ckpt.{number}.gz", column)


def unpack(source: Path, target: Path) -> None:
    with target.open("wb") as file:
        for path in sorted(source.iterdir()):
            subprocess.run(["gunzip", "-c", path], stdout=file, check=True)
    subprocess.run(["sync", target], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=2.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "1", Path(scratch) / "target"
        build(source, chosen.rows)
        one, ours = medians(unpack, source, target, chosen.rounds)
    size = 2 * chosen.rows * 84 * 84 / 1e6
    print(f"2 checkpoints of {chosen.rows:,} frames, {size:,.0f} MB, median of {chosen.rounds} rounds")
    print(f"  gunzip, sync       {one:6.2f} s   {size / one:6.0f} MB/s")
    print(f"  rbtool.convert     {ours:6.2f} s   {size / ours:6.0f} MB/s   {ours / one:.2f} times as long")
    return int(ours > chosen.limit * one)


if __name__ == "__main__":
    sys.exit(main())
