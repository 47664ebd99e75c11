"""Priorities of a learner whose rows other processes write, without a word between them."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch

from ..errors import SchemaError
from ..samplers import Index, Sampler
from ..samplers.prioritized import PrioritizedSampler
from ..storages import Storage
from ..writers import Writer

__all__ = ["LearnerSampler", "WorkerSampler"]

_WITH_THE_LEARNER = "the priorities of this buffer are with the process that made it"


class LearnerSampler(PrioritizedSampler):
    """A `PrioritizedSampler` of one process that finds out by itself what was written since it was last used.

    Before each draw it reads how many rows the ring's writer has counted, in shared memory, and where it goes on; the
    rows in between get the default priority, and all of them if the ring went round. A child that is spawned gets a
    `WorkerSampler` in its place; a forked one goes on with a copy of the priorities.
    """

    reads_rows: ClassVar[bool] = False
    writes_are_updates: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writer: Writer | None = None
        self._storage: Storage | None = None
        self._seen: tuple[int, int] | None = None
        """How many rows were counted, and where the ring went on, at the last look; None before the first."""

    def follow(self, writer: Writer, storage: Storage) -> None:
        """Look at this writer, and at this storage, from now on."""
        self._writer, self._storage = writer, storage

    def catch_up(self) -> None:
        """Give what was written since the last look the default priority."""
        writer, storage = self._writer, self._storage
        if writer is None or storage is None:
            return
        # In this order: of a write that is going on in another process, the cursor moves first. What it has moved
        # over is told once, whatever was counted by then.
        count, cursor = writer.write_count, writer.cursor
        if (count, cursor) == self._seen:
            return
        seen, self._seen = self._seen, (count, cursor)
        length, capacity = len(storage), storage.max_size
        if seen is None or not 0 <= count - seen[0] < capacity:
            rows = torch.arange(length)
        else:
            rows = (seen[1] + torch.arange((cursor - seen[1]) % capacity)) % capacity
        if len(rows):
            super().on_update(rows, storage)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Catch up with what was written, and draw."""
        self.catch_up()
        return super().draw(storage, batch_size)

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Catch up with what was written, so that it takes no priority back, and give elements another priority."""
        self.catch_up()
        super().set_priorities(index, priority, storage)

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give elements that this process replaced the default priority."""
        self.catch_up()
        super().on_update(index, storage)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Move the priorities along with the rows."""
        super().on_rotate(row, storage)
        self._seen_all()

    def reset(self) -> None:
        """Forget all priorities."""
        super().reset()
        self._seen = None

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Catch up, and return the state of a `PrioritizedSampler`."""
        self.catch_up()
        return super().save_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state that belongs to what the writer has counted by now."""
        super().load_state(state)
        self._seen_all()

    def _seen_all(self) -> None:
        self._seen = None if self._writer is None else (self._writer.write_count, self._writer.cursor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (WorkerSampler, ()) if get_spawning_popen() is not None else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_writer": None, "_storage": None}


class WorkerSampler(Sampler):
    """Stands for a `LearnerSampler` in the processes that write; SchemaError (a RuntimeError) if asked to draw."""

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Refuse."""
        raise SchemaError(f"a batch was to be drawn, but {_WITH_THE_LEARNER}", hint="sample there, or with sync=True")

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Refuse."""
        raise SchemaError(f"priorities were to be updated, but {_WITH_THE_LEARNER}", hint="update them there")
