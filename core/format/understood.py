"""What libraries raise for damaged files, raised as our errors."""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import CorruptDataError, RbtoolError

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
