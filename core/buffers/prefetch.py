"""Batches made ahead in threads, from indices drawn in the caller's thread."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Draw:
    """The result of a sampler: index, info, and whether it is the last of an epoch.

    `rows` holds the rows, if the sampler read them.
    """

    index: Any
    info: dict[Any, Any]
    last: bool = False
    rows: Any = field(default=None, compare=False, repr=False)


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

    def push(self, draw: Draw, make: Callable[[Draw], Any]) -> None:
        """Queue a draw and start making its batch."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.capacity, thread_name_prefix="rbtool-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._queue.append((draw, self._pool.submit(make, draw)))

    def pop(self) -> tuple[Draw, Future[Any] | None]:
        """Remove the oldest draw; return it with the future of its batch, None if no thread makes it."""
        return self._queue.popleft()

    def clear(self) -> None:
        """Empty the queue and drop the batches that are being made."""
        while self._queue:
            _, future = self._queue.popleft()
            if future is not None:
                future.cancel()

    def restore(self, draws: Iterable[Draw]) -> None:
        """Replace the queue by these draws; their batches are made when they are removed."""
        self.clear()
        self._queue.extend((draw, None) for draw in draws)

    def after_fork(self) -> None:
        """Drop the threads of the parent process, and keep the draws."""
        self._pool = None
        self._queue = deque((draw, None) for draw, _ in self._queue)
