"""Conditions such as `length > 50 and return > 200`: parsed by a small grammar of their own, never by Python.

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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...errors import UsageError, did_you_mean

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
            f"the condition {self._text!r} is not understood: {expected} is expected, found {found}",
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
