"""Encoders of gymnasium spaces: they convert values to rows of arrays, and declare the leaves of a row.

An array is one leaf. Dict and Tuple are nested, by names and by numbers. Values of varying size are padded with zeros
to the longest in the dataset, and their sizes are stored in leaves of their own:

    Text          UTF-8 bytes, and `NAME_length`
    Sequence      `items`, with a leading dimension, and `count`
    Graph         `nodes`, `nodes_count`, `edges`, `edges_count` (-1 for None), `edge_links`
    OneOf         `choice`, and the leaves of each subspace under its number; zeros where it is not chosen
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from ..errors import SchemaError
from ..format.contracts import Array
from ..ted.schema import DTYPES, Key, Role, key_name, length_key, safe_part

_SHORT_TEXT = 256
"""A Text space of up to this many bytes has its full size from the start; the leaf of a longer one grows as needed."""


@dataclass(frozen=True, slots=True)
class RecordedLeaf:
    """One array of a row. Its first `ragged` dimensions vary from row to row; for these, `shape` has minimum sizes."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: Role
    ragged: int = 0

    def inside_sequence(self) -> RecordedLeaf:
        """Return the leaf for a sequence of such values."""
        return replace(self, shape=(0, *self.shape), ragged=self.ragged + 1)


class Encoder(ABC):
    """Turns values of one space into arrays, one for each of its `leaves`, in their order."""

    leaves: tuple[RecordedLeaf, ...]

    def __init__(self, key: Key) -> None:
        self.key = key

    @abstractmethod
    def encode(self, value: Any) -> Sequence[Any]:
        """Return the arrays or numbers of a value; SchemaError if its shape, type or structure is not the space's."""

    def zeros(self) -> list[Array]:
        """Return the arrays of a row without a value."""
        return [np.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def refuse(self, found: str, expected: str, *, hint: str = "") -> SchemaError:
        """Return the error for a value that is not in the space."""
        return SchemaError(f"{key_name(self.key)} is {found}, expected {expected}", hint=hint)


class _ArrayEncoder(Encoder):
    """Encodes Box, MultiDiscrete and MultiBinary."""

    def __init__(self, key: Key, role: Role, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        super().__init__(key)
        if dtype.name not in DTYPES:
            raise SchemaError(f"{key_name(key)} has elements of type {dtype}, which cannot be recorded")
        self._dtype, self._shape = dtype, shape
        self.leaves = (RecordedLeaf(key, dtype.name, shape, role),)

    def encode(self, value: Any) -> Sequence[Any]:
        if type(value) is np.ndarray and value.dtype == self._dtype and value.shape == self._shape:
            return (value,)
        return (self._converted(value),)

    def _converted(self, value: Any) -> Array:
        """Convert a value of another type; SchemaError if that would change a number."""
        expected = f"{self._dtype.name} {list(self._shape)}"
        try:
            found = np.asarray(value)
            shown = f"{found.dtype.name} {list(found.shape)}"
        except (ValueError, TypeError) as error:
            raise self.refuse(f"a {type(value).__name__}", expected) from error
        if found.shape != self._shape or found.dtype.kind not in "biufc":
            raise self.refuse(shown, expected)
        whole = found.dtype.kind in "iu" and self._dtype.kind in "iu"
        typed = isinstance(value, np.ndarray | np.generic)
        if typed and not whole and not np.can_cast(found.dtype, self._dtype):
            hint = f"convert it, with .astype(np.{self._dtype.name}) or gymnasium.wrappers.DtypeObservation"
            raise self.refuse(shown, expected, hint=hint)
        with np.errstate(all="ignore"):
            converted = found.astype(self._dtype)
            kept = np.array_equal(converted.astype(found.dtype), found, equal_nan=found.dtype.kind in "fc")
        if not kept:
            raise self.refuse(f"{shown} with numbers that its type cannot hold", expected)
        return np.asarray(converted)


class _DiscreteEncoder(Encoder):
    def __init__(self, key: Key, role: Role, dtype: np.dtype[Any]) -> None:
        super().__init__(key)
        limits = np.iinfo(dtype)
        self._low, self._high = int(limits.min), int(limits.max)
        self._dtype, self._type = dtype, dtype.type
        self.leaves = (RecordedLeaf(key, dtype.name, (), role),)

    def encode(self, value: Any) -> Sequence[Any]:
        if type(value) is self._type:
            return (value,)
        if isinstance(value, np.ndarray) and value.shape == ():
            value = value[()]
        if not isinstance(value, int | np.integer | np.bool_):
            shape = f" {list(value.shape)}" if isinstance(value, np.ndarray) else ""
            raise self.refuse(f"a {type(value).__name__}{shape}", f"whole numbers ({self._dtype.name})")
        if not self._low <= value <= self._high:
            raise self.refuse(f"{value}", f"numbers of type {self._dtype.name}")
        return (value,)


class _TextEncoder(Encoder):
    def __init__(self, key: Key, longest: int) -> None:
        super().__init__(key)
        self.leaves = (
            RecordedLeaf(key, "uint8", (longest if longest <= _SHORT_TEXT else 1,), "text", 1),
            RecordedLeaf(length_key(key), "int32", (), "text"),
        )

    def encode(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, str):
            raise self.refuse(f"a {type(value).__name__}", "text")
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise self.refuse("text with lone surrogates", "text that UTF-8 can hold") from None
        return np.frombuffer(data, np.uint8), len(data)


class _NestEncoder(Encoder):
    """Encodes Dict and Tuple: `parts` are the encoders of the subspaces, by name or by number."""

    def __init__(self, key: Key, parts: Mapping[Any, Encoder], kind: type) -> None:
        super().__init__(key)
        self._parts, self._kind = parts, kind
        self._names = parts.keys()
        self.leaves = tuple(leaf for part in parts.values() for leaf in part.leaves)

    def encode(self, value: Any) -> Sequence[Any]:
        if self._kind is dict:
            if not isinstance(value, Mapping):
                raise self.refuse(f"a {type(value).__name__}", "a dict")
            if value.keys() != self._names:
                odd = ", ".join(sorted(repr(name) for name in value.keys() ^ self._names))
                raise self.refuse("a dict with other entries than its space", f"the same entries, they differ in {odd}")
        elif not isinstance(value, tuple | list) or len(value) != len(self._parts):
            size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            raise self.refuse(f"a {type(value).__name__}{size}", f"a tuple of {len(self._parts)}")
        return [array for name, part in self._parts.items() for array in part.encode(value[name])]


class _SequenceEncoder(Encoder):
    def __init__(self, key: Key, role: Role, space: spaces.Sequence) -> None:
        super().__init__(key)
        self._items = encoder((*key, "items"), space.feature_space, role)
        self._stacked = space.stacked_feature_space if space.stack else None
        self.leaves = (
            *(leaf.inside_sequence() for leaf in self._items.leaves),
            RecordedLeaf((*key, "count"), "int32", (), role),
        )

    def encode(self, value: Any) -> Sequence[Any]:
        if self._stacked is None and not isinstance(value, tuple | list):
            raise self.refuse(f"a {type(value).__name__}", "a tuple")
        try:
            values = list(value if self._stacked is None else iterate(self._stacked, value))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise self.refuse(f"a {type(value).__name__}", "a stack of values") from error
        rows = [self._items.encode(one) for one in values]
        return [*(_stacked(column, leaf) for column, leaf in _columns(rows, self._items.leaves)), len(values)]


def _columns(rows: Sequence[Sequence[Any]], leaves: Sequence[RecordedLeaf]) -> Iterable[tuple[list[Any], RecordedLeaf]]:
    return (([row[number] for row in rows], leaf) for number, leaf in enumerate(leaves))


def _stacked(values: Sequence[Any], leaf: RecordedLeaf) -> Array:
    return stack_padded([np.asarray(value) for value in values], leaf)


def stack_padded(arrays: Sequence[Array], leaf: RecordedLeaf) -> Array:
    """Stack arrays of a leaf, padded with zeros to the largest array and at least to the minimum sizes of the leaf."""
    largest = [leaf.shape, *(array.shape for array in arrays)]
    shape = tuple(max(sizes) for sizes in zip(*largest, strict=True))
    found = np.zeros((len(arrays), *shape), leaf.dtype)
    for row, array in enumerate(arrays):
        place: tuple[Any, ...] = (row, *map(slice, array.shape))
        found[place] = array
    return found


class _GraphEncoder(Encoder):
    def __init__(self, key: Key, role: Role, space: spaces.Graph) -> None:
        super().__init__(key)
        self._nodes = encoder((*key, "nodes"), space.node_space, role)
        self._edges = None if space.edge_space is None else encoder((*key, "edges"), space.edge_space, role)
        edges = () if self._edges is None else self._edges.leaves
        self.leaves = (
            *(leaf.inside_sequence() for leaf in (*self._nodes.leaves, *edges)),
            RecordedLeaf((*key, "edge_links"), "int64", (0, 2), role, 1),
            RecordedLeaf((*key, "nodes_count"), "int32", (), role),
            RecordedLeaf((*key, "edges_count"), "int32", (), role),
        )

    def encode(self, value: Any) -> Sequence[Any]:
        nodes, edges, links = (getattr(value, name, None) for name in ("nodes", "edges", "edge_links"))
        if nodes is None:
            raise self.refuse(f"a {type(value).__name__}", "a GraphInstance")
        found = self._rows(self._nodes, nodes)
        if self._edges is not None:
            found += self._rows(self._edges, () if edges is None else edges)
        elif edges is not None:
            raise self.refuse("a graph whose edges have values", "edges without values")
        joined = np.zeros((0, 2), np.int64) if links is None else np.asarray(links)
        if joined.ndim != 2 or joined.shape[1] != 2 or joined.dtype.kind not in "iu":
            raise self.refuse(f"a graph with edge links {joined.dtype} {list(joined.shape)}", "whole numbers [n, 2]")
        if edges is not None and len(edges) != len(joined):
            raise self.refuse(f"a graph with {len(edges)} edges and {len(joined)} edge links", "one link for each edge")
        return [*found, joined, len(nodes), -1 if links is None else len(joined)]

    def _rows(self, items: Encoder, values: Any) -> list[Any]:
        rows = [items.encode(value) for value in values]
        return [_stacked(column, leaf) for column, leaf in _columns(rows, items.leaves)]


class _OneOfEncoder(Encoder):
    def __init__(self, key: Key, role: Role, space: spaces.OneOf[Any]) -> None:
        super().__init__(key)
        self._parts = [encoder((*key, str(number)), part, role) for number, part in enumerate(space.spaces)]
        self.leaves = (
            RecordedLeaf((*key, "choice"), "int64", (), role),
            *(leaf for part in self._parts for leaf in part.leaves),
        )

    def encode(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], int | np.integer):
            raise self.refuse(f"a {type(value).__name__}", "a tuple of a number and a value")
        chosen = int(value[0])
        if not 0 <= chosen < len(self._parts):
            raise self.refuse(f"choice {chosen}", f"choices from 0 to {len(self._parts) - 1}")
        rows = (part.encode(value[1]) if number == chosen else part.zeros() for number, part in enumerate(self._parts))
        return [chosen, *(array for row in rows for array in row)]


def _text(space: spaces.Text, key: Key, role: Role) -> Encoder:
    widest = max((len(character.encode(errors="replace")) for character in space.character_set), default=1)
    return _TextEncoder(key, max(1, space.max_length * widest))


def _dict(space: spaces.Dict, key: Key, role: Role) -> Encoder:
    parts = {name: encoder((*key, safe_part(str(name))), part, role) for name, part in space.spaces.items()}
    return _NestEncoder(key, parts, dict)


def _tuple(space: spaces.Tuple[Any], key: Key, role: Role) -> Encoder:
    parts = {number: encoder((*key, str(number)), part, role) for number, part in enumerate(space.spaces)}
    return _NestEncoder(key, parts, tuple)


def _array(space: Any, key: Key, role: Role) -> Encoder:
    return _ArrayEncoder(key, role, np.dtype(space.dtype), tuple(space.shape))


_KINDS: dict[type, Callable[[Any, Key, Role], Encoder]] = {
    spaces.Box: _array,
    spaces.MultiDiscrete: _array,
    spaces.MultiBinary: _array,
    spaces.Discrete: lambda space, key, role: _DiscreteEncoder(key, role, np.dtype(space.dtype)),
    spaces.Text: _text,
    spaces.Dict: _dict,
    spaces.Tuple: _tuple,
    spaces.Sequence: lambda space, key, role: _SequenceEncoder(key, role, space),
    spaces.Graph: lambda space, key, role: _GraphEncoder(key, role, space),
    spaces.OneOf: lambda space, key, role: _OneOfEncoder(key, role, space),
}


def encoder(key: Key, space: Any, role: Role) -> Encoder:
    """Return the encoder of a space whose values are stored under `key`; SchemaError if it cannot be recorded."""
    for kind, make in _KINDS.items():
        if isinstance(space, kind):
            return make(space, key, role)
    raise SchemaError(
        f"{key_name(key)} has a space of type {type(space).__name__}, which cannot be recorded; "
        f"known: {', '.join(sorted(kind.__name__ for kind in _KINDS))}"
    )


def space_encoder(name: str, space: Any, role: Role) -> Encoder:
    """Return the encoder of an observation or action space; SchemaError if two entries need the same key."""
    found = encoder((name,), space, role)
    if not found.leaves:
        raise SchemaError(f"the {name} space has no values to record: it is {space}")
    keys = sorted(leaf.key for leaf in found.leaves)
    for one, other in pairwise(keys):
        if other[: len(one)] == one:
            raise SchemaError(f"two entries of the {name} space need the key {key_name(one)!r}; rename one of them")
    return found


def renamed_entries(name: str, space: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of entries whose names tensordict reserves, and the names they get instead."""
    if isinstance(space, spaces.Dict):
        for entry, part in space.spaces.items():
            safe = safe_part(str(entry))
            if safe != str(entry):
                yield f"{name}.{entry}", f"{name}.{safe}"
            yield from renamed_entries(f"{name}.{safe}", part)
    elif isinstance(space, spaces.Tuple | spaces.OneOf):
        for number, part in enumerate(space.spaces):
            yield from renamed_entries(f"{name}.{number}", part)
    elif isinstance(space, spaces.Sequence):
        yield from renamed_entries(f"{name}.items", space.feature_space)


def space_document(space: Any) -> dict[str, Any] | None:
    """Return a space as the manifest stores it; None for a space that the manifest cannot describe."""
    kind = next((kind.__name__ for kind in _KINDS if isinstance(space, kind)), "")
    if kind == "Box":
        bounds = {name: _one_if_uniform(getattr(space, name)) for name in ("low", "high")}
        return {"type": kind, "dtype": np.dtype(space.dtype).name, "shape": list(space.shape), **bounds}
    if kind == "Discrete":
        return {"type": kind, "dtype": np.dtype(space.dtype).name, "n": int(space.n), "start": int(space.start)}
    if kind == "MultiDiscrete":
        entries = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
        return {"type": kind, "dtype": np.dtype(space.dtype).name, **entries}
    if kind == "MultiBinary":
        return {"type": kind, "n": list(space.n) if isinstance(space.n, tuple | list | np.ndarray) else int(space.n)}
    if kind == "Text":
        return {"type": kind, "min_length": int(space.min_length), "max_length": int(space.max_length)}
    if kind == "Dict":
        return {"type": kind, "subspaces": {str(name): space_document(part) for name, part in space.spaces.items()}}
    if kind == "Tuple":
        return {"type": kind, "subspaces": [space_document(part) for part in space.spaces]}
    return None


def _one_if_uniform(bound: Array) -> Any:
    """Return a single number for bounds that are all equal, instead of the 100,000 numbers of an image."""
    if bound.size and (bound == bound.flat[0]).all():
        return _strict(bound.flat[0].item())
    return _strict(bound.tolist())


def _strict(value: Any) -> Any:
    if isinstance(value, list):
        return [_strict(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
