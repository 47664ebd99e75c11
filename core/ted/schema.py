"""The schema of a row: its leaves, their types, shapes and roles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean
from .dtypes import numpy_dtype
from .keys import ACTION, EPISODE, FLAGS, NEXT, REWARD, SINGLETONS, Key, key_name

__all__ = ["Field", "Role", "Timing", "field_named", "role_of", "row_bytes", "state_keys", "ted_fields"]

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
    """Find a field by its key, or raise MissingKeyError that lists what there is."""
    known = list(fields)
    for field in known:
        if field.key == key:
            return field
    raise MissingKeyError(f"no field {key_name(key)!r} here; fields are {', '.join(f.name for f in known)}")


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
