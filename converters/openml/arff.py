"""Reads ARFF, the text format of OpenML: attributes in the header, then rows separated by commas."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.files import open_regular

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 4 << 20
_MOST_ATTRIBUTES = 10_000
_NUMBERS = frozenset({"numeric", "real", "integer"})
_ATTRIBUTE = re.compile(
    r"""@attribute\s+(?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s{]+)\s*(?P<type>\{.*\}|[A-Za-z]+.*)""",
    re.IGNORECASE | re.DOTALL,
)
_VALUE = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,'"]*))\s*(,|$)""", re.DOTALL)
_MISSING = ["?", " ?", "? ", " ? ", "\t?"]
"""A missing value, with the blanks around it that occur."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column: the categories that it declares, in their order, or None for one of numbers."""

    name: str
    categories: tuple[str, ...] | None


class ArffFile:
    """An ARFF file with rows of numbers and categories. FormatError for other types and for sparse rows.

    `blocks` gives the columns of consecutive rows: float64 with NaN for a missing number, and the position of the
    category in `Attribute.categories`, int64 with -1 for a missing one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.fdopen(open_regular(path), "rb") as file:
            self.attributes, self._begin, self._line = _header(file, path)

    def blocks(self) -> Iterator[Mapping[str, Array]]:
        """Yield all rows. CorruptDataError, which names the line, for a row that is no row of the header's columns."""
        with os.fdopen(open_regular(self.path), "rb") as file:
            file.seek(self._begin)
            row = 0
            for batch in self._batches(file):
                yield {one.name: self._values(one, batch.column(at), row) for at, one in enumerate(self.attributes)}
                row += batch.num_rows

    def _batches(self, file: Any) -> Iterator[Any]:
        names = [str(number) for number in range(len(self.attributes))]
        kinds = [pa.float64() if one.categories is None else pa.string() for one in self.attributes]

        try:
            yield from arrow_csv.open_csv(
                pa.PythonFile(_WithoutComments(file), "r"),
                arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=_BLOCK_BYTES),
                arrow_csv.ParseOptions(quote_char="'", double_quote=False, escape_char="\\"),
                arrow_csv.ConvertOptions(
                    column_types=dict(zip(names, kinds, strict=True)), null_values=_MISSING, strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )  # fmt: skip
        except pa.ArrowInvalid as error:
            said = " ".join(str(error).split())[:200]
            raise CorruptDataError(
                f"{self.path}: the rows, which begin in line {self._line + 1:,}, cannot be read: {said}"
            ) from error

    def _values(self, attribute: Attribute, values: Any, row: int) -> Array:
        if attribute.categories is None:
            return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
        trimmed = pc.utf8_trim_whitespace(values)
        codes = pc.index_in(trimmed, value_set=pa.array(attribute.categories, pa.string()), skip_nulls=True)
        known = np.asarray(pc.fill_null(codes, -1).to_numpy(zero_copy_only=False), np.int64)
        odd = (known < 0) & ~np.asarray(values.is_null())
        if odd.any():
            at = int(odd.argmax())
            raise CorruptDataError(
                f"{self.path}: {attribute.name!r} is {values[at].as_py()!r} in row {row + at:,}, which is none of the "
                f"{len(attribute.categories)} categories that the header declares"
            )
        return known


class _WithoutComments(io.RawIOBase):
    """The remaining lines of a file, without comments."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        wanted = _BLOCK_BYTES if size is None or size < 0 else size
        while not self._left:
            lines = self._file.readlines(wanted)
            if not lines:
                return b""
            self._left = b"".join(line for line in lines if not line.lstrip().startswith(b"%"))
        given, self._left = self._left[:wanted], self._left[wanted:]
        return given


def _header(file: Any, path: Path) -> tuple[tuple[Attribute, ...], int, int]:
    """Read the attributes; return them with the offset of the rows and the number of the line before them."""
    found: list[Attribute] = []
    for number in range(1, 10 * _MOST_ATTRIBUTES):
        raw = file.readline(_LONGEST_LINE)
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{path}: line {number:,} is no text in UTF-8") from error
        word = line.split(None, 1)[0].lower() if line else ""
        if word == "@data":
            if not found:
                raise CorruptDataError(f"{path} has no @attribute before its rows")
            return tuple(found), file.tell(), number
        if word == "@attribute":
            found.append(_attribute(line, path, number))
            if found[-1].name in {one.name for one in found[:-1]}:
                raise CorruptDataError(f"{path}: line {number:,} has the attribute {found[-1].name!r} again")
        elif not raw or (line and not line.startswith("%") and word != "@relation"):
            break
    raise CorruptDataError(f"{path} is no ARFF file, or was cut: its header does not end in @data")


def _attribute(line: str, path: Path, number: int) -> Attribute:
    match = _ATTRIBUTE.fullmatch(line)
    if match is None:
        raise CorruptDataError(f"{path}: line {number:,} is no attribute: {line[:80]!r}")
    name, kind = _unquoted(match["name"]), match["type"].strip()
    if kind.startswith("{"):
        return Attribute(name, _categories(kind[1:-1], path, number))
    if kind.lower() not in _NUMBERS:
        raise FormatError(f"{path}: {name!r} is of type {kind[:40]!r}; numbers and categories are supported")
    return Attribute(name, None)


def _categories(text: str, path: Path, number: int) -> tuple[str, ...]:
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _VALUE.match(text, at)
        if match is None or match.end() == at:
            raise CorruptDataError(
                f"{path}: line {number:,} has categories that cannot be read: {text[at : at + 40]!r}"
            )
        single, double, plain, _ = match.groups()
        quoted = single if single is not None else double
        found.append(plain.strip() if quoted is None else re.sub(r"\\(.)", r"\1", quoted).strip())
        at = match.end()
    if len(set(found)) < len(found) or not all(found):
        raise CorruptDataError(f"{path}: line {number:,} has a category twice, or an empty one")
    return tuple(found)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "'\"" else text
