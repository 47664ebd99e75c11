"""A storage that keeps any objects in a Python list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch
from tensordict import is_tensor_collection

from ..errors import SchemaError
from .base import IndexedStorage
from .cursors import as_index, grown_rows, rows_of
from .elements import NoRowsError, objects_of
from .item_states import item_of_state, items_of_states, state_of_item
from .items import Node, moved, take_apart

__all__ = ["ListStorage", "NoRowsError"]


class ListStorage(IndexedStorage):
    """Keeps up to `max_size` objects of any kind, by reference; None is room for 2^63-1.

    An int reads and writes one object. Anything else that names rows (a slice, list, mask, array, tensor) reads a
    list of objects, and writes one object a row from a list, tuple, set, range, array, tensor or tensordict. With
    `device`, tensors and tensordicts, also those inside dicts, lists and tuples, are moved there when written.

    A write beyond `max_size` or past the end, and one with more or fewer objects than rows, raises SchemaError (a
    RuntimeError), which is also a TypeError for a dict or a text where several objects are due. Nothing changes then.
    The objects live in one process: passing the storage to a spawned one raises SchemaError.

    >>> storage = ListStorage(10)
    >>> storage.set(range(2), ["a text", {"a": 1}])
    >>> storage[[1, 0]]
    [{'a': 1}, 'a text']
    """

    returns_objects: ClassVar[bool] = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__((1 << 63) - 1 if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._items: list[Any] = []

    def __len__(self) -> int:
        return len(self._items)

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read one object for an int, else the list of objects at `index`."""
        found = index if type(index) is int else _one_dimensional(index)
        if isinstance(found, int):
            return self._shown(self._item(found))
        if isinstance(found, slice):
            return self._gathered(self._items[found])
        return self._gathered([self._item(row) for row in self._rows(found)])

    def _item(self, row: int) -> Any:
        try:
            return self._items[row]
        except IndexError:
            raise IndexError(f"row {row} was asked for, there are {len(self._items)}") from None

    def _rows(self, index: torch.Tensor) -> list[int]:
        if index.dtype != torch.bool:
            rows: list[int] = index.tolist()
            return rows
        if len(index) != len(self._items):
            raise IndexError(f"a mask of {len(index)} rows was given, there are {len(self._items)}")
        return self._rows(index.nonzero().squeeze(1))

    def _shown(self, item: Any) -> Any:
        """Turn what is kept of one object into the object."""
        return item

    def _gathered(self, items: list[Any]) -> Any:
        """Turn a fresh list of what is kept of some objects into what reading them gives."""
        return items

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor:
        """Write one object at an int, else one of `data` at each row, later ones over earlier ones.

        All are moved and checked before the first is put in place.
        """
        if type(cursor) is int and 0 <= cursor < len(self._items):
            self._items[cursor] = self._prepared([data])[0]
            return slice(cursor, cursor + 1)
        return self._write(_one_dimensional(cursor), data)

    def _write(self, index: int | slice | torch.Tensor, data: Any) -> slice | torch.Tensor:
        """Write, and return the rows that were written."""
        rows = rows_of(index, len(self._items), self.max_size)
        if not isinstance(rows, slice) and not len(rows):
            rows = slice(0, 0)
        grown = grown_rows(rows, len(self._items))
        if isinstance(index, int):
            self._place(rows, grown, self._prepared([data]))
        else:
            items = objects_of(data)
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            if len(items) != count:
                raise SchemaError(f"{len(items)} objects given for {count} rows")
            self._place(rows, grown, self._prepared(items))
        return rows

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        """Turn objects into what is kept of them; may raise, nothing has changed yet.

        `alone` says that they replace all that is there.
        """
        return items if self.device is None else [moved(item, self.device) for item in items]

    def _place(self, rows: slice | torch.Tensor, grown: int, kept: list[Any]) -> None:
        """Put prepared objects in place; a reader never sees a row without its object."""
        if isinstance(rows, slice):
            self._items[rows] = kept
            return
        by_row = dict(zip(rows.tolist(), kept, strict=True))
        fresh = [by_row.pop(row) for row in range(len(self._items), grown)]
        for row, item in by_row.items():
            self._items[row] = item
        self._items += fresh

    def repeated(self, index: Any, data: Any) -> Any:
        """Return copies of one tensor or tensordict for several rows; data that has rows, or may have, as it is."""
        if not (isinstance(data, torch.Tensor) or is_tensor_collection(data)) or data.ndim != self._element_dims:
            return data
        found = _one_dimensional(index)
        if isinstance(found, int):
            return data
        rows = rows_of(found, len(self._items), self.max_size)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return data.expand(count, *data.shape).clone()

    @property
    def _element_dims(self) -> int:
        """How many dimensions a tensor has that is surely one element, and not several."""
        return 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Refuse: elements need not be alike."""
        raise SchemaError(f"a {type(self).__name__} keeps elements one by one; replace them with rb[i] = …")

    def clear_rows(self) -> None:
        """Forget all objects."""
        self._items = []

    # State -----------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Yield every object taken apart, its tensors by reference: what a checkpoint is written from."""
        return (take_apart(item, lambda tensor: tensor) for item in self._items)

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, which describes it; tensors stand there by reference.

        An item of `_storage` is a tensor, a dict of an object's tensors by dotted path, or another object as it is.
        """
        states = [state_of_item(node) for node in self.nodes()]
        return {"_storage": [tensors for tensors, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `save_state` returned, here or in TorchRL; tensors are copied.

        SchemaError if there is no room for it. A state of TorchRL's with anything but tensors and tensordicts in it
        does not say what it was: that raises TypeError, as it does there.
        """
        saved = state["_storage"]
        self.require_room(len(saved))
        if "_metadata" in state:
            items = items_of_states(saved, state["_metadata"])
        else:
            items = [item_of_state(state) for state in saved]
        self.replace_all(items)

    def replace_all(self, items: list[Any], *, capacity: int | None = None, last_row: int | None = None) -> None:
        """Forget all objects and keep these; nothing changes if they cannot all be kept.

        They are from a storage of `capacity` rows of which `last_row` was written last, where that is known: a buffer
        has the oldest come first if it was full and this is larger.
        """
        self.require_room(len(items))
        self._take_over(self._prepared(items, alone=True), capacity, last_row)

    def _take_over(self, kept: list[Any], capacity: int | None = None, last_row: int | None = None) -> None:
        turn = self.rotation_of(len(kept), self.max_size, capacity, last_row)
        self._items = [*kept[turn:], *kept[:turn]]
        self.mark_replaced(len(kept) % self.max_size, last_row if self.rotated is None else len(kept) - 1)

    def require_room(self, count: int) -> None:
        """Raise SchemaError unless so many objects can be loaded."""
        if count > self.max_size:
            raise SchemaError(f"{count} objects are to be loaded; this storage has room for {self.max_size}")

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot be shared with a spawned process: its objects live in this one",
                hint="use a LazyMemmapStorage, or a LazyTensorStorage with shared_init=True",
            )
        return super().__getstate__()


def _one_dimensional(index: Any) -> int | slice | torch.Tensor:
    """Bring whatever names rows into an int, a slice or a vector."""
    while isinstance(index, tuple):
        if len(index) != 1:
            raise SchemaError(f"{len(index)} coordinates given; a list has one dimension")
        index = index[0]
    found = as_index(index, 1)
    if not isinstance(found, torch.Tensor):
        return found  # type: ignore[return-value]
    if found.dim() == 0:
        return int(found)
    if found.dim() != 1:
        raise IndexError(f"rows are named by a vector, found one of shape {list(found.shape)}")
    return found
