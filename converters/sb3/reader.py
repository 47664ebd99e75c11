"""Reads replay buffers of Stable-Baselines3, pickled or saved as npz. Never imports stable_baselines3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.read_errors import no_match
from ...core.progress import counted
from ...core.ted.schema import ACTION, REWARD, Field, Key, dtype_name, safe_part
from ..files.column_reader import ColumnEpisode, ColumnReader, EpisodeColumn, RowBlocks
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends
from .buffer import ACTIONS, REWARDS, Buffer, is_pickled, looks_like_buffer

_OBSERVATION: Key = ("observation",)


class Sb3Reader(ColumnReader):
    """The pickle of a `ReplayBuffer`, `DictReplayBuffer` or `HerReplayBuffer`, or an npz file with its arrays.

    Arrays are `[rows, environments, …]`.

    The rows of an environment are a stream of episodes; those of the first environment come first. `pos` and `full`, if
    they are there, state which rows were written, and which is the oldest. `dones` end episodes: with `timeouts`, those
    are truncated and the others terminated. `observations` become `observation`, `next_observations` what is under
    `next`, whether it follows or not; parts of a Dict space are nested there. HER stores real transitions: what it
    relabels, it makes when a batch is drawn.

    Options: `ends` states what `dones` mean where no `timeouts` are set, `terminated` (as in Stable-Baselines3, the
    default) or `truncated`. `trust_pickle` allows a pickle to be read.

    Raises FormatError for arrays that contradict each other and for the pickle of something else, UsageError for a
    pickle that is not trusted.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is npz with a buffer's arrays, or begins as the pickle of a buffer."""
        try:
            return path.is_file() and (looks_like_buffer(path) or is_pickled(path))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the file and read where episodes end."""
        self._buffer = Buffer(self.path, self.piece_bytes, trusted=bool(self.options.get("trust_pickle")))
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

        def state(part: str, name: str) -> EpisodeColumn:
            key = (*_OBSERVATION, safe_part(part)) if part else _OBSERVATION
            after = read(buffer.next_observations[part]) if buffer.has_next else None
            return EpisodeColumn(field(name, key, "observation"), "state", read(name), after)

        return [
            *(state(part, name) for part, name in sorted(buffer.observations.items())),
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
        notes += self._notes_on_stated_episodes()
        return self.facts_of("sb3", self.path.stem, notes, dropped=buffer.dropped())

    def _notes_on_stated_episodes(self) -> Iterator[str]:
        """Compare complete episodes with what a buffer of HER states of them."""
        wrong = 0
        for one, (environment, start) in zip(self.episodes, self._places, strict=True):
            stated = self._buffer.stated_episode(start, environment) if one.terminated or one.truncated else None
            overwritten = stated is not None and start == 0 and self._buffer.is_full and stated[1] == 0
            if stated is not None and not overwritten:
                wrong += stated != (self._buffer.place_in_ring(start), one.length)
        if wrong:
            yield f"ep_start and ep_length state {counted(wrong, 'episode')} otherwise than dones, which are taken"

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
