"""CSV files as tables, and folders of CSV or Parquet files with equal columns as one table."""

from __future__ import annotations

import bisect
import csv
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ...core.errors import CorruptDataError, FormatError, UsageError
from ...core.format.contracts import Array
from ...core.format.files import open_regular
from ...core.ted.schema import inexact_as_float
from ..files.readers import natural_order
from .columns import TEXT, TableColumn, TableFile, inexact_note, leading_zeros_note, require_rows
from .parquet import ParquetFile

_BLOCK_BYTES = 4 << 20
_LONGEST_ROW = 64 << 20
_MOST_COLUMNS = 20_000
_DELIMITERS = (",", "\t", ";")
_ARROW = {"bool": pa.bool_(), "int64": pa.int64(), "uint64": pa.uint64(), "float64": pa.float64(), TEXT: pa.string()}
_NUMBER = r"^[ \t]*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*$"
_WHOLE = re.compile(r"[ \t]*([+-]?)[0-9]{1,400}[ \t]*")
_ZEROS = re.compile(r"[ \t]*[+-]?0[0-9]+[ \t]*")
_MAYBE_ZEROS = re.compile(rb"(?:\A|[,;\t\n\"])[ \t]*[+-]?0[0-9]")
_EXACT = 1 << 53
"""Whole numbers up to this one are exact in float64."""
_WRONG_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)")
_LINE_END, _QUOTE = b'\n"'
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of the file: rows `[row, row + rows)` in the bytes `[offset, offset + size)`, from line `line` on."""

    offset: int
    size: int
    row: int
    rows: int
    line: int


@dataclass(slots=True)
class _FoundKinds:
    """The kinds of values in a column.

    Attributes:
        kinds: the first row of each kind of value.
        negative: whether there are negative whole numbers.
        inexact: the first row with a whole number that float64 cannot hold, None if there is none.
        zeros: the first row with a whole number with leading zeros, None if there is none.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    negative: bool = False
    inexact: int | None = None
    zeros: int | None = None

    def add(self, kind: str, row: int) -> None:
        self.kinds.setdefault(kind, row)

    def add_whole(self, values: Array, row: int) -> None:
        """Add whole numbers, int64 or uint64, from row `row` on."""
        self.negative = self.negative or bool((values < 0).any())
        if self.inexact is None and (odd := inexact_as_float(values)).any():
            self.inexact = row + int(odd.argmax())

    def add_cells(self, cells: Sequence[str | None], row: int) -> bool:
        """Add the text of cells that Arrow reads as floats; return whether all of them fit into uint64.

        Arrow reads whole numbers as floats if one exceeds int64, or if another cell is a fraction.
        """
        whole = [None if cell is None else _WHOLE.fullmatch(cell) for cell in cells]
        if self.inexact is None:
            odd = (at for at, found in enumerate(whole) if found and int(found[0]) != float(found[0]))
            self.inexact = next((row + at for at in odd), None)
        there = [found for found, cell in zip(whole, cells, strict=True) if cell is not None]
        return all(found and not found[1] and int(found[0]) < 1 << 64 for found in there)

    @property
    def dtype(self) -> str:
        """The element type that can hold all values, `text` if there is none.

        It is float64 for fractions beside whole numbers, and for whole numbers that do not fit into 64 bits.
        """
        kinds = self.kinds.keys() - {"empty", "nan"}
        if kinds == {"int64", "uint64"} and not self.negative:
            return "uint64"
        if len(kinds) > 1 and kinds <= {"int64", "uint64", "float64"}:
            return "float64"
        return next(iter(kinds)) if len(kinds) == 1 else TEXT


