"""The text of `--map`: which columns of a table become which key of TED.

`observation=obs.* action=act reward=r` are pairs of a key and its columns; several columns of a key are separated by
commas, and pairs by blanks or commas. A name with other characters is quoted as in JSON: `action="my column"`. A file
of TOML has the same: `observation = ["x", "y"]`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import UsageError
from ..ted.schema import Key, key_name
from . import fs
from .digest import read_regular

GivenMap: TypeAlias = str | Mapping[str, Any] | Sequence[str]
_TOKEN = re.compile(r'\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<plain>[^\s,="]+)|(?P<mark>[=,]))')
_PLAIN = re.compile(r'[^\s,="]+')
_EXAMPLE = "observation=obs action=act reward=r"


def parse_map(texts: GivenMap) -> dict[Key, tuple[str, ...]]:
    """Return the columns of each key, in the given order.

    A text without `=` that ends in `.toml` is read as a file. A mapping has, for each key, a column, a sequence of
    columns or another mapping, as such a file does.

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
    """Return equal texts for equal maps: one pair each, sorted by key, with what files have in place of their names."""
    return [
        f"{key_name(key)}={','.join(map(quoted_name, columns))}" for key, columns in sorted(parse_map(texts).items())
    ]


def quoted_name(name: str) -> str:
    """Write the name of a column as `--map` takes it."""
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
