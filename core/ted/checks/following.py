"""Whether the observation after one step is the one before the next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..keys import NEXT, Key, key_name
from ..schema import Field, state_keys
from .rules import Finding, Rows, Rule, Tally, ends_text, steps_text

__all__ = ["AcrossRule", "ContinuityRule", "rows_equal"]

_STEPS_TO_NEXT: Key = ("steps_to_next_obs",)
"""The leaf that n-step data have: how many steps ahead `next` is."""


def rows_equal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each row whether two arrays have the same bits, so that NaN equals NaN; bool `[n]`."""
    rows = len(one)
    if not rows or not one[0].size:
        return np.ones(rows, bool)
    width = one[0].nbytes
    word = next(size for size in (8, 4, 2, 1) if width % size == 0)  # few wide comparisons instead of many narrow ones
    bits = [np.ascontiguousarray(array).reshape(rows, -1).view(f"u{word}") for array in (one, other)]
    same = bits[0] == bits[1]
    if same.size - np.count_nonzero(same) > rows:
        return np.asarray(same.all(1))
    equal = np.ones(rows, bool)  # few differences are looked up: to reduce many short rows takes four times as long
    equal[np.flatnonzero(~same) // same.shape[1]] = False
    return equal


class _FollowingRule(Rule):
    """Compares each row's `next` with the row after it, for every state leaf, over the borders of chunks too."""

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self.keys = state_keys(fields)
        self._before: tuple[Rows, dict[Key, np.ndarray[Any, Any]]] | None = None

    def see(self, rows: Rows) -> None:
        """Compare these rows among themselves and the first with the last seen before."""
        if not len(rows) or not self.keys:
            return
        if self._before is not None:
            earlier, after = self._before
            follows = {key: rows_equal(after[key], rows.columns[key][:1]) for key in self.keys}
            self.compare(earlier, np.array([len(earlier) - 1]), follows)
        pairs = np.arange(len(rows) - 1)
        follows = {key: rows_equal(rows.columns[NEXT, *key][:-1], rows.columns[key][1:]) for key in self.keys}
        self.compare(rows, pairs, follows)
        tail = {key: rows.columns[NEXT, *key][-1:].copy() for key in self.keys}
        self._before = (_without_columns(rows), tail)

    @abstractmethod
    def compare(self, rows: Rows, index: np.ndarray[Any, Any], follows: dict[Key, np.ndarray[Any, Any]]) -> None:
        """Take the answers for the rows at `index` and the rows after them."""


def _without_columns(rows: Rows) -> Rows:
    """Keep the positions, drop the data."""
    return Rows(rows.start, {}, rows.first, rows.last, rows.episode, rows.explicit)


class ContinuityRule(_FollowingRule):
    """Inside an episode `next` of one row is the next row. A warning where the episode table states otherwise.

    Not even that in n-step data, which have `steps_to_next_obs`: there `next` is as many steps ahead.
    """

    rule_id = "TED004"
    name = "continuity"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._broken, self._declared = Tally(), Tally()
        self._keys: dict[Key, None] = {}

    def compare(self, rows: Rows, index: np.ndarray[Any, Any], follows: dict[Key, np.ndarray[Any, Any]]) -> None:
        """Count the rows inside episodes that do not follow."""
        inside = ~rows.last[index]
        broken = np.zeros(len(index), bool)
        for key, follow in follows.items():
            wrong = inside & ~follow
            if wrong.any():
                self._keys[key] = None
                broken |= wrong
        declared = broken & rows.explicit[index]
        self._broken.add(rows, broken & ~declared, index)
        self._declared.add(rows, declared, index)

    def findings(self) -> list[Finding]:
        """Report both kinds with the leaves they concern."""
        keys = ", ".join(key_name((NEXT, *key)) for key in self._keys)
        found = []
        if self._broken.count:
            text = f"{steps_text(self._broken.count, self.steps)}: {keys} is not the following row, inside an episode"
            found.append(self.report("error", f"{text} (first: {self._broken.first})", self._broken))
        if self._declared.count and not any(field.key == _STEPS_TO_NEXT for field in self.fields):
            text = f"{steps_text(self._declared.count, self.steps)}: {keys} does not follow, as the episode table says"
            found.append(self.report("warning", f"{text} (first: {self._declared.first})", self._declared))
        return found


class AcrossRule(_FollowingRule):
    """The end of one episode does not run on into the next: that would be one episode cut in two."""

    rule_id = "TED005"
    name = "no continuity across episodes"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._joined = Tally()
        self._constant = True

    def see(self, rows: Rows) -> None:
        """Remember whether observations ever change: where none does, every row follows every other."""
        if self._constant and len(rows):
            equal = (rows_equal(rows.columns[NEXT, *key], rows.columns[key]).all() for key in self.keys)
            self._constant = all(equal)
        super().see(rows)

    def compare(self, rows: Rows, index: np.ndarray[Any, Any], follows: dict[Key, np.ndarray[Any, Any]]) -> None:
        """Count the ends of episodes after which every state leaf continues."""
        joined = rows.last[index] & np.all(list(follows.values()), axis=0)
        self._joined.add(rows, joined, index)

    def findings(self) -> list[Finding]:
        """Report how many ends, and the first."""
        if not self._joined.count or self._constant:
            return []
        text = f"{ends_text(self._joined.count)} where the next one begins with the same observation"
        return [
            self.report("warning", f"{text}: one episode may be cut in two (first: {self._joined.first})", self._joined)
        ]
