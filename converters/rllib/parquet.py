"""RLlib's Parquet files: a transition in each row, or an episode in msgpack.

Ray keeps tensors in lists, with the shape of a row in the metadata of the field, and what Arrow has no type for, such
as the dictionaries of an observation, as a pickle in each row.

In msgpack, the default form of RLlib's `output` option, a value is an episode or a piece of one, and each is a map.
`observations`, `actions`, `rewards`, `infos` and the outputs of the model are maps, too: their `data` has a value for
each step, and one more of observations and infos, the first of which is from the reset. A piece that goes on with an
episode repeats the last `lookback` entries of the one before it at the start of each. Arrays are written as
msgpack-numpy does: maps with their element type, shape and bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Closing
from ...core.format.files import open_regular
from ...core.ted.schema import odd_truths
from ..files.arrow import require_bounded_parquet
from .blocks import (
    ACTIONS,
    EPS_ID,
    INFOS,
    MARKS,
    NEXT_OBS,
    OBS,
    REQUIRED,
    REWARDS,
    STEP,
    TERMINATEDS,
    TIME_LIMIT,
    TRUNCATEDS,
    ColumnPath,
    RowBlock,
    Unpacker,
    add_array,
    add_empty,
    add_values,
    joined,
    objects,
)

ITEM = "item"
"""The one column of a table of such episodes."""
_MARKS = (b"\xa3id_", b"\xacobservations", b"\xa9t_started")
"""Keys of an episode as msgpack writes them."""
_RESET_INFOS = "infos of the reset"


def looks_like_episode(data: bytes) -> bool:
    """Return whether bytes have the keys of an episode in msgpack; nothing is unpacked."""
    return all(mark in data for mark in _MARKS)


def episode_block(data: bytes, unpack: Unpacker, what: str) -> RowBlock:
    """Make the block of the steps of one episode, without those that it repeats of the piece before it.

    `what` names it in errors: FormatError for an episode of several agents and for pickles in it, CorruptDataError
    for damage. `infos` are those after each step; the infos of the reset are left out, and named where there are any.
    """
    found = _unpacked(data, what)
    if "agent_episodes" in found:
        raise FormatError(f"{what} is an episode of several agents, those of a single one can be read")
    start, stop = found.get("t_started"), found.get("t")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < 1 << 62:
        raise CorruptDataError(f"{what} does not state the times at which it starts and ends")
    block = RowBlock(steps := stop - start)
    states = _entries(found, "observations", steps + 1, what)
    for name, rows in (
        (OBS, _part(states, 0, steps)), (NEXT_OBS, _part(states, 1, steps + 1)),
        (ACTIONS, _entries(found, "actions", steps, what)), (REWARDS, _entries(found, "rewards", steps, what)),
    ):  # fmt: skip
        _add_decoded((name,), rows, block, unpack)
    if found.get("infos") is not None:
        infos = _entries(found, "infos", steps + 1, what)
        _add_decoded((INFOS,), _part(infos, 1, steps + 1), block, unpack)
        if not start and any(_part(infos, 0, 1)):
            block.odd[(_RESET_INFOS,)] = "they belong to no step"
    outputs = found.get("extra_model_outputs") or {}
    for name in outputs:
        _add_decoded((str(name),), _entries(outputs, name, steps, what), block, unpack)
    if found.get("custom_data"):
        block.odd[("custom_data",)] = "it belongs to episodes, and to no step"
    for name in ("agent_id", "module_id"):
        if found.get(name) is not None:
            block.text[(name,)] = objects([str(found[name])] * steps)
    block.text[(EPS_ID,)] = objects([str(found.get("id_"))] * steps)
    block.columns[(STEP,)] = np.arange(start, stop, dtype=np.int64)
    for name, flag in ((TERMINATEDS, "is_terminated"), (TRUNCATEDS, "is_truncated")):
        block.columns[(name,)] = np.arange(steps) == (steps - 1 if _is_set(found, flag, what) else -1)
    return block


def _unpacked(data: bytes, what: str) -> dict[Any, Any]:
    try:
        found = msgpack.unpackb(data, strict_map_key=False, object_hook=lambda value: _decoded(value, what))
    except RbtoolError:
        raise
    except (msgpack.UnpackException, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise CorruptDataError(f"{what} cannot be unpacked ({reason}): it was cut, or is damaged") from error
    if not isinstance(found, dict):
        raise CorruptDataError(f"{what} is no map of msgpack")
    return found


def _decoded(value: dict[Any, Any], what: str) -> Any:
    """Return the array or the number that a map of msgpack-numpy stands for; any other map itself."""
    if b"nd" not in value:
        return value
    if value.get(b"kind") == b"O":
        raise FormatError(f"{what} has an array of Python objects, which is a pickle: it is not unpacked")
    dtype = _number_type(value[b"type"])
    if dtype is None:
        raise FormatError(f"{what} has an array of type {str(value[b'type'])[:40]}, expected numbers")
    array = np.frombuffer(value[b"data"], dtype)
    if dtype.kind == "b" and odd_truths(array).any():
        raise CorruptDataError(f"{what} is damaged: a truth value in it is neither 0 nor 1")
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    return array.reshape(value[b"shape"]) if value[b"nd"] else array.reshape(())[()]


@functools.lru_cache(maxsize=64)
def _number_type(text: str) -> np.dtype[Any] | None:
    """The element type that a text names; None for one whose elements are no real numbers."""
    dtype = np.dtype(text)
    return dtype if dtype.kind in "biuf" else None


def _is_set(found: dict[Any, Any], name: str, what: str) -> bool:
    value = found.get(name)
    if not isinstance(value, bool | np.bool_):
        raise CorruptDataError(f"{what} does not state {name}")
    return bool(value)


def _entries(found: dict[Any, Any], name: Any, count: int, what: str) -> Any:
    """Return the entries of a part after those that it repeats: a list, or arrays with a row each."""
    part = found.get(name)
    if not isinstance(part, dict) or "data" not in part:
        raise CorruptDataError(f"{what} has no {name}")
    lookback, data = part.get("lookback", 0), part["data"]
    if part.get("finalized"):
        data = _by_index(data)
    lengths = set(_lengths(data))
    if type(lookback) is not int or lookback < 0 or lengths != {lookback + count}:
        stated = ", ".join(map(str, sorted(lengths))) or "no"
        raise CorruptDataError(
            f"{what} has {stated} {name}, of which {lookback} are repeated, and its times state {count}"
        )
    return _part(data, lookback, lookback + count)


def _by_index(data: Any) -> Any:
    """Return finalized data, whose arrays hold all entries, with the parts of tuples by their indices."""
    if isinstance(data, list):
        data = dict(enumerate(data))
    return {name: _by_index(part) for name, part in data.items()} if isinstance(data, dict) else data


def _lengths(data: Any) -> list[int]:
    if isinstance(data, dict):
        return [length for part in data.values() for length in _lengths(part)]
    return [len(data)] if isinstance(data, list) or (isinstance(data, np.ndarray) and data.ndim) else []


def _part(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, dict):
        return {name: _part(part, start, stop) for name, part in data.items()}
    return data[start:stop]


def _add_decoded(path: ColumnPath, rows: Any, block: RowBlock, unpack: Unpacker) -> None:
    if isinstance(rows, dict):
        for name, part in rows.items():
            _add_decoded((*path, str(name)), part, block, unpack)
    elif isinstance(rows, np.ndarray):
        add_array(path, rows.copy(), block)
    else:
        plain = rows if not rows or not isinstance(rows[0], dict | list) else [_named(row) for row in rows]
        add_values(path, plain, block, unpack)


def _named(value: Any) -> Any:
    """Return a value with the parts of tuples, which msgpack keeps as lists, by their indices."""
    if isinstance(value, list) and any(isinstance(part, np.ndarray | np.generic | dict) for part in value):
        value = dict(enumerate(value))
    return {str(name): _named(part) for name, part in value.items()} if isinstance(value, dict) else value


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
        _add_arrow(path, values, block, unpacker)
        if len(block.columns) > before:
            _shape(path, _stated_shape(about, unpacker), block)
    elif name == _RAGGED:
        block.odd[path] = "its rows have different shapes"
    elif name == _OBJECTS and not values.null_count:
        add_values(path, [unpacker.unpickled(one.as_py()) for one in values], block, unpacker)
    else:
        _add_arrow(path, values, block, unpacker)


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


def _add_arrow(path: ColumnPath, values: Any, block: RowBlock, unpacker: Unpacker) -> None:
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
            _add_arrow((*path, field.name), parts[number], block, unpacker)
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
