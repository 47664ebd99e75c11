"""The infos of one episode as columns: numbers, arrays and text, in dicts that may nest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..format.contracts import Array
from ..ted.schema import DTYPES, Key, key_name, safe_part

INFO = "info"
PRESENT = "_present"
"""Ends the name of the mask of an entry that some rows have and others lack."""
_SCALARS = frozenset({float, int, bool})
_LARGEST = (1 << 63) - 1
_EXACT = 1 << 53
_LONGEST_NAME = 200
_MOST_LEVELS = 20


@dataclass(slots=True)
class RecordedInfo:
    """One entry of the infos of an episode of n steps: `values` `[n + 1, *shape]`, zeros where it is not `present`.

    The first row is what `reset` returned. Text is UTF-8 bytes `[n + 1, longest]` with its `lengths`.
    """

    values: Array
    present: Array
    lengths: Array | None = None


class InfoRows:
    """Takes the info of each row of an episode.

    `dropped` maps the names of what cannot be kept to the reasons, `renamed` those of what is stored by another name to
    that name.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self._found: defaultdict[Key, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))

    def put(self, row: int, info: Mapping[Any, Any], prefix: Key = (INFO,)) -> None:
        """Take the info of a row; arrays are copied, because environments may change them."""
        for name, value in info.items():
            key = (*prefix, _part(name))
            if key[-1] != name:
                self.renamed[key_name((*prefix, str(name)))] = key_name(key)
            kind = type(value)
            if kind in _SCALARS or isinstance(value, str):
                kept = value
            elif kind is np.ndarray or isinstance(value, np.generic):
                if value.dtype.name not in DTYPES:
                    self._drop(key, f"it has elements of type {value.dtype}")
                    continue
                kept = np.array(value)
            elif isinstance(value, Mapping):
                if len(key) > _MOST_LEVELS:
                    self._drop(key, f"it nests deeper than {_MOST_LEVELS} levels")
                else:
                    self.put(row, value, key)
                continue
            elif value is None:
                continue
            elif (kept := _listed(value)) is None:
                self._drop(key, f"it is a {kind.__name__}")
                continue
            rows, values = self._found[key]
            if rows and rows[-1] == row:
                self._drop(key, "two entries of one info have this name")
                continue
            rows.append(row)
            values.append(kept)

    def _drop(self, key: Key, why: str) -> None:
        self.dropped.setdefault(key_name(key), why)

    def clear(self) -> None:
        """Forget all rows; what was dropped stays named."""
        self._found.clear()

    def take(self, length: int) -> dict[Key, RecordedInfo]:
        """Return the columns of the first `length + 1` rows, and begin with none."""
        columns = {}
        found = {key: whole for key, each in self._found.items() if (whole := _first_rows(*each, length))[0]}
        self._found = defaultdict(lambda: ([], []))
        keys = set(found)
        for key, (rows, values) in found.items():
            if len(key[-1].encode()) > _LONGEST_NAME:
                self._drop(key, f"its name has more than {_LONGEST_NAME} bytes")
            elif any(key[:depth] in keys for depth in range(1, len(key))):
                self._drop(key, "it is in a dict that is a value in other steps")
            elif (column := self._column(key, np.array(rows), values, length)) is not None:
                columns[key] = column
        return columns

    def _column(self, key: Key, rows: Array, values: Sequence[Any], length: int) -> RecordedInfo | None:
        if isinstance(values[0], str):
            return self._text(key, rows, values, length)
        stacked = _stack(values)
        if stacked is None:
            first = np.asarray(values[0])
            alike = [one for one, value in enumerate(values) if _is_like(value, first)]
            odd = next(value for one, value in enumerate(values) if one not in set(alike))
            self._drop(key, f"in some steps: {_shown(odd)} where it is {_shown(first)} in others")
            rows, stacked = rows[alike], _stack([values[one] for one in alike])
        if stacked is None or stacked.dtype.name not in DTYPES:
            self._drop(key, "its numbers need more than 64 bits")
            return None
        if np.array_equal(rows, np.arange(length + 1)):
            return RecordedInfo(stacked, np.ones(length + 1, bool))
        column = RecordedInfo(np.zeros((length + 1, *stacked.shape[1:]), stacked.dtype), np.zeros(length + 1, bool))
        column.values[rows], column.present[rows] = stacked, True
        return column

    def _text(self, key: Key, rows: Array, values: Sequence[Any], length: int) -> RecordedInfo | None:
        texts = {row: value for row, value in zip(rows, values, strict=True) if isinstance(value, str)}
        data = {row: value.encode(errors="surrogatepass") for row, value in texts.items()}
        odd = next((value for value in values if not isinstance(value, str)), None)
        if odd is not None:
            self._drop(key, f"in some steps: {_shown(odd)} where it is text in others")
        longest = max(1, *map(len, data.values())) if data else 1
        lengths = np.zeros(length + 1, np.int32)
        column = RecordedInfo(np.zeros((length + 1, longest), np.uint8), np.zeros(length + 1, bool), lengths)
        for row, text in data.items():
            column.values[row, : len(text)] = np.frombuffer(text, np.uint8)
            column.present[row] = True
            lengths[row] = len(text)
        return column


