"""From a reader's pieces to TED rows: root and next, flags, the end of each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import FormatError
from ..ted.episodes import EndReason, end_reason
from ..ted.schema import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SINGLETONS,
    Field,
    Key,
    Timing,
    key_name,
)
from .contracts import Array, Piece
from .episodes import EpisodeRow
from .returns import EpisodeSummary
from .ted.builder import RowBuilder


class Ingest:
    """Feeds pieces to a builder and gathers `rows` and `text` of the episode table.

    An episode whose last step bears neither flag is kept whole; that step becomes `truncated` and `done`, and
    its end reason states that the recording stops there. Flags in mid-episode stay as they are. Where a piece gives its
    own next rows, those are what is under `next`, and the table marks an episode in which they do not follow.
    """

    def __init__(self, builder: RowBuilder, source: Sequence[tuple[Field, Timing]]) -> None:
        self.rows: list[EpisodeRow] = []
        self.text: list[dict[str, str]] = []
        self._builder = builder
        self._source = [(field.key, timing) for field, timing in source]
        self._open: EpisodeSummary | None = None

    def run(self, pieces: Iterable[Piece], progress: Callable[[int], None] = lambda steps: None) -> None:
        """Take all pieces; `progress` takes how many steps each brought."""
        for piece in pieces:
            self.add(piece)
            progress(len(piece))

    def add(self, piece: Piece) -> None:
        """Take one piece. FormatError for one that does not continue the one before, or has other rows than steps."""
        summary = EpisodeSummary(piece) if piece.first else self._open
        if summary is None:
            raise FormatError(f"episode {piece.episode} came without its first piece")
        truncated = self._end(piece) if piece.last else piece.truncated
        columns = self._columns(piece, truncated)
        summary.add(piece)
        last = np.zeros(len(piece), bool)
        last[-1:] = piece.last
        self._builder.append(columns, last)
        self._open = None if piece.last else summary
        if piece.last:
            self.rows.append(summary.row(piece))
            self.text.append(summary.text)

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
            expected = piece.rows_of(key, timing)
            if len(values) != expected:
                raise FormatError(
                    f"episode {piece.episode}: {key_name(key)!r} has {len(values)} rows for {steps} steps, "
                    f"expected {expected}"
                )
            if timing == "state":
                columns[key], columns[NEXT, *key] = piece.rows_before(key), piece.rows_after(key)
            elif timing == "step":
                columns[key] = values
            else:
                columns[NEXT, *key] = values[:, None] if key in SINGLETONS else values
        return columns
