"""The rules of TED data: leaves, flags, continuity and numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .episodes import Continuity, rows_equal
from .rules import Finding, Rows, Rule, Tally, ends_text, steps_text
from .schema import (
    ACTION,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    SINGLETONS,
    Field,
    Key,
    as_numbers,
    is_floating,
    key_name,
    state_keys,
)


class SchemaRule(Rule):
    """Reward and the three flags lie under `next`, flags are bool, there is an action and an observation."""

    rule_id = "TED001"
    name = "schema"

    def findings(self) -> list[Finding]:
        """Report what is missing or of the wrong type."""
        return list(self._findings())

    def _findings(self) -> Iterator[Finding]:
        fields = {field.key: field for field in self.fields}
        for key in (*FLAGS, REWARD):
            if (NEXT, *key) not in fields:
                yield self.report("error", f"there is no {key_name((NEXT, *key))!r}")
        for key in FLAGS:
            for place in (key, (NEXT, *key)):
                if place in fields and fields[place].dtype != "bool":
                    yield self.report("error", f"{key_name(place)!r} is {fields[place].dtype}, bool is expected")
        if not any(key[:1] == ACTION for key in fields):
            yield self.report("error", "there is no 'action'")
        for key in fields:
            if key[0] == "observation" and (NEXT, *key) not in fields:
                yield self.report("error", f"{key_name(key)!r} has no counterpart under 'next'")
        if not any(key[0] == NEXT and key[1:] not in SINGLETONS for key in fields):
            yield self.report("error", "nothing under 'next' says what was observed after the action")


class SingletonRule(Rule):
    """Reward and flags carry a trailing dimension of one, so that they have as many dimensions as the rest."""

    rule_id = "TED002"
    name = "singleton dimensions"

    def findings(self) -> list[Finding]:
        """Report the leaves without it."""
        wanted = {*SINGLETONS, *((NEXT, *key) for key in SINGLETONS)}
        return [
            self.report("error", f"{field.name!r} has rows of shape {list(field.shape)}, a trailing 1 is expected")
            for field in self.fields
            if field.key in wanted and field.shape[-1:] != (1,)
        ]


class DoneRule(Rule):
    """`done` is `terminated` or `truncated`, everywhere."""

    rule_id = "TED003"
    name = "done = terminated | truncated"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._wrong = Tally()

    def see(self, rows: Rows) -> None:
        """Compare the three flags."""
        if not {NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED} <= rows.columns.keys():
            return
        expected = rows.columns[NEXT_TERMINATED] | rows.columns[NEXT_TRUNCATED]
        wrong = (rows.columns[NEXT_DONE] != expected).reshape(len(rows), -1).any(1)
        self._wrong.add(rows, wrong)

    def findings(self) -> list[Finding]:
        """Report how many steps, and the first."""
        if not self._wrong.count:
            return []
        count = steps_text(self._wrong.count, self.steps)
        return [
            self.report(
                "error", f"{count}: done is not terminated | truncated (first: {self._wrong.first})", self._wrong
            )
        ]


class MidEpisodeFlagRule(Rule):
    """No flag is set before the last step of an episode, and one is set there.

    `unfinished` allows for episodes without an end, as in a buffer that is still being written.
    """

    rule_id = "TED006"
    name = "flags at the ends of episodes"

    def __init__(self, fields: Sequence[Field], steps: int, *, unfinished: bool = False) -> None:
        super().__init__(fields, steps)
        self._unfinished = unfinished
        self._early, self._missing = Tally(), Tally()

    def see(self, rows: Rows) -> None:
        """Look for ends inside episodes and for episodes without an end."""
        if NEXT_DONE not in rows.columns:
            return
        done = rows.columns[NEXT_DONE].reshape(len(rows), -1).any(1)
        self._early.add(rows, done & ~rows.last)
        self._missing.add(rows, rows.last & ~done)

    def findings(self) -> list[Finding]:
        """Report both kinds."""
        found = []
        if self._missing.count and not self._unfinished:
            text = f"{ends_text(self._missing.count)} without done (first: {self._missing.first})"
            found.append(self.report("error", text, self._missing))
        if self._early.count:
            count, are = steps_text(self._early.count, self.steps), "is" if self._early.count == 1 else "are"
            found.append(
                self.report(
                    "warning", f"{count} {are} done inside an episode (first: {self._early.first})", self._early
                )
            )
        return found


_STEPS_TO_NEXT: Key = ("steps_to_next_obs",)
"""The leaf that n-step data have: how many steps ahead `next` is."""


class _FollowingRule(Rule):
    """Compares each row's `next` with the row after it, for every state leaf, over the borders of chunks too."""

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self.keys = state_keys(fields)
        self._continuity = Continuity()
        self._before: Rows | None = None

    def see(self, rows: Rows) -> None:
        """Compare these rows among themselves and the first with the last seen before."""
        if not len(rows) or not self.keys:
            return
        follows = {key: self._continuity.see(key, rows.columns[key], rows.columns[NEXT, *key]) for key in self.keys}
        if self._before is not None:
            last = np.array([len(self._before) - 1])
            self.compare(self._before, last, {key: follow[:1] for key, follow in follows.items()})
        self.compare(rows, np.arange(len(rows) - 1), {key: follow[1:] for key, follow in follows.items()})
        self._before = replace(rows, columns={})

    @abstractmethod
    def compare(self, rows: Rows, index: np.ndarray[Any, Any], follows: dict[Key, np.ndarray[Any, Any]]) -> None:
        """Process, for the rows at `index`, whether each state's `next` row equals the row after it."""


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


DATA_RULES: tuple[type[Rule], ...] = (
    SchemaRule, SingletonRule, DoneRule, ContinuityRule, AcrossRule, MidEpisodeFlagRule, NotFiniteRule, AllZeroRule,
    ZeroVarianceRule,
)  # fmt: skip
