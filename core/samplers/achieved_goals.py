"""Goals in hindsight: the rows at which steps of the same trajectories achieved one."""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..kernels.rows import compiled_loops
from ..storages.base import Storage
from .trajectories import TrajectoryTable

Numbers: TypeAlias = NDArray[np.int64]

# Calls after which the import of compiled loops, half a second, pays.
_PATIENCE = 50


class HindsightStrategy(enum.StrEnum):
    """Which step of a trajectory the goal of a step is achieved at.

    `FUTURE`: the step itself or a later one; `FINAL`: the last one; `EPISODE`: any one of the same trajectory;
    `RANDOM`: any step of all.
    """

    FUTURE = "future"
    FINAL = "final"
    EPISODE = "episode"
    RANDOM = "random"

    @classmethod
    def of(cls, name: Any) -> HindsightStrategy:
        """Return a strategy by its name; UsageError for another one."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(f"the strategy is {name!r}, expected one of {', '.join(cls)}") from None

    def steps(self, chances: NDArray[np.float64], age: Numbers, reach: Numbers) -> Numbers:
        """Choose by chances in [0, 1) how many steps behind each step its goal is achieved; not for `RANDOM`.

        There are `age` steps before it in its trajectory, and `reach` from it to the end, itself included.
        """
        if self is HindsightStrategy.FINAL:
            return reach - 1
        if self is HindsightStrategy.FUTURE:
            return (chances * reach).astype(np.int64)
        return (chances * (age + reach)).astype(np.int64) - age


class AchievedRows:
    """Chooses the rows at which the goals of steps are achieved, by a strategy.

    One call of a compiled loop does it for the trajectories of one lane; numpy takes three times the time.
    """

    def __init__(self, strategy: HindsightStrategy) -> None:
        self.strategy = strategy
        self._number = list(HindsightStrategy).index(strategy)
        self._patience = _PATIENCE

    def anywhere(self, storage: Storage, chances: NDArray[np.float64]) -> tuple[Numbers, ...]:
        """Choose any elements of a storage by chances in [0, 1): int64 `[n]` for each dimension."""
        return np.unravel_index((chances * len(storage)).astype(np.int64), tuple(storage.shape))

    def along(
        self, table: TrajectoryTable, rows: Numbers, lane: Numbers | None, chances: NDArray[np.float64]
    ) -> Numbers:
        """Choose for steps, by chances in [0, 1), rows of their trajectories, in the same lanes; int64 `[n]`.

        `rows` and `lane` are int64 `[n]` too; None for the only lane.
        """
        runs = table.only_lane()
        if runs is not None and self._patience:
            self._patience -= 1
        elif runs is not None and (loops := compiled_loops()) is not None:
            found = np.empty(len(rows), np.int64)
            loops.achieve(np.ascontiguousarray(rows), chances, *runs, table.oldest, table.capacity, self._number, found)
            return found
        step = table.steps_at(rows)
        lane = np.zeros_like(step) if lane is None else lane
        age = table.age(step, lane) if self.strategy is HindsightStrategy.EPISODE else lane
        return (step + self.strategy.steps(chances, age, table.reach(step, lane))) % table.capacity
