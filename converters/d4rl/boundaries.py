"""Where the episodes of a D4RL file end: flags, a time limit, or where next observations do not follow.

A file is one long table of steps. In this order:

- with `timeouts`, a step that has `terminals` or `timeouts` set ends an episode;
- in the antmaze files `terminals` mark every step near the goal, and `timeouts` alone end episodes;
- without `timeouts`, a step with `episode_terminals` (d3rlpy 1) ends an episode, and nothing else does;
- with neither, a step with `terminals` ends an episode, and so does the time limit of the environment; in the
  antmaze files the time limit alone does;
- without a time limit too, an episode also ends where `next_observations` is not the following observation.

What comes after the last end is an episode too: the recording stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np

from ...core.errors import UsageError
from ...core.format.contracts import Array
from ...core.format.overview import OptionNeededError
from ...core.ted.episodes import rows_equal
from ..files.column_reader import BLOCK_BYTES, blocks
from .datasets import D4rlDataset, same_file
from .file import EPISODE_TERMINALS, NEXT_OBSERVATIONS, TIMEOUTS, D4rlFile


class Ends(Enum):
    """What ends an episode; the value describes it for people."""

    FLAGS = "episodes end at terminals and timeouts"
    TIMEOUTS = "episodes end at timeouts alone: terminals mark steps near the goal, and stay flags of their steps"
    EPISODE_TERMINALS = (
        "episodes end at episode_terminals, as d3rlpy 1 writes them: terminated where terminals are set, else truncated"
    )
    HORIZON = "there are no timeouts: episodes end at terminals and at the time limit"
    LIMIT = (
        "there are no timeouts: terminals mark steps near the goal, and stay flags of their steps; episodes end at the "
        "time limit alone"
    )
    FOLLOWING = "there are no timeouts: episodes end at terminals and where next_observations do not follow"


@dataclass(frozen=True)
class FileBoundaries:
    """The episodes of a file: `stops` has the row after each, ascending; `rule` is what ended them.

    `limit` is the time limit, where the rule has one. `ends_unflagged` states that the recording stops inside the last
    episode, `last_terminated` for each episode whether its last step is. `notes` are sentences on what was found.
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
        """First row of an episode, and the row after its last."""
        return int(self.starts[number]), int(self.stops[number])

    def is_timed_out(self, number: int) -> bool:
        """Whether the time limit, which no flag states, ends an episode that no other flag ends."""
        return self.limit is not None and int(self.lengths[number]) == self.limit

    def is_inferred(self, number: int) -> bool:
        """Whether it ends, without a flag, where next observations do not follow."""
        return bool(self.inferred(np.array([number]))[0])

    def inferred(self, numbers: Array) -> Array:
        """`is_inferred` of these episodes, bool."""
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
    """Read the flags of a file and find its episodes; `known` is the published dataset that it is, if it is one.

    `horizon` is the time limit that a user states, `named` whether the file name is all that states `known`. Raises
    UsageError for a time limit that the file has no use for, and FormatError where the ends of episodes cannot be
    determined, or a flag is neither 0 nor 1.
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
            "has neither timeouts nor next_observations, and its name is none of D4RL's: where an episode reaches its "
            "time limit cannot be determined",
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
    """The rows in which a flag is set, and those whose reward is NaN."""

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
        """Whether one step with `terminals` follows another that no timeout ends."""
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
    """Rows after which the next observation is not the following one."""
    row = file.read("observations", 0, 1).nbytes
    found = []
    for start, stop in blocks(file.rows - 1, max(1, BLOCK_BYTES // max(1, row))):
        after = file.read(NEXT_OBSERVATIONS, start, stop)
        following = file.read("observations", start + 1, stop + 1)
        found.append(start + np.flatnonzero(~rows_equal(after, following)))
    return _joined(found)


def _cut(stops: Array, limit: int) -> Array:
    """Cut every stretch of more than `limit` steps after each `limit` steps."""
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
            "timeouts are set nowhere, and terminals in steps that follow each other: if they mark steps near a goal, "
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
        yield "timeouts are there, and episode_terminals end no episode: they are info.episode_terminals"
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
            yield f"the file has {size:,} bytes, and the one that D4RL publishes as {known.file_name} {known.size:,}"
    if len(flags.nan):
        yield f"the reward is NaN in {len(flags.nan):,} of {file.rows:,} steps (first: step {int(flags.nan[0]):,})"


def _unended(rows: Array) -> Iterator[str]:
    if len(rows):
        steps = f"{len(rows):,} {'step' if len(rows) == 1 else 'steps'} inside episodes (first: step {int(rows[0]):,})"
        yield (
            f"next_observations are not the following observations in {steps}: "
            "if episodes end there, the time limit is another"
        )


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)
