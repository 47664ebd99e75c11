"""From the leaves of a compact checkpoint back to TED rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError
from ..format import Array
from ..ted import NEXT, Field, Key
from .layout import CompactLayout
from .rows import FEW_ROWS, Boundaries, without_ends

__all__ = ["Expansion", "Fetch", "require_ascending"]

Fetch = Callable[[Field, int, int], Array]
"""Reads rows `[start, stop)` of a stored leaf."""


def require_ascending(explicit: Array, episodes: int, path: str | Path) -> Array:
    """Return the numbers of explicit episodes, or raise CorruptDataError if they can be none."""
    if len(explicit) and (explicit[0] < 0 or explicit[-1] >= episodes or (np.diff(explicit) < 1).any()):
        raise CorruptDataError(f"{path} does not hold ascending rows of the table of {episodes:,} episodes")
    return explicit


class Expansion:
    """Gives the rows of any TED leaf; all rows of a request come from one or two reads.

    `explicit` holds the row numbers in the episode table of the episodes whose next rows are stored in full;
    `trivial` the TED keys that are not stored because they are zero.
    """

    def __init__(
        self, layout: CompactLayout, bounds: Boundaries, explicit: Array, trivial: frozenset[Key], fetch: Fetch
    ) -> None:
        self._layout = layout
        self._bounds = bounds
        self._trivial = trivial
        self._fetch = fetch
        self._explicit = np.zeros(len(bounds.lengths), bool)
        self._explicit[explicit] = True
        stored = np.where(self._explicit, bounds.lengths, 0)
        self._explicit_starts = np.cumsum(stored) - stored

    def read(self, leaf: Field, start: int, stop: int) -> Array:
        """Read TED rows `[start, stop)` of one leaf into a fresh array."""
        layout, key = self._layout, leaf.key
        if start == stop:
            return np.empty((0, *leaf.shape), leaf.numpy)
        if key in layout.steps:
            return self._fetch(layout.steps[key], start, stop)
        if key in layout.states:
            return self._states(layout.states[key], start, stop, 0)
        if key in layout.at_root:
            if key in self._trivial:
                return np.zeros((stop - start, *leaf.shape), leaf.numpy)
            return self._fetch(layout.at_root[key], start, stop)
        if key[0] != NEXT or key[1:] not in layout.states:
            raise CorruptDataError(f"the field {leaf.name!r} is not stored")
        return self._after(key[1:], start, stop)

    def pieces(self, leaf: Field, start: int, stop: int, view: Fetch) -> Iterator[Array]:
        """Yield TED rows `[start, stop)` of one leaf piece by piece, as `view` shows them where they lie together."""
        layout, key = self._layout, leaf.key
        stored = layout.steps.get(key) or layout.at_root.get(key)
        if stored is not None and key not in self._trivial:
            yield view(stored, start, stop)
            return
        ahead = int(key[0] == NEXT and key[1:] in layout.states)
        state = layout.states.get(key[ahead:])
        ends = self._bounds.ends(start, stop - 1)
        few = len(ends) * FEW_ROWS < stop - start
        if state is None or not few or (ahead and self._is_explicit(start, stop)):
            yield self.read(leaf, start, stop)
            return
        first = start + self._bounds.before(start) + ahead
        rows = view(state, first, first + stop - start + len(ends))
        begin = 0
        for number, end in enumerate([*ends.tolist(), stop - start - 1]):
            yield rows[begin + number : end + 1 + number]
            begin = end + 1

    def _states(self, leaf: Field, start: int, stop: int, ahead: int) -> Array:
        """Read the states before the steps (`ahead` 0) or after them (1)."""
        first = start + self._bounds.before(start) + ahead
        last = stop - 1 + self._bounds.before(stop - 1) + ahead
        ends = self._bounds.ends(start, stop - 1)
        return without_ends(self._fetch(leaf, first, last + 1), ends)

    def _after(self, key: Key, start: int, stop: int) -> Array:
        rows = self._states(self._layout.states[key], start, stop, 1)
        if self._is_explicit(start, stop):
            which = self._bounds.episode_of(np.arange(start, stop))
            steps = np.flatnonzero(self._explicit[which])
            places = self._explicit_starts[which[steps]] + steps + start - self._bounds.starts[which[steps]]
            # Explicit episodes lie one after the other, so the places are consecutive.
            rows[steps] = self._fetch(self._layout.explicit[key], int(places[0]), int(places[-1]) + 1)
        return rows

    def _is_explicit(self, start: int, stop: int) -> bool:
        """Whether the next rows of some episode that reaches into these steps are stored in full."""
        low, high = self._bounds.before(start), self._bounds.before(stop - 1)
        return bool(self._explicit[low : high + 1].any())
