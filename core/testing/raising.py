"""What an act raises, for suites that must not need pytest."""

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
