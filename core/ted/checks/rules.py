"""The contract of a rule, what it sees and what it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ..keys import Key
from ..schema import Field

__all__ = ["Finding", "Rows", "Rule", "Severity", "Tally", "ends_text", "steps_text"]

Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: the rule that found it, how bad it is, what was found and where."""

    rule: str
    name: str
    severity: Severity
    message: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive TED rows `[start, start + n)` and where the episodes among them begin.

    `first[i]` tells whether row i begins an episode, `last[i]` whether it ends one, `episode[i]` is the source's
    number of its episode and `explicit[i]` whether the episode table says that its next rows do not follow.
    """

    start: int
    columns: Mapping[Key, np.ndarray[Any, Any]]
    first: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]
    episode: np.ndarray[Any, Any]
    explicit: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.first)

    def place(self, row: int) -> str:
        """Name one of these rows for a reader."""
        return f"step {self.start + row:,}, episode {int(self.episode[row])}"


class Tally:
    """Counts rows with a problem and remembers where the first one is."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add(self, rows: Rows, wrong: np.ndarray[Any, Any], index: np.ndarray[Any, Any] | None = None) -> None:
        """Count the true entries of `wrong`, which speaks of all `rows`, or of those at `index`."""
        if not wrong.any():
            return
        at = int(wrong.argmax())
        self.first = self.first or rows.place(at if index is None else int(index[at]))
        self.count += int(wrong.sum())


class Rule(ABC):
    """Looks at all rows once, in order, and says what is wrong. `rule_id` and `name` never change meaning."""

    rule_id: ClassVar[str]
    name: ClassVar[str]

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        self.fields = tuple(fields)
        self.steps = steps

    def see(self, rows: Rows) -> None:
        """Take the next rows."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Report, after the last rows."""

    def report(self, severity: Severity, message: str) -> Finding:
        """Make a finding of this rule."""
        return Finding(self.rule_id, self.name, severity, message)


def ends_text(count: int) -> str:
    """Say that so many episodes end."""
    return f"{count:,} episode{'s end' if count > 1 else ' ends'}"


def steps_text(count: int, steps: int) -> str:
    """Say how many of how many steps."""
    return f"{count:,} of {steps:,} steps"
