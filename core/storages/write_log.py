"""What a storage records of its writes: counters, the write log, how often rows were overwritten."""

from __future__ import annotations

import ctypes
from collections import deque
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError
from .snapshots import Snapshot


class Counter:
    """A signed 64-bit integer, read and set as `value`.

    With `shared`, or after `share_()`, it is in memory that forked children and spawned ones (to which it was
    passed as an argument) count with, too. It has no lock: who adds to it holds one. Plain pickles and copies keep
    the value and are not shared; passing it through a queue raises RuntimeError, as for all shared values of
    `multiprocessing`. A number beyond 64 bits raises OverflowError.

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
        """The current number, also if another process set it."""
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
        """Whether other processes can count with it."""
        return not isinstance(self._cell, _Cell)

    def share_(self) -> Counter:
        """Move the number into shared memory; return the counter itself. Do it before the other process starts."""
        if not self.shared:
            self._cell = RawValue(ctypes.c_int64, self.value)
        return self

    def __repr__(self) -> str:
        return f"Counter({self.value}{', shared=True' if self.shared else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Counter, (self.value,)


_LIMIT = 1 << 63


def _refuse(value: int) -> NoReturn:
    raise OverflowError(f"{value} does not fit into 64 bits")  # ctypes would wrap around in silence


class _Cell:
    """A number of this process alone."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def _of_cell(cell: Any) -> Counter:
    counter = Counter()
    counter._cell = cell
    return counter


def _pass_on(counter: Counter) -> tuple[Any, ...]:
    """What a child process gets: the same memory."""
    assert_spawning(counter)
    return _of_cell, (counter.share_()._cell,)


ForkingPickler.register(Counter, _pass_on)


_NEVER = -1
_MOST = 1 << 40


