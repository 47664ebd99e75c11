"""Threads that fetch shards in the background, in the order in which they were asked for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Fetchers:
    """Up to `limit` threads that run what is submitted. They are daemons: a process that ends does not wait for them.

    What a thread leaves half done then is what a killed process leaves.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((future, job))
        if len(self._threads) < self._limit:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="rbtool-stream", daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def end(self, *, wait: bool) -> None:
        """Cancel what did not start, and end the threads; `wait` for what they do."""
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._jobs.get_nowait()
                if left is not None:
                    left[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _work(jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (taken := jobs.get()) is not None:
        future, job = taken
        if future.set_running_or_notify_cancel():
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del future, job, taken  # the stream, which they belong to, can end meanwhile
