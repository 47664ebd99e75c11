"""Which episodes: `0:100,250` means the source's episodes 0 to 99 and 250."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ..errors import UsageError

__all__ = ["EpisodeRanges", "normal_form", "parse_episodes", "select_episodes"]

EpisodeRanges: TypeAlias = Sequence[tuple[int, int | None]]
"""Half-open ranges of the source's episode numbers; an open end is None."""

_PART = re.compile(r"\s*(?:(\d+)|(\d*):(\d*))\s*")


def parse_episodes(text: str) -> list[tuple[int, int | None]]:
    """Read a selection into half-open ranges, sorted and merged; an open end is None.

    Raises UsageError for anything but numbers and `A:B` ranges joined by commas.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"--episodes {text!r} is not understood at {part!r}", hint="write it like 0:100,250")
        single, low, high = match.groups()
        first, stop = (int(single), int(single) + 1) if single else (int(low or 0), int(high) if high else None)
        if stop is not None and stop <= first:
            raise UsageError(f"--episodes {part.strip()!r} holds no episode: ranges run from A up to, not including, B")
        ranges.append((first, stop))
    return _merge(sorted(ranges, key=lambda part: part[0]))


def _merge(ranges: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    merged: list[tuple[int, int | None]] = []
    for first, stop in ranges:
        if merged and (merged[-1][1] is None or first <= merged[-1][1]):
            before = merged[-1][1]
            merged[-1] = (merged[-1][0], None if before is None or stop is None else max(before, stop))
        else:
            merged.append((first, stop))
    return merged


def normal_form(ranges: Iterable[tuple[int, int | None]]) -> str | None:
    """Write a selection in its one normal form; None stands for everything."""
    parts = list(ranges)
    if parts == [(0, None)]:
        return None
    return ",".join(str(a) if b == a + 1 else f"{a}:{'' if b is None else b}" for a, b in parts)


def select_episodes(ranges: Iterable[tuple[int, int | None]], numbers: Sequence[int]) -> list[int]:
    """Return the episode numbers chosen, in storage order; every number asked for must be there."""
    known, top = set(numbers), max(numbers, default=-1)
    chosen: set[int] = set()
    for first, stop in ranges:
        wanted = range(first, top + 1 if stop is None else stop)
        absent = _first_absent(wanted, known, top)
        if absent is not None:
            held = f"{min(known)} to {top}" if known else "none"
            raise UsageError(
                f"--episodes asks for episode {absent}, which is not there: there are {len(known)} ({held})"
            )
        chosen.update(wanted)
    return [number for number in numbers if number in chosen]


def _first_absent(wanted: range, known: set[int], top: int) -> int | None:
    """First number of the range that is not there, found without walking far beyond the last that is."""
    if wanted.start > top:
        return wanted.start
    return next((number for number in range(wanted.start, min(wanted.stop, top + 2)) if number not in known), None)
