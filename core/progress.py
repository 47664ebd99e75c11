"""The progress interface of long operations, and safe text for terminals. The command line draws it."""

from __future__ import annotations

import re
from typing import Protocol

CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)
"""Control characters, ends of lines, and what changes the direction of text or is not seen at all."""


class Progress(Protocol):
    """Receives stages: each has a label (`converting`), a total (None if unknown) and a unit (`steps`, `bytes`)."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage; the one before it is over."""

    def advance(self, amount: int) -> None:
        """Report so many more units done."""

    def done(self, remark: str = "") -> None:
        """End the stage."""

    def note(self, text: str) -> None:
        """Show the user a message that is not an error."""


class Silent:
    """Progress that is not shown."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def done(self, remark: str = "") -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


def readable_size(count: float) -> str:
    """Write bytes in decimal units: `5.4 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop always returns")


def clean(text: str) -> str:
    """Make control characters visible: names and messages of data must not steer a terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
