"""Reads tables whose columns a user maps: HDF5, npz, CSV, Parquet, and folders of npy, CSV or Parquet files.

For a table without a map, proposes one from the names that columns commonly have. Loads h5py or pyarrow where a file
needs it; never torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.locate import ColumnView, Overview
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, Key, encode_text, length_key
from ..files.readers import FileReader
from .boundaries import DONE_NAMES, EndColumns, TableBoundaries, find_boundaries
from .columns import TableColumn, TableFile
from .mapping import Mapped, TableMapping, parse_map, parts, quoted_name, rows_of
from .opening import kind_of, open_table

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
"""Columns that qualify flags: next to one of them, a flag may mark a row that is not a step, or not all ends."""
_KEY = (
    "episode", "episode_id", "episode_index", "episode_idx", "episode_num", "episode_no", "episode_number",
    "ep", "eps_id", "traj", "traj_id",
    "traj_no", "traj_num", "trajectory", "trajectory_id",
    "demo", "demo_id",
)  # fmt: skip
_LANGUAGE = ("language_instruction", "instruction", "task", "language", "prompt")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_MOST_LISTED = 64


def overview(path: Path, files: str | None = None) -> Overview | None:
    """Return the columns of the table at a path with a proposal for a map; None where there is no table.

    `files` is a pattern of the files of a folder that are the table.
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
    """What the columns of a file may be: `keys` by column, `options` of the reader, `doubts` in sentences."""

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
        """The columns of termination and time limit; one called `done` stands for whichever of the two is missing."""
        flags = [self._scalar(_TERMINATED, "terminated"), self._scalar(_TRUNCATED, "truncated")]
        missing = "terminated" if flags[0] is None else "truncated"
        if None in flags and (done := self._scalar(DONE_NAMES, missing)) is not None:
            flags[flags.index(None)] = done
        return flags

    def _propose_ends(self, flags: list[str | None], key: str | None, *, rewarded: bool) -> None:
        """Propose the flags, and say what they are taken for where only one of them is there.

        It is taken for termination, but for a time limit in data without rewards, which were collected without a task.
        """
        odd = [one.name for one in self._columns if one.is_scalar and _plain(one) in _NO_FLAGS]
        named = [name for name in flags if name is not None]
        if named and odd:
            self.keys = {name: label for name, label in self.keys.items() if name not in named}
            self.options["ends"] = "TERMINATED,TRUNCATED"
            self.doubts.append(
                f"{odd[0]} says something about ends or steps, too: name the flags once you know what "
                f"{' and '.join(named)} {'mean' if len(named) > 1 else 'means'} next to it"
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
        """Propose the columns that are left where no column is named as an observation."""
        if pairs["observation"] is None:
            free = (one for one in self._free() if not one.pickled)
            left = [one for one in free if not one.shape]
            taken = left if pairs["action"] is not None and len(left) <= _MOST_LISTED else []
            self.keys |= {one.name: "observation" for one in taken}
            pairs["next.observation"] = None if taken else pairs["next.observation"]
            pairs["observation"] = ",".join(quoted_name(one.name) for one in taken) or "COLUMN"
            what = "the columns that are left are proposed" if taken else "name the columns of the observation"
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
        """A column of one of these names, a group, or columns with numbers."""
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
    """The own name of a column as the lists above have it: `traj id` is `traj_id`."""
    return re.sub(r"[ -]+", "_", parts(column.name)[-1].strip().lower())


def _length_doubts(columns: Iterable[TableColumn]) -> Iterator[str]:
    rows = {one.name: one.rows for one in columns}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        yield f"the columns have different numbers of rows ({listed}): each has to have one a step"


_BLOCK_BYTES = 4 << 20


def nan_notes(file: TableFile, columns: Sequence[TableColumn]) -> list[str]:
    """Count NaN in columns, which are read for it block by block; a sentence each."""
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
    """A table with a row a step, in which options state what each column is. Never detected: choose it by name.

    Options: `map` has pairs of a TED key and columns, `ends` the columns of termination and time limit, `episode_key`
    the column that states the episode of a row, after `file,` where each file counts its own episodes, after `-,` where
    they may go on in the next file. `files` is a pattern of the files of a folder that are the table; each is an
    episode where neither of the two says otherwise. `trust_pickle` allows arrays of Python objects in npz and npy files
    to be read. The rule is in docs/reference/table.md.

    Raises UsageError for options that name what is not there, FormatError for columns that cannot be mapped and for an
    episode key that comes again, CorruptDataError for damaged files.
    """

    option_names = frozenset({"map", "ends", "episode_key", "files", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return False: what the columns mean cannot be detected."""
        return False

    def on_open(self) -> None:
        """Open the file and look the columns up."""
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
                f"{self.path}: the columns that are mapped have different numbers of rows ({listed}), and each has to "
                "have one a step"
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
        """The rows of a field by its key, and for text the lengths too; {} for no columns."""
        if not columns:
            return {}
        if not one.is_text:
            return {one.field.key: rows_of(self.path, one, columns, read)}
        texts = self._file.encoded(columns[0], read[columns[0].name], start)
        characters, lengths = encode_text(texts, self._widths[one.field.key])
        return {one.field.key: characters, length_key(one.field.key): lengths}

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode; all of it where next observations are mapped."""
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
    """Rows of some columns, of which a range is kept: an episode may be far shorter than what one read brings."""

    def __init__(self, file: TableFile, columns: Sequence[TableColumn], rows: int, total: int) -> None:
        self._file = file
        self._names = list({column.name: None for column in columns})
        self._rows, self._total = rows, total
        self._start = self._stop = 0
        self._kept: dict[str, Array] = {}

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Return rows `[start, stop)`; what was given out stays valid."""
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
