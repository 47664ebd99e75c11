"""Base class of readers of HDF5 files with one group per episode, and the survey of all groups.

The survey decides which columns are kept. Required columns must have the same form in every episode: the most frequent
form is taken as the right one, and an episode with another form is an error when it is read. Any other column is kept
if all episodes have it in the same form, with one row per step. Columns of states may have one row more than there are
steps, in all episodes or in none.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece
from ...core.format.manifest import Dropped
from ...core.format.open_files import pread_into
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, Field, Key, Role, Timing
from .hdf5 import GroupFile, StoredGroup
from .readers import (
    OUTCOME_ROWS,
    ColumnForm,
    ColumnPath,
    FileReader,
    StoredColumn,
    column_name,
    require_single,
    why_no_key,
    zero_or_one,
)

_Signature: TypeAlias = tuple[tuple[ColumnPath, ColumnForm, int], ...]
"""Required columns with their forms, and how many more rows than steps they have: 0, 1, or `_NO_ROWS` otherwise."""
_NO_ROWS = -1


class OtherColumn(NamedTuple):
    """A column that is not required: its form, the number of episodes that have it, and why it cannot be kept."""

    form: ColumnForm
    found: int
    why: str


@dataclass(slots=True)
class _Alike:
    """Episodes whose required columns have the same forms."""

    names: list[str] = field(default_factory=list)
    others: dict[ColumnPath, OtherColumn] = field(default_factory=dict)


class GroupSurvey:
    """Collects the columns of all episodes, and finds those that the episodes have in common.

    Args:
        required: tells whether a column is required.
        strict: columns that must be numbers with one row per step.
        most_more: the number of rows, 0 or 1, that a column of numbers may have in addition to one per step; None for a
            column that is left out if it does not have one row per step.
    """

    def __init__(
        self, required: Callable[[ColumnPath], bool], strict: Sequence[ColumnPath],
        most_more: Callable[[ColumnPath], int | None] = lambda path: None,
    ) -> None:  # fmt: skip
        self._required = required
        self._strict = tuple(strict)
        self._most_more = most_more
        self._steps_of_longer: dict[str, int] = {}
        self._alike: dict[_Signature, _Alike] = {}
        self._of: dict[str, _Signature] = {}
        self.problems: dict[str, RbtoolError] = {}
        """The error of each episode that cannot be read, by its name."""

    def add(self, name: str, columns: Mapping[ColumnPath, StoredColumn], steps: int) -> None:
        """Add an episode of `steps` steps; FormatError if a column has a forbidden number of rows."""
        for path in self._strict:
            if path in columns:
                self._require_rows(name, path, columns[path], steps)
        more = {path: self._more(name, path, column, steps) for path, column in columns.items()}
        if 1 in more.values():
            self._steps_of_longer[name] = steps
        signature = tuple((path, columns[path].form, more[path]) for path in sorted(columns) if self._required(path))
        alike = self._alike.setdefault(signature, _Alike())
        alike.names.append(name)
        self._of[name] = signature
        for path, column in columns.items():
            if not self._required(path):
                _merge(alike.others, path, name, column, steps)

    def _more(self, name: str, path: ColumnPath, column: StoredColumn, steps: int) -> int:
        """Return how many more rows than steps a column has: 0, 1, or `_NO_ROWS`."""
        most = self._most_more(path) if column.form.kind == "array" else None
        if column.rows == steps or (most == 1 and column.rows == steps + 1):
            return column.rows - steps
        if most is not None:
            raise _other_rows(name, path, column.rows, steps)
        return _NO_ROWS

    def _require_rows(self, name: str, path: ColumnPath, column: StoredColumn, steps: int) -> None:
        if column.form.kind != "array":
            why = column.form.why or "its values are not numbers"
            raise FormatError(f"{name}: {column_name(path)!r} cannot be read as rows: {why}")
        if column.rows != steps:
            raise _other_rows(name, path, column.rows, steps)

    def finish(self) -> SurveyedColumns:
        """Decide which columns the episodes have in common, and add episodes that do not fit to `problems`."""
        longer = self._refuse_longer()
        fitting = [signature for signature in self._alike if signature not in longer]
        if not fitting:
            return SurveyedColumns({}, {}, ())
        common = max(fitting, key=lambda signature: len(self._alike[signature].names))
        first = self._alike[common].names[0]
        for name, signature in self._of.items():
            if signature != common and signature not in longer:
                self.problems[name] = FormatError(f"{name} {_difference(signature, common, first)}")
        kept, dropped = {}, []
        for path, form, more in common:
            if form.kind == "array" and more != _NO_ROWS:
                kept[path] = form
            else:
                unfit = "it does not have one row per step" if form.kind == "array" else "its values are not numbers"
                dropped.append(Dropped(column_name(path), form.why or unfit))
        alike = self._alike[common]
        others = {}
        for path, other in sorted(alike.others.items()):
            missing = len(alike.names) - other.found
            why = other.why or (f"{missing:,} of {len(alike.names):,} episodes do not have it" if missing else "")
            if not why:
                others[path] = other.form
            else:
                dropped.append(Dropped(column_name(path), why))
        return SurveyedColumns(kept, others, tuple(dropped), frozenset(path for path, _, more in common if more == 1))

    def _refuse_longer(self) -> set[_Signature]:
        """Add episodes to `problems` whose column has one extra row, while it has one row per step in others."""
        exact = {path for signature in self._alike for path, _, more in signature if not more}
        odd = {
            signature: path for signature in self._alike for path, _, more in signature if more == 1 and path in exact
        }
        for name, signature in self._of.items():
            if signature in odd:
                steps = self._steps_of_longer[name]
                self.problems[name] = _other_rows(name, odd[signature], steps + 1, steps)
        return set(odd)


class SurveyedColumns(NamedTuple):
    """The columns that sound episodes have in common, and those that cannot be kept.

    Columns have one row per step; those in `longer` have one row more.
    """

    required: Mapping[ColumnPath, ColumnForm]
    others: Mapping[ColumnPath, ColumnForm]
    dropped: tuple[Dropped, ...]
    longer: frozenset[ColumnPath] = frozenset()


def _other_rows(name: str, path: ColumnPath, rows: int, steps: int) -> FormatError:
    return FormatError(f"{name}: {column_name(path)!r} has {rows:,} rows, and the episode has {steps:,} steps")


def _merge(
    others: dict[ColumnPath, OtherColumn], path: ColumnPath, name: str, column: StoredColumn, steps: int
) -> None:
    before = others.get(path)
    why = before.why if before is not None else ""
    if not why and column.form.kind != "array":
        why = column.form.why or "its values are not numbers"
    if not why and column.rows != steps:
        why = f"it has {column.rows:,} rows in {name}, which has {steps:,} steps"
    if not why:
        why = why_no_key(path, (), "column")
    if not why and before is not None and before.form != column.form:
        why = f"it is {_looks(column.form)} in {name}, and {_looks(before.form)} in others"
    others[path] = OtherColumn(column.form, (before.found if before is not None else 0) + 1, why)


def _difference(odd: _Signature, common: _Signature, first: str) -> str:
    """Describe the first difference between the required columns of an episode and of the episode `first`."""
    here, there = ({path: (form, more) for path, form, more in one} for one in (odd, common))
    for path in sorted(here.keys() | there.keys()):
        name = column_name(path)
        if path not in here:
            return f"has no {name!r}, which {first} and others have"
        if path not in there:
            return f"has {name!r}, which {first} and others do not have"
        if here[path] != there[path]:
            (form, more), (other, _) = here[path], there[path]
            if form == other:
                rows = "one row per step" if not more else "another number of rows than steps"
                return f"has {name!r} with {rows}, which {first} and others do not have"
            return f"has {name!r} as {_looks(form)}, and {first} and others as {_looks(other)}"
    return f"differs from {first}"


def _looks(form: ColumnForm) -> str:
    return f"{form.dtype} {list(form.shape)}" if form.kind == "array" else form.kind


Paths: TypeAlias = tuple[ColumnPath, ...]
Places: TypeAlias = tuple[Paths, "array[int]"]
"""Paths of columns, and the offset in the file at which the rows of each begin, -1 if it is not known."""
_NAMED = 5


@dataclass(frozen=True, slots=True)
class GroupEpisode:
    """An episode that is stored in a group.

    Attributes:
        number: its number in the source.
        name: its name in messages.
        file: index of its file.
        group: name of its group in the file.
        steps: its length.
        terminated: the flag of its last step.
        seed: the seed of its reset, if known.
        text: strings that belong to the whole episode, by name.
        problem: why it cannot be read; None for a sound episode.
        places: the offsets of its columns, made by `places_of`.
    """

    number: int
    name: str
    file: int
    group: bytes
    steps: int
    terminated: bool = False
    seed: int | None = None
    text: Mapping[str, str] = field(default_factory=dict)
    problem: RbtoolError | None = None
    places: Places = ((), array("q"))


class GroupRows:
    """Reads rows of one episode, directly from their offset in the file if that is known, else through libhdf5."""

    def __init__(self, file: GroupFile, group: bytes, name: str, places: Mapping[ColumnPath, int]) -> None:
        self._file, self._group, self.name, self._places = file, group, name, places
        self._opened: StoredGroup | None = None

    @property
    def stored(self) -> StoredGroup:
        """The group, open."""
        if self._opened is None:
            self._opened = self._file.group(self._group, self.name)
        return self._opened

    def array(self, path: ColumnPath, start: int, stop: int, form: ColumnForm) -> Array:
        """Read rows `[start, stop)` of a column as a fresh array; CorruptDataError for a damaged file."""
        place = self._places.get(path, -1)
        if place < 0:
            return self.stored.array(path, start, stop, form)
        rows = np.empty((stop - start, *form.shape), form.dtype)
        if rows.size:
            begin = place + start * rows.itemsize * math.prod(form.shape)
            what = f"the rows of {column_name(path)!r} of {self.name}"
            pread_into(rows, self._file.descriptor, self._file.path, begin, what)
        return rows


def places_of(columns: Mapping[ColumnPath, StoredColumn], known: dict[Paths, Paths]) -> Places:
    """Return the offsets of columns in little memory: equal tuples of paths are stored once, in `known`."""
    paths = tuple(columns)
    return known.setdefault(paths, paths), array("q", (column.place for column in columns.values()))


@dataclass(frozen=True, slots=True)
class GroupColumn:
    """A column that is kept: its path in the group, its key, and when its rows are known.

    A column with an empty path consists of zeros. A `state` is stored in one of four ways, of which only the first has
    no value after the last step:

        default    rows 0 … T-1: the value before each step
        after      rows 0 … T-1: the value before each step; the column `after` has the value after each step
        initial    rows 0 … T-1: the value after each step; the only row of the column `initial` is the first value
        longer     rows 0 … T: the value before each step, then the one after the last step
    """

    path: ColumnPath
    key: Key
    role: Role
    timing: Timing
    form: ColumnForm
    after: ColumnPath | None = None
    initial: ColumnPath | None = None
    longer: bool = False

    @property
    def field(self) -> Field:
        """The source field; rewards have one number per row."""
        return Field(self.key, self.form.dtype, () if self.key == REWARD else self.form.shape, self.role)

    @property
    def is_shifted(self) -> bool:
        """Whether the value after a step is only stored as the row of the next step, and so missing after the last."""
        return self.timing == "state" and self.after is None and self.initial is None and not self.longer

    def read(self, group: GroupRows, start: int, stop: int, steps: int) -> tuple[Array, Array | None]:
        """Read the values before steps `[start, stop)` of `steps`, and those after them, None if they are shifted.

        A shifted column has one more row, the value after the last of these steps, unless the episode ends there.
        """
        if not self.path:
            return np.zeros((stop - start, *self.form.shape), self.form.dtype), None
        if self.initial is not None:
            first = max(start - 1, 0)
            stored = group.array(self.path, first, stop, self.form)
            if start == 0:
                stored = np.concatenate((group.array(self.initial, 0, 1, self.form), stored))
            return stored[:-1], stored[1:]
        if self.longer:
            stored = group.array(self.path, start, stop + 1, self.form)
            return stored[:-1], stored[1:]
        after = None if self.after is None else group.array(self.after, start, stop, self.form)
        rows = group.array(self.path, start, min(stop + 1, steps) if self.is_shifted else stop, self.form)
        return (rows.reshape(len(rows)) if self.key == REWARD else rows), after


class GroupFiles:
    """Files of which only one is open at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: tuple[int, GroupFile] | None = None

    def open(self, index: int) -> GroupFile:
        """Return a file, opened; the file that was open before is closed."""
        if self._open is None or self._open[0] != index:
            self.close()
            self._open = (index, GroupFile(self.paths[index]))
        return self._open[1]

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class GroupReader(FileReader):
    """Reads episodes from groups of HDF5 files.

    A subclass implements `recognises`; `on_open`, which sets `opened`; and `survey`, which sets `episodes` (by number),
    `columns`, and the other attributes named in `surveyed`. It may override `read_flags`.
    """

    surveyed: tuple[str, ...] = ("episodes", "columns")

    opened: GroupFiles
    episodes: Mapping[int, GroupEpisode]
    columns: Sequence[GroupColumn]

    @abstractmethod
    def on_open(self) -> None:
        """Set `opened`."""

    def survey_state(self) -> dict[str, Any] | None:
        """Return the attributes that `surveyed` names."""
        return {name: getattr(self, name) for name in self.surveyed} if hasattr(self, "episodes") else None

    def take_survey(self, state: Mapping[str, Any]) -> None:
        """Set the attributes that `surveyed` names."""
        for name in self.surveyed:
            setattr(self, name, state[name])

    def read_flags(self, episode: GroupEpisode, group: GroupRows, start: int, stop: int) -> tuple[Array, Array]:
        """Return `terminated` and `truncated` of steps, bool; by default only the last step of the episode has one."""
        terminated, truncated = np.zeros((2, stop - start), bool)
        if stop == episode.steps:
            terminated[-1], truncated[-1] = episode.terminated, not episode.terminated
        return terminated, truncated

    @property
    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """The source fields with their timings."""
        return tuple((column.field, column.timing) for column in self.columns)

    @property
    def lacks_final(self) -> bool:
        """Whether the source has no observation after the last step of an episode."""
        return any(column.is_shifted for column in self.columns)

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the problem of the first of these episodes that has one; the message names the others."""
        odd = [self.episodes[number] for number in numbers if self.episodes[number].problem is not None]
        if not odd:
            return
        problem, more = odd[0].problem, len(odd) - 1
        assert problem is not None
        kind = CorruptDataError if isinstance(problem, CorruptDataError) else FormatError
        names = ", ".join(str(episode.name) for episode in odd[1:_NAMED]) + (", …" if len(odd) > _NAMED else "")
        others = f"; {more:,} more of {len(numbers):,} episodes cannot be read ({names})" if more else ""
        sound = len(numbers) > len(odd)
        hint = "choose the others: --episodes A:B,C" if sound else problem.hint
        raise kind(f"{self.path}: {problem.message}{others}", hint=hint) from problem

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        yield from self._pieces(number, self.columns, self.piece_rows(self.fields))

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all columns if next observations are stored separately."""
        if any(column.after is not None for column in self.columns):
            yield from self.read_episode(number)
        else:
            yield from self._pieces(number, [one for one in self.columns if one.key == REWARD], OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[GroupColumn], rows: int) -> Iterator[Piece]:
        episode, lacks = self.episodes[number], self.lacks_final
        places = dict(zip(*episode.places, strict=True))
        for start in range(0, episode.steps, rows):
            stop = min(start + rows, episode.steps)
            group = GroupRows(self.opened.open(episode.file), episode.group, episode.name, places)
            found: dict[Key, Array] = {}
            after: dict[Key, Array] = {}
            for column in columns:
                found[column.key], following = column.read(group, start, stop, episode.steps)
                if following is not None:
                    after[column.key] = following
            terminated, truncated = self.read_flags(episode, group, start, stop)
            yield Piece(
                number, found, terminated, truncated, first=not start, last=stop == episode.steps, seed=episode.seed,
                text=episode.text, next=after, final=Final.MISSING if lacks else Final.OBSERVED,
            )  # fmt: skip

    def files(self) -> list[Path]:
        """All files."""
        return list(self.opened.paths)

    def on_close(self) -> None:
        """Close the file that is open."""
        self.opened.close()


def flags_of(values: Array, path: ColumnPath, name: str, start: int = 0) -> Array:
    """Return a flag of steps of the episode `name` as bool `[n]`; FormatError for numbers except 0 and 1."""
    return zero_or_one(values, f"{name}: {column_name(path)!r}", "step", start)


def single_forms(
    columns: Mapping[ColumnPath, StoredColumn], paths: Sequence[ColumnPath], name: str
) -> dict[ColumnPath, ColumnForm]:
    """Return the forms of the columns among `paths` that the episode has; FormatError unless rows are one number."""
    forms = {path: columns[path].form for path in paths if path in columns}
    for path, form in forms.items():
        require_single(f"{name}: {path[0]!r} has", form.shape)
    return forms


@dataclass(slots=True)
class MappedColumns:
    """The columns that are kept, those left out, keys that differ from the names in the file, and notes."""

    columns: list[GroupColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
