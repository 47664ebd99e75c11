"""The contract of an operation, how the value of its option is read, and what flows between operations: lazy columns.

Columns are joined and cast only when their bytes are needed.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from ...engine.tasks import ResultRefused
from ...errors import SchemaError, UsageError
from ...format.contracts import Array, StepReader, own_attributes, refuse_overrides
from ...format.episodes import EpisodeTable
from ...ted.schema import (
    DTYPES,
    EPISODE,
    FLAGS,
    NEXT,
    SINGLETONS,
    Field,
    Key,
    as_numbers,
    is_floating,
    key_called,
    key_name,
    numpy_dtype,
    row_bytes,
    safe_part,
    unknown_field,
)
from ..processor import Block, BlockColumn, EpisodeTexts, Pieces, marked

KEPT: tuple[Key, ...] = tuple((NEXT, *flag) for flag in FLAGS)
"""What no operation removes, renames or gives another type: where episodes end."""

LENGTH = "_length"
"""What the name of a text has behind it where its length in bytes is."""


@dataclass(frozen=True)
class Fields:
    """The fields, by key and in order; immutable.

    `origins` maps each field to the source's keys from which it is made, `gone` says why a source's key was removed,
    and `made` are the fields added by the program. `source` is the folder of the dataset, whose videos fields refer to,
    and `rate` is how many rows a second there are, where an operation changed that. `encoded` are the fields that refer
    to videos which the program is to write.
    """

    by_key: Mapping[Key, Field]
    origins: Mapping[Key, tuple[Key, ...]]
    gone: Mapping[Key, str]
    made: frozenset[Key] = frozenset()
    source: Path | None = None
    rate: float | None = None
    encoded: frozenset[Key] = frozenset()

    @classmethod
    def of(cls, fields: Iterable[Field], source: Path | None = None) -> Self:
        """Begin with the fields of a dataset."""
        by_key = {field.key: field for field in fields}
        return cls(by_key, {key: (key,) for key in by_key}, {}, source=source)

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
        """List the fields that a name means: the leaf or group with this name, and its counterpart under `next`.

        So `reward` means `next.reward` if the root has none, and `next.reward` means only that. UsageError, with
        similar names, if there are none; and if two fields share the name: `a.b`, and `b` in the group `a`.
        """
        found = self._meant(name)
        if not found:
            raise unknown_field(name, [field.name for field in self], near=self._names())
        self.require_one(name)
        return self._with_lengths(found)

    def require_one(self, name: str) -> None:
        """Raise UsageError for a name that two fields share."""
        key_called(name, [key if _named(key, name) else key[1:] for key in self._meant(name)], groups=True)

    def twinned(self, name: str) -> list[Key]:
        """Like `covered`, for changes that have to be made before and after the step alike.

        UsageError for `next.observation` if there is `observation`: the two must stay comparable.
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
        """Record from which earlier keys each changed key is made, and why others were removed."""
        now = {key: self.origins.get(key, ()) for key in self.by_key}
        now |= {key: tuple(o for part in parts for o in self.origins.get(part, ())) for key, parts in origins.items()}
        here = {origin for parts in now.values() for origin in parts}
        lost = {origin: why for parts in self.origins.values() for origin in parts if origin not in here}
        return replace(self, origins=now, gone={**lost, **self.gone})

    def lost(self, source: Iterable[Field]) -> dict[str, str]:
        """Return, by name, why each of the source's keys was removed whose values are in no field any more."""
        here = {origin for parts in self.origins.values() for origin in parts}
        return {field.name: self.gone.get(field.key, "left out") for field in source if field.key not in here}


def in_next(key: Key) -> Key:
    """Return the key that a root field has after the step."""
    return (NEXT, *key)


