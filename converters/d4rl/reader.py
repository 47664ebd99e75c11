"""Reads and downloads D4RL's flat HDF5 files. It imports h5py, but neither d4rl nor gym nor torch.

A file is one long table: every column has a row for each step. The members of `metadata/` describe the file, and become
documents. Some files have no columns at their root, but in chunks of rows, in the groups `virtual/0`, `virtual/1`, …

The ends of episodes depend on the flags that a file has:

- `timeouts`: a step with `terminals` or `timeouts` ends an episode. In the antmaze files, where `terminals` mark every
  step near the goal, only `timeouts` do.
- `episode_terminals` (d3rlpy 1) without `timeouts`: only these end an episode.
- neither: a step with `terminals` ends an episode, and so does the time limit of the environment. In the antmaze files
  only the time limit does.
- neither, and no known time limit: a step with `terminals` ends an episode, and so does a step whose
  `next_observations` differ from the observation in the following row.

The steps after the last end are an unfinished episode, in which the recording stops.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np

from ...core.encodings.h5 import HDF5_SIGNATURE, begins_as_h5, stated_bytes
from ...core.encodings.hdf5_files import H5Rows, HeapValues, absurd_size, datasets_in, open_h5, root_members
from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.converter import Catalogue, CatalogueEntry, Ids, LocalCache, Reader, RemoteFile, safe_id
from ...core.format.documents import json_file, written_time
from ...core.format.locate import OptionNeededError
from ...core.format.manifest import Dropped, is_inside
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource, hint_on_failure
from ...core.ted.episodes import Final, rows_equal
from ...core.ted.schema import (
    ACTION,
    REWARD,
    Field,
    Key,
    Timing,
    dtype_name,
    key_name,
    row_bytes,
    safe_part,
    ted_fields,
)
from ..files.hdf5 import MARK, h5_file_at, other_files_note, plain_value, require_whole_h5
from ..files.readers import (
    BLOCK_BYTES,
    DAMAGED,
    OUTCOME_ROWS,
    RowBlocks,
    SurveyedReader,
    blocks,
    reading,
    require_single,
    zero_or_one,
)

_TABLE = Path(__file__).with_name("datasets.tsv")
"""The 179 datasets that D4RL publishes, one line for each id: its file, the time limit of its environment, and its size
and checksum, if known. Several ids may share a file: the long-horizon editions of the Adroit data differ from the other
editions only in the time limit.
"""
_V0_ANTMAZE = (
    "timeouts in the v0 files of antmaze are out of step with the resets of its environment (D4RL issue 77): the v2 "
    "file has them repaired"
)
_SUCCESSORS = {
    r"(pen|door|hammer|relocate)-(human|cloned|expert)": r"\1-\2",
    r"antmaze-(umaze|medium|large)(-play|-diverse)?": r"antmaze-\1\2",
    r"kitchen-(complete|partial|mixed)": r"kitchen-\1",
    r"maze2d-(open|umaze|medium|large)(-dense)?": r"pointmaze-\1\2",
    r"minigrid-(fourrooms(-random)?)": r"minigrid-\1",
}
"""Patterns of ids of D4RL, and the names of their successors in Minari, both without versions."""


@dataclass(frozen=True, slots=True)
class D4rlDataset:
    """A published dataset.

    `file` is its path below the base URL, `horizon` the time limit of its environment in steps. `size` (in bytes) and
    `sha256` are None if not known.
    """

    id: str
    file: str
    horizon: int
    size: int | None
    sha256: str | None

    @property
    def file_name(self) -> str:
        """The name of the file in the cache of the d4rl package."""
        return self.file.rpartition("/")[2]

    @property
    def is_antmaze(self) -> bool:
        """Whether `terminals` mark all rows near a goal, so that they are not the ends of episodes."""
        return self.id.startswith("antmaze-")

    @property
    def known_problems(self) -> tuple[str, ...]:
        """Sentences about known problems of the published file."""
        return (_V0_ANTMAZE,) if self.is_antmaze and self.id.endswith("-v0") else ()

    @property
    def fetch_command(self) -> str:
        """The command that downloads it."""
        return f"rbtool download d4rl {self.id}"

    @property
    def replacement(self) -> str:
        """The command that downloads a successor of the dataset, for when D4RL's server is down."""
        bare = re.sub(r"-v\d+$", "", self.id)
        for pattern, successor in _SUCCESSORS.items():
            found = re.fullmatch(pattern, bare)
            if found:
                return f"rbtool download minari {found.expand(successor)}"
        return f"rbtool list --remote minari {bare.removeprefix('bullet-').partition('-')[0]}"


@functools.cache
def published() -> dict[str, D4rlDataset]:
    """Return all published datasets, by id and in the order of their ids."""
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]]
    datasets = [
        D4rlDataset(name, file, int(horizon), int(size) if size else None, sha256 or None)
        for name, file, horizon, size, sha256 in rows
    ]
    return {dataset.id: dataset for dataset in sorted(datasets, key=lambda dataset: dataset.id)}


def dataset_named(dataset_id: str) -> D4rlDataset:
    """Return the dataset with an id; raise DatasetNotFoundError, which names the nearest ids, for an unknown one."""
    found = published().get(dataset_id)
    if found is None:
        raise not_found(dataset_id, list(published()), "d4rl")
    return found


