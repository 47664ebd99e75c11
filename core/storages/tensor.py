"""A storage on tensors that are there already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict

from ..errors import SchemaError, UsageError
from .base import Storage
from .columns import plain_column, read_rows, write_rows
from .cursors import as_index, grown_rows, last_of_repeats, rows_of
from .memory import Memory
from .structure import structure_of

__all__ = ["TensorStorage"]


class TensorStorage(Storage):
    """Wraps a tensor, a tensordict, a tensorclass or a nest of them, and counts as full.

    Dimension 0 is the capacity; the first `ndim` dimensions, which all leaves share, count elements. A `max_size`
    that is neither the number of rows nor of elements raises UsageError (a ValueError), as do `storage=None` and a
    `device` other than the data's; `"auto"` follows the data. What is written must have the keys, element types
    and shapes of what is stored, else SchemaError (a RuntimeError) is raised and nothing changes.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> storage = TensorStorage(TensorDict({"action": torch.arange(4)}, [4]))
    >>> storage[torch.tensor([3, 0])]["action"]
    tensor([3, 0])
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise UsageError("a TensorStorage needs tensors to wrap, found None")
        self._storage = storage
        self.ndim = ndim
        self._look_over()
        super().__init__(math.prod(self._lead), compilable=compilable)
        if max_size not in (None, self._lead[0], self.max_size):
            raise UsageError(f"max_size is {max_size}, but the tensors hold {self.max_size} elements")
        found = self._columns[0].device
        self.device = found if device == "auto" else torch.device(device)
        if any(column.device.type != self.device.type for column in self._columns):
            raise UsageError(f"the tensors are on {found}, not on {self.device}", hint='say device="auto"')
        self._rows = self._lead[0]

    def _look_over(self) -> None:
        """Take the contents apart into columns, which must share their leading dimensions."""
        self._structure = structure_of(self._storage)
        self._leaf_names = [".".join(path) for path in self._structure.paths()]
        self._leaves = list(self._structure.leaves(self._storage))
        leads = {leaf.shape[: self.ndim] for leaf in self._leaves}
        if self.ndim < 1 or len(leads) != 1 or len(min(leads)) != self.ndim:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in self._leaves) or "no tensor"
            raise SchemaError(f"tensors that share their first {self.ndim} dimensions are expected, found {shapes}")
        self._lead = leads.pop()
        self._columns = [plain_column(leaf) for leaf in self._leaves]
        self._narrowed = (self._lead[0], self._columns)

    def __len__(self) -> int:
        return self._rows * math.prod(self._lead[1:])

    @property
    def shape(self) -> torch.Size:
        """Valid rows, then the other dimensions that count elements."""
        return torch.Size([self._rows, *self._lead[1:]])

    def _valid_columns(self) -> list[torch.Tensor]:
        if self._narrowed[0] != self._rows:
            self._narrowed = (self._rows, [column[: self._rows] for column in self._columns])
        return self._narrowed[1]

    # Reading ---------------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Read the valid elements at `index`: an int, a slice, a list, a mask, a tensor, or a tuple of coordinates.

        Tensors of row numbers and masks give fresh tensors; ints and slices give views of the stored ones.
        """
        found = read_rows(self._valid_columns(), as_index(index, self.ndim))
        batch = found[0].shape[: found[0].dim() - self._columns[0].dim() + self.ndim]
        typed = [
            rows if rows.dtype is leaf.dtype else rows.view(leaf.dtype)
            for rows, leaf in zip(found, self._leaves, strict=True)
        ]
        return self._structure.build(iter(typed), batch)

    def flatten(self) -> TensorStorage:
        """Return a one-dimensional storage of the valid elements, on the same memory where torch can."""
        if self.ndim == 1:
            return self
        size = torch.Size([len(self)])
        flat = [leaf[: self._rows].flatten(0, self.ndim - 1) for leaf in self._leaves]
        return TensorStorage(self._structure.build(iter(flat), size), device="auto", compilable=self.compilable)

    # Writing ---------------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write the rows of `data` at `cursor`, later ones over earlier ones where it repeats a row.

        An int takes one row without its leading dimension, a tuple of coordinates takes elements, anything else
        takes rows; a list and a lazy stack are rows one by one. Data and cursor may be views of what is stored here:
        they are read whole before the first row is written. The length grows up to the highest row written. A write
        beyond the capacity, or one that would leave rows below it unwritten, raises SchemaError.
        """
        index = as_index(cursor, self.ndim)
        if isinstance(index, tuple):
            self._set_elements(index, data)
        else:
            self._set_rows(rows_of(index, self._rows, self._lead[0]), data, single=isinstance(index, int))
        if set_cursor:
            self._last_cursor = cursor
        self.mark_changed()

    def _set_rows(self, rows: slice | torch.Tensor, data: Any, *, single: bool) -> None:
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        grown = grown_rows(rows, self._rows)
        if not single and isinstance(data, list | LazyStackedTensorDict):
            self._set_one_by_one(rows, data, count)
        else:
            lead = self._lead[1:] if single else (count, *self._lead[1:])
            values = self._apart(self._checked(data, lead))
            if not isinstance(rows, slice) and (kept := last_of_repeats(rows)) is not None:
                rows, values = rows[kept], [value[kept.to(value.device)] for value in values]
            for column, value in zip(self._columns, values, strict=True):
                write_rows(column, rows, value.unsqueeze(0) if single else value)
        self._rows = grown

    def _set_one_by_one(self, rows: slice | torch.Tensor, data: Any, count: int) -> None:
        items = data if isinstance(data, list) else data.unbind(0)
        if len(items) != count:
            raise SchemaError(f"{len(items)} rows given for {count} places")
        checked = [self._checked(item, self._lead[1:]) for item in items]
        width = len(self._columns)
        flat = self._apart([value for values in checked for value in values])
        places = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        for number, row in enumerate(places):
            for column, value in zip(self._columns, flat[number * width : (number + 1) * width], strict=True):
                column[row].copy_(plain_column(value))

    def _set_elements(self, index: tuple[Any, ...], data: Any) -> None:
        columns = self._valid_columns()
        chosen = columns[0][index].shape
        lead = chosen[: len(chosen) - columns[0].dim() + self.ndim]
        memory, values = Memory(self._columns), self._apart(self._checked(data, lead))
        index = tuple(memory.apart(part) if isinstance(part, torch.Tensor) else part for part in index)
        for column, value in zip(columns, values, strict=True):
            column[index] = plain_column(value).to(column.device)

    def _apart(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy those values that a write into the columns, any of them, might change before they are read."""
        memory = Memory(self._columns)
        return [memory.apart(value) for value in values]

    def _checked(self, data: Any, lead: Sequence[int]) -> list[torch.Tensor]:
        """Take `data` apart; its tensors must be what this storage keeps, with `lead` in front."""
        values = list(self._structure.leaves(data))
        for name, value, leaf in zip(self._leaf_names, values, self._leaves, strict=True):
            expected = torch.Size([*lead, *leaf.shape[self.ndim :]])
            if value.dtype != leaf.dtype or value.shape != expected:
                raise SchemaError(
                    f"{name or 'the tensor'} is {value.dtype} {list(value.shape)}, "
                    f"expected {leaf.dtype} {list(expected)}"
                )
        return values

    # State -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return `_storage` (tensors by dotted name, or the one tensor), `_len` and `initialized`, by reference."""
        if self._leaf_names == [""]:
            return {"_storage": self._leaves[0], "_len": len(self), "initialized": True}
        if len(set(self._leaf_names)) < len(self._leaf_names):
            raise SchemaError(f"two of the keys {', '.join(self._leaf_names)} are written alike with dots")
        return {
            "_storage": dict(zip(self._leaf_names, self._leaves, strict=True)),
            "_len": len(self),
            "initialized": True,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy what `state_dict` returned into the wrapped tensors; they must be alike in names, types and shapes."""
        saved, length = state_dict["_storage"], int(state_dict["_len"])
        tensors = {"": saved} if isinstance(saved, torch.Tensor) else dict(saved)
        names = [name for name in tensors if not name.startswith("__")]
        if sorted(names) != sorted(self._leaf_names):
            raise SchemaError(f"the state holds {', '.join(names)}; this storage holds {', '.join(self._leaf_names)}")
        rows, rest = divmod(length, math.prod(self._lead[1:]))
        if rest or not 0 <= rows <= self._lead[0]:
            raise SchemaError(f"the state counts {length} elements; this storage has room for {self.max_size}")
        values = [tensors[name] for name in self._leaf_names]
        for name, value, leaf in zip(self._leaf_names, values, self._leaves, strict=True):
            if (value.dtype, value.shape) != (leaf.dtype, leaf.shape):
                found = f"{value.dtype} {list(value.shape)}"
                raise SchemaError(f"{name or 'the tensor'} is {found}, expected {leaf.dtype} {list(leaf.shape)}")
        others = [
            (column, value)
            for column, value, leaf in zip(self._columns, values, self._leaves, strict=True)
            if value is not leaf
        ]
        fresh = self._apart([value for _, value in others])
        for (column, _), value in zip(others, fresh, strict=True):
            column.copy_(plain_column(value))
        self._rows = rows
        self.mark_changed()

    def _empty(self) -> None:
        self._rows = 0
        self._last_cursor = None
        self.mark_changed()

    def __getstate__(self) -> dict[str, Any]:
        derived = {"_structure", "_leaf_names", "_leaves", "_columns", "_narrowed"}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_over()
