"""Trajectories of batches, buffers and datasets, chosen by conditions; entries are read when they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError, suggests_keywords
from ..samplers.boundaries import (
    BoundarySource,
    EpisodeBoundaries,
    FlagBoundaries,
    IdBoundaries,
    Key,
    boundary_key,
    has_entry,
)
from ..samplers.earlier_steps import gathered
from ..samplers.trajectories import trajectory_table
from ..storages.base import Storage
from ..storages.stream import StreamStorage
from ..storages.write_log import Written
from ..ted.schema import DEFAULT_DONE_KEYS, TRAJECTORY_KEYS
from ..trajectories import leaves, step_ends, trajectory_ids
from ..transforms.keyed import KeyedTransform
from ..transforms.video import DecodeVideo
from .parts import UnsupportedError, WrongKindError
from .predicates import TrajectoryPredicate
from .reading import Reading, quiet

Numbers: TypeAlias = NDArray[np.int64]

_IDS = TRAJECTORY_KEYS["queries"]
_NEXT = "next"


class Trajectory:
    """The steps of one trajectory, in order.

    `trajectory["next", "reward"]` is an entry; `trajectory.reward` one at the root, or else under `next`. `data` are
    all entries, a tensordict `[length]`, `length` the number of steps, `total_reward` the sum of rewards in float64.
    `trajectory[2:5]` is a trajectory of some of the steps, `trajectory[2]` a tensordict of one. It is no tensorclass:
    `tensordict.lazy_stack([one.data for one in found])` stacks several, `[n, -1]`.

    Made of a tensordict, entries are views of it. A trajectory of a buffer reads, at each use, the entries that are
    used and no others, into fresh memory; SchemaError (a RuntimeError) if its steps were overwritten since.

    WrongKindError (a TypeError) for data that is no tensordict; UsageError (a ValueError) unless it has one batch
    dimension; AttributeError and MissingKeyError (a KeyError) for missing entries.
    """

    def __init__(self, data: Any) -> None:
        self._steps: Any = data if isinstance(data, _Stored) else _require_steps(data)

    @property
    def data(self) -> Any:
        """All entries, `[length]`."""
        return self._steps.data() if isinstance(self._steps, _Stored) else self._steps

    @property
    def length(self) -> int:
        """The number of steps."""
        return len(self._steps)

    def __len__(self) -> int:
        return self.length

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of all rewards, in float64; MissingKeyError (a KeyError) without rewards."""
        found = self.get((_NEXT, "reward"))
        return torch.as_tensor(self.value("reward") if found is None else found).double().sum()

    def value(self, key: Any) -> Any:
        """Return an entry at the root, or else under `next`: a tensor, or a list for any other values."""
        path = boundary_key(key)
        places = [path] if path[0] == _NEXT else [path, (_NEXT, *path)]
        found = self._found(places)
        if found is None:
            raise MissingKeyError(f"{'.'.join(path)!r} is not in the trajectory, at the root or under next")
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry by its key, or the default."""
        found = self._found([boundary_key(key)])
        return default if found is None else found

    def _found(self, keys: Sequence[Key]) -> Any:
        steps = self._steps
        if isinstance(steps, _Stored):
            for key in keys:
                if (found := steps.entry(key)) is not None:
                    return found
            if not steps.may_have(keys):
                return None
        return next((found for key in keys if (found := _entry_of(self.data, key)) is not None), None)

    def keys(self) -> list[str]:
        """Return the names of the entries at the root."""
        return list(self._steps.keys())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self.value(name)
        except MissingKeyError as error:
            raise AttributeError(str(error)) from None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            found = self.get(index)
            if found is None:
                raise MissingKeyError(f"{'.'.join(boundary_key(index))!r} is not in the trajectory")
            return found
        part = self._steps[index]
        single = isinstance(index, int | np.integer) or (isinstance(index, torch.Tensor) and not index.dim())
        return part if single else Trajectory(part)

    def __repr__(self) -> str:
        return f"Trajectory(length={self.length}, keys={sorted(self.keys())})"


def _require_steps(data: Any) -> Any:
    if not is_tensor_collection(data):
        raise WrongKindError(f"the steps of a trajectory are a tensordict, found a {type(data).__name__}")
    if data.batch_dims != 1:
        raise UsageError(f"the steps of a trajectory have one batch dimension, found {list(data.batch_size)}")
    return data


def _entry_of(data: Any, key: Key) -> Any:
    """Return an entry of a tensordict: a tensor or a tensordict, or a list of other values; None if it is missing."""
    found = data.get(key, None)
    if found is None or isinstance(found, torch.Tensor) or not is_non_tensor(found):
        return found.tolist() if isinstance(found, np.ndarray) else found
    found = found.tolist()
    return found if isinstance(found, list) else [found] * len(data)


class _Stored:
    """Steps in a buffer: an array of rows, and the lane of a storage of several dimensions."""

    def __init__(self, buffer: Queries, rows: Numbers, lane: tuple[int, ...], seen: Written) -> None:
        self._buffer, self._rows, self._lane, self._seen = buffer, rows, lane, seen

    def __len__(self) -> int:
        return len(self._rows)

    def _index(self, rows: Numbers) -> Any:
        first = torch.from_numpy(rows)
        return (first, *(torch.full_like(first, part) for part in self._lane)) if self._lane else first

    def _unchanged(self, read: Callable[[Any], Any], rows: Numbers) -> Any:
        """Call `read(index)` while nothing is written; SchemaError if the rows were overwritten."""
        buffer = self._buffer
        with buffer.guard.hold():
            if buffer.storage.log.now != self._seen:
                self._require_unwritten(buffer.storage)
            return read(self._index(rows))

    def _require_unwritten(self, storage: Storage) -> None:
        now, seen = storage.log.now, self._seen
        capacity = storage.capacity_rows
        written = np.arange(seen.next_row, seen.next_row + min(now.rows - seen.rows, capacity)) % capacity
        changes = storage.log.since(seen.irregular)
        lost = changes is None or bool(np.isin(self._rows, written).any())
        for change in changes or ():
            if change.keys is None:  # whole rows; an entry that is edited in place is what the step has now
                lost = lost or change.rows is None
                lost = lost or bool(np.isin(self._rows, np.arange(storage.shape[0])[change.rows]).any())
        if lost:
            raise SchemaError("the steps of this trajectory were overwritten since", hint="query the buffer again")
        self._seen = now

    def entry(self, key: Key) -> Any:
        """Read one entry, unless a transform may make it; None if it is not stored by itself."""
        buffer = self._buffer
        if not buffer.leaves_alone(key):
            return None
        return self._unchanged(
            lambda index: gathered(
                buffer.storage, key, *((index[0], index[1:]) if isinstance(index, tuple) else (index,))
            ),
            self._rows,
        )

    def may_have(self, keys: Sequence[Key]) -> bool:
        """Whether all entries together may have one that is not stored by itself: by those of the first step."""
        return any(_entry_of(self._one(), key) is not None for key in keys)

    def _one(self) -> Any:
        return self._unchanged(self._buffer.steps_at, self._rows[:1])

    def keys(self) -> Any:
        """Return the names of the entries at the root."""
        return self._one().keys()

    def data(self) -> Any:
        """Read all entries, through the transforms."""
        return self._unchanged(self._buffer.steps_at, self._rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index.numpy(force=True) if isinstance(index, torch.Tensor) else index]
        if not isinstance(rows, np.ndarray):  # of one step
            return self._unchanged(self._buffer.steps_at, np.array([rows]))[0]
        return _Stored(self._buffer, rows, self._lane, self._seen)


class Queries(Reading):
    """Lists the trajectories of a buffer."""

    def query(self, predicate: Any = None, *, trajectory_key: Any = None) -> list[Trajectory]:
        """Return the trajectories for which a condition holds, or all, in the order in which they were written.

        They follow a ring across its wrap, and the lanes of a storage of several dimensions one after the other. The
        last one may be under way. Only the entries that the condition uses are read; see `filter_trajectories` for
        conditions and for what separates trajectories, which for a dataset is its episode table.

        WrongKindError (a TypeError) for elements that are no tensordicts, MissingKeyError (a KeyError) if nothing
        separates them; UnsupportedError (a NotImplementedError) for streams. Ensembles list the trajectories of their
        members, one member after the other.
        """
        holds = None if predicate is None else TrajectoryPredicate.of(predicate)
        with self._guard.hold():
            return [one for one in self.trajectories(trajectory_key) if holds is None or holds(one)]

    def trajectories(self, trajectory_key: Any = None) -> Iterator[Trajectory]:
        """Yield the trajectories that there are now; see `query`."""
        storage = self._storage
        if isinstance(storage, StreamStorage):
            raise UnsupportedError(
                "the trajectories of a stream cannot be listed: it keeps only the rows of the next batches",
                hint="download the dataset and open it without streaming",
            )
        if not self._writer.keeps_order:
            raise UsageError(f"a {type(self._writer).__name__} puts rows anywhere: they are no trajectories in order")
        if not len(storage):
            return
        with self._guard.hold():
            if storage.episode_lengths() is None and not is_tensor_collection(first := storage.read_at(0)):
                raise WrongKindError(f"trajectories are of tensordicts, the storage holds a {type(first).__name__}")
            table = trajectory_table(storage, _source(storage, trajectory_key))
            table.refresh()
            lane, start, length = table.runs()
            capacity, seen, shape = table.capacity, storage.log.now, tuple(storage.shape[1:])
        for number, first_step, count in zip(lane.tolist(), start.tolist(), length.tolist(), strict=True):
            rows = np.arange(first_step, first_step + count) % capacity
            place = tuple(int(part) for part in np.unravel_index(number, shape)) if shape else ()
            yield Trajectory(_Stored(self, rows, place, seen))

    def steps_at(self, index: Any) -> Any:
        """Return elements as batches have them, without the info of a sampler."""
        if self._transform.draws:
            with self._sampling:
                self.settle()
        rows = self._read(index)
        return self._transformed(rows if self._collate_fn is None else self._collate_fn(rows))

    def leaves_alone(self, key: Key) -> bool:
        """Whether no transform makes or changes this entry, as far as is known."""
        bare = key[1:] if key[0] == _NEXT else key
        for transform in self._transform:
            if not isinstance(transform, KeyedTransform | DecodeVideo):
                return False
            for other in (*transform.in_keys, *getattr(transform, "out_keys", ())):
                other = other[1:] if other[0] == _NEXT else other
                if bare[: len(other)] == other[: len(bare)]:
                    return False
        return True


def _source(storage: Storage, trajectory_key: Any) -> BoundarySource:
    """Return what separates the trajectories of a storage."""
    if trajectory_key is not None:
        key = boundary_key(trajectory_key)
        if not has_entry(storage, key):
            raise MissingKeyError(f"the trajectory_key {'.'.join(key)!r} is not in the storage")
        return IdBoundaries(key)
    if storage.episode_lengths() is not None and not storage.log.now.rows:
        return EpisodeBoundaries()
    for key in _IDS:
        if has_entry(storage, key):
            return IdBoundaries(key)
    for prefix in ((_NEXT,), ()):
        flags = tuple((*prefix, name) for name in DEFAULT_DONE_KEYS if has_entry(storage, (*prefix, name)))
        if flags:
            _warn_about_flags(flags)
            return FlagBoundaries(flags)
    raise _no_separation()


def _no_separation() -> MissingKeyError:
    names = ", ".join(".".join(key) for key in (*_IDS, (_NEXT, "done")))
    return MissingKeyError(f"trajectories cannot be separated: none of {names} is in the data")


def _warn_about_flags(flags: Sequence[Key]) -> None:
    if not quiet():
        names = ", ".join(".".join(key) for key in flags)
        warnings.warn(
            f"there are no trajectory ids: {names} separate trajectories, and one that ends without a flag is taken as "
            "one with the following",
            stacklevel=5,
        )


@suggests_keywords()
def iter_trajectories(data: Any, trajectory_key: Any = None) -> Iterator[Trajectory]:
    """Yield the trajectories of a batch, a buffer or a dataset, in order; see `filter_trajectories`."""
    if isinstance(data, Queries):
        yield from data.trajectories(trajectory_key)
        return
    steps = _require_steps(data)
    if not len(steps):
        return
    ends = _ends(steps, trajectory_key)
    ends[-1] = True
    start = 0
    for stop in (ends.nonzero().squeeze(-1) + 1).tolist():
        yield Trajectory(steps[start:stop])
        start = stop


def _ends(steps: TensorDictBase, trajectory_key: Any) -> torch.Tensor:
    """Return where trajectories end, bool `[steps]`; the last step is any."""
    ids: Any = None
    if trajectory_key is not None:
        key = boundary_key(trajectory_key)
        ids = _entry_of(steps, key)
        if ids is None:
            found = ", ".join(".".join(path) for path, _ in leaves(steps)) or "no entries"
            raise MissingKeyError(f"the trajectory_key {'.'.join(key)!r} is not in the data, there are {found}")
    else:
        ids = trajectory_ids(steps)
    if ids is not None:
        return _changes(ids, len(steps))
    if any((_NEXT, name) in steps.keys(True) for name in DEFAULT_DONE_KEYS):
        _warn_about_flags([(_NEXT, name) for name in DEFAULT_DONE_KEYS if (_NEXT, name) in steps.keys(True)])
        return step_ends(steps)
    flags = [steps.get(name) for name in DEFAULT_DONE_KEYS if name in steps.keys()]  # noqa: SIM118  # not a dict
    if not flags:
        raise _no_separation()
    _warn_about_flags([(name,) for name in DEFAULT_DONE_KEYS if name in steps.keys()])  # noqa: SIM118
    return torch.stack([flag.bool().reshape(len(steps), -1).any(-1) for flag in flags]).any(0)


def _changes(ids: Any, count: int) -> torch.Tensor:
    """Return where the next id differs, bool `[count]`; False at the last."""
    found = torch.zeros(count, dtype=torch.bool)
    if isinstance(ids, torch.Tensor):
        rows = ids.reshape(count, -1)
        found[:-1] = (rows[1:] != rows[:-1]).any(-1).cpu()
    else:
        found[:-1] = torch.tensor([one != other for one, other in zip(ids[1:], ids[:-1], strict=True)])
    return found


@suggests_keywords()
def filter_trajectories(data: Any, predicate: Any = None, *, trajectory_key: Any = None) -> list[Trajectory]:
    """Return the trajectories of a batch, a buffer or a dataset for which a condition holds, or all, in order.

    `data` is a tensordict `[steps]`, or a buffer, whose entries are read as the condition needs them. Conditions are
    comparisons of entries of `traj`, joined by `&`, `|` and `~`, or any function of a `Trajectory`:

    - `traj.length`, `traj.total_reward`; `traj.reward.sum()`, `.mean()`, `.max()`, `.min()`, `.first()`, `.last()`;
    - `(traj["next", "reward"] > 1).any()` and `.all()` for entries that are not reduced.

    Trajectories end where the ids `trajectory_key` change, by default those of the episode table of a dataset, of
    `("collector", "traj_ids")`, `"traj_ids"` or `"episode"`; without ids where a flag `done`, `truncated` or
    `terminated` is set, under `next` or else at the root, with a warning. The last one may be under way.

    WrongKindError (a TypeError) for other data, UsageError (a ValueError) for several batch dimensions, MissingKeyError
    (a KeyError) if nothing separates trajectories. Names are those of TorchRL.

    >>> from tensordict import TensorDict
    >>> from rbtool import traj
    >>> steps = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1]), "reward": torch.tensor([1, 1, 0, 0, 1])}, [5])
    >>> [found.length for found in filter_trajectories(steps, (traj.reward.sum() > 1) & (traj.length < 3))]
    [2]
    """
    if isinstance(data, Queries):
        return data.query(predicate, trajectory_key=trajectory_key)
    holds = None if predicate is None else TrajectoryPredicate.of(predicate)
    return [one for one in iter_trajectories(data, trajectory_key) if holds is None or holds(one)]
