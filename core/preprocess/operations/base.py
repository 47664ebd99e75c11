"""The contract of operations, the parsing of their options, and the lazy columns that they pass on to one another.

A lazy column is joined and cast only when its bytes are needed.

An operation is used in three stages, each with a class of its own:

    Operation        its arguments, checked without a dataset
      plan(fields) -> BoundOperation     checked against the fields of a dataset; `after` are the fields that it returns
        compute(batch, wanted)           called for each block of rows
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
"""The end flags under `next`. They mark where episodes end: no operation removes, renames or casts them."""

LENGTH = "_length"
"""The suffix of the field with the length of a text: the length of `a` in bytes is in `a_length`."""


@dataclass(frozen=True)
class Fields:
    """The fields of the rows between two operations, by key and in order. Immutable.

    Attributes:
        origins: for each field, the keys of the source that it is computed from.
        gone: for each key of the source whose values are lost, the reason.
        made: the fields that the program has added.
        source: the folder of the dataset, which holds the videos that fields refer to.
        rate: rows per second, if an operation changed it.
        encoded: the fields that refer to videos which the program will write.
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
        """Whether a name refers to any field."""
        return bool(self._meant(name))

    def covered(self, name: str) -> list[Key]:
        """List the fields that a name refers to: the leaf or group with this name, and its counterpart under `next`.

        For example, `reward` refers to `next.reward` if the root has no `reward`; `next.reward` refers only to itself.
        UsageError if no field has the name, with similar names, or if two fields share it: `a.b`, and `b` in group `a`.
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
        """Like `covered`, for changes that apply to a field both before and after the step.

        UsageError for `next.observation` if there is an `observation`: the two must stay comparable.
        """
        found = self.covered(name)
        for key in found:
            apart = key[0] == NEXT and key[1:] in self and key[1:] not in SINGLETONS and key[1:] not in found
            if apart:
                raise UsageError(
                    f"{name!r} names the field under next alone, but {key_name(key[1:])!r} must change with it",
                    hint=f"name {name.removeprefix(f'{NEXT}.')!r}, which stands for both",
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
        """Change or add fields; None removes one. UsageError if a key would be both a field and a group."""
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
        """Record the earlier keys that each changed key is computed from, and `why` other keys were removed."""
        now = {key: self.origins.get(key, ()) for key in self.by_key}
        now |= {key: tuple(o for part in parts for o in self.origins.get(part, ())) for key, parts in origins.items()}
        here = {origin for parts in now.values() for origin in parts}
        lost = {origin: why for parts in self.origins.values() for origin in parts if origin not in here}
        return replace(self, origins=now, gone={**lost, **self.gone})

    def lost(self, source: Iterable[Field]) -> dict[str, str]:
        """Return the names of the source's fields whose values are in no field any more, each with the reason."""
        here = {origin for parts in self.origins.values() for origin in parts}
        return {field.name: self.gone.get(field.key, "left out") for field in source if field.key not in here}


def in_next(key: Key) -> Key:
    """Return the key of a root field under `next`, where its value after the step is."""
    return (NEXT, *key)


def new_key(name: str, what: str) -> Key:
    """Convert a dotted name to the key of a new field; UsageError for names that cannot be stored.

    `what` names the operation, for the message.
    """
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
"""For each type, the largest b for which all whole numbers up to 2**b are exact."""


