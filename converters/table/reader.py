"""Reads tables whose columns a user maps: HDF5, npz, CSV, Parquet, and folders of npy, CSV or Parquet files.

Loads h5py or pyarrow where a file needs it; never torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, Key, encode_text, length_key, row_bytes, ted_fields
from .boundaries import EndColumns, TableBoundaries, find_boundaries
from .columns import TableColumn, TableFile
from .mapping import Mapped, TableMapping, parse_map, rows_of
from .opening import open_table

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


PIECE_BYTES = 16 << 20
"""TED bytes of the rows in memory at a time."""
_TABLE_ROWS = 1 << 18


class TableReader(Reader):
    """A table with a row a step, in which options state what each column is. Never detected: choose it by name.

    Options: `map` has pairs of a TED key and columns, `ends` the columns of termination and time limit, `episode_key`
    the column that states the episode of a row, after `file,` where each file counts its own episodes, after `-,` where
    they may go on in the next file. `files` is a pattern of the files of a folder that are the table; each is an
    episode where neither of the two says otherwise. `trust_pickle` allows arrays of Python objects in npz and npy files
    to be read. The rule is in docs/reference/table.md.

    Raises UsageError for options that name what is not there, FormatError for columns that cannot be mapped and for an
    episode key that comes again, CorruptDataError for damaged files.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"map", "ends", "episode_key", "files", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return False: what the columns mean cannot be detected."""
        return False

    def on_open(self) -> None:
        """Open the file and look the columns up."""
        self._file: TableFile = open_table(
            self.path, trusted=bool(self.options.get("trust_pickle")), files=self.options.get("files")
        )
        try:
            self._map = TableMapping(self._file, parse_map(self.options.get("map") or ()))
            self._ends = EndColumns.of(self._file, self.options.get("ends"), self.options.get("episode_key"))
            self._rows = self._common_length()
        except BaseException:
            self._file.close()
            raise
        self._found: TableBoundaries | None = None

    def _common_length(self) -> int:
        columns = {column.name: column for column in (*self._map.columns, *self._ends.all)}
        lengths = {name: column.rows for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(
                f"{self.path}: the columns that are mapped have different numbers of rows ({listed}), and each has to "
                "have one a step"
            )
        rows = next(iter(lengths.values()))
        if not rows:
            raise FormatError(f"{self.path} has no steps: its columns are empty")
        return rows

    def _surveyed(self, progress: Callable[[int], None] = lambda episodes: None) -> TableBoundaries:
        if self._found is None:
            found = find_boundaries(self._file, self._rows, self._ends, progress)
            self._by_number = {number: at for at, number in enumerate(found.numbers)}
            self._widths = self._map.text_widths()
            self._fields = tuple(self._map.source_fields(self._widths))
            self._step = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(self._fields))))
            rewards = [column for one in self._map.fields if one.field.key == REWARD for column in one.columns]
            self._all = _Window(self._file, [*self._map.columns, *self._ends.flags], self._step, self._rows)
            self._outcome = _Window(self._file, [*rewards, *self._ends.flags], _TABLE_ROWS, self._rows)
            self._found = found
        return self._found

    @property
    def _has_all_next(self) -> bool:
        return all(one.after is not None for one in self._map.fields if one.timing == "state")

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the flags and the episode key, and find the episodes."""
        found = self._surveyed(progress)
        nan = nan_notes(self._file, self._map.columns)
        used = {column.name for column in (*self._map.columns, *self._ends.all)}
        return SourceFacts(
            source="table",
            id=self.path.name if self.path.is_dir() else self.path.stem,
            fields=self._fields,
            episode_numbers=found.numbers,
            steps=self._rows,
            renamed_keys=self._map.renamed | self._renamed_ends(found),
            dropped_keys=tuple(
                Dropped(name, f"it is not mapped{f', and {column.why}' if column.why else ''}")
                for name, column in self._file.columns.items()
                if name not in used
            ),
            notes=(
                *self._file.notes,
                *self._map.notes,
                *found.notes,
                *nan,
                *self._converted_types(),
                *(column.note for column in self._map.columns if column.note),
            ),
            lengths=np.diff(found.stops, prepend=0).tolist(),
            final_missing=not self._has_all_next,
            last_terminated=None if self._has_all_next else found.last_terminated.tolist(),
        )

    def _renamed_ends(self, found: TableBoundaries) -> dict[str, str]:
        ends = self._ends
        named = {
            "next.terminated": ends.terminated, "next.truncated": ends.truncated,
            "episode": ends.key if found.texts is None else None,
        }  # fmt: skip
        return {column.name: name for name, column in named.items() if column is not None and column.name != name}

    def _converted_types(self) -> Iterator[str]:
        for one in self._map.fields:
            for column in (*one.columns, *(one.after or ())):
                if column.dtype != one.field.dtype:
                    yield f"{column.name} is {column.dtype}, and {one.field.dtype} in {one.field.name}"

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        begin, end = self._span(number)
        for start in range(begin, end, self._step):
            stop = min(start + self._step, end)
            more = int(stop < end)
            read = self._all.read(start, stop + more)
            columns: dict[Key, Array] = {}
            following: dict[Key, Array] = {}
            for one in self._map.fields:
                follows = one.timing == "state" and one.after is None
                for key, rows in self._rows_of(one, one.columns, read, start).items():
                    columns[key] = rows if follows else rows[: stop - start]
                for key, rows in self._rows_of(one, one.after or (), read, start).items():
                    following[key] = rows[: stop - start]
            yield self._piece(number, columns, following, read, start, stop)

    def _rows_of(
        self, one: Mapped, columns: Sequence[TableColumn], read: Mapping[str, Array], start: int
    ) -> dict[Key, Array]:
        """The rows of a field by its key, a text's with their lengths; {} for no columns."""
        if not columns:
            return {}
        if not one.is_text:
            return {one.field.key: rows_of(self.path, one, columns, read)}
        texts = self._file.encoded(columns[0], read[columns[0].name], start)
        characters, lengths = encode_text(texts, self._widths[one.field.key])
        return {one.field.key: characters, length_key(one.field.key): lengths}

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all of it where next observations are mapped."""
        if any(one.after is not None for one in self._map.fields):
            yield from self.read_episode(number)
            return
        begin, end = self._span(number)
        for start in range(begin, end, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, end)
            read = self._outcome.read(start, stop)
            rewards = [one for one in self._map.fields if one.field.key == REWARD]
            columns = {one.field.key: rows_of(self.path, one, one.columns, read) for one in rewards}
            yield self._piece(number, columns, {}, read, start, stop)

    def _span(self, number: int) -> tuple[int, int]:
        found = self._surveyed()
        at = self._by_number[number]
        return int(found.stops[at - 1]) if at else 0, int(found.stops[at])

    def _piece(
        self, number: int, columns: dict[Key, Array], following: dict[Key, Array], read: Mapping[str, Array],
        start: int, stop: int,
    ) -> Piece:  # fmt: skip
        begin, end = self._span(number)
        terminated, truncated = (
            np.zeros(stop - start, bool) if column is None else read[column.name].reshape(-1)[: stop - start] != 0
            for column in (self._ends.terminated, self._ends.truncated)
        )
        found = self._surveyed()
        if found.marks_all is not None:
            both = terminated & truncated
            terminated, truncated = (
                (terminated & ~both, truncated) if found.marks_all == self._ends.terminated
                else (terminated, truncated & ~both)
            )  # fmt: skip
        text = {} if found.texts is None else found.texts[self._by_number[number]]
        return Piece(
            number, columns, terminated, truncated, first=start == begin, last=stop == end, text=text, next=following,
            final=Final.OBSERVED if self._has_all_next else Final.MISSING,
        )  # fmt: skip

    def files(self) -> list[Path]:
        """The file, or the files of the folder."""
        return self._file.files()

    def verify_read(self) -> None:
        """Verify the checksums of the arrays that were read."""
        self._file.verify_read()

    def on_close(self) -> None:
        """Close the file."""
        self._file.close()


class _Window:
    """Rows of some columns, of which a range is kept: an episode may be far shorter than what one read brings."""

    def __init__(self, file: TableFile, columns: Sequence[TableColumn], rows: int, total: int) -> None:
        self._file = file
        self._names = list({column.name: None for column in columns})
        self._rows, self._total = rows, total
        self._start = self._stop = 0
        self._kept: dict[str, Array] = {}

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Return rows `[start, stop)`; what was given out stays valid."""
        if not self._start <= start <= self._stop:
            self._start = self._stop = start
            self._kept = {}
        if stop > self._stop and self._names:
            end = min(self._total, max(stop, self._stop + self._rows))
            read = self._file.read(self._names, self._stop, end)
            held = start - self._start
            self._kept = {
                name: np.concatenate((self._kept[name][held:], rows))
                if name in self._kept and start < self._stop
                else rows
                for name, rows in read.items()
            }
            self._start, self._stop = (start if start < self._stop else self._stop), end
        return {name: rows[start - self._start : stop - self._start] for name, rows in self._kept.items()}
