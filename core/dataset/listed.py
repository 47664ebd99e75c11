"""The files that a manifest lists: the small ones are read whole and compared with their digest every time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import CorruptDataError
from .digest import FileRecord, digest_bytes
from .regular import open_regular

__all__ = ["ListedFiles", "changed", "size_problem"]


class ListedFiles:
    """Reads small files of the folder `root`, each compared with its size and digest in `files`."""

    def __init__(self, root: Path, files: Iterable[FileRecord]) -> None:
        self._root = root
        self._files = {file.path: file for file in files}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def size(self, name: str) -> int | None:
        """Return the size of a file as it is listed; None if it is not."""
        file = self._files.get(name)
        return None if file is None else file.size

    def read(self, name: str) -> bytes:
        """Return the bytes of a file; CorruptDataError unless they are those that were written."""
        path, file = self._root / name, self._files.get(name)
        if file is None:
            raise CorruptDataError(f"{path} is not listed in the manifest, which has to list it")
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as opened:
                data = opened.read(file.size + 1)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise CorruptDataError(size_problem(path, file)) from None
        if len(data) == file.size and digest_bytes(data) == file.digest:
            return data
        problem = size_problem(path, file)
        raise CorruptDataError(problem) if problem else changed(path)


def size_problem(path: Path, file: FileRecord) -> str:
    """Say what is wrong with the size of a listed file at `path`; nothing where it is right."""
    if not path.is_file():
        return f"{path} is missing; the manifest lists it"
    found = path.stat().st_size
    return f"{path} has {found:,} bytes, the manifest says {file.size:,}" if found != file.size else ""


def changed(path: Path) -> CorruptDataError:
    """The error for a file whose bytes are not those that were written."""
    return CorruptDataError(f"{path} was changed after it was written: its digest does not match the manifest")
