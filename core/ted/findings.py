"""What a rule of TED is: the rows that it sees, and the findings that it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from .places import Places
from .rule_table import RULE_BY_ID, Severity
from .schema import Field, Key

_Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: the rule that found it, how bad it is, what was found and where.

    `steps` are all steps concerned, as half-open ranges, and `episodes` the numbers of all episodes concerned, where
    the rule is about such.
    """

    rule: str
    name: str
    severity: Severity
    message: str
    steps: Sequence[tuple[int, int]] = ()
    episodes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive TED rows `[start, start + n)` and where the episodes among them begin.

    `first[i]` is whether row i begins an episode, `last[i]` whether it ends one, `episode[i]` is the source's
    number of its episode and `explicit[i]` whether its next rows are stored explicitly.
    """

    start: int
    columns: Mapping[Key, _Array]
    first: _Array
    last: _Array
    episode: _Array
    explicit: _Array

    def __len__(self) -> int:
        return len(self.first)

    def place(self, row: int) -> str:
        """Name one of these rows for a reader."""
        return f"step {self.start + row:,}, episode {int(self.episode[row])}"


class Tally:
    """Counts rows with a problem and remembers where they are: 16 bytes a range of steps, 8 an episode."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self._ranges: list[_Array] = []
        self._episodes: list[_Array] = []

    def add(self, rows: Rows, wrong: _Array, index: _Array | None = None) -> None:
        """Count the true entries of `wrong`, which covers all `rows`, or those at `index`, in ascending order."""
        if not wrong.any():
            return
        where = np.flatnonzero(wrong) if index is None else index[wrong]
        self.first = self.first or rows.place(int(where[0]))
        self.count += len(where)
        episodes = rows.episode[where]
        self._episodes.append(episodes[np.append(True, episodes[1:] != episodes[:-1])].astype(np.int64))
        steps = where + rows.start
        edges = np.flatnonzero(np.diff(steps) != 1)
        self._ranges.append(np.column_stack((steps[np.append(0, edges + 1)], steps[np.append(edges, -1)] + 1)))

    @property
    def places(self) -> dict[str, Any]:
        """The `steps` and `episodes` of a finding."""
        return {"steps": Places(_joined(self._ranges)), "episodes": Places(_distinct(self._episodes))}


def _joined(parts: Sequence[_Array]) -> _Array:
    """Return ranges `[N, 2]` in ascending order, those that touch or overlap as one."""
    if not parts:
        return np.zeros((0, 2), np.int64)
    ranges = np.concatenate(parts)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]  # a rule may come back to steps that it has seen
    reached = np.maximum.accumulate(ranges[:, 1])
    starts = np.flatnonzero(np.append(True, ranges[1:, 0] > reached[:-1]))
    return np.column_stack((ranges[starts, 0], reached[np.append(starts[1:], len(ranges)) - 1]))


def _distinct(parts: Sequence[_Array]) -> _Array:
    """Return every number once, in the order in which they first occur."""
    numbers = np.concatenate([np.zeros(0, np.int64), *parts])
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


class Rule(ABC):
    """Reads all rows once, in order, and reports problems. `rule_id` is that of its entry in `rule_table`."""

    rule_id: ClassVar[str]

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        self.fields = tuple(fields)
        self.steps = steps

    def see(self, rows: Rows) -> None:
        """Take the next rows."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Report, after the last rows."""

    def report(self, severity: Severity, message: str, tally: Tally | None = None) -> Finding:
        """Make a finding of this rule; `tally` counts the steps concerned."""
        places = {} if tally is None else tally.places
        return Finding(*RULE_BY_ID[self.rule_id].named, severity, message, **places)

    def report_first(self, severity: Severity, message: str, tally: Tally) -> list[Finding]:
        """Make a finding that names the first of the steps that `tally` counts; none where it counts none."""
        return [self.report(severity, f"{message} (first: {tally.first})", tally)] if tally.count else []

    def share(self, tally: Tally) -> str:
        """Format the number of steps that `tally` counts, out of all."""
        return f"{tally.count:,} of {self.steps:,} steps"
