"""The operation that makes n-step transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...format import Array
from ...ted import NEXT, Field, Key, as_numbers
from ..endings import flagged
from .base import RowOperation, Step
from .borders import flags_there, last_rows
from .fields import KEPT, Fields
from .lazy import Lazy, Sheet
from .values import numbers_of, original_of, require_discount, reward_keys, reward_type

__all__ = ["NStep"]

_STEPS: Key = ("steps_to_next_obs",)
_GAMMA: Key = ("gamma",)
_NONTERMINAL: Key = ("nonterminal",)
_WINDOW = "multi_step"
_CUT: Key = (_WINDOW, "cut")


@dataclass(frozen=True)
class NStep(RowOperation):
    """Makes of every step a transition over m = min(`n`, steps to the end of its episode) steps, never across an end.

    What lies under `next` becomes what was after the last step of the window, and each reward there the sum of
    gamma^i times the rewards in the window; `next.original_reward` keeps what it was. New are, one value a row,
    `steps_to_next_obs` (m, int64), `gamma` (gamma^m, float32) and `nonterminal` (m > 1, bool).

    The flags under `next` stay those of the step itself, for they say where episodes lie. Those of the last step of
    the window are at `multi_step.done`, `terminated` and `truncated`, and `multi_step.cut` marks windows that are short
    though no flag says why. So a target is `reward + gamma * ~multi_step.terminated * value(next)`. Names and meaning
    are those of the `MultiStep` transform.
    """

    name: ClassVar[str] = "n-step"
    whole_episodes: ClassVar[bool] = True
    n: int
    gamma: float

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"n-step was to look {self.n} steps ahead, a whole number from 1 is expected")
        require_discount(self.gamma, self.name)

    def bind(self, fields: Fields) -> Step:
        rewards = reward_keys(fields, self.name)
        flags = flags_there(fields)
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
                raise UsageError(f"n-step would write {field.name!r}, which is there already")
        changes: dict[Key, Field | None] = {
            key: Field(key, reward_type(fields[key], self.name), fields[key].shape, fields[key].role) for key in rewards
        }
        changes |= {field.key: field for field in added}
        after = fields.replaced(changes, made={field.key for field in added})
        return _NStepStep(after, fields, self, rewards, flags)


class _NStepStep(Step):
    def __init__(self, after: Fields, before: Fields, asked: NStep, rewards: list[Key], flags: tuple[Key, ...]) -> None:
        super().__init__(after)
        self._asked = asked
        self._rewards = {key: before[key] for key in rewards}
        self._originals = {original_of(key): key for key in rewards}
        self._flags = flags
        self._ahead = {field.key for field in before if field.key[0] == NEXT} - {*rewards, *KEPT}
        self._windows = {(_WINDOW, key[-1]): key for key in flags}
        self._new = {_STEPS, _GAMMA, _NONTERMINAL, _CUT}

    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        source = self._originals | self._windows
        return frozenset(source.get(key, key) for key in wanted if key not in self._new) | {*self._flags}

    def apply(self, sheet: Sheet, wanted: frozenset[Key]) -> None:
        rows = np.arange(sheet.pieces.steps)
        ended = flagged(sheet.columns, rows)
        last = np.minimum(rows + (self._asked.n - 1), last_rows(sheet, ended))
        steps = last - rows + 1
        gamma = self._asked.gamma
        new: dict[Key, Callable[[], Lazy]] = {
            _STEPS: lambda: Lazy.given("steps_to_next_obs", "int64", steps),
            _GAMMA: lambda: Lazy.given("gamma", "float32", (gamma ** steps.astype(np.float64)).astype(np.float32)),
            _NONTERMINAL: lambda: Lazy.given("nonterminal", "bool", steps > 1),
            _CUT: lambda: Lazy.given("multi_step.cut", "bool", (steps < self._asked.n) & ~ended[last]),
        }
        found: dict[Key, Lazy] = {}
        for key in wanted:
            if key in new:
                found[key] = new[key]()
            elif key in self._originals:
                found[key] = sheet.columns[self._originals[key]]
            elif key in self._windows:
                found[key] = sheet.columns[self._windows[key]].taken(last)
            elif key in self._rewards:
                found[key] = _summed(self._rewards[key], sheet.columns[key], steps, gamma)
            else:
                found[key] = sheet.columns[key].taken(last) if key in self._ahead else sheet.columns[key]
        sheet.columns = found


def _summed(field: Field, lazy: Lazy, steps: NDArray[np.int64], gamma: float) -> Lazy:
    """Sum gamma^i r[t + i] over the window of each row, in float64, from the first on."""
    rewards: Array = as_numbers(lazy.values, lazy.dtype)
    rewards = rewards.astype(np.result_type(rewards.dtype, np.float64))
    total = rewards.copy()
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        for ahead in range(1, int(steps.max(initial=1))):
            inside = np.flatnonzero(steps > ahead)
            later, factor = rewards[inside + ahead], gamma**ahead
            # where the factor is no number any more, zero times infinity would be NaN
            total[inside] += factor * later if factor else np.where(np.isfinite(later), 0, later)
    return numbers_of(field, reward_type(field, "n-step"), total)
