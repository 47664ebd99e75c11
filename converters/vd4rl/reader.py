"""Reads and downloads V-D4RL's folders with pixels: npz files of one episode each, or HDF5 shards.

It imports h5py, but neither dm_control nor torch.

Row i has an observation, and the action and reward that led to it, which are not used in the first row of an episode.
So step i of an episode takes its observation from row i, and its action, reward and discount from row i + 1:

    row          0   1   2   3
    observation  s0  s1  s2  s3      step 0: s0, a0, r0, next s1
    action       -   a0  a1  a2      step 1: s1, a1, r1, next s2
    reward       -   r0  r1  r2      step 2: s2, a2, r2, next s3

Shards are consecutive parts of one table of rows: a shard may stop in the middle of an episode, which the next one
continues.
"""

from __future__ import annotations

import bisect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...core.encodings.hdf5_files import H5Rows, absurd_size, datasets_in, open_h5
from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, Piece, SourceFacts
from ...core.format.converter import refuse_damaged
from ...core.format.files import FETCH_AGAIN, no_match
from ...core.format.manifest import Dropped
from ...core.remote.hub import HubFolderSource
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, dtype_name, key_name, safe_part
from ..files.hdf5 import names_in, require_whole_h5
from ..files.numpy_files import NpzFile, array_names, begins_as_zip, first_name_of_cut
from ..files.readers import (
    BLOCK_BYTES,
    OUTCOME_ROWS,
    SurveyedReader,
    blocks,
    notes_on_identical,
    reading,
    require_single,
    why_no_key,
    zero_or_one,
)

PIXELS: Key = ("pixels",)
IS_INIT: Key = ("is_init",)
IS_FIRST, IS_LAST, IS_TERMINAL, STEP_TYPE = "is_first", "is_last", "is_terminal", "step_type"
DISCOUNT = "discount"
FLAGS = (IS_FIRST, IS_LAST, IS_TERMINAL)
NPZ_SUFFIX = ".npz"
HDF5_SUFFIXES = (".hdf5", ".h5")
_IMAGES = ("image", "observation")
_REQUIRED = ("action", "reward")


def looks_like_vd4rl(names: Iterable[str]) -> bool:
    """Return whether a file has the arrays of an episode or of a shard."""
    found = set(names)
    if not found & set(_IMAGES) or not found >= set(_REQUIRED):
        return False
    return bool(found & {IS_FIRST, IS_LAST, STEP_TYPE}) or ("image" in found and bool(found & {IS_TERMINAL, DISCOUNT}))


class ArrayFile(Closing):
    """An open file of arrays with a row for each observation; methods raise CorruptDataError for damaged files."""

    path: Path
    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    @abstractmethod
    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the element type and the shape of an array."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` as a fresh array in the byte order of this machine."""

    def why_no_numbers(self, name: str) -> str:
        """Return why an array does not consist of rows of numbers; "" if it does."""
        dtype, shape = self.form(name)
        if dtype.hasobject:
            return "it is not an array of numbers"
        try:
            dtype_name(dtype)
        except SchemaError as error:
            return str(error)
        return "" if shape else "it is a single value"


class NpzRows(NpzFile, ArrayFile):
    """An npz file of one episode."""


class Hdf5Rows(ArrayFile):
    """An HDF5 file of many rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_whole_h5(path)
        with reading("the structure", path):
            self._file = h5py.File(open_h5(path))
        try:
            with reading("the structure", path):
                self._look_around()
        except BaseException:
            self.close()
            raise

    def _look_around(self) -> None:
        found = dict(datasets_in(self._file))
        arrays = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset) and item.shape}
        self.names = tuple(arrays)
        self.others = tuple(name for name in found if name not in arrays)
        for name, array in arrays.items():
            if why := absurd_size(array.id):
                raise CorruptDataError(f"{self.path}: {name!r} {why}", hint=FETCH_AGAIN)
        self._arrays = {name: H5Rows(array, self.path) for name, array in arrays.items()}

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        return self._arrays[name].dtype, self._arrays[name].shape

    def read(self, name: str, start: int, stop: int) -> Array:
        with reading(repr(name), self.path):
            return self._arrays[name].read(start, stop)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """An array as a field of TED; with the timing `step` or `result`, the value of a step is in the following row."""

    name: str
    field: Field
    timing: Timing


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file, the arrays that are left out, and the numbers of rows of the columns and of the flags."""

    columns: tuple[ArrayColumn, ...]
    dropped: tuple[Dropped, ...]
    rows: int
    flag_rows: int


