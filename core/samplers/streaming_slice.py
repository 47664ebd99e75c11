"""Draws new steps first: each window of consecutive new steps once, then slices of everything that is stored.

    rows written      0 1 2 3 4 5 6 7 8 9        slice_len 3; a trajectory ends at row 4
    windows          [. . .]  x x[. . .] ~ ~     rows 3 and 4 are too few; 8 and 9 wait for a third row

A window is stored as the number of its first row, counted from the first write to the storage. A window has been
overwritten if this number is below the number of the oldest row, so that writes need not update the windows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import (
    DatasetNotFoundError,
    MissingKeyError,
    SchemaError,
    UsageError,
    WrongKindError,
    keywords_of,
    require_keywords,
)
from ..format import fs
from ..format.syncing import replace_file
from ..state_folder import load_module_state, module_state_bytes
from ..storages.base import Storage
from ..storages.write_log import Written
from ..ted.schema import Key, Numbers, as_key
from ..torchrl_classes import counterpart
from .base import Index
from .slices import SliceSampler
from .trajectories import (
    BoundarySource,
    IdBoundaries,
    JointBoundaries,
    TableFinder,
    TrajectoryTable,
    by_lane,
    has_entry,
)

_FILE = "streaming_slice.pt"
_STATE = (
    "slot_versions", "queued_indices", "queued_versions", "pending_indices", "pending_versions", "last_traj",
    "has_last_traj", "last_was_done", "slice_len",
)  # fmt: skip


@dataclass(frozen=True)
class StartBoundaries(BoundarySource):
    """A row ends a trajectory if the next row has a flag that marks first steps."""

    key: Key
    looks_ahead = True

    @property
    def keys(self) -> tuple[Key, ...]:  # type: ignore[override]
        """The entry that it reads."""
        return (self.key,)

    def ends(self, storage: Storage, rows: Numbers | slice) -> NDArray[np.bool_]:
        flags = by_lane(storage, self.key, rows)
        if flags is None:
            raise MissingKeyError(f"{'.'.join(self.key)!r} is not in the storage any more")
        found = np.zeros(flags.shape[:2], bool)
        np.any(flags[1:].astype(bool, copy=False), axis=2, out=found[:-1])
        return found


class _Loaded(NamedTuple):
    """A loaded state, until the storage's rows are known: the first rows of windows, and the first row that waits."""

    windows: Numbers
    waiting: Numbers
    written: int | None
    """How many rows had been written to the storage when the state was loaded; None if there was no storage."""
    state: Mapping[str, Any]


