"""Finds where trajectories begin and end in a storage, by ids, end flags or an episode table, and follows its writes.

`trajectory_table(storage, source)` returns the one table that all samplers of a storage share. Steps have absolute
numbers, which grow with time and never wrap; the row of step `n` is `n % capacity`:

    capacity 6, steps 4 to 9 are stored, 9 is the newest

    row         0    1    2    3    4    5
    step        6    7    8    9    4    5
    episode     B    B    C    C    A    B        B continues across the wrap: steps 5, 6, 7
                               ↑ newest: C ends here, whatever row 4 holds

A write only advances counters. The next `refresh` reads the ends of the rows written since the last one. A `LaneRuns`
keeps the trajectories that are long enough for a slice by some `SliceRule`, ready to be drawn.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean, suggests_keywords, warn_caller
from ..kernels.slices import SliceRule, SliceTable
from ..storages.base import Storage
from ..storages.cursors import last_row
from ..storages.pytree import StackNode
from ..storages.tensor import TensorStorage
from ..storages.write_log import Change, Written
from ..ted.schema import NEXT_DONE, TRAJECTORY_KEYS, Array, Key, Numbers, as_key

Ends: TypeAlias = NDArray[np.bool_]

_IDS = TRAJECTORY_KEYS["slices"]


class ConflictingArgumentsError(UsageError, TypeError):
    """None, or more than one, of several alternative arguments was given."""


class BoundarySource(ABC):
    """Finds the rows that end a trajectory. Sources that compare equal find the same rows."""

    keys: tuple[Key, ...] = ()
    """The entries that it reads; empty if it reads no rows."""

    looks_ahead = False
    """Whether it compares each row with the next one, so that a new row decides whether the row before is an end."""

    uses_table = False
    """Whether it uses the episode table of a dataset."""

    @abstractmethod
    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
        """Return whether each of these rows, given in the order of time, ends a trajectory; bool `[rows, lanes]`.

        If the source `looks_ahead`, the value of the last row is False, as its successor is unknown.

        Raises:
            SchemaError: (a RuntimeError) an entry does not have the storage's shape.
            MissingKeyError: (a KeyError) an entry does not exist.
        """


@dataclass(frozen=True)
class FlagBoundaries(BoundarySource):
    """A row is the last one of its trajectory if any of several flags is set; flags may have further dimensions."""

    keys: tuple[Key, ...]

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
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

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
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

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
        found: Ends = np.logical_or.reduce([source.ends(storage, rows) for source in self.sources])
        if self.looks_ahead:
            found[-1:] = False
        return found


@dataclass(frozen=True, eq=False)
class FixedBoundaries(BoundarySource):
    """Ends that the user gave as a tensor of the storage's shape, in the argument `name`: `ends` or `trajectories`."""

    given: Ends
    name: str = "ends"

    @classmethod
    def of_ids(cls, ids: Array) -> FixedBoundaries:
        """Make a source from ids: a row ends a trajectory if the next row, around the ring, has another id."""
        return cls(ids != np.roll(ids, -1, axis=0), "trajectories")

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
        given, expected = self.given.shape, tuple(storage.shape)
        if given != expected:
            raise SchemaError(
                f"{self.name} has the shape {list(given)}, expected {list(expected)}: one value for each element",
                hint="pass values for all elements, or name the entry that holds them: end_key or traj_key",
            )
        return self.given[rows].reshape(-1, int(np.prod(expected[1:], dtype=np.int64)))


def changes_of(ids: Array) -> Ends:
    """Return where ids `[rows, lanes, further]` differ from the ids of the next row; False for the last row."""
    found = np.zeros(ids.shape[:2], bool)
    np.any(ids[1:] != ids[:-1], axis=2, out=found[:-1])
    return found


@dataclass(frozen=True)
class EpisodeBoundaries(BoundarySource):
    """Ends from the episode table of a dataset, without reading rows."""

    uses_table = True

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
        lengths = storage.episode_lengths()
        if lengths is None or int(lengths.sum()) > storage.shape[0]:
            raise SchemaError("the storage has no episode table that matches its rows")
        found = np.zeros((storage.shape[0], 1), bool)
        found[np.cumsum(lengths[lengths > 0]) - 1] = True
        return found[rows]


def has_entry(storage: Storage, key: Key) -> bool:
    """Return whether a storage has an entry; for a storage of single elements, whether the first one has it."""
    if has_columns(storage):
        return stored_entry(storage, key) is not None
    return storage.entry(key, slice(0, 1)) is not None


