"""Trajectories of batches, buffers and datasets, and conditions that select them, such as `traj.total_reward > 10`.

Entries are read only when a condition or the caller uses them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from ..errors import (
    MissingKeyError,
    SchemaError,
    UnsupportedError,
    UsageError,
    WrongKindError,
    quiet,
    suggests_keywords,
    warn_caller,
)
from ..samplers.steps_around import gathered
from ..samplers.trajectories import (
    BoundarySource,
    EpisodeBoundaries,
    FlagBoundaries,
    IdBoundaries,
    has_entry,
    trajectory_table,
)
from ..storages.base import Storage
from ..storages.dataset import StreamStorage
from ..storages.write_log import Written
from ..ted.schema import DEFAULT_DONE_KEYS, NEXT, TRAJECTORY_KEYS, Key, Numbers, as_key
from ..trajectories import leaves, step_ends, trajectory_ids
from ..transforms.base import CallableTransform, Compose
from ..writers.base import Writer
from .processes import Guard

Evaluate: TypeAlias = Callable[[Any], Any]
"""Computes a value of a trajectory."""


_SIGNS = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


class TrajectoryPredicate:
    """A condition on trajectories.

    Conditions are combined by `&`, `|` and `~`, also with plain functions of a trajectory. `and`, `or` and `not` raise
    TypeError, because Python would silently drop one side.

    Args:
        fn: a function that returns whether the condition holds for a trajectory. A result that is not a single truth
            value raises TypeError.
        description: the text that is shown for the condition.
        keys: the entries that it reads; None if unknown.
    """

    def __init__(self, fn: Evaluate, description: str = "predicate", keys: Iterable[Any] | None = None) -> None:
        if not callable(fn):
            raise WrongKindError(f"a predicate needs a function of a trajectory, found a {type(fn).__name__}")
        self._fn = fn
        self.description = description
        self._keys = None if keys is None else frozenset(keys)

    @classmethod
    def of(cls, condition: Any) -> TrajectoryPredicate:
        """Return a condition, made from a function if necessary; WrongKindError (a TypeError) for anything else."""
        if isinstance(condition, TrajectoryPredicate):
            return condition
        return TrajectoryPredicate(condition, getattr(condition, "__name__", "predicate"))

    def __call__(self, trajectory: Any) -> bool:
        return _truth(self._fn(trajectory), self.description)

    def required_keys(self) -> frozenset[Any] | None:
        """Return the keys of the entries that it reads; None if unknown."""
        return self._keys

    def _joined(self, other: Any, sign: str, fn: Callable[[TrajectoryPredicate], Evaluate]) -> TrajectoryPredicate:
        if not callable(other):
            raise WrongKindError(
                f"conditions are combined with conditions or functions, found a {type(other).__name__}"
            )
        right = TrajectoryPredicate.of(other)
        mine, others = self.required_keys(), right.required_keys()
        keys = None if mine is None or others is None else mine | others
        return TrajectoryPredicate(fn(right), f"({self.description} {sign} {right.description})", keys)

    def __and__(self, other: Any) -> TrajectoryPredicate:
        return self._joined(other, "&", lambda right: lambda one: self(one) and right(one))

    def __or__(self, other: Any) -> TrajectoryPredicate:
        return self._joined(other, "|", lambda right: lambda one: self(one) or right(one))

    def __invert__(self) -> TrajectoryPredicate:
        return TrajectoryPredicate(lambda one: not self(one), f"~{self.description}", self._keys)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self.description} has no truth value of its own: combine conditions with & and |, negate with ~"
        )

    def __repr__(self) -> str:
        return f"TrajectoryPredicate({self.description})"


class TrajectoryExpression:
    """An expression for a value of each trajectory: an entry, or a number computed from it. Compare it for a condition.

    `sum`, `mean`, `max` and `min` reduce an entry over all of its elements; `first` and `last` take the value of that
    step. An entry that is not reduced is compared element by element: `(traj.reward > 1).any()`.
    """

    def __init__(self, evaluate: Evaluate, description: str, keys: Iterable[Any], *, reduced: bool) -> None:
        self._evaluate = evaluate
        self.description = description
        self.keys = frozenset(keys)
        self.reduced = reduced

    def value(self, trajectory: Any) -> Any:
        """Return the value for a trajectory: a tensor, a number, or a list with one value a step."""
        return self._evaluate(trajectory)

    def _reduced(self, name: str, fn: Callable[[Any], Any]) -> TrajectoryExpression:
        description = f"{self.description}.{name}()"
        return TrajectoryExpression(lambda one: fn(self.value(one)), description, self.keys, reduced=True)

    def _number(self, name: str) -> TrajectoryExpression:
        def reduce(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{self.description} has no {name}: it is not a tensor of numbers")
            value = value.double() if name in ("sum", "mean") and not value.is_complex() else value
            return getattr(value, name)()

        return self._reduced(name, reduce)

    def sum(self) -> TrajectoryExpression:
        """The sum of all elements, in float64."""
        return self._number("sum")

    def mean(self) -> TrajectoryExpression:
        """The mean of all elements, in float64."""
        return self._number("mean")

    def max(self) -> TrajectoryExpression:
        """The largest element."""
        return self._number("max")

    def min(self) -> TrajectoryExpression:
        """The smallest element."""
        return self._number("min")

    def first(self) -> TrajectoryExpression:
        """The value of the first step."""
        return self._reduced("first", lambda value: value[0])

    def last(self) -> TrajectoryExpression:
        """The value of the last step."""
        return self._reduced("last", lambda value: value[-1])

    def _compared(self, other: Any, compare: Callable[[Any, Any], Any]) -> TrajectoryComparison:
        right = other if isinstance(other, TrajectoryExpression) else None
        shown = repr(other) if right is None else right.description

        def evaluate(one: Any) -> Any:
            return _elementwise(compare, self.value(one), other if right is None else right.value(one))

        return TrajectoryComparison(
            evaluate,
            f"({self.description} {_SIGNS[compare]} {shown})",
            self.keys | (frozenset() if right is None else right.keys),
            reduced=self.reduced and (right is None or right.reduced),
        )

    def __lt__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.ge)

    def __eq__(self, other: object) -> TrajectoryComparison:  # type: ignore[override]
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> TrajectoryComparison:  # type: ignore[override]
        return self._compared(other, operator.ne)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.description} is a value, not a condition: compare it, and combine conditions with & and |"
        )

    def __repr__(self) -> str:
        return self.description


class TrajectoryComparison(TrajectoryExpression, TrajectoryPredicate):
    """A comparison. It is a condition if both sides are reduced; otherwise `any` or `all` makes it one."""

    def __init__(self, evaluate: Evaluate, description: str, keys: Iterable[Any], *, reduced: bool) -> None:
        TrajectoryExpression.__init__(self, evaluate, description, keys, reduced=reduced)
        TrajectoryPredicate.__init__(self, evaluate, description, self.keys)

    def __call__(self, trajectory: Any) -> bool:
        if not self.reduced:
            raise TypeError(f"{self.description} compares every element: reduce it, as in {self.description}.any()")
        return super().__call__(trajectory)

    def any(self) -> TrajectoryPredicate:
        """Return the condition that the comparison holds for at least one element."""
        return self._over("any", any)

    def all(self) -> TrajectoryPredicate:
        """Return the condition that the comparison holds for all elements."""
        return self._over("all", all)

    def _over(self, name: str, of_list: Callable[[Iterable[Any]], bool]) -> TrajectoryPredicate:
        def evaluate(one: Any) -> bool:
            found = self.value(one)
            return bool(getattr(found, name)()) if isinstance(found, torch.Tensor) else of_list(_listed(found))

        return TrajectoryPredicate(evaluate, f"{self.description}.{name}()", self.keys)

    __bool__ = TrajectoryPredicate.__bool__
    __hash__ = object.__hash__
    __repr__ = TrajectoryPredicate.__repr__


class TrajectoryEntries:
    """The entries of trajectories for use in conditions: `traj.reward`, `traj["next", "reward"]`; see
    `filter_trajectories`.

    An entry is looked up at the root, then under `next`. `traj.length` is the number of steps, `traj.total_reward` the
    sum of rewards.
    """

    @property
    def length(self) -> TrajectoryExpression:
        """The number of steps."""
        return TrajectoryExpression(lambda one: one.length, "traj.length", (), reduced=True)

    @property
    def total_reward(self) -> TrajectoryExpression:
        """The sum of the rewards of all steps."""
        return TrajectoryExpression(lambda one: one.total_reward, "traj.total_reward", ("reward",), reduced=True)

    def __getattr__(self, name: str) -> TrajectoryExpression:
        if name.startswith("__"):
            raise AttributeError(name)
        return TrajectoryExpression(lambda one: _value_of(one, name), f"traj.{name}", (name,), reduced=False)

    def __getitem__(self, key: Any) -> TrajectoryExpression:
        key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
        shown = ", ".join(map(repr, key)) if isinstance(key, tuple) else repr(key)
        return TrajectoryExpression(lambda one: _value_of(one, key), f"traj[{shown}]", (key,), reduced=False)

    def __repr__(self) -> str:
        return "traj"


traj = TrajectoryEntries()
"""The entries of trajectories, for conditions: `filter_trajectories(data, traj.length > 10)`."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _elementwise(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compare values. Lists, with one value per step, are compared item by item, also with a single value."""
    if isinstance(left, list) or isinstance(right, list):
        count = len(left if isinstance(left, list) else right)
        pairs = zip(*(side if isinstance(side, list) else [side] * count for side in (left, right)), strict=True)
        return [bool(compare(one, other)) for one, other in pairs]
    return compare(left, right)


