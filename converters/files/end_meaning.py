"""Formats whose one flag for the end of an episode is the same for a terminal state and a time limit.

The option `ends` (`--ends` of the command line) states which of the two the flag means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UsageError

_CHOICES = ("terminated", "truncated")


@dataclass(frozen=True, slots=True)
class EndMeaning:
    """Whether ends are terminal states, or time limits; `note` is a sentence on it, "" where the user stated it."""

    terminated: bool
    note: str = ""


def meaning_of_ends(options: Mapping[str, Any], default: str, why: str) -> EndMeaning:
    """Return what the ends of episodes are: what `options["ends"]` states, else `default`, which `why` explains.

    `why` is the start of the note: `dones are set at terminal states and at time limits alike, and RLlib …`. Raises
    UsageError for another value than `terminated` and `truncated`.
    """
    asked = options.get("ends")
    if asked is None:
        other = next(choice for choice in _CHOICES if choice != default)
        return EndMeaning(default == "terminated", f"{why}: taken as {default} (--ends {other} takes them otherwise)")
    if asked not in _CHOICES:
        raise UsageError(f"--ends is {asked!r}, expected {' or '.join(_CHOICES)}")
    return EndMeaning(asked == "terminated")


def refuse_ends(path: Path, options: Mapping[str, Any], why: str) -> None:
    """Raise UsageError for a file that states how each episode ends, if `ends` is given all the same."""
    if options.get("ends") is not None:
        raise UsageError(f"{path} {why}", hint="leave out --ends")
