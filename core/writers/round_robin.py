"""Writers that fill a storage as a ring: once it is full, the oldest rows are overwritten.

    capacity 4                   cursor    write_count      rows 0 1 2 3
    extend 3 elements  a b c     3         3                     a b c _
    extend 2 elements  d e       1         5                     e b c d       wraps: (3 + 2) % 4 = 1
    extend 6 elements  f … k     3         11                    i j k h       only the last 4 are kept

The row of an element is its number modulo the capacity. A batch that is longer than the ring gives the same result as
its elements one by one, but elements that a later one overwrites are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass

from ..errors import FormatError, SchemaError, require_flags
from ..storages.base import Storage
from ..storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from ..storages.tensor import TensorStorage
from ..storages.write_log import Generations
from ..ted.schema import Numbers
from ..torchrl_classes import counterpart
from .base import (
    INDEX,
    Labels,
    Writer,
    batch_length,
    capacity_rows,
    counts_of,
    read_array,
    read_metadata,
    rows_in,
    write_folder,
)

_GENERATIONS = "generation.memmap"


@counterpart
class RoundRobinWriter(Writer):
    """Writes row after row, and continues at the first row after the last one: the storage is a ring.

    Rows are counted along dimension 0 of the storage. If a batch has more rows than the storage, only its last rows are
    stored, where they would be if all were written one by one; the returned index still has a row for each element. For
    a storage that already holds rows, a new writer starts behind them; for a full ring, behind the newest row.

    Args:
        compilable: see `Writer`.
        track_generations: whether to count how often each row is overwritten. The generation of a row is -1 before its
            first write, 0 after it, and increases by 1 with every further write and every `empty`. Generations belong
            to the storage: another writer of it continues the count.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> writer = RoundRobinWriter()
    >>> storage = TensorStorage(torch.zeros(4))
    >>> writer.register_storage(storage)
    >>> writer.extend(torch.arange(6.0))
    tensor([0, 1, 2, 3, 0, 1])
    >>> storage[:], writer
    (tensor([4., 5., 2., 3.]), RoundRobinWriter(cursor=2, write_count=6))
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        require_flags(track_generations=track_generations)
        super().__init__(compilable)
        self.tracks_generations = track_generations
        self._saved_generations: torch.Tensor | None = None
        self._prepared: Generations | None = None  # installed after the storage has stored the data
        self.reuse: Callable[[int], Numbers] | None = None
        """Returns up to the given number of rows that a consuming sampler has freed, which are written first; set by a
        buffer."""
        self._cursor_after: int | None = None
        """Where the cursor goes after a write that includes freed rows; None for any other write."""

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """If generations are tracked, give the storage new ones, or the generations of a state loaded before."""
        saved, rows = self._saved_generations if previous is None else None, rows_in(storage)
        if rows and self.tracks_generations and (storage.generations is None or saved is not None):
            storage.generations, self._saved_generations = self._made_generations(rows, saved), None

    # Writing ---------------------------------------------------------------------------------------

    def place(self, data: Any, count: int, capacity: int) -> range | torch.Tensor:
        """Return the rows from the cursor on; rows freed by a consuming sampler come first."""
        start = self.cursor % capacity
        if self.tracks_generations:
            self._prepared = self._generations_for(capacity)
        self._cursor_after = None
        if self.reuse is not None and len(freed := self.reuse(count)):
            return self._behind(freed, start, count - len(freed), capacity)
        return range(start, start + count)

    def _behind(self, freed: Numbers, start: int, count: int, capacity: int) -> torch.Tensor:
        """Return the freed rows, followed by `count` other rows from `start` on."""
        ahead = (start + np.arange(count + len(freed))) % capacity
        others = ahead[~np.isin(ahead, freed)][:count]
        if len(others) < count:  # more elements than rows
            others = ahead[:count]
        self._cursor_after = (int(others[-1]) + 1) % capacity if count else start
        return torch.from_numpy(np.concatenate([freed, others]))

    def place_one(self, data: Any, capacity: int) -> int:
        """Return the row at the cursor."""
        if self.tracks_generations:
            self._prepared = self._generations_for(capacity)
        self._cursor_after = None
        if self.reuse is not None and len(freed := self.reuse(1)):
            self._cursor_after = self.cursor
            return int(freed[0])
        return self.cursor % capacity

    def on_written(self, rows: Any, capacity: int) -> None:
        """Move the cursor behind the rows."""
        if self._cursor_after is not None:
            self.cursor, self._cursor_after = self._cursor_after, None
            self.storage.log.go_on_at(self.cursor % capacity)
        else:
            self.cursor = ((rows if isinstance(rows, int) else int(rows[-1])) + 1) % capacity
        if self._prepared is not None:
            self._install(self._prepared)

    def write_as_is(self, data: Any, single: bool) -> Any:
        """Write a tensordict, or a dict of NumPy arrays and numbers without making tensors of them.

        Return None, with nothing changed, for other data; and for subclasses and other storages, which may override
        methods that would be skipped here.
        """
        storage: Any = self._storage
        plain = type(self) in _RINGS and type(storage) in _TENSORS and storage.ndim == 1
        if not plain or self.reuse is not None or storage.generations is not None:
            return None
        if (rows := storage.array_rows(self._label())) is None:
            return None
        taken = (rows.tensors if type(data) is TensorDict else rows.take)(data, single)
        if taken is None:
            return None
        (count, values), lent = taken, storage.log.lent
        if lent and type(values) is list:  # arrays may be views of stored rows
            values = list(map(np.array, values))
        capacity, start = storage.max_size, self._cursor_counter.value
        cursor, numbers = (start, start) if single else (range(start, start + count), np.arange(start, start + count))
        if not storage.write_arrays(rows, cursor, values, numbers, lent):
            return None
        self._cursor_counter.value = (start + count) % capacity
        self._write_counter.add(count)
        index = start if single else torch.from_numpy(numbers)
        storage.notify(index)
        return index

    def _label(self) -> str | None:
        """Return the entry in which this writer stores the number of each row; None if it stores none."""
        return None

    def write_at(self, index: int | torch.Tensor, data: Any) -> Any:
        """Write at given rows, without moving the cursor.

        Args:
            index: an int for one row, or int64 `[n]` for a batch; if a row occurs twice, the later data counts.
            data: the element or batch.

        Returns:
            The index, as `add` and `extend` return it.

        Raises:
            SchemaError: (a RuntimeError) a row is beyond the capacity, or would leave a gap behind the valid rows.
        """
        storage, single = self.storage, isinstance(index, int)
        if not single:
            batch_length(data)
        place = index if isinstance(index, int) else torch.as_tensor(index, dtype=torch.int64).flatten().clone()
        generations = self._generations_for(capacity_rows(storage.max_size, storage.ndim, data, batch=not single))
        storage.set(place, self.prepare(data, place), set_cursor=False)
        if generations is not None:
            self._install(generations)
        return self._written(place if isinstance(place, int) else place.clone())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator and `reuse`, which a buffer has set."""
        return super().__getstate__() | {"reuse": None}

    def on_rotate(self, row: int) -> None:
        """Rotate the generations with the rows."""
        rows = self.storage.shape[0]
        generations = self._saved_generations if self._generations is None else self._generations.rows
        if generations is not None:
            generations[:rows] = generations[:rows].roll(-row)

    # Generations -----------------------------------------------------------------------------------

    @property
    def _generations(self) -> Generations | None:
        """The generations of the storage's rows; loaded ones are installed as soon as the storage has rows."""
        storage, saved = self._storage, self._saved_generations
        if storage is None:
            return None
        if saved is not None and storage.generations is None and (rows := rows_in(storage)):
            self._install(self._made_generations(rows, saved))
        return storage.generations

    def _generations_for(self, rows: int) -> Generations | None:
        """Return the generations, made for this many rows if there are none yet; None if they are not tracked."""
        if self._generations is not None or not self.tracks_generations:
            return self._generations
        return self._made_generations(rows, self._saved_generations)

    def _install(self, generations: Generations) -> None:
        self.storage.generations = generations
        self._prepared = self._saved_generations = None

    def _made_generations(self, rows: int, saved: torch.Tensor | None) -> Generations:
        generations = Generations(rows, shared=not self._compilable)
        if saved is not None:
            generations.rows.copy_(generations.fitting(saved))
        return generations

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `_generation`, int64 `[rows]`, if generations are tracked."""
        generations = self._generations if self.tracks_generations else None
        return {} if generations is None else {"_generation": generations.rows.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load generations, if they are tracked; SchemaError for another number of rows."""
        saved = state.get("_generation")
        if not self.tracks_generations or saved is None:
            return
        if self._generations is None:
            self._saved_generations = saved.clone()
        else:
            self._generations.rows.copy_(self._generations.fitting(saved))

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write `metadata.json` and, if generations are tracked, `generation.memmap`."""
        metadata: dict[str, Any] = {"cursor": state["_cursor"], "write_count": state["_write_count"]}
        rows = state.get("_generation")
        if rows is not None:
            metadata |= {"generation_shape": list(rows.shape), "generation_dtype": str(rows.dtype)}
        write_folder(folder, metadata, _GENERATIONS, rows)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read a state of any capacity written by `write_state` or by TorchRL."""
        metadata = read_metadata(folder)
        if "rank_key" in metadata:
            raise FormatError(f"{folder} holds the state of a TensorDictMaxValueWriter, not of a RoundRobinWriter")
        state = counts_of(metadata, folder)
        if "generation_shape" in metadata:
            dtype, shape = metadata.get("generation_dtype"), metadata["generation_shape"]
            state["_generation"] = read_array(folder / _GENERATIONS, dtype, shape)
        return state


