"""Keys below `next` that a checkpointer is told of: which end episodes, which are rewards, are they there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

from ..errors import MissingKeyError, SchemaError, UsageError
from ..ted import FLAGS, NEXT, SINGLETONS, Field, Key, Role, key_name, role_of

__all__ = ["ELSEWHERE", "KeyLike", "done_keys_of", "keys_of", "require_keys", "role_below_next"]

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
    """Raise MissingKeyError for a key that nothing below `next` has, which may well be a slip of the pen.

    TED's own done, terminated, truncated and reward may be missing: whoever lists them all means those there are.
    `anywhere` says that keys at the root count, too: where a layout has them all there, and these keys part them.
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
