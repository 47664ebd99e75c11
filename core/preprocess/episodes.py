"""The episodes of a result, from what is known of the runs of rows that its tasks returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..format import Array, EpisodeTable, running_return
from ..ted import NEXT, Field, Key, as_numbers, end_reason, state_keys
from ..ted.checks.following import rows_equal
from .job import Finished
from .taking import Taking

__all__ = ["Changes", "ResultEpisodes", "RowAccess"]


class RowAccess(Protocol):
    """Reads rows of one task's result, counted from its first."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""


class Changes(NamedTuple):
    """`numbers`: ranges of rows, start and count, whose episodes need the number that follows.

    `unmarked`: the last row before this task ends an episode now, and has to bear `truncated`.
    """

    numbers: list[tuple[int, int, int]]
    unmarked: bool


@dataclass(slots=True)
class _Open:
    """The episode that the last task left unfinished, as far as its rows go."""

    source: int
    id: int
    rows: int
    total: float
    broken: bool
    terminated: bool
    truncated: bool
    following: dict[Key, Array]
    """What the row after the last one has to begin with."""


class ResultEpisodes:
    """Follows the finished tasks from the front and keeps the books on the episodes of the result.

    `reward` is the leaf that adds up to the return of an episode, None where there is none.
    `renumbered` counts the episodes whose number another one had already, `emptied` those that came to nothing.
    """

    def __init__(self, taking: Taking, fields: Sequence[Field], reward: Field | None) -> None:
        self._taking = taking
        self._reward = reward
        self._states = state_keys(fields)
        self._columns: dict[str, list[Array]] = {}
        self._used: set[int] = set()
        self._highest = int(taking.table.episode.max(initial=-1))
        self._open: _Open | None = None
        self.renumbered = 0
        self.emptied = 0

    def take(self, finished: Finished, rows: RowAccess) -> Changes:
        """Take the next task; return what has to change in the rows now that it is known what came before."""
        pieces = finished.pieces
        if not len(pieces):
            return Changes([], False)
        here, was = pieces.rows > 0, self._open
        columns = {
            "source": pieces.episode, "episode": np.array(finished.ids), "length": pieces.rows.copy(),
            "total": np.array(finished.returns), "broken": np.array(finished.broken),
            "terminated": np.array(finished.terminated), "truncated": np.array(finished.truncated),
        }  # fmt: skip
        fresh, unmarked = here.copy(), False
        if was is not None and was.rows:
            fresh[0] = False
            self._continue(was, int(pieces.rows[0]), columns, rows)
            unmarked = bool(pieces.ends[0]) and not here[0] and self._end_is_missing(was)
            columns["truncated"][0] |= unmarked
        self._number(columns["episode"], fresh)
        self.emptied += int(((columns["length"] == 0) & pieces.ends).sum())
        if self._reward is None:
            self._take_returns_of_source(columns)
        closed = (columns["length"] > 0) & pieces.ends
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column[closed])
        self._open = None if pieces.ends[-1] else self._left_open(finished, columns, rows)
        changed = np.flatnonzero(here & (columns["episode"] != finished.ids)).tolist()
        numbers = columns["episode"]
        renumbered = [(int(pieces.starts[row]), int(pieces.rows[row]), int(numbers[row])) for row in changed]
        return Changes(renumbered, unmarked)

    def _end_is_missing(self, was: _Open) -> bool:
        """Whether the row that bore the mark of the episode's end is gone, and no other bears one."""
        table = self._taking.table
        marked = bool(table.terminated[was.source] or table.truncated[was.source])
        return marked and not (was.terminated or was.truncated)

    def _continue(self, was: _Open, count: int, columns: dict[str, Array], rows: RowAccess) -> None:
        """Add what the episode had before to the first run, which belongs to it too."""
        columns["episode"][0] = was.id
        columns["length"][0] += was.rows
        if not count:
            columns["total"][0], columns["broken"][0] = was.total, was.broken
            columns["terminated"][0], columns["truncated"][0] = was.terminated, was.truncated
            return
        follows = (rows_equal(row, rows.read(key, 0, 1)).all() for key, row in was.following.items())
        columns["broken"][0] |= was.broken or not all(follows)
        columns["total"][0] = was.total
        if self._reward is not None:
            rewards = as_numbers(rows.read(self._reward.key, 0, count), self._reward.dtype)
            columns["total"][0] = running_return(was.total, rewards)

    def _take_returns_of_source(self, columns: dict[str, Array]) -> None:
        """Without rewards, an episode that has all its steps has the return it had."""
        source, table = columns["source"], self._taking.table
        whole = columns["length"] == table.length[source]
        columns["total"][whole] = self._taking.returns[source[whole]]

    def _number(self, ids: Array, fresh: Array) -> None:
        """Give episodes whose number is taken another one, above all of the source."""
        wanted = ids[fresh].tolist()
        distinct = set(wanted)
        if len(distinct) == len(wanted) and self._used.isdisjoint(distinct):
            self._used |= distinct
            return
        for place in np.flatnonzero(fresh).tolist():
            if int(ids[place]) in self._used:
                self._highest += 1
                while self._highest in self._used:
                    self._highest += 1
                ids[place] = self._highest
                self.renumbered += 1
            self._used.add(int(ids[place]))

    def _left_open(self, finished: Finished, columns: dict[str, Array], rows: RowAccess) -> _Open:
        following: dict[Key, Array] = {}
        if finished.pieces.rows[-1]:
            last = finished.rows
            following = {key: rows.read((NEXT, *key), last - 1, last) for key in self._states}
        elif self._open is not None:
            following = self._open.following
        values = {name: column[-1].item() for name, column in columns.items()}
        return _Open(
            values["source"], values["episode"], values["length"], values["total"], values["broken"],
            values["terminated"], values["truncated"], following,
        )  # fmt: skip

    def _whole(self, name: str) -> Array:
        return np.concatenate(self._columns[name]) if self._columns else np.zeros(0, np.int64)

    @property
    def sources(self) -> Array:
        """The row of the table of what was taken that each episode comes from."""
        return self._whole("source").astype(np.int64)

    def table(self) -> EpisodeTable:
        """The table, once all tasks were taken. What the source said of an end stays where the flags do."""
        source, table = self.sources, self._taking.table
        length = self._whole("length")
        terminated, truncated = self._whole("terminated"), self._whole("truncated")
        reasons = table.end_reason[source].copy()
        changed = (terminated != table.terminated[source]) | (truncated != table.truncated[source])
        changed[:-1] |= source[:-1] == source[1:]  # of an episode in pieces only the last one ends where it did
        for row in np.flatnonzero(changed).tolist():
            reasons[row] = end_reason(bool(terminated[row]), bool(truncated[row]))
        first = np.ones(len(source), bool)
        first[1:] = source[1:] != source[:-1]  # what begins later was not begun by the seed
        columns: dict[str, Any] = {
            "episode": self._whole("episode"), "start": np.cumsum(length) - length, "length": length,
            "return": self._whole("total"), "terminated": terminated, "truncated": truncated, "end_reason": reasons,
            "explicit_next": self._whole("broken"), "explicit_start": np.full(len(source), -1),
            "seed": table.seed[source], "has_seed": table.has_seed[source] & first,
            "final": np.where(changed | (length != table.length[source]), 0, table.final[source]),
        }  # fmt: skip
        return EpisodeTable.from_columns(columns)

    def text(self) -> list[dict[str, str]]:
        """Text that belongs to the episodes."""
        texts = self._taking.reader.episode_text
        return [] if texts is None else [texts[row] for row in self._taking.rows[self.sources].tolist()]
