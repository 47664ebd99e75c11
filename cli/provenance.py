"""The lines of `inspect` on how a dataset was made: steps with arguments, operations with parameters."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .text import Cell, Line, Styled, Table, folded, vector

if TYPE_CHECKING:
    from ..core.format.manifest import Provenance

_CONSTANTS, _OPERATIONS = "constants", "operations"
_MEASURES = "normalize"
"""The operation that measures constants, which are recorded apart from its parameters."""
_SPEC, _OF_SPEC = "env_spec", ("max_episode_steps", "kwargs")
"""The spec of a recorded environment, and what is shown of it; `--json` has all."""
_MOST = 16
"""The longest list of constants that is shown in full; `--json` has all."""


def step_lines(step: Provenance, title: Cell, indent: int, width: int | None) -> Iterator[list[Cell]]:
    """Return the line of a step of the provenance, which starts with `title`, and those of its operations."""
    operations = _operations(step.arguments)
    rest = {name: value for name, value in step.arguments.items() if not operations or name not in _OPERATION_PARTS}
    spec = rest.pop(_SPEC, None)
    if isinstance(spec, Mapping):
        rest |= {name: spec.get(name) for name in _OF_SPEC}
    what = f"{step.verb} {_arguments(rest)}".rstrip()
    yield from folded([title, f"{what} · {step.time[:10]} · rbtool {step.version}"], width, indent)
    rows: list[Line] = []
    for operation in operations:
        parameters = {name: value for name, value in operation.items() if name not in {"name", _CONSTANTS}}
        rows.append([Styled(str(operation["name"]), "cyan"), _arguments(parameters)])
    inner = None if width is None else max(1, width - indent)
    for operation, block in zip(operations, Table(rows, indent=2).blocks(inner), strict=True):
        yield from ([" " * indent, *line] for line in block)
        for text in _constants(operation.get(_CONSTANTS)):
            yield from folded([" " * (indent + 2), Styled(text, "dim")], width, indent + 4)


_OPERATION_PARTS = frozenset({_OPERATIONS, _CONSTANTS})


def _operations(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the operations of a step, each with the constants that were measured for it; [] for other steps."""
    listed, measured = arguments.get(_OPERATIONS), arguments.get(_CONSTANTS)
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "name" in one for one in listed):
        return []
    rest = iter(measured if isinstance(measured, list) else [])
    return [
        {_CONSTANTS: next(rest, []), **one} if one["name"] == _MEASURES and _CONSTANTS not in one else one
        for one in listed
    ]


def _constants(measured: Any) -> Iterator[str]:
    """Format the constants of each field of an operation."""
    for one in measured if isinstance(measured, list) else []:
        if isinstance(one, dict):
            rest = (f"{name} {_numbers(value)}" for name, value in one.items() if name != "key")
            yield f"{one.get('key', '')}: {' · '.join(rest)}"


def _numbers(value: Any) -> str:
    if not isinstance(value, list):
        return _text(value)
    few = len(value) <= _MOST and all(isinstance(item, int | float) for item in value)
    return f"[{' '.join(f'{item:.4g}' for item in value)}]" if few else vector(value)


def _arguments(arguments: Mapping[str, Any]) -> str:
    """Format arguments that are given: switches by their name, others as `name=value`."""
    shown = {name: value for name, value in arguments.items() if value is not False and value not in (None, "", {}, [])}
    return " ".join(name if value is True else f"{name}={_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    """Format a value as one word of the shell, lists and tables of names as options take them."""
    if isinstance(value, Mapping):
        value = [f"{name}={_plain(one)}" for name, one in value.items()]
    if isinstance(value, list):
        words = [_plain(one) for one in value]
        value = (" " if any("," in word or " " in word for word in words) else ",").join(words)
    return shlex.quote(_plain(value))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
