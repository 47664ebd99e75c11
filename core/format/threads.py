"""Calls that several threads make together, how many threads are worth their start, and the memory there is."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Thread

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for_memory() -> int:
    """How many threads are worth their start where bytes move in memory or are hashed: more find the memory busy."""
    return min(usable_cores(), 4)


def available_memory() -> int | None:
    """Return the bytes that this process and its page cache may use: the machine's, or its control group's if that is
    less.

    None if the system does not say.
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
