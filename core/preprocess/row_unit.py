"""Calls a function with one row at a time, or with all rows of a block through vmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from ..ted import Key
from .block import Block, Column, Pieces
from .calls import UserFunction
from .failures import FunctionFailed, ResultRefused
from .row_results import RowResults
from .seeds import RandomState, mixed, sow
from .tensors import chunk_of, columns_of, tensor_of_column
from .work import Started

__all__ = ["RowUnit"]

# The leaves of some rows: by name a tensor for each row, or such a nest again.
_Rows: TypeAlias = "dict[str, tuple[torch.Tensor, ...] | _Rows]"

_FIRST, _MOST = 8, 256
_PROBED = 8
_NO_BATCH = torch.Size([])


class RowUnit(Started):
    """Unit `row`: one row of batch size `[]` in, one out.

    Row by row, random numbers are seeded by the number of the row, so that they do not depend on blocks; under vmap,
    which draws for all rows at once, by that of the first. A function that draws none is not made to wait for the
    seeding of three generators: some rows are tried without, and done again with it if that touched a generator.
    """

    def __init__(self, function: UserFunction, seed: int, vmap: bool | None) -> None:
        self._function = function
        self._seed = seed
        self._vmap = bool(vmap)
        self._draws = False

    def apply(self, block: Block) -> Block:
        """Return as many rows as given, which stay in their episodes."""
        with self._function.running():
            columns = self._at_once(block, block.first) if self._vmap else self._one_by_one(block)
        return Block(columns, block.pieces, block.first)

    def probe(self, block: Block) -> bool:
        """Tell whether vmap can be used: whether some rows come out alike with it and without."""
        if not block.rows:
            return False
        try:
            with self._function.running():
                # Other random numbers than the loop takes: a function that draws any must not come out alike.
                at_once = self._at_once(_sample(block), ~block.first)
                return _alike(at_once, self._one_by_one(_sample(block)))
        except (FunctionFailed, ResultRefused):
            return False  # if it fails without vmap too, the run itself says so, and where

    def _at_once(self, block: Block, number: int) -> dict[Key, Column]:
        sow(mixed(self._seed, number))
        steps = (block.first, block.first + block.rows)
        result = self._function.vmapped()(chunk_of(block.columns, block.rows), steps)
        if is_tensor_collection(result) and len(result.batch_size) != 1:
            found = list(result.batch_size[1:])
            raise ResultRefused(f"it returned a tensordict of batch size {found}; exactly one step, [], is expected")
        return columns_of(result, block.rows)

    def _one_by_one(self, block: Block) -> dict[Key, Column]:
        results = RowResults(block.rows)
        start, size = 0, _FIRST
        while start < block.rows:
            stop = min(start + size, block.rows)
            results.begin(start, stop)
            self._stretch(_taken(block, slice(start, stop), block.first + start), results)
            start, size = stop, min(2 * size, _MOST)
        return results.columns()

    def _stretch(self, block: Block, results: RowResults) -> None:
        if not self._draws:
            again = _taken(block, np.arange(block.rows), block.first)
            before = RandomState()
            refused: FunctionFailed | ResultRefused | None = None
            try:
                self._call(block, results)
            except (FunctionFailed, ResultRefused) as error:
                refused = error
            self._draws = before.changed()
            if not self._draws:
                if refused is not None:
                    raise refused
                return
            block = again
            results.forget_first()
        self._call(block, results)

    def _call(self, block: Block, results: RowResults) -> None:
        """Call the function with each row of a stretch."""
        rows = _unbound(block)
        for place in range(block.rows):
            number = block.first + place
            if self._draws:
                sow(mixed(self._seed, number))
            result = self._function(_row(rows, place), (number, number + 1))
            try:
                results.put(place, result)
            except ResultRefused as error:
                error.steps = (number, number + 1)
                raise


def _taken(block: Block, rows: Any, first: int) -> Block:
    """Some rows of a block as if they were one run; a view for a slice, a copy for row numbers."""
    columns = {key: Column(dtype, values[rows]) for key, (dtype, values) in block.columns.items()}
    count = len(range(block.rows)[rows]) if isinstance(rows, slice) else len(rows)
    return Block(columns, Pieces.of([0], [count], [True], [True]), first)


def _sample(block: Block) -> Block:
    """A few rows from all over a block, copied."""
    return _taken(block, np.linspace(0, block.rows - 1, min(_PROBED, block.rows)).astype(np.int64), block.first)


def _unbound(block: Block) -> _Rows:
    """Nest the tensors of all rows by their keys."""
    nest: _Rows = {}
    for (*folders, name), column in block.columns.items():
        inner: Any = nest
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[name] = tensor_of_column(column).unbind(0)
    return nest


def _row(rows: _Rows, place: int) -> TensorDict:
    """One row of a nest as a tensordict of batch size `[]`, without the checks that take longer than all the rest."""
    entries: dict[Any, Any] = {
        name: inner[place] if isinstance(inner, tuple) else _row(inner, place) for name, inner in rows.items()
    }
    tensordict: TensorDict = TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
    return tensordict


def _alike(one: Mapping[Key, Column], other: Mapping[Key, Column]) -> bool:
    """Tell whether two results agree in keys, element types, shapes and, to rounding, values."""
    if one.keys() != other.keys():
        return False
    try:
        for key in one:
            torch.testing.assert_close(
                tensor_of_column(one[key]), tensor_of_column(other[key]), rtol=None, atol=None, equal_nan=True
            )
    except AssertionError:
        return False
    return True
