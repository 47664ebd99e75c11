"""The time line of a run: in which order the rows of its checkpoints were recorded, and the episodes that they form.

A checkpoint is a copy of the ring of Dopamine's replay buffer (Castro et al. 2018), which `add_count` and
`invalid_range` describe. The ring was copied one row before it was full: its last slot has the oldest row, which comes
after the last row of the checkpoint before. Dopamine begins each episode with blank rows, one fewer than the frames
that it stacks; they are no steps.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError
from ...core.format.contracts import Array
from .checkpoints import Checkpoint, CheckpointFiles, Form, look_at

_BLANKS = 3
_LOOKED_AT = 3
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Stretch:
    """Slots `[start, stop)` of the checkpoint at place `checkpoint`, whose first one is row `row` of the run."""

    checkpoint: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class RunEpisode:
    """Rows `[start, stop)` of the run; `blanks` rows before them are blank. `begins`: the first one is of a reset."""

    start: int
    stop: int
    terminated: bool
    begins: bool
    blanks: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RunSurvey:
    """What a look at all checkpoints found.

    `problems` has what is wrong with checkpoints that are left out, or missing; all others can be read. `stated` is
    what the source states about each checkpoint.
    """

    checkpoints: tuple[CheckpointFiles, ...]
    form: Form
    stretches: tuple[Stretch, ...]
    problems: tuple[RbtoolError, ...]
    stated: tuple[dict[str, object], ...]
    episodes: tuple[RunEpisode, ...] = ()
    notes: tuple[str, ...] = ()

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the place of a checkpoint and the range of its slots, for the rows `[start, stop)` in their order."""
        number = bisect.bisect_right(self.stretches, start, key=lambda one: one.row) - 1
        while start < stop:
            one = self.stretches[number]
            end = min(stop, one.row + one.stop - one.start)
            yield one.checkpoint, one.start + start - one.row, one.start + end - one.row
            start, number = end, number + 1


def look_over(
    files: Sequence[CheckpointFiles], path: Path, are_zero: Callable[[RunSurvey, int, int], bool]
) -> RunSurvey:
    """Look at the small arrays of all checkpoints and find the episodes.

    `are_zero` states whether the frames of rows `[start, stop)` of a run are zeros. Raises what is wrong with the
    first checkpoint where none can be read.
    """
    found: list[Checkpoint] = []
    problems: list[RbtoolError] = []
    for one in files:
        try:
            checkpoint = look_at(one)
            if found and checkpoint.form != found[0].form:
                raise FormatError(
                    f"checkpoint {one.number} has other rows than checkpoint {found[0].files.number}: "
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
    """Whether the slot after the newest row is that which `invalid_range` is around, in all checkpoints.

    Without that array: whether it is the last slot, as in the published data.
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
    """Yield an error for each gap in the numbers, unless the rows around it follow one another."""
    for (other, one), follows in zip(itertools.pairwise(parts), joined, strict=True):
        lacking = [number for number in range(other.number + 1, one.number) if number not in there]
        if lacking and not follows:
            which = f"checkpoint {lacking[0]} is"
            if len(lacking) > 1:
                names = ", ".join(map(str, lacking[:_NAMED])) + (", …" if len(lacking) > _NAMED else "")
                which = f"checkpoints {names} are"
            yield FormatError(f"{path}: {which} missing between {other.number} and {one.number}")


class _TimeLine:
    """The rows of all parts, one after the other.

    `terminal` and `invalid` are rows, int64, ascending: those after which an episode ends, and those that are left
    out. `cuts` are rows that do not follow the one before, `resets` those of them with which the run begins.
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
        """The rows after a reset: those after a terminal, and the first one of the run."""
        after = set((self.terminal + 1).tolist()) - self.cuts
        return sorted(row for row in after | self.resets if row < self.rows)

    def are_quiet(self, run: RunSurvey, start: int, stop: int) -> bool:
        """Whether rows `[start, stop)`, as far as there are, have action 0, reward 0 and no terminal."""
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
    """Return which rows of a part, in the order of time, `invalid_range` names and nothing makes valid.

    It names the newest row, since the next one is missing: `--final-step` decides about that, as of any episode. It
    names the oldest ones, since frames before them are missing, unless (`start`) these are there, or there are none.
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
    """Return how many blank rows each episode begins with: as many as Dopamine writes, or none.

    Blank rows have an action and a reward of 0 and frames of zeros; of the frames only the first episodes are read.
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
        yield f"so do {len(apart) - _NAMED:,} more checkpoints"
    if blanks:
        total = sum(one.blanks for one in episodes)
        yield f"{total:,} blank rows, {blanks} before each episode, are no steps: Dopamine's buffer writes them"
    if len(line.invalid):
        which = "1 row is" if len(line.invalid) == 1 else f"{len(line.invalid):,} rows are"
        yield f"{which} left out, since invalid_range names them and nothing joins them to rows before"
    inside = sum(not one.begins for one in episodes)
    if inside:
        how = "1 episode begins" if inside == 1 else f"{inside:,} episodes begin"
        yield f"{how} after a cut, in the middle of a game"


def _stated(part: _Slots) -> str:
    return "not stated" if part.checkpoint.add_count is None else f"{part.checkpoint.add_count:,}"
