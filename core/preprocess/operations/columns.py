"""What flows between the operations of a program: which fields there are, and their lazy columns.

Columns are joined and cast only when their bytes are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...errors import UsageError
from ...format.contracts import Array
from ...ted.schema import (
    EPISODE,
    FLAGS,
    NEXT,
    SINGLETONS,
    Field,
    Key,
    as_numbers,
    is_floating,
    key_name,
    numpy_dtype,
    safe_part,
    unknown_field,
)
from ..failures import ResultRefused
from ..processor import Block, BlockColumn, Pieces

KEPT: tuple[Key, ...] = tuple((NEXT, *flag) for flag in FLAGS)
"""What no operation removes, renames or gives another type: where episodes end."""

LENGTH = "_length"
"""What the name of a text has behind it where its length in bytes is."""


@dataclass(frozen=True)
class Fields:
    """The fields, by key and in order; immutable.

    `origins` has the keys of the source that each is made of, `gone` why a key of the source was removed, `made` the
    fields that the program itself has added.
    """

    by_key: Mapping[Key, Field]
    origins: Mapping[Key, tuple[Key, ...]]
    gone: Mapping[Key, str]
    made: frozenset[Key] = frozenset()

    @classmethod
    def of(cls, fields: Iterable[Field]) -> Self:
        """Begin with the fields of a dataset."""
        by_key = {field.key: field for field in fields}
        return cls(by_key, {key: (key,) for key in by_key}, {})

    def __iter__(self) -> Iterator[Field]:
        return iter(self.by_key.values())

    def __contains__(self, key: Key) -> bool:
        return key in self.by_key

    def __getitem__(self, key: Key) -> Field:
        return self.by_key[key]

    def has_name(self, name: str) -> bool:
        """Return whether a name means any field."""
        return bool(self._meant(name))

    def covered(self, name: str) -> list[Key]:
        """List the fields that a name means: the leaf or group of this name, and what `next` holds of it.

        So `reward` means `next.reward` where the root has none, and `next.reward` means that one alone.
        UsageError names what comes near, and refuses a name that two fields share: `a.b`, and `b` in the group `a`.
        """
        found = self._meant(name)
        if not found:
            raise unknown_field(name, [field.name for field in self], near=self._names())
        self.require_one(name)
        return self._with_lengths(found)

    def require_one(self, name: str) -> None:
        """Raise UsageError for a name that two fields share."""
        keys = [key if _named(key, name) else key[1:] for key in self._meant(name)]
        paths = {key[:end] for key in keys for end in range(len(key) + 1) if key_name(key[:end]) == name}
        if len(paths) > 1:
            raise UsageError(
                f"{name!r} means both {' and '.join(map(repr, sorted(paths)))}", hint="tell them apart with --fn"
            )

    def twinned(self, name: str) -> list[Key]:
        """Like `covered`, for what has to be done before and after the step alike.

        UsageError for `next.observation` where there is `observation`: the two must stay comparable.
        """
        found = self.covered(name)
        for key in found:
            apart = key[0] == NEXT and key[1:] in self and key[1:] not in SINGLETONS and key[1:] not in found
            if apart:
                raise UsageError(
                    f"{name!r} means what is under next alone, and {key_name(key[1:])!r} has to stay like it",
                    hint=f"name it {name.removeprefix(f'{NEXT}.')!r}: next follows",
                )
        return found

    def _meant(self, name: str) -> list[Key]:
        under = name == NEXT or name.startswith(f"{NEXT}.")
        return [
            key
            for key in self.by_key
            if _named(key, name) or (not under and key[0] == NEXT and len(key) > 1 and _named(key[1:], name))
        ]

    def _names(self) -> list[str]:
        names: dict[str, None] = {}
        for key in self.by_key:
            for path in (key, key[1:]) if key[0] == NEXT else (key,):
                names |= dict.fromkeys(key_name(path[:depth]) for depth in range(len(path), 0, -1))
        return list(names)

    def _with_lengths(self, keys: list[Key]) -> list[Key]:
        """Add the lengths of texts, which are fields of their own."""
        found = dict.fromkeys(keys)
        for key in keys:
            length = (*key[:-1], key[-1] + LENGTH)
            if self[key].role == "text" and length in self:
                found[length] = None
        return list(found)

    def replaced(self, changes: Mapping[Key, Field | None], *, made: Iterable[Key] = ()) -> Fields:
        """Change or add fields; None removes one. UsageError for a field that would be a group too."""
        by_key = {key: field for key, field in self.by_key.items() if changes.get(key, field) is not None}
        by_key |= {key: field for key, field in changes.items() if field is not None}
        for key in by_key:
            for depth in range(1, len(key)):
                if key[:depth] in by_key:
                    raise UsageError(
                        f"{key_name(key[:depth])!r} cannot be a field with {key_name(key)!r}: it would be a group too"
                    )
        return replace(self, by_key=by_key, made=self.made | frozenset(made))

    def traced(self, origins: Mapping[Key, Iterable[Key]], why: str = "") -> Fields:
        """Record which keys before the step each changed key is made of, and why the others were removed."""
        now = {key: self.origins.get(key, ()) for key in self.by_key}
        now |= {key: tuple(o for part in parts for o in self.origins.get(part, ())) for key, parts in origins.items()}
        here = {origin for parts in now.values() for origin in parts}
        lost = {origin: why for parts in self.origins.values() for origin in parts if origin not in here}
        return replace(self, origins=now, gone={**lost, **self.gone})

    def lost(self, source: Iterable[Field]) -> dict[str, str]:
        """Return why each key of the source was removed whose values are in no field any more, by name."""
        here = {origin for parts in self.origins.values() for origin in parts}
        return {field.name: self.gone.get(field.key, "left out") for field in source if field.key not in here}


def in_next(key: Key) -> Key:
    """Name what a field of the root is called after the step."""
    return (NEXT, *key)


def new_key(name: str, what: str) -> Key:
    """Make a key of a dotted name that a field is to get; UsageError for names that cannot be stored."""
    key = tuple(name.split("."))
    if not all(key) or key == (NEXT,):
        raise UsageError(f"{what} would write {name!r}, which is no name for a field")
    for part in key:
        if safe_part(part) != part:
            raise UsageError(f"{what} would write {name!r}, but tensordict keeps {part!r} for itself")
    if key in (EPISODE, *FLAGS, *KEPT):
        raise UsageError(f"{what} would write {name!r}, which is reserved for the layout of episodes")
    return key


def _named(key: Key, name: str) -> bool:
    whole = key_name(key)
    return whole == name or whole.startswith(f"{name}.")


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
