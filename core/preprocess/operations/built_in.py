"""The built-in operations: they select episodes and rows, rename and join fields, sum rewards, and change values.

Conditions such as `length > 50 and return > 200` are parsed by a small grammar of their own, never by Python:

    condition   = both ("or" both)*
    both        = negation ("and" negation)*
    negation    = "not" negation | "(" condition ")" | comparison | name
    comparison  = operand (("<" | "<=" | ">" | ">=" | "==" | "!=") operand)+
    operand     = number | "true" | "false" | name
    name        = word ("." word)* ["[" number ("," number)* "]"]

A name without a comparison is a field of truth values.
"""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import SchemaError, UsageError, did_you_mean, require_share
from ...format.contracts import Array
from ...format.episodes import COLUMNS, SCORE, EpisodeTable, parse_episodes, select_episodes
from ...format.returns import add_rewards_to_go, one_step_reward
from ...progress import some_of
from ...stats import Moments, QuantileSketch
from ...ted.schema import DTYPES, EPISODE, FLAGS, NEXT, NEXT_REWARD, SINGLETONS, Field, Key, is_floating, key_name
from ..processor import flagged
from .base import (
    KEPT,
    LENGTH,
    BoundOperation,
    Columns,
    Derivation,
    Discount,
    EpisodeChoice,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    in_next,
    names_of,
    new_key,
    number_of,
    pairs_of,
    promoted,
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
"""The deepest nesting of parentheses that is parsed, well below the limit of Python's stack."""


class Name(NamedTuple):
    """A field, or one element of its rows."""

    field: str
    element: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.field}[{', '.join(map(str, self.element))}]" if self.element else self.field


class _Node(ABC):
    """A node of the syntax tree of a condition."""

    @abstractmethod
    def value(self, columns: Mapping[Name, Values]) -> Any:
        """Return one value for each row, or one for all rows."""

    @abstractmethod
    def names(self) -> Iterator[Name]:
        """Yield the names that `columns` must have."""


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
    """A condition on rows. `text` is its source, `names` are the fields that it refers to."""

    text: str
    names: tuple[Name, ...]
    _root: _Node

    def holds(self, columns: Mapping[Name, Values], rows: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each row whether the condition holds. Columns are `[rows]`. NaN differs from every number."""
        found = np.asarray(self._root.value(columns)) != 0  # a flag may be stored as a number
        return np.broadcast_to(found, (rows,)).copy()


def parse_condition(text: str, known: Mapping[str, bool] | None = None) -> Condition:
    """Parse a condition. `known` maps each existing field to whether it holds truth values.

    UsageError for a syntax error, with its position; for a field that does not exist; and for a field of numbers
    without a comparison.
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
                f"the condition {text!r} names {name.field!r}, which does not exist{meant}",
                hint=f"there are {', '.join(fields)}",
            )


class _Parser:
    """A recursive-descent parser of conditions; `alone` are the names without a comparison."""

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


# The names that conditions on episodes can use, each with whether it is a flag.
_KNOWN = {name: dtype == "bool" for name, dtype in COLUMNS.items() if name not in {"explicit_start", "start"}}
_KNOWN["done"] = True


@dataclass(frozen=True)
class Episodes(EpisodeChoice):
    """Chooses episodes by number, like `0:100,250`. The numbers are the source's own."""

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
    """Chooses the episodes for which a condition holds, such as `length > 50 and return > 200`.

    The names in a condition are the columns of the episode table, its scores such as `score.quality`, and `done`, which
    means terminated or truncated. Truth values need no comparison. A `seed` or score that an episode does not have
    compares like NaN: it differs from every number.
    """

    name: ClassVar[str] = "filter"
    condition: str

    def __post_init__(self) -> None:
        self._parsed()

    def _parsed(self) -> Condition:
        scores = {one.field: False for one in parse_condition(self.condition).names if one.field.startswith(SCORE)}
        condition = parse_condition(self.condition, _KNOWN | scores)
        for name in condition.names:
            if name.element:
                raise UsageError(f"the condition {self.condition!r} names {name}, but episodes have one {name.field}")
        return condition

    def choose(self, table: EpisodeTable) -> Any:
        condition = self._parsed()
        table.require_scores(name.field for name in condition.names if name.field.startswith(SCORE))
        needs_returns = any(name.field == "return" for name in condition.names)
        if needs_returns and len(table) and np.isnan(table.total_reward).all():
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

    The names in a condition are fields with one number in each row, or one element of a field; `reward`, `done`,
    `terminated` and `truncated` mean the ones under `next`. Truth values need no comparison. An episode that loses rows
    in its middle is split into several; the row before each gap is marked `truncated` and `done`, and keeps its next
    observation.
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
    """Return the keys of the fields that a condition can name."""
    short = {key_name(key): (NEXT, *key) for key in SINGLETONS if (NEXT, *key) in fields}
    return {field.name: field.key for field in fields} | short


