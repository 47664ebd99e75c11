"""One OGBench file, open for reading: its columns, which are checked, and the rows at which trajectories end.

A trajectory of T steps has T + 1 rows: the last one, which `terminals` marks, holds the last observation. What came of
the action in that row is not in the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.encodings.pickles import require_trust
from ...core.errors import FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.manifest import Dropped
from ...core.format.row_blocks import BLOCK_BYTES, blocks
from ...core.ted.schema import ACTION, Field, Key, Timing, dtype_name, role_of, safe_part
from ..files.npz import NpzFile, array_names, first_name_of_cut

OBSERVATIONS = "observations"
ACTIONS = "actions"
TERMINALS = "terminals"
REQUIRED = (OBSERVATIONS, ACTIONS, TERMINALS)
OBSERVATION: Key = ("observation",)
_OTHERS = {
    "rewards": "OGBench's files have none",
    "next_observations": "in OGBench's files the following row is the next observation",
    "timeouts": "OGBench's files have none",
    "valids": "it is a dataset as ogbench holds it in memory, whose terminals mark two rows an episode",
}
"""Columns that show another layout with the same names, and why."""
_DEEPEST_PARTS = 32


def looks_like_ogbench(path: Path) -> bool:
    """Return whether a file is an npz with OGBench's columns and none of another layout, or begins as one was cut."""
    names = set(array_names(path))
    if names:
        return names >= set(REQUIRED) and not names & _OTHERS.keys()
    return first_name_of_cut(path) == OBSERVATIONS


@dataclass(frozen=True, slots=True)
class NpzColumn:
    """A column of the file as a field of TED: `name` in the file, and when it is known."""

    name: str
    field: Field
    timing: Timing


