"""The file that libhdf5 writes through.

A write that fails inside libhdf5 leaves it in a state from which it cannot close its file, and later files fail
too. So it never sees a failure: the first one is kept here and everything after it swallowed; whoever writes asks
for it with `check`, closes, and raises it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..format import fs

__all__ = ["LatchedFile"]


class LatchedFile:
    """A new file with the methods that h5py's `fileobj` driver calls; a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = fs.create(path)
        self._position = 0
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def write(self, data: memoryview) -> int:
        """Write at the position; an interrupt is a failure like any other."""
        view = memoryview(data).cast("B")
        if self._failure is None:
            try:
                fs.pwrite(self.descriptor, view, self._position, self.path)
            except BaseException as error:
                self._failure = error
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        size = self._position if size is None else size
        if self._failure is None:
            try:
                fs.truncate(self.descriptor, size, self.path)
            except BaseException as error:
                self._failure = error
        return size

    def readinto(self, buffer: memoryview) -> int:
        """Read at the position; what is not in the file, after a failure, is zero."""
        view = memoryview(buffer).cast("B")
        got = os.preadv(self.descriptor, [view], self._position)
        view[got:] = bytes(len(view) - got)
        self._position += len(view)
        return len(view)

    def read(self, size: int) -> bytes:
        """Read so many bytes; by this method h5py tells a file object from a path."""
        data = bytearray(size)
        self.readinto(memoryview(data))
        return bytes(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self.descriptor).st_size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def flush(self) -> None:
        """Nothing is held back."""

    def __enter__(self) -> LatchedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self.descriptor)