def _is_flag(field: Field) -> bool:
    return field.dtype == "bool" or field.key in (*FLAGS, *KEPT)


def _checked(field: Field, name: Name) -> Field:
    """Return `field`; UsageError unless `name` refers to one number in each of its rows, which can be compared."""
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
        with np.errstate(over="ignore"):  # a constant too large for float16 compares as infinite
            return self._condition.holds(values, batch.pieces.steps)

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        return {key: batch.columns[key] for key in wanted}


def _element(lazy: LazyColumn, name: Name) -> Array:
    numbers = lazy.numbers
    place: Any = (slice(None), *name.element)
    return numbers[place] if name.element else numbers.reshape(len(numbers))


_STAY = (*KEPT, NEXT_REWARD, EPISODE)


@dataclass(frozen=True)
class Rename(RowOperation):
    """Renames a field, or a group of fields, and its counterpart under `next`."""

    name: ClassVar[str] = "rename"
    key: str
    to: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(old, new) for old, new in pairs_of(value, cls.name, "old=new")]

    @property
    def makes(self) -> str:
        return self.to

    def plan(self, fields: Fields) -> BoundOperation:
        moves = {old: self._moved(old) for old in fields.twinned(self.key)}
        for old, new in moves.items():
            if old in (EPISODE, *KEPT):
                raise UsageError(f"{key_name(old)!r} cannot be renamed: it is reserved for the layout of episodes")
            if new in fields and new not in moves:
                raise UsageError(f"rename {key_name(old)}={key_name(new)}: {key_name(new)!r} already exists")
        return _moving(fields, moves)

    def _moved(self, old: Key) -> Key:
        apart = self.key.startswith(f"{NEXT}.")
        if apart != self.to.startswith(f"{NEXT}."):
            raise UsageError(
                f"rename {self.key}={self.to}: fields before the step and those after it, under next, stay apart"
            )
        target = new_key(self.to, self.name)
        side, path = ((NEXT,), old[1:]) if old[0] == NEXT and not apart else ((), old)
        for depth in range(1, len(path) + 1):
            if key_name(path[:depth]) == self.key:
                return (*side, *target, *path[depth:])
        return (*side, *target[:-1], target[-1] + LENGTH)  # `old` is the field with the lengths of a text


def _moving(fields: Fields, moves: Mapping[Key, Key]) -> BoundOperation:
    changes: dict[Key, Field | None] = dict.fromkeys(moves)
    changes |= {new: Field(new, fields[old].dtype, fields[old].shape, fields[old].role) for old, new in moves.items()}
    after = fields.replaced(changes, made={new for old, new in moves.items() if old in fields.made})
    after = after.traced({new: (old,) for old, new in moves.items()})
    return FieldChanges(after, {new: Derivation((old,), _renamed(key_name(new))) for old, new in moves.items()})


def _renamed(name: str) -> Callable[[Sequence[LazyColumn]], LazyColumn]:
    def compute(inputs: Sequence[LazyColumn]) -> LazyColumn:
        lazy = inputs[0]
        return LazyColumn(name, lazy.dtype, lazy.shape, lazy.parts)

    return compute


@dataclass(frozen=True)
class _OnNames(RowOperation):
    """An operation whose argument is a list of at least one name of a field or group."""

    keys: tuple[str, ...]

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(names_of(value, cls.name))]

    def __post_init__(self) -> None:
        if not self.keys:
            raise UsageError(f"{self.name} names no fields, expected at least one")


@dataclass(frozen=True)
class Select(_OnNames):
    """Keeps the named fields and groups, and their counterparts under `next`.

    `next.reward`, the flags under `next`, `episode`, and the fields that earlier operations have added are kept as
    well. Use `exclude` to remove them.
    """

    name: ClassVar[str] = "select"

    def plan(self, fields: Fields) -> BoundOperation:
        kept = {key for name in self.keys for key in fields.covered(name)}
        kept |= fields.made.union(_STAY)
        return _without(fields, [field.key for field in fields if field.key not in kept], "not selected")


@dataclass(frozen=True)
class Exclude(_OnNames):
    """Removes the named fields and groups, and their counterparts under `next`.

    A name that starts with `next.` refers only to the field under `next`. The flags under `next` stay, because they
    mark where episodes end; UsageError for a name that refers only to flags.
    """

    name: ClassVar[str] = "exclude"

    def plan(self, fields: Fields) -> BoundOperation:
        lost = []
        for name in self.keys:
            found = [key for key in fields.covered(name) if key not in KEPT]
            if not found or name == NEXT:
                raise UsageError(f"exclude {name}: {', '.join(map(key_name, KEPT))} mark where episodes end, and stay")
            lost += found
        return _without(fields, lost, "excluded")


def _without(fields: Fields, lost: Sequence[Key], why: str) -> BoundOperation:
    return FieldChanges(fields.replaced(dict.fromkeys(lost)).traced({}, why), {})


