"""`schema`: the JSON Schemas of the documents that `--json` prints, for programs that read them."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from ..errors import UsageError, did_you_mean
from ..results import Result

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOT_FINITE = ("nan", "inf", "-inf")
_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"}, Path: {"type": "string"}, bool: {"type": "boolean"}, int: {"type": "integer"},
    float: {"anyOf": [{"type": "number"}, {"enum": list(_NOT_FINITE)}]}, type(None): {"type": "null"}, Any: {},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaResult(Result):
    """The JSON Schema of the documents of a kind."""

    kind: ClassVar[str] = "schema"
    about: str
    document: Mapping[str, Any]


def schema(kind: str) -> SchemaResult:
    """Describe the document that a verb prints with `--json`, as a JSON Schema, draft 2020-12.

    Args:
        kind: the `kind` of the document, which for most verbs is the name of the verb; `rules` is `check --rules`.

    Returns:
        The schema. Numbers that are not finite are the strings `nan`, `inf` and `-inf`.

    Raises:
        UsageError: there are no documents of that kind.

    >>> schema("check").document["properties"]["kind"]
    {'const': 'check'}
    """
    package = importlib.import_module(__package__ or "")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")
    known = {str(one.kind): one for one in _kinds(Result)}
    if kind not in known:
        raise UsageError(
            f"there are no documents of the kind {kind!r}{did_you_mean(kind, sorted(known))}",
            hint=f"known: {', '.join(sorted(known))}",
        )
    result = known[kind]
    described = _object(result)
    first = {"schema": {"const": result.schema}, "kind": {"const": kind}}
    described = {
        "$schema": _DIALECT, "title": f"rbtool {kind}", **described, "properties": first | described["properties"],
        "required": [*first, *described["required"]],
    }  # fmt: skip
    return SchemaResult(about=kind, document=described)


def _kinds(parent: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes of results; `dataclass(slots=True)` leaves a duplicate of each, which is in no module."""
    for child in parent.__subclasses__():
        yield from _kinds(child)
        if getattr(sys.modules[child.__module__], child.__name__, None) is child:
            yield child


def _object(cls: type[Any]) -> dict[str, Any]:
    """Describe a dataclass."""
    hints = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]) | {"Sequence": Sequence, "Mapping": Mapping})
    parts = {one.name: _described(hints[one.name]) for one in dataclasses.fields(cls)}
    return {"type": "object", "properties": parts, "required": list(parts)}


def _described(kind: Any) -> dict[str, Any]:
    """Describe the values of a type."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_described(part) for part in parts]}
    if origin is tuple and parts[-1] is not ...:
        items = [_described(part) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array", "items": _described(parts[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _described(parts[1])}
    return {}
