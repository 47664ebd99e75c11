"""Reads demonstrations of the imitation library (HumanCompatibleAI), which is never imported.

There are two forms. An npz file concatenates the arrays of all trajectories, and `indices` has the rows at which the
actions are split; a trajectory has one observation more than actions. A folder is a Hugging Face dataset of Arrow or
Parquet files with a trajectory in each row.
"""

from __future__ import annotations

import io
import json
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, SourceFacts
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Field, Key, Role, Timing, dtype_name, row_bytes, safe_part
from ..files.arrow import STATE, ArrowPart, saved_files
from ..files.numpy_files import NpzFile, array_names, first_name_of_cut
from ..files.pickles import PickledArray, PickledList, PickleReader, Value
from ..files.readers import (
    ColumnEpisode,
    ColumnReader,
    EndMeaning,
    EpisodeColumn,
    RowBlocks,
    meaning_of_ends,
    refuse_ends,
)

OBS, ACTS, REWS, TERMINAL, INFOS = "obs", "acts", "rews", "terminal", "infos"
TIME_LIMIT = "TimeLimit.truncated"
"""The info that gym sets in a step that reaches the time limit."""
PLACES: dict[str, tuple[Key, Role, Timing]] = {
    OBS: (("observation",), "observation", "state"),
    ACTS: (ACTION, "action", "step"),
    REWS: (REWARD, "reward", "result"),
}


class Trajectories(Closing):
    """The trajectories of a file or a folder.

    Attributes:
        path: the file or folder.
        columns: the columns of the trajectories.
        lengths: the number of steps of each trajectory.
        terminal: the flag `terminal` of each trajectory.
        limits: for each trajectory, whether the infos of its last step mark the time limit; None if not known.
        dropped: the arrays and columns that are left out.
    """

    path: Path
    columns: Sequence[EpisodeColumn]
    lengths: list[int]
    terminal: list[bool]
    limits: list[bool] | None = None
    dropped: Sequence[Dropped] = ()

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that are read."""

    def verify_read(self) -> None:
        """Raise CorruptDataError if the checksum of a part that was read differs; files without checksums pass."""


def field_of(path: Path, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> tuple[Field, Timing]:
    """Return the field of a column; FormatError for elements that are not numbers, and rewards that are vectors."""
    key, role, timing = PLACES[name]
    try:
        element = dtype_name(dtype)
    except (SchemaError, TypeError) as error:
        raise FormatError(f"{path}: {name!r} has elements of type {dtype}, which are not numbers") from error
    if name == REWS and tuple(shape):
        raise FormatError(f"{path}: rews have rows of shape {list(shape)}, expected one number")
    return Field(key, element, tuple(shape), role), timing


def numbers_of(name: str, values: Sequence[Any]) -> Array | str:
    """Return values as an array with a row for each, or a sentence that says why this is not possible."""
    try:
        array = np.array(values)
    except ValueError:
        return "its values have different shapes"
    if array.dtype.kind not in "biuf":
        return f"its values are {'text' if array.dtype.kind in 'US' else 'no numbers'}"
    return array


INDICES = "indices"
_NPZ_REQUIRED = (OBS, ACTS, INDICES, TERMINAL)
_MOST_BOUNDS = 256 << 20
_MOST_INFOS = 256 << 20
"""The largest pickle of infos that is read, in bytes."""
_INFOS_AT_ONCE = 4096


def looks_like_npz(path: Path) -> bool:
    """Return whether a file is an npz with imitation's arrays, or begins like one that was cut; never raises."""
    names = set(array_names(path))
    return names >= set(_NPZ_REQUIRED) if names else first_name_of_cut(path) == OBS


