"""The contract of writers, which choose the rows of new elements, and the types of data that count as a batch.

A tensor, a tensordict and a tensorclass are batches along dimension 0; a list, an array, a range and a set are
sequences of elements; a tuple and a dict are nests whose leaves share dimension 0.

The state of a writer is saved in a folder: `metadata.json` with the cursor and the counts, and one file with an array.
"""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError, require_flags
from ..format import fs
from ..format.contracts import delegate, own_attributes, refuse_overrides
from ..format.documents import dump_json, load_json
from ..format.files import read_regular
from ..format.syncing import replace_file
from ..options import PathLike
from ..state_folder import read_values, write_values
from ..storages.base import Storage
from ..storages.cursors import oldest_row
from ..storages.ensemble import checked_members, chosen_members, load_members, refuse_write
from ..storages.tensor import TensorStorage
from ..storages.write_log import Counter, Generations
from ..torchrl_classes import counterpart


def rows_in(storage: Storage) -> int:
    """Return the capacity of a storage in rows; 0 while the shape of a row is unknown, before the first write."""
    if storage.ndim == 1:
        return storage.max_size
    return storage.max_size // max(1, storage.shape[1:].numel()) if len(storage) else 0


def _following_row(storage: Storage) -> int:
    """Return the row that a writer of a storage with rows writes next: a full ring continues where it did."""
    rows, count = rows_in(storage), storage.shape[0]
    if count < rows or not isinstance(storage, Storage):  # a storage of TorchRL has no write log
        return count % rows
    return oldest_row(storage)


