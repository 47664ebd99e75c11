"""Rows on their way through a program, which are joined and change their type only when somebody needs the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...format import Array
from ...ted import Key, numpy_dtype
from ..block import Block, Column, Pieces
from .casting import cast_into

__all__ = ["Lazy", "Sheet"]


@dataclass(frozen=True, slots=True)
class Lazy:
    """One leaf whose rows `[n, *shape]` of type `dtype` come of `parts`, joined along the last dimension.

    Selecting, renaming, casting and joining so cost one pass over memory together, and nothing for a leaf that
    nothing happens to. `name` is what the field is called where its values are refused.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Column, ...]

    @classmethod
    def of(cls, column: Column, name: str) -> Self:
        """Take a leaf that is there."""
        return cls(name, column.dtype, column.values.shape[1:], (column,))

    @classmethod
    def given(cls, name: str, dtype: str, values: Array) -> Self:
        """Take values that were just computed."""
        return cls.of(Column(dtype, values), name)

    @property
    def column(self) -> Column:
        """The rows themselves."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.dtype == self.dtype:
            return first
        rows = len(first.values)
        out = np.empty((rows, *self.shape), numpy_dtype(self.dtype))
        if len(self.parts) == 1:
            cast_into(out, first, self.dtype, self.name)
            return Column(self.dtype, out)
        start = 0
        for part in self.parts:
            stop = start + part.values.shape[-1]
            cast_into(out[..., start:stop], part, self.dtype, self.name)
            start = stop
        return Column(self.dtype, out)

    @property
    def values(self) -> Array:
        """The rows, as the bytes that are stored."""
        return self.column.values

    @property
    def pending(self) -> bool:
        """Whether a change of type is still to be made."""
        return any(part.dtype != self.dtype for part in self.parts)

    def cast(self, dtype: str) -> Lazy:
        """Change the type."""
        if self.pending:  # the type in between decides what is refused
            return Lazy.of(self.column, self.name).cast(dtype)
        return Lazy(self.name, dtype, self.shape, self.parts)

    def reshaped(self, shape: tuple[int, ...]) -> Lazy:
        """Lay the numbers of each row out anew, row-major."""
        if shape == self.shape:
            return self
        if len(self.parts) > 1:
            return Lazy.of(self.column, self.name).reshaped(shape)
        part = self.parts[0]
        rows = part.values.reshape(len(part.values), *shape)
        return Lazy(self.name, self.dtype, shape, (Column(part.dtype, rows),))

    def taken(self, rows: Array) -> Lazy:
        """Take some rows, given by number or by a mask."""
        parts = tuple(Column(part.dtype, part.values[rows]) for part in self.parts)
        return Lazy(self.name, self.dtype, self.shape, parts)

    @classmethod
    def joined(cls, name: str, dtype: str, lazies: Sequence[Lazy]) -> Lazy:
        """Join leaves along the last dimension; those of shape `[]` count as `[1]`."""
        parts: list[Column] = []
        for lazy in lazies:
            wide = lazy.reshaped((1,)) if not lazy.shape else lazy
            ready = not wide.pending or wide.dtype == dtype
            parts += wide.parts if ready else (wide.column,)
        shape = (*parts[0].values.shape[1:-1], sum(part.values.shape[-1] for part in parts))
        return cls(name, dtype, shape, tuple(parts))

    @property
    def width(self) -> int:
        """Numbers a row."""
        return math.prod(self.shape)


@dataclass(slots=True)
class Sheet:
    """The rows of a block between two steps of a program; steps change it in place, never the arrays in it."""

    columns: dict[Key, Lazy]
    pieces: Pieces
    first: int

    @classmethod
    def of(cls, block: Block, names: Mapping[Key, str]) -> Self:
        """Begin with the rows of a block."""
        columns = {key: Lazy.of(column, names[key]) for key, column in block.columns.items() if key in names}
        return cls(columns, block.pieces, block.first)

    def block(self, keys: Sequence[Key]) -> Block:
        """Write out what is still to be written, and nothing twice."""
        return Block({key: self.columns[key].column for key in keys}, self.pieces, self.first)
