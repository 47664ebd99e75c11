"""Rows with one for each step, rows with one more for each episode, and comparing rows bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import CorruptDataError
from ..format.contracts import Array, StepReader
from ..format.episodes import FINAL, EpisodeTable
from ..format.returns import sum_rewards
from ..progress import Progress, Silent
from ..ted.episodes import EndReason, rows_equal
from ..ted.schema import NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, as_numbers, key_name

CHUNK_BYTES = 4 << 20
"""Bytes read at once over all leaves; memory that fits into the caches is several times faster than fresh pages."""

LEAF_BYTES = 2 << 20
"""Bytes read at once if one leaf is processed after another."""

FEW_ROWS = 32
"""If most episodes have fewer bytes than this, handling each one separately costs more than copying them."""


def leaf_parts(steps: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Split the rows of one leaf into ranges of about `LEAF_BYTES`, of at least one row each."""
    rows = max(1, LEAF_BYTES // max(1, row_bytes))
    for start in range(0, steps, rows):
        yield start, min(start + rows, steps)


def flags_at(reader: StepReader, key: Key, steps: Array) -> Array:
    """Whether any number of a flag is set at `steps`, which ascend: bool `[n]`; False if the key does not exist."""
    found = np.zeros(len(steps), bool)
    field = next((field for field in reader.fields if field.key == key), None)
    if field is None:
        return found
    for start, stop in leaf_parts(reader.manifest.steps, field.row_bytes):
        low, high = np.searchsorted(steps, (start, stop))
        if low < high:
            rows = as_numbers(reader.read(key, start, stop)[steps[low:high] - start], field.dtype)
            found[low:high] = (rows.reshape(high - low, -1) != 0).any(1)
    return found


def table_of_ends(reader: StepReader, last: Array, flagged: Array) -> EpisodeTable:
    """Make the episode table of rows that contain episodes one after another.

    Args:
        reader: the rows.
        last: the last steps of the episodes, int64 `[episodes]`, ascending.
        flagged: which episodes end with a flag, bool `[episodes]`.
    """
    lengths = np.diff(last, prepend=-1)
    starts, count = last + 1 - lengths, len(last)
    terminated, truncated = flags_at(reader, NEXT_TERMINATED, last), flags_at(reader, NEXT_TRUNCATED, last)
    neither = np.where(flagged, EndReason.INFERRED, EndReason.END_OF_FILE)
    one = np.where(terminated, EndReason.TERMINATED, EndReason.TRUNCATED)
    columns = {
        "episode": np.arange(count), "start": starts, "length": lengths,
        "return": sum_rewards(reader, starts, lengths), "terminated": terminated, "truncated": truncated,
        "end_reason": np.where(terminated & truncated, EndReason.BOTH, np.where(terminated | truncated, one, neither)),
        "explicit_start": np.full(count, -1),
    }  # fmt: skip
    return EpisodeTable.from_columns(
        columns | {name: np.zeros(count) for name in ("explicit_next", "seed", "has_seed")}
    )


class Boundaries:
    """Where episodes end; CorruptDataError for a table in which episodes do not follow one after another."""

    def __init__(self, table: EpisodeTable, steps: int, origin: str) -> None:
        if not table.covers(steps):
            raise CorruptDataError(
                f"{origin}: start and length of the episode table do not place episodes one after another "
                f"over {steps:,} steps",
                hint="see what is wrong with: rbtool check",
            )
        self.starts = table.start
        self.stops = np.cumsum(table.length)
        self.lengths = table.length

    def episode_of(self, steps: Array) -> Array:
        """Return the rows of the episode table to which these steps belong."""
        return np.searchsorted(self.stops, steps, side="right")

    def before(self, step: int) -> int:
        """How many episodes end before this step begins."""
        return int(np.searchsorted(self.stops, step, side="right"))

    def ends(self, start: int, stop: int) -> Array:
        """Return which of the steps `[start, stop)` are the last of their episode, counted from `start`."""
        low, high = np.searchsorted(self.stops, (start, stop), side="right")
        return self.stops[low:high] - 1 - start


def with_ends(root: Array, after: Array, ends: Array) -> Array:
    """Insert the row of `after` behind the row of `root` at each of `ends`: n rows become n + len(ends)."""
    if not len(ends):
        return root
    rows = np.empty((len(root) + len(ends), *root.shape[1:]), root.dtype)
    if rows.size:
        items, extra = _items(rows), _extra(len(rows), ends)
        items[~extra], items[extra] = _items(root), _items(after)[ends]
    return rows


def without_ends(rows: Array, ends: Array) -> Array:
    """Undo `with_ends` for the root rows, or beginning with the second row for the rows of `after`."""
    if not len(ends):
        return rows
    kept = np.empty((len(rows) - len(ends), *rows.shape[1:]), rows.dtype)
    if kept.size:
        np.compress(~_extra(len(rows), ends), _items(rows), out=_items(kept))
    return kept


def differing_rows(one: Array, other: Array) -> Array:
    """Return the numbers of the rows whose bits differ: NaN equals NaN with the same bits, 0.0 does not equal -0.0."""
    return np.flatnonzero(~rows_equal(one, other))


def _extra(rows: int, ends: Array) -> Array:
    """Mark the rows that `with_ends` adds."""
    extra = np.zeros(rows, bool)
    extra[ends + np.arange(1, len(ends) + 1)] = True
    return extra


def _items(array: Array) -> Array:
    """View each row as one opaque item, which NumPy copies several times faster than rows of numbers."""
    whole = np.ascontiguousarray(array)
    return whole.reshape(len(whole), -1).view((np.void, whole.nbytes // len(whole))).reshape(len(whole))


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference in a leaf, in a column of the episode table (`episodes.…`), or in something that concerns the whole.

    Attributes:
        first_step: the first row that differs.
        episode: the source's number of its episode.
        count: how many rows, or episodes, differ.
    """

    key: str
    what: str
    count: int = 0
    first_step: int | None = None
    episode: int | None = None


def compare_steps(one: StepReader, other: StepReader, progress: Progress | None = None) -> list[Difference]:
    """Compare every leaf, the episode table and the texts of episodes, in bounded memory."""
    found = [*_fields(one, other), *_episodes(one, other), *_text(one, other)]
    if one.manifest.steps == other.manifest.steps:
        found = [*_rows(one, other, progress or Silent()), *found]
    return found


def _fields(one: StepReader, other: StepReader) -> Iterator[Difference]:
    if one.manifest.steps != other.manifest.steps:
        yield Difference("steps", f"{one.manifest.steps:,} against {other.manifest.steps:,}")
    here, there = _by_key(one), _by_key(other)
    for key in {**here, **there}:
        if _looks(here.get(key)) != _looks(there.get(key)):
            yield Difference(key_name(key), f"{_looks(here.get(key))} against {_looks(there.get(key))}")


def _by_key(reader: StepReader) -> dict[Key, Field]:
    return {leaf.key: leaf for leaf in reader.fields}


def _looks(leaf: Field | None) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {list(leaf.shape)}"


def _episodes(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = one.episodes, other.episodes
    if len(here) != len(there):
        yield Difference("episodes", f"{len(here):,} against {len(there):,}")
        return
    columns = there.columns() | {FINAL: there.final}
    for name, column in (here.columns() | {FINAL: here.final}).items():
        rows = differing_rows(column, columns[name])
        if len(rows):
            row = int(rows[0])
            what = f"{column[row]} against {columns[name][row]}"
            yield Difference(f"episodes.{name}", what, len(rows), int(here.start[row]), int(here.episode[row]))


def _text(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = (reader.episode_text or [{}] * len(reader.episodes) for reader in (one, other))
    rows = [row for row, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
    if rows:
        first, number = int(one.episodes.start[rows[0]]), int(one.episodes.episode[rows[0]])
        yield Difference("episodes_text", "text differs", len(rows), first, number)
    elif len(here) != len(there):
        yield Difference("episodes_text", f"text of {len(here):,} episodes against {len(there):,}")


def _rows(one: StepReader, other: StepReader, progress: Progress) -> Iterator[Difference]:
    there = _by_key(other)
    alike = [leaf for leaf in one.fields if _looks(leaf) == _looks(there.get(leaf.key))]
    counts, firsts = dict.fromkeys(alike, 0), dict.fromkeys(alike, -1)
    progress.start("comparing", one.manifest.steps, "steps")
    for start, stop in one.chunks(CHUNK_BYTES):
        for leaf in alike:
            rows = differing_rows(one.read(leaf.key, start, stop), other.read(leaf.key, start, stop))
            if len(rows):
                firsts[leaf] = start + int(rows[0]) if not counts[leaf] else firsts[leaf]
                counts[leaf] += len(rows)
        progress.advance(stop - start)
    progress.done()
    for leaf in alike:
        if counts[leaf]:
            first = firsts[leaf]
            episode = int(one.episodes.episode[one.episodes.index_of_step(np.array([first]))[0]])
            yield Difference(leaf.name, "rows differ", counts[leaf], first, episode)
