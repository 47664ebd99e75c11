"""The book-keeping of a storage: what samplers, writers and checkpointers read of its writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch

from .write_log import Change, Counter, Generations, WriteLog

if TYPE_CHECKING:
    from .journal import WriteJournal


class Reports:
    """The book-keeping of a storage, which samplers, writers and checkpointers read."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        """The generator of the buffer, for storages that need random numbers."""
        self.generations: Generations | None = None
        """How often each row was written over, where a writer counts it."""
        self.last_cursor: Any = None
        """The cursor of the newest write of a writer; None where it is not known."""
        self.numbered_by: str | None = None
        """The entry in which a writer keeps the number of every row, where one does."""
        self.rotated: int | None = None
        """By how many rows a full ring was rotated that a buffer loaded last; None where it is no ring, or not full."""
        self.journal: WriteJournal | None = None
        """Keeps what is replaced, where another process may have to undo a write."""
        self.log = WriteLog()
        """Which rows were written and changed; samplers read it."""
        self._attached: list[Any] = []
        self._loaded_ring: tuple[bool, int | None] = (False, None)

    @final
    def mark_changed(self, change: Change | None = None) -> None:
        """Report a change that no method of this class makes, as an edit in place of what `get` returned by reference.

        Without a `change`, which names rows and entries, anything may have changed.
        """
        self.log.changed(change)

    @final
    def mark_replaced(self, next_row: int, last_cursor: Any = None) -> None:
        """Report that all contents were replaced. The ring continues at `next_row` unless a writer sets another."""
        self.last_cursor = last_cursor
        self.log.go_on_at(next_row)
        self.log.changed()

    @final
    def notify(self, index: Any) -> None:
        """Report to the attached buffers that the elements at `index` were written."""
        for buffer in self._attached:
            buffer.mark_update(index)

    # Writes of processes that were killed ----------------------------------------------------------

    @property
    def counters(self) -> list[Counter]:
        """The numbers in shared memory that every write changes."""
        return self.log.counters

    def keep(self, rows: slice | torch.Tensor, key: tuple[str, ...] | None = None) -> None:
        """Before rows, or an entry of them, are replaced in place: keep them in the journal, if there is one."""

    def undo(self) -> None:
        """Undo the write of a process that was killed, by the journal."""

    # Full rings ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading_ring(self, next_row: int | None) -> Iterator[None]:
        """Load a ring inside, of which `next_row` is the row that is written next; None where that is not known.

        A full ring that is loaded into a larger storage is rotated, so that its rows are in the order of time in front
        of free ones: a writer continues after them. `rotated` is then the number of rows. A storage that is loaded
        without this keeps every row where it was.
        """
        self.rotated, self._loaded_ring = None, (True, next_row)
        try:
            yield
        finally:
            self._loaded_ring = (False, None)

    def rotation_of(self, rows: int, room: int, capacity: int | None, last_row: int | None) -> int:
        """Return which row is to become row 0 of `rows` rows that are loaded into `room` rows; also in `rotated`.

        The rows are from a storage of `capacity` rows of which `last_row` was written last, None where not known.
        """
        ring, next_row = self._loaded_ring
        next_row = next_row if last_row is None else last_row + 1
        full = next_row is not None and (next_row < rows if capacity is None else rows == capacity)
        self.rotated = next_row % rows if next_row is not None and ring and full and 0 < rows < room else None
        return self.rotated or 0

    # Buffers ---------------------------------------------------------------------------------------

    @final
    def attach(self, buffer: Any) -> None:
        """Have a buffer (anything with `mark_update(index)`) notified of elements that are written by index."""
        if not any(buffer is known for known in self._attached):
            self._attached.append(buffer)

    @final
    def detach(self, buffer: Any) -> None:
        """Undo `attach`."""
        self._attached = [known for known in self._attached if known is not buffer]
