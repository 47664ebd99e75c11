"""The rules that TED data must keep: leaves, flags, continuity, numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from .episodes import Continuity, rows_equal
from .findings import Finding, Rows, Rule, Tally
from .rule_table import Severity
from .schema import (
    ACTION,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SINGLETONS,
    Field,
    Key,
    as_numbers,
    is_floating,
    is_real,
    key_name,
    odd_truths,
    state_keys,
)
from .spaces import SpaceRule

_Array: TypeAlias = np.ndarray[Any, Any]


def _ends(tally: Tally) -> str:
    return f"{tally.count:,} episode{'s end' if tally.count > 1 else ' ends'}"


class SchemaRule(Rule):
    """Flags lie under `next` and are bool, and what was observed after an action is there, too.

    Data without rewards or actions are reported, as are tables of single rows, which have nothing but flags under
    `next`: contextual bandits.
    """

    rule_id = "TED001"

    def findings(self) -> list[Finding]:
        errors = [self.report("error", text) for text in self._problems()]
        return [*errors, *(self.report("warning", text) for text in self._lacking())]

    @property
    def _has_transitions(self) -> bool:
        """Whether anything but flags is under `next`."""
        return any(field.key[0] == NEXT and field.key[1:] not in FLAGS for field in self.fields)

    def _lacking(self) -> Iterator[str]:
        if not self._has_transitions:
            yield "there are no transitions: nothing but flags is under 'next', as in the tables of contextual bandits"
        elif all(field.key != NEXT_REWARD for field in self.fields):
            yield "there are no rewards: no field is 'next.reward'"
        if all(field.key[:1] != ACTION for field in self.fields):
            yield "there are no actions: no field is 'action'"

    def _problems(self) -> Iterator[str]:
        fields = {field.key: field for field in self.fields}
        for key in FLAGS:
            if (NEXT, *key) not in fields:
                yield f"there is no {key_name((NEXT, *key))!r}"
            for place in (key, (NEXT, *key)):
                if place in fields and fields[place].dtype != "bool":
                    yield f"{key_name(place)!r} is {fields[place].dtype}, expected bool"
        if NEXT_REWARD in fields and not is_real(fields[NEXT_REWARD].dtype):
            yield f"{key_name(NEXT_REWARD)!r} is {fields[NEXT_REWARD].dtype}, expected real numbers"
        if not self._has_transitions:
            return
        for key in fields:
            if key[0] == "observation" and (NEXT, *key) not in fields:
                yield f"{key_name(key)!r} has no counterpart under 'next'"
        if not any(key[0] == NEXT and key[1:] not in SINGLETONS for key in fields):
            yield "nothing under 'next' says what was observed after the action"


class SingletonRule(Rule):
    """Reward and flags carry a trailing dimension of one, so that they have as many dimensions as the rest."""

    rule_id = "TED002"

    def findings(self) -> list[Finding]:
        return [
            self.report("error", f"{field.name!r} has rows of shape {list(field.shape)}, expected a trailing 1")
            for field in self.fields
            if field.key[field.key[0] == NEXT :] in SINGLETONS and field.shape[-1:] != (1,)
        ]


class DoneRule(Rule):
    """`done` is `terminated` or `truncated`, everywhere."""

    rule_id = "TED003"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._wrong = Tally()

    def see(self, rows: Rows) -> None:
        if not {NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED} <= rows.columns.keys():
            return
        expected = rows.columns[NEXT_TERMINATED] | rows.columns[NEXT_TRUNCATED]
        wrong = (rows.columns[NEXT_DONE] != expected).reshape(len(rows), -1).any(1)
        self._wrong.add(rows, wrong)

    def findings(self) -> list[Finding]:
        text = f"{self.share(self._wrong)}: done is not terminated | truncated"
        return self.report_first("error", text, self._wrong)


class MidEpisodeFlagRule(Rule):
    """No flag is set before the last step of an episode, and one is set there.

    `unfinished` allows for episodes without an end, as in a buffer that is still being written.
    """

    rule_id = "TED006"

    def __init__(self, fields: Sequence[Field], steps: int, *, unfinished: bool = False) -> None:
        super().__init__(fields, steps)
        self._unfinished = unfinished
        self._early, self._missing = Tally(), Tally()

    def see(self, rows: Rows) -> None:
        if NEXT_DONE not in rows.columns:
            return
        done = rows.columns[NEXT_DONE].reshape(len(rows), -1).any(1)
        self._early.add(rows, done & ~rows.last)
        self._missing.add(rows, rows.last & ~done)

    def findings(self) -> list[Finding]:
        missing = Tally() if self._unfinished else self._missing
        are = "is" if self._early.count == 1 else "are"
        return [
            *self.report_first("error", f"{_ends(missing)} without done", missing),
            *self.report_first("warning", f"{self.share(self._early)} {are} done inside an episode", self._early),
        ]


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
        if not len(rows) or not self.keys:
            return
        follows = {key: self._continuity.see(key, rows.columns[key], rows.columns[NEXT, *key]) for key in self.keys}
        if self._before is not None:
            last = np.array([len(self._before) - 1])
            self.compare(self._before, last, {key: follow[:1] for key, follow in follows.items()})
        self.compare(rows, np.arange(len(rows) - 1), {key: follow[1:] for key, follow in follows.items()})
        self._before = replace(rows, columns={})

    @abstractmethod
    def compare(self, rows: Rows, index: _Array, follows: dict[Key, _Array]) -> None:
        """Process, for the rows at `index`, whether each state's `next` row equals the row after it."""