def layout_of(file: ArrayFile, flags: Iterable[str]) -> Layout:
    """Return the layout of a file, whose `flags` do not become fields.

    All arrays must have the same number of rows; only the flags may all have one row more. Raises FormatError for
    missing arrays and unexpected forms.
    """
    pixels = next((name for name in _IMAGES if name in file.names), None)
    if pixels is None or not set(_REQUIRED) <= set(file.names):
        there = ", ".join(sorted(file.names)[:12]) or "no arrays"
        raise FormatError(f"{file.path} has {there}, expected image or observation, action and reward")
    core = [name for name in (pixels, *_REQUIRED, DISCOUNT, *flags) if name in file.names]
    for name in core:
        if why := file.why_no_numbers(name):
            raise FormatError(f"{file.path}: {name!r} cannot be read as rows: {why}")
    lengths = {name: file.form(name)[1][0] for name in core}
    rows, marked = lengths[pixels], {lengths[name] for name in flags if name in lengths}
    same = {rows} == {length for name, length in lengths.items() if name not in flags}
    if not same or len(marked) > 1 or not marked <= {rows, rows + 1}:
        listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
        raise FormatError(f"{file.path}: its arrays have different numbers of rows ({listed})")
    for name in ("reward", *(flag for flag in flags if flag in core)):
        require_single(f"{file.path}: {name!r} has", file.form(name)[1][1:])
    columns = [_column(file, pixels, PIXELS, "state"), _column(file, "action", ACTION, "step")]
    columns.append(_column(file, "reward", REWARD, "result"))
    if DISCOUNT in core:
        columns.append(_column(file, DISCOUNT, (DISCOUNT,), "result"))
    dropped = [Dropped(name, "it is not an array with one row per observation") for name in file.others]
    taken: list[Key] = []
    for name in sorted(set(file.names) - set(core)):
        key = ("state", *map(safe_part, name.split("/")))
        if why := file.why_no_numbers(name) or _why_not(file, name, key, taken, rows):
            dropped.append(Dropped(name, why))
            continue
        taken.append(key)
        columns.append(_column(file, name, key, "state"))
    return Layout(tuple(columns), tuple(dropped), rows, max(marked, default=rows))


def _why_not(file: ArrayFile, name: str, key: Key, taken: list[Key], rows: int) -> str:
    if why := why_no_key(key, taken, "array"):
        return why
    there = file.form(name)[1][0]
    return "" if there == rows else f"it has {there:,} rows, but there are {rows:,} observations"


def _column(file: ArrayFile, name: str, key: Key, timing: Timing) -> ArrayColumn:
    dtype, shape = file.form(name)
    role: Any = {"action": "action", "reward": "reward", "state": "state", DISCOUNT: "info"}.get(key[0], "observation")
    return ArrayColumn(name, Field(key, dtype_name(dtype), () if key == REWARD else shape[1:], role), timing)


def flag_rows(file: ArrayFile, name: str, start: int, stop: int) -> Array:
    """Read rows of a flag as bool; FormatError for numbers that are neither 0 nor 1."""
    return zero_or_one(file.read(name, start, stop).reshape(-1), f"{file.path}: {name}", start=start)


