"""Which rows of RLlib's files are an episode: runs of rows of one id, joined across lines and files.

Rows of a worker's environments take turns in its files, and files cut episodes. In this order:

- a row with a flag ends its episode;
- without `eps_id`, the rows of a file belong together;
- else rows belong together that have the same `eps_id` (and `agent_index`), in the order of `t` where there is one;
- where `t` does not continue, a new episode begins: rows are missing, or the id is used again;
- without `t`, rows of an id that do not follow each other in one file belong together if the observation after the one
  row is that of the other.
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
    """Rows `[start, stop)`, counted over all files, of one id in one file; `first` and `last` are values of `t`."""

    key: tuple[Any, ...]
    start: int
    stop: int
    file: int
    ended: bool
    first: int | None = None
    last: int | None = None
    before: bytes = b""
    after: bytes = b""

    def continues(self, other: IdRun) -> bool:
        """Whether this is what comes after `other`, a run of the same id."""
        if other.ended:
            return False
        if self.first is not None and other.last is not None:
            return self.first == other.last + 1
        return (self.file == other.file and self.start == other.stop) or self.before == other.after


@dataclass(frozen=True, slots=True)
class IdEpisode:
    """The rows of an episode: ranges over all files, in order. `inferred`: a gap, and no flag, showed its end."""

    key: tuple[Any, ...]
    ranges: tuple[tuple[int, int], ...]
    inferred: bool
    starts_late: bool

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
    cut = ends[:-1].copy()
    for column in given:
        cut |= column[1:] != column[:-1]
    if steps is not None:
        cut |= steps[1:] != steps[:-1] + 1
    begins = [0, *(np.flatnonzero(cut) + 1).tolist(), block.rows]
    seen, after = block.columns.get((OBS,)), block.columns.get((NEXT_OBS,))
    compares = steps is None and seen is not None and after is not None
    for begin, stop in pairwise(begins):
        run = IdRun(_key(given, begin) or (file,), start + begin, start + stop, file, bool(ends[stop - 1]))
        if steps is not None:
            run.first, run.last = int(steps[begin]), int(steps[stop - 1])
        if compares and seen is not None and after is not None:
            run.before, run.after = _row(seen, begin), _row(after, stop - 1)
        yield run


def _key(columns: Sequence[Array], row: int) -> tuple[Any, ...]:
    return tuple(column[row].item() if isinstance(column[row], np.generic) else column[row] for column in columns)


def _row(rows: Array, row: int) -> bytes:
    return hashlib.blake2b(np.asarray(rows[row], np.float64).tobytes(), digest_size=16).digest()


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
            return
        self._by_key.setdefault(run.key, []).append(run)
        self._last = run

    def episodes(self) -> list[IdEpisode]:
        """Join the runs to episodes, in the order of their first rows."""
        found = [episode for runs in self._by_key.values() for episode in _joined(_in_order(runs))]
        return sorted(found, key=lambda episode: min(start for start, _ in episode.ranges))


def _in_order(runs: list[IdRun]) -> list[IdRun]:
    """Order the runs of an id by `t`, unless the id was used again: then steps occur twice, or follow an end."""
    if any(run.first is None for run in runs):
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
            yield _episode(current, inferred=not current[-1].ended)
            current = []
        current.append(run)
    if current:
        yield _episode(current, inferred=False)


def _episode(runs: Sequence[IdRun], *, inferred: bool) -> IdEpisode:
    ranges = tuple((run.start, run.stop) for run in runs)
    return IdEpisode(runs[0].key, ranges, inferred, bool(runs[0].first))
