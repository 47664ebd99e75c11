"""The rows of a storage in the order of time: lane after lane, in each lane the oldest first.

A lane is one element of the dimensions after the first that count elements: one of several environments, mostly. A
storage of one dimension has one lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..format.contracts import Array
from ..storages.columns import plain_column
from ..ted.schema import Field

_KNOWN_TO_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of some lanes: the steps from `start` to before `stop` lie in `rows` of `lanes`."""

    start: int
    stop: int
    lanes: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Order:
    """Where steps lie in a storage of `rows` valid rows and so many `lanes`, of whose rows `oldest` came first."""

    rows: int
    lanes: int
    oldest: int

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the places of the steps `[start, stop)`. A run of several lanes holds each of them in full."""
        while start < stop:
            lane, begin = divmod(start, self.rows)
            whole = (stop - start) // self.rows if begin == 0 and not self.oldest else 0
            if whole > 1:
                end = start + whole * self.rows
                yield Run(start, end, slice(lane, lane + whole), slice(0, self.rows))
            else:
                row = (self.oldest + begin) % self.rows
                count = min(stop - start, self.rows - begin, self.rows - row)
                end = start + count
                yield Run(start, end, slice(lane, lane + 1), slice(row, row + count))
            start = end


class LaneLeaf:
    """One leaf of a storage, of which `ndim` dimensions count elements, read and written by runs."""

    def __init__(self, tensor: torch.Tensor, field: Field, ndim: int) -> None:
        self._field = field
        self._others = tensor.shape[1:ndim]
        plain = plain_column(tensor)
        self._lane_by_lane = ndim > 1 and not plain.is_contiguous()
        # Where the lanes do not lie side by side, a view with one dimension for all of them need not exist.
        self._rows = plain if ndim == 1 or self._lane_by_lane else plain.flatten(1, ndim - 1)
        self._array = _array(self._rows, field) if _is_plain(self._rows) else None
        self._one_lane = ndim == 1

    @property
    def in_place(self) -> bool:
        """Whether `read` shows the storage's own memory, so that rows can be put there, too."""
        return self._array is not None and self._one_lane

    def read(self, run: Run) -> Array:
        """Return the rows of a run, as a view of the storage where they lie together in memory."""
        if self._array is not None and self._one_lane:
            return self._array[run.rows]
        if self._array is not None:
            found = self._array[run.rows, run.lanes]
        elif self._one_lane:
            return host_array(self._rows[run.rows], self._field)
        else:
            found = host_array(self._part(run), self._field)
        lanes_first: Array = np.ascontiguousarray(found.swapaxes(0, 1))
        return lanes_first.reshape(run.stop - run.start, *self._field.shape)

    def write(self, run: Run, rows: Array) -> None:
        """Put the rows of a run into the storage."""
        if self.in_place:
            self.read(run)[...] = rows
            return
        count, lanes = run.rows.stop - run.rows.start, run.lanes.stop - run.lanes.start
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        tensor = tensor if tensor.dtype is self._rows.dtype else tensor.view(self._rows.dtype)
        by_row = tensor.reshape(lanes, count, *self._field.shape).swapaxes(0, 1)
        if self._one_lane:
            self._rows[run.rows].copy_(by_row[:, 0])
        elif self._lane_by_lane:
            for number in range(lanes):
                self._rows[self._place(run, number)].copy_(by_row[:, number])
        else:
            self._rows[run.rows, run.lanes].copy_(by_row)

    def _part(self, run: Run) -> torch.Tensor:
        """The rows of a run, `[rows, lanes, ...]`."""
        if not self._lane_by_lane:
            return self._rows[run.rows, run.lanes]
        lanes = range(run.lanes.stop - run.lanes.start)
        return torch.stack([self._rows[self._place(run, number)] for number in lanes], 1)

    def _place(self, run: Run, number: int) -> tuple[slice | int, ...]:
        """Index of the `number`-th lane of a run."""
        coordinates = np.unravel_index(run.lanes.start + number, self._others)
        return (run.rows, *map(int, coordinates))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether numpy sees the values of a tensor in its memory."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def host_array(tensor: torch.Tensor, field: Field) -> Array:
    """Bring a tensor from wherever it is into an array; bfloat16 as its bits."""
    return _array(tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg(), field)


def _array(tensor: torch.Tensor, field: Field) -> Array:
    """View a tensor as an array; bfloat16 as its bits."""
    known = tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.view(torch.int16)
    return known.numpy().view(field.numpy)