def form_of(columns: Iterable[ArrayColumn]) -> str:
    """Return the names, element types and shapes of columns as text."""
    return ", ".join(f"{column.name} {column.field.dtype} {list(column.field.shape)}" for column in columns)


_FIRST, _LAST = 0, 2
_OPEN_FILES = 4
_FLAG_ROWS = BLOCK_BYTES // 16


@dataclass(frozen=True, slots=True)
class RowEpisode:
    """Rows `[start, stop)` of an episode, with one observation each.

    `begins` states that the first row is the one after a reset, `ended` that a flag marks the last row, `terminated`
    that the episode is terminated there. `text` has the texts of the episode.
    """

    number: int
    start: int
    stop: int
    begins: bool
    ended: bool
    terminated: bool
    text: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.stop - self.start - 1


@dataclass(frozen=True, slots=True)
class FoundEpisodes:
    """The columns and episodes of all files; `damaged` has an error for each episode that cannot be read."""

    columns: tuple[ArrayColumn, ...]
    dropped: tuple[Dropped, ...]
    episodes: Mapping[int, RowEpisode]
    damaged: Mapping[int, RbtoolError]
    notes: tuple[str, ...]


class FileEpisodes(Closing, ABC):
    """The episodes of `files`, in the order of their rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    @abstractmethod
    def find(self, progress: Callable[[int], None]) -> FoundEpisodes:
        """Find the episodes, and call `progress` with the number of new ones; FormatError if there are none."""

    @abstractmethod
    def read(self, episode: RowEpisode, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of an array, all of which belong to the episode."""

    def verify_read(self, episode: RowEpisode) -> None:
        """Raise CorruptDataError if an array that was read of the episode has another checksum; HDF5 has none."""


