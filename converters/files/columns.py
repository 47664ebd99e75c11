"""Columns of episodes as files of other libraries store them, and the base class of readers of arrays of steps.

Rows are read in blocks: many short episodes then cost few reads, and ascending reads never go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.files import FETCH_AGAIN, disk_failed, reading_from
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, row_bytes, ted_fields

ColumnPath: TypeAlias = tuple[str, ...]
"""Names from the episode to a column, as in the file: `("infos", "debug", "t")`."""


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """How the rows of a column are stored.

    `array`: elements of type `dtype`, each row of `shape`; `text`: strings; `bytes`: byte strings (JPEG); `odd`: none
    of these, for the reason in `why`. A `flat` array has rows of one dimension whatever their real shape. With
    `holes`, some values are missing and are read as NaN.
    """

    kind: Literal["array", "text", "bytes", "odd"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    why: str = ""
    flat: bool = False
    holes: bool = field(default=False, compare=False)

    @property
    def is_jpeg(self) -> bool:
        """Whether an image stored so is JPEG: frames that happen to be of one length are rows of so many bytes."""
        return self.kind == "bytes" or (self.dtype == "uint8" and len(self.shape) == 1 and not self.flat)


class StoredColumn(NamedTuple):
    """A column of one episode: its form and how many rows it has.

    `place` is the byte of the file at which the rows begin, where they are there as in memory, one after the other; -1
    where only the library of the format finds them.
    """

    form: ColumnForm
    rows: int
    place: int = -1


def column_name(path: ColumnPath) -> str:
    """Write the path of a column with slashes."""
    return "/".join(path)


# Changed bytes may be read as a name, a type or a size; which exceptions follow is not documented.
DAMAGED: tuple[type[Exception], ...] = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)


@contextmanager
def reading(what: str, file: Path, *also: type[Exception], hint: str = FETCH_AGAIN) -> Iterator[None]:
    """Turn the exceptions of a library on damaged files, `DAMAGED` and `also`, into CorruptDataError."""
    try:
        yield
    except (RbtoolError, MemoryError):
        raise
    except (*DAMAGED, *also) as error:
        if disk_failed(error):
            with reading_from(file):
                raise
        reason = str(error).splitlines()[0].strip(" '\"") if str(error) else type(error).__name__
        raise CorruptDataError(
            f"{what} in {file} cannot be read, the file is damaged or was cut: {reason}", hint=hint
        ) from error


BLOCK_BYTES = 16 << 20
"""Bytes of rows in memory at a time, where a reader does not choose."""


def blocks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Split rows into ranges of at most `size`."""
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


class RowBlocks:
    """Rows of one column, of which a block is kept: what was given out stays valid when another block is read.

    `read(start, stop)` reads rows as a fresh array; there are `total` of them, and a block has `rows`.
    """

    def __init__(self, read: Callable[[int, int], Array], total: int, rows: int) -> None:
        self._read, self._total, self._rows = read, total, max(1, rows)
        self._start = self._stop = 0
        self._block: Array = np.zeros(0)

    def read(self, start: int, stop: int) -> Array:
        """Return rows `[start, stop)`; rows of the block that is kept are not read again."""
        if not self._start <= start <= stop <= self._stop:
            end = min(self._total, max(stop, start + self._rows))
            if self._start <= start < self._stop:
                kept = self._block[start - self._start :]
                self._block = np.concatenate((kept, self._read(self._stop, end)))
            else:
                self._block = self._read(start, end)
            self._start, self._stop = start, end
        return self._block[start - self._start : stop - self._start]


ReadRows: TypeAlias = Callable[[int, int, int], Array]
"""Reads rows `[start, stop)` of one episode: its number, start, stop."""
_OUTCOME_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class EpisodeColumn:
    """A column of a source. `read` gives its rows of an episode; `after` those after each step, where they are stored.

    A `state` without `after` has a row more than there are steps in episodes whose last observation is stored.
    """

    field: Field
    timing: Timing
    read: ReadRows
    after: ReadRows | None = None


@dataclass(frozen=True, slots=True)
class ColumnEpisode:
    """An episode of `length` steps; the flags belong to its last step.

    `observed` states that the observation after the last step is stored. `text` are strings of the whole episode.
    """

    length: int
    terminated: bool = False
    truncated: bool = False
    observed: bool = False
    text: Mapping[str, str] | None = None


class ColumnReader(Reader):
    """A reader whose `on_open` sets `columns` and `episodes`; the facts and the pieces are made of these.

    Episodes without steps are left out, and a note names them.
    """

    piece_bytes = 16 << 20

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
            notes=(*notes, *self._empty()),
            documents=dict(documents or {}),
            lengths=[one.length for one in chosen],
            final_missing=missing,
            last_terminated=[one.terminated for one in chosen] if never else None,
        )

    def _empty(self) -> Iterator[str]:
        empty = [number for number, one in enumerate(self.episodes) if not one.length]
        if empty:
            names = ", ".join(map(str, empty[:10])) + (", …" if len(empty) > 10 else "")
            yield f"{counted(len(empty), 'episode')} without steps left out: {names}"

    @cached_property
    def _rows(self) -> int:
        fields = ted_fields((column.field, column.timing) for column in self.columns)
        return max(1, self.piece_bytes // max(1, row_bytes(fields)))

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        yield from self._pieces(number, self.columns, self._rows)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all of it where next observations are stored."""
        if any(column.after is not None for column in self.columns):
            yield from self.read_episode(number)
        else:
            columns = [column for column in self.columns if column.field.role == "reward"]
            yield from self._pieces(number, columns, _OUTCOME_ROWS)

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
