"""Turns a reader's pieces and blocks into TED rows and the episode table; computes the returns of episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..ted.episodes import EndReason, end_reason, rows_equal
from ..ted.schema import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    SINGLETONS,
    Field,
    Key,
    Timing,
    as_numbers,
    key_name,
)
from .contracts import Array, EpisodeBlock, Piece, StepReader
from .episodes import FINAL, EpisodeRow, EpisodeTable
from .manifest import Manifest
from .memmap.tree import Rows, as_array


def running_return(total: float, rewards: Array) -> float:
    """Add rewards to a return strictly one after another, so that the sum does not depend on how they are divided."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data, and their sum may be NaN
        numbers = np.concatenate(([total], rewards.reshape(-1).astype(np.float64)))
        return float(np.add.accumulate(numbers)[-1])


class EpisodeSummary:
    """Summarises the pieces of one episode, added in order, to its row of the episode table."""

    def __init__(self, first: Piece) -> None:
        self.text = dict(first.text)
        self._episode = first.episode
        self._seed = first.seed
        self._length = 0
        self._total = 0.0
        self._explicit = False
        self._after: dict[Key, Array] = {}

    def add(self, piece: Piece) -> None:
        """Add the next piece. FormatError where a state does not continue from the last row of the piece before."""
        for key, array in piece.columns.items():
            if key in piece.next or len(array) > len(piece):
                self._follow(piece, key)
        if REWARD in piece.columns:
            self._total = running_return(self._total, piece.columns[REWARD])
        self._length += len(piece)

    def _follow(self, piece: Piece, key: Key) -> None:
        """Compare the rows of a state after each step with the rows before the next step, bit for bit."""
        before, after = piece.rows_before(key), piece.rows_after(key)
        last = self._after.get(key)
        joined = last is None or bool(rows_equal(last, before[:1]).all())
        self._after[key] = after[-1:].copy()
        if key in piece.next:
            self._explicit |= not joined or not rows_equal(after[:-1], before[1:]).all()
        elif not joined:
            raise FormatError(
                f"episode {piece.episode}: {key_name(key)!r} of step {self._length} is not the row that the piece "
                "before it ends with"
            )

    def row(self, last: Piece) -> EpisodeRow:
        """Return the row of the table, after the last piece was added."""
        terminated, truncated = bool(last.terminated[-1]), bool(last.truncated[-1])
        reason, unflagged = end_reason(terminated, truncated), not (terminated or truncated)
        if unflagged and last.inferred:
            reason = EndReason.INFERRED
        return EpisodeRow(
            self._episode, self._length, self._total, terminated, truncated or unflagged,
            reason, self._seed, self._explicit, last.final,
        )  # fmt: skip


