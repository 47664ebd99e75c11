"""Reads and downloads OGBench's npz files: trajectories whose last row holds the last observation.

A trajectory of T steps has T + 1 rows; the action of the last row is not used, because its result is not in the file.
In the files that OGBench publishes, `terminals` marks this row:

    observations  s0 s1 s2 s3     terminals  0 0 0 1

In the compact form, in which `ogbench.load_dataset` can return a dataset, `valids` is 0 in this row, and `terminals`
marks the row before it as well:

    observations  s0 s1 s2 s3     terminals  0 0 1 1     valids  1 1 1 0

ogbench is never imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from ...core.format.contracts import Array, Closing, SourceFacts
from ...core.format.converter import Ids, LocalCache, Reader, RemoteFile, require_trust, safe_id
from ...core.format.manifest import Dropped
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource
from ...core.ted.schema import (
    ACTION,
    REWARD,
    Field,
    Key,
    Timing,
    dtype_name,
    key_name,
    role_of,
    safe_part,
)
from ..files.numpy_files import NpzFile, array_names, first_name_of_cut
from ..files.readers import (
    BLOCK_BYTES,
    ColumnEpisode,
    ColumnReader,
    EpisodeColumn,
    ReadRows,
    RowBlocks,
    blocks,
    require_single,
    why_no_key,
    zero_or_one,
)

VALIDATION = "-val"
"""The suffix of the stem of a validation file."""
_TABLE = Path(__file__).with_name("datasets.tsv")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+-v\d+", re.ASCII)


@functools.cache
def published() -> tuple[str, ...]:
    """Return the ids of all datasets, sorted."""
    return tuple(sorted(_TABLE.read_text(encoding="ascii").split()[1:]))


def is_id(name: str) -> bool:
    """Whether a name has the form of an id, like `cube-single-play-v0`."""
    return _ID.fullmatch(name) is not None


def is_large(dataset_id: str) -> bool:
    """Whether an id names an edition with 100 million steps, which is published as a folder of many files."""
    return "100m" in dataset_id.split("-")


def names_task(dataset_id: str) -> bool:
    """Whether an id names a single task of a dataset, whose rewards are not in the file."""
    return "singletask" in dataset_id.split("-")


def file_name(dataset_id: str) -> str:
    """Return the name of the file of a dataset, without its suffix.

    Ids of single tasks and of goal representations have more words than the name of their file.
    """
    parts = dataset_id.split("-")
    for word in ("singletask", "oraclerep"):
        if word in parts:
            parts = [*parts[: parts.index(word)], parts[-1]]
    return "-".join(parts)


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
"""Columns that OGBench's files do not have, and why: a file with one of them has another layout."""
_REGULAR = (
    "if these are the arrays of ogbench.load_dataset, terminals are time limits: add --from table --map "
    "observation=observations,next.observation=next_observations,action=actions --ends -,terminals"
)


def looks_like_ogbench(path: Path) -> bool:
    """Return whether a file is an npz with OGBench's columns and no others, or begins like one that was cut."""
    names = set(array_names(path))
    if names:
        return names >= set(REQUIRED) and not names & _OTHERS.keys() and (VALIDS in names or REWARDS not in names)
    return first_name_of_cut(path) == OBSERVATIONS


@dataclass(frozen=True, slots=True)
class NpzColumn:
    """A column of the file: its name there, its field in TED, and its timing."""

    name: str
    field: Field
    timing: Timing