OBSERVATION: Key = ("observation",)


@dataclass(frozen=True)
class Cat(RowOperation):
    """Joins fields into one along their last dimension, in the order given, and likewise their counterparts in `next`.

    The parts are removed. A group stands for all fields in it, sorted by name. Types are promoted as in NumPy. If
    `next` lacks one of the parts, the other parts stay there, and `next` gets no joined field.
    """

    name: ClassVar[str] = "cat"
    key: str
    parts: tuple[str, ...]

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        pairs = pairs_of(value, cls.name, "new=part,part, like obs=observation.a,observation.b")
        return [cls(key, names_of(parts, cls.name)) for key, parts in pairs]

    @property
    def makes(self) -> str:
        return self.key

    def plan(self, fields: Fields) -> BoundOperation:
        if not self.parts:
            raise UsageError(f"cat {self.key}: no parts, expected at least one")
        out = new_key(self.key, self.name)
        parts = list(dict.fromkeys(key for part in self.parts for key in sorted(self._part(fields, part))))
        if len({key[0] == NEXT for key in parts} | {out[0] == NEXT}) > 1:
            raise UsageError(
                f"cat {self.key}={','.join(map(key_name, parts))}: fields before the step and those after it, under "
                "next, stay apart"
            )
        for key in parts:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                raise UsageError(f"{key_name(key)!r} cannot be part of {self.key!r}: it is not a number to learn from")
        return _joining(fields, out, parts, lambda found: _cat_field(fields, out, found))

    def _part(self, fields: Fields, name: str) -> list[Key]:
        found = fields.twinned(name)
        root = [key for key in found if key[0] != NEXT]
        return root or found


def _cat_field(fields: Fields, out: Key, parts: Sequence[Key]) -> Field:
    """Return the declaration of the field that results from joining the parts."""
    shapes = [fields[key].shape or (1,) for key in parts]
    if len({shape[:-1] for shape in shapes}) > 1:
        listed = ", ".join(f"{key_name(key)} {list(shape)}" for key, shape in zip(parts, shapes, strict=True))
        raise UsageError(f"{key_name(out)!r} cannot be joined along the last dimension of {listed}")
    roles = {fields[key].role for key in parts}
    role = roles.pop() if len(roles) == 1 else "observation"
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return Field(out, promoted([fields[key].dtype for key in parts]), shape, role)


@dataclass(frozen=True)
class Flatten(RowOperation):
    """Joins all observations into one vector `observation`, sorted by name, row-major, and likewise under `next`.

    Observations are the fields with the role `observation` that are both at the root and under `next`; if there are
    none, those at the root. The vector is float64 if one of them is, else float32; whole numbers that are not exact in
    it are refused. Values do not change: numbers of discrete spaces do not become one-hot vectors.
    """

    name: ClassVar[str] = "flatten"

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls()]

    def plan(self, fields: Fields) -> BoundOperation:
        root = sorted(
            f.key for f in fields if f.role == "observation" and f.key[0] != NEXT and f.key not in fields.made
        )
        parts = [key for key in root if in_next(key) in fields and key not in SINGLETONS] or root
        if not parts:
            raise UsageError("flatten found no field with the role of an observation")
        bad = [key for key in parts if "complex" in fields[key].dtype]
        if bad:
            raise UsageError(f"{key_name(bad[0])!r} is complex and cannot become part of a vector of floats")
        if OBSERVATION in fields and OBSERVATION not in parts:
            raise UsageError("flatten would write 'observation', which exists on one side of the step only")
        _refuse_rest_of_group(fields, parts)
        wide = any(fields[key].dtype == "float64" for key in parts)
        dtype = "float64" if wide else "float32"

        def flat(found: Sequence[Key]) -> Field:
            out = OBSERVATION if found[0][0] != NEXT else in_next(OBSERVATION)
            return Field(out, dtype, (sum(_width(fields[key]) for key in found),), "observation")

        return _joining(fields, OBSERVATION, parts, flat, flatten=True)


def _refuse_rest_of_group(fields: Fields, parts: Sequence[Key]) -> None:
    """Raise UsageError if other fields, such as texts, would stay in the group `observation`.

    The vector takes the place of the group, so that they could not be stored.
    """
    sides = [(OBSERVATION, list(parts))]
    if all(in_next(key) in fields for key in parts):
        sides.append((in_next(OBSERVATION), [in_next(key) for key in parts]))
    rest = [
        key for group, found in sides for key in fields.by_key
        if len(key) > len(group) and key[: len(group)] == group and key not in found
    ]  # fmt: skip
    following = {in_next(key) for key in rest}
    lengths = {(*key[:-1], key[-1] + LENGTH) for key in rest if fields[key].role == "text"}
    left = [key_name(key) for key in rest if key not in following | lengths]
    if left:
        renamed = " ".join(f"--rename {name}={_outside(fields, name)}" for name in left)
        raise UsageError(
            f"flatten would write 'observation', a group in which {', '.join(left)} would remain",
            hint=f"add {renamed}",
        )


