"""Conversion of blocks to the tensordicts that functions take, and of what functions return to columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

from ...format import HIDDEN, Array
from ...storages.dataset import tensordict_of
from ...ted import DTYPES, Key, key_name, numpy_dtype
from ..block import BlockColumn
from ..failures import ResultRefused, counted

__all__ = [
    "ColumnBuffer",
    "Layout",
    "chunk_of",
    "columns_of",
    "require_layout",
    "row_of",
    "table_of",
    "tensor_of_column",
]

Layout: TypeAlias = Mapping[Key, tuple[str, tuple[int, ...]]]
"""Element type by name and shape of a single row, by key."""

# Names tensordict keeps for itself: leaves called so would vanish from the folder.
_RESERVED = frozenset({"shape", "device", "_type"})
_TAKEN_FOLDERS = frozenset({"meta.json", "env_metadata.json", HIDDEN})


def chunk_of(columns: Mapping[Key, BlockColumn], rows: int) -> TensorDictBase:
    """Make the tensordict of batch size `[rows]`; its tensors share the arrays' memory."""
    return tensordict_of({key: tensor_of_column(column) for key, column in columns.items()}, (rows,))


def tensor_of_column(column: BlockColumn) -> torch.Tensor:
    """View a column as a tensor of its element type, `[rows, *shape]`."""
    tensor = torch.from_numpy(column.values)
    return tensor.view(torch.bfloat16) if column.dtype == "bfloat16" else tensor


def columns_of(result: Any, rows: int) -> dict[Key, BlockColumn]:
    """Take what a function returned for `rows` steps apart into columns of as many rows.

    Tensors may be views of the input, expanded, on another device, or part of a graph. ResultRefused for anything
    that is not a nest of tensors with `rows` rows each.
    """
    columns = _columns(result, f"a tensordict of {counted(rows, 'row')}")
    for key, (_, values) in columns.items():
        if not values.shape or len(values) != rows:
            raise ResultRefused(
                f"it returned {_length(values)} of {key_name(key)!r} for {counted(rows, 'step')}; as many are expected"
            )
    if not columns:
        raise ResultRefused("it returned no tensors")
    return columns


def table_of(result: Any) -> tuple[dict[Key, BlockColumn], int]:
    """Take what a function returned apart into columns of some number of rows, and return that number too.

    A tensordict of batch size `[0]` may be without keys. ResultRefused as for `columns_of`, and where tensors do not
    agree about the number.
    """
    columns = _columns(result, "a tensordict of some rows")
    batch = tuple(result.batch_size) if is_tensor_collection(result) else ()
    if not columns and batch[:1] != (0,):
        raise ResultRefused("it returned no tensors")
    first, (_, values) = next(iter(columns.items()), ((), BlockColumn("", np.empty(batch))))
    rows = batch[0] if batch else len(values) if values.shape else -1
    for key, (_, values) in columns.items():
        if not values.shape:
            raise ResultRefused(f"it returned no rows of {key_name(key)!r}; all tensors have a row for each step")
        if len(values) != rows:
            raise ResultRefused(
                f"it returned {counted(rows, 'row')} of {key_name(first)!r} and {len(values):,} of {key_name(key)!r}; "
                "all must have the same number"
            )
    return columns, rows


def row_of(result: Any) -> dict[Key, BlockColumn]:
    """Take what a function returned for a single step apart: each column is that one value, `[*shape]`.

    ResultRefused for anything that is not a nest of tensors, and for a tensordict of more than one step.
    """
    columns = _columns(result, "a tensordict of one step")
    if is_tensor_collection(result) and tuple(result.batch_size):
        raise ResultRefused(
            f"it returned a tensordict of batch size {list(result.batch_size)}; exactly one step, [], is expected"
        )
    if not columns:
        raise ResultRefused("it returned no tensors")
    return columns


def require_layout(found: Layout, expected: Layout, others: str) -> None:
    """Require the keys, element types and shapes of a single row that `others` had, or raise ResultRefused."""
    for text, keys in (("lacks", expected.keys() - found.keys()), ("has besides", found.keys() - expected.keys())):
        if keys:
            names = ", ".join(sorted(map(key_name, keys)))
            raise ResultRefused(f"the result {text} {names}; it must have the keys of {others}")
    for key, (dtype, shape) in found.items():
        if (dtype, shape) != expected[key]:
            before, size = expected[key]
            raise ResultRefused(
                f"{key_name(key)!r} came out as {dtype} {list(shape)}, where {others} had {before} {list(size)}"
            )


