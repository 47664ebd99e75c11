"""Reads RLlib's recordings: JSON lines of batches or transitions, and Parquet files of transitions or episodes.

Never imports ray.

An episode consists of the rows of one id, joined across lines and files: the environments of a worker alternate in its
files, and the end of a file may cut an episode. These rules apply in order:

- A row with a flag ends its episode.
- Rows with the same `eps_id` (and `agent_index`) belong together, ordered by `t` if there is one.
- Where `t` is not consecutive, a new episode begins: rows are missing, or the id is used again.
- Without `t`, neighboring rows of an id in one batch belong together. Other rows of an id do if the `new_obs` of one
  equals the `obs` of the other. Without `new_obs`, rows of an id in one batch belong together, and rows in different
  batches do not.
- Without `eps_id`, neighboring rows of a file belong together if `t` is consecutive and the `new_obs` of one equals
  the `obs` of the other. With neither `t` nor `new_obs`, rows of one batch belong together.

A batch is a line with a SampleBatch, or all transitions of a file.

By default RLlib writes the newest rows of a run once more at the start of the next run; such repeated rows are left out
first (`Repeats`).
"""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.progress import counted, some_of
from ...core.ted.episodes import Final, ranges_of
from ...core.ted.schema import (
    ACTION,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    dtype_name,
    key_name,
    safe_part,
)
from ..files.readers import EndMeaning, FileReader, meaning_of_ends, natural_order, refuse_ends, require_single
from .blocks import (
    ACTIONS,
    AGENTS,
    DONES,
    EPS_ID,
    INFOS,
    NEXT_OBS,
    OBS,
    REQUIRED,
    REWARDS,
    STEP,
    TERMINATEDS,
    TIME_LIMIT,
    TRUNCATEDS,
    BatchFile,
    ColumnPath,
    JsonLines,
    ParquetRows,
    RowBlock,
    common_type,
    first_inexact,
    is_other_document,
    looks_like_lines,
    looks_like_parquet,
)


@dataclass(slots=True)
class IdRun:
    """Consecutive rows of one id in one file.

    Attributes:
        key: the id: `eps_id` and agent, or the number of the file.
        start: the first row, counted over all files.
        stop: the row after the last one.
        file: the number of the file.
        ended: whether a flag is set in the last row.
        first: `t` in the first row, None if unknown.
        last: `t` in the last row.
        before: digest of the observation before the first row, None if unknown.
        after: digest of the observation after the last row.
        batch: the batch of the first row.
        last_batch: the batch of the last row.
        named: whether there is an `eps_id`.
    """

    key: tuple[Any, ...]
    start: int
    stop: int
    file: int
    ended: bool
    first: int | None = None
    last: int | None = None
    before: bytes | None = None
    after: bytes | None = None
    batch: int = 0
    last_batch: int = 0
    named: bool = True

    def continues(self, other: IdRun) -> bool:
        """Return whether this run continues the episode of `other`, an earlier run of the same id."""
        if other.ended:
            return False
        adjacent = self.file == other.file and self.start == other.stop
        one_batch = self.file == other.file and self.batch == other.last_batch
        compares = self.before is not None and other.after is not None
        if self.first is not None and other.last is not None:
            follows = self.first == other.last + 1
            return follows and (self.named or (adjacent and (not compares or self.before == other.after)))
        if compares:
            return (self.named and adjacent and one_batch) or self.before == other.after
        return one_batch and (self.named or adjacent)

    @property
    def is_bare(self) -> bool:
        """Whether neither `t` nor `new_obs` can show which rows follow."""
        return self.last is None and self.after is None


