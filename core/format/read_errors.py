"""Errors while a file is read: a failing disk, or files that a library finds damaged.

An error of a disk or a file server names the file, and does not count as damage. What libraries raise for damaged files
becomes CorruptDataError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..errors import CorruptDataError, RbtoolError

_FAILED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO})
"""Errors that are not about the file: it may be read well in a minute, or from another machine."""

FETCH_AGAIN = "copy or fetch the dataset again, whole"
"""The hint for a file that is damaged in itself."""
LEAVES_OUT = ", --skip-bad leaves out such episodes"
"""The end of a hint on an error of some episodes; `convert` drops it where it was given --skip-bad."""


def disk_failed(error: BaseException) -> bool:
    """Return whether an error comes from the disk or the file server, rather than from the file's content."""
    return isinstance(error, OSError) and error.errno in _FAILED


def located(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """Give an error of the system the path of the file: calls with a descriptor do not name it."""
    if error.errno is not None and error.filename is None:
        error.filename = os.fspath(path)
    return error


@contextlib.contextmanager
def reading_from(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have errors of the system name this file, as `located` does."""
    try:
        yield
    except OSError as error:
        located(error, path)
        raise


def no_match(error: BaseException) -> Literal[False]:
    """Return that a file is in another format, which `error` shows; an error of the disk is raised again."""
    if disk_failed(error):
        raise error
    return False


_DAMAGED = (
    ValueError, LookupError, EOFError, RuntimeError, ArithmeticError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What libraries raise for damaged files."""


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Raise what libraries raise for damaged files as CorruptDataError; their causes stay chained."""
    try:
        yield
    except (RbtoolError, NotImplementedError):
        raise
    except OSError as error:
        if error.errno is not None:  # the system's own; a library that cannot read a file gives none
            raise
        raise _unreadable(path, error) from error
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CorruptDataError:
    said = " ".join(str(error).split())[:200]
    return CorruptDataError(f"{path} cannot be read ({type(error).__name__}{f': {said}' if said else ''})")
