"""Bytes that zlib compressed, unpacked as a stream: members of zip archives, and gzip files of one array."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from ..errors import CorruptDataError, FormatError
from ..format.digest import open_regular, refuse_pointer
from .npy import ArrayRows, ByteRange, StoredBytes, damaged

INFLATES = 1032
"""How many bytes one byte of zlib can stand for, at most."""
SLACK = 4096
UNPACKED_BLOCK = 256 << 10
_PACKED_BLOCK = 64 << 10
_HEADER_BLOCK = 4 << 10
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = zlib.MAX_WBITS | 16
"""For zlib: a gzip header, and the checksum and size after the data, which it verifies."""


class InflatedBytes(ByteRange):
    """Compressed bytes, unpacked in blocks: one is kept, and what is before it needs a new start.

    `packed` has the compressed ones, `window` is zlib's `wbits`. A subclass may implement `on_start` and `on_block`.
    """

    def __init__(self, packed: StoredBytes, size: int, window: int, what: str) -> None:
        self.size = size
        self._packed = packed
        self._window = window
        self._what = what
        self._is_sound = False
        self._restart()

    def on_start(self) -> None:
        """Prepare for all bytes from the first one on."""

    def on_block(self, block: memoryview) -> None:
        """Take the bytes that come next, before anybody gets them; may raise CorruptDataError."""

    def read_into(self, target: memoryview, position: int) -> None:
        if position < self._stop - len(self._block):
            self._restart()
        done = 0
        while done < len(target):
            behind = self._stop - position - done
            if behind <= 0:
                self._unpack()
                continue
            part = self._block[len(self._block) - behind :][: len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def verify(self) -> None:
        """Read what is left, unless all was read once; CorruptDataError if the bytes are not sound."""
        while not self._is_sound:
            self._unpack()

    def close(self) -> None:
        self._packed.close()

    def _restart(self) -> None:
        self._block = memoryview(b"")
        self._stop = 0
        self._taken = 0
        self._waiting = b""
        self._inflate = zlib.decompressobj(self._window)
        self.on_start()

    def _unpack(self) -> None:
        """Unpack the next block; after the last one the stream has to end, too. After an error, all starts again."""
        try:
            block = self._inflated(UNPACKED_BLOCK if self._stop else _HEADER_BLOCK)
            self._stop += len(block)
            if not block or self._stop > self.size or (self._stop == self.size and self._inflated(1)):
                raise damaged(self._what, f"it does not unpack to the {self.size:,} bytes that are stated")
            self._block = memoryview(block)
            self.on_block(self._block)
        except CorruptDataError:
            self._restart()
            raise
        self._is_sound |= self._stop == self.size

    def _inflated(self, most: int) -> bytes:
        """Unpack up to `most` bytes; none at the end of the stream."""
        while not self._inflate.eof:
            left = self._packed.size - self._taken
            if not self._waiting and left:
                self._waiting = self._packed.read(self._taken, min(_PACKED_BLOCK, left))
                self._taken += len(self._waiting)
            try:
                found = self._inflate.decompress(self._waiting, most)
            except zlib.error as error:
                raise damaged(self._what, f"its compressed bytes cannot be unpacked ({error})") from error
            if found:
                self._waiting = self._inflate.unconsumed_tail
                return found
            if not self._waiting and not self._inflate.eof:
                raise damaged(self._what, "its compressed bytes end too early: it was cut")
            self._waiting = self._inflate.unconsumed_tail
        return b""


class _GzipBytes(InflatedBytes):
    """What is in a gzip file. `size` is an upper bound until the array in it is known."""

    is_bound = True

    def __init__(self, path: Path) -> None:
        descriptor = open_regular(path)
        packed = StoredBytes(descriptor, 0, os.fstat(descriptor).st_size, str(path), owned=True)
        self._damage: CorruptDataError | None = None
        try:
            head = packed.read(0, min(packed.size, len(_GZIP)))
            if not head:
                raise CorruptDataError(f"{path} is an empty file", hint="copy or fetch the file again")
            if head != _GZIP:
                refuse_pointer(path)
                raise FormatError(f"{path} is no gzip file: it begins with {head!r}")
            super().__init__(packed, packed.size * INFLATES + SLACK, _GZIP_WINDOW, str(path))
        except BaseException:
            packed.close()
            raise

    def end_at(self, size: int) -> None:
        """Take how many bytes there are; CorruptDataError if there are more."""
        self.size = size
        if self._stop >= size:
            if self._stop > size or self._inflated(1):
                raise damaged(self._what, f"it has more than the {size:,} bytes that its array states")
            self._is_sound = True

    def verify(self) -> None:
        """Read to the end, and continue where it was: rows that follow are not unpacked from the start."""
        if self._damage is not None:
            raise self._damage
        if self._is_sound:
            return
        place = self._block, self._stop, self._taken, self._waiting, self._inflate.copy()
        try:
            super().verify()
        except CorruptDataError as error:
            self._damage = error
            raise
        self._block, self._stop, self._taken, self._waiting, self._inflate = place


class GzipArray(ArrayRows):
    """A gzip file of one `.npy` array, read in rows as a stream; ascending rows are unpacked once.

    The checksum of the file is compared when its last row was read, and by `verify`. Raises FormatError for what is no
    such file, CorruptDataError for one that is cut or damaged, or that states more rows than its bytes can hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _GzipBytes(path)
        try:
            super().__init__(self._bytes, str(path))
            if self.is_pickled:
                raise FormatError(f"{path} is a pickle of Python objects, which can run any code: it is not unpacked")
            self._bytes.end_at(self.header.size + self.header.data_bytes)
        except BaseException:
            self._bytes.close()
            raise

    def verify(self) -> None:
        """Read what is left; CorruptDataError, at every call, for a file that is damaged anywhere."""
        self._bytes.verify()
