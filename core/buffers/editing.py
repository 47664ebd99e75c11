"""What is changed of elements that a buffer holds already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError
from ..storages.cursors import as_index
from ..storages.write_log import Change
from ..writers.batches import batch_length
from .layout import is_key, swap, without_arrays
from .reading import Reading

__all__ = ["Editing"]

Key = str | tuple[str, ...]
_WHOLE = slice(None)


class Editing(Reading):
    """Replaces elements and entries of elements. What fails changes nothing, nor is the caller's data changed."""

    _label: ClassVar[str | None] = None
    """The entry that the writer stores with the data; data without it leave it unchanged."""

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
