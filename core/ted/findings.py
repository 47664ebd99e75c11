"""What a rule of TED is: the rows that it sees, and the findings that it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from .schema import Field, Key

_Array: TypeAlias = np.ndarray[Any, Any]
Severity: TypeAlias = Literal["error", "warning"]


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
    steps: tuple[tuple[int, int], ...] = ()
    episodes: tuple[int, ...] = ()


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
    """Counts rows with a problem and remembers where they are."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self._ranges: list[tuple[int, int]] = []
        self._episodes: dict[int, None] = {}

    def add(self, rows: Rows, wrong: _Array, index: _Array | None = None) -> None:
        """Count the true entries of `wrong`, which covers all `rows`, or those at `index`."""
        if not wrong.any():
            return
        at = int(wrong.argmax())
        self.first = self.first or rows.place(at if index is None else int(index[at]))
        self.count += int(wrong.sum())
        where = np.flatnonzero(wrong) if index is None else index[wrong]
        self._episodes.update(dict.fromkeys(rows.episode[where].tolist()))
        steps = where + rows.start
        edges = np.flatnonzero(np.diff(steps) != 1)
        first, last = steps[np.append(0, edges + 1)].tolist(), steps[np.append(edges, -1)].tolist()
        if self._ranges and self._ranges[-1][1] == first[0]:
            first[0] = self._ranges.pop()[0]
        self._ranges += [(start, stop + 1) for start, stop in zip(first, last, strict=True)]

    @property
    def places(self) -> dict[str, Any]:
        """The `steps` and `episodes` of a finding."""
        steps: list[tuple[int, int]] = []
        for start, stop in sorted(self._ranges):  # a rule may come back to steps that it has seen
            if steps and start <= steps[-1][1]:
                steps[-1] = steps[-1][0], max(stop, steps[-1][1])
            else:
                steps.append((start, stop))
        return {"steps": tuple(steps), "episodes": tuple(self._episodes)}


class Rule(ABC):
    """Reads all rows once, in order, and reports problems. `rule_id` and `name` never change meaning."""

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

    def report(self, severity: Severity, message: str, tally: Tally | None = None) -> Finding:
        """Make a finding of this rule; `tally` counts the steps concerned."""
        return Finding(self.rule_id, self.name, severity, message, **({} if tally is None else tally.places))

    def report_first(self, severity: Severity, message: str, tally: Tally) -> list[Finding]:
        """Make a finding that names the first of the steps that `tally` counts; none where it counts none."""
        return [self.report(severity, f"{message} (first: {tally.first})", tally)] if tally.count else []

    def share(self, tally: Tally) -> str:
        """Format the number of steps that `tally` counts, out of all."""
        return f"{tally.count:,} of {self.steps:,} steps"
