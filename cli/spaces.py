"""Writes an observation or action space in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .text import number

__all__ = ["space_text"]

_UNTOLD = frozenset({"type", "dtype", "charset", "n", "nvec"})


def space_text(space: Any) -> str:
    """Write a space: `Box(39) float64 unbounded`, `Discrete(2)`, `Dict(goal: Box(2) …, …)`."""
    if not isinstance(space, Mapping):
        return str(space)
    kind = str(space.get("type", "space"))
    parts = space.get("subspaces")
    if isinstance(parts, Mapping):
        return f"{kind}({', '.join(f'{name}: {space_text(part)}' for name, part in parts.items())})"
    if isinstance(parts, list):
        return f"{kind}({', '.join(map(space_text, parts))})"
    if kind == "Box":
        return f"Box({', '.join(map(str, space.get('shape', ())))}) {space.get('dtype', '')} {_bounds(space)}".strip()
    sizes = [str(space[name]) for name in ("n", "nvec") if name in space]
    rest = [f"{name} {value}" for name, value in space.items() if name not in _UNTOLD and not _is_zero(name, value)]
    return f"{kind}({', '.join([*sizes, *rest])})"


def _is_zero(name: str, value: Any) -> bool:
    return name == "start" and not any(_numbers(value))


def _bounds(space: Mapping[str, Any]) -> str:
    low, high = (list(_numbers(space.get(side, ()))) for side in ("low", "high"))
    if not low or not high:
        return ""
    least, most = min(low), max(high)
    if least == float("-inf") and most == float("inf"):
        return "unbounded" if max(low) == least and min(high) == most else "bounded in part"
    text = f"[{number(least)}, {number(most)}]"
    return text if least == max(low) and most == min(high) else f"within {text}"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    else:
        yield float(value)
