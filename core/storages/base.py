"""The contract of storages, and how data is divided into elements.

Writers usually fill a storage as a ring. With a capacity of 5, after 7 rows were written:

    row         0    1    2    3    4
    written     5th  6th  2nd  3rd  4th          counting from 0: row = number % capacity
                          ↑ cursor: the next row to be written, which holds the oldest element

`len` counts the valid rows: 0 to the highest row ever written. Rows are written without gaps, so that before the first
wrap the cursor equals `len`, and afterwards `len` stays at the capacity. A storage also has a write log, which counts
all rows ever written, so that samplers find out which rows are new (see `WriteLog`); and a writer may count how often
each row was overwritten (see `Generations`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import MissingKeyError, SchemaError, UsageError, WrongKindError, require_flags
from ..format.contracts import own_attributes, refuse_overrides
from ..format.syncing import Durable
from ..options import PathLike
from ..torchrl_classes import Rebased, counterpart, described, is_torchrl
from .columns import fill
from .cursors import are_numbers, as_index, grown_rows, known_rows, last_of_repeats, last_row, own_cursor, rows_of
from .pytree import tree_spec_of
from .write_log import Change, Counter, Generations, WriteLog

if TYPE_CHECKING:
    from .write_log import WriteJournal


_CHECKPOINTERS: dict[type[Any], Callable[[], Any]] = {}


def register_checkpointer(storage_class: type[Any], factory: Callable[[], Any]) -> None:
    """Register the default checkpointer of a class of storages and of its subclasses.

    Storages do not import checkpointers. Checkpointers register themselves when `core.checkpointers` is imported, at
    the latest when a storage is first saved or loaded.

    Args:
        storage_class: the class of storages.
        factory: makes the checkpointer.
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
"""Final methods, which also keep the write log, and the methods that a storage implements instead."""


