"""The contract of a storage: where rows live."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from .cursors import as_index
from .generations import Generations
from .write_log import Change, WriteLog

__all__ = ["Storage", "register_checkpointer"]

_CHECKPOINTERS: dict[type[Storage], Callable[[], Any]] = {}


def register_checkpointer(storage_class: type[Storage], factory: Callable[[], Any]) -> None:
    """Say what makes the checkpointer of a storage, of this class or derived from it, that was given none.

    Checkpointers know storages and not the other way round: they register when `core.checkpointers` is imported.
    """
    _CHECKPOINTERS[storage_class] = factory


class Storage(ABC):
    """Keeps up to `max_size` elements under the numbers 0 to `len(storage) - 1`.

    `storage[i]` reads, `storage[i] = data` writes without moving the last cursor, iteration goes over the valid
    rows. `checkpointer` saves and loads this storage; None takes the one that belongs to its class. `compilable`
    promises that `torch.compile` may trace the methods. A `max_size` below 1 raises UsageError.

    Ideas and names are those of TorchRL's storages.
    """

    ndim = 1
    """Leading dimensions of the data that count elements."""

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int):
            raise UsageError(f"a storage's max_size is a whole number, found {max_size!r}")
        if max_size < 1:
            raise UsageError(f"a storage of {max_size} elements was asked for; at least 1 is needed")
        self.max_size = max_size
        self.compilable = compilable
        self._checkpointer = checkpointer
        self._attached: list[Any] = []
        self._rng: torch.Generator | None = None
        self._generations: Generations | None = None  # how often rows were written over, if a writer counts it
        self._last_cursor: Any = None
        self._revision = 0
        self.numbered_by: str | None = None
        """The entry in which a writer keeps the number of every row, where one does."""
        self._turned: int | None = None  # by how many rows a full ring was turned that was loaded into this larger one
        self._arriving: tuple[bool, int | None] = (False, None)  # whether a buffer loads a ring, and where it goes on
        self.log = WriteLog()

    @abstractmethod
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write `data` at `cursor`; nothing changes if it cannot be written whole.

        `set_cursor` remembers `cursor` as the place of the newest data.
        """

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Read the valid elements at `index`; IndexError for what is not there."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the valid elements."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return contents and length, by reference."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over contents and length from what `state_dict` returned."""

    @abstractmethod
    def _empty(self) -> None:
        """Forget all elements; memory is kept."""

    @property
    def shape(self) -> torch.Size:
        """Valid rows, then the other dimensions that count elements."""
        return torch.Size([len(self)])

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows and the same length."""
        return False

    @property
    def revision(self) -> int:
        """A number that grows with every change of the contents; who caches what it derived from them compares it."""
        return self._revision

    def mark_changed(self, change: Change | None = None) -> None:
        """Count a change. Call it after editing in place what `get` returned by reference."""
        self._revision += 1
        self.log.changed(change)

    def _count_write(self, cursor: Any, rows: slice | torch.Tensor | None, capacity: int, *, set_cursor: bool) -> None:
        """Count a write at `cursor` of these rows, of `capacity`; None where not all of a row was written."""
        if set_cursor:
            self._last_cursor = cursor
        if set_cursor and rows is not None:
            self._revision += 1
            self.log.wrote(rows, capacity)
        else:
            self.mark_changed(Change(rows))

    def _turn_of(self, rows: int, room: int, capacity: int | None, last_row: int | None) -> int:
        """Say which row is to become row 0 of `rows` that are loaded from a storage of `capacity`, where that is known.

        A buffer has a full ring turned in a larger storage, so that its rows lie in the order of time in front of free
        ones: its writer goes on behind them. A storage that is loaded alone keeps every row where it was.
        """
        ring, next_row = self._arriving
        next_row = next_row if last_row is None else last_row + 1
        full = next_row is not None and (next_row < rows if capacity is None else rows == capacity)
        self._turned = next_row % rows if next_row is not None and ring and full and 0 < rows < room else None
        return self._turned or 0

    def _begin_anew(self, next_row: int) -> None:
        """Count a change of all there is; the ring goes on at this row, unless a writer says otherwise."""
        self._last_cursor = None
        self.log.go_on_at(next_row)
        self.mark_changed()

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one entry of the elements at `index`, a slice or a tensor; None where some of them have none.

        SchemaError (a RuntimeError) for elements that are no tensordicts.
        """
        rows = self.get(index)
        parts = rows if isinstance(rows, list) else [rows]
        if not all(is_tensor_collection(part) for part in parts):
            kind = next(type(part).__name__ for part in parts if not is_tensor_collection(part))
            raise SchemaError(f"an entry of tensordicts was asked for, the storage holds a {kind}")
        found = [part.get(key, None) for part in parts]
        if not found or not all(isinstance(part, torch.Tensor) for part in found):
            return None
        return torch.stack(found) if isinstance(rows, list) else found[0]

    # Editing ---------------------------------------------------------------------------------------

    def lacks_dimensions(self, data: Any) -> bool:
        """Tell whether data has fewer dimensions than all elements together."""
        return False

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data for each element at `index`, if `data` lacks dimensions of it; anything else as it is.

        The rule is that of tensordicts: the dimensions that data has are the last ones that `index` selects. A
        dimension of size 1 is not repeated.
        """
        return data

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all valid elements in a tensor to edit, which is then to be given to `put_back`.

        SchemaError for a storage whose elements cannot be edited, MissingKeyError for an entry that is not there.
        """
        raise SchemaError(f"entries of a {type(self).__name__} cannot be edited")

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Write what `editable` returned, and was edited at `index`; nothing is to do for views of what is stored."""

    def add_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all valid elements; MissingKeyError for a storage that cannot take new ones."""
        name = ".".join(next(iter(values)))
        raise MissingKeyError(f"{name!r} was asked for, and a {type(self).__name__} takes no new entries here")

    def set_cells(self, index: Any, data: Any, *, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions; IndexError for a storage that has one."""
        count = len(index) if isinstance(index, tuple) else 1
        raise IndexError(f"{count} coordinates given, the storage has 1 dimension")

    def episode_lengths(self) -> NDArray[np.int64] | None:
        """List the lengths of the episodes whose steps are the rows, in their order; None where that is not known.

        Rows behind them are of one that is under way.
        """
        return None

    def flatten(self) -> Storage:
        """Return a one-dimensional storage of the valid elements; here it is the storage itself."""
        return self

    def contains(self, item: Any) -> Any:
        """Tell whether an element is valid: a bool for an int, a bool tensor for a tensor of indices.

        Where `ndim` is more than 1, the last dimension of a tensor holds the coordinates of each element.
        """
        if not isinstance(item, torch.Tensor):
            return 0 <= int(item) < self.shape[0]
        inside = (item >= 0) & (item < torch.tensor(self.shape if self.ndim > 1 else self.shape[0], device=item.device))
        return inside.all(-1) if self.ndim > 1 else inside

    # Buffers ---------------------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Remember a buffer (anything with `mark_update(index)`) that is to hear of elements written by index."""
        if not any(buffer is known for known in self._attached):
            self._attached.append(buffer)

    # Saving ----------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Any:
        """What saves and loads this storage. Setting None goes back to the one that belongs to its class."""
        if self._checkpointer is None:
            self._checkpointer = _checkpointer_for(type(self))
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to the folder `path`, with the storage's checkpointer."""
        self.checkpointer.dumps(self, path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over what the checkpoint in the folder `path` holds."""
        self.checkpointer.loads(self, path)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it is about to write through `hook(data, path=...)`."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it has read through `hook(data, out=...)`."""
        self.checkpointer.register_load_hook(hook)

    # Python's own protocols ------------------------------------------------------------------------

    def __contains__(self, item: Any) -> bool:
        found = self.contains(item)
        return bool(found.all()) if isinstance(found, torch.Tensor) else bool(found)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, self.repeated(index, data), set_cursor=False)
        if not self._attached:
            return
        if isinstance(index, list | np.ndarray):
            index = as_index(index, self.ndim)
        if isinstance(index, torch.Tensor) and index.dim() > 1:  # a buffer would take a matrix for coordinates
            index = index.nonzero() if index.dtype == torch.bool else index.reshape(-1)
        for buffer in self._attached:
            buffer.mark_update(index)

    def __iter__(self) -> Iterator[Any]:
        return (self.get(row) for row in range(self.shape[0]))

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no buffer yet, and draws from no generator of this one.
        return self.__dict__ | {"_attached": [], "_rng": None}


def _checkpointer_for(storage_class: type[Storage]) -> Any:
    for ancestor in storage_class.__mro__:
        if ancestor in _CHECKPOINTERS:
            return _CHECKPOINTERS[ancestor]()
    raise UsageError(
        f"no checkpointer is known for a {storage_class.__name__}",
        hint="import rbtool.core.checkpointers first, or give the storage a checkpointer",
    )
