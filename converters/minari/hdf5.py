"""Minari's HDF5 storage: `main_data.hdf5` with a group an episode."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import FormatError
from ..files.hdf5 import GroupFile, StoredGroup, text_of_name
from ..files.readers import ColumnPath, reading
from .metadata import HDF5_FILE, SpacePath
from .store import DERIVED, EpisodeStore, StoredEpisode

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
        """The one file."""
        return [self.path]

    def other_names(self) -> list[str]:
        """Groups and datasets that are not episodes."""
        return self._other_names

    def close(self) -> None:
        """Close the file and everything opened in it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Hdf5Episode(StoredGroup, StoredEpisode):
    def attribute_paths(self) -> Collection[ColumnPath]:
        return self._paths().keys()

    def attributes(self) -> Mapping[ColumnPath, Any]:
        return {path: self.attribute(name) for path, name in self._paths().items()}

    def _paths(self) -> dict[ColumnPath, str]:
        """Map paths to names; Minari writes nested options as `options/<name>/<name>`."""
        return {tuple(name.split("/")): name for name in self.attribute_names() if name not in DERIVED}
