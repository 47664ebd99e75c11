"""What was written to a storage, in three numbers: enough to catch up with the new rows without looking at the old."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from .counter import Counter

__all__ = ["Change", "WriteLog", "Written"]

_REMEMBERED = 64


class Written(NamedTuple):
    """How many rows were written, where the ring goes on, and how often anything else was changed."""

    rows: int
    next_row: int
    irregular: int


class Change(NamedTuple):
    """What was changed otherwise than by going on in the ring; None stands for anything there is."""

    rows: slice | torch.Tensor | None = None
    keys: tuple[tuple[str, ...], ...] | None = None


_ANYTHING = Change()


class WriteLog:
    """Counts rows written one after the other, each write beginning where the last one ended, as a ring does.

    Any other change counts as irregular: writes elsewhere, edits in place, a new length, a new place to go on at.
    The numbers are shared with other processes where the storage's length is.
    """

    __slots__ = ("_changes", "_irregular", "_next_row", "_rows")

    def __init__(self) -> None:
        self._rows, self._next_row, self._irregular = Counter(), Counter(), Counter()
        self._changes: deque[tuple[int, Change]] = deque(maxlen=_REMEMBERED)

    @property
    def now(self) -> Written:
        """The numbers as they are now."""
        return Written(self._rows.value, self._next_row.value, self._irregular.value)

    def wrote(self, rows: slice | torch.Tensor, capacity: int) -> None:
        """Count a write of these rows, in this order, of `capacity` rows that there is room for."""
        if isinstance(rows, slice):
            start, count = rows.start, rows.stop - rows.start
        else:
            count = len(rows)
            start = int(rows[0]) if count and _goes_round(rows, capacity) else -1
        if start == self._next_row.value:
            self._next_row.value = (start + count) % capacity
            self._rows.value += count
        elif count:
            self.changed(Change(rows))

    def changed(self, change: Change | None = None) -> None:
        """Count a change of any other kind, and remember for a while what it was."""
        self._irregular.value += 1
        self._changes.append((self._irregular.value, change or _ANYTHING))

    def since(self, irregular: int) -> list[Change] | None:
        """Return what was changed since this count; None if that is not known, as of what another process did."""
        missing = self._irregular.value - irregular
        recent = list(self._changes)[len(self._changes) - missing :] if 0 <= missing <= len(self._changes) else None
        if recent is None or any(number != irregular + place for place, (number, _) in enumerate(recent, start=1)):
            return None
        return [change for _, change in recent]

    def go_on_at(self, row: int) -> None:
        """Say which row the next write of the ring begins at."""
        if row != self._next_row.value:
            self._next_row.value = row
            self.changed()

    def share_(self) -> None:
        """Move the numbers into shared memory."""
        for counter in (self._rows, self._next_row, self._irregular):
            counter.share_()

    def __getstate__(self) -> dict[str, Any]:
        # What was changed once is of no use to a copy, which nobody has read yet.
        return {"_rows": self._rows, "_next_row": self._next_row, "_irregular": self._irregular}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._changes = deque(maxlen=_REMEMBERED)
        for name, value in state.items():
            setattr(self, name, value)


def _goes_round(rows: torch.Tensor, capacity: int) -> bool:
    """Tell whether rows follow one another, the first one of a ring after the last."""
    numbers = rows.numpy(force=True)
    return bool(((numbers - numbers[0] - np.arange(len(numbers))) % capacity == 0).all())
