"""The arrays of a replay buffer of Stable-Baselines3: a ring of rows, with a column for each environment.

`pos` is the row that would be written next, and `full` whether the ring has come round: then that row is the oldest. A
buffer that saves memory has no `next_observations`: the next row holds them, that at `pos` those of the newest row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.manifest import Dropped
from ...core.format.row_blocks import BLOCK_BYTES, RowBlocks, blocks
from ...core.format.unreadable import no_match
from ...core.ted.schema import dtype_name
from ..files.npz import NpzFile, array_names

OBSERVATIONS, NEXT_OBSERVATIONS, ACTIONS, REWARDS = "observations", "next_observations", "actions", "rewards"
DONES, TIMEOUTS, POSITION, FULL = "dones", "timeouts", "pos", "full"
REQUIRED = (OBSERVATIONS, ACTIONS, REWARDS, DONES)
_ROWS = (*REQUIRED, NEXT_OBSERVATIONS, TIMEOUTS)


def looks_like_buffer(path: Path) -> bool:
    """Return whether a file is an npz with the arrays of a buffer; never raises."""
    names = set(array_names(path))
    if not names >= set(REQUIRED) or "terminals" in names:
        return False
    try:
        with NpzFile(path) as file, file.damage_first():
            shapes = [file.form(name)[1] for name in REQUIRED]
    except CorruptDataError:  # of one of its arrays, which is named once the buffer is opened
        return True
    except (RbtoolError, OSError) as error:
        return no_match(error)
    return len(shapes[-1]) == 2 and all(shape[:2] == shapes[-1] for shape in shapes)


class Buffer(Closing):
    """An open buffer. Rows are counted from the oldest; `rows` of them were written, for each of `environments`.

    `dones` and `timeouts` are bool `[rows, environments]`, `timeouts` None where none is set; `has_timeouts` states
    whether they are stored. `has_next` states whether next observations are stored apart, `has_newest` whether those of
    the newest row are known otherwise. `unwritten` counts the rows at the end that are left out: where `pos` is not
    stored, those of zeros in every array.
    """

    def __init__(self, path: Path, piece_bytes: int) -> None:
        self.path = path
        self._file = NpzFile(path)
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
        shape = self._file.form(DONES)[1]
        for name in _ROWS:
            if name not in self._file.names:
                continue
            dtype, found = self._file.form(name)
            if len(shape) != 2 or found[:2] != shape:
                raise FormatError(
                    f"{self.path}: {name} have shape {list(found)}, and dones {list(shape)}: rows and environments "
                    "have to come first"
                )
            try:
                dtype_name(dtype)
            except (SchemaError, TypeError) as error:
                raise FormatError(f"{self.path}: {name} are {dtype}, which are no numbers") from error
        if len(self._file.form(REWARDS)[1]) != 2:
            raise FormatError(
                f"{self.path}: rewards have shape {list(self._file.form(REWARDS)[1])}, expected one number"
            )
        self.has_next = NEXT_OBSERVATIONS in self._file.names
        if self.has_next and self.form(NEXT_OBSERVATIONS) != self.form(OBSERVATIONS):
            raise FormatError(f"{self.path}: observations and next_observations have different forms")
        self._size, self.environments = shape

    def _order(self) -> None:
        """Find the oldest row, and how many there are."""
        position, full = self._state(POSITION), self._state(FULL)
        self.has_state, self.is_full, self.unwritten = position is not None, bool(full), 0
        if position is None:
            self._first, self.rows, self.has_newest = 0, self._size, False
            self.unwritten = self._zero_tail()
            self.rows -= self.unwritten
            return
        full = full or 0
        if not 0 <= position <= self._size or full not in (0, 1):
            raise FormatError(f"{self.path}: pos is {position} and full {full}, in a buffer of {self._size:,} rows")
        position %= self._size if full and self._size else self._size + 1
        self._first, self.rows = (position, self._size) if full else (0, position)
        self.has_newest = not self.has_next and (bool(full) or position < self._size)
        if full and not self.has_next:  # the oldest row has been overwritten with the newest observation
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
        """Element type and shape of a row of one environment."""
        dtype, shape = self._file.form(name)
        return dtype, shape[2:]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)`, counted from the oldest; one more row is the newest observation."""
        begin, end = self._first + start, self._first + stop
        parts = []
        for turn in range(begin // max(1, self._size), -(-end // max(1, self._size))):
            offset = turn * self._size
            parts.append(self._file.read(name, max(begin - offset, 0), min(end - offset, self._size)))
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def column(self, name: str) -> RowBlocks:
        """Rows of a column, of which a block is kept."""
        dtype, shape = self._file.form(name)
        row = max(1, dtype.itemsize * int(np.prod(shape[1:])))
        total = self.rows + (self.has_newest and name == OBSERVATIONS)
        return RowBlocks(lambda start, stop: self.read(name, start, stop), total, max(1, self._piece_bytes // row))

    def dropped(self) -> list[Dropped]:
        """Name the arrays that are none of a buffer's."""
        known = {*_ROWS, POSITION, FULL}
        return [Dropped(name, "a replay buffer has no such array") for name in self._file.names if name not in known]

    def _zero_tail(self) -> int:
        """Count the rows at the end in which everything is 0, as in rows that were never written."""
        names = [name for name in _ROWS if name in self._file.names]
        found, size = 0, max(1, min(self.rows, 4096))
        for stop in range(self.rows, 0, -size):
            start = max(0, stop - size)
            used = np.zeros(stop - start, bool)
            for name in names:
                values = self.read(name, start, stop)
                used |= (values.reshape(len(values), -1) != 0).any(axis=1)
            if used.any():
                return found + int(np.flatnonzero(used[::-1])[0])
            found += stop - start
        return found

    def verify_read(self) -> None:
        """Raise CorruptDataError if an array that was read has not the checksum that is stated of it."""
        self._file.verify_read()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
