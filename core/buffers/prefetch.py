"""Batches that are made ahead, in threads, of indices that were drawn in the caller's thread, in its order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Draw", "Prefetcher"]


@dataclass(slots=True)
class Draw:
    """What a sampler chose: the index, what else it said, and whether an epoch ends with it.

    `rows` holds what lies there, where it had to be read at the instant of the draw.
    """

    index: Any
    info: dict[Any, Any]
    last: bool = False
    rows: Any = field(default=None, compare=False, repr=False)


class Prefetcher:
    """Keeps draws in a queue, up to `capacity` between calls, and makes their batches in as many threads.

    The queue never reaches beyond the end of an epoch. Threads start with the first draw, and do not survive a
    fork: a child makes the batches anew.
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
        """The draw that was queued last."""
        return self._queue[-1][0] if self._queue else None

    def push(self, draw: Draw, make: Callable[[Draw], Any]) -> None:
        """Queue a draw and start making its batch."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.capacity, thread_name_prefix="rbtool-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._queue.append((draw, self._pool.submit(make, draw)))

    def pop(self) -> tuple[Draw, Future[Any] | None]:
        """Take the oldest draw out, with what is to become its batch; None where no thread was asked yet."""
        return self._queue.popleft()

    def clear(self) -> None:
        """Forget the queue; batches that are being made go nowhere."""
        while self._queue:
            _, future = self._queue.popleft()
            if future is not None:
                future.cancel()

    def restore(self, draws: Iterable[Draw]) -> None:
        """Put these draws in place of the queue; their batches are made when they are taken out."""
        self.clear()
        self._queue.extend((draw, None) for draw in draws)

    def after_fork(self) -> None:
        """Forget the threads of the parent process, and keep what was drawn."""
        self._pool = None
        self._queue = deque((draw, None) for draw, _ in self._queue)
