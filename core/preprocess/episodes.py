"""The episodes of the result: those of the source, with what the function did to rewards, flags and observations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..dataset import Array, EpisodeTable, PositionedTree, StepReader, running_return
from ..ted import (
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    EndReason,
    Field,
    Key,
    as_numbers,
    end_reason,
    state_keys,
)
from ..ted.checks.following import rows_equal

__all__ = ["ResultEpisodes", "first_steps", "is_cut"]


def is_cut(table: EpisodeTable, steps: int) -> bool:
    """Tell whether the first `steps` steps end inside an episode."""
    return steps not in (table.start + table.length)


def first_steps(reader: StepReader, steps: int) -> EpisodeTable:
    """The table of the first `steps` steps; an episode cut there ends as a recording that stops: truncated."""
    table = reader.episodes
    kept = table.start < steps
    columns = {name: column[kept].copy() for name, column in table.columns().items()}
    if is_cut(table, steps):
        start = int(columns["start"][-1])
        columns["length"][-1] = steps - start
        columns["truncated"][-1], columns["end_reason"][-1] = True, EndReason.END_OF_FILE
        fields = {field.key: field for field in reader.fields}
        if NEXT_TERMINATED in fields:
            columns["terminated"][-1] = reader.read(NEXT_TERMINATED, steps - 1, steps).any()
        if (reward := _reward_field(reader.fields)) is not None:
            columns["return"][-1] = running_return(0.0, as_numbers(reader.read(reward.key, start, steps), reward.dtype))
    return EpisodeTable.from_columns(columns)


def _reward_field(fields: Sequence[Field]) -> Field | None:
    """The reward, where it is one real number a step."""
    for field in fields:
        if field.key == NEXT_REWARD and field.shape in ((), (1,)) and "complex" not in field.dtype:
            return field
    return None


class ResultEpisodes:
    """Follows the finished rows of a result from the front and keeps the books on their episodes."""

    def __init__(self, source: EpisodeTable, tree: PositionedTree) -> None:
        self._source = source
        self._tree = tree
        self._ends = source.start + source.length - 1
        self._reward = _reward_field(tree.fields)
        self._flags = {field.key: field for field in tree.fields if field.key in (NEXT_TERMINATED, NEXT_TRUNCATED)}
        self._states = state_keys(tree.fields)
        self._totals = np.zeros(len(source))
        self._ending = {key: column.copy() for key, column in self._source_flags().items()}
        self._explicit = np.zeros(len(source), bool)

    def _source_flags(self) -> dict[Key, Array]:
        return {NEXT_TERMINATED: self._source.terminated, NEXT_TRUNCATED: self._source.truncated}

    def take(self, start: int, stop: int, follows: Array) -> None:
        """Take the steps `[start, stop)`, the ones after those taken before.

        `follows[i]` says whether the observation after step `start + i` is that before the next one.
        """
        first, last = (int(row) for row in self._source.index_of_step(np.array([start, stop - 1])))
        self._note_breaks(start, stop, follows)
        ends = self._ends[first : last + 1]
        which = np.arange(first, last + 1)[ends < stop]
        for key, field in self._flags.items():
            flags = as_numbers(self._tree.read(key, start, stop), field.dtype).reshape(stop - start, -1)
            self._ending[key][which] = flags[self._ends[which] - start].any(1)
        if self._reward is not None:
            rewards = as_numbers(self._tree.read(NEXT_REWARD, start, stop), self._reward.dtype)
            for row in range(first, last + 1):
                begin = max(int(self._source.start[row]), start) - start
                part = rewards[begin : int(self._ends[row]) + 1 - start]
                self._totals[row] = running_return(float(self._totals[row]), part)

    def _note_breaks(self, start: int, stop: int, follows: Array) -> None:
        """Mark the episodes in which some step does not lead to the next, across the border before `start` too."""
        if not self._states:
            return
        broken = np.flatnonzero(~follows) + start
        if start and not self._follows_at(start):
            broken = np.append(broken, start - 1)
        which = self._source.index_of_step(broken)
        self._explicit[which[self._ends[which] != broken]] = True

    def _follows_at(self, start: int) -> bool:
        pairs = (
            (self._tree.read((NEXT, *key), start - 1, start), self._tree.read(key, start, start + 1))
            for key in self._states
        )
        return all(bool(rows_equal(after, before).all()) for after, before in pairs)

    def table(self) -> EpisodeTable:
        """The table, once all steps were taken. What the source said of an end stays where the flags do."""
        columns = self._source.columns()
        terminated, truncated = self._ending[NEXT_TERMINATED], self._ending[NEXT_TRUNCATED]
        changed = (terminated != columns["terminated"]) | (truncated != columns["truncated"])
        reasons = columns["end_reason"].copy()
        for row in np.flatnonzero(changed):
            reasons[row] = end_reason(bool(terminated[row]), bool(truncated[row]))
        return EpisodeTable.from_columns(
            columns
            | {
                "return": columns["return"] if self._reward is None else self._totals,
                "terminated": terminated,
                "truncated": truncated,
                "end_reason": reasons,
                "explicit_next": self._explicit,
                "explicit_start": np.full(len(self._source), -1),
            }
        )
