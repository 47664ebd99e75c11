"""The test suite for operations of `preprocess`. To run it, subclass `OperationTests` and implement `operation`."""

from __future__ import annotations

import json
import pickle
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..format.contracts import Array
from ..format.episodes import EpisodeTable
from ..preprocess.operations.base import Fields, LazyBatch, RowOperation
from ..preprocess.operations.program import Program, ProgramProcessor, operation_of, pipeline_text  # fmt: skip
from ..preprocess.processor import Block, BlockColumn, Context, Pieces, Processor
from ..ted.schema import NEXT, Field, Key, key_name, role_of

_LENGTHS = (5, 1, 7, 4)


def sample_block(lengths: Sequence[int] = _LENGTHS) -> tuple[tuple[Field, ...], Block]:
    """Return fields and rows of episodes with these lengths: observation, action, reward, flags and episode.

    Every other episode is terminated, the rest are truncated. All values differ.
    """
    rng, rows = np.random.default_rng(0), sum(lengths)
    before = rng.normal(size=(rows + 1, 3)).astype(np.float32)
    ends = np.cumsum(lengths) - 1
    columns: dict[Key, Array] = {
        ("observation",): before[:-1].copy(),
        ("action",): rng.normal(size=(rows, 2)).astype(np.float32),
        ("episode",): np.repeat(np.arange(len(lengths)), lengths),
        (NEXT, "observation"): before[1:].copy(),
        (NEXT, "reward"): rng.normal(size=(rows, 1)).astype(np.float32),
    }
    for flag, last in (("done", ends), ("terminated", ends[::2]), ("truncated", ends[1::2])):
        columns[NEXT, flag] = np.isin(np.arange(rows), last)[:, None]
    fields = tuple(Field(key, values.dtype.name, values.shape[1:], role_of(key)) for key, values in columns.items())
    whole = [True] * len(lengths)
    held = {key: BlockColumn(values.dtype.name, values) for key, values in columns.items()}
    return fields, Block(held, Pieces.of(range(len(lengths)), lengths, whole, whole), 0)


