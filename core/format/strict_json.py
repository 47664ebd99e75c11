"""Strict JSON: no NaN or Infinity literals; such numbers are the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import FormatError
from .regular import read_regular

__all__ = ["dump_json", "float_from_json", "load_json", "parse_json", "plain"]

_DEPTH = 100


def plain(value: Any) -> Any:
    """Return `value` made of what strict JSON has: finite numbers, strings, lists, string-keyed objects."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def float_from_json(value: float | str | None) -> float | None:
    """Undo what `plain` does to a number that is not finite."""
    return float(value) if isinstance(value, str) else value


def dump_json(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Write a value as one strict JSON document.

    Lone surrogates, which stand for the bytes of a path that is not UTF-8, are written as escapes: the document is
    always UTF-8, and they come back as they were.
    """
    text = json.dumps(plain(value), indent=indent, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Two halves of one character become that character, as a parser takes them.
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        text = whole.encode(errors="backslashreplace").decode()
    return text


def load_json(path: Path) -> Any:
    """Read a JSON file, or raise FormatError that names it."""
    return parse_json(read_regular(path), str(path))


def parse_json(data: bytes | str, origin: str) -> Any:
    """Read a JSON document that nests 100 levels at most, or raise FormatError that names its origin."""
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{origin} is not JSON: {error}") from error
    except RecursionError:
        raise _too_deep(origin) from None
    # Nothing can nest deeper than there are brackets; most documents are done with a count.
    if text.count("[") + text.count("{") > _DEPTH:
        _require_shallow(value, origin)
    return value


def _require_shallow(value: Any, origin: str) -> None:
    """Raise FormatError for a document that would exhaust the stack of what walks it."""
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        level = [
            part
            for outer in level
            if isinstance(outer, list | dict)
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, list | dict)
        ]
        if not level:
            return
    raise _too_deep(origin)


def _too_deep(origin: str) -> FormatError:
    return FormatError(f"{origin} nests deeper than {_DEPTH} levels: no document of this kind does")
