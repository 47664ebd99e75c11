"""Reads rows of RLlib's files in blocks: columns of numbers by their path, from JSON lines or from Parquet.

`obs` has the path `("obs",)`; the entry `x` of the dictionaries in `infos` has the path `("infos", "x")`.

JSON files have a batch or a transition on each line; the file may be the only member of a zip archive. Parquet files
have a transition in each row, or an episode in msgpack. Ray stores tensors as lists, with the shape of a row in the
metadata of the field, and values without an Arrow type, such as dictionaries, as a pickle in each row.

msgpack is the default form of RLlib's `output` option. Each value is a map, an episode or a piece of one:

    t_started, t                        times of the first step of the piece and of its end
    observations, infos    {data: […]}  T + 1 entries, the first one from the reset or the step before
    actions, rewards, …    {data: […]}  T entries
    lookback                            in each of these maps: how many entries of the piece before are repeated first

Arrays are encoded as in msgpack-numpy, as maps with element type, shape and bytes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import io
import json
import math
import os
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Closing
from ...core.format.converter import require_trust
from ...core.format.files import open_regular
from ...core.ted.schema import inexact_as_float, odd_truths
from ..files.arrow import require_bounded_parquet
from ..files.pickles import PickledArray, PickledList, PickleReader, Value

ColumnPath: TypeAlias = tuple[str, ...]
OBS, NEXT_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
EPS_ID, STEP, AGENTS = "eps_id", "t", ("agent_index", "agent_id")
DONES, TERMINATEDS, TRUNCATEDS = "dones", "terminateds", "truncateds"
INFOS, TIME_LIMIT = "infos", "TimeLimit.truncated"
"""The infos of steps, and the entry that gym sets in the last step of an episode that reaches its time limit."""
REQUIRED = (OBS, ACTIONS, REWARDS)
MARKS = (EPS_ID, DONES, TERMINATEDS, NEXT_OBS)
"""RLlib's files have at least one of these columns in addition to the required ones."""
_PACKED = "BCJNG"
"""First characters of an LZ4 frame in base64."""
_DEEPEST = 16
_EXACT = 1 << 53
"""Whole numbers up to this one are exact in float64."""
_PARTLY = "it is not in every row"
_LONGEST_PICKLE = 256 << 20
_LARGEST_COLUMN = 1 << 30
"""Limit in bytes for an unpacked column."""


@dataclass
class RowBlock:
    """Consecutive rows of a file.

    Attributes:
        rows: the number of rows.
        columns: columns of numbers, `[rows, *shape]`.
        text: columns of strings, object `[rows]`.
        odd: columns that cannot be read, with the reason.
        limits: rows in which infos state that the time limit was reached, bool `[rows]`; None if no row has this info.
        batches: the line of the batch that holds each row, int64 `[rows]`. Transitions share a number of 0 or less,
            which changes after damaged rows. None means all 0.
        lines: the line of each row, int64 `[rows]`; None if the file has no lines.
        inexact: for columns of floats, the first row with a whole number that float64 cannot hold.
    """

    rows: int
    columns: dict[ColumnPath, Array] = field(default_factory=dict)
    text: dict[ColumnPath, Array] = field(default_factory=dict)
    odd: dict[ColumnPath, str] = field(default_factory=dict)
    limits: Array | None = None
    batches: Array | None = None
    lines: Array | None = None
    inexact: dict[ColumnPath, int] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> RowBlock:
        """Return rows `[start, stop)` without copying them."""
        rows = slice(start, stop)
        limits, batches, lines = (None if of is None else of[rows] for of in (self.limits, self.batches, self.lines))
        columns = {path: array[rows] for path, array in self.columns.items()}
        text = {path: array[rows] for path, array in self.text.items()}
        return RowBlock(stop - start, columns, text, self.odd, limits, batches, lines)


class BatchFile(Protocol):
    """A file of rows. `blocks` reads all of it once; `block` reads one block again."""

    damage: dict[int, CorruptDataError]
    """The errors of parts that cannot be read, by their numbers."""
    part: str
    """What the numbers in `damage` count, such as `line`."""

    def blocks(self) -> Iterator[tuple[Any, RowBlock]]:
        """Yield every block with its place, the argument of `block`."""

    def block(self, place: Any) -> RowBlock:
        """Read one block."""

    def close(self) -> None:
        """Close the file."""


