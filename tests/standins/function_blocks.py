"""Blocks of a small made-up dataset whose rows all differ, and works of functions on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.preprocess.functions import FunctionProcessor, find_function
from rbtool.core.preprocess.processor import Block, BlockColumn, Context, LoadedProcessor, Pieces, Unit
from rbtool.core.ted.schema import Key

FLAGS = ("done", "terminated", "truncated")


def block_of(lengths: Sequence[int], first: int = 0, ids: Sequence[int] | None = None) -> Block:
    """Whole episodes of these lengths, each ending terminated; episode 3 and up by default."""
    rows, starts = sum(lengths), np.cumsum(lengths) - lengths
    numbers = np.arange(3, 3 + len(lengths)) if ids is None else np.asarray(ids)
    step = np.arange(first, first + rows + 1, dtype=np.float32)
    ends = np.zeros((rows, 1), bool)
    ends[(starts + lengths - 1)[np.asarray(lengths) > 0]] = True
    columns: dict[Key, BlockColumn] = {
        ("observation", "x"): BlockColumn("float32", np.stack([step[:-1], step[:-1] ** 2], 1)),
        ("observation", "y"): BlockColumn("int32", step[:-1].astype(np.int32)),
        ("action",): BlockColumn(
            "bfloat16", (step[:-1] + 1).astype(np.float32).view(np.uint32).__rshift__(16).astype("u2")
        ),
        ("episode",): BlockColumn("int64", np.repeat(numbers, lengths).astype(np.int64)),
        ("next", "observation", "x"): BlockColumn("float32", np.stack([step[1:], step[1:] ** 2], 1)),
        ("next", "observation", "y"): BlockColumn("int32", step[1:].astype(np.int32)),
        ("next", "reward"): BlockColumn("float64", np.sqrt(step[:-1, None].astype(np.float64))),
        ("next", "done"): BlockColumn("bool", ends),
        ("next", "terminated"): BlockColumn("bool", ends.copy()),
        ("next", "truncated"): BlockColumn("bool", np.zeros_like(ends)),
    }
    yes = np.ones(len(lengths), bool)
    return Block(columns, Pieces.of(np.arange(len(lengths)), lengths, yes, yes), first)


def part_of(block: Block, start: int, stop: int) -> Block:
    """Copy some rows of a block; episodes that go on beyond say so."""
    pieces = block.pieces
    begin, end = pieces.starts, pieces.starts + pieces.rows
    inside = (begin < stop) & (end > start)
    cut = Pieces.of(
        pieces.episode[inside],
        (np.minimum(end, stop) - np.maximum(begin, start))[inside],
        (begin >= start)[inside],
        (end <= stop)[inside],
    )
    columns = {key: BlockColumn(dtype, values[start:stop].copy()) for key, (dtype, values) in block.columns.items()}
    return Block(columns, cut, block.first + start)


def started(
    function: Callable[[Any], Any] | str, unit: Unit = "step", vmap: bool | None = None, seed: int = 0
) -> LoadedProcessor:
    """Load a function as a work would in the process that runs it."""
    return FunctionProcessor(find_function(function), unit, vmap).load(Context((), EpisodeTable.from_rows([]), seed))


def values_of(block: Block) -> dict[Key, tuple[str, list[Any]]]:
    """What a block holds as plain lists, to compare."""
    return {key: (column.dtype, column.values.tolist()) for key, column in block.columns.items()}


def runs_of(block: Block) -> list[tuple[int, int, bool, bool]]:
    """The pieces of a block as tuples."""
    pieces = block.pieces
    columns = (pieces.episode, pieces.rows, pieces.begins, pieces.ends)
    return list(zip(*(column.tolist() for column in columns), strict=True))
