"""The contract of writers: where new rows go."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

import torch

from ..errors import SchemaError
from ..format.contracts import delegate, own_attributes, refuse_overrides
from ..storages.base import Storage
from .batches import as_batch, batch_length, capacity_rows, chosen_rows, row_numbers
from .state import Counting, counts_in, read_state, rows_in, write_state

_FINAL = {
    "empty": "reset()",
    "sync_cursor": "keeps_order",
    "resume_after": "on_register(storage)",
    "rotate": "on_rotate(row)",
    "unshare": "save_state() and load_state(state)",
}


class Writer(Counting, ABC):
    """Puts new elements into a storage and counts them.

    A writer implements `place(data, count, capacity)`, which returns the rows of a batch. One with a state of its own
    also implements `save_state`, `load_state` and `reset`. All other methods have a default:

    - `place_one(data, capacity)`: the row of a single element, where that is faster than a batch of one;
    - `prepare(data, rows)`: what is stored of the data;
    - `on_written(rows, capacity)`, `on_refused()`: called when the storage has taken or refused the data;
    - `check_storage(storage)`, `on_register(storage)`: a storage that is refused, or written to from now on;
    - `on_rotate(row)`: the rows were rotated, so that `row` is row 0;
    - `write_state(folder, state)`, `read_state(folder)`: for a file format of its own.

    `keeps_order = False` declares that rows are not written round a ring: slice samplers refuse such a writer.
    `generator` is the source of random numbers, None for torch's own. `storage`, `cursor` and `write_count` can be
    read anywhere; `on_written` and `reset` may set the counters.

    The methods that buffers call (`add`, `extend`, `register_storage`, `state_dict`, `load_state_dict`, `dumps`,
    `loads`, `empty`) do the book-keeping. A write has four steps: everything is checked; the storage takes the data,
    whole or not at all; cursor and count are updated; the buffers attached to the storage are notified of the new
    elements. So a write that fails changes nothing. The caller's data is never changed. Writers hold no locks: buffers
    do.

    Writers for TorchRL override those methods, which is supported: buffers call the override; `add` and `extend` check
    the storage and the batch before it, and notify attached buffers after it unless it has done so. Methods that
    TorchRL does not have cannot be overridden: FinalMethodError (a TypeError) names the method to implement.

    Cursor and count are 64-bit numbers in shared memory, so that forked and spawned children continue the same ring;
    with `compilable` they are local to the process. Ideas and names are those of TorchRL's writers.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> class Stack(Writer):
    ...     def place(self, data, count, capacity):
    ...         rows = self.cursor + torch.arange(count)
    ...         return rows.where(rows < capacity, -1)
    ...     def on_written(self, rows, capacity):
    ...         self.cursor = int(rows.max()) + 1
    >>> writer, storage = Stack(), TensorStorage(torch.zeros(4))
    >>> writer.register_storage(storage)
    >>> writer.extend(torch.arange(1.0, 4)), writer.extend(torch.arange(4.0, 6))
    (tensor([0, 1, 2]), tensor([ 3, -1]))
    >>> storage[:]
    tensor([1., 2., 3., 4.])
    """

    keeps_order: ClassVar[bool] = True
    """Whether rows are in the order of time, round a ring, and `cursor` is the next row."""

    writes: ClassVar[bool] = True
    """Whether anything can be written; if not, there is no state."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = own_attributes(cls, Writer)
        refuse_overrides(cls, own, _FINAL)
        for name in ("add", "extend"):
            if name in own:
                setattr(cls, name, _with_book_keeping(own[name], batch=name == "extend"))
        if "place" not in own and cls.add is not Writer.add and cls.extend is not Writer.extend:
            delegate(cls, "place")

    # What a writer implements -----------------------------------------------------------------------

    @abstractmethod
    def place(self, data: Any, count: int, capacity: int) -> torch.Tensor | range:
        """Return the rows of a batch of `count` elements; `on_refused` undoes the changes that this makes.

        Rows are int64 `[count]`, below `capacity`, and -1 for each element that is not kept; of a row that is given
        twice the last element stays. A `range` means consecutive rows, modulo the capacity. New rows are the next ones
        behind those of the storage.
        """

    def place_one(self, data: Any, capacity: int) -> int | None:
        """Return the row of an element; None for one that is not kept."""
        rows = self.place(as_batch(data), 1, capacity)
        row = rows.start % capacity if isinstance(rows, range) else int(rows[0])
        return None if row < 0 else row

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Return the data to store at these rows, without changing the caller's containers."""
        return data

    def on_written(self, rows: int | range | torch.Tensor, capacity: int) -> None:
        """Called after a write to these rows; the default moves the cursor behind the last of them."""
        last = rows if isinstance(rows, int) else int(rows[-1])
        self.cursor = (last + 1) % capacity

    def on_refused(self) -> None:
        """Undo the changes of `place`: the storage has refused the data."""

    def check_storage(self, storage: Storage) -> None:
        """Raise UsageError, with nothing changed, for a storage that this cannot write to."""

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Prepare to write to a storage, after another one or as the first."""

    def on_rotate(self, row: int) -> None:
        """Called after a full ring was loaded into a larger storage, where `row` became row 0."""

    def reset(self) -> None:
        """Forget all elements: the storage is empty, or holds others."""

    def save_state(self) -> dict[str, Any]:
        """Return the state except cursor and count: tensors, numbers, bools and None by name."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `save_state` returned; SchemaError, with nothing changed, for another writer's state.

        `state` also holds `_cursor` and `_write_count`, which are already set, and are restored on failure.
        """

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a state into a folder, which is made if it is missing."""
        write_state(folder, state)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote; DatasetNotFoundError if there is none, FormatError for an invalid one."""
        return read_state(folder)

    # Writing ----------------------------------------------------------------------------------------

    @final
    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or int64 `[k, ndim]` where the storage has several dimensions.

        None for one that is not kept. SchemaError (a RuntimeError), with nothing changed, for data that does not fit.
        """
        storage = self._writable()
        capacity = capacity_rows(storage.max_size, storage.ndim, data)
        row = self.place_one(data, capacity)
        if row is None:
            return None
        try:
            storage.set(row, self.prepare(data, row))
        except BaseException:
            self.on_refused()
            raise
        self.on_written(row, capacity)
        return self._written(row, 1)

    @final
    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch; return the indices of its elements, int64 `[n]`, or `[n * k, ndim]` of several dimensions.

        -1 for an element that is not kept. SchemaError as for `add`, and for data that is no batch.
        """
        storage = self._writable()
        count = batch_length(data)
        capacity = storage.max_size
        if storage.ndim > 1:
            capacity = capacity_rows(capacity, storage.ndim, data, batch=True)
        rows = self.place(data, count, capacity)
        if not isinstance(rows, range):
            return self._extend_at(rows, data, count, capacity)
        index = row_numbers(rows)
        where: Any = rows  # storages copy a range at once, and scatter row numbers
        if rows.stop > capacity:
            where = index.remainder_(capacity).clone()  # the storage keeps it; of rows given twice the last data stay
        if len(rows) != count:
            _refuse_rows(self, index, count)
        try:
            storage.set(where, self.prepare(data, where))
        except BaseException:
            self.on_refused()
            raise
        self.on_written(where, capacity)
        return self._written(index, count)  # type: ignore[no-any-return]

    def _extend_at(self, index: torch.Tensor, data: Any, count: int, capacity: int) -> torch.Tensor:
        """Write a batch at the rows that `place` returned; without `keeps_order`, in ascending order."""
        if index.dtype != torch.int64 or index.shape != (count,):
            _refuse_rows(self, index, count)
        numbers = index.numpy(force=True)  # of few rows, numpy chooses and sorts in a third of the time
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < -1 or highest >= capacity:
            _refuse_rows(self, index, count)
        if highest < 0:
            return self._replicate_index(index)
        kept, order = (numbers.copy(), None) if lowest >= 0 else (numbers[chosen := numbers >= 0], chosen.nonzero()[0])
        if not self.keeps_order and (kept[1:] < kept[:-1]).any():
            ascending = kept.argsort(kind="stable")
            kept, order = kept[ascending], ascending if order is None else order[ascending]
        rows = torch.from_numpy(kept)
        stored = data if order is None else chosen_rows(data, torch.from_numpy(order))
        try:
            self.storage.set(rows, self.prepare(stored, rows))
        except BaseException:
            self.on_refused()
            raise
        self.on_written(rows, capacity)
        self._written(rows, len(rows))
        return self._replicate_index(index)

    def _written(self, rows: Any, count: int) -> Any:
        """Count a write and notify attached buffers; return the index of the elements."""
        storage = self.storage
        self._write_counter.add(count)
        if storage.generations is not None or self.tracks_generations:
            self._count_generations(rows)
        index = rows
        if storage.ndim > 1:
            index = self._replicate_index(torch.as_tensor(rows).reshape(-1))
        self._mark_update(index)
        return index

    def _writable(self) -> Storage:
        if not self.writes:
            raise SchemaError("This dataset doesn't allow writing.", hint="copy the rows into a buffer of your own")
        return self.storage

    # The storage ------------------------------------------------------------------------------------

    @final
    def register_storage(self, storage: Storage) -> None:
        """Write into this storage from now on: behind its rows, or at the cursor of a state that was loaded before."""
        if storage is self._storage:
            return
        self.check_storage(storage)
        previous = self._storage
        if self.keeps_order and self.writes and not (previous is None and (self.cursor or self.write_count)):
            rows = rows_in(storage)
            self.cursor = storage.shape[0] % rows if len(storage) else 0
        self._storage = storage
        self.on_register(storage, previous)
        self.sync_cursor()

    @final
    def sync_cursor(self) -> None:
        """Set the next row of the ring in the log of the storage."""
        if self.keeps_order and self.writes and self._storage is not None and (rows := rows_in(self._storage)):
            self._storage.log.go_on_at(self.cursor % rows)

    @final
    def resume_after(self) -> None:
        """Set cursor and count by the rows of the storage, after a load without the state of a writer."""
        if not self.writes:
            return
        storage = self.storage
        self.empty()
        self.on_register(storage, storage)
        self.cursor = storage.shape[0] % rows_in(storage) if len(storage) else 0
        self.write_count = storage.shape[0] if len(storage) else 0

    @final
    def rotate(self, row: int) -> None:
        """Write next behind a full ring that was loaded into a larger storage, where `row` became row 0."""
        self.cursor = self.storage.shape[0]
        self.on_rotate(row)

    @final
    def empty(self, empty_write_count: bool = True) -> None:
        """Start again at the first row; with `empty_write_count`, count from 0."""
        self._empty(empty_write_count)

    # State ------------------------------------------------------------------------------------------

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return `_cursor`, `_write_count` and the entries of `save_state`; empty if nothing can be written."""
        if not self.writes:
            return {}
        return {"_cursor": self.cursor, "_write_count": self.write_count} | self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; SchemaError, with nothing changed, for that of another kind of writer."""
        if not self.writes:
            if state_dict:
                raise SchemaError(f"{type(self).__name__} has no state, found {', '.join(map(str, state_dict))}")
            return
        counts, before = counts_in(state_dict), (self.cursor, self.write_count)
        self.cursor, self.write_count = counts
        try:
            self.load_state(state_dict)
        except BaseException:
            self.cursor, self.write_count = before
            raise
        self.sync_cursor()

    @final
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state into the folder `path`, which is made if it is missing."""
        if state := self.state_dict():
            self.write_state(Path(path), state)

    @final
    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load the state in the folder `path`, or change nothing.

        DatasetNotFoundError if there is none, FormatError and CorruptDataError for an invalid one.
        """
        if self.writes:
            self.load_state_dict(self.read_state(Path(path)))

    # Names of TorchRL's writers ---------------------------------------------------------------------

    def _empty(self, empty_write_count: bool = True) -> None:
        if not self.writes:
            self._writable()  # which refuses
        self.cursor = 0
        if empty_write_count:
            self.write_count = 0
        if (generations := self._generations) is not None:
            generations.count_all()
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self.cursor}, write_count={self.write_count})"


def _refuse_rows(writer: Writer, index: torch.Tensor, count: int) -> None:
    raise SchemaError(
        f"place() of a {type(writer).__name__} named the rows {index.tolist()[:8]} of type {index.dtype} for {count} "
        "elements, expected a row of the storage or -1 for each, int64"
    )


def _with_book_keeping(method: Callable[..., Any], *, batch: bool) -> Callable[..., Any]:
    """Add to an override of `Writer.add` or `Writer.extend` the checks before it, and the notification after it."""

    @functools.wraps(method)
    def write(self: Writer, data: Any, *more: Any, **options: Any) -> Any:
        self._writable()
        if batch:
            batch_length(data)
        self._informed = False
        index = method(self, data, *more, **options)
        if not self._informed and index is not None:
            self._count_generations(index)
            self._mark_update(index)
        return index

    return write


class ImmutableDatasetWriter(Writer):
    """Refuses every write, and emptying: SchemaError (a RuntimeError), with nothing changed. It has no state.

    >>> ImmutableDatasetWriter().add(0)
    Traceback (most recent call last):
    ...
    rbtool.core.errors.SchemaError: This dataset doesn't allow writing.
    hint: copy the rows into a buffer of your own
    """

    writes: ClassVar[bool] = False

    def place(self, data: Any, count: int, capacity: int) -> NoReturn:
        """Never called: nothing can be written."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