@dataclass(frozen=True, slots=True)
class IdEpisode:
    """The rows of an episode, as ranges over all files, in order.

    Attributes:
        key: the id.
        ranges: ranges of rows.
        inferred: whether no flag is set at its end, so that the end was inferred.
        starts_late: whether its first rows are missing, by `t`.
        unshown: whether the end was inferred from the end of a batch, without `t` or `new_obs` to confirm it.
    """

    key: tuple[Any, ...]
    ranges: tuple[tuple[int, int], ...]
    inferred: bool
    starts_late: bool
    unshown: bool = False

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def runs_of(block: RowBlock, ends: Array, start: int, file: int) -> Iterator[IdRun]:
    """Cut a block into runs of one id.

    Args:
        block: the rows.
        ends: the rows that end an episode, bool `[rows]`.
        start: the number of the first row over all files.
        file: the number of the file.
    """
    columns = [
        block.text[(name,)] if (name,) in block.text else block.columns.get((name,)) for name in (EPS_ID, *AGENTS)
    ]
    given = [column for column in columns if column is not None]
    if any(column.ndim > 1 for column in given):
        raise FormatError(f"{EPS_ID} and {' or '.join(AGENTS)} must be single values")
    steps = block.columns.get((STEP,))
    batches = np.zeros(block.rows, np.int64) if block.batches is None else block.batches
    cut = ends[:-1] | (batches[1:] != batches[:-1])
    for column in given:
        cut |= column[1:] != column[:-1]
    if steps is not None:
        cut |= steps[1:] != steps[:-1] + 1
    named = bool(given)
    pairs = [] if named and steps is not None else _observations(block)
    for seen, after in [] if named else pairs:
        cut |= _differ(after[:-1], seen[1:])
    begins = [0, *(np.flatnonzero(cut) + 1).tolist(), block.rows]
    for begin, stop in pairwise(begins):
        run = IdRun(_key(given, begin) or (file,), start + begin, start + stop, file, bool(ends[stop - 1]), named=named)
        run.batch = run.last_batch = int(batches[begin])
        if steps is not None:
            run.first, run.last = int(steps[begin]), int(steps[stop - 1])
        if pairs:
            run.before = _row([seen for seen, _ in pairs], begin)
            run.after = _row([after for _, after in pairs], stop - 1)
        yield run


def _observations(block: RowBlock) -> list[tuple[Array, Array]]:
    """Return pairs of columns, observations and next observations; empty if their names or shapes differ."""
    seen = {path[1:]: array for path, array in sorted(block.columns.items()) if path[0] == OBS}
    after = {path[1:]: array for path, array in block.columns.items() if path[0] == NEXT_OBS}
    if seen.keys() != after.keys() or any(after[name].shape != array.shape for name, array in seen.items()):
        return []
    return [(array, after[name]) for name, array in seen.items()]


def _differ(rows: Array, others: Array) -> Array:
    """Return the rows in which the bits of two arrays of equal shape differ, bool `[rows]`."""
    dtype = np.result_type(rows, others)
    size = int(np.prod(rows.shape[1:], dtype=np.int64)) * dtype.itemsize
    one, other = (
        np.frombuffer(np.ascontiguousarray(array, dtype).tobytes(), np.uint8).reshape(len(array), size)
        for array in (rows, others)
    )
    differ: Array = (one != other).any(axis=1)
    return differ


def _key(columns: Sequence[Array], row: int) -> tuple[Any, ...]:
    return tuple(column[row].item() if isinstance(column[row], np.generic) else column[row] for column in columns)


def _row(columns: Sequence[Array], row: int) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for column in columns:
        found.update(np.asarray(column[row], np.float64).tobytes())
    return found.digest()


