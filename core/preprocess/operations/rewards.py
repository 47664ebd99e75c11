"""Operations on rewards: bounds, n-step transitions and returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...format.contracts import Array
from ...format.returns import add_rewards_to_go, one_step_reward
from ...ted.schema import NEXT, NEXT_REWARD, Field, Key, is_floating, key_name
from ..processor import flagged
from .base import (
    KEPT,
    BoundOperation,
    Columns,
    Discount,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    number_of,
)


@dataclass(frozen=True)
class ClipReward(RowOperation):
    """Limits every reward under `next` to `low` and `high`; None leaves a side open. NaN stays NaN.

    Values derived from rewards before, such as returns, do not change.
    """

    name: ClassVar[str] = "clip-reward"
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, str):
            low, sign, high = value.partition(":")
            if not sign:
                raise UsageError(f"--clip-reward {value!r}: expected LOW:HIGH, like -1:1")
            bounds = [text.strip() or None for text in (low, high)]
        elif isinstance(value, list | tuple) and len(value) == 2:
            bounds = list(value)
        else:
            raise UsageError(f"clip-reward is {value!r}, expected LOW:HIGH or two numbers")
        return [cls(*(None if bound is None else number_of(bound, cls.name) for bound in bounds))]

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise UsageError("clip-reward needs LOW:HIGH, LOW: or :HIGH")
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        if not low <= high:
            raise UsageError(f"clip-reward {low:g}:{high:g}: LOW must not be above HIGH")

    def plan(self, fields: Fields) -> BoundOperation:
        keys = reward_keys(fields, self.name)
        for field in (fields[key] for key in keys):
            whole = all(bound is None or float(bound).is_integer() for bound in (self.low, self.high))
            if "complex" in field.dtype or not (whole or "float" in field.dtype):
                raise UsageError(f"{field.name!r} is {field.dtype}, which cannot be clipped to {self.low}:{self.high}")
        return FieldChanges.of(fields, keys, lambda field: field, self._clipped)

    def _clipped(self, field: Field, lazy: LazyColumn) -> Any:
        numbers = lazy.numbers
        low, high = self.low, self.high
        if numbers.dtype.kind in "iu":
            limits = np.iinfo(numbers.dtype)
            low, high = (None if b is None else min(max(int(b), limits.min), limits.max) for b in (low, high))
        elif numbers.dtype.kind == "b":
            numbers = numbers.astype(np.int8)
        with np.errstate(over="ignore"):  # a bound beyond float16 bounds nothing
            return numbers.clip(low, high)  # type: ignore[arg-type]


def reward_keys(fields: Fields, operation: str) -> list[Key]:
    """List the rewards: entries named `reward` under `next`, also in groups. UsageError if there are none."""
    found = [key for key in fields.by_key if key[0] == NEXT and key[-1] == "reward"]
    if not found:
        raise UsageError(f"{operation} needs next.reward, which is not there")
    return found


def original_of(key: Key) -> Key:
    """Return the key of the reward of the single step, which n-step keeps."""
    return (*key[:-1], f"original_{key[-1]}")


def reward_type(field: Field, operation: str) -> str:
    """Return the type for sums of rewards: the rewards' own if they are floats, otherwise float32."""
    if field.role == "text":
        raise UsageError(f"{operation} needs numbers in {key_name(field.key)!r}, which is text")
    return field.dtype if is_floating(field.dtype) else "float32"


def require_discount(gamma: float, operation: str) -> None:
    """Raise UsageError unless a discount is a number from 0 to 1."""
    if not 0 <= gamma <= 1:
        raise UsageError(f"the discount of {operation} is {gamma}, expected a number from 0 to 1")


def _flags_there(fields: Fields) -> tuple[Key, ...]:
    """Return the existing flags under `next`."""
    return tuple(key for key in KEPT if key in fields)


