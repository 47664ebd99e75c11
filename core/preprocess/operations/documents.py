"""Operations and programs as JSON, as manifests keep them, and as TOML, as people write them."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ...errors import DatasetNotFoundError, UsageError, did_you_mean
from ...format import fs
from .base import Operation
from .normalize import Constants
from .program import OPERATIONS, Program

__all__ = ["operation_of", "pipeline_program", "pipeline_text", "program_of_documents"]

Made = TypeVar("Made")

_TABLE = "operation"
_KIND = "name"


def program_of_documents(documents: Sequence[Any], origin: str) -> Program:
    """Make a program of its JSON; `origin` names it in the UsageError for what is not understood."""
    found = tuple(
        operation_of(document, f"{origin}: operation {number}") for number, document in enumerate(documents, start=1)
    )
    return _told(lambda: Program(found), origin)


def operation_of(document: Any, origin: str) -> Operation:
    """Make an operation of its JSON."""
    if not isinstance(document, Mapping) or not isinstance(document.get(_KIND), str):
        raise UsageError(f"{origin} has no name, one of {', '.join(OPERATIONS)} is expected")
    name = document[_KIND]
    kind = OPERATIONS.get(name)
    if kind is None:
        raise UsageError(
            f"{origin} is {name!r}, which is none{did_you_mean(name, OPERATIONS)}",
            hint=f"there are {', '.join(OPERATIONS)}",
        )
    arguments = {key: value for key, value in document.items() if key != _KIND}
    return _made(kind, arguments, f"{origin} ({name})")


def _made(kind: type[Made], arguments: Mapping[str, Any], origin: str) -> Made:
    parts = {part.name: part for part in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    for key in arguments:
        if key not in parts:
            known = f"it takes {', '.join(parts)}" if parts else "it takes nothing"
            raise UsageError(f"{origin} has {key!r}, which it does not know{did_you_mean(key, parts)}", hint=known)
    for part in parts.values():
        if part.default is dataclasses.MISSING and part.name not in arguments:
            raise UsageError(f"{origin} lacks {part.name!r}")
    given = {key: _value(value, types[key], f"{origin} has {key}") for key, value in arguments.items()}
    return _told(lambda: kind(**given), origin)


def _value(value: Any, kind: Any, place: str) -> Any:
    """Check one argument and bring it into the form of its field."""
    if kind == tuple[Constants, ...]:
        return tuple(_made(Constants, part, place) for part in _listed(value, dict, "tables", place))
    if kind == tuple[str, ...]:
        return tuple(_listed(value, str, "texts", place))
    if kind == tuple[float, ...]:
        return tuple(float(number) for number in _listed(value, (int, float), "numbers", place))
    if kind == tuple[int, ...]:
        return tuple(_listed(value, int, "whole numbers", place))
    wanted, words = _SCALARS[str(getattr(kind, "__args__", (kind,))[0])]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise UsageError(f"{place} = {_short(value)}, {words} is expected")
    return float(value) if wanted == (int, float) else value


_SCALARS: dict[str, tuple[Any, str]] = {
    str(str): (str, "a text"),
    str(int): (int, "a whole number"),
    str(float): ((int, float), "a number"),
}


def _listed(value: Any, kind: Any, words: str, place: str) -> list[Any]:
    good = isinstance(value, list) and all(isinstance(part, kind) and not isinstance(part, bool) for part in value)
    if not good:
        raise UsageError(f"{place} = {_short(value)}, a list of {words} is expected")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _told(make: Callable[[], Made], origin: str) -> Made:
    """Name the origin in what is wrong with the values."""
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{origin}: {error.message}", hint=error.hint) from None


def pipeline_program(path: str | Path) -> Program:
    """Read a pipeline file: `[[operation]]` tables in the order in which they are to be done.

    DatasetNotFoundError where there is no such file, UsageError for what is not understood in it.
    """
    place = fs.expanded(path)
    try:
        document = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetNotFoundError(f"there is no {path}, a pipeline file is expected") from None
    except OSError as error:
        raise UsageError(f"the pipeline {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the pipeline {path} is not TOML: {error}") from error
    for key in document:
        if key != _TABLE:
            raise UsageError(
                f"{path} has {key!r}, which is not known{did_you_mean(key, [_TABLE])}",
                hint="write [[operation]] tables",
            )
    tables = document.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} has no operations, [[operation]] tables are expected")
    return program_of_documents(tables, str(path))


def pipeline_text(program: Program) -> str:
    """Write a program as a pipeline file; reading it gives the same program."""
    tables = []
    for document in program.describe():
        lines = [f"{key} = {_toml(value)}" for key, value in document.items()]
        tables.append("\n".join([f"[[{_TABLE}]]", *lines]))
    return "\n\n".join(tables) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{_commas(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {_commas(f'{key} = {_toml(part)}' for key, part in value.items())} }}"
    return repr(value)


def _commas(parts: Iterable[str]) -> str:
    return ", ".join(parts)