def has_columns(storage: Storage) -> TypeGuard[TensorStorage]:
    """Return whether each entry is a single tensor; the parts of a lazy stack have tensors of their own."""
    return isinstance(storage, TensorStorage) and not (storage.initialized and isinstance(storage.structure, StackNode))


def stored_entry(storage: TensorStorage, key: Key) -> torch.Tensor | None:
    """Return the tensor of an entry for all rows of the capacity; None if there is none."""
    if not storage.initialized:
        return None
    place = storage.structure.places.get(key)
    return None if place is None else storage.columns.leaves[place]


def by_lane(storage: Storage, key: Key, rows: Numbers | slice) -> Array | None:
    """Read rows of an entry as `[rows, lanes, further]`; None if the entry does not exist."""
    chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows)
    if has_columns(storage):
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
        self._ids: Key | None = None if traj_key is None else as_key(traj_key)
        self._flags: tuple[Key, ...] | None = None
        if end_key is not None or end_keys is not None:
            self._flags = tuple(as_key(key) for key in ([end_key] if end_keys is None else _several(end_keys)))
        self._fixed = _fixed_boundaries(ends, trajectories, cache_values, end_key, end_keys, traj_key)
        self._warned = False

    def source(self, storage: Storage) -> BoundarySource:
        """Return the source for a storage; MissingKeyError (a KeyError) if it has none of the entries."""
        if self._fixed is not None:
            return self._fixed
        ids = (self._ids,) if self._ids is not None else _IDS
        if self._ids in (None, ("episode",)) and self._flags is None and storage.episode_lengths() is not None:
            return EpisodeBoundaries()
        flags = (NEXT_DONE,) if self._flags is None else self._flags
        by_ids, by_flags = self._stored(storage, ids, flags)
        wanted, other = (by_ids, by_flags) if self._ids is not None or self._flags is None else (by_flags, by_ids)
        if wanted is None and other is not None and (self._ids is not None or self._flags is not None):
            self._warn_once(storage, flags if self._ids is None else ids, other)
        found = wanted or other
        if found is None:
            names = ", ".join(".".join(key) for key in (*ids, *flags))
            raise MissingKeyError(f"trajectories cannot be separated: the storage has none of {names}")
        return found

    @staticmethod
    def _stored(
        storage: Storage, ids: Sequence[Key], flags: tuple[Key, ...]
    ) -> tuple[IdBoundaries | None, FlagBoundaries | None]:
        by_ids = next((IdBoundaries(key) for key in ids if has_entry(storage, key)), None)
        return by_ids, FlagBoundaries(flags) if any(has_entry(storage, key) for key in flags) else None

    def sources(self, storage: Storage) -> tuple[BoundarySource, ...]:
        """Return the source for a storage, followed by one of the other kind (ids or flags) if that is stored, too."""
        chosen = self.source(storage)
        if not isinstance(chosen, IdBoundaries | FlagBoundaries):
            return (chosen,)
        stored = self._stored(storage, _IDS if self._ids is None else (self._ids,), self._flags or (NEXT_DONE,))
        return chosen, *(one for one in stored if one is not None and one != chosen)

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
    """Combines all boundaries that a storage has, for windows and stacks of steps that must not cross any of them.

    If there is an episode table, it is used alone. Otherwise an episode ends at the flag `done` and where the ids
    `traj` change, by default the ids that `SliceSampler` looks for. If `done` is missing, the flags `terminated` and
    `truncated` next to it are used instead; with `any_flag`, they always count as well.
    """

    done: Key = NEXT_DONE
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
        named += [self.done] if self.done != NEXT_DONE and self.done not in flags else []
        if named:
            raise MissingKeyError(f"{_listed(named)} is not in the storage, so episodes cannot be separated")
        if ids is None and not known:
            raise MissingKeyError(
                f"{_listed((*_IDS, self.done))} is not in the storage, so episodes cannot be separated"
            )
        found = [*([FlagBoundaries(flags)] if known else ()), *([IdBoundaries(ids)] if ids is not None else ())]
        return found[0] if len(found) == 1 else JointBoundaries(tuple(found))


def _several(keys: Any) -> Sequence[Any]:
    """Return a list of keys; UsageError if it is empty, or a single key."""
    if not isinstance(keys, list | tuple) or not keys or (isinstance(keys, tuple) and keys[0] == NEXT_DONE[0]):
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

    The last row ends a trajectory, unless the storage is at capacity. At capacity, rows form a ring: the first row
    follows the last one, and the newest row is always an end. A lane without any end is taken to end at its last row.
    Samplers use a `TrajectoryTable` instead, which follows every write.

    Args:
        trajectory: ids of trajectories, `[rows, lanes, ...]`; a trajectory ends where the id changes.
        end: end flags, `[rows, lanes, ...]`; give either this or `trajectory`.
        at_capacity: whether the storage is a full ring.
        cursor: the row, or rows, written last; the last one of these is the newest row.
        device: the device of the results; by default the device of `trajectory` or `end`.

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


