"""The state of a writer: its cursor and counts, and the folder that they are saved to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from ..format import fs
from ..format.digest import read_regular
from ..format.documents import dump_json, load_json
from ..format.syncing import replace_file
from ..state_folder import read_values, write_values
from ..storages.base import Storage
from ..storages.write_log import Counter, Generations


class Counting:
    """The storage of a writer, its cursor and its counts, also under the names of TorchRL's writers."""

    tracks_generations = False
    """Whether this writer counts how often each row is overwritten."""

    generator: torch.Generator | None = None
    """Where random numbers come from; None is torch's own generator. A buffer sets it; it is not pickled."""

    _informed = False

    def __init__(self, compilable: bool = False) -> None:
        self._storage: Storage | None = None
        self._compilable = compilable
        self._cursor_counter = Counter(0, shared=not compilable)
        self._write_counter = Counter(0, shared=not compilable)

    @property
    def storage(self) -> Storage:
        """The storage that is written to; UsageError where none is registered."""
        if self._storage is None:
            raise UsageError(f"this {type(self).__name__} has no storage to write to", hint="call register_storage()")
        return self._storage

    @property
    def cursor(self) -> int:
        """The row that is written next."""
        return self._cursor_counter.value

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._cursor_counter.value = value

    @property
    def write_count(self) -> int:
        """How many elements were written in all, along dimension 0."""
        return self._write_counter.value

    @write_count.setter
    def write_count(self, value: int) -> None:
        self._write_counter.value = value

    @property
    def counters(self) -> list[Counter]:
        """The numbers that every write changes, in memory that processes share."""
        return [self._cursor_counter, self._write_counter]

    def generations_of(self, index: Any) -> torch.Tensor:
        """Return the generation of the row of each element at `index`, int64 of as many elements.

        `index` is an int, row numbers of any shape, or for a storage of several dimensions coordinates `[..., ndim]`
        or a tuple of one tensor a dimension. -1 for rows that were never written or do not exist, and for all rows if
        generations are not tracked.
        """
        rows = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
        if not isinstance(index, tuple) and self._storage is not None and self._storage.ndim > 1 and rows.dim() > 1:
            rows = rows[..., 0]
        generations = self._generations if self.tracks_generations else None
        return torch.full(rows.shape, -1) if generations is None else generations.at(rows.long())

    @property
    def _generations(self) -> Generations | None:
        """The generations of the storage's rows, which all writers of the storage share."""
        return None if self._storage is None else self._storage.generations

    def _count_generations(self, index: Any) -> None:
        """Count a write to each row of an index, if the storage has generations; skips negative numbers."""
        if (generations := self._generations) is not None:
            rows = torch.as_tensor(index)
            if rows.dim() > 1:  # coordinates of all elements of the rows
                rows = rows[:: self.storage.shape[1:].numel(), 0]
            generations.count(rows[rows >= 0].reshape(-1))

    @final
    def unshare(self) -> None:
        """Stop sharing cursor and counts with other processes: the rows of this process are a copy."""
        self._cursor_counter, self._write_counter = Counter(self.cursor), Counter(self.write_count)

    # Names of TorchRL's writers ---------------------------------------------------------------------

    def _mark_update(self, index: Any) -> None:
        """Notify the buffers attached to the storage of new elements."""
        self._informed = True
        self.storage.notify(index)

    def _replicate_index(self, index: torch.Tensor) -> torch.Tensor:
        """Return the elements of rows `[n]`: the rows, or `[n * k, ndim]` for a storage of several dimensions."""
        storage = self.storage
        if storage.ndim == 1:
            return index
        others = storage.shape[1:]
        found = np.empty((len(index), others.numel(), storage.ndim), np.int64)
        found[:, :, 0] = index.numpy(force=True)[:, None]
        found[:, :, 1:] = np.indices(others).reshape(len(others), -1).T
        return torch.from_numpy(found.reshape(-1, storage.ndim))

    @property
    def _cursor(self) -> int:
        return self.cursor

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self.cursor = value

    @property
    def _write_count(self) -> int:
        return self.write_count

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self.write_count = value

    @property
    def _rng(self) -> torch.Generator | None:
        return self.generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, which torch cannot pickle."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


def rows_in(storage: Storage) -> int:
    """Return how many rows a storage has room for; 0 while its dimensions are unknown, before the first write."""
    if storage.ndim == 1:
        return storage.max_size
    return storage.max_size // max(1, storage.shape[1:].numel()) if len(storage) else 0


def counts_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return `_cursor` and `_write_count`, by default 0, of a state; SchemaError unless both are counts."""
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
    """Write an array, if it is not empty, and the metadata that describes it; else remove the array of an older state.

    Each file is replaced atomically; a buffer that saves itself replaces the folder as a whole.
    """
    fs.make_folder(folder)
    if array is not None and array.numel():
        replace_file(folder / array_name, array.contiguous().numpy().tobytes())
    replace_file(folder / METADATA, json.dumps(json.loads(dump_json(metadata))).encode())
    if array is None or not array.numel():
        fs.remove(folder / array_name)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the counts as metadata, and all other values as a tensordict into the folder `state`."""
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
    """Read the metadata; DatasetNotFoundError if there is none, FormatError if it is no object."""
    path = folder / METADATA
    if not path.is_file():
        raise DatasetNotFoundError(f"{folder} holds no writer's state: it has no {METADATA}")
    metadata = load_json(path)
    if not isinstance(metadata, dict):
        raise FormatError(f"{path} is a {type(metadata).__name__}, expected an object")
    return metadata


def counts_of(metadata: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `_cursor` and `_write_count`, by default 0, of the metadata in `folder`; FormatError for no counts."""
    counts = {}
    for name, absent in (("cursor", None), ("write_count", 0)):
        value = metadata.get(name, absent)
        if not _is_count(value):
            raise FormatError(f"{folder / METADATA} has {value!r} for {name}, expected a count")
        counts[f"_{name}"] = value
    return counts


def read_array(path: Path, dtype: Any, shape: Any) -> torch.Tensor:
    """Read an array of this element type and shape.

    FormatError for an invalid type or shape, CorruptDataError for a file that is missing or has another size.
    """
    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or not isinstance(shape, list):
        raise FormatError(f"{path} is said to be {dtype!r} {shape!r}, expected an element type and a shape")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise FormatError(f"{path} is said to have the shape {shape!r}")
    data = read_regular(path) if path.is_file() else b""
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise CorruptDataError(f"{path} has {len(data):,} bytes, expected {expected:,}: it was cut or removed")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(kind).reshape(shape)
