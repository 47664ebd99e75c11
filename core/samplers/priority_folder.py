"""The folder of a prioritized sampler's state, as TorchRL writes it: two trees' leaves, and numbers in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CorruptDataError, DatasetNotFoundError, SchemaError
from ..format import fs, load_json

__all__ = ["NEVER_WRITTEN", "SCHEMA_VERSION", "plain_priorities", "read_priorities", "write_priorities"]

SCHEMA_VERSION = 1
"""What a state says of itself; states without it are older, and may mean something else by their maximum."""

NEVER_WRITTEN = torch.finfo(torch.float32).max
"""What the tree of minima holds for an element that was never written; the tree of sums holds 0."""

_METADATA = "sampler_metadata.json"
_FILES = {"_sum_tree": "sumtree.memmap", "_min_tree": "mintree.memmap"}
_NUMBERS = ("_alpha", "_beta", "_eps", "_max_capacity")


def write_priorities(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a folder; the numbers last, each file at once."""
    fs.make_folder(folder)
    for name, file in _FILES.items():
        fs.replace_file(folder / file, state[name].numpy().tobytes())
    metadata: dict[str, Any] = {name: float(state[name]) for name in ("_alpha", "_beta", "_eps")}
    metadata["_max_priority"] = [float(number) for number in state["_max_priority"]]
    metadata["_max_capacity"] = float(state["_max_capacity"])
    metadata["_schema_version"] = int(state["_schema_version"])
    fs.replace_file(folder / _METADATA, json.dumps(metadata).encode())


def read_priorities(folder: Path, capacity: int | None) -> dict[str, Any]:
    """Read what `write_priorities`, or TorchRL, wrote, of this capacity; None stands for any.

    DatasetNotFoundError where there is nothing, SchemaError (a RuntimeError) for another capacity, FormatError for
    numbers that cannot be read, CorruptDataError for a file that is missing or has another size.
    """
    if not (folder / _METADATA).is_file():
        raise DatasetNotFoundError(f"{folder} holds no priorities: it has no {_METADATA}")
    metadata = load_json(folder / _METADATA)
    try:
        state: dict[str, Any] = {name: float(metadata[name]) for name in _NUMBERS}
        state["_max_priority"] = _largest(metadata["_max_priority"])
        if "_schema_version" in metadata:
            state["_schema_version"] = int(metadata["_schema_version"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptDataError(f"{folder / _METADATA} cannot be read: {error!r}") from error
    if capacity is None:
        capacity = int(state["_max_capacity"]) if 1 <= state["_max_capacity"] < math.inf else 0
        if capacity != state["_max_capacity"]:
            raise CorruptDataError(f"{folder / _METADATA} cannot be read: _max_capacity is {state['_max_capacity']:g}")
    if state["_max_capacity"] != capacity:
        raise SchemaError(
            f"{folder} holds {state['_max_capacity']:g} priorities, the sampler's max_capacity is {capacity}"
        )
    return state | {name: _leaves(folder / file, capacity) for name, file in _FILES.items()}


def plain_priorities(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with tensors where that of a live sampler of TorchRL's has its trees, and None for no maximum.

    A tree is a compiled object with a length, which gives the leaves at an index.
    """
    found = dict(state)
    try:
        for name in _FILES:
            tree = found.get(name)
            if tree is not None and not isinstance(tree, torch.Tensor) and callable(getattr(tree, "query", None)):
                found[name] = torch.as_tensor(tree[torch.arange(len(tree))], dtype=torch.float64)
        if "_max_priority" in found and not isinstance(found["_max_priority"], torch.Tensor):
            found["_max_priority"] = _largest(found["_max_priority"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"the priorities in the state cannot be read: {error!r}") from error
    return found


def _largest(given: Any) -> torch.Tensor:
    """Return the largest priority and its element, float64 `[2]`, with -1 where none was given."""
    value, number = (None, None) if given is None else given
    return torch.tensor(
        [0.0, -1.0] if value is None else [float(value), -1.0 if number is None else float(number)],
        dtype=torch.float64,
    )


def _leaves(path: Path, capacity: int) -> torch.Tensor:
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing")
    if path.stat().st_size != 8 * capacity:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes, expected {8 * capacity}")
    return torch.from_numpy(np.fromfile(path, np.float64))
