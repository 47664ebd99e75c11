"""TorchRL's layouts of whole episodes: header, names of entries, and the contracts to read and to write leaves.

The rows are the whole capacity, lane after lane (a lane is one element of the dimensions after the first).
A full ring is turned so that the oldest row comes first; of one that is not full the rows stay where they are, and
rows that were never written follow in every lane. A leaf has one row per step or, if it is a state, one more after
every end of an episode. The files do not record which; the ends, and with them both numbers of rows, follow from the
done flags.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..encodings.compact import FilledStorage, leaf_parts
from ..errors import CorruptDataError, FormatError, UsageError
from ..format.contracts import Array, Closing
from ..format.open_files import OpenFiles
from ..ted.schema import DONE, FLAGS, NEXT, REWARD, Field, Key, as_numbers, key_name

STORAGE_SHAPE = "_storage_shape"
"""The entry by which such a checkpoint is recognised: its name is the same in every version and cannot be chosen."""
LENGTH = "storage_metadata.json"
"""The file of the flat and nested layouts that counts the valid elements."""
TRAJECTORY = "traj"
"""With what the names of the groups of the H5 layout begin: one of each trajectory."""
H5_LENGTH = "_len"
"""The dataset of the H5 layout that counts the valid elements."""


@dataclass(frozen=True, slots=True)
class TorchrlKeys:
    """Which entries are done flags and rewards (keys below `next`), which flag ends episodes, and two other names."""

    done: Key = DONE
    dones: tuple[Key, ...] = FLAGS
    rewards: tuple[Key, ...] = (REWARD,)
    shift: str = "shift"
    is_full: str = "is_full"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TorchrlKeys:
        """Read the arguments TorchRL has: done_key, done_keys, reward_keys, shift_key, is_full_key.

        None means the default; other options are left alone. UsageError for what is not a key.
        """
        done = _keys(options.get("done_key"), "done_key") or [DONE]
        given = options.get("done_keys")
        dones = FLAGS if given is None else _keys(given, "done_keys")
        rewards = options.get("reward_keys")
        names = {}
        for argument, default in (("shift_key", "shift"), ("is_full_key", "is_full")):
            name = default if options.get(argument) is None else options[argument]
            if not isinstance(name, str) or not name:
                raise UsageError(f"{argument} is {name!r}, expected the name of an entry")
            names[argument] = name
        if len(done) != 1 or len({*names.values(), STORAGE_SHAPE}) < 3:
            raise UsageError("done_key, shift_key and is_full_key name one entry each, and not the same")
        return cls(
            done=done[0],
            dones=tuple(dict.fromkeys((*dones, done[0]))),
            rewards=(REWARD,) if rewards is None else tuple(_keys(rewards, "reward_keys")),
            shift=names["shift_key"],
            is_full=names["is_full_key"],
        )

    @property
    def names(self) -> frozenset[str]:
        """Entries that are not data."""
        return frozenset({self.shift, self.is_full, STORAGE_SHAPE})


def _keys(given: Any, argument: str) -> list[Key]:
    if argument == "done_key" and isinstance(given, tuple):
        given = [given]
    if isinstance(given, set | frozenset):
        given = sorted(given, key=str)  # the same order in every process
    one = isinstance(given, str) or not isinstance(given, Iterable)
    listed: Iterable[Any] = () if given is None else [given] if one else given
    found = []
    for key in listed:
        parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, tuple | list) else ()
        if not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{argument} holds {key!r}; keys are texts or tuples of texts")
        found.append(parts[1:] if parts[0] == NEXT and len(parts) > 1 else parts)
    return found


@dataclass(frozen=True, slots=True)
class TorchrlHeader:
    """A storage of `shape` (all rows there is room for, then the lanes), of which `length` elements are valid.

    `shift` is the row behind the one that was written last; TorchRL counts it from 1 to the number of rows.
    """

    shape: tuple[int, ...]
    full: bool
    shift: int
    length: int

    @classmethod
    def checked(
        cls, shape: Any, full: Any, shift: Any, length: Any, origin: str, *, all_rows: bool = False
    ) -> TorchrlHeader:
        """Check the header of a file; `length` is None where it has none, `all_rows` where it counts unwritten rows.

        CorruptDataError for what fits no storage: of one that is not full, every lane is written up to `shift`. Where
        another number of lanes is recorded than there was, this check finds it.
        """
        sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise CorruptDataError(f"{origin} holds {shape!r} as the shape of the storage, expected positive sizes")
        if type(full) is not bool or type(shift) is not int:
            raise CorruptDataError(f"{origin} holds {full!r} and {shift!r}, expected a truth value and the next row")
        lanes = math.prod(sizes[1:])
        if length is None:
            length = math.prod(sizes) if full else shift * lanes
        fits = type(length) is int and 0 < length <= math.prod(sizes) and length % lanes == 0
        written = math.prod(sizes) if full else shift * lanes
        if not fits or abs(shift) > sizes[0] or (length != written and (full or not all_rows)):
            raise CorruptDataError(
                f"{origin} counts {length!r} valid elements and the next row {shift}, which does not fit a storage "
                f"of {list(sizes)} that is {'full' if full else 'not full'}"
            )
        return cls(sizes, full, shift, length)

    @property
    def capacity(self) -> int:
        """Rows of a lane there is room for."""
        return self.shape[0]

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return math.prod(self.shape[1:])

    @property
    def steps(self) -> int:
        """Rows of all lanes there is room for: what a leaf with one row a step has."""
        return self.capacity * self.lanes

    @property
    def rows(self) -> int:
        """Valid rows of a lane."""
        return self.length // self.lanes

    @property
    def forced(self) -> int:
        """The row of every lane that the layout takes for the end of an episode, regardless of its flags."""
        return self.capacity - 1 if self.full else (self.shift - 1) % self.capacity

    @property
    def forced_steps(self) -> Array:
        """That row of every lane, counted from the first row of the first lane."""
        return np.arange(self.lanes, dtype=np.int64) * self.capacity + self.forced

    @property
    def lane_ends(self) -> Array:
        """The last row of every lane, counted from the first row of the first lane."""
        return np.arange(1, self.lanes + 1, dtype=np.int64) * self.capacity - 1

    @property
    def filled(self) -> FilledStorage:
        """The storage that the valid rows filled."""
        cursor = self.shift % self.capacity if self.full else self.shift
        known = self.full or 0 < cursor <= self.rows
        return FilledStorage((self.rows, *self.shape[1:]), self.steps, cursor if known else None)


class Counts:
    """Rows of every trajectory; trajectories end at `ends` and with every lane.

    Of a storage that is not full, TorchRL leaves the extra row of a trajectory that ends a lane out of its tables and
    groups; `every` counts that, too.
    """

    def __init__(self, header: TorchrlHeader, ends: Array, *, every: bool = False) -> None:
        last = np.union1d(ends, header.lane_ends)
        extra = np.isin(last, ends)
        if not header.full and not every:
            extra &= ~np.isin(last, header.lane_ends)
        self.steps: Array = np.diff(last, prepend=-1)
        self.states: Array = self.steps + extra


class StoredLeaves(Closing, ABC):
    """Leaves by their key in the checkpoint, read by row; `ends` are the steps that have an extra row behind them.

    Steps are counted over the whole capacity, lane after lane. `files` has open all that is read, which this closes.
    """

    header: TorchrlHeader
    fields: Mapping[Key, Field]
    states: frozenset[Key]
    ends: Array

    def __init__(self, path: Path, keys: TorchrlKeys, files: OpenFiles) -> None:
        self.path = path
        self.keys = keys
        self.files = files

    @abstractmethod
    def fetch(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a leaf."""

    def close(self) -> None:
        self.files.close()

    def _require_steps(self, rows: Mapping[Key, int]) -> None:
        """Before any flag is read: the flags must cover the storage."""
        found = rows.get(self.keys.done, self.header.steps)
        if found != self.header.steps:
            raise CorruptDataError(
                f"{self.path}: {key_name(self.keys.done)!r} has {found:,} rows, a storage of "
                f"{list(self.header.shape)} has {self.header.steps:,}"
            )

    def _find_ends(self) -> Array:
        """Where an episode ends: where the flag is set, and where the layout has it end."""
        done = self.fields.get(self.keys.done)
        if done is None:
            raise FormatError(
                f"{self.path} has no entry {key_name(self.keys.done)!r}, so the ends of episodes are unknown",
                hint="name the flag with done_key=...",
            )
        if done.shape not in {(), (1,)}:
            raise FormatError(
                f"{self.path}: {done.name!r} has {list(done.shape)} numbers a step, expected one: TorchRL's layout "
                "has no ends of single agents"
            )
        found = [self.header.forced_steps]
        for start, stop in leaf_parts(self.header.steps, done.row_bytes):
            flags = as_numbers(self.fetch(done.key, start, stop), done.dtype).reshape(-1) != 0
            found.append(np.flatnonzero(flags) + start)
        return np.unique(np.concatenate(found))

    def _choose_states(self, rows: Mapping[Key, int], with_ends: int) -> frozenset[Key]:
        """Return the leaves that are states by their number of rows, which is `with_ends`."""
        steps, results = self.header.steps, {*self.keys.dones, *self.keys.rewards}
        for key, found in rows.items():
            if found != steps and (found != with_ends or key in results):
                other = "" if key in results else f", or {with_ends:,} with one more behind every end of an episode,"
                raise CorruptDataError(f"{self.path}: {key_name(key)!r} has {found:,} rows, expected {steps:,}{other}")
        return frozenset(key for key, found in rows.items() if found != steps)


class TorchrlSink(Closing, ABC):
    """Takes one leaf after the other, from its first row to its last; a context manager."""

    @abstractmethod
    def begin(self, leaf: Field, counts: Array) -> None:
        """Begin a leaf of which each trajectory has so many rows."""

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows to the leaf."""

    @abstractmethod
    def skip(self, rows: int) -> None:
        """Leave rows out that were never written; they read as zeros."""

    @abstractmethod
    def end(self) -> None:
        """End the leaf."""

    @abstractmethod
    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Describe what was written."""
