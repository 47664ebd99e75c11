"""Operations that select episodes and rows: by number, or by a condition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...format.contracts import Array
from ...format.episodes import COLUMNS, EpisodeTable, parse_episodes, select_episodes
from ...ted.schema import FLAGS, NEXT, SINGLETONS, Field, Key, key_name
from .base import BoundOperation, Columns, Discount, EpisodeChoice, Operation, RowOperation, texts_of
from .conditions import Condition, Name, parse_condition
from .fields import KEPT, Fields
from .lazy import LazyBatch, LazyColumn

_KNOWN = {name: dtype == "bool" for name, dtype in COLUMNS.items() if name not in {"explicit_start", "start"}}
_KNOWN["done"] = True

TABLE_NAMES = tuple(sorted(_KNOWN))
"""The names that conditions on episodes can use."""


@dataclass(frozen=True)
class Episodes(EpisodeChoice):
    """Takes the episodes of these numbers, `0:100,250`, as the source counts them."""

    name: ClassVar[str] = "episodes"
    numbers: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(",".join(texts_of(value, cls.name)))]

    def __post_init__(self) -> None:
        parse_episodes(self.numbers)

    def choose(self, table: EpisodeTable) -> Any:
        chosen = select_episodes(parse_episodes(self.numbers), table.episode.tolist())
        return np.isin(table.episode, chosen)


@dataclass(frozen=True)
class Filter(EpisodeChoice):
    """Takes the episodes of which a condition holds, such as `length > 50 and return > 200`.

    Names are the columns of the episode table, and `done`, which is terminated or truncated. What is true or false
    need not be compared. The `seed` of an episode without one compares like NaN: unlike everything.
    """

    name: ClassVar[str] = "filter"
    condition: str

    def __post_init__(self) -> None:
        self._parsed()

    def _parsed(self) -> Condition:
        condition = parse_condition(self.condition, _KNOWN)
        for name in condition.names:
            if name.element:
                raise UsageError(f"the condition {self.condition!r} names {name}, but episodes have one {name.field}")
        return condition

    def choose(self, table: EpisodeTable) -> Any:
        condition = self._parsed()
        asks = any(name.field == "return" for name in condition.names)
        if asks and len(table) and np.isnan(table.total_reward).all():
            raise UsageError(
                f"the condition {self.condition!r} names return, which is not known of any episode",
                hint="n-step data must keep next.original_reward, the reward of every step",
            )
        return condition.holds(_values(table), len(table))


def _values(table: EpisodeTable) -> Mapping[Name, Array]:
    columns = table.columns()
    if not table.has_seed.all():
        columns["seed"] = np.where(table.has_seed, table.seed.astype(np.float64), np.nan)
    columns["done"] = table.terminated | table.truncated
    return {Name(name, ()): column for name, column in columns.items()}


@dataclass(frozen=True)
class Where(RowOperation):
    """Keeps the rows of which a condition holds, such as `not truncated` or `observation[3] > 0.5`.

    Names are fields with one number a row, or one element of a field; `reward`, `done`, `terminated` and `truncated`
    mean those under `next`. What is true or false need not be compared. An episode that loses rows in its middle
    becomes several, and the row before each gap is marked `truncated` and `done`. Its next observation stays as it is.
    """

    name: ClassVar[str] = "where"
    whole_episodes: ClassVar[bool] = True
    drops_rows: ClassVar[bool] = True
    condition: str

    def __post_init__(self) -> None:
        parse_condition(self.condition)

    def plan(self, fields: Fields) -> BoundOperation:
        keys = _named(fields)
        condition = parse_condition(self.condition, {name: _is_flag(fields[key]) for name, key in keys.items()})
        return _BoundWhere(
            fields, condition, {name: _checked(fields[keys[name.field]], name) for name in condition.names}
        )


def _named(fields: Fields) -> dict[str, Key]:
    """What the names of a condition mean."""
    short = {key_name(key): (NEXT, *key) for key in SINGLETONS if (NEXT, *key) in fields}
    return {field.name: field.key for field in fields} | short


def _is_flag(field: Field) -> bool:
    return field.dtype == "bool" or field.key in (*FLAGS, *KEPT)


def _checked(field: Field, name: Name) -> Field:
    """Return the field that a name is of, where it is one number a row that can be compared."""
    shape, element = field.shape, name.element
    fits = len(element) == len(shape) and all(place < size for place, size in zip(element, shape, strict=True))
    if not fits and (element or shape not in ((), (1,))):
        count = f"{list(shape)} numbers a row" if shape else "one number a row"
        last = ", ".join(str(size - 1) for size in shape)
        raise UsageError(
            f"the condition compares {name}, and {field.name} has {count}",
            hint=f"name one of them, up to {name.field}[{last}]" if shape else f"name it {name.field}",
        )
    if "complex" in field.dtype:
        raise UsageError(f"the condition compares {name}, whose numbers are complex and have no order")
    return field


class _BoundWhere(BoundOperation):
    def __init__(self, after: Fields, condition: Condition, fields: Mapping[Name, Field]) -> None:
        super().__init__(after)
        self._condition = condition
        self._fields = fields

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        return wanted | {field.key for field in self._fields.values()}

    def kept(self, batch: LazyBatch) -> NDArray[np.bool_]:
        values = {name: _element(batch.columns[field.key], name) for name, field in self._fields.items()}
        with np.errstate(over="ignore"):  # a number beyond float16 compares as infinite
            return self._condition.holds(values, batch.pieces.steps)

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        return {key: batch.columns[key] for key in wanted}


def _element(lazy: LazyColumn, name: Name) -> Array:
    numbers = lazy.numbers
    place: Any = (slice(None), *name.element)
    return numbers[place] if name.element else numbers.reshape(len(numbers))
