"""Where trajectories end: sources of boundaries by ids, end flags, an episode table, or fixed tensors."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean, suggests_keywords, warn_caller
from ..storages.base import Storage
from ..storages.cursors import last_row
from ..storages.tensor import TensorStorage
from ..ted.schema import TRAJECTORY_KEYS

Key: TypeAlias = tuple[str, ...]
Ends: TypeAlias = NDArray[np.bool_]

_DONE: Key = ("next", "done")
_IDS = TRAJECTORY_KEYS["slices"]


class ConflictingArgumentsError(UsageError, TypeError):
    """Of several alternative arguments, none or more than one was given."""


class BoundarySource(ABC):
    """Finds the rows that end a trajectory. Sources that compare equal find the same rows."""

    keys: tuple[Key, ...] = ()
    """The entries that it reads."""

    looks_ahead = False
    """Whether it compares each row with the next one."""

    uses_table = False
    """Whether it uses the episode table of a dataset."""

    @abstractmethod
    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        """Return whether each row, in the order of time, ends a trajectory; bool `[rows, lanes]`.

        If the source `looks_ahead`, the value of the last row is False, as its successor is unknown.

        Raises:
            SchemaError: (a RuntimeError) an entry does not have the storage's shape.
            MissingKeyError: (a KeyError) an entry does not exist.
        """


@dataclass(frozen=True)
class FlagBoundaries(BoundarySource):
    """A row ends a trajectory if any of several flags is set; flags may have further dimensions."""

    keys: tuple[Key, ...]

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        found: Ends | None = None
        for key in self.keys:
            flags = by_lane(storage, key, rows)
            if flags is None:
                continue
            part: Ends = np.any(flags.astype(bool, copy=False), axis=2)
            found = part if found is None else np.logical_or(found, part)
        if found is None:
            raise MissingKeyError(
                f"{_listed(self.keys)} is not in the storage, so the ends of trajectories are unknown"
            )
        return found


@dataclass(frozen=True)
class IdBoundaries(BoundarySource):
    """A row ends a trajectory if the next row has another id."""

    key: Key
    looks_ahead = True

    @property
    def keys(self) -> tuple[Key, ...]:  # type: ignore[override]
        """The entry that it reads."""
        return (self.key,)

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        found = by_lane(storage, self.key, rows)
        if found is None:
            raise MissingKeyError(f"{_listed(self.keys)} is not in the storage, so trajectories cannot be separated")
        if found.shape[2] != 1:
            raise SchemaError(
                f"{_listed(self.keys)} has the shape {[*storage.shape, found.shape[2]]}, expected one id for each of "
                f"{list(storage.shape)} elements"
            )
        return changes_of(found)


@dataclass(frozen=True)
class JointBoundaries(BoundarySource):
    """A row ends a trajectory if it does for any of several sources."""

    sources: tuple[BoundarySource, ...]

    @property
    def keys(self) -> tuple[Key, ...]:  # type: ignore[override]
        """The entries that they read."""
        return tuple(key for source in self.sources for key in source.keys)

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        """Whether one of them compares each row with the next one."""
        return any(source.looks_ahead for source in self.sources)

    @functools.cached_property
    def uses_table(self) -> bool:  # type: ignore[override]
        """Whether one of them uses the episode table of a dataset."""
        return any(source.uses_table for source in self.sources)

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        found: Ends = np.logical_or.reduce([source.ends(storage, rows) for source in self.sources])
        if self.looks_ahead:
            found[-1:] = False
        return found


@dataclass(frozen=True, eq=False)
class FixedBoundaries(BoundarySource):
    """Ends given as a tensor of the storage's `shape`; `name` is the argument that gave them: `ends` or
    `trajectories`.
    """

    given: Ends
    name: str = "ends"

    @classmethod
    def of_ids(cls, ids: np.ndarray[Any, Any]) -> FixedBoundaries:
        """Make a source from ids: a row ends a trajectory if the next row, around the ring, has another id."""
        return cls(ids != np.roll(ids, -1, axis=0), "trajectories")

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        given, expected = self.given.shape, tuple(storage.shape)
        if given != expected:
            raise SchemaError(
                f"{self.name} has the shape {list(given)}, expected {list(expected)}: one value for each element",
                hint="pass values for all elements, or name the entry that holds them: end_key or traj_key",
            )
        return self.given[rows].reshape(-1, int(np.prod(expected[1:], dtype=np.int64)))


def changes_of(ids: np.ndarray[Any, Any]) -> Ends:
    """Return where ids `[rows, lanes, further]` differ from the next row's; False for the last row."""
    found = np.zeros(ids.shape[:2], bool)
    np.any(ids[1:] != ids[:-1], axis=2, out=found[:-1])
    return found


