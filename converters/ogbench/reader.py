"""Reads OGBench's npz files: trajectories whose last row holds the last observation. Never imports ogbench."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.ted.schema import REWARD, Field, Key, Timing, key_name, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES, RowBlocks
from .datasets import VALIDATION, file_name, names_task
from .file import NpzColumn, OgbenchFile, looks_like_ogbench, opened

PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
SPLITS = ("train", "val")
_ZERO = "zero"


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """Rows `[start, stop)` of a file, of which the last has the last observation; `number` numbers the episode."""

    number: int
    file: int
    start: int
    stop: int
    unfinished: bool

    def __len__(self) -> int:
        return self.stop - self.start - 1


class OgbenchReader(Reader):
    """One OGBench file, or a folder with `NAME.npz` and, if it is there, `NAME-val.npz` and no other npz file.

    `observations` become `observation`, `actions` `action`; `qpos`, `qvel`, `button_states` and any other column with
    as many rows are states, `info.NAME`. Rows of a trajectory but the last are its steps; the observation of the last
    row is what comes after the last step, its action is left out. Files in the compact form of ogbench, with `valids`,
    may have `rewards`, which become `next.reward`. Episodes end truncated, and never terminated. They
    are numbered in the order of the file; episodes of `NAME-val.npz` come after the others, and every episode has its
    split (`train` or `val`) as text.

    Options: `reward` `zero` adds rewards of 0, which the files do not have; `filter_key` chooses a split; `id` is the
    published dataset that the files are: a file is then read with its `-val` file. `trust_pickle` allows arrays of
    Python objects to be read.

    Raises FormatError for columns that contradict each other, and CorruptDataError for damaged files.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"reward", "filter_key", "id", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is npz with OGBench's columns and no rewards."""
        files = _files_at(path)
        return bool(files) and looks_like_ogbench(files[0])

    def on_open(self) -> None:
        """Open the files, look at their structure and read where trajectories end."""
        files = _files_at(self.path)
        if not files:
            raise FormatError(f"{self.path} is no npz file, and has not one dataset of OGBench inside")
        self.id = self.options.get("id")
        if self.id is not None and self.path.is_file():
            files = [files[0], _validation_of(files[0])]
        reward = self.options.get("reward")
        if reward not in (None, _ZERO):
            raise UsageError(f"--reward is {reward!r}, expected zero: OGBench's files have no rewards")
        self._zeros = reward == _ZERO
        self._files = opened(files, trusted=bool(self.options.get("trust_pickle")))
        self._reads_rewards = any(column.field.key == REWARD for column in self._files[0].columns)
        if self._zeros and self._reads_rewards:
            raise UsageError(f"{self._files[0].path} has rewards of its own", hint="leave out --reward")
        self._all = _trajectories(self._files)
        self._episodes = {one.number: one for one in self._chosen() if len(one)}
        if not self._episodes:
            raise FormatError(f"{self.path} has no steps: each of its trajectories is a single row")
        self._columns = [_NpzColumns(file, self.fields, self.piece_bytes) for file in self._files]

    @property
    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """The fields, each with when it is known."""
        found = [(column.field, column.timing) for column in self._files[0].columns]
        rewards: list[tuple[Field, Timing]] = [(Field(REWARD, "float32", (), "reward"), "result")]
        return (*found, *(rewards if self._zeros else ()))

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """State the facts; opening read where episodes end."""
        progress(len(self._episodes))
        lengths = [len(one) for one in self._episodes.values()]
        columns = self._files[0].columns
        return SourceFacts(
            source="ogbench",
            id=str(self.id) if self.id is not None else self._files[0].path.stem,
            fields=self.fields,
            episode_numbers=list(self._episodes),
            steps=sum(lengths),
            renamed_keys={column.name: key_name(column.field.key) for column in columns},
            dropped_keys=self._files[0].dropped,
            notes=tuple(self._notes()),
            lengths=lengths,
        )

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        one = self._episodes[number]
        columns = self._columns[one.file]
        for start in range(one.start, one.stop - 1, columns.rows):
            stop = min(start + columns.rows, one.stop - 1)
            found = {key: columns.read(key, start, stop) for key in columns.keys}
            yield self._piece(one, found, start, stop)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the flags of one episode, and the rewards if there are any: no other column is read."""
        one = self._episodes[number]
        columns = self._columns[one.file]
        size = columns.rows if self._reads_rewards else 1 << 20
        for start in range(one.start, one.stop - 1, size):
            stop = min(start + size, one.stop - 1)
            found = {REWARD: columns.read(REWARD, start, stop)} if self._reads_rewards else {}
            yield self._piece(one, found, start, stop)

    def _piece(self, one: _Trajectory, columns: dict[Key, Array], start: int, stop: int) -> Piece:
        last, steps = stop == one.stop - 1, stop - start
        truncated = np.zeros(steps, bool)
        truncated[-1] = last and not one.unfinished
        if self._zeros:
            columns[REWARD] = np.zeros(steps, np.float32)
        text = {"split": SPLITS[one.file]} if len(self._files) > 1 else {}
        return Piece(
            one.number, columns, np.zeros(steps, bool), truncated, first=start == one.start, last=last, text=text
        )

    def _chosen(self) -> list[_Trajectory]:
        split = self.options.get("filter_key")
        if split is None:
            return self._all
        if len(self._files) == 1:
            raise UsageError(f"{self.path} is one file without splits", hint="leave out --filter-key")
        if split not in SPLITS:
            raise UsageError(f"--filter-key is {split!r}; the splits of {self.path} are {', '.join(SPLITS)}")
        return [one for one in self._all if one.file == SPLITS.index(split)]

    def _notes(self) -> Iterator[str]:
        marks = {"valids is 0" if file.is_compact else "terminals is 1" for file in self._files}
        yield f"episodes end where {' or '.join(sorted(marks))}, in the row of the last observation; they are truncated"
        if len(self._files) > 1:
            chosen = self._chosen()
            ranges = [[one.number for one in chosen if one.file == number] for number in range(len(self._files))]
            parts = [
                f"{numbers[0]}:{numbers[-1] + 1} are {file.path.name} ({split})"
                for numbers, file, split in zip(ranges, self._files, SPLITS, strict=True)
                if numbers
            ]
            yield f"episodes {' and '.join(parts)}"
        elif _validation_of(self._files[0].path).is_file():
            yield f"{_validation_of(self._files[0].path).name} is not part of it: a folder of the two files is both"
        if self._zeros:
            yield "rewards are 0, as --reward zero states: the file has none"
        elif not self._reads_rewards:
            yield "there are no rewards in the file, and no next.reward (--reward zero adds rewards of 0)"
        if self.id is not None and names_task(str(self.id)):
            yield f"{self.id} is the file {file_name(str(self.id))}: the rewards of its task are not in it"
        for number, file in enumerate(self._files):
            trajectories = [one for one in self._chosen() if one.file == number]
            if trajectories:
                yield from _notes_on(file, trajectories)

    def files(self) -> list[Path]:
        """The one file, or both."""
        return [file.path for file in self._files]

    def verify_read(self) -> None:
        """Verify the checksums of the arrays that were read."""
        for file in self._files:
            file.verify_read()

    def on_close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class _NpzColumns:
    """The columns of one file under their TED keys; `rows` is how many rows a piece has at most."""

    def __init__(self, file: OgbenchFile, fields: tuple[tuple[Field, Timing], ...], piece_bytes: int) -> None:
        self.rows = max(1, piece_bytes // max(1, row_bytes(ted_fields(fields))))
        self.keys = [column.field.key for column in file.columns]
        self._states = {column.field.key for column in file.columns if column.timing == "state"}
        self._blocks = {column.field.key: self._block(file, column) for column in file.columns}

    def _block(self, file: OgbenchFile, column: NpzColumn) -> RowBlocks:
        shape = column.field.shape

        def read(start: int, stop: int) -> Array:
            return file.read(column.name, start, stop).reshape(stop - start, *shape)

        return RowBlocks(read, file.rows, self.rows)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read the rows of the steps `[start, stop)`: of a state, the one after them too."""
        return self._blocks[key].read(start, stop + (key in self._states))


