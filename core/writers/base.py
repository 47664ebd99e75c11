"""The contract of a writer: where new rows go."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..errors import SchemaError, UsageError
from ..storages import Storage
from ..storages.counter import Counter
from ..storages.generations import Generations

__all__ = ["Writer", "counts_in"]


class Writer(ABC):
    """Puts new elements into a storage and counts them.

    A write goes through four steps: everything is checked; the storage takes the data, whole or not at all; the
    cursor and the count of written elements move on; whoever is attached to the storage hears which elements are
    new. So a write that fails has changed nothing. The caller's data is never changed, not even by the writers that
    store an `"index"` beside it. Writers hold no locks: buffers do.

    Cursor and count have 64 bits and lie in shared memory, so that forked and spawned children go on in the same
    ring; with `compilable` they are numbers of this process. Ideas and names are those of TorchRL's writers.
    """

    tracks_generations = False
    """Whether this writer counts how often each row was written over."""

    in_time: ClassVar[bool] = True
    """Whether rows lie in the order in which they came, round a ring."""

    _rng: torch.Generator | None = None

    def __init__(self, compilable: bool = False) -> None:
        self._storage: Storage | None = None
        self._compilable = compilable
        self._cursor_counter = Counter(0, shared=not compilable)
        self._write_counter = Counter(0, shared=not compilable)

    @abstractmethod
    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or where the storage has several dimensions int64 `[k, ndim]`.

        SchemaError (a RuntimeError) for what the storage cannot take, with nothing changed.
        """

    @abstractmethod
    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch; return the indices of its elements, int64 `[n]`, or `[n * k, ndim]` of several dimensions.

        SchemaError (a RuntimeError) for what is no batch or what the storage cannot take, with nothing changed.
        """

    def register_storage(self, storage: Storage) -> None:
        """Write into this storage from now on."""
        self._storage = storage

    def tell_cursor(self) -> None:
        """Tell the storage where the ring goes on, where this is the writer of a ring."""

    def go_on_behind(self) -> None:
        """Begin anew behind the rows that the storage holds: a load brought rows and no state of a writer."""
        storage = self._registered()
        self._empty()
        self._cursor = len(storage) % storage.max_size
        self._write_count = len(storage)

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
        return None if self._storage is None else self._storage._generations

    def _count_generations(self, rows: torch.Tensor) -> None:
        """Count a write to each of these rows, where anybody tracks generations; negative numbers stand for none."""
        if (generations := self._generations) is not None:
            generations.count(rows[rows >= 0])

    @property
    def _cursor(self) -> int:
        """The row that is written next."""
        return self._cursor_counter.value

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self._cursor_counter.value = value

    @property
    def _write_count(self) -> int:
        """How many elements were ever written, along dimension 0."""
        return self._write_counter.value

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self._write_counter.value = value

    def _registered(self) -> Storage:
        if self._storage is None:
            raise UsageError(f"this {type(self).__name__} has no storage to write to", hint="call register_storage()")
        return self._storage

    def _replicate_index(self, index: torch.Tensor) -> torch.Tensor:
        """Name the elements of whole rows: `[n]` becomes `[n * k, ndim]` where the storage has several dimensions."""
        others = self._registered().shape[1:]
        if not others:
            return index
        parts = torch.meshgrid(index, *(torch.arange(size) for size in others), indexing="ij")
        return torch.stack(parts, -1).flatten(0, -2)

    def _mark_update(self, index: Any) -> None:
        """Tell the buffers attached to the storage which elements are new."""
        for buffer in self._registered()._attached:
            buffer.mark_update(index)

    def _empty(self, empty_write_count: bool = True) -> None:
        """Start again at the first row; with `empty_write_count`, count from 0."""
        self._cursor = 0
        if empty_write_count:
            self._write_count = 0
        if (generations := self._generations) is not None:
            generations.count_all()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: at least `_cursor` and `_write_count` where anything can be written."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; SchemaError for one that is not this writer's, with nothing changed."""

    @abstractmethod
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state into the folder `path`, which is made where it is missing."""

    @abstractmethod
    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in the folder `path`, with nothing changed where that cannot be.

        DatasetNotFoundError where there is none, FormatError and CorruptDataError for one that cannot be read.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Leave the generator behind: torch cannot pickle it."""
        return {name: value for name, value in self.__dict__.items() if name != "_rng"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor}, write_count={self._write_count})"


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
