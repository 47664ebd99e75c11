"""The error that a call raises, for suites that must not depend on pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(act: Callable[[], Any]) -> Exception | None:
    """Return the error that `act` raises, or None."""
    try:
        act()
    except Exception as error:
        return error
    return None
