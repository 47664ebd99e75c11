"""The rules of `check`: the list of all rules, the base class of rules about rows, and these rules themselves.

They concern leaves, flags, continuity, numbers and recorded spaces. Rules about the folder of a dataset are in
`core.format.checks`.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, overload

import numpy as np

from ..declarations import LEAVES, from_leaf
from .episodes import Continuity, ranges_of, rows_equal
from .schema import (
    ACTION,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SINGLETONS,
    Array,
    Field,
    Key,
    as_numbers,
    is_floating,
    is_real,
    key_name,
    odd_truths,
    safe_part,
    state_keys,
)

_AT_ONCE = 1 << 14


class Places(Sequence[Any]):
    """A compact sequence of integers, or of half-open ranges as pairs, in an array int64 `[N]` or `[N, 2]`.

    It takes 8 bytes a number, equals any sequence of the same numbers or pairs, and can be written as JSON piece by
    piece.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Array) -> None:
        self._numbers = np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Places: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._numbers[index]
        return Places(found) if isinstance(index, slice) else _item(found.tolist())

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield from map(_item, part)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Places):
            return np.array_equal(self._numbers, other._numbers)
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == another for one, another in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:10]))
        return f"Places({shown}{f', … of {len(self):,}' if len(self) > 10 else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Places, (self._numbers,)

    def tolist(self) -> list[Any]:
        """Return the numbers, or the pairs as lists, as JSON has them."""
        return list(self._numbers.tolist())

    def json_pieces(self) -> Iterator[str]:
        """Yield the JSON text, some thousands of entries at a time."""
        yield "["
        for number, part in enumerate(self._parts()):
            yield f"{', ' if number else ''}{json.dumps(part)[1:-1]}"
        yield "]"

    def _parts(self) -> Iterator[list[Any]]:
        for start in range(0, len(self), _AT_ONCE):
            yield self._numbers[start : start + _AT_ONCE].tolist()


