"""Goals in hindsight: which steps of the same trajectories achieved one, and rows with these goals.

`AchievedRows` chooses the steps; `HindsightReader` chooses them and gathers the rows in one compiled call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UsageError
from ..kernels.rows import BatchPool, compiled_loops
from ..storages.base import Storage
from ..storages.columns import renames
from ..storages.pytree import TensorDictNode
from ..storages.tensor import TensorStorage
from .boundaries import Key
from .trajectories import TableFinder, TrajectoryTable

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


_NO_RUNS = np.zeros(0, np.int64)


class HindsightRows(NamedTuple):
    """A batch of rows, and its first rows, which have other goals, as views in the same memory."""

    batch: Any
    first: Any


class _Plan:
    """How batches of `size` rows, the first `count` with other goals, are gathered from the columns of a storage.

    It is not changed, as several threads use it.
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
        """The table of `gather_in_hindsight`; None for columns of which it cannot gather."""
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
        """Whether it is for such batches, and the columns are where they were."""
        if storage.columns is not self._columns or self.size[0] != size or self.count[0] != count:
            return False
        return self._columns.addresses() is self._addresses


def _gathers(storage: TensorStorage) -> bool:
    """Whether rows of a storage are its columns, in memory, in types that numpy has, and make a plain tensordict."""
    structure, columns = storage.structure, storage.columns
    if type(storage).read_at is not TensorStorage.read_at or getattr(storage, "expects_rows", False):
        return False
    if not columns.gathers_into or any(map(renames, columns.dtypes)) or not all(columns.widths):
        return False
    return type(structure) is TensorDictNode and structure.kind is None and not structure.tail


class HindsightReader:
    """Reads steps of storages of tensors, the first of them with goals of other steps, chosen by a strategy.

    One compiled call chooses the goals and gathers the rows. A call for each takes 40 µs more for 256 steps of 790
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
        """Read the rows `index`, int64 `[size]`; as many of the first as there are chances have other goals.

        `AchievedRows` documents how the chances, float64 `[n]` in [0, 1), choose them. Goals are under `goal_keys`, of
        which all but the first may be missing. None for other storages and indices, for entries that do not fit, and
        for the first calls.
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
        # No row is read beyond the memory that the plan holds, even if the columns are exchanged meanwhile.
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
