"""Rows of a storage as they are at one instant, read in the background while writers continue.

This is copy-on-write, row by row, as volume managers and virtual machines do for backups: before rows are replaced that
were not read yet, a writer copies them. So it costs what is written meanwhile, and not the size of the storage.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_MOST_KEPT = 64 << 20
"""Bytes of rows that are kept at a time; a writer that replaces more waits until some of them are on their way."""
_CHUNK = 1 << 20
"""Bytes that are read at once: so long a writer may wait for the lock."""

_forks = 0
_shared: weakref.WeakSet[Snapshot] = weakref.WeakSet()


def forks() -> int:
    """How often this process, and those that it was forked from, were forked."""
    return _forks


class Snapshot:
    """The first `rows` rows of contiguous arrays `[capacity, ...]` as they are now, in parts of `part_rows` rows.

    One thread reads them by `parts` and `read`. Writers call `keep` before they replace rows; what changes rows in any
    other way calls `wait` first. Parts are read in the order in which a ring is written that continues at `next_row`,
    but first those that a writer waits for. With `shared` memory, which a forked process would write to unnoticed, a
    fork waits, too.
    """

    def __init__(
        self, arrays: Sequence[NDArray[Any]], rows: int, part_rows: int, *, next_row: int, shared: bool
    ) -> None:
        self._arrays = [_as_bytes(array) for array in arrays]
        self._row_bytes = sum(array.shape[1] for array in self._arrays)
        self._rows, self._part_rows = rows, part_rows
        count, first = -(-rows // part_rows), next_row // part_rows
        self._left = dict.fromkeys((first + place) % count for place in range(count))
        self._asked: list[int] = []
        self._kept: dict[int, _Kept] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._process = os.getpid()
        if shared:
            _shared.add(self)

    # The thread that reads -------------------------------------------------------------------------

    @property
    def left(self) -> frozenset[int]:
        """The numbers of the parts that are not released."""
        with self._changed:
            return frozenset(self._left)

    def parts(self) -> Iterator[int]:
        """Yield the numbers of the parts that are left; each is released when the next one is asked for."""
        while self._left:
            with self._changed:
                asked = next((number for number in self._asked if number in self._left), None)
                number = next(iter(self._left)) if asked is None else asked
            yield number
            self.release(number)

    def read(self, leaf: int, rows: range) -> Iterator[memoryview]:
        """Yield the bytes of rows of one array, as they were; all rows are in one part that is not released yet."""
        array, part = self._arrays[leaf], rows.start // self._part_rows
        if not array.shape[1]:
            return
        step = max(1, _CHUNK // array.shape[1])
        for start in range(rows.start, rows.stop, step):
            with self._changed:
                found = array[start : min(start + step, rows.stop)].copy()
                if part in self._kept:
                    self._kept[part].restore(leaf, start - part * self._part_rows, found)
            yield found.reshape(-1).data

    def release(self, *parts: int) -> None:
        """State that these parts are not read any more."""
        with self._changed:
            for part in parts:
                self._left.pop(part, None)
                if (kept := self._kept.pop(part, None)) is not None:
                    self._bytes -= kept.count * self._row_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Release all parts, also where reading failed; may be repeated."""
        if self._process == os.getpid():
            self.release(*tuple(self._left))
            _shared.discard(self)

    # Writers ---------------------------------------------------------------------------------------

    def keep(self, rows: slice | torch.Tensor) -> None:
        """Copy rows, a slice with step 1 or int64 `[n]`, that are about to be replaced and were not read yet.

        Waits where too much would be kept.
        """
        if not self._left or self._process != os.getpid():
            return
        if isinstance(rows, slice):
            numbers = np.arange(rows.start, min(rows.stop, self._rows))
        else:
            numbers = np.unique(rows.numpy(force=True))
            numbers = numbers[numbers < self._rows]
        if not len(numbers):
            return
        parts = numbers // self._part_rows
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        with self._changed:
            for part, some in zip(parts[starts].tolist(), np.split(numbers, starts[1:]), strict=True):
                self._keep(part, some)

    def _keep(self, part: int, numbers: NDArray[np.int64]) -> None:
        base = part * self._part_rows
        while part in self._left:
            kept = self._kept.setdefault(part, _Kept(len(self._arrays), self._part_rows))
            lacking = kept.lacking(numbers - base)
            size = len(lacking) * self._row_bytes
            if self._bytes + size <= _MOST_KEPT:
                kept.add(lacking, [array[base + lacking] for array in self._arrays])
                self._bytes += size
                return
            self._asked = [part]
            self._changed.wait()

    def wait(self) -> None:
        """Wait until all rows were read."""
        if self._left and self._process == os.getpid():
            with self._changed:
                while self._left:
                    self._changed.wait()


class _Kept:
    """Rows of one part as they were, by their number in it."""

    def __init__(self, leaves: int, rows: int) -> None:
        self._places = np.full(rows, -1, np.int64)
        self._images: list[list[NDArray[np.uint8]]] = [[] for _ in range(leaves)]
        self.count = 0

    def lacking(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the rows that are not here: what replaced them once is not kept."""
        return numbers[self._places[numbers] < 0]

    def add(self, numbers: NDArray[np.int64], images: Sequence[NDArray[np.uint8]]) -> None:
        """Take rows, one array `[n, bytes]` of each leaf."""
        self._places[numbers] = np.arange(self.count, self.count + len(numbers))
        for parts, image in zip(self._images, images, strict=True):
            parts.append(image)
        self.count += len(numbers)

    def restore(self, leaf: int, start: int, found: NDArray[np.uint8]) -> None:
        """Put the rows that are here into `found`, `[n, bytes]`, which were read from row `start` on."""
        places = self._places[start : start + len(found)]
        here = np.flatnonzero(places >= 0)
        if len(here):
            if len(self._images[leaf]) > 1:
                self._images[leaf] = [np.concatenate(self._images[leaf])]
            found[here] = self._images[leaf][0][places[here]]


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View an array as rows of bytes, `[rows, bytes]`."""
    if not array.size:
        return np.empty((len(array), 0), np.uint8)
    return array.reshape(len(array), -1).view(np.uint8)


def _before_fork() -> None:
    global _forks
    _forks += 1
    for snapshot in tuple(_shared):
        snapshot.wait()


os.register_at_fork(before=_before_fork)
