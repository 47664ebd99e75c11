"""Reads replay buffers of Stable-Baselines3, pickled or saved as npz. stable_baselines3 is never imported.

A buffer is a ring of rows with a column for each environment. `pos` is the row that would be written next; if `full` is
set, the ring has wrapped around, and that row is the oldest. With `optimize_memory_usage`, a buffer has no
`next_observations`: they are the observations of the next row, and for the newest row the observations at
`pos`:

    slot          0   1   2   3   4        full, pos = 2: row 6 in slot 1 is the newest, row 3 in slot 3 the oldest;
    observations  s5  s6  s7  s3  s4       s7, the next observation of row 6, has overwritten row 2

Observations of a Dict space are an array for each name: `observations.NAME`, and `next_observations.NAME`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, SourceFacts
from ...core.format.converter import require_trust
from ...core.format.files import no_match, open_regular
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.schema import ACTION, REWARD, Field, Key, dtype_name, safe_part
from ..files.numpy_files import NpzFile, array_names
from ..files.pickles import PickledArray, PickledList, PickledObject, PickleReader, Value, is_pickle_of
from ..files.readers import (
    BLOCK_BYTES,
    ColumnEpisode,
    ColumnReader,
    EndMeaning,
    EpisodeColumn,
    RowBlocks,
    blocks,
    meaning_of_ends,
    refuse_ends,
)

OBSERVATIONS, NEXT_OBSERVATIONS, ACTIONS, REWARDS = "observations", "next_observations", "actions", "rewards"
DONES, TIMEOUTS, POSITION, FULL = "dones", "timeouts", "pos", "full"
EPISODE_START, EPISODE_LENGTH = "ep_start", "ep_length"
"""Arrays of a buffer of hindsight experience replay (HER): the start and the length of the episode of each row."""
_SINGLE = (ACTIONS, REWARDS, DONES)
_OPTIONAL = (TIMEOUTS, EPISODE_START, EPISODE_LENGTH)
_CLASS = rb"stable_baselines3\.(common\.buffers|her\.)|rbtool\.converters\.adapters\.sb3"


def looks_like_buffer(path: Path) -> bool:
    """Return whether a file is an npz with the arrays of a buffer; never raises."""
    names = set(array_names(path))
    states = [name for name in names if _part_of(name, OBSERVATIONS) is not None]
    if not names >= set(_SINGLE) or not states or "terminals" in names:
        return False
    try:
        with NpzFile(path) as file, file.damage_first():
            shapes = [file.form(name)[1] for name in (*states, *_SINGLE)]
    except CorruptDataError:  # opening the buffer raises it again and names the array
        return True
    except (RbtoolError, OSError) as error:
        return no_match(error)
    return len(shapes[-1]) == 2 and all(shape[:2] == shapes[-1] for shape in shapes)


def _part_of(name: str, stem: str) -> str | None:
    """Return the part of a Dict space in an array's name, "" for any other space; None if the name has another stem."""
    if name == stem:
        return ""
    return name.removeprefix(f"{stem}.") if name.startswith(f"{stem}.") else None


