"""How fast batches come: what `sample --time` measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError

__all__ = ["SECONDS", "SampleTiming", "checked_seconds", "timed"]

SECONDS = 2.0
_WARM_UP = 0.1
_LEAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTiming:
    """How long `batches` batches took, one after the other, in all (`seconds`) and each (`median_us`, `p95_us`).

    The first ones, a tenth of the time, are left out: they read files and compile kernels. `threads` is how many
    threads torch may use.
    """

    batches: int
    seconds: float
    batches_per_second: float
    steps_per_second: float
    bytes_per_second: float
    median_us: float
    p95_us: float
    threads: int


def checked_seconds(seconds: float | None, *, asked: bool) -> float | None:
    """Return for how long to measure, None for not at all; UsageError for a time that is none."""
    if seconds is None:
        return SECONDS if asked else None
    if not asked:
        raise UsageError("--seconds says for how long to measure, and no time is taken", hint="add --time")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds is {seconds}, a time above 0 is expected")
    return seconds


def timed(draw: Callable[[], int], seconds: float, *, step_bytes: float, threads: int) -> SampleTiming:
    """Call `draw`, which returns how many steps it drew, again and again for about so many seconds."""
    _until(draw, seconds * _WARM_UP)
    taken, steps = _until(draw, seconds)
    total = float(taken.sum())
    return SampleTiming(
        batches=len(taken),
        seconds=round(total, 6),
        batches_per_second=len(taken) / total,
        steps_per_second=steps / total,
        bytes_per_second=steps * step_bytes / total,
        median_us=float(np.median(taken)) * 1e6,
        p95_us=float(np.percentile(taken, 95)) * 1e6,
        threads=threads,
    )


def _until(draw: Callable[[], int], seconds: float) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], int]:
    """Draw until the time is over, and a few batches in any case; return how long each took, and all their steps."""
    taken: list[float] = []
    steps = 0
    stop = time.perf_counter() + seconds
    while len(taken) < _LEAST or time.perf_counter() < stop:
        begun = time.perf_counter()
        drawn = draw()
        taken.append(time.perf_counter() - begun)
        steps += drawn
    return np.array(taken), steps
