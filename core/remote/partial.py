"""The first bytes of a file that is on its way, on disk as `<name>.part`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..format import Closing, RemoteFile, fs
from .checksums import blocks_of, hasher

__all__ = ["Partial"]

_WRITTEN_AT_ONCE = 256 << 10


class Partial(Closing):
    """Gathers a file's bytes at the end of its part, and their checksum with them.

    `within` is the descriptor of the parent folder. Opening hashes what an earlier run left. `progress` is called with
    the number of bytes added to the part, negative when bytes are discarded. `check` is called between blocks and may
    raise to stop.
    """

    def __init__(
        self, file: RemoteFile, path: Path, within: int, progress: Callable[[int], None], check: Callable[[], None]
    ) -> None:
        self._path = path
        self._within = within
        self._progress = progress
        self._buffer = bytearray()
        self._written = 0
        self._size, self._checksum = file.known_size, file.checksum or ""
        self._hasher = hasher(self._checksum, self._size)
        self._descriptor = fs.open_to_append(path, within=within)
        try:
            self._take_over(check)
        except BaseException:
            self.close()
            raise

    def _take_over(self, check: Callable[[], None]) -> None:
        size = os.fstat(self._descriptor).st_size
        if size > self._size:
            fs.truncate(self._descriptor, 0, self._path)
            return
        with os.fdopen(self._descriptor, "rb", buffering=0, closefd=False) as written:
            for block in blocks_of(written):
                check()
                self._hasher.update(block)
                self._count(len(block))
        if size and self.whole and not self.matches():
            self.restart()

    @property
    def received(self) -> int:
        """How many bytes of the file there are, written or about to be."""
        return self._written + len(self._buffer)

    @property
    def whole(self) -> bool:
        """Whether there are as many bytes as the file has."""
        return self.received == self._size

    @property
    def found(self) -> str:
        """The checksum of what was written."""
        return self._hasher.found

    def matches(self) -> bool:
        """Return whether what was written is the whole file."""
        return self._hasher.matches()

    def append(self, block: bytes | memoryview) -> None:
        """Add the next bytes; they are written when there are enough of them."""
        self._buffer += block
        if len(self._buffer) >= _WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was added and is not yet written."""
        data, self._buffer = self._buffer, bytearray()  # first: after a failed write nothing may follow
        if data:
            fs.write(self._descriptor, memoryview(data), self._path)
            self._hasher.update(data)
            self._count(len(data))

    def restart(self) -> None:
        """Throw all bytes away."""
        self._buffer.clear()
        fs.truncate(self._descriptor, 0, self._path)
        self._hasher = hasher(self._checksum, self._size)
        self._count(-self._written)

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        fs.fsync(self._descriptor, self._path)

    def publish(self, target: Path) -> None:
        """Give the file its name."""
        fs.rename(self._path, target, within=self._within)

    def discard(self) -> None:
        """Remove the part."""
        fs.remove(self._path, within=self._within)
        self._count(-self._written)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _count(self, more: int) -> None:
        self._written += more
        if more:
            self._progress(more)
