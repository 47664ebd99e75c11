"""Puts how data is made into JSON, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from tensordict import is_tensorclass

from ..errors import FormatError, SchemaError
from .structure import Constant, Leaf, Node, SequenceNode, Structure, TensorDictNode

__all__ = ["describe", "structure_from"]

_SEQUENCES = {"list": list, "tuple": tuple}


def describe(structure: Structure) -> dict[str, Any]:
    """Say in JSON how data is made.

    SchemaError for constants and keys that JSON cannot say. Classes are named, as `module:name`.
    """
    if isinstance(structure, Leaf):
        return {"kind": "tensor"}
    if isinstance(structure, Constant):
        _require_json(structure.value)
        return {"kind": "constant", "value": structure.value, **_batch(structure)}
    if isinstance(structure, SequenceNode):
        entries = [describe(child) for child in structure.children]
        kind = structure.kind.__name__ if structure.kind in _SEQUENCES.values() else "named tuple"
        named = {} if kind in _SEQUENCES else {"class": _name(structure.kind)}
        return {"kind": kind, "entries": entries, **named}
    if not isinstance(structure, Node):
        raise TypeError(f"a {type(structure).__name__} has no description")
    children = [[_key(key), describe(child)] for key, child in structure.children.items()]
    if not isinstance(structure, TensorDictNode):
        return {"kind": "dict", "entries": children}
    kind = "tensorclass" if structure.kind else "tensordict"
    named = {"class": _name(structure.kind)} if structure.kind else {}
    return {"kind": kind, "entries": children, **_batch(structure), **named}


def structure_from(description: Mapping[str, Any], like: Structure | None = None) -> Structure:
    """Undo `describe`.

    Classes are looked for among the modules that are loaded already: nothing is imported because a file says so. A
    class that is not there, as one defined in a function, is the one that `like` has in the same place. SchemaError
    where there is none either, FormatError for what `describe` did not write.
    """
    try:
        return _structure(description, like)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a description of data is damaged: {error!r}") from error


def _structure(description: Mapping[str, Any], like: Structure | None) -> Structure:
    kind = description["kind"]
    if kind == "tensor":
        return Leaf()
    if kind == "constant":
        return Constant(description["value"], torch.Size(description["batch"]), _device(description))
    entries = description["entries"]
    if kind in (*_SEQUENCES, "named tuple"):
        counterparts: Any = like.children if isinstance(like, SequenceNode) else ()
        parts = [_structure(*pair) for pair in zip_longest(entries, counterparts[: len(entries)])]
        if kind in _SEQUENCES:
            return SequenceNode(parts, _SEQUENCES[kind])
        known = like.kind if isinstance(like, SequenceNode) else None
        return SequenceNode(parts, _class(description["class"], _is_named_tuple, known))
    counterparts = like.children if isinstance(like, Node) else {}
    children = {key: _structure(child, counterparts.get(key)) for key, child in entries}
    if kind == "dict":
        return Node(children)
    if kind not in {"tensordict", "tensorclass"}:
        raise FormatError(f"a description of data names the unknown kind {kind!r}")
    owner = None
    if kind == "tensorclass":
        owner = _class(description["class"], is_tensorclass, like.kind if isinstance(like, TensorDictNode) else None)
    return TensorDictNode(children, torch.Size(description["batch"]), _device(description), owner)


def _batch(node: TensorDictNode | Constant) -> dict[str, Any]:
    return {"batch": list(node.tail), "device": None if node.device is None else str(node.device)}


def _device(description: Mapping[str, Any]) -> torch.device | None:
    return None if description["device"] is None else torch.device(description["device"])


def _key(key: Any) -> str | int:
    if type(key) not in {str, int}:
        raise SchemaError(f"the key {key!r} is a {type(key).__name__}; keys that are kept are text or whole numbers")
    return key  # type: ignore[no-any-return]


def _require_json(value: Any) -> None:
    if isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _require_json(item)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise SchemaError(
            f"a constant is a {type(value).__name__}; text, numbers and lists and dicts of them can be kept",
            hint="nothing is pickled, because nothing is unpickled",
        )


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_named_tuple(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")


def _class(name: str, fits: Any, known: type[Any] | None) -> type[Any]:
    """Find a class by its name among the loaded modules, else take the one that is known."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None or not isinstance(found, type) or not fits(found):
        if known is not None and fits(known):
            return known
        raise SchemaError(
            f"the data was made with the class {path} of the module {module}, which is not loaded",
            hint=f"import {module} first",
        )
    return found
