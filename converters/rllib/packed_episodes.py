"""RLlib's episodes in msgpack, the default form of its `output` option: an episode, or a piece of one, in a value.

An episode is a map. Each of `observations`, `actions`, `rewards`, `infos` and the outputs of the model is a map, too:
`data` has a value a step, and one more of observations and infos, of which the first is that of the reset. A piece that
goes on with an episode repeats the last `lookback` entries of the one before it at the start of each. Arrays are those
of msgpack-numpy: maps with their element type, shape and bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import msgpack
import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.ted.schema import odd_truths
from .blocks import (
    ACTIONS,
    EPS_ID,
    INFOS,
    NEXT_OBS,
    OBS,
    REWARDS,
    STEP,
    TERMINATEDS,
    TRUNCATEDS,
    ColumnPath,
    RowBlock,
    Unpacker,
    add_array,
    add_values,
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
        _add((name,), rows, block, unpack)
    if found.get("infos") is not None:
        infos = _entries(found, "infos", steps + 1, what)
        _add((INFOS,), _part(infos, 1, steps + 1), block, unpack)
        if not start and any(_part(infos, 0, 1)):
            block.odd[(_RESET_INFOS,)] = "they belong to no step"
    outputs = found.get("extra_model_outputs") or {}
    for name in outputs:
        _add((str(name),), _entries(outputs, name, steps, what), block, unpack)
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


def _add(path: ColumnPath, rows: Any, block: RowBlock, unpack: Unpacker) -> None:
    if isinstance(rows, dict):
        for name, part in rows.items():
            _add((*path, str(name)), part, block, unpack)
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
