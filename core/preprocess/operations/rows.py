"""The operation that leaves rows out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import UsageError
from ...format import Array
from ...ted import FLAGS, NEXT, SINGLETONS, Field, Key, as_numbers, key_name
from ..endings import marked
from ..expressions import Condition, Name, parse_condition
from .base import RowOperation, Step
from .fields import KEPT, Fields
from .lazy import Lazy, Sheet

__all__ = ["Where"]


@dataclass(frozen=True)
class Where(RowOperation):
    """Keeps the rows of which a condition holds, such as `not truncated` or `observation[3] > 0.5`.

    Names are fields with one number a row, or one element of a field; `reward`, `done`, `terminated` and `truncated`
    mean those under `next`. What is true or false need not be compared. An episode that loses rows in its middle falls
    into several, and the row before each gap bears `truncated` and `done`: the episode went on, only not here. Its next
    observation stays the one that was seen.
    """

    name: ClassVar[str] = "where"
    whole_episodes: ClassVar[bool] = True
    condition: str

    def __post_init__(self) -> None:
        parse_condition(self.condition)

    def bind(self, fields: Fields) -> Step:
        keys = _named(fields)
        condition = parse_condition(self.condition, {name: _is_flag(fields[key]) for name, key in keys.items()})
        return _WhereStep(
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


class _WhereStep(Step):
    def __init__(self, after: Fields, condition: Condition, fields: Mapping[Name, Field]) -> None:
        super().__init__(after)
        self._condition = condition
        self._fields = fields

    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        return wanted | {field.key for field in self._fields.values()}

    def apply(self, sheet: Sheet, wanted: frozenset[Key]) -> None:
        values = {name: _element(sheet.columns[field.key], name) for name, field in self._fields.items()}
        with np.errstate(over="ignore"):  # a number beyond float16 is infinite beside one: it compares as it should
            keep = self._condition.holds(values, sheet.pieces.steps)
        sheet.columns = {key: sheet.columns[key] for key in wanted}
        if keep.all():
            return
        rows = np.flatnonzero(keep)
        sheet.columns = {key: lazy.taken(rows) for key, lazy in sheet.columns.items()}
        sheet.pieces, cut = sheet.pieces.where(keep)
        for key, column in marked(sheet.columns, cut).items():
            sheet.columns[key] = Lazy.of(column, key_name(key))


def _element(lazy: Lazy, name: Name) -> Array:
    numbers = as_numbers(lazy.values, lazy.dtype)
    place: Any = (slice(None), *name.element)
    return numbers[place] if name.element else numbers.reshape(len(numbers))
