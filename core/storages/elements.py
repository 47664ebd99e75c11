"""The elements in data: how many there are, some of them, and single entries of those in a storage."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import MissingKeyError, SchemaError
from .cursors import last_of_repeats
from .pytree import tree_spec_of
from .reports import Reports
from .write_log import Change


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


class Entries(Reports):
    """What storages of tensors do with single entries. By default nothing can be edited or added."""

    @abstractmethod
    def read_at(self, index: Any) -> Any:
        """Return the valid elements at `index`, in any form; IndexError for what is not there."""

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

    # Editing ---------------------------------------------------------------------------------------

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
