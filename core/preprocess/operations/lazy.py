"""Lazy batches: rows between the operations of a program, joined and cast only when their bytes are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ...format.contracts import Array
from ...ted.schema import Key, as_numbers, is_floating, numpy_dtype
from ..block import Block, BlockColumn, Pieces
from ..failures import ResultRefused

_EXACT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
"""Whole numbers up to 2 to this power are all exact in the type."""


def promoted(dtypes: list[str]) -> str:
    """Return the type that values of all these types are joined in: NumPy's, and float32 for bfloat16 with others."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return np.result_type(*("float32" if name == "bfloat16" else numpy_dtype(name) for name in dtypes)).name


def cast_into(out: Array, column: BlockColumn, dtype: str, name: str) -> None:
    """Write the values of `column` into `out`, an array of the same shape that holds elements of type `dtype`.

    Fractions are rounded to the nearest that the type has. Everything else has to stay what it is: ResultRefused for
    a fraction, NaN or too large a number that is to become a whole one, a whole number that the type rounds, a finite
    number that becomes infinite, an imaginary part, and a truth value that is neither 0 nor 1. `name` is the field.
    """
    if column.dtype == dtype:
        _assign(out, column.values)
        return
    numbers = as_numbers(column.values, column.dtype)
    if np.iscomplexobj(numbers) and not dtype.startswith("complex"):
        _require(numbers.imag == 0, numbers, dtype, name)
        numbers = numbers.real
    if is_floating(dtype):
        if numbers.dtype.kind in "iu":
            _require_exact(numbers, dtype, name)
        _round(out, numbers, dtype, name)
    elif dtype == "bool":
        _require((numbers == 0) | (numbers == 1), numbers, dtype, name)
        _assign(out, numbers)
    else:
        _whole(out, numbers, dtype, name)


def _assign(out: Array, values: Array) -> None:
    if out.ndim == 2 and out.shape[1] <= 2:  # NumPy would go along the short rows
        for place in range(out.shape[1]):
            np.copyto(out[:, place], values[:, place], casting="unsafe")
    else:
        np.copyto(out, values, casting="unsafe")


def _round(out: Array, numbers: Array, dtype: str, name: str) -> None:
    try:
        with np.errstate(over="raise", under="ignore", invalid="ignore"):
            if dtype == "bfloat16":
                out[...] = _bits(numbers.astype(np.float32), name)
            else:
                _assign(out, numbers)
    except FloatingPointError:
        limit = np.finfo(numpy_dtype(dtype)).max if dtype != "bfloat16" else 3.39e38
        worst = numbers.reshape(-1)[np.argmax(np.where(np.isfinite(numbers), np.abs(numbers), 0))]
        raise ResultRefused(f"{worst} of {name!r} is too large for {dtype}, which ends at {limit:.3g}") from None


def _bits(numbers: Array, name: str) -> Array:
    """Round to the nearest bfloat16, ties to even, and return its bits."""
    bits = numbers.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)).astype(
        np.uint16
    )
    nan = np.isnan(numbers)
    rounded[nan] = 0x7FC0
    if ((rounded & 0x7FFF) == 0x7F80).any() and not np.isinf(numbers[(rounded & 0x7FFF) == 0x7F80]).all():
        raise FloatingPointError(name)
    return rounded


def _whole(out: Array, numbers: Array, dtype: str, name: str) -> None:
    limits = np.iinfo(dtype)
    if numbers.dtype.kind == "b" or not numbers.size:
        _assign(out, numbers)
        return
    low, high = numbers.min(), numbers.max()
    if numbers.dtype.kind in "iu":
        if int(low) < limits.min or int(high) > limits.max:
            worst = int(low) if int(low) < limits.min else int(high)
            raise ResultRefused(
                f"{worst} of {name!r} does not fit {dtype}, which goes from {limits.min} to {limits.max}"
            )
        _assign(out, numbers)
        return
    least, beyond = np.float64(limits.min), np.float64(limits.max + 1)
    if not (low >= least and high < beyond):  # NaN is neither
        _require((numbers >= least) & (numbers < beyond), numbers, dtype, name)
    _assign(out, numbers)
    _require(out == numbers, numbers, dtype, name)


