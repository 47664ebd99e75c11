"""Pieces of one episode: whether they are what the facts announce, and what becomes of the last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..errors import FormatError
from ..ted.episodes import Final
from ..ted.schema import Field, Key, Timing, key_name
from .blocks import EpisodeBlock, require_truths
from .contracts import Array, Piece, SourceFacts


def completed(pieces: Iterable[Piece], choice: str, fields: Sequence[tuple[Field, Timing]]) -> Iterator[Piece]:
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


def _completed(piece: Piece, choice: str, fields: Sequence[tuple[Field, Timing]]) -> Piece | None:
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


def rest_of_episode(piece: Piece, following: Iterator[EpisodeBlock | Piece]) -> Iterator[Piece]:
    """Yield a piece and those after it up to the last of its episode."""
    yield piece
    while not piece.last:
        part = next(following, None)
        if part is None:
            return
        if isinstance(part, EpisodeBlock):
            raise FormatError(f"episode {piece.episode} came with a block before its last piece")
        piece = part
        yield piece


def require_piece(piece: Piece, whole: SourceFacts, what: str, *, complete: bool) -> None:
    """Raise FormatError for a piece that is not what the facts announce.

    `complete` states that it has all fields; `what` names it in messages.
    """
    steps = len(piece)
    if not steps:
        raise FormatError(f"{what} came with a piece without steps")
    if piece.is_unfinished and not whole.final_missing:
        raise FormatError(
            f"{what} has no observation after its last step, and the facts do not state that one may lack"
        )
    for name, flags in (("terminated", piece.terminated), ("truncated", piece.truncated)):
        if flags.dtype != bool or flags.shape != (steps,):
            raise FormatError(f"{what}: {name} is {_looks(flags)}, expected bool [{steps}]")
        require_truths(flags, name, what)
    known = {field.key: (field, timing) for field, timing in whole.fields}
    odd = piece.columns.keys() ^ known.keys() if complete else piece.columns.keys() - known.keys()
    odd = odd | {key for key in piece.next if key not in known or known[key][1] != "state"}
    if odd:
        raise FormatError(f"{what} came with other fields than the facts name: {', '.join(sorted(map(key_name, odd)))}")
    expected = [(key, rows, piece.rows_of(key, known[key][1])) for key, rows in piece.columns.items()]
    expected += [(key, rows, steps) for key, rows in piece.next.items()]
    for key, rows, count in expected:
        field = known[key][0]
        if rows.dtype != field.numpy or rows.shape[1:] != field.shape:
            raise FormatError(
                f"{what}: {key_name(key)!r} is {_looks(rows)}, expected {field.dtype} {list(field.shape)} a row"
            )
        if len(rows) != count:
            raise FormatError(f"{what}: {key_name(key)!r} has {len(rows)} rows for {steps} steps, expected {count}")
        require_truths(rows, key_name(key), what)


def _looks(rows: Array) -> str:
    return f"{rows.dtype} {list(rows.shape)}"