class RowTarget(Protocol):
    """An object to which TED rows are appended, like `RowBuilder`; by `append_fresh` if it has that method."""

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append the same number of rows to every leaf; `last`, bool `[n]`, marks those that end an episode."""


class Ingest:
    """Feeds pieces and blocks to a builder and gathers the episode `table` and the `text` of the episodes.

    An episode whose last step has neither flag is kept whole; that step becomes `truncated` and `done`, with the end
    reason "end of file". Flags inside an episode stay as they are. If a piece has its own next rows, they are stored
    under `next`, and the table marks episodes in which they differ from the following rows (`explicit_next`).
    """

    def __init__(self, builder: RowTarget, source: Sequence[tuple[Field, Timing]]) -> None:
        self.text: list[dict[str, str]] = []
        self._builder = builder
        self._source = [(field.key, timing) for field, timing in source]
        self._open: EpisodeSummary | None = None
        self._rows: list[EpisodeRow] = []  # those after the episodes of `_tables`
        self._tables: list[EpisodeTable] = []

    @property
    def table(self) -> EpisodeTable:
        """The table of the episodes that have ended."""
        return EpisodeTable.joined([*self._tables, EpisodeTable.from_rows(self._rows)])

    def run(self, parts: Iterable[EpisodeBlock | Piece], progress: Callable[[int], None] = lambda steps: None) -> None:
        """Take all pieces and blocks; `progress` takes how many steps each brought."""
        for part in parts:
            if isinstance(part, Piece):
                self.add(part)
            else:
                self.add_block(part)
            progress(len(part))

    def add_block(self, block: EpisodeBlock) -> None:
        """Add a block in which every state has its `next`. FormatError if it arrives inside an episode."""
        if self._open is not None:
            raise FormatError(f"a block came before the last piece of the episode before {block.episodes[0]}")
        ends, truncated = block.stops - 1, block.truncated
        unflagged = ~(block.terminated[ends] | truncated[ends])
        if unflagged.any():
            truncated = truncated.copy()
            truncated[ends[unflagged]] = True
        last = np.zeros(len(block), bool)
        last[ends] = True
        columns = self._ted_columns((block.terminated, truncated), block.columns, block.next)
        columns[EPISODE] = np.repeat(block.episodes.astype(np.int64), block.lengths)
        self._append(columns, last)
        self._tables += [EpisodeTable.from_rows(self._rows)] if self._rows else []
        self._rows = []
        self._tables.append(_table_of(block, truncated, unflagged))
        self.text.extend(map(dict, block.text or [{}] * len(ends)))

    def add(self, piece: Piece) -> None:
        """Add one piece. FormatError if it does not continue the previous one, or has a wrong number of rows."""
        summary = EpisodeSummary(piece) if piece.first else self._open
        if summary is None:
            raise FormatError(f"episode {piece.episode} came without its first piece")
        truncated = self._end(piece) if piece.last else piece.truncated
        columns = self._columns(piece, truncated)
        summary.add(piece)
        last = np.zeros(len(piece), bool)
        last[-1:] = piece.last
        self._append(columns, last)
        self._open = None if piece.last else summary
        if piece.last:
            self._rows.append(summary.row(piece))
            self.text.append(summary.text)

    def _append(self, columns: Mapping[Key, Rows], last: Array) -> None:
        fresh = getattr(self._builder, "append_fresh", None)
        if fresh is None:
            self._builder.append({key: as_array(rows) for key, rows in columns.items()}, last)
        else:
            fresh(columns, last)

    def _end(self, piece: Piece) -> Array:
        if not len(piece):
            raise FormatError(f"episode {piece.episode} has no steps; every episode needs one at least")
        if piece.is_unfinished:
            raise FormatError(f"episode {piece.episode} has no observation after its last step")
        if end_reason(bool(piece.terminated[-1]), bool(piece.truncated[-1])) is not EndReason.END_OF_FILE:
            return piece.truncated
        truncated = piece.truncated.copy()
        truncated[-1] = True
        return truncated

    def _columns(self, piece: Piece, truncated: Array) -> dict[Key, Rows]:
        steps = len(piece)
        before, after = dict(piece.columns), dict(piece.next)
        for key, timing in self._source:
            expected = piece.rows_of(key, timing)
            if len(piece.columns[key]) != expected:
                raise FormatError(
                    f"episode {piece.episode}: {key_name(key)!r} has {len(piece.columns[key])} rows for {steps} steps, "
                    f"expected {expected}"
                )
            if timing == "state":
                before[key], after[key] = piece.rows_before(key), piece.rows_after(key)
        columns = self._ted_columns((piece.terminated, truncated), before, after)
        return columns | {EPISODE: np.full(steps, piece.episode, np.int64)}

    def _ted_columns(
        self, flags: tuple[Array, Array], before: Mapping[Key, Rows], after: Mapping[Key, Rows]
    ) -> dict[Key, Rows]:
        """Arrange columns as TED, without the episode numbers; `flags` are terminated and truncated."""
        terminated, truncated = flags
        columns: dict[Key, Rows] = {
            NEXT_TERMINATED: terminated[:, None],
            NEXT_TRUNCATED: truncated[:, None],
            NEXT_DONE: (terminated | truncated)[:, None],
        }
        for key, timing in self._source:
            if timing == "state":
                columns[key], columns[NEXT, *key] = before[key], after[key]
            elif timing == "step":
                columns[key] = before[key]
            else:
                columns[NEXT, *key] = as_array(before[key])[:, None] if key in SINGLETONS else before[key]
        return columns


def _table_of(block: EpisodeBlock, truncated: Array, unflagged: Array) -> EpisodeTable:
    """Return the episode table of a block; `unflagged` marks episodes whose last step has no flag in the source."""
    ends, count = block.stops - 1, len(block.episodes)
    terminated, by_limit = block.terminated[ends], block.truncated[ends]
    reasons = np.where(terminated, np.where(by_limit, EndReason.BOTH, EndReason.TERMINATED), EndReason.TRUNCATED)
    inferred = np.zeros(count, bool) if block.inferred is None else block.inferred
    reasons[unflagged] = np.where(inferred, EndReason.INFERRED, EndReason.END_OF_FILE)[unflagged]
    totals, rewards = np.zeros(count), block.columns.get(REWARD)
    if rewards is not None and (found := as_array(rewards)).size:
        width = found.size // len(block)
        totals = episode_returns(found.reshape(-1).astype(np.float64), block.starts * width, block.lengths * width)
    return EpisodeTable.from_columns(
        {
            "episode": block.episodes, "start": block.starts, "length": block.lengths, "return": totals,
            "terminated": terminated, "truncated": truncated[ends], "end_reason": reasons,
            "explicit_next": block.explicit_episodes(), "explicit_start": np.full(count, -1),
            "seed": np.zeros(count), "has_seed": np.zeros(count, bool), FINAL: block.final,
        }
    )  # fmt: skip


_STEPS_TO_NEXT: Key = ("steps_to_next_obs",)
_ONE_STEP: Key = (NEXT, "original_reward")
_N_STEP = "n-step"
_MOST_STEPS = 1 << 20
"""The number of steps whose rewards are in memory at once."""


def return_field(fields: Iterable[Field], made_by: Iterable[Mapping[str, Any]] = ()) -> Field | None:
    """Return the leaf that adds up to the return of an episode; None if no leaf has one real reward a step."""
    field = one_step_reward(fields, made_by)
    return field if field is not None and _is_number(field) else None


def one_step_reward(fields: Iterable[Field], made_by: Iterable[Mapping[str, Any]] = ()) -> Field | None:
    """Return the leaf with the reward of single steps; None if there is none.

    In n-step data, `next.reward` is a sum over a window, and windows overlap; such data keeps the rewards of single
    steps as `next.original_reward`. It is recognised by `steps_to_next_obs`, or by the operation's name in `made_by`,
    the arguments in its provenance.
    """
    by_key = {field.key: field for field in fields}
    n_step = _STEPS_TO_NEXT in by_key or _ONE_STEP in by_key or any(map(_sums_rewards, made_by))
    return by_key.get(_ONE_STEP if n_step else NEXT_REWARD)


def _is_number(field: Field) -> bool:
    return field.shape in {(), (1,)} and "complex" not in field.dtype


def return_field_of(manifest: Manifest) -> Field | None:
    """Return the `return_field` of the rows that a manifest describes."""
    return return_field(manifest.fields, (step.arguments for step in manifest.provenance))


def _sums_rewards(arguments: Mapping[str, Any]) -> bool:
    operations = arguments.get("operations")
    parts = operations if isinstance(operations, list) else []
    return any(isinstance(part, Mapping) and part.get("name") == _N_STEP for part in parts)


def table_with_returns(reader: StepReader) -> EpisodeTable:
    """Return the episode table of a dataset or checkpoint with the returns of its rows, NaN where they are unknown.

    The tables of n-step data that rbtool 0.1 wrote hold sums of overlapping rewards; these returns are computed again,
    in bounded memory. All other tables are returned as they are.
    """
    table, field = reader.episodes, return_field_of(reader.manifest)
    if returns_are_known(reader.manifest) and (field is None or field.key == NEXT_REWARD):
        return table
    return replace(table, total_reward=sum_rewards(reader, table.start, table.length))


def returns_are_known(manifest: Manifest) -> bool:
    """Return whether returns are known: not if only rewards summed over n steps are stored."""
    return return_field_of(manifest) is not None or not any(
        field.key == NEXT_REWARD and _is_number(field) for field in manifest.fields
    )


def episode_return(columns: Mapping[Key, Array], fields: Iterable[Field]) -> float:
    """Return the return of an episode, given the rows of its leaves: 0 without rewards, NaN as by `sum_rewards`."""
    field = one_step_reward(fields)
    if field is not None and field.key in columns:
        return running_return(0.0, as_numbers(columns[field.key], field.dtype))
    return math.nan if NEXT_REWARD in columns else 0.0


def sum_rewards(reader: StepReader, starts: Array, lengths: Array) -> Array:
    """Return the sum of the rewards in each run of steps, float64 `[runs]`, in bounded memory; runs are in order.

    Zeros if steps do not have a single real reward; NaN if rewards are only stored as sums over n steps.
    """
    totals = np.zeros(len(starts))
    field = return_field_of(reader.manifest)
    if field is None:
        return totals if returns_are_known(reader.manifest) else np.full(len(starts), np.nan)
    key, dtype = field.key, field.dtype

    def read(start: int, stop: int) -> Array:
        return as_numbers(reader.read(key, start, stop).reshape(-1), dtype).astype(np.float64)

    stops, row = starts + lengths, 0
    while row < len(starts):
        begin = int(starts[row])
        after = int(np.searchsorted(stops, begin + _MOST_STEPS, side="right"))
        if after > row:
            rewards = read(begin, int(stops[after - 1]))
            totals[row:after] = episode_returns(rewards, starts[row:after] - begin, lengths[row:after])
        else:  # one episode that is longer than all that is read at once
            after = row + 1
            for start in range(begin, int(stops[row]), _MOST_STEPS):
                totals[row] = running_return(totals[row], read(start, min(start + _MOST_STEPS, int(stops[row]))))
        row = after
    return totals


def episode_returns(rewards: Array, starts: Array, lengths: Array) -> Array:
    """Add the rewards of each episode strictly one after another, as `running_return` does for one episode.

    If there are few long episodes, each is summed by itself. Many short ones are summed together: first their first
    rewards, then their second ones, and so on, the longest episodes first, so that those that still have a reward are
    always the first `count`.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data, and their sum may be NaN
        if len(starts) <= int(lengths.max()):
            stops = (starts + lengths).tolist()
            sums = [np.add.accumulate(rewards[a:b])[-1] for a, b in zip(starts.tolist(), stops, strict=True)]
            return 0.0 + np.array(sums)
        total, order = np.zeros(len(starts)), np.argsort(-lengths, kind="stable")
        alive = len(starts) - np.searchsorted(np.sort(lengths), np.arange(int(lengths.max())), side="right")
        for step, count in enumerate(alive.tolist()):
            total[order[:count]] += rewards[starts[order[:count]] + step]
        return total


