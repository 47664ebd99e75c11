"""Finds the episodes in the rows of a storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..encodings import FilledStorage, differing_rows, leaf_parts
from ..format import Array, EpisodeTable, StepReader, sum_rewards
from ..ted import (
    NEXT,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    EndReason,
    Key,
    as_numbers,
    field_named,
    state_keys,
)
from .lanes import Order

__all__ = ["find_episodes"]


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
        "return": sum_rewards(reader, last + 1 - lengths, lengths),
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
