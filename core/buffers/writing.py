"""What goes into a buffer, and how stored elements are changed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError
from ..storages.cursors import as_index, rows_named
from ..storages.write_log import Change
from ..writers.base import batch_length
from .parts import BufferParts, UnsupportedError, WrongKindError
from .pytrees import is_key, swap, without_arrays
from .reading import quiet

Key = str | tuple[str, ...]
_WHOLE = slice(None)


class WriteResult(NamedTuple):
    """The written data, after the transforms, and its index; `data` is None if nothing was written."""

    data: Any
    index: Any
    grown: int = 0
    """The dimension of the data along which the storage grew."""


class Writing(BufferParts):
    """Adds, replaces and removes elements. A failure changes nothing, and the caller's data is never changed."""

    _label: ClassVar[str | None] = None
    """The entry with row numbers that the writer stores; an assignment of data without it does not change it."""

    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or int64 `[k, ndim]` where the storage has several dimensions.

        A transform gets a tensordict with a trailing dimension of size one. If it returns None, nothing is written and
        the index is empty, `[0, ndim]`. SchemaError (a RuntimeError) for data that does not fit the storage.
        """
        return self._write_one(data).index

    def _write_one(self, data: Any) -> WriteResult:
        storage = self._storage
        if not self._transform.is_empty:
            with self._held_again_on_failure():
                if is_tensor_collection(data):
                    return self._add_transformed(data.unsqueeze(-1))
                return self._add_unless_none(self._transform.inv(data))
        if storage.ndim == 1 and _has_batch(data) and not quiet():
            warnings.warn(
                f"a tensordict of batch size {list(data.batch_size)} is added as one element; "
                "extend() writes its rows one by one",
                stacklevel=3,
            )
        return WriteResult(data, self._add(data))

    def _add_unless_none(self, data: Any) -> WriteResult:
        return self._nothing_written() if data is None else WriteResult(data, self._add(data))

    def _nothing_written(self) -> WriteResult:
        return WriteResult(None, torch.empty((0, self._storage.ndim), dtype=torch.int64))

    def _add(self, data: Any) -> Any:
        with self._guard:
            if self._unshared:
                self._share_rows()
            if self._room is not None:
                self._require_room(self._room, 1)
            index = self._writer.add(data)
            if self._unshared:
                self._share_rows()
            if self._notify_sampler and index is not None:  # a writer may reject an element
                with self._sampling:
                    self._sampler.add(index)
        return index

    def _require_room(self, room: int, count: int) -> None:
        """Raise SchemaError, with nothing changed, for elements beyond the capacity of the sampler."""
        storage, writer = self._storage, self._writer
        behind = (writer.cursor if writer.keeps_order else len(storage)) + count
        if min(behind, storage.max_size) > room:
            raise SchemaError(
                f"element {min(behind, storage.max_size) - 1} cannot be written: the sampler's max_capacity is {room}",
                hint="make the sampler with the max_size of the storage",
            )

    def _add_transformed(self, data: Any) -> WriteResult:
        changed = self._transform.inv(data)
        if changed is not None and changed.ndim == data.ndim and changed.shape[-1] == 1:
            return self._add_unless_none(changed.squeeze(-1))
        return self._extend_unless_none(changed)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch of elements; return their indices, int64 `[n]`, or `[n, ndim]` of several dimensions.

        A tensor, a tensordict and a tensorclass are batches along their first dimension, or along `dim_extend` for a
        storage of several dimensions; a list is a sequence of elements; a tuple or a dict is a nest whose leaves share
        their first dimension. Of a batch longer than the capacity the last elements are kept. If a transform returns
        None, nothing is written and the index is empty, `[0, ndim]`.

        SchemaError (a RuntimeError), with nothing changed, for data that does not fit the storage and for an empty
        batch; UnsupportedError (a NotImplementedError) for `update_priority`, which buffers of tensordicts have.
        """
        if update_priority is not None:
            raise UnsupportedError(
                f"update_priority is set, expected None: a {type(self).__name__} does not know where priorities are",
                hint="take a TensorDictReplayBuffer, or call update_priority()",
            )
        index: torch.Tensor = self._write_batch(data).index
        return index

    def _write_batch(self, data: Any) -> WriteResult:
        if data is not None and self._transform.is_empty:
            return self._extend_unless_none(data)
        with self._held_again_on_failure():
            return self._extend_unless_none(self._inward(data, self._transform.inv))

    def flush(self) -> torch.Tensor:
        """Write data that transforms such as `MultiStepTransform` hold back; return the indices as `extend` does."""
        index: torch.Tensor = self._write_held().index
        return index

    def _write_held(self) -> WriteResult:
        with self._held_again_on_failure():
            return self._extend_unless_none(self._transform.flush())

    def _extend_unless_none(self, data: Any) -> WriteResult:
        return self._nothing_written() if data is None else WriteResult(data, self._extend(data), self._dim_extend)

    @contextlib.contextmanager
    def _held_again_on_failure(self) -> Iterator[None]:
        """On failure restore the data that transforms hold back."""
        held = self._transform.held_back()
        try:
            yield
        except BaseException:
            self._transform.hold_back(held)
            raise

    def _extend(self, data: Any) -> torch.Tensor:
        if self._dim_extend:
            data = swap(data, self._dim_extend)
        with self._guard:
            if self._unshared:
                self._share_rows()
            if self._room is not None:
                self._require_room(self._room, batch_length(data))
            index = self._writer.extend(data)
            if self._unshared:
                self._share_rows()
            if self._notify_sampler:
                with self._sampling:
                    self._sampler.extend(index)
        return index

    # Priorities and emptying -----------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priority of elements, one for all or one for each; gradients are dropped.

        `index` is an int, int64 `[n]`, `[n, ndim]`, or a tuple of one tensor a dimension. A sampler without priorities
        warns. WrongKindError (a TypeError) for an index or priorities that are no numbers, UsageError (a ValueError)
        for priorities that are negative or not finite, SchemaError (a RuntimeError) for another number of priorities:
        all with nothing changed.
        """
        if isinstance(index, slice | str) or index is None or index is Ellipsis or is_tensor_collection(index):
            raise WrongKindError(f"elements are named by their numbers, found a {type(index).__name__}")
        with self._sampling:
            self._sampler.update_priority(without_arrays(index), _numbers(priority), storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all elements, and reset sampler and writer; memory is kept.

        SchemaError (a RuntimeError), with nothing changed, for a dataset that does not allow writing.
        """
        with self._guard, self._sampling:
            self._writer.empty(empty_write_count)
            self._sampler.empty()
            self._storage.empty()
            self._transform.hold_back(None)
            self.forget_drawn()

    # Editing ----------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace existing elements, by number, or an entry of all elements, by key.

        Several indices in a tuple are those of the dimensions of `rb[:]`. Data without the leading dimensions of the
        selection is repeated along them: `rb[0:2] = rb[0]`; dimensions of size 1 are not expanded. In a list storage
        only a tensor or tensordict without rows is repeated. If all elements are replaced in memory, data may have new
        entries, and `rb[key]` may be new: a tensor storage keeps it until elements are written without it.

        Data goes through the transforms, except those that hold data back, such as `MultiStepTransform`; entries go
        through none. IndexError for elements that do not exist, SchemaError (a RuntimeError) for data that does not fit
        the stored data, MissingKeyError (a KeyError) for an unknown entry that cannot be added.
        """
        if is_key(index):
            self._replace(index, data)
            return
        if (data := self._inward(data, self._transform.inv_in_place)) is None:
            return
        with self._guard:
            storage, index = self._storage, without_arrays(index)
            if self._dim_extend and self._names_all(index) and not storage.lacks_dimensions(data):
                index, data = slice(0, storage.shape[0]), swap(data, self._dim_extend)
            elif self._dim_extend or (isinstance(index, tuple) and len(index) > 1):
                storage.set_cells(index, data, dim=self._dim_extend, label=self._label)
                return
            places = self._places(index)
            storage[places] = self._complete(storage.repeated(places, data), places)

    def _inward(self, data: Any, through: Callable[[Any], Any]) -> Any:
        """Apply a method of the transforms to data, or to a shallow copy of a tensordict."""
        if data is None:
            raise SchemaError("the data are None, expected some to write: did a function forget to return them?")
        if self._transform.is_empty:
            return data
        return through(data.copy() if isinstance(data, TensorDictBase) else data)

    def _names_all(self, index: Any) -> bool:
        """Whether an index of one dimension of the user's layout selects all of it."""
        size = self._storage.shape[self._dim_extend]
        return index is Ellipsis or (isinstance(index, slice) and range(size)[index] == range(size))

    def _complete(self, data: Any, places: Any) -> Any:
        """Add the row numbers of the replaced elements to data without them."""
        if self._label is not None and is_tensor_collection(data) and data.get(self._label, None) is None:
            rows = places.reshape(-1) if isinstance(places, torch.Tensor) and places.dim() > 1 else places
            labels = self._storage.entry((self._label,), rows)
            if labels is not None:
                if labels.shape[: data.batch_dims] != data.batch_size:
                    found, expected = list(data.batch_size), list(labels.shape[: self._storage.ndim])
                    raise SchemaError(f"the data has the batch size {found}, expected {expected}")
                return data.copy().set(self._label, labels)
        return data

    def _places(self, index: Any) -> Any:
        """Return the index in the form of storages; IndexError for elements that do not exist."""
        rows, found = self._storage.shape[0], as_index(index, 1)
        highest = -1
        if isinstance(found, slice):
            highest = rows if found.stop is not None and found.stop > rows else -1
        elif isinstance(found, int):
            highest = found
        elif isinstance(found, torch.Tensor) and found.numel():
            highest = len(found) - 1 if found.dtype == torch.bool else int(found.max())
        if highest >= rows:
            raise IndexError(f"element {highest} cannot be replaced: there are {rows}; extend() adds elements")
        return found

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first elements along dimension 0 of `rb[:]`, as many as `data` has, or `end`; see `rb[:] = data`.

        Length and cursor do not change.
        """
        self[: batch_length(data) if end is None else end] = data

    # Entries ---------------------------------------------------------------------------------------

    def set_(self, key: Key, value: Any) -> Any:
        """Replace an entry of all elements, in place and without transforms; returns this buffer.

        SchemaError (a RuntimeError) unless `value` has the shape and element type of `rb[:][key]`, and for a storage
        whose elements cannot be edited; MissingKeyError (a KeyError) for a missing entry.
        """
        return self._edit({key: value})

    def set_at_(self, key: Key, value: Any, index: Any) -> Any:
        """Replace an entry of the elements at `index`, as `set_` does of all; returns this buffer."""
        return self._edit({key: value}, without_arrays(index))

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Key] | None = None
    ) -> Any:
        """Replace several entries as `set_` does: all or none; returns this buffer.

        With `keys_to_update`, only those among the given entries. `clone` is accepted for compatibility with TorchRL:
        values are always copied.
        """
        values = dict(flat_entries(input_dict_or_td))
        if keys_to_update is not None:
            wanted = [_path(key) for key in keys_to_update]
            values = {key: value for key, value in values.items() if any(key[: len(part)] == part for part in wanted)}
        return self._edit(values)

    def _replace(self, key: Key, value: Any) -> None:
        """Replace or add an entry, or a nest of entries."""
        values = dict(flat_entries(value, _path(key)))
        try:
            self._edit(values)
        except MissingKeyError:
            if not all(isinstance(part, torch.Tensor) for part in values.values()):
                raise
            with self._guard:
                self._storage.add_entries({
                    path: part.transpose(0, self._dim_extend) if part.dim() > self._dim_extend else part
                    for path, part in values.items()
                })  # fmt: skip

    def _edit(self, values: Mapping[Any, Any], index: Any = _WHOLE) -> Any:
        with self._guard:
            checked = []
            for key, value in values.items():
                leaf = self._leaf(key)
                fitting = _like(leaf, value, key)
                expected = leaf.shape if index is _WHOLE else leaf[index].shape
                if expected != fitting.shape:
                    raise SchemaError(f"{_name(key)} is {list(fitting.shape)}, expected {list(expected)} there")
                checked.append((_path(key), leaf, fitting))
            for path, leaf, fitting in checked:
                self._storage.keep(self._rows_edited(index), path)
                leaf[index] = fitting
            for path, leaf, _ in checked:
                self._storage.put_back(path, leaf, index)
            self._storage.mark_changed(Change(keys=tuple(path for path, _, _ in checked)))
        return self

    def _rows_edited(self, index: Any) -> slice | torch.Tensor:
        """Return the rows that an edit at an index of entries may change."""
        rows = self._storage.shape[0]
        return slice(0, rows) if self._dim_extend or index is _WHOLE else rows_named(index, rows)

    def _leaf(self, key: Key) -> torch.Tensor:
        """Return an editable tensor of an entry of all elements, in the user's layout."""
        leaf = self._storage.editable(_path(key))
        return leaf.transpose(0, self._dim_extend) if self._dim_extend else leaf


