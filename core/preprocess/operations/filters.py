"""Operations that select episodes and rows: by number, or by a condition such as `length > 50 and return > 200`.

Conditions are parsed by a small grammar of their own, never by Python:

condition   = both ("or" both)*
both        = negation ("and" negation)*
negation    = "not" negation | "(" condition ")" | comparison | name
comparison  = operand (("<" | "<=" | ">" | ">=" | "==" | "!=") operand)+
operand     = number | "true" | "false" | name
name        = word ("." word)* ["[" number ("," number)* "]"]

A name that is compared with nothing is true or false by itself.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError, did_you_mean
from ...format.contracts import Array
from ...format.episodes import COLUMNS, EpisodeTable, parse_episodes, select_episodes
from ...ted.schema import FLAGS, NEXT, SINGLETONS, Field, Key, key_name
from .base import (
    KEPT,
    BoundOperation,
    Columns,
    Discount,
    EpisodeChoice,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    texts_of,
)

Values: TypeAlias = np.ndarray[Any, Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))"
    r"|(?P<word>[A-Za-z_]\w*(?:\.\w+)*(?:\[\s*\d+(?:\s*,\s*\d+)*\s*\])?)"
    r"|(?P<sign><=|>=|==|!=|<|>|\(|\)))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_DEEPEST = 100
"""Nesting beyond which nobody means it; Python's own stack holds more."""


class Name(NamedTuple):
    """A field, or one element of its rows."""

    field: str
    element: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.field}[{', '.join(map(str, self.element))}]" if self.element else self.field


class _Node(ABC):
    @abstractmethod
    def value(self, columns: Mapping[Name, Values]) -> Any:
        """Return one value a row, or one for all."""

    @abstractmethod
    def names(self) -> Iterator[Name]:
        """Name what has to be known."""


@dataclass(frozen=True, slots=True)
class _Constant(_Node):
    constant: float | int | bool

    def value(self, columns: Mapping[Name, Values]) -> Any:
        return self.constant

    def names(self) -> Iterator[Name]:
        return iter(())


@dataclass(frozen=True, slots=True)
class _Field(_Node):
    name: Name

    def value(self, columns: Mapping[Name, Values]) -> Any:
        return columns[self.name]

    def names(self) -> Iterator[Name]:
        yield self.name


@dataclass(frozen=True, slots=True)
class _Comparison(_Node):
    signs: tuple[str, ...]
    operands: tuple[_Node, ...]

    def value(self, columns: Mapping[Name, Values]) -> Any:
        values = [operand.value(columns) for operand in self.operands]
        found: Any = True
        for sign, left, right in zip(self.signs, values, values[1:], strict=False):
            found = np.logical_and(found, _COMPARISONS[sign](left, right))
        return found

    def names(self) -> Iterator[Name]:
        for operand in self.operands:
            yield from operand.names()


@dataclass(frozen=True, slots=True)
class _Joined(_Node):
    every: bool
    parts: tuple[_Node, ...]

    def value(self, columns: Mapping[Name, Values]) -> Any:
        join = np.logical_and if self.every else np.logical_or
        found: Any = self.parts[0].value(columns)
        for part in self.parts[1:]:
            found = join(found, part.value(columns))
        return found

    def names(self) -> Iterator[Name]:
        for part in self.parts:
            yield from part.names()


@dataclass(frozen=True, slots=True)
class _Not(_Node):
    part: _Node

    def value(self, columns: Mapping[Name, Values]) -> Any:
        return np.logical_not(self.part.value(columns))

    def names(self) -> Iterator[Name]:
        return self.part.names()


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on rows. `text` is as it was written, `names` are the fields that it looks at."""

    text: str
    names: tuple[Name, ...]
    _root: _Node

    def holds(self, columns: Mapping[Name, Values], rows: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each of `rows` rows whether the condition holds; columns are `[rows]`. NaN compares as unlike."""
        found = np.asarray(self._root.value(columns)) != 0  # a flag may be kept as a number
        return np.broadcast_to(found, (rows,)).copy()


def parse_condition(text: str, known: Mapping[str, bool] | None = None) -> Condition:
    """Parse a condition. `known` maps each field that exists to whether it is true or false.

    UsageError names what is not understood and where, a field that does not exist, and a number that is compared with
    nothing.
    """
    parser = _Parser(text)
    root = parser.whole()
    names = tuple(dict.fromkeys(root.names()))
    if known is not None:
        _require_known(text, names, known)
        for name in parser.alone:
            if not known[name.field]:
                raise UsageError(
                    f"the condition {text!r} compares {str(name)!r}, which is neither true nor false, with nothing",
                    hint=f"write what it is compared with, like '{name} > 0'",
                )
    return Condition(text, names, root)


