"""Which segments of an earlier checkpoint a dump keeps, and which small ones it writes again as one.

Each dump adds a segment of the rows that changed. So that loads stay fast, segments of about the same size are merged
when there are eight of them, as log-structured merge trees do: a row is written about twice where a dump has a per cent
of the rows, three times where it has a thousandth, whatever the number of dumps. Rows of older segments that are in
later ones, too, take room on the disk: up to a quarter of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .runs import Run, count_of, cut, without
from .segment_layout import Segment

_ALIKE = 8
"""Segments that are merged, and how much larger the next size is."""
_LARGE = 32
"""Segments of more than this part of all rows are not merged."""
_WHOLE = 16
"""Segments into which a storage is written at once."""

Kept = Mapping[Segment, Sequence[Run]]
"""Segments, and the rows that are read from each."""


def merged(kept: Kept, rows: int, block: int) -> dict[Segment, Sequence[Run]]:
    """Return which of the segments stay as they are; the rows of the others are written again.

    `rows` are those of the storage. Rows that are in none of the segments are written in any case.
    """
    valid = {segment: count_of(runs) for segment, runs in kept.items()}
    new = rows - sum(valid.values())
    if new:
        new += _merge_alike(valid, new, rows, block)
    unused = {segment: segment.rows - count for segment, count in valid.items()}
    while sum(unused.values()) > max(rows // 4, block):
        most = max(unused, key=unused.__getitem__)
        del unused[most], valid[most]
    return {segment: runs for segment, runs in kept.items() if segment in valid}


def _merge_alike(valid: dict[Segment, int], new: int, rows: int, block: int) -> int:
    """Leave out small segments that are too many; return how many rows they have."""
    large, found = max(rows // _LARGE, block), 0
    while True:
        most = _size(new, block)
        alike = [segment for segment, count in valid.items() if count < large and _size(count, block) <= most]
        if len(alike) < _ALIKE - 1:
            return found
        taken = sum(valid.pop(segment) for segment in alike)
        new, found = new + taken, found + taken


def _size(rows: int, block: int) -> int:
    """Number the sizes of segments: each is `_ALIKE` times the one before."""
    return max(0, math.floor(math.log(rows / block, _ALIKE)))


def written(kept: Kept, rows: int, block: int, first: int) -> list[Segment]:
    """Return the segments to be written, numbered from `first` on: of all rows that are in none of those kept."""
    left: list[Run] = [(0, rows)] if rows else []
    for runs in kept.values():
        left = without(left, runs)
    groups = cut(left, max(rows // _WHOLE, block), block)
    return [Segment(number, tuple(group)) for number, group in enumerate(groups, first)]