class EpisodeFiles(FileEpisodes):
    """Npz files with an episode each, numbered in the order of their names."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        self._open: tuple[int, NpzRows] | None = None

    def find(self, progress: Callable[[int], None]) -> FoundEpisodes:
        first: Layout | None = None
        dropped: dict[str, Dropped] = {}
        episodes: dict[int, RowEpisode] = {}
        damaged: dict[int, RbtoolError] = {}
        odd_starts = cut = 0
        for number, path in enumerate(self.files):
            try:
                with NpzRows(path) as file, file.damage_first():
                    layout = layout_of(file, FLAGS)
                    if first is not None and layout.columns != first.columns:
                        raise FormatError(
                            f"{path} and {self.files[min(episodes)].name} have different arrays: "
                            f"{form_of(layout.columns)}, and {form_of(first.columns)}"
                        )
                    episodes[number] = self._episode(file, layout, number)
                    odd_starts += bool(file.read("action", 0, 1).any())
                    file.verify(one.key for one in layout.dropped if one.key in file.names)
                    cut += layout.flag_rows > layout.rows
                first = first or layout
                dropped |= {one.key: one for one in layout.dropped}
            except RbtoolError as error:
                damaged[number] = error
            progress(1)
        if first is None:
            raise next(iter(damaged.values()))
        notes = [*_notes(episodes, odd_starts)]
        if cut:
            which = "1 file" if cut == 1 else f"{cut:,} files"
            notes.append(f"the last row of {which} is missing: only the flags have it")
        return FoundEpisodes(first.columns, tuple(dropped.values()), episodes, damaged, tuple(notes))

    def _episode(self, file: NpzRows, layout: Layout, number: int) -> RowEpisode:
        if not layout.rows:
            raise FormatError(f"{file.path} has no rows")
        is_cut, rows = layout.flag_rows > layout.rows, layout.flag_rows
        if is_cut and (file.read("action", 0, 1).any() or file.read("reward", 0, 1).any()):
            raise FormatError(
                f"{file.path}: its flags have {rows:,} rows, but the other arrays {layout.rows:,}, and the first row "
                "has an action or a reward: it is not known which row is missing"
            )
        marked = {name: _marked(file, name, rows) for name in FLAGS if name in file.names}
        if IS_FIRST in marked and marked[IS_FIRST] != [0]:
            raise FormatError(f"{file.path}: is_first is set in rows {_some(marked[IS_FIRST])}, expected only row 0")
        for name in (IS_LAST, IS_TERMINAL):
            if name in marked and marked[name] not in ([], [rows - 1]):
                raise FormatError(
                    f"{file.path}: {name} is set in rows {_some(marked[name])}, expected only row {rows - 1:,}: a file "
                    "is one episode"
                )
        text = {"file": file.path.name}
        if is_cut:
            return RowEpisode(number, 0, layout.rows, begins=True, ended=False, terminated=False, text=text)
        if IS_TERMINAL in marked:
            terminated = bool(marked[IS_TERMINAL])
        else:
            terminated = DISCOUNT in file.names and not file.read(DISCOUNT, rows - 1, rows).any()
        ended = terminated or bool(marked.get(IS_LAST))
        return RowEpisode(number, 0, rows, begins=True, ended=ended, terminated=terminated, text=text)

    def read(self, episode: RowEpisode, name: str, start: int, stop: int) -> Array:
        if self._open is None or self._open[0] != episode.number:
            self.close()
            self._open = episode.number, NpzRows(self.files[episode.number])
        return self._open[1].read(name, start, stop)

    def verify_read(self, episode: RowEpisode) -> None:
        if self._open is not None and self._open[0] == episode.number:
            self._open[1].verify_read()

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class Shards(FileEpisodes):
    """HDF5 shards, which are consecutive parts of one table of rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(in_order(files))
        self._open: dict[int, Hdf5Rows] = {}

    def _shard(self, number: int) -> Hdf5Rows:
        found = self._open.pop(number, None)
        if found is None:
            while len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            found = Hdf5Rows(self.files[number])
        self._open[number] = found
        return found

    @cached_property
    def _layouts(self) -> list[Layout]:
        found: list[Layout] = []
        for number, path in enumerate(self.files):
            shard = self._shard(number)
            if STEP_TYPE not in shard.names:
                raise FormatError(f"{path} has no {STEP_TYPE!r}, which marks where episodes start and end")
            found.append(layout_of(shard, (STEP_TYPE,)))
            if found[-1].flag_rows != found[-1].rows:
                raise FormatError(f"{path}: step_type and the observations have different numbers of rows")
            if found[-1].columns != found[0].columns:
                raise FormatError(
                    f"{path} and {self.files[0].name} have different arrays: {form_of(found[-1].columns)}, and "
                    f"{form_of(found[0].columns)}"
                )
        return found

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each shard, and the number of all rows."""
        return list(itertools.accumulate((layout.rows for layout in self._layouts), initial=0))

    def find(self, progress: Callable[[int], None]) -> FoundEpisodes:
        kinds, ends = self._step_types()
        if not len(kinds):
            raise FormatError(f"{self.files[0].parent} has no rows: its shards are empty")
        missing, gaps = _missing(self.files), self._gaps()
        begins = np.flatnonzero(kinds == _FIRST)
        cuts = np.unique([0, len(kinds), *gaps, *begins.tolist(), *(np.flatnonzero(kinds == _LAST) + 1).tolist()])
        has_discount = any(column.name == DISCOUNT for column in self._layouts[0].columns)
        episodes: dict[int, RowEpisode] = {}
        for number, (start, stop) in enumerate(itertools.pairwise(cuts.tolist())):
            ended = bool(kinds[stop - 1] == _LAST)
            terminated = ended and has_discount and stop - 1 in ends
            episodes[number] = RowEpisode(number, start, stop, bool(kinds[start] == _FIRST), ended, terminated)
            progress(1)
        odd_starts = sum(self.read(episodes[0], "action", row, row + 1).any() for row in begins.tolist())
        notes = [*_notes(episodes, int(odd_starts))]
        if missing:
            notes.append(f"shards {_some(missing)} are missing: the rows around them are not joined")
        dropped = {one.key: one for layout in self._layouts for one in layout.dropped}
        return FoundEpisodes(self._layouts[0].columns, tuple(dropped.values()), episodes, {}, tuple(notes))

    def _step_types(self) -> tuple[Array, set[int]]:
        """Return the step type of all rows, and the rows of type LAST with a discount of 0."""
        kinds, ends = [np.zeros(0, np.int8)], set[int]()
        for number, layout in enumerate(self._layouts):
            shard = self._shard(number)
            for start, stop in blocks(layout.rows, _FLAG_ROWS):
                found = shard.read(STEP_TYPE, start, stop).reshape(-1)
                odd = ~np.isin(found, (0, 1, 2))
                if odd.any():
                    at = int(odd.argmax())
                    raise FormatError(f"{shard.path}: step_type is {found[at]} in row {start + at:,}, expected 0 to 2")
                kinds.append(found.astype(np.int8))
                if DISCOUNT in shard.names:
                    discount = shard.read(DISCOUNT, start, stop).reshape(stop - start, -1)
                    zero = (found == _LAST) & ~discount.any(axis=1)
                    ends.update((self._starts[number] + start + np.flatnonzero(zero)).tolist())
        return np.concatenate(kinds), ends

    def _gaps(self) -> list[int]:
        """Return the first row after each missing shard."""
        numbers = [_number_of(path) for path in self.files]
        return [
            self._starts[at + 1]
            for at, (one, other) in enumerate(itertools.pairwise(numbers))
            if one is not None and other is not None and other != one + 1
        ]

    def read(self, episode: RowEpisode, name: str, start: int, stop: int) -> Array:
        parts = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[number], min(stop, self._starts[number + 1])
            if end > start:
                parts.append(self._shard(number).read(name, start - begin, end - begin))
            start, number = max(start, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Close the files that are open."""
        while self._open:
            self._open.popitem()[1].close()


