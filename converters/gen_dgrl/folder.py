"""Episodes in files of a folder, as an unpacked archive has them, read as if they were an archive."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import CorruptDataError
from ...core.format.contracts import Closing
from ...core.format.digest import open_regular
from ..files.archives import ArchiveMember
from ..files.episode_files import natural_order

SUFFIX = ".npy"


def episode_files(path: Path) -> list[Path]:
    """List the files of episodes in a folder, or in the one folder that it holds, by the numbers in their names."""
    for folder in (path, *_only_folder(path)):
        files = [file for file in folder.iterdir() if file.name.endswith(SUFFIX) and not file.name.startswith(".")]
        if files:
            return sorted(files, key=lambda file: natural_order(file.name))
    return []


def _only_folder(path: Path) -> list[Path]:
    folders = [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]
    return folders if len(folders) == 1 else []


class EpisodeFolder(Closing):
    """The files of episodes, one after the other, as `Archive` has its members. Not for several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = episode_files(path)
        sizes = (file.stat().st_size if file.is_file() else 0 for file in self.files)
        self._stops = list(itertools.accumulate(sizes))
        self._number, self._descriptor = -1, -1

    def members(self) -> Iterator[ArchiveMember]:
        """Yield the files in their order; FormatError for one that is no regular file."""
        start = 0
        for number, (file, stop) in enumerate(zip(self.files, self._stops, strict=True)):
            self._opened(number)
            yield ArchiveMember(file.relative_to(self.path).as_posix(), start, stop - start)
            start = stop

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes of a member; CorruptDataError for a file that was cut since this was made."""
        if not count:
            return b""
        number = bisect.bisect_right(self._stops, position)
        descriptor = self._opened(number)
        at = position - (self._stops[number - 1] if number else 0)
        parts = []
        while count:
            part = os.pread(descriptor, count, at)
            if not part:
                raise CorruptDataError(f"{self.files[number]} became shorter while it was read")
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts)

    def _opened(self, number: int) -> int:
        if number != self._number:
            self.close()
            self._descriptor, self._number = open_regular(self.files[number]), number
        return self._descriptor

    def close(self) -> None:
        """Close the file that is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._number = -1, -1
