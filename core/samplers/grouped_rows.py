"""Rows of a storage grouped by the value of an entry, kept up to date row by row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
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
        return np.fromiter(chain.from_iterable(self._members), np.int64, self.rows)

    def place(self, rows: Numbers, ids: Sequence[Hashable]) -> None:
        """Put rows, int64 `[n]`, into the groups with these ids; new rows come with all rows before them."""
        if not self.rows and (np.bincount(rows) == 1).all():
            self._place_all(rows, ids)
            return
        more = int(rows.max(initial=-1)) + 1 - self.rows
        self._id_of += [_NOWHERE] * more
        self._place += [-1] * more
        for row, new in zip(rows.tolist(), ids, strict=True):
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

    def _place_all(self, rows: Numbers, ids: Sequence[Hashable]) -> None:
        """Do what `place` does for all rows at first, each once: in a tenth of the time that it takes one by one."""
        self._ids, numbers = _numbered(ids)
        self._numbers = {new: number for number, new in enumerate(self._ids)}
        order = np.argsort(numbers, kind="stable")
        stops = np.cumsum(np.bincount(numbers, minlength=len(self._ids)))
        starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
        grouped = rows[order]
        listed = grouped.tolist()
        self._members = [listed[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        number_of, place = np.empty_like(grouped), np.empty_like(grouped)
        number_of[grouped] = numbers[order]
        place[grouped] = np.arange(len(grouped)) - starts[numbers[order]]
        self._id_of = [self._ids[number] for number in number_of.tolist()]
        self._place = place.tolist()

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


def _numbered(ids: Sequence[Hashable]) -> tuple[list[Hashable], Numbers]:
    """Return the different ids in the order in which they come first, and of each id its number among these."""
    if set(map(type, ids)) in ({int}, {float}):  # to sort numbers is faster than to look them up
        values = np.asarray(ids)
        if values.dtype.kind in "iuf":
            _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            return [ids[place] for place in first[order].tolist()], rank[inverse]
    known = {new: number for number, new in enumerate(dict.fromkeys(ids))}
    return list(known), np.fromiter(map(known.__getitem__, ids), np.int64, len(ids))


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
        if flat.shape[1] < 2:
            return flat[:, 0].tolist() if flat.shape[1] else [()] * len(flat)
        return list(zip(*flat.T.tolist(), strict=True))
    ids = [_id_of(value) for value in found]
    strange = next((one for one in ids if not isinstance(one, Hashable)), None)
    if strange is not None:
        raise SchemaError(f"{name!r} is a {type(strange).__name__}, expected numbers, token ids or a string")
    return ids


def _id_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.reshape(-1).tolist())
    return tuple(value) if isinstance(value, list) else value