@dataclass(frozen=True)
class EpisodeBoundaries(BoundarySource):
    """Takes ends from the episode table of a dataset, without reading rows."""

    uses_table = True

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        lengths = storage.episode_lengths()
        if lengths is None or int(lengths.sum()) > storage.shape[0]:
            raise SchemaError("the storage has no episode table that matches its rows")
        found = np.zeros((storage.shape[0], 1), bool)
        found[np.cumsum(lengths[lengths > 0]) - 1] = True
        return found[rows]


def has_entry(storage: Storage, key: Key) -> bool:
    """Whether a storage has an entry; if it stores single elements, whether the first element has it."""
    if isinstance(storage, TensorStorage):
        return stored_entry(storage, key) is not None
    return storage.entry(key, slice(0, 1)) is not None


def stored_entry(storage: TensorStorage, key: Key) -> torch.Tensor | None:
    """Return the tensor of an entry for all rows of the capacity; None if there is none."""
    if not storage.initialized:
        return None
    place = storage.structure.places.get(key)
    return None if place is None else storage.columns.leaves[place]


def by_lane(storage: Storage, key: Key, rows: NDArray[np.int64] | slice) -> np.ndarray[Any, Any] | None:
    """Read rows of an entry as `[rows, lanes, further]`; None if the entry does not exist."""
    chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows)
    if isinstance(storage, TensorStorage):
        leaf = stored_entry(storage, key)
        found = None if leaf is None else leaf[: storage.rows][chosen]
    else:
        found = storage.entry(key, chosen)
    if found is None:
        return None
    lead = tuple(storage.shape)[1:]
    count = len(rows) if isinstance(rows, np.ndarray) else len(range(*rows.indices(storage.shape[0])))
    if tuple(found.shape[: 1 + len(lead)]) != (count, *lead):
        raise SchemaError(
            f"{_listed((key,))} has the shape {list(found.shape)} for {count:,} rows, expected it to begin with the "
            f"storage's {storage.ndim} dimensions {list(storage.shape)}"
        )
    return found.reshape(count, int(np.prod(lead, dtype=np.int64)), -1).numpy(force=True)


def _listed(keys: Sequence[Key]) -> str:
    return " or ".join(repr(".".join(key)) for key in keys)


