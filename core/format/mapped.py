"""Reads files through short-lived read-only maps: where they are in memory already, nothing is copied to look at them.

A map covers one part of a file and goes with the array that views it, so that memory stays bounded.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError
from ..ted import Field
from .contracts import Array
from .digest import Hasher

__all__ = ["Window", "digest_mapped", "view_rows"]

_PART = 8 << 20
"""Maps begin and end at multiples of this. Only what is looked at is brought into them, so that two maps of which one
reaches into the other cost little more than one."""


class Window:
    """The part of a file that was looked at last: what is asked for next often lies in it, too."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._begin = 0
        self._bytes = np.empty(0, np.uint8)

    def rows(self, file: tuple[int, int], path: Path, leaf: Field, start: int, stop: int) -> Array:
        """View rows `[start, stop)` of a leaf; the array cannot be written.

        `file` is a descriptor and the byte at which the rows begin. CorruptDataError for one that ends before.
        """
        if not leaf.row_bytes or start == stop:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        descriptor, offset = file
        begin, end = offset + start * leaf.row_bytes, offset + stop * leaf.row_bytes
        known = self._descriptor == descriptor and self._begin <= begin
        if not known or end > self._begin + len(self._bytes):
            self._begin, self._bytes = _mapped(descriptor, path, begin, end)
            self._descriptor = descriptor
        data = self._bytes[begin - self._begin : end - self._begin]
        return data.view(leaf.numpy).reshape(stop - start, *leaf.shape)

    def close(self) -> None:
        """Forget it, so that the map goes with the last array that views it."""
        self._descriptor, self._bytes = -1, np.empty(0, np.uint8)


def view_rows(descriptor: int, path: Path, leaf: Field, start: int, stop: int) -> Array:
    """View rows `[start, stop)` of a leaf that has a file of its own, open at `path`; the array cannot be written.

    CorruptDataError for a file that is cut.
    """
    return Window().rows((descriptor, 0), path, leaf, start, stop)


def digest_mapped(descriptor: int, path: Path, start: int = 0) -> str:
    """Digest of the bytes from `start` to the end of a file that is open; `path` names it in errors."""
    hasher, size = Hasher(), os.fstat(descriptor).st_size
    while start < size:
        stop = min(start - start % _PART + _PART, size)
        begin, data = _mapped(descriptor, path, start, stop)
        hasher.update(data[start - begin : stop - begin].data)
        start = stop
    return hasher.digest


def _mapped(descriptor: int, path: Path, begin: int, end: int) -> tuple[int, Array]:
    """View the parts of a file in which these bytes lie; return where the first one begins, too.

    The size is looked at before: to touch a map beyond the end of its file ends the process.
    """
    size = os.fstat(descriptor).st_size
    if size < end:
        raise CorruptDataError(f"{path} ends {end - size:,} bytes too early: it was cut")
    start, stop = begin - begin % _PART, min(end + -end % _PART, size)
    memory = mmap.mmap(descriptor, stop - start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start)
    return start, np.frombuffer(memory, np.uint8)
