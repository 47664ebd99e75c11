"""Blocks of rows: their leaves, the runs of episodes in them, and the flags that end episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..format.contracts import Array
from ..ted.schema import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Key, as_numbers


class BlockColumn(NamedTuple):
    """One leaf of a block: the element type by its name in `ted.DTYPES`, and rows `[n, *shape]` of its bytes.

    The array has the element type of `ted.numpy_dtype(dtype)`: uint16 for bfloat16.
    """

    dtype: str
    values: Array


@dataclass(frozen=True, slots=True)
class Pieces:
    """The runs of rows of a block, each of one episode, in order: arrays `[p]`.

    `episode` is the row of `Context.episodes`, `rows` the length of the run (0 where no row of an episode is left).
    `begins` and `ends` are whether the episode begins with the run's first row and ends with its last: an episode that
    does not end continues in the first run of the next block, which does not begin.
    """

    episode: NDArray[np.int64]
    rows: NDArray[np.int64]
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.episode)

    @classmethod
    def of(cls, episode: Any, rows: Any, begins: Any, ends: Any) -> Self:
        """Convert array-likes to the element types."""
        return cls(
            np.asarray(episode, np.int64), np.asarray(rows, np.int64),
            np.asarray(begins, np.bool_), np.asarray(ends, np.bool_),
        )  # fmt: skip

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each run in the block, `[p]`."""
        return np.cumsum(self.rows) - self.rows

    @property
    def steps(self) -> int:
        """Number of rows of all runs."""
        return int(self.rows.sum())

    def where(self, keep: NDArray[np.bool_]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the runs of the rows in `keep`, bool `[steps]`, and the rows that end an episode only now.

        A run that loses rows in its middle is split at each gap, and each part but the last ends there; so does the
        last if it loses its end. Those ends, counted in the rows that are kept, need `truncated`. Rows that the next
        block loses are not considered: where that matters, a block has to hold whole episodes.
        """
        runs: list[tuple[int, int, bool, bool]] = []
        cut: list[int] = []
        rows = 0
        for episode, start, length, begins, ends in zip(
            self.episode.tolist(), self.starts.tolist(), self.rows.tolist(), self.begins.tolist(), self.ends.tolist(),
            strict=True,
        ):  # fmt: skip
            found = _runs(keep[start : start + length])
            if not found:
                runs.append((episode, 0, begins, ends))
            for first, last in found:
                whole = last == length
                rows += last - first
                runs.append((episode, last - first, begins or first > 0, ends or not whole))
                if not whole:
                    cut.append(rows - 1)
        columns = zip(*runs, strict=True) if runs else ((), (), (), ())
        return Pieces.of(*columns), np.array(cut, np.int64)


def _runs(keep: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], keep, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[n]` of some leaves; `first` is the number of the first one among the job's steps."""

    columns: Mapping[Key, BlockColumn]
    pieces: Pieces
    first: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.pieces.steps


_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class _LeafRows(Protocol):
    """Rows `[n, *shape]` of the bytes of an element type."""

    @property
    def dtype(self) -> str: ...

    @property
    def values(self) -> Array: ...


def flagged(columns: Mapping[Key, _LeafRows], rows: Any) -> NDArray[np.bool_]:
    """Whether any flag of these rows ends an episode, bool `[len(rows)]`; False without flags."""
    chosen = np.asarray(rows, np.int64)
    found = np.zeros(len(chosen), np.bool_)
    for key in _ENDS:
        if key in columns:
            leaf = columns[key]
            flags = as_numbers(leaf.values[chosen], leaf.dtype) != 0
            found |= flags.any(tuple(range(1, flags.ndim)))
    return found


def marked(columns: Mapping[Key, _LeafRows], rows: Any) -> dict[Key, BlockColumn]:
    """Return copies of `truncated` and `done`, as far as they exist, that are set in these rows."""
    chosen, result = np.asarray(rows, np.int64), {}
    for key in (NEXT_TRUNCATED, NEXT_DONE):
        if len(chosen) and key in columns:
            leaf = columns[key]
            copy = leaf.values.copy()
            copy[chosen] = True if leaf.dtype != "bfloat16" else 0x3F80  # the bits of 1.0
            result[key] = BlockColumn(leaf.dtype, copy)
    return result


def marked_pieces(block: Block, source_marked: NDArray[np.bool_]) -> Block:
    """Set the flags where a run ends its episode without one and `source_marked`, bool `[pieces]`, is true."""
    pieces = block.pieces
    last = pieces.starts + pieces.rows - 1
    ending = last[pieces.ends & (pieces.rows > 0) & source_marked]
    bare = ending[~flagged(block.columns, ending)]
    return Block({**block.columns, **marked(block.columns, bare)}, pieces, block.first)


def numbers_episodes(columns: Mapping[Key, BlockColumn]) -> bool:
    """Whether the column `episode` has one integer for each row."""
    column = columns.get(EPISODE)
    return (
        column is not None
        and column.values.dtype.kind in "iu"
        and column.dtype != "bfloat16"
        and column.values.size == len(column.values)
    )
