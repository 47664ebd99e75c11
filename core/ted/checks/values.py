"""What the numbers themselves give away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import as_numbers, is_floating
from ..keys import NEXT, Key
from ..schema import Field
from .rules import Finding, Rows, Rule, Tally, steps_text

__all__ = ["AllZeroRule", "NotFiniteRule", "ZeroVarianceRule"]

_Array = np.ndarray[Any, Any]


class NotFiniteRule(Rule):
    """No NaN or infinity: an error in what training reads, a warning elsewhere."""

    rule_id = "TED007"
    name = "NaN and infinity"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._tallies: dict[Key, Tally] = {field.key: Tally() for field in fields if is_floating(field.dtype)}

    def see(self, rows: Rows) -> None:
        """Count the rows with a number that is not finite."""
        for field in self.fields:
            if field.key in self._tallies:
                numbers = as_numbers(rows.columns[field.key], field.dtype).reshape(len(rows), -1)
                self._tallies[field.key].add(rows, ~np.isfinite(numbers).all(1))

    def findings(self) -> list[Finding]:
        """Report each leaf."""
        found = []
        for field in self.fields:
            tally = self._tallies.get(field.key)
            if tally is not None and tally.count:
                severe = field.role in {"observation", "action", "reward"}
                text = (
                    f"{field.name} is NaN or infinite in {steps_text(tally.count, self.steps)} (first: {tally.first})"
                )
                found.append(self.report("error" if severe else "warning", text, tally))
        return found


class AllZeroRule(Rule):
    """Not every number is zero: some importers allocate and never copy."""

    rule_id = "TED008"
    name = "all zero"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._zero = [field for field in fields if field.role in {"observation", "action"} and field.key[0] != NEXT]
        self._watched = len(self._zero)

    def see(self, rows: Rows) -> None:
        """Strike the leaves in which something is not zero."""
        self._zero = [field for field in self._zero if not rows.columns[field.key].any()]

    def findings(self) -> list[Finding]:
        """An error if every leaf is zero, a warning for some."""
        if not self.steps or not self._zero:
            return []
        if len(self._zero) == self._watched > 1:
            return [self.report("error", "every observation and action is zero: the data were never written")]
        names = ", ".join(field.name for field in self._zero)
        return [self.report("warning", f"{names} {'is' if len(self._zero) == 1 else 'are'} zero everywhere")]


class ZeroVarianceRule(Rule):
    """Elements of observations and actions that never change; dividing by their deviation gives NaN."""

    rule_id = "TED009"
    name = "zero variance"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        roles = {"observation", "action"}
        self._watched = [field for field in fields if field.role in roles and field.key[0] != NEXT]
        self._first: dict[Key, _Array] = {}
        self._same: dict[Key, _Array] = {}

    def see(self, rows: Rows) -> None:
        """Compare every row with the first row of all."""
        for field in self._watched:
            values = rows.columns[field.key]
            if len(values):
                first = self._first.setdefault(field.key, values[0].copy())
                same = (values == first).all(0)
                self._same[field.key] = self._same.get(field.key, np.True_) & same

    def findings(self) -> list[Finding]:
        """Report each leaf with the elements that never change."""
        found = []
        for field in self._watched if self.steps > 1 else ():
            same = np.asarray(self._same.get(field.key, np.False_))
            if same.any():
                found.append(self.report("warning", f"{_elements(field, same)} never changes"))
        return found


def _elements(field: Field, same: _Array) -> str:
    """Name the elements: `observation[27:29]`, or a count where there are many dimensions or runs."""
    if same.all():
        return field.name
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same.reshape(-1), [False])).astype(np.int8)))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if same.ndim > 1 or len(runs) > 8:
        return f"{int(same.sum()):,} of {same.size:,} elements of {field.name}: each"
    parts = (str(start) if stop == start + 1 else f"{start}:{stop}" for start, stop in runs)
    return f"{field.name}[{', '.join(parts)}]"
