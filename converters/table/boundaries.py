"""Where the episodes of a table end: at flags, where the episode key changes, and at the end of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.contracts import Array, require_truths
from .columns import TableColumn, TableFile
from .mapping import columns_text, lookup, parts, unknown_column

_BLOCK_ROWS = 1 << 18
_NONE = "-"
_FILE = "file"
_MOST_NAMED = 5
DONE_NAMES = ("done", "dones", "is_done")
"""Names of a flag that often marks every end, whether by termination or by time limit."""


@dataclass(frozen=True, slots=True)
class EndColumns:
    """The columns that `--ends` and `--episode-key` name; None where there is none.

    `at_files` is True where episodes end with each file of a table in several, False where they may go on in the next
    one, and None where the key decides and nothing is stated of files.
    """

    terminated: TableColumn | None
    truncated: TableColumn | None
    key: TableColumn | None
    at_files: bool | None = False

    @classmethod
    def of(cls, file: TableFile, ends: str | None, key: str | None) -> EndColumns:
        """Look the columns up. `ends` is `TERMINATED,TRUNCATED`, with `-` for one that there is not.

        Of a table in several files each is an episode, or several with flags, unless the key, or `-` alone, says what
        the episodes are. The key is `file,COLUMN` where each file counts its own episodes, and `-,COLUMN` where they
        may go on in the next file.

        UsageError for a column that is not there, and where nothing states the ends; FormatError for one that cannot
        be a flag or a key.
        """
        if ends is None and key is None and not file.starts:
            raise UsageError(
                f"{file.path}: where episodes end is not stated",
                hint="name the columns with the flags (--ends TERMINATED,TRUNCATED), or the one with the episode "
                f"(--episode-key COLUMN), or state that all rows are one episode (--ends -); {columns_text(file)}",
            )
        names = [name.strip() for name in (ends or _NONE).split(",")]
        if len(names) > 2 or not all(names):
            raise UsageError(
                f"--ends is {ends!r}, expected one or two columns: termination, then time limit",
                hint="write - for one that there is not: --ends -,TIMEOUTS",
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
        """The columns of flags that there are."""
        return [one for one in (self.terminated, self.truncated) if one is not None]

    @property
    def all(self) -> list[TableColumn]:
        """The columns that there are."""
        return self.flags + ([] if self.key is None else [self.key])


def _flag(file: TableFile, name: str) -> TableColumn | None:
    if name == _NONE:
        return None
    found = lookup(name, file.columns)
    if found is None:
        raise unknown_column(file, f"--ends {name}", name)
    column = file.columns[found]
    file.require_numbers(column)
    if not column.is_scalar:
        raise FormatError(f"{file.path}: {found!r} has rows of shape {list(column.shape)}, and a flag is one value")
    return column


def _key(file: TableFile, name: str) -> TableColumn:
    found = lookup(name, file.columns)
    if found is None:
        raise unknown_column(file, f"--episode-key {name}", name)
    column = file.columns[found]
    file.require_key(column)
    if not column.is_scalar:
        raise FormatError(f"{file.path}: {found!r} has rows of shape {list(column.shape)}, and a key is one value")
    return column


@dataclass(frozen=True, slots=True)
class TableBoundaries:
    """The episodes: `stops` has the row after each, ascending; `numbers` what they are called, `texts` their texts.

    `texts` is None where the key is the number, and where there is no key. `marks_all` is the flag that marks the ends
    of the other flag too, as `done` does in Gym: such a row has the other flag alone.
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
    """Read the flags and the key, and find the episodes of a table with so many rows.

    FormatError for a flag that is neither 0 nor 1, for a `done` of which it is open whether it marks every end, for an
    episode key that comes again after another, and for one that goes on over files where that is not stated.
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
    """Count the files that begin in the middle of an episode; FormatError unless it is stated that there are such."""
    assert ends.key is not None
    key, begin = ends.key.name, "1 file begins" if len(within) == 1 else f"{len(within):,} files begin"
    found = f"{begin} with the {key} that the file before ends with"
    if ends.at_files is None:
        first = int(within[0])
        value = values[int(np.searchsorted(begins, first, side="right")) - 1]
        raise FormatError(
            f"{file.path}: {found}, the first with {value!r} in {file.place(first)}: one episode, or two",
            hint=f"write --episode-key {_NONE},{key} where such an episode goes on in the next file, "
            f"--episode-key {_FILE},{key} where each file counts its own",
        )
    return f"{found}: the episode goes on there"


def _marks_all(file: TableFile, ends: EndColumns, terminated: Array, truncated: Array) -> TableColumn | None:
    """The flag called `done` that is set in all rows in which the other flag is; None where there is none.

    FormatError where it is set in some of them: then it marks every end and lacks some, or is an end of its own that
    comes together with the other at times, and the rows with both mean something else in each case.
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
        f"{file.place(with_both)}, not in {file.place(without)}): whether it marks every end, or is an end of its own, "
        "is open",
        hint=f"set {done.name} in all rows with {other.name} if it marks every end, or else call it {own}",
    )


def _is_done(name: str) -> bool:
    """Whether a column is called `done`, in whatever group it is."""
    return parts(name)[-1].strip().lower() in DONE_NAMES


def _note_on_both(ends: EndColumns, marks_all: TableColumn | None, count: int) -> str:
    assert ends.terminated is not None
    assert ends.truncated is not None
    rows = "1 row" if count == 1 else f"{count:,} rows"
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
    """Return keys as they are compared: whole numbers as int64 where they are, text as objects."""
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
    """Raise FormatError for an episode key that comes again after another: its rows may or may not be one episode.

    `in_file` numbers the file of each, where each counts its own episodes.
    """
    seen: dict[Any, int] = {}
    pairs = zip(in_file.tolist(), values, strict=True)
    again = [(seen[pair] + 1, at) for at, pair in enumerate(pairs) if seen.setdefault(pair, at) != at]
    if not again:
        return
    shown = "; ".join(
        f"{values[at]!r} ends before {file.place(int(begins[after]))}, and {file.place(int(begins[at]))} has it again"
        for after, at in again[:_MOST_NAMED]
    )
    more = f" and {len(again) - _MOST_NAMED:,} more" if len(again) > _MOST_NAMED else ""
    hint = f"sort the table by {key.name}, or give the flags instead: --ends TERMINATED,TRUNCATED"
    if file.starts and not in_file.any():
        hint = f"write --episode-key {_FILE},{key.name} if each file counts its own episodes, or sort the table by it"
    raise FormatError(
        f"{file.path}: {len(again):,} of the values of {key.name} come again after another one: {shown}{more}",
        hint=hint,
    )


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)
