"""Several storages as one: the rows of a member are those of its own storage."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from ..errors import SchemaError, UsageError
from .base import Storage

BUFFER_IDS, INDEX, SOURCE_ID = "buffer_ids", "index", "source_id"

Drawn: TypeAlias = list[tuple[int, Any]]
"""Rows with the number of their member."""

LoadPart: TypeAlias = Callable[[Any, Callable[[], Any]], None]
"""Loads a part, as `all_or_none` has it: the part, and what loads it."""


class EnsembleKindError(UsageError, TypeError):
    """A member or an index of an ensemble is of the wrong type."""


class EnsembleWriteError(SchemaError, TypeError):
    """An ensemble was written to: only its members can be."""


def refuse_write(ensemble: Any) -> NoReturn:
    """Raise EnsembleWriteError (a RuntimeError and a TypeError)."""
    raise EnsembleWriteError(
        f"a {type(ensemble).__name__} cannot be written to, only its members can",
        hint="write to a member: rb[0].extend(…)",
    )


def checked_members(name: str, members: Sequence[Any], kind: type[Any]) -> tuple[Any, ...]:
    """Return the members; UsageError if there are none, EnsembleKindError (a TypeError) for another type."""
    if not members:
        raise UsageError(f"a {name} has no members, expected at least one")
    for number, member in enumerate(members):
        if not isinstance(member, kind):
            raise EnsembleKindError(f"member {number} is a {type(member).__name__}, expected a {kind.__name__}")
    return tuple(members)


def chosen_members(index: Any, count: int) -> int | list[int]:
    """Return the number of a member, or the numbers of several, that `index` names among `count`.

    An int names one; a slice, a list, a range and a vector of ints or of bools name several. IndexError for members
    that do not exist, EnsembleKindError (a TypeError) for floats, strings and other types, SchemaError (a
    RuntimeError) for a tensor of several dimensions.
    """
    if isinstance(index, torch.Tensor | np.ndarray):
        if index.ndim > 1:
            raise SchemaError(f"members are named by a vector of numbers, found {index.ndim} dimensions")
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
        raise EnsembleKindError(f"members are named by ints, found a {type(index).__name__}: {index!r}")
    if not -count <= index < count:
        raise IndexError(f"member is {index}, expected one of {count} members")
    return index % count


class _Nesting(NamedTuple):
    """The leaves of an ensemble, the number of the first one of each member, and whether a member is an ensemble."""

    members: tuple[Storage, ...]
    leaves: list[Storage]
    sources: NDArray[np.int64]
    nested: bool


class StorageEnsemble(Storage):
    """The storages of an ensemble, and the transforms of their rows.

    `len` counts the members. `storage[i]` is a member, `storage[1:]` an ensemble of some, `storage[:, rows]` a list of
    these rows of each, without transforms. `get(index)` of a tensordict with `"buffer_ids"` and `"index"`, as a
    `SamplerEnsemble` makes it, returns a list of pairs `(member, rows)`, rows after the transform of their member.

    `transforms` are one callable or None for each member: EnsembleKindError (a TypeError) for another number. Writes
    raise EnsembleWriteError (a RuntimeError). Members can be ensembles. Names are those of TorchRL.

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
        """How many elements each member has."""
        if not self._nesting.nested:
            return list(map(len, self.members))
        return [sum(one.sizes) if isinstance(one, StorageEnsemble) else len(one) for one in self.members]

    @property
    def leaves(self) -> list[Storage]:
        """The storages that hold rows, in order; those of members that are ensembles, in their place."""
        return self._nesting.leaves

    @property
    def sources(self) -> NDArray[np.int64]:
        """The number of the first leaf of each member among `leaves`, int64 `[members]`."""
        return self._nesting.sources

    @property
    def _nesting(self) -> _Nesting:
        known = self._known
        if known is None or known.members is not self.members or known.nested:  # there, leaves may be exchanged
            parts = [one.leaves if isinstance(one, StorageEnsemble) else [one] for one in self.members]
            nested = any(isinstance(one, StorageEnsemble) for one in self.members)
            starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            known = self._known = _Nesting(self.members, [leaf for part in parts for leaf in part], starts, nested)
        return known

    def members_of(self, sources: torch.Tensor) -> torch.Tensor:
        """Return the member that each leaf, by number, is in or is."""
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
        """Return a member, an ensemble of some, or rows; see the class."""
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
            raise SchemaError(f"member {member} is an ensemble, and the index has no source_id of its rows")
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

    def extend(self, data: Any) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    add = extend

    def _refuse_hook(self, hook: Callable[..., Any]) -> NoReturn:
        raise UsageError("an ensemble has no rows of its own that hooks change", hint="register them on its members")

    register_save_hook = register_load_hook = _refuse_hook

    def clear_rows(self) -> None:
        """Remove the elements of all members."""
        for member in self.members:
            member.empty()

    def save_state(self) -> dict[str, Any]:
        """Return the state of each member by its number, as text."""
        return {str(number): member.state_dict() for number, member in enumerate(self.members)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of each member; if one refuses its own, all have their rows of before.

        SchemaError, with nothing changed, for the state of another number of members.
        """
        load_members(self.members, state)

    def __repr__(self) -> str:
        names = ", ".join(f"{type(one).__name__}(len={len(one)})" for one in self.members)
        return f"{type(self).__name__}(storages=({names}), transforms={self.transforms})"


def require_members(state: Mapping[str, Any], count: int) -> None:
    """Raise SchemaError unless a state has an entry for each of `count` members and no other."""
    numbers = {key for key in map(str, state) if key.isdigit()}
    if numbers != {str(number) for number in range(count)}:
        raise SchemaError(f"the state is that of {len(numbers)} members, this ensemble has {count}")


@contextlib.contextmanager
def all_or_none() -> Iterator[LoadPart]:
    """Yield `load(part, act)`, which calls `act()` to load one of several parts.

    If that or anything else inside the context fails, the parts that are loaded get their state of before: until then a
    copy of it is kept, rows included. A part that fails restores itself.
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
    """Copy a state; of tensors with room for more elements than there are, only the valid rows take memory."""
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
    held = torch.empty_like(tensor)  # a page that nothing is put into takes no memory
    held[:count] = tensor[:count]
    return held


def load_members(members: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Load the state of each of the parts of an ensemble; on failure all have their state of before.

    SchemaError, with nothing changed, for a state of another number of members.
    """
    require_members(state, len(members))
    with all_or_none() as load:
        for number, member in enumerate(members):
            load(member, partial(member.load_state_dict, state[str(number)]))


class IndexPart:
    """The rows of one member in the index of an ensemble."""

    __slots__ = ("numbers", "sources")

    def __init__(self, numbers: torch.Tensor, sources: torch.Tensor | None) -> None:
        self.numbers = numbers
        self.sources = sources

    @property
    def rows(self) -> Any:
        """The index in the form of storages: int64 `[n]`, or a tuple of one such tensor a dimension."""
        if self.numbers.dim() == 1:
            return self.numbers
        known = [part for part in self.numbers.unbind(-1) if not bool((part < 0).all())]
        return known[0] if len(known) == 1 else tuple(known)


def split_index(index: Any) -> Iterator[tuple[int, IndexPart]]:
    """Yield the members that an index names, with their rows.

    `index["buffer_ids"]` is int64 `[k]` with `index["index"]` `[k, n]`, both `[k, n]` as in a batch, or both `[n]` with
    the rows of a member together. The last dimension of `"index"` holds the coordinates of storages with several
    dimensions. SchemaError for anything else.
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
                raise SchemaError(f"draw {place} of the index names several members, expected one")
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
    """Whether rows with coordinates, `[n, ndim]`, are named one by one: then there is a source for each row."""
    sources = index.get(SOURCE_ID, None)
    return sources is not None and not numbers.is_nested and sources.shape == ids.shape
