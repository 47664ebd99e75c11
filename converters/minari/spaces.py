"""Gymnasium spaces as Minari writes them into `metadata.json`, read without gymnasium.

Space documents are JSON in a string inside JSON, with `Infinity` literals:
`{"type": "Box", "dtype", "shape", "low", "high"}`, `Discrete`, `MultiDiscrete`, `MultiBinary`, `Text`, and the
nesting `Dict` and `Tuple` with their `subspaces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ...core.errors import FormatError
from ...core.format import parse_json, plain, require_space

__all__ = ["SPACE_TYPES", "Space", "SpaceLeaf", "SpacePath", "parse_space", "space_leaves", "strict_space"]

Space: TypeAlias = dict[str, Any]
SpacePath: TypeAlias = tuple[str | int, ...]
"""Names of Dict entries and numbers of Tuple elements, from the root of the space down to a leaf."""

SPACE_TYPES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")
_ENTRIES = {
    "Box": ("dtype", "shape", "low", "high"), "Discrete": ("n",), "MultiDiscrete": ("nvec",), "MultiBinary": ("n",),
    "Dict": ("subspaces",), "Tuple": ("subspaces",),
}  # fmt: skip
_SMALLEST_IMAGE = 32  # Minari takes nothing smaller for an image


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One leaf of a space: what it holds and the shape of one row. `dtype` is what the space says, not the file."""

    path: SpacePath
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]


def parse_space(document: Any, name: str) -> Space:
    """Read a space document, as a string of JSON or read already; raise FormatError that says what is odd."""
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
        raise FormatError(f"has a space of type {kind!r}; known are {', '.join(SPACE_TYPES)}")


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
    """Return the space as strict JSON; bounds that are the same everywhere become one number."""
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
    """Collapse nested lists of one and the same number; an image's bounds are 100,000 of them."""
    values = np.asarray(bound)
    if not values.size or not (values == values.flat[0]).all():
        return bound
    while isinstance(bound, list):
        bound = bound[0]
    return bound
