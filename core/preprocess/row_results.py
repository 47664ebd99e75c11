"""Gathers the rows that a function returns one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from ..format import Array
from ..ted import Key, numpy_dtype
from .block import Column
from .tensors import Layout, require_layout, row_of, tensor_of_column

__all__ = ["RowResults"]

_NO_BATCH = torch.Size([])


@dataclass(slots=True)
class _Leaf:
    """Where one leaf of the rows goes, and what it has to be to be copied there at once."""

    key: Key
    dtype: torch.dtype
    shape: torch.Size
    rows: tuple[torch.Tensor, ...] = ()

    def takes(self, value: Any) -> bool:
        """Tell whether a value is a plain tensor that needs no second look."""
        return (
            type(value) is torch.Tensor
            and value.dtype is self.dtype
            and value.layout is torch.strided
            and value.is_cpu
            and not value.requires_grad
            and not value.is_nested
            and value.shape == self.shape
        )


# The entries of a nest in the order in which the first row had them.
_Plan: TypeAlias = "tuple[tuple[str, _Leaf | _Plan], ...]"


class RowResults:
    """`rows` results, each copied as it comes: a function may use its memory anew for the next one.

    The first row decides keys, element types and shapes. Rows are put within the stretch that `begin` names last.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stretch = (0, rows)
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._leaves: list[_Leaf] = []
        self._plan: _Plan = ()

    def forget_first(self) -> None:
        """Let the first row decide anew, if it lies in the stretch that is begun."""
        if not self._stretch[0]:
            self._layout, self._arrays, self._leaves, self._plan = {}, {}, [], ()

    def begin(self, start: int, stop: int) -> None:
        """Take the rows `[start, stop)` next; no more of them should be begun than a few hundred."""
        self._stretch = (start, stop)
        for leaf in self._leaves:
            leaf.rows = self._tensor(leaf.key)[start:stop].unbind(0)

    def put(self, place: int, result: Any) -> None:
        """Take the result for the row `place` of the stretch; ResultRefused unless it is one row like the first."""
        if self._layout and self._put_at_once(place, result):
            return
        columns = row_of(result)
        layout = {key: (column.dtype, column.values.shape) for key, column in columns.items()}
        if not self._layout:
            self._decide(layout, result)
        require_layout(layout, self._layout, "the first row")
        for key, column in columns.items():
            self._arrays[key][self._stretch[0] + place] = column.values

    def columns(self) -> dict[Key, Column]:
        """All rows, once they were put."""
        return {key: Column(self._layout[key][0], array) for key, array in self._arrays.items()}

    def _put_at_once(self, place: int, result: Any) -> bool:
        if type(result) is TensorDict and result.batch_size != _NO_BATCH:
            return False
        try:
            return _copied(result, self._plan, place)
        except (ValueError, RuntimeError):  # another number of entries; a tensor without a plain shape
            return False

    def _decide(self, layout: Layout, result: Any) -> None:
        self._layout = layout
        self._arrays = {
            key: np.zeros((self._rows, *shape), numpy_dtype(dtype)) for key, (dtype, shape) in layout.items()
        }
        self._plan = self._planned(result, ())
        self.begin(*self._stretch)

    def _planned(self, nest: Any, prefix: Key) -> _Plan:
        return tuple((part, self._leaf_or_plan(value, (*prefix, part))) for part, value in nest.items())

    def _leaf_or_plan(self, value: Any, key: Key) -> _Leaf | _Plan:
        if key not in self._layout:
            return self._planned(value, key)
        tensor = self._tensor(key)
        leaf = _Leaf(key, tensor.dtype, tensor.shape[1:])
        self._leaves.append(leaf)
        return leaf

    def _tensor(self, key: Key) -> torch.Tensor:
        return tensor_of_column(Column(self._layout[key][0], self._arrays[key]))


def _copied(nest: Any, plan: _Plan, place: int) -> bool:
    """Copy a nest that looks as planned, and tell whether it did."""
    if type(nest) is not TensorDict and type(nest) is not dict:
        return False
    entries: Mapping[str, Any] = nest
    for (part, value), (name, inner) in zip(entries.items(), plan, strict=True):
        if part != name:
            return False
        if not isinstance(inner, _Leaf):
            if not _copied(value, inner, place):
                return False
        elif inner.takes(value):
            inner.rows[place].copy_(value)
        else:
            return False
    return True
