"""A 64-bit number that several processes can count with."""

from __future__ import annotations

import ctypes
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from typing import Any

__all__ = ["Counter"]


class Counter:
    """A signed 64-bit integer, read and set as `value`.

    With `shared`, or after `share_()`, it lies in memory that forked children and spawned ones (to which it was
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
        """The number as it is now, whoever set it."""
        return self._cell.value  # type: ignore[no-any-return]

    @value.setter
    def value(self, value: int) -> None:
        if not -(1 << 63) <= value < 1 << 63:  # ctypes would wrap around in silence
            raise OverflowError(f"{value} does not fit into 64 bits")
        self._cell.value = int(value)

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
