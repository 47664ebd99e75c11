"""Gathers fields of packed records, and of the records after them, into fresh memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .rows import Memory, memory_of

_LINE = 64

Array = NDArray[Any]
Numbers = NDArray[np.int64]


class RecordColumn(NamedTuple):
    """A field of `shape` and `dtype` at `offset` in the record of a step, or in the one `after` it."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    after: bool

    @property
    def width(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class RecordPlaces(NamedTuple):
    """Records, uint8 `[n, bytes]`, and those of the next rows that are stored in full.

    `starts` are the first steps of the episodes, then the number of steps; `explicit_starts` is where the next rows
    of an episode are among the latter, -1 where they follow.
    """

    records: Array
    explicit: Array
    starts: Numbers
    explicit_starts: Numbers

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the steps that `numbers` name, and of each its episode and record; IndexError for ones beyond."""
        steps = int(self.starts[-1])
        outside = (numbers < -steps) | (numbers >= steps)
        if outside.any():
            raise IndexError(f"row {int(numbers[outside][0])} was asked for, there are {steps}")
        numbers = np.where(numbers < 0, numbers + steps, numbers)
        episodes = np.searchsorted(self.starts[1:], numbers, side="right")
        return numbers, episodes, numbers + episodes

    def explicit_of(self, steps: Numbers, episodes: Numbers) -> tuple[Numbers, Numbers]:
        """Which of the steps, by position, have explicit next rows, and which those are."""
        chosen = np.flatnonzero(self.explicit_starts[episodes] >= 0)
        which = episodes[chosen]
        return chosen, self.explicit_starts[which] + steps[chosen] - self.starts[which]


class PlainRecords:
    """Fields of packed records, gathered by numpy."""

    def __init__(self, places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int) -> None:
        self.places = places
        self.columns = list(columns)
        self.size = places.records.shape[1]
        self.after_bytes = after_bytes
        self._items = np.dtype((np.void, self.size))

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        """Return each column at the steps `numbers`, int64 `[n]`: `[n, *shape]` in fresh memory.

        Negative numbers count from the end; IndexError for steps that are not there.
        """
        here, after = self._records(numbers)
        found = []
        for column in self.columns:
            source = after if column.after else here
            rows = source[:, column.offset : column.offset + column.width]
            whole = np.ascontiguousarray(rows).view(column.dtype).reshape(len(numbers), *column.shape)
            found.append(torch.from_numpy(whole))
        return found

    def spans(self, numbers: Numbers) -> torch.Tensor:
        """Return each record, and behind it the beginning of the one after: uint8 `[n, bytes]` in fresh memory."""
        here, after = self._records(numbers)
        found = torch.empty((len(numbers), self.size + self.after_bytes), dtype=torch.uint8)
        np.concatenate([here, after[:, : self.after_bytes]], axis=1, out=found.numpy())
        return found

    def _records(self, numbers: Numbers) -> tuple[Array, Array]:
        """Whole records of some steps, and those after them."""
        places = self.places
        steps, episodes, records = places.find(numbers)
        here, after = self._take(places.records, records), self._take(places.records, records + 1)
        chosen, explicit = places.explicit_of(steps, episodes)
        if len(chosen):
            after[chosen] = self._take(places.explicit, explicit)
        return here, after

    def _take(self, records: Array, numbers: Numbers) -> Array:
        if not len(numbers):
            return np.empty((0, self.size), np.uint8)
        taken = records.reshape(-1).view(self._items).take(numbers)
        return taken.view(np.uint8).reshape(len(numbers), self.size)


class _Batch:
    """How the leaves of a batch of `count` rows lie in one piece of memory: to ask for it once is what takes time."""

    def __init__(self, count: int, columns: Sequence[RecordColumn], order: Sequence[int]) -> None:
        self.count = count
        places = np.zeros(len(columns) + 1, np.int64)
        np.cumsum([-(-column.width * count // _LINE) * _LINE for column in columns], out=places[1:])
        self.memory: Memory = memory_of((int(places[-1]),), np.dtype(np.uint8))
        self.leaves = [
            ((count, *column.shape), column.dtype, place)
            for column, place in zip(columns, places.tolist(), strict=False)
        ]
        fields = [(columns[number].offset, columns[number].width, int(places[number])) for number in order]
        self.fields = np.array(fields, np.int64).reshape(-1, 3)


class CompiledRecords(PlainRecords):
    """The same, gathered by the loops that `compiled` holds."""

    def __init__(
        self, places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int, compiled: ModuleType
    ) -> None:
        super().__init__(places, columns, after_bytes)
        self._gather_fields, self._gather_spans = compiled.gather_fields, compiled.gather_spans
        self._order = sorted(range(len(self.columns)), key=lambda number: self.columns[number].after)
        self._span = self.size + after_bytes
        shift, coarse = _coarse_episodes(places.starts)
        records, explicit = (part.__array_interface__["data"][0] for part in (places.records, places.explicit))
        first_after = sum(not column.after for column in self.columns)
        episodes = len(places.explicit_starts)
        self._head = np.array([episodes, shift, records, explicit, self.size, self._span, first_after], np.int64)
        self._table = np.concatenate((places.starts, places.explicit_starts, coarse))
        self._batch = _Batch(0, self.columns, self._order)

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        batch = self._batch
        if batch.count != len(numbers):
            batch = self._batch = _Batch(len(numbers), self.columns, self._order)
        memory = batch.memory()
        if self._gather_fields(np.ascontiguousarray(numbers), self._table, self._head, batch.fields, memory) >= 0:
            return super().gather(numbers)  # numpy raises the error for the missing row
        from_numpy, view = torch.from_numpy, np.ndarray
        return [from_numpy(view(shape, dtype, memory, place)) for shape, dtype, place in batch.leaves]

    def spans(self, numbers: Numbers) -> torch.Tensor:
        found = torch.empty((len(numbers), self._span), dtype=torch.uint8)
        if self._gather_spans(np.ascontiguousarray(numbers), self._table, self._head, found.data_ptr()) >= 0:
            return super().spans(numbers)
        return found


def _coarse_episodes(starts: Numbers) -> tuple[int, Numbers]:
    """The episode of every 2^shift-th step, about one for each episode, so that few are left to search."""
    steps, episodes = int(starts[-1]), len(starts) - 1
    shift = max(0, (steps // max(1, episodes)).bit_length() - 1)
    marks = np.arange((steps >> shift) + 2, dtype=np.int64) << shift
    return shift, np.minimum(np.searchsorted(starts[1:], marks, side="right"), max(0, episodes - 1)).astype(np.int64)


def fastest_records(places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int) -> PlainRecords:
    """Make the compiled kind where numba can be imported, which takes half a second the first time, else the plain."""
    compiled = _compiled()
    if compiled is None:
        return PlainRecords(places, columns, after_bytes)
    return CompiledRecords(places, columns, after_bytes, compiled)


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from . import compiled_records
    except ImportError:
        return None
    return compiled_records
