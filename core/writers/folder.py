"""The folder of a writer's state: `metadata.json`, and beside it one array where there is one.

The layout is TorchRL's, so that either reads what the other wrote. Each file is replaced at once, the array before
the metadata that describes it; a buffer that saves itself replaces the folder as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError
from ..format import dump_json, fs, load_json, read_regular
from ..state_folder import read_values, write_values

__all__ = ["counts_of", "read_array", "read_metadata", "read_state", "write_folder", "write_state"]

METADATA = "metadata.json"
_STATE = "state"


def write_folder(folder: Path, metadata: dict[str, Any], array_name: str, array: torch.Tensor | None) -> None:
    """Write the metadata and the array called `array_name`; where it is None, remove the one of an older state."""
    fs.make_folder(folder)
    if array is not None and array.numel():
        fs.replace_file(folder / array_name, array.contiguous().numpy().tobytes())
    fs.replace_file(folder / METADATA, json.dumps(json.loads(dump_json(metadata))).encode())
    if array is None or not array.numel():
        fs.remove(folder / array_name)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state: the counts as metadata, and what else there is into the folder `state` as a tensordict."""
    values = {name: value for name, value in state.items() if name not in ("_cursor", "_write_count")}
    if values:
        write_values(folder / _STATE, values)
    metadata = {"cursor": state["_cursor"], "write_count": state["_write_count"]}
    fs.make_folder(folder)
    fs.replace_file(folder / METADATA, json.dumps(metadata).encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote."""
    cursor, write_count = counts_of(read_metadata(folder), folder)
    values = read_values(folder / _STATE) if (folder / _STATE).is_dir() else {}
    return {"_cursor": cursor, "_write_count": write_count} | values


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata; DatasetNotFoundError where there is none, FormatError where it is not what it should be."""
    path = folder / METADATA
    if not path.is_file():
        raise DatasetNotFoundError(f"{folder} holds no writer's state: it has no {METADATA}")
    metadata = load_json(path)
    if not isinstance(metadata, dict):
        raise FormatError(f"{path} is a {type(metadata).__name__}, expected is an object")
    return metadata


def counts_of(metadata: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Read the cursor and the write count, which is 0 where an older TorchRL wrote none, out of the metadata.

    FormatError for one that is missing, not a whole number, or negative.
    """
    counts = []
    for name, absent in (("cursor", None), ("write_count", 0)):
        value = metadata.get(name, absent)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise FormatError(f"{folder / METADATA} has {value!r} for {name}, expected is a count")
        counts.append(value)
    return counts[0], counts[1]


def read_array(path: Path, dtype: Any, shape: Any) -> torch.Tensor:
    """Read an array whose element type and shape the metadata gives.

    FormatError for a type or a shape that cannot be, CorruptDataError for a file that is missing or has another size.
    """
    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or not isinstance(shape, list):
        raise FormatError(f"{path} is said to be {dtype!r} {shape!r}, expected an element type and a shape")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise FormatError(f"{path} is said to have the shape {shape!r}")
    data = read_regular(path) if path.is_file() else b""
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise CorruptDataError(f"{path} has {len(data):,} bytes, {expected:,} are expected: it was cut or removed")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(kind).reshape(shape)
