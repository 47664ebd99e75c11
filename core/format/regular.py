"""Opens files for reading that others may have put there: regular files alone.

Opening a FIFO can block for ever, and reading a device may never end.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ..errors import FormatError

__all__ = ["open_regular", "read_regular", "require_regular"]

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: str | os.PathLike[str], *, within: int | None = None, relative_to: int | None = None) -> int:
    """Open a file and return its descriptor; FormatError, without waiting, for what is no regular file.

    `within` is the descriptor of the parent folder; the last name must then be no symbolic link.
    `relative_to` is that of the folder that a relative path counts from; links are followed.
    """
    try:
        if within is None:
            descriptor = os.open(path, _FLAGS, dir_fd=relative_to)
        else:
            descriptor = os.open(Path(path).name, _FLAGS | getattr(os, "O_NOFOLLOW", 0), dir_fd=within)
    except OSError:
        if relative_to is None:
            require_regular(path)  # a socket cannot be opened at all
        raise
    try:
        _require(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read all bytes of a file that is opened as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise FormatError if a FIFO, a socket or a device is at `path`, where a library is about to open a file."""
    with contextlib.suppress(OSError):  # the library says best what else is wrong
        _require(path, Path(path).stat().st_mode)


def _require(path: str | os.PathLike[str], mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise FormatError(f"{os.fspath(path)} is {kind}, a regular file is expected", hint="put the file itself there")
