"""Counts the values of a table that are not a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .columns import TableColumn, TableFile

_BLOCK_BYTES = 4 << 20


def nan_notes(file: TableFile, columns: Sequence[TableColumn]) -> list[str]:
    """Count NaN in columns, which are read for it block by block; a sentence each."""
    if file.refuses_nan:
        return []
    numbers = [one for one in columns if not one.is_text]
    inexact = [one for one in numbers if np.dtype(one.dtype).kind in "fc" and _row_bytes(one)]
    return [sentence for one in inexact for sentence in _counted(file, one)]


def _row_bytes(column: TableColumn) -> int:
    return math.prod(column.shape) * np.dtype(column.dtype).itemsize


def _counted(file: TableFile, column: TableColumn) -> Iterator[str]:
    step = max(1, _BLOCK_BYTES // max(1, _row_bytes(column)))
    values, rows, first = 0, 0, -1
    for start in range(0, column.rows, step):
        stop = min(start + step, column.rows)
        nan = np.isnan(file.read([column.name], start, stop)[column.name]).reshape(stop - start, -1)
        odd = nan.any(1)
        if odd.any():
            first = start + int(odd.argmax()) if first < 0 else first
            values, rows = values + int(nan.sum()), rows + int(odd.sum())
    if rows:
        what = "" if values == rows else f" ({values:,} values)"
        yield f"{column.name} is NaN in {rows:,} of {column.rows:,} rows{what}, first in {file.place(first)}"
