"""Imports of compiled code without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which takes half of the time of the first use of numba.

    It finds nothing there: numba makes many long-lived objects, and each collection visits them and those of torch.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
