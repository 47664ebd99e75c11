"""The files of a run: checkpoints of a replay buffer, each of several gzip files of one array, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.ted.schema import dtype_name
from ..files.column_reader import blocks
from ..files.npz import GzipArray

OBSERVATION, ACTION, REWARD, TERMINAL = "observation", "action", "reward", "terminal"
COLUMNS = (OBSERVATION, ACTION, REWARD, TERMINAL)
ADD_COUNT, INVALID_RANGE = "add_count", "invalid_range"
_NAME = re.compile(r"(?:\$store\$_)?(\w+)_ckpt\.(\d{1,9})\.gz", re.ASCII)
LOGS = "replay_logs"
"""The folder inside that of a run."""
_MOST_INVALID = 1 << 16
_SMALL_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of checkpoint `number`, by the names of their arrays; `others` are those that have no meaning here."""

    number: int
    paths: Mapping[str, Path]
    others: tuple[str, ...] = ()


def folder_of(path: Path) -> Path:
    """The folder that has the files: `replay_logs` in the folder of a run, or the path itself."""
    inside = path / LOGS
    return inside if inside.is_dir() else path


def checkpoints_at(path: Path) -> list[CheckpointFiles]:
    """List the checkpoints in a folder by their numbers; none for a path that is no folder."""
    folder = folder_of(path)
    if not folder.is_dir():
        return []
    found: dict[int, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        name = _NAME.fullmatch(file.name)
        if name is not None and file.is_file():
            found.setdefault(int(name[2]), {})[name[1]] = file
    known = {*COLUMNS, ADD_COUNT, INVALID_RANGE}
    return [
        CheckpointFiles(
            number,
            {name: paths[name] for name in paths if name in known},
            tuple(name for name in paths if name not in known),
        )
        for number, paths in sorted(found.items())
        if paths.keys() & {*COLUMNS}
    ]


def looks_like_run(path: Path) -> bool:
    """Return whether a folder has the frames of a checkpoint and one more of its arrays."""
    return any({OBSERVATION} < one.paths.keys() for one in checkpoints_at(path))


@dataclass(frozen=True, slots=True)
class Form:
    """Element type and shape of a row, of each of the columns."""

    columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

    def __str__(self) -> str:
        return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in self.columns.items())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a look at the small arrays of a checkpoint found.

    `terminal` are the slots after which an episode ends, int64, ascending. `quiet_bits` marks those with action 0,
    reward 0 and no terminal, packed to bits. `add_count` is how many rows were ever added to the buffer, None where it
    is not stated; `invalid` are the slots that are not to be sampled, None where they are not stated.
    """

    files: CheckpointFiles
    form: Form
    rows: int
    add_count: int | None
    invalid: tuple[int, ...] | None
    terminal: Array = field(repr=False)
    quiet_bits: Array = field(repr=False)

    def are_quiet(self, start: int, stop: int) -> bool:
        """Whether all slots `[start, stop)` have action 0, reward 0 and no terminal."""
        first = start // 8
        bits = np.unpackbits(self.quiet_bits[first : -(-stop // 8)])
        return bool(bits[start - 8 * first : stop - 8 * first].all())


def look_at(files: CheckpointFiles) -> Checkpoint:
    """Read the small arrays of a checkpoint; of the frames no more than the header.

    FormatError for arrays that are missing or contradict each other, CorruptDataError for damaged ones.
    """
    missing = [name for name in COLUMNS if name not in files.paths]
    if missing:
        raise FormatError(f"checkpoint {files.number} has no {' and no '.join(missing)} in {_folder_name(files)}")
    with CheckpointRows(files) as rows:
        count = rows.require_forms()
        add_count, invalid = _counts(files, count)
        terminal, quiet = [np.zeros(0, np.int64)], np.ones(count, bool)
        for start, stop in blocks(count, _SMALL_ROWS):
            flags = rows.read(TERMINAL, start, stop)
            odd = (flags != 0) & (flags != 1)
            if odd.any():
                at = int(odd.argmax())
                raise FormatError(
                    f"{files.paths[TERMINAL]}: terminal is {flags[at]} in row {start + at:,}, expected 0 or 1"
                )
            terminal.append(start + np.flatnonzero(flags))
            quiet[start:stop] = flags == 0
            for name in (ACTION, REWARD):
                quiet[start:stop] &= ~rows.read(name, start, stop).reshape(stop - start, -1).any(axis=1)
        rows.verify((ACTION, REWARD, TERMINAL))
        ends = np.concatenate(terminal)
        return Checkpoint(files, rows.form, count, add_count, invalid, ends, np.packbits(quiet))


def _folder_name(files: CheckpointFiles) -> Path:
    return next(iter(files.paths.values())).parent


def _counts(files: CheckpointFiles, rows: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return `add_count` and `invalid_range`; None for one that has no file."""
    count = None
    if ADD_COUNT in files.paths:
        found = _whole_numbers(files.paths[ADD_COUNT])
        if len(found) != 1 or found[0] < 0:
            raise FormatError(f"{files.paths[ADD_COUNT]} is {found[:5]}, expected one number from 0")
        count = found[0]
    if INVALID_RANGE not in files.paths:
        return count, None
    invalid = _whole_numbers(files.paths[INVALID_RANGE])
    odd = [slot for slot in invalid if not 0 <= slot < rows]
    if odd and rows:
        raise FormatError(f"{files.paths[INVALID_RANGE]} names row {odd[0]:,}, and there are {rows:,}")
    return count, tuple(invalid) if rows else ()


