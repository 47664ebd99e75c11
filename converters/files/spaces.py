"""Spaces of gymnasium, made for exports of the spaces that a dataset records or, without them, of its fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.documents import float_from_json
from ...core.ted.schema import Field


def space_of_json(document: Mapping[str, Any], role: str) -> Any:
    """Make a gymnasium space from Minari's document or a manifest's strict one; FormatError for an invalid one."""
    from minari.serialization import deserialize_space

    try:
        return deserialize_space(json.dumps(_loose(document)))
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
        raise FormatError(f"the {role} space is not one that Minari supports: {error}") from error


def _loose(space: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `strict_space`: infinities as strings, and uniform bounds as one number."""
    loose = dict(space)
    for bound in ("low", "high"):
        if bound in loose:
            values = _numbers(loose[bound])
            whole = loose.get("type") == "Box" and not isinstance(values, list)
            loose[bound] = np.full([int(size) for size in loose["shape"]], values).tolist() if whole else values
    children = loose.get("subspaces")
    if isinstance(children, Mapping):
        loose["subspaces"] = {name: _loose(child) for name, child in children.items()}
    elif children is not None:
        loose["subspaces"] = [_loose(child) for child in children]
    return loose


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return float_from_json(value) if isinstance(value, str) else value


def space_of_fields(fields: Sequence[Field], role: str) -> Any:
    """Make a space that contains every value of these fields: a Box for each, in a Dict where keys are nested."""
    return _nest({field.key[1:]: _unbounded_box(field, role) for field in fields})


def _nest(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    from gymnasium import spaces

    if () in leaves:
        return leaves[()]
    names = dict.fromkeys(key[0] for key in leaves)
    return spaces.Dict(
        {name: _nest({key[1:]: leaf for key, leaf in leaves.items() if key[0] == name}) for name in names}
    )


def _unbounded_box(field: Field, role: str) -> Any:
    from gymnasium import spaces

    if field.role == "text":
        raise SchemaError(f"{field.name} is text of the {role} without a space that says so; Minari needs one")
    kind = field.numpy.kind
    if kind == "c" or field.dtype == "bfloat16":
        raise SchemaError(f"{field.name} is {field.dtype}, for which Gymnasium has no space")
    if kind == "b":
        return spaces.Box(0, 1, field.shape, np.bool_)  # newer versions of gymnasium refuse bools as bounds
    if kind == "f":
        return spaces.Box(-math.inf, math.inf, field.shape, field.numpy.type)
    limits = np.iinfo(field.numpy)
    return spaces.Box(limits.min, limits.max, field.shape, field.numpy.type)
