"""Writes in a ring: when the storage is full, the oldest rows go first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import FormatError
from ..storages import Storage
from ..storages.generations import Generations
from .base import Writer, counts_in
from .batches import batch_length, capacity_rows
from .folder import counts_of, read_array, read_metadata, write_folder

__all__ = ["RoundRobinWriter"]

_GENERATIONS = "generation.memmap"


class RoundRobinWriter(Writer):
    """Writes one row after the other, and from the first again when the last is written.

    Rows run along dimension 0 of the storage. Of a batch with more rows than there are, the last ones are kept, in
    the places where they would have come to lie; the index names the place of every row of the batch. Registered to
    a storage that holds rows already, a fresh writer goes on behind them.

    With `track_generations` each row has a number that tells whether it was written over since: -1 before its first
    write, 0 after it, one more with every further write and with every emptying of the buffer. The numbers belong to
    the storage: other writers of it count on in them.

    >>> import torch
    >>> from rbtool.core.storages import TensorStorage
    >>> writer = RoundRobinWriter()
    >>> storage = TensorStorage(torch.zeros(4))
    >>> writer.register_storage(storage)
    >>> writer.extend(torch.arange(6.0))
    tensor([0, 1, 2, 3, 0, 1])
    >>> storage[:], writer
    (tensor([4., 5., 2., 3.]), RoundRobinWriter(cursor=2, write_count=6))
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable)
        self.tracks_generations = track_generations
        self._saved_generations: torch.Tensor | None = None

    def register_storage(self, storage: Storage) -> None:
        """Write into this storage from now on, behind the rows that it holds."""
        if storage is self._storage:
            return
        first = self._storage is None
        saved, rows = self._saved_generations if first else None, _rows_of(storage)
        generations = storage._generations
        if rows and self.tracks_generations and (generations is None or saved is not None):
            generations = self._made_generations(rows, saved)
        if not (first and (self._cursor or self._write_count)):  # a state was loaded, be it an older TorchRL's
            self._cursor = storage.shape[0] % rows if len(storage) else 0
        self._storage, storage._generations = storage, generations
        self._saved_generations = saved if generations is None else None
        self.tell_cursor()

    def tell_cursor(self) -> None:
        """Tell the storage where the next write begins, and give it generations that were loaded before its rows."""
        storage = self._storage
        if storage is None or not (rows := _rows_of(storage)):
            return
        storage.log.go_on_at(self._cursor % rows)
        if self._saved_generations is not None:
            storage._generations = self._made_generations(rows, self._saved_generations)
            self._saved_generations = None

    def go_on_behind(self) -> None:
        """Write next behind the rows of the storage, or at the first one if it is full; count from there."""
        storage = self._registered()
        self._empty()
        self._cursor = storage.shape[0] % _rows_of(storage) if len(storage) else 0
        self._write_count = storage.shape[0] if len(storage) else 0

    # Writing ---------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one row; return its index, an int, or where the storage has several dimensions int64 `[k, ndim]`."""
        storage = self._registered()
        rows = storage.max_size if storage.ndim == 1 else capacity_rows(storage.max_size, storage.ndim, data)
        row = self._cursor % rows
        generations = self._generations_for(rows)
        storage.set(row, self._labelled(data, row))
        self._cursor = (row + 1) % rows
        return self._written(row, 1, generations)

    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch of rows; return their indices, int64 `[n]`, or `[n * k, ndim]` of several dimensions."""
        storage, count = self._registered(), batch_length(data)
        rows = storage.max_size
        if storage.ndim > 1:
            rows = capacity_rows(rows, storage.ndim, data, batch=True)
        start = self._cursor % rows
        stop = start + count
        index = torch.from_numpy(np.arange(start, stop))  # half of the time of torch.arange
        place: Any = range(start, stop)  # storages copy a range at once, where they would scatter row numbers
        if stop > rows:
            place = index.remainder_(rows).clone()  # the storage keeps it; of rows named twice the last data stay
        generations = self._generations_for(rows)
        storage.set(place, self._labelled(data, place))
        self._cursor = stop % rows
        return self._written(index, count, generations)  # type: ignore[no-any-return]

    def write_at(self, index: int | torch.Tensor, data: Any) -> Any:
        """Write rows of your own choice, one for an int and a batch for int64 `[n]`; the cursor stays where it is.

        Returns the index as `add` and `extend` do. A row that is named twice keeps the later data. SchemaError for
        rows beyond the capacity, and for ones that would leave a gap behind the valid rows.
        """
        storage, single = self._registered(), isinstance(index, int)
        count = 1 if single else batch_length(data)
        place = index if isinstance(index, int) else torch.as_tensor(index, dtype=torch.int64).flatten().clone()
        generations = self._generations_for(capacity_rows(storage.max_size, storage.ndim, data, batch=not single))
        storage.set(place, self._labelled(data, place), set_cursor=False)
        return self._written(place if isinstance(place, int) else place.clone(), count, generations)

    def _labelled(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Return what is stored of data that goes to these rows."""
        return data

    def _written(self, rows: Any, count: int, generations: Generations | None) -> Any:
        """Count what was written and tell whom it concerns; return the index of the elements."""
        self._write_count += count
        storage = self._registered()
        if generations is not None:
            storage._generations, self._saved_generations = generations, None
            self._count_generations(torch.as_tensor(rows).reshape(-1))
        index = rows
        if storage.ndim > 1:
            index = self._replicate_index(torch.as_tensor(rows).reshape(-1))
        self._mark_update(index)
        return index

    def turn(self, row: int) -> None:
        """Follow a full ring that was loaded into a larger storage, where `row` became row 0: go on behind it."""
        rows = self._registered().shape[0]
        self._cursor = rows
        generations = self._saved_generations if self._generations is None else self._generations.rows
        if generations is not None:
            generations[:rows] = generations[:rows].roll(-row)

    # Generations -----------------------------------------------------------------------------------

    def _generations_for(self, rows: int) -> Generations | None:
        """Return the generations, made now for this many rows if it could not be done before; None if not kept."""
        if self._generations is not None or not self.tracks_generations:
            return self._generations
        return self._made_generations(rows, self._saved_generations)

    def _made_generations(self, rows: int, saved: torch.Tensor | None) -> Generations:
        generations = Generations(rows, shared=not self._compilable)
        if saved is not None:
            generations.rows.copy_(generations.fitting(saved))
        return generations

    def _take_over(self, cursor: int, write_count: int, generations: torch.Tensor | None) -> None:
        """Go on from a saved state, with nothing changed if its generations do not fit."""
        if self.tracks_generations and generations is not None:
            if self._generations is None:
                self._saved_generations = generations.clone()
            else:
                self._generations.rows.copy_(self._generations.fitting(generations))
        self._cursor, self._write_count = cursor, write_count
        self.tell_cursor()

    # State -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return `_cursor`, `_write_count` and, where they are kept, `_generation`, int64 `[rows]`."""
        state: dict[str, Any] = {"_cursor": self._cursor, "_write_count": self._write_count}
        if self.tracks_generations and self._generations is not None:
            state["_generation"] = self._generations.rows.clone()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; a writer that keeps no generations leaves them aside. SchemaError for another one's."""
        cursor, write_count = counts_in(state_dict)
        self._take_over(cursor, write_count, state_dict.get("_generation"))

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write `metadata.json` and, where generations are kept, `generation.memmap` into the folder `path`."""
        metadata: dict[str, Any] = {"cursor": self._cursor, "write_count": self._write_count}
        generations = self._generations if self.tracks_generations else None
        rows = None if generations is None else generations.rows
        if rows is not None:
            metadata |= {"generation_shape": list(rows.shape), "generation_dtype": str(rows.dtype)}
        write_folder(Path(path), metadata, _GENERATIONS, rows)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over what `dumps`, here or in TorchRL, wrote; into any capacity that holds it."""
        folder = Path(path)
        metadata = read_metadata(folder)
        if "rank_key" in metadata:
            raise FormatError(f"{folder} holds the state of a TensorDictMaxValueWriter, not of a round robin")
        cursor, write_count = counts_of(metadata, folder)
        generations = None
        if "generation_shape" in metadata:
            dtype, shape = metadata.get("generation_dtype"), metadata["generation_shape"]
            generations = read_array(folder / _GENERATIONS, dtype, shape)
        self._take_over(cursor, write_count, generations)


def _rows_of(storage: Storage) -> int:
    """Count the rows a storage has room for; 0 where that is only known when its first row has come."""
    if storage.ndim == 1:
        return storage.max_size
    return storage.max_size // max(1, storage.shape[1:].numel()) if len(storage) else 0
