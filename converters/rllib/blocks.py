"""Rows of RLlib's files in blocks: columns of numbers by their path, from values of JSON or from Arrow.

`obs` is the path `("obs",)`, a value `x` of dictionaries in `infos` is `("infos", "x")`.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Closing
from ...core.format.converter import require_trust
from ...core.ted.schema import inexact_as_float
from ..files.pickles import PickledArray, PickledList, PickleReader, Value

ColumnPath: TypeAlias = tuple[str, ...]
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
_EXACT = 1 << 53
"""Whole numbers up to this one are exact as float64."""
_PARTLY = "it is not in every row"
_LONGEST_PICKLE = 256 << 20
_LARGEST_COLUMN = 1 << 30
"""Bytes that a compressed column may unpack to."""


@dataclass
class RowBlock:
    """Consecutive rows: `columns` of numbers `[rows, *shape]`, `text` (objects `[rows]`), and why others are none.

    `limits` (bool `[rows]`) are the rows in which infos state that the time limit was reached, None where none do.
    `batches` (int64 `[rows]`) are the lines of the batches that hold the rows, 0 for transitions (all: None). `lines`
    (int64 `[rows]`) are the lines of the rows, None where there are none. `inexact` is, by column, the first row with a
    whole number that has no equal float64, where the column is one of floats.
    """

    rows: int
    columns: dict[ColumnPath, Array] = field(default_factory=dict)
    text: dict[ColumnPath, Array] = field(default_factory=dict)
    odd: dict[ColumnPath, str] = field(default_factory=dict)
    limits: Array | None = None
    batches: Array | None = None
    lines: Array | None = None
    inexact: dict[ColumnPath, int] = field(default_factory=dict)


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


class Unpacker(Closing):
    """Reads the pickles in the files of RLlib, in their own process; UsageError where they are not trusted.

    A compressed value is base64 of an LZ4 frame of a pickled array; it is unpacked by a call.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self._path, self._trusted = path, trusted
        self._pickles: PickleReader | None = None

    def __call__(self, text: str) -> Array:
        """Return the array that a compressed value holds; CorruptDataError for damage."""
        require_trust(self._path, self._trusted, "it has compressed columns, which are pickles and can run anything")
        try:
            packed = base64.b64decode(text, validate=True)
            with pa.CompressedInputStream(pa.py_buffer(packed), "lz4") as stream:
                data = stream.read(_LARGEST_COLUMN + 1)
        except (binascii.Error, ValueError, OSError) as error:
            raise CorruptDataError(f"{self._path}: a compressed column cannot be unpacked ({error})") from error
        if len(data) > _LARGEST_COLUMN:
            raise FormatError(f"{self._path}: a compressed column has more than {_LARGEST_COLUMN >> 20:,} MiB")
        found = self._loaded(data)
        if not isinstance(found, np.ndarray):
            raise FormatError(f"{self._path}: a compressed column holds something else than an array of numbers")
        return found

    def unpickled(self, data: bytes) -> Any:
        """Return what a pickle holds: an array, a number, a text, or dictionaries of them; tuples by their indices."""
        require_trust(self._path, self._trusted, "it has pickles of Python objects, which can run anything")
        return self._loaded(data)

    def _loaded(self, data: bytes) -> Any:
        if self._pickles is None:
            self._pickles = PickleReader(str(self._path), _LONGEST_PICKLE)
        return self._value(self._pickles.load(io.BytesIO(data), len(data)), self._pickles, 0)

    def _value(self, found: Value, pickles: PickleReader, depth: int) -> Any:
        if depth > _DEEPEST:
            raise FormatError(f"{self._path}: a pickle in it is nested too deep")
        if isinstance(found, PickledArray):
            return pickles.rows(found)
        if isinstance(found, PickledList):
            found = {str(number): part for number, part in enumerate(pickles.items(found))}
        if isinstance(found, dict):
            return {name: self._value(part, pickles, depth + 1) for name, part in found.items()}
        return found

    def close(self) -> None:
        if self._pickles is not None:
            self._pickles.close()


def is_packed(value: Any) -> bool:
    """Return whether a value of JSON is a compressed column or row."""
    return isinstance(value, str) and value.startswith(_PACKED)


