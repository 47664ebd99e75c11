"""Blocks of rows: their leaves, the runs of episodes in them, and the flags that end episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..format import Array
from ..ted import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Key, as_numbers

__all__ = ["Block", "BlockColumn", "Pieces", "flagged", "marked", "marked_pieces", "numbers_episodes"]


class BlockColumn(NamedTuple):
    """One leaf of a block: the element type by its name in `ted.DTYPES`, and rows `[n, *shape]` of its bytes.

    The array has the element type of `ted.numpy_dtype(dtype)`: bfloat16 lies in uint16.
    """

    dtype: str
    values: Array


@dataclass(frozen=True, slots=True)
class Pieces:
    """The runs of rows of one episode each that lie in a block, in order: arrays `[p]`.

    `episode` is the row of the table of the episodes that take part (`Context.episodes`), `rows` how many rows the run
    has (0 where an episode came to nothing). `begins` and `ends` say whether the episode begins with the first of them
    and ends with the last: where a run does not end, the episode goes on in the first run of the next block, which
    does not begin.
    """

    episode: NDArray[np.int64]
    rows: NDArray[np.int64]
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.episode)

    @classmethod
    def of(cls, episode: Any, rows: Any, begins: Any, ends: Any) -> Self:
        """Take anything that makes such arrays."""
        return cls(
            np.asarray(episode, np.int64), np.asarray(rows, np.int64),
            np.asarray(begins, np.bool_), np.asarray(ends, np.bool_),
        )  # fmt: skip

    @property
    def starts(self) -> NDArray[np.int64]:
        """The row of the block with which each run starts."""
        return np.cumsum(self.rows) - self.rows

    @property
    def steps(self) -> int:
        """Rows of all runs together."""
        return int(self.rows.sum())

    def where(self, keep: NDArray[np.bool_]) -> tuple[Pieces, NDArray[np.int64]]:
        """Leave rows out: `keep` is bool `[steps]`.

        A run that loses rows in its middle falls into as many as there are rows without a gap between them; each but
        the last, and the last where its end is lost, ends there. Returns the runs and the rows, counted after leaving
        out, that end an episode now and did not before: those have to bear `truncated`. Rows that the next block
        leaves out are not seen, so a block has to hold whole episodes where that matters.
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
    """Rows `[n]` of some leaves. `first` is the number of the first of them among the steps that the job takes."""

    columns: Mapping[Key, BlockColumn]
    pieces: Pieces
    first: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.pieces.steps


_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class _LeafRows(Protocol):
    """Rows `[n, *shape]` of the bytes of an element type."""

    @property
    def dtype(self) -> str: ...

    @property
    def values(self) -> Array: ...


def flagged(columns: Mapping[Key, _LeafRows], rows: Any) -> NDArray[np.bool_]:
    """Tell for these rows whether any flag says that an episode ends there; False where there are no flags."""
    chosen = np.asarray(rows, np.int64)
    found = np.zeros(len(chosen), np.bool_)
    for key in _ENDS:
        if key in columns:
            leaf = columns[key]
            flags = as_numbers(leaf.values[chosen], leaf.dtype) != 0
            found |= flags.any(tuple(range(1, flags.ndim)))
    return found


def marked(columns: Mapping[Key, _LeafRows], rows: Any) -> dict[Key, BlockColumn]:
    """Set `truncated` and `done` in these rows, and return those of the two that there are and that changed.

    The arrays given stay as they are.
    """
    chosen, result = np.asarray(rows, np.int64), {}
    for key in (NEXT_TRUNCATED, NEXT_DONE):
        if len(chosen) and key in columns:
            leaf = columns[key]
            copy = leaf.values.copy()
            copy[chosen] = True if leaf.dtype != "bfloat16" else 0x3F80  # the bits of 1.0
            result[key] = BlockColumn(leaf.dtype, copy)
    return result


def marked_pieces(block: Block, source_marked: NDArray[np.bool_]) -> Block:
    """Set the flags where a run ends its episode without one although `source_marked`, bool `[pieces]`."""
    pieces = block.pieces
    last = pieces.starts + pieces.rows - 1
    ending = last[pieces.ends & (pieces.rows > 0) & source_marked]
    bare = ending[~flagged(block.columns, ending)]
    return Block({**block.columns, **marked(block.columns, bare)}, pieces, block.first)


def numbers_episodes(columns: Mapping[Key, BlockColumn]) -> bool:
    """Tell whether there is one whole number a row in the column of episodes."""
    column = columns.get(EPISODE)
    return (
        column is not None
        and column.values.dtype.kind in "iu"
        and column.dtype != "bfloat16"
        and column.values.size == len(column.values)
    )
