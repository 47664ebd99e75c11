"""Which keys are done flags and rewards, and where the rows of a storage end episodes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..encodings.layout import FilledStorage
from ..encodings.rows import differing_rows, leaf_parts, table_of_ends
from ..errors import MissingKeyError, SchemaError, UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..ted.schema import (
    FLAGS,
    NEXT,
    SINGLETONS,
    Field,
    Key,
    Role,
    as_numbers,
    field_named,
    key_name,
    role_of,
    state_keys,
)
from .lanes import Order

KeyLike: TypeAlias = str | tuple[str, ...]

ELSEWHERE = "a TensorStorageCheckpointer saves any storage of tensors"


def keys_of(keys: Sequence[KeyLike] | None, argument: str) -> list[Key]:
    """Read keys below `next`: texts or tuples of texts, with or without `next` in front; None is no key."""
    given: Any = [keys] if isinstance(keys, str) else () if keys is None else keys
    if not isinstance(given, Iterable):
        raise UsageError(f"{argument} is {given!r}; keys are texts or tuples of texts")
    found = []
    for key in given:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{argument} holds {key!r}; keys are texts or tuples of texts")
        found.append(parts[1:] if parts[0] == NEXT and len(parts) > 1 else parts)
    return found


def require_keys(
    asked: Sequence[KeyLike] | None, argument: str, fields: Iterable[Field], place: object, *, anywhere: bool = False
) -> None:
    """Raise MissingKeyError for a key that is not below `next`: it may be misspelt.

    TED's own done, terminated, truncated and reward may be missing: they mean those that exist.
    With `anywhere`, keys at the root count too, for a layout that has all keys there and is separated by these.
    """
    below = (
        field.key[1:] if field.key[0] == NEXT else field.key for field in fields if anywhere or field.key[0] == NEXT
    )
    there = list(dict.fromkeys(key for key in below if key))
    lacking = next((key for key in keys_of(asked, argument) if key not in there and key not in SINGLETONS), None)
    if lacking is None:
        return
    names = [key_name(key) for key in there]
    near = difflib.get_close_matches(key_name(lacking), names, n=1)
    raise MissingKeyError(
        f"{argument} names {key_name(lacking)!r}, but below {NEXT!r} {place} has only {', '.join(names) or 'nothing'}",
        hint=f"did you mean {near[0]!r}?" if near else "",
    )


def done_keys_of(keys: Collection[Key], asked: Sequence[KeyLike] | None) -> list[Key]:
    """Choose the flags that end episodes, as keys below `next`; SchemaError where there is none."""
    after = [key[1:] for key in keys if key[0] == NEXT and len(key) > 1]
    if asked is None:
        named = {flag[0] for flag in FLAGS}
        found = [key for key in after if key in FLAGS] or [key for key in after if key[-1] in named]
    else:
        found = [key for key in keys_of(asked, "done_keys") if key in after]
    if found:
        return found
    wanted = "done, terminated or truncated" if asked is None else ", ".join(map(key_name, keys_of(asked, "done_keys")))
    raise SchemaError(
        f"there is no {wanted} below 'next', so the ends of episodes are unknown",
        hint=f"name the flags with done_keys=[...]; {ELSEWHERE}",
    )


def role_below_next(key: Key, dones: Collection[Key], rewards: Collection[Key]) -> Role:
    """What a leaf is, given the flags and rewards below `next`."""
    inner = key[1:] if key[0] == NEXT else ()
    return "done" if inner in dones else "reward" if inner in rewards else role_of(key)


def find_episodes(reader: StepReader, order: Order, filled: FilledStorage, flags: Sequence[Key]) -> EpisodeTable:
    """Make the episode table of rows that lie lane after lane.

    An episode ends where a flag is set, with the last row of a lane, and between the newest and the oldest row.
    Where a flag is set for some agents and not for others, the episode continues if the next observation follows.
    """
    steps = reader.manifest.steps
    every, some = _flagged(reader, flags)
    partial = some & ~every
    if partial.any():
        every |= partial & _broken(reader)
    ended = every.copy()
    if steps:
        ended.reshape(order.lanes, order.rows)[:, -1] = True
        seam = filled.cursor if filled.cursor and not filled.full else order.rows
        ended.reshape(order.lanes, order.rows)[:, seam - 1] = True
    last = np.flatnonzero(ended)
    return table_of_ends(reader, last, every[last])


def _flagged(reader: StepReader, flags: Sequence[Key]) -> tuple[Array, Array]:
    """Of each step, whether all numbers of some flag are set, and whether any is."""
    steps = reader.manifest.steps
    every, some = np.zeros(steps, bool), np.zeros(steps, bool)
    for key in flags:
        field = field_named(reader.fields, key)
        for start, stop in leaf_parts(steps, field.row_bytes):
            values = as_numbers(reader.read(key, start, stop), field.dtype).reshape(stop - start, -1) != 0
            found = values[:, 0] if values.shape[1] == 1 else values.any(1)
            some[start:stop] |= found
            every[start:stop] |= found if values.shape[1] == 1 else found & values.all(1)
    return every, some


def _broken(reader: StepReader) -> Array:
    """Of each step, whether its next observation is another than the observation of the step after it."""
    steps = reader.manifest.steps
    broken = np.zeros(steps, bool)
    for key in state_keys(reader.fields):
        field = field_named(reader.fields, key)
        if field_named(reader.fields, (NEXT, *key)).role in {"done", "reward"}:
            continue
        for start, stop in leaf_parts(steps - 1, field.row_bytes):
            rows = differing_rows(reader.read((NEXT, *key), start, stop), reader.read(key, start + 1, stop + 1))
            broken[rows + start] = True
    return broken
