"""Names: from the columns of a Minari dataset to keys that TED and tensordict leave free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from ...core.format import ENV_METADATA, HIDDEN
from ...core.ted import Key, key_name, safe_part
from .store import ColumnPath

__all__ = ["extra_keys", "free_keys", "length_key", "renamed"]

_TOPS = {"observations": "observation", "actions": "action", "infos": "info"}
_TAKEN_AT_TOP = frozenset(
    {"action", "done", "episode", "index", "info", "next", "observation", "reward", "terminated", "truncated"}
)
_FILES = frozenset({"meta.json", ENV_METADATA, HIDDEN})


def length_key(key: Key) -> Key:
    """Key of the lengths beside a text."""
    return (*key[:-1], key[-1] + "_length")


def extra_keys(paths: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map columns outside the spaces to keys as the source has them: `infos` becomes `info`.

    HDF5 calls the elements of a tuple `_index_0`, …: a group all of whose members are called so was one.
    """
    members: defaultdict[ColumnPath, set[str]] = defaultdict(set)
    for path in paths:
        for depth in range(1, len(path)):
            members[path[:depth]].add(path[depth])
    tuples = {group for group, names in members.items() if names == {f"_index_{i}" for i in range(len(names))}}

    def part(path: ColumnPath, depth: int) -> str:
        return path[depth].removeprefix("_index_") if path[:depth] in tuples else path[depth]

    return {
        path: (_TOPS.get(path[0], path[0]), *(part(path, depth) for depth in range(1, len(path)))) for path in paths
    }


def free_keys(keys: Mapping[ColumnPath, Key], texts: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map each column from its key to one that collides with nothing: a name that is taken gets a trailing `_`.

    Taken are tensordict's own names, at the top those of TED, and the lengths beside the columns in `texts`. A name
    that ends in `_` after a taken one gets one more, so that no two columns end up with one key.
    """
    free = {
        path: tuple(_free(part, at_top=not depth and path[0] not in _TOPS) for depth, part in enumerate(key))
        for path, key in keys.items()
    }
    lengths = {length_key(free[path]) for path in texts}
    return {path: _beside_lengths(key, lengths) for path, key in free.items()}


def _free(part: str, *, at_top: bool) -> str:
    bare = part.rstrip("_")
    if bare in _FILES or bare.endswith(".memmap") or (at_top and bare in _TAKEN_AT_TOP):
        return part + "_"
    return safe_part(part)


def _beside_lengths(key: Key, lengths: Collection[Key]) -> Key:
    return tuple(part + "_" if (*key[:depth], part.rstrip("_")) in lengths else part for depth, part in enumerate(key))


def renamed(keys: Mapping[ColumnPath, Key], free: Mapping[ColumnPath, Key]) -> dict[str, str]:
    """Dotted names before and after, of those that changed."""
    return {key_name(key): key_name(free[path]) for path, key in keys.items() if free[path] != key}
