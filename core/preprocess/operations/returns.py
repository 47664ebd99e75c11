"""The operations that tell every step what rewards were still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...format import Array, one_step_reward
from ...ted import NEXT_REWARD, Field, Key, as_numbers, key_name
from ..endings import flagged
from .base import RowOperation, Step
from .borders import flags_there, last_rows
from .fields import Fields
from .lazy import Sheet
from .values import numbers_of, require_discount, reward_type

__all__ = ["McReturn", "ReturnToGo"]


@dataclass(frozen=True)
class _Returns(RowOperation):
    whole_episodes: ClassVar[bool] = True
    out: ClassVar[Key]

    def _step(self, fields: Fields, gamma: float) -> Step:
        require_discount(gamma, self.name)
        if NEXT_REWARD not in fields:
            raise UsageError(f"{self.name} needs next.reward, which is not there")
        field = one_step_reward(fields)
        if field is None:
            raise UsageError(
                f"{self.name} needs the reward of every step, but next.reward holds sums over n steps, and "
                "next.original_reward is not there"
            )
        if self.out in fields:
            raise UsageError(f"{self.name} would write {key_name(self.out)!r}, which is there already")
        made = Field(self.out, reward_type(field, self.name), field.shape, "info")
        return _ReturnStep(
            fields.replaced({self.out: made}, made=[self.out]), made, field.key, flags_there(fields), gamma
        )


@dataclass(frozen=True)
class ReturnToGo(_Returns):
    """Adds `return_to_go`: the sum of the rewards from each step on to the end of its episode, discounted by `gamma`.

    It is what policies are conditioned on (Decision Transformer), undiscounted unless `gamma` says otherwise. Shape
    and type are those of the reward; whole numbers become float32. After n-step, the rewards of single steps count.
    """

    name: ClassVar[str] = "return-to-go"
    out: ClassVar[Key] = ("return_to_go",)
    gamma: float = 1.0

    def __post_init__(self) -> None:
        require_discount(self.gamma, self.name)

    def bind(self, fields: Fields) -> Step:
        return self._step(fields, self.gamma)


@dataclass(frozen=True)
class McReturn(_Returns):
    """Adds `mc_return`: the discounted Monte Carlo return from each step on, with which values are calibrated (Cal-QL).

    The numbers are those of `return-to-go` with the same discount, which has to be given here: a value function has
    one. Of an episode that was truncated the rest is not known and counts nothing.
    """

    name: ClassVar[str] = "mc-return"
    out: ClassVar[Key] = ("mc_return",)
    gamma: float

    def __post_init__(self) -> None:
        require_discount(self.gamma, self.name)

    def bind(self, fields: Fields) -> Step:
        return self._step(fields, self.gamma)


class _ReturnStep(Step):
    def __init__(self, after: Fields, made: Field, reward: Key, flags: tuple[Key, ...], gamma: float) -> None:
        super().__init__(after)
        self._made = made
        self._reward = reward
        self._flags = flags
        self._gamma = gamma

    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        if self._made.key not in wanted:
            return wanted
        return (wanted - {self._made.key}) | {self._reward, *self._flags}

    def apply(self, sheet: Sheet, wanted: frozenset[Key]) -> None:
        found = {key: sheet.columns[key] for key in wanted - {self._made.key}}
        if self._made.key in wanted:
            lazy = sheet.columns[self._reward]
            rewards = as_numbers(lazy.values, lazy.dtype)
            ended = flagged(sheet.columns, np.arange(len(rewards)))
            sums = _to_go(rewards, last_rows(sheet, ended), self._gamma)
            found[self._made.key] = numbers_of(self._made, self._made.dtype, sums)
        sheet.columns = found


def _to_go(rewards: Array, last: NDArray[np.int64], gamma: float) -> Array:
    """Sum rewards in float64 from each row on to row `last` of it, discounted, from the end.

    Trajectories go side by side, the longest first, so that a step backwards in all of them is one operation.
    """
    found = rewards.astype(np.result_type(rewards.dtype, np.float64))
    ends = np.unique(last)
    lengths = np.diff(ends, prepend=-1)
    order = np.argsort(-lengths, kind="stable")
    ends, lengths = ends[order], lengths[order]
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        for back in range(1, int(lengths.max(initial=0))):
            rows = ends[: np.searchsorted(-lengths, -back)] - back
            found[rows] += gamma * found[rows + 1]
    return found
