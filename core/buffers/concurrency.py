"""Threads and processes: batches made ahead in threads, copies of a buffer in processes, and their random streams."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import torch
from torch.utils.data import get_worker_info

from ..errors import SchemaError, UsageError
from ..samplers.base import Sampler
from ..storages.base import Storage
from ..storages.write_log import Written
from ..transforms.base import Compose
from ..writers.base import Writer
from .cuda_streams import OnCallersStreams
from .expansion import ExpandedDraws
from .locks import Guard, SharedGuard, call_at_fork


@dataclass(slots=True)
class Draw:
    """The result of a sampler: index, info, and whether it is the last of an epoch.

    `rows` holds the rows, if they were read with the draw, and `written` what was written by then; None for a sampler
    that reads no rows. `size` is how many elements were asked for, of a part of another draw, and of one whose batch
    could not be made.
    """

    index: Any
    info: dict[Any, Any]
    last: bool = False
    rows: Any = field(default=None, compare=False, repr=False)
    parts: Sequence[tuple[int, Draw]] = ()
    """Of an ensemble: the draws of its members."""
    chances: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Random numbers of the draw, float64 `[n]` in [0, 1), for what is chosen when its rows are read."""
    written: Any = field(default=None, compare=False, repr=False)
    size: int | None = field(default=None, compare=False, repr=False)


