"""Columns that rows are added to, some at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..format import Array
from ..ted import Key, numpy_dtype
from .block import Column
from .tensors import Layout, require_layout

__all__ = ["GrowingColumns"]


class GrowingColumns:
    """Rows of some leaves, copied as they come. The first that are added decide keys, element types and shapes."""

    def __init__(self, expected: int) -> None:
        self._room = max(expected, 1)
        self._rows = 0
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._empty: Mapping[Key, Column] = {}

    def nothing(self, columns: Mapping[Key, Column]) -> None:
        """Add no rows; these columns are what comes out if no others ever do, and need not be like any others."""
        self._empty = self._empty or columns

    def add(self, columns: Mapping[Key, Column], rows: int) -> None:
        """Add rows; ResultRefused unless they are like those before."""
        layout = {key: (dtype, values.shape[1:]) for key, (dtype, values) in columns.items()}
        if not self._layout:
            self._layout = layout
            self._arrays = {key: self._empty_array(key) for key in layout}
        require_layout(layout, self._layout, "the first episode")
        self._make_room(self._rows + rows)
        for key, (_, values) in columns.items():
            self._arrays[key][self._rows : self._rows + rows] = values
        self._rows += rows

    def columns(self) -> dict[Key, Column]:
        """All rows."""
        if not self._rows:
            return dict(self._empty)
        return {key: Column(self._layout[key][0], array[: self._rows]) for key, array in self._arrays.items()}

    def _empty_array(self, key: Key) -> Array:
        dtype, shape = self._layout[key]
        return np.empty((self._room, *shape), numpy_dtype(dtype))

    def _make_room(self, rows: int) -> None:
        if rows <= self._room:
            return
        self._room = max(rows, self._room + self._room // 2)
        for key, array in self._arrays.items():
            self._arrays[key] = self._empty_array(key)
            self._arrays[key][: self._rows] = array[: self._rows]
