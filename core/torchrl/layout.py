"""TorchRL's layouts of whole episodes: header, names of entries, and the contracts to read and to write leaves.

A leaf has rows for the whole capacity, lane after lane (a lane is one element of the dimensions after the first). A
full ring is rotated so that the oldest row comes first. In a storage that is not full, rows stay in place, and every
lane ends with the rows that were never written.

A leaf has one row for each step. A state has an additional row after every end of an episode: its last observation.

    steps         0  1  2  3  4         done after steps 1 and 4
    reward        r0 r1 r2 r3 r4
    observation   o0 o1 n1 o2 o3 o4 n4  n1: the observation after step 1

The files do not say which leaves are states. The ends follow from the done flags; a leaf whose number of rows is that
of the steps and the ends together is a state.
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
"""The entry by which such a checkpoint is recognised. Its name is the same in all versions, and cannot be changed."""
LENGTH = "storage_metadata.json"
"""The file of the flat and nested layouts with the number of valid elements."""
TRAJECTORY = "traj"
"""The prefix of the names of trajectories in the H5 layout."""
H5_LENGTH = "_len"
"""The dataset of the H5 layout with the number of valid elements."""


def in_order(names: list[str]) -> list[str]:
    """Sort the names of trajectories by their numbers, which TorchRL pads with zeros; without numbers, by name."""
    numbers = [name.rpartition("_")[2] for name in names]
    if all(number.isdecimal() for number in numbers):
        return [name for _, name in sorted(zip(map(int, numbers), names, strict=True))]
    return sorted(names)


@dataclass(frozen=True, slots=True)
class TorchrlKeys:
    """The names of entries: done flags and rewards (keys below `next`), the flag that ends episodes, and two others."""

    done: Key = DONE
    dones: tuple[Key, ...] = FLAGS
    rewards: tuple[Key, ...] = (REWARD,)
    shift: str = "shift"
    is_full: str = "is_full"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TorchrlKeys:
        """Read TorchRL's arguments done_key, done_keys, reward_keys, shift_key and is_full_key from `options`.

        None means the default; other options are ignored. UsageError for values that are not keys.
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
        """The entries that are not data."""
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
    """A storage of `shape`, of which `length` elements are valid. `shape` has the capacity in rows, then the lanes.

    `shift` is the row after the one that was written last; TorchRL counts it from 1 to the number of rows.
    """

    shape: tuple[int, ...]
    full: bool
    shift: int
    length: int

    @classmethod
    def checked(
        cls, shape: Any, full: Any, shift: Any, length: Any, origin: str, *, all_rows: bool = False
    ) -> TorchrlHeader:
        """Check the header of a file. `length` is None if the file has none; `all_rows` if it counts unwritten rows.

        CorruptDataError if the numbers contradict each other: in a storage that is not full, every lane is written up
        to `shift`. This also detects a wrong number of lanes.
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
        """The capacity of a lane in rows."""
        return self.shape[0]

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return math.prod(self.shape[1:])

    @property
    def steps(self) -> int:
        """The capacity of all lanes in rows, which is the number of rows of a leaf that is not a state."""
        return self.capacity * self.lanes

    @property
    def rows(self) -> int:
        """The number of valid rows of a lane."""
        return self.length // self.lanes

    @property
    def forced(self) -> int:
        """The row of every lane that ends an episode in the layout, regardless of its flags: the last valid one."""
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
    """The numbers of rows of every trajectory, in `steps` and in `states`; trajectories end at `ends` and with a lane.

    In a storage that is not full, TorchRL's tables and groups do not count the additional row of a trajectory that ends
    at the end of a lane. With `every`, it is counted.
    """

    def __init__(self, header: TorchrlHeader, ends: Array, *, every: bool = False) -> None:
        last = np.union1d(ends, header.lane_ends)
        extra = np.isin(last, ends)
        if not header.full and not every:
            extra &= ~np.isin(last, header.lane_ends)
        self.steps: Array = np.diff(last, prepend=-1)
        self.states: Array = self.steps + extra


class StoredLeaves(Closing, ABC):
    """The leaves of a checkpoint by key, read by row. `ends` are the steps after which states have an additional row.

    Steps are counted over the whole capacity, lane after lane. `files` holds all open files, and is closed with this
    object.
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
        """Raise CorruptDataError unless there is a done flag for each step; called before any flag is read."""
        found = rows.get(self.keys.done, self.header.steps)
        if found != self.header.steps:
            raise CorruptDataError(
                f"{self.path}: {key_name(self.keys.done)!r} has {found:,} rows, a storage of "
                f"{list(self.header.shape)} has {self.header.steps:,}"
            )

    def _find_ends(self) -> Array:
        """Return the steps that end an episode: those with the done flag, and `forced_steps`."""
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
        """Return the leaves that are states: those with `with_ends` rows. CorruptDataError for other numbers."""
        steps, results = self.header.steps, {*self.keys.dones, *self.keys.rewards}
        for key, found in rows.items():
            if found != steps and (found != with_ends or key in results):
                other = "" if key in results else f", or {with_ends:,} with one more after every end of an episode"
                raise CorruptDataError(f"{self.path}: {key_name(key)!r} has {found:,} rows, expected {steps:,}{other}")
        return frozenset(key for key, found in rows.items() if found != steps)


class TorchrlSink(Closing, ABC):
    """Writes one leaf after the other, each from its first row to its last. It is a context manager."""

    @abstractmethod
    def begin(self, leaf: Field, counts: Array) -> None:
        """Begin a leaf; `counts` has the number of rows of each trajectory."""

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows to the leaf."""

    @abstractmethod
    def skip(self, rows: int) -> None:
        """Skip rows that were never written; they read as zeros."""

    @abstractmethod
    def end(self) -> None:
        """End the leaf."""

    @abstractmethod
    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the header, and other descriptions of the leaves."""