class IdRuns:
    """Collects the runs of all files, and joins them to episodes."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], list[IdRun]] = {}
        self._last: IdRun | None = None

    def add(self, run: IdRun) -> None:
        """Add the next run in the order of the files; it is merged with the last run if it continues that."""
        last = self._last
        adjacent = last is not None and last.key == run.key and (last.file, last.stop) == (run.file, run.start)
        if last is not None and adjacent and run.continues(last):
            last.stop, last.last, last.after, last.ended = run.stop, run.last, run.after, run.ended
            last.last_batch = run.last_batch
            return
        self._by_key.setdefault(run.key, []).append(run)
        self._last = run

    def episodes(self) -> list[IdEpisode]:
        """Join the runs to episodes, ordered by their first rows."""
        found = [episode for runs in self._by_key.values() for episode in _joined(_in_order(runs))]
        return sorted(found, key=lambda episode: min(start for start, _ in episode.ranges))


def _in_order(runs: list[IdRun]) -> list[IdRun]:
    """Order the runs of an id by `t`; if steps occur twice or follow an end, the id was used again: keep the order."""
    if any(run.first is None or not run.named for run in runs):
        return runs
    ordered = sorted(runs, key=lambda run: (run.first or 0, run.start))
    for one, other in pairwise(ordered):
        if one.ended or (one.last or 0) >= (other.first or 0):
            return runs
    return ordered


def _joined(runs: Sequence[IdRun]) -> Iterator[IdEpisode]:
    current: list[IdRun] = []
    for run in runs:
        if current and not run.continues(current[-1]):
            yield _episode(current, inferred=not current[-1].ended, unshown=current[-1].is_bare)
            current = []
        current.append(run)
    if current:
        yield _episode(current, inferred=False)


def _episode(runs: Sequence[IdRun], *, inferred: bool, unshown: bool = False) -> IdEpisode:
    ranges = tuple((run.start, run.stop) for run in runs)
    return IdEpisode(runs[0].key, ranges, inferred, bool(runs[0].first), inferred and unshown)


class Repeats:
    """Finds the rows at the start of a run of RLlib that repeat the newest rows of the runs before it.

    A digest of eight bytes is kept for each row. An environment that does not move makes equal rows, so single equal
    rows prove nothing: the rows must repeat all earlier rows from some place on, in order. If rows have `t`, any row
    that occurred before is a repetition.

        rows before   a b c d e f
        new run             d e f | g h     the first three rows are repetitions
    """

    def __init__(self) -> None:
        self.rows = self.runs = 0
        self._before: Array = np.zeros(0, np.uint64)

    def find(self, path: Path, blocks: Iterable[RowBlock]) -> Array:
        """Return which rows of the next run are repetitions, bool `[rows]`; FormatError if that cannot be decided."""
        parts, timed = [np.zeros(0, np.uint64)], True
        for block in blocks:
            parts.append(_digests(block))
            timed = timed and (STEP,) in block.columns
        digests = np.concatenate(parts)
        count = self._overlap(digests)
        found: Array = np.arange(len(digests)) < count
        again = np.isin(digests, self._before)
        if timed:
            found |= again
        elif again[count:].any():
            raise FormatError(
                f"{path} repeats rows of the runs before it in another order, so that its new rows cannot be told from "
                "repeated ones",
                hint="name the folder of one run",
            )
        self.rows, self.runs = self.rows + int(found.sum()), self.runs + bool(found.any())
        self._before = np.concatenate((self._before, digests[~found]))
        return found

    def _overlap(self, rows: Array) -> int:
        """Return how many rows at the start repeat the end of the rows before; all, if these contain them in order."""
        for place in np.flatnonzero(self._before == rows[0]).tolist() if len(rows) else []:
            expected = self._before[place:][: len(rows)]
            if np.array_equal(expected, rows[: len(expected)]):
                return len(expected)
        return 0


def _digests(block: RowBlock) -> Array:
    """Return a digest of each row of a block, uint64 `[rows]`."""
    columns = [array for _, array in sorted(block.columns.items())]
    texts = [texts for _, texts in sorted(block.text.items())]
    found = np.empty(block.rows, np.uint64)
    for row in range(block.rows):
        digest = hashlib.blake2b(repr([text[row] for text in texts]).encode(), digest_size=8)
        for column in columns:
            digest.update(column[row].tobytes())
        found[row] = int.from_bytes(digest.digest(), "little")
    return found


_OBSERVATION: Key = ("observation",)
_FLAGS = (DONES, TERMINATEDS, TRUNCATEDS)
_WHOLE = (*REQUIRED, *_FLAGS, NEXT_OBS, EPS_ID, STEP, *AGENTS)
"""Columns that must be in every row, or in none."""


@dataclass
class _ValueForm:
    """The form of a column in the rows read so far.

    Attributes:
        dtypes: the element types that occurred.
        shape: the shape of a row.
        rows: the number of rows that have the column.
        why: why it cannot be kept, "" if it can.
        negative: whether there are negative whole numbers.
        inexact: the place of the first whole number that float64 cannot hold, "" if there is none.
    """

    dtypes: set[np.dtype[Any]]
    shape: tuple[int, ...]
    rows: int = 0
    why: str = ""
    negative: bool = False
    inexact: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The common type of all rows."""
        return common_type(self.dtypes, negative=self.negative)

    def add(self, array: Array, place: Callable[[int], str], inexact: int | None) -> None:
        """Add rows; `place` returns the place of a row for messages, `inexact` is the block's first inexact row."""
        if array.shape[1:] != self.shape:
            self.why = self.why or "its rows have different shapes"
        elif (array.dtype == bool) != (np.dtype(bool) in self.dtypes):
            self.why = self.why or "it has both flags and numbers"
        else:
            self.dtypes.add(array.dtype)
            self.negative = self.negative or (array.dtype.kind == "i" and bool((array < 0).any()))
            inexact = first_inexact(array) if inexact is None and not self.inexact else inexact
            self.inexact = self.inexact or ("" if inexact is None else place(inexact))
        self.rows += len(array)

    def join(self, other: _ValueForm) -> None:
        """Combine the types of this column and of another one that must have the same type."""
        self.dtypes = other.dtypes = self.dtypes | other.dtypes
        self.negative = other.negative = self.negative or other.negative