def in_order(shards: Sequence[Path]) -> list[Path]:
    """Sort shards by the last number in their names; FormatError if one has no number, or two have the same."""
    numbers = {path: _number_of(path) for path in shards}
    if len(shards) > 1:
        without = [path.name for path, number in numbers.items() if number is None]
        if without:
            raise FormatError(f"{without[0]} has no number in its name: the order of the shards is not known")
        twice = [path.name for path in shards if list(numbers.values()).count(numbers[path]) > 1]
        if twice:
            raise FormatError(f"{' and '.join(sorted(twice)[:2])} have the same number: their order is not known")
    return sorted(shards, key=lambda path: (numbers[path] or 0, path.name))


def _number_of(shard: Path) -> int | None:
    digits = re.findall(r"\d+", shard.stem, re.ASCII)
    return int(digits[-1]) if digits else None


def _missing(files: Sequence[Path]) -> list[int]:
    numbers = {number for path in files if (number := _number_of(path)) is not None}
    if len(files) < 2 or max(numbers) - min(numbers) > 100_000:
        return []
    return [number for number in range(min(numbers), max(numbers)) if number not in numbers]


def _marked(file: ArrayFile, name: str, rows: int) -> list[int]:
    """Return the rows in which a flag is set; only some of them if there are many."""
    found: list[int] = []
    for start, stop in blocks(rows, _FLAG_ROWS):
        found += (start + np.flatnonzero(flag_rows(file, name, start, stop))[:1000]).tolist()
    return found


def _some(numbers: Sequence[int]) -> str:
    listed = ", ".join(f"{number:,}" for number in numbers[:5]) + (", …" if len(numbers) > 5 else "")
    return listed or "none"


def _episodes(numbers: Sequence[int]) -> str:
    return f"episode{'s' if len(numbers) > 1 else ''} {_some(numbers)}"


