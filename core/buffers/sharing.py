"""What becomes of a buffer in other processes: forked, spawned, or unpickled."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..errors import SchemaError, UsageError
from ..storages import Counter, Storage
from ..transforms import Compose
from ..writers import Writer
from .locks import Guard, SharedGuard, reset_after_fork
from .prefetch import Prefetcher

__all__ = ["Sharing"]


class Sharing:
    """Shares a buffer, or sees to it that copies do not disturb each other.

    Rows that lie in memory maps or in shared memory are the same in all processes, and so are length, cursor and
    count then. Elsewhere, a forked child has a copy of everything; where `shared=True` promised otherwise, it may not
    write.
    """

    _storage: Storage
    _writer: Writer
    _transform: Compose
    _guard: Guard
    _prefetcher: Prefetcher | None
    _rng: torch.Generator | None
    _recipe: dict[str, Any] | None
    _unshared: bool
    """Whether several processes may write, but the rows are not yet where they see them."""
    _cut_off: bool
    """Whether this is a forked child with rows of its own that was to share them."""

    @property
    def shared(self) -> bool:
        """Whether several processes may write."""
        return isinstance(self._guard, SharedGuard)

    def share(self, shared: bool = True) -> None:
        """Let several processes write, or stop that; call it before the other processes start.

        Raises UsageError (a ValueError) for a buffer that prefetches, and SchemaError (a RuntimeError) where a
        transform changes its state with every write and cannot share it.
        """
        if shared == self.shared:
            return
        if shared and self._prefetcher is not None:
            raise UsageError("a buffer that prefetches cannot be shared: threads do not cross processes")
        if shared:
            self._transform.share_memory_()
        with self._guard:
            self._guard = SharedGuard() if shared else Guard()
            self._unshared = False
            if shared:
                self._share_rows()

    def _share_rows(self) -> None:
        """Move the rows to where other processes see them, as soon as there are any; before a write, see who may."""
        if self._cut_off:
            raise SchemaError(
                "this process has a copy of the rows, which the others do not see",
                hint="take a storage of memory maps or tensors, and write to it before the other processes start",
            )
        storage = self._storage
        if not storage.shared and hasattr(storage, "share") and getattr(storage, "initialized", True):
            storage.share()
        self._unshared = not storage.shared

    def _after_fork(self) -> None:
        self._sampling = threading.RLock()
        self._guard.after_fork()
        if self._prefetcher is not None:
            self._prefetcher.after_fork()
        if self._recipe is None and not self._storage.shared:
            # This process has rows of its own now: where it writes next must not move the parent's cursor.
            writer, self._cut_off = self._writer, self.shared
            writer._cursor_counter = Counter(writer._cursor)
            writer._write_counter = Counter(writer._write_count)

    def __getstate__(self) -> dict[str, Any]:
        generator = self._rng
        own = {"_sampling", "_ear", "_rng", "_prefetcher"}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        with self._sampling:
            # As bytes: a tensor would reach a spawned child by a descriptor that is closed before it is read.
            saved = None if generator is None else (generator.get_state().numpy().tobytes(), str(generator.device))
            state["_rng_state"] = saved
            state["_queue"] = None if self._prefetcher is None else (self._prefetcher.capacity, list(self._prefetcher))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rng_state, queue = state.pop("_rng_state"), state.pop("_queue")
        self.__dict__.update(state)
        self._sampling = threading.RLock()
        self._rng = None if rng_state is None else torch.Generator(rng_state[1])
        if self._rng is not None:
            self._rng.set_state(torch.frombuffer(bytearray(rng_state[0]), dtype=torch.uint8))
        self._prefetcher = None
        if queue is not None:
            self._prefetcher = Prefetcher(queue[0])
            self._prefetcher.restore(queue[1])
        reset_after_fork(self)
        if self._recipe is None:
            self._writer.register_storage(self._storage)
            self._connect()
            if self.shared:
                self._cut_off = False
                self._share_rows()

    def _connect(self) -> None:
        """Tie the parts together."""
