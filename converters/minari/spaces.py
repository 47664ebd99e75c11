"""Gymnasium spaces as Minari writes them into `metadata.json`: read without gymnasium, and made for exports with it.

Space documents are JSON in a string inside JSON, with `Infinity` literals:
`{"type": "Box", "dtype", "shape", "low", "high"}`, `Discrete`, `MultiDiscrete`, `MultiBinary`, `Text`, and the
nesting `Dict` and `Tuple` with their `subspaces`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.documents import float_from_json, parse_json, plain
from ...core.format.manifest import require_space
from ...core.ted.schema import Field

Space: TypeAlias = dict[str, Any]
SpacePath: TypeAlias = tuple[str | int, ...]
"""Names of Dict entries and indices of Tuple elements, from the root of the space to a leaf."""

SPACE_TYPES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")
_ENTRIES = {
    "Box": ("dtype", "shape", "low", "high"), "Discrete": ("n",), "MultiDiscrete": ("nvec",), "MultiBinary": ("n",),
    "Dict": ("subspaces",), "Tuple": ("subspaces",),
}  # fmt: skip
_SMALLEST_IMAGE = 32  # Minari treats nothing smaller as an image


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One leaf of a space: what it holds and the shape of one row. `dtype` is that of the space, not of the file."""

    path: SpacePath
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]


def parse_space(document: Any, name: str) -> Space:
    """Read a space document, as a string of JSON or read already; raise FormatError for an invalid one."""
    where = f"{name} in metadata.json"
    space = parse_json(document, where) if isinstance(document, str) else document
    require_space(space, where)
    try:
        list(space_leaves(space))
    except FormatError as error:
        raise FormatError(f"{where} {error}") from error
    return dict(space)


def space_leaves(space: Mapping[str, Any] | None, path: SpacePath = ()) -> Iterator[SpaceLeaf]:
    """Yield the leaves of a space in its own order."""
    if space is None:
        raise FormatError("has a subspace that is null")
    kind = str(space.get("type"))
    missing = [entry for entry in _ENTRIES.get(kind, ()) if space.get(entry) is None]
    if missing:
        raise FormatError(f"has a space of type {kind} without {missing[0]!r}")
    if kind == "Dict":
        for name, child in space["subspaces"].items():
            yield from space_leaves(child, (*path, name))
    elif kind == "Tuple":
        for number, child in enumerate(space["subspaces"]):
            yield from space_leaves(child, (*path, number))
    elif kind == "Text":
        yield SpaceLeaf(path, "text", "uint8", ())
    elif kind in _LEAVES:
        yield _LEAVES[kind](space, path)
    else:
        raise FormatError(f"has a space of type {kind!r}; known: {', '.join(SPACE_TYPES)}")


def _box(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    shape = tuple(int(size) for size in space["shape"])
    return SpaceLeaf(path, "image" if _is_image(space, shape) else "array", str(space["dtype"]), shape)


def _is_image(space: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return (
        len(shape) in (2, 3)
        and min(shape[:2]) >= _SMALLEST_IMAGE
        and space["dtype"] == "uint8"
        and bool(np.all(np.asarray(space["low"]) == 0))
        and bool(np.all(np.asarray(space["high"]) == 255))
    )


def _multi_discrete(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    return SpaceLeaf(path, "array", str(space.get("dtype") or "int64"), np.shape(space["nvec"]))


def _multi_binary(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    sizes = space["n"] if isinstance(space["n"], list) else [space["n"]]
    return SpaceLeaf(path, "array", "int8", tuple(int(size) for size in sizes))


def _discrete(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    int(space["n"])
    return SpaceLeaf(path, "array", str(space.get("dtype") or "int64"), ())


_LEAVES = {"Box": _box, "Discrete": _discrete, "MultiBinary": _multi_binary, "MultiDiscrete": _multi_discrete}


def strict_space(space: Mapping[str, Any]) -> Space:
    """Return the space as strict JSON; uniform bounds become one number."""
    strict = dict(space)
    for bound in ("low", "high"):
        if bound in space:
            strict[bound] = _one_if_uniform(space[bound])
    children = space.get("subspaces")
    if isinstance(children, Mapping):
        strict["subspaces"] = {name: strict_space(child) for name, child in children.items()}
    elif children is not None:
        strict["subspaces"] = [strict_space(child) for child in children]
    return dict(plain(strict))


def _one_if_uniform(bound: Any) -> Any:
    """Collapse nested lists of one number, of which the bounds of an image have 100,000."""
    values = np.asarray(bound)
    if not values.size or not (values == values.flat[0]).all():
        return bound
    while isinstance(bound, list):
        bound = bound[0]
    return bound


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
        raise SchemaError(f"{field.name} is {field.dtype}, for which there is no space")
    if kind == "b":
        return spaces.Box(0, 1, field.shape, np.bool_)  # newer versions of gymnasium refuse bools as bounds
    if kind == "f":
        return spaces.Box(-math.inf, math.inf, field.shape, field.numpy.type)
    limits = np.iinfo(field.numpy)
    return spaces.Box(limits.min, limits.max, field.shape, field.numpy.type)