def new_key(name: str, what: str) -> Key:
    """Make a key of a dotted name that a field is to get; UsageError for names that cannot be stored."""
    key = tuple(name.split("."))
    if not all(key) or key == (NEXT,):
        raise UsageError(f"{what} would write {name!r}, which is not a valid field name")
    for part in key:
        if safe_part(part) != part:
            raise UsageError(f"{what} would write {name!r}, but tensordict keeps {part!r} for itself")
    if key in (EPISODE, *FLAGS, *KEPT):
        raise UsageError(f"{what} would write {name!r}, which is reserved for the layout of episodes")
    return key


def _named(key: Key, name: str) -> bool:
    return key_called(name, [key], groups=True) is not None


_EXACT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
"""Whole numbers up to 2 to this power are all exact in the type."""


def promoted(dtypes: list[str]) -> str:
    """Return the type that values of all these types are joined in: NumPy's, and float32 for bfloat16 with others."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return np.result_type(*("float32" if name == "bfloat16" else numpy_dtype(name) for name in dtypes)).name


def cast_into(out: Array, column: BlockColumn, dtype: str, name: str) -> None:
    """Write the values of `column` to `out`, an array of the same shape with elements of type `dtype`.

    Fractions are rounded to the nearest value of the type. Everything else must keep its value. ResultRefused, with the
    field's `name`, for a fraction, NaN or overflow when converting to whole numbers; a whole number that would be
    rounded; a finite number that would become infinite; an imaginary part; and a truth value other than 0 and 1.
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
        raise ResultRefused(f"{first} of {name!r} cannot be represented as {dtype}")


@dataclass(frozen=True, slots=True)
class LazyColumn:
    """A leaf whose rows `[n, *shape]` of type `dtype` come from `parts`, joined along the last dimension.

    Selecting, renaming, casting and joining thus take a single pass over memory together, and nothing for unchanged
    leaves. `name` is the field's name in messages.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[BlockColumn, ...]

    @classmethod
    def of(cls, column: BlockColumn, name: str) -> Self:
        """Wrap an existing leaf."""
        return cls(name, column.dtype, column.values.shape[1:], (column,))

    @classmethod
    def given(cls, name: str, dtype: str, values: Array) -> Self:
        """Wrap values that were just computed."""
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
        """Join leaves along the last dimension; shape `[]` counts as `[1]`."""
        parts: list[BlockColumn] = []
        for lazy in lazies:
            wide = lazy.reshaped((1,)) if not lazy.shape else lazy
            ready = not wide.pending or wide.dtype == dtype
            parts += (wide.parts if ready else ()) or (wide.column,)
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
    videos: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block, names: Mapping[Key, str]) -> Self:
        """Begin with the rows of a block."""
        columns = {key: LazyColumn.of(column, names[key]) for key, column in block.columns.items() if key in names}
        return cls(columns, block.pieces, block.first)

    def block(self, keys: Sequence[Key]) -> Block:
        """Write out what is still pending, each array once."""
        return Block({key: self.columns[key].column for key in keys}, self.pieces, self.first, self.videos)


Columns: TypeAlias = Mapping[Key, LazyColumn | Array]

_NUMBERS = frozenset("biufc")
"""The kinds of NumPy's types that can be stored."""

_FINAL = {
    "describe": "the arguments as fields of the dataclass, which describe() lists",
    "keeps": "choose(table)",
    "bind": "plan(fields)",
    "needs": "inputs(wanted)",
    "apply": "compute(batch, wanted), and kept(batch) for an operation that drops rows",
}
"""Methods that do the book-keeping, and what an operation implements instead."""


def _refuse_finals(cls: type, contract: type) -> None:
    if cls.__module__ != __name__:
        refuse_overrides(cls, own_attributes(cls, contract), _FINAL)


