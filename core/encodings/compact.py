"""Each state stored once: writing the leaves of a compact checkpoint, and expanding them to TED rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError
from ..format.contracts import Array, StepReader
from ..progress import Progress
from ..ted.episodes import Continuity
from ..ted.schema import NEXT, Field, Key
from .layout import EXPLICIT_EPISODES, CompactLayout
from .rows import (
    FEW_ROWS,
    Boundaries,
    leaf_parts,
    with_ends,
    without_ends,
)
from .streams import Blocks


class LeafSink(ABC):
    """Takes the rows of stored leaves."""

    @abstractmethod
    def create(self, leaf: Field, rows: int) -> None:
        """Make room for a leaf that will have so many rows."""

    @abstractmethod
    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to a leaf that was created."""

    def append_states(self, leaf: Field, root: Array, after: Array, ends: Array) -> None:
        """Append the rows of `with_ends`."""
        self.append(leaf, with_ends(root, after, ends))


def write_compact(source: StepReader, layout: CompactLayout, sink: LeafSink, progress: Progress) -> Array:
    """Write all leaves of `source`, one after the other, each in parts that fit the processor's caches.

    Returns the row numbers in the episode table of the episodes whose next observations do not follow, bit for
    bit; their next rows are stored in full.
    """
    steps = source.manifest.steps
    bounds = Boundaries(source.episodes, steps, str(source.path))
    continuity, broken = Continuity(), np.zeros(len(bounds.stops), bool)
    counter = LeafProgress(progress, len(layout.states) + len(layout.steps) + len(layout.at_root))
    for key, leaf in layout.states.items():
        sink.create(leaf, steps + len(bounds.stops))
        for start, stop in leaf_parts(steps, leaf.row_bytes):
            root, after = source.read(key, start, stop), source.read((NEXT, *key), start, stop)
            follows = continuity.see(key, root, after)
            _mark_broken(broken, bounds, np.flatnonzero(~follows) + (start - 1))
            sink.append_states(leaf, root, after, bounds.ends(start, stop))
            counter.advance(stop - start)
    for key, leaf in ({**layout.steps, **layout.at_root}).items():
        if key in layout.at_root and _is_zero(source, key, leaf):
            counter.advance(steps)
            continue
        sink.create(leaf, steps)
        for start, stop in leaf_parts(steps, leaf.row_bytes):
            sink.append(leaf, source.read(key, start, stop))
            counter.advance(stop - start)
    if broken.any():
        _write_explicit(source, layout.explicit, sink, bounds, broken)
    return np.flatnonzero(broken)


def states_in_place(blocks: Blocks, root: Array, after: Array, ends: Array) -> None:
    """Append the rows of `with_ends` to a stream; where episodes are long, as they lie, without a copy."""
    if len(ends) * FEW_ROWS >= len(root):
        blocks.append(with_ends(root, after, ends))
        return
    blocks.append_joined(_pieces(ends.tolist(), len(root)), (root, after))


def _pieces(ends: Sequence[int], rows: int) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for end in ends:
        yield 0, begin, end + 1
        yield 1, end, end + 1
        begin = end + 1
    yield 0, begin, rows


class LeafProgress:
    """Reports progress in steps while leaves are written one after the other: every leaf counts the same."""

    def __init__(self, progress: Progress, leaves: int) -> None:
        self._progress = progress
        self._whole = max(1, leaves)
        self._rows = 0
        self._reported = 0

    def advance(self, rows: int) -> None:
        """Count `rows` more rows of a leaf as done."""
        self._rows += rows
        done = self._rows // self._whole
        if done > self._reported:
            self._progress.advance(done - self._reported)
            self._reported = done


def _mark_broken(broken: Array, bounds: Boundaries, rows: Array) -> None:
    """Mark the episodes in which one of `rows`, numbers of steps, is not the last."""
    episodes = bounds.episode_of(rows)
    broken[episodes[bounds.stops[episodes] - 1 != rows]] = True


def _is_zero(source: StepReader, key: Key, leaf: Field) -> bool:
    """Whether every byte of a leaf is zero."""
    parts = leaf_parts(source.manifest.steps, leaf.row_bytes)
    return not any(source.read(key, *part).reshape(-1).view(np.uint8).any() for part in parts)


def _write_explicit(
    source: StepReader, leaves: Mapping[Key, Field], sink: LeafSink, bounds: Boundaries, broken: Array
) -> None:
    """Write the numbers of the broken episodes, and their next rows one episode after the other."""
    numbers = np.flatnonzero(broken)
    sink.create(EXPLICIT_EPISODES, len(numbers))
    sink.append(EXPLICIT_EPISODES, numbers)
    for key, leaf in leaves.items():
        sink.create(leaf, int(bounds.lengths[numbers].sum()))
        for start, stop in leaf_parts(source.manifest.steps, leaf.row_bytes):
            chosen = np.flatnonzero(broken[bounds.episode_of(np.arange(start, stop))])
            if len(chosen):
                low, high = int(chosen[0]), int(chosen[-1]) + 1
                rows = source.read((NEXT, *key), start + low, start + high)
                sink.append(leaf, rows if len(rows) == len(chosen) else rows[chosen - low])


def row_counts(layout: CompactLayout, lengths: Array, explicit: Array) -> dict[Key, Array]:
    """Rows that each stored leaf has of each episode, int64 `[episodes]` by place.

    Episodes whose next observations follow have no rows in the leaves of those that do not.
    """
    chosen = np.zeros(len(lengths), np.int64)
    chosen[explicit] = 1
    counts = {leaf.key: lengths + 1 for leaf in layout.states.values()}
    counts |= {leaf.key: lengths for leaf in (*layout.steps.values(), *layout.at_root.values())}
    counts |= {leaf.key: lengths * chosen for leaf in layout.explicit.values()}
    return counts | {EXPLICIT_EPISODES.key: chosen}


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


class CompactReader(StepReader):
    """TED rows of compact leaves, whose rows, and whose `_explicit` episodes, a subclass reads."""

    _layout: CompactLayout

    @property
    @abstractmethod
    def _explicit(self) -> Array:
        """Row numbers in the episode table of the episodes whose next rows are stored in full."""

    @abstractmethod
    def _is_stored(self, leaf: Field) -> bool:
        """Whether a leaf that is stored only where it is not zero is there."""

    @abstractmethod
    def _fetch(self, leaf: Field, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a stored leaf into a fresh array."""

    @abstractmethod
    def _view(self, leaf: Field, start: int, stop: int) -> Array:
        """View the rows that `_fetch` reads where they lie in the file, if they lie together."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        return self._expansion.read(self._leaf(key, start, stop), start, stop)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield rows of one TED leaf piece by piece; arrays that cannot be written show the file where they can."""
        return self._expansion.pieces(self._leaf(key, start, stop), start, stop, self._view)

    @cached_property
    def _bounds(self) -> Boundaries:
        return Boundaries(self.episodes, self.manifest.steps, str(self.path))

    @cached_property
    def _rows(self) -> dict[Key, int]:
        """How many rows each stored leaf has, by place."""
        counts = row_counts(self._layout, self._bounds.lengths, self._explicit)
        return {place: int(count.sum()) for place, count in counts.items()}

    @cached_property
    def _expansion(self) -> Expansion:
        trivial = frozenset(key for key, leaf in self._layout.at_root.items() if not self._is_stored(leaf))
        return Expansion(self._layout, self._bounds, self._explicit, trivial, self._fetch)