def batch_block(batch: dict[str, Any], unpack: Unpacker, what: str, line: int) -> RowBlock:
    """Make a block of the SampleBatch in a line: each column is a list with a value a row, or compressed."""
    rewards = batch.get(REWARDS)
    if is_packed(rewards):
        rewards = unpack(rewards)  # type: ignore[arg-type]
    if rewards is None or isinstance(rewards, str | dict | int | float):
        raise CorruptDataError(f"{what}: a batch without a list of rewards")
    lines = np.full(len(rewards), line, np.int64)
    block = RowBlock(len(rewards), batches=lines, lines=lines)
    for name, value in batch.items():
        if name not in ("type", "count"):
            _add_column((name,), value, block, unpack)
    return block


def _add_column(path: ColumnPath, value: Any, block: RowBlock, unpack: Unpacker) -> None:
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


def row_block(rows: Sequence[dict[str, Any]], unpack: Unpacker) -> RowBlock:
    """Make a block of transitions, each a dictionary."""
    block = RowBlock(len(rows))
    _add_dictionaries((), rows, block, unpack)
    return block


def add_values(path: ColumnPath, values: Sequence[Any], block: RowBlock, unpack: Unpacker) -> None:
    """Add the values of one column, one a row."""
    if not values:
        return
    if len(path) < _DEEPEST and all(isinstance(value, dict) for value in values):
        _add_dictionaries(path, values, block, unpack)
        return
    if all(value is None for value in values):
        add_empty(path, block)
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
    large = array.dtype.kind == "f" and bool((np.isfinite(array) & (np.abs(array) >= _EXACT)).any())
    add_array(path, _whole(path, values, array, block) if large else array, block)


def _whole(path: ColumnPath, values: Sequence[Any], array: Array, block: RowBlock) -> Array:
    """Return values that NumPy makes floats of as uint64 where all of them fit; else note the first that is inexact.

    NumPy makes floats of whole numbers beyond int64, and of whole numbers next to a fraction.
    """
    each = np.array(values, object)
    if all(type(one) is int and 0 <= one < 1 << 64 for one in each.flat):
        return each.astype(np.uint64)
    width = max(1, each.size // len(values))
    odd = (at for at, one in enumerate(each.flat) if type(one) is int and one != float(one))
    if (first := next(odd, None)) is not None:
        block.inexact[path] = first // width
    return array


def add_empty(path: ColumnPath, block: RowBlock) -> None:
    """Add a column without any value; the ids of agents are absent then: there is a single one."""
    if path[0] not in AGENTS:
        block.odd[path] = "it has no values"


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


def _add_dictionaries(path: ColumnPath, rows: Sequence[dict[str, Any]], block: RowBlock, unpack: Unpacker) -> None:
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
    if all(part.lines is not None for part in parts):
        whole.lines = np.concatenate([part.lines for part in parts])
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
            whole.columns[path] = _concatenated(path, parts, whole)
    return whole


def _concatenated(path: ColumnPath, parts: Sequence[RowBlock], whole: RowBlock) -> Array:
    """Join the arrays of a column, and note the first row whose whole number becomes inexact by that."""
    arrays = [part.columns[path] for part in parts]
    dtype = common_type({array.dtype for array in arrays}, negative=any(bool((array < 0).any()) for array in arrays))
    start = 0
    for part, array in zip(parts, arrays, strict=True):
        row = part.inexact.get(path, first_inexact(array) if dtype.kind == "f" else None)
        if row is not None:
            whole.inexact.setdefault(path, start + row)
        start += part.rows
    return np.concatenate([array.astype(dtype, copy=False) for array in arrays])


def common_type(dtypes: Collection[np.dtype[Any]], *, negative: bool) -> np.dtype[Any]:
    """Return the common type of columns; whole numbers become uint64 if one of them is, unless any is `negative`."""
    if np.dtype(np.uint64) in dtypes and not negative and all(dtype.kind in "iu" for dtype in dtypes):
        return np.dtype(np.uint64)
    return np.result_type(*dtypes)


def first_inexact(array: Array) -> int | None:
    """Return the first row with a whole number that has no equal float64; None where there is none."""
    odd = inexact_as_float(array).reshape(len(array), -1).any(1)
    return int(odd.argmax()) if odd.any() else None
