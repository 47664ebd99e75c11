"""Reads and downloads runs of the DQN Replay dataset (Agarwal et al. 2020): checkpoints of gzip files, streamed.

Dopamine and emulators are never imported.

A checkpoint is a copy of the ring of Dopamine's replay buffer (Castro et al. 2018), as several gzip files of one array
each; `add_count` (the rows ever added) and `invalid_range` describe the ring. It was copied one row before the ring had
gone round once more, so its last slot holds the oldest row, which continues the checkpoint before:

    slot            0 1 2 3
    checkpoint 0    0 1 2 -    add_count 3: slot 3 was not written yet
    checkpoint 1    4 5 6 3    add_count 7: slot 7 % 4 = 3 holds the oldest row, 3, which continues checkpoint 0

Dopamine begins each episode with blank rows, one fewer than the frames that it stacks; they are not steps.

There are 60 games with five runs each. The bucket that Google published is closed: it answers 403. Runs come from
mirrors, or from a folder of copies.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, Piece, SourceFacts
from ...core.format.converter import Ids, LocalCache, RemoteFile
from ...core.format.documents import dump_json
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.progress import some_of
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, dtype_name
from ..files.numpy_files import GzipArray
from ..files.readers import OUTCOME_ROWS, SurveyedReader, blocks, zero_or_one

OBSERVATION, ACTION, REWARD, TERMINAL = "observation", "action", "reward", "terminal"
COLUMNS = (OBSERVATION, ACTION, REWARD, TERMINAL)
ADD_COUNT, INVALID_RANGE = "add_count", "invalid_range"
_NAME = re.compile(r"(?:\$store\$_)?(\w+)_ckpt\.(\d{1,9})\.gz", re.ASCII)
LOGS = "replay_logs"
"""The folder of the checkpoint files inside the folder of a run."""
_MOST_INVALID = 1 << 16
_SMALL_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of checkpoint `number`, by the names of their arrays; `others` names arrays that are not read."""

    number: int
    paths: Mapping[str, Path]
    others: tuple[str, ...] = ()


def folder_of(path: Path) -> Path:
    """Return the folder with the checkpoint files: `replay_logs` in the folder of a run, or the path itself."""
    inside = path / LOGS
    return inside if inside.is_dir() else path


def checkpoints_at(path: Path) -> list[CheckpointFiles]:
    """Return the checkpoints in a folder in the order of their numbers; [] for a path that is not a folder."""
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
    """Return whether a folder has the frames of a checkpoint and at least one more of its arrays."""
    return any({OBSERVATION} < one.paths.keys() for one in checkpoints_at(path))


@dataclass(frozen=True, slots=True)
class Form:
    """The element type and the shape of a row, for each column."""

    columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

    def __str__(self) -> str:
        return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in self.columns.items())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of the small arrays of a checkpoint.

    Attributes:
        files: the files of the checkpoint.
        form: the form of its rows.
        rows: the number of slots.
        add_count: the number of rows ever added to the buffer; None if not stated.
        invalid: the slots that Dopamine does not sample; None if not stated.
        terminal: the slots after which an episode ends, int64, ascending.
        quiet_bits: a mask, packed to bits, of slots with action 0, reward 0 and no terminal.
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
    """Read the small arrays of a checkpoint, and the header of its frames.

    Raises FormatError for arrays that are missing or contradict each other, CorruptDataError for damaged ones.
    """
    missing = [name for name in COLUMNS if name not in files.paths]
    if missing:
        raise FormatError(f"checkpoint {files.number} has no {' and no '.join(missing)} in {_folder_name(files)}")
    with CheckpointRows(files) as rows:
        count = rows.require_forms()
        add_count, invalid = _counts(files, count)
        terminal, quiet = [np.zeros(0, np.int64)], np.ones(count, bool)
        for start, stop in blocks(count, _SMALL_ROWS):
            flags = zero_or_one(rows.read(TERMINAL, start, stop), f"{files.paths[TERMINAL]}: terminal", start=start)
            terminal.append(start + np.flatnonzero(flags))
            quiet[start:stop] = ~flags
            for name in (ACTION, REWARD):
                quiet[start:stop] &= ~rows.read(name, start, stop).reshape(stop - start, -1).any(axis=1)
        rows.verify((ACTION, REWARD, TERMINAL))
        ends = np.concatenate(terminal)
        return Checkpoint(files, rows.form, count, add_count, invalid, ends, np.packbits(quiet))