def _outside(fields: Fields, name: str) -> str:
    """Return a name outside of the group `observation`, preferably one that is not in use."""
    group = f"{OBSERVATION[0]}."
    short = name.replace(group, "", 1)
    taken = {".".join(key[:depth]) for key in fields.by_key for depth in range(1, len(key) + 1)}
    return short if short not in taken else name.replace(group, f"{OBSERVATION[0]}_", 1)


def _width(field: Field) -> int:
    return field.row_bytes // field.numpy.itemsize


def _joining(
    fields: Fields, out: Key, parts: Sequence[Key], field: Callable[[Sequence[Key]], Field], *, flatten: bool = False
) -> BoundOperation:
    """Return the bound operation that joins `parts`, and their counterparts under `next` if all of them exist."""
    sides = [(out, list(parts))]
    after = [in_next(key) for key in parts]
    if out[0] != NEXT and all(key in fields for key in after):
        sides.append((in_next(out), after))
    changes: dict[Key, Field | None] = {key: None for _, found in sides for key in found}
    for key, found in sides:
        if key in fields and key not in changes:
            raise UsageError(f"cat would write {key_name(key)!r}, which already exists and is not part of it")
        made = field(found)
        changes[key] = Field(key, made.dtype, made.shape, made.role)
    derived = {key: Derivation(tuple(found), _joined(changes[key], flatten)) for key, found in sides}
    return FieldChanges(fields.replaced(changes).traced(dict(sides)), derived)


def _joined(field: Field | None, flatten: bool) -> Callable[[Sequence[LazyColumn]], LazyColumn]:
    assert field is not None

    def compute(inputs: Sequence[LazyColumn]) -> LazyColumn:
        lazies = [lazy.reshaped((lazy.width,)) for lazy in inputs] if flatten else inputs
        return LazyColumn.joined(field.name, field.dtype, lazies)

    return compute


@dataclass(frozen=True)
class ClipReward(RowOperation):
    """Limits every reward under `next` to `low` and `high`; None leaves a side open. NaN stays NaN.

    Values that earlier operations computed from rewards, such as returns, do not change.
    """

    name: ClassVar[str] = "clip-reward"
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, str):
            low, sign, high = value.partition(":")
            if not sign:
                raise UsageError(f"--clip-reward {value!r}: expected LOW:HIGH, like -1:1")
            bounds = [text.strip() or None for text in (low, high)]
        elif isinstance(value, list | tuple) and len(value) == 2:
            bounds = list(value)
        else:
            raise UsageError(f"clip-reward is {value!r}, expected LOW:HIGH or two numbers")
        return [cls(*(None if bound is None else number_of(bound, cls.name) for bound in bounds))]

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise UsageError("clip-reward needs LOW:HIGH, LOW: or :HIGH")
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        if not low <= high:
            raise UsageError(f"clip-reward {low:g}:{high:g}: LOW must not be above HIGH")

    def plan(self, fields: Fields) -> BoundOperation:
        keys = reward_keys(fields, self.name)
        for field in (fields[key] for key in keys):
            whole = all(bound is None or float(bound).is_integer() for bound in (self.low, self.high))
            if "complex" in field.dtype or not (whole or "float" in field.dtype):
                raise UsageError(f"{field.name!r} is {field.dtype}, which cannot be clipped to {self.low}:{self.high}")
        return FieldChanges.of(fields, keys, lambda field: field, self._clipped)

    def _clipped(self, field: Field, lazy: LazyColumn) -> Any:
        numbers = lazy.numbers
        low, high = self.low, self.high
        if numbers.dtype.kind in "iu":
            limits = np.iinfo(numbers.dtype)
            low, high = (None if b is None else min(max(int(b), limits.min), limits.max) for b in (low, high))
        elif numbers.dtype.kind == "b":
            numbers = numbers.astype(np.int8)
        with np.errstate(over="ignore"):  # a bound too large for float16 has no effect
            return numbers.clip(low, high)  # type: ignore[arg-type]


def reward_keys(fields: Fields, operation: str) -> list[Key]:
    """List the rewards: the fields named `reward` under `next`, including its groups. UsageError if there are none."""
    found = [key for key in fields.by_key if key[0] == NEXT and key[-1] == "reward"]
    if not found:
        raise UsageError(f"{operation} needs next.reward, which does not exist")
    return found


def original_of(key: Key) -> Key:
    """Return the key under which n-step keeps the reward of the single step."""
    return (*key[:-1], f"original_{key[-1]}")


def reward_type(field: Field, operation: str) -> str:
    """Return the type of sums of rewards: the type of the rewards if they are floats, otherwise float32."""
    if field.role == "text":
        raise UsageError(f"{operation} needs numbers in {key_name(field.key)!r}, which is text")
    return field.dtype if is_floating(field.dtype) else "float32"


