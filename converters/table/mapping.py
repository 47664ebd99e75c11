"""Parses the option `--map`, and makes fields of the columns of a table file.

A map such as `observation=obs.* action=act reward=r` consists of pairs of a key and its columns. Columns of a key are
separated by commas, pairs by blanks or commas. Names with special characters are quoted as in JSON: `action="my
column"`. A TOML file has the same contents: `observation = ["x", "y"]`.

Misspelt keys of TED, such as `obs`, are refused, since users would mistake the field for the intended one.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import FormatError, UsageError, did_you_mean, nearest
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.files import read_regular
from ...core.ted.schema import (
    EPISODE,
    FLAGS,
    NEXT,
    REWARD,
    Field,
    Key,
    Timing,
    inexact_as_float,
    key_name,
    length_key,
    role_of,
    safe_part,
    text_fields,
)
from .columns import TEXT, TableColumn, TableFile

GivenMap: TypeAlias = str | Mapping[str, Any] | Sequence[str]
_TOKEN = re.compile(r'\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<plain>[^\s,="]+)|(?P<mark>[=,]))')
_PLAIN = re.compile(r'[^\s,="]+')
_EXAMPLE = "observation=obs action=act reward=r"


def parse_map(texts: GivenMap) -> dict[Key, tuple[str, ...]]:
    """Return the columns of each key, in the given order.

    A text without `=` that ends in `.toml` is the name of a file. A mapping has for each key a column, a sequence of
    columns or another mapping, like such a file.

    Raises:
        UsageError: a pair is invalid, a key occurs twice or contains another one, or a file cannot be read.
    """
    found: dict[Key, tuple[str, ...]] = {}
    for part in [texts] if isinstance(texts, str | Mapping) else texts:
        for name, columns in _pairs_in(part) if isinstance(part, str) else _flattened("", part, "map"):
            key = tuple(name.split("."))
            if not all(key):
                raise UsageError(f"--map has the key {name!r}, expected keys like observation or next.observation")
            for other in found:
                if key[: len(other)] == other or other[: len(key)] == key:
                    what = "twice" if key == other else f"and {key_name(other)!r}, one of which contains the other"
                    raise UsageError(f"--map has the key {name!r} {what}")
            found[key] = columns
    return found


def normal_map(texts: GivenMap) -> list[str]:
    """Return a map in normal form, one pair in each text, with the contents of files; equal maps give equal texts.

    Pairs are sorted by the first part of the key; keys with the same first part, such as `observation`, stay in the
    given order, since the first observation of a robot log determines its steps.
    """
    pairs = sorted(parse_map(texts).items(), key=lambda pair: pair[0][0])
    return [f"{key_name(key)}={','.join(map(quoted_name, columns))}" for key, columns in pairs]


def quoted_name(name: str) -> str:
    """Return the name of a column in the syntax of `--map`, quoted if necessary."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _pairs_in(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    if text.strip().endswith(".toml") and "=" not in text:
        yield from _pairs_of_file(fs.expanded(text.strip()))
        return
    tokens = list(_tokens(text))
    at = 0
    while at < len(tokens):
        if at + 2 >= len(tokens) or tokens[at + 1] != ("mark", "=") or tokens[at][0] == tokens[at + 2][0] == "mark":
            raise _no_pairs(text)
        name, columns = tokens[at][1], [tokens[at + 2]]
        at += 3
        while at < len(tokens) and tokens[at] == ("mark", ","):
            at += 1
            if at + 1 < len(tokens) and tokens[at + 1] == ("mark", "="):
                break
            columns.append(tokens[at] if at < len(tokens) else ("mark", ""))
            at += 1
        if any(kind == "mark" for kind, _ in columns):
            raise _no_pairs(text)
        yield name, tuple(column for _, column in columns)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _no_pairs(text)
        kind = str(token.lastgroup)
        try:
            yield (
                ("name", json.loads(token[kind]))
                if kind == "quoted"
                else ("mark" if kind == "mark" else "name", token[kind])
            )
        except ValueError as error:
            raise _no_pairs(text) from error
        at = token.end()


