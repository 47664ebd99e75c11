"""How an episode ends in the rows of a block: the flags of its last row, and setting them where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..format import Array
from ..ted import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Key, as_numbers
from .block import Block, Column

__all__ = ["flagged", "marked", "marked_pieces", "numbers_episodes"]

_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class _Leaf(Protocol):
    """Rows `[n, *shape]` of the bytes of an element type."""

    @property
    def dtype(self) -> str: ...

    @property
    def values(self) -> Array: ...


def flagged(columns: Mapping[Key, _Leaf], rows: Any) -> NDArray[np.bool_]:
    """Tell for these rows whether any flag says that an episode ends there; False where there are no flags."""
    chosen = np.asarray(rows, np.int64)
    found = np.zeros(len(chosen), np.bool_)
    for key in _ENDS:
        if key in columns:
            leaf = columns[key]
            flags = as_numbers(leaf.values[chosen], leaf.dtype) != 0
            found |= flags.any(tuple(range(1, flags.ndim)))
    return found


def marked(columns: Mapping[Key, _Leaf], rows: Any) -> dict[Key, Column]:
    """Set `truncated` and `done` in these rows, and return those of the two that there are and that changed.

    The arrays given stay as they are.
    """
    chosen, result = np.asarray(rows, np.int64), {}
    for key in (NEXT_TRUNCATED, NEXT_DONE):
        if len(chosen) and key in columns:
            leaf = columns[key]
            copy = leaf.values.copy()
            copy[chosen] = True if leaf.dtype != "bfloat16" else 0x3F80  # the bits of 1.0
            result[key] = Column(leaf.dtype, copy)
    return result


def marked_pieces(block: Block, source_marked: NDArray[np.bool_]) -> Block:
    """Set the flags where a run ends its episode without one although `source_marked`, bool `[pieces]`."""
    pieces = block.pieces
    last = pieces.starts + pieces.rows - 1
    ending = last[pieces.ends & (pieces.rows > 0) & source_marked]
    bare = ending[~flagged(block.columns, ending)]
    return Block({**block.columns, **marked(block.columns, bare)}, pieces, block.first)


def numbers_episodes(columns: Mapping[Key, Column]) -> bool:
    """Tell whether there is one whole number a row in the column of episodes."""
    column = columns.get(EPISODE)
    return (
        column is not None
        and column.values.dtype.kind in "iu"
        and column.dtype != "bfloat16"
        and column.values.size == len(column.values)
    )
