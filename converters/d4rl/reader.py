"""Reads D4RL's flat HDF5 files: one long table of steps, whose episodes the flags mark.

Imports h5py; never d4rl, gym or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.reader import Reader
from ...core.ted.episodes import Final
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, key_name, row_bytes, ted_fields
from ..files.column_reader import BLOCK_BYTES, RowBlocks
from ..files.hdf5 import h5_file_at, other_files_note
from .boundaries import FileBoundaries, find_boundaries
from .datasets import D4rlDataset, dataset_named, dataset_of_file
from .file import NEXT_OBSERVATIONS, D4rlFile, looks_like_d4rl

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
        """Read the rows from the first of these episodes to the last, and keep those of the episodes."""
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