def _no_pairs(text: str) -> UsageError:
    return UsageError(f"--map {text!r} is not of the form KEY=COLUMN", hint=f"write pairs like {_EXAMPLE}")


def _pairs_of_file(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    try:
        content = tomllib.loads(read_regular(path).decode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--map {path} cannot be read: {error}", hint='it is TOML, with lines like observation = ["x", "y"]'
        ) from error
    yield from _flattened("", content, f"--map {path}")


def _flattened(prefix: str, content: Any, what: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"{what} is {content!r}, expected columns by key", hint=f"write pairs like {_EXAMPLE}")
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flattened(f"{prefix}{name}.", value, what)
            continue
        columns = [value] if isinstance(value, str) else value
        if (
            not isinstance(columns, list | tuple)
            or not columns
            or not all(isinstance(one, str) and one for one in columns)
        ):
            raise UsageError(f"{what}: {prefix}{name} is {value!r}, expected a column or a list of columns")
        yield f"{prefix}{name}", tuple(columns)


_MEANT = {
    "observation": ("obs", "ob", "observ", "observations"),
    "action": ("act", "acts", "actions"),
    "reward": ("rew", "rews", "rwd", "rewards"),
    "state": ("states",),
    "pixels": ("pixel",),
    "next.observation": (
        "next_observation", "next_observations", "next_obs", "obs_next", "observation_next", "observations_next",
        "new_obs", "nextobservation",
    ),
    "next.state": ("next_state", "next_states", "state_next"),
    "next.reward": ("next_reward", "next_rewards"),
}  # fmt: skip
_MEANT_BY = {typed: key for key, names in _MEANT.items() for typed in names}
_ENDS = frozenset(
    {
        "done", "dones", "is_done", "terminal", "terminals", "is_terminal", "terminated", "termination", "terminations",
        "terminate", "truncated", "truncation", "truncations", "timeout", "timeouts",
    }
)  # fmt: skip
_FLAG_NAMES = frozenset({"done", "terminated", "truncated"})
_KNOWN = ("observation", "action", "reward", "state", "pixels", "terminated", "truncated")
_CUTOFF = 0.82


def require_ted_key(key: Key, columns: tuple[str, ...]) -> None:
    """Raise UsageError for a key that rbtool makes itself, and for a misspelt key of TED."""
    under_next = len(key) > 1 and key[0].lower() == NEXT
    own = key[1:] if under_next else key
    if own in FLAGS or own in {EPISODE, (NEXT,)}:
        how = "--episode-key COLUMN" if own == EPISODE else "--ends TERMINATED,TRUNCATED"
        raise UsageError(f"--map has the key {key_name(key)!r}, which rbtool makes itself", hint=f"use {how}")
    meant = _meant(own[0])
    if meant in _FLAG_NAMES:
        raise UsageError(
            f"--map has the key {key_name(key)!r}, but flags cannot be mapped",
            hint="name their columns in --ends TERMINATED,TRUNCATED",
        )
    path = tuple((meant or own[0]).split("."))
    right = (NEXT, *path, *own[1:]) if under_next and path[0] != NEXT else (*path, *own[1:])
    if right == key or not (meant or under_next):
        return
    listed = ",".join(map(quoted_name, columns))
    raise UsageError(
        f"--map has the key {key_name(key)!r}; did you mean {key_name(right)!r}?",
        hint=f"write {key_name(right)}={listed}, or for a field of that name info.{key_name(own)}={listed}",
    )


def _meant(name: str) -> str:
    """Return the key of TED that equals or resembles a name at the root, "" if there is none."""
    typed = name.lower()
    if typed in _ENDS:
        return "done"
    if typed in _MEANT_BY:
        return _MEANT_BY[typed]
    return nearest(typed, [one for one in _KNOWN if one[:2] == typed[:2]], cutoff=_CUTOFF, whole=True)


STATES = frozenset({"observation", "state", "pixels"})
"""First parts of keys whose values are known before and after each step."""
TEXTS = frozenset({"language_instruction", "instruction", "language", "prompt"})
"""Last parts of keys that are always text, even if a column of CSV contains only numbers."""
PLACEHOLDERS = frozenset({"COLUMN", "TERMINATED", "TRUNCATED"})
"""Words in proposals and hints that stand for names to be filled in."""
_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Mapped:
    """A field and its columns, which are concatenated if there are several.

    A column of strings makes a field of text, as wide as the longest string. `after` are the columns with the values
    after each step; with None, these are taken from the following row.
    """

    field: Field
    timing: Timing
    columns: tuple[TableColumn, ...]
    after: tuple[TableColumn, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the values are strings."""
        return self.columns[0].is_text


def lookup(name: str, columns: Iterable[str]) -> str | None:
    """Find a column by its name, with groups separated by `.` or `/`; None unless exactly one matches."""
    known = list(columns)
    if name in known:
        return name
    same = [one for one in known if parts(one) == parts(name)]
    return same[0] if len(same) == 1 else None


def parts(name: str) -> tuple[str, ...]:
    """Split the name of a column into its groups and its own name."""
    return tuple(re.split(r"[./]", name.strip("/")))


class TableMapping:
    """The fields that a map makes of the columns of a file.

    Raises UsageError for a column that the file does not have, FormatError for columns that cannot be mapped.
    """

    def __init__(self, file: TableFile, given: Mapping[Key, Sequence[str]]) -> None:
        self._file = file
        if not given:
            raise UsageError(
                f"{file.path}: --map is missing, which states the columns of the observation and the action",
                hint=f"name them, as in --map observation=OBS --map action=ACT; {columns_text(file, quoted=True)}",
            )
        for key, names in given.items():
            if key[-1] in TEXTS and len(names) == 1 and (column := lookup(names[0], file.columns)) is not None:
                file.keep_text(column)
        found: dict[Key, tuple[TableColumn, ...]] = {}
        for key, names in given.items():
            require_ted_key(key, tuple(names))
            for made, columns in self._expanded(key, names):
                if made in found:
                    raise UsageError(f"--map gives two columns for {key_name(made)!r}")
                found[made] = columns
        self.fields = tuple(self._fields(found))
        keys = {one.field.key for one in self.fields}
        for one in self.fields:
            if one.is_text and length_key(one.field.key) in keys:
                raise UsageError(
                    f"--map has the key {key_name(length_key(one.field.key))!r}, which is reserved for the lengths of "
                    f"the text {one.field.name}", hint="choose another key",
                )  # fmt: skip
        if not any(one.timing == "state" for one in self.fields):
            raise UsageError(
                f"--map has no observation for {file.path}",
                hint=f"add observation=COLUMN; {columns_text(file, quoted=True)}",
            )

    def source_fields(self, widths: Mapping[Key, int]) -> Iterator[tuple[Field, Timing]]:
        """Yield the source fields with their timings; `widths` has the length of the longest text by key."""
        for one in self.fields:
            found = text_fields(one.field.key, widths[one.field.key]) if one.is_text else [one.field]
            yield from ((field, one.timing) for field in found)

    def text_widths(self) -> dict[Key, int]:
        """Read all texts; return the length of the longest in bytes, by key."""
        texts = (one for one in self.fields if one.is_text)
        return {
            one.field.key: max(self._file.longest_text(column) for column in (*one.columns, *(one.after or ())))
            for one in texts
        }

    @property
    def columns(self) -> list[TableColumn]:
        """The distinct mapped columns."""
        used = [column for one in self.fields for column in (*one.columns, *(one.after or ()))]
        return list({column.name: column for column in used}.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on a missing action or reward."""
        there = {one.field.key[0] for one in self.fields}
        what = [name for name in ("action", "reward") if name not in there]
        return (f"no {' and no '.join(what)} is mapped: the dataset has none",) if what else ()

    @property
    def renamed(self) -> dict[str, str]:
        """The places of columns in fields that have other names, such as `observation[1]` in a vector."""
        found: dict[str, list[str]] = {}
        for one in self.fields:
            for columns, key in ((one.columns, one.field.key), (one.after or (), (NEXT, *one.field.key))):
                first = 0
                for column in columns:
                    size = math.prod(column.shape)
                    place = f"[{first}]" if not column.shape else f"[{first}:{first + size}]"
                    name = key_name((NEXT, *REWARD) if one.field.key == REWARD else key)
                    found.setdefault(column.name, []).append(name + place * (len(columns) > 1))
                    first += size
        return {column: ", ".join(names) for column, names in found.items() if names != [column]}

    def _expanded(self, key: Key, names: Sequence[str]) -> Iterator[tuple[Key, tuple[TableColumn, ...]]]:
        """Yield the keys and columns of one pair; a group gives a key for each of its columns."""
        if len(names) == 1 and re.search(r"[./]\*$", names[0]):
            group = parts(names[0])[:-1]
            inside = [one for one in self._file.columns if parts(one)[: len(group)] == group and parts(one) != group]
            if not inside:
                raise self._unknown(key, names[0])
            for name in inside:
                yield (*key, *map(safe_part, parts(name)[len(group) :])), (self._usable(name),)
            return
        found = [self._usable(one) for name in names for one in self._named(key, name)]
        yield tuple(map(safe_part, key)), tuple(found)

    def _named(self, key: Key, name: str) -> list[str]:
        known = lookup(name, self._file.columns)
        if known is not None:
            return [known]
        if not name.endswith("*"):
            raise self._unknown(key, name)
        pattern = re.compile(re.escape(name[:-1]) + r"(\d+)")
        numbered = {int(match[1]): one for one in self._file.columns if (match := pattern.fullmatch(one))}
        if not numbered:
            raise self._unknown(key, name)
        numbers = sorted(numbered)
        missing = set(range(numbers[0], numbers[-1] + 1)) - set(numbers)
        if missing or numbers[0] > 1:
            gap = min(missing, default=0)  # numbers may begin at 0 or 1
            raise UsageError(
                f"--map {key_name(key)}={name}: the columns are numbered from {numbers[0]} to {numbers[-1]}, and "
                f"{name[:-1]}{gap} is missing",
                hint="name the columns in the order that they have in a row, separated by commas",
            )
        return [numbered[number] for number in numbers]

    def _usable(self, name: str) -> TableColumn:
        column = self._file.columns[name]
        if column.is_text:
            self._file.require_text(column)
        else:
            self._file.require_numbers(column)
        return column

    def _unknown(self, key: Key, name: str) -> UsageError:
        return unknown_column(self._file, f"--map {key_name(key)}={quoted_name(name)}", name, quoted=True)

    def _fields(self, found: Mapping[Key, tuple[TableColumn, ...]]) -> Iterator[Mapped]:
        after = {key[1:]: columns for key, columns in found.items() if key[0] == NEXT and len(key) > 1}
        before = {key: columns for key, columns in found.items() if key[0] != NEXT}
        if REWARD in before and REWARD in after:
            raise UsageError("--map has reward and next.reward, which are the same", hint="leave out one of them")
        for key, columns in before.items():
            yield self._field(key, columns, after.pop(key, None))
        for key, columns in after.items():
            made = self._field(key, columns, None)
            if made.timing == "state":
                raise UsageError(
                    f"--map has next.{key_name(key)} and no {key_name(key)}", hint=f"add {key_name(key)}=COLUMN"
                )
            yield Mapped(made.field, "result", columns)

    def _field(self, key: Key, columns: tuple[TableColumn, ...], after: tuple[TableColumn, ...] | None) -> Mapped:
        dtype, shape = self._form(key, columns)
        if key == REWARD:
            if not all(one.is_scalar for one in columns) or len(columns) > 1:
                raise FormatError(
                    f"{self._file.path}: the reward must be one number per row, {key_name(key)} is {shape}"
                )
            return Mapped(Field(key, dtype, (), "reward"), "result", columns)
        if after is not None and (form := self._form((NEXT, *key), after)) != (dtype, shape):
            raise FormatError(
                f"{self._file.path}: {key_name(key)} is {dtype} {list(shape)}, and next.{key_name(key)} {form[0]} "
                f"{list(form[1])}"
            )
        is_state = key[0] in STATES or after is not None
        role = "text" if dtype == TEXT else role_of(key)
        return Mapped(Field(key, dtype, shape, role), "state" if is_state else "step", columns, after)

    def _form(self, key: Key, columns: tuple[TableColumn, ...]) -> tuple[str, tuple[int, ...]]:
        texts = [one.name for one in columns if one.is_text]
        if texts and (len(columns) > 1 or key == REWARD):
            what = "the reward" if key == REWARD else f"part of the vector {key_name(key)}"
            raise FormatError(f"{self._file.path}: {texts[0]!r} is text, and cannot be {what}")
        if len(columns) == 1:
            return columns[0].dtype, columns[0].shape
        if wide := [one.name for one in columns if len(one.shape) > 1]:
            raise FormatError(
                f"{self._file.path}: {wide[0]!r} has rows of more than one axis, and cannot be part of the vector "
                f"{key_name(key)}"
            )
        common = np.result_type(*(np.dtype(one.dtype) for one in columns))
        if any((one.dtype == "bool") != (common.kind == "b") for one in columns) or common.kind == "O":
            kinds = ", ".join(sorted({one.dtype for one in columns}))
            raise FormatError(f"{self._file.path}: the columns of {key_name(key)} have different types ({kinds})")
        return common.name, (sum(one.shape[0] if one.shape else 1 for one in columns),)


def unknown_column(file: TableFile, what: str, name: str, *, quoted: bool = False) -> UsageError:
    """Return the error for a column that the file does not have; `quoted` as in `columns_text`."""
    if name in PLACEHOLDERS:
        return UsageError(
            f"{what}: {name} is a placeholder for the name of a column", hint=columns_text(file, quoted=quoted)
        )
    inside = [one for one in file.columns if parts(one)[: len(parts(name))] == parts(name)]
    if inside:
        return UsageError(f"{what}: {name!r} is a group of {file.path}", hint=f"map all of it with {name}.*")
    meant = did_you_mean(name, file.columns)
    return UsageError(f"{what}: {file.path} has no column {name!r}{meant}", hint=columns_text(file, quoted=quoted))


def columns_text(file: TableFile, *, quoted: bool = False) -> str:
    """List the columns of a file for a hint; with `quoted`, in the syntax of `--map`."""
    names = [quoted_name(name) if quoted else name for name in sorted(file.columns)]
    more = f", … ({len(names):,} in all)" if len(names) > _MOST_SHOWN else ""
    return f"columns are {', '.join(names[:_MOST_SHOWN])}{more}"


def rows_of(path: Path, one: Mapped, columns: Sequence[TableColumn], read: Mapping[str, Array]) -> Array:
    """Concatenate the columns of a field to `[n, *shape]`; FormatError for whole numbers that become inexact."""
    if len(columns) == 1:
        rows = read[columns[0].name]
        return rows.reshape(len(rows), *one.field.shape)
    dtype = one.field.numpy
    for column in columns:
        values = read[column.name]
        if dtype.kind == "f" and inexact_as_float(values).any():
            raise FormatError(
                f"{path}: {column.name!r} has whole numbers above 2**53, which are not exact as {dtype} in "
                f"{one.field.name}"
            )
    return np.concatenate([read[one.name].reshape(len(read[one.name]), -1) for one in columns], 1).astype(
        dtype, copy=False
    )
