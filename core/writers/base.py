"""The contract of writers: where new rows go."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

import numpy as np
import torch

from ..contract import delegate, own_attributes, refuse_overrides
from ..errors import SchemaError
from ..storages import Storage
from .batches import as_batch, batch_length, capacity_rows, chosen_rows
from .state import Counting, counts_in, read_state, rows_in, write_state

__all__ = ["ImmutableDatasetWriter", "Writer"]

_FINAL = {
    "empty": "reset()",
    "sync_cursor": "keeps_order",
    "resume_after": "on_register(storage)",
    "rotate": "on_rotate(row)",
    "unshare": "save_state() and load_state(state)",
}


class Writer(Counting, ABC):
    """Puts new elements into a storage and counts them.

    A writer implements `place(data, count, capacity)`, which names the rows that a batch goes to. One that keeps a
    state of its own also implements `save_state`, `load_state` and `reset`. All other methods have a default:

    - `place_one(data, capacity)`: the row of a single element, where that is faster than a batch of one;
    - `prepare(data, rows)`: what is stored of the data;
    - `on_written(rows, capacity)`, `on_refused()`: the storage has taken the data, or has not;
    - `check_storage(storage)`, `on_register(storage)`: a storage that is refused, or written to from now on;
    - `on_rotate(row)`: `row` became row 0, and the rows before it come last;
    - `write_state(folder, state)`, `read_state(folder)`: for a file format of its own.

    `keeps_order = False` says that rows do not follow one another round a ring: samplers of slices refuse such a
    writer. `generator` is what random numbers come from; None stands for torch's own. `storage`, `cursor` and
    `write_count` can be read anywhere; `on_written` and `reset` may set the counters.

    The methods that buffers call (`add`, `extend`, `register_storage`, `state_dict`, `load_state_dict`, `dumps`,
    `loads`, `empty`) do the book-keeping. A write goes through four steps: everything is checked; the storage takes the
    data, whole or not at all; the cursor and the count of written elements move on; the buffers attached to the storage
    are informed which elements are new. So a write that fails changes nothing. The caller's data is never changed, not
    even by the writers that store an `"index"` beside it. Writers hold no locks: buffers do.

    Writers that were written for TorchRL override those methods themselves, and keep working: buffers call the
    override; `add` and `extend` check the storage and the batch before it, and inform attached buffers after it unless
    it has done so. Methods that TorchRL does not have cannot be overridden: FinalMethodError (a TypeError) names what
    to implement.

    Cursor and count have 64 bits and lie in shared memory, so that forked and spawned children go on in the same
    ring; with `compilable` they are numbers of this process. Ideas and names are those of TorchRL's writers.

    >>> import torch
    >>> from rbtool.core.storages import TensorStorage
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
    """Whether rows lie in the order in which they came, round a ring, and `cursor` is the row that comes next."""

    writes: ClassVar[bool] = True
    """Whether anything can be written; otherwise there is no state."""

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
        """Name the rows that a batch of `count` elements goes to; what this changes, `on_refused` undoes.

        Returns int64 `[count]`, rows below `capacity`, and -1 for each element that is not kept; of a row that is named
        twice the last element stays. A `range` stands for rows that follow one another, with row 0 behind the last.
        Rows that are new are the next ones behind those that the storage has.
        """

    def place_one(self, data: Any, capacity: int) -> int | None:
        """Name the row that an element goes to; None for one that is not kept."""
        rows = self.place(as_batch(data), 1, capacity)
        row = rows.start % capacity if isinstance(rows, range) else int(rows[0])
        return None if row < 0 else row

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Return what is stored of data that goes to these rows; the caller's own containers stay as they are."""
        return data

    def on_written(self, rows: int | range | torch.Tensor, capacity: int) -> None:
        """Follow a write to these rows; the default moves the cursor behind the last of them."""
        last = rows if isinstance(rows, int) else int(rows[-1])
        self.cursor = (last + 1) % capacity

    def on_refused(self) -> None:
        """Undo what `place` changed: the storage has not taken the data."""

    def check_storage(self, storage: Storage) -> None:
        """Raise UsageError for a storage that this cannot write to; nothing has changed then."""

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Prepare to write to a storage, after another one or as the first."""

    def on_rotate(self, row: int) -> None:
        """Follow a full ring that was loaded into a larger storage, where `row` became row 0."""

    def reset(self) -> None:
        """Forget what is known of the elements: the storage is empty, or holds others."""

    def save_state(self) -> dict[str, Any]:
        """Return the state beside cursor and count: tensors, numbers, bools and None by name."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `save_state` returned; SchemaError, with nothing changed, for another writer's state.

        `state` also holds `_cursor` and `_write_count`, which are set already, and are set back on failure.
        """

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a state into a folder, which is made where it is missing."""
        write_state(folder, state)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote.

        DatasetNotFoundError where there is none, FormatError and CorruptDataError for one that cannot be read.
        """
        return read_state(folder)

    # Writing ----------------------------------------------------------------------------------------

    @final
    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or int64 `[k, ndim]` where the storage has several dimensions.

        None for one that is not kept. SchemaError (a RuntimeError), with nothing changed, for what cannot be stored.
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

        -1 for one that is not kept. SchemaError as for `add`, and for what is no batch.
        """
        storage = self._writable()
        count = batch_length(data)
        capacity = storage.max_size
        if storage.ndim > 1:
            capacity = capacity_rows(capacity, storage.ndim, data, batch=True)
        rows = self.place(data, count, capacity)
        if not isinstance(rows, range):
            return self._extend_at(rows, data, count, capacity)
        index = torch.from_numpy(np.arange(rows.start, rows.stop))  # half of the time of torch.arange
        where: Any = rows  # storages copy a range at once, where they would scatter row numbers
        if rows.stop > capacity:
            where = index.remainder_(capacity).clone()  # the storage keeps it; of rows named twice the last data stay
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
        """Write a batch at the rows that `place` named; without an order, those that are kept in ascending order."""
        if index.dtype != torch.int64 or index.shape != (count,):
            _refuse_rows(self, index, count)
        numbers = index.numpy(force=True)  # of few rows, numpy chooses and sorts in a third of the time
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < -1 or highest >= capacity:
            _refuse_rows(self, index, count)
        if highest < 0:
            return self._replicate_index(index)
        rows, stored = index.clone(), data
        if not self.keeps_order or lowest < 0:
            order = np.flatnonzero(numbers >= 0)
            order = order if self.keeps_order else order[np.argsort(numbers[order], kind="stable")]
            rows = torch.from_numpy(numbers[order])
            if len(order) < count or (order[1:] < order[:-1]).any():  # otherwise there is nothing to gather
                stored = chosen_rows(data, torch.from_numpy(order))
        try:
            self.storage.set(rows, self.prepare(stored, rows))
        except BaseException:
            self.on_refused()
            raise
        self.on_written(rows, capacity)
        self._written(rows, len(rows))
        return self._replicate_index(index)

    def _written(self, rows: Any, count: int) -> Any:
        """Count what was written and inform attached buffers; return the index of the elements."""
        self.write_count += count
        storage = self.storage
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
        """Write into this storage from now on, in a ring behind the rows that it holds.

        A writer that has loaded a state before its first storage goes on from there.
        """
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
        """Set the row at which the storage expects the next write of a ring."""
        if self.keeps_order and self.writes and self._storage is not None and (rows := rows_in(self._storage)):
            self._storage.log.go_on_at(self.cursor % rows)

    @final
    def resume_after(self) -> None:
        """Write next behind the rows of the storage, or at the first one if it is full; count from there.

        For a load that brought rows and no state of a writer.
        """
        if not self.writes:
            return
        storage = self.storage
        self.empty()
        self.on_register(storage, storage)
        self.cursor = storage.shape[0] % rows_in(storage) if len(storage) else 0
        self.write_count = storage.shape[0] if len(storage) else 0

    @final
    def rotate(self, row: int) -> None:
        """Follow a full ring that was loaded into a larger storage, where `row` became row 0: go on behind it."""
        self.cursor = self.storage.shape[0]
        self.on_rotate(row)

    @final
    def empty(self, empty_write_count: bool = True) -> None:
        """Start again at the first row; with `empty_write_count`, count from 0."""
        self._empty(empty_write_count)

    # State ------------------------------------------------------------------------------------------

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return `_cursor`, `_write_count`, and what `save_state` adds; nothing where nothing can be written."""
        if not self.writes:
            return {}
        return {"_cursor": self.cursor, "_write_count": self.write_count} | self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; SchemaError for one that is not this writer's, with nothing changed."""
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
        """Write the state into the folder `path`, which is made where it is missing."""
        if state := self.state_dict():
            self.write_state(Path(path), state)

    @final
    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in the folder `path`, with nothing changed where that cannot be.

        DatasetNotFoundError where there is none, FormatError and CorruptDataError for one that cannot be read.
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
        "elements, expected is a row of the storage or -1 for each, int64"
    )


def _with_book_keeping(method: Callable[..., Any], *, batch: bool) -> Callable[..., Any]:
    """Put checks before an override of `Writer.add` or `Writer.extend`, and the word to attached buffers behind it."""

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

    Buffers on datasets have it.

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