_KEPT = 4
"""For how many slice rules the eligible trajectories are kept up to date."""

_REMEMBERED = 1000
"""For how many past versions of a table the changes are recorded."""

_FEW = 64
"""Up to this many edited rows are read again; after larger edits the table is rebuilt."""

_ENDLESS = 1 << 40
"""The capacity that is assumed for unbounded storages, which never become full."""

_TABLES: weakref.WeakKeyDictionary[Storage, dict[BoundarySource, TrajectoryTable]] = weakref.WeakKeyDictionary()


_LOCK = threading.RLock()
"""Held while a table is changed, as several buffers may sample from one storage."""


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # the thread that may hold the old lock does not exist in a forked child


os.register_at_fork(after_in_child=_renew_lock)


def trajectory_table(storage: Storage, source: BoundarySource) -> TrajectoryTable:
    """Return the table of a storage's trajectories that all users of this boundary source share."""
    with _LOCK:
        tables = _TABLES.setdefault(storage, {})
        table = tables.get(source)
        if table is None:
            table = tables[source] = TrajectoryTable(storage, source)
        return table


class TableFinder:
    """Finds the trajectory table of storages; `choose` returns the boundary source for a storage."""

    def __init__(self, choose: Callable[[Storage], BoundarySource]) -> None:
        self._choose = choose
        self._found: tuple[weakref.ref[Storage], TrajectoryTable, Any] | None = None
        """The storage of the last call, its table, and how its rows were nested then."""

    def table(self, storage: Storage) -> TrajectoryTable:
        """Return the table of a storage, up to date. Raises what `choose` and `TrajectoryTable.refresh` raise."""
        found = self._found
        structure = storage.structure if isinstance(storage, TensorStorage) and storage.initialized else None
        if (
            found is None
            or found[0]() is not storage
            or found[2] is not structure  # entries that separate trajectories may have been added
            or _is_outdated(found[1].source, storage)
        ):
            found = self._found = weakref.ref(storage), trajectory_table(storage, self._choose(storage)), structure
        table = found[1]
        table.refresh()
        return table

    @property
    def source(self) -> BoundarySource | None:
        """The boundary source of the last storage; None before the first call."""
        return None if self._found is None else self._found[1].source

    def forget(self) -> None:
        """Choose the boundary source again at the next call."""
        self._found = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}


def _is_outdated(source: BoundarySource, storage: Storage) -> bool:
    """Return whether rows of a dataset were overwritten, so that its episode table no longer describes them."""
    return source.uses_table and storage.log.now.rows > 0


