"""Which rows of RLlib's files are an episode: runs of rows of one id, joined across lines and files.

Rows of a worker's environments take turns in its files, and files cut episodes. In this order:

- a row with a flag ends its episode;
- rows belong together that have the same `eps_id` (and `agent_index`), in the order of `t` where there is one;
- where `t` does not continue, a new episode begins: rows are missing, or the id is used again;
- without `t`, rows of an id that are neighbors in a batch belong together; others do if the observation after the one
  row is the other row's. Without `new_obs`, rows of an id in different batches do not belong together, and those in
  one batch do;
- without `eps_id`, neighboring rows of a file belong together if `t` continues and the observation after the one row is
  the other row's. With neither `t` nor `new_obs`, rows of one batch do.

A batch is a line with a SampleBatch, or all transitions of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array
from .blocks import AGENTS, EPS_ID, NEXT_OBS, OBS, STEP, RowBlock


@dataclass(slots=True)
class IdRun:
    """Rows `[start, stop)`, counted over all files, of one id in one file.

    `first` and `last` are values of `t`, `before` and `after` the observations before and after the rows, None where
    they are not known. `batch` and `last_batch` hold the first and the last row. `named`: there is an `eps_id`.
    """

    key: tuple[Any, ...]
    start: int
    stop: int
    file: int
    ended: bool
    first: int | None = None
    last: int | None = None
    before: bytes | None = None
    after: bytes | None = None
    batch: int = 0
    last_batch: int = 0
    named: bool = True

    def continues(self, other: IdRun) -> bool:
        """Whether this is what comes after `other`, a run of the same id."""
        if other.ended:
            return False
        adjacent = self.file == other.file and self.start == other.stop
        one_batch = self.file == other.file and self.batch == other.last_batch
        compares = self.before is not None and other.after is not None
        if self.first is not None and other.last is not None:
            follows = self.first == other.last + 1
            return follows and (self.named or (adjacent and (not compares or self.before == other.after)))
        if compares:
            return (self.named and adjacent and one_batch) or self.before == other.after
        return one_batch and (self.named or adjacent)

    @property
    def is_bare(self) -> bool:
        """Whether neither `t` nor `new_obs` can show what follows."""
        return self.last is None and self.after is None


@dataclass(frozen=True, slots=True)
class IdEpisode:
    """The rows of an episode: ranges over all files, in order.

    `inferred`: no flag showed its end, but a gap, or, if `unshown`, the end of a batch after which nothing shows that
    rows follow.
    """

    key: tuple[Any, ...]
    ranges: tuple[tuple[int, int], ...]
    inferred: bool
    starts_late: bool
    unshown: bool = False

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def runs_of(block: RowBlock, ends: Array, start: int, file: int) -> Iterator[IdRun]:
    """Cut a block, whose first row is `start`, into runs; `ends` is bool, true in rows that end an episode."""
    columns = [
        block.text[(name,)] if (name,) in block.text else block.columns.get((name,)) for name in (EPS_ID, *AGENTS)
    ]
    given = [column for column in columns if column is not None]
    if any(column.ndim > 1 for column in given):
        raise FormatError(f"{EPS_ID} and {' or '.join(AGENTS)} have to be single values")
    steps = block.columns.get((STEP,))
    batches = np.zeros(block.rows, np.int64) if block.batches is None else block.batches
    cut = ends[:-1] | (batches[1:] != batches[:-1])
    for column in given:
        cut |= column[1:] != column[:-1]
    if steps is not None:
        cut |= steps[1:] != steps[:-1] + 1
    named = bool(given)
    pairs = [] if named and steps is not None else _observations(block)
    for seen, after in [] if named else pairs:
        cut |= _differ(after[:-1], seen[1:])
    begins = [0, *(np.flatnonzero(cut) + 1).tolist(), block.rows]
    for begin, stop in pairwise(begins):
        run = IdRun(_key(given, begin) or (file,), start + begin, start + stop, file, bool(ends[stop - 1]), named=named)
        run.batch = run.last_batch = int(batches[begin])
        if steps is not None:
            run.first, run.last = int(steps[begin]), int(steps[stop - 1])
        if pairs:
            run.before = _row([seen for seen, _ in pairs], begin)
            run.after = _row([after for _, after in pairs], stop - 1)
        yield run


def _observations(block: RowBlock) -> list[tuple[Array, Array]]:
    """Return the columns of observations, each with its column of next observations; none where they are not alike."""
    seen = {path[1:]: array for path, array in sorted(block.columns.items()) if path[0] == OBS}
    after = {path[1:]: array for path, array in block.columns.items() if path[0] == NEXT_OBS}
    if seen.keys() != after.keys() or any(after[name].shape != array.shape for name, array in seen.items()):
        return []
    return [(array, after[name]) for name, array in seen.items()]


def _differ(rows: Array, others: Array) -> Array:
    """Return in which rows the bits of two arrays of one shape differ: bool `[rows]`."""
    dtype = np.result_type(rows, others)
    size = int(np.prod(rows.shape[1:], dtype=np.int64)) * dtype.itemsize
    one, other = (
        np.frombuffer(np.ascontiguousarray(array, dtype).tobytes(), np.uint8).reshape(len(array), size)
        for array in (rows, others)
    )
    differ: Array = (one != other).any(axis=1)
    return differ


def _key(columns: Sequence[Array], row: int) -> tuple[Any, ...]:
    return tuple(column[row].item() if isinstance(column[row], np.generic) else column[row] for column in columns)


def _row(columns: Sequence[Array], row: int) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for column in columns:
        found.update(np.asarray(column[row], np.float64).tobytes())
    return found.digest()


class IdRuns:
    """The runs of all files, as they are found."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], list[IdRun]] = {}
        self._last: IdRun | None = None

    def add(self, run: IdRun) -> None:
        """Take the next run of the files; one that continues the last becomes part of it."""
        last = self._last
        adjacent = last is not None and last.key == run.key and (last.file, last.stop) == (run.file, run.start)
        if last is not None and adjacent and run.continues(last):
            last.stop, last.last, last.after, last.ended = run.stop, run.last, run.after, run.ended
            last.last_batch = run.last_batch
            return
        self._by_key.setdefault(run.key, []).append(run)
        self._last = run

    def episodes(self) -> list[IdEpisode]:
        """Join the runs to episodes, in the order of their first rows."""
        found = [episode for runs in self._by_key.values() for episode in _joined(_in_order(runs))]
        return sorted(found, key=lambda episode: min(start for start, _ in episode.ranges))


def _in_order(runs: list[IdRun]) -> list[IdRun]:
    """Order the runs of an id by `t`, unless the id was used again: then steps occur twice, or follow an end."""
    if any(run.first is None or not run.named for run in runs):
        return runs
    ordered = sorted(runs, key=lambda run: (run.first or 0, run.start))
    for one, other in pairwise(ordered):
        if one.ended or (one.last or 0) >= (other.first or 0):
            return runs
    return ordered


def _joined(runs: Sequence[IdRun]) -> Iterator[IdEpisode]:
    current: list[IdRun] = []
    for run in runs:
        if current and not run.continues(current[-1]):
            yield _episode(current, inferred=not current[-1].ended, unshown=current[-1].is_bare)
            current = []
        current.append(run)
    if current:
        yield _episode(current, inferred=False)


def _episode(runs: Sequence[IdRun], *, inferred: bool, unshown: bool = False) -> IdEpisode:
    ranges = tuple((run.start, run.stop) for run in runs)
    return IdEpisode(runs[0].key, ranges, inferred, bool(runs[0].first), inferred and unshown)