class CsvFile(TableFile):
    """A CSV file in UTF-8 whose first line names the columns, separated by commas, tabs or semicolons.

    A column is bool (`true`, `false`), int64, uint64, float64 or else text. A column with empty or NaN cells cannot be
    mapped.
    """

    kind = "CSV file"
    refuses_nan = True

    def __init__(self, path: Path, *, block_bytes: int = _BLOCK_BYTES) -> None:
        self.path = path
        self._block_bytes = block_bytes
        self._opened = os.fdopen(open_regular(path), "rb")
        try:
            self._delimiter, self._names, begin = read_header(self._opened, path)
            self._blocks = list(self._scanned(begin))
            self.columns = {name: self._column(name) for name in self._names}
        except BaseException:
            self.close()
            raise
        self._parsed: tuple[Mapping[str, str], int, dict[str, Array]] | None = None

    def _scanned(self, begin: int) -> Iterator[_Block]:
        """Parse the whole file once, and yield its blocks."""
        found = {name: _FoundKinds() for name in self._names}
        row, line, content = 0, 1, b""
        for offset, content in self._raw_blocks(begin):
            first_line = line + 1
            line += content.count(b"\n")
            if len(self._names) > 1 and not content.strip():
                continue
            table, padded = self._parse(content, None, None, first_line), _MAYBE_ZEROS.search(content) is not None
            for name in self._names:
                cells = partial(self._cells_of, content, name, first_line)
                values = table.column(name).combine_chunks()
                _look_at(values, cells, row, found[name])
                is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
                if padded and is_number and found[name].zeros is None:
                    at = (at for at, cell in enumerate(cells()) if cell and _ZEROS.fullmatch(cell))
                    found[name].zeros = next((row + one for one in at), None)
            if table.num_rows:
                yield _Block(offset, len(content), row, table.num_rows, first_line)
            row += table.num_rows
        if not row:
            raise FormatError(f"{self.path} has no steps: no row follows its first line")
        if content and not content.endswith(b"\n"):
            self.notes = (f"the last line of {self.path.name} has no line end: the file may have been cut there",)
        self._kinds = {name: seen.dtype for name, seen in found.items()}
        self._odd = found
        self._rows = row

    def _column(self, name: str) -> TableColumn:
        kind, notes = self._kinds[name], []
        if kind == "float64" and (row := self._odd[name].inexact) is not None:
            notes.append(inexact_note(name, self.place(row)))
        if kind != TEXT and (row := self._odd[name].zeros) is not None:
            notes.append(leading_zeros_note(name, kind, self.place(row)))
        return TableColumn(name, kind, (), self._rows, note="; ".join(notes))

    def keep_text(self, name: str) -> None:
        self._kinds[name] = TEXT
        self._odd[name] = _FoundKinds({TEXT: 0})
        self.columns = {**self.columns, name: self._column(name)}

    def first_inexact(self, name: str) -> int | None:
        """Return the first row of a column with a whole number that float64 cannot hold, None if there is none."""
        return self._odd[name].inexact

    def first_zeros(self, name: str) -> int | None:
        """Return the first row of a column with a whole number with leading zeros, None if there is none."""
        return self._odd[name].zeros

    def has_negative(self, name: str) -> bool:
        """Return whether a column has negative whole numbers."""
        return self._odd[name].negative

    def _raw_blocks(self, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of whole rows with their offsets."""
        self._opened.seek(begin)
        held, offset = b"", begin
        while True:
            more = self._opened.read(self._block_bytes)
            held += more
            end = len(held) if not more else _last_row_end(held)
            if end:
                yield offset, held[:end]
                held, offset = held[end:], offset + end
            if not more:
                return
            if len(held) > _LONGEST_ROW:
                raise CorruptDataError(
                    f"{self.path}: a row of more than {_LONGEST_ROW >> 20} MiB begins at byte {offset:,}: a quote is "
                    "not closed, or it is not a CSV file"
                )

    def _parse(self, content: bytes, names: Sequence[str] | None, types: dict[str, Any] | None, line: int) -> Any:
        try:
            return arrow_csv.read_csv(
                pa.BufferReader(content),
                arrow_csv.ReadOptions(
                    column_names=list(self._names), use_threads=False, block_size=len(content) + 1
                ),
                arrow_csv.ParseOptions(
                    delimiter=self._delimiter, newlines_in_values=True,
                    ignore_empty_lines=len(self._names) > 1,
                ),
                arrow_csv.ConvertOptions(
                    null_values=[""], strings_can_be_null=True, include_columns=list(names) if names else None,
                    column_types=types, auto_dict_encode=False,
                ),
            )  # fmt: skip
        except pa.ArrowInvalid as error:
            said = " ".join(str(error).split())[:200]
            wrong = _WRONG_ROW.search(said)
            if wrong is None:
                raise CorruptDataError(f"{self.path}, from line {line:,} on: {said}") from error
            exact = b'"' not in content and b"\n\n" not in content and b"\n\r\n" not in content
            where = f"line {line + int(wrong[1]) - 1:,}" + ("" if exact else ", or one below it,")
            raise CorruptDataError(
                f"{self.path}: {where} has {wrong[3]} cells, expected {wrong[2]}: {wrong[4]!r}"
            ) from error

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return self._read({name: self._kinds[name] for name in names}, start, stop)

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        if column.dtype not in ("int64", "uint64"):
            return self._read({column.name: TEXT}, start, stop)[column.name]
        if self.first_zeros(column.name) is not None:
            self._require_one_form(column.name, max(0, start - 1), stop)
        return self._read({column.name: column.dtype}, start, stop)[column.name]

    def _require_one_form(self, name: str, start: int, stop: int) -> None:
        """Raise FormatError if the key of a row is the number of the row before in another form, as `07` after `7`."""
        cells = [cell.strip() for cell in self._read({name: TEXT}, start, stop)[name].tolist()]
        for row, (before, cell) in enumerate(pairwise(cells), start + 1):
            if before != cell and int(before) == int(cell):
                found = f"column {name!r} has {cell!r} in {self.place(row)} after {before!r}"
                raise FormatError(
                    f"{self.path}: {found}, which may be one episode or two",
                    hint="write the key of an episode in one form, or different numbers for two episodes",
                )

    def _read(self, kinds: Mapping[str, str], start: int, stop: int) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {name: [] for name in kinds}
        for number in self._overlapping(start, stop):
            block, rows = self._blocks[number], self._rows_of(kinds, number)
            for name in kinds:
                parts[name].append(rows[name][max(0, start - block.row) : stop - block.row])
        found = {}
        for name, kind in kinds.items():
            found[name] = np.concatenate(parts[name]) if parts[name] else np.zeros(0, object if kind == TEXT else kind)
            require_rows(self.path, name, found[name], start, stop)
        return found

    def _overlapping(self, start: int, stop: int) -> range:
        rows = [block.row for block in self._blocks]
        first = max(0, int(np.searchsorted(rows, start, side="right")) - 1)
        return range(first, int(np.searchsorted(rows, stop, side="left")))

    def _rows_of(self, kinds: Mapping[str, str], number: int) -> dict[str, Array]:
        """Parse the cells of some columns in a block as these kinds; the last result is kept."""
        if self._parsed is not None and self._parsed[:2] == (kinds, number):
            return self._parsed[2]
        block = self._blocks[number]
        types = {name: _ARROW[kind] for name, kind in kinds.items()}
        table = self._parse(self._bytes_of(block), list(kinds), types, block.line)
        if table.num_rows != block.rows:
            raise CorruptDataError(f"{self.path} changed while it was read")
        found = {}
        for name, kind in kinds.items():
            values = table.column(name).combine_chunks()
            if kind == TEXT:
                values = pc.fill_null(values, "")
            elif values.null_count:
                raise CorruptDataError(f"{self.path} changed while it was read")
            found[name] = np.asarray(values.to_numpy(zero_copy_only=False))
        self._parsed = (dict(kinds), number, found)
        return found

    def _bytes_of(self, block: _Block) -> bytes:
        if self._opened.closed:
            self._opened = os.fdopen(open_regular(self.path), "rb")
        self._opened.seek(block.offset)
        return self._opened.read(block.size)

    def require_numbers(self, column: TableColumn) -> None:
        kinds = self._odd[column.name].kinds
        for kind, row in kinds.items():
            if kind in ("empty", "nan"):
                what = "is empty" if kind == "empty" else "is NaN"
                raise FormatError(
                    f"{self.path}: column {column.name!r} {what} in {self.place(row)}, expected a number",
                    hint="fill or remove such rows first",
                )
        if column.is_text:
            row, cell = self._first_text(column.name)
            raise FormatError(
                f"{self.path}: column {column.name!r} has {cell!r} in {self.place(row)}, expected a number"
            )

    def require_text(self, column: TableColumn) -> None:
        if self._odd[column.name].kinds.keys() - {"empty"} != {TEXT}:
            self.require_numbers(column)  # a cell that is not a number, in a column of numbers

    def require_key(self, column: TableColumn) -> None:
        row = self._odd[column.name].kinds.get("empty")
        if row is not None:
            raise FormatError(
                f"{self.path}: column {column.name!r} is empty in {self.place(row)}: the row belongs to no episode"
            )

    def _first_text(self, name: str) -> tuple[int, str]:
        """Return row and text of the first cell that is not a number, or differs in kind from the bools before it."""
        kinds = self._odd[name].kinds
        row = kinds.get(TEXT, max(kinds.values(), default=0))
        cells = self._cells(name, row)
        at = next((at for at, cell in enumerate(cells) if TEXT in kinds and not _is_number(cell)), 0)
        return row + at, cells[at]

    def _cells(self, name: str, row: int) -> list[str]:
        """Return the cells of a column from a row to the end of its block as text; "" for an empty one."""
        block = self._blocks[self._overlapping(row, row + 1)[0]]
        cells = self._cells_of(self._bytes_of(block), name, block.line)
        return [cell or "" for cell in cells[row - block.row :]]

    def _cells_of(self, content: bytes, name: str, line: int) -> list[str | None]:
        """Return the cells of a column in the bytes of a block as text; None for an empty one."""
        cells: list[str | None] = self._parse(content, [name], {name: pa.string()}, line).column(name).to_pylist()
        return cells

    def place(self, row: int) -> str:
        """Return the line of a row, as editors count lines: line ends inside quotes count, too."""
        for block in self._blocks:
            if block.row <= row < block.row + block.rows:
                content = self._bytes_of(block)
                ends = [*_row_ends(content).tolist(), len(content)]
                begins = [at for at, end in pairwise([0, *ends]) if len(self._names) == 1 or content[at:end].strip()]
                return f"line {block.line + content[: begins[row - block.row]].count(_LINE_END):,}"
        return super().place(row)

    def rest(self) -> None:
        """Close the file until it is read again."""
        self._opened.close()
        self._parsed = None

    def close(self) -> None:
        self._opened.close()


def read_header(file: Any, path: Path) -> tuple[str, tuple[str, ...], int]:
    """Read the line that names the columns; return the delimiter, the names, and the offset after the line.

    Raises FormatError if it is not text or has only numbers, and for names that are empty or occur twice.
    """
    file.seek(0)
    raw = file.readline(1 << 20)
    if b"\0" in raw or not raw.endswith(b"\n"):
        raise FormatError(f"{path} is not a table: it is neither HDF5, npz nor Parquet, and has no first line of text")
    try:
        line = raw.removeprefix(_BOM).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: its first line is not UTF-8 text") from error
    delimiter = next((one for one in _DELIMITERS if one in line), ",")
    try:
        names = tuple(name.strip() for name in next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error as error:
        raise FormatError(f"{path}: its first line cannot be read ({error})") from error
    if all(_is_number(name) for name in names):
        raise FormatError(
            f"{path}: its first line has numbers, expected the names of the columns",
            hint="add a first line such as obs_0,obs_1,action,reward,done",
        )
    for at, name in enumerate(names):
        if not name:
            raise FormatError(f"{path}: column {at + 1} of {len(names)} has no name in the first line")
        if name in names[:at]:
            raise FormatError(f"{path}: two columns are called {name!r}", hint="rename one in the first line")
    if len(names) > _MOST_COLUMNS:
        raise FormatError(f"{path}: its first line has {len(names):,} cells, at most {_MOST_COLUMNS:,} are read")
    return delimiter, names, len(raw)


def _look_at(values: Any, cells: Callable[[], Sequence[str | None]], row: int, found: _FoundKinds) -> None:
    """Add the kinds of values in a block of a column; `row` is its first row, `cells` returns the cells as text."""
    kind = values.type
    nulls = np.asarray(values.is_null()) if values.null_count else None
    if nulls is not None:
        found.add("empty", row + int(nulls.argmax()))
    if pa.types.is_null(kind) or not len(values):
        return
    first = row + (int((~nulls).argmax()) if nulls is not None else 0)
    if pa.types.is_floating(kind):
        nan = np.asarray(pc.fill_null(pc.is_nan(values), False))
        if nan.any():
            found.add("nan", row + int(nan.argmax()))
        numbers = np.abs(values.to_numpy(zero_copy_only=False))
        large = bool(((numbers >= _EXACT) & (numbers < np.inf)).any())
        found.add("uint64" if large and found.add_cells(cells(), row) else "float64", first)
    elif pa.types.is_integer(kind):
        found.add("int64", first)
        found.add_whole(np.asarray(pc.fill_null(values, 0)), row)
    elif pa.types.is_boolean(kind):
        found.add("bool", first)
    else:
        found.add(TEXT, first)
        if pa.types.is_string(kind) and pc.any(pc.match_substring_regex(values, _NUMBER)).as_py():
            found.add("number", first)


def _row_ends(content: bytes) -> Array:
    """Return the offsets after the line ends that end a row, which are those outside quotes."""
    codes = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(codes == _LINE_END)
    if b'"' in content:
        inside = np.cumsum(codes == _QUOTE) % 2 == 1
        ends = ends[~inside[ends]]
    return ends + 1


def _last_row_end(content: bytes) -> int:
    """Return the offset after the last line end outside quotes, 0 if there is none."""
    if b'"' not in content:
        return content.rfind(b"\n") + 1
    return int(next(reversed(_row_ends(content)), 0))


def _is_number(text: str | None) -> bool:
    try:
        return text is not None and not math.isnan(float(text))
    except ValueError:
        return False


SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".pq"})
_MOST_NOTES = 3


class TableFiles(TableFile):
    """CSV files or Parquet files below a folder as one table, in natural order of their names.

    A column has one type in the whole table, which can hold the values of all files. One file is open at a time.

    Args:
        folder: the folder.
        pattern: chooses files, like `*.csv` or `**/*.parquet`; all files by default.

    Raises:
        UsageError: the pattern matches no file.
        FormatError: there are files of both kinds, or a file is not a table.
    """

    kind = "folder of CSV or Parquet files"

    def __init__(self, folder: Path, pattern: str | None = None) -> None:
        self.path = folder
        self._paths = list(table_files(folder, pattern))
        self._kind = self._common_kind()
        self._parts: list[CsvFile | ParquetFile] = []
        self._open: CsvFile | ParquetFile | None = None
        starts = [0]
        for path in self._paths:
            part = self._kind(path)
            rows = next(iter(part.columns.values())).rows if part.columns else 0
            if not rows:
                raise FormatError(f"{path} has no steps: it has no rows")
            self._parts.append(part)
            starts.append(starts[-1] + rows)
            part.rest()
        self.starts, self._rows = starts[:-1], starts[-1]
        self.file_names = [path.relative_to(folder).as_posix() for path in self._paths]
        self.refuses_nan = self._kind.refuses_nan
        self.notes = tuple(self._notes())
        self.columns = {
            name: self._column(name) for name in dict.fromkeys(n for part in self._parts for n in part.columns)
        }

    def _common_kind(self) -> type[CsvFile | ParquetFile]:
        kinds: dict[type[CsvFile | ParquetFile], Path] = {}
        for path in self._paths:
            with os.fdopen(open_regular(path), "rb") as file:
                kinds.setdefault(ParquetFile if file.read(4) == b"PAR1" else CsvFile, path)
        if len(kinds) > 1:
            raise FormatError(
                f"{self.path} has CSV files and Parquet files: {kinds[CsvFile].name}, {kinds[ParquetFile].name}",
                hint="name those of one table, as in --files '*.csv'",
            )
        return next(iter(kinds))

    def _notes(self) -> Iterator[str]:
        found = [note for part in self._parts for note in part.notes]
        yield from found[:_MOST_NOTES]
        if len(found) > _MOST_NOTES:
            yield f"{len(found) - _MOST_NOTES:,} more files have such a note"

    def _column(self, name: str) -> TableColumn:
        """Describe a column of all files, with the type that can hold all values, and why it cannot be mapped."""
        there = [part.columns.get(name) for part in self._parts]
        known = [one for one in there if one is not None]
        first, dtypes = known[0], dict.fromkeys(one.dtype for one in known)
        places = {one.dtype: file for one, file in zip(there, self.file_names, strict=True) if one is not None}
        listed = " and ".join(f"{dtype} in {places[dtype]}" for dtype in dtypes)
        dtype, why, note = first.dtype, "", ""
        if len(known) < len(there):
            why = f"{self.file_names[there.index(None)]} has no such column"
        elif odd := next((one for one in known if one.why), None):
            why = f"{odd.why} ({self.file_names[known.index(odd)]})"
        elif len({one.shape for one in known}) > 1:
            other = next(at for at, one in enumerate(known) if one.shape != first.shape)
            shapes = f"{list(first.shape)}, and {list(known[other].shape)} in {self.file_names[other]}"
            why = f"its rows have the shape {shapes}"
        elif TEXT in dtypes:
            dtype = TEXT
            why = f"it is {listed}" if len(dtypes) > 1 and self._kind is ParquetFile else ""
        elif "bool" in dtypes and len(dtypes) > 1:
            why = f"it is {listed}"
        else:
            dtype = np.result_type(*dtypes).name
            if dtypes.keys() == {"int64", "uint64"} and not any(part.has_negative(name) for part in self._parts):
                dtype = "uint64"
            note = "; ".join(self._column_notes(name, dtype))
        return TableColumn(name, dtype, first.shape, self._rows, why, note=note)

    def _column_notes(self, name: str, dtype: str) -> Iterator[str]:
        if np.dtype(dtype).kind == "f":
            inexact = ((number, part.first_inexact(name)) for number, part in enumerate(self._parts))
            yield from [inexact_note(name, self._place(at, row)) for at, row in inexact if row is not None][:1]
        zeros = ((number, part.first_zeros(name)) for number, part in enumerate(self._parts))
        yield from [leading_zeros_note(name, dtype, self._place(at, row)) for at, row in zeros if row is not None][:1]

    def keep_text(self, name: str) -> None:
        for part in self._parts:
            if name in part.columns:
                part.keep_text(name)
        self.columns = {**self.columns, name: self._column(name)}

    def _part(self, number: int) -> CsvFile | ParquetFile:
        part = self._parts[number]
        if self._open is not None and self._open is not part:
            self._open.rest()
        self._open = part
        return part

    def _spans(self, start: int, stop: int) -> Iterator[tuple[CsvFile | ParquetFile, int, int]]:
        """Yield the files with rows in `[start, stop)`, each with the range of its own rows."""
        number = max(0, bisect.bisect_right(self.starts, start) - 1)
        while start < stop:
            begin = self.starts[number]
            end = self.starts[number + 1] if number + 1 < len(self.starts) else self._rows
            yield self._part(number), start - begin, min(stop, end) - begin
            start, number = min(stop, end), number + 1

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {name: [] for name in names}
        for part, first, last in self._spans(start, stop):
            for name, rows in part.read(names, first, last).items():
                parts[name].append(rows)
        return {name: self._joined(self.columns[name], found) for name, found in parts.items()}

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        found = [part.read_key(column, first, last) for part, first, last in self._spans(start, stop)]
        return np.concatenate(found)

    def _joined(self, column: TableColumn, parts: Sequence[Array]) -> Array:
        if not parts:
            return np.zeros((0, *column.shape), object if column.is_text else column.dtype)
        return np.concatenate(parts if column.is_text else [rows.astype(column.dtype, copy=False) for rows in parts])

    def require_numbers(self, column: TableColumn) -> None:
        if column.is_text or not column.why:
            for number, part in enumerate(self._parts):
                if column.name in part.columns:
                    self._part(number).require_numbers(part.columns[column.name])
        super().require_numbers(column)

    def require_text(self, column: TableColumn) -> None:
        super().require_text(column)
        dtypes = {part.columns[column.name].dtype for part in self._parts}
        for number, part in enumerate(self._parts):
            found = part.columns[column.name]
            if len(dtypes) == 1:
                self._part(number).require_text(found)
            elif found.is_text:  # in another file the column has numbers: report the first text
                self._part(number).require_numbers(found)

    def require_key(self, column: TableColumn) -> None:
        super().require_key(column)
        if column.note and self._kind is ParquetFile:
            raise FormatError(f"{self.path}: column {column.name!r} cannot be the episode key: {column.note}")
        for number, part in enumerate(self._parts):
            self._part(number).require_key(part.columns[column.name])

    def files(self) -> list[Path]:
        return self._paths

    def place(self, row: int) -> str:
        """Return the file of a row, and the place in it."""
        number = max(0, bisect.bisect_right(self.starts, row) - 1)
        return self._place(number, row - self.starts[number])

    def _place(self, number: int, row: int) -> str:
        return f"{self.file_names[number]}, {self._part(number).place(row)}"

    def close(self) -> None:
        for part in self._parts:
            part.close()


def table_files(folder: Path, pattern: str | None = None) -> Iterator[Path]:
    """Yield the files below a folder that make a table, in natural order; UsageError if a pattern matches none."""
    if pattern is None:
        found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    else:
        parts = PurePath(pattern).parts
        if PurePath(pattern).is_absolute() or ".." in parts or not parts:
            raise UsageError(f"--files is {pattern!r}, expected a pattern of files in {folder}", hint="like '*.csv'")
        found = [path for path in folder.glob(pattern) if path.is_file()]
        if not found:
            raise UsageError(f"--files {pattern!r} matches no file in {folder}")
    yield from sorted(found, key=lambda path: natural_order(path.relative_to(folder).as_posix()))
