"""Episodes: how they end, and whether their rows follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from .schema import Array, Key


class EndReason(IntEnum):
    """Why an episode ends at its last step, according to the source."""

    TERMINATED = 0
    TRUNCATED = 1
    BOTH = 2
    END_OF_FILE = 3
    """Neither flag was set: the recording stops there. TED marks such a step truncated."""
    INFERRED = 4
    """The source has no flag; a discontinuity in the data marks the end."""


class Final(IntEnum):
    """Where the observation after the last step of an episode comes from."""

    OBSERVED = 0
    REPEATED = 1
    """The source has none; the last observation is repeated."""
    DROPPED = 2
    """The source has none; the last step was left out, and the one before it is the truncated end."""
    MISSING = 3
    """The source has none, and it is not replaced yet; only pieces and blocks of a reader have this value."""


def end_reason(terminated: bool, truncated: bool) -> EndReason:
    """Name the end of an episode from the flags of its last step."""
    if terminated:
        return EndReason.BOTH if truncated else EndReason.TERMINATED
    return EndReason.TRUNCATED if truncated else EndReason.END_OF_FILE


@dataclass(frozen=True, slots=True)
class BoundaryCounts:
    """The boundary report: numbers of episodes by end reason, and of episodes with explicit next rows.

    `final_repeated` and `final_dropped` count the episodes whose source has no observation after the last step.
    """

    terminated: int = 0
    truncated: int = 0
    both: int = 0
    end_of_file: int = 0
    inferred: int = 0
    explicit_next: int = 0
    final_repeated: int = 0
    final_dropped: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name; final steps only if there are any."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count or not name.startswith("final_")}


def ranges_of(chosen: Array) -> list[tuple[int, int]]:
    """Return the half-open ranges in which a mask, bool `[n]`, is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def runs_of(numbers: Sequence[int] | Array) -> list[tuple[int, int]]:
    """Return the half-open ranges of consecutive numbers, in their order."""
    values = np.asarray(numbers, np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 2) != 1)
    lasts = np.append(starts[1:], len(values))[: len(starts)] - 1
    return list(zip(values[starts].tolist(), (values[lasts] + 1).tolist(), strict=True))


def runs_text(numbers: Sequence[int] | Array) -> str:
    """Format episode numbers, in their order, as runs: `0:40,57,52:55`."""
    return ",".join(f"{start}:{stop}" if stop - start > 1 else f"{start}" for start, stop in runs_of(numbers))


def rows_equal(one: Array, other: Array) -> Array:
    """Return for each row whether two arrays have the same bits; bool `[n]`.

    NaN equals NaN of the same bits, 0.0 does not equal -0.0.
    """
    rows = len(one)
    if not rows or not one[0].size or one.__array_interface__ == other.__array_interface__:  # no bytes, or the same
        return np.ones(rows, bool)
    width = one[0].nbytes
    word = next(size for size in (8, 4, 2, 1) if width % size == 0)  # few wide comparisons instead of many narrow ones
    bits = [np.ascontiguousarray(array).reshape(rows, -1).view(f"u{word}") for array in (one, other)]
    same = bits[0] == bits[1]
    if same.size - np.count_nonzero(same) > rows:
        return np.asarray(same.all(1))
    equal = np.ones(rows, bool)  # locating a few differences is four times as fast as reducing many short rows
    equal[np.flatnonzero(~same) // same.shape[1]] = False
    return equal


class Continuity:
    """Compares each state's `next` rows with the rows after them, bit for bit, also across chunks of rows."""

    def __init__(self) -> None:
        self._after: dict[Key, Array] = {}

    def see(self, key: Key, root: Array, after: Array) -> Array:
        """Return for each row of the next chunk whether it equals the `next` row of the step before; bool `[n]`.

        The very first row counts as equal. `root` and `after` are the rows of a state and of its `next`, `[n, …]`, with
        n at least 1.
        """
        follows = np.ones(len(root), bool)
        follows[1:] = rows_equal(after[:-1], root[1:])
        if key in self._after:
            follows[:1] = rows_equal(self._after[key], root[:1])
        self._after[key] = after[-1:].copy()
        return follows