class BatchColumns:
    """Collects the columns of all blocks; `finish` makes fields of them.

    Attributes:
        has_limits: whether infos state which ends are time limits.
        fields: the fields with their timings.
        sources: the columns with their keys and timings, without next observations.
        next_sources: the columns of next observations with their keys.
        renamed: keys that differ from the path of their column.
        dropped: columns that are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = 0
        self.has_limits = False
        self._forms: dict[ColumnPath, _ValueForm] = {}
        self._text: dict[ColumnPath, int] = {}
        self._odd: dict[ColumnPath, str] = {}
        self.fields: tuple[tuple[Field, Timing], ...] = ()
        self.sources: list[tuple[ColumnPath, Key, Timing]] = []
        self.next_sources: list[tuple[ColumnPath, Key]] = []
        self.renamed: dict[str, Key] = {}
        self.dropped: tuple[Dropped, ...] = ()

    def add(self, block: RowBlock, path: Path) -> None:
        """Add the columns of a block of the file `path`."""

        def place(row: int) -> str:
            return path.name if block.lines is None else f"{path.name}, line {block.lines[row]:,}"

        self._rows += block.rows
        self.has_limits = self.has_limits or block.limits is not None
        for column, array in block.columns.items():
            form = self._forms.setdefault(column, _ValueForm({array.dtype}, array.shape[1:]))
            form.add(array, place, block.inexact.get(column))
        for column, texts in block.text.items():
            self._text[column] = self._text.get(column, 0) + len(texts)
        for column, why in block.odd.items():
            self._odd.setdefault(column, why)

    def has(self, name: str) -> bool:
        """Return whether there is a column of that name."""
        return any(path[0] == name for path in (*self._forms, *self._text))

    @property
    def has_next(self) -> bool:
        """Whether the observation after each step is stored."""
        return bool(self.next_sources)

    def finish(self) -> None:
        """Make fields of the columns; FormatError if RLlib's own columns are incomplete or contradict each other."""
        dropped: list[Dropped] = []
        for path in [*self._forms]:
            if why := self._why_not(path):
                del self._forms[path]
                self._odd[path] = why
        for path, why in self._odd.items():
            if path[0] in _WHOLE:
                raise FormatError(f"{self._path}: {'.'.join(path)!r} cannot be read as rows: {why}")
            dropped.append(Dropped(".".join(path), why))
        for path, rows in self._text.items():
            if path[0] in (EPS_ID, *AGENTS) and len(path) == 1 and rows == self._rows:
                continue
            if path[0] in _WHOLE:
                raise FormatError(f"{self._path}: {'.'.join(path)!r} has text in {rows:,} rows of {self._rows:,}")
            dropped.append(Dropped(".".join(path), "it is text that differs between rows"))
        for name in REQUIRED:
            if not self.has(name):
                raise FormatError(f"{self._path} has no {name!r} in its rows")
        self._match_next()
        self._lay_out(dropped)
        self.dropped = tuple(sorted(dropped, key=lambda one: one.key))

    def _why_not(self, path: ColumnPath) -> str:
        form = self._forms[path]
        if path in self._odd or path in self._text:
            return self._odd.get(path, "it has text in some rows")
        if form.rows != self._rows:
            return f"it is in {form.rows:,} of {self._rows:,} rows"
        try:
            dtype_name(form.dtype)
        except SchemaError as error:
            return str(error)
        return form.why

    def _match_next(self) -> None:
        """Give observations and next observations a common type; FormatError if their shapes differ."""
        after = {path[1:]: form for path, form in self._forms.items() if path[0] == NEXT_OBS}
        before = {path[1:]: form for path, form in self._forms.items() if path[0] == OBS}
        if after and (
            after.keys() != before.keys() or any(after[name].shape != form.shape for name, form in before.items())
        ):
            raise FormatError(f"{self._path}: {OBS} and {NEXT_OBS} have different forms")
        for name, form in after.items():
            form.join(before[name])

    def _lay_out(self, dropped: list[Dropped]) -> None:
        fields: list[tuple[Field, Timing]] = []
        for path, form in sorted(self._forms.items()):
            if path[0] in _FLAGS:
                if path[0] == DONES and self.has(TERMINATEDS):
                    dropped.append(Dropped(DONES, "terminateds and truncateds are used instead"))
                continue
            key, role, timing = _place(path)
            if path[0] == NEXT_OBS:
                self.next_sources.append((path, key))
                continue
            self.sources.append((path, key, timing))
            shape = () if key == REWARD else form.shape
            if key == REWARD:
                require_single(f"{self._path}: rewards have", form.shape)
            fields.append((Field(key, dtype_name(form.dtype), shape, role), timing))
            if tuple(key[1:]) != path and role == "info":
                self.renamed[".".join(path)] = key
        self.fields = tuple(fields)

    @property
    def notes(self) -> Iterator[str]:
        """Yield notes on columns with whole numbers that float64 cannot hold."""
        for path, form in sorted(self._forms.items()):
            if form.inexact and form.dtype.kind == "f":
                yield (
                    f"{'.'.join(path)} is {form.dtype}, since not every value is a whole number of 64 bits: some of "
                    f"its whole numbers are not exact, the first one in {form.inexact}"
                )

    def like(self, block: RowBlock) -> RowBlock:
        """Convert the columns of a block to their common types."""
        for path, form in self._forms.items():
            array = block.columns[path]
            array = array.reshape(len(array)) if path == (REWARDS,) else array
            block.columns[path] = array.astype(form.dtype, copy=False)
        return block

    def text_of(self, key: tuple[Any, ...]) -> dict[str, str]:
        """Return the ids of an episode that are text, by name."""
        names = [name for name in (EPS_ID, *AGENTS) if self.has(name)]
        return {name: value for name, value in zip(names, key, strict=False) if isinstance(value, str)}


