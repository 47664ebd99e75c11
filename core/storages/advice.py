"""Tells the system how mapped files will be read, where that matters: where they do not fit into memory.

Then reading ahead brings in what nobody asked for and drives out what is needed, and random rows come one page fault
after the other. Told that access is random, and of the rows of a batch before they are touched, the system reads
just those, side by side. Where the data fit, its own ways are better, and nothing is told.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pages", "available_memory", "exceeds_memory"]

_GROUPS = Path("/sys/fs/cgroup")


def exceeds_memory(size: int) -> bool:
    """Tell whether so many bytes of files cannot all stay in memory."""
    available = available_memory()
    return available is not None and size > available


def available_memory() -> int | None:
    """Bytes that this process can have and the page cache can use: the system's, or its control group's if fewer.

    None where the system does not say.
    """
    found = [limit for limit in (_system(), *_groups()) if limit is not None]
    return min(found) if found else None


def _system() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _groups() -> Iterable[int]:
    """The limits of the control groups (version 2, and 1) that this process is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                yield int((place / name).read_text(encoding="ascii"))
            if place == root:
                break


class Pages:
    """A mapped file of which rows are read in no order."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._size = len(pages)
        advise_random(pages)

    def expect(self, starts: NDArray[Any], lengths: int | NDArray[Any]) -> None:
        """Say that `lengths` bytes from each of `starts` on are about to be read; it is only a hint."""
        will_need = getattr(mmap, "MADV_WILLNEED", None)
        if will_need is None or not len(starts):
            return
        page = mmap.PAGESIZE
        first = np.sort(starts // page)
        last = np.sort((starts + (lengths - 1)) // page)
        # Rows of neighbouring pages are asked for together.
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        begins = first[np.concatenate(([0], apart + 1))] * page
        stops = np.minimum((last[np.concatenate((apart, [len(last) - 1]))] + 1) * page, self._size)
        advise = self._pages.madvise
        with contextlib.suppress(OSError):
            for begin, size in zip(begins.tolist(), (stops - begins).tolist(), strict=True):
                advise(will_need, begin, size)


def advise_random(pages: mmap.mmap) -> None:
    """Say that a mapped file is read in no order."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            pages.madvise(advice)