def _columns(result: Any, expected: str) -> dict[Key, BlockColumn]:
    if not _is_nest(result):
        returned = "None" if result is None else type(result).__name__
        raise ResultRefused(f"it returned {returned}; {expected} is expected")
    return {key: _column_of(value, key) for key, value in _leaves(result, ())}


def _length(values: Array) -> str:
    return counted(len(values), "row") if values.shape else "no rows"


def _is_nest(value: Any) -> bool:
    return (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value)


def _leaves(nest: Any, prefix: Key) -> Iterator[tuple[Key, Any]]:
    for part, value in nest.items():
        if not isinstance(part, str):
            raise ResultRefused(f"it returned the key {part!r} of type {type(part).__name__}; keys are strings")
        if part in _RESERVED:
            raise ResultRefused(
                f"it returned the key {part!r}, which tensordict keeps for itself; call it {part + '_'!r}"
            )
        if not _is_nest(value):
            yield (*prefix, part), value
        elif part in _TAKEN_FOLDERS:
            raise ResultRefused(f"it returned the nested key {part!r}, whose place in the folder is taken")
        else:
            yield from _leaves(value, (*prefix, part))


def _column_of(value: Any, key: Key) -> BlockColumn:
    """Element type and bytes of one leaf, in memory of its own or a view that is contiguous."""
    if isinstance(value, np.ndarray):
        name = value.dtype.newbyteorder("=").name
        _known(name, str(value.dtype), key)
        return BlockColumn(name, np.ascontiguousarray(value, numpy_dtype(name)).reshape(value.shape))
    if not isinstance(value, torch.Tensor):
        raise ResultRefused(f"it returned {type(value).__name__} under {key_name(key)!r}; a tensor is expected")
    if value.is_nested or value.layout is not torch.strided:
        raise ResultRefused(f"it returned a nested or sparse tensor under {key_name(key)!r}; a dense one is expected")
    if value.device.type == "meta":
        raise ResultRefused(f"it returned a tensor without data (on meta) under {key_name(key)!r}")
    name = str(value.dtype).removeprefix("torch.")
    _known(name, str(value.dtype), key)
    tensor = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    return BlockColumn(name, (tensor.view(torch.uint16) if name == "bfloat16" else tensor).numpy())


def _known(name: str, found: str, key: Key) -> None:
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ResultRefused(f"it returned {key_name(key)!r} as {found}, which cannot be stored; known are {known}")


class ColumnBuffer:
    """Rows of some leaves, copied as they come. The first that are added decide keys, element types and shapes."""

    def __init__(self, expected: int) -> None:
        self._room = max(expected, 1)
        self._rows = 0
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._empty: Mapping[Key, BlockColumn] = {}

    def nothing(self, columns: Mapping[Key, BlockColumn]) -> None:
        """Add no rows; these columns are what comes out if no others ever do, and need not be like any others."""
        self._empty = self._empty or columns

    def add(self, columns: Mapping[Key, BlockColumn], rows: int) -> None:
        """Add rows; ResultRefused unless they are like those before."""
        layout = {key: (dtype, values.shape[1:]) for key, (dtype, values) in columns.items()}
        if not self._layout:
            self._layout = layout
            self._arrays = {key: self._empty_array(key) for key in layout}
        require_layout(layout, self._layout, "the first episode")
        self._make_room(self._rows + rows)
        for key, (_, values) in columns.items():
            self._arrays[key][self._rows : self._rows + rows] = values
        self._rows += rows

    def columns(self) -> dict[Key, BlockColumn]:
        """All rows."""
        if not self._rows:
            return dict(self._empty)
        return {key: BlockColumn(self._layout[key][0], array[: self._rows]) for key, array in self._arrays.items()}

    def _empty_array(self, key: Key) -> Array:
        dtype, shape = self._layout[key]
        return np.empty((self._room, *shape), numpy_dtype(dtype))

    def _make_room(self, rows: int) -> None:
        if rows <= self._room:
            return
        self._room = max(rows, self._room + self._room // 2)
        for key, array in self._arrays.items():
            self._arrays[key] = self._empty_array(key)
            self._arrays[key][: self._rows] = array[: self._rows]