@dataclass(frozen=True)
class Operation(ABC):
    """An operation and its arguments: a frozen dataclass with a `name`, derived from one of the two classes below.

    Fields are `str`, `int`, `float` or `bool`, each possibly with None as default, or tuples of `str`, `int` or
    `float`. They are the keys of its table in a pipeline file, and of its entry in a manifest. `__post_init__` raises
    UsageError for arguments that are invalid for every dataset. Equal operations give equal results.

    `describe`, `keeps`, `bind`, `needs` and `apply` are final: overriding one raises FinalMethodError (a TypeError).
    """

    name: ClassVar[str]
    """Its name in options, pipeline files and manifests."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_finals(cls, Operation)

    def __reduce__(self) -> tuple[Any, ...]:
        # what else an operation keeps, such as a cache, need not be picklable
        arguments = {part.name: getattr(self, part.name) for part in dataclasses.fields(self) if part.init}
        return _made, (type(self), arguments)

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        """Yield the operations of one option of `rbtool preprocess`; by default one for each text of `value`.

        UsageError if the value is invalid. Only called for built-in operations.
        """
        return [cls(text) for text in texts_of(value, cls.name)]  # type: ignore[call-arg]

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> Operation:
        """Return it with what the dataset says, such as numbers in place of names, for the manifest.

        `before` are the settled operations that change the rows of `reader` before this one; UsageError where it would
        have to know their result.
        """
        return self

    @final
    def describe(self) -> dict[str, Any]:
        """Return it as JSON: its name, and the arguments that were given."""
        arguments = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        return {
            "name": self.name,
            **{name: _plain(value) for name, value in arguments.items() if value is not None and value != ()},
        }


def _made(kind: type[Operation], arguments: Mapping[str, Any]) -> Operation:
    return kind(**arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [part.describe() if dataclasses.is_dataclass(part) else part for part in value]  # type: ignore[union-attr]
    return value


class EpisodeChoice(Operation):
    """Chooses episodes before any row is read, by the episode table of the source."""

    @abstractmethod
    def choose(self, table: EpisodeTable) -> Any:
        """Return which episodes take part, bool `[episodes]`; UsageError for a choice that the table does not allow."""

    @final
    def keeps(self, table: EpisodeTable) -> NDArray[np.bool_]:
        """Return which episodes take part, bool `[episodes]`; SchemaError if `choose` returns anything else."""
        chosen = np.asarray(self.choose(table))
        if chosen.dtype != np.bool_ or chosen.shape != (len(table),):
            raise SchemaError(
                f"{self.name} chose episodes by {chosen.dtype} {list(chosen.shape)}, expected bool [{len(table)}]"
            )
        return chosen


class RowOperation(Operation):
    """Changes, adds or removes fields, or drops rows; a subclass implements `plan`.

    Rows come in blocks, and the result must not depend on where blocks begin and end. An operation that looks at other
    rows of an episode sets `whole_episodes`. No row may depend on another episode.
    """

    whole_episodes: ClassVar[bool] = False
    """Whether a block has to hold all rows of an episode."""

    drops_rows: ClassVar[bool] = False
    """Whether fewer rows may leave it than reach it."""

    makes_rows: ClassVar[bool] = False
    """Whether it makes rows anew, as many as `BoundOperation.pieces` says; it needs whole episodes."""

    @property
    def makes(self) -> str | None:
        """The name of the field that it makes, for the message to an operation that needs it earlier."""
        return None

    @property
    def rescales(self) -> str | None:
        """The name of the field whose range of values changes."""
        return None

    @property
    def notes(self) -> Iterable[str]:
        """Notes on the result, for its manifest."""
        return ()

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the source's own metadata files, by name, as they fit the result."""
        return documents

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        """Return the texts of the chosen episodes, given their numbers and their texts in the source.

        `texts` is empty if no episode has any. Called before rows are read, whatever becomes of the rows.
        """
        return texts

    @abstractmethod
    def plan(self, fields: Fields) -> BoundOperation:
        """Return what it does to these fields; UsageError for arguments that do not fit them.

        `FieldChanges` is the bound operation that computes fields row by row.
        """

    @final
    def bind(self, fields: Fields) -> BoundOperation:
        """Return what it does to these fields; SchemaError if it changes the declaration of an end flag."""
        bound = self.plan(fields)
        bound.operation = self
        for key in KEPT:
            if key in fields and (key not in bound.after or bound.after[key] != fields[key]):
                raise SchemaError(f"{self.name} changes {key_name(key)}, which marks where episodes end")
        return bound


