"""Keys: the path of a leaf in a nested dictionary, as a tuple of strings."""

from __future__ import annotations

import re
from typing import TypeAlias

__all__ = [
    "ACTION",
    "DEFAULT_DONE_KEYS",
    "DONE",
    "EPISODE",
    "FLAGS",
    "NEXT",
    "NEXT_DONE",
    "NEXT_REWARD",
    "NEXT_TERMINATED",
    "NEXT_TRUNCATED",
    "REWARD",
    "SINGLETONS",
    "TERMINATED",
    "TRUNCATED",
    "Key",
    "file_stem",
    "key_from_stem",
    "key_name",
    "safe_part",
]

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
SINGLETONS: tuple[Key, ...] = (REWARD, *FLAGS)
"""Keys that carry a trailing dimension of one, at the root and under `next`."""

_RESERVED = frozenset({"shape", "device", "_type"})
_ESCAPED = re.compile(r'[\x00-\x1f\x7f/<>:"|?*\\ %]')


def key_name(key: Key) -> str:
    """Write a key the way people type it: parts joined by dots."""
    return ".".join(key)


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