class Generations:
    """One int64 a row: -1 before its first write, 0 after it, one more with each further write and each emptying.

    With `shared` the numbers are in shared memory.
    """

    def __init__(self, rows: int, *, shared: bool) -> None:
        if rows > _MOST:
            raise UsageError(
                f"max_size is {rows}, expected at most {_MOST} with generations", hint="give the storage a max_size"
            )
        self.rows = torch.full((rows,), _NEVER)
        if shared:
            self.rows.share_memory_()

    def count(self, index: torch.Tensor) -> None:
        """Count a write to each row named, as often as it is named."""
        self.rows.index_add_(0, index, torch.ones_like(index))

    def count_all(self) -> None:
        """Count a write to each row that was ever written."""
        self.rows += self.rows != _NEVER

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the numbers of these rows; -1 for rows that there are not."""
        there = (index >= 0) & (index < len(self.rows))
        return self.rows[index.where(there, 0)].where(there, _NEVER)

    def apart(self) -> Generations:
        """Return a copy that no other process counts with."""
        other = Generations(0, shared=False)
        other.rows = self.rows.clone()
        return other

    def fitting(self, saved: torch.Tensor) -> torch.Tensor:
        """Return saved numbers with as many rows as there are here; SchemaError if that would lose one."""
        if saved.dtype != torch.int64 or saved.dim() != 1:
            raise SchemaError(f"generations are {saved.dtype} {list(saved.shape)}, expected torch.int64 [rows]")
        if bool((saved[len(self.rows) :] != _NEVER).any()):
            raise SchemaError(f"generations of {len(saved)} rows were saved; this storage has {len(self.rows)} rows")
        fitted = torch.full_like(self.rows, _NEVER)
        fitted[: len(saved)] = saved[: len(self.rows)]
        return fitted


_REMEMBERED = 64
_CHECKPOINTS = 4


class Written(NamedTuple):
    """How many rows were written, the next row of the ring, and how often anything else was changed."""

    rows: int
    next_row: int
    irregular: int


class Change(NamedTuple):
    """The rows and entries that a change other than the next write of the ring concerns; None is all of them."""

    rows: slice | torch.Tensor | None = None
    keys: tuple[tuple[str, ...], ...] | None = None


_ANYTHING = Change()


class WriteLog:
    """Counts rows written one after the other, each write beginning where the last one ended, as a ring does.

    Any other change counts as irregular: writes elsewhere, edits in place, a new length, a new next row.
    The numbers are shared with other processes where the storage's length is.
    """

    __slots__ = ("_changes", "_irregular", "_lent", "_next_row", "_rows", "_saved", "snapshots")

    def __init__(self) -> None:
        self._rows, self._next_row, self._irregular, self._lent = Counter(), Counter(), Counter(), Counter()
        self._changes: deque[tuple[int, Change]] = deque(maxlen=_REMEMBERED)
        self._saved: dict[str, Written] = {}
        self.snapshots: list[Snapshot] = []
        """What keeps rows before they are replaced, for dumps that read them in the background."""

    @property
    def now(self) -> Written:
        """The numbers as they are now."""
        return Written(self._rows.value, self._next_row.value, self._irregular.value)

    def wrote(self, rows: slice | torch.Tensor | None, capacity: int) -> None:
        """Count a write of these rows, in this order, of `capacity` rows that there is room for; None for any rows."""
        if rows is None:
            self.changed()
            return
        if isinstance(rows, slice):
            start, count = rows.start, rows.stop - rows.start
        else:
            count = len(rows)
            start = int(rows[0]) if count and _goes_round(rows, capacity) else -1
        if start == self._next_row.value:
            self._next_row.value = (start + count) % capacity
            self._rows.add(count)
        elif count:
            self.changed(Change(rows))

    def changed(self, change: Change | None = None) -> None:
        """Count a change of any other kind, and remember for a while what it was."""
        change = change or _ANYTHING
        if isinstance(change.rows, torch.Tensor):  # the caller's index, which may be filled with other rows next
            change = Change(change.rows.clone(), change.keys)
        self._irregular.value += 1
        self._changes.append((self._irregular.value, change))

    def since(self, irregular: int) -> list[Change] | None:
        """Return what was changed since this count; None if that is not known, as of what another process did."""
        missing = self._irregular.value - irregular
        recent = list(self._changes)[len(self._changes) - missing :] if 0 <= missing <= len(self._changes) else None
        if recent is None or any(number != irregular + place for place, (number, _) in enumerate(recent, start=1)):
            return None
        return [change for _, change in recent]

    def changed_rows(self, since: Written, capacity: int, block: int) -> list[tuple[int, int]] | None:
        """Return runs `[start, stop)`, in any order, of rows, of `capacity`, that were written or changed since.

        Rows here and there are rounded to whole blocks of so many. None if that is not known. All other rows are what
        they were, unless rows were lent.
        """
        changes, added = self.since(since.irregular), self._rows.value - since.rows
        if changes is None or added < 0:  # also where a write was undone
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
        """Whether none of these rows, of `capacity` that there is room for, was written or changed since."""
        changes, added = self.since(since.irregular), self._rows.value - since.rows
        if changes is None or not 0 <= added < capacity:
            return False
        numbers = rows.numpy(force=True)
        if added and ((numbers - since.next_row) % capacity < added).any():
            return False
        return not any(_concerns(change.rows, numbers, capacity) for change in changes)

    def go_on_at(self, row: int) -> None:
        """Set the row at which the next write of the ring starts."""
        if row != self._next_row.value:
            self._next_row.value = row
            self.changed()

    # What the log cannot see -----------------------------------------------------------------------

    @property
    def lent(self) -> bool:
        """Whether anybody may have references to rows, and change them in place without a report."""
        return self._lent.value > 0

    def lend(self) -> None:
        """Note that references to rows were handed out: from now on, rows that are not marked may have changed.

        Waits until dumps in the background have read the rows, which they had to themselves before.
        """
        self._lent.value = 1
        if self.snapshots:
            self.settle()

    def settle(self) -> None:
        """Wait until dumps in the background have read the rows: before changes that they cannot follow."""
        for snapshot in tuple(self.snapshots):
            snapshot.wait()

    # Checkpoints -----------------------------------------------------------------------------------

    def saved_as(self, checkpoint: str, position: Written) -> None:
        """Remember, of a few checkpoints, that one holds the rows as they were at a position."""
        others = [pair for pair in self._saved.items() if pair[0] != checkpoint]
        self._saved = dict([*others, (checkpoint, position)][-_CHECKPOINTS:])

    def position_of(self, checkpoint: str) -> Written | None:
        """Return the position at which a checkpoint was saved or loaded; None for one that is not remembered."""
        return self._saved.get(checkpoint)

    @property
    def counters(self) -> list[Counter]:
        """The numbers of the writes themselves."""
        return [self._rows, self._next_row, self._irregular]

    def undone(self, before: Written) -> None:
        """Count a change after the numbers were set back from `before`; the count of changes is never set back."""
        self._irregular.value = max(self._irregular.value, before.irregular)
        self.changed()

    def share_(self) -> None:
        """Move the numbers into shared memory."""
        for counter in (*self.counters, self._lent):
            counter.share_()

    def __getstate__(self) -> dict[str, Any]:
        # What was changed once is of no use to a copy, which nobody has read yet, and it is saved as no checkpoint.
        return {name: getattr(self, name) for name in ("_rows", "_next_row", "_irregular", "_lent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._changes, self._saved, self.snapshots = deque(maxlen=_REMEMBERED), {}, []
        for name, value in state.items():
            setattr(self, name, value)


def _concerns(changed: slice | torch.Tensor | None, rows: NDArray[np.int64], capacity: int) -> bool:
    """Whether a change of rows, None for all, is one of some of these."""
    if changed is None:
        return True
    if isinstance(changed, slice):
        start, stop, step = changed.indices(capacity)
        return step < 0 or bool(((rows >= start) & (rows < stop) & ((rows - start) % step == 0)).any())
    return bool(np.isin(rows, changed.numpy(force=True)).any())


def _goes_round(rows: torch.Tensor, capacity: int) -> bool:
    """Whether rows are consecutive, the first one of a ring after the last."""
    numbers = rows.numpy(force=True)
    return bool(((numbers - numbers[0] - np.arange(len(numbers))) % capacity == 0).all())
