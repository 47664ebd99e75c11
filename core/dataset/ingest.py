"""From a reader's pieces to TED rows: root and next, flags, the end of each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import FormatError
from ..ted import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    SINGLETONS,
    EndReason,
    Field,
    Key,
    Timing,
    end_reason,
    key_name,
)
from .builder import RowBuilder
from .contracts import Array, Piece
from .episodes import EpisodeRow

__all__ = ["Ingest", "running_return"]


def running_return(total: float, rewards: Array) -> float:
    """Add rewards to a return strictly one after the other, so that the sum never depends on how they are cut."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data, and their sum may be NaN
        numbers = np.concatenate(([total], rewards.reshape(-1).astype(np.float64)))
        return float(np.add.accumulate(numbers)[-1])


class Ingest:
    """Feeds pieces to a builder and keeps the books on episodes.

    An episode whose last step bears neither flag is kept whole; that step becomes `truncated` and `done`, and
    its end reason says that the recording stops there. Flags in mid-episode stay as they are.
    """

    def __init__(self, builder: RowBuilder, source: Sequence[tuple[Field, Timing]]) -> None:
        self.rows: list[EpisodeRow] = []
        self.text: list[dict[str, str]] = []
        self._builder = builder
        self._source = [(field.key, timing) for field, timing in source]
        self._length = 0
        self._total = 0.0
        self._seed: int | None = None
        self._text: dict[str, str] = {}

    def run(self, pieces: Iterable[Piece], progress: Callable[[int], None] = lambda steps: None) -> None:
        """Take all pieces; `progress` hears how many steps each brought."""
        for piece in pieces:
            self.add(piece)
            progress(len(piece))

    def add(self, piece: Piece) -> None:
        """Take one piece."""
        if piece.first:
            self._length, self._total, self._seed, self._text = 0, 0.0, piece.seed, dict(piece.text)
        self._length += len(piece)
        truncated = piece.truncated
        if piece.last:
            truncated = self._end(piece)
        last = np.zeros(len(piece), bool)
        last[-1:] = piece.last
        self._builder.append(self._columns(piece, truncated), last)
        if REWARD in piece.columns:
            self._total = running_return(self._total, piece.columns[REWARD])
        if piece.last:
            reason = end_reason(bool(piece.terminated[-1]), bool(piece.truncated[-1]))
            self.rows.append(
                EpisodeRow(
                    piece.episode,
                    self._length,
                    self._total,
                    bool(piece.terminated[-1]),
                    bool(truncated[-1]),
                    reason,
                    self._seed,
                )
            )
            self.text.append(self._text)

    def _end(self, piece: Piece) -> Array:
        if not len(piece):
            raise FormatError(f"episode {piece.episode} has no steps; every episode needs one at least")
        if end_reason(bool(piece.terminated[-1]), bool(piece.truncated[-1])) is not EndReason.END_OF_FILE:
            return piece.truncated
        truncated = piece.truncated.copy()
        truncated[-1] = True
        return truncated

    def _columns(self, piece: Piece, truncated: Array) -> dict[Key, Array]:
        steps = len(piece)
        columns: dict[Key, Array] = {
            EPISODE: np.full(steps, piece.episode, np.int64),
            NEXT_TERMINATED: piece.terminated[:, None],
            NEXT_TRUNCATED: truncated[:, None],
            NEXT_DONE: (piece.terminated | truncated)[:, None],
        }
        for key, timing in self._source:
            values = piece.columns[key]
            expected = steps + (timing == "state")
            if len(values) != expected:
                raise FormatError(
                    f"episode {piece.episode}: {key_name(key)!r} has {len(values)} rows for {steps} steps, "
                    f"expected {expected}"
                )
            if timing == "state":
                columns[key], columns[NEXT, *key] = values[:-1], values[1:]
            elif timing == "step":
                columns[key] = values
            else:
                columns[NEXT, *key] = values[:, None] if key in SINGLETONS else values
        return columns
