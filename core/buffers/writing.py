"""What goes into a buffer, and how stored elements are changed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError
from ..storages.cursors import as_index
from ..storages.write_log import Change
from ..writers.batches import batch_length
from .parts import UnsupportedError, WrongKindError
from .pytrees import is_key, swap, without_arrays
from .reading import Reading, quiet

__all__ = ["WriteResult", "Writing"]

Key = str | tuple[str, ...]
_WHOLE = slice(None)


class WriteResult(NamedTuple):
    """What transforms made of data that was given, with the index it got; `data` is None where nothing was written.

    `grown` is the dimension of the data along which the storage grew.
    """

    data: Any
    index: Any
    grown: int = 0


class Writing(Reading):
    """Adds, extends and empties. What fails changes nothing, and the caller's data is never changed."""

    _label: ClassVar[str | None] = None
    """The entry that the writer stores with the data; data without it leave it unchanged."""

    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or int64 `[k, ndim]` where the storage has several dimensions.

        A transform sees a tensordict with one more dimension at the end, of size one. If it returns None, nothing is
        written and the index is empty, `[0, ndim]`. SchemaError (a RuntimeError) for what the storage cannot take.
        """
        return self._write_one(data).index

    def _write_one(self, data: Any) -> WriteResult:
        storage = self._storage
        if not self._transform.is_empty:
            with self._held_again_on_failure():
                if is_tensor_collection(data):
                    return self._add_transformed(data.unsqueeze(-1))
                return self._add_unless_none(self._transform.inv(data))
        if storage.ndim == 1 and type(data) is not dict and is_tensor_collection(data) and data.ndim and not quiet():
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
            if self._tell_sampler and index is not None:  # a writer may keep an element out
                with self._sampling:
                    self._sampler.add(index)
        return index

    def _require_room(self, room: int, count: int) -> None:
        """Refuse to write elements that the sampler could not choose, before anything is changed."""
        storage, writer = self._storage, self._writer
        behind = (writer.cursor if writer.keeps_order else len(storage)) + count
        if min(behind, storage.max_size) > room:
            raise SchemaError(
                f"element {min(behind, storage.max_size) - 1} was to be written, the sampler's max_capacity is {room}",
                hint="make the sampler with the max_size of the storage",
            )

    def _add_transformed(self, data: Any) -> WriteResult:
        changed = self._transform.inv(data)
        if changed is not None and changed.ndim == data.ndim and changed.shape[-1] == 1:
            return self._add_unless_none(changed.squeeze(-1))
        return self._extend_unless_none(changed)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch of elements; return their indices, int64 `[n]`, or `[n, ndim]` of several dimensions.

        A tensor, a tensordict and a tensorclass are batches along their first dimension, or along `dim_extend` where
        the storage has several; a list is a sequence of elements; a tuple or a dict is a nest whose leaves share
        their first dimension. Of a batch longer than the capacity the last elements are kept. A transform that
        returns None leaves nothing to write: the index is empty, `[0, ndim]`.

        SchemaError (a RuntimeError) for what the storage cannot take, and for an empty batch, with nothing changed;
        `update_priority` is a NotImplementedError here: it belongs to buffers of tensordicts.
        """
        if update_priority is not None:
            raise UnsupportedError(
                f"update_priority was given, a {type(self).__name__} does not know where priorities are",
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
        """Write what transforms held back, as `MultiStepTransform` does; return the indices as `extend` does."""
        index: torch.Tensor = self._write_held().index
        return index

    def _write_held(self) -> WriteResult:
        with self._held_again_on_failure():
            return self._extend_unless_none(self._transform.flush())

    def _extend_unless_none(self, data: Any) -> WriteResult:
        return self._nothing_written() if data is None else WriteResult(data, self._extend(data), self._dim_extend)

    @contextlib.contextmanager
    def _held_again_on_failure(self) -> Iterator[None]:
        """Have transforms that hold data back hold again what then cannot be written."""
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
            if self._tell_sampler:
                with self._sampling:
                    self._sampler.extend(index)
        return index

    # Priorities and emptying -----------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give elements another priority, one for all or as many as there are elements, without gradients.

        `index` is an int, or int64 `[n]`, `[n, ndim]`, or a tuple of a tensor a dimension. A sampler that looks at no
        priorities warns. WrongKindError (a TypeError) for an index or a priority of no numbers, UsageError (a
        ValueError) for priorities that are negative or not finite, SchemaError (a RuntimeError) for another number of
        them: all with nothing changed.
        """
        if isinstance(index, slice | str) or index is None or index is Ellipsis or is_tensor_collection(index):
            raise WrongKindError(f"elements are named by their numbers, found a {type(index).__name__}")
        with self._sampling:
            self._sampler.update_priority(without_arrays(index), _numbers(priority), storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all elements, and where sampler and writer were; memory is kept.

        SchemaError (a RuntimeError), with nothing changed, for a dataset that does not allow writing.
        """
        with self._guard, self._sampling:
            self._writer.empty(empty_write_count)
            self._sampler.empty()
            self._storage.empty()
            self._transform.hold_back(None)
            self._forget_drawn()

    # Editing ----------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace elements that are there, by number, or an entry of all of them, by key; no element is added.

        Several indices in a tuple concern the dimensions of `rb[:]`. Data without dimensions that the index selects is
        repeated along them: `rb[0:2] = rb[0]`. Those that it has are the last ones, and none of size 1 is repeated. In
        a storage of a list, only a tensor or tensordict that has no rows is. Where all elements are replaced in memory,
        data may bring new entries, and `rb[key]` may be a new one: in a storage of tensors it is there until elements
        are written without it.

        Data goes through the transforms, but for those that hold data back, as `MultiStepTransform` does: what is
        assigned is what such a one returned, and takes no part in its windows. Entries go past all transforms.
        IndexError for elements that are not there, SchemaError (a RuntimeError) for data that is not like what is
        stored, MissingKeyError (a KeyError) for an entry that is unknown and cannot be added.
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
        """Send data `through` the transforms, without showing them the caller's own containers."""
        if data is None:
            raise SchemaError("None was given to write: did a function forget to return its data?")
        if self._transform.is_empty:
            return data
        return through(data.copy() if isinstance(data, TensorDictBase) else data)

    def _names_all(self, index: Any) -> bool:
        """Tell whether an index of one dimension of the user's layout names all that there is along it."""
        size = self._storage.shape[self._dim_extend]
        return index is Ellipsis or (isinstance(index, slice) and range(size)[index] == range(size))

    def _complete(self, data: Any, places: Any) -> Any:
        """Add to data the labels of the elements that it replaces."""
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
        """Return the index as storages take it; IndexError for elements that are not there."""
        rows, found = self._storage.shape[0], as_index(index, 1)
        highest = -1
        if isinstance(found, slice):
            highest = rows if found.stop is not None and found.stop > rows else -1
        elif isinstance(found, int):
            highest = found
        elif isinstance(found, torch.Tensor) and found.numel():
            highest = len(found) - 1 if found.dtype == torch.bool else int(found.max())
        if highest >= rows:
            raise IndexError(f"element {highest} was to be replaced, there are {rows}; extend() adds elements")
        return found

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first elements, as many as `data` has, or `end`; neither length nor cursor changes.

        Of a buffer whose `dim_extend` is above 0 these are the first along dimension 0 of `rb[:]`. Where all are
        replaced, data may bring new entries: see `rb[:] = data`.
        """
        self[: batch_length(data) if end is None else end] = data

    # Entries ---------------------------------------------------------------------------------------

    def set_(self, key: Key, value: Any) -> Any:
        """Replace an entry of all elements, in place and past the transforms; returns this buffer.

        `value` has the shape and element type of `rb[:][key]`, else SchemaError (a RuntimeError) is raised, as for a
        storage whose elements cannot be edited. MissingKeyError (a KeyError) for an entry that is not there.
        """
        return self._edit({key: value})

    def set_at_(self, key: Key, value: Any, index: Any) -> Any:
        """Replace an entry of the elements at `index`, as `set_` does of all; returns this buffer."""
        return self._edit({key: value}, without_arrays(index))

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Key] | None = None
    ) -> Any:
        """Replace several entries as `set_` does: all or none; returns this buffer.

        With `keys_to_update`, only those among the given entries. `clone` is accepted for the sake of TorchRL's
        signature: values are always copied.
        """
        values = dict(_flat(input_dict_or_td))
        if keys_to_update is not None:
            wanted = [_path(key) for key in keys_to_update]
            values = {key: value for key, value in values.items() if any(key[: len(part)] == part for part in wanted)}
        return self._edit(values)

    def _replace(self, key: Key, value: Any) -> None:
        """Replace an entry, or a nest of them, or add one that is new."""
        values = dict(_flat(value, _path(key)))
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
            for _, leaf, fitting in checked:
                leaf[index] = fitting
            for path, leaf, _ in checked:
                self._storage.put_back(path, leaf, index)
            self._storage.mark_changed(Change(keys=tuple(path for path, _, _ in checked)))
        return self

    def _leaf(self, key: Key) -> torch.Tensor:
        """Return an entry of valid elements, in the user's layout, in a tensor to edit."""
        leaf = self._storage.editable(_path(key))
        return leaf.transpose(0, self._dim_extend) if self._dim_extend else leaf


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _name(key: Key) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))


def _like(leaf: torch.Tensor, value: Any, key: Key) -> torch.Tensor:
    """Return `value` as a tensor of the leaf's element type; SchemaError for a tensor of another one."""
    if not isinstance(value, torch.Tensor):
        return torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
    if value.dtype != leaf.dtype:
        raise SchemaError(f"{_name(key)} is {value.dtype}, expected {leaf.dtype}")
    return value


def _flat(nest: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """List the leaves of a tensordict or a nest of dicts with their keys."""
    if not (is_tensor_collection(nest) or isinstance(nest, Mapping)):
        return [(path, nest)]
    found = []
    for key, value in nest.items():
        found += _flat(value, (*path, *((key,) if isinstance(key, str) else key)))
    return found


def _numbers(values: Any) -> torch.Tensor:
    """Return priorities without their gradients; WrongKindError (a TypeError) for what are no numbers."""
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, list | tuple):
        values = [value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value for value in values]
    if values is None:  # which numpy takes for NaN
        raise WrongKindError("priorities are numbers, found None")
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise WrongKindError(f"priorities are numbers, found a {type(values).__name__}: {error}") from error