class Prefetcher:
    """A queue of draws, up to `capacity` between calls, whose batches are made in as many threads.

    The queue does not extend beyond the end of an epoch. Threads start with the first draw. They do not exist in a
    forked child, which makes the batches again.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue: deque[tuple[Draw, Future[Any] | None]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Draw]:
        return (draw for draw, _ in self._queue)

    @property
    def newest(self) -> Draw | None:
        """The last draw of the queue."""
        return self._queue[-1][0] if self._queue else None

    def push(self, draw: Draw, make: Callable[[Draw], Any] | None) -> None:
        """Queue a draw and start making its batch; with None it is made when it is removed."""
        if make is None:
            self._queue.append((draw, None))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.capacity, thread_name_prefix="rbtool-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._queue.append((draw, self._pool.submit(OnCallersStreams(make), draw)))

    @property
    def oldest(self) -> tuple[Draw, Future[Any] | None]:
        """The first draw of the queue, with the future of its batch, None if no thread makes it."""
        return self._queue[0]

    def pop(self) -> None:
        """Remove the oldest draw."""
        self._queue.popleft()

    def clear(self) -> None:
        """Empty the queue and drop the batches that are being made."""
        while self._queue:
            _, future = self._queue.popleft()
            if future is not None:
                future.cancel()

    def finish(self, drawing: contextlib.AbstractContextManager[Any], timeout: float | None) -> None:
        """Wait for the batches that are being made, which stay in the queue, and end the threads; see `shutdown`."""
        with drawing:
            futures = [future for _, future in self._queue if future is not None]
        if waiting := wait(futures, timeout).not_done:
            raise TimeoutError(f"{len(waiting)} batches are still being made after {timeout} seconds")
        with drawing:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for future in futures:
            future.result()

    def restore(self, draws: Iterable[Draw]) -> None:
        """Replace the queue by these draws; their batches are made when they are removed."""
        self.clear()
        self._queue.extend((draw, None) for draw in draws)

    def after_fork(self) -> None:
        """Drop the threads of the parent process, and keep the draws."""
        self._pool = None
        self._queue = deque((draw, None) for draw, _ in self._queue)


# Copies in other processes --------------------------------------------------------------------------

Place = tuple[bytes, int | None]
"""A process, and its number if it is a worker of a `DataLoader`."""

_process = os.urandom(16)  # pids are not unique: the first process of every container is number 1
_inherited: tuple[int, torch.Generator] | None = None


def place() -> Place:
    """Return the current process."""
    worker = get_worker_info()
    return _process, None if worker is None else worker.id


def reseed(generator: torch.Generator) -> None:
    """Seed a generator from the entropy of the system."""
    generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)


def generator_of(seed: int) -> torch.Generator:
    """Return a generator with this seed; UsageError (a ValueError) for one that no generator takes."""
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed is {seed!r}, expected a number of 64 bits without sign")
    return torch.Generator().manual_seed(seed)


def branch(generator: torch.Generator, *key: int) -> None:
    """Seed a generator from its state and a key."""
    state = generator.get_state().cpu().numpy().tobytes()
    digest = hashlib.blake2b(state + repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)


def stand_in() -> torch.Generator | None:
    """Return a generator to use instead of torch's own; None if that can be used.

    A forked child has a copy of the parent's generator, so that all children would draw the same until they call
    `torch.manual_seed`, as workers of a `DataLoader` do.
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
    """Shares a buffer between processes, or keeps its copies independent.

    Rows in memory maps or shared memory are the same in all processes, with length, cursor and count. With any other
    rows a forked child has a copy of everything, and may not write if the buffer is `shared`.
    """

    _storage: Storage
    _sampler: Sampler
    _drawing: Sampler | ExpandedDraws
    """Draws the batches: the sampler, or what expands its draws."""
    _writer: Writer
    _transform: Compose
    _guard: Guard
    _prefetcher: Prefetcher | None
    _undelivered: list[Draw]
    """The draws whose batches could not be made, in their order."""
    _rng: torch.Generator | None
    _recipe: dict[str, Any] | None
    _unshared: bool
    """Whether several processes may write, but the rows are not in shared memory yet."""
    _cut_off: bool
    """Whether this is a forked child of a shared buffer with a copy of the rows."""
    unseeded = False
    """Whether the generator was not given: copies in other processes then draw other samples."""
    _place: Place
    """The process that drew the last batch, or that the generator was given in."""
    _sampling: threading.RLock
    """Held by one draw at a time."""
    _seen: Written | None = None
    """What was written when a sampler that reads rows last drew under the lock."""
    _copies = 0
    """The number of processes with a copy of this buffer."""
    _revision = 0
    _ended = False

    def start(self) -> Self:
        """Return this buffer, which runs in this process from the beginning; a `RayReplayBuffer` has it, too."""
        return self

    def client(self) -> Self:
        """Return this buffer, which needs no client in between."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether `shutdown` was not called."""
        return not self._ended

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait for the batches that are made ahead, up to `timeout` seconds, and end their threads.

        What raised in a thread is raised here; TimeoutError where they take longer. The elements stay, and the next
        batch starts threads again.
        """
        if self._prefetcher is not None:
            self._prefetcher.finish(self._sampling, timeout)
        self._ended = True

    @property
    def revision(self) -> object:
        """Another value after each exchange of a part or a lock."""
        return self._revision

    @property
    def shared(self) -> bool:
        """Whether several processes may write."""
        return isinstance(self._guard, SharedGuard)

    def share(self, shared: bool = True) -> Self:
        """Set whether several processes may write; returns this buffer. Call it before the other processes start.

        UsageError (a ValueError) for a buffer that prefetches, SchemaError (a RuntimeError) for a transform whose state
        changes with every write and cannot be shared.
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
            self._revision += 1
            self._unshared, self._storage.journal = False, None
            if shared:
                self._share_rows()
        return self

    def _share_rows(self) -> None:
        """Move the rows, if there are any, to shared memory; SchemaError in a process with a copy of them."""
        if self._cut_off:
            raise SchemaError(
                "this process has a copy of the rows, which the others do not see",
                hint="take a storage of memory maps or tensors, and write to it before the other processes start",
            )
        storage = self._storage
        if not storage.shared and hasattr(storage, "share") and getattr(storage, "initialized", True):
            storage.share()
        self._unshared = not storage.shared
        if isinstance(self._guard, SharedGuard) and not self._unshared:
            self._guard.protect(storage, [*storage.counters, *self._writer.counters])

    @property
    def guard(self) -> Guard:
        """Excludes writers, and reads rows of one instant."""
        return self._guard

    @property
    def draw_lock(self) -> threading.RLock:
        """Held by one draw, or change of the sampler, at a time."""
        return self._sampling

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude writers and draws inside the context."""
        with self._guard.hold(), self._sampling:
            yield

    # Random streams --------------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator | None:
        """The source of random numbers; None for torch's own generator."""
        return self._rng

    def settle(self, here: Place | None = None) -> None:
        """Before a draw, in a copy of a buffer: change to another random stream, unless a generator was given.

        A worker of a `DataLoader` always changes: with a generator, to its own branch of it. Draws made ahead are
        dropped, and a new epoch starts. `here` is the current process, if it is known.
        """
        here = place() if here is None else here
        if here != self._place:
            self.move_to(here, begins_epoch=self._change_stream())
        if self._rng is None:
            generator = None if _inherited is None else stand_in()
            if generator is not self._sampler.generator:
                self._set_generators(generator)

    def _change_stream(self) -> bool:
        """Change to the random stream of this process; return whether its draws differ from those of the others."""
        worker, generator = get_worker_info(), self._rng
        if worker is None and generator is not None:
            if not self.unseeded:
                return False
            reseed(generator)
        elif worker is not None and generator is not None:
            branch(generator, worker.id, self._copies, *([worker.seed] if self.unseeded else []))
        return True

    def move_to(self, here: Place, *, begins_epoch: bool) -> None:
        """Draw in another process from now on; the random stream was changed before, if it has to be."""
        self._place = here
        if begins_epoch:
            self._sampler.begin_epoch()
            self.forget_drawn()

    def _adopt(self, generator: torch.Generator | None) -> None:
        """Set a given generator; in a worker of a `DataLoader`, as a branch of it."""
        self._rng, self.unseeded, self._place = generator, False, place()
        worker = get_worker_info()
        if generator is not None and worker is not None:
            branch(generator, worker.id)

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Draw from another generator inside the context; the buffer's own does not advance."""
        with self._sampling:
            self.settle()
            own, self._rng = self._rng, generator
            self._set_generators(generator)
            try:
                yield
            finally:
                self._rng = own
                self._set_generators(own)

    def _set_generators(self, generator: torch.Generator | None) -> None:
        """Set the generator of all parts."""
        self._storage.generator = self._sampler.generator = self._writer.generator = generator
        self._transform.set_rng(generator)

    def forget_drawn(self) -> None:
        """Drop the draws that were not delivered yet."""

    def _before_fork(self) -> None:
        self._copies += 1

    def _after_fork(self) -> None:
        self._sampling = threading.RLock()
        self._revision += 1
        self._guard.after_fork()
        if self._prefetcher is not None:
            self._prefetcher.after_fork()
        if self._recipe is None and not self._storage.shared:
            # This process has a copy of the rows: its writes must not move the parent's cursor.
            self._cut_off = self.shared
            self._writer.unshare()
            if (generations := self._storage.generations) is not None:
                self._storage.generations = generations.apart()

    def __getstate__(self) -> dict[str, Any]:
        generator = self._rng
        self._copies += get_spawning_popen() is not None
        own = {"_sampling", "_listener", "_rng", "_prefetcher", "_seen", "_drawing"}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        with self._sampling:
            # As bytes: the descriptor of a tensor is closed before a spawned child reads it.
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
        call_at_fork(self, self._before_fork, self._after_fork)
        if self._recipe is None:
            self._writer.register_storage(self._storage)
            self._connect()
            if self.shared:
                self._cut_off = False
                self._share_rows()

    def _connect(self) -> None:
        """Connect the parts."""