def promoted(dtypes: list[str]) -> str:
    """Return the common type of some types, as NumPy promotes them. bfloat16 counts as float32 among other types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return np.result_type(*("float32" if name == "bfloat16" else numpy_dtype(name) for name in dtypes)).name


def cast_into(out: Array, column: BlockColumn, dtype: str, name: str) -> None:
    """Write the values of `column` to `out`, an array of the same shape with elements of type `dtype`.

    Between types of floats, values are rounded to the nearest value of the type. Every other change of a value is
    refused, with ResultRefused, which contains the field's `name`: a fraction, NaN or overflow when converting to whole
    numbers; a whole number that would be rounded; a finite number that would become infinite; an imaginary part that
    would be lost; and a number other than 0 and 1 when converting to bool.
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
    if out.ndim == 2 and out.shape[1] <= 2:  # faster by columns: NumPy's inner loop would be as short as a row
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
    """Refuse whole numbers beyond the range in which a type of floats represents all of them exactly."""
    limit = 2 ** _EXACT_BITS[dtype]
    limits = np.iinfo(numbers.dtype)
    if (-limits.min <= limit and limits.max <= limit) or not numbers.size:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < -limit or high > limit:
        worst = low if low < -limit else high
        raise ResultRefused(f"{worst} of {name!r} may not be exact in {dtype}: only whole numbers up to {limit} are")


def _require(kept: Any, numbers: Array, dtype: str, name: str) -> None:
    if not kept.all():
        first = numbers.reshape(-1)[int(np.argmin(kept.reshape(-1)))]
        raise ResultRefused(f"{first} of {name!r} cannot be represented as {dtype}")


@dataclass(frozen=True, slots=True)
class LazyColumn:
    """A leaf whose rows `[n, *shape]` are computed from `parts` when they are needed.

    The parts are joined along the last dimension and cast to `dtype`. A sequence of operations that rename, join and
    cast a leaf therefore writes its rows once, and does not copy leaves that stay the same. `name` is the field's name
    in messages.
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
        """Wrap an array of rows of type `dtype`."""
        return cls.of(BlockColumn(dtype, values), name)

    @property
    def column(self) -> BlockColumn:
        """The rows, joined and cast."""
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
        """The rows as they are stored."""
        return self.column.values

    @property
    def numbers(self) -> Array:
        """The rows as numbers: as `values`, but float32 for bfloat16."""
        return as_numbers(self.values, self.dtype)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.parts[0].values)

    @property
    def pending(self) -> bool:
        """Whether a cast has not been applied yet."""
        return any(part.dtype != self.dtype for part in self.parts)

    def cast(self, dtype: str) -> LazyColumn:
        """Change the element type."""
        if self.pending:  # apply the earlier cast first: it refuses values that its type cannot hold
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
        """Number of elements in a row."""
        return math.prod(self.shape)


@dataclass(slots=True)
class LazyBatch:
    """The rows of a block between two operations. Operations replace its columns, and never edit arrays in place."""

    columns: dict[Key, LazyColumn]
    pieces: Pieces
    first: int
    videos: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block, names: Mapping[Key, str]) -> Self:
        """Start with the columns of a block that have a name in `names`."""
        columns = {key: LazyColumn.of(column, names[key]) for key, column in block.columns.items() if key in names}
        return cls(columns, block.pieces, block.first)

    def block(self, keys: Sequence[Key]) -> Block:
        """Compute the columns `keys` and return them as a block."""
        return Block({key: self.columns[key].column for key in keys}, self.pieces, self.first, self.videos)


Columns: TypeAlias = Mapping[Key, LazyColumn | Array]

_NUMBERS = frozenset("biufc")
"""The kinds of NumPy types that can be stored."""

_FINAL = {
    "describe": "the arguments as fields of the dataclass, which describe() lists",
    "keeps": "choose(table)",
    "bind": "plan(fields)",
    "needs": "inputs(wanted)",
    "apply": "compute(batch, wanted), and kept(batch) for an operation that drops rows",
}
"""Methods that subclasses must not override, each with the method to implement instead."""


def _refuse_finals(cls: type, contract: type) -> None:
    if cls.__module__ != __name__:
        refuse_overrides(cls, own_attributes(cls, contract), _FINAL)


@dataclass(frozen=True)
class Operation(ABC):
    """An operation and its arguments: a frozen dataclass with a `name`.

    Derive from `EpisodeChoice` to choose episodes, or from `RowOperation` to change rows. The arguments are the fields
    of the dataclass: `str`, `int`, `float` or `bool`, each possibly with None as default, or tuples of `str`, `int` or
    `float`. They are the keys of the operation's table in a pipeline file, and of its entry in a manifest.
    `__post_init__` raises UsageError for arguments that are invalid for every dataset. Equal operations must give equal
    results.

    `describe`, `keeps`, `bind`, `needs` and `apply` are final: overriding one raises FinalMethodError (a TypeError).
    """

    name: ClassVar[str]
    """The name of the operation in options, pipeline files and manifests."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_finals(cls, Operation)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the arguments only: other attributes, such as a cache, may not be picklable.
        arguments = {part.name: getattr(self, part.name) for part in dataclasses.fields(self) if part.init}
        return _made, (type(self), arguments)

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        """Make the operations of one option of `rbtool preprocess`; by default one for each text of `value`.

        UsageError if the value is invalid. This is only called for built-in operations.
        """
        return [cls(text) for text in texts_of(value, cls.name)]  # type: ignore[call-arg]

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> Operation:
        """Return the operation with arguments completed from the dataset, such as names replaced by numbers.

        The manifest records the settled operation. `before` are the settled operations that come before this one;
        UsageError if the arguments depend on their result.
        """
        return self

    @final
    def describe(self) -> dict[str, Any]:
        """Return the operation as JSON: its name, and the arguments that were given."""
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
    """Chooses episodes by the episode table of the source, before any row is read."""

    @abstractmethod
    def choose(self, table: EpisodeTable) -> Any:
        """Return which episodes are used, bool `[episodes]`; UsageError if the table does not allow the choice."""

    @final
    def keeps(self, table: EpisodeTable) -> NDArray[np.bool_]:
        """Return which episodes are used, bool `[episodes]`; SchemaError if `choose` returns anything else."""
        chosen = np.asarray(self.choose(table))
        if chosen.dtype != np.bool_ or chosen.shape != (len(table),):
            raise SchemaError(
                f"{self.name} chose episodes by {chosen.dtype} {list(chosen.shape)}, expected bool [{len(table)}]"
            )
        return chosen