class BoundaryChoice:
    """Chooses the source of trajectory boundaries from the arguments that `SliceSampler` documents."""

    def __init__(
        self,
        end_key: Any,
        end_keys: Any,
        traj_key: Any,
        ends: torch.Tensor | None,
        trajectories: torch.Tensor | None,
        cache_values: bool,
    ) -> None:
        if end_key is not None and end_keys is not None:
            raise SchemaError(f"end_key is {end_key!r} and end_keys is {end_keys!r}: give one of them")
        self._ids: Key | None = None if traj_key is None else boundary_key(traj_key)
        self._flags: tuple[Key, ...] | None = None
        if end_key is not None or end_keys is not None:
            self._flags = tuple(boundary_key(key) for key in ([end_key] if end_keys is None else _several(end_keys)))
        self._fixed = _fixed_boundaries(ends, trajectories, cache_values, end_key, end_keys, traj_key)
        self._warned = False

    def source(self, storage: Storage) -> BoundarySource:
        """Return the source for a storage; MissingKeyError (a KeyError) if it has none of the entries."""
        if self._fixed is not None:
            return self._fixed
        ids = (self._ids,) if self._ids is not None else _IDS
        if self._ids in (None, ("episode",)) and self._flags is None and storage.episode_lengths() is not None:
            return EpisodeBoundaries()
        by_ids = next((IdBoundaries(key) for key in ids if has_entry(storage, key)), None)
        flags = (_DONE,) if self._flags is None else self._flags
        by_flags = FlagBoundaries(flags) if any(has_entry(storage, key) for key in flags) else None
        wanted, other = (by_ids, by_flags) if self._ids is not None or self._flags is None else (by_flags, by_ids)
        if wanted is None and other is not None and (self._ids is not None or self._flags is not None):
            self._warn_once(storage, flags if self._ids is None else ids, other)
        found = wanted or other
        if found is None:
            names = ", ".join(".".join(key) for key in (*ids, *flags))
            raise MissingKeyError(f"trajectories cannot be separated: the storage has none of {names}")
        return found

    def _warn_once(self, storage: Storage, missing: Sequence[Key], found: BoundarySource) -> None:
        if self._warned:
            return
        self._warned = True
        known = [".".join(key) for key in storage.structure.places] if isinstance(storage, TensorStorage) else []
        warn_caller(
            f"{_listed(missing)} is not in the storage, trajectories are separated by {_listed(found.keys)}"
            f"{did_you_mean('.'.join(missing[0]), known)}"
        )


@dataclass(frozen=True)
class StrictBoundaries:
    """Chooses all boundaries that a storage has, for uses that must not cross any of them.

    If there is an episode table, it decides alone. Otherwise an episode ends at the flag `done` (if it is missing, or
    with `any_flag`, at `terminated` or `truncated` next to it), and where the ids `traj` change, by default the ids
    that `SliceSampler` looks for.
    """

    done: Key = _DONE
    traj: Key | None = None
    any_flag: bool = False

    def source(self, storage: Storage) -> BoundarySource:
        """Return the source for a storage.

        Raises:
            MissingKeyError: (a KeyError) a named entry does not exist, or nothing separates episodes.
        """
        if self.traj is None and storage.episode_lengths() is not None:
            return EpisodeBoundaries()
        ids = next((key for key in (_IDS if self.traj is None else (self.traj,)) if has_entry(storage, key)), None)
        siblings = tuple((*self.done[:-1], name) for name in ("terminated", "truncated"))
        flags = (self.done,) if has_entry(storage, self.done) else siblings
        flags = (self.done, *siblings) if self.any_flag else flags
        known = any(has_entry(storage, key) for key in flags)
        named = [self.traj] if self.traj is not None and ids is None else []
        named += [self.done] if self.done != _DONE and self.done not in flags else []
        if named:
            raise MissingKeyError(f"{_listed(named)} is not in the storage, so episodes cannot be separated")
        if ids is None and not known:
            raise MissingKeyError(
                f"{_listed((*_IDS, self.done))} is not in the storage, so episodes cannot be separated"
            )
        found = [*([FlagBoundaries(flags)] if known else ()), *([IdBoundaries(ids)] if ids is not None else ())]
        return found[0] if len(found) == 1 else JointBoundaries(tuple(found))


def boundary_key(key: Any) -> Key:
    """Return a key as a tuple of names; UsageError (a ValueError) for anything else."""
    found = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list | tuple) else ()
    if not found or not all(isinstance(part, str) for part in found):
        raise UsageError(f"the key is {key!r}, expected a name or a tuple of names")
    return found


def _several(keys: Any) -> Sequence[Any]:
    """Return a list of keys; UsageError if it is empty, or a single key."""
    if not isinstance(keys, list | tuple) or not keys or (isinstance(keys, tuple) and keys[0] == _DONE[0]):
        raise UsageError(f"end_keys is {keys!r}, expected a list of keys", hint="pass a single key as end_key")
    return keys