@counterpart
class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` for tensordicts that also stores the row number of every element, as `"index"`.

    `"index"` is int64 with the data's batch size, and is never added to the caller's tensordict. Tensorclasses, and
    data in storages whose rows have no `"index"`, are stored without it.

    Args:
        compilable, track_generations: see `RoundRobinWriter`.

    Raises:
        SchemaError: (a RuntimeError) when written: the data is not a tensordict.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"action": torch.zeros(4), "index": torch.zeros(4).long()}, [4]))
    >>> writer = TensorDictRoundRobinWriter()
    >>> writer.register_storage(storage)
    >>> writer.extend(TensorDict({"action": torch.ones(3)}, [3]))
    tensor([0, 1, 2])
    >>> storage[:]["index"]
    tensor([0, 1, 2, 0])
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        require_flags(track_generations=track_generations)
        super().__init__(compilable, track_generations=track_generations)
        self._labels = Labels()

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Forget whether rows have an `"index"`; the next write determines it for the new storage."""
        super().on_register(storage, previous)
        self._labels = Labels()

    def write_as_is(self, data: Any, single: bool) -> Any:
        """Write an element or a batch; None also before the first write, which determines whether rows have numbers."""
        return None if self._labels.kept is None else super().write_as_is(data, single)

    def _label(self) -> str | None:
        return INDEX if self._labels.kept else None

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Add the row numbers as `"index"`."""
        if is_tensorclass(data):
            return data
        if not is_tensor_collection(data):
            raise SchemaError(
                f"{type(self).__name__} needs tensordicts, found a {type(data).__name__}",
                hint="take a RoundRobinWriter",
            )
        return self._labels.put(data, rows, self.storage)


_RINGS = frozenset({RoundRobinWriter, TensorDictRoundRobinWriter})
_TENSORS = frozenset({TensorStorage, LazyTensorStorage, LazyMemmapStorage})
