"""Sets of row numbers, as runs `[start, stop)` that ascend and do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Run: TypeAlias = tuple[int, int]
Runs: TypeAlias = Sequence[Run]


def count_of(runs: Iterable[Run]) -> int:
    """Return how many rows there are.

    >>> count_of([(0, 3), (5, 6)])
    4
    """
    return sum(stop - start for start, stop in runs)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Return the rows of any runs: those that overlap or touch become one.

    >>> joined([(5, 9), (0, 2), (2, 3), (8, 8), (6, 12)])
    [(0, 3), (5, 12)]
    """
    found = list[Run]()
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def common(runs: Runs, others: Runs) -> list[Run]:
    """Return the rows that are in both.

    >>> common([(0, 10), (20, 30)], [(5, 22), (29, 40)])
    [(5, 10), (20, 22), (29, 30)]
    """
    found, place = list[Run](), 0
    for start, stop in runs:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < stop:
            found.append((max(start, others[at][0]), min(stop, others[at][1])))
            at += 1
    return found


def without(runs: Runs, others: Runs) -> list[Run]:
    """Return the rows of the first that are not in the second.

    >>> without([(0, 10), (20, 30)], [(5, 22), (29, 40)])
    [(0, 5), (22, 29)]
    """
    if not runs:
        return []
    bounds = [runs[0][0], *(bound for run in others for bound in run), runs[-1][1]]
    gaps = [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
    return common(runs, gaps)


def cut(runs: Runs, most: int, block: int) -> list[list[Run]]:
    """Cut runs into groups of about `most` rows each, at multiples of `block`.

    >>> cut([(0, 8), (10, 30)], 10, 4)
    [[(0, 8), (10, 12)], [(12, 24)], [(24, 30)]]
    """
    total = count_of(runs)
    size = -(-total // max(1, round(total / most))) if total else 0
    groups, group, room = list[list[Run]](), list[Run](), size
    for start, stop in runs:
        while start < stop:
            end = min(stop, -(-(start + room) // block) * block)
            group.append((start, end))
            room -= end - start
            start = end
            if room <= 0:
                groups.append(group)
                group, room = [], size
    return [*groups, group] if group else groups
