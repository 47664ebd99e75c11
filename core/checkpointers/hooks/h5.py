"""Ragged tensors to one entry an episode, as groups of an HDF5 file are, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from ...errors import CorruptDataError, SchemaError
from ...ted import Key, key_name
from ..ragged import ragged_tensor
from .flat import TED2Flat, entry_value

__all__ = ["H5Combine", "H5Split"]

_TRAJECTORY = "traj"


class H5Split(TED2Flat):
    """Makes of a tensordict of n ragged episodes the entries `traj_0`, `traj_1` … with the rows of one each; a save
    hook, to be called behind `TED2Nested`.

    Numbers are padded with zeros to the width of the last. Other entries stay beside them.
    """

    def __call__(self, data: Any, path: Any = None) -> TensorDict:
        """Return the episodes by name; SchemaError (a RuntimeError) for what are no ragged episodes."""
        if not isinstance(data, TensorDictBase) or data.ndim != 1:
            what = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
            raise SchemaError(f"a tensordict of episodes [n] is expected, found {what}")
        count = data.batch_size[0]
        width = len(str(max(count - 1, 0)))
        result = TensorDict({}, [])
        parts = [TensorDict({}, []) for _ in range(count)]
        for name in map(str, data.keys()):
            if isinstance(data.get(name), NonTensorData):
                result.set_non_tensor(name, entry_value(data, name))
        for key, leaf in _leaves(data):
            for part, rows in zip(parts, leaf.unbind(0), strict=True):
                part.set(key, rows)
        for number, part in enumerate(parts):
            result.set(f"{_TRAJECTORY}_{number:0{width}d}", part)
        return result


class H5Combine:
    """Undoes `H5Split`; a load hook, to be called before `Nested2TED`.

    Episodes are taken in the order of their numbers and copied one after the other: no second copy of all is made.
    """

    writes_in_place = True

    def __call__(self, data: Any, out: Any = None) -> TensorDict:
        """Return a tensordict of ragged episodes; `out` is not used.

        CorruptDataError (a ValueError) for episodes of different entries, types or shapes, SchemaError (a RuntimeError)
        for a tensordict without any.
        """
        names = _in_order([name for name in map(str, data.keys()) if name.startswith(_TRAJECTORY)])
        if not names:
            raise SchemaError(f"there is no entry {_TRAJECTORY}_0 of an episode")
        first = data.get(names[0])
        keys = [key for key, _ in _leaves(first)]
        result = TensorDict({}, [len(names)])
        for key in keys:
            result.set(key, _combined(data, names, key))
        for name in map(str, data.keys()):
            if name not in names:
                result.set_non_tensor(name, entry_value(data, name))
        odd = next((name for name in names if [key for key, _ in _leaves(data.get(name))] != keys), None)
        if odd is not None:
            raise CorruptDataError(f"the episode {odd} has other entries than {names[0]}")
        return result


def _combined(data: Any, names: list[str], key: Key) -> torch.Tensor:
    parts = [data.get((name, *key), None) for name in names]
    shapes = [None if part is None else (part.dtype, *part.shape[1:]) for part in parts]
    odd = next((name for name, shape in zip(names, shapes, strict=True) if shape is None or shape != shapes[0]), None)
    if odd is not None or not parts[0].dim():
        raise CorruptDataError(f"{key_name(key)!r} of the episode {odd or names[0]} is not like that of {names[0]}")
    table = torch.tensor([list(part.shape) for part in parts])
    ragged, flat = ragged_tensor(table, parts[0].dtype)
    row = 0
    for part in parts:
        flat[row : row + len(part)].copy_(part)
        row += len(part)
    return ragged


def _leaves(data: Any) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, value in data.items(include_nested=True, leaves_only=True):
        yield (name if isinstance(name, tuple) else (name,)), value


def _in_order(names: list[str]) -> list[str]:
    numbers = [name.rpartition("_")[2] for name in names]
    if all(number.isdecimal() for number in numbers):
        return [name for _, name in sorted(zip(map(int, numbers), names, strict=True))]
    return sorted(names)