def _notes(episodes: Mapping[int, RowEpisode], odd_starts: int) -> Iterator[str]:
    single = [one.number for one in episodes.values() if not len(one)]
    if single:
        yield f"{_episodes(single)} {'is' if len(single) == 1 else 'are'} left out: one row, which is not a step"
    cut = [one.number for one in episodes.values() if not one.begins]
    if cut:
        yield f"{_episodes(cut)} {'begins' if len(cut) == 1 else 'begin'} in the middle: the rows before are missing"
    open_ends = [one.number for one in episodes.values() if len(one) and not one.ended]
    if open_ends:
        kept = "ends without a flag: it is unfinished, and kept"
        if len(open_ends) > 1:
            kept = "end without a flag: unfinished episodes, which are kept"
        yield f"{_episodes(open_ends)} {kept}"
    if odd_starts:
        some = "1 episode" if odd_starts == 1 else f"{odd_starts:,} episodes"
        yield (
            f"the first row of {some} has an action that is not 0: a row holds the action that led to it, so this one "
            "belongs to no step"
        )


_TRIED = 3
_SUITES = frozenset({"main", "distracting", "multitask"})


class Vd4rlReader(SurveyedReader[FoundEpisodes]):
    """Reads a folder of V-D4RL, or one of its files: npz files of one episode each (64px), or HDF5 shards (84px).

    `image` or `observation` becomes `pixels`, in the stored layout; `action`, `reward` and `discount` of a step are
    taken from the row after it, because a row holds what led to it. Any other array with a row for each observation
    becomes `state.NAME`. `is_init` is set in the first step after a reset. An episode is terminated if `is_terminal`
    (or, without it, a `discount` of 0) marks its last row, else truncated.

    Npz files are numbered as episodes in the order of their names, and each episode has the name of its file as the
    text `file`. Shards are in the order of their numbers, and episodes that cross from one to the next are joined.

    Option: `id`, the id of the published dataset. Raises FormatError for arrays that contradict each other,
    CorruptDataError for damaged files.
    """

    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a file, or a folder of files, with the arrays of V-D4RL."""
        try:
            files = _files_at(path)
            return any(_looks_right(file) for file in files[:_TRIED])
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the files."""
        files = _files_at(self.path)
        if not files:
            raise FormatError(f"{self.path} has neither npz files nor HDF5 files, or both")
        is_npz = files[0].suffix.lower() == NPZ_SUFFIX or begins_as_zip(files[0])
        self._episodes: FileEpisodes = EpisodeFiles(files) if is_npz else Shards(files)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts about the folder."""
        found = self.looked_over(progress)
        episodes = {number: one for number, one in found.episodes.items() if len(one)}
        numbers = sorted(episodes.keys() | found.damaged.keys())
        if not episodes and not found.damaged:
            raise FormatError(f"{self.path} has no steps: each of its episodes is a single row")
        lengths = [len(episodes[number]) if number in episodes else 0 for number in numbers]
        return SourceFacts(
            source="vd4rl",
            id=self.id_or(_id_of(self.path)),
            fields=_fields(found.columns),
            episode_numbers=numbers,
            steps=sum(lengths),
            renamed_keys=_renamed(found.columns),
            dropped_keys=found.dropped,
            notes=(
                "the action, reward and discount of a step are those of the row after it",
                *found.notes,
                *notes_on_identical(self._episodes.files),
            ),
            lengths=lengths,
        )

    def look(self, progress: Callable[[int], None]) -> FoundEpisodes:
        """Read the flags of all files and find the episodes."""
        return self._episodes.find(progress)

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read."""
        refuse_damaged(numbers, self.found.damaged)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        one, columns = self.found.episodes[number], self.found.columns
        rows = self.piece_rows(_fields(columns))
        states = [column.field.key for column in columns if column.timing == "state"]
        kept: dict[Key, Array] = {}
        for start in range(one.start, one.stop - 1, rows):
            stop = min(start + rows, one.stop - 1)
            found = {column.field.key: self._rows(one, column, start, stop, kept) for column in columns}
            found[IS_INIT] = np.zeros((stop - start, 1), bool)
            found[IS_INIT][0] = one.begins and start == one.start
            kept = {key: found[key][-1:].copy() for key in states}
            if stop == one.stop - 1:
                self._episodes.verify_read(one)
            yield _piece(one, found, start, stop)

    def _rows(self, one: RowEpisode, column: ArrayColumn, start: int, stop: int, kept: dict[Key, Array]) -> Array:
        """Read the rows of a column for the steps `[start, stop)`; no row is read twice."""
        read = self._episodes.read
        if column.timing != "state":
            rows = read(one, column.name, start + 1, stop + 1)
            return rows.reshape(stop - start) if column.field.key == REWARD else rows
        before = kept.get(column.field.key)
        if before is None:
            return read(one, column.name, start, stop + 1)
        return np.concatenate((before, read(one, column.name, start + 1, stop + 1)))

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        one = self.found.episodes[number]
        for start in range(one.start, one.stop - 1, OUTCOME_ROWS):
            stop = min(start + OUTCOME_ROWS, one.stop - 1)
            rewards = self._episodes.read(one, "reward", start + 1, stop + 1).reshape(stop - start)
            yield _piece(one, {REWARD: rewards}, start, stop)

    def files(self) -> list[Path]:
        """Return all files."""
        return self._episodes.files

    def on_close(self) -> None:
        """Close the files."""
        self._episodes.close()