class Unpacker(Closing):
    """Reads the pickles in RLlib's files in a confined process; UsageError unless they are trusted.

    Calling it unpacks a compressed value, which is base64 of an LZ4 frame of a pickled array.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self._path, self._trusted = path, trusted
        self._pickles: PickleReader | None = None

    def __call__(self, text: str) -> Array:
        """Return the array in a compressed value; CorruptDataError for damage."""
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
            raise FormatError(f"{self._path}: a compressed column is not an array of numbers")
        return found

    def unpickled(self, data: bytes) -> Any:
        """Return the contents of a pickle: an array, a number, a string, or dictionaries of them.

        A tuple becomes a dictionary with its indices as names.
        """
        require_trust(self._path, self._trusted, "it has pickles of Python objects, which can run anything")
        return self._loaded(data)

    def _loaded(self, data: bytes) -> Any:
        if self._pickles is None:
            self._pickles = PickleReader(str(self._path), _LONGEST_PICKLE)
        return self._value(self._pickles.load(io.BytesIO(data), len(data)), self._pickles, 0)

    def _value(self, found: Value, pickles: PickleReader, depth: int) -> Any:
        if depth > _DEEPEST:
            raise FormatError(f"{self._path}: a pickle in it is nested too deeply")
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
    """Return whether a value of JSON is a compressed column or value."""
    return isinstance(value, str) and value.startswith(_PACKED)


def batch_block(batch: dict[str, Any], unpack: Unpacker, what: str, line: int) -> RowBlock:
    """Make a block of the SampleBatch on a line, whose columns are lists with one value per row, or compressed."""
    rewards = batch.get(REWARDS)
    if is_packed(rewards):
        rewards = unpack(rewards)  # type: ignore[arg-type]
    if rewards is None or isinstance(rewards, str | dict | int | float):
        raise CorruptDataError(f"{what} is a batch without a list of rewards")
    lines = np.full(len(rewards), line, np.int64)
    block = RowBlock(len(rewards), batches=lines, lines=lines)
    for name, value in batch.items():
        if name not in ("type", "count"):
            _add_column((name,), value, block, unpack)
    return block


def _add_column(path: ColumnPath, value: Any, block: RowBlock, unpack: Unpacker) -> None:
    """Add one column of a batch; each entry of a dictionary is a column."""
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
    """Add a column from its values, one for each row."""
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
    """Return whole numbers that NumPy turned into floats as uint64 if all of them fit.

    NumPy turns whole numbers into floats if one exceeds int64, or if one value is a fraction. In the other cases the
    array stays as it is, and the first inexact row is stored in the block.
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
    """Report a column without any value, except ids of agents, which may be empty for a single agent."""
    if path[0] not in AGENTS:
        block.odd[path] = "it has no values"


def objects(values: Sequence[Any]) -> Array:
    """Return an object array with one element for each value."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def add_array(path: ColumnPath, array: Array, block: RowBlock) -> None:
    """Add a column that is an array; it is odd if it does not have numbers for each row."""
    if array.dtype.kind not in "biuf":
        block.odd[path] = "it has values that are not numbers"
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
    """Join consecutive blocks; a column that differs between them, or is missing in some, is odd."""
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
    """Join the arrays of a column, and store the first row with a whole number that becomes inexact by that."""
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
    """Return the common type of columns: uint64 for unsigned and signed integers unless some value is `negative`."""
    if np.dtype(np.uint64) in dtypes and not negative and all(dtype.kind in "iu" for dtype in dtypes):
        return np.dtype(np.uint64)
    return np.result_type(*dtypes)


def first_inexact(array: Array) -> int | None:
    """Return the first row with a whole number that float64 cannot hold, None if there is none."""
    odd = inexact_as_float(array).reshape(len(array), -1).any(1)
    return int(odd.argmax()) if odd.any() else None


_LINE_BYTES = 256 << 10
_LONGEST_LINE = 256 << 20
_HEAD_BYTES = 1 << 20
_BATCHES = ("SampleBatch", "MultiAgentBatch")
_SUFFIXES = (".json", ".jsonl")


def looks_like_lines(path: Path) -> bool:
    """Return whether the first line of a file is one of RLlib's; raises OSError and exceptions of zipfile."""
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES).lstrip()
    if not head.startswith(b"{"):
        return False
    line, end, _ = head.partition(b"\n")
    start = line[:4096].replace(b" ", b"")
    if any(f'"type":"{name}"'.encode() in start for name in _BATCHES):
        return True
    if not end and len(head) == _HEAD_BYTES:
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= set(REQUIRED) and bool(found.keys() & set(MARKS))


def is_other_document(path: Path) -> bool:
    """Return whether a file without RLlib's lines is other JSON, rather than a damaged file of RLlib."""
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEAD_BYTES)
    for text in (head, head.lstrip().partition(b"\n")[0]):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        return True
    return False


def _opened(path: Path) -> IO[bytes]:
    """Open a file of lines, or the only JSON file in a zip archive."""
    file = os.fdopen(open_regular(path), "rb", buffering=1 << 20)
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        return file
    with file, zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if one.filename.lower().endswith(_SUFFIXES)]
        if len(members) != 1 or members[0].flag_bits & 1:
            raise FormatError(f"{path} is an archive of {len(members)} JSON files, expected a single one")
        return archive.open(members[0])  # stays usable after the archive is closed


