"""Finds the episodes in the rows of a storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..checkpoint import FilledStorage, differing_rows, leaf_parts
from ..dataset import Array, EpisodeTable, StepReader, running_return
from ..ted import (
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    EndReason,
    Key,
    as_numbers,
    field_named,
    state_keys,
)
from .lanes import Order

__all__ = ["episode_returns", "find_episodes"]

_MOST_STEPS = 1 << 20
"""Of how many steps the rewards are in memory at once."""


def find_episodes(reader: StepReader, order: Order, filled: FilledStorage, flags: Sequence[Key]) -> EpisodeTable:
    """Make the episode table of rows that lie lane after lane.

    An episode ends where a flag is set, with the last row of a lane, and between the newest and the oldest row.
    Where a flag is set for some agents and not for others, the episode goes on if the next observation follows.
    """
    steps = reader.manifest.steps
    every, some = _flagged(reader, flags)
    partial = some & ~every
    if partial.any():
        every |= partial & _broken(reader)
    ended = every.copy()
    if steps:
        ended.reshape(order.lanes, order.rows)[:, -1] = True
        seam = filled.cursor if filled.cursor and not filled.full else order.rows
        ended.reshape(order.lanes, order.rows)[:, seam - 1] = True
    return _table(reader, ended, every)


def _flagged(reader: StepReader, flags: Sequence[Key]) -> tuple[Array, Array]:
    """Of each step, whether all numbers of some flag are set, and whether any is."""
    steps = reader.manifest.steps
    every, some = np.zeros(steps, bool), np.zeros(steps, bool)
    for key in flags:
        field = field_named(reader.fields, key)
        for start, stop in leaf_parts(steps, field.row_bytes):
            values = as_numbers(reader.read(key, start, stop), field.dtype).reshape(stop - start, -1) != 0
            found = values[:, 0] if values.shape[1] == 1 else values.any(1)
            some[start:stop] |= found
            every[start:stop] |= found if values.shape[1] == 1 else found & values.all(1)
    return every, some


def _broken(reader: StepReader) -> Array:
    """Of each step, whether its next observation is another than the observation of the step after it."""
    steps = reader.manifest.steps
    broken = np.zeros(steps, bool)
    for key in state_keys(reader.fields):
        field = field_named(reader.fields, key)
        if field_named(reader.fields, (NEXT, *key)).role in {"done", "reward"}:
            continue
        for start, stop in leaf_parts(steps - 1, field.row_bytes):
            rows = differing_rows(reader.read((NEXT, *key), start, stop), reader.read(key, start + 1, stop + 1))
            broken[rows + start] = True
    return broken


def _table(reader: StepReader, ended: Array, flagged: Array) -> EpisodeTable:
    last = np.flatnonzero(ended)
    lengths = np.diff(last, prepend=-1)
    known = {field.key for field in reader.fields}
    terminated, truncated = (
        _at(reader, key, last) if key in known else np.zeros(len(last), bool)
        for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
    )
    neither = np.where(flagged[last], EndReason.INFERRED, EndReason.END_OF_FILE)
    one = np.where(terminated, EndReason.TERMINATED, EndReason.TRUNCATED)
    columns = {
        "episode": np.arange(len(last)),
        "start": last + 1 - lengths,
        "length": lengths,
        "return": _returns(reader, last + 1 - lengths, lengths),
        "terminated": terminated,
        "truncated": truncated,
        "end_reason": np.where(terminated & truncated, EndReason.BOTH, np.where(terminated | truncated, one, neither)),
        "explicit_start": np.full(len(last), -1),
    }
    rest = ("explicit_next", "seed", "has_seed")
    return EpisodeTable.from_columns(columns | {name: np.zeros(len(last)) for name in rest})


def _at(reader: StepReader, key: Key, steps: Array) -> Array:
    """Whether any number of a flag is set at these steps."""
    field = field_named(reader.fields, key)
    found = []
    for start, stop in leaf_parts(reader.manifest.steps, field.row_bytes):
        low, high = np.searchsorted(steps, (start, stop))
        if low < high:
            rows = reader.read(key, start, stop)[steps[low:high] - start]
            found.append((as_numbers(rows, field.dtype).reshape(high - low, -1) != 0).any(1))
    return np.concatenate(found) if found else np.zeros(0, bool)


def _returns(reader: StepReader, starts: Array, lengths: Array) -> Array:
    """Sum the rewards of each episode, where a step has one number; else zeros."""
    fields = [field for field in reader.fields if field.key == NEXT_REWARD and field.shape in {(), (1,)}]
    totals = np.zeros(len(starts))
    if not fields or "complex" in fields[0].dtype:
        return totals

    def read(start: int, stop: int) -> Array:
        rewards = reader.read(NEXT_REWARD, start, stop).reshape(-1)
        return as_numbers(rewards, fields[0].dtype).astype(np.float64)

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
    """Add the rewards of each episode strictly one after the other, as `running_return` does for one of them.

    Few long episodes are added up one by one, many short ones all at once step by step.
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