class _Arrays(Protocol):
    """The interface of named arrays, which an `NpzFile` and a pickle implement."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]: ...

    def read(self, name: str, start: int, stop: int) -> Array: ...

    def whole(self, name: str, most_bytes: int) -> Array: ...

    def damage_first(self) -> AbstractContextManager[None]: ...

    def verify_read(self) -> None: ...

    def close(self) -> None: ...


class _PickledArrays(Closing):
    """The arrays of a pickled buffer, with the names that they have in npz files.

    The process that unpickles the buffer keeps the arrays in its memory. `dropped` names attributes with a value for
    each step that are not arrays. Raises FormatError for the pickle of something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays: dict[str, PickledArray | Array] = {}
        self.dropped: list[Dropped] = []
        size = path.stat().st_size
        self._reader = PickleReader(str(path), size)
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                self._take(self._reader.load(file, size, objects=True))
        except BaseException:
            self.close()
            raise
        self.names = tuple(self._arrays)

    def _take(self, found: Value) -> None:
        if not isinstance(found, PickledObject):
            raise FormatError(f"{self.path} is a pickle of something else than a replay buffer")
        kind, attributes = found.name.rpartition(".")[2], found.attributes
        if isinstance(attributes.get("_buffer"), dict):
            raise FormatError(
                f"{self.path} is a {kind} of Stable-Baselines3 1.x, which stores episodes apart and cannot be read",
                hint="load it with that version, and save its arrays as npz, as docs/reference/sb3.md describes",
            )
        for name in (*_SINGLE, *_OPTIONAL, OBSERVATIONS, NEXT_OBSERVATIONS):
            value = attributes.get(name)
            parts = value if isinstance(value, dict) else {"": value}
            for part, rows in parts.items():
                if isinstance(rows, PickledArray):
                    self._arrays[f"{name}.{part}" if part else name] = rows
                elif isinstance(rows, dict):
                    raise FormatError(f"{self.path}: {name} have a dictionary in {part!r}, expected arrays")
        for name in (POSITION, FULL):
            value = attributes.get(name)
            if isinstance(value, int):
                self._arrays[name] = np.array(value)
        if missing := [name for name in _SINGLE if name not in self._arrays]:
            raise FormatError(
                f"{self.path} is a {kind}, which is not a replay buffer of Stable-Baselines3: it has no {missing[0]}"
            )
        if attributes.get("copy_info_dict") and isinstance(attributes.get("infos"), PickledList):
            self.dropped.append(Dropped("infos", "they are dictionaries of Python objects"))

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        found = self._arrays[name]
        return found.dtype.newbyteorder("="), found.shape

    def read(self, name: str, start: int, stop: int) -> Array:
        found = self._arrays[name]
        return self._reader.rows(found, start, stop) if isinstance(found, PickledArray) else found[start:stop]

    def whole(self, name: str, most_bytes: int) -> Array:
        found = self._arrays[name]
        return self._reader.rows(found) if isinstance(found, PickledArray) else found

    def damage_first(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def verify_read(self) -> None:
        pass

    def close(self) -> None:
        self._reader.close()


class Buffer(Closing):
    """An open buffer, whose rows are numbered from the oldest one.

    Attributes:
        rows: the number of rows that were written.
        environments: the number of environments.
        observations: the name of the array for each part of a Dict space; the part is "" for any other space.
        next_observations: the same for next observations; {} if they are not stored.
        dones: bool `[rows, environments]`.
        timeouts: bool `[rows, environments]`; None if none is set.
        has_timeouts: whether timeouts are stored.
        has_next: whether next observations are stored in arrays of their own.
        has_newest: whether the observation after the newest row is stored in the row after it.
        has_state: whether `pos` is stored.
        is_full: whether the ring was full.
        unwritten: without `pos`, the number of rows at the end with zeros in every array, which are left out.
    """

    def __init__(self, path: Path, piece_bytes: int, *, trusted: bool) -> None:
        self.path = path
        if pickled := is_pickle_of(path, _CLASS):
            require_trust(
                path, trusted, "it is the pickle of a replay buffer of Stable-Baselines3, and can run anything"
            )
        self._file: _Arrays = _PickledArrays(path) if pickled else NpzFile(path)
        self._piece_bytes = piece_bytes
        try:
            with self._file.damage_first():
                self._require_shapes()
                self._order()
                self.dones = self._flags(DONES)
                found = self._flags(TIMEOUTS) if TIMEOUTS in self._file.names else None
            self.has_timeouts = found is not None
            self.timeouts = found if found is not None and found.any() else None
        except BaseException:
            self.close()
            raise

    def _require_shapes(self) -> None:
        self.observations, following = (
            {part: name for name in self._file.names if (part := _part_of(name, stem)) is not None}
            for stem in (OBSERVATIONS, NEXT_OBSERVATIONS)
        )
        if not self.observations or ("" in self.observations and len(self.observations) > 1):
            named = ", ".join(self.observations.values()) or "none"
            raise FormatError(f"{self.path} has {named} as observations, expected observations or observations.NAME")
        self._rows = [
            *self.observations.values(), *following.values(), *_SINGLE,
            *(name for name in _OPTIONAL if name in self._file.names),
        ]  # fmt: skip
        shape = self._file.form(DONES)[1]
        for name in self._rows:
            dtype, found = self._file.form(name)
            if len(shape) != 2 or found[:2] != shape:
                raise FormatError(
                    f"{self.path}: {name} have shape {list(found)}, and dones {list(shape)}, expected the same two "
                    "leading dimensions: rows and environments"
                )
            try:
                dtype_name(dtype)
            except (SchemaError, TypeError) as error:
                raise FormatError(f"{self.path}: {name} are {dtype}, which are not numbers") from error
        if len(self._file.form(REWARDS)[1]) != 2:
            raise FormatError(
                f"{self.path}: rewards have shape {list(self._file.form(REWARDS)[1])}, expected one number"
            )
        self.next_observations = following
        self.has_next = bool(following)
        if self.has_next and (
            following.keys() != self.observations.keys()
            or any(self.form(following[part]) != self.form(name) for part, name in self.observations.items())
        ):
            raise FormatError(f"{self.path}: observations and next_observations have different forms")
        self._size, self.environments = shape

    def _order(self) -> None:
        """Determine the oldest row and the number of rows."""
        position, full = self._state(POSITION), self._state(FULL)
        self.has_state, self.is_full, self.unwritten = position is not None, bool(full), 0
        if position is None:
            self._first, self.rows, self.has_newest = 0, self._size, False
            self.unwritten = self._zero_tail()
            self.rows -= self.unwritten
            return
        full = full or 0
        if not 0 <= position <= self._size or full not in (0, 1):
            raise FormatError(f"{self.path}: pos is {position} and full {full}, but the buffer has {self._size:,} rows")
        position %= self._size if full and self._size else self._size + 1
        self._first, self.rows = (position, self._size) if full else (0, position)
        self.has_newest = not self.has_next and (bool(full) or position < self._size)
        if full and not self.has_next:  # the newest observation has overwritten the oldest row's
            self._first, self.rows = (position + 1) % self._size, self._size - 1

    def _state(self, name: str) -> int | None:
        if name not in self._file.names:
            return None
        value = self._file.whole(name, 64)
        if value.size != 1 or value.dtype.kind not in "biu":
            raise FormatError(f"{self.path}: {name} is {value.dtype} {list(value.shape)}, expected one number")
        return int(value.reshape(())[()])

    def _flags(self, name: str) -> Array:
        found = np.zeros((self.rows, self.environments), bool)
        for start, stop in blocks(self.rows, max(1, BLOCK_BYTES // max(1, 8 * self.environments))):
            values = self.read(name, start, stop)
            if ((values != 0) & (values != 1)).any():
                raise FormatError(f"{self.path}: {name} have values other than 0 and 1")
            found[start:stop] = values != 0
        return found

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the element type and the shape of a row of one environment."""
        dtype, shape = self._file.form(name)
        return dtype, shape[2:]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)`; the row after the last one has the newest observation, if `has_newest`."""
        begin, end = self._first + start, self._first + stop
        parts = []
        for turn in range(begin // max(1, self._size), -(-end // max(1, self._size))):
            offset = turn * self._size
            parts.append(self._file.read(name, max(begin - offset, 0), min(end - offset, self._size)))
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def column(self, name: str) -> RowBlocks:
        """Return the rows of a column, with a cache for one block."""
        dtype, shape = self._file.form(name)
        row = max(1, dtype.itemsize * int(np.prod(shape[1:])))
        total = self.rows + (self.has_newest and name in self.observations.values())
        return RowBlocks(lambda start, stop: self.read(name, start, stop), total, max(1, self._piece_bytes // row))

    def dropped(self) -> list[Dropped]:
        """Return the arrays that do not belong to a buffer."""
        known = {*self._rows, POSITION, FULL}
        found = [Dropped(name, "a replay buffer has no such array") for name in self._file.names if name not in known]
        return [*found, *(self._file.dropped if isinstance(self._file, _PickledArrays) else [])]

    def place_in_ring(self, row: int) -> int:
        """Return the slot of the ring that holds a row."""
        return (self._first + row) % self._size

    def stated_episode(self, row: int, environment: int) -> tuple[int, int] | None:
        """Return the slot at which the episode of a row starts, and its length, if the buffer stores them; else None.

        The length is 0 while the episode is unfinished, and after a part of it was overwritten.
        """
        if not {EPISODE_START, EPISODE_LENGTH} <= set(self._rows):
            return None
        start, length = (int(self.read(name, row, row + 1)[0, environment]) for name in (EPISODE_START, EPISODE_LENGTH))
        return start, length

    def _zero_tail(self) -> int:
        """Count the rows at the end in which all arrays are 0, as in rows that were never written."""
        found, size = 0, max(1, min(self.rows, 4096))
        for stop in range(self.rows, 0, -size):
            start = max(0, stop - size)
            used = np.zeros(stop - start, bool)
            for name in self._rows:
                values = self.read(name, start, stop)
                used |= (values.reshape(len(values), -1) != 0).any(axis=1)
            if used.any():
                return found + int(np.flatnonzero(used[::-1])[0])
            found += stop - start
        return found

    def verify_read(self) -> None:
        """Raise CorruptDataError if the checksum of an array that was read differs from the one in the file."""
        self._file.verify_read()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_OBSERVATION: Key = ("observation",)


class Sb3Reader(ColumnReader):
    """Reads the pickle of a `ReplayBuffer`, `DictReplayBuffer` or `HerReplayBuffer`, or an npz file with its arrays.

    Arrays are `[rows, environments, …]`. The rows of an environment are a stream of episodes; the episodes of the
    first environment come first. `pos` and `full`, if they are stored, determine which rows were written, and which is
    the oldest. `dones` end episodes; a step with `timeouts` is truncated, any other one is terminated. `observations`
    become `observation`, and `next_observations` the observation under `next`, also where it differs from the following
    row; parts of a Dict space are nested. HER stores real transitions, and relabels them only when a batch is drawn.

    Options: `ends` states what `dones` mean if no `timeouts` are set: `terminated` (as in Stable-Baselines3, the
    default) or `truncated`. `trust_pickle` allows reading a pickle.

    Raises FormatError for arrays that contradict each other and for the pickle of something else, UsageError for a
    pickle that is not trusted.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file is npz with a buffer's arrays, or begins like the pickle of a buffer."""
        try:
            return path.is_file() and (looks_like_buffer(path) or is_pickle_of(path, _CLASS))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the file and find the episodes."""
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
        why = f"{which}, so dones may also be time limits; Stable-Baselines3 treats all of them as terminations"
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
        """Return the facts; the episodes were found when the file was opened."""
        progress(len(self.episodes))
        buffer = self._buffer
        notes = [self._meaning.note] if self._meaning.note else []
        if buffer.unwritten:
            notes.append(
                f"pos is not stored: the first row is taken as the oldest, and the last {buffer.unwritten:,} rows, "
                "which are 0 in all arrays, are left out as never written"
            )
        elif not buffer.has_state:
            notes.append("pos is not stored: the first row is taken as the oldest, and all rows as written")
        if buffer.is_full:
            notes.append("the buffer was full: the first episode of each environment may lack its beginning")
        notes += self._notes_on_stated_episodes()
        return self.facts_of("sb3", self.path.stem, notes, dropped=buffer.dropped())

    def _notes_on_stated_episodes(self) -> Iterator[str]:
        """Compare complete episodes with the starts and lengths that a buffer of HER stores."""
        wrong = 0
        for one, (environment, start) in zip(self.episodes, self._places, strict=True):
            stated = self._buffer.stated_episode(start, environment) if one.terminated or one.truncated else None
            overwritten = stated is not None and start == 0 and self._buffer.is_full and stated[1] == 0
            if stated is not None and not overwritten:
                wrong += stated != (self._buffer.place_in_ring(start), one.length)
        if wrong:
            yield f"ep_start and ep_length contradict dones in {counted(wrong, 'episode')}: dones are used"

    def files(self) -> list[Path]:
        """Return the one file."""
        return [self.path]

    def verify_read(self) -> None:
        """Compare the arrays that were read with their checksums."""
        self._buffer.verify_read()

    def on_close(self) -> None:
        """Close the file."""
        self._buffer.close()


def _rows(column: RowBlocks, places: Sequence[tuple[int, int]], number: int, start: int, stop: int) -> Array:
    environment, first = places[number]
    return np.ascontiguousarray(column.read(first + start, first + stop)[:, environment])