def _place(path: ColumnPath) -> tuple[Key, Role, Timing]:
    """Return the key, the role and the timing of a column."""
    name, rest = path[0], tuple(map(safe_part, path[1:]))
    if name in (OBS, NEXT_OBS):
        return (*_OBSERVATION, *rest), "observation", "state"
    if name == ACTIONS:
        return (*ACTION, *rest), "action", "step"
    if name == REWARDS:
        return REWARD, "reward", "result"
    return ("info", safe_part(name), *rest), "info", "result" if name == INFOS else "step"


_UNREADABLE = (
    OSError, ValueError, LookupError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile, zlib.error,
    struct.error,
)  # fmt: skip
_RUN = re.compile(r"run-[0-9]{6,}-[0-9]+")
_BLOCK = re.compile(r"([0-9A-Za-z]+_[0-9a-f]+)_([0-9]{6,})-([0-9]+)\.parquet")
_MOST_ENVIRONMENTS = 16
_SUFFIXES = frozenset({".json", ".jsonl", ".parquet", ".zip"})
_HELD_BLOCKS = 8


class RllibReader(FileReader):
    """Reads a file of RLlib's JSON lines or Parquet rows, or a folder of such files in the order of their names.

    The folder may be the `output` folder of RLlib, with runs in `ENV/run-WORKER-COUNTER`; rows that a run repeats from
    the runs before it are left out.

    `obs` becomes `observation`, and `new_obs` the next observation, even if it differs from the following row. `infos`
    become `info.infos` under `next`, any other column `info.NAME`. Episodes are numbered from 0 in the order of their
    first rows.

    Options:
        ends: the meaning of `dones`, `terminated` (the default, as in RLlib) or `truncated`.
        trust_pickle: whether compressed columns, which are pickles, may be read.

    Raises:
        FormatError: columns contradict each other, or batches have several policies.
        CorruptDataError: a file is damaged.
        UsageError: compressed columns are not trusted, or `ends` is given although `terminateds` state the ends.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` is a file with RLlib's columns, or a folder whose first candidate is one."""
        if path.is_dir():
            try:
                found = _row_files(_folder_of(path))
            except OSError as error:
                return no_match(error)
            return bool(found) and _is_one(found[0])
        return path.is_file() and _is_one(path)

    def on_open(self) -> None:
        """Find the files."""
        if self.path.is_dir():
            named = [path for folder in _runs_in(self.path) or [self.path] for path in _row_files(folder)]
            others = {path for path in named if not _is_one(path) and is_other_document(path)}
            self._others = sorted(path.name for path in others)
            self._paths = [path for path in named if path not in others]
        else:
            self._paths, self._others = [self.path], []
        if not self._paths:
            raise FormatError(f"{self.path} has no JSON lines or Parquet files with RLlib's columns")
        trusted = bool(self.options.get("trust_pickle"))
        self._opened: dict[int, BatchFile] = {}
        self._trusted = trusted
        self._blocks: list[tuple[int, Any]] = []
        self._starts: list[int] = []
        self._held: dict[int, RowBlock] = {}

    def _file(self, number: int) -> BatchFile:
        found = self._opened.get(number)
        if found is None:
            for other in list(self._opened):
                self._opened.pop(other).close()
            path = self._paths[number]
            with path.open("rb") as file:
                is_parquet = file.read(4) == b"PAR1"
            found = ParquetRows(path, trusted=self._trusted) if is_parquet else JsonLines(path, trusted=self._trusted)
            self._opened[number] = found
        return found

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read all rows once, for their ids, flags and forms; rows are not kept."""
        self._damage: list[CorruptDataError] = []
        self._damaged: Counter[str] = Counter()
        self._repeats = Repeats()
        repeated = self._repeated()
        columns, runs, rows, ended = BatchColumns(self.path), IdRuns(), 0, 0
        for number, path in enumerate(self._paths):
            if not self._can_open(number):
                continue
            for place, block in self._file(number).blocks():
                columns.add(block, path)
                ends = _ends(path, block)
                new = ~repeated[rows : rows + block.rows] if len(repeated) else np.ones(block.rows, bool)
                ended += int((ends & new).sum())
                for start, stop in ranges_of(new):
                    for run in runs_of(block.part(start, stop), ends[start:stop], rows + start, number):
                        runs.add(run)
                self._blocks.append((number, place))
                self._starts.append(rows)
                rows += block.rows
            self._damage += self._file(number).damage.values()
            self._damaged[self._file(number).part] += len(self._file(number).damage)
        if not rows and self._damage:
            raise self._damage[0]
        if not rows:
            raise FormatError(f"{self.path} has no rows")
        self._rows = rows - self._repeats.rows
        columns.finish()
        self._columns = columns
        self._meaning = self._meaning_of_flags(columns, ended)
        self._episodes = runs.episodes()
        progress(len(self._episodes))
        self._size = self.piece_rows(columns.fields)
        return self._facts()

    def _repeated(self) -> Array:
        """Return which rows of several runs are repetitions, bool `[rows of all readable files]`; empty for one run."""
        runs = [[*files] for _, files in groupby(range(len(self._paths)), lambda file: self._paths[file].parent)]
        found: list[Array] = []
        for files in runs if len(runs) > 1 else []:
            sound = [file for file in files if self._can_open(file)]
            blocks = (block for file in sound for _, block in self._file(file).blocks())
            found.append(self._repeats.find(self._paths[files[0]].parent, blocks))
        self._damage.clear()  # the survey finds the damage again
        self._damaged.clear()
        return np.concatenate(found) if found else np.zeros(0, bool)

    def _can_open(self, number: int) -> bool:
        """Open a file; return False, and record the damage, if it is one of several and cannot be opened."""
        try:
            self._file(number)
        except (OSError, ValueError) as error:
            foreign = isinstance(error, RbtoolError) and not isinstance(error, CorruptDataError)
            if foreign or len(self._paths) == 1:
                raise
            reason = " ".join(str(error).split())[:200]
            what = error if isinstance(error, CorruptDataError) else None
            self._damage.append(what or CorruptDataError(f"{self._paths[number]} cannot be read: {reason}"))
            self._damaged["file"] += 1
            return False
        return True

    def _facts(self) -> SourceFacts:
        columns = self._columns
        return SourceFacts(
            source="rllib",
            id=self.path.stem,
            fields=columns.fields,
            episode_numbers=range(len(self._episodes)),
            steps=self._rows,
            renamed_keys={path: key_name(key) for path, key in columns.renamed.items()},
            dropped_keys=columns.dropped,
            notes=tuple(self._notes()),
            lengths=[len(episode) for episode in self._episodes],
            final_missing=not columns.has_next,
        )

    def _meaning_of_flags(self, columns: BatchColumns, ended: int) -> EndMeaning:
        if columns.has(TERMINATEDS):
            refuse_ends(self.path, self.options, f"has {TERMINATEDS}, which state how episodes end")
            return EndMeaning(terminated=True)
        if columns.has_limits:
            refuse_ends(self.path, self.options, f"has infos with {TIME_LIMIT}, which state how episodes end")
            return EndMeaning(terminated=True, note=f"time limits are taken from infos ({TIME_LIMIT})")
        if not columns.has(DONES):
            refuse_ends(self.path, self.options, f"has neither {DONES} nor {TERMINATEDS}")
            return EndMeaning(terminated=True, note="there are no flags: episodes end where their ids do, truncated")
        found = meaning_of_ends(
            self.options, "terminated", "dones are set at terminal states and time limits alike, and RLlib bootstraps "
            "from neither",
        )  # fmt: skip
        return found if ended else EndMeaning(found.terminated, note=f"{DONES} are never set")

    def _notes(self) -> Iterator[str]:
        if self._meaning.note:
            yield self._meaning.note
        yield from self._columns.notes
        if not self._columns.has(EPS_ID):
            yield "there is no eps_id: rows follow each other in the order of the files"
        bare = sum(episode.unshown for episode in self._episodes)
        if bare:
            cut = "is" if bare == 1 else "are"
            yield (
                f"{counted(bare, 'episode')} without a flag {cut} cut at the end of a batch or file: there is neither "
                f"{STEP} nor {NEXT_OBS} to show whether the next rows follow; ends there are truncated"
            )
        gaps = sum(episode.inferred for episode in self._episodes) - bare
        if gaps and self._columns.has(EPS_ID):
            after = counted(gaps, "episode")
            yield f"rows are missing after {after}, or the id is used again: ends there are truncated"
        elif gaps:
            yield f"the next rows do not continue {counted(gaps, 'episode')} without a flag: ends there are truncated"
        if repeats := self._repeats.rows:
            yield f"{counted(repeats, 'row')} left out that {counted(self._repeats.runs, 'later run')} repeated"
        late = sum(episode.starts_late for episode in self._episodes)
        if late:
            yield f"the first rows of {counted(late, 'episode')} are not in the files: {STEP} starts after 0"
        if self._damage:
            parts = " and ".join(counted(count, part) for part, count in self._damaged.items() if count)
            are = "is" if len(self._damage) == 1 else "are"
            yield f"{parts} {are} damaged and left out, so that steps are missing: {self._damage[0]}"
        if self._others:
            names = some_of(self._others, 3)
            yield f"{counted(len(self._others), 'file')} in the folder without rows of RLlib left out: {names}"

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the first error of a damaged line, if all episodes are to be read."""
        if everything and self._damage:
            raise self._damage[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        episode = self._episodes[number]
        held: _BlockRows | None = None
        for rows in self._slices(episode):
            if held is not None:
                yield self._piece(number, episode, held, rows, first=held.at == 0)
            held = rows
        if held is not None:
            yield self._piece(number, episode, held, None, first=held.at == 0)

    def _slices(self, episode: IdEpisode) -> Iterator[_BlockRows]:
        """Cut the rows of an episode at the ends of blocks, and where pieces get too large."""
        at = 0
        for start, stop in episode.ranges:
            while start < stop:
                number = bisect_right(self._starts, start) - 1
                begin = self._starts[number]
                block = self._block(number)
                end = min(stop, begin + block.rows, start + self._size)
                yield _BlockRows(block, start - begin, end - begin, at)
                at += end - start
                start = end

    def _block(self, number: int) -> RowBlock:
        found = self._held.pop(number, None)
        if found is None:
            file, place = self._blocks[number]
            found = self._columns.like(self._file(file).block(place))
            while len(self._held) >= _HELD_BLOCKS:
                self._held.pop(next(iter(self._held)))
        self._held[number] = found
        return found

    def _piece(
        self, number: int, episode: IdEpisode, rows: _BlockRows, after: _BlockRows | None, *, first: bool
    ) -> Piece:
        columns, following = {}, dict[Key, Array]()
        for path, key, timing in self._columns.sources:
            found = rows.block.columns[path][rows.start : rows.stop]
            if timing == "state" and not self._columns.has_next and after is not None:
                found = np.concatenate((found, after.block.columns[path][after.start : after.start + 1]))
            columns[key] = found
        for path, key in self._columns.next_sources:
            following[key] = rows.block.columns[path][rows.start : rows.stop]
        terminated, truncated = self._flags(rows)
        last = after is None
        return Piece(
            number, columns, terminated, truncated, first=first, last=last, next=following,
            text=self._columns.text_of(episode.key) if first else {},
            final=Final.OBSERVED if self._columns.has_next else Final.MISSING,
            inferred=last and episode.inferred,
        )  # fmt: skip

    def _flags(self, rows: _BlockRows) -> tuple[Array, Array]:
        def flag(name: str) -> Array:
            found = rows.block.columns.get((name,))
            return np.zeros(rows.stop - rows.start, bool) if found is None else found[rows.start : rows.stop] != 0

        none = np.zeros(rows.stop - rows.start, bool)
        if self._columns.has(TERMINATEDS):
            return flag(TERMINATEDS), flag(TRUNCATEDS)
        if self._columns.has_limits:
            limits = none if rows.block.limits is None else rows.block.limits[rows.start : rows.stop]
            return flag(DONES) & ~limits, limits
        return (flag(DONES), none) if self._meaning.terminated else (none, flag(DONES))

    def files(self) -> list[Path]:
        """The files with rows."""
        return self._paths

    def on_close(self) -> None:
        """Close the files."""
        for file in self._opened.values():
            file.close()


class _BlockRows:
    """Rows `[start, stop)` of a block; `at` is the step of the episode at which they start."""

    def __init__(self, block: RowBlock, start: int, stop: int, at: int) -> None:
        self.block, self.start, self.stop, self.at = block, start, stop, at


def _ends(path: Path, block: RowBlock) -> Array:
    """Return the rows of a block in which a flag ends an episode, bool `[rows]`."""
    ends = np.zeros(block.rows, bool) if block.limits is None else block.limits.copy()
    names = (TERMINATEDS, TRUNCATEDS) if (TERMINATEDS,) in block.columns else (DONES,)
    for name in names:
        flags = block.columns.get((name,))
        if flags is None:
            continue
        if flags.ndim != 1 or ((flags != 0) & (flags != 1)).any():
            raise FormatError(f"{path}: {name} has values other than 0 and 1")
        ends |= flags != 0
    return ends


def _runs_in(folder: Path) -> list[Path]:
    """List the folders of RLlib's runs in a folder, or one level deeper, in order; none if it has files of rows."""
    if _row_files(folder):
        return []
    inside = [path for path in folder.iterdir() if path.is_dir()]
    found = [path for path in inside if _RUN.fullmatch(path.name)]
    if not found and len(inside) <= _MOST_ENVIRONMENTS:
        found = [path for one in inside for path in one.iterdir() if _RUN.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (str(path.parent), natural_order(path.name)))


def _folder_of(path: Path) -> Path:
    """Return the folder of the first run, or the folder itself if it has no runs."""
    return next(iter(_runs_in(path)), path)


def _order(path: Path) -> tuple[bool, Any]:
    """Return a sort key for files: files of a run by time of writing and block, others in natural order."""
    block = _BLOCK.fullmatch(path.name)
    if block is None:
        return False, natural_order(path.name)
    return True, (block[1], int(block[2]), int(block[3]))


def _row_files(folder: Path) -> list[Path]:
    """List the files of a folder that may have rows, in order."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file()]
    return sorted((path for path in found if not path.name.startswith(".")), key=_order)


def _is_one(path: Path) -> bool:
    try:
        return looks_like_lines(path) or looks_like_parquet(path)
    except (RbtoolError, *_UNREADABLE):
        return False
