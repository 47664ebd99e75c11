"""Runs calls in several threads; determines useful numbers of threads, and the available memory."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Thread

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for_memory() -> int:
    """Return how many threads to use to copy or hash bytes: at most 4, as memory bandwidth limits more of them."""
    return min(usable_cores(), 4)


def available_memory() -> int | None:
    """Return the bytes that this process and its page cache may use; None if the system does not say.

    That is the available memory of the machine, or the limit of a control group if it is lower.
    """
    found = [limit for limit in (_system(), *_groups()) if limit is not None]
    return min(found) if found else None


def _system() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _groups() -> Iterable[int]:
    """Yield the memory limits of the control groups (version 2 and 1) of this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                yield int((place / name).read_text(encoding="ascii"))
            if place == root:
                break


def started(work: Callable[[], None], name: str) -> Thread | None:
    """Start a daemon thread and return it; None if a limit on threads, or on memory for their stacks, is reached."""
    thread = Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def run_together(calls: Sequence[Callable[[], None]], at_once: int) -> None:
    """Run all calls in this thread and up to `at_once` - 1 others; raise the first error.

    After an error or an interruption no further calls are started. All calls have ended when the function returns.
    Fewer threads are used if the system does not allow as many.
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
            except (RuntimeError, MemoryError):  # a limit on threads, or on memory for their stacks
                break
            threads.append(thread)
        work()
    finally:
        waiting.clear()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