def _truth(value: Any, description: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return bool(value)
    size = f"{list(value.shape)} values" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(f"{description} is {size}, expected one truth value: reduce comparisons with any() or all()")


_IDS = TRAJECTORY_KEYS["queries"]


class _ReadLater:
    """Makes a `Trajectory` read all of its entries when code uses it as a tensorclass.

    All code of tensordict accesses a tensorclass through its `_tensordict`, or through its `__dict__`, which contains
    that.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _CONTENT and (steps := _unread_steps(self)) is not None:
            content = object.__getattribute__(self, "__dict__")
            content.update(Trajectory(steps.data()).__dict__)
            content.pop(_UNREAD, None)
        return object.__getattribute__(self, name)


_UNREAD = "_unread"
_CONTENT = ("_tensordict", "_non_tensordict", "__dict__")


def _unread_steps(trajectory: Any) -> Any:
    """Return the steps of a trajectory whose entries have not all been read; None if they have."""
    return object.__getattribute__(trajectory, "__dict__").get(_UNREAD)


class Trajectory(_ReadLater, TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]
    """The steps of one trajectory, in order: a tensorclass of batch size `[length]`.

    `trajectory["next", "reward"]` is an entry. `trajectory.reward` and `trajectory.get("reward")` look for the entry at
    the root and then under `next`; but names that are attributes of every tensordict, such as `names`, are these
    attributes.

    `trajectory[2:5]` and `trajectory[2]` are trajectories of some of the steps, with the batch sizes `[3]` and `[]`;
    `tensordict.lazy_stack(found)` makes one with the batch size `[n, -1]`. `==` compares element by element.

    Entries of a trajectory made from a tensordict are views of it. A trajectory of a buffer reads only the entries that
    are used, each of them once, into fresh memory. Transforms run when an entry that they change is first used, or when
    all entries are.

    Args:
        data: the steps, a tensordict `[length]`.

    Attributes:
        data: all entries, a tensordict `[length]`.
        length: the number of steps.
        total_reward: the sum of rewards.

    Raises:
        WrongKindError: (a TypeError) the data is not a tensordict.
        UsageError: (a ValueError) it has several batch dimensions; from `length`, if it is a single step.
        MissingKeyError: (a KeyError) an entry does not exist; an AttributeError for attribute access.
        SchemaError: (a RuntimeError) the steps have been overwritten in the buffer before they were read.

    Names and form match TorchRL.
    """

    data: Any = None

    def __post_init__(self) -> None:  # also called when an object is indexed or stacked
        data = self.data
        if data is not None and (not is_tensor_collection(data) or data.batch_size != self.batch_size):
            self.batch_size = _require_steps(data).batch_size

    @classmethod
    def read_later(cls, steps: _Stored | _InBatch) -> Trajectory:
        """Make a trajectory whose entries are read when they are used."""
        made = cls.__new__(cls)
        made.__dict__[_UNREAD] = steps
        return made

    @property
    def length(self) -> int:
        """The number of steps."""
        if (steps := _unread_steps(self)) is not None:
            return len(steps)
        if len(self.batch_size) != 1:
            raise UsageError(f"the batch size is {list(self.batch_size)}, expected one trajectory: [length]")
        return len(self)

    def __len__(self) -> int:
        steps = _unread_steps(self)
        return len(self._tensordict if steps is None else steps)

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of all rewards, in their floating type, or else int64; MissingKeyError (a KeyError) without any."""
        found = _found(self, [(NEXT, "reward")])
        rewards = torch.as_tensor(_value_of(self, "reward") if found is None else found)
        return rewards.double().sum().to(rewards.dtype) if rewards.is_floating_point() else rewards.sum()

    def get(self, key: Any, default: Any = None) -> Any:  # type: ignore[override]
        """Return an entry at the root, or else under `next`; the default if there is none."""
        found = _found(self, _places(key))
        return default if found is None else found

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:  # type: ignore[override]
        """Return the names of the entries at the root; as `keys` of a tensordict does."""
        if not include_nested and not leaves_only and (steps := _unread_steps(self)) is not None:
            return list(steps.keys())
        return [] if self.data is None else list(self.data.keys(include_nested, leaves_only))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            key = as_key(index)
            if (found := _found(self, [key])) is None:
                raise MissingKeyError(f"{'.'.join(key)!r} is not in the trajectory")
            return found
        if (steps := _unread_steps(self)) is not None:
            part = steps[index]
            return Trajectory.read_later(part) if isinstance(part, _Stored) else Trajectory(part)
        return type(self)._from_tensordict(self._tensordict[index])


_of_tensorclass = Trajectory.__getattr__  # type: ignore[attr-defined]


def _attribute(trajectory: Trajectory, name: str) -> Any:
    """Look up an attribute that the class does not have: first one of every tensordict, then an entry."""
    if hasattr(TensorDict, name):
        return _of_tensorclass(trajectory, name)
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return _value_of(trajectory, name)
    except MissingKeyError as error:
        raise AttributeError(str(error)) from None


def _shown(trajectory: Trajectory) -> str:
    single = _unread_steps(trajectory) is not None or len(trajectory.batch_size) == 1
    size = f"length={trajectory.length}" if single else f"batch_size={tuple(trajectory.batch_size)}"
    return f"Trajectory({size}, keys={sorted(trajectory.keys())})"


# tensordict replaces these methods when a tensorclass is defined, so they are set afterwards.
Trajectory.__getattr__ = _attribute  # type: ignore[attr-defined]
Trajectory.__repr__ = _shown  # type: ignore[method-assign, assignment]


def _places(key: Any) -> list[Key]:
    """Return the keys under which an entry is looked up: at the root, then under `next`."""
    path = as_key(key)
    return [path] if path[0] == NEXT else [path, (NEXT, *path)]


def _value_of(trajectory: Trajectory, key: Any) -> Any:
    """Return an entry at the root, or else under `next`: a tensor, or a list of other values."""
    if (found := _found(trajectory, _places(key))) is None:
        name = ".".join(as_key(key))
        raise MissingKeyError(f"{name!r} is not in the trajectory, at the root or under next")
    return found


def _found(trajectory: Trajectory, keys: Sequence[Key]) -> Any:
    """Return the first of these entries that exists; None if there is none."""
    if (steps := _unread_steps(trajectory)) is not None:
        for key in keys:
            if (found := steps.entry(key)) is not None:
                return found
        if not steps.may_have(keys):
            return None
    data = trajectory.data
    return None if data is None else next((one for key in keys if (one := _entry_of(data, key)) is not None), None)


def _require_steps(data: Any) -> Any:
    if not is_tensor_collection(data):
        raise WrongKindError(f"a trajectory needs a tensordict of steps, found a {type(data).__name__}")
    if data.batch_dims != 1:
        raise UsageError(f"a trajectory needs steps with one batch dimension, found {list(data.batch_size)}")
    return data


def _entry_of(data: Any, key: Key) -> Any:
    """Return an entry of a tensordict: a tensor, a tensordict, or a list of other values; None if it is missing."""
    found = data.get(key, None)
    return None if found is None else _plain(found, len(data))


def _plain(found: Any, count: int) -> Any:
    """Return a value of `count` steps as a tensor, a tensordict, or a list of other values."""
    if isinstance(found, torch.Tensor) or not is_non_tensor(found):
        return found.tolist() if isinstance(found, np.ndarray) else found
    found = found.tolist()
    return found if isinstance(found, list) else [found] * count


class _InBatch:
    """The steps `start` to `stop - 1` of a batch; entries are views of it."""

    def __init__(self, batch: TensorDictBase, start: int, stop: int) -> None:
        self._batch, self._part = batch, slice(start, stop)

    def __len__(self) -> int:
        return int(self._part.stop - self._part.start)

    def entry(self, key: Key) -> Any:
        """Return an entry; None if it does not exist."""
        found = self._batch.get(key, None)
        return None if found is None else _plain(found[self._part], len(self))

    def may_have(self, _keys: Sequence[Key]) -> bool:
        """Return False, because `entry` finds all entries."""
        return False

    def keys(self) -> Any:
        """Return the names of the entries at the root."""
        return self._batch.keys()

    def data(self) -> Any:
        """Return all entries."""
        return self._batch[self._part]

    def __getitem__(self, index: Any) -> Any:
        return self.data()[index]


class QueriedBuffer(Protocol):
    """The interface of buffers that trajectories use."""

    @property
    def storage(self) -> Storage: ...

    @property
    def writer(self) -> Writer: ...

    @property
    def transform(self) -> Compose: ...

    @property
    def guard(self) -> Guard: ...

    def steps_at(self, index: Any) -> Any:
        """Return elements as they appear in batches, but without the sampler's info."""


class _Stored:
    """Steps in a buffer, given by their rows, and by their lane if the storage has several dimensions."""

    def __init__(self, buffer: QueriedBuffer, rows: Numbers, lane: tuple[int, ...], seen: Written) -> None:
        self._buffer, self._rows, self._lane, self._seen = buffer, rows, lane, seen
        self._entries: dict[Key, Any] = {}
        """The entries that were read so far."""

    def __len__(self) -> int:
        return len(self._rows)

    def _index(self, rows: Numbers) -> Any:
        first = torch.from_numpy(rows)
        return (first, *(torch.full_like(first, part) for part in self._lane)) if self._lane else first

    def _unchanged(self, read: Callable[[Any], Any], rows: Numbers) -> Any:
        """Return `read(index)`, while writers are excluded; SchemaError if the steps have been overwritten."""
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
            if change.keys is None:  # whole rows were written; an edit of single entries does not replace the step
                lost = lost or change.rows is None
                lost = lost or bool(np.isin(self._rows, np.arange(storage.shape[0])[change.rows]).any())
        if lost:
            raise SchemaError("the steps of this trajectory have been overwritten", hint="query the buffer again")
        self._seen = now

    def entry(self, key: Key) -> Any:
        """Return an entry, which is read once; None if it cannot be read without reading all entries."""
        if key not in self._entries and (needed := _needed_for(key, self._buffer.transform)) is not None:
            self._entries[key] = self._unchanged(lambda index: self._made(key, *needed, index), self._rows)
        return self._entries.get(key)

    def _made(self, key: Key, transforms: Sequence[Any], keys: Iterable[Key], index: Any) -> Any:
        """Read the entries `keys`, apply transforms, and return the entry `key`; None if it is not a tensor."""
        first, *lanes = index if isinstance(index, tuple) else (index,)
        storage = self._buffer.storage
        if not transforms:
            return gathered(storage, key, first, lanes)
        steps = TensorDict({}, batch_size=[len(first)])
        for place in (place for bare in keys for place in _places(bare)):
            if (found := gathered(storage, place, first, lanes)) is not None:
                steps.set(place, found)
        try:
            made = Compose(*transforms)(steps).get(key, None)
        except MissingKeyError:  # an entry is not stored by itself
            return None
        return made if isinstance(made, torch.Tensor) else None

    def may_have(self, keys: Sequence[Key]) -> bool:
        """Return whether the complete steps may have one of these entries, which `entry` did not find."""
        return not self._buffer.transform.is_empty or any(_entry_of(self._one(), key) is not None for key in keys)

    def _one(self) -> Any:
        return self._unchanged(self._buffer.steps_at, self._rows[:1])

    def keys(self) -> Any:
        """Return the names of the entries at the root."""
        return self._one().keys()

    def data(self) -> Any:
        """Read all entries, through the transforms, except that entries that were read before are kept."""
        steps = self._unchanged(self._buffer.steps_at, self._rows)
        for key, value in self._entries.items():
            if isinstance(value, torch.Tensor):
                steps.set(key, value)
        return steps

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index.numpy(force=True) if isinstance(index, torch.Tensor) else index]
        if not isinstance(rows, np.ndarray):  # a single step
            return self._unchanged(self._buffer.steps_at, np.array([rows]))[0]
        return _Stored(self._buffer, rows, self._lane, self._seen)