def dataset_of_file(name: str) -> D4rlDataset | None:
    """Return the dataset whose file has this name, or None; of several the one with the shortest id.

    Browsers add a number to the name of a second download, which is ignored: `hopper_medium-v2 (1).hdf5`.
    """
    bare = re.sub(r" ?\(\d+\)(?=\.hdf5$)", "", name)
    found = [dataset for dataset in published().values() if dataset.file_name == bare]
    return min(found, key=lambda dataset: (len(dataset.id), dataset.id), default=None)


def same_file(dataset: D4rlDataset) -> list[D4rlDataset]:
    """Return the other datasets that have the same file."""
    return [other for other in published().values() if other.file == dataset.file and other.id != dataset.id]


def not_in_cache(dataset: D4rlDataset, folder: Path, variable: str) -> DatasetNotFoundError:
    """Make the error for a dataset whose file is not in the cache of the d4rl package."""
    return DatasetNotFoundError(
        f"the local d4rl cache {folder} has no dataset {dataset.id!r}: looked for {dataset.file_name}",
        hint=f"{dataset.fetch_command} fetches it; {variable} names the folder, if it is another",
    )


REQUIRED = ("observations", "actions", "rewards", "terminals")
NEXT_OBSERVATIONS = "next_observations"
TIMEOUTS = "timeouts"
EPISODE_TERMINALS = "episode_terminals"
"""The flag that marks the ends of episodes in files of d3rlpy 1, in place of `timeouts`."""
FLAGS = ("terminals", TIMEOUTS, EPISODE_TERMINALS)
_KNOWN = (*REQUIRED, TIMEOUTS, NEXT_OBSERVATIONS)
_INFOS = "infos/"
_METADATA = "metadata/"
_DOCUMENT = "metadata.json"
_FEW_NUMBERS = 16
_MOST_METADATA = 64 << 20
_DEEPEST_PARTS = 32
_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)
_FETCH_AGAIN = "copy or fetch the file again, whole"

_CHUNKS = "virtual"
_VALIDS = "valids"
"""A column of OGBench's files, in which `terminals` mark rows that are not steps: such a file is not D4RL's."""