_TOGETHER = 48
"""From this number of trajectories on, a NumPy operation a step (7 µs) is faster than a Python loop (0.13 µs a row)."""


def add_rewards_to_go(totals: Any, ends: NDArray[np.bool_], gamma: float) -> None:
    """Turn rewards into discounted rewards-to-go, in place: each row is added `gamma` times the row after it.

        trajectory   r0 r1 r2 | r3 r4          ends = [0, 0, 1, 0, 1]
        result       r0 + γ (r1 + γ r2),  r1 + γ r2,  r2  |  r3 + γ r4,  r4

    Each trajectory is summed from its end backwards, in the same order whatever the shape. Many trajectories are
    processed together, one step back in all of them at once, the longest first; a few are processed one by one.

    Args:
        totals: the rewards, an array or a tensor `[rows, …]`; integers only for `gamma` 1.
        ends: the last rows of trajectories, bool `[rows]`; the very last row has to be one.
        gamma: the discount.
    """
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    longest = int(lengths.max(initial=0)) if gamma else 0
    if isinstance(totals, np.ndarray) and totals.size == len(totals):
        totals = totals.reshape(-1)
    simple = isinstance(totals, np.ndarray) and totals.ndim == 1 and (gamma == 1 or totals.dtype == np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        if simple and longest > 1 and len(totals) < _TOGETHER * longest:
            for stop, length in zip(last.tolist(), lengths.tolist(), strict=True):
                backwards = totals[stop - length + 1 : stop + 1][::-1]
                if gamma == 1:
                    np.add.accumulate(backwards, out=backwards)
                else:
                    backwards[:] = [*accumulate(backwards.tolist(), lambda total, reward: reward + gamma * total)]
            return
        order = np.argsort(-lengths, kind="stable")
        last, lengths = last[order], lengths[order]
        for back in range(1, longest):
            rows = last[: np.searchsorted(-lengths, -back)] - back
            totals[rows] += totals[rows + 1] if gamma == 1 else gamma * totals[rows + 1]