class TrajectoryTable:
    """The trajectories of a storage, lane by lane; a lane is one element of the dimensions after the first.

    Only steps that were written one after another can belong together: no trajectory continues behind the newest row,
    even if the next row of the ring, the oldest one, has the same id. A storage that was not written as a ring does not
    wrap.

    Each lane has one growing trajectory, which starts at step `_open[lane]` and has not ended yet; it may be empty.
    `_runs` holds all trajectories, `_eligible` the ones that are long enough for each `SliceRule` in use. `version`
    counts changes, so that users can tell whether what they derived from the table is still valid.
    """

    def __init__(self, storage: Storage, source: BoundarySource) -> None:
        self._storage = weakref.ref(storage)
        self.source = source
        self.version = 0
        self.oldest, self.newest = 0, -1
        self.capacity = self.lanes = 0
        self._seen: Written | None = None
        self._ends: Ends = np.zeros((0, 0), bool)
        self._open: Numbers = np.zeros(0, np.int64)
        self._runs = LaneRuns(0, SliceRule())
        self._eligible: dict[SliceRule, LaneRuns] = {}
        self._rows = 0
        self._changed: tuple[int, list[int]] | None = None

    # Catching up -------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the rows written since the last call.

        Raises:
            SchemaError: (a RuntimeError) the storage is empty, or an entry does not fit it.
            MissingKeyError: (a KeyError) an entry does not exist.
        """
        storage = self._storage()
        assert storage is not None, "the caller keeps the storage alive"
        if storage.log.now != self._seen:
            with _LOCK:
                self._catch_up(storage)

    def _catch_up(self, storage: Storage) -> None:
        now, seen = storage.log.now, self._seen
        if now == seen:
            return
        if not len(storage):
            self._seen = None
            raise SchemaError("Cannot sample from an empty storage: it has no elements yet")
        fresh = now.rows - seen.rows if seen is not None else 0
        holds = seen is not None and self._still_holds(storage, seen)
        self._seen = None  # if reading fails, the next call rebuilds the table
        if holds and 0 < fresh < self.capacity:
            self._advance(storage, fresh)
        elif fresh or not holds:
            self._build(storage, now)
        self._seen = now

    def _still_holds(self, storage: Storage, seen: Written) -> bool:
        """Return whether no change since `seen`, apart from writes around the ring, affects the ends."""
        changes = storage.log.since(seen.irregular)
        return changes is not None and all(self._keeps_ends(storage, change) for change in changes)

    def _keeps_ends(self, storage: Storage, change: Change) -> bool:
        """Return whether a change left the ends of all trajectories as they are."""
        if change.keys is not None:
            pairs = [(changed, key) for changed in change.keys for key in self.source.keys]
            if not any(changed[: len(key)] == key[: len(changed)] for changed, key in pairs):
                return True
        if change.rows is None or storage.shape[0] != self._rows:
            return False
        if not self.source.keys:
            return True  # the source does not read rows
        if isinstance(change.rows, slice):
            numbers = np.arange(change.rows.start, change.rows.stop)
        else:
            numbers = change.rows.numpy(force=True)
        return len(numbers) <= _FEW and all(self._is_as_before(storage, int(number)) for number in numbers)

    def _is_as_before(self, storage: Storage, row: int) -> bool:
        """Return whether a row and the row before it are ends exactly if they were before."""
        step = self.oldest + (row - self.oldest) % self.capacity
        first, last = max(step - 1, self.oldest), min(step + 1, self.newest)
        rows = np.arange(first, last + 1) % self.capacity
        if (rows >= self._rows).any():
            return False  # the row next to it was never written
        found = self.source.ends(storage, rows)
        if self.source.looks_ahead and last < self.newest:
            found, rows = found[:-1], rows[:-1]
        return bool((found == self._ends[rows]).all())

    def _advance(self, storage: Storage, fresh: int) -> None:
        """Append the `fresh` rows written last to all lanes."""
        # Whether the newest row so far is an end was unknown to a source that looks ahead, so it is read again.
        again = self.source.looks_ahead and self.newest % self.capacity < self._rows
        first = self.newest + (0 if again else 1)
        last = self.newest + fresh
        rows = np.arange(first, last + 1) % self.capacity
        ends = self.source.ends(storage, rows)
        self._make_room(int(rows.max()) + 1)
        self._ends[rows] = ends
        self.newest = last
        self.oldest = max(self.oldest, last - self.capacity + 1)
        lane, step = np.nonzero(ends.T)
        if len(lane):
            self._close(lane, step + first)
        self._settle(storage.shape[0])
        self._note(first)

    def _make_room(self, rows: int) -> None:
        """Make room for the ends of this many rows; the array grows on demand, up to the capacity."""
        there = len(self._ends)
        if rows > there:
            more = min(self.capacity, max(rows, 2 * there)) - there
            self._ends = np.concatenate([self._ends, np.zeros((more, self.lanes), bool)])

    def _settle(self, rows: int) -> None:
        """Update the trajectories to the present rows, and start a new version."""
        np.maximum(self._open, self.oldest, out=self._open)
        for runs in (self._runs, *self._eligible.values()):
            runs.follow(self._open, self.newest, self.oldest)
        self._rows = rows
        self.version += 1

    def _note(self, first: int) -> None:
        """Record the first step that this version changed, and drop old records."""
        since, firsts = self._changed or (self.version - 1, [])
        firsts.append(first)
        if len(firsts) > _REMEMBERED:
            since, firsts = since + len(firsts) // 2, firsts[len(firsts) // 2 :]
        self._changed = (since, firsts)

    def _close(self, lane: Numbers, stop: Numbers) -> None:
        """End trajectories at the steps `stop`, `[n]`, which are ordered by lane and time.

        The first of each lane began where the lane's growing trajectory did, each further one behind the end before it.
        After the last end of a lane, its growing trajectory starts anew.
        """
        start = np.empty_like(stop)
        start[1:] = stop[:-1] + 1
        begins = np.ones(len(lane), bool)
        begins[1:] = lane[1:] != lane[:-1]
        start[begins] = self._open[lane[begins]]
        last = np.ones(len(lane), bool)
        last[:-1] = begins[1:]
        self._open[lane[last]] = stop[last] + 1
        for runs in (self._runs, *self._eligible.values()):
            runs.append(lane, start, stop)

    def _build(self, storage: Storage, now: Written) -> None:
        """Read the ends of all rows.

        The cursor divides a full ring into an early part, which is older, and a late one. Steps are numbered so that
        `step % capacity` is the row:

            row      0    1    2  │  3    4    5        capacity 6, the next write goes to row 3
            step     6    7    8  │  3    4    5        oldest 3, newest 8, offset 6
                     late            early

        If the ring is not full, but has rows behind the cursor, the row after the last one was never written: no
        trajectory continues from the early part to the late one.
        """
        rows = storage.shape[0]
        self.lanes = int(np.prod(storage.shape[1:], dtype=np.int64))
        self.capacity = max(rows, min(storage.max_size // self.lanes, _ENDLESS))
        following = now.next_row % self.capacity
        early = max(rows - following, 0)
        gap = early > 0 and rows < self.capacity
        late = rows - early
        offset = self.capacity if early else 0
        self.oldest = following if early else 0
        self.newest = offset + late - 1
        self._ends = np.zeros((rows, self.lanes), bool)
        self._runs, self._eligible = LaneRuns(self.lanes, SliceRule()), {}
        self._open = np.full(self.lanes, self.oldest)
        if early:
            self._ends[late:] = self.source.ends(storage, slice(late, rows))
            if gap:
                self._ends[-1] = True
            elif late and self.source.looks_ahead:
                self._ends[-1] = self.source.ends(storage, np.array([rows - 1, 0]))[0]
            self._close_all(late, rows, 0)
        if gap:
            self._open[:] = offset
        if late:
            self._ends[:late] = self.source.ends(storage, slice(0, late))
            self._close_all(0, late, offset)
        self._settle(rows)
        self._changed = None

    def _close_all(self, begin: int, stop: int, offset: int) -> None:
        """End trajectories at the known ends from row `begin` to `stop`; step numbers are rows plus `offset`."""
        lane, row = np.nonzero(self._ends[begin:stop].T)
        if len(lane):
            self._close(lane, row + (begin + offset))

    # Looking up --------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of trajectories in all lanes."""
        return self._runs.count

    def runs(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of all trajectories, lane by lane, oldest first."""
        return self._runs.all()

    def eligible(self, rule: SliceRule) -> LaneRuns:
        """Return the trajectories that are long enough for this rule; from now on they are kept up to date."""
        found = self._eligible.get(rule)
        return self._list_eligible(rule) if found is None else found

    def _list_eligible(self, rule: SliceRule) -> LaneRuns:
        with _LOCK:
            found = LaneRuns(self.lanes, rule)
            found.append(*self._runs.over())
            found.follow(self._open, self.newest, self.oldest)
            while len(self._eligible) >= _KEPT:
                del self._eligible[next(iter(self._eligible))]
            self._eligible[rule] = found
            return found

    def only_lane(self) -> tuple[Numbers, Numbers] | None:
        """Return first and last steps of all trajectories, oldest first, as views; None if there are several lanes."""
        return self._runs.bounds() if self.lanes == 1 else None

    def steps_at(self, row: Numbers) -> Numbers:
        """Return the absolute step numbers of rows of the storage."""
        return self.oldest + (row - self.oldest) % self.capacity

    def age(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return how many stored steps of its trajectory come before each step; see `reach` for the arguments."""
        return step - self._runs.start_of(step, lane)

    def reach(self, step: Numbers, lane: Numbers, limit: int | None = None) -> Numbers:
        """Return how many steps there are from each step to the end of its trajectory, both inclusive; int64 `[n]`.

        Args:
            step: absolute numbers of stored steps.
            lane: their lanes.
            limit: cap results at this number, which makes them cheaper to compute.
        """
        if limit is None or self.lanes == 1:
            return self._runs.stop_of(step, lane) - step + 1
        ahead = step[:, None] + np.arange(limit)
        rows = np.minimum(ahead % self.capacity, len(self._ends) - 1)  # an end comes before any row beyond
        over = self._ends[rows, lane[:, None]]
        over |= ahead >= self.newest
        return np.where(over.any(1), over.argmax(1) + 1, limit)

    def changes(self, since: int) -> tuple[int, int] | None:
        """Return the first and last step that were added since a version; None if other steps have changed as well.

        Slices that start before the first added step may now extend into it.
        """
        if since == self.version:
            return self.newest + 1, self.newest
        if self._changed is None or self._changed[0] > since:
            return None
        place = since - self._changed[0]
        return self._changed[1][place], self.newest


def clamped(steps: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Ends]:
    """Replace steps outside of their trajectories by the nearest step inside.

    Args:
        steps: the steps, int64 `[n, T]`.
        first, last: the first and last steps of n trajectories, int64 `[n]`.

    Returns:
        The steps, and which of them were replaced; both `[n, T]`.
    """
    first, last = first[:, None], last[:, None]
    return np.clip(steps, first, last), (steps < first) | (steps > last)


@dataclass(frozen=True, slots=True)
class Runs:
    """Trajectories, lane by lane and oldest first, with the absolute numbers of their first and last steps."""

    lane: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def of(cls, table: TrajectoryTable) -> Runs:
        """Return all trajectories of a table."""
        lane, start, length = table.runs()
        return cls(lane, start.copy(), start + length - 1)  # copied, as first and last steps are edited in place

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def length(self) -> Numbers:
        """The number of steps of each trajectory."""
        return self.last - self.first + 1

    def moved(self, steps: int) -> Runs:
        """Return the trajectories with `steps` added to their step numbers."""
        return Runs(self.lane, self.first + steps, self.last + steps)

    def by_place(self, rows: int, rotation: tuple[int, int] = (0, 0)) -> Numbers:
        """Return the permutation that gives TorchRL's order: lane by lane, by the row of the last step.

        Args:
            rows: the rows of the ring.
            rotation: `(row, before)` gives the order as it was before a ring of `before` rows was rotated so that `row`
                became row 0.
        """
        row, before = rotation
        place = self.last % rows
        return np.lexsort(((place + row) % before if before else place, self.lane))

    def found_in(self, other: Runs) -> Numbers:
        """Return the number of each trajectory in `other`, a later state; -1 if its last step was overwritten."""
        if not len(other):
            return np.full(len(self), -1)
        begin = min(int(self.last.min(initial=0)), int(other.first.min()))
        span = max(int(self.last.max(initial=0)), int(other.last.max())) - begin + 1
        places = np.searchsorted(
            other.lane * span + (other.first - begin), self.lane * span + (self.last - begin), "right"
        )
        places = np.maximum(places - 1, 0)
        there = (
            (other.lane[places] == self.lane) & (other.first[places] <= self.last) & (self.last <= other.last[places])
        )
        return np.where(there, places, -1)


_FIRST_WIDTH = 16

_MANY = 32
"""If there are more new trajectories per lane than this, `append` loops over the lanes, which takes less memory."""


class LaneRuns:
    """The trajectories of `lanes` lanes that are long enough for a slice, ready to be drawn.

    Each lane is a queue in a row of an array, in absolute step numbers:

        removed │ head … ended trajectories … tail │ growing │ free
                                                   ↑ _tail   ↑ _end

    `append` adds trajectories that have ended. `follow` then removes overwritten ones at the head, cuts the oldest one
    where it was overwritten, and puts the growing one at the end. `_places` holds the cumulative number of legal starts
    up to and including each trajectory of a lane; a binary search in it draws starts uniformly. It is not updated when
    trajectories are removed or cut: `_masses` computes how many starts have been lost at the head. All lanes have the
    same amount of room.
    """

    def __init__(self, lanes: int, rule: SliceRule) -> None:
        self.rule = rule
        self.minimum = rule.minimum
        self.count = 0
        """The number of trajectories in all lanes."""
        self._lanes = np.arange(lanes)
        self._head: Numbers = np.zeros(lanes, np.int64)
        self._tail: Numbers = np.zeros(lanes, np.int64)
        self._end: Numbers = np.zeros(lanes, np.int64)
        self._start, self._stop, self._places = (np.zeros((lanes, _FIRST_WIDTH), np.int64) for _ in range(3))
        self._sums: Numbers = np.zeros(lanes, np.int64)
        self._newest = -1
        self._kept = _Kept()

    # Keeping up --------------------------------------------------------------------------------------

    def append(self, lane: Numbers, start: Numbers, stop: Numbers) -> None:
        """Add trajectories that ended, from step `start` to `stop` (inclusive), ordered by lane and time."""
        long = stop - start + 1 >= self.minimum
        if not long.all():
            lane, start, stop = lane[long], start[long], stop[long]
        if not len(lane):
            return
        new = np.bincount(lane, minlength=len(self._lanes))
        self._make_room(new)
        places = self.rule.starts(stop - start + 1)
        before, end = self._places_before(self._tail), np.cumsum(new)
        if len(lane) < _MANY * len(new):
            place = self._tail[lane] + np.arange(len(lane)) - (end - new)[lane]
            within = np.cumsum(places)
            within -= (within - places)[(end - new)[lane]]  # the sums start from 0 in each lane
            self._start[lane, place], self._stop[lane, place] = start, stop
            self._places[lane, place] = before[lane] + within
        else:
            for number in np.flatnonzero(new):
                there = slice(self._tail[number], self._tail[number] + new[number])
                own = slice(end[number] - new[number], end[number])
                self._start[number, there], self._stop[number, there] = start[own], stop[own]
                np.cumsum(places[own], out=self._places[number, there])
                self._places[number, there] += before[number]
        self._tail += new

    def _make_room(self, new: Numbers) -> None:
        """Make room for this many new trajectories per lane, and for the growing one."""
        width = self._start.shape[1]
        if int((self._tail + new).max()) < width:
            return
        there = self._tail - self._head
        lasting = int((there + new).max()) + 1
        wider = max(_FIRST_WIDTH, 2 * lasting)
        columns = np.arange(int(there.max()))
        source = np.minimum(self._head[:, None] + columns, width - 1)
        gone = self._places_before(self._head)
        for name in ("_start", "_stop", "_places"):
            moved = np.zeros((len(self._lanes), wider), np.int64)
            moved[:, : len(columns)] = getattr(self, name)[self._lanes[:, None], source]
            setattr(self, name, moved)
        self._places[:, : len(columns)] -= gone[:, None]
        self._tail = there
        self._head = np.zeros_like(there)

    def _places_before(self, number: Numbers) -> Numbers:
        """Return the cumulative number of starts before position `number` in each lane."""
        return np.where(number > 0, self._places[self._lanes, np.maximum(number - 1, 0)], 0)

    def follow(self, growing: Numbers, newest: int, oldest: int) -> None:
        """Update to the present steps `oldest` to `newest`; `growing` has the first step of each growing trajectory."""
        lanes = self._lanes
        shortest = oldest + self.minimum - 1  # what is left of trajectories that end before this step is too short
        if ((self._head < self._tail) & (self._stop[lanes, self._head] < shortest)).any():
            self._end = self._tail
            self._head = self._first_above(self._stop, lanes, np.full(len(lanes), shortest - 1))
        length = newest - growing + 1
        self._end = self._tail + (length >= self.minimum)
        self._start[lanes, self._tail], self._stop[lanes, self._tail] = growing, newest
        places = self.rule.starts(np.maximum(length, 1))
        self._places[lanes, self._tail] = self._places_before(self._tail) + places
        first = self._start[lanes, self._head]
        self._start[lanes, self._head] = np.maximum(first, oldest)
        self._sums = np.cumsum(self._end - self._head)
        self.count = int(self._sums[-1])
        self._newest = newest
        self._kept = _Kept()

    # Drawing -----------------------------------------------------------------------------------------

    def by_number(self, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of trajectories given by number, from 0 to `count - 1`."""
        if len(self._lanes) == 1:
            place = number + self._head[0]
            start = self._start[0][place]
            return np.zeros(len(number), np.int64), start, self._stop[0][place] - start + 1
        lane, number = _split(self._sums, number)
        return (lane, *self._at(lane, self._head[lane] + number))

    def by_row(self, number: Numbers, rows: int) -> Numbers:
        """Convert TorchRL's numbers of trajectories to the numbers that `by_number` takes.

        TorchRL orders the trajectories of a lane by the rows of their last steps. In a ring of `rows` rows,
        trajectories that end in the present lap thus come before older ones:

            number in time     0   1   2   3   4
            row of the end    12  15 | 2   7   9       the newest row is 9
            TorchRL's number   3   4   0   1   2
        """
        kept = self._kept
        if kept.older is None:
            before = np.full_like(self._lanes, self._newest // rows * rows - 1)
            older = self._first_above(self._stop, self._lanes, before) - self._head
            kept.older = older if older.any() else ()
        if not len(kept.older):
            return number
        lane, own = _split(self._sums, number)
        return number - own + (own + kept.older[lane]) % (self._end - self._head)[lane]

    def by_start(self, place: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Find the trajectories of starts, which are numbered from 0 to `start_count - 1` through all lanes.

        Returns:
            Lanes, first steps and lengths of the trajectories, and the number of each start within its trajectory.
        """
        mass = self._masses()
        lane, place = _split(mass.sums, place)
        target = place + mass.lost[lane]
        found = self._first_above(self._places, lane, target)
        own = np.where(found == self._head[lane], place, target - self._places[lane, np.maximum(found - 1, 0)])
        return (lane, *self._at(lane, found), own)

    def bounds(self) -> tuple[Numbers, Numbers]:
        """Return first and last steps of the trajectories of the only lane, as views."""
        there = slice(int(self._head[0]), int(self._end[0]))
        return self._start[0, there], self._stop[0, there]

    def table(self, rows: int, *, by_start: bool) -> SliceTable:
        """Return the trajectories of the only lane, in a ring of this many rows, as a table to draw whole slices from.

        The table is cached. It is valid until the next `append` or `follow`.
        """
        tables = self._kept.tables
        found = tables.get(by_start)
        if found is None:
            found = tables[by_start] = self._table(rows, by_start=by_start)
        return found

    def _table(self, rows: int, *, by_start: bool) -> SliceTable:
        there = slice(int(self._head[0]), int(self._end[0]))
        first, last = self.bounds()
        if not by_start:
            return SliceTable(first, last, rows)
        mass = self._masses()
        return SliceTable(first, last, rows, self._places[0, there], int(mass.sums[0]), int(mass.lost[0]))

    @property
    def start_count(self) -> int:
        """The number of possible starts in all lanes."""
        return int(self._masses().sums[-1])

    def _masses(self) -> _Mass:
        kept = self._kept
        if kept.mass is None:
            lanes, head = self._lanes, self._head
            first = self.rule.starts(self._stop[lanes, head] - self._start[lanes, head] + 1)
            lost = self._places[lanes, head] - first
            held = np.where(self._end > head, self._places[lanes, np.maximum(self._end - 1, 0)] - lost, 0)
            kept.mass = _Mass(lost, np.cumsum(held))
        return kept.mass

    # Looking up --------------------------------------------------------------------------------------

    def all(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first steps and lengths of all trajectories, lane by lane, oldest first."""
        return self._listed(self._end)

    def over(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return lanes, first and last steps of the trajectories that have ended, in the order of `all`."""
        lane, start, length = self._listed(self._tail)
        return lane, start, start + length - 1

    def _listed(self, end: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        counts = end - self._head
        lane = np.repeat(self._lanes, counts)
        number = np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)
        return (lane, *self._at(lane, self._head[lane] + number))

    def start_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the first steps of the trajectories to which steps belong."""
        return self._start[lane, self._of(step, lane)]

    def stop_of(self, step: Numbers, lane: Numbers) -> Numbers:
        """Return the last steps of the trajectories to which steps belong."""
        found = self._of(step, lane)
        return self._stop[0].take(found) if len(self._lanes) == 1 else self._stop[lane, found]

    def _of(self, step: Numbers, lane: Numbers) -> Numbers:
        found = self._first_above(self._stop, lane, step - 1)
        return np.minimum(found, self._end[lane] - 1)

    def _at(self, lane: Numbers, place: Numbers) -> tuple[Numbers, Numbers]:
        start = self._start[lane, place]
        return start, self._stop[lane, place] - start + 1

    def _first_above(self, values: Numbers, lane: Numbers, target: Numbers) -> Numbers:
        """Return the first position in each lane whose value is above the target, or the end of the lane.

        Values ascend within a lane, so this is a binary search in all lanes at once.
        """
        if len(self._lanes) == 1:
            begin, end = int(self._head[0]), int(self._end[0])
            return begin + np.searchsorted(values[0, begin:end], target, side="right")
        low, high = self._head[lane], self._end[lane]
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) // 2
            right = (middle < high) & (values[lane, np.minimum(middle, values.shape[1] - 1)] <= target)
            low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
        return low


class _Mass(NamedTuple):
    """The number of starts lost at the head of each lane, and the cumulative number of present starts over lanes."""

    lost: Numbers
    sums: Numbers


@dataclass(slots=True)
class _Kept:
    """Caches of values that are derived from the present trajectories.

    When the trajectories change, a new object replaces this one, so that a thread that is still computing a value
    stores it in the old object.
    """

    mass: _Mass | None = None
    older: Numbers | tuple[()] | None = None
    tables: dict[bool, SliceTable] = field(default_factory=dict)


def _split(sums: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Convert numbers that count through all lanes, of cumulative sizes `sums`, to lanes and numbers within them."""
    if len(sums) == 1:
        return np.zeros(len(number), np.int64), number
    lane = np.searchsorted(sums, number, side="right")
    return lane, number - np.where(lane > 0, sums[np.maximum(lane - 1, 0)], 0)
