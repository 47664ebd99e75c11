"""Files opened for reading: regular files only, digested with xxh3-128, with errors that name the file.

The last component of a path is opened without following links and without blocking: a FIFO or a device in a dataset
folder is an error, not a hang. xxh3-128 is fast enough to digest everything that is written.

An error of a disk or a file server does not count as damage. Errors that libraries raise for damaged files become
CorruptDataError (`understood`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from ..errors import CorruptDataError, FormatError, RbtoolError
from ..options import PathLike

_FAILED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO})
"""Errors of the disk or the server, not of the file: a later attempt, or another machine, may read it."""

FETCH_AGAIN = "copy or fetch the dataset again, whole"
"""The hint for a damaged file."""
LEAVES_OUT = ", --skip-bad leaves out such episodes"
"""The end of a hint about damaged episodes; `convert` drops it when called with --skip-bad."""


def disk_failed(error: BaseException) -> bool:
    """Return whether an error comes from the disk or the file server, rather than from the file's content."""
    return isinstance(error, OSError) and error.errno in _FAILED


def located(error: OSError, path: PathLike) -> OSError:
    """Add the path of the file to an error of the operating system; calls with a descriptor do not name it."""
    if error.errno is not None and error.filename is None:
        error.filename = os.fspath(path)
    return error


@contextlib.contextmanager
def reading_from(path: PathLike) -> Iterator[None]:
    """Add the path of this file to errors of the operating system, as `located` does."""
    try:
        yield
    except OSError as error:
        located(error, path)
        raise


def no_match(error: BaseException) -> Literal[False]:
    """Return False for an error that shows that a file is in another format; raise an error of the disk again."""
    if disk_failed(error):
        raise error
    return False


_DAMAGED = (
    ValueError, LookupError, EOFError, RuntimeError, ArithmeticError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""Errors that libraries raise for damaged files."""


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn errors that libraries raise for damaged files into CorruptDataError, with the original as the cause."""
    try:
        yield
    except RbtoolError:
        raise
    except OSError as error:
        if error.errno is not None:  # of the operating system; libraries set no errno for files they cannot read
            raise
        raise _unreadable(path, error) from error
    except _DAMAGED as error:
        if type(error) is NotImplementedError:  # a bug of a reader; pyarrow raises a subclass for unsupported types
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CorruptDataError:
    said = " ".join(str(error).split())[:200]
    return CorruptDataError(f"{path} cannot be read ({type(error).__name__}{f': {said}' if said else ''})")


_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: PathLike, *, within: int | None = None, relative_to: int | None = None) -> int:
    """Open a file and return its descriptor; FormatError, without waiting, if it is not a regular file.

    Args:
        within: the descriptor of the parent folder; then CorruptDataError for a symbolic link.
        relative_to: the descriptor of the folder against which a relative path is resolved; links are followed.
    """
    try:
        if within is None:
            descriptor = os.open(path, _FLAGS, dir_fd=relative_to)
        else:
            descriptor = os.open(Path(path).name, _FLAGS | getattr(os, "O_NOFOLLOW", 0), dir_fd=within)
    except OSError as error:
        if within is not None:
            error.filename = os.fspath(path)  # the system only reports the name inside the folder
            if error.errno == errno.ELOOP:
                raise CorruptDataError(
                    f"{error.filename} is a symbolic link, expected a regular file", hint="put the file itself there"
                ) from error
        if relative_to is None:
            require_regular(path)  # a socket cannot be opened at all
        raise
    try:
        _require(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_folder(path: PathLike, *, follow_links: bool = True) -> int:
    """Open a folder and return its descriptor, which refers to this folder even if another one replaces it."""
    flags = _FLAGS | getattr(os, "O_DIRECTORY", 0)
    return os.open(path, flags if follow_links else flags | getattr(os, "O_NOFOLLOW", 0))


def read_regular(path: PathLike) -> bytes:
    """Read all bytes of a file that is opened as `open_regular` does."""
    with reading_from(path), io.FileIO(os.fspath(path), opener=lambda path, _: open_regular(path)) as file:
        return file.readall()


def require_regular(path: PathLike) -> None:
    """Raise FormatError for a FIFO, a socket or a device, before a library opens `path` as a file."""
    with contextlib.suppress(OSError):  # the library reports other problems best
        _require(path, Path(path).stat().st_mode)


def _require(path: PathLike, mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise FormatError(f"{os.fspath(path)} is {kind}, expected a regular file", hint="put the file itself there")


_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024


def refuse_pointer(path: Path) -> None:
    """Raise CorruptDataError for a pointer of git-lfs, which stands for a file that was not fetched."""
    if path.stat().st_size > _LONGEST_POINTER:
        return
    if read_regular(path).startswith(_POINTER):
        raise CorruptDataError(
            f"{path} is a git-lfs pointer: the file itself is not here",
            hint="fetch the files themselves: git lfs pull, or rbtool download",
        )


PREFIX = "xxh3-128:"
_CHUNK = 1 << 20


class FileRecord(NamedTuple):
    """A file as the manifest lists it: its path inside the folder, its size in bytes, its digest."""

    path: str
    size: int
    digest: str


class Hasher:
    """Computes the digest of bytes as they are written."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._state.update(data)

    @property
    def digest(self) -> str:
        """The digest of the bytes so far, as `xxh3-128:<32 hex digits>`."""
        return PREFIX + self._state.hexdigest()


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """View the bytes of an array in row-major order; it is copied if necessary."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def digest_bytes(data: bytes) -> str:
    """Digest of some bytes."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.digest


def digest_text(text: str) -> str:
    """Return the digest of a text, which may contain lone surrogates for the bytes of paths that are not UTF-8."""
    return digest_bytes(text.encode(errors="surrogatepass"))


def digest_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """Digest of the bytes `[start, stop)` of a file; by default of all."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return digest_descriptor(file.fileno(), start, stop)


def digests_in(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Digest of each file by its path from a folder, which begins with `..` for a file beside the folder."""
    return {Path(os.path.relpath(path, folder)).as_posix(): digest_file(path) for path in files}


def digest_descriptor(descriptor: int, start: int = 0, stop: int | None = None) -> str:
    """Digest of the bytes `[start, stop)` of an open file; by default of all."""
    hasher, buffer = Hasher(), memoryview(bytearray(_CHUNK))
    while got := os.preadv(descriptor, [buffer[: None if stop is None else stop - start]], start):
        hasher.update(buffer[:got])
        start += got
    return hasher.digest


def file_state(file: Path) -> tuple[int, ...]:
    """Return device, inode, size and time of change of a file, which differ after it was changed or replaced."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def digest_of_stats(path: Path) -> str:
    """Identify the state of a file, or of all files in a folder, without reading them.

    Names, sizes, times and inodes count.
    """
    lines = []
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            found = file.stat()
            lines.append(f"{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n")
    return "stat:" + digest_text("".join(lines))


def digest_files(files: Iterable[FileRecord]) -> str:
    """Return one digest over the sorted (path, size, digest) of many files."""
    lines = sorted(f"{file.path}\0{file.size}\0{file.digest}\n" for file in files)
    return digest_text("".join(lines))
