"""How long tests wait: until what they wait for happens, however slow the machine is.

A limit is only there to end a hang. It is the same everywhere, and long: a machine with much else to do may be twenty
times slower than an idle one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["HANG", "wait_until"]

HANG = 600.0
"""Seconds after which something hangs."""


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Return as soon as `happened()` is true; AssertionError, which names `what`, where it hangs."""
    ends = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < ends, f"{what} did not happen in {HANG:g} s"
        time.sleep(0.01)
