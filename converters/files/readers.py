"""Base classes and helpers of readers: columns of episodes, blocks of rows, flags, errors of damaged files.

Rows are read in blocks, so that many short episodes cost few reads, and ascending reads never go back.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.files import FETCH_AGAIN, digest_file, disk_failed, open_regular, reading_from
from ...core.format.manifest import Dropped
from ...core.progress import counted, some_of
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, row_bytes, ted_fields

ColumnPath: TypeAlias = tuple[str, ...]
"""Names from the episode to a column, as in the file: `("infos", "debug", "t")`."""


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """How the rows of a column are stored.

    Attributes:
        kind: `array` of numbers, `text`, `bytes` (such as JPEG), or `odd`, which cannot be read.
        dtype: element type of an `array`.
        shape: shape of a row of an `array`.
        why: reason why a column is `odd`.
        flat: whether rows of an `array` are stored with one dimension, whatever their real shape.
        holes: whether some values are missing, and read as NaN.
    """

    kind: Literal["array", "text", "bytes", "odd"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    why: str = ""
    flat: bool = False
    holes: bool = field(default=False, compare=False)

    @property
    def is_jpeg(self) -> bool:
        """Whether images in this column are JPEG: `bytes`, or rows of bytes where all files have the same length."""
        return self.kind == "bytes" or (self.dtype == "uint8" and len(self.shape) == 1 and not self.flat)


class StoredColumn(NamedTuple):
    """A column of one episode: its form and its number of rows.

    `place` is the offset in the file at which the rows begin if they are stored contiguously, as in memory; -1 if only
    the library of the format can read them.
    """

    form: ColumnForm
    rows: int
    place: int = -1


def column_name(path: ColumnPath) -> str:
    """Join the path of a column with slashes."""
    return "/".join(path)


_MOST_SAID = 200
# A changed byte may become a name, a type or a size: libraries do not document which exceptions follow.
DAMAGED: tuple[type[Exception], ...] = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)


@contextmanager
def reading(what: str, file: Path, *also: type[Exception], hint: str = FETCH_AGAIN) -> Iterator[None]:
    """Turn the exceptions that a library raises for damaged files, `DAMAGED` and `also`, into CorruptDataError.

    Errors of the disk stay OSError.
    """
    try:
        yield
    except (RbtoolError, MemoryError):
        raise
    except (*DAMAGED, *also) as error:
        if disk_failed(error):
            with reading_from(file):
                raise
        reason = str(error).splitlines()[0].strip(" '\"")[:_MOST_SAID] if str(error) else type(error).__name__
        raise CorruptDataError(
            f"{what} in {file} cannot be read, the file is damaged or was cut: {reason}", hint=hint
        ) from error


BLOCK_BYTES = 16 << 20
"""Bytes of rows in memory at a time, unless a reader sets its own `piece_bytes`."""


def blocks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` for consecutive ranges of at most `size` rows."""
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


class RowBlocks:
    """Reads rows of one column in blocks, and keeps the last block.

    Arrays that were returned stay valid when another block is read.

    Args:
        read: reads rows `[start, stop)` as a fresh array.
        total: the number of rows of the column.
        rows: the number of rows in a block.
    """

    def __init__(self, read: Callable[[int, int], Array], total: int, rows: int) -> None:
        self._read, self._total, self._rows = read, total, max(1, rows)
        self._start = self._stop = 0
        self._block: Array = np.zeros(0)

    def read(self, start: int, stop: int) -> Array:
        """Return rows `[start, stop)`; rows in the kept block are not read again."""
        if not self._start <= start <= stop <= self._stop:
            end = min(self._total, max(stop, start + self._rows))
            if self._start <= start < self._stop:
                kept = self._block[start - self._start :]
                self._block = np.concatenate((kept, self._read(self._stop, end)))
            else:
                self._block = self._read(start, end)
            self._start, self._stop = start, end
        return self._block[start - self._start : stop - self._start]


_DEEPEST_KEY = 32
OUTCOME_ROWS = 1 << 20
"""Rows of rewards and flags in memory at a time."""
Survey = TypeVar("Survey")


