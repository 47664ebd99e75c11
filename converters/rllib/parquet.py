"""RLlib's Parquet files: a transition a row, or an episode in msgpack a row.

Ray keeps tensors in lists, with the shape of a row in the metadata of the field, and what Arrow has no type for, such
as the dictionaries of an observation, as a pickle a row.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, RbtoolError
from ...core.format.contracts import Closing
from ...core.format.digest import open_regular
from ..files.arrow import require_bounded_parquet
from .blocks import (
    INFOS,
    MARKS,
    REQUIRED,
    TIME_LIMIT,
    ColumnPath,
    RowBlock,
    Unpacker,
    add_array,
    add_empty,
    add_values,
    joined,
)
from .packed_episodes import ITEM, episode_block, looks_like_episode

_MOST_ROWS = 4096
_BLOCK_BYTES = 4 << 20
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)

_TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_RAGGED = "ray.data.arrow_variable_shaped_tensor"
_OBJECTS = "ray.data.arrow_pickled_object"
"""Arrow extensions of Ray; pyarrow alone reads them as the types that they are stored with."""
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def looks_like_parquet(path: Path) -> bool:
    """Return whether a Parquet file has RLlib's columns; raises what pyarrow raises."""
    with os.fdopen(open_regular(path), "rb") as file:
        if file.read(4) != b"PAR1":
            return False
        schema = pq.read_schema(file)
        names = set(schema.names)
        if names == {ITEM}:
            return _has_episodes(schema, file)
    return names >= set(REQUIRED) and bool(names & set(MARKS))


def _has_episodes(schema: Any, file: IO[bytes]) -> bool:
    if not _is_binary(schema.field(ITEM).type):
        return False
    for batch in pq.ParquetFile(file).iter_batches(batch_size=1, use_threads=False):
        if batch.num_rows:
            return looks_like_episode(batch.column(0)[0].as_py() or b"")
    return False


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


