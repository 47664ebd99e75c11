"""Sums up episodes from their pieces: length, return, how they end, and whether their next rows follow."""

from __future__ import annotations

import numpy as np

from ..errors import FormatError
from ..ted import REWARD, EndReason, Key, end_reason, key_name
from ..ted.checks.following import rows_equal
from .contracts import Array, Piece
from .episodes import EpisodeRow

__all__ = ["EpisodeSummary", "running_return"]


def running_return(total: float, rewards: Array) -> float:
    """Add rewards to a return strictly one after the other, so that the sum never depends on how they are cut."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data, and their sum may be NaN
        numbers = np.concatenate(([total], rewards.reshape(-1).astype(np.float64)))
        return float(np.add.accumulate(numbers)[-1])


class EpisodeSummary:
    """Takes the pieces of one episode in order; `row` is the row of the episode table once the last was added.

    An episode whose last step has neither flag is kept whole: that step becomes truncated, and the end reason is that
    the recording stops there.
    """

    def __init__(self, first: Piece) -> None:
        self.text = dict(first.text)
        self._episode = first.episode
        self._seed = first.seed
        self._length = 0
        self._total = 0.0
        self._explicit = False
        self._after: dict[Key, Array] = {}

    def add(self, piece: Piece) -> None:
        """Add the next piece. FormatError where a state does not go on with the last row of the piece before."""
        for key, array in piece.columns.items():
            if key in piece.next or len(array) > len(piece):
                self._follow(piece, key)
        if REWARD in piece.columns:
            self._total = running_return(self._total, piece.columns[REWARD])
        self._length += len(piece)

    def _follow(self, piece: Piece, key: Key) -> None:
        """Compare what came after each step with what was there before the next, bit for bit."""
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
        """The row of the table, when the last piece was added."""
        terminated, truncated = bool(last.terminated[-1]), bool(last.truncated[-1])
        reason = end_reason(terminated, truncated)
        return EpisodeRow(
            self._episode, self._length, self._total, terminated, truncated or reason is EndReason.END_OF_FILE,
            reason, self._seed, self._explicit, last.final,
        )  # fmt: skip
