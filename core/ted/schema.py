"""The schema of a row: its leaves, their types, shapes and roles.

A text that differs from row to row is stored as two fields: its UTF-8 bytes `[longest]`, padded with zeros, and their
number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean

Key: TypeAlias = tuple[str, ...]
Array: TypeAlias = np.ndarray[Any, Any]
Numbers: TypeAlias = NDArray[np.int64]
"""Row numbers, places, counts: int64."""

NEXT = "next"
ACTION: Key = ("action",)
EPISODE: Key = ("episode",)
REWARD: Key = ("reward",)
DONE: Key = ("done",)
TERMINATED: Key = ("terminated",)
TRUNCATED: Key = ("truncated",)
NEXT_REWARD: Key = (NEXT, *REWARD)
NEXT_DONE: Key = (NEXT, *DONE)
NEXT_TERMINATED: Key = (NEXT, *TERMINATED)
NEXT_TRUNCATED: Key = (NEXT, *TRUNCATED)
FLAGS: tuple[Key, ...] = (DONE, TERMINATED, TRUNCATED)
DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")
"""The names of the flags in TorchRL's order."""
_COLLECTED_IDS: Key = ("collector", "traj_ids")
TRAJECTORY_KEYS: dict[Literal["slices", "next states", "batches", "queries"], tuple[Key, ...]] = {
    "slices": (_COLLECTED_IDS, EPISODE),  # samplers, and everything that must not cross the end of an episode
    "next states": (_COLLECTED_IDS, EPISODE),  # `NextStateReconstructor`
    "batches": (_COLLECTED_IDS, ("traj_ids",), EPISODE),  # multi-step targets, returns
    "queries": (_COLLECTED_IDS, ("traj_ids",), EPISODE),  # `ReplayBuffer.query`, `iter_trajectories`
}
"""The default keys of trajectory ids; the first that exists is used. They differ between uses as in TorchRL."""
SINGLETONS: tuple[Key, ...] = (REWARD, *FLAGS)
"""Keys with a trailing dimension of size 1, at the root and under `next`."""

_RESERVED = frozenset({"shape", "device", "_type"})
_ESCAPED = re.compile(r'[\x00-\x1f\x7f/<>:"|?*\\ %]')


def key_name(key: Key) -> str:
    """Write a key the way people type it: parts joined by dots."""
    return ".".join(key)


def as_key(key: Any) -> Key:
    """Convert a name, or a tuple or list of names, to a key; UsageError (a ValueError) for anything else."""
    found = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list | tuple) else ()
    if not found or not all(isinstance(part, str) for part in found):
        raise UsageError(f"the key is {key!r}, expected a name or a tuple of names")
    return found


def key_called(name: str, keys: Iterable[Key], *, groups: bool = False) -> Key | None:
    """Return the key of a leaf, or with `groups` of a group, that a user names with dots; None if it does not exist.

    UsageError if the name stands for two keys: `a.b` may be the leaf `a.b`, or `b` in the group `a`.
    """
    paths = (key[:end] for key in keys for end in (range(1, len(key) + 1) if groups else (len(key),)))
    found = sorted({path for path in paths if key_name(path) == name})
    if len(found) > 1:
        raise UsageError(
            f"{name!r} means both {' and '.join(map(repr, found))}",
            hint="rename one of them first with rbtool preprocess --fn: a name with dots cannot tell them apart",
        )
    return found[0] if found else None


def safe_part(part: str) -> str:
    """Rename a part that tensordict reserves: a leaf called `shape` would vanish on load."""
    return part + "_" if part.rstrip("_") in _RESERVED else part


def file_stem(part: str) -> str:
    """Escape one part of a key for use as a file name, by tensordict's rule.

    Characters that some file systems do not allow become `%XX`; `""`, `"."` and `".."` become `%`, `%2E` and `%2E%2E`,
    so that no key can lead out of its folder.
    """
    if part in {"", ".", ".."}:
        return "%" if not part else "%2E" * len(part)
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", part)


def key_from_stem(stem: str) -> str:
    """Undo `file_stem`."""
    if stem == "%":
        return ""
    return re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), stem)


DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bfloat16": np.dtype("uint16")}
"""The NumPy type with which the bytes of each element type are read and written, by name."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type that holds the bytes of elements of type `name`."""
    try:
        return DTYPES[name]
    except KeyError:
        raise SchemaError(f"element type {name!r} is unknown; known: {', '.join(DTYPES)}") from None


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy element type, or raise SchemaError for one that tensors cannot hold."""
    name = dtype.newbyteorder("=").name
    if name not in DTYPES:
        raise SchemaError(f"element type {dtype} cannot be stored; known: {', '.join(DTYPES)}")
    return name


def torch_name(name: str) -> str:
    """Return the name tensordict writes into `meta.json`."""
    return f"torch.{name}"


def is_floating(name: str) -> bool:
    """Return whether elements of this type can be NaN or infinite."""
    return "float" in name or "complex" in name


def is_real(name: str) -> bool:
    """Return whether elements of this type are real numbers, which have an order."""
    return "complex" not in name


def as_numbers(array: Array, name: str) -> Array:
    """Return values to compute with: `array` itself, or float32 converted from the bits of bfloat16."""
    if name != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def odd_truths(array: Array) -> Array:
    """Return which elements of a bool array have a byte other than 0 and 1; bool in the same shape.

    NumPy and torch treat such a byte as true in some operations, and compute with its value in others. Arrays can
    contain it, because bytes of a file that are read as bool are not converted.
    """
    return array.view(np.uint8) > 1


def numbers_rows(values: Array) -> bool:
    """Return whether an array has one whole number for each row."""
    return values.dtype.kind in "iu" and values.size == len(values)


def inexact_as_float(values: Array) -> Array:
    """Return which whole numbers are not exact in float64: bool, in the shape of `values`, int64 or uint64.

    Types with fewer bits, and types that are not whole numbers, are always exact.
    """
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return np.zeros(values.shape, bool)
    floats = values.astype(np.float64)
    inside = floats < float(np.iinfo(values.dtype).max)  # rounds up to a number beyond the type
    odd: Array = ~inside | (np.where(inside, floats, 0).astype(values.dtype) != values)
    return odd


Role: TypeAlias = Literal["observation", "action", "reward", "done", "info", "state", "id", "text"]
Timing: TypeAlias = Literal["state", "step", "result"]
"""When the value of a source field is known: a `state` before and after every step (T+1 rows an episode), a `step` with
the action (T rows, stored at the root), a `result` after it (T rows, stored under `next`)."""


@dataclass(frozen=True, slots=True)
class Field:
    """A leaf: the name of its `dtype`, the `shape` of a single row, and its role."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: Role

    @property
    def name(self) -> str:
        """The key as people type it."""
        return key_name(self.key)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of the stored bytes."""
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.numpy.itemsize * math.prod(self.shape)


def row_bytes(fields: Iterable[Field]) -> int:
    """Bytes of one row over all fields."""
    return sum(field.row_bytes for field in fields)


def field_named(fields: Iterable[Field], key: Key) -> Field:
    """Find a field by its key, or raise MissingKeyError with the nearest name."""
    known = list(fields)
    for field in known:
        if field.key == key:
            return field
    names = [field.name for field in known]
    meant = did_you_mean(key_name(key), names)
    raise MissingKeyError(f"field {key_name(key)!r} not found{meant}", hint=f"fields are {', '.join(names)}")


def unknown_field(name: str, known: Iterable[str], *, near: Iterable[str] = ()) -> UsageError:
    """Return the error for a field that does not exist; `near` are further names to suggest."""
    fields = sorted(known)
    meant = did_you_mean(name, [*fields, *near])
    return UsageError(f"field {name!r} not found{meant}", hint=f"fields are {', '.join(fields)}")


def role_of(key: Key) -> Role:
    """Guess the role of a leaf from its key, for data whose source does not state it."""
    inner = key[1:] if key[0] == NEXT and len(key) > 1 else key
    if inner in FLAGS:
        return "done"
    if inner == REWARD:
        return "reward"
    if inner == EPISODE:
        return "id"
    roles: dict[str, Role] = {"action": "action", "info": "info", "state": "state"}
    return roles.get(inner[0], "observation")


def state_keys(fields: Iterable[Field]) -> list[Key]:
    """Return the keys of states: with the same type and shape at the root and under `next`.

    Rewards and done flags are excluded, because they have another meaning at the root.
    """
    by_key = {field.key: field for field in fields}
    found = []
    for key, field in by_key.items():
        after = by_key.get((NEXT, *key))
        alike = after is not None and (after.dtype, after.shape) == (field.dtype, field.shape)
        if alike and key[0] != NEXT and key not in SINGLETONS:
            found.append(key)
    return found


def ted_fields(source: Iterable[tuple[Field, Timing]]) -> tuple[Field, ...]:
    """Arrange source fields as TED: states at the root and under `next`, results under `next`, flags added.

    `source` has each field under its root key, with its timing. `done`, `terminated`, `truncated` and `episode` are
    always added; a source must not have such fields.
    """
    root: list[Field] = []
    after: list[Field] = []
    for field, timing in source:
        if field.key[0] == NEXT or field.key in FLAGS or field.key == EPISODE:
            raise SchemaError(f"a source must not have the key {field.name!r}, which TED adds")
        if timing in ("state", "step"):
            root.append(field)
        if timing in ("state", "result"):
            shape = (*field.shape, 1) if field.key in SINGLETONS else field.shape
            after.append(Field((NEXT, *field.key), field.dtype, shape, field.role))
    flags = [Field((NEXT, *flag), "bool", (1,), "done") for flag in FLAGS]
    episode = Field(EPISODE, "int64", (), "id")
    order = {ACTION: 0, EPISODE: 1}
    root.append(episode)
    root.sort(key=lambda field: (order.get(field.key, 2), field.key))
    after.sort(key=lambda field: (field.key[1:] in SINGLETONS, field.key))
    return (*root, *after, *flags)


LONGEST_ROW = 64 << 10
"""The largest text of a row in bytes; every row of the dataset takes as much space as the longest."""


def length_key(key: Key) -> Key:
    """Return the key with the lengths of a text."""
    return (*key[:-1], key[-1] + "_length")


def text_fields(key: Key, width: int) -> list[Field]:
    """Return the two fields of a text whose longest row has `width` bytes."""
    return [Field(key, "uint8", (width,), "text"), Field(length_key(key), "int32", (), "text")]


def encode_text(strings: Sequence[bytes], width: int) -> tuple[Array, Array]:
    """Return the strings as uint8 `[n, width]` and their lengths in bytes as int32 `[n]`."""
    lengths = np.fromiter(map(len, strings), np.int32, len(strings))
    characters = np.array(strings, f"S{width}").view(np.uint8).reshape(len(strings), width)
    return characters, lengths
