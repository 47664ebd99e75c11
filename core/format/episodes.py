"""The episode table (one row per episode, in storage order) and selections of episodes such as `0:100,250`."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError, FormatError, UsageError, did_you_mean
from ..ted.episodes import BoundaryCounts, EndReason, Final
from ..ted.schema import Array, Field
from .documents import decode, dump_json, parse_json
from .files import FileRecord
from .manifest import HIDDEN, SCORES
from .memmap.tree import TreeWriter, leaf_path, parse_node, write_listed

EpisodeRanges: TypeAlias = Sequence[tuple[int, int | None]]
"""Half-open ranges of the source's episode numbers; an open end is None. A range of one requires that episode."""

_PART = re.compile(r"\s*(?:(\d+)|(\d*):(\d*))\s*")


def parse_episodes(text: str) -> list[tuple[int, int | None]]:
    """Read a selection as sorted half-open ranges; an open end is None.

    Ranges that touch are merged. A single number stays a range of its own, even inside another one: it requires exactly
    this episode, whereas a range takes the episodes that exist. UsageError for anything but numbers and `A:B` ranges
    joined by commas.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"--episodes {text!r} is not understood at {part!r}", hint="write it like 0:100,250")
        single, low, high = match.groups()
        first, stop = (int(single), int(single) + 1) if single else (int(low or 0), int(high) if high else None)
        if stop is not None and stop <= first:
            raise UsageError(f"--episodes {part.strip()!r} holds no episode: ranges run from A up to, not including, B")
        ranges.append((first, stop))
    singles = {part for part in ranges if _is_single(part)}
    merged = _merge(sorted((part for part in ranges if part not in singles), key=_first))
    return sorted([*merged, *singles], key=lambda part: (part[0], part[1] is None, part[1]))


def _is_single(part: tuple[int, int | None]) -> bool:
    return part[1] == part[0] + 1


def _merge(ranges: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    merged: list[tuple[int, int | None]] = []
    for first, stop in ranges:
        if merged and (merged[-1][1] is None or first <= merged[-1][1]):
            before = merged[-1][1]
            merged[-1] = (merged[-1][0], None if before is None or stop is None else max(before, stop))
        else:
            merged.append((first, stop))
    return merged


def normal_form(selection: str | EpisodeRanges) -> str | None:
    """Write a selection in its normal form; None means everything.

    Selections of the same episodes have the same normal form, provided that all these episodes exist. It identifies a
    request, and is not used to select.
    """
    parts = _merge(sorted(parse_episodes(selection) if isinstance(selection, str) else selection, key=_first))
    if parts == [(0, None)]:
        return None
    return ",".join(str(a) if _is_single((a, b)) else f"{a}:{'' if b is None else b}" for a, b in parts)


def _first(part: tuple[int, int | None]) -> int:
    return part[0]


def select_episodes(ranges: EpisodeRanges, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of the selected episodes, in storage order.

    A range takes the episodes that exist. UsageError if a single number does not exist, or if nothing is selected.
    """
    known = sorted(set(numbers))
    chosen: set[int] = set()
    for part in ranges:
        first, stop = part
        found = known[bisect_left(known, first) : len(known) if stop is None else bisect_left(known, stop)]
        if _is_single(part) and not found:
            raise UsageError(f"--episodes asks for episode {first}, which is not there: {_there(known)}")
        chosen.update(found)
    if not chosen:
        asked = normal_form(ranges) or ":"
        raise UsageError(f"--episodes {asked} holds none of the episodes that are there: {_there(known)}")
    return [number for number in numbers if number in chosen]


def expected_episodes(ranges: EpisodeRanges, count: int) -> int:
    """Estimate how many of `count` episodes are chosen before their numbers are known, as if these had no gaps.

    UsageError if the selection is wrong for any numbers: more single episodes than exist, or no episode at all.
    """
    singles = sum(_is_single(part) for part in ranges)
    if singles > count or not count:
        asked = f"{singles} single episodes" if singles else normal_form(ranges) or "':'"
        raise UsageError(f"--episodes is {asked}, expected a choice of the {count} that there are")
    merged = _merge(sorted(ranges, key=_first))
    return sum(max(0, (count if stop is None else min(stop, count)) - first) for first, stop in merged)


