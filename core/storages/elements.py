"""Data of several elements: how many there are, some of them, and the shape that they are read in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import SchemaError
from .cursors import last_of_repeats
from .structure import structure_of

__all__ = ["NoRowsError", "elements_of", "objects_of", "require_like", "rows_without_repeats", "taken", "unflattened"]


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
            raise NoRowsError(f"{count} elements are expected, found a {type(data).__name__} that has no rows")
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
        f"several rows cannot be written from a {type(data).__name__}; a list, tuple, set, range, array, tensor or "
        "tensordict of one object a row is expected"
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


def _is_tensor(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or is_tensor_collection(data)


def _stacked(elements: list[Any]) -> Any:
    try:
        return torch.stack(elements)
    except (RuntimeError, TypeError, KeyError) as error:
        raise SchemaError(f"the elements are not alike: {error}".splitlines()[0]) from error


def require_like(data: Any, like: Any) -> None:
    """Raise SchemaError unless `data` has the keys, element types and shapes of `like`."""
    structure = structure_of(like)
    for path, found, expected in zip(structure.paths(), structure.leaves(data), structure.leaves(like), strict=True):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            name = ".".join(path) or "the tensor"
            raise SchemaError(
                f"{name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