class RowOperation(Operation):
    """Changes, adds or removes fields, or drops rows; a subclass implements `plan`.

    Rows are processed in blocks, and the result must not depend on where blocks begin and end. An operation whose rows
    depend on other rows of their episode sets `whole_episodes`. No row may depend on another episode.
    """

    whole_episodes: ClassVar[bool] = False
    """Whether a block must hold all rows of its episodes."""

    drops_rows: ClassVar[bool] = False
    """Whether the operation may return fewer rows than it gets."""

    makes_rows: ClassVar[bool] = False
    """Whether the operation creates new rows, as many as `BoundOperation.pieces` says. It needs `whole_episodes`."""

    @property
    def makes(self) -> str | None:
        """The name of the field that the operation adds.

        It is used in the error for an earlier operation that needs the field.
        """
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
        """Return the source's own metadata files, by name, changed so that they fit the result."""
        return documents

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        """Return the texts of the chosen episodes, given their numbers and their texts in the source.

        `texts` is empty if no episode has any. This is called before rows are read.
        """
        return texts

    @abstractmethod
    def plan(self, fields: Fields) -> BoundOperation:
        """Return the operation bound to these fields; UsageError for arguments that do not fit them.

        For operations that compute fields row by row, return a `FieldChanges`.
        """

    @final
    def bind(self, fields: Fields) -> BoundOperation:
        """Call `plan`; SchemaError if the operation changes the declaration of an end flag."""
        bound = self.plan(fields)
        bound.operation = self
        for key in KEPT:
            if key in fields and (key not in bound.after or bound.after[key] != fields[key]):
                raise SchemaError(f"{self.name} changes {key_name(key)}, which marks where episodes end")
        return bound


