"""Times as they are written into documents."""

from __future__ import annotations

import datetime

__all__ = ["written_time"]


def written_time(seconds: float | None = None) -> str:
    """Write a time, now or so many seconds after the start of 1970, in UTC to the second: ISO 8601."""
    utc = datetime.UTC
    time = datetime.datetime.now(utc) if seconds is None else datetime.datetime.fromtimestamp(seconds, utc)
    return time.isoformat(timespec="seconds")
