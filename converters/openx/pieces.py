"""Parts of large shards: the episodes that begin in a range of a tar archive, as an archive of their own."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...core.errors import CorruptDataError
from ...core.format import fs
from ..files.archives import LARGEST_MEMBER, LONGEST_HEADER

Fetch: TypeAlias = Callable[[int, int, Callable[[memoryview, int], None]], None]
"""Passes the bytes `[start, stop)` of the archive to the function, each block with its position."""

PIECE_BYTES = 64 << 20
"""Bytes of an archive that a piece has, but for its last episode. A multiple of 512."""
_BLOCK = 512
_MAGIC, _MAGIC_AT = np.frombuffer(b"ustar", np.uint8), 257
_SCANNED = 4 << 20
_LOOKED_BACK = 16 << 10
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def pieces_of(size: int) -> list[tuple[int, int]]:
    """Return the ranges of the pieces of an archive of `size` bytes."""
    return [(start, min(start + PIECE_BYTES, size)) for start in range(0, max(1, size), PIECE_BYTES)]


def fetch_piece(fetch: Fetch, size: int, span: tuple[int, int], path: Path, what: str) -> bool:
    """Write the members that begin in `span` of an archive of `size` bytes to `path`, as an archive.

    An archive does not state where the first of them is: it is the first block that is a header by its magic, its
    checksum, and the header that follows its data. From there on one header leads to the next. A member begins with
    its extended headers, which may be before the span. Return whether there is a member; nothing is left at `path` if
    not. CorruptDataError, which names `what`, for headers that do not follow each other, and what `fetch` raises.
    """
    descriptor = fs.create(path)
    try:
        found = _Piece(descriptor, path, fetch, size, span, what).complete()
    finally:
        fs.close(descriptor, path)
    if not found:
        fs.remove(path)
    return found


@dataclass(frozen=True, slots=True)
class _TarHeader:
    """What a header states: how many bytes it and its data take, and whether it is for the header after it."""

    bytes: int
    extended: bool


class _Piece:
    """A piece in a file that has the bytes of the archive from `begin` on, some before its span."""

    def __init__(self, descriptor: int, path: Path, fetch: Fetch, size: int, span: tuple[int, int], what: str) -> None:
        self._descriptor, self._path, self._fetch = descriptor, path, fetch
        self._size, (self._start, self._stop), self._what = size, span, what
        self._begin = self._there = max(0, self._start - _LOOKED_BACK)

    def complete(self) -> bool:
        """Fetch the piece, and make the file an archive; return whether it has a member."""
        self._bring(self._stop)
        first = self._first() if self._start else 0
        end = None if first is None else self._end(first)
        if first is None or end is None:
            return False
        hidden = first - self._begin
        if hidden:  # what is before becomes a member that is no episode
            header = tarfile.TarInfo("before")
            header.size = hidden - _BLOCK
            fs.pwrite(self._descriptor, memoryview(header.tobuf()), 0, self._path)
        fs.truncate(self._descriptor, end - self._begin, self._path)
        fs.pwrite(self._descriptor, memoryview(bytes(2 * _BLOCK)), end - self._begin, self._path)
        return True

    def _bring(self, stop: int) -> None:
        """Fetch up to a position of the archive."""
        stop = min(stop, self._size)
        if stop > self._there:
            self._fetch(self._there, stop, self._write)
            self._there = stop

    def _write(self, data: memoryview, position: int) -> None:
        fs.pwrite(self._descriptor, data, position - self._begin, self._path)

    def _block(self, position: int) -> bytes:
        return os.pread(self._descriptor, _BLOCK, position - self._begin)

    def _first(self) -> int | None:
        """Return where the first member begins; None for a piece that is inside of one."""
        for position in self._candidates():
            header = self._leading(position)
            if header is not None and position >= self._start:
                return position
            if header is not None and header.extended and position + header.bytes >= self._start:
                return self._after(position)  # it begins before the piece, with that header
        return None

    def _candidates(self) -> Iterator[int]:
        for position in range(self._begin, self._stop, _SCANNED):
            data = os.pread(self._descriptor, min(_SCANNED, self._stop - position), position - self._begin)
            blocks = np.frombuffer(data[: len(data) // _BLOCK * _BLOCK], np.uint8).reshape(-1, _BLOCK)
            magic = blocks[:, _MAGIC_AT : _MAGIC_AT + len(_MAGIC)]
            for number in np.flatnonzero((magic == _MAGIC).all(1)).tolist():
                yield position + number * _BLOCK

    def _leading(self, position: int) -> _TarHeader | None:
        """Return the header in a position that leads to another one, or to the end; None if there is none."""
        header = _header(self._block(position))
        if header is None:
            return None
        self._bring(position + header.bytes + _BLOCK)
        return header if self._is_sound(position + header.bytes) else None

    def _is_sound(self, position: int) -> bool:
        """Whether a header or the end of the archive is in a position."""
        block = self._block(position)
        return len(block) == _BLOCK and (not any(block) or _header(block) is not None)

    def _after(self, position: int) -> int:
        """Return where the member that begins in a position ends, with its extended headers."""
        extended = True
        while extended:
            self._bring(position + _BLOCK)
            header = _header(self._block(position))
            if header is None:
                cut = position + _BLOCK > self._size
                why = f"cut: it ends after {self._size:,} bytes" if cut else f"damaged: byte {position:,} is no header"
                raise CorruptDataError(f"{self._what} is {why}")
            position += header.bytes
            extended = header.extended
        return position

    def _end(self, first: int) -> int | None:
        """Follow the members from the first one on; return where the last one ends, None if there is none."""
        position = first
        while position < self._stop and any(self._block(position)):
            position = self._after(position)
        if position < self._stop:
            self._require_zeros(position)
        else:
            self._bring(position + _BLOCK)
            if not self._is_sound(position):
                self._after(position)  # raises
        return None if position == first else position

    def _require_zeros(self, position: int) -> None:
        for start in range(position, self._stop, _SCANNED):
            if any(os.pread(self._descriptor, min(_SCANNED, self._stop - start), start - self._begin)):
                raise CorruptDataError(f"{self._what} is damaged: more follows the end of the archive")


def _header(block: bytes) -> _TarHeader | None:
    """Read a header; None for a block that is none, or one that no archive of episodes has."""
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    extended = found.type in _EXTENDED
    if not 0 <= found.size <= (LONGEST_HEADER if extended else LARGEST_MEMBER):
        return None
    return _TarHeader(_BLOCK + -(-found.size // _BLOCK) * _BLOCK, extended)
