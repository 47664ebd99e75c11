"""Rows of a column read in blocks: many short episodes then cost few reads, and ascending reads never go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .contracts import Array

BLOCK_BYTES = 16 << 20
"""Bytes of rows in memory at a time, where a reader does not choose."""


def blocks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Split rows into ranges of at most `size`."""
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


class RowBlocks:
    """Rows of one column, of which a block is kept: what was given out stays valid when another block is read.

    `read(start, stop)` reads rows as a fresh array; there are `total` of them, and a block has `rows`.
    """

    def __init__(self, read: Callable[[int, int], Array], total: int, rows: int) -> None:
        self._read, self._total, self._rows = read, total, max(1, rows)
        self._start = self._stop = 0
        self._block: Array = np.zeros(0)

    def read(self, start: int, stop: int) -> Array:
        """Return rows `[start, stop)`; rows of the block that is kept are not read again."""
        if not self._start <= start <= stop <= self._stop:
            end = min(self._total, max(stop, start + self._rows))
            if self._start <= start < self._stop:
                kept = self._block[start - self._start :]
                self._block = np.concatenate((kept, self._read(self._stop, end)))
            else:
                self._block = self._read(start, end)
            self._start, self._stop = start, end
        return self._block[start - self._start : stop - self._start]
