"""From the numbers of steps to those of records, of which each episode has one more than steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..errors import CorruptDataError
from .contracts import Array
from .episodes import EpisodeTable

__all__ = ["Fetch", "RecordNumbers"]

Fetch: TypeAlias = Callable[[int, int, bool], Array]
"""Reads a field of consecutive records; of those of explicit next rows where the last argument says so."""


class RecordNumbers:
    """Where the steps of a packed dataset lie, in the records and among the next rows that are stored in full.

    `starts` has an entry more than there are episodes: the number of steps. CorruptDataError for a table that does
    not lay the episodes one after the other over `steps` steps, or whose explicit next rows do not follow each other.
    """

    def __init__(self, table: EpisodeTable, steps: int, origin: str) -> None:
        stops = np.cumsum(table.length)
        if (table.length < 1).any() or not np.array_equal(table.start, stops - table.length) or table.steps != steps:
            raise CorruptDataError(
                f"{origin}: start and length of the episode table do not place episodes one after the other "
                f"over {steps:,} steps"
            )
        stored = np.where(table.explicit_start >= 0, table.length, 0)
        expected = np.where(table.explicit_start >= 0, np.cumsum(stored) - stored, -1)
        if not np.array_equal(expected, table.explicit_start):
            raise CorruptDataError(
                f"{origin}: explicit_start of the episode table does not place next rows one after the other"
            )
        self.steps = steps
        self.records = steps + len(table)
        self.explicit_records = int(stored.sum())
        self.starts = np.append(table.start, steps).astype(np.int64)
        self.explicit_starts = table.explicit_start.astype(np.int64)

    def episode_of(self, steps: Array) -> Array:
        """Rows of the episode table that hold these steps."""
        return np.searchsorted(self.starts[1:], steps, side="right")

    def of(self, steps: Array) -> Array:
        """Records of these steps."""
        return steps + self.episode_of(steps)

    def steps_within(self, count: int, *, explicit: bool = False) -> int:
        """How many steps at the beginning need only the first `count` records, or explicit next rows."""
        first, lengths = self.starts[:-1], np.diff(self.starts)
        needed = self.explicit_starts + lengths if explicit else first + lengths + np.arange(1, len(first) + 1)
        cut = np.flatnonzero((self.explicit_starts >= 0) & (needed > count) if explicit else needed > count)
        if not len(cut):
            return self.steps
        row = int(cut[0])
        return int(first[row] + max(0, lengths[row] - (needed[row] - max(count, 0))))

    def rows(self, start: int, stop: int, after: bool, fetch: Fetch) -> Array:
        """Read a field at the steps `[start, stop)`, or, of a state, `after` them."""
        steps = np.arange(start, stop)
        records = self.of(steps) + after
        first, last = int(records[0]), int(records[-1])
        found = fetch(first, last + 1, False)
        if len(found) != len(records):
            found = found[records - first]
        if after:
            chosen, places = self.explicit(steps)
            if len(chosen):
                found[chosen] = fetch(int(places[0]), int(places[-1]) + 1, True)
        return found

    def explicit(self, steps: Array) -> tuple[Array, Array]:
        """Which of these steps, by position, have their next row stored in full, and at which record there."""
        if not self.explicit_records:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        which = self.episode_of(steps)
        chosen = np.flatnonzero(self.explicit_starts[which] >= 0)
        which = which[chosen]
        return chosen, self.explicit_starts[which] + steps[chosen] - self.starts[which]
