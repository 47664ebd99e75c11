"""imitation's npz files: all trajectories in long arrays, of which `indices` state where the actions are cut.

Observations of a trajectory have a row more than its actions.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.pickles import PickledArray, PickledList, PickleReader, Value
from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.manifest import Dropped
from ...core.ted.schema import Field, row_bytes, safe_part
from ..files.column_reader import EpisodeColumn, RowBlocks
from ..files.npz import NpzFile, array_names, first_name_of_cut
from .trajectories import ACTS, INFOS, OBS, REWS, TERMINAL, TIME_LIMIT, Trajectories, field_of, numbers_of

INDICES = "indices"
REQUIRED = (OBS, ACTS, INDICES, TERMINAL)
_MOST_BOUNDS = 256 << 20
_MOST_INFOS = 256 << 20
"""Bytes of a pickle of infos."""
_INFOS_AT_ONCE = 4096


def looks_like_npz(path: Path) -> bool:
    """Return whether a file is an npz with imitation's arrays, or begins as one that was cut; never raises."""
    names = set(array_names(path))
    return names >= set(REQUIRED) if names else first_name_of_cut(path) == OBS


class NpzTrajectories(Trajectories):
    """An open npz file; `trusted` allows its infos to be read, which are a pickle."""

    def __init__(self, path: Path, piece_bytes: int, *, trusted: bool) -> None:
        self.path = path
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                for name in REQUIRED:
                    if name not in self._file.names:
                        raise FormatError(f"{path} has no {name!r}; imitation's files have {', '.join(REQUIRED)}")
                self._cut()
                names = [name for name in (OBS, ACTS, REWS) if name in self._file.names]
                self.columns = [self._column(name, piece_bytes) for name in names]
            known = {*REQUIRED, REWS, INFOS}
            dropped = [
                Dropped(name, "imitation's files have no such array") for name in self._file.names if name not in known
            ]
            dropped += self._infos(trusted) if INFOS in self._file.names else []
            self.dropped = dropped
        except BaseException:
            self.close()
            raise

    def _cut(self) -> None:
        """Read where trajectories start and end."""
        for name in REQUIRED:
            if len(self._file.form(name)[1]) < 1:
                raise FormatError(f"{self.path}: {name!r} is a single value")
        terminal, indices = (self._file.whole(name, _MOST_BOUNDS) for name in (TERMINAL, INDICES))
        rows, steps, count = self._file.form(OBS)[1][0], self._file.form(ACTS)[1][0], len(terminal)
        if terminal.ndim != 1 or ((terminal != 0) & (terminal != 1)).any():
            raise FormatError(f"{self.path}: terminal has values other than 0 and 1")
        if not indices.size and indices.ndim == 1:
            indices = indices.astype(np.int64)  # of one trajectory, which numpy makes float64
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) != count - 1:
            raise FormatError(
                f"{self.path}: {count:,} values of terminal need {count - 1:,} whole numbers as indices, it has "
                f"{indices.dtype} {list(indices.shape)}"
            )
        bounds = [0, *indices.tolist(), steps]
        lengths = np.diff(bounds)
        if (lengths < 0).any() or bounds[-2] > steps:
            raise FormatError(f"{self.path}: indices do not ascend from 0 to the {steps:,} rows of acts")
        if rows != steps + count:
            raise FormatError(
                f"{self.path}: {count:,} trajectories of {steps:,} actions in all have {steps + count:,} observations, "
                f"obs has {rows:,} rows"
            )
        if REWS in self._file.names and self._file.form(REWS)[1][:1] != (steps,):
            raise FormatError(f"{self.path}: rews have shape {list(self._file.form(REWS)[1])}, and acts {steps:,} rows")
        self.lengths, self.terminal = lengths.tolist(), (terminal != 0).tolist()
        self._starts = np.array(bounds[:-1], np.int64)

    def _column(self, name: str, piece_bytes: int) -> EpisodeColumn:
        dtype, shape = self._file.form(name)
        field, timing = field_of(self.path, name, dtype, shape[1:])
        rows = max(1, piece_bytes // max(1, row_bytes([field])))
        blocks = RowBlocks(partial(self._file.read, name), shape[0], rows)
        starts = self._starts + np.arange(len(self._starts)) if name == OBS else self._starts
        return EpisodeColumn(field, timing, partial(_read, blocks, starts))

    def _infos(self, trusted: bool) -> list[Dropped]:
        if not self._file.is_pickled(INFOS):
            return [Dropped(INFOS, "it is no array of objects")]
        if not trusted:
            return [Dropped(INFOS, "it is a pickle, which --trust-pickle reads")]
        data = self._file.raw(INFOS, _MOST_INFOS)
        with PickleReader(f"{self.path}: infos", len(data)) as reader:
            found = reader.load(io.BytesIO(data), len(data))
            steps = int(sum(self.lengths))
            if not isinstance(found, PickledList) or len(found) != steps:
                raise CorruptDataError(f"{self.path}: infos are not one dictionary for each of {steps:,} steps")
            values, limits = _by_name(reader, found)
        if limits:
            stops = np.cumsum(self.lengths) - 1
            self.limits = [
                bool(length) and limits.get(int(stop), False) for length, stop in zip(self.lengths, stops, strict=True)
            ]
        return self._add_infos(values, steps)

    def _add_infos(self, values: dict[str, list[Any]], steps: int) -> list[Dropped]:
        dropped = [] if values else [Dropped(INFOS, "it is empty")]
        columns = list(self.columns)
        for name, rows in values.items():
            found = numbers_of(name, rows) if len(rows) == steps else f"it is in {len(rows):,} of {steps:,} steps"
            if isinstance(found, str):
                dropped.append(Dropped(f"{INFOS}.{name}", found))
                continue
            field = Field(("info", safe_part(name)), found.dtype.name, found.shape[1:], "info")
            columns.append(EpisodeColumn(field, "result", partial(_kept, found, self._starts)))
        self.columns = columns
        return dropped

    def files(self) -> list[Path]:
        return [self.path]

    def verify_read(self) -> None:
        self._file.verify_read()

    def close(self) -> None:
        self._file.close()


def _read(blocks: RowBlocks, starts: Array, number: int, start: int, stop: int) -> Array:
    first = int(starts[number])
    return blocks.read(first + start, first + stop)


def _kept(array: Array, starts: Array, number: int, start: int, stop: int) -> Array:
    first = int(starts[number])
    return array[first + start : first + stop]


def _by_name(reader: PickleReader, found: PickledList) -> tuple[dict[str, list[Any]], dict[int, bool]]:
    """Return the values of each name in the dictionaries of a list, and the time limits that are stated, by step.

    Old versions of gym state a time limit only in the step that reaches it: it is False in steps without the name. No
    limits are known where one has another value than a flag.
    """
    values: dict[str, list[Any]] = {}
    limits: dict[int, bool] = {}
    for start in range(0, len(found), _INFOS_AT_ONCE):
        infos = reader.items(found, start, min(start + _INFOS_AT_ONCE, len(found)))
        for step, info in enumerate(infos, start):
            for name, value in (info if isinstance(info, dict) else {}).items():
                values.setdefault(name, []).append(_plain(reader, value))
                if name == TIME_LIMIT and (limit := _flag(reader, value)) is not None:
                    limits[step] = limit
    if len(limits) < len(values.get(TIME_LIMIT, ())):
        return values, {}
    if limits:
        values[TIME_LIMIT] = [limits.get(step, False) for step in range(len(found))]
    return values, limits


def _flag(reader: PickleReader, value: Value) -> bool | None:
    """Return a flag, also one of NumPy; None for anything else."""
    found = np.asarray(_plain(reader, value))
    return bool(found.reshape(())) if found.dtype == bool and found.size == 1 else None


def _plain(reader: PickleReader, value: Value) -> Any:
    if isinstance(value, PickledArray):
        return reader.rows(value)
    return _plain_list(reader, value) if isinstance(value, PickledList) else value


def _plain_list(reader: PickleReader, value: PickledList) -> Sequence[Any]:
    return reader.items(value, 0, min(len(value), _INFOS_AT_ONCE))