def _item(found: Any) -> Any:
    return tuple(found) if isinstance(found, list) else found


Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule: its id and name, whose meaning never changes, its subject, what it checks, and its severities.

    `severities` are the possible ones of its findings; `also` has the names of similar rules of other tools.
    """

    rule: str
    name: str
    about: Literal["rows", "folder", "saved buffers", "episodes", "metadata", "motion", "pictures", "rewards", "time"]
    severities: tuple[Severity, ...]
    checks: str
    also: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, str]:
        """Id and name, the first fields of a finding."""
        return self.rule, self.name


_ERROR: tuple[Severity, ...] = ("error",)
_WARNING: tuple[Severity, ...] = ("warning",)
_BOTH: tuple[Severity, ...] = ("error", "warning")

RULES: tuple[RuleEntry, ...] = (
    RuleEntry(
        "TED001", "schema", "rows", _BOTH,
        "Flags under next are there and bool, every observation has a counterpart under next, and there are rewards, "
        "which are real numbers, and actions.",
    ),
    RuleEntry("TED002", "singleton dimensions", "rows", _ERROR, "Rewards and flags have a last dimension of 1."),
    RuleEntry("TED003", "done = terminated | truncated", "rows", _ERROR, "The three flags agree in every step."),
    RuleEntry(
        "TED004", "continuity", "rows", _BOTH, "Inside an episode, next of every row equals the row that follows."
    ),
    RuleEntry(
        "TED005", "no continuity across episodes", "rows", _WARNING,
        "No episode begins with the observation with which the one before it ends.",
    ),
    RuleEntry(
        "TED006", "flags at the ends of episodes", "rows", _BOTH,
        "The last step of every episode is done, and no step before it is.",
    ),
    RuleEntry(
        "TED007", "NaN and infinity", "rows", _BOTH, "Every number is finite.",
        ("lerobot-doctor actions", "physlint numeric.finite_values"),
    ),
    RuleEntry("TED008", "all zero", "rows", _BOTH, "Not all numbers of an observation or an action are zero."),
    RuleEntry("TED009", "zero variance", "rows", _WARNING, "Every component of an observation or an action varies."),
    RuleEntry(
        "TED010", "episode table", "folder", _ERROR,
        "The episode table and the rows agree about number, position, return and end of every episode.",
    ),
    RuleEntry(
        "TED011", "lengths", "folder", _ERROR, "Every file has the rows that the manifest and its metadata state."
    ),
    RuleEntry("TED012", "sizes", "folder", _ERROR, "Every file has the size that the manifest states."),
    RuleEntry("TED013", "digests", "folder", _ERROR, "The bytes of every file match their digest."),
    RuleEntry(
        "TED014", "opens", "folder", _ERROR,
        "The manifest, the files that everything depends on and every episode can be read.",
        ("lerobot-doctor videos", "physlint manifest.required_files"),
    ),
    RuleEntry(
        "TED015", "recorded spaces", "rows", _WARNING,
        "Observations and actions are inside the spaces that the source records.",
    ),
    RuleEntry("TED016", "truth values", "rows", _ERROR, "Every byte of a bool field is 0 or 1."),
    RuleEntry(
        "TED017", "kept videos", "folder", _ERROR,
        "Rows refer to frames of kept videos that are there and can be decoded: some of long videos, all with --full.",
    ),
    RuleEntry("BUF001", "buffer digests", "saved buffers", _ERROR, "The files of the checkpoint match their digests."),
    RuleEntry(
        "BUF002", "buffer counts", "saved buffers", _ERROR,
        "Length, cursor, capacity and files of the storage and the writer agree.",
    ),
    RuleEntry("BUF003", "buffer sampler", "saved buffers", _ERROR, "The state of the sampler fits the storage."),
)  # fmt: skip
"""All rules, in the order of their ids."""

RULE_BY_ID = {entry.rule: entry for entry in RULES}


def known_rules() -> tuple[RuleEntry, ...]:
    """Return all rules, including those about behaviour if they are installed."""
    return (*RULES, *(from_leaf("behaviour") if "behaviour" in LEAVES else ()))


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: the rule that found it, its severity, a message, and where it is.

    Attributes:
        steps: all steps concerned, as half-open ranges, if the rule is about steps.
        episodes: the numbers of all episodes concerned, if the rule is about episodes.
        figure: the measured value, if something was measured.
        threshold: the value with which it was compared.
        why: why the problem matters for training.
        mend: the command that mends it.
        components: the parts of rows that have the problem: fields, such as a camera, or elements of a field, such as
            `observation.state[2]`.
    """

    rule: str
    name: str
    severity: Severity
    message: str
    steps: Sequence[tuple[int, int]] = ()
    episodes: Sequence[int] = ()
    figure: float | None = None
    threshold: float | None = None
    why: str = ""
    mend: str = ""
    components: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive TED rows `[start, start + n)` and where the episodes among them begin.

    `first[i]` is whether row i begins an episode, `last[i]` whether it ends one, `episode[i]` is the source's number of
    its episode and `explicit[i]` whether the episode has explicit next rows.
    """

    start: int
    columns: Mapping[Key, Array]
    first: Array
    last: Array
    episode: Array
    explicit: Array

    def __len__(self) -> int:
        return len(self.first)

    def place(self, row: int) -> str:
        """Return the name of one of these rows for messages."""
        return f"step {self.start + row:,}, episode {int(self.episode[row])}"


class Tally:
    """Counts rows with a problem and stores their places, in 16 bytes a range of steps and 8 bytes an episode."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self._ranges: list[Array] = []
        self._episodes: list[Array] = []

    def add(self, rows: Rows, wrong: Array, index: Array | None = None) -> None:
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
        """Return the `steps` and `episodes` of a finding."""
        return {"steps": Places(_joined(self._ranges)), "episodes": Places(_distinct(self._episodes))}