class BoundOperation(ABC):
    """An operation on known fields, which processes rows block by block; `after` are the resulting fields."""

    operation: RowOperation

    def __init__(self, after: Fields) -> None:
        self.after = after

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_finals(cls, BoundOperation)

    @property
    def row_bytes(self) -> int:
        """The size of a row in memory where it is largest."""
        return row_bytes(self.after)

    @abstractmethod
    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        """Return the keys of the fields that `compute` needs for the fields `wanted` of the result."""

    @abstractmethod
    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        """Return the wanted fields for all rows of the batch, which has the fields `inputs(wanted)`.

        A field is a column as declared in `after`, or an array `[rows, *shape]`, which is cast to the declared type
        (ResultRefused if the type cannot hold its numbers). Arrays of the batch must not be edited.
        """

    def kept(self, batch: LazyBatch) -> NDArray[np.bool_] | None:
        """Return which rows remain, bool `[rows]`, or None for all. This is called before `compute`.

        An episode that loses rows in its middle is split; the row before each gap is marked truncated.
        """
        return None

    def pieces(self, batch: LazyBatch) -> Pieces:
        """Return the runs of the rows that `compute` returns; called if the operation `makes_rows`."""
        return batch.pieces

    @final
    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        """Return the keys of the fields that `compute` needs for the fields `wanted` of the result."""
        return frozenset(self.inputs(wanted))

    @final
    def apply(self, batch: LazyBatch, wanted: frozenset[Key]) -> None:
        """Replace the columns of the batch by the wanted ones.

        SchemaError if a field is missing or not as declared, or if rows are dropped without `drops_rows`.
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
    """Whether a value is an array of rows of numbers. Masked arrays are not, because their mask would be lost."""
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
    """How a field is computed from other fields, row by row: `compute` gets their columns in the order of `inputs`."""

    inputs: tuple[Key, ...]
    compute: Callable[[Sequence[LazyColumn]], LazyColumn | Array]


class FieldChanges(BoundOperation):
    """Computes some fields from others, row by row; fields without a derivation stay the same."""

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
        """Change the values of the fields `keys`: `field` returns the new declaration of one, `compute` its values."""
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


class Discount:
    """The value of `--gamma`, which several operations share. `used` says whether an operation has read it."""

    def __init__(self, given: Any) -> None:
        self._gamma = None if given is None else number_of(given, "gamma")
        self.used = self._gamma is None

    def needed(self, operation: str) -> float:
        """Return the discount; UsageError if none is given, because a default would be silently wrong."""
        if self._gamma is None:
            raise UsageError(f"{operation} needs a discount", hint="add --gamma 0.99")
        return self.or_else(1.0)

    def or_else(self, default: float) -> float:
        """Return the discount, or `default` if none is given."""
        self.used = True
        return default if self._gamma is None else self._gamma


def texts_of(value: Any, option: str) -> list[str]:
    """Return a text, or a list of texts, as a list; UsageError for anything else."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise UsageError(f"{option} is {value!r}, expected a text or a list of texts")
    return list(found)


def names_of(value: Any, option: str) -> tuple[str, ...]:
    """Return names that are separated by commas; UsageError for an empty one."""
    names = tuple(name.strip() for text in texts_of(value, option) for name in text.split(","))
    if not all(names):
        raise UsageError(f"--{option} {value!r} has an empty name, expected names with commas between them")
    return names


def pairs_of(value: Any, option: str, form: str) -> Iterator[tuple[str, Any]]:
    """Yield the pairs in texts like `a=b`, or the items of a mapping; UsageError, with `form`, for other texts."""
    if isinstance(value, Mapping):
        yield from ((str(left), right) for left, right in value.items())
        return
    for text in texts_of(value, option):
        left, sign, right = text.partition("=")
        if not (left.strip() and sign and right.strip()):
            raise UsageError(f"--{option} {text!r} is not understood, it is written {form}")
        yield left.strip(), right.strip()


def number_of(value: Any, option: str) -> float:
    """Convert a number, or a text with a number, to float; UsageError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{option} is {value!r}, expected a number") from None