class FileReader(Reader):
    """A reader that yields pieces of about `piece_bytes` bytes of TED."""

    piece_bytes = BLOCK_BYTES

    def piece_rows(self, fields: Iterable[tuple[Field, Timing]]) -> int:
        """Return how many rows of these source fields a piece has."""
        return max(1, self.piece_bytes // max(1, row_bytes(ted_fields(fields))))

    def id_or(self, name: str) -> str:
        """Return the option `id` if the user gave one, else `name`."""
        stated = self.options.get("id")
        return name if stated is None else str(stated)


class SurveyedReader(FileReader, Generic[Survey]):
    """A reader that surveys its source once, when `found` is first needed; worker processes take the result over.

    A subclass implements `look`.
    """

    _found: Survey | None = None

    @abstractmethod
    def look(self, progress: Callable[[int], None]) -> Survey:
        """Survey the source; call `progress` with the number of further episodes that were surveyed."""

    def looked_over(self, progress: Callable[[int], None]) -> Survey:
        """Return the result of `look`, which is called only once."""
        if self._found is None:
            self._found = self.look(progress)
        return self._found

    @property
    def found(self) -> Survey:
        """The result of `look`."""
        return self.looked_over(lambda episodes: None)

    def survey_state(self) -> Survey:
        """Return the result of `look`, for a reader in another process."""
        return self.found

    def take_survey(self, state: Survey) -> None:
        """Take over the result of another process."""
        self._found = state


class RowReader(FileReader):
    """Reads a table in which each row is an episode of one terminated step, without reward and next observation."""

    _blocks: Iterator[Mapping[Key, Array]] = iter(())
    _block: Mapping[Key, Array] = MappingProxyType({})
    _start = _stop = 0

    @abstractmethod
    def row_blocks(self) -> Iterator[Mapping[Key, Array]]:
        """Yield all rows in order, in blocks."""

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the one step of an episode."""
        if number < self._start or not self._stop:
            self._blocks, self._start, self._stop = self.row_blocks(), 0, 0
        while number >= self._stop:
            block = next(self._blocks, None)
            if block is None:
                raise CorruptDataError(f"{self.path} changed while it was read")
            self._block, self._start = block, self._stop
            self._stop += len(next(iter(block.values())))
        at = number - self._start
        columns = {key: rows[at : at + 1] for key, rows in self._block.items()}
        yield Piece(number, columns, np.ones(1, bool), np.zeros(1, bool), first=True, last=True)

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock]:
        """Yield blocks of many episodes; ascending numbers take one pass over the files."""
        wanted = np.asarray(numbers, np.int64)
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) < 1) + 1):
            stop = 0
            for block in self.row_blocks():
                start, stop = stop, stop + len(next(iter(block.values())))
                here = run[np.searchsorted(run, start) : np.searchsorted(run, stop)]
                if count := len(here):
                    yield EpisodeBlock(
                        here, np.arange(1, count + 1), {key: rows[here - start] for key, rows in block.items()},
                        np.ones(count, bool), np.zeros(count, bool), np.full(count, Final.OBSERVED, np.uint8),
                    )  # fmt: skip
                if not len(run) or stop > run[-1]:
                    break
            if len(run) and stop <= run[-1]:
                raise CorruptDataError(f"{self.path} changed while it was read")

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the flags of an episode; there is no reward."""
        yield Piece(number, {}, np.ones(1, bool), np.zeros(1, bool), first=True, last=True)


def require_single(what: str, shape: Sequence[int]) -> None:
    """Raise FormatError unless rows of this shape are one number; `what` begins the message, as in `rewards have`."""
    if math.prod(shape) != 1:
        raise FormatError(f"{what} rows of shape {list(shape)}, expected one number")


def zero_or_one(values: Array, what: str, row: str = "row", start: int = 0) -> Array:
    """Return a flag as bool `[n]`; FormatError for numbers that are neither 0 nor 1.

    In the message, `what` names the flag and `row` the kind of rows; `start` is the number of the first row.
    """
    values = values.reshape(len(values))
    if values.dtype == bool:
        return values
    odd = (values != 0) & (values != 1)
    if odd.any():
        at = int(odd.argmax())
        raise FormatError(f"{what} is {values[at]} in {row} {start + at:,}, expected 0 or 1")
    flags: Array = values != 0
    return flags


def why_no_key(key: Key, taken: Iterable[Key], what: str) -> str:
    """Return why a column cannot have this key beside the taken ones, or ""; `what` is a word for a column."""
    if len(key) > _DEEPEST_KEY:
        return "it is nested too deeply"
    return f"another {what} has its name" if any(key[: len(one)] == one[: len(key)] for one in taken) else ""


ReadRows: TypeAlias = Callable[[int, int, int], Array]
"""Reads rows `[start, stop)` of one episode: its number, start, stop."""


@dataclass(frozen=True, slots=True)
class EpisodeColumn:
    """A column of a source.

    Attributes:
        field: the field under its root key.
        timing: when its rows are known.
        read: reads rows of an episode. A `state` without `after` has one row more than there are steps if the
            observation after the last step is stored.
        after: of a `state`, reads the values after each step, if the source stores them separately.
    """

    field: Field
    timing: Timing
    read: ReadRows
    after: ReadRows | None = None


@dataclass(frozen=True, slots=True)
class ColumnEpisode:
    """An episode of a source.

    Attributes:
        length: the number of steps.
        terminated: the flag of the last step.
        truncated: the flag of the last step.
        observed: whether the observation after the last step is stored.
        text: strings that belong to the whole episode, by name.
    """

    length: int
    terminated: bool = False
    truncated: bool = False
    observed: bool = False
    text: Mapping[str, str] | None = None


class ColumnReader(FileReader):
    """A reader whose `on_open` sets `columns` and `episodes`, from which facts and pieces are made.

    Episodes without steps are left out, and a note names them.
    """

    columns: Sequence[EpisodeColumn]
    """The columns under their root keys."""
    episodes: Sequence[ColumnEpisode]
    """The episodes in storage order, numbered from 0."""

    def facts_of(
        self,
        source: str,
        name: str,
        notes: Sequence[str],
        *,
        dropped: Sequence[Dropped] = (),
        renamed: Mapping[str, str] | None = None,
        documents: Mapping[str, bytes] | None = None,
    ) -> SourceFacts:
        """Return the facts; `name` is the id of the dataset."""
        numbers = [number for number, one in enumerate(self.episodes) if one.length]
        empty = [number for number, one in enumerate(self.episodes) if not one.length]
        chosen = [self.episodes[number] for number in numbers]
        has_after = all(column.after is not None for column in self.columns if column.timing == "state")
        missing = not has_after and not all(one.observed for one in chosen)
        never = missing and not any(one.observed for one in chosen)
        return SourceFacts(
            source=source,
            id=name,
            fields=tuple((column.field, column.timing) for column in self.columns),
            episode_numbers=numbers,
            steps=sum(one.length for one in chosen),
            renamed_keys=dict(renamed or {}),
            dropped_keys=tuple(sorted(dropped, key=lambda one: one.key)),
            notes=(*notes, *filter(None, [self.note_of_empty(empty)] if empty else [])),
            documents=dict(documents or {}),
            lengths=[one.length for one in chosen],
            final_missing=missing,
            last_terminated=[one.terminated for one in chosen] if never else None,
        )

    def note_of_empty(self, numbers: Sequence[int]) -> str:
        """Return the note on episodes without steps."""
        names = some_of(numbers, 10)
        return f"{counted(len(numbers), 'episode')} without steps left out: {names}"

    @cached_property
    def _rows(self) -> int:
        return self.piece_rows((column.field, column.timing) for column in self.columns)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        yield from self._pieces(number, self.columns, self._rows)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all columns if next observations are stored separately."""
        if any(column.after is not None for column in self.columns):
            yield from self.read_episode(number)
        else:
            columns = [column for column in self.columns if column.field.role == "reward"]
            yield from self._pieces(number, columns, OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[EpisodeColumn], rows: int) -> Iterator[Piece]:
        one = self.episodes[number]
        for start in range(0, one.length, rows):
            stop = min(start + rows, one.length)
            last = stop == one.length
            found: dict[Key, Array] = {}
            following: dict[Key, Array] = {}
            for column in columns:
                more = column.timing == "state" and column.after is None and (not last or one.observed)
                found[column.field.key] = column.read(number, start, stop + more)
                if column.after is not None:
                    following[column.field.key] = column.after(number, start, stop)
            terminated, truncated = np.zeros(stop - start, bool), np.zeros(stop - start, bool)
            terminated[-1], truncated[-1] = last and one.terminated, last and one.truncated
            observed = one.observed or (bool(following) and self._has_all_after)
            yield Piece(
                number, found, terminated, truncated, first=not start, last=last, next=following,
                text=one.text or {} if not start else {}, final=Final.OBSERVED if observed else Final.MISSING,
            )  # fmt: skip

    @cached_property
    def _has_all_after(self) -> bool:
        return all(column.after is not None for column in self.columns if column.timing == "state")


_CHOICES = ("terminated", "truncated")


@dataclass(frozen=True, slots=True)
class EndMeaning:
    """Whether ends of episodes are terminal states or time limits, and a note unless the user stated it."""

    terminated: bool
    note: str = ""


def meaning_of_ends(options: Mapping[str, Any], default: str, why: str) -> EndMeaning:
    """Return the meaning of ends that a format does not distinguish: `options["ends"]`, else `default`.

    `why` explains the default and begins the note: `dones are set at terminal states and at time limits alike, and
    RLlib …`. Raises UsageError unless the option is `terminated` or `truncated`.
    """
    asked = stated_ends(options)
    if asked is None:
        other = next(choice for choice in _CHOICES if choice != default)
        return EndMeaning(default == "terminated", f"{why}: taken as {default} (--ends {other} takes them otherwise)")
    return EndMeaning(asked == "terminated")


def stated_ends(options: Mapping[str, Any]) -> str | None:
    """Return the option `ends`, None if not given; UsageError unless it is `terminated` or `truncated`."""
    asked: str | None = options.get("ends")
    if asked not in (None, *_CHOICES):
        raise UsageError(f"--ends is {asked!r}, expected {' or '.join(_CHOICES)}")
    return asked


def refuse_ends(path: Path, options: Mapping[str, Any], why: str) -> None:
    """Raise UsageError if the option `ends` is given for a file that states how each episode ends; `why` says so."""
    if options.get("ends") is not None:
        raise UsageError(f"{path} {why}", hint="leave out --ends")


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people count: `seed2` comes before `seed10`.

    >>> sorted(["seed10", "seed2", "seed"], key=natural_order)
    ['seed', 'seed2', 'seed10']
    """
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


_HEAD = 64 << 10
_SHOWN = 5


def notes_on_identical(files: Iterable[Path]) -> Iterator[str]:
    """Yield a note that names files with identical contents, if there are any.

    Only files of equal size are read, and only those with equal first 64 KB are read whole.
    """
    same = _alike(_alike(_alike([list(files)], lambda file: file.stat().st_size), _head), digest_file)
    if same:
        shown = "; ".join(" = ".join(file.name for file in group[:_SHOWN]) for group in same[:_SHOWN])
        more = ", …" if len(same) > _SHOWN or any(len(group) > _SHOWN for group in same) else ""
        extra = sum(len(group) - 1 for group in same)
        have = "file has" if extra == 1 else "files have"
        yield f"{extra:,} {have} the same contents as another, and all of them are converted: {shown}{more}"


def _alike(groups: Iterable[Sequence[Path]], value_of: Callable[[Path], Hashable]) -> list[list[Path]]:
    """Split each group of files by a value, and keep groups with more than one file."""
    found: list[list[Path]] = []
    for group in groups:
        by_value: dict[Hashable, list[Path]] = {}
        for file in group:
            by_value.setdefault(value_of(file), []).append(file)
        found += [files for files in by_value.values() if len(files) > 1]
    return found


def _head(file: Path) -> int:
    descriptor = open_regular(file)
    try:
        return zlib.crc32(os.pread(descriptor, _HEAD, 0))
    finally:
        os.close(descriptor)
