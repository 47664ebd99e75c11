"""Rows to do operations on, and ways to do them; session-wide, for Hypothesis runs a test many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from works import part_of

from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.preprocess.operations.program import Program, ProgramProcessor, program_of
from rbtool.core.preprocess.processor import Block, BlockColumn, Context, Pieces
from rbtool.core.ted.schema import Field, Key, role_of

Made = tuple[tuple[Field, ...], Block]


def made_rows(lengths: Sequence[int], ends: Sequence[str] = (), seed: int = 0, **extra: np.ndarray) -> Made:
    """Episodes that end as `ends` say, in turn; each value is different. `extra` are fields by name, `.` for groups."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    last = np.cumsum(lengths) - 1
    how = [(ends or ("terminated", "truncated"))[place % len(ends or "ab")] for place in range(len(lengths))]
    before = {"position": rng.normal(size=(rows + 1, 3)), "count": rng.integers(-99, 99, rows + 1)}
    columns: dict[Key, BlockColumn] = {
        ("action",): BlockColumn("float32", rng.normal(size=(rows, 2)).astype(np.float32)),
        ("episode",): BlockColumn("int64", np.repeat(np.arange(len(lengths)), lengths)),
    }
    columns |= {
        ("observation", name): BlockColumn(array.dtype.name, array[:-1].copy()) for name, array in before.items()
    }
    columns |= {("next", "observation", name): BlockColumn(a.dtype.name, a[1:].copy()) for name, a in before.items()}
    columns["next", "reward"] = BlockColumn("float64", rng.normal(size=(rows, 1)).round(3))
    for flag in ("done", "terminated", "truncated"):
        set_at = [row for row, end in zip(last, how, strict=True) if end == flag or (flag == "done" and end != "open")]
        columns["next", flag] = BlockColumn("bool", np.isin(np.arange(rows), set_at)[:, None])
    columns |= {tuple(name.split(".")): BlockColumn(array.dtype.name, array) for name, array in extra.items()}
    fields = tuple(Field(key, column.dtype, column.values.shape[1:], role_of(key)) for key, column in columns.items())
    whole = [True] * len(lengths)
    return fields, Block(columns, Pieces.of(range(len(lengths)), lengths, whole, whole), 0)


def work_of(fields: Sequence[Field], block: Block, **operations: Any) -> ProgramProcessor:
    """The work of some options, with what it has to measure measured on the block."""
    return with_measurements(ProgramProcessor(program_of(operations), fields), fields, block)


def with_measurements(work: ProgramProcessor, fields: Sequence[Field], block: Block) -> ProgramProcessor:
    if not work.needs_measuring:
        return work
    known = work.with_measurements([work.load(_context(fields)).measure(_read(work, fields, block))])
    assert isinstance(known, ProgramProcessor)
    return known


def done(work: ProgramProcessor, fields: Sequence[Field], block: Block) -> Block:
    """Do it, on no more fields than the work says that it reads, and hold the result to the fields it foretells."""
    found = work.load(_context(fields)).apply(_read(work, fields, block))
    foretold = {field.key: (field.dtype, field.shape) for field in work.fields}
    assert {key: (column.dtype, column.values.shape[1:]) for key, column in found.columns.items()} == foretold
    assert all(len(column.values) == found.pieces.steps for column in found.columns.values())
    return found


def _read(work: ProgramProcessor, fields: Sequence[Field], block: Block) -> Block:
    keys = work.reads(fields)
    columns = {key: BlockColumn(c.dtype, c.values.copy()) for key, c in block.columns.items() if key in keys}
    assert columns.keys() == keys
    return Block(columns, block.pieces, block.first)


def _context(fields: Sequence[Field]) -> Context:
    return Context(tuple(fields), EpisodeTable.from_rows([]), 0)


def cut_rows(block: Block, cuts: Sequence[int]) -> list[Block]:
    """Cut a block in front of these rows."""
    return [part_of(block, start, stop) for start, stop in pairwise([0, *sorted(set(cuts)), block.rows])]


def columns_of(blocks: Sequence[Block]) -> dict[str, np.ndarray]:
    """The columns of some blocks in a row, by name."""
    keys = blocks[0].columns.keys()
    return {".".join(key): np.concatenate([block.columns[key].values for block in blocks]) for key in keys}


@pytest.fixture(scope="session")
def rows() -> Callable[..., Made]:
    return made_rows


@pytest.fixture(scope="session")
def do() -> Callable[..., dict[str, np.ndarray]]:
    """Do operations to rows and return the columns by name."""

    def run(made: Made, **operations: Any) -> dict[str, np.ndarray]:
        return columns_of([done(work_of(*made, **operations), *made)])

    return run


@pytest.fixture(scope="session")
def work() -> Callable[..., ProgramProcessor]:
    def make(made: Made, program: Program | None = None, **operations: Any) -> ProgramProcessor:
        if program is not None:
            return with_measurements(ProgramProcessor(program, made[0]), *made)
        return work_of(*made, **operations)

    return make


@pytest.fixture(scope="session")
def apply() -> Callable[..., Block]:
    return done


@pytest.fixture(scope="session")
def cut() -> Callable[..., list[Block]]:
    return cut_rows


@pytest.fixture(scope="session")
def columns() -> Callable[[Sequence[Block]], Mapping[str, np.ndarray]]:
    return columns_of