def _require_known(text: str, names: Iterable[Name], known: Iterable[str]) -> None:
    fields = sorted(known)
    for name in names:
        if name.field not in fields:
            meant = did_you_mean(name.field, fields)
            raise UsageError(
                f"the condition {text!r} names {name.field!r}, which is not there{meant}",
                hint=f"there are {', '.join(fields)}",
            )


class _Parser:
    """Reads a condition; `alone` are the names that are compared with nothing."""

    def __init__(self, text: str) -> None:
        self.alone: list[Name] = []
        self._text = text
        self._place = 0
        self._kind, self._token, self._start = "", "", 0
        self._depth = 0
        self._advance()

    def whole(self) -> _Node:
        found = self._condition()
        if self._kind:
            raise self._refused("'and', 'or' or the end")
        return found

    def _advance(self) -> None:
        rest = self._text[self._place :]
        self._start = self._place + len(rest) - len(rest.lstrip())
        if not rest.strip():
            self._kind, self._token = "", ""
            return
        match = _TOKEN.match(self._text, self._place)
        if match is None:
            self._kind, self._token = "unknown", self._text[self._start]
            raise self._refused("a field, a number or a comparison")
        assert match.lastgroup is not None
        self._kind, self._token, self._place = match.lastgroup, match[match.lastgroup], match.end()

    def _refused(self, expected: str) -> UsageError:
        found = f"{self._token!r} at character {self._start + 1}" if self._kind else "the end"
        return UsageError(
            f"the condition {self._text!r} is not understood, expected {expected}, found {found}",
            hint="a condition compares fields with numbers, like 'length > 50 and return > 200'",
        )

    def _condition(self) -> _Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._refused(f"a condition nested less than {_DEEPEST} deep")
        found = self._list("or", self._both, every=False)
        self._depth -= 1
        return found

    def _both(self) -> _Node:
        return self._list("and", self._negation, every=True)

    def _list(self, word: str, part: Callable[[], _Node], *, every: bool) -> _Node:
        parts = [part()]
        while (self._kind, self._token) == ("word", word):
            self._advance()
            parts.append(part())
        return parts[0] if len(parts) == 1 else _Joined(every, tuple(parts))

    def _negation(self) -> _Node:
        negated = False
        while (self._kind, self._token) == ("word", "not"):
            self._advance()
            negated = not negated
        found = self._nested() if self._token == "(" else self._comparison()
        return _Not(found) if negated else found

    def _nested(self) -> _Node:
        self._advance()
        found = self._condition()
        if self._token != ")":
            raise self._refused("')'")
        self._advance()
        return found

    def _comparison(self) -> _Node:
        operands, signs = [self._operand()], []
        while self._token in _COMPARISONS:
            signs.append(self._token)
            self._advance()
            operands.append(self._operand())
        if signs:
            return _Comparison(tuple(signs), tuple(operands))
        alone = operands[0]
        if not isinstance(alone, _Field):
            raise self._refused("a comparison")
        self.alone.append(alone.name)
        return alone

    def _operand(self) -> _Constant | _Field:
        kind, token = self._kind, self._token
        if kind == "number":
            self._advance()
            return _Constant(float(token) if set(token) & set(".eE") else int(token))
        if kind == "word" and token not in {"and", "or", "not"}:
            self._advance()
            return _Constant(token == "true") if token in {"true", "false"} else _Field(_name_of(token))
        raise self._refused("a field or a number")


def _name_of(token: str) -> Name:
    field, _, index = token.partition("[")
    return Name(field, tuple(int(part) for part in index.rstrip("]").split(",")) if index else ())


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
                f"the condition {self.condition!r} names return, but no episode has one",
                hint="returns need next.reward, or next.original_reward of n-step data: the reward of every step",
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
    """Keeps the rows for which a condition holds, such as `not truncated` or `observation[3] > 0.5`.

    Names are fields with one number a row, or one element of a field; `reward`, `done`, `terminated` and `truncated`
    mean the ones under `next`. Truth values need no comparison. An episode that loses rows in its middle becomes
    several, and the row before each gap is marked `truncated` and `done`; its next observation stays as it is.
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
        for name in condition.names:
            fields.require_one(name.field)
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