class OgbenchFile(Closing):
    """An open file of OGBench.

    `trusted` allows reading arrays of Python objects, which are pickles. Raises FormatError for columns that contradict
    each other, CorruptDataError for damaged files, and UsageError if a required column is a pickle and not trusted.

    Attributes:
        rows: the number of rows.
        is_compact: whether the file is in the compact form.
        columns: observation, action, the rewards of a compact file of a single task, and further columns with as many
            rows, which are states.
        dropped: the members of the file that are none of these.
        starts: the first row of each trajectory.
        stops: the row after the last one of each trajectory.
        unfinished: whether the file ends without a mark, inside the last trajectory.
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
        """Raise CorruptDataError if the checksum of a column differs from the one in the archive."""
        self._file.verify()

    def verify_read(self) -> None:
        """Do the same for the columns that were read."""
        self._file.verify_read()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unpickle(self) -> None:
        """Read the arrays of Python objects if they are trusted, and remember why one cannot be converted to rows."""
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
                    f"{self.path} has {name!r}, so it is not in OGBench's layout: {why}",
                    hint=_REGULAR if name == NEXT_OBSERVATIONS else "",
                )
        if REWARDS in names and not self.is_compact:
            raise FormatError(f"{self.path} has 'rewards', so it is not in OGBench's layout: OGBench's files have none")
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
            require_single(f"{self.path}: {name!r} has", self._file.form(name)[1][1:])
        if not lengths[OBSERVATIONS]:
            raise FormatError(f"{self.path} has no steps: its columns are empty")

    def _not_rows(self, name: str) -> str:
        """Return why an array does not consist of rows of numbers; "" if it does."""
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
        dropped = [Dropped(name, "it is not an array") for name in self._file.others]
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
        if why := why_no_key(key, taken, "column"):
            return why
        rows = self._file.form(name)[1][0]
        return "" if rows == self.rows else f"it has {rows:,} rows, but the observations have {self.rows:,}"

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
            wrong = wrong[wrong != self.rows - 1]  # ogbench sets it there even if the trajectory is unfinished
            if len(wrong):
                raise FormatError(
                    f"{self.path}: terminals and valids contradict each other in row {wrong[0]:,}: terminals have to "
                    "mark every row in which valids is 0, and the row before it"
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
            rows = zero_or_one(self.read(name, start, stop).reshape(-1), f"{self.path}: {name}", start=start)
            found.append(start + np.flatnonzero(rows == value))
        return np.concatenate(found)


def opened(paths: list[Path], *, trusted: bool) -> list[OgbenchFile]:
    """Open files that have the same columns; close all of them and raise FormatError if columns differ."""
    files: list[OgbenchFile] = []
    try:
        for path in paths:
            files.append(OgbenchFile(path, trusted=trusted))
            if files[-1].columns != files[0].columns:
                raise FormatError(
                    f"{path} and {paths[0].name} have different columns: {_listed(files[-1])}, and {_listed(files[0])}",
                    hint="convert each of them separately",
                )
    except (RbtoolError, OSError):
        for file in files:
            file.close()
        raise
    return files


def _listed(file: OgbenchFile) -> str:
    return ", ".join(f"{column.name} {column.field.dtype} {list(column.field.shape)}" for column in file.columns)


SPLITS = ("train", "val")
_ZERO = "zero"


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """Rows `[start, stop)` of a file, the last of which only has the last observation; `number` is the episode's."""

    number: int
    file: int
    start: int
    stop: int
    unfinished: bool

    def __len__(self) -> int:
        return self.stop - self.start - 1


