"""What becomes of the last step of an episode whose source has no observation after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from ..errors import UsageError
from ..ted import Field, Final, Key, Timing
from .contracts import Array, Piece

__all__ = ["FINAL_STEPS", "FinalStep", "completed", "require_final_step"]

FinalStep: TypeAlias = Literal["auto", "drop", "repeat"]
"""`auto`: a terminated last step is kept, and its next observation repeats the last one, for no target bootstraps
from it; any other is left out, and the step before it becomes the truncated end. `drop` leaves all of them out,
`repeat` keeps all of them."""
FINAL_STEPS: tuple[FinalStep, ...] = get_args(FinalStep)


def require_final_step(name: str) -> FinalStep:
    """Return the choice of that name, or raise UsageError."""
    for known in FINAL_STEPS:
        if name == known:
            return known
    raise UsageError(f"--final-step is {name!r}, {', '.join(FINAL_STEPS)} are known")


def completed(pieces: Iterable[Piece], choice: FinalStep, fields: Sequence[tuple[Field, Timing]]) -> Iterator[Piece]:
    """Complete the pieces of one episode; an episode that has no other step than the one left out has no pieces.

    One piece is held back, since the one after it may vanish. Pieces may lack columns.
    """
    held: Piece | None = None
    for piece in pieces:
        if not piece.last:
            if held is not None:
                yield held
            held = piece
            continue
        found = _completed(piece, choice, fields)
        if held is not None:
            yield held if found is not None else _ended(held)
        if found is not None:
            yield found
        held = None
    if held is not None:
        yield held


def _completed(piece: Piece, choice: FinalStep, fields: Sequence[tuple[Field, Timing]]) -> Piece | None:
    if not piece.is_unfinished:
        return piece
    states = {field.key for field, timing in fields if timing == "state"}
    if choice == "repeat" or (choice == "auto" and bool(piece.terminated[-1])):
        columns = {
            key: np.concatenate((rows, rows[-1:])) if key in states and key not in piece.next else rows
            for key, rows in piece.columns.items()
        }
        return replace(piece, columns=columns, final=Final.REPEATED)
    count = len(piece) - 1
    if not count:
        return None

    def kept(key: Key, rows: Array) -> Array:
        return rows if key in states and key not in piece.next else rows[:count]

    return _ended(
        replace(
            piece,
            columns={key: kept(key, rows) for key, rows in piece.columns.items()},
            next={key: rows[:count] for key, rows in piece.next.items()},
            terminated=piece.terminated[:count],
            truncated=piece.truncated[:count],
        )
    )


def _ended(piece: Piece) -> Piece:
    """The same piece as the truncated end of its episode."""
    truncated = piece.truncated.copy()
    truncated[-1] = True
    return replace(piece, truncated=truncated, last=True, final=Final.DROPPED)