def _folder_name(files: CheckpointFiles) -> Path:
    return next(iter(files.paths.values())).parent


def _counts(files: CheckpointFiles, rows: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return `add_count` and `invalid_range`; None for one whose file is missing."""
    count = None
    if ADD_COUNT in files.paths:
        found = _whole_numbers(files.paths[ADD_COUNT])
        if len(found) != 1 or found[0] < 0:
            raise FormatError(f"{files.paths[ADD_COUNT]} is {found[:5]}, expected a single number that is not negative")
        count = found[0]
    if INVALID_RANGE not in files.paths:
        return count, None
    invalid = _whole_numbers(files.paths[INVALID_RANGE])
    odd = [slot for slot in invalid if not 0 <= slot < rows]
    if odd and rows:
        raise FormatError(f"{files.paths[INVALID_RANGE]} names row {odd[0]:,}, but there are {rows:,} rows")
    return count, tuple(invalid) if rows else ()


def _whole_numbers(path: Path) -> list[int]:
    with GzipArray(path) as array:
        if array.header.stored.kind not in "iu":
            raise FormatError(f"{path} has elements of type {array.header.stored}, expected whole numbers")
        found = array.whole(_MOST_INVALID).reshape(-1)
        array.verify()
    return [int(number) for number in found]


class CheckpointRows(Closing):
    """The columns of a checkpoint, open for reading; each file is opened when it is first read."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._open: dict[str, GzipArray] = {}

    def _array(self, name: str) -> GzipArray:
        if name not in self._open:
            self._open[name] = GzipArray(self._files.paths[name])
        return self._open[name]

    @property
    def form(self) -> Form:
        """The form of the rows that are kept."""
        headers = {name: self._array(name).header for name in (OBSERVATION, ACTION, REWARD)}
        return Form({name: (header.dtype, header.shape[1:]) for name, header in headers.items()})

    def require_forms(self) -> int:
        """Return the number of rows; raise FormatError for columns of different lengths or unexpected forms."""
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
        """Read slots `[start, stop)` of a column; reads in ascending order decompress the file only once."""
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


_BLANKS = 3
_LOOKED_AT = 3
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Stretch:
    """Slots `[start, stop)` of a checkpoint, given by its index; the first slot is row `row` of the run."""

    checkpoint: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class RunEpisode:
    """Rows `[start, stop)` of the run, preceded by `blanks` blank rows; `begins` if it starts with a reset."""

    start: int
    stop: int
    terminated: bool
    begins: bool
    blanks: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RunSurvey:
    """The checkpoints and the episodes of a run.

    `problems` has an error for each checkpoint that is missing or cannot be read, and is left out. `stated` has
    `add_count` and `invalid_range` of each checkpoint, as the source states them.
    """

    checkpoints: tuple[CheckpointFiles, ...]
    form: Form
    stretches: tuple[Stretch, ...]
    problems: tuple[RbtoolError, ...]
    stated: tuple[dict[str, object], ...]
    episodes: tuple[RunEpisode, ...] = ()
    notes: tuple[str, ...] = ()

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the index of a checkpoint and a range of its slots, until the rows `[start, stop)` are covered."""
        number = bisect.bisect_right(self.stretches, start, key=lambda one: one.row) - 1
        while start < stop:
            one = self.stretches[number]
            end = min(stop, one.row + one.stop - one.start)
            yield one.checkpoint, one.start + start - one.row, one.start + end - one.row
            start, number = end, number + 1


def look_over(
    files: Sequence[CheckpointFiles], path: Path, are_zero: Callable[[RunSurvey, int, int], bool]
) -> RunSurvey:
    """Read the small arrays of all checkpoints and find the episodes.

    `are_zero` returns whether the frames of rows `[start, stop)` of a run are zeros. If no checkpoint can be read, the
    error of the first one is raised.
    """
    found: list[Checkpoint] = []
    problems: list[RbtoolError] = []
    for one in files:
        try:
            checkpoint = look_at(one)
            if found and checkpoint.form != found[0].form:
                raise FormatError(
                    f"the rows of checkpoint {one.number} differ from those of checkpoint {found[0].files.number}: "
                    f"{checkpoint.form}, and {found[0].form}"
                )
            found.append(checkpoint)
        except RbtoolError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    parts = list(_parts(found))
    joined = [one.first is not None and one.first == other.stop for other, one in itertools.pairwise(parts)]
    problems += _missing(parts, joined, {one.number for one in files}, path)
    line = _TimeLine(parts, [False, *joined])
    stated: tuple[dict[str, object], ...] = tuple(
        {"checkpoint": one.files.number, "rows": one.rows, "add_count": one.add_count, "invalid_range": one.invalid}
        for one in found
    )
    run = RunSurvey(tuple(one.files for one in found), found[0].form, tuple(line.stretches), tuple(problems), stated)
    blanks = _blanks(run, line, found, are_zero)
    episodes = tuple(line.episodes(blanks))
    return replace(run, episodes=episodes, notes=tuple(_notes(parts, joined, line, episodes, blanks)))


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of a checkpoint in the order of time; `first` and `stop` count rows since the run began."""

    checkpoint: Checkpoint
    spans: tuple[tuple[int, int], ...]
    first: int | None
    stop: int | None

    @property
    def number(self) -> int:
        return self.checkpoint.files.number


def _parts(found: Sequence[Checkpoint]) -> Iterator[_Slots]:
    is_ring = _are_rings([one for one in found if one.rows])
    for one in found:
        rows, count = one.rows, one.add_count
        if count is None:
            yield _Slots(one, ((0, rows),), None, None)
        elif not is_ring or not rows:
            yield _Slots(one, ((0, rows),), count - rows, count)
        elif count < rows:  # the ring was not full yet: the other slots were never written
            yield _Slots(one, ((0, count),), 0, count)
        else:
            cursor = count % rows
            yield _Slots(one, ((cursor, rows), (0, cursor)), count - rows, count)


def _are_rings(found: Sequence[Checkpoint]) -> bool:
    """Whether `add_count` tells where the ring of every checkpoint continues.

    In each of them the slot after the newest row, `add_count % rows`, has to be the slot that `invalid_range`
    surrounds, or, without that array, the last slot, as in the published data.
    """
    if len({one.rows for one in found}) != 1:
        return False
    for one in found:
        if one.add_count is None:
            return False
        named = one.invalid is not None and len(one.invalid) > 1
        if one.add_count % one.rows != (one.invalid[1] if named and one.invalid else one.rows - 1):
            return False
    return True


def _missing(parts: Sequence[_Slots], joined: Sequence[bool], there: set[int], path: Path) -> Iterator[FormatError]:
    """Yield an error for each gap in the numbers of checkpoints, unless the rows around it are consecutive."""
    for (other, one), follows in zip(itertools.pairwise(parts), joined, strict=True):
        lacking = [number for number in range(other.number + 1, one.number) if number not in there]
        if lacking and not follows:
            which = f"checkpoint {lacking[0]} is"
            if len(lacking) > 1:
                names = some_of(lacking, _NAMED)
                which = f"checkpoints {names} are"
            yield FormatError(f"{path}: {which} missing between {other.number} and {one.number}")


class _TimeLine:
    """The rows of all checkpoints in the order of time, numbered from 0.

    Attributes:
        stretches: the ranges of slots that the rows are stored in.
        terminal: the rows after which an episode ends, int64, ascending.
        invalid: the rows that are left out, int64, ascending.
        cuts: the rows that do not continue the row before.
        resets: the cuts that are the beginning of the run.
        rows: the number of rows.
    """

    def __init__(self, parts: Sequence[_Slots], joined: Sequence[bool]) -> None:
        self.stretches: list[Stretch] = []
        self.cuts: set[int] = set()
        self.resets: set[int] = set()
        self._checkpoints = [part.checkpoint for part in parts]
        terminal, invalid = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        rows = 0
        for place, (part, follows) in enumerate(zip(parts, joined, strict=True)):
            if not follows:
                self.cuts.add(rows)
                self.resets.update({rows} if part.first == 0 else ())
            invalid.append(rows + _left_out(part, start=follows or part.first == 0))
            for start, stop in part.spans:
                if stop > start:
                    self.stretches.append(Stretch(place, start, stop, rows))
                    slots = part.checkpoint.terminal
                    terminal.append(slots[(slots >= start) & (slots < stop)] - start + rows)
                    rows += stop - start
        self.rows = rows
        self.terminal, self.invalid = np.concatenate(terminal), np.concatenate(invalid)

    def starts(self) -> list[int]:
        """Return the rows that begin an episode: those after a terminal, and the first one of the run."""
        after = set((self.terminal + 1).tolist()) - self.cuts
        return sorted(row for row in after | self.resets if row < self.rows)

    def are_quiet(self, run: RunSurvey, start: int, stop: int) -> bool:
        """Whether all existing rows of `[start, stop)` have action 0, reward 0 and no terminal."""
        parts = run.parts(start, min(stop, self.rows))
        return all(self._checkpoints[place].are_quiet(*slots) for place, *slots in parts)

    def episodes(self, blanks: int) -> Iterator[RunEpisode]:
        """Yield the episodes that have steps."""
        resets, ends, named = set(self.starts()), set((self.terminal + 1).tolist()), set(self.invalid.tolist())
        borders = {0, self.rows} | ends | self.cuts | named | {row + 1 for row in named}
        for start, stop in itertools.pairwise(sorted(borders)):
            skipped = min(blanks, stop - start) if start in resets else 0
            if start not in named and start + skipped < stop:
                yield RunEpisode(start + skipped, stop, stop in ends, start in resets, skipped)


def _left_out(part: _Slots, *, start: bool) -> Array:
    """Return the rows of a part, in the order of time, that `invalid_range` names and that stay invalid.

    It names the newest row, because the next frame is missing: such a row is kept, as the last step of its episode,
    about which `--final-step` decides. It names the oldest rows, because frames to stack before them are missing: these
    are kept if `start` is true, that is if the checkpoint before has those frames, or the run begins here.
    """
    named = np.zeros(part.checkpoint.rows, bool)
    named[list(part.checkpoint.invalid or ())] = True
    marks = np.concatenate([named[first:stop] for first, stop in part.spans])
    others = np.flatnonzero(~marks)
    if len(others):
        marks[others[-1] :] = False
    if start:
        marks[: others[0] if len(others) else len(marks)] = False
    return np.flatnonzero(marks)


def _blanks(
    run: RunSurvey, line: _TimeLine, found: Sequence[Checkpoint], are_zero: Callable[[RunSurvey, int, int], bool]
) -> int:
    """Return the number of blank rows before each episode: as many as Dopamine writes, or 0.

    Blank rows have action 0, reward 0 and frames of zeros. The frames are checked for the first episodes only.
    """
    invalid = found[0].invalid
    count = len(invalid) - 2 if invalid is not None and len(invalid) > 2 else _BLANKS
    starts = line.starts()
    if not all(line.are_quiet(run, row, row + count) for row in starts):
        return 0
    whole = [row for row in starts if row + count < line.rows][:_LOOKED_AT]
    return count if whole and all(are_zero(run, row, row + count) for row in whole) else 0


def _notes(
    parts: Sequence[_Slots], joined: Sequence[bool], line: _TimeLine, episodes: Sequence[RunEpisode], blanks: int
) -> Iterator[str]:
    apart = [pair for pair, follows in zip(itertools.pairwise(parts), joined, strict=True) if not follows]
    for other, one in apart[:_NAMED]:
        yield (
            f"checkpoint {one.number} does not follow checkpoint {other.number} and is not joined to it: add_count is "
            f"{_stated(other)}, then {_stated(one)} with {one.checkpoint.rows:,} rows"
        )
    if len(apart) > _NAMED:
        yield f"neither do {len(apart) - _NAMED:,} more checkpoints follow the ones before them"
    if blanks:
        total = sum(one.blanks for one in episodes)
        yield f"{total:,} blank rows, {blanks} before each episode, are not steps: Dopamine's buffer writes them"
    if len(line.invalid):
        which = "1 row is" if len(line.invalid) == 1 else f"{len(line.invalid):,} rows are"
        yield f"{which} left out, because invalid_range names them and the rows before them are missing"
    inside = sum(not one.begins for one in episodes)
    if inside:
        how = "1 episode begins" if inside == 1 else f"{inside:,} episodes begin"
        yield f"{how} after a cut, in the middle of a game"


def _stated(part: _Slots) -> str:
    return "not stated" if part.checkpoint.add_count is None else f"{part.checkpoint.add_count:,}"


_OPEN = 2
_KEYS: dict[str, Key] = {OBSERVATION: ("observation",), ACTION: ("action",), REWARD: ("reward",)}


class AtariReader(SurveyedReader[RunSurvey]):
    """Reads the folder of a run, or its `replay_logs`, with files such as `$store$_observation_ckpt.0.gz`.

    Frames become `observation`, one per row and never stacked; `action` and `reward` are kept as stored; `terminal`
    ends an episode. Checkpoints are read in the order of their numbers. Two of them are joined if `add_count` shows
    that the second one continues the first; otherwise the episode is cut there. Rows that `invalid_range` names are
    left out, unless the checkpoint before or after has what they lack. Blank rows before episodes are not steps.

    There is no frame after the last step of an episode. A missing or damaged checkpoint is an error if all episodes are
    read; if only some are chosen, it is left out and named in a note.

    Option: `id`, the id of the published run.
    """

    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a folder with the files of a checkpoint."""
        try:
            return looks_like_run(path)
        except OSError as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the files."""
        self._open: dict[int, CheckpointRows] = {}
        self._verdicts: dict[int, CorruptDataError | None] = {}
        self._touched: set[int] = set()
        if not looks_like_run(self.path):
            raise FormatError(f"{self.path} has no checkpoints, which are files like $store$_observation_ckpt.0.gz")

    def look(self, progress: Callable[[int], None]) -> RunSurvey:
        """Read the small arrays of all checkpoints and find the episodes."""
        run = look_over(checkpoints_at(self.path), self.path, self._are_zero)
        self._touched.clear()
        progress(len(run.episodes))
        return run

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts about the run."""
        run = self.looked_over(progress)
        if not run.episodes:
            raise (run.problems or (FormatError(f"{self.path} has no steps"),))[0]
        lengths = [len(one) for one in run.episodes]
        others = sorted({name for one in run.checkpoints for name in one.others})
        return SourceFacts(
            source="atari",
            id=self.id_or(_id_of(self.path)),
            fields=self._fields(run),
            episode_numbers=range(len(lengths)),
            steps=sum(lengths),
            dropped_keys=tuple(Dropped(name, "it is not part of the published layout") for name in others),
            notes=(*run.notes, *(f"left out: {problem.message}" for problem in run.problems)),
            documents={"checkpoints.json": dump_json({"checkpoints": run.stated}, indent=1).encode()},
            lengths=lengths,
            final_missing=True,
            last_terminated=[one.terminated for one in run.episodes],
        )

    @staticmethod
    def _fields(run: RunSurvey) -> tuple[tuple[Field, Timing], ...]:
        forms = {name: (dtype_name(dtype), shape) for name, (dtype, shape) in run.form.columns.items()}
        return (
            (Field(_KEYS[OBSERVATION], *forms[OBSERVATION], "observation"), "state"),
            (Field(_KEYS[ACTION], *forms[ACTION], "action"), "step"),
            (Field(_KEYS[REWARD], *forms[REWARD], "reward"), "result"),
        )

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first checkpoint that is left out, if all episodes are to be read."""
        if everything and self.found.problems:
            raise self.found.problems[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        yield from self._pieces(number, tuple(_KEYS), self.piece_rows(self._fields(self.found)))

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, (REWARD,), OUTCOME_ROWS)

    def _pieces(self, number: int, names: Sequence[str], rows: int) -> Iterator[Piece]:
        run, kept = self.found, np.zeros(0)
        one = run.episodes[number]
        try:
            if OBSERVATION in names:
                self._require_blank(number, one)
            for start in range(one.start, one.stop, rows):
                stop = min(start + rows, one.stop)
                found = {
                    _KEYS[name]: self._read(self.found, name, start, stop) for name in names if name != OBSERVATION
                }
                if OBSERVATION in names:
                    after = self._read(self.found, OBSERVATION, start + (start > one.start), min(stop + 1, one.stop))
                    frames = np.concatenate((kept, after)) if start > one.start else after
                    found[_KEYS[OBSERVATION]], kept = frames, frames[-1:].copy()
                yield _piece(number, one, found, start, stop)
        except RbtoolError:
            self._touched.clear()
            raise

    def _require_blank(self, number: int, one: RunEpisode) -> None:
        if one.blanks and not self._are_zero(self.found, one.start - one.blanks, one.start):
            raise FormatError(
                f"{self.path}: episode {number} has frames in the {one.blanks} rows before it, which are blank before "
                "other episodes"
            )

    def _are_zero(self, run: RunSurvey, start: int, stop: int) -> bool:
        return not self._read(run, OBSERVATION, start, stop).any()

    def _read(self, run: RunSurvey, name: str, start: int, stop: int) -> Array:
        """Read rows of the run."""
        if start == stop:
            dtype, shape = run.form.columns[name]
            return np.zeros((0, *shape), dtype)
        parts = [self._opened(run, place).read(name, *slots) for place, *slots in run.parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _opened(self, run: RunSurvey, place: int) -> CheckpointRows:
        self._touched.add(place)
        found = self._open.pop(place, None)
        if found is None:
            while len(self._open) >= _OPEN:
                oldest = next(iter(self._open))
                if oldest in self._touched:
                    self._verdict(oldest)
                self._open.pop(oldest).close()
            found = CheckpointRows(run.checkpoints[place])
        self._open[place] = found
        return found

    def _verdict(self, place: int) -> CorruptDataError | None:
        """Read the opened files of a checkpoint to their ends, to compare checksums; return the error, if any."""
        if place not in self._verdicts:
            try:
                self._open[place].verify_read()
                self._verdicts[place] = None
            except CorruptDataError as error:
                self._verdicts[place] = error
        return self._verdicts[place]

    def verify_read(self) -> None:
        """Raise CorruptDataError for the first damaged checkpoint among those that were read."""
        touched, self._touched = sorted(self._touched), set()
        for place in touched:
            damage = self._verdict(place)
            if damage is not None:
                raise damage

    def files(self) -> list[Path]:
        """Return the files of all checkpoints that can be read."""
        return [path for one in self.found.checkpoints for path in one.paths.values()]

    def on_close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


def _piece(number: int, one: RunEpisode, columns: dict[Key, Array], start: int, stop: int) -> Piece:
    terminated = np.zeros(stop - start, bool)
    last = stop == one.stop
    terminated[-1] = last and one.terminated
    return Piece(
        number, columns, terminated, np.zeros(stop - start, bool), first=start == one.start, last=last,
        final=Final.MISSING,
    )  # fmt: skip


def _id_of(path: Path) -> str:
    """Return `Pong/1` for the folder of a run, else the name of the folder."""
    run = path.absolute()
    run = run.parent if run.name == LOGS else run
    return f"{run.parent.name}/{run.name}" if run.name.isdecimal() and run.parent.name else run.name


RUNS = (1, 2, 3, 4, 5)
GAMES = (
    "AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone", "BeamRider",
    "Berzerk", "Bowling", "Boxing", "Breakout", "Carnival", "Centipede", "ChopperCommand", "CrazyClimber",
    "DemonAttack", "DoubleDunk", "ElevatorAction", "Enduro", "FishingDerby", "Freeway", "Frostbite", "Gopher",
    "Gravitar", "Hero", "IceHockey", "Jamesbond", "JourneyEscape", "Kangaroo", "Krull", "KungFuMaster",
    "MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong", "Pooyan", "PrivateEye", "Qbert",
    "Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris", "SpaceInvaders", "StarGunner", "Tennis",
    "TimePilot", "Tutankham", "UpNDown", "Venture", "VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon",
)  # fmt: skip


_CHECKPOINTS = 50
_NAMES = ("$store$_observation", "$store$_action", "$store$_reward", "$store$_terminal", "add_count", "invalid_range")
_VARIABLE, _FOLDER = "ATARI_URL", "ATARI_DATASET_DIR"


class AtariSource(MirrorSource):
    """Downloads runs from the bucket of the DQN Replay dataset, or from the mirrors in `ATARI_URL` (base URLs).

    A run consists of the checkpoints from 0 to 49 that a mirror has. Each file is decompressed and compared with the
    checksum that it contains; if they differ, the next mirror is tried. `ATARI_DATASET_DIR` is the folder for
    `--local`, which has runs as `Pong/1/replay_logs`.
    """

    name = "atari"
    title = "DQN Replay"
    bases_variable = _VARIABLE
    defaults = ("https://storage.googleapis.com/atari-replay-datasets/dqn",)
    signatures = (b"\x1f\x8b",)
    server_hint = (
        "the published bucket has been closed since 2025 (it answers 403). RL Unplugged (gs://rl_unplugged, "
        "rlu_atari_checkpoints_ordered in TensorFlow Datasets) has the same frames. With files of your own: "
        f"rbtool convert FOLDER DEST, or --local with {_FOLDER}=DIR; {_VARIABLE}=BASE names a mirror"
    )
    local_cache = LocalCache("atari", _FOLDER, "~/dqn_replay")

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package, without a request."""
        return Ids(runs())

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of all files of all checkpoints, on each mirror."""
        paths = (path for number in range(_CHECKPOINTS) for path in _paths(number))
        return {path: [f"{base}/{dataset_id}/{path}" for base in self.bases] for path in paths}

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Request size and version of all files of a run; DatasetNotFoundError if a checkpoint lacks one."""
        if dataset_id not in runs():
            raise not_found(dataset_id, list(runs()), self.name)
        with self.explained():
            addresses = self.addresses(dataset_id)
            return [file for number in range(_CHECKPOINTS) for file in self._checkpoint(addresses, number)]

    def _checkpoint(self, addresses: Mapping[str, Sequence[str]], number: int) -> list[RemoteFile]:
        """Describe the files of a checkpoint; [] if it does not exist, unless it is the first."""
        found: list[RemoteFile] = []
        for path in _paths(number):
            try:
                found.append(self.described(path, addresses[path]))
            except DatasetNotFoundError:
                if found or not number:
                    raise
                return []
        return found

    def require_readable(self, path: Path) -> None:
        """Decompress a file; FormatError if it is not an array, CorruptDataError if its checksum differs."""
        with GzipArray(path) as array:
            array.verify()


def _paths(number: int) -> list[str]:
    return [f"{LOGS}/{name}_ckpt.{number}.gz" for name in _NAMES]


@functools.cache
def runs() -> tuple[str, ...]:
    """Return all ids, sorted: `Pong/1` to `Pong/5`, and so on."""
    return tuple(f"{game}/{run}" for game in sorted(GAMES) for run in RUNS)