def _needed_for(key: Key, transforms: Compose) -> tuple[list[Any], set[Key]] | None:
    """Return the transforms that make or change an entry, and the entries that they read, without `next`.

    None if this is unknown: a transform has no `in_keys` and `out_keys`, or one of the needed transforms may read
    other entries as well.
    """
    if key == (NEXT,):
        return None
    needed: list[Any] = []
    keys = {_bare(key)}
    for transform in reversed(list(transforms)):
        module = transform.func if isinstance(transform, CallableTransform) else transform
        read, made = (list(map(as_key, getattr(module, name, None) or ())) for name in ("in_keys", "out_keys"))
        if not read or not made:
            return None
        named = {_bare(other) for other in (*read, *made)}
        if any(one[: len(other)] == other[: len(one)] for one in keys for other in named):
            if not getattr(transform, "reads_in_keys_only", False):
                return None
            needed.insert(0, transform)
            keys |= named
    return needed, keys


def _bare(key: Key) -> Key:
    return key[1:] if key[0] == NEXT else key


def stored_trajectories(buffer: QueriedBuffer, trajectory_key: Any) -> Iterator[Trajectory]:
    """Yield the trajectories of a buffer as it is now; see `ReplayBuffer.query`."""
    storage = buffer.storage
    if isinstance(storage, StreamStorage):
        raise UnsupportedError(
            "the trajectories of a stream cannot be listed: it keeps only the rows of the next batches",
            hint="download the dataset and open it without streaming",
        )
    if not buffer.writer.keeps_order:
        raise UsageError(
            f"a {type(buffer.writer).__name__} puts rows anywhere, so trajectories cannot be found in their order"
        )
    if not len(storage):
        return
    with buffer.guard.hold():
        if storage.episode_lengths() is None and not is_tensor_collection(first := storage.read_at(0)):
            raise WrongKindError(f"trajectories need tensordicts, the storage holds a {type(first).__name__}")
        table = trajectory_table(storage, _source(storage, trajectory_key))
        table.refresh()
        lane, start, length = table.runs()
        capacity, seen, shape = table.capacity, storage.log.now, tuple(storage.shape[1:])
    for number, first_step, count in zip(lane.tolist(), start.tolist(), length.tolist(), strict=True):
        rows = np.arange(first_step, first_step + count) % capacity
        place = tuple(int(part) for part in np.unravel_index(number, shape)) if shape else ()
        yield Trajectory.read_later(_Stored(buffer, rows, place, seen))


