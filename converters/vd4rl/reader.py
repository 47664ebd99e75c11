"""Reads V-D4RL's folders: rows of pixels with the action that led to them. Imports h5py; never dm_control or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader, refuse_damaged
from ...core.format.files import no_match
from ...core.ted.schema import REWARD, Field, Key, Timing, key_name, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES
from ..files.episode_files import notes_on_identical
from ..files.hdf5 import names_in
from ..files.npz import array_names, first_name_of_cut
from .episodes import (
    HDF5_SUFFIXES,
    IS_INIT,
    NPZ_SUFFIX,
    PIXELS,
    ArrayColumn,
    EpisodeFiles,
    FileEpisodes,
    FoundEpisodes,
    RowEpisode,
    Shards,
    looks_like_vd4rl,
)

PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
_OUTCOME_ROWS = 1 << 20
_TRIED = 3
_SUITES = frozenset({"main", "distracting", "multitask"})


class Vd4rlReader(Reader):
    """A folder of V-D4RL, or one of its files: npz of one episode each (64px), or HDF5 shards (84px).

    `image` or `observation` becomes `pixels`, in the stored layout; `action`, `reward` and `discount` of a step are
    in the row after it, since a row holds what led to it. Any other array with a row for each observation is
    `state.NAME`. `is_init` is set in the first step after a reset. Episodes are truncated, or terminated where
    `is_terminal` (without it, a `discount` of 0) marks the last row.

    Npz files are in the order of their names, episode numbers are their places, and each episode has the name of its
    `file` as text. Shards are in the order of their numbers, and episodes that go over their borders are joined.

    Option: `id`, the published dataset that the folder is. Raises FormatError for arrays that contradict each other,
    CorruptDataError for damaged files.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a file, or a folder of files, with the arrays of V-D4RL."""
        try:
            files = _files_at(path)
            return any(_looks_right(file) for file in files[:_TRIED])
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the files."""
        files = _files_at(self.path)
        if not files:
            raise FormatError(f"{self.path} has no npz files and no HDF5 files, or both kinds")
        is_npz = files[0].suffix.lower() == NPZ_SUFFIX or _begins_as_zip(files[0])
        self._episodes: FileEpisodes = EpisodeFiles(files) if is_npz else Shards(files)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the flags of all files and find the episodes."""
        found = self._episodes.find(progress)
        episodes = {number: one for number, one in found.episodes.items() if len(one)}
        numbers = sorted(episodes.keys() | found.damaged.keys())
        if not episodes and not found.damaged:
            raise FormatError(f"{self.path} has no steps: each of its episodes is a single row")
        lengths = [len(episodes[number]) if number in episodes else 0 for number in numbers]
        asked = self.options.get("id")
        return SourceFacts(
            source="vd4rl",
            id=str(asked) if asked is not None else _id_of(self.path),
            fields=_fields(found.columns),
            episode_numbers=numbers,
            steps=sum(lengths),
            renamed_keys=_renamed(found.columns),
            dropped_keys=found.dropped,
            notes=(
                "the action, reward and discount of a step are those of the row after it",
                *found.notes,
                *notes_on_identical(self._episodes.files),
            ),
            lengths=lengths,
        )

    def survey_state(self) -> FoundEpisodes:
        """Return what the files hold."""
        return self._found

    def take_survey(self, state: FoundEpisodes) -> None:
        """Take over what the files hold."""
        self._episodes.take(state)

    @property
    def _found(self) -> FoundEpisodes:
        return self._episodes.find(lambda episodes: None)

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read."""
        refuse_damaged(numbers, self._found.damaged)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        one, columns = self._found.episodes[number], self._found.columns
        rows = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(_fields(columns)))))
        states = [column.field.key for column in columns if column.timing == "state"]
        kept: dict[Key, Array] = {}
        for start in range(one.start, one.stop - 1, rows):
            stop = min(start + rows, one.stop - 1)
            found = {column.field.key: self._rows(one, column, start, stop, kept) for column in columns}
            found[IS_INIT] = np.zeros((stop - start, 1), bool)
            found[IS_INIT][0] = one.begins and start == one.start
            kept = {key: found[key][-1:].copy() for key in states}
            if stop == one.stop - 1:
                self._episodes.verify_read(one)
            yield _piece(one, found, start, stop)

    def _rows(self, one: RowEpisode, column: ArrayColumn, start: int, stop: int, kept: dict[Key, Array]) -> Array:
        """Read the rows of a column for the steps `[start, stop)`; no row is read twice."""
        read = self._episodes.read
        if column.timing != "state":
            rows = read(one, column.name, start + 1, stop + 1)
            return rows.reshape(stop - start) if column.field.key == REWARD else rows
        before = kept.get(column.field.key)
        if before is None:
            return read(one, column.name, start, stop + 1)
        return np.concatenate((before, read(one, column.name, start + 1, stop + 1)))

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        one = self._found.episodes[number]
        for start in range(one.start, one.stop - 1, _OUTCOME_ROWS):
            stop = min(start + _OUTCOME_ROWS, one.stop - 1)
            rewards = self._episodes.read(one, "reward", start + 1, stop + 1).reshape(stop - start)
            yield _piece(one, {REWARD: rewards}, start, stop)

    def files(self) -> list[Path]:
        """All files."""
        return self._episodes.files

    def on_close(self) -> None:
        """Close the files."""
        self._episodes.close()


def _piece(one: RowEpisode, columns: dict[Key, Array], start: int, stop: int) -> Piece:
    last = stop == one.stop - 1
    terminated, truncated = np.zeros(stop - start, bool), np.zeros(stop - start, bool)
    if last:
        terminated[-1], truncated[-1] = one.terminated, one.ended and not one.terminated
    return Piece(
        one.number, columns, terminated, truncated, first=start == one.start, last=last, text=dict(one.text)
    )  # fmt: skip


def _fields(columns: Sequence[ArrayColumn]) -> tuple[tuple[Field, Timing], ...]:
    found = [(column.field, column.timing) for column in columns]
    return (*found, (Field(IS_INIT, "bool", (1,), "info"), "step"))


def _renamed(columns: Sequence[ArrayColumn]) -> dict[str, str]:
    keys = {column.name: column.field.key for column in columns}
    return {name: key_name(key) for name, key in keys.items() if key == PIXELS or key[0] == "state"}


def _id_of(path: Path) -> str:
    """The path of a folder below the suite that it is in, as ids are; else its name."""
    parts = path.absolute().parts
    at = max((place for place, part in enumerate(parts) if part in _SUITES), default=len(parts) - 1)
    return "/".join(parts[at:]) if path.is_dir() else path.stem


def _files_at(path: Path) -> list[Path]:
    """The file itself; of a folder its npz files by name, or its HDF5 files, none where it has both."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith(".") and file.is_file()]
    npz = [file for file in files if file.suffix.lower() == NPZ_SUFFIX]
    shards = [file for file in files if file.suffix.lower() in HDF5_SUFFIXES]
    return [] if npz and shards else npz or shards


def _looks_right(file: Path) -> bool:
    if _begins_as_zip(file):
        return looks_like_vd4rl(array_names(file)) or first_name_of_cut(file) == "image"
    return looks_like_vd4rl(names_in(file))


def _begins_as_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"