def _first_rows(rows: list[int], values: list[Any], length: int) -> tuple[list[int], list[Any]]:
    """Leave out the row of a step that was interrupted before all of it was kept."""
    count = sum(row <= length for row in rows) if rows[-1] > length else len(rows)
    return rows[:count], values[:count]


def _part(name: Any) -> str:
    """Return the part of a key; a name that ends like that of a mask gets a trailing `_`."""
    part = safe_part(str(name))
    return f"{part}_" if part.endswith(PRESENT) else part


def _listed(value: Any) -> Array | None:
    """Return a list or tuple of numbers as an array; None for anything else."""
    if not isinstance(value, list | tuple):
        return None
    try:
        found = np.asarray(value)
        if found.dtype.kind == "f" and (np.abs(found) >= _EXACT).any():  # numpy makes floats of large integers
            each = np.asarray(value, object)
            if all(isinstance(one, int | np.integer) for one in each.flat):
                found = each.astype(np.uint64 if min(each.flat) >= 0 else np.int64)
            elif any(isinstance(one, int | np.integer) and int(one) != float(one) for one in each.flat):
                return None
    except (ValueError, OverflowError):
        return None
    return found if found.dtype.name in DTYPES and found.size else None


def _stack(values: Sequence[Any]) -> Array | None:
    """Stack values whose numbers one type holds without a change; None where there is no such type, or shape."""
    kinds = {type(value) for value in values}
    if kinds == {int} and max(values) > _LARGEST >= min(values):  # numpy makes floats of these
        if min(values) < 0:
            return None
        return np.array(values, np.uint64 if max(values) <= 2 * _LARGEST + 1 else object)
    if len(kinds) == 1 and kinds <= _SCALARS:
        return np.array(values)
    arrays = [np.asarray(value) for value in values if not isinstance(value, str)]
    if len(arrays) < len(values) or len({array.shape for array in arrays}) > 1:
        return None
    dtypes = {array.dtype for array in arrays}
    wide = np.result_type(*dtypes) if not any(dtype.hasobject for dtype in dtypes) else np.dtype(object)
    return np.array(arrays, wide) if all(holds(wide, array) for array in arrays) else None


def holds(dtype: np.dtype[Any], values: Array) -> bool:
    """Return whether the type holds these numbers without a change; bool and numbers never mix."""
    if dtype == values.dtype:
        return True
    if "b" in (dtype.kind, values.dtype.kind) or np.result_type(dtype, values.dtype) != dtype:
        return False
    with np.errstate(all="ignore"):
        back = values.astype(dtype).astype(values.dtype)
    return bool(np.array_equal(back, values, equal_nan=values.dtype.kind in "fc"))


def _is_like(value: Any, first: Array) -> bool:
    array = np.asarray(value)
    return bool(array.shape == first.shape and array.dtype == first.dtype)


def _shown(value: Any) -> str:
    array = np.asarray(value)
    return "text" if array.dtype.kind == "U" else f"{array.dtype} {list(array.shape)}"
