"""Unit `row`: a function of one row, called row by row or on all rows of a block under `torch.vmap`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from ...format.contracts import Array
from ...ted.schema import Key, numpy_dtype
from ..failures import FunctionFailed, ResultRefused
from ..processor import Block, BlockColumn, LoadedProcessor, Pieces
from .user_function import (
    Layout,
    RandomState,
    UserFunction,
    chunk_of,
    columns_of,
    mixed_seed,
    require_layout,
    row_of,
    seed_generators,
    tensor_of_column,
)

_NO_BATCH = torch.Size([])


@dataclass(slots=True)
class _RowLeaf:
    """The destination of one leaf, and the tensors that can be copied there without conversion."""

    key: Key
    dtype: torch.dtype
    shape: torch.Size
    rows: tuple[torch.Tensor, ...] = ()

    def takes(self, value: Any) -> bool:
        """Whether a value is a plain tensor of the expected type and shape."""
        return (
            type(value) is torch.Tensor
            and value.dtype is self.dtype
            and value.layout is torch.strided
            and value.is_cpu
            and not value.requires_grad
            and not value.is_nested
            and value.shape == self.shape
        )


# The entries of a nest in the order in which the first row had them.
_Plan: TypeAlias = "tuple[tuple[str, _RowLeaf | _Plan], ...]"


class RowResults:
    """The results of `rows` rows, each copied at once: the function may reuse its memory for the next one.

    The first row decides keys, element types and shapes. `put` counts rows within the last stretch of `start`.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stretch = (0, rows)
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._leaves: list[_RowLeaf] = []
        self._plan: _Plan = ()

    def forget_first(self) -> None:
        """Let the first row decide again if it is in this stretch."""
        if not self._stretch[0]:
            self._layout, self._arrays, self._leaves, self._plan = {}, {}, [], ()

    def start(self, start: int, stop: int) -> None:
        """Select the rows `[start, stop)`, a few hundred at most, for the next calls of `put`."""
        self._stretch = (start, stop)
        for leaf in self._leaves:
            leaf.rows = self._tensor(leaf.key)[start:stop].unbind(0)

    def put(self, place: int, result: Any) -> None:
        """Copy the result for the row `place` of the stretch; ResultRefused unless it is one row like the first."""
        if self._layout and self._put_at_once(place, result):
            return
        columns = row_of(result)
        layout = {key: (column.dtype, column.values.shape) for key, column in columns.items()}
        if not self._layout:
            self._decide(layout, result)
        require_layout(layout, self._layout, "the first row")
        for key, column in columns.items():
            self._arrays[key][self._stretch[0] + place] = column.values

    def columns(self) -> dict[Key, BlockColumn]:
        """The columns of all rows, after the last `put`."""
        return {key: BlockColumn(self._layout[key][0], array) for key, array in self._arrays.items()}

    def _put_at_once(self, place: int, result: Any) -> bool:
        if type(result) is TensorDict and result.batch_size != _NO_BATCH:
            return False
        try:
            return _copied(result, self._plan, place)
        except (ValueError, RuntimeError):  # another number of entries, or a tensor that has no shape
            return False

    def _decide(self, layout: Layout, result: Any) -> None:
        self._layout = layout
        self._arrays = {
            key: np.zeros((self._rows, *shape), numpy_dtype(dtype)) for key, (dtype, shape) in layout.items()
        }
        self._plan = self._planned(result, ())
        self.start(*self._stretch)

    def _planned(self, nest: Any, prefix: Key) -> _Plan:
        return tuple((part, self._leaf_or_plan(value, (*prefix, part))) for part, value in nest.items())

    def _leaf_or_plan(self, value: Any, key: Key) -> _RowLeaf | _Plan:
        if key not in self._layout:
            return self._planned(value, key)
        tensor = self._tensor(key)
        leaf = _RowLeaf(key, tensor.dtype, tensor.shape[1:])
        self._leaves.append(leaf)
        return leaf

    def _tensor(self, key: Key) -> torch.Tensor:
        return tensor_of_column(BlockColumn(self._layout[key][0], self._arrays[key]))


