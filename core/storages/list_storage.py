"""Storages that keep elements in a Python list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, is_tensorclass

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import IndexedStorage
from .cursors import as_index, grown_rows, rows_of
from .elements import copied, objects_of
from .item_documents import item_of_state, items_of_states, state_of_item
from .items import Tree, to_device, tree_of


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
            raise IndexError(f"row is {row}, expected one of {len(self._items)} rows") from None

    def _rows(self, index: torch.Tensor) -> list[int]:
        if index.dtype != torch.bool:
            rows: list[int] = index.tolist()
            return rows
        if len(index) != len(self._items):
            raise IndexError(f"the mask is for {len(index)} rows, expected {len(self._items)}")
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

        With `alone` they replace all that is there.
        """
        return items if self.device is None else [to_device(item, self.device) for item in items]

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
        return copied(data.expand(count, *data.shape))

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

    def trees(self) -> Iterator[Tree]:
        """Yield the tree of every object, its tensors by reference: what a checkpoint is written from."""
        return map(tree_of, self._items)

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, which describes it; tensors stand there by reference.

        An item of `_storage` is a tensor, a dict of an object's tensors by dotted path, or another object as it is.
        """
        states = [state_of_item(tree) for tree in self.trees()]
        return {"_storage": [tensors for tensors, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `save_state` returned, here or in TorchRL; tensors are copied.

        SchemaError if there is no room for it. A state of TorchRL's with anything but tensors and tensordicts in it
        has lost their types: that raises TypeError, as it does there.
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


class LazyStackStorage(ListStorage):
    """Keeps tensordicts one by one; several are read as a lazy stack along `stack_dim`, which may be negative.

    Their shapes may differ, but not the number of their batch dimensions; that, anything but a tensordict or a
    tensorclass, and tensordicts with too few batch dimensions for `stack_dim` raise SchemaError (a RuntimeError)
    when written. An int reads one as it is; of several, the tensors are the storage's own, but not the containers.

    >>> from tensordict import TensorDict
    >>> storage = LazyStackStorage(10, stack_dim=-1)
    >>> storage.set(range(2), [TensorDict({"a": torch.zeros(n, 3)}, [n]) for n in (4, 5)])
    >>> storage[:].batch_size
    torch.Size([-1, 2])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        if type(stack_dim) is not int:
            raise UsageError(f"stack_dim is {stack_dim!r}, expected an int")
        self.stack_dim = stack_dim

    def _gathered(self, items: list[Any]) -> Any:
        if items:
            # An entry that is put into the batch is put into none of the elements, nor into one of them twice.
            return LazyStackedTensorDict.lazy_stack([item.copy() for item in items], self.stack_dim)
        if not self._items:
            return TensorDict({}, [0])
        one: Any = torch.stack([self._items[0]], self.stack_dim)  # no rows, but keys and shapes
        return one[(slice(None),) * (self.stack_dim % one.batch_dims) + (slice(0, 0),)]

    # Editing ---------------------------------------------------------------------------------------

    @property
    def _element_dims(self) -> int:
        return self._items[0].batch_dims if self._items else 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all elements, stacked; SchemaError where these differ in shape."""
        parts = [item.get(key, None) for item in self._items]
        if not parts:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        missing = next((row for row, part in enumerate(parts) if part is None), None)
        if missing is not None:
            raise MissingKeyError(f"{'.'.join(key)!r} is not in element {missing}, expected in all")
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise SchemaError(f"{'.'.join(key)!r} is no tensor, expected the key of a tensor")
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise SchemaError(f"{'.'.join(key)!r} differs in shape or type; replace elements with rb[i] = …")
        return torch.stack(parts, self._dimension)

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Give the elements that `index` concerns tensors of their own: those they have may be the caller's."""
        touched = torch.zeros(values.shape, dtype=torch.bool)
        touched[index] = True
        pairs = zip(values.unbind(self._dimension), touched.unbind(self._dimension), strict=True)
        for row, (value, chosen) in enumerate(pairs):
            if chosen.any():
                item = self._items[row].copy()
                item.set(key, value.clone())
                self._items[row] = item

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all elements; SchemaError where these differ in batch size, or values do not fit."""
        if not self._items or any(is_tensorclass(item) for item in self._items):
            super().create_entries(values)
        size = self._items[0].batch_size
        if any(item.batch_size != size for item in self._items):
            raise SchemaError("elements differ in shape, and cannot get a new entry together; use rb[i] = …")
        expected = [*size[: self._dimension], len(self._items), *size[self._dimension :]]
        for path, value in values.items():
            if list(value.shape[: len(expected)]) != expected:
                raise SchemaError(
                    f"{'.'.join(path)!r} is {list(value.shape)}, expected {expected} in front: "
                    "a new entry is one of all elements"
                )
        items = [item.copy() for item in self._items]
        for path, value in values.items():
            for item, part in zip(items, value.unbind(self._dimension), strict=True):
                item.set(path, part.clone())
        self._items = items

    @property
    def _dimension(self) -> int:
        """The dimension that several elements are stacked along, counted from the front."""
        dimensions: int = self._items[0].batch_dims + 1
        return self.stack_dim % dimensions

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        for item in items:
            if not is_tensor_collection(item):
                raise SchemaError(f"a {type(item).__name__} cannot be stacked lazily, expected a tensordict")
        self._refuse_other_dimensions({item.batch_dims for item in [*items, *([] if alone else self._items[:1])]})
        return super()._prepared(items, alone=alone)

    def _refuse_other_dimensions(self, dimensions: set[int]) -> None:
        if len(dimensions) > 1:
            found = " and ".join(map(str, sorted(dimensions)))
            raise SchemaError(f"tensordicts of {found} batch dimensions cannot be in one lazy stack")
        if any(not -count - 1 <= self.stack_dim <= count for count in dimensions):
            raise SchemaError(f"tensordicts of {dimensions.pop()} batch dimensions have no dimension {self.stack_dim}")
