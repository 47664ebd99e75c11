"""Moves between the two ways of counting rows: one a step, and one more in every episode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import CorruptDataError
from ..format import Array, EpisodeTable

__all__ = [
    "CHUNK_BYTES",
    "FEW_ROWS",
    "LEAF_BYTES",
    "Boundaries",
    "differing_rows",
    "leaf_parts",
    "with_ends",
    "without_ends",
]

CHUNK_BYTES = 4 << 20
"""How much is read at once over all leaves: memory that fits the caches is several times faster than fresh pages."""

LEAF_BYTES = 2 << 20
"""How much is read at once where one leaf is gone through after the other."""

FEW_ROWS = 32
"""Where an episode has fewer rows than this, mostly, moving it by itself costs more than its bytes."""


def leaf_parts(steps: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Split the rows of one leaf into ranges of about `LEAF_BYTES`; at least one row each."""
    rows = max(1, LEAF_BYTES // max(1, row_bytes))
    for start in range(0, steps, rows):
        yield start, min(start + rows, steps)


class Boundaries:
    """Where the episodes end; raises CorruptDataError for a table that does not lay them one after the other."""

    def __init__(self, table: EpisodeTable, steps: int, origin: str) -> None:
        stops = np.cumsum(table.length)
        if (table.length < 1).any() or not np.array_equal(table.start, stops - table.length) or table.steps != steps:
            raise CorruptDataError(
                f"{origin}: start and length of the episode table do not place episodes one after the other "
                f"over {steps:,} steps",
                hint="see what is wrong with: rbtool check",
            )
        self.starts = table.start
        self.stops = stops
        self.lengths = table.length

    def episode_of(self, steps: Array) -> Array:
        """Rows of the episode table that hold these steps."""
        return np.searchsorted(self.stops, steps, side="right")

    def before(self, step: int) -> int:
        """How many episodes end before this step begins."""
        return int(np.searchsorted(self.stops, step, side="right"))

    def ends(self, start: int, stop: int) -> Array:
        """Those of the steps `[start, stop)` that are the last of their episode, counted from `start`."""
        low, high = np.searchsorted(self.stops, (start, stop), side="right")
        return self.stops[low:high] - 1 - start


def with_ends(root: Array, after: Array, ends: Array) -> Array:
    """Put the row of `after` behind the row of `root` at each of `ends`: n rows become n + len(ends)."""
    if not len(ends):
        return root
    rows = np.empty((len(root) + len(ends), *root.shape[1:]), root.dtype)
    if rows.size:
        items, extra = _items(rows), _extra(len(rows), ends)
        items[~extra], items[extra] = _items(root), _items(after)[ends]
    return rows


def without_ends(rows: Array, ends: Array) -> Array:
    """Undo `with_ends` for the root rows, or, from the second row on, for the rows of `after`."""
    if not len(ends):
        return rows
    kept = np.empty((len(rows) - len(ends), *rows.shape[1:]), rows.dtype)
    if kept.size:
        np.compress(~_extra(len(rows), ends), _items(rows), out=_items(kept))
    return kept


def differing_rows(one: Array, other: Array) -> Array:
    """Numbers of the rows whose bits differ: NaN equals NaN of the same bits, 0.0 does not equal -0.0."""
    if not one.size:
        return np.empty(0, np.int64)
    differ = _words(one) != _words(other)
    where = np.flatnonzero(differ)
    return where if differ.shape[1] == 1 else np.unique(where // differ.shape[1])


def _extra(rows: int, ends: Array) -> Array:
    """Mark the rows that `with_ends` adds."""
    extra = np.zeros(rows, bool)
    extra[ends + np.arange(1, len(ends) + 1)] = True
    return extra


def _items(array: Array) -> Array:
    """View each row as one opaque item: NumPy moves those several times faster than rows of numbers."""
    whole = np.ascontiguousarray(array)
    return whole.reshape(len(whole), -1).view((np.void, whole.nbytes // len(whole))).reshape(len(whole))


def _words(array: Array) -> Array:
    """View each row as the fewest integers `[n, words]`."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    return rows.view(next(f"u{size}" for size in (8, 4, 2, 1) if rows.shape[1] % size == 0))
