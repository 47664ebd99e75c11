"""Time conversions next to something else that reads and writes the same bytes, in turns."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import rbtool

Copy = Callable[[Path, Path], object]


def seconds(call: Copy, source: Path, target: Path) -> float:
    """Time one call, and remove what it wrote."""
    started = time.perf_counter()
    call(source, target)
    took = time.perf_counter() - started
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    return took


def medians(other: Copy, source: Path, target: Path, rounds: int) -> tuple[float, float]:
    """Return the median seconds of the other side and of `rbtool.convert`."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, times in zip((other, rbtool.convert), found, strict=True):
            times.append(seconds(call, source, target))
    return statistics.median(found[0]), statistics.median(found[1])