def _source(storage: Storage, trajectory_key: Any) -> BoundarySource:
    """Return the source of the trajectory ends in a storage; see `filter_trajectories`."""
    if trajectory_key is not None:
        key = as_key(trajectory_key)
        if not has_entry(storage, key):
            raise MissingKeyError(f"the trajectory_key {'.'.join(key)!r} is not in the storage")
        return IdBoundaries(key)
    if storage.episode_lengths() is not None and not storage.log.now.rows:
        return EpisodeBoundaries()
    for key in _IDS:
        if has_entry(storage, key):
            return IdBoundaries(key)
    for prefix in ((NEXT,), ()):
        flags = tuple((*prefix, name) for name in DEFAULT_DONE_KEYS if has_entry(storage, (*prefix, name)))
        if flags:
            _warn_about_flags(flags)
            return FlagBoundaries(flags)
    raise _no_separation()


def _no_separation() -> MissingKeyError:
    names = ", ".join(".".join(key) for key in (*_IDS, (NEXT, "done")))
    return MissingKeyError(f"trajectories cannot be separated: the data has none of {names}")


def _warn_about_flags(flags: Sequence[Key]) -> None:
    if not quiet():
        names = ", ".join(".".join(key) for key in flags)
        warn_caller(
            f"the data has no trajectory ids: {names} separate trajectories, and one that ends without a flag is "
            "joined to the next one"
        )


