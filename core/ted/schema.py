"""The schema of a row: its leaves, their types, shapes and roles.

Text with a value a row is two fields: UTF-8 bytes `[longest]`, padded with zeros, and how many of them count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean

Key: TypeAlias = tuple[str, ...]

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
"""The names of the flags, as TorchRL calls and orders them."""
_COLLECTED_IDS: Key = ("collector", "traj_ids")
TRAJECTORY_KEYS: dict[Literal["slices", "next states", "batches", "queries"], tuple[Key, ...]] = {
    "slices": (_COLLECTED_IDS, EPISODE),  # samplers, and whatever may not look across the end of an episode
    "next states": (_COLLECTED_IDS, EPISODE),  # `NextStateReconstructor`
    "batches": (_COLLECTED_IDS, ("traj_ids",), EPISODE),  # multi-step targets, returns
    "queries": (_COLLECTED_IDS, ("traj_ids",), EPISODE),  # `ReplayBuffer.query`, `iter_trajectories`
}
"""Where the ids that tell trajectories apart are looked for if no key is given, the first that exists; they differ in
TorchRL, too."""
SINGLETONS: tuple[Key, ...] = (REWARD, *FLAGS)
"""Keys that carry a trailing dimension of one, at the root and under `next`."""

_RESERVED = frozenset({"shape", "device", "_type"})
_ESCAPED = re.compile(r'[\x00-\x1f\x7f/<>:"|?*\\ %]')


def key_name(key: Key) -> str:
    """Write a key the way people type it: parts joined by dots."""
    return ".".join(key)


def key_called(name: str, keys: Iterable[Key], *, groups: bool = False) -> Key | None:
    """Find the key that a user names with dots, None where there is none: that of a leaf, with `groups` of a group too.

    UsageError for a name of two keys: `a.b` may be the leaf `a.b`, or `b` in the group `a`.
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
    """Rename a part that tensordict keeps for itself: a leaf called `shape` would vanish on load."""
    return part + "_" if part.rstrip("_") in _RESERVED else part


def file_stem(part: str) -> str:
    """Escape one part of a key for use as a file name, by tensordict's rule.

    Characters that some file system refuses become `%XX`; `""`, `"."` and `".."` become `%`, `%2E` and
    `%2E%2E`, so that no key can name a place outside its folder.
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
"""Name of each element type to the NumPy type its bytes are read and written with."""


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
    """Return whether elements of this type are real numbers, and so have an order and a sum of their own kind."""
    return "complex" not in name


def as_numbers(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return values to compute with: `array` itself, or float32 for the bits of bfloat16."""
    if name != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def odd_truths(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return in which elements of a bool array the byte is neither 0 nor 1, bool of the same shape.

    NumPy and torch take such a byte for true in one operation, and compute with its number in another. Files can have
    them: nothing converts the bytes that are read as bool.
    """
    return array.view(np.uint8) > 1


def inexact_as_float(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return where whole numbers have no equal float64: bool, of the shape of `values`, which are int64 or uint64.

    Types of fewer bits, and those that are not whole numbers, have none.
    """
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return np.zeros(values.shape, bool)
    floats = values.astype(np.float64)
    inside = floats < float(np.iinfo(values.dtype).max)  # which rounds up to a number that the type does not have
    odd: np.ndarray[Any, Any] = ~inside | (np.where(inside, floats, 0).astype(values.dtype) != values)
    return odd


Role: TypeAlias = Literal["observation", "action", "reward", "done", "info", "state", "id", "text"]
Timing: TypeAlias = Literal["state", "step", "result"]
"""When a source field is known: `state` before and after every step (T+1 rows an episode), `step` with the
action (T rows, kept at the root), `result` after it (T rows, kept under `next`)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf: `dtype` by name, `shape` of a single row, what it is for."""

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
    raise MissingKeyError(f"there is no field {key_name(key)!r} here{meant}", hint=f"fields are {', '.join(names)}")


def unknown_field(name: str, known: Iterable[str], *, near: Iterable[str] = ()) -> UsageError:
    """Make the error for a field that a user names and that is not there; `near` are other names it may have."""
    fields = sorted(known)
    meant = did_you_mean(name, [*fields, *near])
    return UsageError(f"there is no field {name!r} here{meant}", hint=f"fields are {', '.join(fields)}")


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
    """Keys that stand alike at the root and under `next`, so that one episode needs T+1 rows of them.

    Reward and the done flags never count: at the root they mean something else than under `next`.
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
    """Lay source fields out as TED: states at the root and under `next`, results under `next`, flags added.

    `source` names each field by its root key and states when it is known. `done`, `terminated` and `truncated`
    are always there, `episode` too; a source must not bring its own.
    """
    root: list[Field] = []
    after: list[Field] = []
    for field, timing in source:
        if field.key[0] == NEXT or field.key in FLAGS or field.key == EPISODE:
            raise SchemaError(f"a source may not bring the key {field.name!r}: TED makes it")
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
"""Largest row of text in bytes; every row of the dataset takes the space of the longest."""


def length_key(key: Key) -> Key:
    """Key of the lengths of a text."""
    return (*key[:-1], key[-1] + "_length")


def text_fields(key: Key, width: int) -> list[Field]:
    """The two fields of a text whose longest row has `width` bytes."""
    return [Field(key, "uint8", (width,), "text"), Field(length_key(key), "int32", (), "text")]


def encode_text(strings: Sequence[bytes], width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the strings as uint8 `[n, width]` and their lengths in bytes as int32 `[n]`."""
    lengths = np.fromiter(map(len, strings), np.int32, len(strings))
    characters = np.array(strings, f"S{width}").view(np.uint8).reshape(len(strings), width)
    return characters, lengths