def counts_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return `_cursor` and `_write_count` of a state, by default 0; SchemaError if they are not counts."""
    counts = []
    for name, absent in (("_cursor", None), ("_write_count", 0)):
        value = state.get(name, absent)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not _is_count(value):
            raise SchemaError(f"{name} is {value!r} in the state, expected a count")
        counts.append(value)
    return counts[0], counts[1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


METADATA = "metadata.json"
_STATE = "state"


def write_folder(folder: Path, metadata: dict[str, Any], array_name: str, array: torch.Tensor | None) -> None:
    """Write metadata and the array that it describes. An empty array has no file: an older array is removed.

    Each file is replaced atomically, but not both at the same time. A buffer that saves itself replaces the whole
    folder.
    """
    fs.make_folder(folder)
    if array is not None and array.numel():
        replace_file(folder / array_name, array.contiguous().numpy().tobytes())
    replace_file(folder / METADATA, json.dumps(json.loads(dump_json(metadata))).encode())
    if array is None or not array.numel():
        fs.remove(folder / array_name)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the counts as metadata, and all other values as a tensordict in the folder `state`."""
    values = {name: value for name, value in state.items() if name not in ("_cursor", "_write_count")}
    if values:
        write_values(folder / _STATE, values)
    metadata = {"cursor": state["_cursor"], "write_count": state["_write_count"]}
    fs.make_folder(folder)
    replace_file(folder / METADATA, json.dumps(metadata).encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote."""
    values = read_values(folder / _STATE) if (folder / _STATE).is_dir() else {}
    return counts_of(read_metadata(folder), folder) | values


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata; DatasetNotFoundError if there is none, FormatError if it is not a JSON object."""
    path = folder / METADATA
    if not path.is_file():
        raise DatasetNotFoundError(f"{folder} does not hold the state of a writer: {METADATA} is missing")
    metadata = load_json(path)
    if not isinstance(metadata, dict):
        raise FormatError(f"{path} is a {type(metadata).__name__}, expected an object")
    return metadata


def counts_of(metadata: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `_cursor` and `_write_count` of the metadata in `folder`, by default 0; FormatError if they are not
    counts.
    """
    counts = {}
    for name, absent in (("cursor", None), ("write_count", 0)):
        value = metadata.get(name, absent)
        if not _is_count(value):
            raise FormatError(f"{folder / METADATA} has {value!r} for {name}, expected a count")
        counts[f"_{name}"] = value
    return counts


def read_array(path: Path, dtype: Any, shape: Any) -> torch.Tensor:
    """Read an array of the element type and shape that the metadata names.

    Raises:
        FormatError: the type or the shape is invalid.
        CorruptDataError: the file is missing or has another size.
    """
    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or not isinstance(shape, list):
        raise FormatError(f"{path} is described as {dtype!r} {shape!r}, expected an element type and a shape")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise FormatError(f"{path} is described with the impossible shape {shape!r}")
    data = read_regular(path) if path.is_file() else b""
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise CorruptDataError(f"{path} has {len(data):,} bytes, expected {expected:,}: it was cut or removed")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(kind).reshape(shape)


# Methods that must not be overridden, and what to implement instead.
_FINAL = {
    "empty": "reset()",
    "sync_cursor": "keeps_order",
    "resume_after": "on_register(storage)",
    "rotate": "on_rotate(row)",
    "unshare": "save_state() and load_state(state)",
}


@counterpart
class Writer(ABC):
    """Puts new elements into a storage and counts them.

    A subclass implements `place(data, count, capacity)`, which returns the rows of a batch. If it has state, it also
    implements `save_state`, `load_state` and `reset`. All other methods have defaults:

    - `place_one(data, capacity)` returns the row of a single element, if that is faster than for a batch of one;
    - `prepare(data, rows)` changes the data before it is stored;
    - `on_written(rows, capacity)` and `on_refused()` are called after the storage has stored, or refused, the data;
    - `check_storage(storage)` refuses a storage, and `on_register(storage, previous)` prepares for a new one;
    - `on_rotate(row)` is called after the rows of a full ring were rotated, so that `row` is now row 0;
    - `write_state(folder, state)` and `read_state(folder)` implement another file format for the state.

    `keeps_order = False` declares that rows are not written around a ring; slice samplers refuse such a writer. All
    methods may read `storage`, `cursor` and `write_count`; `on_written` and `reset` may also set the two counters.

    Buffers call `add`, `extend`, `register_storage`, `state_dict`, `load_state_dict`, `dumps`, `loads` and `empty`. A
    write has four steps: check everything; let the storage take all of the data or nothing; update cursor and count;
    notify the buffers attached to the storage. A write that fails therefore changes nothing. The caller's data is never
    changed. Writers hold no locks; buffers do.

    A writer made for TorchRL overrides these methods instead, and works: an override of `add` or `extend` is called
    after the storage and the batch were checked, and attached buffers are notified after it, unless it has notified
    them itself. Methods that TorchRL does not have must not be overridden: FinalMethodError (a TypeError) says which
    method to implement instead.

    Args:
        compilable: whether cursor and count belong to this process alone. Otherwise they are 64-bit numbers in shared
            memory, so that forked and spawned children continue the same ring.

    Attributes:
        generator: the source of random numbers, set by the buffer; None for torch's own.

    Names and behaviour follow TorchRL's writers.

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
    """Whether rows are written around a ring in the order of time, and `cursor` is the next row."""

    writes: ClassVar[bool] = True
    """Whether anything can be written; if not, the writer has no state."""

    tracks_generations = False
    """Whether this writer counts how often each row is overwritten."""

    generator: torch.Generator | None = None
    """Source of random numbers, set by the buffer; None for torch's own generator. It is not pickled."""

    _informed = False
    """Whether an overridden `add` or `extend` has notified attached buffers itself."""

    def __init__(self, compilable: bool = False) -> None:
        require_flags(compilable=compilable)
        self._storage: Storage | None = None
        self._compilable = compilable
        self._cursor_counter = Counter(0, shared=not compilable)
        self._write_counter = Counter(0, shared=not compilable)

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
        """Choose the rows of a batch; if this changes the writer's state, `on_refused` has to undo the change.

        Args:
            data: the batch.
            count: its number of elements.
            capacity: the capacity of the storage in rows.

        Returns:
            Rows below `capacity`, int64 `[count]`, with -1 for elements that are not kept; or a `range`, which means
            consecutive rows modulo the capacity. If a row occurs twice, it gets the last of its elements. Rows that the
            storage does not have yet must directly follow its last valid row.
        """

    def place_one(self, data: Any, capacity: int) -> int | None:
        """Return the row of a single element; None if it is not kept."""
        rows = self.place(as_batch(data), 1, capacity)
        row = rows.start % capacity if isinstance(rows, range) else int(rows[0])
        return None if row < 0 else row

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Return what is stored at these rows in place of `data`, which must not be changed."""
        return data

    def on_written(self, rows: int | range | torch.Tensor, capacity: int) -> None:
        """Update the state after a write to these rows; the default moves the cursor behind the last of them."""
        last = rows if isinstance(rows, int) else int(rows[-1])
        self.cursor = (last + 1) % capacity

    def on_refused(self) -> None:
        """Undo the changes of `place`, because the storage has refused the data."""

    def check_storage(self, storage: Storage) -> None:
        """Raise UsageError, with nothing changed, for a storage that this writer cannot write to."""

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Prepare to write to a storage; `previous` is the storage before, if any."""

    def on_rotate(self, row: int) -> None:
        """Update the state after a full ring was loaded into a larger storage, where `row` became row 0."""

    def reset(self) -> None:
        """Forget all elements, because the storage is empty or holds others."""

    def save_state(self) -> dict[str, Any]:
        """Return the state except cursor and count: tensors, numbers, bools and None, by name."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `save_state` returned; SchemaError, with nothing changed, for another writer's state.

        `state` also holds `_cursor` and `_write_count`, which are already set, and are restored on failure.
        """

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a state to a folder, which is created if necessary."""
        write_state(folder, state)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote; DatasetNotFoundError if there is no state, FormatError if it is invalid."""
        return read_state(folder)

    # Writing ----------------------------------------------------------------------------------------

    @final
    def add(self, data: Any) -> Any:
        """Write one element.

        Returns:
            Its index: an int, or int64 `[k, ndim]` for a storage of several dimensions; None if the element is not
            kept.

        Raises:
            SchemaError: (a RuntimeError) the data does not fit the storage. Nothing is changed.
        """
        if type(data) is TensorDict and (index := self.write_as_is(data, True)) is not None:
            return index
        storage = self._writable()
        capacity = capacity_rows(storage.max_size, storage.ndim, data)
        row = self.place_one(data, capacity)
        if row is None:
            return None
        return self._store(row, data, capacity, row)

    @final
    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch.

        Returns:
            The indices of its elements, int64 `[n]`, or `[n * k, ndim]` for a storage of several dimensions; -1 for
            elements that are not kept.

        Raises:
            SchemaError: (a RuntimeError) the data does not fit the storage, or is not a batch. Nothing is changed.
        """
        if type(data) is TensorDict and (index := self.write_as_is(data, False)) is not None:
            return index  # type: ignore[no-any-return]
        storage = self._writable()
        count = batch_length(data)
        capacity = storage.max_size
        if storage.ndim > 1:
            capacity = capacity_rows(capacity, storage.ndim, data, batch=True)
        rows = self.place(data, count, capacity)
        if isinstance(rows, range) and rows.stop > capacity:
            rows = row_numbers(rows).remainder_(capacity)  # may repeat a row, which then gets its last element
        if not isinstance(rows, range):
            return self._extend_at(rows, data, count, capacity)
        index = row_numbers(rows)
        if len(rows) != count:
            _refuse_rows(self, index, count)
        # A storage copies consecutive rows in one piece, but numbered rows one by one.
        return self._store(rows, data, capacity, index)  # type: ignore[no-any-return]

    def write_as_is(self, data: Any, single: bool) -> Any:
        """Write an element or a batch in half of the time, if its bytes can be copied as they are; used by buffers.

        Args:
            data: the element or batch.
            single: whether it is one element.

        Returns:
            The index, as `add` and `extend` return it; None, with nothing changed, if the data has to be written by
            `add` or `extend`.
        """
        return None

    def _extend_at(self, index: torch.Tensor, data: Any, count: int, capacity: int) -> torch.Tensor:
        """Write a batch at the rows that `place` returned, without the elements whose row is -1.

        Unless the writer `keeps_order`, the storage gets the rows in ascending order.
        """
        if index.dtype != torch.int64 or index.shape != (count,):
            _refuse_rows(self, index, count)
        numbers = index.numpy(force=True)  # for few rows, NumPy is three times as fast
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
        self._store(rows, stored, capacity, rows)
        return self._replicate_index(index)

    def _store(self, where: Any, data: Any, capacity: int, rows: Any) -> Any:
        """Store the data and update cursor and counts; return the index of the elements.

        `where` is the form in which the storage gets the rows: an int, a range or a tensor; `rows` are their numbers.
        """
        try:
            self.storage.set(where, self.prepare(data, where))
        except BaseException:
            self.on_refused()
            raise
        self.on_written(where, capacity)
        return self._written(rows)

    def _written(self, rows: int | torch.Tensor) -> Any:
        """Count a write and notify attached buffers; return the index of the elements."""
        storage = self.storage
        self._write_counter.add(1 if isinstance(rows, int) else len(rows))
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
        """Write to this storage from now on: behind its valid rows, or at the cursor of a state loaded before."""
        if storage is self._storage:
            return
        self.check_storage(storage)
        previous = self._storage
        if self.keeps_order and self.writes and not (previous is None and (self.cursor or self.write_count)):
            self.cursor = _following_row(storage) if len(storage) else 0
        self._storage = storage
        self.on_register(storage, previous)
        self.sync_cursor()

    @final
    def sync_cursor(self) -> None:
        """Record in the storage's write log which row of the ring is written next."""
        if self.keeps_order and self.writes and self._storage is not None and (rows := rows_in(self._storage)):
            self._storage.log.go_on_at(self.cursor % rows)

    @final
    def resume_after(self) -> None:
        """Derive cursor and count from the rows of the storage, after a load without a writer's state."""
        if not self.writes:
            return
        storage = self.storage
        self.empty()
        self.on_register(storage, storage)
        self.cursor = storage.shape[0] % rows_in(storage) if len(storage) else 0
        self.write_count = storage.shape[0] if len(storage) else 0

    @final
    def rotate(self, row: int) -> None:
        """Move the cursor behind the rows of a full ring that was loaded into a larger storage; `row` became row 0."""
        self.cursor = self.storage.shape[0]
        self.on_rotate(row)

    @final
    def empty(self, empty_write_count: bool = True) -> None:
        """Start again at the first row.

        Args:
            empty_write_count: whether to count from 0 again.
        """
        require_flags(empty_write_count=empty_write_count)
        self._empty(empty_write_count)

    # Cursor and counts ------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """The storage that is written to; UsageError if none is registered."""
        if self._storage is None:
            raise UsageError(f"this {type(self).__name__} has no storage to write to", hint="call register_storage()")
        return self._storage

    @property
    def cursor(self) -> int:
        """The row to be written next."""
        return self._cursor_counter.value

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._cursor_counter.value = value

    @property
    def write_count(self) -> int:
        """How many elements were written in total, along dimension 0."""
        return self._write_counter.value

    @write_count.setter
    def write_count(self, value: int) -> None:
        self._write_counter.value = value

    @property
    def counters(self) -> list[Counter]:
        """The counters that every write changes, in shared memory."""
        return [self._cursor_counter, self._write_counter]

    def generations_of(self, index: Any) -> torch.Tensor:
        """Return the generation of each element's row, int64.

        Args:
            index: an int, row numbers of any shape, or for a storage of several dimensions coordinates `[..., ndim]` or
                a tuple with one tensor for each dimension.

        Returns:
            One number for each element: -1 for a row that was never written or does not exist, and for all rows if
            generations are not tracked.
        """
        rows = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
        if not isinstance(index, tuple) and self._storage is not None and self._storage.ndim > 1 and rows.dim() > 1:
            rows = rows[..., 0]
        generations = self._generations if self.tracks_generations else None
        return torch.full(rows.shape, -1) if generations is None else generations.at(rows.long())

    @property
    def _generations(self) -> Generations | None:
        """The generations of the storage's rows, which all of its writers share."""
        return None if self._storage is None else self._storage.generations

    def _count_generations(self, index: Any) -> None:
        """Count a write to each row of an index in the storage's generations, if it has any; skip negative numbers."""
        if (generations := self._generations) is not None:
            rows = torch.as_tensor(index)
            if rows.dim() > 1:  # coordinates of all elements, of which the first of each row has the number of the row
                rows = rows[:: self.storage.shape[1:].numel(), 0]
            generations.count(rows[rows >= 0].reshape(-1))

    @final
    def unshare(self) -> None:
        """Stop sharing cursor and counts with other processes, because this process has a private copy of the rows."""
        self._cursor_counter, self._write_counter = Counter(self.cursor), Counter(self.write_count)

    # State ------------------------------------------------------------------------------------------

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return `_cursor`, `_write_count` and the entries of `save_state`; empty for a writer that cannot write."""
        if not self.writes:
            return {}
        return {"_cursor": self.cursor, "_write_count": self.write_count} | self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; SchemaError, with nothing changed, for another kind of writer's state."""
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
    def dumps(self, path: PathLike) -> None:
        """Write the state to the folder `path`, which is created if necessary."""
        if state := self.state_dict():
            self.write_state(Path(path), state)

    @final
    def loads(self, path: PathLike) -> None:
        """Load the state in the folder `path`. If this fails, nothing is changed.

        Raises:
            DatasetNotFoundError: there is no state.
            FormatError: the state is invalid; CorruptDataError if a file is damaged.
        """
        if self.writes:
            self.load_state_dict(self.read_state(Path(path)))

    # Names of TorchRL's writers ---------------------------------------------------------------------

    def _empty(self, empty_write_count: bool = True) -> None:
        if not self.writes:
            self._writable()  # raises the error
        self.cursor = 0
        if empty_write_count:
            self.write_count = 0
        if (generations := self._generations) is not None:
            generations.count_all()
        self.reset()

    def _mark_update(self, index: Any) -> None:
        """Notify the buffers attached to the storage about new elements."""
        self._informed = True
        self.storage.notify(index)

    def _replicate_index(self, index: torch.Tensor) -> torch.Tensor:
        """Return the index of all elements in rows `[n]`, as buffers return it.

        In a storage of one dimension these are the rows. Otherwise they are the coordinates `[n * k, ndim]` of the k
        elements of each row.
        """
        storage = self.storage
        if storage.ndim == 1:
            return index
        others = storage.shape[1:]
        found = np.empty((len(index), others.numel(), storage.ndim), np.int64)
        found[:, :, 0] = index.numpy(force=True)[:, None]
        found[:, :, 1:] = np.indices(others).reshape(len(others), -1).T
        return torch.from_numpy(found.reshape(-1, storage.ndim))

    @property
    def _cursor(self) -> int:
        return self.cursor

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self.cursor = value

    @property
    def _write_count(self) -> int:
        return self.write_count

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self.write_count = value

    @property
    def _rng(self) -> torch.Generator | None:
        return self.generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self.cursor}, write_count={self.write_count})"


