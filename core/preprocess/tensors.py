"""From a chunk of rows to the tensordict a function takes, and back from what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

from ..dataset import HIDDEN, Array
from ..storages.arrays import tensor_of, tensordict_of
from ..ted import DTYPES, Field, Key, key_name, numpy_dtype
from .failures import ResultRefused

__all__ = ["chunk_of", "columns_of"]

# Names tensordict keeps for itself: leaves called so would vanish from the folder.
_RESERVED = frozenset({"shape", "device", "_type"})
_TAKEN_FOLDERS = frozenset({"meta.json", "env_metadata.json", HIDDEN})


def chunk_of(columns: Mapping[Key, Array], fields: Mapping[Key, Field], rows: int) -> TensorDictBase:
    """Make the tensordict of batch size `[rows]`; its tensors share the arrays' memory."""
    return tensordict_of({key: tensor_of(array, fields[key]) for key, array in columns.items()}, (rows,))


def columns_of(result: Any, rows: int) -> dict[Key, tuple[str, Array]]:
    """Take what a function returned apart into element type by name and array, by key.

    Tensors may be views of the input, expanded, on another device, or part of a graph. ResultRefused for anything
    that is not a nest of tensors with `rows` rows each.
    """
    if not _is_nest(result):
        returned = "None" if result is None else type(result).__name__
        raise ResultRefused(f"it returned {returned}; a tensordict of {rows:,} rows is expected")
    columns = {}
    for key, value in _leaves(result, ()):
        name, array = _array_of(value, key)
        if not array.shape or len(array) != rows:
            found = f"{len(array):,} rows" if array.shape else "no rows"
            raise ResultRefused(
                f"it returned {found} of {key_name(key)!r} for {rows:,} steps; "
                "preprocess keeps every step in its place, so as many are expected"
            )
        columns[key] = name, array
    if not columns:
        raise ResultRefused("it returned no tensors")
    return columns


def _is_nest(value: Any) -> bool:
    return (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value)


def _leaves(nest: Any, prefix: Key) -> Iterator[tuple[Key, Any]]:
    for part, value in nest.items():
        if not isinstance(part, str):
            raise ResultRefused(f"it returned the key {part!r} of type {type(part).__name__}; keys are strings")
        if part in _RESERVED:
            raise ResultRefused(
                f"it returned the key {part!r}, which tensordict keeps for itself; call it {part + '_'!r}"
            )
        if not _is_nest(value):
            yield (*prefix, part), value
        elif part in _TAKEN_FOLDERS:
            raise ResultRefused(f"it returned the nested key {part!r}, whose place in the folder is taken")
        else:
            yield from _leaves(value, (*prefix, part))


def _array_of(value: Any, key: Key) -> tuple[str, Array]:
    """Element type and bytes of one leaf, in memory of its own or a view that is contiguous."""
    if isinstance(value, np.ndarray):
        name = value.dtype.newbyteorder("=").name
        _known(name, str(value.dtype), key)
        return name, np.ascontiguousarray(value, numpy_dtype(name)).reshape(value.shape)
    if not isinstance(value, torch.Tensor):
        raise ResultRefused(f"it returned {type(value).__name__} under {key_name(key)!r}; a tensor is expected")
    if value.is_nested or value.layout is not torch.strided:
        raise ResultRefused(f"it returned a nested or sparse tensor under {key_name(key)!r}; a dense one is expected")
    if value.device.type == "meta":
        raise ResultRefused(f"it returned a tensor without data (on meta) under {key_name(key)!r}")
    name = str(value.dtype).removeprefix("torch.")
    _known(name, str(value.dtype), key)
    tensor = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    return name, (tensor.view(torch.uint16) if name == "bfloat16" else tensor).numpy()


def _known(name: str, found: str, key: Key) -> None:
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ResultRefused(f"it returned {key_name(key)!r} as {found}, which cannot be stored; known are {known}")
