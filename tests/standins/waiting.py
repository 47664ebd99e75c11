"""How long tests wait: until what they wait for happens, however slow the machine is.

A limit is only there to end a hang. It is the same everywhere, and long: a machine with much else to do may be twenty
times slower than an idle one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["HANG", "run_threads", "wait_until"]

HANG = 600.0
"""Seconds after which something hangs."""


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Return as soon as `happened()` is true; AssertionError, which names `what`, where it hangs."""
    ends = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < ends, f"{what} did not happen in {HANG:g} s"
        time.sleep(0.01)


def run_threads(*jobs: Callable[[], object]) -> None:
    """Run each job in a thread of its own; return when all have ended, raise the first error, and do not hang."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
