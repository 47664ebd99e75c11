"""Reads replay buffers of Stable-Baselines3, saved as npz. Never imports stable_baselines3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError
from ...core.format.column_reader import ColumnEpisode, ColumnReader, EpisodeColumn
from ...core.format.contracts import Array, SourceFacts
from ...core.format.row_blocks import RowBlocks
from ...core.format.single_flag import EndMeaning, meaning_of_ends, refuse_ends
from ...core.format.unreadable import no_match
from ...core.ted.schema import ACTION, REWARD, Field, dtype_name
from .buffer import ACTIONS, NEXT_OBSERVATIONS, OBSERVATIONS, REWARDS, Buffer, looks_like_buffer

_PICKLED = b"stable_baselines3.common.buffers"
_HEAD = 4096
_SAVE = "numpy.savez(FILE, **{name: getattr(buffer, name) for name in ('observations', 'next_observations', 'actions', "
_SAVE += "'rewards', 'dones', 'timeouts', 'pos', 'full')})"


class Sb3Reader(ColumnReader):
    """An npz file with the arrays of a `ReplayBuffer`, `[rows, environments, …]`.

    The rows of an environment are a stream of episodes; those of the first environment come first. `pos` and `full`, if
    they are there, state which rows were written, and which is the oldest. `dones` end episodes: with `timeouts`, those
    are truncated and the others terminated. `observations` become `observation`, `next_observations` what is under
    `next`, whether it follows or not.

    Options: `ends` states what `dones` mean where no `timeouts` are set, `terminated` (as in Stable-Baselines3, the
    default) or `truncated`.

    Raises FormatError for arrays that contradict each other, and for the pickle of a buffer: it is more than data.
    """

    option_names = frozenset({"ends"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is npz with a buffer's arrays, or the pickle of a buffer, which is refused."""
        try:
            return path.is_file() and (looks_like_buffer(path) or _is_pickled(path))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the file and read where episodes end."""
        if _is_pickled(self.path):
            raise FormatError(
                f"{self.path} is the pickle of a replay buffer of Stable-Baselines3, which is more than data",
                hint=f"load it with Stable-Baselines3, and save its arrays: {_SAVE}",
            )
        self._buffer = Buffer(self.path, self.piece_bytes)
        try:
            self._meaning = self._meaning_of_dones()
            self.episodes, self._places = self._streams()
        except BaseException:
            self._buffer.close()
            raise
        if not self.episodes:
            self._buffer.close()
            raise FormatError(f"{self.path} has no rows")
        self.columns = self._lay_out()

    def _meaning_of_dones(self) -> EndMeaning:
        if self._buffer.timeouts is not None:
            refuse_ends(self.path, self.options, "has timeouts, which state what ends episodes")
            return EndMeaning(terminated=True)
        which = "no timeouts are set" if self._buffer.has_timeouts else "there are no timeouts"
        why = f"{which}, so that dones may be time limits, too; Stable-Baselines3 bootstraps from none"
        return meaning_of_ends(self.options, "terminated", why)

    def _streams(self) -> tuple[list[ColumnEpisode], list[tuple[int, int]]]:
        """Return the episodes, with the environment and the first row of each."""
        buffer = self._buffer
        none = np.zeros_like(buffer.dones)
        timeouts = none if buffer.timeouts is None else buffer.timeouts
        dones = buffer.dones | timeouts
        truncated = timeouts if buffer.timeouts is not None or self._meaning.terminated else dones
        terminated = dones & ~truncated
        episodes, places = list[ColumnEpisode](), list[tuple[int, int]]()
        for environment in range(buffer.environments):
            stops = (np.flatnonzero(dones[:, environment]) + 1).tolist()
            if buffer.rows and (not stops or stops[-1] != buffer.rows):
                stops.append(buffer.rows)
            for start, stop in zip([0, *stops[:-1]], stops, strict=True):
                flags = bool(terminated[stop - 1, environment]), bool(truncated[stop - 1, environment])
                tail = buffer.has_newest and stop == buffer.rows
                text = {"environment": str(environment)} if buffer.environments > 1 else None
                episodes.append(ColumnEpisode(stop - start, *flags, observed=tail, text=text))
                places.append((environment, start))
        return episodes, places

    def _lay_out(self) -> list[EpisodeColumn]:
        buffer = self._buffer

        def read(name: str) -> Callable[[int, int, int], Array]:
            return partial(_rows, buffer.column(name), self._places)

        def field(name: str, key: tuple[str, ...], role: str) -> Field:
            dtype, shape = buffer.form(name)
            return Field(key, dtype_name(dtype), shape, role)  # type: ignore[arg-type]

        after = read(NEXT_OBSERVATIONS) if buffer.has_next else None
        return [
            EpisodeColumn(field(OBSERVATIONS, ("observation",), "observation"), "state", read(OBSERVATIONS), after),
            EpisodeColumn(field(ACTIONS, ACTION, "action"), "step", read(ACTIONS)),
            EpisodeColumn(field(REWARDS, REWARD, "reward"), "result", read(REWARDS)),
        ]

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """State the facts; opening read where episodes end."""
        progress(len(self.episodes))
        buffer = self._buffer
        notes = [self._meaning.note] if self._meaning.note else []
        if buffer.unwritten:
            notes.append(
                f"pos is not stored: the first row is taken as the oldest, and the last {buffer.unwritten:,} rows, "
                "which are 0 in all arrays, as never written: they are left out"
            )
        elif not buffer.has_state:
            notes.append("pos is not stored: the first row is taken as the oldest, and all rows as written")
        if buffer.is_full:
            notes.append("the buffer was full: the first episode of each environment may lack its start")
        return self.facts_of("sb3", self.path.stem, notes, dropped=buffer.dropped())

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]

    def verify_read(self) -> None:
        """Verify the checksums of the arrays that were read."""
        self._buffer.verify_read()

    def on_close(self) -> None:
        """Close the file."""
        self._buffer.close()


def _rows(column: RowBlocks, places: Sequence[tuple[int, int]], number: int, start: int, stop: int) -> Array:
    environment, first = places[number]
    return np.ascontiguousarray(column.read(first + start, first + stop)[:, environment])


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head[:1] == b"\x80" and _PICKLED in head