class NpzTrajectories(Trajectories):
    """An open npz file; `trusted` allows reading its infos, which are a pickle."""

    def __init__(self, path: Path, piece_bytes: int, *, trusted: bool) -> None:
        self.path = path
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                for name in _NPZ_REQUIRED:
                    if name not in self._file.names:
                        raise FormatError(f"{path} has no {name!r}; imitation's files have {', '.join(_NPZ_REQUIRED)}")
                self._cut()
                names = [name for name in (OBS, ACTS, REWS) if name in self._file.names]
                self.columns = [self._column(name, piece_bytes) for name in names]
            known = {*_NPZ_REQUIRED, REWS, INFOS}
            dropped = [
                Dropped(name, "imitation's files have no such array") for name in self._file.names if name not in known
            ]
            dropped += self._infos(trusted) if INFOS in self._file.names else []
            self.dropped = dropped
        except BaseException:
            self.close()
            raise

    def _cut(self) -> None:
        """Read and check where trajectories start and end."""
        for name in _NPZ_REQUIRED:
            if len(self._file.form(name)[1]) < 1:
                raise FormatError(f"{self.path}: {name!r} is a single value")
        terminal, indices = (self._file.whole(name, _MOST_BOUNDS) for name in (TERMINAL, INDICES))
        rows, steps, count = self._file.form(OBS)[1][0], self._file.form(ACTS)[1][0], len(terminal)
        if terminal.ndim != 1 or ((terminal != 0) & (terminal != 1)).any():
            raise FormatError(f"{self.path}: terminal has values other than 0 and 1")
        if not indices.size and indices.ndim == 1:
            indices = indices.astype(np.int64)  # NumPy stores the empty indices of a single trajectory as float64
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) != count - 1:
            raise FormatError(
                f"{self.path}: indices are {indices.dtype} {list(indices.shape)}, expected {count - 1:,} whole numbers "
                f"for {count:,} values of terminal"
            )
        bounds = [0, *indices.tolist(), steps]
        lengths = np.diff(bounds)
        if (lengths < 0).any() or bounds[-2] > steps:
            raise FormatError(f"{self.path}: indices do not ascend from 0 to the {steps:,} rows of acts")
        if rows != steps + count:
            raise FormatError(
                f"{self.path}: obs has {rows:,} rows, expected {steps + count:,} for {steps:,} actions in {count:,} "
                "trajectories"
            )
        if REWS in self._file.names and self._file.form(REWS)[1][:1] != (steps,):
            raise FormatError(f"{self.path}: rews have shape {list(self._file.form(REWS)[1])}, but acts {steps:,} rows")
        self.lengths, self.terminal = lengths.tolist(), (terminal != 0).tolist()
        self._starts = np.array(bounds[:-1], np.int64)

    def _column(self, name: str, piece_bytes: int) -> EpisodeColumn:
        dtype, shape = self._file.form(name)
        field, timing = field_of(self.path, name, dtype, shape[1:])
        rows = max(1, piece_bytes // max(1, row_bytes([field])))
        blocks = RowBlocks(partial(self._file.read, name), shape[0], rows)
        starts = self._starts + np.arange(len(self._starts)) if name == OBS else self._starts
        return EpisodeColumn(field, timing, partial(_read, blocks, starts))

    def _infos(self, trusted: bool) -> list[Dropped]:
        if not self._file.is_pickled(INFOS):
            return [Dropped(INFOS, "it is not an array of objects")]
        if not trusted:
            return [Dropped(INFOS, "it is a pickle, which --trust-pickle reads")]
        data = self._file.raw(INFOS, _MOST_INFOS)
        with PickleReader(f"{self.path}: infos", len(data)) as reader:
            found = reader.load(io.BytesIO(data), len(data))
            steps = int(sum(self.lengths))
            if not isinstance(found, PickledList) or len(found) != steps:
                raise CorruptDataError(f"{self.path}: infos are not one dictionary for each of {steps:,} steps")
            values, limits = _by_name(reader, found)
        if limits:
            stops = np.cumsum(self.lengths) - 1
            self.limits = [
                bool(length) and limits.get(int(stop), False) for length, stop in zip(self.lengths, stops, strict=True)
            ]
        return self._add_infos(values, steps)

    def _add_infos(self, values: dict[str, list[Any]], steps: int) -> list[Dropped]:
        dropped = [] if values else [Dropped(INFOS, "it is empty")]
        columns = list(self.columns)
        for name, rows in values.items():
            found = numbers_of(name, rows) if len(rows) == steps else f"it is in {len(rows):,} of {steps:,} steps"
            if isinstance(found, str):
                dropped.append(Dropped(f"{INFOS}.{name}", found))
                continue
            field = Field(("info", safe_part(name)), found.dtype.name, found.shape[1:], "info")
            columns.append(EpisodeColumn(field, "result", partial(_kept, found, self._starts)))
        self.columns = columns
        return dropped

    def files(self) -> list[Path]:
        return [self.path]

    def verify_read(self) -> None:
        self._file.verify_read()

    def close(self) -> None:
        self._file.close()


def _read(blocks: RowBlocks, starts: Array, number: int, start: int, stop: int) -> Array:
    first = int(starts[number])
    return blocks.read(first + start, first + stop)


def _kept(array: Array, starts: Array, number: int, start: int, stop: int) -> Array:
    first = int(starts[number])
    return array[first + start : first + stop]


def _by_name(reader: PickleReader, found: PickledList) -> tuple[dict[str, list[Any]], dict[int, bool]]:
    """Return the values of each name in a list of infos, and the flags for time limits by step.

    Old versions of gym set the flag only in the step that reaches the time limit, so it is False in steps without it.
    If any value is not a flag, no time limits are returned.
    """
    values: dict[str, list[Any]] = {}
    limits: dict[int, bool] = {}
    for start in range(0, len(found), _INFOS_AT_ONCE):
        infos = reader.items(found, start, min(start + _INFOS_AT_ONCE, len(found)))
        for step, info in enumerate(infos, start):
            for name, value in (info if isinstance(info, dict) else {}).items():
                values.setdefault(name, []).append(_plain(reader, value))
                if name == TIME_LIMIT and (limit := _flag(reader, value)) is not None:
                    limits[step] = limit
    if len(limits) < len(values.get(TIME_LIMIT, ())):
        return values, {}
    if limits:
        values[TIME_LIMIT] = [limits.get(step, False) for step in range(len(found))]
    return values, limits


def _flag(reader: PickleReader, value: Value) -> bool | None:
    """Return a flag, which may be a bool or an array of one; None for anything else."""
    found = np.asarray(_plain(reader, value))
    return bool(found.reshape(())) if found.dtype == bool and found.size == 1 else None


def _plain(reader: PickleReader, value: Value) -> Any:
    if isinstance(value, PickledArray):
        return reader.rows(value)
    return _plain_list(reader, value) if isinstance(value, PickledList) else value


def _plain_list(reader: PickleReader, value: PickledList) -> Sequence[Any]:
    return reader.items(value, 0, min(len(value), _INFOS_AT_ONCE))


_REQUIRED = (OBS, ACTS, TERMINAL)
_Limit: TypeAlias = Literal["yes", "no", "absent", "unknown"]
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def looks_like_folder(path: Path) -> bool:
    """Return whether a file or a folder has imitation's columns; raises OSError and the errors of pyarrow."""
    files = arrow_files(path)
    return bool(files) and ArrowPart(files[0]).names >= set(_REQUIRED)


def arrow_files(path: Path) -> list[Path]:
    """Return the Arrow or Parquet files of a dataset, in its order; [] for anything else."""
    if path.is_file():
        return [path] if path.suffix in (".parquet", ".arrow") else []
    if not path.is_dir():
        return []
    if (path / STATE).is_file():
        return saved_files(path)
    return sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))


