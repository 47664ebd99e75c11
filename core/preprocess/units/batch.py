"""Units `step` and `episode`: a function of several rows at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...progress import counted
from ...ted.episodes import rows_equal
from ...ted.schema import EPISODE, NEXT, Field, Key, role_of, state_keys
from ..failures import ResultRefused
from ..processor import Block, BlockColumn, LoadedProcessor, Pieces, flagged, marked, marked_pieces, numbers_episodes
from .user_function import ColumnBuffer, UserFunction, chunk_of, mixed_seed, seed_generators, table_of


class StepUnit(LoadedProcessor):
    """Unit `step`: K rows in, any number of rows out. Generators are seeded by the number of the first row."""

    def __init__(self, function: UserFunction, seed: int) -> None:
        self._function = function
        self._seed = seed

    def apply(self, block: Block) -> Block:
        """Return the function's rows for the block.

        If there are as many as in the block, all keep their episodes. Otherwise the column `episode` decides which rows
        each episode has left, maybe none; an episode that now ends without a flag is marked truncated.
        """
        steps = (block.first, block.first + block.rows)
        before = _Ends.of(block)
        with self._function.running():
            seed_generators(mixed_seed(self._seed, block.first))
            result = self._function(chunk_of(block.columns, block.rows), steps)
        columns, rows = table_of(result)
        if rows == block.rows:
            return Block(columns, block.pieces, block.first)
        pieces = _left(block.pieces, before.episodes, columns, rows, block.rows)
        return marked_pieces(Block(columns, pieces, block.first), before.marked)


class _Ends:
    """Episode numbers and end flags of a block's runs, taken before the function may change them."""

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
    pieces: Pieces, episodes: NDArray[np.int64] | None, columns: Mapping[Key, BlockColumn], rows: int, given: int
) -> Pieces:
    """The runs of a block after a function: `rows` rows, with episode numbers of the block in the same order."""
    counts = np.zeros(len(pieces), np.int64)
    if not rows:
        return Pieces(pieces.episode, counts, pieces.begins, pieces.ends)
    returned = f"it returned {counted(rows, 'row')} for {counted(given, 'step')}"
    if episodes is None or not numbers_episodes(columns):
        if given > 1 and all(values.shape[1:2] == (given,) for _, values in columns.values()):
            raise ResultRefused(
                f"it returned the batch size {[rows, given]} for {counted(given, 'step')}, expected {[given]}"
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


class EpisodeUnit(LoadedProcessor):
    """Unit `episode`: the T rows of an episode in, any number of rows out, of no, one or several episodes.

    Generators are seeded by the number of the episode among those that take part. Blocks hold whole episodes. With
    `new_flags_end` the function returns as many rows as it gets, and each flag that it sets ends an episode.
    """

    def __init__(self, function: UserFunction, seed: int, *, new_flags_end: bool = False) -> None:
        self._function = function
        self._seed = seed
        self._new_flags_end = new_flags_end

    def apply(self, block: Block) -> Block:
        """Return the function's rows for each episode.

        They are split into episodes where the column `episode` changes, and after a done flag whose next observation
        differs from the following row. Ends without a flag are marked truncated if the original episode had one.
        """
        grown = ColumnBuffer(block.rows)
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

    def _call(self, block: Block, place: int, start: int, given: int, grown: ColumnBuffer) -> list[int]:
        """Append the rows of one episode; return the lengths of its runs."""
        part = {
            key: BlockColumn(dtype, values[start : start + given]) for key, (dtype, values) in block.columns.items()
        }
        steps = (block.first + start, block.first + start + given)
        before = flagged(part, np.arange(given))  # a copy: the function may edit the flags
        seed_generators(mixed_seed(self._seed, int(block.pieces.episode[place])))
        result = self._function(chunk_of(part, given), steps)
        with ResultRefused.on(steps):
            columns, rows = table_of(result)
            if not rows:
                grown.nothing(columns)
                return [0]
            kept = before if self._new_flags_end else np.ones(rows, np.bool_)
            ends = np.append(_inner_ends(columns, rows, kept), rows - 1)
            if before[-1]:
                columns |= marked(columns, ends[~flagged(columns, ends)])
            grown.add(columns, rows)
        lengths: list[int] = np.diff(ends, prepend=-1).tolist()
        return lengths


def _inner_ends(columns: Mapping[Key, BlockColumn], rows: int, kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The rows, except the last, that end an episode; `kept` are those whose flag is none if the next row follows."""
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
        ends[flags[~(follows & kept[flags])]] = True
    return np.flatnonzero(ends)