class OgbenchReader(ColumnReader):
    """Reads an OGBench file, or a folder with `NAME.npz`, perhaps `NAME-val.npz`, and no other npz file.

    `observations` become `observation`, `actions` become `action`; `qpos`, `qvel`, `button_states` and any other column
    with as many rows become states, `info.NAME`. All rows of a trajectory but the last are its steps; the observation
    of the last row is the one after the last step, and its action is left out. Files in the compact form, with
    `valids`, may have `rewards`, which become `next.reward`. All episodes end truncated. They are numbered in the order
    of the file, with the episodes of `NAME-val.npz` after the others; if there are both files, every episode has its
    split (`train` or `val`) as text.

    Options: `reward`, if it is `zero`, adds rewards of 0, which the files do not have; `filter_key` chooses a split;
    `id` is the id of the published dataset, and reads a file together with its `-val` file. `trust_pickle` allows
    reading arrays of Python objects.

    Raises FormatError for columns that contradict each other, and CorruptDataError for damaged files.
    """

    option_names = frozenset({"reward", "filter_key", "id", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file, or the first one in the folder, has OGBench's columns."""
        files = _files_at(path)
        return bool(files) and looks_like_ogbench(files[0])

    def on_open(self) -> None:
        """Open the files, check their structure and find the trajectories."""
        files = _files_at(self.path)
        if not files:
            raise FormatError(f"{self.path} is neither an npz file nor a folder with exactly one dataset of OGBench")
        self.id = self.options.get("id")
        if self.id is not None and self.path.is_file():
            files = [files[0], _validation_of(files[0])]
        reward = self.options.get("reward")
        if reward not in (None, _ZERO):
            raise UsageError(f"--reward is {reward!r}, expected zero: OGBench's files have no rewards")
        self._zeros = reward == _ZERO
        self._files = opened(files, trusted=bool(self.options.get("trust_pickle")))
        self._reads_rewards = any(column.field.key == REWARD for column in self._files[0].columns)
        if self._zeros and self._reads_rewards:
            raise UsageError(f"{self._files[0].path} has rewards of its own", hint="leave out --reward")
        self._all = _trajectories(self._files)
        kept = {one.number for one in self._chosen()}
        several = len(self._files) > 1
        self.episodes = [
            ColumnEpisode(
                len(one) if one.number in kept else 0, truncated=not one.unfinished, observed=True,
                text={"split": SPLITS[one.file]} if several else None,
            )
            for one in self._all
        ]  # fmt: skip
        if not any(one.length for one in self.episodes):
            raise FormatError(f"{self.path} has no steps: each of its trajectories is a single row")
        columns = self._files[0].columns
        rows = self.piece_rows((column.field, column.timing) for column in columns)
        self.columns = [EpisodeColumn(one.field, one.timing, self._rows_of(one, rows)) for one in columns]
        if self._zeros:
            rewards = Field(REWARD, "float32", (), "reward")
            self.columns.append(
                EpisodeColumn(rewards, "result", lambda number, start, stop: np.zeros(stop - start, np.float32))
            )

    def _rows_of(self, column: NpzColumn, rows: int) -> ReadRows:
        """Return a function that reads the rows of a column of an episode, with blocks of `rows` rows cached."""
        shape = column.field.shape

        def blocks_of(file: OgbenchFile) -> RowBlocks:
            def read(start: int, stop: int) -> Array:
                return file.read(column.name, start, stop).reshape(stop - start, *shape)

            return RowBlocks(read, file.rows, rows)

        blocks = [blocks_of(file) for file in self._files]

        def read(number: int, start: int, stop: int) -> Array:
            one = self._all[number]
            return blocks[one.file].read(one.start + start, one.start + stop)

        return read

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the trajectories were found when the files were opened."""
        progress(sum(one.length > 0 for one in self.episodes))
        file = self._files[0]
        return self.facts_of(
            "ogbench",
            self.id_or(file.path.stem),
            list(self._notes()),
            dropped=file.dropped,
            renamed={column.name: key_name(column.field.key) for column in file.columns},
        )

    def note_of_empty(self, numbers: Sequence[int]) -> str:
        """Return no note: `_notes_on` names the episodes without steps."""
        return ""

    def _chosen(self) -> list[_Trajectory]:
        split = self.options.get("filter_key")
        if split is None:
            return self._all
        if len(self._files) == 1:
            raise UsageError(f"{self.path} is one file without splits", hint="leave out --filter-key")
        if split not in SPLITS:
            raise UsageError(f"--filter-key is {split!r}; the splits of {self.path} are {', '.join(SPLITS)}")
        return [one for one in self._all if one.file == SPLITS.index(split)]

    def _notes(self) -> Iterator[str]:
        marks = {"valids is 0" if file.is_compact else "terminals is 1" for file in self._files}
        yield f"episodes end where {' or '.join(sorted(marks))}, in the row of the last observation; they are truncated"
        if len(self._files) > 1:
            chosen = self._chosen()
            ranges = [[one.number for one in chosen if one.file == number] for number in range(len(self._files))]
            parts = [
                f"{numbers[0]}:{numbers[-1] + 1} are {file.path.name} ({split})"
                for numbers, file, split in zip(ranges, self._files, SPLITS, strict=True)
                if numbers
            ]
            yield f"episodes {' and '.join(parts)}"
        elif _validation_of(self._files[0].path).is_file():
            yield f"{_validation_of(self._files[0].path).name} is not read: give the folder to read both files"
        if self._zeros:
            yield "rewards are 0, as --reward zero says: the file has none"
        elif not self._reads_rewards:
            yield "there are no rewards in the file, and no next.reward (--reward zero adds rewards of 0)"
        if self.id is not None and names_task(str(self.id)):
            yield f"{self.id} is the file {file_name(str(self.id))}, which does not have the rewards of the task"
        for number, file in enumerate(self._files):
            trajectories = [one for one in self._chosen() if one.file == number]
            if trajectories:
                yield from _notes_on(file, trajectories)

    def files(self) -> list[Path]:
        """Return the one file, or both."""
        return [file.path for file in self._files]

    def verify_read(self) -> None:
        """Compare the arrays that were read with their checksums."""
        for file in self._files:
            file.verify_read()

    def on_close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _trajectories(files: list[OgbenchFile]) -> list[_Trajectory]:
    found: list[_Trajectory] = []
    for number, file in enumerate(files):
        last = len(file.stops) - 1
        found += [
            _Trajectory(len(found) + at, number, start, stop, file.unfinished and at == last)
            for at, (start, stop) in enumerate(zip(file.starts.tolist(), file.stops.tolist(), strict=True))
        ]
    return found


def _notes_on(file: OgbenchFile, trajectories: list[_Trajectory]) -> Iterator[str]:
    single = [one.number for one in trajectories if not len(one)]
    if single:
        which = f"episode {single[0]} of {file.path.name} is" if len(single) == 1 else (
            f"{len(single):,} episodes of {file.path.name} (first: {single[0]}) are"
        )  # fmt: skip
        yield f"{which} left out: one row, which is not a step"
    last = trajectories[-1]
    if last.unfinished and len(last):
        rows = last.stop - last.start
        yield f"the last {rows:,} rows of {file.path.name} end without a mark: an unfinished episode, which is kept"


def _validation_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}{VALIDATION}.npz")


def _files_at(path: Path) -> list[Path]:
    """Return the file itself, or `NAME.npz` and `NAME-val.npz` of a folder without other npz files; else []."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    found = sorted(file for file in path.iterdir() if file.suffix == ".npz" and file.is_file())
    plain = [file for file in found if _validation_of(file) in found] if len(found) > 1 else found
    return [*plain, *(file for file in found if file not in plain)] if len(plain) == 1 and len(found) <= 2 else []


_SUFFIX = ".npz"


def file_names(dataset_id: str) -> tuple[str, str]:
    """Return the names of the file of a dataset and of its validation file."""
    name = file_name(dataset_id)
    return f"{name}{_SUFFIX}", f"{name}{VALIDATION}{_SUFFIX}"


class OgbenchCache(LocalCache):
    """The folder in which ogbench caches downloads: two files for each dataset, without subfolders."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the file of a dataset; DatasetNotFoundError unless it and its validation file are in the folder."""
        safe_id(dataset_id)
        if not is_id(dataset_id):
            raise not_found(dataset_id, list(published()), self.source)
        for name in file_names(dataset_id):
            if not (self.folder / name).is_file():
                raise DatasetNotFoundError(
                    f"the local {self.source} cache {self.folder} has no dataset {dataset_id!r}: looked for {name}",
                    hint=f"rbtool download ogbench {dataset_id} fetches it; {self.variable} names the folder, if it is "
                    "another",
                )
        return self.folder / file_names(dataset_id)[0]

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Yield the ids of all datasets whose two files are in the folder."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if is_id(path.stem) and path.with_name(file_names(path.stem)[1]).is_file():
                yield path.stem


class OgbenchSource(MirrorSource):
    """Downloads from OGBench's server, or from the mirrors in `OGBENCH_URL` (base URLs, tried in their order).

    A dataset is two files. A file is accepted if it has OGBench's columns with the checksums in its archive; otherwise
    the next mirror is tried. Ids that are not in the list of published ones are requested if they have the form of an
    id.
    """

    name = "ogbench"
    title = "OGBench"
    bases_variable = "OGBENCH_URL"
    defaults = ("https://rail.eecs.berkeley.edu/datasets/ogbench",)
    signatures = (b"PK\x03\x04",)
    server_hint = "OGBench's server is down at times: try later, or name a mirror: OGBENCH_URL=BASE"
    local_cache = OgbenchCache("ogbench", "OGBENCH_DATASET_DIR", "~/.ogbench/data")

    def list_ids(self) -> Ids:
        """List the published ids, which are part of this package, without a request."""
        return Ids(published())

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of both files on each mirror."""
        return {name: [f"{base}/{name}" for base in self.bases] for name in file_names(dataset_id)}

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Request size and version of both files."""
        if not is_id(dataset_id):
            raise not_found(dataset_id, list(published()), self.name)
        if is_large(dataset_id):
            raise DatasetNotFoundError(
                f"{dataset_id} is published as a folder of many files, which cannot be downloaded as one dataset",
                hint=f"fetch its files from {self.remote}/{dataset_id}, and convert each: rbtool convert FILE.npz DEST",
            )
        files: list[RemoteFile] = []
        for path, addresses in self.addresses(dataset_id).items():
            try:
                with self.explained():
                    files.append(self.described(path, addresses))
            except DatasetNotFoundError as error:
                if file_name(dataset_id) in published():
                    raise
                raise not_found(dataset_id, list(published()), self.name) from error
        return files

    def require_readable(self, path: Path) -> None:
        """Read a file; FormatError if it is not in OGBench's layout, CorruptDataError if a checksum differs."""
        with OgbenchFile(path) as file:
            file.verify()