def _there(known: Sequence[int]) -> str:
    return f"there are {len(known)} ({f'{known[0]} to {known[-1]}' if known else 'none'})"


EPISODES = f"{HIDDEN}/episodes"
EPISODES_TEXT = f"{HIDDEN}/episodes_text.jsonl"

COLUMNS: dict[str, str] = {
    "episode": "int64", "start": "int64", "length": "int64", "return": "float64",
    "terminated": "bool", "truncated": "bool", "end_reason": "uint8",
    "explicit_next": "bool", "explicit_start": "int64", "seed": "uint64", "has_seed": "bool",
}  # fmt: skip
"""Columns of the table and their element types."""

FINAL = "final"
"""The column that is stored only if the source has no observation after the last step of some episode."""
_LATER = {FINAL: "uint8"}
ALL_COLUMNS = COLUMNS | _LATER
SCORE = "score."
"""Prefix of the names of scores: columns of float64 that `score` adds, NaN for an episode without the score.

Scores describe the content but do not belong to it: they are stored in a separate folder, outside the content digest.
"""


def column_types(table: EpisodeTable) -> dict[str, str]:
    """Return the names and element types of the columns that are stored for a table, without its scores."""
    return COLUMNS | (_LATER if table.final.any() else {})


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode: the source's number, its length in steps, the sum of its rewards, how it ends."""

    episode: int
    length: int
    total_reward: float
    terminated: bool
    truncated: bool
    end_reason: EndReason
    seed: int | None = None
    explicit_next: bool = False
    final: Final = Final.OBSERVED


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTable:
    """The episode table: its columns as arrays `[episodes]`.

    `start` and `length` count rows of the storage. `final` has the numbers of `Final`, which state where the
    observation after the last step comes from. `scores` are further columns by their names.
    """

    episode: Array
    start: Array
    length: Array
    total_reward: Array
    terminated: Array
    truncated: Array
    end_reason: Array
    explicit_next: Array
    explicit_start: Array
    seed: Array
    has_seed: Array
    final: Array
    scores: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.episode)

    @classmethod
    def from_rows(cls, rows: Sequence[EpisodeRow]) -> EpisodeTable:
        """Build the table of episodes stored one after another from row 0."""
        lengths = np.array([row.length for row in rows], np.int64)
        return cls.from_columns(
            {
                "episode": [row.episode for row in rows],
                "start": np.cumsum(lengths) - lengths,
                "length": lengths,
                "return": [row.total_reward for row in rows],
                "terminated": [row.terminated for row in rows],
                "truncated": [row.truncated for row in rows],
                "end_reason": [int(row.end_reason) for row in rows],
                "explicit_next": [row.explicit_next for row in rows],
                "explicit_start": [-1] * len(rows),
                "seed": [row.seed or 0 for row in rows],
                "has_seed": [row.seed is not None for row in rows],
                FINAL: [int(row.final) for row in rows],
            }
        )

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> EpisodeTable:
        """Build the table from its columns under their names on disk; without `final`, all ends are observed."""
        arrays = {name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
        arrays[FINAL] = np.asarray(columns.get(FINAL, np.zeros(len(arrays["episode"]))), _LATER[FINAL])
        arrays["total_reward"] = arrays.pop("return")
        scores = {name: np.asarray(column, np.float64) for name, column in columns.items() if name.startswith(SCORE)}
        return cls(**arrays, scores=scores)

    @classmethod
    def joined(cls, parts: Sequence[EpisodeTable]) -> EpisodeTable:
        """Build the table of episodes stored one after another, from the tables of one or more parts."""
        columns = cls.joined_columns(parts)
        columns["start"] = np.cumsum(columns["length"]) - columns["length"]
        return cls.from_columns(columns)

    @classmethod
    def joined_columns(cls, parts: Sequence[EpisodeTable]) -> dict[str, Array]:
        """Return the columns of one or more tables, one after another; a part without a score has NaN there."""
        listed = [part.columns() | {FINAL: part.final} for part in parts]
        scores = dict.fromkeys(name for part in parts for name in part.scores)
        return {
            name: np.concatenate([own[name] if name in own else np.full(len(own[FINAL]), np.nan) for own in listed])
            for name in (*COLUMNS, FINAL, *scores)
        }

    def columns(self) -> dict[str, Array]:
        """Return the columns under their names on disk, including `final` if not all ends are observed."""
        arrays = {part.name: getattr(self, part.name) for part in fields(self)}
        stored = {name: arrays["total_reward" if name == "return" else name] for name in column_types(self)}
        return stored | dict(self.scores)

    def score(self, name: str) -> Array:
        """Return a score of all episodes, such as `score.quality`; UsageError if some episode does not have it."""
        self.require_scores([name])
        if lacking := int(np.isnan(found := self.scores[name]).sum()):
            raise UsageError(
                f"{lacking:,} of {len(self):,} episodes have no {name}",
                hint="rbtool score DATASET --dest DEST scores all of them",
            )
        return found

    def require_scores(self, names: Iterable[str]) -> None:
        """Raise UsageError for the name of a score that the table does not have."""
        for name in names:
            if name not in self.scores:
                there = ", ".join(self.scores)
                there = f"there are {there}" if there else "make a copy that has them: rbtool score DATASET --dest DEST"
                raise UsageError(f"the episodes have no {name!r}{did_you_mean(name, self.scores)}", hint=there)

    def chosen(self, rows: Array) -> EpisodeTable:
        """Return the table of the episodes in these rows, stored one after another, without explicit next rows."""
        columns = {name: column[rows] for name, column in self.columns().items()}
        columns["start"] = np.cumsum(columns["length"]) - columns["length"]
        columns["explicit_start"] = np.full(len(rows), -1, np.int64)
        return EpisodeTable.from_columns(columns)

    @property
    def steps(self) -> int:
        """Rows of all episodes together."""
        return int(self.length.sum())

    def covers(self, steps: int) -> bool:
        """Return whether the episodes cover this many steps without gaps, each with at least one step."""
        in_order = np.array_equal(self.start, np.cumsum(self.length) - self.length)
        return in_order and self.steps == steps and not (self.length < 1).any()

    def counts(self) -> BoundaryCounts:
        """The boundary report."""
        by_reason = np.bincount(self.end_reason, minlength=len(EndReason))
        reasons = {reason.name.lower(): int(by_reason[reason]) for reason in EndReason}
        finals = np.bincount(self.final, minlength=len(Final))
        return BoundaryCounts(
            **reasons,
            explicit_next=int(self.explicit_next.sum()),
            final_repeated=int(finals[Final.REPEATED]),
            final_dropped=int(finals[Final.DROPPED]),
        )

    def index_of_step(self, steps: Array) -> Array:
        """Return the rows of this table that hold these steps, int64 `[n]`."""
        return np.searchsorted(self.start, steps, side="right") - 1

    def save(self, root: Path) -> list[FileRecord]:
        """Write the table into the dataset folder `root`."""
        columns = self.columns()
        records = _write_columns(root, EPISODES, column_fields(self), columns)
        return records + (self.save_scores(root) if self.scores else [])

    def save_scores(self, root: Path) -> list[FileRecord]:
        """Write the scores into the dataset folder `root`."""
        columns = {name.removeprefix(SCORE): column for name, column in self.scores.items()}
        return _write_columns(root, _SCORES, [Field((name,), "float64", (), "info") for name in columns], columns)

    @classmethod
    def load(cls, read: Callable[[str], bytes], origin: str, *, scored: bool = False) -> EpisodeTable:
        """Read the table of the dataset folder `origin`, with its scores if `scored`.

        `read` returns the bytes of a file, given its path inside the folder.
        """
        columns = _read_columns(read, origin, EPISODES, ALL_COLUMNS)
        if scored:
            found = _read_columns(read, origin, _SCORES, None)
            columns |= {f"{SCORE}{name}": column for name, column in found.items()}
        if len({len(column) for column in columns.values()}) > 1:
            raise CorruptDataError(f"{origin}: the columns of the episode table differ in length")
        if FINAL in columns and columns[FINAL].size and columns[FINAL].max() >= Final.MISSING:
            raise CorruptDataError(f"{origin}/{EPISODES} has the number {columns[FINAL].max()} in {FINAL!r}")
        return cls.from_columns(columns)


_SCORES = SCORES.rstrip("/")


def has_scores(files: Iterable[FileRecord]) -> bool:
    """Return whether a dataset of these files has scores of its episodes."""
    return any(file.path.startswith(SCORES) for file in files)


def _write_columns(root: Path, folder: str, stored: Sequence[Field], columns: Mapping[str, Array]) -> list[FileRecord]:
    rows = len(next(iter(columns.values())))
    writer = TreeWriter(root / folder, stored, prefix=f"{folder}/", rows=rows)
    try:
        writer.append({one.key: columns[one.key[0]] for one in stored})
        return writer.finish((rows,))
    finally:
        writer.close()


def _read_columns(
    read: Callable[[str], bytes], origin: str, folder: str, types: Mapping[str, str] | None
) -> dict[str, Array]:
    """Read the columns of these types, or all as float64."""
    leaves = parse_node(read(f"{folder}/meta.json"), f"{origin}/{folder}/meta.json")
    columns = {}
    for name, dtype in (dict.fromkeys(leaves, "float64") if types is None else types).items():
        leaf = leaves.get(name)
        if leaf is None and name in _LATER:
            continue
        if leaf is None or leaf.dtype != dtype or len(leaf.shape) != 1:
            raise FormatError(f"{origin}/{folder} has no column {name!r} of {dtype}")
        path = f"{folder}/{leaf_path((name,))}"
        data = read(path) if leaf.shape[0] else b""
        if len(data) != leaf.shape[0] * np.dtype(dtype).itemsize:
            raise CorruptDataError(f"{origin}/{path} has {len(data):,} bytes, expected {leaf.shape[0]:,} rows")
        columns[name] = np.frombuffer(data, dtype).copy()
    return columns


def column_fields(table: EpisodeTable) -> list[Field]:
    """Return the columns of a table, without its scores, as fields."""
    return [Field((name,), dtype, (), "id") for name, dtype in column_types(table).items()]


def episode_text_bytes(rows: Iterable[Mapping[str, str]]) -> bytes:
    """Write the texts of episodes, one JSON object a line in table order; no bytes if no episode has a text."""
    lines = [dump_json(dict(row), sort_keys=True) if row else "{}" for row in rows]
    return ("\n".join(lines) + "\n").encode() if any(line != "{}" for line in lines) else b""


def parse_episode_text(data: bytes, origin: str) -> list[dict[str, str]]:
    """Undo `episode_text_bytes`; `origin` names the bytes in errors."""
    try:
        # Not splitlines(), which also splits at U+2028 and similar characters inside a text.
        lines = [line for line in data.decode().split("\n") if line]
        return [decode(dict[str, str], parse_json(line, origin), origin) for line in lines]
    except ValueError as error:  # a FormatError is one
        raise CorruptDataError(f"{origin} is not JSON lines: {error}") from error


def write_episode_text(root: Path, rows: Iterable[Mapping[str, str]]) -> list[FileRecord]:
    """Write the texts of episodes into the dataset folder `root`; no file if no episode has a text."""
    data = episode_text_bytes(rows)
    return [write_listed(root, EPISODES_TEXT, data)] if data else []