class OgbenchFile(Closing):
    """An open file; FormatError for columns that contradict each other, CorruptDataError for damaged files.

    `rows` counts the rows, `columns` lists observation, action and further columns with a row each, which are states;
    `dropped` names what is none of these. `starts` and `stops` have the first row of each trajectory and the one after
    its last; `unfinished` states that the last of them ends without `terminals`. `trusted` allows arrays of Python
    objects to be read, which are pickles; without it UsageError for a column that has to be there.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._trusted = trusted
        self._unread: dict[str, str] = {}
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                self._unpickle()
                self._require_layout()
                self.rows = self._file.form(OBSERVATIONS)[1][0]
                self.columns, self.dropped = self._look_around()
                self.starts, self.stops, self.unfinished = self._trajectories()
            self._file.verify(one.key for one in self.dropped if one.key in self._file.names)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a column."""
        return self._file.read(name, start, stop)

    def verify(self) -> None:
        """Raise CorruptDataError if a column has not the checksum that the archive states of it."""
        self._file.verify()

    def verify_read(self) -> None:
        """Raise what `verify` raises, of the columns that were read."""
        self._file.verify_read()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unpickle(self) -> None:
        """Read the arrays of Python objects, where they are trusted, and note why one has no rows of one type."""
        for name in self._file.names if self._trusted else ():
            if self._file.is_pickled(name) and self._file.form(name)[1]:
                try:
                    self._file.unpickle(name)
                except FormatError as error:
                    self._unread[name] = f"it{error.message.removeprefix(f'{self.path}: {name!r}')}"

    def _require_layout(self) -> None:
        names = self._file.names
        for name, why in _OTHERS.items():
            if name in names:
                raise FormatError(f"{self.path} has {name!r}, and is not in OGBench's layout: {why}")
        for name in REQUIRED:
            if name not in names:
                raise FormatError(f"{self.path} has no {name!r}; OGBench's files have {', '.join(REQUIRED)}")
            if self._file.is_pickled(name):
                require_trust(
                    self.path, self._trusted, f"{name!r} is a pickle of Python objects, which can run anything"
                )
            if why := self._not_rows(name):
                raise FormatError(f"{self.path}: {name!r} cannot be read as rows: {why}")
        lengths = {name: self._file.form(name)[1][0] for name in REQUIRED}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(f"{self.path}: its columns have different numbers of rows ({listed})")
        shape = self._file.form(TERMINALS)[1]
        if math.prod(shape[1:]) != 1:
            raise FormatError(f"{self.path}: {TERMINALS!r} has rows of shape {list(shape[1:])}, expected one number")
        if not shape[0]:
            raise FormatError(f"{self.path} has no steps: its columns are empty")

    def _not_rows(self, name: str) -> str:
        """Return why an array cannot be rows of numbers; empty where it can."""
        dtype, shape = self._file.form(name)
        if self._file.is_pickled(name):
            return self._unread.get(name) or "it is a pickle of Python objects, which --trust-pickle reads"
        if dtype.hasobject:
            return "it is text"
        try:
            dtype_name(dtype)
        except SchemaError as error:
            return str(error)
        return "" if shape else "it is a single value"

    def _look_around(self) -> tuple[tuple[NpzColumn, ...], tuple[Dropped, ...]]:
        columns = [
            self._column(OBSERVATIONS, OBSERVATION, "state"),
            self._column(ACTIONS, ACTION, "step"),
        ]
        dropped = [Dropped(name, "it is no array") for name in self._file.others]
        taken: list[Key] = []
        for name in sorted(set(self._file.names) - set(REQUIRED)):
            key = ("info", *map(safe_part, name.split("/")))
            if why := self._why_not(name, key, taken):
                dropped.append(Dropped(name, why))
                continue
            taken.append(key)
            columns.append(self._column(name, key, "state"))
        return tuple(columns), tuple(dropped)

    def _why_not(self, name: str, key: Key, taken: list[Key]) -> str:
        if why := self._not_rows(name):
            return why
        if len(key) > _DEEPEST_PARTS:
            return "it is nested too deep"
        if any(key[: len(one)] == one or one[: len(key)] == key for one in taken):
            return "another column has its name"
        rows = self._file.form(name)[1][0]
        return "" if rows == self.rows else f"it has {rows:,} rows, and the observations {self.rows:,}"

    def _column(self, name: str, key: Key, timing: Timing) -> NpzColumn:
        dtype, shape = self._file.form(name)
        return NpzColumn(name, Field(key, dtype_name(dtype), shape[1:], role_of(key)), timing)

    def _trajectories(self) -> tuple[Array, Array, bool]:
        width = self._file.form(TERMINALS)[0].itemsize
        marked = [
            start + np.flatnonzero(self._terminals(start, stop))
            for start, stop in blocks(self.rows, max(1, BLOCK_BYTES // (8 * width)))
        ]
        stops = np.concatenate(marked).astype(np.int64) + 1
        unfinished = not len(stops) or int(stops[-1]) != self.rows
        if unfinished:
            stops = np.append(stops, self.rows)
        return np.concatenate(([0], stops[:-1])), stops, unfinished

    def _terminals(self, start: int, stop: int) -> Array:
        rows = self.read(TERMINALS, start, stop).reshape(-1)
        odd = (rows != 0) & (rows != 1)
        if odd.any():
            at = int(odd.argmax())
            raise FormatError(f"{self.path}: {TERMINALS} is {rows[at]} in row {start + at:,}, expected 0 or 1")
        return rows


def opened(paths: list[Path], *, trusted: bool) -> list[OgbenchFile]:
    """Open files that have the same columns; FormatError where they differ. Closes all of them if one is refused.

    `trusted` is that of `OgbenchFile`.
    """
    files: list[OgbenchFile] = []
    try:
        for path in paths:
            files.append(OgbenchFile(path, trusted=trusted))
            if files[-1].columns != files[0].columns:
                raise FormatError(
                    f"{path} has other columns than {paths[0].name}: {_listed(files[-1])}, and {_listed(files[0])}",
                    hint="convert each of them by itself",
                )
    except (RbtoolError, OSError):
        for file in files:
            file.close()
        raise
    return files


def _listed(file: OgbenchFile) -> str:
    return ", ".join(f"{column.name} {column.field.dtype} {list(column.field.shape)}" for column in file.columns)
