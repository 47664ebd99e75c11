"""Which episodes: `0:100,250` means the source's episodes 0 to 99 and 250."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ..errors import UsageError

__all__ = ["EpisodeRanges", "expected_episodes", "normal_form", "parse_episodes", "select_episodes"]

EpisodeRanges: TypeAlias = Sequence[tuple[int, int | None]]
"""Half-open ranges of the source's episode numbers; an open end is None, and a range of one asks for that episode."""

_PART = re.compile(r"\s*(?:(\d+)|(\d*):(\d*))\s*")


def parse_episodes(text: str) -> list[tuple[int, int | None]]:
    """Read a selection into half-open ranges, sorted; an open end is None.

    Ranges that touch are merged. A single number stays a range of its own, also inside of others: it asks for just this
    episode, where a range takes those that are there. Raises UsageError for anything but numbers and `A:B` ranges
    joined by commas.
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
    singles = {part for part in ranges if _is_single(part)}
    merged = _merge(sorted((part for part in ranges if part not in singles), key=_first))
    return sorted([*merged, *singles], key=lambda part: (part[0], part[1] is None, part[1]))


def _is_single(part: tuple[int, int | None]) -> bool:
    return part[1] == part[0] + 1


def _merge(ranges: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    merged: list[tuple[int, int | None]] = []
    for first, stop in ranges:
        if merged and (merged[-1][1] is None or first <= merged[-1][1]):
            before = merged[-1][1]
            merged[-1] = (merged[-1][0], None if before is None or stop is None else max(before, stop))
        else:
            merged.append((first, stop))
    return merged


def normal_form(selection: str | EpisodeRanges) -> str | None:
    """Write a selection in its one normal form; None stands for everything.

    Selections that take the same episodes, where all are there, have the same one: it names a request, and is not what
    to select by.
    """
    parts = _merge(sorted(parse_episodes(selection) if isinstance(selection, str) else selection, key=_first))
    if parts == [(0, None)]:
        return None
    return ",".join(str(a) if _is_single((a, b)) else f"{a}:{'' if b is None else b}" for a, b in parts)


def _first(part: tuple[int, int | None]) -> int:
    return part[0]


def select_episodes(ranges: EpisodeRanges, numbers: Sequence[int]) -> list[int]:
    """Return the episode numbers chosen, in storage order.

    A range takes the episodes that are there, whatever gaps their numbers have. UsageError for a single number that is
    not there, and where nothing is left.
    """
    known = sorted(set(numbers))
    chosen: set[int] = set()
    for part in ranges:
        first, stop = part
        found = known[bisect_left(known, first) : len(known) if stop is None else bisect_left(known, stop)]
        if _is_single(part) and not found:
            raise UsageError(f"--episodes asks for episode {first}, which is not there: {_there(known)}")
        chosen.update(found)
    if not chosen:
        asked = normal_form(ranges) or ":"
        raise UsageError(f"--episodes {asked} holds none of the episodes that are there: {_there(known)}")
    return [number for number in numbers if number in chosen]


def expected_episodes(ranges: EpisodeRanges, count: int) -> int:
    """Estimate how many of `count` episodes are chosen while their numbers are not known, as if they had no gaps.

    UsageError for what is wrong whatever the numbers are: more single episodes than there are, or no episode at all.
    """
    singles = sum(_is_single(part) for part in ranges)
    if singles > count or not count:
        asked = f"{singles} single episodes" if singles else f"--episodes {normal_form(ranges) or ':'}"
        raise UsageError(f"{asked} asked for, and there are {count} in all")
    merged = _merge(sorted(ranges, key=_first))
    return sum(max(0, (count if stop is None else min(stop, count)) - first) for first, stop in merged)


def _there(known: Sequence[int]) -> str:
    return f"there are {len(known)} ({f'{known[0]} to {known[-1]}' if known else 'none'})"