class OperationTests(ABC):
    """The contract of `RowOperation`, on rows of four episodes."""

    @abstractmethod
    def operation(self) -> RowOperation:
        """Return the operation; every call must return an equal one."""

    def rows(self) -> tuple[tuple[Field, ...], Block]:
        """Return fields and rows for the operation, in whole episodes. Every call must return the same values."""
        return sample_block()

    def test_equal_arguments_make_an_equal_operation(self) -> None:
        assert self.operation() == self.operation()
        assert hash(self.operation()) == hash(self.operation())
        assert pickle.loads(pickle.dumps(self.operation())) == self.operation()

    def test_its_description_makes_an_equal_operation(self) -> None:
        operation, kind = self.operation(), type(self.operation())
        document = json.loads(json.dumps(operation.describe()))
        assert operation_of(document, "the description", kind) == operation
        [table] = tomllib.loads(pipeline_text(Program((operation,))))["operation"]
        assert operation_of(table, "the pipeline", kind) == operation

    def test_the_result_has_the_declared_fields(self) -> None:
        processor = self._processor()
        result = self._applied(processor, self._read(processor))
        declared = {field.key: (field.dtype, field.shape) for field in processor.fields}
        assert {key: (column.dtype, column.values.shape[1:]) for key, column in result.columns.items()} == declared
        assert {len(column.values) for column in result.columns.values()} == {result.rows}

    def test_the_result_is_deterministic(self) -> None:
        processor = self._processor()
        first = self._applied(processor, self._read(processor))
        _require_equal(self._applied(processor, self._read(processor)), first)
        other = self._processor()
        _require_equal(self._applied(other, self._read(other)), first)

    def test_the_given_rows_are_unchanged(self) -> None:
        processor = self._processor()
        given = self._read(processor)
        self._applied(processor, given)
        _require_equal(given, self._read(processor))

    def test_a_pickled_program_gives_the_same_rows(self) -> None:
        processor = self._processor()
        copied = pickle.loads(pickle.dumps(processor))
        given = self._read(processor)
        _require_equal(self._applied(copied, given), self._applied(processor, given))

    def test_rows_stay_unless_it_drops_rows(self) -> None:
        processor = self._processor()
        given = self._read(processor)
        result = self._applied(processor, given)
        if processor.keeps_rows():
            assert result.pieces.rows.tolist() == given.pieces.rows.tolist()
        else:
            assert result.rows <= given.rows

    def test_end_flags_mark_where_episodes_end(self) -> None:
        processor = self._processor()
        given = self._read(processor)
        result = self._applied(processor, given)
        for key in ((NEXT, "done"), (NEXT, "terminated"), (NEXT, "truncated")):
            if processor.keeps_rows() and key in given.columns:
                assert np.array_equal(result.columns[key].values, given.columns[key].values), key_name(key)
        pieces = result.pieces
        last = (pieces.starts + pieces.rows - 1)[pieces.ends & (pieces.rows > 0)]
        assert result.columns[NEXT, "done"].values[last].all()

    def test_episodes_do_not_depend_on_each_other(self) -> None:
        processor = self._processor()
        given = self._read(processor)
        ends = np.cumsum(given.pieces.rows)[:-1].tolist()
        _require_equal_parts(self._cut(processor, given, ends), self._applied(processor, given))

    def test_the_result_does_not_depend_on_blocks(self) -> None:
        processor = self._processor()
        if processor.whole_episodes:
            return
        given = self._read(processor)
        whole = self._applied(processor, given)
        for size in (1, 3):
            _require_equal_parts(self._cut(processor, given, range(size, given.rows, size)), whole)

    def test_each_field_is_computed_from_its_inputs_alone(self) -> None:
        fields, block = self.rows()
        processor = self._processor()
        assert isinstance(processor, ProgramProcessor)
        result = self._applied(processor, self._read(processor))
        [operation] = processor.program.on_rows
        bound = operation.bind(Fields.of(fields))
        for key in result.columns:
            given = _reading(block, bound.needs(frozenset([key])))
            batch = LazyBatch.of(given, {read: key_name(read) for read in given.columns})
            bound.apply(batch, frozenset([key]))
            found = batch.columns[key].values
            np.testing.assert_array_equal(found, result.columns[key].values, err_msg=key_name(key))

    def _processor(self) -> Processor:
        fields, block = self.rows()
        processor: Processor = ProgramProcessor(Program((self.operation(),)), fields)
        if processor.needs_measuring:
            measured = processor.load(self._context()).measure(_reading(block, processor.reads(fields)))
            processor = processor.with_measurements([measured])
        return processor

    def _read(self, processor: Processor) -> Block:
        fields, block = self.rows()
        return _reading(block, processor.reads(fields))

    def _context(self) -> Context:
        return Context(self.rows()[0], EpisodeTable.from_rows([]), 0)

    def _applied(self, processor: Processor, block: Block) -> Block:
        return processor.load(self._context()).apply(block)

    def _cut(self, processor: Processor, block: Block, places: Sequence[int]) -> list[Block]:
        edges = [0, *places, block.rows]
        return [self._applied(processor, _part(block, a, b)) for a, b in pairwise(edges)]


def _reading(block: Block, keys: frozenset[Key]) -> Block:
    """Return a copy of a block with only these columns."""
    columns = {key: BlockColumn(c.dtype, c.values.copy()) for key, c in block.columns.items() if key in keys}
    return Block(columns, block.pieces, block.first)


def _part(block: Block, start: int, stop: int) -> Block:
    """Return rows `[start, stop)` of a block, with the parts of episodes among them."""
    runs = []
    pieces = block.pieces
    for episode, first, rows in zip(pieces.episode, pieces.starts, pieces.rows, strict=True):
        low, high = max(first, start), min(first + rows, stop)
        if low < high:
            runs.append((episode, high - low, low == first, high == first + rows))
    columns = {key: BlockColumn(c.dtype, c.values[start:stop].copy()) for key, c in block.columns.items()}
    return Block(columns, Pieces.of(*zip(*runs, strict=True)), block.first + start)


def _values(blocks: Sequence[Block]) -> Mapping[Key, Array]:
    return {key: np.concatenate([block.columns[key].values for block in blocks]) for key in blocks[0].columns}


def _require_equal_parts(parts: Sequence[Block], whole: Block) -> None:
    """Fail unless the parts, joined in order, equal the whole, NaN included."""
    found, expected = _values(parts), _values([whole])
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key_name(key))
        assert found[key].dtype == values.dtype


def _require_equal(found: Block, expected: Block) -> None:
    _require_equal_parts([found], expected)
    assert found.pieces.rows.tolist() == expected.pieces.rows.tolist()
