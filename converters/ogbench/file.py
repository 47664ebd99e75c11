"""One OGBench file, open for reading: its columns, which are checked, and the rows at which trajectories end.

A trajectory of T steps has T + 1 rows, the last of which holds the last observation; what came of the action in that
row is not in the file. In the files that OGBench publishes, `terminals` marks this row:

    observations  s0 s1 s2 s3     terminals  0 0 0 1

In the compact form, in which `ogbench.load_dataset` returns a dataset, `valids` is 0 in this row, and `terminals` marks
the row before it, too:

    observations  s0 s1 s2 s3     terminals  0 0 1 1     valids  1 1 1 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.converter import require_trust
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, dtype_name, role_of, safe_part
from ..files.columns import BLOCK_BYTES, blocks
from ..files.npz import NpzFile, array_names, first_name_of_cut

OBSERVATIONS = "observations"
ACTIONS = "actions"
TERMINALS = "terminals"
VALIDS = "valids"
REWARDS = "rewards"
NEXT_OBSERVATIONS = "next_observations"
REQUIRED = (OBSERVATIONS, ACTIONS, TERMINALS)
OBSERVATION: Key = ("observation",)
_OTHERS = {
    NEXT_OBSERVATIONS: "in OGBench's files the following row is the next observation",
    "timeouts": "OGBench's files have none",
}
"""Columns that show another layout with the same names, and why; `rewards` do where there are no `valids`."""
_REGULAR = (
    "where these are arrays of ogbench.load_dataset, terminals are time limits: add --from table --map "
    "observation=observations,next.observation=next_observations,action=actions --ends -,terminals"
)
_DEEPEST_PARTS = 32


def looks_like_ogbench(path: Path) -> bool:
    """Return whether a file is an npz with OGBench's columns and none of another layout, or begins as one was cut."""
    names = set(array_names(path))
    if names:
        return names >= set(REQUIRED) and not names & _OTHERS.keys() and (VALIDS in names or REWARDS not in names)
    return first_name_of_cut(path) == OBSERVATIONS


@dataclass(frozen=True, slots=True)
class NpzColumn:
    """A column of the file as a field of TED: `name` in the file, and when it is known."""

    name: str
    field: Field
    timing: Timing


class OgbenchFile(Closing):
    """An open file; FormatError for columns that contradict each other, CorruptDataError for damaged files.

    `rows` counts the rows. `is_compact` states whether the file is in the compact form. `columns` lists observation,
    action, the rewards that a compact file of a single task has, and further columns with a row each, which are states;
    `dropped` names what is none of these. `starts` and `stops` have the first row of each trajectory and the one after
    its last; `unfinished` states that the row of the last observation of the last trajectory is not marked. `trusted`
    allows arrays of Python objects to be read, which are pickles; without it UsageError for a column that has to be
    there.
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
        self.is_compact = VALIDS in names
        for name, why in _OTHERS.items():
            if name in names:
                raise FormatError(
                    f"{self.path} has {name!r}, and is not in OGBench's layout: {why}",
                    hint=_REGULAR if name == NEXT_OBSERVATIONS else "",
                )
        if REWARDS in names and not self.is_compact:
            raise FormatError(f"{self.path} has 'rewards', and is not in OGBench's layout: OGBench's files have none")
        self._flags = (TERMINALS, VALIDS) if self.is_compact else (TERMINALS,)
        required = (*REQUIRED, *self._flags[1:])
        for name in required:
            if name not in names:
                raise FormatError(f"{self.path} has no {name!r}; OGBench's files have {', '.join(REQUIRED)}")
            if self._file.is_pickled(name):
                require_trust(
                    self.path, self._trusted, f"{name!r} is a pickle of Python objects, which can run anything"
                )
            if why := self._not_rows(name):
                raise FormatError(f"{self.path}: {name!r} cannot be read as rows: {why}")
        lengths = {name: self._file.form(name)[1][0] for name in required}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(f"{self.path}: its columns have different numbers of rows ({listed})")
        for name in (*self._flags, *([REWARDS] if REWARDS in names and not self._not_rows(REWARDS) else [])):
            shape = self._file.form(name)[1]
            if math.prod(shape[1:]) != 1:
                raise FormatError(f"{self.path}: {name!r} has rows of shape {list(shape[1:])}, expected one number")
        if not lengths[OBSERVATIONS]:
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
        for name in sorted(set(self._file.names) - {*REQUIRED, *self._flags}):
            key = REWARD if name == REWARDS else ("info", *map(safe_part, name.split("/")))
            if why := self._why_not(name, key, taken):
                dropped.append(Dropped(name, why))
                continue
            taken.append(key)
            columns.append(self._column(name, key, "result" if name == REWARDS else "state"))
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
        row = () if key == REWARD else shape[1:]
        return NpzColumn(name, Field(key, dtype_name(dtype), row, role_of(key)), timing)

    def _trajectories(self) -> tuple[Array, Array, bool]:
        last = self._rows_where(TERMINALS, 1)
        if self.is_compact:
            marked, last = last, self._rows_where(VALIDS, 0)
            expected = np.union1d(last, last[last > 0] - 1)
            wrong = np.setxor1d(marked, expected)
            wrong = wrong[wrong != self.rows - 1]  # set there by ogbench, also where a trajectory is unfinished
            if len(wrong):
                raise FormatError(
                    f"{self.path}: terminals and valids contradict each other in row {wrong[0]:,}: terminals mark the "
                    "rows in which valids is 0, and each row before one"
                )
        stops = last + 1
        unfinished = not len(stops) or int(stops[-1]) != self.rows
        if unfinished:
            stops = np.append(stops, self.rows)
        return np.concatenate(([0], stops[:-1])), stops, unfinished

    def _rows_where(self, name: str, value: int) -> Array:
        """Return the rows in which a flag has a value, int64."""
        width = self._file.form(name)[0].itemsize
        found = [np.zeros(0, np.int64)]
        for start, stop in blocks(self.rows, max(1, BLOCK_BYTES // (8 * width))):
            rows = self.read(name, start, stop).reshape(-1)
            odd = (rows != 0) & (rows != 1)
            if odd.any():
                at = int(odd.argmax())
                raise FormatError(f"{self.path}: {name} is {rows[at]} in row {start + at:,}, expected 0 or 1")
            found.append(start + np.flatnonzero(rows == value))
        return np.concatenate(found)


def opened(paths: list[Path], *, trusted: bool) -> list[OgbenchFile]:
    """Open files that have the same columns; FormatError where they differ. Closes all of them if one is refused.

    `trusted` is passed to `OgbenchFile`.
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
