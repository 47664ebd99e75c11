"""Rows that are taken out of an array in runs, and are only copied where they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

_Array: TypeAlias = np.ndarray[Any, Any]
_LONG = 64
"""Rows that runs have on average where they are copied whole, and not row by row."""
_WIDE = 16
"""Bytes of the widest rows that are copied at once: those of flags and rewards."""


class RowSpans:
    """Runs of row numbers, `[start, stop)` each, one after another; empty ones are left out."""

    def __init__(self, starts: _Array, stops: _Array) -> None:
        there = stops > starts
        self.starts, self.stops = starts[there], stops[there]
        self._lengths = self.stops - self.starts
        self._count = int(self._lengths.sum())
        self._rows: _Array | None = None

    def __len__(self) -> int:
        return self._count

    def of(self, array: _Array) -> Rows:
        """Take the rows out of an array: as a fresh array, or put off where runs are long and rows wide."""
        if self._count < _LONG * len(self.starts):
            if self._rows is None:
                first = self.starts - np.cumsum(self._lengths) + self._lengths
                self._rows = np.arange(self._count) + np.repeat(first, self._lengths)
            return np.take(array, self._rows, axis=0)
        rows = RowRuns(array, self)
        return rows if array.nbytes > _WIDE * len(array) else rows.whole()


@dataclass(frozen=True, slots=True)
class RowRuns:
    """The rows of `array` that are in `runs`, with what an array has of shape and type; `whole` makes one of them."""

    array: _Array
    runs: RowSpans

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, and the shape of one."""
        return len(self.runs), *self.array.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        found: np.dtype[Any] = self.array.dtype
        return found

    def __len__(self) -> int:
        return len(self.runs)

    def parts(self) -> Iterator[_Array]:
        """Yield views of the runs, in order."""
        for start, stop in zip(self.runs.starts.tolist(), self.runs.stops.tolist(), strict=True):
            yield self.array[start:stop]

    def whole(self) -> _Array:
        """Copy the rows into a fresh array."""
        return np.concatenate([*self.parts()])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Array:
        found = self.whole()
        return found if dtype is None else found.astype(dtype)


Rows: TypeAlias = _Array | RowRuns


def as_array(rows: Rows) -> _Array:
    """Return the rows as an array."""
    return rows.whole() if isinstance(rows, RowRuns) else rows
