"""Rows of a storage grouped by the value of an entry, kept up to date row by row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import MissingKeyError, SchemaError
from ..storages.base import Storage
from ..storages.tensor import TensorStorage
from .boundaries import Key, stored_entry

Numbers: TypeAlias = NDArray[np.int64]


class GroupedRows:
    """Groups of rows, numbered from 0: `len()` counts groups.

    Adding, moving and taking out a row takes constant time. The order of groups and of their rows depends on what was
    done; rows placed once more in the order of `in_order()` have the same one.
    """

    def __init__(self) -> None:
        self._id_of: list[Hashable] = []  # of each row
        self._place: list[int] = []  # of each row in its group
        self._members: list[list[int]] = []
        self._ids: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self._id_of)

    def members(self, group: int) -> Sequence[int]:
        """Return the rows of a group, not to be edited."""
        return self._members[group]

    def in_order(self) -> Numbers:
        """Return all rows, group by group; int64 `[rows]`."""
        return np.array([row for members in self._members for row in members], np.int64)

    def place(self, rows: Sequence[int], ids: Sequence[Hashable]) -> None:
        """Put rows into the groups with these ids; new rows come with all rows before them."""
        more = max(rows, default=-1) + 1 - self.rows
        self._id_of += [_NOWHERE] * more
        self._place += [-1] * more
        for row, new in zip(rows, ids, strict=True):
            old = self._id_of[row]
            if old is not _NOWHERE:
                if old == new:
                    continue
                self._take_out(row, old)
            number = self._numbers.get(new)
            if number is None:
                number = self._numbers[new] = len(self._members)
                self._members.append([])
                self._ids.append(new)
            members = self._members[number]
            self._id_of[row], self._place[row] = new, len(members)
            members.append(row)

    def _take_out(self, row: int, old: Hashable) -> None:
        """Take a row out of its group, and the group out of the list if it was the last one."""
        number = self._numbers[old]
        members, place = self._members[number], self._place[row]
        last = members.pop()
        if last != row:
            members[place], self._place[last] = last, place
        if members:
            return
        del self._numbers[old]
        members, moved = self._members.pop(), self._ids.pop()
        if moved != old:
            self._members[number], self._ids[number], self._numbers[moved] = members, moved, number


_NOWHERE = object()


def values_at(storage: Storage, key: Key, rows: Numbers) -> torch.Tensor | list[Any]:
    """Return an entry of rows: a tensor `[n, ...]`, or a list of values where the storage holds single elements.

    MissingKeyError (a KeyError) if some of the rows have no such entry.
    """
    found: torch.Tensor | list[Any] | None = None
    if isinstance(storage, TensorStorage):
        leaf = stored_entry(storage, key)
        found = None if leaf is None else leaf[torch.from_numpy(rows).to(leaf.device)]
    else:
        elements = storage.get(torch.from_numpy(rows))
        values = [element.get(key, None) for element in elements.unbind(0)] if len(rows) else []
        if all(value is not None for value in values):
            found = [value if isinstance(value, torch.Tensor) else getattr(value, "data", value) for value in values]
    if found is None:
        raise MissingKeyError(f"{'.'.join(key)!r} is not in the storage, or not in all of its elements")
    return found


def ids_at(storage: Storage, key: Key, rows: Numbers) -> list[Hashable]:
    """Return the ids of rows: numbers, strings, or tuples of several numbers; SchemaError for NaN, and other types."""
    found, name = values_at(storage, key, rows), ".".join(key)
    values = (
        [found] if isinstance(found, torch.Tensor) else [value for value in found if isinstance(value, torch.Tensor)]
    )
    if any(bool(value.isnan().any()) for value in values):
        raise SchemaError(f"{name!r} is NaN somewhere: it belongs to no group")
    if isinstance(found, torch.Tensor):
        flat = found.reshape(len(found), -1)
        return flat[:, 0].tolist() if flat.shape[1] == 1 else [tuple(row) for row in flat.tolist()]
    ids = [_id_of(value) for value in found]
    strange = next((one for one in ids if not isinstance(one, Hashable)), None)
    if strange is not None:
        raise SchemaError(f"{name!r} is a {type(strange).__name__}, expected numbers, token ids or a string")
    return ids


def _id_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.reshape(-1).tolist())
    return tuple(value) if isinstance(value, list) else value
