"""A sampler by staleness: how many versions the policy that produced an element is behind the present one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import MissingKeyError, SchemaError, UsageError
from ..storages.base import Storage
from ..storages.write_log import Counter
from ..ted.schema import Numbers, as_key
from ..torchrl_classes import counterpart
from .base import Index, Sampler
from .trajectories import BoundarySource, IdBoundaries, TableFinder, TrajectoryTable, by_lane, has_entry
from .uniform import first_of_each, fractions

Floats: TypeAlias = NDArray[np.float64]

_ROUNDS = 4
"""How often elements drawn twice are redrawn before falling back to an exact draw over all elements."""


class NothingFreshError(SchemaError):
    """All elements are too stale."""


@counterpart
class StalenessAwareSampler(Sampler):
    """Draws fresh elements more often than stale ones, and none that are too stale.

    The staleness of an element is `consumer_version` minus its entry `version_key` (one number per element), or 0 if
    that is negative. The time of the write does not matter. By default the weight is 1 / (1 + staleness). A batch
    contains no element twice, as long as there are enough: the first element is drawn by weight, and each further one
    by weight among the others.

    Consecutive elements of one version are handled as a run: a draw takes O(runs + batch size), and after the first
    draw the cost of a write is proportional to its length.

    Indices are int64 `[batch_size]`; for a storage of several dimensions a tuple with one such tensor for each. The
    info has `staleness`, float32 `[batch_size]`. Forked and spawned processes see `consumer_version`, too. The state
    holds it and `max_staleness`; an emptied buffer begins again with version 0.

    Args:
        max_staleness: elements above this staleness are not drawn; -1 for no limit.
        version_key: the entry with the version of each element.
        staleness_weight_fn: a function that computes weights instead. It takes the staleness of n elements, float32
            `[n]`, and returns n numbers of at least 0. Elements of weight 0 are not drawn.

    Raises:
        MissingKeyError: (a KeyError) from `sample`: the entry is not stored.
        SchemaError: (a RuntimeError) from `sample`: the storage is empty, versions are not numbers, or no element can
            be drawn.
        UsageError: (a ValueError) an argument or a weight is invalid.

    The name is TorchRL's.

    >>> from rbtool import LazyTensorStorage, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> sampler = StalenessAwareSampler(max_staleness=1)
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=6)
    >>> index = buffer.extend(TensorDict({"policy_version": torch.arange(9) // 3}, [9]))
    >>> sampler.consumer_version = 2
    >>> batch = buffer.sample()
    >>> batch["policy_version"].sort().values, batch["staleness"].unique()
    (tensor([1, 1, 1, 2, 2, 2]), tensor([0., 1.]))
    """

    def __init__(
        self,
        max_staleness: float = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: Any = "policy_version",
    ) -> None:
        self.max_staleness = _checked_limit(max_staleness)
        if staleness_weight_fn is not None and not callable(staleness_weight_fn):
            raise UsageError(f"staleness_weight_fn is a {type(staleness_weight_fn).__name__}, expected a function")
        self.staleness_weight_fn = staleness_weight_fn
        self.version_key = version_key
        self._key = as_key(version_key)
        self._version = Counter(shared=True)
        self._tables = TableFinder(self._source)
        self._weighed: tuple[Any, _Runs] | None = None

    @property
    def consumer_version(self) -> int:
        """The present version of the policy; initially 0."""
        return self._version.value

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self._version.value = _checked_version(version)

    def increment_consumer_version(self) -> None:
        """Add 1 to `consumer_version`."""
        self._version.value += 1

    def reset(self) -> None:
        """Start again with version 0."""
        self._version.value = 0
        self._weighed = None

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw elements by weight; the info has their staleness."""
        runs = self._runs(storage)
        if batch_size > runs.elements:
            run, offset = runs.drawn(batch_size, self.generator)
        else:
            run, offset = runs.drawn_once(batch_size, self.generator)
        row = torch.from_numpy((runs.first[run] + offset) % runs.capacity)
        info = {"staleness": torch.from_numpy(runs.staleness[run].astype(np.float32))}
        if storage.ndim == 1:
            return row, info
        return (row, *torch.unravel_index(torch.from_numpy(runs.lane[run]), storage.shape[1:])), info

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return how many elements are not too stale."""
        if not storage.has_rows:
            return 0
        try:
            return self._runs(storage).elements
        except NothingFreshError:
            return 0

    def _runs(self, storage: Storage) -> _Runs:
        """Return the runs of versions that can be drawn, with their weights."""
        table = self._table(storage)
        known = (storage.log.now, table, self.consumer_version, self.max_staleness, self.staleness_weight_fn)
        if self._weighed is None or self._weighed[0] != known:
            self._weighed = known, self._weigh(storage, table)
        return self._weighed[1]

    def _table(self, storage: Storage) -> TrajectoryTable:
        try:
            return self._tables.table(storage)
        except MissingKeyError as error:
            raise MissingKeyError(
                f"{'.'.join(self._key)!r} is not in the storage, so the versions of the elements are unknown",
                hint="write it with the elements, or pass another entry as version_key",
            ) from error

    def _source(self, storage: Storage) -> BoundarySource:
        if not has_entry(storage, self._key):
            raise MissingKeyError(f"{'.'.join(self._key)!r} is not in the storage")
        return IdBoundaries(self._key)

    def _weigh(self, storage: Storage, table: TrajectoryTable) -> _Runs:
        lane, first, length = table.runs()
        versions = self._versions(storage, first % table.capacity, lane)
        staleness = np.maximum(self.consumer_version - versions, 0.0)
        weight = self._weights(staleness)
        kept = weight > 0
        if self.max_staleness >= 0:
            kept &= staleness <= self.max_staleness
        if not kept.any():
            raise NothingFreshError(
                f"none of the {int(length.sum()):,} elements can be drawn: the least staleness is "
                f"{staleness.min():g} at version {self.consumer_version}, and max_staleness is {self.max_staleness:g}",
                hint="write newer elements, or raise max_staleness",
            )
        return _Runs(lane[kept], first[kept], length[kept], staleness[kept], weight[kept], capacity=table.capacity)

    def _versions(self, storage: Storage, row: Numbers, lane: Numbers) -> Floats:
        """Return the versions of the elements in these rows and lanes, float64 `[n]`."""
        rows, place = np.unique(row, return_inverse=True)
        found = by_lane(storage, self._key, rows)
        assert found is not None, "the table was built from it"
        if found.dtype.kind not in "iufb":
            raise SchemaError(f"{'.'.join(self._key)!r} is {found.dtype}, expected versions as numbers")
        versions: Floats = found[place.reshape(-1), lane, 0].astype(np.float64)
        if not np.isfinite(versions).all():
            raise SchemaError(f"{'.'.join(self._key)!r} has values that are not finite, expected versions as numbers")
        return versions

    def _weights(self, staleness: Floats) -> Floats:
        if self.staleness_weight_fn is None:
            return 1 / (1 + staleness)
        given = torch.from_numpy(staleness.astype(np.float32))
        weights = torch.as_tensor(self.staleness_weight_fn(given)).detach().numpy(force=True).astype(np.float64)
        if weights.shape != staleness.shape:
            raise UsageError(
                f"staleness_weight_fn returned {list(weights.shape)} for the staleness of {len(staleness)} elements, "
                "expected one weight for each"
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise UsageError("staleness_weight_fn returned weights that are negative or not finite")
        return weights

    # State -------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `consumer_version` and `max_staleness`."""
        return {"consumer_version": self.consumer_version, "max_staleness": self.max_staleness}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or TorchRL's; SchemaError for another sampler's state."""
        missing = [name for name in ("consumer_version", "max_staleness") if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")
        version, limit = _checked_version(state["consumer_version"]), _checked_limit(state["max_staleness"])
        self.consumer_version, self.max_staleness = version, limit

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_weighed": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(consumer_version={self.consumer_version}, max_staleness={self.max_staleness})"


class _Runs:
    """Runs of consecutive elements with one version: lane, first step, length, staleness, and weight of each
    element.
    """

    def __init__(
        self, lane: Numbers, first: Numbers, length: Numbers, staleness: Floats, weight: Floats, *, capacity: int
    ) -> None:
        self.lane, self.first, self.length, self.staleness = lane, first, length, staleness
        self.capacity = capacity
        self._weight = weight
        self._up_to = np.cumsum(
            weight / weight.max() * length
        )  # relative to the largest weight, so that no sum overflows
        self._begin = np.cumsum(length) - length

    @property
    def elements(self) -> int:
        """The number of elements in all runs."""
        return int(self.length.sum())

    def drawn(self, count: int, generator: torch.Generator | None) -> tuple[Numbers, Numbers]:
        """Draw elements by weight, with replacement; return their runs, and their offsets in these."""
        chance = fractions(2 * count, generator)
        run = np.searchsorted(self._up_to, chance[:count] * self._up_to[-1], side="right")
        run = np.minimum(run, len(self._up_to) - 1)
        return run, (chance[count:] * self.length[run]).astype(np.int64)

    def drawn_once(self, count: int, generator: torch.Generator | None) -> tuple[Numbers, Numbers]:
        """Draw different elements one after another, each by weight among those left."""
        found: Numbers = np.zeros(0, np.int64)
        for _ in range(_ROUNDS if 2 * count < self.elements else 0):
            run, offset = self.drawn(count, generator)  # rejecting repeats keeps the odds of the other elements
            found = first_of_each(np.concatenate([found, self._begin[run] + offset]))[:count]
            if len(found) == count:
                break
        if len(found) < count:
            found = np.concatenate([found, self._first_to_come(count - len(found), found, generator)])
        run = np.searchsorted(self._begin, found, side="right") - 1
        return run, found - self._begin[run]

    def _first_to_come(self, count: int, drawn: Numbers, generator: torch.Generator | None) -> Numbers:
        """Draw `count` elements that were not drawn yet, one after another by weight.

        Each element gets an exponential waiting time whose rate is its weight. The order of arrival has the same
        distribution as draws by weight without replacement (Efraimidis and Spirakis, 2006).
        """
        chance = fractions(self.elements, generator)
        with np.errstate(divide="ignore"):  # a waiting time of 0
            times = np.log(-np.log1p(-chance)) - np.repeat(np.log(self._weight), self.length)
        times[drawn] = np.inf
        first = np.argpartition(times, count - 1)[:count]
        return first[np.argsort(times[first])]


def _checked_limit(limit: Any) -> float:
    if (
        isinstance(limit, bool)
        or not isinstance(limit, int | float)
        or math.isnan(limit)
        or (limit < 0 and limit != -1)
    ):
        raise UsageError(f"max_staleness is {limit!r}, expected a number from 0, or -1 for no limit")
    return limit


def _checked_version(version: Any) -> int:
    number = version.item() if isinstance(version, torch.Tensor | np.generic) and version.size else version
    if isinstance(number, bool) or not isinstance(number, int):
        raise UsageError(f"consumer_version is {version!r}, expected a whole number")
    return number
