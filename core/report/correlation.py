"""Correlation of the mean of a field in each episode with the return of that episode, from one pass over the rows."""

from __future__ import annotations

import numpy as np

from ..format.contracts import Array
from ..format.episodes import EpisodeTable


class ReturnCorrelation:
    """Pearson's correlation of `width` columns with the return, over episodes.

    An episode counts for a column where its mean and its return are finite. The sums of products are merged part by
    part, by the method of Chan, Golub and LeVeque (1979), so that memory does not grow with the number of episodes.
    """

    def __init__(self, table: EpisodeTable, returns: Array, width: int) -> None:
        self._ends = table.start + table.length
        self._lengths = table.length
        self._returns = returns
        self._episode = 0
        self._row = 0
        self._open = np.zeros(width)
        self._count = np.zeros(width)
        self._means = np.zeros((2, width))
        self._sums = np.zeros((3, width))  # squares of the column, squares of the return, products
        self._range = np.stack([np.full((2, width), np.inf), np.full((2, width), -np.inf)])

    def see(self, rows: Array) -> None:
        """Take the next rows, float64 `[n, width]`."""
        stop = self._row + len(rows)
        last = int(np.searchsorted(self._ends, stop, side="right"))
        cuts = np.concatenate(([0], self._ends[self._episode : last] - self._row)).astype(np.int64)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is data, and leaves its episode out
            if last > self._episode:
                sums = np.add.reduceat(rows[: cuts[-1]], cuts[:-1], axis=0)
                sums[0] += self._open
                chosen = slice(self._episode, last)
                self._merge(sums / self._lengths[chosen, None], self._returns[chosen])
                self._open = np.zeros_like(self._open)
            self._open = self._open + rows[cuts[-1] :].sum(0)
        self._episode, self._row = last, stop

    def _merge(self, means: Array, returns: Array) -> None:
        both = np.stack([means, np.broadcast_to(returns[:, None], means.shape)])
        there = np.isfinite(both).all(0)
        count = there.sum(0)
        some = np.maximum(count, 1)
        known = np.where(there, both, 0.0)
        centre = known.sum(1) / some
        x, y = np.where(there, both - centre[:, None], 0.0)
        added = np.stack([(x * x).sum(0), (y * y).sum(0), (x * y).sum(0)])
        total = self._count + count
        apart = centre - self._means
        weight = self._count * count / np.maximum(total, 1)
        self._sums += added + weight * np.stack([apart[0] ** 2, apart[1] ** 2, apart[0] * apart[1]])
        self._means = self._means + apart * (count / np.maximum(total, 1))
        self._count = total
        self._range[0] = np.minimum(self._range[0], np.where(there, both, np.inf).min(1))
        self._range[1] = np.maximum(self._range[1], np.where(there, both, -np.inf).max(1))

    def results(self) -> list[float | None]:
        """The correlation of each column; None where it or the return is the same in all episodes."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            found = self._sums[2] / np.sqrt(self._sums[0]) / np.sqrt(self._sums[1])
            varies = (self._range[0] < self._range[1]).all(0) & np.isfinite(found)
        return [value if there else None for value, there in zip(np.clip(found, -1, 1).tolist(), varies, strict=True)]
