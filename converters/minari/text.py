"""Strings as rows of numbers: UTF-8, padded with zeros to one width, and the length of each beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.errors import FormatError
from ...core.format import Array
from .store import ColumnPath, StoredEpisode, column_name

__all__ = ["LONGEST_ROW", "TextLook", "encode_text", "look_at_text", "text_rows"]

LONGEST_ROW = 64 << 10
"""Bytes a row of text may have; every row of the dataset takes as much as the longest."""
_ROWS_AT_ONCE = 64
"""Rows of a length not known before: 4 MB if each were as long as may be."""


class TextLook:
    """What a pass over one text column of one episode shows: bytes of the longest row, and whether rows differ."""

    def __init__(self) -> None:
        self.longest = 0
        self.longest_row = 0
        self.constant = True


def text_rows(episode: StoredEpisode, path: ColumnPath, rows: int) -> Iterator[list[bytes]]:
    """Read a text column in lists of bounded size; the first are shorter, so that overlong rows show early."""
    start, size = 0, 1
    while start < rows:
        yield episode.strings(path, start, min(start + size, rows))
        start, size = start + size, min(2 * size, _ROWS_AT_ONCE)


def look_at_text(episode: StoredEpisode, path: ColumnPath, rows: int, what: str) -> TextLook:
    """Pass over a text column up to the first list with an overlong row; raise FormatError if it is not UTF-8."""
    look, first, done = TextLook(), None, 0
    for strings in text_rows(episode, path, rows):
        longest = max(range(len(strings)), key=lambda row: len(strings[row]))
        if len(strings[longest]) > look.longest:
            look.longest, look.longest_row = len(strings[longest]), done + longest
        if look.longest > LONGEST_ROW:
            break
        _require_utf8(strings, f"{column_name(path)!r} of {what}")
        first = strings[0] if first is None else first
        look.constant = look.constant and all(row == first for row in strings)
        done += len(strings)
    return look


def _require_utf8(strings: list[bytes], what: str) -> None:
    try:
        b"\0".join(strings).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not UTF-8 text: {error.reason}") from error


def encode_text(strings: list[bytes], width: int) -> tuple[Array, Array]:
    """Return the strings as uint8 `[n, width]` and their lengths in bytes as int32 `[n]`."""
    lengths = np.fromiter(map(len, strings), np.int32, len(strings))
    characters = np.array(strings, f"S{width}").view(np.uint8).reshape(len(strings), width)
    return characters, lengths