def _refuse_rows(writer: Writer, index: torch.Tensor, count: int) -> None:
    raise SchemaError(
        f"place() of a {type(writer).__name__} returned the rows {index.tolist()[:8]} of type {index.dtype} for "
        f"{count} elements, expected int64 with a row of the storage, or -1, for each"
    )


def _with_book_keeping(method: Callable[..., Any], *, batch: bool) -> Callable[..., Any]:
    """Wrap an override of `Writer.add` or `Writer.extend` in the checks and the notification of attached buffers."""

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


@counterpart
class ImmutableDatasetWriter(Writer):
    """A writer for buffers on datasets: it refuses to write or to empty the storage. It has no state.

    `add`, `extend` and `empty` raise SchemaError (a RuntimeError), with nothing changed.

    >>> ImmutableDatasetWriter().add(0)
    Traceback (most recent call last):
    ...
    rbtool.core.errors.SchemaError: This dataset doesn't allow writing.
    hint: copy the rows into a buffer of your own
    """

    writes: ClassVar[bool] = False

    def place(self, data: Any, count: int, capacity: int) -> NoReturn:
        """Never called: the write is refused before."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class EmptyBatchError(SchemaError, IndexError):
    """A batch to be written has no elements."""


class NotABatchError(SchemaError, TypeError):
    """Data to be written as a batch has no dimension of elements."""


def batch_length(data: Any) -> int:
    """Return the number of elements of a batch.

    Raises:
        NotABatchError: (a TypeError) the data has no dimension of elements.
        EmptyBatchError: (an IndexError) there are no elements.
        SchemaError: (their base) leaves have different lengths.
    """
    if type(data) is TensorDict or isinstance(data, torch.Tensor) or is_tensor_collection(data):
        count = _leading(data, "the data")
    elif isinstance(data, tuple | Mapping):
        count = _common_length(data)
    elif hasattr(data, "__len__") and not isinstance(data, str | bytes):
        count = len(data)
    else:
        raise NotABatchError(f"expected a batch of elements, found a {type(data).__name__}")
    if not count:
        raise EmptyBatchError("expected a batch of at least one element, found none")
    return count


def _leading(data: Any, name: str) -> int:
    shape = data.shape if isinstance(data, torch.Tensor) else data.batch_size
    if not shape:
        raise NotABatchError(
            f"{name} has no dimensions, expected a batch of elements", hint="write one element with add()"
        )
    return int(shape[0])


def _common_length(data: Any) -> int:
    lengths = {path: _length_of_leaf(leaf, path) for path, leaf in _leaves(data, ())}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{'.'.join(path)} has {length}" for path, length in lengths.items())
        raise SchemaError(f"expected leaves of one length, {found}")
    return next(iter(lengths.values()), 0)


def _length_of_leaf(leaf: Any, path: tuple[str, ...]) -> int:
    name = f"the entry {'.'.join(path)!r}"
    if isinstance(leaf, torch.Tensor) or is_tensor_collection(leaf):
        return _leading(leaf, name)
    if hasattr(leaf, "__len__") and not isinstance(leaf, str | bytes):
        return len(leaf)
    raise NotABatchError(f"{name} is a {type(leaf).__name__}, expected a batch of elements")


def _leaves(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a nest with their paths; lists and tuples are nodes, like mappings."""
    if is_tensor_collection(data) or not isinstance(data, tuple | list | Mapping):
        yield path, data
        return
    for key, child in data.items() if isinstance(data, Mapping) else enumerate(data):
        yield from _leaves(child, (*path, str(key)))


