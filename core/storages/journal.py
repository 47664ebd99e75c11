"""What a write replaces in shared memory, so that another process can undo the write of a killed one.

The journal is a rollback journal, as in databases: before rows are replaced their old bytes are appended to an
anonymous file, and the counters to cells in front of it. Rows behind the last valid one need no copy: they become valid
when the length is counted up, which is the last step of a write.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutOfSpaceError
from ..format import fs
from .write_log import Counter

# A file that grew beyond this is cut to it after the write: memory stays near what one write needs.
_KEPT_BYTES = 16 << 20
_PARTS_AT_ONCE = 512  # the system accepts 1,024
_WHOLE_NUMBERS = np.dtype(np.int64)
_NAME = Path("rbtool-guard")


class WriteJournal:
    """The old contents of the rows of one write, and the counters before it.

    `descriptor` is a file that all processes have; its bytes from `start` on are used. `cells` are int64 in memory that
    all processes map: the first is the size of the journal, the others are the values of the counters, at most
    `len(cells) - 1` of them. Writing and undoing need a lock.
    """

    def __init__(self, descriptor: int, start: int, cells: memoryview, counters: Sequence[Counter]) -> None:
        self._descriptor, self._start = descriptor, start
        self._cells, self._counters = cells, list(counters)

    def begin(self) -> None:
        """Start a write: nothing is replaced yet."""
        cells = self._cells
        if cells[0] > _KEPT_BYTES:
            fs.truncate(self._descriptor, self._start + _KEPT_BYTES, _NAME)
        cells[0] = 0
        for number, counter in enumerate(self._counters, start=1):
            cells[number] = counter.value

    def discard(self) -> None:
        """Replace everything: undone, the write leaves no element, as a load that is made again does not need them."""
        for number in range(len(self._counters)):
            self._cells[1 + number] = 0
        self._cells[0] = 0

    def keep(self, columns: Sequence[NDArray[Any]], rows: slice | NDArray[np.int64], first: int = 0) -> None:
        """Append the contents of `rows` of consecutive columns from number `first` on.

        OutOfSpaceError where there is no memory for them.
        """
        numbers = np.array([rows.start, rows.stop]) if isinstance(rows, slice) else rows
        head = np.array([isinstance(rows, slice), len(numbers), first, len(columns)])
        parts = [_bytes(part) for part in (head, numbers, *(column[rows] for column in columns))]
        size = self._cells[0]
        try:
            for start in range(0, len(parts), _PARTS_AT_ONCE):
                some = parts[start : start + _PARTS_AT_ONCE]
                fs.write_parts(self._descriptor, some, _NAME, self._start + size)
                size += sum(map(len, some))
        except OSError as error:
            raise OutOfSpaceError(f"no memory is left to keep the rows that a write replaces: {error}") from error
        self._cells[0] = size  # from here on the record counts

    def undo(self, columns: Sequence[NDArray[Any]]) -> None:
        """Restore the rows of all columns, in the order of their numbers, and the counters; may be repeated."""
        for rows, first, content in reversed(list(self._records(columns))):
            for column, values in zip(columns[first:], content, strict=False):
                column[rows] = values
        for number, counter in enumerate(self._counters, start=1):
            counter.value = self._cells[number]

    def _records(self, columns: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, int, list[NDArray[Any]]]]:
        if not (size := self._cells[0]):
            return
        place, mapped = self._start, mmap.mmap(self._descriptor, self._start + size, prot=mmap.PROT_READ)

        def next_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
            nonlocal place
            found = np.frombuffer(mapped, dtype, math.prod(shape), place).reshape(shape)
            place += found.nbytes
            return found

        while place < self._start + size:
            run, count, first, width = next_array(_WHOLE_NUMBERS, (4,)).tolist()
            numbers = next_array(_WHOLE_NUMBERS, (count,))
            rows = slice(*numbers.tolist()) if run else numbers
            length = rows.stop - rows.start if isinstance(rows, slice) else count
            kept = columns[first : first + width]
            yield rows, first, [next_array(column.dtype, (length, *column.shape[1:])) for column in kept]


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