def _has_batch(data: Any) -> bool:
    """Whether data is a tensordict or a tensorclass with a batch size."""
    if type(data) is TensorDict:
        return bool(data.batch_size)
    return type(data) is not dict and is_tensor_collection(data) and data.ndim > 0


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _name(key: Key) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))


def _like(leaf: torch.Tensor, value: Any, key: Key) -> torch.Tensor:
    """Return `value` as a tensor of the leaf's element type; SchemaError for a tensor of another type."""
    if not isinstance(value, torch.Tensor):
        return torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
    if value.dtype != leaf.dtype:
        raise SchemaError(f"{_name(key)} is {value.dtype}, expected {leaf.dtype}")
    return value


def flat_entries(nest: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves of a tensordict or a nest of dicts with their keys."""
    if not (is_tensor_collection(nest) or isinstance(nest, Mapping)):
        return [(path, nest)]
    found = []
    for key, value in nest.items():
        found += flat_entries(value, (*path, *((key,) if isinstance(key, str) else key)))
    return found


def _numbers(values: Any) -> torch.Tensor:
    """Return priorities without gradients; WrongKindError (a TypeError) for anything but numbers."""
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, list | tuple):
        values = [value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value for value in values]
    if values is None:  # NumPy converts it to NaN
        raise WrongKindError("priorities are numbers, found None")
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise WrongKindError(f"priorities are numbers, found a {type(values).__name__}: {error}") from error