class FolderTrajectories(Trajectories):
    """The open files of a dataset; one whole trajectory is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = arrow_files(path)
        self._parts = [ArrowPart(file) for file in self._files]
        names = self._parts[0].names
        for part in self._parts:
            if part.names != names or not names >= set(_REQUIRED):
                raise FormatError(
                    f"{part.path} has the columns {', '.join(sorted(part.names))}, expected {', '.join(_REQUIRED)}"
                )
        self._names = [name for name in (OBS, ACTS, REWS) if name in names]
        known = {*_REQUIRED, REWS, INFOS}
        dropped = [Dropped(name, "imitation's datasets have no such column") for name in names - known]
        self.dropped = (
            [*dropped, Dropped(INFOS, "it is text of jsonpickle, one for each step")] if INFOS in names else dropped
        )
        self._stops: list[int] = []
        self._forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._look_over(INFOS in names)
        self._rows: Iterator[Any] = iter(())
        self._next = 0
        self._held: dict[str, Array] = {}
        self._number = -1
        self.columns = []
        for name in self._names:
            field, timing = field_of(path, name, *self._forms[name])
            self.columns.append(EpisodeColumn(field, timing, partial(self._read, name)))

    def _look_over(self, has_infos: bool) -> None:
        """Read every trajectory once, for its length and flags."""
        self.lengths, self.terminal = [], []
        limits: list[_Limit] = []
        for row in self._all([*self._names, TERMINAL, *([INFOS] if has_infos else [])]):
            number = len(self.lengths)
            arrays = {name: self._array(row, name, number) for name in self._names}
            for name, array in arrays.items():
                form = array.dtype, array.shape[1:]
                if len(array) and self._forms.setdefault(name, form) != form:
                    raise FormatError(f"{self.path}: {name} of trajectory {number} have another form than before")
            steps = len(arrays[ACTS])
            if len(arrays[OBS]) != steps + 1 or (REWS in arrays and len(arrays[REWS]) != steps):
                counts = ", ".join(f"{len(array):,} {name}" for name, array in arrays.items())
                raise FormatError(f"{self.path}: trajectory {number} has {counts}, expected one more of {OBS}")
            flag = row.column(TERMINAL)[0].as_py()
            if not isinstance(flag, bool):
                raise FormatError(f"{self.path}: terminal of trajectory {number} is {flag!r}, expected true or false")
            self.lengths.append(steps)
            self.terminal.append(flag)
            limits.append(_limit_of(row.column(INFOS)) if has_infos else "unknown")
        if not self.lengths or ACTS not in self._forms:
            raise FormatError(f"{self.path} has no steps")
        if "unknown" not in limits and not {"yes", "no"}.isdisjoint(limits):
            self.limits = [one == "yes" for one in limits]

    def _all(self, names: list[str]) -> Iterator[Any]:
        for part in self._parts:
            yield from part.batches(names, 1)  # a row is a whole trajectory, of any length

    def _array(self, row: Any, name: str, number: int) -> Array:
        """Return a column of one trajectory `[rows, *shape]`."""
        values = row.column(name)
        what = f"{self.path}: {name} of trajectory {number}"
        if values.null_count or not any(test(values.type) for test in _LISTS):
            raise FormatError(f"{what} is not a list")
        values = values.flatten()
        rows, shape = len(values), list[int]()
        while any(test(values.type) for test in _LISTS):
            lengths = pc.unique(pc.list_value_length(values)).to_pylist()
            if len(lengths) > 1 or None in lengths:
                raise FormatError(f"{what} has rows of different shapes")
            shape.append(int(lengths[0]) if lengths else 0)
            values = values.flatten()
        if not any(test(values.type) for test in _NUMBERS):
            raise FormatError(f"{what} has elements of type {values.type}, which are not numbers")
        if values.null_count:
            raise FormatError(f"{what} has missing values (null)")
        array: Array = values.to_numpy(zero_copy_only=False)
        return array.reshape(rows, *shape)

    def _read(self, name: str, number: int, start: int, stop: int) -> Array:
        if self._number != number:
            self._go_to(number)
        return self._held[name][start:stop]

    def _go_to(self, number: int) -> None:
        if self._next > number or not self._next:
            self._rows, self._next = self._all(self._names), 0
        row = None
        while self._next <= number:
            row = next(self._rows, None)
            self._next += 1
        if row is None:
            raise CorruptDataError(f"{self.path} has become shorter while it was read")
        self._held = {name: self._array(row, name, number) for name in self._names}
        self._number = number

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        self._held, self._rows = {}, iter(())


def _limit_of(infos: Any) -> _Limit:
    """Return whether the infos of the last step mark the time limit; `unknown` if they cannot be read.

    Old versions of gym set the flag only in a step that reaches the limit, so it may be `absent`.
    """
    values = infos.flatten()
    if not len(values):
        return "absent"
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return "unknown"
    try:
        info = json.loads(values[len(values) - 1].as_py() or "")
    except (ValueError, RecursionError):
        return "unknown"
    if not isinstance(info, dict):
        return "unknown"
    found = info.get(TIME_LIMIT, "absent")
    return "absent" if found == "absent" else "unknown" if not isinstance(found, bool) else "yes" if found else "no"


class ImitationReader(ColumnReader):
    """Reads an npz file, or a folder that `imitation.data.serialize.save` wrote, of Arrow or Parquet files.

    `obs` becomes `observation`, `acts` becomes `action`, and `rews` becomes `next.reward`. Episodes are numbered from 0
    in their order. `terminal` states that a trajectory is complete, also if a time limit ended it. Infos that are
    numbers in every step become `next.info.NAME`.

    Options: `ends` states what `terminal` means: `terminated` (as in imitation, the default) or `truncated`.
    `trust_pickle` allows reading the infos of npz files.

    Raises FormatError for arrays that contradict each other, CorruptDataError for damage.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path has imitation's arrays or columns."""
        try:
            return (path.is_file() and looks_like_npz(path)) or looks_like_folder(path)
        except (
            RbtoolError,
            OSError,
            ValueError,
            LookupError,
            RuntimeError,
            NotImplementedError,
            zipfile.BadZipFile,
        ) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the files and read the ends of trajectories."""
        self._found: Trajectories
        if self.path.is_file() and looks_like_npz(self.path):
            self._found = NpzTrajectories(
                self.path, self.piece_bytes, trusted=bool(self.options.get("trust_pickle"))
            )  # fmt: skip
        else:
            self._found = FolderTrajectories(self.path)
        self.columns = self._found.columns
        self._meaning = self._meaning_of_terminal()
        limits = self._found.limits or [not self._meaning.terminated] * len(self._found.lengths)
        self.episodes = [
            ColumnEpisode(length, terminated=terminal and not limit, truncated=terminal and limit, observed=True)
            for length, terminal, limit in zip(self._found.lengths, self._found.terminal, limits, strict=True)
        ]

    def _meaning_of_terminal(self) -> EndMeaning:
        if self._found.limits is not None:
            refuse_ends(self.path, self.options, f"has infos with {TIME_LIMIT}, which state what ends episodes")
            return EndMeaning(terminated=True, note=f"time limits are taken from the infos ({TIME_LIMIT})")
        why = "terminal is set at the end of every complete trajectory, at terminal states and time limits alike"
        return meaning_of_ends(self.options, "terminated", why)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the ends of trajectories were read when the files were opened."""
        progress(len(self.episodes))
        notes = [self._meaning.note] if self._meaning.note else []
        fragments = self._found.terminal.count(False)
        if fragments:
            notes.append(
                f"terminal is not set in {fragments:,} of {len(self.episodes):,} trajectories: unfinished episodes"
            )
        if not any(column.field.role == "reward" for column in self.columns):
            notes.append(f"there are no {REWS}, so next.reward is missing")
        return self.facts_of("imitation", self.path.stem, notes, dropped=self._found.dropped)

    def files(self) -> list[Path]:
        """Return the file, or the files with rows."""
        return self._found.files()

    def verify_read(self) -> None:
        """Compare the arrays that were read with their checksums."""
        self._found.verify_read()

    def on_close(self) -> None:
        """Close the files."""
        self._found.close()