class ChunkedColumn:
    """A column whose rows are spread over several HDF5 datasets; `stops` has the row after the last one of each.

    Raises FormatError if the rows of the datasets differ in shape or element type.
    """

    def __init__(self, parts: Sequence[h5py.Dataset]) -> None:
        self._parts = parts
        forms = {(part.shape[1:], part.dtype) for part in parts}
        if len(forms) > 1:
            shapes = ", ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype in forms))
            raise FormatError(f"{parts[0].file.filename}: chunks of {parts[0].name!r} differ in their rows: {shapes}")
        self.dtype = parts[0].dtype
        self.stops: list[int] = np.cumsum([len(part) for part in parts]).tolist()
        self.shape = (self.stops[-1], *parts[0].shape[1:])

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, start: int, stop: int) -> Array:
        """Read rows as a fresh array in the byte order of this machine."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype.newbyteorder("="))
        for part, end in zip(self._parts, self.stops, strict=True):
            begin = end - len(part)
            low, high = max(start, begin), min(stop, end)
            if low < high and rows.size:
                part.read_direct(rows[low - start : high - start], np.s_[low - begin : high - begin])
        return rows


Column: TypeAlias = h5py.Dataset | ChunkedColumn


def looks_like_d4rl(file: Path) -> bool:
    """Return whether a file is HDF5 with D4RL's columns, whatever their lengths, or an HDF5 file that was cut.

    A file that is not HDF5 counts if D4RL publishes a file of this name: the error of opening it says how to fetch it
    again.
    """
    try:
        stated = stated_bytes(file)
        if stated is None:
            return not begins_as_h5(file) and dataset_of_file(file.name) is not None
        if file.stat().st_size < stated:
            return True
        names = set(root_members(file))
        if _VALIDS in names:
            return False
        return set(REQUIRED) <= names or (_CHUNKS in names and _has_chunks(file))
    except _UNREADABLE:
        return False


def _has_chunks(file: Path) -> bool:
    with h5py.File(open_h5(file)) as opened:
        chunks = _chunks_in(opened)
        return bool(chunks) and set(REQUIRED) <= set(chunks[0])


def _chunks_in(file: h5py.File) -> list[h5py.Group]:
    """Return the groups with chunks of rows, in the order of their numbers; [] if the columns are at the root."""
    group = file.get(_CHUNKS)
    if not isinstance(group, h5py.Group) or REQUIRED[0] in file:
        return []
    numbers = sorted(int(name) for name in group if name.isascii() and name.isdecimal() and name == str(int(name)))
    return [part for number in numbers if isinstance(part := group[str(number)], h5py.Group)]


def again(file: Path) -> str:
    """Return the hint for a damaged file: the command that downloads it, if D4RL publishes a file of its name."""
    known = dataset_of_file(file.name)
    return f"fetch it again: {known.fetch_command}" if known else _FETCH_AGAIN


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """A further column with a row for each step: its `path` in the file, its `key` in TED, and the form of a row."""

    path: str
    key: Key
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Gathered:
    infos: list[InfoColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, bytes] = field(default_factory=dict)
    taken: int = 0


class D4rlFile:
    """An open file of D4RL.

    Raises FormatError for columns that contradict each other, CorruptDataError for damaged files.

    Attributes:
        rows: the number of steps.
        infos: the columns below `infos/`, and any other columns with a row for each step.
        documents: the metadata, by file name.
        dropped: the members of the file that are neither columns nor metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._again = again(path)
        self._rows: dict[str, H5Rows] = {}
        require_whole_h5(path, hint=again(path))
        with reading("the structure", path, hint=again(path)):
            self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        try:
            with reading("the structure", path, hint=again(path)):
                self._chunks = _chunks_in(self._file)
                top = self._chunks[0] if self._chunks else self._file
                self._columns = {name: self._core(name) for name in _KNOWN if name in top or name in REQUIRED}
                if TIMEOUTS not in top and EPISODE_TERMINALS in top:
                    self._columns[EPISODE_TERMINALS] = self._core(EPISODE_TERMINALS)
                self.rows = self._common_length()
                self._require_shapes()
                found = self._look_around()
        except BaseException:
            self.close()
            raise
        self.infos = tuple(found.infos)
        self.dropped = tuple(found.dropped)
        self.documents = found.arrays
        if found.metadata:
            self.documents[_DOCUMENT] = json_file(found.metadata)

    @property
    def has_timeouts(self) -> bool:
        """Whether a flag marks the ends by time limit."""
        return TIMEOUTS in self._columns

    @property
    def has_episode_terminals(self) -> bool:
        """Whether `episode_terminals` mark the ends of episodes, because there are no `timeouts`."""
        return EPISODE_TERMINALS in self._columns

    @property
    def has_next(self) -> bool:
        """Whether the observation after each step is stored."""
        return NEXT_OBSERVATIONS in self._columns

    @property
    def has_goals(self) -> bool:
        """Whether a goal is stored with each step, as in the mazes."""
        return any(info.path == "infos/goal" for info in self.infos)

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the element type of a column and the shape of a row, which is `()` for rewards and flags."""
        column = self._column(name)
        return dtype_name(column.dtype), () if name in (*FLAGS, "rewards") else column.shape[1:]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a column as a fresh array in the byte order of this machine."""
        column = self._column(name)
        with reading(repr(name), self.path, hint=self._again):
            if isinstance(column, ChunkedColumn):
                rows = column.read(start, stop)
            else:
                held = self._rows.get(name)
                held = self._rows[name] = H5Rows(column, self.path) if held is None else held
                rows = held.read(start, stop)
        return rows.reshape(stop - start) if name in (*FLAGS, "rewards") else rows

    def read_flag(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a flag as bool; FormatError for numbers that are neither 0 nor 1."""
        return zero_or_one(self.read(name, start, stop), f"{self.path}: {name}", start=start)

    def read_truncated(self, start: int, stop: int) -> Array:
        """Read which rows end an episode by a time limit, bool; all False if the file has no such flag."""
        if self.has_timeouts:
            return self.read_flag(TIMEOUTS, start, stop)
        if self.has_episode_terminals:
            ends, terminated = (self.read_flag(name, start, stop) for name in (EPISODE_TERMINALS, "terminals"))
            return ends & ~terminated
        return np.zeros(stop - start, bool)

    def close(self) -> None:
        """Close the file."""
        self._values.close()
        self._file.close()

    def _column(self, name: str) -> Column:
        found = self._columns.get(name)
        if found is None:
            with reading(repr(name), self.path, hint=self._again):
                found = self._columns[name] = self._file[name]
        return found

    def _core(self, name: str) -> Column:
        found = []
        for group in self._chunks or [self._file]:
            column, path = group.get(name), f"{group.name}/{name}".lstrip("/")
            if column is None:
                raise FormatError(f"{self.path} has no {path!r}; D4RL's files have {', '.join(REQUIRED)}")
            if not isinstance(column, h5py.Dataset) or not column.shape:
                raise FormatError(f"{self.path}: {path!r} is not an array with one row per step")
            self._require_numbers(path, column)
            found.append(column)
        return ChunkedColumn(found) if self._chunks else found[0]

    def _require_numbers(self, name: str, column: h5py.Dataset) -> None:
        if why := _not_numbers(column):
            raise FormatError(f"{self.path}: {name!r} cannot be read as rows: {why}")
        if why := absurd_size(column.id):
            raise CorruptDataError(f"{self.path}: {name!r} {why}", hint=self._again)

    def _common_length(self) -> int:
        lengths = {name: len(column) for name, column in self._columns.items()}
        stops = {tuple(column.stops) for column in self._columns.values() if isinstance(column, ChunkedColumn)}
        if len(set(lengths.values())) > 1 or len(stops) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(
                f"{self.path}: its columns have different numbers of rows ({listed}), expected one for each step",
                hint=self._again,
            )
        rows = lengths["observations"]
        if not rows:
            raise FormatError(f"{self.path} has no steps: its columns are empty")
        return rows

    def _require_shapes(self) -> None:
        for name in ("rewards", *FLAGS):
            column = self._columns.get(name)
            if column is not None:
                require_single(f"{self.path}: {name!r} has", column.shape[1:])
        if not self.has_next:
            return
        one, other = (self._columns[name] for name in ("observations", NEXT_OBSERVATIONS))
        if (one.shape, dtype_name(one.dtype)) != (other.shape, dtype_name(other.dtype)):
            raise FormatError(
                f"{self.path}: observations are {one.dtype} {list(one.shape[1:])} and next_observations "
                f"{other.dtype} {list(other.shape[1:])}"
            )

    def _look_around(self) -> _Gathered:
        found = _Gathered()
        names = [str(name) for name in self._file.attrs if name != MARK]
        attributes = {name: self._values.attribute(self._file["/"].id, name) for name in names}
        if attributes:
            found.metadata["attributes"] = {name: plain_value(value) for name, value in sorted(attributes.items())}
        for path, item in datasets_in(self._file):
            if path in self._columns or self._is_chunk(path):
                continue
            if not isinstance(item, h5py.Dataset):
                found.dropped.append(Dropped(path, "it is a type without data"))
            elif path.startswith(_METADATA):
                self._keep(path, item, found)
            else:
                self._sort_in(path, item, found)
        return found

    def _is_chunk(self, path: str) -> bool:
        """Return whether the member at a path is a chunk of a column."""
        parts = path.split("/")
        return bool(self._chunks) and len(parts) == 3 and parts[0] == _CHUNKS and parts[2] in self._columns

    def _sort_in(self, path: str, column: h5py.Dataset, found: _Gathered) -> None:
        """Add a member to the infos if it has a row for each step, else to the dropped ones."""
        why = "it has no data" if column.shape is None else _not_numbers(column) or absurd_size(column.id)
        if not why and not path.startswith(_INFOS) and (other := self._info_of_that_name(path)):
            why = f"{other} has the same name"
        if not why and column.shape[:1] != (self.rows,):
            rows = f"{len(column):,} rows" if column.shape else "a single value"
            why = f"it has {rows}, but there are {self.rows:,} steps"
        parts = path.removeprefix(_INFOS).split("/")
        if why or len(parts) > _DEEPEST_PARTS:
            found.dropped.append(Dropped(path, why or "it is nested too deeply"))
            return
        key = ("info", *map(safe_part, parts))
        found.infos.append(InfoColumn(path, key, dtype_name(column.dtype), column.shape[1:]))

    def _info_of_that_name(self, path: str) -> str:
        """Return the member of `infos/` whose key equals or contains the key of a column outside of it; "" if none."""
        name = _INFOS.rstrip("/")
        for part in path.split("/"):
            name = f"{name}/{part}"
            if not isinstance(self._file.get(name), h5py.Group):
                return name if name in self._file else ""
        return name

    def _keep(self, path: str, value: h5py.Dataset, found: _Gathered) -> None:
        """Keep a value of the metadata: small values and text in one JSON document, each array in a file of its own."""
        if value.shape is None:  # a null dataspace of HDF5
            _put(found.metadata, path.removeprefix(_METADATA).split("/"), None)
            return
        found.taken += max(0, math.prod(value.shape) * value.dtype.itemsize)
        if found.taken > _MOST_METADATA:
            found.dropped.append(Dropped(path, f"the metadata are larger than {_MOST_METADATA >> 20} MiB"))
            return
        content = self._values.dataset(path)[()]
        small = not value.shape or (value.dtype.kind in "biuf" and math.prod(value.shape) <= _FEW_NUMBERS)
        if small or value.dtype.kind == "O":
            _put(found.metadata, path.removeprefix(_METADATA).split("/"), plain_value(content))
        elif value.dtype.hasobject or not is_inside(f"{path}.npy"):
            found.dropped.append(Dropped(path, "it is neither numbers nor text"))
        else:
            file = io.BytesIO()
            np.lib.format.write_array(file, np.ascontiguousarray(content), allow_pickle=False)
            found.arrays[f"{path}.npy"] = file.getvalue()


def _not_numbers(column: h5py.Dataset) -> str:
    """Return why the values of a column are not numbers; "" if they are."""
    try:
        dtype_name(column.dtype)
    except (SchemaError, TypeError, ValueError) as error:
        return f"its values are not numbers ({str(error) or type(error).__name__})"
    return ""


def _put(document: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = document.setdefault(part, {})
        document = inner if isinstance(inner, dict) else document.setdefault(f"{part}/", {})
    document[parts[-1]] = value


class Ends(Enum):
    """The rule that ends episodes; the value is its description in notes."""

    FLAGS = "episodes end at terminals and timeouts"
    TIMEOUTS = "episodes end at timeouts alone: terminals mark steps near the goal, and stay flags of these steps"
    EPISODE_TERMINALS = (
        "episodes end at episode_terminals, as d3rlpy 1 writes them: terminated where terminals are set, else truncated"
    )
    HORIZON = "there are no timeouts: episodes end at terminals and at the time limit"
    LIMIT = (
        "there are no timeouts: terminals mark steps near the goal, and stay flags of these steps; episodes end at the "
        "time limit alone"
    )
    FOLLOWING = (
        "there are no timeouts: episodes end at terminals and where next_observations differ from the following row"
    )


@dataclass(frozen=True)
class FileBoundaries:
    """The episodes of a file.

    Attributes:
        rule: the rule that ends episodes.
        stops: the row after the last one of each episode, ascending.
        limit: the time limit, if the rule uses one.
        ends_unflagged: whether the recording stops inside the last episode.
        last_terminated: for each episode, whether its last step is terminated.
        notes: sentences about the episodes.
    """

    rule: Ends
    stops: Array
    limit: int | None
    ends_unflagged: bool
    last_terminated: Array
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.stops)

    @cached_property
    def starts(self) -> Array:
        """The first row of each episode, int64."""
        return np.concatenate(([0], self.stops[:-1]))

    @cached_property
    def lengths(self) -> Array:
        """The number of steps of each episode, int64."""
        return self.stops - self.starts

    def span(self, number: int) -> tuple[int, int]:
        """Return the first row of an episode, and the row after its last one."""
        return int(self.starts[number]), int(self.stops[number])

    def is_timed_out(self, number: int) -> bool:
        """Whether an episode has as many steps as the time limit allows, in a file without a flag for time limits."""
        return self.limit is not None and int(self.lengths[number]) == self.limit

    def is_inferred(self, number: int) -> bool:
        """Whether the end of an episode is inferred from next observations that differ from the following row."""
        return bool(self.inferred(np.array([number]))[0])

    def inferred(self, numbers: Array) -> Array:
        """Return `is_inferred` for each of these episodes, bool."""
        if self.rule is not Ends.FOLLOWING:
            return np.zeros(len(numbers), bool)
        return np.asarray(numbers != (len(self) - 1 if self.ends_unflagged else -1))


def find_boundaries(
    file: D4rlFile,
    known: D4rlDataset | None,
    horizon: int | None,
    progress: Callable[[int], None],
    *,
    named: bool = False,
) -> FileBoundaries:
    """Read the flags of a file and find its episodes.

    Args:
        file: the open file.
        known: the published dataset that the file belongs to, if it is known.
        horizon: the time limit that the user states.
        progress: called with the number of episodes.
        named: whether `known` was derived from the file name alone.

    Raises:
        UsageError: `horizon` is given for a file whose flags mark the ends.
        FormatError: the ends of episodes cannot be determined, or a flag is neither 0 nor 1.
    """
    if horizon is not None and horizon < 1:
        raise UsageError(f"--horizon is {horizon}, expected a number of steps above 0")
    if horizon is not None and file.has_timeouts:
        raise UsageError(
            f"{file.path} has timeouts, which mark where episodes reach their time limit", hint="leave out --horizon"
        )
    if horizon is not None and file.has_episode_terminals:
        raise UsageError(
            f"{file.path} has episode_terminals, which mark where episodes end", hint="leave out --horizon"
        )
    limit = horizon if horizon is not None or known is None else known.horizon
    if not file.has_timeouts and not file.has_episode_terminals and limit is None and not file.has_next:
        raise OptionNeededError(
            file.path,
            "has neither timeouts nor next_observations, and D4RL publishes no file of its name: it is not known where "
            "an episode reaches its time limit",
            hint="give the time limit of its environment in steps: --horizon N",
            format="d4rl",
            options={"horizon": "N"},
        )
    flags = _Flags(file)
    rule = _rule(file, known, flags, limit)
    if rule is Ends.EPISODE_TERMINALS:
        marked = flags.episode_terminals
    elif rule in (Ends.TIMEOUTS, Ends.LIMIT):
        marked = flags.timeouts
    else:
        marked = np.union1d(flags.terminals, flags.timeouts)
    if rule is Ends.FOLLOWING:
        marked = np.union1d(marked, _breaks(file))
    stops = marked + 1
    unflagged = not len(stops) or int(stops[-1]) != file.rows
    if unflagged:
        stops = np.append(stops, file.rows)
    timed = rule in (Ends.HORIZON, Ends.LIMIT)
    if timed and limit is not None:
        stops = _cut(stops, limit)
        unflagged = unflagged and (file.rows - (int(stops[-2]) if len(stops) > 1 else 0)) != limit
    progress(len(stops))
    last_terminated = np.isin(stops - 1, flags.terminals)
    found = FileBoundaries(rule, stops, limit if timed else None, unflagged, last_terminated)
    guessed = timed and named and horizon is None
    return replace(found, notes=tuple(_notes(file, known, flags, found, guessed=guessed)))


class _Flags:
    """The rows in which each flag is set, and the rows whose reward is NaN."""

    def __init__(self, file: D4rlFile) -> None:
        terminals, timeouts, ends, nan = [], [], [], []
        for start, stop in blocks(file.rows, BLOCK_BYTES // 8):
            terminals.append(start + np.flatnonzero(file.read_flag("terminals", start, stop)))
            if file.has_timeouts:
                timeouts.append(start + np.flatnonzero(file.read_flag(TIMEOUTS, start, stop)))
            if file.has_episode_terminals:
                ends.append(start + np.flatnonzero(file.read_flag(EPISODE_TERMINALS, start, stop)))
            rewards = file.read("rewards", start, stop)
            if rewards.dtype.kind == "f":
                nan.append(start + np.flatnonzero(np.isnan(rewards)))
        self.terminals = _joined(terminals)
        self.timeouts = _joined(timeouts)
        self.episode_terminals = _joined(ends)
        self.nan = _joined(nan)

    @property
    def terminals_repeat(self) -> bool:
        """Whether `terminals` are set in two consecutive steps of an episode."""
        before = np.setdiff1d(self.terminals[:-1][np.diff(self.terminals) == 1], self.timeouts)
        return len(before) > 0


def _rule(file: D4rlFile, known: D4rlDataset | None, flags: _Flags, limit: int | None) -> Ends:
    if file.has_timeouts:
        looks_so = file.has_goals and flags.terminals_repeat and len(flags.timeouts) > 0
        return Ends.TIMEOUTS if (known.is_antmaze if known is not None else looks_so) else Ends.FLAGS
    if file.has_episode_terminals:
        return Ends.EPISODE_TERMINALS
    if limit is None:
        return Ends.FOLLOWING
    return Ends.LIMIT if known is not None and known.is_antmaze else Ends.HORIZON


def _breaks(file: D4rlFile) -> Array:
    """Return the rows whose next observation differs from the observation in the following row."""
    row = file.read("observations", 0, 1).nbytes
    found = []
    for start, stop in blocks(file.rows - 1, max(1, BLOCK_BYTES // max(1, row))):
        after = file.read(NEXT_OBSERVATIONS, start, stop)
        following = file.read("observations", start + 1, stop + 1)
        found.append(start + np.flatnonzero(~rows_equal(after, following)))
    return _joined(found)


def _cut(stops: Array, limit: int) -> Array:
    """Cut every episode of more than `limit` steps after each `limit` steps; return the new stops."""
    lengths = np.diff(stops, prepend=0)
    pieces = -(-lengths // limit)
    owner = np.repeat(np.arange(len(stops)), pieces)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + 1
    found: Array = np.minimum((stops - lengths)[owner] + rank * limit, stops[owner])
    return found


def _notes(
    file: D4rlFile, known: D4rlDataset | None, flags: _Flags, found: FileBoundaries, *, guessed: bool
) -> Iterator[str]:
    what = found.rule.value
    if found.limit is not None:
        what += f" of {found.limit:,} steps" + (f" of {known.id}" if known and known.horizon == found.limit else "")
        what += ", which the file name states (--horizon N states another)" if guessed else ""
    yield what
    if guessed and known is not None:
        for other in same_file(known):
            if other.horizon != known.horizon:
                yield f"{other.id} is the same file with a time limit of {other.horizon:,} steps"
    if found.limit is not None and file.has_next:
        yield from _unended(np.setdiff1d(_breaks(file), found.stops - 1))
    if found.rule is Ends.FLAGS and file.has_goals and flags.terminals_repeat and known is None:
        yield (
            "timeouts are never set, but terminals are set in consecutive steps: if they mark steps near a goal, the "
            "episodes do not end there"
        )
    if found.ends_unflagged:
        last = int(found.lengths[-1])
        yield f"the last {last:,} {'step ends' if last == 1 else 'steps end'} without a flag: an unfinished episode"
    if found.rule in (Ends.TIMEOUTS, Ends.LIMIT, Ends.EPISODE_TERMINALS):
        inside = len(np.setdiff1d(flags.terminals, found.stops - 1))
        if inside or found.rule is not Ends.EPISODE_TERMINALS:
            yield f"terminals are set in {inside:,} steps inside episodes"
    if file.has_timeouts and any(info.path == EPISODE_TERMINALS for info in file.infos):
        yield "episodes end at timeouts, so episode_terminals are kept as info.episode_terminals"
    if known is not None:
        over = int((found.lengths > known.horizon).sum())
        if over:
            who = "episode has" if over == 1 else "episodes have"
            yield (
                f"{over:,} {who} more than the {known.horizon:,} steps that the environment of {known.id} "
                "allows: ends may be unmarked in the file"
            )
        yield from known.known_problems
        size = file.path.stat().st_size
        if known.size is not None and size != known.size:
            yield f"the file has {size:,} bytes, but {known.file_name} as D4RL publishes it has {known.size:,}"
    if len(flags.nan):
        yield f"the reward is NaN in {len(flags.nan):,} of {file.rows:,} steps (first: step {int(flags.nan[0]):,})"


def _unended(rows: Array) -> Iterator[str]:
    if len(rows):
        steps = f"{len(rows):,} {'step' if len(rows) == 1 else 'steps'} inside episodes (first: step {int(rows[0]):,})"
        yield (
            f"next_observations differ from the following observation in {steps}: "
            "if episodes end there, the time limit is wrong"
        )


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)


EPISODES_BYTES = 8 << 20
"""The size of a block of episodes in TED; the next block is read while one is written."""
_OBSERVATION: Key = ("observation",)


class D4rlReader(SurveyedReader[FileBoundaries]):
    """Reads a D4RL file, or a folder that contains one and no other HDF5 file.

    `observations` become `observation`; `next_observations`, if the file has them, become the observation under `next`,
    also where they differ from the following row. `infos/NAME` becomes `info.NAME` of the same row. Episodes are
    numbered from 0 in the order of the file.

    Options: `horizon` is the time limit of episodes in a file without `timeouts`; `id` is the id of the published
    dataset, if the file name does not tell it.

    Raises FormatError for columns that contradict each other, CorruptDataError for damaged files, UsageError for a
    `horizon` although `timeouts` mark the ends.
    """

    block_bytes = EPISODES_BYTES
    option_names = frozenset({"horizon", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is HDF5 with D4RL's columns, whatever their lengths, or an HDF5 file that was cut."""
        file = h5_file_at(path)
        return file is not None and looks_like_d4rl(file)

    def on_open(self) -> None:
        """Open the file and read its structure."""
        file = h5_file_at(self.path)
        if file is None:
            raise FormatError(f"{self.path} is neither an HDF5 file nor a folder with exactly one")
        self._file = D4rlFile(file)
        asked = self.options.get("id")
        self.known: D4rlDataset | None = dataset_of_file(file.name) if asked is None else dataset_named(str(asked))
        self._columns = _D4rlColumns(self._file, self.piece_bytes)
        self._block_rows = max(1, min(self.block_bytes, self.piece_bytes) // self._columns.row_bytes)

    def look(self, progress: Callable[[int], None]) -> FileBoundaries:
        """Read the flags and find the episodes."""
        horizon = self.options.get("horizon")
        return find_boundaries(
            self._file, self.known, None if horizon is None else int(horizon), progress, named="id" not in self.options
        )

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts about the file."""
        found = self.looked_over(progress)
        keys = {info.path: key_name(info.key) for info in self._file.infos}
        return SourceFacts(
            source="d4rl",
            id=self.known.id if self.known is not None else self._file.path.stem,
            fields=self._columns.fields,
            episode_numbers=range(len(found)),
            steps=self._file.rows,
            renamed_keys={path: name for path, name in keys.items() if name != _usual_name(path)},
            dropped_keys=self._file.dropped,
            notes=(*found.notes, *other_files_note(self.path, self._file.path)),
            documents=self._file.documents,
            lengths=found.lengths.tolist(),
            final_missing=not self._file.has_next,
            last_terminated=None if self._file.has_next else found.last_terminated.tolist(),
        )

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        begin, end = self.found.span(number)
        for start in range(begin, end, self._columns.rows):
            stop = min(start + self._columns.rows, end)
            columns = {field.key: self._columns.read(field.key, start, stop) for field, _ in self._columns.fields}
            following: dict[Key, Array] = {}
            if self._file.has_next:
                following[_OBSERVATION] = self._columns.after(start, stop)
            elif stop < end:
                columns[_OBSERVATION] = self._columns.read(_OBSERVATION, start, stop + 1)
            yield self._piece(number, columns, following, start, stop)

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        """Yield blocks of consecutive episodes with up to `block_bytes`, and the pieces of longer episodes."""
        boundaries, chosen = self.found, np.asarray(numbers, np.int64)
        starts, stops = boundaries.starts[chosen], boundaries.stops[chosen]
        runs = np.append(np.flatnonzero(np.diff(chosen) < 1) + 1, len(chosen))  # each in the order of the file
        first = 0
        while first < len(chosen):
            stop = int(runs[np.searchsorted(runs, first, side="right")])
            stop = first + int(np.searchsorted(stops[first:stop], starts[first] + self._block_rows, side="right"))
            if stop > first:
                yield self._block(chosen[first:stop])
            else:
                yield from self.read_episode(int(chosen[first]))
            first = max(stop, first + 1)

    def _block(self, numbers: Array) -> EpisodeBlock:
        """Read the rows from the first to the last of these episodes at once, and keep those that belong to them."""
        boundaries, file = self.found, self._file
        start, stop = int(boundaries.starts[numbers[0]]), int(boundaries.stops[numbers[-1]])
        lengths = boundaries.lengths[numbers]
        stops = np.cumsum(lengths)
        rows: Array | None = None
        if int(stops[-1]) < stop - start:
            rows = np.arange(int(stops[-1])) + np.repeat(
                boundaries.starts[numbers] - start - (stops - lengths), lengths
            )

        def kept(array: Array) -> Array:
            return array if rows is None else np.take(array, rows, axis=0)

        terminated, truncated = (kept(flags) for flags in self._columns.read_flags(start, stop))
        ends = stops - 1
        if boundaries.limit is not None:
            truncated[ends[(lengths == boundaries.limit) & ~terminated[ends]]] = True
        final = Final.OBSERVED if file.has_next else Final.MISSING
        following = {_OBSERVATION: kept(file.read(NEXT_OBSERVATIONS, start, stop))} if file.has_next else {}
        return EpisodeBlock(
            numbers, stops,
            {key: kept(file.read(name, start, stop)) for key, name in self._columns.names.items()},
            terminated, truncated, np.full(len(numbers), final, np.uint8), following,
            inferred=boundaries.inferred(numbers),
        )  # fmt: skip

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; or all of it if next observations are stored."""
        if self._file.has_next:
            yield from self.read_episode(number)
            return
        begin, end = self.found.span(number)
        for start in range(begin, end, OUTCOME_ROWS):
            stop = min(start + OUTCOME_ROWS, end)
            yield self._piece(number, {REWARD: self._columns.read(REWARD, start, stop)}, {}, start, stop)

    def _piece(
        self, number: int, columns: dict[Key, Array], following: dict[Key, Array], start: int, stop: int
    ) -> Piece:
        boundaries = self.found
        begin, end = boundaries.span(number)
        last = stop == end
        terminated, truncated = self._columns.flags(start, stop)
        if last and boundaries.is_timed_out(number) and not terminated[-1]:
            truncated = truncated.copy()
            truncated[-1] = True
        return Piece(
            number, columns, terminated, truncated, first=start == begin, last=last, next=following,
            final=Final.OBSERVED if self._file.has_next else Final.MISSING,
            inferred=last and boundaries.is_inferred(number),
        )  # fmt: skip

    def files(self) -> list[Path]:
        """The one file."""
        return [self._file.path]

    def on_close(self) -> None:
        """Close the file."""
        self._file.close()


class _D4rlColumns:
    """The columns of a file by their keys in TED, read in blocks, which may hold many episodes."""

    def __init__(self, file: D4rlFile, piece_bytes: int) -> None:
        self._file = file
        names: dict[Key, str] = {_OBSERVATION: "observations", ACTION: "actions", REWARD: "rewards"}
        fields: list[tuple[Field, Timing]] = [
            (Field(_OBSERVATION, *file.form("observations"), "observation"), "state"),
            (Field(ACTION, *file.form("actions"), "action"), "step"),
            (Field(REWARD, *file.form("rewards"), "reward"), "result"),
        ]
        for info in file.infos:
            names[info.key] = info.path
            fields.append((Field(info.key, info.dtype, info.shape, "info"), "step"))
        self.fields = tuple(fields)
        self.row_bytes = max(1, row_bytes(ted_fields(fields)))
        self.rows = max(1, piece_bytes // self.row_bytes)
        self.names = names
        self._blocks = {key: self._of(name) for key, name in names.items()}
        self._after = self._of(NEXT_OBSERVATIONS)
        self._terminals = RowBlocks(partial(file.read_flag, "terminals"), file.rows, self.rows)
        self._truncated = RowBlocks(file.read_truncated, file.rows, self.rows)

    def _of(self, name: str) -> RowBlocks:
        return RowBlocks(partial(self._file.read, name), self._file.rows, self.rows)

    def read(self, key: Key, start: int, stop: int) -> Array:
        return self._blocks[key].read(start, stop)

    def after(self, start: int, stop: int) -> Array:
        """Read the observation after each step."""
        return self._after.read(start, stop)

    def read_flags(self, start: int, stop: int) -> tuple[Array, Array]:
        """Read which steps are terminated and which are truncated, as fresh arrays that no block cache holds."""
        return self._file.read_flag("terminals", start, stop), self._file.read_truncated(start, stop)

    def flags(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return which steps are terminated and which are truncated; the latter all False without such a flag."""
        return self._terminals.read(start, stop), self._truncated.read(start, stop)


def _usual_name(path: str) -> str:
    """Return the name in TED of a column below `infos/` if no part of it has to be changed; "" for other columns."""
    return ".".join(("info", *path.removeprefix("infos/").split("/"))) if path.startswith("infos/") else ""


_SERVER = "rail.eecs.berkeley.edu/datasets/offline_rl"


class D4rlCache(LocalCache):
    """The folder in which the d4rl package caches downloads: files by name, without subfolders."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the file of a dataset; DatasetNotFoundError for an unknown id or a missing file."""
        dataset = dataset_named(safe_id(dataset_id))
        path = self.folder / dataset.file_name
        if not path.is_file():
            raise not_in_cache(dataset, self.folder, self.variable)
        return path

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Yield the ids of all datasets whose file is in the folder."""
        folder = self.folder
        return (dataset.id for dataset in published().values() if (folder / dataset.file_name).is_file())


class D4rlSource(MirrorSource):
    """Downloads from D4RL's server, or from the mirrors in `D4RL_URL` (base URLs, tried in their order).

    A file is accepted if it has the known size and sha256; if these are not known, if it is HDF5 with D4RL's columns.
    Otherwise the next mirror is tried.
    """

    name = "d4rl"
    title = "D4RL"
    bases_variable = "D4RL_URL"
    defaults = (f"https://{_SERVER}", f"http://{_SERVER}")
    signatures = (HDF5_SIGNATURE,)
    local_cache = D4rlCache("d4rl", "D4RL_DATASET_DIR", "~/.d4rl/datasets")

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package, without a request."""
        return Ids(tuple(published()))

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets, with known sizes, without a request."""
        entries = tuple(CatalogueEntry(dataset.id, dataset.size) for dataset in published().values())
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries)

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the address of the file on each mirror."""
        dataset = dataset_named(dataset_id)
        return {dataset.file_name: [f"{base}/{dataset.file}" for base in self.bases]}

    def checksums(self, dataset_id: str) -> Mapping[str, str]:
        """Return the sha256 of the file, if it is known."""
        dataset = dataset_named(dataset_id)
        return {} if dataset.sha256 is None else {dataset.file_name: f"sha256:{dataset.sha256}"}

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Describe the file of a dataset, with a request only if its size or sha256 is not known."""
        dataset = dataset_named(dataset_id)
        ((path, addresses),) = self.addresses(dataset_id).items()
        checksum = self.checksums(dataset_id).get(path)
        if dataset.size is None or checksum is None:
            with hint_on_failure(_replacement_hint(dataset)):
                return [self.described(path, addresses)]
        return [RemoteFile(path, dataset.size, checksum, tuple(addresses))]

    def explained(self, file: RemoteFile | None = None) -> AbstractContextManager[None]:
        """Add a hint to network errors: the successor of the dataset whose file has the address."""
        address = "" if file is None else file.addresses[0]
        dataset = next((one for one in published().values() if address.endswith(f"/{one.file}")), None)
        return hint_on_failure("" if dataset is None else _replacement_hint(dataset))

    def require_readable(self, path: Path) -> None:
        """Open a file; FormatError if it is not in D4RL's format."""
        D4rlFile(path).close()


def _replacement_hint(dataset: D4rlDataset) -> str:
    return (
        "D4RL's server is down at times: try later, or name a mirror (D4RL_URL=BASE); Minari has newly collected "
        f"successors of many datasets: {dataset.replacement}"
    )
