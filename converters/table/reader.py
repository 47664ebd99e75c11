"""Reads tables whose columns a user maps: HDF5, npz, CSV, Parquet, and folders of npy, CSV or Parquet files.

For a table without a map, it proposes one, from common names of columns. h5py and pyarrow are imported only when a
file needs them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ...core.encodings.h5 import begins_as_h5, data_start
from ...core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array, Piece, SourceFacts, require_truths
from ...core.format.files import no_match, open_regular
from ...core.format.locate import ColumnView, Overview
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, Key, encode_text, length_key
from ..files.numpy_files import NpyFile, NpzFile
from ..files.readers import FileReader
from .columns import TEXT, TableColumn, TableFile, array_column, native
from .mapping import Mapped, TableMapping, columns_text, lookup, parse_map, parts, quoted_name, rows_of, unknown_column

if TYPE_CHECKING:
    import h5py

_OBSERVATION = ("observation", "observations", "obs", "state", "states", "s")
_NEXT = (
    "next_observation", "next_observations", "next_obs", "obs_next", "observation_next", "next_state", "next_states",
    "state_next", "new_obs", "obs2", "next.observation", "next.observations", "next.obs", "next.state",
)  # fmt: skip
_ACTION = ("action", "actions", "act", "acts", "a")
_REWARD = ("reward", "rewards", "rew", "rews", "r")
_TERMINATED = (
    "terminated", "terminations", "termination", "terminal", "terminals", "is_terminated", "is_terminal",
)  # fmt: skip
_TRUNCATED = ("truncated", "truncations", "truncation", "timeout", "timeouts", "time_limit", "is_truncated")
_NO_FLAGS = frozenset(
    {
        "valid", "valids", "is_valid", "mask", "masks", "not_done", "not_dones", "dones_float", "is_first", "is_last",
        "first", "last", "step_type", "absorbing", "discount", "discounts",
    }
)  # fmt: skip
"""Names of columns beside which the meaning of flags is uncertain: they may mark padding, or not all ends."""
_KEY = (
    "episode", "episode_id", "episode_index", "episode_idx", "episode_num", "episode_no", "episode_number",
    "ep", "eps_id", "traj", "traj_id",
    "traj_no", "traj_num", "trajectory", "trajectory_id",
    "demo", "demo_id",
)  # fmt: skip
_LANGUAGE = ("language_instruction", "instruction", "task", "language", "prompt")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_MOST_LISTED = 64
_BLOCK_ROWS = 1 << 18
_NONE = "-"
_FILE = "file"
_MOST_NAMED = 5
DONE_NAMES = ("done", "dones", "is_done")
"""Names of a flag that often marks every end, by termination or by time limit."""


def overview(path: Path, files: str | None = None) -> Overview | None:
    """Return the columns of the table at a path with a proposed map; None if there is no table.

    `files` is a pattern that chooses the files of a folder.
    """
    if files is None and kind_of(path) is None:
        return None
    with open_table(path, files=files) as file:
        proposal = _Proposal(file)
        proposal.options |= {} if files is None else {"files": files}
        columns = tuple(
            ColumnView(
                name=one.name, dtype=one.dtype, shape=one.shape, rows=one.rows, key=proposal.keys.get(one.name, ""),
                why=one.why,
            )
            for one in file.columns.values()
        )  # fmt: skip
        notes = (*file.notes, *(one.note for one in file.columns.values() if one.note))
        size = sum(one.stat().st_size for one in file.files())
        return Overview(file.kind, "table", columns, proposal.options, (*notes, *proposal.doubts), size)


class _Proposal:
    """A guess of what the columns of a file are: `keys` by column, `options` of the reader, and `doubts` as notes."""

    def __init__(self, file: TableFile) -> None:
        self._columns = [one for one in file.columns.values() if not one.why or one.pickled]
        self._files = len(file.starts)
        self.keys: dict[str, str] = {}
        self.doubts: list[str] = []
        self.options: dict[str, object] = {}
        flags = self._flags()
        key = self._scalar(_KEY, "episode", text=True)
        after = self._vector(_NEXT, "next.observation")
        pairs = {"observation": self._vector(_OBSERVATION, "observation"), "action": self._vector(_ACTION, "action")}
        reward = self._scalar(_REWARD, "reward")
        pairs["reward"] = quoted_name(reward) if reward is not None else None
        pairs["next.observation"] = after
        self._complete(pairs)
        for one in self._free(text=True):
            if one.is_text and not one.shape and _plain(one) in _LANGUAGE and "language_instruction" not in pairs:
                pairs["language_instruction"] = quoted_name(one.name)
                self.keys[one.name] = "language_instruction"
        self.options["map"] = [f"{name}={columns}" for name, columns in pairs.items() if columns is not None]
        self._propose_ends(flags, key, rewarded=reward is not None)
        if key is not None:
            self.options["episode_key"] = key
        if pickled := [one.name for one in self._columns if one.pickled and one.name in self.keys]:
            self.options["trust_pickle"] = True
            what = f"{pickled[0]} is a pickle" if len(pickled) == 1 else f"{', '.join(pickled)} are pickles"
            self.doubts.append(f"{what}, which can run anything: --trust-pickle is for files whose origin you trust")
        self.doubts += _length_doubts([one for one in self._columns if one.name in self.keys])

    def _flags(self) -> list[str | None]:
        """Return the columns of termination and time limit; a `done` replaces whichever of the two is missing."""
        flags = [self._scalar(_TERMINATED, "terminated"), self._scalar(_TRUNCATED, "truncated")]
        missing = "terminated" if flags[0] is None else "truncated"
        if None in flags and (done := self._scalar(DONE_NAMES, missing)) is not None:
            flags[flags.index(None)] = done
        return flags

    def _propose_ends(self, flags: list[str | None], key: str | None, *, rewarded: bool) -> None:
        """Propose the flags; if there is only one, add a note on what it is taken for.

        A single flag is taken for termination, or in data without rewards, which have no task, for a time limit.
        """
        odd = [one.name for one in self._columns if one.is_scalar and _plain(one) in _NO_FLAGS]
        named = [name for name in flags if name is not None]
        if named and odd:
            self.keys = {name: label for name, label in self.keys.items() if name not in named}
            self.options["ends"] = "TERMINATED,TRUNCATED"
            self.doubts.append(
                f"{odd[0]} may qualify ends or steps, too: name the flags once you know what "
                f"{' and '.join(named)} {'mean' if len(named) > 1 else 'means'} beside it"
            )
            return
        if not named:
            if key is None and self._files:
                self.doubts.append(f"each of {self._files:,} files is an episode")
            elif key is None:
                self.options["ends"] = "TERMINATED,TRUNCATED"
                self.doubts.append(
                    "no column states where episodes end: name the flags, or the column with the episode"
                )
            return
        if flags[1] is None and not rewarded:
            flags = [None, flags[0]]
            self.keys[named[0]] = "truncated"
        self.options["ends"] = ",".join(name or "-" for name in flags).removesuffix(",-")
        if flags[1] is None:
            self.doubts.append(f"{named[0]} is taken for termination; for time limits write --ends -,{named[0]}")
        elif flags[0] is None:
            self.doubts.append(f"{named[0]} is taken for time limits; for termination write --ends {named[0]}")

    def _complete(self, pairs: dict[str, str | None]) -> None:
        """Complete the pairs: without a column named as an observation, propose the remaining columns."""
        if pairs["observation"] is None:
            free = (one for one in self._free() if not one.pickled)
            left = [one for one in free if not one.shape]
            taken = left if pairs["action"] is not None and len(left) <= _MOST_LISTED else []
            self.keys |= {one.name: "observation" for one in taken}
            pairs["next.observation"] = None if taken else pairs["next.observation"]
            pairs["observation"] = ",".join(quoted_name(one.name) for one in taken) or "COLUMN"
            what = "the remaining columns are proposed" if taken else "name the columns of the observation"
            self.doubts.append(f"no column is called observation: {what}")
        if pairs["action"] is None:
            pairs["action"] = "COLUMN"
            self.doubts.append("no column is called action: name it, or leave it out")
        if pairs["reward"] is None:
            self.doubts.append("no column is called reward: the dataset would have none")

    def _free(self, *, text: bool = False) -> Iterator[TableColumn]:
        return (one for one in self._columns if one.name not in self.keys and (text or not one.is_text))

    def _scalar(self, names: Sequence[str], label: str, *, text: bool = False) -> str | None:
        found = [one for one in self._free(text=text) if one.is_scalar and _plain(one) in names]
        found.sort(key=lambda one: (names.index(_plain(one)), len(parts(one.name))))
        if not found:
            return None
        self.keys[found[0].name] = label
        return found[0].name

    def _vector(self, names: Sequence[str], label: str) -> str | None:
        """Return a column with one of these names, a group, or numbered columns, in the syntax of `--map`."""
        for name in names:
            for column in self._free():
                if ".".join(parts(column.name)).lower() == name:
                    self.keys[column.name] = label
                    return quoted_name(column.name)
            inside = [one for one in self._free() if parts(one.name)[0].lower() == name and len(parts(one.name)) > 1]
            if inside:
                group = parts(inside[0].name)[0]
                self.keys |= {one.name: ".".join((label, *parts(one.name)[1:])) for one in inside}
                return f"{quoted_name(group)}.*" if quoted_name(group) == group else f'"{group}.*"'
            numbered = [(one, match[1]) for one in self._free() if (match := _NUMBERED.fullmatch(one.name))]
            same = [(one, prefix) for one, prefix in numbered if prefix.lower().rstrip("_-") == name]
            if same and len({prefix for _, prefix in same}) == 1:
                self.keys |= {one.name: label for one, _ in same}
                return quoted_name(f"{same[0][1]}*")
        return None


def _plain(column: TableColumn) -> str:
    """Return the name of a column without groups, in the form of the lists above: `traj_id` for `Traj id`."""
    return re.sub(r"[ -]+", "_", parts(column.name)[-1].strip().lower())


def _length_doubts(columns: Iterable[TableColumn]) -> Iterator[str]:
    rows = {one.name: one.rows for one in columns}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        yield f"the columns have different numbers of rows ({listed}): each must have one per step"


_BLOCK_BYTES = 4 << 20


def nan_notes(file: TableFile, columns: Sequence[TableColumn]) -> list[str]:
    """Return a note on each column that has NaN; all columns are read for this, block by block."""
    if file.refuses_nan:
        return []
    numbers = [one for one in columns if not one.is_text]
    inexact = [one for one in numbers if np.dtype(one.dtype).kind in "fc" and _row_bytes(one)]
    return [sentence for one in inexact for sentence in _counted(file, one)]


def _row_bytes(column: TableColumn) -> int:
    return math.prod(column.shape) * np.dtype(column.dtype).itemsize


def _counted(file: TableFile, column: TableColumn) -> Iterator[str]:
    step = max(1, _BLOCK_BYTES // max(1, _row_bytes(column)))
    values, rows, first = 0, 0, -1
    for start in range(0, column.rows, step):
        stop = min(start + step, column.rows)
        nan = np.isnan(file.read([column.name], start, stop)[column.name]).reshape(stop - start, -1)
        odd = nan.any(1)
        if odd.any():
            first = start + int(odd.argmax()) if first < 0 else first
            values, rows = values + int(nan.sum()), rows + int(odd.sum())
    if rows:
        what = "" if values == rows else f" ({values:,} values)"
        yield f"{column.name} is NaN in {rows:,} of {column.rows:,} rows{what}, first in {file.place(first)}"


_TABLE_ROWS = 1 << 18


class TableReader(FileReader):
    """Reads a table with one row per step, where options state the meaning of columns. It is never detected.

    docs/reference/table.md describes the rules in full.

    Options:
        map: pairs of a TED key and columns.
        ends: the columns of termination and time limit.
        episode_key: the column with the episode of each row; `file,COLUMN` if each file numbers its own episodes,
            `-,COLUMN` if episodes may continue in the next file.
        files: a pattern that chooses the files of a folder. Without `ends` and `episode_key`, each file is an episode.
        trust_pickle: whether arrays of Python objects in npz and npy files may be read.

    Raises:
        UsageError: an option names a column that does not exist.
        FormatError: a column cannot be mapped, or an episode key occurs again after another one.
        CorruptDataError: a file is damaged.
    """

    option_names = frozenset({"map", "ends", "episode_key", "files", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return False: the meaning of columns cannot be detected, so tables are only read if the format is named."""
        return False

    def on_open(self) -> None:
        """Open the file, and look up the columns."""
        self._file: TableFile = open_table(
            self.path, trusted=bool(self.options.get("trust_pickle")), files=self.options.get("files")
        )
        try:
            self._map = TableMapping(self._file, parse_map(self.options.get("map") or ()))
            self._ends = EndColumns.of(self._file, self.options.get("ends"), self.options.get("episode_key"))
            self._rows = self._common_length()
        except BaseException:
            self._file.close()
            raise
        self._found: TableBoundaries | None = None

    def _common_length(self) -> int:
        columns = {column.name: column for column in (*self._map.columns, *self._ends.all)}
        lengths = {name: column.rows for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {rows:,}" for name, rows in lengths.items())
            raise FormatError(
                f"{self.path}: the mapped columns have different numbers of rows ({listed}), and each must have one "
                "per step"
            )
        rows = next(iter(lengths.values()))
        if not rows:
            raise FormatError(f"{self.path} has no steps: its columns are empty")
        return rows

    def _surveyed(self, progress: Callable[[int], None] = lambda episodes: None) -> TableBoundaries:
        if self._found is None:
            found = find_boundaries(self._file, self._rows, self._ends, progress)
            self._by_number = {number: at for at, number in enumerate(found.numbers)}
            self._widths = self._map.text_widths()
            self._fields = tuple(self._map.source_fields(self._widths))
            self._step = self.piece_rows(self._fields)
            rewards = [column for one in self._map.fields if one.field.key == REWARD for column in one.columns]
            self._all = _Window(self._file, [*self._map.columns, *self._ends.flags], self._step, self._rows)
            self._outcome = _Window(self._file, [*rewards, *self._ends.flags], _TABLE_ROWS, self._rows)
            self._found = found
        return self._found

    @property
    def _has_all_next(self) -> bool:
        return all(one.after is not None for one in self._map.fields if one.timing == "state")

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the flags and the episode key, and find the episodes."""
        found = self._surveyed(progress)
        nan = nan_notes(self._file, self._map.columns)
        used = {column.name for column in (*self._map.columns, *self._ends.all)}
        return SourceFacts(
            source="table",
            id=self.path.name if self.path.is_dir() else self.path.stem,
            fields=self._fields,
            episode_numbers=found.numbers,
            steps=self._rows,
            renamed_keys=self._map.renamed | self._renamed_ends(found),
            dropped_keys=tuple(
                Dropped(name, f"it is not mapped{f', and {column.why}' if column.why else ''}")
                for name, column in self._file.columns.items()
                if name not in used
            ),
            notes=(
                *self._file.notes,
                *self._map.notes,
                *found.notes,
                *nan,
                *self._converted_types(),
                *(column.note for column in self._map.columns if column.note),
            ),
            lengths=np.diff(found.stops, prepend=0).tolist(),
            final_missing=not self._has_all_next,
            last_terminated=None if self._has_all_next else found.last_terminated.tolist(),
        )

    def _renamed_ends(self, found: TableBoundaries) -> dict[str, str]:
        ends = self._ends
        named = {
            "next.terminated": ends.terminated, "next.truncated": ends.truncated,
            "episode": ends.key if found.texts is None else None,
        }  # fmt: skip
        return {column.name: name for name, column in named.items() if column is not None and column.name != name}

    def _converted_types(self) -> Iterator[str]:
        for one in self._map.fields:
            for column in (*one.columns, *(one.after or ())):
                if column.dtype != one.field.dtype:
                    yield f"{column.name} is {column.dtype}, and {one.field.dtype} in {one.field.name}"

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        begin, end = self._span(number)
        for start in range(begin, end, self._step):
            stop = min(start + self._step, end)
            more = int(stop < end)
            read = self._all.read(start, stop + more)
            columns: dict[Key, Array] = {}
            following: dict[Key, Array] = {}
            for one in self._map.fields:
                follows = one.timing == "state" and one.after is None
                for key, rows in self._rows_of(one, one.columns, read, start).items():
                    columns[key] = rows if follows else rows[: stop - start]
                for key, rows in self._rows_of(one, one.after or (), read, start).items():
                    following[key] = rows[: stop - start]
            yield self._piece(number, columns, following, read, start, stop)

    def _rows_of(
        self, one: Mapped, columns: Sequence[TableColumn], read: Mapping[str, Array], start: int
    ) -> dict[Key, Array]:
        """Return the rows of a field by its key, for text also the lengths; {} if there are no columns."""
        if not columns:
            return {}
        if not one.is_text:
            return {one.field.key: rows_of(self.path, one, columns, read)}
        texts = self._file.encoded(columns[0], read[columns[0].name], start)
        characters, lengths = encode_text(texts, self._widths[one.field.key])
        return {one.field.key: characters, length_key(one.field.key): lengths}

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all columns if next observations are mapped."""
        if any(one.after is not None for one in self._map.fields):
            yield from self.read_episode(number)
            return
        begin, end = self._span(number)
        for start in range(begin, end, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, end)
            read = self._outcome.read(start, stop)
            rewards = [one for one in self._map.fields if one.field.key == REWARD]
            columns = {one.field.key: rows_of(self.path, one, one.columns, read) for one in rewards}
            yield self._piece(number, columns, {}, read, start, stop)

    def _span(self, number: int) -> tuple[int, int]:
        found = self._surveyed()
        at = self._by_number[number]
        return int(found.stops[at - 1]) if at else 0, int(found.stops[at])

    def _piece(
        self, number: int, columns: dict[Key, Array], following: dict[Key, Array], read: Mapping[str, Array],
        start: int, stop: int,
    ) -> Piece:  # fmt: skip
        begin, end = self._span(number)
        terminated, truncated = (
            np.zeros(stop - start, bool) if column is None else read[column.name].reshape(-1)[: stop - start] != 0
            for column in (self._ends.terminated, self._ends.truncated)
        )
        found = self._surveyed()
        if found.marks_all is not None:
            both = terminated & truncated
            terminated, truncated = (
                (terminated & ~both, truncated) if found.marks_all == self._ends.terminated
                else (terminated, truncated & ~both)
            )  # fmt: skip
        text = {} if found.texts is None else found.texts[self._by_number[number]]
        return Piece(
            number, columns, terminated, truncated, first=start == begin, last=stop == end, text=text, next=following,
            final=Final.OBSERVED if self._has_all_next else Final.MISSING,
        )  # fmt: skip

    def files(self) -> list[Path]:
        """The file, or the files of the folder."""
        return self._file.files()

    def verify_read(self) -> None:
        """Verify the checksums of the arrays that were read."""
        self._file.verify_read()

    def on_close(self) -> None:
        """Close the file."""
        self._file.close()


class _Window:
    """Reads rows of some columns ahead, and keeps them: many episodes are far shorter than one efficient read."""

    def __init__(self, file: TableFile, columns: Sequence[TableColumn], rows: int, total: int) -> None:
        self._file = file
        self._names = list({column.name: None for column in columns})
        self._rows, self._total = rows, total
        self._start = self._stop = 0
        self._kept: dict[str, Array] = {}

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Return rows `[start, stop)`; arrays that were returned before stay valid."""
        if not self._start <= start <= self._stop:
            self._start = self._stop = start
            self._kept = {}
        if stop > self._stop and self._names:
            end = min(self._total, max(stop, self._stop + self._rows))
            read = self._file.read(self._names, self._stop, end)
            held = start - self._start
            self._kept = {
                name: np.concatenate((self._kept[name][held:], rows))
                if name in self._kept and start < self._stop
                else rows
                for name, rows in read.items()
            }
            self._start, self._stop = (start if start < self._stop else self._stop), end
        return {name: rows[start - self._start : stop - self._start] for name, rows in self._kept.items()}


# Where episodes end: at flags, where the episode key changes, and at the end of the table -----------


@dataclass(frozen=True, slots=True)
class EndColumns:
    """The columns that `--ends` and `--episode-key` name, None for one that is not given.

    `at_files` is True if episodes end at the end of each file, False if they may continue in the next file, and None
    if the key decides, and nothing is stated about files.
    """

    terminated: TableColumn | None
    truncated: TableColumn | None
    key: TableColumn | None
    at_files: bool | None = False

    @classmethod
    def of(cls, file: TableFile, ends: str | None, key: str | None) -> EndColumns:
        """Parse the options, and look up the columns.

        In a table of several files, episodes end at the end of each file, unless there is a key, or `ends` is `-`.

        Args:
            file: the table.
            ends: `TERMINATED,TRUNCATED`, with `-` for a missing one.
            key: `COLUMN`; `file,COLUMN` if each file numbers its own episodes, `-,COLUMN` if they may continue in the
                next file.

        Raises:
            UsageError: a column does not exist, or the ends of episodes are not stated.
            FormatError: a column cannot be a flag or a key.
        """
        if ends is None and key is None and not file.starts:
            raise UsageError(
                f"{file.path}: no option states where episodes end",
                hint="name the columns with the flags (--ends TERMINATED,TRUNCATED), or the one with the episode "
                f"(--episode-key COLUMN), or state that all rows are one episode (--ends -); {columns_text(file)}",
            )
        names = [name.strip() for name in (ends or _NONE).split(",")]
        if len(names) > 2 or not all(names):
            raise UsageError(
                f"--ends is {ends!r}, expected one or two columns: termination, then time limit",
                hint="write - for a missing one: --ends -,TIMEOUTS",
            )
        terminated, truncated = (_flag(file, name) for name in (*names, _NONE)[:2])
        if terminated is not None and terminated == truncated:
            raise UsageError(f"--ends has {terminated.name!r} twice")
        if key is None:
            at_files = bool(file.starts) and (ends is None or set(names) != {_NONE})
            return cls(terminated, truncated, None, at_files)
        stated, comma, rest = key.partition(",")
        if not file.starts or not comma or lookup(key, file.columns) is not None:
            return cls(terminated, truncated, _key(file, key), None if file.starts else False)
        if stated.strip() not in (_FILE, _NONE):
            raise UsageError(
                f"--episode-key is {key!r}, expected a column, {_FILE},COLUMN or {_NONE},COLUMN",
                hint=columns_text(file),
            )
        return cls(terminated, truncated, _key(file, rest.strip()), stated.strip() == _FILE)

    @property
    def flags(self) -> list[TableColumn]:
        """The columns of flags that are given."""
        return [one for one in (self.terminated, self.truncated) if one is not None]

    @property
    def all(self) -> list[TableColumn]:
        """The columns of flags and key that are given."""
        return self.flags + ([] if self.key is None else [self.key])


def _flag(file: TableFile, name: str) -> TableColumn | None:
    return None if name == _NONE else _scalar(file, "--ends", name, file.require_numbers, "a flag")


def _key(file: TableFile, name: str) -> TableColumn:
    return _scalar(file, "--episode-key", name, file.require_key, "a key")


def _scalar(file: TableFile, option: str, name: str, require: Callable[[TableColumn], None], what: str) -> TableColumn:
    found = lookup(name, file.columns)
    if found is None:
        raise unknown_column(file, f"{option} {name}", name)
    column = file.columns[found]
    require(column)
    if not column.is_scalar:
        raise FormatError(f"{file.path}: {found!r} has rows of shape {list(column.shape)}, but {what} is one value")
    return column


@dataclass(frozen=True, slots=True)
class TableBoundaries:
    """The episodes of a table.

    Attributes:
        stops: the row after each episode, ascending, int64.
        numbers: the number of each episode.
        last_terminated: whether the last step of each episode is terminated, bool.
        texts: the texts of each episode; None if there are none.
        marks_all: a flag that also marks the ends of the other flag, like `done` in Gym: rows with both flags only get
            the other one.
        notes: notes for the user.
    """

    stops: Array
    numbers: Sequence[int]
    last_terminated: Array
    texts: Sequence[dict[str, str]] | None
    marks_all: TableColumn | None
    notes: tuple[str, ...]

    @property
    def starts(self) -> Array:
        """The first row of each episode, int64."""
        return np.concatenate(([0], self.stops[:-1])).astype(np.int64)


def find_boundaries(file: TableFile, rows: int, ends: EndColumns, progress: Callable[[int], None]) -> TableBoundaries:
    """Read the flags and the key, and find the episodes of a table with `rows` rows.

    Raises FormatError for a flag that is neither 0 nor 1, for a `done` that marks only some ends of the other flag, for
    an episode key that occurs again after another one, and for an episode that continues in the next file although no
    option says so.
    """
    terminated: list[Array] = []
    truncated: list[Array] = []
    changes: list[Array] = []
    values: list[Any] = []
    last: Any = None
    for start in range(0, rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        read = file.read([column.name for column in ends.flags], start, stop) if ends.flags else {}
        for column, found in ((ends.terminated, terminated), (ends.truncated, truncated)):
            if column is not None:
                found.append(start + np.flatnonzero(_as_flags(file, column, read[column.name], start)))
        if ends.key is not None:
            keys = _as_keys(file, ends.key, file.read_key(ends.key, start, stop), start)
            differs = np.concatenate(([start == 0 or keys[0] != last], keys[1:] != keys[:-1]))
            changes.append(start + np.flatnonzero(differs))
            values += keys[differs].tolist()
            last = keys[-1]
    begins, files = _joined(changes), np.asarray(file.starts[1:], np.int64)
    if ends.key is not None and ends.at_files:
        changes_at, begins = begins, np.union1d(begins, files)
        values = [values[at] for at in (np.searchsorted(changes_at, begins, side="right") - 1).tolist()]
    dead, late = _joined(terminated), _joined(truncated)
    marks_all = _marks_all(file, ends, dead, late)
    flagged = np.union1d(dead, late)
    stops = np.union1d(np.union1d(flagged + 1, begins[1:]), [*(files if ends.at_files else ()), rows]).astype(np.int64)
    progress(len(stops))
    last_terminated = np.isin(stops - 1, np.setdiff1d(dead, late) if marks_all == ends.terminated else dead)
    numbers: Sequence[int] = range(len(stops))
    texts: list[dict[str, str]] | None = None
    if ends.at_files and ends.key is None and not ends.flags:
        texts = [{_FILE: name} for name in file.file_names]
    notes = list(_flag_notes(ends, flagged, stops, rows))
    if both := len(np.intersect1d(dead, late)):
        notes.append(_note_on_both(ends, marks_all, both))
    if ends.key is not None:
        in_file = np.searchsorted(files, begins, side="right") if ends.at_files else np.zeros(len(begins), np.int64)
        _require_once(file, ends.key, values, begins, in_file)
        if len(within := np.setdiff1d(files, stops)):
            notes.append(_over_files(file, ends, values, begins, within))
        owner = (np.searchsorted(begins, np.concatenate(([0], stops[:-1])), side="right") - 1).tolist()
        whole = all(type(value) is int and 0 <= value < 1 << 63 for value in values)
        if len(stops) == len(values) == len(set(values)) and whole:
            numbers = values
        else:
            texts = [{ends.key.name: str(values[at])} for at in owner]
        if texts is not None and ends.at_files:
            texts = [{_FILE: file.file_names[in_file[at]], **text} for at, text in zip(owner, texts, strict=True)]
        if len(stops) > len(values):
            more = len(stops) - len(values)
            notes.append(
                f"flags end {more:,} more episodes than {ends.key.name} has values: episodes are numbered from 0, and "
                f"{ends.key.name} is kept as text of each"
            )
    return TableBoundaries(stops, numbers, last_terminated, texts, marks_all, tuple(notes))


def _over_files(file: TableFile, ends: EndColumns, values: Sequence[Any], begins: Array, within: Array) -> str:
    """Return a note on files that begin inside an episode; FormatError unless an option says that episodes may."""
    assert ends.key is not None
    key, begin = ends.key.name, "1 file begins" if len(within) == 1 else f"{len(within):,} files begin"
    found = f"{begin} with the {key} that the file before ends with"
    if ends.at_files is None:
        first = int(within[0])
        value = values[int(np.searchsorted(begins, first, side="right")) - 1]
        raise FormatError(
            f"{file.path}: {found}, the first with {value!r} in {file.place(first)}, which may be one episode or two",
            hint=f"write --episode-key {_NONE},{key} if such an episode continues in the next file, "
            f"--episode-key {_FILE},{key} if each file numbers its own",
        )
    return f"{found}: the episode continues there"


def _marks_all(file: TableFile, ends: EndColumns, terminated: Array, truncated: Array) -> TableColumn | None:
    """Return the flag called `done` if it is set in all rows with the other flag; None if there is none.

    Raises FormatError if it is set in only some of these rows. Then either it should mark every end, and some are
    missing; or it is an end of its own, and sometimes coincides with the other. Rows with both flags would have
    different meanings.
    """
    if ends.terminated is None or ends.truncated is None:
        return None
    if _is_done(ends.terminated.name) == _is_done(ends.truncated.name):
        return None
    done, at, other, others, own = (
        (ends.terminated, terminated, ends.truncated, truncated, "terminated")
        if _is_done(ends.terminated.name)
        else (ends.truncated, truncated, ends.terminated, terminated, "truncated")
    )
    marked = np.isin(others, at)
    if marked.all():
        return done
    if not marked.any():
        return None
    with_both, without = int(others[marked][0]), int(others[~marked][0])
    raise FormatError(
        f"{file.path}: {done.name} is set in {int(marked.sum()):,} of {len(others):,} rows with {other.name} (in "
        f"{file.place(with_both)}, not in {file.place(without)}): it may mark every end, or be an end of its own",
        hint=f"set {done.name} in all rows with {other.name} if it marks every end, or else call it {own}",
    )


def _is_done(name: str) -> bool:
    """Return whether a column is called `done`, in any group."""
    return parts(name)[-1].strip().lower() in DONE_NAMES


def _note_on_both(ends: EndColumns, marks_all: TableColumn | None, count: int) -> str:
    assert ends.terminated is not None
    assert ends.truncated is not None
    rows = counted(count, "row")
    if marks_all is None:
        return f"{ends.terminated.name} and {ends.truncated.name} are both set in {rows}: these steps have both flags"
    if marks_all == ends.terminated:
        other, what = ends.truncated.name, "truncated and not terminated"
    else:
        other, what = ends.terminated.name, "terminated and not truncated"
    return f"{marks_all.name} is set wherever {other} is, and so marks every end: {rows} with both are {what}"


def _flag_notes(ends: EndColumns, flagged: Array, stops: Array, rows: int) -> Iterator[str]:
    names = " and ".join(one.name for one in (ends.terminated, ends.truncated) if one is not None)
    what = [f"episodes end at {names}"] if names else []
    what += [f"episodes end where {ends.key.name} changes"] if ends.key is not None else []
    what += ["episodes end where files do" if what else "each file is an episode"] if ends.at_files else []
    yield ", and ".join(what) if what else "all rows are one episode"
    if ends.key is not None and len(stops) == rows > 1:
        yield f"{ends.key.name} has another value in every row: each is an episode of one step"
    if ends.terminated is not None and ends.truncated is None:
        yield f"{ends.terminated.name} counts as termination: --ends -,{ends.terminated.name} makes it a time limit"
    following = int((np.diff(flagged) == 1).sum())
    if following:
        which = (
            f"{following:,} rows that follow another such row" if following > 1 else "a row that follows another such"
        )
        yield f"{names} {'are' if ' and ' in names else 'is'} set in {which}: each is an episode of one step"
    if names and ends.key is None and not ends.at_files and (not len(flagged) or flagged[-1] != rows - 1):
        left = rows - (int(flagged[-1]) + 1 if len(flagged) else 0)
        yield f"the last {left:,} {'row ends' if left == 1 else 'rows end'} without a flag: an unfinished episode"
    unflagged = len(stops) - len(flagged)
    if names and unflagged and (ends.key is not None or ends.at_files):
        where = " or ".join(["a file does"] * bool(ends.at_files) + ([f"{ends.key.name} changes"] if ends.key else []))
        yield f"{unflagged:,} of {len(stops):,} episodes end where {where}, without a flag"


def _as_flags(file: TableFile, column: TableColumn, rows: Array, start: int) -> Array:
    values = rows.reshape(len(rows))
    require_truths(values, column.name, str(file.path))
    odd = (values != 0) & (values != 1)
    if odd.any():
        at = int(odd.argmax())
        raise FormatError(
            f"{file.path}: {column.name} is {values[at]} in {file.place(start + at)}, and a flag is 0 or 1",
            hint="a column with the number of the episode is named with --episode-key",
        )
    return np.asarray(values != 0)


def _as_keys(file: TableFile, column: TableColumn, rows: Array, start: int) -> Array:
    """Return keys for comparison; floats that are whole numbers become int64."""
    values = rows.reshape(len(rows))
    if values.dtype.kind == "f":
        if np.isnan(values).any():
            raise FormatError(
                f"{file.path}: {column.name} is NaN in {file.place(start + int(np.isnan(values).argmax()))}, and "
                "belongs to no episode"
            )
        if (values == np.floor(values)).all() and (np.abs(values) < 1 << 53).all():
            return values.astype(np.int64)
    return values


def _require_once(file: TableFile, key: TableColumn, values: Sequence[Any], begins: Array, in_file: Array) -> None:
    """Raise FormatError for an episode key that occurs again after another one, as its rows may be one episode or two.

    `in_file` is the number of the file of each value if each file numbers its own episodes, else 0.
    """
    seen: dict[Any, int] = {}
    pairs = zip(in_file.tolist(), values, strict=True)
    again = [(seen[pair] + 1, at) for at, pair in enumerate(pairs) if seen.setdefault(pair, at) != at]
    if not again:
        return
    shown = "; ".join(
        f"{values[at]!r} ends before {file.place(int(begins[after]))}, and is again in {file.place(int(begins[at]))}"
        for after, at in again[:_MOST_NAMED]
    )
    more = f" and {len(again) - _MOST_NAMED:,} more" if len(again) > _MOST_NAMED else ""
    hint = f"sort the table by {key.name}, or give the flags instead: --ends TERMINATED,TRUNCATED"
    if file.starts and not in_file.any():
        hint = f"write --episode-key {_FILE},{key.name} if each file numbers its own episodes, or sort the table by it"
    raise FormatError(
        f"{file.path}: {len(again):,} of the values of {key.name} occur again after another one: {shown}{more}",
        hint=hint,
    )


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)


# Which kind of table is at a path, by its content, and how it is opened -----------------------------


class Hdf5File(TableFile):
    """An HDF5 file. References to other files (external links, virtual datasets) are refused."""

    kind = "HDF5 file"

    def __init__(self, path: Path) -> None:
        import h5py  # takes longer to load than most tables to open

        from ...core.encodings.hdf5_files import HeapValues, datasets_in, open_h5
        from ..files.hdf5 import require_whole_h5

        self.path = path
        if begins_as_h5(path):  # with other data before it, the size in the header is not the file's
            require_whole_h5(path)
        self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        try:
            self._datasets = {name: item for name, item in datasets_in(self._file) if isinstance(item, h5py.Dataset)}
            self.columns = {name: self._column(name, dataset) for name, dataset in self._datasets.items()}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, dataset: h5py.Dataset) -> TableColumn:
        import h5py

        from ...core.encodings.hdf5_files import absurd_size

        if why := absurd_size(dataset.id) if dataset.shape is not None else "":
            raise CorruptDataError(f"{self.path}: {name!r} {why}", hint="copy or fetch the file again, whole")
        try:
            dtype = dataset.dtype
        except TypeError as error:  # some types of HDF5, and damaged ones, have no equivalent in h5py
            return TableColumn(
                name, "unknown", (), len(dataset) if dataset.shape else 0, f"its type cannot be read: {error}"
            )
        if h5py.check_string_dtype(dtype) and dataset.shape:
            return TableColumn(name, TEXT, dataset.shape[1:], dataset.shape[0])
        return array_column(name, dtype, dataset.shape)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        found = {}
        for name in names:
            dataset = self._datasets[name]
            if self.columns[name].is_text:
                text = self._values.dataset(name, start, stop).asstr(errors="surrogateescape")
                found[name] = np.asarray(text[start:stop], object)
                continue
            rows = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype)
            if rows.size:
                dataset.read_direct(rows, np.s_[start:stop])
            found[name] = native(rows)
        return found

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        rows = super().read_key(column, start, stop)
        if column.is_text:  # show bytes that are not UTF-8 as escapes
            texts = (one.encode(errors="surrogateescape").decode(errors="backslashreplace") for one in rows.flat)
            rows = np.array([*texts], object).reshape(rows.shape)
        return rows

    def close(self) -> None:
        self._values.close()
        self._file.close()


_DEEPEST = 8
_MOST_FILES = 1000


class NpzTable(TableFile):
    """An npz file, whose arrays are the columns. Ascending reads unpack each row once.

    With `trusted`, arrays of Python objects, which are pickles, are read, too.
    """

    kind = "npz file"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                self.columns = {name: self._column(name, trusted) for name in self._file.names}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, trusted: bool) -> TableColumn:
        why = ""
        if trusted and self._file.is_pickled(name) and self._file.form(name)[1]:
            why = _why_not(partial(self._file.unpickle, name), f"{self.path}: {name!r}")
        return _column(name, *self._file.form(name), pickled=self._file.is_pickled(name), why=why)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._file.read(name, start, stop) for name in names}

    def verify_read(self) -> None:
        self._file.verify_read()

    def close(self) -> None:
        self._file.close()


class NpyFolder(TableFile):
    """A folder of `.npy` files, which are the columns; folders inside it are groups.

    With `trusted`, arrays of Python objects, which are pickles, are read, too.
    """

    kind = "folder of npy files"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._arrays: dict[str, NpyFile] = {}
        self._files = [file for _, file in npy_files(path)]
        try:
            for name, file in npy_files(path):
                self._arrays[name] = NpyFile(file)
            self.columns = {name: _npy_column(name, array, trusted) for name, array in self._arrays.items()}
        except BaseException:
            self.close()
            raise

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._arrays[name].read(start, stop) for name in names}

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        for array in self._arrays.values():
            array.close()


def _npy_column(name: str, array: NpyFile, trusted: bool) -> TableColumn:
    why = ""
    if trusted and array.is_pickled and array.header.shape:
        why = _why_not(array.unpickle, str(array.path))
    return _column(name, array.header.dtype, array.header.shape, pickled=array.is_pickled, why=why)


def _why_not(unpickle: Callable[[], None], what: str) -> str:
    """Read a pickle; return why its elements do not fit into one array, or an empty string."""
    try:
        unpickle()
    except FormatError as error:
        return f"it{error.message.removeprefix(what)}"
    return ""


def _column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, pickled: bool, why: str) -> TableColumn:
    if pickled and shape:
        untrusted = "its elements are Python objects in a pickle, which only --trust-pickle reads"
        return TableColumn(name, str(dtype), shape[1:], shape[0], why or untrusted, pickled=not why)
    if dtype.kind in "USO" and shape:
        return TableColumn(name, TEXT, shape[1:], shape[0])
    return array_column(name, dtype, shape)


def npy_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the `.npy` files below a folder, each with its relative path without suffix; links to folders are skipped.

    Raises FormatError for folders that are nested too deeply, and for too many files.
    """
    pending = [("", folder, 0)]
    found = []
    while pending:
        prefix, here, depth = pending.pop()
        if depth > _DEEPEST:
            raise FormatError(f"{here} is nested more than {_DEEPEST} folders deep")
        for entry in here.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                pending.append((f"{prefix}{entry.name}/", entry, depth + 1))
            elif entry.suffix == ".npy" and entry.is_file():
                found.append((f"{prefix}{entry.stem}", entry))
        if len(found) > _MOST_FILES:
            raise FormatError(f"{folder} has more than {_MOST_FILES:,} npy files: they are not columns of one table")
    yield from sorted(found)


Kind: TypeAlias = Literal["hdf5", "npz", "npy", "csv", "parquet", "files"]
_KNOWN = "HDF5, npz, CSV, Parquet and folders of npy, CSV or Parquet files can be read as tables"


def kind_of(path: Path) -> Kind | None:
    """Return the kind of table at a path, None if there is none. Text with commas counts as CSV."""
    if path.is_dir():
        from .text import table_files

        with contextlib.suppress(FormatError, OSError):
            if next(npy_files(path), None) is not None:
                return "npy"
            return "files" if next(table_files(path), None) is not None else None
        return None
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(8)
        if data_start(path) is not None:
            return "hdf5"
        if head.startswith(b"PK\3\4"):
            return "npz"
        if head.startswith(b"PAR1"):
            return "parquet"
        return "csv" if _is_csv(path) else None
    except (OSError, RbtoolError) as error:
        no_match(error)
        return None


def _is_csv(path: Path) -> bool:
    from .text import read_header

    with os.fdopen(open_regular(path), "rb") as file:
        _, names, _ = read_header(file, path)
    return path.suffix.lower() in {".csv", ".tsv"} or (
        len(names) > 1 and not any(set(name) & set("{}[]<>") for name in names)
    )


def open_table(path: Path, *, trusted: bool = False, files: str | None = None) -> TableFile:
    """Open the table at a path.

    Args:
        path: a file or a folder.
        trusted: whether pickles in arrays may be read.
        files: a pattern that chooses the CSV or Parquet files of a folder.

    Raises:
        FormatError: there is no table.
        CorruptDataError: the table is damaged.
    """
    if files is not None and not path.is_dir():
        raise UsageError(f"--files chooses files of a folder, and {path} is not a folder", hint="leave out --files")
    kind = kind_of(path) if files is None else "files"
    if kind == "files":
        from .text import TableFiles

        return TableFiles(path, files)
    if kind == "hdf5":
        return Hdf5File(path)
    if kind == "parquet":
        from .parquet import ParquetFile

        return ParquetFile(path)
    if kind == "npy":
        return NpyFolder(path, trusted=trusted)
    if path.is_dir():
        raise FormatError(f"{path} is a folder without npy, CSV or Parquet files", hint=_KNOWN)
    if kind == "npz":
        return NpzTable(path, trusted=trusted)
    from .text import CsvFile

    return CsvFile(path)
