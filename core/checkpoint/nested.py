"""Layout `nested`: beside each leaf of a flat checkpoint the table of its episodes' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..format import Array, FileRecord, Leaf, fs, leaf_path, record_file
from ..ted import Key
from .layout import EXPLICIT_EPISODES, CompactLayout

__all__ = ["nested_leaves", "row_counts", "write_tables"]

_TABLE_SUFFIX = ".shape.memmap"


def row_counts(layout: CompactLayout, lengths: Array, explicit: Array) -> dict[Key, Array]:
    """Rows that each stored leaf has of each episode, int64 `[episodes]` by place.

    Episodes whose next observations follow have no rows in the leaves of those that do not.
    """
    chosen = np.zeros(len(lengths), np.int64)
    chosen[explicit] = 1
    counts = {leaf.key: lengths + 1 for leaf in layout.states.values()}
    counts |= {leaf.key: lengths for leaf in (*layout.steps.values(), *layout.at_root.values())}
    counts |= {leaf.key: lengths * chosen for leaf in layout.explicit.values()}
    return counts | {EXPLICIT_EPISODES.key: chosen}


def nested_leaves(leaves: Mapping[Key, Leaf], episodes: int) -> dict[Key, Leaf]:
    """Describe flat leaves as ragged ones, by the shapes of their tables."""
    return {key: Leaf(leaf.dtype, (episodes, len(leaf.shape)), nested=True) for key, leaf in leaves.items()}


def write_tables(folder: Path, leaves: Mapping[Key, Leaf], counts: Mapping[Key, Array]) -> list[FileRecord]:
    """Write the table of each flat leaf, int64 `[episodes, 1 + dimensions of a row]`; none without episodes."""
    records = []
    for key, leaf in leaves.items():
        table = np.empty((len(counts[key]), len(leaf.shape)), np.int64)
        if not table.size:
            continue
        table[:, 0], table[:, 1:] = counts[key], leaf.shape[1:]
        path = leaf_path(key, _TABLE_SUFFIX)
        fs.write_file(folder / path, table.tobytes())
        records.append(record_file(folder / path, path))
    return records
