"""Keys for the columns of a Minari dataset, and names for the texts of whole episodes, without collisions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...core.format.documents import dump_json
from ...core.format.manifest import ENV_METADATA, HIDDEN
from ...core.ted.schema import Key, key_name, safe_part
from .store import DERIVED, ColumnPath, column_name

_TOPS = {"observations": "observation", "actions": "action", "infos": "info"}
_TAKEN_AT_TOP = frozenset(
    {"action", "done", "episode", "index", "info", "next", "observation", "reward", "terminated", "truncated"}
)
_FILES = frozenset({"meta.json", ENV_METADATA, HIDDEN})


def length_key(key: Key) -> Key:
    """Key of the lengths of a text."""
    return (*key[:-1], key[-1] + "_length")


def extra_keys(paths: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map columns outside the spaces to keys: `infos` becomes `info`.

    In HDF5 the elements of a tuple are named `_index_0`, …: a group with only such names is a tuple.
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
    """Map each column from its key to a free one: a reserved name gets a trailing `_`.

    Reserved are tensordict's own names, those of TED at the top level, and the lengths of the columns in `texts`. A
    reserved name that ends in `_` already gets one more, so that no two columns get the same key.
    """
    free = {
        path: tuple(_free(part, at_top=not depth and path[0] not in _TOPS) for depth, part in enumerate(key))
        for path, key in keys.items()
    }
    lengths = {length_key(free[path]) for path in texts}
    return {path: _without_lengths(key, lengths) for path, key in free.items()}


def _free(part: str, *, at_top: bool) -> str:
    bare = part.rstrip("_")
    if bare in _FILES or bare.endswith(".memmap") or (at_top and bare in _TAKEN_AT_TOP):
        return part + "_"
    return safe_part(part)


def _without_lengths(key: Key, lengths: Collection[Key]) -> Key:
    return tuple(part + "_" if (*key[:depth], part.rstrip("_")) in lengths else part for depth, part in enumerate(key))


def renamed(keys: Mapping[ColumnPath, Key], free: Mapping[ColumnPath, Key]) -> dict[str, str]:
    """Dotted names before and after, of those that changed."""
    return {key_name(key): key_name(free[path]) for path, key in keys.items() if free[path] != key}


_SEED: ColumnPath = ("seed",)


class EpisodeTexts:
    """Gives every text of episodes a unique name.

    Names are dotted, and a part may contain a dot: of `a/b` and `a.b` the later in the order of paths gets a trailing
    `_`, and so does an attribute with the name of a column. `columns` maps the columns to their keys;
    `attributes` are the paths of all attributes of any episode.
    """

    def __init__(self, columns: Mapping[ColumnPath, Key], attributes: Iterable[ColumnPath]) -> None:
        dotted = {("column", path): key_name(columns[path]) for path in sorted(columns)}
        dotted |= {("attribute", path): _dotted(path) for path in sorted(attributes) if not _derived(path)}
        taken = set(dotted.values())
        given: set[str] = set()
        self._names: dict[tuple[str, ColumnPath], str] = {}
        for source, name in dotted.items():
            free = name
            while free in given or (free != name and free in taken):
                free += "_"
            given.add(free)
            self._names[source] = free
        self._renamed = {
            _shown(*source): self._names[source] for source, name in dotted.items() if self._names[source] != name
        }

    def renamed(self) -> dict[str, str]:
        """Names in the source, with slashes, and the names given instead."""
        return dict(self._renamed)

    def of_column(self, path: ColumnPath) -> str:
        """Name of the text of a column."""
        return self._names["column", path]

    def of_attributes(self, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """All attributes of an episode except its seed, as JSON, so that none is lost."""
        spare = {path: value for path, value in attributes.items() if not _derived(path) and value is not None}
        if seed_of(attributes) is not None:
            del spare[_SEED]
        return {self._names["attribute", path]: dump_json(value) for path, value in sorted(spare.items())}


def seed_of(attributes: Mapping[ColumnPath, Any]) -> int | None:
    """The seed of an episode; None unless NumPy accepts it as a seed."""
    seed = attributes.get(_SEED)
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        return None
    return int(seed) if 0 <= seed < 1 << 64 else None


def _derived(path: ColumnPath) -> bool:
    return len(path) == 1 and path[0] in DERIVED


def _dotted(path: ColumnPath) -> str:
    name = ".".join(path)
    return name if name.startswith("options.") else f"attributes.{name}"


def _shown(source: str, path: ColumnPath) -> str:
    return column_name(path) if source == "column" or path[0] == "options" else f"attributes/{column_name(path)}"
