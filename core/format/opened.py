"""Files of a folder that are opened once, so that all that is read of them is of one generation.

A dataset is replaced by an exchange of folders and removed after a rename; the files of the old one go afterwards. What
is open can be read all the same. So files are opened below a descriptor of their folder and stay open, and
`one_generation` opens them again if the folder at the path was another one before than after. Locks would
also work, but replacing or removing a dataset would have to wait for its readers, or leave its files behind.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from ..errors import CorruptDataError, FormatError, RbtoolError, UsageError
from ..ted import Field
from .contracts import Array
from .digest import digest_bytes, digest_descriptor
from .mapped import digest_mapped
from .regular import open_regular, require_regular

__all__ = ["OpenFiles", "one_generation", "pread_into", "pread_rows"]

_MAPPED = 8 << 20
"""Files of more bytes are looked at through maps; for fewer, setting those up takes longer than a copy."""


class _Closes(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closes)


def one_generation(path: Path, make: Callable[[], _Opened]) -> _Opened:
    """Return what `make` opens at `path`, all of it of the one folder or file that was there all the while.

    `make` must open all that it will ever read. Where something else took the place meanwhile, it is called again.
    """
    while True:
        before = _identity(path)
        try:
            found = make()
        except (RbtoolError, OSError):
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return found
        found.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


class OpenFiles:
    """Files of the folder `root`, each opened at its first use and kept open until `close`; no position is shared.

    `opened` are descriptors by name that are open already, which this takes over; then there are no others. A pickle
    leads to the very same files as long as this process has them open, else to those that are at the path.
    """

    _missing = ""

    def __init__(self, root: Path, opened: Mapping[str, int] | None = None) -> None:
        self.root = root
        self._open: dict[str, int] = dict(opened or {})
        self._folder = -1
        if opened is None:
            self._folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no regular file of that name."""
        descriptor = self._opened(name)
        return None if descriptor < 0 else os.fstat(descriptor).st_size

    def descriptor(self, name: str) -> int:
        """Return the descriptor of a file, to be read by position and left open; CorruptDataError if it is missing."""
        descriptor = self._opened(name)
        if descriptor < 0:
            require_regular(self.root / name)
            raise CorruptDataError(f"{self.root / name} is missing{self._missing}")
        return descriptor

    def place(self, name: str) -> Path:
        """Where a library can open the very same file: the system's link to what is open, where it has such."""
        link = Path(f"/proc/self/fd/{self.descriptor(name)}")
        return link if link.exists() else self.root / name

    def read(self, name: str) -> bytes:
        """Read all bytes of a file."""
        descriptor, parts, offset = self.descriptor(name), [], 0
        # pread takes memory for all that it is asked for, 16 MB for the smallest file if that is the size of a piece
        piece = min(os.fstat(descriptor).st_size + 1, 1 << 24)
        while part := os.pread(descriptor, piece, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def rows(self, name: str, leaf: Field, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a headerless file into a fresh array; one without elements need not be there."""
        if not leaf.row_bytes or start == stop:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        return pread_rows(self.descriptor(name), self.root / name, leaf, start, stop)

    def digest(self, name: str) -> str:
        """Digest of all bytes of a file."""
        descriptor = self.descriptor(name)
        if os.fstat(descriptor).st_size > _MAPPED:
            return digest_mapped(descriptor, self.root / name)
        return digest_descriptor(descriptor)

    def state(self) -> str:
        """Tell one state of the open files from another without reading them: by names, sizes, times and inodes."""
        lines = []
        for name, descriptor in sorted(self._open.items()):
            if descriptor >= 0:
                found = os.fstat(descriptor)
                place = os.path.realpath(self.root / name)
                lines.append(f"{place}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n")
        return "stat:" + digest_bytes("".join(lines).encode(errors="surrogateescape"))

    def again(self) -> Self:
        """Return the same files with descriptors of their own."""
        return type(self)(self.root, {name: os.dup(one) for name, one in self._open.items() if one >= 0})

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        while self._open:
            descriptor = self._open.popitem()[1]
            if descriptor >= 0:
                os.close(descriptor)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_folder" in self.__dict__:  # else it was never opened
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        held = {name: (one, *_inode(one)) for name, one in self._open.items() if one >= 0}
        return _reopened, (type(self), self.root.absolute(), os.getpid(), held)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open what is at the path now."""
        return one_generation(path, lambda: cls(path))

    def _opened(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = self._open_below(name) if self._folder >= 0 else -1
        return self._open[name]

    def _open_below(self, name: str) -> int:
        try:
            descriptor = open_regular(name, relative_to=self._folder)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                return -1
            raise UsageError(
                f"{self.root} has more files than this process may hold open", hint="raise the limit: ulimit -n 65536"
            ) from error
        except FormatError:
            return -1
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return -1


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _reopened(kind: type[OpenFiles], root: Path, process: int, held: Mapping[str, tuple[int, int, int]]) -> OpenFiles:
    """Open files that another process of this machine has open, whatever their names lead to by now."""
    opened: dict[str, int] = {}
    try:
        for name, (descriptor, *inode) in held.items():
            opened[name] = open_regular(f"/proc/{process}/fd/{descriptor}")
            if [*_inode(opened[name])] != inode:
                raise FileNotFoundError(name)  # that process has another file under the number by now
    except (OSError, RbtoolError):
        for one in opened.values():
            os.close(one)
        return kind.at(root)
    return kind(root, opened)


def pread_rows(descriptor: int, path: Path, leaf: Field, start: int, stop: int) -> Array:
    """Read rows `[start, stop)` of a headerless file into a fresh array."""
    array = np.empty((stop - start, *leaf.shape), leaf.numpy)
    pread_into(array, descriptor, path, start * leaf.row_bytes, f"row {stop}")
    return array


def pread_into(array: Array, descriptor: int, path: Path, offset: int, end: str) -> None:
    """Fill an array with the bytes from `offset` on; CorruptDataError, which names `end`, if the file is shorter."""
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    while view:
        got = os.preadv(descriptor, [view], offset)
        if not got:
            raise CorruptDataError(f"{path} ends {len(view):,} bytes before {end}: it was cut")
        view, offset = view[got:], offset + got
