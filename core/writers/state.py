"""The folder with the state of a writer: cursor and counts, and an array."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError
from ..format import fs
from ..format.digest import read_regular
from ..format.documents import dump_json, load_json
from ..format.syncing import replace_file
from ..state_folder import read_values, write_values
from ..storages.base import Storage


def rows_in(storage: Storage) -> int:
    """Return how many rows a storage has room for; 0 while its dimensions are unknown, before the first write."""
    if storage.ndim == 1:
        return storage.max_size
    return storage.max_size // max(1, storage.shape[1:].numel()) if len(storage) else 0


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
    """Write an array, if it is not empty, and metadata that describes it; otherwise remove the array of an older state.

    Each file is replaced atomically. A buffer that saves itself replaces the whole folder.
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
    """Read an array of this element type and shape.

    Raises:
        FormatError: type or shape is invalid.
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
