"""Ensembles: several storages that are sampled as one, and batches that are gathered from all of them at once."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import from_numpy

from ..errors import SchemaError, UsageError
from ..kernels.rows import BatchPool, gather_parts, warm
from ..ted.schema import Numbers
from ..torchrl_classes import counterpart, described
from .base import Storage
from .columns import Columns, renames
from .pytree import Path, TensorDictNode, TensorNode, is_plain
from .tensor import TensorStorage

BUFFER_IDS, INDEX, SOURCE_ID = "buffer_ids", "index", "source_id"

Drawn: TypeAlias = list[tuple[int, Any]]
"""Pairs of a member's number and rows of that member."""

LoadPart: TypeAlias = Callable[[Any, Callable[[], Any]], None]
"""Loads a part inside `all_or_none`; called with the part and a function that loads it."""


class EnsembleKindError(UsageError, TypeError):
    """A member or an index of an ensemble has the wrong type."""


class EnsembleWriteError(SchemaError, TypeError):
    """Something was written to an ensemble; only its members can be written to."""


def refuse_write(ensemble: Any) -> NoReturn:
    """Raise EnsembleWriteError (a RuntimeError and a TypeError)."""
    raise EnsembleWriteError(
        f"a {type(ensemble).__name__} cannot be written to; only its members can",
        hint="write to a member: rb[0].extend(…)",
    )


def checked_members(name: str, members: Sequence[Any], kind: type[Any]) -> tuple[Any, ...]:
    """Return the members; UsageError if there are none, EnsembleKindError (a TypeError) if one has another type."""
    if not members:
        raise UsageError(f"a {name} has no members, expected at least one")
    for number, member in enumerate(members):
        if not isinstance(member, kind):
            raise EnsembleKindError(f"member {number} is {described(member, f'a {kind.__name__}')}")
    return tuple(members)


def chosen_members(index: Any, count: int) -> int | list[int]:
    """Return the number of a member, or the numbers of several, selected by `index` among `count`.

    Args:
        index: an int selects one; a slice, a list, a range, or a vector of ints or bools several.
        count: the number of members.

    Raises:
        IndexError: a member does not exist.
        EnsembleKindError: (a TypeError) the index is a float, a string or of another type.
        SchemaError: (a RuntimeError) the index is a tensor of several dimensions.
    """
    if isinstance(index, torch.Tensor | np.ndarray):
        if index.ndim > 1:
            raise SchemaError(f"members are selected by a vector of numbers, found {index.ndim} dimensions")
        index = index.tolist()
    elif isinstance(index, np.integer):
        index = int(index)
    if isinstance(index, slice):
        return list(range(count))[index]
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, list | range):
        found = list(index)
        if found and all(isinstance(one, bool) for one in found):
            if len(found) != count:
                raise IndexError(f"the mask is for {len(found)} members, expected {count}")
            return [number for number, chosen in enumerate(found) if chosen]
        return [_one(number, count) for number in found]
    return _one(index, count)


def _one(index: Any, count: int) -> int:
    if isinstance(index, torch.Tensor | np.ndarray | np.integer) and not getattr(index, "ndim", 0):
        index = index.item()
    if isinstance(index, bool) or not isinstance(index, int):
        raise EnsembleKindError(f"members are selected by ints, found a {type(index).__name__}: {index!r}")
    if not -count <= index < count:
        raise IndexError(f"member is {index}, expected one of {count} members")
    return index % count


class _Nesting(NamedTuple):
    """The leaves of an ensemble: its members, with the leaves of each member that is an ensemble in its place.

    Attributes:
        members: the members.
        leaves: the leaves.
        sources: the number of each member's first leaf, int64 `[members]`.
        nested: whether a member is an ensemble.
    """

    members: tuple[Storage, ...]
    leaves: list[Storage]
    sources: NDArray[np.int64]
    nested: bool


