"""Rows of RLlib's files in blocks: columns of numbers by their path, from values of JSON or from Arrow.

`obs` is the path `("obs",)`, a value `x` of dictionaries in `infos` is `("infos", "x")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError
from ...core.format.contracts import Array

ColumnPath: TypeAlias = tuple[str, ...]
Unpack: TypeAlias = Callable[[str], Array]
"""Returns the array that a compressed column holds."""
OBS, NEXT_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
EPS_ID, STEP, AGENTS = "eps_id", "t", ("agent_index", "agent_id")
DONES, TERMINATEDS, TRUNCATEDS = "dones", "terminateds", "truncateds"
INFOS, TIME_LIMIT = "infos", "TimeLimit.truncated"
"""The infos of steps, and the one that gym sets in the last step of an episode that reaches its time limit."""
REQUIRED = (OBS, ACTIONS, REWARDS)
MARKS = (EPS_ID, DONES, TERMINATEDS, NEXT_OBS)
"""Columns of which RLlib's files have at least one, in addition to the required ones."""
_PACKED = "BCJNG"
"""How an LZ4 frame begins in base64."""
_DEEPEST = 16
_PARTLY = "it is not in every row"


@dataclass
class RowBlock:
    """Consecutive rows: `columns` of numbers `[rows, *shape]`, `text` (objects `[rows]`), and why others are none.

    `limits` (bool `[rows]`) are the rows in which infos state that the time limit was reached, None where none do.
    `batches` (int64 `[rows]`) are the lines of the batches that hold the rows, 0 for transitions (all: None).
    """

    rows: int
    columns: dict[ColumnPath, Array] = field(default_factory=dict)
    text: dict[ColumnPath, Array] = field(default_factory=dict)
    odd: dict[ColumnPath, str] = field(default_factory=dict)
    limits: Array | None = None
    batches: Array | None = None


class BatchFile(Protocol):
    """A file of rows. `places` finds its blocks with the rows of each, `block` reads one again."""

    damage: dict[int, CorruptDataError]
    part: str
    """What has the numbers of `damage`."""

    def blocks(self) -> Iterator[tuple[Any, RowBlock]]:
        """Yield every block with the place at which `block` finds it."""

    def block(self, place: Any) -> RowBlock:
        """Read one block."""

    def close(self) -> None:
        """Close the file."""


def is_packed(value: Any) -> bool:
    """Return whether a value of JSON is a compressed column or row."""
    return isinstance(value, str) and value.startswith(_PACKED)


def batch_block(batch: dict[str, Any], unpack: Unpack, what: str, line: int) -> RowBlock:
    """Make a block of the SampleBatch in a line: each column is a list with a value a row, or compressed."""
    rewards = batch.get(REWARDS)
    if is_packed(rewards):
        rewards = unpack(rewards)  # type: ignore[arg-type]
    if rewards is None or isinstance(rewards, str | dict | int | float):
        raise CorruptDataError(f"{what}: a batch without a list of rewards")
    block = RowBlock(len(rewards), batches=np.full(len(rewards), line, np.int64))
    for name, value in batch.items():
        if name not in ("type", "count"):
            _add_column((name,), value, block, unpack)
    return block


def _add_column(path: ColumnPath, value: Any, block: RowBlock, unpack: Unpack) -> None:
    """Add one column of a batch; a dictionary is columns by name."""
    if isinstance(value, dict) and len(path) < _DEEPEST:
        for name, part in value.items():
            _add_column((*path, name), part, block, unpack)
        if not value:
            block.odd[path] = "it is empty"
    elif is_packed(value):
        add_array(path, unpack(value), block)
    elif not isinstance(value, list):
        block.odd[path] = "it is one value for many rows"
    elif len(value) != block.rows:
        block.odd[path] = f"it has {len(value):,} values for {block.rows:,} rows"
    else:
        add_values(path, value, block, unpack)


def row_block(rows: Sequence[dict[str, Any]], unpack: Unpack) -> RowBlock:
    """Make a block of transitions, each a dictionary."""
    block = RowBlock(len(rows))
    _add_dictionaries((), rows, block, unpack)
    return block


def add_values(path: ColumnPath, values: Sequence[Any], block: RowBlock, unpack: Unpack) -> None:
    """Add the values of one column, one a row."""
    if not values:
        return
    if len(path) < _DEEPEST and all(isinstance(value, dict) for value in values):
        _add_dictionaries(path, values, block, unpack)
        return
    if all(map(is_packed, values)):
        parts = [unpack(value) for value in values]
        same = len({(part.shape, part.dtype) for part in parts}) == 1
        add_array(path, np.stack(parts) if same else np.empty(0, object), block)
        return
    if all(isinstance(value, str) for value in values):
        block.text[path] = objects(values)
        return
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        block.odd[path] = "its rows have different shapes"
        return
    if path == (EPS_ID,) and array.dtype.kind not in "bi":
        block.text[path] = objects([str(value) for value in values])
        return
    add_array(path, array, block)


def objects(values: Sequence[Any]) -> Array:
    """Return an array of these objects, one a row."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def add_array(path: ColumnPath, array: Array, block: RowBlock) -> None:
    """Add a column that is an array already; one that is not a number a row is odd."""
    if array.dtype.kind not in "biuf":
        block.odd[path] = "it has values that are no numbers"
    elif not array.ndim or len(array) != block.rows:
        block.odd[path] = f"it has {len(array) if array.ndim else 1:,} values for {block.rows:,} rows"
    else:
        block.columns[path] = array


def _add_dictionaries(path: ColumnPath, rows: Sequence[dict[str, Any]], block: RowBlock, unpack: Unpack) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    if not names and path:
        block.odd[path] = "it is empty"
    for name in names:
        if (*path, name) == (INFOS, TIME_LIMIT):
            block.limits = np.array([row.get(name) is True for row in rows])
        elif all(name in row for row in rows):
            add_values((*path, name), [row[name] for row in rows], block, unpack)
        else:
            block.odd[*path, name] = _PARTLY


def joined(parts: Sequence[RowBlock]) -> RowBlock:
    """Join blocks that follow each other; what is not alike in all of them is odd."""
    if len(parts) == 1:
        return parts[0]
    whole = RowBlock(sum(part.rows for part in parts))
    if any(part.limits is not None for part in parts):
        whole.limits = np.concatenate(
            [np.zeros(part.rows, bool) if part.limits is None else part.limits for part in parts]
        )
    if any(part.batches is not None for part in parts):
        whole.batches = np.concatenate(
            [np.zeros(part.rows, np.int64) if part.batches is None else part.batches for part in parts]
        )
    for part in parts:
        for path, why in part.odd.items():
            whole.odd.setdefault(path, why)
    for path in dict.fromkeys(path for part in parts for path in (*part.columns, *part.text)):
        arrays = [found for part in parts if (found := part.columns.get(path)) is not None]
        texts = [found for part in parts if (found := part.text.get(path)) is not None]
        if path in whole.odd:
            continue
        if len(texts) == len(parts):
            whole.text[path] = np.concatenate(texts)
        elif len(arrays) != len(parts):
            whole.odd[path] = _PARTLY
        elif len({array.shape[1:] for array in arrays}) > 1:
            whole.odd[path] = "its rows have different shapes"
        else:
            whole.columns[path] = np.concatenate(arrays)
    return whole