def _piece(one: RowEpisode, columns: dict[Key, Array], start: int, stop: int) -> Piece:
    last = stop == one.stop - 1
    terminated, truncated = np.zeros(stop - start, bool), np.zeros(stop - start, bool)
    if last:
        terminated[-1], truncated[-1] = one.terminated, one.ended and not one.terminated
    return Piece(
        one.number, columns, terminated, truncated, first=start == one.start, last=last, text=dict(one.text)
    )  # fmt: skip


def _fields(columns: Sequence[ArrayColumn]) -> tuple[tuple[Field, Timing], ...]:
    found = [(column.field, column.timing) for column in columns]
    return (*found, (Field(IS_INIT, "bool", (1,), "info"), "step"))


def _renamed(columns: Sequence[ArrayColumn]) -> dict[str, str]:
    keys = {column.name: column.field.key for column in columns}
    return {name: key_name(key) for name, key in keys.items() if key == PIXELS or key[0] == "state"}


def _id_of(path: Path) -> str:
    """Return the path of a folder from its suite on, which is the form of ids; else its name."""
    parts = path.absolute().parts
    at = max((place for place, part in enumerate(parts) if part in _SUITES), default=len(parts) - 1)
    return "/".join(parts[at:]) if path.is_dir() else path.stem


def _files_at(path: Path) -> list[Path]:
    """Return the file itself, or the npz files or HDF5 files of a folder, sorted; [] if it has both."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith(".") and file.is_file()]
    npz = [file for file in files if file.suffix.lower() == NPZ_SUFFIX]
    shards = [file for file in files if file.suffix.lower() in HDF5_SUFFIXES]
    return [] if npz and shards else npz or shards


def _looks_right(file: Path) -> bool:
    if begins_as_zip(file):
        return looks_like_vd4rl(array_names(file)) or first_name_of_cut(file) == "image"
    return looks_like_vd4rl(names_in(file))


class Vd4rlSource(HubFolderSource):
    """Downloads from the repository `conglu/vd4rl`: ids are paths below `vd4rl`, like `main/walker_walk/random/64px`.

    An id names exactly this folder, and never another one whose path contains it.
    """

    name = "vd4rl"
    repository = "conglu/vd4rl"
    folder = "vd4rl"
    suffixes = (".npz", ".hdf5")

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the id, which the folder of the files does not tell."""
        return {"id": dataset_id}