def _flags_there(fields: Fields) -> tuple[Key, ...]:
    """Return the existing flags under `next`."""
    return tuple(key for key in KEPT if key in fields)


def _ends(batch: LazyBatch, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows end a trajectory: the last of each episode, and every row with a flag.

    A flag in mid-episode stays as it is, and no sum or window extends beyond it.
    """
    ends = flags.copy()
    pieces = batch.pieces
    ends[(pieces.starts + pieces.rows - 1)[pieces.rows > 0]] = True
    return ends


_STEPS: Key = ("steps_to_next_obs",)
_GAMMA: Key = ("gamma",)
_NONTERMINAL: Key = ("nonterminal",)
_WINDOW = "multi_step"
_CUT: Key = (_WINDOW, "cut")


@dataclass(frozen=True)
class NStep(RowOperation):
    """Turns every step into a transition over m = min(`n`, steps to the end of its episode) steps.

    No window extends beyond the end of an episode. With n = 3, in an episode of 5 steps:

        step      0  1  2  3  4
        m         3  3  3  2  1      step 1 gets the sum of rewards 1, 2, 3 and the observation after step 3

    Fields under `next` get the value after the last step of the window. Each reward there becomes the sum of gamma^i
    times the rewards in the window; `next.original_reward` keeps the original. New fields, with one value in each row,
    are `steps_to_next_obs` (m, int64), `gamma` (gamma^m, float32) and `nonterminal` (m > 1, bool).

    The flags under `next` are still the flags of the step, because they mark where episodes end. The flags of the last
    step of the window are `multi_step.done`, `multi_step.terminated` and `multi_step.truncated`; `multi_step.cut` marks
    windows of less than n steps that do not end with a flag. A target is then `reward + gamma * ~multi_step.terminated
    * value(next)`. Names and meaning are as in the `MultiStep` transform.
    """

    name: ClassVar[str] = "n-step"
    whole_episodes: ClassVar[bool] = True
    n: int
    gamma: float

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"n-step is {value!r}, expected a whole number")
        return [cls(value, discount.needed(cls.name))]

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"n-step is {self.n}, expected a whole number from 1")
        require_share(f"the discount of {self.name}", self.gamma)

    def plan(self, fields: Fields) -> BoundOperation:
        rewards = reward_keys(fields, self.name)
        flags = _flags_there(fields)
        added = [
            Field(_STEPS, "int64", (), "info"),
            Field(_GAMMA, "float32", (), "info"),
            Field(_NONTERMINAL, "bool", (), "info"),
            Field(_CUT, "bool", (), "info"),
            *(Field((_WINDOW, key[-1]), fields[key].dtype, fields[key].shape, "info") for key in flags),
        ]
        for key in rewards:
            field = fields[key]
            added.append(Field(original_of(key), field.dtype, field.shape, "info"))
        for field in added:
            if field.key in fields:
                raise UsageError(f"n-step would write {field.name!r}, which already exists")
        changes: dict[Key, Field | None] = {
            key: Field(key, reward_type(fields[key], self.name), fields[key].shape, fields[key].role) for key in rewards
        }
        changes |= {field.key: field for field in added}
        after = fields.replaced(changes, made={field.key for field in added})
        return _BoundNStep(after, fields, self, rewards, flags)


class _BoundNStep(BoundOperation):
    def __init__(self, after: Fields, before: Fields, asked: NStep, rewards: list[Key], flags: tuple[Key, ...]) -> None:
        super().__init__(after)
        self._asked = asked
        self._rewards = frozenset(rewards)
        self._originals = {original_of(key): key for key in rewards}
        self._flags = flags
        self._ahead = {field.key for field in before if field.key[0] == NEXT} - {*rewards, *KEPT}
        self._windows = {(_WINDOW, key[-1]): key for key in flags}
        self._new = {_STEPS, _GAMMA, _NONTERMINAL, _CUT}

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        source = self._originals | self._windows
        return {*self._flags, *(source.get(key, key) for key in wanted if key not in self._new)}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        rows = np.arange(batch.pieces.steps)
        ended = flagged(batch.columns, rows)
        places = np.flatnonzero(_ends(batch, ended))
        last = np.minimum(rows + (self._asked.n - 1), places[np.searchsorted(places, rows)])
        steps = last - rows + 1
        gamma = self._asked.gamma
        new: dict[Key, Callable[[], Array]] = {
            _STEPS: lambda: steps,
            _GAMMA: lambda: (gamma ** steps.astype(np.float64)).astype(np.float32),
            _NONTERMINAL: lambda: steps > 1,
            _CUT: lambda: (steps < self._asked.n) & ~ended[last],
        }
        found: dict[Key, LazyColumn | Array] = {}
        for key in wanted:
            if key in new:
                found[key] = new[key]()
            elif key in self._originals:
                found[key] = batch.columns[self._originals[key]]
            elif key in self._windows:
                found[key] = batch.columns[self._windows[key]].taken(last)
            elif key in self._rewards:
                found[key] = _summed(batch.columns[key].numbers, steps, gamma)
            else:
                found[key] = batch.columns[key].taken(last) if key in self._ahead else batch.columns[key]
        return found


def _summed(rewards: Array, steps: NDArray[np.int64], gamma: float) -> Array:
    """Sum gamma^i r[t + i] over the window of each row, in float64, starting with i = 0."""
    rewards = rewards.astype(np.result_type(rewards.dtype, np.float64))
    total = rewards.copy()
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        for ahead in range(1, int(steps.max(initial=1)) if gamma else 1):
            inside = np.flatnonzero(steps > ahead)
            later, factor = rewards[inside + ahead], gamma**ahead
            # If the factor underflows to 0, an infinite reward would give NaN: 0 times infinity.
            total[inside] += factor * later if factor else np.where(np.isfinite(later), 0, later)
    return total


@dataclass(frozen=True)
class _Returns(RowOperation):
    whole_episodes: ClassVar[bool] = True
    out: ClassVar[Key]

    gamma: float

    def __post_init__(self) -> None:
        require_share(f"the discount of {self.name}", self.gamma)

    def plan(self, fields: Fields) -> BoundOperation:
        if NEXT_REWARD not in fields:
            raise UsageError(f"{self.name} needs next.reward, which does not exist")
        field = one_step_reward(fields)
        if field is None:
            raise UsageError(
                f"{self.name} needs the reward of every step, but next.reward holds sums over n steps, and "
                "next.original_reward does not exist"
            )
        if self.out in fields:
            raise UsageError(f"{self.name} would write {key_name(self.out)!r}, which already exists")
        made = Field(self.out, reward_type(field, self.name), field.shape, "info")
        return _BoundReturn(
            fields.replaced({self.out: made}, made=[self.out]), self.out, field.key, _flags_there(fields), self.gamma
        )


@dataclass(frozen=True)
class AddReturnToGo(_Returns):
    """Adds `return_to_go`: the sum of the rewards from each step to the end of its episode, discounted by `gamma`.

    A Decision Transformer conditions its policy on it. By default it is not discounted. It has the shape and type of
    the reward; float32 if rewards are whole numbers. After n-step, the rewards of single steps are summed.
    """

    name: ClassVar[str] = "return-to-go"
    out: ClassVar[Key] = ("return_to_go",)
    gamma: float = 1.0

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(discount.or_else(1.0))]


@dataclass(frozen=True)
class AddMcReturn(_Returns):
    """Adds `mc_return`: the discounted Monte Carlo return from each step on, to calibrate value functions (Cal-QL).

    The numbers equal `return-to-go` with the same discount. The discount must be given, because it belongs to a value
    function. The unknown rewards after the end of a truncated episode count as 0.
    """

    name: ClassVar[str] = "mc-return"
    out: ClassVar[Key] = ("mc_return",)

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(discount.needed(cls.name))]


class _BoundReturn(BoundOperation):
    def __init__(self, after: Fields, made: Key, reward: Key, flags: tuple[Key, ...], gamma: float) -> None:
        super().__init__(after)
        self._made = made
        self._reward = reward
        self._flags = flags
        self._gamma = gamma

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        if self._made not in wanted:
            return wanted
        return (wanted - {self._made}) | {self._reward, *self._flags}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, LazyColumn | Array] = {key: batch.columns[key] for key in wanted - {self._made}}
        if self._made in wanted:
            rewards = batch.columns[self._reward].numbers
            totals = rewards.astype(np.result_type(rewards.dtype, np.float64))
            ended = flagged(batch.columns, np.arange(len(rewards)))
            add_rewards_to_go(totals, _ends(batch, ended), self._gamma)
            found[self._made] = totals
        return found


@dataclass(frozen=True)
class Cast(RowOperation):
    """Changes the element type of a field, or of all fields in a group, and of its counterpart under `next`.

    Floats are rounded to the nearest value of the new type. A value that the type cannot represent, such as 300 in
    uint8 or 0.5 in int64, is refused.
    """

    name: ClassVar[str] = "cast"
    key: str
    dtype: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(key, dtype) for key, dtype in pairs_of(value, cls.name, "field=type, like observation=float32")]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"cast {self.key}: {self.dtype!r} is not an element type{did_you_mean(self.dtype, DTYPES)}",
                hint=f"there are {', '.join(DTYPES)}",
            )

    def plan(self, fields: Fields) -> BoundOperation:
        keys = [key for key in fields.twinned(self.key) if fields[key].dtype != self.dtype]
        for key in keys:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                what = "it is text" if fields[key].role == "text" else f"it is {fields[key].dtype} in every dataset"
                raise UsageError(f"cast {key_name(key)}={self.dtype}: {what}")
        return FieldChanges.of(
            fields, keys, lambda field: replace(field, dtype=self.dtype), lambda field, lazy: lazy.cast(self.dtype)
        )


METHODS = ("mean-std", "min-max", "quantile")
_QUANTILES = (0.01, 0.99)
_WIDEST = 1024
"""Leaves with more numbers in a row, such as images, have one pair of constants, as they have one line in `stats`."""

_BLOCK = 1 << 18
"""Numbers that are processed at a time, which limits the size of temporary float64 arrays."""

Measured: TypeAlias = dict[str, tuple[Moments, QuantileSketch | None]]
"""Statistics of the values of fields, by name. There is a sketch if quantiles are needed."""


@dataclass(frozen=True)
class Constants:
    """The shift and scale of one field: `(value - loc) / scale` is the normalised value.

    There is one number for each dimension, row-major, or one for all. `constant` lists the dimensions that never vary;
    their scale is 1. `nan` and `infinite` count the values that were ignored.
    """

    key: str
    loc: tuple[float, ...]
    scale: tuple[float, ...]
    constant: tuple[int, ...] = ()
    nan: int = 0
    infinite: int = 0

    def __post_init__(self) -> None:
        good = len(self.loc) == len(self.scale) and all(map(math.isfinite, (*self.loc, *self.scale)))
        if not good or not all(scale > 0 for scale in self.scale):
            raise UsageError(
                f"the constants of {self.key!r} have {len(self.loc)} numbers in loc and {len(self.scale)} in scale, "
                "expected as many finite ones, and scales above 0"
            )

    def describe(self) -> dict[str, Any]:
        """Return them as JSON."""
        found = {"key": self.key, "loc": list(self.loc), "scale": list(self.scale)}
        counts = {"constant": list(self.constant), "nan": self.nan, "infinite": self.infinite}
        return found | {name: value for name, value in counts.items() if value}

    @property
    def notes(self) -> list[str]:
        """Notes on the result."""
        found = []
        if self.constant:
            which = some_of(self.constant, 20)
            found.append(f"normalize: {self.key} never varies in dimension {which}, which is shifted but not divided")
        if self.nan or self.infinite:
            found.append(
                f"normalize: {self.nan:,} NaN and {self.infinite:,} infinite values of {self.key} did not count"
            )
        return found


@dataclass(frozen=True)
class NormalizeFields(RowOperation):
    """Normalises a field, or each field of a group, and its counterpart under `next` with the same constants.

    `mean-std` gives each dimension mean 0 and standard deviation 1. `min-max` maps the smallest and largest value of
    each dimension to -1 and 1, `quantile` its 1st and 99th percentile (accurate to 0.2 %). Dimensions that never vary
    are shifted to 0 and not divided. The result is float32, or float64 if the field was.

    The constants are measured on the rows that reach the operation. Every observation of an episode counts once,
    including the final one. NaN and infinite values are ignored. A field with more than 1,024 numbers in a row, such as
    images, has one pair of constants for all of them.

    With the `constants` of an earlier run, nothing is measured, so that other data gets the same scale.
    """

    name: ClassVar[str] = "normalize"
    key: str
    method: str = METHODS[0]
    constants: tuple[Constants, ...] = ()

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, Mapping):
            return [cls(str(key), str(method)) for key, method in value.items()]
        named = (name.partition(":") for name in names_of(value, cls.name))
        return [cls(key, method or METHODS[0]) for key, _, method in named]

    @property
    def rescales(self) -> str:
        return self.key

    @property
    def notes(self) -> Iterable[str]:
        return [note for part in self.constants for note in part.notes]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(
                f"normalize {self.key}: unknown method {self.method!r}, expected one of {', '.join(METHODS)}"
                f"{did_you_mean(self.method, METHODS)}"
            )

    def plan(self, fields: Fields) -> BoundNormalize:
        keys = fields.twinned(self.key)
        for field in (fields[key] for key in keys):
            if field.role in ("text", "id", "done") or "complex" in field.dtype or 0 in field.shape:
                what = f"{field.role} of {field.dtype} {list(field.shape)}"
                raise UsageError(f"normalize {field.name}: it is {what}")
        groups: dict[Key, list[Key]] = {}
        for key in keys:
            root = key[1:] if key[0] == NEXT and key[1:] in keys and key[1:] not in SINGLETONS else key
            groups.setdefault(root, []).append(key)
        for root, group in groups.items():
            shapes = {fields[key].shape for key in group}
            if len(shapes) > 1:
                raise UsageError(f"{key_name(root)!r} has another shape under next, so one scale does not fit both")
        names = sorted(map(key_name, groups))  # constants are kept by name
        if twice := [name for name in set(names) if names.count(name) > 1]:
            raise UsageError(f"normalize {self.key}: two fields are called {min(twice)!r}, expected names that differ")
        return BoundNormalize(fields, self, groups)

    def with_measurements(self, measured: Measured) -> NormalizeFields:
        """Return the operation with its constants; SchemaError if the range of the values exceeds float64."""
        found = tuple(_constants(name, self.method, *states) for name, states in sorted(measured.items()))
        return NormalizeFields(self.key, self.method, found)


def _constants(name: str, method: str, moments: Moments, sketch: QuantileSketch | None) -> Constants:
    low, high = moments.min, moments.max
    if sketch is not None:
        low, high = sketch.quantiles(_QUANTILES, moments.min, moments.max)
    with np.errstate(over="ignore", invalid="ignore"):
        if method == METHODS[0]:
            loc, scale = moments.mean, moments.std
        else:
            loc, scale = low + (high - low) / 2, (high - low) / 2
    still = ~(scale > 0) & ~np.isnan(scale) | moments.constant
    loc = np.where(moments.constant, np.where(moments.count > 0, moments.min, 0.0), loc)
    scale = np.where(still, 1.0, scale)
    with np.errstate(over="ignore", invalid="ignore"):
        reach = np.where(moments.count > 0, np.maximum(moments.max - loc, loc - moments.min), 0.0)
    if not (np.isfinite(loc) & np.isfinite(scale) & np.isfinite(reach)).all():
        raise SchemaError(f"the values of {name!r} are spread beyond what float64 can hold: cast or clip them first")
    return Constants(
        name, tuple(loc.tolist()), tuple(scale.tolist()), tuple(np.flatnonzero(still).tolist()),
        int(moments.nan.sum()), int(moments.infinite.sum()),
    )  # fmt: skip


class BoundNormalize(FieldChanges):
    """A normalisation of known fields. Without constants it only measures; with constants it normalises."""

    def __init__(self, before: Fields, asked: NormalizeFields, groups: Mapping[Key, Sequence[Key]]) -> None:
        self._groups = groups
        self._fields = {root: before[root] for root in groups}
        self._quantiles = asked.method == METHODS[2]
        self.measured = bool(asked.constants)
        known = {part.key: part for part in asked.constants}
        changes: dict[Key, Field | None] = {}
        derived = {}
        for root, group in groups.items():
            part = known.get(key_name(root))
            if self.measured and (part is None or len(part.loc) != self._width(root)):
                count = "none" if part is None else len(part.loc)
                raise UsageError(
                    f"normalize has {count} constants for {key_name(root)!r}, expected {self._width(root)}",
                    hint="they were measured on other fields; leave them out to measure again",
                )
            for key in group:
                old = before[key]
                dtype = "float64" if old.dtype == "float64" else "float32"
                changes[key] = field = Field(key, dtype, old.shape, old.role)
                derived[key] = Derivation((key,), _normalizing(field, part))
        super().__init__(before.replaced(changes), derived)

    def _width(self, root: Key) -> int:
        width = math.prod(self._fields[root].shape)
        return 1 if width > _WIDEST else width

    @property
    def looks_at(self) -> frozenset[Key]:
        """The keys of the fields that `measure` needs."""
        return frozenset(key for group in self._groups.values() for key in group)

    def nothing(self) -> Measured:
        """Return empty statistics."""
        return {
            key_name(root): (Moments(self._width(root)), QuantileSketch(self._width(root)) if self._quantiles else None)
            for root in self._groups
        }

    def measure(self, batch: LazyBatch) -> Measured:
        """Return the statistics of some rows.

        An observation is also the next observation of the step before. Under `next`, therefore, only the last row of
        each episode counts.
        """
        pieces = batch.pieces
        last = (pieces.starts + pieces.rows - 1)[pieces.ends & (pieces.rows > 0)]
        found = self.nothing()
        for root, group in self._groups.items():
            moments, sketch = found[key_name(root)]
            width = self._width(root)
            step = max(1, _BLOCK // width)
            lazies = [batch.columns[root], *(batch.columns[in_next(root)].taken(last) for key in group if key != root)]
            for lazy in lazies:
                values = lazy.numbers.reshape(-1, width)
                for start in range(0, len(values), step):
                    moments.merge(Moments.of(values[start : start + step]))
                    if sketch is not None:
                        sketch.update(values[start : start + step])
        return found


def _normalizing(field: Field, constants: Constants | None) -> Any:
    def compute(inputs: Sequence[LazyColumn]) -> Array:
        assert constants is not None, "measure comes first"
        return _normalized(inputs[0].numbers, field, constants)

    return compute


def _normalized(numbers: Array, field: Field, constants: Constants) -> Array:
    """Normalise in float64 and round once, block by block to keep temporary arrays small."""
    shape = field.shape if len(constants.loc) > 1 else ()
    loc, scale = (np.array(part).reshape(shape) for part in (constants.loc, constants.scale))
    out = np.empty(numbers.shape, field.numpy)
    step = max(1, _BLOCK // max(1, math.prod(field.shape)))
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values stay infinite
        for start in range(0, len(numbers), step):
            part = np.subtract(numbers[start : start + step], loc, dtype=np.float64)
            out[start : start + step] = np.divide(part, scale, out=part)
    return out
