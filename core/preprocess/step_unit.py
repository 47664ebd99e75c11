"""Calls a function with all rows of a block at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..ted import EPISODE, Key
from .block import Block, Column, Pieces
from .calls import UserFunction
from .endings import flagged, marked_pieces, numbers_episodes
from .failures import ResultRefused, counted
from .seeds import mixed, sow
from .tensors import chunk_of, table_of
from .work import Started

__all__ = ["StepUnit"]


class StepUnit(Started):
    """Unit `step`: K rows in, any number of rows out. Random numbers are seeded by the first row's number."""

    def __init__(self, function: UserFunction, seed: int) -> None:
        self._function = function
        self._seed = seed

    def apply(self, block: Block) -> Block:
        """Return the rows that the function makes of the block.

        As many as given keep their episodes, whatever they bear. Of another number, the column `episode` says which
        rows each episode has left, maybe none; one that ends without a flag now is marked truncated.
        """
        steps = (block.first, block.first + block.rows)
        before = _Ends.of(block)
        with self._function.running():
            sow(mixed(self._seed, block.first))
            result = self._function(chunk_of(block.columns, block.rows), steps)
        columns, rows = table_of(result)
        if rows == block.rows:
            return Block(columns, block.pieces, block.first)
        pieces = _left(block.pieces, before.episodes, columns, rows, block.rows)
        return marked_pieces(Block(columns, pieces, block.first), before.marked)


class _Ends:
    """What the function may edit of a block and is needed after: episode numbers and flags of its runs."""

    def __init__(self, episodes: NDArray[np.int64] | None, marked: NDArray[np.bool_]) -> None:
        self.episodes = episodes
        self.marked = marked

    @classmethod
    def of(cls, block: Block) -> _Ends:
        pieces = block.pieces
        filled = pieces.rows > 0
        marked = np.zeros(len(pieces), np.bool_)
        marked[filled] = flagged(block.columns, (pieces.starts + pieces.rows - 1)[filled])
        if not filled.all() or not numbers_episodes(block.columns):
            return cls(None, marked)
        return cls(block.columns[EPISODE].values[pieces.starts].reshape(len(pieces)).astype(np.int64), marked)


def _left(
    pieces: Pieces, episodes: NDArray[np.int64] | None, columns: Mapping[Key, Column], rows: int, given: int
) -> Pieces:
    """The runs of a block of which `rows` rows are left that bear numbers of its episodes, in its order."""
    counts = np.zeros(len(pieces), np.int64)
    if not rows:
        return Pieces(pieces.episode, counts, pieces.begins, pieces.ends)
    returned = f"it returned {counted(rows, 'row')} for {counted(given, 'step')}"
    if episodes is None or not numbers_episodes(columns):
        if given > 1 and all(values.shape[1:2] == (given,) for _, values in columns.values()):
            raise ResultRefused(
                f"it returned the batch size {[rows, given]} for {counted(given, 'step')}; {[given]} is expected"
            )
        raise ResultRefused(
            f"{returned} without a column 'episode' that says whose they are; keep 'episode', or use --unit episode"
        )
    numbers = columns[EPISODE].values.reshape(rows).astype(np.int64)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    lengths = np.diff(np.append(starts, rows))
    at = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        number = numbers[start]
        found = np.flatnonzero(episodes[at:] == number)
        if not len(found):
            known = "comes after a later one" if number in episodes else "is none of those given"
            raise ResultRefused(
                f"{returned}, and the episode of row {start:,}, {number}, {known}; "
                "rows stay in the order of their episodes"
            )
        if len(found) > 1:
            raise ResultRefused(
                f"{returned} of which several episodes are numbered {number}; "
                "their rows cannot be separated; use --unit episode"
            )
        at += int(found[0])
        counts[at] = length
        at += 1
    return Pieces(pieces.episode, counts, pieces.begins, pieces.ends)