class ParquetRows(Closing):
    """One Parquet file. A place is a row group, the first row in it, and the number of rows there.

    Rows of a group that cannot be read are left out, with those after them there; `damage` has the errors by groups.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        require_bounded_parquet(path)
        self.path = path
        self._unpacker = Unpacker(path, trusted=trusted)
        self._opened = os.fdopen(open_regular(path), "rb")
        self._group, self._row = -1, 0
        self._batches: Iterator[Any] = iter(())
        self.damage: dict[int, CorruptDataError] = {}
        self.part = "row group"
        self._rows = _MOST_ROWS
        try:
            self._file = pq.ParquetFile(self._opened, buffer_size=1 << 20, pre_buffer=False)
            self._has_episodes = self._file.schema_arrow.names == [ITEM]
            with contextlib.suppress(OSError, ValueError):  # damage, which is named where it is read
                for first in self._file.iter_batches(batch_size=1, use_threads=False):
                    self._rows = min(_MOST_ROWS, max(1, _BLOCK_BYTES // max(1, first.nbytes)))
                    break
        except BaseException:
            self._opened.close()
            raise

    def blocks(self) -> Iterator[tuple[tuple[int, int, int], RowBlock]]:
        """Yield the rows in blocks with their places."""
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            for start in range(0, rows, self._rows):
                place = group, start, min(self._rows, rows - start)
                try:
                    block = self.block(place)
                except (OSError, ValueError) as error:
                    if isinstance(error, RbtoolError) and not isinstance(error, CorruptDataError):
                        raise
                    self._group = -1
                    self.damage[group] = _damaged(self.path, group, start, error)
                    break
                if self.damage:  # rows after damage do not follow those before
                    block.batches = np.full(block.rows, -len(self.damage), np.int64)
                if block.rows:
                    yield place, block

    def block(self, place: tuple[int, int, int]) -> RowBlock:
        """Read the rows at a place."""
        group, start, rows = place
        if self._group != group or self._row > start:
            self._batches = self._file.iter_batches(batch_size=self._rows, row_groups=[group], use_threads=False)
            self._group, self._row = group, 0
        parts: list[Any] = []
        found = 0
        while found < rows:
            batch = next(self._batches, None)
            if batch is None:
                raise CorruptDataError(f"{self.path}: row group {group} ends before its row {start + rows:,}")
            first, self._row = self._row, self._row + batch.num_rows
            part = batch.slice(max(0, start - first), max(0, min(self._row, start + rows) - max(start, first)))
            if part.num_rows:
                parts.append(part)
                found += part.num_rows
        table = pa.Table.from_batches(parts).combine_chunks()
        if not self._has_episodes:
            return _block_of(table, self._unpacker)
        episodes = [
            episode_block(data or b"", self._unpacker, f"{self.path}: row {row:,} of row group {group}")
            for row, data in enumerate(table.column(ITEM).to_pylist(), start)
        ]
        steps = [episode for episode in episodes if episode.rows]
        return joined(steps) if steps else RowBlock(0)

    def close(self) -> None:
        self._opened.close()
        self._unpacker.close()


def _damaged(path: Path, group: int, start: int, error: Exception) -> CorruptDataError:
    if isinstance(error, CorruptDataError):
        return error
    reason = " ".join(str(error).split())[:200]
    return CorruptDataError(
        f"{path}: rows from {start:,} of row group {group} on cannot be read, it is damaged: {reason}"
    )


def _block_of(table: Any, unpacker: Unpacker) -> RowBlock:
    block = RowBlock(table.num_rows)
    for name in dict.fromkeys(table.column_names):
        if table.column_names.count(name) > 1:
            block.odd[(name,)] = "it is there twice"
        else:
            _add_extended(table.schema.field(name), pa.concat_arrays(table.column(name).chunks), block, unpacker)
    return block


def _add_extended(field: Any, values: Any, block: RowBlock, unpacker: Unpacker) -> None:
    """Add one column, which may be of an extension of Ray."""
    path, stated = (field.name,), field.metadata or {}
    name, about = stated.get(b"ARROW:extension:name", b"").decode(), stated.get(b"ARROW:extension:metadata", b"")
    if isinstance(values.type, pa.BaseExtensionType):  # in a process that has imported Ray
        name, about = values.type.extension_name, values.type.__arrow_ext_serialize__()
        values = values.storage
    if name in _TENSORS and not values.null_count:
        before = len(block.columns)
        _add(path, values, block, unpacker)
        if len(block.columns) > before:
            _shape(path, _stated_shape(about, unpacker), block)
    elif name == _RAGGED:
        block.odd[path] = "its rows have different shapes"
    elif name == _OBJECTS and not values.null_count:
        add_values(path, [unpacker.unpickled(one.as_py()) for one in values], block, unpacker)
    else:
        _add(path, values, block, unpacker)


def _stated_shape(stated: bytes, unpacker: Unpacker) -> Any:
    """Return the shape of the rows of a tensor, which is JSON, or a pickle of older versions of Ray."""
    try:
        return json.loads(stated)
    except ValueError:
        found = unpacker.unpickled(stated)
        return list(found.values()) if isinstance(found, dict) else found


def _shape(path: ColumnPath, shape: Any, block: RowBlock) -> None:
    """Give the rows of a tensor their shape, which is stored apart from them."""
    rows = block.columns[path]
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        del block.columns[path]
        block.odd[path] = "the shape of its rows is not stated"
    elif math.prod(shape) != math.prod(rows.shape[1:]):
        raise CorruptDataError(f"{'.'.join(path)!r} has rows of {math.prod(rows.shape[1:]):,} numbers, not {shape}")
    else:
        block.columns[path] = rows.reshape(block.rows, *shape)


def _add(path: ColumnPath, values: Any, block: RowBlock, unpacker: Unpacker) -> None:
    """Add one column; fields of structs are columns of their own, and rows of lists have one shape."""
    values.validate()
    kind = values.type
    if path == (INFOS, TIME_LIMIT) and pa.types.is_boolean(kind):
        block.limits = values.fill_null(False).to_numpy(zero_copy_only=False)
    elif values.null_count == len(values) and not pa.types.is_floating(kind):
        add_empty(path, block)
    elif values.null_count and not pa.types.is_floating(kind):
        block.odd[path] = "it has no value in some rows"
    elif pa.types.is_struct(kind):
        parts = values.flatten()
        for number, field in enumerate(kind):
            _add((*path, field.name), parts[number], block, unpacker)
        if not kind.num_fields:
            block.odd[path] = "it is empty"
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        add_values(path, values.to_pylist(), block, unpacker)
    else:
        _add_numbers(path, values, block)


def _add_numbers(path: ColumnPath, values: Any, block: RowBlock) -> None:
    shape: list[int] = []
    while any(test(values.type) for test in _LISTS):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            block.odd[path] = "its rows have different shapes"
            return
        shape.append(int(lengths[0]))
        values = values.flatten()
    if not any(test(values.type) for test in _NUMBERS):
        block.odd[path] = f"its values are {values.type}, which are no numbers"
    elif values.null_count and not pa.types.is_floating(values.type):
        block.odd[path] = "it has no value in some rows"
    else:
        array = values.to_numpy(zero_copy_only=False)
        add_array(path, np.ascontiguousarray(array).reshape(block.rows, *shape), block)
