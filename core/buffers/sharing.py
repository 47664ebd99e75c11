"""Copies of a buffer in other processes: forked, spawned, or unpickled; and their random streams."""

from __future__ import annotations

import hashlib
import os
import threading
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import torch
from torch.utils.data import get_worker_info

from ..errors import SchemaError, UsageError
from ..samplers import Sampler
from ..storages import Storage
from ..transforms import Compose
from ..writers import Writer
from .locks import Guard, SharedGuard, reset_after_fork
from .prefetch import Prefetcher

__all__ = ["Place", "Sharing", "branch", "place", "reseed", "stand_in"]

Place = tuple[bytes, int | None]
"""A process, and the number that a `DataLoader` gave it if it is one of its workers."""

_process = os.urandom(16)  # pids come again: the first process of every container has number 1
_inherited: tuple[int, torch.Generator] | None = None


def place() -> Place:
    """Return where this runs."""
    worker = get_worker_info()
    return _process, None if worker is None else worker.id


def reseed(generator: torch.Generator) -> None:
    """Draw from another stream from now on, of the system's entropy."""
    generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)


def branch(generator: torch.Generator, *key: int) -> None:
    """Draw from another stream from now on, which the state and the key determine."""
    state = generator.get_state().cpu().numpy().tobytes()
    digest = hashlib.blake2b(state + repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)


def stand_in() -> torch.Generator | None:
    """Return what to draw from in place of torch's own generator; None where that one may be used.

    A forked child has a copy of the parent's, so that siblings would draw alike until one of them calls
    `torch.manual_seed`, as the workers of a `DataLoader` do.
    """
    if _inherited is None or torch.initial_seed() != _inherited[0]:
        return None
    return _inherited[1]


def _after_fork() -> None:
    global _process, _inherited
    _process = os.urandom(16)
    generator = torch.Generator()
    reseed(generator)
    _inherited = torch.initial_seed(), generator


os.register_at_fork(after_in_child=_after_fork)


class Sharing:
    """Shares a buffer, or sees to it that copies do not disturb each other.

    Rows that lie in memory maps or in shared memory are the same in all processes, and so are length, cursor and
    count then. Elsewhere, a forked child has a copy of everything; where `shared=True` promised otherwise, it may not
    write.
    """

    _storage: Storage
    _sampler: Sampler
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
    _unseeded = False
    """Whether the generator has no chosen seed: copies in other processes then draw other samples."""
    _place: Place
    """Where the last batch was drawn, or the generator was given."""
    _copies = 0
    """How many processes got a copy of this buffer."""

    @property
    def shared(self) -> bool:
        """Whether several processes may write."""
        return isinstance(self._guard, SharedGuard)

    def share(self, shared: bool = True) -> Self:
        """Let several processes write, or stop that; returns this buffer. Call it before the other processes start.

        Raises UsageError (a ValueError) for a buffer that prefetches, and SchemaError (a RuntimeError) where a
        transform changes its state with every write and cannot share it.
        """
        if shared == self.shared:
            return self
        if shared and self._prefetcher is not None:
            raise UsageError("a buffer that prefetches cannot be shared: threads do not cross processes")
        if shared:
            self._transform.share_memory_()
        else:
            self._transform.shared = False
        with self._guard:
            self._guard = SharedGuard() if shared else Guard()
            self._unshared = False
            if shared:
                self._share_rows()
        return self

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

    # Random streams --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Before a draw: leave the stream of the process that this buffer was copied from, unless a seed was given.

        A worker of a `DataLoader` leaves it in any case: of a seed, each worker gets a stream of its own. What was
        drawn ahead belongs to the other process, and an epoch begins anew.
        """
        here = place()
        if here != self._place:
            self._arrive(here)
        if self._rng is None and (generator := stand_in()) is not self._sampler.generator:
            self._hand_on(generator)

    def _arrive(self, here: Place) -> None:
        self._place = here
        worker, generator = get_worker_info(), self._rng
        if worker is None and generator is not None:
            if not self._unseeded:
                return
            reseed(generator)
        elif worker is not None and generator is not None:
            branch(generator, worker.id, self._copies, *([worker.seed] if self._unseeded else []))
        self._sampler.begin_epoch()
        self._forget_drawn()

    def _adopt(self, generator: torch.Generator | None) -> None:
        """Take a generator that was given here, which in a worker of a `DataLoader` gets a stream of its own."""
        self._rng, self._unseeded, self._place = generator, False, place()
        worker = get_worker_info()
        if generator is not None and worker is not None:
            branch(generator, worker.id)

    def _hand_on(self, generator: torch.Generator | None) -> None:
        """Have all parts draw from this generator."""
        self._storage.generator = self._sampler.generator = self._writer.generator = generator
        self._transform.set_rng(generator)

    def _forget_drawn(self) -> None:
        """Forget what was drawn and not delivered yet."""

    def _before_fork(self) -> None:
        self._copies += 1

    def _after_fork(self) -> None:
        self._sampling = threading.RLock()
        self._guard.after_fork()
        if self._prefetcher is not None:
            self._prefetcher.after_fork()
        if self._recipe is None and not self._storage.shared:
            # This process has rows of its own now: where it writes next must not move the parent's cursor.
            self._cut_off = self.shared
            self._writer.unshare()
            if (generations := self._storage.generations) is not None:
                self._storage.generations = generations.apart()

    def __getstate__(self) -> dict[str, Any]:
        generator = self._rng
        self._copies += get_spawning_popen() is not None
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