class JsonLines(Closing):
    """A file of JSON lines. The place of a block is its offset, its size in bytes, and the number of its first line.

    A line that is not JSON, or whose compressed columns are damaged, is left out, and its error is in `damage`.
    Transitions after it belong to another batch than those before, so that they are not joined.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self.path = path
        self._file = _opened(path)
        self._unpacker = Unpacker(path, trusted=trusted)
        self.damage: dict[int, CorruptDataError] = {}
        self.part = "line"

    def blocks(self) -> Iterator[tuple[tuple[int, int, int], RowBlock]]:
        """Yield the rows in blocks with their places."""
        self._file.seek(0)
        offset, number = 0, 1
        while lines := self._some_lines():
            size = sum(map(len, lines))
            block = self._parsed(lines, number)
            if block.rows:
                yield (offset, size, number), block
            offset += size
            number += len(lines)
            if self._file.tell() != offset:
                self._file.seek(offset)

    def _some_lines(self) -> list[bytes]:
        lines: list[bytes] = []
        size = 0
        while size < _LINE_BYTES and (line := self._file.readline(_LONGEST_LINE + 1)):
            if len(line) > _LONGEST_LINE:
                raise FormatError(f"{self.path} has a line of more than {_LONGEST_LINE >> 20} MiB")
            lines.append(line)
            size += len(line)
        return lines

    def block(self, place: tuple[int, int, int]) -> RowBlock:
        """Read the lines at a place again."""
        offset, size, number = place
        if self._file.tell() != offset:
            self._file.seek(offset)
        data = self._file.read(size)
        if len(data) < size:
            raise CorruptDataError(f"{self.path} has become shorter while it was read")
        return self._parsed(io.BytesIO(data).readlines(), number)  # ends lines as the file does, at \n alone

    def _parsed(self, lines: list[bytes], first: int) -> RowBlock:
        parts: list[RowBlock] = []
        rows: list[tuple[int, dict[str, Any]]] = []
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            what = f"{self.path}, line {number:,}"
            try:
                found = _document(line, what)
                if (
                    "type" not in found
                    and not isinstance(found.get(REWARDS), list)
                    and not is_packed(found.get(REWARDS))
                ):
                    rows.append((number, found))
                    continue
                batch = batch_block(_single_policy(found, what), self._unpacker, what, number)
            except CorruptDataError as error:
                parts += self._transitions(rows)
                rows = []
                self.damage[number] = error
                continue
            parts += [*self._transitions(rows), batch]
            rows = []
        parts += self._transitions(rows)
        parts = [part for part in parts if part.rows]
        return joined(parts) if parts else RowBlock(0)

    def _transitions(self, rows: list[tuple[int, dict[str, Any]]]) -> list[RowBlock]:
        """Make one block of transitions, or several without those that are damaged, which bisection finds."""
        if not rows:
            return []
        try:
            block = row_block([row for _, row in rows], self._unpacker)
        except CorruptDataError as error:
            if len(rows) == 1:
                self.damage[rows[0][0]] = error
                return []
            half = len(rows) // 2
            return [*self._transitions(rows[:half]), *self._transitions(rows[half:])]
        block.batches = np.full(len(rows), -len(self.damage), np.int64)
        block.lines = np.array([number for number, _ in rows], np.int64)
        return [block]

    def close(self) -> None:
        self._file.close()
        self._unpacker.close()


def _reason(error: Exception) -> str:
    """Describe an error of the JSON parser, without the number of the line, which is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1:,}"
    return " ".join(str(error).split())[:100]


