"""Where a writer is in its storage: the row that comes next, and how many were written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from ..errors import SchemaError, UsageError
from ..storages import Counter, Storage
from ..storages.write_log import Generations

__all__ = ["Counting", "counts_in", "rows_in"]


class Counting:
    """The storage of a writer, its cursor and its counts; with the names that TorchRL's writers have for them."""

    tracks_generations = False
    """Whether this writer counts how often each row was written over."""

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
        """How many elements were ever written, along dimension 0."""
        return self._write_counter.value

    @write_count.setter
    def write_count(self, value: int) -> None:
        self._write_counter.value = value

    def generations_of(self, index: Any) -> torch.Tensor:
        """Return the generation of the row of each element at `index`, int64 of as many elements.

        `index` is an int, row numbers of any shape, and where the storage has several dimensions the coordinates
        `[..., ndim]` or a tuple of a tensor a dimension. -1 for rows that were never written or are not there, and for
        all rows of a writer that does not track generations.
        """
        rows = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
        if not isinstance(index, tuple) and self._storage is not None and self._storage.ndim > 1 and rows.dim() > 1:
            rows = rows[..., 0]
        generations = self._generations if self.tracks_generations else None
        return torch.full(rows.shape, -1) if generations is None else generations.at(rows.long())

    @property
    def _generations(self) -> Generations | None:
        """The generations of the storage's rows, which belong to the storage and to all that write to it."""
        return None if self._storage is None else self._storage.generations

    def _count_generations(self, index: Any) -> None:
        """Count a write to each row of an index, where anybody tracks generations; negative numbers stand for none."""
        if (generations := self._generations) is not None:
            rows = torch.as_tensor(index)
            if rows.dim() > 1:  # coordinates of all elements of the rows
                rows = rows[:: self.storage.shape[1:].numel(), 0]
            generations.count(rows[rows >= 0].reshape(-1))

    @final
    def unshare(self) -> None:
        """Count for this process alone from now on: its rows are a copy."""
        self._cursor_counter, self._write_counter = Counter(self.cursor), Counter(self.write_count)

    # Names of TorchRL's writers ---------------------------------------------------------------------

    def _mark_update(self, index: Any) -> None:
        """Inform the buffers attached to the storage which elements are new."""
        self._informed = True
        self.storage.notify(index)

    def _replicate_index(self, index: torch.Tensor) -> torch.Tensor:
        """Name the elements of whole rows: `[n]` becomes `[n * k, ndim]` where the storage has several dimensions."""
        storage = self.storage
        if storage.ndim == 1:
            return index
        parts = torch.meshgrid(index, *(torch.arange(size) for size in storage.shape[1:]), indexing="ij")
        return torch.stack(parts, -1).flatten(0, -2)

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
        """Leave the generator behind: torch cannot pickle it."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


def rows_in(storage: Storage) -> int:
    """Count the rows a storage has room for; 0 where that is only known when its first row has come."""
    if storage.ndim == 1:
        return storage.max_size
    return storage.max_size // max(1, storage.shape[1:].numel()) if len(storage) else 0


def counts_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Read `_cursor` and `_write_count`, which is 0 where an older TorchRL wrote none, out of a state.

    SchemaError for one that is missing, not a whole number, or negative.
    """
    counts = []
    for name, absent in (("_cursor", None), ("_write_count", 0)):
        value = state.get(name, absent)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise SchemaError(f"{name} is {value!r} in the state, expected is a count")
        counts.append(value)
    return counts[0], counts[1]