def _joined(parts: Sequence[Array]) -> Array:
    """Return ranges `[N, 2]` in ascending order, those that touch or overlap as one."""
    if not parts:
        return np.zeros((0, 2), np.int64)
    ranges = np.concatenate(parts)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]  # a rule may report steps out of order
    reached = np.maximum.accumulate(ranges[:, 1])
    starts = np.flatnonzero(np.append(True, ranges[1:, 0] > reached[:-1]))
    return np.column_stack((ranges[starts, 0], reached[np.append(starts[1:], len(ranges)) - 1]))


def _distinct(parts: Sequence[Array]) -> Array:
    """Return every number once, in the order of first occurrence."""
    numbers = np.concatenate([np.zeros(0, np.int64), *parts])
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


class Rule(ABC):
    """Base of the rules about rows: reads all rows once, in order, and reports problems.

    `rule_id` is the id of its entry in `RULES`.
    """

    rule_id: ClassVar[str]

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        self.fields = tuple(fields)
        self.steps = steps

    def see(self, rows: Rows) -> None:
        """Process the next rows."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return the findings, after the last rows."""

    def report(self, severity: Severity, message: str, tally: Tally | None = None) -> Finding:
        """Make a finding of this rule; `tally` counts the steps concerned."""
        places = {} if tally is None else tally.places
        return Finding(*RULE_BY_ID[self.rule_id].named, severity, message, **places)

    def report_first(self, severity: Severity, message: str, tally: Tally) -> list[Finding]:
        """Make a finding that mentions the first of the steps counted by `tally`; none if nothing was counted."""
        return [self.report(severity, f"{message} (first: {tally.first})", tally)] if tally.count else []

    def share(self, tally: Tally) -> str:
        """Describe the number of steps counted by `tally`, out of all."""
        return f"{tally.count:,} of {self.steps:,} steps"


def bound_array(bound: Any) -> Array:
    """Return a bound of a space as an array; integers stay exact, and strings like "inf" become numbers."""
    array = np.asarray(bound)
    if array.dtype.kind in "US" or array.dtype == object:
        array = np.vectorize(float, otypes=[np.float64])(np.asarray(bound, dtype=object))
    return array


@dataclasses.dataclass(slots=True)
class _Watched:
    """A field whose values are compared with bounds, and the smallest and largest value outside of them."""

    field: Field
    low: Array
    high: Array
    tally: Tally = dataclasses.field(default_factory=Tally)
    least: float = np.inf
    largest: float = -np.inf

    def see(self, rows: Rows) -> None:
        """Compare the next rows."""
        values = as_numbers(rows.columns[self.field.key], self.field.dtype)
        outside: Array = np.logical_or(values < self.low, values > self.high)
        if outside.any():
            wrong = values[outside]
            self.least, self.largest = min(self.least, float(wrong.min())), max(self.largest, float(wrong.max()))
            self.tally.add(rows, np.atleast_1d(outside.reshape(len(rows), -1).any(1)))

    @property
    def limits(self) -> str:
        low, high = (
            f"{bound.min():g}" if (bound == bound.flat[0]).all() else f"{bound.min():g} … {bound.max():g}"
            for bound in (self.low, self.high)
        )
        return f"{low} to {high}"


class SpaceRule(Rule):
    """Observations and actions are inside the spaces that the source records for them.

    This is only a warning, because values outside are still the recorded ones. But a policy that clips its actions, or
    a model that scales by the bounds, cannot reproduce them. NaN is reported by another rule.
    """

    rule_id = "TED015"

    def __init__(self, fields: Sequence[Field], steps: int, *, spaces: Mapping[str, Any] | None = None) -> None:
        super().__init__(fields, steps)
        self._watched = [_Watched(field, low, high) for field, low, high in bounded_fields(fields, spaces or {})]

    def see(self, rows: Rows) -> None:
        for watched in self._watched:
            watched.see(rows)

    def findings(self) -> list[Finding]:
        found = []
        for one in self._watched:
            text = f"{one.field.name} is outside its recorded space, {one.limits}, in {self.share(one.tally)}"
            text += f": values outside it are from {one.least:g} to {one.largest:g}"
            found += self.report_first("warning", text, one.tally)
        return found


