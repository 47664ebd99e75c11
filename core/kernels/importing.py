"""Imports of compiled code, which make numba read its own long lists."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python from looking for garbage inside, which takes half of the time that the first use of numba takes.

    There is none: numba makes many objects that stay, and beside those of torch all are looked at again and again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