def _whole_numbers(path: Path) -> list[int]:
    with GzipArray(path) as array:
        if array.header.stored.kind not in "iu":
            raise FormatError(f"{path} has elements of type {array.header.stored}, expected whole numbers")
        found = array.whole(_MOST_INVALID).reshape(-1)
        array.verify()
    return [int(number) for number in found]


class CheckpointRows(Closing):
    """The columns of a checkpoint, open for reading; the files are opened when they are first asked for."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._open: dict[str, GzipArray] = {}

    def _array(self, name: str) -> GzipArray:
        if name not in self._open:
            self._open[name] = GzipArray(self._files.paths[name])
        return self._open[name]

    @property
    def form(self) -> Form:
        """Type and shape of the rows that are kept."""
        headers = {name: self._array(name).header for name in (OBSERVATION, ACTION, REWARD)}
        return Form({name: (header.dtype, header.shape[1:]) for name, header in headers.items()})

    def require_forms(self) -> int:
        """Return the number of rows; FormatError unless all columns have that, of types and shapes that make sense."""
        forms = {name: (self._array(name).header.dtype, self._array(name).header.shape) for name in COLUMNS}
        counts = {name: shape[0] if shape else 0 for name, (_, shape) in forms.items()}
        if len(set(counts.values())) > 1:
            stated = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            raise FormatError(f"checkpoint {self._files.number} has columns of different lengths: {stated} rows")
        for name, (dtype, shape) in forms.items():
            path = self._files.paths[name]
            if dtype.hasobject or dtype.kind not in "biuf" or 0 in shape[1:]:
                raise FormatError(f"{path} has rows of {dtype} {list(shape[1:])}, expected numbers")
            try:
                dtype_name(dtype)
            except SchemaError as error:
                raise FormatError(f"{path}: {error}") from error
            if not shape or (len(shape) < 3 if name == OBSERVATION else len(shape) > 1):
                expected = "[rows, height, width]" if name == OBSERVATION else "[rows]"
                raise FormatError(f"{path} has the shape {list(shape)}, expected {expected}")
        return counts[OBSERVATION]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read slots `[start, stop)` of a column; in ascending order, a file is unpacked once."""
        return self._array(name).read(start, stop)

    def verify(self, names: tuple[str, ...]) -> None:
        """Raise CorruptDataError for the first of these columns that is damaged anywhere."""
        for name in names:
            self._array(name).verify()

    def verify_read(self) -> None:
        """Raise CorruptDataError if one of the files that were opened is damaged anywhere."""
        self.verify(tuple(self._open))

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()
