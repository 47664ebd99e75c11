"""The write log of a storage, the counters it shares with other processes, snapshots of rows, and the write journal.

A snapshot holds the rows of one instant while a checkpoint reads them in the background and writers continue. It works
by copy-on-write, row by row, like snapshots of disks and virtual machines: before a writer replaces rows that were not
read yet, it copies them. A snapshot therefore costs as much as is written meanwhile, not as much as the storage holds.

The journal is a rollback journal, as in databases: if a process is killed in the middle of a write, another process
undoes the write. Before rows are replaced, their old bytes are appended to an anonymous file in memory, and the
counters are stored in cells in front of it. New rows behind the last valid one need no copy: they become valid when the
length is increased, which is the last step of a write.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import OutOfSpaceError, SchemaError, UsageError
from ..format import fs
from ..ted.schema import Numbers

_MOST_KEPT = 64 << 20
"""Limit for copies of rows; a writer that would exceed it waits until some of them have been read."""
_CHUNK = 1 << 20
"""Bytes read at once: a writer waits for the lock no longer than this read takes."""

_forks = 0
_shared: weakref.WeakSet[Snapshot] = weakref.WeakSet()


def forks() -> int:
    """Return how often this process and its ancestors were forked."""
    return _forks


class Snapshot:
    """The first `rows` rows of contiguous arrays `[capacity, ...]` as they are now, in parts of `part_rows` rows.

    One thread reads the parts with `parts` and `read`. Writers call `keep` before they replace rows; code that changes
    rows in any other way first calls `wait`. A part that a writer waits for is read next; otherwise parts are read in
    the order in which a ring that continues at `next_row` will overwrite them. If the memory is `shared`, a fork waits
    as well: the child could change rows unnoticed.

        rows        | part 0      | part 1      | part 2      |      next_row is in part 1: read parts 1, 2, 0
        a writer replaces row 2 of part 1, which is not read yet: `keep` copies the old row;
        `read` of part 1 returns the present rows, with the old row 2 in place of the new one
    """

    def __init__(
        self, arrays: Sequence[NDArray[Any]], rows: int, part_rows: int, *, next_row: int, shared: bool
    ) -> None:
        self._arrays = [_as_bytes(array) for array in arrays]
        self._row_bytes = sum(array.shape[1] for array in self._arrays)
        self._rows, self._part_rows = rows, part_rows
        count, first = -(-rows // part_rows), next_row // part_rows
        self._left = dict.fromkeys((first + place) % count for place in range(count))
        self._wanted: list[int] = []
        self._kept: dict[int, _Kept] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._process = os.getpid()
        if shared:
            _shared.add(self)

    # The thread that reads -------------------------------------------------------------------------

    @property
    def left(self) -> frozenset[int]:
        """The numbers of the parts that are not released yet."""
        with self._changed:
            return frozenset(self._left)

    def parts(self) -> Iterator[int]:
        """Yield the numbers of the remaining parts; a part is released when the caller takes the next one."""
        while self._left:
            with self._changed:
                wanted = next((number for number in self._wanted if number in self._left), None)
                number = next(iter(self._left)) if wanted is None else wanted
            yield number
            self.release(number)

    def read(self, leaf: int, rows: range) -> Iterator[memoryview]:
        """Yield the bytes of some rows of one array as they were when the snapshot was made.

        The rows must belong to one part, which is not released yet.
        """
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
        """Mark these parts as read, and forget the copies of their rows."""
        with self._changed:
            for part in parts:
                self._left.pop(part, None)
                if (kept := self._kept.pop(part, None)) is not None:
                    self._bytes -= kept.count * self._row_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Release all parts, also after a failure; may be called repeatedly."""
        if self._process == os.getpid():
            self.release(*tuple(self._left))
            _shared.discard(self)

    # Writers ---------------------------------------------------------------------------------------

    def keep(self, rows: slice | torch.Tensor) -> None:
        """Copy the rows that are about to be replaced, a slice with step 1 or int64 `[n]`, unless they were read.

        If the copies would exceed the limit, wait until the thread has read the part.
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

    def _keep(self, part: int, numbers: Numbers) -> None:
        base = part * self._part_rows
        while part in self._left:
            kept = self._kept.setdefault(part, _Kept(len(self._arrays), self._part_rows))
            lacking = kept.lacking(numbers - base)
            size = len(lacking) * self._row_bytes
            if self._bytes + size <= _MOST_KEPT:
                kept.add(lacking, [array[base + lacking] for array in self._arrays])
                self._bytes += size
                return
            self._wanted = [part]
            self._changed.wait()

    def wait(self) -> None:
        """Wait until all rows have been read."""
        if self._left and self._process == os.getpid():
            with self._changed:
                while self._left:
                    self._changed.wait()


class _Kept:
    """Copies of old rows of one part, by the number of the row in the part."""

    def __init__(self, leaves: int, rows: int) -> None:
        self._places = np.full(rows, -1, np.int64)
        self._images: list[list[NDArray[np.uint8]]] = [[] for _ in range(leaves)]
        self.count = 0

    def lacking(self, numbers: Numbers) -> Numbers:
        """Return the rows that have no copy yet; a row that is replaced a second time has one."""
        return numbers[self._places[numbers] < 0]

    def add(self, numbers: Numbers, images: Sequence[NDArray[np.uint8]]) -> None:
        """Add rows, with one array `[n, bytes]` for each leaf."""
        self._places[numbers] = np.arange(self.count, self.count + len(numbers))
        for parts, image in zip(self._images, images, strict=True):
            parts.append(image)
        self.count += len(numbers)

    def restore(self, leaf: int, start: int, found: NDArray[np.uint8]) -> None:
        """Put the copied rows into `found`, `[n, bytes]`, which was read from row `start` on."""
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


class Counter:
    """A signed 64-bit integer that other processes can share, read and set as `value`.

    With `shared`, or after `share_()`, it is in memory shared with forked children, and with spawned children that get
    it as an argument. It has no lock: hold one while adding to it. Plain pickles and copies have the same value, but
    are not shared. Passing it through a queue raises RuntimeError, as for all shared values of `multiprocessing`; a
    value beyond 64 bits raises OverflowError.

    >>> rows = Counter(3)
    >>> rows.value += 2
    >>> rows.value
    5
    """

    __slots__ = ("_cell",)

    def __init__(self, value: int = 0, *, shared: bool = False) -> None:
        self._cell: Any = RawValue(ctypes.c_int64, 0) if shared else _Cell()
        self.value = value

    @property
    def value(self) -> int:
        """The present number, also if another process has set it."""
        return self._cell.value  # type: ignore[no-any-return]

    @value.setter
    def value(self, value: int) -> None:
        self._cell.value = int(value) if -_LIMIT <= value < _LIMIT else _refuse(value)

    def add(self, count: int) -> None:
        """Add to the number."""
        cell = self._cell
        value = cell.value + count
        cell.value = value if -_LIMIT <= value < _LIMIT else _refuse(value)

    @property
    def shared(self) -> bool:
        """Whether other processes can see it."""
        return not isinstance(self._cell, _Cell)

    def share_(self) -> Counter:
        """Move the number to shared memory and return the counter. Call it before the other process starts."""
        if not self.shared:
            self._cell = RawValue(ctypes.c_int64, self.value)
        return self

    def __repr__(self) -> str:
        return f"Counter({self.value}{', shared=True' if self.shared else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Counter, (self.value,)


_LIMIT = 1 << 63


def _refuse(value: int) -> NoReturn:
    raise OverflowError(f"{value} does not fit into 64 bits")  # ctypes would silently wrap around


class _Cell:
    """A number in this process only."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def _of_cell(cell: Any) -> Counter:
    counter = Counter()
    counter._cell = cell
    return counter