def _copied(nest: Any, plan: _Plan, place: int) -> bool:
    """Copy a nest with the planned entries; return whether it has them."""
    if type(nest) is not TensorDict and type(nest) is not dict:
        return False
    entries: Mapping[str, Any] = nest
    for (part, value), (name, inner) in zip(entries.items(), plan, strict=True):
        if part != name:
            return False
        if not isinstance(inner, _RowLeaf):
            if not _copied(value, inner, place):
                return False
        elif inner.takes(value):
            inner.rows[place].copy_(value)
        else:
            return False
    return True


# The leaves of some rows: by name a tensor for each row, or such a nest again.
_Rows: TypeAlias = "dict[str, tuple[torch.Tensor, ...] | _Rows]"

_FIRST, _MOST = 8, 256
_PROBED = 8


class RowUnit(LoadedProcessor):
    """Unit `row`: one row of batch size `[]` in, one out.

    Row by row, generators are seeded by the number of the row, so that random numbers do not depend on blocks; under
    vmap, which draws for all rows at once, by that of the first. Seeding takes time that a function without random
    numbers need not spend: a stretch of rows runs without it, and again with it if that has changed a generator.
    """

    def __init__(self, function: UserFunction, seed: int, vmap: bool | None) -> None:
        self._function = function
        self._seed = seed
        self._vmap = bool(vmap)
        self._draws = False

    def apply(self, block: Block) -> Block:
        """Return one row for each row of the block; episodes stay the same."""
        with self._function.running():
            columns = self._at_once(block, block.first) if self._vmap else self._one_by_one(block)
        return Block(columns, block.pieces, block.first)

    def probe(self, block: Block) -> bool:
        """Whether vmap can be used: whether some rows have equal results with and without it."""
        if not block.rows:
            return False
        try:
            with self._function.running():
                # Another seed than that of the loop: the results of a function with random numbers must differ.
                at_once = self._at_once(_sample(block), ~block.first)
                return _alike(at_once, self._one_by_one(_sample(block)))
        except (FunctionFailed, ResultRefused):
            return False  # if it fails without vmap too, the run reports that

    def _at_once(self, block: Block, number: int) -> dict[Key, BlockColumn]:
        seed_generators(mixed_seed(self._seed, number))
        steps = (block.first, block.first + block.rows)
        result = self._function.vmapped()(chunk_of(block.columns, block.rows), steps)
        if is_tensor_collection(result) and len(result.batch_size) != 1:
            found = list(result.batch_size[1:])
            raise ResultRefused(f"it returned a tensordict of batch size {found}, expected exactly one step, []")
        return columns_of(result, block.rows)

    def _one_by_one(self, block: Block) -> dict[Key, BlockColumn]:
        results = RowResults(block.rows)
        start, size = 0, _FIRST
        while start < block.rows:
            stop = min(start + size, block.rows)
            results.start(start, stop)
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
                seed_generators(mixed_seed(self._seed, number))
            result = self._function(_row(rows, place), (number, number + 1))
            try:
                results.put(place, result)
            except ResultRefused as error:
                error.steps = (number, number + 1)
                raise


def _taken(block: Block, rows: Any, first: int) -> Block:
    """Some rows of a block as a single run; views for a slice, copies for row numbers."""
    columns = {key: BlockColumn(dtype, values[rows]) for key, (dtype, values) in block.columns.items()}
    count = len(range(block.rows)[rows]) if isinstance(rows, slice) else len(rows)
    return Block(columns, Pieces.of([0], [count], [True], [True]), first)


def _sample(block: Block) -> Block:
    """Copies of a few evenly spaced rows of a block."""
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
    """One row of a nest as a tensordict of batch size `[]`; `_new_unsafe` because checks take most of the time."""
    entries: dict[Any, Any] = {
        name: inner[place] if isinstance(inner, tuple) else _row(inner, place) for name, inner in rows.items()
    }
    tensordict: TensorDict = TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
    return tensordict


def _alike(one: Mapping[Key, BlockColumn], other: Mapping[Key, BlockColumn]) -> bool:
    """Whether two results agree in keys, element types, shapes and, up to rounding, values."""
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
