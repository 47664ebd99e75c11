"""Calls that several threads make together, and how many threads are worth their start."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for_memory() -> int:
    """How many threads are worth their start where bytes move in memory or are hashed: more find the memory busy."""
    return min(usable_cores(), 4)


def started(work: Callable[[], None], name: str) -> Thread | None:
    """A thread at work; None where a limit on threads, or on memory, which counts their stacks, allows no more."""
    thread = Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def run_together(calls: Sequence[Callable[[], None]], at_once: int) -> None:
    """Make all calls in this thread and up to `at_once` - 1 others, where they can be started; raise what one raises.

    No call is under way afterwards. Interrupted, or after an error, it makes no more of them.
    """
    waiting, errors, threads = deque(calls), list[BaseException](), list[Thread]()

    def work() -> None:
        while not errors:
            try:
                call = waiting.popleft()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:
                errors.append(error)

    try:
        for _ in range(min(at_once, len(calls)) - 1):
            thread = Thread(target=work, name="rbtool-together")
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # a limit on threads, or on memory, which counts their stacks
                break
            threads.append(thread)
        work()
    finally:
        waiting.clear()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
