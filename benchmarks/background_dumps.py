"""Time how long `dumps(background=True)` blocks its caller, and writers meanwhile, for each form of checkpoint.

    python benchmarks/background_dumps.py [--rows 1000000] [--rounds 3]

A full ring in memory has rows of 752 bytes in episodes of 50 steps. The forms take turns, each with its own folder,
which is replaced from the second round on. While a dump runs, 1,000 rows are written every 5 ms. The figures are
medians in milliseconds: of the background call, of the whole dump, of a foreground call, and of `extend`, for which the
maximum is shown, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import rbtool

FORMS: dict[str, Callable[[], Any]] = {
    "default": rbtool.TensorStorageCheckpointer,
    "compatible": lambda: rbtool.TensorStorageCheckpointer(compatible=True),
    "flat": rbtool.FlatStorageCheckpointer,
    "nested": rbtool.NestedStorageCheckpointer,
    "h5": rbtool.H5StorageCheckpointer,
}
LENGTH, CHUNK = 50, 1_000


def steps(rows: int) -> TensorDict:
    """Make steps of 752 bytes, in which each next observation is the following observation."""
    states = torch.rand(rows + 1, 44, dtype=torch.float64)
    end = (torch.arange(rows) % LENGTH == LENGTH - 1).unsqueeze(-1)
    flags = {"done": end, "terminated": end.clone(), "truncated": torch.zeros_like(end)}
    after = TensorDict({"observation": states[1:], "reward": torch.rand(rows, 1), **flags}, [rows])
    first = {"observation": states[:-1], "action": torch.rand(rows, 10), "done": torch.zeros_like(end)}
    return TensorDict({**first, "next": after}, [rows])


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return (time.perf_counter() - started) * 1e3, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(chosen.rows), batch_size=32)
    data = steps(CHUNK)
    for _ in range(0, chosen.rows, CHUNK):
        buffer.extend(data)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in FORMS}
    writes: dict[str, list[float]] = {name: [] for name in FORMS}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for _ in range(chosen.rounds):
            for name, form in FORMS.items():
                buffer.storage.checkpointer = form()
                place = Path(folder, name)
                at_once, _ = milliseconds(lambda place=place: buffer.dumps(place))
                started = time.perf_counter()
                call, handle = milliseconds(lambda place=place: buffer.dumps(place, background=True))
                while not handle.done():
                    writes[name].append(milliseconds(lambda: buffer.extend(data))[0])
                    time.sleep(0.005)
                handle.result()
                found[name].append((call, (time.perf_counter() - started) * 1e3, at_once))
    for name, times in found.items():
        call, whole, at_once = map(statistics.median, zip(*times, strict=True))
        print(
            f"{name:11} call {call:6.1f}  whole {whole:7.0f}  in the foreground {at_once:7.0f}  "
            f"extend {statistics.median(writes[name]):.2f}, longest {max(writes[name]):.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
