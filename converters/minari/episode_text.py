"""Text that belongs to whole episodes: strings that stay the same all along, and the attributes of episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.format import dump_json
from ...core.ted import Key, key_name
from .store import DERIVED, ColumnPath, column_name

__all__ = ["EpisodeTexts", "seed_of"]

_SEED: ColumnPath = ("seed",)


class EpisodeTexts:
    """Gives every text of episodes a name of its own.

    Names are dotted, and a dot may be in a part as well: of `a/b` and `a.b` the later in the order of paths gets a
    trailing `_`, and so does an attribute called like a column. `columns` maps the columns to their keys;
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
        """Names as the source has them, with slashes, and those given instead."""
        return dict(self._renamed)

    def of_column(self, path: ColumnPath) -> str:
        """Name of the text of a column."""
        return self._names["column", path]

    def of_attributes(self, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """Everything that is said of an episode but its seed, as JSON: nothing has to be lost for want of a column."""
        spare = {path: value for path, value in attributes.items() if not _derived(path) and value is not None}
        if seed_of(attributes) is not None:
            del spare[_SEED]
        return {self._names["attribute", path]: dump_json(value) for path, value in sorted(spare.items())}


def seed_of(attributes: Mapping[ColumnPath, Any]) -> int | None:
    """The seed of an episode, where it is one that NumPy takes."""
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
