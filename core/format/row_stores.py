"""Files that rows of bytes are appended to, and read back from while they grow; whole, or in compressed chunks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from itertools import pairwise
from pathlib import Path

import numpy as np

from . import fs
from .codecs import Codec
from .contracts import Array
from .digest import FileRecord, Hasher, bytes_of
from .opened import pread_into

__all__ = ["AppendedFile", "ChunkedRows", "RowStore", "WholeRows", "pread_bytes", "read_chunks"]


def pread_bytes(descriptor: int, path: Path, offset: int, size: int) -> Array:
    """Read bytes into a fresh array; CorruptDataError where the file ends before."""
    found = np.empty(size, np.uint8)
    pread_into(found, descriptor, path, offset, "the rows that are asked for")
    return found


def read_chunks(
    descriptor: int, path: Path, codec: Codec, offsets: Array, rows: tuple[int, int], layout: tuple[int, int, int]
) -> Array:
    """Read `rows` (first and stop) out of compressed chunks, which begin at `offsets`; uint8 `[n, row bytes]`.

    `layout` is the rows of a chunk, the bytes of a row, and how many rows there are in all.
    """
    (start, stop), (per, width, total) = rows, layout
    first, last = start // per, (stop - 1) // per
    origin, end = int(offsets[first]), int(offsets[last + 1])
    data = memoryview(pread_bytes(descriptor, path, origin, end - origin).data) if end > origin else memoryview(b"")
    bounds = (offsets[first : last + 2] - offsets[first]).tolist()
    chunks = [data[low:high] for low, high in pairwise(bounds)]
    sizes = [(min(total, (number + 1) * per) - number * per) * width for number in range(first, last + 1)]
    found = codec.decompress(chunks, sizes, str(path)).reshape(-1, width)
    return found[start - first * per : stop - first * per]


class AppendedFile:
    """A file that grows at its end, with the digest of what is in it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / name
        self.size = 0
        self._hasher = Hasher()
        self._since = Hasher()
        self._cut = 0
        fs.make_folder(self.path.parent)
        self.descriptor = fs.create(self.path)

    def append(self, data: memoryview) -> None:
        """Write bytes at the end."""
        self._hasher.update(data)
        self._since.update(data)
        fs.write(self.descriptor, data, self.path)
        self.size += len(data)

    def cut(self) -> str:
        """Return the digest of what was appended since the last cut, or nothing if nothing was."""
        digest = self._since.digest if self.size > self._cut else ""
        self._since, self._cut = Hasher(), self.size
        return digest

    def sync(self) -> None:
        """Wait until all is on the disk."""
        fs.fsync(self.descriptor, self.path)

    def finish(self) -> FileRecord:
        """Sync and close; return the file as a manifest lists it."""
        self.sync()
        self.close()
        return FileRecord(self.name, self.size, self._hasher.digest)

    def close(self) -> None:
        """Close the descriptor; harmless when closed already."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class RowStore(ABC):
    """Takes rows of `width` bytes in order."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = 0

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows of any shape and type that have `width` bytes each."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Read rows that were appended; uint8 `[n, width]`."""

    @abstractmethod
    def flush(self) -> None:
        """Write out what is held back, so that the rows until now can be read from the disk."""

    @property
    @abstractmethod
    def files(self) -> list[AppendedFile]:
        """What is written to."""

    def finish(self) -> list[FileRecord]:
        """Sync and close; return the files as a manifest lists them."""
        self.flush()
        return [file.finish() for file in self.files]

    def close(self) -> None:
        """Close the descriptors; harmless when closed already."""
        for file in self.files:
            file.close()


class WholeRows(RowStore):
    """Rows one after the other, as they are."""

    def __init__(self, folder: Path, name: str, width: int) -> None:
        super().__init__(width)
        self._file = AppendedFile(folder, name)

    @property
    def files(self) -> list[AppendedFile]:
        """The one file."""
        return [self._file]

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        if rows.size:
            self._file.append(bytes_of(rows))

    def read(self, start: int, stop: int) -> Array:
        found = pread_bytes(self._file.descriptor, self._file.path, start * self.width, (stop - start) * self.width)
        return found.reshape(stop - start, self.width)

    def flush(self) -> None:
        """Nothing is held back."""


class ChunkedRows(RowStore):
    """Rows in compressed chunks of `per` rows, beside a file of the offsets at which chunks begin and the last ends."""

    def __init__(self, folder: Path, name: str, index: str, width: int, codec: Codec, per: int) -> None:
        super().__init__(width)
        self._codec = codec
        self._per = per
        self._data = AppendedFile(folder, name)
        self._index = AppendedFile(folder, index)
        self._offsets = [0]
        self._pending: list[Array] = []
        self._held = 0
        self._index.append(_offset(0))

    @property
    def files(self) -> list[AppendedFile]:
        """Data and index."""
        return [self._data, self._index]

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        rows = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8).reshape(-1, self.width)
        self._pending.append(rows.copy())
        self._held += len(rows)
        if self._held >= self._per:
            held = np.concatenate(self._pending)
            whole = len(held) - len(held) % self._per
            for start in range(0, whole, self._per):
                self._put(held[start : start + self._per])
            self._pending, self._held = [held[whole:]], len(held) - whole

    def _put(self, rows: Array) -> None:
        data = self._codec.compress(memoryview(rows.reshape(-1).data))
        self._data.append(memoryview(data))
        self._offsets.append(self._data.size)
        self._index.append(_offset(self._data.size))

    def read(self, start: int, stop: int) -> Array:
        written = self.rows - self._held
        parts = [np.concatenate(self._pending)[max(0, start - written) : stop - written]] if stop > written else []
        if start < written:
            span, layout = (start, min(stop, written)), (self._per, self.width, written)
            offsets = np.array(self._offsets, np.int64)
            data = read_chunks(self._data.descriptor, self._data.path, self._codec, offsets, span, layout)
            parts.insert(0, data)
        return np.concatenate(parts) if parts else np.empty((0, self.width), np.uint8)

    def flush(self) -> None:
        """Write the last chunk, which may have fewer rows."""
        if self._held:
            self._put(np.concatenate(self._pending))
            self._pending, self._held = [], 0


def _offset(offset: int) -> memoryview:
    return memoryview(np.array([offset], "<u8").tobytes())