def _fixed_boundaries(
    ends: torch.Tensor | None, trajectories: torch.Tensor | None, cache_values: bool, *keys: Any
) -> BoundarySource | None:
    given = next((torch.as_tensor(values) for values in (ends, trajectories) if values is not None), None)
    if given is None:
        return None
    name = "ends" if ends is not None else "trajectories"
    if ends is not None and trajectories is not None:
        raise SchemaError("ends and trajectories are both set: give one of them")
    if any(key is not None for key in keys):
        raise SchemaError(f"{name} and the key of an entry are both set: give one of them")
    if not cache_values:
        raise SchemaError(f"{name} needs cache_values=True", hint="pass cache_values=True")
    if not given.dim() or not given.numel():
        raise SchemaError(f"{name} has the shape {list(given.shape)}, expected the storage's shape")
    values = given.numpy(force=True)
    return FixedBoundaries(values.astype(bool)) if ends is not None else FixedBoundaries.of_ids(values)


@suggests_keywords()
def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: Any = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the trajectories in a storage from ids or end flags.

    The last row ends a trajectory, unless the storage is at capacity. Then rows form a ring: the first row follows the
    last one, and only the newest row always is an end. A lane without any end also ends at its last row. Samplers use a
    `TrajectoryTable` instead, which is updated with every write.

    Args:
        trajectory: ids of trajectories, `[rows, lanes, ...]`; a trajectory ends where the id changes.
        end: end flags, `[rows, lanes, ...]`; give either this or `trajectory`.
        at_capacity: whether the storage is a full ring.
        cursor: the row, or rows, written last; the last of them is the newest row.
        device: the device of the results; default the signal's.

    Returns:
        First and last elements of all trajectories, int64 `[n, ndim]`, both inclusive, and their lengths, int64 `[n]`;
        lane by lane, ordered by last rows.

    Raises:
        ConflictingArgumentsError: (a TypeError) not exactly one signal is given.
        SchemaError: (a RuntimeError) the signal is empty, or at capacity the cursor is invalid.

    >>> ids = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
    >>> start, stop, length = find_start_stop_traj(trajectory=ids, at_capacity=True, cursor=1)
    >>> start.tolist(), stop.tolist(), length.tolist()
    ([[4], [2]], [[1], [3]], [8, 2])
    """
    if (trajectory is None) == (end is None):
        raise ConflictingArgumentsError("give either trajectory or end")
    given = trajectory if trajectory is not None else end
    assert given is not None  # checked above
    if not given.dim() or not given.numel():
        raise SchemaError(f"the signal has the shape {list(given.shape)}, expected at least one row")
    signal = given if device is None else given.to(device)
    rows, others = len(signal), tuple(signal.shape[1:])
    flat = signal.reshape(rows, -1)
    ends = flat != flat.roll(-1, 0) if trajectory is not None else flat.bool()
    ends = ends.clone()
    if not at_capacity:
        ends[-1] = True
    elif cursor is not None:
        ends[_newest(cursor, rows)] = True
    ends[-1] |= ~ends.any(0)
    lane, stop = ends.T.nonzero(as_tuple=True)
    first_of_lane = torch.ones_like(lane, dtype=torch.bool)
    first_of_lane[1:] = lane[1:] != lane[:-1]
    counts = ends.sum(0)
    before = stop.roll(1)
    before[first_of_lane] = stop[counts.cumsum(0)[counts > 0] - 1]  # around the ring: the first one follows the last
    start = (before + 1) % rows
    length = (stop - start) % rows + 1
    lanes = torch.unravel_index(lane, others) if others else ()
    return torch.stack([start, *lanes], -1), torch.stack([stop, *lanes], -1), length


def _newest(cursor: Any, rows: int) -> int:
    """Return the last row of a cursor; SchemaError if it is empty, outside of the storage, or of another type."""
    try:
        row = last_row(cursor + rows if isinstance(cursor, int) and -rows <= cursor < 0 else cursor)
    except (TypeError, ValueError, RuntimeError):
        row = None
    if row is None or row >= rows:
        raise SchemaError(
            f"the cursor is {cursor!r}, expected the row or rows written last, of {rows}: an int, or a tensor or "
            "range that is not empty"
        )
    return row