@counterpart
class StreamingSliceSampler(SliceSampler):
    """Draws slices, and before them each new step once, for learners that have to see all steps.

    Written rows are cut, in the order of the writes, into windows of `slice_len` steps that do not overlap and do not
    cross the end of a trajectory. Steps before an end that are too few for a window are in none. A batch consists of
    the windows that were not drawn yet, oldest first, and then of slices as a `SliceSampler` draws them. Windows that
    were overwritten, even in part, are dropped. Trajectories end at a flag `done`, where their id changes, and before a
    row with `is_init`, as far as these entries are stored.

    Windows are made of rows written by `add` and `extend`, but not of rows that were stored before the sampler was
    attached or that were changed in place. All steps of a buffer are treated as one stream, in the order of the writes:
    with several environments, give each a buffer of its own, and sample from a `ReplayBufferEnsemble`. Each process has
    its own windows, which are part of the state.

    Args:
        slice_len: how many steps a slice has.
        init_key: the entry that marks first steps, as for `SliceSampler`, or None.
        **options: the other arguments of `SliceSampler`, except `num_slices`. If keys of flags or ids are given,
            trajectories also end by the default entries of the other kind.

    Raises:
        WrongKindError: (a TypeError) `slice_len` is not an int; from a write: the elements are not tensordicts.
        UsageError: (a ValueError) `slice_len` is below 1; from a write: it is more than the capacity.
        SchemaError: (a RuntimeError) from a write: the storage has several dimensions.

    Names are TorchRL's.

    >>> import torch
    >>> from rbtool import LazyTensorStorage, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> sampler = StreamingSliceSampler(slice_len=3)
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6)
    >>> done = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool).view(8, 1)
    >>> index = buffer.extend(TensorDict({"next": {"done": done}}, [8]))
    >>> buffer.sample()["index"].flatten().tolist()
    [0, 1, 2, 5, 6, 7]
    """

    draws_once: ClassVar[bool] = True
    draw_rows = SliceSampler.draw_rows

    def __init__(self, *, slice_len: int, init_key: Any = "is_init", **options: Any) -> None:
        require_keywords(type(self).__name__, options, keywords_of(SliceSampler))
        if isinstance(slice_len, bool) or not isinstance(slice_len, int):
            raise WrongKindError(f"slice_len is {slice_len!r}, expected an int")
        super().__init__(slice_len=slice_len, **options)
        self.init_key = init_key
        self._tables = TableFinder(self._all_ends)
        self._storage: weakref.ref[Storage] | None = None
        self.reset()

    def _all_ends(self, storage: Storage) -> BoundarySource:
        """Return the source of all ends that the entries of a storage mark."""
        row = storage.get(torch.zeros(1, dtype=torch.int64))
        row = row[0] if isinstance(row, list) else row
        if not (is_tensor_collection(row) or isinstance(row, Mapping)):
            raise WrongKindError(f"windows need tensordicts, but an element of the storage is a {type(row).__name__}")
        found = self._boundaries.sources(storage)
        if self.init_key is not None and has_entry(storage, key := as_key(self.init_key)):
            found = *found, StartBoundaries(key)
        return found[0] if len(found) == 1 else JointBoundaries(found)

    # Following the writes ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all windows, and the trajectory table."""
        super().reset()
        self._ready: deque[int] = deque()  # first steps of the windows that were not drawn yet
        self._cut = 0  # the step at which the next window begins, unless its trajectory ends before that
        self._seen: Written | None = None
        self._capacity = 0
        self._loaded: _Loaded | None = None

    def on_attach(self, storage: Storage) -> None:
        """Make windows from the next write on, unless the storage is followed already or a state was loaded."""
        if self._storage is not None and self._storage() is not storage:
            self.reset()
        self._storage = weakref.ref(storage)
        if self._seen is None and self._loaded is None:
            self._begin(storage.log.now)

    def _begin(self, now: Written) -> None:
        self._ready.clear()
        self._cut, self._seen = now.rows, now

    def write_error(self, storage: Storage) -> Exception | None:
        """Return the error for a storage that has several dimensions or is too small for a window.

        Buffers call this with their storage when they are made, and when they are unpickled.
        """
        if self._storage is None:
            self._storage = weakref.ref(storage)
        if storage.ndim > 1:
            return SchemaError(f"a {type(self).__name__} needs a storage of one dimension, this one has {storage.ndim}")
        if storage.max_size < self._slice_len:
            return UsageError(f"slice_len is {self.slice_len}, the storage has room for {storage.max_size} steps")
        return None

    def on_write(self, index: Any) -> None:
        """Cut written rows into windows, if they may be overwritten before the next draw does so."""
        storage, seen = None if self._storage is None else self._storage(), self._seen
        if storage is None:
            return
        if seen is None or not self._capacity or 2 * (storage.log.now.rows - seen.rows) >= self._capacity:
            self._follow(storage, index)

    def _follow(self, storage: Storage, index: Any = ()) -> tuple[TrajectoryTable, int]:
        """Cut the rows written since the last call into windows.

        Args:
            storage: the storage.
            index: the rows of the write that is being reported. They are the first ones to be cut if earlier writes are
                unknown.

        Returns:
            The table of trajectories, and the difference between its step numbers and the ones used here.
        """
        table, now = self.trajectories(storage), storage.log.now
        ahead = table.newest - now.rows + 1
        self._capacity = table.capacity
        if self._loaded is not None:
            self._resume(self._loaded, now, index)
        elif (seen := self._seen) is None or not self._goes_on(seen, now):
            count = _count(index)
            self._begin(Written(now.rows - count, now.next_row - count, now.irregular))
        assert self._seen is not None
        if self._seen.rows != now.rows:
            self._cut_windows(table, ahead, self._seen.rows)
        self._seen = now
        return table, ahead

    def _goes_on(self, seen: Written, now: Written) -> bool:
        """Return whether the ring has only been written to since `seen`, and is still the same ring."""
        added = now.rows - seen.rows
        return added >= 0 and (seen.next_row + added - now.next_row) % self._capacity == 0

    def _cut_windows(self, table: TrajectoryTable, ahead: int, first_new: int) -> None:
        """Cut the steps that wait, and the steps from `first_new` on, into windows."""
        oldest, length, cut = table.oldest - ahead, self._slice_len, self._cut
        while self._ready and self._ready[0] < oldest:
            self._ready.popleft()
        runs = table.only_lane()
        assert runs is not None  # of one dimension, see `write_error`
        place = np.searchsorted(runs[1], max(cut, oldest) + ahead)
        first = runs[0][place:].copy()
        if not len(first):
            return
        if cut < oldest < first_new:  # steps that waited were overwritten; the grid of windows stays where it was
            cut = oldest + (cut - oldest) % length
        first[0] = max(first[0], cut + ahead)
        count = np.maximum(runs[1][place:] - first + 1, 0) // length
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        self._ready.extend((np.repeat(first, count) + length * number - ahead).tolist())
        self._cut = int(first[-1] + length * count[-1]) - ahead

    @property
    def _slice_len(self) -> int:
        length = self.slice_len
        assert length is not None  # see __init__
        return length

    # Sampling ----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw the oldest new windows, and slices for the rest of the batch."""
        count, length = self._measure(batch_size)
        if self._storage is None or self._storage() is not storage:
            self.on_attach(storage)
        table, ahead = self._follow(storage)
        if not (windows := self._next(table, ahead, count)):
            return super().draw(storage, batch_size)
        try:
            start, taken, rest = np.array(windows) + ahead, None, count - len(windows)
            if rest:
                eligible = table.eligible(self._rule(length))
                if not eligible.count:
                    self._refuse_short(table, length)
                _, more, taken = self._slices_at(eligible, *self.chances(eligible, rest, table.capacity))
                start = np.concatenate([start, more])
                taken = None if taken is None else np.concatenate([np.full(len(windows), length), taken])
            return self._assemble(storage, table, np.zeros_like(start), start, taken, length)
        except BaseException:
            self._ready.extendleft(reversed(windows))
            raise

    def _next(self, table: TrajectoryTable, ahead: int, count: int) -> list[int]:
        """Remove and return up to `count` windows; drop those that by now cross an end that was set by an edit."""
        ready = self._ready
        found: list[int] = []
        while ready and len(found) < count:
            some = np.array([ready.popleft() for _ in range(min(count - len(found), len(ready)))])
            whole = table.reach(some + ahead, np.zeros_like(some)) >= self._slice_len
            found += some[whole].tolist()
        return found

    # State -------------------------------------------------------------------------------------------

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate the windows of a loaded state together with the rows."""
        if (loaded := self._loaded) is not None:
            rows = storage.shape[0]
            self._loaded = loaded._replace(windows=(loaded.windows - row) % rows, waiting=(loaded.waiting - row) % rows)

    def _resume(self, loaded: _Loaded, now: Written, index: Any) -> None:
        """Number the windows of a loaded state by the rows that the storage had before the last writes."""
        added = _count(index) if loaded.written is None else now.rows - loaded.written
        stop, newest = now.rows - added, now.next_row - added - 1

        def numbered(rows: Numbers) -> list[int]:
            return (stop - 1 - (newest - rows) % self._capacity).tolist()  # type: ignore[no-any-return]

        self._ready = deque(numbered(loaded.windows))
        self._cut = numbered(loaded.waiting)[0] if len(loaded.waiting) else stop
        self._seen, self._loaded = Written(stop, newest + 1, now.irregular), None

    def save_state(self) -> dict[str, Any]:
        """Return the windows that were not drawn yet, under TorchRL's names.

        `queued_indices`, int64 `[windows, slice_len]`, are their rows, the oldest window first; `pending_indices`,
        int64 `[n]`, are the rows that wait for more. `slot_versions`, int64 `[rows]`, counts how often each row was
        written; `queued_versions` and `pending_versions` are these counts for the queued and pending rows. `last_traj`
        is the id of the newest row, if it `has_last_traj`; `last_was_done` says whether a trajectory ended there.
        """
        storage = None if self._storage is None else self._storage()
        if storage is None or not len(storage):
            return self._nothing() if self._loaded is None else dict(self._loaded.state)
        table, ahead = self._follow(storage)
        capacity, rows = table.capacity, np.arange(storage.shape[0])
        versions = (table.steps_at(rows) - ahead) // capacity + 1
        queued = (np.array(self._ready, np.int64)[:, None] + np.arange(self._slice_len) + ahead) % capacity
        last, known, done = self._newest(storage, table)
        waiting = (
            np.arange(table.newest + 1 if done else max(self._cut + ahead, table.oldest), table.newest + 1) % capacity
        )
        arrays = versions, queued, versions[queued], waiting, versions[waiting]
        return dict(zip(_STATE, (*map(torch.from_numpy, arrays), last, known, done, self._slice_len), strict=True))

    def _nothing(self) -> dict[str, Any]:
        none = torch.zeros(0, dtype=torch.int64)
        windows = none.view(0, self._slice_len)
        return dict(zip(_STATE, (none, windows, windows, none, none, 0, False, False, self._slice_len), strict=True))

    @staticmethod
    def _newest(storage: Storage, table: TrajectoryTable) -> tuple[Any, bool, bool]:
        """Return the id of the newest row (0 if it has none), whether it has one, and whether a flag is set there."""
        row, source = np.array([table.newest % table.capacity]), table.source
        sources = source.sources if isinstance(source, JointBoundaries) else (source,)
        ids = next((by_lane(storage, one.key, row) for one in sources if isinstance(one, IdBoundaries)), None)
        done = any(bool(one.ends(storage, row)[0, 0]) for one in sources if not one.looks_ahead)
        return 0 if ids is None else ids[0, 0, 0].item(), ids is not None, done

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or TorchRL's; SchemaError for another sampler's state, or another `slice_len`."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")
        if state["slice_len"] != self._slice_len:
            raise SchemaError(f"the state has windows of {state['slice_len']} steps, expected {self._slice_len}")
        versions = _rows(state, "slot_versions", ())
        queued, waiting = (_rows(state, name, versions) for name in ("queued_indices", "pending_indices"))
        windows = queued.reshape(-1, self._slice_len)
        whole = (versions[windows] == _rows(state, "queued_versions", ()).reshape(windows.shape)).all(1)
        if not np.array_equal(versions[waiting], _rows(state, "pending_versions", ())):
            waiting = waiting[:0]
        self.reset()
        storage = None if self._storage is None else self._storage()
        written = None if storage is None else storage.log.now.rows
        self._loaded = _Loaded(windows[whole][:, 0], waiting[:1], written, dict(state))

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the state to `streaming_slice.pt`."""
        fs.make_folder(folder)
        replace_file(folder / _FILE, module_state_bytes(dict(state)))

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote."""
        state = load_module_state(folder / _FILE)
        if state is None:
            raise DatasetNotFoundError(f"{folder} does not hold a state: {_FILE} is missing")
        return state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_storage": None}


def _count(index: Any) -> int:
    """Return how many rows a write kept; rows that it did not keep are negative."""
    return int(np.count_nonzero(np.asarray(index) >= 0))


def _rows(state: Mapping[str, Any], name: str, versions: Numbers | tuple[()]) -> Numbers:
    """Return numbers of a state, flat; SchemaError unless they are int64 and, if given, rows of `versions`."""
    found = state[name]
    if not isinstance(found, torch.Tensor) or found.dtype != torch.int64:
        raise SchemaError(f"{name} is not an int64 tensor in the state")
    numbers = found.numpy(force=True).reshape(-1)
    if len(versions) and len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(versions):
        raise SchemaError(f"{name} has rows beyond the {len(versions)} of the state")
    return numbers
