"""Hindsight goals: chooses the step of a trajectory whose achieved goal becomes the new goal of a step.

`AchievedRows` chooses these steps. `HindsightReader` chooses them and gathers a batch with the new goals in one
compiled call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UsageError
from ..kernels.rows import BatchPool, compiled_loops
from ..storages.base import Storage
from ..storages.columns import renames
from ..storages.pytree import TensorDictNode
from ..storages.tensor import TensorStorage
from ..ted.schema import Key, Numbers
from .trajectories import TableFinder, TrajectoryTable

# After this many calls, importing the compiled loops, which takes half a second, pays off.
_PATIENCE = 50


class HindsightStrategy(enum.StrEnum):
    """Which step of a trajectory provides the new goal of a step.

    `FUTURE`: the step itself or a later one; `FINAL`: the last one; `EPISODE`: any one of the trajectory; `RANDOM`: any
    step of all trajectories.
    """

    FUTURE = "future"
    FINAL = "final"
    EPISODE = "episode"
    RANDOM = "random"

    @classmethod
    def of(cls, name: Any) -> HindsightStrategy:
        """Return a strategy by its name; UsageError if there is none."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(f"the strategy is {name!r}, expected one of {', '.join(cls)}") from None

    def steps(self, chances: NDArray[np.float64], age: Numbers, reach: Numbers) -> Numbers:
        """Choose how many steps after each step its new goal is achieved; not for `RANDOM`.

        Args:
            chances: random numbers in [0, 1).
            age: how many steps of the trajectory come before each step.
            reach: how many steps there are from it to the end, both inclusive.
        """
        if self is HindsightStrategy.FINAL:
            return reach - 1
        if self is HindsightStrategy.FUTURE:
            return (chances * reach).astype(np.int64)
        return (chances * (age + reach)).astype(np.int64) - age


class AchievedRows:
    """Chooses by a strategy the rows that provide new goals.

    A compiled loop does this in one call for the trajectories of one lane; numpy takes three times as long.
    """

    def __init__(self, strategy: HindsightStrategy) -> None:
        self.strategy = strategy
        self._number = list(HindsightStrategy).index(strategy)
        self._patience = _PATIENCE

    def anywhere(self, storage: Storage, chances: NDArray[np.float64]) -> tuple[Numbers, ...]:
        """Choose elements from a whole storage by random numbers in [0, 1): int64 `[n]` for each dimension."""
        return np.unravel_index((chances * len(storage)).astype(np.int64), tuple(storage.shape))

    def along(
        self, table: TrajectoryTable, rows: Numbers, lane: Numbers | None, chances: NDArray[np.float64]
    ) -> Numbers:
        """Choose, for each step, a row of its trajectory in the same lane, by random numbers in [0, 1); int64 `[n]`.

        `rows` and `lane` are int64 `[n]`; `lane` is None if there is only one.
        """
        runs = table.only_lane()
        if runs is not None and self._patience:
            self._patience -= 1
        elif runs is not None and (loops := compiled_loops()) is not None:
            found = np.empty(len(rows), np.int64)
            number = self._number
            loops.choose_goals(np.ascontiguousarray(rows), chances, *runs, table.oldest, table.capacity, number, found)
            return found
        step = table.steps_at(rows)
        lane = np.zeros_like(step) if lane is None else lane
        age = table.age(step, lane) if self.strategy is HindsightStrategy.EPISODE else lane
        return (step + self.strategy.steps(chances, age, table.reach(step, lane))) % table.capacity


_NO_RUNS = np.zeros(0, np.int64)


class HindsightRows(NamedTuple):
    """A batch of rows, and the rows at its beginning that have new goals, as views of the same memory."""

    batch: Any
    first: Any


