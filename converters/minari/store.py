"""The interface of Minari's storage formats (episodes, columns, rows of text), and its HDF5 storage."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ...core.ted.schema import LONGEST_ROW
from ..files.hdf5 import GroupFile, StoredGroup, text_of_name
from ..files.readers import ColumnForm, ColumnPath, StoredColumn, column_name, reading
from .metadata import HDF5_FILE, SpacePath

DERIVED = frozenset({"id", "total_steps", *(f"rewards_{part}" for part in ("sum", "mean", "std", "max", "min"))})
"""Attributes of an episode that are derived from its rows."""


class StoredEpisode(ABC):
    """One episode, open for reading. Callers read rows from front to back."""

    @abstractmethod
    def columns(self) -> dict[ColumnPath, StoredColumn]:
        """Return all columns, without reading their rows if possible."""

    @abstractmethod
    def form(self, path: ColumnPath) -> ColumnForm:
        """Return how a column is stored."""

    @abstractmethod
    def array(self, path: ColumnPath, start: int, stop: int, form: ColumnForm | None = None) -> Array:
        """Read rows of an `array` column; pass `form` if it is known, so that it is not read again."""

    @abstractmethod
    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        """Read rows of a `text` column (as UTF-8) or of a `bytes` column."""

    @abstractmethod
    def attribute_paths(self) -> Collection[ColumnPath]:
        """Return the paths of `attributes` without reading their values."""

    @abstractmethod
    def attributes(self) -> Mapping[ColumnPath, Any]:
        """Return the attributes of the episode: `("seed",)`, `("options", <name>)` …, perhaps without `DERIVED`."""


class EpisodeStore(ABC):
    """All episodes of a dataset in one storage format. `numbers` are their ids, ascending."""

    numbers: Sequence[int]

    @abstractmethod
    def episode(self, number: int) -> StoredEpisode:
        """Open one episode."""

    @abstractmethod
    def location(self, path: SpacePath) -> ColumnPath:
        """Return the path in the file of a leaf of a space."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return all data files, sorted."""

    def other_names(self) -> list[str]:
        """Return the names of entries that are not episodes."""
        return []

    def close(self) -> None:
        """Close the files."""


_ROWS_AT_ONCE = 64
"""The number of rows of text that are read at a time, which are 4 MB at most."""


class TextLook:
    """What is known of a text column of an episode: the longest row, in bytes, and whether all rows are equal."""

    def __init__(self) -> None:
        self.longest = 0
        self.longest_row = 0
        self.constant = True


def text_rows(episode: StoredEpisode, path: ColumnPath, rows: int) -> Iterator[list[bytes]]:
    """Yield the rows of a text column in bounded lists; the first lists are shorter, to find long rows early."""
    start, size = 0, 1
    while start < rows:
        yield episode.strings(path, start, min(start + size, rows))
        start, size = start + size, min(2 * size, _ROWS_AT_ONCE)


def look_at_text(episode: StoredEpisode, path: ColumnPath, rows: int, what: str) -> TextLook:
    """Read a text column up to the first list with a row that is too long; raise FormatError if it is not UTF-8."""
    look, first, done = TextLook(), None, 0
    for strings in text_rows(episode, path, rows):
        longest = max(range(len(strings)), key=lambda row: len(strings[row]))
        if len(strings[longest]) > look.longest:
            look.longest, look.longest_row = len(strings[longest]), done + longest
        if look.longest > LONGEST_ROW:
            break
        _require_utf8(strings, f"{column_name(path)!r} of {what}")
        first = strings[0] if first is None else first
        look.constant = look.constant and all(row == first for row in strings)
        done += len(strings)
    return look


def _require_utf8(strings: list[bytes], what: str) -> None:
    try:
        b"\0".join(strings).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not UTF-8 text: {error.reason}") from error


_EPISODE = re.compile(rb"episode_(0|[1-9]\d{0,17})")


class Hdf5Store(EpisodeStore):
    """The episodes of `main_data.hdf5`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HDF5_FILE
        self._file: GroupFile | None = None
        self._other_names: list[str] = []
        self.numbers = []
        if not self.path.is_file():
            raise FormatError(f"{self.path} is missing", hint="copy or fetch the dataset again, whole")
        if self.path.stat().st_size:  # a Minari dataset without episodes is an empty file
            self._open()

    def _open(self) -> None:
        self._file = GroupFile(self.path)
        found = {name: _EPISODE.fullmatch(name) for name in self._file.names()}
        self.numbers = sorted(int(match[1]) for match in found.values() if match)
        self._other_names = [text_of_name(name, str(self.path)) for name, match in found.items() if not match]

    def episode(self, number: int) -> StoredEpisode:
        """Open the group of one episode."""
        assert self._file is not None
        with reading(f"episode {number}", self.path):
            return _Hdf5Episode(self._file, self._file.group_id(b"episode_%d" % number), f"episode {number}")

    def location(self, path: SpacePath) -> ColumnPath:
        """Map a path: Tuple elements are named `_index_0`, …; a slash in the name of a Dict entry makes groups."""
        names = (f"_index_{part}" if isinstance(part, int) else part for part in path)
        return tuple(part for name in names for part in name.split("/") if part not in ("", "."))

    def files(self) -> list[Path]:
        """Return the one file."""
        return [self.path]

    def other_names(self) -> list[str]:
        """Return the names of groups and datasets that are not episodes."""
        return self._other_names

    def close(self) -> None:
        """Close the file and all objects opened in it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Hdf5Episode(StoredGroup, StoredEpisode):
    def attribute_paths(self) -> Collection[ColumnPath]:
        return self._paths().keys()

    def attributes(self) -> Mapping[ColumnPath, Any]:
        return {path: self.attribute(name) for path, name in self._paths().items()}

    def _paths(self) -> dict[ColumnPath, str]:
        """Return the name of each attribute, by its path; Minari writes nested options as `options/<name>/<name>`."""
        return {tuple(name.split("/")): name for name in self.attribute_names() if name not in DERIVED}