@suggests_keywords()
def iter_trajectories(data: Any, trajectory_key: Any = None) -> Iterator[Trajectory]:
    """Yield the trajectories of a batch, a buffer or a dataset, in order; see `filter_trajectories`."""
    if (of_buffer := _queries_of(data)) is not None:
        yield from of_buffer.trajectories(trajectory_key)
        return
    steps = _require_steps(data.data if isinstance(data, Trajectory) else data)
    if not len(steps):
        return
    ends = _ends(steps, trajectory_key)
    ends[-1] = True
    start, steps = 0, steps.copy()  # a copy, so that entries that are set during the iteration are not seen
    for stop in (ends.nonzero().squeeze(-1) + 1).tolist():
        yield Trajectory.read_later(_InBatch(steps, start, stop))
        start = stop


def _ends(steps: TensorDictBase, trajectory_key: Any) -> torch.Tensor:
    """Return where trajectories end, bool `[steps]`; the value of the last step is undefined."""
    ids: Any = None
    if trajectory_key is not None:
        key = as_key(trajectory_key)
        ids = _entry_of(steps, key)
        if ids is None:
            found = ", ".join(".".join(path) for path, _ in leaves(steps)) or "no entries"
            raise MissingKeyError(f"the trajectory_key {'.'.join(key)!r} is not in the data, which has {found}")
    else:
        ids = trajectory_ids(steps)
    if ids is not None:
        return _changes(ids, len(steps))
    if any((NEXT, name) in steps.keys(True) for name in DEFAULT_DONE_KEYS):
        _warn_about_flags([(NEXT, name) for name in DEFAULT_DONE_KEYS if (NEXT, name) in steps.keys(True)])
        return step_ends(steps)
    flags = [steps.get(name) for name in DEFAULT_DONE_KEYS if name in steps.keys()]  # noqa: SIM118  # not a dict
    if not flags:
        raise _no_separation()
    _warn_about_flags([(name,) for name in DEFAULT_DONE_KEYS if name in steps.keys()])  # noqa: SIM118
    return torch.stack([flag.bool().reshape(len(steps), -1).any(-1) for flag in flags]).any(0)


