"""The contract of a storage, and what its data is taken apart into: elements, entries, rows."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import MissingKeyError, SchemaError, UsageError, require_flags
from ..format.contracts import own_attributes, refuse_overrides
from ..format.syncing import Durable
from .columns import fill
from .cursors import are_numbers, as_index, grown_rows, known_rows, last_of_repeats, own_cursor, rows_of
from .pytree import tree_spec_of
from .write_log import Change, Counter, Generations, WriteLog

if TYPE_CHECKING:
    from .write_log import WriteJournal


_CHECKPOINTERS: dict[type[Any], Callable[[], Any]] = {}


def register_checkpointer(storage_class: type[Any], factory: Callable[[], Any]) -> None:
    """Register what makes the default checkpointer of storages of this class and of classes derived from it.

    Storages do not import checkpointers, which register when `core.checkpointers` is imported: at the latest with the
    first storage that is saved or loaded.
    """
    _CHECKPOINTERS[storage_class] = factory


_FINAL = {
    "get": "read_rows(rows)",
    "set": "write_rows(rows, data)",
    "empty": "clear_rows()",
    "state_dict": "save_state()",
    "load_state_dict": "load_state(state)",
    "set_cells": "write_cells(index, data, dim, label)",
    "add_entries": "create_entries(values)",
    "mark_changed": "write_rows(rows, data), and call mark_changed() after other changes",
    "mark_replaced": "load_state(state), and call mark_replaced() after other loads",
    "length_after": "__len__()",
    "notify": "write_rows(rows, data)",
    "attach": "write_rows(rows, data): attached buffers are notified",
    "detach": "write_rows(rows, data): attached buffers are notified",
    "__getitem__": "read_rows(rows)",
    "__setitem__": "write_rows(rows, data)",
    "__iter__": "read_rows(rows)",
}
"""Methods that do the book-keeping, and what a storage implements instead."""


class Storage(ABC):
    """Keeps up to `max_size` elements under the numbers 0 to `len(storage) - 1`.

    `storage[i]` reads, `storage[i] = data` writes without moving the last cursor, iteration goes over the valid
    rows. `checkpointer` saves and loads this storage; None takes the one that belongs to its class. `compilable`
    promises that `torch.compile` may trace the methods. A `max_size` below 1 raises UsageError.

    A storage of your own calls `super().__init__(max_size)` and implements four methods. The public methods `get`,
    `set`, `empty`, … are final: they check indices, keep the write log from which samplers derive episodes, the last
    cursor, and notify attached buffers. A class that overrides one of them raises FinalMethodError (a TypeError).

    - `write_rows(rows, data)` stores `data` and copies it. `rows` is an int for one element, which has no leading
      dimension; else a slice with step 1, or int64 `[n]` without repeats, and `data` has n elements along its first
      dimension. Rows are never beyond `max_size`, and never leave a gap: the new ones follow the last valid row. The
      method stores all of the data, or raises SchemaError (a RuntimeError) and stores nothing.
    - `read_rows(rows)` returns the elements of `rows`: an int, a slice with step 1, or int64 `[n]`, all of them valid.
      Of int64 `[n]` it returns a copy.
    - `__len__()` counts the valid elements: the highest row that was written since the storage was empty, plus 1.
    - `clear_rows()` sets the length to 0. Memory can be kept.

    `length_after(rows)` gives the length after a write, and `require_like(data, like)`, of this package, raises that
    SchemaError for other keys, element types and shapes.

    A storage whose elements are any objects sets `returns_objects`: then `data` of several rows is a list with one
    object per row, `read_rows` returns the stored objects (of several rows a list), and nothing is copied.

    Optional are `save_state()` and `load_state(state)`, which by default read and write all rows, and what only some
    storages can do: `entry`, `episode_lengths`, `editable`, `put_back`, `write_cells`, `create_entries`, `flatten`,
    `shared`. A storage that changes rows in any other way than these reports it with `mark_changed` or, where all
    contents are new, with `mark_replaced`. Storages with several dimensions, and storages that index faster than
    this class, derive from `IndexedStorage`. Ideas and names are those of TorchRL's storages.

    >>> from rbtool.core.storages import require_like
    >>> class NumberStorage(Storage):
    ...     def __init__(self, max_size: int) -> None:
    ...         super().__init__(max_size)
    ...         self.values, self.length = torch.zeros(max_size), 0
    ...
    ...     def __len__(self) -> int:
    ...         return self.length
    ...
    ...     def read_rows(self, rows):
    ...         return self.values[rows]
    ...
    ...     def write_rows(self, rows, data):
    ...         require_like(data, self.values[rows])
    ...         self.values[rows] = data
    ...         self.length = self.length_after(rows)
    ...
    ...     def clear_rows(self):
    ...         self.length = 0
    >>> storage = NumberStorage(5)
    >>> storage.set(range(3), torch.tensor([1.0, 2.0, 3.0]))
    >>> storage[-1], storage[[0, 2]], len(storage)
    (tensor(3.), tensor([1., 3.]), 3)
    """

    ndim = 1
    """Leading dimensions of the data that count elements."""

    returns_objects: ClassVar[bool] = False
    """Whether elements are objects that are stored and returned as they are, without a copy."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Storage), _FINAL)

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        require_flags(compilable=compilable)
        if isinstance(max_size, bool) or not isinstance(max_size, int):
            raise UsageError(f"a storage's max_size is a whole number, found {max_size!r}")
        if max_size < 1:
            raise UsageError(f"max_size is {max_size}, expected a number from 1")
        self.max_size = max_size
        self.compilable = compilable
        self._checkpointer = checkpointer
        self.generator: torch.Generator | None = None
        """The generator of the buffer, for storages that need random numbers."""
        self.generations: Generations | None = None
        """How often each row was written over, where a writer counts it."""
        self.last_cursor: Any = None
        """The cursor of the newest write of a writer; None where it is not known."""
        self.numbered_by: str | None = None
        """The entry in which a writer keeps the number of every row, where one does."""
        self.rotated: int | None = None
        """By how many rows a full ring was rotated that a buffer loaded last; None where it is no ring, or not full."""
        self.journal: WriteJournal | None = None
        """Keeps what is replaced, where another process may have to undo a write."""
        self.log = WriteLog()
        """Which rows were written and changed; samplers read it."""
        self._attached: list[Any] = []
        self._loaded_ring: tuple[bool, int | None] = (False, None)

    # What a storage implements ---------------------------------------------------------------------

    @abstractmethod
    def write_rows(self, rows: Any, data: Any) -> None:
        """Store `data` at `rows` whole, or raise SchemaError (a RuntimeError) and store nothing."""

    @abstractmethod
    def read_rows(self, rows: Any) -> Any:
        """Return the elements at `rows`, which are valid: an int, a slice with step 1, or int64 `[n]`."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the valid elements."""

    @abstractmethod
    def clear_rows(self) -> None:
        """Set the length to 0."""

    def save_state(self) -> dict[str, Any]:
        """Return contents and length."""
        length = len(self)
        saved = self.read_rows(slice(0, length)) if length else None
        return {"_storage": saved, "_len": length, "_capacity": self.max_size}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace the contents with what `save_state` returned; SchemaError, with nothing changed, where it cannot."""
        saved, length, before = state["_storage"], int(state["_len"]), len(self)
        if length > self.max_size:
            raise SchemaError(f"{length} elements are to be loaded; this storage has room for {self.max_size}")
        saved = deep_copied(saved)
        rotation = self.rotation_of(length, self.max_size, state.get("_capacity"), None)
        if rotation:
            saved = taken(saved, (torch.arange(length) + rotation) % length)
        held = deep_copied(self.read_rows(slice(0, before))) if before else None
        self.clear_rows()
        try:
            if length:
                self.write_rows(slice(0, length), saved)
        except BaseException:
            self.clear_rows()
            if before:
                self.write_rows(slice(0, before), held)
            raise

    def read_at(self, index: Any) -> Any:
        """Return the valid elements at `index`, in any form; IndexError for what is not there."""
        length = len(self)
        rows = known_rows(as_index(index, 1), length)
        if not length:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        if isinstance(rows, torch.Tensor) and rows.dim() != 1:
            return unflattened(self.read_rows(rows.reshape(-1)), rows.shape)
        return self.read_rows(rows)

    def read_into(self, out: Any, index: Any, added: Mapping[Any, torch.Tensor]) -> Any:
        """Copy the valid elements at `index`, and entries added to them, to `out`, and return it; see `get`."""
        rows = self.read_at(index)
        for key, value in added.items():
            rows.set(key, value)
        return fill(out, rows, self.may_hold)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with elements; elements that are objects are not looked into."""
        return False

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write `data` at `cursor`, in any form, whole or not at all, and return the rows that were written."""
        index, valid = as_index(cursor, 1), len(self)
        single = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim())
        rows = rows_of(index, valid, self.max_size)  # type: ignore[arg-type]  # of one dimension
        grown_rows(rows, valid)
        if single:
            self.write_rows(rows.start if isinstance(rows, slice) else int(rows), data)
            return rows
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        elements = elements_of(data, count, as_list=self.returns_objects)
        if count:
            self.write_rows(*rows_without_repeats(rows, elements))
        return rows

    @final
    def length_after(self, rows: int | slice | torch.Tensor) -> int:
        """Return the length that the storage has once `rows`, as `write_rows` gets them, are written."""
        length = len(self)
        if isinstance(rows, int):
            return max(length, rows + 1)
        return max(length, rows.stop if isinstance(rows, slice) else int(rows.max()) + 1)

    # Reading and writing ---------------------------------------------------------------------------

    @final
    def get(self, index: Any, out: Any = None) -> Any:
        """Read the valid elements at `index`: an int, a slice, a list, a mask, an array, a tensor.

        They are copied to `out`, if it is given, which is what an earlier call returned: SchemaError (a RuntimeError),
        with nothing changed, if it does not fit. IndexError for elements that are not there.
        """
        if out is not None:
            return self.read_into(out, index, {})
        if (type(index) is not torch.Tensor or not index.dim()) and not are_numbers(index):  # it may return a view
            self.log.lend()
        return self.read_at(index)

    @final
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write `data` at `cursor`, later elements over earlier ones; nothing changes if it cannot be written whole.

        `set_cursor` remembers `cursor` as the place of the newest data. The length grows up to the highest row
        written. SchemaError (a RuntimeError) for a write beyond the capacity, and for one that leaves a gap below it.
        """
        rows = self.write_at(cursor, data, set_cursor=set_cursor)
        try:
            if not set_cursor:
                self.log.changed(Change(rows))
            else:
                self.last_cursor = own_cursor(cursor)
                self.log.wrote(rows, self.capacity_rows)
        except BaseException:  # an interrupt: the rows are written
            self.log.changed()
            raise

    @final
    def empty(self) -> None:
        """Remove all elements; SchemaError (a RuntimeError) for a storage that cannot be written."""
        self.clear_rows()
        self.mark_replaced(0)

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return contents and length, by reference."""
        self.log.lend()
        return self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace contents and length with what `state_dict` returned."""
        seen = self.log.now
        self.load_state(state_dict)
        if self.log.now == seen:
            self.mark_replaced(self.shape[0] % self.capacity_rows)

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to draw; a storage whose length is not known states it here."""
        return len(self) > 0

    @property
    def capacity_rows(self) -> int:
        """How many rows there is room for, along dimension 0."""
        return self.max_size

    @property
    def shape(self) -> torch.Size:
        """Valid rows, then the other dimensions that count elements."""
        return torch.Size([len(self)])

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows and the same length."""
        return False

    def flatten(self) -> Storage:
        """Return a one-dimensional storage of the valid elements; here it is the storage itself."""
        return self

    def contains(self, item: Any) -> Any:
        """Return whether an element is valid: a bool for an int, a bool tensor for a tensor of indices.

        Where `ndim` is more than 1, the last dimension of a tensor holds the coordinates of each element.
        """
        if not isinstance(item, torch.Tensor):
            return 0 <= int(item) < self.shape[0]
        inside = (item >= 0) & (item < torch.tensor(self.shape if self.ndim > 1 else self.shape[0], device=item.device))
        return inside.all(-1) if self.ndim > 1 else inside

    # Entries ---------------------------------------------------------------------------------------

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one entry of the elements at `index`, a slice or a tensor; None where some of them have none.

        SchemaError (a RuntimeError) for elements that are no tensordicts.
        """
        rows = self.read_at(index)
        parts = rows if isinstance(rows, list) else [rows]
        if not all(is_tensor_collection(part) for part in parts):
            kind = next(type(part).__name__ for part in parts if not is_tensor_collection(part))
            raise SchemaError(f"the storage holds a {kind}, expected tensordicts with the entry")
        found = [part.get(key, None) for part in parts]
        if not found or not all(isinstance(part, torch.Tensor) for part in found):
            return None
        return torch.stack(found) if isinstance(rows, list) else found[0]

    def lacks_dimensions(self, data: Any) -> bool:
        """Whether data has fewer dimensions than all elements together."""
        return False

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data for each element at `index`, if `data` lacks dimensions of it; anything else as it is.

        The rule is that of tensordicts: the dimensions that data has are the last ones that `index` selects. A
        dimension of size 1 is not repeated.
        """
        return data

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all valid elements in a tensor to edit, which is then to be given to `put_back`.

        SchemaError for a storage whose elements cannot be edited, MissingKeyError for an entry that is not there.
        """
        raise SchemaError(f"entries of a {type(self).__name__} cannot be edited")

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Write what `editable` returned, and was edited at `index`; nothing is to do for views of what is stored."""

    @final
    def add_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all valid elements; MissingKeyError for a storage that cannot take new ones."""
        self.create_entries(values)
        self.log.changed(Change(keys=tuple(values)))

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all valid elements, or raise MissingKeyError."""
        name = ".".join(next(iter(values)))
        raise MissingKeyError(f"{name!r} is a new entry, expected one that this {type(self).__name__} has")

    @final
    def set_cells(self, index: Any, data: Any, *, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions of what `get(slice(None))` reads, `dim` being the first of them.

        Data is repeated along dimensions that it lacks. The entry `label`, if data lacks it, stays what it is.
        IndexError for what is not there, SchemaError for other keys, types or shapes, with nothing changed.
        """
        try:
            self.write_cells(index, data, dim, label)
        finally:
            self.log.changed()  # also where an interrupt comes in the middle
        if self._attached:
            self.notify(self.elements_of_cells(index, dim))

    def write_cells(self, index: Any, data: Any, dim: int = 0, label: str | None = None) -> None:
        """Write as `set_cells` does; IndexError for a storage that has one dimension."""
        count = len(index) if isinstance(index, tuple) else 1
        raise IndexError(f"{count} coordinates given, the storage has 1 dimension")

    def elements_of_cells(self, index: Any, dim: int) -> Any:
        """Return the index of the elements that a write at such an index concerns."""
        return slice(None)

    def episode_lengths(self) -> NDArray[np.int64] | None:
        """List the lengths of the episodes whose steps are the rows, in their order; None where that is not known.

        Rows behind them are of one that is under way.
        """
        return None

    # Book-keeping --------------------------------------------------------------------------------

    @final
    def mark_changed(self, change: Change | None = None) -> None:
        """Report a change that no method of this class makes, as an edit in place of what `get` returned by reference.

        Without a `change`, which names rows and entries, anything may have changed.
        """
        self.log.changed(change)

    @final
    def mark_replaced(self, next_row: int, last_cursor: Any = None) -> None:
        """Report that all contents were replaced. The ring continues at `next_row` unless a writer sets another."""
        self.last_cursor = last_cursor
        self.log.go_on_at(next_row)
        self.log.changed()

    @final
    def notify(self, index: Any) -> None:
        """Report to the attached buffers that the elements at `index` were written."""
        for buffer in self._attached:
            buffer.mark_update(index)

    # Writes of processes that were killed ----------------------------------------------------------

    @property
    def counters(self) -> list[Counter]:
        """The numbers in shared memory that every write changes."""
        return self.log.counters

    def keep(self, rows: slice | torch.Tensor, key: tuple[str, ...] | None = None) -> None:
        """Before rows, or an entry of them, are replaced in place: keep them in the journal, if there is one."""

    def undo(self) -> None:
        """Undo the write of a process that was killed, by the journal."""

    # Full rings ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading_ring(self, next_row: int | None) -> Iterator[None]:
        """Load a ring inside, of which `next_row` is the row that is written next; None where that is not known.

        A full ring that is loaded into a larger storage is rotated, so that its rows are in the order of time in front
        of free ones: a writer continues after them. `rotated` is then the number of rows. A storage that is loaded
        without this keeps every row where it was.
        """
        self.rotated, self._loaded_ring = None, (True, next_row)
        try:
            yield
        finally:
            self._loaded_ring = (False, None)

    def rotation_of(self, rows: int, room: int, capacity: int | None, last_row: int | None) -> int:
        """Return which row is to become row 0 of `rows` rows that are loaded into `room` rows; also in `rotated`.

        The rows are from a storage of `capacity` rows of which `last_row` was written last, None where not known.
        """
        ring, next_row = self._loaded_ring
        next_row = next_row if last_row is None else last_row + 1
        full = next_row is not None and (next_row < rows if capacity is None else rows == capacity)
        self.rotated = next_row % rows if next_row is not None and ring and full and 0 < rows < room else None
        return self.rotated or 0

    # Buffers ---------------------------------------------------------------------------------------

    @final
    def attach(self, buffer: Any) -> None:
        """Have a buffer (anything with `mark_update(index)`) notified of elements that are written by index."""
        if not any(buffer is known for known in self._attached):
            self._attached.append(buffer)

    @final
    def detach(self, buffer: Any) -> None:
        """Undo `attach`."""
        self._attached = [known for known in self._attached if known is not buffer]

    # Saving ----------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Any:
        """What saves and loads this storage. Setting None goes back to the one that belongs to its class."""
        if self._checkpointer is None:
            self._checkpointer = _checkpointer_for(type(self))
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def dumps(self, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write a checkpoint to the folder `path`, with the storage's checkpointer.

        `durable` is that of `ReplayBuffer.dumps`; checkpointers that were written for TorchRL take "full" only.
        """
        if durable == "full":
            self.checkpointer.dumps(self, path)
        else:
            self.checkpointer.dumps(self, path, durable=durable)

    def loads(self, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        """Take over what the checkpoint in the folder `path` holds.

        `verify` also compares the bytes of rows that are only mapped with their digests, and reads all of them for it.
        """
        require_flags(verify=verify)
        options = {"verify": True} if verify and getattr(self.checkpointer, "verifies_on_request", False) else {}
        self.checkpointer.loads(self, path, **options)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it is about to write through `hook(data, path=...)`."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it has read through `hook(data, out=...)`."""
        self.checkpointer.register_load_hook(hook)

    # Python's own protocols ------------------------------------------------------------------------

    def __contains__(self, item: Any) -> bool:
        found = self.contains(item)
        return bool(found.all()) if isinstance(found, torch.Tensor) else bool(found)

    @final
    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    @final
    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, self.repeated(index, data), set_cursor=False)
        if not self._attached:
            return
        if isinstance(index, list | np.ndarray):
            index = as_index(index, self.ndim)
        if isinstance(index, torch.Tensor) and index.dim() > 1:  # a buffer would take a matrix for coordinates
            index = index.nonzero() if index.dtype == torch.bool else index.reshape(-1)
        self.notify(index)

    @final
    def __iter__(self) -> Iterator[Any]:
        return (self.get(row) for row in range(self.shape[0]))

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a plain copy may have the same tensors, and has a log of its own
            self.log.lend()
        # A copy belongs to no buffer yet, and draws from no generator of this one.
        return self.__dict__ | {"_attached": [], "generator": None, "journal": None}


class IndexedStorage(Storage):
    """A storage that takes every form of index itself: one with several dimensions, or one that does so faster.

    It implements `read_at` and `write_at` in place of `read_rows` and `write_rows`; `as_index`, `rows_of`,
    `grown_rows` and `last_of_repeats` help.
    """

    @abstractmethod
    def read_at(self, index: Any) -> Any:
        """Return the valid elements at `index`, in any form; IndexError for what is not there."""

    @abstractmethod
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write `data` at `cursor`, in any form, whole or not at all; later elements go over earlier ones.

        Returns the rows that were written, in their order: a slice with step 1 or int64 `[n]`; None where only parts of
        rows were. Samplers derive episodes from them. `set_cursor` is False where existing elements are replaced.
        """

    def read_rows(self, rows: Any) -> Any:
        """Return the elements at `rows`."""
        return self.read_at(rows)

    def write_rows(self, rows: Any, data: Any) -> None:
        """Store `data` at `rows`."""
        self.write_at(rows, data)


def _checkpointer_for(storage_class: type[Any]) -> Any:
    importlib.import_module("..checkpointers", __package__)
    for ancestor in storage_class.__mro__:
        if ancestor in _CHECKPOINTERS:
            return _CHECKPOINTERS[ancestor]()
    raise UsageError(
        f"no checkpointer is known for a {storage_class.__name__}",
        hint="give the storage a checkpointer",
    )


# Elements of data ----------------------------------------------------------------------------------


class NoRowsError(SchemaError, TypeError):
    """Data for several rows is of a type that is not taken apart into rows."""


def elements_of(data: Any, count: int, *, as_list: bool) -> Any:
    """Return data of `count` elements, which lie along the first dimension, or are in a list with `as_list`.

    A list of tensors or tensordicts, one per element, is stacked. SchemaError for another number of elements, and
    NoRowsError, which is also a TypeError, for data that has none.
    """
    if as_list:
        data = objects_of(data)
        found = {len(data)}
    else:
        if isinstance(data, list) and data and all(_is_tensor(element) for element in data):
            data = _stacked(data)
        leaves = [data] if _is_tensor(data) or isinstance(data, np.ndarray) else tree_flatten(data)[0]
        if not leaves or not all(isinstance(getattr(leaf, "shape", None), tuple) and leaf.shape for leaf in leaves):
            raise NoRowsError(f"expected {count} elements, found a {type(data).__name__} that has no rows")
        found = {len(leaf) for leaf in leaves}
    if found != {count}:
        raise SchemaError(f"{' and '.join(map(str, sorted(found)))} elements given for {count} rows")
    return data


def objects_of(data: Any) -> list[Any]:
    """Take data of several rows apart into one object per row; NoRowsError for data that has no rows."""
    if isinstance(data, list | tuple | set | frozenset | range):
        return list(data)
    rows = getattr(data, "ndim", 0)
    if isinstance(data, np.ndarray) and rows:
        return list(data)
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        return list(data.tensordicts)
    if (isinstance(data, torch.Tensor | TensorDictBase) or is_tensorclass(data)) and rows:
        return list(data.unbind(0))
    raise NoRowsError(
        f"several rows cannot be written from a {type(data).__name__}, expected a list, tuple, set, range, array, "
        "tensor or tensordict of one object a row"
    )


def rows_without_repeats(rows: slice | torch.Tensor, elements: Any) -> tuple[slice | torch.Tensor, Any]:
    """Leave out the elements whose row a later one names again."""
    if isinstance(rows, slice) or (kept := last_of_repeats(rows)) is None:
        return rows, elements
    return rows[kept], taken(elements, kept)


def taken(elements: Any, places: torch.Tensor) -> Any:
    """Return the elements at these places, int64 `[n]`; a list where a list of objects was given."""
    if isinstance(elements, list):
        return [elements[place] for place in places.tolist()]
    return _mapped(elements, lambda leaf: leaf[places])


def unflattened(elements: Any, shape: torch.Size) -> Any:
    """Give elements of several rows, which lie along the first dimension, this shape in its place."""
    if isinstance(elements, list):
        raise IndexError(f"rows are named by a vector, found an index of shape {list(shape)}")
    return _mapped(elements, lambda leaf: leaf.reshape((*shape, *leaf.shape[1:])))


def _mapped(elements: Any, change: Any) -> Any:
    return change(elements) if _is_tensor(elements) or isinstance(elements, np.ndarray) else tree_map(change, elements)


def copied(data: Any) -> Any:
    """Return a copy of a tensor, a tensordict or a tensorclass, bit for bit."""
    # A tensordict that has a device adds 0 to its leaves to clone them, which makes 0.0 of -0.0 and NaN of other NaN.
    return data.clone() if isinstance(data, torch.Tensor) else data.apply(torch.clone)


def deep_copied(data: Any) -> Any:
    """Return a deep copy of any data; tensordicts in dicts, lists and tuples are copied bit for bit."""
    memo: dict[int, Any] = {}
    _copy_collections(data, memo)
    return copy.deepcopy(data, memo)


def _copy_collections(data: Any, memo: dict[int, Any]) -> None:
    if is_tensor_collection(data):
        memo[id(data)] = copied(data)
    elif isinstance(data, list | tuple | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            _copy_collections(part, memo)


def _is_tensor(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or is_tensor_collection(data)


def _stacked(elements: list[Any]) -> Any:
    try:
        return torch.stack(elements)
    except (RuntimeError, TypeError, KeyError) as error:
        raise SchemaError(f"the elements are not alike: {error}".splitlines()[0]) from error


def require_like(data: Any, like: Any) -> None:
    """Raise SchemaError unless `data` has the keys, element types and shapes of `like`."""
    structure = tree_spec_of(like)
    for path, found, expected in zip(structure.paths(), structure.flatten(data), structure.flatten(like), strict=True):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            name = ".".join(path) or "the tensor"
            raise SchemaError(
                f"{name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