def _ends(batch: LazyBatch, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether a trajectory ends with each row: it is the last of its episode or has a flag.

    A flag in mid-episode is data and stays, and the row after it does not follow from the row before.
    """
    ends = flags.copy()
    pieces = batch.pieces
    ends[(pieces.starts + pieces.rows - 1)[pieces.rows > 0]] = True
    return ends


_STEPS: Key = ("steps_to_next_obs",)
_GAMMA: Key = ("gamma",)
_NONTERMINAL: Key = ("nonterminal",)
_WINDOW = "multi_step"
_CUT: Key = (_WINDOW, "cut")


@dataclass(frozen=True)
class NStep(RowOperation):
    """Turns every step into a transition over m = min(`n`, steps to the end of its episode) steps, never across an end.

    Fields under `next` become the ones after the last step of the window. Each reward there becomes the sum of gamma^i
    times the rewards in the window; `next.original_reward` keeps the original. New fields, with one value a row, are
    `steps_to_next_obs` (m, int64), `gamma` (gamma^m, float32) and `nonterminal` (m > 1, bool).

    The flags under `next` stay the step's own, as they mark where episodes end. The flags of the window's
    last step are `multi_step.done`, `terminated` and `truncated`; `multi_step.cut` marks windows that are short without
    a flag. A target is then `reward + gamma * ~multi_step.terminated * value(next)`. Names and meaning are as in the
    `MultiStep` transform.
    """

    name: ClassVar[str] = "n-step"
    whole_episodes: ClassVar[bool] = True
    n: int
    gamma: float

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"n-step is {value!r}, expected a whole number")
        return [cls(value, discount.needed(cls.name))]

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"n-step is {self.n}, expected a whole number from 1")
        require_discount(self.gamma, self.name)

    def plan(self, fields: Fields) -> BoundOperation:
        rewards = reward_keys(fields, self.name)
        flags = _flags_there(fields)
        added = [
            Field(_STEPS, "int64", (), "info"),
            Field(_GAMMA, "float32", (), "info"),
            Field(_NONTERMINAL, "bool", (), "info"),
            Field(_CUT, "bool", (), "info"),
            *(Field((_WINDOW, key[-1]), fields[key].dtype, fields[key].shape, "info") for key in flags),
        ]
        for key in rewards:
            field = fields[key]
            added.append(Field(original_of(key), field.dtype, field.shape, "info"))
        for field in added:
            if field.key in fields:
                raise UsageError(f"n-step would write {field.name!r}, which already exists")
        changes: dict[Key, Field | None] = {
            key: Field(key, reward_type(fields[key], self.name), fields[key].shape, fields[key].role) for key in rewards
        }
        changes |= {field.key: field for field in added}
        after = fields.replaced(changes, made={field.key for field in added})
        return _BoundNStep(after, fields, self, rewards, flags)


class _BoundNStep(BoundOperation):
    def __init__(self, after: Fields, before: Fields, asked: NStep, rewards: list[Key], flags: tuple[Key, ...]) -> None:
        super().__init__(after)
        self._asked = asked
        self._rewards = frozenset(rewards)
        self._originals = {original_of(key): key for key in rewards}
        self._flags = flags
        self._ahead = {field.key for field in before if field.key[0] == NEXT} - {*rewards, *KEPT}
        self._windows = {(_WINDOW, key[-1]): key for key in flags}
        self._new = {_STEPS, _GAMMA, _NONTERMINAL, _CUT}

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        source = self._originals | self._windows
        return {*self._flags, *(source.get(key, key) for key in wanted if key not in self._new)}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        rows = np.arange(batch.pieces.steps)
        ended = flagged(batch.columns, rows)
        places = np.flatnonzero(_ends(batch, ended))
        last = np.minimum(rows + (self._asked.n - 1), places[np.searchsorted(places, rows)])
        steps = last - rows + 1
        gamma = self._asked.gamma
        new: dict[Key, Callable[[], Array]] = {
            _STEPS: lambda: steps,
            _GAMMA: lambda: (gamma ** steps.astype(np.float64)).astype(np.float32),
            _NONTERMINAL: lambda: steps > 1,
            _CUT: lambda: (steps < self._asked.n) & ~ended[last],
        }
        found: dict[Key, LazyColumn | Array] = {}
        for key in wanted:
            if key in new:
                found[key] = new[key]()
            elif key in self._originals:
                found[key] = batch.columns[self._originals[key]]
            elif key in self._windows:
                found[key] = batch.columns[self._windows[key]].taken(last)
            elif key in self._rewards:
                found[key] = _summed(batch.columns[key].numbers, steps, gamma)
            else:
                found[key] = batch.columns[key].taken(last) if key in self._ahead else batch.columns[key]
        return found


def _summed(rewards: Array, steps: NDArray[np.int64], gamma: float) -> Array:
    """Sum gamma^i r[t + i] over the window of each row, in float64, from the first on."""
    rewards = rewards.astype(np.result_type(rewards.dtype, np.float64))
    total = rewards.copy()
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        for ahead in range(1, int(steps.max(initial=1)) if gamma else 1):
            inside = np.flatnonzero(steps > ahead)
            later, factor = rewards[inside + ahead], gamma**ahead
            # where the factor is no number any more, zero times infinity would be NaN
            total[inside] += factor * later if factor else np.where(np.isfinite(later), 0, later)
    return total


@dataclass(frozen=True)
class _Returns(RowOperation):
    whole_episodes: ClassVar[bool] = True
    out: ClassVar[Key]

    gamma: float

    def __post_init__(self) -> None:
        require_discount(self.gamma, self.name)

    def plan(self, fields: Fields) -> BoundOperation:
        if NEXT_REWARD not in fields:
            raise UsageError(f"{self.name} needs next.reward, which is not there")
        field = one_step_reward(fields)
        if field is None:
            raise UsageError(
                f"{self.name} needs the reward of every step, but next.reward holds sums over n steps, and "
                "next.original_reward is not there"
            )
        if self.out in fields:
            raise UsageError(f"{self.name} would write {key_name(self.out)!r}, which already exists")
        made = Field(self.out, reward_type(field, self.name), field.shape, "info")
        return _BoundReturn(
            fields.replaced({self.out: made}, made=[self.out]), self.out, field.key, _flags_there(fields), self.gamma
        )


@dataclass(frozen=True)
class AddReturnToGo(_Returns):
    """Adds `return_to_go`: the sum of the rewards from each step to the end of its episode, discounted by `gamma`.

    Policies are conditioned on it (Decision Transformer), by default undiscounted. It has the reward's shape and type;
    for whole numbers float32. After n-step, the rewards of single steps are summed.
    """

    name: ClassVar[str] = "return-to-go"
    out: ClassVar[Key] = ("return_to_go",)
    gamma: float = 1.0

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(discount.or_else(1.0))]


@dataclass(frozen=True)
class AddMcReturn(_Returns):
    """Adds `mc_return`: the discounted Monte Carlo return from each step on, for calibrating values (Cal-QL).

    The numbers equal `return-to-go` with the same discount, which is required here: a value function has one. The rest
    of a truncated episode is unknown and counts nothing.
    """

    name: ClassVar[str] = "mc-return"
    out: ClassVar[Key] = ("mc_return",)

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(discount.needed(cls.name))]


class _BoundReturn(BoundOperation):
    def __init__(self, after: Fields, made: Key, reward: Key, flags: tuple[Key, ...], gamma: float) -> None:
        super().__init__(after)
        self._made = made
        self._reward = reward
        self._flags = flags
        self._gamma = gamma

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        if self._made not in wanted:
            return wanted
        return (wanted - {self._made}) | {self._reward, *self._flags}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, LazyColumn | Array] = {key: batch.columns[key] for key in wanted - {self._made}}
        if self._made in wanted:
            rewards = batch.columns[self._reward].numbers
            totals = rewards.astype(np.result_type(rewards.dtype, np.float64))
            ended = flagged(batch.columns, np.arange(len(rewards)))
            add_rewards_to_go(totals, _ends(batch, ended), self._gamma)
            found[self._made] = totals
        return found