class ContinuityRule(_FollowingRule):
    """Inside an episode `next` of one row is the next row. A warning where the episode table states otherwise.

    Not even that in n-step data, which have `steps_to_next_obs`: there `next` is as many steps ahead.
    """

    rule_id = "TED004"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._broken, self._declared = Tally(), Tally()
        self._keys: dict[Key, None] = {}

    def compare(self, rows: Rows, index: _Array, follows: dict[Key, _Array]) -> None:
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
        keys = ", ".join(key_name((NEXT, *key)) for key in self._keys)
        text = f"{self.share(self._broken)}: {keys} is not the following row, inside an episode"
        found = self.report_first("error", text, self._broken)
        if not any(field.key == _STEPS_TO_NEXT for field in self.fields):
            text = f"{self.share(self._declared)}: {keys} does not follow, as the episode table states"
            found += self.report_first("warning", text, self._declared)
        return found


class AcrossRule(_FollowingRule):
    """The end of one episode does not run on into the next: that would be one episode cut in two."""

    rule_id = "TED005"

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

    def compare(self, rows: Rows, index: _Array, follows: dict[Key, _Array]) -> None:
        joined = rows.last[index] & np.all(list(follows.values()), axis=0)
        self._joined.add(rows, joined, index)

    def findings(self) -> list[Finding]:
        if self._constant:
            return []
        text = f"{_ends(self._joined)} where the next one begins with the same observation"
        return self.report_first("warning", f"{text}: one episode may be cut in two", self._joined)


class NotFiniteRule(Rule):
    """No NaN or infinity: an error in what training reads, a warning elsewhere."""

    rule_id = "TED007"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._tallies = {field: Tally() for field in fields if is_floating(field.dtype)}

    def see(self, rows: Rows) -> None:
        for field, tally in self._tallies.items():
            numbers = as_numbers(rows.columns[field.key], field.dtype).reshape(len(rows), -1)
            tally.add(rows, ~np.isfinite(numbers).all(1))

    def findings(self) -> list[Finding]:
        found = []
        for field, tally in self._tallies.items():
            severity: Severity = "error" if field.role in {"observation", "action", "reward"} else "warning"
            found += self.report_first(severity, f"{field.name} is NaN or infinite in {self.share(tally)}", tally)
        return found


class TruthRule(Rule):
    """Bool fields have no other bytes than 0 and 1, whose meaning depends on what computes with them."""

    rule_id = "TED016"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._tallies = {field: Tally() for field in fields if field.dtype == "bool"}

    def see(self, rows: Rows) -> None:
        for field, tally in self._tallies.items():
            odd = odd_truths(rows.columns[field.key])
            tally.add(rows, np.asarray(odd.reshape(len(rows), -1).any(1)))

    def findings(self) -> list[Finding]:
        found = []
        for field, tally in self._tallies.items():
            text = f"{field.name} has a byte other than 0 and 1 in {self.share(tally)}"
            found += self.report_first("error", text, tally)
        return found


class AllZeroRule(Rule):
    """Not every number is zero: some importers allocate and never copy."""

    rule_id = "TED008"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._zero = [field for field in fields if field.role in {"observation", "action"} and field.key[0] != NEXT]
        self._watched = len(self._zero)

    def see(self, rows: Rows) -> None:
        self._zero = [field for field in self._zero if not rows.columns[field.key].any()]

    def findings(self) -> list[Finding]:
        if not self.steps or not self._zero:
            return []
        if len(self._zero) == self._watched > 1:
            return [self.report("error", "every observation and action is zero: the data were never written")]
        names = ", ".join(field.name for field in self._zero)
        return [self.report("warning", f"{names} {'is' if len(self._zero) == 1 else 'are'} zero everywhere")]


class ZeroVarianceRule(Rule):
    """Elements of observations and actions that never change; dividing by their deviation gives NaN."""

    rule_id = "TED009"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._watched = [field for field in fields if field.role in {"observation", "action"} and field.key[0] != NEXT]
        self._first: dict[Key, _Array] = {}
        self._same: dict[Key, _Array] = {}

    def see(self, rows: Rows) -> None:
        for field in self._watched:
            values = rows.columns[field.key]
            if len(values):
                first = self._first.setdefault(field.key, values[0].copy())
                self._same[field.key] = self._same.get(field.key, np.True_) & (values == first).all(0)

    def findings(self) -> list[Finding]:
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
    ZeroVarianceRule, SpaceRule, TruthRule,
)  # fmt: skip


def data_rules(
    fields: Sequence[Field], steps: int, spaces: Mapping[str, Any], *, unfinished: bool = False
) -> list[Rule]:
    """Make all rules about rows; `spaces` are those recorded, `unfinished` is that of MidEpisodeFlagRule."""
    options: dict[type[Rule], dict[str, Any]] = {
        MidEpisodeFlagRule: {"unfinished": unfinished}, SpaceRule: {"spaces": spaces},
    }  # fmt: skip
    return [rule(fields, steps, **options.get(rule, {})) for rule in DATA_RULES]
