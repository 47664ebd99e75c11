"""Reads D4RL's flat HDF5 files. Imports h5py; never d4rl, gym or torch.

A file is one long table of steps. Its episodes are found by these rules, in this order:

- with `timeouts`, a step that has `terminals` or `timeouts` set ends an episode;
- in the antmaze files `terminals` mark every step near the goal, and `timeouts` alone end episodes;
- without `timeouts`, a step with `episode_terminals` (d3rlpy 1) ends an episode, and nothing else does;
- with neither, a step with `terminals` ends an episode, and so does the time limit of the environment; in the
  antmaze files the time limit alone does;
- without a time limit too, an episode also ends where `next_observations` is not the following observation.

What comes after the last end is an episode too: the recording stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.locate import OptionNeededError
from ...core.ted.episodes import Final, rows_equal
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, key_name, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES, RowBlocks, blocks
from ..files.hdf5 import h5_file_at, other_files_note
from .datasets import D4rlDataset, dataset_named, dataset_of_file, same_file
from .file import EPISODE_TERMINALS, NEXT_OBSERVATIONS, TIMEOUTS, D4rlFile, looks_like_d4rl


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


PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time, of one episode."""
EPISODES_BYTES = 8 << 20
"""TED bytes of a block of episodes: the next one is read while one is written."""
_TABLE_ROWS = 1 << 20
_OBSERVATION: Key = ("observation",)


class D4rlReader(Reader):
    """A D4RL file, or a folder that has one and no other HDF5 file.

    `observations` become `observation`; where the file has `next_observations`, those are what is under `next`,
    whether they follow or not. `infos/NAME` is `info.NAME`, of the row in which it is. Episodes are numbered from 0 in
    the order of the file.

    Options: `horizon` is the time limit of episodes in a file without `timeouts`; `id` the published dataset that the
    file is, where its name does not state it.

    Raises FormatError for columns that contradict each other, CorruptDataError for damaged files, UsageError for a
    `horizon` where `timeouts` state the ends.
    """

    piece_bytes = PIECE_BYTES
    block_bytes = EPISODES_BYTES
    option_names = frozenset({"horizon", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is HDF5 with D4RL's columns, whatever their lengths, or a HDF5 file that was cut."""
        file = h5_file_at(path)
        return file is not None and looks_like_d4rl(file)

    def on_open(self) -> None:
        """Open the file and look at its structure."""
        file = h5_file_at(self.path)
        if file is None:
            raise FormatError(f"{self.path} is no HDF5 file, and has not one inside")
        self._file = D4rlFile(file)
        asked = self.options.get("id")
        self.known: D4rlDataset | None = dataset_of_file(file.name) if asked is None else dataset_named(str(asked))
        self._columns = _D4rlColumns(self._file, self.piece_bytes)
        self._block_rows = max(1, min(self.block_bytes, self.piece_bytes) // self._columns.row_bytes)
        self._found: FileBoundaries | None = None

    @property
    def _boundaries(self) -> FileBoundaries:
        return self._surveyed(lambda episodes: None)

    def _surveyed(self, progress: Callable[[int], None]) -> FileBoundaries:
        if self._found is None:
            horizon = self.options.get("horizon")
            self._found = find_boundaries(
                self._file, self.known, None if horizon is None else int(horizon), progress,
                named="id" not in self.options,
            )  # fmt: skip
        return self._found

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the flags and find the episodes."""
        found = self._surveyed(progress)
        contents = self._file.contents
        keys = {info.path: key_name(info.key) for info in self._file.infos}
        return SourceFacts(
            source="d4rl",
            id=self.known.id if self.known is not None else self._file.path.stem,
            fields=self._columns.fields,
            episode_numbers=range(len(found)),
            steps=self._file.rows,
            renamed_keys={path: name for path, name in keys.items() if name != _usual_name(path)},
            dropped_keys=contents.dropped,
            notes=(*found.notes, *other_files_note(self.path, self._file.path)),
            documents=contents.documents,
            lengths=found.lengths.tolist(),
            final_missing=not self._file.has_next,
            last_terminated=None if self._file.has_next else found.last_terminated.tolist(),
        )

    def survey_state(self) -> FileBoundaries:
        """The ends of the episodes."""
        return self._boundaries

    def take_survey(self, state: FileBoundaries) -> None:
        """Take over the ends of the episodes."""
        self._found = state

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        begin, end = self._boundaries.span(number)
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
        """Yield blocks of as many episodes as have up to `block_bytes` together, and longer ones by themselves."""
        boundaries, chosen = self._boundaries, np.asarray(numbers, np.int64)
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
        """Read the rows from the first of these episodes to the last, and keep the rows that belong to them."""
        boundaries, file = self._boundaries, self._file
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
        """Yield the rewards and flags of one episode; all of it where next observations are stored."""
        if self._file.has_next:
            yield from self.read_episode(number)
            return
        begin, end = self._boundaries.span(number)
        for start in range(begin, end, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, end)
            yield self._piece(number, {REWARD: self._columns.read(REWARD, start, stop)}, {}, start, stop)

    def _piece(
        self, number: int, columns: dict[Key, Array], following: dict[Key, Array], start: int, stop: int
    ) -> Piece:
        boundaries = self._boundaries
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
    """The columns of a file under their TED keys, read in blocks: an episode may be far shorter than a block."""

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
        """The observation after each step."""
        return self._after.read(start, stop)

    def read_flags(self, start: int, stop: int) -> tuple[Array, Array]:
        """Terminated and timed out of each step as fresh arrays, of which no block is kept."""
        return self._file.read_flag("terminals", start, stop), self._file.read_truncated(start, stop)

    def flags(self, start: int, stop: int) -> tuple[Array, Array]:
        """Terminated and timed out of each step; none is timed out where the file has no such flag."""
        return self._terminals.read(start, stop), self._truncated.read(start, stop)


def _usual_name(path: str) -> str:
    """The name of a column in TED, where nothing about it had to be changed."""
    return ".".join(("info", *path.removeprefix("infos/").split("/"))) if path.startswith("infos/") else ""