@counterpart
class StorageEnsemble(Storage):
    """The storages of an ensemble, and the transforms of their rows.

    `len` is the number of members. `storage[i]` is a member, `storage[1:]` an ensemble of some, `storage[:, rows]` a
    list of these rows of each member, without transforms. `get(index)`, for a tensordict with `"buffer_ids"` and
    `"index"` as made by a `SamplerEnsemble`, returns a list of pairs `(member, rows)`, with rows after their member's
    transform. Writes raise EnsembleWriteError (a RuntimeError). Members can be ensembles.

    Args:
        *storages: the members.
        transforms: one callable, or None, for each member.

    Raises:
        EnsembleKindError: (a TypeError) there are more or fewer transforms than storages.

    Names follow TorchRL.

    >>> from rbtool import TensorStorage
    >>> storage = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(5) + 10))
    >>> len(storage), storage[:, [0, 2]]
    (2, [tensor([0, 2]), tensor([10, 12])])
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Callable[[Any], Any] | None] | None = None) -> None:
        members = checked_members("StorageEnsemble", storages, Storage)
        if transforms is not None and len(transforms) != len(members):
            raise EnsembleKindError(
                f"there are {len(transforms)} transforms, expected {len(members)}: one for each storage"
            )
        super().__init__(min(sum(member.max_size for member in members), sys.maxsize))
        self.members: tuple[Storage, ...] = members
        self._known: _Nesting | None = None
        self.transforms = [None] * len(members) if transforms is None else list(transforms)

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each member."""
        if not self._nesting.nested:
            return list(map(len, self.members))
        return [sum(one.sizes) if isinstance(one, StorageEnsemble) else len(one) for one in self.members]

    @property
    def leaves(self) -> list[Storage]:
        """The storages that hold rows, in order; members that are ensembles are replaced by their own leaves."""
        return self._nesting.leaves

    @property
    def sources(self) -> NDArray[np.int64]:
        """The number of each member's first leaf among `leaves`, int64 `[members]`."""
        return self._nesting.sources

    @property
    def _nesting(self) -> _Nesting:
        known = self._known
        if known is None or known.members is not self.members or known.nested:  # nested members may have changed
            parts = [one.leaves if isinstance(one, StorageEnsemble) else [one] for one in self.members]
            nested = any(isinstance(one, StorageEnsemble) for one in self.members)
            starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            known = self._known = _Nesting(self.members, [leaf for part in parts for leaf in part], starts, nested)
        return known

    def members_of(self, sources: torch.Tensor) -> torch.Tensor:
        """Return, for each leaf given by its number, the number of the member that is or contains it."""
        return torch.searchsorted(torch.from_numpy(self.sources), sources, right=True) - 1

    def __len__(self) -> int:
        return len(self.members)

    @property
    def shape(self) -> torch.Size:
        """The number of members."""
        return torch.Size([len(self.members)])

    @property
    def shared(self) -> bool:
        """Whether other processes see the rows of all members."""
        return all(member.shared for member in self.members)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with rows of a member."""
        return any(member.may_hold(tensor) for member in self.members)

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Return a member, an ensemble of some members, or rows; see the class."""
        if is_tensor_collection(index):
            return self._rows_of(index)
        if isinstance(index, tuple):
            if not index:
                return self
            chosen, rest = chosen_members(index[0], len(self)), index[1:]
            if not rest:
                return self.read_at(index[0])
            rows = rest[0] if len(rest) == 1 else rest
            if isinstance(chosen, int):
                return self.members[chosen].get(rows)
            return [self.members[member].get(rows) for member in chosen]
        chosen = chosen_members(index, len(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        if chosen == list(range(len(self))):
            return self
        return type(self)(
            *(self.members[member] for member in chosen), transforms=[self.transforms[member] for member in chosen]
        )

    def read_rows(self, rows: Any) -> Any:
        """Return members."""
        return self.read_at(rows)

    def _rows_of(self, index: TensorDictBase) -> Drawn:
        found = []
        for member, part in split_index(index):
            storage, transform = self.members[member], self.transforms[member]
            rows = self._nested_rows(member, part) if isinstance(storage, StorageEnsemble) else storage.get(part.rows)
            found.append((member, rows if transform is None else transform(rows)))
        return found

    def _nested_rows(self, member: int, part: IndexPart) -> Any:
        inner = self.members[member]
        if part.sources is None or not isinstance(inner, StorageEnsemble):
            raise SchemaError(f"member {member} is an ensemble, and the index has no source_id for its rows")
        sources = part.sources - int(self.sources[member])
        entries = {BUFFER_IDS: inner.members_of(sources), SOURCE_ID: sources, INDEX: part.numbers}
        nested = TensorDict(entries, [len(sources)])
        return torch.cat([rows for _, rows in inner.get(nested)])

    # Writing and state ------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    def write_rows(self, rows: Any, data: Any) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    def extend(self, value: Any) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    add = extend

    def _refuse_hook(self, hook: Callable[..., Any]) -> NoReturn:
        raise UsageError("an ensemble has no rows of its own for hooks", hint="register them on its members")

    register_save_hook = register_load_hook = _refuse_hook

    def clear_rows(self) -> None:
        """Remove the elements of all members."""
        for member in self.members:
            member.empty()

    def save_state(self) -> dict[str, Any]:
        """Return the states of the members, by their numbers as text."""
        return {str(number): member.state_dict() for number, member in enumerate(self.members)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of each member. On failure, all members keep their previous states.

        Raises:
            SchemaError: a state does not fit, or the number of members differs.
        """
        load_members(self.members, state)

    def __repr__(self) -> str:
        names = ", ".join(f"{type(one).__name__}(len={len(one)})" for one in self.members)
        return f"{type(self).__name__}(storages=({names}), transforms={self.transforms})"


def require_members(state: Mapping[str, Any], count: int) -> None:
    """Raise SchemaError unless a state has exactly one entry for each of `count` members."""
    numbers = {key for key in map(str, state) if key.isdigit()}
    if numbers != {str(number) for number in range(count)}:
        raise SchemaError(f"the state has {len(numbers)} members, this ensemble has {count}")


@contextlib.contextmanager
def all_or_none() -> Iterator[LoadPart]:
    """Load several parts inside the context, all of them or none.

    Yields `load(part, act)`, which calls `act()` to load a part. If anything in the context fails, the parts that were
    loaded get back their previous state, of which a copy, including rows, is kept meanwhile. A part that fails to load
    must restore itself.
    """
    done: list[tuple[Any, Any]] = []

    def load(part: Any, act: Callable[[], Any]) -> None:
        before = held_state(part.state_dict())
        act()
        done.append((part, before))

    try:
        yield load
    except BaseException:
        for part, before in reversed(done):
            part.load_state_dict(before)
        raise


def held_state(state: Any) -> Any:
    """Copy a state; only the valid rows of a storage's tensors are copied and take memory."""
    if not isinstance(state, dict):
        return copy.deepcopy(state)
    if "_storage" in state and isinstance(length := state.get("_len"), int):
        tensors = state["_storage"]
        if isinstance(tensors, torch.Tensor):
            return {**state, "_storage": _held_rows(tensors, length)}
        if isinstance(tensors, dict) and all(isinstance(one, torch.Tensor) for one in tensors.values()):
            return {**state, "_storage": {name: _held_rows(one, length) for name, one in tensors.items()}}
    return {name: held_state(value) for name, value in state.items()}


def _held_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    if not tensor.dim() or not 0 < count < len(tensor) or tensor.device.type != "cpu":
        return tensor.clone()
    held = torch.empty_like(tensor)  # untouched pages take no memory
    held[:count] = tensor[:count]
    return held


def load_members(members: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Load the states of the members of an ensemble; on failure, all members keep their previous states.

    Raises:
        SchemaError: a state does not fit, or the number of members differs.
    """
    require_members(state, len(members))
    with all_or_none() as load:
        for number, member in enumerate(members):
            load(member, partial(member.load_state_dict, state[str(number)]))


class IndexPart:
    """The rows of one member in an ensemble's index."""

    __slots__ = ("numbers", "sources")

    def __init__(self, numbers: torch.Tensor, sources: torch.Tensor | None) -> None:
        self.numbers = numbers
        self.sources = sources

    @property
    def rows(self) -> Any:
        """The index in the form that storages take: int64 `[n]`, or a tuple with one such tensor for each dimension."""
        if self.numbers.dim() == 1:
            return self.numbers
        known = [part for part in self.numbers.unbind(-1) if not bool((part < 0).all())]
        return known[0] if len(known) == 1 else tuple(known)


def split_index(index: Any) -> Iterator[tuple[int, IndexPart]]:
    """Yield the members that an index selects, and their rows.

    Args:
        index: `"buffer_ids"` is int64 `[k]` with `"index"` `[k, n]`; or both are `[k, n]`, as in a batch; or both are
            `[n]` with the rows of a member together. The last dimension of `"index"` holds coordinates for storages of
            several dimensions.

    Raises:
        SchemaError: the index has another form.
    """
    ids, numbers, sources = index.get(BUFFER_IDS), index.get(INDEX), index.get(SOURCE_ID, None)
    if ids.dim() == 1 and (numbers.is_nested or numbers.dim() > 1) and not _flat(index, ids, numbers):
        origins = [None] * len(ids) if sources is None else sources.unbind()
        for member, rows, origin in zip(ids.tolist(), numbers.unbind(), origins, strict=True):
            yield member, IndexPart(rows, origin)
        return
    if ids.dim() == 2:
        for place, row in enumerate(ids):
            if len(row) and not bool((row == row[0]).all()):
                raise SchemaError(f"part {place} of the index has several members, expected one")
            if len(row):
                yield int(row[0]), IndexPart(numbers[place], None if sources is None else sources[place])
        return
    if ids.dim() != 1 or len(ids) != len(numbers):
        raise SchemaError(f"buffer_ids are {list(ids.shape)} for an index {list(numbers.shape)}")
    ends = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    start = 0
    for stop in [*ends.tolist(), len(ids)]:
        if stop > start:
            part = slice(start, stop)
            yield int(ids[start]), IndexPart(numbers[part], None if sources is None else sources[part])
        start = stop


def _flat(index: Any, ids: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Whether `numbers` are coordinates `[n, ndim]` of single elements, each with a source."""
    sources = index.get(SOURCE_ID, None)
    return sources is not None and not numbers.is_nested and sources.shape == ids.shape


# The compiled loops are imported after this many batches: for fewer ones, the import takes longer than it saves.
_PATIENCE = 50

_IS_ODD = (1).__and__
_ADDRESS = torch.Tensor.data_ptr


class Parts:
    """How a batch is divided into parts with rows of one storage each. The object is immutable.

    The first part has rows of the storage `members[0]` and ends at `stops[0]`, and so on; both are int64 `[parts]`.
    """

    def __init__(self, counts: Sequence[tuple[int, int]]) -> None:
        self.listed = [member for member, _ in counts]
        self.members = np.array(self.listed, np.int64)
        self.stops = np.cumsum([count for _, count in counts], dtype=np.int64)
        self.size = int(self.stops[-1])
        self._labels: tuple[Numbers, Numbers, Numbers] | None = None

    @cached_property
    def memory(self) -> Numbers:
        """Memory for the numbers of the rows of a batch, int64 `[size]`, which is used for one batch after another."""
        return np.empty(self.size, np.int64)

    @cached_property
    def pieces(self) -> list[torch.Tensor]:
        """A view of `memory` for each part."""
        return [from_numpy(self.memory[part]) for _, part in self]

    @property
    def equal(self) -> bool:
        """Whether all parts have the same number of rows."""
        return len(set(np.diff(self.stops, prepend=0).tolist())) == 1

    def labels(self, sources: Numbers) -> tuple[Numbers, Numbers]:
        """Return the member and the source of each row, int64 `[size]` in fresh memory.

        `sources` has the source of each member.
        """
        if self._labels is None or self._labels[0] is not sources:
            counts = np.diff(self.stops, prepend=0)
            self._labels = sources, np.repeat(self.members, counts), np.repeat(sources[self.members], counts)
        _, ids, numbers = self._labels
        return ids.copy(), numbers.copy()

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield for each part the number of its storage, and the slice of the batch with its rows."""
        start = 0
        for member, stop in zip(self.listed, self.stops.tolist(), strict=True):
            yield member, slice(start, stop)
            start = stop

    def __len__(self) -> int:
        return len(self.listed)


class MemberRows(NamedTuple):
    """Numbers of rows in several storages, int64 `[n]`, and the parts that say in which storage each row is."""

    parts: Parts
    numbers: Numbers


class Guarding(Protocol):
    """Reads rows of several storages consistently, as the guards of buffers do."""

    def sequences(self, numbers: Sequence[int]) -> list[int]:
        """Return a count for each storage that is odd during a write and different after it: a seqlock."""

    def read(self, number: int, get: Callable[[Any], Any], index: Any) -> Any:
        """Return `get(index)` of a storage; call it again if a writer has changed the rows meanwhile."""


class _Plan:
    """How batches are gathered from storages with the same columns: which columns, their addresses, and the memory.

    All columns except `"index"` are gathered; labels take the place of that entry. Several threads use a plan. When
    storages are exchanged, initialized or moved, a new plan is made.
    """

    def __init__(self, storages: Sequence[Storage], source_key: str | None) -> None:
        self.storages: Sequence[Any] = storages
        self.columns = [_columns_of(storage) for storage in storages]
        self._addresses = [[] if columns is None else columns.addresses() for columns in self.columns]
        self._watched = [leaf for columns in self.columns if columns is not None for leaf in columns.plain]
        self._watched_at = [place for addresses in self._addresses for place in addresses]
        self.orders: list[list[int] | None] = [None] * len(storages)
        """For each storage, the columns to gather in the order of the batch; None for a storage that differs."""
        self.capacities = [0 if columns is None else columns.lead[0] for columns in self.columns]
        self.expecting = any(getattr(storage, "expects_rows", False) for storage in storages)
        """Whether `expect` of some storage has to be called before rows are read."""
        self._memory: tuple[Any, BatchPool] = (None, BatchPool([], []))
        self._lengths: tuple[list[int], Numbers] = ([], np.zeros(0, np.int64))
        leaves: dict[Path, Any] = {}
        for member, (storage, columns) in enumerate(zip(storages, self.columns, strict=True)):
            if not isinstance(storage, TensorStorage) or columns is None or not columns.gathers_into:
                continue
            if not is_plain(storage.structure) or source_key in storage.structure.children:
                continue
            found = _leaves_of(storage)
            if not leaves:
                leaves = found
                self._take(storage, columns, source_key)
            if leaves == found:
                paths = list(found)
                self.orders[member] = order = [paths.index(path) for path in self._kept]
                self.places[member] = [self._addresses[member][number] for number in order]
        self.partial = None in self.orders
        """Whether some storage has other columns."""

    def _take(self, storage: TensorStorage, columns: Columns, source_key: str | None) -> None:
        """Use the columns of this storage, and labels, as the entries of batches."""
        paths = list(storage.structure.paths())
        chosen = [number for number, path in enumerate(paths) if path[0] != INDEX]
        self._kept = [paths[number] for number in chosen]
        self.rows = [columns.leaves[number].shape[1:] for number in chosen]
        self._types = [columns.numpy_types[number] for number in chosen]
        self.widths = np.array([columns.widths[number] for number in chosen], np.int64)
        self.places = np.zeros((len(self.columns), len(chosen)), np.int64)
        dtypes = [columns.dtypes[number] for number in chosen]
        self._renamed = [(number, kind) for number, kind in enumerate(dtypes) if renames(kind)]
        children = {key: child for key, child in storage.structure.children.items() if key != INDEX}
        children[INDEX] = TensorDictNode({BUFFER_IDS: TensorNode(), INDEX: TensorNode()})
        if source_key is not None:
            children[source_key] = TensorNode()
        self._structure = TensorDictNode(children, device=getattr(storage.structure, "device", None))

    def follows(self, members: Sequence[int], storages: Sequence[Any]) -> bool:
        """Whether the plan still holds for some members: their storages are the same, and no column has moved."""
        if storages is not self.storages:
            return False
        for member in members:
            columns, storage = self.columns[member], storages[member]
            if (_columns_of(storage) if columns is None else storage.columns) is not columns:
                return False
        if 2 * len(members) > len(storages):  # comparing all addresses is faster than a call for each storage
            return list(map(_ADDRESS, self._watched)) == self._watched_at
        for member in members:
            columns = self.columns[member]
            if columns is not None and columns.addresses() is not self._addresses[member]:
                return False
        return True

    def lengths(self, members: Sequence[int]) -> Numbers:
        """Return the valid rows of some members, int64 `[n]`, up to the capacities for which the plan was made."""
        found = [min(self.storages[member].rows, self.capacities[member]) for member in members]
        known, lengths = self._lengths
        if found != known:
            lengths = np.array(found, np.int64)
            self._lengths = found, lengths
        return lengths

    def targets(self, size: torch.Size) -> tuple[list[torch.Tensor], Numbers]:
        """Return memory for the columns of a batch of this size, and its addresses."""
        known, memory = self._memory
        if known != size:
            memory = BatchPool([(*size, *row) for row in self.rows], self._types)
            self._memory = size, memory
        return memory()

    def batch(self, leaves: list[torch.Tensor], labels: Sequence[torch.Tensor], size: torch.Size) -> TensorDict:
        """Make a batch of gathered columns and labels."""
        for number, dtype in self._renamed:
            leaves[number] = leaves[number].view(dtype)
        batch: TensorDict = self._structure.unflatten(iter([*leaves, *labels]), size)
        return batch


class Gatherer:
    """Gathers batches from several storages with the same columns; the memory of a freed batch is reused.

    Batches have labels: the ensemble's index as `"index"`, and the source of each row as `source_key`, if it is given.
    """

    def __init__(self, source_key: str | None) -> None:
        self._source_key = source_key
        self._patience = _PATIENCE
        self._plan: _Plan | None = None

    def covers(self, storages: Sequence[Storage]) -> bool:
        """Return whether all these storages have the same columns, so that `gather` can make batches of their rows."""
        plan = self._plan
        if plan is None or (plan.partial and not plan.follows(range(len(storages)), storages)):
            plan = self._plan = _Plan(storages, self._source_key)
        return not plan.partial

    def gather(
        self,
        storages: Sequence[Storage],
        guards: Guarding,
        rows: MemberRows,
        labels: Sequence[torch.Tensor],
    ) -> TensorDict | None:
        """Return a batch of rows with labels, in the shape of the labels: `[n]`, or `[draws, n / draws]`.

        None if the storages differ, do not consist of plain tensors, or have an entry with the name of the source.
        """
        members, plan = rows.parts.listed, self._plan
        if plan is None or not plan.follows(members, storages):
            plan = self._plan = _Plan(storages, self._source_key)
        if plan.partial and not all(plan.orders[member] for member in members):
            return None
        size = labels[0].shape
        targets, places = plan.targets(size)
        self._fill(plan, storages, guards, rows, targets, places)
        return plan.batch(targets, labels[:2] if self._source_key is None else labels, size)

    def _fill(
        self,
        plan: _Plan,
        storages: Sequence[Any],
        guards: Guarding,
        rows: MemberRows,
        targets: Sequence[torch.Tensor],
        places: Numbers,
    ) -> None:
        """Copy rows to the targets, which are at the addresses `places`.

        The rows of each storage are read between two writes: all storages are first read in one compiled call, and if a
        writer was active meanwhile, they are read again one by one.
        """
        parts, members = rows.parts, rows.parts.listed
        if plan.expecting:
            for member, part in parts:
                storages[member].expect(rows.numbers[part])
        if self._patience:
            self._patience -= 1
        elif warm():
            before = guards.sequences(members)
            # The plan has references to the columns, so that reading is safe even if a storage is exchanged meanwhile.
            lengths = plan.lengths(members)
            done = gather_parts(plan.places, plan.widths, places, rows.numbers, parts.members, parts.stops, lengths)
            if done and guards.sequences(members) == before and not any(map(_IS_ODD, before)):
                return
        count = len(rows.numbers)
        targets = [target.view(count, *row) for target, row in zip(targets, plan.rows, strict=True)]
        for member, part in parts:
            index = from_numpy(np.ascontiguousarray(rows.numbers[part]))
            order = plan.orders[member] or []
            get = partial(_gather, storages[member], order, [target[part] for target in targets])
            guards.read(member, get, index)


def _columns_of(storage: Storage) -> Columns | None:
    """Return the columns of a one-dimensional storage; None if it has none."""
    if not isinstance(storage, TensorStorage) or storage.ndim != 1 or not storage.initialized:
        return None
    return storage.columns


def _leaves_of(storage: TensorStorage) -> dict[Path, Any]:
    """Return element type and row shape of each column, by path."""
    columns = storage.columns
    kinds = [(dtype, leaf.shape[1:]) for dtype, leaf in zip(columns.dtypes, columns.leaves, strict=True)]
    return dict(zip(storage.structure.paths(), kinds, strict=True))


def _gather(storage: TensorStorage, order: Sequence[int], targets: Sequence[torch.Tensor], index: torch.Tensor) -> None:
    storage.gather_into(index, targets, order)
