"""Calls a function with one episode at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..ted import EPISODE, NEXT, Field, Key, role_of, state_keys
from ..ted.checks.following import rows_equal
from .block import Block, Column, Pieces
from .calls import UserFunction
from .endings import flagged, marked, numbers_episodes
from .failures import ResultRefused
from .growing import GrowingColumns
from .seeds import mixed, sow
from .tensors import chunk_of, table_of
from .work import Started

__all__ = ["EpisodeUnit"]


class EpisodeUnit(Started):
    """Unit `episode`: the T rows of an episode in, any number of rows out, also none or those of several episodes.

    Random numbers are seeded by the number of the episode among those that take part. Blocks hold whole episodes.
    """

    def __init__(self, function: UserFunction, seed: int) -> None:
        self._function = function
        self._seed = seed

    def apply(self, block: Block) -> Block:
        """Return the rows that the function makes of each episode.

        What it returns falls into several episodes where the column `episode` changes, and after a done flag that is
        not followed by the row after it. Ends without a flag are marked truncated where the episode given bore one.
        """
        grown = GrowingColumns(block.rows)
        runs: list[tuple[int, int, bool, bool]] = []
        pieces = block.pieces
        with self._function.running():
            for place, (start, rows) in enumerate(zip(pieces.starts.tolist(), pieces.rows.tolist(), strict=True)):
                lengths = self._call(block, place, start, rows, grown) if rows else [0]
                episode, last = int(pieces.episode[place]), len(lengths) - 1
                runs += (
                    (episode, length, bool(pieces.begins[place]) or run > 0, bool(pieces.ends[place]) or run < last)
                    for run, length in enumerate(lengths)
                )
        columns = zip(*runs, strict=True) if runs else ((), (), (), ())
        return Block(grown.columns(), Pieces.of(*columns), block.first)

    def _call(self, block: Block, place: int, start: int, given: int, grown: GrowingColumns) -> list[int]:
        """Let an episode's rows grow what there is, and return how many there are of each run of them."""
        part = {key: Column(dtype, values[start : start + given]) for key, (dtype, values) in block.columns.items()}
        steps = (block.first + start, block.first + start + given)
        was_marked = bool(flagged(part, [given - 1])[0])
        sow(mixed(self._seed, int(block.pieces.episode[place])))
        result = self._function(chunk_of(part, given), steps)
        with ResultRefused.on(steps):
            columns, rows = table_of(result)
            if not rows:
                grown.nothing(columns)
                return [0]
            ends = np.append(_inner_ends(columns, rows), rows - 1)
            if was_marked:
                columns |= marked(columns, ends[~flagged(columns, ends)])
            grown.add(columns, rows)
        lengths: list[int] = np.diff(ends, prepend=-1).tolist()
        return lengths


def _inner_ends(columns: Mapping[Key, Column], rows: int) -> NDArray[np.int64]:
    """The rows, but the last, after which another episode begins."""
    ends = np.zeros(rows - 1, np.bool_)
    if numbers_episodes(columns):
        numbers = columns[EPISODE].values.reshape(rows)
        ends |= numbers[1:] != numbers[:-1]
    flags = np.flatnonzero(flagged(columns, np.arange(rows - 1)))
    if len(flags):
        fields = (Field(key, dtype, values.shape[1:], role_of(key)) for key, (dtype, values) in columns.items())
        states = state_keys(fields)
        follows = np.full(len(flags), bool(states))
        for key in states:
            follows &= rows_equal(columns[NEXT, *key].values[flags], columns[key].values[flags + 1])
        ends[flags[~follows]] = True
    return np.flatnonzero(ends)