class BoundOperation(ABC):
    """What an operation does to known fields, block by block; `after` are the resulting fields."""

    operation: RowOperation

    def __init__(self, after: Fields) -> None:
        self.after = after

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_finals(cls, BoundOperation)

    @property
    def row_bytes(self) -> int:
        """The most bytes of a row on the way through it."""
        return row_bytes(self.after)

    @abstractmethod
    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        """Return the fields before it from which the fields `wanted` after it are computed."""

    @abstractmethod
    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        """Return the wanted fields for all rows of the batch, which has the fields `inputs(wanted)`.

        Columns as declared in `after`, or arrays `[rows, *shape]`, whose numbers are brought to the declared type
        (ResultRefused if it cannot hold them). Arrays of the batch are never edited.
        """

    def kept(self, batch: LazyBatch) -> NDArray[np.bool_] | None:
        """Return which rows remain, bool `[rows]`, or None for all; called before `compute`.

        An episode that loses rows in its middle becomes several; the row before each gap is marked truncated.
        """
        return None

    def pieces(self, batch: LazyBatch) -> Pieces:
        """Return the runs of the rows that `compute` returns, for an operation that `makes_rows`."""
        return batch.pieces

    @final
    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        """Return the fields that it needs to produce these."""
        return frozenset(self.inputs(wanted))

    @final
    def apply(self, batch: LazyBatch, wanted: frozenset[Key]) -> None:
        """Replace the columns of the batch by the wanted ones.

        SchemaError for a field that is not computed or not as declared, and for dropped rows without `drops_rows`.
        """
        keep = self.kept(batch)
        if keep is not None:
            keep = np.asarray(keep)
            if keep.dtype != np.bool_ or keep.shape != (batch.pieces.steps,):
                raise SchemaError(
                    f"{self.operation.name} keeps rows by {keep.dtype} {list(keep.shape)}, "
                    f"expected bool [{batch.pieces.steps}]"
                )
        found = self.compute(batch, wanted)
        if not isinstance(found, Mapping):
            raise SchemaError(f"{self.operation.name} computed {_described(found)}, expected a mapping of fields")
        pieces = self.pieces(batch) if self.operation.makes_rows else batch.pieces
        batch.columns = {key: self._checked(key, found.get(key), pieces.steps) for key in wanted}
        batch.pieces = pieces
        if keep is None or keep.all():
            return
        if not self.operation.drops_rows:
            raise SchemaError(f"{self.operation.name} drops rows and does not declare it (drops_rows)")
        rows = np.flatnonzero(keep)
        batch.columns = {key: lazy.taken(rows) for key, lazy in batch.columns.items()}
        batch.pieces, cut = batch.pieces.where(keep)
        for key, column in marked(batch.columns, cut).items():
            batch.columns[key] = LazyColumn.of(column, key_name(key))

    def _checked(self, key: Key, given: LazyColumn | Array | None, rows: int) -> LazyColumn:
        field, column = self.after[key], given
        if _is_numbers(given):
            values = given.astype(given.dtype.newbyteorder("="), copy=False)
            column = LazyColumn.given(field.name, values.dtype.name, values)
            column = column if column.dtype == field.dtype else column.cast(field.dtype)
        declared = (field.dtype, field.shape, rows)
        if not isinstance(column, LazyColumn) or (column.dtype, column.shape, column.rows) != declared:
            raise SchemaError(
                f"{self.operation.name} computed {_described(given)} for {field.name!r}, {rows} rows of {field.dtype} "
                f"{list(field.shape)} are declared"
            )
        for part in column.parts:
            found = part.values.dtype
            if found.kind not in _NUMBERS or not found.isnative or found != DTYPES.get(part.dtype, found):
                raise SchemaError(
                    f"{self.operation.name} computed {found.str} for {field.name!r} and declares it as {part.dtype}"
                )
        return column