def capacity_rows(max_size: int, ndim: int, data: Any, *, batch: bool = False) -> int:
    """Return the capacity in rows, rounded up, of a storage of `max_size` elements whose rows have the shape of `data`.

    Args:
        max_size: the capacity in elements.
        ndim: how many leading dimensions of the storage count elements.
        data: a row, whose first `ndim - 1` dimensions count its elements.
        batch: whether `data` is a batch of rows instead.

    Raises:
        SchemaError: (a RuntimeError) `data` has too few dimensions.
    """
    if ndim == 1:
        return max_size
    if batch and isinstance(data, list):
        data, batch = data[0], False
    leaf = next(_leaves(data, ()))[1]
    shape = tuple(getattr(leaf, "batch_size" if is_tensor_collection(leaf) else "shape", ()))
    others = shape[batch : batch + ndim - 1]
    if len(others) < ndim - 1:
        raise SchemaError(f"expected data with at least {ndim - 1 + batch} dimensions, found {list(shape)}")
    lanes: int = max(1, math.prod(others))
    return -(-max_size // lanes)


def as_batch(data: Any) -> Any:
    """Return a batch of one element."""
    return data[None] if isinstance(data, torch.Tensor) or is_tensor_collection(data) else [data]


def chosen_rows(data: Any, rows: torch.Tensor) -> Any:
    """Return the elements of a batch at `rows`, int64 `[n]`, as a batch of the same kind."""
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return data[rows.to(data.device) if data.device is not None else rows]
    if isinstance(data, Mapping):
        return {key: chosen_rows(child, rows) for key, child in data.items()}
    if isinstance(data, tuple):
        return tuple(chosen_rows(child, rows) for child in data)
    return [data[row] for row in rows.tolist()]


INDEX = "index"


class Labels:
    """Adds row numbers to data on its way into one storage, unless the storage's rows have no entry for them."""

    def __init__(self) -> None:
        self.kept: bool | None = None
        """Whether the rows have numbers; None before the first write."""

    def put(self, data: TensorDictBase, rows: int | range | torch.Tensor, storage: Storage) -> TensorDictBase:
        """Return a shallow copy of `data` with its row numbers as `"index"`, int64 of its batch size."""
        if self.kept is None:
            self.kept = _has_index(storage)
        if self.kept is False:
            return data
        numbers = row_numbers(rows)
        storage.numbered_by = INDEX
        if type(data) is TensorDict and data.device is None and isinstance(storage, TensorStorage):
            # Such a storage only reads the nested tensordicts, so they can be shared with the caller's data. `copy()`,
            # which copies them, takes ten times as long.
            entries = {**data._tensordict, INDEX: _spread(numbers, data.batch_size)}
            return TensorDict._new_unsafe(entries, batch_size=data.batch_size, nested=False)
        labelled = data.copy()
        if isinstance(labelled, LazyStackedTensorDict) and labelled.stack_dim == 0 and numbers.dim():
            for row, element in zip(numbers, labelled.tensordicts, strict=True):  # their shapes may differ
                element.set(INDEX, row.expand(element.batch_size))
            return labelled
        return labelled.set(INDEX, _spread(numbers, data.batch_size))


def row_numbers(rows: int | range | torch.Tensor) -> torch.Tensor:
    """Return rows as int64 `[n]`, an int as `[]`."""
    if isinstance(rows, range):
        return torch.from_numpy(np.arange(rows.start, rows.stop))  # half of the time of torch.arange
    return torch.as_tensor(rows)


def _spread(numbers: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Repeat the number of each row, or of a single row, for all elements of the batch size `size`."""
    if numbers.shape == size:
        return numbers
    return (numbers.reshape(-1, *[1] * (len(size) - 1)) if size and numbers.dim() else numbers).expand(size)


def _has_index(storage: Storage) -> bool | None:
    """Return whether the rows of a storage have the entry `"index"`; None before the first write."""
    try:
        rows = storage.read_at(slice(0, 0))
    except (RuntimeError, IndexError):  # nothing was ever written
        return None
    if not is_tensor_collection(rows):  # a list, whose rows may have different entries
        return True
    names = set(rows.keys())
    return INDEX in names if names else None


@counterpart
class WriterEnsemble(Writer):
    """The writers of an ensemble of buffers, one for each member.

    `len` is their number. An int as index returns a member, and a slice or a list an ensemble of some members. An
    ensemble cannot be written to: `add` and `extend` raise EnsembleWriteError (a RuntimeError and a TypeError).

    Names follow TorchRL.

    >>> from rbtool import RoundRobinWriter
    >>> writers = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
    >>> len(writers), writers[0]
    (2, RoundRobinWriter(cursor=0, write_count=0))
    """

    keeps_order: ClassVar[bool] = False

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self.members: tuple[Writer, ...] = checked_members("WriterEnsemble", writers, Writer)

    def place(self, data: Any, count: int, capacity: int) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    def _writable(self) -> Storage:
        refuse_write(self)

    def _empty(self, empty_write_count: bool = True) -> None:
        for member in self.members:
            member.empty(empty_write_count)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or an ensemble of some members."""
        chosen = chosen_members(index, len(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        if chosen == list(range(len(self))):
            return self
        return type(self)(*(self.members[member] for member in chosen))

    def save_state(self) -> dict[str, Any]:
        """Return the states of the members, by their numbers as text."""
        return {str(number): member.state_dict() for number, member in enumerate(self.members)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the states of the members. If one of them refuses, or their number differs, nothing is changed."""
        load_members(self.members, state)

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the state of each member to a folder with its number."""
        for number, member in enumerate(self.members):
            member.dumps(folder / str(number))

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote."""
        found = {
            str(number): member.read_state(folder / str(number)) if member.writes else {}
            for number, member in enumerate(self.members)
        }
        return {"_cursor": 0, "_write_count": 0, **found}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(writers=({', '.join(map(repr, self.members))}))"