def _pass_on(counter: Counter) -> tuple[Any, ...]:
    """Pickle a counter for a child process, which uses the same memory."""
    assert_spawning(counter)
    return _of_cell, (counter.share_()._cell,)


ForkingPickler.register(Counter, _pass_on)


_NEVER = -1
"""The generation of a row that was never written."""
_MOST = 1 << 40


class Generations:
    """A generation number for each row, int64: -1 before its first write, 0 after it, and 1 more for each later write.

    Emptying the storage counts as a write. A batch carries the generations of its elements, so that a later update can
    detect elements that were overwritten. With `shared` the numbers are in shared memory.
    """

    def __init__(self, rows: int, *, shared: bool) -> None:
        if rows > _MOST:
            raise UsageError(
                f"max_size is {rows}, expected at most {_MOST} with generations",
                hint="create the storage with a max_size",
            )
        self.rows = torch.full((rows,), _NEVER)
        if shared:
            self.rows.share_memory_()

    def count(self, index: torch.Tensor) -> None:
        """Count a write to each of these rows; a row that occurs twice was written twice."""
        self.rows.index_add_(0, index, torch.ones_like(index))

    def count_all(self) -> None:
        """Count a write to each row that was ever written."""
        self.rows += self.rows != _NEVER

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the generations of these rows; -1 for rows that do not exist."""
        there = (index >= 0) & (index < len(self.rows))
        return self.rows[index.where(there, 0)].where(there, _NEVER)

    def apart(self) -> Generations:
        """Return a copy that is not shared with other processes."""
        other = Generations(0, shared=False)
        other.rows = self.rows.clone()
        return other

    def fitting(self, saved: torch.Tensor) -> torch.Tensor:
        """Return saved generations, cut or extended to the number of rows here; SchemaError if some would be lost."""
        if saved.dtype != torch.int64 or saved.dim() != 1:
            raise SchemaError(f"generations are {saved.dtype} {list(saved.shape)}, expected torch.int64 [rows]")
        if bool((saved[len(self.rows) :] != _NEVER).any()):
            raise SchemaError(
                f"generations of {len(saved)} rows were saved, but this storage has {len(self.rows)} rows"
            )
        fitted = torch.full_like(self.rows, _NEVER)
        fitted[: len(saved)] = saved[: len(self.rows)]
        return fitted


_REMEMBERED = 64
"""How many irregular changes a write log remembers."""
_CHECKPOINTS = 4
"""How many checkpoints a write log remembers."""


class Written(NamedTuple):
    """The counts of a write log at one moment.

    Attributes:
        rows: how many rows were written one after another, as in a ring.
        next_row: the row that continues the ring.
        irregular: how many other changes there were.
    """

    rows: int
    next_row: int
    irregular: int


class Change(NamedTuple):
    """The rows and entries of an irregular change: one that does not continue the ring. None means all of them."""

    rows: slice | torch.Tensor | None = None
    keys: tuple[tuple[str, ...], ...] | None = None


_ANYTHING = Change()


class WriteLog:
    """Counts the writes to a storage, so that samplers and checkpoints can find out which rows are new.

    A write that begins at the row where the last one ended continues the ring, and only adds to the number of `rows`.
    From two readings of the counts, a reader computes which rows are new:

        capacity 5           rows   next_row
        first reading           7          2
        second reading          9          4            2 more rows, from row 2 on: rows 2 and 3 are new

    Every other change counts as irregular: a write elsewhere, an in-place edit, a new length, a new next row. A reader
    whose count of irregular changes is outdated looks up these changes with `since`, or reads all rows again.

    The counts are shared with other processes if the storage's length is. A reader may read them at any moment, also
    while a write is being counted, and must not see the new number of rows with the old next row: a table of
    trajectories built from such a pair would be shifted against the rows permanently. Therefore the next row is not
    stored; it is computed from `rows`, the only number that a write to the ring changes:

        next_row = (rows + shift) % capacity

    `shift` and `capacity` change rarely, and before the count of irregular changes, which a reader reads first. A
    reader that sees new values of the former therefore has an old count, and notices the change at its next reading.
    """

    __slots__ = ("_capacity", "_changes", "_irregular", "_lent", "_rows", "_saved", "_shift", "process", "snapshots")

    def __init__(self) -> None:
        self._rows, self._shift, self._capacity = Counter(), Counter(), Counter()
        self._irregular, self._lent = Counter(), Counter()
        self.process = Counter()
        """The process that is writing, 0 if none is; only kept for the rows of `Guard.refuse_others`."""
        self._changes: deque[tuple[int, Change]] = deque(maxlen=_REMEMBERED)
        self._saved: dict[str, Written] = {}
        self.snapshots: list[Snapshot] = []
        """Snapshots that are being read in the background; before rows are replaced, their copies are kept there."""

    @property
    def now(self) -> Written:
        """The present counts. The row before `next_row`, around the ring, is the newest one."""
        irregular, rows = self._irregular.value, self._rows.value
        return Written(rows, self._next_row(rows), irregular)

    def _next_row(self, rows: int) -> int:
        capacity, place = self._capacity.value, rows + self._shift.value
        return place % capacity if capacity else place

    def wrote(self, rows: slice | torch.Tensor | None, capacity: int) -> None:
        """Count a write of these rows, in this order; None if the rows are unknown. `capacity` is counted in rows."""
        if rows is None:
            self.changed()
            return
        if isinstance(rows, slice):
            start, count = rows.start, rows.stop - rows.start
        else:
            count = len(rows)
            start = int(rows[0]) if count and _is_consecutive(rows, capacity) else -1
        # Called for every step of an environment: reading the cells takes half of the time of the property `value`.
        written, ring = self._rows._cell.value, self._capacity._cell.value
        place = written + self._shift._cell.value
        if start == (place % ring if ring else place):
            if capacity != ring:
                self._set_ring(start - written, capacity)
            self._rows.value = written + count
        elif count:
            self.changed(Change(rows))

    def changed(self, change: Change | None = None) -> None:
        """Count an irregular change, and remember the last ones; None if anything may have changed."""
        change = change or _ANYTHING
        if isinstance(change.rows, torch.Tensor):  # the caller may change this index later
            change = Change(change.rows.clone(), change.keys)
        self._irregular.value += 1
        self._changes.append((self._irregular.value, change))

    def since(self, irregular: int) -> list[Change] | None:
        """Return the irregular changes since a count; None if unknown: too many, or made by another process."""
        missing = self._irregular.value - irregular
        recent = list(self._changes)[len(self._changes) - missing :] if 0 <= missing <= len(self._changes) else None
        if recent is None or any(number != irregular + place for place, (number, _) in enumerate(recent, start=1)):
            return None
        return [change for _, change in recent]

    def changed_rows(self, since: Written, capacity: int, block: int) -> list[tuple[int, int]] | None:
        """Return runs `[start, stop)`, in any order, that contain all rows written or changed since a reading.

        All other rows are unchanged, unless references to rows were handed out: see `lent`.

        Args:
            since: the counts to compare with.
            capacity: the capacity in rows.
            block: scattered rows are rounded to whole blocks of this many rows.

        Returns:
            None if the changes are unknown.
        """
        changes, added = self.since(since.irregular), self._rows.value - since.rows
        if changes is None or added < 0:  # negative after a write was undone
            return None
        stop = since.next_row + min(added, capacity)
        found = [(since.next_row, min(stop, capacity)), (0, max(stop - capacity, 0))]
        for rows in (change.rows for change in changes):
            if rows is None or (isinstance(rows, slice) and (rows.step or 1) < 0):
                return None
            if isinstance(rows, slice):
                found.append(rows.indices(capacity)[:2])
            else:
                blocks = np.unique(rows.numpy(force=True) % capacity // block)
                found += ((number * block, min((number + 1) * block, capacity)) for number in blocks.tolist())
        return found

    def left_alone(self, rows: torch.Tensor, since: Written, capacity: int) -> bool:
        """Return whether none of these rows was written or changed since a reading; `capacity` is counted in rows."""
        changes, added = self.since(since.irregular), self._rows.value - since.rows
        if changes is None or not 0 <= added < capacity:
            return False
        numbers = rows.numpy(force=True)
        if added and ((numbers - since.next_row) % capacity < added).any():
            return False
        return not any(_concerns(change.rows, numbers, capacity) for change in changes)

    def go_on_at(self, row: int) -> None:
        """Set the row at which the ring continues."""
        rows = self._rows.value
        if row != self._next_row(rows):
            self._shift.value = row - rows
            self.changed()

    def _set_ring(self, shift: int, capacity: int) -> None:
        """Set the capacity, which is known from the first write on, and the shift that keeps the next row."""
        known = self._capacity.value
        self._shift.value, self._capacity.value = shift, capacity
        if known:
            self.changed()

    # What the log cannot see -----------------------------------------------------------------------

    @property
    def lent(self) -> bool:
        """Whether callers may have references to rows, through which rows can change without being counted."""
        return self._lent.value > 0

    def lend(self) -> None:
        """Record that references to rows were handed out: from now on, any row may have changed.

        Waits until background dumps have read the rows.
        """
        self._lent.value = 1
        if self.snapshots:
            self.settle()

    def settle(self) -> None:
        """Wait until background dumps have read the rows: called before a change for which rows are not copied."""
        for snapshot in tuple(self.snapshots):
            snapshot.wait()

    # Checkpoints -----------------------------------------------------------------------------------

    def saved_as(self, checkpoint: str, position: Written) -> None:
        """Remember the counts at which a checkpoint was saved or loaded; only the last few checkpoints are kept."""
        others = [pair for pair in self._saved.items() if pair[0] != checkpoint]
        self._saved = dict([*others, (checkpoint, position)][-_CHECKPOINTS:])

    def position_of(self, checkpoint: str) -> Written | None:
        """Return the counts at which a checkpoint was saved or loaded; None if it is not remembered."""
        return self._saved.get(checkpoint)

    @property
    def counters(self) -> list[Counter]:
        """The counters of writes."""
        return [self._rows, self._shift, self._capacity, self._irregular]

    def undone(self, before: Written) -> None:
        """Count a change after the journal has reset the counters, which were `before`.

        The count of irregular changes never decreases: a reader could miss a change otherwise.
        """
        self._irregular.value = max(self._irregular.value, before.irregular)
        self.changed()

    def share_(self) -> None:
        """Move the counters to shared memory."""
        for counter in (*self.counters, self._lent, self.process):
            counter.share_()

    def __getstate__(self) -> dict[str, Any]:
        # Past changes and checkpoints stay behind: nobody has read the counts of the copy yet.
        return {
            name: getattr(self, name) for name in ("_rows", "_shift", "_capacity", "_irregular", "_lent", "process")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._changes, self._saved, self.snapshots = deque(maxlen=_REMEMBERED), {}, []
        for name, value in state.items():
            setattr(self, name, value)


def _concerns(changed: slice | torch.Tensor | None, rows: Numbers, capacity: int) -> bool:
    """Return whether a change of rows (None: all rows) includes some of `rows`."""
    if changed is None:
        return True
    if isinstance(changed, slice):
        start, stop, step = changed.indices(capacity)
        return step < 0 or bool(((rows >= start) & (rows < stop) & ((rows - start) % step == 0)).any())
    return bool(np.isin(rows, changed.numpy(force=True)).any())


def _is_consecutive(rows: torch.Tensor, capacity: int) -> bool:
    """Return whether each row follows the one before it in the ring, where row 0 follows the last row."""
    numbers = rows.numpy(force=True)
    return bool(((numbers - numbers[0] - np.arange(len(numbers))) % capacity == 0).all())


# A journal that has grown beyond this size is cut to it before the next write, so that it gives memory back.
_KEPT_BYTES = 16 << 20
_PARTS_AT_ONCE = 512  # the system accepts 1,024
_WHOLE_NUMBERS = np.dtype(np.int64)
_NAME = Path("rbtool-guard")


class WriteJournal:
    """Keeps the old contents of the rows that one write replaces, and the counters before the write.

    The caller must hold the lock of the writers, for writes as well as for `undo`.

        cells (shared)     size of the journal | counter | counter | …
        file, from start   record | record | …     a record: its head, the row numbers, the old rows of each column

    Args:
        descriptor: a file shared by all processes.
        start: where the journal begins in the file.
        cells: int64 numbers in memory shared by all processes: the size of the journal, then the values of the
            counters.
        counters: the counters, at most `len(cells) - 1`.
    """

    def __init__(self, descriptor: int, start: int, cells: memoryview, counters: Sequence[Counter]) -> None:
        self._descriptor, self._start = descriptor, start
        self._cells, self._counters = cells, list(counters)

    def begin(self) -> None:
        """Start a write; nothing is replaced yet."""
        cells = self._cells
        if cells[0] > _KEPT_BYTES:
            fs.truncate(self._descriptor, self._start + _KEPT_BYTES, _NAME)
        cells[0] = 0
        for number, counter in enumerate(self._counters, start=1):
            cells[number] = counter.value

    def discard(self) -> None:
        """Start a write that replaces all rows, such as a load, for which no old rows are kept.

        Undoing it leaves an empty storage; the load has to be repeated.
        """
        for number in range(len(self._counters)):
            self._cells[1 + number] = 0
        self._cells[0] = 0

    def keep(self, columns: Sequence[NDArray[Any]], rows: slice | Numbers, first: int = 0) -> None:
        """Append a record with the contents of `rows` in consecutive columns, of which the first has number `first`.

        Raises:
            OutOfSpaceError: there is not enough memory.
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
            raise OutOfSpaceError(f"not enough memory to keep the rows that a write replaces: {error}") from error
        self._cells[0] = size  # only now is the record valid

    def undo(self, columns: Sequence[NDArray[Any]]) -> None:
        """Restore the rows and the counters; this may be repeated. `columns` are all columns, by their numbers."""
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