def _require_exact(numbers: Array, dtype: str, name: str) -> None:
    """Refuse whole numbers beyond those that are all exact in a type of floats."""
    limit = 2 ** _EXACT_BITS[dtype]
    limits = np.iinfo(numbers.dtype)
    if (-limits.min <= limit and limits.max <= limit) or not numbers.size:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < -limit or high > limit:
        worst = low if low < -limit else high
        raise ResultRefused(f"{worst} of {name!r} need not be exact in {dtype}, whole numbers up to {limit} are")


def _require(kept: Any, numbers: Array, dtype: str, name: str) -> None:
    if not kept.all():
        first = numbers.reshape(-1)[int(np.argmin(kept.reshape(-1)))]
        raise ResultRefused(f"{first} of {name!r} is no {dtype}: it would not stay what it is")


@dataclass(frozen=True, slots=True)
class LazyColumn:
    """One leaf whose rows `[n, *shape]` of type `dtype` come of `parts`, joined along the last dimension.

    Selecting, renaming, casting and joining so cost one pass over memory together, and nothing for a leaf that
    nothing happens to. `name` is what the field is called where its values are refused.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[BlockColumn, ...]

    @classmethod
    def of(cls, column: BlockColumn, name: str) -> Self:
        """Take a leaf that is there."""
        return cls(name, column.dtype, column.values.shape[1:], (column,))

    @classmethod
    def given(cls, name: str, dtype: str, values: Array) -> Self:
        """Take values that were just computed."""
        return cls.of(BlockColumn(dtype, values), name)

    @property
    def column(self) -> BlockColumn:
        """The rows themselves."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.dtype == self.dtype:
            return first
        rows = len(first.values)
        out = np.empty((rows, *self.shape), numpy_dtype(self.dtype))
        if len(self.parts) == 1:
            cast_into(out, first, self.dtype, self.name)
            return BlockColumn(self.dtype, out)
        start = 0
        for part in self.parts:
            stop = start + part.values.shape[-1]
            cast_into(out[..., start:stop], part, self.dtype, self.name)
            start = stop
        return BlockColumn(self.dtype, out)

    @property
    def values(self) -> Array:
        """The rows, as the bytes that are stored."""
        return self.column.values

    @property
    def numbers(self) -> Array:
        """The rows as numbers: as `values`, but float32 for bfloat16."""
        return as_numbers(self.values, self.dtype)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.parts[0].values)

    @property
    def pending(self) -> bool:
        """Whether a change of type is still to be made."""
        return any(part.dtype != self.dtype for part in self.parts)

    def cast(self, dtype: str) -> LazyColumn:
        """Change the type."""
        if self.pending:  # the type in between decides what is refused
            return LazyColumn.of(self.column, self.name).cast(dtype)
        return LazyColumn(self.name, dtype, self.shape, self.parts)

    def reshaped(self, shape: tuple[int, ...]) -> LazyColumn:
        """Give each row another shape, row-major."""
        if shape == self.shape:
            return self
        if len(self.parts) > 1:
            return LazyColumn.of(self.column, self.name).reshaped(shape)
        part = self.parts[0]
        rows = part.values.reshape(len(part.values), *shape)
        return LazyColumn(self.name, self.dtype, shape, (BlockColumn(part.dtype, rows),))

    def taken(self, rows: Array) -> LazyColumn:
        """Take some rows, given by number or by a mask."""
        parts = tuple(BlockColumn(part.dtype, part.values[rows]) for part in self.parts)
        return LazyColumn(self.name, self.dtype, self.shape, parts)

    @classmethod
    def joined(cls, name: str, dtype: str, lazies: Sequence[LazyColumn]) -> LazyColumn:
        """Join leaves along the last dimension; those of shape `[]` count as `[1]`."""
        parts: list[BlockColumn] = []
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
class LazyBatch:
    """The rows of a block between two steps of a program; steps change it in place, never the arrays in it."""

    columns: dict[Key, LazyColumn]
    pieces: Pieces
    first: int

    @classmethod
    def of(cls, block: Block, names: Mapping[Key, str]) -> Self:
        """Begin with the rows of a block."""
        columns = {key: LazyColumn.of(column, names[key]) for key, column in block.columns.items() if key in names}
        return cls(columns, block.pieces, block.first)

    def block(self, keys: Sequence[Key]) -> Block:
        """Write out what is still to be written, and nothing twice."""
        return Block({key: self.columns[key].column for key in keys}, self.pieces, self.first)