def _changes(ids: Any, count: int) -> torch.Tensor:
    """Return which steps are followed by another id, bool `[count]`; False for the last one."""
    found = torch.zeros(count, dtype=torch.bool)
    if isinstance(ids, torch.Tensor):
        rows = ids.reshape(count, -1)
        found[:-1] = (rows[1:] != rows[:-1]).any(-1).cpu()
    else:
        found[:-1] = torch.tensor([one != other for one, other in zip(ids[1:], ids[:-1], strict=True)])
    return found


@suggests_keywords()
def filter_trajectories(data: Any, predicate: Any = None, *, trajectory_key: Any = None) -> list[Trajectory]:
    """Return the trajectories of a batch, a buffer or a dataset that meet a condition, in order.

    Conditions compare entries of `traj`, and are combined by `&`, `|` and `~`:

    - `traj.length`, `traj.total_reward`; `traj.reward.sum()`, `.mean()`, `.max()`, `.min()`, `.first()`, `.last()`;
    - `(traj["next", "reward"] > 1).any()` and `.all()` for entries that are not reduced.

    The last trajectory may be unfinished.

    Args:
        data: a tensordict `[steps]`, or a buffer, of which only the entries that the condition uses are read.
        predicate: the condition, which may be any function of a `Trajectory`; default all trajectories.
        trajectory_key: the entry with ids; a trajectory ends where the id changes. By default the episode table of a
            dataset is used, otherwise the ids `("collector", "traj_ids")`, `"traj_ids"` or `"episode"`. Without ids,
            trajectories end at a flag `done`, `truncated` or `terminated`, under `next` or else at the root; this gives
            a warning.

    Raises:
        WrongKindError: (a TypeError) `data` is neither.
        UsageError: (a ValueError) it has several batch dimensions.
        MissingKeyError: (a KeyError) nothing in the data separates trajectories.

    Names are TorchRL's.

    >>> from tensordict import TensorDict
    >>> from rbtool import traj
    >>> steps = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1]), "reward": torch.tensor([1, 1, 0, 0, 1])}, [5])
    >>> [found.length for found in filter_trajectories(steps, (traj.reward.sum() > 1) & (traj.length < 3))]
    [2]
    """
    if (of_buffer := _queries_of(data)) is not None:
        return list(of_buffer.query(predicate, trajectory_key=trajectory_key))
    holds = None if predicate is None else TrajectoryPredicate.of(predicate)
    return [one for one in iter_trajectories(data, trajectory_key) if holds is None or holds(one)]


def _queries_of(data: Any) -> Any:
    """Return data that lists its own trajectories, such as a buffer; None for a batch of steps."""
    return data if not is_tensor_collection(data) and hasattr(type(data), "trajectories") else None
