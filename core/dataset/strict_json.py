"""Strict JSON: no NaN or Infinity literals; such numbers are the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import FormatError

__all__ = ["dump_json", "float_from_json", "load_json", "parse_json", "plain"]


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


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Write a value as one strict JSON document."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def load_json(path: Path) -> Any:
    """Read a JSON file, or raise FormatError that names it."""
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, origin: str) -> Any:
    """Read a JSON document, or raise FormatError that names its origin."""
    try:
        return json.loads(data.decode())
    except ValueError as error:
        raise FormatError(f"{origin} is not JSON: {error}") from error