def bounded_fields(fields: Sequence[Field], spaces: Mapping[str, Any]) -> Iterator[tuple[Field, Array, Array]]:
    """Yield the fields that a recorded space limits, with their smallest and largest legal values.

    A bound is a scalar, or an array in the shape of a row.
    """
    leaves = {key: space for name, space in spaces.items() for key, space in _leaves(space, (name,))}
    for field in fields:
        space = leaves.get(field.key[field.key[0] == NEXT :])
        bounds = None if space is None else _bounds(space, field)
        if bounds is not None:
            yield field, *bounds


def _leaves(space: Any, key: Key) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Yield the leaves of a space with the keys that their values have in a row."""
    if not isinstance(space, Mapping):
        return
    children = space.get("subspaces")
    if children is None:
        yield key, space
        return
    named = children.items() if isinstance(children, Mapping) else enumerate(children)
    for name, child in named:
        yield from _leaves(child, (*key, safe_part(str(name))))


def _bounds(space: Mapping[str, Any], field: Field) -> tuple[Array, Array] | None:
    """Return the smallest and largest legal values of a field, in the field's type; None if there is no limit."""
    if field.numpy.kind not in "biuf" or field.dtype == "bfloat16" or field.role == "text":
        return None
    low, high = _limits_of(space)
    if low is None or high is None:
        return None
    if field.numpy.kind == "f":  # values are rounded to the type of the field, so bounds are rounded, too
        limit = np.finfo(field.numpy)
        with np.errstate(over="ignore"):  # a bound beyond the type is infinite
            low, high = low.astype(field.numpy), high.astype(field.numpy)
        open_to_all = (low <= limit.min).all() and (high >= limit.max).all()
    elif field.numpy.kind == "b":
        open_to_all = (low <= 0).all() and (high >= 1).all()
    else:
        whole = np.iinfo(field.numpy)
        open_to_all = (low <= whole.min).all() and (high >= whole.max).all()
    if open_to_all:
        return None
    shaped = [_shaped(bound, field.shape) for bound in (low, high)]
    return None if shaped[0] is None or shaped[1] is None else (shaped[0], shaped[1])


def _limits_of(space: Mapping[str, Any]) -> tuple[Array | None, Array | None]:
    kind, start = space.get("type"), bound_array(space.get("start") or 0)
    if kind == "Box" and space.get("low") is not None and space.get("high") is not None:
        return bound_array(space["low"]), bound_array(space["high"])
    if kind == "MultiBinary":
        return np.asarray(0), np.asarray(1)
    count = space.get({"Discrete": "n", "MultiDiscrete": "nvec"}.get(str(kind), ""))
    return (None, None) if count is None else (start, start + bound_array(count) - 1)


def _shaped(bound: Array, shape: tuple[int, ...]) -> Array | None:
    """Give a bound the shape of a row; None if the number of elements differs."""
    if bound.size == 1:
        return bound.reshape(())
    return bound.reshape(shape) if bound.size == int(np.prod(shape)) else None


def _ends(tally: Tally) -> str:
    return f"{tally.count:,} episode{'s end' if tally.count > 1 else ' ends'}"


_TIMES: Key = ("timestamp",)


