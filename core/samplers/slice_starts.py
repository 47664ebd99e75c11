"""At which rows a slice may begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .trajectories import TrajectoryTable

__all__ = ["StartRule"]


@dataclass(frozen=True, slots=True)
class StartRule:
    """What decides whether a slice may begin at a step; the arguments are those of `SliceSampler`.

    A trajectory that is shorter than a slice is taken as a slice of its own length, or with `strict_length` not at
    all. Slices may hang over its end by `overhang` steps. Of what is legal then, the anchor leaves the first or last.
    """

    slice_len: int
    strict_length: bool
    overhang: int
    anchor: str

    @property
    def looks_ahead_only(self) -> bool:
        """Whether all that counts is how many steps the trajectory still has, and not how many it had before."""
        return self.strict_length and not self.overhang and self.anchor == "any"

    def legal(self, length: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell whether a slice may begin at these places of trajectories of these lengths."""
        taken = np.minimum(length, self.slice_len)
        last = length - taken + np.minimum(self.overhang, taken - 1)
        legal: NDArray[np.bool_]
        if self.anchor == "any":
            legal = place <= last
        else:
            legal = place == (0 if self.anchor == "start" else last)
        if self.strict_length:
            legal &= length >= self.slice_len
        return legal

    def legal_rows(self, table: TrajectoryTable, rows: int, first: int, stop: int) -> NDArray[np.bool_]:
        """Tell it of all steps from `first` up to but not including `stop`, numbered in time: `[steps, lanes]`.

        `rows` of the storage are written. What it costs depends on how many steps these are, and not on how long their
        trajectories are.
        """
        # Of a trajectory that begins before this, all there is to know is that these steps are far from its begin.
        begin = max(table.oldest, first - self.slice_len)
        steps = np.arange(begin, stop)[:, None]
        shape = len(steps), table.lanes
        reach = table.reach(np.repeat(steps, table.lanes), np.tile(np.arange(table.lanes), len(steps)))
        ends = steps + reach.reshape(shape)
        written = steps % table.capacity < rows
        ends = np.where(written, ends, -1)
        begins = np.full(shape, begin)
        begins[1:] = np.where(ends[1:] != ends[:-1], steps[1:], begin)
        begins = np.maximum.accumulate(begins)
        legal: NDArray[np.bool_] = (self.legal(ends - begins, steps - begins) & written)[first - begin :]
        return legal