class _Plan:
    """How batches of `size` rows, of which the first `count` get new goals, are gathered from a storage's columns.

    A plan is immutable, because several threads use it.
    """

    def __init__(
        self, storage: TensorStorage, size: int, count: int, goal_keys: Sequence[Key], achieved_key: Key
    ) -> None:
        columns = self._columns = storage.columns
        self._addresses = columns.addresses()
        self.size, self.count = torch.Size([size]), torch.Size([count])
        self.rows = columns.lead[0]
        self.structure = storage.structure
        self.loops = compiled_loops()
        self.table: Numbers | None = None
        """The table for `gather_in_hindsight`; None if it cannot gather from these columns."""
        if self.loops is None or not _gathers(storage):
            return
        places, arrays = storage.structure.places, columns.arrays
        source = places.get(achieved_key)
        goals = [place for place in map(places.get, goal_keys) if place is not None]
        if source is None or places.get(goal_keys[0]) is None:
            return
        alike = columns.dtypes[source], columns.leaves[source].shape
        if any((columns.dtypes[place], columns.leaves[place].shape) != alike for place in goals):
            return
        self.table = np.array([self._addresses, columns.widths, [0] * len(arrays)], np.int64)
        self.table[2, goals] = self._addresses[source]
        shapes = [(size, *array.shape[1:]) for array in arrays]
        self.memory = BatchPool(shapes, columns.numpy_types, None if count == size else count)

    def follows(self, storage: TensorStorage, size: int, count: int) -> bool:
        """Return whether the plan is for such batches, and the columns are still in the same memory."""
        if storage.columns is not self._columns or self.size[0] != size or self.count[0] != count:
            return False
        return self._columns.addresses() is self._addresses


def _gathers(storage: TensorStorage) -> bool:
    """Return whether a storage's rows are a plain tensordict of columns in memory, with types that NumPy has."""
    structure, columns = storage.structure, storage.columns
    if type(storage).read_at is not TensorStorage.read_at or getattr(storage, "expects_rows", False):
        return False
    if not columns.gathers_into or any(map(renames, columns.dtypes)) or not all(columns.widths):
        return False
    return type(structure) is TensorDictNode and structure.kind is None and not structure.tail


class HindsightReader:
    """Reads steps of tensor storages; the first ones get goals of other steps, chosen by a strategy.

    One compiled call chooses the goals and gathers the rows; two separate calls take 40 µs more for 256 steps of 790
    bytes.
    """

    def __init__(self, strategy: HindsightStrategy, goal_keys: Sequence[Key], achieved_key: Key) -> None:
        self._random = strategy is HindsightStrategy.RANDOM
        self._number = list(HindsightStrategy).index(strategy)
        self._keys = goal_keys, achieved_key
        self._patience = _PATIENCE
        self._plan: _Plan | None = None

    def read(
        self, storage: Storage, index: Any, chances: NDArray[np.float64], tables: TableFinder
    ) -> HindsightRows | None:
        """Read rows, and replace the goals of the first ones.

        Args:
            storage: the storage.
            index: the rows, int64 `[size]`.
            chances: random numbers in [0, 1), float64 `[n]`, one for each of the first rows; see `AchievedRows`.
            tables: finds the trajectory table.

        Returns:
            The rows. None if this cannot be done in one call: for other kinds of storages and indices, for entries
            whose shapes or types differ, and for the first few calls. All `goal_keys` but the first may be missing.
        """
        if type(index) is not torch.Tensor or index.dim() != 1 or not isinstance(storage, TensorStorage):
            return None
        size, count = index.shape[0], chances.shape[0]
        if not 0 < count <= size or storage.ndim > 1 or not storage.initialized:
            return None
        if self._patience:
            self._patience -= 1
            return None
        plan = self._plan
        if plan is None or not plan.follows(storage, size, count):
            plan = self._plan = _Plan(storage, size, count, *self._keys)
        if plan.table is None or plan.loops is None:
            return None
        runs, oldest, capacity = (_NO_RUNS, _NO_RUNS), 0, 1
        if not self._random:
            known = tables.table(storage)
            runs, oldest, capacity = known.only_lane() or runs, known.oldest, known.capacity
        leaves, targets = plan.memory()
        # The plan keeps its memory alive, so reading is safe even if the columns are replaced meanwhile.
        rows = min(storage.rows, plan.rows)
        if plan.loops.gather_in_hindsight(
            plan.table, targets, index.numpy(), rows, chances, *runs, oldest, capacity, self._number
        ) >= 0:  # fmt: skip
            return None
        left, structure = iter(leaves), plan.structure
        batch = structure.unflatten(left, plan.size)
        return HindsightRows(batch, batch if size == count else structure.unflatten(left, plan.count))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None}