class SchemaRule(Rule):
    """Flags are under `next` and bool, and every observation has a counterpart under `next`.

    Warns about data without rewards or actions, and about tables of single rows, which only have flags under `next`:
    contextual bandits.
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
            yield "there are no transitions: only flags are under 'next', as in the tables of contextual bandits"
        elif all(field.key not in (NEXT_REWARD, _TIMES) for field in self.fields):  # demonstrations need no rewards
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
    """Rewards and flags have a trailing dimension of size 1, so that they have as many dimensions as other entries."""

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

    With `unfinished`, episodes without an end are allowed, as in a buffer that is still being written.
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
"""The leaf that marks n-step data: how many steps ahead `next` is."""


class _FollowingRule(Rule):
    """Compares, for every state leaf, each row's `next` with the row after it, also across the borders of chunks."""

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
    def compare(self, rows: Rows, index: Array, follows: dict[Key, Array]) -> None:
        """Process, for the rows at `index`, whether each state's `next` row equals the row after it."""


class ContinuityRule(_FollowingRule):
    """Inside an episode, `next` of a row equals the following row; an error otherwise.

    It is only a warning if the episode table states explicit next rows. n-step data, which has `steps_to_next_obs`, is
    exempt from that, since its `next` is that many steps ahead.
    """

    rule_id = "TED004"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._broken, self._declared = Tally(), Tally()
        self._keys: dict[Key, None] = {}

    def compare(self, rows: Rows, index: Array, follows: dict[Key, Array]) -> None:
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
    """The last observation of an episode is not the first one of the next: that may be one episode cut in two."""

    rule_id = "TED005"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._joined = Tally()
        self._constant = True

    def see(self, rows: Rows) -> None:
        """Also determine whether observations ever change; if not, every row would seem to follow every other."""
        if self._constant and len(rows):
            equal = (rows_equal(rows.columns[NEXT, *key], rows.columns[key]).all() for key in self.keys)
            self._constant = all(equal)
        super().see(rows)

    def compare(self, rows: Rows, index: Array, follows: dict[Key, Array]) -> None:
        joined = rows.last[index] & np.all(list(follows.values()), axis=0)
        self._joined.add(rows, joined, index)

    def findings(self) -> list[Finding]:
        if self._constant:
            return []
        text = f"{_ends(self._joined)} where the next one begins with the same observation"
        return self.report_first("warning", f"{text}: one episode may be cut in two", self._joined)


class NotFiniteRule(Rule):
    """No NaN or infinity: an error in observations, actions and rewards, a warning in other fields."""

    rule_id = "TED007"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._tallies = {field: Tally() for field in fields if is_floating(field.dtype)}

    def see(self, rows: Rows) -> None:
        for field, tally in self._tallies.items():
            numbers = as_numbers(rows.columns[field.key], field.dtype).reshape(len(rows), -1)
            tally.add(rows, np.logical_not(np.isfinite(numbers).all(1)))

    def findings(self) -> list[Finding]:
        found = []
        for field, tally in self._tallies.items():
            severity: Severity = "error" if field.role in {"observation", "action", "reward"} else "warning"
            found += self.report_first(severity, f"{field.name} is NaN or infinite in {self.share(tally)}", tally)
        return found


class TruthRule(Rule):
    """Bool fields have no bytes other than 0 and 1, whose meaning would differ between operations."""

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
    """Not all numbers of a field are zero, as they are if an importer allocated memory and never filled it."""

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
    """Every element of observations and actions varies; dividing by a standard deviation of 0 would give NaN."""

    rule_id = "TED009"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._watched = [field for field in fields if field.role in {"observation", "action"} and field.key[0] != NEXT]
        self._first: dict[Key, Array] = {}
        self._same: dict[Key, Array] = {}

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


def _elements(field: Field, same: Array) -> str:
    """Describe elements: `observation[27:29]`, or their number if there are many dimensions or runs."""
    if same.all():
        return field.name
    runs = ranges_of(same.reshape(-1))
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
    """Create all rules about rows, with the recorded `spaces`; for `unfinished` see `MidEpisodeFlagRule`."""
    options: dict[type[Rule], dict[str, Any]] = {
        MidEpisodeFlagRule: {"unfinished": unfinished}, SpaceRule: {"spaces": spaces},
    }  # fmt: skip
    return [rule(fields, steps, **options.get(rule, {})) for rule in DATA_RULES]