def _trajectories(files: list[OgbenchFile]) -> list[_Trajectory]:
    found: list[_Trajectory] = []
    for number, file in enumerate(files):
        last = len(file.stops) - 1
        found += [
            _Trajectory(len(found) + at, number, start, stop, file.unfinished and at == last)
            for at, (start, stop) in enumerate(zip(file.starts.tolist(), file.stops.tolist(), strict=True))
        ]
    return found


def _notes_on(file: OgbenchFile, trajectories: list[_Trajectory]) -> Iterator[str]:
    single = [one.number for one in trajectories if not len(one)]
    if single:
        which = f"episode {single[0]} of {file.path.name} is" if len(single) == 1 else (
            f"{len(single):,} episodes of {file.path.name} (first: {single[0]}) are"
        )  # fmt: skip
        yield f"{which} left out: one row, which is no step"
    last = trajectories[-1]
    if last.unfinished and len(last):
        rows = last.stop - last.start
        yield f"the last {rows:,} rows of {file.path.name} end without a mark: an unfinished episode, which is kept"


def _validation_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}{VALIDATION}.npz")


def _files_at(path: Path) -> list[Path]:
    """The file itself; of a folder `NAME.npz` and `NAME-val.npz`, if it has no other npz file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    found = sorted(file for file in path.iterdir() if file.suffix == ".npz" and file.is_file())
    plain = [file for file in found if _validation_of(file) in found] if len(found) > 1 else found
    return [*plain, *(file for file in found if file not in plain)] if len(plain) == 1 and len(found) <= 2 else []
