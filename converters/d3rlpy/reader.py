"""HDF5 files of d3rlpy's `ReplayBuffer`, read and exported: an array for each column of each episode.

    observations_N, actions_N, rewards_N, terminated_N    the arrays of episode N, and whether it is terminated
    observations_N_0, observations_N_1, …                 the arrays of a tuple of observations, in their order
    NAME_N                                                another column: info.NAME, which d3rlpy ignores
    columns, num_episodes, version                        the names of the columns, and the form of the file

There is no observation after the last step of an episode, so d3rlpy trains on all steps but the last one of an episode
that is not terminated. d3rlpy itself is never imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...core.encodings.hdf5_files import HeapValues, absurd_size, open_h5
from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import (
    ACTION,
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    dtype_name,
    field_named,
    safe_part,
)
from ..files.exports import leaves_of, only_leaf
from ..files.hdf5 import H5Sink, names_in, require_whole_h5
from ..files.readers import ColumnEpisode, ColumnReader, EpisodeColumn, reading

_COLUMNS, _COUNT, _VERSION = "columns", "num_episodes", "version"
_MARKS = {_COLUMNS, _COUNT, _VERSION}
_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATED = "observations", "actions", "rewards", "terminated"
_REQUIRED = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATED)
_KNOWN_VERSION = "2.1"
_PLACES: dict[str, tuple[Key, Role, Timing]] = {
    _OBSERVATIONS: (("observation",), "observation", "state"),
    _ACTIONS: (ACTION, "action", "step"),
    _REWARDS: (REWARD, "reward", "result"),
}
_MOST_COLUMNS = 1 << 20
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


class D3rlpyReader(ColumnReader):
    """Reads a file that d3rlpy 2 dumped.

    `observations` become `observation` (tuples `observation.0`, `observation.1`, …), `actions` become `action`,
    `rewards` become `next.reward`, and any other column with a row for each step becomes `info.NAME`. The last step of
    an episode is terminated if `terminated` is set, else truncated. Element types stay as stored.

    Raises FormatError for files of other versions and arrays that contradict each other, CorruptDataError for damage.
    """

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file is HDF5 with d3rlpy's `columns`, `num_episodes` and `version` at the root."""
        return path.is_file() and set(names_in(path)) >= _MARKS

    def on_open(self) -> None:
        """Open the file and check the form of every array."""
        require_whole_h5(self.path)
        with reading("the structure", self.path):
            self._file = h5py.File(open_h5(self.path))
        self._values = HeapValues(self._file.id)
        try:
            with reading("its arrays", self.path):
                self._look_over()
        except BaseException:
            self.on_close()
            raise

    def _look_over(self) -> None:
        self._seen: set[str] = set()
        version = _text(self._value(_VERSION))
        if version != _KNOWN_VERSION:
            raise FormatError(
                f"{self.path} has version {version[:20]!r} of d3rlpy's files, but only {_KNOWN_VERSION} can be read",
                hint="load it with d3rlpy, and dump it again with d3rlpy 2",
            )
        listed = self._value(_COLUMNS)
        names = [_text(name) for name in (listed if isinstance(listed, list) else np.atleast_1d(listed))]
        count = self._value(_COUNT)
        if np.ndim(count) or np.asarray(count).dtype.kind not in "iu" or not 0 <= int(count) <= len(self._file):
            raise FormatError(
                f"{self.path}: num_episodes is {count}, expected 0 to {len(self._file):,} for the arrays in the file"
            )
        for name in _REQUIRED:
            if name not in names:
                raise FormatError(f"{self.path} has no {name!r} among its columns ({', '.join(names)[:200]})")
        self.episodes = [self._episode(number) for number in range(int(count))]
        if not any(one.length for one in self.episodes):
            raise FormatError(f"{self.path} has no steps")
        self.columns: list[EpisodeColumn] = []
        self._dropped: list[Dropped] = []
        for name in dict.fromkeys(names):
            if name != _TERMINATED:
                self.columns += self._columns_of(name)

    def _episode(self, number: int) -> ColumnEpisode:
        rewards = self._array(f"{_REWARDS}_{number}")
        flag = self._value(f"{_TERMINATED}_{number}")
        if np.size(flag) != 1 or np.asarray(flag).dtype.kind not in "biuf" or np.ravel(flag)[0] not in (0, 1):
            raise FormatError(f"{self.path}: {_TERMINATED}_{number} is {str(flag)[:40]}, expected one flag")
        terminated = bool(np.ravel(flag)[0])
        return ColumnEpisode(len(rewards), terminated=terminated, truncated=not terminated)

    def _columns_of(self, name: str) -> Iterator[EpisodeColumn]:
        """Yield a column, or one for each part of a tuple; columns that d3rlpy does not need are dropped if unfit."""
        parts = [""] if f"{name}_0" in self._file else [f"_{part}" for part in range(self._parts(name))]
        try:
            if not parts:
                raise FormatError(f"{self.path} has no {name}_0, which its columns list")
            forms = [self._form(name, part) for part in parts]
        except FormatError as error:
            if name in _PLACES:
                raise
            self._dropped.append(Dropped(name, error.message.removeprefix(f"{self.path}: ")))
            return
        for part, (dtype, shape) in zip(parts, forms, strict=True):
            key, role, timing = _PLACES.get(name, (("info", safe_part(name)), "info", "step"))
            key = (*key, part[1:]) if part else key
            if key[0] == REWARD[0] and (part or int(np.prod(shape)) != 1):
                raise FormatError(f"{self.path}: rewards have rows of shape {list(shape)}, expected one number")
            field = Field(key, dtype, () if key == REWARD else shape, role)
            yield EpisodeColumn(field, timing, partial(self._read, name, part, field))

    def _parts(self, name: str) -> int:
        count = 0
        while f"{name}_0_{count}" in self._file and count < _MOST_COLUMNS:
            count += 1
        return count

    def _form(self, name: str, part: str) -> tuple[str, tuple[int, ...]]:
        """Return the element type and the shape of the rows of a column, which have to be the same in all episodes."""
        first: tuple[str, tuple[int, ...]] | None = None
        for number, one in enumerate(self.episodes):
            place = f"{name}_{number}{part}"
            array = self._array(place)
            if len(array) != one.length:
                raise FormatError(
                    f"{self.path}: {place} has {len(array):,} rows, but rewards_{number} has {one.length:,}"
                )
            try:
                form = dtype_name(array.dtype), tuple(array.shape[1:])
            except (SchemaError, TypeError, ValueError) as error:
                raise FormatError(f"{self.path}: {place} has elements that are not numbers ({array.dtype})") from error
            if one.length and first is not None and form != first:
                raise FormatError(
                    f"{self.path}: rows of {place} are {form[0]} {list(form[1])}, but {first[0]} {list(first[1])} in "
                    "the episodes before"
                )
            first = form if one.length and first is None else first
        assert first is not None
        return first

    def _array(self, name: str) -> Any:
        found = self._file.get(name)
        self._seen.add(name)
        if found is None:
            raise FormatError(f"{self.path} has no {name}, although num_episodes and columns include it")
        if not isinstance(found, h5py.Dataset) or not found.shape:
            raise FormatError(f"{self.path}: {name} is not an array with one row per step")
        if why := absurd_size(found.id):
            raise CorruptDataError(f"{self.path}: {name} {why}")
        return found

    def _value(self, name: str) -> Any:
        found = self._file.get(name)
        self._seen.add(name)
        if not isinstance(found, h5py.Dataset) or found.shape is None or found.size > _MOST_COLUMNS:
            raise FormatError(f"{self.path}: {name} is missing, or is not a single value")
        if h5py.check_string_dtype(found.dtype) is not None and found.dtype.kind == "O":
            texts = self._values.dataset(name)[()]
            return texts.tolist() if found.shape else texts
        if found.dtype.hasobject:
            raise FormatError(f"{self.path}: {name} is {found.dtype}, which is neither numbers nor text")
        return found[()]

    def _read(self, name: str, part: str, field: Field, number: int, start: int, stop: int) -> Array:
        place = f"{name}_{number}{part}"
        with reading(place, self.path):
            dataset = self._file[place]
            rows = np.empty((stop - start, *dataset.shape[1:]), field.numpy)
            if rows.size:
                dataset.read_direct(rows, np.s_[start:stop])
        return rows.reshape(stop - start, *field.shape)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the arrays were checked when the file was opened."""
        progress(len(self.episodes))
        notes = ["episodes that are not terminated are truncated: d3rlpy has no other flag"]
        return self.facts_of("d3rlpy", self.path.stem, notes, dropped=[*self._dropped, *self._unknown()])

    def _unknown(self) -> Iterator[Dropped]:
        """Yield the members of the file that belong to no column or episode."""
        for name in map(_text, self._file):
            if name not in self._seen and name not in _MARKS:
                yield Dropped(name, "it belongs to no column or episode that the file lists")

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]

    def on_close(self) -> None:
        """Close the file."""
        self._values.close()
        self._file.close()


class D3rlpyExporter(H5Sink):
    """Writes a file for `ReplayBuffer.load(file, InfiniteBuffer())` of d3rlpy 2; memory is bounded by an episode."""

    format = "d3rlpy"

    def prepare(self) -> None:
        """Choose the name of every column; raise SchemaError for several arrays of actions."""
        self.refuse({"bfloat16"}, "HDF5")
        fields = self.chosen.fields
        observations = leaves_of(fields, "observation")
        self._columns = {_OBSERVATIONS: observations, _ACTIONS: [only_leaf(fields, "action", "d3rlpy")]}
        self._columns[_REWARDS] = [field_named(fields, NEXT_REWARD)]
        for field in fields:
            name = field.key[-1]
            if field.key[:-1] == ("info",) and _NAME.fullmatch(name) and name not in _REQUIRED:
                self._columns[name] = [field]
        placed = [field.key for group in self._columns.values() for field in group]
        after = [(NEXT, *field.key) for field in observations] if not self.chosen.table.explicit_next.any() else []
        self.place([*placed, NEXT_TERMINATED, NEXT_TRUNCATED], after)
        self.note_unnumbered()
        if len(observations) > 1:
            listed = ", ".join(field.name for field in observations)
            self.notes.append(f"observations are a tuple in d3rlpy, in this order: {listed}")
        self.note_both()
        if inside := self.flags_inside():
            self.notes.append(f"flags in {inside:,} steps inside episodes are left out: d3rlpy has no place for them")
        table = self.chosen.table
        if (table.final == Final.OBSERVED).any():
            self.notes.append(
                "observations after the last steps of episodes are not exported: d3rlpy has no place for them, and "
                f"trains on all steps but the last of the {int((~table.terminated).sum()):,} episodes that are not "
                "terminated"
            )

    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write episode after episode."""
        h5.create_dataset(_COLUMNS, data=[*self._columns, _TERMINATED], dtype=h5py.string_dtype())
        h5.create_dataset(_COUNT, data=len(self.chosen.rows))
        for position, terminated in enumerate(self.chosen.table.terminated.tolist()):
            for name, group in self._columns.items():
                of_tuple = len(group) > 1 or group[0].key == ("observation", "0")
                for number, field in enumerate(group):
                    rows, part = self.read(field.key, position), f"_{number}" if of_tuple else ""
                    h5.create_dataset(f"{name}_{position}{part}", data=_with_dimension(rows, field, name))
                    yield rows.nbytes
            h5.create_dataset(f"{_TERMINATED}_{position}", data=terminated)
            yield 2 * int(self.chosen.table.length[position])
        h5.create_dataset(_VERSION, data=_KNOWN_VERSION)


def _with_dimension(rows: Array, field: Field, name: str) -> object:
    """Give rows of single numbers a trailing dimension, as d3rlpy expects."""
    return rows.reshape(len(rows), 1) if name in _REQUIRED and not field.shape else rows


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
