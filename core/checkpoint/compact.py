"""Writes the leaves of a compact checkpoint, whatever they are kept in, and verifies that nothing is lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from ..dataset import Array, StepReader
from ..progress import Progress
from ..ted import NEXT, Field, Key
from .layout import EXPLICIT_EPISODES, CompactLayout
from .rows import CHUNK_BYTES, Boundaries, differing_rows, with_ends

__all__ = ["Sink", "write_compact"]


class Sink(ABC):
    """Takes the rows of stored leaves."""

    @abstractmethod
    def create(self, leaf: Field, rows: int) -> None:
        """Make room for a leaf that will have so many rows."""

    @abstractmethod
    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to a leaf that was created."""


def write_compact(source: StepReader, layout: CompactLayout, sink: Sink, progress: Progress) -> Array:
    """Write all leaves of `source` chunk by chunk.

    Returns the row numbers in the episode table of the episodes whose next observations do not follow, bit for
    bit; their next rows are stored in full.
    """
    steps = source.manifest.steps
    bounds = Boundaries(source.episodes, steps, str(source.path))
    per_step = dict(layout.steps)
    per_step |= {key: leaf for key, leaf in layout.at_root.items() if not _is_zero(source, key)}
    for leaf in per_step.values():
        sink.create(leaf, steps)
    for leaf in layout.states.values():
        sink.create(leaf, steps + len(bounds.stops))
    continuity = Continuity(bounds)
    for start, stop in source.chunks(CHUNK_BYTES):
        for key, leaf in per_step.items():
            sink.append(leaf, source.read(key, start, stop))
        ends = bounds.ends(start, stop)
        for key, leaf in layout.states.items():
            root, after = source.read(key, start, stop), source.read((NEXT, *key), start, stop)
            continuity.see(key, start, root, after)
            sink.append(leaf, with_ends(root, after, ends))
        progress.advance(stop - start)
    if continuity.broken.any():
        _write_explicit(source, layout.explicit, sink, bounds, continuity.broken)
    return np.flatnonzero(continuity.broken)


class Continuity:
    """Finds the episodes in which `next` of one row is not, bit for bit, the row after it."""

    def __init__(self, bounds: Boundaries) -> None:
        self.broken = np.zeros(len(bounds.stops), bool)
        self._bounds = bounds
        self._held: dict[Key, Array] = {}

    def see(self, key: Key, start: int, root: Array, after: Array) -> None:
        """Take the rows of a state from step `start` on; they follow those seen before."""
        wrong = differing_rows(after[:-1], root[1:]) + start
        held = self._held.get(key)
        if held is not None and len(differing_rows(held, root[:1])):
            wrong = np.append(wrong, start - 1)
        self._held[key] = after[-1:].copy()
        episodes = self._bounds.episode_of(wrong)
        inside = self._bounds.stops[episodes] - 1 != wrong
        self.broken[episodes[inside]] = True


def _is_zero(source: StepReader, key: Key) -> bool:
    """Tell whether every byte of a leaf is zero."""
    return not any(source.read(key, *part).reshape(-1).view(np.uint8).any() for part in source.chunks(CHUNK_BYTES))


def _write_explicit(
    source: StepReader, leaves: Mapping[Key, Field], sink: Sink, bounds: Boundaries, broken: Array
) -> None:
    """Write the numbers of the broken episodes, and their next rows one episode after the other."""
    numbers = np.flatnonzero(broken)
    sink.create(EXPLICIT_EPISODES, len(numbers))
    sink.append(EXPLICIT_EPISODES, numbers)
    for leaf in leaves.values():
        sink.create(leaf, int(bounds.lengths[numbers].sum()))
    for start, stop in source.chunks(CHUNK_BYTES):
        chosen = np.flatnonzero(broken[bounds.episode_of(np.arange(start, stop))])
        if len(chosen):
            low, high = int(chosen[0]), int(chosen[-1]) + 1
            for key, leaf in leaves.items():
                rows = source.read((NEXT, *key), start + low, start + high)
                sink.append(leaf, rows if len(rows) == len(chosen) else rows[chosen - low])