@counterpart
class Storage(Rebased, ABC):
    """Keeps up to `max_size` elements, numbered from 0 to `len(storage) - 1`.

    `storage[i]` reads elements, `storage[i] = data` replaces them without moving the cursor, and iteration goes over
    the valid rows.

    A subclass calls `super().__init__(max_size)` and implements four methods:

    - `write_rows(rows, data)` copies `data` to `rows`. `rows` is an int, for one element without a leading dimension;
      or a slice with step 1, or int64 `[n]` without repeats, for n elements along the first dimension of `data`. Rows
      never exceed `max_size`, and new ones directly follow the last valid row. It stores all of the data, or raises
      SchemaError (a RuntimeError) and stores nothing.
    - `read_rows(rows)` returns the elements at `rows`, which are valid: an int, a slice with step 1, or int64 `[n]`.
      For int64 `[n]` it returns a copy.
    - `__len__()` returns the number of valid elements: the highest row written since the storage was empty, plus 1.
    - `clear_rows()` sets the length to 0; memory may be kept.

    The helper `length_after(rows)` returns the length after a write, and `require_like(data, like)`, of this package,
    raises the SchemaError for other keys, element types and shapes.

    The public methods `get`, `set`, `empty` and so on are final: they check indices, keep the write log from which
    samplers derive episodes, and notify attached buffers. Overriding one raises FinalMethodError (a TypeError). A
    storage of arbitrary objects sets `returns_objects`: data for several rows is then a list with one object a row,
    `read_rows` returns the stored objects, and nothing is copied.

    By default `save_state()` and `load_state(state)` read and write all rows. A subclass may also override `entry`,
    `episode_lengths`, `editable`, `put_back`, `write_cells`, `create_entries`, `flatten` and `shared`. If it changes
    rows in any other way, it has to call `mark_changed`, or `mark_replaced` if all contents are new. Storages with
    several dimensions, or with faster indexing of their own, derive from `IndexedStorage`.

    Args:
        max_size: the capacity.
        checkpointer: saves and loads this storage; default the one registered for its class.
        compilable: whether `torch.compile` may trace the methods.

    Raises:
        UsageError: (a ValueError) `max_size` is below 1.

    Names and behaviour follow TorchRL's storages.

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
    """How many leading dimensions of the data count elements."""

    returns_objects: ClassVar[bool] = False
    """Whether elements are arbitrary objects, stored and returned without a copy."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Storage), _FINAL)

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        require_flags(compilable=compilable)
        if isinstance(max_size, bool) or not isinstance(max_size, int):
            raise UsageError(f"max_size is {max_size!r}, expected a whole number")
        if max_size < 1:
            raise UsageError(f"max_size is {max_size}, expected a number from 1")
        self.max_size = max_size
        self.compilable = compilable
        self._checkpointer: Any = None
        self.checkpointer = checkpointer
        self.generator: torch.Generator | None = None
        """The generator of the buffer, for storages that need random numbers."""
        self.generations: Generations | None = None
        """How often each row was overwritten, if a writer counts it."""
        self.last_cursor: Any = None
        """The cursor of a writer's newest write; None if unknown."""
        self.numbered_by: str | None = None
        """The entry in which a writer stores the number of each row; None if there is none."""
        self.rotated: int | None = None
        """By how many rows a buffer's last load rotated a full ring; None if it was not a full ring."""
        self.journal: WriteJournal | None = None
        """Keeps the rows that a write replaces, if another process may have to undo the write."""
        self.log = WriteLog()
        """Records which rows were written and changed; samplers read it."""
        self._attached: list[Any] = []
        self._loaded_ring: tuple[bool, int | None] = (False, None)

    # What a storage implements ---------------------------------------------------------------------

    @abstractmethod
    def write_rows(self, rows: Any, data: Any) -> None:
        """Store `data` at `rows`; either all of it, or raise SchemaError (a RuntimeError) and store nothing."""

    @abstractmethod
    def read_rows(self, rows: Any) -> Any:
        """Return the elements at `rows`, which are valid: an int, a slice with step 1, or int64 `[n]`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of valid elements."""

    @abstractmethod
    def clear_rows(self) -> None:
        """Set the length to 0."""

    def save_state(self) -> dict[str, Any]:
        """Return contents and length."""
        length = len(self)
        saved = self.read_rows(slice(0, length)) if length else None
        return {"_storage": saved, "_len": length, "_capacity": self.max_size}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by what `save_state` returned; SchemaError, with nothing changed, if they do not fit."""
        saved, length, before = state["_storage"], int(state["_len"]), len(self)
        if length > self.max_size:
            raise SchemaError(f"{length} elements do not fit: this storage has room for {self.max_size}")
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
        """Return the valid elements at `index`, in any form; IndexError for elements that do not exist."""
        length = len(self)
        rows = known_rows(as_index(index, 1), length)
        if not length:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        if isinstance(rows, torch.Tensor) and rows.dim() != 1:
            return unflattened(self.read_rows(rows.reshape(-1)), rows.shape)
        return self.read_rows(rows)

    def read_into(self, out: Any, index: Any, added: Mapping[Any, torch.Tensor]) -> Any:
        """Copy the valid elements at `index`, and additional entries, to `out` and return it; see `get`."""
        rows = self.read_at(index)
        for key, value in added.items():
            rows.set(key, value)
        return fill(out, rows, self.may_hold)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with elements; elements that are arbitrary objects are not searched."""
        return False

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write all of `data` at `cursor`, in any form, or nothing; return the rows that were written."""
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
        """Return the length of the storage once `rows`, as `write_rows` gets them, are written."""
        length = len(self)
        if isinstance(rows, int):
            return max(length, rows + 1)
        return max(length, rows.stop if isinstance(rows, slice) else int(rows.max()) + 1)

    # Reading and writing ---------------------------------------------------------------------------

    @final
    def get(self, index: Any = None, out: Any = None, *, indices: Any = None, item: Any = None) -> Any:
        """Read the valid elements at `index`.

        Args:
            index: an int, a slice, a list, a mask, an array or a tensor.
            out: the result of an earlier call, into whose memory the elements are copied.
            indices, item: the index, under the names that it has in some of TorchRL's storages.

        Raises:
            IndexError: an element does not exist.
            SchemaError: (a RuntimeError) `out` does not fit; nothing is changed.
        """
        if index is None:
            index = item if indices is None else indices
        if out is not None:
            return self.read_into(out, index, {})
        if (type(index) is not torch.Tensor or not index.dim()) and not are_numbers(index):  # it may return a view
            self.log.lend()
        return self.read_at(index)

    @final
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write `data` at `cursor`. If this fails, nothing is changed.

        The length grows to the highest row written. If a row occurs twice, the later one of its elements is stored.

        Args:
            cursor: the rows, in any form of index.
            data: the elements.
            set_cursor: whether this is the newest data, such as a writer's; False if existing elements are replaced.

        Raises:
            SchemaError: (a RuntimeError) rows are beyond the capacity, or would leave a gap; or the data does not fit.
        """
        rows = self.write_at(cursor, data, set_cursor=set_cursor)
        try:
            if not set_cursor:
                self.log.changed(Change(rows))
            else:
                # A slice may end beyond the capacity; `rows` are the rows that it has written.
                clipped = isinstance(cursor, slice) and last_row(cursor) is not None
                self.last_cursor = rows if clipped else own_cursor(cursor)
                self.log.wrote(rows, self.capacity_rows)
        except BaseException:  # an interrupt, after the rows were written
            self.log.changed()
            raise

    @final
    def empty(self) -> None:
        """Remove all elements; SchemaError (a RuntimeError) for a storage that is read-only."""
        self.clear_rows()
        self.mark_replaced(0)

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return contents and length; tensors are references."""
        self.log.lend()
        return self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace contents and length by what `state_dict` returned."""
        seen = self.log.now
        self.load_state(state_dict)
        if self.log.now == seen:
            self.mark_replaced(self.shape[0] % self.capacity_rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(len={len(self)}, max_size={self.max_size})"

    @property
    def has_rows(self) -> bool:
        """Whether there is at least one element; storages of unknown length override it."""
        return len(self) > 0

    @property
    def capacity_rows(self) -> int:
        """How many rows fit along dimension 0."""
        return self.max_size

    @property
    def shape(self) -> torch.Size:
        """The number of valid rows, followed by the other dimensions that count elements."""
        return torch.Size([len(self)])

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows and the same length."""
        return False

    def flatten(self) -> Storage:
        """Return a one-dimensional storage of the valid elements; by default the storage itself."""
        return self

    def contains(self, item: Any) -> Any:
        """Return whether elements are valid: a bool for an int, a bool tensor for a tensor of indices.

        If `ndim` is above 1, the last dimension of a tensor holds the coordinates of each element.
        """
        if not isinstance(item, torch.Tensor):
            return 0 <= int(item) < self.shape[0]
        inside = (item >= 0) & (item < torch.tensor(self.shape if self.ndim > 1 else self.shape[0], device=item.device))
        return inside.all(-1) if self.ndim > 1 else inside

    # Entries ---------------------------------------------------------------------------------------

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one entry of the elements at `index`, a slice or a tensor; None if some of them do not have it.

        Raises:
            SchemaError: (a RuntimeError) elements are not tensordicts.
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

    @property
    def entry_keys(self) -> Sequence[tuple[str, ...]] | None:
        """The entries that all elements have, if each can be read by itself; None if elements are read whole."""
        return None

    def read_entries(self, keys: Sequence[tuple[str, ...]], index: Any) -> list[torch.Tensor | None]:
        """Read several of `entry_keys`; see `entry`."""
        return [self.entry(key, index) for key in keys]

    def lacks_dimensions(self, data: Any) -> bool:
        """Whether data has fewer dimensions than all elements together."""
        return False

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data repeated for each element at `index`, if it lacks leading dimensions; otherwise unchanged.

        As in assignments to tensordicts, the dimensions of the data are compared with the last ones that `index`
        selects, and the missing leading ones are added. Dimensions of size 1 are not expanded.
        """
        return data

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all valid elements as a tensor to edit, which is then passed to `put_back`.

        Raises:
            SchemaError: elements of this storage cannot be edited.
            MissingKeyError: the entry does not exist.
        """
        raise SchemaError(f"entries of a {type(self).__name__} cannot be edited")

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Write back what `editable` returned, after edits at `index`; does nothing if it was a view."""

    @final
    def add_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, with values for all valid elements; MissingKeyError if the storage cannot take new entries."""
        self.create_entries(values)
        self.log.changed(Change(keys=tuple(values)))

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, with values for all valid elements; the default raises MissingKeyError."""
        name = ".".join(next(iter(values)))
        raise MissingKeyError(f"a {type(self).__name__} cannot take the new entry {name!r}")

    @final
    def set_cells(self, index: Any, data: Any, *, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions of what `get(slice(None))` returns.

        Args:
            index: the index, whose parts count the dimensions of the user's data.
            data: the values, repeated along leading dimensions that they lack.
            dim: the dimension of the user's data that the storage keeps as dimension 0.
            label: an entry whose stored values remain if `data` does not have it.

        Raises:
            IndexError: an element does not exist.
            SchemaError: keys, types or shapes differ. Nothing is changed.
        """
        try:
            self.write_cells(index, data, dim, label)
        finally:
            self.log.changed()  # also after an interrupt in the middle of the write
        if self._attached:
            self.notify(self.elements_of_cells(index, dim))

    def write_cells(self, index: Any, data: Any, dim: int = 0, label: str | None = None) -> None:
        """Implement `set_cells`; the default, for storages of one dimension, raises IndexError."""
        count = len(index) if isinstance(index, tuple) else 1
        raise IndexError(f"{count} coordinates given, the storage has 1 dimension")

    def elements_of_cells(self, index: Any, dim: int) -> Any:
        """Return the index of the elements affected by a write at such an index."""
        return slice(None)

    def episode_lengths(self) -> NDArray[np.int64] | None:
        """Return the lengths of the episodes whose steps are the rows, in order; None if unknown.

        Further rows belong to an unfinished episode.
        """
        return None

    # Book-keeping --------------------------------------------------------------------------------

    @final
    def mark_changed(self, change: Change | None = None) -> None:
        """Report a change that no method of this class has made, such as an in-place edit of what `get` returned.

        Args:
            change: the rows and entries that changed; None if anything may have.
        """
        self.log.changed(change)

    @final
    def mark_replaced(self, next_row: int, last_cursor: Any = None) -> None:
        """Report that all contents were replaced. The ring continues at `next_row`, unless a writer sets another."""
        self.last_cursor = last_cursor
        self.log.go_on_at(next_row)
        self.log.changed()

    @final
    def notify(self, index: Any) -> None:
        """Call `mark_update` of the attached buffers, because the elements at `index` were written."""
        for buffer in self._attached:
            buffer.mark_update(index)

    # Writes of processes that were killed ----------------------------------------------------------

    @property
    def counters(self) -> list[Counter]:
        """The counters that every write changes, in shared memory."""
        return self.log.counters

    def keep(self, rows: slice | torch.Tensor, key: tuple[str, ...] | None = None) -> None:
        """Keep the old contents of rows, or of one of their entries, in the journal, if there is one.

        Called before these rows are replaced in place.
        """

    def undo(self) -> None:
        """Undo the write of a killed process, from the journal."""

    # Full rings ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading_ring(self, next_row: int | None) -> Iterator[None]:
        """Load a ring inside the context; `next_row` is the row to be written next, None if unknown.

        If a full ring is loaded into a larger storage, its rows are rotated into the order of time, so that a writer
        can continue behind them; `rotated` is then the number of rows by which they were rotated. Loads outside of this
        context keep every row at its place.

            saved, capacity 5         d   e   a   b   c                 next_row 2: the oldest element is in row 2
            loaded, capacity 8        a   b   c   d   e   _   _   _     rotated by 2; the next row is 5
        """
        self.rotated, self._loaded_ring = None, (True, next_row)
        try:
            yield
        finally:
            self._loaded_ring = (False, None)

    def rotation_of(self, rows: int, room: int, capacity: int | None, last_row: int | None) -> int:
        """Return which of the loaded rows has to become row 0, and store it as `rotated`.

        Args:
            rows: how many rows are loaded.
            room: how many rows fit into this storage.
            capacity: the capacity of the storage that the rows come from; None if unknown.
            last_row: the row written last there; None if unknown.
        """
        ring, next_row = self._loaded_ring
        next_row = next_row if last_row is None else last_row + 1
        full = next_row is not None and (next_row < rows if capacity is None else rows == capacity)
        self.rotated = next_row % rows if next_row is not None and ring and full and 0 < rows < room else None
        return self.rotated or 0

    # Buffers ---------------------------------------------------------------------------------------

    @final
    def attach(self, buffer: Any) -> None:
        """Call `mark_update(index)` of `buffer` whenever elements are written."""
        if not any(buffer is known for known in self._attached):
            self._attached.append(buffer)

    @final
    def detach(self, buffer: Any) -> None:
        """Undo `attach`."""
        self._attached = [known for known in self._attached if known is not buffer]

    # Saving ----------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Any:
        """The object that saves and loads this storage. Setting None restores the default of its class."""
        if self._checkpointer is None:
            self._checkpointer = _checkpointer_for(type(self))
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        if is_torchrl(checkpointer):
            raise WrongKindError(f"checkpointer is {described(checkpointer, 'a checkpointer')}")
        self._checkpointer = checkpointer

    def dumps(self, path: PathLike, *, durable: Durable = "full") -> None:
        """Write a checkpoint to the folder `path` with the storage's checkpointer.

        `durable` is explained at `ReplayBuffer.dumps`; checkpointers written for TorchRL only support `"full"`.
        """
        if durable == "full":
            self.checkpointer.dumps(self, path)
        else:
            self.checkpointer.dumps(self, path, durable=durable)

    def loads(self, path: PathLike, *, verify: bool = False) -> None:
        """Load the checkpoint in the folder `path`.

        With `verify`, rows that are only mapped are read completely and compared with their digests.
        """
        require_flags(verify=verify)
        options = {"verify": True} if verify and getattr(self.checkpointer, "verifies_on_request", False) else {}
        self.checkpointer.loads(self, path, **options)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, path=...)` whenever the checkpointer saves rows; its result is written in their place."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, out=...)` whenever the checkpointer loads rows; its result is loaded in their place."""
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
        if isinstance(index, torch.Tensor) and index.dim() > 1:  # for a buffer, a matrix consists of coordinates
            index = index.nonzero() if index.dtype == torch.bool else index.reshape(-1)
        self.notify(index)

    @final
    def __iter__(self) -> Iterator[Any]:
        return (self.get(row) for row in range(self.shape[0]))

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a plain copy may share the tensors, but counts its own writes
            self.log.lend()
        # A copy is not attached to a buffer, and does not share the generator.
        return self.__dict__ | {"_attached": [], "generator": None, "journal": None}


class IndexedStorage(Storage):
    """A storage that handles all forms of indices itself, because it has several dimensions or reads them faster.

    It implements `read_at` and `write_at` instead of `read_rows` and `write_rows`, with the help of `as_index`,
    `rows_of`, `grown_rows` and `last_of_repeats`.
    """

    @abstractmethod
    def read_at(self, index: Any) -> Any:
        """Return the valid elements at `index`, in any form; IndexError for elements that do not exist."""

    @abstractmethod
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write all of `data` at `cursor`, in any form, or nothing.

        If a row occurs twice, the later one of its elements is stored.

        Args:
            cursor: the rows.
            data: the elements.
            set_cursor: False if existing elements are replaced.

        Returns:
            The rows written, in their order, from which samplers derive episodes: a slice with step 1, or int64 `[n]`.
            None if only parts of rows were written.
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
        f"there is no default checkpointer for a {storage_class.__name__}",
        hint="create the storage with a checkpointer",
    )


# Elements of data ----------------------------------------------------------------------------------


class NoRowsError(SchemaError, TypeError):
    """Data for several rows has a type that cannot be divided into rows."""


def elements_of(data: Any, count: int, *, as_list: bool) -> Any:
    """Return data with `count` elements along its first dimension, or in a list with `as_list`.

    A list of tensors or tensordicts, one for each element, is stacked.

    Raises:
        SchemaError: the number of elements is another one.
        NoRowsError: (also a TypeError) the data has no rows.
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
    """Divide data for several rows into one object a row; NoRowsError if it has no rows."""
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
        "tensor or tensordict with one object for each row"
    )


def rows_without_repeats(rows: slice | torch.Tensor, elements: Any) -> tuple[slice | torch.Tensor, Any]:
    """Return rows and elements, without each element whose row occurs again later."""
    if isinstance(rows, slice) or (kept := last_of_repeats(rows)) is None:
        return rows, elements
    return rows[kept], taken(elements, kept)


def taken(elements: Any, places: torch.Tensor) -> Any:
    """Return the elements at these places, int64 `[n]`; a list if elements are a list."""
    if isinstance(elements, list):
        return [elements[place] for place in places.tolist()]
    return _mapped(elements, lambda leaf: leaf[places])


def unflattened(elements: Any, shape: torch.Size) -> Any:
    """Reshape the first dimension of elements to this shape."""
    if isinstance(elements, list):
        raise IndexError(f"rows are selected by a vector, found an index of shape {list(shape)}")
    return _mapped(elements, lambda leaf: leaf.reshape((*shape, *leaf.shape[1:])))


def _mapped(elements: Any, change: Any) -> Any:
    return change(elements) if _is_tensor(elements) or isinstance(elements, np.ndarray) else tree_map(change, elements)


def copied(data: Any) -> Any:
    """Return a bit-for-bit copy of a tensor, a tensordict or a tensorclass."""
    # A tensordict with a device clones its leaves by adding 0, which turns -0.0 into 0.0 and changes the bits of NaN.
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
        raise SchemaError(f"the elements differ: {error}".splitlines()[0]) from error


def require_like(data: Any, like: Any) -> None:
    """Raise SchemaError unless `data` has the keys, element types and shapes of `like`."""
    structure = tree_spec_of(like)
    for path, found, expected in zip(structure.paths(), structure.flatten(data), structure.flatten(like), strict=True):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            name = ".".join(path) or "the tensor"
            raise SchemaError(
                f"{name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
