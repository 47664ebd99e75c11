"""The columns of leaves that `plot` draws: found by the names users give, and read in bounded memory."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..charts.marks import Array, Series, reduced
from ..encodings.pictures import looks_like_picture
from ..errors import UsageError
from ..format.contracts import StepReader
from ..ted.schema import NEXT, Field, Key, as_numbers, key_called, unknown_field

_PARTS = 1000
"""Parts of an episode whose extremes are kept: more than a picture has pixels."""
_BLOCK_BYTES = 8 << 20
_WHICH = re.compile(r"(?P<name>.+)\[(?P<first>\d+)(?P<range>:(?P<stop>\d*))?\]")


class PlotColumns(NamedTuple):
    """The columns of a leaf that are plotted, row-major, and how many there are."""

    field: Field
    chosen: range
    every: int

    def name(self, column: int) -> str:
        return f"{self.field.name}[{column}]" if self.every > 1 else self.field.name


def columns_of(fields: Sequence[Field], asked: str, dataset: str) -> PlotColumns:
    """Find the leaf and the columns that a name like `observation[0:4]` means."""
    field, which = find_field(fields, asked)
    if field is None:
        known = {field.name.removeprefix("video.") for field in fields}
        raise unknown_field(which["name"] if which else asked, known)
    _refuse_other_than_numbers(field, dataset)
    every = math.prod(field.shape)
    if which is None:
        return PlotColumns(field, range(every), every)
    first = int(which["first"])
    stop = (int(which["stop"]) if which["stop"] else every) if which["range"] else first + 1
    if not first < stop <= every:
        raise UsageError(f"{asked} is not there: {field.name} has {every} columns, from 0 to {every - 1}")
    return PlotColumns(field, range(first, stop), every)


def find_field(fields: Sequence[Field], asked: str) -> tuple[Field | None, re.Match[str] | None]:
    """Find the leaf of a name, None if it is not there, and the columns that the name has in brackets."""
    by_key = {field.key: field for field in fields}
    found, which = _leaf(by_key, asked), None
    if found is None and (which := _WHICH.fullmatch(asked)) is not None:
        found = _leaf(by_key, which["name"])
    return found, which


def _leaf(by_key: dict[Key, Field], name: str) -> Field | None:
    """Find the leaf of a name, which may lack `next.`, or that of the video whose frames it is."""
    for whole in (name, f"{NEXT}.{name}", f"video.{name}"):
        key = key_called(whole, by_key)
        if key is not None:
            return by_key[key]
    return None


def _refuse_other_than_numbers(field: Field, dataset: str) -> None:
    name = field.name.removeprefix("video.")
    if name != field.name or looks_like_picture(field):
        options = f"--episode K --field {shlex.quote(name)} -o frames.png"
        hint = f"see its frames: rbtool frames {shlex.quote(dataset)} {options}"
        raise UsageError(f"{name} holds images, which have no line to plot", hint=hint)
    if field.role == "text" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else "complex numbers" if "complex" in field.dtype else "no numbers"
        raise UsageError(f"{field.name} holds {what}, and numbers are plotted")


def trace(
    reader: StepReader, field: Field, columns: Sequence[int], start: int, length: int
) -> dict[int, tuple[Array, Array]]:
    """Read columns of one episode in bounded memory: steps and values, of a long episode those that shape the line."""
    part = math.ceil(length / _PARTS)  # steps of a part whose extremes are kept
    parts = max(1, _BLOCK_BYTES // max(1, field.row_bytes) // part)
    found: dict[int, list[Series]] = {column: [] for column in columns}
    for first in range(0, length, parts * part):
        stop = min(first + parts * part, length)
        block = as_numbers(reader.read(field.key, start + first, start + stop), field.dtype).reshape(stop - first, -1)
        x = np.arange(first, stop)
        for column, series in found.items():
            line = Series("", x, block[:, column])
            series.append(reduced(line, math.ceil((stop - first) / part)) if length > 4 * _PARTS else line)
    return {
        column: (np.concatenate([one.x for one in series]), np.concatenate([one.y for one in series]))
        for column, series in found.items()
    }
