"""Whole episodes in one table: what readers of long tables give in place of a `Piece` for each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..ted.episodes import Final, rows_equal
from ..ted.schema import Field, Key, Timing, key_name, odd_truths
from .contracts import Array, SourceFacts
from .row_runs import Rows, RowSpans, as_array


@dataclass(frozen=True, slots=True)
class EpisodeBlock:
    """Whole episodes, at least one, whose `n` steps follow each other in every array.

    - `episodes`: the source's numbers of the episodes, int64 `[k]`.
    - `stops`: the row after the last of each episode, int64 `[k]`, ascending; every episode has a step, the last stop
      is `n`.
    - `columns`: by the root keys of the source fields, arrays `[n, *shape]`; of a `state`, the rows before every step.
    - `terminated`, `truncated`: bool `[n]`, true where the flag is set after the step.
    - `final`: numbers of `Final`, uint8 `[k]`: `OBSERVED` or `MISSING`, as in `Piece`.
    - `next`: arrays `[n, *shape]` by the root key of a `state`: what came after each step. A state may be absent where
      every episode is `MISSING`: then the next row of `columns` is what came after a step that is not the last.
    - `inferred`: bool `[k]`, as in `Piece`.
    - `following`: the states of `next` that the core has made of the rows of `columns`; a reader leaves it empty.

    A reader gives arrays; of those, the core may take rows whose copy it puts off (`RowRuns`).

    Seeds and text have no place here: episodes that have them come as pieces. The arrays must stay as they are once the
    block was given.
    """

    episodes: Array
    stops: Array
    columns: Mapping[Key, Rows]
    terminated: Array
    truncated: Array
    final: Array
    next: Mapping[Key, Rows] = field(default_factory=dict)
    inferred: Array | None = None
    following: frozenset[Key] = frozenset()

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def starts(self) -> Array:
        """The first row of each episode, int64 `[k]`."""
        return self.stops - self.lengths

    @property
    def lengths(self) -> Array:
        """The number of steps of each episode, int64 `[k]`."""
        found = self.stops.copy()
        found[1:] -= self.stops[:-1]
        return found

    def explicit_episodes(self) -> Array:
        """Whether what came after a step is not the row before the next one, for each episode; bool `[k]`."""
        found = np.zeros(len(self.episodes), bool)
        for key in self.next.keys() - self.following:
            apart = ~rows_equal(as_array(self.next[key])[:-1], as_array(self.columns[key])[1:])
            apart[self.stops[:-1] - 1] = False
            found[np.searchsorted(self.stops, np.flatnonzero(apart), side="right")] = True
        return found


def completed_block(block: EpisodeBlock, keep: Array, fields: Sequence[tuple[Field, Timing]]) -> EpisodeBlock | None:
    """Decide about last steps without an observation after them, and give every state its `next`.

    `keep`, bool `[k]`, states for each episode whether such a step is kept, with the last observation repeated; else
    it is left out, and the step before it is the truncated end. None where no step is left.
    """
    missing = block.final == Final.MISSING
    left_out = missing & ~keep
    absent = [key for key in _states(fields) if key not in block.next]
    starts, stops = block.starts, block.stops - left_out
    rows = RowSpans(starts, stops) if left_out.any() else None
    if rows is not None and not len(rows):
        return None
    # What came after the steps of an episode: its rows from the second on, and the last one again where that is kept.
    after = RowSpans(*np.stack((starts + 1, block.stops, block.stops - 1, stops), axis=1).reshape(-1, 2).T)

    def kept(array: Rows) -> Rows:
        return array if rows is None else rows.of(as_array(array))

    following = {key: after.of(as_array(block.columns[key])) for key in absent}
    found = replace(
        block,
        columns={key: kept(array) for key, array in block.columns.items()},
        next={key: kept(array) for key, array in block.next.items()} | following,
        terminated=as_array(kept(block.terminated)),
        truncated=as_array(kept(block.truncated)),
        final=np.where(left_out, Final.DROPPED, np.where(missing, Final.REPEATED, block.final)).astype(np.uint8),
        following=frozenset(absent),
    )
    return found if rows is None else _cut(found, block.lengths - left_out, left_out)


def _cut(block: EpisodeBlock, lengths: Array, left_out: Array) -> EpisodeBlock:
    """Count the steps that are left, without the episodes that have none; `left_out` marks new, truncated ends."""
    there = lengths > 0
    stops, truncated = np.cumsum(lengths[there]), block.truncated.copy()
    truncated[stops[left_out[there]] - 1] = True
    return replace(
        block,
        episodes=block.episodes[there],
        stops=stops,
        truncated=truncated,
        final=block.final[there],
        inferred=None if block.inferred is None else block.inferred[there],
    )


def require_block(block: EpisodeBlock, numbers: Sequence[int], whole: SourceFacts, what: str) -> None:
    """Raise FormatError for a block of other episodes than `numbers`, or that is not what the facts announce.

    `what` names the source in messages.
    """
    steps, count = len(block), len(block.episodes)
    if block.episodes.tolist() != list(numbers) or not count:
        raise FormatError(f"{what} came with a block of other episodes, expected those to read")
    lengths = block.lengths
    if len(lengths) != count or (lengths < 1).any() or int(block.stops[-1]) != steps:
        raise FormatError(f"{what} came with a block that does not mark where its episodes end")
    inferred = np.zeros(count, bool) if block.inferred is None else block.inferred
    flags = (
        ("terminated", block.terminated, bool, steps), ("truncated", block.truncated, bool, steps),
        ("final", block.final, np.uint8, count), ("inferred", inferred, bool, count),
    )  # fmt: skip
    for name, found, dtype, expected in flags:
        if found.dtype != dtype or found.shape != (expected,):
            raise FormatError(f"{what}: {name} is {_looks(found)}, expected {np.dtype(dtype)} [{expected}]")
        require_truths(found, name, what)
    lacking = block.final == Final.MISSING
    if not (lacking | (block.final == Final.OBSERVED)).all() or (lacking.any() and not whole.final_missing):
        raise FormatError(f"{what} has no observation after a last step, and the facts do not state that one may lack")
    known = {one.key: one for one, _ in whole.fields}
    states = _states(whole.fields)
    odd = (block.columns.keys() ^ known.keys()) | (block.next.keys() - states)
    if not lacking.all():
        odd |= states - block.next.keys()
    if odd:
        raise FormatError(f"{what} came with other fields than the facts name: {', '.join(sorted(map(key_name, odd)))}")
    for key, rows in (*block.columns.items(), *block.next.items()):
        if rows.dtype != known[key].numpy or rows.shape != (steps, *known[key].shape):
            expected_shape = [steps, *known[key].shape]
            raise FormatError(
                f"{what}: {key_name(key)!r} is {_looks(rows)}, expected {known[key].dtype} {expected_shape}"
            )
        require_truths(as_array(rows), key_name(key), what)


def require_truths(rows: Array, name: str, what: str) -> None:
    """Raise CorruptDataError for bool rows with a byte that is neither 0 nor 1; `name` and `what` are for messages."""
    if rows.dtype.kind == "b" and (odd := odd_truths(rows)).any():
        value = int(rows.view(np.uint8)[odd][0])
        raise CorruptDataError(f"{what}: {name!r} has a truth value of {value}, expected 0 or 1")


def _states(fields: Sequence[tuple[Field, Timing]]) -> set[Key]:
    return {one.key for one, timing in fields if timing == "state"}


def _looks(rows: Rows) -> str:
    return f"{rows.dtype} {list(rows.shape)}"