def _document(line: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{what} is not JSON ({_reason(error)}): it was cut, or is damaged") from error
    if not isinstance(found, dict):
        raise CorruptDataError(f"{what} is not a JSON object")
    return found


def _single_policy(batch: dict[str, Any], what: str) -> dict[str, Any]:
    kind = batch.get("type", "SampleBatch")
    if kind == "SampleBatch":
        return batch
    policies = batch.get("policy_batches")
    if kind != "MultiAgentBatch" or not isinstance(policies, dict):
        raise FormatError(f"{what} is of type {str(kind)[:40]!r}, expected SampleBatch")
    if len(policies) != 1 or not isinstance(only := next(iter(policies.values())), dict):
        names = ", ".join(map(str, sorted(policies)))[:100]
        raise FormatError(
            f"{what} has batches of {len(policies)} policies ({names}); only a single one can be read",
            hint="write the lines of each policy to a file of its own",
        )
    return only


ITEM = "item"
"""The only column of a table of msgpack episodes."""
_MARKS = (b"\xa3id_", b"\xacobservations", b"\xa9t_started")
"""Keys of an episode as they are encoded in msgpack."""
_RESET_INFOS = "infos of the reset"


def looks_like_episode(data: bytes) -> bool:
    """Return whether bytes contain the keys of a msgpack episode; nothing is unpacked."""
    return all(mark in data for mark in _MARKS)


def episode_block(data: bytes, unpack: Unpacker, what: str) -> RowBlock:
    """Make a block of the steps of an episode in msgpack, without the entries repeated from the piece before.

    `infos` are those after each step; infos of the reset are left out and reported.

    Args:
        data: the episode in msgpack.
        unpack: reads compressed values.
        what: the name of the episode in messages.

    Raises:
        FormatError: the episode has several agents, or contains pickles.
        CorruptDataError: the episode is damaged.
    """
    found = _unpacked(data, what)
    if "agent_episodes" in found:
        raise FormatError(f"{what} is an episode of several agents; only a single one can be read")
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
        raise CorruptDataError(f"{what} is not a msgpack map")
    return found


def _decoded(value: dict[Any, Any], what: str) -> Any:
    """Return the array or number that is encoded as a map by msgpack-numpy; any other map is returned as it is."""
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
    """Return the element type of that name, None if its elements are not real numbers."""
    dtype = np.dtype(text)
    return dtype if dtype.kind in "biuf" else None


def _is_set(found: dict[Any, Any], name: str, what: str) -> bool:
    value = found.get(name)
    if not isinstance(value, bool | np.bool_):
        raise CorruptDataError(f"{what} does not state {name}")
    return bool(value)


def _entries(found: dict[Any, Any], name: Any, count: int, what: str) -> Any:
    """Return the entries of a part of an episode, after those that are repeated; CorruptDataError for another count."""
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
    """Return finalized data, whose arrays hold all entries; tuples become dictionaries by index."""
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
    """Return a value with tuples, which msgpack stores as lists, as dictionaries by index."""
    if isinstance(value, list) and any(isinstance(part, np.ndarray | np.generic | dict) for part in value):
        value = dict(enumerate(value))
    return {str(name): _named(part) for name, part in value.items()} if isinstance(value, dict) else value


_MOST_ROWS = 4096
_BLOCK_BYTES = 4 << 20
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)

_TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_RAGGED = "ray.data.arrow_variable_shaped_tensor"
_OBJECTS = "ray.data.arrow_pickled_object"
"""Arrow extension types of Ray; without Ray, pyarrow reads their storage types."""
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def looks_like_parquet(path: Path) -> bool:
    """Return whether a Parquet file has RLlib's columns; raises exceptions of pyarrow."""
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
    """A Parquet file. The place of a block is its row group, its first row in the group, and its number of rows.

    The rows of a group from the first unreadable block on are left out; `damage` holds the errors by group.
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
            with contextlib.suppress(OSError, ValueError):  # damage is reported when the rows are read
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
                if self.damage:  # rows after damage are not joined to those before
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
            block.odd[(name,)] = "it occurs twice"
        else:
            _add_extended(table.schema.field(name), pa.concat_arrays(table.column(name).chunks), block, unpacker)
    return block


def _add_extended(field: Any, values: Any, block: RowBlock, unpacker: Unpacker) -> None:
    """Add one column, which may have an extension type of Ray."""
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
    """Return the shape of the rows of a tensor, stored as JSON, or by older versions of Ray as a pickle."""
    try:
        return json.loads(stated)
    except ValueError:
        found = unpacker.unpickled(stated)
        return list(found.values()) if isinstance(found, dict) else found


def _shape(path: ColumnPath, shape: Any, block: RowBlock) -> None:
    """Reshape the rows of a tensor, whose shape is stored separately."""
    rows = block.columns[path]
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        del block.columns[path]
        block.odd[path] = "the shape of its rows is not stated"
    elif math.prod(shape) != math.prod(rows.shape[1:]):
        raise CorruptDataError(f"{'.'.join(path)!r} has rows of {math.prod(rows.shape[1:]):,} numbers, not {shape}")
    else:
        block.columns[path] = rows.reshape(block.rows, *shape)


def _add_arrow(path: ColumnPath, values: Any, block: RowBlock, unpacker: Unpacker) -> None:
    """Add one column; each field of a struct becomes a column."""
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
        block.odd[path] = f"its values are {values.type}, which are not numbers"
    elif values.null_count and not pa.types.is_floating(values.type):
        block.odd[path] = "it has no value in some rows"
    else:
        array = values.to_numpy(zero_copy_only=False)
        add_array(path, np.ascontiguousarray(array).reshape(block.rows, *shape), block)