def _is_numbers(value: Any) -> TypeGuard[Array]:
    """Whether a value is an array of rows of numbers; of a masked one the mask would get lost."""
    rows = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray) and value.ndim > 0
    return rows and value.dtype.kind in _NUMBERS


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, LazyColumn):
        return f"{value.rows} rows of {value.dtype} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        masked = "masked " if isinstance(value, np.ma.MaskedArray) else ""
        return f"{len(value) if value.ndim else 'no'} rows of {masked}{value.dtype} {list(value.shape[1:])}"
    return f"an object of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a field is computed from others, row by row: `compute` receives them in the order of `inputs`."""

    inputs: tuple[Key, ...]
    compute: Callable[[Sequence[LazyColumn]], LazyColumn | Array]


class FieldChanges(BoundOperation):
    """Computes some fields from others, row by row; fields without a derivation pass unchanged."""

    def __init__(self, after: Fields, derived: Mapping[Key, Derivation]) -> None:
        super().__init__(after)
        self._derived = derived

    @classmethod
    def of(
        cls,
        before: Fields,
        keys: Iterable[Key],
        field: Callable[[Field], Field],
        compute: Callable[[Field, LazyColumn], LazyColumn | Array],
    ) -> FieldChanges:
        """Change the values of some fields: `field` declares what each becomes, `compute` computes it."""
        chosen = [before[key] for key in keys]

        def derivation(old: Field) -> Derivation:
            return Derivation((old.key,), lambda inputs: compute(old, inputs[0]))

        return cls(
            before.replaced({old.key: field(old) for old in chosen}), {old.key: derivation(old) for old in chosen}
        )

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        direct = {key for key in wanted if key not in self._derived}
        return direct.union(*(self._derived[key].inputs for key in wanted - direct))

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        columns = batch.columns
        return {
            key: columns[key] if how is None else how.compute([columns[i] for i in how.inputs])
            for key, how in ((key, self._derived.get(key)) for key in wanted)
        }


# Values of options ---------------------------------------------------------------------------------------


class Discount:
    """The `--gamma` that several operations share; None if it is not given."""

    def __init__(self, given: Any) -> None:
        self._gamma = None if given is None else number_of(given, "gamma")
        self.used = self._gamma is None

    def needed(self, operation: str) -> float:
        """Return it; UsageError without one, because a default would be silently wrong."""
        if self._gamma is None:
            raise UsageError(f"{operation} needs a discount", hint="add --gamma 0.99")
        return self.or_else(1.0)

    def or_else(self, default: float) -> float:
        """Return it, or `default` if it is not given."""
        self.used = True
        return default if self._gamma is None else self._gamma


def texts_of(value: Any, option: str) -> list[str]:
    """Return a text, or a list of texts, as a list; UsageError for anything else."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise UsageError(f"{option} is {value!r}, expected a text or a list of them")
    return list(found)


def names_of(value: Any, option: str) -> tuple[str, ...]:
    """Return names that are separated by commas; UsageError for an empty one."""
    names = tuple(name.strip() for text in texts_of(value, option) for name in text.split(","))
    if not all(names):
        raise UsageError(f"--{option} {value!r} has an empty name, expected names with commas between them")
    return names


def pairs_of(value: Any, option: str, form: str) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of texts like `a=b`, or of a mapping; UsageError, which shows `form`, for other texts."""
    if isinstance(value, Mapping):
        yield from ((str(left), right) for left, right in value.items())
        return
    for text in texts_of(value, option):
        left, sign, right = text.partition("=")
        if not (left.strip() and sign and right.strip()):
            raise UsageError(f"--{option} {text!r} is not understood, it is written {form}")
        yield left.strip(), right.strip()


def number_of(value: Any, option: str) -> float:
    """Return a number or the number that a text is; UsageError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{option} is {value!r}, expected a number") from None
