"""The contract of an operation, and how the value of its option is read."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from ...errors import SchemaError, UsageError
from ...format.contracts import Array, own_attributes, refuse_overrides
from ...format.episodes import EpisodeTable
from ...ted.schema import DTYPES, Field, Key, key_name
from ..processor import marked
from .columns import KEPT, Fields, LazyBatch, LazyColumn

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
    """One operation and its arguments: a frozen dataclass with a `name`, derived from one of the two classes below.

    Fields are `str`, `int`, `float`, `bool`, each also with None as default, or tuples of `str`, `int` or `float`: the
    keys of its table in a pipeline file and of its entry in a manifest. `__post_init__` raises UsageError for
    arguments that are invalid for every dataset. Operations that are equal give equal results.

    `describe`, `keeps`, `bind`, `needs` and `apply` are final: a class that overrides one raises FinalMethodError (a
    TypeError).
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
        """Yield the operations of one option of `rbtool preprocess`; here one for each text of `value`.

        UsageError for a value that is not understood. Only called for built-in operations.
        """
        return [cls(text) for text in texts_of(value, cls.name)]  # type: ignore[call-arg]

    @final
    def describe(self) -> dict[str, Any]:
        """Return it as JSON: its name, and its arguments where they are given."""
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
    """Changes, adds, removes or drops rows' fields; a class of your own implements `plan`.

    Rows of an operation come in blocks. Its result does not depend on where blocks begin and end; an operation that
    looks at other rows of an episode sets `whole_episodes`, and no row depends on another episode.
    """

    whole_episodes: ClassVar[bool] = False
    """Whether a block has to hold all rows of an episode."""

    drops_rows: ClassVar[bool] = False
    """Whether fewer rows may leave it than reach it."""

    @property
    def makes(self) -> str | None:
        """The name of the field that it makes, for the message to an operation that comes too early to use it."""
        return None

    @property
    def rescales(self) -> str | None:
        """The name of the field whose range of values is not that of the source any more."""
        return None

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
    """What an operation does to known fields, block by block; `after` are the fields that leave it."""

    operation: RowOperation

    def __init__(self, after: Fields) -> None:
        self.after = after

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_finals(cls, BoundOperation)

    @abstractmethod
    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        """Return the fields before it that the fields `wanted` after it are computed from."""

    @abstractmethod
    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        """Return the wanted fields for all rows of the batch, which has the fields `inputs(wanted)`.

        Columns as declared in `after`, or arrays `[rows, *shape]`, whose numbers are brought to the declared type
        (ResultRefused if it cannot hold them). Arrays of the batch are never edited.
        """

    def kept(self, batch: LazyBatch) -> NDArray[np.bool_] | None:
        """Return which rows leave it, bool `[rows]`, or None for all; called before `compute`.

        An episode that loses rows in its middle becomes several; the row before each gap is marked truncated.
        """
        return None

    @final
    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        """Return the fields that have to reach it for these to leave it."""
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
        batch.columns = {key: self._checked(key, found.get(key), batch.pieces.steps) for key in wanted}
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
