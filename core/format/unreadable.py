"""Errors of a disk or a file server that fails while a file is read: they name it, and are not taken for its damage."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Literal

_FAILED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO})
"""Errors that are not about the file: it may be read well in a minute, or from another machine."""

FETCH_AGAIN = "copy or fetch the dataset again, whole"
"""The hint for a file that is damaged in itself."""


def disk_failed(error: BaseException) -> bool:
    """Return whether an error is one of the disk, or of the file server, and none of the file."""
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
